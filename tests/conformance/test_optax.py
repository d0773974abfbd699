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
import re
from unittest import mock

import jax.numpy as jnp
import optax
import pytest
from absl.testing import parameterized
from transformations import TRANSFORMATIONS

FILES = {"contrib": "contrib/_common_test.py", "alias": "_src/alias_test.py"}

_INJECTED = "test_optimizers_can_be_wrapped_in_inject_hyperparams"
_SHAPES = "a number that decides shapes cannot be traced; test_contract.py has it in static_args"
_NO_MINIMUM = {
    **dict.fromkeys(
        ("sgperm", "permute_by_cycles", "laperm"), "has only the values that the params start with"
    ),
    **dict.fromkeys(
        ("record_trajectory", "mask_elements", "proximal", "swag"), "hands on the updates"
    ),
    **dict.fromkeys(("project", "twa", "dldr", "dldr-twa"), "stays in a line or a plane"),
    **dict.fromkeys(("prune_gradually", "rigl", "set"), "keeps half of the params at zero"),
    **dict.fromkeys(("svrg", "mars"), "corrects gradients for an optimizer after it"),
    **dict.fromkeys(
        ("mars-exact", "recursive_gradient", "recursive-page", "ivon"),
        "needs gradients of the case's loss at other params",
    ),
    **dict.fromkeys(("constant_sgd", "sgld", "sghmc"), "samples"),
}
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
# The others are about L-BFGS, and about arguments of sgd and adam.
OURS = [name for name in CASES if not re.search(r"LBFGSTest|test_explicit_dtype", name)]
# With which transformations a case is not run, and why.
LEFT_OUT = {
    "contrib.ContribTest.test_optimizers": _NO_MINIMUM,
    "alias.AliasTest.test_optimization": _NO_MINIMUM,
    f"contrib.ContribTest.{_INJECTED}": _NOT_TRACED,
    f"alias.AliasTest.{_INJECTED}": _NOT_TRACED,
}
# Cases, and values of those that they are parametrized over. What the others ask, test_contract.py asks
# too, and of schedules test_fuzz.py.
RUNS = [
    ("contrib.ContribTest.test_optimizers", {"_setup_parabola"}),
    *(
        pytest.param(name, wanted, marks=pytest.mark.entries)
        for name, wanted in (
            ("contrib.ContribTest.test_optimizers", set()),
            (f"contrib.ContribTest.{_INJECTED}", set()),
            ("contrib.ContribTest.test_gradient_accumulation", {"bfloat16"}),
        )
    ),
    *(pytest.param(name, set(), marks=pytest.mark.exhaustive) for name in OURS),
]


def _is_complex(value):
    try:
        return jnp.issubdtype(jnp.dtype(value), jnp.complexfloating)
    except TypeError:
        return False


@pytest.mark.spans("agn", "dim_reduce", "svrg_and_sgd")
@pytest.mark.usefixtures("lenient")
@pytest.mark.filterwarnings("ignore:(low_rank|apollo) leaves .* at full rank")
@pytest.mark.filterwarnings("ignore:In .*all weights that enter an output unit are equal")
@pytest.mark.parametrize(
    ("name", "wanted"), RUNS, ids=lambda part: part if isinstance(part, str) else " ".join(part)
)
def test_optax_case_holds(ours, name, wanted, monkeypatch):
    """A transformation of ours passes what Optax asks of its own optimizers."""
    if reason := LEFT_OUT.get(name, {}).get(ours.name):
        pytest.skip(reason)
    monkeypatch.setattr(load("contrib"), "_get_opt_factory", lambda opt_name: ours.build)
    monkeypatch.setattr(load("alias"), "_get_opt", lambda case, opt_name: ours.build)
    group, case = CASES[name]
    # The one list of optimizers becomes one entry, ours. Complex params are refused, which is tested
    # beside each method.
    (optimizers,), is_run = case.sequences, False
    entry = dict.fromkeys(optimizers[0]) | {"opt_name": ours.name, "opt_kwargs": ours.arguments}
    for values in itertools.product(*case.grid.values()):
        labels = {getattr(value, "__name__", str(value)) for value in values}
        if wanted <= labels and not any(map(_is_complex, values)):
            chosen = dict(zip(case.grid, values, strict=True))
            getattr(group(case.__name__), case.__name__)(**entry, **chosen)
            is_run = True
    assert is_run
