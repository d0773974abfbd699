"""Giving a basis to an optimizer that trains in a subspace."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optperm.contract import checks
from optperm.contract.dtypes import accumulation_dtype, all_finite, cast_like
from optperm.contract.shardings import shard_like
from optperm.contract.states import (
    find_state,
    find_states,
    mask_like,
    one_row,
    replace_state,
    without_variables,
)
from optperm.subspace.dim_reduce import DimReduceState
from optperm.subspace.quasi_newton import nothing_learned
from optperm.subspace.subspace import Subspace, inner_products, own_rows

_METHODS = "dim_reduce, project or twa"


def set_basis(opt_state: Any, basis: optax.Params) -> Any:
    r"""The optimizer state with a basis for `dim_reduce`, `project` or `twa`.

    What `dim_reduce` has learned of the curvature in an earlier basis is forgotten; the residual is
    kept.

    Args:
      opt_state: The state of an optimizer with one of these anywhere in it. It is left alone. A
        state of many replicas needs this function mapped over them, with the same basis for all:
        `jax.pmap(optperm.set_basis, in_axes=(0, None))`, or `jax.vmap` alike, or a call within the
        function given to `jax.shard_map`. Each takes its own rows.
      basis: A tree like params whose leaves have a leading axis of `n_components` rows, all of them,
        orthonormal over all leaves together, of any real floating dtypes; `optperm.pca_basis` makes one.
        Rows of zeros stand for components that there are not.

    Returns:
      The whole optimizer state, of the same structure, shapes and dtypes.

    Example:
      >>> import jax.numpy as jnp, optax, optperm
      >>> params = {"w": jnp.zeros(3), "b": jnp.zeros(())}
      >>> tx = optax.chain(optax.clip(1.0), optperm.dim_reduce(n_components=1))
      >>> basis = {"w": jnp.array([[0.6, 0.0, 0.0]]), "b": jnp.array([0.8])}
      >>> opt_state = optperm.set_basis(tx.init(params), basis)
      >>> bool(opt_state[1].subspace.is_set)
      True

    Raises:
      TypeError: If a leaf is not of a real floating dtype.
      ValueError: If there is no such state, or more than one, or `dim_reduce` is inside of
        `optax.MultiSteps`; or the basis does not match the params in the state, or (where Python can see
        it) its rows are not finite, not orthonormal to within 1e-3 or the rounding of their dtype, or
        all zero.
    """
    subspace = find_state(opt_state, Subspace, method=_METHODS)
    for accumulating in find_states(opt_state, optax.MultiStepsState):
        if find_states(accumulating, DimReduceState):
            raise ValueError(
                "dim_reduce inside optax.MultiSteps would search along the mean gradient of several "
                "batches with the loss of the last one: call optperm.evaluate once with a loss_fn that "
                "is the mean over all of them (see the docstring of optperm.dim_reduce)."
            )
    wanted = one_row(subspace.rows)
    basis = mask_like(without_variables(basis), wanted)
    checks.check_real_floating("basis", basis, advice="Leave the others out of the optimizer.")
    k = subspace.determined.shape[-1]
    wanted = jax.tree.map(lambda row: jax.ShapeDtypeStruct((k, *row.shape), jnp.float32), wanted)
    checks.check_same_tree("basis", basis, wanted, source="the optimizer state", dtypes=False)
    is_finite = all_finite(basis)
    if not isinstance(is_finite, jax.core.Tracer) and not is_finite:
        raise ValueError("basis has entries that are not finite: take it from finite snapshots.")
    products = _products(basis, k)
    _check_orthonormal(products, basis)
    rows = jax.tree.map(
        lambda leaf, held: own_rows(shard_like(leaf, held), subspace.own_first_row, held.shape[0]),
        basis,
        subspace.rows,
    )
    new = subspace._replace(rows=rows, determined=jnp.diagonal(products) > 0)
    opt_state = replace_state(opt_state, Subspace, cast_like(new, subspace), method=_METHODS)
    for state in find_states(opt_state, DimReduceState):
        fresh = nothing_learned(k, state.step_length.dtype)
        without = state._replace(quasi_newton=cast_like(fresh, state.quasi_newton))
        opt_state = replace_state(opt_state, DimReduceState, without, method="dim_reduce")
    return opt_state


def _products(basis: optax.Params, k: int) -> jax.Array:
    """The inner products of all pairs of rows."""
    dtype = accumulation_dtype(basis)
    wide = [jnp.asarray(leaf, dtype) for leaf in jax.tree.leaves(basis)]
    return sum((inner_products(leaf, leaf) for leaf in wide), start=jnp.zeros((k, k), dtype))


def _check_orthonormal(traced: jax.Array, basis: optax.Params) -> None:
    """Raises a ValueError unless all rows that are not zero are orthonormal, where Python can see it."""
    leaves = jax.tree.leaves(basis)
    if not leaves or isinstance(traced, jax.core.Tracer):
        return
    products = np.asarray(traced)
    if not products.any():
        raise ValueError(
            "basis has rows of zeros alone, so there is no subspace: snapshots that do not differ "
            "have no components. Take it from params that have moved."
        )
    wanted = np.diag(products.diagonal() > 0).astype(products.dtype)
    gaps = np.abs(products - wanted)
    i, j = np.unravel_index(gaps.argmax(), gaps.shape)
    # Rounding to a dtype changes an inner product of two unit vectors by at most its epsilon.
    tolerance = max(1e-3, *(2 * float(jnp.finfo(jnp.result_type(leaf)).eps) for leaf in leaves))
    if gaps[i, j] > tolerance:
        raise ValueError(
            f"basis must have orthonormal rows, but the inner product of rows {i} and {j} is "
            f"{products[i, j]:.6g}, {gaps[i, j]:.3g} from {wanted[i, j]:g}, where {tolerance:.2g} is "
            "allowed. optperm.pca_basis makes such rows of snapshots, jnp.linalg.qr of other vectors."
        )
