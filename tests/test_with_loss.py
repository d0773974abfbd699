"""`with_loss`: in a loop that passes nothing but gradients, methods get what `evaluate` makes."""

import functools

import chex
import jax
import jax.numpy as jnp
import loops
import numpy as np
import optax
import support

import optperm

X = support.normal((12, 3), 0)
DATA = {"x": X, "y": X @ jnp.array([1.0, -2.0, 0.5]), "scale": jnp.float32(1.0)}
START = {"w": jnp.array([0.3, 0.1, -0.2])}


def loss_fn(params, batch):
    return batch["scale"] * jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2)


def run(tx, num_steps, gradient=START):
    """Params and state after each step of a loop that passes no extra arguments."""
    options = {"apply": loops.by_addition, "how": "scan", "init": "jit"}
    return loops.train(tx, START, [gradient] * num_steps, **options)


def test_snapshots_of_a_part_of_the_params_are_those_of_the_documented_loop():
    """Inside `optax.partition` SVRG asks within its step for the gradient over all data at its part."""
    svrg_sgd = optax.chain(optperm.svrg(every=2), optax.sgd(0.1))
    tx = optax.partition({"svrg": svrg_sgd, "rest": optax.sgd(0.05)}, {"w": "svrg", "b": "rest"})

    def loss(params, batch):
        return loss_fn(params, batch | {"y": batch["y"] - params["b"]})

    params, wrapped = START | {"b": jnp.float32(0.5)}, optperm.with_loss(tx, loss, DATA)

    @jax.jit
    def step(params, state, ours):
        e = optperm.evaluate(loss, params, DATA)
        full = {"full_grad_fn": e.extra_args["grad_fn"]}
        by_hand = tx.update(e.grad, state, params, **e.extra_args, **full)
        return by_hand, wrapped.update(params, ours, params)

    state, ours = tx.init(params), wrapped.init(params)
    for _ in range(5):
        (updates, state), (got, ours) = step(params, state, ours)
        chex.assert_trees_all_close(got, updates, rtol=1e-6)
        params = optax.apply_updates(params, updates)
    snapshot = state.inner_states["svrg"].inner_state[0].snapshot
    assert snapshot.is_taken
    assert float(jnp.max(jnp.abs(snapshot.full_grad["w"]))) > 0.01


def test_line_searches_of_optax_and_methods_that_take_no_extra_arguments_run(lenient):
    search = optax.chain(optax.sgd(1.0), optax.scale_by_backtracking_linesearch(20))
    for tx in (optax.lbfgs(), search, optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.01))):
        params, _ = run(optperm.with_loss(tx, loss_fn, DATA), 40)[-1]
        assert loss_fn(params, DATA) < 0.3 * loss_fn(START, DATA)


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
    trail = run(tx, 4, gradient={"w": jnp.full(3, jnp.nan)})
    support.assert_same_bits(run(tx, 4), trail)
    typed = optperm.with_loss(recorded(4), loss_fn, DATA, 4, key=jax.random.key(5))
    support.assert_same_bits(typed.init(START).key, trail[0][1].key)
    each = {"x": np.asarray(X)[:, None], "y": np.asarray(DATA["y"])[:, None]}
    each["scale"] = np.ones(12, np.float32)
    of_each = jax.jit(jax.vmap(jax.grad(loss_fn), in_axes=(None, 0)))(START, each)["w"]
    at = jax.jit(jax.value_and_grad(loss_fn))
    before, drawn = START, set()
    for index, (params, state) in enumerate(trail):
        grad, value, drawn_grads = state.inner_state
        # Which of the data the four examples are, by their gradients.
        gaps = np.abs(drawn_grads["w"][:, None] - np.asarray(of_each)[None]).max(2)
        places = gaps.argmin(1)
        assert gaps.min(1).max() < 1e-4
        batch = {name: np.asarray(DATA[name])[places] for name in ("x", "y")}
        wanted, wanted_grad = at(before, batch | {"scale": DATA["scale"]})
        np.testing.assert_allclose(value, wanted, rtol=1e-4)
        chex.assert_trees_all_close(grad, wanted_grad, rtol=1e-4, atol=1e-5)
        drawn.add(tuple(places.tolist()))
        assert state.count == index + 1
        before = params
    assert len(drawn) == 4


def test_a_key_in_the_data_is_another_one_in_each_step():
    """So that dropout draws other masks, for all of the data too."""
    data = {"x": X, "key": jax.random.key(0)}

    def noisy(params, batch):
        return jnp.sum(params["w"]) * 0.0 + jax.random.uniform(batch["key"])

    for batch_size in (None, 4):
        tx = optperm.with_loss(recorded(batch_size or 12), noisy, data, batch_size)
        assert len({float(state.inner_state[1]) for _, state in run(tx, 3)}) == 3


def test_what_places_weights_says_so_through_it():
    tx = optax.chain(optperm.recursive_gradient(0.5), optperm.sgperm(1.0))
    tx = optperm.with_loss(tx, loss_fn, DATA, 4)
    params, state = loops.train(tx, START, [START] * 3, init="jit")[-1]
    support.assert_same_bits(optperm.permutation.permuted_params(state), params)
    assert not np.array_equal(params["w"], START["w"])


def test_example_is_drawn_apart_from_the_batch():
    """An estimator of noise takes their difference, which would be zero for the batch's own example."""

    def subtract(grads, state, params, *, example_grad_fn, **_):
        return example_grad_fn(params) - grads, state

    inner = optax.GradientTransformationExtraArgs(lambda _: optax.EmptyState(), subtract)
    tx = optperm.with_loss(inner, lambda p, x: jnp.mean((p - x) ** 2), jnp.arange(1000.0), 1)
    trail = loops.train(tx, jnp.float32(0.0), [jnp.float32(0.0)] * 4)
    assert np.count_nonzero(np.diff([0.0, *(w for w, _ in trail)])) >= 3


def test_a_method_that_draws_gets_its_gradient_at_a_draw_of_each_step():
    """IVON learns the curvature of a quadratic, which it sees by gradients at draws alone."""
    curvature = jnp.array([1.0, 20.0])
    tx = optperm.ivon(0.05, num_data=1000.0, b2=0.999)
    tx = optperm.with_loss(tx, lambda w, _: 0.5 * jnp.sum(curvature * (w - 1.0) ** 2), jnp.zeros(1))

    train = jax.jit(functools.partial(loops.carry, loops.make_step(tx, apply=loops.by_addition)))
    w, state = train(jnp.zeros(2), tx.init(jnp.zeros(2)), jnp.zeros((10_000, 2)))
    np.testing.assert_allclose(w, np.ones(2), atol=0.05)
    np.testing.assert_allclose(state.inner_state.hessian, curvature, rtol=0.2)


def test_data_on_a_mesh_with_explicit_axes_are_drawn_as_on_one_device():
    mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Explicit,))
    rows = jax.NamedSharding(mesh, jax.P("d"))
    sharded = {name: jax.device_put(leaf, rows) for name, leaf in DATA.items() if leaf.ndim}
    found = []
    for data in (DATA, DATA | sharded):
        tx = optperm.with_loss(optax.sgd(0.1), loss_fn, data, batch_size=5)
        with jax.set_mesh(mesh):
            found.append(jax.jit(tx.update)(START, tx.init(START), START)[0]["w"])
    np.testing.assert_allclose(found[1], found[0], rtol=1e-5)
