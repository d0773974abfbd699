"""Work on leaves of one type together, so that a program grows slowly with the number of leaves."""

from collections.abc import Callable, Hashable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType


def map_together(
    function: Callable[..., Any], tree: Any, *rest: Any, is_sharding_free: bool = False
) -> Any:
    """Map a function over the leaves of trees, as `jax.tree.map` does, leaves of one type at once.

    Leaves of one shape, dtype and sharding, which vary over the same mapped axes, are stacked, and the
    function is traced once for the stack. A stack of leaves of different shardings would move them
    between devices: leaves whose sharding is not known, inside `jax.jit` on a mesh with automatic axes
    or without a mesh, are only stacked where the caller allows it.

    Args:
      function: A function of one leaf of each tree, which `jax.vmap` can map. It returns a tree.
      tree: The tree whose structure the result has.
      *rest: Trees that begin with the same structure.
      is_sharding_free: Whether to stack leaves whose sharding is not known: they are small, or the
        function gathers them anyway.

    Returns:
      The tree of results.
    """
    treedef: Any
    leaves, treedef = jax.tree.flatten(tree)
    rows = list(zip(leaves, *map(treedef.flatten_up_to, rest), strict=True))
    groups: dict[Hashable, list[int]] = {}
    for index, row in enumerate(rows):
        can_stack = is_sharding_free or all(map(_has_known_sharding, row))
        kind = tuple(map(_describe, row)) if can_stack else index
        groups.setdefault(kind, []).append(index)
    results: list[Any] = [None] * len(rows)
    for members in groups.values():
        if len(members) == 1:
            results[members[0]] = function(*rows[members[0]])
            continue
        stacks = [jnp.stack(column) for column in zip(*(rows[i] for i in members), strict=True)]
        mapped, structure = jax.tree.flatten(jax.vmap(function)(*stacks))
        for index, *parts in zip(members, *map(jnp.unstack, mapped), strict=True):
            results[index] = jax.tree.unflatten(structure, parts)
    return jax.tree.unflatten(treedef, results)


def _describe(leaf: Any) -> Hashable:
    """Return the shape, dtype and sharding of a leaf, and the mapped axes over which it varies."""
    is_array = isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer)
    return jax.typeof(leaf), leaf.sharding if is_array else None


def _has_known_sharding(leaf: Any) -> bool:
    if not isinstance(leaf, jax.core.Tracer):
        return True
    kinds = jax.typeof(leaf).sharding.mesh.axis_types
    return bool(kinds) and AxisType.Auto not in kinds
