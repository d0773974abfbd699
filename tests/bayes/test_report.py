"""What a report says, of draws whose law is known and of samplers in the states that it warns of."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
import scipy.stats

import optperm
from optperm.bayes import _report
from optperm.bayes._convergence import effective_sizes, r_hat_limits, r_hats, split_r_hats
from optperm.core.states import find_state


def samples_of(draws, state=(), starts=None):
    numbers = jnp.int32(draws.shape[1]), jnp.int32(1)
    return optperm.bayes.Samples(
        jnp.float32(draws), jnp.float32(draws[:, -1]), state, *numbers, starts
    )


def report_of(samples):
    """The warnings of a report as one text, and the report."""
    report = optperm.bayes.posterior_report(samples)
    assert all(f"warning: {text}" in str(report) for text in report.warnings)
    return " ".join(report.warnings), report


def autoregressive(decay, shape, seed=0):
    """Draws that correlate by a power of the decay."""
    noise = np.random.default_rng(seed).normal(size=shape)
    draws = np.zeros(shape)
    draws[:, 0] = noise[:, 0]
    for t in range(1, shape[1]):
        draws[:, t] = decay * draws[:, t - 1] + np.sqrt(1 - decay**2) * noise[:, t]
    return draws


def test_r_hat_is_that_of_ranks():
    """Against its definition by hand, for location and for scale; and infinite moments do not matter."""
    rng = np.random.default_rng(0)
    draws = rng.standard_cauchy(size=(4, 200, 2)) + np.array([0.0, 2.0]) * np.arange(4).reshape(
        4, 1, 1
    )
    halves = draws.reshape(8, 100, 2)

    def by_hand(values):
        scores = np.stack(
            [
                scipy.special.ndtri((scipy.stats.rankdata(values[..., k]) - 0.375) / 800.25)
                for k in range(2)
            ],
            axis=-1,
        ).reshape(8, 100, 2)
        within = scores.var(axis=1, ddof=1).mean(axis=0)
        return np.sqrt(0.99 + scores.mean(axis=1).var(axis=0, ddof=1) / within)

    folded = np.abs(halves - np.median(halves.reshape(-1, 2), axis=0))
    np.testing.assert_allclose(
        r_hats(draws), np.maximum(by_hand(halves), by_hand(folded)), rtol=1e-6
    )
    assert r_hats(draws)[1] > 1.1 > r_hats(draws)[0]
    scales = rng.normal(size=(4, 200, 1)) * np.array([1.0, 1.0, 1.0, 3.0]).reshape(4, 1, 1)
    assert r_hats(scales)[0] > 1.1


@pytest.mark.parametrize("decay", [0.0, 0.8, -0.5])
def test_effective_sizes_are_those_of_autoregressions(decay):
    """n (1 - decay) / (1 + decay), which for decay below zero is more than n."""
    found = effective_sizes(autoregressive(decay, (8, 2000, 20)))
    exact = 16_000 * (1 - decay) / (1 + decay)
    assert found.mean() == pytest.approx(exact, rel=0.1)


def test_figures_and_limits():
    """Good draws pass; too few, drifting or diverging ones are named as that, and nothing else is."""
    text, report = report_of(samples_of(autoregressive(0.3, (4, 1000, 3))))
    assert text == ""
    out = str(report)
    assert f"{report.r_hat:.3f}" in out
    assert "not checked: Whether batches are drawn with replacement, and no transformation" in out
    assert "posterior: the states of the sampler are missing" in out
    assert report.mcse == pytest.approx(1 / np.sqrt(4000 * 0.7 / 1.3), rel=0.15)
    assert "effective sample size" in report_of(samples_of(autoregressive(0.9, (4, 600, 3))))[0]
    drifting = (
        np.random.default_rng(0).normal(size=(1, 200, 1)) + np.linspace(0, 5, 200)[None, :, None]
    )
    assert "The maximum split R-hat" in report_of(samples_of(drifting))[0]
    wild = np.exp(np.linspace(0, 30, 100))[None, :, None] * np.ones((2, 1, 1))
    assert report_of(samples_of(wild))[0].startswith("The chains diverge")
    assert "R-hat" not in report_of(samples_of(wild))[0]
    # A chain that stands still, and then moves, has no width that could grow
    late = autoregressive(0.3, (4, 100, 1))
    late[:, :50] = 0.0
    assert "diverge" not in report_of(samples_of(late))[0]
    assert (
        "needs at least 4 draws per chain, got 3: draw more"
        in report_of(samples_of(np.ones((2, 3, 1))))[0]
    )
    assert report_of(samples_of(np.ones((2, 1, 3))))[1].unmoved == 0
    held = autoregressive(0.3, (4, 100, 2))
    for chains, unmoved in ((1, 0), (slice(4), 1)):  # an entry that any chain moves has moved
        held[chains, :, 1] = 0.5
        assert report_of(samples_of(held))[1].unmoved == unmoved


def test_stuck_draws_of_any_kind_are_warned_of():
    """Without a state of a sampler too, and no figure that is not a number is read as a good one."""
    draws = autoregressive(0.3, (4, 500, 3))
    draws[..., 1] = np.arange(4.0)[:, None]  # each chain stands still, at a place of its own
    text, report = report_of(samples_of(draws))
    assert "1 of 3 entries have not moved in any chain" in text
    assert "entries that never moved       1\n" in str(report)
    text, report = report_of(samples_of(np.ones((4, 500, 3))))
    assert "3 of 3 entries have not moved" in text
    assert "R-hat and effective sample sizes are not known" in text
    assert np.isnan(report.r_hat)
    for figures in (
        (np.nan, 900.0, 900.0, 0.1),
        (1.0, np.nan, 900.0, 0.1),
        (1.0, 900.0, np.nan, 0.1),
    ):
        assert "are not known" in " ".join(_report._judge_mixing(draws, figures, 3))


def test_starts_are_told():
    """At one point R-hat certifies one mode alone, which is said; from several nothing is."""
    draws = autoregressive(0.3, (4, 1000, 3))
    for starts, is_one in ((np.zeros((4, 3)), True), (draws[:, 0], False)):
        report = report_of(samples_of(draws, starts=jnp.float32(starts)))[1]
        assert any("started at the same point" in line for line in report.not_checked) == is_one


def kernel_state(**changes):
    """A state of constant SGD after its warm-up, with a kernel in which something is amiss."""
    tx = optperm.constant_sgd(1000, 10, preconditioner="diagonal")
    state = find_state(tx.init(jnp.zeros(3)), optperm.bayes.ConstantSgdState, method="constant_sgd")
    kernel = state.kernel._replace(
        is_ready=jnp.bool_(True), estimates=jnp.int32(500), stability=jnp.float32(0.1)
    )
    fields = set(state._fields)
    inside = {name: jnp.asarray(x) for name, x in changes.items() if name not in fields}
    state = state._replace(
        count=jnp.int32(20_000), steps=jnp.int32(16_000), scale=jnp.float32(0.01),
        kernel=kernel._replace(**inside),
    )  # fmt: skip
    return state._replace(**{name: jnp.asarray(x) for name, x in changes.items() if name in fields})


def test_what_a_state_of_constant_sgd_tells():
    """One fault each, by its words; the sound state has none."""
    draws = autoregressive(0.3, (4, 1000, 3))
    assert report_of(samples_of(draws, kernel_state()))[0] == ""
    for changes, says in (
        (
            {"count": 5000, "steps": 1000},
            "still learning when the draws began (steps left: 4000): pass",
        ),
        ({"steps": 0}, "No step has sampled"),
        ({"drift": 0.5}, "The warm-up has not converged"),
        ({"stability": 0.8}, "about 1.7 times what it should be"),
        ({"correlation": [0.1, 1.7]}, "up to 64% too large, in others up to 82% too small"),
        ({"correlation": [0.0, 11.5], "noise_ratio": 0.02 / 0.98}, "up to 21% too large"),
        ({"uneven": 900}, "not the mean of its examples' gradients"),
        (
            {"left_out": 3},
            "In 3 of the steps of a chain, some entries of the gradients were not finite",
        ),
        ({"scale": 0.0}, "The temperature is 0"),
    ):
        text, report = report_of(samples_of(draws, kernel_state(**changes)))
        assert says in text
        assert len(report.warnings) == 1
    text, report = report_of(samples_of(draws * np.array([1.0, 0.0, 1.0]), kernel_state()))
    assert report.unmoved == 1
    assert "1 of 3 entries have not moved" in text
    two = (kernel_state(), kernel_state())
    (text, _) = report_of(samples_of(draws, two))
    assert "The optimizer has 2 samplers for different params" in text


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
def test_what_a_state_of_sgld_tells(preconditioner, noise, norm, warning, unchecked):
    """Of the noise of the batches, by its maximum eigenvalue or its trace, if it is known."""
    w = jnp.zeros(3)
    scales = None if preconditioner is None else jnp.full(3, preconditioner)
    tx = optperm.sgld(1e-3, 100, preconditioner=scales)
    _, state = tx.update(w, tx.init(w), w)
    samples = samples_of(autoregressive(0.3, (4, 1000, 3)), state)
    if noise is not None:
        samples = samples._replace(batch_noise=np.full(3, noise), batch_noise_norm=norm)
    text, report = report_of(samples)
    assert text.startswith(warning)
    assert len(report.warnings) == bool(warning)
    assert unchecked in " ".join(report.not_checked)
    assert (len(report.not_checked) == 1) == (not unchecked)


def test_infinite_draws_of_any_optimizer_are_named():
    step = lambda w, opt_state, key: (w * -3.0, opt_state)  # noqa: E731
    with pytest.warns(UserWarning, match="The chains diverge"):
        optperm.bayes.draw_samples(
            step, jnp.ones(1), (), jax.random.key(0), num_chains=2, num_draws=9, thinning=50
        )


def test_infinite_draws_of_a_sampler_are_named_without_warnings_of_numpy():
    draws = autoregressive(0.3, (4, 100, 3))
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
    draws = np.float32(autoregressive(0.3, (4, 500, 3)))
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


def test_bias_of_langevin_steps_is_half_of_reach_over_the_minimum_variance():
    """1 / (1 - h lambda / 2) is 1 + h lambda / 2 to first order, and h lambda is reach / Var."""
    values = np.random.default_rng(0).normal(size=(2, 50, 2)) * [1.0, 3.0]
    state = optperm.sgld(0.1, 10).init(jnp.zeros(2))._replace(reach=jnp.float32(0.02))
    minimum = values.var(axis=(0, 1)).min()
    found = _report.langevin_biases(values, [state], samples_of(values))[0]
    np.testing.assert_allclose(found, 0.02 / (2 * minimum), rtol=1e-5)


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


def test_chains_in_two_modes_are_above_their_limits_and_short_ones_are_not_told_of():
    apart = autoregressive(0.5, (4, 200, 3)) + np.array([0, 0, 3.0, 3.0]).reshape(4, 1, 1)
    assert np.all(split_r_hats(apart) > r_hat_limits(apart, 3))
    assert "have not mixed, or are in several modes" in report_of(samples_of(apart))[0]
    slow = autoregressive(0.98, (4, 60, 3))
    assert np.all(np.isinf(r_hat_limits(slow, 3)))
    assert "too few draws to tell whether the chains have mixed" in report_of(samples_of(slow))[0]


def test_of_many_entries_the_ones_that_have_mixed_least_are_ranked():
    """The sentences are those of all entries: one that drifts among many, and the effective draws."""
    draws = autoregressive(0.3, (4, 400, 60))
    draws[..., 17] = autoregressive(0.99, (4, 400))
    draws[..., 40] = 1.0
    samples = samples_of(draws)
    report = _report.judge(samples, most_ranked=5)
    assert report.warnings == optperm.bayes.posterior_report(samples).warnings
    assert len(report.warnings) == 3
    assert report.unmoved == 1
