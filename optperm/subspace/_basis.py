"""Set the basis of an optimizer that trains in a subspace."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optperm.core import checks
from optperm.core.dtypes import accumulation_dtype, cast_like
from optperm.core.shardings import shard_like
from optperm.core.states import find_state, find_states, replace_state, without_variables
from optperm.core.trees import mask_like, one_row
from optperm.subspace._dim_reduce import DimReduceState
from optperm.subspace._quasi_newton import make_quasi_newton
from optperm.subspace._subspace import Subspace, inner_products, own_rows

_METHODS = "dim_reduce, project or twa"


def set_basis(opt_state: Any, basis: optax.Params) -> Any:
    r"""Return the optimizer state with a basis for `dim_reduce`, `project` or `twa`.

    `dim_reduce` forgets the curvature in an earlier basis, and keeps its residual.

    Args:
      opt_state: The state of an optimizer with one of these anywhere in it. It is not changed.
      basis: A tree like params whose leaves have a leading axis of all `n_components` rows, orthonormal
        over all leaves together, of any real floating dtypes, such as the result of
        `optperm.subspace.pca_basis`. Rows of zeros stand for missing components.

    Returns:
      The optimizer state, of the same structure, shapes and dtypes.

    Example:
      >>> import jax.numpy as jnp, optax, optperm
      >>> params = {"w": jnp.zeros(3), "b": jnp.zeros(())}
      >>> tx = optax.chain(optax.clip(1.0), optperm.dim_reduce(n_components=1))
      >>> basis = {"w": jnp.array([[0.6, 0.0, 0.0]]), "b": jnp.array([0.8])}
      >>> opt_state = optperm.subspace.set_basis(tx.init(params), basis)
      >>> bool(opt_state[1].subspace.is_set)
      True

    Notes:
      For a state of many replicas map this function over them, with the same basis for all:
      `jax.pmap(optperm.subspace.set_basis, in_axes=(0, None))`, the same with `jax.vmap`, or call
      it within the function given to `jax.shard_map`. Each replica takes its own rows.

    Raises:
      TypeError: If a leaf is not of a real floating dtype.
      ValueError: If there is not exactly one such state, `dim_reduce` is inside `optax.MultiSteps`, the
        basis does not match the params in the state, or (where Python can see it) its rows are not
        finite, not orthonormal to within 1e-3 or the rounding of their dtype, or all zero.
    """
    subspace = find_state(opt_state, Subspace, method=_METHODS)
    for accumulating in find_states(opt_state, optax.MultiStepsState):
        if find_states(accumulating, DimReduceState):
            message = (
                "dim_reduce inside optax.MultiSteps would search by the loss of one batch alone"
            )
            raise ValueError(
                f"{message}: use optperm.evaluate with the mean loss over all batches."
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
    for state in find_states(opt_state, DimReduceState):
        fresh = make_quasi_newton(k, state.step_length.dtype)
        without = state._replace(quasi_newton=cast_like(fresh, state.quasi_newton))
        opt_state = replace_state(opt_state, DimReduceState, without, method="dim_reduce")
    return opt_state


def _multiply_rows(basis: optax.Params, k: int) -> jax.Array:
    """Return the inner products of all pairs of rows, (k, k)."""
    dtype = accumulation_dtype(basis)
    wide = [jnp.asarray(leaf, dtype) for leaf in jax.tree.leaves(basis)]
    return sum((inner_products(leaf, leaf) for leaf in wide), start=jnp.zeros((k, k), dtype))


def _check_orthonormal(products: np.ndarray, basis: optax.Params) -> None:
    """Raise a ValueError unless the rows that are not zero are finite and orthonormal."""
    if not products.any():
        raise ValueError("basis has rows of zeros alone: take it from params that have moved.")
    gaps = np.abs(products - np.where(np.diag(products.diagonal() > 0), 1, 0))
    i, j = np.unravel_index(np.argmax(gaps), gaps.shape)
    # Rounding to a dtype changes an inner product of two unit vectors by at most its epsilon.
    dtypes = [jnp.result_type(leaf) for leaf in jax.tree.leaves(basis)]
    if not gaps[i, j] <= max(1e-3, *(2 * float(jnp.finfo(dtype).eps) for dtype in dtypes)):
        rows = f"rows {i} and {j} is {products[i, j]:.6g}"
        raise ValueError(f"basis must have orthonormal rows, but the product of {rows}.")
