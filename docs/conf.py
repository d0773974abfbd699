"""How Sphinx builds the site: see index.md."""

import importlib
import inspect
import pathlib
import tomllib
from typing import Any

import optperm

_ROOT = pathlib.Path(__file__).parents[1]

project = "optperm"
release = tomllib.loads((_ROOT / "pyproject.toml").read_text())["project"]["version"]

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.mathjax",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
]
myst_enable_extensions = ["dollarmath"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"optperm {release}"
html_show_copyright = False
smartquotes_action = "D"  # Dashes, not quotes: a string in those is one that is to be passed.

# Docstrings write code in single backticks, as Markdown does, and give types and shapes in words: the
# annotations would be spelled out as unions of a dozen types.
default_role = "code"
autodoc_typehints = "none"
autodoc_member_order = "bysource"
napoleon_numpy_docstring = False
napoleon_attr_annotations = False


def write_pages(_: Any) -> None:
    """Writes a page for each room of the package, of the public names that are defined in it."""
    public = [getattr(optperm, name) for name in dir(optperm)]
    functions_first = sorted(filter(callable, public), key=inspect.isclass)
    rooms: dict[str, list[Any]] = {}
    for value in functions_first:
        parts = value.__module__.split(".")
        rooms.setdefault(parts[1] if len(parts) > 2 else "steps", []).append(value)
    for room, values in rooms.items():
        title, intro = "One step, and several optimizers.", _STEPS
        if room != "steps":
            package = inspect.getdoc(importlib.import_module(f"optperm.{room}")) or ""
            title, _, intro = package.partition("\n\n")
        heading = title.removesuffix(".")
        entries = (
            f".. auto{'class' if inspect.isclass(value) else 'function'}:: {value.__name__}"
            for value in values
        )
        lines = [heading, "=" * len(heading), intro, ".. currentmodule:: optperm", *entries]
        text = "\n\n".join(lines).replace("\n\n=", "\n=", 1) + "\n"
        (_ROOT / "docs" / "api" / f"{room}.rst").write_text(text)


_STEPS = "What a training step of any method is made of, and one optimizer after another."


def setup(app: Any) -> None:
    """Connects the above."""
    app.connect("builder-inited", write_pages)
