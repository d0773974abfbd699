"""The commands and their flags, parsed by cyclopts."""

import dataclasses
import importlib.metadata
import pathlib
from collections.abc import Callable, Sequence
from typing import Annotated, Any

from cyclopts import App, CycloptsError, Group, Parameter

from optperm.cli import datasets, models, run_folder
from optperm.cli.errors import CliError, UsageError
from optperm.cli.flags import DATA_AND_MODEL, Run, refuse_infinite
from optperm.cli.methods import METHODS, Method
from optperm.cli.training import train

_App = App(
    name="optperm",
    help="Train networks with optperm's methods.\n\nExample: optperm train sgperm --epochs 20",
    version=lambda: f"optperm {importlib.metadata.version('optperm')}",
    help_format="markdown",
    default_parameter=Parameter(allow_repeating=True),
    suppress_keyboard_interrupt=False,
)


def run(argv: Sequence[str]) -> int:
    """Run a command and return its exit code."""
    if list(argv) in ([], ["train"]):
        _App.help_print(list(argv))
        return 2
    try:
        code = _App(
            list(argv), exit_on_error=False, print_error=False, result_action="return_value"
        )
    except CycloptsError as error:
        where = " ".join(["optperm", *(error.command_chain or ())])
        raise UsageError(f"{error} (see {where} --help)") from error
    return int(code or 0)


def _make_command(method: Method) -> Callable[..., int]:
    """Make the command of a method, with flags for its hyperparameters, then the flags of all runs."""
    fields, group = list[Any](), Group(f"What {method.name} takes", sort_key=1)
    for name, flag in method.flags.items():
        short = ("--lr",) if name == "learning_rate" else ()
        kind = flag.kind or type(flag.default)
        validator = refuse_infinite if kind is float else None
        about = Parameter(help=flag.help, validator=validator, alias=short)
        fields.append((name, Annotated[kind, about], flag.default))
    module = {"__module__": __name__}  # before Python 3.12 it would be `types`
    taken: Any = dataclasses.make_dataclass("Taken", fields, namespace=module, kw_only=True)

    def command(
        *,
        given: Annotated[taken, Parameter(name="*", group=group)] = taken(),  # noqa: B008
        run: Annotated[Run, Parameter(name="*", group=DATA_AND_MODEL)] = Run(),  # noqa: B008
    ) -> int:
        return train(method, dataclasses.asdict(given), run)

    return command


@_App.command(name="evaluate")
def _evaluate(folder: pathlib.Path, /, *, data: str | None = None) -> int:
    """Rebuild the network of a run from its files, bit for bit, and test it.

    Example: optperm evaluate runs/sgperm-mlp-digits-s0

    Args:
      folder: A run folder.
      data: The test data instead of the data of the run.
    """
    spec, params = run_folder.rebuild(folder)
    summary = run_folder.read_json(folder / "summary.json")
    found = datasets.load(summary["data"] if data is None else data)
    if (shape := found.x_test.shape[1:]) != spec.input_shape:
        says = f"examples of shape {list(shape)}, but the network takes {list(spec.input_shape)}"
        raise CliError(f"{found.source} holds {says}.")
    accuracy = models.measure_accuracy(models.build(spec), params, found.x_test, found.y_test)
    if data is None and accuracy != (tested := summary["test_accuracy"]):
        says = f"the test accuracy is {accuracy}, but summary.json says {tested}"
        raise CliError(f"{says}: the data have changed, or versions or the kind of device differ.")
    print(f"test accuracy {accuracy:.4f}")
    return 0


_TRAIN = App(name="train", help="Train a network.\n\nExample: optperm train sgperm --epochs 20")
for _method in METHODS.values():
    _EXAMPLE = f"Example: optperm train {_method.name} --epochs 20"
    _TRAIN.command(_make_command(_method), name=_method.name, help=f"{_method.help}\n\n{_EXAMPLE}")
_App.command(_TRAIN)
