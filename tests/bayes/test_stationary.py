"""Stationary covariances against published figures, closed forms and the recursion itself."""

import functools

import hypothesis
import jax
import numpy as np
import pytest
import support
from hypothesis import strategies as st

import optperm

N, S, D = 1000, 10, 3
M = np.array([[2.0, 0.5, 0.0], [0.5, 1.0, 0.3], [0.0, 0.3, 0.5]])
C1 = np.array([[1.0, 0.6, 0.0], [0.6, 2.0, 0.0], [0.0, 0.0, 0.1]])
# A preconditioner, and its divergence from the posterior: in the limit of small steps, and of the steps
# as they are.
PUBLISHED = {
    "scalar": (2 * S * D / (N * np.trace(C1)), 0.657710, 0.660328),
    "diagonal": (2 * S / (N * np.diag(C1)), 0.053221, 0.055051),
    "full": (2 * S / N * np.linalg.inv(C1), 0.0, 0.000830),
}


def spd(seed, d=4):
    root = np.random.default_rng(seed).normal(size=(d, d))
    return root @ root.T / d + 0.1 * np.eye(d)


def step_size(drift):
    """A number that makes `drift` a step well inside of stability."""
    return 0.5 / np.abs(np.linalg.eigvals(drift)).max()


def iterated(h, a, r, momentum, steps=4000):
    """The covariance of theta after many steps of the recursion of (theta, v), as it is written."""
    identity, zero = np.eye(len(a)), 0 * a
    to_v = np.block([[identity, zero], [a, momentum * identity]])  # v' = mu v + A theta + eps
    to_theta = np.block([[identity, -h], [zero, identity]])  # theta' = theta - H v'
    noise = np.block([[zero, zero], [zero, r]])
    covariance = 0 * noise
    for _ in range(steps):
        covariance = to_theta @ (to_v @ covariance @ to_v.T + noise) @ to_theta.T
    return covariance[: len(a), : len(a)]


@pytest.mark.parametrize(("name", "dtype"), support.in_turns(PUBLISHED, ["float64", "float32"]))
def test_divergences_from_the_posterior(name, dtype):
    """The specification's figures, for Hessian M and covariance C1 of the gradients."""
    h, *figures = PUBLISHED[name]
    given = (h, M, C1 / S, np.linalg.inv(N * M), np.zeros(D))
    h, hessian, noise, posterior, zero = (np.asarray(x, dtype) for x in given)
    with jax.enable_x64(dtype == "float64"):
        for continuous, wanted in zip((True, False), figures, strict=True):
            solve = functools.partial(optperm.bayes.stationary_covariance, continuous=continuous)
            found = jax.jit(solve)(h, hessian, noise)
            divergence = jax.jit(optperm.bayes.gaussian_kl)(zero, found, zero, posterior)
            assert found.dtype == divergence.dtype == dtype
            tolerance = {"float64": 1e-6, "float32": 2e-6}[dtype]
            assert float(divergence) == pytest.approx(wanted, abs=tolerance)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("form", "momentum"),
    support.every_night(
        [("scalar", 0.9), ("diagonal", 0.0), ("full", 0.0), ("full", 0.5)],
        [("diagonal", 0.0), ("full", 0.5)],
    ),
)
def test_the_recursion_settles_there(form, momentum):
    """Against the covariance of theta after thousands of steps, momentum as optax.trace has it."""
    a, r = spd(0), spd(1)
    h = {"scalar": np.eye(4), "diagonal": np.diag([1.0, 0.2, 2.0, 0.7]), "full": spd(2)}[form]
    h = h * step_size(h @ a)
    given = {"scalar": h[0, 0], "diagonal": np.diag(h), "full": h}[form]
    found = optperm.bayes.stationary_covariance(given, a, r, momentum=momentum)
    np.testing.assert_allclose(found, iterated(h, a, r, momentum), rtol=1e-10, atol=1e-14)
    traced = jax.jit(lambda mu: optperm.bayes.stationary_covariance(given, a, r, momentum=mu))
    np.testing.assert_allclose(traced(momentum), found, rtol=1e-10, atol=1e-14)


@pytest.mark.usefixtures("x64")
@hypothesis.settings(max_examples=8)
@hypothesis.given(seed=st.integers(0, 2**32 - 1), momentum=st.sampled_from([0.0, 0.7]))
def test_the_limit_solves_its_equation(seed, momentum):
    """For any positive definite matrices; and it is what small steps come near to, momentum or not."""
    a, r, h = spd(seed), spd(seed + 1), spd(seed + 2)
    limit = optperm.bayes.stationary_covariance(h, a, r, momentum=momentum, continuous=True)
    noise = h @ r @ h / (1 - momentum)
    np.testing.assert_allclose(h @ a @ limit + limit @ a @ h, noise, atol=1e-9 * noise.max())
    np.testing.assert_array_equal(limit, limit.T)
    assert np.linalg.eigvalsh(limit).min() > 0
    small = 1e-7 * step_size(h @ a)
    found = optperm.bayes.stationary_covariance(small * h, a, r, momentum=momentum)
    np.testing.assert_allclose(found / small, limit, atol=1e-5 * np.abs(limit).max())


def test_small_steps_keep_their_digits_in_float32():
    """Where I - HA, rounded to float32, is off by 1 %, the covariance is not."""
    a, r, h = (spd(seed).astype(np.float32) for seed in range(3))
    h = np.float32(1e-5) * h
    found = np.asarray(optperm.bayes.stationary_covariance(h, a, r), np.float64)
    a, r, h = (x.astype(np.float64) for x in (a, r, h))
    residual = h @ a @ found + found @ a @ h - h @ a @ found @ a @ h - h @ r @ h
    assert np.abs(residual).max() < 1e-6 * np.abs(h @ r @ h).max()


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_up_to_the_edge_of_stability(momentum):
    """In one dimension theta is an AR(2) process, stable below h a = 2 (1 + mu); an error above."""
    a, r = np.array([[2.0]]), np.array([[3.0]])
    plus = 1 + momentum
    edge = 2 * plus / 2.0
    compute = jax.jit(
        lambda h: optperm.bayes.stationary_covariance(h, a, r, momentum=momentum)[0, 0]
    )
    for h in (1e-4 * edge, 0.5 * edge, 0.999 * edge):
        wanted = h**2 * 3.0 * plus / ((1 - momentum) * (plus**2 - (plus - h * 2.0) ** 2))
        assert float(compute(h)) == pytest.approx(wanted, rel=1e-4)
    assert np.isnan(compute(1.001 * edge))
    with pytest.raises(ValueError, match=r"spectral radius of a step is 1\.0.*smaller steps"):
        optperm.bayes.stationary_covariance(1.001 * edge, a, r, momentum=momentum)


@pytest.mark.parametrize("continuous", [False, True])
def test_no_curvature_no_stationary_distribution(continuous):
    """A flat direction, or one that curves down, is an error, and NaN where it is traced or mapped."""
    r = np.eye(2)

    def compute(a):
        return optperm.bayes.stationary_covariance(0.1, a, r, continuous=continuous)

    flats = np.ones((2, 2)), np.diag([1.0, -1.0]), np.zeros((2, 2))
    for flat in flats:
        with pytest.raises(ValueError, match=r"No stationary distribution.*prior"):
            compute(flat)
        assert np.all(np.isnan(jax.jit(compute)(flat)))
    mapped = jax.jit(jax.vmap(compute))(np.stack([*flats, np.eye(2)]))
    np.testing.assert_array_equal(np.isnan(mapped).all(axis=(1, 2)), [True, True, True, False])
    assert np.isfinite(mapped[3]).all()


@pytest.mark.usefixtures("x64")
def test_divergence_of_gaussians():
    """Against its formula, and by hand; the two directions differ."""
    (m, other_m), sigma, other = np.random.default_rng(0).normal(size=(2, 4)), spd(3), spd(4)
    inverse, shift = np.linalg.inv(other), other_m - m
    wanted = np.trace(inverse @ sigma) - 4 + shift @ inverse @ shift
    wanted += np.linalg.slogdet(other)[1] - np.linalg.slogdet(sigma)[1]
    zero, one, four = np.zeros(1), np.eye(1), 4 * np.eye(1)
    for arguments, known in (
        ((m, sigma, other_m, other), wanted / 2),
        ((zero, one, zero, four), (0.25 - 1 + np.log(4)) / 2),
        ((zero, four, zero, one), (4 - 1 - np.log(4)) / 2),
    ):
        found = jax.jit(optperm.bayes.gaussian_kl)(*arguments)
        assert float(found) == pytest.approx(known, rel=1e-10)


def test_a_small_divergence_is_not_lost_in_float32():
    """Of covariances 0.1 % apart, where trace less D alone rounds by more than the divergence."""
    excess, m, one = 1e-3, np.ones(100), np.eye(100, dtype=np.float32)
    found = optperm.bayes.gaussian_kl(m, np.float32(1 + excess) * one, m, one)
    assert float(found) == pytest.approx(50 * (excess - np.log1p(excess)), rel=1e-2)
    assert float(optperm.bayes.gaussian_kl(m, 3 * one, m, 3 * one)) < 1e-11


@pytest.mark.parametrize("condition", [pytest.param(1e3, marks=pytest.mark.slow), 1e10])
def test_divergence_of_a_large_condition_number_is_right_in_float32(condition):
    """KL(N(0, S), N(0, 1.3 S)) is the same for all S, mapped, compiled and differentiated; matrices of
    float64 are not rounded first."""
    q, zero = np.linalg.qr(np.random.default_rng(0).normal(size=(10, 10)))[0], np.zeros(10)
    s = q @ np.diag(np.logspace(0, -np.log10(condition), 10)) @ q.T
    s = (s + s.T) / 2
    wanted = 5 * (1 / 1.3 - 1 + np.log(1.3))
    found = optperm.bayes.gaussian_kl(zero, s, zero, 1.3 * s)
    assert found.dtype == np.float32
    assert float(found) == pytest.approx(wanted, rel=1e-5)
    if condition > 1e3:  # traced arguments are in float32
        return
    means = np.float32([zero, zero + 1])
    divergence = lambda m: optperm.bayes.gaussian_kl(m, s, np.float32(zero), 1.3 * s)  # noqa: E731
    mapped = jax.vmap(divergence)
    half = float(np.ones(10) @ np.linalg.inv(1.3 * s) @ np.ones(10)) / 2
    for run in (mapped, jax.jit(mapped)):
        np.testing.assert_allclose(run(means), [wanted, wanted + half], rtol=1e-4)
    slope = jax.grad(divergence)(means[1])
    np.testing.assert_allclose(slope, np.linalg.solve(1.3 * s, np.ones(10)), rtol=1e-3, atol=1e-2)


def test_traced_divergence_of_no_gaussian_is_nan():
    zero, one, bad = np.zeros(2), np.eye(2), np.diag([1.0, -1.0])
    for arguments in ((zero, bad, zero, one), (zero, one, zero, bad)):
        assert np.isnan(jax.jit(optperm.bayes.gaussian_kl)(*arguments))
