"""What is sent of compressed contributions, and what is held back."""

import functools
import itertools
import math

import chex
import jax
import jax.numpy as jnp
import loops
import numpy as np
import optax
import pytest
import replicas
import support
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from replicas import AXIS

import optperm
from optperm.distributed import Compression
from optperm.distributed import _compression as compression
from optperm.distributed._replicas import Replicas


@functools.partial(jax.jit, static_argnums=0)
def sent_of(compress, leaf):
    """Return what is decoded of what is sent of a leaf."""
    stack = jnp.asarray(leaf)[None]
    sent = compression.encode(compress, stack)
    return compression.decode(compress, sent, jax.ShapeDtypeStruct(stack.shape, stack.dtype))[0]


def test_bytes_say_what_was_sent():
    """What is decoded is within half a level, zero is zero, and the bytes are as few as the bits say."""
    for bits, shape in ((2, ()), (4, (9, 100)), (8, (300,)), (1, (600,)), (1, (4,))):
        compress, size = Compression(bits=bits), math.prod(shape)
        leaf = np.float32(np.random.default_rng(0).normal(size=size))
        leaf = np.where(np.arange(size) % 3 == 1, np.float32(0), leaf)
        decoded = np.asarray(sent_of(compress, leaf.reshape(shape))).reshape(-1)
        runs = [np.abs(leaf[start : start + 256]) for start in range(0, size, 256)]
        if bits == 1:  # the sign, times the mean magnitude of a run of 256, without its padding
            scale = np.concatenate([np.full(len(run), run.mean()) for run in runs])
            np.testing.assert_allclose(decoded, np.where(leaf >= 0, scale, -scale), rtol=1e-5)
        else:
            scale = np.concatenate([np.full(len(run), run.max()) for run in runs])
            half = scale / (2 ** (bits - 1) - 1) / 2
            assert (np.abs(decoded - leaf) <= half * (1 + 1e-5)).all()
            assert (decoded[leaf == 0] == 0).all()
        encoded = jax.eval_shape(functools.partial(compression.encode, compress), leaf[None])
        found = sum(part.size * part.dtype.itemsize for part in jax.tree.leaves(encoded))
        chunk = 256 if size > 256 else 8
        assert found == -(-size // chunk) * chunk * bits // 8 + 4 * len(runs)


@pytest.mark.parametrize("bits", [1, 2, 8])
def test_zeros_among_the_largest_stay_zero(bits):
    """With one bit, whose scale is the mean magnitude of those that are not zero, they do so too."""
    leaf = np.zeros(64, np.float32)
    leaf[[3, 10, 50]] = 2.0, -1.0, 3.0
    sent = np.asarray(sent_of(Compression(1 / 4, bits=bits), leaf))
    assert (sent[leaf == 0] == 0).all()
    if bits == 1:
        np.testing.assert_allclose(sent, 2.0 * np.sign(leaf), rtol=1e-6)


@pytest.mark.parametrize(
    ("fraction", "bits", "dtype"),
    support.every_night(
        [
            (*encoder, dtype)
            for encoder in [(None, 1), (None, 4), (1 / 4, None), (1 / 4, 1), (1 / 4, 4)]
            for dtype in ("float32", "float64")
        ],
        [(None, 1, "float64"), (None, 4, "float32"), (1 / 4, 1, "float32")],
    ),
)
def test_replicas_in_rows_send_what_each_sends_alone(fraction, bits, dtype, x64):
    """With x64, for each encoder: under jax.vmap, a sort replaces the top_k of one replica."""
    send = functools.partial(sent_of, Compression(fraction, bits=bits))
    both = jax.jit(lambda rows: (jax.vmap(send)(rows), jax.lax.map(send, rows)))
    sent, alone = both(support.normal((3, 70), dtype=np.dtype(dtype)))
    assert sent.dtype == dtype
    np.testing.assert_allclose(sent, alone, rtol=1e-6)


ENCODERS = {
    "4 bits": Compression(bits=4),
    "largest": Compression(1 / 4),
    "largest in 2 bits": Compression(1 / 4, bits=2),
    "1 bit": Compression(bits=1),
}


@pytest.mark.parametrize(
    ("encoder", "lead"),
    support.every_night(
        itertools.product(ENCODERS, [(), (AXIS,)]), [("largest", ())], slow=[("4 bits", (AXIS,))]
    ),
)
def test_shards_on_an_explicit_mesh_step_as_the_whole_does(encoder, lead):
    """Of one replica, and of two replicas that are sharded themselves; the residual stays sharded."""
    mesh = jax.make_mesh((2, 4), (AXIS, "model"), axis_types=(AxisType.Explicit,) * 2)
    rows, axis_name = (2,) * len(lead), AXIS if lead else None
    start = {"kernel": support.normal((*rows, 16, 8)), "bias": support.normal((*rows, 8))}
    specs = {"kernel": P(*lead, None, "model"), "bias": P(*lead, "model")}
    options = {"compress": ENCODERS[encoder], "axis_name": axis_name}
    tx = optperm.diloco(optax.sgd(0.1), every=1, **options)

    def step(params):
        return tx.update(params, tx.init(params), params)

    over = functools.partial(jax.vmap, axis_name=AXIS) if lead else lambda step, **_: step
    with jax.set_mesh(mesh):
        shardings = jax.tree.map(functools.partial(NamedSharding, mesh), specs)
        params = jax.device_put(start, shardings)
        updates, state = jax.jit(over(step, spmd_axis_name=AXIS))(params)
    assert state.residual["kernel"].sharding.spec == specs["kernel"]
    wanted, _ = jax.jit(over(step))(start)
    chex.assert_trees_all_close(jax.device_get(updates), wanted, atol=1e-6, rtol=0)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_the_largest_and_the_smallest_numbers_are_sent(bits):
    """Within a jitted program, where a division may become a product."""
    leaf, compress = np.float32([3e38, -3e38, 1.5e38, 0.0]), Compression(bits=bits)
    half = 3e38 / (2 ** (bits - 1) - 1) / 2
    assert (np.abs(np.float64(sent_of(compress, leaf)) - leaf) <= half * (1 + 1e-5)).all()
    assert jnp.isfinite(sent_of(compress, leaf * np.float32(1e-38) * np.float32(1e-4))).all()


def test_the_largest_entries_are_sent_exactly_and_the_rest_is_held_back():
    """Of each chunk of e = 0.5 * 4 + Delta; with a weight of 0 nothing is taken out of what was held."""
    delta, held = support.normal((6000,)), np.full(6000, 4.0, np.float32)
    compress, alone = Compression(1 / 32, decay=0.5), Replicas(None, ())

    @jax.jit
    def give(weight):
        given = [delta[None]], [held[None]], jnp.array(True), alone, weight
        sent, (rest,), _ = compression.encode_contribution(compress, *given)
        (own,), number = sent.sum(weight, alone)
        return own[0], number, rest[0]

    own, number, rest = map(np.asarray, give(np.float32(1.0)))
    e, kept = np.asarray(delta) + 2, np.flatnonzero(own)
    for chunk in (np.arange(4096), np.arange(4096, 6000)):
        largest = chunk[np.argsort(-np.abs(e[chunk]))[:128]]
        assert set(largest) == set(kept) & set(chunk)
    support.assert_same_bits(own[kept], e[kept])
    support.assert_same_bits(rest, np.where(own == 0, e, np.float32(0)))
    assert number == 1
    own, number, rest = map(np.asarray, give(np.float32(0.0)))
    assert number == 0
    assert not own.any()
    support.assert_same_bits(rest, held)


def test_a_residual_that_overflows_begins_again():
    """The replica sits out, counts it, and takes part again."""
    options = {"axis_name": replicas.AXIS, "compress": Compression(bits=8)}
    tx = optperm.diloco(optax.sgd(0.1), optax.sgd(1.0), every=2, **options)
    opt_state = jax.jit(jax.vmap(tx.init))(np.zeros((2, 1), np.float32))
    opt_state = opt_state._replace(residual=np.float32([[0.0], [3e38]]))
    start, grads = np.float32([[0.0], [-3e38]]), [np.ones((2, 1), np.float32)] * 8
    trail = loops.train(tx, start, grads, how="vmap", size=2, opt_state=opt_state)
    params, opt_state = trail[-1]
    assert jnp.isfinite(opt_state.residual).all()
    assert opt_state.skipped.tolist() == [0, 1]
    np.testing.assert_allclose(params, -0.8, atol=0.05)
