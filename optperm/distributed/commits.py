"""How the contributions of all replicas become one step of the center: in one collective."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from jax.flatten_util import ravel_pytree

from optperm.contract import checks
from optperm.contract.dtypes import accumulation_dtype, all_finite
from optperm.contract.mapped_axes import (
    AxisName,
    all_gather,
    axis_names,
    mark_varying,
    varying_axes,
)

Commit = Literal["mean", "sum", "sequential"]
# (center, state of its optimizer)
Center = tuple[optax.Params, Any]
# (center, gradient, whether there is one) -> center
CenterStep = Callable[[Center, optax.Updates, jax.Array], Center]


@dataclasses.dataclass(frozen=True)
class Replicas:
    """The mapped axes over which replicas are spread, and over which the params of one are cut."""

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


def drift(center: Any, theta: Any) -> Any:
    """Delta = c - theta, in float32 or wider: how far the replica went, pointing back, as a gradient."""

    def apart(c: jax.Array, p: jax.Array) -> jax.Array:
        dtype = accumulation_dtype(p)
        # A center of more digits was rounded when the params were put on it.
        return c.astype(p.dtype).astype(dtype) - p.astype(dtype)

    return jax.tree.map(apart, center, theta)


def pull(
    mixing: float | jax.Array, center: Any, theta: Any, params: Any, replicas: Replicas
) -> tuple[Any, jax.Array]:
    """The updates that make theta <- mixing theta + (1 - mixing) c of params, and whether that is c.

    Of local params that are not finite nothing is kept.
    """
    if isinstance(mixing, int | float) and mixing == 0:
        return jax.tree.map(lambda c, p: c.astype(p.dtype) - p, center, params), jnp.array(True)
    is_kept = replicas.are_finite(theta) & (mixing != 0)

    def to(c: jax.Array, local: jax.Array, p: jax.Array) -> jax.Array:
        mixed = jnp.where(is_kept, mixing * local + (1 - mixing) * c, c)
        return mixed.astype(p.dtype) - p

    return jax.tree.map(to, center, theta, params), ~is_kept


# (center, contribution, step, replicas) -> center, whether this replica took part
Rule = Callable[[Center, optax.Updates, CenterStep, Replicas], tuple[Center, jax.Array]]


def _alone(
    at: Center, n: optax.Updates, step: CenterStep, replicas: Replicas
) -> tuple[Center, jax.Array]:
    """One replica: a step by its own contribution, if that is finite."""
    gradient, is_finite = replicas.as_gradient(n, at[0])
    return step(at, gradient, is_finite), is_finite


def _summed(
    at: Center,
    n: optax.Updates,
    step: CenterStep,
    replicas: Replicas,
    *,
    divide: bool,
) -> tuple[Center, jax.Array]:
    """One step by the sum or the mean of all finite contributions, in one all-reduce."""
    _, is_finite = replicas.as_gradient(n, at[0])
    given = optax.tree.where(is_finite, n, optax.tree.zeros_like(n))
    taking_part = is_finite.astype(accumulation_dtype(n))
    # Tree and flag in one call are one collective for each dtype, on the shards as they lie.
    total, taking_part = jax.lax.psum((given, taking_part), replicas.axis_name)
    if divide:
        total = jax.tree.map(lambda x: x / jnp.maximum(taking_part, 1).astype(x.dtype), total)
    # Finite numbers may overflow in their sum.
    gradient, is_valid = replicas.as_gradient(total, at[0])
    is_valid &= taking_part > 0
    return step(at, gradient, is_valid), is_finite & is_valid


def _in_turn(
    at: Center, n: optax.Updates, step: CenterStep, replicas: Replicas
) -> tuple[Center, jax.Array]:
    """A step by each finite contribution, in one all-gather.

    Every replica makes the same steps in the same order, so they need not agree on the result.
    """
    gradient, is_finite = replicas.as_gradient(n, at[0])
    given = optax.tree.where(is_finite, gradient, optax.tree.zeros_like(gradient))

    def turn(at: Center, row: tuple[optax.Updates, jax.Array]) -> tuple[Center, None]:
        return step(at, row[0], row[1] > 0), None

    rows = _rows((given, is_finite.astype(accumulation_dtype(given))), replicas.axis_name or ())
    return jax.lax.scan(turn, at, rows)[0], is_finite


def _rows(tree: Any, axis_name: AxisName) -> Any:
    """The trees of all replicas, along a leading axis, in one collective."""
    if set(jax.sharding.get_abstract_mesh().axis_names).issubset(axis_names(axis_name)):
        packed, unpack = ravel_pytree(tree)
        return jax.vmap(unpack)(gather(packed, axis_name))
    # A replica's leaves may be cut, and one vector of them would gather them. As a sum of rows they
    # travel as they lie.
    return _sum_of_rows(tree, axis_name)


def gather(array: jax.Array, axis_name: AxisName) -> jax.Array:
    """An array of all replicas, along a leading axis."""
    names = axis_names(axis_name)
    if len(names) == 1 or set(names) <= set(jax.sharding.get_abstract_mesh().axis_names):
        return all_gather(array, axis_name, tiled=False)
    # JAX gathers over one axis of jax.vmap at a time.
    return _sum_of_rows(array, axis_name)


def _sum_of_rows(tree: Any, axis_name: AxisName) -> Any:
    is_own = jnp.arange(jax.lax.axis_size(axis_name)) == jax.lax.axis_index(axis_name)

    def row(leaf: jax.Array) -> jax.Array:
        mine = jnp.expand_dims(is_own, range(1, leaf.ndim + 1))
        return jnp.where(mine, leaf[None], jnp.zeros_like(leaf)[None])

    return jax.lax.psum(jax.tree.map(row, tree), axis_name)


_RULES: dict[Commit, Rule] = {
    "mean": functools.partial(_summed, divide=True),
    "sum": functools.partial(_summed, divide=False),
    "sequential": _in_turn,
}


def rule_of(commit: Commit, axis_name: AxisName | None) -> Rule:
    """How contributions are combined, by name; a single replica has nothing to combine."""
    return _alone if axis_name is None else _RULES[commit]
