"""Callbacks for `fit`: the events that callbacks receive, early stopping, and a metrics writer."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, get_args

import jax
import numpy as np

from optperm.core import checks
from optperm.training._history import GOAL, History

Mode = Literal["min", "max"]


@dataclasses.dataclass(frozen=True)
class Event:
    """The state of a run between two steps, which callbacks of `fit` receive.

    `state` is a copy of the trained state, as `fit` would return it now. The `flax.nnx` model that was
    passed to `fit` changes only when training ends.

    Attributes:
      epoch: The epoch of the last step, from 1.
      step: The number of steps taken.
      history: The history so far.
      is_row: True for a row of `history.epochs`, False for a call after a number of steps.
      metrics: The row without `epoch` and `step`; after n steps, the means over these n steps.
    """

    epoch: int
    step: int
    history: History
    is_row: bool
    _metrics: Callable[[], Mapping[str, float]] = dataclasses.field(repr=False)
    _trained: Callable[[], Any] = dataclasses.field(repr=False)
    _evaluate: Callable[[], dict[str, float]] = dataclasses.field(repr=False)

    @functools.cached_property
    def metrics(self) -> Mapping[str, float]:
        """The current metrics. Reading the metrics waits for the steps, so read them only if needed."""
        return self._metrics()

    @functools.cached_property
    def state(self) -> Any:
        """The trained state so far, as a new `TrainState` or a new `flax.nnx` model.

        With `optperm.agn` and `optperm.diloco`, reading the state makes a commit, so all processes must
        read it.
        """
        return self._trained()

    def evaluate(self) -> dict[str, float]:
        """Return the current metrics of the `Validation`. All processes must call `evaluate`."""
        return self._evaluate()


Callback = Callable[[Event], bool | None]
Names = Iterable[str]


@dataclasses.dataclass(frozen=True)
class EarlyStopping:
    """Stop training when a metric has not improved for several rows of the history.

    Each epoch has a row, and so has each evaluation within an epoch (`Validation.every`). Rows before
    the optimizer reaches its goal (`reached_goal` is 0) do not count. The decision depends only on the
    rows, so a resumed run stops where the uninterrupted run would have stopped.

    Attributes:
      monitor: A column of `History.epochs`, such as `"eval_loss"`.
      patience: The number of rows without an improvement after which training stops, at least 1.
      mode: `"min"` if smaller is better, `"max"` if larger is better.
      min_delta: The difference from the best row that an improvement must exceed, at least 0.

    Example:
      >>> from optperm.training import EarlyStopping, fit
      >>> stop = EarlyStopping("eval_loss", patience=3)  # fit(..., callbacks={"epoch": stop})
    """

    monitor: str
    patience: int
    mode: Mode = "min"
    min_delta: float = 0.0

    def __post_init__(self) -> None:
        checks.check_count("patience", self.patience)
        checks.check_choice("mode", self.mode, get_args(Mode))
        checks.check_in_range("min_delta", self.min_delta, 0.0, math.inf, may_be_schedule=False)

    def __call__(self, event: Event) -> bool:
        """Return True to stop; raise a ValueError if rows do not have the column."""
        if epochs := event.history.epochs:
            check_columns([self.monitor], epochs, epochs)
        sign = 1.0 if self.mode == "min" else -1.0
        best, since = math.inf, 0
        values = sign * epochs.get(self.monitor, np.zeros(0))
        # A NaN is never smaller, so it counts as a row without an improvement.
        for value in values[epochs.get(GOAL, np.ones_like(values)) != 0]:
            improved = value < best - self.min_delta
            best, since = (float(value), 0) if improved else (best, since + 1)
        return since >= self.patience


def check_columns(monitored: Names, of_evaluation: Names | None, of_steps: Names | None) -> None:
    """Raise a ValueError if rows do not have a column; None means columns that are not known yet."""
    for name in monitored:
        known = of_evaluation if name.startswith("eval_") else of_steps
        if known is not None and name not in known:
            says = f"EarlyStopping or keep_best needs the metric {name!r}, but rows have only {[*known]}"
            raise ValueError(f"{says}. A metric of Validation.fn has the name eval_<name>.")


@dataclasses.dataclass
class MetricsWriter:
    """The callback that `metrics_writer` makes."""

    writer: Any
    # The last written steps of step metrics and of rows, because a tag has only one value per step.
    _written: dict[bool, int] = dataclasses.field(default_factory=dict)

    def __call__(self, event: Event) -> None:
        """Write new metrics in process 0."""
        if jax.process_index():
            return
        row, scalars = event.history.last, dict[str, float]()
        if not event.is_row and self._written.get(False) != event.step:
            self._written[False], scalars = event.step, dict(event.metrics)
        if row.get("step") == event.step != self._written.get(True):
            self._written[True] = event.step
            for name in row.keys() - {"epoch", "step", "seconds"}:
                scalars[name if name.startswith("eval_") else f"epoch_{name}"] = row[name]
        if scalars and hasattr(self.writer, "write_scalars"):
            return self.writer.write_scalars(event.step, scalars)
        for name, value in scalars.items():
            self.writer.add_scalar(name, value, event.step)


def metrics_writer(writer: Any) -> MetricsWriter:
    """Make a callback that writes metrics, in process 0 only.

    With `callbacks={n: write}`, the metrics are means over the last n steps, under their own names (such
    as `loss`, and `learning_rate` of `optax.inject_hyperparams`). With `callbacks={"epoch": write}`, the
    means of a row of `history.epochs` have names such as `epoch_loss`, and evaluated metrics have names
    such as `eval_loss`.

    Args:
      writer: An object with `write_scalars(step, scalars)`, such as clu's, or with
        `add_scalar(name, value, step)`, such as TensorBoard's.

    Example:
      >>> from optperm.training import metrics_writer
      >>> class Printer:
      ...     def write_scalars(self, step, scalars):
      ...         print(step, scalars)
      >>> write = metrics_writer(Printer())  # fit(..., callbacks={100: write, "epoch": write})
    """
    return MetricsWriter(writer)


# Callbacks of epochs that are also called at rows within epochs.
OF_ROWS = EarlyStopping, MetricsWriter


def as_callbacks(value: Any) -> tuple[Callback, ...]:
    """Return one callback, a sequence of callbacks or None as a tuple."""
    return () if value is None else tuple(value) if isinstance(value, Sequence) else (value,)


def wants_to_stop(name: str, callbacks: tuple[Callback, ...], event: Event) -> bool:
    """Call all callbacks; return True if any callback returns True."""
    answers = [callback(event) for callback in callbacks]
    for answer in answers:
        # A number or an array could stop training by accident, or could fail to stop it.
        if not isinstance(answer, bool | np.bool_ | None):
            wanted = f"A callback of {name} must return True to stop, or None or False"
            raise TypeError(f"{wanted}, got {answer!r}.")
    return any(answers)
