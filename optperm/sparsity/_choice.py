"""Choose which entries to keep, by their scores."""

import math
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp

from optperm.core import checks
from optperm.core.dtypes import accumulation_dtype
from optperm.core.keys import make_key
from optperm.core.states import without_variables
from optperm.sparsity._fractions import Scope, group_leaves, select_masked
from optperm.sparsity._selection import keep_highest, order_codes
from optperm.sparsity._structures import (
    NOfM,
    Structure,
    check_fits,
    keep_n_of_m,
    num_units,
    pool,
    spread,
)

# "unit": the same fraction of the inputs of each output unit, a slice along the last axis.
UnitScope = Literal[Scope, "unit"]


def widen_scores(name: str, scores: Any, mask: Any) -> Any:
    """Return the scores of the leaves that have a mask, in one dtype, so that they can be compared."""
    scores = select_masked(name, without_variables(scores), mask)
    checks.check_real_floating(name, scores, advice="Pass scores such as gradients.")
    dtype = accumulation_dtype(scores)
    return jax.tree.map(lambda s: jnp.asarray(s, dtype), scores)


def encode_scores(scores: Any, flags: Any, structure: Structure | None) -> Any:
    """Return codes of the units of each leaf, unsigned integers in the order of their scores."""
    check_fits(structure, scores, flags)
    return jax.tree.map(
        lambda score, flag: order_codes(pool(structure if flag else None, score)), scores, flags
    )


def draw_codes(
    mask: Any, flags: Any, structure: Structure | None, key: int | jax.Array | None
) -> Any:
    """Draw codes of the units of each leaf that depend only on the key and on the leaf's place."""
    if key is None:
        raise ValueError("criterion 'random' needs a key: pass key=jax.random.key(0).")
    check_fits(structure, mask, flags)
    leaves, treedef = jax.tree.flatten(mask)
    units = [
        jax.eval_shape(lambda m, s=structure if flag else None: pool(s, m.astype(jnp.float32)), m)
        for m, flag in zip(leaves, jax.tree.leaves(flags), strict=True)
    ]
    drawn = [
        # By the leaf's place, so that other leaves do not change its codes.
        jax.random.bits(jax.random.fold_in(make_key(key), index), unit.shape, jnp.uint32)
        for index, unit in enumerate(units)
    ]
    return jax.tree.unflatten(treedef, drawn)


def keep(
    name: str,
    codes: Any,
    sparsity: Any,
    scope: str,
    tree: Any,
    flags: Any,
    structure: Structure | None,
) -> Any:
    """Return the mask of the entries to keep.

    Args:
      name: The name of the argument `sparsity`, for messages.
      codes: Codes of the units of each leaf, from `encode_scores` or `draw_codes`.
      sparsity: The fraction of units to drop, or a tree of fractions; None for `NOfM`.
      scope: The entries that a fraction refers to.
      tree: Arrays with the shapes of the leaves.
      flags: Whether each leaf is included.
      structure: The units.

    Returns:
      Booleans like the tree, True for a leaf that is not included.
    """
    checks.check_choice("scope", scope, get_args(UnitScope))
    if isinstance(structure, NOfM) and sparsity is not None:
        raise ValueError(f"{name} must be None with {structure}, got {sparsity!r}.")
    if structure is not None and scope == "unit":
        raise ValueError(f"scope 'unit' needs structure=None, got {structure}.")
    leaves, treedef = jax.tree.flatten(tree)
    units, chosen = jax.tree.leaves(codes), jax.tree.leaves(flags)
    # The counts of n of m are part of the structure: no fraction is needed.
    if isinstance(structure, NOfM):
        kept = [
            keep_n_of_m(structure, unit) if flag else jnp.ones_like(unit, bool)
            for unit, flag in zip(units, chosen, strict=True)
        ]
        return jax.tree.unflatten(treedef, kept)
    sizes = [
        num_units(structure if flag else None, leaf.shape)
        for leaf, flag in zip(leaves, chosen, strict=True)
    ]
    if scope == "unit":
        return _keep_in_each_unit(name, codes, sparsity, tree, flags)
    # Of each group of n units the n - round(s n) with the highest codes stay.
    groups = group_leaves(name, sparsity, scope, tree, flags, sizes)
    totals = [sum(sizes[index] for index in group) for group in groups.leaves]
    counts = [total - zeros for total, zeros in zip(totals, groups.zeros, strict=True)]
    kept = keep_highest(units, groups.leaves, counts)
    whole = [
        spread(structure, mask, leaf) if flag else mask
        for mask, leaf, flag in zip(kept, leaves, chosen, strict=True)
    ]
    return jax.tree.unflatten(treedef, whole)


def _keep_in_each_unit(name: str, codes: Any, sparsity: Any, tree: Any, flags: Any) -> Any:
    """Return the mask of the highest inputs of each output unit, of equal ones the first."""
    leaves, treedef = jax.tree.flatten(codes)
    lengths = [math.prod(leaf.shape[:-1]) for leaf in leaves]
    groups = group_leaves(name, sparsity, "leaf", tree, flags, lengths)
    kept = [jnp.ones_like(leaf, bool) for leaf in leaves]
    for (index,), zeros in zip(groups.leaves, groups.zeros, strict=True):
        if not leaves[index].size:
            continue
        # One slice along the last axis for each output unit
        live = lengths[index] - zeros
        select = jax.vmap(
            lambda code, live=live: keep_highest([code], [[0]], [live])[0], in_axes=-1, out_axes=-1
        )
        kept[index] = select(jnp.atleast_1d(leaves[index])).reshape(leaves[index].shape)
    return jax.tree.unflatten(treedef, kept)
