"""The leaves of a tree as matrices: which of them are projected, along which axes, and to what rank.

All that works on them sees (..., d, k), d being the side on which the basis stands.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec
from optax.contrib import GaLoreDimensionNumbers

from optperm.contract import checks
from optperm.contract.dtypes import accumulation_dtype
from optperm.contract.mapped_axes import mark_varying, varying_axes
from optperm.contract.shardings import explicit_sharding, shard_like, sharding_of

Side = Literal["smaller", "larger"]
# Axes of leaves: `optax.contrib.GaLoreDimensionNumbers`, a tree of these and of None, or a function.
DimensionNumbers: TypeAlias = Any
# On accelerators float32 products lose half their digits by default.
_PRECISION = jax.lax.Precision.HIGHEST


@dataclasses.dataclass(frozen=True)
class Matrix:
    """How a leaf is seen as matrices G, (..., d, k), whose rank is reduced on the side of d.

    Attributes:
      name: The path of the leaf, for messages.
      shape: Its shape.
      batch: The axes along which it is a stack of matrices.
      projected: The axes that are merged into d.
      kept: The axes that are merged into k.
      on_rows: Whether d is the matrix's first side, so that low-rank leaves are (..., r, k), else
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
        """The side on which the basis stands."""
        return math.prod(self.shape[axis] for axis in self.projected)

    @property
    def k(self) -> int:
        """The other side."""
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
        # Of axes that are merged the first one alone can stay cut.
        start = len(self.batch)
        heads = {*range(start), start, start + len(self.projected)}
        spec = [*sharding.spec, *[None] * (x.ndim - len(sharding.spec))]
        some = [axis if i in heads else None for i, axis in enumerate(spec)]
        x = jax.sharding.reshard(x, sharding.update(spec=PartitionSpec(*some)))
        merged = PartitionSpec(*(axis for i, axis in enumerate(some) if i in heads))
        return jax.lax.reshape(x, shape, out_sharding=sharding.update(spec=merged))

    def leaf(self, matrices: jax.Array) -> jax.Array:
        """Return (..., d, k) as the leaf that it was."""
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

    @property
    def rank_axis(self) -> int:
        """The axis of a low-rank leaf along which R has its r rows."""
        return -2 if self.on_rows else -1

    def turn(self, x: jax.Array) -> jax.Array:
        """Return R, (..., r, k), or G as the leaf has it: transposed where bases stand on columns.

        It is the same both ways.
        """
        return x if self.on_rows else jnp.swapaxes(x, -1, -2)


def matrices_of(
    tree: optax.Updates, rank: float, side: Side, dimension_numbers: DimensionNumbers | None
) -> list[Matrix | None]:
    """Return, for each leaf, the matrices that it is projected as, or None if it stays at full rank.

    Args:
      tree: Params or updates.
      rank: r, or the share of the smaller side that it is.
      side: The side on which bases stand; of a square matrix the columns are the smaller one.
      dimension_numbers: The axes of the leaves to project; None for those of exactly two axes whose
        state becomes smaller.
    """
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    numbers: Sequence[Any] = [None] * len(leaves)
    if dimension_numbers is not None and leaves:
        given = dimension_numbers(tree) if callable(dimension_numbers) else dimension_numbers
        if isinstance(given, GaLoreDimensionNumbers):
            given = jax.tree.map(lambda leaf: given if jnp.ndim(leaf) >= 2 else None, tree)
        structure: Any = jax.tree.structure(tree)
        try:
            numbers = structure.flatten_up_to(given)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"dimension_numbers must have one entry for each leaf of params: {error}"
            ) from error
    found: list[Matrix | None] = []
    for (path, leaf), number in zip(leaves, numbers, strict=True):
        name, shape = f"params{jax.tree_util.keystr(path)}", jnp.shape(leaf)
        if number is not None:
            matrix = _matrix(name, shape, number, rank, side)
            if rank > min(matrix.d, matrix.k):
                raise ValueError(
                    f"rank={rank} is above the smaller side {min(matrix.d, matrix.k)} of {name}, which "
                    "dimension_numbers names: give a smaller rank, or None for that leaf."
                )
            found.append(matrix if matrix.rank < min(matrix.d, matrix.k) else None)
        elif dimension_numbers is None and len(shape) == 2 and 0 not in shape:
            matrix = _matrix(name, shape, GaLoreDimensionNumbers(), rank, side)
            d, k, r = matrix.d, matrix.k, matrix.rank
            found.append(matrix if r < min(d, k) and d * r + 2 * r * k < 2 * d * k else None)
        else:
            found.append(None)
    sides = [min(jnp.shape(leaf)) for _, leaf in leaves if jnp.ndim(leaf) == 2 and jnp.size(leaf)]
    if dimension_numbers is None and sides and rank > max(sides):
        raise ValueError(
            f"rank={rank} is above the smaller side of every matrix, of which the largest is "
            f"{max(sides)}, and nothing would be projected: give a smaller one, or a share."
        )
    return found


def _matrix(
    name: str, shape: tuple[int, ...], numbers: GaLoreDimensionNumbers, rank: float, side: Side
) -> Matrix:
    if not isinstance(numbers, GaLoreDimensionNumbers):
        raise TypeError(
            "dimension_numbers must be an optax.contrib.GaLoreDimensionNumbers, a tree like params of "
            f"them and of None, or a function from params to one, got {numbers!r} for {name}."
        )
    rows, columns = (
        (axes,) if isinstance(axes, int) else tuple(axes)
        for axes in (numbers.reduction_axis, numbers.output_axis)
    )
    axes = [*rows, *columns]
    in_range = all(-len(shape) <= axis < len(shape) for axis in axes)
    if (
        not in_range
        or len({axis % len(shape) for axis in axes}) < len(axes)
        or not rows
        or not columns
    ):
        raise ValueError(
            f"dimension_numbers of {name}, of shape {shape}, must name each of its axes at most once "
            f"and at least one on each side, got {numbers}."
        )
    rows = tuple(axis % len(shape) for axis in rows)
    columns = tuple(axis % len(shape) for axis in columns)
    batch = tuple(axis for axis in range(len(shape)) if axis not in rows + columns)
    m, n = (math.prod(shape[axis] for axis in axes) for axes in (rows, columns))
    on_rows = (m < n) == (side == "smaller")
    projected, kept = (rows, columns) if on_rows else (columns, rows)
    r = int(rank) if rank >= 1 else max(1, round(rank * min(m, n)))
    return Matrix(name, shape, batch, projected, kept, on_rows, r)


def check_projection(rank: object, side: object) -> None:
    """Raise unless rank is one that matrices may be reduced to, and side names one of theirs.

    Raises:
      TypeError: If rank is no plain number.
      ValueError: If rank or side are out of range.
    """
    if isinstance(rank, float | np.floating):
        if not 0 < rank < 1:
            raise ValueError(
                "rank must be an integer of at least 1, or a share in (0, 1) of the smaller side, got "
                f"{rank!r}."
            )
    else:
        checks.check_static_count("rank", rank)
    checks.check_choice("side", side, get_args(Side))


class LeafReport(NamedTuple):
    """What `optperm.low_rank_report` says of one leaf.

    Attributes:
      name: Its path.
      shape: Its shape.
      matrices: The number of its matrices and their sides, (batch, d, k); None at full rank.
      on_rows: Whether its bases stand on rows, the side of `reduction_axis`.
      rank: r, or 0 at full rank.
      words: The words of state that it takes.
      full_words: Those that it would take at full rank.
    """

    name: str
    shape: tuple[int, ...]
    matrices: tuple[int, int, int] | None
    on_rows: bool
    rank: int
    words: float
    full_words: float


# What `note` writes to while a report is made.
_REPORT: contextvars.ContextVar[list[LeafReport] | None] = contextvars.ContextVar(
    "report", default=None
)


def note(
    params: optax.Params,
    plans: Sequence[Matrix | None],
    low: optax.Params,
    inner_state: Any,
    *,
    has_basis: bool,
) -> None:
    """Write down what becomes of each leaf, if a report is being made."""
    report = _REPORT.get()
    if report is None:
        return
    # The words that the optimizer takes for each entry that it sees: 2 of Adam.
    lows = [math.prod(leaf.shape) for leaf in jax.tree.leaves(low)]
    words = sum(leaf.size for leaf in jax.tree.leaves(inner_state)) / max(sum(lows), 1)
    paths = jax.tree_util.tree_leaves_with_path(params)
    for (path, leaf), matrix, size in zip(paths, plans, lows, strict=True):
        basis = math.prod(matrix.basis_shape) if matrix and has_basis else 0
        of = (math.prod(matrix.batch_shape), matrix.d, matrix.k) if matrix else None
        report.append(
            LeafReport(
                jax.tree_util.keystr(path),
                jnp.shape(leaf),
                of,
                bool(matrix and matrix.on_rows),
                matrix.rank if matrix else 0,
                words * size + basis,
                words * math.prod(jnp.shape(leaf)),
            )
        )


@contextlib.contextmanager
def reporting() -> Iterator[list[LeafReport]]:
    """Collect what every low-rank transformation that is initialized within this says of its leaves."""
    report: list[LeafReport] = []
    token = _REPORT.set(report)
    try:
        yield report
    finally:
        _REPORT.reset(token)


def zeros_beside(leaf: Any, shape: tuple[int, ...], dtype: Any, *spec: Any) -> jax.Array:
    """Return zeros on the leaf's mesh, cut along its axes as a spec says, or whole."""
    zeros = mark_varying(jnp.zeros(shape, dtype), varying_axes(leaf))
    sharding = sharding_of(leaf)
    if sharding is None:
        return zeros
    place = jax.sharding.reshard if isinstance(leaf, jax.core.Tracer) else jax.device_put
    return place(zeros, NamedSharding(sharding.mesh, PartitionSpec(*spec)))


def basis_zeros(leaf: Any, matrix: Matrix | None) -> jax.Array:
    """Return the place of a leaf's bases, which lie where the rows of G lie, or () at full rank."""
    dtype = accumulation_dtype(leaf)
    if matrix is None:
        return zeros_beside(leaf, (), dtype)
    sharding = sharding_of(matrix.matrices(shard_like(jnp.zeros_like(leaf), leaf)))
    spec = sharding.spec[:-1] if sharding else ()
    return zeros_beside(leaf, matrix.basis_shape, dtype, *spec)


def project(basis: jax.Array, g: jax.Array) -> jax.Array:
    r"""Return :math:`R = P^\top G`, (..., r, k), which lies where the columns of G lie."""
    sharding = explicit_sharding(g)
    if sharding is not None:
        spec = [*sharding.spec, *[None] * (g.ndim - len(sharding.spec))]
        sharding = sharding.update(spec=PartitionSpec(*spec[:-2], None, spec[-1]))
    return product("...dr,...dk->...rk", basis, g.astype(basis.dtype), sharding)


def project_leaf(matrix: Matrix, basis: jax.Array, leaf: jax.Array) -> jax.Array:
    r"""Return :math:`R = P^\top G` of a leaf as its low-rank leaf, in the dtype of the basis.

    Where bases stand on columns, R' = G' P is computed. What follows is then laid out as the leaf:
    a loop over arrays of two layouts takes several times as long.
    """
    if matrix.on_rows:
        return project(basis, matrix.matrices(leaf))
    g = matrix.turn(matrix.matrices(leaf)).astype(basis.dtype)
    sharding = explicit_sharding(g)
    if sharding is not None:
        spec = [*sharding.spec, *[None] * (g.ndim - len(sharding.spec))]
        sharding = sharding.update(spec=PartitionSpec(*spec[:-1], None))
    return product("...kd,...dr->...kr", g, basis, sharding)


def lift(matrix: Matrix, basis: jax.Array, low: jax.Array, like: jax.Array) -> jax.Array:
    """Return P R of a low-rank leaf, turned as the leaf, where an array of that shape lies."""
    sharding = explicit_sharding(like)
    if matrix.on_rows:
        return product("...dr,...rk->...dk", basis, low, sharding)
    return product("...kr,...dr->...kd", low, basis, sharding)


def zeros_of_batch(leaf: Any, matrix: Matrix | None, dtype: Any = None) -> jax.Array:
    """Return a zero for each matrix of a leaf, or a single one at full rank."""
    shape = matrix.batch_shape if matrix else ()
    return zeros_beside(leaf, shape, dtype or accumulation_dtype(leaf))


def map_plans(
    function: Callable[[Any, Matrix | None], Any],
    tree: optax.Params,
    plans: Sequence[Matrix | None],
) -> optax.Params:
    """Return the tree of what a function makes of each leaf and how it is projected."""
    structure: Any = jax.tree.structure(tree)
    return structure.unflatten(map(function, jax.tree.leaves(tree), plans))


def low_rank_like(leaf: Any, matrix: Matrix | None) -> Any:
    """Return what an optimizer is initialized with: zeros that lie where the columns of G lie."""
    if matrix is None:
        return leaf
    zeros = shard_like(jnp.zeros_like(leaf), leaf)
    return project_leaf(matrix, basis_zeros(leaf, matrix), zeros).astype(zeros.dtype)


def low_rank_leaves(
    updates: optax.Updates, plans: Sequence[Matrix | None], low: Sequence[jax.Array]
) -> optax.Updates:
    """Return the tree that an optimizer sees: low-rank leaves of R, in the dtypes of updates."""
    structure: Any = jax.tree.structure(updates)
    return structure.unflatten(
        r if m is None else r.astype(leaf.dtype)
        for leaf, m, r in zip(jax.tree.leaves(updates), plans, low, strict=True)
    )


def product(
    subscripts: str, a: jax.Array, b: jax.Array, sharding: NamedSharding | None
) -> jax.Array:
    """Return a product of matrices in full precision, laid out as the sharding says, if there is one."""
    return jnp.einsum(subscripts, a, b, precision=_PRECISION, out_sharding=sharding)
