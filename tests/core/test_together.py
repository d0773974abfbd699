"""Leaves that are worked on together."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from optperm.core.mapped_axes import varying_axes
from optperm.core.together import map_together


def orthonormal(leaf):
    return jnp.linalg.qr(leaf)[0]


def test_leaves_of_one_type_are_one_batch_with_each_its_own_result():
    """Two groups make two decompositions; a key of each leaf stays with its leaf."""
    tree = {str(i): jnp.arange(12.0).reshape(4, 3) ** (1 + i / 9) for i in range(5)}
    tree |= {"wide": jnp.ones((4, 2)), "half": jnp.ones((4, 3), jnp.bfloat16).astype(jnp.float32)}
    together = map_together(orthonormal, tree)
    for name, leaf in tree.items():
        np.testing.assert_allclose(together[name], orthonormal(leaf), rtol=1e-5, atol=1e-6)
    program = jax.make_jaxpr(lambda t: map_together(jax.lax.sin, t, is_sharding_free=True))(tree)
    assert str(program).count(" sin") == 2
    keys = {"a": jax.random.key(1), "b": jax.random.key(2)}
    drawn = map_together(
        lambda key, x: {"drawn": jax.random.normal(key) + x}, keys, {"a": 1.0, "b": 2.0}
    )
    assert drawn["b"]["drawn"] == jax.random.normal(keys["b"]) + 2.0


@pytest.mark.parametrize("tree", [{}, {"a": jnp.ones([])}, [jnp.ones(2), jnp.ones(0)]])
def test_few_leaves(tree):
    doubled = map_together(lambda x: 2 * x, tree)
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == 2 * b).all()), doubled, tree))


def test_only_leaves_whose_sharding_is_known_and_equal_are_stacked():
    """Inside of jax.jit that is a type of an explicit mesh, unless the caller allows more."""
    tree = {name: jnp.ones((8, 8)) for name in "abcd"}

    def calls(tree, **allowed):
        program = jax.make_jaxpr(lambda t: map_together(jax.lax.sin, t, **allowed))(tree)
        return str(program).count(" sin")

    assert calls(tree) == 4
    assert calls(tree, is_sharding_free=True) == 1
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:2])
    with jax.set_mesh(mesh):
        spread = {
            name: jax.device_put(
                leaf, NamedSharding(mesh, P("x") if name in "ab" else P(None, "x"))
            )
            for name, leaf in tree.items()
        }
        assert calls(spread) == 2
        found = jax.jit(lambda t: map_together(jnp.sin, t))(spread)
    assert all(found[k].sharding.is_equivalent_to(spread[k].sharding, 2) for k in tree)


def test_leaves_that_vary_over_other_axes_are_other_groups():
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:2])

    def both(local, same):
        found = map_together(jnp.sin, {"local": local, "same": same})
        assert varying_axes(found["local"]) == {"x"}
        assert varying_axes(found["same"]) == frozenset()
        return found["local"]

    mapped = jax.shard_map(both, mesh=mesh, in_specs=(P("x"), P()), out_specs=P("x"))
    with jax.set_mesh(mesh):
        local = jax.device_put(jnp.ones(4), NamedSharding(mesh, P("x")))
        np.testing.assert_allclose(jax.jit(mapped)(local, jnp.ones(2)), np.sin(np.ones(4)), 1e-6)
