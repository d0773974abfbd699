"""Line searches along the direction of a quasi-Newton step, and what each teaches.

J. Nocedal and S. J. Wright, "Numerical Optimization", 2006, chapter 3.

Both searches have the same methods. `learn` takes the pair of the last step into B, `init` gives the
first length, `step` judges a length and gives the next one, and `after` is the state after a search in
vain.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from optperm.contract.mapped_axes import mark_varying
from optperm.subspace.quasi_newton import (
    QuasiNewtonState,
    change_of_gradient,
    norm,
    nothing_learned,
    with_pair,
)

# By what a trial is shortened at most, wherever the parabola through it has its minimum.
_SHORTEST = 0.1
# After so many searches in a row without a step the curvature is forgotten.
_PATIENCE = 2


class Outcome(NamedTuple):
    """What a line search has found.

    Attributes:
      step_length: The length that was accepted, or 0.
      is_accepted: Whether there is one.
      next_length: What it would have tried next, or 0 where the rounding of the loss hides the decrease.
      num_trials: How many lengths it has tried.
    """

    step_length: jax.Array
    is_accepted: jax.Array
    next_length: jax.Array
    num_trials: jax.Array


class Trial(NamedTuple):
    """What a trial shows.

    Attributes:
      length: The length that was tried.
      loss: The loss there.
      start: The loss before.
      predicted: By how much the gradient predicts the loss to change, negative downhill.
    """

    length: jax.Array
    loss: jax.Array
    start: jax.Array
    predicted: jax.Array

    def is_enough(self, sigma: jax.Array) -> jax.Array:
        """Whether the loss falls by a share sigma of what is predicted."""
        return jnp.isfinite(self.loss) & (self.loss < self.start + sigma * self.predicted)


@dataclasses.dataclass(frozen=True)
class MindSpore:
    """The rule of MindSpore's DimReduce: lengths 1, rho, rho^2, ..., and B = I at first."""

    max_trials: int = 2

    def learn(self, state: QuasiNewtonState, gk: jax.Array) -> QuasiNewtonState:
        """Take in pairs of y's > 1e-20."""
        pair = change_of_gradient(state, gk)
        return with_pair(state, state.inverse_hessian, pair, pair[2] > 1e-20)

    def init(self, state: QuasiNewtonState, f: jax.Array, gk: jax.Array) -> jax.Array:
        """Begin at 1."""
        return jnp.ones_like(f)

    def step(self, trial: Trial, sigma: jax.Array, rho: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return whether the trial is enough, and rho times its length."""
        return trial.is_enough(sigma), rho * trial.length

    def predict(self, slope: jax.Array, _: Callable[[], jax.Array]) -> jax.Array:
        """Return c g_k'd, whatever the optimizer makes of the direction."""
        return slope

    def share_of_residual(self, is_rounding: jax.Array) -> jax.Array:
        """Take the residual as it is."""
        return jnp.ones_like(is_rounding)

    def after(self, held: QuasiNewtonState, found: Outcome) -> QuasiNewtonState:
        """Keep what was held."""
        return held


@dataclasses.dataclass(frozen=True)
class Safeguarded:
    """A search that neither depends on the scale of the loss or of the params nor stalls."""

    max_trials: int = 10

    def learn(self, state: QuasiNewtonState, gk: jax.Array) -> QuasiNewtonState:
        """Take in pairs of y's > eps |y| |s|, the first one into B_0 = (s'y / y'y) I."""
        s, y, ys = pair = change_of_gradient(state, gk)
        is_positive = ys > jnp.finfo(ys.dtype).eps * norm(y) * norm(s)
        initial = _over_square(ys, norm(y)) * jnp.eye(s.size, dtype=s.dtype)
        hessian = jnp.where(state.has_pair, state.inverse_hessian, initial)
        return with_pair(state, hessian, pair, is_positive)

    def init(self, state: QuasiNewtonState, f: jax.Array, gk: jax.Array) -> jax.Array:
        """Begin where the last search stopped, or at 1, or at |f| / |g_k|^2 for an unknown B.

        The last is Polyak's step to a minimum of 0. It does not depend on the scale of the loss.
        """
        one = jnp.ones_like(f)
        polyak = _over_square(jnp.abs(f), norm(gk))
        polyak = jnp.where(jnp.isfinite(polyak) & (polyak > 0), polyak, one)
        fresh = jnp.where(state.has_pair, one, polyak)
        return jnp.where(state.first_length > 0, state.first_length, fresh)

    def step(self, trial: Trial, sigma: jax.Array, rho: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return whether the trial is enough, and else the next length, or 0 if none could tell."""
        c, loss, f, predicted = trial
        # The minimum of the parabola through both losses, with the predicted slope
        beyond = loss - f - predicted
        parabola = -predicted / (2 * jnp.where(beyond > 0, beyond, jnp.ones_like(beyond)))
        shortest = jnp.minimum(_SHORTEST, rho)
        is_known = jnp.isfinite(beyond) & (beyond > 0)
        shorter = c * jnp.where(is_known, jnp.clip(parabola, shortest, rho), shortest)
        is_hidden = -predicted <= jnp.finfo(f.dtype).eps * jnp.abs(f)
        return trial.is_enough(sigma), jnp.where(is_hidden, jnp.zeros_like(c), shorter)

    def predict(self, _: jax.Array, along: Callable[[], jax.Array]) -> jax.Array:
        """Return what the gradient says of the step that the optimizer makes of the direction."""
        return along()

    def share_of_residual(self, is_rounding: jax.Array) -> jax.Array:
        """Take a residual of the size of its own rounding for zero."""
        return ~is_rounding

    def after(self, held: QuasiNewtonState, found: Outcome) -> QuasiNewtonState:
        """Go on where the search stopped; after two searches in vain forget the curvature."""
        stopped = held._replace(first_length=found.next_length)
        is_hopeless = held.has_last & (held.rejections + 1 >= _PATIENCE)
        forgotten = nothing_learned(held.last_gradient.size, held.last_gradient.dtype)
        rejected = _where(is_hopeless, forgotten, stopped)
        return _where(found.num_trials > 0, rejected, held)


LINE_SEARCHES: dict[str, Safeguarded | MindSpore] = {
    "safeguarded": Safeguarded(),
    "mindspore": MindSpore(),
}


def search(
    try_length: Callable[[jax.Array], tuple[jax.Array, jax.Array]],
    first: jax.Array,
    max_trials: jax.Array,
    axes: frozenset[str],
) -> Outcome:
    """Try one length after the other until one is enough.

    Args:
      try_length: Whether a length is enough, and else the next one.
      first: The first length.
      max_trials: How many are tried.
      axes: The mapped axes over which the answers vary.
    """

    def is_searching(carry: Any) -> jax.Array:
        index, c, _, is_accepted = carry
        return ~is_accepted & (index < max_trials) & (c > 0)

    def try_next(carry: Any) -> Any:
        index, c, _, _ = carry
        is_accepted, following = try_length(c)
        return mark_varying((index + 1, following, c, is_accepted), axes)

    start = (jnp.zeros([], jnp.int32), first, jnp.zeros_like(first), jnp.zeros([], jnp.bool_))
    found = jax.lax.while_loop(is_searching, try_next, mark_varying(start, axes))
    index, following, c, is_accepted = found
    return Outcome(jnp.where(is_accepted, c, jnp.zeros_like(c)), is_accepted, following, index)


def after_search(
    held: QuasiNewtonState,
    learned: QuasiNewtonState,
    rejected: QuasiNewtonState,
    found: Outcome,
    d: jax.Array,
    gk: jax.Array,
) -> QuasiNewtonState:
    """Return the state after a step: s <- c d and g_k^last <- g_k, or that of a search in vain."""
    accepted = learned._replace(
        last_gradient=gk,
        last_move=found.step_length * d,
        has_last=jnp.ones([], jnp.bool_),
        first_length=jnp.zeros_like(held.first_length),
    )
    one_more = held.rejections + (found.num_trials > 0).astype(jnp.int32)
    rejections = jnp.where(found.is_accepted, jnp.zeros_like(one_more), one_more)
    return _where(found.is_accepted, accepted, rejected)._replace(rejections=rejections)


def _where(condition: jax.Array, state: QuasiNewtonState, other: Any) -> QuasiNewtonState:
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), state, other)


def _over_square(a: jax.Array, b: jax.Array) -> jax.Array:
    """A / b^2, where b^2 may be too large or too small; XLA would make one division of two."""
    return jax.lax.optimization_barrier(a / b) / b
