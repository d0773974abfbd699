"""AGN: the known figures, an independent simulation of workers and a center, and its collectives."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import replicas
import support
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import optperm

pytestmark = pytest.mark.usefixtures("lenient")

RULES = ("mean", "sum", "sequential")
OPTIMIZERS = {
    "sgd": (optax.sgd(0.1), replicas.sgd(0.1)),
    "momentum": (optax.sgd(0.05, 0.9), replicas.sgd(0.05, 0.9)),
    "adam": (optax.adam(0.05), replicas.adam(0.05)),
}
START = {"a": np.float32([[0.3, -0.2, 0.1], [1.0, 0.0, -1.0]]), "b": np.float32(0.5)}
PERIOD, STEPS = 3, 7


def flat(tree):
    """Stacked replicas as one row of numbers each."""
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]
    return np.concatenate([leaf.reshape(len(leaf), -1) for leaf in leaves], axis=1)


@functools.cache
def targets():
    """For each step a target for each of four replicas."""
    rng = np.random.default_rng(0)
    return [
        jax.tree.map(lambda p: rng.normal(size=(4, *p.shape)).astype(np.float32), START)
        for _ in range(STEPS)
    ]


def loss_fn(params, target):
    parts = jax.tree.map(lambda p, t: jnp.sum((p - t) ** 2), params, target)
    return sum(jax.tree.leaves(parts))


def run(tx, size, mapping="vmap", start=START):
    batches = [replicas.take(target, slice(size)) for target in targets()]
    evaluate = replicas.gradient(loss_fn)
    return replicas.train(tx, start, batches, size=size, mapping=mapping, evaluate=evaluate)


@pytest.mark.parametrize(
    ("optimizer", "centers"),
    [
        (optax.sgd(0.1), {4: (0.085975, 0.2786), 8: (0.1645583, 0.0898786)}),
        (optax.sgd(0.1, momentum=0.9), {4: (0.07765, 0.32585), 8: (0.189179, 0.1325065)}),
    ],
)
def test_known_centers_of_one_replica(optimizer, centers):
    """The specification's figures for x - 1 and 2 (y + 1) from (0, .5), rate .1, period 4."""
    tx = optperm.agn(optimizer, 4)
    params, update = jnp.float32([0.0, 0.5]), jax.jit(tx.update)
    opt_state = tx.init(params)
    for step in range(1, 9):
        grads = jnp.stack([params[0] - 1, 2 * (params[1] + 1)])
        updates, opt_state = update(grads, opt_state, params)
        params = optperm.apply_updates(params, updates, opt_state)
        if step in centers:
            center = optperm.center_params(opt_state)
            np.testing.assert_allclose(center, centers[step], rtol=0, atol=1e-6)
            support.assert_same_bits(params, center)


def test_known_params_of_adam_without_betas():
    """Local steps of .1 from the center, which itself moves .1 a commit."""
    tx = optperm.agn(optax.adam(0.1, b1=0.0, b2=0.0), 4)
    params = jnp.float32(0.0)
    opt_state, update, trail = tx.init(params), jax.jit(tx.update), []
    for _ in range(8):
        updates, opt_state = update(jnp.float32(-1.0), opt_state, params)
        params = optperm.apply_updates(params, updates, opt_state)
        trail.append(float(params))
    np.testing.assert_allclose(trail, [0.1, 0.2, 0.3, 0.1, 0.2, 0.3, 0.4, 0.2], rtol=0, atol=1e-6)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_equals_simulated_workers_and_center(rule, name, size):
    """Every step of every replica, and the center, are those of a simulation in NumPy."""
    optimizer, simulated = OPTIMIZERS[name]
    rows = [flat(target).astype(np.float64) for target in targets()]
    start = flat(replicas.stack([START]))[0].astype(np.float64)
    expected = replicas.simulate_agn(
        simulated,
        start,
        lambda p, step, index: 2 * (p - rows[step][index]),
        STEPS,
        size=size,
        period=PERIOD,
        commit=rule,
    )
    with jax.enable_x64(True):
        tx = optperm.agn(optimizer, PERIOD, axis_name=replicas.AXIS, commit=rule)
        steps = run(tx, size, start=jax.tree.map(np.float64, START))
        for (params, opt_state), (wanted, center) in zip(steps, expected, strict=True):
            np.testing.assert_allclose(flat(params), wanted, rtol=0, atol=1e-12)
            got = flat(optperm.center_params(opt_state))
            np.testing.assert_allclose(got, np.stack([center] * size), rtol=0, atol=1e-12)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("mapping", [name for name in replicas.MAPPINGS if name != "vmap"])
def test_every_mapping_gives_the_same_numbers(mapping, rule):
    """pmap and both modes of shard_map agree with vmap, and pull all replicas onto the same bits."""
    tx = optperm.agn(optax.adam(0.05), PERIOD, axis_name=replicas.AXIS, commit=rule)
    both = zip(run(tx, 4, mapping), run(tx, 4), strict=True)
    for step, ((params, opt_state), (wanted, _)) in enumerate(both, start=1):
        np.testing.assert_allclose(flat(params), flat(wanted), rtol=0, atol=1e-6)
        if step % PERIOD == 0:
            first = replicas.take(jax.device_get(params), 0)
            for index in range(4):
                support.assert_same_bits(replicas.take(jax.device_get(params), index), first)
            support.assert_same_bits(params, optperm.center_params(opt_state))
        else:
            assert len(np.unique(flat(params), axis=0)) == 4


def test_several_axes_are_one_set_of_replicas():
    """A mesh of two by two gives what one axis of four gives, replicas in the same order."""
    optimizer = optax.adam(0.05)
    nested = optperm.agn(optimizer, 2, axis_name=("host", "device"), commit="sequential")
    single = optperm.agn(optimizer, 2, axis_name=replicas.AXIS, commit="sequential")

    def of(tx):
        def two_steps(target):
            params, opt_state = START, tx.init(START)
            for _ in range(2):
                grads = jax.grad(loss_fn)(params, target)
                updates, opt_state = tx.update(grads, opt_state, params)
                params = optperm.apply_updates(params, updates, opt_state)
            return params

        return two_steps

    @functools.partial(
        jax.shard_map,
        mesh=Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("host", "device")),
        in_specs=P(("host", "device")),
        out_specs=P(("host", "device")),
        check_vma=False,
    )
    def two(target):
        params = of(nested)(replicas.take(target, 0))
        return jax.tree.map(lambda leaf: leaf[None], params)

    target = targets()[0]
    one = jax.vmap(of(single), axis_name=replicas.AXIS)(target)
    np.testing.assert_allclose(flat(two(target)), flat(one), rtol=0, atol=1e-7)


@pytest.mark.parametrize(
    "optimizer",
    [optax.sgd(0.1), optax.sgd(0.1, 0.9), optax.adam(0.1)],
    ids=["sgd", "trace", "adam"],
)
def test_a_commit_every_step_of_one_replica_is_the_bare_optimizer(optimizer):
    """With period 1 and one replica the center makes the optimizer's own steps."""
    tx = optperm.agn(optimizer, 1)
    trail = [params for params, _ in run(tx, 1)]
    bare = [params for params, _ in run(optimizer, 1)]
    for got, wanted in zip(trail, bare, strict=True):
        np.testing.assert_allclose(flat(got), flat(wanted), rtol=3e-7, atol=1e-7)


def test_small_gradients_of_a_long_period_are_not_lost_in_bfloat16():
    """The accumulator is float32: 512 gradients of 1 in bfloat16 would stop adding up at 256."""
    tx = optperm.agn(optax.sgd(1.0), 512)
    params = jnp.zeros(2, jnp.bfloat16)
    grads = jnp.ones(2, jnp.bfloat16)

    def step(carry, _):
        params, opt_state = carry
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optperm.apply_updates(params, updates, opt_state), opt_state), None

    (params, opt_state), _ = jax.lax.scan(step, (params, tx.init(params)), length=512)
    assert opt_state.accumulator.dtype == jnp.float32
    assert params.tolist() == [-1.0, -1.0]
    with jax.enable_x64(True):
        assert tx.init(jnp.zeros(2, jnp.float64)).accumulator.dtype == jnp.float64


def test_period_may_be_traced():
    """`inject_hyperparams` keeps the period in its state, where it can be changed."""
    tx = optax.inject_hyperparams(optperm.agn)(optax.sgd(0.1), communication_period=2)
    params = jnp.zeros(())
    opt_state, update = tx.init(params), jax.jit(tx.update)
    opt_state.hyperparams["communication_period"] = jnp.int32(3)
    for step in range(1, 7):
        _, opt_state = update(jnp.ones(()), opt_state, params)
        center = float(optperm.center_params(opt_state))
        assert center == pytest.approx(-0.1 * (step // 3), abs=1e-7)


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"communication_period": 0}, ValueError, "communication_period must be at least 1, got 0"),
        ({"communication_period": 2.5}, TypeError, "communication_period must be an integer"),
        ({"communication_period": True}, TypeError, "communication_period must be an integer"),
        ({"commit": "median"}, ValueError, "commit must be one of 'mean', 'sum', 'sequential'"),
        ({"axis_name": 3}, TypeError, "axis_name must be the name of a mapped axis"),
        ({"optimizer": optax.adam}, TypeError, "optimizer must be an optax.GradientTransformation"),
    ],
)
def test_bad_arguments_are_refused_when_it_is_built(arguments, kind, message):
    """What came, what is allowed, before any training."""
    with pytest.raises(kind, match=message):
        optperm.agn(**({"optimizer": optax.sgd(0.1)} | arguments))
