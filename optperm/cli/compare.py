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
from optperm.cli.errors import INTERRUPTED, UsageError
from optperm.cli.flags import Network, Whole
from optperm.cli.methods import METHODS
from optperm.cli.training import Training, begin
from optperm.training.history import picture

_COLUMNS = ("method", "test accuracy", "ms a step", "optimizer state", "gradients")
# What one method came to from one seed, as a line of metrics.jsonl.
Outcome = dict[str, Any]


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
    methods, seeds = names or tuple(METHODS), range(flags.seed, flags.seed + flags.seeds)

    def training(name: str, seed: int) -> Training:
        method, of_seed = METHODS[name], dataclasses.replace(flags, seed=seed)
        return Training(method, method.defaults(), of_seed, data)

    for name in methods:
        training(name, flags.seed)  # what is wrong must come out before the first training
    title = f"compare-{flags.model.replace(':', '.')}-{data.name}-s{flags.seed}"
    folder, groups, ended = run_folder.create(flags.out, title), dict[str, list[Outcome]](), 0
    reporter.say(data.about)
    for name, seed in itertools.product(methods, seeds):
        run = training(name, seed)
        result: Any = run.run(flags.epochs, progress=reporter.has_bar)
        if result.ended == "interrupted":
            reporter.say("Stopped by Ctrl-C: the run that was under way is lost.")
            ended = INTERRUPTED
            break
        seconds = [record["seconds"] for record in run.records[1:]]
        outcome = {
            "method": name,
            "seed": seed,
            "seconds_a_step": statistics.median(seconds) / run.steps_per_epoch,
            "state_bytes": sum(leaf.nbytes for leaf in jax.tree.leaves(result.state.opt_state)),
            "gradient_evaluations": run.gradient_evaluations(result.step),
            "final_accuracy": run.test(run.params),
            **{k: [record[k] for record in run.records] for k in ("step", "train_loss")},
            "test_accuracy": [record["test_accuracy"] for record in run.records],
        }
        run_folder.append_metrics(folder, outcome)
        groups.setdefault(name, []).append(outcome)
        reporter.say(f"{name}, seed {seed}: test {outcome['final_accuracy']:.4f}")
    about = (
        f"{data.name}, {flags.model} with {flags.hidden} hidden units, {flags.epochs} "
        f"epochs, batches of {flags.batch_size}, {flags.devices} device(s), "
        f"{len(seeds)} seed(s), {jax.devices()[0].device_kind}"
    )
    rows = [_row(*group) for group in groups.items()]
    lines = [_COLUMNS, ("---", *["---:"] * (len(_COLUMNS) - 1)), *rows]
    table = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    (folder / "compare.md").write_text(f"{about}\n\n{table}", encoding="utf-8")
    if groups:
        _draw(folder / "compare.png", groups)
    reporter.table([_COLUMNS, *rows])
    reporter.files(folder)
    return ended


def _row(method: str, outcomes: Sequence[Outcome]) -> tuple[str, ...]:
    """A line of the table: means over the seeds, for the accuracy with the standard deviation."""
    accuracies = [outcome["final_accuracy"] for outcome in outcomes]
    spread = f" ± {statistics.stdev(accuracies):.4f}" if len(accuracies) > 1 else ""
    return (
        method,
        f"{statistics.mean(accuracies):.4f}{spread}",
        f"{1e3 * statistics.median(outcome['seconds_a_step'] for outcome in outcomes):.3f}",
        f"{outcomes[0]['state_bytes'] / 1024:,.1f} KiB",
        f"{outcomes[0]['gradient_evaluations']:,}",
    )


def _draw(path: pathlib.Path, groups: Mapping[str, Sequence[Outcome]]) -> None:
    """Draw the training loss over the epochs, and beside it where the test accuracies end."""
    with picture(path, figsize=(6, 2.6 + 0.16 * len(groups))) as figure:
        left, right = figure.subplots(1, 2, width_ratios=(3, 2))
        for row, group in enumerate(groups.values()):
            style = {"color": f"C{row % 7}", "marker": "os^D"[row // 7 % 4]}
            losses = np.mean([outcome["train_loss"][1:] for outcome in group], axis=0)
            left.plot(np.arange(len(losses)) + 1, losses, markevery=(row % 4, 4), **style)
            ends = [outcome["final_accuracy"] for outcome in group]
            right.plot(ends, [row] * len(ends), linestyle="", alpha=0.6, **style)
            right.plot(np.mean(ends), row, "|", color=style["color"], markersize=16)
        left.set(xlabel="epoch", ylabel="training loss", yscale="log", title="mean of the seeds")
        right.set(
            xlabel="test accuracy", yticks=range(len(groups)), title="each seed, | their mean"
        )
        right.set_yticklabels(groups)
