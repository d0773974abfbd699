"""A subspace of all params, given by orthonormal rows, and the two matrix products with it."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.flatten_util import ravel_pytree

from optperm.contract.dtypes import accumulation_dtype
from optperm.contract.mapped_axes import AxisName, all_gather, mark_varying, varying_axes

# On accelerators float32 products lose half their digits by default.
_PRECISION = jax.lax.Precision.HIGHEST


class Subspace(NamedTuple):
    r"""Orthonormal rows :math:`P` over all params, or those of them that one replica holds.

    Attributes:
      rows: The rows, zero until they are set and where there are fewer than there is room for.
      first_row: The number of the first of them among all rows; 0 without an axis of replicas.
      is_set: Whether there is a basis yet.
    """

    rows: optax.Params  # (rows of this replica, *shape) per leaf; float32, or float64 for float64
    first_row: jax.Array  # int32 ()
    is_set: jax.Array  # bool ()


def empty_subspace(params: optax.Params, n_components: int, axis_name: AxisName | None) -> Subspace:
    """Room for ceil(k / R) rows on each of R replicas."""
    if axis_name is None or not jax.tree.leaves(params):
        count, first_row = n_components, jnp.zeros([], jnp.int32)
    else:
        count = -(-n_components // jax.lax.axis_size(axis_name))
        first_row = jnp.asarray(jax.lax.axis_index(axis_name) * count, jnp.int32)
    axes = varying_axes(first_row)

    def zeros(leaf: Any) -> jax.Array:
        rows = jnp.zeros((count, *jnp.shape(leaf)), accumulation_dtype(leaf))
        return mark_varying(rows, axes | varying_axes(leaf))

    return Subspace(jax.tree.map(zeros, params), first_row, jnp.zeros([], jnp.bool_))


def project(
    subspace: Subspace,
    tree: optax.Updates,
    n_components: int,
    dtype: Any,
    axis_name: AxisName | None,
) -> jax.Array:
    """P g, (k,): every replica's part, gathered."""

    def products(rows: jax.Array, leaf: jax.Array) -> jax.Array:
        of_leaf = tuple(range(leaf.ndim))
        contracted = (tuple(axis + 1 for axis in of_leaf), of_leaf)
        return jax.lax.dot_general(
            rows, leaf.astype(rows.dtype), (contracted, ((), ())), precision=_PRECISION
        ).astype(dtype)

    parts = jax.tree.leaves(jax.tree.map(products, subspace.rows, tree))
    if not parts:
        return jnp.zeros(n_components, dtype)
    own = functools.reduce(jnp.add, parts)
    if axis_name is None:
        return own
    return all_gather(own, axis_name, tiled=True)[:n_components]


def lift(
    subspace: Subspace, coefficients: jax.Array, axis_name: AxisName | None
) -> tuple[optax.Updates, ...]:
    """P' c for each row c of the coefficients, (number, k), in one pass over P and one psum."""
    number = coefficients.shape[0]

    def combine(rows: jax.Array) -> jax.Array:
        index = subspace.first_row + jnp.arange(rows.shape[0], dtype=jnp.int32)
        own = coefficients
        if axis_name is not None:
            own = jnp.take(coefficients, index, axis=1, mode="fill", fill_value=0.0)
        return jax.lax.dot_general(
            own.astype(rows.dtype), rows, (((1,), (0,)), ((), ())), precision=_PRECISION
        )

    combined = sum_over(jax.tree.map(combine, subspace.rows), axis_name)
    return tuple(jax.tree.map(lambda leaf, i=i: leaf[i], combined) for i in range(number))


def sum_over(tree: Any, axis_name: AxisName | None) -> Any:
    """The sum over replicas, in one collective for each dtype."""
    if axis_name is None:
        return tree
    leaves, structure = jax.tree.flatten(tree)
    results: list[Any] = [None] * len(leaves)
    for dtype in dict.fromkeys(leaf.dtype for leaf in leaves):
        places = [place for place, leaf in enumerate(leaves) if leaf.dtype == dtype]
        flat, unravel = ravel_pytree([leaves[place] for place in places])
        for place, total in zip(places, unravel(jax.lax.psum(flat, axis_name)), strict=True):
            results[place] = total
    return jax.tree.unflatten(structure, results)


def mean_over(tree: Any, axis_name: AxisName | None) -> Any:
    """The mean over replicas, in one collective for each dtype."""
    if axis_name is None:
        return tree
    size = jax.lax.axis_size(axis_name)
    return jax.tree.map(lambda leaf: leaf / size, sum_over(tree, axis_name))
