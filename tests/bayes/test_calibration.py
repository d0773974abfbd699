"""The expected calibration error against a loop over the bins, and by hand."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import support

import optperm


def by_hand(probabilities, labels, num_bins):
    """Bin by bin, as the definition says, with edges in the dtype of the probabilities."""
    confidences, predictions = probabilities.max(axis=1), probabilities.argmax(axis=1)
    edges = np.array([b / num_bins for b in range(num_bins + 1)], probabilities.dtype)
    error, bins = 0.0, []
    for low, high in itertools.pairwise(edges):
        inside = [i for i, c in enumerate(confidences) if low < c <= high]
        if not inside:
            bins.append((0, 0.0, 0.0))
            continue
        confidence = np.mean(confidences[inside], dtype=np.float64)
        accuracy = np.mean([float(predictions[i] == labels[i]) for i in inside])
        error += len(inside) / len(labels) * abs(accuracy - confidence)
        bins.append((len(inside), confidence, accuracy))
    return error, *zip(*bins, strict=True)


@pytest.mark.parametrize("num_bins", [1, 5, 15])
def test_as_by_hand(num_bins):
    """On random predictions, and on confidences that lie on edges, which belong to the bin below."""
    rng = np.random.default_rng(0)
    random = rng.dirichlet([0.5, 0.5, 0.5], size=400)
    on_edges = np.array([[k / 15, (1 - k / 15) / 2, (1 - k / 15) / 2] for k in range(5, 16)])
    probabilities = np.concatenate([random, on_edges]).astype(np.float32)
    labels = rng.integers(0, 3, size=len(probabilities))
    wanted = by_hand(probabilities, labels, num_bins)
    for compute in (
        optperm.bayes.calibration,
        jax.jit(optperm.bayes.calibration, static_argnames="num_bins"),
    ):
        found = compute(probabilities, labels, num_bins=num_bins)
        np.testing.assert_array_equal(found.counts, wanted[1])
        np.testing.assert_allclose(found.expected_calibration_error, wanted[0], atol=1e-5)
        np.testing.assert_allclose((found.confidence, found.accuracy), wanted[2:], atol=1e-5)


def test_known_errors():
    """0 for what is as often right as it says, whatever the bins; the confidence for what is always
    wrong."""
    probabilities = np.repeat(np.float32([[0.75, 0.25], [0.5, 0.5], [1.0, 0.0]]), 4, axis=0)
    labels = np.array([0, 0, 0, 1] + [0, 0, 1, 1] + [0] * 4)
    for num_bins in (1, 4, 15):
        found = optperm.bayes.calibration(probabilities, labels, num_bins=num_bins)
        assert float(found.expected_calibration_error) == 0
    for confidence in (1.0, 0.9):
        sure = np.tile(np.float32([confidence, 1 - confidence]), (6, 1))
        found = optperm.bayes.calibration(sure, np.ones(6, np.int32))
        assert float(found.expected_calibration_error) == pytest.approx(confidence)
        assert found.accuracy.tolist() == [0.0] * 15
        assert np.count_nonzero(found.counts) == 1


@pytest.mark.parametrize("dtype", [support.FLOAT16, "bfloat16", "float64"])
def test_dtypes(dtype):
    """Sums are in float32 or wider; a thousand half-sure examples are not rounded in 16 bits."""
    with jax.enable_x64(dtype == "float64"):
        probabilities = jnp.tile(jnp.asarray([0.6, 0.4], dtype), (1000, 1))
        found = optperm.bayes.calibration(probabilities, np.zeros(1000, np.int32))
        assert found.confidence.dtype == (dtype if dtype == "float64" else "float32")
        error = 1 - float(jnp.asarray(0.6, dtype))
        assert float(found.expected_calibration_error) == pytest.approx(error, abs=1e-4)


def test_labels_of_8_bits_count_more_classes_than_they_hold():
    """The scores of labels in int32, for 256 and 300 classes, where labels wrap around in uint8."""
    for classes in (256, 300):
        p = np.random.default_rng(0).dirichlet(np.ones(classes), size=20)
        labels = np.arange(20)
        nll = -np.log(p[np.arange(20), labels]).mean()
        for dtype in ("uint8", "int8"):
            found = jax.jit(optperm.bayes.classification_scores)(p, labels.astype(dtype))
            assert float(found.nll) == pytest.approx(nll, rel=1e-4)
            expected = optperm.bayes.classification_scores(p, labels)
            np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize("label", [-1, 2])
def test_a_label_of_no_class_is_not_a_wrong_prediction(label):
    """Under jit, where Python cannot see it, nothing is said of such labels as if it were known."""
    probabilities = jnp.array([[0.75, 0.25]] * 4)
    compute = jax.jit(optperm.bayes.calibration)
    found = compute(probabilities, jnp.array([0, 0, 0, label]))
    assert np.isnan(found.expected_calibration_error)
    assert np.all(np.isnan(found.accuracy))
    assert float(compute(probabilities, jnp.array([0, 0, 0, 1])).expected_calibration_error) == 0


def test_intervals_cover_what_they_say():
    """Of normal draws about a normal target by the level; of draws half as wide by less."""
    rng = np.random.default_rng(0)
    targets, draws = rng.normal(size=4000), rng.normal(size=(2, 500, 1)) * np.ones(4000)
    found = optperm.bayes.interval_coverage(draws, targets)
    np.testing.assert_allclose(found, [0.5, 0.8, 0.9, 0.95], atol=0.03)
    narrow = optperm.bayes.interval_coverage(draws / 2, targets, [0.9])
    np.testing.assert_allclose(narrow, 0.589, atol=0.03)
    for change in (
        {"draws": draws[0]},
        {"targets": targets[1:]},
        {"targets": np.full_like(targets, np.nan)},
        {"draws": np.full_like(draws, np.inf)},
        {"levels": [1.0]},
        {"levels": 0.5},
    ):
        with pytest.raises(ValueError, match="must"):
            optperm.bayes.interval_coverage(**{"draws": draws, "targets": targets} | change)


def test_an_entropy_is_of_probabilities():
    """Logits, log-probabilities and sigmoids are refused; 16 bits may sum to one by their rounding."""
    p = jax.nn.softmax(jax.random.normal(jax.random.key(0), (1, 3, 5, 4)))

    def predictions(draws):
        dtype = "float32"
        return optperm.bayes.Predictions(
            draws, draws.mean((0, 1), dtype=dtype), draws.astype(dtype).std((0, 1))
        )

    mean = np.asarray(p, np.float64).mean(axis=(0, 1))
    for draws, tolerance in ((p, 1e-5), (p.astype("bfloat16"), 0.02)):
        found = predictions(draws)
        expected = -(mean * np.log(mean)).sum(axis=-1)
        np.testing.assert_allclose(found.entropy(), expected, rtol=tolerance)
        assert (found.mutual_information() > 0).all()
    for draws in (5 * p, jnp.log(p), p[..., 0], p[..., :1], p.at[0, 0, 0, 0].set(jnp.nan)):
        for call in (predictions(draws).entropy, predictions(draws).mutual_information):
            with pytest.raises(ValueError, match=r"probabilities .*two classes|sum to one"):
                call()


@pytest.mark.parametrize("dtype", [support.FLOAT16, "bfloat16"])
def test_predictions_in_16_bits_are_scored(dtype):
    """The mean in float32 of probabilities whose rows sum to one in 16 bits alone."""
    labels = np.arange(6)
    for classes in (10, 1000):
        logits = 4 * jax.random.normal(jax.random.key(0), (3, 6, classes))
        found = optperm.bayes.posterior_predictive(
            lambda w, x: jax.nn.softmax(w.astype(x.dtype)),
            optperm.bayes.Ensemble(logits),
            jnp.ones((), dtype),
        )
        assert np.abs(found.mean.sum(axis=1) - 1).max() > 1e-4
        scores = optperm.bayes.classification_scores(found.mean, labels)
        mean = np.asarray(jax.nn.softmax(logits), np.float64).mean(axis=0)
        nll = -np.log(mean[labels, labels]).mean()
        assert float(scores.nll) == pytest.approx(nll, rel=0.02)
        assert np.all(np.isfinite(found.entropy()))


def test_scores_are_those_of_numpy():
    rng = np.random.default_rng(0)
    p, labels = rng.dirichlet(np.ones(4), size=50), rng.integers(0, 4, size=50)
    found = optperm.bayes.classification_scores(p, labels)
    expected = {
        "accuracy": (p.argmax(axis=1) == labels).mean(),
        "nll": -np.log(p[np.arange(50), labels]).mean(),
        "brier": ((p - np.eye(4)[labels]) ** 2).sum(axis=1).mean(),
        "calibration_error": by_hand(np.float32(p), labels, 15)[0],
    }
    for name, value in expected.items():
        assert float(getattr(found, name)) == pytest.approx(value, rel=1e-5)


def test_the_area_under_the_curve_is_the_share_of_pairs():
    """Of all pairs by brute force, with ties."""
    rng = np.random.default_rng(0)
    one, other = rng.integers(0, 6, size=40), rng.integers(2, 9, size=30)
    pairs = np.sign(other[None] - one[:, None])
    assert optperm.bayes.auroc(one, other) == pytest.approx(0.5 + pairs.mean() / 2)
    with pytest.raises(ValueError, match=r"other_scores must be .* got NaN"):
        optperm.bayes.auroc([1.0], [np.nan, 2.0])


def test_entropy_and_mutual_information_of_two_draws():
    """Draws that are sure and disagree have log 2 of both, draws that agree on .5 of the first alone."""
    draws = jnp.array([[[1.0, 0.0], [0.5, 0.5]], [[0.0, 1.0], [0.5, 0.5]]])
    found = optperm.bayes.posterior_predictive(lambda w, x: w, optperm.bayes.Ensemble(draws), ())
    np.testing.assert_allclose(found.entropy(), np.log([2, 2]), rtol=1e-6)
    np.testing.assert_allclose(found.mutual_information(), [np.log(2), 0.0], atol=1e-6)
    for params in (jnp.ones(()), {"w": jnp.ones((2, 3)), "b": jnp.ones(3)}):
        with pytest.raises(ValueError, match="stacked along a leading axis"):
            optperm.bayes.posterior_predictive(lambda w, x: w, optperm.bayes.Ensemble(params), ())
