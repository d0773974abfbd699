"""The report on probabilities, against its definitions, and its noise, against drawn labels."""

import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
import sklearn.metrics

import optperm
from optperm.bayes._calibration import _mean_deviation


def predictions(n=400, classes=4, seed=0, sharpness=1.0):
    """Probabilities, and labels that are drawn from them."""
    rng = np.random.default_rng(seed)
    logits = sharpness * rng.normal(size=(n, classes))
    p = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    return p, (np.log(p) + rng.gumbel(size=p.shape)).argmax(axis=1)


def calibration_error(p, labels, num_bins):
    """By a loop over the bins."""
    confidence, is_right = p.max(axis=1), p.argmax(axis=1) == labels
    error = 0.0
    for b in range(num_bins):
        inside = (confidence > b / num_bins) & (confidence <= (b + 1) / num_bins)
        if inside.any():
            error += inside.mean() * abs(is_right[inside].mean() - confidence[inside].mean())
    return error


@pytest.mark.parametrize("num_bins", [1, 15])
def test_scores_are_those_of_scikit_learn_and_of_the_definition(num_bins):
    p, labels = predictions()
    report = optperm.bayes.calibration_report(p, labels, num_bins=num_bins)
    assert report.log_loss == pytest.approx(sklearn.metrics.log_loss(labels, p), rel=1e-9)
    one_hot = np.eye(4)[labels]
    assert report.brier == pytest.approx(np.mean(np.sum((p - one_hot) ** 2, axis=1)), rel=1e-9)
    assert report.accuracy == np.mean(p.argmax(axis=1) == labels)
    assert report.calibration_error == pytest.approx(calibration_error(p, labels, num_bins))
    weights = report.counts / report.num_examples
    gaps = np.nan_to_num(np.abs(report.accuracies - report.confidences))
    assert weights @ gaps == pytest.approx(report.calibration_error)


@pytest.mark.parametrize("sharpness", [0.5, 6.0])
def test_noise_is_the_error_of_labels_that_are_drawn_from_the_probabilities(sharpness):
    """Its mean and its deviation over 2,000 sets of labels: within four standard errors of each."""
    p, _ = predictions(sharpness=sharpness)
    report = optperm.bayes.calibration_report(p, np.zeros(len(p), int))
    confidences = p.max(axis=1)
    draws = np.random.default_rng(3).random((2000, len(p))) < confidences
    in_bin = np.ceil(15 * confidences) == np.arange(1, 16)[:, None]
    found = np.abs((draws - confidences) @ in_bin.T).sum(axis=1) / len(p)
    assert report.noise == pytest.approx(np.mean(found), abs=4 * np.std(found) / 2000**0.5)
    assert report.noise_deviation == pytest.approx(np.std(found), rel=4 / 4000**0.5)


@pytest.mark.parametrize(("n", "p"), [(1, 0.3), (50, 0.999), (90, 0.5), (4000, 0.0031), (400, 0.4)])
def test_mean_deviation_of_a_count_is_that_of_the_binomial_law(n, p):
    """Exactly for few successes or failures, and within 0.4% where it is taken as normal."""
    k = np.arange(n + 1)
    wanted = scipy.stats.binom.pmf(k, n, p) @ np.abs(k - n * p)
    tolerance = 1e-9 if n * p * (1 - p) <= 25 else 4e-3
    assert _mean_deviation(np.full(n, p)) == pytest.approx(wanted, rel=tolerance)


def test_probabilities_of_16_bits_and_sure_ones_are_scored():
    """A confidence on an edge is in the bin below; a label of probability 0 has an infinite log loss."""
    p = jnp.bfloat16([[0.6, 0.4], [1.0, 0.0], [0.0, 1.0]])
    report = optperm.bayes.calibration_report(p, jnp.array([0, 0, 0]), num_bins=5)
    assert report.counts.tolist() == [0, 0, 1, 0, 2]
    assert report.log_loss == np.inf
    assert report.accuracies[-1] == 0.5
    assert report.deviations[-1] == 0
    sure = optperm.bayes.calibration_report(np.array([[1.0, 0.0]]), np.array([1]))
    assert "of a calibrated classifier  0.0000 +- 0.0000" in str(sure)
    assert "log loss                    inf" in str(report)
    assert str(report).count("\n") == 8
