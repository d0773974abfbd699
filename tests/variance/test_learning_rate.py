"""The rate of SVRG against the eigenvalues that it is made of."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optperm

N, L2 = 40, 0.1
X = np.random.default_rng(0).normal(size=(N, 5)) * np.array([1.0, 2.0, 30.0, 0.1, 5.0])


def loss_fn(w, batch):
    """Ridge regression: the same curvature everywhere."""
    return 0.5 * jnp.mean((batch["x"] @ w - batch["y"]) ** 2) + 0.5 * L2 * jnp.dot(w, w)


def test_the_rate_is_one_over_the_expected_smoothness():
    data = {"x": X.astype(np.float32), "y": np.ones(N, np.float32)}
    whole = np.linalg.eigvalsh(X.T @ X / N + L2 * np.eye(5)).max()
    single = (X**2).sum(axis=1).max() + L2
    for b in (1, 8, N):
        rate = optperm.svrg_learning_rate(loss_fn, jnp.ones(5), data, b, chunk_size=16)
        expected = N * (b - 1) / (b * (N - 1)) * whole + (N - b) / (b * (N - 1)) * single
        np.testing.assert_allclose(1 / rate, expected, rtol=1e-3)


def test_a_loss_that_is_not_convex_is_said():
    with pytest.warns(RuntimeWarning, match="not convex"):
        rate = optperm.svrg_learning_rate(
            lambda w, batch: -jnp.sum(w**2) + 0 * jnp.mean(batch), jnp.ones(2), jnp.ones(4), 2
        )
    assert rate == pytest.approx(0.5)


def test_misuse_is_named():
    data = {"x": X, "y": np.ones(N)}
    calls = [
        (lambda: optperm.svrg_learning_rate(loss_fn, jnp.ones(5), data, N + 1), "at least"),
        (lambda: optperm.svrg_learning_rate(loss_fn, jnp.ones(5), {**data, "y": 1.0}, 1), "axis"),
        (lambda: optperm.svrg_learning_rate(lambda w, _: w.sum(), jnp.ones(5), X, 1), "curvature"),
    ]
    for call, message in calls:
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(TypeError, match="real scalar"):
        optperm.svrg_learning_rate(lambda w, _: w, jnp.ones(5), X, 1)
