"""The kernel: its steps have the noise that samples, in any basis and whatever limits them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from optperm.bayes._control_variates import Anchor
from optperm.bayes._forms import Full
from optperm.bayes._next_kernel import first_kernel

N, S, D, T, MU = 1000, 8, 4, 1.7, 0.8
SCALE = jnp.float32(2 * S * T / N)
ROOT = np.random.default_rng(0).normal(size=(D, D)) + 2 * np.eye(D)
C = ROOT @ ROOT.T
CURVATURE = np.array([0.01, 5.0, 50.0, 0.3])


@jax.jit
def turn(w, c, units, a):
    form, noise, _ = Full(w).turn((c, units), a, a)
    return noise, form.w


def turned(c, a, w=None, units=None):
    """The noise and W of the form for the noise c and the curvature a, from the coordinates of w."""
    w = np.eye(len(c)) if w is None else w
    units = np.diag(c) if units is None else units
    return map(np.asarray, turn(*(np.asarray(x, np.float32) for x in (w, c, units, a))))


def kernel_of(form, c, curvature, noise_ratio=2.0):
    """A kernel of a covariance, with a curvature for each direction."""
    kernel = first_kernel(
        jnp.zeros(D), form, num_data=N, batch_size=S, momentum=MU, max_noise_ratio=noise_ratio,
        max_stability=0.2,
    )  # fmt: skip
    noise = jnp.float32(np.diag(c))
    if form == "full":
        noise, w = turned(c, np.diag(c))
        kernel = kernel._replace(basis=Full(jnp.asarray(w)))
    elif form == "scalar":
        noise, curvature = jnp.mean(noise), np.max(curvature)
    return kernel._replace(noise=noise, curvature=jnp.float32(curvature))


@pytest.mark.parametrize("form", ["scalar", "diagonal", "full"])
def test_the_noise_of_a_step_is_what_its_size_asks_for(form):
    """H (C + W^-T diag(b) W^-1) H / S = (2 T / N) H for the C that the kernel has, whatever limits h:
    the share of the batches in some directions, the curvature in others."""
    kernel = kernel_of(form, C, CURVATURE)
    h = kernel.step_sizes(SCALE)
    b = kernel.injected(h, SCALE)
    w = np.eye(D) if form != "full" else np.asarray(kernel.basis.w, np.float64)
    lam, size, extra = (np.broadcast_to(np.asarray(x, np.float64), D) for x in (kernel.noise, h, b))
    by_hand = np.minimum(SCALE / (lam * 1.5), 0.2 / (CURVATURE if form != "scalar" else 50.0))
    np.testing.assert_allclose(size, by_hand, rtol=1e-5)
    held = np.linalg.inv(w).T @ np.diag(lam) @ np.linalg.inv(w)
    if form == "full":
        np.testing.assert_allclose(held, C, rtol=1e-4, atol=1e-4)
    big_h = w @ np.diag(size) @ w.T
    found = [kernel.precondition(row, h) for row in np.eye(D, dtype=np.float32)]
    np.testing.assert_allclose(found, big_h, rtol=1e-4, atol=1e-6)
    # Of the injected noise: W diag(h sqrt(b / S)) z, as the update makes it.
    noise = big_h @ held @ big_h / S + w @ np.diag(size**2 * extra / S) @ w.T
    np.testing.assert_allclose(noise, 2 * T / N * big_h, rtol=1e-3, atol=1e-8)
    assert np.all(extra >= 0)
    assert (np.ptp(size * lam) > 1e-6) == (form != "scalar")


def test_shorter_steps_keep_the_law():
    """A learning rate divides c and rho, and b makes up for it; both limits halve."""
    kernel = kernel_of("full", C, CURVATURE, noise_ratio=1e-3)
    whole, half = (kernel.step_sizes(SCALE, rate) for rate in (1.0, 0.5))
    np.testing.assert_allclose(half, whole / 2, rtol=2e-3)
    lacking = SCALE / half - kernel.injected(half, SCALE)
    np.testing.assert_allclose(lacking, kernel.noise, rtol=0.05)


def test_directions_make_the_noise_diagonal_and_the_curvature_one_in_any_units():
    """For a diagonal A, and features from e^-8 to e^8 in float32."""
    a = np.array([3.0, 0.2, 40.0, 1.0])
    units = np.exp([-8.0, -2.0, 3.0, 8.0])
    noise, w = turned(C, a)
    np.testing.assert_allclose(w.T @ C @ w, np.diag(noise), atol=1e-4)
    np.testing.assert_allclose(w.T @ np.diag(a) @ w, np.eye(D), atol=1e-5)
    scaled, other = turned(C * np.outer(units, units), a * units**2)
    np.testing.assert_allclose(scaled, noise, rtol=1e-4)
    np.testing.assert_allclose(np.abs(other * units[:, None]), np.abs(w), rtol=1e-3, atol=1e-5)


def test_entries_without_noise_are_kept_apart_to_the_last_bit():
    """They get directions of their own: the next window would take rounding for noise and curvature."""
    for seed in range(20):
        c, rng = np.zeros((9, 9)), np.random.default_rng(seed)
        is_noisy, root = rng.permutation(9) < 6, rng.normal(size=(6, 8))
        c[np.ix_(is_noisy, is_noisy)] = root @ root.T
        noise, w = turned(c, rng.uniform(1, 9, size=9))
        assert np.sum(noise > 0) == 6
        np.testing.assert_allclose(w.T @ c @ w, np.diag(noise), atol=2e-5)
        assert not np.any(w[np.ix_(is_noisy, noise == 0)])
        assert not np.any(w[np.ix_(~is_noisy, noise > 0)])


def test_second_window_in_the_coordinates_of_the_first_is_precise():
    """If a feature is 3,000 times as far from zero as it varies, C in float32 says nothing about it."""
    rng = np.random.default_rng(0)
    x = np.float32(np.c_[np.ones(4000), 3000 + rng.normal(size=4000), rng.normal(size=(4000, 2))])
    exact, w, off = np.float64(x).T @ np.float64(x) / 4000, np.eye(D, dtype=np.float32), []
    for _ in range(3):
        # Gradients x with A = C, whose diagonal in these coordinates is known
        rows = x @ w
        noise, w = turned(rows.T @ rows / 4000, (rows**2).mean(0), w, np.diag(exact))
        found = np.float64(w).T @ exact @ np.float64(w)
        off.append(np.abs(noise / found.diagonal() - 1).max())
    assert off[0] > 0.1
    assert off[-1] < 0.01


@pytest.mark.parametrize("form", ["scalar", "diagonal", "full"])
def test_distance_of_an_anchor_is_in_standard_deviations_of_the_posterior(form):
    """sqrt(N / m_i) |w_i^T g| with m_i = a_i (1 + mu) / (1 - mu), at its maximum."""
    g = np.array([0.3, -2.0, 4.0, 0.5])
    anchor = Anchor(jnp.zeros(D), jnp.float32(g))
    kernel = kernel_of(form, C, CURVATURE)._replace(anchor=anchor)
    w = np.eye(D) if form != "full" else np.asarray(kernel.basis.w, np.float64)
    m = (CURVATURE if form != "scalar" else 50.0) * (1 + MU) / (1 - MU)
    wanted = np.max(np.sqrt(N / m) * np.abs(w.T @ g))
    np.testing.assert_allclose(kernel.anchor_distance(), wanted, rtol=1e-5)


def test_what_has_neither_noise_nor_curvature_takes_no_step():
    kernel = kernel_of("diagonal", np.diag([1.0, 0.0, 2.0, 0.0]), np.array([1.0, 0.0, 1.0, 4.0]))
    h = np.asarray(kernel.step_sizes(SCALE))
    assert h[1] == 0
    assert h[3] == pytest.approx(0.05)
    assert np.all(np.isfinite(kernel.injected(jnp.float32(h), SCALE)))
