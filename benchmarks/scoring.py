"""Scores of predicted probabilities, for the tables of networks."""

from typing import Any, NamedTuple

import numpy as np
from sklearn.metrics import roc_auc_score


class Scores(NamedTuple):
    """Scores of a classifier, means over the examples.

    Attributes:
      accuracy: The fraction of right predictions.
      nll: The negative log-likelihood, in nats.
      brier: The squared distance of the probabilities from the label's.
      calibration_error: The expected calibration error.
    """

    accuracy: float
    nll: float
    brier: float
    calibration_error: float


def classification(probabilities: Any, labels: Any) -> Scores:
    """Return the scores of probabilities (n, classes) for labels (n,)."""
    p, y = np.asarray(probabilities, np.float64), np.asarray(labels)
    with np.errstate(divide="ignore"):
        nll = -np.log(p[np.arange(len(y)), y]).mean()
    return Scores(
        accuracy=float(np.mean(p.argmax(axis=1) == y)),
        nll=float(nll),
        brier=float(np.mean(np.sum((p - np.eye(p.shape[1])[y]) ** 2, axis=1))),
        calibration_error=calibration_error(probabilities, labels),
    )


def calibration_error(probabilities: Any, labels: Any, num_bins: int = 15) -> float:
    """Return the expected calibration error of Guo et al., with bins of equal width.

    A confidence on an edge, in the dtype of the probabilities, is in the bin below.
    """
    p, y = np.asarray(probabilities), np.asarray(labels)
    confidences = p.max(axis=1)
    edges = (np.arange(1, num_bins) / num_bins).astype(p.dtype)
    bins = np.digitize(confidences, edges, right=True)
    gaps = np.bincount(bins, (p.argmax(axis=1) == y) - confidences.astype(np.float64))
    return float(np.abs(gaps).sum() / len(y))


def auroc(scores: Any, other_scores: Any) -> float:
    """Return the area under the ROC curve of a score that is larger for other inputs."""
    is_other = np.repeat([0, 1], [len(scores), len(other_scores)])
    return float(roc_auc_score(is_other, np.concatenate([scores, other_scores])))
