"""SWAG: a normal distribution with the mean and the covariance of the params along a training run.

W. J. Maddox, T. Garipov, P. Izmailov, D. Vetrov and A. G. Wilson, "A Simple Baseline for Bayesian
Uncertainty in Deep Learning", NeurIPS 2019, arXiv 1902.02476.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optperm.core import checks
from optperm.core.control import cond
from optperm.core.dtypes import accumulation_dtype, all_finite, wide_zeros
from optperm.core.fingerprints import describe_difference
from optperm.core.shapes import Array, Float, Int32, Params, PyTree, Updates
from optperm.core.shardings import rows_like
from optperm.core.transformation import transformation


class SwagState(NamedTuple):
    r"""State of `swag`, in float32 or the parameter's dtype if wider.

    Attributes:
      count: Number of steps taken.
      num_models: :math:`n`, the number of collections.
      mean: :math:`\bar\theta` (stochastic weight averaging).
      squares: :math:`\sum_i (\theta_i - \bar\theta)^2`, for each entry.
      deviations: The last :math:`\theta_i - \bar\theta_i`; deviation i, counted from 0, is in row i
        modulo the rank.
    """

    count: Int32[Array, ""]  # type: ignore[assignment]
    num_models: Int32[Array, ""]
    mean: PyTree[Float[Array, "?*shape"], "Params"]
    squares: PyTree[Float[Array, "?*shape"], "Params"]
    deviations: PyTree[Float[Array, "rank ?*shape"], "Params"]


def swag(
    every: int | jax.Array, *, rank: int = 20, start: int | jax.Array = 0
) -> optax.GradientTransformationExtraArgs:
    r"""Compute the mean and the covariance of the params over time, and leave the updates unchanged.

    The params :math:`\theta_1, \theta_2, \dots` at steps `start`, `start + every`, ... give

    .. math::
      \bar\theta = \frac1n \sum_i \theta_i, \qquad
      \Sigma_{\mathrm{diag}} = \frac1n \sum_i (\theta_i - \bar\theta)^2, \qquad
      D = (\theta_i - \bar\theta_i)_{i > n - K}

    where :math:`\bar\theta_i` is the mean of the first i params. The distribution is

    .. math::
      \mathcal{N}\left(\bar\theta,\ \tfrac12 \Sigma_{\mathrm{diag}}
      + \frac{1}{2 (K - 1)} D D^\top\right)

    or, with rank 0, :math:`\mathcal{N}(\bar\theta, \Sigma_{\mathrm{diag}})`.

    Args:
      every: The number of steps from one collection to the next, such as the steps of an epoch.
      rank: :math:`K`, the number of deviations, 0 or at least 2. Each deviation takes the memory of the
        params in float32.
      start: The step of the first collection.

    Returns:
      A transformation whose state is a `SwagState`. Its `update` needs `params`. Params that are not
      finite are not collected.

    Example:
      >>> import jax.numpy as jnp, optax, optperm
      >>> tx = optax.chain(optax.sgd(1.0), optperm.swag(every=1, rank=0))
      >>> opt_state = tx.init(jnp.zeros(1))
      >>> for w in (jnp.array([1.0]), jnp.array([3.0])):
      ...     _, opt_state = tx.update(w, opt_state, w)
      >>> optperm.bayes.posterior_mean(opt_state).tolist(), (opt_state[1].squares / 2).tolist()
      ([2.0], [1.0])

    Notes:
      In the covariance, K is the number of deviations so far, min(n, K). After one collection, all draws
      equal the collected params.

      Collect at the end of a training run with SGD, and with a constant learning rate that is large
      enough to keep the params moving. `optperm.bayes.sample_params` draws params, and
      `optperm.bayes.posterior_mean` returns :math:`\bar\theta`. Models with BatchNorm need new running
      statistics for the mean and for each draw, from one pass over the training data.

    Raises:
      TypeError: If an argument has the wrong type, or a parameter does not have a real floating dtype.
      ValueError: If an argument is out of range, or the trees passed to `update` do not match.

    References:
      Maddox et al., `A Simple Baseline for Bayesian Uncertainty in Deep Learning
      <https://arxiv.org/abs/1902.02476>`_, NeurIPS 2019
    """
    checks.check_count("every", every)
    checks.check_count("start", start, minimum=0)
    checks.check_static_count("rank", rank, minimum=0)
    if rank == 1:
        raise ValueError("rank must be 0 or at least 2, got 1.")

    def init(params: Params) -> SwagState:
        return SwagState(
            count=jnp.zeros([], jnp.int32),
            num_models=jnp.zeros([], jnp.int32),
            mean=wide_zeros(params),
            squares=wide_zeros(params),
            deviations=jax.tree.map(lambda p: rows_like(p, rank, accumulation_dtype(p)), params),
        )

    def update(
        updates: Updates, state: SwagState, params: Params, **_: Any
    ) -> tuple[Updates, SwagState]:
        if any(len(rows) != rank for rows in jax.tree.leaves(state.deviations)):
            raise ValueError(describe_difference("swag", "rank"))

        def collect(state: SwagState) -> SwagState:
            n = optax.safe_increment(state.num_models)

            # mean <- mean + (theta - mean) / n
            def next_mean(mean: jax.Array, theta: Any) -> jax.Array:
                return mean + (theta.astype(mean.dtype) - mean) / n.astype(mean.dtype)

            mean = jax.tree.map(next_mean, state.mean, params)

            # squares <- squares + (theta - old mean) (theta - new mean). Unlike E theta^2 - mean^2, this
            # sum (Welford's) is accurate even if the params hardly move
            def next_squares(squares: jax.Array, theta: Any, old: Any, new: Any) -> jax.Array:
                theta = theta.astype(squares.dtype)
                return squares + (theta - old) * (theta - new)

            squares = jax.tree.map(next_squares, state.squares, params, state.mean, mean)

            # D_n = theta - mean replaces the oldest row
            def write_row(rows: jax.Array, theta: Any, mean: jax.Array) -> jax.Array:
                row = theta.astype(rows.dtype) - mean
                return jax.lax.dynamic_update_index_in_dim(rows, row, state.num_models % rank, 0)

            deviations = state.deviations
            if rank:
                deviations = jax.tree.map(write_row, state.deviations, params, mean)
            return SwagState(state.count, n, mean, squares, deviations)

        since = state.count - jnp.asarray(start, jnp.int32)
        is_due = (since >= 0) & (since % jnp.asarray(every, jnp.int32) == 0)
        new = cond(is_due & all_finite(params), collect, lambda state: state, state)
        return updates, new._replace(count=optax.safe_increment(state.count))

    return transformation(
        init,
        update,
        method="swag",
        like=lambda state: state.mean,
        updates_like="updates",
    )
