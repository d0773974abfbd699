"""The console entry `optperm`. What takes long is imported when it runs."""

import io
import os
import sys
import warnings
from collections.abc import Sequence

import jax

from optperm.cli.errors import CliError, import_extra


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line: some arguments, by default those of the process.

    The exit code is 0; 1 if data, files, the installation or a loss that diverged are at fault; 2 if the
    command line is; 130 if Ctrl-C ended it, 143 if SIGTERM did.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A terminal that cannot show a character is no reason to lose a run.
            stream.reconfigure(errors="backslashreplace")
    argv = sys.argv[1:] if argv is None else argv
    with warnings.catch_warnings():
        warnings.showwarning = _show_warning
        if "--quiet" in argv:
            warnings.simplefilter("ignore")
        try:
            import_extra("cyclopts")
            from optperm.cli import commands  # noqa: PLC0415 - without the extra there is none

            return commands.run(argv)
        except (CliError, ImportError) as error:
            return _fail(str(error), getattr(error, "exit_code", 1))
        except OSError as error:
            return _fail(f"{error.filename or 'the system'}: {error.strerror or error}", 1)
        except jax.errors.JaxRuntimeError as error:
            return _fail(f"JAX: {error}", 1)
        except KeyboardInterrupt:
            code = _fail("stopped by Ctrl-C.", 130)
            sys.stdout.flush()
            os._exit(code)  # Python would wait for a compiled call in another thread


def _fail(message: str, code: int) -> int:
    print(f"optperm: error: {' '.join(message.split())}", file=sys.stderr, flush=True)
    return code


def _show_warning(message: Warning | str, *_: object, **__: object) -> None:
    print(f"optperm: warning: {message}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
