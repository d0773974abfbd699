"""What sparsity buys when a trained network is used: sparse matrices, and smaller dense ones."""

import importlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np

from optperm.contract import checks
from optperm.contract.extras import import_optional
from optperm.contract.states import without_variables
from optperm.sparsity.shares import Include, included

SparseFormat = Literal["bcsr", "bcoo", "scipy"]
# For each leaf that an axis of units belongs to, its path and the axis.
Groups = Mapping[str, Sequence[tuple[str, int]]]


def to_sparse(params: Any, format: SparseFormat = "bcsr", *, include: Include | None = None) -> Any:
    """Return params with each matrix W of shape (in, out) as a sparse one of its transpose.

    With `w` from here `x @ W` is `(w @ x.T).T`. Entries that are zero are not stored.

    Args:
      params: A tree of arrays, outside of `jax.jit`.
      format: `"bcsr"` or `"bcoo"` of `jax.experimental.sparse`, or `"scipy"` for
        `scipy.sparse.csr_array`.
      include: Which leaves are converted, if they are matrices: a tree of booleans like params, or a
        prefix of one; or a function from the params to one. None for all.

    Returns:
      A tree like params, with sparse matrices of the same dtype; leaves of other ranks are as they were.

    Example:
      >>> import jax.numpy as jnp, numpy as np, optperm
      >>> w = jnp.array([[0.0, 2.0, 0.0], [1.0, 0.0, 0.0]])
      >>> sparse = optperm.to_sparse({"kernel": w, "bias": jnp.ones(3)})
      >>> sparse["kernel"].shape, sparse["kernel"].nse
      ((3, 2), 2)
      >>> x = jnp.array([[3.0, 4.0]])
      >>> (sparse["kernel"] @ x.T).T.tolist()
      [[4.0, 6.0, 0.0]]

    Notes:
      Below 90 % zeros sparse products do not pay on a CPU. On an MLP of 300 and 100 hidden units BCSR
      takes .5 to .75 of the time of dense products at 90 % for batches of 32 and 256, a quarter to
      a third at 98 %; scipy's format is the one for single examples, from 98 % on. A dense network of as
      many bytes (`optperm.remove_units`) is faster than any of them (`benchmarks/sparse.py --export`).

    Raises:
      TypeError: If a leaf is no dense array, or is traced, or of a dtype that scipy does not have.
      ValueError: If `format` is unknown, or `include` does not fit.
    """
    checks.check_choice("format", format, get_args(SparseFormat))
    params = without_variables(params)
    leaves, structure = jax.tree_util.tree_flatten_with_path(params, is_leaf=_is_sparse)
    for path, leaf in leaves:
        name = f"params{jax.tree_util.keystr(path)}"
        if _is_sparse(leaf) or isinstance(leaf, jax.core.Tracer):
            raise TypeError(f"{name} must be a dense array outside of jax.jit, got {leaf!r}.")
        checks.dtype_of(name, leaf)
    flags = included(include, params)
    convert = {"bcsr": _bcsr, "bcoo": _bcoo, "scipy": _scipy}[format]
    new = [
        convert(np.asarray(leaf).T) if flag and np.ndim(leaf) == 2 else leaf
        for (_, leaf), flag in zip(leaves, jax.tree.leaves(flags), strict=True)
    ]
    return jax.tree.unflatten(structure, new)


def remove_units(params: Any, groups: Groups, *, zero_at_zero: bool = False) -> Any:
    """Return smaller dense params without the units that contribute nothing; outputs stay.

    A unit goes if all weights that leave it are zero; with `zero_at_zero` also if all that enter it are,
    biases included. What is left of other groups is looked at again, until nothing goes. Outputs
    agree to rounding. A unit that has a bias alone is a constant, and stays.

    Args:
      params: A tree of arrays, outside of `jax.jit`.
      groups: For each group of units the leaves that have an axis of them, as pairs of a path and the
        axis: `{"hidden": [("dense0/kernel", -1), ("dense0/bias", -1), ("dense1/kernel", -2)]}`.
        Weights of the last axis enter the units, and of any other axis leave them. All leaves that have
        the axis must be named, statistics of a normalization too.
      zero_at_zero: Whether the activation maps 0 to 0, as relu and tanh do.

    Returns:
      A tree like params, whose named axes are shorter.

    Example:
      >>> import jax.numpy as jnp, optperm
      >>> params = {"dense0": {"kernel": jnp.ones((3, 2)), "bias": jnp.ones(2)}}
      >>> params["dense1"] = {"kernel": jnp.array([[0.0], [5.0]])}
      >>> groups = {
      ...     "hidden": [("dense0/kernel", -1), ("dense0/bias", -1), ("dense1/kernel", -2)]
      ... }
      >>> small = optperm.remove_units(params, groups)
      >>> small["dense0"]["kernel"].shape, small["dense1"]["kernel"].tolist()
      ((3, 1), [[5.0]])

    Raises:
      TypeError: If an argument is of the wrong type.
      ValueError: If a path is unknown, an axis does not exist, those of a group differ in length,
        or none of them enters or none leaves its units.
    """
    checks.check_flag("zero_at_zero", zero_at_zero)
    params = without_variables(params)
    paths, structure = jax.tree_util.tree_flatten_with_path(params)
    leaves = {
        jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(leaf)
        for path, leaf in paths
    }
    if not isinstance(groups, Mapping):
        raise TypeError(f"groups must be a dictionary of lists of (path, axis), got {groups!r}.")
    _check_groups(leaves, groups)
    is_done = False
    while not is_done:
        is_done = True
        for members in groups.values():
            stays = _stays(leaves, members, zero_at_zero=zero_at_zero)
            if not stays.all():
                is_done = False
                for path, axis in members:
                    leaves[path] = np.compress(stays, leaves[path], axis=axis)
    return jax.tree.unflatten(structure, [jnp.asarray(leaf) for leaf in leaves.values()])


def _stays(
    leaves: Mapping[str, np.ndarray], members: Sequence[tuple[str, int]], *, zero_at_zero: bool
) -> np.ndarray:
    """Return which units of a group contribute."""

    def is_used(chosen: Iterator[tuple[str, int]]) -> np.ndarray:
        slices = [np.moveaxis(leaves[path], axis, 0) for path, axis in chosen]
        nonzero = [np.any(s != 0, axis=tuple(range(1, s.ndim))) for s in slices]
        return np.any(np.stack(nonzero), axis=0)

    leaves_it = is_used((p, a) for p, a in members if not _enters(leaves[p], a))
    enters_it = is_used((p, a) for p, a in members if _enters(leaves[p], a))
    return leaves_it & enters_it if zero_at_zero else leaves_it


def _enters(leaf: np.ndarray, axis: int) -> bool:
    return axis % leaf.ndim == leaf.ndim - 1


def _check_groups(leaves: Mapping[str, np.ndarray], groups: Groups) -> None:
    for name, members in groups.items():
        for path, axis in members:
            if path not in leaves:
                raise ValueError(
                    f"groups[{name!r}] names {path!r}, which params does not have: {sorted(leaves)}."
                )
            if isinstance(axis, bool) or not isinstance(axis, int):
                raise TypeError(f"groups[{name!r}] must have integers as axes, got {axis!r}.")
            if not -leaves[path].ndim <= axis < leaves[path].ndim:
                raise ValueError(
                    f"groups[{name!r}]: {path} has shape {leaves[path].shape} and no axis {axis}."
                )
        lengths = {path: leaves[path].shape[axis] for path, axis in members}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"groups[{name!r}] has axes of several lengths: {lengths}.")
        if len({_enters(leaves[path], axis) for path, axis in members}) < 2:
            raise ValueError(
                f"groups[{name!r}] must name what enters its units (last axes) and what leaves them "
                f"(other axes), got {list(members)}."
            )


def _is_sparse(node: Any) -> bool:
    return hasattr(node, "todense")


def _csr(matrix: np.ndarray) -> tuple[np.ndarray, ...]:
    """Return the values of a matrix that are not zero, their rows and columns, and where rows begin."""
    rows, columns = np.nonzero(matrix)
    starts = np.searchsorted(rows, np.arange(matrix.shape[0] + 1))
    return matrix[rows, columns], *(each.astype(np.int32) for each in (rows, columns, starts))


def _jax_sparse() -> Any:
    # It takes a fifth of the time of an import of all of this library.
    return importlib.import_module("jax.experimental.sparse")


def _bcsr(matrix: np.ndarray) -> Any:
    values, _, columns, starts = map(jnp.asarray, _csr(matrix))
    return _jax_sparse().BCSR(
        (values, columns, starts), shape=matrix.shape, indices_sorted=True, unique_indices=True
    )


def _bcoo(matrix: np.ndarray) -> Any:
    values, rows, columns, _ = _csr(matrix)
    return _jax_sparse().BCOO(
        (jnp.asarray(values), jnp.asarray(np.stack([rows, columns], axis=1))),
        shape=matrix.shape,
        indices_sorted=True,
        unique_indices=True,
    )


def _scipy(matrix: np.ndarray) -> Any:
    scipy_sparse = import_optional("scipy.sparse", needed_by="format='scipy'", install="scipy")
    if matrix.dtype not in (np.float32, np.float64):
        raise TypeError(f"format 'scipy' holds float32 and float64, got {matrix.dtype}.")
    values, _, columns, starts = _csr(matrix)
    return scipy_sparse.csr_array((values, columns, starts), shape=matrix.shape)
