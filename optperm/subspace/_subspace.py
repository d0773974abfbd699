"""A subspace of all params with orthonormal rows P, the products P g and P' c, and steps in P.

All methods in a subspace average over replicas and skip steps with nonfinite gradients in the same way,
and `set_basis` sets the rows for all of these methods.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree
from jax.sharding import NamedSharding, PartitionSpec

from optperm.core import checks
from optperm.core.dtypes import accumulation_dtype, cast_like, computed_once
from optperm.core.fingerprints import describe_difference
from optperm.core.mapped_axes import (
    AxisName,
    all_gather,
    axis_names,
    mark_varying,
    mean_of_function,
    shared,
    varying_axes,
)
from optperm.core.shapes import Array, Bool, Float, Int32, Params, PyTree, Updates
from optperm.core.shardings import explicit_sharding, rows_like, shard_like
from optperm.core.states import find_state, find_states, replace_state
from optperm.core.trees import mask_like, one_row, without_variables
from optperm.subspace._quasi_newton import QuasiNewtonState, make_quasi_newton

# By default, float32 products have half the precision on accelerators.
_PRECISION = jax.lax.Precision.HIGHEST
_METHODS = "dim_reduce, project or twa"
# The extra arguments that a line search needs.
SEARCH_EXTRAS = {
    "value": "the loss on this batch",
    "value_fn": "the loss on this batch at given params",
}


class Subspace(NamedTuple):
    r"""Orthonormal rows :math:`P` over all params, or the rows of one replica.

    `optperm.dldr` sets the subspace in the state of its subspace optimizer, in any nesting. An optimizer
    with a subspace reads the subspace, and returns it unchanged.

    Attributes:
      rows: The rows of this replica, in float32, or float64 for float64 params. Rows are zero until they
        are set, and if their components are missing.
      first_row: The number of this replica's first row among all rows, as a sum of parts: a dictionary
        with one part per axis over which rows are distributed.
      determined: Whether each row exists, for the rows of all replicas.
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
    """A subspace of components of the snapshots themselves, which includes their mean."""

    __slots__ = ()

    @property
    def is_centered(self) -> bool:
        """False: the rows are components of the snapshots themselves."""
        return False


def empty_subspace(
    params: Params,
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
        # Rows are in the order of `all_gather` over the sorted axes: the last axis varies fastest.
        num_rows = -(-n_components // jax.lax.axis_size(axis_name))
        stride = num_rows
        for name in names:
            first_row[name] = jnp.asarray(jax.lax.axis_index(name) * stride, jnp.int32)
            stride *= jax.lax.axis_size(name)
    rows = jax.tree.map(lambda leaf: rows_like(leaf, num_rows, accumulation_dtype(leaf)), params)
    rows = mark_varying(rows, varying_axes(first_row))
    return kind(rows, first_row, jnp.zeros(n_components, jnp.bool_))


def check_same_subspace(
    method: str, subspace: Subspace, n_components: int, axis_name: AxisName | None
) -> None:
    """Raise if a subspace was made for another number of rows, or for other axes of replicas."""
    if subspace.determined.shape[-1] != n_components:
        raise ValueError(describe_difference(method, "n_components"))
    if subspace.axis_name != (tuple(sorted(axis_names(axis_name))) or None):
        raise ValueError(describe_difference(method, "axis_name"))


def coordinates(subspace: Subspace, tree: Updates, dtype: Any) -> jax.Array:
    """Return P g, (k,), gathered from all replicas."""
    n_components = subspace.determined.size
    products = jax.tree.map(inner_products, subspace.rows, tree)
    parts = [part.astype(dtype) for part in jax.tree.leaves(products)]
    if not parts:
        return jnp.zeros(n_components, dtype)
    # Sum each replica's rows times g over leaves; the gather then orders the results.
    own = computed_once(functools.reduce(jnp.add, parts))
    if subspace.axis_name is None:
        return own
    return all_gather(own, subspace.axis_name, tiled=True)[:n_components]


def inner_products(rows: jax.Array, others: jax.Array) -> jax.Array:
    """Return the products of each row with another leaf, (k,), or with the leaf's rows, (k, number).

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


def lift(subspace: Subspace, coefficients: jax.Array) -> tuple[Updates, ...]:
    """Return P' c for each row c of the coefficients, (number, k), in one pass over P and one psum."""

    def combine(rows: jax.Array) -> jax.Array:
        own = coefficients
        # P' c is the sum over replicas of their rows times their coefficients.
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
    """Return `num_rows` rows that start at `first_row`, with zeros after the last row."""
    # Pad the rows, since a slice past the end would start earlier instead.
    padded = jnp.pad(rows, [(0, num_rows), *[(0, 0)] * (rows.ndim - 1)])
    return jax.lax.dynamic_slice_in_dim(padded, first_row, num_rows)


def sum_over(tree: Any, axis_name: AxisName | None) -> Any:
    """Return the sum over replicas, with one collective per dtype.

    If there are other mesh axes, over which a replica's params may be sharded, there is one collective
    per leaf, because concatenating sharded leaves would gather them.
    """
    if axis_name is None:
        return tree
    mesh = jax.sharding.get_abstract_mesh()
    if set(mesh.axis_names) - set(mesh.manual_axes):
        return jax.lax.psum(tree, axis_name)
    # Join leaves into one vector per dtype, so that small leaves need no separate collectives.
    leaves, structure = jax.tree.flatten(tree)
    results: list[Any] = [None] * len(leaves)
    for dtype in dict.fromkeys(leaf.dtype for leaf in leaves):
        places = [place for place, leaf in enumerate(leaves) if leaf.dtype == dtype]
        flat, unravel = ravel_pytree([leaves[place] for place in places])
        for place, total in zip(places, unravel(jax.lax.psum(flat, axis_name)), strict=True):
            results[place] = total
    return jax.tree.unflatten(structure, results)


def mean_over(tree: Any, axis_name: AxisName | None) -> Any:
    """Return the mean over replicas, with as many collectives as `sum_over`."""
    if axis_name is None:
        return tree
    size = jax.lax.axis_size(axis_name)
    return jax.tree.map(lambda leaf: leaf / size, sum_over(tree, axis_name))


def mean_over_replicas(
    updates: Updates,
    params: Params,
    extras: dict[str, Any],
    axis_name: AxisName | None,
) -> tuple[Updates, dict[str, Any]]:
    """Return the gradient in a wide dtype, the loss, and the loss function, averaged over replicas."""
    dtype = accumulation_dtype(params)
    grads = jax.tree.map(lambda g, p: jnp.asarray(g, accumulation_dtype(p)), updates, params)
    value: Any = extras.get("value")
    value_fn: Callable[..., jax.Array] | None = extras.get("value_fn")
    value = None if value is None else jnp.asarray(value, dtype)
    if axis_name is None:
        return grads, {**extras, "value": value}

    # This needs one collective per dtype
    grads, mean = mean_over((grads, value), axis_name)
    if value_fn is not None:

        @functools.wraps(value_fn)
        def evaluate_wide(at: Params, **options: Any) -> jax.Array:
            return jnp.asarray(value_fn(at, **options), dtype)

        mean_value = mean_of_function(evaluate_wide, (value, updates), axis_name, shared)
        extras = {**extras, "value_fn": mean_value}
    return grads, {**extras, "value": mean}


def step_where(
    is_finite: jax.Array,
    optimizer: optax.GradientTransformationExtraArgs,
    direction: Updates,
    opt_state: Any,
    params: Params,
    extras: dict[str, Any],
) -> tuple[Updates, Any]:
    """Return updates and state after a step of an optimizer; skip it if the gradient is not finite."""
    moves, new = optimizer.update(cast_like(direction, params), opt_state, params, **extras)
    moves = cast_like(moves, params)
    moves = optax.tree.where(is_finite, moves, optax.tree.zeros_like(moves))
    return moves, optax.tree.where(is_finite, cast_like(new, opt_state), opt_state)


def set_basis(opt_state: Any, basis: Params) -> Any:
    r"""Set the basis of `dim_reduce`, `project` or `twa` in an optimizer state.

    For `dim_reduce`, this function also resets the curvature of an earlier basis, but keeps the
    residual.

    Args:
      opt_state: The state of an optimizer with one of these methods anywhere in it. This function does
        not change `opt_state`.
      basis: A tree like params in which each leaf has an extra leading axis of length `n_components`,
        such as the result of `optperm.subspace.pca_basis`, in any real floating dtypes. The rows must be
        orthonormal over all leaves together. Zero rows represent missing components.

    Returns:
      The optimizer state, with the same structure, shapes and dtypes.

    Example:
      >>> import jax.numpy as jnp, optax, optperm
      >>> params = {"w": jnp.zeros(3), "b": jnp.zeros(())}
      >>> tx = optax.chain(optax.clip(1.0), optperm.dim_reduce(n_components=1))
      >>> basis = {"w": jnp.array([[0.6, 0.0, 0.0]]), "b": jnp.array([0.8])}
      >>> opt_state = optperm.subspace.set_basis(tx.init(params), basis)
      >>> bool(opt_state[1].subspace.is_set)
      True

    Notes:
      For a state of many replicas, map this function over the replicas with the same basis for all:
      `jax.pmap(optperm.subspace.set_basis, in_axes=(0, None))`, or the same with `jax.vmap`. With
      `jax.shard_map`, call this function in the mapped function. Each replica takes its own rows.

    Raises:
      TypeError: If a leaf does not have a real floating dtype.
      ValueError: If there is not exactly one subspace, `dim_reduce` is inside `optax.MultiSteps`, the
        basis does not match the params in the state, or (unless traced) its rows are not finite, not
        orthonormal to within 1e-3 or the rounding of their dtype, or all zero.
    """
    subspace = find_state(opt_state, Subspace, method=_METHODS)
    for accumulating in find_states(opt_state, optax.MultiStepsState):
        if find_states(accumulating, QuasiNewtonState):
            message = "dim_reduce inside optax.MultiSteps would use the loss of one batch only"
            raise ValueError(
                f"{message}: instead of MultiSteps, use optperm.evaluate with the mean loss over all "
                "batches."
            )
    wanted = one_row(subspace.rows)
    basis = mask_like(without_variables(basis), wanted)
    checks.check_real_floating("basis", basis, advice="Leave the others out of the optimizer.")
    k = subspace.determined.shape[-1]
    wanted = jax.tree.map(lambda row: jax.ShapeDtypeStruct((k, *row.shape), jnp.float32), wanted)
    checks.check_same_tree("basis", basis, wanted, source="the optimizer state", dtypes=False)
    products = _multiply_rows(basis, k)
    if jax.tree.leaves(basis) and not isinstance(products, jax.core.Tracer):
        _check_orthonormal(np.asarray(products), basis)
    rows = jax.tree.map(
        lambda leaf, own: own_rows(shard_like(leaf, own), subspace.own_first_row, own.shape[0]),
        basis,
        subspace.rows,
    )
    new = subspace._replace(rows=rows, determined=jnp.diagonal(products) > 0)
    opt_state = replace_state(opt_state, Subspace, cast_like(new, subspace), method=_METHODS)
    for state in find_states(opt_state, QuasiNewtonState):
        fresh = cast_like(make_quasi_newton(k, state.last_gradient.dtype), state)
        opt_state = replace_state(opt_state, QuasiNewtonState, fresh, method="dim_reduce")
    return opt_state


def _multiply_rows(basis: Params, k: int) -> jax.Array:
    """Return the inner products of all pairs of rows, (k, k)."""
    dtype = accumulation_dtype(basis)
    wide = [jnp.asarray(leaf, dtype) for leaf in jax.tree.leaves(basis)]
    return sum((inner_products(leaf, leaf) for leaf in wide), start=jnp.zeros((k, k), dtype))


def _check_orthonormal(products: np.ndarray, basis: Params) -> None:
    """Raise a ValueError unless all nonzero rows are finite and orthonormal."""
    if not products.any():
        raise ValueError("basis has only zero rows: compute it from params that have moved.")
    gaps = np.abs(products - np.where(np.diag(products.diagonal() > 0), 1, 0))
    i, j = np.unravel_index(np.argmax(gaps), gaps.shape)
    # Rounding to a dtype changes inner products of unit vectors by at most the epsilon of the dtype.
    dtypes = [jnp.result_type(leaf) for leaf in jax.tree.leaves(basis)]
    if not gaps[i, j] <= max(1e-3, *(2 * float(jnp.finfo(dtype).eps) for dtype in dtypes)):
        entry = f"entry [{i}, {j}] of their inner products is {products[i, j]:.6g}"
        raise ValueError(f"basis must have orthonormal rows, but {entry}.")
