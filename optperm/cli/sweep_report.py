"""What a sweep shows and leaves behind: progress, a table, accuracy.csv and accuracy.png."""

import csv
import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from optperm.cli import report, sweep
from optperm.cli.errors import import_extra

CSV_FILE, PNG_FILE = "accuracy.csv", "accuracy.png"
EXAMPLES = ("train", "test")
_SHOWN = (0.0, 0.4, 0.6, 0.8, 0.9, 0.96, 1.0)  # fractions, in the table


class Reporter(report.Reporter):
    """Prints the progress of a sweep: a live bar on a terminal, else a line a repeat.

    Args:
      plan: What is computed.
      quiet: Print nothing at all.
    """

    def __init__(self, plan: sweep.Plan, *, quiet: bool) -> None:
        super().__init__(plan.calls, quiet=quiet)
        self._plan = plan

    def call(self, repeat: int) -> None:
        """Shows that all networks of a repeat have taken some more steps."""
        networks = len(self._plan.curves) * self._plan.grid
        line = f"repeat {repeat + 1}/{self._plan.repeats}, {networks} networks"
        self._progress.update(self._task, advance=1, description=line)

    def repeat(self, number: int, repeat: sweep.Repeat) -> None:
        """Shows that a repeat is done."""
        if not self._is_live:
            self._say(
                f"repeat {number}/{self._plan.repeats} test {repeat.test[0, 0]:.4f} with all params, "
                f"{repeat.start[1]:.4f} before them"
            )

    def sweep_interrupted(self) -> None:
        """Says what Ctrl-C has done."""
        self._say("Stopped by Ctrl-C: the repeat that was under way is lost.")

    def table(self, plan: sweep.Plan, repeats: list[sweep.Repeat], folder: pathlib.Path) -> None:
        """Prints mean test accuracies, and where the files are."""
        if repeats:
            table = import_extra("rich.table").Table(box=None, padding=(0, 1, 0, 0))
            table.add_column("test accuracy at p =", no_wrap=True)
            shown = sorted({int(np.abs(plan.fractions - p).argmin()) for p in _SHOWN})
            for index in shown:
                table.add_column(f"{plan.fractions[index]:.3g}", justify="right")
            for curve, means in zip(plan.curves, mean([r.test for r in repeats]), strict=True):
                table.add_row(curve.name, *(f"{means[index]:.3f}" for index in shown))
            self._console.print(table)
        self._say(f"Files in {folder}: {', '.join(sorted(path.name for path in folder.iterdir()))}")


def mean(values: list[np.ndarray]) -> np.ndarray:
    """The mean over repeats, (curves, grid)."""
    return np.mean(values, axis=0)


def deviation(values: list[np.ndarray]) -> np.ndarray:
    """The standard deviation over repeats, (curves, grid); NaN of a single one."""
    if len(values) < 2:
        return np.full_like(values[0], np.nan)
    return np.std(values, axis=0, ddof=1)


def write_csv(path: pathlib.Path, plan: sweep.Plan, repeats: list[sweep.Repeat]) -> None:
    """Writes a row for each curve, fraction and set of examples."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        seeds = [f"seed_{plan.seed + number}" for number in range(len(repeats))]
        writer.writerow(
            ["action", "criterion", "fraction", "masked", "examples", "mean", "sd", *seeds]
        )
        writer.writerows(_rows(plan, repeats))


def _rows(plan: sweep.Plan, repeats: list[sweep.Repeat]) -> Iterator[list[Any]]:
    accuracies = {name: [getattr(repeat, name) for repeat in repeats] for name in EXAMPLES}
    for c, curve in enumerate(plan.curves):
        for f, fraction in enumerate(plan.fractions):
            for name, values in accuracies.items():
                yield [
                    *curve,
                    f"{fraction:.6g}",
                    repeats[0].masked[c, f],
                    name,
                    *(f"{x:.6g}" for x in (mean(values)[c, f], deviation(values)[c, f])),
                    *(f"{of_repeat[c, f]:.6g}" for of_repeat in values),
                ]


def draw(path: pathlib.Path, plan: sweep.Plan, repeats: list[sweep.Repeat], title: str) -> None:
    """Draws mean accuracies over p, one standard deviation to each side, train and test apart."""
    figure = import_extra("matplotlib.figure").Figure(figsize=(11, 4.5), layout="constrained")
    import_extra("matplotlib.backends.backend_agg").FigureCanvasAgg(figure)
    figure.suptitle(title)
    for axes, name in zip(figure.subplots(1, 2, sharey=True), EXAMPLES, strict=True):
        values = [getattr(repeat, name) for repeat in repeats]
        for curve, middle, spread in zip(plan.curves, mean(values), deviation(values), strict=True):
            (line,) = axes.plot(plan.fractions, middle, label=curve.name.replace("_", " "))
            axes.fill_between(
                plan.fractions,
                middle - spread,
                middle + spread,
                color=line.get_color(),
                alpha=0.2,
                linewidth=0,
            )
        axes.set(xlabel="fraction p pruned or frozen", title=f"{name} accuracy", ylim=(0, 1.02))
        axes.grid(alpha=0.3)
    axes.legend(loc="lower left")
    figure.savefig(path, dpi=120)
