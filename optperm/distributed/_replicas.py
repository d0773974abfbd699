"""Replicas: their mapped axes and weights, and collectives over their arrays."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from optperm.core import checks
from optperm.core.dtypes import accumulation_dtype, all_finite
from optperm.core.mapped_axes import (
    AxisName,
    all_gather,
    axis_names,
    mark_varying,
    psum,
    varying_axes,
)
from optperm.core.shapes import Params, Updates


@dataclasses.dataclass(frozen=True)
class Replicas:
    """The mapped axes over which replicas are spread, and the axes over which each is sharded."""

    axis_name: AxisName | None
    shard_axes: AxisName

    def check_are_local(self, grads: Updates | None, params: Params, method: str) -> None:
        """Raise if the gradients' types show that `jax.shard_map` has summed them over replicas."""
        if self.axis_name is None:
            return
        tracked = varying_axes(jax.lax.axis_index(self.axis_name)) & set(axis_names(self.axis_name))
        grads = params if grads is None else grads
        pairs = zip(jax.tree.leaves(grads), jax.tree.leaves(params), strict=True)
        if tracked - varying_axes(grads) or any(tracked - varying_axes(*pair) for pair in pairs):
            cast = f"jax.lax.pcast(params, {self.axis_name!r}, to='varying')"
            raise ValueError(
                f"The updates given to {method} do not vary over the axis {self.axis_name!r}: "
                f"jax.shard_map sums gradients over it unless params vary over it. Use {cast}."
            )

    def check_axes(self, replica_axes: AxisName | None, method: str) -> None:
        """Raise if replicas lie along an axis over which the method does not commit."""
        left = [n for n in axis_names(replica_axes) if n not in axis_names(self.axis_name)]
        if left:
            names = axis_names(replica_axes)
            name = repr(names[0] if len(names) == 1 else names)
            raise ValueError(
                f"The replicas vary over the axis {left[0]!r}, over which {method} would never commit: "
                f"pass axis_name={name} to the method as well as to fit."
            )

    def agree(self, flag: jax.Array, tree: Updates) -> jax.Array:
        """Return whether a flag is True on all shards of one replica's tree."""
        checks.check_axis_is_bound(self.shard_axes, name="shard_axes")
        within = varying_axes(tree).union(axis_names(self.shard_axes))
        axes = tuple(sorted(within.difference(axis_names(self.axis_name))))
        if not axes:
            return flag
        # If varying axes are tracked, only an array that varies can be reduced.
        counted = mark_varying(flag.astype(jnp.int32), varying_axes(jax.lax.axis_index(axes)))
        return jax.lax.pmin(counted, axes) > 0

    def are_finite(self, tree: Updates) -> jax.Array:
        """Return whether all entries of one replica's tree are finite, on all of its shards."""
        return self.agree(all_finite(tree), tree)

    def sum(self, tree: Any) -> Any:
        """Return the sum of a tree over the replicas, in one collective for each dtype."""
        # This does not move the shards of a replica.
        return tree if self.axis_name is None else psum(tree, self.axis_name)

    def gather(self, tree: Any) -> Any:
        """Return the trees of all replicas along a leading axis, in one collective."""
        if self.axis_name is None:
            return jax.tree.map(lambda leaf: leaf[None], tree)
        if set(jax.sharding.get_abstract_mesh().axis_names).issubset(axis_names(self.axis_name)):
            packed, unpack = ravel_pytree(tree)
            return jax.vmap(unpack)(gather(packed, self.axis_name))
        # A replica may be sharded. Packing it into one vector would gather the shards, but a sum of
        # rows keeps them apart.
        return _sum_rows(tree, self.axis_name)

    def make_center(self, params: Params) -> Params:
        """Return one center for all replicas: their params if all agree, otherwise the mean.

        The mean excludes replicas whose params are not finite. If the axis is not mapped, as in `init`
        outside the mapping, the params of one replica are the center of all replicas.
        """
        name = self.axis_name
        if name is None or not checks.is_bound(name):
            return jax.tree.map(lambda leaf: jnp.array(leaf, copy=True), params)
        local = mark_varying(params, varying_axes(jax.lax.axis_index(name)))
        # Sum the bits of the first replica's params, since a sum of floats would lose the sign of -0.0.
        bits = jax.tree.map(_as_bits, local)
        is_first = jax.lax.axis_index(name) == 0
        of_first = psum(jax.tree.map(lambda b: jnp.where(is_first, b, 0), bits), name)
        others = jax.tree.map(lambda b, f: jnp.any(b != f).astype(jnp.int32), bits, of_first)
        # Each part is divided before the sum, so the sum cannot overflow.
        is_finite = self.are_finite(local).astype(accumulation_dtype(local))
        w = is_finite / jax.lax.axis_size(name)
        wide = jax.tree.map(lambda p: p.astype(accumulation_dtype(p)), local)
        total, weight, differ = psum((scale(wide, w), w, others), name)

        def choose(p: jax.Array, first: jax.Array, mean: jax.Array, differs: jax.Array) -> Any:
            first = jax.lax.bitcast_convert_type(first.astype(_bits_dtype(p)), p.dtype)
            one = jnp.where((differs > 0) & (weight > 0), mean.astype(p.dtype), first)
            # With pairs, the center varies between replicas after the first commit.
            return mark_varying(one, varying_axes(p))

        return jax.tree.map(choose, params, of_first, divide(total, weight), differ)


def _bits_dtype(array: jax.Array) -> Any:
    return jnp.dtype(f"uint{8 * array.dtype.itemsize}")


def _as_bits(array: jax.Array) -> jax.Array:
    bits = jax.lax.bitcast_convert_type(array, _bits_dtype(array))
    return bits if array.dtype.itemsize >= 4 else bits.astype(jnp.uint32)


def weigh(weight: Any, is_finite: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """Return a replica's weight, zero if it is left out, and whether its contribution is valid.

    A weight of zero is valid. With a weight that is negative or not finite, the replica is left out.
    """
    if weight is None:
        return is_finite.astype(dtype), is_finite
    w = jnp.asarray(weight, dtype)
    is_valid = is_finite & (w >= 0) & jnp.isfinite(w)
    return jnp.where(is_valid, w, 0), is_valid


def check_weight(weight: Any) -> None:
    """Raise unless a weight is one number; concrete weights must be finite and nonnegative."""
    checks.check_in_range("weight", weight, 0.0, float("inf"), may_be_schedule=False)
    if jnp.ndim(weight):
        raise ValueError(
            "weight must be a single number on each replica: map it over the axis of the replicas."
        )


def scale(tree: Any, weight: jax.Array) -> Any:
    """Return w n, or zeros if the weight is zero, even if n is not finite."""
    return jax.tree.map(
        lambda x: jnp.where(weight > 0, weight.astype(x.dtype) * x, jnp.zeros_like(x)), tree
    )


def divide(total: Any, weights: jax.Array) -> Any:
    """Return sum w n / sum w; zero if all weights are zero, NaN if the sum of weights overflows."""
    over = jnp.where(jnp.isfinite(weights), jnp.where(weights > 0, weights, 1), jnp.nan)
    return jax.tree.map(lambda x: x / over.astype(x.dtype), total)


def gather(array: jax.Array, axis_name: AxisName) -> jax.Array:
    """Return the vectors of all replicas along a leading axis."""
    names = axis_names(axis_name)
    if len(names) > 1 and not set(names) <= set(jax.sharding.get_abstract_mesh().axis_names):
        # JAX can gather over only one axis of jax.vmap at a time.
        return _sum_rows(array, axis_name)
    # On TPUs, XLA compiles an all-gather to an all-reduce of all rows, except for whole 1,024 bytes.
    padding = -array.size % (1024 // array.dtype.itemsize)
    return all_gather(jnp.pad(array, (0, padding)), axis_name)[:, : array.size]


def _sum_rows(tree: Any, axis_name: AxisName) -> Any:
    """Return the trees of all replicas along a leading axis, as a sum of padded rows."""
    is_own = jnp.arange(jax.lax.axis_size(axis_name)) == jax.lax.axis_index(axis_name)

    def make_row(leaf: jax.Array) -> jax.Array:
        mine = jnp.expand_dims(is_own, range(1, leaf.ndim + 1))
        return jnp.where(mine, leaf[None], jnp.zeros_like(leaf)[None])

    return psum(jax.tree.map(make_row, tree), axis_name)
