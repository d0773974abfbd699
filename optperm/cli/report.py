"""The output of a run: progress lines, a table at the end, and pictures."""

import contextlib
import os
import pathlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from optperm.cli.errors import import_extra
from optperm.cli.flags import Run

# The entries of the summary in the table at the end of a run.
_SHOWN = (
    *("method", "model", "params", "data", "valid_accuracy", "test_accuracy", "epochs_done"),
    *("seconds", "gradient_evaluations", "fraction_moved", "phase", "devices"),
)


class Reporter:
    """Print the progress and the result of a run; with `quiet`, print nothing."""

    def __init__(self, run: Run) -> None:
        self._epochs, self.quiet = run.epochs, run.quiet
        self.has_bar = not run.quiet and sys.stdout.isatty()  # a progress bar

    def say(self, line: str) -> None:
        """Print a line."""
        if self.quiet:
            return
        try:
            print(line, flush=True)
        except BrokenPipeError:
            # A closed pipe (`| head`) must not end a run, which continues without a reader.
            self.quiet = True
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    def epoch(self, record: Mapping[str, Any]) -> None:
        """Print the record of an epoch."""
        names = {"loss": "train_loss", "train": "train_accuracy", "valid": "valid_accuracy"}
        names |= {"test": "test_accuracy", "moved": "fraction_moved"}
        known = {name: record[key] for name, key in names.items() if record[key] is not None}
        parts = [record["phase"] or "", *(f"{name} {x:.4f}" for name, x in known.items())]
        self.say(f"epoch {record['epoch']}/{self._epochs} {' '.join(parts).strip()}")

    def summary(self, summary: Mapping[str, Any], folder: pathlib.Path) -> None:
        """Print the result as a table with the names in summary.json, and print the files."""
        shown = {name: summary[name] for name in _SHOWN if summary[name] is not None}
        if shown["devices"] == 1:
            del shown["devices"]
        width = max(map(len, shown))
        for name, value in shown.items():
            text = f"{value:.4f}" if isinstance(value, float) else value
            self.say(f"{name.replace('_', ' '):{width}}  {text}")
        self.say(f"Files in {folder}: {', '.join(sorted(path.name for path in folder.iterdir()))}")


def draw_curve(
    path: pathlib.Path, records: Sequence[Mapping[str, Any]], steps: Mapping[str, Any]
) -> None:
    """Draw each metric over the steps, with means over epochs and evaluations."""
    tested = "test" if records[0]["valid_accuracy"] is None else "valid"
    names = {"loss": ["train_loss"], "accuracy": ["train_accuracy", f"{tested}_accuracy"]}
    names |= {"fraction_moved": ["fraction_moved"]} if "fraction_moved" in steps else {}
    with picture(path, figsize=(6, 2.1 * len(names) + 0.6)) as figure:
        column = figure.subplots(len(names), sharex=True)
        for axes, (name, means) in zip(column, names.items(), strict=True):
            each = steps.get(name, ())
            axes.plot(range(1, len(each) + 1), each, color="0.7", linewidth=0.8, label="steps")
            for key in means:
                rows = [(r["step"], r[key]) for r in records[1:] or records if r[key] is not None]
                axes.plot(*np.reshape(rows, (-1, 2)).T, ".-", label=key.replace("_", " "))
            axes.set(ylabel=name.replace("_", " "))
            axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))
        axes.set(xlabel="step")


@contextlib.contextmanager
def picture(path: pathlib.Path, **options: Any) -> Iterator[Any]:
    """Yield a figure in the style of the package, and save it."""
    # pyplot would search for a display, and store the figure in its global state.
    with import_extra("matplotlib.style").context("optperm.pictures"):
        yield (figure := import_extra("matplotlib.figure").Figure(**options))
        figure.savefig(path)
