"""How the contributions of all replicas become one step of the center: in one collective."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree

from optperm.contract import checks
from optperm.contract.dtypes import accumulation_dtype, all_finite
from optperm.contract.mapped_axes import (
    AxisName,
    all_gather,
    axis_names,
    mark_varying,
    psum,
    varying_axes,
)

Commit = Literal["mean", "sum", "sequential", "pairs"]
# (center, state of its optimizer)
Center = tuple[optax.Params, Any]
# (center, gradient, whether there is one) -> center
CenterStep = Callable[[Center, optax.Updates, jax.Array], Center]


@dataclasses.dataclass(frozen=True)
class Replicas:
    """The mapped axes over which replicas are spread, and over which one is sharded."""

    axis_name: AxisName | None
    shard_axes: AxisName

    @classmethod
    def of(cls, axis_name: Any, shard_axes: Any) -> Replicas:
        """Those that a user has named; a TypeError if one is no name."""
        checks.check_axis_name("axis_name", axis_name)
        checks.check_axis_name("shard_axes", shard_axes)
        return cls(axis_name or None, shard_axes or ())

    def check_are_local(self, grads: optax.Updates, params: optax.Params, method: str) -> None:
        """Raises where `jax.shard_map` has summed the gradients over the replicas, as types tell."""
        if self.axis_name is None:
            return
        names = set(axis_names(self.axis_name))
        tracked = names & varying_axes(jax.lax.axis_index(self.axis_name))
        if tracked and tracked != names:
            raise ValueError(
                f"axis_name {self.axis_name!r} of {method} names axes of jax.shard_map and of jax.vmap "
                "within it, which JAX reduces together with check_vma=False only: pass that to it."
            )
        is_summed = jax.tree.map(lambda g, p: bool(tracked - varying_axes(g, p)), grads, params)
        if tracked - varying_axes(grads) or any(jax.tree.leaves(is_summed)):
            raise ValueError(
                f"The updates given to {method} do not vary over the axis {self.axis_name!r}. In "
                "jax.shard_map, gradients of params that are the same on all replicas arrive summed "
                "over it, and the local steps would not be local: give every replica params of its "
                f"own, jax.lax.pcast(params, {self.axis_name!r}, to='varying'), and its own gradients."
            )

    def agree(self, flag: jax.Array, tree: optax.Updates) -> jax.Array:
        """Whether a flag of the shards of one replica's tree is True on all of them."""
        checks.check_axis_is_bound(self.shard_axes, name="shard_axes")
        within = varying_axes(tree).union(axis_names(self.shard_axes))
        axes = tuple(sorted(within.difference(axis_names(self.axis_name))))
        if not axes:
            return flag
        # Only what varies can be reduced, where that is tracked.
        counted = mark_varying(flag.astype(jnp.int32), varying_axes(jax.lax.axis_index(axes)))
        return jax.lax.pmin(counted, axes) > 0

    def are_finite(self, tree: optax.Updates) -> jax.Array:
        """Whether every entry of one replica's tree is finite, on all of its shards."""
        return self.agree(all_finite(tree), tree)

    def as_gradient(
        self, n: optax.Updates, center: optax.Params
    ) -> tuple[optax.Updates, jax.Array]:
        """A contribution in the dtypes of the center, and whether it is finite there."""
        gradient = optax.tree.cast_like(n, center)
        return gradient, self.are_finite(gradient)


def weigh(weight: Any, is_finite: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """Return a replica's weight, zero if it sits out, and whether it takes part as far as it may.

    A weight of zero is the user's word; a negative one, or one that is not finite, is not.
    """
    if weight is None:
        return is_finite.astype(dtype), is_finite
    w = jnp.asarray(weight, dtype)
    takes_part = is_finite & (w >= 0) & jnp.isfinite(w)
    return jnp.where(takes_part, w, 0), takes_part


def check_weight(weight: Any) -> None:
    """Raise unless a weight is a scalar, and not negative nor infinite where Python sees it."""
    if weight is None:
        return
    kind = checks.dtype_of("weight", weight)
    is_real = jnp.issubdtype(kind, jnp.floating) or jnp.issubdtype(kind, jnp.integer)
    if jnp.ndim(weight) or not is_real:
        raise TypeError(f"weight must be a real number for each replica, got {weight!r}.")
    if not isinstance(weight, jax.core.Tracer):
        checks.check_in_range("weight", float(weight), 0.0, np.inf, may_be_schedule=False)
        if not np.isfinite(float(weight)):
            raise ValueError(f"weight must be finite, got {weight!r}.")


def scale(tree: Any, weight: jax.Array) -> Any:
    """Return w n; nothing of what has no weight, finite or not."""
    return jax.tree.map(
        lambda x: jnp.where(weight > 0, weight.astype(x.dtype) * x, jnp.zeros_like(x)), tree
    )


def mean(total: Any, weights: jax.Array) -> Any:
    """Return a sum of weighted contributions over that of the weights, if any; NaN if that overflows."""
    over = jnp.where(jnp.isfinite(weights), jnp.where(weights > 0, weights, 1), jnp.nan)
    return jax.tree.map(lambda x: x / over.astype(x.dtype), total)


# (center, contribution, step, replicas, weight) -> center, whether this replica took part
Rule = Callable[[Center, optax.Updates, CenterStep, Replicas, Any], tuple[Center, jax.Array]]


def _summed(
    at: Center, n: optax.Updates, step: CenterStep, replicas: Replicas, weight: Any, *, divide: bool
) -> tuple[Center, jax.Array]:
    """One step by sum w n, or that over sum w, of all finite contributions, in one all-reduce."""
    _, is_finite = replicas.as_gradient(n, at[0])
    w, takes_part = weigh(weight, is_finite, accumulation_dtype(n))
    total, weights = scale(n, w), w
    if replicas.axis_name is not None:
        # Tree and weight in one call are one collective for each dtype, on the shards as they lie.
        total, weights = psum((total, weights), replicas.axis_name)
    # Finite numbers may overflow in their sum.
    gradient, is_valid = replicas.as_gradient(mean(total, weights) if divide else total, at[0])
    has_any = weights > 0
    return step(at, gradient, is_valid & has_any), takes_part & (is_valid | ~has_any)


def _in_turn(
    at: Center, n: optax.Updates, step: CenterStep, replicas: Replicas, weight: Any
) -> tuple[Center, jax.Array]:
    """A step by w n of each replica, in one all-gather.

    Every replica makes the same steps in the same order, so they need not agree on the result.
    """
    _, is_finite = replicas.as_gradient(n, at[0])
    w, takes_part = weigh(weight, is_finite, accumulation_dtype(n))
    given = optax.tree.cast_like(scale(n, w), at[0]), w

    def turn(at: Center, row: tuple[optax.Updates, jax.Array]) -> tuple[Center, None]:
        return step(at, row[0], row[1] > 0), None

    if replicas.axis_name is None:
        return turn(at, given)[0], takes_part
    return jax.lax.scan(turn, at, _rows(given, replicas.axis_name))[0], takes_part


def _rows(tree: Any, axis_name: AxisName) -> Any:
    """The trees of all replicas, along a leading axis, in one collective."""
    if set(jax.sharding.get_abstract_mesh().axis_names).issubset(axis_names(axis_name)):
        packed, unpack = ravel_pytree(tree)
        return jax.vmap(unpack)(gather(packed, axis_name))
    # A replica may be sharded, and one vector of them would gather them. As a sum of rows they
    # travel as they lie.
    return _sum_of_rows(tree, axis_name)


def gather(array: jax.Array, axis_name: AxisName) -> jax.Array:
    """A vector of all replicas, along a leading axis."""
    names = axis_names(axis_name)
    if len(names) > 1 and not set(names) <= set(jax.sharding.get_abstract_mesh().axis_names):
        # JAX gathers over one axis of jax.vmap at a time.
        return _sum_of_rows(array, axis_name)
    # On TPUs XLA makes an all-reduce of everyone's rows of this, unless it is of whole 1,024 bytes.
    padding = -array.size % (1024 // array.dtype.itemsize)
    return all_gather(jnp.pad(array, (0, padding)), axis_name)[:, : array.size]


def _sum_of_rows(tree: Any, axis_name: AxisName) -> Any:
    is_own = jnp.arange(jax.lax.axis_size(axis_name)) == jax.lax.axis_index(axis_name)

    def row(leaf: jax.Array) -> jax.Array:
        mine = jnp.expand_dims(is_own, range(1, leaf.ndim + 1))
        return jnp.where(mine, leaf[None], jnp.zeros_like(leaf)[None])

    return psum(jax.tree.map(row, tree), axis_name)


# Of all replicas; `pairs.in_pairs` is that of two.
RULES: dict[Commit, Rule] = {
    "mean": functools.partial(_summed, divide=True),
    "sum": functools.partial(_summed, divide=False),
    "sequential": _in_turn,
}
