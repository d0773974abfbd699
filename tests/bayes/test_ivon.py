"""IVON against a transcription of the authors' code, its first draws, and what is no draw."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import support
from flax import nnx
from jax.sharding import PartitionSpec as P

import optperm
from optperm.core.remainders import join

CURVATURE = np.array([0.5, 2.0, 30.0])
SETTINGS = {"hess_init": 0.3, "b1": 0.8, "b2": 0.95, "weight_decay": 0.01}
IVON = optperm.ivon(0.1, num_data=50.0)


def authors_step(m, state, draws, grads, radius):
    """A step of the authors' torch code (commit 14fe91c) for a rate of 0.1 and 50 examples, in NumPy."""
    (g, h, count), (h_0, b1, b2, delta) = state, SETTINGS.values()
    count += 1
    g = b1 * g + (1 - b1) * np.mean(grads, axis=0)
    f = np.mean((draws - m) * grads, axis=0) * (h + delta) * 50
    h = b2 * h + (1 - b2) * f + (0.5 * (1 - b2) ** 2) * (h - f) ** 2 / (h + delta)
    moved = np.clip((g / (1 - b1**count) + delta * m) / (h + delta), -radius, radius)
    return m - 0.1 * (h_0 + delta) * moved, (g, h, count)


@pytest.mark.parametrize(("mc_samples", "radius"), [(1, np.inf), (3, 0.4)])
def test_the_sequence_of_the_authors(mc_samples, radius):
    rng = np.random.default_rng(0)
    options = {"mc_samples": mc_samples, "clip_radius": float(radius), **SETTINGS}
    with jax.enable_x64(True):
        tx, m = optperm.ivon(0.1, num_data=50.0, **options), np.array([1.0, -2.0, 0.5])
        theta, state = jnp.array(m), tx.init(jnp.array(m))
        expected = (np.zeros(3), np.full(3, SETTINGS["hess_init"]), 0)
        update, shape = jax.jit(tx.update), (3,) if mc_samples == 1 else (mc_samples, 3)
        for _ in range(20):
            scale = 1 / np.sqrt(50.0 * (expected[1] + SETTINGS["weight_decay"]))
            draws = m + rng.normal(size=(mc_samples, 3)) * scale
            grads = CURVATURE * (draws - 0.3) + 0.1 * rng.normal(size=draws.shape)
            given, draw = (jnp.array(x.reshape(shape)) for x in (grads, draws))
            updates, state = update(given, state, theta, draw=draw)
            theta = optax.apply_updates(theta, updates)
            m, expected = authors_step(m, expected, draws, grads, radius)
            found = theta, state.hessian, state.momentum
            chex.assert_trees_all_close(found, (m, expected[1], expected[0]), rtol=1e-12)


def test_draws_have_the_laws_mean_and_variance():
    m = {"w": jnp.full((400, 50), 3.0), "b": jnp.zeros(5)}
    ivon = optperm.ivon(0.1, num_data=25.0, hess_init=3.5, weight_decay=0.5)
    state, key = optax.chain(optax.clip(1.0), ivon).init(m), jax.random.key(1)
    noise = np.asarray(jax.jit(optperm.bayes.sample_params)(state, m, key)["w"]) - 3.0
    np.testing.assert_allclose([noise.mean(), noise.std()], [0.0, 0.1], atol=2e-3)
    draws = optperm.bayes.sample_params(state, m, key, num_draws=2)
    assert draws["b"].shape == (2, 5)
    assert not np.allclose(draws["b"][0], draws["b"][1])


def test_a_step_in_shard_map_draws_apart_on_replicas():
    """As one process with as many draws; gradients that replicas share already are refused."""
    m, x, key = jnp.array([1.0, -2.0, 0.5]), support.normal((4, 3)), jax.random.key(0)
    tx = optperm.ivon(0.1, num_data=50.0, axis_name="replica")
    gradient = jax.grad(lambda draw, x: 0.5 * jnp.sum((draw - x[0]) ** 2))

    def run(is_apart):
        def update(x):
            own = jax.random.fold_in(key, jax.lax.axis_index("replica")) if is_apart else key
            draw = optperm.bayes.sample_params(tx.init(m), m, own)
            updates, state = tx.update(gradient(draw, x), tx.init(m), m, draw=draw)
            return updates, state.hessian

        mesh = jax.sharding.Mesh(jax.devices()[:4], ("replica",))
        return jax.jit(jax.shard_map(update, mesh=mesh, in_specs=P("replica"), out_specs=P()))(x)

    both = optperm.ivon(0.1, num_data=50.0, mc_samples=4)

    @jax.jit
    def in_one_process(m):
        keys = [jax.random.fold_in(key, index) for index in range(4)]
        draws = jnp.stack([optperm.bayes.sample_params(both.init(m), m, key) for key in keys])
        grads = jax.vmap(gradient)(draws, x[:, None])
        return both.update(grads, both.init(m), m, draw=draws)

    expected, state = in_one_process(m)
    updates, hessian = run(is_apart=True)
    np.testing.assert_allclose(updates, expected, rtol=1e-5)
    np.testing.assert_allclose(hessian, state.hessian, rtol=1e-6)
    with pytest.raises(ValueError, match=r"do not vary over the axis 'replica'.*fold_in"):
        run(is_apart=False)


def test_the_hessian_is_seen_with_the_variance_of_the_draw():
    """Where num_data is scheduled, the draw was made with the number of the step before."""
    m, many = jnp.array([1.0, 2.0]), optperm.ivon(0.1, num_data=5000.0)
    state = IVON.init(m)
    (_, one), (_, other) = (jax.jit(tx.update)(m, state, m, draw=m + 0.1) for tx in (IVON, many))
    np.testing.assert_array_equal(one.hessian, other.hessian)
    assert float(other.num_data) == 5000


def test_the_hessian_is_seen_with_the_weight_decay_of_the_draw():
    """h^ has the delta of the step before, and the correction divides by the new one."""
    m, g, b2 = np.float32([1.0, 2.0]), np.float32([0.5, -3.0]), 0.9
    one, other = (
        optperm.ivon(0.1, num_data=50.0, b2=b2, weight_decay=delta) for delta in (0.1, 0.4)
    )
    state = one.init(m)
    _, after = jax.jit(other.update)(g, state, m, draw=m + np.float32(0.1))
    h = np.asarray(state.hessian, np.float64)
    seen = 50 * (h + 0.1) * 0.1 * g
    wanted = h + (1 - b2) * (seen - h) + 0.5 * ((1 - b2) * (h - seen)) ** 2 / (h + 0.4)
    np.testing.assert_allclose(after.hessian, wanted, rtol=1e-5)


def test_what_is_not_finite_leaves_its_entry_of_the_state_alone():
    """After a step, so that the momentum is not 0; the mean moves along the momentum."""
    m, step = jnp.array([1.0, 2.0]), jax.jit(IVON.update)
    _, before = step(m, IVON.init(m), m, draw=m + 0.1)
    updates, after = step(jnp.array([jnp.nan, 1.0]), before, m, draw=m + 0.1)
    assert after.hessian[0] == before.hessian[0]
    assert after.momentum[0] == before.momentum[0] > 0
    assert after.momentum[1] != before.momentum[1]
    assert updates[0] < 0


def test_a_part_of_the_params_is_learned_under_a_mask():
    """The masked parameter stays, and the other one moves as it would alone."""
    params = {"last": jnp.array([1.0, -2.0]), "rest": jnp.ones(2)}
    tx = optax.masked(IVON, {"last": True, "rest": False})
    state = tx.init(params)
    draw = optperm.bayes.sample_params(state, params, jax.random.key(0))
    assert draw["rest"] is params["rest"]
    grads, last = {"last": jnp.ones(2), "rest": jnp.zeros(2)}, params["last"]
    updates, _ = tx.update(grads, state, params, draw=draw)
    expected, _ = IVON.update(grads["last"], IVON.init(last), last, draw=draw["last"])
    np.testing.assert_allclose(updates["last"], expected, rtol=1e-6)
    assert not updates["rest"].any()


@pytest.mark.slow
def test_the_hessian_of_a_quadratic_with_params_of_16_bits():
    """Noise of which 16 bits would keep little, at a distance of the params: h is the curvature."""
    w = jnp.zeros(64, jnp.bfloat16)
    target = jnp.linspace(0.5, 2.0, 64)
    tx = optperm.ivon(0.1, num_data=1e4, hess_init=1.0, b2=0.999)

    def step(carry, key):
        w, state = carry
        draw = optperm.bayes.sample_params(state, w, key)
        grads = jax.grad(lambda w: jnp.sum(5 * (w - target) ** 2))(draw)
        updates, state = tx.update(grads, state, w, draw=draw)
        return (optax.apply_updates(w, updates), state), draw.dtype == jnp.float32

    keys = jax.random.split(jax.random.key(0), 8000)
    (w, state), is_wide = jax.jit(lambda w: jax.lax.scan(step, (w, tx.init(w)), keys))(w)
    assert w.dtype == jnp.bfloat16
    assert is_wide.all()
    np.testing.assert_allclose(state.inner.hessian.mean(), 10.0, rtol=0.05)
    np.testing.assert_allclose(join(w, state.remainder), target, atol=0.02)
    with pytest.raises(ValueError, match="draw is bfloat16"):
        tx.update(w, state, w, draw=w)


def test_draws_and_params_that_do_not_fit_are_refused():
    """As are gradients of several draws that something has averaged or summed."""
    m, three = jnp.zeros(2), optperm.ivon(0.1, num_data=50.0, mc_samples=3)
    updates = [(IVON, m, {"draw": wrong}, "draw") for wrong in (m, m[:1], {"a": m}, (m, m))]
    updates += [(IVON, m, {}, "draw = optperm.bayes.sample_params")]
    updates += [(three, jnp.ones((3, 2)), {"draw": jnp.ones((3, 1))}, "draw is")]
    updates += [(three, g, {"draw": jnp.ones((3, 2))}, "updates is") for g in (m, jnp.ones((2, 2)))]
    for tx, grads, extras, message in updates:
        with pytest.raises(ValueError, match=message):
            tx.update(grads, tx.init(m), m, **extras)
    for tx, params, message in (
        (IVON, m[:1], r"params is float32\[1\]"),
        (optax.MultiSteps(IVON, 2), m, "MultiSteps"),
        (optax.adam(0.1), m, "ivon"),
    ):
        with pytest.raises(ValueError, match=message):
            optperm.bayes.sample_params(tx.init(m), params, 0)


def test_default_hess_init_gives_draws_of_a_tenth_of_the_weights():
    """It is one if the weights are zero."""
    tx = optperm.ivon(0.1, num_data=60_000.0)
    kernels = [np.float32(0.3) * np.asarray(support.normal((40 * i, 50), i)) for i in (1, 2)]
    params = {
        "kernels": kernels,
        "bias": np.zeros(50, np.float32),
        "scale": np.full(50, 7, np.float32),
    }
    init = jax.jit(tx.init)
    assert init(jax.tree.map(np.zeros_like, params)).hess_init == 1.0
    state = init(params)
    assert not state.warnings(params)
    draw = jax.jit(functools.partial(optperm.bayes.sample_params, num_draws=50))
    draws = draw(state, params, jax.random.key(0))
    deviations = jax.tree.map(lambda d, m: np.std(np.asarray(d) - m[None]), draws, params)
    w = np.sqrt(np.mean(np.concatenate([np.ravel(k) for k in kernels]) ** 2))
    for deviation in jax.tree.leaves(deviations):
        np.testing.assert_allclose(deviation, 0.1 * w, rtol=0.05)
    # The first step is a step of SGD, in which no entry moves by more than a tenth of the deviation,
    # which the weight decay narrows by up to 0.3 %.
    draw = jax.tree.map(lambda d: np.asarray(d)[0], draws)
    grads = params | {"bias": np.full(50, 1e-4, np.float32)}
    grads |= {"kernels": jax.tree.map(np.ones_like, kernels)}
    updates, _ = jax.jit(tx.update)(grads, state, params, draw=draw)
    np.testing.assert_allclose(updates["bias"], -1e-5, rtol=5e-3)
    for kernel in updates["kernels"]:
        np.testing.assert_allclose(kernel, -0.1 * 0.1 * w, rtol=5e-3)


def test_first_draws_as_wide_as_the_weights_are_warned_of():
    params = {"w": jnp.full((20, 20), 0.1), "b": jnp.zeros(20), "s": jnp.ones(20)}
    params |= {"v": jnp.full(5, 0.1)}
    # 1 / sqrt(100 * 1) = 0.1, in w and v as large as the weights
    tx = optperm.ivon(0.1, num_data=100.0, hess_init=1.0)
    with pytest.warns(UserWarning, match=r"deviate by 0.1 .* in 2 of 3 leaves"):
        state = tx.init(params)
    assert len(state.warnings(params)) == 1
    assert jax.jit(tx.init)(params).warnings(params) == state.warnings(params)
    assert not optperm.ivon(0.1, num_data=1e4, hess_init=1.0).init(params).warnings(params)
    # After a step the deviations are no longer the first ones.
    assert not state._replace(count=state.count + 1).warnings(params)


def test_draws_of_a_state_of_nnx_are_in_its_variables():
    params = nnx.state(nnx.Linear(3, 2, rngs=nnx.Rngs(0)), nnx.Param)
    for num_draws in (None, 4):
        draw = jax.eval_shape(
            lambda p, n=num_draws: optperm.bayes.sample_params(IVON.init(p), p, 0, num_draws=n),
            params,
        )
        assert jax.tree.structure(draw) == jax.tree.structure(params)
