"""Freezing by the preconditioned gradient of the method that estimates the preconditioner."""

import functools

import jax
import numpy as np
import optax
import pytest
import support

import optperm

PARAMS = {"w": np.float32([[0, 1], [2, 3], [4, 5]]), "b": np.float32([0.5, -0.5])}


def whole(tx):
    return tx


def kernel_alone(tx):
    return optax.masked(tx, {"w": True, "b": False})


@pytest.mark.parametrize(
    ("preconditioner", "wrap"),
    support.every_night(
        [("diagonal", whole), ("full", whole), ("diagonal", kernel_alone)],
        [("full", whole), ("diagonal", kernel_alone)],
    ),
)
def test_those_with_the_smallest_preconditioned_gradient_are_frozen(preconditioner, wrap):
    """By the noise of one batch; scores may be whole where method and masks see a part."""
    rng = np.random.default_rng(0)
    scales = {"w": np.geomspace(0.1, 10.0, 6).reshape(3, 2), "b": np.array([5.0, 0.2])}
    rows = jax.tree.map(lambda s: np.float32(s * rng.normal(size=(12, *s.shape))), scales)
    noise = wrap(optperm.mandt_sgd(100, 12, preconditioner=preconditioner))
    tx = optax.chain(noise, wrap(optperm.mask_elements()))
    grads = jax.tree.map(lambda r: r.mean(axis=0), rows)

    @jax.jit
    def update(state):
        return tx.update(grads, state, PARAMS, per_example_grad_fn=lambda params: rows)[1]

    # Steps take the C of the step before, and one batch has too few examples for the full one.
    state = update(update(update(jax.jit(tx.init)(PARAMS))))
    scores = support.random_like(PARAMS, 3)
    options = {"criterion": "preconditioned_gradient", "scope": "global", "include": True}
    freeze = functools.partial(optperm.sparsity.freeze, fraction=0.5, **options)
    state = jax.jit(lambda state, scores: freeze(state, scores=scores))(state, scores)
    masks = jax.tree.leaves(optax.tree.get(state[1], "mask"))
    held = ~np.concatenate([np.ravel(mask) for mask in masks])
    n = len(held)
    covariance = np.cov(np.concatenate([rows["b"], rows["w"].reshape(12, 6)], axis=1).T)[-n:, -n:]
    used = covariance if preconditioner == "full" else np.diag(np.diag(covariance))
    moved = np.linalg.solve(used, np.concatenate([np.ravel(scores[name]) for name in "bw"])[-n:])
    np.testing.assert_array_equal(held, np.argsort(np.argsort(abs(moved))) < n // 2)


def test_a_preconditioner_that_is_missing_or_of_other_params_is_refused():
    for transformation, message in (
        (optax.sgd(0.1), r"PreconditioningState .*optperm.constant_sgd .*it has none"),
        (
            kernel_alone(optperm.mandt_sgd(100, 12)),
            "the preconditioned scores has a different tree",
        ),
    ):
        state = optax.chain(transformation, optperm.mask_elements()).init(PARAMS)
        with pytest.raises(ValueError, match=message):
            optperm.sparsity.freeze(state, 0.5, scores=PARAMS, criterion="preconditioned_gradient")
