"""The flags of the command `optperm`, read from the parser itself."""

import re
import types
import typing
from typing import Any

from cyclopts import App
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from optperm.cli import commands


def _type(hint: Any) -> str:
    """What a flag takes."""
    if typing.get_origin(hint) is typing.Literal:
        return ", ".join(f"`{choice}`" for choice in typing.get_args(hint))
    if isinstance(hint, types.UnionType):
        return _type(next(kind for kind in typing.get_args(hint) if kind is not types.NoneType))
    names = {int: "whole number", float: "number", bool: "switch", str: "text"}
    return names.get(hint, "path")


def _groups(app: App) -> dict[str, list[list[str]]]:
    """The lines of the table of each group: flag, what it takes, default, help."""
    groups: dict[str, list[list[str]]] = {}
    for argument in app.assemble_argument_collection(parse_docstring=True):
        if argument.name == "*":
            continue
        flags = " ".join(f"`{name}`" for name in argument.names)
        default = argument.field_info.default
        no_default = default is None or default is False or isinstance(default, type)
        shown = "" if no_default else f"`{default}`"
        about = " ".join((argument.parameter.help or "").split()).replace("|", r"\|")
        about = about.replace("*", r"\*").replace("<", r"\<").replace("$", r"\$")
        about = re.sub(r"'(\w+)'|(--[a-z-]+|\b\w+_\w+\b)", r"`\1\2`", about)
        (group,) = argument.parameter.group or ()
        row = [flags, _type(argument.hint), shown, about]
        groups.setdefault(str(group.name), []).append(row)
    return groups


def _table(rows: list[list[str]]) -> list[str]:
    lines = ["| flag | takes | default | what it is |", "|---|---|---|---|"]
    return [*lines, *("| " + " | ".join(row) + " |" for row in rows), ""]


def _said(app: App) -> list[str]:
    """The help of a command, and its example."""
    about, _, example = app.help.partition("\n\nExample: ")
    return [about, "", "```sh", example.partition("\n\n")[0].strip(), "```", ""]


def commands_page() -> str:
    """The commands as Markdown."""
    app = next(
        value for value in vars(commands).values() if isinstance(value, App) and "train" in value
    )
    methods = [name for name in app["train"] if not name.startswith("-")]
    shared = _groups(app["train"][methods[0]])
    lines = ["## optperm train METHOD", "", *_said(app["train"])]
    lines += ["Every method takes these flags, and those of its own below.", ""]
    own = {name: _groups(app["train"][name]) for name in methods}
    common = [
        group
        for group, rows in shared.items()
        if all(rows == each.get(group) for each in own.values())
    ]
    for group in common:
        lines += [f"### {group}", "", *_table(shared[group])]
    for name in methods:
        lines += [f"## optperm train {name}", "", *_said(app["train"][name])]
        for group, rows in own[name].items():
            if group not in common:
                lines += _table(rows)
    lines += ["## optperm evaluate", "", *_said(app["evaluate"])]
    lines += _table([row for rows in _groups(app["evaluate"]).values() for row in rows])
    return "\n".join(lines)


class Commands(SphinxDirective):
    """`{commands}`: all of them."""

    def run(self) -> list[nodes.Node]:
        """Writes them as Markdown."""
        return self.parse_text_to_nodes(commands_page(), allow_section_headings=True)


def setup(app: Sphinx) -> dict[str, bool]:
    """Registers the directive."""
    app.add_directive("commands", Commands)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
