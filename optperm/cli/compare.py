"""Several methods on the same network, data and epochs, from several seeds: what each of them buys."""

import csv
import dataclasses
import itertools
import pathlib
import statistics
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from optperm.cli import datasets, report, run_folder
from optperm.cli.errors import INTERRUPTED, UsageError, import_extra
from optperm.cli.flags import Network, Whole
from optperm.cli.machines import Machines
from optperm.cli.methods import METHODS, Method
from optperm.cli.training import Training
from optperm.training.history import picture

_CURVES = ("step", "train_loss", "test_accuracy")
_COLUMNS = ("method", "test accuracy", "ms a step", "optimizer state", "gradients")
# What one method came to from one seed, as a line of metrics.jsonl.
Outcome = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison(Network):
    """How often to train.

    Attributes:
      epochs: Passes through the data.
      seeds: From how many seeds each.
      devices: Devices to train on.
    """

    epochs: Whole = 20
    seeds: Whole = 3
    devices: Whole = 1


def compare(names: Sequence[str], flags: Comparison) -> int:
    """Trains by all methods from all seeds, and writes tables and curves; returns the exit code."""
    if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
        raise UsageError(f"{', '.join(twice)} is named more than once: name each method once.")
    for extra in ("rich", "matplotlib"):
        import_extra(extra)
    data, reporter = datasets.load(flags.data), report.Reporter(0, quiet=flags.quiet)
    Machines(devices=flags.devices).connect(lambda: None)
    methods = [METHODS[name] for name in names or METHODS]

    def training(method: Method, seed: int) -> Training:
        of_seed = dataclasses.replace(flags, seed=seed)
        return Training(method, method.defaults(), of_seed, data, flags.devices)

    for method in methods:
        training(method, flags.seed)  # what is wrong must come out before the first training
    name = f"compare-{flags.model}-{data.name}-s{flags.seed}"
    folder, groups, ended = run_folder.create(flags.out, name), dict[str, list[Outcome]](), 0
    seeds = range(flags.seed, flags.seed + flags.seeds)
    for method, seed in itertools.product(methods, seeds):
        outcome = _outcome(training(method, seed), flags.epochs, has_bar=reporter.has_bar)
        if outcome is None:
            reporter.say("Stopped by Ctrl-C: the run that was under way is lost.")
            ended = INTERRUPTED
            break
        run_folder.append_metrics(folder, outcome)
        groups.setdefault(method.name, []).append(outcome)
        reporter.say(f"{method.name}, seed {seed}: test {outcome['test_accuracy'][-1]:.4f}")
    about = (
        f"{data.name}, {flags.model} with {flags.hidden} hidden units, {flags.epochs} "
        f"epochs, batches of {flags.batch_size}, {flags.devices} device(s), "
        f"{len(seeds)} seed(s), {jax.devices()[0].device_kind}"
    )
    rows = [_row(*group) for group in groups.items()]
    lines = [_COLUMNS, ("---", *["---:"] * (len(_COLUMNS) - 1)), *rows]
    table = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    (folder / "compare.md").write_text(f"{about}\n\n{table}", encoding="utf-8")
    _write_csv(folder / "compare.csv", groups)
    if groups:
        _draw(folder / "compare.png", groups, about)
    reporter.table([_COLUMNS, *rows])
    reporter.files(folder)
    return ended


def _outcome(training: Training, epochs: int, *, has_bar: bool) -> Outcome | None:
    """Trains once; None if Ctrl-C came between."""
    result: Any = training.run(epochs, progress=has_bar)
    if result.ended == "interrupted":
        return None
    records = training.records
    seconds = [record["seconds"] for record in records[1:]]
    return {
        "method": training.method.name,
        "seed": training.spec.seed,
        # The median over the epochs, compiling and testing apart.
        "seconds_a_step": statistics.median(seconds) / training.steps_per_epoch,
        "state_bytes": sum(leaf.nbytes for leaf in jax.tree.leaves(result.state.opt_state)),
        "gradient_evaluations": training.gradient_evaluations(result.step),
        **{name: [record[name] for record in records] for name in _CURVES},
    }


def _row(method: str, outcomes: Sequence[Outcome]) -> tuple[str, ...]:
    """A line of the table: means over the seeds, for the accuracy with the standard deviation."""
    accuracies = [outcome["test_accuracy"][-1] for outcome in outcomes]
    spread = f" ± {statistics.stdev(accuracies):.4f}" if len(accuracies) > 1 else ""
    return (
        method,
        f"{statistics.mean(accuracies):.4f}{spread}",
        f"{1e3 * statistics.median(outcome['seconds_a_step'] for outcome in outcomes):.3f}",
        f"{outcomes[0]['state_bytes'] / 1024:,.1f} KiB",
        f"{outcomes[0]['gradient_evaluations']:,}",
    )


def _write_csv(path: pathlib.Path, groups: Mapping[str, Sequence[Outcome]]) -> None:
    """Writes every epoch of every run."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["method", "seed", "epoch", *_CURVES])
        for outcome in itertools.chain(*groups.values()):
            curves = enumerate(zip(*(outcome[name] for name in _CURVES), strict=True))
            run = outcome["method"], outcome["seed"]
            writer.writerows((*run, epoch, *values) for epoch, values in curves)


def _draw(path: pathlib.Path, groups: Mapping[str, Sequence[Outcome]], about: str) -> None:
    """Draws the training loss over the epochs, and beside it where the test accuracies end."""
    ends = {
        name: [outcome["test_accuracy"][-1] for outcome in group] for name, group in groups.items()
    }
    names = sorted(ends, key=lambda name: statistics.mean(ends[name]))
    with picture(path, figsize=(6, 2.6 + 0.16 * len(names))) as figure:
        figure.suptitle("\n".join(textwrap.wrap(about, 76)))
        left, right = figure.subplots(1, 2, width_ratios=(3, 2))
        for row, name in enumerate(names):
            # Seven colors come around again, with another marker.
            style = {"color": f"C{row % 7}", "marker": "os^D"[row // 7 % 4]}
            losses = np.mean([outcome["train_loss"][1:] for outcome in groups[name]], axis=0)
            left.plot(np.arange(len(losses)) + 1, losses, markevery=(row % 4, 4), **style)
            right.plot(ends[name], [row] * len(ends[name]), linestyle="", alpha=0.6, **style)
            right.plot(np.mean(ends[name]), row, "|", color=style["color"], markersize=16)
        left.set(xlabel="epoch", ylabel="training loss", yscale="log")
        left.set_title("mean of the seeds")
        right.set(xlabel="test accuracy at the end", yticks=range(len(names)))
        right.set_yticklabels(names)
        right.set_title("each seed, | their mean")
        for row, label in enumerate(right.get_yticklabels()):
            label.set_color(f"C{row % 7}")
