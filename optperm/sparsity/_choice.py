"""Choose the entries that stay: the entries with the highest scores in each leaf, or in all leaves.

The choice takes four steps, in the order of this file:

1. `include` selects leaves (`include_leaves`). The following steps mask the other leaves.
2. Each unit of a structure, a single entry by default, gets a code: an unsigned integer in the order of
   the scores (`encode_scores`), or a random integer (`draw_codes`).
3. `sparsity` and `scope` determine the number of zero units in each leaf or in all leaves
   (`group_leaves`).
4. The units with the highest codes stay, as many as remain; ties keep the earlier unit
   (`keep_highest`). Counting replaces sorting.
"""

import functools
import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optperm.core import checks
from optperm.core.dtypes import accumulation_dtype, computed_once
from optperm.core.keys import make_key
from optperm.core.mapped_axes import mark_varying, varying_axes
from optperm.core.shardings import shard_like
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
from optperm.sparsity._structures import ENTRIES, Entries, NOfM, check_fits

# The entries that a fraction of zeros refers to. "erk": each leaf, with fractions from `erk_sparsity`;
# "leaf": each leaf, with the same fraction; "global": all leaves together.
Scope = Literal["erk", "leaf", "global"]
# "unit": the inputs of each output unit, a slice along the last axis, with the same fraction.
UnitScope = Literal[Scope, "unit"]
# The included leaves: a tree of booleans like params, a prefix of such a tree, or a function from params
# to such a tree; None for all leaves of rank 2 or higher.
Include = Any | Callable[[Any], Any]

_HALF_OF_24_BITS = 2**23
_LARGEST_INT32 = 2**31 - 1


class Groups(NamedTuple):
    """Groups of leaves that are ranked together.

    Attributes:
      leaves: The indices of the leaves of each group.
      sizes: The number of units of each group.
      zeros: The final number of zeros of each group.
    """

    leaves: list[list[int]]
    sizes: list[int]
    zeros: list[int | jax.Array]


def include_leaves(
    include: Include | None,
    tree: Any,
    params: Any = None,
    *,
    name: str = "sparsity",
    fractions: Any = 0.0,
) -> Any:
    """Return a tree with `optax.MaskedNode` for each leaf that is not included.

    Args:
      include: A tree of flags, a prefix of such a tree, or a function that returns it; None to include
        each leaf of rank 2 or higher.
      tree: The tree of the leaves, with `optax.MaskedNode` for leaves that the optimizer does not see.
      params: The argument of the function; None for `tree`.
      name: The name of the argument `fractions`, for messages.
      fractions: The fraction of entries to prune or freeze, or a tree of fractions.

    Raises:
      ValueError: If the flags do not fit, a leaf that is not included has a nonzero fraction, or no leaf
        is included although the fractions are not 0.
    """
    if not jax.tree.leaves(tree):
        return tree
    flags = resolve_include(include, tree, params)
    if not is_zero(fractions) and not any(jax.tree.leaves(flags)):
        raise ValueError(
            "By default, leaves of rank 2 or more are included, but there is no leaf of rank 2 or "
            "more: pass include=."
            if include is None
            else f"include= selects no leaf, but {name} is not 0. The paths of the leaves are "
            f"{[path for path, _ in leaf_paths(tree)]}."
        )
    _check_excluded(name, fractions, flags)
    return jax.tree.map(lambda flag, leaf: leaf if flag else optax.MaskedNode(), flags, tree)


def is_zero(fractions: Any) -> bool:
    """Return whether a fraction, or each fraction of a tree, is 0; False if a fraction is traced."""
    given = jax.tree.leaves(without_variables(fractions), is_leaf=_is_number)
    return all(checks.is_concrete_number(each) and np.all(each == 0) for each in given)


def resolve_include(include: Include | None, tree: Any, params: Any = None) -> Any:
    """Return a flag for each leaf of a tree; the arguments are as in `include_leaves`."""
    if include is None:
        return jax.tree.map(lambda leaf: jnp.ndim(leaf) >= 2, tree)
    flags = resolve_tree(include, tree if params is None else params)
    return spread_prefix("include", flags, tree, is_flag, "True or False")


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


def encode_scores(scores: Any, structure: Entries) -> Any:
    """Return a code for each unit of each leaf, unsigned integers in the order of the scores."""
    check_fits(structure, scores)
    return jax.tree.map(lambda score: order_codes(structure.pool(score)), scores)


def draw_codes(mask: Any, taken: Any, structure: Entries, key: int | jax.Array | None) -> Any:
    """Draw codes, which depend only on the key and the leaf's position, for the units of each leaf.

    Args:
      mask: A tree with all leaves, which determines the positions.
      taken: The tree of the included leaves.
      structure: The units.
      key: The random key.
    """
    if key is None:
        raise ValueError("criterion 'random' needs a key: pass key=jax.random.key(0).")
    check_fits(structure, taken)

    def draw(place: int, leaf: jax.Array) -> jax.Array:
        unit = jax.eval_shape(lambda m: structure.pool(m.astype(jnp.float32)), leaf)
        # Codes depend on the leaf's position, so that other leaves do not change them.
        return jax.random.bits(jax.random.fold_in(make_key(key), place), unit.shape, jnp.uint32)

    leaves, treedef = jax.tree.flatten(mask)
    places = jax.tree.unflatten(treedef, range(len(leaves)))
    return jax.tree.map(draw, mask_like(places, taken), taken)


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
    name: str, sparsity: Any, scope: str, tree: Any, structure: Entries = ENTRIES
) -> Groups:
    """Return the groups of leaves that are ranked together, with their numbers of zeros.

    Args:
      name: The name of the argument `sparsity`, for messages.
      sparsity: One fraction, or a tree of fractions like `tree`, or a prefix of such a tree.
      scope: The distribution of one fraction over the leaves; "unit" counts the inputs of one unit.
      tree: Arrays, or shapes.
      structure: The units to count.

    Raises:
      TypeError: If a fraction is not a single number.
      ValueError: If a fraction is out of range, if the tree of fractions does not fit, or if `scope` is
        "global" and there is a tree.
    """
    shapes = [leaf.shape for leaf in jax.tree.leaves(tree)]
    if scope == "unit":
        sizes = [math.prod(shape[:-1]) for shape in shapes]
    else:
        sizes = [structure.count(shape) for shape in shapes]
    is_single = _is_number(sparsity) or is_function(sparsity)
    if is_single:
        check_fraction(name, sparsity)
    if is_single and scope == "erk":
        sparsity = _compute_erk(tree, sparsity)
    # There is one group of all leaves, or a group for each leaf
    if scope == "global":
        if not is_single:
            raise ValueError(f"{name} must be a single number with scope 'global', got a tree.")
        total = sum(sizes)
        return Groups([[*range(len(sizes))]], [total], [nearest_count(sparsity, total)])
    fractions = jax.tree.leaves(
        spread_prefix(name, without_variables(sparsity), tree, _is_number, "a number")
    )
    for fraction in fractions:
        check_fraction(name, fraction)
    zeros = [nearest_count(*pair) for pair in zip(fractions, sizes, strict=True)]
    return Groups([[index] for index in range(len(sizes))], sizes, zeros)


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
    params: Any, sparsity: float | jax.Array, *, include: Include | None = None
) -> Any:
    r"""Return a sparsity per leaf from the Erdős-Rényi kernel (ERK), which makes small leaves denser.

    A leaf with N entries and the shape :math:`(n_1, \dots, n_k)` has the density

    .. math::
      d = \min(1, \epsilon r), \qquad r = \frac{n_1 + \dots + n_k}{n_1 \cdots n_k}

    with the same :math:`\epsilon` for all leaves, such that :math:`\sum d N = (1 - s) \sum N`. Counts
    are rounded with the largest-remainder method, so exactly floor(s n + 1/2) of the n entries of all
    leaves are zero. Other functions use these sparsities with `scope="erk"`. To change some sparsities,
    call this function and pass the changed tree as `sparsity`.

    Args:
      params: A tree of arrays, or of shapes from `jax.eval_shape`.
      sparsity: s, in [0, 1]. A JAX array, traced or not, gives float32 sparsities that are not rounded
        to counts.
      include: The leaves that become sparse, as in `optperm.sparsity.prune`.

    Returns:
      A tree of floats like params, with 0.0 for leaves that are not included.

    Example:
      >>> import jax, jax.numpy as jnp, optperm
      >>> params = {"in": jnp.zeros((784, 300)), "mid": jnp.zeros((300, 100))}
      >>> params |= {"out": jnp.zeros((100, 10))}
      >>> sparsities = optperm.sparsity.erk_sparsity(params, 0.9)
      >>> jax.tree.map(lambda p, s: round(p.size * (1 - s)), params, sparsities)  # that are not zero
      {'in': 18714, 'mid': 6906, 'out': 1000}

    Notes:
      A stacked leaf (L, n, m) of a scanned model counts as one leaf with three axes. Its density differs
      from the density of L leaves of shape (n, m).

    Raises:
      TypeError: If `sparsity` is not a number, or a leaf is not an array.
      ValueError: If `sparsity` is out of range, if `include` does not fit, or if no leaf is included
        although `sparsity` is not 0.

    References:
      Evci et al., `Rigging the Lottery: Making All Tickets Winners <https://arxiv.org/abs/1911.11134>`_,
      ICML 2020; Mocanu et al., `Scalable training of artificial neural networks with adaptive sparse
      connectivity <https://arxiv.org/abs/1707.04780>`_, 2018
    """
    check_fraction("sparsity", sparsity)
    params = without_variables(params)
    checks.check_arrays("params", params)
    taken = include_leaves(include, params, fractions=sparsity)
    return fill_masked(_compute_erk(taken, sparsity), jax.tree.map(lambda _: 0.0, params))


def _compute_erk(tree: Any, sparsity: float | jax.Array) -> Any:
    leaves, structure = jax.tree.flatten(tree)
    fractions: list[Any] = [0.0] * len(leaves)
    # A leaf without entries has no zeros.
    chosen = [i for i, leaf in enumerate(leaves) if math.prod(leaf.shape)]
    if not chosen:
        return jax.tree.unflatten(structure, fractions)
    sizes = np.array([math.prod(leaves[i].shape) for i in chosen])
    total = int(sizes.sum())
    live = total - nearest_count(sparsity, total)
    densities = _fill(live, sizes, np.array([max(sum(leaves[i].shape), 1) for i in chosen]))
    if isinstance(live, jax.Array):
        of_chosen = list(1 - densities)
    else:
        # Entries left by rounding down go to the largest remainders; ties keep the earlier leaf.
        wanted = densities * sizes
        counts = np.floor(wanted).astype(int)
        by_remainder = np.argsort(np.round(counts - wanted, 6), kind="stable")
        counts[by_remainder[: live - counts.sum()]] += 1
        of_chosen = ((sizes - counts) / sizes).tolist()
    for i, fraction in zip(chosen, of_chosen, strict=True):
        fractions[i] = fraction
    return jax.tree.unflatten(structure, fractions)


def _fill(live: int | jax.Array, sizes: np.ndarray, sums: np.ndarray) -> Any:
    """Return the densities min(1, eps r) of leaves for a total number of live entries.

    The solution is found by water filling: leaves become dense in descending order of r = sum / size.
    """
    xp: Any = jnp if isinstance(live, jax.Array) else np
    dtype = np.float32 if xp is jnp else np.float64
    order = np.argsort(-(sums / sizes), kind="stable")
    size, rest = sizes[order], sums[order]
    ratio = (rest / size).astype(dtype)
    # eps of a leaf assumes that all earlier leaves are dense; the first with eps r <= 1 is the solution.
    dense = (np.cumsum(size) - size).astype(dtype)
    rest = (np.sum(rest) - np.cumsum(rest) + rest).astype(dtype)
    eps = (xp.asarray(live, dtype) - dense) / rest
    is_fit = eps * ratio <= 1
    eps = eps[xp.argmax(is_fit)]
    densities = xp.where(is_fit.any(), xp.clip(eps * ratio, 0, 1), xp.ones_like(ratio))
    return densities[np.argsort(order)]


def keep(name: str, codes: Any, sparsity: Any, scope: str, tree: Any, structure: Entries) -> Any:
    """Return the mask of the entries to keep.

    Args:
      name: The name of the argument `sparsity`, for messages.
      codes: The codes of each leaf's units, from `encode_scores` or `draw_codes`.
      sparsity: The fraction of units to drop, or a tree of fractions; None for `NOfM`.
      scope: The entries that a fraction refers to.
      tree: Arrays with the shapes of the leaves.
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
        return jax.tree.map(structure.keep, codes)
    groups = group_leaves(name, sparsity, scope, tree, structure)
    units, treedef = jax.tree.flatten(codes)
    # In each group of n units, the n - round(s n) units with the highest codes stay.
    live = [size - zeros for size, zeros in zip(groups.sizes, groups.zeros, strict=True)]
    if scope == "unit":
        kept = [_keep_in_each_unit(*pair) for pair in zip(units, live, strict=True)]
    else:
        kept = keep_highest(units, groups.leaves, live)
    return jax.tree.map(structure.spread, jax.tree.unflatten(treedef, kept), tree)


def _keep_in_each_unit(codes: jax.Array, live: int | jax.Array) -> jax.Array:
    """Return the mask of the highest inputs of each output unit; ties keep the earlier input."""
    if not codes.size:
        return jnp.ones_like(codes, bool)
    # Each output unit is a slice at one index of the last axis
    select = jax.vmap(lambda code: keep_highest([code], [[0]], [live])[0], in_axes=-1, out_axes=-1)
    return select(jnp.atleast_1d(codes)).reshape(codes.shape)


def keep_highest(
    codes: Sequence[jax.Array],
    groups: Sequence[Sequence[int]],
    counts: Sequence[int | jax.Array] | jax.Array,
) -> list[jax.Array]:
    """Return whether each entry is among the highest of its group; ties keep the earlier entry.

    Args:
      codes: Arrays of unsigned integers with the same dtype.
      groups: For each group, the indices of the arrays that are ranked together, in order. No array is
        in two groups.
      counts: The number of entries of each group to keep, from 0 to the size of the group.

    Returns:
      Booleans shaped like the codes; True for arrays without a group.

    Raises:
      ValueError: If a group has more entries than int32 can count.
    """
    sizes = [sum(codes[index].size for index in group) for group in groups]
    if max(sizes, default=0) > _LARGEST_INT32:
        raise ValueError(f"At most 2**31 - 1 entries can be ranked together, got {max(sizes)}.")
    if max(sizes, default=0) == 0:
        return [jnp.ones_like(code, bool) for code in codes]
    return [*_select(list(codes), stack_counts(counts), tuple(map(tuple, groups)))]


def stack_counts(counts: Sequence[int | jax.Array] | jax.Array) -> jax.Array:
    """Return counts as one vector of int32."""
    if isinstance(counts, jax.Array) or not any(isinstance(k, jax.Array) for k in counts):
        return jnp.asarray(counts, jnp.int32)
    return jnp.stack([jnp.asarray(k, jnp.int32) for k in counts])


def sum_counts(counts: list[jax.Array]) -> jax.Array:
    """Return the sum of counts, as one operation."""
    return counts[0] if len(counts) == 1 else jnp.sum(jnp.stack(counts), dtype=jnp.int32)


# The threshold is found bit by bit from the top: a bit stays if at least k codes reach the threshold
# with this bit. On a mesh, each round sums one number per leaf, while a sort would gather all scores.
# All calls outside jax.jit compile this function once. Counts and thresholds are vectors over all
# groups, since a program with separate numbers would hold all of them during the work on each leaf.
@functools.partial(jax.jit, static_argnames="groups")
def _select(
    codes: list[jax.Array], wanted: jax.Array, groups: tuple[tuple[int, ...], ...]
) -> list[jax.Array]:
    sizes = [sum(codes[index].size for index in group) for group in groups]
    word, bits = codes[0].dtype, 8 * codes[0].dtype.itemsize
    axes = varying_axes(codes, wanted)
    wanted = mark_varying(wanted, axes)
    # List the leaves of all groups, each with its group and its first position in the group.
    ranked = [index for group in groups for index in group]
    owners = np.array([number for number, group in enumerate(groups) for _ in group])
    starts = np.array(_starts([codes[index] for index in ranked], owners.tolist()), np.int32)
    # Small leaves of one type are stacked, because each leaf adds kernels to both loops.
    stacks = [np.array(each) for each in group_alike([codes[index] for index in ranked])]
    stacked = [_stack([codes[ranked[at]] for at in each]) for each in stacks]
    places = [_places(starts[each], rows) for each, rows in zip(stacks, stacked, strict=True)]

    # A scatter-add is used even if each group is one leaf: without such an operation, XLA on a CPU
    # compiles a loop over small arrays as one function, which takes minutes for many leaves.
    def count(sums: list[jax.Array]) -> jax.Array:
        """Return the sum of each group, from the sums of the leaves of each stack."""
        totals = mark_varying(jnp.zeros(len(groups), jnp.int32), axes)
        of_leaves = jnp.concatenate(mark_varying(sums, axes))
        return totals.at[owners[np.concatenate(stacks)]].add(of_leaves)

    # t is the code of the k-th highest entry, the largest code that at least k codes reach.
    def find_threshold(step: jax.Array, t: jax.Array) -> jax.Array:
        candidate = t | (jnp.ones([], word) << (bits - 1 - step).astype(word))
        pairs = zip(stacks, stacked, strict=True)
        reached = count([_count(rows >= _align(candidate[owners[at]], rows)) for at, rows in pairs])
        return jnp.where(reached >= wanted, candidate, t)

    none = mark_varying(jnp.zeros(len(groups), word), axes)
    t = jax.lax.fori_loop(0, bits, find_threshold, none)

    # Entries equal to t are kept if they are before the position e.
    def keep(t: jax.Array, e: jax.Array) -> list[jax.Array]:
        kept = []
        for at, rows, place in zip(stacks, stacked, places, strict=True):
            threshold, end = (_align(each[owners[at]], rows) for each in (t, e))
            kept.append((rows > threshold) | ((rows == threshold) & (place < end)))
        return kept

    num_bits = max(sizes).bit_length()

    def find_end(step: jax.Array, e: jax.Array) -> jax.Array:
        candidate = e | (jnp.ones([], jnp.int32) << (num_bits - 1 - step))
        kept = count([_count(each) for each in keep(t, candidate)])
        return jnp.where(kept <= wanted, candidate, e)

    e = jax.lax.fori_loop(0, num_bits, find_end, jnp.zeros_like(wanted))
    # For a count of 0, t is the highest code, that of NaN, and e is 0, so no entry is kept.
    t = jnp.where(wanted > 0, t, ~jnp.zeros_like(t))
    e = jnp.where(wanted > 0, e, 0)
    chosen = {
        ranked[at]: row
        for each, kept in zip(stacks, keep(t, e), strict=True)
        for at, row in zip(each, unstack(kept) if len(each) > 1 else [kept[0]], strict=True)
    }
    return [
        shard_like(chosen[index], code) if index in chosen else jnp.ones_like(code, bool)
        for index, code in enumerate(codes)
    ]


def _stack(leaves: list[jax.Array]) -> jax.Array:
    # Otherwise, XLA would compile one kernel that computes the codes of all leaves.
    return jnp.stack(computed_once(leaves)) if len(leaves) > 1 else leaves[0][None]


def _count(flags: jax.Array) -> jax.Array:
    """Return the number of flags in each row of a stack."""
    return jnp.sum(flags, axis=range(1, flags.ndim), dtype=jnp.int32)


def _align(numbers: jax.Array, rows: jax.Array) -> jax.Array:
    """Return a number for each row of a stack, which broadcasts against the stack."""
    return jnp.expand_dims(numbers, range(1, rows.ndim))


def _starts(codes: list[jax.Array], owners: list[int]) -> list[int]:
    """Return the position of each leaf's first entry within its group."""
    ends, starts = dict.fromkeys(owners, 0), []
    for code, owner in zip(codes, owners, strict=True):
        starts.append(ends[owner])
        ends[owner] += code.size
    return starts


def _places(starts: np.ndarray[Any, Any], rows: jax.Array) -> jax.Array:
    """Return the position of each entry in C order, from the first position of each row of a stack."""
    place, stride = jnp.zeros(rows.shape, jnp.int32), 1
    for axis in reversed(range(1, rows.ndim)):
        place += stride * jax.lax.broadcasted_iota(jnp.int32, rows.shape, axis)
        stride *= rows.shape[axis]
    return shard_like(place + _align(jnp.asarray(starts), place), rows)


def select_masked(name: str, tree: Any, mask: Any) -> Any:
    """Return the part of a tree that has masks."""
    tree = mask_like(tree, mask)
    checks.check_arrays(name, tree)
    checks.check_same_tree(name, tree, mask, source="the mask", dtypes=False)
    return tree


def _is_number(node: Any) -> bool:
    """Return whether a node is not a tree, but a number or an object that is rejected as a number."""
    return node is None or jax.tree_util.treedef_is_leaf(jax.tree.structure(node))
