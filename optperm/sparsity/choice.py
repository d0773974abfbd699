"""Which entries stay, by their scores."""

import math
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp

from optperm.contract import checks
from optperm.contract.dtypes import accumulation_dtype
from optperm.contract.shardings import shard_like, unshard
from optperm.contract.states import without_variables
from optperm.sparsity.selection import keep_highest, order_codes
from optperm.sparsity.shares import Scope, group_leaves, without_masked
from optperm.sparsity.structures import (
    NOfM,
    Structure,
    check_fits,
    check_structure,
    keep_n_of_m,
    num_units,
    pool,
    spread,
)

# "unit", the same share of what enters each output unit: of each slice along the last axis.
UnitScope = Literal[Scope, "unit"]


def wide_scores(name: str, scores: Any, mask: Any) -> Any:
    """Return the part of the scores that the masks are for, all in one dtype, to be compared."""
    scores = without_masked(name, without_variables(scores), mask)
    checks.check_real_floating(name, scores, advice="Pass scores such as gradients.")
    dtype = accumulation_dtype(scores)
    return jax.tree.map(lambda s: jnp.asarray(s, dtype), scores)


def codes_of_scores(scores: Any, flags: Any, structure: Structure | None) -> Any:
    """Return the codes of the units of each leaf, in the order of their scores."""
    check_fits(structure, scores, flags)

    return jax.tree.map(
        lambda score, flag: order_codes(pool(structure if flag else None, score)), scores, flags
    )


def random_codes(mask: Any, flags: Any, structure: Structure | None, key: jax.Array | None) -> Any:
    """Return codes that depend on the key and on the place in the tree alone."""
    if key is None:
        raise ValueError(
            "criterion 'random' needs a key: pass key=jax.random.key(0), for instance."
        )
    checks.check_key("key", key)
    check_fits(structure, mask, flags)
    leaves, treedef = jax.tree.flatten(mask)
    units = [
        jax.eval_shape(lambda m, s=structure if flag else None: pool(s, m.astype(jnp.float32)), m)
        for m, flag in zip(leaves, jax.tree.leaves(flags), strict=True)
    ]
    drawn = [
        jax.random.bits(jax.random.fold_in(key, index), unit.shape, jnp.uint32)
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
    """Say of each entry whether it stays.

    Args:
      name: What `sparsity` is called, for messages.
      codes: Of the units of each leaf, from `codes_of_scores` or `random_codes`.
      sparsity: The share of units that go, or a tree of shares; None for `NOfM`.
      scope: Of what it is the share.
      tree: Arrays of the shapes of the leaves.
      flags: Which leaves take part.
      structure: What the units are.

    Returns:
      Booleans like the tree, True for a leaf that does not take part.
    """
    checks.check_choice("scope", scope, get_args(UnitScope))
    check_structure(structure)
    leaves, treedef = jax.tree.flatten(tree)
    units, chosen = jax.tree.leaves(codes), jax.tree.leaves(flags)
    if isinstance(structure, NOfM):
        if sparsity is not None:
            raise ValueError(
                f"{name} must be None with {structure}, which says itself how many stay, got "
                f"{sparsity!r}."
            )
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
        if structure is not None:
            raise ValueError(
                f"scope 'unit' ranks single entries: structure must be None, got {structure}."
            )
        return _keep_in_each_unit(name, codes, sparsity, tree, flags)
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
    """Keep the highest of what enters each output unit, the last axis, of equal ones the first."""
    leaves, treedef = jax.tree.flatten(codes)
    lengths = [math.prod(leaf.shape[:-1]) for leaf in leaves]
    groups = group_leaves(name, sparsity, "leaf", tree, flags, lengths)
    kept = [jnp.ones_like(leaf, bool) for leaf in leaves]
    for (index,), zeros in zip(groups.leaves, groups.zeros, strict=True):
        if not leaves[index].size:
            continue
        rows = unshard(leaves[index]).reshape(lengths[index], -1)
        order = jnp.argsort(~rows, axis=0, stable=True)
        mask = jnp.argsort(order, axis=0) < lengths[index] - zeros
        kept[index] = shard_like(mask.reshape(leaves[index].shape), leaves[index])
    return jax.tree.unflatten(treedef, kept)
