"""Entropies and mutual information of predictions, and what predictions are refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optperm


def test_an_entropy_is_of_probabilities():
    """Logits, log-probabilities and sigmoids are refused; 16 bits may sum to one by their rounding."""
    p = jax.nn.softmax(jax.random.normal(jax.random.key(0), (1, 3, 5, 4)))

    def predictions(draws):
        dtype = "float32"
        return optperm.bayes.Predictions(
            draws, draws.mean((0, 1), dtype=dtype), draws.astype(dtype).std((0, 1))
        )

    mean = np.asarray(p, np.float64).mean(axis=(0, 1))
    for draws, tolerance in ((p, 1e-5), (p.astype("bfloat16"), 0.02)):
        found = predictions(draws)
        expected = -(mean * np.log(mean)).sum(axis=-1)
        np.testing.assert_allclose(found.entropy(), expected, rtol=tolerance)
        assert (found.mutual_information() > 0).all()
    for draws in (5 * p, jnp.log(p), p[..., 0], p[..., :1], p.at[0, 0, 0, 0].set(jnp.nan)):
        for call in (predictions(draws).entropy, predictions(draws).mutual_information):
            with pytest.raises(ValueError, match=r"probabilities .*two classes|sum to one"):
                call()


def test_entropy_and_mutual_information_of_two_draws():
    """Sure draws that disagree have log 2 of both, draws that agree on 0.5 of the first alone."""
    draws = jnp.array([[[1.0, 0.0], [0.5, 0.5]], [[0.0, 1.0], [0.5, 0.5]]])
    found = optperm.bayes.posterior_predictive(lambda w, x: w, optperm.bayes.Ensemble(draws), ())
    np.testing.assert_allclose(found.entropy(), np.log([2, 2]), rtol=1e-6)
    np.testing.assert_allclose(found.mutual_information(), [np.log(2), 0.0], atol=1e-6)
    for params in (jnp.ones(()), {"w": jnp.ones((2, 3)), "b": jnp.ones(3)}):
        with pytest.raises(ValueError, match="stacked along a leading axis"):
            optperm.bayes.posterior_predictive(lambda w, x: w, optperm.bayes.Ensemble(params), ())
