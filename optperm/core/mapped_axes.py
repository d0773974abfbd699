"""Collectives and types over mapped axes, which work the same way in every mapping.

In the checked mode of `jax.shard_map`, an array's type includes the mapped axes over which it varies.
In other mappings (`jax.pmap`, `jax.vmap`, the unchecked mode), arrays need no marks for varying axes.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import auto_axes

from optperm.core.shardings import explicit_sharding, type_of, unshard

Tree = TypeVar("Tree")
AxisName = str | tuple[str, ...]


def axis_names(axis_name: AxisName | None) -> tuple[str, ...]:
    """Return the names of mapped axes as a tuple."""
    return (axis_name,) if isinstance(axis_name, str) else tuple(axis_name or ())


def varying_axes(*trees: Any) -> frozenset[str]:
    """Return the mapped axes over which any leaf of the trees is marked as varying."""
    leaves = jax.tree.leaves(trees)
    return frozenset().union(*(type_of(leaf).manual_axis_type.varying for leaf in leaves))


def mark_varying(tree: Tree, axes: Iterable[str]) -> Tree:
    """Mark each leaf as varying over the given axes, in addition to its own axes."""

    def mark(leaf: Any) -> Any:
        missing = tuple(sorted(frozenset(axes) - varying_axes(leaf)))
        return jax.lax.pcast(leaf, missing, to="varying") if missing else leaf

    return jax.tree.map(mark, tree)


def varying_zeros(like: Any, dtype: Any, shape: tuple[int, ...] = ()) -> jax.Array:
    """Return zeros, or a single zero, that vary over each axis over which a leaf of `like` varies."""
    return mark_varying(jnp.zeros(shape, dtype), varying_axes(like))


def stack_scalars(scalars: Sequence[jax.Array]) -> jax.Array:
    """Return scalars as one vector, which varies over all axes over which a scalar varies."""
    if not scalars:
        return jnp.zeros(0, jnp.float32)
    return jnp.stack(mark_varying(list(scalars), varying_axes(scalars)))


def varying_like(tree: Tree, other: Any, axis_name: AxisName | None) -> Tree:
    """Mark `tree` as varying over the named axes over which `other` varies.

    Gradients with respect to params that do not vary over an axis are summed over the axis. If params
    are marked as varying like the batch, the gradient stays local.
    """
    return mark_varying(tree, varying_axes(other).intersection(axis_names(axis_name)))


def largest(tree: Tree, axis_name: AxisName | None) -> Tree:
    """Return the maximum of each number over the named axes that `jax.vmap` maps.

    Counts of steps are the same on all replicas, so their maximum represents all counts. A predicate
    from the maximum is not batched, while `jax.vmap` turns a `jax.lax.cond` on a batched predicate into
    a selection, which runs both branches and their collectives in every step. Axes of `jax.pmap` and
    `jax.shard_map` are ignored, because each device has its own conditional.

    Args:
      tree: Numbers or flags, each a scalar on a replica.
      axis_name: The axes over which the replicas are spread.

    Raises:
      ValueError: If a `jax.vmap` of size above 1 that is not a named axis maps the numbers.
    """
    if axis_name is None:
        return tree
    return _combine(tree, axis_names(axis_name), lambda x: jnp.max(x, axis=0), lambda x, _: x, None)


def psum(tree: Tree, axis_name: AxisName) -> Tree:
    """Sum over mapped axes; JAX 0.12 cannot batch its own psum in a conditional on an explicit mesh."""

    def sum_rows(x: Any) -> Any:
        # Without a dtype, sums of integers would be wider.
        return jnp.sum(x, axis=0, dtype=x.dtype)

    return _combine(tree, axis_names(axis_name), sum_rows, jax.lax.psum, 0)


def all_gather(tree: Any, axis_name: AxisName, *, tiled: bool = False) -> Any:
    """Gather over mapped axes, with a result whose type does not vary over them."""

    def gather(tree: Any, names: tuple[str, ...]) -> Any:
        to = "invarying" if varying_axes(tree) else "varying"
        return jax.lax.all_gather(tree, names, to=to) if names else tree

    rows = _combine(tree, axis_names(axis_name), unshard, gather, 1)
    if not tiled:
        return rows
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), rows)


def reflect(tree: Tree, axis_name: str, shift: int) -> Tree:
    """Return, at each index i of an axis of size k, the tree from index (shift - i) mod k.

    For any mapping of the axis, the compiled program permutes devices. `jax.vmap` would turn
    `jax.lax.ppermute` into a gather, and a mesh would then gather all data.
    """

    @jax.custom_batching.custom_vmap
    def permute(tree: Any, index: Any) -> Any:
        del index
        size = jax.lax.axis_size(axis_name)
        pairs = [(i, (shift - i) % size) for i in range(size)]
        return jax.tree.map(lambda leaf: jax.lax.ppermute(leaf, axis_name, pairs), tree)

    @permute.def_vmap
    def _(axis_size: int, in_batched: Any, tree: Any, index: Any) -> tuple[Any, Any]:
        # Only the index of an axis that this vmap maps is batched.
        del axis_size, index
        are_mapped, is_own = in_batched
        if not is_own:
            return reflect(tree, axis_name, shift), are_mapped

        def rows(leaf: Any, is_mapped: bool) -> Any:
            return _reflect_rows(leaf, shift) if is_mapped else leaf

        return jax.tree.map(rows, tree, are_mapped), are_mapped

    result: Tree = permute(tree, jax.lax.axis_index(axis_name))
    return result


def _reflect_rows(leaf: Any, shift: int) -> Any:
    """Return an array in which row i of k is row (shift - i) mod k of the leaf."""

    def rows(leaf: Any) -> Any:
        return jnp.roll(jax.lax.rev(leaf, (0,)), shift + 1, axis=0)

    sharding = explicit_sharding(leaf)
    return rows(leaf) if sharding is None else auto_axes(rows, out_sharding=sharding)(leaf)


def _combine(
    tree: Any,
    names: tuple[str, ...],
    of_rows: Callable[[Any], Any],
    of_devices: Callable[[Any, tuple[str, ...]], Any],
    batch_axis: int | None,
) -> Any:
    """Combine a tree over named axes, some mapped by `jax.vmap` and others over devices.

    Args:
      tree: The tree of one replica.
      names: The axes.
      of_rows: A function to combine a leaf along its leading axis, the axis of a named `jax.vmap`.
      of_devices: A function to combine a tree over the axes that no `jax.vmap` maps.
      batch_axis: The axis in results for any other `jax.vmap`; None to forbid other `jax.vmap`.
    """

    @jax.custom_batching.custom_vmap
    def combine(tree: Any, indices: Any) -> Any:
        del indices
        return of_devices(tree, names)

    @combine.def_vmap
    def _(axis_size: int, in_batched: Any, tree: Any, indices: Any) -> tuple[Any, Any]:
        # Only the index of an axis that this vmap maps is batched.
        del indices
        is_mapped, is_own = in_batched
        rest = tuple(name for name, own in zip(names, is_own, strict=True) if not own)
        # A named vmap combines its rows, and mappings outside it combine the other axes. So does an
        # unnamed vmap of size 1, as in the block of a device.
        if len(rest) < len(names) or (axis_size == 1 and batch_axis is None):

            def rows(leaf: Any, mapped: bool) -> Any:
                return of_rows(
                    leaf if mapped else jnp.broadcast_to(leaf, (axis_size, *jnp.shape(leaf)))
                )

            result = _combine(
                jax.tree.map(rows, tree, is_mapped), rest, of_rows, of_devices, batch_axis
            )
            return result, jax.tree.map(lambda _: False, result)
        if batch_axis is None:
            # The predicate would be batched, and the conditional would become a selection.
            raise ValueError(
                f"Under a jax.vmap whose axis (size {axis_size}) is not in the optimizer's axis_name, "
                "an optimizer that counts its steps would exchange in every step: if the vmap maps "
                "replicas, name its axis and pass the name to the optimizer; otherwise pass commit=."
            )
        # Any other vmap maps independent trees. Combine each tree, and move the vmap's axis in front.
        result = _combine(tree, names, of_rows, of_devices, batch_axis)
        first = jax.tree.map(
            lambda leaf, mapped: jnp.moveaxis(leaf, batch_axis, 0) if mapped else leaf,
            result,
            is_mapped,
        )
        return first, is_mapped

    return combine(tree, tuple(jax.lax.axis_index(name) for name in names))


def mean_of_function(
    function: Callable[..., Any],
    other: Any,
    axis_name: AxisName | None,
    place: Callable[[Any, Any, AxisName | None], Any],
) -> Callable[..., Any]:
    """Return a function of params that averages another function over the named axes.

    Args:
      function: The function of each replica, for params that are the same on all replicas.
      other: A tree that varies over the axes if varying axes are tracked.
      axis_name: The axes; None for a single replica.
      place: `shared`, or `varying_like` for a function that is itself a gradient.
    """

    @functools.wraps(function)  # Optax's line searches inspect the signature of value_fn
    def mean(at: Any, **options: Any) -> Any:
        result = function(place(at, other, axis_name), **options)
        return result if axis_name is None else jax.lax.pmean(result, axis_name)

    return mean


def shared(tree: Tree, other: Any, axis_name: AxisName | None) -> Tree:
    """Return params at which to evaluate a function that is averaged over the named axes.

    If varying axes are not tracked, the derivative with respect to plain params would be only the part
    from this replica. With respect to the returned params, it is the derivative of the average.

    Args:
      tree: Params that are the same on all replicas.
      other: A tree, such as the batch, that varies over the axes if varying axes are tracked.
      axis_name: The axes over which the function's value is averaged.
    """

    def share(leaf: Any) -> Any:
        local = varying_like(leaf, other, axis_name)
        is_summed = varying_axes(local) != varying_axes(leaf)  # the transpose of the mark sums
        return local if axis_name is None or is_summed else _averaged_gradient(axis_name, local)

    return jax.tree.map(share, tree)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _averaged_gradient(axis_name: AxisName, leaf: Any) -> Any:
    return leaf


def _average_cotangent(axis_name: AxisName, _: None, cotangent: Any) -> tuple[Any]:
    axes = varying_axes(cotangent)
    if axes:
        # In the checked mode, the transpose of the average has already divided the sum.
        return (mark_varying(jax.lax.psum(cotangent, axis_name), axes),)
    return (jax.lax.pmean(cotangent, axis_name),)


_averaged_gradient.defvjp(lambda _, leaf: (leaf, None), _average_cotangent)
