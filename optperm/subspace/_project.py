"""P-SGD: an optimizer that sees only the part of the gradient in a subspace.

T. Li, L. Tan, Z. Huang, Q. Tao, Y. Liu and X. Huang, "Low Dimensional Trajectory Hypothesis is True:
DNNs Can Be Trained in Tiny Subspaces", TPAMI 2023, arXiv 2103.11154.
"""

from typing import Any, NamedTuple

import optax

from optperm.core import checks
from optperm.core.dtypes import accumulation_dtype, all_finite
from optperm.core.mapped_axes import AxisName
from optperm.core.shapes import Params, Updates
from optperm.core.transformation import transformation
from optperm.core.trees import one_row
from optperm.subspace._subspace import (
    Subspace,
    check_same_subspace,
    coordinates,
    empty_subspace,
    lift,
    mean_over_replicas,
    step_where,
)


class ProjectState(NamedTuple):
    """State of `project`.

    Attributes:
      subspace: The basis :math:`P`.
      inner_state: State of `inner`, which sees the projected gradient.
    """

    subspace: Subspace
    inner_state: Any


def project(
    inner: optax.GradientTransformation,
    *,
    n_components: int,
    axis_name: AxisName | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Run an optimizer on the part of the gradient in a subspace.

    The :math:`k` rows of :math:`P` are orthonormal over all params; `optperm.subspace.set_basis` or
    `optperm.dldr` sets them. With the step :math:`u` of `inner`,

    .. math::
      \theta \leftarrow \theta + u(P^\top P g)

    With SGD as `inner`, with or without momentum, this is P-SGD: the params stay in the subspace through
    their current values. Until a basis is set, `inner` sees a zero gradient.

    Args:
      inner: :math:`u`, any optimizer.
      n_components: :math:`k \ge 1`, the number of rows of :math:`P`.
      axis_name: The axis or axes of `jax.pmap`, `jax.shard_map` or `jax.vmap` over which the rows of the
        basis and the batch are distributed, as in `optperm.dim_reduce`. None for a single replica.

    Returns:
      A transformation whose state is a `ProjectState`. Its `update` needs `params`.

    Example:
      >>> import jax.numpy as jnp, optax, optperm
      >>> tx = optperm.project(optax.sgd(0.5), n_components=1)
      >>> w = jnp.array([4.0, 2.0])
      >>> opt_state = optperm.subspace.set_basis(tx.init(w), jnp.array([[1.0, 0.0]]))
      >>> updates, opt_state = tx.update(w, opt_state, w)
      >>> (w + updates).tolist()
      [2.0, 2.0]

    Notes:
      An optimizer that is not linear in the gradient leaves the subspace. `optperm.twa` instead trains
      the coordinates with any optimizer.

    Raises:
      TypeError: If `n_components` is not an integer, or a parameter does not have a real floating dtype.
      ValueError: If an argument is out of range, `axis_name` is not bound in `init` or `update`, or the
        trees passed to `update` do not match.

    References:
      Li et al., `Low Dimensional Trajectory Hypothesis is True: DNNs Can Be Trained in Tiny Subspaces
      <https://arxiv.org/abs/2103.11154>`_, 2023
    """
    checks.check_static_count("n_components", n_components)
    optimizer = checks.as_optimizer("inner", inner)

    def init(params: Params) -> ProjectState:
        subspace = empty_subspace(params, n_components, axis_name)
        return ProjectState(subspace, optimizer.init(params))

    def update(
        updates: Updates, state: ProjectState, params: Params, **extra_args: Any
    ) -> tuple[Updates, ProjectState]:
        check_same_subspace("project", state.subspace, n_components, axis_name)
        g, extras = mean_over_replicas(updates, params, extra_args, axis_name)
        # g_k = P g
        gk = coordinates(state.subspace, g, accumulation_dtype(params))
        # theta <- theta + u(P' g_k)
        (p_gk,) = lift(state.subspace, gk[None])
        moves, inner_state = step_where(
            all_finite(p_gk), optimizer, p_gk, state.inner_state, params, extras
        )
        return moves, state._replace(inner_state=inner_state)

    return transformation(
        init,
        update,
        method="project",
        like=lambda state: one_row(state.subspace.rows),
        axis_name=axis_name,
    )
