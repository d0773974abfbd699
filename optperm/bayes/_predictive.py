"""Predictions from draws of a posterior."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optperm.bayes._chains import Samples, check_draws
from optperm.core.dtypes import accumulation_dtype
from optperm.core.fresh_jit import fresh_jit
from optperm.core.shapes import Array, Float, Shaped
from optperm.core.shardings import can_be_seen, take
from optperm.core.trees import without_variables

# A softmax in bfloat16 sums to 1 within this tolerance, and its mean over draws is in float32.
_ROUNDING = 4 * float(jnp.finfo(jnp.bfloat16).eps)


class Ensemble(NamedTuple):
    """Params of several models: draws from `sample_params`, or models trained together with `jax.vmap`.

    Attributes:
      params: Params with one leading axis over the models.
    """

    params: Any


class Predictions(NamedTuple):
    """Predictions of `posterior_predictive`.

    Attributes:
      draws: The prediction of each draw, (chain, draw, ...).
      mean: The mean over draws, in float32 or wider.
      deviation: The standard deviation over draws.
    """

    draws: Shaped[Array, "chain draw ..."]
    mean: Float[Array, "..."]
    deviation: Float[Array, "..."]

    def quantile(self, levels: Any) -> np.ndarray:
        """Return quantiles over all draws; several levels give a leading axis.

        Args:
          levels: One or more numbers in [0, 1].
        """
        values = np.asarray(self.draws, np.float64)
        return np.quantile(values.reshape(-1, *values.shape[2:]), levels, axis=0)

    def entropy(self) -> jax.Array:
        r"""Return the entropy of the mean class probabilities, :math:`H[\bar p]`, in nats.

        Raises:
          ValueError: If the last axis has fewer than two classes, or if predictions that are not traced
            are not probabilities.
        """
        shape = self.mean.shape
        if not shape or shape[-1] < 2:
            raise ValueError(
                f"The last axis must have probabilities of at least two classes, got the shape {shape}."
            )
        if can_be_seen(self.mean):
            check_rows("The mean predictions", self.mean)
        return _entropy(self.mean)

    def mutual_information(self) -> jax.Array:
        r"""Return the mutual information :math:`H[\bar p] - \frac1M \sum_m H[p_m]`, in nats.

        This is large where draws disagree (far from training data), and small where classes overlap.

        Raises:
          ValueError: As for `entropy`.
        """
        within = jnp.mean(_entropy(self.draws.astype(self.mean.dtype)), axis=(0, 1))
        return jnp.maximum(self.entropy() - within, 0)  # rounding may make the difference negative


def check_rows(name: str, probabilities: Any) -> None:
    """Raise a ValueError, which begins with `name`, unless class probabilities sum to 1."""
    values = np.asarray(probabilities, np.float64)
    values = values.reshape(-1, values.shape[-1])
    is_bad = ~((np.abs(values.sum(axis=1) - 1) <= _ROUNDING) & (values >= 0).all(axis=1))
    if is_bad.any():
        row = int(np.argmax(is_bad))
        raise ValueError(
            f"{name} must be at least 0 and each row must sum to one, but row {row} begins with "
            f"{values[row][:8]}. Logits need jax.nn.softmax."
        )


def _entropy(probabilities: jax.Array) -> jax.Array:
    # 0 log 0 is 0
    return -jnp.sum(jax.scipy.special.xlogy(probabilities, probabilities), axis=-1)


def posterior_predictive(
    predict_fn: Callable[[Any, Any], jax.Array], samples: Samples | Ensemble, inputs: Any
) -> Predictions:
    r"""Return a model's predictions for draws of its params, with their mean and standard deviation.

    .. math::
      p(y \mid x) \approx \frac{1}{M} \sum_{m = 1}^{M} p(y \mid x, \theta_m)

    Args:
      predict_fn: A function `predict_fn(params, inputs)` that returns an array, such as class
        probabilities (n, classes):
        `lambda params, x: jax.nn.softmax(model.apply({"params": params}, x))` for a Linen model.
      samples: The `Samples` of `optperm.bayes.draw_samples` or `optperm.bayes.sample`, or an
        `optperm.bayes.Ensemble` of models, which count as one chain.
      inputs: The inputs, a tree of arrays.

    Returns:
      `Predictions`.

    Example:
      >>> import jax, jax.numpy as jnp, optperm
      >>> step = lambda w, s, key: (w + 1.0, s)  # no sampler: draws 1 and 2 of one parameter
      >>> samples = optperm.bayes.draw_samples(
      ...     step, jnp.zeros(()), (), jax.random.key(0), num_chains=1, num_draws=2
      ... )
      >>> found = optperm.bayes.posterior_predictive(lambda w, x: w * x, samples, jnp.array([1.0, 10.0]))
      >>> found.mean.tolist(), found.deviation.tolist(), found.draws.shape
      ([1.5, 15.0], [0.5, 5.0], (1, 2, 2))

    Notes:
      The mean of class probabilities is the posterior predictive; the mean of logits is not. One draw is
      evaluated at a time, and the predictions of all draws are held in memory. If `predict_fn` returns
      the log likelihood of each example, ArviZ accepts `draws` as its group `log_likelihood`, for
      PSIS-LOO. Each call traces `predict_fn`, so it sees the current values of outside variables, such
      as a temperature. However, JAX keeps the traces of functions that `predict_fn` passes to
      `jax.lax.scan`, `jax.lax.cond` or `jax.checkpoint`. A program is compiled only if it differs from
      earlier programs.

    Raises:
      TypeError: If `predict_fn` is not a function or does not return one array of real floating dtype,
        or `samples` is neither `Samples` nor an `Ensemble`: bare arrays do not show which axes are
        chains.
      ValueError: If the leading axes are empty, missing, or not the same in all leaves.
    """
    if not isinstance(samples, Samples | Ensemble):
        raise TypeError(f"samples must be Samples or an Ensemble, got {type(samples).__name__}.")
    params = without_variables(samples.params)
    if isinstance(samples, Ensemble):
        shapes = {jnp.shape(leaf)[:1] for leaf in jax.tree.leaves(params)}
        if len(shapes) != 1 or shapes & {(), (0,)}:
            raise ValueError(
                "Ensemble takes params stacked along a leading axis, not empty and the same in all "
                "leaves: jax.tree.map(lambda *leaves: jnp.stack(leaves), *models)."
            )
        params = jax.tree.map(lambda leaf: leaf[None], params)
    check_draws(params)
    draws = fresh_jit(functools.partial(_predict, predict_fn))(params, inputs)
    dtype = accumulation_dtype(draws)
    mean, deviation = (
        function(draws.astype(dtype), axis=(0, 1)) for function in (jnp.mean, jnp.std)
    )
    return Predictions(draws, mean, deviation)


def _predict(predict_fn: Callable[[Any, Any], jax.Array], params: Any, inputs: Any) -> jax.Array:
    num_chains, num_draws = jax.tree.leaves(params)[0].shape[:2]

    def predict(index: jax.Array) -> jax.Array:
        place = (index // num_draws, index % num_draws)
        return predict_fn(jax.tree.map(lambda leaf: take(leaf, *place), params), inputs)

    indices = jnp.arange(num_chains * num_draws, dtype=jnp.int32)
    out = jax.eval_shape(predict, indices[0])
    if not hasattr(out, "dtype") or not jnp.issubdtype(out.dtype, jnp.floating):
        what = getattr(out, "dtype", type(out).__name__)
        raise TypeError(f"predict_fn must return one array of a real floating dtype, got {what}.")
    draws = jax.lax.map(predict, indices)
    return draws.reshape(num_chains, num_draws, *draws.shape[1:])
