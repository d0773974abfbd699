"""Relative changes of the draws' variances due to step sizes, batches and a kernel that was passed."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optperm.bayes._constant_sgd import ConstantSgdState
from optperm.bayes._langevin import SghmcState, SgldState
from optperm.bayes._samples import Samples

_LARGEST_BIAS = 0.05
# A fifth, as for a kernel that was learned, plus a tenth for the errors of both estimates
_LARGEST_KERNEL_BIAS = 0.3


def langevin_biases(
    values: np.ndarray, states: list[Any], samples: Samples
) -> tuple[float | None, float | None]:
    r"""Return relative increases of variances by steps and batches of SGLD or SGHMC, or None.

    With the mean reach r of the steps, the posterior's variance :math:`V_0` becomes
    :math:`V = V_0 / (1 - r / (2 V_0))`, so :math:`V_0 = \tfrac12 V (1 + \sqrt{1 - 2 r / V})`.

    Args:
      values: The draws, (chain, draw, entry).
      states: The states of samplers at the end.
      samples: The samples, for the steps of the draws and the noise of the batches.
    """
    langevin = [state for state in states if isinstance(state, SgldState | SghmcState)]
    if len(langevin) != 1 or not np.all(np.isfinite(values)):
        return None, None
    (state,) = langevin
    step_sizes, temperatures = numbers_of_draws(state, samples)
    if not (np.all(temperatures > 0) and np.any(step_sizes > 0)):
        return None, None
    variances = values.var(axis=(0, 1))
    variances = variances[variances > 0]
    steps = batches = None
    if variances.size:
        # The correction is largest where the variance is smallest
        v = float(np.min(variances))
        r = float(np.mean(state.reach(step_sizes, temperatures)))
        steps = 2 / (1 + np.sqrt(max(1 - 2 * r / v, 0.0))) - 1
    if samples.batch_noise is not None:
        # The injected noise has the variance 1 / gain, and R is the noise of a batch's gradient. Along
        # any direction, R is at most its maximum eigenvalue, which is at most its trace
        diagonal = (np.asarray(r, np.float64) for r in jax.tree.leaves(samples.batch_noise))
        norm = samples.batch_noise_norm
        largest = sum(float(r.sum()) for r in diagonal) if norm is None else float(norm)
        batches = float(np.mean(state.gain(step_sizes, temperatures))) * largest
    return steps, batches


def numbers_of_draws(state: Any, samples: Samples) -> tuple[np.ndarray, np.ndarray]:
    """Return the step size and the temperature of each draw; if not known, of the last step."""
    known = samples.step_sizes, samples.temperatures
    given = state.numbers() if known[0] is None or known[1] is None else known
    step_sizes, temperatures = (np.asarray(x, np.float64) for x in given)
    return step_sizes, temperatures


def is_given(state: Any) -> bool:
    """Return whether a state is of constant SGD with a kernel that was passed."""
    return isinstance(state, ConstantSgdState) and not np.any(np.asarray(state.freeze_after))


def measure_kernel_bias(states: list[Any], samples: Samples) -> float | None:
    r"""Return the mean relative increase of variances by noise that differs from the kernel's.

    This is the mean of :math:`h_i (C_{ii} - \Lambda_i) / s` over directions, because the noise of a
    step has the covariance :math:`(2 T / N) H + H (C - \Lambda) H / S`. It is None if no kernel was
    passed, C is not known or s is 0.

    Args:
      states: The states of samplers at the end.
      samples: The samples, with the noise of the batches.
    """
    batch_noise = samples.batch_noise
    if len(states) != 1 or not is_given(states[0]) or batch_noise is None:
        return None
    state = states[0]
    one = jax.tree.map(lambda leaf: leaf[0], state) if jnp.ndim(state.count) else state
    limit, temperature = (float(np.mean(x)) for x in numbers_of_draws(state, samples))
    size = float(one.kernel.batch_size)
    # s = 2 S T / N and c, on average over the draws
    scale = 2 * size / float(one.kernel.num_data) * temperature
    if not scale > 0:
        return None
    h = one.kernel.step_sizes(jnp.float32(scale), limit / one.kernel.max_stability)

    def excess(h: Any, r: Any, noise: Any) -> np.ndarray:
        h, r, noise = (np.asarray(x, np.float64) for x in (h, r, noise))
        # h (C - Lambda) / s
        return np.ravel(h * (size * r - noise) / scale)

    found = jax.tree.leaves(jax.tree.map(excess, h, batch_noise, one.kernel.noise))
    return float(np.mean(np.concatenate(found)))


def judge_biases(
    steps: float | None, batches: float | None, kernel: float | None, *, has_snapshots: bool
) -> list[str]:
    """Return a warning for each relative change of variances that is too large."""
    found = []
    variate = (
        "take a snapshot closer to the mode"
        if has_snapshots
        else "put optperm.svrg before the sampler"
    )
    if kernel is not None and abs(kernel) > _LARGEST_KERNEL_BIAS:
        found.append(
            "The noise of the batches differs from the kernel's, so variances are on average about "
            f"{abs(kernel):.0%} too {'large' if kernel > 0 else 'small'}. The kernel seems to "
            "belong to other data or another loss: learn a new kernel."
        )
    if steps is not None and steps > _LARGEST_BIAS:
        found.append(
            f"The length of the steps makes the variance of at least one parameter about {steps:.1%} "
            "too large, and can increase the variance in other directions even more: lower step_size, "
            "and draw longer chains."
        )
    if batches is not None and batches > _LARGEST_BIAS:
        found.append(
            "The noise of the batches may make the variance of a linear function of the params up to "
            f"{batches:.1%} too large: lower step_size, take larger batches, or {variate}."
        )
    return found
