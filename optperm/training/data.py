"""Where the batches of an epoch come from, and the calls of the compiled steps that take them."""

import inspect
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from optperm.contract import checks
from optperm.contract.dtypes import as_arrays
from optperm.training import processes
from optperm.training.layout import Layout
from optperm.training.terminal import Interrupt, wait_for

# Far from the step counts that a method may fold into the key of the same seed.
_SHUFFLE_STREAM = 0x5348_5546
END = object()
# Rows of metrics that a call gives back at least, so that one program serves calls of most lengths.
_ROWS = 1024
_GRADIENT_CHUNK = 1000  # examples on a device at once, for a full gradient
_SOON = 0.05  # seconds
# Calls that may wait on the devices for those before them; of batches, up to twice as many may.
AHEAD = 8


def shuffled(seed: int, epoch: int, num_examples: int, replace: bool = False) -> jax.Array:
    """The order in which `fit` goes through examples in memory, int32 (num_examples,).

    A step takes the next `batch_size` of them; those at the end that do not fill a batch are left out.
    The order depends on nothing else than what is given here.

    Args:
      seed: That of `fit`.
      epoch: From 1.
      num_examples: How many there are.
      replace: Whether each is drawn from all of them instead, as `fit` does for a method that samples.

    Example:
      >>> from optperm.training import shuffled
      >>> sorted(shuffled(seed=0, epoch=1, num_examples=4).tolist())
      [0, 1, 2, 3]
    """
    checks.check_seed("seed", seed)
    checks.check_count("epoch", epoch)
    checks.check_static_count("num_examples", num_examples)
    key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), _SHUFFLE_STREAM)
    key = jax.random.fold_in(key, epoch)
    if replace:
        return jax.random.randint(key, (num_examples,), 0, num_examples)
    return jax.random.permutation(key, num_examples)


def is_arrays(name: str, data: Any) -> bool:
    """Whether data is a tree of arrays, which a ValueError says if they do not agree, or of batches."""
    kinds = jax.Array | np.ndarray
    if isinstance(data, kinds | Mapping | tuple) and all(
        isinstance(leaf, kinds) for leaf in jax.tree.leaves(data)
    ):
        checks.check_arrays(name, data)
        return checks.count_examples(name, data) > 0
    _check_stream(name, data, isinstance(data, Iterable) or (callable(data) and takes_epoch(data)))
    return False


def takes_epoch(function: Callable[..., Any]) -> bool:
    """Whether a function can be called with the number of an epoch alone."""
    try:
        inspect.signature(function).bind(1)
    except (TypeError, ValueError):  # a ValueError of a builtin, which does not say
        return False
    return True


def _check_stream(name: str, value: Any, is_one: bool) -> None:
    if not is_one or isinstance(value, str | Mapping):
        raise TypeError(
            f"{name} must be a tree of arrays (a dict or a tuple of NumPy or JAX arrays), an iterable "
            "of batches, or a function of the epoch's number, lambda epoch: ..., that gives one, got "
            f"{type(value)}."
        )


def read_all(name: str, data: Any, epoch: int, size: int | None, layout: Layout) -> Iterator[Any]:
    """All of some data on the devices, arrays `size` examples at once: batches that devices share."""
    if is_arrays(name, data):
        total, parts = checks.count_examples(name, data), layout.parts
        step = max((size or total) // parts * parts, parts)
        for low in range(0, total, step):
            part = jax.tree.map(lambda leaf, low=low: leaf[low : low + step], data)
            yield layout.put_batch(part, local=False)
        return
    iterator, count, is_alone = open_stream(name, data, epoch), 0, jax.process_count() == 1
    while (batch := pull(name, iterator, is_alone)) is not END:
        count += 1
        yield layout.put_batch(batch, local=True)
    if not count:
        raise no_batch(name, epoch)


def open_stream(name: str, source: Any, epoch: int) -> Iterator[Any]:
    """The batches of an epoch, from an iterable or from a function that gives one."""
    opened = source if hasattr(source, "__iter__") else source(epoch)
    _check_stream(name, opened, isinstance(opened, Iterable))
    return iter(opened)


def no_batch(name: str, epoch: int) -> ValueError:
    """Return what is wrong where an epoch has no batch."""
    advice = f"pass a list, a data loader that begins anew, or a function, {name}=lambda epoch: ..."
    says = f"{name} gives no batch in epoch {epoch}. An iterator can be gone through only once"
    return ValueError(f"{says}: {advice}.")


def pull(name: str, iterator: Iterator[Any], is_alone: bool) -> Any:
    """Return the next batch, or `END` where some process has none. All of them have to ask."""
    batch, size, failure = END, 0, None
    if is_alone:  # one process
        return batch if (batch := next(iterator, END)) is END else as_arrays(batch)
    try:
        if (batch := next(iterator, END)) is not END:
            batch = as_arrays(batch)
            size = checks.count_examples(f"A batch of {name}", batch, has_scalars=True)
    except Exception as error:
        size, failure = -1, error
    sizes = processes.gather(np.int32(size))
    if failure is not None:
        raise failure
    if sizes.min() < 0:
        raise RuntimeError(f"another process could not load a batch of {name}: see what it says.")
    if sizes.min() and sizes.min() != sizes.max():
        raise ValueError(
            f"A batch of {name} has {sizes.tolist()} examples in the processes: each must bring equally "
            "many, or its examples would not count like those of the others."
        )
    return batch if sizes.min() else END


class Position(NamedTuple):
    """Steps done, the epoch of the next one, and steps within it."""

    step: int = 0
    epoch: int = 1
    offset: int = 0


class Fed(NamedTuple):
    """What came of some steps."""

    carry: Any
    columns: dict[str, Any]  # float32, a row for each step, and perhaps more
    steps: int
    is_over: bool  # whether the epoch ends with them
    error: Exception | None = None  # what came instead of the next step


class ArrayFeed:
    """Examples in memory, shuffled anew in each epoch; all of them are kept on each device.

    With `replace` they are drawn with replacement: batches of one shuffle are not independent.
    """

    def __init__(
        self, data: Any, batch_size: Any, seed: int, layout: Layout, most: int, replace: bool
    ) -> None:
        size, parts = checks.count_examples("train_data", data), layout.parts
        if batch_size is None:
            raise ValueError("Pass batch_size: train_data are arrays, and a step takes a part.")
        checks.check_count("batch_size", batch_size)
        if batch_size > size:
            says = f"at most the number of examples in train_data, {size}"
            raise ValueError(f"batch_size must be {says}, got {batch_size}.")
        if batch_size % parts:
            says = f"counts the examples of all {parts} devices or replicas, and must be"
            raise ValueError(f"batch_size {says} a multiple of {parts}, got {batch_size}.")
        self._data, self._size, self._seed, self._layout = data, size, seed, layout
        self._replace = replace
        self.steps_per_epoch, self._batch_size = size // batch_size, int(batch_size)
        self.rows = min(max(_ROWS, most), self.steps_per_epoch)
        self._examples, self._epoch = jax.tree.map(layout.put, data), 0
        self._calls: list[tuple[dict[str, Any], int]] = []  # those that may still be computed
        self._began = -math.inf

    def facts(self) -> dict[str, Any]:
        """Return what tells the batches from others."""
        forms = jax.tree.map(lambda leaf: f"{leaf.dtype}{list(leaf.shape)}", self._data)
        facts = {"seed": self._seed, "batch_size": self._batch_size, "train_data": str(forms)}
        facts |= {"batches": "drawn with replacement"} if self._replace else {}
        return facts | {"the digest of train_data": processes.digest(self._data)}

    def run(self, steps: Any, carry: Any, at: Position, limit: int, interrupt: Interrupt) -> Fed:
        """Takes at most so many steps, or until the epoch is over. The carry is given up."""
        if at.epoch != self._epoch:
            order = np.asarray(shuffled(self._seed, at.epoch, self._size, self._replace))
            order = order[: self.steps_per_epoch * self._batch_size]
            order = order.reshape(self.steps_per_epoch, -1)
            self._order = self._layout.put(order, None, *self._layout.batch[:1])
            self._epoch = at.epoch
        first, last = at.offset, min(at.offset + limit, self.steps_per_epoch)
        shared = self._examples, np.int32(first), np.int32(last)
        with self._layout.context():
            carry, columns = steps[0](carry, shared, self._order)
        self._calls.append((columns, last - first))
        before, self._began = self._began, time.perf_counter()
        # Calls that are soon over do not wait for one another.
        while len(self._calls) > (AHEAD if self._began - before < _SOON else 0):
            done, count = self._calls.pop(0)
            wait_for(done["loss"])
            done |= {name: np.array(rows[:count]) for name, rows in jax.device_get(done).items()}
        return Fed(carry, columns, last - first, last == self.steps_per_epoch)

    def all_batches(self, epoch: int) -> Iterator[Any]:
        """All examples, placed; those included that no step of an epoch takes."""
        size = _GRADIENT_CHUNK * self._layout.parts
        return read_all("train_data", self._data, epoch, size, self._layout)


class StreamFeed:
    """Batches from an iterable, or from a callable that gives one for each epoch.

    None is asked for before the step that takes it: what is left stays in the iterator.
    """

    steps_per_epoch, rows = None, 1

    def __init__(self, source: Any, batch_size: Any, layout: Layout) -> None:
        if batch_size is not None:
            raise ValueError("batch_size is for arrays: train_data gives batches of its own sizes.")
        self._source, self._layout = source, layout
        self._iterator: Any = None
        self._at: tuple[int, int] | None = None  # the epoch and offset of the iterator, if known

    def facts(self) -> dict[str, Any]:
        """Return what tells the batches from others, which are not known before they come."""
        return {"train_data": "an iterable of batches"}

    def go_to(self, at: Position, states: list[str] | None = None) -> None:
        """Go to a step of an epoch, where it is not there, by what `states` gave or dropping batches."""
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
                raise ValueError(
                    f"train_data ended after {index} batches of epoch {epoch}, but training had taken "
                    f"{offset} of them: to go on exactly, it has to give the same batches again."
                )

    def run(self, steps: Any, carry: Any, at: Position, limit: int, interrupt: Interrupt) -> Fed:
        """Takes at most so many steps, or until the epoch is over. The carry is given up."""
        self.go_to(at)
        self._at = None  # until these steps are done, or if they fail
        rows: list[dict[str, jax.Array]] = []
        epoch, offset, is_over, failure = at.epoch, at.offset, False, None
        length = len(self._source) if isinstance(self._source, list | tuple) else None
        is_alone = jax.process_count() == 1  # several end together, after a call
        with self._layout.context():
            while len(rows) < limit and not is_over and not (is_alone and interrupt.number):
                try:
                    batch = pull("train_data", self._iterator, is_alone)
                    if is_over := batch is END:
                        break
                    carry, row = steps[1](carry, (), self._placed(batch))
                except Exception as error:  # the loader's own, or the loss function's
                    if not rows:
                        raise
                    failure = error  # raised once the steps before it are recorded
                    break
                rows.append(row)
                is_over = offset + len(rows) == length
                if len(rows) > AHEAD and len(rows) % AHEAD == 0:  # waking up takes a while
                    rows[-1 - AHEAD]["loss"].block_until_ready()
        if is_over and not offset + len(rows):
            raise no_batch("train_data", epoch)
        self._at = None if failure else (epoch, offset + len(rows))
        host = jax.device_get(rows)
        names = dict.fromkeys(name for row in host for name in row)
        columns = {x: np.array([row.get(x, np.nan) for row in host], np.float32) for x in names}
        return Fed(carry, columns, len(rows), is_over, failure)

    def _placed(self, batch: Any) -> Any:
        if self._layout.mapped:
            parts = self._layout.parts // jax.process_count()
            size = checks.count_examples("A batch of train_data", batch, has_scalars=True)
            if size % parts:
                raise ValueError(
                    f"A batch of train_data must be one that {parts} replicas can share, got {size} "
                    "examples. Drop or fill up a last batch that is smaller."
                )
        return self._layout.put_batch(batch, local=True)

    def all_batches(self, epoch: int) -> Iterator[Any]:
        """All batches of an epoch, placed, from the source anew."""
        return read_all("train_data", self._source, epoch, None, self._layout)

    def states(self) -> list[str] | None:
        """Return where an iterator that can say so, as Grain's, has come in each process, as JSON."""
        state = None
        if self._at is not None and hasattr(self._iterator, "set_state"):  # None: it has given more
            state = self._iterator.get_state()
        state = state.decode("latin-1") if isinstance(state, bytes) else state
        texts = processes.gather_texts(json.dumps(state, default=int))
        return None if "null" in texts else texts
