"""Errors that end the program with one line, and imports of optional packages."""

import functools

from optperm.core.optional import import_optional


class CliError(Exception):
    """Something outside the program is wrong: data, files, the installation."""

    exit_code = 1


class UsageError(CliError):
    """The command line asks for something that is not allowed."""

    exit_code = 2


# Import a module of the optional extra `cli`.
import_extra = functools.partial(
    import_optional, needed_by="the command line", install="optperm[cli]"
)
