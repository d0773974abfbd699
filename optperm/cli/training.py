"""The command `train`: one network by one method through `optperm.training.fit`, and a run folder."""

import functools
import importlib.metadata
import pathlib
import platform
import shutil
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optperm
from optperm.cli import datasets, machines, models, report, run_folder
from optperm.cli.errors import INTERRUPTED, CliError, UsageError, import_extra
from optperm.cli.flags import Network, Run
from optperm.cli.methods import Hyperparameter, Method
from optperm.contract.states import find_states
from optperm.training import CheckpointError, Event, History, TrainState, fit
from optperm.training.history import diverged_at

# A line of metrics.jsonl.
Record = dict[str, Any]


class Trained(NamedTuple):
    """What training came to."""

    params: optax.Params  # the center's, where the method has one
    opt_state: Any  # of one replica
    records: list[Record]  # one for each epoch, epoch 0 and a part of one at the end included
    history: History
    epoch: int  # whole epochs done
    interrupted: bool
    compile_seconds: float


class Training:
    """A method with its hyperparameters, a network, data and devices.

    A step of R replicas with batches of B examples takes the examples of one step of a single replica
    with a batch of R B. What does not fit together is a UsageError.
    """

    def __init__(
        self,
        method: Method,
        hyperparameters: Mapping[str, Hyperparameter],
        flags: Network,
        data: datasets.Dataset,
        *,
        seed: int,
        devices: int,
    ) -> None:
        self.replicas = devices * jax.process_count()
        self.batch_size = flags.batch_size * self.replicas
        if self.batch_size > len(data.x_train):
            each = f" on each of {self.replicas} devices" if self.replicas > 1 else ""
            raise UsageError(
                f"--batch-size {flags.batch_size}{each} is more than the {len(data.x_train)} "
                "training examples. Choose a smaller one."
            )
        self.steps_per_epoch = len(data.x_train) // self.batch_size
        self.method, self.hyperparameters = method, dict(hyperparameters)
        self.data, self._devices = data, devices if self.replicas > 1 else None
        # What the method does before an epoch.
        begin: Any = method.epoch_start
        self._change: Any = begin and functools.partial(begin, **hyperparameters)
        shape = data.x_train.shape[1:]
        self.spec = models.NetworkSpec(flags.model, flags.hidden, shape, data.num_classes, seed)
        self.model = models.build(self.spec)
        facts = {"seed": seed, "num_data": len(data.x_train), "batch_size": self.batch_size}
        facts["axis_name"] = "replica" if self.replicas > 1 else None
        try:
            self._tx = method.transformation(hyperparameters, facts)
        except (ValueError, TypeError) as error:
            raise UsageError(f"{method.name}: {error}") from error

    @functools.cached_property
    def initial(self) -> optax.Params:
        """The initial params."""
        return models.initial_params(self.spec)

    def run(
        self,
        epochs: int,
        *,
        on_record: Callable[[Record], None] = lambda record: None,
        records: Sequence[Record] = (),
        **options: Any,
    ) -> Trained:
        """Trains by `fit`, up to so many epochs in all, with some further options of that.

        `on_record` is called with each record, the `records` of an earlier run to go on from included.
        """
        start = time.perf_counter()
        known = [*records] or [self._record(0, 0, self.initial, {})]
        for record in known:
            on_record(record)

        def on_epoch(event: Event) -> None:
            params = self._what_is_trained(event.state)
            known.append(self._record(event.epoch, event.step, params, event.metrics))
            on_record(known[-1])

        prior = float(self.hyperparameters.get("prior_precision", 0.0))
        try:
            result = fit(
                # Without an optimizer state fit makes one, where it is to lie.
                TrainState.create(
                    apply_fn=self.model.apply, params=self.initial, tx=self._tx, opt_state=None
                ),
                models.loss_function(self.model, prior, len(self.data.x_train)),
                {"x": self.data.x_train, "y": self.data.y_train},
                epochs=epochs,
                batch_size=self.batch_size,
                seed=self.spec.seed,
                has_aux=True,
                devices=self._devices,
                epoch_start=self._change,
                on_epoch_end=on_epoch,
                **options,
            )
        except (ValueError, TypeError, CheckpointError) as error:
            says = str(error).replace("resume=STEP", "--from-epoch")
            raise CliError(f"{self.method.name}: {says}") from error
        state: Any = result.state
        steps, history = result.step - known[-1]["step"], result.history
        params = self._what_is_trained(state)
        if steps > 0:  # of an epoch that Ctrl-C has cut short
            known.append(self._record(result.epoch, result.step, params, history.means(steps)))
        ended = result.epoch, result.ended == "interrupted", compiling(start)
        return Trained(params, state.opt_state, known, history, *ended)

    def gradient_evaluations(self, step: int) -> int:
        """How many gradients of the loss on one example it took to get to a step, full ones included."""
        gradients = self.method.gradients_a_step(**self.hyperparameters)
        started = range(1, -(-step // self.steps_per_epoch) + 1) if self._change else ()
        full = sum(self._change(epoch) is not None for epoch in started)
        return int(step * self.batch_size * gradients) + len(self.data.x_train) * full

    def _what_is_trained(self, state: Any) -> optax.Params:
        """What is tested and kept of a state, in the memory of this process."""
        params = state.params
        if self.method.period:
            params = optperm.center_params(state.opt_state)
        if self.method.permutes:
            params = optperm.permuted_params(*jax.device_get((state.opt_state, params)))
        return jax.device_get(params)

    def _tested(self, params: optax.Params) -> float:
        return models.accuracy(self.model, params, self.data.x_test, self.data.y_test)

    def _record(
        self, epoch: int, step: int, params: optax.Params, metrics: Mapping[str, float]
    ) -> Record:
        """What an epoch came to. Epoch 0 is the network before training.

        Loss, accuracy in training and share of weights moved are means over its steps, the test accuracy
        is that after it; seconds are those of its steps, without compiling and testing. None is for what
        there is not. Process 0 alone tests, by the program that `optperm evaluate` runs.
        """
        seconds = metrics.get("seconds", 0.0)
        # Asked before testing, which compiles as well.
        seconds -= compiling(time.perf_counter() - seconds)
        return {
            "epoch": epoch,
            "step": step,
            "train_loss": metrics.get("loss"),
            "train_accuracy": metrics.get("accuracy"),
            "test_accuracy": self._tested(params) if jax.process_index() == 0 else None,
            "share_moved": metrics.get("share_moved"),
            "seconds": seconds,
            "phase": self.method.phase(step, **self.hyperparameters),
        }


def train(
    method: Method,
    hyperparameters: Mapping[str, Hyperparameter],
    run: Run,
    where: machines.Machines,
) -> int:
    """Trains a network, and writes what came of it; returns the exit code."""
    compiling(time.perf_counter())
    # What is missing must come out before the training, not after it.
    for extra in ("rich", "matplotlib", *(["orbax.checkpoint"] if run.keeps else [])):
        import_extra(extra)
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
        if run.keeps:
            run_folder.prepare_checkpoints(made, identity)
        if run.resume is not None:
            part = pathlib.Path(run_folder.CHECKPOINTS, str(step))
            shutil.copytree(run.resume / part, made / part)
        return str(made), step

    chosen, step = machines.decided(prepare)
    folder, records, options = pathlib.Path(chosen), list[Record](), dict[str, Any]()
    if run.keeps:
        options["checkpoints"] = folder / run_folder.CHECKPOINTS
        options["checkpoint_every"] = run.checkpoint_every * training.steps_per_epoch or None
        options["checkpoint_keep"] = run.checkpoint_keep
    if run.resume is not None:
        options["resume"] = step
        records = run_folder.read_metrics(run.resume, step)
        reporter.say(_going_on(run, step // training.steps_per_epoch))

    def on_record(record: Record) -> None:
        if is_main:
            run_folder.append_metrics(folder, record)
        reporter.epoch(record)

    options["progress"] = reporter.has_bar
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The loss is")  # the error below says so
        trained = training.run(run.epochs, on_record=on_record, records=records, **options)
    if is_main:
        summary = _summary(training, trained, run, where, step)
        summary |= _write(folder, name, training, trained)
        run_folder.write_json(folder / "summary.json", summary)
    _refuse_diverged(trained.history, folder)
    if is_main:
        reporter.summary(summary, folder)
    if not trained.interrupted:
        return 0
    again = f"To go on, with the same flags: optperm train {method.name} --resume {folder}"
    reporter.say(f"Stopped. {again if run.keeps else 'To be able to go on: --checkpoint-every.'}")
    return INTERRUPTED


def _refuse_diverged(history: History, folder: pathlib.Path) -> None:
    """Raises a CliError if the loss is not finite at the end."""
    if (step := diverged_at(history)) is not None:
        raise CliError(
            f"the loss stopped being finite at step {step} of {history.num_steps}: try a smaller "
            f"--learning-rate. What there is lies in {folder}."
        )


def _going_on(run: Run, epoch: int) -> str:
    """What is said of a run that goes on after an epoch, which is --epochs at most."""
    if epoch == run.epochs:
        return f"Nothing to train: {run.resume} is at epoch {epoch}. To go on, raise --epochs."
    return f"Going on after epoch {epoch} of {run.resume}."


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
    params, steps, last = trained.params, trained.history.steps, trained.records[-1]
    opt_state = trained.opt_state
    kept = opt_state if training.method.permutes else None
    run_folder.write_network(folder, training.spec, training.initial, params, kept)
    columns: dict[str, Any] = {"loss": np.zeros(0, np.float32), **steps}
    columns.pop("accuracy", None)
    np.savez_compressed(folder / "steps.npz", **columns)
    report.draw_curve(folder / "curve.png", trained.records, steps.get("share_moved"), name)
    noise = find_states(opt_state, optperm.GradientNoiseState)
    if not noise:
        return {}
    every, burn_in = (int(training.hyperparameters[name]) for name in ("draw_every", "burn_in"))
    snapshots, count = optperm.trajectory(opt_state)
    # The snapshots that were taken after a step that sampled.
    valid = min(int(count), -(-last["step"] // every) - (burn_in // every + 1))
    if valid < 1:
        return {}
    draws = jax.tree.map(lambda rows: rows[int(count) - valid : int(count)][None], snapshots)
    arrays: dict[str, Any] = {**optperm.samples_as_dict(draws)}
    np.savez(folder / "draws.npz", **arrays)
    of_last, last_calibration = _predictive(training, jax.tree.map(lambda x: x[None, None], params))
    of_draws, calibration = _predictive(training, draws)
    calibrations = {"last_iterate": last_calibration, "posterior": calibration}
    report.draw_reliability(folder / "reliability.png", calibrations, name)
    share = noise[0].share_at_max_step()
    of_draws |= {"draws": valid, "share_at_max_step": None if share is None else float(share)}
    return {"last_iterate": of_last, "posterior": of_draws}


def _predictive(training: Training, draws: Any) -> tuple[dict[str, Any], optperm.Calibration]:
    """How good the probabilities are that all draws predict together, on the test examples."""
    x, labels = training.data.x_test, training.data.y_test

    def probabilities(params: optax.Params, x: jax.Array) -> jax.Array:
        return jax.nn.softmax(models.logits(training.model, params, x))

    parts = np.split(x, range(models.CHUNK, len(x), models.CHUNK))
    predict = optperm.posterior_predictive
    mean = jnp.concatenate([predict(probabilities, draws, jnp.asarray(part)) for part in parts])
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


@functools.cache
def _compilations() -> list[tuple[float, float]]:
    """When something was traced or compiled, from the first call on: start and end, in order."""
    known: list[tuple[float, float]] = []

    def listen(event: str, duration_secs: float, **_: str | int) -> None:
        start = time.perf_counter() - duration_secs
        if event.startswith("/jax/core/compile/"):
            while known and known[-1][0] >= start:
                known.pop()  # it was a part of this
            known.append((start, start + duration_secs))

    jax.monitoring.register_event_duration_secs_listener(listen)
    return known


def compiling(since: float) -> float:
    """Seconds from a moment on that went into compiling; the first call begins to measure."""
    return sum(max(0.0, end - max(start, since)) for start, end in _compilations())
