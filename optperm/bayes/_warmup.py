"""The warm-up of constant SGD: when it learns, what, and the kernel that it hands over."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optperm.bayes._covariance import ESTIMATES, BatchGradients
from optperm.bayes._forms import FORMS, Preconditioner, inner
from optperm.bayes._kernel import NoiseKernel
from optperm.bayes._power_iteration import power_iteration
from optperm.core import checks
from optperm.core.control import when
from optperm.core.dtypes import accumulation_dtype, all_finite, computed_once
from optperm.core.keys import key_data
from optperm.core.mapped_axes import mark_varying, varying_axes
from optperm.core.noise import normal_like, signs_like

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Float32, Int32, PyTree

_LONGEST, _LEAST_OPEN = 2**31 - 1, 1000
# With many examples' gradients per estimate, an eighth of the estimates is enough.
_ESTIMATE_EVERY, _ENOUGH = 8, 500
# The fraction by which the noise of a step may vary from place to place.
_VARIATION = 0.1
# The fraction by which correlation may change a variance, and the least fraction of the batches' noise.
_TOLERANCE, _LEAST_FRACTION = 0.2, 0.02
# Curvature is taken to be its mean plus as many standard errors.
_ERRORS = 2.0
# Weight of the spread of the batches' curvatures; C holds the rest of their noise.
_SPREAD = 0.5
# The last sixth or so of the estimates make up the mean of the correlation's eigenvalues.
_MEMORY = 5.0
# The power iteration takes a step in each of the first ten estimates, then in every tenth.
_POWER_EVERY = 10
# Squares of noise over the noise of the window before stay finite in float32 with this limit. Otherwise
# a single entry would keep the kernel of all others from use.
_MOST_NOISE = 1e9
# Curvature is measured with steps that differ at most by this factor: the products with long ones hide
# the curvature of short ones. It leaves room for params with units from e^-8 to e^8.
_LONGEST_STEP = 1e16


class Schedule(NamedTuple):
    """The steps of the warm-up.

    Attributes:
      burn_in: The first step that samples.
      freeze_after: The first step that learns nothing.
      every: Steps from one estimate to the next.
    """

    burn_in: int | jax.Array
    freeze_after: int | jax.Array
    every: int | jax.Array

    def ends(self) -> tuple[jax.Array, ...]:
        """Return the start of the first window and the ends of all five.

        Two windows are in the second half of the burn-in; three end after a quarter, a half and all of
        the steps from the burn-in to `freeze_after`. So the noise far from the optimum is forgotten.
        """
        first, last = (jnp.asarray(x, jnp.int32) for x in (self.burn_in, self.freeze_after))
        left = last - first
        half = (first // 2, first - first // 4, first)
        return *half, first + left // 4, first + left // 2, last

    def is_open(self, count: jax.Array) -> jax.Array:
        """Return whether a step learns."""
        start, *_, last = self.ends()
        return (count >= start) & (count < last) & ((count - start) % self.every == 0)

    def number(self, count: jax.Array) -> jax.Array:
        """Return the number of estimates of a step's window before that step."""
        starts = [jnp.where(start <= count, start, 0) for start in self.ends()]
        return (count - functools.reduce(jnp.maximum, starts)) // self.every

    def ends_window(self, count: jax.Array) -> jax.Array:
        """Return whether a window ends with a step."""
        _, *ends = self.ends()
        return functools.reduce(jnp.logical_or, [count + 1 == end for end in ends])


def make_schedule(
    burn_in: int | jax.Array,
    freeze_after: int | jax.Array | None,
    batch_size: int | jax.Array,
    estimator: str,
    preconditioner: str | None,
) -> Schedule:
    """Return the schedule of `optperm.constant_sgd`, which learns until after the burn-in."""
    checks.check_count("burn_in", burn_in, minimum=0)
    are_seen = checks.is_concrete_number(burn_in)
    if freeze_after is None:
        left = max(int(burn_in), _LEAST_OPEN) if are_seen else jnp.maximum(burn_in, _LEAST_OPEN)
        freeze_after = min(int(burn_in) + left, _LONGEST) if are_seen else burn_in + left
    checks.check_count("freeze_after", freeze_after)
    are_seen = are_seen and checks.is_concrete_number(freeze_after)
    # Without a burn-in one window learns the noise and another one the curvature
    if are_seen and int(freeze_after) < max(int(burn_in) + 1, 2):
        numbers = f"{freeze_after} and {burn_in}"
        raise ValueError(f"freeze_after must be above burn_in and at least 2, got {numbers}.")
    every = 1
    if are_seen and estimator == "per_example" and preconditioner in ("scalar", "diagonal"):
        is_seen = checks.is_concrete_number(batch_size)
        enough = (int(freeze_after) - int(burn_in)) // _ENOUGH
        every = max(1, min(int(batch_size) // 2 if is_seen else 1, enough, _ESTIMATE_EVERY))
    return Schedule(burn_in, freeze_after, every)


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
      probes: The vectors for the extreme eigenvalues of the noise's correlation: two trees like params,
        or none of the full form.
      correlation: As in `optperm.bayes.NoiseKernel`.
    """

    estimates: Int32[Array, ""]
    covariance: PyTree[Float[Array, "..."]]
    noise: PyTree[Float[Array, "..."]]
    repeated: Float32[Array, ""]
    curvature: PyTree[Float[Array, "..."]]
    root_square: PyTree[Float[Array, "..."]]
    direction: PyTree[Float[Array, "?*shape"], "Params"]
    stability: Float32[Array, ""]
    probes: PyTree[Float[Array, "..."]]
    correlation: Float32[Array, "2"]


def begin(
    params: optax.Params, preconditioner: Preconditioner, **numbers: Any
) -> tuple[NoiseKernel, Window]:
    """Return a kernel that takes no steps, and the start of the first window.

    Args:
      params: The params.
      preconditioner: "scalar", "diagonal" or "full".
      **numbers: The fields `noise_ratio`, `num_data`, `batch_size` and `momentum` of the kernel.
    """
    form = FORMS[preconditioner].like(params)
    axes = varying_axes(params)

    # No array stands twice in a state, which may be donated
    def number(value: Any, dtype: Any = jnp.float32) -> jax.Array:
        return mark_varying(jnp.asarray(value, dtype) + jnp.zeros([], dtype), axes)

    kernel = NoiseKernel(
        basis=form,
        noise=form.zeros(params),
        curvature=form.zeros(params),
        noise_ratio=number(numbers["noise_ratio"]),
        stability=number(0),
        excess=number(1),
        drift=number(1),
        correlation=number([1, 1]),
        estimates=jnp.zeros([], jnp.int32),
        is_ready=number(0) > 0,
        num_data=number(numbers["num_data"], jnp.int32),
        batch_size=number(numbers["batch_size"], jnp.int32),
        momentum=number(numbers["momentum"]),
    )
    window = Window(
        estimates=jnp.zeros([], jnp.int32),
        covariance=form.covariance(
            jax.tree.map(lambda p: jnp.zeros_like(p, accumulation_dtype(p))[None], params)
        ),
        noise=form.zeros(params),
        repeated=number(0),
        curvature=form.zeros(params),
        root_square=form.zeros(params),
        direction=normal_like(key_data(0), params),
        stability=number(0),
        probes=form.probes(params),
        correlation=number([1, 1]),
    )
    return kernel, window


def warm_up(
    kernel: NoiseKernel,
    seen: Window,
    uneven: jax.Array,
    batch: BatchGradients,
    estimator: Any,
    scale: jax.Array,
    key: jax.Array,
    *,
    schedule: Schedule,
    count: jax.Array,
    limit: jax.Array,
    rate: jax.Array,
    noise_ratio: Any,
) -> tuple[NoiseKernel, Window, jax.Array]:
    """Return the kernel, the statistics of its window and the state's `uneven` after one more step.

    Args:
      kernel: The kernel of this window.
      seen: The statistics of this window.
      uneven: The number of batches whose gradient was not the mean of its examples' gradients.
      batch: The gradients.
      estimator: The name of the estimator of C.
      scale: s.
      key: A raw key.
      schedule: The schedule.
      count: Steps before this one.
      limit: c.
      rate: Factor on c and rho.
      noise_ratio: The maximum of rho.
    """
    is_open, ends_window = schedule.is_open(count), schedule.ends_window(count)
    number = schedule.number(count)

    def learn_and_hand_over(known: Any) -> Any:
        kernel, seen, uneven = known
        h = probing_steps(kernel, kernel.step_sizes(scale, limit, rate))
        seen, uneven = when(
            is_open & (scale > 0),
            lambda known: learn(*known, kernel, batch, estimator, h, scale, key, number),
            (seen, uneven),
        )
        kernel, seen = when(
            ends_window,
            lambda known: hand_over(*known, h, scale, limit * rate, noise_ratio),
            (kernel, seen),
        )
        return kernel, seen, uneven

    # The warm-up learns in one conditional: after it, a step costs a gradient and its noise
    return when(is_open | ends_window, learn_and_hand_over, (kernel, seen, uneven))


def learn(
    seen: Window,
    uneven: jax.Array,
    kernel: NoiseKernel,
    batch: BatchGradients,
    estimator: Any,
    h: Any,
    scale: jax.Array,
    key: jax.Array,
    number: jax.Array,
) -> tuple[Window, jax.Array]:
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
    form, n = kernel.basis, seen.estimates.astype(jnp.float32) + 1
    along = _along_probes(kernel, seen.probes)

    def outer(deviations: optax.Updates) -> Any:
        return form.covariance(deviations), [_times_rows(deviations, v) for v in along]

    # C <- C + (C^ - C) / n
    (c_hat, products), is_uneven = ESTIMATES[estimator](batch, outer)
    noise = form.variances(c_hat)
    q = _measure_curvature(kernel, batch, h, key, seen.direction)
    probes, correlation = _iterate_probes(kernel, seen, products, n)
    new = Window(
        estimates=seen.estimates + 1,
        covariance=update_mean(seen.covariance, c_hat, n),
        noise=noise,
        repeated=_update_repeated(seen, kernel, noise, h, scale, n),
        curvature=update_mean(seen.curvature, q, n),
        root_square=jax.tree.map(functools.partial(_update_root_square, n), seen.root_square, q),
        direction=seen.direction,
        stability=seen.stability,
        probes=probes,
        correlation=correlation,
    )
    new = optax.tree.where(all_finite((c_hat, products, q)), new, seen)
    # The schedule's number, not n: it is the same in all chains, so that vmap keeps the conditional
    new = when(
        (number % _POWER_EVERY == 0) | (number < _POWER_EVERY),
        lambda new: _iterate(new, kernel, batch.curvature_product, h, number),
        new,
    )
    return new, uneven + is_uneven.astype(jnp.int32)


def _update_repeated(
    seen: Window, kernel: NoiseKernel, noise: Any, h: Any, scale: jax.Array, n: jax.Array
) -> jax.Array:
    """Return the mean of products of the noise of two successive batches, weighted with Lambda h.

    They share the chain's place, but not their noise: E[w^T C^ w w^T C^' w].
    """
    relative = jax.tree.map(lambda h: h / scale.astype(h.dtype), h)
    product = jax.tree.map(
        lambda one, two, r: jnp.minimum(one * r, _MOST_NOISE) * jnp.minimum(two * r, _MOST_NOISE),
        noise,
        seen.noise,
        relative,
    )
    found = _mean(product, optax.tree.mul(kernel.noise, relative))
    mean = seen.repeated + (found - seen.repeated) / jnp.maximum(n - 1, 1)
    return jnp.where(n > 1, mean, 0.0).astype(jnp.float32)


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
    seen: Window,
    kernel: NoiseKernel,
    product_fn: Callable[[Any], Any],
    h: Any,
    number: jax.Array,
) -> Window:
    """Take a step of the power iteration for the largest eigenvalue of H A."""
    taken = jnp.where(number < _POWER_EVERY, number, _POWER_EVERY - 1 + number // _POWER_EVERY)
    stability, direction = power_iteration(
        seen.stability, seen.direction, lambda s: kernel.precondition(s, h), product_fn, taken + 1
    )
    return seen._replace(stability=stability, direction=direction)


def hand_over(
    kernel: NoiseKernel,
    seen: Window,
    h: Any,
    scale: jax.Array,
    limit: jax.Array,
    noise_ratio: Any,
) -> tuple[NoiseKernel, Window]:
    r"""Return the kernel of the next window, and the start of that window.

    Args:
      kernel: The kernel of the window.
      seen: The statistics of the window.
      h: The steps of the kernel.
      scale: s.
      limit: c.
      noise_ratio: The maximum of rho.
    """
    # In the coordinates of the old steps, then in those of the new ones
    factor = (1 - kernel.momentum) / (1 + kernel.momentum)
    a = curvature_bound(seen, h, factor)
    basis, noise, curvature = kernel.basis.turn(seen.covariance, a)
    stability, excess = shortening(kernel, seen.stability * factor, limit)
    found = kernel.basis.variances(seen.covariance)
    weights = optax.tree.mul(kernel.noise, jax.tree.map(lambda h: h / scale.astype(h.dtype), h))
    ratio = jax.tree.map(
        lambda c, noise: jnp.where(noise > 0, c / jnp.where(noise > 0, noise, 1.0), 1.0),
        found,
        kernel.noise,
    )
    # Without noise in the window before there is nothing that could have fallen or varied
    is_first = jnp.logical_not(_any_positive(kernel.noise))
    most = jnp.asarray(noise_ratio, jnp.float32)
    fraction = jnp.minimum(
        fraction_by_correlation(seen.correlation),
        fraction_by_places(kernel, seen, found, h, scale, weights),
    )
    fraction = jnp.minimum(most / (1 + most), fraction)
    new = kernel._replace(
        basis=basis,
        noise=noise,
        curvature=jax.tree.map(lambda a: a * excess.astype(a.dtype), curvature),
        noise_ratio=jnp.where(is_first, most, fraction / (1 - fraction)).astype(jnp.float32),
        stability=stability,
        excess=excess,
        drift=jnp.where(is_first, 1.0, _mean(ratio, weights)).astype(jnp.float32),
        correlation=seen.correlation,
        estimates=seen.estimates,
        is_ready=_any_positive(curvature),
    )
    is_sound = (seen.estimates > 0) & all_finite((noise, basis, curvature))
    fresh = optax.tree.zeros_like(seen)._replace(
        direction=seen.direction, probes=seen.probes, correlation=seen.correlation
    )
    return optax.tree.where(is_sound, new, kernel), fresh


def curvature_bound(seen: Window, h: Any, momentum_factor: jax.Array) -> Any:
    r"""Return a, in the coordinates of the window's steps.

    The curvature of a direction includes the spread of the batches' curvatures, since their second
    moment decides whether iterates have a variance (with a rare example of great leverage). With
    :math:`\bar q = |E q_i| + 2 \,\mathrm{se}` in the coordinates of H,

    .. math::
      h_i a_i = \bar q \, \frac{1 - \mu}{1 + \mu} + \frac{\operatorname{Var} q_i}{2 \bar q}

    Args:
      seen: The statistics of the window.
      h: The steps of the window's kernel.
      momentum_factor: (1 - mu) / (1 + mu).
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


def shortening(
    kernel: NoiseKernel, effective: jax.Array, limit: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return lambda_max(H A) of the new kernel, and the factor on the a_i that brings it down to c.

    The a_i ignore how directions interact.

    Args:
      kernel: The kernel of the window.
      effective: Its lambda_max(H A) (1 - mu) / (1 + mu).
      limit: c.
    """
    excess = jnp.where(effective > 0, kernel.excess * effective / limit, kernel.excess)
    excess = jnp.where(kernel.is_ready, excess, 1.0)
    excess = jnp.maximum(excess, 1.0).astype(jnp.float32)
    return jnp.where(kernel.is_ready, effective * kernel.excess / excess, 0.0), excess


def fraction_by_correlation(correlation: jax.Array) -> jax.Array:
    r"""Return :math:`\varphi = \rho / (1 + \rho)` with which variances are within a fifth.

    .. math:: \varphi \max(1 - r_{\min}, r_{\max} - 1) \le \tfrac15

    See `optperm.bayes.NoiseKernel`. It is no less than a fiftieth, below which chains hardly move.

    Args:
      correlation: :math:`r_{\min}` and :math:`r_{\max}`.
    """
    error = jnp.maximum(jnp.maximum(1 - correlation[0], correlation[1] - 1), 1e-6)
    return jnp.maximum(_TOLERANCE / error, _LEAST_FRACTION)


def fraction_by_places(
    kernel: NoiseKernel, seen: Window, found: Any, h: Any, scale: jax.Array, weights: Any
) -> jax.Array:
    """Return rho / (1 + rho) = 0.1 / sd(w^T C w h / s) over places.

    So the noise of a step varies by at most a tenth from place to place, since the law of the draws
    holds for constant noise.

    Args:
      kernel: The kernel of the window.
      seen: The statistics of the window.
      found: The mean of w^T C^ w.
      h: The steps of the kernel.
      scale: s.
      weights: Lambda h / s, the weights of directions.
    """
    level = jax.tree.map(
        lambda c, h: jnp.minimum(c * (h / scale.astype(h.dtype)), _MOST_NOISE) ** 2, found, h
    )
    variance = jnp.maximum(seen.repeated - _mean(level, weights), 0.0)
    old = kernel.noise_ratio / (1 + kernel.noise_ratio)
    return old * _VARIATION / jnp.sqrt(variance + 1e-12)


def probing_steps(kernel: NoiseKernel, h: Any) -> Any:
    """Return steps, none zero and none very long, for the coordinates in which curvature is measured.

    An entry without noise may have curvature, as of a prior on a parameter that no example sees. Entries
    of a network that fits its data have hardly any noise: their h are 1e30, so the typical length is the
    geometric mean. Where a window has found no noise at all, as of equal examples, the length is 1.
    """
    # sqrt(h_i) |w_i|, in the units of the params: in a basis of C^(-1/2) all h_i without limits are s
    sizes = kernel.basis.lengths(h)
    lengths = jax.tree.map(lambda h, size: jnp.sqrt(h) * size, h, sizes)
    logs = jax.tree.map(lambda x: jnp.log(jnp.where(x > 0, x, 1.0)), lengths)
    count = sum(jnp.sum(leaf > 0) for leaf in jax.tree.leaves(h))
    total = inner(logs, optax.tree.ones_like(h))
    without = jnp.where(kernel.estimates > 0, 1.0, 0.0).astype(total.dtype)
    mean = jnp.exp(total / jnp.maximum(count, 1).astype(total.dtype))
    typical = jnp.where(count > 0, mean, without)
    positive = [jnp.min(x, initial=jnp.inf, where=x > 0) for x in jax.tree.leaves(lengths)]
    shortest = jnp.where(count > 0, functools.reduce(jnp.minimum, positive), 1.0)
    typical, shortest = computed_once((typical, shortest))

    def of_entry(length: jax.Array, size: jax.Array) -> jax.Array:
        length = jnp.where(length > 0, length, typical.astype(length.dtype))
        longest = math.sqrt(_LONGEST_STEP) * shortest.astype(length.dtype)
        return (jnp.minimum(length, longest) / size) ** 2

    return jax.tree.map(of_entry, lengths, sizes)


def _along_probes(kernel: NoiseKernel, probes: tuple[Any, ...]) -> list[Any]:
    """Return Lambda^(-1/2) x of each probe x; an entry without noise has none."""
    return [kernel.basis.times(_inverse_root(kernel.noise), x) for x in probes]


def _iterate_probes(
    kernel: NoiseKernel, seen: Window, products: list[Any], n: jax.Array
) -> tuple[tuple[Any, ...], jax.Array]:
    r"""Return the probes and the extreme eigenvalues of the noise's correlation after one more batch.

    Oja's rule with :math:`\hat R = \Lambda^{-1/2} \hat C \Lambda^{-1/2}`: since :math:`\hat R` of a
    batch does not depend on x, the mean of :math:`\hat r` is no more than :math:`r_{\max}` (and no less
    than :math:`r_{\min}`),

    .. math::
      \hat r = x^\top \hat R x, \qquad
      x \leftarrow \frac{x \pm \gamma (\hat R x - \hat r x) / r_{\max}}{\| \cdot \|}

    Args:
      kernel: The kernel of the window.
      seen: The statistics of the window.
      products: :math:`\hat C \Lambda^{-1/2} x` of each probe.
      n: The number of estimates in this window with this one.
    """
    rate = jnp.minimum(_MEMORY / (n + _MEMORY), 0.5)
    probes, values = [], []
    for x, product, value, sign in zip(
        seen.probes, products, seen.correlation, (-1.0, 1.0), strict=False
    ):
        turned = kernel.basis.times(_inverse_root(kernel.noise), product)
        r = inner(x, turned) / jnp.maximum(inner(x, x), 1e-30)
        step = sign * rate / jnp.maximum(seen.correlation[1], 1.0)
        moved = jax.tree.map(
            lambda x, y, r=r, step=step: x + step.astype(x.dtype) * (y - r.astype(x.dtype) * x),
            x,
            turned,
        )
        moved = kernel.basis.times(jax.tree.map(jnp.sign, kernel.noise), moved)
        norm = jnp.sqrt(inner(moved, moved))
        is_sound = jnp.isfinite(norm) & (norm > 0)
        probes.append(
            jax.tree.map(
                lambda x, m, norm=norm, ok=is_sound: jnp.where(ok, m / norm.astype(m.dtype), x),
                x,
                moved,
            )
        )
        values.append(jnp.where(is_sound, value + rate * (r.astype(value.dtype) - value), value))
    return tuple(probes), jnp.stack(values) if values else seen.correlation


def _inverse_root(noise: Any) -> Any:
    return jax.tree.map(
        lambda c: jnp.where(c > 0, 1 / jnp.sqrt(jnp.where(c > 0, c, 1.0)), 0.0), noise
    )


def _times_rows(rows: Any, v: Any) -> Any:
    """Return the sum of d (d^T v) over d, the rows of a tree with a leading axis."""
    parts = jax.tree.map(
        lambda d, v: jnp.sum(d * v[None].astype(d.dtype), axis=tuple(range(1, d.ndim))), rows, v
    )
    along = sum(jax.tree.leaves(parts), start=jnp.zeros([], accumulation_dtype(parts)))
    along = computed_once(along)
    return jax.tree.map(lambda d: jnp.tensordot(along.astype(d.dtype), d, axes=1), rows)


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
    flags = computed_once([jnp.any(leaf > 0) for leaf in jax.tree.leaves(tree)])
    return functools.reduce(jnp.logical_or, flags, jnp.zeros([], jnp.bool_))
