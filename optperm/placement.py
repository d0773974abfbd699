"""Apply updates so that weights that a method places, holds or keeps at zero are exact.

In floating point `p + (q - p)` differs from `q` for about a third of all float32 pairs. A method that
places weights keeps the exact targets in its state; a method that holds weights, or keeps them at zero,
keeps a mask of these weights. `apply_updates` reads targets and masks.
"""

import functools
import operator
import warnings
from collections.abc import Callable
from typing import Any, Protocol, Self, runtime_checkable

import jax
import jax.numpy as jnp
import optax

from optperm.contract import checks
from optperm.contract.dtypes import accumulation_dtype
from optperm.contract.states import (
    fill_masked,
    find_states,
    is_masked,
    mask_like,
    trained_part,
    without_variables,
)

# The targets, a tree like params with `optax.MaskedNode` for a leaf that is not placed, and whether the
# last call of `update`, which may be an earlier step, placed the params on them: one flag, or a tree of
# flags that broadcast against the targets.
Placement = tuple[optax.Params, Any]
# Wrappers that interpolate or scale the updates of the method inside of them.
_MOVING_WRAPPERS = {
    "optax.contrib.schedule_free": optax.contrib.ScheduleFreeState,
    "optax.contrib.mechanize": optax.contrib.MechanicState,
    "optax.lookahead": optax.LookaheadState,
}
_OVERRIDDEN = (
    "A transformation stands in an optax.chain after a method that places weights: its changes of the "
    "updates are not applied. Put it in front, or give it other params (optax.partition)."
)
_SPOILS_CURVATURE = (
    "A transformation stands in an optax.chain after dim_reduce: steps that it changes spoil the "
    "curvature. Pass it as the optimizer: optperm.dim_reduce(optax.sgd(0.1), ...)."
)
_SPOILS_MOMENTUM = (
    "A transformation stands in an optax.chain after katyusha, which is a whole optimizer: steps that "
    "it changes lead away from the optimum. Leave it out, or take optperm.svrg and optax.sgd."
)
_STATE = (
    "the optimizer state (around a method that places or holds params, optax.flatten and "
    "split_real_and_imaginary need optax.apply_updates)"
)


@runtime_checkable
class PlacingState(Protocol):
    """A state of a transformation whose updates place params on exact targets."""

    def placements(self) -> list[Placement]:
        """Return where params were placed; a later entry overrides an earlier one.

        Empty if the state never places params, as may happen for a wrapper.
        """
        ...

    def replace_targets(self, other: Self) -> Self:
        """Return this state with the targets of another, for params that were placed on those."""
        ...


def placing_states(opt_state: Any) -> list[PlacingState]:
    """Return the states, in any nesting, that place params at some step."""
    found = find_states(opt_state, PlacingState)
    return [state for state in found if state.placements()]


def replace_targets(opt_state: Any, other: Any) -> Any:
    """Return an optimizer state whose parts that place params have the targets of another state.

    Args:
      opt_state: The state of an optimizer, however composed.
      other: A state whose parts that place params have the same types, in the same order.
    """

    def is_placing(node: Any) -> bool:
        return isinstance(node, PlacingState) and bool(node.placements())

    targets = iter(placing_states(other))
    return jax.tree.map(
        lambda node: node.replace_targets(next(targets)) if is_placing(node) else node,
        opt_state,
        is_leaf=is_placing,
    )


@runtime_checkable
class SearchingState(Protocol):
    """A state of a transformation that learns curvature from its own steps."""

    quasi_newton: Any


@runtime_checkable
class CoupledState(Protocol):
    """A state of a transformation whose params are an average of points in its state."""

    y: Any
    z: Any


@runtime_checkable
class HoldingState(Protocol):
    """A state of a transformation that holds some entries of the params at their values."""

    def trainable_masks(self) -> list[Any]:
        """Return booleans shaped like params; `optax.MaskedNode` for a leaf that is free to move.

        An entry may move if all trees say so.
        """
        ...


def holding_masks(opt_state: Any) -> list[Any]:
    """Return `trainable_masks` of all states in any nesting."""
    found = find_states(opt_state, HoldingState)
    return [mask for state in found for mask in state.trainable_masks()]


@runtime_checkable
class ZeroingState(Protocol):
    """A state of a transformation that keeps some entries of the params at zero."""

    def zero_masks(self) -> list[Any]:
        """Return booleans shaped like params, False for zeros; `optax.MaskedNode` for a leaf without."""
        ...


def zero_masks(opt_state: Any) -> list[Any]:
    """Return `zero_masks` of all states in any nesting."""
    found = find_states(opt_state, ZeroingState)
    return [mask for state in found for mask in state.zero_masks()]


def apply_updates(params: optax.Params, updates: optax.Updates, opt_state: Any) -> optax.Params:
    """Apply updates to params, exactly where a method places weights.

    A leaf that moves becomes `params + updates`, as in `optax.apply_updates`. A leaf that a method such
    as `optperm.sgperm` places becomes the exact target held in `opt_state`. An entry that
    `optperm.mask_elements` masks keeps its bits, wherever it was placed. An entry that
    `optperm.prune_gradually` or `optperm.rigl` keeps at zero becomes 0.0, never -0.0.

    Args:
      params: A tree of parameters, or a model made of dataclasses, as in Equinox.
      updates: A tree of updates of the same structure and shapes; None for leaves that are not trained.
      opt_state: The optimizer state that `update` returned with `updates`, however composed.

    Returns:
      The new parameters, of the structure, shapes and dtypes of `params`.

    Example:
      >>> import jax.numpy as jnp, optperm
      >>> params = {"kernel": jnp.array([[0.1], [0.2], [0.3]])}
      >>> tx = optperm.sgperm(aggressiveness=0.5)
      >>> opt_state = tx.init(params)
      >>> grads = {"kernel": jnp.array([[-1.0], [1.0], [0.0]])}
      >>> updates, opt_state = tx.update(grads, opt_state, params)
      >>> optperm.apply_updates(params, updates, opt_state)["kernel"].ravel().tolist()
      [0.20000000298023224, 0.10000000149011612, 0.30000001192092896]

    Notes:
      A method that places weights is the last one of its chain, but for `optperm.mask_elements`: what
      follows it changes updates, not targets. A `UserWarning` says so for a transformation of Optax or
      `optperm.proximal` that follows it, or follows `optperm.dim_reduce` or `optperm.katyusha`, whose
      states belong to their own steps. A wrapper such as `optax.contrib.sam` returns updates of its own
      between the updates of the method. So a target is applied only where the update leads to it, up to
      rounding.

    Raises:
      TypeError: If a leaf is not an array.
      ValueError: If the trees do not match, two methods in `opt_state` place the same leaf, or such a
        method is inside `optax.lookahead`, `optax.contrib.schedule_free` or `optax.contrib.mechanize`.
    """
    # States hold plain arrays where params may hold variables of flax.nnx.
    whole, params = params, trained_part(params)
    params = params if params is whole else _select_updated(params, updates)
    before, moves = without_variables(params), without_variables(updates)
    checks.check_same_tree("updates", moves, before, source="params", dtypes=False)
    _check_wrappers(opt_state)
    spoiled = (SearchingState, _SPOILS_CURVATURE), (CoupledState, _SPOILS_MOMENTUM)
    for kind, message in spoiled:
        if _has_follower(opt_state, functools.partial(find_states, state_type=kind)):
            warnings.warn(message, UserWarning, stacklevel=2)
    has_follower = _has_follower(opt_state, placing_states)
    if has_follower:
        warnings.warn(_OVERRIDDEN, UserWarning, stacklevel=2)
    # What follows the method changed the updates, so they cannot show whether they lead to the targets.
    # Within SAM they must: SAM returns updates of its own in most steps.
    is_trusted = has_follower and not find_states(opt_state, optax.contrib.SAMState)
    moved = without_variables(optax.apply_updates(params, updates))
    place = functools.partial(_place, is_trusted)
    placed_anywhere = jax.tree.map(lambda _: False, moved)
    for state in placing_states(opt_state):
        placed_here = jax.tree.map(lambda _: False, moved)
        for targets, is_placed in state.placements():
            _check_fits(before, targets)
            flags: Any = is_placed
            if isinstance(is_placed, bool | jax.Array):
                flags = jax.tree.map(lambda _, flag=is_placed: flag, targets)
            moved = jax.tree.map(place, targets, flags, moved, before, moves, is_leaf=is_masked)
            placed_here = jax.tree.map(
                lambda target, earlier: earlier if is_masked(target) else True,
                targets,
                placed_here,
                is_leaf=is_masked,
            )
        if any(jax.tree.leaves(jax.tree.map(operator.and_, placed_here, placed_anywhere))):
            raise ValueError(
                "Two methods place the same parameter: separate them by optax.partition."
            )
        placed_anywhere = jax.tree.map(operator.or_, placed_here, placed_anywhere)
    # Masks come after placements: an entry that is held, or kept at zero, is never placed elsewhere.
    for is_trainable in holding_masks(opt_state):
        _check_fits(before, is_trainable)
        moved = jax.tree.map(_hold, is_trainable, moved, before, is_leaf=is_masked)
    for is_live in zero_masks(opt_state):
        _check_fits(before, is_live)
        zeros = jax.tree.map(jnp.zeros_like, moved)
        moved = jax.tree.map(_hold, is_live, moved, zeros, is_leaf=is_masked)
    moved = jax.tree.unflatten(jax.tree.structure(params), jax.tree.leaves(moved))
    return moved if params is whole else fill_masked(moved, whole)


def _check_wrappers(opt_state: Any) -> None:
    """Raise if a wrapper of Optax moves the params away from the targets of a method inside it."""
    for name, state_type in _MOVING_WRAPPERS.items():
        if any(map(placing_states, find_states(opt_state, state_type))):
            advice = "Put it around the optimizer of that method instead, if there is one."
            raise ValueError(f"{name} may not wrap a method that places weights. {advice}")


def _has_follower(opt_state: Any, find: Callable[[Any], list[Any]]) -> bool:
    """Return whether a transformation that changes updates follows a given one in an `optax.chain`.

    Optax does not say which transformations change nothing. A masked one may be for other leaves.
    """

    def changes_updates(state: Any) -> bool:
        if type(state) is tuple:
            return any(map(changes_updates, state))
        is_changing = type(state).__module__.startswith(("optax.", "optperm.variance.proximal"))
        return is_changing and not isinstance(state, optax.MaskedState)

    found: list[bool] = []

    def visit(node: Any) -> bool:
        if type(node) is tuple:
            places = [index for index, state in enumerate(node) if find(state)]
            found.append(bool(places) and any(map(changes_updates, node[places[0] + 1 :])))
        return False

    jax.tree.leaves(opt_state, is_leaf=visit)
    return any(found)


def _select_updated(params: Any, updates: Any) -> Any:
    """Return a model with None for each leaf whose update is None, as leaves that are not trained."""

    def is_none(node: Any) -> bool:
        return node is None

    try:
        return jax.tree.map(lambda u, p: None if u is None else p, updates, params, is_leaf=is_none)
    except ValueError:  # the trees do not match, which `check_same_tree` says
        return params


def _check_fits(params: optax.Params, held: Any) -> None:
    """Raise unless what a state holds has the tree and the shapes of the params."""
    checks.check_same_tree("params", mask_like(params, held), held, source=_STATE, dtypes=False)


def _place(
    is_trusted: bool, target: Any, is_placed: Any, moved: Any, before: Any, update: Any
) -> Any:
    """Return the target if the update leads to it, else the moved params; also for a masked node."""
    if is_masked(target):
        return moved
    target = jnp.asarray(target, jnp.result_type(moved))
    if not is_trusted:
        is_placed = jnp.logical_and(is_placed, _leads_to(target, before, update))
    return target if is_placed is True else jnp.where(is_placed, target, moved)


def _leads_to(target: jax.Array, before: Any, update: Any) -> jax.Array:
    """Return whether an update leads to a target, entry by entry.

    In steps without a call of the method, a wrapper such as `optax.contrib.sam` returns updates of its
    own, while the targets in the state are those of an earlier step.
    """
    p = jnp.asarray(before, target.dtype)
    wide, limits = accumulation_dtype(target), jnp.finfo(target.dtype)
    q, u, step = (jnp.asarray(x).astype(wide) for x in (target, update, target - p))
    # |u - (q - p)| <= eps (|q| + |q - p|): a compiler may have computed u from more digits of q.
    tolerance = limits.eps.astype(wide) * (jnp.abs(q) + jnp.abs(step)) + limits.tiny.astype(wide)
    agrees = jnp.abs(u - step) <= tolerance
    # Where q - p overflows in the dtype, the update u overflows too.
    largest = limits.max.astype(wide)
    return jnp.where(jnp.abs(step) <= largest, agrees, ~(jnp.abs(u) <= largest))


def _hold(is_trainable: Any, moved: Any, held: Any) -> Any:
    """Return `held` where entries may not move; a masked node leaves all leaves below it moved."""
    return moved if is_masked(is_trainable) else jnp.where(is_trainable, moved, held)
