"""Find the rank at which a low-rank optimizer state fits a number of words per parameter."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from optperm.core import checks
from optperm.core.shapes import Params
from optperm.memory._matrices import Matrix, list_matrices, plan_matrices

# The candidates for the rank are this many ratios to the smaller side of each matrix.
_STEPS = 256


def rank_for(
    params: Params,
    words: float = 0.6,
    *,
    axes: Any = None,
) -> float:
    r"""Return the maximum rank at which `optperm.low_rank` with Adam needs at most `words` per param.

    With ranks :math:`r = \rho \min(d, k)`, a d x k matrix has a basis and two moments. Any other leaf
    has two moments:

    .. math::
      \frac{\sum_\text{matrices} (d r + 2 r k) + \sum_\text{others} 2 n}{\sum n} \le \text{words}

    Args:
      params: The model's params, or their shapes from `jax.eval_shape`.
      words: The 32-bit words per parameter. Adam has 2.
      axes: As in `optperm.low_rank`.

    Returns:
      :math:`\rho`, a multiple of 1/256 in (0, 1), to pass as `rank` to `optperm.low_rank`.

    Example:
      >>> import jax.numpy as jnp, optax, optperm
      >>> params = {"kernel": jnp.zeros((512, 2048)), "bias": jnp.zeros(2048)}
      >>> rank = optperm.memory.rank_for(params, words=0.6)
      >>> rank
      0.26171875
      >>> tx = optperm.low_rank(optax.scale_by_adam(), rank)
      >>> round(optperm.memory.state_report(tx, params).words_per_param, 3)
      0.592

    Notes:
      To save 70% of AdamW's memory, pass `words=0.6`. Leaves at full rank, such as embeddings, need two
      words per parameter; counters are ignored. This function counts numbers, not bytes: with 16-bit
      params, moments also have 16 bits, but bases have 32 bits.

    Raises:
      TypeError: If `words` is not a number, or an entry of `axes` has the wrong type.
      ValueError: If `words` is not positive, or if even the smallest rank needs more words.
    """
    checks.check_positive("words", words)
    leaves = jax.tree_util.tree_leaves_with_path(params)
    sizes = [math.prod(jnp.shape(leaf)) for _, leaf in leaves]

    def plan(ratio: float) -> list[Matrix | None]:
        return list_matrices(plan_matrices(params, ratio, "smaller", axes), params)

    def count(ratio: float) -> float:
        kept = sum(
            2 * size if m is None else math.prod(m.batch_shape) * m.rank * (m.d + 2 * m.k)
            for size, m in zip(sizes, plan(ratio), strict=True)
        )
        return kept / max(sum(sizes), 1)

    fitting = [step for step in range(1, _STEPS) if count(step / _STEPS) <= words]
    if not fitting:
        paths = [jax.tree_util.keystr(path) for path, _ in leaves]
        plans = zip(sizes, paths, plan(1 / _STEPS), strict=True)
        full = [(size, path) for size, path, m in plans if m is None]
        where = f"; the largest leaf at full rank is params{max(full)[1]}" if full else ""
        raise ValueError(
            f"words={words} cannot be reached: the smallest rank needs {count(1 / _STEPS):.2f} words "
            f"per param{where}. Pass more words, or project more leaves (see optperm.leaf_axes)."
        )
    return max(fitting) / _STEPS
