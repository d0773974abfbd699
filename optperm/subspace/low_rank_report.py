"""A report on how low-rank methods treat each leaf of a model, before any training."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import jax
import optax

from optperm.subspace.low_rank import low_rank
from optperm.subspace.matrices import LeafReport, collect_leaves


class LowRankReport(NamedTuple):
    """Result of `low_rank_report`, which prints as a table.

    Attributes:
      leaves: For each leaf, in the order of the tree: `name`; `shape`; `matrices`, the number of its
        matrices and their sides (batch, d, k), with bases on the side of d, or None at full rank;
        `on_rows`, whether d is the side of the rows; `rank`, r or 0; `words`, the words of its state;
        and `full_words`, the words of its state at full rank.
      words_per_param: Words of state per parameter.
      full_words_per_param: Words of state per parameter at full rank.
    """

    leaves: tuple[LeafReport, ...]
    words_per_param: float
    full_words_per_param: float

    def __str__(self) -> str:
        """Return the table, one line for each leaf and one for all of them."""
        lines = [("leaf", "shape", "matrices", "basis on", "rank", "words/param", "at full rank")]
        for leaf in self.leaves:
            size = max(math.prod(leaf.shape), 1)
            numbers = f"{leaf.words / size:.2f}", f"{leaf.full_words / size:.2f}"
            if leaf.matrices is None:
                # The rows, columns and layers of such a leaf are unknown.
                what = "axes not named" if len(leaf.shape) > 2 else "full rank"
                middle = what, "-", "-"
            else:
                batch, d, k = leaf.matrices
                sides = (d, k) if leaf.on_rows else (k, d)
                middle = (
                    " x ".join(map(str, ((batch,) if batch > 1 else ()) + sides)),
                    "rows" if leaf.on_rows else "columns",
                    str(leaf.rank),
                )
            lines.append((leaf.name or "params", str(leaf.shape), *middle, *numbers))
        totals = f"{self.words_per_param:.2f}", f"{self.full_words_per_param:.2f}"
        lines.append(("all", "", "", "", "", *totals))
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
            for line in lines
        )


def low_rank_report(
    tx_or_rank: optax.GradientTransformation | int | float, params: optax.Params
) -> LowRankReport:
    """Report which leaves are projected, on which side and to what rank, and the size of their state.

    Only shapes are used. A leaf of three or more axes whose axes are not named stays at full rank, as
    the table says.

    Args:
      tx_or_rank: An optimizer with `optperm.low_rank` or `optperm.apollo` anywhere in it; or a
        rank, for `optperm.low_rank(optax.scale_by_adam(), rank)`.
      params: The model's params, or their shapes from `jax.eval_shape`.

    Returns:
      A `LowRankReport`, which prints as a table.

    Example:
      >>> import jax.numpy as jnp, optperm
      >>> params = {"bias": jnp.zeros(64), "kernel": jnp.zeros((64, 256))}
      >>> params |= {"stack": jnp.zeros((2, 8, 8))}
      >>> print(optperm.low_rank_report(1 / 4, params))
      leaf        shape      matrices        basis on  rank  words/param  at full rank
      ['bias']    (64,)      full rank       -         -     2.00         2.00
      ['kernel']  (64, 256)  64 x 256        rows      16    0.56         2.00
      ['stack']   (2, 8, 8)  axes not named  -         -     2.00         2.00
      all                                                    0.58         2.00

    Raises:
      TypeError: If the rank is not a number, or a parameter is not of a real floating dtype.
      ValueError: If the rank is out of range, or the optimizer has no low-rank method.
    """
    tx = tx_or_rank
    if not isinstance(tx, optax.GradientTransformation):
        tx = low_rank(optax.scale_by_adam(), tx_or_rank)
    with collect_leaves() as leaves:
        # A new function object, since JAX would not trace the same function again.
        jax.eval_shape(functools.partial(tx.init), params)
    if not leaves and jax.tree.leaves(params):
        raise ValueError("tx_or_rank must hold optperm.low_rank or optperm.apollo, or be a rank.")
    size = max(sum(math.prod(leaf.shape) for leaf in leaves), 1)
    words, full = (sum(getattr(leaf, name) for leaf in leaves) for name in ("words", "full_words"))
    return LowRankReport(tuple(leaves), words / size, full / size)
