"""Several methods on the same network, data and epochs, from several seeds: what each of them buys."""

import argparse
import statistics
from typing import Any

import jax

from optperm.cli import compare_report, datasets, models, replicas, run_folder
from optperm.cli.assembly import Assembly
from optperm.cli.errors import INTERRUPTED, import_extra
from optperm.cli.methods import METHODS
from optperm.training.interrupt import Interrupt
from optperm.training.replicas import Replicas


def run(arguments: argparse.Namespace) -> int:
    """Trains by all methods from all seeds, and writes tables and curves.

    Args:
      arguments: The parsed flags of `compare`.

    Returns:
      0, or `INTERRUPTED` if Ctrl-C cut it short.

    Raises:
      CliError: If data, files or the installation are at fault, or the flags.
    """
    for extra in ("rich", "matplotlib"):
        import_extra(extra)
    data = datasets.load(arguments.data)
    methods = [METHODS[name] for name in dict.fromkeys(arguments.methods or METHODS)]
    seeds = range(arguments.seed, arguments.seed + arguments.seeds)
    planned = Replicas(arguments.devices)
    for method in methods:  # what is wrong must come out before the first training
        assembly = Assembly.of(method, method.defaults(), arguments, data, seed=arguments.seed)
        assembly.transformation(planned)
    name = f"compare-{arguments.model}-{data.name}-s{arguments.seed}"
    reporter = compare_report.Reporter(len(methods) * len(seeds), quiet=arguments.quiet)
    outcomes: list[compare_report.Outcome] = []
    with (
        replicas.start(planned, {}, on_wait=lambda: None, coordinator=None) as group,
        Interrupt() as interrupt,
    ):
        folder = run_folder.create(getattr(arguments, "out", None), name)
        with reporter:
            for method in methods:
                for seed in seeds:
                    if interrupt.requested:
                        break
                    reporter.training(method.name, seed)
                    assembly = Assembly.of(method, method.defaults(), arguments, data, seed=seed)
                    outcome = _outcome(assembly, arguments.epochs, group, interrupt)
                    if outcome is None:
                        break
                    run_folder.append_metrics(folder, _line(outcome))
                    outcomes.append(outcome)
                    reporter.outcome(outcome)
            is_cut = len(outcomes) < len(methods) * len(seeds)
            if is_cut:
                reporter.comparison_interrupted()
    about = (
        f"{data.name}, {arguments.model} with {arguments.hidden} hidden units, {arguments.epochs} "
        f"epochs, batches of {arguments.batch_size}, {arguments.devices} device(s), "
        f"{len(seeds)} seed(s), {jax.devices()[0].device_kind}"
    )
    compare_report.write(folder, outcomes, about)
    reporter.table(outcomes, folder)
    return INTERRUPTED if is_cut else 0


def _outcome(
    assembly: Assembly, epochs: int, group: Replicas, interrupt: Interrupt
) -> compare_report.Outcome | None:
    """Trains once; None if Ctrl-C came between."""
    tx = assembly.transformation(group)
    trainer = assembly.trainer(tx, models.initial_params(assembly.spec), group)
    run = trainer.run(
        epochs,
        trainer.initial,
        interrupt=interrupt,
        on_epoch=lambda record: None,
        on_start=lambda says: None,
        on_interrupt=lambda: None,
        keep_every=0,
        on_keep=lambda progress: None,
    )
    if run.interrupted:
        return None
    before, *trained = run.records
    steps = trained[0].step - before.step
    return compare_report.Outcome(
        method=assembly.method.name,
        seed=assembly.spec.seed,
        records=run.records,
        seconds_a_step=statistics.median(record.seconds for record in trained) / steps,
        state_bytes=sum(leaf.nbytes for leaf in jax.tree.leaves(run.opt_state)),
        gradient_evaluations=assembly.gradient_evaluations(run.records[-1], group),
    )


def _line(outcome: compare_report.Outcome) -> dict[str, Any]:
    return {
        "method": outcome.method,
        "seed": outcome.seed,
        "seconds_a_step": outcome.seconds_a_step,
        "state_bytes": outcome.state_bytes,
        "gradient_evaluations": outcome.gradient_evaluations,
        "test_accuracy": [record.test_accuracy for record in outcome.records],
        "train_loss": [record.train_loss for record in outcome.records],
    }
