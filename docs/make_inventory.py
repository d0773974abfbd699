"""Writes the inventories of the names of other libraries that the pages and docstrings use.

Sphinx links names by inventories, which it would otherwise fetch from each library's site. These hold
what is used here alone, with the addresses by which those sites name their pages. conf.py calls it.

    python docs/make_inventory.py
"""

import importlib
import inspect
import pathlib
import re
import sys
import zlib

sys.path.append(str(pathlib.Path(__file__).parent / "_ext"))

import names

DOCS = pathlib.Path(__file__).parent
# Where each library's pages are, and its names that stand in types alone.
SITES = {
    "jax": "https://docs.jax.dev/en/latest/",
    "optax": "https://optax.readthedocs.io/en/latest/",
    "flax": "https://flax.readthedocs.io/en/latest/",
    "numpy": "https://numpy.org/doc/stable/",
    "python": "https://docs.python.org/3/",
}
IN_TYPES = (
    *("jax.Array", "jax.sharding.Mesh", "jax.sharding.NamedSharding", "numpy.ndarray"),
    *("optax.GradientTransformation", "optax.GradientTransformationExtraArgs", "optax.Params"),
    *(
        "optax.ScalarOrSchedule",
        "optax.Schedule",
        "optax.Updates",
        "flax.nnx.Optimizer",
        "os.PathLike",
    ),
    *(f"collections.abc.{name}" for name in ("Callable", "Iterable", "Mapping", "Sequence")),
)
# The pages of Optax, which lists several names on each.
_OPTAX = {
    "combining_optimizers": "chain named_chain partition",
    "optimizer_wrappers": "apply_if_finite masked MultiSteps flatten lookahead",
    "apply_updates": "apply_updates",
    "optimizer_schedules": "inject_hyperparams cosine_decay_schedule ScalarOrSchedule Schedule",
    "optimizers": "adam adamw sgd lion",
    "contrib": "contrib.muon",
    "losses": "softmax_cross_entropy_with_integer_labels",
    "utilities": "MaskedNode EmptyState",
}
_FLAX = {
    "flax.nnx.Optimizer": "flax.nnx/training/optimizer.html#flax.nnx.optimizer.Optimizer",
    "flax.nnx.jit": "flax.nnx/transforms.html#flax.nnx.jit",
    "flax.nnx.grad": "flax.nnx/transforms.html#flax.nnx.grad",
    "flax.training.train_state.TrainState": (
        "flax.training.html#flax.training.train_state.TrainState"
    ),
}
# JAX has a page for a name, but for those of these modules, and its modules themselves.
_JAX_MODULES = ("jax.sharding", "jax.export", "jax.typing")


def used() -> set[str]:
    """All names of other libraries that stand as code in a sentence, and those in types."""
    root = DOCS.parent
    files = [*DOCS.rglob("*.md"), root / "CHANGELOG.md", *(root / "optperm").rglob("*.py")]
    pattern = re.compile(r"`((?:jax|jnp|optax|flax|nnx|np|numpy)\.[\w.]+)(?:\(\))?`")
    files = [file for file in files if "_build" not in file.parts]
    found = {names.whole_name(name) for file in files for name in pattern.findall(file.read_text())}
    return found | {*IN_TYPES}


def resolved(name: str) -> object:
    """The object of a name, so that none is invented."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            value = importlib.import_module(".".join(parts[:length]))
        except ImportError:
            continue
        for part in parts[length:]:
            value = getattr(value, part)
        return value
    raise LookupError(f"{name} is no name of a library that is installed")


def page_of(name: str) -> tuple[str, str] | None:
    """The library of a name, and its page there; None if it has none."""
    library, _, rest = name.partition(".")
    if inspect.ismodule(resolved(name)):
        return ("jax", f"{name}.html") if library == "jax" else None
    if library == "jax":
        module = name.rpartition(".")[0]
        is_listed = module in _JAX_MODULES
        return "jax", f"{module}.html#{name}" if is_listed else f"_autosummary/{name}.html#{name}"
    if library == "numpy":
        return "numpy", f"reference/generated/{name}.html#{name}"
    if library == "flax":
        return ("flax", f"api_reference/{_FLAX[name]}") if name in _FLAX else None
    if library == "optax":
        pages = (page for page, names in _OPTAX.items() if rest in names.split())
        return "optax", f"api/{next(pages, 'transformations')}.html#{name}"
    module = name.rpartition(".")[0]
    return "python", f"library/{module}.html#{name}"


def inventories() -> dict[str, bytes]:
    """Each library's inventory, in the format that Sphinx reads."""
    lines: dict[str, list[str]] = {library: [] for library in SITES}
    for name in sorted(used()):
        found = page_of(name)
        if found is not None:
            library, page = found
            value = resolved(name)
            role = "module" if inspect.ismodule(value) else "function"
            role = "class" if inspect.isclass(value) or name in IN_TYPES else role
            lines[library].append(f"{name} py:{role} 1 {page} -\n")
    head = (
        "# Sphinx inventory version 2\n# Project: {}\n# Version: \n"
        "# The remainder of this file is compressed using zlib.\n"
    )
    return {
        library: head.format(library).encode() + zlib.compress("".join(entries).encode(), 9)
        for library, entries in lines.items()
    }


def write() -> None:
    """Writes all of them."""
    names.INVENTORIES.mkdir(exist_ok=True)
    for library, content in inventories().items():
        (names.INVENTORIES / f"{library}.inv").write_bytes(content)


if __name__ == "__main__":
    write()
