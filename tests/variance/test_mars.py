"""MARS against NumPy, in both forms, and what it does with norms and with what is not finite."""

import chex
import jax
import jax.numpy as jnp
import loops
import numpy as np
import optax
import pytest
import support
from least_squares import evaluation, make_data, numpy_grad, part, start

import optperm

RATE, B1, B2, EPS, DECAY = 0.02, 0.95, 0.99, 1e-8, 0.01


def mars_adamw_in_numpy(batches, *, gamma, max_norm, exact):
    """The paper's algorithm, as its authors run it: each leaf is clipped, the last gradient is not."""
    theta, trail = start(np.float64), []
    m = {k: 0.0 * p for k, p in theta.items()}
    v, last_theta, last_grad = dict(m), None, None
    for t, batch in enumerate(batches, start=1):
        g = numpy_grad(theta, batch)
        before = (numpy_grad(last_theta, batch) if exact else last_grad) if t > 1 else g
        last_theta, last_grad, following = theta, g, {}
        for k in theta:
            c = g[k] + gamma * B1 / (1 - B1) * (g[k] - before[k])
            norm = np.sqrt(np.sum(c**2))
            c = c * max_norm / norm if norm > max_norm else c
            m[k] = B1 * m[k] + (1 - B1) * c
            v[k] = B2 * v[k] + (1 - B2) * c**2
            step = (m[k] / (1 - B1**t)) / (np.sqrt(v[k] / (1 - B2**t)) + EPS)
            following[k] = theta[k] - RATE * (step + DECAY * theta[k])
        theta = following
        trail.append(theta)
    return trail


@pytest.mark.usefixtures("x64", "lenient")
@pytest.mark.parametrize(
    ("exact", "gamma", "max_norm"),
    [
        (False, 0.025, 1.0),
        (True, 0.5, 9.0),
        pytest.param(True, 0.025, 1.0, marks=pytest.mark.exhaustive),
        pytest.param(False, 0.5, 9.0, marks=pytest.mark.exhaustive),
    ],
)
def test_trajectory_in_both_forms_is_that_of_the_paper(exact, gamma, max_norm):
    """In front of AdamW, to 1e-12 in float64; where all norms are cut, and where some are not."""
    batches = [part(make_data(np.float64), t) for t in range(12)]
    adamw = optax.adamw(RATE, b1=B1, b2=B2, eps=EPS, weight_decay=DECAY)
    tx = optax.chain(optperm.mars(gamma, B1, max_norm, exact), adamw)
    options = {"gamma": gamma, "max_norm": max_norm, "exact": exact}
    expected = mars_adamw_in_numpy(batches, **options)
    trail = loops.train(tx, start(np.float64), batches, evaluate=evaluation())
    chex.assert_trees_all_close([params for params, _ in trail], expected, rtol=1e-12, atol=1e-13)
    for other in ({"gamma": 0.0}, {"exact": not exact}, {"max_norm": np.inf}):
        differs = mars_adamw_in_numpy(batches, **options | other)[-1]["full"]
        assert np.abs(differs - expected[-1]["full"]).max() > 1e-6


def test_gradient_that_is_not_finite_goes_through_and_is_forgotten():
    """Neither the other entries, nor their norm, nor the step after the next are any different."""
    params, sound = jnp.zeros(3), np.float32([0.1, 0.2, 0.3])
    for exact in (False, True):
        tx = optperm.mars(0.5, 0.5, 1.0, exact)
        opt_state = tx.init(params)
        update = jax.jit(lambda g, s, tx=tx: tx.update(g, s, params, grad_fn=lambda p: 0.5 * g))
        for bad in (np.nan, np.inf):
            spoiled = np.float32([0.1, bad, 0.3])
            for g in (sound, spoiled, sound, 2.0 * sound):
                updates, opt_state = update(g, opt_state)
                np.testing.assert_array_equal(np.isfinite(updates), np.isfinite(g))
                assert np.all(np.isfinite(opt_state.last))
            np.testing.assert_allclose(updates, (2.0 + 0.5 * (2.0 - 1.0)) * sound, rtol=1e-6)


def last_update(gradients, params, **options):
    tx = optperm.mars(**{"gamma": 1.0, "b1": 0.95, "max_norm": jnp.inf} | options)
    state, update = tx.init(params), jax.jit(tx.update)
    for g in gradients:
        updates, state = update(g, state, params)
    return np.asarray(updates, np.float64)


def test_first_gradient_that_is_not_finite_is_no_last_one():
    """A loss scale that overflows at first: the next gradient is the first."""
    bad, good = jnp.array([jnp.nan, 1.0]), jnp.array([1.0, 1.0])
    np.testing.assert_array_equal(last_update([bad, good], jnp.zeros(2)), [1.0, 1.0])
    np.testing.assert_allclose(last_update([bad, good, 2 * good], jnp.zeros(2)), [21.0, 21.0], 1e-5)


def test_gradients_of_bfloat16_params_are_kept_wider():
    """Equal gradients need no correction, for any dtype of the params."""
    g = jnp.array([1.003, 1.0038, 0.5019])
    found = last_update([g, g, g], jnp.zeros(3, jnp.bfloat16))
    np.testing.assert_allclose(found, g, rtol=2**-8)


@support.needs_float16
def test_corrections_and_norms_that_overflow_do_no_harm():
    """A correction that float16 cannot hold is left out; norms whose squares overflow clip all the
    same, and 300 squared is more than float16 holds."""
    pair = jnp.array([-20000.0, 1.0], jnp.float16), jnp.array([20000.0, 1.0], jnp.float16)
    np.testing.assert_array_equal(last_update(pair, jnp.zeros(2, jnp.float16), b1=0.9), [20000, 1])
    large = jnp.array([3e25, 4e25])
    clipped = last_update([large], jnp.zeros(2), max_norm=1.0)
    np.testing.assert_allclose(clipped, [0.6, 0.8], rtol=1e-6)
    halves = jnp.full(4, 300.0, jnp.float16)
    np.testing.assert_array_equal(last_update([halves], jnp.zeros_like(halves), max_norm=2.0), 1.0)
