"""SGLD and SGHMC at finite steps, against the exact laws of Gaussians, and their recursions."""

import functools

import chex
import jax
import jax.numpy as jnp
import loops
import numpy as np
import optax
import pytest
import support

import optperm
from optperm.bayes._report import langevin_biases

N = 100
HESSIAN = np.array([[1.0, 0.4], [0.4, 0.5]])
ROOT = np.array([[0.2, 0.0], [-0.1, 0.1]])  # of the covariance of the batch's gradient
M = np.array([3.0, 0.5])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The length of the steps")
@pytest.mark.parametrize(
    ("tx", "temperature", "h", "added", "momentum"),
    [
        # H = eta N, the decay 1 - alpha, and noise of 2 (alpha - beta) T / (eta N^2)
        (optperm.sghmc(2e-3, N, 0.5, 1.5, 0.1), 1.5, 0.2, 2 * 0.4 * 1.5 / 20, 0.5),
        # H = eps N M / 2, and noise of 4 T / (eps N^2) M^-1
        pytest.param(
            *(optperm.sgld(4e-3, N, 2.5, jnp.float32(M)), 2.5, 0.2 * M, 4 * 2.5 / (40 * M), 0.0),
            marks=pytest.mark.exhaustive,
        ),
    ],
    ids=["sghmc", "sgld"],
)
def test_chains_have_their_exact_law(tx, temperature, h, added, momentum):
    """That of momentum SGD with more noise, which of steps that are not small is not the posterior."""
    noise = ROOT @ ROOT.T + added * np.eye(2)
    wanted = np.asarray(optperm.bayes.stationary_covariance(h, HESSIAN, noise, momentum=momentum))
    deviations, hessian, root = np.sqrt(np.diag(wanted)), jnp.float32(HESSIAN), jnp.float32(ROOT)

    def evaluate(w, key):
        return hessian @ w + root @ jax.random.normal(key, (2,)), {}

    step, w = loops.make_step(tx, evaluate), jnp.zeros(2)
    counts = {"num_chains": 64, "num_draws": 250, "thinning": 25, "burn_in": 500}
    samples = optperm.bayes.draw_samples(step, w, tx.init(w), jax.random.key(0), **counts)
    flat = np.asarray(samples.params, np.float64).reshape(-1, 2) / deviations
    # Within the Monte Carlo error of this number of draws
    assert np.abs(np.cov(flat.T) - wanted / np.outer(deviations, deviations)).max() < 0.04
    assert np.abs(flat.mean(axis=0)).max() < 0.04
    posterior = temperature * np.linalg.inv(N * HESSIAN)
    assert np.abs(np.diag(wanted) / np.diag(posterior) - 1).max() > 0.1


def test_updates_are_those_of_the_equations():
    """At temperature zero, by a schedule of the step; what is not finite stays, and is counted."""
    w, g = jnp.array([1.0, 2.0, 3.0]), jnp.array([0.5, -1.0, jnp.nan])

    def schedule(count):
        return jnp.where(count < 1, 0.1, 0.05)

    for tx, decay, factor in (
        (optperm.sgld(schedule, 10, temperature=0.0), 0.0, 10 / 2),
        (optperm.sghmc(schedule, 10, 0.25, temperature=0.0), 1 - 0.25, 10),
    ):
        state, v, update = tx.init(w), np.zeros(2), jax.jit(tx.update)
        for size in (0.1, 0.05):
            updates, state = update(g, state, w)
            v = decay * v - factor * size * np.array([0.5, -1.0])
            np.testing.assert_allclose(updates, [*v, 0.0], rtol=1e-6)
        assert int(state.left_out) == 2
    np.testing.assert_allclose(state.velocity, [*v, 0.0], rtol=1e-6)
    # A velocity stays through a step without a finite gradient.
    _, state = update(np.full(3, np.nan, np.float32), state, w)
    np.testing.assert_allclose(state.velocity, [*v, 0.0], rtol=1e-6)


def test_injected_noise_is_of_the_size_of_the_equations():
    """Where the gradient is zero, the same numbers xi times sqrt(eps T M), or sqrt(2 (a - b) eta T)."""
    w, g = jnp.ones(5), jnp.zeros(5)

    def noise(tx):
        return jax.jit(tx.update)(g, tx.init(w), w)[0]

    xi = noise(optperm.sgld(1.0, 10))
    assert np.std(xi) > 0.1
    for tx, size in (
        (optperm.sgld(0.4, 10, 9.0), np.sqrt(3.6)),
        (optperm.sgld(0.4, 10, 9.0, 4.0 * w), np.sqrt(14.4)),
        (optperm.sghmc(0.1, 10, 0.5, 3.0), np.sqrt(0.3)),
        (optperm.sghmc(0.1, 10, 0.5, 3.0, noise_estimate=0.2), np.sqrt(0.18)),
    ):
        np.testing.assert_allclose(noise(tx), size * xi, rtol=1e-5)


def test_control_variates_take_the_noise_of_the_batches_away():
    """With SVRG before SGLD, steps near a snapshot at the mode have the full gradient."""
    data, plain = 3.0 * np.asarray(support.normal((N, 2))), optperm.sgld(1e-2, N)

    def loss_fn(w, batch):
        return 0.5 * jnp.mean(jnp.sum((batch - w[None]) ** 2, axis=-1))

    @jax.jit
    def updates_of(data):
        mode = jnp.mean(data, axis=0)
        tx = optax.chain(optperm.svrg(), plain)
        state = optperm.variance.take_snapshot(tx.init(mode), mode, jax.grad(loss_fn)(mode, data))
        w = mode + 0.3
        e = optperm.evaluate(loss_fn, w, data[:3])
        updates, _ = tx.update(e.grad, state, w, **e.extra_args)
        exact, _ = plain.update(jax.grad(loss_fn)(w, data), plain.init(w), w)
        noisy, _ = plain.update(e.grad, plain.init(w), w)
        return updates, exact, noisy

    updates, exact, noisy = updates_of(data)
    np.testing.assert_allclose(updates, exact, rtol=1e-4, atol=1e-5)
    assert not np.allclose(noisy, exact, rtol=0.05)


def test_preconditioner_of_all_params_is_masked_as_they_are():
    """Its own part, with the updates of that part alone."""
    w, m = {"a": jnp.ones(2), "b": jnp.ones(3)}, {"a": jnp.float32(M), "b": jnp.ones(3)}
    alone = optperm.sgld(1e-2, N, preconditioner={"a": m["a"]})
    tx = optax.masked(optperm.sgld(1e-2, N, preconditioner=m), {"a": True, "b": False})

    @jax.jit
    def updates_of(w):
        a = {"a": w["a"]}
        return alone.update(a, alone.init(a), a)[0], tx.update(w, tx.init(w), w)[0]

    wanted, updates = updates_of(w)
    chex.assert_trees_all_close(updates["a"], wanted["a"], rtol=1e-6)


# (sampler, h of theta' = theta - h (g + noise), variance of the injected noise, decay of the momentum)
STEPS = {
    "sgld": lambda e, t: (optperm.sgld(e, N, t), e * N / 2, 4 * t / (e * N**2), 0.0),
    "sghmc": lambda e, t: (optperm.sghmc(e, N, 0.3, t), e * N, 2 * 0.3 * t / (e * N**2), 0.7),
}


@pytest.mark.parametrize(
    ("name", "size", "temperature"), support.in_turns(STEPS, [1e-3, 0.015], [2.5, 1.0])
)
def test_biases_by_steps_and_by_the_noise_of_the_batches_are_exact(name, size, temperature):
    """Of a parabola, whose stationary variance at any stable step solves the Lyapunov equation."""
    tx, h, injected, momentum = STEPS[name](size, temperature)

    def variance(noise):
        law = optperm.bayes.stationary_covariance(
            h, np.eye(1), noise * np.eye(1), momentum=momentum
        )
        return float(law[0, 0])

    w = jnp.zeros(1)
    _, state = tx.update(w, tx.init(w), w)
    without, with_batches = variance(injected), variance(injected + 1e-2)
    values = np.sqrt(without) * np.array([-1.0, 1.0]).reshape(1, 2, 1)
    samples = optperm.bayes.Samples(values, values[:, -1], state, 2, 1)
    steps, batches = langevin_biases(values, [state], samples)
    np.testing.assert_allclose(steps, without * N / temperature - 1, rtol=1e-5)
    assert batches is None
    for norm, factor in ((1e-2, 1.0), (None, 3.0)):  # without the maximum eigenvalue, the trace
        noise = np.float32([1e-2, 2e-2])
        given = samples._replace(batch_noise=noise, batch_noise_norm=norm)
        found = langevin_biases(values, [state], given)[1]
        np.testing.assert_allclose(found, factor * (with_batches / without - 1), rtol=1e-5)


@pytest.mark.parametrize(
    "make",
    [
        optperm.sgld,
        pytest.param(functools.partial(optperm.sghmc, friction=0.5), marks=pytest.mark.exhaustive),
    ],
)
def test_step_sizes_and_temperatures_of_draws_are_means_over_their_steps(make):
    """Of the steps from the draw before, for shared and for own states, in one run and in parts."""
    tx = make(lambda t: 1e-3 / jnp.float32(1 + t), N, temperature=lambda t: 1.0 + jnp.float32(t))

    def step(w, state, key):
        updates, state = tx.update(w, state, w)
        return w + updates, state

    run = functools.partial(optperm.bayes.draw_samples, step, key=0, num_chains=2, thinning=3)
    samples = run(jnp.zeros(2), tx.init(jnp.zeros(2)), num_draws=4, burn_in=5)
    steps = 5 + np.arange(12.0).reshape(4, 3)
    np.testing.assert_allclose(
        samples.step_sizes, [(1e-3 / (1 + steps)).mean(axis=1)] * 2, rtol=1e-5
    )
    np.testing.assert_allclose(samples.temperatures, [1 + steps.mean(axis=1)] * 2, rtol=1e-5)
    last = samples.last_params, samples.last_opt_state
    more = run(*last, num_draws=1, stacked=True, first_step=samples.next_step)
    np.testing.assert_allclose(more.temperatures, 2 * [[19.0]], rtol=1e-5)


@pytest.mark.filterwarnings("ignore:The length of the steps")
@pytest.mark.parametrize(
    "step_size",
    [
        pytest.param(1.6e-3, marks=pytest.mark.exhaustive),
        lambda t: 8e-4 * (1 + jnp.cos(jnp.float32(t) / 80)),
    ],
)
def test_report_judges_the_steps_of_all_draws(step_size):
    """Against the increase of the variance itself, also for cycles that end with short steps."""
    tx = optperm.sgld(step_size, 1000)

    def step(w, state, key):
        updates, state = tx.update(w - 3.0, state, w)
        return w + updates, state

    samples = optperm.bayes.draw_samples(
        step, jnp.array(3.0), tx.init(jnp.array(3.0)), 0, num_chains=64, num_draws=250, thinning=50
    )
    report = optperm.bayes.posterior_report(samples)
    increase = 1000 * float(np.asarray(samples.params).var()) - 1
    assert report.step_bias == pytest.approx(increase, rel=0.2)
    assert any("The length of the steps" in text for text in report.warnings)


@pytest.mark.filterwarnings("ignore:The temperature is 0")
def test_temperature_of_zero_is_named():
    w = jnp.ones(2)
    for tx in (optperm.sgld(1e-3, N, 0.0), optperm.sghmc(1e-3, N, 0.5, 0.0)):
        _, state = tx.update(w, tx.init(w), w)
        assert "temperature is 0 in the last step" in state.warnings()[0]
        assert tx.init(w).warnings() == []
    tx = optperm.sgld(1e-3, N, lambda t: jnp.where(t < 10, 0.0, 1.0))

    def step(w, state, key):
        updates, state = tx.update(w, state, w)
        return w + updates, state

    samples = optperm.bayes.draw_samples(step, w, tx.init(w), 0, num_chains=2, num_draws=40)
    report = optperm.bayes.posterior_report(samples)
    assert any("temperature is 0 in a fraction 0.25 of the draws" in x for x in report.warnings)
    assert (report.step_bias, report.batch_bias) == (None, None)


def test_states_hold_no_numbers_of_a_report():
    """SGLD none for a parameter, SGHMC its velocity; with a preconditioner nothing is told of noise."""
    w = jnp.zeros(1000)
    for tx, words in ((optperm.sgld(1e-4, N), 0), (optperm.sghmc(1e-4, N, 0.5), 1)):
        state = tx.init(w)
        assert sum(leaf.size // 1000 for leaf in jax.tree.leaves(state)) == words
    tx = optperm.sgld(1e-4, N, preconditioner=2.0 * jnp.ones(1000))
    _, state = tx.update(w, tx.init(w), w)
    assert float(state.step_size) == 0.0
