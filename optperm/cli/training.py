"""The command `train`: one network by one method through `optperm.training.fit`, and a run folder."""

import functools
import importlib.metadata
import pathlib
import platform
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

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
from optperm.distributed.local_steps import LocalStepsState
from optperm.permutation.export import PERMUTED_STATES
from optperm.training import CheckpointError, Event, FitResult, TrainState, fit
from optperm.training.history import diverged_at

# A line of metrics.jsonl.
Record = dict[str, Any]
# When something was traced or compiled since this was imported: start and end, in order.
_COMPILED: list[tuple[float, float]] = []


class Training:
    """A method with its hyperparameters, a network, data and devices.

    A step of R replicas with batches of B examples takes the examples of one step of a single replica
    with a batch of R B. What does not fit together is a UsageError.

    Attributes:
      records: What each epoch came to, epoch 0 and a part of one at the end included.
      params: The trained params: those of the center, where the method has one.
    """

    def __init__(
        self,
        method: Method,
        hyperparameters: Mapping[str, Hyperparameter],
        flags: Network,
        data: datasets.Dataset,
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
        begin: Any = method.epoch_start
        self._change: Any = begin and functools.partial(begin, **hyperparameters)
        of_data = data.x_train.shape[1:], data.num_classes
        self.spec = models.NetworkSpec(flags.model, flags.hidden, *of_data, flags.seed)
        self.model = models.build(self.spec)
        facts = {"seed": flags.seed, "num_data": len(data.x_train), "batch_size": self.batch_size}
        facts["axis_name"] = "replica" if self.replicas > 1 else None
        try:
            self._tx = method.transformation(hyperparameters, facts)
        except (ValueError, TypeError) as error:
            raise UsageError(f"{method.name}: {error}") from error
        self.initial = models.initial_params(self.spec)

    def run(
        self,
        epochs: int,
        *,
        on_record: Callable[[Record], None] = lambda record: None,
        records: Sequence[Record] = (),
        **options: Any,
    ) -> FitResult:
        """Trains by `fit`, up to so many epochs in all, with some further options of that.

        `on_record` is called with each record, the `records` of an earlier run to go on from included.
        """
        self.records = [*records] or [self._record(0, 0, self.initial, {})]
        for record in self.records:
            on_record(record)

        def on_epoch(event: Event) -> None:
            params = self._what_is_trained(event.state)
            self.records.append(self._record(event.epoch, event.step, params, event.metrics))
            on_record(self.records[-1])

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
        self.params = self._what_is_trained(result.state)
        steps = result.step - self.records[-1]["step"]
        if steps > 0:  # of an epoch that Ctrl-C has cut short
            means = result.history.means(steps)
            self.records.append(self._record(result.epoch, result.step, self.params, means))
        return result

    def gradient_evaluations(self, step: int) -> int:
        """How many gradients of the loss on one example it took to get to a step, full ones included."""
        gradients = self.method.gradients_a_step(**self.hyperparameters)
        started = range(1, -(-step // self.steps_per_epoch) + 1) if self._change else ()
        full = sum(self._change(epoch) is not None for epoch in started)
        return int(step * self.batch_size * gradients) + len(self.data.x_train) * full

    def _what_is_trained(self, state: Any) -> optax.Params:
        """What is tested and kept of a state, in the memory of this process."""
        params = state.params
        if find_states(state.opt_state, LocalStepsState):
            params = optperm.center_params(state.opt_state)
        if find_states(state.opt_state, PERMUTED_STATES):
            params = optperm.permuted_params(*jax.device_get((state.opt_state, params)))
        return jax.device_get(params)

    def _record(
        self, epoch: int, step: int, params: optax.Params, metrics: Mapping[str, float]
    ) -> Record:
        """What an epoch came to; epoch 0 is the network before training. None is for what there is not.

        Seconds are those of its steps, without compiling and testing. Process 0 alone tests, by the
        program that `optperm evaluate` runs.
        """
        tested, seconds = None, metrics.get("seconds", 0.0)
        # Asked before testing, which compiles as well.
        seconds -= compiling(time.perf_counter() - seconds)
        if jax.process_index() == 0:
            tested = models.accuracy(self.model, params, self.data.x_test, self.data.y_test)
        return {
            "epoch": epoch,
            "step": step,
            "train_loss": metrics.get("loss"),
            "train_accuracy": metrics.get("accuracy"),
            "test_accuracy": tested,
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
    start = time.perf_counter()
    # What is missing must come out before the training, not after it.
    for extra in ("rich", "matplotlib", *(["orbax.checkpoint"] if run.keeps else [])):
        import_extra(extra)
    data = datasets.load(run.data)
    reporter = report.Reporter(run.epochs, quiet=run.quiet)
    where.connect(lambda: reporter.say("Waiting for the other processes."))
    is_main = jax.process_index() == 0
    reporter.quiet |= not is_main
    training = Training(method, hyperparameters, run, data, where.devices)
    name, a_epoch = f"{method.name}-{run.model}-{data.name}-s{run.seed}", training.steps_per_epoch
    prepare = functools.partial(run_folder.prepare, run, name, _identity(training, run), a_epoch)
    chosen, step = machines.decided(prepare)
    folder, options = pathlib.Path(chosen), dict[str, Any](progress=reporter.has_bar)
    if run.keeps:
        options["checkpoints"] = folder / run_folder.CHECKPOINTS
        options["checkpoint_every"] = run.checkpoint_every * a_epoch or None
        options["checkpoint_keep"] = run.checkpoint_keep
    if run.resume is not None:
        options |= {"resume": step, "records": run_folder.read_metrics(run.resume, step)}
        says = f"Going on after epoch {step // a_epoch} of {run.resume}."
        if step == run.epochs * a_epoch:
            says = f"Nothing to train: {run.resume} is at epoch {run.epochs}. To go on, raise --epochs."
        reporter.say(says)

    def on_record(record: Record) -> None:
        if is_main:
            run_folder.append_metrics(folder, record)
        reporter.epoch(record)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The loss is")  # the error below says so
        result = training.run(run.epochs, on_record=on_record, **options)
    if is_main:
        summary = _summary(training, result, run, where, step)
        summary["compile_seconds"] = compiling(start)
        summary |= _write(folder, name, training, result)
        run_folder.write_json(folder / "summary.json", summary)
    history = result.history
    if (bad := diverged_at(history)) is not None:
        raise CliError(
            f"the loss stopped being finite at step {bad} of {history.num_steps}: try a smaller "
            f"--learning-rate. What there is lies in {folder}."
        )
    if is_main:
        reporter.summary(summary, folder)
    if result.ended != "interrupted":
        return 0
    again = f"To go on, with the same flags: optperm train {method.name} --resume {folder}"
    reporter.say(f"Stopped. {again if run.keeps else 'To be able to go on: --checkpoint-every.'}")
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


def _write(folder: pathlib.Path, name: str, training: Training, result: Any) -> dict[str, Any]:
    """Writes the network, the steps, the draws and pictures; what the summary says of the draws."""
    params, steps, opt_state = training.params, result.history.steps, result.state.opt_state
    run_folder.write_network(folder, training.spec, training.initial, params, opt_state)
    np.savez_compressed(folder / "steps.npz", **{"loss": np.zeros(0, np.float32), **steps})
    report.draw_curve(folder / "curve.png", training.records, steps)
    noise = find_states(opt_state, optperm.MandtSgdState)
    if not noise:
        return {}
    every, burn_in = (int(training.hyperparameters[name]) for name in ("draw_every", "burn_in"))
    snapshots, count = optperm.trajectory(opt_state)
    # The snapshots that were taken after a step that sampled.
    valid = min(int(count), -(-result.step // every) - (burn_in // every + 1))
    if valid < 1:
        return {}
    draws = jax.tree.map(lambda rows: rows[int(count) - valid : int(count)][None], snapshots)
    arrays: dict[str, Any] = {**optperm.samples_as_dict(draws)}
    np.savez(folder / "draws.npz", **arrays)
    of_last, last_calibration = _predictive(training, jax.tree.map(lambda x: x[None, None], params))
    of_draws, calibration = _predictive(training, draws)
    calibrations = {"last_iterate": last_calibration, "posterior": calibration}
    report.draw_reliability(folder / "reliability.png", calibrations, name)
    of_draws |= {"draws": valid}
    return {"last_iterate": of_last, "posterior": of_draws}


def _predictive(training: Training, draws: Any) -> tuple[dict[str, Any], optperm.Calibration]:
    """How good the probabilities are that all draws predict together, on the test examples."""
    x, labels = training.data.x_test, training.data.y_test

    def probabilities(params: optax.Params, x: jax.Array) -> jax.Array:
        return jax.nn.softmax(models.logits(training.model, params, x))

    parts = np.split(x, range(models.CHUNK, len(x), models.CHUNK))
    samples = optperm.Samples(draws, (), (), jnp.zeros([], jnp.int32), jnp.ones([], jnp.int32))
    predicted = [
        optperm.posterior_predictive(probabilities, samples, jnp.asarray(part)) for part in parts
    ]
    mean = jnp.concatenate([part.mean for part in predicted])
    losses = optax.softmax_cross_entropy_with_integer_labels(jnp.log(mean), labels)
    calibration = optperm.calibration(mean, labels)
    found = {
        "accuracy": float(np.mean(np.argmax(np.asarray(mean), axis=-1) == labels)),
        "negative_log_likelihood": float(jnp.mean(losses)),
        "expected_calibration_error": float(calibration.expected_calibration_error),
    }
    return found, calibration


def _summary(
    training: Training, result: Any, run: Run, where: machines.Machines, first: int | None
) -> dict[str, Any]:
    last, moved = training.records[-1], result.history.steps.get("share_moved")
    local = find_states(result.state.opt_state, LocalStepsState)
    return {
        "method": training.method.name,
        **{name: last[name] for name in ("test_accuracy", "train_accuracy", "train_loss", "phase")},
        # The mean over all steps.
        "share_moved": None if moved is None else float(np.mean(moved)),
        "seconds": sum(record["seconds"] for record in training.records),
        "interrupted": result.ended == "interrupted",
        "resumed_from": None if run.resume is None else str(run.resume),
        "resumed_after_epoch": None if first is None else first // training.steps_per_epoch,
        "epochs_done": result.epoch,
        "steps": result.step,
        "gradient_evaluations": training.gradient_evaluations(result.step),
        # The trained network holds nothing of them.
        "steps_since_commit": int(local[0].since_commit) if local else None,
        # How good their predictions are, where the method draws from a posterior.
        **{"last_iterate": None, "posterior": None},
        "params": sum(leaf.size for leaf in jax.tree.leaves(training.params)),
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


def _listen(event: str, duration_secs: float, **_: str | int) -> None:
    start = time.perf_counter() - duration_secs
    if event.startswith("/jax/core/compile/"):
        while _COMPILED and _COMPILED[-1][0] >= start:
            _COMPILED.pop()  # it was a part of this
        _COMPILED.append((start, start + duration_secs))


jax.monitoring.register_event_duration_secs_listener(_listen)


def compiling(since: float) -> float:
    """Seconds from a moment on that went into compiling."""
    return sum(max(0.0, end - max(start, since)) for start, end in _COMPILED)
