"""Draw the pictures of README and the tutorials that show results on real data.

Each panel has the figures of one column of a table in `benchmarks/results`, with their standard
deviations.

    python docs/draw_results.py [NAME ...]
"""

import argparse
import json
import pathlib
import re
from typing import Literal, NamedTuple

import matplotlib.style
from matplotlib.axes import Axes
from matplotlib.figure import Figure

DOCS = pathlib.Path(__file__).parent
RESULTS = DOCS.parent / "benchmarks" / "results"
_MEAN = r"([\d,]*\.?\d+)(?: ± (\d*\.?\d+))?"
_SECONDS = r"[\d.]+: (\d*\.\d+)() s"  # of a cell "passes: seconds s"


class Panel(NamedTuple):
    """The figures of one panel.

    Attributes:
      title: The data.
      label: The quantity, with its unit.
      better: Which end of the axis is better.
      result: The name of the file.
      column: The column of the table.
      table: The number of the table.
      pattern: An expression with two groups, the mean and its deviation; rows that do not match are left
        out.
    """

    title: str
    label: str
    better: Literal["lower", "higher"]
    result: str
    column: str
    table: int = 0
    pattern: str = _MEAN

    def figures(self) -> dict[str, tuple[float, float]]:
        """Return the mean and the deviation of each row, by its first cell."""
        tables = json.loads((RESULTS / f"{self.result}.json").read_text(encoding="utf-8"))["tables"]
        at = tables[self.table]["columns"].index(self.column)
        found = {
            row[0].replace("`", ""): re.match(self.pattern, row[at])
            for row in tables[self.table]["rows"]
        }
        return {
            name: (float(cell[1].replace(",", "")), float(cell[2] or 0))
            for name, cell in found.items()
            if cell
        }

    def draw(self, axes: Axes) -> None:
        """Draw a point with an error bar for each row, the first row at the top."""
        found = self.figures()
        means, deviations = zip(*found.values(), strict=True)
        axes.set_title(self.title)
        label = f"{self.label} ({self.better} is better)"
        axes.errorbar(means, range(len(found)), xerr=deviations, fmt="o", capsize=3)
        axes.set_yticks(range(len(found)), [API_NAMES.get(name, name) for name in found])
        axes.set_xlabel(label)
        axes.locator_params(axis="x", nbins=5)
        axes.invert_yaxis()


# What a table calls a method by its parts, and the call that makes it.
API_NAMES = {
    "SGPerm": "sgperm",
    "LaPerm": "laperm",
    "SWAG, 8 draws": "swag, 8 draws",
    "IVON, at the mean": "ivon, at the mean",
    "IVON, 1 draw": "ivon, 1 draw",
    "IVON, 8 draws": "ivon, 8 draws",
    "Last layer, 8 draws": "sgld, last layer, 8 draws",
    "Constant SGD, 8 draws": "constant_sgd, 8 draws",
    "Adam, temperature": "Adam, fit_temperature",
    "svrg, batches of 16, rate 0.193, seed 0": "svrg",
    "svrg, Nesterov momentum 0.9, batches of 16, rate 0.193, seed 0": "svrg, momentum 0.9",
    "katyusha, batches of 16, rate 0.193, seed 0": "katyusha",
}

_ACCURACY = ("test accuracy", "higher")
_NLL = ("negative log-likelihood in nats", "lower")
_TO = ("processor seconds to 1e-3", "lower")
PICTURES = {
    "permuting": [
        Panel("MNIST", *_ACCURACY, "permutation_mnist", "test accuracy"),
        Panel("CIFAR-10", *_ACCURACY, "permutation_cifar10", "test accuracy"),
    ],
    "variance": [
        Panel("MNIST", "passes to 1e-3", "lower", "svrg_convex_60000_n", "to 0.001"),
        Panel("MNIST", *_TO, "svrg_convex_60000_n", "to 0.001", pattern=_SECONDS),
    ],
    "posterior": [
        Panel("MNIST", *_NLL, "uncertainty_mnist", "NLL"),
        Panel("CIFAR-10", *_NLL, "uncertainty_cifar10", "NLL"),
    ],
    "subspace": [
        Panel("MNIST", *_ACCURACY, "subspaces_mnist", "test accuracy"),
        Panel("CIFAR-10", *_ACCURACY, "subspaces_cifar10", "test accuracy"),
    ],
}


@matplotlib.style.context("optperm.pictures")
def draw(panels: list[Panel], out: pathlib.Path) -> None:
    """Draw panels below each other."""
    heights = [1.0 + 0.21 * len(panel.figures()) for panel in panels]
    figure = Figure(figsize=(4.6, sum(heights)))
    ratios = [len(panel.figures()) + 1 for panel in panels]
    every = figure.subplots(len(panels), squeeze=False, height_ratios=ratios)
    for panel, axes in zip(panels, every[:, 0], strict=True):
        panel.draw(axes)
    figure.savefig(out)


@matplotlib.style.context("optperm.pictures")
def draw_first_screen(out: pathlib.Path) -> None:
    """Draw the picture of README: bytes and loss of AdamW, and of AdamW in 8 bits."""
    names = {"AdamW": "optax.adamw", "AdamW, 8 bits": "quantize_state(optax.adamw)"}
    figure = Figure(figsize=(6.2, 1.5))
    columns = {
        "words per param": (4, "bytes of state per weight"),
        "nats": (1, "loss in nats per byte"),
    }
    every = figure.subplots(1, 2, sharey=True)
    for axes, (column, (factor, label)) in zip(every, columns.items(), strict=True):
        found = Panel("", "", "lower", "memory_text", column, 1).figures()
        heights = [factor * found[name][0] for name in names]
        bars = axes.barh(list(names.values()), heights, color=["0.5", "C0"], height=0.6)
        axes.bar_label(
            bars, [f"{height:.{1 if factor > 1 else 2}f}" for height in heights], padding=3
        )
        axes.set(xlabel=label, xlim=(0, 1.2 * max(heights)))
        axes.spines[["top", "right"]].set_visible(False)
    every[0].invert_yaxis()
    figure.savefig(out)


def main() -> None:
    """Draw the pictures that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = ["first_screen", *PICTURES]
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of {', '.join(names)}")
    for name in parser.parse_args().names or names:
        if name == "first_screen":
            draw_first_screen(DOCS / "first_screen.png")
        else:
            draw(PICTURES[name], DOCS / "tutorials" / f"{name}-results.png")


if __name__ == "__main__":
    main()
