"""The layout of the package: imports, one maker of transformations, and public names."""

import ast
import importlib
import inspect
import os
import pathlib
import pickle
import re
import subprocess
import sys
import tomllib
import typing

import pytest
import support

import optperm

PACKAGE = pathlib.Path(optperm.__file__).parent
ROOMS = (*support.ROOMS, "training")
# A floor imports from those below it alone; a method package from no other one.
FLOORS = (
    {"core"},
    {"evaluation", "exact", "switching", "_leaf_axes", "_with_loss"},
    set(support.ROOMS),
    {"training"},
)


def floor_of(module):
    room = module.split(".")[1] if "." in module else ""
    return next((index for index, names in enumerate(FLOORS) if room in names), None), room


def imported(path):
    """Yield the modules that a file imports from, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            yield node.module or ""
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def test_imports_point_downwards():
    for path in PACKAGE.rglob("*.py"):
        own = ".".join(["optperm", *path.relative_to(PACKAGE).with_suffix("").parts])
        floor, room = floor_of(own)
        if floor is None:
            continue  # `optperm/__init__.py`, which imports all
        for module in imported(path):
            other, other_room = floor_of(module)
            if module.startswith("optperm.") and other is not None and other_room != room:
                same_ground = floor == other == 1  # switching imports exact
                assert other < floor or same_ground, f"{own} imports {module}"


def test_transformations_are_made_by_one_function():
    files = [p for p in PACKAGE.rglob("*.py") if "TransformationExtraArgs(" in p.read_text("utf-8")]
    assert files == [PACKAGE / "core" / "transformation.py"]


def typed_names(path):
    """The names that type checkers read in a file, each with the module that it is imported from."""
    return {
        alias.asname: node.module
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if not alias.asname.startswith("_")
    }


def test_the_top_level_has_the_same_names_for_type_checkers():
    """A file lists the names that are loaded on use twice: for Python and for type checkers."""
    typed = typed_names(PACKAGE / "__init__.py")
    assert {*typed} == {*dir(optperm)} == {*optperm.__all__}
    for name, module in typed.items():
        source = getattr(importlib.import_module(module), name)
        assert getattr(optperm, name) is source


def test_the_version_is_that_of_the_project():
    text = (pathlib.Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    project = tomllib.loads(text)["project"]
    assert optperm.__version__ == project["version"]


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_show_their_public_names_alone(room):
    module = getattr(optperm, room)
    shown = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    assert {*shown} == {*typed_names(PACKAGE / room / "__init__.py")}
    for name, value in shown.items():
        assert value.__module__.startswith(f"optperm.{room}._"), name
        assert pickle.loads(pickle.dumps(value)) is value
    assert all(path.stem.startswith("_") for path in (PACKAGE / room).glob("*.py"))


@pytest.mark.parametrize("room", ["", *ROOMS])
def test_the_source_and_the_types_of_each_public_name_can_be_read(room):
    module = getattr(optperm, room) if room else optperm
    for name in typed_names(pathlib.Path(module.__file__)):
        value = getattr(module, name)
        if not inspect.ismodule(value):
            assert re.search(rf"^(class|def) {name}\b", inspect.getsource(value), re.M)
            if value is not optperm.training.TrainState:  # Flax's class cannot be read either
                typing.get_type_hints(value)
            if inspect.isclass(value) and issubclass(value, tuple):
                assert {*typing.get_type_hints(value)} == {*value._fields}


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("sample", r"it is optperm\.bayes\.sample\.$"),
        ("prune", r"it is optperm\.sparsity\.prune\.$"),
        ("sgprem", r"has no attribute 'sgprem'$"),
        (
            "galore",
            r"use optperm\.low_rank\(inner, rank, projection=\"svd\", residual=None, carry=False\)\.$",
        ),
        ("adamw8bit", r"use optperm\.quantize_state\(optax\.adamw\(\.\.\.\)\)\.$"),
        ("muon8bit", r"use optperm\.quantize_state\(optax\.contrib\.muon\(\.\.\.\)\)\.$"),
    ],
)
def test_a_name_of_a_room_is_not_at_the_top_level(name, says):
    with pytest.raises(AttributeError, match=says):
        getattr(optperm, name)


# A fork is a process that has not imported optperm yet.
FRESH = """
import os, sys
import optax

for program in sys.argv[1:]:
    child = os.fork()
    if child == 0:
        exec(program, {})
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, program
assert not [name for name in sys.modules if name.startswith("optperm")]
"""
THREADS = """
import concurrent.futures, threading
import optperm

def load(_):
    start.wait()
    return optperm.sgperm

start = threading.Barrier(8)
with concurrent.futures.ThreadPoolExecutor(8) as pool:
    assert len(set(pool.map(load, range(8)))) == 1
"""


@pytest.mark.programs
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_each_name_can_be_the_first_that_is_imported():
    """Eight threads may be the first together."""
    programs = [THREADS, "from optperm import *; assert sgperm and training.fit"]
    programs += [f"from optperm import {name}" for name in dir(optperm)]
    for room in ROOMS:
        names = typed_names(PACKAGE / room / "__init__.py")
        programs += [f"from optperm.{room} import {name}" for name in names]
    subprocess.run([sys.executable, "-W", "ignore", "-c", FRESH, *programs], check=True)
