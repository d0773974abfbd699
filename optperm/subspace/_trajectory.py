"""Record snapshots of the params along a training trajectory in the optimizer state."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optperm.core import checks
from optperm.core.control import cond
from optperm.core.dtypes import accumulation_dtype
from optperm.core.fingerprints import describe_difference
from optperm.core.shapes import Array, Float, Int32, Params, PyTree, Updates
from optperm.core.shardings import rows_like
from optperm.core.states import find_state
from optperm.core.transformation import transformation
from optperm.core.trees import mask_like, one_row


class TrajectoryState(NamedTuple):
    """State of `record_trajectory`.

    Attributes:
      count: Number of steps taken.
      num_recorded: Number of snapshots taken, including overwritten snapshots.
      snapshots: A ring buffer: snapshot i is in row i modulo the number of rows.
    """

    count: Int32[Array, ""]  # type: ignore[assignment]
    num_recorded: Int32[Array, ""]
    snapshots: PyTree[Float[Array, "num_snapshots ?*shape"], "Params"]


def record_trajectory(
    every: int | jax.Array, num_snapshots: int, *, dtype: Any = None
) -> optax.GradientTransformationExtraArgs:
    """Record snapshots of the params, and return the updates unchanged.

    This transformation records the params passed to `update` at steps 0, every, 2 * every, ..., and
    stores the last `num_snapshots` snapshots.

    Args:
      every: The number of steps from one snapshot to the next, at least 1.
      num_snapshots: The maximum number of snapshots, at least 1. Each snapshot takes as much
        memory as the params in `dtype`.
      dtype: The dtype of the snapshots. None for float32, or float64 for float64 params. With
        `jnp.bfloat16`, snapshots take half the memory, but lose changes below about 0.4% of a weight.

    Returns:
      A transformation whose state is a `TrajectoryState`. Its `update` needs `params`.

    Example:
      >>> import jax.numpy as jnp, optax, optperm
      >>> tx = optax.chain(optax.sgd(0.5), optperm.record_trajectory(every=2, num_snapshots=10))
      >>> w = jnp.array([8.0])
      >>> opt_state = tx.init(w)
      >>> for _ in range(4):
      ...     updates, opt_state = tx.update(w, opt_state, w)
      ...     w = optax.apply_updates(w, updates)
      >>> snapshots, count = optperm.subspace.trajectory(opt_state)
      >>> snapshots[:count].tolist()  # at steps 0 and 2
      [[8.0], [2.0]]

    Notes:
      If the state is donated (`jax.jit(step, donate_argnums=...)`) or carried by a `jax.lax.scan`,
      snapshots are written in place, and steps without a snapshot cost almost nothing.

    Raises:
      TypeError: If a count is not an integer, or `dtype` or the dtype of a parameter is not real
        floating.
      ValueError: If an argument is out of range, the trees passed to `update` do not match, or the state
        was made with another `num_snapshots` or `dtype`.
    """
    checks.check_count("every", every)
    checks.check_static_count("num_snapshots", num_snapshots)
    if dtype is not None and not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(f"dtype must be a real floating dtype such as jnp.bfloat16, got {dtype!r}.")

    def init(params: Params) -> TrajectoryState:
        def make_ring(leaf: Any) -> jax.Array:
            return rows_like(
                leaf, num_snapshots, accumulation_dtype(leaf) if dtype is None else dtype
            )

        return TrajectoryState(
            count=jnp.zeros([], jnp.int32),
            num_recorded=jnp.zeros([], jnp.int32),
            snapshots=jax.tree.map(make_ring, params),
        )

    def update(
        updates: Updates, state: TrajectoryState, params: Params, **_: Any
    ) -> tuple[Updates, TrajectoryState]:
        _check_same_rings(state.snapshots, params, num_snapshots, dtype)
        # snapshots[i mod num_snapshots] <- theta, every `every` steps
        is_due = state.count % jnp.asarray(every, jnp.int32) == 0
        snapshots = write_row(state.snapshots, params, state.num_recorded % num_snapshots, is_due)
        recorded = jnp.where(is_due, optax.safe_increment(state.num_recorded), state.num_recorded)
        return updates, TrajectoryState(
            count=optax.safe_increment(state.count), num_recorded=recorded, snapshots=snapshots
        )

    return transformation(
        init,
        update,
        method="record_trajectory",
        like=lambda state: one_row(state.snapshots),
        updates_like="updates",
    )


def _check_same_rings(snapshots: Params, params: Params, num_snapshots: int, dtype: Any) -> None:
    """Raise if ring buffers were made with another number of rows or another dtype."""
    seen = jax.tree.leaves(mask_like(params, snapshots))
    for ring, leaf in zip(jax.tree.leaves(snapshots), seen, strict=True):
        if ring.shape[0] != num_snapshots:
            raise ValueError(describe_difference("record_trajectory", "num_snapshots"))
        if ring.dtype != (accumulation_dtype(leaf) if dtype is None else jnp.dtype(dtype)):
            raise ValueError(describe_difference("record_trajectory", "dtype"))


def write_row(rows: Params, params: Params, index: jax.Array, is_due: jax.Array) -> Params:
    """Overwrite one row with the params, without masked leaves, if `is_due`."""
    params = mask_like(params, rows)

    def write(row: jax.Array, leaf: Any) -> jax.Array:
        new = jnp.asarray(leaf).astype(row.dtype)
        return jax.lax.dynamic_update_index_in_dim(row, new, index, 0)

    return cond(is_due, lambda rows: jax.tree.map(write, rows, params), lambda rows: rows, rows)


def trajectory(opt_state: Any) -> tuple[Params, jax.Array]:
    """Return the snapshots of `optperm.record_trajectory`, oldest first, and their number.

    Pass both results on: `optperm.subspace.pca_basis(snapshots, k, num_snapshots=count)`. To use the
    snapshots in another run, save them with Orbax like any tree of arrays, in bfloat16 if memory is
    scarce.

    Args:
      opt_state: The optimizer state, in any nesting.

    Returns:
      A tree like params whose leaves have a leading axis of `num_snapshots`, with the valid rows first
      and zeros after them, and the number of valid rows, int32 (). If `jax.vmap` or `jax.pmap` has made
      the state for many runs, the results have the leading axes of the state, as if this function were
      mapped. In this case, also map `pca_basis`:
      `jax.vmap(lambda s, n: optperm.subspace.pca_basis(s, k, num_snapshots=n))(snapshots, count)`.

    Example:
      >>> import jax.numpy as jnp, optperm
      >>> tx = optperm.record_trajectory(every=1, num_snapshots=2)
      >>> opt_state = tx.init(jnp.zeros(1))
      >>> for w in (jnp.array([1.0]), jnp.array([2.0]), jnp.array([3.0])):
      ...     _, opt_state = tx.update(w, opt_state, w)
      >>> snapshots, count = optperm.subspace.trajectory(opt_state)
      >>> snapshots.tolist(), int(count)
      ([[2.0], [3.0]], 2)

    Raises:
      ValueError: If `opt_state` does not contain exactly one `TrajectoryState`.
    """
    state = find_state(opt_state, TrajectoryState, method="record_trajectory")
    sort = _sort_rings
    for _ in range(state.num_recorded.ndim):  # the axes of many runs
        sort = jax.vmap(sort)
    return sort(state.snapshots, state.num_recorded)


def _sort_rings(rings: Params, num_recorded: jax.Array) -> tuple[Params, jax.Array]:
    """Return the rows of ring buffers, oldest first, and the number of valid rows."""

    def sort_ring(ring: jax.Array) -> jax.Array:
        length = ring.shape[0]
        # If the ring is full, the oldest snapshot is in the row that is overwritten next.
        start = jnp.where(num_recorded > length, num_recorded % length, 0)
        return jnp.roll(ring, -start, axis=0)

    length = next((leaf.shape[0] for leaf in jax.tree.leaves(rings)), 0)
    valid = jnp.minimum(num_recorded, jnp.asarray(length, jnp.int32))
    return jax.tree.map(sort_ring, rings), valid
