"""What low-rank methods make of each leaf of a model, before anything is trained."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import jax
import optax

from optperm.subspace.low_rank import low_rank
from optperm.subspace.matrices import LeafReport, reporting


class LowRankReport(NamedTuple):
    """What `low_rank_report` returns; as text it is a table.

    Attributes:
      leaves: For each leaf, in the order of the tree: `name`, its `shape`, `matrices`, the number
        of its matrices and their sides (batch, d, k), or None where it stays at full rank, d being
        the side on which bases stand, `on_rows`, whether that is the side of the rows, `rank`, r or
        0, `words`, the numbers that the optimizer's state holds for it, and `full_words`, those at
        full rank.
      words_per_param: The words of state for each parameter.
      full_words_per_param: Those at full rank.
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
                # Nothing tells which axes of such a leaf are rows, columns or layers.
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
    """Return which leaves are projected, on which side and to what rank, and what state they take.

    Nothing is computed: shapes are enough. A leaf of three or more axes whose axes are not named
    stays at full rank, and the table says so.

    Args:
      tx_or_rank: An optimizer with `optperm.low_rank` or `optperm.apollo` anywhere in it; or a
        rank, for `optperm.low_rank(optax.scale_by_adam(), rank)`.
      params: The model's params, or their shapes as of `jax.eval_shape`.

    Returns:
      A `LowRankReport`. `print` it for a table.

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
      TypeError: If the rank is no number, or a parameter is not of a real floating dtype.
      ValueError: If the rank is out of range, or no low-rank method is in the optimizer.
    """
    tx = tx_or_rank
    if not isinstance(tx, optax.GradientTransformation):
        try:
            tx = low_rank(optax.scale_by_adam(), tx_or_rank)
        except (TypeError, ValueError) as error:
            message = f"tx_or_rank must be an optimizer, or a rank: {error}"
            raise type(error)(message) from error
    with reporting() as leaves:
        # As a function of its own: what JAX has traced before it does not trace again.
        jax.eval_shape(functools.partial(tx.init), params)
    if not leaves and jax.tree.leaves(params):
        raise ValueError(
            "tx_or_rank must hold optperm.low_rank or optperm.apollo, or be a rank: found neither."
        )
    size = max(sum(math.prod(leaf.shape) for leaf in leaves), 1)
    words, full = (sum(getattr(leaf, name) for leaf in leaves) for name in ("words", "full_words"))
    return LowRankReport(tuple(leaves), words / size, full / size)
