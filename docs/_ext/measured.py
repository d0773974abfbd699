"""Tables of benchmarks/results/*.json, each with the command that printed it."""

import json
import pathlib
from collections.abc import Iterable
from typing import Any, ClassVar

from docutils import nodes
from docutils.parsers.rst import directives
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

RESULTS = pathlib.Path(__file__).parents[2] / "benchmarks" / "results"
_GRIDS = ("grid", "validation of the grid")


def _table(table: dict[str, Any], shown: Iterable[int], title: str) -> list[str]:
    """Return some columns of a table as Markdown."""
    head, *rows = [
        "| " + " | ".join(str(row[at]) for at in shown) + " |"
        for row in (table["columns"], *table["rows"])
    ]
    rule = "|---" * head.count(" | ") + "|---|"
    return [f"```{{table}} {title}", ":align: left", "", head, rule, *rows, "```", ""]


class Measured(SphinxDirective):
    """`{measured} NAME`: the tables of a result, with their command, machine and date.

    Grids are folded. The option `table` takes one table, by its number from 0; `brief` leaves out the
    command.
    """

    required_arguments = 1
    option_spec: ClassVar = {"table": directives.nonnegative_int, "brief": directives.flag}

    def run(self) -> list[nodes.Node]:
        """Write them as Markdown, whose code links as everywhere."""
        path = RESULTS / f"{self.arguments[0]}.json"
        self.env.note_dependency(str(path))
        found = json.loads(path.read_text(encoding="utf-8"))
        tables, lines = found["tables"], list[str]()
        for table in [tables[self.options["table"]]] if "table" in self.options else tables:
            columns = table["columns"]
            is_grid = ["grid" in table["title"] or name in _GRIDS for name in columns]
            shown = [at for at, folded in enumerate(is_grid) if not folded]
            if shown:
                lines += _table(table, shown, table["title"])
            if any(is_grid):
                title = "The grid of each method" if shown else table["title"]
                folded = sorted({0, *(at for at, grid in enumerate(is_grid) if grid)})
                lines += [f"````{{dropdown}} {title}", *_table(table, folded, ""), "````", ""]
        if "brief" not in self.options:
            lines += ["```{div} provenance", f"Command: `{found['command']}`.  "]
            lines += [f"Machine: {found['machine']}. Date: {found['date']}.", "```", ""]
        return self.parse_text_to_nodes("\n".join(lines))


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directive."""
    app.add_directive("measured", Measured)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
