"""SVRG against plain NumPy, against closed forms, and inside what Optax and Flax wrap around it."""

import functools
import re

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import loops
import numpy as np
import optax
import pytest
import replicas
import support

import optperm

EXAMPLES, BATCH, RATE = 24, 4, 0.05


def make_data(examples=EXAMPLES, features=3, noise=1.0):
    """Noisy linear data in float64: no params fit all of it."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(examples, features))
    return {"x": x, "y": x @ np.arange(1.0, features + 1) + noise * rng.normal(size=examples)}


def start(dtype=np.float32):
    """Names that a method may not stumble over: the original overwrote params called "full"."""
    return {"full": jnp.zeros(3, dtype), "bias_full": jnp.ones((), dtype)}


@jax.jit
def loss_fn(params, batch):
    error = batch["x"] @ params["full"] + params["bias_full"] - batch["y"]
    return jnp.mean(error**2)


def numpy_grad(params, batch):
    """The gradient of `loss_fn`, by hand."""
    error = batch["x"] @ params["full"] + params["bias_full"] - batch["y"]
    n = len(error)
    return {"full": 2 * batch["x"].T @ error / n, "bias_full": 2 * np.sum(error) / n}


def part(data, index, size=BATCH):
    first = index * size % len(data["y"])
    return {name: values[first : first + size] for name, values in data.items()}


def to_dtype(tree, dtype):
    return jax.tree.map(lambda x: jnp.asarray(x, dtype), tree)


def evaluation(data=None, loss=loss_fn, axis_name=None):
    """The gradient of a batch with everything that SVRG may ask for; `data` are all examples."""
    of_batch = loops.evaluation(loss, axis_name=axis_name)

    def evaluate(params, batch):
        grads, extra_args = of_batch(params, batch)
        full_grad_fn = lambda params: of_batch(params, data)[0]  # noqa: E731
        return grads, {"full_grad_fn": full_grad_fn, **extra_args}

    return evaluate


def correct(tx, params, opt_state, batch, data=None, loss=loss_fn):
    """The updates of one step, and the state after it."""
    grads, extra_args = evaluation(data, loss)(params, batch)
    return tx.update(grads, opt_state, params, **extra_args)


def train(tx, params, opt_state, data, steps, size=BATCH, loss=loss_fn):
    """The params after each step of batches in turn."""
    batches = [part(data, t, size) for t in steps]
    trail = loops.train(tx, params, batches, evaluate=evaluation(data, loss), opt_state=opt_state)
    return [params for params, _ in trail]


def snapshot_at(opt_state, params, data, loss=loss_fn):
    return optperm.take_snapshot(opt_state, params, jax.grad(loss)(params, data))


# The method itself.


def reference_run(data, steps, coefficient, refresh):
    """SVRG with a constant rate as its papers write it, in NumPy.

    `refresh(t)` says when to take a snapshot in step t: "before" it is used, "after", or None.
    """
    theta = {"full": np.zeros(3), "bias_full": np.ones(())}
    snapshot, mu, trail = None, None, []
    for t in range(steps):
        batch, old = part(data, t), theta
        if snapshot is None or refresh(t) == "before":
            snapshot, mu = theta, numpy_grad(theta, data)
        g, at_snapshot = numpy_grad(theta, batch), numpy_grad(snapshot, batch)
        theta = {
            k: theta[k] - RATE * (g[k] - coefficient(t) * (at_snapshot[k] - mu[k])) for k in theta
        }
        if refresh(t) == "after":
            snapshot, mu = old, numpy_grad(old, data)
        trail.append(theta)
    return trail


def alpha(t):
    """The coefficient of alpha-SVRG, falling to 0 within the run."""
    return 0.75 * jnp.maximum(0.0, 1.0 - jnp.asarray(t, float) / 15)


def coins(probability, seed):
    """The steps after which loopless SVRG moves its snapshot: the draw is part of what a seed means."""
    key = jax.random.key(seed, impl="threefry2x32")
    drawn = [
        bool(jax.random.bernoulli(jax.random.fold_in(key, t), np.float32(probability)))
        for t in range(20)
    ]
    assert 3 <= sum(drawn) <= 12
    return drawn


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("form", "falling"),
    support.in_turns(["between steps", "every 6 steps", "loopless"], [True, False]),
)
def test_trajectory_is_that_of_the_papers(form, falling):
    """Step by step the params agree with NumPy, for all three ways to take snapshots, to 1e-13."""
    data = make_data()
    schedule = alpha if falling else 1.0
    if form == "loopless":
        flips = coins(0.3, seed=7)
        tx = optperm.svrg(schedule, refresh_probability=0.3, seed=7)

        def refresh(t):
            return "after" if flips[t] else None
    else:
        tx = optperm.svrg(schedule, refresh_every=6 if form == "every 6 steps" else None)

        def refresh(t):
            return "before" if t % 6 == 0 else None

    expected = reference_run(data, 20, alpha if falling else lambda t: 1.0, refresh)
    tx = optax.chain(tx, optax.sgd(RATE))
    params, opt_state = start(np.float64), tx.init(start(np.float64))
    step = jax.jit(loops.make_step(tx, evaluation(data)))
    for t, wanted in enumerate(expected):
        if form == "between steps" and t % 6 == 0:
            opt_state = snapshot_at(opt_state, params, data)
        params, opt_state = step(params, opt_state, part(data, t))
        chex.assert_trees_all_close(params, wanted, rtol=1e-13, atol=1e-13)
    assert step._cache_size() == 1  # Snapshots do not make it compile again.
    plain = reference_run(data, 20, lambda t: 0.0, refresh)[-1]
    assert np.abs(plain["full"] - params["full"]).max() > 1e-2


@pytest.mark.usefixtures("x64")
def test_reaches_the_optimum_of_noisy_least_squares():
    """40 epochs at a constant rate, a snapshot every 2: within 1e-15, where SGD stays above 1e-3."""
    n, size, epochs = 1000, 20, 40
    data = make_data(n, 5, noise=2.0)
    x, y = data["x"], data["y"]
    best = np.linalg.lstsq(x, y, rcond=None)[0]

    def loss(w, batch):
        return jnp.mean((batch["x"] @ w - batch["y"]) ** 2)

    def suboptimalities(tx, with_snapshots):
        step = loops.make_step(tx, evaluation(data, loss))

        @jax.jit
        def run_epoch(w, opt_state, order):
            batches = jax.tree.map(lambda leaf: leaf[order], to_dtype(data, float))
            return loops.carry(step, w, opt_state, batches)

        rng = np.random.default_rng(1)
        w = jnp.zeros(5)
        opt_state = tx.init(w)
        for epoch in range(epochs):
            if with_snapshots and epoch % 2 == 0:
                opt_state = snapshot_at(opt_state, w, data, loss)
            w, opt_state = run_epoch(w, opt_state, rng.permutation(n).reshape(-1, size))
            yield float(np.mean((x @ (np.asarray(w) - best)) ** 2))

    reduced = suboptimalities(optax.chain(optperm.svrg(), optax.sgd(0.1)), with_snapshots=True)
    assert [*reduced][-1] <= 1e-15
    assert min(suboptimalities(optax.sgd(0.1), with_snapshots=False)) > 1e-3


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("coefficient", [1.0, 0.3])
def test_gradients_stay_unbiased_with_less_variance(coefficient):
    """Over the batches of an epoch they average to the gradient at the current params, to rounding."""
    data = to_dtype(make_data(), np.float64)
    params = {"full": jnp.array([0.9, 1.8, 3.2]), "bias_full": jnp.array(0.1)}
    near = jax.tree.map(lambda p: p + 1e-3, params)
    tx = optperm.svrg(coefficient)
    opt_state = snapshot_at(tx.init(near), near, data)
    corrected, plain = [], []
    for t in range(EXAMPLES // BATCH):
        corrected.append(correct(tx, params, opt_state, part(data, t))[0])
        plain.append(jax.grad(loss_fn)(params, part(data, t)))
    mean = jax.tree.map(lambda g: jnp.mean(g, axis=0), replicas.stack(corrected))
    chex.assert_trees_all_close(mean, numpy_grad(params, data), rtol=1e-13, atol=1e-13)
    spread, of_sgd = (
        np.std(replicas.stack(grads)["full"], axis=0).max() for grads in (corrected, plain)
    )
    # At one point the correction leaves the share 1 - c of the deviation from the mean.
    np.testing.assert_allclose(spread / of_sgd, 1 - coefficient, atol=5e-3)


def test_gradient_at_the_snapshot_costs_nothing_while_it_is_not_used():
    """Before the first snapshot, and where the coefficient is 0, only the one gradient is computed."""
    calls = []
    data = to_dtype(make_data(), np.float32)
    tx = optperm.svrg(lambda count: jnp.where(count < 2, 1.0, 0.0))
    params = start()

    @jax.jit
    def step(params, opt_state, batch):
        e = optperm.evaluate(loss_fn, params, batch)

        def grad_fn(at):
            jax.debug.callback(lambda: calls.append(1))
            return e.extra_args["grad_fn"](at)

        return e.grad, tx.update(e.grad, opt_state, params, grad_fn=grad_fn)

    opt_state = tx.init(params)
    for t, expected in enumerate([0, 1, 1]):
        if t == 1:
            opt_state = snapshot_at(opt_state, start(), data)
            params = jax.tree.map(lambda p: p + 0.5, params)
        grad, (updates, opt_state) = jax.block_until_ready(step(params, opt_state, part(data, t)))
        jax.effects_barrier()
        assert len(calls) == expected
        is_same = all(map(np.array_equal, jax.tree.leaves(updates), jax.tree.leaves(grad)))
        assert is_same == (t != 1)


def test_steps_without_a_snapshot_say_so():
    """They are those without SVRG: where Python sees the state it warns, until there is a snapshot."""
    params, tx = start(), optperm.svrg()
    opt_state = tx.init(params)
    for state in (
        jax.tree.map(np.asarray, opt_state),
        opt_state,
    ):  # as a checkpoint may give it back
        with pytest.warns(RuntimeWarning, match=r"no snapshot yet.*optperm\.take_snapshot"):
            updates, opt_state = tx.update(params, state, params, grad_fn=lambda p: p)
    support.assert_same_bits(updates, params)
    assert not opt_state.snapshot.is_taken
    opt_state = optperm.take_snapshot(opt_state, params, params)
    tx.update(params, opt_state, params, grad_fn=lambda p: p)
    for options in ({"refresh_every": 2}, {"refresh_probability": 0.5}):
        tx = optperm.svrg(**options)
        _, opt_state = tx.update(
            params, tx.init(params), params, grad_fn=lambda p: p, full_grad_fn=lambda p: p
        )
        assert opt_state.snapshot.is_taken


@pytest.mark.parametrize(
    ("method", "allowed"),
    [
        (optperm.svrg(), 0),
        (optperm.svrg(refresh_every=5), 0),
        (optperm.svrg(refresh_probability=0.2), 0),
        # The XLA of jax 0.10 makes some, where that of 0.12 makes none.
        (optperm.recursive_gradient(0.1), 2),
        (optperm.recursive_gradient(0.0, 0.2), 2),
        (optperm.mars(), 1),
    ],
    ids=["svrg", "refresh_every", "loopless", "storm", "page", "mars"],
)
def test_a_step_between_refreshes_copies_no_state(method, allowed):
    """In donated buffers: what is read and what is renewed lie in the same place."""
    params = {"w": jnp.zeros((64, 48))}
    tx = optax.chain(method, optax.sgd(0.1))

    def loss(params, batch):
        return jnp.mean((batch @ params["w"]) ** 2)

    def step(params, opt_state, batch):
        e = optperm.evaluate(loss, params, batch)
        updates, opt_state = tx.update(
            e.grad, opt_state, params, full_grad_fn=e.extra_args["grad_fn"], **e.extra_args
        )
        return optax.apply_updates(params, updates), opt_state

    run = jax.jit(step, donate_argnums=(0, 1))
    text = run.lower(params, tx.init(params), jnp.ones((4, 64))).compile().as_text()
    entry = text[text.index("\nENTRY ") :]
    assert re.search(r"f32\[64,48\]", entry)
    assert len(re.findall(r"= f32\[64,48\]\S* copy\(", entry)) <= allowed


def test_both_gradients_of_a_step_see_the_same_dropout_mask():
    """At the snapshot itself they cancel bit for bit, whatever the key: what is left is mu."""
    dropout = nn.Dropout(0.5, deterministic=False)
    data, params = to_dtype(make_data(), np.float32), start()

    def loss(params, batch):
        x = dropout.apply({}, batch["x"], rngs={"dropout": batch["key"]})
        return loss_fn(params, batch | {"x": x})

    tx = optperm.svrg()
    mu = support.random_like(params, 3)
    opt_state = optperm.take_snapshot(tx.init(params), params, mu)
    grads, step = [], jax.jit(functools.partial(correct, tx, loss=loss))
    for seed in range(2):
        batch = part(data, 0) | {"key": jax.random.key(seed)}
        updates, _ = step(params, opt_state, batch)
        support.assert_same_bits(updates, mu)
        grads.append(jax.grad(loss)(params, batch)["full"])
    assert not np.array_equal(*grads)  # The mask did make a difference.


# Precision, and what is not finite.


def test_bfloat16_params_keep_a_float32_mean():
    """mu is not rounded to the params' dtype, so the mean of the corrected gradients is not biased."""
    params = start(jnp.bfloat16)
    tx = optperm.svrg()
    mu = {"full": jnp.float32([1.001, -2.003, 0.3333]), "bias_full": jnp.float32(1e-3)}
    opt_state = optperm.take_snapshot(tx.init(params), params, mu)
    support.assert_same_bits(opt_state.snapshot.full_grad, mu)
    chex.assert_trees_all_equal_dtypes(opt_state.snapshot.params, params)
    # g - g_snapshot = -1 brings the small digits of mu to the front.
    g = {"full": jnp.bfloat16([2.0, 2.0, 2.0]), "bias_full": jnp.bfloat16(2.0)}
    at_snapshot = jax.tree.map(lambda x: x + jnp.ones_like(x), g)
    updates, _ = tx.update(g, opt_state, params, grad_fn=lambda p: at_snapshot)
    expected = jax.tree.map(lambda m: (m - 1.0).astype(jnp.bfloat16), mu)
    support.assert_same_bits(updates, expected)
    rounded_first = jnp.bfloat16(1.001) - jnp.bfloat16(1.0)
    assert rounded_first != updates["full"][0]


def test_what_is_large_cancels_first():
    """In float32, near the snapshot, a mean far below the noise of a batch comes out to the last bit."""
    params = {"w": jnp.zeros(3)}
    tx = optperm.svrg()
    mu = {"w": jnp.float32([1e-7, -3e-8, 2e-9])}
    opt_state = optperm.take_snapshot(tx.init(params), params, mu)
    g = {"w": jnp.float32([1e3, -2e3, 0.5])}
    updates, _ = jax.jit(lambda s: tx.update(g, s, params, grad_fn=lambda p: g))(opt_state)
    support.assert_same_bits(updates, mu)


def test_entries_whose_correction_is_not_finite_pass_through():
    """The others are corrected; a gradient that is itself not finite stays so, for others to see."""
    params = {"w": jnp.zeros(4, jnp.float16)}
    tx = optperm.svrg()
    opt_state = optperm.take_snapshot(tx.init(params), params, {"w": jnp.ones(4)})
    g = {"w": jnp.float16([1.0, 2.0, jnp.nan, -60000.0])}
    bad = {"w": jnp.float16([jnp.inf, 1.0, 1.0, 60000.0])}
    updates, after = tx.update(g, opt_state, params, grad_fn=lambda p: bad)
    np.testing.assert_array_equal(updates["w"], np.float16([1.0, 2.0, np.nan, -60000.0]))
    support.assert_same_bits(after.snapshot, opt_state.snapshot)


def test_a_snapshot_that_is_not_finite_is_not_taken():
    """The old one stays, between steps with a warning, inside them and under jit without one."""
    params, data = start(), to_dtype(make_data(), np.float32)
    tx = optperm.svrg(refresh_every=1)
    good = snapshot_at(tx.init(params), params, data)
    elsewhere = jax.tree.map(lambda p: p + 1.0, params)
    nan_grad = {"full": jnp.float32([1.0, jnp.nan, 1.0]), "bias_full": jnp.float32(1.0)}
    for before in (good, tx.init(params)):
        for at, grad in [(elsewhere, nan_grad), (nan_grad, elsewhere)]:
            with pytest.warns(RuntimeWarning, match="snapshot was not taken"):
                support.assert_same_bits(optperm.take_snapshot(before, at, grad), before)
            support.assert_same_bits(jax.jit(optperm.take_snapshot)(before, at, grad), before)
        updates, after = tx.update(
            params, before, elsewhere, grad_fn=lambda p: p, full_grad_fn=lambda p: nan_grad
        )
        support.assert_same_bits(after.snapshot, before.snapshot)
        assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(updates))


def test_snapshots_are_copies():
    """The params and the full gradient may be donated, or change in place, after it."""
    tx = optperm.svrg()
    params = {"w": np.ones(3, np.float32)}
    grad = {"w": np.full(3, 2.0, np.float32)}
    opt_state = optperm.take_snapshot(tx.init(params), params, grad)
    params["w"][:], grad["w"][:] = 7.0, 7.0
    np.testing.assert_array_equal(opt_state.snapshot.params["w"], 1.0)
    np.testing.assert_array_equal(opt_state.snapshot.full_grad["w"], 2.0)
    params, grad = {"w": jnp.ones(3)}, {"w": jnp.ones(3)}
    opt_state = optperm.take_snapshot(tx.init(params), params, grad)
    jax.jit(lambda *x: x, donate_argnums=(0, 1))(params, grad)
    np.testing.assert_array_equal(opt_state.snapshot.full_grad["w"], 1.0)
    np.testing.assert_array_equal(opt_state.snapshot.params["w"], 1.0)


# Composition.


@functools.cache
def alone():
    """The updates that svrg gives by itself over a few steps, with a snapshot after the first."""
    return corrected_gradients(optperm.svrg(0.5))


def corrected_gradients(tx, take=optperm.take_snapshot):
    data = to_dtype(make_data(), np.float32)
    params, trail = start(), []
    opt_state = tx.init(params)
    update = jax.jit(functools.partial(correct, tx))
    for t in range(4):
        if t == 1:
            opt_state = take(opt_state, params, jax.grad(loss_fn)(params, data))
        updates, opt_state = update(params, opt_state, part(data, t))
        params = jax.tree.map(lambda p, u: p - 0.05 * u, params, updates)
        trail.append(updates)
    return trail


@pytest.mark.usefixtures("lenient")
def test_injected_coefficient_can_be_changed():
    """Numbers kept in the state are traced; another one there gives what it gives when built in."""
    tx = optax.inject_hyperparams(optperm.svrg)(coefficient=0.9)

    def take(opt_state, *arguments):
        opt_state = optperm.take_snapshot(opt_state, *arguments)
        opt_state.hyperparams["coefficient"] = jnp.float32(0.5)
        return opt_state

    chex.assert_trees_all_close(corrected_gradients(tx, take), alone(), rtol=1e-6)


@pytest.mark.usefixtures("lenient")
def test_gradient_accumulation_after_it_is_a_larger_batch():
    """Two corrected half batches in MultiSteps are one step of SVRG on the whole batch."""
    data = to_dtype(make_data(), np.float32)
    accumulating = optax.MultiSteps(optax.sgd(RATE), 2).gradient_transformation()
    results = []
    for rest, size in [(accumulating, BATCH), (optax.sgd(RATE), 2 * BATCH)]:
        tx = optax.chain(optperm.svrg(), rest)
        opt_state = snapshot_at(tx.init(start()), start(), data)
        results.append(train(tx, start(), opt_state, data, range(2 * EXAMPLES // size), size)[-1])
    chex.assert_trees_all_close(*results, rtol=1e-5)
    assert not np.allclose(results[0]["full"], 0.0)


def test_part_of_the_params():
    """Beside params that do not change it is SVRG of the loss as a function of its own part."""
    data = to_dtype(make_data(), np.float32)
    frozen = start()["bias_full"]

    def loss_of_part(part, batch):
        return loss_fn(part | {"bias_full": frozen}, batch)

    svrg_sgd = optax.chain(optperm.svrg(), optax.sgd(RATE))
    labels = {"full": "svrg", "bias_full": "frozen"}
    tx = optax.partition({"svrg": svrg_sgd, "frozen": optax.set_to_zero()}, labels)
    trail = train(tx, start(), snapshot_at(tx.init(start()), start(), data), data, range(4))
    own = {"full": start()["full"]}
    own_state = snapshot_at(svrg_sgd.init(own), own, data, loss_of_part)
    alone = train(svrg_sgd, own, own_state, data, range(4), loss=loss_of_part)
    for params, expected in zip(trail, alone, strict=True):
        chex.assert_trees_all_close(params["full"], expected["full"], rtol=1e-6)
        assert params["bias_full"] == frozen
    assert np.abs(alone[-1]["full"]).max() > 0.1


# Many devices.


def batches_of(data):
    """Six of them, stacked."""
    return replicas.stack([part(data, t) for t in range(6)])


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("mapping", "options"),
    support.in_turns(
        ["pmap", "shard_map", "shard_map unchecked"],
        [{}, {"refresh_every": 3}, {"refresh_probability": 0.4}],
    ),
)
def test_four_devices_train_as_one(mapping, options):
    """Snapshot, training in a scan, and snapshots inside it give the numbers of a single device."""
    tx = optax.chain(optperm.svrg(0.9, **options), optax.sgd(RATE))
    data = to_dtype(make_data(), np.float64)

    def train(params, own, axis_name=replicas.AXIS):
        data, batches = own
        full_grad = optperm.full_gradient(loss_fn, params, [data], axis_name=axis_name)
        opt_state = optperm.take_snapshot(tx.init(params), params, full_grad)
        step = loops.make_step(tx, evaluation(data, axis_name=axis_name))
        return loops.carry(step, params, opt_state, batches), ()

    # Each device holds a quarter of the data and of each batch.
    split = jax.tree.map(lambda x: x.reshape(4, -1, *x.shape[1:]), data)
    batches = jax.tree.map(
        lambda x: jnp.moveaxis(x.reshape(6, 4, 1, *x.shape[2:]), 1, 0), batches_of(data)
    )
    got, _ = replicas.share(train, mapping, 4)(start(np.float64), (split, batches))
    expected, _ = train(start(np.float64), (data, batches_of(data)), axis_name=None)
    for index in range(4):
        mine = replicas.take(got, index)
        chex.assert_trees_all_equal(mine[0], replicas.take(got[0], 0))
        chex.assert_trees_all_close(mine, expected, rtol=1e-12, atol=1e-13)


def nearby_starts():
    """Params of four models."""
    return replicas.stack([jax.tree.map(lambda p, i=i: p + 0.1 * i, start()) for i in range(4)])


@pytest.mark.parametrize(
    ("mapping", "options"),
    support.in_turns(
        ["shard_map", "shard_map unchecked"],
        [{"refresh_every": 3}, {"refresh_probability": 0.4}],
    ),
)
def test_a_model_per_device(mapping, options):
    """Params that vary over the mapped axis are corrected each by a snapshot of their own."""
    tx = optax.chain(optperm.svrg(**options), optax.sgd(RATE))
    data = to_dtype(make_data(), np.float32)
    batches = batches_of(data)

    def train(params):
        step = loops.make_step(tx, evaluation(data))
        return loops.carry(step, params, tx.init(params), batches)[0]

    got = replicas.MAPPINGS[mapping](train, 4)(nearby_starts())
    chex.assert_trees_all_close(got, jax.jit(jax.vmap(train))(nearby_starts()), rtol=1e-5)


@pytest.mark.parametrize("options", [{}, {"refresh_every": 1}])
def test_params_that_leave_a_snapshot_that_devices_share(options):
    """In checked shard_map a replicated state serves params that differ from device to device."""
    tx = optperm.svrg(**options)
    data = to_dtype(make_data(), np.float32)
    opt_state = snapshot_at(tx.init(start()), start(), data)

    def update(params):
        return correct(tx, params, opt_state, part(data, 0), data)

    got = replicas.MAPPINGS["shard_map"](update, 4)(nearby_starts())
    chex.assert_trees_all_close(got, jax.jit(jax.vmap(update))(nearby_starts()), rtol=1e-5)


def test_states_of_replicas_take_a_snapshot_at_once():
    """A state with a leading axis of replicas, as pmap keeps it, takes params with the same axis."""
    fresh = optperm.svrg().init(start())
    three = (replicas.stack([tree] * 3) for tree in (fresh, start(), start()))
    one = optperm.take_snapshot(fresh, start(), start())
    support.assert_same_bits(
        optperm.take_snapshot(*three), jax.tree.map(jnp.asarray, replicas.stack([one] * 3))
    )
