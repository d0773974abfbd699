"""The statistics of the batches in a window, and the kernel that follows from them."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optperm.bayes._correlation import (
    Extremes,
    along_probes,
    bounds,
    fraction_by_correlation,
    iterate,
    restart,
    times_rows,
)
from optperm.bayes._covariance import ESTIMATES, BatchGradients, Estimator
from optperm.bayes._forms import Preconditioner, inner, update_mean
from optperm.bayes._kernel import NoiseKernel
from optperm.bayes._power_iteration import power_iteration
from optperm.core.control import when
from optperm.core.dtypes import accumulation_dtype, all_finite, computed_once
from optperm.core.keys import key_data
from optperm.core.noise import normal_like, signs_like
from optperm.core.shapes import Array, Float, Float32, Int32, Params, PyTree, Updates

# The maximum relative variation of a step's noise between points of the chain.
_VARIATION = 0.1
# The bound on curvature is the mean plus this many standard errors.
_ERRORS = 2.0
# The weight of the spread of the batches' curvatures; C contains the rest of their noise.
_SPREAD = 0.5
# The power iteration takes a step with each of the first ten estimates, then with every tenth estimate.
_POWER_EVERY = 10
# This limit keeps squares of noise, relative to the previous window, finite in float32. Without the
# limit, a single entry could make the whole kernel unusable.
_MOST_NOISE = 1e9
# Curvature is measured with steps that differ by at most this factor, because products with long steps
# hide the curvature of short steps. The factor allows params with units from e^-8 to e^8.
_LONGEST_STEP = 1e16


class Window(NamedTuple):
    r"""The statistics of the batches in a window.

    Attributes:
      estimates: The number of estimates in this pass. A window has several passes if the chain rests.
      total: The number of estimates in this window.
      covariance: The mean of :math:`\hat C` in this window, as stored by the form.
      noise: The last :math:`w_i^\top \hat C w_i`, in the form of the kernel's noise.
      repeated: The mean of products of two successive :math:`w_i^\top \hat C w_i h_i / s`.
      curvature: The mean of :math:`q_i = z_i (H^{1/2} A H^{1/2} z)_i`.
      root_square: :math:`\sqrt{E q_i^2}`. The squares themselves would overflow if gradients are near
        zero and steps are long.
      direction: The vector of the power iteration for :math:`\lambda_{\max}(H A)`, a tree like params.
      stability: :math:`\lambda_{\max}(H A)`.
      extremes: The extreme eigenvalues of the noise's correlation.
      bound: The lowest bound on a of the passes before. It limits the probes while the kernel's
        curvature is unknown; infinite without a bound.
    """

    estimates: Int32[Array, ""]
    total: Int32[Array, ""]
    covariance: PyTree[Float[Array, "..."]]
    noise: PyTree[Float[Array, "..."]]
    repeated: Float32[Array, ""]
    curvature: PyTree[Float[Array, "..."]]
    root_square: PyTree[Float[Array, "..."]]
    direction: PyTree[Float[Array, "?*shape"], "Params"]
    stability: Float32[Array, ""]
    extremes: Extremes
    bound: PyTree[Float[Array, "..."]]


def first_kernel(
    params: Params,
    preconditioner: Preconditioner,
    *,
    num_data: int,
    batch_size: int,
    momentum: float,
    max_noise_ratio: Any,
    max_stability: Any,
) -> NoiseKernel:
    """Return the kernel of the first window, `NoiseKernel.unknown` with its numbers."""
    ratio, most = (jnp.asarray(x, jnp.float32) for x in (max_noise_ratio, max_stability))
    return NoiseKernel.unknown(params, preconditioner, control_variates=False)._replace(
        noise_ratio=ratio,
        max_noise_ratio=ratio,
        max_stability=most,
        num_data=jnp.asarray(num_data, jnp.int32),
        batch_size=jnp.asarray(batch_size, jnp.int32),
        momentum=jnp.asarray(momentum, jnp.float32),
    )


def first_window(kernel: NoiseKernel, params: Params) -> Window:
    """Return the start of the first window, with random directions."""
    form, zero = kernel.basis, jnp.zeros([], jnp.float32)
    seen = Window(
        estimates=jnp.zeros([], jnp.int32),
        total=jnp.zeros([], jnp.int32),
        covariance=form.covariance(
            jax.tree.map(lambda p: jnp.zeros_like(p, accumulation_dtype(p))[None], params)
        ),
        noise=form.zeros(params),
        repeated=zero,
        curvature=form.zeros(params),
        root_square=form.zeros(params),
        direction=normal_like(key_data(0), params),
        stability=zero,
        extremes=Extremes(form.probes(params), *(jnp.zeros(2, jnp.float32) for _ in range(3))),
        bound=_no_bound(form.zeros(params)),
    )
    ones = optax.tree.ones_like(kernel.noise)
    return seen._replace(extremes=restart(seen.extremes, form, ones))


def next_window(kernel: NoiseKernel, seen: Window) -> Window:
    """Return the start of the window of a kernel, with the directions of the window before."""
    return optax.tree.zeros_like(seen)._replace(
        direction=seen.direction,
        extremes=restart(seen.extremes, kernel.basis, kernel.noise),
        bound=_no_bound(seen.bound),
    )


def next_pass(kernel: NoiseKernel, seen: Window) -> tuple[NoiseKernel, Window]:
    r"""Return the kernel and the start of another pass at rest, with probes of a better length.

    The first probes of a direction with hardly any noise may be :math:`10^6` times too long. Its
    :math:`q_j` then hides the curvature of all others, since the deviation of :math:`q_i` is about
    :math:`\sqrt{q_i q_j}`. The bounds that follow are too high, but a pass with the probes that they
    allow halves the exponents of these factors. All passes find upper bounds in the same coordinates,
    so the lowest one holds.

    Args:
      kernel: The kernel of the window, whose curvature is unknown. The kernel of the first window has no
        noise, and gets the noise of the first pass.
      seen: The statistics of the pass.
    """
    h = probing_steps(kernel, seen.bound)
    factor = (1 - kernel.momentum) / (1 + kernel.momentum)
    found = curvature_bound(seen, h, factor)
    bound = jax.tree.map(lambda a, b: jnp.where(b > 0, jnp.minimum(a, b), a), seen.bound, found)
    variances = kernel.basis.variances(seen.covariance)
    noise = optax.tree.where(_any_positive(kernel.noise), kernel.noise, variances)
    kernel = kernel._replace(noise=noise, estimates=seen.total)
    return kernel, next_window(kernel, seen)._replace(
        bound=bound, covariance=seen.covariance, total=seen.total
    )


def observe(
    seen: Window,
    kernel: NoiseKernel,
    batch: BatchGradients,
    estimator: Estimator,
    h: Any,
    key: jax.Array,
    number: jax.Array,
) -> Window:
    """Return the statistics after one more batch.

    Args:
      seen: The statistics.
      kernel: The kernel of the window.
      batch: The gradients of the batch.
      estimator: The estimator of C.
      h: `probing_steps` of the kernel.
      key: The raw key of z.
      number: The number of batches in this window before this batch.
    """
    form, n = kernel.basis, seen.estimates.astype(jnp.float32) + 1
    along = along_probes(form, kernel.noise, seen.extremes.probes)

    def outer(deviations: Updates) -> Any:
        return form.covariance(deviations), [times_rows(deviations, v) for v in along]

    # C <- C + (C^ - C) / n
    (c_hat, products), _ = ESTIMATES[estimator](batch, outer)
    total = seen.total + 1
    noise = form.variances(c_hat)
    q = _measure_curvature(kernel, batch, h, key, seen.direction)
    new = seen._replace(
        estimates=seen.estimates + 1,
        covariance=update_mean(seen.covariance, c_hat, total.astype(jnp.float32)),
        total=total,
        noise=noise,
        repeated=_update_repeated(seen, kernel, noise, h, n),
        curvature=update_mean(seen.curvature, q, n),
        root_square=jax.tree.map(functools.partial(_update_root_square, n), seen.root_square, q),
        extremes=iterate(seen.extremes, form, kernel.noise, products, n),
    )
    new = optax.tree.where(all_finite((c_hat, q)), new, seen)
    # The number, unlike n, is the same in all chains, so vmap keeps the conditional
    return when(
        (number % _POWER_EVERY == 0) | (number < _POWER_EVERY),
        lambda new: _iterate(new, kernel, batch, h, number),
        new,
    )


def next_kernel(kernel: NoiseKernel, seen: Window) -> NoiseKernel:
    """Return the kernel of the next window.

    Args:
      kernel: The kernel of the window.
      seen: The statistics of the window.

    Returns:
      The kernel; the same kernel if the window has no finite estimates.
    """
    h, s = probing_steps(kernel, seen.bound), kernel.scale()
    # a is first in the coordinates of the old steps, then in the coordinates of the new steps
    factor = (1 - kernel.momentum) / (1 + kernel.momentum)
    bound = curvature_bound(seen, h, factor)
    basis, noise, curvature = kernel.basis.turn(seen.covariance, bound, mean_curvature(seen, h))
    if kernel.anchor:
        # Where the chain moves, control variates have left hardly any noise
        moves = jnp.logical_not(any_unknown(kernel))
        width = jnp.where(moves, relative_variance(kernel, seen), 1.0)
        noise = jax.tree.map(lambda c: c / width.astype(c.dtype), noise)
    is_known = _any_positive(curvature)
    stability, excess = _shorten(kernel, seen.stability * factor)
    most = kernel.max_noise_ratio
    correlation = bounds(seen.extremes, kernel.basis, kernel.noise, noise, seen.estimates)
    fraction = jnp.minimum(
        fraction_by_correlation(correlation), fraction_by_places(seen, kernel, h, s)
    )
    fraction = jnp.minimum(most / (1 + most), fraction)
    # If the previous window had no noise, drift and variation are not defined
    is_first = jnp.logical_not(_any_positive(kernel.noise))
    new = kernel._replace(
        basis=basis,
        noise=noise,
        curvature=jax.tree.map(
            lambda a: jnp.where(is_known, a * excess.astype(a.dtype), jnp.inf), curvature
        ),
        noise_ratio=jnp.where(is_first, most, fraction / (1 - fraction)).astype(jnp.float32),
        stability=stability,
        excess=excess,
        drift=jnp.where(is_first, 1.0, _drift(seen, kernel, h, s)).astype(jnp.float32),
        correlation=correlation,
        estimates=seen.total,
    )
    is_sound = (seen.estimates > 0) & all_finite((noise, basis, curvature))
    return optax.tree.where(is_sound, new, kernel)


def probing_steps(kernel: NoiseKernel, bound: Any) -> Any:
    """Return the steps h with which the window of a kernel measures curvature: none is very long.

    An entry without noise may have curvature, for example from a prior on a parameter that no example
    uses. In a network that fits its data, some entries have hardly any noise and an h of 1e30. The
    length of a probe in such an entry is therefore the geometric mean of all lengths. It is 1 if a
    window has no noise, as with equal examples, and all steps are 0 in the first window.

    Args:
      kernel: The kernel.
      bound: `Window.bound`, the limit where the kernel's curvature is unknown.
    """
    lower = jax.tree.map(jnp.minimum, kernel.curvature, bound)
    # Unknown curvature does not limit the steps
    known = jax.tree.map(lambda a: jnp.where(jnp.isfinite(a), a, 0.0), lower)
    h = kernel._replace(curvature=known).step_sizes(kernel.scale())
    # sqrt(h_i) |w_i| is in units of the params, and h_i is not
    sizes = kernel.basis.lengths(h)
    lengths = jax.tree.map(lambda h, size: jnp.sqrt(h) * size, h, sizes)
    logs = jax.tree.map(lambda x: jnp.log(jnp.where(x > 0, x, 1.0)), lengths)
    count = sum(jnp.sum(leaf > 0) for leaf in jax.tree.leaves(h))
    total = inner(logs, optax.tree.ones_like(h))
    without = jnp.where(kernel.estimates > 0, 1.0, 0.0).astype(total.dtype)
    mean = jnp.exp(total / jnp.maximum(count, 1).astype(total.dtype))
    positive = [jnp.min(x, initial=jnp.inf, where=x > 0) for x in jax.tree.leaves(lengths)]
    shortest = jnp.where(count > 0, functools.reduce(jnp.minimum, positive), 1.0)
    typical = jnp.where(count > 0, mean, without)
    longest = math.sqrt(_LONGEST_STEP) * shortest

    def of_entry(length: jax.Array, size: jax.Array) -> jax.Array:
        length = jnp.where(length > 0, length, typical.astype(length.dtype))
        return (jnp.minimum(length, longest.astype(length.dtype)) / size) ** 2

    return jax.tree.map(of_entry, lengths, sizes)


def curvature_bound(seen: Window, h: Any, momentum_factor: jax.Array) -> Any:
    r"""Return a in the coordinates of the window's steps.

    The curvature of a direction includes the spread of the batches' curvatures, since the second moment
    of these curvatures decides whether iterates have a finite variance. With
    :math:`\bar q = |E q_i| + 2 \,\mathrm{se}` in the coordinates of H,

    .. math::
      h_i a_i = \bar q \, \frac{1 - \mu}{1 + \mu} + \frac{\operatorname{Var} q_i}{2 \bar q}
    """

    def of_entry(mean: jax.Array, root_square: jax.Array, h: jax.Array) -> jax.Array:
        size, deviation = _bound_mean(seen, mean, root_square)
        divisor = jnp.maximum(size, 0.1 * deviation)
        spread = jnp.where(divisor > 0, _SPREAD * deviation * (deviation / divisor), 0.0)
        bound = size * momentum_factor.astype(mean.dtype) + spread
        return jnp.where(h > 0, bound / jnp.where(h > 0, h, 1.0), 0.0)

    return jax.tree.map(of_entry, seen.curvature, seen.root_square, h)


def mean_curvature(seen: Window, h: Any) -> Any:
    r"""Return :math:`\bar q / h` of `curvature_bound`, without the spread and for any momentum."""

    def of_entry(mean: jax.Array, root_square: jax.Array, h: jax.Array) -> jax.Array:
        size, _ = _bound_mean(seen, mean, root_square)
        return jnp.where(h > 0, size / jnp.where(h > 0, h, 1.0), 0.0)

    return jax.tree.map(of_entry, seen.curvature, seen.root_square, h)


def _bound_mean(
    seen: Window, mean: jax.Array, root_square: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return |E q| plus two standard errors, and the standard deviation of q."""
    n = jnp.maximum(seen.estimates, 1).astype(jnp.float32)
    # Var q = (r - |E q|) (r + |E q|); the roots of these factors do not overflow
    mean = jnp.abs(mean)
    deviation = jnp.sqrt(jnp.maximum(root_square - mean, 0.0)) * jnp.sqrt(root_square + mean)
    return mean + _ERRORS * deviation / jnp.sqrt(n.astype(mean.dtype)), deviation


def fraction_by_places(seen: Window, kernel: NoiseKernel, h: Any, scale: jax.Array) -> jax.Array:
    """Return 0.1 phi / sd(w^T C w h / s), with the old phi = rho / (1 + rho) and sd over points.

    With this limit on phi, the noise of a step varies by about a tenth or less between points. The
    stationary distribution is exact only for constant noise.
    """
    relative = _over(h, scale)
    level = jax.tree.map(
        lambda c, r: jnp.minimum(c * r, _MOST_NOISE) ** 2,
        kernel.basis.variances(seen.covariance),
        relative,
    )
    weights = optax.tree.mul(kernel.noise, relative)
    variance = jnp.maximum(seen.repeated - _mean(level, weights), 0.0)
    old = kernel.noise_ratio / (1 + kernel.noise_ratio)
    return old * _VARIATION / jnp.sqrt(variance + 1e-12)


def relative_variance(kernel: NoiseKernel, seen: Window) -> jax.Array:
    r"""Return the ratio of the chain's variance in a window to the posterior's, with control variates.

    Steps with the fraction :math:`1 - \varphi` of injected noise, and the fraction :math:`\varphi'` of
    noise from the batches, have :math:`1 - \varphi + \varphi'` times the noise that samples. The noise
    of the batches is proportional to this variance. The mean over directions has weights
    :math:`\varphi'`.
    """
    s = kernel.scale()
    relative = _over(kernel.step_sizes(s), s)
    assumed = optax.tree.mul(kernel.noise, relative)
    found = optax.tree.mul(kernel.basis.variances(seen.covariance), relative)
    variance = _mean(jax.tree.map(lambda old, new: 1 - old + new, assumed, found), found)
    return jnp.where(variance > 0, variance, 1.0)


def _shorten(kernel: NoiseKernel, effective: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the stability of the new kernel, and the factor on the a_i that reduces it to c.

    The factor is needed because the a_i ignore interactions between directions. `effective` is
    lambda_max(H A) (1 - mu) / (1 + mu) of the old kernel.
    """
    is_known = jnp.logical_not(any_unknown(kernel))
    excess = jnp.where(
        effective > 0, kernel.excess * effective / kernel.max_stability, kernel.excess
    )
    excess = jnp.where(is_known, excess, 1.0)
    excess = jnp.maximum(excess, 1.0).astype(jnp.float32)
    return jnp.where(is_known, effective * kernel.excess / excess, 0.0), excess


def any_unknown(kernel: NoiseKernel) -> jax.Array:
    """Return whether the curvature of a kernel is not known."""
    flags = computed_once([jnp.any(jnp.isinf(leaf)) for leaf in jax.tree.leaves(kernel.curvature)])
    return functools.reduce(jnp.logical_or, flags, jnp.zeros([], jnp.bool_))


def _no_bound(like: Any) -> Any:
    return optax.tree.full_like(like, jnp.inf)


def _any_positive(tree: Any) -> jax.Array:
    flags = computed_once([jnp.any(leaf > 0) for leaf in jax.tree.leaves(tree)])
    return functools.reduce(jnp.logical_or, flags, jnp.zeros([], jnp.bool_))


def _update_repeated(
    seen: Window, kernel: NoiseKernel, noise: Any, h: Any, n: jax.Array
) -> jax.Array:
    """Return the mean product of the noise of two successive batches, weighted with Lambda h.

    The two batches have almost the same params but independent noise: E[w^T C^ w w^T C^' w].
    """
    relative = _over(h, kernel.scale())
    product = jax.tree.map(
        lambda one, two, r: jnp.minimum(one * r, _MOST_NOISE) * jnp.minimum(two * r, _MOST_NOISE),
        noise,
        seen.noise,
        relative,
    )
    found = _mean(product, optax.tree.mul(kernel.noise, relative))
    updated = seen.repeated + (found - seen.repeated) / jnp.maximum(n - 1, 1)
    return jnp.where(n > 1, updated, 0.0).astype(jnp.float32)


def _measure_curvature(
    kernel: NoiseKernel, batch: BatchGradients, h: Any, key: jax.Array, like: Any
) -> Any:
    """Return q_i, whose mean is h_i a_i, by one product with a batch's Hessian."""
    # q_i = z_i (H^(1/2) A H^(1/2) z)_i. Where A is about c, no direction hides another direction
    form = kernel.basis
    z = form.flat(computed_once(signs_like(key, like)))
    root = jax.tree.map(jnp.sqrt, h)
    product = batch.curvature_product(form.params_of(form.times(root, z), batch.params))
    return form.pool(optax.tree.mul(z, form.times(root, form.coordinates(product, h))))


def _iterate(
    seen: Window, kernel: NoiseKernel, batch: BatchGradients, h: Any, number: jax.Array
) -> Window:
    """Take a step of the power iteration for the largest eigenvalue of H A."""
    taken = jnp.where(number < _POWER_EVERY, number, _POWER_EVERY - 1 + number // _POWER_EVERY)
    stability, direction = power_iteration(
        seen.stability,
        seen.direction,
        lambda s: kernel.precondition(s, h),
        batch.curvature_product,
        taken + 1,
    )
    return seen._replace(stability=stability, direction=direction)


def _drift(seen: Window, kernel: NoiseKernel, h: Any, scale: jax.Array) -> jax.Array:
    """Return the ratio of a window's noise to the previous window's noise, weighted with Lambda h."""
    ratio = jax.tree.map(
        lambda c, noise: jnp.where(noise > 0, c / jnp.where(noise > 0, noise, 1.0), 1.0),
        kernel.basis.variances(seen.covariance),
        kernel.noise,
    )
    return _mean(ratio, optax.tree.mul(kernel.noise, _over(h, scale)))


def _update_root_square(n: jax.Array, root: jax.Array, new: jax.Array) -> jax.Array:
    """Return the root mean square of n values after the n-th value, `new`."""
    old_weight, weight = (jnp.sqrt(x).astype(root.dtype) for x in (1 - 1 / n, 1 / n))
    return jnp.hypot(old_weight * root, weight * new)


def _mean(values: Any, weights: Any) -> jax.Array:
    """Return the weighted mean of all entries; 0 if all weights are 0."""
    total = inner(weights, optax.tree.ones_like(weights))
    return inner(values, weights) / jnp.where(total > 0, total, 1.0)


def _over(h: Any, scale: jax.Array) -> Any:
    """Return h / s."""
    return jax.tree.map(lambda h: h / scale.astype(h.dtype), h)
