"""What varies over which mapped axis, in the checked mode of `jax.shard_map`.

There an array carries the mapped axes over which its value may differ. Elsewhere (`jax.pmap`,
`jax.vmap`, the unchecked mode) nothing is marked as varying, and nothing has to be.
"""

from collections.abc import Iterable
from typing import Any, TypeVar

import jax

Tree = TypeVar("Tree")
AxisName = str | tuple[str, ...]


def varying_axes(*trees: Any) -> frozenset[str]:
    """The mapped axes over which any leaf of the trees is marked as varying."""
    leaves = jax.tree.leaves(trees)
    return frozenset().union(*(jax.typeof(leaf).manual_axis_type.varying for leaf in leaves))


def mark_varying(tree: Tree, axes: Iterable[str]) -> Tree:
    """Marks every leaf as varying over the given axes, those included over which it already does."""

    def mark(leaf: Any) -> Any:
        missing = tuple(sorted(frozenset(axes) - varying_axes(leaf)))
        return jax.lax.pcast(leaf, missing, to="varying") if missing else leaf

    return jax.tree.map(mark, tree)


def varying_like(tree: Tree, other: Any, axis_name: AxisName | None) -> Tree:
    """Marks `tree` as varying over those of the named axes over which `other` varies.

    A gradient with respect to params that do not vary over an axis arrives summed over it; with
    respect to params marked as varying like the batch, it stays the local one.
    """
    names = {axis_name} if isinstance(axis_name, str) else set(axis_name or ())
    return mark_varying(tree, names & varying_axes(other))
