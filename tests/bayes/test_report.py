"""What a report says, of draws whose law is known and of samplers in the states that it warns of."""

import re
import warnings

import jax
import jax.numpy as jnp
import kernels
import numpy as np
import optax
import pytest
import scipy.signal
import scipy.special
import scipy.stats

import optperm
from optperm.bayes import _report
from optperm.bayes._convergence import effective_sizes, r_hat_limits, r_hats, split_r_hats


def samples_of(draws, state=(), starts=None):
    draws = jnp.float32(draws)
    return optperm.bayes.Samples(draws, draws[:, -1], state, draws.shape[1], 1, starts)


def report_of(samples):
    """The warnings of a report as one text, and the report."""
    report = optperm.bayes.posterior_report(samples)
    assert all(f"warning: {text}" in str(report) for text in report.warnings)
    return " ".join(report.warnings), report


def autoregressive(decay, shape, seed=0):
    """Draws that correlate by a power of the decay."""
    noise = np.random.default_rng(seed).normal(size=shape)
    noise[:, 1:] *= np.sqrt(1 - decay**2)
    return scipy.signal.lfilter([1.0], [1.0, -decay], noise, axis=1)


def of_chains(*numbers):
    """A number for each chain."""
    return np.array(numbers).reshape(-1, 1, 1)


GOOD = autoregressive(0.3, (4, 1000, 3))


def test_r_hat_is_that_of_ranks():
    """Against its definition by hand, for location and for scale; and infinite moments do not matter."""
    rng = np.random.default_rng(0)
    draws = rng.standard_cauchy(size=(4, 200, 2)) + np.array([0.0, 2.0]) * of_chains(0, 1, 2, 3)
    halves = draws.reshape(8, 100, 2)

    def by_hand(values):
        ranks = scipy.stats.rankdata(values.reshape(800, 2), axis=0)
        scores = scipy.special.ndtri((ranks - 0.375) / 800.25).reshape(8, 100, 2)
        within = scores.var(axis=1, ddof=1).mean(axis=0)
        return np.sqrt(0.99 + scores.mean(axis=1).var(axis=0, ddof=1) / within)

    folded = np.abs(halves - np.median(halves, axis=(0, 1)))
    expected = np.maximum(by_hand(halves), by_hand(folded))
    np.testing.assert_allclose(r_hats(draws)[0], expected, rtol=1e-6)
    assert r_hats(draws)[0][1] > 1.1 > r_hats(draws)[0][0]
    assert r_hats(rng.normal(size=(4, 200, 1)) * of_chains(1, 1, 1, 3))[0][0] > 1.1


@pytest.mark.parametrize("decay", [0.0, 0.8, -0.5])
def test_effective_sizes_are_those_of_autoregressions(decay):
    """n (1 - decay) / (1 + decay), which for decay below zero is more than n."""
    found = effective_sizes(autoregressive(decay, (8, 2000, 20)))
    exact = 16_000 * (1 - decay) / (1 + decay)
    assert found.mean() == pytest.approx(exact, rel=0.1)


def test_effective_sizes_are_geyers_sum_by_hand():
    """2 * 20 / (-1 + 2 sum P_t), where P_t = rho_2t + rho_2t+1 > 0 does not rise again."""
    draws = autoregressive(0.7, (2, 20, 1))
    x = draws[..., 0] - draws[..., 0].mean(axis=1, keepdims=True)
    covariances = np.array([np.sum(x[:, t:] * x[:, : 20 - t]) / 40 for t in range(20)])
    within, between = covariances[0] * 20 / 19, draws.mean(axis=1).var(ddof=1)
    rho = 1 - (within - covariances) / (0.95 * within + between)
    pairs = [1 + rho[1], *(rho[2:-1:2] + rho[3::2])]
    above = [pairs[0]]
    while (following := pairs[len(above)]) > 0:
        above.append(min(following, above[-1]))
    np.testing.assert_allclose(effective_sizes(draws), 40 / (2 * sum(above) - 1), rtol=1e-9)


def test_good_draws_pass_with_their_figures():
    text, report = report_of(samples_of(GOOD))
    assert text == ""
    out = str(report)
    assert f"{report.r_hat:.3f}" in out
    conditions = (
        "the loss is a mean over examples, batches are drawn with replacement, the sampler gets"
    )
    assert (
        f"not checked: Whether {conditions} the gradient of the loss, and no transformation" in out
    )
    assert "posterior: the states of the sampler are missing" in out
    assert report.mcse == pytest.approx(1 / np.sqrt(4000 * 0.7 / 1.3), rel=0.15)


FAULTS = {
    "effective sample size": autoregressive(0.9, (4, 600, 3)),
    "The maximum split R-hat": autoregressive(0.0, (1, 200, 1)) + np.linspace(0, 5, 200)[:, None],
    "have not mixed, or are in several modes": autoregressive(0.5, (4, 200, 3))
    + of_chains(0, 0, 3, 3),
    "too few draws to tell whether the chains have mixed": autoregressive(0.8, (4, 60, 3)),
    # Random walks in four places, whose autocorrelation gives no limit
    "split R-hat is (?!.*too few draws).*have not mixed": 1e-2
    * np.cumsum(np.random.default_rng(0).normal(size=(4, 500, 1)), axis=1)
    + of_chains(0, 10, 20, 30),
    "^The chains diverge(?!.*R-hat)": np.exp(np.linspace(0, 30, 100))[:, None] * of_chains(1, 1),
    # A chain that rests, and then moves, has no width that could grow
    "^(?!.*diverge)": np.where(np.arange(100)[:, None] < 50, 0, GOOD[:, :100]),
    "needs at least 4 draws per chain, got 3: draw more": np.ones((2, 3, 1)),
}


@pytest.mark.parametrize("says", FAULTS)
def test_faults_of_draws_are_named(says):
    assert re.search(says, report_of(samples_of(FAULTS[says]))[0], re.DOTALL)


def test_entries_that_have_not_moved_are_warned_of():
    """In any chain, without a state of a sampler too; and no NaN is read as a good figure."""
    for held, unmoved in (([1, 0, 0, 0], 0), ([1, 1, 1, 1], 1)):
        draws = np.where([0, 1, 0] * of_chains(*held), of_chains(0, 1, 2, 3), GOOD)
        text, report = report_of(samples_of(draws))
        assert report.unmoved == unmoved
        assert ("1 of 3 entries have not moved in any chain" in text) == unmoved
    assert "entries that never moved       1\n" in str(report)
    assert report_of(samples_of(np.ones((2, 1, 3))))[1].unmoved == 0
    text, report = report_of(samples_of(np.ones((4, 500, 3))))
    assert "3 of 3 entries have not moved" in text
    assert "R-hat and effective sample sizes are not known" in text
    assert np.isnan(report.r_hat)
    for index in range(3):
        figures = np.array([1.0, 900.0, 900.0, 0.1])
        figures[index] = np.nan
        assert "are not known" in " ".join(_report.describe_mixing(draws, figures, 3))


def test_a_report_names_chains_that_start_at_one_point():
    """At one point R-hat certifies one mode alone, which is said; from several nothing is."""
    for starts, is_one in ((np.zeros((4, 3)), True), (GOOD[:, 0], False)):
        report = report_of(samples_of(GOOD, starts=jnp.float32(starts)))[1]
        assert any("started at the same point" in line for line in report.not_checked) == is_one


def kernel_state(**changes):
    """Return a state of constant SGD after many steps, with a faulty kernel."""
    state = kernels.constant_sgd(batch_size=10).init(jnp.zeros(3))
    sound = {"estimates": 500, "stability": 0.1, "count": 20_000, "noise_ratio": 10.0}
    return optax.tree.set(state, **{name: jnp.array(x) for name, x in (sound | changes).items()})


FAULTS_OF_CONSTANT_SGD = {
    "The kernel has not converged": {"drift": 0.5},
    "about 1.6 times what it should be": {"stability": 0.8},
    "up to 64% too large, in others up to 82% too small": {"correlation": [0.1, 1.7]},
    "up to 21% too large": {"correlation": [0.0, 11.5], "noise_ratio": 0.02 / 0.98},
    "In 3 of the steps of a chain, some entries of the gradients were not finite": {"left_out": 3},
    "In 3 of the steps of a chain, the updates that constant_sgd got were not": {"altered": 3},
    "The temperature is 0": {"temperature": 0.0},
}


def test_faults_in_a_state_of_constant_sgd_are_reported():
    """One fault each, by its words; the sound state has none."""
    assert report_of(samples_of(GOOD, kernel_state()))[0] == ""
    for says, changes in FAULTS_OF_CONSTANT_SGD.items():
        text, report = report_of(samples_of(GOOD, kernel_state(**changes)))
        assert says in text
        assert len(report.warnings) == 1
    text, report = report_of(samples_of(GOOD * [1.0, 0.0, 1.0], kernel_state()))
    assert "1 of 3 entries have not moved" in text
    assert report.unmoved == 1
    text, _ = report_of(samples_of(GOOD, (kernel_state(), kernel_state())))
    assert "The optimizer has 2 samplers for different params" in text


def test_larger_batches_are_advised_if_their_noise_limits_the_slowest_steps():
    """The noise and the curvature of the slowest direction allow steps 40 times as long: as long as 400
    effective draws need, at most N. Good draws, and directions that the curvature limits, need none."""
    scale, limit = 2 * 10 / 1000, 0.2

    def text_of(ratio, values, num_data=1000):
        # r = Lambda (1 + 1 / rho) c / (s a), with rho = 10
        noise = jnp.float32([1e-3, 1.0, 1e-3])
        curvature = jnp.full(3, 1.1 * limit / (scale * ratio))
        state = kernel_state(
            noise=noise, curvature=curvature, temperature=scale * num_data / 20, limit=limit,
            num_data=num_data,
        )  # fmt: skip
        return report_of(samples_of(values, state))

    slow = autoregressive(0.9, (4, 600, 3))
    text, report = text_of(39.99, slow)
    most = np.ceil(10 * 400 / min(report.ess_bulk, report.ess_tail))
    assert 20 < most < 400
    assert (
        f"batches of {most:.0f} examples instead of 10, these steps are {most / 10:.2g} times"
        in text
    )
    assert (
        "batches of 400 examples instead of 10, these steps are 40 times"
        in text_of(39.99, autoregressive(0.99, (4, 600, 3)))[0]
    )
    slowest = autoregressive(0.99, (4, 600, 3))
    assert "batches of 300 examples" in text_of(39.99, slowest, num_data=300)[0]
    assert "batches" not in text_of(1.5, slow)[0]
    assert text_of(40, GOOD)[0] == ""


@pytest.mark.parametrize(
    ("preconditioner", "noise", "norm", "warning", "unchecked"),
    [
        (None, None, None, "", "due to the batches' noise (not known here)"),
        (None, 1e-3, 1e-3, "", ""),
        (None, 8.0, 8.0, "The noise of the batches may make the variance", ""),
        (None, 1e-3, None, "", "of the batches: its trace is used as a bound"),
        (2.0, 8.0, 8.0, "", "not checked with a preconditioner"),
    ],
)
def test_noise_in_a_state_of_sgld_is_reported(preconditioner, noise, norm, warning, unchecked):
    """Of the noise of the batches, by its maximum eigenvalue or its trace, if it is known."""
    w = jnp.zeros(3)
    scales = None if preconditioner is None else jnp.full(3, preconditioner)
    tx = optperm.sgld(1e-3, 100, preconditioner=scales)
    _, state = tx.update(w, tx.init(w), w)
    known = {} if noise is None else {"batch_noise": np.full(3, noise), "batch_noise_norm": norm}
    text, report = report_of(samples_of(GOOD, state)._replace(**known))
    assert text.startswith(warning)
    assert len(report.warnings) == bool(warning)
    assert unchecked in " ".join(report.not_checked)
    assert (len(report.not_checked) == 1) == (not unchecked)


def test_warnings_of_all_states_are_reported():
    """In a loop of the user, SVRG before a sampler has no snapshot: the report warns."""
    tx, w = optax.chain(optperm.svrg(), optperm.sgld(1e-3, 100)), jnp.zeros(3)

    def step(w, state, key):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            updates, state = tx.update(w, state, w, grad_fn=lambda w: w)
        return w + updates, state

    for take, found in ((False, 1), (True, 0)):
        state = optperm.variance.take_snapshot(tx.init(w), w, w) if take else tx.init(w)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            samples = optperm.bayes.draw_samples(
                step, w, state, 0, num_chains=2, num_draws=20, thinning=20
            )
        told = [str(each.message) for each in caught]
        for texts in (told, optperm.bayes.posterior_report(samples).warnings):
            assert sum("svrg has no snapshot yet" in text for text in texts) == found


def test_infinite_draws_of_any_optimizer_are_named():
    step = lambda w, opt_state, key: (w * -3.0, opt_state)  # noqa: E731
    with pytest.warns(UserWarning, match="The chains diverge"):
        optperm.bayes.draw_samples(
            step, jnp.ones(1), (), jax.random.key(0), num_chains=2, num_draws=9, thinning=50
        )


def test_infinite_draws_of_a_sampler_are_named_without_warnings_of_numpy():
    draws = GOOD.copy()
    draws[0, 50:, 1] = np.inf
    draws[1, 60:, 2] = np.nan
    text, report = report_of(samples_of(draws, kernel_state()))
    assert text.startswith("The chains diverge")
    assert "invalid value" not in text
    assert report.unmoved == 0


def test_params_of_16_bits_that_are_too_coarse_are_named():
    draws = 100 + 0.1 * autoregressive(0.3, (4, 600, 1))
    samples = samples_of(draws)._replace(last_params=jnp.full((4, 1), 100, jnp.bfloat16))
    assert "the spacing of bfloat16 numbers" in report_of(samples)[0]


def test_foreign_draws_are_taken_as_samples_and_refused_as_anything_else():
    """The message makes the Samples that the report takes."""
    draws = np.float32(GOOD)
    for wrong in (draws, {"w": draws}, [draws], optperm.bayes.Ensemble(draws)):
        name = type(wrong).__name__
        with pytest.raises(TypeError, match=f"must be Samples, got {name}.*Samples\\(draws, "):
            optperm.bayes.posterior_report(wrong)
    with pytest.raises(ValueError, match="contains no draws"):
        optperm.bayes.posterior_report(samples_of(draws)._replace(params=()))
    tree = {"w": draws, "b": draws[..., 0]}
    last = jax.tree.map(lambda x: x[:, -1], tree)
    report = optperm.bayes.posterior_report(optperm.bayes.Samples(tree, last, (), 500, 1))
    assert report.warnings == ()
    assert "posterior: the states of the sampler are missing" in " ".join(report.not_checked)


@pytest.mark.parametrize(
    ("decay", "shape", "runs", "most"),
    [(0.0, (4, 100, 34), 40, 6), (0.9, (4, 400, 1), 40, 6), (0.8, (1, 150, 200), 100, 11)],
)
def test_split_r_hats_of_right_chains_are_below_their_limits(decay, shape, runs, most):
    """In 95 of 100 runs: at most as many are above as a binomial law has in 99 of 100 tests.

    The two halves of one chain have some 14 degrees of freedom by the autocorrelation time of 9 draws.
    """
    above, entries = 0, shape[2]
    for seed in range(runs):
        values = autoregressive(decay, shape, seed)
        above += np.any(split_r_hats(values) > r_hat_limits(values, entries))
    assert above <= most


def test_of_many_entries_the_ones_that_have_mixed_least_are_ranked():
    """The warnings cover all entries: one drifting entry among many, and the effective draws."""
    draws = autoregressive(0.3, (4, 400, 60))
    draws[..., 17] = autoregressive(0.99, (4, 400))
    draws[..., 40] = 1.0
    samples = samples_of(draws)
    report = _report.judge(samples, most_ranked=5)
    assert report.warnings == optperm.bayes.posterior_report(samples).warnings
    assert len(report.warnings) == 3
    assert report.unmoved == 1
