"""The warning of a loop that SGPerm's weights stand still."""

import warnings

import numpy as np

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
