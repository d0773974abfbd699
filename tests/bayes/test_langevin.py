"""SGLD and SGHMC at finite steps, against the exact laws of Gaussians, and their recursions."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optperm
from optperm.bayes._biases import langevin_biases

N = 100
HESSIAN = np.array([[1.0, 0.4], [0.4, 0.5]])
ROOT = np.array([[0.2, 0.0], [-0.1, 0.1]])  # of the covariance of the batch's gradient


def draws(tx):
    """Of 64 chains on a quadratic with Gaussian noise, flat."""
    hessian, root = jnp.float32(HESSIAN), jnp.float32(ROOT)

    def step(w, opt_state, key):
        g = hessian @ w + root @ jax.random.normal(key, (2,))
        updates, opt_state = tx.update(g, opt_state, w)
        return optax.apply_updates(w, updates), opt_state

    w = jnp.zeros(2)
    counts = {"num_chains": 64, "num_draws": 250, "thinning": 25, "burn_in": 500}
    samples = optperm.bayes.draw_samples(step, w, tx.init(w), jax.random.key(0), **counts)
    return np.asarray(samples.params, np.float64).reshape(-1, 2)


def assert_has_law(flat, wanted):
    """Asserts moments within what so many draws may be off."""
    sizes = np.sqrt(np.outer(np.diag(wanted), np.diag(wanted)))
    assert np.abs((np.cov(flat.T) - wanted) / sizes).max() < 0.04
    assert np.abs(flat.mean(axis=0) / np.sqrt(np.diag(wanted))).max() < 0.04


@pytest.mark.filterwarnings("ignore:The length of the steps")
def test_sgld_has_its_exact_law():
    """Constant SGD with H = eps N M / 2, to whose noise 4 T / (eps N^2) M^-1 is added; at steps that are
    not small, and not at any of the posterior."""
    epsilon, temperature, m = 4e-3, 2.5, np.array([3.0, 0.5])
    h = epsilon * N / 2 * m
    noise = ROOT @ ROOT.T + np.diag(4 * temperature / (epsilon * N**2) / m)
    wanted = np.asarray(optperm.bayes.stationary_covariance(h, HESSIAN, noise))
    assert_has_law(draws(optperm.sgld(epsilon, N, temperature, jnp.float32(m))), wanted)
    posterior = temperature * np.linalg.inv(N * HESSIAN)
    assert np.abs(np.diag(wanted) / np.diag(posterior) - 1).max() > 0.1


@pytest.mark.filterwarnings("ignore:The length of the steps")
def test_sghmc_has_its_exact_law():
    """Momentum SGD with H = eta N and the decay 1 - alpha, to whose noise 2 (alpha - beta) T / (eta N^2)
    is added."""
    eta, temperature, friction, noise_estimate = 2e-3, 1.5, 0.5, 0.1
    added = 2 * (friction - noise_estimate) * temperature / (eta * N**2)
    wanted = np.asarray(
        optperm.bayes.stationary_covariance(
            eta * N, HESSIAN, ROOT @ ROOT.T + added * np.eye(2), momentum=1 - friction
        )
    )
    tx = optperm.sghmc(eta, N, friction, temperature, noise_estimate)
    assert_has_law(draws(tx), wanted)


def test_updates_are_those_of_the_equations():
    """By a schedule of the step, without noise at temperature zero; what is not finite stays, and is
    counted."""
    w, g = jnp.array([1.0, 2.0, 3.0]), jnp.array([0.5, -1.0, jnp.nan])

    def schedule(count):
        return jnp.where(count < 1, 0.1, 0.05)

    tx = optperm.sgld(schedule, 10, temperature=0.0)
    state = tx.init(w)
    for epsilon in (0.1, 0.05):
        updates, state = tx.update(g, state, w)
        np.testing.assert_allclose(updates, [-epsilon * 5 * 0.5, epsilon * 5, 0.0], rtol=1e-6)
    assert int(state.left_out) == 2
    tx = optperm.sghmc(schedule, 10, 0.25, temperature=0.0)
    state, v = tx.init(w), np.zeros(2)
    for eta in (0.1, 0.05):
        updates, state = tx.update(g, state, w)
        v = 0.75 * v - eta * 10 * np.array([0.5, -1.0])
        np.testing.assert_allclose(updates, [*v, 0.0], rtol=1e-6)
    np.testing.assert_allclose(state.velocity, [*v, 0.0], rtol=1e-6)
    assert int(state.left_out) == 2


def test_injected_noise_is_of_the_size_of_the_equations():
    """Where the gradient is zero, the same numbers xi times sqrt(eps T M), or sqrt(2 (a - b) eta T)."""
    w, g = jnp.ones(5), jnp.zeros(5)

    def noise(tx):
        return tx.update(g, tx.init(w), w)[0]

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
    """SVRG in front of SGLD: near a snapshot at the mode steps are those of whole gradients."""
    rng = np.random.default_rng(0)
    data = jnp.float32(rng.normal(size=(N, 2)) * 3.0)

    def loss_fn(w, batch):
        return 0.5 * jnp.mean(jnp.sum((batch - w[None]) ** 2, axis=-1))

    mode = jnp.mean(data, axis=0)
    plain = optperm.sgld(1e-2, N)
    tx = optax.chain(optperm.svrg(), plain)
    state = optperm.variance.take_snapshot(tx.init(mode), mode, jax.grad(loss_fn)(mode, data))
    w = mode + 0.3
    e = optperm.evaluate(loss_fn, w, data[:3])
    updates, _ = tx.update(e.grad, state, w, **e.extra_args)
    exact, _ = plain.update(jax.grad(loss_fn)(w, data), plain.init(w), w)
    noisy, _ = plain.update(e.grad, plain.init(w), w)
    np.testing.assert_allclose(updates, exact, rtol=1e-4, atol=1e-5)
    assert not np.allclose(noisy, exact, rtol=0.05)


def test_frictions_and_preconditioners_that_do_not_fit_are_refused():
    w = jnp.ones(2)
    for make, message in (
        (
            lambda: optperm.sghmc(1e-3, N, 0.1, noise_estimate=0.2),
            r"noise_estimate must be in \[0, 0.1\]",
        ),
        (lambda: optperm.sghmc(1e-3, N, 1e-9), r"1 - friction.* must be in \[0, 1\) in float32"),
        (lambda: optperm.sgld(1e-3, N, preconditioner=0.0 * w), "preconditioner must be above 0"),
        (
            lambda: optperm.sgld(1e-3, N, preconditioner=jnp.ones(3)).init(w),
            r"preconditioner is float32\[3\]",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            make()


@pytest.mark.parametrize(
    ("tx", "gain"),
    [
        (optperm.sgld(1e-4, N, 1.5), 1e-4 * N**2 / (4 * 1.5)),
        (optperm.sghmc(1e-4, N, 0.5, 1.5), 1e-4 * N**2 / (2 * 0.5 * 1.5)),
    ],
    ids=["sgld", "sghmc"],
)
def test_the_noise_of_the_batches_is_reported(tx, gain):
    """The fraction epsilon N^2 R / (4 T) of each variance, or eta N^2 R / (2 alpha T)."""
    w, r = jnp.zeros(2), np.float32([0.1, 0.3])
    _, state = tx.update(w, tx.init(w), w)
    values = np.random.default_rng(0).normal(size=(2, 50, 2))
    np.testing.assert_allclose(state.gain, gain, rtol=1e-6)
    samples = optperm.bayes.Samples(values, values[:, -1], state, 50, 1)
    assert langevin_biases(values, [state], samples)[1] is None
    for norm, wanted in ((0.35, 0.35), (None, 0.4)):  # without the maximum eigenvalue by the trace
        given = samples._replace(batch_noise=r, batch_noise_norm=norm)
        np.testing.assert_allclose(
            langevin_biases(values, [state], given)[1], gain * wanted, rtol=1e-6
        )


def test_states_hold_no_numbers_of_a_report():
    """SGLD none for a parameter, SGHMC its velocity; with a preconditioner nothing is told of noise."""
    w = jnp.zeros(1000)
    for tx, words in ((optperm.sgld(1e-4, N), 0), (optperm.sghmc(1e-4, N, 0.5), 1)):
        state = tx.init(w)
        assert sum(leaf.size // 1000 for leaf in jax.tree.leaves(state)) == words
    tx = optperm.sgld(1e-4, N, preconditioner=2.0 * jnp.ones(1000))
    _, state = tx.update(w, tx.init(w), w)
    assert (float(state.reach), float(state.gain)) == (0.0, 0.0)
