"""Conditionals that work the same way in every mapping."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import AxisType

from optperm.core.dtypes import place_like
from optperm.core.mapped_axes import mark_varying, varying_axes

Tree = TypeVar("Tree")


def cond(
    predicate: jax.Array | bool,
    true_fn: Callable[..., Any],
    false_fn: Callable[..., Any],
    *operands: Any,
) -> Any:
    """Call `jax.lax.cond` after making the types of the branches' outputs equal, leaf by leaf.

    A leaf varies over all axes over which it varies in either branch. On an explicit mesh, it has the
    sharding from the branch that shards it, since zeros like an array outside `jax.jit` are not sharded.
    A Python bool chooses the branch while tracing. Outside `jax.jit`, where JAX would compile a
    conditional in every call, the false branch, which most steps take, is called as a function. Invalid
    arguments of the true branch then raise only when the true branch runs.
    """
    if isinstance(predicate, bool):
        return (true_fn if predicate else false_fn)(*operands)
    if _is_known_to_be_false(predicate):
        return jax.tree.map(jnp.asarray, false_fn(*operands))
    # Types contain more than shape and dtype only in shard_map and on explicit meshes.
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.manual_axes and AxisType.Explicit not in mesh.axis_types:
        return jax.lax.cond(predicate, true_fn, false_fn, *operands)
    types = jax.eval_shape(true_fn, *operands), jax.eval_shape(false_fn, *operands)

    def match_types(branch: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *operands: jax.tree.map(place_like, branch(*operands), *types)

    return jax.lax.cond(predicate, match_types(true_fn), match_types(false_fn), *operands)


def when(predicate: jax.Array | bool, change: Callable[[Tree], Tree], tree: Tree) -> Tree:
    """Return `change(tree)` if the predicate is true, otherwise the tree itself.

    This is a loop with at most one iteration. XLA updates the carry of a loop in place, while a
    conditional copies each leaf that it returns, in every step. Types are made equal as in `cond`.

    Args:
      predicate: Whether to change the tree. A Python bool decides while tracing. Outside `jax.jit`,
        nothing is compiled if the predicate is false.
      change: A function of the tree, which returns a tree of the same form.
      tree: The tree.
    """
    if isinstance(predicate, bool):
        return change(tree) if predicate else tree
    if _is_known_to_be_false(predicate):
        return tree
    mesh, types, is_due = jax.sharding.get_abstract_mesh(), tree, jnp.asarray(predicate)
    if mesh.manual_axes or AxisType.Explicit in mesh.axis_types:
        types = jax.eval_shape(change, tree)

    def turn(carry: tuple[jax.Array, Tree]) -> tuple[jax.Array, Tree]:
        # Within a conditional, XLA does not hoist the change out of the loop into every step.
        changed = cond(carry[0], change, lambda tree: tree, carry[1])
        is_due = both(carry[0], jnp.logical_not(carry[0]))
        return is_due, jax.tree.map(place_like, changed, carry[1])

    start = is_due, jax.tree.map(place_like, tree, types)
    result: Tree = jax.lax.while_loop(lambda carry: carry[0], turn, start)[1]
    return result


def _is_known_to_be_false(predicate: Any) -> bool:
    return not isinstance(predicate, jax.core.Tracer) and not predicate


def both(flag: jax.Array, other: jax.Array) -> jax.Array:
    """Return whether both flags are true, computed with a sort as the smaller flag.

    Without a sort in a loop, XLA on a CPU classifies the loop as small and compiles it as one function,
    which takes minutes for many leaves.
    """
    flags = mark_varying([flag, other], varying_axes(flag, other))
    return jax.lax.sort(jnp.stack(flags).astype(jnp.int32))[0] > 0
