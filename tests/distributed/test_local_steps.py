"""What AGN and DiLoCo share: collectives, gradients that are not finite, extra arguments, resuming."""

import functools
import pathlib
import runpy

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint
import pytest
import replicas
import support
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import optperm

pytestmark = pytest.mark.usefixtures("lenient")

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"
SIZE, PERIOD = 4, 3
START = {"w": np.float32([0.5, -0.5]), "b": np.float32(1.0)}
METHODS = {
    "agn mean": functools.partial(optperm.agn, communication_period=PERIOD, commit="mean"),
    "agn sum": functools.partial(optperm.agn, communication_period=PERIOD, commit="sum"),
    "agn sequential": functools.partial(
        optperm.agn, communication_period=PERIOD, commit="sequential"
    ),
    "diloco": functools.partial(optperm.diloco, sync_every=PERIOD),
}


def make(method, optimizer=None):
    return METHODS[method](
        optax.adam(0.1) if optimizer is None else optimizer, axis_name=replicas.AXIS
    )


def loss_fn(params, batch):
    x, y = batch
    return jnp.mean((x @ params["w"] + params["b"] - y) ** 2)


def batches(steps=7, seed=0):
    """For each step five examples for each replica."""
    rng = np.random.default_rng(seed)
    return [
        (
            rng.normal(size=(SIZE, 5, 2)).astype(np.float32),
            rng.normal(size=(SIZE, 5)).astype(np.float32),
        )
        for _ in range(steps)
    ]


def run(tx, data, mapping="vmap", evaluate=None, **arguments):
    evaluate = evaluate or replicas.gradient(loss_fn)
    params = arguments.pop("params", START)
    return list(
        replicas.train(tx, params, data, size=SIZE, mapping=mapping, evaluate=evaluate, **arguments)
    )


def collectives(text):
    """For each collective of a compiled program, whether only a conditional leads to it."""
    found = runpy.run_path(str(EXAMPLES / "collectives.py"))["find_collectives"](text)
    return [(each.operation, each.is_conditional) for each in found]


@pytest.mark.parametrize("method", METHODS)
def test_one_collective_and_that_in_the_conditional(method):
    """The compiled step crosses devices in one place, which only a commit reaches."""
    tx = make(method)

    @functools.partial(jax.pmap, axis_name=replicas.AXIS, devices=jax.devices()[:SIZE])
    def step(params, opt_state, batch):
        e = optperm.evaluate(loss_fn, params, batch)
        updates, opt_state = tx.update(e.grad, opt_state, params, **e.extra_args)
        return optperm.apply_updates(params, updates, opt_state), opt_state

    params = replicas.stack([START] * SIZE)
    opt_state = replicas.stack([tx.init(START)] * SIZE)
    text = step.lower(params, opt_state, batches(1)[0]).compile().as_text()
    kind = "all-gather" if method == "agn sequential" else "all-reduce"
    assert collectives(text) == [(kind, True)]

    @functools.partial(jax.pmap, axis_name=replicas.AXIS, devices=jax.devices()[:SIZE])
    def synchronous(params, batch):
        return optperm.evaluate(loss_fn, params, batch, axis_name=replicas.AXIS).grad

    text = synchronous.lower(params, batches(1)[0]).compile().as_text()
    assert ("all-reduce", False) in collectives(text)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("method", METHODS)
def test_a_replica_with_a_bad_gradient_sits_out_one_commit(method, bad):
    """The center moves as if the others were alone; the replica is pulled, counted, and goes on."""
    data = batches()
    data[1][1][2, 0] = bad  # one example of replica 2, in the first period
    trail = run(make(method), data)
    for params, opt_state in trail:
        finite = [np.isfinite(leaf).all() for leaf in jax.tree.leaves((params, opt_state.center))]
        assert all(finite)
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(opt_state.local_state))
    others = [jax.tree.map(lambda leaf: np.delete(leaf, 2, axis=0), batch) for batch in data]
    alone = replicas.train(
        make(method), START, others, size=SIZE - 1, evaluate=replicas.gradient(loss_fn)
    )
    for step, ((params, opt_state), (wanted, of_others)) in enumerate(
        zip(trail[:PERIOD], alone, strict=False), start=1
    ):
        kept = jax.tree.map(lambda leaf: np.delete(leaf, 2, axis=0), params)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), kept, wanted)
        center, expected = (optperm.center_params(s) for s in (opt_state, of_others))
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a[0], b[0], atol=1e-6), center, expected
        )
        assert opt_state.skipped.tolist() == [0, 0, int(step == PERIOD), 0]
    params, opt_state = trail[2 * PERIOD - 1]
    support.assert_same_bits(params, optperm.center_params(opt_state))
    assert opt_state.skipped.tolist() == [0, 0, 1, 0]


@pytest.mark.parametrize("method", METHODS)
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


@pytest.mark.parametrize("method", METHODS)
def test_resumed_in_mid_period_bit_for_bit(method, tmp_path):
    """Replicas that went through Orbax between two commits continue as if nothing had been."""
    data = batches()
    trail = run(make(method), data, "pmap")
    halfway = jax.device_get(trail[PERIOD])  # one step into the second period
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", halfway)
        checkpointer.wait_until_finished()
        template = jax.tree.map(np.zeros_like, halfway)
        params, opt_state = checkpointer.restore(tmp_path / "state", template)
    resumed = run(make(method), data[PERIOD + 1 :], "pmap", params=params, opt_state=opt_state)
    for got, wanted in zip(resumed, trail[PERIOD + 1 :], strict=True):
        support.assert_same_bits(got, wanted)


@pytest.mark.parametrize("mapping", replicas.MAPPINGS)
def test_a_scan_carries_it_across_commits(mapping):
    """Seven steps in one scan give the steps one by one, whatever tracks the types."""
    tx, data = make("agn mean"), batches()

    def whole(params, opt_state, xs, ys):
        def step(carry, batch):
            params, opt_state = carry
            updates, opt_state = tx.update(jax.grad(loss_fn)(params, batch), opt_state, params)
            return (optperm.apply_updates(params, updates, opt_state), opt_state), None

        return jax.lax.scan(step, (params, opt_state), (xs, ys))[0]

    stacked = (replicas.stack([tree] * SIZE) for tree in (START, tx.init(START)))
    xs, ys = (np.stack(arrays, axis=1) for arrays in zip(*data, strict=True))
    params, _ = replicas.MAPPINGS[mapping](whole, SIZE)(*stacked, xs, ys)
    wanted, _ = run(tx, data)[-1]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-6), params, wanted)


def test_the_center_may_be_declared_the_same_on_all_devices():
    """In shard_map's checked mode the center's type says that all replicas agree on it."""
    tx = make("agn mean", optax.sgd(0.1, 0.9))
    mesh = Mesh(np.array(jax.devices()[:SIZE]), (replicas.AXIS,))
    each, same = P(replicas.AXIS), P()
    specs = optperm.LocalStepsState(
        count=same,
        local_state=each,
        center_state=same,
        center=same,
        accumulator=each,
        pulled=same,
        skipped=each,
    )

    @jax.jit
    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(each, specs, each), out_specs=(each, specs)
    )
    def step(params, opt_state, batch):
        one = functools.partial(jax.tree.map, lambda leaf: leaf[0])
        many = functools.partial(jax.tree.map, lambda leaf: leaf[None])
        parts = {
            name: getattr(opt_state, name) for name in ("local_state", "accumulator", "skipped")
        }
        opt_state = opt_state._replace(**one(parts))
        params, batch = one(params), one(batch)
        updates, opt_state = tx.update(jax.grad(loss_fn)(params, batch), opt_state, params)
        params = optperm.apply_updates(params, updates, opt_state)
        parts = {name: getattr(opt_state, name) for name in parts}
        return many(params), opt_state._replace(**many(parts))

    start = tx.init(START)
    many = {
        name: replicas.stack([getattr(start, name)] * SIZE)
        for name in ("local_state", "accumulator", "skipped")
    }
    params, opt_state = replicas.stack([START] * SIZE), start._replace(**many)
    for batch, (wanted, _) in zip(batches(), run(tx, batches()), strict=True):
        params, opt_state = step(params, opt_state, batch)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-6), params, wanted
        )


def spy(reading):
    """An optimizer whose step is 0.1 times what it reads from the extra arguments."""

    def update(updates, state, params=None, **extras):
        return jax.tree.map(lambda x: -0.1 * x, reading(params, updates, extras)), state

    return optax.GradientTransformationExtraArgs(lambda params: (), update)


READINGS = {
    "grad_fn": (
        lambda params, updates, extras: extras["grad_fn"](params),
        lambda params, x, y: jax.grad(loss_fn)(params, (x, y)),
    ),
    "gradient of value_fn": (
        lambda params, updates, extras: jax.grad(extras["value_fn"])(params),
        lambda params, x, y: jax.grad(loss_fn)(params, (x, y)),
    ),
    "per_example_grad_fn": (
        lambda params, updates, extras: jax.tree.map(
            lambda leaf: jnp.max(leaf, axis=0), extras["per_example_grad_fn"](params)
        ),
        lambda params, x, y: jax.tree.map(
            lambda leaf: jnp.max(leaf, axis=0),
            jax.vmap(lambda x, y: jax.grad(loss_fn)(params, (x[None], y[None])))(x, y),
        ),
    ),
    "value": (
        lambda params, updates, extras: jax.tree.map(
            lambda p: jnp.full_like(p, extras["value"]), params
        ),
        lambda params, x, y: jax.tree.map(
            lambda p: jnp.full_like(p, loss_fn(params, (x, y))), params
        ),
    ),
    "grad": (lambda params, updates, extras: jax.tree.map(jnp.add, updates, extras["grad"]), None),
}


@pytest.mark.parametrize("mapping", replicas.MAPPINGS)
@pytest.mark.parametrize("reading", READINGS)
def test_extra_arguments_of_a_center_step_speak_for_all_replicas(reading, mapping):
    """At a commit the optimizer reads at the center what one batch of all examples would give."""
    read, of_all = READINGS[reading]
    tx = optperm.agn(spy(read), 1, axis_name=replicas.AXIS)

    def evaluate(params, batch):
        e = optperm.evaluate(loss_fn, params, batch)
        return e.grad, e.extra_args

    (batch,) = batches(1)
    ((params, opt_state),) = run(tx, [batch], mapping, evaluate)
    x, y = batch[0].reshape(-1, 2), batch[1].reshape(-1)
    if of_all is None:
        wanted = jax.tree.map(lambda g: 2 * g, jax.grad(loss_fn)(START, (x, y)))
    else:
        wanted = of_all(START, x, y)
    for index in range(SIZE):
        moved = jax.tree.map(lambda p, index=index: p[index], params)
        jax.tree.map(
            lambda p, start, step: np.testing.assert_allclose(p, start - 0.1 * step, atol=1e-6),
            moved,
            START,
            wanted,
        )
    support.assert_same_bits(params, optperm.center_params(opt_state))


def test_a_line_search_within():
    """L-BFGS, whose search calls and differentiates value_fn, lowers the loss of all replicas."""
    data = batches(1) * 6

    def evaluate(params, batch):
        e = optperm.evaluate(loss_fn, params, batch)
        return e.grad, e.extra_args

    tx = optperm.agn(optax.lbfgs(), 2, axis_name=replicas.AXIS)
    params, opt_state = run(tx, data, "pmap", evaluate)[-1]
    support.assert_same_bits(params, optperm.center_params(opt_state))
    everything = data[0][0].reshape(-1, 2), data[0][1].reshape(-1)
    best = np.linalg.lstsq(
        np.column_stack([everything[0], np.ones(5 * SIZE)]), everything[1], rcond=None
    )
    least = best[1][0] / (5 * SIZE)
    before, after = (loss_fn(p, everything) for p in (START, replicas.take(params, 0)))
    assert after - least < 0.2 * (before - least)


def test_a_method_that_places_params_follows_the_pull():
    """SGPerm within AGN: each replica permutes, exactly, and goes on from the center's permutation."""
    start = jax.tree.map(np.asarray, support.random_params())
    tx = optperm.agn(optperm.sgperm(0.4), PERIOD, axis_name=replicas.AXIS)

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
    # A step after the pull starts from the center: few weights differ, those that one step moves.
    after, center = trail[PERIOD][0]["kernel"][0], trail[PERIOD - 1][1].center["kernel"][0]
    before = trail[PERIOD - 2][0]["kernel"][0]
    assert np.mean(after != center) < np.mean(after != before)


def test_center_params_in_any_nesting():
    """It is found inside a chain; where there is none, the error says what was looked for."""
    tx = optax.chain(optax.clip(1.0), optperm.diloco(optax.adam(0.1)))
    support.assert_same_bits(
        optperm.center_params(tx.init(START)), jax.tree.map(jnp.asarray, START)
    )
    with pytest.raises(ValueError, match=r"LocalStepsState .*optperm.agn or optperm.diloco.* none"):
        optperm.center_params(optax.adam(0.1).init(START))


@pytest.mark.parametrize("method", METHODS)
def test_an_axis_that_is_not_bound_is_named(method):
    """Outside the mapped function, or with another name, the first trace says what to do."""
    tx = make(method)
    opt_state = tx.init(START)
    with pytest.raises(ValueError, match=r"axis_name 'replica' is not bound here.*jax.pmap"):
        tx.update(START, opt_state, START)
    with pytest.raises(ValueError, match="is not bound here"):
        jax.vmap(lambda p: tx.update(p, opt_state, START), axis_name="other")(
            replicas.stack([START])
        )


@pytest.mark.parametrize("method", METHODS)
def test_params_that_cannot_be_averaged_are_refused(method):
    """Integers and complex numbers raise at init."""
    for dtype in (jnp.int32, jnp.complex64):
        with pytest.raises(TypeError, match=r"params\['w'\] has dtype"):
            make(method).init({"w": jnp.zeros(2, dtype)})


def test_leaves_of_all_dtypes_travel_in_one_vector():
    """Each keeps its dtype and its precision; float64 ones make the collective float64."""
    with jax.enable_x64(True):
        dtypes = ("float16", "bfloat16", "float32", "float64")
        start = {name: np.zeros(3, jnp.dtype(name)) for name in dtypes}
        targets = {name: np.full((SIZE, 3), 1 / 3, jnp.dtype(name)) for name in dtypes}
        tx = optperm.agn(optax.sgd(1.0), 1, axis_name=replicas.AXIS)
        steps = replicas.train(
            tx,
            start,
            [targets],
            size=SIZE,
            evaluate=lambda p, t: (jax.tree.map(jnp.subtract, p, t), {}),
        )
        ((params, _),) = steps
        for name in dtypes:
            assert params[name].dtype == jnp.dtype(name)
            assert np.array_equal(params[name], targets[name])
