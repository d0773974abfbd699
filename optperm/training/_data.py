"""Feed the batches of an epoch, from arrays or a stream, to the compiled steps."""

import inspect
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optperm.core import checks
from optperm.core.dtypes import as_arrays
from optperm.core.keys import as_key, key_data
from optperm.core.states import LoopState, find_states
from optperm.training import _processes as processes
from optperm.training._layout import Layout
from optperm.training._terminal import Interrupt, wait_for

# This number is far from the step counts that a method may fold into the same key.
_SHUFFLE_STREAM = 0x5348_5546
END = object()
# The minimum number of rows of metrics from a call, so that one program fits most call lengths.
_ROWS = 1024
_GRADIENT_CHUNK = 1000  # the number of examples on a device at once, for a full gradient
_SOON = 0.05  # seconds
# The maximum number of calls in a device's queue; for single batches, twice this number.
AHEAD = 8
_READ_AHEAD = 2**28  # the bytes of batches that a process reads before it compares them with others
_OVER, _FAILED = 0, -1  # in place of the number of examples, if a process has no further batch


def shuffled(
    key: int | jax.Array, epoch: int, num_examples: int, replace: bool = False
) -> jax.Array:
    """Return the order in which `fit` visits examples in memory, an int32 array (num_examples,).

    A step uses the next `batch_size` examples. Examples at the end that do not fill a batch are left
    out. The order depends only on these arguments, not on any JAX flag.

    Args:
      key: The key of `fit`.
      epoch: The number of the epoch, from 1.
      num_examples: The number of examples.
      replace: If True, draw examples with replacement, as `fit` does for a sampler.

    Example:
      >>> from optperm.training import shuffled
      >>> sorted(shuffled(key=0, epoch=1, num_examples=4).tolist())
      [0, 1, 2, 3]
    """
    checks.check_key("key", key)
    # Flags of JAX would change the random bits, and x64 would change the dtype and the draws.
    with jax.threefry_partitionable(True):
        of_shuffles = jax.random.fold_in(as_key(key_data(key)), _SHUFFLE_STREAM)
        of_epoch = jax.random.fold_in(of_shuffles, epoch)
        if replace:
            return jax.random.randint(of_epoch, (num_examples,), 0, num_examples, jnp.int32)
        return jax.random.permutation(of_epoch, jnp.arange(num_examples, dtype=jnp.int32))


def is_arrays(name: str, data: Any) -> bool:
    """Return True for a tree of arrays with the same leading axis, and False for a stream."""
    kinds = jax.Array | np.ndarray
    if isinstance(data, kinds | Mapping | tuple) and all(
        isinstance(leaf, kinds) for leaf in jax.tree.leaves(data)
    ):
        checks.check_arrays(name, data)
        return checks.count_examples(name, data) > 0
    is_stream = isinstance(data, Iterable) or (callable(data) and takes_epoch(data))
    # A dict of lists is also iterable, but its batches would be its keys.
    if not is_stream or isinstance(data, str | Mapping):
        wanted = "arrays (in a dict or tuple), an iterable of batches, or lambda epoch: ..."
        raise TypeError(f"{name} must be {wanted}, got {type(data).__name__}.")
    return False


def takes_epoch(function: Callable[..., Any]) -> bool:
    """Return True if a function can be called with only the number of an epoch."""
    try:
        inspect.signature(function).bind(1)
    except (TypeError, ValueError):  # a ValueError for a builtin without a signature
        return False
    return True


def read_all(
    name: str,
    data: Any,
    epoch: int,
    size: int | None,
    layout: Layout,
    interrupt: Interrupt | None = None,
) -> Iterator[Any]:
    """Yield all batches of some data, placed on the devices; arrays give `size` examples at once.

    A signal raises `Interrupted` before the next batch, or with several processes before the next batch
    whose number is a multiple of `AHEAD`.
    """
    for number, batch in enumerate(_read_all(name, data, epoch, size, layout)):
        if interrupt is not None:
            interrupt.check(together=number % AHEAD == 0)
        yield batch


def _read_all(name: str, data: Any, epoch: int, size: int | None, layout: Layout) -> Iterator[Any]:
    if is_arrays(name, data):
        total, parts = checks.count_examples(name, data), layout.parts
        step = max((size or total) // parts * parts, parts)
        for low in range(0, total, step):
            part = jax.tree.map(lambda leaf, low=low: leaf[low : low + step], data)
            yield layout.put_batch(part, local=False)
        return
    batches, count = pull(name, open_stream(name, data, epoch), math.inf), 0
    while (batch := next(batches)) is not END:
        count += 1
        yield layout.put_batch(batch, local=True)
    if not count:
        raise no_batch(name, epoch)


def open_stream(name: str, source: Any, epoch: int) -> Iterator[Any]:
    """Return the batches of an epoch, from an iterable or a function that returns an iterable."""
    return iter(source if hasattr(source, "__iter__") else source(epoch))


def no_batch(name: str, epoch: int) -> ValueError:
    """Return the error for an epoch without a batch."""
    advice = (
        "is it empty? An iterator can be used only once: pass a list, a loader or lambda epoch: ..."
    )
    return ValueError(f"{name} gives no batch in epoch {epoch}: {advice}")


def pull(name: str, iterator: Iterator[Any], limit: float) -> Iterator[Any]:
    """Yield at most `limit` batches, then `END` if no process has another.

    With several processes, each process reads some batches ahead. The processes then compare in one
    exchange what they have, so that they wait for each other rarely. All processes must call this.
    """
    count, ahead = 0, AHEAD
    while count < limit and jax.process_count() == 1:
        batch = next(iterator, END)
        yield batch if batch is END else _as_batch(name, batch)
        count += 1
        if batch is END:
            return
    while count < limit:
        batches, end, size = _pull_together(name, iterator, int(min(ahead, limit - count)))
        yield from batches
        count, ahead = count + len(batches), max(AHEAD, _READ_AHEAD // max(size, 1))
        if isinstance(end, Exception):
            raise end
        if end is END:
            yield END
            return


def _pull_together(name: str, iterator: Iterator[Any], limit: int) -> tuple[list[Any], Any, int]:
    """Return batches that all processes have, what follows, and the bytes of the largest batch.

    After the batches follows `END`, the error of this or another process, or None if more may follow.
    """
    batches, failure = list[Any](), None
    # The number of examples of each batch; then _OVER, or _FAILED after an error.
    sizes, largest = np.full(limit + 1, _OVER, np.int64), 0
    try:
        while len(batches) < limit and (batch := next(iterator, END)) is not END:
            arrays = _as_batch(name, batch)
            sizes[len(batches)] = checks.count_examples(
                f"A batch of {name}", arrays, has_scalars=True
            )
            batches.append(arrays)
            largest = max(largest, sum(leaf.nbytes for leaf in jax.tree.leaves(arrays)))
    except Exception as error:
        sizes[len(batches)], failure = _FAILED, error
    found = processes.gather(np.append(sizes, largest))
    largest, found = int(found[:, -1].max()), found[:, :-1]
    # If parts had different sizes, the mean over processes would not be the mean over examples.
    agree = (found == found[:1]).all(axis=0) & (found[0] > 0)
    count = int(np.argmin(agree))
    column = found[:, count]
    end: Any = None
    if failure is not None and len(batches) == count:
        end = failure
    elif column.min() == _FAILED:
        end = RuntimeError(f"Another process could not load a batch of {name}: see its error.")
    elif column.max() == _OVER:
        end = END if count < limit else None
    elif column.min() == _OVER:
        without = np.flatnonzero(column == _OVER).tolist()
        says = f"{name} has no more batches in the processes {without}, but one in the others"
        end = ValueError(f"{says}: all need the same number of batches per epoch.")
    elif column.max() > 0:
        says = f"A batch of {name} has {column.tolist()} examples in the processes"
        end = ValueError(f"{says}: all need the same number.")
    return batches[:count], end, largest


def _as_batch(name: str, batch: Any) -> Any:
    arrays = as_arrays(batch)
    checks.check_arrays(f"A batch of {name}", arrays)
    return arrays


class Position(NamedTuple):
    """The steps done, the epoch of the next step, and the steps done within that epoch."""

    step: int = 0
    epoch: int = 1
    offset: int = 0


class Fed(NamedTuple):
    """The outcome of some steps."""

    carry: Any
    columns: dict[str, Any]  # float32, one row per step, perhaps with unused rows at the end
    steps: int
    is_over: bool  # True if the epoch ends with these steps
    error: Exception | None = None  # raised instead of the next step


def make_feed(
    data: Any, batch_size: Any, key: Any, layout: Layout, most: int, carry: Any
) -> "ArrayFeed | StreamFeed":
    """Return the feed of `train_data`, for calls of at most a given number of steps on a carry."""
    if not is_arrays("train_data", data):
        return StreamFeed(data, batch_size, layout)
    asked = [state.for_loop() for state in find_states(carry.opt_state, LoopState)]
    size = checks.count_examples("train_data", data)
    # Each replica has its own number; a process reads the numbers on its devices.
    made_for = [jnp.asarray(each.num_data) for each in asked if each.num_data is not None]
    shards = [np.ravel(shard.data) for n in made_for for shard in n.addressable_shards]
    if wrong := [int(n) for numbers in shards for n in numbers if n != size]:
        raise ValueError(
            f"The optimizer has num_data={wrong[0]}, but train_data has {size} examples."
        )
    replace = any(each.draws_examples for each in asked)
    return ArrayFeed(data, batch_size, key, layout, most, replace)


class ArrayFeed:
    """Examples in memory, shuffled in each epoch; each device stores all examples.

    With `replace`, examples are drawn with replacement, because shuffled batches are not independent.

    Attributes:
      look: A function that is called with a batch before the first step.
    """

    def __init__(
        self, data: Any, batch_size: Any, key: Any, layout: Layout, most: int, replace: bool
    ) -> None:
        size, parts = checks.count_examples("train_data", data), layout.parts
        checks.check_count("batch_size", batch_size)
        if batch_size > size:
            raise ValueError(
                f"batch_size must be at most {size}, the number of examples, got {batch_size}."
            )
        if batch_size % parts:
            says = "counts the examples of all devices together, and must be a multiple of"
            raise ValueError(f"batch_size {says} {parts}, got {batch_size}.")
        self._data, self._size, self._layout = data, size, layout
        self._key = key
        self._replace = replace
        self.steps_per_epoch, self._batch_size = size // batch_size, int(batch_size)
        self.rows = min(max(_ROWS, most), self.steps_per_epoch)
        self._examples, self._epoch = jax.tree.map(layout.put, data), 0
        self.look: Callable[[Any], None] | None = None
        self._calls: list[tuple[dict[str, Any], int]] = []  # calls that may still be running
        self._began = -math.inf

    def facts(self) -> dict[str, Any]:
        """Return the facts that identify the batches."""
        forms = jax.tree.map(lambda leaf: f"{leaf.dtype}{list(leaf.shape)}", self._data)
        facts = {"key": jax.device_get(key_data(self._key)).tolist()}
        facts |= {"batch_size": self._batch_size, "train_data": str(forms)}
        facts |= {"batches": "drawn with replacement"} if self._replace else {}
        return facts | {"the digest of train_data": processes.digest(self._data)}

    def run(self, steps: Any, carry: Any, at: Position, limit: int, interrupt: Interrupt) -> Fed:
        """Take at most `limit` steps, up to the end of the epoch. The carry is donated."""
        if at.epoch != self._epoch:
            order = np.asarray(shuffled(self._key, at.epoch, self._size, self._replace))
            order = order[: self.steps_per_epoch * self._batch_size]
            order = order.reshape(self.steps_per_epoch, -1)
            self._order = self._layout.put(order, None, *self._layout.batch[:1])
            self._epoch = at.epoch
        look, self.look = self.look, None
        if look is not None:
            look(self.example())
        first, last = at.offset, min(at.offset + limit, self.steps_per_epoch)
        shared = self._examples, np.int32(first), np.int32(last)
        with self._layout.context():
            carry, columns = steps.many(carry, shared, self._order)
        self._calls.append((columns, last - first))
        before, self._began = self._began, time.perf_counter()
        # Short calls are queued, so that devices are never idle between calls. After a long call, wait,
        # so that a signal takes effect after this call, and its rows leave the device.
        while len(self._calls) > (AHEAD if self._began - before < _SOON else 0):
            done, count = self._calls.pop(0)
            wait_for(done["loss"])
            done |= {name: np.array(rows[:count]) for name, rows in jax.device_get(done).items()}
        return Fed(carry, columns, last - first, last == self.steps_per_epoch)

    def example(self) -> Any:
        """Return a batch, placed on the devices."""
        first = jax.tree.map(lambda leaf: leaf[: self._batch_size], self._data)
        return self._layout.put_batch(first, local=False)

    def all_batches(self, epoch: int, interrupt: Interrupt | None = None) -> Iterator[Any]:
        """Yield all examples, placed on the devices, including the last ones that fill no batch."""
        size = _GRADIENT_CHUNK * self._layout.parts
        return read_all("train_data", self._data, epoch, size, self._layout, interrupt)


class StreamFeed:
    """Batches from an iterable, or from a callable that returns an iterable for each epoch.

    A batch is requested only for its step, so the remaining batches stay in the iterator. Several
    processes read some batches ahead within a call.

    Attributes:
      look: A function that is called with the first batch before its step.
    """

    steps_per_epoch, rows = None, 1

    def __init__(self, source: Any, batch_size: Any, layout: Layout) -> None:
        if batch_size is not None:
            raise ValueError(
                "batch_size is for arrays, but train_data yields batches: leave batch_size out."
            )
        self._source, self._layout = source, layout
        self.look: Callable[[Any], None] | None = None
        self._iterator: Any = None
        self._last: Any = None  # the batch of the last step
        self._at: tuple[int, int] | None = None  # the epoch and offset of the iterator, if known

    def facts(self) -> dict[str, Any]:
        """Return the facts that identify the batches; a stream has only its kind."""
        return {"train_data": "an iterable of batches"}

    def go_to(self, at: Position, states: list[str] | None = None) -> None:
        """Move the iterator to a step of an epoch with a state from `states`, or by dropping batches."""
        epoch, offset = at.epoch, at.offset
        if self._at == (epoch, offset):
            return
        self._iterator = open_stream("train_data", self._source, epoch)
        self._at = epoch, offset
        if states is not None:
            state = json.loads(states[jax.process_index()])
            self._iterator.set_state(state.encode("latin-1") if isinstance(state, str) else state)
            return
        for index in range(offset):
            if next(self._iterator, END) is END:
                says = f"train_data ended after {index} of {offset} batches of epoch {epoch}"
                raise ValueError(f"{says}: to resume, pass a new iterator of the same batches.")

    def run(self, steps: Any, carry: Any, at: Position, limit: int, interrupt: Interrupt) -> Fed:
        """Take at most `limit` steps, up to the end of the epoch. The carry is donated."""
        self.go_to(at)
        self._at = None  # unknown until these steps are done, or if they fail
        rows: list[dict[str, jax.Array]] = []
        epoch, offset, is_over, failure = at.epoch, at.offset, False, None
        length = len(self._source) if isinstance(self._source, list | tuple) else None
        is_alone = jax.process_count() == 1  # several processes stop together, between calls
        batches = pull("train_data", self._iterator, limit)
        with self._layout.context():
            while len(rows) < limit and not is_over and not (is_alone and interrupt.number):
                try:
                    batch = next(batches)
                    if is_over := batch is END:
                        break
                    self._layout.check_shares("A batch of train_data", batch)
                    if any(jnp.shape(leaf)[:1] == (0,) for leaf in jax.tree.leaves(batch)):
                        raise ValueError("A batch of train_data contains no examples.")
                    self._last = batch = self._layout.put_batch(batch, local=True)
                    look, self.look = self.look, None
                    if look is not None:
                        look(batch)
                    carry, row = steps.one(carry, (), batch)
                except Exception as error:  # from the loader or from the loss function
                    if not rows:
                        raise
                    failure = error  # raised after the previous steps are recorded
                    break
                rows.append(row)
                is_over = offset + len(rows) == length
                # Wait rarely, since waking up takes time, but never run far ahead of the devices.
                if len(rows) > AHEAD and len(rows) % AHEAD == 0:
                    rows[-1 - AHEAD]["loss"].block_until_ready()
        if is_over and not offset + len(rows):
            raise no_batch("train_data", epoch)
        self._at = None if failure else (epoch, offset + len(rows))
        with self._layout.context():
            host = jax.device_get(self._layout.average_rows(rows))
        names = dict.fromkeys(name for row in host for name in row)
        columns = {x: np.array([row.get(x, np.nan) for row in host], np.float32) for x in names}
        return Fed(carry, columns, len(rows), is_over, failure)

    def example(self) -> Any:
        """Return the last batch, placed on the devices; None if a resumed run has taken none."""
        return self._last

    def all_batches(self, epoch: int, interrupt: Interrupt | None = None) -> Iterator[Any]:
        """Yield all batches of an epoch, placed on the devices and read again from the source."""
        return read_all("train_data", self._source, epoch, None, self._layout, interrupt)

    def states(self) -> list[str] | None:
        """Return each process's state of an iterator that has one, such as Grain's, as JSON."""
        state = None
        # After a failed step, the iterator is ahead of training, so its state would skip a batch.
        if self._at is not None and hasattr(self._iterator, "set_state"):
            state = self._iterator.get_state()
        state = state.decode("latin-1") if isinstance(state, bytes) else state
        texts = processes.gather_texts(json.dumps(state, default=int))
        return None if "null" in texts else texts
