"""Shared parts of AGN and DiLoCo: the end of a period, finite local steps, and a step of the center.

Each replica trains its own params. Once per period, all replicas contribute to one step of the center
in one collective, and are pulled to the new center. The collective is in a conditional of the compiled
program, so it runs once per period for any mapping of the replicas:

    count of steps            on each replica, the same on all
      |
      | largest               the maximum over the axes of `jax.vmap`, so that it is not batched;
      |                       axes of devices are not reduced
    is this a commit?
      |
      | cond                  jax.vmap: one conditional for all rows (a batched conditional would be a
      |                       selection that runs both branches in every step)
      |                       jax.pmap, jax.shard_map: one on each device, with the same predicate
    psum or all_gather        of the rows of a `jax.vmap`, or of the devices
      |
    a step of the center      the same on all replicas, without another collective
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optperm.core import checks
from optperm.core.control import cond
from optperm.core.dtypes import cast_like, zero_if_not_finite
from optperm.core.mapped_axes import (
    AxisName,
    all_gather,
    axis_names,
    largest,
    mark_varying,
    mean_of_function,
    psum,
    shared,
    varying_axes,
    varying_like,
)
from optperm.core.shapes import Params, Updates
from optperm.core.states import find_states
from optperm.distributed._replicas import Center, CenterStep, Replicas
from optperm.exact import (
    OWN_POINTS,
    apply_updates,
    exact_entries,
    placing_states,
    replace_targets,
)
from optperm.switching import SwitchAfterState

# The number of steps from one commit to the next, or a schedule of the number of commits so far.
Period: TypeAlias = int | jax.Array | Callable[[jax.Array], Any]


def check_period(name: str, value: object) -> None:
    """Raise unless `value` is a schedule or an integer, of at least 1 unless traced."""
    if isinstance(value, type) or not callable(value):
        checks.check_count(name, value)


def is_commit_only(commit: object) -> bool:
    """Return whether `update` commits without a local step."""
    return isinstance(commit, str) and commit == "only"


def resolve_flag(
    commit: object,
    axis_name: AxisName | None,
    method: str,
    allowed: str = 'True, False, "only" or None',
) -> bool | jax.Array:
    """Return an explicit flag: a bool known while tracing, or a traced bool for all replicas."""
    if isinstance(commit, bool | np.bool_) or is_commit_only(commit):
        return bool(commit)
    if not isinstance(commit, jax.Array) or commit.ndim or commit.dtype != jnp.bool_:
        raise TypeError(f"commit of {method} must be {allowed}, or a traced bool, got {commit!r}.")
    if varying_axes(commit) & set(axis_names(axis_name)):
        # Otherwise, some replicas would wait for others in a collective.
        raise ValueError(
            f"commit of {method} may differ between replicas: pass the same flag to all replicas, in "
            "jax.shard_map with in_specs P()."
        )
    return largest(commit, axis_name)


def ends_period(
    commit: object,
    state: Any,
    period: Period,
    axis_name: AxisName | None,
    method: str,
) -> bool | jax.Array:
    """Return whether a step ends a period, from an explicit flag or the count of steps.

    The predicate is the same for all replicas and never batched, so collectives stay in a conditional.
    """
    if commit is not None:
        return resolve_flag(commit, axis_name, method)
    if callable(period):
        since_commit, commits = largest((state.since_commit, state.commits), axis_name)
        # If the period is NaN, every step ends it.
        return jnp.logical_not(since_commit + 1 < period(commits))
    since_commit, number = largest((state.since_commit, jnp.asarray(period)), axis_name)
    return since_commit + 1 >= number


def make_local_step(
    optimizer: optax.GradientTransformationExtraArgs,
    grads: Updates | None,
    state: Any,
    params: Params,
    extra_args: dict[str, Any],
    axis_name: AxisName | None,
) -> Callable[[Any], tuple[Updates, Any]]:
    """Return the function s -> (u(g; s), new s) of a local step.

    After a pull, s first gets its exact targets from the center. Without a gradient, u is zero and s
    does not change.
    """

    def step(local_state: Any) -> tuple[Updates, Any]:
        if grads is None:
            return optax.tree.zeros_like(params), local_state
        g, extras = zero_bad_entries(grads, extra_args, local_state)
        at = follow_center(local_state, state.center_state, state.pulled.all(), axis_name)
        u, after = optimizer.update(g, at, params, **extras)
        return cast_like(u, params), cast_like(after, local_state)

    return step


def finish(
    updates: Updates, new_state: Any, state: Any, has_step: bool, axis_name: AxisName | None
) -> tuple[Updates, Any]:
    """Return updates and state; no change if a commit without a step commits no earlier step."""
    if has_step:
        return updates, new_state
    has_steps = varying_like((state.since_commit > 0).astype(jnp.int32), updates, axis_name)
    if axis_name is not None:
        # The decision must be the same for all replicas.
        has_steps = psum(has_steps, axis_name)
    still = optax.tree.zeros_like(updates), state
    updates, new_state = optax.tree.where(has_steps > 0, (updates, new_state), still)
    return updates, new_state


def keep_exact(
    center: Params,
    before: Params,
    local_state: Any,
    is_due: bool | jax.Array,
    axis_name: AxisName | None,
) -> Params:
    """Return the center after a commit, with the entries that local optimizers fix or keep at zero.

    Replicas may disagree on an entry but have one center, so an entry is exact only if all agree.
    """
    entries = [each for each in exact_entries(local_state) if not each.is_target]
    if not entries:
        return center

    def is_everywhere(where: jax.Array) -> jax.Array:
        if axis_name is None:
            return where
        varying = varying_axes(jax.lax.axis_index(axis_name))
        size = psum(mark_varying(jnp.ones([], jnp.int32), varying), axis_name)
        return psum(mark_varying(where.astype(jnp.int32), varying), axis_name) == size

    def put() -> Params:
        moved = center
        for each in entries:
            agreed = each._replace(where=jax.tree.map(is_everywhere, each.where))
            moved = agreed.put(moved, before, before)
        return moved

    return cond(is_due, put, lambda: center)


def check_chooses_no_zeros(center_state: Any) -> None:
    """Raise if the center's optimizer chooses which entries are zero."""
    entries = exact_entries(center_state)
    if any(each.values is not None and not each.is_target for each in entries):
        raise ValueError(
            "The center's optimizer in agn (outer or, without outer, inner) chooses which entries are "
            "zero (rigl, prune_gradually), and would choose other entries than the replicas. Pass "
            "another outer, such as outer=optax.sgd(1.0): the center then has the zeros of inner."
        )


def make_center_step(
    optimizer: optax.GradientTransformationExtraArgs,
    extra_args: dict[str, Any],
    params: Params,
    axis_name: AxisName | None,
) -> CenterStep:
    """Make the function c <- c + u(n; s_c), with extra arguments for the batches of all replicas."""

    def step(at: Center, n: Updates, is_valid: jax.Array) -> Center:
        def move() -> Center:
            extras = _common_extras(extra_args, n, at[0], params, axis_name)
            moves, new_state = optimizer.update(n, at[1], at[0], **extras)
            new_state = cast_like(new_state, at[1])
            return apply_updates(at[0], cast_like(moves, at[0]), new_state), new_state

        return cond(is_valid, move, lambda: at)

    return step


def zero_bad_entries(
    grads: Updates, extra_args: dict[str, Any], local_state: Any
) -> tuple[Updates, dict[str, Any]]:
    """Return the gradient and extra arguments of a local step with zeros for nonfinite entries.

    NaN would stay in the local state forever. Only `optax.apply_if_finite` gets the raw gradient,
    because it skips the step.
    """
    if isinstance(local_state, optax.ApplyIfFiniteState):
        return grads, extra_args
    if extra_args.get("grad") is not None:
        extra_args = extra_args | {"grad": zero_if_not_finite(extra_args["grad"])}
    return zero_if_not_finite(grads), extra_args


def count_bad_steps(grads: Updates | None, local_state: Any, replicas: Replicas) -> jax.Array:
    """Return 1 if this replica's local step counts nonfinite entries of its gradient as zero."""
    if grads is None or isinstance(local_state, optax.ApplyIfFiniteState):
        return jnp.zeros([], jnp.int32)
    return jnp.logical_not(replicas.are_finite(grads)).astype(jnp.int32)


def _common_extras(
    extras: dict[str, Any],
    gradient: Updates,
    center: Params,
    params: Params,
    axis_name: AxisName | None,
) -> dict[str, Any]:
    """Return the extra arguments for a step of the center, for the batches of all replicas.

    `value` and `grad` belong to the center, not to the local params. An extra argument costs nothing
    unless the optimizer uses it. Each call of a function is a collective within the commit.
    """

    def gather_results(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call_everywhere(at: Params, **options: Any) -> Any:
            at = varying_like(at, params, axis_name)
            result = function(optax.tree.cast_like(at, params), **options)
            return result if axis_name is None else all_gather(result, axis_name, tiled=True)

        return call_everywhere

    def average(function: Callable[..., Any], place: Callable[..., Any]) -> Callable[..., Any]:
        mean = mean_of_function(function, params, axis_name, place)

        @functools.wraps(function)
        def call_at_center(at: Params, **options: Any) -> Any:
            # The center may have a wider dtype than the params.
            return mean(optax.tree.cast_like(at, params), **options)

        return call_at_center

    common = dict(extras)
    if common.get("value_fn") is not None:
        common["value_fn"] = average(common["value_fn"], shared)
    if common.get("grad_fn") is not None:
        # If params are marked as varying, the gradient is local, not a sum over all replicas.
        common["grad_fn"] = average(common["grad_fn"], varying_like)
    if common.get("per_example_grad_fn") is not None:
        common["per_example_grad_fn"] = gather_results(common["per_example_grad_fn"])
    if common.get("grad") is not None:
        common["grad"] = gradient
    if common.get("value") is not None:
        if common.get("value_fn") is not None:
            common["value"] = common["value_fn"](center)
        elif axis_name is not None:
            common["value"] = jax.lax.pmean(common["value"], axis_name)
    return common


def replace_center(state: Any, other: Any) -> Any:
    """Return a state with the center and the optimizers' targets of another state."""
    return state._replace(
        since_commit=jnp.zeros_like(state.since_commit),
        center=other.center,
        local_state=replace_targets(state.local_state, other.local_state),
        center_state=replace_targets(state.center_state, other.center_state),
    )


def follow_center(
    local_state: Any, center_state: Any, pulled: jax.Array, axis_name: AxisName | None
) -> Any:
    """Return the local optimizer's state after a pull, in which only its exact targets change."""
    if not placing_states(local_state):
        return local_state
    return cond(
        largest(pulled, axis_name),
        lambda: replace_targets(local_state, center_state),
        lambda: local_state,
    )


def check_can_be_pulled(local_state: Any, center_state: Any, method: str) -> None:
    """Raise if the optimizers of the replicas and of the center do not fit together.

    The center's optimizer must not lose commits, the local optimizer must not store params, which a pull
    would not move, and both must set the same exact params.
    """
    if find_states(center_state, optax.MultiStepsState):
        wanted = "optax.MultiSteps(agn(inner, ...), k)"
        if method == "diloco":
            wanted = "diloco(optax.MultiSteps(inner, k), ...), with k times the steps"
        raise ValueError(
            f"MultiSteps in the center's optimizer would lose commits: write {wanted}."
        )
    for each in find_states(local_state, OWN_POINTS):
        raise ValueError(
            f"{type(each).__name__} stores its own params, which a pull to the center does not move. "
            f"Use another optimizer for the local steps of {method}, or use this optimizer for the "
            "center."
        )
    local, center = (list(map(type, placing_states(tree))) for tree in (local_state, center_state))
    # The center's optimizer counts commits, so within switch_after, it would be in another phase.
    if local != center or SwitchAfterState in local:
        names = [kind.__name__ for kind in local]
        wanted = f"use one method for both, with switch_after around {method}"
        raise ValueError(
            "The optimizers of the replicas and of the center must set the same exact params, but the "
            f"states of the replicas that do so are {names}: {wanted}."
        )
