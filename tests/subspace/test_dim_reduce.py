"""Quasi-Newton steps in a subspace: golden sequences, replicas, trials, and what is not finite."""

import functools

import chex
import dim_reduce_reference as golden
import jax
import jax.numpy as jnp
import loops
import numpy as np
import optax
import pytest
import replicas
import support
import valley
from valley import batches, rows, start

import optperm
from optperm.subspace import _line_searches as line_searches

pytestmark = pytest.mark.usefixtures("lenient")


def with_basis(tx, k, params=None):
    """Return a state with the first rows of a basis."""
    params = start() if params is None else params
    return jax.jit(lambda p: optperm.subspace.set_basis(tx.init(p), rows(k)))(params)


def train(tx, data, k=None, **options):
    """Return params and state after each step, from such a basis or from a state."""
    if "opt_state" not in options:
        options["opt_state"] = with_basis(tx, k)
    return loops.train(tx, start(), data, **{"evaluate": valley.evaluate} | options)


@functools.cache
def gradient():
    """Return the gradient at the start on one batch, in NumPy."""
    residuals = valley.SCALES * (0.0 - batches(1)[0, 0].mean(axis=0))
    return {"a": residuals[:5, None], "b": residuals[5]}


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("case", support.every_night(golden.CASES, ["stiff", "noisy"]))
def test_golden_sequence_of_the_reference_is_kept(case):
    """Give its params and accepted step lengths to 1e-9 in float64."""
    data = golden.load(case)
    tx, params = golden.optimizer(data), golden.split(data["x0"])
    begin = jax.jit(lambda p: optperm.subspace.set_basis(tx.init(p), golden.split(data["P"])))
    opt_state = begin(params)
    evaluate = loops.evaluation(golden.loss_of(data))
    trail = loops.train(tx, params, data["noise"], evaluate=evaluate, opt_state=opt_state)
    params, lengths = golden.outcome(trail)
    np.testing.assert_allclose(params, data["params"], rtol=0, atol=1e-9)
    np.testing.assert_allclose(lengths, data["step"], rtol=0, atol=1e-9)
    assert len(np.unique(lengths)) > 1


@pytest.mark.parametrize("mapping", support.every_night(replicas.MAPPINGS, ["shard_map"]))
def test_scan_over_devices_gives_the_trajectory_of_one(mapping):
    """Spread one batch and four rows over three devices, in one scan within the mapped function."""
    k, size = 4, 3
    data, options = batches(6, size), {"n_components": k, "max_search_steps": 5}
    tx = optperm.dim_reduce(optax.adam(0.1), **options, axis_name=replicas.AXIS)

    def whole(params, batches):
        step = loops.make_step(tx, valley.evaluate)
        return loops.carry(step, params, with_basis(tx, k, params), batches)

    mapped, starts = replicas.MAPPINGS[mapping](whole, size), replicas.stack([start()] * size)
    got, opt_state = jax.tree.map(np.asarray, mapped(starts, np.swapaxes(data, 0, 1)))
    alone = optperm.dim_reduce(optax.adam(0.1), **options)
    step = loops.make_step(alone, valley.evaluate)
    wanted, wanted_state = jax.jit(functools.partial(loops.carry, step))(
        start(), with_basis(alone, k), data.reshape(6, -1, 6)
    )
    chex.assert_trees_all_close(got, replicas.stack([wanted] * size), atol=1e-5, rtol=1e-5)
    assert np.all(opt_state.step_length == wanted_state.step_length)
    # Each keeps its own rows; those past the last are zero.
    assert opt_state.subspace.rows["b"].shape == (size, 2)
    held = np.concatenate(opt_state.subspace.rows["b"])
    np.testing.assert_array_equal(held, np.append(rows(k)["b"], [0.0, 0.0]))


def test_collectives_of_a_step_are_four():
    """Average, gather the rows' products, sum both lifts at once, and average each trial's loss."""
    size, pmap = 4, replicas.MAPPINGS["pmap"]
    tx = optperm.dim_reduce(n_components=6, axis_name=replicas.AXIS)
    params = replicas.stack([start()] * size)
    opt_state = pmap(lambda p: with_basis(tx, 6, p), size)(params)
    step = pmap(loops.make_step(tx, valley.evaluate), size)
    text = step.lower(params, opt_state, batches(1, size)[0]).compile().as_text()
    found = {(each.bytes // 4, each.operation) for each in replicas.collectives(text)}
    # 6 params and the loss; 2 of 6 products each, padded to 8; 2 vectors of 6; the loss of a trial.
    assert len(replicas.collectives(text)) == 4
    assert found == {(7, "all-reduce"), (2, "all-gather"), (12, "all-reduce"), (1, "all-reduce")}


def test_rejected_trials_leave_the_inner_state_alone():
    """Give Adam the state after the one update that is made."""
    inner = optax.adam(0.1)
    tx = optperm.dim_reduce(inner, n_components=2, alpha=0.3, max_search_steps=5)
    opt_state, rejects = with_basis(tx, 2), {"value": 0.0, "value_fn": lambda _: jnp.float32(1e9)}
    update = jax.jit(lambda g: tx.update(g, opt_state, start(), **rejects))
    updates, after = jax.tree.map(np.asarray, update(gradient()))
    assert after.step_length == 0
    direction = jax.tree.map(lambda m: np.float32(0.3) * m, after.residual)
    wanted = jax.jit(lambda g: inner.update(g, inner.init(start()), start()))(direction)
    chex.assert_trees_all_close((updates, after.inner_state), wanted, rtol=1e-7)
    kept = {"first_length": after.quasi_newton.first_length, "rejections": np.int32(1)}
    support.assert_same_bits(after.quasi_newton, opt_state.quasi_newton._replace(**kept))


@pytest.mark.parametrize(("line_search", "length"), [("mindspore", 0.5), ("safeguarded", 0.1)])
def test_loss_and_trials_that_are_not_finite_are_rejected(line_search, length):
    """Take the next, shorter trial if it is low enough; with none the params stay in the subspace."""
    options = {"max_search_steps": 3, "rho": 0.5, "line_search": line_search}
    tx = optperm.dim_reduce(n_components=3, alpha=0.0, **options)
    opt_state, grads = with_basis(tx, 3), gradient()
    whole = np.linalg.norm(valley.flat(rows(3)) @ np.append(grads["a"], grads["b"]))

    @jax.jit
    def update(value, bad, limit):
        def value_fn(params):
            return jnp.where(optax.tree.norm(params) > limit * whole, bad, -1e6)

        updates, after = tx.update(grads, opt_state, start(), value=value, value_fn=value_fn)
        return optax.tree.norm(updates), after

    for bad in (np.nan, np.inf, -np.inf):
        moved, after = update(0.0, bad, 0.75)
        assert after.step_length == jnp.float32(length)
        assert after.quasi_newton.has_last
        np.testing.assert_allclose(moved, length * whole, rtol=1e-5)
        moved, after = update(0.0, bad, -1.0)
        assert moved == 0
        assert not after.quasi_newton.has_last
        # From a loss that is not finite nothing is tried, and nothing learned.
        moved, after = update(bad, 0.0, 0.75)
        assert moved == after.num_trials == 0
        support.assert_same_bits(after.quasi_newton, opt_state.quasi_newton)


def test_gradient_that_is_not_finite_skips_the_step():
    """Keep everything but the count, and take in the next step what would have been taken."""
    tx = optperm.dim_reduce(optax.adam(0.1), n_components=4, max_search_steps=10)
    step, data = loops.compiled(tx, valley.evaluate), batches(4)[:, 0]
    params, opt_state = train(tx, data[:2], 4)[-1]
    nothing = {"step_length": jnp.zeros([]), "num_trials": jnp.int32(0)}
    unchanged = opt_state._replace(count=opt_state.count + 1, **nothing)
    for bad in (np.nan, np.inf):
        spoiled = data[2].copy()
        spoiled[0, 3] = bad
        after, state_after = step(params, opt_state, spoiled)
        support.assert_same_bits((after, state_after), (params, unchanged))
    expected, _ = step(params, opt_state, data[3])
    support.assert_same_bits(step(after, state_after, data[3])[0], expected)


def test_second_trial_of_a_quadratic_is_its_minimum():
    """Find the minimum of the parabola through two losses with the predicted slope."""
    for minimum in (0.2, 0.3, 0.5):
        # f(c) = 10 - 2 m c + c^2 at c = 1, whose slope at 0 is -2 m
        change, predicted = map(jnp.float32, (1.0 - 2.0 * minimum, -2.0 * minimum))
        following = line_searches.find_ratio(change, predicted, jnp.float32(0.55))
        np.testing.assert_allclose(following, minimum, rtol=1e-5)


def test_without_a_basis_only_the_residual_moves():
    """Descend by the gradient with momentum at the rate of each step, and evaluate nothing."""
    rate = lambda count: 0.1 / (1 + count)  # noqa: E731
    tx = optperm.dim_reduce(n_components=2, gamma=0.5, alpha=rate)
    options = {"how": "scan", "init": "jit", "evaluate": valley.evaluate}
    trail = loops.train(tx, start(), batches(3)[:, 0], **options)
    assert all(opt_state.num_trials == opt_state.step_length == 0 for _, opt_state in trail)
    wanted = loops.train(optax.sgd(rate, 0.5), start(), batches(3)[:, 0], **options)
    chex.assert_trees_all_close([p for p, _ in trail], [p for p, _ in wanted], rtol=1e-6, atol=1e-6)


@pytest.mark.exhaustive
def test_alpha_of_zero_keeps_the_params_in_the_subspace():
    """Reach the optimum of the subspace by pure P-BFGS, and nothing outside it."""
    tx = optperm.dim_reduce(n_components=3, alpha=0.0, max_search_steps=20)
    params, _ = train(tx, [np.ones((2, 6), np.float32)] * 40, 3)[-1]
    p = valley.flat(rows(3)).astype(np.float64)
    best = np.linalg.solve(p @ (valley.SCALES[:, None] * p.T), p @ valley.SCALES) @ p
    np.testing.assert_allclose(np.append(params["a"], params["b"]), best, atol=1e-3)


@pytest.mark.parametrize(
    "line_search", support.every_night(("safeguarded", "mindspore"), ["safeguarded"])
)
def test_quadratic_of_any_curvature_and_scale_is_solved(line_search):
    """Converge in float32, where MindSpore's search never finds a step for most curvatures."""
    curvatures = np.float32([1e-6, 1e-3, 1.0, 4.0, 5.0, 20.0, 100.0, 1e3, 1e6])
    basis = np.linalg.qr(np.random.default_rng(1).normal(size=(4, 4)))[0].astype(np.float32)
    target = np.float32([1.0, -2.0, 3.0, 0.5])

    def end(scale, curvature):
        tx = optperm.dim_reduce(n_components=4, line_search=line_search)

        def loss_fn(x, batch):
            return curvature * (scale * jnp.sum((x - batch) ** 2)) / 2

        step, start = loops.make_step(tx, loops.evaluation(loss_fn)), jnp.zeros(4)
        data = jnp.broadcast_to(target, (20, 4))
        x, state = loops.carry(step, start, optperm.subspace.set_basis(tx.init(start), basis), data)
        ratio = loss_fn(x, target) / loss_fn(start, target)
        return ratio, state.quasi_newton.rejections

    def ends(*scales):
        each = jax.vmap(end, (None, 0))
        return jax.device_get(jax.jit(jax.vmap(each, (0, None)))(np.float32(scales), curvatures))

    if line_search == "safeguarded":
        ratios, _ = ends(1e-25, 1e-10, 1.0, 1e10, 1e25)
        np.testing.assert_array_less(ratios, 1e-12)
    else:
        ratios, rejections = ends(1.0)
        np.testing.assert_allclose(ratios[0, 3:7], 1.0, rtol=1e-4)
        np.testing.assert_array_equal(rejections[0, 3:7], 20)


def test_search_in_vain_goes_on_where_it_stopped_and_forgets():
    """Shorten a step that is far too long over several steps, and then reset B."""
    tx = optperm.dim_reduce(n_components=2, alpha=0.0, max_search_steps=2)
    opt_state, grads = with_basis(tx, 2), gradient()

    @jax.jit
    def update(grads, state, trial):
        return tx.update(grads, state, start(), value=1.0, value_fn=lambda _: trial)

    low, high = np.float32(-1e9), np.float32(np.inf)
    _, one = update(grads, opt_state, low)
    _, two = update(jax.tree.map(lambda g: np.float32(0.5) * g, grads), one, low)
    assert two.step_length == 1  # with a pair B knows the scale
    assert two.quasi_newton.has_pair
    _, first = update(grads, one, high)
    np.testing.assert_allclose(first.quasi_newton.first_length, 0.01 * one.step_length, rtol=1e-5)
    assert (first.num_trials, first.quasi_newton.rejections) == (2, 1)
    support.assert_same_bits(first.quasi_newton.inverse_hessian, one.quasi_newton.inverse_hessian)
    _, second = update(grads, first, high)
    fresh = opt_state.quasi_newton._replace(rejections=jnp.int32(2))
    support.assert_same_bits(second.quasi_newton, fresh)
    _, third = update(grads, second, high)
    assert 0 < third.quasi_newton.first_length < one.step_length
    _, fourth = update(grads, third, low)
    assert fourth.step_length == third.quasi_newton.first_length
    assert fourth.quasi_newton.rejections == 0


def test_decrease_that_rounding_hides_is_not_searched_for():
    """With a loss of 1e9, make one trial and keep the params."""
    tx = optperm.dim_reduce(n_components=6, alpha=0.0)
    evaluate = loops.evaluation(lambda p, batch: valley.loss_fn(p, batch) + 1e9)
    opt_state = with_basis(tx, 6)
    short = opt_state.quasi_newton._replace(first_length=jnp.float32(1e-4))
    opt_state = opt_state._replace(quasi_newton=short)
    ((params, opt_state),) = train(tx, batches(1)[:, 0], evaluate=evaluate, opt_state=opt_state)
    support.assert_same_bits(params, jax.tree.map(jnp.asarray, start()))
    assert (opt_state.num_trials, opt_state.quasi_newton.first_length) == (1, 0)


def test_rate_of_the_inner_optimizer_counts():
    """Predict the decrease of the step that is made; below sigma MindSpore's search finds none."""
    data = np.ones((60, 2, 6), np.float32)

    def end(rate):
        tx = optperm.dim_reduce(optax.sgd(rate), n_components=6)
        step = loops.make_step(tx, valley.evaluate)
        params, _ = loops.carry(step, start(), with_basis(tx, 6), data)
        return valley.loss_fn(params, data[0])

    ends = jax.jit(jax.vmap(end))(np.float32([0.01, 0.3, 3.0]))
    np.testing.assert_array_less(ends, 1e-6 * valley.loss_fn(start(), data[0]))


def test_projection_that_overflows_skips_the_step():
    """Skip a gradient whose entries are finite and whose sum is not."""
    tx, w = optperm.dim_reduce(n_components=1), np.zeros(6, np.float32)
    even, huge = np.full((1, 6), 6**-0.5, np.float32), np.full(6, 3e38, np.float32)

    @jax.jit
    def step(huge):
        opt_state = optperm.subspace.set_basis(tx.init(w), even)
        extras = {"value": 1.0, "value_fn": lambda _: jnp.float32(0.0)}
        return opt_state, *tx.update(huge, opt_state, w, **extras)

    opt_state, updates, after = step(huge)
    assert not np.any(updates)
    support.assert_same_bits(after, opt_state._replace(count=np.int32(1)))


@support.needs_float16
def test_residual_that_its_dtype_cannot_hold_keeps_what_it_was():
    tx, w = optperm.dim_reduce(n_components=1, gamma=1.0), np.zeros(2, np.float16)
    opt_state, g = jax.jit(tx.init)(w), np.float16([4e4, 1.0])
    extras = {"value": 1.0, "value_fn": lambda _: jnp.float32(0.0)}
    step = jax.jit(lambda state: tx.update(g, state, w, **extras)[1])
    for _ in range(3):
        opt_state = step(opt_state)
    assert opt_state.residual.tolist() == [40_000, 3]


def test_set_basis_in_any_nesting_forgets_the_old_curvature():
    """Find the state in a chain, keep its residual, and reset B."""
    tx = optax.chain(optax.clip(1e6), optperm.dim_reduce(n_components=3, max_search_steps=20))
    _, opt_state = train(tx, batches(4)[:, 0], 3)[-1]
    assert not np.array_equal(opt_state[1].quasi_newton.inverse_hessian, np.eye(3))
    narrow = jax.tree.map(lambda r: np.asarray(r, jnp.bfloat16), rows(3, 1))
    again = jax.jit(optperm.subspace.set_basis)(opt_state, narrow)
    fresh = jax.jit(tx.init)(start())[1].quasi_newton
    support.assert_same_bits(again[1].quasi_newton, fresh)
    support.assert_same_bits(again[1].residual, opt_state[1].residual)
    assert {leaf.dtype for leaf in jax.tree.leaves(again[1].subspace.rows)} == {np.dtype("float32")}
    chex.assert_trees_all_close(again[1].subspace.rows, rows(3, 1), atol=5e-3, rtol=1e-7)


def test_basis_without_orthonormal_rows_is_refused():
    """Refuse longer, shorter and equal rows, but neither zero rows nor what bfloat16 rounds off."""
    tx = optperm.dim_reduce(n_components=3)
    opt_state, basis = jax.jit(tx.init)(start()), rows(3)

    def scaled(*factors):
        return jax.tree.map(lambda r: (r.T * np.float32(factors)).T, basis)

    equal = jax.tree.map(lambda r: r[np.array([0, 0, 2])], basis)
    for wrong, place, value in (
        (scaled(1.01, 1, 1), r"\[0, 0\]", ""),
        (scaled(1, 1, 0.5), r"\[2, 2\]", ""),
        (equal, r"\[0, 1\]", r"1\."),
    ):
        message = f"orthonormal rows, but entry {place} of their inner products is {value}"
        with pytest.raises(ValueError, match=message):
            optperm.subspace.set_basis(opt_state, wrong)
    for fine in (scaled(1, 1, 0), jax.tree.map(lambda r: r.astype(jnp.bfloat16), basis)):
        assert optperm.subspace.set_basis(opt_state, fine).subspace.is_set
    jax.jit(optperm.subspace.set_basis)(opt_state, scaled(1.01, 1, 1))  # not seen there
