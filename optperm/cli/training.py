"""Training of one network on one data set by `optperm.training.fit`, and its records."""

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
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


@dataclasses.dataclass(frozen=True)
class Trained:
    """What training came to.

    Attributes:
      params: The trained params, as NumPy arrays: the center's, where the method has one, or the
        permuted ones.
      opt_state: The last optimizer state, of one replica.
      records: One for each epoch, epoch 0 and a part of one at the end included.
      history: What was recorded at each step.
      ended: As in `optperm.training.FitResult`.
      epoch: Whole epochs done.
      compile_seconds: Wall time of compiling.
    """

    params: optax.Params
    opt_state: Any
    records: list[Record]
    history: History
    ended: str
    epoch: int
    compile_seconds: float


class Training:
    """A method with its hyperparameters, a network, data and devices.

    A step of R replicas with batches of B examples takes the examples of one step of a single replica
    with a batch of R B.

    Args:
      method: The method.
      hyperparameters: All of its flags.
      flags: The network and the batches.
      data: What to train and test on.
      seed: Seed of the params, the shuffles and the method.
      devices: Devices of each process.

    Raises:
      UsageError: If there are too few examples for a step of all replicas, or a hyperparameter is of
        the wrong type or out of range.
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
        self.data, self._seed, self._devices = data, seed, devices
        shape = data.x_train.shape[1:]
        self.spec = models.NetworkSpec(flags.model, flags.hidden, shape, data.num_classes, seed)
        self.model = models.build(self.spec)
        self._accuracy = models.Accuracy(self.model, data.x_test, data.y_test)
        is_mapped = self.replicas > 1 and (method.spreads or method.period is not None)
        facts = {
            "seed": seed,
            "num_data": len(data.x_train),
            # Of one gradient.
            "batch_size": flags.batch_size if method.period else self.batch_size,
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
        """Trains.

        Args:
          epochs: How often to go through the training examples, in all.
          on_record: Called with each record, those of an earlier run included.
          records: Those of the earlier run that this one goes on from.
          **options: Further arguments of `fit`.

        Raises:
          CliError: If the method cannot train these params here, or a checkpoint is not what it must be.
        """
        start, known = time.perf_counter(), list(records)
        if not known:
            known.append(self._record(0, 0, self.initial, {}))
        for record in known:
            on_record(record)

        def on_epoch(event: Event) -> None:
            params = self._what_is_trained(event.state)
            known.append(self._record(event.epoch, event.step, params, event.metrics))
            on_record(known[-1])

        # Without an optimizer state fit makes one, where it is to lie.
        state = TrainState.create(
            apply_fn=self.model.apply, params=self.initial, tx=self._tx, opt_state=None
        )
        try:
            # The state that nothing trains is the one before.
            if not epochs and self.replicas > 1:
                raise UsageError("--epochs must be at least 1 on several devices, got 0.")
            if not epochs:
                state = state.replace(opt_state=self._tx.init(self.initial))
                return Trained(self.initial, state.opt_state, known, History(), "finished", 0, 0.0)
            result = fit(
                state,
                models.loss_function(self.model),
                {"x": self.data.x_train, "y": self.data.y_train},
                epochs=epochs,
                batch_size=self.batch_size,
                seed=self._seed,
                has_aux=True,
                devices=self._devices if self.replicas > 1 else None,
                epoch_start=self._change if self.method.epoch_start else None,
                on_epoch_end=on_epoch,
                **options,
            )
        except (ValueError, TypeError, CheckpointError) as error:
            advice = str(error).replace("resume=STEP", "--from-epoch")
            raise CliError(f"{self.method.name}: {advice}") from error
        assert result.state is not None
        params = self._what_is_trained(result.state)
        if (steps := result.step - known[-1]["step"]) > 0:
            means = result.history.means(steps)
            known.append(self._record(result.epoch, result.step, params, means))
        return Trained(
            params=params,
            opt_state=result.state.opt_state,
            records=known,
            history=result.history,
            ended=result.ended,
            epoch=result.epoch,
            compile_seconds=compiling(start, time.perf_counter()),
        )

    def gradient_evaluations(self, step: int) -> int:
        """How many gradients of the loss on one example it took to get to a step.

        A full gradient takes as many as there are training examples.
        """
        started = range(1, -(-step // self.steps_per_epoch) + 1)
        changes = [epoch for epoch in started if self.method.epoch_start and self._change(epoch)]
        gradients = self.method.gradients_a_step(**self.hyperparameters)
        return int(step * self.batch_size * gradients) + len(self.data.x_train) * len(changes)

    def _change(self, epoch: int) -> Any:
        """What the method does before an epoch."""
        assert self.method.epoch_start is not None
        return self.method.epoch_start(epoch, **self.hyperparameters)

    def _what_is_trained(self, state: TrainState) -> optax.Params:
        """What is tested and kept of a state: its params, in one device's memory."""
        if self.method.period:
            return jax.device_get(optperm.center_params(state.opt_state))
        if not self.method.permutes:
            return jax.device_get(state.params)
        params, opt_state = jax.device_get((state.params, state.opt_state))
        return jax.device_get(optperm.permuted_params(opt_state, params))

    def _record(
        self, epoch: int, step: int, params: optax.Params, metrics: Mapping[str, float]
    ) -> Record:
        """What an epoch came to. Epoch 0 is the network before training.

        The losses, the accuracies in training and the shares of weights that a step moved are means over
        the steps of the epoch; the test accuracy is that after it. Seconds are those of the steps,
        without compiling and testing; the phase is what the method is doing by now. None is for what it
        does not say. Process 0 alone tests, by the program that `optperm evaluate` runs.
        """
        now, seconds = time.perf_counter(), metrics.get("seconds", 0.0)
        return {
            "epoch": epoch,
            "step": step,
            "train_loss": metrics.get("loss"),
            "train_accuracy": metrics.get("accuracy"),
            "test_accuracy": self._accuracy(params) if jax.process_index() == 0 else None,
            "share_moved": metrics.get("share_moved"),
            "seconds": seconds - compiling(now - seconds, now),
            "phase": self.method.phase(step, **self.hyperparameters),
        }


@functools.cache
def _compilations() -> list[tuple[float, float]]:
    """When something is traced or compiled, from the first call on: its start and its end."""
    known: list[tuple[float, float]] = []

    def listen(name: str, seconds: float, **_: Any) -> None:
        if name.startswith("/jax/core/compile/"):
            end = time.perf_counter()
            while known and known[-1][0] >= end - seconds:
                known.pop()  # it was a part of this
            known.append((end - seconds, end))

    jax.monitoring.register_event_duration_secs_listener(listen)
    return known


def compiling(since: float, until: float) -> float:
    """Seconds between two moments that went into compiling."""
    parts = (min(end, until) - max(start, since) for start, end in _compilations())
    return sum(part for part in parts if part > 0)
