"""Find out what each leaf of a model is: a kernel, an embedding, a scale or a bias, and along which axes.

The sources, in this order:

1. what the caller says;
2. the names of axes (Flax's partitioned params, Haliax's named arrays), which tell layers and experts;
3. the names of layers, such as "query", which tell the forms that a leaf of a single layer may have;
4. what the leaves of a subtree share: if its scales and biases have one axis more than in a single layer,
   the subtree is a stack of layers, along the axis that all its leaves share;
5. the shape, if it can be read in one way only.

A form is a string with a letter for each axis: "i" for an input, "o" for an output, "b" for a copy. For
example, "ioo" is the form of the kernel of a query: inputs, heads, and entries of a head.
"""

import collections
import dataclasses
import math
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

import flax.core
import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax.contrib import GaLoreDimensionNumbers

from optperm.core.tables import align
from optperm.core.trees import in_variables, is_masked, is_variable, resolve_tree

Kind = Literal["kernel", "embedding", "scale", "bias", "other"]

# Axes with these names are copies: layers, experts, and stages of a pipeline.
_COPIES = re.compile(r"(scan|layers?|blocks?|experts?|exp|stages?|copies|stack|depth)(_\w+)?")
# Names of layers and leaves, in lower case.
_SCALES = {"scale", "gamma", "norm_scale"}
_BIASES = {"bias", "b", "beta", "offset"}
_NORM = re.compile(r"(^|_)(ln|bn|gn)(_?\d+|_f|_\w)?$|norm|rms")
_EMBEDDING = re.compile(r"embed|^wte$|^wpe$")
_CONVOLUTION = re.compile(r"conv")
# Layers whose kernels with many axes are no convolutions.
_NO_CONVOLUTION = re.compile(r"attn|attention|einsum|expert|moe|heads?$|^(query|key|value|[qkvo]_proj)$")
_QUERIES = {"query", "key", "value"}
_QUERY_PROJECTIONS = {"q_proj", "k_proj", "v_proj"}
# The leaves of layers that are written as sums over axes (Gemma): heads, inputs, entries of a head.
_EINSUMS = {
    "q_einsum": "oio",
    "kv_einsum": "boio",
    "qkv_einsum": "boio",
    "attn_vec_einsum": "iio",
    "gating_einsum": "bio",
    "linear": "io",
}
# The maximum side of the window of a convolution.
_LONGEST_SIDE = 32
# Leaves of kind "other" are worth a warning if they hold more than this fraction of all entries.
_MANY = 0.01


@dataclasses.dataclass(frozen=True)
class LeafAxes:
    """What a leaf is, and the meaning of its axes.

    Attributes:
      kind: "kernel"; "embedding", a table with a row for each token or position; "scale" or "bias", a
        number for each output; "other", a leaf that methods leave alone.
      in_axis: The axes of the inputs, over which a layer sums.
      out_axis: The axes of the outputs.
      batch_axis: The axes that count independent copies, such as layers and experts.

    Each argument is an axis or a sequence of axes, all of them at least 0. Of a leaf that is not "other",
    each axis has one role.

    Raises:
      TypeError: If an axis is not an integer.
      ValueError: If `kind` is unknown, an axis is negative, or an axis has two roles.
    """

    kind: Kind
    in_axis: tuple[int, ...] = ()
    out_axis: tuple[int, ...] = ()
    batch_axis: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Check the arguments, and store axes as tuples of Python integers."""
        if self.kind not in get_args(Kind):
            raise ValueError(f"kind must be one of {', '.join(get_args(Kind))}, got {self.kind!r}.")
        for name in ("in_axis", "out_axis", "batch_axis"):
            given: Any = getattr(self, name)
            axes = tuple(given) if isinstance(given, Sequence | np.ndarray) else (given,)
            if not all(isinstance(axis, int | np.integer) for axis in axes):
                raise TypeError(f"{name} must be axes of a leaf, integers, got {given!r}.")
            if any(axis < 0 for axis in axes):
                raise ValueError(f"{name} must be at least 0, as counted from the front, got {given!r}.")
            object.__setattr__(self, name, tuple(map(int, axes)))
        roles = self.in_axis + self.out_axis + self.batch_axis
        if len({*roles}) < len(roles):
            raise ValueError(f"Each axis must have one role, got {self}.")


OTHER = LeafAxes("other")


class _Leaf(NamedTuple):
    """What the tree says of a leaf.

    Attributes:
      path: The keys of the path.
      names: The elements of the path, in lower case.
      shape: The shape.
      axis_names: The name of each axis, or None for a name that is not known; None without names.
      owner: The module that contains the leaf, if the tree still has its modules.
    """

    path: tuple[Any, ...]
    names: tuple[str, ...]
    shape: tuple[int, ...]
    axis_names: tuple[str | None, ...] | None
    owner: Any

    @property
    def last(self) -> str:
        """The name of the leaf."""
        return self.names[-1] if self.names else ""

    @property
    def above(self) -> str:
        """The name of the layer."""
        return self.names[-2] if len(self.names) > 1 else ""

    def has(self, pattern: re.Pattern[str]) -> bool:
        """Return whether an element of the path, or the type of the layer, has a name of a pattern."""
        names = (*self.names, type(self.owner).__name__.lower())
        return any(pattern.search(name) is not None for name in names)


def leaf_axes(
    params: optax.Params, /, *, show: bool = False, **overrides: LeafAxes | None
) -> optax.Params:
    """Find out what each leaf is."""
    leaves = _read_leaves(params)
    _check_overrides(leaves, overrides)
    found, sources = _classify(leaves), []
    for index, leaf in enumerate(leaves):
        given = _find_override(leaf, overrides)
        if given is not None:
            value = overrides[given]
            found[index] = OTHER if value is None else as_leaf_axes(given, value)
            _check_fits(f"{given}, for the leaf {_name(leaf)},", found[index], leaf.shape)
        sources.append(found[index].kind if given is None else f"{found[index].kind}, as given")
    if show:
        rows = zip(leaves, found, sources, strict=True)
        print(align([_HEAD, *(_describe(leaf, axes, source) for leaf, axes, source in rows)]))
    structure: Any = jax.tree.structure(params)
    return structure.unflatten(found)


def _read_leaves(params: optax.Params) -> list[_Leaf]:
    ends = jax.tree_util.tree_leaves_with_path(params, is_leaf=_is_end)
    return [_read_leaf(params, path, end) for path, end in ends]


def _is_end(node: Any) -> bool:
    """Return whether a node contains an array and says more of it."""
    return isinstance(node, flax.core.meta.AxisMetadata) or is_variable(node) or _is_named(node)


def _is_named(node: Any) -> bool:
    """Return whether a node is an array with named axes, as in Haliax."""
    axes = getattr(node, "axes", None)
    return isinstance(axes, tuple) and all(hasattr(each, "name") for each in axes)


def _read_leaf(params: Any, path: tuple[Any, ...], end: Any) -> _Leaf:
    array, axis_names = end, None
    if is_variable(end):
        array = end.get_value()
        stored = end.get_metadata()
        given = (stored.get(name) for name in ("out_sharding", "sharding_names", "sharding"))
        axis_names = next((names for names in given if names is not None), None)
    elif isinstance(end, flax.core.meta.AxisMetadata):
        array, axis_names = end.unbox(), getattr(end, "names", None)
    elif _is_named(end):
        array, axis_names = end.array, tuple(each.name for each in end.axes)
    shape = tuple(jnp.shape(array))
    if axis_names is not None:
        # A mesh axis, or several of them, for an axis of the leaf is no name either.
        axis_names = tuple(n if isinstance(n, str) else None for n in tuple(axis_names))
        axis_names = axis_names if len(axis_names) == len(shape) else None
    names = [_element(key).lower() for key in path]
    while len(names) > 1 and names[-1] in ("value", "array", "raw_value"):
        names.pop()
    return _Leaf(path, tuple(names), shape, axis_names, _find_owner(params, path))


def _element(key: Any) -> str:
    """Return an element of a path as a name."""
    return jax.tree_util.keystr((key,), simple=True)


def _find_owner(params: Any, path: tuple[Any, ...]) -> Any:
    """Return the node that contains a leaf, if its type says more than a container's."""
    node = params
    for key in path[:-1]:
        name = getattr(key, "name", None)
        try:
            node = node[getattr(key, "key", getattr(key, "idx", None))] if name is None else getattr(node, name)
        except (TypeError, KeyError, IndexError, AttributeError):
            return None
    return None if isinstance(node, Mapping | list | tuple) else node


def _classify(leaves: list[_Leaf]) -> list[LeafAxes]:
    known = [_find_known(leaf, leaves) for leaf in leaves]
    stacks = _find_stacks(leaves, known)
    is_first = _has_outputs_first(leaves)
    return [
        _classify_leaf(leaf, of_leaf, stacks, is_first)
        for leaf, of_leaf in zip(leaves, known, strict=True)
    ]


class _Known(NamedTuple):
    """What the names of a leaf say, whatever its shape.

    Attributes:
      kind: The kind.
      forms: The forms in a single layer.
    """

    kind: Kind
    forms: tuple[str, ...]


def _find_known(leaf: _Leaf, leaves: list[_Leaf]) -> _Known | None:
    """Return what the names of a leaf say; None if its form depends on its shape."""
    last, above, rank = leaf.last, leaf.above, len(leaf.shape)
    is_norm = any(_NORM.search(n) for n in (above, last, type(leaf.owner).__name__.lower()))
    # Single letters are also the names of matrices.
    siblings = {other.last for other in leaves if other.names[:-1] == leaf.names[:-1]}
    has_pair = {"b": "w", "beta": "gamma", "gamma": "beta"}.get(last, last) in siblings
    if (last in _SCALES and (has_pair or is_norm)) or (last in ("weight", "w") and is_norm):
        return _Known("scale", ("o",))
    if last in _BIASES and (has_pair or is_norm):
        # The bias of a convolution may have an axis of length 1 for each side of its window.
        sides = rank - len("".join("1" if n == 1 else "x" for n in leaf.shape).rstrip("1"))
        is_window = sides > 1 or (sides == 1 and leaf.has(_CONVOLUTION))
        forms = ("o", "oo") if above in _QUERIES else ("o" + "o" * sides if is_window else "o",)
        return _Known("bias", forms)
    if last in ("lora_a", "lora_b"):
        return _Known("kernel", ("io",))
    of_table = last if last not in ("weight", "w") else f"{above} {type(leaf.owner).__name__.lower()}"
    if last != "kernel" and any(_EMBEDDING.search(n) for n in (last, *of_table.split(" "))):
        return _Known("embedding", ("bio" if rank == 3 and leaf.shape[0] == 1 else "io",))
    form = _EINSUMS.get(above if last == "w" else last)
    return None if form is None else _Known("kernel", (form,))


class _Stack(NamedTuple):
    """What the leaves of a subtree share.

    Attributes:
      number: The number of axes that each leaf has more than in a single layer.
      axes: The axes that all leaves have at the same place, with the same length.
    """

    number: int
    axes: tuple[int, ...]


def _find_stacks(
    leaves: list[_Leaf], known: list[_Known | None]
) -> dict[tuple[Any, ...], _Stack]:
    """Return what the leaves of each subtree share, if the names of some leaves show it."""
    subtrees = collections.defaultdict[tuple[Any, ...], list[int]](list)
    for index, leaf in enumerate(leaves):
        for depth in range(max(len(leaf.path), 1)):
            subtrees[leaf.path[:depth]].append(index)
    stacks = {}
    for path, members in subtrees.items():
        numbers = [_count_copies(leaves[i], known[i]) for i in members]
        certain = [options[0] for options in numbers if len(options) == 1]
        possible = certain or [options[0] for options in numbers if options]
        if possible:
            axes = [{*enumerate(leaves[i].shape)} for i in members if leaves[i].shape]
            shared = set.intersection(*axes) if axes else set()
            stacks[path] = _Stack(min(possible), tuple(sorted(axis for axis, _ in shared)))
    return stacks


def _count_copies(leaf: _Leaf, known: _Known | None) -> list[int]:
    """Return the numbers of axes that a leaf may have more than in a single layer, in order."""
    forms = known.forms if known else ()
    return sorted({len(leaf.shape) - len(form) for form in forms if len(form) <= len(leaf.shape)})


def _has_outputs_first(leaves: list[_Leaf]) -> bool:
    """Return whether the kernels of a tree are named as in libraries that put outputs first."""
    names = {leaf.last for leaf in leaves}
    return "weight" in names and not names & {"kernel", "w"}


def _classify_leaf(
    leaf: _Leaf, known: _Known | None, stacks: dict[tuple[Any, ...], _Stack], is_first: bool
) -> LeafAxes:
    if 0 in leaf.shape:
        return OTHER
    named = _find_named_copies(leaf)
    if named is not None:
        return _read(leaf, known, named, is_first, is_single=True) or OTHER
    # The subtrees that contain the leaf, the largest first.
    around = [stacks[leaf.path[:n]] for n in range(len(leaf.path)) if leaf.path[:n] in stacks]
    for number in sorted({each.number for each in around} or {0}, reverse=True):
        largest = next((each for each in around if each.number == number), None)
        axes = () if largest is None or not number else largest.axes
        # With more shared axes than copies, one of them is equal by chance, and no one knows which.
        if len(axes) == number:
            found = _read(leaf, known, axes, is_first, is_single=largest is not None)
            if found is not None:
                return found
    return OTHER


def _find_named_copies(leaf: _Leaf) -> tuple[int, ...] | None:
    """Return the axes that the names of axes call copies; None if there may be others."""
    names = leaf.axis_names
    if names is None:
        return None
    copies = tuple(i for i, n in enumerate(names) if n is not None and _COPIES.fullmatch(n.lower()))
    return copies if copies or None not in names else None


def _read(
    leaf: _Leaf, known: _Known | None, copies: tuple[int, ...], is_first: bool, *, is_single: bool
) -> LeafAxes | None:
    """Return what a leaf is if these axes count copies; None if no form fits the other axes.

    Args:
      leaf: The leaf.
      known: What its names say.
      copies: The axes of copies.
      is_first: Whether outputs come first in this tree.
      is_single: Whether the other axes are known to belong to a single layer.
    """
    own = [axis for axis in range(len(leaf.shape)) if axis not in copies]
    sizes = [leaf.shape[axis] for axis in own]
    if known is not None:
        fitting = [form for form in known.forms if len(form) == len(own)]
        kind, form = known.kind, fitting[0] if fitting else None
    elif len(own) == 1:
        kind, form = ("scale" if leaf.last == "weight" else "bias"), "o"
    else:
        kind, form = "kernel", _find_kernel_form(leaf, own, sizes, is_first, is_single=is_single)
    if form is None:
        return None
    roles = {letter: [axis for axis, own in zip(own, form, strict=True) if own == letter] for letter in "iob"}
    return LeafAxes(kind, tuple(roles["i"]), tuple(roles["o"]), tuple(sorted([*copies, *roles["b"]])))


def _find_kernel_form(
    leaf: _Leaf, own: list[int], sizes: list[int], is_first: bool, *, is_single: bool
) -> str | None:
    """Return the form of a kernel of a single layer from its names and its shape."""
    rank, inputs = len(sizes), _find_inputs(leaf)
    if inputs is not None:
        return "".join("i" if axis in inputs else "o" for axis in own)
    is_kernel, is_weight = leaf.last == "kernel", leaf.last == "weight"
    if is_kernel and leaf.above in _QUERIES and rank in (2, 3):
        return "i" + "o" * (rank - 1)  # d, heads, head_dim
    if is_kernel and leaf.above == "out" and rank == 3:
        return "iio"  # heads, head_dim, d
    if is_weight and rank >= 2 and {*leaf.names} & _QUERY_PROJECTIONS:
        return "o" * (rank - 1) + "i"
    if is_weight and rank >= 2 and "o_proj" in leaf.names:
        return "o" + "i" * (rank - 1)
    is_first = is_weight or (is_first and not is_kernel)
    window = sizes[2:] if is_first else sizes[:-2]
    is_window = bool(window) and max(window) <= _LONGEST_SIDE and not leaf.has(_NO_CONVOLUTION)
    is_convolution = is_window and (leaf.has(_CONVOLUTION) or (rank > 3 and is_single))
    if rank == 2 or is_convolution:
        return "o" + "i" * (rank - 1) if is_first else "i" * (rank - 1) + "o"
    return None


def _find_inputs(leaf: _Leaf) -> set[int] | None:
    """Return the axes of the inputs of a layer that names its inputs and outputs, as in Haliax."""
    if leaf.axis_names is None or not (hasattr(leaf.owner, "In") and hasattr(leaf.owner, "Out")):
        return None
    given = leaf.owner.In if isinstance(leaf.owner.In, tuple) else (leaf.owner.In,)
    names = {getattr(axis, "name", axis) for axis in given}
    return {index for index, name in enumerate(leaf.axis_names) if name in names}


_HEAD = ("leaf", "shape", "what it is", "in x out", "copies")


def _name(leaf: _Leaf) -> str:
    return jax.tree_util.keystr(leaf.path) or "params"


def _describe(leaf: _Leaf, axes: LeafAxes, what: str) -> tuple[str, ...]:
    """Return the row of a leaf in the table."""
    sides = [math.prod(leaf.shape[axis] for axis in side) for side in (axes.in_axis, axes.out_axis)]
    matrix = f"{sides[0]} x {sides[1]}" if axes.kind in ("kernel", "embedding") else "-"
    copies = " x ".join(str(leaf.shape[axis]) for axis in axes.batch_axis)
    return _name(leaf), str(leaf.shape), what, matrix, copies or "-"


def as_leaf_axes(name: str, value: Any) -> LeafAxes:
    """Return the axes of a leaf; those of Optax's GaLore count as those of a kernel."""
    if isinstance(value, LeafAxes):
        return value
    raise TypeError(f"{name} must be an optperm.LeafAxes or None, got {value!r}.")


def _find_override(leaf: _Leaf, overrides: Mapping[str, Any]) -> str | None:
    """Return the override of a leaf: the one with the longest path, the last of them in the leaf's."""
    path = [_element(key) for key in leaf.path]
    found = None
    for name in overrides:
        parts = name.split("/")
        if any(path[i : i + len(parts)] == parts for i in range(len(path))) and (
            found is None or len(parts) >= len(found.split("/"))
        ):
            found = name
    return found


def _check_overrides(leaves: list[_Leaf], overrides: Mapping[str, Any]) -> None:
    for name in overrides:
        if not any(_find_override(leaf, {name: None}) for leaf in leaves):
            elements = sorted({_element(key) for leaf in leaves for key in leaf.path})
            wanted = "an element of a path, or several joined by /"
            raise ValueError(f"{name} must be {wanted}, such as one of {elements}.")


def _check_fits(name: str, axes: LeafAxes, shape: tuple[int, ...]) -> None:
    """Raise unless each axis of a leaf has one role."""
    roles = sorted(axes.in_axis + axes.out_axis + axes.batch_axis)
    if axes.kind != "other" and roles != [*range(len(shape))]:
        raise ValueError(f"{name} must give each axis of the shape {shape} one role, got {axes}.")
