"""Averages over replicas, and steps that are skipped, for steps in full and in a subspace."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optperm.core import mapped_axes
from optperm.core.dtypes import accumulation_dtype, cast_like
from optperm.core.mapped_axes import AxisName, shared
from optperm.subspace._subspace import mean_over

ValueFn = Callable[[optax.Params], jax.Array]
# The extra arguments that a line search needs.
SEARCH_EXTRAS = {
    "value": "the loss on this batch",
    "value_fn": "the loss on this batch at given params",
}


def mean_over_replicas(
    updates: optax.Updates,
    params: optax.Params,
    extras: dict[str, Any],
    axis_name: AxisName | None,
) -> tuple[optax.Updates, dict[str, Any]]:
    """Return the gradient in a wide dtype, and the loss and its function, averaged over replicas."""
    dtype = accumulation_dtype(params)
    grads = jax.tree.map(lambda g, p: jnp.asarray(g, accumulation_dtype(p)), updates, params)
    value: Any = extras.get("value")
    value_fn: ValueFn | None = extras.get("value_fn")
    value = None if value is None else jnp.asarray(value, dtype)
    if axis_name is None:
        return grads, {**extras, "value": value}

    # In one collective for each dtype
    grads, mean = mean_over((grads, value), axis_name)
    if value_fn is not None:

        @functools.wraps(value_fn)
        def evaluate_wide(at: optax.Params, **options: Any) -> jax.Array:
            return jnp.asarray(value_fn(at, **options), dtype)

        mean_value = mapped_axes.mean_of_function(
            evaluate_wide, (value, updates), axis_name, shared
        )
        extras = {**extras, "value_fn": mean_value}
    return grads, {**extras, "value": mean}


def step_where(
    is_finite: jax.Array,
    optimizer: optax.GradientTransformationExtraArgs,
    direction: optax.Updates,
    opt_state: Any,
    params: optax.Params,
    extras: dict[str, Any],
) -> tuple[optax.Updates, Any]:
    """Take a step of an optimizer, or none if the gradient is not finite; return updates and state."""
    moves, new = optimizer.update(cast_like(direction, params), opt_state, params, **extras)
    moves = cast_like(moves, params)
    moves = optax.tree.where(is_finite, moves, optax.tree.zeros_like(moves))
    return moves, optax.tree.where(is_finite, cast_like(new, opt_state), opt_state)
