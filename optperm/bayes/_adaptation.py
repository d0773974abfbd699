"""The estimates of the warm-up of constant SGD: the noise, the curvature, and how both vary."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optperm.bayes._covariance import ESTIMATES, OUTER, BatchGradients, matrix, rows_of
from optperm.bayes._decompose import decompose
from optperm.bayes._kernel import NoiseKernel, flat, inner, is_number, times
from optperm.bayes._power_iteration import power_iteration
from optperm.core.control import when
from optperm.core.dtypes import accumulation_dtype, all_finite, computed_once
from optperm.core.keys import key_data
from optperm.core.mapped_axes import mark_varying, varying_axes
from optperm.core.noise import normal_like, signs_like

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
# Curvature is measured with steps that differ at most by this factor: the products with long ones hide
# the curvature of short ones. It leaves room for params with units from e^-8 to e^8.
_LONGEST_STEP = 1e16


class Adaptation(NamedTuple):
    r"""The statistics of a window of the warm-up.

    Attributes:
      estimates: Number of estimates in this window.
      covariance: The mean of :math:`\hat C`: :math:`W^\top \hat C W`, (D, D), in the kernel's
        coordinates for the full preconditioner; else the diagonal of C, a tree like params, or its mean.
      units: The mean of the diagonal of :math:`\hat C`, (D,), for the full preconditioner, else ().
      noise: The last :math:`w_i^\top \hat C w_i`, of the form of the kernel's noise.
      repeated: The mean of products of two successive :math:`w_i^\top \hat C w_i h_i / s`.
      curvature: The mean of :math:`q_i = z_i (H^{1/2} A H^{1/2} z)_i`.
      root_square: :math:`\sqrt{E q_i^2}`. The squares themselves overflow where gradients are next to
        zero, and steps long.
      direction: The vector of the power iteration for :math:`\lambda_{\max}(H A)`, a tree like params.
      stability: :math:`\lambda_{\max}(H A)`.
      correlation: As in `optperm.bayes.NoiseKernel`.
    """

    estimates: Int32[Array, ""]
    covariance: PyTree[Float[Array, "..."]]
    units: Any  # Float[Array, "d"], or ()
    noise: PyTree[Float[Array, "..."]]
    repeated: Float32[Array, ""]
    curvature: PyTree[Float[Array, "..."]]
    root_square: PyTree[Float[Array, "..."]]
    direction: PyTree[Float[Array, "?*shape"], "Params"]
    stability: Float32[Array, ""]
    correlation: Float32[Array, ""]


def begin(
    params: optax.Params, preconditioner: Any, noise_ratio: Any
) -> tuple[NoiseKernel, Adaptation]:
    """Return a kernel that takes no steps, and the start of the first window.

    Args:
      params: The params.
      preconditioner: "scalar", "diagonal" or "full".
      noise_ratio: The maximum of rho.
    """
    covariance = OUTER[preconditioner](
        jax.tree.map(lambda p: jnp.zeros_like(p, accumulation_dtype(p))[None], params)
    )
    is_full = preconditioner == "full"
    noise = jnp.diagonal(covariance) if is_full else covariance
    basis = jnp.identity(len(covariance), covariance.dtype) if is_full else ()

    # No array stands twice in a state, which may be donated
    def zero() -> jax.Array:
        return mark_varying(jnp.zeros([], jnp.float32), varying_axes(params))

    def zeros() -> Any:
        return jax.tree.map(jnp.copy, noise)

    kernel = NoiseKernel(
        basis, zeros(), zeros(), jnp.asarray(noise_ratio, jnp.float32) + zero(), zero(), zero() + 1,
        zero() + 1, zero() + 1, jnp.zeros([], jnp.int32), zero() > 0,
    )  # fmt: skip
    return kernel, Adaptation(
        jnp.zeros([], jnp.int32), covariance, zeros() if is_full else (), zeros(), zero(), zeros(),
        zeros(), normal_like(key_data(0), params), zero(), zero(),
    )  # fmt: skip


def warm_up(
    kernel: NoiseKernel,
    seen: Adaptation,
    uneven: jax.Array,
    batch: BatchGradients,
    estimator: Any,
    scale: jax.Array,
    key: jax.Array,
    *,
    number: jax.Array,
    is_open: jax.Array,
    ends_window: jax.Array,
    limit: jax.Array,
    rate: jax.Array,
    **options: Any,
) -> tuple[NoiseKernel, Adaptation, jax.Array]:
    """Return the kernel, the statistics of its window and the state's `uneven` after one more step.

    Args:
      kernel: The kernel of this window.
      seen: The statistics of this window.
      uneven: The number of batches whose gradient was not the mean of its examples' gradients.
      batch: The gradients.
      estimator: The name of the estimator of C.
      scale: s.
      key: A raw key.
      number: The number of estimates before this step in the schedule of this window.
      is_open: Whether this step learns.
      ends_window: Whether the window ends with this step.
      limit: c.
      rate: Factor on c and rho.
      **options: The other arguments of `hand_over`.
    """
    h = probing_steps(kernel, kernel.step_sizes(scale, limit, rate))
    seen, uneven = when(
        is_open & (scale > 0),
        lambda known: learn(*known, kernel, batch, estimator, h, scale, key, number),
        (seen, uneven),
    )
    kernel, seen = when(
        ends_window,
        lambda known: hand_over(*known, h, scale, limit=limit * rate, **options),
        (kernel, seen),
    )
    return kernel, seen, uneven


def learn(
    seen: Adaptation,
    uneven: jax.Array,
    kernel: NoiseKernel,
    batch: BatchGradients,
    estimator: Any,
    h: Any,
    scale: jax.Array,
    key: jax.Array,
    number: jax.Array,
) -> tuple[Adaptation, jax.Array]:
    r"""Return the statistics of a window and the state's `uneven` with one more batch.

    Args:
      seen: The statistics before.
      uneven: The number before.
      kernel: The kernel of this window.
      batch: The gradients.
      estimator: The name of the estimator of C.
      h: The steps of this kernel.
      scale: s.
      key: The raw key of z.
      number: The number of estimates before this step in the schedule of this window.
    """
    n = seen.estimates.astype(jnp.float32) + 1

    # C <- C + (C^ - C) / n, and w_i^T C^ w_i
    is_full = not isinstance(kernel.basis, tuple)
    form: Any = "full" if is_full else "scalar" if is_number(kernel.noise) else "diagonal"

    v = kernel.precondition(seen.direction, h)

    def outer(deviations: optax.Updates) -> Any:
        if not is_full:
            return OUTER[form](deviations), jnp.sum(_along(deviations, v) ** 2)
        # W^T C W, not C: the condition of C is squared, and float32 would lose narrow directions
        rows = rows_of(deviations)
        coordinates = jnp.matmul(rows, kernel.basis, precision="highest")
        return matrix(coordinates), jnp.sum(rows**2, axis=0)

    (c_hat, noise), is_uneven = ESTIMATES[estimator](batch, outer)
    correlation, units = seen.correlation, ()
    if is_full:
        units, noise = update_mean(seen.units, noise, n), jnp.diagonal(c_hat)
    else:
        # v^T (C + b) v over v^T diag(C + b) v, v = H s
        assumed, b = (
            inner(v, times(x, v)).astype(jnp.float32)
            for x in (kernel.noise, kernel.injected(h, scale))
        )
        ratio = (noise + b) / jnp.where(assumed + b > 0, assumed + b, 1.0)
        correlation, noise = correlation + (ratio - correlation) / n, c_hat
    covariance = update_mean(seen.covariance, c_hat, n)

    # E[w^T C^ w w^T C^' w] of two successive batches: they share the chain's place, not their noise
    relative = jax.tree.map(lambda h: h / scale.astype(h.dtype), h)
    product = jax.tree.map(
        lambda one, two, r: jnp.minimum(one * r, _MOST_NOISE) * jnp.minimum(two * r, _MOST_NOISE),
        noise,
        seen.noise,
        relative,
    )
    n_pairs = jnp.maximum(n - 1, 1)
    repeated = _mean(product, optax.tree.mul(kernel.noise, relative))
    repeated = jnp.where(n > 1, seen.repeated + (repeated - seen.repeated) / n_pairs, 0.0)

    q = _measure_curvature(kernel, batch, h, key, seen.direction)
    new = seen._replace(
        estimates=seen.estimates + 1,
        covariance=covariance,
        units=units,
        noise=noise,
        repeated=repeated.astype(jnp.float32),
        correlation=correlation.astype(jnp.float32),
        curvature=update_mean(seen.curvature, q, n),
        root_square=jax.tree.map(functools.partial(_update_root_square, n), seen.root_square, q),
    )
    new = optax.tree.where(all_finite((c_hat, q)), new, seen)
    # The schedule's number, not n: it is the same in all chains, so that vmap keeps the conditional
    new = when(
        (number % _POWER_EVERY == 0) | (number < _POWER_EVERY),
        lambda new: _iterate(new, kernel, batch.curvature_product, h, number),
        new,
    )
    return new, uneven + is_uneven.astype(jnp.int32)


def _measure_curvature(
    kernel: NoiseKernel, batch: BatchGradients, h: Any, key: jax.Array, like: Any
) -> Any:
    """Return q_i, whose mean is h_i a_i, by one product with a batch's Hessian."""
    is_full = not isinstance(kernel.basis, tuple)
    # q_i = z_i (H^(1/2) A H^(1/2) z)_i: in coordinates where A is about c no direction hides another
    z = computed_once(signs_like(key, like))
    z = flat(z, kernel.basis) if is_full else z
    root = jax.tree.map(jnp.sqrt, h)
    product = batch.curvature_product(kernel.params_of(times(root, z), batch.params))
    q = optax.tree.mul(z, times(root, kernel.coordinates(product)))
    if is_number(kernel.noise):
        q = inner(q, optax.tree.ones_like(q)) / optax.tree.size(q)
    return q


def _iterate(
    seen: Adaptation,
    kernel: NoiseKernel,
    product_fn: Callable[[Any], Any],
    h: Any,
    number: jax.Array,
) -> Adaptation:
    """Take a step of the power iteration for the largest eigenvalue of H A."""
    taken = jnp.where(number < _POWER_EVERY, number, _POWER_EVERY - 1 + number // _POWER_EVERY)
    stability, direction = power_iteration(
        seen.stability, seen.direction, lambda s: kernel.precondition(s, h), product_fn, taken + 1
    )
    return seen._replace(stability=stability, direction=direction)


def hand_over(
    kernel: NoiseKernel,
    seen: Adaptation,
    h: Any,
    scale: jax.Array,
    *,
    limit: jax.Array,
    momentum_factor: Any,
    noise_ratio: Any,
) -> tuple[NoiseKernel, Adaptation]:
    r"""Return the kernel of the next window, and the start of that window.

    The curvature of a direction includes the spread of the batches' curvatures, since their second
    moment decides whether iterates have a variance (with a rare example of great leverage). With
    :math:`\bar q = |E q_i| + 2 \,\mathrm{se}` in the coordinates of H,

    .. math::
      h_i a_i = \bar q \, \frac{1 - \mu}{1 + \mu} + \frac{\operatorname{Var} q_i}{2 \bar q}

    :math:`\rho` is such that the noise of a step varies by at most a tenth from place to place, since
    the law of the draws holds for constant noise.

    Args:
      kernel: The kernel of the window.
      seen: The statistics of the window.
      h: The steps of the kernel.
      scale: s.
      limit: c.
      momentum_factor: (1 - mu) / (1 + mu).
      noise_ratio: The maximum of rho.
    """
    n = jnp.maximum(seen.estimates, 1).astype(jnp.float32)
    found, noise, basis = seen.covariance, seen.covariance, kernel.basis
    if not isinstance(basis, tuple):
        # W_new = W R, with R^T (W^T C W) R = Lambda
        units = jnp.matmul(basis.T * seen.units[None], basis, precision="highest")
        found = jnp.diagonal(seen.covariance)
        noise, rotation = decompose(seen.covariance, units)
        basis = jnp.matmul(basis, rotation, precision="highest")

    # h_i a_i = q (1 - mu) / (1 + mu) + Var q_i / (2 q), in the coordinates of the old steps
    def curvature_of(mean: jax.Array, root_square: jax.Array, h: jax.Array) -> jax.Array:
        # Var q = (r - |E q|) (r + |E q|), whose factors' roots do not overflow
        mean = jnp.abs(mean)
        deviation = jnp.sqrt(jnp.maximum(root_square - mean, 0.0)) * jnp.sqrt(root_square + mean)
        size = mean + _ERRORS * deviation / jnp.sqrt(n.astype(mean.dtype))
        divisor = jnp.maximum(size, 0.1 * deviation)
        spread = jnp.where(divisor > 0, _SPREAD * deviation * (deviation / divisor), 0.0)
        factor = jnp.asarray(momentum_factor, mean.dtype)
        return jnp.where(h > 0, (size * factor + spread) / jnp.where(h > 0, h, 1.0), 0.0)

    curvature = jax.tree.map(curvature_of, seen.curvature, seen.root_square, h)
    if not isinstance(basis, tuple):
        curvature = jnp.matmul((rotation**2).T, curvature, precision="highest")

    # rho / (1 + rho) = 0.1 / sd(w^T C w h / s) over places
    relative = jax.tree.map(lambda h: h / scale.astype(h.dtype), h)
    weights = optax.tree.mul(kernel.noise, relative)
    level = jax.tree.map(lambda c, r: jnp.minimum(c * r, _MOST_NOISE) ** 2, found, relative)
    variance = jnp.maximum(seen.repeated - _mean(level, weights), 0.0)
    old = kernel.noise_ratio / (1 + kernel.noise_ratio)
    most = jnp.asarray(noise_ratio, jnp.float32)
    largest = jnp.minimum(most / (1 + most), old * _VARIATION / jnp.sqrt(variance + 1e-12))
    ratio = jax.tree.map(
        lambda c, noise: jnp.where(noise > 0, c / jnp.where(noise > 0, noise, 1.0), 1.0),
        found,
        kernel.noise,
    )
    # The a_i ignore how directions interact: steps are shortened until lambda_max(H A) is at most c
    effective = seen.stability * jnp.asarray(momentum_factor, jnp.float32)
    excess = jnp.where(effective > 0, kernel.excess * effective / limit, kernel.excess)
    excess = jnp.where(kernel.is_ready, excess, 1.0)
    excess = jnp.maximum(excess, 1.0).astype(jnp.float32)
    is_first = jnp.logical_not(_any_positive(kernel.noise))
    new = NoiseKernel(
        basis=basis,
        noise=noise,
        curvature=jax.tree.map(lambda a: a * excess.astype(a.dtype), curvature),
        noise_ratio=jnp.where(is_first, most, largest / (1 - largest)).astype(jnp.float32),
        # lambda_max of the old kernel, less by how much the new one is shortened
        stability=jnp.where(kernel.is_ready, effective * kernel.excess / excess, 0.0),
        excess=excess,
        # Without noise there is nothing that could have fallen
        drift=jnp.where(is_first, 1.0, _mean(ratio, weights)).astype(jnp.float32),
        correlation=seen.correlation,
        estimates=seen.estimates,
        is_ready=_any_positive(curvature),
    )
    is_sound = (seen.estimates > 0) & all_finite((noise, basis, curvature))
    fresh = optax.tree.zeros_like(seen)._replace(direction=seen.direction)
    return optax.tree.where(is_sound, new, kernel), fresh


def probing_steps(kernel: NoiseKernel, h: Any) -> Any:
    """Return steps, none zero and none very long, for the coordinates in which curvature is measured.

    An entry without noise may have curvature, as of a prior on a parameter that no example sees. Entries
    of a network that fits its data have hardly any noise: their h are 1e30, so the typical length is the
    geometric mean. Where a window has found no noise at all, as of equal examples, the length is 1.
    """
    # sqrt(h_i) |w_i|, in the units of the params: in a basis of C^(-1/2) all h_i without limits are s
    is_full = not isinstance(kernel.basis, tuple)
    sizes = jnp.max(jnp.abs(kernel.basis), axis=0) if is_full else optax.tree.ones_like(h)
    lengths = jax.tree.map(lambda h, size: jnp.sqrt(h) * size, h, sizes)
    logs = jax.tree.map(lambda x: jnp.log(jnp.where(x > 0, x, 1.0)), lengths)
    count = sum(jnp.sum(leaf > 0) for leaf in jax.tree.leaves(h))
    total = inner(logs, optax.tree.ones_like(h))
    without = jnp.where(kernel.estimates > 0, 1.0, 0.0).astype(total.dtype)
    mean = jnp.exp(total / jnp.maximum(count, 1).astype(total.dtype))
    typical = jnp.where(count > 0, mean, without)
    positive = [jnp.min(x, initial=jnp.inf, where=x > 0) for x in jax.tree.leaves(lengths)]
    shortest = jnp.where(count > 0, functools.reduce(jnp.minimum, positive), 1.0)

    def of_entry(length: jax.Array, size: jax.Array) -> jax.Array:
        length = jnp.where(length > 0, length, typical.astype(length.dtype))
        longest = math.sqrt(_LONGEST_STEP) * shortest.astype(length.dtype)
        return (jnp.minimum(length, longest) / size) ** 2

    return jax.tree.map(of_entry, lengths, sizes)


def _along(rows: Any, v: Any) -> jax.Array:
    """Return the product of each row of a tree with a tree like one of them."""
    parts = jax.tree.map(
        lambda r, v: jnp.sum(r * v[None].astype(r.dtype), axis=tuple(range(1, r.ndim))), rows, v
    )
    return sum(jax.tree.leaves(parts), start=jnp.zeros([], accumulation_dtype(parts)))


def _update_root_square(n: jax.Array, root: jax.Array, new: jax.Array) -> jax.Array:
    """Return the root of the mean of n squares, of which one is new."""
    old_weight, weight = (jnp.sqrt(x).astype(root.dtype) for x in (1 - 1 / n, 1 / n))
    return jnp.hypot(old_weight * root, weight * new)


def update_mean(mean: Any, new: Any, n: jax.Array) -> Any:
    """Return the mean of n values, of which one is new."""
    # In this form the first estimate is kept bit for bit
    rate = 1 / n
    return jax.tree.map(
        lambda m, x: (1 - rate).astype(m.dtype) * m + rate.astype(m.dtype) * x, mean, new
    )


def _mean(values: Any, weights: Any) -> jax.Array:
    """Return the weighted mean of all entries, 0 without weights."""
    total = inner(weights, optax.tree.ones_like(weights))
    return inner(values, weights) / jnp.where(total > 0, total, 1.0)


def _any_positive(tree: Any) -> jax.Array:
    flags = [jnp.any(leaf > 0) for leaf in jax.tree.leaves(tree)]
    return jnp.any(jnp.stack(flags)) if flags else jnp.zeros([], jnp.bool_)
