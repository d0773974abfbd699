"""The warning from a training loop if SGPerm's weights hardly move."""

from collections.abc import Mapping

import numpy as np

# Weights stand still if the last 50 steps move at most a tenth of the fraction moved by the first 5.
_WINDOW, _FIRST, _STILL = 50, 5, 0.1


def judge_movement(columns: Mapping[str, np.ndarray]) -> list[str]:
    """Return a sentence if weights do not move, or hardly anymore, from the fractions of all steps."""
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
        f"After step {len(moved)}, weights hardly change positions: {last:.1%} of them moved per step "
        f"in the last {_WINDOW} steps, but {first:.1%} in the first {_FIRST}. Pass sgperm num_steps, "
        "the length of the run, or an aggressiveness that falls more slowly."
    ]
