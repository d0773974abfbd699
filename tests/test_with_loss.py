"""`with_loss`: in a loop that passes nothing but gradients, methods get what `evaluate` makes."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import support

import optperm

X = support.normal((12, 3), 0)
DATA = {"x": X, "y": X @ jnp.array([1.0, -2.0, 0.5]), "scale": jnp.float32(1.0)}
START = {"w": jnp.array([0.3, 0.1, -0.2])}


def loss_fn(params, batch):
    return batch["scale"] * jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2)


def run(tx, num_steps=6, gradient=None):
    """Params and states of a loop that knows of no extra arguments."""

    def step(carry, _):
        params, state = carry
        updates, state = tx.update(gradient or params, state, params)
        return (optax.apply_updates(params, updates), state), (params, state)

    return jax.jit(lambda: jax.lax.scan(step, (START, tx.init(START)), length=num_steps))()[1]


@pytest.mark.slow
def test_all_data_are_those_of_a_loop_that_passes_the_extra_arguments():
    """SVRG takes its snapshots within the step, of the gradient over all data."""
    inner = optax.chain(optperm.svrg(every=3), optax.sgd(0.1))
    params, _ = run(optperm.with_loss(inner, loss_fn, DATA))
    by_hand, state = START, inner.init(START)
    for after in params["w"][1:]:
        e = optperm.evaluate(loss_fn, by_hand, DATA)
        full = {"full_grad_fn": e.extra_args["grad_fn"]}
        updates, state = inner.update(e.grad, state, by_hand, **e.extra_args, **full)
        by_hand = optax.apply_updates(by_hand, updates)
        chex.assert_trees_all_close(after, by_hand["w"], rtol=1e-5)


def test_snapshot_of_a_part_of_the_params_is_that_of_the_documented_loop():
    """Inside `optax.partition` a method asks for the full gradient at its part of the params."""
    svrg_sgd = optax.chain(optperm.svrg(every=2), optax.sgd(0.1))
    tx = optax.partition({"svrg": svrg_sgd, "rest": optax.sgd(0.05)}, {"w": "svrg", "b": "rest"})

    def loss(params, batch):
        return loss_fn(params, batch | {"y": batch["y"] - params["b"]})

    params = START | {"b": jnp.float32(0.5)}
    wrapped = optperm.with_loss(tx, loss, DATA)

    def step(params, state, ours):
        e = optperm.evaluate(loss, params, DATA)
        full = optperm.evaluate(loss, params, DATA).extra_args["grad_fn"]
        by_hand = tx.update(e.grad, state, params, full_grad_fn=full, **e.extra_args)
        return by_hand, wrapped.update(params, ours, params)

    state, ours = tx.init(params), wrapped.init(params)
    for _ in range(3):
        (updates, state), (got, ours) = jax.jit(step)(params, state, ours)
        support.assert_close(got, updates, rtol=1e-6)
        params = optax.apply_updates(params, updates)
    snapshot = state.inner_states["svrg"].inner_state[0].snapshot
    assert snapshot.is_taken
    assert float(jnp.max(jnp.abs(snapshot.full_grad["w"]))) > 0.01


def test_line_searches_of_optax_and_methods_that_take_no_extra_arguments_run(lenient):
    search = optax.chain(optax.sgd(1.0), optax.scale_by_backtracking_linesearch(20))
    for tx in (optax.lbfgs(), search, optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.01))):
        params, _ = run(optperm.with_loss(tx, loss_fn, DATA), num_steps=40)
        assert loss_fn(jax.tree.map(lambda w: w[-1], params), DATA) < 0.3 * loss_fn(START, DATA)


def recorded(num_examples):
    """Keeps the gradient, the loss and the examples' gradients that it is given."""

    def update(updates, state, params=None, **extra_args):
        del state, params
        at = extra_args["per_example_grad_fn"](START)
        return updates, (updates, extra_args["value"], at)

    def init(params):
        return params, jnp.zeros([]), {"w": jnp.zeros((num_examples, 3))}

    return optax.GradientTransformationExtraArgs(init, update)


def test_each_step_draws_a_batch_of_its_own_for_everything():
    """Loss, gradient and closures are of the same examples, which a key repeats and a step changes."""
    tx = optperm.with_loss(recorded(4), loss_fn, DATA, 4, key=5)
    params, state = run(tx, 4, gradient={"w": jnp.full(3, jnp.nan)})
    typed = optperm.with_loss(recorded(4), loss_fn, DATA, 4, key=jax.random.key(5))
    support.assert_same_bits(typed.init(START).key, state.key[0])
    grads, values, each = state.inner_state
    rows = jax.vmap(jax.grad(loss_fn), in_axes=(None, 0))(
        START, {"x": X[:, None], "y": DATA["y"][:, None], "scale": jnp.ones(12)}
    )["w"]
    drawn = set()
    for step in range(4):
        gaps = np.abs(each["w"][step][:, None] - rows[None]).max(2)
        places = gaps.argmin(1)
        assert gaps.min(1).max() < 1e-4
        batch = {"x": X[places], "y": DATA["y"][places], "scale": DATA["scale"]}
        value, grad = jax.value_and_grad(loss_fn)({"w": params["w"][step]}, batch)
        np.testing.assert_allclose(values[step], value, rtol=1e-4)
        np.testing.assert_allclose(grads["w"][step], grad["w"], rtol=1e-4, atol=1e-5)
        drawn.add(tuple(places.tolist()))
    assert len(drawn) == 4
    support.assert_same_bits(run(tx, 4)[0], params)
    assert state.count.tolist() == [1, 2, 3, 4]


def test_a_key_in_the_data_is_another_one_in_each_step():
    """So that dropout draws other masks, for all of the data too."""
    data = {"x": X, "key": jax.random.key(0)}

    def noisy(params, batch):
        return jnp.sum(params["w"]) * 0.0 + jax.random.uniform(batch["key"])

    for batch_size in (None, 4):
        _, state = run(optperm.with_loss(recorded(batch_size or 12), noisy, data, batch_size), 3)
        assert len(set(state.inner_state[1].tolist())) == 3


def test_what_places_weights_says_so_through_it():
    tx = optax.chain(optperm.recursive_gradient(0.5), optperm.sgperm(1.0))
    tx = optperm.with_loss(tx, loss_fn, DATA, 4)
    params, state = START, jax.jit(tx.init)(START)
    for _ in range(3):
        updates, state = jax.jit(tx.update)(params, state, params)
        params = optperm.apply_updates(params, updates, state)
    support.assert_same_bits(optperm.permutation.permuted_params(state), params)
    assert not np.array_equal(params["w"], START["w"])


def test_example_is_drawn_apart_from_the_batch():
    """An estimator of noise takes their difference, which would be zero for the batch's own example."""

    def subtract(grads, state, params, *, example_grad_fn, **_):
        return example_grad_fn(params) - grads, state

    inner = optax.GradientTransformationExtraArgs(lambda _: optax.EmptyState(), subtract)
    tx = optperm.with_loss(inner, lambda p, x: jnp.mean((p - x) ** 2), jnp.arange(1000.0), 1)
    params = jnp.float32(0.0)
    state, differences = tx.init(params), []
    for _ in range(4):
        updates, state = tx.update(params, state, params)
        differences.append(float(updates))
    assert np.count_nonzero(differences) >= 3


def test_a_method_that_draws_gets_its_gradient_at_a_draw_of_each_step():
    """IVON learns the curvature of a quadratic, which it sees by gradients at draws alone."""
    curvature = jnp.array([1.0, 20.0])
    tx = optperm.ivon(0.05, num_data=1000.0, b2=0.999)
    tx = optperm.with_loss(tx, lambda w, _: 0.5 * jnp.sum(curvature * (w - 1.0) ** 2), jnp.zeros(1))

    def step(carry, _):
        w, state = carry
        updates, state = tx.update(jnp.zeros(2), state, w)
        return (optax.apply_updates(w, updates), state), None

    start = jnp.zeros(2), tx.init(jnp.zeros(2))
    (w, state), _ = jax.jit(lambda start: jax.lax.scan(step, start, length=10_000))(start)
    chex.assert_trees_all_close(w, jnp.ones(2), atol=0.05)
    chex.assert_trees_all_close(state.inner_state.hessian, curvature, rtol=0.2)
