"""Fractions of zeros: the leaves that have one, and the exact number of zeros in each."""

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optperm.core import checks
from optperm.core.dtypes import accumulation_dtype
from optperm.core.states import without_variables
from optperm.core.trees import is_flag, mask_like, spread_prefix

# "erk": fractions by `erk_sparsity`; "leaf": the same one of each leaf; "global": one of all leaves.
Scope = Literal["erk", "leaf", "global"]
# A tree of booleans like params, a prefix of such a tree, or a function from params to such a tree.
Include = Any | Callable[[Any], Any]

_HALF_OF_24_BITS = 2**23


class Groups(NamedTuple):
    """Groups of leaves that are ranked together.

    Attributes:
      leaves: The indices of the leaves of each group.
      zeros: The final number of zeros of each group.
    """

    leaves: list[list[int]]
    zeros: list[int | jax.Array]


def flag_leaves(
    include: Include | None, tree: Any, params: Any = None, *, fraction: Any = 0.0
) -> Any:
    """Return whether each leaf is included.

    Args:
      include: The flags, a prefix of them, or a function that returns them; None to include each leaf of
        two axes and more.
      tree: The tree of the leaves, with `optax.MaskedNode` for leaves that the optimizer does not see.
      params: The argument of the function; None for the tree.
      fraction: The fraction of zeros. If it is not 0, None must include a leaf.
    """
    if not jax.tree.leaves(tree):
        return tree
    if include is None:
        flags = jax.tree.map(lambda leaf: jnp.ndim(leaf) >= 2, tree)
        fractions = jax.tree.leaves(fraction, is_leaf=_is_number)
        is_zero = all(checks.is_concrete_number(s) and np.all(s == 0) for s in fractions)
        if not any(jax.tree.leaves(flags)) and not is_zero:
            raise ValueError("no leaf of rank 2 or more: pass include=.")
        return flags
    flags = include(tree if params is None else params) if callable(include) else include
    return spread_prefix("include", without_variables(flags), tree, is_flag, "True or False")


def group_leaves(
    name: str,
    sparsity: Any,
    scope: str,
    tree: Any,
    flags: Any,
    sizes: Sequence[int],
) -> Groups:
    """Return the groups of leaves that are ranked together, with their numbers of zeros.

    Args:
      name: The name of the argument `sparsity`, for messages.
      sparsity: One fraction, or a tree of fractions like `tree`, or a prefix of such a tree.
      scope: The distribution of one fraction over the leaves.
      tree: Arrays, or shapes.
      flags: Whether each leaf is included.
      sizes: The number of entries of each leaf, or of units of a structure.

    Raises:
      TypeError: If a fraction is not a single number.
      ValueError: If a fraction is out of range, if the tree of fractions does not fit or has one for a
        leaf that is not included, or if `scope` is "global" and there is a tree.
    """
    indices = [index for index, flag in enumerate(jax.tree.leaves(flags)) if flag]
    is_single = _is_number(sparsity) or callable(sparsity)
    if is_single:
        check_fraction(name, sparsity)
    if is_single and scope == "erk":
        sparsity = _compute_erk(tree, sparsity, flags)
    # One group of all leaves, or a group for each leaf
    if scope == "global":
        if not is_single:
            raise ValueError(f"{name} must be a single number with scope 'global', got a tree.")
        total = sum(sizes[index] for index in indices)
        return Groups([indices], [nearest_count(sparsity, total)])
    fractions = jax.tree.leaves(
        spread_prefix(name, without_variables(sparsity), tree, _is_number, "a number")
    )
    for fraction in fractions:
        check_fraction(name, fraction)
    check_excluded(name, sparsity, flags)
    zeros = [nearest_count(fractions[index], sizes[index]) for index in indices]
    return Groups([[index] for index in indices], zeros)


def check_excluded(name: str, fractions: Any, flags: Any) -> None:
    """Raise a ValueError if a tree of fractions has a fraction for a leaf that is not included.

    A fraction of a whole branch is a fraction of its included leaves.
    """
    given = dict(
        jax.tree_util.tree_leaves_with_path(without_variables(fractions), is_leaf=_is_number)
    )
    for path, flag in jax.tree_util.tree_leaves_with_path(flags):
        fraction = given.get(path, 0) if path else 0
        if not flag and checks.is_concrete_number(fraction) and fraction != 0:
            place = f"{name}{jax.tree_util.keystr(path)}"
            raise ValueError(
                f"{place} is {fraction}, but that leaf is not included: pass include=."
            )


def nearest_count(fraction: float | jax.Array, size: int | jax.Array) -> int | jax.Array:
    """Return floor(s n + 1/2), exactly: the same for Python numbers and for JAX arrays.

    A Python or NumPy fraction is the decimal number that it is printed as. A JAX fraction is rounded
    to a multiple of 2^-24; the rest is integer arithmetic, so that all processors agree. NaN counts as
    0.
    """
    if not isinstance(fraction, jax.Array) and not isinstance(size, jax.Array):
        return math.floor(Fraction(str(fraction)) * size + Fraction(1, 2))
    fraction = jnp.clip(jnp.asarray(fraction, accumulation_dtype(fraction)), 0, 1)
    # floor((k n + 2^23) / 2^24) for s = k / 2^24; k and n are split in two so that products fit 32 bits.
    k = jnp.round(jnp.where(fraction > 0, fraction, 0) * 2**24).astype(jnp.uint32)
    n = jnp.asarray(size, jnp.uint32)
    k_high, k_low, n_high, n_low = k >> 12, k & 0xFFF, n >> 16, n & 0xFFFF
    whole = ((k_high * n_high) << 4) + ((k_high * n_low) >> 12) + ((k_low * n_high) >> 8)
    rest = (((k_high * n_low) & 0xFFF) << 12) + (((k_low * n_high) & 0xFF) << 16)
    return (whole + ((rest + k_low * n_low + _HALF_OF_24_BITS) >> 24)).astype(jnp.int32)


def check_fraction(name: str, fraction: Any) -> None:
    """Raise unless a fraction is a single number, in [0, 1] where it is not traced."""
    checks.check_in_range(name, fraction, 0.0, 1.0, may_be_schedule=False)
    if isinstance(fraction, jax.core.Tracer) and (fraction.ndim or fraction.dtype == bool):
        raise TypeError(
            f"{name} must be a number, got {fraction.dtype}{list(fraction.shape)}: use jax.vmap."
        )


def erk_sparsity(
    params: Any, sparsity: float | jax.Array, *, include: Include | None = None
) -> Any:
    r"""Return the sparsity of each leaf by the Erdős-Rényi kernel: small leaves stay denser.

    A leaf of N entries and of shape :math:`(n_1, \dots, n_k)` has the density

    .. math::
      d = \min(1, \epsilon r), \qquad r = \frac{n_1 + \dots + n_k}{n_1 \cdots n_k}

    with one :math:`\epsilon` for all leaves, such that :math:`\sum d N = (1 - s) \sum N`. Counts are
    rounded by the largest remainder, so that floor(s N + 1/2) of all N entries are zero. `scope="erk"`
    elsewhere means these sparsities; call this function to change some before you pass the tree.

    Args:
      params: A tree of arrays, or of the shapes that `jax.eval_shape` returns.
      sparsity: s, in [0, 1]. A JAX array, traced or not, gives sparsities in float32 that are not
        rounded to counts.
      include: The leaves that become sparse: a tree of booleans like params, a prefix of such a tree,
        or a function from params to such a tree. None for all leaves of rank 2 and more.

    Returns:
      A tree of floats like params, 0.0 for a leaf that is not included.

    Example:
      >>> import jax, jax.numpy as jnp, optperm
      >>> params = {"in": jnp.zeros((784, 300)), "mid": jnp.zeros((300, 100))}
      >>> params |= {"out": jnp.zeros((100, 10))}
      >>> sparsities = optperm.sparsity.erk_sparsity(params, 0.9)
      >>> jax.tree.map(lambda p, s: round(p.size * (1 - s)), params, sparsities)  # that are not zero
      {'in': 18714, 'mid': 6906, 'out': 1000}

    Notes:
      A leaf of several layers, (L, n, m), as scanned models have, is one leaf of three axes, with
      another density than L leaves of shape (n, m).

    Raises:
      TypeError: If `sparsity` is not a number, or a leaf is not an array.
      ValueError: If `sparsity` is out of range, or `include` does not fit.

    References:
      Evci et al., `Rigging the Lottery: Making All Tickets Winners <https://arxiv.org/abs/1911.11134>`_,
      ICML 2020; Mocanu et al., `Scalable training of artificial neural networks with adaptive sparse
      connectivity <https://arxiv.org/abs/1707.04780>`_, 2018
    """
    check_fraction("sparsity", sparsity)
    params = without_variables(params)
    checks.check_arrays("params", params)
    return _compute_erk(params, sparsity, flag_leaves(include, params))


def _compute_erk(tree: Any, sparsity: float | jax.Array, flags: Any) -> Any:
    leaves, structure = jax.tree.flatten(tree)
    fractions: list[Any] = [0.0] * len(leaves)
    # A leaf without entries has no zeros.
    chosen = [
        i for i, flag in enumerate(jax.tree.leaves(flags)) if flag and math.prod(leaves[i].shape)
    ]
    # Water filling: by falling r = sum / size: the first leaves become dense before the others.
    sizes = {i: math.prod(leaves[i].shape) for i in chosen}
    sums = {i: max(sum(leaves[i].shape), 1) for i in chosen}
    order = sorted(chosen, key=lambda i: -Fraction(sums[i], sizes[i]))
    total = sum(sizes.values())
    live = total - nearest_count(sparsity, total)
    if isinstance(sparsity, jax.Array):
        densities = _compute_traced_densities(
            live, [sizes[i] for i in order], [sums[i] for i in order]
        )
        for i, density in zip(order, densities, strict=True):
            fractions[i] = 1 - density
        return jax.tree.unflatten(structure, fractions)
    wanted, rest = {}, sum(sums.values())
    for place, i in enumerate(order):
        # eps = live / rest, with the leaves before this one dense; all after it have eps r <= 1 too.
        if live * sums[i] <= rest * sizes[i]:
            wanted = {j: Fraction(live * sums[j], rest) for j in order[place:]}
            break
        live, rest = live - sizes[i], rest - sums[i]
    counts = sizes | {i: math.floor(exact) for i, exact in wanted.items()}
    # The largest remainders get the entries that rounding down has left.
    by_remainder = sorted(wanted, key=lambda i: (counts[i] - wanted[i], i))
    for i in by_remainder[: live - sum(counts[i] for i in wanted)]:
        counts[i] += 1
    for i in chosen:
        fractions[i] = (sizes[i] - counts[i]) / sizes[i]
    return jax.tree.unflatten(structure, fractions)


def _compute_traced_densities(live: Any, sizes: list[int], sums: list[int]) -> list[jax.Array]:
    """Return min(1, eps r) of leaves by falling r, for a traced number of live entries."""
    live = live.astype(jnp.float32)
    dense, rest = np.cumsum([0, *sizes[:-1]]), sum(sums) - np.cumsum([0, *sums[:-1]])
    ratios = np.float32(np.divide(sums, sizes))
    # For each leaf eps if all leaves before it are dense; the first one with eps r <= 1 is the solution.
    epsilons = (live - np.float32(dense)) / np.float32(rest)
    is_fit = epsilons * ratios <= 1
    eps = epsilons[jnp.argmax(is_fit)]
    densities = jnp.where(is_fit.any(), jnp.clip(eps * ratios, 0, 1), jnp.ones(len(sizes)))
    return list(densities)


def select_masked(name: str, tree: Any, mask: Any) -> Any:
    """Return the part of a tree that has masks."""
    tree = mask_like(tree, mask)
    checks.check_arrays(name, tree)
    checks.check_same_tree(name, tree, mask, source="the mask", dtypes=False)
    return tree


def _is_number(node: Any) -> bool:
    """Return whether a node is not a tree: a number, or an object that is refused as a number."""
    return node is None or jax.tree_util.treedef_is_leaf(jax.tree.structure(node))
