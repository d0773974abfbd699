"""The command `train`, which trains a network with one method and writes a run folder."""

import contextlib
import dataclasses
import functools
import importlib.metadata
import os
import pathlib
import platform
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

import optperm
from optperm.cli import datasets, models, report, run_folder
from optperm.cli.errors import CliError, UsageError, import_extra
from optperm.cli.flags import Run
from optperm.cli.methods import Hyperparameter, Method
from optperm.core.shapes import Params
from optperm.core.states import find_running_states
from optperm.permutation._export import PERMUTED_STATES
from optperm.training import CheckpointError, Event, FitResult, TrainState, fit
from optperm.training._history import find_divergence
from optperm.training._processes import digest

# A line of metrics.jsonl.
Record = dict[str, Any]


class Training:
    """A method with its hyperparameters, a network, data and devices.

    A step of R replicas with batches of B examples uses the same examples as a step of one replica with
    a batch of R B examples. Arguments that contradict each other raise a UsageError.

    Attributes:
      records: The records of the epochs, including epoch 0 and a partial epoch at the end.
      params: The trained params; the center if the method has one.
    """

    def __init__(
        self,
        method: Method,
        hyperparameters: Mapping[str, Hyperparameter],
        flags: Run,
        data: datasets.Dataset,
    ) -> None:
        self.batch_size = flags.batch_size * flags.devices
        self.steps_per_epoch = len(data.x_train) // self.batch_size
        if not self.steps_per_epoch:
            size, available = self.batch_size, len(data.x_train)
            says = f"is {size} examples per step, more than the {available} training examples"
            raise UsageError(f"--batch-size times --devices {says}.")
        self.method, self.hyperparameters, self.data = method, dict(hyperparameters), data
        # A method that needs the number of steps gets the length of the run, unless a decay is given.
        has_decay = bool(hyperparameters.get("aggressiveness_decay"))
        if hyperparameters.get("num_steps", 0) is None and not has_decay:
            self.hyperparameters["num_steps"] = flags.epochs * self.steps_per_epoch
        begin: Any = method.epoch_start
        self._change: Any = begin and functools.partial(begin, **hyperparameters)
        shape, classes = data.x_train.shape[1:], data.num_classes
        self.spec = models.NetworkSpec(flags.model, flags.hidden, shape, classes, flags.seed)
        self.model = models.build(self.spec)
        self._mesh = _make_mesh(flags.devices) if flags.devices > 1 else None
        self._axis_name = "replica" if self._mesh is not None and method.takes_axis else None
        try:
            self._tx = method.transformation(
                self.hyperparameters,
                key=flags.seed,
                num_data=len(data.x_train),
                batch_size=self.batch_size,
                axis_name=self._axis_name,
            )
        except (ValueError, TypeError) as error:
            raise UsageError(f"{method.name}: {error}") from error

    def run(
        self,
        epochs: int,
        *,
        on_record: Callable[[Record], None] = lambda record: None,
        records: Sequence[Record] = (),
        **options: Any,
    ) -> FitResult:
        """Train with `fit` up to a total number of epochs, with further options of `fit`.

        `on_record` is called with each record, including the `records` of an earlier run.
        """
        initial = models.initial_params(self.spec)
        self.records = [*records] or [self._record(0, 0, initial, {})]
        for record in self.records:
            on_record(record)

        def on_epoch(event: Event) -> None:
            params = self._get_params(event.state)
            self.records.append(self._record(event.epoch, event.step, params, event.metrics))
            on_record(self.records[-1])

        # Outside jit, `init` sees the values of params and warns if all weights are equal, as only in a
        # user's module. With several devices, `fit` makes the state on its mesh.
        init = self._tx.init if ":" in self.spec.model else jax.jit(self._tx.init)
        params, opt_state = initial, None
        if self._mesh is None:  # one device by choice, so `fit` should not warn
            params = jax.device_put(params, jax.devices()[0])
            opt_state = init(params)
        prior = float(self.hyperparameters.get("prior_precision") or 0.0)
        try:
            result = fit(
                TrainState.create(apply_fn=None, params=params, tx=self._tx, opt_state=opt_state),
                models.loss_function(self.model, prior, len(self.data.x_train)),
                {"x": self.data.x_train, "y": self.data.y_train},
                epochs=epochs,
                batch_size=self.batch_size,
                key=self.spec.seed,
                has_aux=True,
                mesh=self._mesh,
                axis_name=self._axis_name,
                epoch_start=self._change,
                on_epoch_end=on_epoch,
                on_signal="return",  # to write the run folder before the program ends
                **options,
            )
        except CheckpointError as error:
            raise CliError(f"{self.method.name}: {error}") from error
        except (ValueError, TypeError) as error:
            raise UsageError(f"{self.method.name}: {error}") from error
        self.params = self._get_params(result.state)
        steps = result.step - self.records[-1]["step"]
        if steps > 0:  # the steps of an epoch that Ctrl-C ended early
            means = result.history.means(steps)
            self.records.append(self._record(result.epoch, result.step, self.params, means))
        return result

    def gradient_evaluations(self, step: int) -> int:
        """Return the number of gradients of single examples up to a step, including full gradients."""
        gradients = self.method.gradients_a_step(**self.hyperparameters)
        started = range(1, -(-step // self.steps_per_epoch) + 1) if self._change else ()
        full = sum(self._change(epoch) is not None for epoch in started)
        return int(step * self.batch_size * gradients) + len(self.data.x_train) * full

    def test(self, params: Params) -> float:
        """Return the accuracy on the test examples, from the same program as in `optperm evaluate`."""
        return models.measure_accuracy(self.model, params, self.data.x_test, self.data.y_test)

    def _get_params(self, state: Any) -> Params:
        """Return the params of a state for tests and files, in the memory of this process."""
        params = state.params  # the center if the method has one
        if find_running_states(state.opt_state, PERMUTED_STATES):
            params = optperm.permutation.permuted_params(*jax.device_get((state.opt_state, params)))
        return jax.device_get(params)

    def _record(
        self, epoch: int, step: int, params: Params, metrics: Mapping[str, float]
    ) -> Record:
        """Return the record of an epoch, with None for missing numbers; epoch 0 is before training."""
        data, accuracy = self.data, None
        if data.x_valid is not None and data.y_valid is not None:
            accuracy = models.measure_accuracy(self.model, params, data.x_valid, data.y_valid)
        return {
            "epoch": epoch,
            "step": step,
            "train_loss": metrics.get("loss"),
            "train_accuracy": metrics.get("accuracy"),
            "valid_accuracy": accuracy,
            "test_accuracy": self.test(params) if accuracy is None else None,
            "fraction_moved": metrics.get("fraction_moved"),
            "seconds": metrics.get("seconds", 0.0),
            "phase": self.method.phase(step, **self.hyperparameters),
        }


def _make_mesh(devices: int) -> Mesh:
    """Make a mesh of devices of the default platform, or of the CPU if there are too few devices."""
    here = max(jax.devices(), jax.devices("cpu"), key=lambda found: min(len(found), devices))
    if len(here) < devices:
        advice = f"JAX_NUM_CPU_DEVICES={devices} in the environment makes virtual devices"
        raise CliError(f"--devices must be at most {len(here)}, got {devices}: {advice}.")
    return Mesh(np.array(here[:devices]), ("replica",))


def keep_programs() -> None:
    """Store compiled programs in the user's cache folder, unless another folder is set."""
    if jax.config.jax_compilation_cache_dir:  # type: ignore[attr-defined, unused-ignore]
        return
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    folder = pathlib.Path(cache, "optperm", f"programs-jax-{jax.__version__}").expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        says = f"compiled programs are not kept: {folder} cannot be written ({error.strerror})"
        warnings.warn(f"{says}. Pass --no-cache.", stacklevel=2)
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def train(method: Method, hyperparameters: Mapping[str, Hyperparameter], run: Run) -> int:
    """Train a network, write its run folder, and return the exit code."""
    # A missing package should end the run before the training.
    for extra in ("rich", "matplotlib", *["orbax.checkpoint"] * run.keeps):
        import_extra(extra)
    if run.cache:
        keep_programs()
    known: int = jax.config.jax_num_cpu_devices  # type: ignore[attr-defined, unused-ignore]
    if 1 < run.devices > known:
        # JAX rejects this after its backend has started; its existing devices are then used.
        with contextlib.suppress(RuntimeError):
            jax.config.update("jax_num_cpu_devices", run.devices)
    data, reporter = datasets.load(run.data, run.valid_fraction), report.Reporter(run)
    training = Training(method, hyperparameters, run, data)
    identity = _identify(training, run)
    step = 0 if run.resume is None else run_folder.find_checkpoint(run.resume, identity)
    folder = run_folder.create(run.out, f"{method.name}-{run.model}-{data.name}-s{run.seed}")
    reporter.say(data.about)
    options: dict[str, Any] = {"progress": reporter.has_bar}
    if run.keeps:
        run_folder.begin_checkpoints(folder, identity, run.resume, step)
        options["checkpoints"] = folder / run_folder.CHECKPOINTS
        options["checkpoint_every"] = run.checkpoint_every * training.steps_per_epoch or None
        options["checkpoint_keep"] = run.checkpoint_keep
    if run.resume is not None:
        options |= {"resume": step, "records": run_folder.read_metrics(run.resume, step)}
        done = f"after epoch {step // training.steps_per_epoch} of {run.resume}"
        reporter.say(f"Resuming {done}, up to epoch {run.epochs} (--epochs).")

    def on_record(record: Record) -> None:
        run_folder.append_metrics(folder, record)
        reporter.epoch(record)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The loss stopped")  # there is an error message below
        try:
            result = training.run(run.epochs, on_record=on_record, **options)
        except CliError as error:
            if run.resume is not None and getattr(error.__cause__, "result", None) is None:
                # The run could not begin, so the new folder contains no results.
                raise run_folder.give_up(run.resume, folder, error) from error
            raise
    summary = _summarize(training, result, run)
    state: Any = result.state
    run_folder.write_network(folder, training.spec, training.params, state.opt_state)
    columns: dict[str, Any] = {"loss": np.zeros(0, np.float32), **result.history.steps}
    np.savez_compressed(folder / "steps.npz", **columns)
    report.draw_curve(folder / "curve.png", training.records, result.history.steps)
    run_folder.write_json(folder / "summary.json", summary)
    if (bad := find_divergence(result.history)) is not None:
        says = f"the loss stopped being finite at step {bad} of {result.step}"
        raise CliError(f"{says}: lower --learning-rate. The files are in {folder}.")
    reporter.summary(summary, folder)
    if result.ended != "interrupted":
        return 0
    again = f"To resume, with the same flags: optperm train {method.name} --resume {folder}"
    reporter.say(f"Stopped. {again if run.keeps else '--checkpoint-every makes a run resumable.'}")
    return 128 + int(result.signal)


def _identify(training: Training, run: Run) -> dict[str, Any]:
    """Return the values that determine a run from its first step on."""
    flags = {"model": run.model, "hidden": run.hidden, "seed": run.seed, **training.hyperparameters}
    return {
        "the method": training.method.name,
        **{f"--{name.replace('_', '-')}": value for name, value in flags.items()},
        "the number of examples per step": training.batch_size,
        "the digest of the data": digest([getattr(training.data, key) for key in datasets.KEYS]),
    }


def _summarize(training: Training, result: FitResult, run: Run) -> dict[str, Any]:
    last, moved = training.records[-1], result.history.steps.get("fraction_moved")
    names = ("train_accuracy", "train_loss", "valid_accuracy", "phase")
    packages = ("optperm", "jax", "flax", "optax", "numpy")
    return {
        "method": training.method.name,
        "test_accuracy": training.test(training.params),
        **{name: last[name] for name in names},
        # This is the mean over all steps.
        "fraction_moved": None if moved is None else float(np.mean(moved)),
        "seconds": sum(record["seconds"] for record in training.records),
        "interrupted": result.ended == "interrupted",
        "epochs_done": result.epoch,
        "steps": result.step,
        "gradient_evaluations": training.gradient_evaluations(result.step),
        "params": sum(leaf.size for leaf in jax.tree.leaves(training.params)),
        "train_examples": len(training.data.x_train),
        "test_examples": len(training.data.x_test),
        "classes": training.data.num_classes,
        **dataclasses.asdict(run),
        "data": training.data.source,
        "hyperparameters": training.hyperparameters,
        "device": jax.devices()[0].device_kind,
        "versions": {
            "python": platform.python_version(),
            **{name: importlib.metadata.version(name) for name in packages},
        },
    }
