"""Public names: where they link, and signatures as they are written."""

import ast
import functools
import inspect
import re
import textwrap
import types
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform
from sphinx.util.typing import stringify_annotation

import optperm

# The short names of the modules that pages and docstrings use, and the libraries that they link to.
_MODULES = {"jnp": "jax.numpy", "np": "numpy", "nnx": "flax.nnx", "nn": "flax.linen"}
_LIBRARIES = ("jax.", "optax.", "flax.", "numpy.")
_ARRAY = re.compile(r"(\w+)\[Array, '\s*([^']*)'\]")
# The members that the reference documents.
_METHODS = {
    "optperm.training.TrainState": ("create", "step_rng", "evaluate", "apply_gradients"),
    "optperm.training.Optimizer": ("evaluate", "update"),
    "optperm.training.History": ("steps", "epochs", "last", "plot"),
    "optperm.training.Event": ("state", "evaluate"),
}


def rooms() -> list[types.ModuleType]:
    """Return the rooms of the package."""
    values = (getattr(optperm, name) for name in dir(optperm))
    return [value for value in values if inspect.ismodule(value)]


def public_names(module: types.ModuleType) -> dict[str, Any]:
    """Return the functions and classes that a module shows."""
    shown = {name: getattr(module, name) for name in dir(module) if not name.startswith("_")}
    return {name: value for name, value in shown.items() if not inspect.ismodule(value)}


def whole_public_name(name: str, module: types.ModuleType) -> str:
    """Return a public name as its users write it: of a room, unless it stands at the top as well."""
    return f"optperm.{name}" if name in dir(optperm) else f"{module.__name__}.{name}"


@functools.cache
def _public() -> dict[str, str]:
    """Return from each way to write a public name of optperm its whole name."""
    found: dict[str, str] = {}
    for module in (optperm, *rooms()):
        room = module.__name__.removeprefix("optperm").removeprefix(".")
        for name in public_names(module):
            whole = whole_public_name(name, module)
            for member in ("", *(f".{each}" for each in _METHODS.get(whole, ()))):
                for prefix in {"", "optperm.", f"{room}.", f"{module.__name__}."}:
                    found.setdefault(prefix + name + member, whole + member)
    return found


def _find_target(text: str) -> str | None:
    """Return what code in a sentence refers to: a name of ours, or of a library by its whole name."""
    bare = re.sub(r"\(.*\)$", "", text)
    if re.sub(r"\(\)$", "", text) in _public():
        return _public()[bare]
    first, dot, rest = bare.partition(".")
    whole = _MODULES.get(first, first) + dot + rest
    is_name = re.fullmatch(r"[\w.]+\w", whole) is not None
    return whole if is_name and whole.startswith(_LIBRARIES) else None


class LinkNames(SphinxTransform):
    """Links each public name that stands as code in a sentence."""

    default_priority = 700

    def apply(self, **_: Any) -> None:
        """Replace literals by references."""
        for node in list(self.document.findall(nodes.literal)):
            whole, around = _find_target(node.astext()), node.parent
            while whole is not None and around is not None:
                own = around[0]["ids"] if isinstance(around, addnodes.desc) else ()
                kinds = nodes.reference, nodes.title, addnodes.pending_xref, addnodes.desc_signature
                whole = None if isinstance(around, kinds) or whole in own else whole
                around = around.parent
            if whole is not None:
                where = {"refdomain": "py", "reftype": "obj", "refdoc": self.env.docname}
                link = addnodes.pending_xref("", reftarget=whole, refexplicit=True, **where)
                node.replace_self(link)
                link += node


def write_signature(
    app: Sphinx, what: str, name: str, value: Any, options: Any, *given: str | None
) -> tuple[str, str | None] | None:
    """Return the arguments and the result of a function as they are written in its module."""
    function = inspect.unwrap(getattr(value, "__func__", value))
    if what == "class" or not inspect.isfunction(function):
        return ("", None) if what == "class" else None
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    assert isinstance(definition, ast.FunctionDef)
    shown = definition.args
    shown.args = [each for each in shown.args if each.arg not in ("self", "cls")]
    return f"({ast.unparse(shown)})", definition.returns and ast.unparse(definition.returns)


def write_types(
    app: Sphinx, what: str, name: str, value: Any, options: Any, lines: list[str]
) -> None:
    """Put the type of each field, such as `float32[d, d]`, in front of what the docstring says of it."""
    is_class = what == "class" and "Attributes:" in lines
    fields = inspect.get_annotations(value) if is_class else {}
    for index in range(lines.index("Attributes:") if fields else len(lines), len(lines)):
        found = re.match(r"  (\w+): (.*)", lines[index])
        if found is None or found[1] not in fields:
            continue
        kind = getattr(fields[found[1]], "__forward_arg__", fields[found[1]])
        text = kind if isinstance(kind, str) else stringify_annotation(kind, "smart")
        text = re.sub(r"~|typing\.|optperm\.[\w.]+\.", "", text.replace('"', "'"))
        text = _ARRAY.sub(
            lambda m: f"{m[1].lower()}[{', '.join(m[2].replace('?', '').split())}]", text
        ).replace(", 'Params'", "")
        lines[index] = f"  {found[1]}: ``{text}``. {found[2]}"


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect the above."""
    app.add_transform(LinkNames)
    app.connect("autodoc-process-signature", write_signature)
    app.connect("autodoc-process-docstring", write_types, priority=400)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
