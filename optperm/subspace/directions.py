"""What an optimizer makes of low-rank gradients: its direction, its gain, and how fast it may grow."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from optperm.contract import checks
from optperm.contract.dtypes import accumulation_dtype
from optperm.contract.mapped_axes import cond

# Beside norms in ratios; the authors' number.
_EPS = 1e-8


def inner_direction(
    inner: optax.GradientTransformationExtraArgs, low: Any, state: Any, extra_args: Any, method: str
) -> tuple[Any, Any]:
    """Return N, what an optimizer makes of low-rank gradients, and its new state.

    It gets no params: theirs would be P'W, and a decay of these would act in the subspace alone.
    """
    try:
        return inner.update(low, state, None, **extra_args)
    except ValueError as error:
        # Some map over params that are None, and JAX complains of the tree.
        if "params" not in str(error) and "NoneType" not in str(error):
            raise
        raise ValueError(
            f"inner of {method} needs params, and there are none of low rank: keep weight decay "
            f"outside, as in optax.chain(optperm.{method}(optax.scale_by_adam(), ...), "
            "optax.add_decayed_weights(0.1), optax.scale_by_learning_rate(1e-3))."
        ) from error


def direction_sign(direction: Any, low: Any, known: jax.Array) -> jax.Array:
    r"""Return the sign of :math:`\sum \langle N, R \rangle` over all leaves, or what is known of it.

    It is 0 where the sum is, or is not finite.
    """
    return cond(known == 0, lambda: _sign_of_product(direction, low), lambda: known)


def _sign_of_product(direction: Any, low: Any) -> jax.Array:
    dtype = accumulation_dtype(low)
    products = jax.tree.map(lambda n, r: jnp.sum(n.astype(dtype) * r.astype(dtype)), direction, low)
    total = sum(jax.tree.leaves(products), start=jnp.zeros([], dtype))
    return jnp.where(jnp.isfinite(total), jnp.sign(total), 0.0).astype(jnp.int8)


def gains(direction: jax.Array, low: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    r"""Return :math:`f = \lVert N \rVert / (\lVert R \rVert + 10^{-8})`, with norms over some axes.

    Args:
      direction: N, as a low-rank leaf.
      low: R, of the same shape.
      axes: Of the norms: those of a matrix, or that of its rank for one number for each column.
    """
    after, before = (
        jnp.sqrt(jnp.sum(jnp.square(x), axis=axes, keepdims=True)) for x in (direction, low)
    )
    return after / (before + _EPS)


def check_limit(limit: object) -> None:
    """Raise unless the limit of growth is None, traced, or a number of at least 1."""
    if limit is not None:
        checks.check_in_range("limit", limit, 1.0, float("inf"), may_be_schedule=False)


def growth_limit(
    norm: jax.Array, last: jax.Array, limit: float | jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    r"""Return L, by which a step is divided so that it grows by no more than gamma, and its norm then.

    .. math::
      L = \max(\lVert S \rVert / (q + 10^{-8}), \gamma) / \gamma \text{ if } q > 0 \text{ else } 1,
      \qquad q \leftarrow \lVert S \rVert / L \text{ if that is above 0 and finite}

    Args:
      norm: The norm of the step S.
      last: q, that of the last one; 0 where there is none yet.
      limit: :math:`\gamma`, or None for no limit.
    """
    if limit is None:
        return jnp.ones_like(norm), last
    gamma = jnp.asarray(limit, norm.dtype)
    quotient = jnp.where(last > 0, jnp.maximum(norm / (last + _EPS), gamma) / gamma, 1.0)
    after = norm / quotient
    # A norm of 0 would hold back all steps after it, and one that is not finite for ever.
    return quotient, jnp.where((after > 0) & jnp.isfinite(after), after, last)
