"""What is called while a model is trained."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, get_args

import jax
import numpy as np

from optperm.contract import checks
from optperm.training.history import History

Mode = Literal["min", "max"]


@dataclasses.dataclass(frozen=True)
class Event:
    """A moment between two steps, as a callback sees it.

    `state` is what has been trained so far. The model of `flax.nnx` that `fit` was given takes that on
    only when training ends.

    Attributes:
      epoch: The epoch of the last step, from 1.
      step: Steps done.
      history: All so far.
      is_row: Whether this is a row of `history.epochs`, rather than a call by `every`.
      metrics: That row; with `every={n: f}` the means over the last n steps.
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
        """The numbers of the moment; a function that does not look at them does not wait for them."""
        return self._metrics()

    @functools.cached_property
    def state(self) -> Any:
        """What has been trained so far, as a new `TrainState` or a new model of `flax.nnx`."""
        return self._trained()

    def evaluate(self) -> dict[str, float]:
        """What `eval_fn` gives on `eval_data` now. With several processes all of them have to ask."""
        return self._evaluate()


Callback = Callable[[Event], bool | None]


@dataclasses.dataclass(frozen=True)
class EarlyStopping:
    """Stops training once a metric of the history's rows has not improved for some time.

    It looks at the rows of epochs, and of evaluations within epochs with `eval_every`, which a stream
    without an end needs; at nothing else: a run that is resumed stops where it would have.

    Attributes:
      monitor: A column of `History.epochs`, such as `"eval_loss"`.
      patience: Rows without an improvement after which training stops.
      mode: Whether less is better, or more.
      min_delta: By how much more than the best one so far has to improve.

    Example:
      >>> from optperm.training import EarlyStopping, fit
      >>> stop = EarlyStopping("eval_loss", patience=3)  # fit(..., on_epoch_end=stop)
    """

    monitor: str
    patience: int
    mode: Mode = "min"
    min_delta: float = 0.0

    def __post_init__(self) -> None:
        checks.check_count("patience", self.patience)
        checks.check_choice("mode", self.mode, get_args(Mode))
        checks.check_in_range("min_delta", self.min_delta, 0.0, math.inf)

    def __call__(self, event: Event) -> bool:
        """Whether to stop; a ValueError if rows have no column of that name."""
        if epochs := event.history.epochs:
            check_columns([self.monitor], epochs, epochs)
        sign = 1.0 if self.mode == "min" else -1.0
        best, since = math.inf, 0
        for value in sign * epochs.get(self.monitor, np.zeros(0)):
            improved = value < best - self.min_delta
            best, since = (float(value), 0) if improved else (best, since + 1)
        return since >= self.patience


def check_columns(
    monitored: Iterable[str], of_evaluation: Iterable[str] | None, of_steps: Iterable[str] | None
) -> None:
    """Raise a ValueError for a column that rows do not have, where it is known which they have."""
    for name in monitored:
        known = of_evaluation if name.startswith("eval_") else of_steps
        if known is not None and name not in known:
            columns = ", ".join(map(repr, known)) or "nothing of the kind"
            says = f"EarlyStopping or keep_best looks at {name!r}, but rows of the history have"
            raise ValueError(f"{says} {columns}. Metrics of the evaluation begin with eval_.")


@dataclasses.dataclass
class MetricsWriter:
    """What `metrics_writer` makes."""

    writer: Any
    # The step of the last metrics of steps and that of the last row: no tag has two values at a step.
    _written: dict[bool, int] = dataclasses.field(default_factory=dict)

    def __call__(self, event: Event) -> None:
        """Writes what is new, in process 0."""
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
    """Make a function for `every` and `on_epoch_end` that hands metrics to a writer, in process 0.

    The means over the steps between two calls by `every` keep their names (`loss`, and `learning_rate`
    of `optax.inject_hyperparams`); those of a row of `history.epochs` are named `epoch_loss` and so on,
    beside the metrics of its evaluation, `eval_loss` and so on.

    Args:
      writer: With `write_scalars(step, scalars)`, as clu's, or `add_scalar(name, value, step)`, as
        TensorBoard's; a TypeError if it has neither.

    Example:
      >>> from optperm.training import metrics_writer
      >>> class Printer:
      ...     def write_scalars(self, step, scalars):
      ...         print(step, scalars)
      >>> write = metrics_writer(Printer())  # fit(..., every={100: write}, on_epoch_end=write)
    """
    if not hasattr(writer, "write_scalars") and not hasattr(writer, "add_scalar"):
        wanted = "write_scalars(step, scalars) or add_scalar(name, value, step)"
        raise TypeError(f"writer must have {wanted}, got {type(writer).__name__}.")
    return MetricsWriter(writer)


# Callbacks of `on_epoch_end` that look at rows within epochs too.
OF_ROWS = EarlyStopping, MetricsWriter


def as_callbacks(name: str, value: Any) -> tuple[Callback, ...]:
    """One callback or several, as a tuple; a TypeError if one is none."""
    several = () if value is None else tuple(value) if isinstance(value, Sequence) else (value,)
    for callback in several:
        checks.check_function(name, callback, "of an Event, or a list of such")
    return several


def wants_to_stop(name: str, callbacks: tuple[Callback, ...], event: Event) -> bool:
    """Calls all, and tells whether one wants to stop; a TypeError if one does not say clearly."""
    answers = [callback(event) for callback in callbacks]
    for answer in answers:
        if not isinstance(answer, bool | np.bool_ | None):
            says = "must return True to stop training, or None or False to go on"
            raise TypeError(f"{name} {says}, got {answer!r}.")
    return any(answers)
