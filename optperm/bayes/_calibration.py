"""Scores of predicted probabilities: calibration, likelihood, and the detection of other inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optperm.core import checks
from optperm.core.dtypes import accumulation_dtype
from optperm.core.shardings import unshard

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int32

# A softmax in bfloat16 sums to one to within as much, and its mean over draws is in float32.
_ROUNDING = 4 * float(jnp.finfo(jnp.bfloat16).eps)


class Scores(NamedTuple):
    """Scores of `classification_scores`, means over the examples.

    Attributes:
      accuracy: The share of right predictions.
      nll: The negative log-likelihood, in nats.
      brier: The squared distance of the probabilities from the label's.
      calibration_error: The expected calibration error.
    """

    accuracy: Float[Array, ""]
    nll: Float[Array, ""]
    brier: Float[Array, ""]
    calibration_error: Float[Array, ""]


class Calibration(NamedTuple):
    """Bins of `calibration`. The `confidence` and the `accuracy` of an empty bin are 0.

    Attributes:
      expected_calibration_error: The mean distance of accuracy from confidence over the examples' bins.
      counts: Examples in each bin.
      confidence: The mean confidence in each bin.
      accuracy: The share of right predictions in each bin.
    """

    expected_calibration_error: Float[Array, ""]
    counts: Int32[Array, "num_bins"]
    confidence: Float[Array, "num_bins"]
    accuracy: Float[Array, "num_bins"]


def calibration(
    probabilities: jax.Array | np.ndarray, labels: jax.Array | np.ndarray, *, num_bins: int = 15
) -> Calibration:
    r"""Return the expected calibration error of a classifier and the bins of its reliability diagram.

    The confidence of a prediction is its largest probability. Bin b of B holds the examples with a
    confidence in ((b - 1) / B, b / B], and

    .. math::
      \mathrm{ECE} = \sum_{b = 1}^{B} \frac{n_b}{n} \left| \mathrm{acc}_b - \mathrm{conf}_b \right|

    Args:
      probabilities: (n, classes), rows that sum to one within the rounding of bfloat16, of any real
        floating dtype.
      labels: (n,), integers in [0, classes).
      num_bins: B, the number of bins.

    Returns:
      A `Calibration`. If a traced label is out of range, the error and the accuracies are NaN.

    Example:
      >>> import jax.numpy as jnp, optperm
      >>> probabilities = jnp.array([[0.75, 0.25]] * 4)
      >>> found = optperm.bayes.calibration(probabilities, jnp.array([0, 0, 0, 1]), num_bins=2)
      >>> float(found.expected_calibration_error), found.counts.tolist(), found.accuracy.tolist()
      (0.0, [0, 4], [0.0, 0.75])

    Notes:
      If two classes are equally probable, the first is the prediction. The edges b / B are rounded to
      the dtype of the probabilities. In float32, sums over some million examples in a bin are inexact:
      with more than 2^24 right predictions in a bin its accuracy is too small. Then enable float64.

    Raises:
      TypeError: If the probabilities are not floating, or the labels or `num_bins` not integers.
      ValueError: If shapes do not match, there are no examples, or `num_bins` is below 1. Unless they
        are traced, also if probabilities are not finite, negative or do not sum to one, or a label is
        out of range.

    References:
      Guo et al., `On Calibration of Modern Neural Networks <https://arxiv.org/abs/1706.04599>`_, 2017
    """
    checks.check_static_count("num_bins", num_bins)
    _check_probabilities(probabilities, labels)
    probabilities = jnp.asarray(probabilities)
    # Examples on several devices are binned together
    confidences = unshard(jnp.max(probabilities, axis=1))
    confidences = confidences.astype(accumulation_dtype(probabilities))
    # Edges in the dtype of the probabilities: a confidence of b / B is in bin b in any dtype
    edges = jnp.asarray(np.arange(1, num_bins) / num_bins, probabilities.dtype)
    edges = edges.astype(confidences.dtype)
    bins = jnp.searchsorted(edges, confidences, side="left")
    predictions = unshard(jnp.argmax(probabilities, axis=1)).astype(jnp.int32)
    labels = unshard(_as_class_numbers(labels))
    is_right = (predictions == labels).astype(confidences.dtype)

    def sum_by_bin(values: jax.Array) -> jax.Array:
        return jax.ops.segment_sum(values, bins, num_segments=num_bins)

    is_label = jnp.all((labels >= 0) & (labels < probabilities.shape[1]))

    def nan_if_bad(found: jax.Array) -> jax.Array:
        # Python cannot refuse a traced label that is no class
        return jnp.where(is_label, found, jnp.nan)

    counts = sum_by_bin(jnp.ones(confidences.shape, jnp.int32))
    safe_counts = jnp.maximum(counts, 1).astype(confidences.dtype)
    gaps = jnp.abs(sum_by_bin(is_right - confidences))
    return Calibration(
        expected_calibration_error=nan_if_bad(jnp.sum(gaps) / confidences.size),
        counts=counts,
        confidence=sum_by_bin(confidences) / safe_counts,
        accuracy=nan_if_bad(sum_by_bin(is_right) / safe_counts),
    )


def classification_scores(
    probabilities: jax.Array | np.ndarray, labels: jax.Array | np.ndarray
) -> Scores:
    r"""Return accuracy, negative log-likelihood, Brier score and calibration error of a classifier.

    .. math::
      \mathrm{NLL} = -\frac1n \sum_i \log p_{i, y_i}, \qquad
      \mathrm{Brier} = \frac1n \sum_i \sum_k (p_{i k} - 1[k = y_i])^2

    Args:
      probabilities: (n, classes), as of `optperm.bayes.calibration`.
      labels: (n,), integers in [0, classes).

    Returns:
      `Scores`.

    Example:
      >>> import jax.numpy as jnp, optperm
      >>> probabilities = jnp.array([[0.5, 0.5], [0.0, 1.0]])
      >>> found = optperm.bayes.classification_scores(probabilities, jnp.array([0, 1]))
      >>> [round(float(score), 3) for score in found]
      [1.0, 0.347, 0.25, 0.25]

    Notes:
      The NLL is infinite if a label has probability zero. The Brier score of an example is at most 2.
      For some million examples in float32, the accuracy and the calibration error are inexact: see
      `optperm.bayes.calibration`.
      `optperm.bayes.calibration` returns the bins of the calibration error.

    Raises:
      TypeError: As `optperm.bayes.calibration`.
      ValueError: As `optperm.bayes.calibration`.

    References:
      Brier, `Verification of Forecasts Expressed in Terms of Probability
      <https://doi.org/10.1175/1520-0493(1950)078%3C0001:VOFEIT%3E2.0.CO;2>`_, 1950
    """
    found = calibration(probabilities, labels)
    p = jnp.asarray(probabilities)
    p = p.astype(accumulation_dtype(p))
    right = jax.nn.one_hot(_as_class_numbers(labels), p.shape[1], dtype=p.dtype)
    # A traced label that is no class makes NaN here too
    nan = found.expected_calibration_error * 0
    return Scores(
        accuracy=jnp.sum(found.accuracy * found.counts.astype(p.dtype)) / len(p),
        nll=nan - jnp.mean(jax.scipy.special.xlogy(right, p).sum(axis=1)),
        brier=nan + jnp.mean(jnp.sum((p - right) ** 2, axis=1)),
        calibration_error=found.expected_calibration_error,
    )


def auroc(scores: jax.Array | np.ndarray, other_scores: jax.Array | np.ndarray) -> float:
    r"""Return the area under the ROC curve of a score that detects inputs from elsewhere.

    .. math::
      P(s < s') + \tfrac12 P(s = s')

    with the score :math:`s` of an input like the training data and the score :math:`s'` of an input from
    elsewhere.

    Args:
      scores: (n,), of inputs like the training data: for instance the entropy or the mutual information
        of `optperm.bayes.posterior_predictive`.
      other_scores: (m,), of inputs from elsewhere.

    Returns:
      The area, which is 1 if all scores from elsewhere are larger, and 0.5 for uninformative scores.

    Example:
      >>> import optperm, numpy as np
      >>> optperm.bayes.auroc(np.array([0.1, 0.2]), np.array([0.2, 0.3]))
      0.875

    Raises:
      ValueError: If scores are empty, not of rank 1, or NaN.
    """
    one, two = np.asarray(scores, np.float64), np.asarray(other_scores, np.float64)
    for name, values in {"scores": one, "other_scores": two}.items():
        if values.ndim != 1 or not values.size or np.isnan(values).any():
            got = "NaN" if np.isnan(values).any() else f"shape {values.shape}"
            raise ValueError(f"{name} must be numbers of shape (n,), got {got}.")
    # The share of scores below each other one, of equal scores half
    one = np.sort(one)
    below = np.searchsorted(one, two, side="left") + np.searchsorted(one, two, side="right")
    return float(below.mean() / (2 * one.size))


def interval_coverage(
    draws: jax.Array | np.ndarray,
    targets: jax.Array | np.ndarray,
    levels: Sequence[float] = (0.5, 0.8, 0.9, 0.95),
) -> np.ndarray:
    r"""Return the share of targets in the central intervals of a regression's predictions.

    .. math::
      \frac1n \sum_{i = 1}^{n} 1\left[q_{i, (1 - p) / 2} \le y_i \le q_{i, (1 + p) / 2}\right]

    with q the quantiles of an example's predictions. It is about p for calibrated draws of the target:
    the predictions of the model plus the noise of an observation.

    Args:
      draws: (chain, draw, n), draws of the target itself: for instance the `draws` of
        `optperm.bayes.posterior_predictive` plus the noise of an observation.
      targets: y, (n,).
      levels: p, numbers in (0, 1).

    Returns:
      The share for each level, an array (levels,), about p if the predictions are calibrated.

    Example:
      >>> import numpy as np, optperm
      >>> draws = np.linspace(0.0, 1.0, 101).reshape(1, 101, 1) * np.ones(4)
      >>> optperm.bayes.interval_coverage(draws, np.array([0.5, 0.3, 0.8, 0.99]), [0.5, 0.9]).tolist()
      [0.5, 0.75]

    Raises:
      ValueError: If shapes do not match, a number is not finite, or a level is out of range.
    """
    values, y = np.asarray(draws, np.float64), np.asarray(targets, np.float64)
    p = np.asarray(levels, np.float64)
    is_shaped = values.ndim == 3 and values.shape[2:] == y.shape and 0 not in values.shape
    if not (is_shaped and np.all(np.isfinite(values)) and np.all(np.isfinite(y))):
        shapes = f"{values.shape} and {y.shape}"
        raise ValueError(f"draws (chain, draw, n) and targets (n,) must be finite, got {shapes}.")
    if p.ndim != 1 or not np.all((p > 0) & (p < 1)):
        raise ValueError(f"levels must be numbers in (0, 1), got {levels}.")
    flat = values.reshape(-1, y.size)
    low, high = (np.quantile(flat, q, axis=0) for q in ((1 - p) / 2, (1 + p) / 2))
    inside: np.ndarray = ((low <= y) & (y <= high)).mean(axis=1)
    return inside


def check_rows(name: str, probabilities: jax.Array | np.ndarray) -> None:
    """Raise a ValueError unless class probabilities, on the last axis, sum to one.

    Args:
      name: What they are, for the message.
      probabilities: Concrete numbers.
    """
    values = np.asarray(probabilities, np.float64)
    values = values.reshape(-1, values.shape[-1])
    is_bad = ~((np.abs(values.sum(axis=1) - 1) <= _ROUNDING) & (values >= 0).all(axis=1))
    if is_bad.any():
        row = int(np.argmax(is_bad))
        raise ValueError(
            f"{name} must be at least 0 and each row must sum to one, but row "
            f"{row} is {values[row][:8]}. Logits need jax.nn.softmax."
        )


def _as_class_numbers(labels: jax.Array | np.ndarray) -> jax.Array:
    # The number of classes may not fit in 8 bits, and a label in 64 bits not in 32
    labels = jnp.asarray(labels)
    return labels.astype(jnp.int32) if labels.dtype.itemsize < 4 else labels


def _check_probabilities(probabilities: Any, labels: Any) -> None:
    dtype = checks.dtype_of("probabilities", probabilities)
    labels_dtype = checks.dtype_of("labels", labels)
    shape = jnp.shape(probabilities)
    if not (jnp.issubdtype(dtype, jnp.floating) and jnp.issubdtype(labels_dtype, jnp.integer)):
        raise TypeError(
            f"probabilities must be floating and labels integers, got {dtype} and {labels_dtype}."
        )
    if len(shape) != 2 or 0 in shape or jnp.shape(labels) != shape[:1]:
        raise ValueError(
            f"probabilities must be (n, classes) and labels (n,), got {shape} and {jnp.shape(labels)}."
        )
    if not isinstance(probabilities, jax.core.Tracer):
        check_rows("probabilities", probabilities)
    if not isinstance(labels, jax.core.Tracer):
        lowest, highest = int(np.min(labels)), int(np.max(labels))
        if lowest < 0 or highest >= shape[1]:
            bad = lowest if lowest < 0 else highest
            raise ValueError(f"labels must lie in [0, {shape[1] - 1}], got {bad}.")
