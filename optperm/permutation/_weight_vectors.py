"""Weight vectors, the columns that a permutation method permutes.

A weight vector consists of all weights that enter one output unit. In this file, it is a column of an
array (n, *outputs): a leaf's output axes come last, and the n entries are its other axes, flattened.
"""

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from optperm.core.mapped_axes import mark_varying, varying_axes
from optperm.core.shapes import Params
from optperm.core.shardings import explicit_sharding, shard_like
from optperm.core.trees import leaf_paths

# One or several axes, or a function of a path, such as "Dense_0/kernel", and a leaf that returns them.
OutputAxes = int | Sequence[int] | Callable[[str, jax.Array], int | Sequence[int]]


def resolve_output_axes(params: Params, axes: OutputAxes) -> list[tuple[int, ...]]:
    """Return the output axes of each leaf, nonnegative and in increasing order; () for ranks 0 and 1.

    Raises:
      ValueError: If the output axes are not distinct axes of the leaf.
    """
    return [_resolve(path, leaf, axes) for path, leaf in leaf_paths(params)]


def _resolve(path: str, leaf: jax.Array, axes: OutputAxes) -> tuple[int, ...]:
    shape = jnp.shape(leaf)
    if len(shape) < 2:
        return ()
    given: Any = axes(path, leaf) if callable(axes) else axes
    chosen = tuple(np.ravel(given)) if isinstance(given, list | tuple | np.ndarray) else (given,)
    are_axes = all(
        isinstance(axis, int | np.integer) and -len(shape) <= axis < len(shape) for axis in chosen
    )
    if not are_axes or len({axis % len(shape) for axis in chosen}) < len(chosen):
        raise ValueError(
            f"output_axes must be distinct axes of {path or 'params'}, which has shape {shape}, got "
            f"{chosen}."
        )
    return tuple(sorted(int(axis) % len(shape) for axis in chosen))


def to_columns(leaf: jax.Array, output_axes: tuple[int, ...]) -> jax.Array:
    """Return a leaf of rank >= 1 as (n, *outputs), with no column split over an explicit mesh."""
    inputs = _input_axes(leaf.ndim, output_axes)
    sharding = explicit_sharding(leaf)
    if sharding is not None and any(sharding.spec[axis] for axis in inputs):
        spec = [None if axis in inputs else names for axis, names in enumerate(sharding.spec)]
        leaf = jax.sharding.reshard(leaf, sharding.update(spec=P(*spec)))
    outputs = [leaf.shape[axis] for axis in output_axes]
    return jnp.transpose(leaf, (*inputs, *output_axes)).reshape(-1, *outputs)


def from_columns(columns: jax.Array, like: jax.Array, output_axes: tuple[int, ...]) -> jax.Array:
    """Undo `to_columns` for a leaf with the shape and the sharding of `like`."""
    order = (*_input_axes(like.ndim, output_axes), *output_axes)
    moved = columns.reshape([like.shape[axis] for axis in order])
    return shard_like(jnp.transpose(moved, np.argsort(order).tolist()), like)


def _input_axes(rank: int, output_axes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(axis for axis in range(rank) if axis not in output_axes)


def order_keys(values: jax.Array) -> jax.Array:
    """Return integers in the order of floats: 0.0 and -0.0 are tied, and NaNs are tied and last.

    The integers are made from bits, because some devices and threads compare subnormals as zeros.
    """
    integers = jnp.dtype(f"int{8 * values.dtype.itemsize}")
    limits = jnp.iinfo(integers)
    bits = jax.lax.bitcast_convert_type(values, integers)
    keys = jnp.where(bits < 0, limits.min - bits, bits)
    return jnp.where(jnp.isnan(values), jnp.asarray(limits.max, integers), keys)


def sort_order(columns: jax.Array) -> jax.Array:
    """Return each column's positions, int32, in ascending order of its entries; ties are by position."""
    return order_of_keys(order_keys(columns))


def order_of_keys(keys: jax.Array) -> jax.Array:
    """Return the `sort_order` of columns with these `order_keys`."""
    order = jnp.argsort(keys, axis=0, stable=True).astype(jnp.int32)
    return mark_varying(order, varying_axes(keys))  # a sort loses the axes of its other operands


def inverse(permutations: jax.Array) -> jax.Array:
    """Return the inverse permutation of each column: ranks from an order, or an order from ranks."""
    # The outputs are a batch, so unlike jnp.put_along_axis, this moves nothing between devices.
    batch = tuple(range(1, permutations.ndim))
    dimensions = jax.lax.ScatterDimensionNumbers(
        update_window_dims=(),
        inserted_window_dims=(0,),
        scatter_dims_to_operand_dims=(0,),
        operand_batching_dims=batch,
        scatter_indices_batching_dims=batch,
    )
    places = jax.lax.broadcasted_iota(jnp.int32, permutations.shape, 0)
    return jax.lax.scatter(
        jnp.zeros_like(permutations), permutations[..., None], places, dimensions
    )


@jax.jit
def sort_ranks(columns: jax.Array) -> jax.Array:
    """Return the rank of each entry in its column, int32: 0 for the minimum; ties are by position."""
    return inverse(sort_order(columns))


def init_ranks(params: Params, output_axes: OutputAxes) -> Any:
    """Return the rank of each weight in its weight vector, int32, shaped like params."""
    zeros = jax.tree.map(lambda leaf: jnp.zeros_like(leaf, dtype=jnp.int32), params)
    _, ranks = permute_vectors(
        lambda _, weights, __: (weights, sort_ranks(weights)), output_axes, params, zeros
    )
    return ranks


@functools.partial(jax.jit, static_argnames="inputs")
def _has_constant_vector(leaf: jax.Array, inputs: tuple[int, ...]) -> jax.Array:
    keys = order_keys(leaf)
    return jnp.any(jnp.min(keys, axis=inputs) == jnp.max(keys, axis=inputs))


def warn_of_constant_vectors(params: Params, output_axes: OutputAxes) -> None:
    """Warn if all params are scalars, or if no permutation can change some weight vectors."""
    leaves = [leaf for leaf in jax.tree.leaves(params) if jnp.size(leaf)]
    if leaves and not any(jnp.ndim(leaf) or isinstance(leaf, jax.core.Tracer) for leaf in leaves):
        says = "All params are scalars, which permuting does not change: use another optimizer."
        warnings.warn(says, UserWarning, stacklevel=3)
    if constant := _find_constant_vectors(params, output_axes):
        warnings.warn(
            f"In {', '.join(constant)}, all weights that enter an output unit are equal, or only one "
            "enters: no permutation can change them. Use another optimizer for these params "
            "(optax.partition), or initialize the weights at random if there are several.",
            UserWarning,
            stacklevel=3,
        )


def _find_constant_vectors(params: Params, output_axes: OutputAxes) -> list[str]:
    """Return the names of untraced params with a constant weight vector."""
    constant = []
    with jax.ensure_compile_time_eval():  # constants have values while a function is traced
        axes = resolve_output_axes(params, output_axes)
        for (path, leaf), outputs in zip(leaf_paths(params), axes, strict=True):
            if isinstance(leaf, jax.core.Tracer) or not jnp.ndim(leaf) or not jnp.size(leaf):
                continue
            array = jnp.asarray(leaf)
            if _has_constant_vector(array, _input_axes(array.ndim, outputs)):
                constant.append(path or "params")
    return constant


def permute_vectors(
    function: Callable[..., tuple[jax.Array, jax.Array]],
    output_axes: OutputAxes,
    weights: Params,
    ranks: Any,
    *others: Any,
) -> tuple[Params, Any]:
    """Reorder all weight vectors, leaf by leaf.

    Args:
      function: `function(index, weights, ranks, *others)` returns the new weights and ranks of leaf
        number `index`. All arrays are (n, *outputs), with a weight vector per column. On a mesh with
        explicit axes, their outputs are sharded like the outputs of the weights.
      output_axes: The axes that index output units.
      weights: The weights.
      ranks: The rank of each weight in its weight vector, shaped like the weights.
      *others: More trees with the same shapes.

    Returns:
      The new weights and ranks, sharded like the weights. Scalars and empty leaves do not change.
    """

    def of_leaf(
        index: int, axes: tuple[int, ...], weights: jax.Array, ranks: jax.Array, *others: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        if weights.ndim == 0 or weights.size == 0:
            return weights, ranks
        arrays = [weights, *(shard_like(jnp.asarray(each), weights) for each in (ranks, *others))]
        new = function(index, *(to_columns(each, axes) for each in arrays))
        new_weights, new_ranks = (from_columns(each, weights, axes) for each in new)
        return new_weights, new_ranks

    leaves, structure = jax.tree.flatten(jax.tree.map(jnp.asarray, weights))
    axes = resolve_output_axes(weights, output_axes)
    rest = zip(*(jax.tree.leaves(tree) for tree in (ranks, *others)), strict=True)
    pairs = [
        of_leaf(index, of_outputs, leaf, *arrays)
        for index, (of_outputs, leaf, arrays) in enumerate(zip(axes, leaves, rest, strict=True))
    ]
    new_weights, new_ranks = zip(*pairs, strict=True) if pairs else ((), ())
    return jax.tree.unflatten(structure, new_weights), jax.tree.unflatten(structure, new_ranks)
