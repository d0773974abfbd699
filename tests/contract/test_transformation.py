"""The door: a method that is nothing but its algorithm gets its checks and its types from there."""

import chex
import jax
import jax.numpy as jnp
import pytest

from optperm.contract.transformation import transformation


def doubled_sums():
    """Updates and sums in float32, whatever the params are."""

    def init(params):
        return jax.tree.map(jnp.zeros_like, params)

    def update(g, sums, params, **_):
        sums = jax.tree.map(lambda s, g: s.astype(jnp.float32) + g, sums, g)
        return jax.tree.map(lambda s: 2 * s, sums), sums

    needs = {"value": "the loss"}
    return transformation(init, update, method="doubled_sums", like=lambda s: s, needs=needs)


PARAMS = {"w": jnp.ones(3, jnp.bfloat16), "b": jnp.zeros([])}
GRADS = {"w": jnp.full(3, 0.5), "b": jnp.ones([])}


@pytest.mark.parametrize("jitted", [False, True])
def test_what_comes_out_has_the_types_of_what_came_in(jitted):
    tx = doubled_sums()
    update = jax.jit(tx.update) if jitted else tx.update
    updates, sums = update(GRADS, tx.init(PARAMS), PARAMS, value=0.0)
    chex.assert_trees_all_equal_shapes_and_dtypes(updates, sums, PARAMS)
    chex.assert_trees_all_equal(updates, jax.tree.map(lambda s: 2 * s, sums))


def test_an_extra_argument_that_is_missing_is_named():
    tx = doubled_sums()
    message = r"doubled_sums needs the extra argument value, the loss: e = optperm\.evaluate\("
    for missing in ({}, {"value": None}):
        with pytest.raises(ValueError, match=message):
            tx.update(GRADS, tx.init(PARAMS), PARAMS, **missing)
