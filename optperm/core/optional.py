"""Import optional dependencies."""

import importlib
from types import ModuleType


def import_optional(name: str, *, needed_by: str, install: str) -> ModuleType:
    """Return an optional module, or raise an ImportError with the command to install it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        missing = f"{needed_by} needs {name.partition('.')[0]}, which cannot be imported ({error})."
        raise ImportError(f"{missing} Install it with: pip install '{install}'") from error
