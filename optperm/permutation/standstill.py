"""What a loop can tell of SGPerm's aggressiveness: that it is too small to move weights, or over."""

import warnings
from typing import Any

import numpy as np

from optperm.contract.states import find_states
from optperm.permutation.sgperm import RecommendationState

# Weights stand still if in so many steps no more than so much of what moved in the first few does.
_WINDOW, _FIRST, _STILL = 50, 5, 0.1


def warn_if_still(share_moved: np.ndarray, *, stacklevel: int) -> bool:
    """Warn if weights hardly move any more, by the share of them that each step so far moved.

    Returns:
      Whether it warned.
    """
    if len(share_moved) < 2 * _WINDOW:
        return False
    first, last = np.mean(share_moved[:_FIRST]), np.mean(share_moved[-_WINDOW:])
    if not last <= _STILL * first:
        return False
    says = f"After step {len(share_moved)} the weights hardly trade places any more: {last:.1%} of them"
    warnings.warn(
        f"{says} a step, {first:.1%} at first. Pass optperm.sgperm num_steps, the steps of the whole "
        "run, or a larger min_aggressiveness.",
        stacklevel=stacklevel,
    )
    return True


def warn_if_past_end(opt_state: Any, *, stacklevel: int) -> bool:
    """Warn if SGPerm has come to the end of its `num_steps`.

    Returns:
      Whether it warned.
    """
    states = find_states(opt_state, RecommendationState)
    is_past = any(int(np.max(state.steps_past_end)) > 0 for state in states)
    if is_past:
        says = "sgperm is past its num_steps: it goes on with the last aggressiveness."
        warnings.warn(says, stacklevel=stacklevel)
    return is_past
