"""Warnings of a loop about SGPerm: its weights stand still, or it is past its `num_steps`."""

import warnings
from typing import Any

import numpy as np

from optperm.core.states import find_states
from optperm.permutation._sgperm import RecommendationState

# Weights stand still if the last 50 steps move at most a tenth of what the first 5 moved.
_WINDOW, _FIRST, _STILL = 50, 5, 0.1


def warn_if_still(fraction_moved: np.ndarray, *, stacklevel: int) -> bool:
    """Warn if weights hardly move any more, given the fraction moved in each step; return whether."""
    if len(fraction_moved) >= _FIRST and not np.any(fraction_moved):
        says = f"No weight has moved in {len(fraction_moved)} steps: take a larger aggressiveness."
        advice = "Weights of a few values need sgperm(aggressiveness=1.0)."
        warnings.warn(f"{says} {advice}", stacklevel=stacklevel)
        return True
    if len(fraction_moved) < 2 * _WINDOW:
        return False
    first, last = np.mean(fraction_moved[:_FIRST]), np.mean(fraction_moved[-_WINDOW:])
    if not last <= _STILL * first:
        return False
    says = (
        f"After step {len(fraction_moved)} the weights hardly trade places: {last:.1%} of them per "
        f"step, {first:.1%} at first."
    )
    advice = (
        "Pass sgperm num_steps, all steps of the run, or an aggressiveness that falls more slowly."
    )
    warnings.warn(f"{says} {advice}", stacklevel=stacklevel)
    return True


def warn_if_past_end(opt_state: Any, *, stacklevel: int) -> bool:
    """Warn if SGPerm is past its `num_steps`; return whether."""
    states = find_states(opt_state, RecommendationState)
    is_past = any(int(np.max(state.steps_past_end)) > 0 for state in states)
    if is_past:
        says = "sgperm is past its num_steps: it continues with the last aggressiveness."
        warnings.warn(says, stacklevel=stacklevel)
    return is_past
