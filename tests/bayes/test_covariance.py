"""The estimators against the exact covariance: of a whole data set, and of one batch."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import replicas
import support
from jax.flatten_util import ravel_pytree

import optperm

SIZE = 40
X = support.normal((SIZE, 3)) * jnp.float32([[1.0, 0.3, 2.0]])
DATA = {"x": X, "y": support.normal((SIZE,), 1)}
PARAMS = {"w": jnp.array([0.5, -1.0, 0.2]), "b": jnp.array(0.3)}


def loss_fn(params, batch):
    """Least squares, with a bias: the examples' gradients have means and a covariance."""
    return jnp.mean((batch["x"] @ params["w"] + params["b"] - batch["y"]) ** 2)


def some(*index):
    """A part of the examples."""
    return replicas.take(DATA, slice(*index))


def example_gradients(batch):
    """The gradients of a batch's examples as rows, in the order of the flattened params."""
    error = batch["x"] @ PARAMS["w"] + PARAMS["b"] - batch["y"]
    return 2 * np.asarray(error)[:, None] * np.c_[np.ones(len(error)), batch["x"]]


def kept(matrix, preconditioner):
    """What is kept of a covariance, as one vector or matrix in the order of the flattened params."""
    forms = {"scalar": np.trace(matrix) / len(matrix), "diagonal": np.diag(matrix), "full": matrix}
    return forms[preconditioner]


def estimate(batch, preconditioner, estimator, example=None, chunk_size=None):
    """One estimate, from a first step."""
    options = {"preconditioner": preconditioner, "estimator": estimator, "chunk_size": chunk_size}
    tx = optperm.mandt_sgd(1000, len(batch["x"]), **options)

    @jax.jit
    def first(batch, example):
        e = optperm.evaluate(loss_fn, PARAMS, batch, example=example)
        return tx.update(e.grad, tx.init(PARAMS), PARAMS, **e.extra_args)[1]

    found = optax.tree.get(first(batch, example), "covariance")
    return ravel_pytree(found)[0] if preconditioner == "diagonal" else found


@pytest.mark.parametrize(
    ("preconditioner", "chunk_size"),
    support.every_night(
        [("diagonal", None), ("diagonal", 1), ("scalar", 5), ("full", 50)],
        [("diagonal", 1), ("full", 50)],
    ),
)
def test_per_example_is_the_unbiased_covariance_of_the_batch(preconditioner, chunk_size):
    batch = some(12)
    expected = kept(np.cov(example_gradients(batch).T, ddof=1), preconditioner)
    found = estimate(batch, preconditioner, "per_example", chunk_size=chunk_size)
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(
    ("preconditioner", "estimator"), [("diagonal", "single_example"), ("full", "two_batches")]
)
def test_mean_of_many_estimates_is_the_exact_covariance(preconditioner, estimator):
    """With batches that do not halve evenly."""
    exact = np.cov(example_gradients(DATA).T, ddof=0)  # of an example drawn at random

    @jax.jit
    @jax.vmap
    def draw(key):
        rows = jax.random.choice(key, SIZE, (6,))
        batch, example = replicas.take(DATA, rows[:5]), replicas.take(DATA, rows[5:])
        return estimate(batch, preconditioner, estimator, example=example)

    count = 20_000
    draws = np.asarray(draw(jax.random.split(jax.random.key(0), count)), np.float64)
    limit = 4.5 * draws.std(axis=0) / np.sqrt(count)
    assert np.all(np.abs(draws.mean(axis=0) - kept(exact, preconditioner)) < limit)
    # That far off the figure would be without the corrections for the size of the batch.
    assert np.all(limit < 0.15 * np.abs(exact).max())


@pytest.mark.parametrize(
    ("preconditioner", "estimator", "mapping"),
    [
        ("scalar", "per_example", "vmap"),
        ("diagonal", "single_example", "shard_map"),
        pytest.param("full", "two_batches", "pmap", marks=pytest.mark.exhaustive),
    ],
)
def test_replicas_estimate_the_covariance_of_the_whole_batch(preconditioner, estimator, mapping):
    """From the examples of all; of the other estimators each replica's estimate, averaged."""
    batch, examples = some(12), some(20, 24)
    options = {"preconditioner": preconditioner, "estimator": estimator, "chunk_size": 2}
    tx = optperm.mandt_sgd(1000, 12, axis_name=replicas.AXIS, **options)
    state = tx.init(PARAMS)

    def step(part, example):
        e = optperm.evaluate(loss_fn, PARAMS, part, axis_name=replicas.AXIS, example=example)
        _, new = tx.update(e.grad, state, PARAMS, **e.extra_args)
        return optax.tree.get(new, "covariance")

    parts = jax.tree.map(lambda leaf: leaf.reshape(4, -1, *leaf.shape[1:]), (batch, examples))
    found = replicas.MAPPINGS[mapping](step, 4)(*parts)
    rows, apart = (example_gradients(each) for each in (batch, examples))
    mean = rows.mean(axis=0)
    half = rows[::3].mean(axis=0)  # the first example of each three
    expected = {
        "per_example": np.cov(rows.T),
        "single_example": (apart - mean).T @ (apart - mean) / 4 / (1 + 1 / 12),
        "two_batches": np.outer(half - mean, half - mean) * 12 * 4 / 8,
    }[estimator]
    for index in range(4):
        mine = replicas.take(found, index)
        support.assert_same_bits(mine, replicas.take(found, 0))
        flat = ravel_pytree(mine)[0] if preconditioner == "diagonal" else mine
        np.testing.assert_allclose(flat, kept(expected, preconditioner), rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize(
    "estimator",
    support.every_night(["per_example", "single_example", "two_batches"], ["per_example"]),
)
def test_estimate_under_a_mask_is_of_what_it_sees(estimator):
    """The estimate is that of the unmasked params alone; without them, the updates pass unchanged."""
    batch, example = some(12), some(20, 21)
    tx, alone = optperm.mandt_sgd(1000, 12, estimator=estimator), {"w": PARAMS["w"]}

    def first(tx, params, loss_fn):
        @jax.jit
        def step(params):
            e = optperm.evaluate(loss_fn, params, batch, example=example)
            return e.grad, *tx.update(e.grad, tx.init(params), params, **e.extra_args)

        return step(params)

    state = first(optax.masked(tx, {"w": True, "b": False}), PARAMS, loss_fn)[2]
    expected = first(tx, alone, lambda w, batch: loss_fn(PARAMS | w, batch))[2]
    chex.assert_trees_all_close(jax.tree.leaves(state), jax.tree.leaves(expected), rtol=1e-6)
    grads, updates, _ = first(optax.masked(tx, {"w": False, "b": False}), PARAMS, loss_fn)
    support.assert_same_bits(updates, grads)
