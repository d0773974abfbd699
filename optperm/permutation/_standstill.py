"""The warning of a training loop that SGPerm's weights hardly move."""

from collections.abc import Mapping

import numpy as np

# Weights stand still if the last 50 steps move at most a tenth of what the first 5 moved.
_WINDOW, _FIRST, _STILL = 50, 5, 0.1


def judge_movement(columns: Mapping[str, np.ndarray]) -> list[str]:
    """Return a sentence if weights hardly move any more, from the fraction moved in each step."""
    moved = columns["fraction_moved"]
    if len(moved) >= _FIRST and not np.any(moved):
        says = f"No weight has moved in {len(moved)} steps: take a larger aggressiveness."
        return [f"{says} Weights with few values need sgperm(aggressiveness=1.0)."]
    if len(moved) < 2 * _WINDOW:
        return []
    first, last = np.mean(moved[:_FIRST]), np.mean(moved[-_WINDOW:])
    if not last <= _STILL * first:
        return []
    return [
        f"After step {len(moved)} the weights hardly trade places: {last:.1%} of them per step, "
        f"{first:.1%} at first. Pass sgperm num_steps, the length of the run, or an aggressiveness that "
        "falls more slowly."
    ]
