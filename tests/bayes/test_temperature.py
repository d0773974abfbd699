"""Temperature scaling against another minimizer, and its laws."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.optimize
import scipy.special
import support

import optperm


def sample(scale=1.0, n=400, classes=5, seed=0):
    """Logits whose labels are drawn from their probabilities, times a scale."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(n, classes))
    labels = (logits + rng.gumbel(size=logits.shape)).argmax(axis=1)
    return scale * logits, labels


def nll(temperature, logits, labels):
    scores = scipy.special.log_softmax(logits / temperature, axis=1)
    return -np.mean(scores[np.arange(len(labels)), labels])


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e4])
def test_the_temperature_is_the_minimum_of_the_likelihood(scale):
    logits, labels = sample(scale)
    found = scipy.optimize.minimize_scalar(
        lambda log_t: nll(np.exp(log_t) * scale, logits, labels), bounds=(-3, 3), method="bounded"
    )
    fitted = float(optperm.bayes.fit_temperature(logits.astype(np.float32), labels))
    assert fitted == pytest.approx(scale * np.exp(found.x), rel=1e-4)
    assert fitted == pytest.approx(scale, rel=0.15)  # the labels were drawn at the temperature 1


def test_a_constant_in_each_row_jit_and_16_bits_change_nothing():
    logits, labels = sample()
    wanted = optperm.bayes.fit_temperature(jnp.float32(logits), labels)
    moved = jnp.float32(logits + np.arange(len(labels))[:, None] / 64)
    np.testing.assert_allclose(optperm.bayes.fit_temperature(moved, labels), wanted, rtol=1e-4)
    traced = jax.jit(optperm.bayes.fit_temperature)(jnp.float32(logits), jnp.asarray(labels))
    np.testing.assert_allclose(traced, wanted, rtol=1e-5)
    narrow = optperm.bayes.fit_temperature(jnp.bfloat16(logits), labels)
    assert narrow.dtype == jnp.float32
    np.testing.assert_allclose(narrow, wanted, rtol=0.01)


def test_labels_for_which_no_temperature_is_best_are_refused():
    """All labels have the largest or the smallest logit, or tie with it, for any margins."""
    logits, _ = sample()
    few, ties = np.array([[300, 0, -1], [0, 500, 0]]), np.array([[5, 5, 0], [9, 1, 0]])
    for z, labels, says in (
        (np.float32(logits), logits.argmax(axis=1), "tends to 0"),
        (np.float32(logits), logits.argmin(axis=1), "tends to infinity"),
        (np.float32(few), few.argmax(axis=1), "tends to 0"),
        (np.float32(ties), ties.argmax(axis=1), "tends to 0"),
    ):
        with pytest.raises(ValueError, match=rf"No temperature is best: .* {says}"):
            optperm.bayes.fit_temperature(z, labels)
        assert np.isnan(jax.jit(optperm.bayes.fit_temperature)(z, labels))


def test_wrong_labels_and_logits_give_nan_where_they_are_traced():
    fit = jax.jit(optperm.bayes.fit_temperature)
    for label, logit in ((5, 0.0), (-1, 0.0), (0, np.nan), (0, np.inf)):
        logits, labels = sample()
        labels[7], logits[8, 2] = label, logits[8, 2] + logit
        assert np.isnan(fit(jnp.float32(logits), labels))


MASKS = [-1e4, -1e6, -1e9, float(np.finfo(np.float32).min), -np.inf]


def with_masked(logits, mask, dtype=np.float32):
    """Return the logits after seven classes that are masked."""
    least = mask if dtype == np.float32 or mask == -np.inf else max(mask, -6e4)
    return np.concatenate([np.full((len(logits), 7), least), logits], axis=1).astype(dtype)


@pytest.mark.parametrize(
    ("mask", "scale", "dtype"),
    support.every_night(
        [(mask, *each) for mask in MASKS for each in ((1.0, "float32"), (1e-3, "float32"))],
        [(mask, 1e-3 if mask == -1e9 else 1.0, "float32") for mask in MASKS],
    )
    + [
        pytest.param(mask, 300.0, "float16", marks=[pytest.mark.exhaustive, support.needs_float16])
        for mask in MASKS
    ],
)
def test_masked_classes_change_no_temperature(mask, scale, dtype):
    """Several of them, for any scale of the others."""
    fit, (logits, labels) = optperm.bayes.fit_temperature, sample(scale)
    masked = with_masked(logits, mask, np.dtype(dtype))
    wanted, found = fit(logits.astype(dtype), labels), fit(masked, labels + 7)
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
    np.testing.assert_allclose(jax.jit(fit)(masked, labels + 7), wanted, rtol=1e-5)


@pytest.mark.parametrize("mask", support.every_night(MASKS, [-1e4, -np.inf]))
def test_masked_classes_change_neither_gradients_nor_errors(mask):
    fit, (logits, labels) = optperm.bayes.fit_temperature, sample(1.0)
    masked = with_masked(logits, mask)
    grads = jax.grad(lambda z: fit(z, labels + 7))(jnp.asarray(masked))
    assert np.all(grads[:, :7] == 0)
    assert np.all(np.isfinite(grads))
    with pytest.raises(ValueError, match=r"No temperature is best: .* tends to 0"):
        fit(masked, logits.argmax(axis=1) + 7)
    if mask <= -1e9:
        with pytest.raises(ValueError, match=r"No temperature is best: .* tends to infinity"):
            fit(masked, logits.argmin(axis=1) + 7)


@pytest.mark.parametrize(
    "spec", support.every_night([jax.P("d"), jax.P(None, "d")], [jax.P(None, "d")])
)
def test_logits_on_a_mesh_with_explicit_axes_have_the_same_temperature(spec):
    mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Explicit,))
    logits, labels = sample()
    logits = np.pad(
        np.float32(logits), ((0, 0), (0, -logits.shape[1] % 4)), constant_values=-np.inf
    )
    wanted = optperm.bayes.fit_temperature(logits, labels)
    spread = jax.device_put(logits, jax.NamedSharding(mesh, spec))
    found = optperm.bayes.fit_temperature(spread, labels)
    np.testing.assert_allclose(found, wanted, rtol=1e-5)


def test_labels_of_masked_classes_are_refused():
    logits, labels = sample()
    logits[3, labels[3]] = -np.inf
    with pytest.raises(ValueError, match="label of example 3 is -inf"):
        optperm.bayes.fit_temperature(np.float32(logits), labels)
    assert np.isnan(jax.jit(optperm.bayes.fit_temperature)(np.float32(logits), labels))


def test_few_wrong_labels_of_sure_logits_have_a_temperature():
    """One wrong label of 10,000, by a hundredth of the gaps: e^(-10 beta) 10 = 1e-5 for two classes."""
    logits = np.zeros((10_000, 2), np.float32)
    logits[:, 1], logits[0] = -10.0, [-0.1, 0.0]
    found = optperm.bayes.fit_temperature(logits, np.zeros(10_000, int))
    best = scipy.optimize.minimize_scalar(
        lambda t: nll(t, logits.astype(float), np.zeros(10_000, int)),
        bounds=(0.1, 10),
        method="bounded",
    )
    np.testing.assert_allclose(found, best.x, rtol=1e-3)


def test_gradients_in_float64_are_those_of_finite_differences():
    """With respect to the logits and to the weights, whose units do not matter; and the derivative of
    the likelihood is zero at the temperature."""
    logits, labels = sample(3.0)
    rng = np.random.default_rng(1)
    of_logits, weights, of_weights = (
        rng.normal(size=logits.shape), rng.random(len(labels)), rng.normal(size=len(labels))
    )  # fmt: skip
    with jax.enable_x64(True):

        @jax.jit
        def fit(t, s):
            w = jnp.asarray(weights + s * of_weights)
            z = jnp.asarray(logits + t * of_logits)
            return optperm.bayes.fit_temperature(z, labels, weights=w)

        fitted = float(fit(0.0, 0.0))
        wanted = [float(fit(*(1e-5 * step)) - fit(*(-1e-5 * step))) / 2e-5 for step in np.eye(2)]
        backward = [float(slope) for slope in jax.grad(fit, (0, 1))(0.0, 0.0)]
        forward = float(jax.jvp(fit, (0.0, 0.0), (1.0, 1.0))[1])
    assert np.all(np.abs(wanted) > 1e-3)
    np.testing.assert_allclose([*backward, forward], [*wanted, sum(wanted)], rtol=1e-5)
    p = scipy.special.softmax(logits / fitted, axis=1)
    slopes = (p * logits).sum(axis=1) - logits[np.arange(len(labels)), labels]
    assert abs(np.average(slopes, weights=weights)) < 1e-9


def test_probabilities_and_single_logits_are_refused():
    logits, labels = sample(n=40, classes=3)
    probabilities = scipy.special.softmax(logits, axis=1)
    with pytest.raises(ValueError, match=r"two classes or more.*\(0, z\)"):
        optperm.bayes.fit_temperature(logits[:, :1], 0 * labels)
    says = r"^logits look like probabilities, .*: pass their logarithms"
    with pytest.raises(ValueError, match=says):
        optperm.bayes.fit_temperature(probabilities, labels)
    found, expected = (
        optperm.bayes.fit_temperature(z, labels) for z in (np.log(probabilities), logits)
    )
    np.testing.assert_allclose(found, expected, rtol=1e-4)


def test_weights_are_counts_of_equal_examples():
    """In units of any size, as integers too; and a label to ignore leaves out examples, NaN and all."""
    logits, labels = sample()
    # As many examples as logits, which need no further program
    counts = np.random.default_rng(2).multinomial(len(labels), np.ones(len(labels)) / len(labels))
    wanted = optperm.bayes.fit_temperature(
        jnp.float32(np.repeat(logits, counts, axis=0)), np.repeat(labels, counts)
    )
    # In float32, the inverse of 1e38 and all weights of 1e-45 would be flushed to 0
    units = [unit * counts for unit in (1.0, 1e36, 1e38, 1e-45, 1e300)]
    narrow = (counts / 64).astype(support.DTYPES["bfloat16"])
    for weights in (counts, np.float32(units[1]), narrow, *units):
        found = optperm.bayes.fit_temperature(jnp.float32(logits), labels, weights=weights)
        np.testing.assert_allclose(found, wanted, rtol=1e-5)
    assert abs(float(wanted) - float(optperm.bayes.fit_temperature(logits, labels))) > 1e-3
    ignored, fit = np.where(counts == 0, -100, labels), optperm.bayes.fit_temperature
    wanted = fit(jnp.float32(logits), labels, weights=np.float32(counts > 0))
    logits[counts == 0] = np.nan
    some = np.float32(logits)
    for found in (
        fit(some, ignored, ignore_label=-100),
        fit(some, np.uint8(np.where(counts == 0, 255, labels)), ignore_label=255),
        fit(some, labels, weights=np.float32(counts > 0)),
        jax.jit(lambda z, y: fit(z, y, ignore_label=-100))(some, ignored),
    ):
        np.testing.assert_allclose(found, wanted, rtol=1e-5)


def test_weights_that_leave_nothing_or_are_no_weights_are_refused():
    logits, labels = sample(n=40)
    fit, z = optperm.bayes.fit_temperature, jnp.float32(logits)
    for options, error, says in (
        ({"weights": -np.ones(40)}, ValueError, "weights must be finite and at least 0"),
        ({"weights": np.full(40, np.nan)}, ValueError, "weights must be finite and at least 0"),
        ({"weights": np.zeros(40)}, ValueError, "No example is left"),
        ({"weights": np.ones(39)}, ValueError, r"weights must have the shape \(40,\), got \(39,\)"),
        ({"weights": np.ones(40, bool)}, TypeError, "weights must be real numbers"),
        ({"ignore_label": 1.0}, TypeError, "ignore_label"),
    ):
        with pytest.raises(error, match=says):
            fit(z, labels, **options)
    with pytest.raises(ValueError, match="No example is left"):
        fit(z, 0 * labels - 1, ignore_label=-1)
    with pytest.raises(ValueError, match=r"got -1\. To leave out .* ignore_label"):
        fit(z, np.where(labels == 0, -1, labels))
    for weights in (-np.ones(40), np.full(40, np.nan), np.zeros(40)):
        assert np.isnan(jax.jit(lambda w: fit(z, labels, weights=w))(np.float32(weights)))
