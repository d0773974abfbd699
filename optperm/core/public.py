"""Show public names in the modules where users find them."""

import sys
import types


def show_names(room: str) -> None:
    """Set the `__module__` of each public name to its public module, for `help` and pickles."""
    for name, value in vars(sys.modules[room]).items():
        if not name.startswith("_") and not isinstance(value, types.ModuleType):
            value.__module__ = room
