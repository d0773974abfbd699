"""The command `train`: one network by one method, and a run folder."""

import importlib.metadata
import pathlib
import platform
import shutil
import time
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optperm
from optperm.cli import datasets, machines, models, report, run_folder
from optperm.cli.errors import INTERRUPTED, CliError, UsageError, import_extra
from optperm.cli.flags import Run
from optperm.cli.methods import Hyperparameter, Method
from optperm.cli.training import Record, Trained, Training, compiling


def train(
    method: Method,
    hyperparameters: Mapping[str, Hyperparameter],
    run: Run,
    where: machines.Machines,
) -> int:
    """Trains a network, and writes what came of it; returns the exit code."""
    compiling(time.perf_counter())
    # What is missing must come out before the training, not after it.
    keeps = run.checkpoint_every > 0 or run.resume is not None
    for extra in ("rich", "matplotlib", *(["orbax.checkpoint"] if keeps else [])):
        import_extra(extra)
    if run.from_epoch is not None and run.resume is None:
        raise UsageError("--from-epoch goes with --resume FOLDER: pass that as well.")
    if run.checkpoint_keep is not None and not keeps:
        raise UsageError("--checkpoint-keep goes with --checkpoint-every: pass that as well.")
    data = datasets.load(run.data)
    reporter = report.Reporter(run.epochs, quiet=run.quiet)
    where.connect(lambda: reporter.say("Waiting for the other processes."))
    is_main = jax.process_index() == 0
    reporter.quiet |= not is_main
    training = Training(method, hyperparameters, run, data, seed=run.seed, devices=where.devices)
    name = f"{method.name}-{run.model}-{data.name}-s{run.seed}"

    def prepare() -> tuple[str, int | None]:
        identity, step = _identity(training, run), None
        if run.resume is not None:
            lengths = run.epochs, training.steps_per_epoch
            step = run_folder.find_checkpoint(run.resume, run.from_epoch, *lengths, identity)
        made = run_folder.create(run.out, name)
        if keeps:
            run_folder.prepare_checkpoints(made, identity)
        if run.resume is not None:
            part = pathlib.Path(run_folder.CHECKPOINTS, str(step))
            shutil.copytree(run.resume / part, made / part)
        return str(made), step

    chosen, step = machines.decided(prepare)
    folder, records, options = pathlib.Path(chosen), list[Record](), dict[str, Any]()
    if keeps:
        options["checkpoints"] = folder / run_folder.CHECKPOINTS
        options["checkpoint_every"] = run.checkpoint_every * training.steps_per_epoch or None
        options["checkpoint_keep"] = run.checkpoint_keep
    if run.resume is not None:
        options["resume"] = step
        records = run_folder.read_metrics(run.resume, step)
        reporter.say(f"Going on after epoch {step // training.steps_per_epoch} of {run.resume}.")

    def on_record(record: Record) -> None:
        if is_main:
            run_folder.append_metrics(folder, record)
        reporter.epoch(record)

    options["progress"] = reporter.has_bar
    trained = training.run(run.epochs, on_record=on_record, records=records, **options)
    if is_main:
        summary = _summary(training, trained, run, where, step)
        summary |= _write(folder, name, training, trained)
        run_folder.write_json(folder / "summary.json", summary)
        reporter.summary(summary, folder)
    return _end(method, trained, folder, reporter, keeps=keeps)


def _end(
    method: Method,
    trained: Trained,
    folder: pathlib.Path,
    reporter: report.Reporter,
    *,
    keeps: bool,
) -> int:
    """What a run ends with."""
    loss = trained.history.steps.get("loss", np.zeros(0))
    if loss.size and not np.isfinite(loss[-1]):
        raise CliError(
            f"the loss stopped being finite at step {np.argmin(np.isfinite(loss)) + 1} of {len(loss)}: "
            f"try a smaller --learning-rate. What there is lies in {folder}."
        )
    if not trained.interrupted:
        return 0
    again = f"To go on, with the same flags: optperm train {method.name} --resume {folder}"
    reporter.say(f"Stopped. {again if keeps else 'To be able to go on: --checkpoint-every.'}")
    return INTERRUPTED


def _identity(training: Training, run: Run) -> dict[str, Any]:
    """What decides the course of a run, from its first step on."""
    flags = {"model": run.model, "hidden": run.hidden, "seed": run.seed, **training.hyperparameters}
    return {
        "the method": training.method.name,
        **{f"--{name.replace('_', '-')}": value for name, value in flags.items()},
        "the number of examples a step": training.batch_size,
        "the digest of the data": training.data.digest,
    }


def _write(folder: pathlib.Path, name: str, training: Training, trained: Trained) -> dict[str, Any]:
    """Writes the network, the steps, the draws and pictures; what the summary says of the draws."""
    method, params, steps = training.method, trained.params, trained.history.steps
    opt_state, last = trained.opt_state, trained.records[-1]
    kept = opt_state if method.permutes else None
    run_folder.write_network(folder, training.spec, training.initial, params, kept)
    columns: dict[str, Any] = {"loss": np.zeros(0, np.float32), **steps}
    columns.pop("accuracy", None)
    np.savez_compressed(folder / "steps.npz", **columns)
    report.draw_curve(folder / "curve.png", trained.records, steps.get("share_moved"), name)
    found = method.posterior(opt_state, last["step"], **training.hyperparameters)
    if found is None:
        return {}
    draws, share = found
    arrays: dict[str, Any] = {**optperm.samples_as_dict(draws)}
    np.savez(folder / "draws.npz", **arrays)
    alone = jax.tree.map(lambda leaf: jnp.asarray(leaf)[None, None], params)
    of_last, last_calibration = _predictive(training, alone)
    of_draws, calibration = _predictive(training, draws)
    calibrations = {"last_iterate": last_calibration, "posterior": calibration}
    report.draw_reliability(folder / "reliability.png", calibrations, name)
    of_draws |= {"draws": jax.tree.leaves(draws)[0].shape[1], "share_at_max_step": share}
    return {"last_iterate": of_last, "posterior": of_draws}


def _predictive(
    training: Training, draws: optax.Params
) -> tuple[dict[str, Any], optperm.Calibration]:
    """How good the probabilities are that all draws predict together, on the test examples."""
    x, labels = training.data.x_test, training.data.y_test

    def probabilities(params: optax.Params, x: jax.Array) -> jax.Array:
        return jax.nn.softmax(models.logits(training.model, params, x))

    parts = (
        jnp.asarray(x[first : first + models.CHUNK]) for first in range(0, len(x), models.CHUNK)
    )
    mean = jnp.concatenate(
        [optperm.posterior_predictive(probabilities, draws, part) for part in parts]
    )
    losses = optax.softmax_cross_entropy_with_integer_labels(jnp.log(mean), labels)
    calibration = optperm.calibration(mean, labels)
    found = {
        "accuracy": float(np.mean(np.argmax(np.asarray(mean), axis=-1) == labels)),
        "negative_log_likelihood": float(jnp.mean(losses)),
        "expected_calibration_error": float(calibration.expected_calibration_error),
    }
    return found, calibration


def _summary(
    training: Training, trained: Trained, run: Run, where: machines.Machines, first: int | None
) -> dict[str, Any]:
    last, method = trained.records[-1], training.method
    period = method.period and int(training.hyperparameters[method.period])
    moved = trained.history.steps.get("share_moved")
    return {
        "method": method.name,
        **{name: last[name] for name in ("test_accuracy", "train_accuracy", "train_loss")},
        # The mean over all steps.
        "share_moved": None if moved is None else float(np.mean(moved)),
        # Of all steps; compiling and testing come on top.
        "seconds": sum(record["seconds"] for record in trained.records),
        "compile_seconds": trained.compile_seconds,
        "interrupted": trained.interrupted,
        "resumed_from": None if run.resume is None else str(run.resume),
        "resumed_after_epoch": None if first is None else first // training.steps_per_epoch,
        "epochs_done": trained.epoch,
        "steps": last["step"],
        "phase": last["phase"],
        "gradient_evaluations": training.gradient_evaluations(last["step"]),
        # The trained network holds nothing of them.
        "steps_since_commit": last["step"] % period if period else None,
        # How good their predicted probabilities are, where the method draws from a posterior.
        "last_iterate": None,
        "posterior": None,
        "params": sum(leaf.size for leaf in jax.tree.leaves(trained.params)),
        "data": training.data.source,
        **{
            name: getattr(run, name) for name in ("model", "hidden", "seed", "epochs", "batch_size")
        },
        "hyperparameters": training.hyperparameters,
        "replicas": training.replicas,
        "devices": where.devices,
        "processes": jax.process_count(),
        "device": jax.devices()[0].device_kind,
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("optperm", "jax", "flax", "optax", "numpy")},
        },
    }


def version(package: str) -> str:
    """The installed version of a package."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"
