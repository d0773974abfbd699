"""A report on how low-rank methods treat each leaf of a model, before any training."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optperm.core.states import match_params
from optperm.memory._low_rank import low_rank
from optperm.memory._matrices import LeafPlan, collect_leaves


class LeafReport(NamedTuple):
    """The entry of one leaf in `optperm.memory.low_rank_report`.

    Attributes:
      name: The path of the leaf.
      shape: The shape of the leaf.
      matrices: The number of its matrices and their sides, (batch, d, k); None at full rank.
      on_rows: Whether its bases are on rows, the side of `reduction_axis`.
      rank: r, or 0 at full rank.
      words: The number of words of its state.
      full_words: The number of words of its state at full rank.
      is_seen: Whether a low-rank method sees the leaf.
    """

    name: str
    shape: tuple[int, ...]
    matrices: tuple[int, int, int] | None
    on_rows: bool
    rank: int
    words: float
    full_words: float
    is_seen: bool = True


class LowRankReport(NamedTuple):
    """Result of `low_rank_report`, which prints as a table.

    Attributes:
      leaves: For each leaf, in the order of the tree: `name`; `shape`; `matrices`, the number of its
        matrices and their sides (batch, d, k), with bases on the side of d, or None at full rank;
        `on_rows`, whether d is the side of the rows; `rank`, r or 0; `words`, the words of its state in
        the whole optimizer; `full_words`, these words at full rank; and `is_seen`, whether a low-rank
        method sees the leaf.
      words_per_param: Words of the whole optimizer's state per parameter.
      full_words_per_param: These words at full rank.
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
                middle = what if leaf.is_seen else "not seen", "-", "-"
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
    tx_or_rank: optax.GradientTransformation | optax.MultiSteps | int | float, params: optax.Params
) -> LowRankReport:
    """Report which leaves are projected, on which side and to what rank, and the size of their state.

    Only shapes are used. The whole optimizer counts, also its parts that see other leaves. A leaf of
    three or more axes whose axes are not named stays at full rank, as the table says.

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
      >>> print(optperm.memory.low_rank_report(1 / 4, params))
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
    if isinstance(tx, optax.MultiSteps):
        tx = tx.gradient_transformation()
    if not isinstance(tx, optax.GradientTransformation):
        tx = low_rank(optax.scale_by_adam(), tx)
    # New function objects, since JAX would not trace the same function again.
    with collect_leaves() as plans:
        state = jax.eval_shape(functools.partial(tx.init), params)
    with collect_leaves(at_full_rank=True):
        full_state = jax.eval_shape(functools.partial(tx.init), params)
    if not plans and jax.tree.leaves(params):
        raise ValueError("tx_or_rank must hold optperm.low_rank or optperm.apollo, or be a rank.")
    words, full = (_count_words(each, params) for each in (state, full_state))
    leaves = tuple(
        _describe_leaf(jax.tree_util.keystr(path), jnp.shape(leaf), plans, *counts)
        for (path, leaf), *counts in zip(
            jax.tree_util.tree_leaves_with_path(params), words, full, strict=True
        )
    )
    total = max(_count_entries(params), 1)
    sizes = (_count_entries(each) / total for each in (state, full_state))
    return LowRankReport(leaves, *sizes)


def _count_entries(tree: Any) -> int:
    return sum(math.prod(jnp.shape(leaf)) for leaf in jax.tree.leaves(tree))


def _count_words(state: Any, params: optax.Params) -> list[float]:
    """Return the words of each leaf's state, without single numbers such as counts.

    Arrays that belong to no leaf, as with `optax.flatten`, are spread over all leaves.
    """
    sizes = [math.prod(jnp.shape(leaf)) for leaf in jax.tree.leaves(params)]
    words, rest = [0.0] * len(sizes), 0
    for leaf, place, _ in match_params(state, params):
        if leaf.ndim and place is not None:
            words[place] += leaf.size
        elif leaf.ndim:
            rest += leaf.size
    return [own + rest * size / max(sum(sizes), 1) for own, size in zip(words, sizes, strict=True)]


def _describe_leaf(
    name: str, shape: tuple[int, ...], plans: list[LeafPlan], words: float, full_words: float
) -> LeafReport:
    """Return the entry of a leaf, with its first view as matrices if there is one."""
    # A low-rank method within another one sees smaller leaves of the same names.
    seen = [plan.matrix for plan in plans if (plan.name, plan.shape) == (name, shape)]
    matrix = next(filter(None, seen), None)
    if matrix is None:
        return LeafReport(name, shape, None, False, 0, words, full_words, bool(seen))
    sides = math.prod(matrix.batch_shape), matrix.d, matrix.k
    return LeafReport(name, shape, sides, matrix.on_rows, matrix.rank, words, full_words)
