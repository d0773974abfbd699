"""The commands: `train` and `sweep` make a run folder, `evaluate` tests the network of one."""

import argparse
import dataclasses
import functools
import importlib.metadata
import pathlib
import platform
import time
from typing import Any

import jax
import numpy as np
import optax

from optperm.cli import (
    checkpoints,
    datasets,
    models,
    replicas,
    report,
    run_folder,
    sweep_report,
    testset,
    training,
)
from optperm.cli import sweep as sweeps
from optperm.cli.assembly import Assembly
from optperm.cli.errors import INTERRUPTED, CliError, UsageError, import_extra
from optperm.cli.methods import Method, Posterior
from optperm.training.interrupt import Interrupt
from optperm.training.replicas import Replicas


def train(arguments: argparse.Namespace) -> int:
    """Trains a network, and writes what came of it.

    Args:
      arguments: The parsed flags of a method.

    Returns:
      0, or `INTERRUPTED` if Ctrl-C cut the training short.

    Raises:
      CliError: If data, files or the installation are at fault, or the flags.
    """
    # What is missing must come out before the training, not after it, and what is wrong in one
    # process before it meets the others.
    uses_checkpoints = arguments.checkpoint_every or "resume" in arguments
    for extra in ("rich", "matplotlib", *(["orbax.checkpoint"] if uses_checkpoints else [])):
        import_extra(extra)
    method: Method = arguments.method
    planned = _replicas(arguments)
    if "from_epoch" in arguments and "resume" not in arguments:
        raise UsageError("--from-epoch goes with --resume FOLDER: pass that as well.")
    data = datasets.load(arguments.data)
    chosen = _hyperparameters(arguments)
    assembly = Assembly.of(method, chosen, arguments, data, seed=arguments.seed)
    tx, spec = assembly.transformation(planned), assembly.spec
    name = f"{method.name}-{arguments.model}-{data.name}-s{arguments.seed}"
    is_quiet = arguments.quiet or planned.process_id > 0
    reporter = report.Reporter(arguments.epochs, quiet=is_quiet)
    identity = _identity(arguments, data, planned)
    with (
        replicas.start(
            planned,
            _shared_facts(arguments, identity),
            on_wait=reporter.waiting,
            coordinator=getattr(arguments, "coordinator", None),
        ) as group,
        Interrupt() as interrupt,
    ):
        checkpoint = replicas.on_main(group, _checkpoint, arguments, identity)
        initial = models.initial_params(spec)

        def on_epoch(record: training.EpochRecord) -> None:
            replicas.on_main(group, run_folder.append_metrics, folder, dataclasses.asdict(record))
            reporter.epoch(record)

        with reporter:
            trainer = assembly.trainer(tx, initial, group)
            progress = trainer.initial
            if "resume" in arguments:
                kept = replicas.on_main(group, checkpoints.read, checkpoint, trainer.initial)
                progress = checkpoints.share(group, kept, trainer.initial)
                reporter.resuming(arguments.resume, progress.epoch)
            folder = replicas.on_main(
                group, run_folder.create, getattr(arguments, "out", None), name
            )
            run = trainer.run(
                arguments.epochs,
                progress,
                interrupt=interrupt,
                on_epoch=on_epoch,
                on_start=reporter.starting,
                on_interrupt=reporter.interrupted,
                keep_every=arguments.checkpoint_every,
                on_keep=functools.partial(
                    replicas.on_main, group, checkpoints.write, folder, identity
                ),
            )
        summary = _summary(arguments, assembly, run, progress.epoch, group)
        posterior = method.posterior(
            run.opt_state, run.records[-1].step, **assembly.hyperparameters
        )

        def write(folder: pathlib.Path) -> None:
            if posterior is not None:
                summary.update(_write_posterior(folder, name, posterior, trainer.test, run.params))
            if method.permutes:
                run_folder.write_permutation(folder, spec, initial, run.params, run.opt_state)
            else:
                run_folder.write_params(folder, spec, run.params)
            run_folder.write_steps(folder, loss=run.loss, share_moved=run.share_moved)
            run_folder.write_summary(folder, summary)
            report.draw_curve(folder / "curve.png", run, name)
            reporter.summary(summary, folder)

        replicas.on_main(group, write, folder)
    return INTERRUPTED if run.interrupted else 0


def _replicas(arguments: argparse.Namespace) -> Replicas:
    names = ("coordinator", "num_processes", "process_id")
    missing = [name for name in names if name not in arguments]
    if len(missing) == len(names):
        return Replicas(arguments.devices)
    if missing:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in missing)
        raise UsageError(
            "--coordinator, --num-processes and --process-id go together: without them there is one "
            f"process. Pass {flags} as well."
        )
    if arguments.process_id >= arguments.num_processes:
        raise UsageError(
            f"--process-id must be from 0 to {arguments.num_processes - 1} where --num-processes is "
            f"{arguments.num_processes}, got {arguments.process_id}."
        )
    return Replicas(arguments.devices, arguments.num_processes, arguments.process_id)


def _hyperparameters(arguments: argparse.Namespace) -> dict[str, Any]:
    return {name: getattr(arguments, name) for name in arguments.method.flags}


def _checkpoint(arguments: argparse.Namespace, identity: dict[str, Any]) -> pathlib.Path | None:
    """The checkpoint to go on from, if any."""
    if "resume" not in arguments:
        return None
    epoch = getattr(arguments, "from_epoch", None)
    path = checkpoints.find(arguments.resume, epoch, identity)
    if int(path.name) > arguments.epochs:
        raise UsageError(
            f"--epochs {arguments.epochs}: the checkpoint is after epoch {path.name} already, and "
            "--epochs counts from the start of the first run. Pass more, or an earlier --from-epoch."
        )
    return path


def _flags(arguments: argparse.Namespace, *names: str) -> dict[str, Any]:
    return {f"--{name.replace('_', '-')}": getattr(arguments, name, None) for name in names}


def _identity(
    arguments: argparse.Namespace, data: datasets.Dataset, planned: Replicas
) -> dict[str, Any]:
    """What decides the course of a run, from its first step on."""
    flags = ("model", "hidden", "seed", "batch_size", *arguments.method.flags)
    return {
        "the method": arguments.method.name,
        **_flags(arguments, *flags),
        "the digest of the data": datasets.digest(data),
        "the number of replicas": planned.size,
    }


def _shared_facts(arguments: argparse.Namespace, identity: dict[str, Any]) -> dict[str, Any]:
    """What all processes of a run must have in common."""
    return {
        **identity,
        **_flags(arguments, "epochs", "devices", "checkpoint_every", "from_epoch"),
        "whether to --resume": "resume" in arguments,
        **{f"the version of {name}": version(name) for name in ("optperm", "jax")},
    }


def _write_posterior(
    folder: pathlib.Path,
    name: str,
    posterior: Posterior,
    test: testset.TestSet,
    params: optax.Params,
) -> dict[str, Any]:
    """Writes the draws and their reliability; what the summary says of them and of the last params."""
    found = {
        "last_iterate": test.predictive(jax.tree.map(lambda leaf: leaf[None, None], params)),
        "posterior": test.predictive(posterior.draws),
    }
    run_folder.write_draws(folder, posterior.draws)
    calibrations = {whose: each.calibration for whose, each in found.items()}
    report.draw_reliability(folder / "reliability.png", calibrations, name)
    entries = {whose: _predictive(each) for whose, each in found.items()}
    entries["posterior"] |= {
        "draws": jax.tree.leaves(posterior.draws)[0].shape[1],
        "share_at_max_step": posterior.share_at_max_step,
    }
    return entries


def _predictive(found: testset.Predictive) -> dict[str, Any]:
    return {
        "accuracy": found.accuracy,
        "negative_log_likelihood": found.negative_log_likelihood,
        "expected_calibration_error": float(found.calibration.expected_calibration_error),
    }


def _summary(
    arguments: argparse.Namespace,
    assembly: Assembly,
    run: training.TrainingRun,
    first_epoch: int,
    group: Replicas,
) -> dict[str, Any]:
    last = run.records[-1]
    period, hyperparameters = assembly.method.period, assembly.hyperparameters
    return {
        "method": assembly.method.name,
        "test_accuracy": last.test_accuracy,
        "train_accuracy": last.train_accuracy,
        "train_loss": last.train_loss,
        # The mean over all steps.
        "share_moved": None if run.share_moved is None else float(np.mean(run.share_moved)),
        # Of all steps; compiling and testing come on top.
        "seconds": sum(record.seconds for record in run.records),
        "compile_seconds": run.compile_seconds,
        "interrupted": run.interrupted,
        "resumed_from": str(arguments.resume) if "resume" in arguments else None,
        "resumed_after_epoch": first_epoch if "resume" in arguments else None,
        "epochs_done": last.epoch,
        "steps": last.step,
        "phase": last.phase,
        "gradient_evaluations": assembly.gradient_evaluations(last, group),
        # The trained network holds nothing of them.
        "steps_since_commit": None if period is None else last.step % int(hyperparameters[period]),
        # How good their predicted probabilities are, where the method draws from a posterior.
        "last_iterate": None,
        "posterior": None,
        "params": sum(leaf.size for leaf in jax.tree.leaves(run.params)),
        "data": assembly.data.source,
        "model": arguments.model,
        "hidden": arguments.hidden,
        "seed": arguments.seed,
        "epochs": arguments.epochs,
        "batch_size": arguments.batch_size,
        "hyperparameters": dict(hyperparameters),
        "replicas": group.size,
        "devices": group.devices,
        "processes": group.num_processes,
        "device": group.device_kind,
        "versions": _versions(),
    }


def _versions() -> dict[str, str]:
    names = ("optperm", "jax", "flax", "optax", "numpy")
    return {"python": platform.python_version(), **{name: version(name) for name in names}}


def evaluate(arguments: argparse.Namespace) -> int:
    """Rebuilds the network of a run folder, and prints its test accuracy.

    Args:
      arguments: `folder`, and `data` where it is not to be the run's.

    Returns:
      0.

    Raises:
      CliError: If the network cannot be rebuilt, or its accuracy is not the one in summary.json.
    """
    spec, params = run_folder.rebuild(arguments.folder)
    summary = run_folder.read_summary(arguments.folder)
    data = datasets.load(getattr(arguments, "data", summary["data"]))
    if data.x_test.shape[1:] != spec.input_shape:
        raise CliError(
            f"{data.source} holds examples of shape {list(data.x_test.shape[1:])}, but the network "
            f"was trained on shape {list(spec.input_shape)}."
        )
    accuracy = testset.TestSet(models.build(spec), params, data).accuracy(params)
    if "data" not in arguments and accuracy != summary["test_accuracy"]:
        raise CliError(
            f"the test accuracy is {accuracy}, but summary.json says {summary['test_accuracy']}: "
            "the data have changed, or the run was on another kind of device."
        )
    print(f"test accuracy {accuracy:.4f}")
    return 0


def sweep(arguments: argparse.Namespace) -> int:
    """Prunes or freezes networks at every fraction, and writes how well they train on.

    Args:
      arguments: The parsed flags of `sweep`.

    Returns:
      0, or `INTERRUPTED` if Ctrl-C cut it short.

    Raises:
      CliError: If data, files or the installation are at fault, or the flags.
    """
    for extra in ("rich", "matplotlib"):
        import_extra(extra)
    plan = sweeps.plan(arguments)
    data = datasets.load(arguments.data)
    networks = sweeps.Networks(plan, data)
    legacy = "-legacy" if plan.setting.legacy else ""
    name = f"{arguments.action}-{data.name}-s{plan.seed}{legacy}"
    folder = run_folder.create(getattr(arguments, "out", None), name)
    reporter = sweep_report.Reporter(plan, quiet=arguments.quiet)
    repeats: list[sweeps.Repeat] = []
    start = time.perf_counter()
    with Interrupt() as interrupt, reporter:
        for repeat in networks.run(interrupt=interrupt, on_call=reporter.call):
            for record in sweeps.records(plan, len(repeats), repeat):
                run_folder.append_metrics(folder, record)
            repeats.append(repeat)
            reporter.repeat(len(repeats), repeat)
        seconds = time.perf_counter() - start
        interrupted = len(repeats) < plan.repeats
        if interrupted:
            reporter.sweep_interrupted()
        summary = {
            "sweep": arguments.action,
            "data": data.source,
            "params": networks.num_params,
            **dataclasses.asdict(plan) | {"curves": [curve.name for curve in plan.curves]},
            "seconds": seconds,  # compiling included
            "interrupted": interrupted,
            "repeats_done": len(repeats),
            "device": jax.devices()[0].device_kind,
            "versions": _versions(),
        }
        run_folder.write_summary(folder, summary)
        if repeats:
            sweep_report.write_csv(folder / sweep_report.CSV_FILE, plan, repeats)
            sweep_report.draw(folder / sweep_report.PNG_FILE, plan, repeats, name)
    reporter.table(plan, repeats, folder)
    return INTERRUPTED if interrupted else 0


def version(package: str) -> str:
    """The installed version of a package."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"
