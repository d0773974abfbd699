"""Loopless Katyusha against NumPy in the letters of its paper, and against the rate of its theorem."""

import functools

import jax
import jax.numpy as jnp
import loops
import numpy as np
import optax
import pytest
import support
from least_squares import coins, evaluation, in_numpy, make_data, numpy_grad, part, start, to_dtype

import optperm

L, MU, P, SEED = 6.0, 0.3, 0.3, 7


def constants(smoothness, mu, p):
    """sigma, theta_1, theta_2 and eta of the paper."""
    sigma, theta_2 = mu / smoothness, 0.5
    theta_1 = min(np.sqrt(2 * sigma / (3 * p)), 0.5)
    return sigma, theta_1, theta_2, theta_2 / ((1 + theta_2) * theta_1)


def reference_run(data, steps):
    """Algorithm 2 of the paper, from y = z = w: the points at which it takes gradients."""
    sigma, theta_1, theta_2, eta = constants(L, MU, P)
    y, z, w, flips, trail = in_numpy(), in_numpy(), in_numpy(), coins(P, SEED), []
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
def test_params_are_those_of_the_paper():
    """Step by step, to 1e-13, in one program."""
    data = make_data()
    tx = optperm.katyusha(1 / (3 * L), MU, P, key=SEED)
    params = start(np.float64)
    opt_state, step = tx.init(params), jax.jit(loops.make_step(tx, evaluation(data)))
    for t, wanted in enumerate(reference_run(data, 20)):
        support.assert_close(jax.device_get(params), wanted, rtol=1e-13, atol=1e-13)
        params, opt_state = step(params, opt_state, part(data, t))
    assert step._cache_size() == 1


@pytest.mark.usefixtures("x64")
def test_it_converges_at_the_rate_of_the_theorem():
    """With a condition number of 1e4 and 32 examples, one a step, where SVRG hardly moves.

    Theorem 11 bounds the mean of Z + Y + W, of which f(y) - f is a part.
    """
    n, mu, steps, p = 32, 1e-4, 30_000, 1 / 32
    rng = np.random.default_rng(0)
    x = rng.normal(size=(n, 3)) * [1.0, 0.1, 0.01]
    x *= np.sqrt(1 - mu) / np.linalg.norm(x, axis=1).max()  # L = 1
    y = x @ [1.0, -3.0, 100.0] + rng.normal(size=n)
    best = np.linalg.solve(x.T @ x / n + mu * np.eye(3), x.T @ y / n)
    data = {"x": jnp.asarray(x), "y": jnp.asarray(y)}

    def loss(w, batch):
        errors = batch["x"] @ w - batch["y"]
        return jnp.mean(errors**2) / 2 + mu * jnp.dot(w, w) / 2

    def excess(w):
        return float(loss(w, data) - loss(best, data))

    rows = rng.integers(n, size=(steps, 1))
    batches = jax.tree.map(lambda leaf: leaf[rows], data)
    options = {"probability": p}
    found = {}
    for name, tx in {
        "katyusha": optperm.katyusha(1 / 3, mu, **options),
        "svrg": optax.chain(optperm.svrg(**options), optax.sgd(1 / 3)),
    }.items():
        step = loops.make_step(tx, evaluation(data, loss))
        run = jax.jit(functools.partial(loops.carry, step))
        found[name] = run(jnp.zeros(3), tx.init(jnp.zeros(3)), batches)
    sigma, theta_1, theta_2, eta = constants(1.0, mu, p)
    first = (1 + eta * sigma) / (2 * eta) * np.sum(best**2)
    first += excess(np.zeros(3)) * (1 / theta_1 + theta_2 * (1 + theta_1) / (p * theta_1))
    rate = max(1 / (1 + eta * sigma), 1 - p * theta_1 / (1 + theta_1))
    rate = max(rate, 1 - (theta_1 + theta_2 - theta_2 / (1 + theta_1)))
    bound = theta_1 * first * rate**steps
    assert bound < 1e-4
    assert excess(found["katyusha"][1].y) <= bound
    assert excess(found["svrg"][0]) > 100 * bound
    assert excess(np.zeros(3)) > 0.1


def test_params_of_16_bits_lose_no_small_steps():
    """They come within two units of their last digit, where a step of SGD is far below one unit."""
    target = jnp.array([300.0, -1.0, 0.3])

    tx, p = optperm.katyusha(0.01, 0.1, 0.1), jnp.zeros(3, jnp.bfloat16)

    def grad_fn(p):
        return 0.1 * (p.astype(jnp.float32) - target)

    def step(carry, _):
        p, state = carry
        updates, state = tx.update(grad_fn(p), state, p, grad_fn=grad_fn, full_grad_fn=grad_fn)
        return (optax.apply_updates(p, updates), state), None

    p, state = jax.jit(lambda c: jax.lax.scan(step, c, length=4000)[0])((p, tx.init(p)))
    assert p.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.float32(p), target, rtol=2**-6)
    np.testing.assert_allclose(state.y, target, rtol=2**-6)


def test_entries_that_are_not_finite_do_no_harm():
    """z stays at an entry whose gradient is NaN, and the next step is finite and goes on."""
    data, params = to_dtype(make_data(), np.float32), start()
    tx = optperm.katyusha(0.05, 0.3, 0.3)
    _, opt_state = loops.make_step(tx, evaluation(data))(params, tx.init(params), part(data, 0))
    grads, extra_args = evaluation(data)(params, part(data, 1))
    bad = grads | {"full": grads["full"].at[1].set(jnp.nan)}
    updates, after = tx.update(bad, opt_state, params, **extra_args)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((updates, after)))
    assert after.z["full"][1] == opt_state.z["full"][1]
    assert np.all((after.z["full"] != opt_state.z["full"])[jnp.array([0, 2])])


def test_a_rate_that_falls_to_zero_ends_in_finite_params():
    x = jnp.float32(np.random.default_rng(0).normal(size=(8, 3)))
    loss = lambda w, x: jnp.mean((x @ w - 1) ** 2)  # noqa: E731
    tx = optax.inject_hyperparams(optperm.katyusha)(
        optax.linear_schedule(0.1, 0.0, 5), strong_convexity=0.1, probability=0.5
    )

    def step(carry, _):
        w, opt_state = carry
        e = optperm.evaluate(loss, w, x)
        full = {"full_grad_fn": lambda w: jax.grad(loss)(w, x)}
        updates, opt_state = tx.update(e.grad, opt_state, w, **e.extra_args, **full)
        return (optax.apply_updates(w, updates), opt_state), None

    (w, _), _ = jax.lax.scan(step, (jnp.zeros(3), tx.init(jnp.zeros(3))), length=9)
    assert np.isfinite(w).all()


def test_what_follows_katyusha_is_warned_of():
    p = {"w": jnp.ones(2)}
    tx = optax.chain(optperm.katyusha(0.1, 0.1, 0.1), optax.add_decayed_weights(0.1))
    updates, state = tx.update(p, tx.init(p), p, grad_fn=lambda p: p, full_grad_fn=lambda p: p)
    with pytest.warns(UserWarning, match="follows katyusha, which is a whole optimizer"):
        optperm.apply_updates(p, updates, state)
