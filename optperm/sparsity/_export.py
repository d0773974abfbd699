"""Export sparse networks as sparse matrices or as smaller dense matrices."""

import difflib
import importlib
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np

from optperm._leaf_axes import LeafAxes
from optperm.core import checks
from optperm.core.optional import import_optional
from optperm.core.trees import is_masked, leaf_paths, without_variables
from optperm.sparsity._choice import Include, find_axes, include_leaves

SparseFormat = Literal["bcsr", "bcoo", "scipy"]
Side = Literal["in", "out"]
# For each group of units, the path and the axis of each leaf with an axis of these units, and perhaps
# whether the leaf contains incoming or outgoing weights of the units.
Groups = Mapping[str, Sequence[tuple[str, int] | tuple[str, int, Side]]]


class _Member(NamedTuple):
    """A leaf with an axis of the units of a group.

    Attributes:
      path: The path of the leaf.
      axis: The axis.
      is_incoming: Whether the leaf contains incoming weights of the units.
      copies: The axes that count layers.
    """

    path: str
    axis: int
    is_incoming: bool
    copies: tuple[int, ...]


def to_sparse(
    params: Any,
    format: SparseFormat = "bcsr",
    *,
    include: Include | None = None,
    axes: Any = None,
) -> Any:
    """Replace each kernel that is a matrix with a sparse matrix w of shape (out, in).

    If a layer computes `x @ W` with W of shape (in, out), or `W @ x` with W of shape (out, in), as in
    Equinox, its output is `(w @ x.T).T`. Zeros are not stored.

    Args:
      params: A tree of arrays, outside `jax.jit`.
      format: `"bcsr"` or `"bcoo"` of `jax.experimental.sparse`, or `"scipy"` for
        `scipy.sparse.csr_array`.
      include: The leaves to convert if they are matrices: a tree of booleans like params, a prefix of
        such a tree, or a function from params to such a tree. None for all kernels.
      axes: What each leaf is, as in `optperm.sparsity.prune`. A matrix has one input axis, one output
        axis and no copies.

    Returns:
      A tree like params, with sparse matrices of the same dtype. Other leaves are unchanged, also
      stacked layers: convert each layer by itself, such as `jax.tree.map(lambda p: p[0], layers)`.

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
      Below 90% zeros, sparse products are not faster on a CPU. On an MLP with 300 and 100 hidden units
      and batches of 32 and 256, BCSR needs 0.5 to 0.75 of the time of dense products at 90% zeros, and a
      quarter to a third at 98% zeros. SciPy's format is useful for single examples with at least 98%
      zeros. At 90% zeros, a dense network of the same size in bytes (from
      `optperm.sparsity.remove_units`) is faster than all sparse formats
      (`python benchmarks/sparsity.py --only export`).

    Raises:
      TypeError: If a leaf is traced, is not a dense array, or has a dtype that SciPy cannot multiply.
      ValueError: If `format` is unknown, `include` or `axes` does not fit, or there is no matrix to
        replace.
    """
    checks.check_choice("format", format, get_args(SparseFormat))
    plain = without_variables(params)
    leaves, structure = jax.tree_util.tree_flatten_with_path(plain, is_leaf=_is_sparse)
    for path, leaf in leaves:
        name = f"params{jax.tree_util.keystr(path)}"
        if _is_sparse(leaf) or isinstance(leaf, jax.core.Tracer):
            raise TypeError(f"{name} must be a dense array outside jax.jit, got {leaf!r}.")
        checks.dtype_of(name, leaf)
    known = include_leaves(include, axes, plain, params)[1]
    matrices = [
        own if isinstance(own, LeafAxes) and _is_matrix(own) else None
        for own in jax.tree.leaves(known, is_leaf=is_masked)
    ]
    if leaves and not any(matrices):
        paths = [path for path, _ in leaf_paths(plain)]
        raise ValueError(
            f"to_sparse found no matrix among the included leaves of {paths}. A matrix has one input "
            "axis, one output axis and no copies: convert the layers of a stack by themselves."
        )
    convert = {"bcsr": _bcsr, "bcoo": _bcoo, "scipy": _scipy}[format]
    new = [
        leaf if own is None else convert(np.asarray(leaf).transpose(own.out_axis + own.in_axis))
        for (_, leaf), own in zip(leaves, matrices, strict=True)
    ]
    return jax.tree.unflatten(structure, new)


def remove_units(
    params: Any, groups: Groups, *, zero_at_zero: bool = False, axes: Any = None
) -> Any:
    """Return smaller dense params without the units that do not affect the outputs.

    This function removes a unit if all its outgoing weights are zero. With `zero_at_zero`, it also
    removes a unit if all its incoming weights and its bias are zero. This repeats until no further unit
    can be removed. Outputs agree up to rounding. A unit with only a bias has a constant output, and
    stays. A unit of stacked layers is removed if it affects the outputs of no layer.

    Args:
      params: A tree of arrays, outside `jax.jit`.
      groups: For each group of units, the leaves with an axis of these units, as pairs (path, axis):
        `{"hidden": [("dense0/kernel", -1), ("dense0/bias", -1), ("dense1/kernel", -2)]}`. An output axis
        means incoming weights of the units, and an input axis means outgoing weights. Add `"in"` or
        `"out"` as a third item if `axes` does not say this, as for a vector of outgoing weights. Name
        all leaves with the axis, including the statistics of a `BatchNorm`.
      zero_at_zero: Whether the activation maps 0 to 0, as relu and tanh do.
      axes: What each leaf is, as in `optperm.sparsity.prune`.

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

      If units of stacked layers have no effect in some layers, but not in all layers, a `UserWarning`
      says so. To prune the same units in all layers, pass equal `scores` for all layers to
      `optperm.sparsity.prune`.

      Units must be independent of each other. Do not remove units that a `LayerNorm`, an `RMSNorm` or a
      softmax combines, because the outputs of the other units would change. Do not remove units of a
      tied embedding either, because its single leaf contains both incoming and outgoing weights.

    Raises:
      KeyError: If a path is unknown.
      IndexError: If an axis does not exist.
      ValueError: If the axes of a group have different lengths, a group lacks incoming or outgoing
        weights, an axis is named twice or is neither an input nor an output, a third item is neither
        `"in"` nor `"out"`, or `axes` does not fit.
    """
    plain = without_variables(params)
    structure, leaves = jax.tree.structure(plain), dict(leaf_paths(plain))
    known = dict(zip(leaves, jax.tree.leaves(find_axes(axes, plain, params)), strict=True))
    resolved = {
        name: [_resolve(f"groups[{name!r}]", leaves, known, *member) for member in members]
        for name, members in groups.items()
    }
    named = {member.path for members in resolved.values() for member in members}
    leaves |= {path: np.asarray(leaves[path]) for path in named}
    taken: set[tuple[str, int]] = set()
    for name, members in resolved.items():
        lengths = {(each.path, each.axis): leaves[each.path].shape[each.axis] for each in members}
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
                f"groups[{name!r}] must name incoming weights (an output axis, or 'in' as a third item) "
                f"and outgoing weights (an input axis, or 'out'): {groups[name]}."
            )
    # A removed unit may have been the only use of an earlier unit.
    is_done = False
    while not is_done:
        is_done = True
        for members in resolved.values():
            contributes = _find_contributing(leaves, members, zero_at_zero=zero_at_zero).any(axis=0)
            if not contributes.all():
                is_done = False
                for path, axis, *_ in members:
                    leaves[path] = np.compress(contributes, leaves[path], axis=axis)
    for name, members in resolved.items():
        in_layers = _find_contributing(leaves, members, zero_at_zero=zero_at_zero)
        if not in_layers.all():
            warnings.warn(
                f"{np.sum(~in_layers.all(axis=0))} units of groups[{name!r}] have no effect in some of "
                f"the {len(in_layers)} layers, but stay, because a unit can only be removed from all "
                "layers. To prune the same units in all layers, pass equal scores for all layers to "
                "optperm.sparsity.prune.",
                UserWarning,
                stacklevel=2,
            )
    leaves |= {path: jnp.asarray(leaves[path]) for path in named}
    return jax.tree.unflatten(structure, leaves.values())


def _is_matrix(axes: LeafAxes) -> bool:
    return (len(axes.in_axis), len(axes.out_axis), len(axes.batch_axis)) == (1, 1, 0)


def _resolve(
    name: str,
    leaves: Mapping[str, Any],
    known: Mapping[str, LeafAxes],
    path: str,
    axis: int,
    side: Side | None = None,
) -> _Member:
    if path not in leaves:
        close = difflib.get_close_matches(path, leaves, cutoff=0.0)
        raise KeyError(f"{name}: no leaf has the path {path!r}; the closest are {close}.")
    shape, own = np.shape(leaves[path]), known[path]
    if not -len(shape) <= axis < len(shape):
        raise IndexError(f"{name}: axis {axis} is out of range for {path!r} of shape {shape}.")
    axis %= len(shape)
    if side is not None:
        checks.check_choice(f"{name}: the third item of {path!r}", side, get_args(Side))
    elif axis not in own.in_axis + own.out_axis:
        raise ValueError(
            f"{name}: axis {axis} of {path!r} of shape {shape} is neither an input nor an output of "
            f"{own}: add 'in' (incoming weights) or 'out' as a third item, or say what the leaf is with "
            "axes=."
        )
    is_incoming = axis in own.out_axis if side is None else side == "in"
    copies = tuple(each for each in own.batch_axis if each != axis)
    return _Member(path, axis, is_incoming, copies)


def _find_contributing(
    leaves: Mapping[str, np.ndarray], members: Sequence[_Member], *, zero_at_zero: bool
) -> np.ndarray:
    """Return whether each unit of a group contributes to the outputs of each layer, (layers, units)."""
    stacks = {tuple(leaves[each.path].shape[axis] for axis in each.copies) for each in members}

    def find_used(chosen: Iterator[_Member]) -> np.ndarray:
        found = []
        for path, axis, _, copies in chosen:
            inside = [each for each in range(leaves[path].ndim) if each not in (*copies, axis)]
            nonzero = np.any(leaves[path] != 0, axis=tuple(inside), keepdims=True)
            layers = math.prod(nonzero.shape[each] for each in copies)
            by_layer = nonzero.transpose(*copies, axis, *inside)
            by_layer = by_layer.reshape(layers, nonzero.shape[axis])
            # Leaves with other copies cannot be compared layer by layer.
            found.append(by_layer if len(stacks) == 1 else by_layer.any(axis=0)[None])
        return np.any(np.stack(found), axis=0)

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
