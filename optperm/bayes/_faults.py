"""Signs, in the states of constant SGD, that its steps do not sample."""

from __future__ import annotations

from typing import Any

import numpy as np

from optperm.bayes._kernel import NoiseKernel
from optperm.core.shardings import can_be_seen

_LARGEST_STABILITY, _LARGEST_UNEVEN = 0.5, 0.2
_LEAST_DRIFT, _LARGEST_CORRELATION = 0.7, 1.3

COLD = "The temperature is 0, at which no steps are taken: all draws of a chain are the same."


def are_seen(state: Any) -> bool:
    """Return whether Python can see the counts and the kernel of a state."""
    return can_be_seen(state.count) and can_be_seen(state.kernel.stability)


def judge_stability(kernel: NoiseKernel, steps: Any) -> list[str]:
    """Return whether steps are so long that they widen the variances."""
    stability = float(np.max(kernel.stability))
    if not (stability > _LARGEST_STABILITY and np.any(np.asarray(steps) > 0)):
        return []
    # Var = T / (N lambda) / (1 - h lambda / 2) along that direction
    ratio = 1 / max(1 - stability / 2, 1e-3)
    return [
        f"lambda_max(H A) is {stability:.3g}: in that direction the variance of the draws is about "
        f"{ratio:.2g} times what it should be. Lower stability, or take smaller batches."
    ]


def judge_mean(uneven: Any, estimates: Any) -> list[str]:
    """Return whether the batch's gradient often was not the mean of its examples' gradients."""
    if not np.max(np.asarray(uneven) / np.maximum(estimates, 1)) > _LARGEST_UNEVEN:
        return []
    return [
        "The gradient of the batch is not the mean of those of its examples: the loss sums, has "
        "weights, or mixes examples. Use jnp.mean, or estimator='two_batches' for a loss that mixes."
    ]


def judge_kernel(kernel: NoiseKernel) -> list[str]:
    """Return what is wrong with the estimates of the warm-up."""
    found, drift = [], float(np.mean(kernel.drift))
    if drift < _LEAST_DRIFT:
        found.append(
            f"The warm-up has not arrived: in its last window the noise was {drift:.2g} times the noise "
            "before, and draws are too narrow. Begin nearer to an optimum, or burn in longer."
        )
    correlation, estimates = float(np.max(kernel.correlation)), int(np.min(kernel.estimates))
    if isinstance(kernel.basis, tuple):
        # With few estimates, the steepest direction is the one whose noise was underestimated
        if correlation > _LARGEST_CORRELATION + 4 / np.sqrt(max(estimates, 1)):
            found.append(
                "The noise of the gradients is correlated: along the steepest direction a step's is "
                f"{correlation:.2g} times what the preconditioner takes it for, and the variance there "
                "too large by about that factor. Use preconditioner='full', or a smaller noise_ratio."
            )
    elif estimates < kernel.basis.shape[-1]:
        found.append(
            f"The full preconditioner has {estimates} estimates of the noise of "
            f"{kernel.basis.shape[-1]} params: raise freeze_after, or use preconditioner='diagonal'."
        )
    return found
