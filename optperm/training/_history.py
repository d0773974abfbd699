"""The history of training: one row per step and one row per epoch, as arrays."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from optperm.core.optional import import_optional

Columns = dict[str, np.ndarray]
# The column of rows that says whether the optimizer had reached its goal.
GOAL = "reached_goal"
# The column with the count of each step, if the loss is a sum and a count.
COUNT = "loss_count"
# The columns that `History.plot` does not draw.
_NOT_DRAWN = {"epoch", "step", "seconds", COUNT, GOAL}


def find_divergence(history: "History") -> int | None:
    """Return the first step, from 1, with a nonfinite loss; None unless the last loss is nonfinite."""
    loss = history.steps.get("loss", np.zeros(0))
    if not loss.size or np.isfinite(loss[-1]):
        return None
    return int(np.argmin(np.isfinite(loss))) + 1


class History:
    """The history of training, starting with the first step.

    Attributes:
      num_steps: The number of rows for steps.
      epoch_rows: The rows of the epochs, as JSON values.

    Example:
      >>> import numpy as np
      >>> from optperm.training import History
      >>> history = History()
      >>> history.add_steps({"loss": np.array([3.0, 1.0], np.float32)})
      >>> history.add_epoch(epoch=1, step=2, seconds=0.5, evaluated={"accuracy": 0.75})
      >>> {name: column.tolist() for name, column in history.epochs.items()}
      {'epoch': [1], 'step': [2], 'seconds': [0.5], 'loss': [2.0], 'eval_accuracy': [0.75]}
    """

    def __init__(
        self, steps: Mapping[str, Any] | None = None, epoch_rows: Iterable[Mapping[str, float]] = ()
    ) -> None:
        # Pairs of columns and the number of valid first rows. The columns stay on the device until they
        # are read.
        self.num_steps, self._parts = 0, list[tuple[Mapping[str, Any], int]]()
        self._names = frozenset[str]()  # the columns of the last rows
        self.epoch_rows = [dict(row) for row in epoch_rows]
        self.add_steps(steps or {})

    @property
    def steps(self) -> Columns:
        """The rows of the steps by name, float32 (steps,).

        `loss` is the loss of each batch before its step. If the loss function returns a sum and a count,
        `loss_count` is the count of each batch, by which means over steps are weighed. Other columns are
        the metrics that the loss function returns with `has_aux`, `learning_rate` of
        `optax.inject_hyperparams`, and `fraction_moved` of `optperm.sgperm`. If a step has no value for
        a metric, the entry is NaN.
        """
        if len(self._parts) > 1:
            self._parts = [(self._between(0, self.num_steps), self.num_steps)]
        return self._between(0, self.num_steps)

    def _between(self, low: int, high: int) -> Columns:
        """Return the rows from `low` to `high`, NaN where a row lacks a column."""
        parts, start = list[Columns](), self.num_steps
        # Search from the end, since mostly the last rows are read.
        for columns, count in reversed(self._parts):
            start -= count
            rows = slice(max(low - start, 0), max(min(high - start, count), 0))
            parts.insert(0, {name: np.asarray(column)[rows] for name, column in columns.items()})
            if start <= low:
                break

        def column(part: Columns, name: str) -> np.ndarray:
            return part[name] if name in part else np.full_like(next(iter(part.values())), np.nan)

        names = dict.fromkeys(name for part in parts for name in part)
        return {name: np.concatenate([column(part, name) for part in parts]) for name in names}

    @property
    def epochs(self) -> Columns:
        """The rows of the epochs by name, (epochs,).

        `epoch`, from 1, and `step`, the number of steps taken so far, are int64. The other columns are
        float64: `seconds` of wall time, the mean of each column of `steps` over the steps since the
        last row, and the metrics of the evaluation as `eval_<name>`. With a column `loss_count`, the
        other means are weighed by it. If a method reaches what it was asked for only after some steps,
        such as `optperm.prune_gradually` or `optperm.switch_after`, `reached_goal` is 0 before and 1
        from then on. If the argument `steps` ends training within an epoch, the
        partial epoch has a row; when training resumes, the row of the whole epoch replaces this row. If
        a callback, a signal or an error ends an epoch early, this epoch has no row.
        """
        rows, kinds = self.epoch_rows, {"epoch": np.int64, "step": np.int64}
        names = dict.fromkeys(name for row in rows for name in row)
        return {
            name: np.array([row.get(name, np.nan) for row in rows], kinds.get(name, np.float64))
            for name in names
        }

    @property
    def last(self) -> dict[str, float]:
        """The last row of `epochs`; empty before the first row."""
        return dict(self.epoch_rows[-1]) if self.epoch_rows else {}

    def plot(self, figure: Any = None, *, label: str = "") -> Any:
        """Draw the loss, the metrics, and the columns of a method, such as `fraction_moved`.

        Each column has axes of its own: a thin line over the steps, dots for the means of the rows, and
        a dashed line for the evaluations.

        Args:
          figure: The figure that `plot` of another history returned, to draw this history into its axes.
            Columns that the other history does not have are left out.
          label: The name of this history in the legend.

        Returns:
          A `matplotlib.figure.Figure`.

        Raises:
          ImportError: If Matplotlib is missing.
          ValueError: If there are no rows yet.

        Example:
          >>> import numpy as np
          >>> from optperm.training import History
          >>> history = History({"loss": np.array([3.0, 1.0], np.float32)})
          >>> figure = history.plot(label="Adam")
          >>> figure.savefig("losses.png")  # doctest: +SKIP
        """
        steps, rows = self.steps, self.epochs
        found = dict.fromkeys(name.removeprefix("eval_") for name in (*steps, *rows))
        names = sorted(found.keys() - _NOT_DRAWN, key=lambda name: (name != "loss", name))
        if not names:
            raise ValueError("There is nothing to draw: the history has no rows yet.")
        what: Any = {"needed_by": "History.plot", "install": "optperm[training]"}
        with import_optional("matplotlib.style", **what).context("optperm.pictures"):
            if figure is None:
                # pyplot would look for a display.
                size = 6, 0.6 + 2 * len(names)
                figure = import_optional("matplotlib.figure", **what).Figure(figsize=size)
                for axes, name in zip(
                    figure.subplots(len(names), sharex=True, squeeze=False).flat, names, strict=True
                ):
                    axes.set(ylabel=name.replace("_", " "))
                axes.set(xlabel="step")
            for axes in figure.axes:
                _draw(axes, axes.get_ylabel().replace(" ", "_"), steps, rows, label)
        return figure

    def add_steps(self, columns: Mapping[str, Any], count: int | None = None) -> None:
        """Add rows of steps: all rows, or the first `count` rows."""
        if columns:
            count = len(next(iter(columns.values()))) if count is None else count
            self._names = frozenset(columns)
            self._parts.append((columns, count))
            self.num_steps += count

    def means(self, count: int, end: int | None = None) -> dict[str, float]:
        """Return the means over the last `count` rows of the steps, or the last rows before `end`.

        The means of other columns are weighed by the column `loss_count`, if there is one.
        """
        end = self.num_steps if end is None else end
        rows = self._between(max(end - count, 0), end)
        wide = {name: np.asarray(column, np.float64) for name, column in rows.items()}
        counts = np.nan_to_num(wide.get(COUNT, np.zeros(0)))

        def mean(name: str, column: np.ndarray) -> float:
            if name == COUNT or not counts.any():
                return float(np.mean(column))
            return float(np.average(column[counts != 0], weights=counts[counts != 0]))

        return {name: mean(name, wide[name]) for name in wide if name in self._names}

    def add_epoch(
        self,
        epoch: int,
        step: int,
        seconds: float,
        evaluated: Mapping[str, float],
        reached_goal: bool | None = None,
    ) -> None:
        """Add the row of an epoch, with means over the steps added since the last row."""
        row = {"epoch": epoch, "step": step, "seconds": seconds}
        row |= {} if reached_goal is None else {GOAL: float(reached_goal)}
        row |= self.means(step - int(self.last.get("step", 0)))
        self.epoch_rows.append(row | {f"eval_{name}": float(v) for name, v in evaluated.items()})


def _draw(axes: Any, name: str, steps: Columns, rows: Columns, label: str) -> None:
    """Draw a column of the steps, its means in the rows, and its evaluations, in the next color."""
    color = axes.plot([], [])[0].get_color()
    if name in steps:
        thin = {"linewidth": 0.6, "alpha": 0.4, "label": "" if name in rows else label}
        axes.plot(np.arange(1, len(steps[name]) + 1), steps[name], "-", color=color, **thin)
    evaluated = f"{label} evaluated".strip()
    styles = {name: (".-", label or "training"), f"eval_{name}": (".--", evaluated)}
    for column, (style, text) in styles.items():
        if column in rows:
            at = np.isfinite(rows[column])
            axes.plot(rows["step"][at], rows[column][at], style, color=color, label=text)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))
