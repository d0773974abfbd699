"""DLDR: one optimizer that trains all params, then trains in the subspace of the trajectory.

T. Li, L. Tan, Z. Huang, Q. Tao, Y. Liu and X. Huang, "Low Dimensional Trajectory Hypothesis is True:
DNNs Can Be Trained in Tiny Subspaces", TPAMI 2023, arXiv 2103.11154.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import optax

from optperm.core import checks
from optperm.core.control import cond, when
from optperm.core.dtypes import accumulation_dtype, all_finite, cast_like
from optperm.core.fingerprints import UNSET, describe_difference
from optperm.core.mapped_axes import varying_zeros
from optperm.core.shapes import Array, Bool, Float, Int32, Params, PyTree, UInt32, Updates
from optperm.core.shardings import rows_like
from optperm.core.transformation import transformation
from optperm.core.trees import one_row
from optperm.exact import (
    Exact,
    count_mismatches,
    exact_entries,
    mismatch_warnings,
    placing_states,
)
from optperm.subspace._pca import principal_rows
from optperm.subspace._subspace import Subspace, mean_over_replicas, step_where
from optperm.subspace._trajectory import write_row

Restart = Literal["last", "first", "mean"]


class DldrState(NamedTuple):
    """State of `dldr`.

    Until the last snapshot is taken, the rows of the second phase's basis store the first snapshots.

    Attributes:
      count: Number of steps taken.
      num_recorded: Number of snapshots taken.
      inner_state: State of `inner`, the optimizer of the first phase.
      further_snapshots: The snapshots that do not fit into the rows of the basis.
      second: State of the subspace optimizer.
      restart_point: The start of the second phase: the first snapshot, or the mean of the snapshots so
        far, in float32 or float64. With `restart="last"`, it has no leaves.
      is_restarted: Whether the last step set the params to the restart point.
      mismatches: 1 if the step after the restart did not begin at the restart point, up to rounding,
        because something else had moved the params; otherwise 0.
      fingerprint: The arguments `num_snapshots` and `restart` with which the state was made.
    """

    count: Int32[Array, ""]  # type: ignore[assignment]
    num_recorded: Int32[Array, ""]
    inner_state: Any
    further_snapshots: PyTree[Float[Array, "further ?*shape"], "Params"]
    second: Any
    restart_point: Any
    is_restarted: Bool[Array, ""]
    mismatches: Int32[Array, ""]
    fingerprint: UInt32[Array, "2"] = UNSET

    def shaped_by(self) -> tuple[str, ...]:
        """Return the names of the arguments in the fingerprint."""
        return "num_snapshots", "restart"

    def phases(self) -> list[tuple[Any, jax.Array | bool]]:
        """Return the states of both phases, each with a flag: whether this phase is running."""
        (subspace,) = _find_subspaces(self.second)
        return [(self.inner_state, ~subspace.is_set), (self.second, subspace.is_set)]

    def exact(self) -> list[Exact]:
        """Return the exact entries of the current phase, and the start of the second phase."""
        (subspace,) = _find_subspaces(self.second)
        is_second = subspace.is_set & ~self.is_restarted
        first, second = map(exact_entries, (self.inner_state, self.second))
        within = [each.only_if(~subspace.is_set) for each in first]
        within += [each.only_if(is_second) for each in second]
        where = jax.tree.map(lambda _: self.is_restarted, self.restart_point)
        return [
            *within,
            *([Exact(self.restart_point, where, True)] if jax.tree.leaves(where) else []),
        ]

    def warnings(self, params: Any) -> list[str]:
        """Return a sentence if something other than `dldr` has moved the start of the second phase.

        Args:
          params: Not used.
        """
        del params
        return mismatch_warnings("dldr", self.mismatches)

    def replace_targets(self, other: DldrState) -> DldrState:
        """Return this state with the restart point of another state, and whether it is in use.

        Args:
          other: The other state.
        """
        return self._replace(
            restart_point=other.restart_point,
            is_restarted=other.is_restarted,
            mismatches=other.mismatches,
        )


def dldr(
    inner: optax.GradientTransformation,
    subspace_optimizer: optax.GradientTransformation,
    *,
    every: int | jax.Array,
    num_snapshots: int,
    start: int | jax.Array = 0,
    restart: Restart = "last",
) -> optax.GradientTransformationExtraArgs:
    r"""Train with any optimizer, then in the subspace of the principal components of its trajectory.

    `dldr` records the params at steps :math:`t_0, t_0 + T, \dots, t_0 + (m - 1) T`. At the last of these
    steps, it computes the basis :math:`P` of the first :math:`k` principal components
    (`optperm.subspace.pca_basis`). From then on, the subspace optimizer moves the params:

    - `optperm.dim_reduce`: quasi-Newton steps with a line search (P-BFGS if its `alpha` is 0);
    - `optperm.project`: an optimizer that sees the projected gradient :math:`P^\top P g` (P-SGD);
    - `optperm.twa`: an optimizer in the span of the snapshots themselves instead of their differences
      (TWA);
    - or any transformation that contains one of these, such as a chain or `optax.partition`. In
      `optax.partition`, the snapshots and the basis hold the params that the subspace optimizer trains.

    Args:
      inner: The optimizer of the first phase. It must not set exact params as `optperm.sgperm` does.
      subspace_optimizer: The optimizer of the second phase, whose schedules start in this phase. Its
        `n_components` is k, and its `axis_name` is the axis of both phases.
      every: :math:`T \ge 1`, the number of steps from one snapshot to the next.
      num_snapshots: m, the number of snapshots after which the second phase starts: at least k + 1, or
        at least k for `optperm.twa`.
      start: :math:`t_0 \ge 0`, the step of the first snapshot.
      restart: The start of the second phase: the `"last"` snapshot, the `"first"` snapshot as in the
        authors' code, or the `"mean"` of all snapshots.

    Returns:
      A transformation whose state is a `DldrState`. Its `update` needs `params` and, in both phases, the
      extra arguments of the subspace optimizer.

    Example:
      >>> import jax, jax.numpy as jnp, optax, optperm
      >>> scales = jnp.array([1.0, 30.0, 1000.0])  # a valley
      >>> loss_fn = lambda w, batch: jnp.sum(scales * (w - batch) ** 2) / 2
      >>> target = jnp.array([3.0, 2.0, 1.0])
      >>> tx = optperm.dldr(
      ...     optax.sgd(1e-3), optperm.dim_reduce(n_components=3), every=2, num_snapshots=5
      ... )
      >>> def step(carry, _):
      ...     w, opt_state = carry
      ...     e = optperm.evaluate(loss_fn, w, target)
      ...     updates, opt_state = tx.update(e.grad, opt_state, w, **e.extra_args)
      ...     return (optperm.apply_updates(w, updates, opt_state), opt_state), e.value
      >>> w = jnp.zeros(3)
      >>> (w, opt_state), values = jax.lax.scan(step, (w, tx.init(w)), length=40)
      >>> [round(x, 3) for x in w.tolist()]  # 8 steps of SGD, then 32 in the subspace
      [3.0, 2.0, 1.0]

    Notes:
      Both phases are one optimizer, whose state has a fixed structure. One `jax.lax.scan` can therefore
      run through the switch, and training can resume from a checkpoint at any step. Snapshots take the
      memory of m float32 copies of the params, and the basis overwrites them. If all snapshots are
      equal (for `twa`: zero) or not finite, there is no subspace, and the first phase continues.
      `subspace.is_set` in the state of the subspace optimizer is then False.

      With `restart="last"`, the second phase continues from the params at the last snapshot, in the same
      step. Otherwise, this step sets the params exactly to the restart point (with
      `optperm.apply_updates`), and the state always holds one more copy of the params.

      If the subspace optimizer has an `axis_name`, both phases average gradients over this axis, all
      replicas record snapshots, and each replica holds its own rows of the basis. Call `init` within
      the mapped function.

      For CIFAR, the paper takes one snapshot per epoch of SGD, 81 in all, and then trains for 20 epochs
      with batches of 1024 (for ImageNet, m = 121, k = 120, and 4 epochs):

      .. code-block:: python

        optperm.dldr(
            optax.sgd(0.1, momentum=0.9),
            optperm.dim_reduce(
                n_components=40, rho=0.4, alpha=0.0, max_search_steps=20, line_search="mindspore"
            ),
            every=steps_per_epoch, num_snapshots=81, restart="first",
        )

      If none of the 20 trials is accepted, the authors' code takes the last trial, 1e-8 of the step,
      but `dldr` takes no step.

    Raises:
      TypeError: If a number has the wrong type, or a parameter does not have a real floating dtype.
      ValueError: If an argument is out of range, the subspace optimizer does not have exactly one
        subspace, `num_snapshots` is too small for this subspace, `update` gets a state that was made
        with another `num_snapshots` or `restart`, an extra argument is missing,
        `axis_name` is not bound in `init` or `update`, or the trees passed to `update` do not match.

    References:
      Li et al., `Low Dimensional Trajectory Hypothesis is True: DNNs Can Be Trained in Tiny Subspaces
      <https://arxiv.org/abs/2103.11154>`_, 2023
    """
    checks.check_count("every", every)
    checks.check_static_count("num_snapshots", num_snapshots)
    checks.check_count("start", start, minimum=0)
    checks.check_choice("restart", restart, get_args(Restart))
    last_step = start + (num_snapshots - 1) * every
    checks.check_count("start + (num_snapshots - 1) * every", last_step, minimum=0)
    first = checks.as_optimizer("inner", inner)
    then = checks.as_optimizer("subspace_optimizer", subspace_optimizer)

    def init(params: Params) -> DldrState:
        inner_state, second = first.init(params), then.init(params)
        subspace = _find_subspace(second, num_snapshots)
        if placing_states(inner_state):
            raise ValueError(
                "inner sets exact params (as sgperm does), and would overwrite the params of the second "
                "phase: use another inner optimizer."
            )
        # There is at least one row, because an array without entries cannot be saved.
        further = jax.tree.map(
            lambda rows: rows_like(rows[0], max(num_snapshots - rows.shape[0], 1), rows.dtype),
            subspace.rows,
        )
        point = () if restart == "last" else jax.tree.map(_make_wide_zeros, params)
        is_restarted = jnp.zeros([], jnp.bool_)
        return DldrState(
            count=jnp.zeros([], jnp.int32),
            num_recorded=jnp.zeros([], jnp.int32),
            inner_state=inner_state,
            further_snapshots=further,
            second=second,
            restart_point=point,
            is_restarted=is_restarted,
            mismatches=varying_zeros(params, jnp.int32),
        )

    def update(
        updates: Updates, state: DldrState, params: Params, **extra_args: Any
    ) -> tuple[Updates, DldrState]:
        _check_same_snapshots(state, num_snapshots)

        def count_mismatch(count: jax.Array) -> jax.Array:
            return count_mismatches(count, params, cast_like(state.restart_point, params))

        mismatches = state.mismatches
        if restart != "last":  # else there is no restart point
            was_restarted = jnp.asarray(state.is_restarted, jnp.bool_)
            mismatches = when(was_restarted, count_mismatch, mismatches)
        # Record theta at t_0, t_0 + T, ..., t_0 + (m - 1) T; the rows of P store the first snapshots
        recorded = _record(state, params, start, every, num_snapshots, restart)
        subspace, further, point, num_recorded = recorded
        # At the last of these steps, P = the first k components of all snapshots
        is_switch = (state.num_recorded < num_recorded) & (num_recorded == num_snapshots)
        subspace = _compute_components(subspace, further, num_snapshots, is_switch)

        # First phase: theta <- theta + u(g), the step of `inner`
        def in_full() -> tuple[Updates, Any, Any]:
            axis_name = subspace.axis_name
            g, extras = mean_over_replicas(updates, params, extra_args, axis_name)
            moves, new = step_where(all_finite(g), first, g, state.inner_state, params, extras)
            return moves, new, _replace_subspace(state.second, _Placeholder())

        # Second phase: the step of the subspace optimizer
        def in_subspace() -> tuple[Updates, Any, Any]:
            second = _replace_subspace(state.second, subspace)
            moves, new = then.update(updates, second, params, **extra_args)
            new = _replace_subspace(cast_like(new, second), _Placeholder())
            return cast_like(moves, params), state.inner_state, new

        # At the switch, theta <- the first snapshot, or the mean of all snapshots. This is exact with
        # `apply_updates`, and up to rounding with these updates
        def at_restart() -> tuple[Updates, Any, Any]:
            moves = jax.tree.map(lambda to, p: to - p.astype(to.dtype), point, params)
            second = _replace_subspace(state.second, _Placeholder())
            return cast_like(moves, params), state.inner_state, second

        # Without a restart point, the program needs no branch for it.
        is_restarted = (
            jnp.zeros([], jnp.bool_) if restart == "last" else is_switch & subspace.is_set
        )

        def onwards() -> tuple[Updates, Any, Any]:
            # In this order, missing arguments of the second phase raise in the first step, even unjitted
            return cond(jnp.logical_not(subspace.is_set), in_full, in_subspace)

        branches = (is_restarted, at_restart, onwards)
        moves, new, second = onwards() if restart == "last" else cond(*branches)
        return moves, DldrState(
            count=optax.safe_increment(state.count),
            num_recorded=num_recorded,
            inner_state=new,
            further_snapshots=further,
            second=_replace_subspace(second, subspace),
            restart_point=point,
            is_restarted=is_restarted,
            mismatches=mismatches,
            fingerprint=state.fingerprint,
        )

    return transformation(
        init,
        update,
        method="dldr",
        like=lambda state: one_row(_find_subspaces(state.second)[0].rows),
        shape_arguments=lambda _: {"num_snapshots": num_snapshots, "restart": restart},
    )


def _find_subspaces(second: Any) -> list[Subspace]:
    """Return all subspaces in the state of the subspace optimizer, with the containers of the params."""

    def is_subspace(node: Any) -> bool:
        return isinstance(node, Subspace)

    return [node for node in jax.tree.leaves(second, is_leaf=is_subspace) if is_subspace(node)]


class _Placeholder(NamedTuple):
    """A replacement for the subspace in the states that branches return, to avoid copies."""


def _replace_subspace(second: Any, subspace: Any) -> Any:
    """Return the state of the subspace optimizer with another subspace."""

    def is_place(node: Any) -> bool:
        return isinstance(node, Subspace | _Placeholder)

    return jax.tree.map(lambda node: subspace if is_place(node) else node, second, is_leaf=is_place)


def _find_subspace(second: Any, num_snapshots: int) -> Subspace:
    """Return the only subspace of the second phase; raise if there is none, or too few snapshots."""
    found = _find_subspaces(second)
    if len(found) != 1:
        names = "dim_reduce, project or twa"
        raise ValueError(
            f"subspace_optimizer must contain exactly one of {names}, got {len(found)}."
        )
    k = found[0].determined.size
    # Snapshots span one direction fewer after centering.
    least = k + found[0].is_centered
    if num_snapshots < least:
        raise ValueError(
            f"n_components={k} needs num_snapshots of at least {least}, got {num_snapshots}."
        )
    return found[0]


def _check_same_snapshots(state: DldrState, num_snapshots: int) -> None:
    """Raise if a state has room for another number of snapshots, which shows even if it is traced."""
    (subspace,) = _find_subspaces(state.second)
    for rows, further in zip(
        jax.tree.leaves(subspace.rows), jax.tree.leaves(state.further_snapshots), strict=True
    ):
        if further.shape[0] != max(num_snapshots - rows.shape[0], 1):
            raise ValueError(describe_difference("dldr", "num_snapshots"))


def _make_wide_zeros(leaf: Any) -> jax.Array:
    return rows_like(leaf, 1, accumulation_dtype(leaf))[0]


def _record(
    state: DldrState,
    params: Params,
    start: int | jax.Array,
    every: int | jax.Array,
    num_snapshots: int,
    restart: Restart,
) -> tuple[Subspace, Params, Any, jax.Array]:
    """Record the params if a snapshot is due, and update the start of the second phase.

    Return the subspace, whose rows store the first snapshots, the further snapshots, the start, and the
    number of snapshots. This number, not the count of steps, decides where a snapshot goes, so `every`
    and `start` may change during the first phase.
    """
    (subspace,) = _find_subspaces(state.second)
    further, index = state.further_snapshots, state.num_recorded
    # The rows of P store the first snapshots until the basis overwrites them.
    room = next((leaf.shape[0] for leaf in jax.tree.leaves(subspace.rows)), 0)
    since = state.count - jnp.asarray(start, jnp.int32)
    is_due = (since >= 0) & (since % jnp.asarray(every, jnp.int32) == 0)
    is_due = is_due & (index < num_snapshots) & ~subspace.is_set
    rows = write_row(subspace.rows, params, index, is_due & (index < room))
    further = write_row(further, params, index - room, is_due & (index >= room))

    # point <- the first snapshot, or the mean of the snapshots, point + (theta - point) / (i + 1)
    def move(point: Any) -> Any:
        def toward(to: jax.Array, leaf: Any) -> jax.Array:
            number = (index + 1).astype(to.dtype) if restart == "mean" else 1.0
            return to + (jnp.asarray(leaf).astype(to.dtype) - to) / number

        return jax.tree.map(toward, point, params)

    is_part = is_due & ((index == 0) | (restart == "mean"))
    point = state.restart_point
    point = point if restart == "last" else cond(is_part, move, lambda point: point, point)
    return subspace._replace(rows=rows), further, point, index + is_due.astype(jnp.int32)


def _compute_components(
    subspace: Subspace, further: Params, num_snapshots: int, is_switch: jax.Array
) -> Subspace:
    """Overwrite the rows of the subspace with the components of all snapshots, at the switch."""
    k = subspace.determined.size

    def write_components(rows: Params) -> tuple[Params, jax.Array]:
        # P = Lambda_k^(-1/2) U_k' X replaces the first snapshots
        rows, rank = principal_rows(
            rows,
            (further,),
            k,
            num_snapshots=jnp.asarray(num_snapshots, jnp.int32),
            first_row=subspace.own_first_row,
            in_place=True,
            is_centered=subspace.is_centered,
        )
        if subspace.axis_name is not None:  # The rank's type must be the same on all replicas.
            rank = jax.lax.pmin(rank, subspace.axis_name)
        return rows, jnp.arange(k, dtype=jnp.int32) < rank

    def keep(rows: Params) -> tuple[Params, jax.Array]:
        return rows, subspace.determined

    rows, determined = cond(is_switch, write_components, keep, subspace.rows)
    return subspace._replace(rows=rows, determined=determined)
