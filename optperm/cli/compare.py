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
_CURVES = ("step", "train_loss", "test_accuracy")
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
    seeds = range(flags.seed, flags.seed + flags.seeds)
    # All at once: what is wrong must come out before the first training.
    runs = [
        Training(METHODS[n], METHODS[n].defaults(), dataclasses.replace(flags, seed=seed), data)
        for n, seed in itertools.product(names or METHODS, seeds)
    ]
    title = f"compare-{flags.model.replace(':', '.')}-{data.name}-s{flags.seed}"
    folder, groups, ended = run_folder.create(flags.out, title), dict[str, list[Outcome]](), 0
    reporter.say(data.about)
    for run in runs:
        result: Any = run.run(flags.epochs, progress=reporter.has_bar)
        if result.ended == "interrupted":
            reporter.say("Stopped by Ctrl-C: the run that was under way is lost.")
            ended = INTERRUPTED
            break
        seconds = statistics.median(record["seconds"] for record in run.records[1:])
        curves = {key: [record[key] for record in run.records] for key in _CURVES}
        facts = {
            "seconds_a_step": seconds / run.steps_per_epoch,
            "state_bytes": sum(leaf.nbytes for leaf in jax.tree.leaves(result.state.opt_state)),
            "gradient_evaluations": run.gradient_evaluations(result.step),
            "final_accuracy": run.test(run.params),
        }
        name, seed = run.method.name, run.spec.seed
        groups.setdefault(name, []).append({"method": name, "seed": seed, **facts, **curves})
        run_folder.append_metrics(folder, groups[name][-1])
        reporter.say(f"{name}, seed {seed}: test {facts['final_accuracy']:.4f}")
    about = (
        f"{data.about}; {flags.model} with {flags.hidden} hidden units, {flags.epochs} epochs, "
        f"batches of {flags.batch_size}, {flags.devices} device(s), {len(seeds)} seed(s)"
    )
    rows = [_row(*group) for group in groups.items()]
    lines = [_COLUMNS, ("---", *["---:"] * (len(_COLUMNS) - 1)), *rows]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    (folder / "compare.md").write_text(f"{about}\n\n{table}\n", encoding="utf-8")
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
            left.plot(np.mean([each["train_loss"][1:] for each in group], axis=0), **style)
            right.plot([each["final_accuracy"] for each in group], [row] * len(group), "", **style)
        left.set(xlabel="epoch", ylabel="training loss", yscale="log", title="mean of the seeds")
        right.set(xlabel="test accuracy", yticks=range(len(groups)), title="each seed")
        right.set_yticklabels(groups)
