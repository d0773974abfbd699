"""Tables and figures of benchmarks/results/*.json: no figure of a benchmark is typed into a page."""

import functools
import json
import pathlib
from collections.abc import Sequence
from typing import Any, ClassVar

from docutils import nodes
from docutils.parsers.rst import directives
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective, SphinxRole

RESULTS = pathlib.Path(__file__).parents[2] / "benchmarks" / "results"


@functools.cache
def result(name: str) -> Any:
    """A file's content: {"benchmark", "command", "machine", "date", "tables"}."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def plain(text: str) -> str:
    """A cell without the marks of code and of bold type."""
    return text.replace("`", "").replace("*", "")


def cell(name: str, row: str, column: str, table: int = 0) -> str:
    """The figure of a row, named by its first cell, and of a column."""
    found = result(name)["tables"][table]
    columns = [plain(each) for each in found["columns"]]
    (line,) = (each for each in found["rows"] if plain(each[0]) == plain(row))
    return plain(line[columns.index(plain(column))])


_GRIDS = ("grid", "validation of the grid")


def _table(table: dict[str, Any], shown: Sequence[int]) -> list[str]:
    """Some columns of a table."""
    head, *rows = [
        "| " + " | ".join(str(row[at]) for at in shown) + " |"
        for row in (table["columns"], *table["rows"])
    ]
    rule = "|---" * len(shown) + "|"
    return [f"```{{table}} {table['title']}", ":align: left", "", head, rule, *rows, "```", ""]


def _folded(table: dict[str, Any], shown: Sequence[int]) -> list[str]:
    """The same behind its title."""
    inner = _table(table | {"title": ""}, shown)
    return [f"````{{dropdown}} {table['title']}", *inner, "````", ""]


class Measured(SphinxDirective):
    """`{measured} NAME`: the tables of a result, with their command, machine and date.

    Grids are folded. The option `table` takes one of them, by its number from 0.
    """

    required_arguments = 1
    option_spec: ClassVar = {"table": directives.nonnegative_int, "brief": directives.flag}

    def run(self) -> list[nodes.Node]:
        """Writes them as Markdown, whose code links as everywhere."""
        name = self.arguments[0]
        found = result(name)
        self.env.note_dependency(str(RESULTS / f"{name}.json"))
        tables = found["tables"]
        if "table" in self.options:
            tables = [tables[self.options["table"]]]
        lines: list[str] = []
        for table in tables:
            columns, grids = table["columns"], [0]
            if "grid" in table["title"]:
                lines += _folded(table, range(len(columns)))
                continue
            grids += [at for at, name in enumerate(columns) if name in _GRIDS]
            lines += _table(table, [at for at in range(len(columns)) if at not in grids[1:]])
            if grids[1:]:
                lines += _folded(table | {"title": "The grid of each method"}, grids)
        if "brief" not in self.options:
            lines += ["```{div} provenance", f"Command: `{found['command']}`.  "]
            lines += [f"Machine: {found['machine']}. Date: {found['date']}.", "```", ""]
        return self.parse_text_to_nodes("\n".join(lines))


class Figure(SphinxRole):
    """`{measured}`: of `NAME; ROW; COLUMN` the one figure, of a table but the first with its number."""

    def run(self) -> tuple[list[nodes.Node], list[nodes.system_message]]:
        """Puts its text there."""
        name, row, column, *table = (part.strip() for part in self.text.split(";"))
        self.env.note_dependency(str(RESULTS / f"{name}.json"))
        return [nodes.Text(cell(name, row, column, *map(int, table)))], []


class Command(SphinxRole):
    """`{printed-by}`: of `NAME`, the command that prints its figures."""

    def run(self) -> tuple[list[nodes.Node], list[nodes.system_message]]:
        """Puts it there as code."""
        return [nodes.literal("", result(self.text)["command"])], []


def setup(app: Sphinx) -> dict[str, bool]:
    """Registers them."""
    app.add_directive("measured", Measured)
    app.add_role("measured", Figure())
    app.add_role("printed-by", Command())
    return {"parallel_read_safe": True, "parallel_write_safe": True}
