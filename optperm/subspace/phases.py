"""What the phases of DLDR share: the extra arguments, averages over replicas, and skipped steps."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optperm.contract import checks, dtypes, mapped_axes
from optperm.contract.dtypes import accumulation_dtype
from optperm.contract.mapped_axes import AxisName, mark_varying, shared, varying_axes
from optperm.subspace.projection import mean_over

ValueFn = Callable[[optax.Params], jax.Array]


def inner_optimizer(
    optimizer: optax.GradientTransformation | None,
) -> optax.GradientTransformationExtraArgs:
    """The optimizer given, or one that takes the steps as they are."""
    inner = optax.sgd(1.0) if optimizer is None else optimizer
    checks.check_transformation("optimizer", inner)
    return optax.with_extra_args_support(inner)


def require_values(value: Any, value_fn: ValueFn | None, method: str) -> tuple[Any, ValueFn]:
    """Returns the two extra arguments, or raises a ValueError that names the one that is missing."""
    if value is None or value_fn is None:
        missing = "value" if value is None else "value_fn"
        raise ValueError(
            f"{method} needs the extra argument {missing}, the loss on this batch"
            f"{'' if value is None else ' at given params'}: e = optperm.evaluate(loss_fn, params, "
            "batch), then update(e.grad, state, params, **e.extra_args)."
        )
    return value, value_fn


def mean_over_replicas(
    updates: optax.Updates,
    params: optax.Params,
    extras: dict[str, Any],
    axis_name: AxisName | None,
) -> tuple[optax.Updates, dict[str, Any]]:
    """The gradient in a wide dtype, and the loss and its function, averaged over the replicas."""
    dtype = accumulation_dtype(params)
    grads = jax.tree.map(lambda g, p: jnp.asarray(g, accumulation_dtype(p)), updates, params)
    value: Any = extras.get("value")
    value_fn: Any = extras.get("value_fn")
    value = None if value is None else jnp.asarray(value, dtype)
    if axis_name is None:
        return grads, {**extras, "value": value}

    grads, mean = mean_over((grads, value), axis_name)
    if value_fn is not None:

        @functools.wraps(value_fn)
        def wide_value(at: optax.Params, **options: Any) -> jax.Array:
            return jnp.asarray(value_fn(at, **options), dtype)

        mean_value = mapped_axes.mean_of_function(wide_value, (value, updates), axis_name, shared)
        extras = {**extras, "value_fn": mean_value}
    return grads, {**extras, "value": mean}


def choose(predicate: jax.Array, new: Any, old: Any) -> Any:
    """One of two trees, leaf by leaf."""
    return jax.tree.map(lambda a, b: a if a is b else jnp.where(predicate, a, b), new, old)


def cast_like(tree: Any, like: Any) -> Any:
    """The tree with the dtypes of another, none of them weak, marked as varying where it is."""
    marked = jax.tree.map(lambda leaf, other: mark_varying(leaf, varying_axes(other)), tree, like)
    return dtypes.cast_like(marked, like)
