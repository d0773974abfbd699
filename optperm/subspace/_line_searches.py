"""Line searches along the direction of a quasi-Newton step.

J. Nocedal and S. J. Wright, "Numerical Optimization", 2006, chapter 3.

Both searches have the same methods. `learn` updates B by the pair of the last step, `init` returns the
first length, `step` judges a length and returns the next, and `after` returns the state after a failed
search.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from optperm.core.control import both
from optperm.core.mapped_axes import mark_varying
from optperm.subspace._quasi_newton import (
    QuasiNewtonState,
    add_pair,
    compute_pair,
    make_quasi_newton,
    norm,
)

# The minimum ratio of successive lengths, wherever the parabola has its minimum.
_SHORTEST = 0.1
# The number of failed searches in a row after which the curvature is forgotten.
_PATIENCE = 2


class Outcome(NamedTuple):
    """Result of a line search.

    Attributes:
      step_length: The accepted length, or 0.
      is_accepted: Whether a length was accepted.
      next_length: The length of the next trial, or 0 where the rounding of the loss hides the decrease.
      num_trials: Number of trials.
    """

    step_length: jax.Array
    is_accepted: jax.Array
    next_length: jax.Array
    num_trials: jax.Array


class Trial(NamedTuple):
    """Result of a trial.

    Attributes:
      length: The length of the trial.
      loss: The loss there.
      start: The loss before the step.
      predicted: The change of the loss that the gradient predicts, negative downhill.
    """

    length: jax.Array
    loss: jax.Array
    start: jax.Array
    predicted: jax.Array

    def is_enough(self, sigma: jax.Array) -> jax.Array:
        """Return whether the loss falls by a fraction sigma of the predicted decrease."""
        return jnp.isfinite(self.loss) & (self.loss < self.start + sigma * self.predicted)


@dataclasses.dataclass(frozen=True)
class MindSpore:
    """The rule of MindSpore's DimReduce: lengths 1, rho, rho^2, ..., and B = I at first."""

    max_trials: int = 2

    def learn(self, state: QuasiNewtonState, gk: jax.Array) -> QuasiNewtonState:
        """Update B by pairs of y's > 1e-20."""
        pair = compute_pair(state, gk)
        return add_pair(state, state.inverse_hessian, pair, pair[2] > 1e-20)

    def init(self, state: QuasiNewtonState, f: jax.Array, gk: jax.Array) -> jax.Array:
        """Return 1."""
        return jnp.ones_like(f)

    def step(self, trial: Trial, sigma: jax.Array, rho: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return whether to accept the trial, and rho times its length."""
        return trial.is_enough(sigma), rho * trial.length

    def predict(self, slope: jax.Array, _: Callable[[], jax.Array]) -> jax.Array:
        """Return c g_k'd, for any step of the optimizer along the direction."""
        return slope

    def weigh_residual(self, is_rounding: jax.Array) -> jax.Array:
        """Return 1: the residual is used as it is."""
        return jnp.ones_like(is_rounding)

    def after(self, previous: QuasiNewtonState, found: Outcome) -> QuasiNewtonState:
        """Return the state before the search."""
        return previous


@dataclasses.dataclass(frozen=True)
class Safeguarded:
    """A search that does not depend on the scale of the loss or of the params, and does not stall."""

    max_trials: int = 10

    def learn(self, state: QuasiNewtonState, gk: jax.Array) -> QuasiNewtonState:
        """Update B by pairs of y's > eps |y| |s|, at the first pair from B_0 = (s'y / y'y) I."""
        s, y, ys = pair = compute_pair(state, gk)
        is_positive = ys > jnp.finfo(ys.dtype).eps * norm(y) * norm(s)
        initial = _over_square(ys, norm(y)) * jnp.eye(s.size, dtype=s.dtype)
        hessian = jnp.where(state.has_pair, state.inverse_hessian, initial)
        return add_pair(state, hessian, pair, is_positive)

    def init(self, state: QuasiNewtonState, f: jax.Array, gk: jax.Array) -> jax.Array:
        """Return the length where the last search stopped, or 1, or |f| / |g_k|^2 for an unknown B.

        The last is Polyak's step to a minimum of 0, which does not depend on the scale of the loss.
        """
        one = jnp.ones_like(f)
        polyak = _over_square(jnp.abs(f), norm(gk))
        polyak = jnp.where(jnp.isfinite(polyak) & (polyak > 0), polyak, one)
        fresh = jnp.where(state.has_pair, one, polyak)
        return jnp.where(state.first_length > 0, state.first_length, fresh)

    def step(self, trial: Trial, sigma: jax.Array, rho: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return whether to accept the trial, and the next length, or 0 if rounding hides its result."""
        c, loss, f, predicted = trial
        # The parabola q(t) = f + p t + (f(c) - f - p) t^2 through both losses, with the predicted slope
        # p, has its minimum at t = -p / (2 (f(c) - f - p)), as a ratio of lengths.
        beyond = loss - f - predicted
        parabola = -predicted / (2 * jnp.where(beyond > 0, beyond, jnp.ones_like(beyond)))
        shortest = jnp.minimum(_SHORTEST, rho)
        is_known = jnp.isfinite(beyond) & (beyond > 0)
        shorter = c * jnp.where(is_known, jnp.clip(parabola, shortest, rho), shortest)
        is_hidden = -predicted <= jnp.finfo(f.dtype).eps * jnp.abs(f)
        return trial.is_enough(sigma), jnp.where(is_hidden, jnp.zeros_like(c), shorter)

    def predict(self, _: jax.Array, along: Callable[[], jax.Array]) -> jax.Array:
        """Return the change that the gradient predicts for the optimizer's step."""
        return along()

    def weigh_residual(self, is_rounding: jax.Array) -> jax.Array:
        """Return 0 for a residual of the size of its own rounding, else 1."""
        return ~is_rounding

    def after(self, previous: QuasiNewtonState, found: Outcome) -> QuasiNewtonState:
        """Continue where the search stopped; after two failed searches forget the curvature."""
        stopped = previous._replace(first_length=found.next_length)
        is_hopeless = previous.has_last & (previous.rejections + 1 >= _PATIENCE)
        forgotten = make_quasi_newton(previous.last_gradient.size, previous.last_gradient.dtype)
        rejected = _where(is_hopeless, forgotten, stopped)
        return _where(found.num_trials > 0, rejected, previous)


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
    """Try lengths one after the other until a length is accepted.

    Args:
      try_length: Returns whether to accept a length, and the next length.
      first: The first length.
      max_trials: The maximum number of trials.
      axes: The mapped axes over which results vary.
    """

    def is_searching(carry: Any) -> jax.Array:
        index, c, _, is_accepted = carry
        # c = 0 where the rounding of the loss hides the result of further trials
        return both(~is_accepted, c > 0) & (index < max_trials)

    def try_next(carry: Any) -> Any:
        index, c, _, _ = carry
        is_accepted, following = try_length(c)
        return mark_varying((index + 1, following, c, is_accepted), axes)

    start = (jnp.zeros([], jnp.int32), first, jnp.zeros_like(first), jnp.zeros([], jnp.bool_))
    found = jax.lax.while_loop(is_searching, try_next, mark_varying(start, axes))
    index, following, c, is_accepted = found
    return Outcome(jnp.where(is_accepted, c, jnp.zeros_like(c)), is_accepted, following, index)


def after_search(
    previous: QuasiNewtonState,
    current: QuasiNewtonState,
    rejected: QuasiNewtonState,
    found: Outcome,
    d: jax.Array,
    gk: jax.Array,
) -> QuasiNewtonState:
    """Return the state after a search: s <- c d and g_k^last <- g_k, or the state of a failed search."""
    accepted = current._replace(
        last_gradient=gk,
        last_move=found.step_length * d,
        has_last=jnp.ones([], jnp.bool_),
        first_length=jnp.zeros_like(previous.first_length),
    )
    # A step without a search (no basis, or f not finite) is not a failed search.
    one_more = previous.rejections + (found.num_trials > 0).astype(jnp.int32)
    rejections = jnp.where(found.is_accepted, jnp.zeros_like(one_more), one_more)
    return _where(found.is_accepted, accepted, rejected)._replace(rejections=rejections)


def _where(condition: jax.Array, state: QuasiNewtonState, other: Any) -> QuasiNewtonState:
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), state, other)


def _over_square(a: jax.Array, b: jax.Array) -> jax.Array:
    """Return a / b^2, where b^2 may overflow or underflow; XLA would merge the two divisions."""
    return jax.lax.optimization_barrier(a / b) / b
