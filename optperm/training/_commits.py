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
from optperm.core.states import find_running_states, find_states, has_protocol, local_values
from optperm.core.transformation import known_extra_args
from optperm.core.trees import fill_masked
from optperm.evaluation import evaluate
from optperm.exact import CommittingState, only_commits
from optperm.training._layout import Layout, average_statistics
from optperm.training._steps import compile_on_replicas, evaluate_step, unwrap_keys, wrap_keys
from optperm.training._train_state import Model, TrainState

# The number of calls after which `optax.MultiSteps` has made a step, if it makes any.
_MOST_CALLS = 1000
_FAR = 2**30  # a number of steps since a commit above any period


def steps_since_commit(opt_state: Any) -> int:
    """Return the maximum number of steps not in the center of a running phase; 0 without a center."""
    found = _running_centers(opt_state)
    return max((int(local_values(state.since_commit).max()) for state in found), default=0)


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
    if _are_apart(carry, layout) and not _running_centers(carry.opt_state):
        says = "The phase of switch_after in which training ended has no commits"
        advice = "fit returns the mean of the params of its replicas, which train apart"
        warnings.warn(f"{says}: {advice}.", stacklevel=where)


def ends_before_commit(carry: TrainState, steps: float, layout: Layout) -> bool:
    """Return True if a number of further steps ends before the first commit, without taking a step.

    Plans of exchanges do not depend on the steps since a commit, so the result for plans is False.
    """
    found = _running_centers(carry.opt_state)
    if not found or any(local_values(state.commits).max() for state in found):
        return False
    done = steps_since_commit(carry.opt_state)

    def count(state: TrainState, last: jax.Array, _: Any) -> tuple[Any, Any]:
        """Return the steps since a commit after the step that follows `last`; XLA removes the rest."""

        def begin(node: Any) -> Any:
            is_local: bool = has_protocol(node, CommittingState)
            if not is_local:
                return node
            return node._replace(since_commit=cast_like(last, node.since_commit))

        at = jax.tree.map(
            begin, state.opt_state, is_leaf=lambda x: has_protocol(x, CommittingState)
        )
        zero = optax.tree.sub(state.params, state.params)

        def loss_fn(params: Any, _: Any) -> jax.Array:
            total: Any = sum(jnp.sum(jnp.real(leaf)) for leaf in jax.tree.leaves(params))
            return jnp.asarray(total)

        e = evaluate(loss_fn, state.params, jnp.zeros(1))
        after = state.tx.update(zero, at, state.params, **known_extra_args(state.tx, e.extra_args))
        states = list[Any](find_states(after[1], CommittingState))
        return state, [each.since_commit for each in states]

    ends = jax.jit(lambda *given: layout.map_replicas(count, 0)(*given)[1])
    lasts = [jnp.int32(min(n, _FAR)) for n in (done + steps - 1, _FAR)]
    try:
        with layout.context():
            at_end, far = ([int(x) for x in jax.device_get(ends(carry, n, ()))] for n in lasts)
    except Exception:  # a method may reject this loss, which is not the user's loss
        return False
    return any(late and not early for late, early in zip(at_end, far, strict=True))
