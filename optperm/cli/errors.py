"""Errors that end the program with one line, and the imports that may be missing."""

import importlib
from collections.abc import Mapping
from types import ModuleType
from typing import Any


class CliError(Exception):
    """Something outside the program is wrong: data, files, the installation."""

    exit_code = 1


class UsageError(CliError):
    """The command line asks for something that is not allowed."""

    exit_code = 2


class LostProcessError(CliError):
    """Another process of the run has ended, and what this one still runs may never come to an end."""


def differences(there: Mapping[str, Any], facts: Mapping[str, Any], here: str) -> str:
    """Names what is not as it is here, for a message; empty where all is."""
    return "; ".join(
        f"{name} is {there.get(name)} there and {fact} {here}"
        for name, fact in facts.items()
        if there.get(name) != fact
    )


def import_extra(name: str) -> ModuleType:
    """Imports a module of the optional extra `cli`, which the rest of the library does without.

    Raises:
      CliError: If it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise CliError(
            f"{name.partition('.')[0]} cannot be imported ({error}). "
            "Install what the command line needs with: pip install 'optperm[cli]'"
        ) from error
