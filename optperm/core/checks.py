"""Check arguments. Messages state the value, the allowed values and, if useful, advice.

Each check sees only what Python can see. The values of traced numbers and arrays (under `jax.jit` or
`optax.inject_hyperparams`) pass unchecked, and so do the values of schedules.
"""

import reprlib
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
import optax

_ADVICE = (
    "Give leaves of other dtypes to another optimizer with optax.partition, or mask them with "
    "optax.masked."
)
_ADVICE_COMPLEX = (
    "Train real and imaginary parts as two real arrays that the loss combines. A method without extra "
    "arguments also works in optax.contrib.split_real_and_imaginary(tx), with optax.apply_updates."
)
_ADVICE_FUNCTIONS = (
    " If a model has functions among its leaves, pass only the arrays: for Equinox, "
    "eqx.filter(model, eqx.is_inexact_array)."
)
# Counts in states are int32, and hyperparameters are computed in float32.
_LARGEST_INT32 = 2**31 - 1
LARGEST_FLOAT32 = float(np.finfo(np.float32).max)


class _Repr(reprlib.Repr):
    """Texts of values for messages. An array is its dtype and shape, and long texts are cut."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = self.maxlong = 200

    def repr1(self, x: Any, level: int) -> str:
        """Return the text of a value, or of an item of a container."""
        is_array = isinstance(x, jax.Array | np.ndarray) and x.ndim
        return f"{x.dtype}{[*x.shape]}" if is_array else super().repr1(x, level)


shown = _Repr().repr


def is_concrete_number(value: object) -> TypeGuard[float | np.ndarray | jax.Array]:
    """Return whether a number has a known value: it is neither traced nor a schedule."""
    return not callable(value) and not isinstance(value, jax.core.Tracer)


def is_real(dtype: Any) -> bool:
    """Return whether a dtype is a floating or an integer dtype."""
    return jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer)


def check_in_range(
    name: str,
    value: object,
    low: float,
    high: float,
    *,
    may_be_schedule: bool = True,
    advice: str = "",
) -> None:
    """Raise unless a concrete number is in [low, high], and finite in float32.

    Args:
      name: The argument's name, for the message.
      value: A number, a schedule (not checked) or a traced value (not checked).
      low: The minimum allowed value, or `-float("inf")`.
      high: The maximum allowed value, or `float("inf")`.
      may_be_schedule: Whether a schedule is allowed.
      advice: A sentence with advice at the end of the message.

    Raises:
      TypeError: If `value` is a bool or not a real number.
      ValueError: If `value` is NaN, infinite, out of range or not a single number.
    """
    if isinstance(value, jax.core.Tracer) or (may_be_schedule and callable(value)):
        return
    wanted = "a real number or a schedule" if may_be_schedule else "a real number"
    number = _as_scalar(name, value, wanted)
    if not (low <= number <= high and abs(number) <= LARGEST_FLOAT32):
        limits = f"at least {low:g}" if high == np.inf else f"in [{low:g}, {high:g}]"
        limits = "finite in float32" if low <= number <= high else limits
        raise ValueError(f"{name} must be {limits}, got {number!r}. {advice}".rstrip())


def check_decay(name: str, value: object) -> None:
    """Raise unless a concrete number is in [0, 1) in float32; traced values are not checked.

    Raises:
      TypeError: If `value` is a bool or not a number.
      ValueError: If `value` is NaN or out of range. With 1, a bias correction 1 - 1^t would be 0.
    """
    if isinstance(value, jax.core.Tracer):
        return
    number = _as_scalar(name, value, "a real number")
    if not (0 <= number < 1 and np.float32(number) < 1):
        raise ValueError(f"{name} must be in [0, 1) in float32, got {value!r}.")


def check_positive(name: str, value: object, high: float = float("inf")) -> None:
    """Raise unless a concrete number is in (0, high]; traced values are not checked.

    Raises:
      TypeError: If `value` is a bool or not a number.
      ValueError: If `value` is NaN or out of range.
    """
    if (
        not isinstance(value, jax.core.Tracer)
        and not 0 < _as_scalar(name, value, "a real number") <= high
    ):
        limit = "" if high == np.inf else f" and at most {high:g}"
        raise ValueError(f"{name} must be above 0{limit}, got {value!r}.")


def _as_scalar(name: str, value: object, wanted: str) -> float:
    array = np.asarray(value)
    if not is_real(array.dtype):
        advice = ": pass the value of the schedule at a step" if callable(value) else ""
        raise TypeError(f"{name} must be {wanted}, got {shown(value)}{advice}.")
    if array.ndim:
        raise ValueError(f"{name} must be a single number, got an array of shape {array.shape}.")
    return float(array)


def check_count(
    name: str, value: object, *, minimum: int = 1, maximum: int = _LARGEST_INT32
) -> None:
    """Raise unless `value` is an integer (not a bool) in [minimum, maximum].

    The range of a traced value is not checked.

    Raises:
      TypeError: If `value` is not an integer.
      ValueError: If `value` is out of range.
    """
    array: Any = value if isinstance(value, jax.Array) else np.asarray(value)
    if array.ndim or not jnp.issubdtype(array.dtype, jnp.integer):
        raise TypeError(f"{name} must be an integer, got {shown(value)}.")
    if not isinstance(value, jax.core.Tracer) and not minimum <= int(array) <= maximum:
        limit = f"at least {minimum}" if int(array) < minimum else f"at most {maximum}"
        raise ValueError(f"{name} must be {limit}, got {value!r}.")


def check_static_count(name: str, value: object, *, minimum: int = 1) -> None:
    """Raise unless `value` is a Python or NumPy integer of at least `minimum`, for shapes of arrays.

    Raises:
      TypeError: If `value` is a JAX array, traced or not, or not an integer.
      ValueError: If `value` is out of range.
    """
    if isinstance(value, jax.Array):
        raise TypeError(
            f"{name} sets the shapes of arrays, so it must be an int: with optax.inject_hyperparams, "
            "name it in static_args."
        )
    check_count(name, value, minimum=minimum)


def dtype_of(name: str, value: object) -> Any:
    """Return the dtype of an array or a number; raise a TypeError if `value` is neither."""
    # NumPy arrays may also contain objects, strings and dates.
    dtype = getattr(value, "dtype", np.dtype(object))
    is_array = getattr(dtype, "kind", "V") not in "OSUMm"
    if not is_array and not isinstance(value, bool | int | float | complex):
        advice = _ADVICE_FUNCTIONS if callable(value) else ""
        raise TypeError(f"{name} must be an array of numbers, got {shown(value)}.{advice}")
    return jnp.result_type(value)


def check_arrays(name: str, tree: Any) -> None:
    """Raise a TypeError that names the first leaf of `tree` that is not an array or a number."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        dtype_of(f"{name}{jax.tree_util.keystr(path)}", leaf)


def count_examples(name: str, tree: Any, *, has_scalars: bool = False) -> int:
    """Return the length of the leading axis of all leaves, which counts examples.

    With `has_scalars`, leaves without an axis are also allowed, and all examples share them.

    Raises:
      ValueError: If leaves do not agree in this axis, or if the axis is missing or empty.
    """
    shapes = [jnp.shape(leaf) for leaf in jax.tree.leaves(tree)]
    lengths = {shape[:1] for shape in shapes if shape or not has_scalars}
    if len(lengths) != 1 or lengths & {(), (0,)}:
        wanted = "must be arrays that agree in their leading axis, the axis of examples"
        what = "contains no examples" if lengths == {(0,)} else wanted
        raise ValueError(f"{name} {what}: got shapes {shapes}.")
    ((length,),) = lengths
    return int(length)


def check_key(name: str, value: Any) -> None:
    """Raise unless `value` is one random key: a typed key, the raw data of a key, or an int as its seed.

    Raises:
      TypeError: If `value` is none of these.
      ValueError: If an int is negative or has more than 32 bits, of which JAX would drop some.
    """
    dtype, shape = getattr(value, "dtype", None), getattr(value, "shape", None)
    is_typed = dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)
    # The raw data of a key are two words of threefry, or four of rbg.
    if (is_typed and shape == ()) or (dtype == jnp.uint32 and shape in ((2,), (4,))):
        return
    is_number = isinstance(value, int) and not isinstance(value, bool)
    is_array = shape == () and dtype is not None and jnp.issubdtype(dtype, jnp.integer)
    if not (is_number or is_array):
        message = "must be an int or a single random key, such as jax.random.key(0)"
        raise TypeError(f"{name} {message}, got {shown(value)}.")
    check_count(name, value, minimum=0, maximum=2**32 - 1)


def check_function(name: str, value: object, arguments: str) -> None:
    """Raise a TypeError unless `value` can be called."""
    if not callable(value):
        raise TypeError(f"{name} must be a function {arguments}, got {shown(value)}.")


def check_real_floating(name: str, tree: Any, *, advice: str | None = None) -> None:
    """Raise a TypeError that names the first leaf of `tree` whose dtype is not real floating."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        place = f"{name}{jax.tree_util.keystr(path)}"
        dtype = dtype_of(place, leaf)
        if not jnp.issubdtype(dtype, jnp.floating):
            is_complex = jnp.issubdtype(dtype, jnp.complexfloating)
            usual = f"{_ADVICE_COMPLEX} {_ADVICE}" if is_complex else _ADVICE
            advice = usual if advice is None else advice
            raise TypeError(f"{place} has dtype {dtype}, but must be real floating. {advice}")


def check_same_tree(
    name: str, tree: Any, expected: Any, *, source: str, dtypes: bool = True
) -> None:
    """Raise unless `tree` has the structure, shapes and dtypes of `expected`.

    Args:
      name: The name of `tree`, for the message.
      tree: The tree to check.
      expected: The tree to compare with.
      source: The origin of `expected`, for the message.
      dtypes: Whether dtypes must also agree.

    Raises:
      TypeError: If a leaf is not an array; the message names the first such leaf.
      ValueError: If a leaf differs; the message names the first such leaf and the difference.
    """
    if not _have_equal_structures(tree, expected):
        difference = _find_other_node(name, tree, expected)
        raise ValueError(f"{name} has a different tree structure from {source}: {difference}.")
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    for (path, leaf), wanted in zip(leaves, jax.tree.leaves(expected), strict=True):
        place = f"{name}{jax.tree_util.keystr(path)}"
        dtype, shape = dtype_of(place, leaf), jnp.shape(leaf)
        wanted_dtype, wanted_shape = jnp.result_type(wanted), jnp.shape(wanted)
        if shape != wanted_shape or (dtypes and dtype != wanted_dtype):
            expects = f"{source} has {wanted_dtype}{list(wanted_shape)} there"
            raise ValueError(f"{place} is {dtype}{list(shape)}, but {expects}.")


def _find_other_node(name: str, tree: Any, expected: Any) -> str:
    """Describe the first node of a tree that differs from the node of the expected tree."""

    def children(node: Any) -> tuple[dict[str, Any], Any]:
        pairs, structure = jax.tree_util.tree_flatten_with_path(
            node, is_leaf=lambda each: each is not node
        )
        return {jax.tree_util.keystr(path): child for path, child in pairs}, structure

    (own, structure), (wanted, wanted_structure) = children(tree), children(expected)
    if structure == wanted_structure:
        place = next(at for at in own if not _have_equal_structures(own[at], wanted[at]))
        return _find_other_node(f"{name}{place}", own[place], wanted[place])
    kinds = [_name_kind(node) for node in (tree, expected)]
    if kinds[0] != kinds[1]:
        return f"{name} is {kinds[0]}, not {kinds[1]}"
    for says, one, other in (("is missing", wanted, own), ("is not expected", own, wanted)):
        if missing := [place for place in one if place not in other]:
            return f"{name}{missing[0]} {says}"
    return f"the static fields of {name} differ"


def _have_equal_structures(tree: Any, other: Any) -> bool:
    structure: Any = jax.tree.structure(tree)
    return bool(structure == jax.tree.structure(other))


def _name_kind(node: Any) -> str:
    if node is None:
        return "None"
    is_array = hasattr(node, "dtype") and jax.tree_util.treedef_is_leaf(jax.tree.structure(node))
    return "an array" if is_array else with_article(type(node).__name__)


def check_flag(name: str, value: object) -> None:
    """Raise a TypeError unless `value` is True or False."""
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{name} must be True or False, got {shown(value)}.")


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Raise a ValueError unless `value` is one of the allowed strings."""
    if not isinstance(value, str) or value not in choices:
        raise ValueError(
            f"{name} must be one of {', '.join(map(repr, choices))}, got {shown(value)}."
        )


def check_transformation(name: str, value: object) -> None:
    """Raise a TypeError unless `value` is an `optax.GradientTransformation`."""
    if not isinstance(value, optax.GradientTransformation):
        wanted = f"{name} must be an optax.GradientTransformation"
        if isinstance(value, optax.MultiSteps):
            raise TypeError(f"{wanted}, which MultiSteps(...).gradient_transformation() returns.")
        raise TypeError(f"{wanted}, got {shown(value)}.")


def as_optimizer(name: str, value: Any) -> optax.GradientTransformationExtraArgs:
    """Return an optimizer that accepts extra arguments, even for an `optax.MultiSteps`.

    Raises:
      TypeError: If `value` is not a transformation.
    """
    if isinstance(value, optax.MultiSteps):
        value = value.gradient_transformation()
    check_transformation(name, value)
    return optax.with_extra_args_support(value)


def check_state(method: str, state: Any, own_type: Any, conversion: str = "") -> None:
    """Raise a ValueError unless a state has the type of a method's states; `Any` allows all types."""
    if own_type is Any or isinstance(state, own_type):
        return
    wanted = f"{with_article(own_type.__name__)}, the state that its init makes"
    found = name_states(state)
    if isinstance(state, dict | list):
        conversion = (
            "A checkpoint that is restored without a target has dicts and lists instead of states: "
            "restore it with the state of init as the target."
        )
    raise ValueError(f"{method} needs {wanted}, got {found}. {conversion}".rstrip())


def name_states(opt_state: Any) -> str:
    """Return the names of the states in an optimizer's state, outer states first, for a message."""
    names: list[str] = []

    def visit(node: Any) -> bool:
        if hasattr(node, "_fields"):
            names.append(type(node).__name__)
        return False

    jax.tree.leaves(opt_state, is_leaf=visit)
    return ", ".join(dict.fromkeys(names)) or f"a {type(opt_state).__name__}"


def with_article(name: str) -> str:
    """Return a name with its article, for a message."""
    return f"{'an' if name[0] in 'AEIO' else 'a'} {name}"


def check_axis_name(name: str, value: object) -> None:
    """Raise a TypeError unless `value` is None, the name of a mapped axis or a tuple of names."""
    names = value if isinstance(value, tuple) else (value,)
    if value is not None and not all(isinstance(each, str) for each in names):
        wanted = "the name of a mapped axis, or a tuple of names"
        raise TypeError(f"{name} must be {wanted}, got {shown(value)}.")


def is_bound(axis_name: str | tuple[str, ...]) -> bool:
    """Return whether all named axes are mapped in the current trace."""
    try:
        jax.lax.axis_size(axis_name)
    except NameError:
        return False
    return True


def check_axis_is_bound(
    axis_name: str | tuple[str, ...] | None, *, name: str = "axis_name"
) -> None:
    """Raise a ValueError unless all named axes are mapped in the current trace."""
    try:
        jax.lax.axis_size(axis_name or ())
    except NameError as error:
        advice = (
            "call this within jax.pmap, jax.shard_map or jax.vmap over it (in fit: pass "
            f"axis_name={axis_name!r}), or leave {name} out"
        )
        raise ValueError(f"{name} {axis_name!r} is not bound here: {advice}.") from error
