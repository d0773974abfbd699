"""A prior as a term of the loss."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optperm.core import checks
from optperm.core.dtypes import accumulation_dtype
from optperm.core.shapes import Params
from optperm.evaluation import LossFn, checked_sum, evaluate, num_examples


def normal_prior(
    params: Params, precision: float | jax.Array, num_data: int | jax.Array
) -> jax.Array:
    r"""Return the term of a normal prior in the mean loss.

    .. math::
      -\frac{1}{N} \log p(\theta) = \frac{p}{2 N} \|\theta\|^2 + \text{const}, \qquad
      \theta \sim N(0, I / p)

    The loss of a sampler is the mean negative log-likelihood over examples, plus this term::

        def loss_fn(params, batch):
            losses = negative_log_likelihood(params, batch)  # one for each example
            return jnp.mean(losses) + optperm.bayes.normal_prior(params, precision, num_data)

    The gradient of a batch, the gradients of its examples and the curvature then include the prior. The
    covariance of the examples' gradients does not change.

    Args:
      params: The params, a tree.
      precision: p, in the units of 1 / params squared; 0 for no prior.
      num_data: N, the number of training examples.

    Returns:
      A scalar in float32, or in float64 if a parameter is float64.

    Example:
      >>> import jax.numpy as jnp, optperm
      >>> float(optperm.bayes.normal_prior({"w": jnp.array([3.0, 4.0])}, precision=2.0, num_data=100))
      0.25

    Notes:
      Use an unweighted mean: a weighted mean over a batch of one example loses the weight.

    Raises:
      TypeError: If an argument has the wrong type.
      ValueError: If an argument is out of range.
    """
    checks.check_in_range("precision", precision, 0.0, float("inf"), may_be_schedule=False)
    checks.check_count("num_data", num_data)
    dtype = accumulation_dtype(params)
    squares = optax.tree.norm(optax.tree.cast(params, dtype), squared=True)
    return jnp.asarray(precision, dtype) / (2 * jnp.asarray(num_data, dtype)) * squares


def make_loss(
    loss_fn: LossFn,
    params: Params,
    batch: Any,
    *,
    num_data: int,
    log_prior: Callable[[Any], Any] | None,
) -> Callable[[Any, Any], jax.Array]:
    """Return the mean loss over the examples of a batch, with the prior; raise if the loss is no scalar.

    A pair (sum, count) becomes its sum divided by the number of the batch's examples. N times this mean
    is the negative log likelihood for any counts, such as of tokens or of a mask.

    Args:
      loss_fn: A function of params and a batch that returns a mean, or a sum and a count.
      params: Params, for their shapes.
      batch: A batch, for its shapes.
      num_data: N.
      log_prior: A function of params; None if `loss_fn` includes the prior.
    """
    pairs = list[bool]()

    def mean(params: Any, batch: Any) -> jax.Array:
        total, count, _ = checked_sum(loss_fn, params, batch, has_aux=False)
        pairs.append(count is not None)
        return total / num_examples(batch)

    jax.eval_shape(mean, params, batch)
    likelihood: Callable[[Any, Any], jax.Array] = mean if pairs[0] else loss_fn

    def loss(params: Any, batch: Any) -> jax.Array:
        log_p = 0.0 if log_prior is None else log_prior(params)
        if isinstance(log_p, tuple | list | dict) or jnp.shape(log_p):
            came = jax.tree.map(jax.typeof, log_p)
            raise TypeError(f"log_prior must return a real scalar, got {came}.")
        return likelihood(params, batch) - log_p / num_data

    made = likelihood if log_prior is None else loss
    jax.eval_shape(lambda p, b: evaluate(made, p, b).value, params, batch)
    return made
