"""How much of the package is code, docstring, comment and defence, by package.

Defence is what refuses or warns: `raise`, `assert`, calls of functions that warn or whose name begins
with `check`, and the bodies of functions named `check...`, `find_faults...` or `warn...`. Names that
read as values are functions named by a participle alone.

    python tests/count_lines.py [FOLDER]
"""

import argparse
import ast
import collections
import io
import pathlib
import re
import sys
import tokenize
from collections.abc import Iterator
from typing import NamedTuple

_DEFENDS = re.compile(r"_*(check|warn|faults|find_faults)")
_PARTICIPLE = re.compile(
    r"_*[a-z]+(ed|wn|ought)(_by|_of|_in|_to|_from|_at)?$|_*(made|kept|held|cut|put|told|met)$"
)
_TO_TOOLS = re.compile(r"# (type|noqa|pragma|mypy|pylint|pytype)\b")
_BLANK = (tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)


class Lines(NamedTuple):
    """Numbers of lines, without those that are blank."""

    all: int
    code: int
    docstring: int
    comment: int
    defence: int
    functions: int
    read_as_values: int


def _span(node: ast.AST) -> range:
    return range(node.lineno, node.end_lineno + 1)  # type: ignore[attr-defined]


def _name(call: ast.Call) -> str:
    return getattr(call.func, "attr", getattr(call.func, "id", ""))


def _defends(node: ast.AST) -> bool:
    if isinstance(node, ast.Raise | ast.Assert):
        return True
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        return _DEFENDS.match(_name(node.value)) is not None
    return isinstance(node, ast.FunctionDef) and _DEFENDS.match(node.name) is not None


def _docstring_lines(nodes: list[ast.AST]) -> set[int]:
    return {
        line
        for node in nodes
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and ast.get_docstring(node) is not None
        for line in _span(node.body[0])
    }


def _tokens(source: str) -> Iterator[tokenize.TokenInfo]:
    return tokenize.generate_tokens(io.StringIO(source).readline)


def code_lines(source: str) -> set[int]:
    """Return the numbers of the lines that hold code: neither blank nor comment nor docstring."""
    code = {
        line
        for token in _tokens(source)
        if token.type not in (*_BLANK, tokenize.COMMENT)
        for line in range(token.start[0], token.end[0] + 1)
    }
    return code - _docstring_lines(list(ast.walk(ast.parse(source))))


def count_lines(source: str) -> Lines:
    """Count the lines of one file."""
    nodes = list(ast.walk(ast.parse(source)))
    functions = [n for n in nodes if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    code, docstrings = code_lines(source), _docstring_lines(nodes)
    comments = {
        token.start[0]
        for token in _tokens(source)
        # A license above the code does not count, nor does a comment to a linter.
        if token.type == tokenize.COMMENT
        and token.start[0] > min(code, default=0)
        and not _TO_TOOLS.match(token.string)
    }
    defence = {line for node in nodes if _defends(node) for line in _span(node)} & code
    return Lines(
        len(source.splitlines()),
        len(code),
        len(docstrings),
        len(comments),
        len(defence),
        len(functions),
        sum(_PARTICIPLE.match(function.name) is not None for function in functions),
    )


def count_folder(folder: pathlib.Path) -> dict[str, Lines]:
    """Count the lines of each package in a folder, and of all of them."""
    counts: dict[str, Lines] = collections.defaultdict(lambda: Lines(*[0] * len(Lines._fields)))
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder).parts
        lines = count_lines(path.read_text(encoding="utf-8"))
        for package in ("all", parts[0] if len(parts) > 1 else "."):
            counts[package] = Lines(*map(sum, zip(counts[package], lines, strict=True)))
    return dict(counts)


def main() -> None:
    """Print the table of one folder."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "folder",
        nargs="?",
        default=pathlib.Path(__file__).parents[1] / "optperm",
        type=pathlib.Path,
    )
    print(
        f"{'':14} {'lines':>6} {'code':>6} {'docs/code':>9} {'comments':>8} {'defence':>8} "
        "functions values"
    )
    for package, lines in count_folder(parser.parse_args().folder).items():
        print(
            f"{package:14} {lines.all:6} {lines.code:6} {lines.docstring / lines.code:9.2f} "
            f"{lines.comment / lines.code:8.1%} {lines.defence / lines.code:8.1%} "
            f"{lines.functions:9} {lines.read_as_values:6}"
        )


if __name__ == "__main__":
    sys.exit(main())
