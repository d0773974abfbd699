"""Write the figures of `benchmarks/results` into the pages.

A figure stands in front of a comment that names its cell by file, row and column, and by the number of
the table unless it is the first. In front of a comment that names a file alone stands the command:

    0.967<!-- permutation_mnist; SGPerm; test accuracy -->
    `python benchmarks/permutation.py`<!-- permutation_mnist -->

    python docs/figures.py
"""

import functools
import json
import pathlib
import re
from typing import Any

DOCS = pathlib.Path(__file__).parent
_NUMBER = r"\d[\d,.]*(?:e-?\d+)?"
_CELL = rf"{_NUMBER}(?: (?:±|to) {_NUMBER})?(?:: {_NUMBER} s)?(?: \({_NUMBER}(?:, {_NUMBER})?\))?"
_FIGURE = re.compile(rf"(?:`[^`]+`|{_CELL})<!-- (\w+)(?:; (.+?); (.+?)(?:; (\d))?)? -->")


@functools.cache
def result(name: str) -> Any:
    """Return a file's content: {"benchmark", "command", "machine", "date", "tables"}."""
    path = DOCS.parent / "benchmarks" / "results" / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8"))


def cell(name: str, row: str, column: str, table: int = 0) -> str:
    """Return a cell by the first cell of its row and the name of its column, without marks."""
    found = result(name)["tables"][table]
    columns, *rows = [
        [re.sub("[`*]", "", str(text)) for text in line]
        for line in (found["columns"], *found["rows"])
    ]
    (line,) = (each for each in rows if each[0] == row)
    return line[columns.index(column)]


def with_figures(text: str) -> str:
    """Return the text of a page with the figures of the files."""

    def write(match: re.Match[str]) -> str:
        name, row, column, table = match.groups()
        figure = cell(name, row, column, int(table or 0)) if row else f"`{result(name)['command']}`"
        return figure + match[0][match[0].index("<!--") :]

    return _FIGURE.sub(write, text)


def main() -> None:
    """Write all pages."""
    for page in DOCS.rglob("*.md"):
        page.write_text(with_figures(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
