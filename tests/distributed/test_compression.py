"""What is sent of compressed contributions, and what is held back."""

import functools

import jax
import jax.numpy as jnp
import loops
import numpy as np
import optax
import pytest
import replicas
import support

import optperm
from optperm.distributed import Compression
from optperm.distributed import _compression as compression
from optperm.distributed._replicas import Replicas


@functools.partial(jax.jit, static_argnums=0)
def sent_of(compress, leaf):
    """Return what is decoded of what is sent of a leaf."""
    sent = compression.encode(compress, leaf)
    return compression.decode(compress, sent, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))


def sum_of_one(compress, leaf, held, weight=None):
    """Return what one replica sends of a leaf, how much it counts, and what it holds back."""
    own, number, rest, _ = compression.sum_compressed(
        compress, leaf, held, jnp.array(True), Replicas(None, ()), weight
    )
    return np.asarray(own), float(number), rest


def test_bytes_say_what_was_sent():
    """What is decoded is within half a level, zero is zero, and the bytes are as few as the bits say."""
    for bits, shape in ((2, ()), (4, (9, 100)), (8, (300,)), (1, (600,))):
        leaf = np.array(np.random.default_rng(0).normal(size=shape), np.float32)
        leaf = np.where(np.arange(leaf.size).reshape(shape) % 3 == 1, np.float32(0), leaf)
        compress = Compression(bits=bits)
        decoded = np.asarray(sent_of(compress, leaf))
        flat = np.abs(np.pad(leaf.reshape(-1), (0, -leaf.size % 256))).reshape(-1, 256)
        if bits == 1:  # the sign, times the mean magnitude of a run of 256
            there = np.clip(leaf.size - 256 * np.arange(len(flat)), 0, 256)
            scale = np.repeat(flat.sum(axis=1) / there, 256)[: leaf.size]
            np.testing.assert_allclose(decoded, np.where(leaf >= 0, scale, -scale), rtol=1e-5)
        else:
            half = np.repeat(flat.max(axis=1), 256)[: leaf.size] / (2 ** (bits - 1) - 1) / 2
            assert (np.abs(decoded - leaf).reshape(-1) <= half * (1 + 1e-5)).all()
            assert (decoded[leaf == 0] == 0).all()
        encoded = jax.eval_shape(functools.partial(compression.encode, compress), leaf)
        found = sum(part.size * part.dtype.itemsize for part in jax.tree.leaves(encoded))
        padded = -(-leaf.size // 256) * 256 if leaf.size > 256 else -(-leaf.size // 8) * 8
        assert found == padded * bits // 8 + 4 * len(flat)


@pytest.mark.parametrize(
    ("compress", "size"), [(Compression(bits=1), 4), (Compression(1.0, bits=1), 4097)]
)
def test_one_bit_is_the_mean_magnitude_of_the_entries_there_are(compress, size):
    """What is the same everywhere is sent whole, in leaves of any size: padding has no part in it."""
    leaf = np.full(size, -2.0, np.float32)
    np.testing.assert_allclose(sent_of(compress, leaf), leaf, rtol=1e-5)


@pytest.mark.parametrize("bits", [1, 2, 8])
def test_zeros_among_the_largest_stay_zero(bits):
    """With one bit, whose scale is the mean magnitude of those that are not zero, they do so too."""
    leaf = np.zeros(64, np.float32)
    leaf[[3, 10, 50]] = 2.0, -1.0, 3.0
    sent = np.asarray(sent_of(Compression(1 / 4, bits=bits), leaf))
    assert (sent[leaf == 0] == 0).all()
    if bits == 1:
        np.testing.assert_allclose(sent, 2.0 * np.sign(leaf), rtol=1e-6)


def test_the_largest_and_the_smallest_numbers_are_sent():
    """In every number of bits, within a jitted program, where a division may become a product."""
    leaf = np.float32([3e38, -3e38, 1.5e38, 0.0])
    for bits in (2, 4, 8):
        compress = Compression(bits=bits)
        level = 3e38 / (2 ** (bits - 1) - 1)
        found = np.asarray(sent_of(compress, leaf), float)
        assert (np.abs(found - leaf) <= level / 2 * (1 + 1e-5)).all()
        assert jnp.isfinite(sent_of(compress, leaf * np.float32(1e-38) * np.float32(1e-4))).all()


def test_the_largest_entries_are_sent_exactly_and_the_rest_is_held_back():
    """Of each chunk; with a weight of 0 nothing is sent, so nothing is taken out of what was held."""
    leaf, compress = support.normal((8192,)), Compression(1 / 32)
    own, number, rest = sum_of_one(compress, leaf, jnp.zeros_like(leaf))
    kept = np.flatnonzero(own)
    for chunk in (np.arange(4096), np.arange(4096, 8192)):
        largest = chunk[np.argsort(-np.abs(leaf[chunk]))[:128]]
        assert set(largest) == set(kept) & set(chunk)
    support.assert_same_bits(own[kept], leaf[kept])
    support.assert_same_bits(rest, jnp.where(own == 0, leaf, 0.0))
    assert number == 1
    own, number, rest = sum_of_one(compress, leaf, jnp.ones_like(leaf), weight=0.0)
    assert number == 0
    assert not own.any()
    support.assert_same_bits(rest, jnp.ones_like(leaf))


def test_parts_that_were_held_back_decay_before_they_are_sent():
    """Of e = 0.5 * 4 + Delta the largest eighth is sent, and the rest is held back."""
    leaf = support.normal((64,))
    own, _, rest = sum_of_one(Compression(1 / 8, decay=0.5), leaf, jnp.full_like(leaf, 4.0))
    assert np.count_nonzero(own) == 8
    support.assert_close(own + rest, leaf + 2.0, rtol=1e-6)


def test_a_residual_that_overflows_begins_again():
    """The replica sits out, counts it, and takes part again."""
    options = {"axis_name": replicas.AXIS, "compress": Compression(bits=8)}
    tx = optperm.diloco(optax.sgd(0.1), optax.sgd(1.0), every=2, **options)
    opt_state = jax.vmap(tx.init)(np.zeros((2, 1), np.float32))
    opt_state = opt_state._replace(residual=np.float32([[0.0], [3e38]]))
    params = np.float32([[0.0], [-3e38]])
    step = replicas.MAPPINGS["vmap"](loops.make_step(tx), 2)
    for _ in range(8):
        params, opt_state = step(params, opt_state, np.ones((2, 1), np.float32))
    assert jnp.isfinite(opt_state.residual).all()
    assert opt_state.skipped.tolist() == [0, 1]
    np.testing.assert_allclose(params, -0.8, atol=0.05)
