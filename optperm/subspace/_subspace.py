"""A subspace of all params, given by orthonormal rows P, and the products P g and P' c."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.flatten_util import ravel_pytree
from jax.sharding import NamedSharding, PartitionSpec

from optperm.core import checks
from optperm.core.dtypes import accumulation_dtype, computed_once
from optperm.core.mapped_axes import AxisName, all_gather, axis_names, mark_varying, varying_axes
from optperm.core.shardings import explicit_sharding, rows_like

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int32, PyTree

# On accelerators float32 products have half the precision by default.
_PRECISION = jax.lax.Precision.HIGHEST


class Subspace(NamedTuple):
    r"""Orthonormal rows :math:`P` over all params, or the rows of one replica.

    `optperm.dldr` sets the subspace in the state of its subspace optimizer, in any nesting. An optimizer
    with a subspace reads it, and returns it unchanged.

    Attributes:
      rows: The rows of this replica, in float32, or float64 for float64 params; zero until they are set,
        and where components are missing.
      first_row: The number of this replica's first row among all rows, as a sum of one part for each
        axis over which rows are distributed, by its name; empty without such an axis.
      determined: Whether each of all rows exists.
    """

    rows: PyTree[Float[Array, "rows ?*shape"], "Params"]
    first_row: PyTree[Int32[Array, ""]]
    determined: Bool[Array, "k"]

    @property
    def is_centered(self) -> bool:
        """Whether the rows are components of differences from the mean of the snapshots."""
        return True

    @property
    def is_set(self) -> jax.Array:
        """Whether there is a basis."""
        return jnp.any(self.determined, axis=-1)

    @property
    def axis_name(self) -> tuple[str, ...] | None:
        """The axes over which the rows and the batch are distributed."""
        return tuple(sorted(self.first_row)) or None

    @property
    def own_first_row(self) -> jax.Array:
        """The number of this replica's first row among all rows."""
        return sum(self.first_row.values(), start=jnp.zeros([], jnp.int32))


class Span(Subspace):
    """A subspace of components of the snapshots themselves, which contains their mean."""

    __slots__ = ()

    @property
    def is_centered(self) -> bool:
        """False: the rows are components of the snapshots themselves."""
        return False


def empty_subspace(
    params: optax.Params,
    n_components: int,
    axis_name: AxisName | None,
    kind: type[Subspace] = Subspace,
) -> Subspace:
    """Make ceil(k / R) rows of zeros on each of R replicas, each row sharded like the params.

    Raises:
      ValueError: If the axis is not bound where this is called.
    """
    num_rows, names = n_components, sorted(axis_names(axis_name), reverse=True)
    first_row = {name: jnp.zeros([], jnp.int32) for name in names}
    if names and jax.tree.leaves(params):
        checks.check_axis_is_bound(axis_name)
        # Rows are numbered in the order of `all_gather` over the sorted axes: the last varies fastest.
        num_rows = -(-n_components // jax.lax.axis_size(axis_name))
        stride = num_rows
        for name in names:
            first_row[name] = jnp.asarray(jax.lax.axis_index(name) * stride, jnp.int32)
            stride *= jax.lax.axis_size(name)
    rows = jax.tree.map(lambda leaf: rows_like(leaf, num_rows, accumulation_dtype(leaf)), params)
    rows = mark_varying(rows, varying_axes(first_row))
    return kind(rows, first_row, jnp.zeros(n_components, jnp.bool_))


def coordinates(subspace: Subspace, tree: optax.Updates, dtype: Any) -> jax.Array:
    """Return P g, (k,), gathered from all replicas."""
    n_components = subspace.determined.size
    products = jax.tree.map(inner_products, subspace.rows, tree)
    parts = [part.astype(dtype) for part in jax.tree.leaves(products)]
    if not parts:
        return jnp.zeros(n_components, dtype)
    # Each replica's rows times g, summed over leaves; the gather puts them in order.
    own = computed_once(functools.reduce(jnp.add, parts))
    if subspace.axis_name is None:
        return own
    return all_gather(own, subspace.axis_name, tiled=True)[:n_components]


def inner_products(rows: jax.Array, others: jax.Array) -> jax.Array:
    """Return the products of each row with another leaf, (k,), or with rows of another, (k, number).

    If the rows are sharded, each device sums over its own part, and only these sums are communicated.
    """
    of_row = tuple(range(1, rows.ndim))
    of_other = tuple(range(others.ndim - len(of_row), others.ndim))
    sharding = explicit_sharding(rows)
    return jax.lax.dot_general(
        rows,
        others.astype(rows.dtype),
        ((of_row, of_other), ((), ())),
        precision=_PRECISION,
        out_sharding=sharding and NamedSharding(sharding.mesh, PartitionSpec()),
    )


def lift(subspace: Subspace, coefficients: jax.Array) -> tuple[optax.Updates, ...]:
    """Return P' c for each row c of the coefficients, (number, k), by one pass over P and one psum."""

    def combine(rows: jax.Array) -> jax.Array:
        own = coefficients
        # P' c is the sum over replicas of their own rows times their own coefficients.
        if subspace.axis_name is not None:
            own = own_rows(coefficients.T, subspace.own_first_row, rows.shape[0]).T
        return jax.lax.dot_general(
            own.astype(rows.dtype), rows, (((1,), (0,)), ((), ())), precision=_PRECISION
        )

    combined = sum_over(jax.tree.map(combine, subspace.rows), subspace.axis_name)
    return tuple(
        jax.tree.map(lambda leaf, i=i: leaf[i], combined) for i in range(coefficients.shape[0])
    )


def own_rows(rows: jax.Array, first_row: jax.Array | int, num_rows: int) -> jax.Array:
    """Return the rows from the given one on, with zeros past the last row."""
    # Padded, since a slice past the end would start earlier instead.
    padded = jnp.pad(rows, [(0, num_rows), *[(0, 0)] * (rows.ndim - 1)])
    return jax.lax.dynamic_slice_in_dim(padded, first_row, num_rows)


def sum_over(tree: Any, axis_name: AxisName | None) -> Any:
    """Return the sum over replicas, by one collective for each dtype.

    With other mesh axes, over which one replica's params may be sharded, there is one collective for
    each leaf: concatenating sharded leaves would gather them.
    """
    if axis_name is None:
        return tree
    mesh = jax.sharding.get_abstract_mesh()
    if set(mesh.axis_names) - set(mesh.manual_axes):
        return jax.lax.psum(tree, axis_name)
    # One vector for each dtype, so that small leaves need no collectives of their own.
    leaves, structure = jax.tree.flatten(tree)
    results: list[Any] = [None] * len(leaves)
    for dtype in dict.fromkeys(leaf.dtype for leaf in leaves):
        places = [place for place, leaf in enumerate(leaves) if leaf.dtype == dtype]
        flat, unravel = ravel_pytree([leaves[place] for place in places])
        for place, total in zip(places, unravel(jax.lax.psum(flat, axis_name)), strict=True):
            results[place] = total
    return jax.tree.unflatten(structure, results)


def mean_over(tree: Any, axis_name: AxisName | None) -> Any:
    """Return the mean over replicas, by the same number of collectives as `sum_over`."""
    if axis_name is None:
        return tree
    size = jax.lax.axis_size(axis_name)
    return jax.tree.map(lambda leaf: leaf / size, sum_over(tree, axis_name))
