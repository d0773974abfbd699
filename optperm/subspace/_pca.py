"""Compute principal components of snapshots of the params, from the Gram matrix of the snapshots.

The axes of a leaf are split into pieces, so that each device holds whole pieces. Sums within pieces stay
on their devices: only the m x m numbers of the Gram matrix are communicated.

Inner products are summed in float64 for snapshots of all dtypes. At a lower precision, rounding errors
of the large components would hide the small components, which are orders of magnitude smaller. Inside
`jax.enable_x64`, operations of XLA itself use float64 with any outer setting. Operations that JAX
rewrites when it lowers them, outside this scope, use float32.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from optperm.core import checks
from optperm.core.control import cond
from optperm.core.dtypes import accumulation_dtype
from optperm.core.mapped_axes import mark_varying, varying_axes
from optperm.core.shapes import Params
from optperm.core.shardings import explicit_sharding, rows_like
from optperm.subspace._subspace import own_rows

# The number of float64 numbers in a slice through all snapshots that fits into a core's cache.
_CHUNK = 2**18
# The factor by which slices may be larger if an axis is too short for finer slices.
_SLACK = 2


def pca_basis(
    snapshots: Params,
    n_components: int,
    *,
    num_snapshots: int | jax.Array | None = None,
) -> Params:
    r"""Compute the first principal components of the snapshots as orthonormal rows.

    Let the rows of :math:`X` be the snapshots :math:`\theta_1, \dots, \theta_m` minus their mean. Then

    .. math::
      X X^\top = U \Lambda U^\top, \qquad P = \Lambda_k^{-1/2} U_k^\top X

    where :math:`\Lambda_k` contains the :math:`k` largest eigenvalues in descending order, and
    :math:`U_k` contains their eigenvectors. The inner products :math:`X X^\top` are sums over all
    leaves. The sign of each row makes the coordinate of the largest magnitude along this row positive.

    Args:
      snapshots: A tree like params whose leaves have a leading axis of m snapshots and any real floating
        dtypes, such as the result of `optperm.subspace.trajectory`.
      n_components: k, at most m - 1, because the mean is subtracted.
      num_snapshots: The number of valid snapshots, which must come first; None if all are valid.

    Returns:
      A tree like `snapshots` whose leaves have a leading axis of k rows, in float32 or in the leaf's
      dtype if it is wider. The rows are orthonormal over all leaves together. In a traced call, where
      the rank is unknown, rows that the snapshots do not determine are zero.

    Example:
      >>> import jax.numpy as jnp, optperm
      >>> snapshots = {"w": jnp.array([[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]]), "b": jnp.zeros((3,))}
      >>> basis = optperm.subspace.pca_basis(snapshots, 1)  # they lie on a line
      >>> [round(x, 4) for x in basis["w"][0].tolist()], basis["b"].tolist()
      ([0.7071, 0.7071], [0.0])

    Notes:
      The products are summed over slices of the leaves, which avoids a copy of the snapshots. The same
      snapshots give the same signs; if two coordinates have the largest magnitude, that of the later
      snapshot becomes positive. In float64, rows whose singular values are below 3e-5 of the maximum
      are orthonormal only to float32 precision.

    Raises:
      TypeError: If a leaf does not have a real floating dtype, or `n_components` is not an integer.
      ValueError: If there are too few snapshots, the leaves have different numbers of snapshots, or the
        snapshots are not finite or span fewer than k directions around their mean.
    """
    checks.check_static_count("n_components", n_components)
    checks.check_real_floating("snapshots", snapshots, advice="Leave the others out.")
    total = checks.count_examples("snapshots", snapshots)
    valid: Any = total if num_snapshots is None else num_snapshots
    checks.check_count("num_snapshots", valid, minimum=0)
    is_traced = isinstance(valid, jax.core.Tracer)
    available = total if is_traced else min(int(valid), total)
    if available < n_components + 1:
        least = f"at least {n_components + 1} snapshots"
        raise ValueError(f"n_components={n_components} needs {least}, got {available}.")
    count = None if num_snapshots is None else jnp.asarray(valid, jnp.int32)
    basis, rank = _pca(snapshots, count, n_components)
    if not isinstance(rank, jax.core.Tracer) and rank < n_components:
        spanned = f"{int(rank)} (0 if their squares are not finite)"
        raise ValueError(
            f"The snapshots span too few directions around their mean: {spanned}, fewer than "
            f"n_components={n_components}."
        )
    return basis


@functools.partial(jax.jit, static_argnames="n_components")
def _pca(
    snapshots: Params, num_snapshots: jax.Array | None, n_components: int
) -> tuple[Params, jax.Array]:
    def make_rows(leaf: jax.Array) -> jax.Array:
        rows = rows_like(leaf[0], n_components, accumulation_dtype(leaf))
        return mark_varying(rows, varying_axes(snapshots, num_snapshots))

    rows = jax.tree.map(make_rows, snapshots)
    return principal_rows(rows, (snapshots,), n_components, num_snapshots=num_snapshots)


def principal_rows(
    rows: Params,
    blocks: tuple[Params, ...],
    n_components: int,
    *,
    num_snapshots: jax.Array | None = None,
    first_row: jax.Array | int = 0,
    in_place: bool = False,
    is_centered: bool = True,
) -> tuple[Params, jax.Array]:
    """Overwrite `rows` with principal components.

    Args:
      rows: A tree whose leaves have a leading axis of rows to overwrite.
      blocks: The snapshots, in one or more trees of consecutive snapshots.
      n_components: The number of components.
      num_snapshots: The number of valid snapshots; None for all.
      first_row: The component in the first row. Rows after the last component become zero.
      in_place: Whether `rows` contains the first snapshots, before the snapshots in `blocks`.
      is_centered: Whether the mean is subtracted from the snapshots.

    Returns:
      The rows, and the number of components that the snapshots determine.
    """
    rows, blocks = _refuse_derivatives((rows, blocks))
    outs, structure = jax.tree.flatten(rows)
    blocks = (rows, *blocks) if in_place else blocks
    columns = list(
        zip(*([_split(leaf) for leaf in jax.tree.leaves(b)] for b in blocks), strict=True)
    )
    with jax.enable_x64(True):
        axes = varying_axes(rows, blocks, num_snapshots, first_row)
        total = sum(part.shape[0] for part in columns[0]) if columns else n_components + 1
        is_valid = None
        if num_snapshots is not None:
            is_valid = jnp.arange(total, dtype=jnp.int32) < num_snapshots
        # X contains the differences from the first snapshot; the mean is subtracted afterwards
        gram = mark_varying(jnp.zeros((total, total), jnp.float64), axes)
        for parts in columns:
            gram += _sum_products(parts, is_valid, is_centered=is_centered)
        valid = jnp.ones(total) if is_valid is None else is_valid.astype(jnp.float64)
        center = _make_centering(valid) if is_centered else jnp.diag(valid)
        coefficients, rank, needs_care = _find_coefficients(gram, n_components, center)

        # P <- L^-1 P with P P' = L L', because small eigenvalues make P less orthonormal
        def orthonormalize() -> jax.Array:
            between = mark_varying(jnp.zeros((n_components, n_components), jnp.float64), axes)
            for parts in columns:
                between += _sum_products(parts, is_valid, coefficients, is_centered=is_centered)
            # The products are close to the identity, so float32 is enough; rows of zeros stay zero.
            is_zero = (jnp.arange(n_components, dtype=jnp.int32) >= rank).astype(jnp.float32)
            factor = jnp.linalg.cholesky(between.astype(jnp.float32) + jnp.diag(is_zero))
            identity = jnp.eye(n_components, dtype=jnp.float32)
            inverse = jax.scipy.linalg.solve_triangular(factor, identity, lower=True)
            new = _combine(inverse.astype(jnp.float64), coefficients)
            return jnp.where(jnp.all(jnp.isfinite(new)), new, coefficients)

        coefficients = cond(needs_care, orthonormalize, lambda: coefficients)
        # The rows of one replica in P = coefficients X
        number = outs[0].shape[0] if outs else n_components
        mine = own_rows(coefficients, first_row, number)
        written = [
            _write_combinations(
                out, parts, is_valid, mine, is_centered=is_centered, in_place=in_place
            )
            for out, parts in zip(outs, columns, strict=True)
        ]
        return jax.tree.unflatten(structure, written), rank


@jax.custom_jvp
def _refuse_derivatives(snapshots: Any) -> Any:
    """Return the snapshots, but raise a TypeError if they are differentiated."""
    return snapshots


@_refuse_derivatives.defjvp
def _raise(*_: Any) -> Any:
    raise TypeError("A basis has no derivative: pass jax.lax.stop_gradient(snapshots).")


def _make_centering(valid: jax.Array) -> jax.Array:
    """Make the matrix that subtracts the mean of the valid snapshots from each valid snapshot."""
    return jnp.diag(valid) - jnp.outer(valid, valid) / jnp.maximum(jnp.sum(valid), 1.0)


def _find_coefficients(
    gram: jax.Array, n_components: int, center: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the matrix, (k, m), whose product with the snapshots is the basis.

    Args:
      gram: The inner products of the snapshots.
      n_components: k.
      center: The matrix that centers the valid snapshots, or only selects them, (m, m).

    Returns:
      The matrix, the number of its nonzero rows, and whether rounding errors of the Gram matrix make
      rows with small eigenvalues less orthogonal to the other rows.
    """
    m = gram.shape[0]
    gram = jnp.where(jnp.all(jnp.isfinite(gram)), gram, 0.0)
    # C G C' = U Lambda U'
    values, vectors = jnp.linalg.eigh(_combine(_combine(center, gram), center))
    values, vectors = values[::-1][:n_components], vectors[:, ::-1][:, :n_components].T
    largest = jnp.maximum(values[0], jnp.finfo(jnp.float64).tiny)
    determined = values > 16 * m * jnp.finfo(jnp.float64).eps * largest

    # Lambda_k^(-1/2) U_k' C, where the farthest snapshot determines the sign of each row
    sides = jax.vmap(_find_side)(vectors.astype(jnp.float32)).astype(jnp.float64)
    scales = jnp.where(determined, 1.0 / jnp.sqrt(jnp.where(determined, values, 1.0)), 0.0)
    coefficients = (sides * scales)[:, None] * _combine(vectors, center)
    needs_care = jnp.any(determined & (values < 1e-9 * largest))
    return coefficients, jnp.sum(determined, dtype=jnp.int32), needs_care


def _find_side(vector: jax.Array) -> jax.Array:
    """Return the sign of the largest entry, or of the last of several equally large entries."""
    distance = jnp.abs(vector) * np.linspace(1.0, 1.0 + 1e-5, vector.size).astype(vector.dtype)
    furthest = jnp.where(distance == jnp.max(distance), vector, jnp.zeros_like(vector))
    return jnp.where(jnp.sum(furthest) < 0, -1.0, 1.0)


# The operator @ specifies float64, which fails if jax.vmap rewrites it outside the scope.


def _combine(coefficients: jax.Array, rows: jax.Array) -> jax.Array:
    """Return a linear combination of the rows for each row of coefficients."""
    return jax.lax.dot_general(coefficients, rows, (((1,), (0,)), ((), ())))


def _products(rows: jax.Array) -> jax.Array:
    """Return the inner products of all pairs of rows within each piece, (*pieces, rows, rows)."""
    within, pieces = tuple(range(1, rows.ndim, 2)), tuple(range(2, rows.ndim, 2))
    return jax.lax.dot_general(rows, rows, ((within, within), (pieces, pieces)))


def _split(rows: jax.Array) -> jax.Array:
    """Split a leaf's axes into pieces: (m, within, pieces, within, pieces, within, ...).

    An axis that cannot be sharded is merged with the axis before it.
    """
    sharding = explicit_sharding(rows)
    sizes, spec = [rows.shape[0], 1], [None, None]
    for axis, size in enumerate(rows.shape[1:], start=1):
        # If the sharding is unknown, pieces fit a sharding over all devices.
        if sharding is None:
            names, pieces = None, math.gcd(size, jax.device_count())
        else:
            names = sharding.spec[axis]
            each = (names,) if isinstance(names, str) else names or ()
            pieces = math.prod(sharding.mesh.shape[name] for name in each)
        if pieces == 1:
            sizes[-1] *= size
        else:
            sizes += [pieces, size // pieces]
            spec += [names, None]
    split = sharding and NamedSharding(sharding.mesh, PartitionSpec(*spec))
    return jax.lax.reshape(rows, sizes, out_sharding=split)


def _plan_slices(parts: tuple[jax.Array, ...]) -> tuple[int, int, int]:
    """Return the axis to slice, the width of a slice, and the number of whole slices.

    The axis is the first axis within pieces with small enough slices, so slices are long memory runs.
    """
    shape, total = parts[0].shape, sum(part.size for part in parts)
    within = range(1, len(shape), 2)
    is_fine = (axis for axis in within if total <= _SLACK * _CHUNK * shape[axis])
    axis = next(is_fine, max(within, key=lambda axis: shape[axis]))
    width = min(shape[axis], max(_CHUNK * shape[axis] // max(total, 1), 1))
    return axis, width, shape[axis] // max(width, 1)


def _read_differences(
    parts: tuple[jax.Array, ...],
    axis: int,
    start: Any,
    width: int,
    *,
    is_valid: jax.Array | None,
    is_centered: bool,
) -> jax.Array:
    """Return a slice through all snapshots; if centered, subtract the first snapshot exactly.

    Invalid snapshots become zero.
    """
    slices = [jax.lax.dynamic_slice_in_dim(part, start, width, axis) for part in parts]
    wide = jnp.concatenate([each.astype(jnp.float64) for each in slices])
    wide = wide - wide[:1] if is_centered else wide
    if is_valid is None:
        return wide
    return jnp.where(jnp.expand_dims(is_valid, tuple(range(1, wide.ndim))), wide, 0.0)


# Leaves of the same shape are traced once. The scope of float64 is part of the programs' cache key.


@functools.partial(jax.jit, static_argnames="is_centered")
def _sum_products(
    parts: tuple[jax.Array, ...],
    is_valid: jax.Array | None,
    coefficients: jax.Array | None = None,
    *,
    is_centered: bool,
) -> jax.Array:
    """Return the inner products of all snapshots of a leaf, or of their linear combinations."""
    axis, width, whole = _plan_slices(parts)

    def compute(start: Any, width: int) -> jax.Array:
        rows = _read_differences(
            parts, axis, start, width, is_valid=is_valid, is_centered=is_centered
        )
        return _products(rows if coefficients is None else _combine(coefficients, rows))

    def add(index: Any, total: jax.Array) -> jax.Array:
        return total + compute(index * np.int32(width), width)

    # Sum over slices first, then over pieces
    total = compute(np.int32(0), 0)
    # Most leaves have one slice and need no loop, which would cost its own program.
    for_each = jax.lax.fori_loop if whole > 1 else _for_each
    total = for_each(np.int32(0), np.int32(whole), add, total)
    rest = parts[0].shape[axis] - whole * width
    total = total + compute(np.int32(whole * width), rest) if rest else total
    return jnp.sum(total, axis=tuple(range(total.ndim - 2)))


def _for_each(start: Any, stop: Any, function: Callable[[Any, Any], Any], carry: Any) -> Any:
    """Compute the result of `jax.lax.fori_loop` without a loop in the program."""
    return functools.reduce(
        lambda carry, index: function(np.int32(index), carry), range(start, stop), carry
    )


@functools.partial(jax.jit, static_argnames=("is_centered", "in_place"))
def _write_combinations(
    out: jax.Array,
    parts: tuple[jax.Array, ...],
    is_valid: jax.Array | None,
    coefficients: jax.Array,
    *,
    is_centered: bool,
    in_place: bool,
) -> jax.Array:
    """Overwrite `out` with coefficients @ snapshots by slices; `out` may be the first block."""
    axis, width, whole = _plan_slices(parts)
    rows = parts[0] if in_place else _split(out)
    # A row with zero coefficients is zero, even if snapshots are not finite.
    is_row = jnp.expand_dims(jnp.any(coefficients != 0, axis=1), tuple(range(1, rows.ndim)))

    def write(rows: jax.Array, start: Any, width: int) -> jax.Array:
        now = (rows, *parts[1:]) if in_place else parts
        wide = _read_differences(
            now, axis, start, width, is_valid=is_valid, is_centered=is_centered
        )
        product = jnp.where(is_row, _combine(coefficients, wide), 0.0)
        return jax.lax.dynamic_update_slice_in_dim(rows, product.astype(rows.dtype), start, axis)

    rest = rows.shape[axis] - whole * width
    rows = write(rows, np.int32(whole * width), rest) if rest else rows
    for_each = jax.lax.fori_loop if whole > 1 else _for_each
    rows = for_each(
        np.int32(0), np.int32(whole), lambda i, rows: write(rows, i * np.int32(width), width), rows
    )
    return jax.lax.reshape(rows, out.shape, out_sharding=explicit_sharding(out))
