"""Principal components of snapshots of the params, from the Gram matrix of the snapshots.

The axes of a leaf are cut into pieces, so that each device over which it is spread holds whole ones. A
sum within pieces then stays on its device: all that leaves it of the Gram matrix is m x m numbers.

The inner products are summed in float64, whatever dtype the snapshots have: with fewer digits the small
components, which lie orders of magnitude below the first, drown in the rounding of the large ones.
Inside `jax.enable_x64` there is float64 whatever the setting outside, for operations that XLA has
itself. Those that JAX rewrites only when it lowers them, outside of that scope, are in float32 here.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from optperm.contract import checks
from optperm.contract.dtypes import accumulation_dtype
from optperm.contract.mapped_axes import cond, mark_varying, varying_axes
from optperm.contract.shardings import explicit_sharding, rows_like
from optperm.subspace.subspace import own_rows

# Float64 numbers held at a time: a slice through all snapshots that stays in a core's cache.
_CHUNK = 2**18
# How many times as many it may be, where a leaf's first axis is too short to be sliced that finely.
_SLACK = 2


def pca_basis(
    snapshots: optax.Params,
    n_components: int,
    *,
    num_snapshots: int | jax.Array | None = None,
) -> optax.Params:
    r"""The first principal components of the snapshots, as orthonormal rows.

    With the snapshots :math:`\theta_1, \dots, \theta_m` for the rows of a matrix and their mean taken
    off, :math:`X`:

    .. math::
      X X^\top = U \Lambda U^\top, \qquad P = \Lambda_k^{-1/2} U_k^\top X

    from the :math:`k` largest eigenvalues, in descending order. The inner products :math:`X X^\top` are
    those of all leaves together, summed over slices of them, so that no copy of the snapshots is made.
    The same snapshots give the same rows: each points to the side of the snapshot that is furthest
    out along it (of two equally far ones, the later).

    Args:
      snapshots: A tree like params whose leaves have a leading axis of m snapshots, of any real floating
        dtypes: `optperm.trajectory` makes one.
      n_components: k. The mean takes one dimension away, so it takes k + 1 snapshots.
      num_snapshots: How many snapshots, from the first, are valid; None for all.

    Returns:
      A tree like `snapshots` whose leaves have a leading axis of k rows, in float32 or the leaf's dtype
      if wider. The rows of all leaves together are orthonormal. Traced, where Python cannot see the
      rank, rows that the snapshots do not determine are zero.

    Example:
      >>> import jax.numpy as jnp, optperm
      >>> snapshots = {"w": jnp.array([[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]]), "b": jnp.zeros((3,))}
      >>> basis = optperm.pca_basis(snapshots, 1)  # they lie on a line
      >>> [round(x, 4) for x in basis["w"][0].tolist()], basis["b"].tolist()
      ([0.7071, 0.7071], [0.0])

    Raises:
      TypeError: If a leaf is not of a real floating dtype, or `n_components` is not an integer.
      ValueError: If there are too few snapshots, the leaves hold different numbers of them, or the
        snapshots are not finite or span fewer than k directions about their mean.
    """
    checks.check_static_count("n_components", n_components)
    checks.check_real_floating("snapshots", snapshots, advice="Leave the others out.")
    total = _number_of_snapshots(snapshots)
    valid: Any = total if num_snapshots is None else num_snapshots
    checks.check_count("num_snapshots", valid, minimum=0)
    is_traced = isinstance(valid, jax.core.Tracer)
    available = total if is_traced else min(int(valid), total)
    if available < n_components + 1:
        raise ValueError(
            f"n_components={n_components} needs at least {n_components + 1} snapshots (centered, m of "
            f"them span m - 1 directions), got {available} (num_snapshots, or all): record more of "
            f"them, or ask for at most {max(available - 1, 0)} components."
        )
    count = None if num_snapshots is None else jnp.asarray(valid, jnp.int32)
    basis, rank = _pca(snapshots, count, n_components)
    if not isinstance(rank, jax.core.Tracer) and rank < n_components:
        raise ValueError(
            f"The snapshots span {int(rank)} directions about their mean, and n_components="
            f"{n_components} asks for more (0 also stands for snapshots that are not finite). Ask for "
            "fewer components, or take snapshots that differ."
        )
    return basis


@functools.partial(jax.jit, static_argnames="n_components")
def _pca(
    snapshots: optax.Params, num_snapshots: jax.Array | None, n_components: int
) -> tuple[optax.Params, jax.Array]:
    def room(leaf: jax.Array) -> jax.Array:
        rows = rows_like(leaf[0], n_components, accumulation_dtype(leaf))
        return mark_varying(rows, varying_axes(snapshots, num_snapshots))

    rows = jax.tree.map(room, snapshots)
    return principal_rows(rows, (snapshots,), n_components, num_snapshots=num_snapshots)


def principal_rows(
    rows: optax.Params,
    blocks: tuple[optax.Params, ...],
    n_components: int,
    *,
    num_snapshots: jax.Array | None = None,
    first_row: jax.Array | int = 0,
    in_place: bool = False,
    is_centered: bool = True,
) -> tuple[optax.Params, jax.Array]:
    """Writes principal components over `rows`, or as many of them as it has room for.

    Args:
      rows: What to write over, a tree of leaves with a leading axis.
      blocks: The snapshots, in one or more trees of consecutive ones.
      n_components: The number of components.
      num_snapshots: How many of the snapshots are valid; None for all.
      first_row: The component that the first row is to hold. Rows past the last one become zero.
      in_place: Whether `rows` holds the first snapshots itself, ahead of those in `blocks`.
      is_centered: Whether the components are those of displacements from the mean, or of the snapshots.

    Returns:
      The rows, and how many of the components the snapshots determine.
    """
    rows, blocks = _without_derivative((rows, blocks))
    outs, structure = jax.tree.flatten(rows)
    blocks = (rows, *blocks) if in_place else blocks
    columns = list(zip(*([_cut(leaf) for leaf in jax.tree.leaves(b)] for b in blocks), strict=True))
    with jax.enable_x64(True):
        axes = varying_axes(rows, blocks, num_snapshots, first_row)
        total = sum(part.shape[0] for part in columns[0]) if columns else n_components + 1
        is_valid = None
        if num_snapshots is not None:
            is_valid = jnp.arange(total, dtype=jnp.int32) < num_snapshots
        read = functools.partial(_displacements, is_valid=is_valid, is_centered=is_centered)
        gram = mark_varying(jnp.zeros((total, total), jnp.float64), axes)
        for parts in columns:
            gram += _sum_over_chunks(read, _products, parts)
        valid = jnp.ones(total) if is_valid is None else is_valid.astype(jnp.float64)
        center = _centering(valid) if is_centered else jnp.diag(valid)
        coefficients, rank, needs_care = _coefficients(gram, n_components, center)

        def orthonormalized() -> jax.Array:
            products = mark_varying(jnp.zeros((n_components, n_components), jnp.float64), axes)
            for parts in columns:
                products += _sum_over_chunks(
                    read, lambda x: _products(_combine(coefficients, x)), parts
                )
            # So close to the identity that float32 is enough; rows of zeros stay what they are.
            is_zero = (jnp.arange(n_components, dtype=jnp.int32) >= rank).astype(jnp.float32)
            factor = jnp.linalg.cholesky(products.astype(jnp.float32) + jnp.diag(is_zero))
            identity = jnp.eye(n_components, dtype=jnp.float32)
            inverse = jax.scipy.linalg.solve_triangular(factor, identity, lower=True)
            new = _combine(inverse.astype(jnp.float64), coefficients)
            return jnp.where(jnp.all(jnp.isfinite(new)), new, coefficients)

        coefficients = cond(needs_care, orthonormalized, lambda: coefficients)
        written = []
        for out, parts in zip(outs, columns, strict=True):
            mine = own_rows(coefficients, first_row, out.shape[0])
            written.append(_write_combinations(read, mine, out, parts, in_place=in_place))
        return jax.tree.unflatten(structure, written), rank


@jax.custom_jvp
def _without_derivative(snapshots: Any) -> Any:
    """The snapshots, with an error in the place of a derivative."""
    return snapshots


@_without_derivative.defjvp
def _refuse_derivative(*_: Any) -> Any:
    raise TypeError(
        "pca_basis and the basis of dldr have no derivative with respect to the snapshots: where it "
        "is not wanted, pass jax.lax.stop_gradient(snapshots)."
    )


def _centering(valid: jax.Array) -> jax.Array:
    """The matrix that takes the mean of the valid snapshots off each of them."""
    return jnp.diag(valid) - jnp.outer(valid, valid) / jnp.maximum(jnp.sum(valid), 1.0)


def _coefficients(
    gram: jax.Array, n_components: int, center: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The matrix that makes rows of what the Gram matrix is of, (k, m).

    Args:
      gram: The inner products.
      n_components: k.
      center: What is to be done to the snapshots first, (m, m).

    Returns:
      The matrix, the number of its rows that are not zero, and whether the last of those belongs to so
      small an eigenvalue that the rounding of the Gram matrix shows in its angles to the others.
    """
    m = gram.shape[0]
    gram = jnp.where(jnp.all(jnp.isfinite(gram)), gram, 0.0)
    values, vectors = jnp.linalg.eigh(_combine(_combine(center, gram), center))
    values, vectors = values[::-1][:n_components], vectors[:, ::-1][:, :n_components].T
    largest = jnp.maximum(values[0], jnp.finfo(jnp.float64).tiny)
    determined = values > 16 * m * jnp.finfo(jnp.float64).eps * largest

    sides = jax.vmap(_side)(vectors.astype(jnp.float32)).astype(jnp.float64)
    scales = jnp.where(determined, 1.0 / jnp.sqrt(jnp.where(determined, values, 1.0)), 0.0)
    coefficients = (sides * scales)[:, None] * _combine(vectors, center)
    needs_care = jnp.any(determined & (values < 1e-9 * largest))
    return coefficients, jnp.sum(determined, dtype=jnp.int32), needs_care


def _side(vector: jax.Array) -> jax.Array:
    """The sign of the largest entry; where several are equally large, of the last."""
    distance = jnp.abs(vector) * np.linspace(1.0, 1.0 + 1e-5, vector.size).astype(vector.dtype)
    furthest = jnp.where(distance == jnp.max(distance), vector, jnp.zeros_like(vector))
    return jnp.where(jnp.sum(furthest) < 0, -1.0, 1.0)


# The operator @ asks for float64 by name, which is refused where jax.vmap rewrites it outside the scope.


def _combine(coefficients: jax.Array, rows: jax.Array) -> jax.Array:
    """A linear combination of the rows for each row of coefficients."""
    return jax.lax.dot_general(coefficients, rows, (((1,), (0,)), ((), ())))


def _products(rows: jax.Array) -> jax.Array:
    """The inner products of all pairs of rows, piece by piece: (*pieces, rows, rows)."""
    within, pieces = tuple(range(1, rows.ndim, 2)), tuple(range(2, rows.ndim, 2))
    return jax.lax.dot_general(rows, rows, ((within, within), (pieces, pieces)))


def _cut(rows: jax.Array) -> jax.Array:
    """Cuts a leaf's axes into pieces: (m, within, pieces, within, pieces, within, ...).

    An axis that cannot be spread over devices is a part of the one before it.
    """
    sharding = explicit_sharding(rows)
    sizes, spec = [rows.shape[0], 1], [None, None]
    for axis, size in enumerate(rows.shape[1:], start=1):
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
    cut = sharding and NamedSharding(sharding.mesh, PartitionSpec(*spec))
    return jax.lax.reshape(rows, sizes, out_sharding=cut)


def _chunks(parts: tuple[jax.Array, ...]) -> tuple[int, int, int]:
    """The axis to slice, the width of a slice, and how many whole ones there are.

    It is the first axis within pieces of which a slice is small: slices are then long runs of memory.
    """
    shape, total = parts[0].shape, sum(part.size for part in parts)
    within = range(1, len(shape), 2)
    is_fine = (axis for axis in within if total <= _SLACK * _CHUNK * shape[axis])
    axis = next(is_fine, max(within, key=lambda axis: shape[axis]))
    width = min(shape[axis], max(_CHUNK * shape[axis] // max(total, 1), 1))
    return axis, width, shape[axis] // max(width, 1)


def _displacements(
    parts: tuple[jax.Array, ...],
    axis: int,
    start: Any,
    width: int,
    *,
    is_valid: jax.Array | None,
    is_centered: bool,
) -> jax.Array:
    """A slice through all snapshots, as differences from the first one, exact and small, if centered.

    Those that are not valid are zero, whatever they hold.
    """
    slices = [jax.lax.dynamic_slice_in_dim(part, start, width, axis) for part in parts]
    wide = jnp.concatenate([each.astype(jnp.float64) for each in slices])
    wide = wide - wide[:1] if is_centered else wide
    if is_valid is None:
        return wide
    return jnp.where(jnp.expand_dims(is_valid, tuple(range(1, wide.ndim))), wide, 0.0)


def _sum_over_chunks(
    read: Callable[..., jax.Array],
    function: Callable[[jax.Array], jax.Array],
    parts: tuple[jax.Array, ...],
) -> jax.Array:
    """Adds up a function of slices through all snapshots, and then the pieces."""
    axis, width, whole = _chunks(parts)

    def of_slice(start: Any, width: int) -> jax.Array:
        return function(read(parts, axis, start, width))

    def add(index: Any, total: jax.Array) -> jax.Array:
        return total + of_slice(index * np.int32(width), width)

    nothing = of_slice(np.int32(0), 0)
    total = jax.lax.fori_loop(np.int32(0), np.int32(whole), add, nothing)
    rest = parts[0].shape[axis] - whole * width
    total = total + of_slice(np.int32(whole * width), rest) if rest else total
    return jnp.sum(total, axis=tuple(range(total.ndim - 2)))


def _write_combinations(
    read: Callable[..., jax.Array],
    coefficients: jax.Array,
    out: jax.Array,
    parts: tuple[jax.Array, ...],
    *,
    in_place: bool,
) -> jax.Array:
    """Writes coefficients @ snapshots over `out`, slice by slice; `out` may be the first part."""
    axis, width, whole = _chunks(parts)
    rows = parts[0] if in_place else _cut(out)
    # Snapshots that are not finite determine nothing, but zero times them would not be zero.
    is_row = jnp.expand_dims(jnp.any(coefficients != 0, axis=1), tuple(range(1, rows.ndim)))

    def write(rows: jax.Array, start: Any, width: int) -> jax.Array:
        now = (rows, *parts[1:]) if in_place else parts
        product = _combine(coefficients, read(now, axis, start, width))
        product = jnp.where(is_row, product, 0.0)
        return jax.lax.dynamic_update_slice_in_dim(rows, product.astype(rows.dtype), start, axis)

    rest = rows.shape[axis] - whole * width
    rows = write(rows, np.int32(whole * width), rest) if rest else rows
    rows = jax.lax.fori_loop(
        np.int32(0), np.int32(whole), lambda i, rows: write(rows, i * np.int32(width), width), rows
    )
    return jax.lax.reshape(rows, out.shape, out_sharding=explicit_sharding(out))


def _number_of_snapshots(snapshots: optax.Params) -> int:
    leaves = jax.tree_util.tree_leaves_with_path(snapshots)
    if not leaves:
        raise ValueError("snapshots has no leaves, so there is nothing to take components of.")
    total = jnp.shape(leaves[0][1])[:1]
    for path, leaf in leaves:
        if not jnp.ndim(leaf) or jnp.shape(leaf)[:1] != total:
            raise ValueError(
                f"snapshots{jax.tree_util.keystr(path)} has shape {jnp.shape(leaf)}; every leaf needs a "
                f"leading axis of snapshots, of the same length as in the first leaf: {total}."
            )
    return total[0]
