"""Ctrl-C and SIGTERM: the first one is noted, a second Ctrl-C stops at once."""

import contextlib
import os
import signal
import threading
from types import FrameType
from typing import Self


class Interrupt:
    """A context in which SIGTERM and the first Ctrl-C are noted; the second raises KeyboardInterrupt.

    Outside the main thread, where Python delivers no signals, nothing is noted.
    """

    requested = False

    def __enter__(self) -> Self:
        is_main = threading.current_thread() is threading.main_thread()
        numbers = (signal.SIGINT, signal.SIGTERM) if is_main else ()
        self._previous = {number: signal.signal(number, self._handle) for number in numbers}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.requested:
            raise KeyboardInterrupt
        if number == signal.SIGINT:
            with contextlib.suppress(OSError):
                os.write(2, b"\nStopping after this step; Ctrl-C again to quit.\n")
        self.requested = True
