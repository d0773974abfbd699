"""Weight vectors: the rows that a permutation method permutes.

A weight vector holds all weights that enter one output unit. Here it is a column of the matrix
(n, rows): a leaf's output axes make the rows, its other axes, flattened in order, the n entries.
"""

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optperm.contract.mapped_axes import mark_varying, varying_axes

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


def to_matrix(leaf: jax.Array, output_axes: tuple[int, ...]) -> jax.Array:
    """Lays a leaf of rank >= 1 out as (n, rows), one weight vector a column."""
    rows = math.prod(leaf.shape[axis] for axis in output_axes)
    order = _inputs_first(leaf.ndim, output_axes)
    return jnp.transpose(leaf, order).reshape(leaf.size // rows, rows)


def from_matrix(
    matrix: jax.Array, shape: tuple[int, ...], output_axes: tuple[int, ...]
) -> jax.Array:
    """Undoes `to_matrix` for a leaf of the given shape."""
    order = _inputs_first(len(shape), output_axes)
    moved = matrix.reshape([shape[axis] for axis in order])
    return jnp.transpose(moved, [order.index(axis) for axis in range(len(shape))])


def _inputs_first(rank: int, output_axes: tuple[int, ...]) -> tuple[int, ...]:
    return (*(axis for axis in range(rank) if axis not in output_axes), *output_axes)


def sort_order(matrix: jax.Array) -> jax.Array:
    """Where the smallest entry of each column stands, the next one, and so on. int32 (n, rows).

    Ties are by location, 0.0 and -0.0 being tied; NaN is last.
    """
    order = jnp.argsort(matrix, axis=0, stable=True).astype(jnp.int32)
    return mark_varying(order, varying_axes(matrix))  # of which a sort's other operands lose track


def scatter_rows(matrix: jax.Array, places: jax.Array) -> jax.Array:
    """Puts each entry at its place in its column: `result[places[k, row], row] = matrix[k, row]`.

    Where the places are a permutation this undoes `take_along_axis`, for a fraction of a sort's time.
    """
    return jnp.put_along_axis(jnp.zeros_like(matrix), places, matrix, axis=0, inplace=False)


def ranks_of(order: jax.Array) -> jax.Array:
    """The rank of each entry in its column, 0 for the smallest, from `sort_order`. int32 (n, rows)."""
    return scatter_rows(jax.lax.broadcasted_iota(jnp.int32, order.shape, 0), order)


def sort_ranks(matrix: jax.Array) -> jax.Array:
    """The rank of each entry in its column: 0 for the smallest, ties by location. int32 (n, rows)."""
    return ranks_of(sort_order(matrix))


def init_ranks(params: optax.Params, output_axes: OutputAxes) -> Any:
    """The rank of each weight among those of its weight vector, int32, shaped like params."""

    def of_leaf(path: tuple[Any, ...], leaf: jax.Array) -> jax.Array:
        if leaf.size == 0 or leaf.ndim == 0:
            return jnp.zeros(leaf.shape, jnp.int32)
        axes = resolve_output_axes(path, leaf, output_axes)
        return from_matrix(sort_ranks(to_matrix(leaf, axes)), leaf.shape, axes)

    return jax.tree_util.tree_map_with_path(of_leaf, jax.tree.map(jnp.asarray, params))


def warn_of_constant_rows(params: optax.Params, output_axes: OutputAxes, *, example: str) -> None:
    """Warns of parameters with weight vectors that no permutation can change, where Python sees them.

    Args:
      params: The initial params.
      output_axes: The axes that index output units.
      example: How the method is built, for the message.
    """
    constant = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if isinstance(leaf, jax.core.Tracer) or not jnp.size(leaf) or not jnp.ndim(leaf):
            continue
        with jax.ensure_compile_time_eval():  # of constants of what is being traced, too
            array = jnp.asarray(leaf)
            matrix = np.asarray(to_matrix(array, resolve_output_axes(path, array, output_axes)))
        if np.any(np.all(matrix == matrix[0], axis=0)):
            constant.append(jax.tree_util.keystr(path, simple=True, separator="/"))
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
        this number in the tree; all of them matrices (n, rows).
      output_axes: The axes that index output units.
      weights: The weights.
      ranks: The rank of each in its weight vector, shaped like the weights.
      *others: More trees of that shape.

    Returns:
      The new weights and the new ranks. Scalars and empty leaves are what they were.
    """

    def of_leaf(index: int, path: tuple[Any, ...], *arrays: jax.Array) -> tuple[jax.Array, ...]:
        if arrays[0].ndim == 0 or arrays[0].size == 0:
            return arrays[:2]
        axes = resolve_output_axes(path, arrays[0], output_axes)
        results = function(index, *(to_matrix(jnp.asarray(each), axes) for each in arrays))
        return tuple(from_matrix(each, arrays[0].shape, axes) for each in results)

    leaves, structure = jax.tree_util.tree_flatten_with_path(weights)
    rest = zip(*(jax.tree.leaves(tree) for tree in (ranks, *others)), strict=True)
    pairs = [
        of_leaf(index, path, leaf, *arrays)
        for index, ((path, leaf), arrays) in enumerate(zip(leaves, rest, strict=True))
    ]
    new_weights, new_ranks = zip(*pairs, strict=True) if pairs else ((), ())
    return jax.tree.unflatten(structure, new_weights), jax.tree.unflatten(structure, new_ranks)
