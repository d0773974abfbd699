"""The layout of the package: imports, one maker of transformations, and public names."""

import ast
import importlib
import os
import pathlib
import pickle
import subprocess
import sys

import pytest
import support

import optperm

PACKAGE = pathlib.Path(optperm.__file__).parent
METHODS = support.ROOMS
# A floor imports from those below it alone; a method package from no other one.
FLOORS = (
    {"core"},
    {"evaluation", "exact", "switching", "_with_loss"},
    set(METHODS),
    {"training"},
    {"cli"},
)
FILES = [
    PACKAGE / "switching.py",
    PACKAGE / "_with_loss.py",
    *(p for m in METHODS for p in (PACKAGE / m).glob("*.py")),
]


def floor_of(module):
    part = module.split(".")[1] if "." in module else ""
    return next((index for index, names in enumerate(FLOORS) if part in names), None), part


def imported(path):
    """The modules that a file imports from, anywhere in it."""
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
            if not module.startswith("optperm.") or other_room == room or other is None:
                continue
            same_ground = floor == other == 1  # switching imports exact
            assert other < floor or same_ground, f"{own} imports {module}"


def test_transformations_are_made_by_one_function():
    """Nothing else builds an Optax transformation."""
    for path in FILES:
        assert "GradientTransformationExtraArgs(" not in path.read_text(encoding="utf-8"), path


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
    """What is loaded when it is used stands twice in the file: for Python and for type checkers."""
    typed = typed_names(PACKAGE / "__init__.py")
    assert {*typed} == {*dir(optperm)} == {*optperm.__all__}
    for name, module in typed.items():
        source = getattr(importlib.import_module(module), name)
        assert getattr(optperm, name) is source


@pytest.mark.parametrize("room", [*support.ROOMS, "training"])
def test_rooms_show_their_public_names_alone(room):
    module = getattr(optperm, room)
    shown = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    assert {*shown} == {*typed_names(PACKAGE / room / "__init__.py")}
    for name, value in shown.items():
        assert value.__module__ == f"optperm.{room}", name
        assert pickle.loads(pickle.dumps(value)) is value
    files = {path.stem for path in (PACKAGE / room).glob("*.py")}
    assert all(name.startswith("_") for name in files)


def test_a_name_of_a_room_is_not_at_the_top_level():
    with pytest.raises(AttributeError, match=r"it is optperm\.bayes\.sample\.$"):
        optperm.sample  # noqa: B018
    with pytest.raises(AttributeError, match=r"it is optperm\.sparsity\.prune\.$"):
        optperm.prune  # noqa: B018
    with pytest.raises(AttributeError, match=r"has no attribute 'sgprem'$"):
        optperm.sgprem  # noqa: B018


# A fork is a process in which nothing of optperm has been imported yet.
FRESH = """
import os, sys, threading
import optax

def in_fresh_process(run):
    child = os.fork()
    if child == 0:
        status = 1
        try:
            run()
            status = 0
        finally:
            os._exit(status)
    return os.waitpid(child, 0)[1] == 0

def in_threads():
    import optperm
    found, start = [], threading.Barrier(8)
    def load():
        start.wait()
        found.append(optperm.sgperm)
    threads = [threading.Thread(target=load) for _ in range(8)]
    for each in threads: each.start()
    for each in threads: each.join()
    assert len(found) == 8 and all(each is found[0] for each in found)

statements = sys.argv[1:]
failed = [each for each in statements if not in_fresh_process(lambda: exec(each, {}))]
assert not failed, failed
assert in_fresh_process(in_threads)
assert not [name for name in sys.modules if name.startswith("optperm")]
"""


@pytest.mark.programs
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_each_name_can_be_the_first_that_is_imported():
    rooms = [*support.ROOMS, "training"]
    names = [("optperm", name) for name in dir(optperm)] + [
        (f"optperm.{room}", name)
        for room in rooms
        for name in typed_names(PACKAGE / room / "__init__.py")
    ]
    statements = [f"from {module} import {name}" for module, name in names]
    statements += ["from optperm import *; assert sgperm and training.fit"]
    subprocess.run([sys.executable, "-W", "ignore", "-c", FRESH, *statements], check=True)
