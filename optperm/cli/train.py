"""The command `train`: one network by one method, and a run folder."""

import importlib.metadata
import pathlib
import platform
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optperm
from optperm.cli import datasets, machines, models, report, run_folder
from optperm.cli.errors import INTERRUPTED, CliError, UsageError, import_extra
from optperm.cli.flags import Run, flag
from optperm.cli.methods import Hyperparameter, Method, Posterior
from optperm.cli.training import Record, Trained, Training, compiling


def train(
    method: Method,
    hyperparameters: Mapping[str, Hyperparameter],
    run: Run,
    where: machines.Machines,
) -> int:
    """Trains a network, and writes what came of it.

    Returns:
      0, or `INTERRUPTED` if Ctrl-C cut the training short.

    Raises:
      CliError: If data, files or the installation are at fault, the flags, or the loss is not finite.
    """
    compiling(0, 0)  # from here on it is measured
    # What is missing must come out before the training, not after it.
    uses_checkpoints = run.checkpoint_every > 0 or run.resume is not None
    extras = ["matplotlib", *(["rich", "orbax.checkpoint"] if uses_checkpoints else ["rich"])]
    for extra in extras:
        import_extra(extra)
    if run.from_epoch is not None and run.resume is None:
        raise UsageError("--from-epoch goes with --resume FOLDER: pass that as well.")
    if run.checkpoint_keep is not None and not uses_checkpoints:
        raise UsageError("--checkpoint-keep goes with --checkpoint-every: pass that as well.")
    data = datasets.load(run.data)
    reporter = report.Reporter(run.epochs, quiet=run.quiet)
    where.connect(lambda: reporter.say("Waiting for the other processes."))
    is_main = jax.process_index() == 0
    if not is_main:
        reporter = report.Reporter(run.epochs, quiet=True)
    training = Training(method, hyperparameters, run, data, seed=run.seed, devices=where.devices)
    name = f"{method.name}-{run.model}-{data.name}-s{run.seed}"
    identity = _identity(training, run)

    def prepare() -> tuple[str, int | None]:
        step = None if run.resume is None else _checkpoint(training, run, identity)
        made = run_folder.create(run.out, name)
        if uses_checkpoints:
            run_folder.write_identity(made, identity)
        if step is not None and run.resume is not None:
            run_folder.copy_checkpoint(run.resume, made, step)
        return str(made.absolute() if jax.process_count() > 1 else made), step

    chosen, step = machines.decided(prepare)
    folder, records, options = pathlib.Path(chosen), list[Record](), dict[str, Any]()
    if uses_checkpoints:
        options = {
            "checkpoints": folder / run_folder.CHECKPOINTS,
            "checkpoint_every": run.checkpoint_every * training.steps_per_epoch or None,
            "checkpoint_keep": run.checkpoint_keep,
            "resume": False if step is None else step,
        }
    if run.resume is not None and step is not None:
        epoch = step // training.steps_per_epoch
        records = run_folder.read_metrics(run.resume, epoch)
        reporter.say(f"Going on after epoch {epoch} of {run.resume}.")

    def on_record(record: Record) -> None:
        if is_main:
            run_folder.append_metrics(folder, record)
        reporter.epoch(record)

    trained = training.run(
        run.epochs, on_record=on_record, records=records, progress=reporter.has_bar, **options
    )
    if is_main:
        summary = _summary(training, trained, run, where)
        summary |= {
            "resumed_from": None if run.resume is None else str(run.resume),
            "resumed_after_epoch": None if step is None else step // training.steps_per_epoch,
        }
        posterior = method.posterior(trained.opt_state, summary["steps"], **hyperparameters)
        if posterior is not None:
            summary |= _write_posterior(folder, name, posterior, training, trained.params)
        _write(folder, name, training, trained)
        run_folder.write_summary(folder, summary)
        reporter.summary(summary, folder)
    return _end(trained, run, folder, reporter, goes_on=uses_checkpoints, method=method)


def _end(
    trained: Trained,
    run: Run,
    folder: pathlib.Path,
    reporter: report.Reporter,
    *,
    goes_on: bool,
    method: Method,
) -> int:
    """What a run that is over ends with."""
    is_finite = np.isfinite(trained.history.steps.get("loss", np.zeros(0)))
    if is_finite.size and not is_finite[-1]:
        raise CliError(
            f"the loss stopped being finite at step {np.argmin(is_finite) + 1} of {len(is_finite)}: try "
            f"a smaller --learning-rate. What there is lies in {folder}."
        )
    if trained.ended != "interrupted":
        return 0
    reporter.say(
        f"Stopped. To go on: optperm train {method.name} --resume {folder}, with the same flags."
        if goes_on
        else "Stopped, and it cannot go on: for that, train with --checkpoint-every."
    )
    return INTERRUPTED


def _identity(training: Training, run: Run) -> dict[str, Any]:
    """What decides the course of a run, from its first step on, beside what fit compares."""
    flags = {flag(name): getattr(run, name) for name in ("model", "hidden", "seed")}
    flags |= {flag(name): value for name, value in training.hyperparameters.items()}
    return {
        "the method": training.method.name,
        **flags,
        "the number of examples a step": training.batch_size,
        "the data": training.data.digest,
    }


def _checkpoint(training: Training, run: Run, identity: Mapping[str, Any]) -> int:
    """The step of the checkpoint to go on from."""
    assert run.resume is not None
    per_epoch = training.steps_per_epoch
    step = run_folder.find_checkpoint(run.resume, run.from_epoch, per_epoch, identity)
    if step > run.epochs * per_epoch:
        raise UsageError(
            f"--epochs {run.epochs}: the checkpoint is after epoch {step // per_epoch} already, and "
            "--epochs counts from the start of the first run. Pass more, or an earlier --from-epoch."
        )
    return step


def _write(folder: pathlib.Path, name: str, training: Training, trained: Trained) -> None:
    """Writes the trained network, the steps and the curve."""
    spec, params, steps = training.spec, trained.params, trained.history.steps
    if training.method.permutes:
        run_folder.write_permutation(folder, spec, training.initial, params, trained.opt_state)
    else:
        run_folder.write_params(folder, spec, params)
    loss, moved = steps.get("loss", np.zeros(0, np.float32)), steps.get("share_moved")
    run_folder.write_steps(folder, loss=loss, share_moved=moved)
    report.draw_curve(folder / "curve.png", trained.records, moved, name)


def _write_posterior(
    folder: pathlib.Path, name: str, posterior: Posterior, training: Training, params: optax.Params
) -> dict[str, Any]:
    """Writes the draws and their reliability; what the summary says of them and of the last params."""
    last = jax.tree.map(lambda leaf: jnp.asarray(leaf)[None, None], params)
    entries, calibrations = {}, {}
    for whose, draws in (("last_iterate", last), ("posterior", posterior.draws)):
        entries[whose], calibrations[whose] = _predictive(training, draws)
    run_folder.write_draws(folder, posterior.draws)
    report.draw_reliability(folder / "reliability.png", calibrations, name)
    entries["posterior"] |= {
        "draws": jax.tree.leaves(posterior.draws)[0].shape[1],
        "share_at_max_step": posterior.share_at_max_step,
    }
    return entries


def _predictive(
    training: Training, draws: optax.Params
) -> tuple[dict[str, Any], optperm.Calibration]:
    """How good the probabilities are that all draws predict together, on the test examples."""
    x, labels = training.data.x_test, training.data.y_test

    def probabilities(params: optax.Params, x: jax.Array) -> jax.Array:
        return jax.nn.softmax(models.logits(training.model, params, x))

    chunks = (x[first : first + models.CHUNK] for first in range(0, len(x), models.CHUNK))
    mean = jnp.concatenate(
        [optperm.posterior_predictive(probabilities, draws, jnp.asarray(part)) for part in chunks]
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
    training: Training, trained: Trained, run: Run, where: machines.Machines
) -> dict[str, Any]:
    last, method, moved = (
        trained.records[-1],
        training.method,
        trained.history.steps.get("share_moved"),
    )
    period = None if method.period is None else int(training.hyperparameters[method.period])
    return {
        "method": method.name,
        "test_accuracy": last["test_accuracy"],
        "train_accuracy": last["train_accuracy"],
        "train_loss": last["train_loss"],
        # The mean over all steps.
        "share_moved": None if moved is None else float(np.mean(moved)),
        # Of all steps; compiling and testing come on top.
        "seconds": sum(record["seconds"] for record in trained.records),
        "compile_seconds": trained.compile_seconds,
        "interrupted": trained.ended == "interrupted",
        "epochs_done": trained.epoch,
        "steps": last["step"],
        "phase": last["phase"],
        "gradient_evaluations": training.gradient_evaluations(last["step"]),
        # The trained network holds nothing of them.
        "steps_since_commit": None if period is None else last["step"] % period,
        # How good their predicted probabilities are, where the method draws from a posterior.
        "last_iterate": None,
        "posterior": None,
        "params": sum(leaf.size for leaf in jax.tree.leaves(trained.params)),
        "data": training.data.source,
        "model": run.model,
        "hidden": run.hidden,
        "seed": run.seed,
        "epochs": run.epochs,
        "batch_size": run.batch_size,
        "hyperparameters": training.hyperparameters,
        "replicas": training.replicas,
        "devices": where.devices,
        "processes": jax.process_count(),
        "device": jax.devices()[0].device_kind,
        "versions": _versions(),
    }


def _versions() -> dict[str, str]:
    names = ("optperm", "jax", "flax", "optax", "numpy")
    return {"python": platform.python_version(), **{name: version(name) for name in names}}


def version(package: str) -> str:
    """The installed version of a package."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"
