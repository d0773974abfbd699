"""MARS: correct gradients by their scaled change since the last step, and clip them.

H. Yuan et al., "MARS: Unleashing the Power of Variance Reduction for Training Large Models", 2024.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optperm.core import checks
from optperm.core.dtypes import accumulation_dtype, compute_in_order, zero_if_not_finite
from optperm.core.schedules import resolve_schedule
from optperm.core.shapes import Array, Float, Int32, Params, PyTree, Updates
from optperm.core.transformation import transformation
from optperm.variance._batch_gradients import (
    BATCH_GRADIENT,
    GradFn,
    evaluate_gradient,
    keep_finite,
)


class MarsState(NamedTuple):
    """State of `mars`.

    Attributes:
      count: Number of steps taken.
      last: The last finite gradient, in float32 or wider, or infinity before the first gradient. With
        `exact`, the last params.
    """

    count: Int32[Array, ""]  # type: ignore[assignment]
    last: PyTree[Float[Array, "?*shape"], "Params"]


def mars(
    gamma: optax.ScalarOrSchedule = 0.025,
    b1: float | jax.Array = 0.95,
    max_norm: float | jax.Array = 1.0,
    exact: bool = False,
) -> optax.GradientTransformationExtraArgs:
    r"""Correct gradients by their change since the last step, for an optimizer with momentum.

    .. math::
      c_t = g_t + \gamma \frac{\beta_1}{1 - \beta_1} (g_t - g_{t-1}), \qquad
      \tilde c_t = c_t \min(1, \text{max\_norm} / \|c_t\|)

    where the norm is over a leaf, as in the authors' code, and :math:`c_0 = g_0`. In the approximate
    form, :math:`g_{t-1}` is the gradient of the last step on its own batch. With `exact`, it is the
    gradient of this step's batch at the last params. The paper's MARS-AdamW is
    `optax.chain(optperm.mars(), optax.adamw(3e-3, b1=0.95, b2=0.99))`. With `optax.lion` instead of
    AdamW, it is MARS-Lion.

    Args:
      gamma: :math:`\gamma \ge 0`, a number or a schedule of the step.
      b1: :math:`\beta_1 \in [0, 1)`, usually the optimizer's own value. With this value,
        :math:`\gamma = 1`, `exact` and no clipping, the momentum of :math:`c_t` is STORM's estimate.
      max_norm: The maximum norm of a leaf, or infinity for no clipping.
      exact: Whether :math:`g_{t-1}` is the gradient on this batch at the last params.

    Returns:
      A transformation whose state is a `MarsState`. With `exact`, its `update` needs the extra argument
      `grad_fn(params)` of `optperm.evaluate`, the gradient on this batch at given params.

    Example:
      >>> import jax.numpy as jnp, optax, optperm
      >>> tx = optperm.mars(gamma=0.5, b1=0.5, max_norm=10.0)
      >>> w = jnp.array([1.0, 1.0])
      >>> opt_state = tx.init(w)
      >>> _, opt_state = tx.update(jnp.array([1.0, 2.0]), opt_state, w)
      >>> updates, opt_state = tx.update(jnp.array([2.0, 2.0]), opt_state, w)
      >>> updates.tolist()  # the entry that has grown is taken further
      [2.5, 2.0]

    Notes:
      The approximate form costs only memory. The exact form also costs a second gradient per step, and
      only the exact form reduces the variance between batches.

      Put `mars` before the optimizer. With `exact`, also put it before gradient clipping, because the
      gradients at the last params are not clipped. Put it after any averaging of gradients. Inside
      `optax.MultiSteps(optax.chain(optperm.mars(), optimizer), k)`, the approximate form correctly uses
      the mean gradient, but `exact` would compare the mean with the gradient of the last batch. For
      `exact`, draw random numbers from a key in the batch, so that both gradients use the same numbers.

      Put `optax.zero_nans` and similar transformations after `mars`; otherwise `mars` compares the next
      gradient with zero. By default, the authors' code trains biases and scales with plain AdamW; for
      this, use `optax.masked(optperm.mars(), mask)`.

    Raises:
      TypeError: If a number has the wrong type, or a parameter does not have a real floating dtype.
      ValueError: If an argument is out of range, a needed extra argument is missing, or the trees passed
        to `update` do not match.

    References:
      Yuan et al., `MARS: Unleashing the Power of Variance Reduction for Training Large Models
      <https://arxiv.org/abs/2411.10438>`_, ICML 2025
    """
    checks.check_in_range("gamma", gamma, 0.0, float("inf"))
    checks.check_decay("b1", b1)
    checks.check_positive("max_norm", max_norm)

    def init(params: Params) -> MarsState:
        def fill_unknown(p: Any) -> jax.Array:
            return jnp.full_like(p, jnp.inf, accumulation_dtype(p))

        last = jax.tree.map(jnp.array if exact else fill_unknown, params)
        return MarsState(jnp.zeros([], jnp.int32), last)

    def update(
        grads: Updates,
        state: MarsState,
        params: Params,
        *,
        grad_fn: GradFn | None = None,  # needed if exact
        **_: Any,
    ) -> tuple[Updates, MarsState]:
        # g_{t-1} is stored in the state, or computed on this batch at the last params.
        last_grads = evaluate_gradient(state.last, grad_fn) if exact and grad_fn else state.last
        beta_1 = jnp.asarray(b1, float)
        scale = resolve_schedule("gamma", gamma, state.count, float) * beta_1 / (1.0 - beta_1)

        def correct(g: Any, g_last: Any, theta: Any) -> jax.Array:
            wide, own = accumulation_dtype((g, g_last)), jnp.result_type(theta)
            g, g_last, k, limit = (jnp.asarray(x, wide) for x in (g, g_last, scale, max_norm))

            # c = g + gamma b1 / (1 - b1) (g - g_{t-1})
            c = g + k * (g - g_last)
            # c = g in the first step, and if the correction overflows the parameter's dtype
            c = jnp.where((state.count > 0) & jnp.isfinite(c.astype(own)), c, g)

            # c <- c min(1, max_norm / |c|), with |c| = m |c / m| to avoid overflow of squares
            finite = zero_if_not_finite(c)
            m = jnp.max(jnp.abs(finite), initial=0.0)
            m = jnp.where(m > 0, m, 1.0)
            norm = jnp.sqrt(jnp.sum(jnp.square(finite / m)))
            return c * jnp.where(norm > limit / m, limit / m / norm, 1.0)

        # The correction must read the last gradient before the same buffer is overwritten.
        corrected = jax.tree.map(correct, grads, last_grads, params)
        new_grads, last = compute_in_order(corrected, state.last)
        last = keep_finite(params if exact else grads, last)
        return new_grads, MarsState(optax.safe_increment(state.count), last)

    return transformation(
        init,
        update,
        method="mars",
        like=lambda state: state.last,
        dtypes=exact,
        needs=BATCH_GRADIENT if exact else None,
    )
