"""Scores of predicted class probabilities, and the calibration error that chance alone explains.

C. Guo, G. Pleiss, Y. Sun and K. Q. Weinberger, "On Calibration of Modern Neural Networks",
arXiv 1706.04599, 2017.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optperm.bayes._predictive import check_rows
from optperm.core import checks
from optperm.core.tables import align

# Above this variance of a count, its mean deviation is the deviation of a normal number, within 0.4%.
_LARGEST_VARIANCE = 25.0
# A count with at most this variance is within this distance of its mean, except with a chance of 1e-15.
_REACH = 64


class CalibrationReport(NamedTuple):
    """Scores of a classifier from `calibration_report`.

    Attributes:
      num_examples: n, the number of examples.
      accuracy: The fraction of examples whose most probable class is the label.
      log_loss: The mean negative log-likelihood of the labels, in nats.
      brier: The mean squared distance between the probabilities and the one-hot labels, in [0, 2].
      calibration_error: The expected calibration error (ECE).
      noise: The mean of this error for a perfectly calibrated classifier with the same confidences.
      noise_deviation: The standard deviation of this error for the same classifier.
      edges: The edges of the bins, (bin + 1,).
      counts: The number of examples in each bin, (bin,).
      confidences: The mean confidence in each bin, (bin,); NaN in an empty bin.
      accuracies: The accuracy in each bin, (bin,); NaN in an empty bin.
      deviations: The standard deviation of the accuracy in each bin of a calibrated classifier, (bin,).
    """

    num_examples: int
    accuracy: float
    log_loss: float
    brier: float
    calibration_error: float
    noise: float
    noise_deviation: float
    edges: np.ndarray
    counts: np.ndarray
    confidences: np.ndarray
    accuracies: np.ndarray
    deviations: np.ndarray

    def __str__(self) -> str:
        """Return the scores, and a table of the bins that contain examples."""
        figures = {
            "examples": str(self.num_examples),
            "accuracy": f"{self.accuracy:.4f}",
            "log loss": f"{self.log_loss:.4f}",
            "Brier score": f"{self.brier:.4f}",
            "calibration error": f"{self.calibration_error:.4f}",
            "of a calibrated classifier": f"{self.noise:.4f} +- {self.noise_deviation:.4f}",
        }
        rows = [("confidence", "examples", "mean confidence", "accuracy", "+- by chance")]
        rows += [
            (f"{low:.3f} to {high:.3f}", str(n), f"{p:.4f}", f"{a:.4f}", f"{d:.4f}")
            for low, high, n, p, a, d in zip(
                self.edges[:-1], self.edges[1:], self.counts, self.confidences, self.accuracies,
                self.deviations, strict=True,
            )
            if n
        ]  # fmt: skip
        return f"{align(figures.items())}\n{align(rows)}"


def calibration_report(
    probabilities: jax.Array | np.ndarray,
    labels: jax.Array | np.ndarray,
    *,
    num_bins: int = 15,
) -> CalibrationReport:
    r"""Score predicted class probabilities with the labels.

    The confidence of a prediction is its maximum probability :math:`p_i`, and :math:`c_i` is 1 if the
    class with this probability is the label, else 0. The expected calibration error is, with bins B of
    equal width,

    .. math::
      \mathrm{ECE} = \frac1n \sum_B \left| \sum_{i \in B} (c_i - p_i) \right|

    This error is above 0 for every classifier, because a bin has few labels. For a perfectly calibrated
    classifier, the :math:`c_i` are independent, and 1 with probability :math:`p_i`. The report contains
    the mean and the standard deviation of the error for this classifier:

    .. math::
      \frac1n \sum_B D_B, \qquad \frac1n \sqrt{\sum_B (V_B - D_B^2)}, \qquad
      V_B = \sum_{i \in B} p_i (1 - p_i), \qquad
      D_B = \mathrm{E} \left| \sum_{i \in B} (c_i - p_i) \right|

    An error within two standard deviations of the mean shows no miscalibration.

    Args:
      probabilities: p, (n, classes), in any real floating dtype, such as the mean of
        `optperm.bayes.posterior_predictive`. Each row sums to 1.
      labels: (n,), integers in [0, classes).
      num_bins: The number of bins. A confidence on an edge is in the bin below the edge.

    Returns:
      A `CalibrationReport`, which `print` shows as a table.

    Example:
      >>> import jax.numpy as jnp, optperm
      >>> p = jnp.array([[0.75, 0.25]] * 8)  # sure by 3/4, and right in 3 of 4
      >>> labels = jnp.array([0, 0, 0, 1] * 2)
      >>> report = optperm.bayes.calibration_report(p, labels)
      >>> report.calibration_error, round(report.noise, 4), round(report.log_loss, 4)
      (0.0, 0.1168, 0.5623)
      >>> print(report)  # doctest: +NORMALIZE_WHITESPACE
      examples                    8
      accuracy                    0.7500
      log loss                    0.5623
      Brier score                 0.3750
      calibration error           0.0000
      of a calibrated classifier  0.1168 +- 0.0990
      confidence      examples  mean confidence  accuracy  +- by chance
      0.733 to 0.800  8         0.7500           0.7500    0.1531

    Notes:
      Compare two classifiers by their log loss or Brier score. The calibration error alone does not
      show whether the classes are predicted well.

      If the noise is larger than the error to be measured, use more labels, or fewer bins.

    Raises:
      TypeError: If the probabilities are not floating, or the labels are not integers.
      ValueError: If shapes do not match, there are no examples, a row does not sum to 1, a label is out
        of range, or `num_bins` is below 1.

    References:
      Guo et al., `On Calibration of Modern Neural Networks <https://arxiv.org/abs/1706.04599>`_, 2017
    """
    checks.check_static_count("num_bins", num_bins)
    _check(probabilities, labels)
    given, y = np.asarray(probabilities), np.asarray(labels)
    p, n = given.astype(np.float64), len(y)
    confidences, is_right = p.max(axis=1), p.argmax(axis=1) == y
    # In the dtype of the probabilities, an edge is equal to a confidence that is printed as the edge
    edges = (np.arange(num_bins + 1) / num_bins).astype(given.dtype)
    bins = np.digitize(given.max(axis=1), edges[1:-1], right=True)
    counts = np.bincount(bins, minlength=num_bins)
    total = np.bincount(bins, confidences, minlength=num_bins)
    right = np.bincount(bins, is_right, minlength=num_bins)
    # V_B, and D_B
    variances = np.bincount(bins, confidences * (1 - confidences), minlength=num_bins)
    means = np.array([_mean_deviation(confidences[bins == b]) for b in range(num_bins)])
    with np.errstate(divide="ignore", invalid="ignore"):
        log_loss = -np.mean(np.log(p[np.arange(n), y]))
        deviations = np.sqrt(np.maximum(variances, 0)) / counts
        of_bins = total / counts, right / counts
    one_hot = np.arange(p.shape[1]) == y[:, None]
    return CalibrationReport(
        num_examples=n,
        accuracy=float(is_right.mean()),
        log_loss=float(log_loss),
        brier=float(np.mean(np.sum((p - one_hot) ** 2, axis=1))),
        calibration_error=float(np.sum(np.abs(right - total)) / n),
        noise=float(np.sum(means) / n),
        noise_deviation=float(np.sqrt(np.sum(np.maximum(variances - means**2, 0))) / n),
        edges=edges.astype(np.float64),
        counts=counts,
        confidences=of_bins[0],
        accuracies=of_bins[1],
        deviations=deviations,
    )


def _mean_deviation(p: np.ndarray) -> float:
    """Return E|X - sum p| for the number X of successes in independent trials with probabilities p."""
    p = np.minimum(p, 1.0)  # a sum of rounded probabilities may be above 1
    mean, variance = p.sum(), np.sum(p * (1 - p))
    if variance > _LARGEST_VARIANCE:
        return float(np.sqrt(2 * variance / np.pi))
    # P(X = k) is the inverse Fourier transform of E exp(i w X) = prod(1 - p + p exp(i w)), here for the
    # values k near the mean
    first = np.floor(mean) - _REACH
    turns = np.exp(2j * np.pi * np.arange(2 * _REACH) / (2 * _REACH))
    transform = np.array([np.prod(1 - p + p * turn) for turn in turns]) * turns**-first
    chances = np.fft.fft(transform).real / len(turns)
    # Rounding may make a deviation of 0 negative
    return max(0.0, float(chances @ np.abs(first + np.arange(len(turns)) - mean)))


def _check(probabilities: Any, labels: Any) -> None:
    dtype = checks.dtype_of("probabilities", probabilities)
    label_dtype = checks.dtype_of("labels", labels)
    if not (jnp.issubdtype(dtype, jnp.floating) and jnp.issubdtype(label_dtype, jnp.integer)):
        raise TypeError(
            f"probabilities must be floating and labels integers, got {dtype} and {label_dtype}."
        )
    shape = jnp.shape(probabilities)
    if len(shape) != 2 or 0 in shape or shape[1] == 1 or jnp.shape(labels) != shape[:1]:
        raise ValueError(
            "probabilities must have the shape (n, classes), with two classes or more, and labels "
            f"(n,), got {shape} and {jnp.shape(labels)}. For one probability p per example, pass "
            "(1 - p, p)."
        )
    check_rows("probabilities", probabilities)
    low, high = int(np.min(labels)), int(np.max(labels))
    if low < 0 or high >= shape[1]:
        raise ValueError(f"labels must be in [0, {shape[1] - 1}], got {low if low < 0 else high}.")
