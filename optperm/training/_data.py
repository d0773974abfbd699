"""Feed the batches of an epoch, from arrays or a stream, to the compiled steps."""

import inspect
import itertools
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

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
# The number of rows of metrics from a call, at least `MOST_TOGETHER`: one program fits all lengths.
_ROWS = 1024
_GRADIENT_CHUNK = 1000  # the number of examples on a device at once, for a full gradient
_SOON = 0.05  # seconds
# The maximum number of calls in a device's queue; for single batches, twice this number.
AHEAD = 8
# With several processes, the maximum number of steps of a call, and the bytes of batches that a process
# reads for a call before it compares them with the others.
MOST_TOGETHER, _READ_AHEAD = 1000, 2**28
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
    count = 0
    for batch in _read_stream(name, open_stream(name, data, epoch)):
        count += 1
        yield layout.put_batch(batch, local=True)
    if not count:
        raise no_batch(name, epoch)


def _read_stream(name: str, iterator: Iterator[Any]) -> Iterator[Any]:
    """Yield all batches; several processes read some batches ahead, and then compare them."""
    if jax.process_count() == 1:
        yield from (_as_batch(name, batch) for batch in iterator)
        return
    end, ahead = None, AHEAD
    while end is not END:
        _, (batches, end, largest) = meet(0, _read_some(name, lambda: iterator, ahead))
        ahead = _count_ahead(largest)
        yield from batches
        if isinstance(end, Exception):
            raise end


def open_stream(name: str, source: Any, epoch: int) -> Iterator[Any]:
    """Return the batches of an epoch, from an iterable or a function that returns an iterable."""
    batches = source if hasattr(source, "__iter__") else source(epoch)
    if not isinstance(batches, Iterable):
        raise TypeError(
            f"{name}({epoch}) must return an iterable of batches, got {checks.shown(batches)}."
        )
    return iter(batches)


def no_batch(name: str, epoch: int) -> ValueError:
    """Return the error for an epoch without a batch."""
    advice = (
        "is it empty? An iterator can be used only once: pass a list, a loader or lambda epoch: ..."
    )
    return ValueError(f"{name} gives no batch in epoch {epoch}: {advice}")


class Read(NamedTuple):
    """The batches that a process has read for a call, before the processes meet.

    Attributes:
      name: The name of the data in messages.
      batches: The batches.
      limit: The maximum number of batches.
      sizes: The number of examples of each batch, then `_OVER`, or `_FAILED` after an error, int64. The
        length is the same in all processes, even after an error; without entries, nothing is compared.
      largest: The bytes of the largest batch.
      failure: The error.
    """

    name: str = "data"
    batches: Sequence[Any] = ()
    limit: int = 0
    sizes: Sequence[int] | np.ndarray = ()
    largest: int = 0
    failure: Exception | None = None


class Common(NamedTuple):
    """The batches that all processes have, and what follows.

    Attributes:
      batches: The batches.
      end: `END`, the error of this or another process, or None if more batches may follow.
      largest: The bytes of the largest batch of all processes.
    """

    batches: Sequence[Any] = ()
    end: Any = None
    largest: int = 0


def _read_some(name: str, begin: Callable[[], Iterator[Any]], limit: int) -> Read:
    """Read at most `limit` batches of this process; the result holds an error instead of raising it."""
    batches, sizes, largest = list[Any](), np.full(MOST_TOGETHER, _OVER, np.int64), 0
    failure: Exception | None = None
    try:
        iterator = begin()
        while len(batches) < limit and (batch := next(iterator, END)) is not END:
            arrays = _as_batch(name, batch)
            size = checks.count_examples(f"A batch of {name}", arrays, has_scalars=True)
            sizes[len(batches)] = size
            batches.append(arrays)
            largest = max(largest, sum(leaf.nbytes for leaf in jax.tree.leaves(arrays)))
    except Exception as error:
        sizes[len(batches)], failure = _FAILED, error
    return Read(name, batches, limit, sizes, min(largest, _READ_AHEAD), failure)


def _count_ahead(largest: int) -> int:
    """Return the number of batches to read at once, from the bytes of the largest batch so far."""
    return min(max(AHEAD, _READ_AHEAD // max(largest, 1)), MOST_TOGETHER)


def meet(code: int, read: Read) -> tuple[int, Common]:
    """Return the maximum code of all processes, and the batches that all processes have.

    All processes must call this before each call of steps. Nothing else is exchanged for the call.
    """
    found = processes.gather(np.array([code, read.largest, *read.sizes], np.int64))
    code, largest = (int(column.max()) for column in found[:, :2].T)
    if code or not len(read.sizes):
        return code, Common()
    return code, _compare(read, found[:, 2:])._replace(largest=largest)


def _compare(read: Read, sizes: np.ndarray) -> Common:
    # If parts had different sizes, the mean over processes would not be the mean over examples.
    agree = (sizes == sizes[:1]).all(axis=0) & (sizes[0] > 0)
    count = int(np.argmin(agree)) if not agree.all() else len(agree)
    if count == read.limit:
        return Common(read.batches)
    column, batches = sizes[:, count], read.batches[:count]
    end: Any = None
    if read.failure is not None and len(read.batches) == count:
        end = read.failure
    elif column.min() == _FAILED:
        end = RuntimeError(f"Another process could not load a batch of {read.name}: see its error.")
    elif column.max() == _OVER:
        end = END
    elif column.min() == _OVER:
        without = np.flatnonzero(column == _OVER).tolist()
        says = f"{read.name} has no more batches in the processes {without}, but one in the others"
        end = ValueError(f"{says}: all need the same number of batches per epoch.")
    else:
        says = f"A batch of {read.name} has {column.tolist()} examples in the processes"
        end = ValueError(f"{says}: all need the same number.")
    return Common(batches, end)


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
    data: Any, batch_size: Any, key: Any, layout: Layout, carry: Any
) -> "ArrayFeed | StreamFeed":
    """Return the feed of `data`, for steps of a carry."""
    if not is_arrays("data", data):
        return StreamFeed(data, batch_size, layout)
    asked = [state.for_loop() for state in find_states(carry.opt_state, LoopState)]
    size = checks.count_examples("data", data)
    replace = any(each.draws_examples for each in asked)
    feed = ArrayFeed(data, batch_size, key, layout, replace)
    if wrong := _find_other([each.num_data for each in asked], size):
        raise ValueError(f"The optimizer has num_data={wrong[0]}, but data has {size} examples.")
    if find_states(carry.opt_state, optax.MultiStepsState):
        return feed  # the optimizer's batch has several of these batches
    per_gradient = batch_size // (layout.replicas if layout.own else 1)
    if wrong := _find_other([each.batch_size for each in asked], per_gradient):
        says = f"The optimizer was made for batch_size={wrong[0]}"
        raise ValueError(f"{says}, but each of its gradients has {per_gradient} examples.")
    return feed


def _find_other(made_for: Iterable[jax.Array | None], here: int) -> list[int]:
    """Return the numbers for which optimizers were made, if they differ from the number here."""
    # Each replica has its own number; a process reads the numbers on its devices.
    known = [jnp.asarray(number) for number in made_for if number is not None]
    shards = [np.ravel(shard.data) for number in known for shard in number.addressable_shards]
    return [int(number) for numbers in shards for number in numbers if number != here]


class ArrayFeed:
    """Examples in memory, shuffled in each epoch; each device stores all examples.

    With `replace`, examples are drawn with replacement, because shuffled batches are not independent.

    Attributes:
      look: A function that is called with a batch before the first step.
    """

    def __init__(self, data: Any, batch_size: Any, key: Any, layout: Layout, replace: bool) -> None:
        size, parts = checks.count_examples("data", data), layout.parts
        if batch_size is None:
            raise TypeError(
                "Pass batch_size, the number of examples per step, since data has arrays."
            )
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
        self.rows = min(_ROWS, self.steps_per_epoch)
        self._examples, self._epoch = jax.tree.map(layout.put, data), 0
        self.look: Callable[[Any], None] | None = None
        self._calls: list[tuple[dict[str, Any], int]] = []  # calls that may still be running
        self._began = -math.inf

    def facts(self) -> dict[str, Any]:
        """Return the facts that identify the batches."""
        forms = jax.tree.map(lambda leaf: f"{leaf.dtype}{list(leaf.shape)}", self._data)
        facts = {"key": jax.device_get(key_data(self._key)).tolist()}
        facts |= {"batch_size": self._batch_size, "data": str(forms)}
        facts |= {"batches": "drawn with replacement"} if self._replace else {}
        return facts | {"the digest of data": processes.digest(self._data)}

    def read(self, at: Position, limit: int) -> Read:
        """Return nothing to compare: all processes have the same arrays."""
        return Read()

    def run(
        self, steps: Any, carry: Any, at: Position, limit: int, interrupt: Interrupt, _: Common
    ) -> Fed:
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
        return read_all("data", self._data, epoch, size, self._layout, interrupt)


class StreamFeed:
    """Batches from an iterable, or from a callable that returns an iterable for each epoch.

    A batch is requested only for its step, so the remaining batches stay in the iterator. Several
    processes read all batches of a call before they meet.

    Attributes:
      look: A function that is called with the first batch before its step.
    """

    steps_per_epoch, rows = None, 1

    def __init__(self, source: Any, batch_size: Any, layout: Layout) -> None:
        if batch_size is not None:
            says = "batch_size is for arrays (in a dict or tuple), but data yields batches"
            raise ValueError(f"{says}: leave batch_size out.")
        self._source, self._layout = source, layout
        self.look: Callable[[Any], None] | None = None
        self._iterator: Any = None
        self._last: Any = None  # the batch of the last step
        self._at: tuple[int, int] | None = None  # the epoch and offset of the iterator, if known
        self._ahead = AHEAD  # the number of batches that several processes read for a call
        self._unused: Read | None = None  # the batches that are read, but not trained on yet
        self._state: Any = None  # the state of the iterator before these batches

    def facts(self) -> dict[str, Any]:
        """Return the facts that identify the batches; a stream has only its kind."""
        return {"data": "an iterable of batches"}

    def go_to(self, at: Position, states: list[str] | None = None) -> None:
        """Move the iterator to a step of an epoch with a state from `states`, or by dropping batches."""
        epoch, offset = at.epoch, at.offset
        if self._at == (epoch, offset):
            return
        self._iterator = open_stream("data", self._source, epoch)
        self._at = epoch, offset
        if states is not None:
            state = json.loads(states[jax.process_index()])
            self._iterator.set_state(state.encode("latin-1") if isinstance(state, str) else state)
            return
        for index in range(offset):
            if next(self._iterator, END) is END:
                says = f"data ended after {index} of {offset} batches of epoch {epoch}"
                raise ValueError(f"{says}: to resume, pass a new iterator of the same batches.")

    def read(self, at: Position, limit: int) -> Read:
        """Read what several processes compare; a single process reads within `run`."""
        if jax.process_count() == 1:
            return Read()
        if self._unused is None and limit:

            def begin() -> Iterator[Any]:
                self.go_to(at)
                self._state = self._get_state()
                return self._iterator

            self._unused = _read_some("data", begin, min(limit, self._ahead))
        return self._unused or _read_some("data", lambda: iter(()), 0)

    def run(
        self,
        steps: Any,
        carry: Any,
        at: Position,
        limit: int,
        interrupt: Interrupt,
        common: Common,
    ) -> Fed:
        """Take at most `limit` steps, up to the end of the epoch. The carry is donated."""
        is_alone = jax.process_count() == 1  # several processes stop together, between calls
        if is_alone:
            self.go_to(at)
            batches = itertools.chain(self._iterator, [END])
        else:
            limit, self._ahead = len(common.batches) + 1, _count_ahead(common.largest)
            batches = itertools.chain(common.batches, [common.end])
        self._at = None  # unknown until these steps are done, or if they fail
        rows: list[dict[str, jax.Array]] = []
        epoch, offset, is_over, failure = at.epoch, at.offset, False, None
        length = len(self._source) if isinstance(self._source, list | tuple) else None
        with self._layout.context():
            while len(rows) < limit and not is_over and not (is_alone and interrupt.number):
                try:
                    batch = next(batches)
                    if is_over := batch is END:
                        break
                    if batch is None:  # more batches follow in the next call
                        break
                    if isinstance(batch, Exception):
                        raise batch
                    batch = _as_batch("data", batch) if is_alone else batch
                    self._layout.check_shares("A batch of data", batch)
                    if any(jnp.shape(leaf)[:1] == (0,) for leaf in jax.tree.leaves(batch)):
                        raise ValueError("A batch of data contains no examples.")
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
            raise no_batch("data", epoch)
        self._at = None if failure else (epoch, offset + len(rows))
        self._unused = self._state = None
        with self._layout.context():
            host = jax.device_get(self._layout.average_rows(rows))
        names = dict.fromkeys(name for row in host for name in row)
        columns = {x: np.array([row.get(x, np.nan) for row in host], np.float32) for x in names}
        return Fed(carry, columns, len(rows), is_over, failure)

    def example(self) -> Any:
        """Return the last batch, placed on the devices; None if a resumed run has taken none."""
        return self._last

    def _get_state(self) -> Any:
        has_state = hasattr(self._iterator, "set_state")
        return self._iterator.get_state() if has_state else None

    def all_batches(self, epoch: int, interrupt: Interrupt | None = None) -> Iterator[Any]:
        """Yield all batches of an epoch, placed on the devices and read again from the source."""
        return read_all("data", self._source, epoch, None, self._layout, interrupt)

    def states(self) -> list[str] | None:
        """Return each process's state of an iterator that has one, such as Grain's, as JSON."""
        # If training ended before the steps of the batches that were read, the state is the one before.
        # After a failed step, the iterator is ahead of training, so its state would skip a batch.
        state = self._state
        if state is None and self._at is not None:
            state = self._get_state()
        state = state.decode("latin-1") if isinstance(state, bytes) else state
        texts = processes.gather_texts(json.dumps(state, default=int))
        return None if "null" in texts else texts
