"""The schedule of constant SGD's warm-up: the steps that learn, and the ends of the windows."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from optperm.core import checks

_LONGEST, _LEAST_OPEN = 2**31 - 1, 1000
# If each estimate uses the gradients of many examples, an eighth of the estimates is enough.
_ESTIMATE_EVERY, _ENOUGH = 8, 500


class Schedule(NamedTuple):
    """The steps of the warm-up.

    Attributes:
      burn_in: The first step that may sample.
      freeze_after: The first step in which nothing is learned.
      every: The number of steps from one estimate to the next.
    """

    burn_in: int | jax.Array
    freeze_after: int | jax.Array
    every: int | jax.Array

    def ends(self) -> tuple[jax.Array, ...]:
        """Return the start of the first window and the ends of all five.

        Two windows are in the second half of the burn-in; the others end after a quarter, a half and all
        of the steps from there to `freeze_after`. The noise far from the optimum is therefore forgotten.
        """
        first, last = (jnp.asarray(x, jnp.int32) for x in (self.burn_in, self.freeze_after))
        left = last - first
        half = (first // 2, first - first // 4, first)
        return *half, first + left // 4, first + left // 2, last

    def is_open(self, count: jax.Array) -> jax.Array:
        """Return whether anything is learned in a step."""
        start, *_, last = self.ends()
        return (count >= start) & (count < last) & ((count - start) % self.every == 0)

    def number(self, count: jax.Array) -> jax.Array:
        """Return the number of earlier estimates in the window that contains a step."""
        starts = [jnp.where(start <= count, start, 0) for start in self.ends()]
        return (count - functools.reduce(jnp.maximum, starts)) // self.every

    def ends_window(self, count: jax.Array) -> jax.Array:
        """Return whether a window ends with a step."""
        _, *ends = self.ends()
        return functools.reduce(jnp.logical_or, [count + 1 == end for end in ends])


def make_schedule(
    burn_in: int | jax.Array,
    freeze_after: int | jax.Array | None,
    batch_size: int | jax.Array,
    estimator: str,
    preconditioner: str | None,
) -> Schedule:
    """Return the schedule of `optperm.constant_sgd`, in which learning ends after the burn-in."""
    checks.check_count("burn_in", burn_in, minimum=0)
    are_seen = checks.is_concrete_number(burn_in)
    if freeze_after is None:
        left = max(int(burn_in), _LEAST_OPEN) if are_seen else jnp.maximum(burn_in, _LEAST_OPEN)
        freeze_after = min(int(burn_in) + left, _LONGEST) if are_seen else burn_in + left
    checks.check_count("freeze_after", freeze_after)
    are_seen = are_seen and checks.is_concrete_number(freeze_after)
    # Without a burn-in, one window learns the noise, and another window learns the curvature
    if are_seen and int(freeze_after) < max(int(burn_in) + 1, 2):
        numbers = f"freeze_after={freeze_after} and burn_in={burn_in}"
        raise ValueError(f"freeze_after must be above burn_in and at least 2, got {numbers}.")
    every = 1
    if are_seen and estimator == "per_example" and preconditioner in ("scalar", "diagonal"):
        is_seen = checks.is_concrete_number(batch_size)
        enough = (int(freeze_after) - int(burn_in)) // _ENOUGH
        every = max(1, min(int(batch_size) // 2 if is_seen else 1, enough, _ESTIMATE_EVERY))
    return Schedule(burn_in, freeze_after, every)
