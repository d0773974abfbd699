"""MARS against NumPy, in both forms, and what it does with norms and with what is not finite."""

import jax
import jax.numpy as jnp
import loops
import numpy as np
import optax
import pytest
import replicas
import support

import optperm

RATE, B1, B2, EPS, DECAY = 0.02, 0.95, 0.99, 1e-8, 0.01
GAMMA = 0.025


def make_batches(steps=12, size=6):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(steps, size, 4))
    return [{"x": each, "y": 3.0 * each.sum(axis=1) + rng.normal(size=size)} for each in x]


@jax.jit
def loss_fn(params, batch):
    error = batch["x"] @ params["kernel"] + params["bias"] - batch["y"]
    return jnp.mean(error**2)


def numpy_grad(params, batch):
    """The gradient of `loss_fn`, by hand."""
    error = batch["x"] @ params["kernel"] + params["bias"] - batch["y"]
    n = len(error)
    return {"kernel": 2 * batch["x"].T @ error / n, "bias": 2 * np.sum(error) / n}


def start(dtype=np.float64):
    return {"kernel": np.zeros(4, dtype), "bias": np.ones((), dtype)}


def mars_adamw_in_numpy(batches, *, gamma, max_norm, exact):
    """The paper's algorithm, as its authors run it: each leaf is clipped, the last gradient is not."""
    theta, trail = start(), []
    m = {k: np.zeros_like(v) for k, v in theta.items()}
    v, last_theta, last_grad = dict(m), None, None
    for t, batch in enumerate(batches, start=1):
        g = numpy_grad(theta, batch)
        before = (numpy_grad(last_theta, batch) if exact else last_grad) if t > 1 else g
        last_theta, last_grad, following = theta, g, {}
        for k in theta:
            c = g[k] + gamma * B1 / (1 - B1) * (g[k] - before[k])
            norm = np.sqrt(np.sum(c**2))
            c = c * max_norm / norm if norm > max_norm else c
            m[k] = B1 * m[k] + (1 - B1) * c
            v[k] = B2 * v[k] + (1 - B2) * c**2
            step = (m[k] / (1 - B1**t)) / (np.sqrt(v[k] / (1 - B2**t)) + EPS)
            following[k] = theta[k] - RATE * (step + DECAY * theta[k])
        theta = following
        trail.append(theta)
    return trail


def adamw():
    return optax.adamw(RATE, b1=B1, b2=B2, eps=EPS, weight_decay=DECAY)


@pytest.mark.usefixtures("x64", "lenient")
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize(("gamma", "max_norm"), [(GAMMA, 1.0), (0.5, 9.0)])
def test_every_step_is_that_of_the_papers_algorithm(exact, gamma, max_norm):
    """In front of AdamW, to 1e-12 in float64; where all norms are cut, and where some are not."""
    batches = make_batches()
    tx = optax.chain(optperm.mars(gamma, B1, max_norm, exact), adamw())
    expected = mars_adamw_in_numpy(batches, gamma=gamma, max_norm=max_norm, exact=exact)
    trail = loops.train(tx, start(), batches, evaluate=loops.evaluation(loss_fn))
    for (params, _), wanted in zip(trail, expected, strict=True):
        support.assert_close(params, wanted, rtol=1e-12, atol=1e-13)
    for other in ({"gamma": 0.0}, {"exact": not exact}, {"max_norm": np.inf}):
        options = {"gamma": gamma, "max_norm": max_norm, "exact": exact} | other
        differs = mars_adamw_in_numpy(batches, **options)[-1]["kernel"]
        assert np.abs(differs - expected[-1]["kernel"]).max() > 1e-6


@pytest.mark.usefixtures("x64")
def test_exact_form_with_gamma_1_is_storm_through_momentum():
    """Its momentum of the corrected gradients is STORM's estimate with a = 1 - b1."""
    batches = make_batches(8)
    evaluate = loops.evaluation(loss_fn)
    through_momentum = optax.chain(
        optperm.mars(1.0, 0.7, np.inf, exact=True), optax.ema(0.7, debias=False), optax.scale(-0.03)
    )
    storm = optax.chain(optperm.recursive_gradient(0.3), optax.scale(-0.03))
    # STORM begins with the first gradient whole.
    opt_state = through_momentum.init(start())
    first = jax.tree.map(jnp.asarray, numpy_grad(start(), batches[0]))
    opt_state = (opt_state[0], opt_state[1]._replace(ema=first), *opt_state[2:])
    got = loops.train(through_momentum, start(), batches, evaluate=evaluate, opt_state=opt_state)
    expected = loops.train(storm, start(), batches, evaluate=evaluate)
    for (params, _), (wanted, _) in zip(got, expected, strict=True):
        support.assert_close(params, wanted, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("exact", [False, True])
def test_what_is_not_finite_goes_through_and_is_forgotten(exact):
    """Neither the other entries, nor their norm, nor the step after the next are any different."""
    params, sound = {"w": jnp.zeros(3)}, jnp.float32([0.1, 0.2, 0.3])
    tx = optperm.mars(0.5, 0.5, 1.0, exact)
    opt_state = tx.init(params)
    for bad in (jnp.nan, jnp.inf):
        gradients = [sound, sound.at[1].set(bad), sound, 2.0 * sound]
        for t, g in enumerate(gradients):
            updates, opt_state = tx.update(
                {"w": g}, opt_state, params, grad_fn=lambda p, g=g: {"w": 0.5 * g}
            )
            assert np.isfinite(updates["w"][jnp.array([0, 2])]).all()
            assert np.isfinite(updates["w"][1]) == (t != 1)
            assert np.all(np.isfinite(opt_state.last["w"]))
        wanted = (2.0 + 0.5 * (2.0 - 1.0)) * np.asarray(sound)
        np.testing.assert_allclose(updates["w"], wanted, rtol=1e-6)


def test_half_precision_norms_do_not_overflow():
    """The norm of a float16 leaf is summed in float32: 300 squared is more than float16 holds."""
    params = {"w": jnp.zeros(4, jnp.float16)}
    tx = optperm.mars(max_norm=2.0)
    updates, _ = tx.update({"w": jnp.full(4, 300.0, jnp.float16)}, tx.init(params), params)
    np.testing.assert_array_equal(updates["w"], np.float16([1.0] * 4))


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("mapping", "exact"),
    support.in_turns(["pmap", "shard_map", "shard_map unchecked"], [False, True]),
)
def test_four_devices_train_as_one(mapping, exact):
    """With averaged gradients the numbers are those of a single device with the whole batch."""
    tx = optax.chain(optperm.mars(0.2, 0.8, 5.0, exact), optax.sgd(0.05))
    batches = replicas.stack(make_batches(5, size=8))

    def train(params, batches, axis_name=replicas.AXIS):
        step = loops.make_step(tx, loops.evaluation(loss_fn, axis_name=axis_name))
        return loops.carry(step, params, tx.init(params), batches), ()

    params = jax.tree.map(jnp.asarray, start())
    quarters = jax.tree.map(lambda x: jnp.moveaxis(x.reshape(5, 4, 2, *x.shape[2:]), 1, 0), batches)
    got, _ = replicas.share(train, mapping, 4)(params, quarters)
    expected, _ = train(params, batches, axis_name=None)
    for index in range(4):
        support.assert_close(replicas.take(got, index), expected, rtol=1e-12, atol=1e-13)


def last_update(gradients, params, **options):
    tx = optperm.mars(**{"gamma": 1.0, "b1": 0.95, "max_norm": jnp.inf} | options)
    state = tx.init(params)
    for g in gradients:
        updates, state = tx.update(g, state, params)
    return np.asarray(updates, np.float64)


def test_a_first_gradient_that_is_not_finite_is_no_last_one():
    """A loss scale that overflows at first: the next gradient is the first."""
    bad, good = jnp.array([jnp.nan, 1.0]), jnp.array([1.0, 1.0])
    np.testing.assert_array_equal(last_update([bad, good], jnp.zeros(2)), [1.0, 1.0])
    np.testing.assert_allclose(last_update([bad, good, 2 * good], jnp.zeros(2)), [21.0, 21.0], 1e-5)


def test_gradients_are_kept_wider_than_bfloat16_params():
    """Equal gradients need no correction, whatever the dtype of the params."""
    g = jnp.array([1.003, 1.0038, 0.5019])
    found = last_update([g, g, g], jnp.zeros(3, jnp.bfloat16))
    np.testing.assert_allclose(found, g, rtol=2**-8)


def test_a_correction_that_overflows_float16_is_left_out():
    pair = jnp.array([-20000.0, 1.0], jnp.float16), jnp.array([20000.0, 1.0], jnp.float16)
    np.testing.assert_array_equal(last_update(pair, jnp.zeros(2, jnp.float16), b1=0.9), [20000, 1])


def test_norms_whose_squares_overflow_clip_all_the_same():
    g = jnp.array([3e25, 4e25])
    np.testing.assert_allclose(last_update([g], jnp.zeros(2), max_norm=1.0), [0.6, 0.8], rtol=1e-6)
