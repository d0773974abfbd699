"""The layout of the package: imports, one maker of transformations, and `dir`."""

import ast
import pathlib
import types

import optperm

PACKAGE = pathlib.Path(optperm.__file__).parent
METHODS = ("permutation", "subspace", "variance", "bayes", "sparsity", "distributed")
# A floor imports from those below it alone; a method package from no other one.
FLOORS = (
    {"contract"},
    {"evaluation", "exact", "switching", "with_loss"},
    set(METHODS),
    {"training"},
    {"cli"},
)
FILES = [
    PACKAGE / "switching.py",
    PACKAGE / "with_loss.py",
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
    """Nothing else builds an Optax transformation, and no method repeats its checks."""
    for path in FILES:
        text = path.read_text(encoding="utf-8")
        assert "GradientTransformationExtraArgs(" not in text, path
        assert 'check_real_floating("params"' not in text or path.stem in (
            "full_gradient",
            "learning_rate",
            "prior",
            "sampling",
        ), path


def test_only_public_names_show():
    shown = {name: getattr(optperm, name) for name in dir(optperm)}
    modules = {name for name, value in shown.items() if isinstance(value, types.ModuleType)}
    assert modules == {"training"}
    assert not [name for name in shown if name.startswith("_")]
