"""Gossip: a replica exchanges with one other, which the number of the step draws, and with no more.

J. Kolehmainen et al., "NoLoCo: No-all-reduce Low Communication Training Method for Large Models",
arXiv 2506.10911, 2025.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optperm.contract.dtypes import accumulation_dtype
from optperm.contract.mapped_axes import AxisName, axis_names, largest, reflect
from optperm.distributed.commits import Center, CenterStep, Replicas, mean, scale, weigh


def check_can_be_paired(axis_name: AxisName | None) -> None:
    """Raise if replicas are spread over several axes."""
    if len(axis_names(axis_name)) > 1:
        raise ValueError(f'commit="pairs" needs replicas along one axis, got {axis_name!r}.')


def from_partner(tree: Any, axis_name: AxisName | None, count: jax.Array) -> Any:
    """Return the tree of the replica with which this one is paired at a step.

    Replica i is paired with (r - i) mod k. With r drawn from the odd numbers that is another one for
    each of an even k; with any r one of an odd k is its own partner.

    Args:
      tree: Arrays of this replica.
      axis_name: The axis of the k replicas.
      count: The number of the step, which is the same on all replicas.
    """
    if axis_name is None:
        return tree
    (name,) = axis_names(axis_name)
    size = jax.lax.axis_size(name)
    shifts = range(size) if size % 2 else range(1, size, 2)
    exchanges = [functools.partial(reflect, axis_name=name, shift=r) for r in shifts]
    key = jax.random.fold_in(jax.random.key(0, impl="threefry2x32"), largest(count, axis_name))
    # In 32 bits whatever x64 says: the same pairs in both.
    drawn = jax.random.randint(key, (), 0, len(exchanges), jnp.int32)
    return jax.lax.switch(drawn, exchanges, tree)


def in_pairs(
    at: Center,
    n: optax.Updates,
    step: CenterStep,
    replicas: Replicas,
    weight: Any,
    count: jax.Array,
) -> tuple[Center, jax.Array]:
    """One step by the weighted mean n of two replicas, from the mean of their centers."""
    center, center_state = at
    _, is_finite = replicas.as_gradient(n, center)
    w, takes_part = weigh(weight, is_finite, accumulation_dtype(n))
    *theirs, w_theirs = from_partner((center, n, w), replicas.axis_name, count)
    weights = w + w_theirs
    share, share_theirs = mean((w, w_theirs), weights)
    has_any = share + share_theirs > 0
    wide, wide_theirs = (optax.tree.cast_like(c, n) for c in (center, theirs[0]))
    n = optax.tree.add(scale(n, share), scale(theirs[1], share_theirs))
    # Centers are worth the same, whatever the last period was: their mean over all replicas stays.
    c = jax.tree.map(lambda own, other: own / 2 + other / 2, wide, wide_theirs)
    c = optax.tree.cast_like(c, center)
    gradient, is_valid = replicas.as_gradient(n, c)
    at = step((c, center_state), gradient, is_valid & has_any)
    return at, takes_part & ((is_valid & has_any) | (weights == 0))
