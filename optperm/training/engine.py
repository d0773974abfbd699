"""The training loop itself: what happens between calls of the compiled steps, and in which order."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal

from optperm.training.feeds import Columns, Feed
from optperm.training.interrupt import Interrupt
from optperm.training.replicas import Replicas

_MANY = 2**31 - 1
# Why training ended.
Ended = Literal["finished", "stopped", "interrupted"]


@dataclasses.dataclass(frozen=True)
class Position:
    """How far training has come.

    Attributes:
      step: Steps taken.
      epoch: The epoch of the next step, from 1.
      offset: Steps taken within it.
    """

    step: int = 0
    epoch: int = 1
    offset: int = 0

    def after(self, steps: int, *, is_over: bool) -> "Position":
        """The position some steps later, in the same epoch or at the start of the next."""
        if is_over:
            return Position(self.step + steps, self.epoch + 1, 0)
        return Position(self.step + steps, self.epoch, self.offset + steps)


@dataclasses.dataclass(frozen=True)
class Hooks:
    """What happens at which moment of the loop; each is called with the position of that moment.

    Attributes:
      epoch_start: Before the first step of an epoch: from the carry it makes the one to go on with.
      steps_end: After each call of the compiled steps, with its metrics. True stops.
      epoch_end: After the last step of an epoch, or of all, with the carry. True stops.
      save: To keep what it takes to go on from here.
      interrupted: When Ctrl-C is noted.
    """

    epoch_start: Callable[[Position, Any], Any]
    steps_end: Callable[[Position, Any, Columns], bool]
    epoch_end: Callable[[Position, Any], bool]
    save: Callable[[Position, Any], None]
    interrupted: Callable[[], None] = lambda: None


def train(
    feed: Feed,
    carry: Any,
    at: Position,
    hooks: Hooks,
    *,
    replicas: Replicas,
    interrupt: Interrupt,
    epochs: float = math.inf,
    steps: float = math.inf,
    steps_a_call: float = math.inf,
    save_every: int = 0,
) -> tuple[Any, Position, Ended]:
    """Trains until the end of a number of epochs or steps, whichever comes first.

    Args:
      feed: The batches, and the compiled steps.
      carry: What is trained, placed; it is given up.
      at: Where training has come.
      hooks: What happens when.
      replicas: What it is trained on.
      interrupt: Ends training after the call of the compiled steps in which it is requested, in any
        process.
      epochs: From the first one, in all.
      steps: Likewise.
      steps_a_call: The most steps by one call.
      save_every: After how many steps each to save, and at the end; 0 never.

    Returns:
      The carry, the position, and why training ended.
    """
    saved, is_begun = -1, False

    def save() -> None:
        nonlocal saved
        saved = at.step
        hooks.save(at, carry)

    def ended(*, stop: bool) -> Ended | None:
        if at.epoch > epochs or at.step >= steps:
            return "finished"
        if replicas.any(interrupt.requested):
            return "interrupted"
        return "stopped" if stop else None

    try:
        while (why := ended(stop=False)) is None:
            if at.offset == 0:
                carry = hooks.epoch_start(at, carry)
            if at.offset == 0 or not is_begun:
                feed.begin(at.epoch, at.offset)
                is_begun = True
            limits = [_MANY, steps_a_call, steps - at.step]
            limits += [save_every - at.step % save_every] if save_every else []
            fed = feed.run(carry, int(min(limits)), interrupt, hooks.interrupted)
            carry, at = fed.carry, at.after(fed.steps, is_over=fed.is_over)
            stop = hooks.steps_end(at, carry, fed.columns)
            if fed.is_over or at.step >= steps:
                stop |= hooks.epoch_end(at, carry)
            if save_every and at.step % save_every == 0:
                save()
            if (why := ended(stop=replicas.any(stop))) is not None:
                break
        if save_every and saved != at.step:
            save()
    finally:
        feed.close()
    return carry, at, why
