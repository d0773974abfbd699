"""Errors that end the program with one line, and imports of optional packages."""

import functools

from optperm.core.optional import import_optional


class CliError(Exception):
    """An error outside the program, in data, files or the installation."""

    exit_code = 1


class UsageError(CliError):
    """An error in the command line."""

    exit_code = 2


# This function imports a module of the optional extra `cli`.
import_extra = functools.partial(
    import_optional, needed_by="the command line", install="optperm[cli]"
)
