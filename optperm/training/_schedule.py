"""The end of a run, and the tasks after its steps: rows, callbacks and checkpoints, in this order."""

import dataclasses
import math
from collections.abc import Mapping
from typing import NamedTuple

from optperm.training._callbacks import OF_ROWS, Callback, EarlyStopping
from optperm.training._data import Position


class Due(NamedTuple):
    """The tasks that are due after a step and not done yet, in their order.

    A checkpoint comes last, so usually no other task is due in it. After an error, the checkpoint lists
    the tasks that the error prevented, and the resumed run does these tasks first.

    Attributes:
      row: Whether the history gets a row, with an evaluation.
      every: The periods, in steps, of the due callbacks of `every`.
      on_row: Whether the callbacks of `on_epoch_end` that read every row are called.
      on_epoch_end: Whether all callbacks of `on_epoch_end` are called.
      checkpoint: Whether a checkpoint is written.
    """

    row: bool = False
    every: tuple[int, ...] = ()
    on_row: bool = False
    on_epoch_end: bool = False
    checkpoint: bool = False


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The length of a run and the periods of its tasks, in steps; infinity means never."""

    epochs: float = math.inf
    steps: float = math.inf
    steps_per_call: int = 100
    eval_every: float = math.inf
    checkpoint_every: float = math.inf
    every: Mapping[int, tuple[Callback, ...]] = dataclasses.field(default_factory=dict)
    on_epoch_end: tuple[Callback, ...] = ()

    def is_over(self, at: Position) -> bool:
        """Return True if the run ends before the next step."""
        return at.epoch > self.epochs or at.step >= self.steps

    def count_steps(self, at: Position) -> int:
        """Return the number of steps in the next call, at most until the next task is due."""
        periods = self.eval_every, self.checkpoint_every, *self.every
        left = self.steps - at.step, *(n - at.step % n for n in periods)
        return int(min(self.steps_per_call, *left))

    def find_due(self, at: Position, *, is_end: bool, has_row: bool, has_stepped: bool) -> Due:
        """Return the tasks that are due after a call of steps.

        Args:
          at: The position after the steps.
          is_end: Whether an epoch ended.
          has_row: Whether the last step already has a row. A stream reveals the end of its epoch only
            when the next batch is requested.
          has_stepped: Whether there were steps.
        """
        evaluates = has_stepped and at.step % self.eval_every == 0
        row = (is_end or evaluates) and not has_row
        return Due(
            row=row,
            every=tuple(n for n in self.every if has_stepped and at.step % n == 0),
            on_row=row,
            on_epoch_end=is_end or (row and at.step >= self.steps),
            checkpoint=has_stepped and at.step % self.checkpoint_every == 0,
        )

    def find_readers(self, due: Due) -> tuple[Callback, ...]:
        """Return the callbacks of `on_epoch_end` to call; within an epoch, only those that read rows."""
        return tuple(f for f in self.on_epoch_end if due.on_epoch_end or isinstance(f, OF_ROWS))

    def find_early_stopping(self, step: int | None = None) -> list[EarlyStopping]:
        """Return the callbacks that depend only on rows: all, or those that may be called at a step."""
        periods = [n for n in self.every if step is None or step % n == 0]
        called = self.on_epoch_end + sum((self.every[n] for n in periods), ())
        return [f for f in called if isinstance(f, EarlyStopping)]
