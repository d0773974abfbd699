"""Formulas as MathML, which browsers draw themselves: no script, and nothing from elsewhere."""

import re
from typing import Any

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.application import Sphinx


def _markup(text: str, display: str = "inline") -> str:
    # What the converter does not know: a space by a backslash, and an underscore within words.
    text = re.sub(r"(?<!\\)\\(?=\s)", r"\\;", text.strip())
    text = re.sub(r"\\text\{[^}]*\}", lambda found: found[0].replace(r"\_", "_"), text)
    return convert(text, display=display)


def _inline(writer: Any, node: nodes.math) -> None:
    writer.body.append(_markup(node.astext()))
    raise nodes.SkipNode


def _block(writer: Any, node: nodes.math_block) -> None:
    """Each part between empty lines is a formula; one of several lines is aligned, as Sphinx does it."""
    for part in re.split(r"\n\s*\n", node.astext().strip()):
        has_lines = r"\\" in part and r"\begin" not in part
        text = rf"\begin{{align*}}{part}\end{{align*}}" if has_lines else part
        writer.body.append(f'<div class="math-block">{_markup(text, "block")}</div>\n')
    raise nodes.SkipNode


def setup(app: Sphinx) -> dict[str, bool]:
    """Registers the renderer."""
    app.add_html_math_renderer("mathml", (_inline, None), (_block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
