"""Mandt's method: its chains, step sizes against their formulas, and the life of the estimate."""

import itertools

import jax
import jax.numpy as jnp
import loops
import numpy as np
import optax
import pytest
import support

import optperm
from optperm.core.states import find_states

N, S, D = 1000, 10, 3
FORMS = ("scalar", "diagonal", "full")


def batch_gradients(seed):
    """The gradients of a batch's examples, (S, D), correlated."""
    mix = np.array([[1.0, 0.5, 0.0], [0.0, 0.7, 0.2], [0.0, 0.0, 0.3]])
    rows = np.random.default_rng(seed).normal(size=(S, D)) @ mix + [0.3, -0.2, 0.1]
    return rows.astype(np.float32)


def run(tx, *batches, grad=None, grad_fn=None):
    """The updates and the states of steps on batches, from the start."""
    zeros = np.zeros(batches[0].shape[1], np.float32)

    @jax.jit
    def update(g, state, rows):
        extras = {"per_example_grad_fn": lambda params: rows}
        return tx.update(g, state, zeros, **extras, grad_fn=grad_fn)

    state, trail = tx.init(zeros), []
    for rows in batches:
        updates, state = update(rows.mean(axis=0) if grad is None else grad, state, rows)
        trail.append((updates, find_states(state, optperm.bayes.MandtSgdState)[0]))
    return trail


def mandt(form="diagonal", **options):
    return optperm.mandt_sgd(N, S, preconditioner=form, **options)


def expected_matrix(covariance, form):
    """H, from the formulas of the paper."""
    return {
        "scalar": 2 * S * D / (N * np.trace(covariance)) * np.eye(D),
        "diagonal": np.diag(2 * S / (N * np.diag(covariance))),
        "full": 2 * S / N * np.linalg.inv(covariance),
    }[form]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "momentum"),
    support.every_night(
        [("diagonal", 0.0), ("scalar", 0.0), ("full", 0.0), ("full", 0.9)], [("diagonal", 0.0)]
    ),
)
def test_chains_have_the_known_stationary_distribution(form, momentum):
    hessian = np.array([[2.0, 0.5, 0.0], [0.5, 1.0, 0.3], [0.0, 0.3, 0.5]])
    noise = np.array([[1.0, 0.6, 0.0], [0.6, 2.0, 0.0], [0.0, 0.0, 0.1]])
    root = jnp.float32(np.linalg.cholesky(noise))

    def evaluate(params, key):
        rows = (jnp.float32(hessian) @ params)[None] + jax.random.normal(key, (S, D)) @ root.T
        return jnp.mean(rows, axis=0), {"per_example_grad_fn": lambda params: rows}

    tx, w = mandt(form, momentum=momentum, freeze_after=500), jnp.zeros(D)
    counts = {"num_chains": 256, "num_draws": 30, "thinning": 90, "burn_in": 1000}
    step = loops.make_step(tx, evaluate)
    samples = optperm.bayes.draw_samples(step, w, tx.init(w), 0, **counts)
    flat = np.asarray(samples.params, np.float64).reshape(-1, D)
    covariance, h = np.cov(flat.T), (1 - momentum) * expected_matrix(noise, form)
    posterior = np.zeros(D), np.linalg.inv(N * hessian)
    with jax.enable_x64(True):
        exact = optperm.bayes.stationary_covariance(h, hessian, noise / S, momentum=momentum)
        known = float(optperm.bayes.gaussian_kl(np.zeros(D), exact, *posterior))
        found = float(optperm.bayes.gaussian_kl(flat.mean(axis=0), covariance, *posterior))
    # 7680 draws, nearly independent: each variance is known to 1.6 %, and C to 0.9 %.
    np.testing.assert_allclose(covariance, exact, atol=0.07 * np.diag(exact).max())
    assert abs(found - known) < 0.003 + 0.06 * known


@pytest.mark.parametrize("form", support.every_night(FORMS, ["diagonal", "full"]))
def test_updates_are_the_preconditioned_gradient(form):
    """By the plain mean of the estimates of the steps before, zero without an estimate; after
    `freeze_after` by what was known then."""
    batches = [batch_gradients(step) for step in range(6)]
    trail = run(mandt(form, freeze_after=4), *batches)
    covariances = [np.cov(rows.T) for rows in batches]
    for step, (rows, (updates, state)) in enumerate(zip(batches, trail, strict=True)):
        if step < 1:
            assert not np.any(updates)
        else:
            h = expected_matrix(np.mean(covariances[: min(step, 4)], axis=0), form)
            np.testing.assert_allclose(updates, -h @ rows.mean(axis=0), rtol=2e-4)
        assert int(state.steps) == step
    support.assert_same_bits(trail[4][1].noise, trail[5][1].noise)


def test_the_full_matrix_is_decomposed_after_2_3_4_6_8_and_12_steps():
    trail = run(mandt("full"), *(batch_gradients(step) for step in range(13)))
    noise = np.stack([state.noise for _, state in trail])
    changed = np.flatnonzero(np.any(noise[1:] != noise[:-1], axis=1)) + 2
    assert [*changed] == [2, 3, 4, 6, 8, 12]


def test_a_frozen_estimate_is_not_computed():
    rows, calls = jnp.asarray(batch_gradients(0)), []

    def count(rows):
        calls.append(1)
        return rows

    extras = {"per_example_grad_fn": lambda w: jax.pure_callback(count, rows, rows)}
    tx, w = mandt(freeze_after=2), jnp.ones(D)
    step, state = jax.jit(lambda state: tx.update(w, state, w, **extras)[1]), tx.init(w)
    for _ in range(5):
        state = step(state)
    jax.block_until_ready(state)
    assert len(calls) == 2


@pytest.mark.parametrize(
    ("form", "limit"),
    support.every_night(
        itertools.product(FORMS, ("max_step", "damping")),
        [("full", "max_step"), ("diagonal", "damping")],
    ),
)
def test_limits_cut_eigenvalues_and_nothing_else(form, limit):
    """Of H by `max_step`, of C by `damping`."""
    rows = batch_gradients(0)
    covariance = np.cov(rows.T)
    free = expected_matrix(covariance, form)
    values, vectors = np.linalg.eigh(free)
    most = float(values[-1]) * 0.6
    least = 2 * S / N / most
    wanted = vectors @ np.diag(np.minimum(values, most)) @ vectors.T
    options = {"max_step": most} if limit == "max_step" else {"damping": least}
    state = run(mandt(form, **options), rows, rows)[-1][1]
    h = np.stack([state.preconditioned(row) for row in np.eye(D, dtype=np.float32)])
    np.testing.assert_allclose(h, wanted, rtol=1e-3, atol=1e-5)


def test_preconditioned_after_a_decomposition_is_h_of_the_new_basis():
    """The second estimate changes the basis; the sizes of the step before belong to the old one."""
    first, second = batch_gradients(0), 3.0 * batch_gradients(1)[:, ::-1]
    state = run(mandt("full"), first, second)[-1][1]
    h = np.stack([state.preconditioned(row) for row in np.eye(D, dtype=np.float32)])
    wanted = expected_matrix((np.cov(first.T) + np.cov(second.T)) / 2, "full")
    np.testing.assert_allclose(h, wanted, rtol=1e-3, atol=1e-5)


def test_what_is_not_finite_or_has_no_noise():
    """Estimates that are not finite are left out, also as the first; an entry's step that is not finite
    is none and counted; an entry without noise takes the largest step, or none."""
    bad = batch_gradients(7)
    bad[3, 1] = np.nan
    for form in FORMS:
        trail = run(mandt(form), bad, batch_gradients(0), bad)
        assert not np.any(trail[1][0])
        support.assert_same_bits(trail[2][1].noise, trail[1][1].noise)
        updates = np.asarray(trail[2][0])
        assert np.all(np.isfinite(updates))
        assert np.all((updates[[0, 2]] != 0) == (form != "full"))
        assert int(trail[2][1].left_out) == 1
    rows = batch_gradients(0)
    rows[:, 1] = 0.5
    for limit, expected in ((None, 0.0), (0.25, -0.25)):
        found = run(mandt(max_step=limit), rows, rows, grad=np.ones(D, np.float32))[-1][0]
        assert float(found[1]) == expected
        assert float(found[0]) < 0


def test_momentum_temperature_and_rate_are_factors():
    """Momentum is Optax's, with steps shorter by 1 - mu; a schedule of T is read at each step."""
    rows = [batch_gradients(seed) for seed in range(5)]
    plain = [updates for updates, _ in run(mandt(), *rows)]
    moving, velocity = run(mandt(momentum=0.8, learning_rate=0.5), *rows), np.zeros(D)
    for (updates, _), u in zip(moving, plain, strict=True):
        velocity = 0.8 * velocity + u
        np.testing.assert_allclose(updates, 0.5 * (1 - 0.8) * velocity, rtol=1e-5)
    later = run(mandt(temperature=lambda t: jnp.where(t >= 4, 4.0, 1.0)), *rows)
    np.testing.assert_allclose(later[4][0], 4 * plain[4], rtol=1e-6)
    np.testing.assert_allclose(later[3][0], plain[3], rtol=1e-6)
    tx = optperm.switch_after(3, optax.sgd(0.1), mandt(), track=True)
    burnt = [updates for updates, _ in run(tx, *rows)]
    np.testing.assert_allclose(burnt[2], -0.1 * rows[2].mean(0), rtol=1e-6)
    np.testing.assert_allclose(burnt[3], plain[3], rtol=1e-5)


def test_full_waits_for_enough_estimates():
    """Forty params and batches of ten: 2 D examples, less one a batch."""
    rows = np.random.default_rng(0).normal(size=(12, S, 40)).astype(np.float32)
    for index, (updates, _) in enumerate(run(mandt("full"), *rows)):
        assert np.any(updates) == (index * (S - 1) >= 2 * 40)


def test_rows_of_weight_zero_are_no_examples():
    """A weighted mean of a single example of weight 0 is 0 / 0: the other examples are used."""
    x, w, weights = batch_gradients(0), jnp.zeros(D), jnp.ones(S).at[-3:].set(0.0)

    def loss_fn(w, batch):
        return jnp.average(batch[0] @ w, weights=batch[1])

    e, tx = optperm.evaluate(loss_fn, w, (jnp.asarray(x), weights)), mandt("full", chunk_size=4)
    state = jax.jit(lambda w: tx.update(e.grad, tx.init(w), w, **e.extra_args)[1])(w)
    np.testing.assert_allclose(state[0].covariance, np.cov(x[:-3].T), rtol=1e-5, atol=1e-6)


def test_steps_that_would_diverge_are_not_taken():
    """lambda_max(H A) is found in the first steps, as they are with momentum; at 2 no step is
    taken, and a report is an error."""
    a = jnp.array([40.0, 1.0, 1.0])
    batches = [batch_gradients(0)] * 30
    h = 2 * S / N / np.var(batches[0], axis=0, ddof=1)
    # Beyond stability without momentum, and within it by momentum.
    rate = 3 / float(np.max(h * np.asarray(a)))
    for momentum, is_stable in ((0.5, True), (0.0, False)):
        tx = mandt(momentum=momentum, learning_rate=rate)
        updates, state = run(tx, *batches, grad_fn=lambda w: a * w)[-1]
        exact = rate * np.max(h * np.asarray(a)) * (1 - momentum) / (1 + momentum)
        assert float(state.stability) == pytest.approx(exact, rel=0.05)
        assert np.any(updates) == is_stable
        assert (int(state.unstable) == 0) == is_stable
    draws = optperm.bayes.Samples(jnp.ones((2, 5)), jnp.ones(2), state, 5, 1)
    with pytest.raises(ValueError, match=r"would diverge: lambda_max\(H A\)"):
        optperm.bayes.posterior_report(draws)


def test_temperature_of_zero_is_named():
    for temperature, found in ((0.0, 1), (1e-6, 0)):
        _, state = run(mandt(temperature=temperature), *[batch_gradients(0)] * 3)[-1]
        assert sum("The temperature is 0" in text for text in state.warnings()) == found


def test_a_loss_without_a_forward_derivative_has_its_curvature():
    """A `jax.custom_vjp` rule that is itself one has none."""
    same, halved_square = map(jax.custom_vjp, (lambda x: x, lambda x: 0.5 * x**2))
    same.defvjp(lambda x: (x, None), lambda _, g: (g,))
    halved_square.defvjp(lambda x: (halved_square(x), x), lambda x, g: (g * same(x),))
    x, w, v = batch_gradients(0), jnp.ones(D), jnp.float32([1.0, -1.0, 2.0])
    e = optperm.evaluate(lambda w, x: jnp.mean(halved_square(x @ w - 1.0)), w, jnp.asarray(x))
    batch = optperm.bayes._covariance.BatchGradients(w, e.grad, e.extra_args, S, None, None)
    np.testing.assert_allclose(batch.curvature_product(v), x.T @ (x @ v) / S, rtol=1e-5)


@pytest.mark.parametrize(
    "estimator",
    support.every_night(["per_example", "single_example", "two_batches"], ["single_example"]),
)
def test_batches_of_another_size_are_refused(estimator):
    w, asked = jnp.ones(D), "per_example_grad_fn" if estimator == "per_example" else "grad_fn"
    e = optperm.evaluate(
        lambda w, x: jnp.mean(x @ w), w, jnp.ones((3, D)), example=jnp.ones((1, D))
    )
    tx, says = mandt(estimator=estimator), f"batch_size is 10, but the batch of {asked} has .* 3: "
    with pytest.raises(ValueError, match=says):
        tx.update(e.grad, tx.init(w), w, **e.extra_args)
