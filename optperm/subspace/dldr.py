"""DLDR: training in full, then in the subspace that the trajectory spans, as one optimizer.

T. Li, L. Tan, Z. Huang, Q. Tao, Y. Liu and X. Huang, "Low Dimensional Trajectory Hypothesis is True:
DNNs Can Be Trained in Tiny Subspaces", TPAMI 2023, arXiv 2103.11154.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import optax

from optperm.contract import checks
from optperm.contract.dtypes import accumulation_dtype, all_finite, cast_like
from optperm.contract.mapped_axes import cond
from optperm.contract.shardings import rows_like
from optperm.contract.states import one_row
from optperm.contract.transformation import transformation
from optperm.placement import Placement, placing_states
from optperm.subspace.pca import principal_rows
from optperm.subspace.phases import mean_over_replicas, step_where
from optperm.subspace.subspace import Subspace
from optperm.subspace.trajectory import write_row

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int32, PyTree

Restart = Literal["last", "first", "mean"]


class DldrState(NamedTuple):
    """State of `dldr`.

    Until the last snapshot is taken, the rows of the second phase's basis hold the first snapshots.

    Attributes:
      count: Steps taken.
      optimizer_state: State of the optimizer of the first phase.
      further_snapshots: The snapshots for which the basis has no room.
      second: State of the subspace optimizer.
      restart_point: Where the second phase begins: the first snapshot, or the mean of those so far, in
        float32 or float64; without leaves if that is the last one.
      is_restarted: Whether the last step put the params there.
    """

    count: Int32[Array, ""]  # type: ignore[assignment]
    optimizer_state: Any
    further_snapshots: PyTree[Float[Array, "further ?*shape"], "Params"]
    second: Any
    restart_point: Any
    is_restarted: Bool[Array, ""]

    def placements(self) -> list[Placement]:
        """The point where the second phase begins, at the step that puts the params there."""
        if not jax.tree.leaves(self.restart_point):
            return []
        return [(self.restart_point, self.is_restarted)]

    def replace_targets(self, other: DldrState) -> DldrState:
        """This state with the restart point of another one.

        Args:
          other: That one.
        """
        return self._replace(restart_point=other.restart_point)


def dldr(
    optimizer: optax.GradientTransformation,
    subspace_optimizer: optax.GradientTransformation,
    *,
    sample_every: int | jax.Array,
    num_samples: int,
    start: int | jax.Array = 0,
    restart: Restart = "last",
) -> optax.GradientTransformationExtraArgs:
    r"""Trains with any optimizer, then in the subspace of the largest components of its trajectory.

    The params at steps :math:`t_0, t_0 + T, \dots, t_0 + (m - 1) T` are kept. With the last of them the
    basis :math:`P` of their first :math:`k` principal components is computed (`optperm.pca_basis`),
    and from that step on the params move by the subspace optimizer:

    - `optperm.dim_reduce`, quasi-Newton steps with a line search (P-BFGS if its `alpha` is 0);
    - `optperm.project`, an optimizer that sees the projected gradient :math:`P^\top P g` (P-SGD);
    - `optperm.twa`, whose basis is that of the snapshots themselves, not of what differs in them (TWA);
    - or any transformation with one of these in it, such as a chain.

    The two phases are one optimizer with one state, whose form never changes: it runs in a
    `jax.lax.scan` through the switch, and resumes from a checkpoint at any step. The snapshots take the
    memory of m params, and the basis is written over them. Under `jax.vmap` (not over an axis of
    replicas but over independent trainings) both phases and the basis are computed in every step. Where
    the snapshots do not differ (for `twa`: are zero), or are not finite, there is no subspace, and the
    first phase goes on; `subspace.is_set` in the state of the subspace optimizer tells.

    With `restart="last"` the second phase goes on from the params as they are at the last snapshot, in
    that step. Else that step puts them on another point, exactly (with `optperm.apply_updates`), and
    moves no further: on the first snapshot, as the authors' code does, or on the mean of all. In
    between a copy of the params is kept.

    A gradient that is not finite skips the step, in both phases. Where the subspace optimizer has an
    `axis_name`, gradients are averaged over it in both phases, snapshots are kept by all replicas, and
    each holds its rows of the basis; call `init` within the mapped function.

    The paper's setting for CIFAR takes one snapshot an epoch by SGD, 81 in all, then 20 epochs
    with batches of 1024 (for ImageNet m = 121, k = 120 and 4 epochs):

    .. code-block:: python

      optperm.dldr(
          optax.sgd(0.1, momentum=0.9),
          optperm.dim_reduce(
              n_components=40, rho=0.4, alpha=0.0, max_search_steps=20, line_search="mindspore"
          ),
          sample_every=steps_per_epoch, num_samples=81, restart="first",
      )

    Where none of the 20 trials is accepted, which are down to 1e-8 of the step then, the authors take
    the last of them, and this takes none.

    Args:
      optimizer: The optimizer of the first phase. Not one that places params, such as
        `optperm.sgperm`.
      subspace_optimizer: The one of the second phase, whose schedules begin with it. Its
        `n_components` is k, and its `axis_name` that of both phases.
      sample_every: :math:`T \ge 1`, the steps from one snapshot to the next.
      num_samples: m, the snapshots with whose last one the second phase begins, at least k + 1, or k for
        `optperm.twa`.
      start: :math:`t_0 \ge 0`, the step at which the first snapshot is taken.
      restart: Where the second phase begins: at the params of the `"last"` snapshot, of the `"first"`
        one, or at the `"mean"` of all.

    Returns:
      A transformation whose state is a `DldrState`. Its `update` needs `params`, and in both phases the
      extra arguments that the subspace optimizer needs.

    Example:
      >>> import jax, jax.numpy as jnp, optax, optperm
      >>> scales = jnp.array([1.0, 30.0, 1000.0])  # a valley
      >>> loss_fn = lambda w, batch: jnp.sum(scales * (w - batch) ** 2) / 2
      >>> target = jnp.array([3.0, 2.0, 1.0])
      >>> tx = optperm.dldr(
      ...     optax.sgd(1e-3), optperm.dim_reduce(n_components=3), sample_every=2, num_samples=5
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

    Raises:
      TypeError: If an argument is of the wrong type, or a parameter is not of a real floating dtype.
      ValueError: If an argument is out of range, the subspace optimizer holds no subspace or several,
        there are too few samples for it, an extra argument is missing, its `axis_name` is not bound
        where `init` or `update` is called, or the trees passed to `update` do not match.

    References:
      Li et al., `Low Dimensional Trajectory Hypothesis is True: DNNs Can Be Trained in Tiny Subspaces
      <https://arxiv.org/abs/2103.11154>`_, 2023
    """
    checks.check_transformation("optimizer", optimizer)
    checks.check_transformation("subspace_optimizer", subspace_optimizer)
    checks.check_count("sample_every", sample_every)
    checks.check_static_count("num_samples", num_samples)
    checks.check_count("start", start, minimum=0)
    checks.check_choice("restart", restart, get_args(Restart))
    _check_last_step(start, num_samples, sample_every)
    first = optax.with_extra_args_support(optimizer)
    then = optax.with_extra_args_support(subspace_optimizer)

    def init(params: optax.Params) -> DldrState:
        optimizer_state, second = first.init(params), then.init(params)
        subspace = _subspace_of(second, num_samples)
        if placing_states(optimizer_state):
            raise ValueError(
                "optimizer places params where its own state says, and would keep them there in the "
                "second phase: use one that moves them."
            )
        # One at least: an array without entries cannot be saved.
        further = jax.tree.map(
            lambda rows: rows_like(rows[0], max(num_samples - rows.shape[0], 1), rows.dtype),
            subspace.rows,
        )
        point = () if restart == "last" else jax.tree.map(_wide_zeros, params)
        count, is_restarted = jnp.zeros([], jnp.int32), jnp.zeros([], jnp.bool_)
        return DldrState(count, optimizer_state, further, second, point, is_restarted)

    def update(
        updates: optax.Updates, state: DldrState, params: optax.Params, **extra_args: Any
    ) -> tuple[optax.Updates, DldrState]:
        # The samples theta at t_0, t_0 + T, ..., t_0 + (m - 1) T, the first of them in the rows of P
        last = jnp.asarray(start + (num_samples - 1) * sample_every, jnp.int32)
        subspace, further, point = _record(state, params, start, sample_every, last, restart)
        # P = the first k components of all samples, with the last of them
        is_switch = (state.count == last) & ~subspace.is_set
        subspace = _with_components(subspace, further, num_samples, is_switch)

        # Until then theta <- theta + u(g), the optimizer's step
        def in_full() -> tuple[optax.Updates, Any, Any]:
            axis_name = subspace.axis_name
            g, extras = mean_over_replicas(updates, params, extra_args, axis_name)
            moves, new = step_where(all_finite(g), first, g, state.optimizer_state, params, extras)
            return moves, new, _with_subspace(state.second, _Elsewhere())

        # From then on the step of the second phase, in the subspace
        def in_subspace() -> tuple[optax.Updates, Any, Any]:
            second = _with_subspace(state.second, subspace)
            moves, new = then.update(updates, second, params, **extra_args)
            new = _with_subspace(cast_like(new, second), _Elsewhere())
            return cast_like(moves, params), state.optimizer_state, new

        # But for the step that puts theta on the first sample, or on the mean of all
        def at_restart() -> tuple[optax.Updates, Any, Any]:
            moves = jax.tree.map(lambda to, p: to - p.astype(to.dtype), point, params)
            second = _with_subspace(state.second, _Elsewhere())
            return cast_like(moves, params), state.optimizer_state, second

        is_restarted = (
            jnp.zeros([], jnp.bool_) if restart == "last" else is_switch & subspace.is_set
        )

        def onwards() -> tuple[optax.Updates, Any, Any]:
            return cond(subspace.is_set, in_subspace, in_full)

        branches = (is_restarted, at_restart, onwards)
        moves, new, second = onwards() if restart == "last" else cond(*branches)
        second, count = _with_subspace(second, subspace), optax.safe_increment(state.count)
        return moves, DldrState(count, new, further, second, point, is_restarted)

    return transformation(
        init,
        update,
        method="dldr",
        like=lambda state: one_row(_subspaces(state.second)[0].rows),
        dtypes=False,
    )


def _subspaces(second: Any) -> list[Subspace]:
    """Those in the state of the subspace optimizer, with the leaves of the params' own containers."""

    def is_subspace(node: Any) -> bool:
        return isinstance(node, Subspace)

    return [node for node in jax.tree.leaves(second, is_leaf=is_subspace) if is_subspace(node)]


class _Elsewhere(NamedTuple):
    """Stands for the subspace, which no branch has to hand on."""


def _with_subspace(second: Any, subspace: Any) -> Any:
    """The state of the subspace optimizer with another subspace in its place."""

    def is_place(node: Any) -> bool:
        return isinstance(node, Subspace | _Elsewhere)

    return jax.tree.map(lambda node: subspace if is_place(node) else node, second, is_leaf=is_place)


def _subspace_of(second: Any, num_samples: int) -> Subspace:
    """The subspace in the state of the subspace optimizer."""
    found = _subspaces(second)
    if len(found) != 1:
        raise ValueError(
            f"subspace_optimizer must hold one subspace, got {len(found) or 'none'}: pass "
            "optperm.dim_reduce(...), optperm.project(...) or optperm.twa(...), alone or in a chain."
        )
    subspace = found[0]
    k, centered = subspace.determined.size, int(subspace.is_centered)
    if num_samples < k + centered:
        why = " (centered, m samples span m - 1 directions)" if centered else ""
        raise ValueError(
            f"n_components={k} needs num_samples of at least {k + centered}{why}, got {num_samples}."
        )
    return subspace


def _check_last_step(start: Any, num_samples: int, sample_every: Any) -> None:
    if not any(isinstance(each, jax.core.Tracer) for each in (start, sample_every)):
        last = int(start) + (num_samples - 1) * int(sample_every)
        checks.check_count("start + (num_samples - 1) * sample_every", last, minimum=0)


def _wide_zeros(leaf: Any) -> jax.Array:
    return rows_like(leaf, 1, accumulation_dtype(leaf))[0]


def _record(
    state: DldrState,
    params: optax.Params,
    start: int | jax.Array,
    every: int | jax.Array,
    last: jax.Array,
    restart: Restart,
) -> tuple[Subspace, optax.Params, Any]:
    """The snapshots with that of this step, if it is due, and the point where the second phase begins.

    The snapshots are the basis's rows and the further ones.
    """
    (subspace,) = _subspaces(state.second)
    further = state.further_snapshots
    room = next((leaf.shape[0] for leaf in jax.tree.leaves(subspace.rows)), 0)
    since = state.count - jnp.asarray(start, jnp.int32)
    period = jnp.asarray(every, jnp.int32)
    is_due = (since >= 0) & (since % period == 0) & (state.count <= last) & ~subspace.is_set
    index = since // period
    rows = write_row(subspace.rows, params, index, is_due & (index < room))
    further = write_row(further, params, index - room, is_due & (index >= room))

    # The first sample, or the mean of those so far
    def moved(point: Any) -> Any:
        share = 1 / (index + 1) if restart == "mean" else 1.0

        def toward(to: jax.Array, leaf: Any) -> jax.Array:
            return to + (jnp.asarray(leaf).astype(to.dtype) - to) * jnp.asarray(share, to.dtype)

        return jax.tree.map(toward, point, params)

    is_part = is_due & ((index == 0) | (restart == "mean"))
    point = state.restart_point
    point = point if restart == "last" else cond(is_part, moved, lambda point: point, point)
    return subspace._replace(rows=rows), further, point


def _with_components(
    subspace: Subspace, further: optax.Params, num_samples: int, is_switch: jax.Array
) -> Subspace:
    """The subspace with components of all samples over the first ones, at the step that switches."""
    k = subspace.determined.size

    def components(rows: optax.Params) -> tuple[optax.Params, jax.Array]:
        rows, rank = principal_rows(
            rows,
            (further,),
            k,
            num_snapshots=jnp.asarray(num_samples, jnp.int32),
            first_row=subspace.own_first_row,
            in_place=True,
            is_centered=subspace.is_centered,
        )
        if subspace.axis_name is not None:  # the same on all, by its type too
            rank = jax.lax.pmin(rank, subspace.axis_name)
        return rows, jnp.arange(k, dtype=jnp.int32) < rank

    def samples(rows: optax.Params) -> tuple[optax.Params, jax.Array]:
        return rows, subspace.determined

    rows, determined = cond(is_switch, components, samples, subspace.rows)
    return subspace._replace(rows=rows, determined=determined)
