"""The diagonal and the scalar preconditioner where the noise is correlated, by exact covariances."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import support

import optperm
from optperm.bayes._correlation import Extremes, bounds, fraction_by_correlation, iterate
from optperm.bayes._covariance import BatchGradients
from optperm.bayes._forms import FORMS
from optperm.bayes._next_kernel import (
    first_kernel,
    first_window,
    next_kernel,
    observe,
    probing_steps,
)

N, S = 2000, 32
NUMBERS = {"num_data": N, "batch_size": S, "momentum": 0.0, "max_noise_ratio": 10.0}


def random_covariance(size, seed, correlation=0.8):
    """A covariance of entries that share a factor, in units of their own."""
    rng = np.random.default_rng(seed)
    root = np.sqrt(1 - correlation) * rng.normal(size=(size, size)) / np.sqrt(size)
    root = np.c_[root, np.sqrt(correlation) * rng.normal(size=(size, 2))]
    units = np.exp(0.5 * rng.normal(size=size))
    return units[:, None] * (root @ root.T + 0.05 * np.eye(size)) * units[None]


def kernel_of(form, noise, fraction):
    """A kernel with the exact noise of a form, whose steps the curvature does not limit."""
    kernel = first_kernel(jnp.zeros(len(noise)), form, max_stability=1e9, **NUMBERS)
    numbers = np.diag(noise) if form == "diagonal" else np.trace(noise) / len(noise)
    scale = np.ones(len(noise)) / np.sqrt(np.broadcast_to(numbers, len(noise)))
    extremes = np.linalg.eigvalsh(scale[:, None] * noise * scale[None])[[0, -1]]
    return kernel._replace(
        noise=jnp.float32(numbers),
        curvature=jnp.float32(0 * numbers),
        correlation=jnp.float32(extremes),
        noise_ratio=jnp.float32(fraction / (1 - fraction)),
    )


@jax.jit
def numbers_of(kernel):
    """Return the steps, the injected noise, and the bounds on the errors of the variances."""
    scale = jnp.float32(2 * S / N)
    h = kernel.step_sizes(scale)
    return h, kernel.injected(h, scale), kernel.variance_errors()


def exact_ratios(kernel, noise, hessian):
    """Return the eigenvalues of the stationary covariance divided by the posterior's, ascending."""
    h, b = (np.broadcast_to(np.float64(x), len(noise)) for x in numbers_of(kernel)[:2])
    # Small steps, of the same law: the bound is of the limit
    found = optperm.bayes.stationary_covariance(
        h, hessian, (noise + np.diag(b)) / S, continuous=True
    )
    root = np.linalg.cholesky(N * hessian)
    return np.linalg.eigvalsh(root.T @ np.float64(found) @ root)


@pytest.mark.parametrize(
    ("form", "is_fisher"), support.in_turns(["diagonal", "scalar"], [True, False])
)
def test_variances_of_all_directions_are_within_the_bound(form, is_fisher):
    """For curvature that is the noise's covariance, as of a model that is right, and for any other."""
    for seed in range(3):
        noise = random_covariance(7, seed)
        hessian = noise if is_fisher else random_covariance(7, 100 + seed)
        for fraction in (0.9, 0.3, 0.05):
            kernel = kernel_of(form, noise, fraction)
            too_small, too_large = map(float, numbers_of(kernel)[2])
            ratios = exact_ratios(kernel, noise, hessian)[[0, -1]]
            assert ratios[0] >= 1 - too_small - 2e-3
            assert ratios[1] <= 1 + too_large + 2e-3
            if is_fisher:  # the bounds are reached
                np.testing.assert_allclose(ratios, [1 - too_small, 1 + too_large], atol=0.02)


def test_fraction_of_the_batches_keeps_both_errors_within_a_fifth():
    """The larger error is a fifth; without correlation nothing limits, and chains must still move."""
    for extremes, wanted in (([0.0, 1.5], 0.2), ([0.5, 5.0], 0.05), ([0.0, 300.0], 0.015)):
        assert float(fraction_by_correlation(jnp.float32(extremes))) == pytest.approx(wanted)
    assert float(fraction_by_correlation(jnp.float32([0.95, 1.05]))) > 1
    noise = random_covariance(5, 3)
    for form in ("diagonal", "scalar"):
        correlation = kernel_of(form, noise, 0.5).correlation
        kernel = kernel_of(form, noise, float(fraction_by_correlation(correlation)))
        ratios = exact_ratios(kernel, noise, random_covariance(5, 4))
        assert 0.8 - 1e-3 <= ratios.min() <= ratios.max() <= 1.2 + 1e-3


@pytest.mark.slow
def test_bounds_of_the_correlation_after_a_window_hold_and_are_close():
    """In 95 of 100 windows; with the fraction of the batches that keeps variances within a fifth."""
    noise, w = random_covariance(6, 1), jnp.zeros(6)
    root = jnp.float32(np.linalg.cholesky(noise))
    begun = first_kernel(w, "diagonal", max_stability=0.2, **NUMBERS)
    start = first_window(begun, w)
    begun = begun._replace(noise=kernel_of("diagonal", noise, 0.5).noise, curvature=jnp.zeros(6))
    h = probing_steps(begun, start.bound)

    def window(key):
        def step(seen, inputs):
            key, number = inputs
            rows = jax.random.normal(key, (S, 6)) @ root.T
            extras = {"per_example_grad_fn": lambda w: rows, "grad_fn": lambda w: w}
            batch = BatchGradients(w, rows.mean(0), extras, S, None, None)
            raw = jnp.zeros(2, jnp.uint32)
            return observe(seen, begun, batch, "per_example", h, raw, number), None

        seen, _ = jax.lax.scan(step, start, (jax.random.split(key, 250), jnp.arange(250)))
        return next_kernel(begun, seen)

    kernels = jax.jit(jax.vmap(window))(jax.random.split(jax.random.key(0), 60))
    scale = 1 / np.sqrt(np.float64(kernels.noise))
    exact = np.linalg.eigvalsh(scale[:, :, None] * noise * scale[:, None])[:, [0, -1]]
    low, high = np.asarray(kernels.correlation).T
    is_right = (high >= exact[:, 1]) & (low <= exact[:, 0] + 1e-3)
    assert is_right.mean() > 0.88  # of a binomial law with 0.95, in 99 of 100 tests
    np.testing.assert_allclose(low, exact[:, 0], atol=0.1)
    np.testing.assert_allclose(high, exact[:, 1], rtol=0.35)
    assert high.mean() < 1.25 * exact[:, 1].mean()
    fraction = np.asarray(kernels.noise_ratio / (1 + kernels.noise_ratio))
    assert np.all((fraction * (high - 1) < 0.2001) | (fraction < 0.01501))


@jax.jit
def bounds_after_windows(extremes, angle, spread, across):
    """Bounds after 200 windows of 15 batches: (window, 2).

    Batches have R times 1 - spread or 1 + spread, and noise at right angles to each probe, which begins
    at this angle to its eigenvector.
    """
    r, form, one = jnp.linspace(*extremes, 8), FORMS["diagonal"](), jnp.ones(8)
    probe = jnp.zeros(8).at[0].set(jnp.cos(angle)).at[-1].set(jnp.sin(angle))
    start = Extremes((probe, probe[::-1]), *(jnp.zeros(2) for _ in range(3)))

    def step(seen, inputs):
        n, key = inputs
        size = 1 + spread * jax.random.rademacher(key, (), jnp.float32)
        noise = across * jax.random.normal(key, (8,))
        products = [size * r * x + noise - x * (x @ noise) for x in seen.probes]
        return iterate(seen, form, one, products, n), None

    def window(key):
        batches = jnp.arange(1, 16), jax.random.split(key, 15)
        seen, _ = jax.lax.scan(step, start, batches)
        return bounds(seen, form, one, one, jnp.int32(15))

    return jax.vmap(window)(jax.random.split(jax.random.key(0), 200))


@pytest.mark.parametrize(
    ("extremes", "angle", "spread", "across"),
    [((0.5, 2.0), 0.0, 1.0, 0.0), ((0.5, 2.0), 0.0, 0.0, 1.0), ((0.9, 1.1), np.pi / 4, 0.0, 0.0)],
    ids=["size of the batches' noise", "noise across the probes", "probes that have not arrived"],
)
def test_bounds_of_eigenvalues_with_one_source_of_error_hold(extremes, angle, spread, across):
    found = np.asarray(bounds_after_windows(*jax.device_put((extremes, angle, spread, across))))
    assert np.mean(found[:, 0] <= extremes[0]) > 0.95
    assert np.mean(found[:, 1] >= extremes[1]) > 0.95
