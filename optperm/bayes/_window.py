"""One window of constant SGD's warm-up: statistics of noise and curvature, and their estimates."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

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

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Float32, Int32, PyTree

# The fraction by which the noise of a step may vary from place to place.
_VARIATION = 0.1
# Curvature is taken to be its mean plus as many standard errors.
_ERRORS = 2.0
# Weight of the spread of the batches' curvatures; C holds the rest of their noise.
_SPREAD = 0.5
# The power iteration takes a step in each of the first ten estimates, then in every tenth.
_POWER_EVERY = 10
# Squares of noise over the noise of the window before stay finite in float32 with this limit. Otherwise
# a single entry would keep the kernel of all others from use.
_MOST_NOISE = 1e9


class Window(NamedTuple):
    r"""The statistics of a window of the warm-up.

    Attributes:
      estimates: Number of estimates in this window.
      covariance: The mean of :math:`\hat C`, as the form keeps it.
      noise: The last :math:`w_i^\top \hat C w_i`, of the form of the kernel's noise.
      repeated: The mean of products of two successive :math:`w_i^\top \hat C w_i h_i / s`.
      curvature: The mean of :math:`q_i = z_i (H^{1/2} A H^{1/2} z)_i`.
      root_square: :math:`\sqrt{E q_i^2}`. The squares themselves overflow where gradients are next to
        zero, and steps long.
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
    """Return the statistics with one more batch, and whether its gradient was no mean of its examples'.

    `h` are the steps with which curvature is probed, `scale` is s, `key` is the raw key of z, and
    `number` is the number of estimates before this step in the schedule of this window.
    """
    form, n = kernel.basis, seen.estimates.astype(jnp.float32) + 1
    along = along_probes(form, kernel.noise, seen.extremes.probes)

    def outer(deviations: optax.Updates) -> Any:
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
    # The schedule's number, not n: it is the same in all chains, so that vmap keeps the conditional
    new = when(
        (number % _POWER_EVERY == 0) | (number < _POWER_EVERY),
        lambda new: _iterate(new, kernel, batch, h, number),
        new,
    )
    return new, is_uneven


def _update_repeated(
    seen: Window, kernel: NoiseKernel, noise: Any, h: Any, scale: jax.Array, n: jax.Array
) -> jax.Array:
    """Return the mean of products of the noise of two successive batches, weighted with Lambda h.

    They share the chain's place, but not their noise: E[w^T C^ w w^T C^' w].
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
    # q_i = z_i (H^(1/2) A H^(1/2) z)_i: in coordinates where A is about c no direction hides another
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
    r"""Return a, in the coordinates of the window's steps.

    The curvature of a direction includes the spread of the batches' curvatures, since their second
    moment decides whether iterates have a variance (with a rare example of great leverage). With
    :math:`\bar q = |E q_i| + 2 \,\mathrm{se}` in the coordinates of H,

    .. math::
      h_i a_i = \bar q \, \frac{1 - \mu}{1 + \mu} + \frac{\operatorname{Var} q_i}{2 \bar q}
    """
    n = jnp.maximum(seen.estimates, 1).astype(jnp.float32)

    def of_entry(mean: jax.Array, root_square: jax.Array, h: jax.Array) -> jax.Array:
        # Var q = (r - |E q|) (r + |E q|), whose factors' roots do not overflow
        mean = jnp.abs(mean)
        deviation = jnp.sqrt(jnp.maximum(root_square - mean, 0.0)) * jnp.sqrt(root_square + mean)
        size = mean + _ERRORS * deviation / jnp.sqrt(n.astype(mean.dtype))
        divisor = jnp.maximum(size, 0.1 * deviation)
        spread = jnp.where(divisor > 0, _SPREAD * deviation * (deviation / divisor), 0.0)
        bound = size * momentum_factor.astype(mean.dtype) + spread
        return jnp.where(h > 0, bound / jnp.where(h > 0, h, 1.0), 0.0)

    return jax.tree.map(of_entry, seen.curvature, seen.root_square, h)


def fraction_by_places(seen: Window, kernel: NoiseKernel, h: Any, scale: jax.Array) -> jax.Array:
    """Return rho / (1 + rho) = 0.1 / sd(w^T C w h / s) over places.

    So the noise of a step varies by at most a tenth from place to place, since the law of the draws
    holds for constant noise.
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
    """Return the noise of a window over the noise of the window before, weighted with Lambda h."""
    ratio = jax.tree.map(
        lambda c, noise: jnp.where(noise > 0, c / jnp.where(noise > 0, noise, 1.0), 1.0),
        kernel.basis.variances(seen.covariance),
        kernel.noise,
    )
    return mean(ratio, optax.tree.mul(kernel.noise, over(h, scale)))


def _update_root_square(n: jax.Array, root: jax.Array, new: jax.Array) -> jax.Array:
    """Return the root of the mean of n squares, of which one is new."""
    old_weight, weight = (jnp.sqrt(x).astype(root.dtype) for x in (1 - 1 / n, 1 / n))
    return jnp.hypot(old_weight * root, weight * new)


def mean(values: Any, weights: Any) -> jax.Array:
    """Return the weighted mean of all entries, 0 without weights."""
    total = inner(weights, optax.tree.ones_like(weights))
    return inner(values, weights) / jnp.where(total > 0, total, 1.0)


def over(h: Any, scale: jax.Array) -> Any:
    """Return h / s."""
    return jax.tree.map(lambda h: h / scale.astype(h.dtype), h)
