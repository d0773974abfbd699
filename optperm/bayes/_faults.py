"""Find evidence in the states of constant SGD that the steps do not sample the posterior."""

from __future__ import annotations

from typing import Any

import numpy as np

from optperm.bayes._kernel import NoiseKernel
from optperm.core.shardings import can_be_seen

_LARGEST_STABILITY, _LARGEST_UNEVEN = 0.5, 0.2
# Learning limits errors to a fifth, up to rounding, unless chains would then hardly move.
_LEAST_DRIFT, _LARGEST_ERROR = 0.7, 0.201

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


def judge_stability(stability: Any, steps: Any, lower: str) -> list[str]:
    """Return a warning if steps are so long that variances increase; `lower` names the remedy."""
    stability = float(np.max(stability))
    if not (stability > _LARGEST_STABILITY and np.any(np.asarray(steps) > 0)):
        return []
    # Var = T / (N lambda) / (1 - h lambda / 2) along that direction
    ratio = 1 / max(1 - stability / 2, 1e-3)
    return [
        f"lambda_max(H A) of the steps, corrected for momentum, is {stability:.3g}: along its "
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


def judge_kernel(kernel: NoiseKernel) -> list[str]:
    """Return warnings about the estimates of a kernel."""
    found, drift = [], float(np.mean(kernel.drift))
    if drift < _LEAST_DRIFT:
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
    estimates = int(np.min(kernel.estimates))
    size = kernel.basis.num_needed(kernel.noise)
    if estimates < size:
        found.append(
            f"The full preconditioner needs at least {size} estimates of the noise, one per parameter, "
            f"in the last window of learn_kernel, got {estimates}: raise steps, or use "
            "preconditioner='diagonal'."
        )
    return found
