"""Optax's own cases for optimizers, run on every transformation of this library.

The modules `optax/contrib/_common_test.py` and `optax/_src/alias_test.py` are taken from the
installed Optax. Their cases are parametrized over lists of Optax's optimizers; here the lists are
noted down instead of expanded, and ours are put in their place.
"""

import functools
import importlib.util
import inspect
import itertools
import pathlib
from unittest import mock

import jax.numpy as jnp
import optax
import pytest
from absl.testing import parameterized
from transformations import TRANSFORMATIONS

FILES = {"contrib": "contrib/_common_test.py", "alias": "_src/alias_test.py"}

_INJECTED = "test_optimizers_can_be_wrapped_in_inject_hyperparams"
_SHAPES = "a number that decides shapes cannot be traced; test_contract.py has it in static_args"
_NO_MINIMUM = {ours.name: ours.no_minimum for ours in TRANSFORMATIONS if ours.no_minimum}
_NOT_TRACED = {ours.name: _SHAPES for ours in TRANSFORMATIONS if ours.static}


def _noting_product(*sequences, **grid):
    """Stands in for `absl.testing.parameterized.product`: keeps the lists beside the case."""

    def note(case):
        case.sequences, case.grid = sequences, grid
        return case

    return note


@functools.cache
def load(file):
    """One of Optax's test modules, its cases not expanded."""
    path = pathlib.Path(optax.__file__).parent / FILES[file]
    spec = importlib.util.spec_from_file_location(f"optax_{file}_test", path)
    module = importlib.util.module_from_spec(spec)
    with mock.patch.object(parameterized, "product", _noting_product):
        spec.loader.exec_module(module)
    return module


def cases_of(file):
    """Every case in one of Optax's test modules, by its full name."""
    return {
        f"{file}.{group_name}.{case_name}": (group, case)
        for group_name, group in inspect.getmembers(load(file), inspect.isclass)
        if issubclass(group, parameterized.TestCase)
        for case_name, case in inspect.getmembers(group, inspect.isfunction)
        if case_name.startswith("test")
    }


CASES = {name: found for file in FILES for name, found in cases_of(file).items()}
# Each case that is not run: with which transformations, "*" for all, and why.
LEFT_OUT = {
    "contrib.ContribTest.test_optimizers": _NO_MINIMUM,
    "alias.AliasTest.test_optimization": _NO_MINIMUM,
    f"contrib.ContribTest.{_INJECTED}": _NOT_TRACED,
    f"alias.AliasTest.{_INJECTED}": _NOT_TRACED,
    "alias.AliasTest.test_explicit_dtype": {"*": "is about arguments of sgd and adam"},
    **{case: {"*": "is about L-BFGS alone"} for case in CASES if ".LBFGSTest." in case},
}
# The cases and dtypes that are run every time. What the others ask, ours do of every method too: dtypes
# and states that stay (test_mixed_dtypes_keep_theirs, test_state_never_changes_its_form), arguments that
# nothing knows (test_update_is_pure), and schedules (test_a_schedule_out_of_range).
USUAL = {
    "contrib.ContribTest.test_optimizers": "float32",
    f"contrib.ContribTest.{_INJECTED}": "",
    "contrib.ContribTest.test_gradient_accumulation": "bfloat16",
}


def is_left_out(case, name):
    """Whether a case is not run with a transformation."""
    return not {name, "*"}.isdisjoint(LEFT_OUT.get(case, {}))


def _is_complex(value):
    try:
        return jnp.issubdtype(jnp.dtype(value), jnp.complexfloating)
    except TypeError:
        return False


def runs():
    """Each case with each transformation and each choice of what else it is parametrized over."""
    for (name, (_, case)), ours in itertools.product(CASES.items(), TRANSFORMATIONS):
        if is_left_out(name, ours.name):
            continue
        # The one list of optimizers becomes one entry, ours. Complex params are refused, which is
        # tested beside each method.
        (optimizers,) = case.sequences
        entry = dict.fromkeys(optimizers[0]) | {"opt_name": ours.name, "opt_kwargs": ours.arguments}
        grid = {
            key: [value for value in values if not _is_complex(value)]
            for key, values in case.grid.items()
        }
        for values in itertools.product(*grid.values()):
            chosen = dict(zip(grid, values, strict=True))
            label = "-".join(getattr(value, "__name__", str(value)) for value in values)
            is_usual = name in USUAL and label.endswith(USUAL[name]) and not ours.is_variant
            marks = [] if is_usual else [pytest.mark.exhaustive]
            yield pytest.param(
                name,
                entry | chosen,
                id="-".join(filter(None, (ours.name, name, label))),
                marks=marks,
            )


@pytest.mark.usefixtures("lenient")
@pytest.mark.filterwarnings("ignore:In .*all weights that enter an output unit are equal")
@pytest.mark.parametrize(("name", "arguments"), tuple(runs()))
def test_optax_case(name, arguments, monkeypatch):
    """A transformation of ours passes what Optax asks of its own optimizers."""
    file, _, case_name = name.split(".")
    group, _ = CASES[name]
    factories = {ours.name: ours.build for ours in TRANSFORMATIONS}
    if file == "contrib":
        monkeypatch.setattr(load(file), "_get_opt_factory", factories.__getitem__)
    else:
        monkeypatch.setattr(load(file), "_get_opt", lambda case, opt_name: factories[opt_name])
    getattr(group(case_name), case_name)(**arguments)


def test_every_case_of_optax_is_run_or_left_out_for_a_reason():
    """Nothing in Optax's files goes unnoticed, and nothing is left out that is not there."""
    run = {(param.values[0], param.values[1]["opt_name"]) for param in runs()}
    for case, ours in itertools.product(CASES, TRANSFORMATIONS):
        assert ((case, ours.name) in run) != is_left_out(case, ours.name), (case, ours.name)
    assert CASES.keys() >= LEFT_OUT.keys()
