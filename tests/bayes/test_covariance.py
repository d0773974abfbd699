"""The estimators against the exact covariance: of a whole data set, and of one batch."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import replicas
import support
from jax.flatten_util import ravel_pytree

import optperm
from optperm.core.states import find_state

SIZE = 40


def loss_fn(params, batch):
    """Least squares, with a bias: the examples' gradients have means and a covariance."""
    return jnp.mean((batch["x"] @ params["w"] + params["b"] - batch["y"]) ** 2)


@functools.cache
def problem():
    rng = np.random.default_rng(3)
    x = rng.normal(size=(SIZE, 3)).astype(np.float32) * np.float32([1.0, 0.3, 2.0])
    data = {"x": x, "y": rng.normal(size=(SIZE,)).astype(np.float32)}
    return data, {"w": jnp.array([0.5, -1.0, 0.2]), "b": jnp.array(0.3)}


def some(data, *index):
    """A part of the examples."""
    return jax.tree.map(lambda leaf: jnp.asarray(leaf)[slice(*index)], data)


def in_parts(batch, size):
    """A batch as those of four replicas."""
    return jax.tree.map(lambda leaf: leaf.reshape(4, size, *leaf.shape[1:]), batch)


def example_gradients(params, batch):
    """The gradients of a batch's examples as rows, one call each."""
    single = [some(batch, n, n + 1) for n in range(len(batch["x"]))]
    return np.stack([ravel_pytree(jax.grad(loss_fn)(params, one))[0] for one in single])


def noise_of(opt_state):
    """What has been estimated of C."""
    return find_state(opt_state, optperm.bayes.MandtSgdState, method="mandt_sgd").covariance


def kept(matrix, preconditioner):
    """What is kept of a covariance, as one vector or matrix in the order of the flattened params."""
    forms = {"scalar": np.trace(matrix) / len(matrix), "diagonal": np.diag(matrix), "full": matrix}
    return forms[preconditioner]


def estimate(params, batch, preconditioner, estimator, **options):
    """One estimate, from a first step."""
    example = options.pop("example", None)
    tx = optperm.mandt_sgd(
        1000, len(batch["x"]), preconditioner=preconditioner, estimator=estimator, **options
    )

    @jax.jit
    def first(params, batch, example):
        e = optperm.evaluate(loss_fn, params, batch, example=example)
        return tx.update(e.grad, tx.init(params), params, **e.extra_args)[1]

    found = noise_of(first(params, batch, example))
    return ravel_pytree(found)[0] if preconditioner == "diagonal" else found


@pytest.mark.parametrize(
    ("preconditioner", "chunk_size"),
    [("diagonal", None), ("diagonal", 1), ("scalar", 5), ("full", 50)],
)
def test_per_example_is_the_unbiased_covariance_of_the_batch(preconditioner, chunk_size):
    data, params = problem()
    batch = some(data, 12)
    expected = kept(np.cov(example_gradients(params, batch).T, ddof=1), preconditioner)
    found = estimate(params, batch, preconditioner, "per_example", chunk_size=chunk_size)
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(
    ("preconditioner", "estimator"), [("diagonal", "single_example"), ("full", "two_batches")]
)
def test_mean_of_many_estimates_is_the_exact_covariance(preconditioner, estimator):
    """With batches that do not halve evenly."""
    data, params = problem()
    batch_size = 5
    exact = np.cov(example_gradients(params, data).T, ddof=0)  # of an example drawn at random

    @jax.jit
    @jax.vmap
    def draw(key):
        chosen = jax.random.choice(key, SIZE, (batch_size + 1,))
        batch, example = (
            jax.tree.map(lambda leaf, rows=rows: jnp.asarray(leaf)[rows], data)
            for rows in (chosen[:-1], chosen[-1:])
        )
        return estimate(params, batch, preconditioner, estimator, example=example)

    count = 20_000
    draws = np.asarray(draw(jax.random.split(jax.random.key(0), count)), np.float64)
    error = draws.mean(axis=0) - kept(exact, preconditioner)
    assert np.all(np.abs(error) < 4.5 * draws.std(axis=0) / np.sqrt(count))
    # That far off the figure would be without the corrections for the size of the batch.
    assert np.all(4.5 * draws.std(axis=0) / np.sqrt(count) < 0.15 * np.abs(exact).max())


@pytest.mark.parametrize(
    ("preconditioner", "estimator", "mapping"),
    [
        ("scalar", "per_example", "vmap"),
        ("diagonal", "single_example", "shard_map"),
        ("full", "two_batches", "pmap"),
    ],
)
def test_replicas_estimate_the_covariance_of_the_whole_batch(preconditioner, estimator, mapping):
    """From the examples of all; of the other estimators each replica's estimate, averaged."""
    data, params = problem()
    batch, examples = some(data, 12), some(data, 20, 24)
    forms = {"preconditioner": preconditioner, "estimator": estimator}
    tx = optperm.mandt_sgd(1000, 12, axis_name=replicas.AXIS, chunk_size=2, **forms)
    state = tx.init(params)

    def step(part, example):
        e = optperm.evaluate(loss_fn, params, part, axis_name=replicas.AXIS, example=example)
        _, new = tx.update(e.grad, state, params, **e.extra_args)
        return noise_of(new)

    found = replicas.MAPPINGS[mapping](step, 4)(in_parts(batch, 3), in_parts(examples, 1))
    rows, apart = (example_gradients(params, each) for each in (batch, examples))
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


@pytest.mark.parametrize("estimator", ["per_example", "single_example", "two_batches"])
def test_estimate_under_a_mask_is_of_what_it_sees(estimator):
    """As alone on that part of the params; without any part it hands on what comes."""
    data, params = problem()
    batch, example = some(data, 12), some(data, 20, 21)
    e = optperm.evaluate(loss_fn, params, batch, example=example)
    tx = optperm.mandt_sgd(1000, 12, estimator=estimator)
    masked = optax.masked(tx, {"w": True, "b": False})
    _, state = masked.update(e.grad, masked.init(params), params, **e.extra_args)

    def loss_of_w(w, batch):
        return loss_fn({"w": w["w"], "b": params["b"]}, batch)

    alone = {"w": params["w"]}
    e_alone = optperm.evaluate(loss_of_w, alone, batch, example=example)
    _, expected = tx.update(e_alone.grad, tx.init(alone), alone, **e_alone.extra_args)
    for found, wanted in zip(*map(jax.tree.leaves, (state, expected)), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-6)

    nothing = optax.masked(tx, {"w": False, "b": False})
    updates, _ = nothing.update(e.grad, nothing.init(params), params, **e.extra_args)
    support.assert_same_bits(updates, e.grad)
