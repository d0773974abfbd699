"""Applying updates so that weights which a method places or holds land bit for bit.

In floating point `p + (q - p)` differs from `q` for about a third of all float32 pairs. A method that
places weights, instead of moving them, keeps the exact targets in its state, one that holds weights, or
keeps them at zero, keeps there which; `apply_updates` reads all three.
"""

import functools
import operator
import warnings
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
# last call of `update` placed the params on them, which may have been in an earlier step: one flag, or a
# tree of them that broadcast against the targets.
Placement = tuple[optax.Params, Any]
# Wrappers that interpolate or scale what the method inside of them does.
_MOVING_WRAPPERS = {
    "optax.contrib.schedule_free": optax.contrib.ScheduleFreeState,
    "optax.contrib.mechanize": optax.contrib.MechanicState,
    "optax.lookahead": optax.LookaheadState,
}


@runtime_checkable
class PlacingState(Protocol):
    """A state of a transformation whose updates place params on exact targets."""

    def placements(self) -> list[Placement]:
        """Where params were placed. A later entry overrides an earlier one.

        None at all if this state never places any, as one that wraps others may find.
        """
        ...

    def replace_targets(self, other: Self) -> Self:
        """This state with the targets of another, for params that were put on those."""
        ...


def placing_states(opt_state: Any) -> list[PlacingState]:
    """The states, in any nesting, that place params at some step."""
    found = find_states(opt_state, PlacingState)
    return [state for state in found if state.placements()]


def replace_targets(opt_state: Any, other: Any) -> Any:
    """An optimizer state whose parts that place params have the targets of those of another.

    Args:
      opt_state: The state of an optimizer, however composed.
      other: One whose parts that place params are of the same types, in the same order.
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
    """A state of a transformation that learns curvature from the steps that it makes."""

    quasi_newton: Any


@runtime_checkable
class HoldingState(Protocol):
    """A state of a transformation that holds some entries of the params at the value they have."""

    def trainable_masks(self) -> list[Any]:
        """Booleans shaped like params; `optax.MaskedNode` for a leaf of which all entries may.

        An entry may move if all of several trees say so.
        """
        ...


def holding_masks(opt_state: Any) -> list[Any]:
    """What `trainable_masks` says of all states in any nesting."""
    found = find_states(opt_state, HoldingState)
    return [mask for state in found for mask in state.trainable_masks()]


@runtime_checkable
class ZeroingState(Protocol):
    """A state of a transformation that keeps some entries of the params at zero."""

    def zero_masks(self) -> list[Any]:
        """Return booleans shaped like params, False for zeros; `optax.MaskedNode` for a leaf without."""
        ...


def zero_masks(opt_state: Any) -> list[Any]:
    """Return what `zero_masks` says of all states in any nesting."""
    found = find_states(opt_state, ZeroingState)
    return [mask for state in found for mask in state.zero_masks()]


def apply_updates(params: optax.Params, updates: optax.Updates, opt_state: Any) -> optax.Params:
    """Applies updates to params, bit-exactly where a method places weights.

    Gives `optax.apply_updates(params, updates)` for every leaf that moves by its update, and the exact
    target held in `opt_state` for every leaf that a method such as `optperm.sgperm` places. A method
    that places weights is the last of its chain: what stands after it changes updates, not targets.
    A target is applied only where the update leads there, but for rounding: a wrapper such as
    `optax.contrib.sam` gives updates of its own between those of the method.
    Only `optperm.mask_elements` may follow it: an entry that is masked keeps the bits it has in
    `params`, wherever it was placed. An entry that `optperm.prune_gradually` or `optperm.rigl` keeps at
    zero is 0.0, whatever else moves or places it, and never -0.0. Of a transformation of Optax's, or
    `optperm.proximal`, after it in an `optax.chain` a `UserWarning` tells, and so it does of one after
    `optperm.dim_reduce`, whose curvature is that of the steps that it made.

    Args:
      params: A tree of parameters, or a model made of dataclasses, as Equinox's are.
      updates: A tree of updates of the same structure and shapes; None for what a model does not train.
      opt_state: The optimizer state that came with `updates`, however composed. One without any
        such method is fine: then this is `optax.apply_updates`.

    Returns:
      The new parameters, of the structure, shapes and dtypes of `params`.

    Raises:
      TypeError: If a leaf is no array.
      ValueError: If the trees do not match, two methods in `opt_state` claim to place the same leaf, or
        `optax.lookahead`, `optax.contrib.schedule_free` or `optax.contrib.mechanize` stands around one.

    Example:
      >>> import jax.numpy as jnp, optperm
      >>> params = {"kernel": jnp.array([[0.1], [0.2], [0.3]])}
      >>> tx = optperm.sgperm(aggressiveness=0.5)
      >>> opt_state = tx.init(params)
      >>> grads = {"kernel": jnp.array([[-1.0], [1.0], [0.0]])}
      >>> updates, opt_state = tx.update(grads, opt_state, params)
      >>> optperm.apply_updates(params, updates, opt_state)["kernel"].ravel().tolist()
      [0.20000000298023224, 0.10000000149011612, 0.30000001192092896]
    """
    # States hold plain arrays where params may hold variables of flax.nnx.
    whole, params = params, trained_part(params)
    params = params if params is whole else _where_updated(params, updates)
    structure = jax.tree.structure(params)
    before = without_variables(params)
    checks.check_arrays("params", before)
    checks.check_same_tree(
        "updates", without_variables(updates), before, source="params", dtypes=False
    )
    _check_wrappers(opt_state)
    # SAM gives updates of its own in most steps: then only what agrees with the targets is placed.
    is_followed = _warn_of_what_follows(opt_state) and not find_states(
        opt_state, optax.contrib.SAMState
    )
    moved = without_variables(optax.apply_updates(params, updates))
    place = functools.partial(_place, is_followed)
    placed_anywhere = jax.tree.map(lambda _: False, moved)
    for state in placing_states(opt_state):
        placed_here = jax.tree.map(lambda _: False, moved)
        for targets, is_placed in state.placements():
            _check_fits(before, targets)
            flags: Any = is_placed
            if isinstance(is_placed, bool | jax.Array):
                flags = jax.tree.map(lambda _, flag=is_placed: flag, targets)
            moved = jax.tree.map(
                place, targets, flags, moved, before, without_variables(updates), is_leaf=is_masked
            )
            placed_here = jax.tree.map(
                lambda target, earlier: earlier if is_masked(target) else True,
                targets,
                placed_here,
                is_leaf=is_masked,
            )
        if any(jax.tree.leaves(jax.tree.map(operator.and_, placed_here, placed_anywhere))):
            raise ValueError(
                "Two methods in the optimizer state place the same parameter: give each its own "
                "parameters with optax.partition or optax.masked."
            )
        placed_anywhere = jax.tree.map(operator.or_, placed_here, placed_anywhere)
    for is_trainable in holding_masks(opt_state):
        _check_fits(before, is_trainable)
        moved = jax.tree.map(_keep_held, is_trainable, moved, before, is_leaf=is_masked)
    for is_live in zero_masks(opt_state):
        _check_fits(before, is_live)
        zeros = jax.tree.map(jnp.zeros_like, moved)
        moved = jax.tree.map(_keep_held, is_live, moved, zeros, is_leaf=is_masked)
    moved = jax.tree.unflatten(structure, jax.tree.leaves(moved))
    return moved if params is whole else fill_masked(moved, whole)


def _check_wrappers(opt_state: Any) -> None:
    """Raises if a wrapper of Optax's moves the params elsewhere than a method inside places them."""
    for name, state_type in _MOVING_WRAPPERS.items():
        if any(map(placing_states, find_states(opt_state, state_type))):
            raise ValueError(
                f"{name} moves the params to other points than the exact weights of a method that "
                "places weights, such as optperm.sgperm or optperm.diloco, and it stands around one. "
                "Leave it out, or put it around the optimizer that such a method takes: "
                "optperm.diloco(optax.contrib.mechanize(optax.adam(1e-3)))."
            )


def _warn_of_what_follows(opt_state: Any) -> bool:
    """Warns of transformations whose changes to the updates exact targets override, or spoil curvature.

    Optax does not say which ones change nothing. What is masked may be for other leaves.

    Returns:
      Whether one follows a method that places.
    """

    def changes_updates(state: Any) -> bool:
        if type(state) is tuple:
            return any(map(changes_updates, state))
        changing = type(state).__module__.startswith(("optax.", "optperm.variance.proximal"))
        return changing and not isinstance(state, optax.MaskedState)

    for chain in _chains(opt_state):
        is_placed = is_searched = False
        for state in chain:
            if is_searched and changes_updates(state):
                warnings.warn(
                    "A transformation stands in an optax.chain after dim_reduce, which takes its own "
                    "steps for those that the params make: changed ones spoil its curvature. Pass what "
                    "scales steps as its optimizer: optperm.dim_reduce(optax.sgd(0.1), ...).",
                    UserWarning,
                    stacklevel=3,
                )
            if is_placed and changes_updates(state):
                warnings.warn(
                    "A transformation stands in an optax.chain after a method that places weights, such "
                    "as optperm.sgperm: what it does to the updates (weight decay, for instance) is "
                    "not applied, since the params are put on the exact weights that the method keeps. "
                    "Let it come first, or train other params with it (optax.partition).",
                    UserWarning,
                    stacklevel=3,
                )
                return True
            is_placed = is_placed or bool(placing_states(state))
            is_searched = is_searched or bool(find_states(state, SearchingState))
    return False


def _chains(opt_state: Any) -> list[tuple[Any, ...]]:
    """The states of every `optax.chain` in an optimizer state, in any nesting."""
    chains: list[tuple[Any, ...]] = []

    def see(node: Any) -> bool:
        if type(node) is tuple:
            chains.append(node)
        return False

    jax.tree.leaves(opt_state, is_leaf=see)
    return chains


def _where_updated(params: Any, updates: Any) -> Any:
    """Of a model what has updates: None there stands for what is not trained."""

    def is_none(node: Any) -> bool:
        return node is None

    try:
        return jax.tree.map(lambda u, p: None if u is None else p, updates, params, is_leaf=is_none)
    except ValueError:  # the trees do not match, which is said later
        return params


def _check_fits(params: optax.Params, held: Any) -> None:
    try:
        checks.check_same_tree(
            "params", mask_like(params, held), held, source="the optimizer state", dtypes=False
        )
    except ValueError as error:
        raise ValueError(
            f"{error} Around a method that places or holds params optax.flatten and "
            "optax.contrib.split_real_and_imaginary give it another tree: with these use "
            "optax.apply_updates."
        ) from error


def _place(
    is_followed: bool, target: Any, is_placed: Any, moved: Any, before: Any, update: Any
) -> Any:
    """The target, if this update puts the params on it; a masked node leaves all below it as it is."""
    if is_masked(target):
        return moved
    target = jnp.asarray(target, jnp.result_type(moved))
    if not is_followed:
        is_placed = jnp.logical_and(is_placed, _leads_to(target, before, update))
    return target if is_placed is True else jnp.where(is_placed, target, moved)


def _leads_to(target: jax.Array, before: Any, update: Any) -> jax.Array:
    """Whether an update is that of this step to a target, entry by entry.

    A wrapper such as `optax.contrib.sam` gives updates of its own in steps in which it does not call the
    method, whose state then tells of an earlier step.
    """
    p = jnp.asarray(before, target.dtype)
    wide, limits = accumulation_dtype(target), jnp.finfo(target.dtype)
    q, u, step = (jnp.asarray(x).astype(wide) for x in (target, update, target - p))
    # |u - (q - p)| <= eps (|q| + |q - p|): a compiler may have computed u with more digits of q.
    tolerance = limits.eps.astype(wide) * (jnp.abs(q) + jnp.abs(step)) + limits.tiny.astype(wide)
    agrees = jnp.abs(u - step) <= tolerance
    # Where the step has no number in the dtype, its update has none either.
    largest = limits.max.astype(wide)
    return jnp.where(jnp.abs(step) <= largest, agrees, ~(jnp.abs(u) <= largest))


def _keep_held(is_trainable: Any, moved: Any, held: Any) -> Any:
    """What stays there, where it may not move; a masked node leaves all below it as it is."""
    return moved if is_masked(is_trainable) else jnp.where(is_trainable, moved, held)
