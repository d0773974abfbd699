"""What AGN and DiLoCo share: replicas that take local steps, a center, and a rare commit.

Every replica trains its own params. Once a period all of them contribute to one step of the center, in
one collective, and are pulled to where it then stands.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optperm.contract import checks
from optperm.contract.dtypes import cast_like, zero_if_not_finite
from optperm.contract.mapped_axes import (
    AxisName,
    all_gather,
    cond,
    mean_of_function,
    shared,
    varying_like,
)
from optperm.contract.states import find_states
from optperm.contract.transformation import transformation
from optperm.distributed.commits import Center, Commit, Replicas, pull, rule_of
from optperm.placement import Placement, apply_updates, placing_states, replace_targets
from optperm.switching import SwitchAfterState

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int32, PyTree

# Steps from one commit to the next: a number, or a schedule of the number of commits made.
Period: TypeAlias = int | jax.Array | Callable[[jax.Array], Any]
# The states of Optax whose count a schedule reads, by name: one of the types is not public.
_READ_BY_SCHEDULES = (
    "ScaleByScheduleState",
    "InjectStatefulHyperparamsState",
    "WrappedScheduleState",
)


class LocalStepsState(NamedTuple):
    """State of `agn` and of `diloco`, one on each replica.

    Attributes:
      count: Steps taken.
      since_commit: Steps since the last commit.
      commits: Commits made.
      local_state: State of the optimizer of the local params.
      center_state: State of the optimizer of the center.
      center: The params as of the last commit, the same on every replica.
      accumulator: AGN: the sum of the raw local gradients since the last commit, in float32 or wider;
        the step after a commit starts it anew. DiLoCo: nothing.
      pulled: Whether the last step ended in a commit, which put the params on the center.
      skipped: Commits without this replica's contribution, because that was not finite, or because
        all contributions together were not.
    """

    count: Int32[Array, ""]  # type: ignore[assignment]
    since_commit: Int32[Array, ""]
    commits: Int32[Array, ""]
    local_state: Any
    center_state: Any
    center: PyTree[Float[Array, "?*shape"], "Params"]
    accumulator: PyTree[Float[Array, "..."]]
    pulled: Bool[Array, ""]
    skipped: Int32[Array, ""]

    def placements(self) -> list[Placement]:
        """Where the local optimizer places params, and over it the center after a pull."""
        local = placing_states(self.local_state)
        within = [placement for state in local for placement in state.placements()]
        return [*within, (self.center, self.pulled)]

    def replace_targets(self, other: Any) -> "LocalStepsState":
        """This state with the center of another, and what its optimizers place.

        Args:
          other: One of the same form.
        """
        return self._replace(
            center=other.center,
            local_state=replace_targets(self.local_state, other.local_state),
            center_state=replace_targets(self.center_state, other.center_state),
        )


class Contribution(Protocol):
    """What a replica contributes to a commit."""

    @property
    def reads_local_params(self) -> bool:
        """Whether `total` calls `moved`."""
        ...

    def init(self, params: optax.Params) -> Any:
        """The accumulator at the beginning."""
        ...

    def accumulate(self, accumulator: Any, grads: optax.Updates, restart: jax.Array) -> Any:
        """The accumulator with one more local gradient; with that one alone where a period begins."""
        ...

    def total(
        self,
        accumulator: Any,
        steps: jax.Array,
        center: optax.Params,
        moved: Callable[[], optax.Params],
    ) -> optax.Updates:
        """That of a period of so many steps, in float32 or wider; `moved()` is the local params."""
        ...


def local_steps(
    local_optimizer: optax.GradientTransformation,
    center_optimizer: optax.GradientTransformation,
    period: Period,
    contribution: Contribution,
    *,
    replicas: Replicas,
    commit: Commit = "mean",
    mixing: float | jax.Array = 0.0,
    counts_local_steps: bool = False,
    method: str,
) -> optax.GradientTransformationExtraArgs:
    """Local steps by one optimizer, and once a period a step of the center by another.

    Args:
      local_optimizer: Moves the params of each replica.
      center_optimizer: Moves the center, with the contributions for a gradient.
      period: Steps from one commit to the next; a schedule is one of the number of commits made.
      contribution: What each replica contributes.
      replicas: The axes over which the replicas are spread.
      commit: How contributions are combined.
      mixing: How much of the local params a pull keeps.
      counts_local_steps: Whether schedules of the center's optimizer count local steps, not commits.
      method: The public name of the method, for messages.

    Returns:
      A transformation whose state is a `LocalStepsState`.
    """
    inner = optax.with_extra_args_support(local_optimizer)
    outer = optax.with_extra_args_support(center_optimizer)
    axis_name = replicas.axis_name
    combine = rule_of(commit, axis_name)
    advance = _advance_schedules if counts_local_steps else lambda new, old, steps: new

    def init(params: optax.Params) -> LocalStepsState:
        local_state, center_state = inner.init(params), outer.init(params)
        _check_can_be_pulled(local_state, center_state, method)
        return LocalStepsState(
            count=jnp.zeros([], jnp.int32),
            since_commit=jnp.zeros([], jnp.int32),
            commits=jnp.zeros([], jnp.int32),
            local_state=local_state,
            center_state=center_state,
            center=jax.tree.map(lambda leaf: jnp.array(leaf, copy=True), params),
            accumulator=contribution.init(params),
            pulled=jnp.zeros([], jnp.bool_),
            skipped=jnp.zeros([], jnp.int32),
        )

    def step_center(
        extra_args: dict[str, Any], params: optax.Params, at: Center, n: Any, is_valid: jax.Array
    ) -> Center:
        """One step of the center with a gradient: c <- c + u(n; s_c)."""

        def move() -> Center:
            extras = _common_extras(extra_args, n, at[0], params, axis_name)
            moves, new_state = outer.update(n, at[1], at[0], **extras)
            new_state = cast_like(new_state, at[1])
            return apply_updates(at[0], cast_like(moves, at[0]), new_state), new_state

        return cond(is_valid, move, lambda: at)

    def update(
        grads: optax.Updates,
        state: LocalStepsState,
        params: optax.Params,
        *,
        commit: bool | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, LocalStepsState]:
        replicas.check_are_local(grads, params, method)
        steps = optax.safe_increment(state.since_commit)
        is_commit = _is_commit(commit, steps, period, state.commits, method)
        at = state.center, state.center_state

        # The local step: theta <- theta + u(g; s), a <- a + g.
        g, extras = finite_local(grads, extra_args, state.local_state)
        moves, local_state = inner.update(g, _after_pull(state), params, **extras)
        moves, local_state = cast_like(moves, params), cast_like(local_state, state.local_state)
        a = contribution.accumulate(state.accumulator, grads, state.since_commit == 0)

        # The commit: c <- c + u(n; s_c) with the n of all replicas.
        def commit_and_pull() -> tuple[Center, jax.Array, Any]:
            theta = functools.partial(apply_updates, params, moves, local_state)
            n = contribution.total(a, steps, state.center, theta)
            step = functools.partial(step_center, extra_args, params)
            (c, s_c), took_part = combine(at, n, step, replicas)
            s_c = advance(s_c, state.center_state, steps)
            return (c, s_c), took_part, pull_to(c) if moves_leave_by_cond else ()

        def keep() -> tuple[Center, jax.Array, Any]:
            return at, jnp.array(True), (moves, jnp.array(False)) if moves_leave_by_cond else ()

        # The pull: theta <- mixing theta + (1 - mixing) c.
        def pull_to(center: optax.Params) -> tuple[optax.Updates, jax.Array]:
            theta = apply_updates(params, moves, local_state)
            return pull(mixing, center, theta, params, replicas)

        # A commit that looks at where the replica went needs its moves in memory: they leave by the same
        # conditional. Else they are chosen entry by entry, and the local step stays one fused pass.
        moves_leave_by_cond = contribution.reads_local_params or isinstance(is_commit, bool)
        (center, center_state), took_part, chosen = cond(is_commit, commit_and_pull, keep)
        if not moves_leave_by_cond:
            chosen = optax.tree.where(is_commit, pull_to(center)[0], moves), is_commit
        counted = _counted(state, steps, is_commit, took_part)
        return chosen[0], counted._replace(
            local_state=local_state,
            center_state=center_state,
            center=center,
            accumulator=a,
            pulled=chosen[1],
        )

    return transformation(
        init, update, method=method, like=lambda state: state.center, axis_name=axis_name
    )


def check_period(name: str, value: object) -> None:
    """Raises unless `value` is an integer of at least 1, traced or not, or a schedule."""
    if isinstance(value, type) or not callable(value):
        checks.check_count(name, value)


def _is_commit(
    commit: object, steps: jax.Array, period: Period, commits: jax.Array, method: str
) -> bool | jax.Array:
    """Whether this step ends a period: as the caller says while tracing, or by the steps counted."""
    if isinstance(commit, bool | np.bool_):
        return bool(commit)
    if commit is not None:
        raise TypeError(
            f"commit of {method} must be True, False or None, got {commit!r}: it decides what is "
            "compiled. Name it in static_argnames of jax.jit, or leave it out and steps are counted."
        )
    return steps >= (period(commits) if callable(period) else period)


def _counted(
    state: LocalStepsState, steps: jax.Array, is_commit: bool | jax.Array, took_part: jax.Array
) -> LocalStepsState:
    """The state after one more step, the number `steps` since the last commit."""
    return state._replace(
        count=optax.safe_increment(state.count),
        since_commit=jnp.where(is_commit, 0, steps),
        commits=jnp.where(is_commit, optax.safe_increment(state.commits), state.commits),
        skipped=jnp.where(took_part, state.skipped, optax.safe_increment(state.skipped)),
    )


def finite_local(
    grads: optax.Updates, extra_args: dict[str, Any], local_state: Any
) -> tuple[optax.Updates, dict[str, Any]]:
    """Gradient and extra arguments of a local step: zero in the place of what is not finite.

    Raw, they would leave NaN in the local state for ever. Only `optax.apply_if_finite` gets them as they
    came: it skips the step.
    """
    if isinstance(local_state, optax.ApplyIfFiniteState):
        return grads, extra_args
    if extra_args.get("grad") is not None:
        extra_args = extra_args | {"grad": zero_if_not_finite(extra_args["grad"])}
    return zero_if_not_finite(grads), extra_args


def _advance_schedules(new_state: Any, old_state: Any, steps: jax.Array) -> Any:
    """A state after a commit in which the counts that schedules read went on by so many steps."""

    def is_read(node: Any) -> bool:
        return type(node).__name__ in _READ_BY_SCHEDULES

    def advance(new: Any, old: Any) -> Any:
        if not is_read(new):
            return new
        within = type(new)(
            *(_advance_schedules(*pair, steps) for pair in zip(new, old, strict=True))
        )
        largest = jnp.iinfo(jnp.int32).max
        # Also where no contribution was finite: the local steps have been made.
        later = jnp.where(old.count > largest - steps, largest, old.count + steps)
        return within._replace(count=later)

    return jax.tree.map(advance, new_state, old_state, is_leaf=is_read)


def _common_extras(
    extras: dict[str, Any],
    gradient: optax.Updates,
    center: optax.Params,
    params: optax.Params,
    axis_name: AxisName | None,
) -> dict[str, Any]:
    """The extra arguments for a step of the center: of all replicas' batches, the same on every one.

    `value` and `grad` belong to the center, not to the local params. What the center's optimizer does
    not use costs nothing; each call of a closure is a collective of its own, within the commit.
    """

    def gathered(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def gather(at: optax.Params, **options: Any) -> Any:
            result = function(varying_like(at, params, axis_name), **options)
            return result if axis_name is None else all_gather(result, axis_name, tiled=True)

        return gather

    common = dict(extras)
    if common.get("value_fn") is not None:
        common["value_fn"] = mean_of_function(common["value_fn"], params, axis_name, shared)
    if common.get("grad_fn") is not None:
        # At params that are marked as varying, a gradient is not already the sum over all replicas.
        common["grad_fn"] = mean_of_function(common["grad_fn"], params, axis_name, varying_like)
    if common.get("per_example_grad_fn") is not None:
        common["per_example_grad_fn"] = gathered(common["per_example_grad_fn"])
    if common.get("grad") is not None:
        common["grad"] = gradient
    if common.get("value") is not None:
        if common.get("value_fn") is not None:
            common["value"] = common["value_fn"](center)
        elif axis_name is not None:
            common["value"] = jax.lax.pmean(common["value"], axis_name)
    return common


def _after_pull(state: LocalStepsState) -> Any:
    """The local optimizer's state: it lives on across pulls, but what it places follows the center."""
    if not placing_states(state.local_state):
        return state.local_state
    return cond(
        state.pulled,
        lambda: replace_targets(state.local_state, state.center_state),
        lambda: state.local_state,
    )


def check_no_multi_steps(center_state: Any, method: str) -> None:
    """Raises if the center's optimizer accumulates, when it only sees one gradient a commit."""
    if find_states(center_state, optax.MultiStepsState):
        raise ValueError(
            f"The center's optimizer of {method} takes one step a commit, so optax.MultiSteps would "
            f"throw commits away: write optax.MultiSteps({method}(optimizer, ...), k) to accumulate "
            "gradients before each local step."
        )


def _check_can_be_pulled(local_state: Any, center_state: Any, method: str) -> None:
    check_no_multi_steps(center_state, method)
    local, center = (
        [type(state) for state in placing_states(tree)] for tree in (local_state, center_state)
    )
    if SwitchAfterState in local:
        raise ValueError(
            "The local optimizer places params in a phase of optperm.switch_after, and the center's, "
            f"which counts commits, would be in another phase: put switch_after around {method}."
        )
    if local != center:
        raise ValueError(
            f"The local optimizer of {method} places params where its own state says, and the center's "
            "optimizer does not, so the replicas could not be pulled to the center: "
            f"{[kind.__name__ for kind in local]} against {[kind.__name__ for kind in center]}. "
            "Use the same method for both, as optperm.agn does."
        )
