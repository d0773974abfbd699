"""What a run shows: live progress, a table at the end, and the curve."""

import math
import os
import pathlib
import sys
from collections.abc import Mapping
from types import TracebackType
from typing import Any

import numpy as np

from optperm.bayes.calibration import Calibration
from optperm.cli.errors import import_extra
from optperm.cli.training import EpochRecord, TrainingRun

# Where there is no terminal to redraw, this many lines at most.
_PLAIN_LINES = 10


class Reporter:
    """Prints the progress of a run: a live bar on a terminal, else a few plain lines.

    Args:
      epochs: Epochs planned.
      quiet: Print nothing at all.
    """

    def __init__(self, epochs: int, *, quiet: bool) -> None:
        progress = import_extra("rich.progress")
        self._console = import_extra("rich.console").Console(quiet=quiet, highlight=False)
        self._epochs = epochs
        self._is_live = self._console.is_interactive and not quiet
        self._console.on_broken_pipe = self._fall_silent
        self._progress = progress.Progress(
            progress.BarColumn(bar_width=10),
            progress.TextColumn("{task.description}", markup=False),
            progress.TimeElapsedColumn(),
            console=self._console,
            disable=not self._is_live,
        )
        self._task = self._progress.add_task("compiling", total=epochs)

    def __enter__(self) -> "Reporter":
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def epoch(self, record: EpochRecord) -> None:
        """Shows the record of an epoch."""
        parts = [
            f"epoch {record.epoch}/{self._epochs}",
            *([] if record.phase is None else [record.phase]),
            *_part("loss", record.train_loss, "{:.4f}"),
            *_part("train", record.train_accuracy, "{:.4f}"),
            f"test {record.test_accuracy:.4f}",
            *_part("moved", record.share_moved, "{:.1%}"),
        ]
        line = " ".join(parts)
        self._progress.update(self._task, completed=record.epoch, description=line)
        every = -(-self._epochs // _PLAIN_LINES)
        if not self._is_live and (record.epoch == self._epochs or record.epoch % every == 0):
            self._say(line)

    def starting(self, what: str) -> None:
        """Shows what a method does before an epoch."""
        self._progress.update(self._task, description=f"{what}, then the next epoch")

    def resuming(self, folder: pathlib.Path, epoch: int) -> None:
        """Says from where a run goes on."""
        self._say(f"Going on after epoch {epoch} of {folder}.")

    def waiting(self) -> None:
        """Says that the other processes have to be started."""
        self._say("Waiting for the other processes.")

    def interrupted(self) -> None:
        """Says what the first Ctrl-C does."""
        self._say("Finishing this epoch, then saving. Ctrl-C again stops at once.")

    def summary(self, summary: dict[str, Any], folder: pathlib.Path) -> None:
        """Prints the result as a table, and where the files are."""
        text = import_extra("rich.text").Text
        table = import_extra("rich.table").Table(box=None, show_header=False, padding=(0, 2, 0, 0))
        table.add_column(overflow="fold")
        table.add_column(overflow="fold")
        moved = summary["share_moved"]
        rows = {
            "method": summary["method"],
            "network": f"{summary['model']}, {summary['params']} params",
            "data": summary["data"],
            "test accuracy": f"{summary['test_accuracy']:.4f}",
            "gradients": f"{summary['gradient_evaluations']:.2e}, of one example each",
            "epochs": f"{summary['epochs_done']} of {summary['epochs']}",
            "seconds": f"{summary['seconds']:.2f}, and {summary['compile_seconds']:.2f} to compile",
        }
        if summary["phase"] is not None:
            rows["phase"] = summary["phase"]
        if moved is not None:
            rows["moved a step"] = f"{moved:.1%} of the weights"
        if summary["replicas"] > 1:
            rows["devices"] = f"{summary['devices']} in each of {summary['processes']} processes"
            if summary["processes"] == 1:
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
        for name, value in rows.items():
            table.add_row(text(name), text(value))
        self._console.print(table)
        loss = summary["train_loss"]
        if loss is not None and not math.isfinite(loss):
            self._say("The loss is not finite any more: try a smaller --learning-rate.")
        self._say(f"Files in {folder}: {', '.join(sorted(path.name for path in folder.iterdir()))}")

    def _fall_silent(self) -> None:
        """Goes on without a reader: a closed pipe (`| head`) is no reason to lose a run."""
        self._console.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    def _say(self, line: str) -> None:
        self._console.print(line, markup=False, soft_wrap=True)


def _part(name: str, value: float | None, form: str) -> list[str]:
    return [] if value is None else [f"{name} {form.format(value)}"]


def draw_curve(path: pathlib.Path, run: TrainingRun, title: str) -> None:
    """Draws accuracies and the share of weights moved over the epochs."""
    # No pyplot: it would look for a display and keep the figure in its global state.
    figure = import_extra("matplotlib.figure").Figure(figsize=(7, 4.5), layout="constrained")
    import_extra("matplotlib.backends.backend_agg").FigureCanvasAgg(figure)
    axes = figure.add_subplot(title=title, xlabel="epoch", ylabel="accuracy", ylim=(0, 1.02))
    epochs = [record.epoch for record in run.records]
    trained = run.records[1:]
    lines = [
        *axes.plot(epochs, [record.test_accuracy for record in run.records], label="test"),
        *axes.plot(epochs[1:], [record.train_accuracy for record in trained], label="train"),
    ]
    if run.share_moved is not None:
        right = axes.twinx()
        right.set(ylabel="share of weights moved a step", ylim=(0, 1.02))
        steps = (np.arange(len(run.share_moved)) + 1) * epochs[-1] / len(run.share_moved)
        lines += right.plot(steps, run.share_moved, color="0.7", linewidth=0.8, label="moved")
        right.set_zorder(0)
        axes.set(zorder=1, frame_on=False)
    axes.legend(handles=lines, loc="center right")
    figure.savefig(path, dpi=120)


def draw_reliability(
    path: pathlib.Path, calibrations: Mapping[str, Calibration], title: str
) -> None:
    """Draws how often predictions are right over how confident they are, and how many there are."""
    figure = import_extra("matplotlib.figure").Figure(figsize=(5, 6), layout="constrained")
    import_extra("matplotlib.backends.backend_agg").FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
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
    figure.savefig(path, dpi=120)
