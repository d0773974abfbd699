"""Two phases in one optimizer: its parts one after the other, the switch, and replicas."""

import functools

import chex
import jax
import jax.numpy as jnp
import loops
import numpy as np
import optax
import pytest
import replicas
import support
import valley
from jax.flatten_util import ravel_pytree

import optperm

pytestmark = pytest.mark.usefixtures("lenient")

# Steps 2, 4, 6 and 8 are sampled; step 8 is the first in the subspace.
OPTIONS = {"start": 2, "every": 2, "num_snapshots": 4}
SWITCH = 8
FIRST = optax.sgd(2e-3, momentum=0.5)
SECOND = {
    "dim_reduce": functools.partial(optperm.dim_reduce, n_components=3),
    "twa": functools.partial(optperm.twa, optax.sgd(1e-3, momentum=0.5), n_components=4),
}


def trail_of(tx, data, params=None, opt_state=None):
    """Return the params and the state after each step, as arrays of NumPy."""
    params = valley.start() if params is None else params
    options = {"how": "scan", "init": "jit", "evaluate": valley.evaluate}
    return loops.train(tx, params, data, opt_state=opt_state, **options)


def samples_of(trail):
    """Return the params at the steps that are sampled."""
    before = [valley.start(), *(params for params, _ in trail)]
    return [before[step] for step in (2, 4, 6, 8)]


def test_trajectory_is_that_of_the_parts_one_after_the_other():
    """Run the optimizer, and then the other one with the samples' components, to rounding."""
    data, tx = valley.batches(12)[:, 0], SECOND["dim_reduce"]()
    trail = trail_of(optperm.dldr(FIRST, tx, **OPTIONS), data)
    alone = trail_of(FIRST, data[:SWITCH])
    chex.assert_trees_all_close([p for p, _ in trail[:SWITCH]], [p for p, _ in alone], rtol=1e-6)
    basis = optperm.subspace.pca_basis(replicas.stack(samples_of(alone)), 3)
    chex.assert_trees_all_close(trail[SWITCH][1].second.subspace.rows, basis, atol=1e-6, rtol=1e-7)
    opt_state = optperm.subspace.set_basis(tx.init(valley.start()), basis)
    then = trail_of(tx, data[SWITCH:], alone[-1][0], opt_state)
    assert np.any([state.step_length > 0 for _, state in then])
    params = [p for p, _ in trail[SWITCH:]]
    chex.assert_trees_all_close(params, [p for p, _ in then], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("earlier", "steps", "due"),
    # Snapshots before the change, and the steps of the others
    [
        pytest.param({"every": 100}, 3, (4, 6, 8), marks=pytest.mark.exhaustive),  # first at step 2
        pytest.param({"every": 3}, 6, (6, 8), marks=pytest.mark.exhaustive),  # at steps 2 and 5
        pytest.param({"start": 0, "every": 1}, 3, (4,), marks=pytest.mark.exhaustive),  # at 0, 1, 2
        ({"start": 50}, 21, (22, 24, 26, 28)),
    ],
)
def test_snapshots_so_far_count_if_the_steps_of_snapshots_change(earlier, steps, due):
    """The basis uses as many snapshots as at first, although steps of the new plan have passed."""
    options = OPTIONS | {"restart": "mean"}
    before = optperm.dldr(FIRST, SECOND["twa"](), **options | earlier)
    data = valley.batches(32)[:, 0]
    first = trail_of(before, data[:steps])
    rest = trail_of(optperm.dldr(FIRST, SECOND["twa"](), **options), data[steps:], *first[-1])
    trail = [valley.start(), *(params for params, _ in [*first, *rest])]
    plan = OPTIONS | earlier
    taken = [
        t for t in range(steps) if t >= plan["start"] and not (t - plan["start"]) % plan["every"]
    ]
    samples = replicas.stack([trail[t] for t in (*taken, *due)])
    assert [bool(s.second.subspace.is_set) for _, s in rest] == [
        t >= due[-1] for t in range(steps, 32)
    ]
    mean = jax.tree.map(lambda leaf: np.mean(leaf, axis=0), samples)
    chex.assert_trees_all_close(trail[due[-1] + 1], mean, rtol=1e-6)


def test_a_state_made_with_another_argument_is_refused():
    """If shapes show it, also in a trace; a plan of other steps is no other argument."""
    params, sgd = valley.start(), optax.sgd(0.1)
    grads, extras = jax.tree.map(np.ones_like, params), {"value": 0.0, "value_fn": valley.loss_fn}
    record, line = (
        optperm.record_trajectory,
        functools.partial(optperm.project, sgd, n_components=3),
    )
    dldr = functools.partial(optperm.dldr, sgd, line(), every=2, num_snapshots=4)
    average = functools.partial(optperm.dldr, sgd, optperm.twa(sgd, n_components=3), every=2)
    for made, used, name, is_static in (
        (optperm.dim_reduce(n_components=3), optperm.dim_reduce(n_components=2), "n_components", 1),
        (line(), optperm.project(sgd, n_components=4), "n_components", 1),
        (line(), line(axis_name=replicas.AXIS), "axis_name", 1),
        (optperm.twa(sgd, n_components=3), optperm.twa(sgd, n_components=2), "n_components", 1),
        (record(2, 5), record(2, 6), "num_snapshots", 1),
        (record(2, 5), record(2, 5, dtype="bfloat16"), "dtype", 1),
        (dldr(), dldr(num_snapshots=6), "num_snapshots", 1),
        (average(num_snapshots=3), average(num_snapshots=4), "num_snapshots", 0),
        (dldr(restart="first"), dldr(restart="mean"), "restart", 0),
        (dldr(), dldr(restart="mean"), "restart", 0),
        (dldr(), dldr(every=3, start=1), "", 1),
        (record(2, 5), record(3, 5), "", 1),
    ):
        state = jax.jit(made.init)(params)

        def give(state, used=used):
            take = lambda _: used.update(grads, state, params, **extras)  # noqa: E731
            return jax.vmap(take, axis_name=replicas.AXIS)(jnp.zeros(1))

        # The state of the first call is read, and the state of the second one is traced.
        calls = [functools.partial(jax.eval_shape, lambda give=give, state=state: give(state))]
        calls += [functools.partial(jax.eval_shape, give, state)]
        for call in calls[: 1 + is_static]:
            if not name:
                call()
                continue
            with pytest.raises(ValueError, match=f"made with another {name}="):
                call()


def test_transformation_around_a_subspace_begins_with_the_second_phase():
    """Clip, and read the schedule of the inner optimizer, from the second phase on."""
    rate = optax.linear_schedule(1e-3, 0.0, 4)
    chained = optax.chain(optax.clip(1.0), optperm.project(optax.sgd(rate), n_components=3))
    trail = trail_of(optperm.dldr(optax.sgd(2e-3), chained, **OPTIONS), valley.batches(14)[:, 0])
    x = [np.append(params["a"], params["b"]) for params, _ in trail]
    p = valley.flat(trail[-1][1].second[1].subspace.rows)
    moves = np.diff(x[SWITCH - 1 :], axis=0)
    np.testing.assert_allclose(moves @ p.T @ p, moves, atol=1e-6)
    assert np.all(np.linalg.norm(moves[:4], axis=1) > 1e-5)
    assert not np.any(moves[4:])


@pytest.mark.parametrize(("restart", "dtype"), [("first", "bfloat16"), ("mean", "float32")])
def test_step_that_switches_puts_the_params_at_the_restart(restart, dtype):
    """Put them on the first sample bit for bit, or on the mean, and take no step from there."""
    params = jax.tree.map(lambda p: np.asarray(p + 0.1, jnp.dtype(dtype)), valley.start())
    data, tx = valley.batches(12)[:, 0], optperm.project(optax.sgd(1e-3, 0.5), n_components=3)
    both = optperm.dldr(optax.sgd(2e-3), tx, **OPTIONS, restart=restart)
    trail = trail_of(both, data, params)
    (at_restart, state), rest = trail[SWITCH], trail[SWITCH + 1 :]
    samples = [after for after, _ in trail[1:SWITCH:2]]
    if restart == "mean":
        mean = jax.tree.map(lambda leaf: np.mean(leaf, axis=0), replicas.stack(samples))
        chex.assert_trees_all_close(at_restart, mean, rtol=2e-7)
    else:
        support.assert_same_bits(at_restart, samples[0])
    assert state.is_restarted
    assert not rest[0][1].is_restarted
    (before,), (there,), (after,) = (s.exact() for _, s in trail[SWITCH - 1 : SWITCH + 2])
    flags = [jax.tree.leaves(each.where) for each in (before, there, after)]
    assert [[bool(flag) for flag in each] for each in flags] == [
        [False] * 2,
        [True] * 2,
        [False] * 2,
    ]
    fresh = jax.tree.map(np.asarray, jax.jit(tx.init)(params))
    support.assert_same_bits(state.second._replace(subspace=fresh.subspace), fresh)
    alone = trail_of(tx, data[SWITCH + 1 :], at_restart, state.second)
    got, expected = (
        [jax.tree.map(np.float32, after) for after, _ in each] for each in (rest, alone)
    )
    exactly = {"rtol": 1e-5, "atol": 1e-6} if dtype == "float32" else {"rtol": 1e-2}
    chex.assert_trees_all_close(got, expected, **exactly)


def test_targets_of_the_second_phase_are_none_in_the_step_that_restarts():
    """It places the restart point, and `sgperm` in the second phase places weights from then on."""
    line, placed = optperm.project(optax.sgd(1.0), n_components=1), optperm.sgperm(0.5)
    second = optax.partition({"line": line, "placed": placed}, {"kernel": "placed", "v": "line"})
    tx = optperm.dldr(optax.sgd(0.1), second, every=1, num_snapshots=2, restart="first")
    params = {"kernel": np.asarray(support.normal((4, 3))), "v": np.ones(2, np.float32)}
    grads = [support.random_like(params, seed) for seed in range(3)]
    _, (_, there), (_, after) = loops.train(tx, params, grads, how="scan", init="jit")
    flags = [
        [any(map(np.any, jax.tree.leaves(each.where))) for each in state.exact()]
        for state in (there, after)
    ]
    assert flags == [[False, True], [True, False]]


@pytest.mark.exhaustive
def test_curved_valley_is_followed_to_its_minimum():
    """Rosenbrock's function in four dimensions, which is far away when the second phase begins."""

    def loss_fn(x, batch):
        return jnp.sum(100 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2) + jnp.sum(0 * batch)

    x = np.float32([-0.5, 0.5, -0.3, 0.4])
    then = optperm.dim_reduce(n_components=4)
    tx = optperm.dldr(optax.sgd(2e-4), then, every=2, num_snapshots=8)
    step = loops.make_step(tx, loops.evaluation(loss_fn))

    def body(carried, batch):
        carried = step(*carried, batch)
        return carried, carried[0]

    run = jax.jit(lambda x, data: jax.lax.scan(body, (x, tx.init(x)), data)[1])
    trail = np.asarray(run(x, np.zeros((150, 1), np.float32)))
    at_switch, found = trail[14], trail[-1]
    np.testing.assert_allclose(found, 1.0, atol=1e-2)
    assert np.abs(at_switch - 1).max() > 0.5


@pytest.mark.usefixtures("x64")
def test_mean_of_float64_snapshots_is_in_float64():
    line = optperm.project(optax.sgd(0.0), n_components=1)
    tx = optperm.dldr(optax.sgd(1.0), line, every=1, num_snapshots=3, restart="mean")
    grads = [np.array([g]) for g in (-1000.0, -2000.0, 0.0)]
    w, _ = loops.train(tx, jnp.array([1000.0]), grads, how="scan", init="jit")[-1]
    np.testing.assert_allclose(w, [7000.0 / 3], rtol=1e-15)  # of 1000, 2000 and 4000


def test_subspace_of_a_part_of_the_params_is_that_of_the_part_alone():
    """Give the other part the step of its own optimizer in the second phase."""
    data, subspace = valley.batches(10)[:, 0], optperm.project(optax.sgd(1e-3), n_components=3)
    parts = {"subspace": subspace, "rest": optax.sgd(1e-3)}
    second = optax.partition(parts, {"a": "subspace", "b": "rest"})
    first, start = optax.sgd(2e-3), valley.start()
    whole, alone = optperm.dldr(first, second, **OPTIONS), optperm.dldr(first, subspace, **OPTIONS)

    def step(carried, batch):
        params, state, part = carried
        grad, _ = valley.evaluate(params, batch)
        updates, state = whole.update(grad, state, params)
        of_part, part = alone.update({"a": grad["a"]}, part, {"a": params["a"]})
        return (optax.apply_updates(params, updates), state, part), (grad, updates, of_part)

    @jax.jit
    def run(data):
        states = whole.init(start), alone.init({"a": start["a"]})
        return jax.lax.scan(step, (start, *states), data)[1]

    grads, updates, of_part = jax.tree.map(np.asarray, run(data))
    chex.assert_trees_all_close(updates["a"], of_part["a"], rtol=1e-4, atol=1e-7)
    rates = np.float32([2e-3] * SWITCH + [1e-3] * (len(data) - SWITCH))
    chex.assert_trees_all_close(updates["b"], -rates * grads["b"], rtol=1e-5)


def test_projected_gradient_is_the_part_in_the_subspace():
    """Give P' P g, without the rest of the gradient."""
    tx, params = optperm.project(optax.sgd(1.0), n_components=3), valley.start()
    basis = valley.rows(3)

    @jax.jit
    def step(batch):
        grads = jax.grad(valley.loss_fn)(params, batch)
        state = optperm.subspace.set_basis(tx.init(params), basis)
        return ravel_pytree(grads)[0], ravel_pytree(tx.update(grads, state, params)[0])[0]

    g, u = map(np.asarray, step(valley.batches(1)[0, 0]))
    p = valley.flat(basis)
    np.testing.assert_allclose(u, -p.T @ (p @ g), rtol=1e-4, atol=1e-4)
    assert np.linalg.norm(p @ g) < 0.99 * np.linalg.norm(g)


def test_first_phase_without_a_subspace_goes_on():
    """Set no basis where snapshots do not differ, or are not finite."""
    schedule = optax.masked(FIRST, lambda p: jax.tree.map(lambda _: True, p))
    still = optperm.switch_after(SWITCH + 1, optax.set_to_zero(), schedule)
    params, data = valley.start(), [np.ones((2, 6), np.float32)] * 12
    tx = optperm.dldr(still, SECOND["twa"](), **OPTIONS, restart="first")
    trails = [trail_of(tx, data, params | {"b": np.float32(b)}) for b in (np.nan, 0.0)]
    for trail in trails:
        subspace = trail[-1][1].second.subspace
        assert not subspace.is_set
        assert not any(np.any(leaf) for leaf in jax.tree.leaves(subspace.rows))
    alone = trail_of(still, data, params)
    chex.assert_trees_all_close([p for p, _ in trail], [p for p, _ in alone], rtol=1e-6)
    assert valley.loss_fn(trail[-1][0], data[0]) < valley.loss_fn(params, data[0])


def test_trained_averaging_is_that_of_the_authors():
    """Train from the mean by momentum SGD with weight decay on the projection to the span."""
    data = valley.batches(14)[:, 0]
    decayed = optax.chain(optax.add_decayed_weights(0.5), optax.sgd(5e-3, momentum=0.9))
    span = optperm.twa(decayed, n_components=4)
    trail = trail_of(optperm.dldr(optax.sgd(2e-3), span, **OPTIONS, restart="mean"), data)
    w = valley.flat(replicas.stack(samples_of(trail)))
    q = np.linalg.qr(w.T.astype(np.float64))[0].T
    x, velocity = w.mean(axis=0), 0.0
    ends = [np.append(params["a"], params["b"]) for params, _ in trail[SWITCH:]]
    np.testing.assert_allclose(ends[0], x, rtol=1e-6)
    np.testing.assert_allclose(ends @ q.T @ q, ends, rtol=1e-4, atol=1e-5)
    for got, batch in zip(ends[1:], data[SWITCH + 1 :], strict=True):
        g = valley.SCALES * (x - batch.mean(axis=0)) + 0.5 * x
        velocity = 0.9 * velocity + q.T @ (q @ g)
        x = x - 5e-3 * velocity
        np.testing.assert_allclose(got, x, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mapping", "size"),
    support.every_night([("shard_map", 3), ("pmap", 2), ("vmap", 2)], [("shard_map", 3)]),
)
def test_many_devices_train_as_one(mapping, size):
    """Spread the batch and the rows, in both phases and through the switch."""
    data, options = valley.batches(11, 12), OPTIONS | {"restart": "mean"}
    alone = optperm.dldr(optax.sgd(2e-3), SECOND["twa"](), **options)
    alone = trail_of(alone, data.reshape(len(data), -1, 6))
    tx = optperm.dldr(optax.sgd(2e-3), SECOND["twa"](axis_name=replicas.AXIS), **options)
    params = replicas.stack([valley.start()] * size)
    data = data.reshape(len(data), size, -1, 6)
    options = {"opt_state": replicas.MAPPINGS[mapping](tx.init, size)(params), "how": mapping}
    trail = loops.train(tx, params, data, evaluate=valley.evaluate, size=size, **options)
    expected = [replicas.stack([params] * size) for params, _ in alone]
    chex.assert_trees_all_close([params for params, _ in trail], expected, rtol=1e-4, atol=1e-5)
    assert trail[-1][1].second.subspace.rows["b"].shape == (size, -(-4 // size))


def test_gradient_that_is_not_finite_skips_a_step_in_either_phase():
    """Change nothing but the count and what was sampled."""
    tx = optperm.dldr(FIRST, SECOND["twa"](), **OPTIONS)
    trail, spoiled = trail_of(tx, valley.batches(11)[:, 0]), np.full((2, 6), np.nan, np.float32)
    for taken in (3, 10):
        params, opt_state = trail[taken - 1]
        step = loops.compiled(tx, valley.evaluate)
        after, new = step(params, opt_state, spoiled)
        kept = params, opt_state.inner_state, opt_state.second
        support.assert_same_bits((after, new.inner_state, new.second), kept)
        assert new.count == taken + 1


def test_a_mask_of_the_second_phase_cannot_be_set_in_the_first():
    """Refuse it, as its zeros would not hold."""
    masked = optax.chain(FIRST, optperm.mask_elements())
    tx = optperm.dldr(FIRST, optperm.dim_reduce(masked, n_components=2), **OPTIONS)
    with pytest.raises(ValueError, match=r"in a phase \(.*\) that is not running"):
        optperm.sparsity.prune(valley.start(), tx.init(valley.start()), 0.5, include=True)
