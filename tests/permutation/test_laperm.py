"""LaPerm against a simulation in NumPy, and what its documentation promises."""

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
from optperm import LeafAxes
from optperm.exact import replace_targets
from optperm.permutation import _cycles as cycles
from optperm.permutation import apply_permutation, export_permutation, permuted_params

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


def slower(count):
    return jnp.where(count < 4, 2, 3)


@pytest.mark.parametrize(
    ("every", "synced_after"),
    [
        pytest.param(3, {3, 6, 9}, marks=pytest.mark.exhaustive),
        (slower, {2, 4, 6, 9}),
    ],
)
def test_laperm_of_adam_is_adam_with_the_weights_put_back(every, synced_after):
    """Between synchronizations Adam in NumPy, whose moments live on; at them the sorted values, every
    bit. The state tells which, and the weights as of the last one."""
    update = replicas.adam(0.3)
    options = {"how": "scan", "init": "jit"}
    trail = train(optperm.laperm(optax.adam(0.3), every), params(), range(10), **options)
    read = jax.jit(permuted_params)
    exact = [read(state, after) for after, state in trail]
    for name, initial in params().items():
        p, adam_state, last = np.float64(initial), None, np.asarray(initial)
        for index, (after, opt_state) in enumerate(trail):
            move, adam_state = update(adam_state, np.float64(grads(index)[name]))
            p = p + move
            is_synced = index + 1 in synced_after
            assert opt_state.synchronized == is_synced
            now = reordered(np.asarray(initial), p)
            np.testing.assert_array_equal(exact[index][name], now)
            if is_synced:
                last, p = now, np.float64(now)
                support.assert_same_bits(after[name], np.float32(last))
            np.testing.assert_allclose(after[name], p, rtol=0, atol=1e-5)  # Adam in float32
            support.assert_same_bits(permuted_params(opt_state)[name], np.float32(last))
        assert name == "bias" or np.mean(last != np.asarray(initial)) > 0.3


def test_sort_by_each_kernel_puts_weights_in_the_order_of_their_keys(monkeypatch):
    """Ties are by location, and subnormal weights keep their bits."""
    support.require_kernel("ffi")
    rng, shape, operands, expected = np.random.default_rng(0), (3, 40, 5), [], []
    for dtype in support.DTYPES.values():
        keys = rng.integers(-9, 9, shape).astype(f"int{8 * np.dtype(dtype).itemsize}")
        values = np.sort(rng.normal(size=shape), axis=1) / rng.choice([1, 1e6, 1e40], (3, 1, 5))
        values = values.astype(dtype)
        ranks = rng.permuted(np.indices(shape, np.int32)[1], axis=1)
        operands.append((keys, np.take_along_axis(values, ranks, axis=1), ranks))
        order = np.argsort(keys, axis=1, kind="stable")
        new_ranks = np.argsort(order, axis=1).astype(np.int32)
        expected.append((np.take_along_axis(values, new_ranks, axis=1), new_ranks))
    with jax.enable_x64(True):
        for kernel in ("ffi", "numpy"):
            monkeypatch.setenv("OPTPERM_KERNEL", kernel)
            sort = jax.jit(lambda operands: [cycles.reorder_rows(*each) for each in operands])
            sort = sort.lower(operands).compile()
            assert ("optperm_reorder_rows" in sort.as_text()) == (kernel == "ffi")
            support.assert_same_bits(sort(operands), expected)


def test_damaged_ranks_are_refused(monkeypatch):
    """The compiled sort raises an error of a state whose ranks are no permutation."""
    support.require_kernel("ffi")
    monkeypatch.setenv("OPTPERM_KERNEL", "ffi")
    tx = optperm.laperm(optax.identity(), 1)
    opt_state = jax.jit(tx.init)(support.bias(9))
    damaged = opt_state._replace(ranks=opt_state.ranks.at[5].set(9))
    says = r"of optperm\.laperm are not permutations"
    with pytest.raises(jax.errors.JaxRuntimeError, match=says):
        jax.block_until_ready(jax.jit(tx.update)(support.bias(9), damaged, support.bias(9)))


def test_synchronizing_where_steps_are_small_learns_only_if_it_is_rare():
    """No weight gets past its neighbor in one step; in fifty it does, and the loss falls."""
    target = np.linspace(-1.0, 1.0, 10, dtype=np.float32)
    start = np.random.default_rng(1).permutation(target)

    @jax.jit
    def end(every):
        tx = optperm.laperm(optax.adam(0.02), every)
        step = loops.make_step(tx, lambda w, _: (w - target, {}))
        return loops.carry(step, start, tx.init(start), jnp.arange(200))[0]

    support.assert_same_bits(end(1), start)
    learned = np.asarray(end(50))
    support.assert_permutes(learned, start)
    assert np.sum((learned - target) ** 2) < 0.05 * np.sum((start - target) ** 2)


# Output axes first, last and last two, a single weight vector, and a batch.
AXES = {
    "a": LeafAxes("kernel", (1, 2), 0),
    "b": LeafAxes("kernel", 0, (1, 2)),
    "c": LeafAxes("bias", (), (0, 1, 2)),
    "d": LeafAxes("kernel", 1, 2, 0),
    "scale": None,
    "none": LeafAxes("kernel", 0, 1),
}


def test_export_between_two_synchronizations_rebuilds_the_weights():
    """Given params it is of them, synchronized; else of the last time; along any output axes."""
    options = {"axes": AXES}
    initial = {name: support.normal((3, 4, 5), 0) for name in "abcd"}
    initial |= jax.device_put({"scale": np.float32(2), "none": np.zeros((0, 3), np.float32)})
    tx = optperm.laperm(optax.sgd(0.5), 2, **options)
    drawn = [support.random_like(initial, index) for index in range(3)]
    drawn.append(jax.tree.map(np.zeros_like, initial))
    *_, (p, opt_state), (_, next_state) = loops.train(tx, initial, drawn, how="scan", init="jit")
    export = jax.jit(functools.partial(export_permutation, **options))
    read = jax.jit(functools.partial(permuted_params, **options))
    last, now = read(opt_state), read(opt_state, p)
    rebuild = jax.jit(apply_permutation)
    assert not np.array_equal(last["a"], now["a"])
    assert p["scale"] == now["scale"] == 2.0
    for weights, given in [(last, ()), (now, (p,)), (now, (now,))]:
        rebuilt = rebuild(initial, export(initial, opt_state, *given))
        support.assert_same_bits(rebuilt, weights)
    # As the weights that one more synchronization would place.
    support.assert_same_bits(permuted_params(next_state), now)
    with pytest.raises(ValueError, match=r"params\['scale'\]"):
        export(initial, opt_state, p | {"scale": np.ones(2, np.float32)})


def test_row_with_a_nan_goes_back_to_its_last_order():
    """The other rows are synchronized; nonfinite entries of gradients count as zero."""
    tx = optperm.laperm(optax.sgd(1.0), 1)
    ((p, opt_state),) = train(tx, params(), [0], init="jit")
    kernel = np.array(p["kernel"])
    kernel[3, 1], kernel[4, 2] = np.nan, np.inf
    broken = p | {"kernel": kernel}
    ((after, new_state),) = train(tx, broken, [1], opt_state=opt_state)
    support.assert_permutes(after, params())
    after, p, initial = jax.tree.map(np.asarray, (after, p, params()))
    support.assert_same_bits(after["kernel"][:, 1], p["kernel"][:, 1])
    ranks, last_ranks = (np.asarray(each.ranks["kernel"]) for each in (new_state, opt_state))
    support.assert_same_bits(ranks[:, 1], last_ranks[:, 1])
    assert np.any(ranks != last_ranks)
    assert after["kernel"][4, 2] == initial["kernel"][:, 2].max()
    wanted = reordered(initial["kernel"], p["kernel"] - np.asarray(grads(1)["kernel"]))
    support.assert_same_bits(after["kernel"][:, 3:], wanted[:, 3:])
    spoiled = np.float32([1.0, np.nan, np.inf, -np.inf, -1.0])
    zeroed = np.float32([1.0, 0.0, 0.0, 0.0, -1.0])
    by_adam = optperm.laperm(optax.adam(0.3), 2)
    each = (
        loops.train(by_adam, params(), [grads(0) | {"bias": b}], init="jit")
        for b in (spoiled, zeroed)
    )
    support.assert_same_bits(*each)


def test_targets_of_another_state_bring_their_order():
    """The weights are the other's, in its order, as after its last step; count and moments stay."""
    tx = optperm.laperm(optax.adam(0.3), 1)
    start, ((_, other),) = tx.init(params()), train(tx, params(), [0])
    assert other.synchronized
    other = other._replace(mismatches=jnp.int32(3))
    merged = replace_targets(start, other)
    assert merged.synchronized
    assert merged.mismatches == 3
    support.assert_same_bits((merged.weights, merged.ranks), (other.weights, other.ranks))
    support.assert_same_bits((merged.count, merged.inner_state), (start.count, start.inner_state))


@pytest.mark.parametrize(
    "inner",
    [
        optax.contrib.schedule_free_sgd(0.1),
        optax.contrib.mechanize(optax.sgd(0.1)),
        optax.contrib.madgrad(0.1),
        optax.contrib.cocob(),
    ],
)
def test_an_inner_optimizer_that_keeps_its_own_params_is_refused(inner):
    """A synchronization would not move them, and the next steps would lead back to them."""
    with pytest.raises(ValueError, match="in inner stores its own params"):
        optperm.laperm(inner, 2).init(params())
