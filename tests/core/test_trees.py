"""Trees that users give as trees or functions, as they are seen in any library."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from optperm.core.trees import is_function, leaf_paths, resolve_tree


class Layer(eqx.Module):
    """A model that can be called, as all of Equinox's."""

    kernel: jax.Array
    bias: jax.Array

    def __call__(self, x):
        return x @ self.kernel + self.bias


def is_matrix(params):
    return jax.tree.map(lambda leaf: leaf.ndim == 2, params)


MODEL = Layer(jnp.ones((2, 3)), jnp.zeros(3))


@pytest.mark.parametrize(
    ("given", "is_one"),
    [
        (is_matrix, True),
        (functools.partial(is_matrix), True),
        (jax.tree_util.Partial(jnp.add, jnp.ones(2)), True),
        (MODEL, False),
        (is_matrix(MODEL), False),
        (eqx.nn.MLP(2, 2, 2, 1, key=jax.random.key(0)), False),
        ({"w": is_matrix}, False),
        (True, False),
        (None, False),
    ],
)
def test_a_tree_is_no_function_even_if_it_can_be_called(given, is_one):
    assert is_function(given) is is_one


def test_functions_see_the_same_arrays_and_paths_in_all_libraries():
    plain = {"layer": {"bias": jnp.zeros(3), "kernel": jnp.ones((2, 3))}}
    boxed = jax.tree.map(nnx.Param, plain)
    state = nnx.State({"layer": nnx.State(boxed["layer"])})
    seen = []

    def function(params):
        assert all(type(leaf) is type(jnp.zeros(3)) for leaf in jax.tree.leaves(params))
        seen.append(jax.tree_util.tree_leaves_with_path(params))
        return jax.tree.map(lambda leaf: leaf.ndim, params)

    for params in (plain, boxed, state):
        assert jax.tree.leaves(resolve_tree(function, params)) == [1, 2]
        assert [path for path, _ in leaf_paths(params)] == ["layer/bias", "layer/kernel"]
        np.testing.assert_array_equal(leaf_paths(params)[1][1], np.ones((2, 3)))
    assert len({str([path for path, _ in each]) for each in seen}) == 1
    assert leaf_paths(jnp.ones(2))[0][0] == ""
    assert resolve_tree(MODEL, plain) is not None
