"""Signs, in draws and in the states of samplers, that the draws do not follow the posterior."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optperm.bayes._constant_sgd import ConstantSgdState
from optperm.bayes._faults import COLD
from optperm.bayes._langevin import SghmcState, SgldState
from optperm.bayes._mandt_sgd import MandtSgdState

if TYPE_CHECKING:
    from optperm.bayes._sampling import Samples

# Of more entries, as many are judged, spread evenly.
_MOST_ENTRIES = 20_000
_LARGEST_BIAS = 0.05
# A stationary chain does not spread so many times wider in its later half, nor this far.
_DIVERGES, _WILD, _LEAST_HALF = 1e3, 1e15, 20

DIVERGED = "The chains diverge: take smaller steps, or see that the loss is finite."


class LangevinBiases(NamedTuple):
    """The fractions by which SGLD and SGHMC widen variances, and sentences on them."""

    steps: float | None
    batches: float | None
    warnings: list[str]
    not_checked: list[str]


def judge_chains(samples: Samples, values: np.ndarray, states: list[Any]) -> list[str]:
    """Return what is wrong with chains, by the states of their samplers and the spread of draws.

    Args:
      samples: The samples.
      values: Their draws, (chain, draw, entry).
      states: The states of samplers at the end.

    Raises:
      ValueError: If steps were not taken because they would diverge.
    """
    is_wild = not is_finite(samples.params) or bool(np.any(np.abs(values) > _WILD))
    found = [DIVERGED] if is_wild or _is_widening(values) else []
    for state in states:
        if isinstance(state, ConstantSgdState | MandtSgdState):
            found += state.warnings()
            found += _judge_timing(state, values.shape[1] * int(samples.thinning))
    if len(states) > 1:
        found.append(
            f"There are {len(states)} samplers, each of a part of the params, which ignore the "
            "correlation of their noise: use one sampler."
        )
    left_out = max((int(np.max(state.left_out)) for state in states), default=0)
    if left_out:
        found.append(
            f"In {left_out} steps some gradients were not finite, and their entries did not move: the "
            "draws of these entries do not follow the posterior."
        )
    unmoved = find_unmoved(values) if values.shape[1] > 1 else np.zeros(0)
    if np.any(unmoved) and COLD not in found and states:
        found.append(
            f"{int(unmoved.sum())} of {unmoved.size} entries have not moved in any chain: see that "
            "their gradients are finite, and that sampling had begun."
        )
    return found + _judge_rounding(samples)


def _judge_timing(state: ConstantSgdState | MandtSgdState, drawn: int) -> list[str]:
    """Return whether draws were taken before the sampler sampled."""
    before = int(np.max(state.count)) - drawn
    idle = int(np.max(np.asarray(state.count) - np.asarray(state.steps)))
    if not np.any(np.asarray(state.steps)) and np.all(np.asarray(state.count) > 0):
        return [
            "No step has sampled: it was the burn-in, or noise and curvature are not known. See that "
            "gradients are finite, and pass a longer burn_in to draw_samples."
        ]
    if isinstance(state, ConstantSgdState):
        learning = int(np.max(state.freeze_after)) - before
        if learning > 0:
            return [
                f"The first {learning} steps of the draws were taken while the warm-up still learned: "
                "pass burn_in=None to draw_samples."
            ]
    if idle > before:
        return [
            f"Some draws are of steps that did not sample: {idle} steps did not, and only {before} came "
            "before the first draw. Pass a longer burn_in."
        ]
    return []


def _judge_rounding(samples: Samples) -> list[str]:
    """Return whether params of 16 bits are too coarse for their draws."""
    pairs = zip(_floating(samples.params), _floating(samples.last_params), strict=False)
    for draws, params in pairs:
        if jnp.finfo(params.dtype).bits > 16:
            continue
        values = np.asarray(draws, np.float64)
        with np.errstate(invalid="ignore", over="ignore"):
            size, deviation = np.abs(values).mean(axis=(0, 1)), values.std(axis=(0, 1))
            spacing = np.exp2(np.floor(np.log2(np.maximum(size, 1e-30))))
            spacing *= float(jnp.finfo(params.dtype).eps)
        if np.any((deviation < spacing) & (deviation > 0)):
            return [
                f"Draws of some params vary by less than neighboring numbers of {params.dtype} differ: "
                "keep the params in float32, and cast them in the loss."
            ]
    return []


def langevin_biases(values: np.ndarray, state: SgldState | SghmcState) -> LangevinBiases:
    """Return the fractions by which steps and batches widen variances.

    Args:
      values: The draws, (chain, draw, entry).
      state: The state at the end.
    """
    warnings, not_checked, reach = [], [], float(np.max(state.reach))
    moving = values.var(axis=(0, 1))
    moving = moving[moving > 0]
    steps = batches = None
    if reach > 0 and moving.size:
        # h lambda = reach / Var, since Var = T / (N lambda), and it widens Var by 1 / (1 - h lambda / 2)
        steps = reach / float(np.min(moving)) / 2
        if steps > _LARGEST_BIAS:
            warnings.append(
                f"The length of the steps makes the variance of a parameter about {steps:.1%} too "
                "large, and along steep directions more: lower step_size, and draw longer chains."
            )
    else:
        not_checked.append("The variance that the length of the steps adds, with a preconditioner.")
    if np.min(state.looks) > 0:
        batches = max(
            float(np.max(np.asarray(x, np.float64))) for x in jax.tree.leaves(state.batch_bias)
        )
        if batches > _LARGEST_BIAS:
            warnings.append(
                f"The noise of the batches makes the variance of a parameter about {batches:.1%} too "
                "large: lower step_size, take larger batches, or put optperm.svrg in front."
            )
    else:
        not_checked.append(
            "The variance that the noise of the batches adds: no gradients of examples were seen."
        )
    return LangevinBiases(steps, batches, warnings, not_checked)


def describe_r_hat(value: float) -> str:
    """Return the warning of a split R-hat that is too large."""
    return (
        f"The maximum split R-hat is {value:.3g}: the chains have too few draws to tell, have not "
        "mixed, or are in several modes (a parameter and its mirror image). Draw longer ones, and look "
        "at their means."
    )


def describe_unchecked(samples: Samples, has_sampler: bool) -> list[str]:
    """Return what neither draws nor states can show."""
    found = []
    starts = [np.asarray(leaf, np.float64) for leaf in _floating(samples.starts)]
    if any(len(x) > 1 for x in starts) and all(np.all(x == x[:1]) for x in starts):
        found.append("All chains began at one point, so R-hat cannot tell of other modes.")
    if not has_sampler:
        found.append("That the steps sample this posterior: there is no state of a sampler here.")
    if sum(jnp.size(leaf[0, 0]) for leaf in _floating(samples.params)) > _MOST_ENTRIES:
        found.append(f"Other entries than {_MOST_ENTRIES}, spread evenly.")
    return found


def entries_of(draws: Any) -> np.ndarray:
    """Return draws as (chain, draw, entry) in float64, of at most `_MOST_ENTRIES` entries or so."""
    leaves = _floating(draws)
    if not leaves or any(jnp.ndim(leaf) < 2 for leaf in leaves):
        raise ValueError("samples holds no draws: pass what draw_samples returned.")
    stride = -(-sum(int(np.prod(leaf.shape[2:])) for leaf in leaves) // _MOST_ENTRIES)
    parts = [np.asarray(leaf).reshape(*leaf.shape[:2], -1)[..., ::stride] for leaf in leaves]
    return np.concatenate([part.astype(np.float64) for part in parts], axis=-1)


def find_unmoved(values: np.ndarray) -> np.ndarray:
    """Return which entries are the same in all draws of each chain; (entry,)."""
    return np.all(values == values[:, :1], axis=(0, 1))


def is_finite(tree: Any) -> bool:
    """Return whether all floating entries of a tree are finite."""
    return all(bool(jnp.all(jnp.isfinite(leaf))) for leaf in _floating(tree))


def _is_widening(values: np.ndarray) -> bool:
    """Return whether the later half of a chain is far wider: it diverges, and will overflow."""
    half = values.shape[1] // 2
    if half < _LEAST_HALF:
        return False
    with np.errstate(over="ignore", invalid="ignore"):
        distances = np.abs(values - np.median(values[:, :half], axis=1, keepdims=True))
        early, late = distances[:, :half].max(axis=1), distances[:, half:].max(axis=1)
        return bool(np.any(late > _DIVERGES * np.maximum(early, 1e-30)))


def _floating(tree: Any) -> list[Any]:
    return [x for x in jax.tree.leaves(tree) if jnp.issubdtype(jnp.result_type(x), jnp.floating)]
