"""Compute the common params of replicas with their own params, by a commit on a copy of the carry."""

import functools
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optperm.core.dtypes import cast_like
from optperm.core.mapped_axes import mark_varying
from optperm.core.states import find_running_states, find_states, local_values, match_params
from optperm.core.transformation import known_extra_args
from optperm.core.trees import fill_masked, leaf_paths
from optperm.exact import CommittingState, only_commits
from optperm.training._layout import Layout, average_statistics
from optperm.training._steps import compile_on_replicas, evaluate_step, unwrap_keys, wrap_keys
from optperm.training._train_state import Model, TrainState

# The number of calls after which `optax.MultiSteps` has made a step, if it makes any.
_MOST_CALLS = 1000
_MOST_NAMED = 5  # params in a message


def steps_since_commit(opt_state: Any) -> int:
    """Return the maximum number of steps not in the center of a running phase; 0 without a center."""
    found = _running_centers(opt_state)
    return max((int(local_values(state.since_commit).max()) for state in found), default=0)


def _find_apart(carry: TrainState, layout: Layout) -> list[str]:
    """Return the paths of the params that no center contains, and that differ between replicas."""
    centers = [state.center for state in _running_centers(carry.opt_state)]
    if not (centers and layout.own):
        return []
    committed = {match.place for center in centers for match in match_params(center, carry.params)}
    paths = leaf_paths(carry.params)
    left = {path: leaf for at, (path, leaf) in enumerate(paths) if at not in committed}
    with layout.context():
        differ = jax.device_get(_differ(left, layout)) if left else {}
    return [path for path, is_apart in differ.items() if is_apart]


@functools.partial(jax.jit, static_argnums=1)
def _differ(stacked: Any, layout: Layout) -> Any:
    """Return whether the rows of each leaf differ, for all processes."""
    found = jax.tree.map(lambda leaf: jnp.any(leaf != leaf[:1]), stacked)
    return jax.lax.with_sharding_constraint(found, layout.sharding())


def count_commits(opt_state: Any) -> int:
    """Return the number of commits of running phases; 0 without a center."""
    found = _running_centers(opt_state)
    return max((int(local_values(state.commits).max()) for state in found), default=0)


def _running_centers(opt_state: Any) -> list[Any]:
    """Return the states with a center in running phases."""
    return list[Any](find_running_states(opt_state, CommittingState))


def _are_apart(carry: TrainState, layout: Layout) -> bool:
    """Return True if each replica trains its own params, which not all mapped methods do."""
    return layout.own and bool(find_states(carry.opt_state, CommittingState))


def commit(call: Callable[..., Any], carry: TrainState, batch: Any, layout: Layout) -> TrainState:
    """Return a copy of the carry after a commit without a local step; `call` is from `compile_commit`.

    Only the states of committing methods change, because a commit is not a step of any other method.
    The methods get the extra arguments of `batch`, or none if the batch is None.
    """
    now = carry
    with layout.context():
        for _ in range(_MOST_CALLS if find_states(carry.opt_state, optax.MultiStepsState) else 1):
            now = call(now, (), batch)[0]
            if not steps_since_commit(now.opt_state):
                break

    return carry.replace(opt_state=only_commits(now.opt_state, carry.opt_state))


def compile_commit(
    model: Model, layout: Layout, carry: TrainState, key: int | jax.Array = 0
) -> Callable[..., Any]:
    """Compile a commit for carries with the same placement as `carry`, to be called by `commit`."""

    def one(carry: TrainState, _: Any, batch: Any) -> tuple[TrainState, Any]:
        return _commit(carry, batch, model, layout, key), ()

    return compile_on_replicas(one, layout, carry)


def _commit(
    state: TrainState, batch: Any, model: Model, layout: Layout, key: int | jax.Array
) -> TrainState:
    """Return the state with the optimizer state after a commit."""
    extras: dict[str, Any] = {"commit": "only"}
    if batch is not None:
        extras |= evaluate_step(state, batch, model, layout, key)[1]
    if state.weights is not None:
        total, steps = state.weights
        extras["weight"] = jnp.where(steps == 0, 1, total / jnp.where(steps == 0, 1, steps))
    # The gradient is not used, but must have the types of this replica's gradients.
    grads = optax.tree.sub(state.params, state.params)
    extras = known_extra_args(state.tx, extras)
    new = state.replace(
        opt_state=state.tx.update(grads, state.opt_state, state.params, **extras)[1]
    )
    before, after = unwrap_keys(state), unwrap_keys(new)
    return mark_varying(wrap_keys(cast_like(after, before), state), layout.apart)


def merge_replicas(carry: TrainState, layout: Layout) -> TrainState:
    """Return the carry at its center, one state for all replicas.

    Params without a center become the mean over replicas, as at a switch to a method that commits.
    """
    found = _running_centers(carry.opt_state)
    if not (found or layout.own):
        return carry
    with layout.context():
        centers = tuple(state.center for state in found)
        return _center(carry, centers, layout, _are_apart(carry, layout))


@functools.partial(jax.jit, static_argnums=(2, 3))
def _center(
    carry: TrainState, centers: tuple[Any, ...], layout: Layout, are_apart: bool
) -> TrainState:
    """Return the first replica's state, with params from centers, or means if there is no center."""
    first, params = carry, carry.params
    if layout.own:
        first, centers = jax.tree.map(lambda leaf: leaf[0], (carry, centers))
        params = jax.tree.map(_average, carry.params) if are_apart else first.params
        first = first.replace(model_state=average_statistics(carry.model_state, _average))
    for center in centers:
        params = fill_masked(center, params)
    # The center may have a wider dtype than the params.
    state = first.replace(params=optax.tree.cast_like(params, first.params), weights=None)
    return state if layout.mesh is None else _share(state, layout)


def _share(state: TrainState, layout: Layout) -> TrainState:
    shared: TrainState = jax.lax.with_sharding_constraint(state, layout.sharding())
    return shared


def _average(leaf: jax.Array) -> jax.Array:
    """Return the mean of floats over the leading axis, with unchanged bits if all are equal."""
    if not jnp.issubdtype(leaf.dtype, jnp.inexact):
        return leaf[0]
    return jnp.where(jnp.all(leaf == leaf[:1], axis=0), leaf[0], jnp.mean(leaf, axis=0))


def warn_of_lost_steps(carry: TrainState, merged: TrainState, layout: Layout, where: int) -> None:
    """Warn if the merged params lack local steps, or are a mean of replicas without a center."""
    if steps := steps_since_commit(merged.opt_state):
        says = f"The params that fit returns lack all or part of the last steps ({steps})"
        advice = (
            "a wrapper blocks the last commit of agn or diloco; put the wrapper around their inner "
            "optimizer"
        )
        warnings.warn(f"{says}: {advice}.", stacklevel=where)
    if named := _find_apart(carry, layout):
        says = (
            f"Replicas have trained {len(named)} of their params apart, because no commit reaches "
        )
        says += ", ".join(map(repr, named[:_MOST_NAMED])) + ", ..." * (len(named) > _MOST_NAMED)
        advice = (
            "put agn or diloco around optax.partition and optax.masked, with all optimizers inside"
        )
        warnings.warn(f"{says}: {advice}. fit returns the mean.", stacklevel=where)
    if _are_apart(carry, layout) and not _running_centers(carry.opt_state):
        says = "The phase of switch_after in which training ended has no commits"
        advice = "fit returns the mean of the params of its replicas, which train apart"
        warnings.warn(f"{says}: {advice}.", stacklevel=where)


def has_no_commit(opt_state: Any) -> bool:
    """Return True if a running phase has taken local steps, and has never committed."""
    return bool(steps_since_commit(opt_state)) and not count_commits(opt_state)
