"""How Sphinx builds the site."""

import inspect
import pathlib
import sys
import tomllib
from typing import Any

import optperm

sys.path.append(str(pathlib.Path(__file__).parent / "_ext"))

import names

_DOCS = pathlib.Path(__file__).parent

project = "optperm"
release = tomllib.loads((_DOCS.parent / "pyproject.toml").read_text())["project"]["version"]

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.intersphinx",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_design",
    "mathml",
    "measured",
    "names",
]
html_math_renderer = "mathml"
myst_enable_extensions = ["attrs_inline", "colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3
exclude_patterns = ["_build", "_ext", "inventories"]
html_theme = "furo"
html_title = f"optperm {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = [("tables.js", {"defer": "defer"})]
html_show_copyright = False
html_show_sphinx = False
smartquotes_action = "D"  # Dashes, not quotes: a string in those is one that is to be passed.

# Each link has to lead somewhere, but for names of other libraries that are in no inventory, and types
# that no page describes. Sites are not asked for their inventories: those here hold what is used.
nitpicky = True
nitpick_ignore_regex = [
    ("py:obj", r"(jax|optax|flax|numpy)\..*"),
    ("py:class", r"(jnp|np|nnx)\.\w+|[A-Z]\w*"),
]
_SITES = {
    "jax": "https://docs.jax.dev/en/latest/",
    "optax": "https://optax.readthedocs.io/en/latest/",
    "flax": "https://flax.readthedocs.io/en/latest/",
    "numpy": "https://numpy.org/doc/stable/",
    "python": "https://docs.python.org/3/",
}
intersphinx_mapping = {
    library: (site, str(_DOCS / "inventories" / f"{library}.inv"))
    for library, site in _SITES.items()
}

# Docstrings write code in single backticks, as Markdown does. Types are shown as they are written, by
# names without their modules.
default_role = "code"
autodoc_typehints = "signature"
python_use_unqualified_type_names = True
python_display_short_literal_types = True
maximum_signature_line_length = 70
autodoc_member_order = "bysource"
autosummary_generate = False
napoleon_numpy_docstring = False
napoleon_attr_annotations = False
toc_object_entries_show_parents = "hide"


def write_reference(_: Any) -> None:
    """Writes a page for each room of the package but `training`, of its public names."""
    for module in [optperm, *names.rooms()]:
        if module.__name__ == "optperm.training":
            continue
        public = names.public_names(module)
        title, _, intro = (inspect.getdoc(module) or "").partition("\n\n")
        if module is optperm:
            title, intro = "One step, and several optimizers.", _STEPS
            public = {
                name: value for name, value in public.items() if value.__module__.count(".") == 1
            }
        heading = title.removesuffix(".")
        functions_first = sorted(public, key=lambda name: inspect.isclass(public[name]))
        whole = {name: names.whole_public_name(name, module) for name in functions_first}
        entries = (
            f".. auto{'class' if inspect.isclass(public[name]) else 'function'}:: {whole[name]}"
            for name in functions_first
        )
        summary = ".. autosummary::\n   :nosignatures:\n\n" + "\n".join(
            f"   ~{each}" for each in whole.values()
        )
        lines = [heading, "=" * len(heading), intro, summary, *entries]
        text = "\n\n".join(lines).replace("\n\n=", "\n=", 1) + "\n"
        room = "steps" if module is optperm else module.__name__.rpartition(".")[2]
        page = _DOCS / "reference" / f"{room}.rst"
        if not page.exists() or page.read_text() != text:
            page.write_text(text)


_STEPS = "The parts of a training step of any method, and the switch from one optimizer to another."


def setup(app: Any) -> None:
    """Connects the above."""
    app.connect("builder-inited", write_reference)
