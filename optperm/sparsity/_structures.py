"""Structures of sparsity: single entries, n of m, blocks, and whole units.

A structure counts the units of a leaf, averages scores of entries to get scores of units, and expands
masks of units to masks of entries.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from optperm.core import checks
from optperm.core.shardings import shard_like, unshard


class Entries:
    """The structure in which each entry is a unit, for `structure=None`."""

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Return whether a leaf of this shape has units."""
        return True

    def count(self, shape: tuple[int, ...]) -> int:
        """Return the number of units of a leaf."""
        return math.prod(shape)

    def pool(self, scores: jax.Array) -> jax.Array:
        """Return the score of each unit of a leaf, the mean of its entries."""
        return scores

    def spread(self, mask: jax.Array, like: Any) -> jax.Array:
        """Return the mask of the entries of a leaf from the mask of its units."""
        return mask


ENTRIES = Entries()


@dataclasses.dataclass(frozen=True)
class NOfM(Entries):
    """Keep n of every m consecutive entries along an axis, as 2:4 hardware requires.

    Ties keep the earlier entry. The default axis is the input axis of kernels of shapes (in, out) and
    (h, w, in, out): the axis over which 2:4 hardware sums.

    Attributes:
      n: The number of entries kept in each group, from 1 to m.
      m: The length of a group, a divisor of the length of the axis.
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

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Return whether a leaf has the axis, and m divides its length.

        Args:
          shape: The shape of a leaf.
        """
        return -len(shape) <= self.axis < len(shape) and shape[self.axis] % self.m == 0

    # This is compiled even outside jax.jit; otherwise comparisons take m times the memory of the scores.
    @functools.partial(jax.jit, static_argnums=0)
    def keep(self, codes: jax.Array) -> jax.Array:
        """Return whether each entry is among the n highest of its group; ties keep the earlier entry.

        Args:
          codes: Unsigned integers in the order of the scores.
        """
        axis = self.axis % codes.ndim
        apart = jnp.moveaxis(unshard(codes), axis, -1)
        apart = apart.reshape(*apart.shape[:-1], codes.shape[axis] // self.m, self.m)
        # The rank of an entry is the number of higher entries and of earlier equal entries. Counting is
        # 20 times as fast as sorting many short groups.
        mine, other = apart[..., :, None], apart[..., None, :]
        before = jnp.tri(self.m, k=-1, dtype=bool)
        is_before = jnp.broadcast_to(before, (*apart.shape, self.m))
        kept = jnp.sum((other > mine) | ((other == mine) & is_before), axis=-1) < self.n
        kept = jnp.moveaxis(kept.reshape(*kept.shape[:-2], codes.shape[axis]), -1, axis)
        return shard_like(kept, codes)


@dataclasses.dataclass(frozen=True)
class Blocks(Entries):
    """Keep or drop whole blocks of the last two axes by the mean score of their entries.

    Blocks at the edge of a leaf may be smaller.

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

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Return whether a leaf of this shape has at least two axes.

        Args:
          shape: The shape of a leaf.
        """
        return len(shape) >= 2

    def count(self, shape: tuple[int, ...]) -> int:
        """Return the number of blocks of a leaf.

        Args:
          shape: The shape of a leaf.
        """
        *lead, height, width = shape
        return math.prod(lead) * math.ceil(height / self.rows) * math.ceil(width / self.columns)

    def pool(self, scores: jax.Array) -> jax.Array:
        """Return the mean score of the existing entries of each block.

        Args:
          scores: The scores of the entries of a leaf.
        """
        blocks = self._split(unshard(scores))
        ones = self._split(jnp.ones(scores.shape[-2:], scores.dtype))
        sums, sizes = jnp.sum(blocks, axis=(-3, -1)), jnp.sum(ones, axis=(-3, -1))
        return sums / jnp.broadcast_to(sizes, sums.shape)

    def spread(self, mask: jax.Array, like: Any) -> jax.Array:
        """Return the mask of the entries of a leaf, with blocks cropped at the edge.

        Args:
          mask: The mask of the units.
          like: The leaf.
        """
        height, width = jnp.shape(like)[-2:]
        mask = jnp.repeat(jnp.repeat(mask, self.rows, axis=-2), self.columns, axis=-1)
        return shard_like(mask[..., :height, :width], like)

    def _split(self, leaf: jax.Array) -> jax.Array:
        """Return (..., rows of blocks, rows, columns of blocks, columns), padded with zeros."""
        *lead, height, width = leaf.shape
        rows, columns = -(-height // self.rows), -(-width // self.columns)
        beyond = (rows * self.rows - height, columns * self.columns - width)
        padded = jnp.pad(leaf, [(0, 0)] * len(lead) + [(0, size) for size in beyond])
        return padded.reshape(*lead, rows, self.rows, columns, self.columns)


@dataclasses.dataclass(frozen=True)
class Units(Entries):
    """Keep or drop whole slices by the mean score of their entries.

    Attributes:
      axis: The axis along which slices are indexed, such as -1 for the output units of a kernel.

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

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Return whether a leaf of this shape has the axis.

        Args:
          shape: The shape of a leaf.
        """
        return -len(shape) <= self.axis < len(shape)

    def count(self, shape: tuple[int, ...]) -> int:
        """Return the number of slices of a leaf.

        Args:
          shape: The shape of a leaf.
        """
        return shape[self.axis]

    def pool(self, scores: jax.Array) -> jax.Array:
        """Return the mean score of each slice.

        Args:
          scores: The scores of the entries of a leaf.
        """
        axes = tuple(a for a in range(scores.ndim) if a != self.axis % scores.ndim)
        return jnp.mean(scores, axis=axes)

    def spread(self, mask: jax.Array, like: Any) -> jax.Array:
        """Return the mask of the entries of a leaf from the mask of its slices.

        Args:
          mask: The mask of the units.
          like: The leaf.
        """
        shape = jnp.shape(like)
        mask = jax.lax.broadcast_in_dim(unshard(mask), shape, (self.axis % len(shape),))
        return shard_like(mask, like)


Structure = NOfM | Blocks | Units


def as_structure(structure: Structure | None) -> Entries:
    """Return the structure, or `Entries` for None; raise unless it is a structure."""
    if not isinstance(structure, Structure | None):
        raise TypeError(
            "structure must be None, an NOfM, a Blocks or a Units, such as optperm.sparsity.NOfM(2, 4), "
            f"got {structure!r}."
        )
    return ENTRIES if structure is None else structure


def check_fits(structure: Entries, tree: Any) -> None:
    """Raise unless the structure fits each leaf."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        shape = jnp.shape(leaf)
        if not structure.fits(shape):
            name = f"{jax.tree_util.keystr(path) or 'the array'} of shape {shape}"
            raise ValueError(f"{structure} does not fit {name}: exclude the leaf with include=.")
