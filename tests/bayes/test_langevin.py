"""SGLD and SGHMC at finite steps, against the exact laws of Gaussians, and their recursions."""

import functools

import jax
import jax.numpy as jnp
import loops
import numpy as np
import optax
import pytest
import support

import optperm
from optperm.bayes._biases import langevin_biases

N = 100
HESSIAN = np.array([[1.0, 0.4], [0.4, 0.5]])
ROOT = np.array([[0.2, 0.0], [-0.1, 0.1]])  # of the covariance of the batch's gradient
M = np.array([3.0, 0.5])


@pytest.mark.filterwarnings("ignore:The length of the steps")
@pytest.mark.parametrize(
    ("tx", "temperature", "h", "added", "momentum"),
    [
        # H = eps N M / 2, and noise of 4 T / (eps N^2) M^-1
        (optperm.sgld(4e-3, N, 2.5, jnp.float32(M)), 2.5, 0.2 * M, 4 * 2.5 / (40 * M), 0.0),
        # H = eta N, the decay 1 - alpha, and noise of 2 (alpha - beta) T / (eta N^2)
        (optperm.sghmc(2e-3, N, 0.5, 1.5, 0.1), 1.5, 0.2, 2 * 0.4 * 1.5 / 20, 0.5),
    ],
    ids=["sgld", "sghmc"],
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
    # Within what so many draws may be off
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
        state, v = tx.init(w), np.zeros(2)
        for size in (0.1, 0.05):
            updates, state = tx.update(g, state, w)
            v = decay * v - factor * size * np.array([0.5, -1.0])
            np.testing.assert_allclose(updates, [*v, 0.0], rtol=1e-6)
        assert int(state.left_out) == 2
    np.testing.assert_allclose(state.velocity, [*v, 0.0], rtol=1e-6)


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
    data, plain = 3.0 * support.normal((N, 2)), optperm.sgld(1e-2, N)

    def loss_fn(w, batch):
        return 0.5 * jnp.mean(jnp.sum((batch - w[None]) ** 2, axis=-1))

    mode = jnp.mean(data, axis=0)
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
    sgld, sghmc = (functools.partial(method, 1e-3, N) for method in (optperm.sgld, optperm.sghmc))
    for make, message in (
        (lambda: sghmc(0.1, noise_estimate=0.2), r"noise_estimate must be in \[0, 0.1\]"),
        (lambda: sghmc(1e-9), r"1 - friction.* must be in \[0, 1\) in float32"),
        (lambda: sgld(preconditioner=0.0 * w), "preconditioner must be above 0"),
        (lambda: sgld(preconditioner=jnp.ones(3)).init(w), r"preconditioner is float32\[3\]"),
    ):
        with pytest.raises(ValueError, match=message):
            make()


@pytest.mark.parametrize(
    ("tx", "reach", "gain"),
    [
        (optperm.sgld(1e-4, N, 1.5), 1e-4 * 1.5 / 2, 1e-4 * N**2 / (4 * 1.5)),
        (optperm.sghmc(1e-4, N, 0.5, 1.5), 1e-4 * 1.5 / 1.5, 1e-4 * N**2 / (2 * 0.5 * 1.5)),
    ],
    ids=["sgld", "sghmc"],
)
def test_biases_by_steps_and_by_the_noise_of_the_batches(tx, reach, gain):
    """1 / (1 - h lambda / 2) is 1 + h lambda / 2 to first order, with h lambda = reach / Var for a reach
    of epsilon T / 2 or eta T / (2 - alpha). The noise is the fraction epsilon N^2 R / (4 T) of each
    variance, or eta N^2 R / (2 alpha T)."""
    w = jnp.zeros(2)
    _, state = tx.update(w, tx.init(w), w)
    np.testing.assert_allclose((state.reach, state.gain), (reach, gain), rtol=1e-6)
    values = np.random.default_rng(0).normal(size=(2, 50, 2)) * [1.0, 3.0]
    samples = optperm.bayes.Samples(values, values[:, -1], state, 50, 1)
    assert langevin_biases(values, [state], samples)[1] is None
    for norm, wanted in ((0.35, 0.35), (None, 0.4)):  # without the maximum eigenvalue by the trace
        given = samples._replace(batch_noise=np.float32([0.1, 0.3]), batch_noise_norm=norm)
        found = langevin_biases(values, [state], given)
        by_steps = reach / (2 * values.var(axis=(0, 1)).min())
        np.testing.assert_allclose(found, (by_steps, gain * wanted), rtol=1e-6)


def test_states_hold_no_numbers_of_a_report():
    """SGLD none for a parameter, SGHMC its velocity; with a preconditioner nothing is told of noise."""
    w = jnp.zeros(1000)
    for tx, words in ((optperm.sgld(1e-4, N), 0), (optperm.sghmc(1e-4, N, 0.5), 1)):
        state = tx.init(w)
        assert sum(leaf.size // 1000 for leaf in jax.tree.leaves(state)) == words
    tx = optperm.sgld(1e-4, N, preconditioner=2.0 * jnp.ones(1000))
    _, state = tx.update(w, tx.init(w), w)
    assert (float(state.reach), float(state.gain)) == (0.0, 0.0)
