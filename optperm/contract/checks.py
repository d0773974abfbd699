"""Checks of what users pass, with messages that say what came, what is allowed and what to do.

Each check sees only what Python can see: numbers and trees that are being traced (under `jax.jit` or
`optax.inject_hyperparams`) pass through unchecked, as do schedules.
"""

from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optperm.contract import shardings

# The one advice for params that cannot be trained.
_ADVICE = (
    "Give the others to another optimizer with optax.partition, or mask them with optax.masked."
)
_ADVICE_COMPLEX = (
    "Train real and imaginary parts with optax.contrib.split_real_and_imaginary(tx), and apply the "
    "updates with optax.apply_updates."
)
# What a state counts in.
_LARGEST_INT32 = 2**31 - 1
# What hyperparameters are computed in.
_LARGEST_FLOAT32 = float(np.finfo(np.float32).max)


def is_concrete_number(value: object) -> TypeGuard[float | np.ndarray | jax.Array]:
    """Whether `value` is a number whose value can be looked at now, rather than traced or a schedule."""
    return not callable(value) and not isinstance(value, jax.core.Tracer)


def check_in_range(
    name: str,
    value: object,
    low: float,
    high: float,
    *,
    may_be_schedule: bool = True,
    advice: str = "",
) -> None:
    """Raises unless a concrete number lies in [low, high].

    Args:
      name: The argument's name, for the message.
      value: A number, a schedule (not checked) or a traced value (not checked).
      low: The smallest value allowed; `-float("inf")` for all that float32 holds.
      high: The largest value allowed; `float("inf")` for all that float32 holds.
      may_be_schedule: Whether a schedule is allowed.
      advice: What to do about it, a sentence that ends the message.

    Raises:
      TypeError: If `value` is a bool or not a number at all.
      ValueError: If `value` is NaN, infinite or out of range.
    """
    if isinstance(value, jax.core.Tracer) or (may_be_schedule and callable(value)):
        return
    number = _as_scalar(name, value, "a number or a schedule" if may_be_schedule else "a number")
    if not max(low, -_LARGEST_FLOAT32) <= number <= min(high, _LARGEST_FLOAT32):
        limits = f"at least {low:g}" if high == float("inf") else f"in [{low:g}, {high:g}]"
        if low <= number <= high:
            limits = "finite in float32"
        raise ValueError(f"{name} must be {limits}, got {number!r}. {advice}".rstrip())


def check_positive(name: str, value: object) -> None:
    """Raises unless a concrete number is above 0; traced values are not checked.

    Raises:
      TypeError: If `value` is a bool or not a number at all.
      ValueError: If `value` is NaN, zero or negative.
    """
    if (
        not isinstance(value, jax.core.Tracer)
        and not (number := _as_scalar(name, value, "a number")) > 0
    ):
        raise ValueError(f"{name} must be above 0, got {number!r}.")


def _as_scalar(name: str, value: object, wanted: str) -> float:
    try:
        array = np.asarray(value)
    except (TypeError, ValueError):  # ragged, or a random key
        array = np.asarray(None)
    if array.dtype == bool or (array.dtype.kind not in "iuf" and array.dtype != jnp.bfloat16):
        advice = ": call the schedule first" if callable(value) else ""
        raise TypeError(f"{name} must be {wanted}, got {value!r}{advice}.")
    if array.ndim != 0:
        raise ValueError(f"{name} must be a single number, got an array of shape {array.shape}.")
    return float(array)


def check_count(
    name: str, value: object, *, minimum: int = 1, maximum: int = _LARGEST_INT32
) -> None:
    """Raises unless `value` is an integer (a bool is not one), traced or in [minimum, maximum].

    Raises:
      TypeError: If `value` is not an integer.
      ValueError: If `value` is out of range.
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
    if value > maximum:
        raise ValueError(f"{name} must be at most {maximum}, got {value!r}.")


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


def dtype_of(name: str, value: object) -> Any:
    """The dtype of an array or a number; raises a TypeError if `value` is neither."""
    is_array = hasattr(value, "dtype") and not isinstance(value, jax.ShapeDtypeStruct)
    if is_array or isinstance(value, bool | int | float | complex):
        try:
            dtype = jnp.result_type(value)
        except TypeError:  # of strings, dates or objects
            dtype = None
        if dtype is not None and _fits(value, dtype):
            return dtype
    advice = "Of a model with functions among its leaves, pass the arrays alone: for Equinox "
    advice += "eqx.filter(model, eqx.is_inexact_array)."
    says = f"{name} must be an array of numbers, got {value!r}."
    raise TypeError(f"{says} {advice}" if callable(value) else says)


def _fits(value: Any, dtype: Any) -> bool:
    if not isinstance(value, int) or isinstance(value, bool):
        return True
    limits = jnp.iinfo(dtype)
    return bool(limits.min <= value <= limits.max)


def check_arrays(name: str, tree: Any) -> None:
    """Raises a TypeError that names the first leaf of `tree` that is no array, or random key."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        dtype_of(f"{name}{jax.tree_util.keystr(path)}", leaf)


def count_examples(name: str, tree: Any, *, has_scalars: bool = False) -> int:
    """Return the length of the leading axis of all leaves, which counts examples.

    With `has_scalars` leaves without an axis may stand beside them, which all examples share.

    Raises:
      ValueError: If there is no such axis, leaves do not agree on it, or it is empty.
    """
    shapes = [jnp.shape(leaf) for leaf in jax.tree.leaves(tree)]
    lengths = {shape[:1] for shape in shapes if shape or not has_scalars}
    if len(lengths) != 1 or lengths == {()}:
        wanted = "arrays that agree in their leading axis, which counts examples"
        raise ValueError(f"{name} must be {wanted}, got shapes {shapes}.")
    ((length,),) = lengths
    if not length:
        raise ValueError(f"{name} holds no examples: its arrays are of shapes {shapes}.")
    return int(length)


def check_key(name: str, value: Any) -> None:
    """Raises a TypeError unless `value` is one random key, typed or the raw data of one."""
    dtype, shape = getattr(value, "dtype", None), getattr(value, "shape", None)
    is_typed = dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)
    if not (is_typed and shape == ()) and not (dtype == jnp.uint32 and len(shape or ()) == 1):
        raise TypeError(f"{name} must be a random key, such as jax.random.key(0), got {value!r}.")


def check_function(name: str, value: object, arguments: str) -> None:
    """Raises a TypeError unless `value` can be called."""
    if not callable(value):
        raise TypeError(f"{name} must be a function {arguments}, got {value!r}.")


def check_real_floating(name: str, tree: Any, *, advice: str | None = None) -> None:
    """Raises a TypeError that names the first leaf of `tree` that is not of a real floating dtype."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        dtype = dtype_of(f"{name}{jax.tree_util.keystr(path)}", leaf)
        if not jnp.issubdtype(dtype, jnp.floating):
            is_complex = jnp.issubdtype(dtype, jnp.complexfloating)
            usual = f"{_ADVICE_COMPLEX} {_ADVICE}" if is_complex else _ADVICE
            raise TypeError(
                f"{name}{jax.tree_util.keystr(path)} has dtype {dtype}; "
                f"only real floating dtypes can be trained. {usual if advice is None else advice}"
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
      TypeError: Naming the first leaf that is no array.
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
        is_struct = isinstance(leaf, jax.ShapeDtypeStruct)
        dtype = leaf.dtype if is_struct else dtype_of(f"{name}{jax.tree_util.keystr(path)}", leaf)
        wanted_dtype = jnp.result_type(wanted)
        shape, wanted_shape = jnp.shape(leaf), jnp.shape(wanted)
        if shape != wanted_shape or (dtypes and dtype != wanted_dtype):
            raise ValueError(
                f"{name}{jax.tree_util.keystr(path)} is {dtype}{list(shape)}, but {source} "
                f"has {wanted_dtype}{list(wanted_shape)} there."
            )


def check_same_mesh(name: str, tree: Any, expected: Any, *, source: str) -> None:
    """Raises a ValueError if two trees are spread over different meshes, where that can be seen.

    It can on meshes with explicit axes, and for arrays that are not traced.
    """
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    for (path, leaf), other in zip(leaves, jax.tree.leaves(expected), strict=True):
        if shardings.on_different_meshes(leaf, other) or shardings.is_cut_alone(leaf, other):
            raise ValueError(
                f"{name}{jax.tree_util.keystr(path)} lies on {shardings.describe(leaf)}, but "
                f"{source} there on {shardings.describe(other)}: move one of them with jax.device_put, "
                "or call init again on these params."
            )


def check_flag(name: str, value: object) -> None:
    """Raises a TypeError unless `value` is True or False."""
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{name} must be True or False, got {value!r}.")


def check_seed(name: str, value: object) -> None:
    """Raises unless `value` is an integer of 32 bits without a sign, or a traced one.

    Raises:
      TypeError: If `value` is not an integer.
      ValueError: If `value` is negative, or has more bits: JAX would drop those.
    """
    check_count(name, value, minimum=0, maximum=2**32 - 1)


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Raises a ValueError unless `value` is one of the strings allowed."""
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}.")


def check_transformation(name: str, value: object) -> None:
    """Raises a TypeError unless `value` is an optimizer as Optax builds them."""
    if not isinstance(value, optax.GradientTransformation):
        raise TypeError(
            f"{name} must be an optax.GradientTransformation such as optax.adam(1e-3), got {value!r}. "
            "Of optax.MultiSteps pass what its method gradient_transformation() gives."
        )


def check_axis_name(name: str, value: object) -> None:
    """Raises a TypeError unless `value` is None, the name of a mapped axis or a tuple of names."""
    names = value if isinstance(value, tuple) else (value,)
    if value is not None and not all(isinstance(each, str) for each in names):
        raise TypeError(
            f"{name} must be the name of a mapped axis, a tuple of names, or None, got {value!r}."
        )


def check_axis_is_bound(
    axis_name: str | tuple[str, ...] | None, *, name: str = "axis_name"
) -> None:
    """Raises a ValueError if a named axis is not mapped over where this is traced."""
    try:
        jax.lax.axis_size(axis_name or ())
    except NameError as error:
        raise ValueError(
            f"{name} {axis_name!r} is not bound here: call this within jax.pmap, jax.shard_map or "
            f"jax.vmap over an axis of that name (optperm.training.fit maps over one with devices or "
            f"mesh), or leave {name} out for a single replica."
        ) from error
