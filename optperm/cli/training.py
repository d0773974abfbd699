"""The training loop: one compiled call an epoch, stopped by Ctrl-C between two of them."""

import concurrent.futures
import dataclasses
import signal
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import optperm
from optperm.cli.datasets import Dataset
from optperm.cli.errors import CliError
from optperm.composition import find_states

Result = TypeVar("Result")

# Far from the step counts that a method may fold into the key of the same seed.
_SHUFFLE_STREAM = 0x5348_5546
_TEST_CHUNK = 1000


@dataclasses.dataclass(frozen=True)
class EpochRecord:
    """What one epoch came to. Epoch 0 is the network before training.

    Attributes:
      epoch: Epochs done.
      step: Steps done.
      train_loss: Mean over the epoch's batches, each taken before its step.
      train_accuracy: Likewise.
      test_accuracy: After the epoch.
      share_moved: Mean share of the weights that a step moved; None where the method permutes none.
      seconds: Wall time of the epoch's steps, without compiling and testing.
    """

    epoch: int
    step: int
    train_loss: float | None
    train_accuracy: float | None
    test_accuracy: float
    share_moved: float | None
    seconds: float


@dataclasses.dataclass(frozen=True)
class TrainingRun:
    """What training came to.

    Attributes:
      params: The trained params.
      opt_state: The last optimizer state.
      records: One for each epoch, epoch 0 included.
      loss: (steps,), the loss of each batch before its step.
      share_moved: (steps,), or None where the method permutes no weights.
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
    """Within this context the first Ctrl-C is noted, and the second one raises KeyboardInterrupt."""

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


def train(
    model: nn.Module,
    tx: optax.GradientTransformationExtraArgs,
    params: optax.Params,
    data: Dataset,
    *,
    epochs: int,
    batch_size: int,
    seed: int,
    interrupt: Interrupt,
    on_epoch: Callable[[EpochRecord], None],
    on_interrupt: Callable[[], None],
) -> TrainingRun:
    """Trains a network.

    Args:
      model: The network.
      tx: The training method.
      params: The initial params.
      data: What to train and test on. All of it is kept on the device.
      epochs: How often to go through the training examples.
      batch_size: Examples a step. The shuffle's last examples that fill no batch are left out.
      seed: Seed of the shuffles.
      interrupt: Ends training after the epoch in which it is requested.
      on_epoch: Called with each record.
      on_interrupt: Called once, while the last epoch still runs.

    Returns:
      A `TrainingRun`.
    """
    # A compiled call blocks its thread for long; in a thread of its own it leaves the main one free to
    # answer Ctrl-C.
    pool = concurrent.futures.ThreadPoolExecutor(1)

    def call(function: Callable[..., Result], *arguments: object) -> Result:
        future = pool.submit(function, *arguments)
        told = interrupt.requested
        while not future.done():
            concurrent.futures.wait([future], timeout=0.1)
            if interrupt.requested and not told:
                told = True
                on_interrupt()
        return future.result()

    key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), _SHUFFLE_STREAM)
    x, y = jnp.asarray(data.x_train), jnp.asarray(data.y_train)
    steps = len(x) // batch_size
    records, losses, shares = [], [], []

    def record(epoch: int, metrics: dict[str, Any], seconds: float) -> None:
        means = {name: float(np.mean(values)) for name, values in metrics.items()}
        records.append(
            EpochRecord(
                epoch=epoch,
                step=epoch * steps,
                train_loss=means.get("loss"),
                train_accuracy=means.get("accuracy"),
                test_accuracy=call(test.accuracy, params),
                share_moved=means.get("share_moved"),
                seconds=seconds,
            )
        )
        on_epoch(records[-1])

    try:
        start = time.perf_counter()
        try:
            opt_state = tx.init(params)
            run_epoch = call(
                _compile_epoch, model, tx, steps, batch_size, (params, opt_state, x, y, key)
            )
        except (ValueError, TypeError, RuntimeError) as error:
            # What only the params, or the kernels that are available, can tell a method.
            raise CliError(str(error)) from error
        test = call(TestSet, model, params, data)
        compile_seconds = time.perf_counter() - start
        record(0, {}, 0.0)
        for epoch in range(1, epochs + 1):
            if interrupt.requested:
                break
            start = time.perf_counter()
            params, opt_state, metrics = call(
                _run, run_epoch, params, opt_state, x, y, jax.random.fold_in(key, epoch)
            )
            seconds = time.perf_counter() - start
            losses.append(metrics["loss"])
            shares.append(metrics.get("share_moved", []))
            record(epoch, metrics, seconds)
    finally:
        pool.shutdown(wait=False)
    share_moved = np.concatenate([[], *shares])
    return TrainingRun(
        params=params,
        opt_state=opt_state,
        records=records,
        loss=np.concatenate([[], *losses]),
        share_moved=share_moved if share_moved.size else None,
        compile_seconds=compile_seconds,
        interrupted=interrupt.requested and records[-1].epoch < epochs,
    )


class TestSet:
    """The test examples, classified in chunks so that the activations of a large set fit.

    Args:
      model: The network.
      params: Params of the kind that will be tested.
      data: Its test examples are kept on the device.
    """

    def __init__(self, model: nn.Module, params: optax.Params, data: Dataset) -> None:
        self._size = len(data.x_test)
        chunk = min(self._size, _TEST_CHUNK)
        fill = -self._size % chunk
        x = np.pad(data.x_test, [(0, fill)] + [(0, 0)] * (data.x_test.ndim - 1))
        y = np.pad(data.y_test, (0, fill), constant_values=-1)  # a label that is never predicted
        self._x = jnp.asarray(x.reshape(-1, chunk, *x.shape[1:]))
        self._y = jnp.asarray(y.reshape(-1, chunk))

        @jax.jit
        def count_correct(params: optax.Params, x: jax.Array, y: jax.Array) -> jax.Array:
            def in_chunk(chunk: tuple[jax.Array, jax.Array]) -> jax.Array:
                logits = model.apply({"params": params}, chunk[0])
                return jnp.sum(jnp.argmax(logits, axis=-1) == chunk[1])

            return jnp.sum(jax.lax.map(in_chunk, (x, y)))

        self._count_correct = count_correct.lower(params, self._x, self._y).compile()

    def accuracy(self, params: optax.Params) -> float:
        """The share of the test examples that are classified right."""
        return int(self._count_correct(params, self._x, self._y)) / self._size


def _compile_epoch(
    model: nn.Module,
    tx: optax.GradientTransformationExtraArgs,
    steps: int,
    batch_size: int,
    arguments: tuple[Any, ...],
) -> Callable[..., Any]:
    def loss_fn(params: optax.Params, batch: Any) -> tuple[jax.Array, jax.Array]:
        logits = model.apply({"params": params}, batch["x"])
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
        return jnp.mean(loss), jnp.mean(jnp.argmax(logits, axis=-1) == batch["y"])

    @jax.jit
    def run_epoch(
        params: optax.Params, opt_state: Any, x: jax.Array, y: jax.Array, key: jax.Array
    ) -> tuple[optax.Params, Any, dict[str, jax.Array]]:
        def step(carry: tuple[optax.Params, Any], indices: jax.Array) -> tuple[Any, Any]:
            params, opt_state = carry
            batch = {"x": x[indices], "y": y[indices]}
            e = optperm.evaluate(loss_fn, params, batch, has_aux=True)
            updates, opt_state = tx.update(e.grad, opt_state, params, **e.extra_args)
            params = optperm.apply_updates(params, updates, opt_state)
            metrics = {"loss": e.value, "accuracy": e.aux}
            for state in find_states(opt_state, optperm.PermuteByCyclesState):
                metrics["share_moved"] = state.share_moved
            return (params, opt_state), metrics

        order = jax.random.permutation(key, len(x))[: steps * batch_size]
        carry, metrics = jax.lax.scan(step, (params, opt_state), order.reshape(steps, batch_size))
        return *carry, metrics

    return run_epoch.lower(*arguments).compile()


def _run(run_epoch: Callable[..., Any], *arguments: object) -> Any:
    params, opt_state, metrics = jax.block_until_ready(run_epoch(*arguments))
    return params, opt_state, jax.device_get(metrics)
