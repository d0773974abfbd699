"""The terminal during training: the progress bar, Ctrl-C and SIGTERM."""

import contextlib
import math
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Self

import jax
import numpy as np

from optperm.core.optional import import_optional
from optperm.training import _processes as processes

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextlib.contextmanager
def progress_bar(progress: bool, total: float) -> Iterator[Callable[[int], None] | None]:
    """Yield a function to show the progress towards a total, which may be infinite, or None."""
    if not progress or jax.process_index():
        yield None
        return
    extra = "optperm[training]"
    rich = import_optional("rich.progress", needed_by="progress=True", install=extra)
    with rich.Progress(*rich.Progress.get_default_columns(), rich.MofNCompleteColumn()) as bars:
        task = bars.add_task("steps", total=int(total) if total < math.inf else None)
        yield lambda step: bars.update(task, completed=step)


def wait_for(array: jax.Array) -> None:
    """Wait for an array; unlike in `block_until_ready`, Python still handles signals."""
    is_ready = threading.Event()

    def block() -> None:
        with contextlib.suppress(Exception):  # the error is raised again when the array is read
            array.block_until_ready()
        is_ready.set()

    threading.Thread(target=block, daemon=True).start()
    is_ready.wait()


class Interrupted(BaseException):
    """Raised in a task between two steps after a signal; user code does not catch it by accident.

    Attributes:
      number: The number of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


class Interrupt:
    """A context that records SIGTERM and the first Ctrl-C; a second Ctrl-C raises KeyboardInterrupt.

    Outside the main thread, Python delivers no signals, so none is recorded. Signals that the program
    ignores or handles outside Python keep their handlers.

    Attributes:
      number: The number of the signal; 0 for none.
    """

    number = 0
    _is_over = False

    def __enter__(self) -> Self:
        is_main = threading.current_thread() is threading.main_thread()
        handlers = {number: signal.getsignal(number) for number in _SIGNALS if is_main}
        self._previous = {n: h for n, h in handlers.items() if h not in (None, signal.SIG_IGN)}
        for number in self._previous:
            signal.signal(number, self._handle)
        return self

    def __exit__(self, *exception: object) -> None:
        self._is_over = True
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def check(self, *, together: bool = True) -> None:
        """Raise `Interrupted` after a signal to any process, or to this one unless `together`.

        All processes must make the calls with `together`. After the context, nothing is raised.
        """
        if self._is_over:
            return
        number = self.number
        if jax.process_count() > 1:
            number = int(processes.gather(np.int32(number)).max()) if together else 0
        if number:
            raise Interrupted(number)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.number:
            raise KeyboardInterrupt
        says = b"SIGTERM: stopping after the running steps.\n"
        if number == signal.SIGINT:
            says = b"\nStopping after the running steps; Ctrl-C again to quit.\n"
        self.number = number  # set before the message, which suggests a second Ctrl-C
        with contextlib.suppress(OSError):
            os.write(2, says)
