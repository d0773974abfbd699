"""Gossip: each replica exchanges with one other replica, drawn from the number of the step.

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
from optperm.distributed.commits import Center, CenterStep, Replicas, divide, scale, weigh


def check_can_be_paired(axis_name: AxisName | None) -> None:
    """Raise if replicas are spread over several axes."""
    if len(axis_names(axis_name)) > 1:
        raise ValueError(f'commit="pairs" needs replicas along one axis, got {axis_name!r}.')


def swap_with_partner(tree: Any, axis_name: AxisName | None, count: jax.Array) -> Any:
    """Return the tree of this replica's partner at a step.

    The partner of replica i is (r - i) mod k. For even k an odd r gives each replica another partner;
    for odd k one replica is its own partner.

    Args:
      tree: Arrays of this replica.
      axis_name: The axis of the k replicas.
      count: The number of the step, the same on all replicas.
    """
    if axis_name is None:
        return tree
    (name,) = axis_names(axis_name)
    size = jax.lax.axis_size(name)
    shifts = range(size) if size % 2 else range(1, size, 2)
    exchanges = [functools.partial(reflect, axis_name=name, shift=r) for r in shifts]
    key = jax.random.fold_in(jax.random.key(0, impl="threefry2x32"), largest(count, axis_name))
    # int32 also with x64, so that both draw the same pairs.
    drawn = jax.random.randint(key, (), 0, len(exchanges), jnp.int32)
    return jax.lax.switch(drawn, exchanges, tree)


def step_in_pairs(
    at: Center,
    n: optax.Updates,
    step: CenterStep,
    replicas: Replicas,
    weight: Any,
    count: jax.Array,
) -> tuple[Center, jax.Array]:
    """Make one step by the weighted mean n of two replicas, from the mean of their centers."""
    center, center_state = at
    _, is_finite = replicas.cast_gradient(n, center)
    w, takes_part = weigh(weight, is_finite, accumulation_dtype(n))
    *theirs, w_theirs = swap_with_partner((center, n, w), replicas.axis_name, count)
    weights = w + w_theirs
    share, share_theirs = divide((w, w_theirs), weights)
    has_any = share + share_theirs > 0
    wide, wide_theirs = (optax.tree.cast_like(c, n) for c in (center, theirs[0]))
    # n = (w n + w' n') / (w + w')
    n = optax.tree.add(scale(n, share), scale(theirs[1], share_theirs))
    # c = (c + c') / 2, without weights, so that the mean of all centers stays the same.
    c = jax.tree.map(lambda own, other: own / 2 + other / 2, wide, wide_theirs)
    c = optax.tree.cast_like(c, center)
    gradient, is_valid = replicas.cast_gradient(n, c)
    at = step((c, center_state), gradient, is_valid & has_any)
    return at, takes_part & ((is_valid & has_any) | (weights == 0))
