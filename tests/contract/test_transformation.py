"""The door: a method that is nothing but its algorithm gets its checks and its types from there."""

import chex
import jax
import jax.numpy as jnp
import pytest
import replicas
import support
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from optperm.contract.mapped_axes import varying_axes
from optperm.contract.transformation import transformation


def doubled_sums(**options):
    """Updates and sums in float32, whatever the params are."""

    def init(params):
        return jax.tree.map(jnp.zeros_like, params)

    def update(g, sums, params, **_):
        sums = jax.tree.map(lambda s, g: s.astype(jnp.float32) + g, sums, g)
        return jax.tree.map(lambda s: 2 * s, sums), sums

    options = {"needs": {"value": "the loss"}, "like": lambda sums: sums} | options
    return transformation(init, update, method="doubled_sums", **options)


def careless():
    """A method that minds no types: weak ones, float32, of no axis and nowhere."""

    def init(params):
        return {"sums": jax.tree.map(jnp.zeros_like, params), "count": jnp.full((), 0)}

    def update(g, state, params, **_):
        ones = jax.tree.map(lambda p: jnp.full(p.shape, 1.0), params)
        return ones, {"sums": ones, "count": jnp.full((), 1.0)}

    return transformation(init, update, method="careless", like=lambda state: state["sums"])


PARAMS = {"w": jnp.ones(3, jnp.bfloat16), "b": jnp.zeros([])}
GRADS = {"w": jnp.full(3, 0.5), "b": jnp.ones([])}


@pytest.mark.parametrize("transform", [lambda function: function, jax.jit], ids=["eager", "jit"])
def test_results_have_the_types_of_what_came_in_and_are_strong(transform):
    tx = doubled_sums()
    updates, sums = transform(tx.update)(GRADS, tx.init(PARAMS), PARAMS, value=0.0)
    chex.assert_trees_all_equal_shapes_and_dtypes(updates, sums, PARAMS)
    chex.assert_trees_all_equal(updates, jax.tree.map(lambda s: 2 * s, sums))
    state = careless().init(PARAMS)
    after = transform(careless().update)(GRADS, state, PARAMS)
    assert support.signature(after) == support.signature((PARAMS, state))
    assert not any(weak for _, _, weak in support.signature(state)[1])


def test_updates_may_have_the_types_of_the_gradients():
    tx = doubled_sums(updates_like="updates")
    updates, _ = tx.update(GRADS, tx.init(PARAMS), PARAMS, value=0.0)
    chex.assert_trees_all_equal_shapes_and_dtypes(updates, GRADS)


def test_results_vary_over_the_mapped_axes_of_params():
    def step(params):
        updates, state = careless().update(params, careless().init(params), params)
        assert varying_axes(updates["w"]) == varying_axes(state["sums"]["w"]) == {replicas.AXIS}
        assert not varying_axes(state["count"])
        return updates

    stacked = replicas.stack([PARAMS, PARAMS])
    replicas.MAPPINGS["shard_map"](step, 2)(stacked)


def test_results_lie_on_an_explicit_mesh_where_params_do():
    mesh, tx = jax.make_mesh((4,), ("x",)), careless()
    with jax.set_mesh(mesh):
        params = jax.device_put(jnp.ones((8, 2)), NamedSharding(mesh, P("x")))
        given = jax.device_put(params, NamedSharding(mesh, P())), tx.init(params), params
        for updates, state in (tx.update(*given), jax.eval_shape(tx.update, *given)):
            assert all(leaf.sharding.spec[0] == "x" for leaf in (updates, state["sums"]))


def test_an_extra_argument_that_is_missing_is_named():
    tx = doubled_sums()
    message = r"doubled_sums needs the extra argument value, the loss: e = optperm\.evaluate\("
    for missing in ({}, {"value": None}):
        with pytest.raises(ValueError, match=message):
            tx.update(GRADS, tx.init(PARAMS), PARAMS, **missing)
