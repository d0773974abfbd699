"""What AGN and DiLoCo share: collectives, gradients that are not finite, extra arguments, resuming."""

import functools

import jax
import jax.numpy as jnp
import loops
import numpy as np
import optax
import pytest
import replicas
import support
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import optperm

pytestmark = pytest.mark.usefixtures("lenient")

SIZE, PERIOD = 4, replicas.PERIOD
START = {"w": np.float32([0.5, -0.5]), "b": np.float32(1.0)}
OPTIMIZER = optax.adam(0.1)


def make(method, optimizer=OPTIMIZER):
    return replicas.METHODS[method](optimizer, axis_name=replicas.AXIS)


def loss_fn(params, batch):
    x, y = batch
    return jnp.mean((x @ params["w"] + params["b"] - y) ** 2)


def batches(steps=7, seed=0):
    """For each step five examples for each replica."""
    rng = np.random.default_rng(seed)
    shapes = (SIZE, 5, 2), (SIZE, 5)
    return [
        tuple(rng.normal(size=shape).astype(np.float32) for shape in shapes) for _ in range(steps)
    ]


def run(tx, data, how="vmap", evaluate=None, params=START):
    evaluate = evaluate or loops.gradient(loss_fn)
    size = len(jax.tree.leaves(data[0])[0])
    return loops.train(tx, params, data, evaluate=evaluate, how=how, size=size)


@pytest.mark.parametrize("method", replicas.METHODS)
def test_one_collective_and_that_in_the_conditional(method):
    """The compiled step crosses devices in one place, which only a commit reaches."""
    tx, pmap = make(method), functools.partial(replicas.MAPPINGS["pmap"], size=SIZE)
    params, opt_state = (replicas.stack([tree] * SIZE) for tree in (START, tx.init(START)))
    step = pmap(loops.make_step(tx, loops.evaluation(loss_fn)))
    text = step.lower(params, opt_state, batches(1)[0]).compile().as_text()
    kind = "all-gather" if method == "agn sequential" else "all-reduce"
    assert [(each.operation, each.is_conditional) for each in replicas.collectives(text)] == [
        (kind, True)
    ]


@pytest.mark.parametrize(
    ("method", "bad"),
    support.every_night(
        [("agn mean", np.nan), ("agn sequential", np.inf)], [("agn sequential", np.inf)]
    ),
)
def test_a_replica_with_a_bad_gradient_sits_out_one_commit(method, bad):
    """The center moves as if the others were alone; the replica is pulled, counted, and goes on."""
    data = batches()
    data[1][1][2, 0] = bad  # one example of replica 2, in the first period
    trail = run(make(method), data)
    for params, opt_state in trail:
        held = params, opt_state.center, opt_state.local_state
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(held))
    others = functools.partial(jax.tree.map, lambda leaf: np.delete(leaf, 2, axis=0))
    alone = run(make(method), [others(batch) for batch in data])
    for step in range(PERIOD):
        (params, opt_state), (wanted, of_others) = trail[step], alone[step]
        support.assert_close(others(params), wanted, atol=1e-6, rtol=1e-7)
        centers = (optperm.distributed.center_params(s) for s in (opt_state, of_others))
        support.assert_close(*(replicas.take(c, 0) for c in centers), atol=1e-6, rtol=1e-7)
        assert opt_state.skipped.tolist() == [0, 0, int(step == PERIOD - 1), 0]
    params, opt_state = trail[2 * PERIOD - 1]
    support.assert_same_bits(params, optperm.distributed.center_params(opt_state))
    assert opt_state.skipped.tolist() == [0, 0, 1, 0]


@pytest.mark.parametrize(
    "method", support.every_night(["agn mean", "agn sequential"], ["agn mean"])
)
def test_without_any_finite_gradient_the_center_stays(method):
    """Params go back to where they were; its optimizer has not seen the commit."""
    data = batches(2 * PERIOD)
    data[0][1][...] = np.nan
    trail = run(make(method), data)
    params, opt_state = trail[PERIOD - 1]
    start = replicas.stack([START] * SIZE)
    support.assert_same_bits(params, start)
    fresh = replicas.stack([make(method).init(START)] * SIZE)
    support.assert_same_bits(opt_state.center_state, fresh.center_state)
    assert opt_state.skipped.tolist() == [1] * SIZE
    assert not np.array_equal(trail[-1][1].center["w"], start["w"])


def test_the_center_may_be_declared_the_same_on_all_devices():
    """In shard_map's checked mode the center's type says that all replicas agree on it."""
    tx, own = make("agn mean", optax.sgd(0.1, 0.9)), ("local_state", "accumulator", "skipped")
    each, same = P(replicas.AXIS), P()
    fields = optperm.distributed.AgnState._fields
    specs = optperm.distributed.AgnState(*(each if name in own else same for name in fields))

    def apart(function, opt_state):
        """The state with what is each replica's own changed by a function."""
        return opt_state._replace(**{name: function(getattr(opt_state, name)) for name in own})

    first = functools.partial(jax.tree.map, lambda leaf: leaf[0])
    lead = functools.partial(jax.tree.map, lambda leaf: leaf[None])

    @jax.jit
    @functools.partial(
        jax.shard_map,
        mesh=Mesh(np.array(jax.devices()[:SIZE]), (replicas.AXIS,)),
        in_specs=(each, specs, each),
        out_specs=(each, specs),
    )
    def step(params, opt_state, batch):
        run_one = loops.make_step(tx, loops.gradient(loss_fn))
        params, opt_state = run_one(first(params), apart(first, opt_state), first(batch))
        return lead(params), apart(lead, opt_state)

    params = replicas.stack([START] * SIZE)
    opt_state = apart(lambda tree: replicas.stack([tree] * SIZE), tx.init(START))
    for batch, (wanted, _) in zip(batches(), run(tx, batches()), strict=True):
        params, opt_state = step(params, opt_state, batch)
        support.assert_close(params, wanted, atol=1e-6)


def spy(reading):
    """An optimizer whose step is 0.1 times what it reads from the extra arguments."""

    def update(updates, state, params=None, **extras):
        return jax.tree.map(lambda x: -0.1 * x, reading(params, updates, extras)), state

    return optax.GradientTransformationExtraArgs(lambda params: (), update)


def _largest(tree):
    return jax.tree.map(lambda leaf: jnp.max(leaf, axis=0), tree)


def _full(params, value):
    return jax.tree.map(lambda p: jnp.full_like(p, value), params)


# What is read, and what one batch of all examples would give there.
READINGS = {
    "grad_fn": (lambda params, updates, extras: extras["grad_fn"](params), jax.grad(loss_fn)),
    "gradient of value_fn": (
        lambda params, updates, extras: jax.grad(extras["value_fn"])(params),
        jax.grad(loss_fn),
    ),
    "per_example_grad_fn": (
        lambda params, updates, extras: _largest(extras["per_example_grad_fn"](params)),
        lambda params, batch: _largest(
            jax.vmap(lambda x, y: jax.grad(loss_fn)(params, (x[None], y[None])))(*batch)
        ),
    ),
    "value": (
        lambda params, updates, extras: _full(params, extras["value"]),
        lambda params, batch: _full(params, loss_fn(params, batch)),
    ),
    "grad": (
        lambda params, updates, extras: jax.tree.map(jnp.add, updates, extras["grad"]),
        lambda params, batch: jax.tree.map(lambda g: 2 * g, jax.grad(loss_fn)(params, batch)),
    ),
}


@pytest.mark.parametrize("mapping", support.every_night(["vmap", "shard_map"], ["shard_map"]))
def test_extra_arguments_of_a_center_step_speak_for_all_replicas(mapping):
    """At a commit the optimizer reads at the center what one batch of all examples would give."""

    def first_steps(params, batch):
        for read, _ in READINGS.values():
            tx = optperm.agn(spy(read), every=1, axis_name=replicas.AXIS)
            yield loops.make_step(tx, loops.evaluation(loss_fn))(params, tx.init(params), batch)

    run_all = replicas.MAPPINGS[mapping](lambda *given: list(first_steps(*given)), SIZE)
    (batch,) = batches(1)
    found = run_all(replicas.stack([START] * SIZE), batch)
    for (params, opt_state), (_, of_all) in zip(found, READINGS.values(), strict=True):
        step = of_all(START, (batch[0].reshape(-1, 2), batch[1].reshape(-1)))
        moved = jax.tree.map(lambda start, step: start - 0.1 * step, START, step)
        for index in range(SIZE):
            support.assert_close(replicas.take(params, index), moved, atol=1e-6, rtol=1e-7)
        support.assert_same_bits(params, optperm.distributed.center_params(opt_state))


def test_a_value_without_its_function_is_averaged_over_the_replicas():
    tx = optperm.agn(spy(READINGS["value"][0]), every=1, axis_name=replicas.AXIS)

    def step(value):
        return tx.update(START, tx.init(START), START, value=value)[0]

    updates = jax.vmap(step, axis_name=replicas.AXIS)(jnp.arange(SIZE, dtype=jnp.float32))
    wanted = jax.tree.map(lambda x: jnp.full((SIZE, *x.shape), -0.1 * (SIZE - 1) / 2), START)
    support.assert_close(updates, wanted, atol=1e-6)


@pytest.mark.entries
def test_a_line_search_within():
    """L-BFGS, whose search calls and differentiates value_fn, lowers the loss of all replicas."""
    data = batches(1) * 6
    tx = optperm.agn(optax.lbfgs(), every=2, axis_name=replicas.AXIS)
    params, opt_state = run(tx, data, "pmap", loops.evaluation(loss_fn))[-1]
    support.assert_same_bits(params, optperm.distributed.center_params(opt_state))
    x, y = data[0][0].reshape(-1, 2), data[0][1].reshape(-1)
    least = np.linalg.lstsq(np.column_stack([x, np.ones(5 * SIZE)]), y)[1][0] / (5 * SIZE)
    before, after = (loss_fn(p, (x, y)) for p in (START, replicas.take(params, 0)))
    assert after - least < 0.2 * (before - least)


def test_a_method_that_places_params_follows_the_pull():
    """SGPerm within AGN: each replica permutes, exactly, and goes on from the center's permutation."""
    start = jax.tree.map(np.asarray, support.random_params())
    tx = optperm.agn(optperm.sgperm(0.1), every=PERIOD, axis_name=replicas.AXIS)

    def evaluate(params, batch):
        pulls = jax.tree.map(lambda p: jnp.sin(batch * jnp.arange(p.size).reshape(p.shape)), params)
        return pulls, {}

    data = np.arange(1.0, 1.0 + 8 * SIZE, dtype=np.float32).reshape(8, SIZE)
    trail = run(tx, data, evaluate=evaluate, params=start)
    for step, (params, opt_state) in enumerate(trail, start=1):
        for index in range(SIZE):
            support.assert_permutes(replicas.take(params, index), start)
        is_commit = step % PERIOD == 0
        support.assert_permutes(replicas.take(opt_state.center, 0), start)
        assert is_commit == (len(np.unique(params["kernel"], axis=0)) == 1)
        if is_commit:
            support.assert_same_bits(params, opt_state.center)
    # A step after the pull starts from the center: each weight differs by what one step moves it.
    after, center = trail[PERIOD][0]["kernel"][0], trail[PERIOD - 1][1].center["kernel"][0]
    before = trail[PERIOD - 2][0]["kernel"][0]
    assert np.mean(np.abs(after - center)) < np.mean(np.abs(after - before))


def test_leaves_of_all_dtypes_travel_in_one_vector():
    """Each keeps its dtype and its precision; float64 ones make the collective float64."""
    with jax.enable_x64(True):
        dtypes = support.DTYPES
        start = {name: np.zeros(3, jnp.dtype(name)) for name in dtypes}
        targets = {name: np.full((SIZE, 3), 1 / 3, jnp.dtype(name)) for name in dtypes}
        tx = optperm.agn(optax.sgd(1.0), every=1, axis_name=replicas.AXIS)
        away = lambda p, target: (jax.tree.map(jnp.subtract, p, target), {})  # noqa: E731
        ((params, _),) = run(tx, [targets], evaluate=away, params=start)
        for name in dtypes:
            assert params[name].dtype == jnp.dtype(name)
            assert np.array_equal(params[name], targets[name])


OWN_POINTS = {
    "schedule_free": optax.contrib.schedule_free(optax.sgd(0.1), 0.1),
    "mechanize": optax.contrib.mechanize(optax.sgd(0.1)),
    "madgrad": optax.contrib.madgrad(0.1),
    "cocob": optax.contrib.cocob(),
    "katyusha": optperm.katyusha(0.1, 0.1, 0.1),
}


@pytest.mark.parametrize("name", OWN_POINTS)
def test_optimizers_whose_points_a_pull_does_not_move_are_refused(name):
    """Each replica's points would drift away from the center; the center's may have points."""
    for factory in (optperm.agn, optperm.diloco):
        with pytest.raises(ValueError, match="needs another optimizer"):
            factory(optax.chain(optax.clip(1.0), OWN_POINTS[name]), every=9).init(START)
    optperm.diloco(optax.sgd(0.1), OWN_POINTS[name], every=9).init(START)
    optperm.agn(optax.sgd(0.1), outer=OWN_POINTS[name]).init(START)
