"""Can these draws be trusted? What they and the samplers' states tell."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optperm.bayes.constant_sgd import ConstantSgdState
from optperm.bayes.convergence import convergence, split_r_hats
from optperm.bayes.kernel import NoiseKernel
from optperm.bayes.langevin import SghmcState, SgldState
from optperm.bayes.mandt_sgd import MandtSgdState
from optperm.contract.shardings import can_be_seen
from optperm.contract.states import find_states

if TYPE_CHECKING:
    from optperm.bayes.sampling import Samples

# What samples, and which of them have a key for noise that every chain has to draw for itself.
NOISY = (ConstantSgdState, SgldState, SghmcState)
SAMPLERS = (*NOISY, MandtSgdState)
# Vehtari et al., 2021; and the split R-hat from which on even short runs are said not to have mixed.
_LARGEST_R_HAT, _LEAST_ESS, _NOT_MIXED = 1.01, 400, 1.1
_FEWEST, _LEAST_DRAWS = 4, 20
# So many entries are judged, spread evenly, where there are more.
_MOST_ENTRIES = 20_000
_LARGEST_STABILITY, _LARGEST_UNEVEN = 0.5, 0.2
_LARGEST_BIAS, _LEAST_DRIFT, _LARGEST_CORRELATION = 0.05, 0.7, 1.3
# What stays within the law of its posterior does not spread so many times wider.
_DIVERGES = 1e3


class PosteriorReport(NamedTuple):
    r"""What `posterior_report` found. None stands for what there is not.

    Attributes:
      r_hat: The largest rank-normalized split R-hat of any parameter.
      ess_bulk: The smallest bulk effective sample size.
      ess_tail: The smallest tail effective sample size, of the 5 % and 95 % quantiles.
      mcse: The largest Monte Carlo error of a mean, over the standard deviation.
      stability: :math:`\lambda_{\max}(H A)`, of constant SGD times (1 - mu) / (1 + mu).
      rho: The largest ratio of the batches' noise to the injected noise, as the warm-up chose it.
      drift: The noise in the warm-up's last window over that in the one before.
      step_bias: The largest share by which the length of SGLD's or SGHMC's steps widens a variance.
      batch_bias: The largest share by which the noise of their batches does.
      unmoved: How many entries have not moved in any chain.
      not_checked: What nothing is known of, a sentence each.
      warnings: What is wrong, a sentence each.
    """

    r_hat: float
    ess_bulk: float
    ess_tail: float
    mcse: float
    stability: float | None
    rho: float | None
    drift: float | None
    step_bias: float | None
    batch_bias: float | None
    unmoved: int
    not_checked: tuple[str, ...]
    warnings: tuple[str, ...]


def posterior_report(samples: Any, opt_state: Any = None) -> PosteriorReport:
    r"""Say, and print, whether draws can be trusted, from the chains and their optimizer states.

    Of all samplers it warns if a rank-normalized split R-hat is above 1.01, an effective sample size
    below 400, if chains diverge, or if entries never move. Of constant SGD, if draws were taken before
    the warm-up was over, if its noise was still falling, if :math:`\lambda_{\max}(H A)` is above .5, if
    gradients are not the mean of those of the examples, or if the diagonal preconditioner meets noise
    that is correlated. Of SGLD and SGHMC, if the length of their steps, to first order

    .. math::
      \frac{\epsilon T}{4 \operatorname{Var} \theta_k} \quad \text{or} \quad
      \frac{\eta T}{2 (2 - \alpha) \operatorname{Var} \theta_k}

    or the noise of their batches, of covariance R, by

    .. math::
      \frac{\epsilon N^2 M_{kk} R_{kk}}{4 T} \quad \text{or} \quad \frac{\eta N^2 R_{kk}}{2 \alpha T}

    widens a variance by more than 5 %. What passes may still be wrong: what was not checked is printed.

    Args:
      samples: What `optperm.draw_samples` or `optperm.sample` returned.
      opt_state: The optimizer states at the end, with an axis of chains or of one chain; those of the
        samples by default.

    Returns:
      A `PosteriorReport`, whose figures have been printed; each of its warnings has been given as a
      `UserWarning`.

    Raises:
      TypeError: If an argument is of the wrong type.
      ValueError: If steps were not taken because they would diverge, or `samples` holds no draws.

    Example:
      >>> import jax, jax.numpy as jnp, optperm
      >>> tx = optperm.sgld(1e-4, num_data=1000)
      >>> def step(params, opt_state, key):  # the posterior is N(0, 1/1000)
      ...     updates, opt_state = tx.update(params, opt_state, params)
      ...     return params + updates, opt_state
      >>> w = jnp.zeros(())
      >>> samples = optperm.draw_samples(
      ...     step, w, tx.init(w), jax.random.key(0), num_chains=4, num_draws=1000, thinning=100
      ... )
      >>> report = optperm.posterior_report(samples)  # doctest: +ELLIPSIS
      R-hat, largest                 1.00...
      effective draws, bulk, least   3...
      effective draws, tail, least   ...
      Monte Carlo error over sd      0.01...
      variance added by the steps    0.02...
      not checked: All chains began at one point, so R-hat cannot tell of other modes.
      not checked: The variance that the noise of the batches adds: no gradients of examples were seen.
      not checked: That batches are drawn with replacement, and nothing changes updates behind.
      >>> report.warnings
      ()

    References:
      Vehtari et al., `Rank-Normalization, Folding, and Localization: An Improved R-hat
      <https://arxiv.org/abs/1903.08008>`_, 2021
    """
    if not hasattr(samples, "last_opt_state"):
        raise TypeError(
            f"samples must be what draw_samples returned, got {type(samples).__name__}."
        )
    report = _report(samples, samples.last_opt_state if opt_state is None else opt_state)
    lines = {
        "R-hat, largest": report.r_hat,
        "effective draws, bulk, least": report.ess_bulk,
        "effective draws, tail, least": report.ess_tail,
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


def warn_of_draws(samples: Samples) -> None:
    """Warn of draws that are seen not to sample; nothing is said of traced ones.

    Raises:
      ValueError: If steps were not taken because they would diverge.
    """
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(samples)):
        return
    if find_states(samples.last_opt_state, SAMPLERS):
        found, values = _faults(samples, samples.last_opt_state), _entries(samples.params)
        if not found and values.shape[1] >= 2 * _LEAST_DRAWS:
            largest = np.nanmax(split_r_hats(values), initial=0.0)
            found = [_of_r_hat(float(largest))] if largest > _NOT_MIXED else []
    else:
        found = [] if _is_finite(samples.params) else [_DIVERGED]
    for text in found:
        warnings.warn(text, stacklevel=3)


def warn_of_samplers(opt_state: Any) -> None:
    """Warn of what the states of samplers tell of steps that do not sample.

    Raises:
      ValueError: If steps were not taken because they would diverge.
    """
    states: list[Any] = find_states(opt_state, (ConstantSgdState, MandtSgdState))
    for state in states:
        for text in _faults_of_state(state):
            warnings.warn(text, stacklevel=2)


_DIVERGED = "The chains diverge: take smaller steps, or see that the loss is finite."
_COLD = "The temperature is 0, at which no steps are taken: all draws of a chain are the same."
_ONE_START = "All chains began at one point, so R-hat cannot tell of other modes."


def _of_r_hat(value: float) -> str:
    return (
        f"The largest split R-hat is {value:.3g}: the chains have not mixed, or are in several modes. "
        "Draw longer ones, and look at their means."
    )


def _report(samples: Samples, opt_state: Any) -> PosteriorReport:
    values = _entries(samples.params)
    is_moving = values.std(axis=1).max(axis=0) > 0
    sound = values[..., is_moving & np.all(np.isfinite(values), axis=(0, 1))]
    is_enough = sound.shape[1] >= _FEWEST and sound.shape[2] > 0
    r_hat, bulk, tail, mcse = convergence(sound) if is_enough else (float("nan"),) * 4
    found = _faults(samples, opt_state)
    if is_enough and found[:1] != [_DIVERGED]:
        if r_hat > _LARGEST_R_HAT:
            found.append(_of_r_hat(r_hat))
        if min(bulk, tail) < _LEAST_ESS:
            found.append(
                f"The least effective sample size is {min(bulk, tail):.3g}, and {_LEAST_ESS} are "
                "needed to judge chains and quantiles: draw more."
            )
    elif values.shape[1] < _FEWEST:
        found.append(
            f"There are {values.shape[1]} draws a chain, and R-hat takes {_FEWEST}: nothing can be said "
            "of so few."
        )
    states: list[Any] = find_states(opt_state, (SgldState, SghmcState))
    step_bias, batch_bias, unchecked = _langevin_biases(samples, states, found)
    if samples.starts is not None and _is_same(samples.starts):
        unchecked.insert(0, _ONE_START)
    unchecked.append("That batches are drawn with replacement, and nothing changes updates behind.")
    if not find_states(opt_state, SAMPLERS):
        unchecked.append(
            "That the steps sample this posterior: there is no state of a sampler here."
        )
    if sum(jnp.size(leaf[0, 0]) for leaf in _floating(samples.params)) > _MOST_ENTRIES:
        unchecked.append(f"Other entries than {_MOST_ENTRIES}, spread evenly.")
    kernels = [state.kernel for state in find_states(opt_state, ConstantSgdState)]
    one = kernels[0] if len(kernels) == 1 else None
    return PosteriorReport(
        r_hat,
        bulk,
        tail,
        mcse,
        stability=None if one is None else float(np.max(one.stability)),
        rho=None if one is None else float(np.max(one.rho)),
        drift=None if one is None else float(np.mean(one.drift)),
        step_bias=step_bias,
        batch_bias=batch_bias,
        unmoved=int(np.sum(~is_moving)) if values.shape[1] > 1 else 0,
        not_checked=tuple(unchecked),
        warnings=tuple(found),
    )


def _faults(samples: Samples, opt_state: Any) -> list[str]:
    """Return what is wrong by the states and by how the draws spread."""
    values = _entries(samples.params)
    is_wild = not _is_finite(samples.params) or bool(np.any(np.abs(values) > 1e15))
    found = [_DIVERGED] if is_wild or _widens(values) else []
    states: list[Any] = find_states(opt_state, SAMPLERS)
    for state in states:
        if isinstance(state, ConstantSgdState | MandtSgdState):
            found += _faults_of_state(state)
            found += _faults_of_timing(state, values.shape[1] * int(samples.thinning))
    if len(states) > 1:
        found.append(
            f"There are {len(states)} samplers, each of a part of the params: none sees how the noise "
            "of its part goes with that of another one, and the draws do not follow the posterior. "
            "Use one for all params that are sampled."
        )
    left_out = max((int(np.max(state.left_out)) for state in states), default=0)
    if left_out:
        found.append(
            f"In {left_out} steps some gradients were not finite, and their entries stayed where they "
            "were: the draws of those do not follow the posterior."
        )
    unmoved = values.std(axis=1).max(axis=0) == 0 if values.shape[1] > 1 else np.zeros(0)
    if np.any(unmoved) and _COLD not in found and states:
        found.append(
            f"{int(unmoved.sum())} of {unmoved.size} entries have not moved in any chain: see that "
            "their gradients are finite, and that sampling had begun."
        )
    return found + _faults_of_rounding(samples)


def _widens(values: np.ndarray) -> bool:
    """Return whether the later half of a chain is far wider: one that diverges overflows at last."""
    half = values.shape[1] // 2
    if half < _LEAST_DRAWS:
        return False
    with np.errstate(over="ignore", invalid="ignore"):
        distances = np.abs(values - np.median(values[:, :half], axis=1, keepdims=True))
        early, late = distances[:, :half].max(axis=1), distances[:, half:].max(axis=1)
        return bool(np.any(late > _DIVERGES * np.maximum(early, 1e-30)))


def _faults_of_state(state: ConstantSgdState | MandtSgdState) -> list[str]:
    """Return what a state tells of steps that do not sample; nothing of a traced one."""
    if not can_be_seen(state.count) or not can_be_seen(state.kernel.stability):
        return []
    found, stability = [], float(np.max(state.kernel.stability))
    if np.any(np.asarray(getattr(state, "unstable", 0)) > 0):
        raise ValueError(
            f"These steps do not sample, they diverge: lambda_max(H A) is {stability:.3g}, 2 or more, "
            "so none was taken. Use constant_sgd, smaller batches, a smaller max_step or more damping."
        )
    if stability > _LARGEST_STABILITY and np.any(np.asarray(state.steps) > 0):
        off = 1 / max(1 - stability / 2, 1e-3)
        found.append(
            f"lambda_max(H A) is {stability:.3g}: in that direction the variance of the draws is about "
            f"{off:.2g} times what it should be. Lower stability, or take smaller batches."
        )
    if isinstance(state, ConstantSgdState):
        if np.any(np.asarray(state.scale) == 0) and np.any(state.count):
            found.append(_COLD)
        if np.any(np.asarray(state.count) < np.asarray(state.freeze_after)):
            return found
        found += _faults_of_learning(state.kernel)
        estimates = 2 * np.asarray(state.kernel.estimates)
    else:
        estimates = np.asarray(state.estimates)
    if np.max(np.asarray(state.uneven) / np.maximum(estimates, 1)) > _LARGEST_UNEVEN:
        found.append(
            "The gradient of the batch is not the mean of those of its examples, whose noise the steps "
            "are made for, and the draws do not follow the posterior: the loss sums over the batch, has "
            "weights of examples, or mixes them as BatchNorm does. Use jnp.mean of what each example "
            "loses, with weights as factors in it, or for a loss that mixes them "
            "estimator='two_batches'."
        )
    return found


def _faults_of_learning(kernel: NoiseKernel) -> list[str]:
    """Return what is wrong with what the warm-up has learned."""
    found, drift = [], float(np.mean(kernel.drift))
    if drift < _LEAST_DRIFT:
        found.append(
            f"The warm-up has not arrived: in its last window the gradients' noise was {drift:.2g} "
            "times that in the one before, and draws by a noise that is still falling are too "
            "narrow. Begin nearer to an optimum, or take a longer burn_in."
        )
    correlation, estimates = float(np.max(kernel.correlation)), int(np.min(kernel.estimates))
    if isinstance(kernel.basis, tuple):
        # Of few estimates the steepest direction is the one whose noise was taken for too small.
        if correlation > _LARGEST_CORRELATION + 4 / np.sqrt(max(estimates, 1)):
            found.append(
                "The noise of the gradients is correlated: along the steepest direction a step's is "
                f"{correlation:.2g} times what the preconditioner takes it for, and the variance there "
                "too large by about that factor. Use preconditioner='full', or a smaller rho."
            )
    elif estimates < kernel.basis.shape[-1]:
        found.append(
            f"The full preconditioner has {estimates} estimates of the noise of "
            f"{kernel.basis.shape[-1]} params: raise freeze_after, or use preconditioner='diagonal'."
        )
    return found


def _faults_of_timing(state: ConstantSgdState | MandtSgdState, drawn: int) -> list[str]:
    """Return what is wrong where draws were taken while the sampler did not sample yet."""
    before = int(np.max(state.count)) - drawn
    idle = int(np.max(np.asarray(state.count) - np.asarray(state.steps)))
    if not np.any(np.asarray(state.steps)) and np.all(np.asarray(state.count) > 0):
        return [
            "No step has sampled: it was the burn-in, or the noise and the curvature are not known. See "
            "that the gradients of examples are finite, and pass a longer warmup to draw_samples."
        ]
    if isinstance(state, ConstantSgdState):
        learning = int(np.max(state.freeze_after)) - before
        if learning > 0:
            return [
                f"The first {learning} steps of the draws were taken while the warm-up still learned: "
                "pass warmup=None to draw_samples, which waits for its end."
            ]
    if idle > before:
        return [
            f"Some draws are of steps that did not sample: {idle} steps were burn-in or had no estimate "
            f"of the noise, and only {before} came before the first draw. Pass a longer warmup."
        ]
    return []


def _faults_of_rounding(samples: Samples) -> list[str]:
    """Return what is wrong where params of 16 bits are too coarse for their draws."""
    if not _is_finite(samples.params):
        return []
    pairs = zip(_floating(samples.params), _floating(samples.last_params), strict=False)
    for draws, params in pairs:
        if jnp.finfo(params.dtype).bits > 16:
            continue
        values = np.asarray(draws, np.float64)
        size, deviation = np.abs(values).mean(axis=(0, 1)), values.std(axis=(0, 1))
        spacing = np.exp2(np.floor(np.log2(np.maximum(size, 1e-30))))
        spacing *= float(jnp.finfo(params.dtype).eps)
        if np.any((deviation < spacing) & (deviation > 0)):
            return [
                f"Draws of some params vary by less than neighboring numbers of {params.dtype} differ: "
                "their gradients are those of rounded params, and the draws do not follow the "
                "posterior. Keep the params in float32, and cast them in the loss."
            ]
    return []


def _langevin_biases(
    samples: Samples, states: list[Any], found: list[str]
) -> tuple[float | None, float | None, list[str]]:
    """Return by which shares steps and batches widen a variance, and what is not known of it."""
    if len(states) != 1 or not _is_finite(samples.params):
        return None, None, []
    (state,), step_bias, batch_bias, unchecked = states, None, None, []
    reach = float(np.max(state.reach))
    variances = _entries(samples.params).var(axis=(0, 1))
    moving = variances[variances > 0]
    if reach > 0 and moving.size:
        # h lambda is the reach over Var = T / (N lambda), which it multiplies by 1 / (1 - h lambda / 2).
        step_bias = reach / float(np.min(moving)) / 2
        if step_bias > _LARGEST_BIAS:
            found.append(
                f"The length of the steps makes the variance of a parameter about {step_bias:.1%} too "
                "large, and along steep directions more: lower step_size, and draw longer chains."
            )
    else:
        unchecked.append("The variance that the length of the steps adds, with a preconditioner.")
    if np.min(state.looks) > 0:
        parts = [np.ravel(np.max(np.asarray(x, np.float64))) for x in jax.tree.leaves(state.share)]
        batch_bias = float(np.max(np.concatenate(parts)))
        if batch_bias > _LARGEST_BIAS:
            found.append(
                f"The noise of the batches makes the variance of a parameter about {batch_bias:.1%} too "
                "large: lower step_size, take larger batches, or put optperm.svrg in front."
            )
    else:
        unchecked.append(
            "The variance that the noise of the batches adds: no gradients of examples were seen."
        )
    return step_bias, batch_bias, unchecked


def _entries(draws: Any) -> np.ndarray:
    """Return draws as (chain, draw, entry) in float64, of at most so many entries."""
    leaves = _floating(draws)
    if not leaves or any(jnp.ndim(leaf) < 2 for leaf in leaves):
        raise ValueError("samples holds no draws: pass what draw_samples returned.")
    sizes = [int(np.prod(leaf.shape[2:])) for leaf in leaves]
    stride = -(-sum(sizes) // _MOST_ENTRIES)
    parts = [np.asarray(leaf).reshape(*leaf.shape[:2], -1)[..., ::stride] for leaf in leaves]
    return np.concatenate([part.astype(np.float64) for part in parts], axis=-1)


def _is_same(starts: Any) -> bool:
    leaves = [np.asarray(leaf, np.float64) for leaf in _floating(starts)]
    return any(len(x) > 1 for x in leaves) and all(np.all(x == x[:1]) for x in leaves)


def _is_finite(tree: Any) -> bool:
    return all(bool(jnp.all(jnp.isfinite(leaf))) for leaf in _floating(tree))


def _floating(tree: Any) -> list[Any]:
    return [x for x in jax.tree.leaves(tree) if jnp.issubdtype(jnp.result_type(x), jnp.floating)]
