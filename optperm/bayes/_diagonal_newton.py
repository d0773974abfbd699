"""Descent with steps scaled by each parameter's curvature: the search for an optimum on batches."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optperm.bayes._covariance import BatchGradients
from optperm.core.dtypes import computed_once, wide_zeros
from optperm.core.keys import key_data
from optperm.core.noise import fold, signs_like
from optperm.core.shapes import Array, Float, Int32, Params, PyTree, Updates
from optperm.core.transformation import transformation

_RATE, _HALVING, _LARGEST = 0.1, 100.0, 0.02


class NewtonState(NamedTuple):
    r"""State of `diagonal_newton`.

    Attributes:
      count: Number of steps taken.
      mean: m, the running mean of the gradients, a tree like params.
      square: :math:`d^2`, the running mean of the square of each entry's curvature.
    """

    count: Int32[Array, ""]  # type: ignore[assignment]
    mean: PyTree[Float[Array, "?*shape"], "Params"]
    square: PyTree[Float[Array, "?*shape"], "Params"]


def diagonal_newton() -> optax.GradientTransformationExtraArgs:
    r"""Descend with steps scaled by each parameter's curvature.

    .. math::
      m \leftarrow 0.9 m + 0.1 g, \qquad
      d_k^2 \leftarrow 0.97 d_k^2 + 0.03 \left(z_k (A D z)_k / D_{kk}\right)^2, \qquad
      u_k = -\frac{\eta_t}{d_k} m_k, \quad \eta_t = \frac{0.1}{1 + t / 100}

    with random signs z and :math:`D = \operatorname{diag}(d)^{-1/2}`, so that large curvatures do not
    hide a small one. A step is at most 0.02 or 2% of the parameter, whichever is larger, and has this
    length without curvature. The number of steps to an optimum grows with the logarithm of its distance.
    """

    def init(params: Params) -> NewtonState:
        return NewtonState(jnp.zeros([], jnp.int32), wide_zeros(params), wide_zeros(params))

    def update(
        g: Updates, state: NewtonState, params: Params, **extra_args: Any
    ) -> tuple[Updates, NewtonState]:
        def root(square: jax.Array) -> jax.Array:
            return jnp.where(square > 0, square, 1.0) ** 0.25

        # Hutchinson's estimate of the diagonal of A, in coordinates where the diagonal is about 1
        z = computed_once(signs_like(fold(key_data(2), state.count), state.mean))
        probe = jax.tree.map(lambda z, s: z / root(s), z, state.square)
        batch = BatchGradients(params, g, extra_args, 1, None, None)
        product = batch.curvature_product(probe)

        def mean(m: jax.Array, g: jax.Array) -> jax.Array:
            return jnp.where(jnp.isfinite(g), 0.9 * m + 0.1 * g.astype(m.dtype), m)

        def square(s: jax.Array, z: jax.Array, a: jax.Array) -> jax.Array:
            new = jnp.square(z * a.astype(s.dtype) * root(s))
            rate = jnp.where(state.count == 0, 1.0, 0.03).astype(s.dtype)
            return jnp.where(jnp.isfinite(new), (1 - rate) * s + rate * new, s)

        following = NewtonState(
            optax.safe_increment(state.count),
            jax.tree.map(mean, state.mean, g),
            jax.tree.map(square, state.square, z, product),
        )
        eta = _RATE / (1 + state.count.astype(jnp.float32) / _HALVING)

        # u_k = -eta m_k / d_k
        def move(m: jax.Array, s: jax.Array, p: jax.Array) -> jax.Array:
            most = _LARGEST * jnp.maximum(jnp.abs(p.astype(m.dtype)), 1.0)
            u = -eta.astype(m.dtype) * m / jnp.sqrt(s)
            return jnp.where(m == 0, 0.0, jnp.clip(u, -most, most))

        return jax.tree.map(move, following.mean, following.square, params), following

    return transformation(
        init,
        update,
        method="learn_kernel",
        like=lambda state: state.mean,
        needs={"grad_fn": "the gradient of the batch at given params"},
    )
