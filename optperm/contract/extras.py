"""Imports of what only some uses need."""

import importlib
from types import ModuleType


def import_optional(name: str, *, needed_by: str, install: str) -> ModuleType:
    """A module that few uses need; an ImportError says what asks for it and what to hand to pip."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        missing = f"{needed_by} needs {name.partition('.')[0]}, which cannot be imported ({error})."
        raise ImportError(f"{missing} Install it with: pip install '{install}'") from error
