"""Batches that an iterable brings."""

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from optperm.training.data import as_arrays, num_examples
from optperm.training.feeds import Fed, OneStep, jitted
from optperm.training.interrupt import Interrupt
from optperm.training.programs import Program
from optperm.training.replicas import Replicas

_END = object()
# Batches that may wait on the devices for steps before them.
_AHEAD = 4


class StreamFeed:
    """Batches from an iterable, or from a callable that gives one for each epoch.

    Args:
      source: An iterable, gone through anew in each epoch, or a callable of the epoch's number.
      program: What a step does.
      replicas: Where. Each process brings its own part of a batch, which its devices share.
      own: Whether each replica has a carry of its own.

    Raises:
      TypeError: If the source is neither.
    """

    def __init__(self, source: Any, *, program: Program, replicas: Replicas, own: bool) -> None:
        self._source, self._replicas = source, replicas
        self._step = jitted(OneStep(program, replicas, own))[0]
        self._is_used = False
        if callable(source) and not hasattr(source, "__iter__"):
            try:
                inspect.signature(source).bind(1)
            except TypeError as error:
                raise TypeError(
                    "A callable train_data is called with the number of the epoch, from 1, and gives "
                    f"its batches: let it take one argument ({error})."
                ) from error

    def _open(self, epoch: int) -> Iterator[Any]:
        source = self._source
        if not hasattr(source, "__iter__"):
            source = source(epoch)
            if not hasattr(source, "__iter__"):
                raise TypeError(
                    "The train_data of an epoch must be an iterable of batches, got "
                    f"{type(source).__name__}."
                )
            return iter(source)
        iterator = iter(source)
        if iterator is source and self._is_used:
            raise ValueError(
                "train_data can be gone through only once (it is an iterator, such as a generator), "
                "and is needed again. Pass a list, a data loader that begins anew, or a function "
                "that makes a generator: train_data=lambda epoch: batches()."
            )
        self._is_used = True
        return iterator

    def prepare(self, carry: Any) -> None:
        """See `Feed`. Only the first batch tells what to compile."""

    def begin(self, epoch: int, offset: int) -> None:
        """See `Feed`. Batches that were taken before are gone through again, and dropped."""
        self._batches = self._open(epoch)
        for index in range(offset):
            if next(self._batches, _END) is _END:
                raise ValueError(
                    f"train_data ended after {index} batches of epoch {epoch}, but training had taken "
                    f"{offset} of them: to go on exactly, it has to give the same batches again."
                )
        self._next = self._pull()
        if self._next is _END and not offset:
            raise ValueError(
                f"train_data gives no batch in epoch {epoch}. A generator can be gone through only "
                "once: pass a function that makes one, train_data=lambda epoch: batches()."
            )

    def _pull(self) -> Any:
        batch = next(self._batches, _END)
        # All processes take as many steps.
        if self._replicas.any(batch is _END):
            return _END
        return batch

    def _placed(self, batch: Any) -> Any:
        arrays = as_arrays(batch)
        if self._replicas.mesh is None:
            return arrays
        size = num_examples("A batch of train_data", arrays)
        if size % self._replicas.devices:
            raise ValueError(
                f"A batch of train_data must be one that {self._replicas.devices} devices can share, "
                f"got {size} examples. Drop or fill up a last batch that is smaller."
            )
        return self._replicas.scatter_local(arrays)

    def _wait_for(self, value: jax.Array) -> None:
        if self._replicas.num_processes == 1:
            value.block_until_ready()
        else:
            self._replicas.together(lambda: value)

    def run(
        self, carry: Any, limit: int, interrupt: Interrupt, on_interrupt: Callable[[], None]
    ) -> Fed:
        """See `Feed`."""
        rows: list[dict[str, jax.Array]] = []
        while len(rows) < limit and self._next is not _END and not interrupt.requested:
            carry, row = self._step(carry, (), self._placed(self._next))
            rows.append(row)
            self._next = self._pull()
            if len(rows) > _AHEAD:
                self._wait_for(rows[-1 - _AHEAD]["loss"])
        if interrupt.requested:
            on_interrupt()
        host = jax.device_get(rows)
        columns = {
            name: np.stack([row[name] for row in host]) for name in (rows[0] if rows else ())
        }
        return Fed(carry, columns, len(rows), self._next is _END)

    def all_batches(self, epoch: int, chunk: int, *, few: bool = False) -> Iterator[Any]:
        """See `Feed`."""
        del chunk, few
        return (self._placed(batch) for batch in self._open(epoch))

    def facts(self) -> dict[str, Any]:
        """See `Feed`."""
        return {"train_data": "an iterable of batches"}

    def close(self) -> None:
        """See `Feed`."""
