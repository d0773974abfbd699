"""Trees with masked parts, of trained leaves alone, and of rows."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optperm.core.shardings import row_sharding


def one_row(tree: Any) -> Any:
    """Return the shapes, dtypes and shardings of a tree without the leading axis of its leaves."""

    def row(leaf: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype, sharding=row_sharding(leaf))

    return jax.tree.map(row, tree)


def unstack(stack: jax.Array) -> list[jax.Array]:
    """Return the rows of an array's leading axis.

    XLA compiles equal kernels once: a number of a row that it knows would make a kernel for each row.
    """
    places = jax.lax.optimization_barrier([np.int32(place) for place in range(stack.shape[0])])
    return [jax.lax.dynamic_index_in_dim(stack, place, keepdims=False) for place in places]


def is_masked(node: Any) -> bool:
    """Return whether a node stands for params that a transformation does not see."""
    return isinstance(node, optax.MaskedNode)


def mask_like(tree: Any, masked: Any) -> Any:
    """Return the tree without the parts that are masked in another one.

    A tree that does not fit under the mask is returned as it is: `checks.check_same_tree` names it.
    """
    try:
        return jax.tree.map(
            lambda mask, node: mask if is_masked(mask) else node, masked, tree, is_leaf=is_masked
        )
    except ValueError:
        return tree


def fill_masked(tree: Any, whole: Any) -> Any:
    """Return the tree with the nodes of another one where it is masked or None."""

    def is_absent(node: Any) -> bool:
        return node is None or is_masked(node)

    if not any(is_absent(node) for node in jax.tree.leaves(tree, is_leaf=is_absent)):
        return tree
    return jax.tree.map(
        lambda node, filler: filler if is_absent(node) else node, tree, whole, is_leaf=is_absent
    )


def trained_part(params: Any) -> Any:
    """Return a model made of dataclasses, as in Equinox, with None for each leaf that is not trained.

    Real and complex floating arrays are trained. Any other tree is returned as it is.
    """

    def keep(leaf: Any) -> Any:
        dtype = getattr(leaf, "dtype", None)
        return leaf if dtype is not None and jnp.issubdtype(dtype, jnp.inexact) else None

    nodes = jax.tree.leaves(params, is_leaf=dataclasses.is_dataclass)
    if not any(map(dataclasses.is_dataclass, nodes)):
        return params
    return jax.tree.map(keep, params)
