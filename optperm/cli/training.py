"""Training of one network on one data set by `optperm.training.fit`, and its records."""

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import optax

import optperm
from optperm.cli import models
from optperm.cli.datasets import Dataset
from optperm.cli.errors import CliError, UsageError
from optperm.cli.flags import Network
from optperm.cli.methods import Hyperparameter, Method
from optperm.training import CheckpointError, Event, History, TrainState, fit

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
        data: Dataset,
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
        shape = data.x_train.shape[1:]
        self.spec = models.NetworkSpec(flags.model, flags.hidden, shape, data.num_classes, seed)
        self.model = models.build(self.spec)
        self._accuracy = models.Accuracy(self.model, data.x_test, data.y_test)
        is_mapped = self.replicas > 1 and (method.spreads or method.period)
        facts = {
            "seed": seed,
            "num_data": len(data.x_train),
            "batch_size": self.batch_size,
            "axis_name": "replica" if is_mapped else None,
        }
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
        if not epochs:
            return Trained(
                self.initial, self._tx.init(self.initial), known, History(), 0, False, 0.0
            )

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
                epoch_start=self._change if self.method.epoch_start else None,
                on_epoch_end=on_epoch,
                **options,
            )
        except (ValueError, TypeError, CheckpointError) as error:
            says = str(error).replace("resume=STEP", "--from-epoch")
            raise CliError(f"{self.method.name}: {says}") from error
        state, steps = result.state, result.step - known[-1]["step"]
        assert state is not None
        params = self._what_is_trained(state)
        if steps > 0:  # of an epoch that Ctrl-C has cut short
            means = result.history.means(steps)
            known.append(self._record(result.epoch, result.step, params, means))
        interrupted, seconds = result.ended == "interrupted", compiling(start)
        opt_state = state.opt_state
        return Trained(params, opt_state, known, result.history, result.epoch, interrupted, seconds)

    def gradient_evaluations(self, step: int) -> int:
        """How many gradients of the loss on one example it took to get to a step.

        A full gradient takes as many as there are training examples.
        """
        gradients = self.method.gradients_a_step(**self.hyperparameters)
        started = range(1, -(-step // self.steps_per_epoch) + 1) if self.method.epoch_start else ()
        full = sum(self._change(epoch) is not None for epoch in started)
        return int(step * self.batch_size * gradients) + len(self.data.x_train) * full

    def _change(self, epoch: int) -> Any:
        """What the method does before an epoch."""
        assert self.method.epoch_start is not None
        return self.method.epoch_start(epoch, **self.hyperparameters)

    def _what_is_trained(self, state: TrainState) -> optax.Params:
        """What is tested and kept of a state, in the memory of this process."""
        params = state.params
        if self.method.period:
            params = optperm.center_params(state.opt_state)
        if self.method.permutes:
            params = optperm.permuted_params(*jax.device_get((state.opt_state, params)))
        return jax.device_get(params)

    def _record(
        self, epoch: int, step: int, params: optax.Params, metrics: Mapping[str, float]
    ) -> Record:
        """What an epoch came to. Epoch 0 is the network before training.

        Loss, accuracy in training and share of weights moved are means over its steps, the test accuracy
        is that after it; seconds are those of its steps, without compiling and testing. None is for what
        there is not. Process 0 alone tests, by the program that `optperm evaluate` runs.
        """
        seconds = metrics.get("seconds", 0.0)
        return {
            "epoch": epoch,
            "step": step,
            "train_loss": metrics.get("loss"),
            "train_accuracy": metrics.get("accuracy"),
            "test_accuracy": self._accuracy(params) if jax.process_index() == 0 else None,
            "share_moved": metrics.get("share_moved"),
            "seconds": seconds - compiling(time.perf_counter() - seconds),
            "phase": self.method.phase(step, **self.hyperparameters),
        }


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
