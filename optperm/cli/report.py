"""What a run shows: lines of progress, a table at the end, and pictures."""

import os
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from optperm.bayes.calibration import Calibration
from optperm.cli.errors import import_extra

# This many lines of progress at most.
_LINES = 10


class Reporter:
    """Prints what becomes of a run, or nothing at all.

    Attributes:
      quiet: Whether to print nothing.
      has_bar: Whether there is a terminal for a progress bar.
    """

    def __init__(self, epochs: int, *, quiet: bool) -> None:
        self._epochs, self.quiet = epochs, quiet
        self.has_bar = not quiet and sys.stdout.isatty()

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


def figure(**options: Any) -> Any:
    """A figure that can be saved. No pyplot: it would look for a display, and keep it."""
    made = import_extra("matplotlib.figure").Figure(layout="constrained", **options)
    import_extra("matplotlib.backends.backend_agg").FigureCanvasAgg(made)
    return made


def draw_curve(
    path: pathlib.Path, records: Sequence[Mapping[str, Any]], moved: np.ndarray | None, title: str
) -> None:
    """Draws accuracies over the epochs, and the share of weights that each step moved."""
    picture = figure(figsize=(7, 4.5))
    axes = picture.add_subplot(title=title, xlabel="epoch", ylabel="accuracy", ylim=(0, 1.02))
    epochs = [record["epoch"] for record in records]
    lines = [
        *axes.plot(epochs, [record["test_accuracy"] for record in records], label="test"),
        *axes.plot(epochs[1:], [record["train_accuracy"] for record in records[1:]], label="train"),
    ]
    if moved is not None:
        right = axes.twinx()
        right.set(ylabel="share of weights moved a step", ylim=(0, 1.02))
        steps = (np.arange(len(moved)) + 1) * epochs[-1] / len(moved)
        lines += right.plot(steps, moved, color="0.7", linewidth=0.8, label="moved")
        right.set_zorder(0)
        axes.set(zorder=1, frame_on=False)
    axes.legend(handles=lines, loc="center right")
    picture.savefig(path, dpi=120)


def draw_reliability(
    path: pathlib.Path, calibrations: Mapping[str, Calibration], title: str
) -> None:
    """Draws how often predictions are right over how confident they are, and how many there are."""
    picture = figure(figsize=(5, 6))
    above, below = picture.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    above.plot((0, 1), (0, 1), color="0.7", linewidth=0.8)
    for name, found in calibrations.items():
        is_filled = np.asarray(found.counts) > 0
        confidence, accuracy = found.confidence[is_filled], found.accuracy[is_filled]
        error = float(found.expected_calibration_error)
        above.plot(confidence, accuracy, "o-", label=f"{name}: calibration error {error:.4f}")
        edges = np.linspace(0, 1, len(found.counts) + 1)
        below.stairs(np.asarray(found.counts), edges)
    above.set(title=title, ylabel="accuracy", xlim=(0, 1), ylim=(0, 1.02))
    above.legend(loc="upper left")
    below.set(xlabel="confidence", ylabel="examples", yscale="log")
    picture.savefig(path, dpi=120)
