"""Proximal steps against the problems that they solve."""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import loops
import numpy as np
import optax
import pytest
import support
from least_squares import evaluation
from sklearn import linear_model

import optperm

NUMBERS = st.floats(-3, 3, width=32)
STRENGTHS = st.floats(0, 2, width=32)


@functools.partial(jax.jit, static_argnames="group_axes")
def proximal_step(v, rate, **penalty):
    """The params after one step from zeros with the updates v."""
    tx, zeros = optperm.proximal(rate, **penalty), jax.tree.map(jnp.zeros_like, v)
    updates, _ = tx.update(v, tx.init(zeros), zeros)
    return optperm.apply_updates(zeros, updates, ())


@hypothesis.settings(max_examples=30)
@hypothesis.given(
    NUMBERS, st.floats(0.125, 2, width=32), STRENGTHS, STRENGTHS, st.tuples(NUMBERS, NUMBERS)
)
def test_an_entry_minimizes_its_penalty(v, rate, l1, l2, bounds):
    """Against the least value on a fine grid."""
    lower, upper = sorted(bounds)
    grid = np.unique([0.0, lower, upper, *np.linspace(-3, 3, 4001)])
    grid = grid[(grid >= lower) & (grid <= upper)]

    def objective(theta):
        return (theta - v) ** 2 / 2 + rate * (l1 * np.abs(theta) + l2 / 2 * theta**2)

    found = float(proximal_step(jnp.float32([v]), rate, l1=l1, l2=l2, lower=lower, upper=upper)[0])
    assert lower - 1e-6 <= found <= upper + 1e-6
    assert objective(found) <= objective(grid).min() + 1e-5


def test_groups_shrink_as_one():
    """The optimality condition of the sparse group lasso holds, and weak groups are exact zeros."""
    rng = np.random.default_rng(0)
    v, rate, l1, group, l2 = rng.normal(size=(5, 6)).astype(np.float32), 0.5, 0.3, 0.6, 0.2
    v[:, 0] *= 0.1
    v[2] *= 0.1
    penalty = {"l1": l1, "l2": l2, "group": group}
    for axes, each in (((0,), np.s_[:, None]), ((-1,), np.s_[None])):
        q = np.asarray(proximal_step({"w": v, "b": v[0]}, rate, group_axes=axes, **penalty)["w"])
        norms = np.sqrt(np.sum(q**2, axis=axes, keepdims=True))
        assert 0 < np.sum(norms == 0) < norms.size, each
        # A scale at which squares leave float32 changes nothing.
        for scale in np.float32([2**-90, 2**90]):
            scaled = penalty | {"l1": l1 * scale, "group": group * scale}
            far = proximal_step({"w": v * scale, "b": v[0]}, rate, group_axes=axes, **scaled)
            np.testing.assert_allclose(np.asarray(far["w"]) / scale, q, rtol=1e-5, atol=1e-6)
        # v - q = rate (l1 s + l2 q + group sqrt|g| q / |q|) wherever q is not 0, with s its sign
        size = v.shape[axes[0]]
        force = l1 * np.sign(q) + l2 * q + group * np.sqrt(size) * q / np.where(norms > 0, norms, 1)
        np.testing.assert_allclose(np.where(q, v - q - rate * force, 0), 0, atol=1e-6)


@pytest.mark.usefixtures("x64")
def test_prox_svrg_with_momentum_finds_the_solution_of_coordinate_descent():
    """Params within 1e-6 of scikit-learn's elastic net, with the same zeros."""
    rng, strength, rate, momentum = np.random.default_rng(0), 0.15, 0.02, 0.6
    x = rng.normal(size=(60, 12))
    true = np.where(np.arange(12) < 4, rng.normal(size=12) + 1, 0.0)
    y = x @ true + 0.3 * rng.normal(size=60)
    options = {"fit_intercept": False, "tol": 1e-12, "max_iter": 100_000}
    wanted = linear_model.ElasticNet(alpha=strength, l1_ratio=0.5, **options).fit(x, y).coef_

    def loss_fn(w, batch):
        return 0.5 * jnp.mean((batch[0] @ w - batch[1]) ** 2)

    tx = optax.chain(
        optperm.svrg(every=24),
        optax.sgd(rate * (1 - momentum), momentum=momentum),
        optperm.proximal(rate, l1=strength / 2, l2=strength / 2),
    )
    rows, w = np.random.default_rng(0).integers(60, size=(6000, 5)), jnp.zeros(12)
    step = loops.make_step(tx, evaluation((x, y), loss_fn))
    w, _ = jax.jit(functools.partial(loops.carry, step))(w, tx.init(w), (x[rows], y[rows]))
    np.testing.assert_allclose(w, wanted, atol=1e-6)
    np.testing.assert_array_equal(np.asarray(w) == 0, wanted == 0)
    assert 0 < np.sum(wanted == 0) < len(wanted)


def test_zeros_are_exact_in_any_dtype_by_optax_too():
    """`params + (0 - params)` is 0; what is masked is left alone, and the schedule counts steps."""
    rate = lambda count: jnp.where(count < 1, 12.0, 0.0)  # noqa: E731
    tx = optax.masked(optperm.proximal(rate, l1=1.0), {"w": True, "b": False})
    for dtype in (jnp.bfloat16, jnp.float32):
        params = {"w": jnp.array([0.1, -3.3, 7.7], dtype), "b": jnp.array([0.1], dtype)}
        updates = jax.tree.map(lambda p: p / 3, params)
        new, state = tx.update(updates, tx.init(params), params)
        after = optax.apply_updates(params, new)
        assert after["w"].tolist() == [0.0] * 3
        support.assert_same_bits(after["b"], params["b"] + updates["b"])
        # In the second step the rate is 0, and so is the penalty.
        new, _ = tx.update(updates, state, params)
        found, wanted = np.float32(new["w"]), np.float32(updates["w"])
        np.testing.assert_allclose(found, wanted, rtol=float(jnp.finfo(dtype).eps))


@pytest.mark.usefixtures("lenient")
def test_inside_of_multi_steps_it_shrinks_once_by_the_mean_gradient():
    """Inside, a step of two gradients is one step of their mean, also of a schedule; after it, params
    shrink at each gradient."""
    rate, grads = optax.linear_schedule(0.1, 0.05, 1), jnp.float32([[1, 0, 0.2], [0, 1, 0]] * 2)
    inside = optax.MultiSteps(optax.chain(optax.sgd(rate), optperm.proximal(rate, l1=0.3)), 2)
    outside = optax.chain(
        optax.MultiSteps(optax.sgd(rate), 2).gradient_transformation(),
        optperm.proximal(0.1, l1=0.3),
    )
    for tx, wanted in ((inside, [0.38, -0.23, 0.0]), (outside, [0.305, -0.155, 0.0])):
        start = jnp.float32([0.5, -0.2, 0.01])
        params, _ = loops.train(tx, start, grads, apply=loops.by_addition)[-1]
        np.testing.assert_allclose(params, wanted, rtol=1e-6)


def test_steps_of_16_bits_are_computed_in_32():
    """256 + 1 is 256 in bfloat16; less a penalty of 1/2 it is a step of 1/2."""
    tx, params = optperm.proximal(0.5, l1=1.0), jnp.full(2, 256, jnp.bfloat16)
    updates, _ = tx.update(jnp.ones(2, jnp.bfloat16), tx.init(params), params)
    assert updates.tolist() == [0.5, 0.5]
