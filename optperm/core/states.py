"""Find and replace a method's state inside any composition of Optax states.

A protocol names methods that a state may have. Whether a state has them is asked of its type, since a
user's state may have fields of the same names.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol, TypeGuard, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optperm.core import checks
from optperm.core.dtypes import cast_like
from optperm.core.trees import in_variables, mask_like, without_boxes, without_variables

State = TypeVar("State")
# `draw_params` folds this number into a key; it is far from the counts folded into the same key
DRAW_STREAM = 0x4452_4157
_PHASED = "of optperm.switch_after, for example"


def has_protocol(node: object, protocol: Any) -> bool:
    """Return whether a node is a state, a NamedTuple, whose type has all methods of a protocol.

    Fields do not count, and neither do params with such methods, as in Equinox.
    """
    return isinstance(node, tuple) and all(
        callable(getattr(type(node), name, None)) for name in _list_methods(protocol)
    )


@functools.cache
def _list_methods(protocol: Any) -> tuple[str, ...]:
    bases = filter(_is_protocol, protocol.__mro__)
    return tuple(name for base in bases for name in vars(base) if not name.startswith("_"))


def is_of(node: object, state_type: type[State] | tuple[type[State], ...]) -> TypeGuard[State]:
    """Return whether a node is of one of the types, or has one of the protocols."""
    types = state_type if isinstance(state_type, tuple) else (state_type,)
    return any(
        has_protocol(node, each) if _is_protocol(each) else isinstance(node, each) for each in types
    )


def _is_protocol(kind: Any) -> bool:
    return Protocol in kind.__bases__


class PhasedState(Protocol):
    """A state of a wrapper whose parts take turns, so some parts did not take the last step."""

    def phases(self) -> list[tuple[Any, Any]]:
        """Return each part with a flag: whether it took the last step, or will take the first step."""
        ...


class DrawingState(Protocol):
    """A state of a method that needs gradients at a draw of the params, passed as `draw=`."""

    def draw(self, params: Any, key: jax.Array) -> Any:
        """Return params with a draw for the params of this method; None if nothing is drawn.

        Args:
          params: All params, even if the method is masked.
          key: A random key for the step and the replica.
        """
        ...


class WarningState(Protocol):
    """A state that can warn."""

    def warnings(self, params: Any) -> list[str]:
        """Return sentences about problems, as far as Python can see them.

        They are about this state alone, and do not repeat the warnings of states inside it.

        Args:
          params: The params after the last step, or before the first step.

        Raises:
          ValueError: If training must not continue.
        """
        ...


class GoalState(Protocol):
    """A state of a method whose params are what the method was asked for only from some step on."""

    def reached_goal(self) -> jax.Array:
        """Return whether the params after the last step are what the method was asked for, a boolean.

        The answer is about this state alone, and does not repeat the answers of states inside it. In
        a state stacked over replicas, each replica has an answer.
        """
        ...


class SnapshotState(Protocol):
    """A state of a control variate, which needs the full gradient at a snapshot of the params."""

    def with_snapshot(self, params: Any, full_grad: Any) -> Any:
        """Return the state with a new snapshot; the old snapshot stays if the new one is not finite.

        Args:
          params: All params.
          full_grad: The gradient over all examples at these params.
        """
        ...


class ForLoop(NamedTuple):
    """The requirements of a method on a training loop.

    Attributes:
      metrics: Scalars of the last step by name, for the history of the loop.
      judge: A function from the columns of this history, by name, to sentences about problems in the
        steps so far; None for no judgment.
      draws_examples: Whether each example of a batch must be drawn from all examples, because batches
        from one shuffle are not independent.
      num_data: The number of examples for which the method was made; None if its state has no number.
      batch_size: The number of examples of each gradient for which the method was made; None likewise.
    """

    metrics: Mapping[str, jax.Array] = {}
    judge: Callable[[Mapping[str, np.ndarray]], list[str]] | None = None
    draws_examples: bool = False
    num_data: jax.Array | None = None
    batch_size: jax.Array | None = None


class LoopState(Protocol):
    """A state of a method that has requirements on a training loop."""

    def for_loop(self) -> ForLoop:
        """Return the requirements, even if the state is traced."""
        ...


def draw_params(opt_state: Any, params: Any, key: jax.Array) -> Any:
    """Return the params at which to compute gradients; None if no state draws.

    If it is not known which phase is running, the draw is selected on the device. The first step after
    a change of phases computes its gradient for the previous phase.

    Args:
      opt_state: The state of an optimizer, in any nesting.
      params: The params.
      key: A random key for the step and the replica.

    Raises:
      ValueError: If a method that draws is inside `optax.MultiSteps`.
    """
    for outer in find_states(opt_state, optax.MultiStepsState):
        if draw_params(outer.inner_opt_state, params, key) is not None:
            raise ValueError(
                "optax.MultiSteps around a method that draws params would mix the gradients of several "
                "draws: instead, take the gradient of the mean loss over the microbatches at one draw."
            )
    drawn, is_any = without_variables(params), False
    for index, (state, flags) in enumerate(_find_drawing(opt_state)):
        found = without_variables(state).draw(drawn, jax.random.fold_in(key, index))
        if found is None:
            continue
        is_any = True
        for flag in flags:
            like = cast_like(drawn, found)
            found = optax.tree.where(flag, found, like)
        drawn = found
    return in_variables(drawn, params) if is_any else None


def _find_drawing(opt_state: Any, flags: tuple[Any, ...] = ()) -> Iterator[tuple[Any, Any]]:
    """Yield the states that draw, with the flags of the phases that contain them."""

    def is_end(node: Any) -> bool:
        return has_protocol(node, DrawingState) or has_protocol(node, PhasedState)

    for node in jax.tree.leaves(opt_state, is_leaf=is_end):
        if has_protocol(node, DrawingState):
            yield node, flags
        elif has_protocol(node, PhasedState):
            for part, flag in node.phases():
                yield from _find_drawing(part, (*flags, flag))


def find_warnings(opt_state: Any, params: Any, *, is_over: bool = True) -> list[str]:
    """Return the warnings of all running states, in any nesting.

    While training is not over, a state with a goal does not warn, because it may still reach its goal.
    States inside it do.
    """
    found = list[str]()
    for state in find_running_states(opt_state, WarningState):
        if is_over or not has_protocol(state, GoalState):
            found += state.warnings(params)
        found += find_warnings(_find_inside(state), params, is_over=is_over)
    return found


def _find_inside(state: Any) -> list[Any]:
    """Return the running states that warn, inside a state that warns itself."""
    if not has_protocol(state, PhasedState):
        return _children(state)
    # A flag is read only if it matters, since it may be traced.
    phases = [each for each in state.phases() if find_states(each[0], WarningState)]
    return [part for part, flag in phases if _is_running(flag)]


def reached_goal(opt_state: Any) -> jax.Array:
    """Return whether all running states in any nesting reached their goals; True without goals."""

    def is_end(node: Any) -> bool:
        return has_protocol(node, GoalState) or has_protocol(node, PhasedState)

    reached = jnp.asarray(True)
    for node in jax.tree.leaves(opt_state, is_leaf=is_end):
        if has_protocol(node, GoalState):
            reached &= without_variables(node).reached_goal()
        if has_protocol(node, PhasedState):
            for part, flag in without_variables(node).phases():
                reached &= jnp.logical_not(flag) | reached_goal(part)
        elif has_protocol(node, GoalState):
            for part in _children(node):
                reached &= reached_goal(part)
    return reached


def _children(node: Any) -> list[Any]:
    """Return the nodes one level below a node."""
    return jax.tree.leaves(node, is_leaf=lambda each: each is not node)


def take_snapshots(opt_state: Any, params: Any, full_grad: Any) -> Any:
    """Return the optimizer state with a new snapshot in each state that has snapshots."""

    def is_taken(node: Any) -> bool:
        return has_protocol(node, SnapshotState)

    return jax.tree.map(
        lambda node: node.with_snapshot(params, full_grad) if is_taken(node) else node,
        opt_state,
        is_leaf=is_taken,
    )


def find_states(opt_state: Any, state_type: type[State] | tuple[type[State], ...]) -> list[State]:
    """Return all states of a type inside any nesting of chain, masked, partition, MultiSteps and so on.

    The search does not look inside a state that it has found, and it looks into all phases. States that
    `flax.nnx` stores as variables are returned as plain arrays.
    """
    return [without_variables(state) for state in _find_nodes(opt_state, state_type, _always)]


def find_running_states(
    opt_state: Any, state_type: type[State] | tuple[type[State], ...]
) -> list[State]:
    """Return the states that `find_states` finds, without states in phases that are not running.

    Raises:
      ValueError: If a phase with such a state is not known, because it is traced by `jax.jit` or differs
        between replicas.
    """
    return [without_variables(state) for state in _find_nodes(opt_state, state_type, _is_running)]


def check_runs(opt_state: Any, state_type: Any, *, method: str) -> None:
    """Raise if all states of a type are in phases that are not running."""
    if find_states(opt_state, state_type) and not find_running_states(opt_state, state_type):
        raise ValueError(f"{method} is in a phase ({_PHASED}) that is not running.")


def _find_nodes(opt_state: Any, state_type: Any, may_look: Callable[[Any], bool]) -> Iterator[Any]:
    """Yield the nodes of a type, inside phases only if `may_look` is true for the phase's flag."""

    def is_end(node: Any) -> bool:
        return is_of(node, state_type) or has_protocol(node, PhasedState)

    for node in jax.tree.leaves(opt_state, is_leaf=is_end):
        if is_of(node, state_type):
            yield node
        elif has_protocol(node, PhasedState):
            for part, flag in node.phases():
                within = list(_find_nodes(part, state_type, may_look))
                # A flag is read only if it matters, since it may be traced.
                if within and may_look(flag):
                    yield from within


def _always(_: Any) -> bool:
    return True


def _is_running(flag: Any) -> bool:
    """Return the flag of a phase, which must be the same on all replicas."""
    if isinstance(flag, jax.core.Tracer):
        raise ValueError(
            f"Under jax.jit or jax.vmap, it is not known which phase ({_PHASED}) is running. Call this "
            "function outside of them, or pass the state of the running phase."
        )
    # An array over several processes also has values on this process.
    values = {bool(each) for each in local_values(flag).ravel()}
    if len(values) > 1:
        raise ValueError(f"The states are in different phases ({_PHASED}): pass one of the states.")
    return values.pop()


def local_values(array: Any) -> np.ndarray[Any, Any]:
    """Return an array's entries on this process, flattened if some entries are elsewhere."""
    if not isinstance(array, jax.Array) or array.is_fully_addressable:
        return np.asarray(array)
    return np.concatenate([np.ravel(shard.data) for shard in array.addressable_shards])


def find_state(
    opt_state: Any, state_type: type[State] | tuple[type[State], ...], *, method: str
) -> State:
    """Return the only state of a type in a running phase, inside any nesting of Optax states.

    Args:
      opt_state: The state of an optimizer, in any nesting.
      state_type: The NamedTuple to look for, or a tuple of several types.
      method: The public name of the transformation that makes such states, for the message.

    Returns:
      The state.

    Raises:
      ValueError: If there is no such state or more than one, or if its phase is not running.
    """
    return without_variables(_find_node(opt_state, state_type, method))


def _find_node(opt_state: Any, state_type: Any, method: str) -> Any:
    found = list(_find_nodes(opt_state, state_type, _is_running))
    if len(found) == 1:
        return found[0]
    types = state_type if isinstance(state_type, tuple) else (state_type,)
    names = " or ".join(each.__name__ for each in types)
    if found:
        came = (
            f"it has {len(found)}: pass the part of the optimizer state that belongs to one of them"
        )
    elif find_states(opt_state, state_type):
        came = f"it has one only in a phase ({_PHASED}) that is not running"
    else:
        came = f"it has none: pass the state of an optimizer that uses {method}"
    wanted = f"{checks.with_article(names)} (the state of optperm.{method})"
    raise ValueError(f"The optimizer state must have {wanted}, but {came}.")


def replace_state(opt_state: Any, state_type: type[State], new: State, *, method: str) -> Any:
    """Replace the only state of a type in a running phase of an optimizer state.

    Args:
      opt_state: The state of an optimizer, in any nesting.
      state_type: The NamedTuple to look for.
      new: The new state with the same structure, and with plain arrays as returned by `find_state`. If
        `flax.nnx` stores variables, new variables of the same kind are made.
      method: The public name of the transformation that makes such states, for the message.

    Returns:
      An optimizer state with the structure, shapes and dtypes of `opt_state`.

    Raises:
      ValueError: If there is no such state or more than one, if its phase is not running, or if the new
        state has another structure, shape or dtype.
    """
    place = _find_node(opt_state, state_type, method)
    old = without_variables(place)
    checks.check_same_tree(f"the new {state_type.__name__}", new, old, source="the optimizer state")
    # The arrays of a state must be strongly typed.
    new = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.result_type(leaf)), new)

    # Another phase may have a state of the same type, so the state is found again by its identity.
    return jax.tree.map(
        lambda node: in_variables(new, node) if node is place else node,
        opt_state,
        is_leaf=lambda node: node is place,
    )


class Match(NamedTuple):
    """An array in an optimizer's state, and the parameter that it belongs to.

    Attributes:
      leaf: The array.
      place: The number of the parameter among the leaves of the params; None for an array that is not in
        a tree like params, such as a count.
      owner: The name of the state that contains the array.
    """

    leaf: Any
    place: int | None
    owner: str


def match_params(state: Any, params: Any) -> list[Match]:
    """Match each leaf of an optimizer's state with the parameter that the leaf belongs to.

    Each part of the state with the tree structure of the params, except for nodes `optax.MaskedNode`,
    has an array for each parameter. Paths and shapes do not count, because two params may share the end
    of a path or a shape. If the params are a single array, without a structure, all arrays with its
    shape and all inexact arrays with axes belong to it.
    """
    return [match for match, _ in match_within_states(state, params)]


class Place(NamedTuple):
    """The place of an array in an optimizer's state.

    Attributes:
      state: The number of the innermost state that contains the array, outside of trees like params.
      is_field: Whether the array itself is a field of this state.
    """

    state: int
    is_field: bool


def match_within_states(state: Any, params: Any) -> list[tuple[Match, Place]]:
    """Return the matches of `match_params`, each with the place of its array."""
    numbers = itertools.count(1)
    # A state may have arrays of other shapes than the params, which are then in no boxes.
    state, params = without_boxes(state), without_boxes(params)
    # Both trees contain numbers instead of arrays, so the arrays are not read.
    leaves, structure = jax.tree.flatten(state)
    wanted: Any = jax.tree.structure(params)
    places = wanted.unflatten(range(wanted.num_leaves))
    found: list[tuple[Match, Place]] = []

    def visit(node: Any, owner: str, at: Place) -> None:
        seen = mask_like(places, node)
        own: Any = jax.tree.structure(node)
        is_single = isinstance(node, int) and isinstance(seen, int)
        if is_single and not _may_belong(leaves[node], params):
            found.append((Match(leaves[node], None, owner), at))
        elif own == jax.tree.structure(seen):
            pairs = zip(jax.tree.leaves(node), jax.tree.leaves(seen), strict=True)
            found.extend((Match(leaves[leaf], place, owner), at) for leaf, place in pairs)
        elif isinstance(node, int):
            found.append((Match(leaves[node], None, owner), at))
        else:
            is_state = hasattr(node, "_fields")
            owner = type(node).__name__ if is_state else owner
            at = Place(next(numbers) if is_state else at.state, is_state)
            for child in _children(node):
                visit(child, owner, at)

    visit(jax.tree.unflatten(structure, range(len(leaves))), "state", Place(0, False))
    return found


def _may_belong(leaf: Any, param: Any) -> bool:
    # Raw keys and fingerprints, which may have the length of a parameter, are uint32.
    dtype = jnp.result_type(leaf)
    is_number = jnp.ndim(leaf) > 0 and jnp.issubdtype(dtype, jnp.inexact)
    return dtype != jnp.uint32 and bool(is_number or jnp.shape(leaf) == jnp.shape(param))
