"""apollo against closed forms."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import support

import optperm
from optperm.memory import _apollo as module

pytestmark = pytest.mark.usefixtures("lenient")


def test_identity_is_the_gradient_and_auto_is_the_root(x64):
    """U = G with nothing inside, times the root of d / r; a complete optimizer gives its sign."""
    grads = {
        "w": support.normal((6, 24), dtype=np.float64),
        "b": support.normal((3,), dtype=np.float64),
    }
    for inner, scale, factor in (
        (optax.identity(), 1.0, {"w": 1.0, "b": 1.0}),
        (optax.scale(-0.5), "auto", {"w": -0.5 * 3**0.5, "b": -0.5}),
    ):
        tx = optperm.apollo(inner, 2, scale=scale, limit=None)
        updates, _ = jax.jit(tx.update)(grads, tx.init(grads))
        wanted = {k: factor[k] * g for k, g in grads.items()}
        chex.assert_trees_all_close(updates, wanted, atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    "tx",
    [
        optperm.apollo(optax.identity(), 2, scale=1.0),
        optperm.low_rank(optax.identity(), 2),
    ],
    ids=["apollo", "low_rank"],
)
def test_a_step_that_is_an_exception_does_not_hold_back_the_next(tx, x64):
    """The norm from which a step may grow stays, as if it had not been there; growth is of 1 %. Before
    the first step, a gradient that is smaller than the constant in the gains leaves no norm."""
    g = support.normal((4, 6), dtype=np.float64)
    take = jax.jit(tx.update)
    for exception in (0.0, np.nan, 1e-12, 1e-8, 1e-3, 0.05):
        factors = (0.0, 1e-12, 1.0, exception, 3.0, exception, exception, 3.0, 0.5, 1.0)
        state, sizes = tx.init(g), []
        for factor in factors:
            u, state = take(factor * g, state)
            sizes.append(np.linalg.norm(u) / np.linalg.norm(g))
        given, allowed = np.array([[1.0, 3.0, 3.0, 0.5, 1.0], [1.0, 1.01, 1.01**2, 0.5, 0.505]])
        # The limit of low_rank is on the part outside of the subspace
        is_low_rank = isinstance(state, optperm.memory.LowRankState)
        inside = np.linalg.norm(state.basis.T @ g) / np.linalg.norm(g) if is_low_rank else 0.0
        usual = np.hypot(inside * given, np.sqrt(1 - inside**2) * allowed)
        np.testing.assert_allclose(np.delete(sizes, [0, 1, 3, 5, 6]), usual, atol=1e-5)


def test_projections_keep_the_length_of_gradients_on_average():
    """|R|^2 is |G|^2: the first step of Adam gives f = sqrt(r) / |R|, and U = sqrt(d / r) f G."""
    d, rank = 256, 64
    g = support.normal((d, 400), 0)
    tx = optperm.apollo(rank=rank, limit=None)
    u, _ = jax.jit(tx.update)(g, tx.init(g))
    squares = d / np.sum(np.square(u), axis=0)
    np.testing.assert_allclose(np.mean(squares), 1.0, rtol=0.05)


def test_projections_change_with_leaf_key_and_time_alone():
    """They are drawn from N(0, 1 / r) for each leaf, and stay the same until the next refresh."""
    matrix = module.plan_matrices({"w": jnp.zeros((300, 400))}, 4, "smaller", None)["w"]
    leaf = jnp.zeros((300, 400))

    def draw(key, index, number):
        data = module.fold(module.key_data(key), jnp.int32(number))
        return np.asarray(module.draw_gaussian_basis(data, index, matrix, leaf))

    draws = [draw(*of) for of in ((0, 0, 0), (0, 1, 0), (1, 0, 0), (0, 0, 1))]
    assert all(abs(np.var(each) * 4 - 1) < 0.15 for each in draws)
    assert len({each.tobytes() for each in draws}) == 4
    np.testing.assert_array_equal(draw(jax.random.key(1), 0, 0), draws[2])
