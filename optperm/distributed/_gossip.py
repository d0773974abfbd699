"""Gossip: each replica exchanges with one other replica, chosen at random from the step number.

J. Kolehmainen et al., "NoLoCo: No-all-reduce Low Communication Training Method for Large Models",
arXiv 2506.10911, 2025.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from optperm.core.dtypes import compute_in_order
from optperm.core.mapped_axes import AxisName, axis_names, largest, reflect


def map_with_partner(
    function: Callable[..., Any],
    tree: Any,
    *others: Any,
    axis_name: AxisName | None,
    count: jax.Array,
) -> Any:
    """Return `function(leaf, partner's leaf, *leaves of others)` for each leaf of a tree.

    The partner of replica i is (r - i) mod k. If k is even, an odd r gives each replica another replica
    as its partner; if k is odd, one replica is its own partner.

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
    # int32 is used even with x64, so that the pairs are the same.
    drawn = jax.random.randint(key, (), 0, len(exchanges), jnp.int32)
    results: list[Any] = []

    def exchange(leaf: jax.Array, *rest: jax.Array) -> None:
        if results:
            # Process one leaf after another, to hold only one received leaf in memory.
            results[-1], leaf = compute_in_order(results[-1], leaf)
        results.append(function(leaf, jax.lax.switch(drawn, exchanges, leaf), *rest))

    jax.tree.map(exchange, tree, *others)
    return jax.tree.unflatten(jax.tree.structure(tree), results)
