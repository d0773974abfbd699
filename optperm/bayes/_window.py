"""One window of constant SGD's warm-up, with statistics and estimates of noise and curvature."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optperm.bayes._correlation import Extremes, along_probes, iterate, times_rows
from optperm.bayes._covariance import ESTIMATES, BatchGradients, Estimator
from optperm.bayes._forms import inner, update_mean
from optperm.bayes._kernel import NoiseKernel
from optperm.bayes._power_iteration import power_iteration
from optperm.core.control import when
from optperm.core.dtypes import all_finite, computed_once
from optperm.core.noise import signs_like
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


class Window(NamedTuple):
    r"""The statistics of a window of the warm-up.

    Attributes:
      estimates: Number of estimates in this window.
      covariance: The mean of :math:`\hat C`, as stored by the form.
      noise: The last :math:`w_i^\top \hat C w_i`, in the form of the kernel's noise.
      repeated: The mean of products of two successive :math:`w_i^\top \hat C w_i h_i / s`.
      curvature: The mean of :math:`q_i = z_i (H^{1/2} A H^{1/2} z)_i`.
      root_square: :math:`\sqrt{E q_i^2}`. The squares themselves would overflow if gradients are near
        zero and steps are long.
      direction: The vector of the power iteration for :math:`\lambda_{\max}(H A)`, a tree like params.
      stability: :math:`\lambda_{\max}(H A)`.
      typical: The length of a probe of the curvature where h is zero.
      longest: The maximum length of a probe.
      extremes: The extreme eigenvalues of the noise's correlation.
    """

    estimates: Int32[Array, ""]
    covariance: PyTree[Float[Array, "..."]]
    noise: PyTree[Float[Array, "..."]]
    repeated: Float32[Array, ""]
    curvature: PyTree[Float[Array, "..."]]
    root_square: PyTree[Float[Array, "..."]]
    direction: PyTree[Float[Array, "?*shape"], "Params"]
    stability: Float32[Array, ""]
    typical: Float32[Array, ""]
    longest: Float32[Array, ""]
    extremes: Extremes


def learn(
    seen: Window,
    kernel: NoiseKernel,
    batch: BatchGradients,
    estimator: Estimator,
    h: Any,
    scale: jax.Array,
    key: jax.Array,
    number: jax.Array,
) -> tuple[Window, jax.Array]:
    """Return the statistics after one more batch, and whether it shows that the loss is no mean.

    `h` are the steps with which curvature is probed, `scale` is s, `key` is the raw key of z, and
    `number` is the number of estimates that the schedule has in this window before this step.
    """
    form, n = kernel.basis, seen.estimates.astype(jnp.float32) + 1
    along = along_probes(form, kernel.noise, seen.extremes.probes)

    def outer(deviations: Updates) -> Any:
        return form.covariance(deviations), [times_rows(deviations, v) for v in along]

    # C <- C + (C^ - C) / n
    (c_hat, products), is_uneven = ESTIMATES[estimator](batch, outer)
    noise = form.variances(c_hat)
    q = _measure_curvature(kernel, batch, h, key, seen.direction)
    new = seen._replace(
        estimates=seen.estimates + 1,
        covariance=update_mean(seen.covariance, c_hat, n),
        noise=noise,
        repeated=_update_repeated(seen, kernel, noise, h, scale, n),
        curvature=update_mean(seen.curvature, q, n),
        root_square=jax.tree.map(functools.partial(_update_root_square, n), seen.root_square, q),
        extremes=iterate(seen.extremes, form, kernel.noise, products, n),
    )
    new = optax.tree.where(all_finite((c_hat, q)), new, seen)
    # The schedule's number, unlike n, is the same in all chains, so vmap keeps the conditional
    new = when(
        (number % _POWER_EVERY == 0) | (number < _POWER_EVERY),
        lambda new: _iterate(new, kernel, batch, h, number),
        new,
    )
    return new, is_uneven


def _update_repeated(
    seen: Window, kernel: NoiseKernel, noise: Any, h: Any, scale: jax.Array, n: jax.Array
) -> jax.Array:
    """Return the mean product of the noise of two successive batches, weighted with Lambda h.

    The two batches have almost the same params but independent noise: E[w^T C^ w w^T C^' w].
    """
    relative = over(h, scale)
    product = jax.tree.map(
        lambda one, two, r: jnp.minimum(one * r, _MOST_NOISE) * jnp.minimum(two * r, _MOST_NOISE),
        noise,
        seen.noise,
        relative,
    )
    found = mean(product, optax.tree.mul(kernel.noise, relative))
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


def curvature_bound(seen: Window, h: Any, momentum_factor: jax.Array) -> Any:
    r"""Return a in the coordinates of the window's steps.

    The curvature of a direction includes the spread of the batches' curvatures, since the second moment
    of these curvatures decides whether iterates have a finite variance. With
    :math:`\bar q = |E q_i| + 2 \,\mathrm{se}` in the coordinates of H,

    .. math::
      h_i a_i = \bar q \, \frac{1 - \mu}{1 + \mu} + \frac{\operatorname{Var} q_i}{2 \bar q}
    """
    n = jnp.maximum(seen.estimates, 1).astype(jnp.float32)

    def of_entry(mean: jax.Array, root_square: jax.Array, h: jax.Array) -> jax.Array:
        # Var q = (r - |E q|) (r + |E q|); the roots of these factors do not overflow
        mean = jnp.abs(mean)
        deviation = jnp.sqrt(jnp.maximum(root_square - mean, 0.0)) * jnp.sqrt(root_square + mean)
        size = mean + _ERRORS * deviation / jnp.sqrt(n.astype(mean.dtype))
        divisor = jnp.maximum(size, 0.1 * deviation)
        spread = jnp.where(divisor > 0, _SPREAD * deviation * (deviation / divisor), 0.0)
        bound = size * momentum_factor.astype(mean.dtype) + spread
        return jnp.where(h > 0, bound / jnp.where(h > 0, h, 1.0), 0.0)

    return jax.tree.map(of_entry, seen.curvature, seen.root_square, h)


def fraction_by_places(seen: Window, kernel: NoiseKernel, h: Any, scale: jax.Array) -> jax.Array:
    """Return 0.1 phi / sd(w^T C w h / s), with the old phi = rho / (1 + rho) and sd over points.

    With this limit on phi, the noise of a step varies by about a tenth or less between points. The
    stationary distribution is exact only for constant noise.
    """
    relative = over(h, scale)
    level = jax.tree.map(
        lambda c, r: jnp.minimum(c * r, _MOST_NOISE) ** 2,
        kernel.basis.variances(seen.covariance),
        relative,
    )
    weights = optax.tree.mul(kernel.noise, relative)
    variance = jnp.maximum(seen.repeated - mean(level, weights), 0.0)
    old = kernel.noise_ratio / (1 + kernel.noise_ratio)
    return old * _VARIATION / jnp.sqrt(variance + 1e-12)


def drift(seen: Window, kernel: NoiseKernel, h: Any, scale: jax.Array) -> jax.Array:
    """Return the ratio of a window's noise to the previous window's noise, weighted with Lambda h."""
    ratio = jax.tree.map(
        lambda c, noise: jnp.where(noise > 0, c / jnp.where(noise > 0, noise, 1.0), 1.0),
        kernel.basis.variances(seen.covariance),
        kernel.noise,
    )
    return mean(ratio, optax.tree.mul(kernel.noise, over(h, scale)))


def _update_root_square(n: jax.Array, root: jax.Array, new: jax.Array) -> jax.Array:
    """Return the root mean square of n values after the n-th value, `new`."""
    old_weight, weight = (jnp.sqrt(x).astype(root.dtype) for x in (1 - 1 / n, 1 / n))
    return jnp.hypot(old_weight * root, weight * new)


def mean(values: Any, weights: Any) -> jax.Array:
    """Return the weighted mean of all entries; 0 if all weights are 0."""
    total = inner(weights, optax.tree.ones_like(weights))
    return inner(values, weights) / jnp.where(total > 0, total, 1.0)


def over(h: Any, scale: jax.Array) -> Any:
    """Return h / s."""
    return jax.tree.map(lambda h: h / scale.astype(h.dtype), h)
