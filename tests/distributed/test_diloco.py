"""DiLoCo: the known trace, an independent simulation, and its outer step."""

import jax
import jax.numpy as jnp
import loops
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
    evaluate = loops.gradient(loss_fn)
    trail = loops.train(tx, LINEAR, [KNOWN_BATCH] * 3, evaluate=evaluate, how=mapping, size=2)
    of_first = [LINEAR, *(replicas.take(jax.device_get(params), 0) for params, _ in trail)]
    losses = [loss_fn(params, replicas.take(KNOWN_BATCH, 0)) for params in of_first]
    np.testing.assert_allclose(losses, [1, 0.49, 0.2401, 0.207544], rtol=0, atol=1e-6)
    params, opt_state = trail[-1]
    np.testing.assert_allclose(params["w"], [[1.5345, 1.0494]] * 2, rtol=0, atol=1e-4)
    np.testing.assert_allclose(params["b"], [0.5839] * 2, rtol=0, atol=1e-4)
    support.assert_same_bits(params, optperm.center_params(opt_state))


def train(tx, start, targets):
    """With replicas that are pulled to targets of their own."""
    return loops.train(
        tx,
        start,
        targets,
        evaluate=lambda p, target: (p - target, {}),
        how="vmap",
        size=len(targets[0]),
    )


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
        for (params, opt_state), (wanted, center) in zip(
            train(tx, start, targets), expected, strict=True
        ):
            np.testing.assert_allclose(params, wanted, rtol=0, atol=1e-12)
            got_center = optperm.center_params(opt_state)
            np.testing.assert_allclose(got_center, [center] * size, rtol=0, atol=1e-12)


def test_outer_steps_of_one_are_plain_averaging():
    """The outer SGD at rate 1 puts every replica on their mean; so the outer sign is right."""
    tx = optperm.diloco(optax.sgd(0.1), optax.sgd(1.0), 2, axis_name=replicas.AXIS)
    targets = np.float32([[1, 2, 3], [4, 5, 6]])
    params, _ = train(tx, np.zeros(3, np.float32), [targets] * 2)[-1]
    np.testing.assert_allclose(params, np.stack([0.19 * targets.mean(axis=0)] * 2), rtol=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_entries_that_are_not_finite_count_as_zero(bad):
    """The replica goes on by its other entries, and takes part: its params are finite."""
    tx = optperm.diloco(optax.adam(0.1), optax.sgd(1.0), 2, axis_name=replicas.AXIS)
    grads = np.float32([[[1, 2], [3, 4]], [[5, bad], [7, 8]], [[1, 1], [1, 1]]])
    both = [
        loops.train(tx, np.zeros(2, np.float32), list(data), how="vmap", size=2)
        for data in (grads, np.where(np.isfinite(grads), grads, 0))
    ]
    for one, other in zip(*both, strict=True):
        support.assert_same_bits(one, other)
    assert one[1].skipped.tolist() == [0, 0]


@pytest.mark.parametrize("lost", [[1], [0, 1]])
def test_a_replica_whose_params_are_not_finite_sits_out_one_commit(lost):
    """The center moves by the others, or stays; all are pulled to it."""
    tx = optperm.diloco(optax.sgd(0.1), optax.sgd(1.0), 1, axis_name=replicas.AXIS)
    params = np.float32([[1, 2], [1, 2]])
    opt_state = jax.vmap(tx.init)(params)
    params[lost, 0] = np.nan
    step = replicas.MAPPINGS["vmap"](loops.make_step(tx), 2)
    params, opt_state = step(params, opt_state, np.ones((2, 2), np.float32))
    center = [1.0, 2.0] if len(lost) == 2 else [0.9, 1.9]
    np.testing.assert_allclose(params, [center] * 2, rtol=1e-6)
    assert opt_state.skipped.tolist() == [int(index in lost) for index in range(2)]
