"""The console entry point `optperm`, which imports slow modules only when it runs."""

import io
import os
import sys
import warnings
from collections.abc import Sequence

import jax

from optperm.cli.errors import CliError, import_extra


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line with given arguments, by default the arguments of the process.

    The exit code is 0 for success; 1 for an error in data, files or the installation, or for a loss that
    diverged; 2 for an error in the command line; 130 after Ctrl-C; and 143 after SIGTERM.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A character that the terminal cannot display must not end a run.
            stream.reconfigure(errors="backslashreplace")
    argv = sys.argv[1:] if argv is None else argv
    with warnings.catch_warnings():
        warnings.showwarning = _show_warning
        if "--quiet" in argv:
            warnings.simplefilter("ignore")
        try:
            import_extra("cyclopts")
            from optperm.cli import commands  # noqa: PLC0415 - needs the extra

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
            os._exit(code)  # a normal exit would wait for a compiled call in another thread


def _fail(message: str, code: int) -> int:
    print(f"optperm: error: {' '.join(message.split())}", file=sys.stderr, flush=True)
    return code


def _show_warning(message: Warning | str, *_: object, **__: object) -> None:
    print(f"optperm: warning: {message}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
