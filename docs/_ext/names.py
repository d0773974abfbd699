"""Public names: where they link, which pages mention them, and types as short as they are written."""

import ast
import functools
import importlib
import inspect
import pathlib
import re
import types
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform
from sphinx.util.inspect import stringify_signature
from sphinx.util.inventory import InventoryFile

import optperm

INVENTORIES = pathlib.Path(__file__).parents[1] / "inventories"
# The short names of the modules that pages and docstrings use.
_MODULES = {"jnp": "jax.numpy", "np": "numpy", "nnx": "flax.nnx", "nn": "flax.linen"}
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


@functools.cache
def external() -> frozenset[str]:
    """The names of other libraries that the inventories hold."""
    names: set[str] = set()
    for path in INVENTORIES.glob("*.inv"):
        data = InventoryFile.loads(path.read_bytes(), uri="").data
        names.update(*(entries for entries in data.values()))
    return frozenset(names)


def whole_name(text: str) -> str:
    """A name with its module written out: `jnp.sum(x)` is `jax.numpy.sum`."""
    text = re.sub(r"\(.*\)$", "", text)
    first, dot, rest = text.partition(".")
    return _MODULES.get(first, first) + dot + rest


def target_of(text: str) -> str | None:
    """What code in a sentence refers to, if it is a name that has a page."""
    bare = re.sub(r"\(\)$", "", text)
    if bare in public():
        return public()[bare]
    whole = whole_name(bare)
    return whole if whole in external() else None


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


@functools.cache
def _module(name: str) -> tuple[ast.Module, dict[str, str]]:
    """A module's source, and what the names that it imports stand for."""
    tree = ast.parse(inspect.getsource(importlib.import_module(name)))
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {each.asname or each.name: each.name for each in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {each.asname or each.name: f"{node.module}.{each.name}" for each in node.names}
    return tree, names


class _Written(ast.NodeTransformer):
    """A type as it is written, with aliases of optperm written out and other names in full."""

    def __init__(self, module: str) -> None:
        self.module = module
        self.tree, self.names = _module(module)

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        is_name = isinstance(node.value, str) and node.value.isidentifier()
        return self.visit(ast.Name(node.value)) if is_name else node

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        if ast.unparse(node.value) == "Literal":
            return node
        return self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> ast.AST:
        whole = self.names.get(node.id, f"{self.module}.{node.id}")
        module, _, name = whole.rpartition(".")
        if module.startswith("optperm"):
            if name in public():
                return ast.Name(public()[name])
            tree, _ = _module(module)
            for statement in tree.body:
                match statement:
                    case ast.Assign(targets=[ast.Name(id=known)], value=value) if known == name:
                        return _Written(module).visit(ast.parse(ast.unparse(value)).body[0].value)
                    case ast.AnnAssign(target=ast.Name(id=known), value=value) if known == name:
                        return _Written(module).visit(ast.parse(ast.unparse(value)).body[0].value)
            return node
        return ast.Name(whole) if node.id in self.names else node


def written(annotation: ast.expr | None, module: str) -> Any:
    """An annotation's text."""
    if annotation is None:
        return inspect.Parameter.empty
    copy = ast.parse(ast.unparse(annotation), mode="eval").body
    return ast.unparse(_Written(module).visit(copy))


def _home(value: Any) -> str:
    """The name of the module that a public name is written in."""
    outermost = value.__qualname__.partition(".")[0]
    module = importlib.import_module(value.__module__)
    folder = pathlib.Path(inspect.getsourcefile(module) or "").parent
    prefix = (
        value.__module__ if hasattr(module, "__path__") else value.__module__.rpartition(".")[0]
    )
    for path in sorted(folder.glob("*.py")):
        name = f"{prefix}.{path.stem}"
        if path.stem != "__init__" and any(
            getattr(node, "name", None) == outermost for node in _module(name)[0].body
        ):
            return name
    raise LookupError(f"no file of {folder} defines {outermost}")


def _definition(value: Any) -> ast.FunctionDef | ast.ClassDef:
    tree, _ = _module(_home(value))
    *classes, name = value.__qualname__.split(".")
    body = tree.body
    for each in classes:
        (found,) = (node for node in body if isinstance(node, ast.ClassDef) and node.name == each)
        body = found.body
    kinds = (ast.FunctionDef, ast.ClassDef)
    return next(node for node in body if isinstance(node, kinds) and node.name == name)


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
    if not inspect.isfunction(inspect.unwrap(getattr(value, "__func__", value))):
        return None
    value = getattr(value, "__func__", value)
    definition = _definition(value)
    listed = definition.args
    kinds = {
        each.arg: written(each.annotation, _home(value))
        for each in (
            *listed.posonlyargs,
            *listed.args,
            *listed.kwonlyargs,
            listed.vararg,
            listed.kwarg,
        )
        if each is not None
    }
    signature = inspect.signature(value)
    parameters = [
        each.replace(annotation=kinds[each.name])
        for each in signature.parameters.values()
        if each.name not in ("self", "cls")
    ]
    shown = signature.replace(parameters=parameters, return_annotation=inspect.Signature.empty)
    gives = written(definition.returns, _home(value)) if definition.returns else None
    if gives == "typing.Self":
        gives = public().get(value.__qualname__.split(".")[0])
    return stringify_signature(shown), gives


def types_of_fields(
    app: Sphinx, what: str, name: str, value: Any, options: Any, lines: list[str]
) -> None:
    """Puts the type of each field in front of what the docstring says of it."""
    del app, name, options
    if what != "class" or "Attributes:" not in lines:
        return
    fields = {
        node.target.id: _readable(node.annotation)
        for node in _definition(value).body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    start = lines.index("Attributes:")
    for index in range(start + 1, len(lines)):
        found = re.match(r"  (\w+): (.*)", lines[index])
        if found and found[1] in fields:
            lines[index] = f"  {found[1]}: ``{fields[found[1]]}``. {found[2]}"
        if lines[index] and not lines[index].startswith(" "):
            break


def _readable(annotation: ast.expr) -> str:
    """A type of jaxtyping in words: `float32[d, d]`, and trees of such."""
    text = ast.unparse(annotation).strip("'\"")

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
