"""What is called while a model is trained."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args

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
      metrics: At the end of an epoch its row; with `every={n: f}` the means over the last n steps.
      history: All so far.
    """

    epoch: int
    step: int
    history: History
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
    """Stops training once a metric of the epochs has not improved for some time.

    It looks at the history alone: a run that is resumed stops where it would have.

    Attributes:
      monitor: A column of `History.epochs`, such as `"eval_loss"`.
      patience: Epochs without an improvement after which training stops.
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
        """Whether to stop; a ValueError if the epochs have no column of that name."""
        epochs = event.history.epochs
        if self.monitor not in epochs:
            raise ValueError(
                f"EarlyStopping monitors {self.monitor!r}, but the history of the epochs has "
                f"{', '.join(map(repr, epochs))}. Metrics of the evaluation begin with eval_."
            )
        sign = 1.0 if self.mode == "min" else -1.0
        best, since = math.inf, 0
        for value in sign * epochs[self.monitor]:
            improved = value < best - self.min_delta
            best, since = (float(value), 0) if improved else (best, since + 1)
        return since >= self.patience


def metrics_writer(writer: Any) -> Callback:
    """A function for `every` and `on_epoch_end` that hands the metrics of each event to a writer.

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

    def write(event: Event) -> None:
        if hasattr(writer, "write_scalars"):
            return writer.write_scalars(event.step, dict(event.metrics))
        for name, value in event.metrics.items():
            writer.add_scalar(name, value, event.step)

    return write


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
