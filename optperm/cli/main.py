"""The console entry `optperm`."""

import argparse
import dataclasses
import importlib.metadata
import io
import math
import os
import pathlib
import platform
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jax
import numpy as np

from optperm.cli import datasets, models, report, run_folder, training
from optperm.cli.errors import CliError, UsageError, import_extra
from optperm.cli.methods import METHODS, Method

_INTERRUPTED = 130


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
        if arguments.quiet:
            warnings.simplefilter("ignore")
        try:
            code: int = arguments.command(arguments)
            return code
        except CliError as error:
            return _fail(str(error), error.exit_code)
        except OSError as error:
            return _fail(f"{error.filename or 'the system'}: {error.strerror or error}", 1)
        except jax.errors.JaxRuntimeError as error:
            return _fail(f"JAX: {error}", 1)
        except KeyboardInterrupt:
            _fail("stopped by Ctrl-C.", _INTERRUPTED)
            # A compiled call may still be running in its thread, and an ordinary exit would wait for it.
            sys.stdout.flush()
            os._exit(_INTERRUPTED)


def _fail(message: str, code: int) -> int:
    print(f"optperm: error: {' '.join(message.split())}", file=sys.stderr, flush=True)
    return code


def _show_warning(message: Warning | str, *_: object) -> None:
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
    parser.add_argument("--version", action="version", version=f"optperm {_version('optperm')}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    train = commands.add_parser("train", help="train a network", **options)
    methods = train.add_subparsers(title="methods", required=True, metavar="METHOD")
    for method in METHODS.values():
        of_method = methods.add_parser(
            method.name, help=method.help, description=f"{method.name}: {method.help}", **options
        )
        _add_run_flags(of_method)
        _add_hyperparameters(of_method, method)
        of_method.set_defaults(command=_train, method=method)

    about = "rebuild the network of a run from its files, and test it"
    evaluate = commands.add_parser("evaluate", help=about, description=about, **options)
    evaluate.add_argument("folder", type=pathlib.Path, help="a run folder")
    evaluate.add_argument("--data", default=argparse.SUPPRESS, help="other data than the run's")
    evaluate.set_defaults(command=_evaluate, quiet=False)
    return parser


def _add_run_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the run")
    group.add_argument(
        "--data",
        default="digits",
        help="'digits' (scikit-learn's), a folder of MNIST-format IDX files, or an .npz file with "
        f"{', '.join(datasets.KEYS)}",
    )
    group.add_argument("--model", choices=models.MODELS, default="mlp", help="the network")
    group.add_argument(
        "--hidden", type=_integer(1), default=256, help="units of the hidden layer", metavar="N"
    )
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
        "--batch-size", type=_integer(1), default=50, help="examples a step", metavar="N"
    )
    group.add_argument(
        "--out",
        default=argparse.SUPPRESS,
        help="folder for the results, which must be new or empty (default: "
        "runs/METHOD-MODEL-DATA-sSEED, with -2, -3, ... where that exists)",
        metavar="FOLDER",
    )
    group.add_argument("--quiet", action="store_true", help="print nothing but errors")


def _add_hyperparameters(parser: argparse.ArgumentParser, method: Method) -> None:
    group = parser.add_argument_group(f"hyperparameters of {method.name}")
    for name, default in method.defaults().items():
        flag, about = f"--{name.replace('_', '-')}", method.flags[name]
        if isinstance(default, bool):
            action = argparse.BooleanOptionalAction
            group.add_argument(flag, action=action, default=default, help=about)
        else:
            kind = _integer() if isinstance(default, int) else _number
            group.add_argument(flag, type=kind, default=default, help=about, metavar="X")


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


_number.__name__ = "number"  # argparse puts it into its messages


def _train(arguments: argparse.Namespace) -> int:
    # What is missing must come out before the training, not after it.
    for extra in ("rich", "matplotlib"):
        import_extra(extra)
    method: Method = arguments.method
    data = datasets.load(arguments.data)
    if arguments.batch_size > len(data.x_train):
        raise UsageError(
            f"--batch-size {arguments.batch_size} is more than the {len(data.x_train)} training "
            "examples. Choose a smaller one."
        )
    spec = models.NetworkSpec(
        model=arguments.model,
        hidden=arguments.hidden,
        input_shape=data.x_train.shape[1:],
        num_classes=data.num_classes,
        seed=arguments.seed,
    )
    model, initial = models.build(spec), models.initial_params(spec)
    hyperparameters = {name: getattr(arguments, name) for name in method.flags}
    facts = {
        "seed": arguments.seed,
        "num_data": len(data.x_train),
        "batch_size": arguments.batch_size,
    }
    try:
        tx = method.transformation(hyperparameters, facts)
    except (ValueError, TypeError) as error:
        raise UsageError(f"{method.name}: {error}") from error

    name = f"{method.name}-{arguments.model}-{data.name}-s{arguments.seed}"
    folder = run_folder.create(getattr(arguments, "out", None), name)
    reporter = report.Reporter(arguments.epochs, quiet=arguments.quiet)

    def on_epoch(record: training.EpochRecord) -> None:
        run_folder.append_metrics(folder, dataclasses.asdict(record))
        reporter.epoch(record)

    with training.Interrupt() as interrupt:
        with reporter:
            run = training.train(
                model,
                tx,
                initial,
                data,
                epochs=arguments.epochs,
                batch_size=arguments.batch_size,
                seed=arguments.seed,
                interrupt=interrupt,
                on_epoch=on_epoch,
                on_interrupt=reporter.interrupted,
            )
        if method.permutes:
            run_folder.write_permutation(folder, spec, initial, run.params, run.opt_state)
        else:
            run_folder.write_params(folder, spec, run.params)
        run_folder.write_steps(folder, loss=run.loss, share_moved=run.share_moved)
        last = run.records[-1]
        summary = {
            "method": method.name,
            "test_accuracy": last.test_accuracy,
            "train_accuracy": last.train_accuracy,
            "train_loss": last.train_loss,
            # A mean over all steps.
            "share_moved": None if run.share_moved is None else float(np.mean(run.share_moved)),
            # Of all steps; compiling and testing are not in it.
            "seconds": sum(record.seconds for record in run.records),
            "compile_seconds": run.compile_seconds,
            "interrupted": run.interrupted,
            "epochs_done": last.epoch,
            "steps": last.step,
            "params": sum(leaf.size for leaf in jax.tree.leaves(initial)),
            "data": data.source,
            "model": arguments.model,
            "hidden": arguments.hidden,
            "seed": arguments.seed,
            "epochs": arguments.epochs,
            "batch_size": arguments.batch_size,
            "hyperparameters": hyperparameters,
            "device": jax.devices()[0].device_kind,
            "versions": {name: _version(name) for name in ("optperm", "jax", "flax", "optax")}
            | {"python": platform.python_version(), "numpy": np.__version__},
        }
        report.draw_curve(folder / "curve.png", run, name)
        run_folder.write_summary(folder, summary)
        reporter.summary(summary, folder)
    return _INTERRUPTED if run.interrupted else 0


def _evaluate(arguments: argparse.Namespace) -> int:
    spec, params = run_folder.rebuild(arguments.folder)
    summary = run_folder.read_summary(arguments.folder)
    data = datasets.load(getattr(arguments, "data", summary["data"]))
    if data.x_test.shape[1:] != spec.input_shape:
        raise CliError(
            f"{data.source} holds examples of shape {list(data.x_test.shape[1:])}, but the network was "
            f"trained on shape {list(spec.input_shape)}."
        )
    accuracy = training.TestSet(models.build(spec), params, data).accuracy(params)
    if "data" not in arguments and accuracy != summary["test_accuracy"]:
        raise CliError(
            f"the test accuracy is {accuracy}, but summary.json says {summary['test_accuracy']}: the "
            "data have changed, or the run was on another kind of device."
        )
    print(f"test accuracy {accuracy:.4f}")
    return 0


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"


if __name__ == "__main__":
    sys.exit(main())
