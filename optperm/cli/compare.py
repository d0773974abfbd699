"""Several methods on the same network, data and epochs, from several seeds: what each of them buys."""

import csv
import dataclasses
import pathlib
import statistics
import textwrap
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from optperm.cli import datasets, report, run_folder
from optperm.cli.errors import INTERRUPTED, import_extra
from optperm.cli.flags import Network, Switch, Whole
from optperm.cli.machines import Machines
from optperm.cli.methods import METHODS
from optperm.cli.training import Training, compiling

CSV_FILE, MARKDOWN_FILE, PNG_FILE = "compare.csv", "compare.md", "compare.png"
_COLUMNS = ("method", "test accuracy", "ms a step", "optimizer state", "gradients")
# What one method came to from one seed, as a line of metrics.jsonl.
Outcome = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison(Network):
    """How often and how long to train.

    Attributes:
      seeds: From how many seeds each.
      epochs: Passes through the data.
      devices: Devices to train on.
      out: Folder for the results, which must be new or empty. Without it runs/compare-...
      quiet: Print nothing but errors.
    """

    seeds: Whole = 3
    epochs: Whole = 20
    devices: Whole = 1
    out: str | None = None
    quiet: Switch = False


def compare(names: Sequence[str], flags: Comparison) -> int:
    """Trains by all methods from all seeds, and writes tables and curves; returns the exit code."""
    compiling(time.perf_counter())
    for extra in ("rich", "matplotlib"):
        import_extra(extra)
    data, reporter = datasets.load(flags.data), report.Reporter(0, quiet=flags.quiet)
    Machines(devices=flags.devices).connect(lambda: None)
    methods = [METHODS[name] for name in dict.fromkeys(names or METHODS)]
    seeds = range(flags.seed, flags.seed + flags.seeds)

    def training(index: int) -> Training:
        method, seed = methods[index // len(seeds)], seeds[index % len(seeds)]
        return Training(method, method.defaults(), flags, data, seed=seed, devices=flags.devices)

    runs = len(methods) * len(seeds)
    for index in range(0, runs, len(seeds)):
        training(index)  # what is wrong must come out before the first training
    name = f"compare-{flags.model}-{data.name}-s{flags.seed}"
    folder, outcomes = run_folder.create(flags.out, name), list[Outcome]()
    for index in range(runs):
        outcome = _outcome(training(index), flags.epochs, has_bar=reporter.has_bar)
        if outcome is None:
            reporter.say("Stopped by Ctrl-C: the run that was under way is lost.")
            break
        run_folder.append_metrics(folder, outcome)
        outcomes.append(outcome)
        last = outcome["test_accuracy"][-1]
        reporter.say(f"{outcome['method']}, seed {outcome['seed']}: test {last:.4f}")
    about = (
        f"{data.name}, {flags.model} with {flags.hidden} hidden units, {flags.epochs} "
        f"epochs, batches of {flags.batch_size}, {flags.devices} device(s), "
        f"{len(seeds)} seed(s), {jax.devices()[0].device_kind}"
    )
    _write(folder, outcomes, about)
    reporter.table([_COLUMNS, *_rows(outcomes)])
    reporter.files(folder)
    return INTERRUPTED if len(outcomes) < runs else 0


def _outcome(training: Training, epochs: int, *, has_bar: bool) -> Outcome | None:
    """Trains once; None if Ctrl-C came between."""
    trained = training.run(epochs, progress=has_bar)
    if trained.interrupted:
        return None
    records = trained.records
    seconds = [record["seconds"] for record in records[1:]]
    return {
        "method": training.method.name,
        "seed": training.spec.seed,
        # The median over the epochs, compiling and testing apart.
        "seconds_a_step": statistics.median(seconds) / training.steps_per_epoch,
        "state_bytes": sum(leaf.nbytes for leaf in jax.tree.leaves(trained.opt_state)),
        "gradient_evaluations": training.gradient_evaluations(records[-1]["step"]),
        **{
            column: [record[column] for record in records]
            for column in ("step", "test_accuracy", "train_loss")
        },
    }


def _by_method(outcomes: Sequence[Outcome]) -> dict[str, list[Outcome]]:
    groups: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        groups.setdefault(outcome["method"], []).append(outcome)
    return groups


def _rows(outcomes: Sequence[Outcome]) -> list[tuple[str, ...]]:
    """The lines of the table: means over the seeds, for the accuracy with the standard deviation."""
    return [
        (
            method,
            _mean_and_deviation([outcome["test_accuracy"][-1] for outcome in group]),
            f"{1e3 * statistics.median(outcome['seconds_a_step'] for outcome in group):.3f}",
            f"{group[0]['state_bytes'] / 1024:,.1f} KiB",
            f"{group[0]['gradient_evaluations']:,}",
        )
        for method, group in _by_method(outcomes).items()
    ]


def _mean_and_deviation(values: Sequence[float]) -> str:
    mean = f"{statistics.mean(values):.4f}"
    return mean if len(values) < 2 else f"{mean} ± {statistics.stdev(values):.4f}"


def _write(folder: pathlib.Path, outcomes: Sequence[Outcome], about: str) -> None:
    """Writes the table as Markdown, every epoch of every run as CSV, and the curves."""
    lines = [_COLUMNS, ("---", *["---:"] * (len(_COLUMNS) - 1)), *_rows(outcomes)]
    table = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    (folder / MARKDOWN_FILE).write_text(f"{about}\n\n{table}", encoding="utf-8")
    with (folder / CSV_FILE).open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["method", "seed", "epoch", "step", "train_loss", "test_accuracy"])
        for outcome in outcomes:
            columns = (outcome[name] for name in ("step", "train_loss", "test_accuracy"))
            for epoch, (step, loss, accuracy) in enumerate(zip(*columns, strict=True)):
                shown = "" if loss is None else f"{loss:.6g}", f"{accuracy:.6g}"
                writer.writerow([outcome["method"], outcome["seed"], epoch, step, *shown])
    if outcomes:
        _draw(folder / PNG_FILE, outcomes, about)


def _draw(path: pathlib.Path, outcomes: Sequence[Outcome], about: str) -> None:
    """Draws the training loss over the epochs, and beside it where the test accuracies end."""
    groups = sorted(_by_method(outcomes).items(), key=lambda item: _last_accuracy(item[1]))
    with report.picture(path, figsize=(6, 2.6 + 0.16 * len(groups))) as figure:
        figure.suptitle("\n".join(textwrap.wrap(about, 76)))
        left, right = figure.subplots(1, 2, width_ratios=(3, 2))
        for row, (_, group) in enumerate(groups):
            # Seven colors come around again, with another marker.
            style = {"color": f"C{row % 7}", "marker": "os^D"[row // 7 % 4]}
            losses = np.mean([outcome["train_loss"][1:] for outcome in group], axis=0)
            left.plot(np.arange(len(losses)) + 1, losses, markevery=(row % 4, 4), **style)
            last = [outcome["test_accuracy"][-1] for outcome in group]
            right.plot(last, [row] * len(last), linestyle="", alpha=0.6, **style)
            right.plot(np.mean(last), row, "|", color=style["color"], markersize=16)
        left.set(xlabel="epoch", ylabel="training loss", yscale="log")
        left.set_title("mean of the seeds")
        right.set(xlabel="test accuracy at the end", yticks=range(len(groups)))
        right.set_yticklabels([name for name, _ in groups])
        right.set_title("each seed, | their mean")
        for row, label in enumerate(right.get_yticklabels()):
            label.set_color(f"C{row % 7}")


def _last_accuracy(group: Sequence[Outcome]) -> float:
    return statistics.mean(outcome["test_accuracy"][-1] for outcome in group)
