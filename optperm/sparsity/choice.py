"""Which elements of a tree have the lowest scores: an exact number of them."""

import math
from collections.abc import Callable
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np

from optperm.contract import checks
from optperm.contract.dtypes import accumulation_dtype
from optperm.contract.shardings import unshard
from optperm.contract.states import is_masked, mask_like, without_variables

Scope = Literal["leaf", "global"]
# Booleans, a tree like params or a prefix of one, or a function from a tree like params to them.
Include = Any | Callable[[Any], Any]


def without_masked(name: str, tree: Any, mask: Any) -> Any:
    """The part of a tree that the masks are for."""
    tree = mask_like(tree, mask)
    checks.check_same_tree(name, tree, mask, source="the mask", dtypes=False)
    return tree


def magnitudes(name: str, scores: Any, mask: Any) -> Any:
    """The part of |s| that the masks are for, in one dtype, so that leaves can be compared."""
    scores = without_masked(name, without_variables(scores), mask)
    checks.check_real_floating(name, scores, advice="Pass scores such as gradients.")
    dtype = accumulation_dtype(scores)
    return jax.tree.map(lambda s: jnp.abs(jnp.asarray(s, dtype)), scores)


def random_scores(mask: Any, key: jax.Array | None) -> Any:
    """Scores that depend on the key and on the place in the tree alone."""
    if key is None:
        raise ValueError(
            "criterion 'random' needs a key: pass key=jax.random.key(0), for instance."
        )
    checks.check_key("key", key)
    leaves, structure = jax.tree.flatten(mask)
    drawn = [
        jax.random.bits(jax.random.fold_in(key, index), leaf.shape, jnp.uint32)
        for index, leaf in enumerate(leaves)
    ]
    return jax.tree.unflatten(structure, drawn)


def choose_lowest(
    scores: Any,
    fraction: float | jax.Array,
    scope: Scope,
    include: Include | None,
    like_params: Any,
) -> Any:
    """Whether each entry is among the fraction with the lowest score.

    Args:
      scores: A tree of arrays of one dtype.
      fraction: Of each leaf or of all entries.
      scope: Of which.
      include: Which leaves take part.
      like_params: What to call `include` with, if it is a function.

    Returns:
      Booleans shaped like the scores.
    """
    _check_fraction(fraction)
    checks.check_choice("scope", scope, get_args(Scope))
    flags = include(like_params) if callable(include) else include
    flags = _included(True if flags is None else without_variables(flags), scores)
    # Which are the lowest of a leaf is known where all of it is.
    leaves, structure = jax.tree.flatten(unshard(scores))
    included = [index for index, flag in enumerate(jax.tree.leaves(flags)) if flag]
    groups = [[index] for index in included] if scope == "leaf" else [included]
    chosen = [jnp.zeros(leaf.shape, bool) for leaf in leaves]
    for group in filter(None, groups):
        parts = [leaves[index].ravel() for index in group]
        is_lowest = _lowest(jnp.concatenate(parts), fraction)
        ends = np.cumsum([part.size for part in parts])[:-1]
        for index, part in zip(group, jnp.split(is_lowest, ends), strict=True):
            chosen[index] = part.reshape(leaves[index].shape)
    return jax.tree.unflatten(structure, chosen)


def _lowest(scores: jax.Array, fraction: float | jax.Array) -> jax.Array:
    """True for floor(p n) of n scores: the lowest, of equal ones the first, NaN last."""
    order = jnp.argsort(scores, stable=True)
    is_taken = jnp.arange(scores.size, dtype=jnp.int32) < _count(fraction, scores.size)
    return jnp.zeros(scores.shape, bool).at[order].set(is_taken, unique_indices=True)


def _count(fraction: float | jax.Array, size: int) -> int | jax.Array:
    if not isinstance(fraction, jax.Array):
        return math.floor(float(fraction) * size)
    count = jnp.floor(jnp.asarray(fraction, accumulation_dtype(fraction)) * size)
    # NaN is not greater than 0.
    return jnp.where(count > 0, jnp.minimum(count, size), 0).astype(jnp.int32)


def _check_fraction(fraction: Any) -> None:
    checks.check_in_range("fraction", fraction, 0.0, 1.0, may_be_schedule=False)
    if isinstance(fraction, jax.core.Tracer) and (fraction.ndim or fraction.dtype == bool):
        raise TypeError(
            f"fraction must be a single number, got {fraction.dtype}{list(fraction.shape)}: use "
            "jax.vmap for several."
        )


def _included(include: Any, tree: Any, path: str = "") -> Any:
    """The flag of each leaf, from a prefix of the tree, or of one with leaves where it is masked."""
    if is_masked(tree):
        return tree
    if isinstance(include, bool | np.bool_):
        return jax.tree.map(lambda _: include, tree)
    structure: Any  # One level of both.
    parts, structure = jax.tree_util.tree_flatten_with_path(
        tree, is_leaf=lambda node: node is not tree
    )
    flags, of_flags = jax.tree.flatten(include, is_leaf=lambda node: node is not include)
    if of_flags != structure or jax.tree_util.treedef_is_leaf(structure):
        raise ValueError(
            f"include{path} does not fit the params that are masked: got {include!r} for "
            f"{structure}. Pass True or False for each leaf, or for a whole part of the tree."
        )
    children = [
        _included(flag, part, path + jax.tree_util.keystr(at))
        for flag, (at, part) in zip(flags, parts, strict=True)
    ]
    return jax.tree.unflatten(structure, children)
