"""Imports of what only some uses need."""

import importlib
from types import ModuleType


def import_optional(name: str, *, needed_by: str, install: str) -> ModuleType:
    """Imports a module that is not among the library's own requirements.

    Raises:
      ImportError: If it is missing, with what asks for it and what to hand to pip.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise ImportError(
            f"{needed_by} needs {package}, which cannot be imported ({error}). Install it with: "
            f"pip install '{install}'"
        ) from error
