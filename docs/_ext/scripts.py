"""Lists of scripts, from their docstrings, and of the pages of a folder, by how they begin."""

import ast
import pathlib
import re

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

_ROOT = pathlib.Path(__file__).parents[2]


class Scripts(SphinxDirective):
    """`{scripts} FOLDER`: its scripts that have a command line."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Writes them as Markdown."""
        lines = []
        for path in sorted((_ROOT / self.arguments[0]).glob("*.py")):
            about = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
            title, _, rest = about.partition("\n\n")
            command = re.search(r"^    (python .*(?:\n        .*)*)", rest, re.MULTILINE)
            if command is None:  # what scripts share
                continue
            self.env.note_dependency(str(path))
            text = re.sub(r"^    ", "", command[1], flags=re.MULTILINE)
            lines += [f"`{path.name}`", f": {' '.join(title.split())}", ""]
            lines += ["  ```sh", *(f"  {line}" for line in text.splitlines()), "  ```", ""]
        return self.parse_text_to_nodes("\n".join(lines))


class Pages(SphinxDirective):
    """`{pages}`: the other pages of this folder, each with its first paragraph."""

    def run(self) -> list[nodes.Node]:
        """Writes them as Markdown."""
        lines = []
        here = pathlib.Path(self.env.doc2path(self.env.docname))
        for path in sorted(here.parent.glob("*.md")):
            if path == here:
                continue
            title, paragraph, *_ = path.read_text(encoding="utf-8").split("\n\n")
            self.env.note_dependency(str(path))
            lines += [f"[{title.removeprefix('# ').strip()}]({path.name})"]
            lines += [f": {' '.join(paragraph.split())}", ""]
        return self.parse_text_to_nodes("\n".join(lines))


def setup(app: Sphinx) -> dict[str, bool]:
    """Registers both."""
    app.add_directive("scripts", Scripts)
    app.add_directive("pages", Pages)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
