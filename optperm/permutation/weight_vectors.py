"""Weight vectors: the rows that a permutation method permutes.

A weight vector holds all weights that enter one output unit. Here it is a column of the matrix
(n, rows): a leaf's output axes make the rows, its other axes, flattened in order, the n entries.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from optperm.mapped_axes import mark_varying, varying_axes

# An axis or several, or what gives them for a leaf at a path such as "Dense_0/kernel".
OutputAxes = int | Sequence[int] | Callable[[str, jax.Array], int | Sequence[int]]


def resolve_output_axes(
    path: tuple[Any, ...], leaf: jax.Array, axes: OutputAxes
) -> tuple[int, ...]:
    """The output axes of one leaf as non-negative integers in increasing order; () for rank 0 and 1.

    Raises:
      ValueError: If an axis is out of range or given twice.
    """
    if leaf.ndim < 2:
        return ()
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    chosen = axes(name, leaf) if callable(axes) else axes
    chosen = (chosen,) if isinstance(chosen, int) else tuple(chosen)
    if any(not -leaf.ndim <= axis < leaf.ndim for axis in chosen):
        raise ValueError(
            f"output_axes {chosen} are out of range for the parameter {name} of shape {leaf.shape}."
        )
    resolved = tuple(sorted(axis % leaf.ndim for axis in chosen))
    if len(set(resolved)) != len(resolved):
        raise ValueError(f"output_axes {chosen} name an axis of {name} twice (shape {leaf.shape}).")
    return resolved


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


def sort_ranks(matrix: jax.Array) -> jax.Array:
    """The rank of each entry in its column: 0 for the smallest, ties by location. int32 (n, rows)."""
    order = jnp.argsort(matrix, axis=0, stable=True)
    order = mark_varying(order, varying_axes(matrix))  # of which a sort's other operands lose track
    return jnp.argsort(order, axis=0).astype(jnp.int32)
