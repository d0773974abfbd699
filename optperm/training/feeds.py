"""Where the batches of an epoch come from, and the calls of the compiled steps that take them."""

import base64
import inspect
import json
import time
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from optperm.contract import checks
from optperm.training import data as datas
from optperm.training import processes
from optperm.training.interrupt import Interrupt
from optperm.training.layout import Layout, put_whole
from optperm.training.steps import Steps

# Rows of metrics that a call gives back at least, so that one program serves calls of most lengths.
_ROWS = 1024
# Batches that may wait on the devices for steps before them.
_AHEAD = 4
_GRADIENT_CHUNK = 1000  # examples on a device at once, for a full gradient
_END = object()
# Of each step by name, float32 (steps,).
Columns = dict[str, np.ndarray]


class Fed(NamedTuple):
    """What came of some steps.

    Attributes:
      carry: After them.
      columns: Metrics of each.
      steps: How many.
      is_over: Whether the epoch ends with them.
      error: What ended them before their time.
    """

    carry: Any
    columns: Columns
    steps: int
    is_over: bool
    error: Exception | None = None


class Feed(Protocol):
    """A source of batches."""

    def begin(self, epoch: int, offset: int, state: str | None = None) -> None:
        """Goes to a step of an epoch; epochs count from 1, steps from 0.

        Args:
          epoch: From 1.
          offset: Steps of it that have been taken.
          state: What `state` gave there.
        """
        ...

    def run(self, steps: Steps, carry: Any, limit: int, interrupt: Interrupt) -> Fed:
        """Takes steps until as many are taken, or the epoch is over. The carry is given up."""
        ...

    def all_batches(self, epoch: int) -> Iterator[Any]:
        """All examples of an epoch, placed."""
        ...

    def state(self) -> str | None:
        """Where an iterator that can say so has come."""
        ...


class ArrayFeed:
    """Examples in memory, shuffled anew in each epoch; all of them are kept on each device.

    Args:
      data: A tree of arrays of one leading axis.
      batch_size: Examples a step, of all devices together.
      seed: Seed of the shuffles.
      layout: Where.
      steps_per_call: The most steps by one call of the compiled program.

    Raises:
      TypeError: If `batch_size` or `seed` is of the wrong type.
      ValueError: If one is out of range, there are no examples, or the leaves disagree.
    """

    def __init__(
        self, data: Any, *, batch_size: int, seed: int, layout: Layout, steps_per_call: int
    ) -> None:
        size = datas.num_examples("train_data", data)
        checks.check_count("batch_size", batch_size)
        if batch_size > size:
            raise ValueError(
                f"batch_size must be at most the number of examples in train_data, {size}, got "
                f"{batch_size}."
            )
        if batch_size % layout.parts:
            raise ValueError(
                f"batch_size counts the examples of all {layout.parts} devices or replicas together, "
                f"and must be a multiple of {layout.parts}, got {batch_size}."
            )
        self._size, self._batch_size, self._seed = size, batch_size, seed
        self._layout, self._data = layout, data
        self.steps_per_epoch = size // batch_size
        self.rows = min(max(_ROWS, steps_per_call), self.steps_per_epoch)
        self._steps_per_call = min(steps_per_call, self.rows)
        whole = layout.sharding()
        self._examples = jax.tree.map(
            lambda leaf: jax.numpy.asarray(leaf) if whole is None else put_whole(leaf, whole), data
        )

    def begin(self, epoch: int, offset: int, state: str | None = None) -> None:
        """See `Feed`."""
        del state
        order = np.asarray(datas.shuffled(self._seed, epoch, self._size))
        order = order[: self.steps_per_epoch * self._batch_size].reshape(self.steps_per_epoch, -1)
        sharding = self._layout.sharding(None, self._layout.batch[0] if self._layout.mesh else None)
        self._order = jax.numpy.asarray(order) if sharding is None else put_whole(order, sharding)
        self._offset = offset

    def run(self, steps: Steps, carry: Any, limit: int, interrupt: Interrupt) -> Fed:
        """See `Feed`."""
        del interrupt
        first = self._offset
        last = min(first + min(limit, self._steps_per_call), self.steps_per_epoch)
        shared = self._examples, np.int32(first), np.int32(last)
        try:
            with self._layout.context():
                new, columns = steps.many(carry, shared, self._order)
        except Exception as error:
            return Fed(carry, {}, 0, False, error)
        columns = {name: leaf[: last - first] for name, leaf in fetched(columns).items()}
        self._offset = last
        return Fed(new, columns, last - first, last == self.steps_per_epoch)

    def all_batches(self, epoch: int) -> Iterator[Any]:
        """See `Feed`; those examples included that no step of an epoch takes."""
        del epoch
        parts = self._layout.parts if self._layout.mesh is not None else 1
        for low, high in datas.pieces(self._size, _GRADIENT_CHUNK * parts, parts):
            batch = jax.tree.map(lambda leaf, low=low, high=high: leaf[low:high], self._data)
            yield self._layout.put_batch(batch, local=False)

    def state(self) -> str | None:
        """See `Feed`. The shuffles follow from the seed."""
        return None


class StreamFeed:
    """Batches from an iterable, or from a callable that gives one for each epoch.

    None is asked for before the step that takes it: what is left stays in the iterator.

    Args:
      source: An iterable, gone through anew in each epoch, or a callable of the epoch's number.
      layout: Where. Each process brings its own part of a batch, all of them equally many examples.

    Raises:
      TypeError: If the source is neither.
    """

    steps_per_epoch = None
    rows = 1

    def __init__(self, source: Any, *, layout: Layout) -> None:
        datas.check_iterable("train_data", source)
        self.source, self._layout = source, layout
        self._iterator: Any = None
        self._is_used = False
        if callable(source) and not hasattr(source, "__iter__"):
            try:
                inspect.signature(source).bind(1)
            except TypeError as error:
                raise TypeError(
                    "A callable train_data is called with the number of the epoch, from 1, and gives "
                    f"its batches: let it take one argument ({error})."
                ) from error

    def take_over(self, earlier: Any) -> None:
        """Goes on with the iterator of an earlier feed of the same source, where that has come."""
        if isinstance(earlier, StreamFeed) and earlier.source is self.source:
            self._iterator, self._epoch = earlier._iterator, earlier._epoch
            self._offset, self._is_used = earlier._offset, earlier._is_used
            self._length = earlier._length

    def _open(self, epoch: int) -> Iterator[Any]:
        source = self.source
        if not hasattr(source, "__iter__"):
            source = source(epoch)
            if not hasattr(source, "__iter__"):
                raise TypeError(
                    "The train_data of an epoch must be an iterable of batches, got "
                    f"{type(source).__name__}."
                )
        self._length = len(source) if isinstance(source, list | tuple) else None
        iterator = iter(source)
        if iterator is self.source:
            if self._is_used:
                raise ValueError(
                    "train_data can be gone through only once (it is an iterator, such as a generator), "
                    "and is needed again. Pass a list, a data loader that begins anew, or a function "
                    "that makes a generator: train_data=lambda epoch: batches()."
                )
            self._is_used = True
        return iterator

    def begin(self, epoch: int, offset: int, state: str | None = None) -> None:
        """See `Feed`. Where no state is given, batches that were taken before are dropped."""
        if self._iterator is not None and (self._epoch, self._offset) == (epoch, offset):
            return
        self._iterator = self._open(epoch)
        self._epoch, self._offset = epoch, offset
        if state is not None:
            kind, content = json.loads(json.loads(state)[jax.process_index()])
            self._iterator.set_state(base64.b64decode(content) if kind == "bytes" else content)
            return
        for index in range(offset):
            if next(self._iterator, _END) is _END:
                raise ValueError(
                    f"train_data ended after {index} batches of epoch {epoch}, but training had taken "
                    f"{offset} of them: to go on exactly, it has to give the same batches again."
                )

    def state(self) -> str | None:
        """See `Feed`. That of all processes."""
        if not hasattr(self._iterator, "get_state") or not hasattr(self._iterator, "set_state"):
            return None
        state = self._iterator.get_state()
        kind = "bytes" if isinstance(state, bytes) else "json"
        content = base64.b64encode(state).decode() if isinstance(state, bytes) else state
        here = json.dumps([kind, content], default=lambda number: number.item())
        return json.dumps(processes.gathered_texts(here))

    def run(self, steps: Steps, carry: Any, limit: int, interrupt: Interrupt) -> Fed:
        """See `Feed`."""
        rows: list[dict[str, jax.Array]] = []
        is_over, error = False, None
        with self._layout.context():
            while len(rows) < limit and not interrupt.requested:
                try:
                    batch = pull(self._iterator, "train_data")
                    if batch is _END:
                        is_over = True
                        break
                    batch = self._placed(batch)
                    carry, row = steps.one(carry, (), batch)
                except Exception as raised:
                    error = raised
                    break
                rows.append(row)
                self._offset += 1
                if len(rows) > _AHEAD:
                    rows[-1 - _AHEAD]["loss"].block_until_ready()
                if self._offset == self._length:
                    is_over = True
                    break
        if is_over and not self._offset:
            error = ValueError(
                f"train_data gives no batch in epoch {self._epoch}. A generator can be gone through "
                "only once: pass a function that makes one, train_data=lambda epoch: batches()."
            )
        host = jax.device_get(rows)
        columns = {
            name: np.stack([row[name] for row in host]) for name in (rows[0] if rows else ())
        }
        return Fed(carry, columns, len(rows), is_over, error)

    def _placed(self, batch: Any) -> Any:
        parts = self._layout.parts
        if parts > 1 and self._layout.mapped:
            size = datas.num_examples("A batch of train_data", batch)
            local = parts // jax.process_count()
            if size % local:
                raise ValueError(
                    f"A batch of train_data must be one that {local} replicas can share, got {size} "
                    "examples. Drop or fill up a last batch that is smaller."
                )
        return self._layout.put_batch(batch, local=True)

    def all_batches(self, epoch: int) -> Iterator[Any]:
        """See `Feed`."""
        return placed_batches(self._open(epoch), self._layout, "train_data")


def pull(iterator: Iterator[Any], name: str) -> Any:
    """The next batch, or `_END` where there is none in any process. All of them have to ask.

    Raises:
      ValueError: If the processes bring parts of different sizes, which would not count alike.
      RuntimeError: If another process fails to bring one.
    """
    if jax.process_count() == 1:
        batch = next(iterator, _END)
        return batch if batch is _END else datas.as_arrays(batch)
    batch, failure = _END, None
    try:
        batch = next(iterator, _END)
        batch = batch if batch is _END else datas.as_arrays(batch)
        size = 0 if batch is _END else datas.num_examples(f"A batch of {name}", batch)
    except Exception as error:
        size, failure = -1, error
    sizes = processes.gathered(np.int32(size))
    if failure is not None:
        raise failure
    if sizes.min() < 0:
        raise RuntimeError(
            f"another process could not load a batch of {name}: its message says why."
        )
    if sizes.min() == 0:
        return _END
    if sizes.min() != sizes.max():
        raise ValueError(
            f"A batch of {name} has {sizes.tolist()} examples in the processes: each must bring equally "
            "many, or its examples would not count like those of the others."
        )
    return batch


def placed_batches(iterator: Iterator[Any], layout: Layout, name: str) -> Iterator[Any]:
    """The batches of an iterator on the devices."""
    while (batch := pull(iterator, name)) is not _END:
        yield layout.put_batch(batch, local=True)


def fetched(columns: dict[str, jax.Array]) -> Columns:
    """What a call computes, once it has: signals are heard meanwhile."""
    first, start = next(iter(columns.values())), time.perf_counter()
    while not first.is_ready():
        time.sleep(min(0.01 * (time.perf_counter() - start) + 1e-5, 0.1))
    return jax.device_get(columns)
