"""Which leaves take part, and how many of their entries are zero: exact counts of a share."""

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optperm.contract import checks
from optperm.contract.dtypes import accumulation_dtype
from optperm.contract.states import is_masked, mask_like, without_variables

# "erk", shares by `erk_sparsity`; "leaf", the same share of each leaf; "global", of all together.
Scope = Literal["erk", "leaf", "global"]
# Booleans, a tree like params or a prefix of one, or a function from a tree like params to them.
Include = Any | Callable[[Any], Any]

_HALF_OF_24_BITS = 2**23


class Groups(NamedTuple):
    """Which leaves are ranked together.

    Attributes:
      leaves: The indices of the leaves of each group.
      zeros: How many of the entries of each group are zero in the end.
    """

    leaves: list[list[int]]
    zeros: list[int | jax.Array]


def included(include: Include | None, tree: Any, params: Any = None) -> Any:
    """Return a flag for each leaf; for None whether it has two axes or more.

    Args:
      include: The flags, a prefix of them, or a function to them.
      tree: What has the leaves, with `optax.MaskedNode` for those that are not seen.
      params: What to call a function with; None for the tree.
    """
    if not jax.tree.leaves(tree):
        return tree
    if include is None:
        return jax.tree.map(lambda leaf: jnp.ndim(leaf) >= 2, tree)
    flags = include(tree if params is None else params) if callable(include) else include
    return spread_prefix("include", without_variables(flags), tree, _is_flag, "True or False")


def group_leaves(
    name: str,
    sparsity: Any,
    scope: str,
    tree: Any,
    flags: Any,
    sizes: Sequence[int],
) -> Groups:
    """Return the groups of leaves, and how many zeros each has.

    Args:
      name: The argument's name, for messages.
      sparsity: A share for all leaves, or a tree (or prefix of one) of shares for each.
      scope: How a share for all is spread.
      tree: Arrays, or shapes.
      flags: Which of them take part, a tree of the same structure.
      sizes: How many entries each leaf has, or how many units of a structure.

    Raises:
      TypeError: If a share is no single number.
      ValueError: If it is out of range, if the tree of shares does not fit, or if it comes with
        "global".
    """
    taking_part = [index for index, flag in enumerate(jax.tree.leaves(flags)) if flag]
    if _is_number(sparsity) or callable(sparsity):
        check_share(name, sparsity)
        if scope == "global":
            total = sum(sizes[index] for index in taking_part)
            return Groups([taking_part], [nearest_count(sparsity, total)])
        if scope == "erk":
            sparsity = _erk(tree, sparsity, flags)
    elif scope == "global":
        raise ValueError(
            f"{name} must be a single number with scope 'global': a tree says the share of each leaf."
        )
    shares = jax.tree.leaves(
        spread_prefix(name, without_variables(sparsity), tree, _is_number, "a number")
    )
    for share in shares:
        check_share(name, share)
    zeros = [nearest_count(shares[index], sizes[index]) for index in taking_part]
    return Groups([[index] for index in taking_part], zeros)


def nearest_count(share: float | jax.Array, size: int | jax.Array) -> int | jax.Array:
    """Return floor(s n + 1/2), exactly: the same from Python's numbers and from arrays of JAX.

    A share of Python or NumPy is the decimal number that it is printed as. One of JAX is rounded to a
    multiple of 2^-24, and the rest is arithmetic of integers, so that every processor gives the
    same. NaN counts as 0.
    """
    if not isinstance(share, jax.Array) and not isinstance(size, jax.Array):
        return math.floor(Fraction(str(share)) * size + Fraction(1, 2))
    share = jnp.clip(jnp.asarray(share, accumulation_dtype(share)), 0, 1)
    # floor((k n + 2^23) / 2^24), with k and n in two parts each so that no product exceeds 32 bits.
    k = jnp.round(jnp.where(share > 0, share, 0) * 2**24).astype(jnp.uint32)
    n = jnp.asarray(size, jnp.uint32)
    k_high, k_low, n_high, n_low = k >> 12, k & 0xFFF, n >> 16, n & 0xFFFF
    whole = ((k_high * n_high) << 4) + ((k_high * n_low) >> 12) + ((k_low * n_high) >> 8)
    rest = (((k_high * n_low) & 0xFFF) << 12) + (((k_low * n_high) & 0xFF) << 16)
    return (whole + ((rest + k_low * n_low + _HALF_OF_24_BITS) >> 24)).astype(jnp.int32)


def check_shares(name: str, shares: Any) -> None:
    """Raise unless this is a share, or a tree of them, as far as it can be seen."""
    is_one = _is_number(shares) or callable(shares)
    for share in [shares] if is_one else jax.tree.leaves(shares):
        check_share(name, share)


def check_share(name: str, share: Any) -> None:
    """Raise unless a share is a single number in [0, 1], as far as it can be seen."""
    checks.check_in_range(name, share, 0.0, 1.0, may_be_schedule=False)
    if isinstance(share, jax.core.Tracer) and (share.ndim or share.dtype == bool):
        raise TypeError(
            f"{name} must be a single number, got {share.dtype}{list(share.shape)}: use "
            "jax.vmap for several."
        )


def erk_sparsity(
    params: Any, sparsity: float | jax.Array, *, include: Include | None = None
) -> Any:
    r"""Return the share of zeros of each leaf by the Erdős-Rényi kernel: small leaves stay denser.

    A leaf of N entries and of shape :math:`(n_1, \dots, n_k)` has the density

    .. math::
      d = \min(1, \epsilon r), \qquad r = \frac{n_1 + \dots + n_k}{n_1 \cdots n_k}

    with one :math:`\epsilon` for all, such that :math:`\sum d N = (1 - s) \sum N`. Counts are rounded by
    the largest remainder, so that the zeros of all leaves are floor(s N + 1/2) of their N entries. It is
    what `scope="erk"` stands for elsewhere; call it to change an entry of the tree before you pass that.

    Args:
      params: A tree of arrays, or of the shapes that `jax.eval_shape` gives.
      sparsity: s, in [0, 1]. An array of JAX, traced or not, gives shares that are not rounded to
        counts, in float32.
      include: Which leaves take part: a tree of booleans like params, or a prefix of one; or a function
        from the params to one. None for those of rank 2 and more.

    Returns:
      A tree like params of floats, 0.0 for a leaf that does not take part.

    Example:
      >>> import jax, jax.numpy as jnp, optperm
      >>> params = {"in": jnp.zeros((784, 300)), "mid": jnp.zeros((300, 100))}
      >>> params |= {"out": jnp.zeros((100, 10))}
      >>> shares = optperm.erk_sparsity(params, 0.9)
      >>> jax.tree.map(lambda p, s: round(p.size * (1 - s)), params, shares)  # that are not zero
      {'in': 18714, 'mid': 6906, 'out': 1000}

    Raises:
      TypeError: If `sparsity` is no number.
      ValueError: If it is out of range, or `include` does not fit.

    References:
      Evci et al., `Rigging the Lottery: Making All Tickets Winners <https://arxiv.org/abs/1911.11134>`_,
      ICML 2020; Mocanu et al., `Scalable training of artificial neural networks with adaptive sparse
      connectivity <https://arxiv.org/abs/1707.04780>`_, 2018
    """
    check_share("sparsity", sparsity)
    params = without_variables(params)
    return _erk(params, sparsity, included(include, params))


def _erk(tree: Any, sparsity: float | jax.Array, flags: Any) -> Any:
    leaves, structure = jax.tree.flatten(tree)
    shares: list[Any] = [0.0] * len(leaves)
    # A leaf without entries has nothing to share.
    chosen = [
        i for i, flag in enumerate(jax.tree.leaves(flags)) if flag and math.prod(leaves[i].shape)
    ]
    # By falling r: the first ones become dense before the others. r N is the sum of the shape.
    sizes = {i: math.prod(leaves[i].shape) for i in chosen}
    sums = {i: max(sum(leaves[i].shape), 1) for i in chosen}
    order = sorted(chosen, key=lambda i: -Fraction(sums[i], sizes[i]))
    total = sum(sizes.values())
    live = total - nearest_count(sparsity, total)
    if isinstance(sparsity, jax.Array):
        densities = _traced_densities(live, [sizes[i] for i in order], [sums[i] for i in order])
        for i, density in zip(order, densities, strict=True):
            shares[i] = 1 - density
        return jax.tree.unflatten(structure, shares)
    wanted, rest = {}, sum(sums.values())
    for place, i in enumerate(order):
        # eps r <= 1, where all leaves before this one are dense.
        if live * sums[i] <= rest * sizes[i]:
            wanted = {j: Fraction(live * sums[j], rest) for j in order[place:]}
            break
        live, rest = live - sizes[i], rest - sums[i]
    counts = sizes | {i: math.floor(exact) for i, exact in wanted.items()}
    by_remainder = sorted(wanted, key=lambda i: (counts[i] - wanted[i], i))
    for i in by_remainder[: live - sum(counts[i] for i in wanted)]:
        counts[i] += 1
    for i in chosen:
        shares[i] = (sizes[i] - counts[i]) / sizes[i]
    return jax.tree.unflatten(structure, shares)


def _traced_densities(live: Any, sizes: list[int], sums: list[int]) -> list[jax.Array]:
    """Return min(1, eps r) of leaves by falling r, for a number of live entries that is traced."""
    live = live.astype(jnp.float32)
    dense, rest = np.cumsum([0, *sizes[:-1]]), sum(sums) - np.cumsum([0, *sums[:-1]])
    ratios = np.float32(np.divide(sums, sizes))
    # eps where the leaves before one are dense; the first whose r it does not lift above 1.
    epsilons = (live - np.float32(dense)) / np.float32(rest)
    is_fit = epsilons * ratios <= 1
    eps = epsilons[jnp.argmax(is_fit)]
    densities = jnp.where(is_fit.any(), jnp.clip(eps * ratios, 0, 1), jnp.ones(len(sizes)))
    return list(densities)


def spread_prefix(
    name: str, prefix: Any, tree: Any, is_value: Callable[[Any], bool], values: str, path: str = ""
) -> Any:
    """Return the value of each leaf, from a prefix of the tree; it may have leaves where that is masked.

    Args:
      name: The argument's name, for messages.
      prefix: A value, or a tree of them.
      tree: What to give values to.
      is_value: Whether a node is one.
      values: What values are, for messages.
      path: Where in the tree this is.

    Raises:
      ValueError: Naming the place where it does not fit.
    """
    if is_masked(tree):
        return tree
    if is_value(prefix):
        return jax.tree.map(lambda _: prefix, tree)
    structure: Any  # One level of both.
    parts, structure = jax.tree_util.tree_flatten_with_path(
        tree, is_leaf=lambda node: node is not tree
    )
    found, of_prefix = jax.tree.flatten(prefix, is_leaf=lambda node: node is not prefix)
    if of_prefix != structure or jax.tree_util.treedef_is_leaf(structure):
        raise ValueError(
            f"{name}{path} does not fit the params: got {prefix!r} for "
            f"{structure}. Pass {values} for each leaf, or for a whole part of the tree."
        )
    children = [
        spread_prefix(name, value, part, is_value, values, path + jax.tree_util.keystr(at))
        for value, (at, part) in zip(found, parts, strict=True)
    ]
    return jax.tree.unflatten(structure, children)


def without_masked(name: str, tree: Any, mask: Any) -> Any:
    """Return the part of a tree that the masks are for."""
    tree = mask_like(tree, mask)
    checks.check_same_tree(name, tree, mask, source="the mask", dtypes=False)
    return tree


def _is_flag(node: Any) -> bool:
    return isinstance(node, bool | np.bool_)


def _is_number(node: Any) -> bool:
    """Whether a node is no tree: a number, or something that is refused as one."""
    return node is None or jax.tree_util.treedef_is_leaf(jax.tree.structure(node))
