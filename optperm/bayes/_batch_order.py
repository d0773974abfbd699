"""Notice batches whose order changes the noise of a chain: chunks, shuffled epochs or equal batches.

Batches whose mean gradient is not the gradient over all examples are noticed too.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optperm.bayes._kernel import NoiseKernel
from optperm.core.dtypes import computed_once
from optperm.core.keys import key_data
from optperm.core.noise import signs_like
from optperm.core.shapes import Updates
from optperm.core.shardings import unshard

# The number of projections of a gradient, and the minimum number of blocks.
NUM_PROJECTIONS, _LEAST_BLOCKS = 64, 4
# A ratio of variances counts if it differs from 1 by these factors and by this many standard errors.
_LOW, _HIGH, _ERRORS = 0.8, 1.25, 4.0
# The maximum distance of a mean, in standard errors; rounding is relative to the largest projection.
_FAR, _ROUNDING = 6.0, 1e-4

_SAME = (
    "data returns the same batch for each key: a chain then follows this batch, not the posterior. Draw "
    "the examples of a batch with the key, such as rows = jax.random.randint(key, (S,), 0, N)."
)
_WIDE = (
    "Successive batches are alike, as if chunks of the data were read in order: the mean gradient of {} "
    "varies {:.2g} times as much as with examples drawn at random, so draws are too wide. Draw "
    "each example of a batch from all examples, at random and with replacement."
)
_NARROW = (
    "Successive batches complement each other, as in shuffled epochs: the mean gradient of {} "
    "varies only {:.2g} times as much as with examples drawn at random, so draws are too narrow. Draw "
    "the examples with replacement."
)

_OTHER_MEAN = (
    "The mean gradient of the batches that data returns differs from the gradient over full_data by "
    "{:.2g} standard errors, so draws would follow neither. Draw the examples of a batch from full_data "
    "with equal probabilities, without changes such as augmentation; or pass control_variates=False."
)


def project(kernel: NoiseKernel, grad: Updates) -> jax.Array:
    r"""Return sums of the entries of a gradient with random signs, (64,).

    The entries are :math:`w_i^\top g \sqrt{S / \Lambda_i}`, whose variance is 1 if the examples of a
    batch are drawn at random. An entry without noise is left out.

    Args:
      kernel: The kernel.
      grad: The gradient of a batch.
    """
    size, form = kernel.batch_size, kernel.basis
    scale = jax.tree.map(
        lambda c: jnp.where(c > 0, jnp.sqrt(size.astype(c.dtype) / jnp.where(c > 0, c, 1.0)), 0.0),
        kernel.noise,
    )
    u = form.times(scale, form.coordinates(grad, scale))
    signs = computed_once(signs_like(key_data(3), u))
    leaves = jax.tree.leaves(
        unshard(jax.tree.map(lambda u, z: (u * z).astype(jnp.float32), u, signs))
    )
    flat = jnp.concatenate([leaf.ravel() for leaf in leaves])
    flat = jnp.pad(flat, (0, -flat.size % NUM_PROJECTIONS))
    return jnp.sum(flat.reshape(NUM_PROJECTIONS, -1), axis=1)


def count_noisy(kernel: NoiseKernel, grad: Updates) -> jax.Array:
    """Return the number of entries that `project` adds."""
    form = kernel.basis
    is_noisy = jax.tree.map(jnp.sign, kernel.noise)
    ones = jax.tree.map(jnp.ones_like, form.coordinates(grad, is_noisy))
    return sum(
        (jnp.sum(leaf, dtype=jnp.float32) for leaf in jax.tree.leaves(form.times(is_noisy, ones))),
        start=jnp.zeros([], jnp.float32),
    )


def judge_mean_gradient(projections: Any, full: Any) -> list[str]:
    """Return a warning if the mean gradient of batches is not the gradient over all examples.

    Args:
      projections: x, (step, chain, 64).
      full: The projections of the gradient over all examples, (chain, 64).
    """
    x, wanted = (np.asarray(each, np.float64) for each in (projections, full))
    if not (np.all(np.isfinite(x)) and np.all(np.isfinite(wanted))):
        return []
    # The rounding of equal gradients is no error of a mean
    error = x.std(axis=0) / np.sqrt(len(x)) + _ROUNDING * np.abs(x).max()
    far = float(np.max(np.abs(x.mean(axis=0) - wanted) / np.where(error > 0, error, np.inf)))
    return [_OTHER_MEAN.format(far)] if far > _FAR else []


def judge_order(projections: Any, num_noisy: Any) -> list[str]:
    r"""Return a warning if the order of batches changes the noise of a chain at a fixed point.

    A chain moves far in many steps, so the noise of the mean of :math:`b` successive gradients counts:

    .. math:: V_b = \frac{b}{D} \sum_j \operatorname{Var} \frac{1}{b} \sum_{t = 1}^{b} x_{j, t}

    With independent batches, :math:`V_b = 1` for each b. Positive correlations increase :math:`V_b`, and
    in shuffled epochs of E batches, :math:`V_b = 1 - b / E`.

    Args:
      projections: x, (step, chain, 64).
      num_noisy: D, the number of entries of a gradient that have noise, (chain,).
    """
    x = np.asarray(projections, np.float64)
    x = x / np.sqrt(np.maximum(np.asarray(num_noisy, np.float64), 1.0))[:, None]
    num_steps = len(x)
    if not np.all(np.isfinite(x)) or not np.any(x):
        return []
    deviations = x - x.mean(axis=0)
    if np.abs(deviations).max() <= 1e-5 * np.abs(x).max():
        return [_SAME]
    # The number of independent directions among the projections of all chains
    flat = deviations.reshape(num_steps, -1)
    covariance = flat.T @ flat / num_steps
    directions = np.trace(covariance) ** 2 / np.sum(covariance**2)
    sums = np.cumsum(np.insert(deviations, 0, 0.0, axis=0), axis=0)
    found: list[tuple[float, int, float]] = []
    size = 1
    while num_steps // size >= _LEAST_BLOCKS:
        # Overlapping blocks, whose variance has two thirds of the variance of disjoint blocks
        means = (sums[size:] - sums[:-size]) / size
        num_free = num_steps / size - 1
        ratio = size * float(np.mean(means**2, axis=0).sum(axis=-1).mean())
        ratio *= (num_free + 1) / num_free
        # With k degrees of freedom, the cube root of V is almost normal (Wilson and Hilferty)
        spread = 2 / (9 * 1.5 * num_free * directions)
        found.append(((np.cbrt(ratio) - (1 - spread)) / np.sqrt(spread), size, ratio))
        size *= 2
    errors, size, ratio = max(found, key=lambda each: abs(each[0]))
    if abs(errors) < _ERRORS or _LOW < ratio < _HIGH:
        return []
    batches = "a batch" if size == 1 else f"{size} batches"
    return [(_WIDE if ratio > 1 else _NARROW).format(batches, ratio)]
