"""Freezing by the preconditioned gradient of the method that estimates the preconditioner."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import support
from jax.flatten_util import ravel_pytree

import optperm

PARAMS = {"w": jnp.arange(6.0).reshape(3, 2), "b": jnp.array([0.5, -0.5])}


def warm(preconditioner, wrap):
    """Return a state whose noise is that of one batch, and the covariance of its gradients."""
    rows = jax.tree.map(lambda p: support.random_like(jnp.zeros((12, *p.shape)), p.size), PARAMS)
    scales = {"w": jnp.geomspace(0.1, 10.0, 6).reshape(1, 3, 2), "b": jnp.array([[5.0, 0.2]])}
    rows = jax.tree.map(jnp.multiply, rows, scales)
    noise = wrap(optperm.mandt_sgd(100, 12, preconditioner=preconditioner, burn_in=1))
    tx = optax.chain(noise, wrap(optperm.mask_elements()))
    grads = jax.tree.map(lambda r: r.mean(axis=0), rows)

    @jax.jit
    def update(state):
        return tx.update(grads, state, PARAMS, per_example_grad_fn=lambda params: rows)[1]

    # Steps take the C of the step before, and one batch has too few examples for the full one.
    state = update(update(update(tx.init(PARAMS))))
    flat = np.stack([ravel_pytree(jax.tree.map(lambda r, i=i: r[i], rows))[0] for i in range(12)])
    return state, np.cov(flat.T)


def kernel_alone(tx):
    return optax.masked(tx, {"w": True, "b": False})


@pytest.mark.parametrize("preconditioner", ["diagonal", "full"])
def test_those_with_the_smallest_preconditioned_gradient_are_frozen(preconditioner):
    state, covariance = warm(preconditioner, lambda tx: tx)
    scores = support.random_like(PARAMS, 3)
    flat = np.asarray(ravel_pytree(scores)[0])
    moved = {
        "diagonal": flat / np.diag(covariance),
        "full": np.linalg.solve(covariance, flat),
    }[preconditioner]
    chosen = {"criterion": "preconditioned_gradient", "scope": "global", "include": True}
    state = optperm.sparsity.freeze(state, 0.5, scores=scores, **chosen)
    mask = np.asarray(ravel_pytree(jax.tree.map(lambda m: m.astype(int), state[1].mask))[0])
    np.testing.assert_array_equal(np.flatnonzero(mask == 0), np.sort(np.argsort(abs(moved))[:4]))


def test_scores_may_be_whole_where_both_are_masked():
    state, covariance = warm("diagonal", kernel_alone)
    scores = support.random_like(PARAMS, 3)
    state = optperm.sparsity.freeze(state, 0.5, scores=scores, criterion="preconditioned_gradient")
    moved = np.asarray(scores["w"]).ravel() / np.diag(covariance)[2:]
    mask = np.asarray(state[1].inner_state.mask["w"]).ravel()
    np.testing.assert_array_equal(np.flatnonzero(~mask), np.sort(np.argsort(abs(moved))[:3]))


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
