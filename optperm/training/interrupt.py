"""Ctrl-C: the first one is noted, the second one stops at once."""

import signal
import threading
from types import FrameType
from typing import Any


class Interrupt:
    """A context in which the first Ctrl-C is noted, and the second one raises KeyboardInterrupt.

    Outside the main thread, where Python delivers no signals, nothing is noted.
    """

    def __init__(self) -> None:
        self.requested = False
        self._previous: Any = None

    def __enter__(self) -> "Interrupt":
        self._is_main = threading.current_thread() is threading.main_thread()
        if self._is_main:
            self._previous = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._is_main:
            signal.signal(signal.SIGINT, self._previous)

    def _handle(self, signal_number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
