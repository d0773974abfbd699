"""Diagnose draws from a posterior with checks and a report of the results."""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optperm.bayes._biases import (
    is_given,
    judge_biases,
    langevin_biases,
    measure_kernel_bias,
    numbers_of_draws,
)
from optperm.bayes._constant_sgd import ConstantSgdState
from optperm.bayes._convergence import convergence, r_hat_limits, r_hats, split_r_hats
from optperm.bayes._faults import COLD
from optperm.bayes._langevin import SghmcState, SgldState
from optperm.bayes._mandt_sgd import MandtSgdState
from optperm.bayes._samples import Samples, check_samples
from optperm.core.states import (
    SnapshotState,
    check_runs,
    find_running_states,
    find_states,
    find_warnings,
)
from optperm.evaluation import NOT_GRADIENT, NOT_MEAN

# NOISY samplers have a key, and each chain needs its own key.
NOISY = (ConstantSgdState, SgldState, SghmcState)
SAMPLERS = (*NOISY, MandtSgdState)
# The first two limits are from Vehtari et al., 2021; the third is for the split R-hat.
_LARGEST_R_HAT, _LEAST_ESS, _NOT_MIXED = 1.01, 400, 1.1
# With a larger R-hat, chains have not mixed, for any number of draws.
_FAR_FROM_MIXED = 1.3
_FEWEST, _LEAST_DRAWS = 4, 40
# If there are more entries, evenly spaced entries are judged.
_MOST_ENTRIES = 20_000
# A stationary chain does not become this many times wider in its second half, or this wide.
_DIVERGES, _WILD, _LEAST_HALF = 1e3, 1e15, 20

DIVERGED = "The chains diverge: take smaller steps, or check that the loss is finite."


class PosteriorReport(NamedTuple):
    r"""Diagnostics from `posterior_report`; None for a diagnostic that does not apply.

    Attributes:
      r_hat: The maximum rank-normalized split R-hat of any parameter.
      ess_bulk: The minimum bulk effective sample size.
      ess_tail: The minimum tail effective sample size, of the 5% and 95% quantiles.
      mcse: The maximum Monte Carlo standard error of a mean, divided by the standard deviation.
      stability: :math:`\lambda_{\max}(H A) (1 - \mu) / (1 + \mu)` of constant SGD.
      noise_ratio: The maximum ratio of the batches' noise to the injected noise, chosen by the warm-up.
      drift: The ratio of the noise in the last window of the warm-up to the noise in the window before.
      step_bias: The maximum relative increase of a variance due to the step size of SGLD or SGHMC.
      batch_bias: An upper bound on the relative increase, due to the noise of SGLD's or SGHMC's batches,
        of the variance of any linear function of the params. The bound uses the maximum eigenvalue of
        the noise's covariance if known, otherwise its trace.
      unmoved: The number of entries that have not moved in any chain.
      not_checked: Sentences about conditions that were not checked.
      warnings: Sentences about conditions that do not hold.
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

    def __str__(self) -> str:
        """Return a table of the figures, followed by the unchecked conditions and the warnings."""
        figures = {
            "R-hat, maximum": self.r_hat,
            "effective draws, bulk, minimum": self.ess_bulk,
            "effective draws, tail, minimum": self.ess_tail,
            "Monte Carlo error over sd": self.mcse,
            "lambda_max(H A)": self.stability,
            "noise of last two windows": self.drift,
            "variance added by the steps": self.step_bias,
            "variance batches add, at most": self.batch_bias,
            "entries that never moved": self.unmoved or None,
        }
        lines = [
            f"{name:30} {_rounded(value)}" for name, value in figures.items() if value is not None
        ]
        lines += [f"not checked: {text}" for text in self.not_checked]
        return "\n".join(lines + [f"warning: {text}" for text in self.warnings])


def posterior_report(
    samples: Samples, opt_state: Any = None, *, batch_noise: Any = None
) -> PosteriorReport:
    r"""Diagnose draws from their chains and optimizer states.

    The report warns if a rank-normalized split R-hat is above 1.01, an effective sample size is below
    400, chains diverge, or entries never move. For constant SGD, it warns if draws were taken before the
    end of the warm-up, if the noise was still falling at its end, if :math:`\lambda_{\max}(H A)`,
    corrected for momentum, is above 0.5, or if gradients are not the mean of the examples' gradients. It
    also warns if the noise is so correlated that the diagonal or scalar preconditioner changes a
    variance by more than a fifth. For a kernel that was passed, it warns if the noise in
    `samples.batch_noise`, from `optperm.bayes.sample`, changes variances by more than 30% on average.
    For SGLD and SGHMC, it warns if the step size increases a variance by more than 5%. In one dimension,
    the posterior's variance :math:`V_0` and the variance V of the draws have the exact relation

    .. math::
      V_0 = \frac{V}{2} \left(1 + \sqrt{1 - \frac{2 r}{V}}\right), \qquad
      r = \frac{\epsilon T}{2} \quad \text{or} \quad r = \frac{\eta T}{2 - \alpha}

    It also warns if the noise of the batches, with covariance R, can increase the variance of a linear
    function of the params by more than 5%. To first order, the relative increase is at most

    .. math::
      \frac{\epsilon N^2}{4 T} \lambda_{\max}(R) \quad \text{or} \quad
      \frac{\eta N^2}{2 \alpha T} \lambda_{\max}(R)

    If only the diagonal of R is known, the trace of R replaces the maximum eigenvalue. With a
    preconditioner, neither increase is checked. Step sizes and temperatures are means over the draws.

    The number of draws and their autocorrelation determine the maximum R-hat of chains that have mixed.
    Up to this limit, and up to 1.3, the report recommends more draws; above either, it states that the
    chains have not mixed. `print` shows the report, including the conditions that were not checked.

    Args:
      samples: The `Samples` of `optperm.bayes.draw_samples` or `optperm.bayes.sample`. For draws from
        elsewhere, of shape (4, 500, ...), pass
        `optperm.bayes.Samples(draws, draws[:, -1], (), 500, 1)`.
      opt_state: The optimizer states at the end, with or without an axis of chains; None for the states
        in `samples`.
      batch_noise: The diagonal of R, a tree like params, for SGLD and SGHMC; None for the noise in
        `samples`, which `optperm.bayes.sample` measures, with the maximum eigenvalue of R.

    Returns:
      A `PosteriorReport`.

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
      >>> report = optperm.bayes.posterior_report(samples)
      >>> print(report)  # doctest: +ELLIPSIS
      R-hat, maximum                 1.00...
      effective draws, bulk, minimum 3...
      effective draws, tail, minimum ...
      Monte Carlo error over sd      0.01...
      variance added by the steps    0.02...
      not checked: All chains started at the same point, so R-hat may miss other modes.
      not checked: The increase in variances due to the batches' noise (not known here).
      not checked: Whether the loss is a mean over examples, batches are drawn with replacement, ...
      >>> report.warnings
      ()

    Raises:
      TypeError: If `samples` is not a `Samples`.
      ValueError: If the sampler skipped steps that would diverge, or `samples` contains no draws.

    References:
      Vehtari et al., `Rank-Normalization, Folding, and Localization: An Improved R-hat
      <https://arxiv.org/abs/1903.08008>`_, 2021
    """
    check_samples(samples)
    if opt_state is not None:
        samples = samples._replace(last_opt_state=opt_state)
    if batch_noise is not None:
        samples = samples._replace(batch_noise=batch_noise, batch_noise_norm=None)
    return judge(samples, most_ranked=_MOST_ENTRIES)


def judge(samples: Samples, *, most_ranked: int) -> PosteriorReport:
    """Return the report on draws.

    Args:
      samples: The samples.
      most_ranked: The maximum number of entries whose draws are ranked, for R-hat and the other figures
        on mixing: the entries with the largest split R-hat without ranks.

    Raises:
      ValueError: If steps were not taken because they would diverge.
    """
    check_runs(samples.last_opt_state, SAMPLERS, method="The sampler")
    states: list[Any] = find_running_states(samples.last_opt_state, SAMPLERS)
    values = entries_of(samples.params)
    slowest = _find_slowest(values, most_ranked)
    figures = _measure(slowest)
    is_moving = ~find_unmoved(values)
    step_bias, batch_bias = langevin_biases(values, states, samples)
    kernel_bias = measure_kernel_bias(states, samples)
    kernels = [state.kernel for state in states if isinstance(state, ConstantSgdState)]
    one = kernels[0] if len(kernels) == 1 else None
    found = judge_chains(samples, values, states)
    # If chains diverge, their mixing is not judged
    if found[:1] != [DIVERGED]:
        found += _judge_mixing(slowest, figures, values.shape[2])
        has_snapshots = bool(find_states(samples.last_opt_state, SnapshotState))
        found += judge_biases(step_bias, batch_bias, kernel_bias, has_snapshots=has_snapshots)
    return PosteriorReport(
        *figures,
        stability=None if one is None else float(np.max(one.stability)),
        noise_ratio=None if one is None else float(np.max(one.noise_ratio)),
        drift=None if one is None else float(np.mean(one.drift)),
        step_bias=step_bias,
        batch_bias=batch_bias,
        unmoved=int(np.sum(~is_moving)) if values.shape[1] > 1 else 0,
        not_checked=tuple(describe_unchecked(samples, states, step_bias, batch_bias)),
        warnings=tuple(found),
    )


def warn_of_draws(samples: Samples) -> None:
    """Warn about draws that do not follow the posterior, unless the draws are traced.

    Raises:
      ValueError: If steps were not taken because they would diverge.
    """
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(samples)):
        return
    states: list[Any] = find_running_states(samples.last_opt_state, SAMPLERS)
    if states:
        values = entries_of(samples.params)
        found = judge_chains(samples, values, states)
        if not found and values.shape[1] >= _LEAST_DRAWS:
            largest = float(np.nanmax(split_r_hats(values), initial=0.0))
            if largest > _NOT_MIXED:
                moving = values[..., ~find_unmoved(values)]
                limits = r_hat_limits(moving, values.shape[2])
                found = [_describe_r_hat(split_r_hats(moving), limits)]
    else:
        found = [] if is_finite(samples.params) else [DIVERGED]
    for text in found:
        warnings.warn(text, stacklevel=3)


def _rounded(value: float) -> str:
    """Return a figure for the table: counts in full, floats with four digits, or three decimals."""
    if isinstance(value, int):
        return str(value)
    return f"{value:.4g}" if value >= 10 else f"{value:.3f}"


def _measure(values: np.ndarray) -> tuple[float, float, float, float]:
    """Return the maximum R-hat, the minimum ESS and the maximum error over finite entries that move."""
    sound = _sound(values)
    is_enough = sound.shape[1] >= _FEWEST and sound.shape[2] > 0
    return convergence(sound) if is_enough else (float("nan"),) * 4


def _sound(values: np.ndarray) -> np.ndarray:
    """Return the draws of the entries that move and are finite."""
    return values[..., ~find_unmoved(values) & np.all(np.isfinite(values), axis=(0, 1))]


def _find_slowest(values: np.ndarray, most: int) -> np.ndarray:
    """Return draws of the entries with the largest split R-hat without ranks, at most `most` entries."""
    if values.shape[2] <= most or values.shape[1] < _FEWEST:
        return values
    with np.errstate(invalid="ignore", over="ignore"):
        order = np.argsort(np.nan_to_num(split_r_hats(values)))
    return np.asarray(values[..., order[-most:]])


def _judge_mixing(
    values: np.ndarray, figures: tuple[float, float, float, float], entries: int
) -> list[str]:
    """Return warnings if chains have not mixed or have too few draws; `values` may omit entries."""
    r_hat, bulk, tail, _ = figures
    if values.shape[1] < _FEWEST:
        return [
            f"R-hat needs at least {_FEWEST} draws per chain, got {values.shape[1]}: draw more."
        ]
    if np.isnan([r_hat, bulk, tail]).any():
        return ["R-hat and effective sample sizes are not known: too few finite draws differ."]
    found = []
    if r_hat > _LARGEST_R_HAT:
        found.append(_describe_r_hat(*r_hats(_sound(values), entries)))
    if min(bulk, tail) < _LEAST_ESS:
        found.append(
            f"The minimum effective sample size is {min(bulk, tail):.3g}, below the {_LEAST_ESS} "
            "that means and quantiles need: draw more."
        )
    return found


def _describe_r_hat(found: np.ndarray, limits: np.ndarray) -> str:
    """Return the warning for too large R-hats of entries, which depends on the number of draws.

    Args:
      found: The R-hats, (entry,).
      limits: The limits that mixed chains seldom exceed, (entry,); infinite if draws are too few.
    """
    largest = float(np.nanmax(found))
    if largest <= _FAR_FROM_MIXED and not np.any(found > limits):
        return (
            f"The maximum split R-hat is {largest:.3g}: there are too few draws to tell whether the "
            "chains have mixed. Run longer chains."
        )
    return (
        f"The maximum split R-hat is {largest:.3g}, too large for chains that have mixed: the chains "
        "have not mixed, or are in several modes (a parameter and its mirror image). Compare their "
        "means."
    )


def judge_chains(samples: Samples, values: np.ndarray, states: list[Any]) -> list[str]:
    """Return warnings about chains, from the states of their samplers and the spread of draws.

    Args:
      samples: The samples.
      values: The draws of the samples, (chain, draw, entry).
      states: The states of samplers at the end.

    Raises:
      ValueError: If steps were not taken because they would diverge.
    """
    is_wild = not is_finite(samples.params) or bool(np.any(np.abs(values) > _WILD))
    found = [DIVERGED] if is_wild or _is_widening(values) else []
    found += find_warnings(samples.last_opt_state, samples.last_params)
    for state in states:
        if isinstance(state, ConstantSgdState | MandtSgdState):
            found += _judge_timing(state, values.shape[1] * int(samples.thinning))
    for text, holds in ((NOT_MEAN, samples.is_mean), (NOT_GRADIENT, samples.is_gradient)):
        found += [text] if holds is not None and not holds else []
    found += _judge_temperatures(samples) if COLD not in found else []
    if len(states) > 1:
        found.append(
            f"The optimizer has {len(states)} samplers for different params, and each ignores how its "
            "noise correlates with the others': use one sampler."
        )
    left_out = max((int(np.max(state.left_out)) for state in states), default=0)
    if left_out:
        found.append(
            f"In {left_out} of the steps of a chain, some entries of the gradients were not finite. "
            "These entries were left out, so the draws do not follow the posterior."
        )
    unmoved = find_unmoved(values) if values.shape[1] > 1 else np.zeros(0)
    if np.any(unmoved) and COLD not in found:
        found.append(
            f"{int(unmoved.sum())} of {unmoved.size} entries have not moved in any chain: check "
            "that their gradients are finite and not always 0, that sampling has begun, and that steps "
            "are not lost to rounding, with which large params need a constant subtracted or float64."
        )
    return found + _judge_rounding(samples)


def _judge_temperatures(samples: Samples) -> list[str]:
    """Return a warning if the temperature was 0 in the steps of some draws."""
    cold = np.mean(np.asarray(samples.temperatures) == 0) if samples.temperatures is not None else 0
    if not cold:
        return []
    return [
        f"The temperature is 0 in a fraction {cold:.2g} of the draws, which do not follow the "
        "posterior: leave these draws out, or pass temperatures above 0."
    ]


def _judge_timing(state: ConstantSgdState | MandtSgdState, drawn: int) -> list[str]:
    """Return a warning if draws were taken before the sampler sampled, or while it was learning."""
    before = int(np.max(state.count)) - drawn
    idle = int(np.max(np.asarray(state.count) - np.asarray(state.steps)))
    if not np.any(np.asarray(state.steps)) and np.all(np.asarray(state.count) > 0):
        return [
            "No step has sampled: all were burn-in, or the noise and the curvature are still unknown. "
            "Check that gradients are finite, and draw with a longer burn_in."
        ]
    if isinstance(state, ConstantSgdState):
        learning = int(np.max(state.freeze_after)) - before
        if learning > 0:
            return [
                f"The warm-up was still learning when the draws began (steps left: {learning}): "
                "pass burn_in=None to draw_samples."
            ]
    if idle > before:
        return [
            f"Some draws come from steps that did not sample: there are {idle} such steps in all, at "
            f"most {before} of them before the draws. Pass a longer burn_in."
        ]
    return []


def _judge_rounding(samples: Samples) -> list[str]:
    """Return a warning if the spacing of the params is too coarse for the draws."""
    pairs = zip(_floating(samples.params), _floating(samples.last_params), strict=False)
    for draws, params in pairs:
        with np.errstate(invalid="ignore", over="ignore"):
            deviation = np.asarray(draws, np.float64).std(axis=(0, 1))
            is_coarse = np.any((deviation < 2 * _spacing(draws, params.dtype)) & (deviation > 0))
        if is_coarse:
            return [
                f"Draws of some params vary by less than twice the spacing of {params.dtype} numbers: "
                + _finer(params.dtype)
            ]
    return []


def _spacing(draws: Any, dtype: Any) -> np.ndarray:
    """Return the spacing of the numbers of a dtype at the mean magnitude of each entry's draws."""
    size = np.abs(np.asarray(draws, np.float64)).mean(axis=(0, 1))
    exponents = np.floor(np.log2(np.maximum(size, 1e-30)))
    return np.asarray(np.exp2(exponents) * float(jnp.finfo(dtype).eps))


def _finer(dtype: Any) -> str:
    """Return advice for params whose dtype is too coarse."""
    if jnp.finfo(dtype).bits > 16:
        return "subtract a constant from these params, and add it in the loss, or use float64."
    return "keep the params in float32, and cast them in the loss."


def describe_unchecked(
    samples: Samples, states: list[Any], step_bias: float | None, batch_bias: float | None
) -> list[str]:
    """Return the conditions that neither draws nor states can show."""
    found = []
    starts = [np.asarray(leaf, np.float64) for leaf in _floating(samples.starts)]
    if any(len(x) > 1 for x in starts) and all(np.all(x == x[:1]) for x in starts):
        found.append("All chains started at the same point, so R-hat may miss other modes.")
    if all(len(leaf) == 1 for leaf in _floating(samples.params)):
        found.append("Other modes: with one chain, R-hat compares only the halves of this chain.")
    if any(map(is_given, states)):
        what = "noise and curvature" if samples.batch_noise is None else "curvature"
        found.append(f"Whether the passed kernel matches the {what} of this loss on these data.")
    if not states:
        found.append(
            "Whether the steps sample this posterior: the states of the sampler are missing."
        )
    if sum(jnp.size(leaf[0, 0]) for leaf in _floating(samples.params)) > _MOST_ENTRIES:
        found.append(f"All entries except evenly spaced entries, about {_MOST_ENTRIES} at most.")
    langevin = [state for state in states if isinstance(state, SgldState | SghmcState)]
    is_moving = [np.any(numbers_of_draws(state, samples)[0]) for state in langevin]
    if any(
        np.any(state.count) and not moves for state, moves in zip(langevin, is_moving, strict=True)
    ):
        found.append(
            "The increase in variances due to steps and batches (not checked with a preconditioner)."
        )
    elif langevin:
        if step_bias is None:
            found.append("The increase in variances due to the step size (not known here).")
        if batch_bias is None:
            found.append("The increase in variances due to the batches' noise (not known here).")
        elif samples.batch_noise_norm is None:
            found.append(
                "The maximum eigenvalue of the noise of the batches: its trace is used as a bound."
            )
    conditions = []
    if samples.is_mean is None:
        conditions += ["the loss is a mean over examples", "batches are drawn with replacement"]
    if samples.is_gradient is None:
        conditions.append("the sampler gets the gradient of the loss")
    conditions.append("no transformation changes the updates of the sampler")
    *others, last = conditions
    return [*found, f"Whether {', '.join(others)}{', and ' if others else ''}{last}."]


def entries_of(draws: Any) -> np.ndarray:
    """Return draws as (chain, draw, entry) in float64, with about `_MOST_ENTRIES` entries at most."""
    leaves = _floating(draws)
    if not leaves or any(jnp.ndim(leaf) < 2 for leaf in leaves):
        raise ValueError(
            "samples contains no draws in arrays (chain, draw, ...) of a real floating dtype: pass "
            "the result of draw_samples."
        )
    stride = -(-sum(int(np.prod(leaf.shape[2:])) for leaf in leaves) // _MOST_ENTRIES)
    parts = [np.asarray(leaf).reshape(*leaf.shape[:2], -1)[..., ::stride] for leaf in leaves]
    return np.concatenate([part.astype(np.float64) for part in parts], axis=-1)


def find_unmoved(values: np.ndarray) -> np.ndarray:
    """Return whether each entry is the same in all draws of each chain, (entry,)."""
    return np.all(values == values[:, :1], axis=(0, 1))


def is_finite(tree: Any) -> bool:
    """Return whether all floating entries of a tree are finite."""
    return all(bool(jnp.all(jnp.isfinite(leaf))) for leaf in _floating(tree))


def _is_widening(values: np.ndarray) -> bool:
    """Return whether the second half of a chain is far wider than the first, as if it diverged."""
    half = values.shape[1] // 2
    if half < _LEAST_HALF:
        return False
    with np.errstate(over="ignore", invalid="ignore"):
        distances = np.abs(values - np.median(values[:, :half], axis=1, keepdims=True))
        early, late = distances[:, :half].max(axis=1), distances[:, half:].max(axis=1)
        return bool(np.any((late > _DIVERGES * early) & (early > 0)))


def _floating(tree: Any) -> list[Any]:
    return [x for x in jax.tree.leaves(tree) if jnp.issubdtype(jnp.result_type(x), jnp.floating)]
