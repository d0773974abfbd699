"""The plan of the house: what may import what, how long an update may be, and what `dir` shows."""

import ast
import io
import pathlib
import tokenize
import types

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
LONGEST_UPDATE = 45
_NO_CODE = (
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
)


def code_lines(source, node):
    """The lines of a function that hold code: no comment, no docstring, nothing blank."""
    lines = {
        line
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type not in _NO_CODE
        for line in range(token.start[0], token.end[0] + 1)
        if node.lineno <= line <= node.end_lineno
    }
    for inner in ast.walk(node):
        if isinstance(inner, ast.FunctionDef) and ast.get_docstring(inner):
            lines -= set(range(inner.body[0].lineno, inner.body[0].end_lineno + 1))
    return len(lines)


def test_an_update_can_be_read_beside_the_paper():
    """Its algorithm alone: what every transformation promises is in contract/transformation.py."""
    for path in FILES:
        source = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef) and node.name in ("update", "update_fn"):
                length = code_lines(source, node)
                assert length <= LONGEST_UPDATE, f"{path}:{node.lineno} has {length} lines"


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
            continue  # the front door itself
        for module in imported(path):
            other, other_room = floor_of(module)
            if not module.startswith("optperm.") or other_room == room or other is None:
                continue
            same_ground = floor == other == 1  # switching reads what placement says
            assert other < floor or same_ground, f"{own} imports {module}"


def test_transformations_are_made_by_one_door():
    """Nothing else builds an Optax transformation, and no method repeats the door's checks."""
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
