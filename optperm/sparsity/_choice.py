"""Choose the entries that stay: the entries with the highest scores in each leaf, or in all leaves.

Each leaf is a stack of one or more layers: its copies, as `optperm.leaf_axes` finds them. The choice
takes four steps, in the order of this file:

1. `include` selects leaves, by default all kernels (`include_leaves`). The following steps mask the
   other leaves.
2. Each unit of a structure, a single entry by default, gets a code: an unsigned integer in the order of
   the scores (`encode_scores`), or a random integer (`draw_codes`).
3. `sparsity` and `scope` determine the number of zero units in each layer or in all leaves
   (`group_leaves`).
4. The units with the highest codes stay, as many as remain; ties keep the earlier unit
   (`keep_highest`). Counting replaces sorting.
"""

import collections
import functools
import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optperm._leaf_axes import OTHER, LeafAxes, resolve_axes
from optperm.core import checks
from optperm.core.dtypes import accumulation_dtype, computed_once
from optperm.core.keys import make_key
from optperm.core.mapped_axes import mark_varying, varying_axes
from optperm.core.shardings import explicit_sharding, shard_like, unshard
from optperm.core.trees import (
    fill_masked,
    group_alike,
    is_flag,
    is_function,
    leaf_paths,
    mask_like,
    resolve_tree,
    spread_prefix,
    unstack,
    without_variables,
)
from optperm.sparsity._structures import (
    ENTRIES,
    INPUTS,
    Entries,
    NOfM,
    check_fits,
    count_copies,
    layer_shape,
)

# The entries that a fraction of zeros refers to. "erk": each layer, with fractions from `erk_sparsity`;
# "leaf": each layer, with the same fraction; "global": all leaves together.
Scope = Literal["erk", "leaf", "global"]
# "unit": the inputs of each output unit of each layer, with the same fraction.
UnitScope = Literal[Scope, "unit"]
# The included leaves: a tree of booleans like params, a prefix of such a tree, or a function from params
# to such a tree; None for all kernels.
Include = Any | Callable[[Any], Any]

_HALF_OF_24_BITS = 2**23
_LARGEST_INT32 = 2**31 - 1


class Groups(NamedTuple):
    """Groups of leaves that are ranked together, each layer by itself.

    Attributes:
      leaves: The indices of the leaves of each group.
      copies: For each leaf, the axes of its units that count layers. They are empty for leaves in one
        group with others, whose layers are ranked together.
      layers: The number of layers of each group.
      sizes: The number of units in a layer of each group.
      zeros: The final number of zeros in a layer of each group.
    """

    leaves: list[list[int]]
    copies: list[tuple[int, ...]]
    layers: list[int]
    sizes: list[int]
    zeros: list[int | jax.Array]

    @property
    def live(self) -> list[int | jax.Array]:
        """The final number of live units in a layer of each group."""
        return [size - zeros for size, zeros in zip(self.sizes, self.zeros, strict=True)]

    def of_layers(self, counts: Sequence[int | jax.Array]) -> jax.Array:
        """Return a count of each group as a vector with an entry for each layer, int32."""
        if not any(isinstance(count, jax.Array) for count in counts):
            return jnp.asarray(np.repeat(np.array(counts, np.int32), self.layers))
        stacked = stack_counts(counts)
        owners = np.repeat(np.arange(len(counts)), self.layers)
        return stacked if len(owners) == len(counts) else stacked[owners]


def include_leaves(
    include: Include | None,
    axes: Any,
    tree: Any,
    params: Any = None,
    *,
    name: str = "sparsity",
    fractions: Any = 0.0,
) -> tuple[Any, Any]:
    """Return a tree with `optax.MaskedNode` for each leaf that is not included, and its `LeafAxes`.

    Args:
      include: A tree of flags, a prefix of such a tree, or a function that returns it; None to include
        each kernel.
      axes: What each leaf is, as for `optperm._leaf_axes.resolve_axes`.
      tree: The tree of the leaves, with `optax.MaskedNode` for leaves that the optimizer does not see.
      params: All params, from which functions are computed; None for `tree`.
      name: The name of the argument `fractions`, for messages.
      fractions: The fraction of entries to prune or freeze, or a tree of fractions.

    Raises:
      ValueError: If the flags or the axes do not fit, a leaf that is not included has a nonzero
        fraction, or no leaf is included although the fractions are not 0.
    """
    if not jax.tree.leaves(tree):
        return tree, tree
    known = find_axes(axes, tree, params)
    flags = resolve_include(include, known, tree if params is None else params)
    if not is_zero(fractions) and not any(jax.tree.leaves(flags)):
        leaves = zip(leaf_paths(tree), jax.tree.leaves(known), strict=True)
        found = [
            f"{path or 'params'} {jnp.shape(leaf)} ({own.kind})" for (path, leaf), own in leaves
        ]
        more = f" and {len(found) - 5} more" if len(found) > 5 else ""
        raise ValueError(
            (
                "By default, only kernels are included, but no leaf is a kernel. Pass include=True to "
                "include all leaves, or say with axes= which leaves are kernels, for example with "
                "optperm.leaf_axes(params, name=optperm.LeafAxes('kernel', ...))."
                if include is None
                else f"include= selects no leaf, but {name} is not 0."
            )
            + f" The leaves are {', '.join(found[:5])}{more}."
        )
    _check_excluded(name, fractions, flags)
    taken = jax.tree.map(lambda flag, leaf: leaf if flag else optax.MaskedNode(), flags, tree)
    return taken, mask_like(known, taken)


def find_axes(axes: Any, tree: Any, params: Any = None) -> Any:
    """Return a `LeafAxes` for each leaf of a tree; the arguments are as in `include_leaves`."""
    whole = tree if params is None else params
    found = jax.tree.leaves(resolve_axes(axes, whole))
    # The roles of the axes of other leaves are not used.
    found = [OTHER if own.kind == "other" else own for own in found]
    structure: Any = jax.tree.structure(tree if params is None else without_variables(params))
    return mask_like(structure.unflatten(found), tree)


def is_zero(fractions: Any) -> bool:
    """Return whether a fraction, or each fraction of a tree, is 0; False if a fraction is traced."""
    given = jax.tree.leaves(without_variables(fractions), is_leaf=_is_number)
    return all(checks.is_concrete_number(each) and np.all(each == 0) for each in given)


def resolve_include(include: Include | None, known: Any, params: Any) -> Any:
    """Return a flag for each leaf, by default whether it is a kernel.

    Args:
      include: As in `include_leaves`.
      known: The tree of the `LeafAxes` of the leaves.
      params: All params, the argument of functions.
    """
    if include is None:
        return jax.tree.map(lambda own: own.kind == "kernel", known)
    flags = resolve_tree(include, params)
    return spread_prefix("include", flags, known, is_flag, "True or False")


def _check_excluded(name: str, fractions: Any, flags: Any) -> None:
    """Raise a ValueError if a tree of fractions is not 0 for a leaf that is not included.

    A fraction for a whole branch is for the included leaves of the branch.
    """
    given = dict(
        jax.tree_util.tree_leaves_with_path(without_variables(fractions), is_leaf=_is_number)
    )
    for path, flag in jax.tree_util.tree_leaves_with_path(flags):
        fraction = given.get(path, 0) if path else 0
        place = f"{name}{jax.tree_util.keystr(path)}"
        if np.ndim(fraction):
            check_fraction(place, fraction)
        if not flag and checks.is_concrete_number(fraction) and fraction != 0:
            raise ValueError(
                f"{place} is {fraction}, but that leaf is not included: pass include=."
            )


def widen_scores(name: str, scores: Any, mask: Any) -> Any:
    """Return the scores of the leaves that have a mask, cast to one dtype for comparisons."""
    scores = select_masked(name, without_variables(scores), mask)
    advice = "Pass real floating scores, or exclude the leaf with include=."
    checks.check_real_floating(name, scores, advice=advice)
    dtype = accumulation_dtype(scores)
    return jax.tree.map(lambda s: jnp.asarray(s, dtype), scores)


def encode_scores(scores: Any, axes: Any, structure: Entries) -> Any:
    """Return a code for each unit of each leaf, unsigned integers in the order of the scores."""
    check_fits(structure, scores, axes)
    return jax.tree.map(lambda score, own: order_codes(structure.pool(score, own)), scores, axes)


def draw_codes(
    mask: Any, taken: Any, axes: Any, structure: Entries, key: int | jax.Array | None
) -> Any:
    """Draw codes, which depend only on the key and the leaf's position, for the units of each leaf.

    Args:
      mask: A tree with all leaves, which determines the positions.
      taken: The tree of the included leaves.
      axes: The `LeafAxes` of the included leaves.
      structure: The units.
      key: The random key.
    """
    if key is None:
        raise ValueError("criterion 'random' needs a key: pass key=jax.random.key(0).")
    check_fits(structure, taken, axes)

    def draw(place: int, leaf: jax.Array, own: LeafAxes) -> jax.Array:
        unit = jax.eval_shape(lambda m: structure.pool(m.astype(jnp.float32), own), leaf)
        # Codes depend on the leaf's position, so that other leaves do not change them.
        return jax.random.bits(jax.random.fold_in(make_key(key), place), unit.shape, jnp.uint32)

    leaves, treedef = jax.tree.flatten(mask)
    places = jax.tree.unflatten(treedef, range(len(leaves)))
    return jax.tree.map(draw, mask_like(places, taken), taken, axes)


def order_codes(scores: jax.Array) -> jax.Array:
    """Return unsigned integers in the order of the scores, all of them above 0.

    -0 equals 0, and NaN is above infinity. 16-bit scores are cast to float32. Only bits are compared, so
    a processor that flushes subnormal numbers gives the same order.

    Args:
      scores: An array of a real floating dtype.

    Returns:
      An array of the same shape, uint64 for float64 scores, otherwise uint32.
    """
    is_double = scores.dtype == jnp.float64
    word, wide = (jnp.uint64, jnp.float64) if is_double else (jnp.uint32, jnp.float32)
    top = jnp.array(1 << (63 if is_double else 31), word)
    bits = jax.lax.bitcast_convert_type(jnp.asarray(scores, wide), word)
    infinity = jax.lax.bitcast_convert_type(jnp.array(jnp.inf, wide), word)
    bits = jnp.where(bits == top, jnp.zeros_like(bits), bits)
    # Negative numbers are ordered by their flipped bits, below all other numbers.
    codes = jnp.where(bits < top, bits | top, ~bits)
    return jnp.where((bits & ~top) > infinity, ~jnp.zeros_like(bits), codes)


def group_leaves(
    name: str, sparsity: Any, scope: str, tree: Any, axes: Any, structure: Entries = ENTRIES
) -> Groups:
    """Return the groups of leaves that are ranked together, with their numbers of zeros.

    Args:
      name: The name of the argument `sparsity`, for messages.
      sparsity: One fraction, or a tree of fractions like `tree`, or a prefix of such a tree.
      scope: The distribution of one fraction over the leaves; "unit" counts the inputs of one unit.
      tree: Arrays, or shapes.
      axes: The `LeafAxes` of the leaves.
      structure: The units to count.

    Raises:
      TypeError: If a fraction is not a single number.
      ValueError: If a fraction is out of range, if the tree of fractions does not fit, or if `scope` is
        "global" and there is a tree.
    """
    leaves = [
        (leaf.shape, own) for leaf, own in zip(*map(jax.tree.leaves, (tree, axes)), strict=True)
    ]
    is_single = _is_number(sparsity) or is_function(sparsity)
    if is_single:
        check_fraction(name, sparsity)
    if is_single and scope == "erk":
        sparsity = _compute_erk(tree, axes, sparsity)
    layers = [count_copies(*leaf) for leaf in leaves]
    if scope == "unit":
        sizes = [math.prod(shape[axis] for axis in own.in_axis) for shape, own in leaves]
    else:
        sizes = [structure.count(*leaf) for leaf in leaves]
    # There is one group of all leaves, or a group for each leaf
    if scope == "global":
        if not is_single:
            raise ValueError(f"{name} must be a single number with scope 'global', got a tree.")
        total = sum(n * size for n, size in zip(layers, sizes, strict=True))
        zeros = [nearest_count(sparsity, total)]
        return Groups([[*range(len(leaves))]], [()] * len(leaves), [1], [total], zeros)
    fractions = jax.tree.leaves(
        spread_prefix(name, without_variables(sparsity), tree, _is_number, "a number")
    )
    for fraction in fractions:
        check_fraction(name, fraction)
    zeros = [nearest_count(*pair) for pair in zip(fractions, sizes, strict=True)]
    copies = [structure.copies(own) for _, own in leaves]
    return Groups([[index] for index in range(len(leaves))], copies, layers, sizes, zeros)


def nearest_count(fraction: float | jax.Array, size: int | jax.Array) -> int | jax.Array:
    """Return floor(s n + 1/2), computed exactly, for Python numbers or JAX arrays.

    A Python or NumPy fraction has the value of its printed decimal. If the fraction or the size is a JAX
    array, the fraction is clipped to [0, 1] and rounded to a multiple of 2^-24, and NaN counts as 0; the
    rest is integer arithmetic, so all processors agree.
    """
    if not isinstance(fraction, jax.Array) and not isinstance(size, jax.Array):
        return math.floor(Fraction(str(fraction)) * size + Fraction(1, 2))
    fraction = jnp.clip(jnp.asarray(fraction, accumulation_dtype(fraction)), 0, 1)
    # floor((k n + 2^23) / 2^24) for s = k / 2^24. k and n are split so that products fit into 32 bits.
    k = jnp.round(jnp.where(fraction > 0, fraction, 0) * 2**24).astype(jnp.uint32)
    n = jnp.asarray(size, jnp.uint32)
    k_high, k_low, n_high, n_low = k >> 12, k & 0xFFF, n >> 16, n & 0xFFFF
    whole = ((k_high * n_high) << 4) + ((k_high * n_low) >> 12) + ((k_low * n_high) >> 8)
    rest = (((k_high * n_low) & 0xFFF) << 12) + (((k_low * n_high) & 0xFF) << 16)
    return (whole + ((rest + k_low * n_low + _HALF_OF_24_BITS) >> 24)).astype(jnp.int32)


def check_fraction(name: str, fraction: Any) -> None:
    """Raise unless a fraction is a single number, which must be in [0, 1] unless traced."""
    checks.check_in_range(name, fraction, 0.0, 1.0, may_be_schedule=False)
    if isinstance(fraction, jax.core.Tracer) and (fraction.ndim or fraction.dtype == bool):
        raise TypeError(
            f"{name} must be a single real number, got {fraction.dtype}{list(fraction.shape)}: use "
            "jax.vmap for several numbers."
        )


def erk_sparsity(
    params: Any,
    sparsity: float | jax.Array,
    *,
    include: Include | None = None,
    axes: Any = None,
) -> Any:
    r"""Return a sparsity per leaf from the Erdős-Rényi kernel (ERK), which makes small leaves denser.

    A layer with N entries and the shape :math:`(n_1, \dots, n_k)` has the density

    .. math::
      d = \min(1, \epsilon r), \qquad r = \frac{n_1 + \dots + n_k}{n_1 \cdots n_k}

    with the same :math:`\epsilon` for all layers, such that :math:`\sum d N = (1 - s) \sum N`. A stacked
    leaf counts as its layers, so a scanned model gets the sparsities of the unrolled model. Counts are
    rounded with the largest-remainder method, and layers of one shape have the same count. So exactly
    floor(s n + 1/2) of the n entries of all leaves are zero if the shapes of the layers differ, and
    otherwise this number up to half the number of layers of one shape. Other functions use these
    sparsities with `scope="erk"`. To change some sparsities, call this function and pass the changed
    tree as `sparsity`.

    Args:
      params: A tree of arrays, or of shapes from `jax.eval_shape`.
      sparsity: s, in [0, 1]. A JAX array, traced or not, gives float32 sparsities that are not rounded
        to counts.
      include: The leaves that become sparse, as in `optperm.sparsity.prune`.
      axes: What each leaf is, as in `optperm.sparsity.prune`.

    Returns:
      A tree of floats like params, with 0.0 for leaves that are not included.

    Example:
      >>> import jax, jax.numpy as jnp, optperm
      >>> params = {"in": jnp.zeros((784, 300)), "mid": jnp.zeros((300, 100))}
      >>> params |= {"out": jnp.zeros((100, 10))}
      >>> sparsities = optperm.sparsity.erk_sparsity(params, 0.9)
      >>> jax.tree.map(lambda p, s: round(p.size * (1 - s)), params, sparsities)  # that are not zero
      {'in': 18714, 'mid': 6906, 'out': 1000}

    Raises:
      TypeError: If `sparsity` is not a number, or a leaf is not an array.
      ValueError: If `sparsity` is out of range, if `include` or `axes` does not fit, or if no leaf is
        included although `sparsity` is not 0.

    References:
      Evci et al., `Rigging the Lottery: Making All Tickets Winners <https://arxiv.org/abs/1911.11134>`_,
      ICML 2020; Mocanu et al., `Scalable training of artificial neural networks with adaptive sparse
      connectivity <https://arxiv.org/abs/1707.04780>`_, 2018
    """
    check_fraction("sparsity", sparsity)
    plain = without_variables(params)
    checks.check_arrays("params", plain)
    taken, known = include_leaves(include, axes, plain, params, fractions=sparsity)
    return fill_masked(_compute_erk(taken, known, sparsity), jax.tree.map(lambda _: 0.0, plain))


def _compute_erk(tree: Any, axes: Any, sparsity: float | jax.Array) -> Any:
    leaves, structure = jax.tree.flatten(tree)
    pairs = [(leaf.shape, own) for leaf, own in zip(leaves, jax.tree.leaves(axes), strict=True)]
    shapes = [layer_shape(*pair) for pair in pairs]
    # All layers of one shape have the same density. A layer without entries has no zeros.
    numbers = collections.Counter[tuple[int, ...]]()
    for shape, pair in zip(shapes, pairs, strict=True):
        numbers[shape] += count_copies(*pair) * (math.prod(shape) > 0)
    numbers = +numbers
    fractions: dict[tuple[int, ...], Any] = {}
    if numbers:
        kinds = sorted(numbers)
        layers = np.array([numbers[shape] for shape in kinds])
        sizes = np.array([math.prod(shape) for shape in kinds])
        sums = np.array([max(sum(shape), 1) for shape in kinds])
        total = int(layers @ sizes)
        live = total - nearest_count(sparsity, total)
        densities = _fill(live, layers * sizes, layers * sums)
        if isinstance(live, jax.Array):
            fractions = dict(zip(kinds, 1 - densities, strict=True))
        else:
            counts = _round_counts(live, densities, sizes, layers)
            fractions = dict(zip(kinds, ((sizes - counts) / sizes).tolist(), strict=True))
    return jax.tree.unflatten(structure, [fractions.get(shape, 0.0) for shape in shapes])


def _round_counts(
    live: int, densities: np.ndarray, sizes: np.ndarray, layers: np.ndarray
) -> np.ndarray:
    """Return the live entries of each kind of layer, rounded such that all layers have about `live`.

    Entries left by rounding down go to the largest remainders, if they are enough for at least half of
    the layers of this kind.
    """
    wanted = densities * sizes
    counts = np.floor(wanted).astype(int)
    left = live - int(layers @ counts)
    for kind in np.argsort(np.round(counts - wanted, 6), kind="stable"):
        if left > 0 and 2 * left >= layers[kind] and counts[kind] < sizes[kind]:
            counts[kind] += 1
            left -= layers[kind]
    return counts


def _fill(live: int | jax.Array, sizes: np.ndarray, sums: np.ndarray) -> Any:
    """Return the densities min(1, eps r) of kinds of layers for a total number of live entries.

    The solution is found by water filling: layers become dense in descending order of r = sum / size.
    """
    xp: Any = jnp if isinstance(live, jax.Array) else np
    dtype = np.float32 if xp is jnp else np.float64
    order = np.argsort(-(sums / sizes), kind="stable")
    size, rest = sizes[order], sums[order]
    ratio = (rest / size).astype(dtype)
    # eps of a kind assumes that all earlier kinds are dense; the first with eps r <= 1 is the solution.
    dense = (np.cumsum(size) - size).astype(dtype)
    rest = (np.sum(rest) - np.cumsum(rest) + rest).astype(dtype)
    eps = (xp.asarray(live, dtype) - dense) / rest
    is_fit = eps * ratio <= 1
    eps = eps[xp.argmax(is_fit)]
    densities = xp.where(is_fit.any(), xp.clip(eps * ratio, 0, 1), xp.ones_like(ratio))
    return densities[np.argsort(order)]


def keep(
    name: str, codes: Any, sparsity: Any, scope: str, tree: Any, axes: Any, structure: Entries
) -> Any:
    """Return the mask of the entries to keep.

    Args:
      name: The name of the argument `sparsity`, for messages.
      codes: The codes of each leaf's units, from `encode_scores` or `draw_codes`.
      sparsity: The fraction of units to drop, or a tree of fractions; None for `NOfM`.
      scope: The entries that a fraction refers to.
      tree: Arrays with the shapes of the leaves.
      axes: The `LeafAxes` of the leaves.
      structure: The units.

    Returns:
      Booleans like the tree.
    """
    checks.check_choice("scope", scope, get_args(UnitScope))
    if structure is not ENTRIES and scope == "unit":
        raise ValueError(f"scope 'unit' needs structure=None, got {structure}.")
    # The structure n of m determines the counts, so no fraction is needed.
    if isinstance(structure, NOfM):
        if sparsity is not None:
            raise ValueError(f"{name} must be None with {structure}, got {sparsity!r}.")
        return jax.tree.map(structure.keep, codes, axes)
    if scope == "unit":
        check_fits(INPUTS, tree, axes)
    groups = group_leaves(name, sparsity, scope, tree, axes, structure)
    units, treedef = jax.tree.flatten(codes)
    # In each layer of n units, the n - round(s n) units with the highest codes stay.
    if scope == "unit":
        known = jax.tree.leaves(axes)
        kept = [_keep_in_each_unit(*each) for each in zip(units, known, groups.live, strict=True)]
    else:
        kept = keep_highest(units, groups.leaves, groups.of_layers(groups.live), groups.copies)
    return jax.tree.map(structure.spread, jax.tree.unflatten(treedef, kept), tree, axes)


def _keep_in_each_unit(codes: jax.Array, axes: LeafAxes, live: int | jax.Array) -> jax.Array:
    """Return the mask of the highest inputs of each output unit; ties keep the earlier input."""

    def select(code: jax.Array) -> jax.Array:
        return keep_highest([code], [[0]], [live])[0]

    # The last mapping, of the last axis, is the first to take an axis away.
    for axis in sorted(axes.batch_axis + axes.out_axis):
        select = jax.vmap(select, in_axes=axis, out_axes=axis)
    return select(codes) if codes.size else jnp.ones_like(codes, bool)


def keep_highest(
    codes: Sequence[jax.Array],
    groups: Sequence[Sequence[int]],
    counts: Sequence[int | jax.Array] | jax.Array,
    copies: Sequence[tuple[int, ...]] | None = None,
) -> list[jax.Array]:
    """Return whether each entry is among the highest of its layer; ties keep the earlier entry.

    Args:
      codes: Arrays of unsigned integers with the same dtype.
      groups: For each group, the indices of the arrays that are ranked together, in order. No array is
        in two groups.
      counts: The number of entries to keep of each layer of each group, from 0 to the size of the layer.
      copies: For each array, the axes that count its layers; only an array alone in its group has any.
        None if each array is one layer.

    Returns:
      Booleans shaped like the codes; True for arrays without a group.

    Raises:
      ValueError: If a layer has more entries than int32 can count.
    """
    return keep_highest_of(_get_code, [(code,) for code in codes], groups, counts, copies)


def keep_highest_of(
    encode: Callable[..., jax.Array],
    parts: Sequence[tuple[jax.Array, ...]],
    groups: Sequence[Sequence[int]],
    counts: Sequence[int | jax.Array] | jax.Array,
    copies: Sequence[tuple[int, ...]] | None = None,
) -> list[jax.Array]:
    """Return what `keep_highest` returns for the codes of each leaf's parts.

    A GPU computes the codes in each round, and stores none of them.

    Args:
      encode: A function from the parts of a leaf to its codes, entry by entry. Each function is compiled
        once, so it is not defined within another function.
      parts: For each leaf, a tuple of arrays of its shape.
      groups: As in `keep_highest`, like all arguments below.
      counts: The number of entries to keep.
      copies: The axes that count layers.

    Returns:
      Booleans shaped like the leaves.

    Raises:
      ValueError: As in `keep_highest`.
    """
    leaves = [first for first, *_ in parts]
    copies = [()] * len(leaves) if copies is None else copies
    sizes = [sum(_layer_size(leaves[index], copies[index]) for index in group) for group in groups]
    if max(sizes, default=0) > _LARGEST_INT32:
        raise ValueError(f"At most 2**31 - 1 entries can be ranked together, got {max(sizes)}.")
    if max(sizes, default=0) == 0:
        return [jnp.ones_like(leaf, bool) for leaf in leaves]
    static = tuple(map(tuple, groups)), tuple(map(tuple, copies))
    return [*_select(encode, list(parts), stack_counts(counts), *static)]


def _get_code(code: jax.Array) -> jax.Array:
    return code


def count_in_layers(flags: Sequence[jax.Array], copies: Sequence[tuple[int, ...]]) -> jax.Array:
    """Return the number of flags in each layer of each array, as one vector of int32."""
    counts = [_count(*pair) for pair in zip(flags, copies, strict=True)]
    return jnp.concatenate(counts) if counts else jnp.zeros(0, jnp.int32)


def stack_counts(counts: Sequence[int | jax.Array] | jax.Array) -> jax.Array:
    """Return counts as one vector of int32."""
    if isinstance(counts, jax.Array) or not any(isinstance(k, jax.Array) for k in counts):
        return jnp.asarray(counts, jnp.int32)
    return jnp.stack([jnp.asarray(k, jnp.int32) for k in counts])


# The threshold is found bit by bit from the top: a bit stays if at least k codes reach the threshold
# with this bit. On a mesh, each round sums one number per leaf, while a sort would gather all scores.
# All calls outside jax.jit compile this function once. Counts and thresholds are vectors over all
# groups, since a program with separate numbers would hold all of them during the work on each leaf.
@functools.partial(jax.jit, static_argnames=("encode", "groups", "copies"))
def _select(
    encode: Callable[..., jax.Array],
    parts: list[tuple[jax.Array, ...]],
    wanted: jax.Array,
    groups: tuple[tuple[int, ...], ...],
    copies: tuple[tuple[int, ...], ...],
) -> list[jax.Array]:
    leaves = [first for first, *_ in parts]
    word = jax.eval_shape(encode, *parts[0]).dtype
    bits = 8 * word.itemsize
    varying = varying_axes(parts, wanted)
    wanted = mark_varying(wanted, varying)
    # List the leaves of all groups, each with the numbers of its layers, and its first position.
    ranked = [index for group in groups for index in group]
    layers, starts, num_layers, largest = dict[int, Any](), dict[int, int](), 0, 0
    for group in groups:
        start, of_group = 0, np.arange(0)
        for index in group:
            of_group = num_layers + np.arange(_count_layers(leaves[index], copies[index]))
            layers[index], starts[index] = of_group, start
            start += _layer_size(leaves[index], copies[index])
        num_layers, largest = num_layers + len(of_group), max(largest, start)
    # Small leaves of one type are stacked, because each leaf adds kernels to both loops.
    stacks = [
        _make_stack(parts, [of_kind[at] for at in alike], layers, starts, axes)
        for axes, of_kind in _group_by_copies(ranked, copies).items()
        for alike in group_alike([leaves[index] for index in of_kind])
    ]

    # A scatter-add is used even if each layer is one leaf: without such an operation, XLA on a CPU
    # compiles a loop over small arrays as one function, which takes minutes for many leaves.
    def count(flags: list[jax.Array]) -> jax.Array:
        """Return the number of flags of each layer, from the flags of each stack."""
        totals = mark_varying(jnp.zeros(num_layers, jnp.int32), varying)
        sums = [_count(each, stack.copies) for each, stack in zip(flags, stacks, strict=True)]
        of_leaves = jnp.concatenate(mark_varying(sums, varying))
        return totals.at[np.concatenate([stack.layers for stack in stacks])].add(of_leaves)

    # t is the code of the k-th highest entry, the largest code that at least k codes reach.
    def find_threshold(step: jax.Array, t: jax.Array) -> jax.Array:
        candidate = t | (jnp.ones([], word) << (bits - 1 - step).astype(word))
        reached = count([encode(*stack.parts) >= stack.align(candidate) for stack in stacks])
        return jnp.where(reached >= wanted, candidate, t)

    none = mark_varying(jnp.zeros(num_layers, word), varying)
    t = jax.lax.fori_loop(0, bits, find_threshold, none)

    # Entries equal to t are kept if they are before the position e.
    def keep(t: jax.Array, e: jax.Array) -> list[jax.Array]:
        rows = [encode(*stack.parts) for stack in stacks]
        return [
            (row > stack.align(t)) | ((row == stack.align(t)) & (stack.place < stack.align(e)))
            for row, stack in zip(rows, stacks, strict=True)
        ]

    num_bits = largest.bit_length()

    def find_end(step: jax.Array, e: jax.Array) -> jax.Array:
        candidate = e | (jnp.ones([], jnp.int32) << (num_bits - 1 - step))
        kept = count(keep(t, candidate))
        return jnp.where(kept <= wanted, candidate, e)

    e = jax.lax.fori_loop(0, num_bits, find_end, jnp.zeros_like(wanted))
    # For a count of 0, t is the highest code, that of NaN, and e is 0, so no entry is kept.
    t = jnp.where(wanted > 0, t, ~jnp.zeros_like(t))
    e = jnp.where(wanted > 0, e, 0)
    chosen = {
        index: row
        for stack, kept in zip(stacks, keep(t, e), strict=True)
        for index, row in zip(
            stack.leaves, unstack(kept) if len(stack.leaves) > 1 else [kept[0]], strict=True
        )
    }
    return [
        shard_like(chosen[index], leaf) if index in chosen else jnp.ones_like(leaf, bool)
        for index, leaf in enumerate(leaves)
    ]


class _Stack(NamedTuple):
    """Leaves of one type, which are worked on together.

    Attributes:
      leaves: The indices of the leaves.
      parts: The parts of the leaves, stacked along the first axis.
      copies: The axes of the stack that count layers: the first axis, and the copies of each leaf.
      layers: The number of each layer, in the order of these axes.
      place: The position of each entry among the entries that are ranked together.
    """

    leaves: list[int]
    parts: tuple[jax.Array, ...]
    copies: tuple[int, ...]
    layers: np.ndarray[Any, Any]
    place: jax.Array

    def align(self, numbers: jax.Array) -> jax.Array:
        """Return a number for each layer of the stack, which broadcasts against the stack."""
        shape = [n if axis in self.copies else 1 for axis, n in enumerate(self.place.shape)]
        return numbers[self.layers].reshape(shape)


def _make_stack(
    parts: list[tuple[jax.Array, ...]],
    leaves: list[int],
    layers: dict[int, Any],
    starts: dict[int, int],
    copies: tuple[int, ...],
) -> _Stack:
    # Without the barrier, XLA would compile one kernel that computes the parts of all leaves.
    stacked = tuple(
        jnp.stack(computed_once(list(chosen))) if len(chosen) > 1 else chosen[0][None]
        for chosen in zip(*(parts[index] for index in leaves), strict=True)
    )
    rows = stacked[0]
    apart = (0, *(axis + 1 for axis in copies))
    # Positions are in C order, from the first position of each leaf.
    place, stride = jnp.zeros(rows.shape, jnp.int32), 1
    for axis in reversed(range(1, rows.ndim)):
        if axis not in apart:
            place += stride * jax.lax.broadcasted_iota(jnp.int32, rows.shape, axis)
            stride *= rows.shape[axis]
    first = jnp.asarray([starts[index] for index in leaves], jnp.int32)
    place = shard_like(place + jnp.expand_dims(first, range(1, rows.ndim)), rows)
    return _Stack(
        leaves, stacked, apart, np.concatenate([layers[index] for index in leaves]), place
    )


def _group_by_copies(
    leaves: list[int], copies: tuple[tuple[int, ...], ...]
) -> dict[tuple[int, ...], list[int]]:
    """Return the leaves whose layers are counted by the same axes."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for index in leaves:
        groups.setdefault(copies[index], []).append(index)
    return groups


def _count(flags: jax.Array, copies: tuple[int, ...]) -> jax.Array:
    """Return the number of flags in each layer, in the order of the axes of copies."""
    inside = [axis for axis in range(flags.ndim) if axis not in copies]
    counts = jnp.sum(flags, axis=inside, dtype=jnp.int32)
    sharding = explicit_sharding(counts)
    return (unshard(counts) if sharding and any(sharding.spec) else counts).ravel()


def _count_layers(leaf: Any, copies: tuple[int, ...]) -> int:
    return math.prod(leaf.shape[axis] for axis in copies)


def _layer_size(leaf: Any, copies: tuple[int, ...]) -> int:
    """Return the number of entries of each layer of an array."""
    return math.prod(n for axis, n in enumerate(leaf.shape) if axis not in copies)


def select_masked(name: str, tree: Any, mask: Any) -> Any:
    """Return the part of a tree that has masks."""
    tree = mask_like(tree, mask)
    checks.check_arrays(name, tree)
    checks.check_same_tree(name, tree, mask, source="the mask", dtypes=False)
    return tree


def _is_number(node: Any) -> bool:
    """Return whether a node is not a tree, but a number or an object that is rejected as a number."""
    return node is None or jax.tree_util.treedef_is_leaf(jax.tree.structure(node))
