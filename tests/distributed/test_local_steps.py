"""What AGN and DiLoCo give the optimizers within them, and which they refuse."""

import chex
import jax
import jax.numpy as jnp
import loops
import numpy as np
import optax
import pytest
import replicas
import support

import optperm

SIZE = 4
START = {"w": np.float32([0.5, -0.5]), "b": np.float32(1.0)}


def loss_fn(params, batch):
    x, y = batch
    return jnp.mean((x @ params["w"] + params["b"] - y) ** 2)


def spy(reading):
    """Make an optimizer whose step is 0.1 times what it reads from the extra arguments."""

    def update(updates, state, params=None, **extras):
        return optax.tree.scale(-0.1, reading(params, updates, extras)), state

    return optax.GradientTransformationExtraArgs(lambda params: (), update)


def read_value(params, updates, extras):
    return jax.tree.map(lambda p: jnp.full_like(p, extras["value"]), params)


READINGS = [
    lambda params, updates, extras: extras["grad_fn"](params),
    lambda params, updates, extras: jax.grad(extras["value_fn"])(params),
    lambda params, updates, extras: jax.tree.map(
        lambda leaf: jnp.max(leaf, axis=0), extras["per_example_grad_fn"](params)
    ),
    lambda params, updates, extras: optax.tree.add(updates, extras["grad"]),
    read_value,
]


@pytest.mark.slow
@pytest.mark.parametrize("mapping", support.every_night(["vmap", "shard_map"], ["shard_map"]))
def test_extra_arguments_of_a_center_step_speak_for_all_replicas(mapping):
    """At a commit the optimizer reads at the center what one batch of all examples would give."""

    def first_steps(params, batch):
        for read in READINGS:
            tx = optperm.agn(spy(read), every=1, axis_name=replicas.AXIS)
            yield loops.make_step(tx, loops.evaluation(loss_fn))(params, tx.init(params), batch)[0]

    run_all = replicas.MAPPINGS[mapping](lambda *given: list(first_steps(*given)), SIZE)
    batch = support.normal((SIZE, 5, 2)), support.normal((SIZE, 5), seed=1)
    found = run_all(replicas.stack([START] * SIZE), batch)

    whole = batch[0].reshape(-1, 2), batch[1].reshape(-1)
    value_fn = lambda params: loss_fn(params, whole)  # noqa: E731
    of_one = jax.grad(lambda params, x, y: loss_fn(params, (x[None], y[None])))
    extras = {"value": value_fn(START), "grad": jax.grad(value_fn)(START), "value_fn": value_fn}
    extras["grad_fn"] = jax.grad(value_fn)
    extras["per_example_grad_fn"] = lambda params: jax.vmap(of_one, (None, 0, 0))(params, *whole)
    steps = [read(START, extras["grad"], extras) for read in READINGS]
    wanted = [optax.tree.add_scale(START, -0.1, step) for step in steps]
    for index in range(SIZE):
        chex.assert_trees_all_close(replicas.take(found, index), wanted, atol=1e-6, rtol=1e-7)


def test_a_value_without_its_function_is_averaged_over_the_replicas():
    tx = optperm.agn(spy(read_value), every=1, axis_name=replicas.AXIS)

    def step(value):
        return tx.update(START, tx.init(START), START, value=value)[0]["b"]

    moves = replicas.MAPPINGS["vmap"](step, SIZE)(np.arange(SIZE, dtype=np.float32))
    np.testing.assert_allclose(moves, [-0.1 * (SIZE - 1) / 2] * SIZE, rtol=1e-6)


@pytest.mark.usefixtures("x64", "lenient")
def test_leaves_of_all_dtypes_travel_in_one_vector():
    """Each keeps its dtype and its precision; float64 ones make the collective float64."""
    start = {name: np.zeros(3, dtype) for name, dtype in support.DTYPES.items()}
    targets = {name: np.full((SIZE, 3), 1 / 3, dtype) for name, dtype in support.DTYPES.items()}
    tx = optperm.agn(optax.sgd(1.0), every=1, axis_name=replicas.AXIS)
    away = lambda p, target: (jax.tree.map(jnp.subtract, p, target), {})  # noqa: E731
    options = {"evaluate": away, "how": "vmap", "size": SIZE, "init": "jit"}
    ((params, _),) = loops.train(tx, start, [targets], **options)
    support.assert_same_bits(params, targets)


@pytest.mark.parametrize(
    "points",
    [
        optax.contrib.schedule_free(optax.sgd(0.1), 0.1),
        optax.contrib.mechanize(optax.sgd(0.1)),
        optax.contrib.madgrad(0.1),
        optax.contrib.cocob(),
    ],
    ids=["schedule_free", "mechanize", "madgrad", "cocob"],
)
@pytest.mark.parametrize("factory", [optperm.agn, optperm.diloco])
def test_optimizers_whose_points_a_pull_does_not_move_are_refused(factory, points):
    """Each replica's points would drift away from the center; the center's may have points."""
    tx = factory(optax.chain(optax.clip(1.0), points), every=9)
    with pytest.raises(ValueError, match="Use another optimizer for the local steps"):
        jax.eval_shape(tx.init, START)
    jax.eval_shape(factory(optax.sgd(0.1), points, every=9).init, START)
