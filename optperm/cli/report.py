"""What a run shows: lines of progress, a table at the end, and pictures."""

import os
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from optperm.training.history import History

# This many lines of progress at most.
_LINES = 10
# What the table of a run shows of its summary.
_SHOWN = (
    *("method", "model", "params", "data", "valid_accuracy", "test_accuracy", "epochs_done"),
    *("seconds", "gradient_evaluations", "share_moved", "phase", "steps_since_commit", "devices"),
)


class Reporter:
    """Prints what becomes of a run, with `quiet` nothing at all."""

    def __init__(self, epochs: int, *, quiet: bool) -> None:
        self._epochs, self.quiet = epochs, quiet
        self.has_bar = not quiet and sys.stdout.isatty()  # a progress bar

    def say(self, line: str) -> None:
        """Prints a line."""
        if self.quiet:
            return
        try:
            print(line, flush=True)
        except BrokenPipeError:
            # It goes on without a reader: a closed pipe (`| head`) is no reason to lose a run.
            self.quiet = True
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    def epoch(self, record: Mapping[str, Any]) -> None:
        """Prints the record of an epoch, of many epochs a few."""
        epoch, every = record["epoch"], -(-self._epochs // _LINES)
        if epoch != self._epochs and epoch % every:
            return
        names = {"loss": "train_loss", "train": "train_accuracy"}
        names |= {"valid": "valid_accuracy", "test": "test_accuracy"}
        parts = [f"epoch {epoch}/{self._epochs}"]
        parts += [record["phase"]] if record["phase"] else []
        parts += [
            f"{name} {record[key]:.4f}" for name, key in names.items() if record[key] is not None
        ]
        parts += [f"moved {record['share_moved']:.1%}"] if record["share_moved"] is not None else []
        self.say(" ".join(parts))

    def summary(self, summary: Mapping[str, Any], folder: pathlib.Path) -> None:
        """Prints the result as a table, by the names of summary.json, and where the files are."""
        shown = {name: summary[name] for name in _SHOWN if summary[name] is not None}
        if shown["devices"] == 1:
            del shown["devices"]
        self.table([(_words(name), _plain(value)) for name, value in shown.items()])
        self.files(folder)

    def table(self, rows: Sequence[Sequence[str]]) -> None:
        """Prints rows, each column as wide as it has to be."""
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for row in rows:
            cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            self.say("  ".join(cells).rstrip())

    def files(self, folder: pathlib.Path) -> None:
        """Prints what is in a folder."""
        self.say(f"Files in {folder}: {', '.join(sorted(path.name for path in folder.iterdir()))}")


def draw_curve(path: pathlib.Path, records: Sequence[Mapping[str, Any]], steps: Any) -> None:
    """Draws what `History.plot` does: each metric over the steps, in training and in testing."""
    names = {"loss": "train_loss", "accuracy": "train_accuracy", "share_moved": "share_moved"}
    tested = "test_accuracy" if records[0]["valid_accuracy"] is None else "valid_accuracy"
    names |= {"step": "step", "eval_accuracy": tested}
    rows = [{name: r[key] for name, key in names.items() if r[key] is not None} for r in records]
    History(steps, rows[1:] or rows).plot(path)


def _words(name: str) -> str:
    return name.replace("_", " ")


def _plain(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, float) else str(value)
