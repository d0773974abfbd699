"""The direction of an optimizer on low-rank gradients, its gain, and a limit on its growth."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from optperm.core import checks
from optperm.core.control import cond
from optperm.core.dtypes import accumulation_dtype
from optperm.core.shardings import unshard
from optperm.memory._matrices import restructure

# This constant from the authors' code is added to norms in denominators.
_EPS = 1e-8
# Norms up to this number of constants make gains smaller by a tenth or more.
_FEW = 10
# A step below this fraction of the last norm is an exception, such as a batch that is mostly padding.
_SHORTEST = 0.1


def compute_direction(
    inner: optax.GradientTransformationExtraArgs,
    low: Any,
    structure: Any,
    state: Any,
    extra_args: Any,
) -> tuple[Any, Any]:
    """Return N, the direction of an optimizer on low-rank gradients, and its new state.

    The optimizer gets no params, because weight decay of P'W would act only in the subspace. It gets the
    gradients in the given structure, in which leaves at full rank have the boxes of the params.
    """
    direction, new = inner.update(restructure(low, structure), state, None, **extra_args)
    return restructure(direction, jax.tree.structure(low)), new


def find_sign(direction: Any, low: Any, known: jax.Array) -> jax.Array:
    r"""Return the known sign, or else the sign of :math:`\sum \langle N, R \rangle` over all leaves.

    The sign is 0 if the sum is 0 or not finite.
    """
    return cond(known == 0, lambda: _find_product_sign(direction, low), lambda: known)


def _find_product_sign(direction: Any, low: Any) -> jax.Array:
    dtype = accumulation_dtype(low)
    products = jax.tree.map(lambda n, r: jnp.sum(n.astype(dtype) * r.astype(dtype)), direction, low)
    total = sum(jax.tree.leaves(products), start=jnp.zeros([], dtype))
    return jnp.where(jnp.isfinite(total), jnp.sign(total), 0.0).astype(jnp.int8)


def compute_gains(direction: jax.Array, low: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    r"""Return :math:`f = \lVert N \rVert / (\lVert R \rVert + 10^{-8})`, with norms over some axes.

    Args:
      direction: N, a low-rank leaf.
      low: R, of the same shape.
      axes: The axes of the norms: both axes of a matrix, or its rank axis for one gain per column.
    """
    return compute_norms(direction, axes) / (compute_norms(low, axes) + _EPS)


def compute_norms(x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """Return the norms over some axes, which remain as axes of size 1."""
    return jnp.sqrt(jnp.sum(jnp.square(x), axis=axes, keepdims=True))


def check_limit(limit: object) -> None:
    """Raise unless the limit of growth is None, traced, or a number of at least 1."""
    if limit is not None:
        checks.check_in_range("limit", limit, 1.0, float("inf"), may_be_schedule=False)


def limit_growth(
    norm: jax.Array,
    last: jax.Array,
    limit: float | jax.Array | None,
    low: jax.Array,
    rank_axis: int,
) -> tuple[jax.Array, jax.Array]:
    r"""Return the divisor L that limits a step's growth to the factor gamma, and the next q.

    .. math::
      L = \max(\lVert S \rVert / (q + 10^{-8}), \gamma) / \gamma \text{ if } q > 0 \text{ else } 1,
      \qquad q \leftarrow \lVert S \rVert / L

    In the authors' code, a single tiny step holds back a thousand steps after it, because q can grow by
    only 1% per step. Therefore q keeps its value if :math:`\lVert S \rVert / L` is below q / 10 or not
    finite, or if each column of R is so small that the constant in the gains determines S.

    Args:
      norm: The norm of the step S.
      last: q, the last norm of a step; 0 before the first.
      limit: :math:`\gamma`, or None for no limit, which leaves q unchanged.
      low: R, a low-rank leaf.
      rank_axis: The axis of R that indexes its rows.
    """
    norm = unshard(norm)
    if limit is None:
        return jnp.ones_like(norm), last
    gamma = jnp.asarray(limit, norm.dtype)
    quotient = jnp.where(last > 0, jnp.maximum(norm / (last + _EPS), gamma) / gamma, 1.0)
    after = norm / quotient
    columns = jnp.sqrt(jnp.sum(jnp.square(low), axis=rank_axis))
    is_seen = unshard(jnp.max(columns, axis=-1)) > _FEW * _EPS
    is_usual = is_seen & (after > _SHORTEST * last) & jnp.isfinite(after)
    return quotient, jnp.where(is_usual, after, last)
