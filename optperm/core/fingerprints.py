"""Recognize the arguments with which a state was made, so that no state is misread.

Arguments such as axes, a criterion or a compression determine what the arrays of a state mean. A state
that depends on such arguments contains a number for each of them, which a checkpoint keeps.
"""

import dataclasses
import zlib
from collections.abc import Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from optperm.core.states import find_states, local_values
from optperm.core.trees import without_variables

# The number of an argument with a traced value, which counts as equal to all others.
_UNKNOWN = 0
# The default of the field `fingerprint`, which `core.transformation` replaces.
UNSET: Any = None


class ShapedState(Protocol):
    """A state with a field `fingerprint`, a uint32 array (k,) with a number for each of k arguments."""

    def shaped_by(self) -> tuple[str, ...]:
        """Return the names of the k arguments, in order."""
        ...


def fill_fingerprint(state: Any, arguments: Mapping[str, Any]) -> Any:
    """Return a new state with the fingerprint of the arguments.

    Args:
      state: A `ShapedState`.
      arguments: The value of each argument, by name: a tree of numbers, strings, arrays and dataclasses.
        Functions must be replaced by what they return for the params, since two functions cannot be
        compared.
    """
    numbers = [_hash(arguments[name]) for name in state.shaped_by()]
    return state._replace(fingerprint=jnp.asarray(np.array(numbers, np.uint32)))


def check_fingerprint(method: str, state: Any, arguments: Mapping[str, Any]) -> None:
    """Raise a ValueError that names the first argument with which the state was not made.

    The numbers of a traced state cannot be read, so nothing is checked then.

    Args:
      method: The public name of the function that got the state.
      state: A `ShapedState`, in any stack of replicas.
      arguments: Some of the arguments, as in `fill_fingerprint`.
    """
    if state.fingerprint is UNSET or isinstance(state.fingerprint, jax.core.Tracer):
        return
    saved = dict(zip(state.shaped_by(), _read(state), strict=True))
    for name, value in arguments.items():
        if _differ(saved[name], _hash(value)):
            raise ValueError(describe_difference(method, name))


def check_not_stacked(method: str, state: Any) -> None:
    """Raise a ValueError if a `ShapedState` is a stack of states, as `jax.vmap` makes."""
    if state.fingerprint is not UNSET and np.ndim(state.fingerprint) > 1:
        raise ValueError(f"{method} got a stack of states: call it within jax.vmap.")


def describe_difference(method: str, name: str) -> str:
    """Return the message for a state that was made with another value of an argument."""
    return (
        f"{method} got a state that was made with another {name}=. Pass the value with which init made "
        "the state, or make a new state with init."
    )


def list_fingerprints(opt_state: Any) -> list[dict[str, list[int]]]:
    """Return the numbers of each argument, in all replicas on this process, for each shaped state."""
    return [
        dict(zip(state.shaped_by(), _read(state).tolist(), strict=True))
        for state in find_shaped(opt_state)
    ]


def compare_fingerprints(
    saved: list[dict[str, list[int]]], fresh: list[dict[str, list[int]]]
) -> list[str]:
    """Return the names of the arguments that differ, given the lists of two optimizer states."""
    return [
        name
        for one, other in zip(saved, fresh, strict=True)
        for name, there in one.items()
        if name in other and _differ(np.asarray(there), other[name][0])
    ]


def find_shaped(opt_state: Any) -> list[Any]:
    """Return the states with a fingerprint, in any nesting, outer states first."""
    found: list[Any] = []
    for state in find_states(opt_state, ShapedState):
        found += [state, *find_shaped(list[Any](state))]  # type: ignore[call-overload]
    return found


def _read(state: Any) -> np.ndarray[Any, Any]:
    """Return a row for each argument, with the numbers of all replicas on this process."""
    numbers = local_values(state.fingerprint)
    # Means over states are no longer fingerprints; other files of checkpoints may store signed integers.
    is_exact = np.issubdtype(numbers.dtype, np.integer)
    numbers = numbers.astype(np.uint32) if is_exact else np.full(numbers.shape, _UNKNOWN)
    return numbers.reshape(-1, len(state.shaped_by())).T


def _differ(saved: Any, number: Any) -> bool:
    return bool(np.any((saved != number) & (saved != _UNKNOWN) & (number != _UNKNOWN)))


def _hash(value: Any) -> int:
    """Return a number for a tree of values."""
    leaves = jax.tree_util.tree_leaves_with_path(
        without_variables(value), is_leaf=lambda node: node is None
    )
    if any(isinstance(leaf, jax.core.Tracer) for _, leaf in leaves):
        return _UNKNOWN
    described = [(jax.tree_util.keystr(path), _describe(leaf)) for path, leaf in leaves]
    return zlib.crc32(repr(described).encode())


def _describe(leaf: Any) -> Any:
    """Return a text for a value, the same in each process."""
    if leaf is None or isinstance(leaf, str):
        return leaf
    if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
        fields = {each.name: _hash(getattr(leaf, each.name)) for each in dataclasses.fields(leaf)}
        return type(leaf).__name__, fields
    if isinstance(leaf, bool | int | float | np.generic | np.ndarray | jax.Array):
        # Equal numbers count as equal in any type, as a number of Python and a float32.
        array = np.asarray(leaf)
        is_exact = np.issubdtype(array.dtype, np.integer) or array.dtype == bool
        return array.shape, (array if is_exact else array.astype(np.float32)).ravel().tolist()
    raise TypeError(f"A fingerprint cannot contain {leaf!r}.")
