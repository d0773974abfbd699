"""The training loop: one compiled call an epoch, stopped by Ctrl-C between two of them."""

import concurrent.futures
import dataclasses
import functools
import itertools
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
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
from optperm.cli.replicas import Replicas
from optperm.cli.testset import TestSet
from optperm.composition import find_states
from optperm.evaluation import LossFn
from optperm.mapped_axes import varying_axes

# Far from the step counts that a method may fold into the key of the same seed.
_SHUFFLE_STREAM = 0x5348_5546
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


class Interrupt:
    """A context in which the first Ctrl-C is noted, and the second one raises KeyboardInterrupt."""

    def __init__(self) -> None:
        self.requested = False

    def __enter__(self) -> "Interrupt":
        self._previous = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *exception: object) -> None:
        signal.signal(signal.SIGINT, self._previous)

    def _handle(self, signal_number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True


class Trainer:
    """Trains one network; compiles when it is made.

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
        self._phase = phase
        self._steps = len(data.x_train) // (batch_size * replicas.size)
        self._loss_fn = _loss_function(model)
        self._x, self._y, self._epoch_start = data.x_train, data.y_train, epoch_start
        self._jit = functools.cache(replicas.jit)
        run_epoch = _epoch_function(
            self._loss_fn,
            tx,
            self._steps,
            batch_size,
            seed=seed,
            replicas=replicas,
            average_grads=not own_state,
        )
        try:
            carry = self._initial_carry(tx, params)
            self._examples = replicas.scatter(
                (jnp.asarray(data.x_train), jnp.asarray(data.y_train))
            )
            self._run_epoch = (
                replicas.each(run_epoch, own=own_state)
                .lower(carry, (*self._examples, np.uint32(0)))
                .compile()
            )
            if (first := epoch_start(1)) is not None:
                self._start_epoch(first, carry, self._batches(few=True))
            what, _ = self._trained(carry)
        except (ValueError, TypeError, RuntimeError) as error:
            # What only the params, or the kernels that are available, can tell a method.
            raise CliError(str(error)) from error
        self._test = TestSet(model, what, data)
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
        init = self._replicas.each(lambda _, params: ((params, tx.init(params)), ()), own=True)
        on_all = self._replicas.scatter(params)
        return self._replicas.together(init.lower((), on_all).compile(), (), on_all)[0]

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
        # A compiled call blocks its thread; one of its own leaves the main one free for Ctrl-C.
        pool = concurrent.futures.ThreadPoolExecutor(1)
        carry = self._replicas.scatter(progress.carry, own=self._own_state)
        records, metrics, kept = [*progress.records], [*progress.metrics], -1

        def keep() -> None:
            nonlocal kept
            kept = records[-1].epoch
            own = self._replicas.gather(carry, own=self._own_state)
            on_keep(Progress(own, records, metrics))

        for record in records:
            on_epoch(record)
        try:
            for epoch in range(progress.epoch + 1, epochs + 1):
                if self._replicas.any(interrupt.requested):
                    break
                start = time.perf_counter()
                if (before := self._epoch_start(epoch)) is not None:
                    on_start(before.says)
                future = pool.submit(self._one_epoch, epoch, before, carry)
                _wait(future, interrupt, on_interrupt)
                carry, of_epoch = future.result()
                seconds = time.perf_counter() - start
                metrics.append(of_epoch)
                records.append(self._record(epoch, carry, of_epoch, seconds))
                on_epoch(records[-1])
                if keep_every and epoch % keep_every == 0:
                    keep()
            if keep_every and kept != records[-1].epoch:
                keep()
        finally:
            pool.shutdown(wait=False)
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
            interrupted=records[-1].epoch < epochs,
        )

    def _one_epoch(
        self, epoch: int, before: EpochStart | None, carry: Any
    ) -> tuple[Any, dict[str, np.ndarray]]:
        if before is not None:
            with self._replicas.local():
                carry = self._replicas.together(self._start_epoch, before, carry, self._batches())
        shared = (*self._examples, np.uint32(epoch))
        carry, metrics = self._replicas.together(self._run_epoch, carry, shared)
        return carry, jax.device_get(metrics)

    def _start_epoch(self, start: EpochStart, carry: Any, batches: Iterable[Any]) -> Any:
        params, opt_state = carry
        full_grad = optperm.full_gradient(self._loss_fn, params, batches, has_aux=True)
        return params, self._jit(start.change)(opt_state, params, full_grad)

    def _batches(self, *, few: bool = False) -> Iterator[dict[str, jax.Array]]:
        """All training examples, those included that no step of an epoch takes.

        The replicas share each batch, but for a last one of fewer examples than there are replicas.

        Args:
          few: Leave out most batches, but none of a shape of its own.
        """
        size, each = len(self._x), self._replicas.size
        shared = size - size % each
        bounds = [*range(0, shared, _GRADIENT_CHUNK * each), shared, *([size] * (shared < size))]
        pieces = list(itertools.pairwise(bounds))
        for low, high in pieces[:2] + pieces[max(2, len(pieces) - 2) :] if few else pieces:
            batch = {"x": self._x[low:high], "y": self._y[low:high]}
            yield self._replicas.scatter(batch, own=high <= shared)

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
            step=epoch * self._steps,
            train_loss=means.get("loss"),
            train_accuracy=means.get("accuracy"),
            test_accuracy=self._test.accuracy(self._trained(carry)[0]),
            share_moved=means.get("share_moved"),
            seconds=seconds,
            phase=self._phase(epoch * self._steps),
        )


def _wait(
    future: concurrent.futures.Future[Any], interrupt: Interrupt, on_interrupt: Callable[[], None]
) -> None:
    told = False
    while not future.done():
        concurrent.futures.wait([future], timeout=0.1)
        if interrupt.requested and not told:
            told = True
            on_interrupt()


def _loss_function(model: nn.Module) -> LossFn:
    """The mean loss over a batch, and the share of its examples that are classified right."""

    def loss_fn(params: optax.Params, batch: Any) -> tuple[jax.Array, jax.Array]:
        logits = models.logits(model, params, batch["x"])
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
        return jnp.mean(loss), jnp.mean(jnp.argmax(logits, axis=-1) == batch["y"])

    return loss_fn


def _epoch_function(
    loss_fn: LossFn,
    tx: optax.GradientTransformationExtraArgs,
    steps: int,
    batch_size: int,
    *,
    seed: int,
    replicas: Replicas,
    average_grads: bool,
) -> Any:
    """One replica's part in an epoch."""
    axis_name = replicas.axis_name

    def deal(epoch: jax.Array, num_examples: int) -> jax.Array:
        key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), _SHUFFLE_STREAM)
        order = jax.random.permutation(jax.random.fold_in(key, epoch), num_examples)
        hands = order[: steps * replicas.size * batch_size].reshape(steps, -1, batch_size)
        return hands[:, 0 if axis_name is None else jax.lax.axis_index(axis_name)]

    def run_epoch(
        carry: tuple[optax.Params, Any], shared: tuple[jax.Array, jax.Array, jax.Array]
    ) -> tuple[Any, dict[str, jax.Array]]:
        x, y, epoch = shared

        def step(carry: tuple[optax.Params, Any], indices: jax.Array) -> tuple[Any, Any]:
            params, opt_state = carry
            batch = {"x": x[indices], "y": y[indices]}
            e = optperm.evaluate(
                loss_fn,
                params,
                batch,
                has_aux=True,
                axis_name=axis_name if average_grads else None,
            )
            updates, opt_state = tx.update(e.grad, opt_state, params, **e.extra_args)
            params = optperm.apply_updates(params, updates, opt_state)
            metrics = {"loss": e.value, "accuracy": e.aux}
            for state in find_states(opt_state, optperm.PermuteByCyclesState):
                metrics["share_moved"] = state.share_moved
            return (params, opt_state), metrics

        carry, metrics = jax.lax.scan(step, carry, deal(epoch, len(x)))
        return carry, jax.tree.map(_mean_over_replicas, metrics)

    return run_epoch


def _mean_over_replicas(values: jax.Array) -> jax.Array:
    """The mean of what differs between replicas: once an epoch, so that steps stay local."""
    return jax.lax.pmean(values, axes) if (axes := tuple(varying_axes(values))) else values
