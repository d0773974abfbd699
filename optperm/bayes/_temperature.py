"""Temperature scaling, which calibrates the logits of a trained classifier with one number.

C. Guo, G. Pleiss, Y. Sun and K. Q. Weinberger, "On Calibration of Modern Neural Networks",
arXiv 1706.04599, 2017.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optperm.core import checks
from optperm.core.dtypes import accumulation_dtype
from optperm.core.shardings import unshard

# The minimum of log(beta), and the number of halvings, which reach the precision of float32.
_LEAST_LOG, _HALVINGS = -12.0, 40
# A logit so far below the maximum has the probability 0 at each temperature in the range.
_MASKED = 1e15


def fit_temperature(
    logits: jax.Array | np.ndarray,
    labels: jax.Array | np.ndarray,
    *,
    weights: jax.Array | np.ndarray | None = None,
    ignore_label: int | None = None,
) -> jax.Array:
    r"""Fit the temperature at which a classifier gives the labels the highest likelihood.

    .. math::
      T = \arg\min_T -\sum_{i=1}^n w_i \log \mathrm{softmax}(z_i / T)_{y_i}, \qquad
      \sum_i w_i = 1

    The loss is convex in :math:`\beta = 1 / T`, and bisection finds the zero of the loss's derivative

    .. math::
      \sum_i w_i \left( \sum_k \mathrm{softmax}(\beta z_i)_k z_{i k} - z_{i y_i} \right)

    The predicted classes, and therefore the accuracy, do not change.

    Args:
      logits: z, (n, classes), in any real floating dtype, for examples that the classifier was not
        trained on. The logits of masked classes may be large negative numbers or -inf.
      labels: y, (n,), integers in [0, classes).
      weights: w, (n,), real numbers of at least 0, which are divided by their sum: counts of equal
        examples, or importance weights. An example of weight 0 is left out, for any logits.
        None for equal weights.
      ignore_label: The label of examples to leave out, such as the padding of token sequences (often
        -100 or -1); None to leave out no examples.

    Returns:
      The temperature, a positive scalar of float32 or wider, above 1 for an overconfident classifier.
      `jax.nn.softmax(logits / temperature)` gives the calibrated probabilities.

    Example:
      >>> import jax, jax.numpy as jnp, optperm
      >>> logits = jnp.array([[4.0, 0.0]] * 4)  # sure of the first class, which is right in 3 of 4
      >>> T = optperm.bayes.fit_temperature(logits, jnp.array([0, 0, 0, 1]))
      >>> [round(float(p), 3) for p in jax.nn.softmax(logits[0] / T)]
      [0.75, 0.25]
      >>> tokens = jnp.array([0, 0, 0, 1, -100])  # the last position is padding
      >>> padded = jnp.concatenate([logits, jnp.zeros((1, 2))])
      >>> bool(jnp.isclose(optperm.bayes.fit_temperature(padded, tokens, ignore_label=-100), T))
      True

    Notes:
      Fit the temperature on a validation split of at least a few hundred examples from the distribution
      of the examples to predict, and test on another split. Try temperature scaling before other
      calibration methods, because it adds one number and needs no training.

      For a binary classifier with a single logit z, pass the logits (0, z).

    Raises:
      TypeError: If the logits are not floating, the labels are not integers, or the weights are not
        real numbers.
      ValueError: If shapes do not match or there are no examples; or, unless arguments are traced, if
        weights are negative, infinite, NaN or all 0, all examples are left out, logits are NaN,
        infinite or probabilities, a label is out of range or masked by -inf, or no
        temperature is best: each label has the largest logit (the loss decreases as T tends to 0), or
        labels have on average no larger logits than other classes (the loss decreases as T tends to
        infinity). With traced arguments, T is NaN instead, but probabilities are not detected.

    References:
      Guo et al., `On Calibration of Modern Neural Networks <https://arxiv.org/abs/1706.04599>`_, 2017
    """
    if ignore_label is not None:
        checks.check_count("ignore_label", ignore_label, minimum=-(2**31))
    _check(logits, labels, weights, ignore_label)
    given = None if weights is None else _scaled(weights)
    left_out = None if ignore_label is None else jnp.asarray(ignore_label, jnp.int32)
    temperature, is_smallest, is_largest = _solve(
        jnp.asarray(logits), jnp.asarray(labels), given, left_out
    )
    if not isinstance(is_smallest | is_largest, jax.core.Tracer) and (is_smallest or is_largest):
        why = (
            "each label has the largest logit, so the loss decreases as the temperature tends to 0"
            if is_smallest
            else "on average, the labels have no larger logits than other classes, so the loss "
            "decreases as the temperature tends to infinity"
        )
        raise ValueError(f"No temperature is best: {why}. Pass more held-out examples.")
    return temperature


def _scaled(weights: Any) -> jax.Array:
    """Return weights with the maximum 1 if they are concrete, so that float32 holds any unit."""
    if isinstance(weights, jax.core.Tracer):
        return jnp.asarray(weights)
    w = np.asarray(weights, np.float64)
    largest = np.max(w, initial=0.0)
    return jnp.asarray(w / largest if 0 < largest < np.inf else w)


@jax.jit
def _solve(
    logits: jax.Array, labels: jax.Array, weights: Any, ignore_label: Any
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the temperature, and whether the smallest and whether the largest temperature is best."""
    logits, labels, weights = unshard((logits, labels, weights))
    dtype = accumulation_dtype(logits)
    # A signed dtype contains each ignore_label
    y = labels.astype(int)[:, None]
    w = jnp.ones(len(y), dtype) if weights is None else weights.astype(dtype)
    if ignore_label is not None:
        w = jnp.where(y[:, 0] == ignore_label, 0.0, w)
    is_used, is_weight = w != 0, jnp.all(jnp.isfinite(w) & (w >= 0)) & jnp.any(w > 0)
    # The sum of weights that are at most 1 does not overflow
    w = w / jnp.max(w)
    w = w / jnp.sum(w)
    y = jnp.where(is_used[:, None], y, 0)
    logits = jnp.where(is_used[:, None], logits, 0.0)
    z = logits.astype(dtype)
    # Subtracting a constant from each row changes no probability, and keeps the derivative accurate.
    z -= jnp.max(z, axis=1, keepdims=True)
    # In units of the median gap between the largest and the next logit, beta has the same minimum for
    # any scale of the logits, and masked classes do not change the unit. An example that is left out
    # has no gap.
    gaps = jnp.min(jnp.where(z < 0, -z, jnp.inf), axis=1)
    unit = jnp.nanmedian(jnp.where(jnp.isfinite(gaps), gaps, jnp.nan))
    unit = jax.lax.stop_gradient(jnp.where(unit > 0, unit, 1.0).astype(z.dtype))
    z = jnp.maximum(z / unit, -_MASKED)

    def slope(log_beta: jax.Array, z: jax.Array, w: jax.Array) -> jax.Array:
        p = jax.nn.softmax(jnp.exp(log_beta) * z, axis=1)
        return jnp.sum(w * (jnp.sum(p * z, axis=1) - jnp.take_along_axis(z, y, axis=1)[:, 0]))

    fixed = jax.lax.stop_gradient((z, w))
    least = jnp.asarray(_LEAST_LOG, z.dtype)
    # With gaps d of K classes, sum_k p_k d_k <= sum_k d_k exp(-beta d_k) <= K / (e beta), so the slope
    # is positive for beta above K / e divided by the mean gap of the labels.
    gap = -jnp.sum(fixed[1] * jnp.take_along_axis(fixed[0], y, axis=1)[:, 0])
    most = jnp.log(2 * z.shape[1] / math.e / jnp.maximum(gap, jnp.finfo(z.dtype).tiny))

    def halve(_: int, ends: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = ends
        middle = (low + high) / 2
        is_below = slope(middle, *fixed) < 0  # the loss still decreases, so the best beta is larger
        return jnp.where(is_below, middle, low), jnp.where(is_below, high, middle)

    low, high = jax.lax.fori_loop(0, _HALVINGS, halve, (least, most.astype(z.dtype)))
    found = (low + high) / 2
    # By the implicit function theorem, -slope / slope' has the derivative of the root; its value is 0
    newton = -slope(found, z, w) / jax.lax.stop_gradient(jax.grad(slope)(found, *fixed))
    found += newton - jax.lax.stop_gradient(newton)
    is_smallest, is_largest = gap == 0, slope(least, *fixed) >= 0
    is_label = (y >= 0) & (y < z.shape[1])
    is_masked = jnp.any(jnp.take_along_axis(logits, y, axis=1) == -jnp.inf)
    is_sound = jnp.all(jnp.isfinite(fixed[0])) & is_weight & ~is_masked
    is_valid = jnp.all(is_label) & is_sound & ~is_smallest & ~is_largest
    return jnp.where(is_valid, unit * jnp.exp(-found), jnp.nan), is_smallest, is_largest


def _check(logits: Any, labels: Any, weights: Any, ignore_label: int | None) -> None:
    dtype, label_dtype = checks.dtype_of("logits", logits), checks.dtype_of("labels", labels)
    shape = jnp.shape(logits)
    if not (jnp.issubdtype(dtype, jnp.floating) and jnp.issubdtype(label_dtype, jnp.integer)):
        raise TypeError(
            f"logits must be floating and labels integers, got {dtype} and {label_dtype}."
        )
    if len(shape) != 2 or 0 in shape or shape[1] == 1 or jnp.shape(labels) != shape[:1]:
        wanted = (
            "logits must have the shape (n, classes), with two classes or more, and labels (n,)"
        )
        advice = (
            "Flatten several axes of examples into one. For one logit z per example, pass (0, z)"
        )
        raise ValueError(f"{wanted}, got {shape} and {jnp.shape(labels)}. {advice}.")
    if weights is not None:
        if not checks.is_real(checks.dtype_of("weights", weights)):
            raise TypeError(f"weights must be real numbers, got {jnp.result_type(weights)}.")
        if jnp.shape(weights) != shape[:1]:
            raise ValueError(f"weights must have the shape {shape[:1]}, got {jnp.shape(weights)}.")
    if any(isinstance(each, jax.core.Tracer) for each in (logits, labels, weights)):
        return
    rows, y = np.asarray(logits, np.float64), np.asarray(labels)
    w = np.ones(len(y)) if weights is None else np.asarray(weights, np.float64)
    if not (np.all(w >= 0) and np.all(w < np.inf)):
        raise ValueError("weights must be finite and at least 0, got negative numbers or NaN.")
    used = np.flatnonzero((w > 0) & (y != ignore_label))
    if not used.size:
        raise ValueError("No example is left: all weights are 0, or all labels are ignore_label.")
    rows, y = rows[used], y[used]
    if not np.all(rows < np.inf):
        raise ValueError("logits must be finite, or -inf for masked classes, got NaN or infinity.")
    if np.all(rows >= 0) and np.all(np.abs(rows.sum(axis=1) - 1) < 1e-2):
        raise ValueError(
            "logits look like probabilities, whose rows sum to 1: pass their logarithms."
        )
    low, high = int(np.min(y)), int(np.max(y))
    if low < 0 or high >= shape[1]:
        raise ValueError(
            f"labels must be in [0, {shape[1] - 1}], got {low if low < 0 else high}. To leave out "
            "examples with a label, pass ignore_label=."
        )
    masked = np.flatnonzero(rows[np.arange(len(rows)), y] == -np.inf)
    if masked.size:
        raise ValueError(
            f"The logit of the label of example {used[masked[0]]} is -inf, as if it was masked."
        )
