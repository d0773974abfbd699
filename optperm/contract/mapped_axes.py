"""What varies over which mapped axis, in the checked mode of `jax.shard_map`.

There an array carries the mapped axes over which its value may differ. Elsewhere (`jax.pmap`,
`jax.vmap`, the unchecked mode) nothing is marked as varying, and nothing has to be.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import jax
from jax.sharding import AxisType

from optperm.contract.shardings import shard_like, type_of

Tree = TypeVar("Tree")
AxisName = str | tuple[str, ...]


def axis_names(axis_name: AxisName | None) -> tuple[str, ...]:
    """The names of mapped axes, one by one."""
    return (axis_name,) if isinstance(axis_name, str) else tuple(axis_name or ())


def varying_axes(*trees: Any) -> frozenset[str]:
    """The mapped axes over which any leaf of the trees is marked as varying."""
    leaves = jax.tree.leaves(trees)
    return frozenset().union(*(type_of(leaf).manual_axis_type.varying for leaf in leaves))


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
    return mark_varying(tree, varying_axes(other).intersection(axis_names(axis_name)))


def cond(
    predicate: jax.Array | bool,
    true_fn: Callable[..., Any],
    false_fn: Callable[..., Any],
    *operands: Any,
) -> Any:
    """`jax.lax.cond` whose branches agree in their types, leaf by leaf.

    Both vary over the axes over which either does: so a state's leaf that varies in neither keeps its
    type, beside others that do vary. On an explicit mesh both are sharded as the one that is: zeros that
    are made of an array outside of `jax.jit` are not. A Python bool decides while tracing.
    """
    if isinstance(predicate, bool):
        return (true_fn if predicate else false_fn)(*operands)
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.manual_axes and AxisType.Explicit not in mesh.axis_types:
        return jax.lax.cond(predicate, true_fn, false_fn, *operands)
    types = jax.eval_shape(true_fn, *operands), jax.eval_shape(false_fn, *operands)

    def typed(branch: Callable[..., Any]) -> Callable[..., Any]:
        def agree(leaf: Any, *others: Any) -> Any:
            return shard_like(mark_varying(leaf, varying_axes(*others)), *others)

        return lambda *operands: jax.tree.map(agree, branch(*operands), *types)

    return jax.lax.cond(predicate, typed(true_fn), typed(false_fn), *operands)


def all_gather(tree: Any, axis_name: AxisName, *, tiled: bool) -> Any:
    """`jax.lax.all_gather` whose result is everywhere the same, by its type too if that is tracked."""
    to = "invarying" if varying_axes(tree) else "varying"
    return jax.lax.all_gather(tree, axis_name, tiled=tiled, to=to)


def mean_of_function(
    function: Callable[..., Any],
    other: Any,
    axis_name: AxisName | None,
    place: Callable[[Any, Any, AxisName | None], Any],
) -> Callable[..., Any]:
    """A function of params, averaged over the named axes.

    Args:
      function: Each replica's own, of params that are the same on all of them.
      other: What varies over the axes where varying axes are tracked.
      axis_name: The axes; None for a single replica.
      place: `shared`, or `varying_like` for a function that is itself a gradient.
    """

    @functools.wraps(function)  # Optax's line searches look at what value_fn takes
    def mean(at: Any, **options: Any) -> Any:
        result = function(place(at, other, axis_name), **options)
        return result if axis_name is None else jax.lax.pmean(result, axis_name)

    return mean


def shared(tree: Tree, other: Any, axis_name: AxisName | None) -> Tree:
    """The tree, to evaluate a function of it that each replica averages over the named axes.

    As it is, where varying axes are not tracked, the derivative of the average with respect to such
    params would be this replica's part alone. Through this it is that of the average.

    Args:
      tree: Params that are the same on every replica.
      other: What varies over the axes where varying axes are tracked, such as the batch.
      axis_name: The axes over which the function's value is averaged.
    """

    def share(leaf: Any) -> Any:
        local = varying_like(leaf, other, axis_name)
        is_summed = varying_axes(local) != varying_axes(leaf)  # by the transpose of that mark
        return local if axis_name is None or is_summed else _averaged_gradient(axis_name, local)

    return jax.tree.map(share, tree)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _averaged_gradient(axis_name: AxisName, leaf: Any) -> Any:
    return leaf


def _average_cotangent(axis_name: AxisName, _: None, cotangent: Any) -> tuple[Any]:
    axes = varying_axes(cotangent)
    if axes:
        # Here the transpose of the average has divided already.
        return (mark_varying(jax.lax.psum(cotangent, axis_name), axes),)
    return (jax.lax.pmean(cotangent, axis_name),)


_averaged_gradient.defvjp(lambda _, leaf: (leaf, None), _average_cotangent)
