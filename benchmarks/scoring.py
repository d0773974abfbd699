"""Scores of predicted probabilities, for the tables of networks."""

from typing import Any, NamedTuple

import numpy as np
from sklearn.metrics import roc_auc_score

import optperm


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
    report = optperm.bayes.calibration_report(probabilities, labels)
    return Scores(report.accuracy, report.log_loss, report.brier, report.calibration_error)


def auroc(scores: Any, other_scores: Any) -> float:
    """Return the area under the ROC curve of a score that is larger for other inputs."""
    is_other = np.repeat([0, 1], [len(scores), len(other_scores)])
    return float(roc_auc_score(is_other, np.concatenate([scores, other_scores])))
