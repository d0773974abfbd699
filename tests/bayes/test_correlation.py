"""The diagonal and the scalar preconditioner where the noise is correlated, by exact covariances."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optperm
from optperm.bayes._covariance import batch_gradients
from optperm.bayes._warmup import begin, fraction_by_correlation, learn

N, S = 2000, 32
NUMBERS = {"noise_ratio": 10.0, "num_data": N, "batch_size": S, "momentum": 0.0}


def random_covariance(size, seed, correlation=0.8):
    """A covariance of entries that share a factor, in units of their own."""
    rng = np.random.default_rng(seed)
    root = np.sqrt(1 - correlation) * rng.normal(size=(size, size)) / np.sqrt(size)
    root = np.c_[root, np.sqrt(correlation) * rng.normal(size=(size, 2))]
    units = np.exp(0.5 * rng.normal(size=size))
    return units[:, None] * (root @ root.T + 0.05 * np.eye(size)) * units[None]


def kernel_of(form, noise, fraction):
    """A kernel with the exact noise of a form, whose steps the curvature does not limit."""
    kernel, _ = begin(jnp.zeros(len(noise)), form, **NUMBERS)
    numbers = np.diag(noise) if form == "diagonal" else np.trace(noise) / len(noise)
    scale = np.ones(len(noise)) / np.sqrt(np.broadcast_to(numbers, len(noise)))
    extremes = np.linalg.eigvalsh(scale[:, None] * noise * scale[None])[[0, -1]]
    return kernel._replace(
        noise=jnp.float32(numbers),
        curvature=jnp.float32(0 * numbers),
        correlation=jnp.float32(extremes),
        noise_ratio=jnp.float32(fraction / (1 - fraction)),
    )


def exact_ratios(kernel, noise, hessian):
    """Eigenvalues of the exact stationary covariance over that of the posterior: of all directions."""
    scale = jnp.float32(2 * S / N)
    h = np.broadcast_to(np.float64(kernel.step_sizes(scale, jnp.float32(1e9))), len(noise))
    b = np.broadcast_to(np.float64(kernel.injected(jnp.float32(h), scale)), len(noise))
    # Small steps, of the same law: the bound is of the limit
    found = optperm.bayes.stationary_covariance(
        h, hessian, (noise + np.diag(b)) / S, continuous=True
    )
    root = np.linalg.cholesky(N * hessian)
    return np.linalg.eigvalsh(root.T @ np.float64(found) @ root)


@pytest.mark.parametrize("form", ["diagonal", "scalar"])
@pytest.mark.parametrize("is_fisher", [True, False])
def test_variances_of_all_directions_are_within_the_bound(form, is_fisher):
    """For curvature that is the noise's covariance, as of a model that is right, and for any other."""
    for seed in range(6):
        noise = random_covariance(7, seed)
        hessian = noise if is_fisher else random_covariance(7, 100 + seed)
        for fraction in (0.9, 0.3, 0.05):
            kernel = kernel_of(form, noise, fraction)
            too_small, too_large = (float(error) for error in kernel.variance_errors())
            ratios = exact_ratios(kernel, noise, hessian)
            assert ratios.min() >= 1 - too_small - 2e-3
            assert ratios.max() <= 1 + too_large + 2e-3
            if is_fisher:  # the bounds are reached
                np.testing.assert_allclose(
                    [ratios.min(), ratios.max()], [1 - too_small, 1 + too_large], atol=0.02
                )


def test_fraction_of_the_batches_keeps_both_errors_within_a_fifth():
    """The larger error is a fifth; without correlation nothing limits, and chains must still move."""
    for extremes, wanted in (([0.0, 1.5], 0.2), ([0.5, 5.0], 0.05), ([0.0, 300.0], 0.02)):
        assert float(fraction_by_correlation(jnp.float32(extremes))) == pytest.approx(wanted)
    assert float(fraction_by_correlation(jnp.float32([0.95, 1.05]))) > 1
    noise = random_covariance(5, 3)
    for form in ("diagonal", "scalar"):
        correlation = kernel_of(form, noise, 0.5).correlation
        kernel = kernel_of(form, noise, float(fraction_by_correlation(correlation)))
        ratios = exact_ratios(kernel, noise, random_covariance(5, 4))
        assert 0.8 - 1e-3 <= ratios.min() <= ratios.max() <= 1.2 + 1e-3


@pytest.mark.parametrize("form", ["diagonal", "scalar"])
def test_eigenvalues_of_the_correlation_are_found(form):
    """By the estimates of a window, within the error of so many batches."""
    noise = random_covariance(6, 1)
    root, w = jnp.float32(np.linalg.cholesky(noise)), jnp.zeros(6)
    exact = kernel_of(form, noise, 0.5)
    kernel, seen = begin(w, form, **NUMBERS)
    kernel = kernel._replace(noise=exact.noise)
    h = jax.tree.map(lambda c: 0.01 / c, exact.noise)

    def step(seen, inputs):
        key, number = inputs
        rows = jax.random.normal(key, (S, 6)) @ root.T
        extras = {"per_example_grad_fn": lambda w: rows, "grad_fn": lambda w: w}
        batch = batch_gradients(rows.mean(0), w, extras, S, None, None)
        raw, scale = jnp.zeros(2, jnp.uint32), jnp.float32(2 * S / N)
        return learn(seen, jnp.int32(0), kernel, batch, "per_example", h, scale, raw, number)[0], ()

    inputs = jax.random.split(jax.random.key(0), 250), jnp.arange(250)
    seen, _ = jax.jit(functools.partial(jax.lax.scan, step))(seen, inputs)
    low, high = np.float64(seen.correlation)
    assert high == pytest.approx(float(exact.correlation[1]), rel=0.1)
    assert low == pytest.approx(float(exact.correlation[0]), abs=0.1)


@pytest.mark.chains
@pytest.mark.parametrize("form", ["diagonal", "scalar"])
def test_chains_of_correlated_features_have_variances_within_a_fifth(form):
    """A regression on two features with a correlation of 0.9; noise of batches alone would give 0.3."""
    rng = np.random.default_rng(0)
    x = rng.multivariate_normal(np.zeros(2), [[1.0, 0.9], [0.9, 1.0]], size=800)
    y = x @ [1.0, -0.5] + rng.normal(size=800)
    samples = optperm.bayes.sample(
        lambda w, batch: jnp.mean((batch[0] @ w - batch[1]) ** 2) / 2,
        (jnp.float32(x), jnp.float32(y)), jnp.zeros(2), 0, batch_size=32, num_draws=500, thinning=50,
        sampler=functools.partial(optperm.constant_sgd, preconditioner=form, burn_in=1000),
    )  # fmt: skip
    exact = np.diag(np.linalg.inv(x.T @ x))
    ratios = np.float64(samples.params).reshape(-1, 2).var(axis=0) / exact
    assert np.all(ratios > 0.65)  # 0.8 within the error of some 150 effective draws
    assert np.all(ratios < 1.35)
