"""Recursive gradients against plain NumPy, and their variance against closed forms on quadratics."""

import jax
import jax.numpy as jnp
import loops
import numpy as np
import optax
import pytest
import replicas
import support

import optperm

EXAMPLES, BATCH, RATE, STEPS = 24, 4, 0.05, 20


def make_data():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(EXAMPLES, 3))
    return {"x": x, "y": x @ np.arange(1.0, 4.0) + rng.normal(size=EXAMPLES)}


@jax.jit
def loss_fn(params, batch):
    return jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2)


def numpy_grad(w, batch):
    return 2 * batch["x"].T @ (batch["x"] @ w - batch["y"]) / len(batch["y"])


def part(data, index):
    first = index * BATCH % EXAMPLES
    return {name: values[first : first + BATCH] for name, values in data.items()}


def evaluation(data, axis_name=None):
    """The gradient of a batch, with that over all examples beside the others."""
    of_batch = loops.evaluation(loss_fn, axis_name=axis_name)

    def evaluate(params, batch):
        grads, extra_args = of_batch(params, batch)
        full_grad_fn = lambda params: of_batch(params, data)[0]  # noqa: E731
        return grads, {"full_grad_fn": full_grad_fn, **extra_args}

    return evaluate


def reference_run(data, a, is_refreshed):
    """The recursion as its papers write it, in NumPy."""
    w, last, d, trail = np.zeros(3), None, None, []
    for t in range(STEPS):
        batch = part(data, t)
        g = numpy_grad(w, batch)
        if is_refreshed(t):
            d = numpy_grad(w, data)
        else:
            d = g if d is None else g + (1 - a(t)) * (d - numpy_grad(last, batch))
        last, w = w, w - RATE * d
        trail.append(w)
    return trail


def coins(probability, seed):
    """The steps that PAGE begins again at: the draw is part of what a seed means, and that of `svrg`."""
    key = jax.random.key(seed, impl="threefry2x32")
    keys = [jax.random.fold_in(key, t) for t in range(STEPS)]
    drawn = [bool(jax.random.bernoulli(k, np.float32(probability))) for k in keys]
    assert 3 <= sum(drawn) <= 12
    return [True, *drawn[1:]]


def falling(t):
    """A coefficient of STORM that falls."""
    return 1.0 / (1.0 + jnp.asarray(t, float)) ** (2 / 3)


METHODS = {
    "sgd": (1.0, {}),
    "storm": (0.3, {}),
    "storm, falling": (falling, {}),
    "sarah": (0.0, {"refresh_every": 6}),
    "page": (0.0, {"refresh_probability": 0.3, "seed": 7}),
    "between": (0.2, {"refresh_probability": 0.3, "seed": 7}),
}


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("method", METHODS)
def test_trajectory_is_that_of_the_papers(method):
    """Step by step the params agree with NumPy to 1e-13, in one program."""
    data, (a, options) = make_data(), METHODS[method]
    flips = coins(0.3, seed=7)
    every, with_coins = options.get("refresh_every"), "seed" in options

    def is_refreshed(t):
        return flips[t] if with_coins else every is not None and t % every == 0

    tx = optax.chain(optperm.recursive_gradient(a, **options), optax.sgd(RATE))
    expected = reference_run(data, a if callable(a) else lambda t: a, is_refreshed)
    step = jax.jit(loops.make_step(tx, evaluation(data)))
    params = {"w": jnp.zeros(3)}
    opt_state = tx.init(params)
    for t, wanted in enumerate(expected):
        params, opt_state = step(params, opt_state, part(data, t))
        np.testing.assert_allclose(params["w"], wanted, rtol=1e-13, atol=1e-13)
    assert step._cache_size() == 1
    plain = reference_run(data, lambda t: 1.0, lambda t: False)[-1]
    assert (np.abs(plain - params["w"]).max() > 1e-2) == (method != "sgd")


# Variance on quadratics: closed forms.

SIGMA, SPREAD = 0.7, 0.4


def errors_along(tx, draws, path):
    """What is wrong with each estimate along given params, for sequences of errors of the batches.

    The gradient of a batch with draw e is (1 + s e) theta + sigma e, so the full one is theta.

    Args:
      tx: A recursive gradient; or from a seed one, where `draws` come with seeds.
      draws: (sequences, steps), of mean 0 and variance 1.
      path: (steps,), the params.
    """

    def along(e):
        def body(opt_state, at):
            e, theta = at

            def grad_fn(p):
                return (1.0 + SPREAD * e) * p + SIGMA * e

            d, opt_state = tx.update(
                grad_fn(theta), opt_state, theta, grad_fn=grad_fn, full_grad_fn=lambda p: p
            )
            return opt_state, d - theta

        return jax.lax.scan(body, tx.init(path[0]), (e, path))[1]

    return jax.jit(jax.vmap(along))(draws)


def all_signs(steps):
    """Every sequence of +1 and -1 once: means over them are expectations, exactly."""
    return 1.0 - 2.0 * ((np.arange(2**steps)[:, None] >> np.arange(steps)) & 1)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("a", [1.0, 0.3, 0.0])
def test_variance_of_storm(a):
    """At fixed params it falls to sigma^2 a / (2 - a); along a path each step adds that of the change.

    The error follows e_t = (1 - a) e_{t-1} + (noise at theta_t) - (1 - a) (noise at theta_{t-1}).
    """
    steps = 9
    for path in (np.zeros(steps), np.linspace(1.0, -1.0, steps)):
        got = errors_along(optperm.recursive_gradient(a), all_signs(steps), path)
        np.testing.assert_allclose(np.mean(got, axis=0), 0.0, atol=1e-13)
        noise = SPREAD * path + SIGMA  # times the draw of the step
        added = noise - (1 - a) * np.concatenate([[0.0], noise[:-1]])
        variance, expected = 0.0, []
        for each in added:
            variance = (1 - a) ** 2 * variance + each**2
            expected.append(variance)
        np.testing.assert_allclose(np.mean(got**2, axis=0), expected, rtol=1e-12)
    flat = errors_along(optperm.recursive_gradient(a), all_signs(steps), np.zeros(steps))
    limit = SIGMA**2 * (a / (2 - a) if a else 1.0)
    rest = (1 - a) ** (2 * steps - 2)
    wanted = limit + (SIGMA**2 - limit) * rest
    np.testing.assert_allclose(np.mean(flat[:, -1] ** 2), wanted, rtol=1e-12)


@pytest.mark.usefixtures("x64")
def test_variance_of_sarah():
    """It is nothing after a full gradient, then that of the changes of the gradient, added up."""
    steps = 9
    path = np.cumsum(np.linspace(0.1, 0.5, steps))
    tx = optperm.recursive_gradient(0.0, refresh_every=4)
    got = errors_along(tx, all_signs(steps), path)
    changes = SPREAD**2 * np.diff(path, prepend=path[0]) ** 2
    expected = [changes[4 * (t // 4) + 1 : t + 1].sum() for t in range(steps)]
    np.testing.assert_allclose(np.mean(got**2, axis=0), expected, rtol=1e-12, atol=1e-30)


@pytest.mark.usefixtures("x64")
def test_variance_of_page():
    """With steps of one length it settles at s^2 delta^2 (1 - p) / p, over coins and batches."""
    p, delta, steps, runs = 0.3, 0.5, 25, 4000
    path = delta * np.arange(steps)
    signs = np.random.default_rng(0).choice([-1.0, 1.0], (runs, steps))

    def of_seed(seed, draws):
        tx = optperm.recursive_gradient(0.0, p, seed=seed)
        return errors_along(tx, draws[None], path)[0]

    got = jax.jit(jax.vmap(of_seed))(jnp.arange(runs), signs)
    wanted = SPREAD**2 * delta**2 * (1 - p) / p
    np.testing.assert_allclose(np.mean(got[:, 12:] ** 2), wanted, rtol=0.05)
    np.testing.assert_array_equal(got[:, 0], 0.0)  # the first step has the full gradient


# Precision, what is not finite, and many devices.


def test_bfloat16_params_keep_a_float32_estimate():
    """A thousand small changes add up, of which bfloat16 would lose each."""
    params = jnp.zeros((), jnp.bfloat16)
    tx = optperm.recursive_gradient(0.0)
    g = jnp.bfloat16(1.0)
    _, opt_state = tx.update(g, tx.init(params), params, grad_fn=lambda p: g)

    def body(opt_state, _):
        d, opt_state = tx.update(g, opt_state, params, grad_fn=lambda p: jnp.bfloat16(0.99609375))
        return opt_state, d

    opt_state, d = jax.jit(lambda s: jax.lax.scan(body, s, length=256))(opt_state)
    assert d.dtype == jnp.bfloat16
    np.testing.assert_allclose(opt_state.snapshot.full_grad, 2.0, rtol=1e-6)


def test_an_entry_that_is_not_finite_begins_again():
    """A bad gradient is handed on, a bad estimate is that of the batch, and others go on."""
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


def test_a_full_gradient_between_steps():
    """`take_snapshot` makes it the estimate: with a = 0 the next step is it, whatever its batch."""
    data = jax.tree.map(jnp.float32, make_data())
    params = {"w": jnp.float32([1.0, -1.0, 2.0])}
    mu = jax.grad(loss_fn)(params, data)
    tx = optperm.recursive_gradient(0.0)
    opt_state = optperm.take_snapshot(tx.init(params), params, mu)
    grads, extra_args = evaluation(data)(params, part(data, 1))
    d, _ = tx.update(grads, opt_state, params, **extra_args)
    support.assert_close(d, mu, rtol=1e-6)
    assert np.abs(d["w"] - grads["w"]).max() > 1e-2


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("mapping", "method"),
    support.in_turns(["pmap", "shard_map", "shard_map unchecked"], ["storm", "sarah", "between"]),
)
def test_four_devices_train_as_one(mapping, method):
    """All draw the same coin, and end with the numbers of a single device, bit for bit the same."""
    a, options = METHODS[method]
    tx = optax.chain(optperm.recursive_gradient(a, **options), optax.sgd(RATE))
    data = jax.tree.map(jnp.asarray, make_data())

    def train(params, own, axis_name=replicas.AXIS):
        data, batches = own
        step = loops.make_step(tx, evaluation(data, axis_name=axis_name))
        return loops.carry(step, params, tx.init(params), batches), ()

    batches = replicas.stack([part(data, t) for t in range(6)])
    split = jax.tree.map(lambda x: x.reshape(4, -1, *x.shape[1:]), data)
    quarters = jax.tree.map(lambda x: jnp.moveaxis(x.reshape(6, 4, 1, *x.shape[2:]), 1, 0), batches)
    params = {"w": jnp.zeros(3)}
    got, _ = replicas.share(train, mapping, 4)(params, (split, quarters))
    expected, _ = train(params, (data, batches), axis_name=None)
    for index in range(4):
        mine = replicas.take(got, index)
        support.assert_same_bits(mine[0], replicas.take(got[0], 0))
        support.assert_close(mine, expected, rtol=1e-12, atol=1e-13)
