"""Recursive gradients against plain NumPy, their precision, and what is not finite."""

import chex
import jax
import jax.numpy as jnp
import loops
import numpy as np
import optax
import pytest
import support
from least_squares import RATE, coins, evaluation, loss_fn, make_data, numpy_grad, part, start

import optperm


def reference_run(data, a, is_refreshed):
    """The recursion as its papers write it, in NumPy."""
    w, last, d, trail = start(np.float64), None, None, []
    for t, from_all in enumerate(is_refreshed):
        batch = part(data, t)
        g = numpy_grad(w, batch)
        if from_all:
            d = numpy_grad(w, data)
        elif d is None:
            d = g
        else:
            before = numpy_grad(last, batch)
            d = {k: g[k] + (1 - a(t)) * (d[k] - before[k]) for k in w}
        last, w = w, {k: w[k] - RATE * d[k] for k in w}
        trail.append(w)
    return trail


def falling(t):
    """A coefficient of STORM that falls."""
    return 1.0 / (1.0 + jnp.asarray(t, float)) ** (2 / 3)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("a", "options", "is_refreshed"),
    [
        (falling, {}, lambda t, flips: False),
        (0.0, {"every": 6}, lambda t, flips: t % 6 == 0),
        (0.2, {"probability": 0.3, "key": 7}, lambda t, flips: t == 0 or flips[t]),
    ],
    ids=["storm, falling", "sarah", "page, between"],
)
def test_trajectory_of_each_method_is_that_of_its_paper(a, options, is_refreshed):
    """Step by step the params agree with NumPy to 1e-13."""
    data, flips = make_data(np.float64), coins(0.3, seed=7)
    tx = optax.chain(optperm.recursive_gradient(a, **options), optax.sgd(RATE))
    flags = [is_refreshed(t, flips) for t in range(20)]
    expected = reference_run(data, a if callable(a) else lambda t: a, flags)
    batches = [part(data, t) for t in range(20)]
    trail = loops.train(tx, start(np.float64), batches, evaluate=evaluation(data))
    chex.assert_trees_all_close([params for params, _ in trail], expected, rtol=1e-13, atol=1e-13)
    plain = reference_run(data, lambda t: 1.0, [False] * 20)[-1]["full"]
    assert np.abs(plain - trail[-1][0]["full"]).max() > 1e-2


def test_estimate_of_bfloat16_params_stays_float32():
    """256 small changes add up, although each would be lost in bfloat16."""
    params, tx, g = jnp.zeros((), jnp.bfloat16), optperm.recursive_gradient(0.0), jnp.bfloat16(1.0)
    _, opt_state = tx.update(g, tx.init(params), params, grad_fn=lambda p: g)

    def step(_, state):
        return tx.update(g, state, params, grad_fn=lambda p: jnp.bfloat16(0.99609375))[1]

    opt_state = jax.jit(lambda s: jax.lax.fori_loop(0, 256, step, s))(opt_state)
    np.testing.assert_allclose(opt_state.snapshot.full_grad, 2.0, rtol=1e-6)


def test_entry_that_is_not_finite_begins_again():
    """A bad gradient is handed on, a bad estimate, or full gradient, is that of the batch, and others
    go on."""
    params = jnp.zeros(3)
    tx = optperm.recursive_gradient(0.5)
    sound, opt_state = jnp.float32([1.0, 2.0, 3.0]), tx.init(params)
    _, opt_state = tx.update(sound, opt_state, params, grad_fn=lambda p: sound)
    bad = sound.at[1].set(jnp.nan)
    d, opt_state = tx.update(bad, opt_state, params, grad_fn=lambda p: sound)
    np.testing.assert_array_equal(d, [1.0, np.nan, 3.0])
    d, opt_state = tx.update(2 * sound, opt_state, params, grad_fn=lambda p: sound)
    np.testing.assert_array_equal(d, [2.0, 4.0, 6.0])
    d, _ = tx.update(sound, opt_state, params, grad_fn=lambda p: p * jnp.inf)
    np.testing.assert_array_equal(d, sound)
    _, kept = tx.update(sound, opt_state, bad, grad_fn=lambda p: sound)
    np.testing.assert_array_equal(kept.snapshot.params, [1.0, 0.0, 3.0])  # the last finite ones
    tx, twice = optperm.recursive_gradient(0.0, every=1), 2 * sound
    full_grad_fn = lambda p: jnp.where(jnp.isnan(bad), bad, twice)  # noqa: E731
    closures = {"grad_fn": lambda p: p, "full_grad_fn": full_grad_fn}
    d, _ = tx.update(sound, tx.init(params), params, **closures)
    np.testing.assert_array_equal(d, [2.0, 2.0, 6.0])  # where mu is not finite the batch's


def test_full_gradient_between_steps_becomes_the_estimate():
    """`take_snapshot` sets the estimate: with a = 0, the next step equals it, for any batch."""
    data, params = make_data(), support.random_like(start(), 0)
    mu = jax.grad(loss_fn)(params, data)
    tx = optperm.recursive_gradient(0.0)
    opt_state = optperm.variance.take_snapshot(tx.init(params), params, mu)
    grads, extra_args = evaluation(data)(params, part(data, 1))
    d, _ = tx.update(grads, opt_state, params, **extra_args)
    chex.assert_trees_all_close(d, mu, rtol=1e-5, atol=1e-6)
    assert np.abs(d["full"] - grads["full"]).max() > 1e-2


def test_states_of_svrg_and_of_recursive_gradient_are_not_exchanged():
    """The estimate of one is not the full gradient of the other, also where it is traced."""
    one, other = optperm.svrg(), optperm.recursive_gradient(0.1)
    w, extras = jnp.zeros(2), {"grad_fn": lambda w: w}
    for tx, state, name in ((one, other, "SvrgState"), (other, one, "RecursiveGradientState")):
        with pytest.raises(ValueError, match=f"needs an? {name}"):
            jax.jit(lambda state, tx=tx: tx.update(w, state, w, **extras))(state.init(w))
