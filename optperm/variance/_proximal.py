"""Proximal steps: exact penalties and bounds at the end of an optimizer's chain.

N. Parikh and S. Boyd, "Proximal Algorithms", Foundations and Trends in Optimization 1 (3), 2014.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optperm.core import checks
from optperm.core.dtypes import accumulation_dtype
from optperm.core.schedules import resolve_schedule
from optperm.core.shapes import Array, Int32, Params, Updates
from optperm.core.transformation import transformation


class ProximalState(NamedTuple):
    """State of `proximal`.

    Attributes:
      count: Number of steps taken.
    """

    count: Int32[Array, ""]  # type: ignore[assignment]


def proximal(
    learning_rate: optax.ScalarOrSchedule,
    *,
    l1: float | jax.Array = 0.0,
    l2: float | jax.Array = 0.0,
    group: float | jax.Array | None = None,
    group_axes: tuple[int, ...] = (0,),
    lower: float | jax.Array | None = None,
    upper: float | jax.Array | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Take the step of an optimizer, then a proximal step for a penalty.

    For incoming updates :math:`u_t` and the learning rate :math:`\eta_t`, the new params are

    .. math::
      \theta_{t+1} = \arg\min_\theta \; \tfrac{1}{2} \lVert \theta - (\theta_t + u_t) \rVert^2
      + \eta_t h(\theta), \qquad
      h(\theta) = \lambda_1 \lVert \theta \rVert_1 + \tfrac{\lambda_2}{2} \lVert \theta \rVert_2^2
      + \lambda_g \sum_g \sqrt{|g|} \, \lVert \theta_g \rVert_2
      \quad \text{within the bounds.}

    Entries and groups that the penalty sets to zero are exactly 0.0. After SGD, this is proximal
    gradient descent (ISTA). After `optperm.svrg` and SGD, it is ProxSVRG::

      optax.chain(optperm.svrg(every=1000), optax.sgd(0.1), optperm.proximal(0.1, l1=1e-3))

    Args:
      learning_rate: :math:`\eta_t`, a number or a schedule: the ratio of a step to the gradient. This is
        the learning rate :math:`\eta` of SGD, or :math:`\eta / (1 - \beta)` with momentum
        :math:`\beta`.
      l1: :math:`\lambda_1 \ge 0`, the weight of the lasso, or of the elastic net with `l2`.
      l2: :math:`\lambda_2 \ge 0`, the weight of the ridge penalty.
      group: :math:`\lambda_g \ge 0`, the weight of the group lasso, or None for no groups. The weight of
        a group is the square root of its size. Leaves with fewer than two axes, such as biases, have no
        groups. To shrink a vector as one group, give it the shape (d, 1).
      group_axes: The axes of the entries of one group: (0,) for the incoming weights of each output unit
        of a dense kernel, (1,) for the outgoing weights of each input.
      lower: The minimum value of an entry, such as 0.0 for nonnegative params.
      upper: The maximum value of an entry.

    Returns:
      A transformation whose state is a `ProximalState`. Its `update` needs `params`.

    Example:
      >>> import jax, jax.numpy as jnp, optax, optperm
      >>> x = jnp.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
      >>> loss_fn = lambda w: 0.5 * jnp.mean((x @ w - jnp.array([2.0, 0.1, 2.1])) ** 2)
      >>> tx = optax.chain(optax.sgd(0.5), optperm.proximal(0.5, l1=0.2))
      >>> @jax.jit
      ... def step(w, opt_state):
      ...     updates, opt_state = tx.update(jax.grad(loss_fn)(w), opt_state, w)
      ...     return optperm.apply_updates(w, updates, opt_state), opt_state
      >>> w = jnp.ones(2)
      >>> opt_state = tx.init(w)
      >>> for _ in range(100):
      ...     w, opt_state = step(w, opt_state)
      >>> [round(entry, 3) for entry in w.tolist()]
      [1.75, 0.0]

    Notes:
      `proximal` must come last in its chain, after SGD. With momentum, the updates approach
      :math:`-\eta / (1 - \beta)` times the gradient, so with :math:`\eta` alone the penalty would be
      smaller by the factor :math:`1 - \beta`. After Adam and similar optimizers, the params converge to
      another point, because each entry has its own learning rate. To accumulate gradients, put the whole
      chain into `optax.MultiSteps`; after `optax.MultiSteps(...).gradient_transformation()`, `proximal`
      would shrink the params in each micro-step. The gradient must not include the penalty. Biases
      usually have no penalty; exclude them with `optax.masked`.

      Params reach 0.0 exactly, and reach a bound up to the rounding of `params + updates`.

    Raises:
      TypeError: If a number has the wrong type, or a parameter does not have a real floating dtype.
      ValueError: If an argument is out of range, `lower` is above `upper`, `group` is given with a
        bound, a leaf does not have the axes of a group, `params` is missing, or the trees passed to
        `update` do not match.

    References:
      Parikh and Boyd, `Proximal Algorithms <https://doi.org/10.1561/2400000003>`_, 2014

      Xiao and Zhang, `A Proximal Stochastic Gradient Method with Progressive Variance Reduction
      <https://arxiv.org/abs/1403.4699>`_, 2014
    """
    checks.check_in_range("learning_rate", learning_rate, 0.0, float("inf"))
    penalties = {"l1": l1, "l2": l2} | ({} if group is None else {"group": group})
    for name, strength in penalties.items():
        checks.check_in_range(name, strength, 0.0, float("inf"), may_be_schedule=False)
    low, high = -float("inf"), float("inf")
    if lower is not None:
        checks.check_in_range("lower", lower, low, high, may_be_schedule=False)
        low = float(lower) if checks.is_concrete_number(lower) else low
    if upper is not None:
        checks.check_in_range("upper", upper, low, high, may_be_schedule=False)
    if group is not None and not lower is upper is None:
        raise ValueError("group cannot be combined with lower or upper.")

    def init(_: Params) -> ProximalState:
        return ProximalState(jnp.zeros([], jnp.int32))

    def update(
        updates: Updates, state: ProximalState, params: Params, **_: Any
    ) -> tuple[Updates, ProximalState]:
        eta = resolve_schedule("learning_rate", learning_rate, state.count, float)

        def step(u: Any, p: Any) -> jax.Array:
            wide = accumulation_dtype((u, p))
            theta, rate = (jnp.asarray(x, wide) for x in (p, eta))
            v = theta + jnp.asarray(u, wide)

            # q = prox(v), v = theta + u: q <- sign(v) max(|v| - eta l1, 0)
            q = jnp.sign(v) * jnp.maximum(jnp.abs(v) - rate * jnp.asarray(l1, wide), 0)
            # q_g <- q_g max(1 - eta lambda_g sqrt|g| / |q_g|, 0)
            if group is not None and q.ndim >= 2:
                if not all(-q.ndim <= axis < q.ndim for axis in group_axes):
                    raise ValueError(
                        "group_axes must be axes of each leaf with two or more axes, got "
                        f"{group_axes} for the shape {q.shape}."
                    )
                q = _shrink_groups(q, rate * jnp.asarray(group, wide), group_axes)
            # q <- q / (1 + eta l2) comes after the other penalties, which are homogeneous of degree 1
            q = q / (1 + rate * jnp.asarray(l2, wide))
            # The updates are q - theta, with q clipped to the bounds.
            bounds = (None if x is None else jnp.asarray(x, wide) for x in (lower, upper))
            return jnp.clip(q, *bounds) - theta

        return jax.tree.map(step, updates, params), ProximalState(optax.safe_increment(state.count))

    return transformation(init, update, method="proximal")


def _shrink_groups(q: jax.Array, strength: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """Shorten each group by strength times the root of its size, or to zero."""
    # |q_g| = m |q_g / m|, to avoid overflow and underflow of squares
    m = jnp.max(jnp.abs(q), axis=axes, keepdims=True, initial=0.0)
    unit = q / jnp.where(m > 0, m, 1)
    norm = m * jnp.sqrt(jnp.sum(jnp.square(unit), axis=axes, keepdims=True))
    root = math.sqrt(q.size // max(norm.size, 1))
    return q * jnp.maximum(1 - strength * root / jnp.where(norm > 0, norm, 1), 0)
