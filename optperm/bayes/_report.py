"""Diagnose draws from a posterior with checks and a report of the results."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optperm.bayes._chains import SAMPLERS, Samples, check_samples
from optperm.bayes._constant_sgd import ConstantSgdState
from optperm.bayes._convergence import convergence, r_hat_limits, r_hats, split_r_hats
from optperm.bayes._faults import COLD
from optperm.bayes._kernel import NoiseKernel
from optperm.bayes._langevin import SghmcState, SgldState
from optperm.bayes._mandt_sgd import MandtSgdState
from optperm.core.states import (
    SnapshotState,
    check_runs,
    find_running_states,
    find_states,
    find_warnings,
)
from optperm.evaluation import NOT_GRADIENT, NOT_MEAN

# The first two limits are from Vehtari et al., 2021; the third is for the split R-hat.
_LARGEST_R_HAT, _LEAST_ESS, _NOT_MIXED = 1.01, 400, 1.1
# With a larger R-hat, chains have not mixed, for any number of draws.
_FAR_FROM_MIXED = 1.3
_FEWEST, _LEAST_DRAWS = 4, 40
# If there are more entries, evenly spaced entries are judged.
_MOST_ENTRIES = 20_000
# A stationary chain does not become this many times wider in its second half, or this wide.
_DIVERGES, _WILD, _LEAST_HALF = 1e3, 1e15, 20

_LARGEST_BIAS = 0.05
# A fifth, as for a kernel that was learned, plus a tenth for the errors of both estimates
_LARGEST_KERNEL_BIAS = 0.3

# Larger batches are advised if they make the slowest steps this many times as long.
_WORTHWHILE = 2.0

# A judge returns sentences about conditions that do not hold.
Judge = Callable[["Evidence"], list[str]]

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
      noise_left: The maximum fraction of the batches' noise that control variates leave.
      distance: The maximum distance between the mean of a chain's draws and the optimum of its control
        variates, in standard deviations of the draws.
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
    noise_left: float | None
    distance: float | None
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
            "noise left by control variates": self.noise_left,
            "sds from their optimum, maximum": self.distance,
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
    evidence = Evidence(samples, most_ranked)
    found = list_warnings(evidence)
    one: Any = evidence.kernels[0] if len(evidence.kernels) == 1 else None
    anchored = one is not None and bool(one.anchor)
    return PosteriorReport(
        *evidence.figures,
        stability=None if one is None else float(np.max(one.stability)),
        noise_ratio=None if one is None else float(np.max(one.noise_ratio)),
        noise_left=None if not anchored else float(np.max(one.noise_left)),
        distance=None if not anchored else _distance(one, samples),
        drift=None if one is None else float(np.mean(one.drift)),
        step_bias=evidence.langevin_biases[0],
        batch_bias=evidence.langevin_biases[1],
        unmoved=int(np.sum(evidence.unmoved)),
        not_checked=tuple(describe_unchecked(evidence)),
        warnings=tuple(found),
    )


def _distance(kernel: NoiseKernel, samples: Samples) -> float:
    """Return the maximum of |mean - theta*| / sd over the chains and entries of the draws."""

    def of_leaf(draws: Any, at: Any) -> float:
        draws, at = np.asarray(draws, np.float64), np.asarray(at, np.float64)
        deviation = draws.std(axis=(0, 1))
        distance = np.abs(draws.mean(axis=1) - at)
        with np.errstate(divide="ignore", invalid="ignore"):
            return float(np.max(np.where(deviation > 0, distance / deviation, 0.0), initial=0.0))

    return max(jax.tree.leaves(jax.tree.map(of_leaf, samples.params, kernel.anchor.params)))


def warn_of_draws(samples: Samples) -> None:
    """Warn about draws that do not follow the posterior, unless the draws are traced.

    Raises:
      ValueError: If steps were not taken because they would diverge.
    """
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(samples)):
        return
    evidence = Evidence(samples, _MOST_ENTRIES)
    if evidence.states:
        found = list_warnings(evidence, is_quick=True)
        if not found and evidence.values.shape[1] >= _LEAST_DRAWS:
            largest = float(np.nanmax(split_r_hats(evidence.values), initial=0.0))
            if largest > _NOT_MIXED:
                moving = evidence.values[..., ~find_unmoved(evidence.values)]
                limits = r_hat_limits(moving, evidence.values.shape[2])
                found = [_describe_r_hat(split_r_hats(moving), limits, "")]
    else:
        found = [] if is_finite(samples.params) else [DIVERGED]
    for text in found:
        warnings.warn(text, stacklevel=3)


@dataclasses.dataclass(frozen=True)
class Evidence:
    """The draws that are judged, and figures of the draws, which are computed when a judge needs them.

    Attributes:
      samples: The samples.
      most_ranked: The maximum number of entries whose draws are ranked, for R-hat and the other figures
        on mixing: the entries with the largest split R-hat without ranks.
    """

    samples: Samples
    most_ranked: int

    @functools.cached_property
    def states(self) -> list[Any]:
        """The states of samplers at the end.

        Raises:
          ValueError: If steps were not taken because they would diverge.
        """
        check_runs(self.samples.last_opt_state, SAMPLERS, method="The sampler")
        return find_running_states(self.samples.last_opt_state, SAMPLERS)

    @functools.cached_property
    def values(self) -> np.ndarray:
        """The draws of the params, (chain, draw, entry)."""
        return entries_of(self.samples.params)

    @functools.cached_property
    def unmoved(self) -> np.ndarray:
        """Whether each entry is the same in all draws of each chain, (entry,)."""
        return find_unmoved(self.values) & (self.values.shape[1] > 1)

    @functools.cached_property
    def slowest(self) -> np.ndarray:
        """The draws of the entries that have mixed least, at most `most_ranked` entries."""
        return _find_slowest(self.values, self.most_ranked)

    @functools.cached_property
    def figures(self) -> tuple[float, float, float, float]:
        """The maximum R-hat, the minimum ESS of the bulk and the tail, and the maximum error."""
        return _measure(self.slowest)

    @functools.cached_property
    def kernels(self) -> list[Any]:
        """The kernels of constant SGD."""
        return [state.kernel for state in self.states if isinstance(state, ConstantSgdState)]

    @functools.cached_property
    def langevin_biases(self) -> tuple[float | None, float | None]:
        """The relative increases of variances by the steps and the batches of SGLD or SGHMC."""
        return langevin_biases(self.values, self.states, self.samples)

    @functools.cached_property
    def kernel_bias(self) -> float | None:
        """The mean relative increase of variances by noise that differs from the kernel's."""
        return measure_kernel_bias(self.states, self.samples)


def list_warnings(evidence: Evidence, *, is_quick: bool = False) -> list[str]:
    """Return what the judges say.

    Args:
      evidence: The draws.
      is_quick: Whether to leave out the judges of stationary chains, which take longer.
    """
    found = dict[str, list[str]]()
    for name, judge in JUDGES:
        is_left_out = is_quick or bool(found.get("divergence"))
        if not (is_left_out and name in _OF_STATIONARY_CHAINS):
            found[name] = judge(evidence)
    return [text for texts in found.values() for text in texts]


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


def _judge_mixing(evidence: Evidence) -> list[str]:
    """Judge R-hat and effective sample sizes."""
    texts = _describe_larger_batches(evidence)
    return describe_mixing(evidence.slowest, evidence.figures, evidence.values.shape[2], texts)


def describe_mixing(
    values: np.ndarray,
    figures: tuple[float, float, float, float],
    entries: int,
    larger_batches: str = "",
) -> list[str]:
    """Return warnings if chains have not mixed or have too few draws.

    Args:
      values: The draws of entries that have mixed least.
      figures: Their maximum R-hat, minimum ESS of the bulk and the tail, and maximum error.
      entries: The number of all entries.
      larger_batches: What larger batches would gain, a sentence, or "".
    """
    r_hat, bulk, tail, _ = figures
    if values.shape[1] < _FEWEST:
        return [
            f"R-hat needs at least {_FEWEST} draws per chain, got {values.shape[1]}: draw more."
        ]
    if np.isnan([r_hat, bulk, tail]).any():
        return ["R-hat and effective sample sizes are not known: too few finite draws differ."]
    found = []
    if r_hat > _LARGEST_R_HAT:
        found.append(_describe_r_hat(*r_hats(_sound(values), entries), larger_batches))
    if min(bulk, tail) < _LEAST_ESS:
        found.append(
            f"The minimum effective sample size is {min(bulk, tail):.3g}, below the {_LEAST_ESS} "
            f"that means and quantiles need: draw more.{larger_batches}"
        )
    return found


def _describe_larger_batches(evidence: Evidence) -> str:
    """Return what larger batches gain if the noise of the batches limits the slowest steps, or ""."""
    if len(evidence.states) != 1 or not evidence.kernels:
        return ""
    kernel, _, scale, limit = _chain_of(evidence.states[0], evidence.samples)
    factor = float(kernel.noise_over_stability(scale, limit))
    # The number of effective draws is proportional to S, and 400 are enough
    _, bulk, tail, _ = evidence.figures
    factor = min(factor, max(_WORTHWHILE, _LEAST_ESS / max(min(bulk, tail), 1.0)))
    size = int(kernel.batch_size)
    best = min(int(np.ceil(size * factor)), int(kernel.num_data))
    if best < _WORTHWHILE * size:
        return ""
    return (
        f" The noise of the batches limits the slowest steps: with batches of {best} examples instead "
        f"of {size}, these steps are {best / size:.2g} times as long."
    )


def _describe_r_hat(found: np.ndarray, limits: np.ndarray, larger_batches: str) -> str:
    """Return the warning for too large R-hats of entries, which depends on the number of draws.

    Args:
      found: The R-hats, (entry,).
      limits: The limits that mixed chains seldom exceed, (entry,); infinite if draws are too few.
      larger_batches: What larger batches would gain, a sentence, or "".
    """
    largest = float(np.nanmax(found))
    if largest <= _FAR_FROM_MIXED and not np.any(found > limits):
        return (
            f"The maximum split R-hat is {largest:.3g}: there are too few draws to tell whether the "
            f"chains have mixed. Run longer chains.{larger_batches}"
        )
    return (
        f"The maximum split R-hat is {largest:.3g}, too large for chains that have mixed: the chains "
        "have not mixed, or are in several modes (a parameter and its mirror image). Compare their "
        "means."
    )


def _judge_divergence(evidence: Evidence) -> list[str]:
    """Judge the spread of the draws."""
    draws, values = evidence.samples.params, evidence.values
    is_wild = not is_finite(draws) or bool(np.any(np.abs(values) > _WILD))
    return [DIVERGED] if is_wild or _is_widening(values) else []


def _judge_states(evidence: Evidence) -> list[str]:
    """Return the warnings of the states, which include states before a sampler."""
    return find_warnings(evidence.samples.last_opt_state, evidence.samples.last_params)


def _judge_conditions(evidence: Evidence) -> list[str]:
    """Return the conditions on the loss and on the gradient that did not hold before the first step."""
    samples = evidence.samples
    conditions = (NOT_MEAN, samples.is_mean), (NOT_GRADIENT, samples.is_gradient)
    return [text for text, holds in conditions if holds is not None and not holds]


def _judge_temperatures(evidence: Evidence) -> list[str]:
    """Judge the temperatures of the draws, unless the state of a sampler is cold."""
    temperatures = evidence.samples.temperatures
    cold = 0.0 if temperatures is None else float(np.mean(np.asarray(temperatures) == 0))
    if not cold or COLD in _judge_states(evidence):
        return []
    return [
        f"The temperature is 0 in a fraction {cold:.2g} of the draws, which do not follow the "
        "posterior: leave these draws out, or pass temperatures above 0."
    ]


def _judge_number_of_samplers(evidence: Evidence) -> list[str]:
    """Warn of several samplers."""
    if len(evidence.states) <= 1:
        return []
    return [
        f"The optimizer has {len(evidence.states)} samplers for different params, and each ignores how "
        "its noise correlates with the others': use one sampler."
    ]


def _judge_gradients(evidence: Evidence) -> list[str]:
    """Warn of entries with nonfinite gradients."""
    left_out = max((int(np.max(state.left_out)) for state in evidence.states), default=0)
    if not left_out:
        return []
    return [
        f"In {left_out} of the steps of a chain, some entries of the gradients were not finite. "
        "These entries were left out, so the draws do not follow the posterior."
    ]


def _judge_motion(evidence: Evidence) -> list[str]:
    """Warn of entries that have not moved, unless the temperature explains it."""
    unmoved = evidence.unmoved
    if not np.any(unmoved) or COLD in _judge_states(evidence):
        return []
    return [
        f"{int(unmoved.sum())} of {unmoved.size} entries have not moved in any chain: check "
        "that their gradients are finite and not always 0, that sampling has begun, and that steps "
        "are not lost to rounding, with which large params need a constant subtracted or float64."
    ]


def _judge_timing(evidence: Evidence) -> list[str]:
    """Judge whether all draws come from steps that sampled with a constant kernel."""
    drawn = evidence.values.shape[1] * int(evidence.samples.thinning)
    return [
        text
        for state in evidence.states
        if isinstance(state, MandtSgdState)
        for text in _describe_timing(state, drawn)
    ]


def _describe_timing(state: MandtSgdState, drawn: int) -> list[str]:
    """Return a warning if draws were taken before the sampler sampled, or while it was learning."""
    before = int(np.max(state.count)) - drawn
    idle = int(np.max(np.asarray(state.count) - np.asarray(state.steps)))
    if not np.any(np.asarray(state.steps)) and np.all(np.asarray(state.count) > 0):
        return [
            "No step has sampled: all were burn-in, or the noise and the curvature are still unknown. "
            "Check that gradients are finite, and draw with a longer burn_in."
        ]
    if idle > before:
        return [
            f"Some draws come from steps that did not sample: there are {idle} such steps in all, at "
            f"most {before} of them before the draws. Pass a longer burn_in."
        ]
    return []


def _judge_rounding(evidence: Evidence) -> list[str]:
    """Return a warning if the spacing of the params is too coarse for the draws."""
    samples = evidence.samples
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


def describe_unchecked(evidence: Evidence) -> list[str]:
    """Return the conditions that neither draws nor states can show."""
    samples, states, found = evidence.samples, evidence.states, []
    step_bias, batch_bias = evidence.langevin_biases
    starts = [np.asarray(leaf, np.float64) for leaf in _floating(samples.starts)]
    if any(len(x) > 1 for x in starts) and all(np.all(x == x[:1]) for x in starts):
        found.append("All chains started at the same point, so R-hat may miss other modes.")
    if all(len(leaf) == 1 for leaf in _floating(samples.params)):
        found.append("Other modes: with one chain, R-hat compares only the halves of this chain.")
    if any(map(is_given, states)) and not samples.is_learned:
        what = "noise and curvature" if samples.batch_noise is None else "curvature"
        found.append(f"Whether the kernel matches the {what} of this loss on these data.")
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
    return isinstance(state, ConstantSgdState)


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
    kernel, size, scale, limit = _chain_of(states[0], samples)
    if not scale > 0:
        return None
    h = kernel.step_sizes(jnp.float32(scale), jnp.float32(limit) / kernel.max_stability)

    def excess(h: Any, r: Any, noise: Any) -> np.ndarray:
        h, r, noise = (np.asarray(x, np.float64) for x in (h, r, noise))
        # h (C - Lambda) / s
        return np.ravel(h * (size * r - noise) / scale)

    found = jax.tree.leaves(jax.tree.map(excess, h, batch_noise, kernel.noise))
    return float(np.mean(np.concatenate(found)))


def _chain_of(state: Any, samples: Samples) -> tuple[NoiseKernel, float, float, float]:
    """Return the kernel of the first chain of constant SGD, S, and the means of s and c over draws."""
    kernel = state.kernel
    if jnp.ndim(state.count):
        kernel = jax.tree.map(lambda leaf: leaf[0], kernel)
    limit, temperature = (float(np.mean(x)) for x in numbers_of_draws(state, samples))
    size = float(kernel.batch_size)
    # s = 2 S T / N
    s = 2 * size / float(kernel.num_data) * temperature
    return kernel.tempered(temperature), size, s, limit


def _judge_kernel(evidence: Evidence) -> list[str]:
    """Judge whether the noise of the batches is the kernel's."""
    bias = evidence.kernel_bias
    if bias is None or abs(bias) <= _LARGEST_KERNEL_BIAS:
        return []
    return [
        "The noise of the batches differs from the kernel's, so variances are on average about "
        f"{abs(bias):.0%} too {'large' if bias > 0 else 'small'}. The kernel seems to "
        "belong to other data or another loss: learn a new kernel."
    ]


def _judge_steps(evidence: Evidence) -> list[str]:
    """Judge the increase of variances by the steps of SGLD or SGHMC."""
    bias, _ = evidence.langevin_biases
    if bias is None or bias <= _LARGEST_BIAS:
        return []
    return [
        f"The length of the steps makes the variance of at least one parameter about {bias:.1%} "
        "too large, and can increase the variance in other directions even more: lower step_size, "
        "and draw longer chains."
    ]


def _judge_batches(evidence: Evidence) -> list[str]:
    """Judge the increase of variances by the batches of SGLD or SGHMC, proportional to 1 / S."""
    _, bias = evidence.langevin_biases
    if bias is None or bias <= _LARGEST_BIAS:
        return []
    has_snapshots = bool(find_states(evidence.samples.last_opt_state, SnapshotState))
    variate = (
        "take a snapshot closer to the mode"
        if has_snapshots
        else "pass control_variates=True to optperm.bayes.sample"
    )
    return [
        "The noise of the batches may make the variance of a linear function of the params up to "
        f"{bias:.1%} too large: lower step_size, take batches {bias / _LARGEST_BIAS:.2g} times as "
        f"large, or {variate}."
    ]


# The judges in the order of their warnings. If chains diverge, the last four are not asked.
JUDGES: list[tuple[str, Judge]] = [
    ("divergence", _judge_divergence),
    ("states", _judge_states),
    ("timing", _judge_timing),
    ("conditions", _judge_conditions),
    ("temperatures", _judge_temperatures),
    ("number of samplers", _judge_number_of_samplers),
    ("gradients", _judge_gradients),
    ("motion", _judge_motion),
    ("rounding", _judge_rounding),
    ("mixing", _judge_mixing),
    ("kernel", _judge_kernel),
    ("steps", _judge_steps),
    ("batches", _judge_batches),
]
_OF_STATIONARY_CHAINS = {"mixing", "kernel", "steps", "batches"}
