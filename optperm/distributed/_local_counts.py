"""Counts in the center's optimizer: local steps for schedules, gradients for bias corrections."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from optperm.core.schedules import schedules_at
from optperm.core.shapes import Params
from optperm.core.states import find_states
from optperm.switching import SwitchAfterState

# States with other arrays and a count for schedules, and the name of this count.
_FOLLOWED = {
    "InjectHyperparamsState": "count",
    "InjectStatefulHyperparamsState": "count",
    "ScaleByAdemamixState": "count_m2",
    "ConditionallyTransformState": "step",
    "ConditionallyMaskState": "step",
    "SwitchAfterState": "count",
}
# States of Optax whose counts are the numbers of gradients in their other arrays. Some of the types are
# not public.
_OF_GRADIENTS = (
    "ScaleByAdamState",
    "ScaleByAmsgradState",
    "ScaleByBeliefState",
    "ScaleByRmsWithCountState",
    "ScaleByNovogradState",
    "ScaleByLionState",
    "ScaleByAdanState",
    "ScaleByLBFGSState",
    "ZoomLinesearchInfo",
    "BacktrackingLinesearchInfo",
    "EmaState",
    "FactoredState",
    "MuonState",
    "SophiaState",
    "GaLoreState",
    "ApplyIfFiniteState",
    "SAMState",
    "LookaheadState",
    "ReduceLROnPlateauState",
)
# Fields with values, not states.
_VALUES = ("hyperparams", "measurements", "measurement")


def check_schedules(center_state: Any, params: Params) -> None:
    """Raise if a state may use the same count for schedules and for moments."""
    _, unclear = _find_counts(center_state, params)
    if unclear:
        raise ValueError(
            f"{unclear[0]} may use one count for both its moments and a schedule, but agn needs two "
            "counts. Pass outer, whose schedules count commits; the same optimizer is allowed."
        )
    for state in find_states(center_state, SwitchAfterState):
        if _has_count((state.first, state.then), params):
            # The schedules of the second phase count from the switch, which the center does not know.
            raise ValueError(
                "agn cannot advance schedules inside switch_after: put optperm.switch_after around agn."
            )


def advance_schedules(new: Any, old: Any, steps: jax.Array, params: Params) -> Any:
    """Return the new state with the old state's counts for schedules, advanced by some steps."""
    places, _ = _find_counts(new, params)

    def advance(path: Any, leaf: Any, start: Any) -> Any:
        if path not in places:
            return leaf
        largest = jnp.iinfo(leaf.dtype).max
        return jnp.where(start > largest - steps, largest, start + steps).astype(leaf.dtype)

    return jax.tree_util.tree_map_with_path(advance, new, old)


def count_local_steps(
    optimizer: optax.GradientTransformationExtraArgs, state: Any, steps: jax.Array, has_step: bool
) -> optax.GradientTransformationExtraArgs:
    """Return the optimizer of the center with schedules at the last local step.

    Args:
      optimizer: The optimizer.
      state: The state of `agn` before this update.
      steps: The number of local steps since the last commit, including this step.
      has_step: Whether this update takes a local step before the commit.
    """
    old, last = state.center_state, jnp.maximum(state.count - int(not has_step), 0)

    def update(n: Any, at: Any, params: Any, **extra_args: Any) -> Any:
        at = advance_schedules(at, old, steps - 1, params)
        with schedules_at(last):
            return optimizer.update(n, at, params, **extra_args)

    return optimizer._replace(update=update)


def _find_counts(state: Any, params: Params) -> tuple[set[Any], list[str]]:
    """Return the paths of the counts that schedules read, and the types of states with unclear counts.

    A state that contains only counts is a state for schedules. A tree like params contains no counts.
    """
    types = {type(node) for node in _list_nodes(params)} - {dict, list, tuple}
    places, unclear = set[Any](), list[str]()

    def visit(node: Any, path: Any, is_own: bool) -> None:
        name, children = type(node).__name__, _children(node)
        if type(node) not in (dict, list, tuple):
            # The counts of this library's states are not for schedules, which use `schedules_at`.
            is_own = type(node).__module__.split(".")[0] == "optperm"
        counts = [key for key, child in children.items() if _is_count(child)]
        if name in _FOLLOWED:
            counts = [key for key in counts if key.name == _FOLLOWED[name]]
        elif is_own or name in _OF_GRADIENTS:
            counts = []
        elif counts and _has_numbers(node):
            counts = []
            unclear.append(name)
        places.update((*path, key) for key in counts)
        for key, child in children.items():
            if getattr(key, "name", None) not in _VALUES and type(child) not in types:
                visit(child, (*path, key), is_own)

    visit(state, (), False)
    return places, unclear


def _has_count(state: Any, params: Params) -> bool:
    """Return whether schedules may be read within a state."""
    own = [each for each in _list_nodes(state) if type(each).__module__.startswith("optperm")]
    return bool(own) or bool(_find_counts(state, params)[0])


def _children(node: Any) -> dict[Any, Any]:
    """Return the children of a tree's node by key."""
    pairs, _ = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda each: each is not node)
    return {path[0]: child for path, child in pairs if path}


def _list_nodes(tree: Any) -> list[Any]:
    """Return all nodes of a tree except the leaves."""
    children = _children(tree)
    within = [node for child in children.values() for node in _list_nodes(child)]
    return [tree, *within] if children else within


def _is_count(node: Any) -> bool:
    dtype = getattr(node, "dtype", None)
    return dtype is not None and jnp.ndim(node) == 0 and jnp.issubdtype(dtype, jnp.integer)


def _has_numbers(node: Any) -> bool:
    """Return whether a node has floating arrays, such as moments."""
    leaves = jax.tree.leaves(node)
    return any(jnp.issubdtype(jnp.result_type(leaf), jnp.inexact) for leaf in leaves)
