"""Gossip: each replica exchanges with one other replica, drawn from the number of the step.

J. Kolehmainen et al., "NoLoCo: No-all-reduce Low Communication Training Method for Large Models",
arXiv 2506.10911, 2025.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optperm.core.dtypes import accumulation_dtype
from optperm.core.mapped_axes import AxisName, axis_names, largest, reflect
from optperm.distributed._commits import Center, CenterStep, Replicas, divide, scale, weigh


def check_can_be_paired(axis_name: AxisName | None) -> None:
    """Raise if replicas are spread over several axes."""
    if len(axis_names(axis_name)) > 1:
        raise ValueError(f'commit="pairs" needs replicas along one axis, got {axis_name!r}.')


def map_with_partner(
    function: Callable[..., Any],
    tree: Any,
    *others: Any,
    axis_name: AxisName | None,
    count: jax.Array,
) -> Any:
    """Return `function(leaf, partner's leaf, *leaves of others)` for each leaf of a tree.

    The partner of replica i is (r - i) mod k. For even k an odd r gives each replica another partner;
    for odd k one replica is its own partner.

    Args:
      function: A function of arrays.
      tree: Arrays of this replica, which are sent.
      others: Trees of the same structure, which are not sent.
      axis_name: The axis of the k replicas.
      count: The number of the step, the same on all replicas.
    """
    if axis_name is None:
        return jax.tree.map(lambda leaf, *rest: function(leaf, leaf, *rest), tree, *others)
    (name,) = axis_names(axis_name)
    size = jax.lax.axis_size(name)
    shifts = range(size) if size % 2 else range(1, size, 2)
    exchanges = [functools.partial(reflect, axis_name=name, shift=r) for r in shifts]
    key = jax.random.fold_in(jax.random.key(0, impl="threefry2x32"), largest(count, axis_name))
    # int32 also with x64, so that both draw the same pairs.
    drawn = jax.random.randint(key, (), 0, len(exchanges), jnp.int32)
    results: list[Any] = []

    def exchange(leaf: jax.Array, *rest: jax.Array) -> None:
        if results:
            # One leaf after another: so the leaves received take the memory of one, not of all.
            leaf, results[-1] = jax.lax.optimization_barrier((leaf, results[-1]))
        results.append(function(leaf, jax.lax.switch(drawn, exchanges, leaf), *rest))

    jax.tree.map(exchange, tree, *others)
    return jax.tree.unflatten(jax.tree.structure(tree), results)


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
    pair = functools.partial(map_with_partner, axis_name=replicas.axis_name, count=count)
    w_theirs = pair(lambda _, theirs: theirs, w)
    share, share_theirs = divide((w, w_theirs), w + w_theirs)
    has_any = share + share_theirs > 0

    def average(own: jax.Array, theirs: jax.Array) -> jax.Array:
        dtype = accumulation_dtype(own)
        return (own.astype(dtype) / 2 + theirs.astype(dtype) / 2).astype(own.dtype)

    # n = (w n + w' n') / (w + w')
    n = pair(lambda own, theirs: scale(own, share) + scale(theirs, share_theirs), n)
    # c = (c + c') / 2, without weights, so that the mean of all centers stays the same. It is sent after
    # n, to save the memory of another leaf.
    center, n = jax.lax.optimization_barrier((center, n))
    c = pair(average, center)
    gradient, is_valid = replicas.cast_gradient(n, c)
    at = step((c, center_state), gradient, is_valid & has_any)
    return at, takes_part & ((is_valid & has_any) | (w + w_theirs == 0))
