"""Errors that end the program with one line, and the imports that may be missing."""

from types import ModuleType

from optperm.training.extras import import_optional

# What a command ends with that Ctrl-C has cut short.
INTERRUPTED = 130


class CliError(Exception):
    """Something outside the program is wrong: data, files, the installation."""

    exit_code = 1


class UsageError(CliError):
    """The command line asks for something that is not allowed."""

    exit_code = 2


def import_extra(name: str) -> ModuleType:
    """Imports a module of the optional extra `cli`; a CliError if that is not installed."""
    try:
        return import_optional(name, needed_by="the command line", install="optperm[cli]")
    except ImportError as error:
        raise CliError(str(error)) from error
