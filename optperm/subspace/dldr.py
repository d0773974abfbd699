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
from optperm.contract.dtypes import all_finite
from optperm.contract.mapped_axes import AxisName, cond
from optperm.contract.shardings import rows_like
from optperm.contract.states import one_row
from optperm.contract.transformation import transformation
from optperm.placement import placing_states
from optperm.subspace.dim_reduce import Curvature, dim_reduce
from optperm.subspace.pca import principal_rows
from optperm.subspace.phases import SEARCH_EXTRAS, mean_over_replicas, step_where
from optperm.subspace.projected import projected
from optperm.subspace.subspace import Subspace
from optperm.subspace.trajectory import write_row

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int32, PyTree

SecondPhase = Literal["bfgs", "sgd"]


class DldrState(NamedTuple):
    """State of `dldr`.

    Until the last snapshot is taken, the rows of the second phase's basis hold the first snapshots.

    Attributes:
      count: Steps taken.
      optimizer_state: State of the optimizer of the first phase.
      further_snapshots: The snapshots for which the basis has no room.
      second: State of the second phase: a `DimReduceState` or a `ProjectedState`.
    """

    count: Int32[Array, ""]  # type: ignore[assignment]
    optimizer_state: Any
    further_snapshots: PyTree[Float[Array, "further ?*shape"], "Params"]
    second: Any


def dldr(
    optimizer: optax.GradientTransformation,
    *,
    sample_every: int | jax.Array,
    num_samples: int,
    n_components: int,
    start: int | jax.Array = 0,
    second_phase: SecondPhase = "bfgs",
    second_optimizer: optax.GradientTransformation | None = None,
    rho: optax.ScalarOrSchedule = 0.55,
    gamma: optax.ScalarOrSchedule = 0.9,
    alpha: optax.ScalarOrSchedule = 1e-3,
    sigma: optax.ScalarOrSchedule = 0.4,
    max_search_steps: int | jax.Array = 2,
    axis_name: AxisName | None = None,
    curvature: Curvature = "absolute",
) -> optax.GradientTransformationExtraArgs:
    r"""Trains with any optimizer, then in the subspace of the largest components of its trajectory.

    The params at steps :math:`t_0, t_0 + T, \dots, t_0 + (m - 1) T` are kept. With the last of them the
    basis :math:`P` of their first :math:`k` principal components is computed (`optperm.pca_basis`),
    and from that step on the params move

    - by `optperm.dim_reduce`, quasi-Newton steps with a line search (`"bfgs"`; P-BFGS if `alpha` is 0);
    - or by an optimizer that sees the projected gradient :math:`P^\top P g` (`"sgd"`, P-SGD).

    The two phases are one optimizer with one state, whose form never changes: it runs in a
    `jax.lax.scan` through the switch, and resumes from a checkpoint at any step. The snapshots take the
    memory of m params, and the basis is written over them. Under `jax.vmap` (not over an axis of
    replicas but over independent trainings) both phases and the basis are computed in every step.

    A gradient that is not finite skips the step, in both phases. With an axis of replicas gradients are
    averaged over it in both phases, snapshots are kept by all of them, and each holds its rows of the
    basis as in `optperm.dim_reduce`; call `init` within the mapped function.

    In the paper ResNets on CIFAR train by SGD with one snapshot an epoch, m = 81, then 20 epochs of
    P-BFGS with k = 40 and batches of 1024; on ImageNet m = 121, k = 120 and 4 epochs.

    Args:
      optimizer: The optimizer of the first phase. Not one that places params, such as
        `optperm.sgperm`.
      sample_every: :math:`T \ge 1`, the steps from one snapshot to the next.
      num_samples: m, the snapshots with whose last one the second phase begins, at least
        `n_components + 1`.
      n_components: k, the dimensions of the subspace.
      start: :math:`t_0 \ge 0`, the step at which the first snapshot is taken.
      second_phase: `"bfgs"` or `"sgd"`.
      second_optimizer: For `"bfgs"` the optimizer within `optperm.dim_reduce`, None for
        `optax.sgd(1.0)`. For `"sgd"` the one that sees the projected gradient, None for `optimizer`
        once more, with a state of its own; one that is not linear in the gradient leaves the subspace.
      rho: As in `optperm.dim_reduce`, like all that follow; of use for `"bfgs"` alone. Schedules begin
        with the second phase.
      gamma: The momentum of the residual.
      alpha: The learning rate of the residual; 0 stays in the subspace (P-BFGS).
      sigma: The share of the predicted decrease that a trial has to reach.
      max_search_steps: The trials of one line search.
      axis_name: The axis over which the rows of the basis and the batch are spread.
      curvature: When the quasi-Newton matrix is updated.

    Returns:
      A transformation whose state is a `DldrState`. Its `update` needs `params`, and for `"bfgs"` the
      extra arguments `value` and `value_fn`, in both phases.

    Raises:
      TypeError: If an argument is of the wrong type, or a parameter is not of a real floating dtype.
      ValueError: If an argument is out of range, there are fewer than `n_components + 1` samples, an
        extra argument is missing, `axis_name` is not bound where `init` or `update` is called, or the
        trees passed to `update` do not match.

    Example:
      >>> import jax, jax.numpy as jnp, optax, optperm
      >>> scales = jnp.array([1.0, 30.0, 1000.0])  # a valley
      >>> loss_fn = lambda w, batch: jnp.sum(scales * (w - batch) ** 2) / 2
      >>> target = jnp.array([3.0, 2.0, 1.0])
      >>> tx = optperm.dldr(
      ...     optax.sgd(1e-3), sample_every=2, num_samples=5, n_components=3, max_search_steps=20
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

    References:
      Li et al., `Low Dimensional Trajectory Hypothesis is True: DNNs Can Be Trained in Tiny Subspaces
      <https://arxiv.org/abs/2103.11154>`_, 2023
    """
    checks.check_transformation("optimizer", optimizer)
    checks.check_count("sample_every", sample_every)
    checks.check_static_count("num_samples", num_samples)
    checks.check_static_count("n_components", n_components)
    checks.check_count("start", start, minimum=0)
    checks.check_choice("second_phase", second_phase, get_args(SecondPhase))
    if num_samples < n_components + 1:
        raise ValueError(
            f"n_components={n_components} needs num_samples of at least {n_components + 1} (centered, m "
            f"samples span m - 1 directions), got {num_samples}."
        )
    _check_last_step(start, num_samples, sample_every)
    if second_optimizer is not None:
        checks.check_transformation("second_optimizer", second_optimizer)
    first = optax.with_extra_args_support(optimizer)
    if second_phase == "bfgs":
        then = dim_reduce(
            second_optimizer,
            n_components=n_components,
            rho=rho,
            gamma=gamma,
            alpha=alpha,
            sigma=sigma,
            max_search_steps=max_search_steps,
            axis_name=axis_name,
            curvature=curvature,
        )
    else:
        checks.check_axis_name("axis_name", axis_name)
        then = projected(second_optimizer or optimizer, n_components, axis_name)

    def init(params: optax.Params) -> DldrState:
        optimizer_state, second = first.init(params), then.init(params)
        if placing_states(optimizer_state):
            raise ValueError(
                "optimizer places params where its own state says, and would keep them there in the "
                "second phase: use one that moves them."
            )
        further = jax.tree.map(
            lambda rows: rows_like(rows[0], num_samples - rows.shape[0], rows.dtype),
            second.subspace.rows,
        )
        return DldrState(jnp.zeros([], jnp.int32), optimizer_state, further, second)

    def update(
        updates: optax.Updates, state: DldrState, params: optax.Params, **extra_args: Any
    ) -> tuple[optax.Updates, DldrState]:
        # The samples theta at t_0, t_0 + T, ..., t_0 + (m - 1) T, the first of them in the rows of P
        last = jnp.asarray(start + (num_samples - 1) * sample_every, jnp.int32)
        subspace, further = _record(state, params, start, sample_every, last)

        # P = the first k principal components of all samples, with the last of them
        def components(rows: optax.Params) -> optax.Params:
            m = jnp.asarray(num_samples, jnp.int32)
            first_row = subspace.first_row
            return principal_rows(
                rows, (further,), n_components, m, first_row=first_row, in_place=True
            )[0]

        is_switch = state.count == last
        rows = cond(is_switch, components, lambda rows: rows, subspace.rows)
        subspace = subspace._replace(rows=rows, is_set=subspace.is_set | is_switch)
        second = state.second._replace(subspace=subspace)

        # Until then theta <- theta + u(g), the optimizer's step
        def in_full() -> tuple[optax.Updates, Any, Any]:
            g, extras = mean_over_replicas(updates, params, extra_args, axis_name)
            moves, new = step_where(all_finite(g), first, g, state.optimizer_state, params, extras)
            return moves, new, second._replace(subspace=())

        # From then on the step of the second phase, in the subspace
        def in_subspace() -> tuple[optax.Updates, Any, Any]:
            moves, new = then.update(updates, second, params, **extra_args)
            return moves, state.optimizer_state, new._replace(subspace=())

        moves, optimizer_state, second = cond(state.count < last, in_full, in_subspace)
        count = optax.safe_increment(state.count)
        second = second._replace(subspace=subspace)
        return moves, DldrState(count, optimizer_state, further, second)

    is_bfgs = second_phase == "bfgs"
    return transformation(
        init,
        update,
        method="dldr",
        like=lambda state: state.second.residual if is_bfgs else one_row(state.further_snapshots),
        dtypes=is_bfgs,
        needs=SEARCH_EXTRAS if is_bfgs else None,
        axis_name=axis_name,
    )


def _check_last_step(start: Any, num_samples: int, sample_every: Any) -> None:
    if not any(isinstance(each, jax.core.Tracer) for each in (start, sample_every)):
        last = int(start) + (num_samples - 1) * int(sample_every)
        checks.check_count("start + (num_samples - 1) * sample_every", last, minimum=0)


def _record(
    state: DldrState,
    params: optax.Params,
    start: int | jax.Array,
    every: int | jax.Array,
    last: jax.Array,
) -> tuple[Subspace, optax.Params]:
    """The snapshots with that of this step, if it is due: the basis's rows and the further ones."""
    subspace, further = state.second.subspace, state.further_snapshots
    since = state.count - jnp.asarray(start, jnp.int32)
    period = jnp.asarray(every, jnp.int32)
    is_due = (since >= 0) & (since % period == 0) & (state.count <= last)
    index = since // period
    room = next((leaf.shape[0] for leaf in jax.tree.leaves(subspace.rows)), 0)
    rows = write_row(subspace.rows, params, index, is_due & (index < room))
    further = write_row(further, params, index - room, is_due & (index >= room))
    return subspace._replace(rows=rows), further
