"""Weight vectors, which a permutation method permutes each by itself.

A weight vector of a kernel or an embedding consists of all weights that enter one output unit, and there
are weight vectors for each index of the axes of copies and outputs. A scale or a bias is one weight
vector for each copy. In this file, a weight vector is a column of an array (batch, n, *rows): the n
entries are the axes of a leaf along a weight vector, flattened, and the other axes count weight vectors.
"""

import functools
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from optperm._leaf_axes import LeafAxes, resolve_axes
from optperm.core.mapped_axes import mark_varying, varying_axes
from optperm.core.shapes import Params, Updates
from optperm.core.shardings import explicit_sharding, shard_like
from optperm.core.trees import leaf_paths


class Vectors(NamedTuple):
    """The axes of the weight vectors of a leaf, in increasing order.

    Attributes:
      inputs: The axes of the entries of a weight vector.
      outputs: The axes that count weight vectors.
    """

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    @property
    def batch(self) -> tuple[int, ...]:
        """The axis of the leaf that is the batch, or () for a batch of length 1.

        Stacked layers are a batch, since their axis comes first and does not have to be moved. Weight
        vectors of a single axis are rows, since the kernels split only rows between devices.
        """
        return self.outputs[:1] if len(self.outputs) > 1 and self.outputs[0] == 0 else ()

    @property
    def order(self) -> tuple[int, ...]:
        """The axes of the leaf in the order (batch, n, *rows)."""
        return self.batch + self.inputs + self.outputs[len(self.batch) :]

    def shape(self, leaf: jax.Array) -> tuple[int, ...]:
        """Return (batch, n, *rows) for a leaf."""
        batch, n = (
            math.prod(leaf.shape[axis] for axis in own) for own in (self.batch, self.inputs)
        )
        return batch, n, *(leaf.shape[axis] for axis in self.outputs[len(self.batch) :])


def find_vectors(params: Params, axes: Any) -> list[Vectors | None]:
    """Return the weight vectors of each leaf, or None for leaves that stay.

    Scalars, empty leaves and leaves of kind "other" stay.

    Args:
      params: Params, with boxes if there are boxes.
      axes: What each leaf is, as for `optperm._leaf_axes.resolve_axes`.

    Raises:
      TypeError: If an entry of the axes is of another type.
      ValueError: If the axes do not fit the params, or say of all leaves that they stay.
    """
    known: list[LeafAxes] = jax.tree.leaves(resolve_axes(axes, params))
    leaves = jax.tree.leaves(params)
    found = [_find_vectors(leaf, own) for leaf, own in zip(leaves, known, strict=True)]
    is_empty = all(own is None for own in found)
    if axes is not None and is_empty and any(jnp.ndim(x) and jnp.size(x) for x in leaves):
        raise ValueError(
            "axes names no kernels, embeddings, scales or biases, so each leaf would stay. "
            "optperm.leaf_axes(params, show=True) shows what each leaf is taken for."
        )
    return found


def _find_vectors(leaf: jax.Array, axes: LeafAxes) -> Vectors | None:
    if axes.kind == "other" or not jnp.ndim(leaf) or not jnp.size(leaf):
        return None
    # A bias is one weight vector, even over heads.
    outputs = axes.out_axis if axes.kind in ("kernel", "embedding") else ()
    counted = {*axes.batch_axis, *outputs}
    inputs = tuple(axis for axis in range(jnp.ndim(leaf)) if axis not in counted)
    return Vectors(inputs, tuple(sorted(counted)))


def to_columns(leaf: jax.Array, axes: Vectors) -> jax.Array:
    """Return a leaf as (batch, n, *rows), with no column split over an explicit mesh."""
    sharding = explicit_sharding(leaf)
    if sharding is not None and any(sharding.spec[axis] for axis in axes.inputs):
        spec = [None if axis in axes.inputs else names for axis, names in enumerate(sharding.spec)]
        leaf = jax.sharding.reshard(leaf, sharding.update(spec=P(*spec)))
    return jnp.transpose(leaf, axes.order).reshape(axes.shape(leaf))


def from_columns(columns: jax.Array, like: jax.Array, axes: Vectors) -> jax.Array:
    """Undo `to_columns` for a leaf with the shape and the sharding of `like`."""
    moved = columns.reshape([like.shape[axis] for axis in axes.order])
    return shard_like(jnp.transpose(moved, np.argsort(axes.order).tolist()), like)


def zero_where_fixed(updates: Updates, vectors: Sequence[Vectors | None]) -> Updates:
    """Return updates with zeros for leaves without weight vectors, which stay."""
    structure: Any = jax.tree.structure(updates)
    pairs = zip(jax.tree.leaves(updates), vectors, strict=True)
    return structure.unflatten([jnp.zeros_like(x) if own is None else x for x, own in pairs])


def order_keys(values: jax.Array) -> jax.Array:
    """Return integers in the order of floats: 0.0 and -0.0 are tied, and NaNs are tied and last.

    The integers are made from bits, because some devices and threads compare subnormals as zeros.
    """
    integers = jnp.dtype(f"int{8 * values.dtype.itemsize}")
    limits = jnp.iinfo(integers)
    bits = jax.lax.bitcast_convert_type(values, integers)
    keys = jnp.where(bits < 0, limits.min - bits, bits)
    return jnp.where(jnp.isnan(values), jnp.asarray(limits.max, integers), keys)


def sort_order(columns: jax.Array) -> jax.Array:
    """Return each column's positions, int32, in ascending order of its entries; ties are by position."""
    return order_of_keys(order_keys(columns))


def order_of_keys(keys: jax.Array) -> jax.Array:
    """Return the `sort_order` of columns with these `order_keys`."""
    order = jnp.argsort(keys, axis=1, stable=True).astype(jnp.int32)
    return mark_varying(order, varying_axes(keys))  # a sort loses the axes of its other operands


def inverse(permutations: jax.Array) -> jax.Array:
    """Return the inverse permutation of each column: ranks from an order, or an order from ranks."""
    # The columns are a batch, so unlike jnp.put_along_axis, this moves nothing between devices.
    batch = (0, *range(2, permutations.ndim))
    dimensions = jax.lax.ScatterDimensionNumbers(
        update_window_dims=(),
        inserted_window_dims=(1,),
        scatter_dims_to_operand_dims=(1,),
        operand_batching_dims=batch,
        scatter_indices_batching_dims=batch,
    )
    places = jax.lax.broadcasted_iota(jnp.int32, permutations.shape, 1)
    return jax.lax.scatter(
        jnp.zeros_like(permutations), permutations[..., None], places, dimensions
    )


@jax.jit
def sort_ranks(columns: jax.Array) -> jax.Array:
    """Return the rank of each entry in its column, int32: 0 for the minimum; ties are by position."""
    return inverse(sort_order(columns))


def init_ranks(params: Params, vectors: Sequence[Vectors | None]) -> Any:
    """Return the rank of each weight in its weight vector, int32, shaped like params."""
    zeros = jax.tree.map(lambda leaf: jnp.zeros_like(leaf, dtype=jnp.int32), params)
    _, ranks = permute_vectors(
        lambda _, weights, __: (weights, sort_ranks(weights)), vectors, params, zeros
    )
    return ranks


@functools.partial(jax.jit, static_argnames="inputs")
def _has_constant_vector(leaf: jax.Array, inputs: tuple[int, ...]) -> jax.Array:
    keys = order_keys(leaf)
    return jnp.any(jnp.min(keys, axis=inputs) == jnp.max(keys, axis=inputs))


def warn_of_constant_vectors(params: Params, vectors: Sequence[Vectors | None]) -> None:
    """Warn if all params are scalars, or if no permutation can change some weight vectors."""
    leaves = [leaf for leaf in jax.tree.leaves(params) if jnp.size(leaf)]
    if leaves and not any(jnp.ndim(leaf) or isinstance(leaf, jax.core.Tracer) for leaf in leaves):
        says = "All params are scalars, which permuting does not change: use another optimizer."
        warnings.warn(says, UserWarning, stacklevel=3)
    if constant := _find_constant_vectors(params, vectors):
        warnings.warn(
            f"In {', '.join(constant)}, all weights that enter an output unit are equal, or only one "
            "enters: no permutation can change them. Use another optimizer for these params "
            "(optax.partition), or initialize the weights at random if there are several.",
            UserWarning,
            stacklevel=3,
        )


def _find_constant_vectors(params: Params, vectors: Sequence[Vectors | None]) -> list[str]:
    """Return the names of untraced params with a constant weight vector."""
    constant = []
    with jax.ensure_compile_time_eval():  # constants have values while a function is traced
        for (path, leaf), axes in zip(leaf_paths(params), vectors, strict=True):
            if isinstance(leaf, jax.core.Tracer) or axes is None:
                continue
            if _has_constant_vector(jnp.asarray(leaf), axes.inputs):
                constant.append(path or "params")
    return constant


def permute_vectors(
    function: Callable[..., tuple[jax.Array, jax.Array]],
    vectors: Sequence[Vectors | None],
    weights: Params,
    ranks: Any,
    *others: Any,
) -> tuple[Params, Any]:
    """Reorder all weight vectors, leaf by leaf.

    Args:
      function: `function(index, weights, ranks, *others)` returns the new weights and ranks of leaf
        number `index`. All arrays are (batch, n, *rows), with a weight vector per column. On a mesh with
        explicit axes, the batch and the rows are sharded like the same axes of the weights.
      vectors: The weight vectors of each leaf, from `find_vectors`.
      weights: The weights.
      ranks: The rank of each weight in its weight vector, shaped like the weights.
      *others: More trees with the same shapes.

    Returns:
      The new weights and ranks, sharded like the weights. Leaves without weight vectors do not change.
    """

    def of_leaf(
        index: int, axes: Vectors | None, weights: jax.Array, ranks: jax.Array, *others: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        if axes is None:
            return weights, ranks
        arrays = [weights, *(shard_like(jnp.asarray(each), weights) for each in (ranks, *others))]
        new = function(index, *(to_columns(each, axes) for each in arrays))
        new_weights, new_ranks = (from_columns(each, weights, axes) for each in new)
        return new_weights, new_ranks

    leaves, structure = jax.tree.flatten(jax.tree.map(jnp.asarray, weights))
    rest = zip(*(jax.tree.leaves(tree) for tree in (ranks, *others)), strict=True)
    pairs = [
        of_leaf(index, axes, leaf, *arrays)
        for index, (axes, leaf, arrays) in enumerate(zip(vectors, leaves, rest, strict=True))
    ]
    new_weights, new_ranks = zip(*pairs, strict=True) if pairs else ((), ())
    return jax.tree.unflatten(structure, new_weights), jax.tree.unflatten(structure, new_ranks)
