"""Public names: where they link, which pages mention them, and types as short as they are written."""

import ast
import functools
import inspect
import re
import textwrap
import types
import typing
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform
from sphinx.util.inspect import stringify_signature
from sphinx.util.typing import stringify_annotation

import optperm

# The short names of the modules that pages and docstrings use, and the libraries that they link to.
_MODULES = {"jnp": "jax.numpy", "np": "numpy", "nnx": "flax.nnx", "nn": "flax.linen"}
_LIBRARIES = ("jax.", "optax.", "flax.", "numpy.")
_LONG = 130  # characters of an alias that keeps its name
_TREE = re.compile(r"PyTree\[(.*?)(?:, 'Params')?\]")
_ARRAY = re.compile(r"(\w+)\[Array, '\s*([^']*)'\]")


@functools.cache
def public() -> dict[str, str]:
    """From each way to write a public name of optperm to its whole name."""
    found = {}
    for module in (optperm, *rooms()):
        room = module.__name__.removeprefix("optperm").removeprefix(".")
        for name, value in public_names(module).items():
            whole = whole_public_name(name, module)
            members = [*vars(value)] if inspect.isclass(value) else []
            shown = [each for each in members if _is_documented(whole, each)]
            for known in ("", *(f".{member}" for member in shown)):
                for prefix in {"", "optperm.", f"{room}.", f"{module.__name__}."}:
                    found.setdefault(prefix + name + known, whole + known)
    return found


def rooms() -> list[types.ModuleType]:
    """The rooms of the package."""
    values = (getattr(optperm, name) for name in dir(optperm))
    return [value for value in values if inspect.ismodule(value)]


def public_names(module: types.ModuleType) -> dict[str, Any]:
    """The functions and classes that a module shows."""
    shown = {name: getattr(module, name) for name in dir(module) if not name.startswith("_")}
    return {name: value for name, value in shown.items() if not inspect.ismodule(value)}


def whole_public_name(name: str, module: types.ModuleType) -> str:
    """A public name as its users write it: of a room, unless it stands at the top as well."""
    return f"optperm.{name}" if name in dir(optperm) else f"{module.__name__}.{name}"


_METHODS = {
    "optperm.training.TrainState": ("create", "step_rng", "evaluate", "apply_gradients"),
    "optperm.training.Optimizer": ("evaluate", "update"),
    "optperm.training.History": ("steps", "epochs", "last"),
    "optperm.training.Event": ("state", "evaluate"),
}


def _is_documented(whole: str, member: str) -> bool:
    return member in _METHODS.get(whole, ())


def target_of(text: str) -> str | None:
    """What code in a sentence may refer to: a name of ours, or of a library by its whole name."""
    bare = re.sub(r"\(.*\)$", "", text)
    if re.sub(r"\(\)$", "", text) in public():
        return public()[bare]
    first, dot, rest = bare.partition(".")
    whole = _MODULES.get(first, first) + dot + rest
    is_name = re.fullmatch(r"[\w.]+\w", whole) is not None
    return whole if is_name and whole.startswith(_LIBRARIES) else None


class LinkNames(SphinxTransform):
    """Links each public name that stands as code in a sentence, and remembers who mentions it."""

    default_priority = 700

    def apply(self, **_: Any) -> None:
        """Replaces literals by references."""
        mentions = self.env.__dict__.setdefault("optperm_mentions", {})
        here = mentions.setdefault(self.env.docname, set())
        here.clear()
        for node in list(self.document.findall(nodes.literal)):
            whole = target_of(node.astext())
            if whole is None or _stands_in(
                node, nodes.reference, nodes.title, addnodes.pending_xref
            ):
                continue
            if _stands_in(node, addnodes.desc_signature) or whole == _entry_around(node):
                continue
            link = addnodes.pending_xref(
                "",
                refdomain="py",
                reftype="obj",
                reftarget=whole,
                refexplicit=True,
                refdoc=self.env.docname,
            )
            node.replace_self(link)
            link += node
            here.add(whole)


def _stands_in(node: nodes.Node, *kinds: type) -> bool:
    while node.parent is not None:
        node = node.parent
        if isinstance(node, kinds):
            return True
    return False


def _entry_around(node: nodes.Node) -> str | None:
    while node is not None and not isinstance(node, addnodes.desc):
        node = node.parent
    return node[0]["ids"][0] if node is not None and node[0].get("ids") else None


def add_mentions(app: Sphinx, doctree: nodes.document, docname: str) -> None:
    """Says below each entry of the reference which other pages mention it."""
    for entry in doctree.findall(addnodes.desc):
        whole = entry[0]["ids"][0] if entry[0].get("ids") else ""
        found = app.env.__dict__.get("optperm_mentions", {})
        pages = sorted(page for page, names in found.items() if whole in names and page != docname)
        pages = [page for page in pages if page != "design/changelog"]
        if not pages or whole not in public().values():
            continue
        line = nodes.paragraph("", "Mentioned in: ", classes=["mentions"])
        for index, page in enumerate(pages):
            uri = app.builder.get_relative_uri(docname, page)
            title = app.env.titles[page].astext()
            line += [
                nodes.Text(", " * bool(index)),
                nodes.reference("", title, refuri=uri, internal=True),
            ]
        entry[-1] += line


def forget(app: Sphinx, env: Any, docname: str) -> None:
    """Of a page that is read again, or gone."""
    del app
    env.__dict__.get("optperm_mentions", {}).pop(docname, None)


class _Written(ast.NodeTransformer):
    """A type as it is written, with short aliases written out and the modules of classes."""

    def __init__(self, known: dict[str, Any]) -> None:
        self.known = known

    def visit_Name(self, node: ast.Name) -> ast.AST:
        value = self.known.get(node.id)
        if typing.get_origin(value) is not None:
            text = _stringify(value)
            return ast.Name(text) if len(text) < _LONG else node
        if inspect.isclass(value) and value.__module__ not in ("builtins", "typing"):
            whole = f"{value.__module__}.{node.id}"
            return ast.Name(public().get(node.id, node.id if "._" in whole else whole))
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        first, dot, rest = ast.unparse(node).partition(".")
        return ast.Name(_MODULES.get(first, first) + dot + rest)


def _stringify(annotation: Any) -> str:
    return re.sub(r"~|typing\.|optperm\.\w+\.", "", stringify_annotation(annotation, "smart"))


def short_signature(
    app: Sphinx,
    what: str,
    name: str,
    value: Any,
    options: Any,
    given: str | None,
    returns: str | None,
) -> tuple[str | None, str | None] | None:
    """The signature of a function with its types as they are written."""
    del app, name, options, given, returns
    if what == "class":
        return ("", None)
    function = inspect.unwrap(getattr(value, "__func__", value))
    if not inspect.isfunction(function):
        return None
    definition = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    written = _Written(function.__globals__)
    kinds = {
        node.arg: ast.unparse(written.visit(node.annotation))
        for node in ast.walk(definition.args)
        if isinstance(node, ast.arg) and node.annotation is not None
    }
    signature = inspect.signature(function)
    parameters = [
        each.replace(annotation=kinds.get(each.name, each.empty))
        for each in signature.parameters.values()
        if each.name not in ("self", "cls")
    ]
    shown = signature.replace(parameters=parameters, return_annotation=signature.empty)
    gives = ast.unparse(written.visit(definition.returns)) if definition.returns else None
    return stringify_signature(shown), gives


def types_of_fields(
    app: Sphinx, what: str, name: str, value: Any, options: Any, lines: list[str]
) -> None:
    """Puts the type of each field in front of what the docstring says of it."""
    del app, name, options
    if what != "class" or "Attributes:" not in lines:
        return
    fields = vars(value).get("__annotations__") or inspect.get_annotations(value)
    start = lines.index("Attributes:")
    for index in range(start + 1, len(lines)):
        found = re.match(r"  (\w+): (.*)", lines[index])
        if found and found[1] in fields:
            lines[index] = f"  {found[1]}: ``{_readable(fields[found[1]])}``. {found[2]}"
        if lines[index] and not lines[index].startswith(" "):
            break


def _readable(annotation: Any) -> str:
    """A type of jaxtyping in words: `float32[d, d]`, and trees of such."""
    text = getattr(annotation, "__forward_arg__", annotation)
    text = text if isinstance(text, str) else _stringify(text)
    text = text.replace('"', "'")

    def array(found: re.Match[str]) -> str:
        dims = ", ".join(found[2].replace("?", "").split())
        return f"{found[1].lower()}[{dims}]"

    text = _ARRAY.sub(array, text)
    return _TREE.sub(r"tree of \1", re.sub(r", 'Params'\]", r"] like params", text)).replace(
        "]] like params", "], like params"
    )


def setup(app: Sphinx) -> dict[str, bool]:
    """Connects the above."""
    app.add_transform(LinkNames)
    app.connect("doctree-resolved", add_mentions)
    app.connect("env-purge-doc", forget)
    app.connect("autodoc-process-signature", short_signature)
    app.connect("autodoc-process-docstring", types_of_fields, priority=400)
    return {"parallel_read_safe": False, "parallel_write_safe": True}
