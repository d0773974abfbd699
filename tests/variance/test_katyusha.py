"""Loopless Katyusha against NumPy in the letters of its paper, and its precision."""

import functools

import chex
import jax
import jax.numpy as jnp
import loops
import numpy as np
import optax
import pytest
from least_squares import coins, evaluation, make_data, numpy_grad, part, start

import optperm
from optperm.core.states import find_warnings

L, P, SEED = 6.0, 0.3, 7


def reference_run(data, mu, steps):
    """Algorithm 2 of the paper, from y = z = w: the points at which it takes gradients."""
    sigma, theta_2 = mu / L, 0.5
    theta_1 = min(np.sqrt(2 * sigma / (3 * P)), 0.5)
    eta = theta_2 / ((1 + theta_2) * theta_1)
    flips, trail = coins(P, SEED, steps), []
    y = z = w = start(np.float64)
    for t in range(steps):
        x = {k: theta_1 * z[k] + theta_2 * w[k] + (1 - theta_1 - theta_2) * y[k] for k in y}
        trail.append(x)
        batch, old = part(data, t), z
        at_x, at_w, full = numpy_grad(x, batch), numpy_grad(w, batch), numpy_grad(w, data)
        g = {k: at_x[k] - at_w[k] + full[k] for k in x}
        z = {k: (eta * sigma * x[k] + z[k] - eta / L * g[k]) / (1 + eta * sigma) for k in x}
        w = y if flips[t] else w
        y = {k: x[k] + theta_1 * (z[k] - old[k]) for k in x}
    return trail


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("mu", [0.3, 3.0])
def test_params_are_those_of_the_paper(mu):
    """Step by step, to 1e-13, with theta_1 of 1 / 3 and of its limit, 1 / 2."""
    data, begin = make_data(np.float64), start(np.float64)
    tx = optperm.katyusha(1 / (3 * L), mu, P, key=SEED)
    batches = [part(data, t) for t in range(20)]
    trail = loops.train(tx, begin, batches, evaluate=evaluation(data))
    at = [begin, *(params for params, _ in trail)]
    chex.assert_trees_all_close(at, reference_run(data, mu, 21), rtol=1e-13, atol=1e-13)


def test_params_of_16_bits_lose_no_small_steps():
    """They come within two units of their last digit, where a step of SGD is far below one unit."""
    tx, target = optperm.katyusha(0.01, 0.1, 0.1), jnp.array([300.0, -1.0, 0.3])

    def evaluate(p, _):
        def grad_fn(p):
            return 0.1 * (p.astype(jnp.float32) - target)

        return grad_fn(p), {"grad_fn": grad_fn, "full_grad_fn": grad_fn}

    step = loops.make_step(tx, evaluate, loops.by_addition)
    run = jax.jit(lambda p: loops.carry(step, p, tx.init(p), jnp.zeros(4000)))
    p, state = run(jnp.zeros(3, jnp.bfloat16))
    assert p.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.float32(p), target, rtol=2**-6)
    np.testing.assert_allclose(state.y, target, rtol=2**-6)


def test_entries_that_are_not_finite_do_no_harm():
    """z stays at an entry whose gradient is NaN, and the next step is finite."""
    data, params = make_data(), start()
    tx = optperm.katyusha(0.05, 0.3, 0.3)

    @jax.jit
    def step(opt_state, batch, spoil):
        grads, extra_args = evaluation(data)(params, batch)
        grads = jax.tree.map(jnp.add, grads, spoil)
        return tx.update(grads, opt_state, params, **extra_args)

    nothing = jax.tree.map(np.zeros_like, params)
    _, before = step(jax.jit(tx.init)(params), part(data, 0), nothing)
    bad = nothing | {"full": np.float32([0.0, np.nan, 0.0])}
    updates, after = step(before, part(data, 1), bad)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((updates, after)))
    is_same = np.asarray(after.z["full"]) == np.asarray(before.z["full"])
    assert is_same.tolist() == [False, True, False]
    updates, after = step(after, part(data, 2), nothing)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((updates, after)))


@pytest.mark.slow
def test_a_rate_that_falls_to_zero_ends_in_finite_params():
    rate = optax.linear_schedule(0.1, 0.0, 5)
    tx = optax.inject_hyperparams(optperm.katyusha)(rate, strong_convexity=0.1, probability=0.5)
    batches, evaluate = [part(make_data(), t) for t in range(9)], evaluation(make_data())
    params, _ = loops.train(tx, start(), batches, evaluate=evaluate)[-1]
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(params))


further = functools.partial(pytest.param, marks=pytest.mark.exhaustive)


@pytest.mark.filterwarnings("ignore:In full, all weights that enter an output unit are equal")
@pytest.mark.parametrize(
    ("wrap", "is_moved"),
    [
        further(lambda tx: tx, False),
        (lambda tx: optax.chain(optax.clip(1.0), tx), False),
        further(lambda tx: optax.chain(tx, optax.scale(1.0)), False),
        (lambda tx: optax.chain(tx, optax.scale(0.9)), True),
        further(lambda tx: optperm.laperm(tx, 2), True),
        further(lambda tx: optperm.agn(tx, outer=optax.sgd(0.3), every=2), True),
    ],
)
def test_what_moves_the_params_of_katyusha_is_counted_and_said(wrap, is_moved):
    """The params of a step are an average of the points in the state; another one is a mistake."""
    tx, batches = wrap(optperm.katyusha(0.1, 0.1, 0.5)), [part(make_data(), t) for t in range(5)]
    trail = loops.train(tx, start(), batches, evaluate=evaluation(make_data()))
    said = [find_warnings(opt_state, params) for params, opt_state in trail]
    assert bool(said[-1]) is is_moved
    assert not said[0]
    assert all("params that katyusha had not set" in text for text in said[-1])
