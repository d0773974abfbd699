"""Compare all methods of the command with their defaults, on one network, data and budget.

The table has the accuracy and the cost of each method, as means over seeds. With `--picture` the script
draws the training loss over the epochs, and the final test accuracy of each seed.

    python benchmarks/compare.py [METHOD ...] [--epochs 20] [--seeds 3] [--data digits] [--json FILE]
"""

import argparse
import dataclasses
import itertools
import pathlib
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import results

from optperm.cli import datasets
from optperm.cli.flags import Run
from optperm.cli.methods import METHODS
from optperm.cli.report import picture
from optperm.cli.training import Training


def outcome(run: Training, epochs: int) -> dict[str, Any]:
    """Train, and return the figures of one run."""
    result: Any = run.run(epochs)
    if result.ended != "finished":
        raise SystemExit(128 + result.signal)
    seconds = [record["seconds"] for record in run.records[1:]]
    return {
        "seconds_a_step": statistics.median(seconds) / run.steps_per_epoch,
        "state_bytes": sum(leaf.nbytes for leaf in jax.tree.leaves(result.state.opt_state)),
        "gradients": run.gradient_evaluations(result.step),
        "losses": [record["train_loss"] for record in run.records[1:]],
        "accuracy": run.test(run.params),
    }


def cells(runs: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return a line of the table: the mean accuracy of the seeds with its deviation, and the costs."""
    ends = [run["accuracy"] for run in runs]
    spread = f" ± {statistics.stdev(ends):.4f}" if len(ends) > 1 else ""
    return {
        "test_accuracy": f"{statistics.mean(ends):.4f}{spread}",
        "ms_a_step": f"{1e3 * statistics.median(run['seconds_a_step'] for run in runs):.3f}",
        "optimizer_state": f"{runs[0]['state_bytes'] / 1024:,.1f} KiB",
        "gradients": f"{runs[0]['gradients']:,}",
    }


def draw(path: pathlib.Path, groups: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """Draw the training loss over the epochs, and beside it where the test accuracies end."""
    with picture(path, figsize=(6, 2.6 + 0.16 * len(groups))) as figure:
        left, right = figure.subplots(1, 2, width_ratios=(3, 2))
        for row, runs in enumerate(groups.values()):
            style = {"color": f"C{row % 7}", "marker": "os^D"[row // 7 % 4]}
            left.plot(np.mean([run["losses"] for run in runs], axis=0), **style)
            right.plot([run["accuracy"] for run in runs], [row] * len(runs), "", **style)
        left.set(xlabel="epoch", ylabel="training loss", yscale="log", title="mean of the seeds")
        right.set(xlabel="test accuracy", title="each seed")
        right.set_yticks(range(len(groups)), list(groups))


def main() -> None:
    """Train by all methods from all seeds; print, keep and draw what came of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("methods", nargs="*", help=f"of {', '.join(METHODS)}; all by default")
    flags = {"epochs": 20, "seeds": 3, "hidden": 256, "batch-size": 50}
    for name, default in flags.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--data", default="digits")
    parser.add_argument("--picture", type=pathlib.Path, help="a file for the picture")
    results.add_argument(parser)
    chosen = vars(parser.parse_args())
    names, seeds = chosen.pop("methods") or [*METHODS], range(chosen.pop("seeds"))
    path, json = chosen.pop("picture"), chosen.pop("json")
    run, data = Run(**chosen), datasets.load(chosen["data"])
    print(data.about)
    found, groups = results.Results(), dict[str, list[dict[str, Any]]]()
    for name, seed in itertools.product(names, seeds):
        method = METHODS[name]
        training = Training(method, method.defaults(), dataclasses.replace(run, seed=seed), data)
        groups.setdefault(name, []).append(outcome(training, run.epochs))
        if len(groups[name]) == len(seeds):
            row = {"method": name, **cells(groups[name])}
            found.row("All methods with their default hyperparameters", **row)
            print("  ".join(row.values()), flush=True)
    if path is not None:
        draw(path, groups)
    found.write(json)


if __name__ == "__main__":
    main()
