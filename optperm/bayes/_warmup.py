"""The warm-up of constant SGD, and the kernel that each of its windows passes to the next window."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optperm.bayes._correlation import Extremes, bounds, fraction_by_correlation, restart
from optperm.bayes._covariance import BatchGradients, Estimator
from optperm.bayes._forms import FORMS, Preconditioner, inner
from optperm.bayes._kernel import NoiseKernel
from optperm.bayes._schedule import Schedule
from optperm.bayes._window import Window, curvature_bound, drift, fraction_by_places, learn
from optperm.core.control import when
from optperm.core.dtypes import accumulation_dtype, all_finite, computed_once
from optperm.core.keys import key_data
from optperm.core.mapped_axes import mark_varying, varying_axes
from optperm.core.noise import normal_like
from optperm.core.shapes import Params

# Curvature is measured with steps that differ by at most this factor, because products with long steps
# hide the curvature of short steps. The factor allows params with units from e^-8 to e^8.
_LONGEST_STEP = 1e16


def begin(
    params: Params, preconditioner: Preconditioner, **numbers: Any
) -> tuple[NoiseKernel, Window]:
    """Return a kernel that takes no steps, and the start of the first window.

    The numbers are the fields `noise_ratio`, `num_data`, `batch_size` and `momentum` of the kernel.
    """
    form = FORMS[preconditioner].like(params)
    axes = varying_axes(params)

    # A state may be donated, so it must not contain the same array twice
    def number(value: Any, dtype: Any = jnp.float32) -> jax.Array:
        return mark_varying(jnp.asarray(value, dtype) + jnp.zeros([], dtype), axes)

    kernel = NoiseKernel(
        basis=form,
        noise=form.zeros(params),
        curvature=form.zeros(params),
        noise_ratio=number(numbers["noise_ratio"]),
        max_noise_ratio=number(numbers["noise_ratio"]),
        stability=number(0),
        max_stability=number(numbers["stability"]),
        excess=number(1),
        drift=number(1),
        correlation=number([1, 1]),
        estimates=jnp.zeros([], jnp.int32),
        is_ready=number(0) > 0,
        num_data=number(numbers["num_data"], jnp.int32),
        batch_size=number(numbers["batch_size"], jnp.int32),
        momentum=number(numbers["momentum"]),
    )
    extremes = Extremes(
        probes=form.probes(params),
        quotients=number([0, 0]),
        squares=number([0, 0]),
        losses=number([0, 0]),
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
        typical=number(0),
        longest=number(jnp.finfo(jnp.float32).max),
        extremes=restart(extremes, form, optax.tree.ones_like(kernel.noise)),
    )
    return kernel, window


def warm_up(
    kernel: NoiseKernel,
    seen: Window,
    uneven: jax.Array,
    batch: BatchGradients,
    estimator: Estimator,
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

    `scale` is s, `limit` is c, `rate` is a factor on c and rho, and `noise_ratio` is the maximum of rho.
    """
    is_open, ends_window = schedule.is_open(count), schedule.ends_window(count)

    def learn_and_hand_over(known: Any) -> Any:
        kernel, seen, uneven = known
        h = probing_steps(seen, kernel, kernel.step_sizes(scale, rate))

        def learn_more(known: Any) -> Any:
            seen, uneven = known
            number = schedule.number(count)
            seen, is_uneven = learn(seen, kernel, batch, estimator, h, scale, key, number)
            return seen, uneven + is_uneven.astype(jnp.int32)

        seen, uneven = when(is_open & (scale > 0), learn_more, (seen, uneven))
        kernel, seen = when(
            ends_window,
            lambda known: hand_over(*known, h, scale, limit, rate, noise_ratio),
            (kernel, seen),
        )
        return kernel, seen, uneven

    # One conditional contains all learning, so a later step costs only a gradient and its noise
    return when(is_open | ends_window, learn_and_hand_over, (kernel, seen, uneven))


def hand_over(
    kernel: NoiseKernel,
    seen: Window,
    h: Any,
    scale: jax.Array,
    limit: jax.Array,
    rate: jax.Array,
    noise_ratio: Any,
) -> tuple[NoiseKernel, Window]:
    """Return the kernel of the next window, and the start of that window.

    `h` are the steps with which curvature was probed; the other arguments are as for `warm_up`.
    """
    # a is first in the coordinates of the old steps, then in the coordinates of the new steps
    factor = (1 - kernel.momentum) / (1 + kernel.momentum)
    a = curvature_bound(seen, h, factor)
    basis, noise, curvature = kernel.basis.turn(seen.covariance, a)
    stability, excess = shortening(kernel, seen.stability * factor, limit * rate)
    most = jnp.asarray(noise_ratio, jnp.float32)
    correlation = bounds(seen.extremes, kernel.basis, kernel.noise, noise, seen.estimates)
    fraction = jnp.minimum(
        fraction_by_correlation(correlation), fraction_by_places(seen, kernel, h, scale)
    )
    fraction = jnp.minimum(most / (1 + most), fraction)
    # If the previous window had no noise, drift and variation are not defined
    is_first = jnp.logical_not(_any_positive(kernel.noise))
    new = kernel._replace(
        basis=basis,
        noise=noise,
        curvature=jax.tree.map(lambda a: a * excess.astype(a.dtype), curvature),
        noise_ratio=jnp.where(is_first, most, fraction / (1 - fraction)).astype(jnp.float32),
        stability=stability,
        excess=excess,
        drift=jnp.where(is_first, 1.0, drift(seen, kernel, h, scale)).astype(jnp.float32),
        correlation=correlation,
        estimates=seen.estimates,
        is_ready=_any_positive(curvature),
    )
    is_sound = (seen.estimates > 0) & all_finite((noise, basis, curvature))
    new = optax.tree.where(is_sound, new, kernel)
    typical, longest = probe_lengths(new, new.step_sizes(scale, rate))
    fresh = optax.tree.zeros_like(seen)._replace(
        direction=seen.direction,
        typical=typical,
        longest=longest,
        extremes=restart(seen.extremes, new.basis, new.noise),
    )
    return new, fresh


def shortening(
    kernel: NoiseKernel, effective: jax.Array, limit: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return the stability of the new kernel, and the factor on the a_i that reduces it to c.

    The factor is needed because the a_i ignore interactions between directions. `effective` is
    lambda_max(H A) (1 - mu) / (1 + mu) of the old kernel.
    """
    excess = jnp.where(effective > 0, kernel.excess * effective / limit, kernel.excess)
    excess = jnp.where(kernel.is_ready, excess, 1.0)
    excess = jnp.maximum(excess, 1.0).astype(jnp.float32)
    return jnp.where(kernel.is_ready, effective * kernel.excess / excess, 0.0), excess


def probe_lengths(kernel: NoiseKernel, h: Any) -> tuple[jax.Array, jax.Array]:
    """Return the length of a probe where h is zero, and the maximum length of any probe.

    An entry without noise may have curvature, for example from a prior on a parameter that no example
    uses. In a network that fits its data, some entries have hardly any noise and an h of 1e30. The first
    length is therefore a geometric mean. It is 1 if a window has no noise, as with equal examples.
    """
    # sqrt(h_i) |w_i| is in units of the params. With the basis C^(-1/2), every h_i without limits is s
    lengths = _lengths(kernel, h)
    logs = jax.tree.map(lambda x: jnp.log(jnp.where(x > 0, x, 1.0)), lengths)
    count = sum(jnp.sum(leaf > 0) for leaf in jax.tree.leaves(h))
    total = inner(logs, optax.tree.ones_like(h))
    without = jnp.where(kernel.estimates > 0, 1.0, 0.0).astype(total.dtype)
    mean = jnp.exp(total / jnp.maximum(count, 1).astype(total.dtype))
    positive = [jnp.min(x, initial=jnp.inf, where=x > 0) for x in jax.tree.leaves(lengths)]
    shortest = jnp.where(count > 0, functools.reduce(jnp.minimum, positive), 1.0)
    typical = jnp.where(count > 0, mean, without)
    longest = math.sqrt(_LONGEST_STEP) * shortest
    return typical.astype(jnp.float32), longest.astype(jnp.float32)


def probing_steps(seen: Window, kernel: NoiseKernel, h: Any) -> Any:
    """Return steps to measure curvature: none is very long, or zero after the first window."""

    def of_entry(length: jax.Array, size: jax.Array) -> jax.Array:
        length = jnp.where(length > 0, length, seen.typical.astype(length.dtype))
        return (jnp.minimum(length, seen.longest.astype(length.dtype)) / size) ** 2

    return jax.tree.map(of_entry, _lengths(kernel, h), kernel.basis.lengths(h))


def _lengths(kernel: NoiseKernel, h: Any) -> Any:
    return jax.tree.map(lambda h, size: jnp.sqrt(h) * size, h, kernel.basis.lengths(h))


def _any_positive(tree: Any) -> jax.Array:
    flags = computed_once([jnp.any(leaf > 0) for leaf in jax.tree.leaves(tree)])
    return functools.reduce(jnp.logical_or, flags, jnp.zeros([], jnp.bool_))
