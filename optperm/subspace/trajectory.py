"""Snapshots of the params along a training trajectory, kept in the optimizer state."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optperm.contract import checks
from optperm.contract.dtypes import accumulation_dtype
from optperm.contract.mapped_axes import cond
from optperm.contract.shardings import rows_like
from optperm.contract.states import find_state, one_row
from optperm.contract.transformation import transformation

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int32, PyTree


class TrajectoryState(NamedTuple):
    """State of `record_trajectory`.

    Attributes:
      count: Steps taken.
      num_recorded: Snapshots taken, those overwritten since included.
      snapshots: A ring: the i-th snapshot is in row i modulo the capacity.
    """

    count: Int32[Array, ""]  # type: ignore[assignment]
    num_recorded: Int32[Array, ""]
    snapshots: PyTree[Float[Array, "capacity ?*shape"], "Params"]


def record_trajectory(
    every: int | jax.Array, capacity: int, *, dtype: Any = None
) -> optax.GradientTransformationExtraArgs:
    """Keeps snapshots of the params, and leaves the updates as they are.

    The params passed to `update` at steps 0, every, 2 * every, ... are recorded, the last `capacity` of
    them. Steps in between cost nothing where the state is donated (`jax.jit(step, donate_argnums=...)`)
    or carried by a `jax.lax.scan`: a snapshot is then written in place.

    Args:
      every: Steps from one snapshot to the next, at least 1.
      capacity: The most snapshots to keep, at least 1. They take that many times the params' memory.
      dtype: The dtype to keep them in; None for float32, and float64 for float64 params. With
        `jnp.bfloat16` they take half the memory, and displacements below about 0.4 % of a weight are
        lost.

    Returns:
      A transformation whose state is a `TrajectoryState`. Its `update` needs `params`.

    Example:
      >>> import jax.numpy as jnp, optax, optperm
      >>> tx = optax.chain(optax.sgd(0.5), optperm.record_trajectory(every=2, capacity=10))
      >>> w = jnp.array([8.0])
      >>> opt_state = tx.init(w)
      >>> for _ in range(4):
      ...     updates, opt_state = tx.update(w, opt_state, w)
      ...     w = optax.apply_updates(w, updates)
      >>> snapshots, count = optperm.trajectory(opt_state)
      >>> snapshots[:count].tolist()  # at steps 0 and 2
      [[8.0], [2.0]]

    Raises:
      TypeError: If an argument is of the wrong type, or a parameter is not of a real floating dtype.
      ValueError: If an argument is out of range, or the trees passed to `update` do not match.
    """
    checks.check_count("every", every)
    checks.check_static_count("capacity", capacity)
    if dtype is not None:
        _check_dtype(dtype)

    def init(params: optax.Params) -> TrajectoryState:
        def ring(leaf: Any) -> jax.Array:
            return rows_like(leaf, capacity, accumulation_dtype(leaf) if dtype is None else dtype)

        return TrajectoryState(
            count=jnp.zeros([], jnp.int32),
            num_recorded=jnp.zeros([], jnp.int32),
            snapshots=jax.tree.map(ring, params),
        )

    def update(
        updates: optax.Updates, state: TrajectoryState, params: optax.Params, **_: Any
    ) -> tuple[optax.Updates, TrajectoryState]:
        is_due = state.count % jnp.asarray(every, jnp.int32) == 0
        snapshots = write_row(state.snapshots, params, state.num_recorded % capacity, is_due)
        recorded = jnp.where(is_due, optax.safe_increment(state.num_recorded), state.num_recorded)
        return updates, TrajectoryState(optax.safe_increment(state.count), recorded, snapshots)

    return transformation(
        init,
        update,
        method="record_trajectory",
        like=lambda state: one_row(state.snapshots),
        dtypes=False,
        updates_like="updates",
    )


def _check_dtype(dtype: Any) -> None:
    try:
        is_array = isinstance(dtype, jax.Array | np.ndarray | np.generic)
        is_floating = not is_array and jnp.issubdtype(np.dtype(dtype), jnp.floating)
    except (TypeError, ValueError):
        is_floating = False
    if not is_floating:
        raise TypeError(f"dtype must be a real floating dtype such as jnp.bfloat16, got {dtype!r}.")


def write_row(
    rows: optax.Params, params: optax.Params, index: jax.Array, is_due: jax.Array
) -> optax.Params:
    """Writes params over one row where that is due."""

    def write(row: jax.Array, leaf: Any) -> jax.Array:
        new = jnp.asarray(leaf).astype(row.dtype)
        return jax.lax.dynamic_update_index_in_dim(row, new, index, 0)

    return cond(is_due, lambda rows: jax.tree.map(write, rows, params), lambda rows: rows, rows)


def trajectory(opt_state: Any) -> tuple[optax.Params, jax.Array]:
    """The snapshots that `optperm.record_trajectory` has kept, oldest first, and how many there are.

    `optperm.pca_basis` takes both: `pca_basis(snapshots, k, num_snapshots=count)`. To go on in another
    run, save them with Orbax like any tree of arrays, in bfloat16 if memory is short.

    Args:
      opt_state: The optimizer state, in any nesting.

    Returns:
      A tree like params whose leaves have a leading axis of the capacity, of which the first rows are
      valid and the others zero, and the number of valid ones, int32 ().

    Example:
      >>> import jax.numpy as jnp, optperm
      >>> tx = optperm.record_trajectory(every=1, capacity=2)
      >>> opt_state = tx.init(jnp.zeros(1))
      >>> for w in (jnp.array([1.0]), jnp.array([2.0]), jnp.array([3.0])):
      ...     _, opt_state = tx.update(w, opt_state, w)
      >>> snapshots, count = optperm.trajectory(opt_state)
      >>> snapshots.tolist(), int(count)
      ([[2.0], [3.0]], 2)

    Raises:
      ValueError: If there is no such state in `opt_state`, or more than one.
    """
    state = find_state(opt_state, TrajectoryState, method="record_trajectory")

    def in_order(ring: jax.Array) -> jax.Array:
        capacity = ring.shape[0]
        start = jnp.where(state.num_recorded > capacity, state.num_recorded % capacity, 0)
        return jnp.roll(ring, -start, axis=0)

    capacity = next((leaf.shape[0] for leaf in jax.tree.leaves(state.snapshots)), 0)
    valid = jnp.minimum(state.num_recorded, jnp.asarray(capacity, jnp.int32))
    return jax.tree.map(in_order, state.snapshots), valid
