"""The optimizer of the burn-in: distant optima, units of features, and what is not finite."""

import functools

import jax
import jax.numpy as jnp
import loops
import numpy as np

from optperm.bayes._diagonal_newton import diagonal_newton


def test_the_burn_in_reaches_what_is_far_away():
    """An optimum at 1,000 in one entry, units from e^-4 to e^4 in the others."""
    units = np.exp([0.0, -4.0, 0.0, 4.0])
    rng = np.random.default_rng(0)
    x = np.c_[np.ones(400), rng.normal(size=(400, 3))] * units
    optimum = np.array([1000.0, 1.0, -1.0, 0.5]) / units
    y = x @ optimum + rng.normal(size=400)
    x, y = jnp.float32(x), jnp.float32(y)

    def evaluate(w, key):
        rows = jax.random.randint(key, (16,), 0, 400)
        grad_fn = lambda w: x[rows].T @ (x[rows] @ w - y[rows]) / 16  # noqa: E731
        return grad_fn(w), {"grad_fn": grad_fn}

    tx, keys = diagonal_newton(), jax.random.split(jax.random.key(0), 2000)
    step = loops.make_step(tx, evaluate)
    w, _ = jax.jit(lambda w: loops.carry(step, w, tx.init(w), keys))(jnp.zeros(4))
    # Within a few of the 400 examples' standard errors; Adam's steps of 0.01 end at 20.
    assert np.abs((np.asarray(w) - optimum) * units).max() < 0.4


def double(w):
    return 2 * w


def test_gradients_that_are_not_finite_are_left_out_of_the_burn_in():
    tx, w = diagonal_newton(), jnp.ones(2)
    state, update = jax.jit(tx.init)(w), jax.jit(functools.partial(tx.update, grad_fn=double))
    for g in (np.float32([1.0, np.nan]), np.float32([1.0, 1.0])):
        updates, state = update(g, state, w)
        assert np.all(np.isfinite(updates))
    assert np.all(np.asarray(updates) < 0)


def test_first_step_is_by_the_curvature_of_each_entry():
    """Of a diagonal Hessian the estimate is exact: -0.1 (0.1 g) / a, and 0.02 where that is longer."""
    a, w = np.float32([4.0, 0.5, 1e-3]), jnp.array([0.2, -0.1, 3.0])
    tx = diagonal_newton()
    first, update = (
        jax.jit(tx.init)(w),
        jax.jit(functools.partial(tx.update, grad_fn=lambda w: a * w)),
    )
    updates, state = update(a * np.asarray(w), first, w)
    np.testing.assert_allclose(state.square, np.square(a), rtol=1e-5)
    # 1 % of 3 is below 2 % of it
    np.testing.assert_allclose(updates, [-0.002, 0.001, -0.03], rtol=1e-5)
    updates, _ = update(np.full(3, 1e3, np.float32), first, w)
    np.testing.assert_allclose(updates, [-0.02, -0.02, -0.06], rtol=1e-5)
