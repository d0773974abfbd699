"""Draw the pictures of the tutorials that show results on MNIST, CIFAR-10 and tinyshakespeare.

Each panel has the figures of one column of a table in `benchmarks/results`, with their standard
deviations.

    python docs/draw_results.py [NAME ...]
"""

import argparse
import json
import pathlib
import re
from typing import NamedTuple

import matplotlib.style
from matplotlib.axes import Axes
from matplotlib.figure import Figure

DOCS = pathlib.Path(__file__).parent
RESULTS = DOCS.parent / "benchmarks" / "results"
_MEAN = r"(\d*\.?\d+)(?: ± (\d*\.?\d+))?"
_SECONDS = r"[\d.]+: (\d*\.\d+)() s"  # of a cell "passes: seconds s"


class Panel(NamedTuple):
    """The figures of one panel.

    Attributes:
      title: What the panel shows.
      result: The name of the file.
      column: The column of the table.
      table: The number of the table.
      pattern: An expression with two groups, the mean and its deviation; rows that do not match are left
        out.
      over: The column of the other axis, or an empty text for the names of the rows.
    """

    title: str
    result: str
    column: str
    table: int = 0
    pattern: str = _MEAN
    over: str = ""

    def figures(self) -> dict[str, tuple[float, float]]:
        """Return the mean and the deviation of each row, by its first cell."""
        tables = json.loads((RESULTS / f"{self.result}.json").read_text(encoding="utf-8"))["tables"]
        at = tables[self.table]["columns"].index(self.column)
        found = {
            row[0].replace("`", ""): re.match(self.pattern, row[at])
            for row in tables[self.table]["rows"]
        }
        return {name: (float(cell[1]), float(cell[2] or 0)) for name, cell in found.items() if cell}

    def draw(self, axes: Axes) -> None:
        """Draw a point with an error bar for each row, the first row at the top."""
        found = self.figures()
        means, deviations = zip(*found.values(), strict=True)
        axes.set_title(self.title)
        if self.over:
            places = [mean for mean, _ in self._replace(column=self.over).figures().values()]
            axes.errorbar(places, means, deviations, fmt="o", capsize=3)
            for name, x, y in zip(found, places, means, strict=True):
                at = {"xytext": (6, 0), "textcoords": "offset points", "va": "center"}
                axes.annotate(name.replace("random, carried, residual", "low rank"), (x, y), **at)
            axes.set(xlabel=f"{self.over} (less is better)", xlim=(0, 1.2 * max(places)))
            return
        axes.errorbar(means, range(len(found)), xerr=deviations, fmt="o", capsize=3)
        axes.set_yticks(range(len(found)), found)
        axes.invert_yaxis()


PICTURES = {
    "permuting": [
        Panel("MNIST, test accuracy", "permutation_mnist", "test accuracy"),
        Panel("CIFAR-10, test accuracy", "permutation_cifar10", "test accuracy"),
    ],
    "variance": [
        Panel("MNIST, passes over the data to 1e-3", "svrg_convex_60000_n", "to 0.001"),
        Panel("MNIST, processor seconds", "svrg_convex_60000_n", "to 0.001", pattern=_SECONDS),
    ],
    "rare_commits": [
        Panel("tinyshakespeare, nats per byte", "byte_transformer_text", "nats a byte"),
    ],
    "sparsity": [
        Panel("MNIST, 98 % zeros, test accuracy", "sparse_mnist_tuned", "98%"),
    ],
    "low_rank": [
        Panel("Python's library, nats per byte", "low_rank_bytes", "nats", 1),
        Panel("tinyshakespeare, nats per byte", "low_rank_text", "nats", 1),
    ],
    "less_memory": [
        Panel("tinyshakespeare, nats per byte", "memory_text", "nats", 1, over="words a param"),
    ],
    "posterior": [
        Panel("MNIST, negative log-likelihood", "uncertainty_mnist", "NLL"),
        Panel("CIFAR-10, negative log-likelihood", "uncertainty_cifar10", "NLL"),
    ],
    "subspace": [
        Panel("MNIST, test accuracy", "subspaces_mnist", "test accuracy"),
        Panel("CIFAR-10, test accuracy", "subspaces_cifar10", "test accuracy"),
    ],
}


@matplotlib.style.context("optperm.pictures")
def draw(panels: list[Panel], out: pathlib.Path) -> None:
    """Draw panels below each other."""
    heights = [3.5 if panel.over else 0.9 + 0.22 * len(panel.figures()) for panel in panels]
    figure = Figure(figsize=(6, sum(heights)))
    ratios = [len(panel.figures()) + 1 for panel in panels]
    every = figure.subplots(len(panels), squeeze=False, height_ratios=ratios)
    for panel, axes in zip(panels, every[:, 0], strict=True):
        panel.draw(axes)
    figure.savefig(out)


def main() -> None:
    """Draw the pictures that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of {', '.join(PICTURES)}")
    for name in parser.parse_args().names or PICTURES:
        draw(PICTURES[name], DOCS / "tutorials" / f"{name}-results.png")


if __name__ == "__main__":
    main()
