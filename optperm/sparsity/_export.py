"""Export sparse networks as sparse matrices or as smaller dense matrices."""

import difflib
import importlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np

from optperm.core import checks
from optperm.core.optional import import_optional
from optperm.core.trees import is_masked, leaf_paths, without_variables
from optperm.sparsity._choice import Include, include_leaves

SparseFormat = Literal["bcsr", "bcoo", "scipy"]
Side = Literal["in", "out"]
# For each group of units, the path and the axis of each leaf with an axis of these units, and whether
# the leaf contains incoming or outgoing weights of the units.
Groups = Mapping[str, Sequence[tuple[str, int] | tuple[str, int, Side]]]


class _Member(NamedTuple):
    path: str
    axis: int
    is_incoming: bool


def to_sparse(params: Any, format: SparseFormat = "bcsr", *, include: Include | None = None) -> Any:
    """Replace each matrix W of shape (in, out) with its transpose as a sparse matrix.

    If w is the sparse matrix, `x @ W` is `(w @ x.T).T`. Zeros are not stored.

    Args:
      params: A tree of arrays, outside `jax.jit`.
      format: `"bcsr"` or `"bcoo"` of `jax.experimental.sparse`, or `"scipy"` for
        `scipy.sparse.csr_array`.
      include: The leaves to convert if they are matrices: a tree of booleans like params, a prefix of
        such a tree, or a function from params to such a tree. None for all matrices.

    Returns:
      A tree like params, with sparse matrices of the same dtype. Other leaves are unchanged.

    Example:
      >>> import jax.numpy as jnp, numpy as np, optperm
      >>> w = jnp.array([[0.0, 2.0, 0.0], [1.0, 0.0, 0.0]])
      >>> sparse = optperm.sparsity.to_sparse({"kernel": w, "bias": jnp.ones(3)})
      >>> sparse["kernel"].shape, sparse["kernel"].nse
      ((3, 2), 2)
      >>> x = jnp.array([[3.0, 4.0]])
      >>> (sparse["kernel"] @ x.T).T.tolist()
      [[4.0, 6.0, 0.0]]

    Notes:
      A weight of shape (out, in), as in Equinox and PyTorch, becomes a sparse matrix of shape (in, out).
      Then `weight @ x` fails, or is wrong if the weight is square. Pass `weight.T` instead.

      Below 90% zeros, sparse products are not faster on a CPU. On an MLP with 300 and 100 hidden units
      and batches of 32 and 256, BCSR needs 0.5 to 0.75 of the time of dense products at 90% zeros, and a
      quarter to a third at 98% zeros. SciPy's format is useful for single examples with at least 98%
      zeros. At 90% zeros, a dense network of the same size in bytes (from
      `optperm.sparsity.remove_units`) is faster than all sparse formats
      (`python benchmarks/sparsity.py --only export`).

    Raises:
      TypeError: If a leaf is traced, is not a dense array, or has a dtype that SciPy cannot multiply.
      ValueError: If `format` is unknown, `include` does not fit, or there is no matrix to replace.
    """
    checks.check_choice("format", format, get_args(SparseFormat))
    params = without_variables(params)
    leaves, structure = jax.tree_util.tree_flatten_with_path(params, is_leaf=_is_sparse)
    for path, leaf in leaves:
        name = f"params{jax.tree_util.keystr(path)}"
        if _is_sparse(leaf) or isinstance(leaf, jax.core.Tracer):
            raise TypeError(f"{name} must be a dense array outside jax.jit, got {leaf!r}.")
        checks.dtype_of(name, leaf)
    taken = jax.tree.leaves(include_leaves(include, params), is_leaf=is_masked)
    are_matrices = [
        np.ndim(leaf) == 2 and not is_masked(each)
        for (_, leaf), each in zip(leaves, taken, strict=True)
    ]
    if leaves and not any(are_matrices):
        paths = [path for path, _ in leaf_paths(params)]
        raise ValueError(f"to_sparse found no matrix among the included leaves of {paths}.")
    convert = {"bcsr": _bcsr, "bcoo": _bcoo, "scipy": _scipy}[format]
    new = [
        convert(np.asarray(leaf).T) if is_matrix else leaf
        for (_, leaf), is_matrix in zip(leaves, are_matrices, strict=True)
    ]
    return jax.tree.unflatten(structure, new)


def remove_units(params: Any, groups: Groups, *, zero_at_zero: bool = False) -> Any:
    """Return smaller dense params without the units that do not affect the outputs.

    This function removes a unit if all its outgoing weights are zero. With `zero_at_zero`, it also
    removes a unit if all its incoming weights and its bias are zero. This repeats until no further unit
    can be removed. Outputs agree up to rounding. A unit with only a bias has a constant output, and
    stays.

    Args:
      params: A tree of arrays, outside `jax.jit`.
      groups: For each group of units, the leaves with an axis of these units, as pairs (path, axis):
        `{"hidden": [("dense0/kernel", -1), ("dense0/bias", -1), ("dense1/kernel", -2)]}`. In a pair, the
        last axis means incoming weights, and any other axis means outgoing weights. This rule is wrong
        for weights of shape (out, in), as in Equinox and PyTorch, for kernels of shape (in, heads,
        dim), and for an outgoing vector. Add `"in"` or `"out"` as a third item for these, as in
        `[("layers/0/weight", 0, "in"), ("layers/0/bias", 0), ("layers/1/weight", 1, "out")]`. Name all
        leaves with the axis, including the statistics of a `BatchNorm`.
      zero_at_zero: Whether the activation maps 0 to 0, as relu and tanh do.

    Returns:
      A tree like params, in which the named axes are shorter. Other leaves are unchanged.

    Example:
      >>> import jax.numpy as jnp, optperm
      >>> params = {"dense0": {"kernel": jnp.ones((3, 2)), "bias": jnp.ones(2)}}
      >>> params["dense1"] = {"kernel": jnp.array([[0.0], [5.0]])}
      >>> groups = {
      ...     "hidden": [("dense0/kernel", -1), ("dense0/bias", -1), ("dense1/kernel", -2)]
      ... }
      >>> small = optperm.sparsity.remove_units(params, groups)
      >>> small["dense0"]["kernel"].shape, small["dense1"]["kernel"].tolist()
      ((3, 1), [[5.0]])

    Notes:
      Each axis must have one entry per unit. If the outputs of a convolution are flattened into a dense
      layer, each channel has H * W entries in the kernel of this layer, so you cannot remove channels
      there.

      Units must be independent of each other. Do not remove units that a `LayerNorm`, an `RMSNorm` or a
      softmax combines, because the outputs of the other units would change. Do not remove units of a
      tied embedding either, because its single leaf contains both incoming and outgoing weights.

    Raises:
      KeyError: If a path is unknown.
      IndexError: If an axis does not exist.
      ValueError: If the axes of a group have different lengths, a group lacks incoming or outgoing
        weights, an axis is named twice, or a third item is neither `"in"` nor `"out"`.
    """
    params = without_variables(params)
    structure, leaves = jax.tree.structure(params), dict(leaf_paths(params))
    resolved = {
        name: [_resolve(f"groups[{name!r}]", leaves, *member) for member in members]
        for name, members in groups.items()
    }
    named = {member.path for members in resolved.values() for member in members}
    leaves |= {path: np.asarray(leaves[path]) for path in named}
    taken: set[tuple[str, int]] = set()
    for name, members in resolved.items():
        lengths = {(path, axis): leaves[path].shape[axis] for path, axis, _ in members}
        # Otherwise, the axis would be shortened twice.
        if len(lengths) < len(members) or not taken.isdisjoint(lengths):
            raise ValueError(
                f"groups[{name!r}] names an axis twice, or an axis of an earlier group: {groups[name]}."
            )
        taken |= lengths.keys()
        if len(set(lengths.values())) > 1:
            raise ValueError(f"groups[{name!r}] has axes of different lengths: {lengths}.")
        if len({member.is_incoming for member in members}) < 2:
            raise ValueError(
                f"groups[{name!r}] must name incoming weights (the last axis, or 'in' as a third item) "
                f"and outgoing weights (another axis, or 'out'): {groups[name]}."
            )
    # A removed unit may have been the only use of an earlier unit.
    is_done = False
    while not is_done:
        is_done = True
        for members in resolved.values():
            contributes = _find_contributing(leaves, members, zero_at_zero=zero_at_zero)
            if not contributes.all():
                is_done = False
                for path, axis, _ in members:
                    leaves[path] = np.compress(contributes, leaves[path], axis=axis)
    leaves |= {path: jnp.asarray(leaves[path]) for path in named}
    return jax.tree.unflatten(structure, leaves.values())


def _resolve(
    name: str, leaves: Mapping[str, Any], path: str, axis: int, side: Side | None = None
) -> _Member:
    if path not in leaves:
        close = difflib.get_close_matches(path, leaves, cutoff=0.0)
        raise KeyError(f"{name}: no leaf has the path {path!r}; the closest are {close}.")
    shape = np.shape(leaves[path])
    if not -len(shape) <= axis < len(shape):
        raise IndexError(f"{name}: axis {axis} is out of range for {path!r} of shape {shape}.")
    if side is not None:
        checks.check_choice(f"{name}: the third item of {path!r}", side, get_args(Side))
    axis %= len(shape)
    return _Member(path, axis, axis == len(shape) - 1 if side is None else side == "in")


def _find_contributing(
    leaves: Mapping[str, np.ndarray], members: Sequence[_Member], *, zero_at_zero: bool
) -> np.ndarray:
    """Return whether each unit of a group contributes to the outputs."""

    def find_used(chosen: Iterator[_Member]) -> np.ndarray:
        slices = [np.moveaxis(leaves[path], axis, 0) for path, axis, _ in chosen]
        nonzero = [np.any(s != 0, axis=tuple(range(1, s.ndim))) for s in slices]
        return np.any(np.stack(nonzero), axis=0)

    # Without outgoing weights, a unit has no effect; without incoming weights, its output is f(0) = 0.
    outgoing = find_used(member for member in members if not member.is_incoming)
    incoming = find_used(member for member in members if member.is_incoming)
    return outgoing & incoming if zero_at_zero else outgoing


def _is_sparse(node: Any) -> bool:
    return hasattr(node, "todense")


def _csr(matrix: np.ndarray) -> tuple[np.ndarray, ...]:
    """Return the nonzero values of a matrix, their rows and columns, and the starts of the rows."""
    # Values are in C order: row i has the entries from starts[i] to starts[i + 1].
    rows, columns = np.nonzero(matrix)
    starts = np.searchsorted(rows, np.arange(matrix.shape[0] + 1))
    return matrix[rows, columns], *(each.astype(np.int32) for each in (rows, columns, starts))


def _import_sparse() -> Any:
    # This import takes a fifth of the time of `import optperm`.
    return importlib.import_module("jax.experimental.sparse")


def _bcsr(matrix: np.ndarray) -> Any:
    values, _, columns, starts = map(jnp.asarray, _csr(matrix))
    return _import_sparse().BCSR(
        (values, columns, starts), shape=matrix.shape, indices_sorted=True, unique_indices=True
    )


def _bcoo(matrix: np.ndarray) -> Any:
    values, rows, columns, _ = _csr(matrix)
    return _import_sparse().BCOO(
        (jnp.asarray(values), jnp.asarray(np.stack([rows, columns], axis=1))),
        shape=matrix.shape,
        indices_sorted=True,
        unique_indices=True,
    )


def _scipy(matrix: np.ndarray) -> Any:
    scipy_sparse = import_optional("scipy.sparse", needed_by="format='scipy'", install="scipy")
    # SciPy can make matrices of narrower dtypes, but cannot multiply them.
    if matrix.dtype not in (np.float32, np.float64):
        raise TypeError(f"format 'scipy' supports float32 and float64, got {matrix.dtype}.")
    values, _, columns, starts = _csr(matrix)
    return scipy_sparse.csr_array((values, columns, starts), shape=matrix.shape)
