"""DiLoCo: the known trace, an independent simulation, and its outer step."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import replicas
import support

import optperm

pytestmark = pytest.mark.usefixtures("lenient")


def loss_fn(params, batch):
    x, y = batch
    return jnp.mean((x @ params["w"] + params["b"] - y) ** 2)


LINEAR = {"w": np.float32([2.0, 1.0]), "b": np.float32(1.0)}
KNOWN_BATCH = (
    np.float32([[[0, 1], [1, 0]], [[1, 0], [0, 1]]]),
    np.float32([[1, 2], [2, 3]]),
)


@pytest.mark.parametrize("mapping", replicas.MAPPINGS)
def test_known_trace(mapping):
    """The specification's trace: losses of replica 0, and the params after the first synchronization."""
    tx = optperm.diloco(
        optax.sgd(0.1), optax.sgd(1.0, momentum=0.9, nesterov=True), 3, axis_name=replicas.AXIS
    )
    first = replicas.take(KNOWN_BATCH, 0)
    losses = [loss_fn(LINEAR, first)]
    steps = replicas.train(
        tx,
        LINEAR,
        [KNOWN_BATCH] * 3,
        size=2,
        mapping=mapping,
        evaluate=replicas.gradient(loss_fn),
    )
    for params, opt_state in steps:  # noqa: B007
        losses.append(loss_fn(replicas.take(jax.device_get(params), 0), first))
    np.testing.assert_allclose(losses, [1, 0.49, 0.2401, 0.207544], rtol=0, atol=1e-6)
    np.testing.assert_allclose(params["w"], [[1.5345, 1.0494]] * 2, rtol=0, atol=1e-4)
    np.testing.assert_allclose(params["b"], [0.5839] * 2, rtol=0, atol=1e-4)
    support.assert_same_bits(params, optperm.center_params(opt_state))


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize(
    ("outer", "simulated"),
    [
        (None, replicas.sgd(0.7, 0.9, nesterov=True)),
        (optax.adam(0.2), replicas.adam(0.2)),
    ],
)
def test_equals_simulated_workers_and_center(outer, simulated, size):
    """Every step of every replica, and the center, are those of a simulation in NumPy."""
    rng = np.random.default_rng(1)
    start, targets = rng.normal(size=5), rng.normal(size=(7, size, 5))
    expected = replicas.simulate_diloco(
        replicas.adam(0.05),
        simulated,
        start,
        lambda p, step, index: p - targets[step, index],
        7,
        size=size,
        sync_every=3,
    )
    with jax.enable_x64(True):
        tx = optperm.diloco(optax.adam(0.05), outer, 3, axis_name=replicas.AXIS)
        got = replicas.train(
            tx, start, targets, size=size, evaluate=lambda p, target: (p - target, {})
        )
        for (params, opt_state), (wanted, center) in zip(got, expected, strict=True):
            np.testing.assert_allclose(params, wanted, rtol=0, atol=1e-12)
            got_center = optperm.center_params(opt_state)
            np.testing.assert_allclose(got_center, [center] * size, rtol=0, atol=1e-12)


def test_outer_steps_of_one_are_plain_averaging():
    """The outer SGD at rate 1 puts every replica on their mean; so the outer sign is right."""
    tx = optperm.diloco(optax.sgd(0.1), optax.sgd(1.0), 2, axis_name=replicas.AXIS)
    start, targets = np.zeros(3, np.float32), np.float32([[1, 2, 3], [4, 5, 6]])
    steps = replicas.train(
        tx, start, [targets] * 2, size=2, evaluate=lambda p, target: (p - target, {})
    )
    *_, (params, _) = steps
    np.testing.assert_allclose(params, np.stack([0.19 * targets.mean(axis=0)] * 2), rtol=1e-6)


def test_a_local_optimizer_that_places_params_needs_a_center_that_does():
    """A permutation cannot be pulled to a center that is not one."""
    with pytest.raises(ValueError, match=r"could not be pulled .*PermuteByCyclesState"):
        optperm.diloco(optperm.sgperm()).init(support.random_params())


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"sync_every": 0}, ValueError, "sync_every must be at least 1, got 0"),
        ({"sync_every": 2.5}, TypeError, "sync_every must be an integer"),
        ({"sync_every": True}, TypeError, "sync_every must be an integer"),
        ({"axis_name": 3}, TypeError, "axis_name must be the name of a mapped axis"),
        ({"inner": None}, TypeError, "inner must be an optax.GradientTransformation"),
        ({"outer": 0.7}, TypeError, "outer must be an optax.GradientTransformation"),
    ],
)
def test_bad_arguments_are_refused_when_it_is_built(arguments, kind, message):
    """What came, what is allowed, before any training."""
    with pytest.raises(kind, match=message):
        optperm.diloco(**({"inner": optax.sgd(0.1)} | arguments))
