"""The entry point of the command `optperm`, without a traceback for Ctrl-C during slow imports."""

import os
import signal
from types import FrameType


def main() -> int:
    """Run the command line, and return the exit code."""
    signal.signal(signal.SIGINT, _leave)
    from optperm.cli.main import main as run  # noqa: PLC0415 - imports all of JAX

    signal.signal(signal.SIGINT, signal.default_int_handler)
    return run()


def _leave(number: int, frame: FrameType | None) -> None:
    # An exception would pass through a module during its import, and the module might catch it.
    os.write(2, b"optperm: stopped by Ctrl-C.\n")
    os._exit(130)
