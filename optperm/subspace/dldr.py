"""DLDR: training in full, then in the subspace that the trajectory spans, as one optimizer.

T. Li, L. Tan, Z. Huang, Q. Tao, Y. Liu and X. Huang, "Low Dimensional Trajectory Hypothesis is True:
DNNs Can Be Trained in Tiny Subspaces", TPAMI 2023, arXiv 2103.11154.
"""

from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import optax

from optperm.contract import checks
from optperm.contract.dtypes import accumulation_dtype, all_finite
from optperm.contract.mapped_axes import AxisName, cond, mark_varying, varying_axes
from optperm.placement import placing_states
from optperm.subspace.dim_reduce import Curvature, DimReduceState, dim_reduce
from optperm.subspace.pca import principal_rows
from optperm.subspace.phases import (
    ValueFn,
    cast_like,
    choose,
    inner_optimizer,
    mean_over_replicas,
    require_values,
)
from optperm.subspace.projection import Subspace, empty_subspace, lift, project
from optperm.subspace.trajectory import write_row

SecondPhase = Literal["bfgs", "sgd"]


class ProjectedState(NamedTuple):
    """State of the second phase of `dldr` with `second_phase="sgd"`.

    Attributes:
      subspace: The basis.
      inner_state: State of the optimizer that sees the projected gradient.
    """

    subspace: Subspace
    inner_state: Any


class DldrState(NamedTuple):
    """State of `dldr`.

    Until the last snapshot is taken, the rows of the second phase's basis hold the first snapshots.

    Attributes:
      count: Steps taken.
      optimizer_state: State of the optimizer of the first phase.
      further_snapshots: The snapshots for which the basis has no room.
      second: State of the second phase: a `DimReduceState` or a `ProjectedState`.
    """

    count: jax.Array  # type: ignore[assignment]  # int32 ()
    optimizer_state: Any
    further_snapshots: optax.Params  # (num_samples - rows of the basis, *shape) per leaf
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
      sample_every: :math:`T \ge 1`, in steps.
      num_samples: m, at least `n_components + 1`.
      n_components: k.
      start: :math:`t_0 \ge 0`, the step at which the first snapshot is taken.
      second_phase: `"bfgs"` or `"sgd"`.
      second_optimizer: For `"bfgs"` the optimizer within `optperm.dim_reduce`, None for
        `optax.sgd(1.0)`. For `"sgd"` the one that sees the projected gradient, None for `optimizer`
        once more, with a state of its own; one that is not linear in the gradient leaves the subspace.
      rho: As in `optperm.dim_reduce`, like all that follow; of use for `"bfgs"` alone. Schedules begin
        with the second phase.
      gamma: The momentum of the residual.
      alpha: The learning rate of the residual.
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
        then = _projected(second_optimizer or optimizer, n_components, axis_name)

    def init_fn(params: optax.Params) -> DldrState:
        second = then.init(params)
        optimizer_state = first.init(params)
        if placing_states(optimizer_state):
            raise ValueError(
                "optimizer places params where its own state says, and would keep them there in the "
                "second phase: use one that moves them."
            )
        further = jax.tree.map(
            lambda rows: jnp.zeros_like(rows, shape=(num_samples - rows.shape[0], *rows.shape[1:])),
            second.subspace.rows,
        )
        further = jax.tree.map(
            lambda leaf, rows: mark_varying(leaf, varying_axes(rows)), further, second.subspace.rows
        )
        return DldrState(jnp.zeros([], jnp.int32), optimizer_state, further, second)

    def update_fn(
        updates: optax.Updates,
        state: DldrState,
        params: optax.Params | None = None,
        *,
        value: Any = None,
        value_fn: ValueFn | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, DldrState]:
        params = checks.require_params(params, "dldr")
        _check_trees(params, updates, state)
        if second_phase == "bfgs":
            value, value_fn = require_values(value, value_fn, "dldr")
        checks.check_axis_is_bound(axis_name)
        extras = {**extra_args, "value": value, "value_fn": value_fn}

        last = jnp.asarray(start + (num_samples - 1) * sample_every, jnp.int32)
        subspace, further = _record(state, params, start, sample_every, last)
        is_switch = state.count == last

        def compute_basis(rows: optax.Params) -> optax.Params:
            rows, _ = principal_rows(
                rows,
                (further,),
                n_components,
                jnp.asarray(num_samples, jnp.int32),
                first_row=subspace.first_row,
                in_place=True,
            )
            return rows

        rows = cond(is_switch, compute_basis, lambda rows: rows, subspace.rows)
        is_set = subspace.is_set | is_switch
        second = state.second._replace(subspace=subspace._replace(rows=rows, is_set=is_set))

        def in_full() -> tuple[optax.Updates, Any, Any]:
            grads, extras_here = mean_over_replicas(updates, params, extras, axis_name)
            is_finite = all_finite(grads)
            grads = cast_like(grads, params)
            moves, new = first.update(grads, state.optimizer_state, params, **extras_here)
            moves = choose(is_finite, cast_like(moves, params), optax.tree.zeros_like(params))
            new = choose(is_finite, cast_like(new, state.optimizer_state), state.optimizer_state)
            return moves, new, second._replace(subspace=())

        def in_subspace() -> tuple[optax.Updates, Any, Any]:
            moves, new = then.update(updates, second, params, **extras)
            return moves, state.optimizer_state, new._replace(subspace=())

        moves, optimizer_state, new_second = cond(state.count < last, in_full, in_subspace)
        return moves, DldrState(
            count=optax.safe_increment(state.count),
            optimizer_state=optimizer_state,
            further_snapshots=further,
            second=new_second._replace(subspace=second.subspace),
        )

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _projected(
    optimizer: optax.GradientTransformation, n_components: int, axis_name: AxisName | None
) -> optax.GradientTransformationExtraArgs:
    """P-SGD: feeds an optimizer the part of the gradient that is in the subspace."""
    inner = inner_optimizer(optimizer)

    def init_fn(params: optax.Params) -> ProjectedState:
        checks.check_real_floating(
            "params", params, advice="Mask the others to another optimizer with optax.partition."
        )
        if jax.tree.leaves(params):
            checks.check_axis_is_bound(axis_name)
        subspace = empty_subspace(params, n_components, axis_name)
        return ProjectedState(subspace, inner.init(params))

    def update_fn(
        updates: optax.Updates, state: ProjectedState, params: optax.Params, **extra_args: Any
    ) -> tuple[optax.Updates, ProjectedState]:
        grads, extras = mean_over_replicas(updates, params, extra_args, axis_name)
        gk = project(state.subspace, grads, n_components, accumulation_dtype(params), axis_name)
        (within,) = lift(state.subspace, gk[None], axis_name)
        within = cast_like(within, params)
        moves, inner_state = inner.update(within, state.inner_state, params, **extras)
        is_finite = all_finite(grads)
        moves = choose(is_finite, cast_like(moves, params), optax.tree.zeros_like(params))
        inner_state = cast_like(inner_state, state.inner_state)
        return moves, state._replace(inner_state=choose(is_finite, inner_state, state.inner_state))

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _check_last_step(start: Any, num_samples: int, sample_every: Any) -> None:
    if not any(isinstance(each, jax.core.Tracer) for each in (start, sample_every)):
        last = int(start) + (num_samples - 1) * int(sample_every)
        checks.check_count("start + (num_samples - 1) * sample_every", last, minimum=0)


def _check_trees(params: optax.Params, updates: optax.Updates, state: DldrState) -> None:
    like, has_dtypes = state.further_snapshots, False
    if isinstance(state.second, DimReduceState):
        like, has_dtypes = state.second.residual, True
    else:
        like = jax.tree.map(lambda rows: jax.ShapeDtypeStruct(rows.shape[1:], rows.dtype), like)
    source = "the optimizer state"
    checks.check_same_tree("params", params, like, source=source, dtypes=has_dtypes)
    checks.check_same_tree("updates", updates, like, source=source, dtypes=False)


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
