"""AGN and DiLoCo: the known figures, and an independent simulation of workers and a center."""

import functools
import itertools

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

RULES = ("mean", "sum", "sequential")
OPTIMIZERS = {
    "sgd": (optax.sgd(0.1), replicas.sgd(0.1)),
    "momentum": (optax.sgd(0.05, 0.9), replicas.sgd(0.05, 0.9)),
    "adam": (optax.adam(0.05), replicas.adam(0.05)),
}
START = {"a": np.float32([[0.3, -0.2, 0.1], [1.0, 0.0, -1.0]]), "b": np.float32(0.5)}
PERIOD, STEPS = 3, 7
# What makes a method, and what simulates it.
SIMULATED = {
    f"agn {rule} {name}": (
        functools.partial(optperm.agn, optimizer, every=PERIOD, combine=rule),
        functools.partial(replicas.simulate_agn, simulated, every=PERIOD, combine=rule),
    )
    for rule in RULES
    for name, (optimizer, simulated) in OPTIMIZERS.items()
} | {
    f"diloco {name}": (
        functools.partial(optperm.diloco, optax.adam(0.05), outer, every=PERIOD),
        functools.partial(replicas.simulate_diloco, replicas.adam(0.05), simulated, every=PERIOD),
    )
    for name, outer, simulated in (
        ("by default", None, replicas.sgd(0.8, 0.5, nesterov=True)),
        (
            "of the paper",
            optax.sgd(0.7, momentum=0.9, nesterov=True),
            replicas.sgd(0.7, 0.9, nesterov=True),
        ),
        ("adam", optax.adam(0.2), replicas.adam(0.2)),
    )
}


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


def run(tx, size, how="vmap", start=START):
    batches = [replicas.take(target, slice(size)) for target in targets()]
    return loops.train(tx, start, batches, evaluate=loops.gradient(loss_fn), how=how, size=size)


def test_weight_decay_of_a_center_is_of_the_center():
    """Not of the params that local steps have led away from it."""
    decayed = optax.chain(optax.add_decayed_weights(0.5), optax.sgd(1.0))
    for tx, center in (
        # Two local steps of 0.1, then c - (sum + 0.5 c) or c - (mean + 0.5 c).
        (optperm.diloco(optax.sgd(1.0), decayed, every=2), 1 - (0.2 + 0.5)),
        (optperm.agn(optax.sgd(1.0), decayed, every=2), 1 - (0.1 + 0.5)),
    ):
        trail = loops.train(tx, jnp.float32(1.0), [jnp.float32(0.1)] * 2)
        np.testing.assert_allclose(trail[-1][0], center, rtol=1e-6)


@pytest.mark.parametrize(
    ("optimizer", "centers"),
    [
        (optax.sgd(0.1), {4: (0.085975, 0.2786), 8: (0.1645583, 0.0898786)}),
        (optax.sgd(0.1, momentum=0.9), {4: (0.07765, 0.32585), 8: (0.189179, 0.1325065)}),
    ],
)
def test_known_centers_of_one_replica(optimizer, centers):
    """The specification's figures for x - 1 and 2 (y + 1) from (0, .5), rate .1, period 4."""

    def evaluate(params, _):
        return jnp.stack([params[0] - 1, 2 * (params[1] + 1)]), {}

    tx = optperm.agn(optimizer, every=4)
    trail = loops.train(tx, jnp.float32([0.0, 0.5]), [()] * 8, evaluate=evaluate)
    for step, known in centers.items():
        params, opt_state = trail[step - 1]
        np.testing.assert_allclose(params, known, rtol=0, atol=1e-6)
        support.assert_same_bits(params, optperm.distributed.center_params(opt_state))


def test_known_params_of_adam_without_betas():
    """Local steps of .1 from the center, which itself moves .1 a commit."""
    tx = optperm.agn(optax.adam(0.1, b1=0.0, b2=0.0), every=4)
    trail = loops.train(tx, jnp.float32(0.0), [jnp.float32(-1.0)] * 8)
    known = [0.1, 0.2, 0.3, 0.1, 0.2, 0.3, 0.4, 0.2]
    np.testing.assert_allclose([params for params, _ in trail], known, rtol=0, atol=1e-6)


# Each rule, each optimizer and each size occur every time.
USUAL = {("agn mean sgd", 4), ("agn sum momentum", 2), ("diloco by default", 4)}


@pytest.mark.parametrize(
    ("method", "size"), support.every_night(itertools.product(SIMULATED, (4, 1, 2)), USUAL)
)
def test_equals_simulated_workers_and_center(method, size):
    """Every step of every replica, and the center, are those of a simulation in NumPy."""
    make, simulate = SIMULATED[method]
    rows = [flat(target).astype(np.float64) for target in targets()]
    start = flat(replicas.stack([START]))[0].astype(np.float64)
    expected = simulate(start, lambda p, step, index: 2 * (p - rows[step][index]), STEPS, size=size)
    with jax.enable_x64(True):
        steps = run(make(axis_name=replicas.AXIS), size, start=jax.tree.map(np.float64, START))
        for (params, opt_state), (wanted, center) in zip(steps, expected, strict=True):
            np.testing.assert_allclose(flat(params), wanted, rtol=0, atol=1e-12)
            got = flat(optperm.distributed.center_params(opt_state))
            np.testing.assert_allclose(got, np.stack([center] * size), rtol=0, atol=1e-12)


LINEAR = {"w": np.float32([2.0, 1.0]), "b": np.float32(1.0)}
KNOWN_BATCH = (np.float32([[[0, 1], [1, 0]], [[1, 0], [0, 1]]]), np.float32([[1, 2], [2, 3]]))


def squared_error(params, batch):
    x, y = batch
    return jnp.mean((x @ params["w"] + params["b"] - y) ** 2)


def test_known_trace():
    """DiLoCo's, of the specification: losses of replica 0, and the params after a synchronization."""
    tx = optperm.diloco(
        optax.sgd(0.1),
        optax.sgd(1.0, momentum=0.9, nesterov=True),
        every=3,
        axis_name=replicas.AXIS,
    )
    evaluate = loops.gradient(squared_error)
    trail = loops.train(tx, LINEAR, [KNOWN_BATCH] * 3, evaluate=evaluate, how="vmap", size=2)
    of_first = [LINEAR, *(replicas.take(jax.device_get(params), 0) for params, _ in trail)]
    losses = [squared_error(params, replicas.take(KNOWN_BATCH, 0)) for params in of_first]
    np.testing.assert_allclose(losses, [1, 0.49, 0.2401, 0.207544], rtol=0, atol=1e-6)
    params, opt_state = trail[-1]
    np.testing.assert_allclose(params["w"], [[1.5345, 1.0494]] * 2, rtol=0, atol=1e-4)
    np.testing.assert_allclose(params["b"], [0.5839] * 2, rtol=0, atol=1e-4)
    support.assert_same_bits(params, optperm.distributed.center_params(opt_state))


def test_several_axes_are_one_set_of_replicas():
    """A mesh of two by two gives what one axis of four gives, replicas in the same order."""
    axes = ("host", "device")
    nested = optperm.agn(optax.adam(0.05), every=2, axis_name=axes, combine="sequential")
    single = optperm.agn(optax.adam(0.05), every=2, axis_name=replicas.AXIS, combine="sequential")

    def two_steps(tx, target):
        step = loops.make_step(tx, loops.gradient(loss_fn))
        return step(*step(START, tx.init(START), target), target)[0]

    @jax.jit
    @functools.partial(
        jax.shard_map,
        mesh=Mesh(np.array(jax.devices()[:4]).reshape(2, 2), axes),
        in_specs=P(axes),
        out_specs=P(axes),
        check_vma=False,
    )
    def two(target):
        params = two_steps(nested, replicas.take(target, 0))
        return jax.tree.map(lambda leaf: leaf[None], params)

    target = targets()[0]
    one = jax.jit(jax.vmap(functools.partial(two_steps, single), axis_name=replicas.AXIS))(target)
    np.testing.assert_allclose(flat(two(target)), flat(one), rtol=0, atol=1e-7)


def test_a_commit_every_step_of_one_replica_is_the_bare_optimizer():
    """With period 1 and one replica the center makes the optimizer's own steps."""
    optimizer = optax.adam(0.1)
    both = zip(run(optperm.agn(optimizer, every=1), 1), run(optimizer, 1), strict=True)
    for (got, _), (wanted, _) in both:
        np.testing.assert_allclose(flat(got), flat(wanted), rtol=3e-7, atol=1e-7)


def test_small_gradients_of_a_long_period_are_not_lost_in_bfloat16():
    """The accumulator is float32: 512 gradients of 1 in bfloat16 would stop adding up at 256."""
    tx = optperm.agn(optax.sgd(1.0), every=512)
    params, grads = jnp.zeros(2, jnp.bfloat16), jnp.ones((512, 2), jnp.bfloat16)
    params, opt_state = loops.carry(loops.make_step(tx), params, tx.init(params), grads)
    assert opt_state.accumulator.dtype == jnp.float32
    assert params.tolist() == [-1.0, -1.0]
    with jax.enable_x64(True):
        assert tx.init(jnp.zeros(2, jnp.float64)).accumulator.dtype == jnp.float64


def test_entries_that_are_not_finite_count_as_zero():
    """The replica goes on by its other entries, and takes part: its params are finite."""
    tx = optperm.diloco(optax.adam(0.1), optax.sgd(1.0), every=2, axis_name=replicas.AXIS)
    grads = np.float32([[[1, 2], [3, np.inf]], [[5, np.nan], [7, 8]], [[1, 1], [1, 1]]])
    step = replicas.MAPPINGS["vmap"](loops.make_step(tx), 2)
    ends = []
    for data in (grads, np.where(np.isfinite(grads), grads, 0)):
        carry = np.zeros((2, 2), np.float32), jax.vmap(tx.init)(np.zeros((2, 2), np.float32))
        for batch in data:
            carry = step(*carry, batch)
        ends.append(carry)
    support.assert_same_bits(*ends)
    assert ends[0][1].skipped.tolist() == [0, 0]


def test_a_replica_whose_params_are_not_finite_sits_out_one_commit():
    """The center moves by the others, or stays; all are pulled to it."""
    tx = optperm.diloco(optax.sgd(0.1), optax.sgd(1.0), every=1, axis_name=replicas.AXIS)
    step = replicas.MAPPINGS["vmap"](loops.make_step(tx), 2)
    for lost, center in (([1], [0.9, 1.9]), ([0, 1], [1.0, 2.0])):
        params = np.float32([[1, 2], [1, 2]])
        opt_state = jax.vmap(tx.init)(params)
        params[lost, 0] = np.nan
        params, opt_state = step(params, opt_state, np.ones((2, 2), np.float32))
        np.testing.assert_allclose(params, [center] * 2, rtol=1e-6)
        assert opt_state.skipped.tolist() == [int(index in lost) for index in range(2)]
