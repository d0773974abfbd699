"""The posterior of a network's last layer, the rest fixed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optperm


@pytest.mark.chains
def test_the_last_layer_has_its_exact_posterior():
    """Linear in fixed hidden units: N(A^-1 X^T y, A^-1), A = X^T X + I."""
    keys = jax.random.split(jax.random.key(0), 5)
    x = jax.random.normal(keys[0], (600, 3))
    body = {"w": jax.random.normal(keys[1], (3, 4)), "b": jax.random.normal(keys[2], (4,))}
    inputs = jax.nn.relu(x @ body["w"] + body["b"][None])  # once: nothing of the body is trained
    y = inputs @ jnp.arange(4.0) + jax.random.normal(keys[3], (600,))

    def last_loss(last, batch):
        return jnp.mean((batch[0] @ last - batch[1]) ** 2) / 2

    samples = optperm.bayes.sample(
        last_loss,
        (inputs, y),
        jnp.zeros(4),
        keys[4],
        log_prior=lambda last: -0.5 * jnp.sum(last**2),
        num_draws=400,
    )
    draws = np.asarray(samples.params, np.float64).reshape(-1, 4)
    precision = np.asarray(inputs.T @ inputs, np.float64) + np.eye(4)
    covariance = np.linalg.inv(precision)
    deviations = np.sqrt(np.diag(covariance))
    mean = covariance @ np.asarray(inputs.T @ y, np.float64)
    np.testing.assert_allclose(draws.mean(axis=0), mean, atol=0.15 * deviations.max())
    np.testing.assert_allclose(draws.std(axis=0), deviations, rtol=0.15)
    correlation = np.corrcoef(draws.T)
    np.testing.assert_allclose(
        correlation, covariance / np.outer(deviations, deviations), atol=0.12
    )
