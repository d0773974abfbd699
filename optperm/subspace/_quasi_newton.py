"""BFGS updates in a few dimensions.

J. Nocedal and S. J. Wright, "Numerical Optimization", 2006, chapter 6.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from optperm.core.shapes import Array, Bool, Float, Int32


class QuasiNewtonState(NamedTuple):
    r"""The curvature in the subspace, in float32, or in float64 if any parameter is float64.

    Attributes:
      inverse_hessian: :math:`B`, the BFGS approximation.
      has_pair: Whether :math:`B` includes a pair of a step and a change of the gradient.
      last_gradient: The projected gradient of the last accepted step.
      last_move: :math:`s`, the last accepted step.
      has_last: Whether a step has been accepted.
      first_length: The first length of the next line search if the last search failed; otherwise 0.
      rejections: Number of consecutive line searches that found no step.
    """

    inverse_hessian: Float[Array, "k k"]
    has_pair: Bool[Array, ""]
    last_gradient: Float[Array, "k"]
    last_move: Float[Array, "k"]
    has_last: Bool[Array, ""]
    first_length: Float[Array, ""]
    rejections: Int32[Array, ""]


def make_quasi_newton(n_components: int, dtype: Any) -> QuasiNewtonState:
    """Make the state before the first step."""
    return QuasiNewtonState(
        inverse_hessian=jnp.eye(n_components, dtype=dtype),
        has_pair=jnp.zeros([], jnp.bool_),
        last_gradient=jnp.zeros(n_components, dtype),
        last_move=jnp.zeros(n_components, dtype),
        has_last=jnp.zeros([], jnp.bool_),
        first_length=jnp.zeros([], dtype),
        rejections=jnp.zeros([], jnp.int32),
    )


def compute_pair(state: QuasiNewtonState, gk: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return s, y = g_k - g_k^last and y's."""
    s, y = state.last_move, gk - state.last_gradient
    return s, y, dot(y, s)


def add_pair(
    state: QuasiNewtonState,
    b: jax.Array,
    pair: tuple[jax.Array, jax.Array, jax.Array],
    is_positive: jax.Array,
) -> QuasiNewtonState:
    """Return the state with B updated from b with the pair (s, y), if `is_positive` and s exists."""
    s, y, ys = pair
    is_used = state.has_last & is_positive
    # T = I - y s' / y's, B <- T' B T + s s' / y's
    ys = jnp.where(is_used, ys, jnp.ones_like(ys))
    t = jnp.eye(s.size, dtype=s.dtype) - jnp.outer(y / ys, s)
    new = dot(dot(t.T, b), t) + jnp.outer(s / ys, s)
    return state._replace(
        inverse_hessian=jnp.where(is_used, new, state.inverse_hessian),
        has_pair=state.has_pair | is_used,
    )


def dot(a: jax.Array, b: jax.Array) -> jax.Array:
    """Return the product of vectors or matrices, in full precision."""
    return jnp.dot(a, b, precision=jax.lax.Precision.HIGHEST)


def norm(vector: jax.Array) -> jax.Array:
    """Return the norm of a vector whose squares may overflow or underflow."""
    # |v| = m |v / m|, where m is the largest magnitude of an entry
    largest = jnp.max(jnp.abs(vector))
    scale = jnp.where(largest > 0, largest, jnp.ones_like(largest))
    return scale * jnp.sqrt(jnp.sum((vector / scale) ** 2))
