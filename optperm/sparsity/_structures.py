"""Structures of sparsity: single entries, n of m, blocks, and whole units.

A structure counts the units of a layer, averages scores of entries to get scores of units, and expands
masks of units to masks of entries. The `LeafAxes` of a leaf tell it the inputs, the outputs and the
copies; each copy is a layer of its own.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optperm._leaf_axes import LeafAxes
from optperm.core import checks
from optperm.core.shardings import shard_like, unshard


class Entries:
    """The structure in which each entry is a unit, for `structure=None`."""

    def wanted(self) -> str:
        """Return what a leaf must have, for messages."""
        return "any leaf"

    def fits(self, shape: tuple[int, ...], axes: LeafAxes) -> bool:
        """Return whether a leaf has units."""
        return True

    def count(self, shape: tuple[int, ...], axes: LeafAxes) -> int:
        """Return the number of units of a layer."""
        return math.prod(layer_shape(shape, axes))

    def copies(self, axes: LeafAxes) -> tuple[int, ...]:
        """Return the axes of an array of units that count copies."""
        return axes.batch_axis

    def pool(self, scores: jax.Array, axes: LeafAxes) -> jax.Array:
        """Return the score of each unit of a leaf, the mean of its entries."""
        return scores

    def spread(self, mask: jax.Array, like: Any, axes: LeafAxes) -> jax.Array:
        """Return the mask of the entries of a leaf from the mask of its units."""
        return mask


def layer_shape(shape: tuple[int, ...], axes: LeafAxes) -> tuple[int, ...]:
    """Return the shape of each layer of a leaf, which has no axes of copies."""
    return tuple(n for axis, n in enumerate(shape) if axis not in axes.batch_axis)


def count_copies(shape: tuple[int, ...], axes: LeafAxes) -> int:
    """Return the number of layers of a leaf."""
    return math.prod(shape[axis] for axis in axes.batch_axis)


class _Inputs(Entries):
    """The structure of scope "unit": each entry is a unit, and is one of the inputs of an output."""

    def wanted(self) -> str:
        """Return what a leaf must have, for messages."""
        return "a leaf with inputs"

    def fits(self, shape: tuple[int, ...], axes: LeafAxes) -> bool:
        """Return whether a leaf has inputs."""
        return bool(axes.in_axis) or not math.prod(shape)

    def __str__(self) -> str:
        return "scope 'unit'"


ENTRIES = Entries()
INPUTS = _Inputs()


@dataclasses.dataclass(frozen=True)
class NOfM(Entries):
    """Keep n of every m consecutive inputs of each output, as 2:4 hardware requires.

    Groups are along the last input axis of a leaf, as `axes` of the method or `optperm.leaf_axes` name
    it: the first axis of a kernel (in, out), the third of a kernel (h, w, in, out). Ties keep the
    earlier entry.

    Attributes:
      n: The number of entries kept in each group, from 1 to m.
      m: The length of a group, a divisor of the length of the axis.

    Example:
      >>> import jax.numpy as jnp, optperm
      >>> w = jnp.array([[0.1], [-0.4], [0.3], [0.2]])
      >>> pruned, _ = optperm.sparsity.prune(
      ...     w, optperm.mask_elements().init(w), None, structure=optperm.sparsity.NOfM(2, 4)
      ... )
      >>> [round(x, 1) for x in pruned.ravel().tolist()]
      [0.0, -0.4, 0.3, 0.0]

    Notes:
      The last input axis of a convolution's kernel (out, in, h, w), as in Equinox, is an axis of its
      window. Pass `axes` with `in_axis=(2, 3, 1)` to count along the input channels.

    Raises:
      TypeError: If `n` or `m` is not an integer.
      ValueError: If `n` or `m` is out of range.

    References:
      Mishra et al., `Accelerating Sparse Deep Neural Networks <https://arxiv.org/abs/2104.08378>`_, 2021
    """

    n: int
    m: int

    def __post_init__(self) -> None:
        checks.check_count("m", self.m)
        checks.check_count("n", self.n, maximum=self.m)

    def wanted(self) -> str:
        """Return what a leaf must have, for messages."""
        return f"a leaf whose last input axis is divisible by {self.m}"

    def fits(self, shape: tuple[int, ...], axes: LeafAxes) -> bool:
        """Return whether a leaf has inputs, and m divides the length of their last axis.

        Args:
          shape: The shape of a leaf.
          axes: What the leaf is.
        """
        return bool(axes.in_axis) and shape[axes.in_axis[-1]] % self.m == 0

    # This is compiled even outside jax.jit; otherwise comparisons take m times the memory of the scores.
    @functools.partial(jax.jit, static_argnums=(0, 2))
    def keep(self, codes: jax.Array, axes: LeafAxes) -> jax.Array:
        """Return whether each entry is among the n highest of its group; ties keep the earlier entry.

        Args:
          codes: Unsigned integers in the order of the scores.
          axes: What the leaf is.
        """
        axis = axes.in_axis[-1]
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
    """Keep or drop whole blocks of the matrix inputs x outputs by the mean score of their entries.

    A kernel with several input or output axes is a matrix after these axes are merged. Each copy is a
    matrix of its own. Blocks at the edge of a matrix may be smaller.

    Attributes:
      rows: The number of inputs of a block.
      columns: The number of outputs of a block.

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

    def wanted(self) -> str:
        """Return what a leaf must have, for messages."""
        return "a leaf with inputs and outputs"

    def fits(self, shape: tuple[int, ...], axes: LeafAxes) -> bool:
        """Return whether a leaf has inputs and outputs.

        Args:
          shape: The shape of a leaf.
          axes: What the leaf is.
        """
        return bool(axes.in_axis and axes.out_axis)

    def count(self, shape: tuple[int, ...], axes: LeafAxes) -> int:
        """Return the number of blocks of a layer.

        Args:
          shape: The shape of a leaf.
          axes: What the leaf is.
        """
        rows, columns = _matrix_shape(shape, axes)
        return math.ceil(rows / self.rows) * math.ceil(columns / self.columns)

    def copies(self, axes: LeafAxes) -> tuple[int, ...]:
        """Return the axes of an array of blocks that count copies, the first axes.

        Args:
          axes: What the leaf is.
        """
        return tuple(range(len(axes.batch_axis)))

    def pool(self, scores: jax.Array, axes: LeafAxes) -> jax.Array:
        """Return the mean score of the existing entries of each block, (..., rows, columns).

        Args:
          scores: The scores of the entries of a leaf.
          axes: What the leaf is.
        """
        matrices = unshard(scores).transpose(axes.batch_axis + axes.in_axis + axes.out_axis)
        batch = matrices.shape[: len(axes.batch_axis)]
        matrices = matrices.reshape(*batch, *_matrix_shape(scores.shape, axes))
        blocks = self._split(matrices)
        ones = self._split(jnp.ones(matrices.shape[-2:], scores.dtype))
        sums, sizes = jnp.sum(blocks, axis=(-3, -1)), jnp.sum(ones, axis=(-3, -1))
        return sums / jnp.broadcast_to(sizes, sums.shape)

    def spread(self, mask: jax.Array, like: Any, axes: LeafAxes) -> jax.Array:
        """Return the mask of the entries of a leaf, with blocks cropped at the edge.

        Args:
          mask: The mask of the blocks.
          like: The leaf.
          axes: What the leaf is.
        """
        shape, order = jnp.shape(like), axes.batch_axis + axes.in_axis + axes.out_axis
        rows, columns = _matrix_shape(shape, axes)
        mask = jnp.repeat(jnp.repeat(mask, self.rows, axis=-2), self.columns, axis=-1)
        mask = mask[..., :rows, :columns].reshape([shape[axis] for axis in order])
        return shard_like(mask.transpose(np.argsort(order)), like)

    def _split(self, matrices: jax.Array) -> jax.Array:
        """Return (..., rows of blocks, rows, columns of blocks, columns), padded with zeros."""
        *lead, height, width = matrices.shape
        rows, columns = -(-height // self.rows), -(-width // self.columns)
        beyond = (rows * self.rows - height, columns * self.columns - width)
        padded = jnp.pad(matrices, [(0, 0)] * len(lead) + [(0, size) for size in beyond])
        return padded.reshape(*lead, rows, self.rows, columns, self.columns)


def _matrix_shape(shape: tuple[int, ...], axes: LeafAxes) -> tuple[int, int]:
    """Return the numbers of inputs and of outputs of a layer."""
    rows, columns = (
        math.prod(shape[axis] for axis in own) for own in (axes.in_axis, axes.out_axis)
    )
    return rows, columns


@dataclasses.dataclass(frozen=True)
class Units(Entries):
    """Keep or drop all inputs of an output unit by the mean score of the unit's entries.

    Units are the indices of all output axes of a leaf, in each copy: the columns of a kernel (in, out),
    the channels of a convolution, each entry of each head of a query. Each entry of a scale or bias is a
    unit, so scales select channels (network slimming).

    Example:
      >>> import jax.numpy as jnp, optperm
      >>> w = jnp.array([[1.0, 5.0], [2.0, 0.1]])
      >>> pruned, _ = optperm.sparsity.prune(
      ...     w, optperm.mask_elements().init(w), 0.5, structure=optperm.sparsity.Units()
      ... )
      >>> pruned.round(1).tolist()
      [[0.0, 5.0], [0.0, 0.10000000149011612]]

    Notes:
      The leaves of a layer are ranked separately: pruning a unit of a kernel does not prune the unit's
      bias. Each layer of a stack has its own units, but `optperm.sparsity.remove_units` can only remove
      units of all its layers. To prune the same units in all layers, pass equal `scores` for all layers,
      such as means over the layers.
    """

    def wanted(self) -> str:
        """Return what a leaf must have, for messages."""
        return "a leaf with outputs"

    def fits(self, shape: tuple[int, ...], axes: LeafAxes) -> bool:
        """Return whether a leaf has outputs.

        Args:
          shape: The shape of a leaf.
          axes: What the leaf is.
        """
        return bool(axes.out_axis)

    def count(self, shape: tuple[int, ...], axes: LeafAxes) -> int:
        """Return the number of units of a layer.

        Args:
          shape: The shape of a leaf.
          axes: What the leaf is.
        """
        return _matrix_shape(shape, axes)[1]

    def pool(self, scores: jax.Array, axes: LeafAxes) -> jax.Array:
        """Return the mean score of each unit, in an array whose input axes have the length 1.

        Args:
          scores: The scores of the entries of a leaf.
          axes: What the leaf is.
        """
        return jnp.mean(scores, axis=axes.in_axis, keepdims=True)

    def spread(self, mask: jax.Array, like: Any, axes: LeafAxes) -> jax.Array:
        """Return the mask of the entries of a leaf from the mask of its units.

        Args:
          mask: The mask of the units.
          like: The leaf.
          axes: What the leaf is.
        """
        return shard_like(jnp.broadcast_to(unshard(mask), jnp.shape(like)), like)


Structure = NOfM | Blocks | Units


def as_structure(structure: Structure | None) -> Entries:
    """Return the structure, or `Entries` for None; raise unless it is a structure."""
    if not isinstance(structure, Structure | None):
        raise TypeError(
            "structure must be None, an NOfM, a Blocks or a Units, such as optperm.sparsity.NOfM(2, 4), "
            f"got {structure!r}."
        )
    return ENTRIES if structure is None else structure


def check_fits(structure: Entries, tree: Any, axes: Any) -> None:
    """Raise unless the structure fits each leaf that has entries."""
    pairs = zip(jax.tree_util.tree_leaves_with_path(tree), jax.tree.leaves(axes), strict=True)
    for (path, leaf), own in pairs:
        shape = jnp.shape(leaf)
        if not structure.fits(shape, own):
            roles = f"in_axis={own.in_axis}, out_axis={own.out_axis}, batch_axis={own.batch_axis}"
            what = f"{own.kind}: {roles}" if own.kind != "other" else "other"
            name = f"{jax.tree_util.keystr(path) or 'the array'} of shape {shape} ({what})"
            raise ValueError(
                f"{structure} needs {structure.wanted()}, but got {name}. Exclude the leaf with "
                "include=, or say what it is with axes=."
            )
