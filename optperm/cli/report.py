"""What a run shows: lines of progress, a table at the end, and pictures."""

import contextlib
import os
import pathlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from optperm.bayes.calibration import Calibration
from optperm.cli.errors import import_extra

# This many lines of progress at most.
_LINES = 10
# What the curve shows, as the legend calls it.
_CURVES = {"test_accuracy": "test", "train_accuracy": "train"}


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
        names = {"loss": "train_loss", "train": "train_accuracy", "test": "test_accuracy"}
        parts = [f"epoch {epoch}/{self._epochs}"]
        parts += [record["phase"]] if record["phase"] else []
        parts += [
            f"{name} {record[key]:.4f}" for name, key in names.items() if record[key] is not None
        ]
        parts += [f"moved {record['share_moved']:.1%}"] if record["share_moved"] is not None else []
        self.say(" ".join(parts))

    def summary(self, summary: Mapping[str, Any], folder: pathlib.Path) -> None:
        """Prints the result as a table, and where the files are."""
        rows = {
            "method": summary["method"],
            "network": f"{summary['model']}, {summary['params']} params",
            "data": summary["data"],
            "test accuracy": f"{summary['test_accuracy']:.4f}",
            "gradients": f"{summary['gradient_evaluations']:.2e}, of one example each",
            "epochs": f"{summary['epochs_done']} of {summary['epochs']}",
            "seconds": f"{summary['seconds']:.2f}, and {summary['compile_seconds']:.2f} to compile",
            "phase": summary["phase"],
        }
        if summary["share_moved"] is not None:
            rows["moved a step"] = f"{summary['share_moved']:.1%} of the weights"
        if summary["processes"] > 1:
            rows["devices"] = f"{summary['devices']} in each of {summary['processes']} processes"
        elif summary["devices"] > 1:
            rows["devices"] = str(summary["devices"])
        for whose in ("last_iterate", "posterior"):
            if (found := summary[whose]) is not None:
                rows[whose.replace("_", " ")] = (
                    f"accuracy {found['accuracy']:.4f}, negative log likelihood "
                    f"{found['negative_log_likelihood']:.4f}, calibration error "
                    f"{found['expected_calibration_error']:.4f}"
                )
        if summary["posterior"] is not None:
            share = summary["posterior"]["share_at_max_step"]
            limited = "" if share is None else f", {share:.1%} of the steps at --max-step"
            rows["draws"] = f"{summary['posterior']['draws']}{limited}"
        if summary["steps_since_commit"]:
            rows["not committed"] = f"the last {summary['steps_since_commit']} steps"
        self.table([(name, value) for name, value in rows.items() if value is not None])
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


@contextlib.contextmanager
def picture(path: pathlib.Path, **options: Any) -> Iterator[Any]:
    """A figure in the house's style, which is saved in the end. No pyplot: it would keep the figure."""
    with import_extra("matplotlib.style").context("optperm.pictures"):
        figure = import_extra("matplotlib.figure").Figure(**options)
        yield figure
        figure.savefig(path)


def draw_curve(
    path: pathlib.Path, records: Sequence[Mapping[str, Any]], moved: np.ndarray | None, title: str
) -> None:
    """Draws accuracies over the epochs, and the share of weights that each step moved."""
    panels = 1 if moved is None else 2
    with picture(path, figsize=(6, 2.4 + 1.2 * panels)) as figure:
        ratios = (2, 1)[:panels]
        column = figure.subplots(panels, sharex=True, squeeze=False, height_ratios=ratios)[:, 0]
        epochs = [record["epoch"] for record in records[1:]]
        lowest = min((record["test_accuracy"] for record in records[1:]), default=0.0)
        for name, label in _CURVES.items():
            column[0].plot(epochs, [record[name] for record in records[1:]], ".-", label=label)
        column[0].set(title=title, ylabel="accuracy", ylim=(np.floor(10 * lowest) / 10, 1.005))
        figure.legend(loc="outside lower center", ncols=2)
        if moved is not None:
            steps = (np.arange(len(moved)) + 1) * records[-1]["epoch"] / max(len(moved), 1)
            column[1].plot(steps, moved, color="0.4", linewidth=0.8)
            column[1].set(ylabel="share of weights\nmoved a step", ylim=(0, None))
        column[-1].set(xlabel="epoch", xlim=(0, None))


def draw_reliability(
    path: pathlib.Path, calibrations: Mapping[str, Calibration], title: str
) -> None:
    """Draws how often predictions are right over how confident they are, and how many there are."""
    with picture(path, figsize=(5, 6)) as figure:
        above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
        above.plot((0, 1), (0, 1), color="0.6", linewidth=0.8, label="as right as confident")
        for marker, (name, found) in zip("os", calibrations.items(), strict=False):
            is_filled = np.asarray(found.counts) > 0
            confidence, accuracy = found.confidence[is_filled], found.accuracy[is_filled]
            error = float(found.expected_calibration_error)
            label = f"{name.replace('_', ' ')}: calibration error {error:.4f}"
            above.plot(confidence, accuracy, f"{marker}-", label=label)
            edges = np.linspace(0, 1, len(found.counts) + 1)
            below.stairs(np.asarray(found.counts), edges, linewidth=1.6)
        above.set(title=title, ylabel="accuracy", xlim=(0, 1), ylim=(0, 1.02))
        below.set(xlabel="confidence", ylabel="examples", yscale="log")
        figure.legend(loc="outside lower center")
