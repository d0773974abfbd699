"""Lookup of a method's own state inside whatever Optax states it was composed into."""

from typing import Any, TypeVar

import jax
import optax

State = TypeVar("State")


def find_states(opt_state: Any, state_type: type[State]) -> list[State]:
    """All states of a type inside any nesting of chain, masked, partition, MultiSteps and the like.

    The search does not look inside a state that it has found. Optimizer states that `flax.nnx` keeps
    as variables are returned as plain arrays.
    """

    def is_wanted(node: Any) -> bool:
        return isinstance(node, state_type)

    found = [node for node in jax.tree.leaves(opt_state, is_leaf=is_wanted) if is_wanted(node)]
    return [without_variables(state) for state in found]


def find_state(opt_state: Any, state_type: type[State], *, method: str) -> State:
    """The one state of a type inside any nesting of Optax states.

    Args:
      opt_state: The state of an optimizer, however composed.
      state_type: The NamedTuple to look for.
      method: The public name of the transformation that makes such states, for the message.

    Returns:
      The state.

    Raises:
      ValueError: If there is no such state, or more than one.
    """
    found = find_states(opt_state, state_type)
    if len(found) == 1:
        return found[0]
    wanted = f"a {state_type.__name__} (the state of optperm.{method})"
    if not found:
        raise ValueError(
            f"Looked for {wanted} in the optimizer state and found none: pass the state that "
            f"init or update of an optimizer built with optperm.{method} returned."
        )
    raise ValueError(
        f"Looked for {wanted} in the optimizer state and found {len(found)}: pass the part of the "
        "optimizer state that belongs to the one you mean."
    )


def without_variables(tree: Any) -> Any:
    """The tree with the plain array in the place of each variable of `flax.nnx`."""

    def is_variable(node: Any) -> bool:
        return hasattr(node, "get_value")

    return jax.tree.map(
        lambda leaf: leaf.get_value() if is_variable(leaf) else leaf, tree, is_leaf=is_variable
    )


def is_masked(node: Any) -> bool:
    """Whether a node stands for a part of the params that a transformation does not see."""
    return isinstance(node, optax.MaskedNode)
