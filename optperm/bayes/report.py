"""Whether draws are what they should be: what the chains and their optimizer states tell of it."""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from optperm.bayes import langevin, noise_state
from optperm.bayes.langevin import SghmcState, SgldState
from optperm.bayes.noise_state import GradientNoiseState, is_number, share_of
from optperm.contract import checks
from optperm.contract.states import find_states

if TYPE_CHECKING:
    from optperm.bayes.sampling import Samples

# The states of what samples, each with the key of noise that every chain has to draw for itself.
SAMPLERS = (GradientNoiseState, SgldState, SghmcState)
# Below, or above, which a figure is warned of; and so many draws it takes to judge a chain.
_LEAST_TIMES, _LEAST_ESTIMATES, _LARGEST_SHARE = 20.0, 9.0, 0.03
_LARGEST_BIAS, _LEAST_EXCESS, _LARGEST_EXCESS = 0.03, 0.7, 1.3
# So many estimates it takes to see that noise is falling; and so many looks, that it has fallen.
_LEAST_KNOWN, _LEAST_LOOKS = 200, 8
# Of fewer draws R-hat tells less: so large it is of so many and more. Of fewest variances tell nothing.
_LARGEST_R_HAT, _LEAST_DRAWS, _FEWEST = ((1.1, 40), (3.0, 20)), 20, 4


class PosteriorReport(NamedTuple):
    r"""What `posterior_report` found. None stands for what there is not.

    Attributes:
      r_hat: The largest split R-hat of any parameter.
      ess: The smallest bulk effective sample size of any parameter, if ArviZ is installed.
      stability: :math:`\lambda_{\max}(H A)`; variances are off by about 1 / (1 - that / 2). With filled
        noise what it is at most, by :math:`b` alone.
      times: How many times the longest relaxation time fits into each chain's draws.
      estimates_per_param: Estimates of the gradient noise, by the number of params.
      share_at_max_step: The share of params whose steps have the largest size allowed, whatever the
        temperature.
      noise_excess: How many times what the preconditioner takes it for the noise of a step is, along the
        largest direction of the gradients' noise: above 1 where it is correlated and the preconditioner
        scalar or diagonal, below where it was still falling.
      step_bias: The largest share by which the steps of SGLD or SGHMC, which are not infinitely short,
        make a parameter's variance too large.
      altered_gradients: The share of the gradients that were not those of the extra arguments; of SGLD
        and SGHMC of late, and of those that were scaled or clipped.
      warnings: What is wrong, a sentence each.
    """

    r_hat: float
    ess: float | None
    stability: float | None
    times: float | None
    estimates_per_param: float | None
    share_at_max_step: float | None
    noise_excess: float | None
    step_bias: float | None
    altered_gradients: float | None
    warnings: tuple[str, ...]


def posterior_report(
    samples: Any, opt_state: Any = None, *, least_curvature: float | None = None
) -> PosteriorReport:
    r"""Says, and prints, whether draws are to be trusted, from the chains and their optimizer states.

    Of constant SGD (`optperm.constant_sgd`) it warns if :math:`\lambda_{\max}(H A)` is above .5, if the
    full preconditioner has fewer than 9 estimates of the noise a parameter, if without filled noise
    more than 3 % of the steps have the size `max_step`, if the draws are of steps that did not sample,
    if chains are shorter than 20 relaxation times :math:`\tau = 1 / (h \lambda_{\min}(A))`, if the
    gradient was not the one whose noise was estimated, or not the mean of those of its examples, if
    several samplers share the params, or if another preconditioner than the full one
    meets noise so correlated that along its largest direction v

    .. math::
      \frac{v^\top (C + b I) v}{v^\top (\operatorname{diag} C + b I) v} > 1.3

    as the variance there comes out too large by about that factor. A ratio below .7, for any
    preconditioner, is warned of too: :math:`C` is then of the way to the optimum. The noise along v is
    looked at in every 200th step after `freeze_after`. Of SGLD and SGHMC it
    warns if the length of their steps alone makes a variance too large by more than 3 %, to first order

    .. math::
      \frac{h \lambda}{2} = \frac{\epsilon T}{4 \operatorname{Var} \theta_k} \quad \text{or} \quad
      \frac{\eta T}{2 (2 - \alpha) \operatorname{Var} \theta_k}

    by the variance of the draws (which have to be iterates, not means of them), or if their gradients
    were scaled or clipped, or are Adam's, RMSProp's or momentum's. The noise of the batches widens the
    draws too, and is not in that figure: where a batch's gradient has the covariance R, variances grow
    by about the share :math:`\epsilon N^2 R / (4 T)`, or :math:`\eta N^2 R / (2 \alpha T)`. See whether
    they fall with half of the step size. Of all samplers it warns if draws are not finite, vary by less
    than 16-bit params can tell apart, or if a split R-hat is above 1.1. What passes may still be wrong.

    Args:
      samples: What `optperm.draw_samples` returned.
      opt_state: The optimizer states at the end, with an axis of chains or of one chain; those of the
        samples by default.
      least_curvature: :math:`\lambda_{\min}(A)`, the least curvature of the mean loss, if it is known:
        a normal prior of precision p gives at least p / N of it.

    Returns:
      A `PosteriorReport`, whose figures have been printed, but for a share of 0; each of its warnings
      has been given as a `UserWarning`. No other ones are given.

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
      split R-hat, largest           1.00...
      variance added by the steps    0.02...
      variance added by the batches  not known
      >>> report.warnings
      ()
    """
    if not hasattr(samples, "last_opt_state"):
        raise TypeError(
            f"samples must be what draw_samples returned, got {type(samples).__name__}."
        )
    if least_curvature is not None:
        checks.check_positive("least_curvature", least_curvature)
    opt_state = samples.last_opt_state if opt_state is None else opt_state
    report = _report(samples, opt_state, least_curvature)
    lines = {
        "split R-hat, largest": report.r_hat,
        "bulk effective sample size, least": report.ess,
        "lambda_max(H A)": report.stability,
        "relaxation times a chain": report.times,
        "estimates of the noise a param": report.estimates_per_param,
        "share of steps at max_step": report.share_at_max_step,
        "noise over what is assumed": report.noise_excess,
        "variance added by the steps": report.step_bias,
        "share of altered gradients": report.altered_gradients,
    }
    for name, value in lines.items():
        if value is not None:
            print(f"{name:30} {value:.4g}" if value >= 10 else f"{name:30} {value:.3f}")
    if report.step_bias is not None:
        print(f"{'variance added by the batches':30} not known")
    for warning in report.warnings:
        warnings.warn(warning, stacklevel=2)
    return report


def warn_of_draws(samples: Samples) -> None:
    """Gives the warnings of a report on draws of a sampler of this library, where they can be seen.

    Args:
      samples: The draws; nothing is said of traced ones.

    Raises:
      ValueError: If steps were not taken because they would diverge.
    """
    leaves = jax.tree.leaves(samples)
    if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
        return
    if find_states(samples.last_opt_state, SAMPLERS):
        for warning in _report(samples, samples.last_opt_state, None, with_ess=False).warnings:
            warnings.warn(warning, stacklevel=3)
    elif not _is_finite(samples.params):
        warnings.warn(_INFINITE, stacklevel=3)


def warn_of_samplers(opt_state: Any) -> None:
    """Gives the warnings of what the states of samplers tell of steps that do not sample.

    Raises:
      ValueError: If steps were not taken because they would diverge.
    """
    for state in find_states(opt_state, SAMPLERS):
        judge = noise_state if isinstance(state, GradientNoiseState) else langevin
        for fault in judge.faults_of(state):
            warnings.warn(fault, stacklevel=2)


_COLD = (
    "The temperature is 0, at which constant SGD takes no steps: all draws of a chain are the same."
)
_STUCK = "No parameter has moved: all draws are the same. See that the gradients are finite."
_INFINITE = "Some draws are not finite: the steps are too large, or the loss is not finite."


def _report(
    samples: Samples, opt_state: Any, least_curvature: float | None, *, with_ess: bool = True
) -> PosteriorReport:
    found, states = [], find_states(opt_state, GradientNoiseState)
    r_hat = _largest_r_hat(samples.params)
    drawn = _num_draws(samples) * int(samples.thinning)
    if not _is_finite(samples.params):
        found.append(_INFINITE)
    elif any(not np.any(np.asarray(state.scale)) for state in states):
        found.append(_COLD)
    elif any(_num_draws(samples) >= n and r_hat > most for most, n in _LARGEST_R_HAT):
        found.append(
            f"The largest split R-hat is {r_hat:.3g}: the chains have not mixed. Draw longer ones, with "
            "more warmup."
        )
    found += _faults_of_rounding(samples)
    of_each = [_of_state(state, least_curvature, drawn, samples, found) for state in states]
    names = "stability", "times", "estimates_per_param", "share_at_max_step", "noise_excess"
    figures = of_each[0] if len(of_each) == 1 else dict.fromkeys(names)
    if not found and np.isnan(r_hat) and _num_draws(samples) >= _LEAST_DRAWS:
        found.append(_STUCK)
    if len(states) > 1:
        found.append(
            f"There are {len(states)} samplers, each of a part of the params: none sees how the noise "
            "of its part goes with that of another one, and then the draws do not follow the posterior. "
            "Use one for all params that are sampled."
        )
    if with_ess and np.isnan(r_hat) and _num_draws(samples) < _FEWEST:
        found.append(
            f"There are {_num_draws(samples)} draws a chain: split R-hat takes {_FEWEST}, and nothing "
            "can be said of so few."
        )
    langevin_states: list[Any] = find_states(opt_state, (SgldState, SghmcState))
    found += langevin.faults_in_front(opt_state)
    bias = _step_bias(samples, langevin_states, found)
    shares = [share_of(state.foreign, state) for state in states]
    shares += [float(np.max(np.asarray(state.altered))) for state in langevin_states]
    return PosteriorReport(
        r_hat,
        ess=_smallest_ess(samples.params) if with_ess else None,
        **figures,
        step_bias=bias,
        altered_gradients=max(shares, default=0.0) or None,
        warnings=tuple(found),
    )


def _faults_of_rounding(samples: Samples) -> list[str]:
    """What is wrong where params of 16 bits are too coarse for their draws."""
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


def _step_bias(samples: Samples, states: list[Any], found: list[str]) -> float | None:
    """The largest share of a parameter's variance that the length of steps adds; adds what is wrong."""
    for state in states:
        found += langevin.faults_of(state)
    if len(states) != 1 or _num_draws(samples) < _LEAST_DRAWS or not _is_finite(samples.params):
        return None
    reach = float(np.max(np.asarray(states[0].reach)))
    variances = [
        np.asarray(leaf, np.float64).var(axis=(0, 1)).ravel() for leaf in _floating(samples.params)
    ]
    moving = np.concatenate(variances) if variances else np.zeros(0)
    moving = moving[moving > 0]
    if reach == 0 or not moving.size:
        return None
    # h lambda is the reach over Var = T / (N lambda), which it multiplies by 1 / (1 - h lambda / 2).
    bias = reach / float(moving.min()) / 2
    if bias > _LARGEST_BIAS:
        found.append(
            f"The length of the steps makes the variance of a parameter about {bias:.1%} too large, and "
            "that along steep directions more: lower step_size, and draw longer chains."
        )
    return bias


def _of_state(
    state: GradientNoiseState,
    least_curvature: float | None,
    drawn: int,
    samples: Samples,
    found: list[str],
) -> dict[str, float | None]:
    """What a report has of a state, by its names; adds what is wrong."""
    found += noise_state.faults_of(state)
    stability = float(np.max(np.asarray(state.stability))) or None
    idle = int(np.max(np.asarray(state.count) - np.asarray(state.steps)))
    before = int(np.max(np.asarray(state.count))) - drawn
    if idle > before:
        found.append(
            f"Some draws are of steps that did not sample: {idle} steps were burn-in, or had no "
            f"estimate of the noise (there are {int(np.min(np.asarray(state.estimates)))}) or, for the "
            f"full preconditioner, none that can be inverted, and only {before} came before the first "
            "draw. Pass a longer warmup to draw_samples; if there are no estimates, see that the "
            "gradient of each example is finite; if they are singular, as a feature that is always zero "
            "makes them, use fill=True."
        )
    times = None
    if least_curvature is not None:
        times = drawn * float(np.min(_typical_step(state))) * least_curvature
        if times < _LEAST_TIMES:
            found.append(
                f"Each chain is {times:.3g} relaxation times long, and draws of fewer than "
                f"{_LEAST_TIMES:.0f} are too narrow: draw longer chains, from larger batches."
            )
    share = estimates = None
    if not isinstance(state.factor, tuple):
        estimates = float(np.min(np.asarray(state.estimates))) / state.covariance.shape[-1]
        if estimates < _LEAST_ESTIMATES:
            found.append(
                f"The full preconditioner has {estimates:.3g} estimates of the noise for each "
                f"parameter, and it takes {_LEAST_ESTIMATES:.0f}: raise freeze_after, or use "
                "preconditioner='diagonal'."
            )
    elif not np.any(np.asarray(state.filling) > 0):
        share = float(np.max(_shares(state)))
        if share > _LARGEST_SHARE:
            found.append(
                f"{share:.1%} of the params take steps of the size max_step, on which the temperature "
                "has no effect: there the draws do not follow the posterior. Use fill=True."
            )
    excess, error = _noise_excess(state)
    found += _faults_of_noise(state, excess, error)
    return {
        "stability": stability,
        "times": times,
        "estimates_per_param": estimates,
        "share_at_max_step": share,
        "noise_excess": excess,
    }


def _faults_of_noise(state: GradientNoiseState, excess: float | None, error: float) -> list[str]:
    """What is wrong where the noise is not what the preconditioner takes it for, beyond its error."""
    if excess is None:
        return []
    is_full = not isinstance(state.factor, tuple)
    if excess > _LARGEST_EXCESS and excess - 2 * error > 1 and not is_full:
        return [
            f"The noise of the gradients is correlated: along its largest direction it is {excess:.2g} "
            "times what the preconditioner takes it for, and variances there are too large by about "
            "that factor. Use preconditioner='full', or a smaller rho."
        ]
    is_known = np.min(np.asarray(state.estimates)) >= _LEAST_KNOWN
    if excess < _LEAST_EXCESS and excess + 2 * error < 1 and is_known:
        return [
            "The noise of the gradients was not constant while it was estimated, or is another one "
            f"since: along its largest direction it is {excess:.2g} times what the preconditioner takes "
            "it for, and variances there are too small by about that factor or more. It is to be "
            "estimated where the chain samples: begin nearer to the optimum, as at params that are "
            "trained, or take a longer burn_in, a faster burn_in_optimizer (the default moves params by "
            "about .01 a step) or a later freeze_after."
        ]
    return []


def _noise_excess(state: GradientNoiseState) -> tuple[float | None, float]:
    """v^T (C + b I) v over what is assumed of it, of all chains, where v and that are known; its error.

    As it is where the chains sample, if there are enough looks at it, whose error is known; else as it
    was at last while it was estimated.
    """
    if isinstance(state.noise_direction, tuple):
        return None, 0.0

    def of_chain(state: GradientNoiseState) -> tuple[jax.Array, jax.Array]:
        v, _ = ravel_pytree(state.noise_direction)
        if not isinstance(state.factor, tuple):
            product = jnp.matmul(state.covariance, v, precision=jax.lax.Precision.HIGHEST)
        elif is_number(state.covariance):
            product = state.covariance * v
        else:
            product = ravel_pytree(state.covariance)[0] * v
        assumed = jnp.sum(v * product) / jnp.sum(v**2) + state.filling
        assumed = jnp.where(assumed > 0, assumed, jnp.inf)
        is_late = state.late_looks >= _LEAST_LOOKS
        noise = jnp.where(is_late, state.late_noise, state.largest_noise)
        spread = jnp.maximum(state.late_square - state.late_noise**2, 0.0)
        error = jnp.where(is_late, jnp.sqrt(spread / jnp.maximum(state.late_looks, 1)), 0.0)
        return (noise + state.filling) / assumed, error / assumed

    found = jax.vmap(of_chain)(state) if jnp.ndim(state.count) else of_chain(state)
    ratio, error = (np.atleast_1d(np.asarray(each)) for each in found)
    if isinstance(state.factor, tuple):
        return float(ratio.max()) or None, float(error[ratio.argmax()])
    # The full one is off by the noise of both alone, which the mean has less of.
    return float(ratio.mean()) or None, float(np.sqrt((error**2).mean() / len(error)))


def _shares(state: GradientNoiseState) -> Any:
    share = GradientNoiseState.share_at_max_step
    return jax.vmap(share)(state) if jnp.ndim(state.count) else share(state)


def _typical_step(state: GradientNoiseState) -> np.ndarray:
    """The step along directions of little noise: 2 S T / N by b, or by the mean noise if b is 0."""
    noise = state.filling
    if not np.any(np.asarray(noise) > 0):
        is_full, lead = not isinstance(state.factor, tuple), jnp.ndim(state.count)
        parts = [jnp.diagonal(state.covariance, axis1=-2, axis2=-1)] if is_full else None
        leaves = parts or jax.tree.leaves(state.covariance)
        flat = [leaf.reshape(*leaf.shape[:lead], -1) for leaf in leaves]
        noise = jnp.mean(jnp.concatenate(flat, axis=-1), axis=-1)
    return np.asarray(state.scale, np.float64) / np.maximum(np.asarray(noise, np.float64), 1e-300)


def _num_draws(samples: Samples) -> int:
    leaves = jax.tree.leaves(samples.params)
    if not leaves or jnp.ndim(leaves[0]) < 2:
        raise ValueError("samples holds no draws: pass what draw_samples returned.")
    return int(leaves[0].shape[1])


def _is_finite(tree: Any) -> bool:
    return all(bool(jnp.all(jnp.isfinite(leaf))) for leaf in _floating(tree))


def _floating(tree: Any) -> list[Any]:
    return [x for x in jax.tree.leaves(tree) if jnp.issubdtype(jnp.result_type(x), jnp.floating)]


def _largest_r_hat(draws: Any) -> float:
    """Of each parameter, from the halves of all chains; NaN of fewer than four draws."""
    largest = [float("nan")]
    for leaf in _floating(draws):
        values = np.asarray(leaf, np.float64)
        half = values.shape[1] // 2
        if half < _FEWEST // 2 or not values.size:
            continue
        halves = np.concatenate([values[:, :half], values[:, -half:]])
        within = halves.var(axis=1, ddof=1).mean(axis=0)
        between = halves.mean(axis=1).var(axis=0, ddof=1)
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = np.sqrt((half - 1) / half + between / within)
        # What never moves has no R-hat.
        moving = ratio[(within > 0) | (between > 0)]
        largest += [float(moving.max())] if moving.size else []
    return float(np.nanmax(largest)) if len(largest) > 1 else float("nan")


def _smallest_ess(draws: Any) -> float | None:
    if importlib.util.find_spec("arviz") is None:
        return None
    arviz = importlib.import_module("arviz")

    from optperm.bayes.sampling import samples_as_dict  # noqa: PLC0415

    sizes = arviz.ess(arviz.convert_to_dataset(samples_as_dict(draws)))
    return min(float(sizes[name].min()) for name in sizes.data_vars)
