"""What AGN and DiLoCo share: when a period ends, finite local steps, and a step of the center.

Every replica trains its own params. Once a period all of them contribute to one step of the center, in
one collective, and are pulled to where it then stands.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optperm.contract import checks
from optperm.contract.dtypes import cast_like, zero_if_not_finite
from optperm.contract.mapped_axes import (
    AxisName,
    all_gather,
    axis_names,
    cond,
    largest,
    mean_of_function,
    shared,
    varying_axes,
    varying_like,
)
from optperm.contract.states import find_states
from optperm.distributed.commits import Center, CenterStep
from optperm.placement import apply_updates, placing_states, replace_targets
from optperm.switching import SwitchAfterState

# Steps from one commit to the next: a number, or a schedule of the number of commits made.
Period: TypeAlias = int | jax.Array | Callable[[jax.Array], Any]
# The states of Optax whose count a schedule reads, by name: one of the types is not public.
_READ_BY_SCHEDULES = (
    "ScaleByScheduleState",
    "InjectStatefulHyperparamsState",
    "WrappedScheduleState",
)


def check_period(name: str, value: object) -> None:
    """Raises unless `value` is an integer of at least 1, traced or not, or a schedule."""
    if isinstance(value, type) or not callable(value):
        checks.check_count(name, value)


def flag_of(
    commit: object, axis_name: AxisName | None, method: str, wanted: str = "True, False or None"
) -> bool | jax.Array:
    """Return the flag that an update was given: a bool known while tracing, or a traced one."""
    if isinstance(commit, bool | np.bool_):
        return bool(commit)
    if not isinstance(commit, jax.Array) or commit.ndim or commit.dtype != jnp.bool_:
        raise TypeError(f"commit of {method} must be {wanted}, or a traced bool, got {commit!r}.")
    if varying_axes(commit) & set(axis_names(axis_name)):
        raise ValueError(
            f"commit of {method} varies over the replicas, which would wait for each other: pass one "
            "flag to all, with P() for its in_specs of jax.shard_map."
        )
    return largest(commit, axis_name)


def ends_period(
    commit: object,
    state: Any,
    period: Period,
    axis_name: AxisName | None,
    method: str,
) -> bool | jax.Array:
    """Return whether a step ends a period: as the caller says, or by the steps that are counted."""
    if commit is not None:
        return flag_of(commit, axis_name, method)
    if callable(period):
        since_commit, commits = largest((state.since_commit, state.commits), axis_name)
        return since_commit + 1 >= period(commits)
    since_commit, number = largest((state.since_commit, jnp.asarray(period)), axis_name)
    return since_commit + 1 >= number


def center_step(
    optimizer: optax.GradientTransformationExtraArgs,
    extra_args: dict[str, Any],
    params: optax.Params,
    axis_name: AxisName | None,
) -> CenterStep:
    """Return a function for c <- c + u(n; s_c), with extra arguments that speak for all replicas."""

    def step(at: Center, n: optax.Updates, is_valid: jax.Array) -> Center:
        def move() -> Center:
            extras = _common_extras(extra_args, n, at[0], params, axis_name)
            moves, new_state = optimizer.update(n, at[1], at[0], **extras)
            new_state = cast_like(new_state, at[1])
            return apply_updates(at[0], cast_like(moves, at[0]), new_state), new_state

        return cond(is_valid, move, lambda: at)

    return step


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


def advance_schedules(new_state: Any, old_state: Any, steps: jax.Array) -> Any:
    """A state after a commit in which the counts that schedules read went on by so many steps."""

    def is_read(node: Any) -> bool:
        return type(node).__name__ in _READ_BY_SCHEDULES

    def advance(new: Any, old: Any) -> Any:
        if not is_read(new):
            return new
        within = type(new)(
            *(advance_schedules(*pair, steps) for pair in zip(new, old, strict=True))
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
            at = varying_like(at, params, axis_name)
            result = function(optax.tree.cast_like(at, params), **options)
            return result if axis_name is None else all_gather(result, axis_name, tiled=True)

        return gather

    def of_center(function: Callable[..., Any], place: Callable[..., Any]) -> Callable[..., Any]:
        mean = mean_of_function(function, params, axis_name, place)

        @functools.wraps(function)
        def at_center(at: optax.Params, **options: Any) -> Any:
            # A center may have more digits than the params.
            return mean(optax.tree.cast_like(at, params), **options)

        return at_center

    common = dict(extras)
    if common.get("value_fn") is not None:
        common["value_fn"] = of_center(common["value_fn"], shared)
    if common.get("grad_fn") is not None:
        # At params that are marked as varying, a gradient is not already the sum over all replicas.
        common["grad_fn"] = of_center(common["grad_fn"], varying_like)
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


def replace_center(state: Any, other: Any) -> Any:
    """Return the state of replicas with the center of another, and what its optimizers place."""
    return state._replace(
        center=other.center,
        local_state=replace_targets(state.local_state, other.local_state),
        center_state=replace_targets(state.center_state, other.center_state),
    )


def after_pull(
    local_state: Any, center_state: Any, pulled: jax.Array, axis_name: AxisName | None
) -> Any:
    """The local optimizer's state: it lives on across pulls, but what it places follows the center."""
    if not placing_states(local_state):
        return local_state
    return cond(
        largest(pulled, axis_name),
        lambda: replace_targets(local_state, center_state),
        lambda: local_state,
    )


def check_can_be_pulled(local_state: Any, center_state: Any, method: str) -> None:
    """Raises if the center's optimizer accumulates, or does not place what the local one places."""
    # It only sees one gradient a commit.
    if find_states(center_state, optax.MultiStepsState):
        raise ValueError(
            f"The center's optimizer of {method} takes one step a commit, so optax.MultiSteps would "
            f"throw commits away: write optax.MultiSteps({method}(optimizer, ...), k) to accumulate "
            "gradients before each local step."
        )
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
