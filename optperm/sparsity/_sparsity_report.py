"""A report on the zeros of params, leaf by leaf."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from optperm.core import checks
from optperm.core.tables import align
from optperm.core.trees import without_boxes
from optperm.sparsity._choice import find_axes
from optperm.sparsity._structures import count_copies


class LeafSparsity(NamedTuple):
    """The entry of one leaf in `optperm.sparsity.sparsity_report`.

    Attributes:
      name: The path of the leaf.
      shape: The shape of the leaf.
      kind: The kind of the leaf, as in `optperm.LeafAxes`.
      copies: The number of layers of the leaf.
      zeros: The number of zeros.
    """

    name: str
    shape: tuple[int, ...]
    kind: str
    copies: int
    zeros: int

    @property
    def size(self) -> int:
        """Return the number of entries of the leaf."""
        return math.prod(self.shape)

    @property
    def sparsity(self) -> float:
        """Return the fraction of zeros."""
        return self.zeros / max(self.size, 1)


class SparsityReport(NamedTuple):
    """Result of `sparsity_report`; it prints as a table.

    Attributes:
      leaves: For each leaf, in the order of the tree: `name` (its path), `shape`, `kind`, `copies`,
        `zeros`, `size` and `sparsity` (the fraction of zeros).
    """

    leaves: tuple[LeafSparsity, ...]

    @property
    def zeros(self) -> int:
        """Return the number of zeros of all leaves."""
        return sum(leaf.zeros for leaf in self.leaves)

    @property
    def size(self) -> int:
        """Return the number of entries of all leaves."""
        return sum(leaf.size for leaf in self.leaves)

    @property
    def sparsity(self) -> float:
        """Return the fraction of zeros in all leaves."""
        return self.zeros / max(self.size, 1)

    def __str__(self) -> str:
        """Return the table, with a line for each leaf, one for all kernels and one for the sum."""
        lines = [("leaf", "shape", "what it is", "copies", "zeros", "entries", "sparsity")]
        for leaf in self.leaves:
            copies = str(leaf.copies) if leaf.copies != 1 else "-"
            what = leaf.name or "params", str(leaf.shape), leaf.kind, copies
            lines.append((*what, *_describe(leaf)))
        kernels = SparsityReport(tuple(leaf for leaf in self.leaves if leaf.kind == "kernel"))
        lines.append(("kernels", "", "", "", *_describe(kernels)))
        lines.append(("all", "", "", "", *_describe(self)))
        return align(lines)


def _describe(part: LeafSparsity | SparsityReport) -> tuple[str, str, str]:
    return str(part.zeros), str(part.size), f"{part.sparsity:.4f}"


def sparsity_report(params: Any, *, axes: Any = None) -> SparsityReport:
    """Report the zeros of params, leaf by leaf.

    Args:
      params: The model's params: a tree of arrays, or a State of `flax.nnx`, outside `jax.jit`.
      axes: What each leaf is, as in `optperm.sparsity.prune`.

    Returns:
      A `SparsityReport`; it prints as a table.

    Example:
      >>> import jax, jax.numpy as jnp, optperm
      >>> layers = {"norm": {"scale": jnp.ones((6, 64))}, "up": {"kernel": jnp.ones((6, 64, 256))}}
      >>> params = {"layers": layers, "head": {"kernel": jnp.ones((64, 500))}}
      >>> state = optperm.mask_elements().init(params)
      >>> pruned, _ = optperm.sparsity.prune(params, state, 0.9, scope="leaf")
      >>> print(optperm.sparsity.sparsity_report(pruned))
      leaf                         shape         what it is  copies  zeros   entries  sparsity
      ['head']['kernel']           (64, 500)     kernel      -       28800   32000    0.9000
      ['layers']['norm']['scale']  (6, 64)       scale       6       0       384      0.0000
      ['layers']['up']['kernel']   (6, 64, 256)  kernel      6       88476   98304    0.9000
      kernels                                                        117276  130304   0.9000
      all                                                            117276  130688   0.8974

    Raises:
      TypeError: If a leaf is not an array, or is traced.
      ValueError: If `axes` does not fit the params.
    """
    plain = without_boxes(params)
    checks.check_arrays("params", plain)
    known = jax.tree.leaves(find_axes(axes, plain, params))
    paths = jax.tree_util.tree_leaves_with_path(plain)
    for path, leaf in paths:
        if isinstance(leaf, jax.core.Tracer | jax.ShapeDtypeStruct):
            name = f"params{jax.tree_util.keystr(path)}"
            raise TypeError(f"{name} must be an array outside jax.jit, got {leaf!r}.")
    return SparsityReport(
        tuple(
            LeafSparsity(
                name=jax.tree_util.keystr(path),
                shape=leaf.shape,
                kind=own.kind,
                copies=count_copies(leaf.shape, own),
                zeros=int(jnp.sum(leaf == 0)),
            )
            for (path, leaf), own in zip(paths, known, strict=True)
        )
    )
