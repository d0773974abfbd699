"""Errors that end the program with one line, and the imports that may be missing."""

import importlib
from types import ModuleType

# What a command ends with that Ctrl-C has cut short.
INTERRUPTED = 130


class CliError(Exception):
    """Something outside the program is wrong: data, files, the installation."""

    exit_code = 1


class UsageError(CliError):
    """The command line asks for something that is not allowed."""

    exit_code = 2


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
