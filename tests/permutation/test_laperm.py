"""LaPerm against a simulation in NumPy, and what its documentation promises."""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import loops
import numpy as np
import optax
import pytest
import replicas
import support

import optperm
from optperm.placement import replace_targets

pytestmark = pytest.mark.usefixtures("lenient")  # Optax's optimizers are inside


params = support.random_params


def grads(step):
    return support.random_like(params(), step)


def train(tx, p, steps, **options):
    """Params and state after each step of gradients that are drawn for it."""
    return loops.train(tx, p, [grads(step) for step in steps], **options)


def reordered(initial, leaf):
    """The initial values of each column in the order of the leaf's: the paper, word for word."""
    values, rows = support.columns(initial), support.columns(leaf)
    sorting = functools.partial(np.argsort, axis=0, kind="stable")
    values = np.take_along_axis(values, sorting(values.astype(np.float64)), axis=0)
    ranks = sorting(sorting(rows.astype(np.float64)))
    return np.take_along_axis(values, ranks, axis=0).reshape(leaf.shape)


@functools.cache
def trained(sync_every):
    """Params and state after each of ten steps of Adam, in one scan."""
    return train(optperm.laperm(optax.adam(0.3), sync_every), params(), range(10), how="scan")


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


@pytest.mark.filterwarnings("ignore:In .*all weights that enter an output unit are equal")
@pytest.mark.parametrize("dtype", support.DTYPES)
@hypothesis.given(
    shape=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    seed=st.integers(0, 2**32 - 1),
    levels=st.sampled_from([0, 2, 8]),
)
@hypothesis.settings(max_examples=3)
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
            support.DTYPES[dtype]
        )

    initial, start = draw(), draw()
    with jax.enable_x64(dtype == "float64"):
        tx = optperm.laperm(optax.identity(), 1)
        initial = jnp.asarray(initial)
        p, opt_state = jnp.asarray(start), jax.jit(tx.init)(initial)
        for _ in range(2):
            g = draw()
            g[rng.random(shape) < 0.1] = rng.choice([np.nan, np.inf, -np.inf])
            moved = np.asarray(p) + np.where(np.isfinite(g), g, np.zeros_like(g))
            p, opt_state = loops.compiled(tx)(p, opt_state, jnp.asarray(g))
            support.assert_same_bits(p, jnp.asarray(reordered(initial, moved)))
            support.assert_same_bits(optperm.permuted_params(opt_state), p)
            permutation = jax.jit(optperm.export_permutation)(initial, opt_state)
            rebuilt = jax.jit(optperm.apply_permutation)(initial, permutation)
            support.assert_same_bits(rebuilt, p)
        support.assert_permutes(p, initial)


@pytest.mark.parametrize("dtype", support.DTYPES)
def test_the_compiled_sort_gives_the_bits_of_xlas(dtype, monkeypatch):
    """With ties, subnormal numbers, zeros of both signs and a row that holds a NaN."""
    support.require_kernel("ffi")
    rng = np.random.default_rng(0)
    initial, moved = (
        (np.round(rng.normal(size=(40, 3, 5)) * 6) / rng.choice([6, 6e9, 6e40], (40, 3, 5))).astype(
            support.DTYPES[dtype]
        )
        for _ in range(2)
    )
    moved[7, 1, 2] = np.nan
    results = []
    with jax.enable_x64(dtype == "float64"):
        initial = jnp.asarray(initial)
        for kernel in ("ffi", "numpy"):
            monkeypatch.setenv("OPTPERM_KERNEL", kernel)
            tx = optperm.laperm(optax.identity(), 1, output_axes=(1, 2))
            start = jax.jit(tx.init)(initial)
            update = jax.jit(tx.update).lower(initial, start, initial).compile()
            assert ("optperm_reorder_rows" in update.as_text()) == (kernel == "ffi")
            results.append(update(jnp.zeros_like(initial), start, jnp.asarray(moved))[1])
    support.assert_same_bits(results[0].weights, results[1].weights)
    support.assert_same_bits(results[0].ranks, results[1].ranks)
    assert np.mean(np.asarray(results[0].ranks) != np.asarray(start.ranks)) > 0.5


def test_damaged_ranks_are_refused():
    """By the compiled sort: a state whose ranks are no permutation is an error."""
    support.require_kernel("ffi")
    tx = optperm.laperm(optax.identity(), 1)
    opt_state = jax.jit(tx.init)(support.bias(9))
    damaged = opt_state._replace(ranks=opt_state.ranks.at[5].set(9))
    with pytest.raises(
        jax.errors.JaxRuntimeError, match=r"of optperm\.laperm are not permutations"
    ):
        jax.block_until_ready(jax.jit(tx.update)(support.bias(9), damaged, support.bias(9)))


def test_synchronizing_each_step_learns_nothing_where_steps_are_small():
    """No weight gets past its neighbor in one step; in fifty it does, and the loss falls."""
    x = support.normal((64, 10), 0)
    y = x @ jnp.linspace(-1.0, 1.0, 10)
    start = jax.random.permutation(jax.random.key(1), jnp.linspace(-1.0, 1.0, 10))

    def loss_fn(w, _):
        return jnp.mean((x @ w - y) ** 2)

    def end(sync_every):
        tx = optperm.laperm(optax.adam(0.02), sync_every)
        step = loops.make_step(tx, loops.gradient(loss_fn))
        return loops.carry(step, start, tx.init(start), jnp.arange(200))[0]

    support.assert_same_bits(end(1), start)
    learned = end(50)
    support.assert_permutes(learned, start)
    assert loss_fn(learned, ()) < 0.05 * loss_fn(start, ())


@pytest.mark.parametrize("axes", [0, (1, 2), (), lambda path, leaf: leaf.ndim - 1])
def test_export_between_two_synchronizations(axes):
    """With the params it is of them, synchronized; without, of the last synchronization. Of either the
    exported permutation rebuilds the weights bit for bit, along the output axes asked for."""
    initial = {"kernel": support.normal((3, 4, 5), 0), "scale": jnp.float32(2)}
    tx = optperm.laperm(optax.sgd(0.5), 2, output_axes=axes)
    drawn = [support.random_like(initial, index) for index in range(3)]
    p, opt_state = loops.train(tx, initial, drawn, init="jit")[-1]
    export = jax.jit(functools.partial(optperm.export_permutation, output_axes=axes))
    last = optperm.permuted_params(opt_state)
    now = optperm.permuted_params(opt_state, p, output_axes=axes)
    assert not np.array_equal(last["kernel"], now["kernel"])
    for weights, given in [(last, ()), (now, (p,)), (now, (now,))]:
        rebuilt = jax.jit(optperm.apply_permutation)(initial, export(initial, opt_state, *given))
        support.assert_same_bits(rebuilt, weights)
    # As the weights that one more synchronization would place.
    _, next_state = loops.compiled(tx)(p, opt_state, jax.tree.map(jnp.zeros_like, p))
    support.assert_same_bits(optperm.permuted_params(next_state), now)
    with pytest.raises(ValueError, match=r"params\['scale'\]"):
        optperm.export_permutation(initial, opt_state, p | {"scale": jnp.ones(2)})


def test_masked_leaves_are_those_given():
    """Beside another optimizer: its leaves come back as they are, ours synchronized."""
    tx = optax.partition(
        {"permute": optperm.laperm(optax.adam(0.3), 2), "adam": optax.adam(0.1)},
        {"kernel": "permute", "bias": "adam"},
    )
    p, opt_state = train(tx, params(), range(3))[-1]
    full = optperm.permuted_params(opt_state, p)
    assert full["bias"] is p["bias"]
    support.assert_permutes(full["kernel"], params()["kernel"])
    assert not np.array_equal(full["kernel"], optperm.permuted_params(opt_state)["kernel"])
    permutation = optperm.export_permutation(params(), opt_state, p)
    assert permutation["bias"] == optax.MaskedNode()
    rebuilt = optperm.apply_permutation(params(), permutation)
    support.assert_same_bits(rebuilt["kernel"], full["kernel"])


@pytest.mark.parametrize("mapping", ["pmap", "shard_map"])
def test_replicas_that_average_their_gradients_agree(mapping):
    """Four replicas hold the same bits after each step, permutations of the start when synchronized."""
    tx = optperm.laperm(optax.adam(0.3), 2)
    batches = [replicas.stack([grads(4 * index + r) for r in range(4)]) for index in range(4)]
    trail = loops.train(tx, params(), batches, evaluate=averaged, how=mapping, size=4)
    means = [jax.tree.map(lambda g: g.mean(axis=0), batch) for batch in batches]
    both = zip(trail, loops.train(tx, params(), means), strict=True)
    for index, ((p, _), (alone, _)) in enumerate(both):
        got = replicas.take(p, 0)
        for replica in range(1, 4):
            support.assert_same_bits(replicas.take(p, replica), got)
        support.assert_close(got, alone, atol=1e-5, rtol=1e-7)
        if index % 2:
            support.assert_permutes(got, params())


def averaged(p, batch):
    """The mean gradient of all replicas."""
    del p
    return jax.lax.pmean(batch, replicas.AXIS), {}


def test_a_scan_in_checked_shard_map_keeps_its_types():
    """Networks of their own, initialized inside: what varies does from the start, the count never."""
    tx = optperm.laperm(optax.adam(0.3), 2)

    def run(_, part):
        p, opt_state = loops.carry(loops.make_step(tx), part[0], tx.init(part[0]), part[1])
        return opt_state.count, p

    starts = [support.random_params(seed) for seed in range(2)]
    xs = [replicas.stack([grads(9 * r + index) for index in range(4)]) for r in range(2)]
    parts = replicas.stack(starts), replicas.stack(xs)
    counts, p = replicas.share(run, "shard_map", 2)((), parts)
    assert counts.tolist() == [4, 4]
    _, batched = jax.jit(jax.vmap(run, in_axes=(None, 0)))((), parts)
    for index, start in enumerate(starts):
        support.assert_permutes(replicas.take(p, index), start)
        support.assert_same_bits(replicas.take(batched, index), replicas.take(p, index))


def test_gradients_that_are_not_finite_do_no_harm():
    """They count as zeros; Adam's moments stay finite."""
    tx = optperm.laperm(optax.adam(0.3), 2)
    bad = grads(0) | {"bias": jnp.array([1.0, jnp.nan, jnp.inf, -jnp.inf, -1.0])}
    zeros = bad | {"bias": jnp.array([1.0, 0.0, 0.0, 0.0, -1.0])}
    support.assert_same_bits(*(loops.train(tx, params(), [g]) for g in (bad, zeros)))


def test_a_row_with_a_nan_goes_back_to_its_last_order():
    """The rows beside it are synchronized."""
    tx = optperm.laperm(optax.sgd(1.0), 1)
    ((p, opt_state),) = train(tx, params(), [0])
    broken = p | {"kernel": p["kernel"].at[3, 1].set(jnp.nan).at[4, 2].set(jnp.inf)}
    ((after, opt_state),) = train(tx, broken, [1], opt_state=opt_state)
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
    drawn = [support.random_like(start, index) for index in range(3)]
    trail = loops.train(optperm.laperm(optax.adam(0.3), 2), start, drawn)
    assert [p["scale"] for p, _ in trail] == [2.0] * 3
    p, opt_state = trail[-1]
    assert not np.array_equal(p["bias"], start["bias"])
    assert optperm.permuted_params(opt_state, p)["scale"] == 2.0
    moved = optperm.apply_updates(p, jax.tree.map(jnp.ones_like, p), opt_state)
    assert moved["scale"] == 3.0  # by what stands beside it


def test_the_period_may_be_traced():
    """Under `inject_hyperparams` it is a number in the state, which may change."""
    tx = optax.inject_hyperparams(optperm.laperm)(optax.adam(0.3), sync_every=3)
    first = train(tx, params(), range(4))
    p, opt_state = first[-1]
    opt_state.hyperparams["sync_every"] = jnp.int32(5)
    trail = first + train(tx, p, range(4, 6), opt_state=opt_state)
    synchronized = [bool(opt_state.inner_state.synchronized) for _, opt_state in trail]
    assert synchronized == [False, False, True, False, True, False]


def test_in_multi_steps_it_counts_whole_steps():
    """The weights are placed exactly at every second micro-step, and stay there in between."""
    tx = optax.MultiSteps(optperm.laperm(optax.adam(0.3), 1), every_k_schedule=2)
    trail = [p for p, _ in train(tx, params(), range(5))]
    for p in trail:
        support.assert_permutes(p, params())
    support.assert_same_bits(trail[2], trail[1])
    assert not np.array_equal(trail[3]["kernel"], trail[1]["kernel"])


def test_it_may_follow_another_optimizer():
    """After `switch_after` a multiset of trained weights is permuted, and found."""
    tx = optperm.switch_after(2, optax.adam(0.3), optperm.laperm(optax.adam(0.3), 2))
    steps = train(tx, params(), range(5))
    trail, opt_state = [p for p, _ in steps], steps[-1][1]
    support.assert_permutes(trail[3], trail[1])
    support.assert_permutes(optperm.permuted_params(opt_state, trail[-1]), trail[1])
    assert not np.array_equal(trail[3]["kernel"], trail[1]["kernel"])
    assert not np.array_equal(trail[1]["kernel"], params()["kernel"])


def test_targets_of_another_state():
    """The weights of the other, in its order; count and moments stay."""
    tx = optperm.laperm(optax.adam(0.3), 1)
    start, ((_, other),) = tx.init(params()), train(tx, params(), [0])
    merged = replace_targets(start, other)
    support.assert_same_bits((merged.weights, merged.ranks), (other.weights, other.ranks))
    support.assert_same_bits((merged.count, merged.inner_state), (start.count, start.inner_state))


def test_constant_rows_are_warned_of():
    """A zero bias goes back to zero at every synchronization: said once, with its own remedy."""
    start = params() | {"bias": jnp.zeros(5)}
    tx = optperm.laperm(optax.sgd(0.1), 10)
    with pytest.warns(UserWarning, match=r"In bias all weights.*optperm.laperm\(optax.adam"):
        opt_state = tx.init(start)
    tx.update(grads(0), opt_state, start)  # warns no more: pytest makes an error of a warning
