"""Find evidence in the states of constant SGD that the steps do not sample the posterior."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optperm.bayes._kernel import NoiseKernel
from optperm.core.shardings import can_be_seen

# The ratio of variances without averaged noise at a stability of 0.5.
_LARGEST_RATIO, _LARGEST_UNEVEN = 4 / 3, 0.2
# Learning limits errors to a fifth, up to rounding, unless chains would then hardly move.
_LEAST_DRIFT, _LARGEST_ERROR = 0.7, 0.201
# A smaller fraction of noise from the batches may drift: the variance of draws changes by less.
_LEAST_FRACTION = 0.01
# The maximum distance of an anchor from an optimum, in standard deviations along a direction, and the
# fraction of the noise with which control variates help no longer.
_FARTHEST, _MOST_LEFT = 10.0, 1.0

COLD = (
    "The temperature is 0 in the last step: at this temperature, draws do not follow the posterior. "
    "Pass a temperature above 0."
)


def are_seen(state: Any) -> bool:
    """Return whether the counts of a state are concrete, not traced."""
    return can_be_seen(state.count) and can_be_seen(state.steps)


def judge_temperature(count: Any, temperature: Any) -> list[str]:
    """Return a warning if the temperature of the last step is 0, as far as Python can see."""
    if not (can_be_seen(count) and can_be_seen(temperature)):
        return []
    return [COLD] if np.any(count) and np.any(np.asarray(temperature) == 0) else []


def judge_stability(
    stability: Any, steps: Any, lower: str, fraction: float | np.ndarray = 1.0
) -> list[str]:
    """Return a warning if steps are so long that variances increase.

    Args:
      stability: lambda_max(H A) (1 - mu) / (1 + mu).
      steps: The number of steps.
      lower: The name of the remedy.
      fraction: The fraction phi of the noise that is not averaged over two steps: the batches'.
    """
    c = np.asarray(stability, np.float64)
    # Var = T / (N lambda) (1 + phi (c / 2) / (1 - c / 2)) along that direction
    ratio = float(np.max(1 + fraction * (c / 2) / np.maximum(1 - c / 2, 1e-3)))
    if not (ratio > _LARGEST_RATIO and np.any(np.asarray(steps) > 0)):
        return []
    return [
        f"lambda_max(H A) of the steps, corrected for momentum, is {float(np.max(c)):.3g}: along its "
        f"eigenvector, the variance of the draws is about {ratio:.2g} times what it should be. Pass a "
        f"smaller {lower}, or use smaller batches."
    ]


def judge_mean(uneven: Any, estimates: Any) -> list[str]:
    """Return a warning if the batch's gradient often was not the mean of its examples' gradients."""
    if not np.max(np.asarray(uneven) / np.maximum(estimates, 1)) > _LARGEST_UNEVEN:
        return []
    return [
        "The gradient of a batch is often not the mean of its examples' gradients: the loss sums, "
        "weights or mixes examples (as predictions (n,) minus labels (n, 1) do). Use jnp.mean and "
        "equal shapes, or estimator='two_batches' for a loss that has to mix examples."
    ]


def judge_altered(altered: Any) -> list[str]:
    """Return a warning if the gradients that control variates correct belonged to other batches."""
    if not np.any(altered):
        return []
    return [
        f"In {int(np.max(altered))} of the steps of a chain, the updates that constant_sgd got were not "
        "the gradient of the batch, as with optax.MultiSteps, clipping or weight decay, so control "
        "variates do not fit them. Remove what changes the gradient, or learn a kernel with "
        "control_variates=False for optax.MultiSteps."
    ]


def judge_steps(kernel: NoiseKernel, count: Any) -> list[str]:
    """Return a warning if the steps of a kernel, or of a kernel for each chain, are too long."""
    return judge_stability(kernel.stability, count, "stability", _batch_fraction(kernel))


def _batch_fraction(kernel: NoiseKernel) -> np.ndarray:
    """Return the maximum fraction of noise from the batches, of each chain."""
    fractions = NoiseKernel.batch_fraction
    return np.asarray((jax.vmap(fractions) if jnp.ndim(kernel.stability) else fractions)(kernel))


def judge_anchor(kernel: NoiseKernel) -> list[str]:
    """Return warnings about control variates that leave the noise, or are far from an optimum."""
    if not kernel.anchor:
        return []
    distances = NoiseKernel.anchor_distance
    distance = (jax.vmap(distances) if jnp.ndim(kernel.stability) else distances)(kernel)
    found, far, left = [], float(np.max(distance)), float(np.max(kernel.noise_left))
    if far > _FARTHEST:
        found.append(
            "The search has not reached an optimum: by the gradient over all examples, the point of "
            f"the control variates is about {far:.2g} standard deviations of the posterior away. Start "
            "closer to an optimum, or take more steps to learn the kernel."
        )
    if left > _MOST_LEFT:
        found.append(
            f"Control variates leave {left:.2g} times the noise of the batches, because the chain moves "
            "far from its optimum: pass control_variates=False, or larger batches."
        )
    return found


def judge_kernel(kernel: NoiseKernel) -> list[str]:
    """Return warnings about the estimates of a kernel."""
    found, drift = [], float(np.mean(kernel.drift))
    if drift < _LEAST_DRIFT and np.max(_batch_fraction(kernel)) > _LEAST_FRACTION:
        found.append(
            f"The kernel has not converged: in the last window, the noise was {drift:.2g} times the "
            "noise in the previous window, so draws may be too narrow. Start closer to an optimum, or "
            "raise the steps of learn_kernel."
        )
    too_small, too_large = (float(np.max(error)) for error in kernel.variance_errors())
    if max(too_small, too_large) > _LARGEST_ERROR:
        found.append(
            "The noise of the gradients is correlated: in some directions, the variance of the draws "
            f"may be up to {too_large:.0%} too large, in others up to {too_small:.0%} too small. Use "
            "preconditioner='full', or a smaller noise_ratio."
        )
    found += judge_anchor(kernel)
    estimates = int(np.min(kernel.estimates))
    size = kernel.basis.num_needed(kernel.noise)
    if estimates < size:
        found.append(
            f"The full preconditioner needs at least {size} estimates of the noise, one per parameter, "
            f"in the last window of learn_kernel, got {estimates}: raise steps, or use "
            "preconditioner='diagonal'."
        )
    return found
