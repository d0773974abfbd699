"""TWA: train the weights of an average of snapshots.

T. Li, Z. Huang, Q. Tao, Y. Wu and X. Huang, "Trainable Weight Averaging: Efficient Training by
Optimizing Historical Solutions", ICLR 2023, arXiv 2205.13104.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
import optax

from optperm.core import checks
from optperm.core.dtypes import accumulation_dtype, all_finite, cast_like
from optperm.core.mapped_axes import AxisName
from optperm.core.shapes import Params, Updates
from optperm.core.transformation import transformation
from optperm.core.trees import one_row
from optperm.subspace._subspace import (
    Span,
    Subspace,
    check_same_subspace,
    coordinates,
    empty_subspace,
    lift,
    mean_over_replicas,
)


class TwaState(NamedTuple):
    r"""State of `twa`.

    Attributes:
      subspace: The basis :math:`P` of the span of the snapshots.
      inner_state: State of `inner`, the optimizer of the k coordinates :math:`\beta`.
    """

    subspace: Subspace
    inner_state: Any


def twa(
    inner: optax.GradientTransformation,
    *,
    n_components: int,
    axis_name: AxisName | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Train the weights of an average of snapshots, as coordinates in their span.

    The :math:`k` rows of :math:`P` are orthonormal over all params. They span the snapshots
    :math:`\theta_1, \dots, \theta_m` themselves (completely if :math:`k = m`), not their differences.
    The coordinates :math:`\beta` and the step :math:`u` of `inner` give

    .. math::
      \beta = P \theta, \qquad \theta \leftarrow \theta + P^\top u(P g, \beta)

    With any optimizer, the params therefore stay in the span, and the optimizer's state is for only
    :math:`k` numbers. Trainable weight averaging starts at the mean of the snapshots:

    .. code-block:: python

      tx = optperm.dldr(
          optax.sgd(0.1), optperm.twa(optax.sgd(schedule, momentum=0.9), n_components=10),
          every=100, num_snapshots=10, restart="mean",
      )

    In this example, the schedule starts with the second phase.

    Args:
      inner: :math:`u`, any optimizer for an array of shape (k,) in float32, or in float64 if any
        parameter is float64. `value` is its only extra argument.
      n_components: :math:`k \ge 1`, the number of rows of :math:`P`, at most the number of snapshots.
      axis_name: The axis or axes of `jax.pmap`, `jax.shard_map` or `jax.vmap` over which the rows of the
        basis and the batch are distributed, as in `optperm.dim_reduce`. None for a single replica.

    Returns:
      A transformation whose state is a `TwaState`. Its `update` needs `params`.

    Example:
      >>> import jax, jax.numpy as jnp, optax, optperm
      >>> tx = optperm.dldr(
      ...     optax.sgd(1.0), optperm.twa(optax.sgd(0.5), n_components=2),
      ...     every=1, num_snapshots=2, restart="mean",
      ... )
      >>> target = jnp.array([1.0, 2.0, 3.0])
      >>> def step(carry, t):
      ...     w, opt_state = carry
      ...     gradient = jnp.where(t < 2, jnp.array([-1.0, -1.0, 0.0]), w - target)
      ...     updates, opt_state = tx.update(gradient, opt_state, w)
      ...     w = optperm.apply_updates(w, updates, opt_state)
      ...     return (w, opt_state), w
      >>> w = jnp.array([1.0, 0.0, 0.0])
      >>> _, trail = jax.lax.scan(step, (w, tx.init(w)), jnp.arange(30))
      >>> trail[1].tolist()  # the mean of the snapshots, (1, 0, 0) and (2, 1, 0)
      [1.5, 0.5, 0.0]
      >>> [round(x, 3) for x in trail[-1].tolist()]  # the part of the target in their span
      [1.0, 2.0, 0.0]

    Notes:
      `optperm.subspace.set_basis` accepts any orthonormal rows. Until a basis is set, the params do not
      move.

    Raises:
      TypeError: If `n_components` is not an integer, or a parameter does not have a real floating dtype.
      ValueError: If an argument is out of range, `axis_name` is not bound in `init` or `update`, or the
        trees passed to `update` do not match.

    References:
      Li et al., `Trainable Weight Averaging: Efficient Training by Optimizing Historical Solutions
      <https://arxiv.org/abs/2205.13104>`_, 2023
    """
    checks.check_static_count("n_components", n_components)
    optimizer = checks.as_optimizer("inner", inner)

    def init(params: Params) -> TwaState:
        beta = jnp.zeros(n_components, accumulation_dtype(params))
        return TwaState(empty_subspace(params, n_components, axis_name, Span), optimizer.init(beta))

    def update(
        updates: Updates, state: TwaState, params: Params, **extra_args: Any
    ) -> tuple[Updates, TwaState]:
        check_same_subspace("twa", state.subspace, n_components, axis_name)
        g, extras = mean_over_replicas(updates, params, extra_args, axis_name)
        dtype = accumulation_dtype(params)
        # beta = P theta and the gradient with respect to it, P g
        beta, gk = (coordinates(state.subspace, tree, dtype) for tree in (params, g))
        # theta <- theta + P' u(P g, beta)
        step, new = optimizer.update(gk, state.inner_state, beta, value=extras["value"])
        # Coordinates of zero rows do not move.
        is_finite = all_finite(gk)
        step = jnp.where(is_finite & state.subspace.determined, step, 0.0)
        (moves,) = lift(state.subspace, step[None])
        new = optax.tree.where(is_finite, cast_like(new, state.inner_state), state.inner_state)
        return moves, state._replace(inner_state=new)

    return transformation(
        init,
        update,
        method="twa",
        like=lambda state: one_row(state.subspace.rows),
        axis_name=axis_name,
    )
