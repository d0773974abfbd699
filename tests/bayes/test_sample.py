"""`sample` on posteriors that are known, and what it owns: batches, starts, warm-up, draws."""

import contextlib
import functools
import warnings
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import support

import optperm
from optperm.bayes._optima import first_starts, search_starts
from optperm.bayes._prior import make_loss
from optperm.core.states import find_states
from optperm.evaluation import is_mean

# Draws that are few enough for tests are too few for figures
pytestmark = pytest.mark.filterwarnings(
    "ignore:The maximum split R-hat", "ignore:The minimum effective", "ignore:There are .* draws",
    "ignore:The noise of the batches",
)  # fmt: skip
N = 300
Y = jnp.float32(np.random.default_rng(0).normal(3, size=N))
QUICK = {"num_chains": 2, "num_draws": 20, "thinning": 2}


def loss_fn(mean, batch):
    return jnp.mean((batch - mean) ** 2) / 2


def sgld(n, s):
    del s
    return optperm.sgld(1e-4, n)


def draw(**options):
    """Few draws of the mean of normal data, which are below and above 3."""
    given = {"data": Y, "params": jnp.zeros(()), "key": 1, "sampler": sgld, "burn_in": 50}
    return optperm.bayes.sample(
        **{"loss_fn": loss_fn, "starts": jnp.array([2.9, 3.1]), **given, **QUICK} | options
    )


@pytest.mark.slow
def test_starts_draws_and_progress():
    """Given starts are where chains begin, N and S reach the sampler, and the draws are told as they
    come; a function of a key is drawn from for each chain."""
    told, sizes = [], []

    def sampler(n, s):
        sizes.append((n, s))
        return sgld(n, s)

    starts = jnp.array([2.5, 3.5])
    run = functools.partial(draw, batch_size=8, sampler=sampler, burn_in=0, num_draws=25)
    samples = run(starts=starts, on_draws=lambda n, new: told.append((n, new.shape)))
    assert sizes == [(N, 8)]
    np.testing.assert_array_equal(samples.starts, starts)
    # After each tenth, rounded up, and at the end
    assert told == [*((n, (2, 3)) for n in range(3, 25, 3)), (25, (2, 1))]
    assert samples.params.shape == (2, 25)
    assert int(samples.next_step) == 9 * 3 * QUICK["thinning"]
    assert abs(float(samples.params[0, 0]) - 2.5) < 0.2
    drawn = run(starts=lambda key: 3.0 + jax.random.normal(key)).starts
    assert np.ptp(np.asarray(drawn)) > 0.01
    with pytest.raises(ValueError, match="starts"):
        run(starts=jnp.ones(3))


def test_chains_begin_in_pairs_around_params_even_if_a_leaf_has_no_entries():
    params = {"w": np.ones(2, np.float32), "none": np.zeros((0, 3), np.float32)}
    starts = jax.jit(lambda params: first_starts(params, jax.random.key(0), 3, None))(params)
    starts = jax.device_get(starts)
    assert starts["none"].shape == (3, 0, 3)
    np.testing.assert_allclose(starts["w"][0] + starts["w"][1], 2, rtol=1e-6)
    assert np.all(np.abs(starts["w"] - 1) > 0)


def test_search_from_starts_of_16_bits_finds_the_rounded_optimum():
    """It searches in float32: steps of bfloat16 would stop at one part in 256 or would not be taken."""
    optimum, scales = jnp.float32([3.03125, -0.2578125]), jnp.float32([1.0, 50.0])

    def loss(w):
        return jnp.sum(scales * (w.astype(jnp.float32) - optimum) ** 2)

    found = search_starts(loss, jnp.ones((2, 2), jnp.bfloat16) * jnp.bfloat16(0.7))
    support.assert_same_bits(found, jnp.stack([optimum.astype(jnp.bfloat16)] * 2))


class Model(NamedTuple):
    """A tree that can be called, as a model of Equinox."""

    mean: Any

    def __call__(self, key):
        raise AssertionError(key)


def texts_of(run):
    """What `run` returns, and the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        return run(), [str(warning.message) for warning in caught]


def loss_of_model(model, batch):
    return loss_fn(model.mean, batch)


STARTS = Model(jnp.array([2.9, 3.1]))
OF_MODEL = {"params": Model(jnp.zeros(())), "starts": STARTS, "batch_size": 8, "burn_in": 75}


@pytest.fixture(scope="module")
def drawn_and_said():
    """Draws of the mean in a model, in memory, and the warnings."""
    return texts_of(lambda: draw(loss_fn=loss_of_model, **OF_MODEL))


@pytest.fixture(scope="module")
def drawn(drawn_and_said):
    return drawn_and_said[0]


def test_starts_that_can_be_called_are_a_tree(drawn):
    support.assert_same_bits(drawn.starts, STARTS)


def test_sample_warns_of_what_a_report_warns_of(drawn_and_said):
    """In the same sentences: here of too few draws."""
    samples, texts = drawn_and_said
    assert any(text.startswith("The minimum effective sample size") for text in texts)
    assert tuple(texts) == optperm.bayes.posterior_report(samples).warnings


@pytest.mark.parametrize(
    ("sampler", "says"),
    [
        pytest.param(
            lambda n, s: optperm.sgld(5e-3, n),
            "The noise of the batches may make the variance",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            lambda n, s: optax.sgd(1e-4),
            "The minimum effective sample size",
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_sample_warns_of_biases_and_of_optimizers_that_are_no_samplers(sampler, says):
    """In the sentences of a report."""
    samples, texts = texts_of(lambda: draw(sampler=sampler, batch_size=8))
    assert any(text.startswith(says) for text in texts)
    assert tuple(texts) == optperm.bayes.posterior_report(samples).warnings


LANGEVIN = {
    "sgld": lambda n: optperm.sgld(1e-4, n),
    "sghmc": lambda n: optperm.sghmc(1e-5, n, 0.1),
    "mandt_sgd": lambda n: optperm.mandt_sgd(n, 32, freeze_after=20),
}
BEFORE = {
    "nothing": (optax.identity, True),
    "svrg": (optperm.svrg, True),
    "svrg every 10 steps": (lambda: optperm.svrg(every=10), True),
    "RMSProp": (optax.scale_by_rss, False),
    "clipping": (lambda: optax.clip_by_global_norm(1.0), False),
    "weight decay": (lambda: optax.add_decayed_weights(1e-2), False),
    "momentum": (lambda: optax.trace(0.9), False),
    "STORM": (lambda: optperm.recursive_gradient(0.1), True),
}
# Steps between the loss and the methods that warn in each step are tried with these methods alone
PAIRS = [(name, before) for name in ("sgld", "sghmc") for before in BEFORE]
PAIRS += [("mandt_sgd", "weight decay")]


@pytest.mark.parametrize("before", ["clipping", "momentum"])
def test_transformation_that_changes_the_gradient_is_named_before_the_first_step(before):
    """The warning is raised as an error, which ends the call."""
    make, _ = BEFORE[before]
    with pytest.raises(UserWarning, match=r"^A transformation before the sampler"):
        draw(sampler=lambda n, s: optax.chain(make(), LANGEVIN["sgld"](n)), burn_in=None)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "before"), PAIRS)
def test_transformation_that_changes_the_gradient_is_named_in_the_report(name, before):
    make, is_gradient = BEFORE[before]
    samples, texts = texts_of(
        lambda: draw(sampler=lambda n, s: optax.chain(make(), LANGEVIN[name](n)), burn_in=None)
    )
    changed = [text for text in texts if text.startswith("A transformation before the sampler")]
    assert len(changed) == (not is_gradient)
    assert texts.index(changed[0]) <= 1 if changed else True
    assert samples.is_gradient == is_gradient
    report = optperm.bayes.posterior_report(samples)
    assert changed == [text for text in report.warnings if text in changed]
    assert not any("gradient of the loss" in line for line in report.not_checked)


def sampler_of(name):
    """A sampler for `sample`; None for constant SGD, whose kernels `sample` learns."""
    return None if name == "constant_sgd" else lambda n, s: LANGEVIN[name](n)


def summed_loss(mean, batch):
    return 1e-3 * jnp.sum((batch - mean) ** 2)


@pytest.mark.parametrize("name", ["sgld", "constant_sgd"])
def test_loss_that_sums_its_batch_is_named_before_the_first_step(name):
    """The warning is raised as an error, which ends the call."""
    says = "^The loss of a batch is not the mean of the losses of its halves"
    with pytest.raises(UserWarning, match=says):
        draw(loss_fn=summed_loss, sampler=sampler_of(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sgld", "sghmc", "constant_sgd"])
def test_loss_that_sums_its_batch_is_named_in_the_report(name):
    samples, texts = texts_of(lambda: draw(loss_fn=summed_loss, sampler=sampler_of(name)))
    assert texts[0].startswith("The loss of a batch is not the mean of the losses of its halves")
    report = optperm.bayes.posterior_report(samples)
    assert texts[0] in report.warnings
    assert texts.count(texts[0]) == 1
    assert not any("mean over examples" in line for line in report.not_checked)


@pytest.fixture(scope="module")
def accumulated():
    """Draws of a sampler in accumulation, with a prior with bounds, and the warnings."""
    with jax.numpy_dtype_promotion("standard"):
        return texts_of(
            lambda: draw(
                sampler=lambda n, s: optax.MultiSteps(LANGEVIN["sgld"](n), 2),
                log_prior=lambda m: jnp.where(m > 3.0, 0.0, -jnp.inf),
            )
        )


def test_sampler_in_accumulation_is_sampled_and_its_noise_is_not_known(accumulated):
    report = optperm.bayes.posterior_report(accumulated[0])
    assert any("due to the batches' noise (not known here)" in line for line in report.not_checked)


def test_sums_with_counts_sample_the_posterior_of_all_sums(drawn):
    """Each example has two tokens: the loss is the mean over examples, not over tokens."""

    def pair(p, y):
        return jnp.sum((y - p.mean) ** 2 / 2), 2 * y.size

    samples, _ = texts_of(lambda: draw(loss_fn=pair, **OF_MODEL))
    chex.assert_trees_all_close(samples.params, drawn.params, rtol=1e-4, atol=1e-5)
    assert samples.is_mean
    loss = make_loss(
        lambda m, y: (jnp.mean((y - m) ** 2), 0.9), jnp.zeros(()), Y[:8], num_data=N, log_prior=None
    )
    assert not is_mean(loss, jnp.zeros(()), Y[:8])


@pytest.mark.parametrize(
    ("starts", "svrg"),
    [
        (lambda key: 5.0 + jax.random.normal(key, (3,)), None),
        pytest.param(None, optperm.svrg, marks=pytest.mark.slow),
        pytest.param(
            lambda key: 5.0 + jax.random.normal(key, (3,)), optperm.svrg, marks=pytest.mark.slow
        ),
        pytest.param(None, lambda: optperm.svrg(every=200), marks=pytest.mark.slow),
        pytest.param(None, lambda: optperm.svrg(probability=0.005), marks=pytest.mark.slow),
    ],
)
def test_control_variates_of_sample_take_the_noise_of_the_batches_away(starts, svrg):
    """Those of the argument and of svrg: deviations agree with the Hessian of all data, and the noise is
    measured behind control variates. Without them, steps of the full Hessian A with the noise C / S have
    much larger deviations."""
    size, step_size = 16, 5e-4
    x = 1 + np.asarray(support.normal((2000, 3)))
    y = np.float32(np.random.default_rng(0).random(2000) < 1 / (1 + np.exp(-x @ [1.0, -1, 0.5])))

    def loss(w, batch):
        logits = batch[0] @ w
        nll = jnp.mean(jax.nn.softplus(logits) - batch[1] * logits)
        return nll + optperm.bayes.normal_prior(w, 1.0, 2000)

    w = np.zeros(3)
    for _ in range(20):
        p = 1 / (1 + np.exp(-x @ w))
        hessian = (x.T * p * (1 - p)) @ x / 2000 + np.eye(3) / 2000
        w -= np.linalg.solve(hessian, x.T @ (p - y) / 2000 + w / 2000)
    h = step_size * 2000 / 2

    def variances(noise):
        """Solve Sigma = (I - h A) Sigma (I - h A) + h^2 (C / S + 4 / (epsilon N^2))."""
        steps = np.kron(np.eye(3) - h * hessian, np.eye(3) - h * hessian)
        added = h**2 * (noise / size + 4 / (step_size * 2000**2) * np.eye(3))
        return np.diag(np.linalg.solve(np.eye(9) - steps, added.ravel()).reshape(3, 3))

    plain = variances(np.cov((x * (p - y)[:, None]).T))
    assert np.all(plain > 1.5**2 * np.diag(np.linalg.inv(2000 * hessian)))
    given = {"batch_size": size, "starts": starts, "num_draws": 400}
    if svrg is None:
        given |= {"sampler": lambda n, s: optperm.sgld(step_size, n), "control_variates": True}
    else:
        given["sampler"] = lambda n, s: optax.chain(svrg(), optperm.sgld(step_size, n))
    samples, texts = texts_of(lambda: optperm.bayes.sample(loss, (x, y), jnp.zeros(3), 0, **given))
    assert samples.is_gradient
    assert not any(text.startswith("A transformation before the sampler") for text in texts)
    assert not any("svrg has no snapshot" in text for text in texts)
    deviations = np.std(samples.params, axis=(0, 1))
    np.testing.assert_allclose(
        deviations / np.sqrt(np.diag(np.linalg.inv(2000 * hessian))), 1, atol=0.1
    )
    bias = optperm.bayes.posterior_report(samples).batch_bias
    assert 0 < bias < 0.1 * np.max(plain / variances(np.zeros((3, 3))) - 1)


def test_chains_begin_at_the_params_if_there_are_too_many_for_the_search():
    params = {"m": jnp.ones(()), "rest": jnp.zeros(4200)}
    starts = first_starts(params, jax.random.key(0), 2, None)
    support.assert_same_bits(starts, jax.tree.map(lambda p: jnp.stack([p, p]), params))
    assert search_starts(pytest.fail, starts) is starts


def test_drawn_chains_that_start_at_one_point_are_reported(drawn):
    one = drawn._replace(starts=jax.tree.map(jnp.zeros_like, drawn.starts))
    for samples, is_one in ((drawn, False), (one, True)):
        report = optperm.bayes.posterior_report(samples)
        assert any("started at the same point" in line for line in report.not_checked) == is_one
    alone = drawn._replace(params=jax.tree.map(lambda draws: draws[:1], drawn.params))
    report = optperm.bayes.posterior_report(alone)
    assert any("with one chain, R-hat compares only" in line for line in report.not_checked)


@pytest.mark.slow
def test_chains_of_many_params_are_reported_to_start_at_one_point():
    """Above the limit of the search all chains begin at the params; below it, on both sides."""
    zeros = {"m": jnp.zeros(()), "rest": jnp.zeros(4200)}

    def loss(p, y):
        return loss_fn(p["m"], y) + jnp.sum(p["rest"] ** 2)

    for params, is_one in ((zeros, True), ({"m": zeros["m"], "rest": jnp.zeros(2)}, False)):
        samples, _ = texts_of(lambda given=params: draw(loss_fn=loss, params=given, starts=None))
        report = optperm.bayes.posterior_report(samples)
        assert any("started at the same point" in line for line in report.not_checked) == is_one


def on_mesh():
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Explicit,))
    return mesh, jax.device_put(Y, jax.NamedSharding(mesh, jax.P("d")))


@pytest.mark.slow
def test_data_on_a_mesh_with_explicit_axes_are_sampled(drawn):
    """As on one device."""
    _, y = on_mesh()
    samples, _ = texts_of(lambda: draw(loss_fn=loss_of_model, data=y, **OF_MODEL))
    chex.assert_trees_all_close(samples.params, drawn.params, rtol=1e-3)


def test_search_with_data_on_a_mesh_with_explicit_axes_finds_the_optimum():
    mesh, y = on_mesh()
    with jax.set_mesh(mesh):
        found = search_starts(lambda m: loss_fn(m, y), jnp.zeros(2))
    np.testing.assert_allclose(found, np.mean(Y), rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "is_set"),
    [
        pytest.param("sgld", False, marks=pytest.mark.exhaustive),
        pytest.param("sgld", True, marks=pytest.mark.exhaustive),
        pytest.param("constant_sgd", False, marks=pytest.mark.slow),
        pytest.param("constant_sgd", True, marks=pytest.mark.slow),
    ],
)
def test_data_on_a_mesh_with_explicit_axes_are_sampled_from_a_search(name, is_set):
    """With jax.set_mesh from a search, and without it from given starts: as on one device."""
    mesh, y = on_mesh()
    starts = {"starts": None} if is_set else {}
    run = functools.partial(draw, sampler=sampler_of(name), burn_in=None, **starts)
    with jax.set_mesh(mesh) if is_set else contextlib.nullcontext():
        found = run(data=y)
    np.testing.assert_allclose(found.params, run().params, rtol=1e-3)


@pytest.mark.slow
def test_params_whose_spacing_is_too_coarse_are_named():
    """In float32 near 4e6, numbers are 0.25 apart: steps are lost, or draws have few values."""
    starts, scales = jnp.full((2, 2), 4e6 + 3, jnp.float32), jnp.float32([1e-6, 1.0])

    def loss(w, y):
        return jnp.mean(jnp.sum((y[:, None] - w[None]) ** 2, axis=1)) / 2

    given = {"data": Y + 4e6, "params": starts[0], "starts": starts, "num_draws": 40}
    given["sampler"] = lambda n, s: optperm.sgld(1e-2, n, preconditioner=scales)
    _, texts = texts_of(lambda: draw(loss_fn=loss, **given))
    for says in ("1 of 2 entries have not moved", "vary by less than twice the spacing"):
        assert any(says in text and "float64" in text for text in texts), texts


def draws_outside(texts):
    """What is said of a log prior that was infinite."""
    return [text for text in texts if "log prior is infinite" in text]


def test_prior_with_bounds_is_warned_of_with_the_transform(accumulated):
    """Its gradient is zero on both sides, so that draws go through it."""
    samples, texts = accumulated
    (says,) = draws_outside(texts)
    fraction = float(says.split(" of the draws")[0].split()[-1])
    assert fraction == pytest.approx(float((samples.params <= 3.0).mean()), abs=0.01)
    assert "m = exp(u)" in says


@pytest.mark.slow
def test_steps_outside_of_bounds_before_the_draws_are_not_warned_of():
    """The wall at 0 is between the start -1 and the mode 3."""
    wall = lambda m: jnp.where(m > 0.0, 0.0, -jnp.inf)  # noqa: E731
    _, texts = texts_of(lambda: draw(log_prior=wall, starts=jnp.array([-1.0, 2.0]), burn_in=200))
    assert not draws_outside(texts)


@pytest.mark.slow
def test_batches_of_one_example_are_sampled_with_another_example():
    """The noise of each batch is seen with an example that is drawn apart from it."""
    samples = draw(batch_size=1, burn_in=None, sampler=None)
    (state,) = find_states(samples.last_opt_state, optperm.bayes.NoiseKernel)
    # C = 1, and W^T C W = 1
    np.testing.assert_allclose(np.square(np.asarray(state.basis.w).ravel()), 1, rtol=0.3)


@pytest.mark.slow
def test_params_that_an_explicit_mesh_cuts_are_sampled_from_given_starts():
    mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Explicit,))
    x = support.normal((N, 8))
    with jax.set_mesh(mesh):
        w = jax.device_put(jnp.zeros(8), jax.NamedSharding(mesh, jax.P("d")))
        samples = draw(
            loss_fn=lambda w, x: jnp.mean(jnp.sum((x - w[None]) ** 2, axis=-1)) / 2, data=x, params=w,
            sampler=None, preconditioner="diagonal", starts=jnp.stack([w, w]), burn_in=None,
        )  # fmt: skip
    draws = np.asarray(samples.params)
    assert np.abs(draws - np.mean(np.asarray(x), axis=0)).max() < 5 / np.sqrt(N)
    assert np.all(np.ptp(draws, axis=1) > 0)


@pytest.mark.slow
def test_equal_examples_are_sampled_with_injected_noise_alone():
    """Ten successes of ten: no batch has noise, and nothing is warned of. By quadrature."""
    samples = optperm.bayes.sample(
        lambda t, k: jnp.mean(jax.nn.softplus(t) - k * t), jnp.ones(10), jnp.zeros(()),
        jax.random.key(0), log_prior=lambda t: -(t**2) / 2, batch_size=10, num_draws=300,
    )  # fmt: skip
    grid = np.linspace(-4, 9, 5000)
    weights = np.exp(-10 * np.log1p(np.exp(-grid)) - grid**2 / 2)
    weights /= weights.sum()
    mean = weights @ grid
    deviation = np.sqrt(weights @ (grid - mean) ** 2)
    draws = np.asarray(samples.params, np.float64)
    assert draws.std() == pytest.approx(deviation, rel=0.1)
    assert draws.mean() == pytest.approx(mean, abs=0.2 * deviation)


@pytest.mark.slow
def test_both_modes_are_found_and_said():
    """y ~ N(w^2, 1) from one side: the chains are in both, and the report says that they disagree."""
    samples = optperm.bayes.sample(
        lambda w, y: loss_fn(w**2, y), 1 + support.normal((200,)), jnp.float32(0.5), 1, batch_size=16,
        num_draws=100, log_prior=lambda w: -(w**2) / 2,
    )  # fmt: skip
    means = np.asarray(samples.params).mean(axis=1)
    assert set(np.sign(means)) == {-1, 1}
    np.testing.assert_allclose(np.abs(means), 1, atol=0.1)
    report = optperm.bayes.posterior_report(samples)
    assert any("or are in several modes" in text for text in report.warnings)
    assert not any("one point" in line for line in report.not_checked)


@pytest.mark.slow
def test_long_and_narrow_posteriors_are_sampled():
    """By defaults, from zero: a condition of 2e11, where float32 loses C in the params' coordinates."""
    rng = np.random.default_rng(0)
    x = np.c_[np.ones(500), rng.normal(2000, 3, 500), rng.normal(size=(500, 2))]
    y = x @ rng.normal(size=x.shape[1]) * 0.3 + rng.normal(size=len(x))
    precision = 0.01
    covariance = np.linalg.inv(x.T @ x + precision * np.eye(x.shape[1]))
    assert np.linalg.cond(covariance) > 1e10

    def loss(w, batch):
        residuals = batch[0] @ w - batch[1]
        return jnp.mean(residuals**2) / 2 + optperm.bayes.normal_prior(w, precision, len(x))

    samples = optperm.bayes.sample(
        loss, (jnp.float32(x), jnp.float32(y)), jnp.zeros(x.shape[1]), jax.random.key(0),
        batch_size=8, num_draws=600,
    )  # fmt: skip
    flat, sd = np.float64(samples.params).reshape(2400, -1), np.sqrt(np.diag(covariance))
    np.testing.assert_allclose(flat.std(axis=0) / sd, 1, atol=0.15)
    assert np.max(np.abs(flat.mean(axis=0) - covariance @ x.T @ y) / sd) < 0.25
    assert optperm.bayes.posterior_report(samples).ess_bulk > 150


def test_normal_prior_is_the_fraction_of_one_example():
    """precision / (2 N) |w|^2, so that N times its gradient is precision times the params."""
    w, precision, n = {"a": np.float32([1.0, -2.0]), "b": np.float32(3.0)}, 0.5, 40
    value, grad = jax.jit(jax.value_and_grad(optperm.bayes.normal_prior))(w, precision, n)
    np.testing.assert_allclose(value, 0.5 / 80 * 14.0, rtol=1e-6)
    wanted = jax.tree.map(lambda leaf: np.float32(precision / n) * leaf, w)
    chex.assert_trees_all_close(grad, wanted, rtol=1e-6)


def test_log_prior_counts_once_among_all_examples():
    """N times the loss over all examples is the sum of their losses less the log prior."""
    loss = make_loss(
        loss_fn, jnp.zeros(()), jnp.arange(5.0), num_data=5, log_prior=lambda w: -3.0 * w
    )
    total = 5 * loss(jnp.float32(2.0), jnp.arange(5.0))
    np.testing.assert_allclose(total, np.sum((np.arange(5) - 2.0) ** 2) / 2 + 6.0, rtol=1e-6)


@pytest.mark.slow
def test_rows_on_disk_and_of_a_function_give_the_same_draws(tmp_path, drawn):
    """SGLD from given starts: the rows of a memory map are those that a function draws with its key, and
    a part of a burn-in with a number of steps of its own changes nothing."""
    np.save(tmp_path / "y.npy", np.asarray(Y))
    on_disk = np.load(tmp_path / "y.npy", mmap_mode="r")

    def read(key):
        return on_disk[np.asarray(jax.random.randint(key, (8 + 1,), 0, N))[:8]]

    run = functools.partial(draw, batch_size=8, burn_in=75)
    disk, function = run(data=on_disk), run(data=read, num_data=N)
    support.assert_same_bits(disk.params, function.params)
    support.assert_same_bits(disk.step_sizes, function.step_sizes)
    assert disk.params.shape == (2, 20)
    assert int(disk.next_step) == 75 + 40
    report = optperm.bayes.posterior_report(disk)
    memory = optperm.bayes.posterior_report(drawn)
    assert report.batch_bias == pytest.approx(memory.batch_bias, rel=0.3)


@pytest.mark.parametrize("in_memory", support.every_night([False, True], [False]))
@pytest.mark.filterwarnings("ignore:R-hat and effective")
def test_draws_are_the_params_after_the_burn_in_and_each_thinning(in_memory):
    """Of steps of 1 from 0 and from 5, in one part and in parts."""
    samples = draw(
        data=Y if in_memory else lambda key: np.asarray(Y)[:8], num_data=N, batch_size=8, burn_in=75,
        starts=jnp.array([0.0, 5.0]), thinning=3,
        sampler=lambda n, s: optax.stateless(lambda g, p: jax.tree.map(jnp.ones_like, p)),
    )  # fmt: skip
    wanted = np.array([[0.0], [5.0]]) + 75 + 3 * np.arange(1, 21)
    np.testing.assert_array_equal(samples.params, wanted)
    assert int(samples.next_step) == 75 + 60


@pytest.mark.slow
def test_rows_on_disk_are_sampled_as_rows_in_memory(tmp_path):
    """The variance of the mean of normal data is 1 / N; chunks of a function are named."""
    np.save(tmp_path / "y.npy", np.asarray(Y))
    on_disk = np.load(tmp_path / "y.npy", mmap_mode="r")
    run = functools.partial(
        optperm.bayes.sample, loss_fn, params=jnp.zeros(()), key=1, batch_size=8, num_draws=400
    )
    for data in (np.asarray(Y), on_disk):
        samples = run(data=data)
        assert float(samples.params.mean()) == pytest.approx(float(Y.mean()), abs=0.02)
        assert N * float(samples.params.var()) == pytest.approx(1, abs=0.15)
    position = [0]

    def chunk(key):
        del key
        position[0] = (position[0] + 8) % (N - 8)
        return np.sort(np.asarray(Y))[position[0] : position[0] + 8]

    with pytest.warns(UserWarning, match="Successive batches are alike"):
        run(data=chunk, num_data=N, num_draws=20)


@pytest.mark.slow
def test_a_kernel_of_an_earlier_call_is_not_learned_again(monkeypatch):
    """A kernel's N and S are used, its noise is compared with the batches, and others are refused."""
    # Control variates would leave no noise to compare
    kernel, w = optperm.bayes.learn_kernel(
        loss_fn, Y, jnp.zeros(()), 0, batch_size=8, control_variates=False
    )
    monkeypatch.setattr("optperm.bayes._sample.learn_kernels", None)
    run = functools.partial(
        optperm.bayes.sample,
        data=Y, params=w, key=1, kernel=kernel, num_draws=400, num_chains=4,
    )  # fmt: skip
    samples, texts = texts_of(lambda: run(loss_fn))
    assert not any("differs from the kernel's" in text for text in texts)
    assert N * float(samples.params.var()) == pytest.approx(1, abs=0.15)
    with pytest.raises(ValueError, match="batch_size"):
        run(loss_fn, batch_size=16)
    with pytest.raises(ValueError, match=f"kernel is for num_data={N}, but num_data is 200: learn"):
        optperm.bayes.sample(loss_fn, Y[:200], w, 1, kernel=kernel)
    with pytest.raises(ValueError, match="kernel is for sampler=None"):
        run(loss_fn, sampler=sgld)
    _, texts = texts_of(lambda: run(lambda m, y: 4 * loss_fn(m, y), num_draws=40))
    assert any("differs from the kernel's" in text for text in texts)
