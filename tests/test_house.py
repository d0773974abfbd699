"""The layout of the package: imports, the length of an update, the share of defence, and `dir`."""

import ast
import pathlib
import types

import count_lines

import optperm

PACKAGE = pathlib.Path(optperm.__file__).parent
METHODS = ("permutation", "subspace", "variance", "bayes", "sparsity", "distributed")
# A floor imports from those below it alone; a method package from no other one.
FLOORS = (
    {"contract"},
    {"evaluation", "placement", "switching", "with_loss"},
    set(METHODS),
    {"training"},
    {"cli"},
)
FILES = [
    PACKAGE / "switching.py",
    PACKAGE / "with_loss.py",
    *(p for m in METHODS for p in (PACKAGE / m).glob("*.py")),
]
# Code lines of an `update`, and together with the functions beside it in the function that makes both.
LONGEST_UPDATE = 45
LONGEST_WITH_SIBLINGS = 60
# The share of the package's code lines that only refuse or warn, as `count_lines.py` counts them.
MOST_DEFENCE = 0.08


def functions_in(node):
    """The functions directly in the body of a module, a class or a function, by name."""
    return {each.name: each for each in node.body if isinstance(each, ast.FunctionDef)}


def test_an_update_can_be_read_beside_the_paper():
    """Its algorithm alone: what every transformation promises is in contract/transformation.py."""
    for path in FILES:
        source = path.read_text(encoding="utf-8")
        code = count_lines.code_lines(source)
        for outer in ast.walk(ast.parse(source)):
            if not isinstance(outer, ast.Module | ast.ClassDef | ast.FunctionDef):
                continue
            lengths = {
                name: len(code & set(range(f.lineno, f.end_lineno + 1)))
                for name, f in functions_in(outer).items()
            }
            for name in lengths.keys() & {"update", "update_fn"}:
                assert lengths[name] <= LONGEST_UPDATE, f"{path}: {name} of {lengths}"
                if isinstance(outer, ast.FunctionDef):
                    beside = sum(lengths.values()) - lengths.get("init", lengths.get("init_fn", 0))
                    assert beside <= LONGEST_WITH_SIBLINGS, f"{path}:{outer.lineno} {lengths}"


def test_defence_is_a_small_share_of_the_code():
    counts = count_lines.count_folder(PACKAGE)
    shares = {package: lines.defence / lines.code for package, lines in counts.items()}
    assert shares["all"] <= MOST_DEFENCE, shares


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
            same_ground = floor == other == 1  # switching imports placement
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
