"""What a comparison shows and leaves behind: progress, and a table and curves of all methods."""

import csv
import dataclasses
import itertools
import pathlib
import statistics
from collections.abc import Sequence

import numpy as np

from optperm.cli import report
from optperm.cli.errors import import_extra
from optperm.cli.training import EpochRecord

CSV_FILE, MARKDOWN_FILE, PNG_FILE = "compare.csv", "compare.md", "compare.png"
_COLUMNS = ("method", "test accuracy", "ms a step", "optimizer state", "gradients")


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What one method came to from one seed.

    Attributes:
      method: Its name.
      seed: The seed.
      records: One for each epoch, epoch 0 included.
      seconds_a_step: The median over the epochs, compiling and testing apart.
      state_bytes: What the optimizer state takes, of one replica.
      gradient_evaluations: Gradients of the loss on one example.
    """

    method: str
    seed: int
    records: list[EpochRecord]
    seconds_a_step: float
    state_bytes: int
    gradient_evaluations: int

    @property
    def test_accuracy(self) -> float:
        """After the last epoch."""
        return self.records[-1].test_accuracy


class Reporter(report.Reporter):
    """Prints the progress of a comparison: a live bar on a terminal, else a line a run.

    Args:
      runs: Runs planned.
      quiet: Print nothing at all.
    """

    def __init__(self, runs: int, *, quiet: bool) -> None:
        super().__init__(runs, quiet=quiet)

    def training(self, method: str, seed: int) -> None:
        """Shows what is trained now."""
        self._progress.update(self._task, description=f"{method}, seed {seed}")

    def outcome(self, outcome: Outcome) -> None:
        """Shows what a run came to."""
        self._progress.update(self._task, advance=1)
        if not self._is_live:
            self._say(f"{outcome.method}, seed {outcome.seed}: test {outcome.test_accuracy:.4f}")

    def comparison_interrupted(self) -> None:
        """Says what Ctrl-C has done."""
        self._say("Stopped by Ctrl-C: the run that was under way is lost.")

    def table(self, outcomes: Sequence[Outcome], folder: pathlib.Path) -> None:
        """Prints the table, and where the files are."""
        table = import_extra("rich.table").Table(box=None, padding=(0, 2, 0, 0))
        for column in _COLUMNS:
            table.add_column(column, justify="left" if column == "method" else "right")
        for row in rows(outcomes):
            table.add_row(*row)
        self._console.print(table)
        self._say(f"Files in {folder}: {', '.join(sorted(path.name for path in folder.iterdir()))}")


def by_method(outcomes: Sequence[Outcome]) -> dict[str, list[Outcome]]:
    """The outcomes of each method, in the order in which they came."""
    groups = itertools.groupby(outcomes, key=lambda outcome: outcome.method)
    return {method: list(group) for method, group in groups}


def rows(outcomes: Sequence[Outcome]) -> list[tuple[str, ...]]:
    """The lines of the table: means over the seeds, for the accuracy with the standard deviation."""
    return [
        (
            method,
            _mean_and_deviation([outcome.test_accuracy for outcome in group]),
            f"{1e3 * statistics.median(outcome.seconds_a_step for outcome in group):.3f}",
            _size(group[0].state_bytes),
            f"{group[0].gradient_evaluations:,}",
        )
        for method, group in by_method(outcomes).items()
    ]


def write(folder: pathlib.Path, outcomes: Sequence[Outcome], about: str) -> None:
    """Writes the table as Markdown, every epoch of every run as CSV, and the curves."""
    lines = [_COLUMNS, ("---", *["---:"] * (len(_COLUMNS) - 1)), *rows(outcomes)]
    table = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    (folder / MARKDOWN_FILE).write_text(f"{about}\n\n{table}", encoding="utf-8")
    with (folder / CSV_FILE).open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["method", "seed", "epoch", "step", "train_loss", "test_accuracy"])
        for outcome in outcomes:
            for record in outcome.records:
                loss = "" if record.train_loss is None else f"{record.train_loss:.6g}"
                accuracy = f"{record.test_accuracy:.6g}"
                writer.writerow(
                    [outcome.method, outcome.seed, record.epoch, record.step, loss, accuracy]
                )
    if outcomes:
        _draw(folder / PNG_FILE, outcomes, about)


def _draw(path: pathlib.Path, outcomes: Sequence[Outcome], about: str) -> None:
    """Draws mean training loss and test accuracy over the epochs, from the least to the greatest."""
    figure = import_extra("matplotlib.figure").Figure(figsize=(11, 4.8), layout="constrained")
    import_extra("matplotlib.backends.backend_agg").FigureCanvasAgg(figure)
    figure.suptitle(about, fontsize="small")
    left, right = figure.subplots(1, 2)
    # Ten colors come around again: from then on lines are dashed.
    for index, (method, group) in enumerate(by_method(outcomes).items()):
        style = {"color": f"C{index % 10}", "linestyle": "-" if index < 10 else "--"}
        epochs = np.array([record.epoch for record in group[0].records])
        losses = np.array([[record.train_loss for record in o.records[1:]] for o in group], float)
        accuracies = np.array([[record.test_accuracy for record in o.records] for o in group])
        for axes, x, values in ((left, epochs[1:], losses), (right, epochs, accuracies)):
            axes.plot(x, values.mean(axis=0), label=method, **style)
            low, high = values.min(axis=0), values.max(axis=0)
            axes.fill_between(x, low, high, color=style["color"], alpha=0.12, linewidth=0)
    left.set(xlabel="epoch", ylabel="training loss", yscale="log")
    right.set(xlabel="epoch", ylabel="test accuracy", ylim=(0.85, 1.0))
    right.legend(loc="lower right", ncols=2, fontsize="small")
    figure.savefig(path, dpi=120)


def _mean_and_deviation(values: Sequence[float]) -> str:
    mean = f"{statistics.mean(values):.4f}"
    return mean if len(values) < 2 else f"{mean} ± {statistics.stdev(values):.4f}"


def _size(count: int) -> str:
    return f"{count / 1024:,.1f} KiB"
