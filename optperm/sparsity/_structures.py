"""Structured sparsity: n of m, blocks, and whole units.

A structure turns the scores of a leaf into scores of its units, and a mask of units into a mask of
entries.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from optperm.core import checks
from optperm.core.shardings import shard_like, unshard


@dataclasses.dataclass(frozen=True)
class NOfM:
    """Keep n of each m consecutive entries along an axis, as 2:4 hardware requires.

    Of equal scores the first is kept. The default axis is the input axis of kernels of shapes
    (in, out) and (h, w, in, out), over which such hardware sums.

    Attributes:
      n: The number of entries kept in each group, from 1 to m.
      m: The length of a group, which must divide the axis.
      axis: The axis.

    Example:
      >>> import jax.numpy as jnp, optperm
      >>> w = jnp.array([[0.1], [-0.4], [0.3], [0.2]])
      >>> pruned, _ = optperm.sparsity.prune(
      ...     w, optperm.mask_elements().init(w), None, structure=optperm.sparsity.NOfM(2, 4)
      ... )
      >>> [round(x, 1) for x in pruned.ravel().tolist()]
      [0.0, -0.4, 0.3, 0.0]

    Raises:
      TypeError: If `n`, `m` or `axis` is not an integer.
      ValueError: If `n` or `m` is out of range.

    References:
      Mishra et al., `Accelerating Sparse Deep Neural Networks <https://arxiv.org/abs/2104.08378>`_, 2021
    """

    n: int
    m: int
    axis: int = -2

    def __post_init__(self) -> None:
        checks.check_count("m", self.m)
        checks.check_count("n", self.n, maximum=self.m)
        checks.check_count("axis", self.axis, minimum=-(2**31))


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Keep or drop whole blocks over the last two axes, by the mean score of their entries.

    A block at the edge of a leaf is smaller.

    Attributes:
      rows: The length of a block along the second-to-last axis.
      columns: The length of a block along the last axis.

    Example:
      >>> import jax.numpy as jnp, optperm
      >>> w = jnp.arange(1.0, 9.0).reshape(2, 4)
      >>> pruned, _ = optperm.sparsity.prune(
      ...     w, optperm.mask_elements().init(w), 0.5, structure=optperm.sparsity.Blocks(2, 2)
      ... )
      >>> pruned.tolist()
      [[0.0, 0.0, 3.0, 4.0], [0.0, 0.0, 7.0, 8.0]]

    Raises:
      TypeError: If an argument is not an integer.
      ValueError: If an argument is below 1.
    """

    rows: int
    columns: int

    def __post_init__(self) -> None:
        checks.check_count("rows", self.rows)
        checks.check_count("columns", self.columns)


@dataclasses.dataclass(frozen=True)
class Units:
    """Keep or drop whole slices, by the mean score of their entries.

    Attributes:
      axis: The axis that numbers the slices: -1 for the output units of a kernel.

    Example:
      >>> import jax.numpy as jnp, optperm
      >>> w = jnp.array([[1.0, 5.0], [2.0, 0.1]])
      >>> pruned, _ = optperm.sparsity.prune(
      ...     w, optperm.mask_elements().init(w), 0.5, structure=optperm.sparsity.Units()
      ... )
      >>> pruned.round(1).tolist()
      [[0.0, 5.0], [0.0, 0.10000000149011612]]

    Raises:
      TypeError: If `axis` is not an integer.
    """

    axis: int = -1

    def __post_init__(self) -> None:
        checks.check_count("axis", self.axis, minimum=-(2**31))


Structure = NOfM | Blocks | Units


def check_fits(structure: Structure | None, tree: Any, flags: Any) -> None:
    """Raise unless the structure is one, and fits each included leaf."""
    if not isinstance(structure, Structure | None):
        raise TypeError(
            f"structure must be optperm.sparsity.NOfM, Blocks or Units, got {structure!r}."
        )
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    included = [leaf for leaf, flag in zip(leaves, jax.tree.leaves(flags), strict=True) if flag]
    for path, leaf in included if structure else ():
        shape, axis = jnp.shape(leaf), getattr(structure, "axis", -2)
        has_axis = -len(shape) <= axis < len(shape)
        m = structure.m if isinstance(structure, NOfM) else 1
        if not has_axis or shape[axis] % m:
            name = f"{jax.tree_util.keystr(path) or 'the array'} of shape {shape}"
            raise ValueError(f"{structure} does not fit {name}: leave the leaf out by include=.")


def pool(structure: Structure | None, scores: jax.Array) -> jax.Array:
    """Return the mean score of each unit of a leaf."""
    if structure is None or isinstance(structure, NOfM):
        return scores
    if isinstance(structure, Units):
        axes = tuple(a for a in range(scores.ndim) if a != structure.axis % scores.ndim)
        return jnp.mean(scores, axis=axes)
    # A block at the edge is padded with zeros: its mean is over the entries that exist.
    blocks = _split_into_blocks(structure, unshard(scores))
    ones = _split_into_blocks(structure, jnp.ones(scores.shape[-2:], scores.dtype))
    sums, sizes = jnp.sum(blocks, axis=(-3, -1)), jnp.sum(ones, axis=(-3, -1))
    return sums / jnp.broadcast_to(sizes, sums.shape)


def spread(structure: Structure | None, mask: jax.Array, like: Any) -> jax.Array:
    """Return the mask of the entries of a leaf from the mask of its units."""
    if structure is None or isinstance(structure, NOfM):
        return mask
    shape = jnp.shape(like)
    if isinstance(structure, Units):
        axis = structure.axis % len(shape)
        mask = jax.lax.broadcast_in_dim(unshard(mask), shape, (axis,))
    else:
        # Blocks at the edge are cropped.
        mask = jnp.repeat(jnp.repeat(mask, structure.rows, axis=-2), structure.columns, axis=-1)
        mask = mask[..., : shape[-2], : shape[-1]]
    return shard_like(mask, like)


def num_units(structure: Structure | None, shape: tuple[int, ...]) -> int:
    """Return the number of units of a leaf."""
    if isinstance(structure, Units):
        return shape[structure.axis]
    if isinstance(structure, Blocks):
        rows, columns = (
            math.ceil(shape[-2] / structure.rows),
            math.ceil(shape[-1] / structure.columns),
        )
        return math.prod(shape[:-2]) * rows * columns
    return math.prod(shape)


# Compiled outside jax.jit too, where the comparisons would take m times the memory of the scores.
@functools.partial(jax.jit, static_argnums=0)
def keep_n_of_m(structure: NOfM, codes: jax.Array) -> jax.Array:
    """Return whether each entry is among the n highest of its group of m, of equal ones the first."""
    axis = structure.axis % codes.ndim
    apart = jnp.moveaxis(unshard(codes), axis, -1)
    apart = apart.reshape(*apart.shape[:-1], codes.shape[axis] // structure.m, structure.m)
    # The rank of an entry is the number of higher ones, and of equal ones before it; counting them is
    # 20 times as fast as sorting many short groups.
    mine, other = apart[..., :, None], apart[..., None, :]
    before = jnp.tri(structure.m, k=-1, dtype=bool)
    is_before = jnp.broadcast_to(before, (*apart.shape, structure.m))
    kept = jnp.sum((other > mine) | ((other == mine) & is_before), axis=-1) < structure.n
    kept = jnp.moveaxis(kept.reshape(*kept.shape[:-2], codes.shape[axis]), -1, axis)
    return shard_like(kept, codes)


def _split_into_blocks(structure: Blocks, leaf: jax.Array) -> jax.Array:
    """Return a leaf as (..., rows of blocks, rows, columns of blocks, columns), padded with zeros."""
    *lead, height, width = leaf.shape
    rows, columns = -(-height // structure.rows), -(-width // structure.columns)
    beyond = (rows * structure.rows - height, columns * structure.columns - width)
    padded = jnp.pad(leaf, [(0, 0)] * len(lead) + [(0, size) for size in beyond])
    return padded.reshape(*lead, rows, structure.rows, columns, structure.columns)
