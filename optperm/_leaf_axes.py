"""Find out what each leaf of a model is: a kernel, an embedding, a scale or a bias, and its axes.

The sources, in this order:

1. what the caller says;
2. the names of axes (Flax's partitioned params, Haliax's named arrays), which tell layers and experts;
3. the names of layers, such as "query", which tell the forms that a leaf of a single layer may have;
4. what the leaves of a subtree share: if its scales and biases have one axis more than in a single
   layer, the subtree is a stack of layers, along the axis that all its leaves share;
5. the shape, if it can be read in one way only.

A form is a string with a letter for each axis: "i" for an input, "o" for an output, "b" for a copy. For
example, "ioo" is the form of the kernel of a query: inputs, heads, and entries of a head.
"""

import collections
import dataclasses
import itertools
import math
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from optax.contrib import GaLoreDimensionNumbers

from optperm.core import checks
from optperm.core.shapes import Params
from optperm.core.tables import align
from optperm.core.trees import is_box, is_variable, mask_like, resolve_tree, without_boxes

Kind = Literal["kernel", "embedding", "scale", "bias", "other"]

# Axes with these names are copies: layers, experts, and stages of a pipeline.
_COPIES = re.compile(r"(scan|layers?|blocks?|experts?|exp|stages?|copies|stack|depth)(_\w+)?")
# Names of layers and leaves, in lower case.
_KERNELS = {"kernel", "weight", "w"}
_SCALES = {"scale", "gamma", "norm_scale"}
_BIASES = {"bias", "b", "beta", "offset"}
_NORM = re.compile(r"(^|_)(ln|bn|gn)(_?\d+|_f|_\w)?$|norm|(^|_)rms")
# Layers named "patch_embed" or "time_embed" are dense layers, and "unembed" is the last layer.
_EMBEDDING = re.compile(
    r"(?<!un)(?<!patch_)(?<!time_)embed|^wte$|^wpe$|(^|_)embd?(_|$)|(^|_)pos(itions?)?$"
)
_CONVOLUTION = re.compile(r"conv")
# Layers whose kernels with many axes are no convolutions.
_NO_CONVOLUTION = re.compile(
    r"attn|attention|einsum|expert|moe|heads?$|^(query|key|value|[qkvo]_proj)$"
)
_QUERIES = {"query", "key", "value"}
_QUERY_PROJECTIONS = {"q_proj", "k_proj", "v_proj"}
# The kernels of attention with heads, in a single layer, by the names of arrays in small models.
_EXPERTS = re.compile(r"expert|moe|mlp|ffn")
_HEADS = {"wq": "ioo", "wk": "ioo", "wv": "ioo", "wo": "iio"}
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

    Each argument is an axis or a sequence of axes, all of them at least 0. Each axis of a leaf that is
    not "other" has one role.

    Raises:
      TypeError: If an axis is not an integer.
      ValueError: If `kind` is unknown, an axis is negative or has two roles, a kernel or an embedding
        has no inputs or no outputs, or a scale or a bias has inputs.
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
            if not all(isinstance(x, int | np.integer) and not isinstance(x, bool) for x in axes):
                raise TypeError(f"{name} must be axes of a leaf, integers, got {given!r}.")
            if any(axis < 0 for axis in axes):
                raise ValueError(
                    f"{name} must be at least 0, as counted from the front, got {given!r}."
                )
            object.__setattr__(self, name, tuple(map(int, axes)))
        roles = self.in_axis + self.out_axis + self.batch_axis
        if len({*roles}) < len(roles):
            raise ValueError(f"Each axis must have one role, got {self}.")
        if self.kind in ("kernel", "embedding") and not (self.in_axis and self.out_axis):
            raise ValueError(
                f"in_axis and out_axis must each name an axis of a {self.kind}, got {self}."
            )
        if self.kind in ("scale", "bias") and self.in_axis:
            raise ValueError(
                f"in_axis must be empty, because a {self.kind} has no inputs, got {self}."
            )


OTHER = LeafAxes("other")


class _Leaf(NamedTuple):
    """What the tree says of a leaf.

    Attributes:
      path: The keys of the path.
      names: The elements of the path, in lower case.
      shape: The shape.
      axis_names: The name of each axis, or None for a name that is not known; None without names.
      owner: The module that contains the leaf, if the tree still has its modules.
      bias: The shape of the bias of the same layer.
    """

    path: tuple[Any, ...]
    names: tuple[str, ...]
    shape: tuple[int, ...]
    axis_names: tuple[str | None, ...] | None
    owner: Any
    bias: tuple[int, ...] | None = None

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


def leaf_axes(params: Params, /, *, show: bool = False, **overrides: LeafAxes | None) -> Params:
    r"""Find out what each leaf of a model is, once for all methods: kernels, embeddings, scales, biases.

    The sources are, in this order,

    1. `overrides`;
    2. names of axes, such as "layers": Flax's partitioned params (linen and nnx), Haliax's named arrays;
    3. names of layers and leaves of Flax, Haiku, Keras, Equinox and Haliax, and Equinox's modules;
    4. what the leaves of a subtree share: if its scales and biases have one axis more than a vector, the
       subtree is a stack of layers along the axis that all its leaves have at the same place, with the
       same length;
    5. the shape, if there is only one way to read it: two axes are a kernel (in, out).

    All other leaves are "other", which methods leave alone.

    Args:
      params: The model's params: arrays, shapes from `jax.eval_shape`, or a State of `flax.nnx`. Pass
        all params of a model, because a part of a stack does not show that it is a stack.
      show: Whether to print a table of the leaves.
      **overrides: For an element of a path, such as "lm_head", or several elements joined by "/", what
        all leaves below this element are: a `LeafAxes`, or None for "other".

    Returns:
      A tree like params with a `LeafAxes` for each leaf. Pass it as `axes` to a method. If params are
      variables of `flax.nnx`, the tree contains variables with a `LeafAxes`.

    Example:
      >>> import jax, jax.numpy as jnp, optperm
      >>> layers = {"norm": {"scale": jnp.ones((6, 64))}, "up": {"kernel": jnp.ones((6, 64, 256))}}
      >>> params = {"layers": layers, "wte": jnp.ones((500, 64)), "gate": jnp.ones((4, 64, 8))}
      >>> axes = optperm.leaf_axes(params, gate=optperm.LeafAxes("kernel", 1, 2, 0), show=True)
      leaf                         shape         what it is        in x out  copies
      ['gate']                     (4, 64, 8)    kernel, as given  64 x 8    4
      ['layers']['norm']['scale']  (6, 64)       scale             -         6
      ['layers']['up']['kernel']   (6, 64, 256)  kernel            64 x 256  6
      ['wte']                      (500, 64)     embedding         500 x 64  -
      >>> axes["layers"]["up"]["kernel"]
      LeafAxes(kind='kernel', in_axis=(1,), out_axis=(2,), batch_axis=(0,))

    Notes:
      With overrides, a `UserWarning` names leaves that are neither known nor named. A leaf named
      `kernel` is a kernel even below a layer named `embedding`. The window of a convolution counts as
      inputs. If all leaves of a stack share more than one axis, biases tell which axis counts the
      layers, or else the first of the axes does.

    Raises:
      TypeError: If an override is neither a `LeafAxes` nor None.
      ValueError: If an override names no element of a path, or its axes do not fit a leaf.
    """
    leaves = _read_leaves(params)
    for name in overrides:
        if all(_find_override(leaf, [name]) is None for leaf in leaves):
            elements = sorted({each for leaf in leaves for each in _elements(leaf.path)})
            wanted = f"an element of a path, one of {elements}, or several joined by /"
            raise ValueError(f"{name} must be {wanted}.")
    names = [_find_override(leaf, overrides) for leaf in leaves]
    found = [
        axes if name is None else _as_leaf_axes(name, overrides[name], leaf)
        for leaf, axes, name in zip(leaves, _classify(leaves), names, strict=True)
    ]
    if show:
        rows = zip(leaves, found, names, strict=True)
        print(align([_HEAD, *(_describe(*row) for row in rows)]))
    if overrides and not _is_traced(params):
        # A method that gets this tree takes it that the user has said what all leaves are
        pairs = zip(leaves, found, names, strict=True)
        unknown = [leaf for leaf, own, name in pairs if own == OTHER and not name]
        _warn_of("leaf_axes", leaves, unknown)
    structure: Any = jax.tree.structure(params)
    return structure.unflatten(found)


def resolve_axes(axes: Any, params: Params) -> Any:
    """Return a `LeafAxes` for each leaf of params, in a tree like params without boxes.

    Args:
      axes: The argument `axes` of a method: a tree of `LeafAxes`, `GaLoreDimensionNumbers` of Optax,
        which count as kernels, and None; a function of params that returns the tree; None for
        `leaf_axes`.
      params: Params or updates, of which some may be masked.

    Raises:
      TypeError: If an entry of the tree is of another type.
      ValueError: If the tree does not fit the params, or the axes of a leaf do not fit the leaf; without
        a tree, if only names in variables of `flax.nnx` say what a leaf is.
    """
    plain = without_boxes(params)
    structure: Any = jax.tree.structure(plain)
    leaves = _read_leaves(params)
    if axes is None:
        found = _classify(leaves)
        if _has_variables(params) and found != _classify(_read_leaves(plain)):
            raise ValueError(
                "Names of axes in the variables of params say what leaves are, but flax.nnx.Optimizer "
                "passes no names to update: pass axes=optperm.leaf_axes(params), computed once."
            )
        return structure.unflatten(found)
    try:
        resolved = without_boxes(resolve_tree(axes, params))
        given = structure.flatten_up_to(mask_like(resolved, plain))
    except ValueError as error:
        wanted = "a tree like params of optperm.LeafAxes and None, or a function that returns it"
        raise ValueError(f"axes must be {wanted}: {error}") from error
    pairs = zip(leaves, given, strict=True)
    return structure.unflatten([_as_leaf_axes("axes", value, leaf) for leaf, value in pairs])


def _has_variables(params: Params) -> bool:
    return any(map(is_variable, jax.tree.leaves(params, is_leaf=is_variable)))


def warn_of_others(method: str, params: Params, axes: Any) -> None:
    """Warn if a method leaves many entries alone because no one said what they are.

    Args:
      method: The public name of the method, for the message.
      params: The params; nothing is said of traced params.
      axes: The argument `axes` of the method. Whoever made a tree of axes has seen the params.
    """
    if axes is not None or _is_traced(params):
        return
    leaves = _read_leaves(params)
    pairs = zip(leaves, _classify(leaves), strict=True)
    _warn_of(method, leaves, [leaf for leaf, own in pairs if own == OTHER])


def _is_traced(params: Params) -> bool:
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(params))


def _warn_of(method: str, leaves: list[_Leaf], unknown: list[_Leaf]) -> None:
    """Warn that a method leaves the unknown leaves alone, if they hold many of all entries."""
    others = [leaf for leaf in unknown if len(leaf.shape) > 1]
    sizes = [math.prod(leaf.shape) for leaf in others]
    if sum(sizes) <= _MANY * sum(math.prod(leaf.shape) for leaf in leaves):
        return
    first = others[int(np.argmax(sizes))]
    name, rank = "/".join(_elements(first.path)), len(first.shape)
    roles = f"in_axis={rank - 2}, out_axis={rank - 1}, batch_axis={tuple(range(rank - 2))}"
    kernel = f"optperm.LeafAxes('kernel', {roles})"
    example = f"optperm.leaf_axes(params, **{{{name!r}: {kernel}}})" if name else kernel
    more = f" and {len(others) - 5} more" if len(others) > 5 else ""
    warnings.warn(
        f"{method} leaves {', '.join(map(_name, others[:5]))}{more} alone, because the roles of their "
        f"axes are not known. Say what they are, for example axes={example}, or None to leave them "
        "alone.",
        UserWarning,
        stacklevel=4,
    )


def _read_leaves(params: Params) -> list[_Leaf]:
    ends = jax.tree_util.tree_leaves_with_path(params, is_leaf=_is_end)
    # A box of a param that is masked has no array.
    return [_read_leaf(params, path, end) for path, end in ends if jax.tree.leaves(end)]


def _is_end(node: Any) -> bool:
    """Return whether a node contains an array and says more of it."""
    return is_box(node) or _is_named(node)


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
    elif is_box(end):
        array, axis_names = without_boxes(end), getattr(end, "names", None)
    elif _is_named(end):
        array, axis_names = end.array, tuple(each.name for each in end.axes)
    shape = tuple(jnp.shape(array))
    if axis_names is not None:
        # A mesh axis, or several of them, for an axis of the leaf is no name either.
        axis_names = tuple(n if isinstance(n, str) else None for n in tuple(axis_names))
        axis_names = axis_names if len(axis_names) == len(shape) else None
    names = [name.lower() for name in _elements(path)]
    while len(names) > 1 and names[-1] in ("value", "array", "raw_value"):
        names.pop()
    return _Leaf(path, tuple(names), shape, axis_names, _find_owner(params, path))


def _elements(path: tuple[Any, ...]) -> list[str]:
    """Return the elements of a path as names; a key may have several, such as "fc.weight"."""
    names: list[str] = []
    for key in path:
        parts = getattr(key, "key", None)
        if isinstance(parts, tuple):
            names += map(str, parts)
        else:
            names += re.split("[./]", jax.tree_util.keystr((key,), simple=True))
    return names


def _find_owner(params: Any, path: tuple[Any, ...]) -> Any:
    """Return the node that contains a leaf, if its type says more than a container's."""
    node = params
    for key in path[:-1]:
        name = getattr(key, "name", None)
        try:
            node = (
                node[getattr(key, "key", getattr(key, "idx", None))]
                if name is None
                else getattr(node, name)
            )
        except (TypeError, KeyError, IndexError, AttributeError):
            return None
    return None if isinstance(node, Mapping | list | tuple) else node


def _classify(leaves: list[_Leaf]) -> list[LeafAxes]:
    siblings = collections.defaultdict[tuple[str, ...], dict[str, tuple[int, ...]]](dict)
    for leaf in leaves:
        siblings[leaf.names[:-1]][leaf.last] = leaf.shape
    of_layers = [siblings[leaf.names[:-1]] for leaf in leaves]
    known = [_find_known(leaf, {*names}) for leaf, names in zip(leaves, of_layers, strict=True)]
    leaves = [
        leaf._replace(bias=names.get("bias", names.get("b")))
        for leaf, names in zip(leaves, of_layers, strict=True)
    ]
    stacks = _find_stacks(leaves, known)
    is_first = _has_outputs_first(leaves)
    found = [
        _classify_leaf(leaf, of_leaf, stacks, is_first)
        for leaf, of_leaf in zip(leaves, known, strict=True)
    ]
    # Only the shape says that leaves with other names are kernels.
    by_shape = [
        own.kind == "kernel" and of_leaf is None and leaf.last not in _KERNELS
        for leaf, of_leaf, own in zip(leaves, known, found, strict=True)
    ]
    others = [leaf for leaf, own in zip(leaves, found, strict=True) if own == OTHER]
    return [
        OTHER if is_by_shape and _may_be_stacked(leaf, own, others) else own
        for leaf, own, is_by_shape in zip(leaves, found, by_shape, strict=True)
    ]


def _may_be_stacked(leaf: _Leaf, own: LeafAxes, others: list[_Leaf]) -> bool:
    """Return whether a leaf with two axes may be a scale or a bias in a stack that no name shows.

    It may be if a leaf nearby with more axes, whose axes are not known either, shares its first axis.
    """
    first = min(own.in_axis + own.out_axis)
    near = leaf.names[:-2]
    return len(own.in_axis + own.out_axis) == 2 and any(
        len(other.shape) > len(leaf.shape)
        and other.names[: len(near)] == near
        and other.shape[: first + 1] == leaf.shape[: first + 1]
        for other in others
    )


class _Known(NamedTuple):
    """What the names of a leaf say, for any shape.

    Attributes:
      kind: The kind.
      forms: The forms in a single layer.
    """

    kind: Kind
    forms: tuple[str, ...]


def _find_known(leaf: _Leaf, siblings: set[str]) -> _Known | None:
    """Return what the names of a leaf and its siblings say; None if its form depends on its shape."""
    last, above, rank = leaf.last, leaf.above, len(leaf.shape)
    is_norm = any(_NORM.search(n) for n in (above, last, type(leaf.owner).__name__.lower()))
    # Single letters are also the names of matrices.
    has_pair = {"b": "w", "beta": "gamma", "gamma": "beta"}.get(last, last) in siblings
    # For example, the biases of "w_in" and "wq" are "b_in" and "bq".
    is_pair = last.startswith("b") and re.sub("^b(ias)?", "w", last) in siblings
    is_scale = last == "weight" and is_norm
    if is_scale or (last in _SCALES and (has_pair or is_norm)) or _NORM.search(last):
        return _Known("scale", ("o",))
    if is_pair or (last in _BIASES and (has_pair or is_norm)):
        # The bias of a convolution may have an axis of length 1 for each side of its window.
        sides = rank - len("".join("1" if n == 1 else "x" for n in leaf.shape).rstrip("1"))
        is_window = sides > 1 or (sides == 1 and leaf.has(_CONVOLUTION))
        forms = ("o", "oo") if above in _QUERIES else ("o" + "o" * sides if is_window else "o",)
        return _Known("bias", forms)
    if last in ("lora_a", "lora_b"):
        return _Known("kernel", ("io",))
    of_table = (
        last if last not in ("weight", "w") else f"{above} {type(leaf.owner).__name__.lower()}"
    )
    if last != "kernel" and any(_EMBEDDING.search(n) for n in (last, *of_table.split(" "))):
        return _Known("embedding", ("bio" if rank == 3 and leaf.shape[0] == 1 else "io",))
    form = _EINSUMS.get(above if last == "w" else last)
    return None if form is None else _Known("kernel", (form,))


class _Stack(NamedTuple):
    """What the leaves of a subtree share.

    Attributes:
      number: The number of axes that each leaf has more than in a single layer.
      axes: As many axes that all leaves have at the same place, with the same length.
    """

    number: int
    axes: tuple[int, ...]


def _find_stacks(leaves: list[_Leaf], known: list[_Known | None]) -> dict[tuple[Any, ...], _Stack]:
    """Return what the leaves of each subtree share, if the names of some leaves show it."""
    subtrees = collections.defaultdict[tuple[str, ...], list[int]](list)
    for index, leaf in enumerate(leaves):
        for depth in range(max(len(leaf.names), 1)):
            subtrees[leaf.names[:depth]].append(index)
    stacks = {}
    for path, members in subtrees.items():
        numbers = [_count_copies(leaves[i], known[i]) for i in members]
        certain = [options[0] for options in numbers if len(options) == 1]
        possible = certain or [options[0] for options in numbers if options]
        if possible:
            inside, number = [leaves[i] for i in members if leaves[i].shape], min(possible)
            shared = set.intersection(*({*enumerate(leaf.shape)} for leaf in inside))
            choices = [*itertools.combinations(sorted(axis for axis, _ in shared), number)]
            fitting = filter(_fits_biases(inside), choices if len(choices) > 1 else ())
            # Leaves that share no axis are no stack, even if all their scales and biases are in one.
            axes = next(itertools.chain(fitting, choices), ())
            stacks[path] = _Stack(len(axes), axes)
    return stacks


def _fits_biases(leaves: list[_Leaf]) -> Callable[[tuple[int, ...]], bool]:
    """Return whether, without some axes, each bias is as long as the outputs of its kernel.

    If more axes are shared than there are copies, one of them is equal by chance.
    """
    kernels = {leaf.names[:-1]: leaf for leaf in leaves if leaf.last in _KERNELS}
    biases = [leaf for leaf in leaves if leaf.last in ("bias", "b") and leaf.names[:-1] in kernels]

    def fits(copies: tuple[int, ...]) -> bool:
        for bias in biases:
            kernel = kernels[bias.names[:-1]]
            outputs, sizes = (
                [size for axis, size in enumerate(leaf.shape) if axis not in copies]
                for leaf in (bias, kernel)
            )
            rank = len(outputs)
            ends = sizes[:rank] if kernel.last == "weight" else sizes[len(sizes) - rank :]
            if len(sizes) > 1 and outputs != ends:
                return False
        return True

    return fits


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
    around = [stacks[leaf.names[:n]] for n in range(len(leaf.names)) if leaf.names[:n] in stacks]
    for number in sorted({each.number for each in around} or {0}, reverse=True):
        largest = next((each for each in around if each.number == number), None)
        axes = () if largest is None else largest.axes
        if 0 < len(leaf.shape) == len(axes):
            return OTHER  # a number for each copy
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
    if known is not None:
        fitting = [form for form in known.forms if len(form) == len(own)]
        kind, form = known.kind, fitting[0] if fitting else None
    elif len(own) == 1:
        kind, form = ("scale" if leaf.last == "weight" else "bias"), "o"
    else:
        kind, form = "kernel", _find_kernel_form(leaf, copies, is_first, is_single=is_single)
    if form is None:
        return None
    roles = {
        letter: [axis for axis, own in zip(own, form, strict=True) if own == letter]
        for letter in "iob"
    }
    if kind in ("kernel", "embedding") and not (roles["i"] and roles["o"]):
        return None
    return LeafAxes(
        kind, tuple(roles["i"]), tuple(roles["o"]), tuple(sorted([*copies, *roles["b"]]))
    )


def _find_kernel_form(
    leaf: _Leaf, copies: tuple[int, ...], is_first: bool, *, is_single: bool
) -> str | None:
    """Return the form of a kernel without its copies from its names, its shape and its bias."""
    own = [axis for axis in range(len(leaf.shape)) if axis not in copies]
    sizes = [leaf.shape[axis] for axis in own]
    rank, inputs, form = len(sizes), _find_inputs(leaf), None
    is_kernel, is_weight = leaf.last == "kernel", leaf.last == "weight"
    # The bias of the layer has the sizes of the outputs.
    bias = [n for axis, n in enumerate(leaf.bias or ()) if axis not in copies]
    is_first = is_weight or (is_first and not is_kernel)
    window = sizes[2:] if is_first else sizes[:-2]
    is_window = bool(window) and max(window) <= _LONGEST_SIDE and not leaf.has(_NO_CONVOLUTION)
    is_convolution = is_window and (leaf.has(_CONVOLUTION) or (rank > 3 and is_single))
    if inputs is not None:
        form = "".join("i" if axis in inputs else "o" for axis in own)
    elif is_weight and sizes[:1] != bias == sizes[1:2]:
        form = "io" + "i" * (rank - 2)  # for example, of a transposed convolution
    elif leaf.last == "depthwise_kernel":
        form = "i" * (rank - 2) + "oo"
    elif is_single and rank == 3 and leaf.last in _HEADS and not leaf.has(_EXPERTS):
        form = _HEADS[leaf.last]
    elif is_kernel and leaf.above in _QUERIES and rank == 3:
        form = "ioo"  # d, heads, head_dim
    elif is_kernel and leaf.above == "out" and rank == 3:
        form = "iio"  # heads, head_dim, d
    elif is_weight and rank > 2 and {*leaf.names} & _QUERY_PROJECTIONS:
        form = "o" * (rank - 1) + "i"
    elif (is_weight and rank > 2 and "o_proj" in leaf.names) or (is_first and is_convolution):
        form = "o" + "i" * (rank - 1)
    elif is_convolution or (is_kernel and rank == 3 and bias == sizes[2:]):
        form = "i" * (rank - 1) + "o"
    elif rank == 2:
        form = "oi" if is_first else "io"
    return form


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


def _describe(leaf: _Leaf, axes: LeafAxes, given: str | None) -> tuple[str, ...]:
    """Return the row of a leaf in the table."""
    what = axes.kind if given is None else f"{axes.kind}, as given"
    sides = [math.prod(leaf.shape[axis] for axis in side) for side in (axes.in_axis, axes.out_axis)]
    matrix = f"{sides[0]} x {sides[1]}" if axes.kind in ("kernel", "embedding") else "-"
    copies = " x ".join(str(leaf.shape[axis]) for axis in axes.batch_axis)
    return _name(leaf), str(leaf.shape), what, matrix, copies or "-"


def _as_leaf_axes(name: str, value: Any, leaf: _Leaf) -> LeafAxes:
    """Return what a leaf is said to be.

    Raises:
      TypeError: If the value says nothing of axes.
      ValueError: If the axes do not fit the shape of the leaf.
    """
    place, rank = f"{name}, for {_name(leaf)} with the shape {leaf.shape},", len(leaf.shape)
    if value is None:
        return OTHER
    if isinstance(value, GaLoreDimensionNumbers):
        given = [np.ravel(x) for x in (value.reduction_axis, value.output_axis)]
        rows, columns = (
            tuple(int(axis) % rank for axis in x if -rank <= axis < rank) for x in given
        )
        if sum(map(len, given)) > len({*rows, *columns}) or not (rows and columns):
            raise ValueError(f"{place} must name distinct axes of it, got {value}.")
        copies = tuple(axis for axis in range(rank) if axis not in rows + columns)
        return LeafAxes("kernel", rows, columns, copies)
    if not isinstance(value, LeafAxes):
        wanted = "an optperm.LeafAxes, as optperm.leaf_axes(params) returns, or None"
        raise TypeError(f"{place} must be {wanted}, got {checks.shown(value)}.")
    roles = sorted(value.in_axis + value.out_axis + value.batch_axis)
    if value.kind != "other" and roles != [*range(rank)]:
        raise ValueError(f"{place} must give each of its axes one role, got {value}.")
    return value


def _find_override(leaf: _Leaf, names: Iterable[str]) -> str | None:
    """Return the name that applies to a leaf: the name with most elements, then the deepest of them."""
    path, found = _elements(leaf.path), []
    for name in names:
        parts = re.split("[./]", name)
        places = [at for at in range(len(path)) if path[at : at + len(parts)] == parts]
        found += [(len(parts), max(places), name)] if places else []
    return max(found)[2] if found else None
