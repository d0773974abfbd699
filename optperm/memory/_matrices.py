"""View the leaves of a tree as matrices, and select the leaves, axes and ranks of projections.

Matrices have the shape (..., d, k), and the side of length d is projected.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from optperm._leaf_axes import LeafAxes, resolve_axes
from optperm.core import checks
from optperm.core.dtypes import accumulation_dtype
from optperm.core.mapped_axes import varying_zeros
from optperm.core.shapes import Updates
from optperm.core.shardings import explicit_sharding, shard_like, sharding_of, unshard
from optperm.core.trees import is_box, without_boxes

Side = Literal["smaller", "larger"]
# By default, float32 products have half the precision on accelerators.
_PRECISION = jax.lax.Precision.HIGHEST


@dataclasses.dataclass(frozen=True)
class Matrix:
    """A view of a leaf as matrices G, (..., d, k), whose rank is reduced on the side of d.

    Attributes:
      name: The path of the leaf, for messages.
      shape: The shape of the leaf.
      batch: The axes along which the leaf is a stack of matrices.
      projected: The axes that are merged into d.
      kept: The axes that are merged into k.
      on_rows: Whether d is the first side of the matrix. Low-rank leaves are then (..., r, k), otherwise
        (..., k, r).
      rank: r.
    """

    name: str
    shape: tuple[int, ...]
    batch: tuple[int, ...]
    projected: tuple[int, ...]
    kept: tuple[int, ...]
    on_rows: bool
    rank: int

    @property
    def batch_shape(self) -> tuple[int, ...]:
        """The lengths of the batch axes."""
        return tuple(self.shape[axis] for axis in self.batch)

    @property
    def d(self) -> int:
        """The length of the side of the basis."""
        return math.prod(self.shape[axis] for axis in self.projected)

    @property
    def k(self) -> int:
        """The length of the other side."""
        return math.prod(self.shape[axis] for axis in self.kept)

    @property
    def basis_shape(self) -> tuple[int, ...]:
        """(..., d, r)."""
        return (*self.batch_shape, self.d, self.rank)

    def matrices(self, leaf: jax.Array) -> jax.Array:
        """Return the leaf as (..., d, k)."""
        x = leaf.transpose(self.batch + self.projected + self.kept)
        shape = (*self.batch_shape, self.d, self.k)
        if x.shape == shape:
            return x
        sharding = explicit_sharding(x)
        if sharding is None:
            return x.reshape(shape)
        # Only the first of several merged axes can stay sharded.
        start = len(self.batch)
        heads = {*range(start), start, start + len(self.projected)}
        spec = [*sharding.spec, *[None] * (x.ndim - len(sharding.spec))]
        some = [axis if i in heads else None for i, axis in enumerate(spec)]
        x = jax.sharding.reshard(x, sharding.update(spec=PartitionSpec(*some)))
        merged = PartitionSpec(*(axis for i, axis in enumerate(some) if i in heads))
        return jax.lax.reshape(x, shape, out_sharding=sharding.update(spec=merged))

    def leaf(self, matrices: jax.Array) -> jax.Array:
        """Return matrices of shape (..., d, k) as a leaf."""
        axes = self.batch + self.projected + self.kept
        shape = tuple(self.shape[axis] for axis in axes)
        if matrices.shape != shape:
            sharding = explicit_sharding(matrices)
            if sharding is not None:
                *batch, d, k = sharding.spec
                inner = [None] * (len(self.projected) - 1)
                spec = PartitionSpec(*batch, d, *inner, k, *[None] * (len(self.kept) - 1))
                sharding = sharding.update(spec=spec)
            matrices = jax.lax.reshape(matrices, shape, out_sharding=sharding)
        return matrices.transpose(tuple(int(i) for i in np.argsort(axes)))

    def is_usable(self, leaf: jax.Array) -> jax.Array:
        """Return whether each matrix of a leaf is finite and not zero, (...)."""
        # The maximum is infinite or NaN if an entry is.
        largest = unshard(jnp.max(jnp.abs(leaf), axis=self.projected + self.kept))
        return (largest > 0) & jnp.isfinite(largest)

    @property
    def rank_axis(self) -> int:
        """The axis of a low-rank leaf that indexes the r rows of R."""
        return -2 if self.on_rows else -1

    def turn(self, x: jax.Array) -> jax.Array:
        """Return R or G in the leaf's orientation, or back; transpose them if bases are on columns."""
        return x if self.on_rows else jnp.swapaxes(x, -1, -2)


def plan_matrices(tree: Updates, rank: float, side: Side, axes: Any) -> Any:
    """Return a tree with a view of each kernel as matrices, or None for leaves at full rank.

    The tree has no boxes, even if the given tree has boxes. A kernel stays at full rank if projecting it
    would not make its state smaller.

    Args:
      tree: Params or updates.
      rank: r, or the ratio of r to the smaller side.
      side: The side of the bases; the columns of a square matrix are its smaller side.
      axes: What each leaf is, as for `optperm._leaf_axes.resolve_axes`.
    """
    plain, known = without_boxes(tree), resolve_axes(axes, tree)
    structure: Any = jax.tree.structure(plain)
    found: list[Matrix | None] = []
    sides: list[int] = []
    leaves = jax.tree_util.tree_leaves_with_path(plain)
    for (path, leaf), own in zip(leaves, jax.tree.leaves(known), strict=True):
        if own.kind == "kernel":
            name = f"params{jax.tree_util.keystr(path)}"
            matrix = _make_matrix(name, jnp.shape(leaf), own, rank, side)
            d, k, r = matrix.d, matrix.k, matrix.rank
            sides.append(min(d, k))
            # A basis and two moments, d r + 2 r k numbers, must be smaller than two full moments, 2 d k
            is_smaller = r < min(d, k) and d * r + 2 * r * k < 2 * d * k
            found.append(matrix if is_smaller else None)
        else:
            found.append(None)
    if sides and rank > max(sides):
        says = f"of which the largest is {max(sides)}"
        raise ValueError(f"rank={rank} is above the smaller side of every kernel, {says}.")
    if leaves and axes is not None and not sides:
        raise ValueError(
            "axes names no kernels, so each leaf would stay at full rank. "
            "optperm.leaf_axes(params, show=True) shows what each leaf is taken for."
        )
    return structure.unflatten(found)


def list_matrices(plans: Any, tree: Any) -> list[Matrix | None]:
    """Return the view of each leaf of a tree as matrices, or None, in the order of the leaves."""
    structure: Any = jax.tree.structure(without_boxes(tree))
    found: list[Matrix | None] = structure.flatten_up_to(plans)
    return found


def find_low_structure(tree: Updates, plans: Any) -> Any:
    """Return the structure of the tree of low-rank leaves, where only leaves at full rank have boxes."""
    matrices = iter(list_matrices(plans, tree))

    def open_box(node: Any) -> Any:
        own = [next(matrices) for _ in jax.tree.leaves(node)]
        return node if None in own else without_boxes(node)

    return jax.tree.structure(jax.tree.map(open_box, tree, is_leaf=is_box))


def restructure(tree: Any, structure: Any) -> Any:
    """Return the leaves of a tree in another structure of as many leaves."""
    return jax.tree.unflatten(structure, jax.tree.leaves(tree))


def describe_axes(plans: Any) -> Any:
    """Return each leaf's axes of stacks, rows and columns, for a fingerprint."""

    def describe(m: Matrix) -> Any:
        rows, columns = (m.projected, m.kept) if m.on_rows else (m.kept, m.projected)
        return m.batch, rows, columns

    return jax.tree.map(describe, plans)


def _make_matrix(
    name: str, shape: tuple[int, ...], axes: LeafAxes, rank: float, side: Side
) -> Matrix:
    m, n = (math.prod(shape[axis] for axis in own) for own in (axes.in_axis, axes.out_axis))
    # The columns of a square matrix, with m = n, are its smaller side.
    on_rows = (m < n) == (side == "smaller")
    pair = (axes.in_axis, axes.out_axis) if on_rows else (axes.out_axis, axes.in_axis)
    r = int(rank) if rank >= 1 else max(1, round(rank * min(m, n)))
    # A reduction of the leaf over the other axes leaves the axes of the stack in this order
    batch = tuple(sorted(axes.batch_axis))
    return Matrix(name, shape, batch, *pair, on_rows, r)


def check_rank(rank: object) -> None:
    """Raise unless the rank is a Python integer of at least 1, or a ratio in (0, 1)."""
    if isinstance(rank, int | np.integer | jax.Array):
        checks.check_static_count("rank", rank)
        return
    wanted = f"rank must be an integer, or a ratio in (0, 1), got {rank!r}."
    if not isinstance(rank, float | np.floating):
        raise TypeError(wanted)
    if not 0 < rank < 1:
        raise ValueError(wanted)


def make_zeros(leaf: Any, shape: tuple[int, ...], dtype: Any, *spec: Any) -> jax.Array:
    """Make zeros on the leaf's mesh, sharded by `spec`, or replicated without a spec."""
    zeros = varying_zeros(leaf, dtype, shape)
    sharding = sharding_of(leaf)
    if sharding is None:
        return zeros
    place = jax.sharding.reshard if isinstance(leaf, jax.core.Tracer) else jax.device_put
    return place(zeros, NamedSharding(sharding.mesh, PartitionSpec(*spec)))


def make_basis_zeros(leaf: Any, matrix: Matrix | None) -> jax.Array:
    """Make zeros for a leaf's bases, sharded like the rows of G, or a single zero at full rank."""
    # At full rank, there is one number, because an array without entries could not be saved.
    dtype = accumulation_dtype(leaf)
    if matrix is None:
        return make_zeros(leaf, (), dtype)
    sharding = sharding_of(matrix.matrices(shard_like(jnp.zeros_like(leaf), leaf)))
    spec = sharding.spec[:-1] if sharding else ()
    return make_zeros(leaf, matrix.basis_shape, dtype, *spec)


def project(basis: jax.Array, g: jax.Array) -> jax.Array:
    r"""Return :math:`R = P^\top G`, (..., r, k), sharded like the columns of G."""
    sharding = explicit_sharding(g)
    if sharding is not None:
        spec = [*sharding.spec, *[None] * (g.ndim - len(sharding.spec))]
        sharding = sharding.update(spec=PartitionSpec(*spec[:-2], None, spec[-1]))
    return product("...dr,...dk->...rk", basis, g.astype(basis.dtype), sharding)


def project_leaf(leaf: jax.Array, matrix: Matrix | None, basis: Any) -> jax.Array:
    r"""Return :math:`R = P^\top G` for a leaf, in the dtype of the basis, or the leaf at full rank.

    If bases are on columns, R' = G' P is computed, so that later operations use the layout of the leaf:
    a loop over arrays of two layouts takes several times as long.
    """
    if matrix is None:
        return leaf
    if matrix.on_rows:
        return project(basis, matrix.matrices(leaf))
    g = matrix.turn(matrix.matrices(leaf)).astype(basis.dtype)
    sharding = explicit_sharding(g)
    if sharding is not None:
        spec = [*sharding.spec, *[None] * (g.ndim - len(sharding.spec))]
        sharding = sharding.update(spec=PartitionSpec(*spec[:-1], None))
    return product("...kd,...dr->...kr", g, basis, sharding)


def lift(matrix: Matrix, basis: jax.Array, low: jax.Array, like: jax.Array) -> jax.Array:
    """Return P R for a low-rank leaf, in the orientation of the leaf, sharded like another array."""
    sharding = explicit_sharding(like)
    if matrix.on_rows:
        return product("...dr,...rk->...dk", basis, low, sharding)
    return product("...kr,...dr->...kd", low, basis, sharding)


def make_batch_zeros(leaf: Any, matrix: Matrix | None, dtype: Any = None) -> jax.Array:
    """Make a zero for each matrix of a leaf, or a single zero at full rank."""
    shape = matrix.batch_shape if matrix else ()
    return make_zeros(leaf, shape, dtype or accumulation_dtype(leaf))


def _make_low_rank_leaf(leaf: Any, matrix: Matrix | None) -> Any:
    """Make the leaf that initializes an optimizer: zeros, sharded like R, or the leaf at full rank."""
    if matrix is None:
        return leaf
    zeros = shard_like(jnp.zeros_like(leaf), leaf)
    return project_leaf(zeros, matrix, make_basis_zeros(leaf, matrix)).astype(zeros.dtype)


def make_low(tree: Any, plans: Any) -> Any:
    """Make the tree that initializes an optimizer: low-rank leaves, and the leaves at full rank."""
    low = jax.tree.map(_make_low_rank_leaf, without_boxes(tree), plans)
    return restructure(low, find_low_structure(tree, plans))


def unzip(pairs: Any, like: Any) -> tuple[Any, Any]:
    """Return two trees with the structure of `like`: the first and the second entries of the pairs."""
    structure: Any = jax.tree.structure(like)
    leaves = structure.flatten_up_to(pairs)
    first, second = ([pair[i] for pair in leaves] for i in (0, 1))
    return structure.unflatten(first), structure.unflatten(second)


def product(
    subscripts: str, a: jax.Array, b: jax.Array, sharding: NamedSharding | None
) -> jax.Array:
    """Return a matrix product in full precision, with the given sharding if there is one."""
    return jnp.einsum(subscripts, a, b, precision=_PRECISION, out_sharding=sharding)
