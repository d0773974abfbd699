"""Show public names where users find them."""

import sys
import types


def show_names(room: str) -> None:
    """Let each public name in a module call that module its own, as `help` and pickles show it."""
    for name, value in vars(sys.modules[room]).items():
        if not name.startswith("_") and not isinstance(value, types.ModuleType):
            value.__module__ = room
