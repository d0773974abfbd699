"""How Sphinx builds the site: see index.md."""

import pathlib
import tomllib

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
