"""Weight vectors: the columns that a permutation method permutes.

A weight vector holds all weights that enter one output unit. Here it is a column of an array
(n, *outputs): a leaf's output axes come last, its other axes, flattened in order, are the n entries.
"""

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

from optperm.contract.mapped_axes import mark_varying, varying_axes
from optperm.contract.shardings import explicit_sharding, shard_like

# An axis or several, or what gives them for a leaf at a path such as "Dense_0/kernel".
OutputAxes = int | Sequence[int] | Callable[[str, jax.Array], int | Sequence[int]]


def resolve_output_axes(
    path: tuple[Any, ...], leaf: jax.Array, axes: OutputAxes
) -> tuple[int, ...]:
    """The output axes of one leaf as non-negative integers in increasing order; () for rank 0 and 1.

    Raises:
      TypeError: If they are no integers.
      ValueError: If an axis is out of range or given twice.
    """
    if leaf.ndim < 2:
        return ()
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    chosen = _as_axes(axes(name, leaf) if callable(axes) else axes)
    if any(not -leaf.ndim <= axis < leaf.ndim for axis in chosen):
        raise ValueError(
            f"output_axes {chosen} are out of range for the parameter {name} of shape {leaf.shape}."
        )
    resolved = tuple(sorted(axis % leaf.ndim for axis in chosen))
    if len(set(resolved)) != len(resolved):
        raise ValueError(f"output_axes {chosen} name an axis of {name} twice (shape {leaf.shape}).")
    return resolved


def check_output_axes(axes: OutputAxes) -> None:
    """Raises a TypeError unless these are integers, or a function to them."""
    if not callable(axes):
        _as_axes(axes)


def _as_axes(axes: Any) -> tuple[int, ...]:
    is_many = isinstance(axes, list | tuple) or (isinstance(axes, np.ndarray) and axes.ndim > 0)
    chosen = tuple(axes) if is_many else (axes,)
    if any(isinstance(axis, bool) or not isinstance(axis, int | np.integer) for axis in chosen):
        raise TypeError(
            f"output_axes must be an integer, several, or a function of a path and a parameter to "
            f"them, got {axes!r}."
        )
    return tuple(int(axis) for axis in chosen)


def to_columns(leaf: jax.Array, output_axes: tuple[int, ...]) -> jax.Array:
    """Lays a leaf of rank >= 1 out as (n, *outputs), one weight vector a column, none of them cut."""
    inputs = _input_axes(leaf.ndim, output_axes)
    sharding = explicit_sharding(leaf)
    if sharding is not None and any(sharding.spec[axis] for axis in inputs):
        spec = [None if axis in inputs else names for axis, names in enumerate(sharding.spec)]
        leaf = jax.sharding.reshard(leaf, sharding.update(spec=P(*spec)))
    outputs = [leaf.shape[axis] for axis in output_axes]
    return jnp.transpose(leaf, (*inputs, *output_axes)).reshape(-1, *outputs)


def from_columns(columns: jax.Array, like: jax.Array, output_axes: tuple[int, ...]) -> jax.Array:
    """Undoes `to_columns` for a leaf of the shape, and in the place, of another one."""
    order = (*_input_axes(like.ndim, output_axes), *output_axes)
    moved = columns.reshape([like.shape[axis] for axis in order])
    return shard_like(jnp.transpose(moved, np.argsort(order).tolist()), like)


def _input_axes(rank: int, output_axes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(axis for axis in range(rank) if axis not in output_axes)


def order_keys(values: jax.Array) -> jax.Array:
    """Integers in the order of floating numbers: 0.0 and -0.0 are tied, all NaNs are tied and last.

    They are made of the bits, since devices and threads differ in whether they compare subnormal numbers
    or take them for zero.
    """
    integers = jnp.dtype(f"int{8 * values.dtype.itemsize}")
    limits = jnp.iinfo(integers)
    bits = jax.lax.bitcast_convert_type(values, integers)
    keys = jnp.where(bits < 0, limits.min - bits, bits)
    return jnp.where(jnp.isnan(values), jnp.asarray(limits.max, integers), keys)


def sort_order(columns: jax.Array) -> jax.Array:
    """Where the smallest entry of each column stands, the next one, and so on. int32.

    The order is that of `order_keys`, ties by location.
    """
    return order_of_keys(order_keys(columns))


def order_of_keys(keys: jax.Array) -> jax.Array:
    """`sort_order` of columns whose `order_keys` these are."""
    order = jnp.argsort(keys, axis=0, stable=True).astype(jnp.int32)
    return mark_varying(order, varying_axes(keys))  # of which a sort's other operands lose track


def inverse(permutations: jax.Array) -> jax.Array:
    """The inverse permutation of each column: ranks from an order, and the other way round. int32."""
    # The outputs are a batch: unlike jnp.put_along_axis this moves nothing between devices.
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
    """The rank of each entry in its column: 0 for the smallest, ties by location. int32."""
    return inverse(sort_order(columns))


def init_ranks(params: optax.Params, output_axes: OutputAxes) -> Any:
    """The rank of each weight among those of its weight vector, int32, shaped like params."""
    zeros = jax.tree.map(lambda leaf: jnp.zeros_like(leaf, dtype=jnp.int32), params)
    _, ranks = permute_vectors(
        lambda _, weights, __: (weights, sort_ranks(weights)), output_axes, params, zeros
    )
    return ranks


@functools.partial(jax.jit, static_argnames="inputs")
def _has_constant_vector(leaf: jax.Array, inputs: tuple[int, ...]) -> jax.Array:
    keys = order_keys(leaf)
    return jnp.any(jnp.min(keys, axis=inputs) == jnp.max(keys, axis=inputs))


def warn_of_constant_vectors(
    params: optax.Params, output_axes: OutputAxes, *, example: str
) -> None:
    """Warns of parameters with weight vectors that no permutation can change, where Python sees them.

    Scalars are left to others, and said where there is nothing else.

    Args:
      params: The initial params.
      output_axes: The axes that index output units.
      example: How the method is built, for the message.
    """
    constant = []
    with jax.ensure_compile_time_eval():  # of constants of what is being traced, too
        for path, leaf in jax.tree_util.tree_leaves_with_path(params):
            if isinstance(leaf, jax.core.Tracer) or not jnp.ndim(leaf) or not jnp.size(leaf):
                continue
            array = jnp.asarray(leaf)
            inputs = _input_axes(array.ndim, resolve_output_axes(path, array, output_axes))
            if _has_constant_vector(array, inputs):
                constant.append(jax.tree_util.keystr(path, simple=True, separator="/"))
    leaves = [leaf for leaf in jax.tree.leaves(params) if jnp.size(leaf)]
    if leaves and not any(jnp.ndim(leaf) or isinstance(leaf, jax.core.Tracer) for leaf in leaves):
        warnings.warn(
            "All params are scalars, which permuting leaves as they are: nothing will be trained. Use "
            "another optimizer, such as optax.adam(1e-3).",
            UserWarning,
            stacklevel=3,
        )
    if constant:
        warnings.warn(
            f"In {', '.join(constant)} all weights that enter an output unit are equal, so permuting "
            "cannot train it. Initialize it at random, or train it with another optimizer: "
            f"optax.partition({{'permute': {example}, 'other': optax.adam(1e-3)}}, labels).",
            UserWarning,
            stacklevel=3,
        )


def permute_vectors(
    function: Callable[..., tuple[jax.Array, jax.Array]],
    output_axes: OutputAxes,
    weights: optax.Params,
    ranks: Any,
    *others: Any,
) -> tuple[optax.Params, Any]:
    """Puts all weight vectors in another order, leaf by leaf.

    Args:
      function: `function(index, weights, ranks, *others)`, the new weights and ranks of the leaf with
        this number in the tree. All of them are (n, *outputs), one weight vector a column; on a mesh
        with explicit axes the outputs are sharded as those of the weights are.
      output_axes: The axes that index output units.
      weights: The weights.
      ranks: The rank of each in its weight vector, shaped like the weights.
      *others: More trees of that shape.

    Returns:
      The new weights and the new ranks, sharded like the weights. Scalars and empty leaves are what
      they were.
    """

    def of_leaf(
        index: int, path: tuple[Any, ...], weights: jax.Array, ranks: jax.Array, *others: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        if weights.ndim == 0 or weights.size == 0:
            return weights, ranks
        axes = resolve_output_axes(path, weights, output_axes)
        arrays = [weights, *(shard_like(jnp.asarray(each), weights) for each in (ranks, *others))]
        new = function(index, *(to_columns(each, axes) for each in arrays))
        new_weights, new_ranks = (from_columns(each, weights, axes) for each in new)
        return new_weights, new_ranks

    leaves, structure = jax.tree_util.tree_flatten_with_path(jax.tree.map(jnp.asarray, weights))
    rest = zip(*(jax.tree.leaves(tree) for tree in (ranks, *others)), strict=True)
    pairs = [
        of_leaf(index, path, leaf, *arrays)
        for index, ((path, leaf), arrays) in enumerate(zip(leaves, rest, strict=True))
    ]
    new_weights, new_ranks = zip(*pairs, strict=True) if pairs else ((), ())
    return jax.tree.unflatten(structure, new_weights), jax.tree.unflatten(structure, new_ranks)
