"""LaPerm against a simulation in NumPy, and what its documentation promises."""

import functools
import warnings

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
import replicas
import support
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import optperm
from optperm.placement import replace_targets

pytestmark = pytest.mark.usefixtures("lenient")  # Optax's optimizers are inside


def params():
    return support.random_params()


def grads(step):
    return support.random_like(params(), step)


def step(tx, p, opt_state, g):
    updates, opt_state = tx.update(g, opt_state, p)
    return optperm.apply_updates(p, updates, opt_state), opt_state


def reordered(initial, leaf):
    """The initial values of each column in the order of the leaf's: the paper, word for word."""
    values, rows = (
        x.reshape(-1, x.shape[-1]) if x.ndim > 1 else x[:, None] for x in (initial, leaf)
    )
    order = np.argsort(values.astype(np.float64), axis=0, kind="stable")
    values = np.take_along_axis(values, order, axis=0)
    ranks = np.argsort(
        np.argsort(rows.astype(np.float64), axis=0, kind="stable"), axis=0, kind="stable"
    )
    return np.take_along_axis(values, ranks, axis=0).reshape(leaf.shape)


@functools.cache
def trained(sync_every, steps=10, rate=0.3):
    """Params and state after each step of Adam, in one scan."""
    tx = optperm.laperm(optax.adam(rate), sync_every)
    xs = jax.tree.map(lambda *gs: jnp.stack(gs), *(grads(index) for index in range(steps)))

    def body(carry, g):
        carry = step(tx, *carry, g)
        return carry, carry

    _, trail = jax.jit(lambda p: jax.lax.scan(body, (p, tx.init(p)), xs))(params())
    return [replicas.take(trail, index) for index in range(steps)]


def slower(count):
    return jnp.where(count < 4, 2, 3)


@pytest.mark.parametrize(
    ("sync_every", "synced_after"), [(3, {3, 6, 9}), (slower, {2, 4, 6, 9}), (1, set(range(1, 11)))]
)
def test_is_adam_with_the_weights_put_back(sync_every, synced_after):
    """Between synchronizations Adam in NumPy, whose moments live on; at them the sorted values, every
    bit. The state tells which, and the weights as of the last one."""
    update = replicas.adam(0.3)
    for name, initial in params().items():
        p, adam_state, last = np.float64(initial), None, np.asarray(initial)
        for index, (after, opt_state) in enumerate(trained(sync_every)):
            move, adam_state = update(adam_state, np.float64(grads(index)[name]))
            p = p + move
            is_synced = index + 1 in synced_after
            assert opt_state.synchronized == is_synced
            np.testing.assert_allclose(
                optperm.permuted_params(opt_state, after)[name],
                reordered(np.asarray(initial), p),
                rtol=0,
            )
            if is_synced:
                last = reordered(np.asarray(initial), p)
                p = np.float64(last)
                support.assert_same_bits(after[name], jnp.asarray(last))
            np.testing.assert_allclose(after[name], p, rtol=0, atol=1e-5)  # Adam in float32
            support.assert_same_bits(optperm.permuted_params(opt_state)[name], jnp.asarray(last))
        assert name == "bias" or np.mean(last != np.asarray(initial)) > 0.3


DTYPES = {
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "float32": np.float32,
    "float64": np.float64,
}


@pytest.mark.filterwarnings("ignore:In .*all weights that enter an output unit are equal")
@pytest.mark.parametrize("dtype", DTYPES)
@hypothesis.given(
    shape=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    seed=st.integers(0, 2**32 - 1),
    levels=st.sampled_from([0, 2, 8]),
)
@hypothesis.settings(max_examples=4)
def test_every_row_is_its_initial_values_in_the_order_of_the_current_ones(
    dtype, shape, seed, levels
):
    """Twice in a row, for any shape, with ties, zeros of both signs and gradients that are not finite:
    bit for bit what NumPy's stable sorts give, and what the exported permutation rebuilds."""
    rng = np.random.default_rng(seed)

    def draw():
        x = rng.normal(size=shape)
        x = np.round(x * levels) / levels if levels else x
        return np.where(rng.random(shape) < 0.2, rng.choice([0.0, -0.0], size=shape), x).astype(
            DTYPES[dtype]
        )

    initial, start = draw(), draw()
    with jax.enable_x64(dtype == "float64"):
        tx = optperm.laperm(optax.identity(), 1)
        p, opt_state, update = jnp.asarray(start), tx.init(jnp.asarray(initial)), jax.jit(tx.update)
        for _ in range(2):
            g = draw()
            g[rng.random(shape) < 0.1] = rng.choice([np.nan, np.inf, -np.inf])
            moved = np.asarray(p) + np.where(np.isfinite(g), g, np.zeros_like(g))
            updates, opt_state = update(jnp.asarray(g), opt_state, p)
            p = optperm.apply_updates(p, updates, opt_state)
            support.assert_same_bits(p, jnp.asarray(reordered(initial, moved)))
            support.assert_same_bits(optperm.permuted_params(opt_state), p)
            permutation = optperm.export_permutation(jnp.asarray(initial), opt_state)
            support.assert_same_bits(optperm.apply_permutation(initial, permutation), p)
        support.assert_permutes(p, initial)


def test_synchronizing_each_step_learns_nothing_where_steps_are_small():
    """No weight gets past its neighbor in one step; in fifty it does, and the loss falls."""
    x = jax.random.normal(jax.random.key(0), (64, 10))
    y = x @ jnp.linspace(-1.0, 1.0, 10)
    start = jax.random.permutation(jax.random.key(1), jnp.linspace(-1.0, 1.0, 10))

    def loss_fn(w):
        return jnp.mean((x @ w - y) ** 2)

    def train(sync_every):
        tx = optperm.laperm(optax.adam(0.02), sync_every)

        def body(carry, _):
            return step(tx, *carry, jax.grad(loss_fn)(carry[0])), None

        return jax.jit(lambda w: jax.lax.scan(body, (w, tx.init(w)), length=200)[0][0])(start)

    support.assert_same_bits(train(1), start)
    learned = train(50)
    support.assert_permutes(learned, start)
    assert loss_fn(learned) < 0.05 * loss_fn(start)


@pytest.mark.parametrize("axes", [0, (1, 2), (), lambda path, leaf: leaf.ndim - 1])
def test_export_between_two_synchronizations(axes):
    """With the params it is of them, synchronized; without, of the last synchronization. Of either the
    exported permutation rebuilds the weights bit for bit, along the output axes asked for."""
    initial = {"kernel": jax.random.normal(jax.random.key(0), (3, 4, 5)), "scale": jnp.float32(2)}
    tx = optperm.laperm(optax.sgd(0.5), 2, output_axes=axes)
    p, opt_state = initial, tx.init(initial)
    for index in range(3):
        p, opt_state = step(tx, p, opt_state, support.random_like(initial, index))
    last = optperm.permuted_params(opt_state)
    now = optperm.permuted_params(opt_state, p, output_axes=axes)
    assert not np.array_equal(last["kernel"], now["kernel"])
    for weights, given in [(last, ()), (now, (p,)), (now, (now,))]:
        permutation = optperm.export_permutation(initial, opt_state, *given, output_axes=axes)
        support.assert_same_bits(optperm.apply_permutation(initial, permutation), weights)
    # As the weights that one more synchronization would place.
    _, next_state = step(tx, p, opt_state, jax.tree.map(jnp.zeros_like, p))
    support.assert_same_bits(optperm.permuted_params(next_state), now)
    with pytest.raises(ValueError, match=r"params\['scale'\]"):
        optperm.export_permutation(initial, opt_state, p | {"scale": jnp.ones(2)})


def test_masked_leaves_are_those_given():
    """Beside another optimizer: its leaves come back as they are, ours synchronized."""
    tx = optax.partition(
        {"permute": optperm.laperm(optax.adam(0.3), 2), "adam": optax.adam(0.1)},
        {"kernel": "permute", "bias": "adam"},
    )
    p, opt_state = params(), tx.init(params())
    for index in range(3):
        p, opt_state = step(tx, p, opt_state, grads(index))
    full = optperm.permuted_params(opt_state, p)
    assert full["bias"] is p["bias"]
    support.assert_permutes(full["kernel"], params()["kernel"])
    assert not np.array_equal(full["kernel"], optperm.permuted_params(opt_state)["kernel"])
    permutation = optperm.export_permutation(params(), opt_state, p)
    assert permutation["bias"] == optax.MaskedNode()
    rebuilt = optperm.apply_permutation(params(), permutation)
    support.assert_same_bits(rebuilt["kernel"], full["kernel"])


@pytest.mark.parametrize("mapping", replicas.MAPPINGS)
def test_replicas_that_average_their_gradients_agree(mapping):
    """Four replicas hold the same bits after each step, permutations of the start when synchronized."""
    tx = optperm.laperm(optax.adam(0.3), 2)
    batches = [replicas.stack([grads(4 * index + r) for r in range(4)]) for index in range(4)]

    def evaluate(p, batch):
        return jax.lax.pmean(batch, replicas.AXIS), {}

    trail = replicas.train(tx, params(), batches, size=4, mapping=mapping, evaluate=evaluate)
    alone = params(), tx.init(params())
    for index, (p, _) in enumerate(trail):
        alone = step(tx, *alone, jax.tree.map(lambda g: g.mean(axis=0), batches[index]))
        for replica in range(1, 4):
            support.assert_same_bits(replicas.take(p, replica), replicas.take(p, 0))
        got = replicas.take(p, 0)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), got, alone[0])
        if index % 2:
            support.assert_permutes(got, params())


def test_a_scan_in_checked_shard_map_keeps_its_types():
    """Networks of their own, initialized inside: what varies does from the start, the count never."""
    tx = optperm.laperm(optax.adam(0.3), 2)
    mesh = Mesh(np.array(jax.devices()[:2]), (replicas.AXIS,))
    each = P(replicas.AXIS)

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(each, each), out_specs=(each, P()))
    def train(p, batches):
        p, batches = replicas.take((p, batches), 0)
        (p, opt_state), _ = jax.lax.scan(
            lambda carry, g: (step(tx, *carry, g), None), (p, tx.init(p)), batches
        )
        return jax.tree.map(lambda leaf: leaf[None], p), opt_state.count

    starts = [support.random_params(seed) for seed in range(2)]
    xs = [replicas.stack([grads(9 * r + index) for index in range(4)]) for r in range(2)]
    p, count = jax.jit(train)(replicas.stack(starts), replicas.stack(xs))
    assert count == 4
    batched, _ = jax.jit(
        jax.vmap(
            lambda p, xs: jax.lax.scan(
                lambda carry, g: (step(tx, *carry, g), None), (p, tx.init(p)), xs
            )[0]
        )
    )(replicas.stack(starts), replicas.stack(xs))
    for index, start in enumerate(starts):
        support.assert_permutes(replicas.take(p, index), start)
        support.assert_same_bits(replicas.take(batched, index), replicas.take(p, index))


def test_gradients_that_are_not_finite_do_no_harm():
    """They count as zeros; Adam's moments stay finite."""
    tx = optperm.laperm(optax.adam(0.3), 2)
    bad = grads(0) | {"bias": jnp.array([1.0, jnp.nan, jnp.inf, -jnp.inf, -1.0])}
    zeros = bad | {"bias": jnp.array([1.0, 0.0, 0.0, 0.0, -1.0])}
    for got, wanted in zip(
        *(jax.tree.leaves(step(tx, params(), tx.init(params()), g)) for g in (bad, zeros)),
        strict=True,
    ):
        support.assert_same_bits(got, wanted)


def test_a_row_with_a_nan_goes_back_to_its_last_order():
    """The rows beside it are synchronized."""
    tx = optperm.laperm(optax.sgd(1.0), 1)
    p, opt_state = step(tx, params(), tx.init(params()), grads(0))
    broken = p | {"kernel": p["kernel"].at[3, 1].set(jnp.nan).at[4, 2].set(jnp.inf)}
    after, opt_state = step(tx, broken, opt_state, grads(1))
    support.assert_permutes(after, params())
    support.assert_same_bits(after["kernel"][:, 1], p["kernel"][:, 1])
    assert after["kernel"][4, 2] == params()["kernel"][:, 2].max()
    wanted = reordered(np.asarray(params()["kernel"]), np.asarray(p["kernel"] - grads(1)["kernel"]))
    support.assert_same_bits(after["kernel"][:, 3:], jnp.asarray(wanted[:, 3:]))
    support.assert_same_bits(
        optperm.apply_permutation(params(), optperm.export_permutation(params(), opt_state)), after
    )


def test_scalars_and_empty_leaves_are_left_alone():
    """A scalar keeps its value at every step, an empty leaf does no harm."""
    start = {"scale": jnp.float32(2.0), "none": jnp.zeros((0, 3)), "bias": support.bias(6)}
    tx = optperm.laperm(optax.adam(0.3), 2)
    p, opt_state = start, tx.init(start)
    for index in range(3):
        p, opt_state = step(tx, p, opt_state, support.random_like(start, index))
        assert p["scale"] == 2.0
    assert not np.array_equal(p["bias"], start["bias"])
    assert optperm.permuted_params(opt_state, p)["scale"] == 2.0
    moved = optperm.apply_updates(p, jax.tree.map(jnp.ones_like, p), opt_state)
    assert moved["scale"] == 3.0  # by what stands beside it


def test_the_period_may_be_traced():
    """Under `inject_hyperparams` it is a number in the state, which may change."""
    tx = optax.inject_hyperparams(optperm.laperm)(optax.adam(0.3), sync_every=3)
    p, opt_state = params(), tx.init(params())
    run = jax.jit(functools.partial(step, tx))
    for index in range(6):
        if index == 4:
            opt_state.hyperparams["sync_every"] = jnp.int32(5)
        p, opt_state = run(p, opt_state, grads(index))
        assert opt_state.inner_state.synchronized == (index + 1 in (3, 5))


def test_in_multi_steps_it_counts_whole_steps():
    """The weights are placed exactly at every second micro-step, and stay there in between."""
    tx = optax.MultiSteps(optperm.laperm(optax.adam(0.3), 1), every_k_schedule=2)
    p, opt_state, run = params(), tx.init(params()), jax.jit(functools.partial(step, tx))
    trail = []
    for index in range(5):
        p, opt_state = run(p, opt_state, grads(index))
        support.assert_permutes(p, params())
        trail.append(p)
    support.assert_same_bits(trail[2], trail[1])
    assert not np.array_equal(trail[3]["kernel"], trail[1]["kernel"])


def test_it_may_follow_another_optimizer():
    """After `switch_after` a multiset of trained weights is permuted, and found."""
    tx = optperm.switch_after(2, optax.adam(0.3), optperm.laperm(optax.adam(0.3), 2))
    p, opt_state, trail = params(), tx.init(params()), []
    for index in range(5):
        p, opt_state = step(tx, p, opt_state, grads(index))
        trail.append(p)
    support.assert_permutes(trail[3], trail[1])
    support.assert_permutes(optperm.permuted_params(opt_state, p), trail[1])
    assert not np.array_equal(trail[3]["kernel"], trail[1]["kernel"])
    assert not np.array_equal(trail[1]["kernel"], params()["kernel"])


def test_targets_of_another_state():
    """The weights of the other, in its order; count and moments stay."""
    tx = optperm.laperm(optax.adam(0.3), 1)
    start = tx.init(params())
    _, other = step(tx, params(), start, grads(0))
    merged = replace_targets(start, other)
    support.assert_same_bits((merged.weights, merged.ranks), (other.weights, other.ranks))
    support.assert_same_bits((merged.count, merged.inner_state), (start.count, start.inner_state))


def test_constant_rows_are_warned_of():
    """A zero bias goes back to zero at every synchronization: said once, with its own remedy."""
    start = params() | {"bias": jnp.zeros(5)}
    tx = optperm.laperm(optax.sgd(0.1), 10)
    with pytest.warns(UserWarning, match=r"In bias all weights.*optperm.laperm\(optax.adam"):
        opt_state = tx.init(start)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tx.update(grads(0), opt_state, start)
