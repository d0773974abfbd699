"""Line searches along the direction of a quasi-Newton step.

J. Nocedal and S. J. Wright, "Numerical Optimization", 2006, chapter 3.

A rule has two methods: `learn` updates B with the pair of the last step, and `search` finds a length and
returns the state for the next step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from optperm.core.control import both
from optperm.core.dtypes import computed_once
from optperm.core.mapped_axes import mark_varying, varying_axes
from optperm.core.shapes import Updates
from optperm.subspace._quasi_newton import (
    QuasiNewtonState,
    add_pair,
    compute_pair,
    dot,
    make_quasi_newton,
    norm,
)

# The minimum ratio of successive lengths, for any minimum of the parabola.
_SHORTEST = 0.1
# The number of consecutive failed searches after which the curvature is reset.
_PATIENCE = 2


class Outcome(NamedTuple):
    """Result of a line search.

    Attributes:
      step_length: The accepted length, or 0.
      is_accepted: Whether a length was accepted.
      next_length: The length of the next trial, or 0 if the rounding of the loss hides the decrease.
      num_trials: Number of trials.
    """

    step_length: jax.Array
    is_accepted: jax.Array
    next_length: jax.Array
    num_trials: jax.Array


class Line(NamedTuple):
    """The loss along the direction of a quasi-Newton step, and the options of the search.

    Attributes:
      f: The loss before the step.
      gk: g_k, the projected gradient.
      d: The direction, as coordinates.
      try_step: A function from c to v(c), the optimizer's step of length c, and the loss after the step.
      predict: A function from v to g'v; None if v(c) = c P'd, so that g'v(c) = c g_k'd.
      sigma: The fraction of the predicted decrease that a trial must reach.
      rho: The maximum ratio of a length to the previous, rejected length.
      max_trials: The maximum number of trials.
    """

    f: jax.Array
    gk: jax.Array
    d: jax.Array
    try_step: Callable[[jax.Array], tuple[Updates, jax.Array]]
    predict: Callable[[Updates], jax.Array] | None
    sigma: jax.Array
    rho: jax.Array
    max_trials: jax.Array

    def slope(self, c: jax.Array) -> jax.Array:
        """Return c g_k'd, multiplied in an order that avoids overflow for any scale of the loss."""
        size = norm(self.gk)
        length = jnp.where(size > 0, size, jnp.ones_like(size))
        return length * dot(self.gk / length, c * self.d)

    def is_enough(self, loss: jax.Array, predicted: jax.Array) -> jax.Array:
        """Return whether a loss is below f plus sigma times the predicted change."""
        return jnp.isfinite(loss) & (loss < self.f + self.sigma * predicted)


class MindSpore:
    """The rule of MindSpore's DimReduce: lengths 1, rho, rho^2, ..., and initially B = I."""

    max_trials = 2
    # Whether a residual as small as its own rounding error counts as zero.
    drops_rounding = False

    def learn(self, state: QuasiNewtonState, gk: jax.Array) -> QuasiNewtonState:
        """Update B with pairs for which y's > 1e-20."""
        pair = compute_pair(state, gk)
        return add_pair(state, state.inverse_hessian, pair, pair[2] > 1e-20)

    def search(
        self, line: Line, previous: QuasiNewtonState, current: QuasiNewtonState
    ) -> tuple[Outcome, QuasiNewtonState]:
        """Try 1, rho, rho^2, ...; a failed search changes only `rejections` in the state."""

        def judge(c: jax.Array) -> tuple[jax.Array, jax.Array]:
            _, loss = line.try_step(c)
            return line.is_enough(loss, line.slope(c)), line.rho * c

        found = _try_lengths(judge, jnp.ones_like(line.f), line)
        return found, _after_search(line, found, previous, accepted=current, rejected=previous)


class Safeguarded:
    """A search that does not depend on the scale of the loss or of the params, and does not stall."""

    max_trials = 10
    drops_rounding = True

    def learn(self, state: QuasiNewtonState, gk: jax.Array) -> QuasiNewtonState:
        """Update B with pairs for which y's > eps |y| |s|, starting from B_0 = (s'y / y'y) I."""
        s, y, ys = pair = compute_pair(state, gk)
        is_positive = ys > jnp.finfo(ys.dtype).eps * norm(y) * norm(s)
        initial = _over_square(ys, norm(y)) * jnp.eye(s.size, dtype=s.dtype)
        b = jnp.where(state.has_pair, state.inverse_hessian, initial)
        return add_pair(state, b, pair, is_positive)

    def search(
        self, line: Line, previous: QuasiNewtonState, current: QuasiNewtonState
    ) -> tuple[Outcome, QuasiNewtonState]:
        """Continue from the length of a failed search; after two failures, reset the curvature."""
        # The first length is 1. If B is unknown, it is |f| / |g_k|^2, Polyak's step to a minimum of 0,
        # which does not depend on the scale of the loss.
        one = jnp.ones_like(line.f)
        polyak = _over_square(jnp.abs(line.f), norm(line.gk))
        polyak = jnp.where(jnp.isfinite(polyak) & (polyak > 0), polyak, one)
        fresh = jnp.where(current.has_pair, one, polyak)
        first = jnp.where(current.first_length > 0, current.first_length, fresh)

        def judge(c: jax.Array) -> tuple[jax.Array, jax.Array]:
            v, loss = line.try_step(c)
            predicted = line.slope(c) if line.predict is None else line.predict(v)
            shorter = c * find_ratio(loss - line.f, predicted, line.rho)
            is_hidden = -predicted <= jnp.finfo(line.f.dtype).eps * jnp.abs(line.f)
            following = jnp.where(is_hidden, jnp.zeros_like(c), shorter)
            return line.is_enough(loss, predicted), following

        found = _try_lengths(judge, first, line)
        stopped = previous._replace(first_length=found.next_length)
        is_hopeless = previous.has_last & (previous.rejections + 1 >= _PATIENCE)
        forgotten = make_quasi_newton(previous.last_gradient.size, previous.last_gradient.dtype)
        rejected = _where(is_hopeless, forgotten, stopped)
        rejected = _where(found.num_trials > 0, rejected, previous)
        return found, _after_search(line, found, previous, accepted=current, rejected=rejected)


LINE_SEARCHES: dict[str, Safeguarded | MindSpore] = {
    "safeguarded": Safeguarded(),
    "mindspore": MindSpore(),
}


def find_ratio(change: jax.Array, predicted: jax.Array, rho: jax.Array) -> jax.Array:
    """Return the ratio of the next length to c, from the actual and the predicted change of the loss.

    The parabola q(t) = f + p t + (f(c) - f - p) t^2 through both losses, with the predicted slope p, has
    its minimum at the ratio t = -p / (2 (f(c) - f - p)).
    """
    beyond = change - predicted
    parabola = -predicted / (2 * jnp.where(beyond > 0, beyond, jnp.ones_like(beyond)))
    shortest = jnp.minimum(_SHORTEST, rho)
    is_known = jnp.isfinite(beyond) & (beyond > 0)
    return jnp.where(is_known, jnp.clip(parabola, shortest, rho), shortest)


def _try_lengths(
    judge: Callable[[jax.Array], tuple[jax.Array, jax.Array]], first: jax.Array, line: Line
) -> Outcome:
    """Try lengths one after another until a length is accepted.

    Args:
      judge: A function that returns whether to accept a length, and the next length.
      first: The first length.
      line: The line.
    """
    axes = varying_axes(line.f, line.gk, line.max_trials)

    def is_searching(carry: Any) -> jax.Array:
        index, c, _, is_accepted = carry
        # c = 0 if the rounding of the loss would hide the results of further trials
        return both(~is_accepted, c > 0) & (index < line.max_trials)

    def try_next(carry: Any) -> Any:
        index, c, _, _ = carry
        is_accepted, following = judge(c)
        return mark_varying((index + 1, following, c, is_accepted), axes)

    start = (jnp.zeros([], jnp.int32), first, jnp.zeros_like(first), jnp.zeros([], jnp.bool_))
    found = jax.lax.while_loop(is_searching, try_next, mark_varying(start, axes))
    index, following, c, is_accepted = found
    return Outcome(
        step_length=jnp.where(is_accepted, c, jnp.zeros_like(c)),
        is_accepted=is_accepted,
        next_length=following,
        num_trials=index,
    )


def _after_search(
    line: Line,
    found: Outcome,
    previous: QuasiNewtonState,
    *,
    accepted: QuasiNewtonState,
    rejected: QuasiNewtonState,
) -> QuasiNewtonState:
    """Return the state after a search: s <- c d and g_k^last <- g_k, or the state of a failed search."""
    accepted = accepted._replace(
        last_gradient=line.gk,
        last_move=found.step_length * line.d,
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
    """Return a / b^2, even if b^2 overflows or underflows; XLA would merge two plain divisions."""
    return computed_once(a / b) / b
