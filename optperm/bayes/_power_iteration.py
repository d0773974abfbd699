"""Estimate the maximum eigenvalue of H A by a power iteration with the curvature of batches."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from optperm.bayes._forms import inner

# The mean is over about this many of the last quotients.
_MEMORY = 5.0


def power_iteration(
    value: jax.Array,
    vector: Any,
    precondition_fn: Callable[[Any], Any],
    product_fn: Callable[[Any], Any],
    taken: jax.Array,
) -> tuple[jax.Array, Any]:
    r"""Return :math:`\lambda_{\max}(H A)` and its left eigenvector after one more step of the iteration.

    .. math::
      \lambda \leftarrow (1 - r) \lambda + r \frac{v^\top A v}{s^\top v}, \qquad
      s \leftarrow \frac{(1 - r) s + r A v / \lambda}{\| \cdot \|}, \qquad v = H s

    Args:
      value: :math:`\lambda`, a running mean, since A differs from batch to batch.
      vector: s.
      precondition_fn: The product with H.
      product_fn: The product with a batch's A.
      taken: The number of steps of the iteration so far.
    """
    # v^T A v / s^T v, v = H s
    v = precondition_fn(vector)
    product = product_fn(v)
    quotient = (inner(v, product) / inner(vector, v)).astype(value.dtype)
    taken = taken.astype(value.dtype)
    rate = jnp.minimum(_MEMORY / (taken + _MEMORY), 0.5)
    rate = jnp.where(value == 0, 1.0, rate).astype(value.dtype)
    mean = value + rate * (quotient - value)
    # s <- (1 - r) s + r A v / lambda; if lambda is not positive, A v is divided by its norm
    divisor = jnp.where(mean > 0, mean, jnp.sqrt(inner(product, product)).astype(value.dtype))
    mixed = jax.tree.map(
        lambda s, a: (1 - rate).astype(s.dtype) * s + (rate / divisor).astype(s.dtype) * a,
        vector,
        product,
    )
    norm = jnp.sqrt(inner(mixed, mixed))
    is_sound = jnp.isfinite(quotient) & jnp.isfinite(norm) & (norm > 0)
    direction = jax.tree.map(
        lambda m, s: jnp.where(is_sound, m / norm.astype(m.dtype), s), mixed, vector
    )
    return jnp.where(jnp.isfinite(quotient), mean, value), direction
