"""What is said of draws that are not to be trusted, and by whom."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optperm
from optperm import training
from optperm.contract.states import find_states

pytestmark = pytest.mark.usefixtures("lenient")
N, S, D = 200, 32, 5


@functools.cache
def data():
    """A logistic regression with collinear features, whose gradient noise is small at the mode."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(N, 1)) + 0.1 * rng.normal(size=(N, D))
    y = np.where(x[:, 0] + 0.05 * rng.normal(size=N) > 0, 1.0, -1.0)
    return np.float32(x), np.float32(y)


def loss_fn(w, batch):
    x, y = batch
    return jnp.mean(jax.nn.softplus(-y * (x @ w))) + optperm.normal_prior(w, 1.0, N)


def stepper(tx):
    def step(w, opt_state, key):
        rows = jax.random.randint(key, (S,), 0, N)
        e = optperm.evaluate(loss_fn, w, tuple(jnp.asarray(leaf)[rows] for leaf in data()))
        updates, opt_state = tx.update(e.grad, opt_state, w, **e.extra_args)
        return optax.apply_updates(w, updates), opt_state

    return step


def draw(tx, **options):
    w = jnp.zeros(D)
    options = {"num_chains": 2, "num_draws": 50, "thinning": 4} | options
    return optperm.draw_samples(stepper(tx), w, tx.init(w), jax.random.key(0), **options)


def unstable(preconditioner="full", **options):
    """Mandt's method where it diverges: the curvature of the prior has no noise."""
    return optperm.constant_sgd(
        N,
        S,
        preconditioner=preconditioner,
        fill=False,
        burn_in=400,
        burn_in_optimizer=optax.adam(1e-2),
        **options,
    )


@functools.cache
def stuck():
    """Mandt's method after its burn-in, in a loop of the user's own: params and states from then on."""
    tx = unstable()
    step = jax.jit(stepper(tx))
    w = jnp.zeros(D)
    carry, trail = (w, tx.init(w)), []
    for index in range(405):
        carry = step(*carry, jax.random.fold_in(jax.random.key(0), index))
        if index >= 399:
            trail.append(carry)
    return tx, trail


def noise_state(opt_state):
    def is_noise(node):
        return isinstance(node, optperm.GradientNoiseState)

    (state,) = filter(is_noise, jax.tree.leaves(opt_state, is_leaf=is_noise))
    return state


def test_instability_is_seen_before_the_first_move():
    """No step is taken, and the state counts those that were not; it is near the true eigenvalue."""
    _, trail = stuck()
    for w, _ in trail[1:]:
        np.testing.assert_array_equal(w, trail[0][0])
    state = noise_state(trail[-1][1])
    assert (int(state.unstable), int(state.steps)) == (5, 0)
    hessian = jax.hessian(loss_fn)(trail[0][0], data())
    h = 2 * S / N * np.linalg.inv(np.asarray(state.covariance, np.float64))
    exact = np.linalg.eigvals(h @ hessian).real.max()
    assert exact > 2
    assert float(state.stability) == pytest.approx(exact, rel=0.7)


def test_it_is_an_error_where_it_can_be_seen():
    """In an eager update, in draws, in `fit` and in a report."""
    tx, trail = stuck()
    with pytest.raises(ValueError, match=r"they diverge: lambda_max\(H A\).*fill=True"):
        stepper(tx)(*trail[-1], jax.random.key(1))
    with pytest.raises(ValueError, match="they diverge"):
        draw(tx, warmup=405)
    state = training.TrainState.create(apply_fn=None, params=jnp.zeros(D), tx=tx)
    with pytest.raises(ValueError, match="they diverge"):
        training.fit(state, loss_fn, data(), steps=410, batch_size=S)
    draws = optperm.Samples(jnp.ones((2, 5)), jnp.ones(2), (), jnp.int32(5), jnp.int32(1))
    with pytest.raises(ValueError, match="they diverge"):
        optperm.posterior_report(draws, trail[-1][1])


@pytest.mark.parametrize(("momentum", "factor"), [(None, 1.0), (0.5, 1 / 3)])
def test_the_eigenvalue_is_that_of_the_steps_as_they_are_taken(momentum, factor):
    """On a quadratic, where it is known; above .5 a warning says how much variances are off."""
    a, c = np.diag([4.0, 1.0]).astype(np.float32), np.array([1.0, 2.0])

    def evaluate(w, key):
        rows = w @ a + jax.random.normal(key, (10, 2)) * jnp.float32(np.sqrt(c))
        return jnp.mean(rows, axis=0), rows

    tx = optperm.constant_sgd(
        100, 10, fill=False, momentum=momentum, burn_in=300, learning_rate=1.1
    )

    @jax.jit
    def run(state):
        def step(state, key):
            g, rows = evaluate(jnp.zeros(2), key)
            extras = {"per_example_grad_fn": lambda w: rows, "grad_fn": lambda w: w @ a}
            return tx.update(g, state, jnp.zeros(2), **extras)[1], None

        return jax.lax.scan(step, state, jax.random.split(jax.random.key(0), 310))[0]

    state = run(tx.init(jnp.zeros(2)))
    exact = 1.1 * factor * max(2 * 10 / 100 / c * np.diag(a))
    assert float(noise_state(state).stability) == pytest.approx(exact, rel=0.2)
    extras = {"per_example_grad_fn": lambda w: jnp.ones((10, 2)), "grad_fn": lambda w: w @ a}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        tx.update(jnp.zeros(2), state, jnp.zeros(2), **extras)
    assert any("the variance of the draws is about 1.8" in str(w.message) for w in caught) == (
        momentum is None
    )


def test_draws_of_steps_that_did_not_sample_are_named():
    with pytest.warns(UserWarning, match="Some draws are of steps that did not sample: 30 steps"):
        draw(optperm.constant_sgd(N, S, burn_in=300), num_draws=30, thinning=1)


def test_examples_without_a_gradient_are_named():
    """A loss that is NaN on each example by itself gives no estimate, and the chain stays."""
    tx = optperm.constant_sgd(N, S, fill=False, burn_in=2)

    def step(w, opt_state, key):
        extras = {"per_example_grad_fn": lambda w: jnp.full((S, D), jnp.nan)}
        updates, opt_state = tx.update(jax.random.normal(key, (D,)), opt_state, w, **extras)
        return optax.apply_updates(w, updates), opt_state

    w = jnp.zeros(D)
    with pytest.warns(UserWarning, match=r"there are 0.*the gradient of each example is finite"):
        optperm.draw_samples(
            step, w, tx.init(w), jax.random.key(0), num_chains=1, num_draws=9, warmup=5
        )


def test_the_share_at_max_step_is_named():
    """There the temperature has no effect."""
    tx = optperm.constant_sgd(N, S, fill=False, burn_in=50, max_step=1e-3, freeze_after=50)
    with pytest.warns(UserWarning, match=r"100.0% of the params take steps of the size max_step"):
        draw(tx, warmup=60, num_draws=20)


def test_too_few_estimates_are_named():
    tx = optperm.constant_sgd(
        N, S, preconditioner="full", burn_in=10, freeze_after=40, burn_in_optimizer=optax.sgd(0.1)
    )
    with pytest.warns(UserWarning, match=r"has 3 estimates of the noise for each parameter"):
        draw(tx, warmup=40, num_draws=20)


@pytest.mark.parametrize("preconditioner", ["diagonal", "full"])
@pytest.mark.parametrize("ending", [0.1, pytest.param(1.0, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize(("falls", "warmup"), [(350, 500), (1000, 3000)])
def test_noise_that_has_fallen_is_named(preconditioner, ending, falls, warmup):
    """Gradients whose deviation falls to a tenth in the last half of the estimates, or after them, as
    where the optimum is far; or stays."""
    tx = optperm.constant_sgd(N, S, preconditioner=preconditioner, burn_in=100, freeze_after=500)

    def step(w, opt_state, key):
        (count,) = (s.count for s in find_states(opt_state, optperm.GradientNoiseState))
        deviation = jnp.where(count < falls, 1.0, ending)
        rows = w + deviation * jax.random.normal(key, (S, D))
        extras = {"per_example_grad_fn": lambda w: rows, "grad_fn": lambda w: w}
        updates, opt_state = tx.update(jnp.mean(rows, axis=0), opt_state, w, **extras)
        return optax.apply_updates(w, updates), opt_state

    w = jnp.zeros(D)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optperm.draw_samples(
            step, w, tx.init(w), jax.random.key(0), num_chains=2, num_draws=9, warmup=warmup
        )
    text = " ".join(str(w.message) for w in caught)
    assert ("was not constant while it was estimated" in text) == (ending < 1)


def test_infinite_draws_are_named():
    """Of any optimizer."""

    def step(w, opt_state, key):
        del key
        return w * -3.0, opt_state

    with pytest.warns(UserWarning, match="Some draws are not finite"):
        optperm.draw_samples(
            step, jnp.ones(1), (), jax.random.key(0), num_chains=2, num_draws=9, thinning=50
        )


def samples_of(draws):
    numbers = jnp.int32(draws.shape[1]), jnp.int32(1)
    return optperm.Samples(jnp.float32(draws), jnp.zeros(4), (), *numbers)


def test_split_r_hat(capsys):
    """Against its definition by hand; and halves that differ are seen in one chain."""
    rng = np.random.default_rng(0)
    draws = rng.normal(size=(4, 200, 2)) + np.array([0.0, 0.5]) * np.arange(4).reshape(4, 1, 1)
    halves = draws.reshape(8, 100, 2)
    within = halves.var(axis=1, ddof=1).mean(axis=0)
    exact = np.sqrt(0.99 + halves.mean(axis=1).var(axis=0, ddof=1) / within)
    with pytest.warns(UserWarning, match="largest split R-hat"):
        report = optperm.posterior_report(samples_of(draws))
    assert report.r_hat == pytest.approx(exact.max(), rel=1e-5)
    assert f"{report.r_hat:.3f}" in capsys.readouterr().out
    drifting = rng.normal(size=(1, 200)) + np.linspace(0, 5, 200)
    with pytest.warns(UserWarning, match="have not mixed"):
        assert optperm.posterior_report(samples_of(drifting)).r_hat > 1.5
    assert optperm.posterior_report(samples_of(rng.normal(size=(4, 200)))).warnings == ()


def test_relaxation_times():
    """By the step in directions of little noise and the prior's part of the curvature."""
    tx = optperm.constant_sgd(N, S, burn_in=100)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        samples = draw(tx, warmup=200, num_draws=50)
        report = optperm.posterior_report(samples, least_curvature=1 / N)
    state = noise_state(samples.last_opt_state)
    step = 2 * S / N / np.asarray(state.filling).max()
    assert report.times == pytest.approx(200 * step / N, rel=1e-4)
    assert report.stability == pytest.approx(np.asarray(state.stability).max())
    if report.times < 20:
        assert any("relaxation times long" in warning for warning in report.warnings)
