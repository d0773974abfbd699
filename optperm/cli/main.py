"""The console entry `optperm`."""

import argparse
import io
import math
import os
import pathlib
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jax

from optperm.cli import commands, compare, datasets, models, sweep
from optperm.cli.errors import INTERRUPTED, CliError
from optperm.cli.methods import METHODS, Method
from optperm.cli.roll_call import Address
from optperm.training.replicas import LostProcessError


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
      argv: Arguments, without the program's name; those of the process by default.

    Returns:
      The exit code: 0; 1 if data, files or the installation are at fault; 2 if the command line is;
      130 if Ctrl-C ended it.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A terminal that cannot show a character is no reason to lose a run.
            stream.reconfigure(errors="backslashreplace")
    arguments = _parser().parse_args(argv)
    with warnings.catch_warnings():
        warnings.showwarning = _show_warning
        if arguments.quiet or getattr(arguments, "process_id", 0):
            warnings.simplefilter("ignore")
        try:
            code: int = arguments.command(arguments)
            return code
        except LostProcessError as error:
            _exit_at_once(str(error), CliError.exit_code)
        except CliError as error:
            return _fail(str(error), error.exit_code)
        except OSError as error:
            return _fail(f"{error.filename or 'the system'}: {error.strerror or error}", 1)
        except jax.errors.JaxRuntimeError as error:
            return _fail(f"JAX: {error}", 1)
        except KeyboardInterrupt:
            _exit_at_once("stopped by Ctrl-C.", INTERRUPTED)


def _exit_at_once(message: str, code: int) -> NoReturn:
    """Ordinarily Python would wait for a compiled call in another thread, or for other processes."""
    _fail(message, code)
    sys.stdout.flush()
    os._exit(code)


def _fail(message: str, code: int) -> int:
    print(f"optperm: error: {' '.join(message.split())}", file=sys.stderr, flush=True)
    return code


def _show_warning(message: Warning | str, *_: object, **__: object) -> None:
    print(f"optperm: warning: {message}", file=sys.stderr)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"optperm: error: {message} (see {self.prog} --help)\n")


def _parser() -> argparse.ArgumentParser:
    options: dict[str, Any] = {
        "allow_abbrev": False,
        "formatter_class": argparse.ArgumentDefaultsHelpFormatter,
    }
    parser = _Parser(prog="optperm", description="Trains networks by optperm's methods.", **options)
    parser.add_argument(
        "--version", action="version", version=f"optperm {commands.version('optperm')}"
    )
    subparsers = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    train = subparsers.add_parser("train", help="train a network", **options)
    methods = train.add_subparsers(title="methods", required=True, metavar="METHOD")
    for method in METHODS.values():
        of_method = methods.add_parser(
            method.name, help=method.help, description=f"{method.name}: {method.help}", **options
        )
        _add_run_flags(of_method)
        _add_hyperparameters(of_method, method)
        of_method.set_defaults(command=commands.train, method=method)

    about = "prune or freeze networks at every fraction, and see how well constant SGD trains on"
    sweeps = subparsers.add_parser("sweep", help=about, description=about, **options)
    actions = sweeps.add_subparsers(title="what is swept", required=True, metavar="ACTION")
    for action, curves in sweep.CURVES.items():
        about = ", ".join(curve.name for curve in curves)
        of_action = actions.add_parser(action, help=about, description=about, **options)
        _add_sweep_flags(of_action)
        of_action.set_defaults(command=commands.sweep, action=action)

    about = "train by several methods from several seeds, and tabulate what each of them buys"
    comparison = subparsers.add_parser("compare", help=about, description=about, **options)
    _add_compare_flags(comparison)
    comparison.set_defaults(command=compare.run)

    about = "rebuild the network of a run from its files, and test it"
    evaluate = subparsers.add_parser("evaluate", help=about, description=about, **options)
    evaluate.add_argument("folder", type=pathlib.Path, help="a run folder")
    evaluate.add_argument("--data", default=argparse.SUPPRESS, help="other data than the run's")
    evaluate.set_defaults(command=commands.evaluate, quiet=False)
    return parser


def _add_data(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--data",
        default="digits",
        help="'digits' (scikit-learn's), a folder of MNIST-format IDX files, or an .npz file with "
        f"{', '.join(datasets.KEYS)}",
    )


def _method_name(text: str) -> str:
    if text not in METHODS:
        raise argparse.ArgumentTypeError(f"must be one of {', '.join(METHODS)}, got {text!r}")
    return text


def _add_compare_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "methods",
        nargs="*",
        type=_method_name,
        help=f"each with its default hyperparameters (default: all): {', '.join(METHODS)}",
        metavar="METHOD",
    )
    group = parser.add_argument_group("the runs")
    _add_network_flags(group)
    group.add_argument(
        "--seeds", type=_integer(1), default=3, help="from how many seeds each", metavar="N"
    )
    group.add_argument(
        "--seed", type=_integer(0, 2**32 - 1), default=0, help="the first of them", metavar="N"
    )
    group.add_argument(
        "--epochs", type=_integer(1), default=20, help="passes through the data", metavar="N"
    )
    group.add_argument(
        "--devices", type=_integer(1), default=1, help="devices to train on", metavar="N"
    )
    group.add_argument(
        "--out",
        default=argparse.SUPPRESS,
        help="folder for the results, which must be new or empty (default: runs/compare-...)",
        metavar="FOLDER",
    )
    group.add_argument("--quiet", action="store_true", help="print nothing but errors")


def _add_network_flags(group: argparse._ArgumentGroup) -> None:
    _add_data(group)
    group.add_argument("--model", choices=models.MODELS, default="mlp", help="the network")
    group.add_argument(
        "--hidden",
        type=_integer(1, 2**20),
        default=256,
        help="units of the hidden layer",
        metavar="N",
    )
    group.add_argument(
        "--batch-size",
        type=_integer(1),
        default=50,
        help="examples a step, on each device",
        metavar="N",
    )


def _add_run_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the run")
    _add_network_flags(group)
    group.add_argument(
        "--seed",
        type=_integer(0, 2**32 - 1),
        default=0,
        help="of the initial params, the shuffles and the method",
        metavar="N",
    )
    group.add_argument(
        "--epochs", type=_integer(0), default=10, help="passes through the data", metavar="N"
    )
    group.add_argument(
        "--out",
        default=argparse.SUPPRESS,
        help="folder for the results, which must be new or empty (default: "
        "runs/METHOD-MODEL-DATA-sSEED, with -2, -3, ... where that exists)",
        metavar="FOLDER",
    )
    group.add_argument(
        "--checkpoint-every",
        type=_integer(0),
        default=0,
        help="epochs from one checkpoint to the next, from which the run can be resumed; the last "
        "epoch done leaves one as well, after Ctrl-C too (0: none)",
        metavar="K",
    )
    group.add_argument(
        "--resume",
        type=pathlib.Path,
        default=argparse.SUPPRESS,
        help="go on from the newest checkpoint of this run folder, in a new one, up to --epochs in "
        "all; the other flags have to be those of that run",
        metavar="FOLDER",
    )
    group.add_argument(
        "--from-epoch",
        type=_integer(0),
        default=argparse.SUPPRESS,
        help="with --resume: go on from the checkpoint after this epoch instead",
        metavar="E",
    )
    group.add_argument("--quiet", action="store_true", help="print nothing but errors")

    group = parser.add_argument_group(
        "devices",
        "Each holds a replica of the network. Where JAX has fewer, the processor stands in for them. "
        "For several processes start each with all flags the same but --process-id; process 0 alone "
        "prints and writes.",
    )
    group.add_argument(
        "--devices", type=_integer(1), default=1, help="devices of each process", metavar="N"
    )
    group.add_argument(
        "--coordinator",
        type=_address,
        default=argparse.SUPPRESS,
        help="where process 0 can be reached by all others: a port of its machine that is free",
        metavar="HOST:PORT",
    )
    group.add_argument(
        "--num-processes",
        type=_integer(1),
        default=argparse.SUPPRESS,
        help="how many processes",
        metavar="P",
    )
    group.add_argument(
        "--process-id",
        type=_integer(0),
        default=argparse.SUPPRESS,
        help="which of them this is, from 0 to P - 1",
        metavar="I",
    )


def _add_hyperparameters(parser: argparse.ArgumentParser, method: Method) -> None:
    group = parser.add_argument_group(f"hyperparameters of {method.name}")
    for name, default in method.defaults().items():
        flag, about = f"--{name.replace('_', '-')}", method.flags[name]
        if isinstance(default, bool):
            action = argparse.BooleanOptionalAction
            group.add_argument(flag, action=action, default=default, help=about)
        elif isinstance(default, str):
            group.add_argument(flag, choices=method.choices(name), default=default, help=about)
        else:
            kind = _integer() if isinstance(default, int) else _number
            group.add_argument(flag, type=kind, default=default, help=about, metavar="X")


def _add_sweep_flags(parser: argparse.ArgumentParser) -> None:
    default = sweep.Plan(())
    group = parser.add_argument_group("the sweep")
    _add_data(group)
    for name, low, about in (
        ("grid", 2, "fractions p, evenly spaced from 0 to 1"),
        ("repeats", 1, "networks to start from, each with a seed and batches of its own"),
        ("first_steps", 1, "steps of constant SGD before a network is pruned or frozen"),
        ("steps", 0, "steps after that"),
        ("batch_size", 2, "examples a step, drawn with replacement"),
        ("hidden", 1, "units of the hidden layer"),
    ):
        group.add_argument(
            f"--{name.replace('_', '-')}",
            type=_integer(low, 2**20),
            default=getattr(default, name),
            help=about,
            metavar="N",
        )
    group.add_argument(
        "--seed",
        type=_integer(0, 2**31 - 1),
        default=default.seed,
        help="of the first repeat; the next one has the next",
        metavar="N",
    )
    group.add_argument(
        "--out",
        default=argparse.SUPPRESS,
        help="folder for the results, which must be new or empty (default: "
        "runs/ACTION-DATA-sSEED, with -2, -3, ... where that exists)",
        metavar="FOLDER",
    )
    group.add_argument("--quiet", action="store_true", help="print nothing but errors")

    correct, legacy = sweep.SETTINGS[False], sweep.SETTINGS[True]
    group = parser.add_argument_group("what is sampled")
    group.add_argument(
        "--legacy",
        action="store_true",
        help="the experiment as it was first published: the softmax is fed into a loss that takes a "
        "softmax itself, and the number of params stands for that of examples",
    )
    for name, about in (
        ("learning_rate", "factor on all steps, 1 for sampling"),
        ("max_step", "largest entry of the preconditioner H"),
        ("prior_precision", "of the Gaussian prior of each parameter"),
        (
            "noise_start",
            "begin the estimate of the noise with random numbers up to this; 0: with data",
        ),
    ):
        group.add_argument(
            f"--{name.replace('_', '-')}",
            type=_number,
            default=argparse.SUPPRESS,
            help=f"{about} (default: {getattr(correct, name)}, with --legacy "
            f"{getattr(legacy, name)})",
            metavar="X",
        )


def _integer(low: int | None = None, high: int | None = None) -> Callable[[str], int]:
    def integer(text: str) -> int:
        value = int(text)
        if low is not None and value < low:
            raise argparse.ArgumentTypeError(f"must be at least {low}, got {text}")
        if high is not None and value > high:
            raise argparse.ArgumentTypeError(f"must be at most {high}, got {text}")
        return value

    return integer


def _number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"must be a finite number, got {text}")
    return value


def _address(text: str) -> Address:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise argparse.ArgumentTypeError(
            f"must be HOST:PORT, with a port from 1 to 65535, got {text!r}"
        )
    return Address(host.removeprefix("[").removesuffix("]"), int(port))


_number.__name__ = "number"  # argparse puts it into its messages


if __name__ == "__main__":
    sys.exit(main())
