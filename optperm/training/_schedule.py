"""The end of a run, and the tasks after its steps: rows, callbacks and checkpoints, in this order."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, Self

from optperm.core import checks
from optperm.training._callbacks import OF_ROWS, Callback, EarlyStopping, as_callbacks
from optperm.training._checkpoints import Checkpoints
from optperm.training._data import Position
from optperm.training._validation import Validation

# The maximum number of steps of a call, after which a signal takes effect.
MOST_STEPS = 100
# A row of the history; the callbacks of a number of steps, of rows within an epoch, or of an epoch; and
# a checkpoint, which comes last, so that usually no other task is due in it.
Task = Literal["row", "readers", "epoch", "checkpoint"] | int


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The length of a run and the periods of its tasks, in steps; infinity means never."""

    epochs: float = math.inf
    steps: float = math.inf
    validate_every: float = math.inf
    save_every: float = math.inf
    after: Mapping[int, tuple[Callback, ...]] = dataclasses.field(default_factory=dict)
    at_epochs: tuple[Callback, ...] = ()
    epoch_start: Callable[..., Any] | None = None

    @classmethod
    def make(
        cls,
        epochs: int | None,
        steps: int | None,
        validation: Validation | None,
        checkpoints: Checkpoints | None,
        callbacks: Mapping[Any, Any] | None,
    ) -> Self:
        """Return the schedule from the arguments of `fit`, which it checks."""
        if epochs is None and steps is None:
            raise ValueError("Pass epochs or steps, the length of training.")
        for name, count in (("epochs", epochs), ("steps", steps)):
            if count is not None:
                checks.check_count(name, count)
        after, at_epochs, start = dict[int, tuple[Callback, ...]](), tuple[Callback, ...](), None
        if not isinstance(callbacks, Mapping | None):
            wanted = 'a dict such as {100: f, "epoch": g}'
            raise TypeError(f"callbacks must be {wanted}, got {checks.shown(callbacks)}.")
        for key, value in (callbacks or {}).items():
            if key == "epoch_start":
                start = value
                continue
            called = as_callbacks(value)
            for function in called:
                if not callable(function):
                    wanted = "a function of an Event, or a list of such functions"
                    raise TypeError(
                        f"callbacks[{key!r}] must be {wanted}, got {checks.shown(function)}."
                    )
            if key == "epoch":
                at_epochs = called
            elif isinstance(key, str):
                wanted = 'a number of steps, "epoch" or "epoch_start"'
                raise ValueError(f"A key of callbacks must be {wanted}, got {key!r}.")
            else:
                checks.check_count(f"callbacks[{key!r}]", key)
                after[int(key)] = called
        return cls(
            epochs=epochs or math.inf,
            steps=steps or math.inf,
            validate_every=(validation and validation.every) or math.inf,
            save_every=(checkpoints and checkpoints.every) or math.inf,
            after=after,
            at_epochs=at_epochs,
            epoch_start=start,
        )

    def is_over(self, at: Position) -> bool:
        """Return True if the run ends before the next step."""
        return at.epoch > self.epochs or at.step >= self.steps

    def count_steps(self, at: Position, most: int = MOST_STEPS) -> int:
        """Return the number of steps in the next call, at most until the next task is due."""
        periods = self.validate_every, self.save_every, *self.after
        left = self.steps - at.step, *(n - at.step % n for n in periods)
        return int(min(most, *left))

    def find_due(
        self, at: Position, *, is_end: bool, has_row: bool, has_stepped: bool
    ) -> list[Task]:
        """Return the tasks that are due after a call of steps.

        Args:
          at: The position after the steps.
          is_end: Whether an epoch ended.
          has_row: Whether the last step already has a row. A stream reveals the end of its epoch only
            when the next batch is requested.
          has_stepped: Whether there were steps.
        """
        evaluates = has_stepped and at.step % self.validate_every == 0
        row = (is_end or evaluates) and not has_row
        due: list[Task] = ["row"] if row else []
        due += [n for n in self.after if has_stepped and at.step % n == 0]
        if is_end or (row and at.step >= self.steps):
            due.append("epoch")
        elif row:
            due.append("readers")
        if has_stepped and at.step % self.save_every == 0:
            due.append("checkpoint")
        return due

    def find_callbacks(self, task: Task) -> tuple[str, tuple[Callback, ...]]:
        """Return the name and the callbacks of a task; within an epoch, only those that read rows."""
        if isinstance(task, int):
            return f"callbacks[{task}]", self.after.get(task, ())
        found = tuple(f for f in self.at_epochs if task == "epoch" or isinstance(f, OF_ROWS))
        return 'callbacks["epoch"]', found

    def find_early_stopping(self, step: int | None = None) -> list[EarlyStopping]:
        """Return the callbacks that depend only on rows: all, or those that may be called at a step."""
        periods = [n for n in self.after if step is None or step % n == 0]
        called = self.at_epochs + sum((self.after[n] for n in periods), ())
        return [f for f in called if isinstance(f, EarlyStopping)]
