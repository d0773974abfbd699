"""Imports of what only some uses need."""

import importlib
from types import ModuleType


def import_optional(name: str, *, needed_by: str, install: str) -> ModuleType:
    """Imports a module that is not among the library's own requirements.

    Args:
      name: The module.
      needed_by: The argument or method that asks for it, for the message.
      install: What to hand to pip.

    Raises:
      ImportError: If it is missing, with what to install.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise ImportError(
            f"{needed_by} needs {package}, which cannot be imported ({error}). Install it with: "
            f"pip install '{install}'"
        ) from error
