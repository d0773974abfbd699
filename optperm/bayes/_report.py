"""The report on draws of a posterior: figures, warnings, and what was not checked."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np

from optperm.bayes import _diagnostics as diagnostics
from optperm.bayes._constant_sgd import ConstantSgdState
from optperm.bayes._convergence import convergence, split_r_hats
from optperm.bayes._langevin import SghmcState, SgldState
from optperm.bayes._mandt_sgd import MandtSgdState
from optperm.core.states import check_runs, find_running_states

if TYPE_CHECKING:
    from optperm.bayes._sampling import Samples

# NOISY samplers have a key, and every chain needs a key of its own.
NOISY = (ConstantSgdState, SgldState, SghmcState)
SAMPLERS = (*NOISY, MandtSgdState)
# Vehtari et al., 2021; and the split R-hat above which even short runs have not mixed.
_LARGEST_R_HAT, _LEAST_ESS, _NOT_MIXED = 1.01, 400, 1.1
_FEWEST, _LEAST_DRAWS = 4, 40


class PosteriorReport(NamedTuple):
    r"""The figures of `posterior_report`; None where a figure does not apply.

    Attributes:
      r_hat: The maximum rank-normalized split R-hat of any parameter.
      ess_bulk: The minimum bulk effective sample size.
      ess_tail: The minimum tail effective sample size, of the 5 % and 95 % quantiles.
      mcse: The maximum Monte Carlo error of a mean, over the standard deviation.
      stability: :math:`\lambda_{\max}(H A)`, of constant SGD times (1 - mu) / (1 + mu).
      noise_ratio: The maximum ratio of the batches' noise to the injected noise, chosen by the warm-up.
      drift: The noise in the last window of the warm-up over the noise in the window before.
      step_bias: The maximum fraction by which the length of SGLD's or SGHMC's steps widens a variance.
      batch_bias: The maximum fraction by which the noise of SGLD's or SGHMC's batches widens a variance.
      unmoved: Number of entries that have not moved in any chain.
      not_checked: Sentences on conditions that were not checked.
      warnings: Sentences on conditions that do not hold.
    """

    r_hat: float
    ess_bulk: float
    ess_tail: float
    mcse: float
    stability: float | None
    noise_ratio: float | None
    drift: float | None
    step_bias: float | None
    batch_bias: float | None
    unmoved: int
    not_checked: tuple[str, ...]
    warnings: tuple[str, ...]


def posterior_report(samples: Any, opt_state: Any = None) -> PosteriorReport:
    r"""Print and return whether draws can be trusted, from the chains and their optimizer states.

    The report warns if a rank-normalized split R-hat is above 1.01, an effective sample size is below
    400, chains diverge, or entries never move. Of constant SGD it warns if draws were taken before the
    end of the warm-up, if the noise was still falling there, if :math:`\lambda_{\max}(H A)` is above
    0.5, if gradients are not the mean of the examples' gradients, or if the noise is correlated under
    the diagonal preconditioner. Of SGLD and SGHMC it warns if the length of the steps, to first order

    .. math::
      \frac{\epsilon T}{4 \operatorname{Var} \theta_k} \quad \text{or} \quad
      \frac{\eta T}{2 (2 - \alpha) \operatorname{Var} \theta_k}

    or the noise of the batches, of covariance R,

    .. math::
      \frac{\epsilon N^2 M_{kk} R_{kk}}{4 T} \quad \text{or} \quad \frac{\eta N^2 R_{kk}}{2 \alpha T}

    widens a variance by more than 5 %. The report also prints what was not checked.

    Args:
      samples: The `Samples` of `optperm.bayes.draw_samples` or `optperm.bayes.sample`.
      opt_state: The optimizer states at the end, with or without an axis of chains; None for those in
        `samples`.

    Returns:
      A `PosteriorReport`, whose figures are printed and whose warnings are given as `UserWarning`.

    Example:
      >>> import jax, jax.numpy as jnp, optperm
      >>> tx = optperm.sgld(1e-4, num_data=1000)
      >>> def step(params, opt_state, key):  # the posterior is N(0, 1/1000)
      ...     updates, opt_state = tx.update(params, opt_state, params)
      ...     return params + updates, opt_state
      >>> w = jnp.zeros(())
      >>> samples = optperm.bayes.draw_samples(
      ...     step, w, tx.init(w), jax.random.key(0), num_chains=4, num_draws=1000, thinning=100
      ... )
      >>> report = optperm.bayes.posterior_report(samples)  # doctest: +ELLIPSIS
      R-hat, maximum                 1.00...
      effective draws, bulk, minimum 3...
      effective draws, tail, minimum ...
      Monte Carlo error over sd      0.01...
      variance added by the steps    0.02...
      not checked: All chains began at one point, so R-hat cannot tell of other modes.
      not checked: The variance that the noise of the batches adds: no gradients of examples were seen.
      not checked: That batches are drawn with replacement, and nothing changes updates behind.
      >>> report.warnings
      ()

    Raises:
      ValueError: If steps were not taken because they would diverge, or `samples` holds no draws.

    References:
      Vehtari et al., `Rank-Normalization, Folding, and Localization: An Improved R-hat
      <https://arxiv.org/abs/1903.08008>`_, 2021
    """
    report = _report(samples, samples.last_opt_state if opt_state is None else opt_state)
    lines = {
        "R-hat, maximum": report.r_hat,
        "effective draws, bulk, minimum": report.ess_bulk,
        "effective draws, tail, minimum": report.ess_tail,
        "Monte Carlo error over sd": report.mcse,
        "lambda_max(H A)": report.stability,
        "noise of last two windows": report.drift,
        "variance added by the steps": report.step_bias,
        "variance added by the batches": report.batch_bias,
        "entries that never moved": report.unmoved or None,
    }
    for name, value in lines.items():
        if value is not None:
            print(f"{name:30} {value:.4g}" if value >= 10 else f"{name:30} {value:.3f}")
    for text in report.not_checked:
        print(f"not checked: {text}")
    for warning in report.warnings:
        warnings.warn(warning, stacklevel=2)
    return report


def _report(samples: Samples, opt_state: Any) -> PosteriorReport:
    values = diagnostics.entries_of(samples.params)
    is_moving = ~diagnostics.find_unmoved(values)
    sound = values[..., is_moving & np.all(np.isfinite(values), axis=(0, 1))]
    is_enough = sound.shape[1] >= _FEWEST and sound.shape[2] > 0
    r_hat, bulk, tail, mcse = convergence(sound) if is_enough else (float("nan"),) * 4
    check_runs(opt_state, SAMPLERS, method="The sampler")
    states: list[Any] = find_running_states(opt_state, SAMPLERS)
    found = diagnostics.judge_chains(samples, values, states)
    # Chains that diverge, or of so few draws, are not judged by their mixing
    if values.shape[1] < _FEWEST:
        found.append(f"There are {values.shape[1]} draws a chain, and R-hat needs {_FEWEST}.")
    elif is_enough and found[:1] != [diagnostics.DIVERGED]:
        if r_hat > _LARGEST_R_HAT:
            found.append(diagnostics.describe_r_hat(r_hat))
        if min(bulk, tail) < _LEAST_ESS:
            found.append(
                f"The minimum effective sample size is {min(bulk, tail):.3g}, below the {_LEAST_ESS} "
                "that means and quantiles need: draw more."
            )
    langevin: list[Any] = find_running_states(opt_state, (SgldState, SghmcState))
    biases = diagnostics.LangevinBiases(None, None, [], [])
    if len(langevin) == 1 and diagnostics.is_finite(samples.params):
        biases = diagnostics.langevin_biases(values, langevin[0])
    kernels = [state.kernel for state in find_running_states(opt_state, ConstantSgdState)]
    one = kernels[0] if len(kernels) == 1 else None
    return PosteriorReport(
        r_hat,
        bulk,
        tail,
        mcse,
        stability=None if one is None else float(np.max(one.stability)),
        noise_ratio=None if one is None else float(np.max(one.noise_ratio)),
        drift=None if one is None else float(np.mean(one.drift)),
        step_bias=biases.steps,
        batch_bias=biases.batches,
        unmoved=int(np.sum(~is_moving)) if values.shape[1] > 1 else 0,
        not_checked=(
            *diagnostics.describe_unchecked(samples, bool(states)),
            *biases.not_checked,
            "That batches are drawn with replacement, and nothing changes updates behind.",
        ),
        warnings=(*found, *biases.warnings),
    )


def warn_of_draws(samples: Samples) -> None:
    """Warn of draws that do not sample, unless they are traced.

    Raises:
      ValueError: If steps were not taken because they would diverge.
    """
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(samples)):
        return
    states: list[Any] = find_running_states(samples.last_opt_state, SAMPLERS)
    if states:
        values = diagnostics.entries_of(samples.params)
        found = diagnostics.judge_chains(samples, values, states)
        if not found and values.shape[1] >= _LEAST_DRAWS:
            largest = float(np.nanmax(split_r_hats(values), initial=0.0))
            found = [diagnostics.describe_r_hat(largest)] if largest > _NOT_MIXED else []
    else:
        found = [] if diagnostics.is_finite(samples.params) else [diagnostics.DIVERGED]
    for text in found:
        warnings.warn(text, stacklevel=3)
