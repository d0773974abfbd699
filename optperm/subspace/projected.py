"""P-SGD: an optimizer that is fed with the part of the gradient within a subspace.

T. Li, L. Tan, Z. Huang, Q. Tao, Y. Liu and X. Huang, "Low Dimensional Trajectory Hypothesis is True:
DNNs Can Be Trained in Tiny Subspaces", TPAMI 2023, arXiv 2103.11154.
"""

from typing import Any, NamedTuple

import optax

from optperm.contract.dtypes import accumulation_dtype, all_finite
from optperm.contract.mapped_axes import AxisName
from optperm.contract.states import one_row
from optperm.contract.transformation import transformation
from optperm.subspace.phases import mean_over_replicas, step_where
from optperm.subspace.subspace import Subspace, empty_subspace, lift, project


class ProjectedState(NamedTuple):
    """State of the second phase of `optperm.dldr` with `second_phase="sgd"`.

    Attributes:
      subspace: The basis.
      inner_state: State of the optimizer that sees the projected gradient.
    """

    subspace: Subspace
    inner_state: Any


def projected(
    optimizer: optax.GradientTransformation, n_components: int, axis_name: AxisName | None
) -> optax.GradientTransformationExtraArgs:
    r"""Feeds an optimizer the projected gradient :math:`P^\top P g`.

    Args:
      optimizer: :math:`u`.
      n_components: The rows of :math:`P`.
      axis_name: The axis over which these rows and the batch are spread.

    Returns:
      A transformation whose state is a `ProjectedState`.
    """
    inner = optax.with_extra_args_support(optimizer)

    def init(params: optax.Params) -> ProjectedState:
        subspace = empty_subspace(params, n_components, axis_name)
        return ProjectedState(subspace, inner.init(params))

    def update(
        updates: optax.Updates, state: ProjectedState, params: optax.Params, **extra_args: Any
    ) -> tuple[optax.Updates, ProjectedState]:
        g, extras = mean_over_replicas(updates, params, extra_args, axis_name)
        # g_k = P g
        gk = project(state.subspace, g, n_components, accumulation_dtype(params), axis_name)
        # theta <- theta + u(P' g_k)
        (p_gk,) = lift(state.subspace, gk[None], axis_name)
        moves, inner_state = step_where(
            all_finite(g), inner, p_gk, state.inner_state, params, extras
        )
        return moves, state._replace(inner_state=inner_state)

    return transformation(
        init,
        update,
        method="dldr",
        like=lambda state: one_row(state.subspace.rows),
        dtypes=False,
        axis_name=axis_name,
    )
