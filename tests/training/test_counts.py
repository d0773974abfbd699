"""A loss that returns a sum and a count: padding changes neither training nor the history."""

import functools

import chex
import fitting
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import support

import optperm
from optperm import training
from optperm.core.trees import leaf_paths

REPLICAS, BATCH, STEPS, RATE = 4, 8, 5, 0.25
rng = np.random.default_rng(0)
X = rng.normal(size=(STEPS, BATCH, 3)).astype(np.float32)
Y = rng.normal(size=(STEPS, BATCH)).astype(np.float32)
# Replicas have two examples of a batch each. In the first step, one has nothing but padding.
MASK = rng.integers(0, 2, (STEPS, BATCH)).astype(np.float32)
MASK[:, 0], MASK[0, 2:4] = 1.0, 0.0
BATCHES = [{"x": x, "y": y, "m": m} for x, y, m in zip(X, Y, MASK, strict=True)]
FEW = [jax.tree.map(lambda leaf, m=batch["m"]: leaf[m > 0], batch) for batch in BATCHES]


def masked(params, batch):
    errors = (batch["x"] @ params["w"] - batch["y"]) ** 2
    return jnp.sum(batch["m"] * errors), jnp.sum(batch["m"])


def with_aux(params, batch):
    """A mean over what counts, NaN where nothing does."""
    total, count = masked(params, batch)
    return (total, count), {"twice": 2 * total / count}


def train(tx, batches, *, devices=REPLICAS, loss_fn=masked, **options):
    mapped = fitting.on(devices, mapped=True) if devices else {}
    params = {"w": np.zeros(3, np.float32)}
    state = training.TrainState.create(apply_fn=None, params=params, tx=tx, opt_state=None)
    options = {"epochs": 1} | options
    return training.fit(state, loss_fn, batches, **mapped, **fitting.arguments(options))


NAME = {"axis_name": "replica"}
SGD = optax.sgd(RATE)
TOGETHER = {
    "sgd": (SGD, SGD),
    "dim_reduce": (
        optperm.dim_reduce(n_components=4, **NAME),
        optperm.dim_reduce(n_components=4),
    ),
    # With one local step and plain SGD, the mean of the params is a step with the mean gradient.
    "diloco": (
        optperm.diloco(SGD, optax.sgd(1.0), every=1, **NAME),
        SGD,
    ),
    "agn": (optperm.agn(SGD, every=1, **NAME), SGD),
}


@functools.cache
def train_alone(tx):
    """Train one device with padded batches, and with the examples that count."""
    return [train(tx, batches, devices=0) for batches in (BATCHES, FEW)]


@pytest.mark.parametrize(
    "name", support.every_night(TOGETHER, ["sgd", "diloco"], slow=["dim_reduce"])
)
def test_padded_batches_of_replicas_train_as_their_examples_alone(name):
    """Beside one device that gets the examples that count; the history has their losses."""
    tx, alone = TOGETHER[name]
    found = train(tx, BATCHES, loss_fn=with_aux, has_aux=True)
    for wanted in train_alone(alone):
        chex.assert_trees_all_close(found.state.params, wanted.state.params, rtol=1e-4, atol=1e-6)
        steps, expected = found.history.steps, wanted.history.steps
        np.testing.assert_allclose(steps["loss"], expected["loss"], rtol=1e-5)
        np.testing.assert_allclose(steps["twice"], 2 * expected["loss"], rtol=1e-5)
        np.testing.assert_array_equal(steps["loss_count"], MASK.sum(axis=1))
        mean = np.average(steps["loss"], weights=MASK.sum(axis=1))
        for row in (found.history.last, wanted.history.last):
            np.testing.assert_allclose(row["loss"], mean, rtol=1e-5)


def local_sgd(every, combine="mean"):
    """Local steps in NumPy; a mean of params is weighed by all that counted since the last commit, and
    in a sum each replica has the mean fraction of its examples that counted."""
    center, own = np.zeros(3), np.zeros((REPLICAS, 3))
    weights, steps = np.zeros(REPLICAS), 0
    for step in range(STEPS):
        for i, part in enumerate(np.split(np.arange(BATCH), REPLICAS)):
            x, y, m = X[step, part], Y[step, part], MASK[step, part]
            gradient = 2 * (m * (x @ own[i] - y)) @ x / max(m.sum(), 1)
            own[i] -= RATE * gradient
            weights[i] += m.sum()
        steps += 1
        if (step + 1) % every == 0 or step + 1 == STEPS:
            examples = weights.sum() if combine == "mean" else steps * BATCH / REPLICAS
            center = center + weights @ (own - center) / examples
            own[:], weights[:], steps = center, 0, 0
    return center


@pytest.mark.filterwarnings("ignore:The run ended after:UserWarning")
@pytest.mark.parametrize("every", support.every_night([2, 3, 9], [3]))
def test_commits_weigh_a_replica_by_all_that_counted_since_the_last_commit(every, tmp_path):
    """Also the commit after the last step, within a period, and after a resume within a period."""
    tx = optperm.diloco(SGD, optax.sgd(1.0), every=every, **NAME)
    found = train(tx, BATCHES)
    np.testing.assert_allclose(found.state.params["w"], local_sgd(every), rtol=1e-5, atol=1e-6)
    train(tx, BATCHES, steps=4, checkpoints=tmp_path)
    resumed = train(tx, BATCHES, checkpoints=tmp_path, resume=True)
    support.assert_same_bits(resumed.state.params, found.state.params)
    assert found.state.weights is None


@pytest.mark.filterwarnings("ignore:The run ended after:UserWarning")
def test_a_sum_of_replicas_weighs_each_by_the_fraction_of_its_examples_that_counted():
    tx = optperm.diloco(SGD, optax.sgd(1.0), every=3, combine="sum", **NAME)
    found = train(tx, BATCHES)
    np.testing.assert_allclose(found.state.params["w"], local_sgd(3, "sum"), rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("unchecked")
def test_replicas_with_draws_of_their_own_share_one_count():
    """The gradient of a linear loss does not depend on the draw, so IVON's momentum is its mean."""

    def loss_fn(params, batch):
        return jnp.sum(batch["m"] * (batch["x"] @ params["w"])), jnp.sum(batch["m"])

    options = {"hess_init": 1.0, "b1": 0.0, **NAME}
    state = train(optperm.ivon(0.1, 20, **options), BATCHES[:1], loss_fn=loss_fn).state
    (found,) = [leaf for name, leaf in leaf_paths(state.opt_state) if name.endswith("momentum/w")]
    np.testing.assert_allclose(found, FEW[0]["x"].mean(axis=0), rtol=1e-5)
