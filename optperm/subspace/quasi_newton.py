"""BFGS in a few dimensions, and line searches along its directions.

J. Nocedal and S. J. Wright, "Numerical Optimization", 2006, chapters 3 and 6.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from optperm.contract.mapped_axes import mark_varying

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int32

LineSearch = Literal["safeguarded", "mindspore"]
# By what a trial is shortened at most, wherever the parabola through it has its minimum.
_SHORTEST = 0.1
# After so many searches in a row without a step the curvature is forgotten.
_PATIENCE = 2


class QuasiNewtonState(NamedTuple):
    r"""What steps in the subspace have taught, all in float32, or in float64 if any parameter is.

    Attributes:
      inverse_hessian: :math:`B`, the BFGS approximation.
      has_pair: Whether a pair of a step and a change of the gradient is in it.
      last_gradient: The projected gradient of the last step that the line search accepted.
      last_move: :math:`s`, that step.
      has_last: Whether there was such a step.
      first_length: Where the next line search begins: where the last one stopped in vain, else 0.
      rejections: Line searches in a row that found no step.
    """

    inverse_hessian: Float[Array, "k k"]
    has_pair: Bool[Array, ""]
    last_gradient: Float[Array, "k"]
    last_move: Float[Array, "k"]
    has_last: Bool[Array, ""]
    first_length: Float[Array, ""]
    rejections: Int32[Array, ""]


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


def nothing_learned(n_components: int, dtype: Any) -> QuasiNewtonState:
    """The state before the first step."""
    return QuasiNewtonState(
        inverse_hessian=jnp.eye(n_components, dtype=dtype),
        has_pair=jnp.zeros([], jnp.bool_),
        last_gradient=jnp.zeros(n_components, dtype),
        last_move=jnp.zeros(n_components, dtype),
        has_last=jnp.zeros([], jnp.bool_),
        first_length=jnp.zeros([], dtype),
        rejections=jnp.zeros([], jnp.int32),
    )


def with_pair(state: QuasiNewtonState, gk: jax.Array, line_search: LineSearch) -> QuasiNewtonState:
    """The state whose B knows the pair (s, y), if there is one and its curvature is positive."""
    hessian, s = state.inverse_hessian, state.last_move
    y = gk - state.last_gradient
    ys = dot(y, s)
    if line_search == "mindspore":
        is_positive = ys > 1e-20
    else:
        is_positive = ys > jnp.finfo(ys.dtype).eps * norm(y) * norm(s)
        # B_0 = (s'y / y'y) I at the first pair
        scale = _over_square(ys, norm(y))
        hessian = jnp.where(state.has_pair, hessian, scale * jnp.eye(s.size, dtype=s.dtype))
    is_used = state.has_last & is_positive
    # T = I - y s' / y's, B <- T' B T + s s' / y's
    ys = jnp.where(is_used, ys, jnp.ones_like(ys))
    t = jnp.eye(s.size, dtype=s.dtype) - jnp.outer(y / ys, s)
    new = dot(dot(t.T, hessian), t) + jnp.outer(s / ys, s)
    return state._replace(
        inverse_hessian=jnp.where(is_used, new, state.inverse_hessian),
        has_pair=state.has_pair | is_used,
    )


def first_length(
    state: QuasiNewtonState, f: jax.Array, gk: jax.Array, line_search: LineSearch
) -> jax.Array:
    """The first length to try: where the last search stopped, or 1, or |f| / |g_k|^2 for an unknown B.

    The last is Polyak's step to a minimum of 0. It does not depend on the scale of the loss.
    """
    one = jnp.ones_like(f)
    if line_search == "mindspore":
        return one
    polyak = _over_square(jnp.abs(f), norm(gk))
    polyak = jnp.where(jnp.isfinite(polyak) & (polyak > 0), polyak, one)
    fresh = jnp.where(state.has_pair, one, polyak)
    return jnp.where(state.first_length > 0, state.first_length, fresh)


def judge(
    c: jax.Array,
    f: jax.Array,
    trial: jax.Array,
    predicted: jax.Array,
    *,
    sigma: jax.Array,
    rho: jax.Array,
    line_search: LineSearch,
) -> tuple[jax.Array, jax.Array]:
    """Whether a trial lowers the loss enough, and else the next length, or 0 if none could tell.

    Args:
      c: The length that was tried.
      f: The loss before.
      trial: The loss there.
      predicted: By how much the gradient predicts the loss to change, negative downhill.
      sigma: The share of it that has to be reached.
      rho: By which a length is shortened at least.
      line_search: Whose rule it is.
    """
    is_enough = jnp.isfinite(trial) & (trial < f + sigma * predicted)
    if line_search == "mindspore":
        return is_enough, rho * c
    # The minimum of the parabola through both losses, with the predicted slope
    beyond = trial - f - predicted
    parabola = -predicted / (2 * jnp.where(beyond > 0, beyond, jnp.ones_like(beyond)))
    shortest = jnp.minimum(_SHORTEST, rho)
    is_known = jnp.isfinite(beyond) & (beyond > 0)
    shorter = c * jnp.where(is_known, jnp.clip(parabola, shortest, rho), shortest)
    is_hidden = -predicted <= jnp.finfo(f.dtype).eps * jnp.abs(f)
    return is_enough, jnp.where(is_hidden, jnp.zeros_like(c), shorter)


def search(
    try_length: Callable[[jax.Array], tuple[jax.Array, jax.Array]],
    first: jax.Array,
    max_trials: jax.Array,
    axes: frozenset[str],
) -> Outcome:
    """Tries one length after the other until one is enough.

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
    outcome: Outcome,
    d: jax.Array,
    gk: jax.Array,
    line_search: LineSearch,
) -> QuasiNewtonState:
    """The state after a step: s <- c d and g_k^last <- g_k, or they and B stay what they were.

    Args:
      held: The state before.
      learned: The one that knows the pair of the last step.
      outcome: What the line search has found.
      d: The direction.
      gk: The projected gradient.
      line_search: Whose rule it is.
    """
    is_rejected = ~outcome.is_accepted & (outcome.num_trials > 0)
    one_more = held.rejections + is_rejected.astype(jnp.int32)
    rejections = jnp.where(outcome.is_accepted, jnp.zeros_like(one_more), one_more)
    accepted = learned._replace(
        last_gradient=gk, last_move=outcome.step_length * d, has_last=jnp.ones([], jnp.bool_)
    )
    accepted = accepted._replace(first_length=jnp.zeros_like(held.first_length))
    rejected = held
    if line_search == "safeguarded":
        stopped = held._replace(first_length=outcome.next_length)
        is_hopeless = held.has_last & (rejections >= _PATIENCE)
        forgotten = nothing_learned(gk.size, gk.dtype)
        rejected = _where(is_rejected, _where(is_hopeless, forgotten, stopped), held)
    return _where(outcome.is_accepted, accepted, rejected)._replace(rejections=rejections)


def _where(condition: jax.Array, state: QuasiNewtonState, other: Any) -> QuasiNewtonState:
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), state, other)


def dot(a: jax.Array, b: jax.Array) -> jax.Array:
    """The product of vectors or matrices, in full precision."""
    return jnp.dot(a, b, precision=jax.lax.Precision.HIGHEST)


def _over_square(a: jax.Array, b: jax.Array) -> jax.Array:
    """A / b^2, where b^2 may be too large or too small; XLA would make one division of two."""
    return jax.lax.optimization_barrier(a / b) / b


def norm(vector: jax.Array) -> jax.Array:
    """The length of a vector whose squares may be too large or too small to be represented."""
    largest = jnp.max(jnp.abs(vector))
    scale = jnp.where(largest > 0, largest, jnp.ones_like(largest))
    return scale * jnp.sqrt(jnp.sum((vector / scale) ** 2))
