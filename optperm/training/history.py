"""What training recorded: a row for each step and one for each epoch, as arrays."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

Columns = dict[str, np.ndarray]


def find_divergence(history: "History") -> int | None:
    """The row of steps, from 1, from which the loss is not finite, if it is not at the end."""
    loss = history.steps.get("loss", np.zeros(0))
    if not loss.size or np.isfinite(loss[-1]):
        return None
    return int(np.argmin(np.isfinite(loss))) + 1


class History:
    """What training recorded, from its first step on.

    Attributes:
      num_steps: Rows of steps.
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
        # Columns with how many of their first rows count: they may still be computed on a device.
        self.num_steps, self._parts = 0, list[tuple[Mapping[str, Any], int]]()
        self._names = frozenset[str]()  # of the last rows
        self.epoch_rows = [dict(row) for row in epoch_rows]
        self.add_steps(steps or {})

    @property
    def steps(self) -> Columns:
        """The rows of the steps by name, float32 (steps,).

        `loss`, that of each batch before its step; what the loss function returned beside it with
        `has_aux`; and `share_moved` where a method permutes weights. NaN where a step had none.
        """
        if len(self._parts) > 1:
            self._parts = [(self._between(0, self.num_steps), self.num_steps)]
        return self._between(0, self.num_steps)

    def _between(self, low: int, high: int) -> Columns:
        """Return the rows from one to another, NaN where some have no such column."""
        parts, start = list[Columns](), self.num_steps
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

        `epoch`, from 1, and `step`, the steps done by then, int64; `seconds` of wall time; the mean of
        each column of `steps` over the steps since the row before; and what the evaluation gave, as
        `eval_<name>`: float64. An epoch within which `steps` ends training has a row of that part,
        in whose place that of the whole epoch comes when training goes on; of one within which a
        callback, a signal or an error ends it there is none.
        """
        rows, kinds = self.epoch_rows, {"epoch": np.int64, "step": np.int64}
        names = dict.fromkeys(name for row in rows for name in row)
        return {
            name: np.array([row.get(name, np.nan) for row in rows], kinds.get(name, np.float64))
            for name in names
        }

    @property
    def last(self) -> dict[str, float]:
        """The row of the last epoch; empty before."""
        return dict(self.epoch_rows[-1]) if self.epoch_rows else {}

    def add_steps(self, columns: Mapping[str, Any], count: int | None = None) -> None:
        """Adds rows of steps: all, or the first `count` of them."""
        if columns:
            count = len(next(iter(columns.values()))) if count is None else count
            self._names = frozenset(columns)
            self._parts.append((columns, count))
            self.num_steps += count

    def means(self, count: int, end: int | None = None) -> dict[str, float]:
        """The means of the last rows of the steps, or of those before `end`, as many as there are."""
        end = self.num_steps if end is None else end
        rows = self._between(max(end - count, 0), end)
        means = {name: float(np.mean(rows[name], dtype=np.float64)) for name in rows}
        return {name: mean for name, mean in means.items() if name in self._names}

    def add_epoch(
        self, epoch: int, step: int, seconds: float, evaluated: Mapping[str, float]
    ) -> None:
        """Adds the row of an epoch; its means are over the steps added since the row before."""
        row = {"epoch": epoch, "step": step, "seconds": seconds}
        row |= self.means(step - int(self.last.get("step", 0)))
        self.epoch_rows.append(row | {f"eval_{name}": float(v) for name, v in evaluated.items()})
