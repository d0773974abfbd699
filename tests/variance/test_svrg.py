"""SVRG against plain NumPy, against closed forms, and inside what Optax wraps around it."""

import functools
import re

import chex
import jax
import jax.numpy as jnp
import loops
import numpy as np
import optax
import pytest
import replicas
import support
from least_squares import RATE, coins, evaluation, loss_fn, make_data, numpy_grad, part, start

import optperm


def snapshot_at(opt_state, params, data, loss=loss_fn):
    return optperm.variance.take_snapshot(opt_state, params, jax.grad(loss)(params, data))


def reference_run(data, coefficient, is_due, *, is_loopless):
    """SVRG as its papers write it, in NumPy; the loopless form uses a snapshot before it is renewed."""
    theta, snapshot, trail = start(np.float64), None, []
    for t, is_renewed in enumerate(is_due):
        batch, old = part(data, t), theta
        if snapshot is None or (is_renewed and not is_loopless):
            snapshot = theta
        g, at_snapshot = numpy_grad(theta, batch), numpy_grad(snapshot, batch)
        mu = numpy_grad(snapshot, data)
        theta = {
            k: theta[k] - RATE * (g[k] - coefficient(t) * (at_snapshot[k] - mu[k])) for k in theta
        }
        if is_renewed and is_loopless:
            snapshot = old
        trail.append(theta)
    return trail


def alpha(t):
    """The coefficient of alpha-SVRG, falling to 0 within the run."""
    return 0.75 * jnp.maximum(0.0, 1.0 - jnp.asarray(t, float) / 15)


FORMS = {"between steps": {}, "every 6": {"every": 6}, "loopless": {"probability": 0.3, "key": 7}}


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(("form", "falling"), support.in_turns(FORMS, [True, False]))
def test_trajectory_with_any_snapshots_is_that_of_the_papers(form, falling):
    """Step by step the params agree with NumPy, for all three ways to take snapshots, to 1e-13."""
    data, is_loopless, flips = make_data(np.float64), form == "loopless", coins(0.3, seed=7)
    is_due = [flips[t] if is_loopless else t % 6 == 0 for t in range(20)]
    run = functools.partial(reference_run, data, is_due=is_due, is_loopless=is_loopless)
    tx = optax.chain(optperm.svrg(alpha if falling else 1.0, **FORMS[form]), optax.sgd(RATE))
    params = jax.device_put(start(np.float64))
    # Snapshots do not make the step compile again.
    step = jax.jit(chex.assert_max_traces(loops.make_step(tx, evaluation(data)), 1))
    opt_state = tx.init(params)
    for t, wanted in enumerate(run(alpha if falling else lambda t: 1.0)):
        if form == "between steps" and is_due[t]:
            opt_state = snapshot_at(opt_state, params, data)
        params, opt_state = step(params, opt_state, part(data, t))
        chex.assert_trees_all_close(params, wanted, rtol=1e-13, atol=1e-13)
    assert np.abs(run(lambda t: 0.0)[-1]["full"] - params["full"]).max() > 1e-2


def test_gradient_at_a_snapshot_that_is_not_used_costs_nothing():
    """Before the first snapshot, and where the coefficient is 0, only the one gradient is computed."""
    calls, data, params = [], make_data(), start()
    tx = optperm.svrg(lambda count: jnp.where(count < 2, 1.0, 0.0))

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


def test_steps_without_a_snapshot_warn():
    """They are those without SVRG: where Python sees the state it warns, until there is a snapshot."""
    params, tx = start(), optperm.svrg()
    opt_state, message = tx.init(params), r"no snapshot yet.*optperm\.variance\.take_snapshot"
    # As a checkpoint may give it back, too.
    for state in (jax.tree.map(np.asarray, opt_state), opt_state):
        with pytest.warns(RuntimeWarning, match=message):
            updates, opt_state = tx.update(params, state, params, grad_fn=lambda p: p)
    support.assert_same_bits(updates, params)
    assert not opt_state.snapshot.is_taken
    opt_state = optperm.variance.take_snapshot(opt_state, params, params)
    tx.update(params, opt_state, params, grad_fn=lambda p: p)


@pytest.mark.parametrize(
    ("method", "allowed"),
    [
        (optperm.svrg(every=5), 0),
        (optperm.svrg(probability=0.2), 0),
        # XLA makes some with jax 0.10, and none with jax 0.12.
        (optperm.recursive_gradient(0.0, 0.2), 2),
        (optperm.mars(), 1),
    ],
    ids=["every", "loopless", "recursive", "mars"],
)
def test_step_between_snapshots_copies_no_state(method, allowed):
    """In donated buffers: what is read and what is renewed lie in the same place."""
    tx, batch = optax.chain(method, optax.sgd(0.1)), np.ones((4, 64), np.float32)
    params = {"w": np.zeros((64, 48), np.float32)}
    evaluate = evaluation(batch, lambda params, batch: jnp.mean((batch @ params["w"]) ** 2))
    step = jax.jit(loops.make_step(tx, evaluate), donate_argnums=(0, 1))
    text = step.lower(params, tx.init(params), batch).compile().as_text()
    entry = text[text.index("\nENTRY ") :]
    assert re.search(r"f32\[64,48\]", entry)
    assert len(re.findall(r"= f32\[64,48\]\S* copy\(", entry)) <= allowed


def test_gradients_of_one_step_see_the_same_dropout_mask():
    """At the snapshot, both gradients cancel for any key, and mu is left."""

    def loss(params, batch):
        keep = jax.random.bernoulli(batch["key"], 0.5, batch["x"].shape)
        return loss_fn(params, batch | {"x": jnp.where(keep, batch["x"], 0.0)})

    params, tx, grads = start(), optperm.svrg(), []
    mu = support.random_like(params, 3)
    opt_state = optperm.variance.take_snapshot(tx.init(params), params, mu)
    for seed in range(2):
        batch = part(make_data(), 0) | {"key": jax.random.key(seed)}
        g, extra_args = evaluation(loss=loss)(params, batch)
        updates, _ = tx.update(g, opt_state, params, **extra_args)
        chex.assert_trees_all_close(updates, mu, rtol=1e-5, atol=1e-6)
        grads.append(g["full"])
    assert np.abs(grads[0] - grads[1]).max() > 0.1  # The mask did make a difference.


def correct_once(dtype, mu, g, at_snapshot):
    """Return the updates of a step with these gradients, and the snapshots before and after it."""
    params, tx = jnp.zeros(mu.shape, dtype), optperm.svrg()
    before = optperm.variance.take_snapshot(tx.init(params), params, mu)
    update = jax.jit(lambda g, state, at: tx.update(g, state, params, grad_fn=lambda p: at))
    updates, after = update(g, before, at_snapshot)
    return updates, before.snapshot, after.snapshot


def test_mean_of_bfloat16_params_stays_float32():
    """mu is not rounded to the params' dtype, so the mean of the corrected gradients is not biased."""
    mu = jnp.float32([1.001, -2.003, 0.3333, 1e-3])
    # g - g_snapshot = -1 brings the small digits of mu to the front.
    at_both = (jnp.full(4, value, jnp.bfloat16) for value in (2.0, 3.0))
    updates, _, snapshot = correct_once(jnp.bfloat16, mu, *at_both)
    support.assert_same_bits(snapshot.full_grad, mu)
    assert updates.dtype == snapshot.params.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.float32(updates), mu - 1.0, rtol=2**-8)


def test_large_terms_cancel_first():
    """In float32, near the snapshot, a mean far below the noise of a batch comes out to the last bit."""
    mu, g = jnp.float32([1e-7, -3e-8, 2e-9]), jnp.float32([1e3, -2e3, 0.5])
    updates, *_ = correct_once(jnp.float32, mu, g, g)
    support.assert_same_bits(updates, mu)


@support.needs_float16
def test_entries_whose_correction_is_not_finite_pass_through():
    """The others are corrected; a gradient that is itself not finite stays so, for others to see."""
    g = jnp.float16([1.0, 2.0, jnp.nan, -60000.0])
    bad = jnp.float16([jnp.inf, 1.0, 1.0, 60000.0])
    updates, before, after = correct_once(jnp.float16, jnp.ones(4), g, bad)
    np.testing.assert_array_equal(updates, np.float16([1.0, 2.0, np.nan, -60000.0]))
    support.assert_same_bits(after, before)


def test_snapshot_that_is_not_finite_is_not_taken():
    """The old one stays, between steps with a warning, inside them and under jit without one."""
    params, tx, take = start(), optperm.svrg(every=1), optperm.variance.take_snapshot
    elsewhere = jax.tree.map(lambda p: p + np.float32(1.0), params)
    bad = elsewhere | {"full": np.float32([1.0, np.nan, 1.0])}
    for before in (snapshot_at(tx.init(params), params, make_data()), tx.init(params)):
        for given in ((elsewhere, bad), (bad, elsewhere)):
            with pytest.warns(RuntimeWarning, match="snapshot was not taken"):
                support.assert_same_bits(take(before, *given), before)
            support.assert_same_bits(jax.jit(take)(before, *given), before)
        closures = {"grad_fn": lambda p: p, "full_grad_fn": lambda p: bad}
        updates, after = tx.update(params, before, elsewhere, **closures)
        support.assert_same_bits(after.snapshot, before.snapshot)
        assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(updates))


def test_snapshots_are_copies():
    """The params and the full gradient may be donated, or change in place, after it."""
    tx = optperm.svrg()
    numpy = {"w": np.ones(3, np.float32)}, {"w": np.full(3, 2.0, np.float32)}
    arrays = jax.tree.map(jnp.array, numpy)
    of_numpy, of_jax = (
        optperm.variance.take_snapshot(tx.init(each[0]), *each) for each in (numpy, arrays)
    )
    numpy[0]["w"][:], numpy[1]["w"][:] = 7.0, 7.0
    jax.jit(lambda *x: x, donate_argnums=(0, 1))(*arrays)
    for opt_state in (of_numpy, of_jax):
        np.testing.assert_array_equal(opt_state.snapshot.params["w"], 1.0)
        np.testing.assert_array_equal(opt_state.snapshot.full_grad["w"], 2.0)


def test_part_of_the_params_is_corrected_by_its_own_loss():
    """Beside params that do not change it is SVRG of the loss as a function of its own part."""
    data, frozen = make_data(), start()["bias_full"]

    def loss_of_part(part, batch):
        return loss_fn(part | {"bias_full": frozen}, batch)

    svrg_sgd = optax.chain(optperm.svrg(), optax.sgd(RATE))
    labels = {"full": "svrg", "bias_full": "frozen"}
    tx = optax.partition({"svrg": svrg_sgd, "frozen": optax.set_to_zero()}, labels)
    batches, own = [part(data, t) for t in range(4)], {"full": start()["full"]}
    state = snapshot_at(tx.init(start()), start(), data)
    trail = loops.train(tx, start(), batches, evaluate=evaluation(), opt_state=state)
    own_state = snapshot_at(svrg_sgd.init(own), own, data, loss_of_part)
    of_part = evaluation(loss=loss_of_part)
    alone = loops.train(svrg_sgd, own, batches, evaluate=of_part, opt_state=own_state)
    expected = [after | {"bias_full": frozen} for after, _ in alone]
    chex.assert_trees_all_close([after for after, _ in trail], expected, rtol=1e-6)
    assert trail[-1][0]["bias_full"] == frozen
    assert np.abs(alone[-1][0]["full"]).max() > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"every": 1}])
def test_params_that_leave_a_snapshot_that_devices_share_are_corrected(options):
    """In checked shard_map a replicated state serves params that differ from device to device."""
    tx, data = optperm.svrg(**options), make_data()
    opt_state = snapshot_at(tx.init(start()), start(), data)

    def update(params):
        grads, extra_args = evaluation(data)(params, part(data, 0))
        return tx.update(grads, opt_state, params, **extra_args)

    nearby = [jax.tree.map(lambda p, i=i: np.float32(p + 0.1 * i), start()) for i in range(4)]
    got = replicas.MAPPINGS["shard_map"](update, 4)(replicas.stack(nearby))
    expected = jax.jit(jax.vmap(update))(replicas.stack(nearby))
    chex.assert_trees_all_close(got, expected, rtol=1e-5, atol=1e-6)


def test_states_of_replicas_take_a_snapshot_at_once():
    """A state with a leading axis of replicas, as pmap keeps it, takes params with the same axis."""
    fresh = optperm.svrg().init(start())
    three = (replicas.stack([tree] * 3) for tree in (fresh, start(), start()))
    one = optperm.variance.take_snapshot(fresh, start(), start())
    support.assert_same_bits(
        optperm.variance.take_snapshot(*three), jax.tree.map(jnp.asarray, replicas.stack([one] * 3))
    )
