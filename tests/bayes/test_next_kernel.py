"""The statistics of a window, and the kernel that follows from them, against figures by hand."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import support

from optperm.bayes._control_variates import Anchor
from optperm.bayes._covariance import BatchGradients
from optperm.bayes._next_kernel import (
    curvature_bound,
    first_kernel,
    first_window,
    next_kernel,
    next_pass,
    next_window,
    observe,
    probing_steps,
    relative_variance,
)

N, S, D = 500, 8, 3
NO_BOUND = jnp.float32(jnp.inf)
NOISE = np.array([[1.0, 0.6, 0.0], [0.6, 2.0, 0.0], [0.0, 0.0, 0.1]])


def begin(form, **numbers):
    """The first kernel and the start of its window; c = 0.2, rho up to 10, no momentum."""
    given = {"num_data": N, "batch_size": S, "momentum": 0.0, "max_noise_ratio": 10.0}
    kernel = first_kernel(jnp.zeros(D), form, **given | {"max_stability": 0.2} | numbers)
    return kernel, first_window(kernel, jnp.zeros(D))


def known(kernel, curvature=0.0, **values):
    """The kernel after an earlier window, with a noise of 1."""
    one = jnp.ones_like(kernel.noise)
    return kernel._replace(**{"noise": one, "curvature": curvature * one} | values)


def test_first_kernel_takes_no_steps_and_has_no_probes():
    """Without an estimate nothing is known, so h is 0, and curvature cannot be measured."""
    sizes_of = jax.jit(lambda k: (k.step_sizes(k.scale()), probing_steps(k, NO_BOUND)))
    for form in ("scalar", "diagonal", "full"):
        for sizes in sizes_of(begin(form)[0]):
            np.testing.assert_array_equal(sizes, 0)


def test_unknown_curvature_stops_the_chain_but_not_the_probes():
    """After the first window, h is 0 for steps and s / (Lambda (1 + 1 / rho)) for probes."""
    kernel, _ = begin("diagonal")
    noise = jnp.float32([1.0, 2.0, 4.0])
    kernel = kernel._replace(noise=noise, estimates=jnp.int32(9))
    np.testing.assert_array_equal(kernel.step_sizes(kernel.scale()), 0)
    np.testing.assert_allclose(
        probing_steps(kernel, NO_BOUND), 2 * S / N / (1.1 * noise), rtol=1e-5
    )


def test_probe_of_an_entry_without_noise_has_the_geometric_mean_of_the_lengths():
    """The probe of an entry without noise has the length of a typical entry, in any units."""
    kernel, _ = begin("diagonal", max_noise_ratio=1e9)
    s = 2 * S / N
    for h, probes in (([4e-20, 0.0, 9e-20], [4e-20, 6e-20, 9e-20]), ([0.0] * D, [1.0] * D)):
        noise = jnp.float32([s / size if size else 0.0 for size in h])
        kernel = kernel._replace(noise=noise, estimates=jnp.int32(9))
        np.testing.assert_allclose(probing_steps(kernel, NO_BOUND), probes, rtol=1e-5)


A, H = np.float32([4.0, 2.0, 0.5]), np.float32([0.1, 0.2, 0.4])


@jax.jit
def see(kernel, seen, rows, number):
    """The statistics after a batch whose examples have these gradients, with the Hessian A."""
    w = jnp.zeros(D)
    extras = {"per_example_grad_fn": lambda w: rows, "grad_fn": lambda w: A * w}
    batch = BatchGradients(w, rows.mean(0), extras, S, None, None)
    return observe(seen, kernel, batch, "per_example", H, jnp.zeros(2, jnp.uint32), number)


def test_an_entry_whose_noise_is_enormous_leaves_the_ratio_of_noises_finite():
    """The square of its noise, relative to the window before, is infinite in float32."""
    rows = np.random.default_rng(0).normal(size=(S, D)) * [1e12, 1.0, 1.0]
    kernel, seen = begin("diagonal")
    kernel = known(kernel, noise=jnp.float32([1.0, 2.0, 3.0]))
    for t in range(3):
        seen = see(kernel, seen, jnp.float32(rows), jnp.int32(t))
    new = jax.jit(next_kernel)(kernel, seen)
    np.testing.assert_allclose(new.noise, rows.var(axis=0, ddof=1), rtol=1e-5)
    assert 0 < float(new.noise_ratio) <= 10


def test_statistics_of_a_window_are_means_over_its_batches():
    """The deviations of batch t are t times those of the first, so C^ grows as t^2.

    Products of the noise of two successive batches are 4 and 36 times the square of the first, and
    their mean, over two pairs, is weighted with C h.
    """
    rows = np.random.default_rng(0).normal(size=(S, D))
    kernel, seen = begin("diagonal")
    kernel = known(kernel, noise=jnp.float32([1.0, 2.0, 3.0]))
    for t in range(3):
        seen = see(kernel, seen, jnp.float32((t + 1) * rows), jnp.int32(t))
    c, share = rows.var(axis=0, ddof=1), H / np.asarray(kernel.scale())
    np.testing.assert_allclose(seen.covariance, 14 / 3 * c, rtol=1e-5)
    weighted = np.average(20 * (c * share) ** 2, weights=np.asarray(kernel.noise) * share)
    assert float(seen.repeated) == pytest.approx(weighted, rel=1e-5)
    np.testing.assert_allclose(seen.curvature, H * A, rtol=1e-5)


@pytest.mark.parametrize(
    ("has_anchor", "curvature"),
    support.every_night(
        itertools.product((False, True), (np.inf, 1.0)), [(False, np.inf), (True, 1.0)]
    ),
)
def test_new_directions_fit_the_curvature_and_the_noise(has_anchor, curvature):
    """A diagonal A becomes the identity in the new directions, in which the noise is diagonal."""
    anchor = Anchor(jnp.zeros(D), jnp.zeros(D)) if has_anchor else ()
    a = np.array([4.0, 2.0, 0.5])
    kernel, seen = begin("full")
    kernel = known(kernel._replace(anchor=anchor), curvature=curvature)
    h = np.asarray(probing_steps(kernel, NO_BOUND))
    seen = seen._replace(
        estimates=jnp.int32(10**6), covariance=(jnp.float32(NOISE), jnp.float32(np.diag(NOISE))),
        curvature=jnp.float32(h * a), root_square=jnp.float32(h * a),
    )  # fmt: skip
    new = jax.jit(next_kernel)(kernel, seen)
    w = np.asarray(new.basis.w, np.float64)
    np.testing.assert_allclose(w.T @ np.diag(a) @ w, np.eye(D), atol=1e-5)
    width = float(relative_variance(kernel, seen)) if anchor and curvature == 1 else 1.0
    np.testing.assert_allclose(w.T @ NOISE @ w, width * np.diag(new.noise), atol=1e-5)
    np.testing.assert_allclose(new.curvature, 1, rtol=1e-4)


def test_passes_at_rest_find_curvature_that_a_long_probe_hides():
    """An entry with hardly any noise has a probe that is 1e4 times too long at first.

    Its curvature hides that of the others, whose bounds are then hundreds of times too high. Five passes
    later, all bounds are near A. The passes share the estimate of C, and the first one finds the noise.
    """
    rng = np.random.default_rng(0)
    mixed = rng.normal(size=(D, 40))
    a = jnp.float32(mixed @ mixed.T / 40 + np.diag([0.1, 0.2, 0.3]))
    scale, numbers = jnp.float32([1.0, 1.0, 1e-8]), iter(range(1000))
    kernel, seen = begin("full")
    kernel = kernel._replace(curvature=jnp.full(D, jnp.inf))

    @jax.jit
    def step(kernel, seen, number):
        rows = jnp.sqrt(scale)[None] * jax.random.normal(jax.random.key(number), (S, D))
        extras = {"per_example_grad_fn": lambda w: rows, "grad_fn": lambda w: a @ w}
        batch = BatchGradients(jnp.zeros(D), rows.mean(0), extras, S, None, None)
        h = probing_steps(kernel, seen.bound)
        raw = jax.random.key_data(jax.random.key(number))
        return observe(seen, kernel, batch, "per_example", h, raw, number)

    ratios = []
    for _ in range(7):
        for _ in range(20):
            seen = step(kernel, seen, jnp.int32(next(numbers)))
        kernel, seen = next_pass(kernel, seen)
        ratios.append(np.asarray(seen.bound) / np.diag(a))
    assert np.all(np.isinf(ratios[0]))
    assert np.max(ratios[1]) > 100
    assert np.all(np.diff(ratios[1:], axis=0) <= 0)
    assert np.all((ratios[-1] > 0.9) & (ratios[-1] < 5))
    assert int(seen.total) == int(kernel.estimates) == 140
    np.testing.assert_allclose(np.diag(seen.covariance[0]), scale, rtol=0.2)
    np.testing.assert_allclose(kernel.noise, scale, rtol=0.5)
    assert np.all(np.isinf(kernel.curvature))


def test_noise_along_a_chain_is_that_of_a_chain_with_the_posteriors_variance():
    """With half of the noise from the batches at the posterior's variance, a chain whose kernel has no
    noise is twice as wide, and a chain whose kernel has all noise has no width: both find a half."""
    kernel, seen = begin("diagonal", max_noise_ratio=1e9)
    s = np.float32(kernel.scale())
    kernel = kernel._replace(
        anchor=Anchor(jnp.zeros(D), jnp.zeros(D)),
        curvature=jnp.full(D, 0.2), noise_ratio=jnp.float32(1e9),
    )  # fmt: skip
    for assumed in (0.0, 0.25, 0.9):
        # V = 1 - phi + V / 2, and h = 1
        variance, one = np.float32(2 * (1 - assumed)), np.ones(D, np.float32)
        seen = seen._replace(
            estimates=jnp.int32(9),
            covariance=np.float32(s * variance / 2) * one,
            curvature=one,
            root_square=one,
        )
        new = jax.jit(next_kernel)(kernel._replace(noise=s * assumed * one), seen)
        np.testing.assert_allclose(new.noise, s / 2, rtol=1e-4)


def test_curvature_includes_the_spread_of_the_batches_curvatures():
    """With E q = -3, a deviation of 4 and 16 estimates h a = (3 + 2) / 2 + 16 / (2 * 5)."""
    _, seen = begin("diagonal")
    mean, root, h = jnp.full(D, -3.0), jnp.full(D, 5.0), jnp.float32([1.0, 0.1, 0.0])
    seen = seen._replace(estimates=jnp.int32(16), curvature=mean, root_square=root)
    found = curvature_bound(seen, h, jnp.float32(0.5))
    np.testing.assert_allclose(found, [4.1, 41.0, 0.0], rtol=1e-5)


def test_steps_are_shortened_until_their_stability_is_the_maximum():
    """All curvatures are multiplied by 0.8 / 0.1, where 0.8 is what the window saw."""
    kernel, seen = begin("diagonal", max_stability=0.1)
    kernel, one = known(kernel), jnp.ones(D)
    h = probing_steps(kernel, NO_BOUND)
    seen = seen._replace(
        estimates=jnp.int32(9), covariance=one, curvature=h, root_square=h,
        stability=jnp.float32(0.8),
    )  # fmt: skip
    new = jax.jit(next_kernel)(kernel, seen)
    np.testing.assert_allclose([new.excess, new.stability], [8.0, 0.1], rtol=1e-6)
    np.testing.assert_allclose(new.curvature, 8.0, rtol=1e-5)


def test_variance_of_the_noise_over_places_lowers_its_fraction():
    """rho / (1 + rho) is a tenth of the old fraction over the standard deviation, here 1 / 2.

    With h = s / 1.1, products of w^T C w h / s have a mean of 1.25 / 1.1^2, and a level of 1 / 1.1^2.
    """
    kernel, seen = begin("diagonal")
    kernel, one = known(kernel), jnp.ones(D)
    seen = seen._replace(
        estimates=jnp.int32(9), covariance=one, repeated=jnp.float32(1.25 / 1.1**2), curvature=one,
        root_square=one,
    )  # fmt: skip
    new = jax.jit(next_kernel)(kernel, seen)
    fraction = new.noise_ratio / (1 + new.noise_ratio)
    np.testing.assert_allclose(fraction, 10 / 11 * 0.1 / (0.5 / 1.1), rtol=1e-5)
    np.testing.assert_allclose(new.drift, 1.0, rtol=1e-6)


def test_drift_is_the_ratio_of_the_noise_to_the_noise_of_the_window_before():
    kernel, seen = begin("diagonal")
    kernel, one = known(kernel), jnp.ones(D)
    seen = seen._replace(
        estimates=jnp.int32(9), covariance=0.6 * one, curvature=one, root_square=one
    )
    np.testing.assert_allclose(jax.jit(next_kernel)(kernel, seen).drift, 0.6, rtol=1e-6)


@pytest.mark.parametrize("value", [0.0, np.nan])
def test_kernel_is_kept_after_a_window_without_sound_estimates(value):
    """Without an estimate, and with curvature that is not finite."""
    kernel, seen = begin("diagonal")
    kernel, one = known(kernel, curvature=3.0), jnp.ones(D)
    seen = seen._replace(
        estimates=jnp.int32(9 if value else 0), covariance=one, curvature=value * one,
        root_square=one,
    )  # fmt: skip
    new = jax.jit(next_kernel)(kernel, seen)
    for old, found in zip(*map(jax.tree.leaves, (kernel, new)), strict=True):
        np.testing.assert_array_equal(found, old)


def test_next_window_keeps_the_directions_and_nothing_else():
    kernel, seen = begin("diagonal")
    direction = jnp.float32([1.0, 2.0, 3.0])
    seen = seen._replace(
        estimates=jnp.int32(9),
        covariance=jnp.ones(D),
        stability=jnp.float32(3),
        direction=direction,
    )
    new = next_window(known(kernel), seen)
    np.testing.assert_array_equal(new.direction, direction)
    assert not np.any(new.covariance)
    assert not int(new.estimates)
    assert not float(new.stability)
    for x, old in zip(new.extremes.probes, seen.extremes.probes, strict=True):
        np.testing.assert_allclose(np.linalg.norm(x), 1, rtol=1e-6)
        np.testing.assert_allclose(x, old / np.linalg.norm(old), rtol=1e-5)
