"""The flags of the command `optperm`, read from the parser itself."""

import re
import typing

from cyclopts import App
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from optperm.cli import commands
from optperm.cli.methods import METHODS

_SHARED = "Data and model"


def _table(app: App, *, is_shared: bool = False) -> list[str]:
    """Return the flags that all methods share, or all others of a command, as a Markdown table."""
    lines = ["| flag | default | what it is |", "|---|---|---|"]
    for argument in app.assemble_argument_collection(parse_docstring=True):
        (group,) = argument.parameter.group or ()
        if argument.name == "*" or (str(group.name) == _SHARED) != is_shared:
            continue
        default = argument.field_info.default
        has_none = default is None or default is False or isinstance(default, type)
        about = re.sub(r"([|*<$])", r"\\\1", " ".join((argument.parameter.help or "").split()))
        about = re.sub(r"'(\w+)'|(--[a-z-]+|\b\w+_\w+\b)", r"`\1\2`", about)
        if typing.get_origin(argument.hint) is typing.Literal:
            about += f" One of {', '.join(f'`{each}`' for each in typing.get_args(argument.hint))}."
        flags = " ".join(f"`{name}`" for name in argument.names)
        lines.append(f"| {flags} | {'' if has_none else f'`{default}`'} | {about} |")
    return [*lines, ""]


class Commands(SphinxDirective):
    """`{commands}`: all commands."""

    def run(self) -> list[nodes.Node]:
        """Write them as Markdown."""
        train, evaluate = commands._App["train"], commands._App["evaluate"]
        lines = ["## optperm train METHOD", "", "Every method takes these flags:", ""]
        lines += _table(train[next(iter(METHODS))], is_shared=True)
        for method in METHODS.values():
            lines += [f"## optperm train {method.name}", "", method.help, ""]
            lines += _table(train[method.name])
        lines += ["## optperm evaluate", "", "`optperm evaluate runs/sgperm-mlp-digits-s0`", ""]
        lines += _table(evaluate)
        return self.parse_text_to_nodes("\n".join(lines), allow_section_headings=True)


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directive."""
    app.add_directive("commands", Commands)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
