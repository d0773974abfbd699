"""Training of one network on one data set: what `optperm.training.engine` repeats, and its records."""

import dataclasses
import functools
import time
from collections.abc import Callable, Iterable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import optperm
from optperm.cli import models
from optperm.cli.datasets import Dataset
from optperm.cli.errors import CliError
from optperm.cli.testset import TestSet
from optperm.evaluation import LossFn
from optperm.training import engine
from optperm.training.engine import Position
from optperm.training.feeds import ArrayFeed, Columns
from optperm.training.interrupt import Interrupt
from optperm.training.programs import Spread, step_metrics
from optperm.training.replicas import LostProcessError, Replicas

_GRADIENT_CHUNK = 1000  # examples on a device at once


@dataclasses.dataclass(frozen=True)
class EpochRecord:
    """What one epoch came to. Epoch 0 is the network before training.

    Attributes:
      epoch: Epochs done.
      step: Steps done.
      train_loss: Mean over the epoch's batches, each taken before its step.
      train_accuracy: Likewise.
      test_accuracy: After the epoch.
      share_moved: Mean share of the weights that a step moved; None where the method does not say.
      seconds: Wall time of the epoch's steps, without compiling and testing.
      phase: What the method is doing by now; None where that does not change.
    """

    epoch: int
    step: int
    train_loss: float | None
    train_accuracy: float | None
    test_accuracy: float
    share_moved: float | None
    seconds: float
    phase: str | None


@dataclasses.dataclass(frozen=True)
class Progress:
    """How far a run has come: all it takes to go on.

    Attributes:
      carry: Params and optimizer state, as NumPy arrays. Where each of several replicas has its own,
        they are stacked along a leading axis.
      records: One for each epoch done, epoch 0 included.
      metrics: For each epoch done, what was recorded at each step: float32 (steps,), by name.
    """

    carry: Any
    records: list[EpochRecord]
    metrics: list[dict[str, np.ndarray]]

    @property
    def epoch(self) -> int:
        """Epochs done."""
        return self.records[-1].epoch


@dataclasses.dataclass(frozen=True)
class EpochStart:
    """What a method does before the first step of an epoch, all replicas together.

    Attributes:
      says: What the progress shows meanwhile.
      change: From the optimizer state, the params and the gradient over all training examples it
        makes the state to go on with. The same function each time: it is compiled once.
    """

    says: str
    change: Callable[[Any, optax.Params, optax.Updates], Any]


@dataclasses.dataclass(frozen=True)
class TrainingRun:
    """What training came to.

    Attributes:
      params: The trained params: the center's, where the method has one, or the permutation.
      opt_state: The last optimizer state, of one replica.
      records: One for each epoch, epoch 0 included.
      loss: (steps,), the loss of each batch before its step.
      share_moved: (steps,), or None where the method does not say.
      compile_seconds: Wall time of compiling.
      interrupted: Whether Ctrl-C ended it.
    """

    params: optax.Params
    opt_state: Any
    records: list[EpochRecord]
    loss: np.ndarray
    share_moved: np.ndarray | None
    compile_seconds: float
    interrupted: bool


class Trainer:
    """Trains one network; compiles when it is made. `test` holds its test examples.

    Each epoch's shuffle is dealt out: a step of R replicas with batches of B examples takes the
    examples of one step of a single replica with a batch of R B.

    Args:
      model: The network.
      tx: The training method.
      params: The initial params.
      data: What to train and test on. All of it is kept on each device.
      batch_size: Examples a step, of each replica. The last ones of each shuffle that do not suffice
        for a step of all replicas are left out.
      seed: Seed of the shuffles.
      replicas: What the network is trained on.
      own_state: Whether each replica keeps params and a state of its own, and the method brings
        together what they learn. Else they share both, and the mean of their gradients.
      trained: From params and optimizer state of one replica, what is tested and kept, which is the
        same for all of them: a center, say, or the params.
      epoch_start: From the number of an epoch, what to do before it; only where the replicas share
        their state. Compiled when it first gives something, which should be for epoch 1.
      phase: From the steps done, what the method is doing.

    Raises:
      CliError: If the method cannot train these params here.
    """

    def __init__(
        self,
        model: nn.Module,
        tx: optax.GradientTransformationExtraArgs,
        params: optax.Params,
        data: Dataset,
        *,
        batch_size: int,
        seed: int,
        replicas: Replicas,
        own_state: bool = False,
        trained: Callable[[optax.Params, Any], optax.Params] = lambda params, opt_state: params,
        epoch_start: Callable[[int], EpochStart | None] = lambda epoch: None,
        phase: Callable[[int], str | None] = lambda step: None,
    ) -> None:
        start = time.perf_counter()
        self._replicas, self._own_state = replicas, own_state
        self._what_is_trained = jax.jit(trained)
        self._phase, self._epoch_start = phase, epoch_start
        self._loss_fn = _loss_function(model)
        self._jit = functools.cache(replicas.jit)
        program = _Steps(self._loss_fn, tx, Spread(replicas.axis_name, own_state))
        try:
            self._feed = ArrayFeed(
                {"x": data.x_train, "y": data.y_train},
                batch_size=batch_size * replicas.size,
                seed=seed,
                program=program,
                replicas=replicas,
                own=own_state,
                steps_a_call=None,
            )
            carry = self._initial_carry(tx, params)
            self._feed.prepare(carry)
            if (first := epoch_start(1)) is not None:
                few = self._feed.all_batches(1, _GRADIENT_CHUNK, few=True)
                self._start_epoch(first, carry, few)
            what, _ = self._trained(carry)
        except LostProcessError:
            raise
        except (ValueError, TypeError, RuntimeError) as error:
            # What only the params, or the kernels that are available, can tell a method.
            raise CliError(str(error)) from error
        self.test = TestSet(model, what, data)
        self.initial = Progress(
            replicas.gather(carry, own=own_state), [self._record(0, carry, {}, 0.0)], []
        )
        self._compile_seconds = time.perf_counter() - start

    def _initial_carry(
        self, tx: optax.GradientTransformationExtraArgs, params: optax.Params
    ) -> Any:
        if not self._own_state:
            return self._replicas.scatter((params, tx.init(params)))

        # On each replica, which may keep a part of its own.
        def init(_: Any, params: optax.Params, __: Any) -> tuple[Any, Any]:
            return (params, tx.init(params)), ()

        on_all = self._replicas.scatter(params)
        compiled = self._replicas.each(init, own=True).lower((), on_all, ()).compile()
        return self._replicas.together(compiled, (), on_all, ())[0]

    def run(
        self,
        epochs: int,
        progress: Progress,
        *,
        interrupt: Interrupt,
        on_epoch: Callable[[EpochRecord], None],
        on_start: Callable[[str], None],
        on_interrupt: Callable[[], None],
        keep_every: int,
        on_keep: Callable[[Progress], None],
    ) -> TrainingRun:
        """Trains, from the initial params or from where an earlier run had come.

        Args:
          epochs: How often to go through the training examples, in all.
          progress: `initial`, or one that was kept.
          interrupt: Ends training after the epoch in which it is requested, in any process.
          on_epoch: Called with each record, those of the earlier run included.
          on_start: Called with what the method does before an epoch.
          on_interrupt: Called when it is requested, while the epoch still runs.
          keep_every: After how many epochs each to keep the progress, and after the last one that was
            done; 0 never.
          on_keep: Called with what is to be kept.

        Returns:
          A `TrainingRun`.
        """
        records, metrics = [*progress.records], [*progress.metrics]
        since = time.perf_counter()

        def start(at: Position, carry: Any) -> Any:
            nonlocal since
            since = time.perf_counter()
            if (before := self._epoch_start(at.epoch)) is None:
                return carry
            on_start(before.says)
            batches = self._feed.all_batches(at.epoch, _GRADIENT_CHUNK)
            changed = self._replicas.together(self._start_epoch, before, carry, batches)
            return self._replicas.fresh(changed)

        def steps_end(at: Position, carry: Any, of_epoch: Columns) -> bool:
            metrics.append(of_epoch)
            return False

        def epoch_end(at: Position, carry: Any) -> bool:
            seconds = time.perf_counter() - since
            records.append(self._record(at.epoch - 1, carry, metrics[-1], seconds))
            on_epoch(records[-1])
            return False

        def keep(at: Position, carry: Any) -> None:
            own = self._replicas.gather(carry, own=self._own_state)
            on_keep(Progress(own, records, metrics))

        for record in records:
            on_epoch(record)
        steps = self._feed.steps_per_epoch
        carry, at, _ = engine.train(
            self._feed,
            self._replicas.fresh(self._replicas.scatter(progress.carry, own=self._own_state)),
            Position(progress.epoch * steps, progress.epoch + 1),
            engine.Hooks(start, steps_end, epoch_end, keep, on_interrupt),
            replicas=self._replicas,
            interrupt=interrupt,
            epochs=epochs,
            save_every=keep_every * steps,
        )
        columns = {
            name: np.concatenate([of_epoch[name] for of_epoch in metrics])
            for name in (metrics[0] if metrics else ())
        }
        params, opt_state = self._trained(carry)
        return TrainingRun(
            params=params,
            opt_state=opt_state,
            records=records,
            loss=columns.get("loss", np.zeros(0, np.float32)),
            share_moved=columns.get("share_moved"),
            compile_seconds=self._compile_seconds,
            interrupted=at.epoch <= epochs,
        )

    def _start_epoch(self, start: EpochStart, carry: Any, batches: Iterable[Any]) -> Any:
        params, opt_state = carry
        full_grad = optperm.full_gradient(self._loss_fn, params, batches, has_aux=True)
        return params, self._jit(start.change)(opt_state, params, full_grad)

    def _trained(self, carry: Any) -> tuple[optax.Params, Any]:
        """What has been trained, and the optimizer state of one replica."""
        params, opt_state = self._replicas.first(carry, own=self._own_state)
        return self._what_is_trained(params, opt_state), opt_state

    def _record(
        self, epoch: int, carry: Any, metrics: dict[str, np.ndarray], seconds: float
    ) -> EpochRecord:
        means = {name: float(np.mean(values)) for name, values in metrics.items()}
        return EpochRecord(
            epoch=epoch,
            step=epoch * self._feed.steps_per_epoch,
            train_loss=means.get("loss"),
            train_accuracy=means.get("accuracy"),
            test_accuracy=self.test.accuracy(self._trained(carry)[0]),
            share_moved=means.get("share_moved"),
            seconds=seconds,
            phase=self._phase(epoch * self._feed.steps_per_epoch),
        )


def _loss_function(model: nn.Module) -> LossFn:
    """The mean loss over a batch, and the share of its examples that are classified right."""

    def loss_fn(params: optax.Params, batch: Any) -> tuple[jax.Array, jax.Array]:
        logits = models.logits(model, params, batch["x"])
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
        return jnp.mean(loss), jnp.mean(jnp.argmax(logits, axis=-1) == batch["y"])

    return loss_fn


@dataclasses.dataclass(frozen=True)
class _Steps:
    """The program that trains a network; the carry is its params and the optimizer state.

    Attributes:
      loss_fn: The loss, and beside it the accuracy.
      tx: The training method.
      spread: How it is spread over replicas.
    """

    loss_fn: LossFn
    tx: optax.GradientTransformationExtraArgs
    spread: Spread

    def step(self, carry: Any, batch: Any) -> tuple[Any, dict[str, jax.Array]]:
        """See `optperm.training.programs.Program`."""
        params, opt_state = carry
        axis_name = self.spread.averaged
        e = optperm.evaluate(self.loss_fn, params, batch, has_aux=True, axis_name=axis_name)
        updates, opt_state = self.tx.update(e.grad, opt_state, params, **e.extra_args)
        metrics = step_metrics(e, {"accuracy": e.aux}, opt_state)
        return (optperm.apply_updates(params, updates, opt_state), opt_state), metrics
