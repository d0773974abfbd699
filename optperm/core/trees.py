"""Trees given as trees or functions, without variables, with masked parts, and trees of rows."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optperm.core import checks
from optperm.core.shardings import row_sharding, sharding_of, type_of

# Up to this size, leaves of one shape are worked on together, which compiles faster. Copies of larger
# leaves would cost memory and, on a mesh, might move data between devices.
SMALL = 2**16


def one_row(tree: Any) -> Any:
    """Return the shapes, dtypes and shardings of a tree without the leading axis of its leaves."""

    def row(leaf: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype, sharding=row_sharding(leaf))

    return jax.tree.map(row, tree)


def unstack(stack: jax.Array, axis: int = 0) -> list[jax.Array]:
    """Return the rows of an array along an axis.

    XLA compiles equal kernels once, but with constant row numbers, each row would need its own kernel.
    """
    places = jax.lax.optimization_barrier([np.int32(place) for place in range(stack.shape[axis])])
    how: Any = {"keepdims": False, "allow_negative_indices": False}
    return [jax.lax.dynamic_index_in_dim(stack, place, axis, **how) for place in places]


def group_alike(leaves: Sequence[jax.Array]) -> list[list[int]]:
    """Return groups of the numbers of small leaves that have the same type; each other leaf is alone."""
    groups: dict[Any, list[int]] = {}
    for index, leaf in enumerate(leaves):
        kind = (type_of(leaf), sharding_of(leaf)) if leaf.size <= SMALL else index
        groups.setdefault(kind, []).append(index)
    return [*groups.values()]


def is_masked(node: Any) -> bool:
    """Return whether a node replaces params that a transformation does not see."""
    return isinstance(node, optax.MaskedNode)


def mask_like(tree: Any, masked: Any) -> Any:
    """Return the tree without the parts that are masked in another tree.

    A tree that does not match the mask is returned unchanged, so `checks.check_same_tree` can name it.
    """
    try:
        return jax.tree.map(
            lambda mask, node: mask if is_masked(mask) else node, masked, tree, is_leaf=is_masked
        )
    except ValueError:
        return tree


def fill_masked(tree: Any, whole: Any) -> Any:
    """Return the tree with masked nodes and None replaced by the nodes of another tree."""

    def is_absent(node: Any) -> bool:
        return node is None or is_masked(node)

    if not any(is_absent(node) for node in jax.tree.leaves(tree, is_leaf=is_absent)):
        return tree
    return jax.tree.map(
        lambda node, filler: filler if is_absent(node) else node, tree, whole, is_leaf=is_absent
    )


def trained_part(params: Any) -> Any:
    """Return a model made of dataclasses, as in Equinox, with None for each leaf that is not trained.

    Real and complex floating arrays are trained. Any other tree is returned unchanged.
    """

    def keep(leaf: Any) -> Any:
        dtype = getattr(leaf, "dtype", None)
        return leaf if dtype is not None and jnp.issubdtype(dtype, jnp.inexact) else None

    nodes = jax.tree.leaves(params, is_leaf=dataclasses.is_dataclass)
    if not any(map(dataclasses.is_dataclass, nodes)):
        return params
    return jax.tree.map(keep, params)


def is_function(given: Any) -> bool:
    """Return whether an argument is a function, and not a tree: the rule of `optax.masked`.

    A tree whose leaves are not functions is a tree, even if it can be called, as models of Equinox.
    """
    is_bound = isinstance(
        given, functools.partial
    )  # `jax.tree_util.Partial` is a tree of its arguments
    return callable(given) and (is_bound or all(map(callable, jax.tree.leaves(given))))


def resolve_tree(given: Any, params: Any) -> Any:
    """Return a tree that may be given as a function of params, without variables of `flax.nnx`.

    The function gets params without boxes, so paths and arrays are the same in all libraries.
    """
    return without_variables(given(without_boxes(params)) if is_function(given) else given)


def leaf_paths(tree: Any) -> list[tuple[str, Any]]:
    """Return each leaf with its path, such as "Dense_0/kernel", without boxes of Flax."""
    leaves = jax.tree_util.tree_leaves_with_path(without_boxes(tree))
    return [(jax.tree_util.keystr(path, simple=True, separator="/"), leaf) for path, leaf in leaves]


def is_variable(node: Any) -> bool:
    """Return whether a node is a variable of `flax.nnx`."""
    return callable(getattr(type(node), "get_value", None))


def without_variables(tree: Any) -> Any:
    """Return the tree with each variable of `flax.nnx` replaced by its array."""
    return jax.tree.map(
        lambda leaf: leaf.get_value() if is_variable(leaf) else leaf, tree, is_leaf=is_variable
    )


def is_box(node: Any) -> bool:
    """Return whether a node holds an array and metadata: a variable of nnx, or a box of `flax.linen`."""
    return is_variable(node) or callable(getattr(type(node), "unbox", None))


def without_boxes(tree: Any) -> Any:
    """Return the tree with each box replaced by its array, or by the node that masks the array.

    The metadata of a box, such as the names of its axes, are for an array of the parameter's shape.
    """

    def open_box(node: Any) -> Any:
        found = jax.tree.leaves(node, is_leaf=is_masked) if is_box(node) else [node]
        return found[0] if len(found) == 1 else node

    return jax.tree.map(open_box, tree, is_leaf=is_box)


def in_variables(tree: Any, like: Any) -> Any:
    """Return a tree of arrays, inside variables of `flax.nnx` wherever `like` has variables."""
    return jax.tree.map(
        lambda place, value: place.replace(value) if is_variable(place) else value,
        like,
        tree,
        is_leaf=is_variable,
    )


def spread_prefix(
    name: str, prefix: Any, tree: Any, is_value: Callable[[Any], bool], values: str, path: str = ""
) -> Any:
    """Return the value of each leaf, from a prefix of the tree.

    The prefix may have values for leaves that the tree masks.

    Args:
      name: The argument's name, for messages.
      prefix: A value, or a tree of values.
      tree: The tree whose leaves get values.
      is_value: Whether a node of the prefix is a value.
      values: A description of values, for messages.
      path: The path to this part of the tree.

    Raises:
      ValueError: If the prefix does not match; the message names the node.
    """
    if is_masked(tree):
        return tree
    if is_value(prefix):
        return jax.tree.map(lambda _: prefix, tree)
    structure: Any  # One level of both trees.
    parts, structure = jax.tree_util.tree_flatten_with_path(
        tree, is_leaf=lambda node: node is not tree
    )
    found, of_prefix = jax.tree.flatten(prefix, is_leaf=lambda node: node is not prefix)
    if of_prefix != structure or jax.tree_util.treedef_is_leaf(structure):
        got = f"got {checks.shown(prefix)} for {structure}"
        raise ValueError(f"{name}{path} does not fit the params: expected {values}, {got}.")
    children = [
        spread_prefix(name, value, part, is_value, values, path + jax.tree_util.keystr(at))
        for value, (at, part) in zip(found, parts, strict=True)
    ]
    return jax.tree.unflatten(structure, children)


def is_flag(node: Any) -> bool:
    """Return whether a node is True or False."""
    return isinstance(node, bool | np.bool_)
