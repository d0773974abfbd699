"""Checks of what users pass, with messages that say what came, what is allowed and what to do.

Each check sees only what Python can see: numbers and trees that are being traced (under `jax.jit` or
`optax.inject_hyperparams`) pass through unchecked, as do schedules.
"""

from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
import optax


def is_concrete_number(value: object) -> TypeGuard[float | np.ndarray | jax.Array]:
    """Whether `value` is a number whose value can be looked at now, rather than traced or a schedule."""
    return not callable(value) and not isinstance(value, jax.core.Tracer)


def check_in_range(name: str, value: object, low: float, high: float, *, advice: str = "") -> None:
    """Raises unless a concrete number lies in [low, high].

    Args:
      name: The argument's name, for the message.
      value: A number, a schedule (not checked) or a traced value (not checked).
      low: The smallest value allowed.
      high: The largest value allowed; `float("inf")` for no limit.
      advice: What to do about it, a sentence that ends the message.

    Raises:
      TypeError: If `value` is a bool or not a number at all.
      ValueError: If `value` is NaN or out of range.
    """
    if not is_concrete_number(value):
        return
    number = _as_scalar(name, value)
    if not low <= number <= high:
        limits = f"at least {low:g}" if high == float("inf") else f"in [{low:g}, {high:g}]"
        raise ValueError(f"{name} must be {limits}, got {number!r}. {advice}".rstrip())


def check_positive(name: str, value: object) -> None:
    """Raises unless a concrete number is above 0; schedules and traced values are not checked.

    Raises:
      TypeError: If `value` is a bool or not a number at all.
      ValueError: If `value` is NaN, zero or negative.
    """
    if is_concrete_number(value) and not _as_scalar(name, value) > 0:
        raise ValueError(f"{name} must be above 0, got {float(np.asarray(value))!r}.")


def _as_scalar(name: str, value: object) -> float:
    array = np.asarray(value)
    if array.dtype == bool or (array.dtype.kind not in "iuf" and array.dtype != jnp.bfloat16):
        raise TypeError(f"{name} must be a number or a schedule, got {value!r}.")
    if array.ndim != 0:
        raise ValueError(f"{name} must be a single number, got an array of shape {array.shape}.")
    return float(array)


def check_count(name: str, value: object, *, minimum: int = 1) -> None:
    """Raises unless `value` is an integer (a bool is not one), traced or at least `minimum`.

    Raises:
      TypeError: If `value` is not an integer.
      ValueError: If `value` is below `minimum`.
    """
    if isinstance(value, jax.Array):
        if value.ndim or not jnp.issubdtype(value.dtype, jnp.integer):
            raise TypeError(f"{name} must be an integer, got {value!r}.")
        if isinstance(value, jax.core.Tracer):
            return
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(f"{name} must be an integer, got {value!r}.")
    if value < minimum:
        raise ValueError(f"{name} must be at least {minimum}, got {value!r}.")


def check_static_count(name: str, value: object) -> None:
    """Raises unless `value` is a plain integer of at least 1, which no program can change.

    Raises:
      TypeError: If `value` is an array, traced or not, or not an integer.
      ValueError: If `value` is below 1.
    """
    if isinstance(value, jax.Array):
        raise TypeError(
            f"{name} decides the shapes of arrays and must be a plain integer: with "
            "optax.inject_hyperparams name it in static_args."
        )
    check_count(name, value)


def check_real_floating(name: str, tree: Any, *, advice: str) -> None:
    """Raises a TypeError that names the first leaf of `tree` that is not of a real floating dtype."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
            raise TypeError(
                f"{name}{jax.tree_util.keystr(path)} has dtype {jnp.result_type(leaf)}; "
                f"only real floating dtypes can be trained. {advice}"
            )


def check_same_tree(
    name: str, tree: Any, expected: Any, *, source: str, dtypes: bool = True
) -> None:
    """Raises unless `tree` has the structure, shapes and dtypes of `expected`.

    Args:
      name: What `tree` is, for the message.
      tree: The tree to check.
      expected: The tree to compare with.
      source: Where `expected` comes from, for the message.
      dtypes: Whether dtypes have to agree as well.

    Raises:
      ValueError: Naming the first leaf that differs, and how.
    """
    structure: Any = jax.tree.structure(tree)
    expected_structure: Any = jax.tree.structure(expected)
    if structure != expected_structure:
        raise ValueError(
            f"{name} has another tree structure than {source}: got {structure}, "
            f"expected {expected_structure}."
        )
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    for (path, leaf), wanted in zip(leaves, jax.tree.leaves(expected), strict=True):
        shape, wanted_shape = jnp.shape(leaf), jnp.shape(wanted)
        dtype, wanted_dtype = jnp.result_type(leaf), jnp.result_type(wanted)
        if shape != wanted_shape or (dtypes and dtype != wanted_dtype):
            raise ValueError(
                f"{name}{jax.tree_util.keystr(path)} is {dtype}{list(shape)}, but {source} "
                f"has {wanted_dtype}{list(wanted_shape)} there."
            )


def require_params(params: optax.Params | None, method: str) -> optax.Params:
    """Returns `params`, or raises a ValueError if the caller of `update` did not pass them."""
    if params is None:
        raise ValueError(
            f"{method} needs the current params: call update(updates, state, params) with them."
        )
    return params


def check_flag(name: str, value: object) -> None:
    """Raises a TypeError unless `value` is True or False."""
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{name} must be True or False, got {value!r}.")


def check_seed(name: str, value: object) -> None:
    """Raises unless `value` is a non-negative integer or a traced one.

    Raises:
      TypeError: If `value` is not an integer.
      ValueError: If `value` is negative.
    """
    check_count(name, value, minimum=0)


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Raises a ValueError unless `value` is one of the strings allowed."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}.")


def check_transformation(name: str, value: object) -> None:
    """Raises a TypeError unless `value` is an optimizer as Optax builds them."""
    if not isinstance(value, optax.GradientTransformation):
        raise TypeError(
            f"{name} must be an optax.GradientTransformation such as optax.adam(1e-3), got {value!r}."
        )


def check_axis_name(name: str, value: object) -> None:
    """Raises a TypeError unless `value` is None, the name of a mapped axis or a tuple of names."""
    names = value if isinstance(value, tuple) else (value,)
    if value is not None and not all(isinstance(each, str) for each in names):
        raise TypeError(
            f"{name} must be the name of a mapped axis, a tuple of names, or None, got {value!r}."
        )


def check_axis_is_bound(axis_name: str | tuple[str, ...] | None) -> None:
    """Raises a ValueError if a named axis is not mapped over where this is traced."""
    try:
        jax.lax.axis_size(axis_name or ())
    except NameError as error:
        raise ValueError(
            f"axis_name {axis_name!r} is not bound here: call this within jax.pmap, jax.shard_map or "
            "jax.vmap over an axis of that name, or leave axis_name out for a single replica."
        ) from error
