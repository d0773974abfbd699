"""Several methods on the same network, data and epochs, from several seeds: what each of them buys."""

import dataclasses
import itertools
import pathlib
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from optperm.cli import run_folder
from optperm.cli.errors import UsageError
from optperm.cli.flags import Network, Whole
from optperm.cli.methods import METHODS
from optperm.cli.report import picture
from optperm.cli.training import Training, begin

_COLUMNS = ("method", "test accuracy", "ms a step", "optimizer state", "gradients")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison(Network):
    """How often to train.

    Attributes:
      epochs: Passes through the data.
      seeds: From how many seeds each.
    """

    epochs: Whole = 20
    seeds: Whole = 3


def compare(names: Sequence[str], flags: Comparison) -> int:
    """Train by all methods from all seeds, and write a table and curves; return the exit code."""
    if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
        raise UsageError(f"{', '.join(twice)} is named more than once: name each method once.")
    data, reporter = begin(flags)
    methods = [METHODS[name] for name in names or METHODS]
    seeds = [dataclasses.replace(flags, seed=flags.seed + i) for i in range(flags.seeds)]
    # All at once: what is wrong must come out before the first training.
    runs = [Training(m, m.defaults(), each, data) for m, each in itertools.product(methods, seeds)]
    folder = run_folder.create(flags.out, f"compare-{flags.model}-{data.name}-s{flags.seed}")
    groups, ended = dict[str, list[dict[str, Any]]](), 0
    reporter.say(data.about)
    for run in runs:
        result: Any = run.run(flags.epochs, progress=reporter.has_bar)
        if result.ended == "interrupted":
            reporter.say("Stopped: the run that was under way is lost.")
            ended = 128 + result.signal
            break
        seconds = [record["seconds"] for record in run.records[1:]]
        outcome = {
            "method": run.method.name,
            "seed": run.spec.seed,
            "seconds_a_step": statistics.median(seconds) / run.steps_per_epoch,
            "state_bytes": sum(leaf.nbytes for leaf in jax.tree.leaves(result.state.opt_state)),
            "gradient_evaluations": run.gradient_evaluations(result.step),
            "final_accuracy": run.test(run.params),
            **{k: [r[k] for r in run.records] for k in ("step", "train_loss", "test_accuracy")},
        }
        run_folder.append_metrics(folder, outcome)
        groups.setdefault(run.method.name, []).append(outcome)
        reporter.say("{method}, seed {seed}: test {final_accuracy:.4f}".format(**outcome))
    about = f"{data.about}; {flags.model} with {flags.hidden} hidden units, {flags.epochs} epochs, "
    about += f"batches of {flags.batch_size}, {flags.devices} device(s), {flags.seeds} seed(s)"
    rows = [_COLUMNS, *(_row(*group) for group in groups.values())]
    lines = [rows[0], ("---", *["---:"] * (len(_COLUMNS) - 1)), *rows[1:]]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    (folder / "compare.md").write_text(f"{about}\n\n{table}\n", encoding="utf-8")
    _draw(folder / "compare.png", groups)
    reporter.table(rows)
    reporter.files(folder)
    return ended


def _row(*outcomes: dict[str, Any]) -> tuple[str, ...]:
    """A line of the table: means over the seeds, for the accuracy with the standard deviation."""
    ends = [each["final_accuracy"] for each in outcomes]
    spread = f" ± {statistics.stdev(ends):.4f}" if len(ends) > 1 else ""
    time = 1e3 * statistics.median(each["seconds_a_step"] for each in outcomes)
    size, gradients = outcomes[0]["state_bytes"] / 1024, outcomes[0]["gradient_evaluations"]
    cells = f"{statistics.mean(ends):.4f}{spread}", f"{time:.3f}", f"{size:,.1f} KiB"
    return outcomes[0]["method"], *cells, f"{gradients:,}"


def _draw(path: pathlib.Path, groups: Mapping[str, Sequence[dict[str, Any]]]) -> None:
    """Draw the training loss over the epochs, and beside it where the test accuracies end."""
    with picture(path, figsize=(6, 2.6 + 0.16 * len(groups))) as figure:
        left, right = figure.subplots(1, 2, width_ratios=(3, 2))
        for row, group in enumerate(groups.values()):
            style = {"color": f"C{row % 7}", "marker": "os^D"[row // 7 % 4]}
            left.plot(np.mean([each["train_loss"][1:] for each in group], axis=0), **style)
            right.plot([each["final_accuracy"] for each in group], [row] * len(group), "", **style)
        left.set(xlabel="epoch", ylabel="training loss", yscale="log", title="mean of the seeds")
        right.set(xlabel="test accuracy", title="each seed")
        right.set_yticks(range(len(groups)), list(groups))
