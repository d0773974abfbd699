"""Complete AdamW optimizers with low-rank states or with APOLLO."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import jax
import optax

from optperm.core.shapes import Params
from optperm.memory._apollo import By, apollo
from optperm.memory._low_rank import Projection, Residual, low_rank
from optperm.memory._matrices import Side


def low_rank_adamw(
    learning_rate: optax.ScalarOrSchedule,
    *,
    rank: int | float = 1 / 4,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 1e-4,
    mask: Any | Callable[[Params], Any] | None = None,
    every: int | jax.Array | Callable[[jax.Array], jax.Array] = 200,
    projection: Projection = "random",
    residual: Residual | None = "scaled",
    carry: bool = True,
    scale: float | jax.Array = 1.0,
    side: Side = "smaller",
    limit: float | jax.Array | None = 1.01,
    axes: Any = None,
    key: int | jax.Array = 0,
) -> optax.GradientTransformationExtraArgs:
    r"""Train like `optax.adamw`, but with a smaller state.

    .. math::
      \theta \leftarrow \theta - \eta \left( U + \lambda \theta \right)

    where :math:`U` is the output of `optperm.low_rank` with Adam as the inner optimizer.

    Args:
      learning_rate: :math:`\eta`, a number or a schedule.
      rank: As in `optperm.low_rank`. `optperm.memory.rank_for` finds the rank for a given amount of
        memory.
      b1: The decay rate of the first moment.
      b2: The decay rate of the second moment.
      eps: A constant that is added to the square root of the second moment.
      weight_decay: :math:`\lambda`.
      mask: The params to which weight decay applies, as in `optax.adamw`.
      every: As in `optperm.low_rank`, like all arguments below.
      projection: The kind of basis.
      residual: The treatment of the part of a gradient outside the subspace.
      carry: Whether to carry moments over to a new basis.
      scale: A factor that multiplies the steps of projected leaves.
      side: The side of each matrix to project.
      limit: The maximum growth per step of the part outside the subspace.
      axes: What each leaf is, as in `optperm.low_rank`.
      key: The random key of the bases.

    Returns:
      A transformation. Its `update` needs `params`.

    Example:
      >>> import jax.numpy as jnp, optax, optperm
      >>> params = {"kernel": jnp.ones((64, 256)), "bias": jnp.zeros(256)}
      >>> tx = optperm.memory.low_rank_adamw(1e-3, rank=1 / 8)
      >>> round(optperm.memory.state_report(tx, params).words_per_param, 2)
      0.31

    Raises:
      TypeError: As in `optperm.low_rank`.
      ValueError: As in `optperm.low_rank`.
    """
    adam = optax.scale_by_adam(b1=b1, b2=b2, eps=eps)
    direction = low_rank(
        adam,
        rank,
        every=every,
        projection=projection,
        residual=residual,
        carry=carry,
        scale=scale,
        side=side,
        limit=limit,
        axes=axes,
        b1=b1,
        b2=b2,
        key=key,
    )
    return _decay_and_scale(direction, learning_rate, weight_decay, mask)


def apollo_adamw(
    learning_rate: optax.ScalarOrSchedule,
    *,
    rank: int | float = 1 / 4,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 1e-4,
    mask: Any | Callable[[Params], Any] | None = None,
    every: int | jax.Array = 200,
    by: By = "channel",
    scale: float | jax.Array | Literal["auto"] = "auto",
    limit: float | jax.Array | None = 1.01,
    axes: Any = None,
    key: int | jax.Array = 0,
) -> optax.GradientTransformationExtraArgs:
    r"""Train like `optax.adamw`, but scale each gradient as Adam scales its random projection.

    .. math::
      \theta \leftarrow \theta - \eta \left( U + \lambda \theta \right)

    where :math:`U` is the output of `optperm.apollo` with Adam as the inner optimizer.

    Args:
      learning_rate: :math:`\eta`, a number or a schedule.
      rank: As in `optperm.apollo`.
      b1: The decay rate of the first moment.
      b2: The decay rate of the second moment.
      eps: A constant that is added to the square root of the second moment.
      weight_decay: :math:`\lambda`.
      mask: The params to which weight decay applies, as in `optax.adamw`.
      every: As in `optperm.apollo`, like all arguments below.
      by: The part of a gradient that shares one factor.
      scale: A factor that multiplies the steps of projected leaves.
      limit: The maximum growth per step of the scaled gradient.
      axes: What each leaf is, as in `optperm.low_rank`.
      key: The random key of the projections.

    Returns:
      A transformation. Its `update` needs `params`.

    Example:
      >>> import jax.numpy as jnp, optax, optperm
      >>> params = {"kernel": jnp.ones((64, 256)), "bias": jnp.zeros(256)}
      >>> tx = optperm.memory.apollo_adamw(1e-3, rank=1, by="tensor")
      >>> round(optperm.memory.state_report(tx, params).words_per_param, 2)
      0.06

    Raises:
      TypeError: As in `optperm.apollo`.
      ValueError: As in `optperm.apollo`.
    """
    adam = optax.scale_by_adam(b1=b1, b2=b2, eps=eps)
    direction = apollo(
        adam,
        rank,
        every=every,
        by=by,
        scale=scale,
        limit=limit,
        axes=axes,
        key=key,
    )
    return _decay_and_scale(direction, learning_rate, weight_decay, mask)


def _decay_and_scale(
    direction: optax.GradientTransformation,
    learning_rate: optax.ScalarOrSchedule,
    weight_decay: float,
    mask: Any,
) -> optax.GradientTransformationExtraArgs:
    """Return a transformation followed by AdamW's weight decay and learning rate."""
    return optax.chain(
        direction,
        optax.add_decayed_weights(weight_decay, mask),
        optax.scale_by_learning_rate(learning_rate),
    )
