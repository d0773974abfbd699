"""What the warm-up of constant SGD learns: the gradients' noise, the curvature, and how they vary."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optperm.bayes.covariance import ESTIMATES, OUTER, BatchGradients, matrix, rows_of
from optperm.bayes.kernel import NoiseKernel, flat, inner, is_number, times
from optperm.bayes.normal_noise import normal_like, signs_like
from optperm.contract.dtypes import accumulation_dtype, all_finite
from optperm.contract.keys import key_data
from optperm.contract.mapped_axes import mark_varying, varying_axes, when

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Float32, Int32, PyTree

# By how much of itself the noise of a step may differ from place to place.

_VARIATION = 0.1
# A mean this many of its standard errors above the one that was seen is safe.
_ERRORS = 2.0
# The weight of the spread of the batches' curvatures, of whose noise C holds the mean already.
_SPREAD = 0.5
# The largest eigenvalue is looked for in the first ten estimates and every tenth, with five in memory.
_POWER_EVERY, _FORGETTING = 10, 5.0
# In units of its largest, what is no eigenvalue of a matrix of correlations but rounding.
_NOTHING = 1e-7
# Squares of noise over the noise of the window before, and of curvature times a step, stay finite in
# float32 with these limits. Else a single entry would keep the kernel of all others from use.
_MOST_NOISE, _LONGEST_STEP = 1e9, 1e16  # in units of the shortest step
# Gradients are rounded by so many of their dtype's epsilon.
_ROUNDING = 10.0


class Adaptation(NamedTuple):
    r"""What a window of the warm-up has seen so far.

    Attributes:
      estimates: Estimates in this window.
      covariance: The mean of :math:`\hat C`: of the full preconditioner :math:`W^\top \hat C W`, (D, D),
        in the coordinates of the kernel; else its diagonal, a tree like params, or the mean of that.
      units: Of the full preconditioner, the mean of the diagonal of :math:`\hat C` itself, (D,).
      noise: The last :math:`w_i^\top \hat C w_i`, of the form of the kernel's noise.
      repeated: The mean over entries of the product of two :math:`w_i^\top \hat C w_i h_i / s` in a row.
      curvature: The mean of :math:`q_i = z_i (H^{1/2} A H^{1/2} z)_i`.
      square: That of :math:`q_i^2`.
      direction: The vector of the power iteration for :math:`\lambda_{\max}(H A)`, a tree like params.
      stability: Its eigenvalue.
      correlation: As the kernel's.
    """

    estimates: Int32[Array, ""]
    covariance: PyTree[Float[Array, "..."]]
    units: Any  # Float[Array, "d"], or ()
    noise: PyTree[Float[Array, "..."]]
    repeated: Float32[Array, ""]
    curvature: PyTree[Float[Array, "..."]]
    square: PyTree[Float[Array, "..."]]
    direction: PyTree[Float[Array, "?*shape"], "Params"]
    stability: Float32[Array, ""]
    correlation: Float32[Array, ""]


def begin(params: optax.Params, preconditioner: Any, rho: Any) -> tuple[NoiseKernel, Adaptation]:
    """Return the kernel that takes no steps, and the start of the first window.

    Args:
      params: The params.
      preconditioner: "scalar", "diagonal" or "full".
      rho: The largest rho.
    """
    covariance = OUTER[preconditioner](
        jax.tree.map(lambda p: jnp.zeros_like(p, accumulation_dtype(p))[None], params)
    )
    is_full = preconditioner == "full"
    noise = jnp.diagonal(covariance) if is_full else covariance
    basis = jnp.identity(len(covariance), covariance.dtype) if is_full else ()

    # Each is an array of its own: states may be donated.
    def zero() -> jax.Array:
        return mark_varying(jnp.zeros([], jnp.float32), varying_axes(params))

    def zeros() -> Any:
        return jax.tree.map(jnp.copy, noise)

    kernel = NoiseKernel(
        basis, zeros(), zeros(), jnp.asarray(rho, jnp.float32) + zero(), zero(), zero() + 1,
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
    """Return the kernel to step with, what its window has seen, and how many gradients are no means.

    Args:
      kernel: The kernel of this window.
      seen: What it had seen before.
      uneven: How many estimates met a batch's gradient that is not the mean of those of its examples.
      batch: The gradients.
      estimator: Which estimator of C.
      scale: s.
      key: A raw key.
      number: How many estimates the schedule had before in this window.
      is_open: Whether this step learns.
      ends_window: Whether the window ends with it.
      limit: c.
      rate: Factor on c and rho.
      **options: Those of `hand_over`.
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
    r"""Return what a window has seen with one more batch, and how many gradients were no means.

    Args:
      seen: What it had seen before.
      uneven: How many there were before.
      kernel: The kernel of this window.
      batch: The gradients.
      estimator: Which estimator of C.
      h: The steps by this kernel.
      scale: s.
      key: The raw key of z.
      number: How many estimates the schedule had before in this window.
    """
    n = seen.estimates.astype(jnp.float32) + 1

    # C <- C + (C^ - C) / n, and of C^ what the directions of the kernel see
    is_full = not isinstance(kernel.basis, tuple)
    form: Any = "full" if is_full else "scalar" if is_number(kernel.noise) else "diagonal"

    v = kernel.precondition(seen.direction, h)

    def outer(deviations: optax.Updates) -> Any:
        if not is_full:
            return OUTER[form](deviations), jnp.sum(_along(deviations, v) ** 2)
        # W^T C W keeps what C itself would lose in rounding: its condition is squared
        rows = rows_of(deviations)
        coordinates = jnp.matmul(rows, kernel.basis, precision="highest")
        return matrix(coordinates), jnp.sum(rows**2, axis=0)

    (c_hat, noise), is_uneven = ESTIMATES[estimator](batch, outer)
    correlation, units = seen.correlation, ()
    if is_full:
        units, noise = _towards(seen.units, noise, n), jnp.diagonal(c_hat)
    else:
        # v^T (C + b) v over v^T diag(C + b) v, v = H s
        assumed, b = (
            inner(v, times(x, v)).astype(jnp.float32)
            for x in (kernel.noise, kernel.injected(h, scale))
        )
        ratio = (noise + b) / jnp.where(assumed + b > 0, assumed + b, 1.0)
        correlation, noise = correlation + (ratio - correlation) / n, c_hat
    covariance = _towards(seen.covariance, c_hat, n)

    # Two looks in a row share the place of the chain, and nothing else
    share = jax.tree.map(lambda h: h / scale.astype(h.dtype), h)
    product = jax.tree.map(
        lambda one, two, r: jnp.minimum(one * r, _MOST_NOISE) * jnp.minimum(two * r, _MOST_NOISE),
        noise,
        seen.noise,
        share,
    )
    n_pairs = jnp.maximum(n - 1, 1)
    repeated = _mean(product, jax.tree.map(jnp.multiply, kernel.noise, share))
    repeated = jnp.where(n > 1, seen.repeated + (repeated - seen.repeated) / n_pairs, 0.0)

    # q_i = z_i (H^(1/2) A H^(1/2) z)_i, by Hutchinson's rule in coordinates where A is about c
    z = signs_like(key, seen.direction)
    z = flat(z, kernel.basis) if is_full else z
    root = jax.tree.map(jnp.sqrt, h)
    product = batch.curvature_product(kernel.params_of(times(root, z), batch.params))
    q = jax.tree.map(jnp.multiply, z, times(root, kernel.coordinates(product)))
    if is_number(kernel.noise):
        q = inner(q, _ones(q)) / sum(x.size for x in jax.tree.leaves(q))
    new = seen._replace(
        estimates=seen.estimates + 1,
        covariance=covariance,
        units=units,
        noise=noise,
        repeated=repeated.astype(jnp.float32),
        correlation=correlation.astype(jnp.float32),
        curvature=_towards(seen.curvature, q, n),
        square=_towards(seen.square, jax.tree.map(jnp.square, q), n),
    )
    new = optax.tree.where(all_finite((c_hat, q)), new, seen)
    # The number by the schedule is the same in all chains, and a condition on it stays one under vmap
    new = when(
        (number % _POWER_EVERY == 0) | (number < _POWER_EVERY),
        lambda new: _iterate(new, kernel, batch.curvature_product, h, number),
        new,
    )
    return new, uneven + is_uneven.astype(jnp.int32)


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


def power_iteration(
    value: jax.Array,
    vector: Any,
    precondition_fn: Callable[[Any], Any],
    product_fn: Callable[[Any], Any],
    taken: jax.Array,
) -> tuple[jax.Array, Any]:
    r"""Return better estimates of :math:`\lambda_{\max}(H A)` and of its left eigenvector.

    Args:
      value: The running mean of Rayleigh quotients, in which older ones fade.
      vector: That of normalized products.
      precondition_fn: The product with H.
      product_fn: The product with a batch's A.
      taken: Steps of the iteration so far.
    """
    # lambda = mean of v^T A v / s^T v, v = H s
    v = precondition_fn(vector)
    product = product_fn(v)
    quotient = (inner(v, product) / inner(vector, v)).astype(value.dtype)
    taken = taken.astype(value.dtype)
    rate = jnp.minimum(_FORGETTING / (taken + _FORGETTING), 0.5)
    rate = jnp.where(value == 0, 1.0, rate).astype(value.dtype)
    mean = value + rate * (quotient - value)
    # Divided by its size where the mean is not one to divide by.
    divisor = jnp.where(mean > 0, mean, jnp.sqrt(inner(product, product)).astype(value.dtype))
    mixed = jax.tree.map(
        lambda s, a: (1 - rate).astype(s.dtype) * s + (rate / divisor).astype(s.dtype) * a,
        vector,
        product,
    )
    norm = jnp.sqrt(inner(mixed, mixed))
    is_sound = jnp.isfinite(quotient) & jnp.isfinite(norm) & (norm > 0)
    moved = jax.tree.map(
        lambda m, s: jnp.where(is_sound, m / norm.astype(m.dtype), s), mixed, vector
    )
    return jnp.where(jnp.isfinite(quotient), mean, value), moved


def hand_over(
    kernel: NoiseKernel,
    seen: Adaptation,
    h: Any,
    scale: jax.Array,
    *,
    limit: jax.Array,
    momentum_factor: Any,
    rho: Any,
) -> tuple[NoiseKernel, Adaptation]:
    r"""Return the kernel of the next window, and that window's start.

    A direction's limit of stability counts the batches' own curvatures too, whose second moment
    decides whether iterates have a variance (a rare example of great leverage). With
    :math:`\bar q = |E q_i| + 2 \,\mathrm{se}` in the coordinates of H,

    .. math::
      h_i a_i = \bar q \, \frac{1 - \mu}{1 + \mu} + \frac{\operatorname{Var} q_i}{2 \bar q}

    The batches' noise may have the share of a step's noise at which that varies by a tenth from place
    to place, as the law of the draws is that of constant noise.

    Args:
      kernel: The kernel of the window.
      seen: What it has seen.
      h: The steps by the kernel.
      scale: s.
      limit: c.
      momentum_factor: (1 - mu) / (1 + mu).
      rho: The largest rho.
    """
    n = jnp.maximum(seen.estimates, 1).astype(jnp.float32)
    found, noise, basis = seen.covariance, seen.covariance, kernel.basis
    if not isinstance(basis, tuple):
        # W_new = W R, with R^T (W^T C W) R = Lambda
        units = jnp.matmul(basis.T * seen.units[None], basis, precision="highest")
        found = jnp.diagonal(seen.covariance)
        noise, rotation = decompose(seen.covariance, units)
        basis = jnp.matmul(basis, rotation, precision="highest")

    # What was seen of the curvature is in the coordinates of the old kernel's steps
    def curvature_of(mean: jax.Array, square: jax.Array, h: jax.Array) -> jax.Array:
        variance = jnp.maximum(square - mean**2, 0.0)
        size = jnp.abs(mean) + _ERRORS * jnp.sqrt(variance / n.astype(mean.dtype))
        divisor = jnp.maximum(size, 0.1 * jnp.sqrt(variance))
        spread = jnp.where(divisor > 0, _SPREAD * variance / divisor, 0.0)
        factor = jnp.asarray(momentum_factor, mean.dtype)
        return jnp.where(h > 0, (size * factor + spread) / jnp.where(h > 0, h, 1.0), 0.0)

    curvature = jax.tree.map(curvature_of, seen.curvature, seen.square, h)
    if not isinstance(basis, tuple):
        curvature = jnp.matmul((rotation**2).T, curvature, precision="highest")

    # Var(share of the batches in a step's noise), over places
    share = jax.tree.map(lambda h: h / scale.astype(h.dtype), h)
    weights = jax.tree.map(jnp.multiply, kernel.noise, share)
    level = jax.tree.map(lambda c, r: jnp.minimum(c * r, _MOST_NOISE) ** 2, found, share)
    variance = jnp.maximum(seen.repeated - _mean(level, weights), 0.0)
    old = kernel.rho / (1 + kernel.rho)
    most = jnp.asarray(rho, jnp.float32)
    largest = jnp.minimum(most / (1 + most), old * _VARIATION / jnp.sqrt(variance + 1e-12))
    ratio = jax.tree.map(
        lambda c, noise: jnp.where(noise > 0, c / jnp.where(noise > 0, noise, 1.0), 1.0),
        found,
        kernel.noise,
    )
    # Steps are shorter by what lambda_max(H A) exceeds c
    effective = seen.stability * jnp.asarray(momentum_factor, jnp.float32)
    excess = jnp.where(effective > 0, kernel.excess * effective / limit, kernel.excess)
    excess = jnp.where(kernel.is_ready, excess, 1.0)
    excess = jnp.maximum(excess, 1.0).astype(jnp.float32)
    is_first = jnp.logical_not(_any(kernel.noise))
    new = NoiseKernel(
        basis=basis,
        noise=noise,
        curvature=jax.tree.map(lambda a: a * excess.astype(a.dtype), curvature),
        rho=jnp.where(is_first, most, largest / (1 - largest)).astype(jnp.float32),
        # Of the old kernel, and of the new one after what was shortened for it.
        stability=jnp.where(kernel.is_ready, effective * kernel.excess / excess, 0.0),
        excess=excess,
        drift=_mean(ratio, weights).astype(jnp.float32),
        correlation=seen.correlation,
        estimates=seen.estimates,
        is_ready=_any(curvature),
    )
    is_sound = (seen.estimates > 0) & all_finite((noise, basis, curvature))
    fresh = jax.tree.map(jnp.zeros_like, seen)._replace(direction=seen.direction)
    return optax.tree.where(is_sound, new, kernel), fresh


def decompose(covariance: jax.Array, units: jax.Array) -> tuple[jax.Array, jax.Array]:
    r"""Return Lambda, of ones and zeros, and R with R^T C R = Lambda and R^T U R diagonal.

    C is divided by its own diagonal first, and U decides between the bases that make it one: in float32,
    neither the units of coordinates nor the condition of C decide what is lost in rounding.

    Args:
      covariance: C, in some coordinates.
      units: U, that of gradients whose entries vary as much and are independent: diag(C) for entries.
    """
    least = (_ROUNDING * jnp.finfo(units.dtype).eps) ** 2 * jnp.diagonal(units)
    diagonal = jnp.diagonal(covariance)
    is_seen = diagonal > least
    root = jnp.sqrt(jnp.where(is_seen, diagonal, jnp.where(least > 0, jnp.diagonal(units), 1.0)))
    scale = root[:, None] * root[None]
    noise, vectors = _eigh_of_part(covariance / scale, is_seen)
    is_noise = noise > _NOTHING * len(noise)
    whitened = vectors / jnp.where(is_noise, jnp.sqrt(jnp.where(is_noise, noise, 1.0)), 1.0)[None]
    within = jnp.matmul(whitened.T, jnp.matmul(units / scale, whitened, precision="highest"))
    _, rotation = _eigh_of_part(within, is_noise)
    basis = jnp.matmul(whitened, rotation, precision="highest") / root[:, None]
    return is_noise.astype(noise.dtype), basis


def _eigh_of_part(matrix: jax.Array, is_inside: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return eigenvalues and vectors of a part of a matrix; what is outside has -1, and comes first.

    Without the mask rounding puts 1e-7 of what has noise into what has none, and the next window would
    take that for all the noise there is.
    """
    is_both = is_inside[:, None] & is_inside[None]
    size = jnp.max(jnp.where(is_both, jnp.abs(matrix), 0.0))
    inside = jnp.where(is_both, matrix / jnp.where(size > 0, size, 1.0), 0.0)
    values, vectors = jnp.linalg.eigh(inside - jnp.diag(jnp.where(is_inside, 0.0, 1.0)))
    is_outside = jnp.arange(len(values)) < jnp.sum(jnp.logical_not(is_inside))
    vectors = jnp.where(is_inside[:, None] == is_outside[None], 0.0, vectors)
    return jnp.where(is_outside, -1.0, values * size), vectors


def probing_steps(kernel: NoiseKernel, h: Any) -> Any:
    """Return the steps in whose coordinates curvature is looked at: none is zero, none very long.

    An entry without noise, as of a prior on what no example sees, has curvature all the same. Entries of
    a network that fits its data have hardly any noise: their h are 1e30, so that the typical step is the
    geometric mean.
    """
    total = inner(jax.tree.map(lambda h: jnp.log(jnp.where(h > 0, h, 1.0)), h), _ones(h))
    count = sum(jnp.sum(leaf > 0) for leaf in jax.tree.leaves(h))
    typical = jnp.where(count > 0, jnp.exp(total / jnp.maximum(count, 1).astype(total.dtype)), 0.0)
    positive = [jnp.min(jnp.where(h > 0, h, jnp.inf)) for h in jax.tree.leaves(h)]
    shortest = functools.reduce(jnp.minimum, positive)

    def of_entry(h: jax.Array) -> jax.Array:
        longest = _LONGEST_STEP * jnp.where(count > 0, shortest, 1.0).astype(h.dtype)
        return jnp.minimum(jnp.where(h > 0, h, typical.astype(h.dtype)), longest)

    return jax.tree.map(of_entry, h)


def _ones(tree: Any) -> Any:
    return jax.tree.map(jnp.ones_like, tree)


def _along(rows: Any, v: Any) -> jax.Array:
    """Return the product of each row of a tree with a tree like one of them."""
    parts = jax.tree.map(
        lambda r, v: jnp.sum(r * v[None].astype(r.dtype), axis=tuple(range(1, r.ndim))), rows, v
    )
    return sum(jax.tree.leaves(parts), start=jnp.zeros([], accumulation_dtype(parts)))


def _towards(mean: Any, new: Any, n: jax.Array) -> Any:
    # In this form the first one is kept bit for bit.
    rate = 1 / n
    return jax.tree.map(
        lambda m, x: (1 - rate).astype(m.dtype) * m + rate.astype(m.dtype) * x, mean, new
    )


def _mean(values: Any, weights: Any) -> jax.Array:
    """Return the mean of all entries by weights; 0 without any."""
    total = inner(weights, _ones(weights))
    return inner(values, weights) / jnp.where(total > 0, total, 1.0)


def _any(tree: Any) -> jax.Array:
    flags = [jnp.any(leaf > 0) for leaf in jax.tree.leaves(tree)]
    return jnp.any(jnp.stack(flags)) if flags else jnp.zeros([], jnp.bool_)
