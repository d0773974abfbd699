"""APOLLO: scale the gradient by an optimizer's step on a random projection of the gradient.

H. Zhu et al., "APOLLO: SGD-like Memory, AdamW-level Performance", MLSys 2025, arXiv 2412.05270.
"""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import optax

from optperm._leaf_axes import warn_of_others
from optperm.core import checks
from optperm.core.dtypes import accumulation_dtype
from optperm.core.fingerprints import UNSET, describe_difference
from optperm.core.keys import key_data
from optperm.core.mapped_axes import varying_zeros
from optperm.core.noise import fold, normal
from optperm.core.shapes import Array, Float, Int8, Int32, Params, PyTree, UInt32, Updates
from optperm.core.transformation import transformation
from optperm.core.trees import without_boxes
from optperm.memory._directions import (
    check_limit,
    compute_direction,
    compute_gains,
    find_sign,
    limit_growth,
)
from optperm.memory._matrices import (
    Matrix,
    check_rank,
    describe_axes,
    find_low_structure,
    make_batch_zeros,
    make_low,
    plan_matrices,
    project_leaf,
    restructure,
    unzip,
)

By = Literal["channel", "tensor"]


class ApolloState(NamedTuple):
    """State of `apollo`.

    Attributes:
      count: Number of steps taken.
      norm: q, of shape (...), the norm of each matrix's last step that was not an exception (see
        `limit`), without the factor `scale`. It is 0 before the first step, for leaves at full rank, and
        without a `limit`.
      sign: 1 if `inner` points along the gradient, -1 if against the gradient, 0 if still unknown.
      inner_state: State of `inner`, over low-rank leaves and leaves at full rank.
      fingerprint: The arguments `rank` and `axes` with which the state was made.
    """

    count: Int32[Array, ""]  # type: ignore[assignment]
    norm: PyTree[Float[Array, "..."], "Params"]
    sign: Int8[Array, ""]
    inner_state: Any
    fingerprint: UInt32[Array, "2"] = UNSET

    def shaped_by(self) -> tuple[str, ...]:
        """Return the names of the arguments in the fingerprint."""
        return "rank", "axes"


def apollo(
    inner: optax.GradientTransformation | None = None,
    rank: int | float = 1 / 4,
    *,
    every: int | jax.Array = 200,
    by: By = "channel",
    scale: float | jax.Array | Literal["auto"] = "auto",
    limit: float | jax.Array | None = 1.01,
    axes: Any = None,
    key: int | jax.Array = 0,
) -> optax.GradientTransformationExtraArgs:
    r"""Scale each gradient as an optimizer scales its random projection.

    Let G be the d x k gradient of a matrix, where d is its smaller side. The optimizer sees
    :math:`R = B^\top G`, where the entries of the d x r matrix B are drawn from
    :math:`\mathcal N(0, 1 / r)`. The optimizer's moments therefore have r x k entries. Let N be the
    optimizer's direction for R. Each column j of the gradient (a channel) is scaled like its projection,

    .. math::
      U_j = \text{scale} \, G_j \frac{\lVert N_j \rVert}{\lVert R_j \rVert},

    or the whole matrix is scaled by one number. The norm of the step grows by at most the factor `limit`
    per step. B changes every `every` steps; it is not stored, but drawn again from its key in each step.
    The moments do not change when B changes, because the step uses only norms.

    APOLLO-Mini is `optperm.apollo(rank=1, by="tensor", scale=128**0.5)`. The leaves to project are
    chosen as in `optperm.low_rank`. The learning rate and weight decay come after this transformation::

      optax.chain(
          optperm.apollo(rank=1 / 4), optax.add_decayed_weights(0.1),
          optax.scale_by_learning_rate(3e-3)
      )

    Args:
      inner: The optimizer: a transformation that needs no params and has no learning rate. None for
        `optax.scale_by_adam()`. Put `optax.add_decayed_weights` after `apollo`. A complete optimizer
        works too; the step then has the sign of the optimizer's steps.
      rank: r, an integer of at least 1, or a fraction in (0, 1) of each leaf's smaller side.
      every: The number of steps with the same projection, at least 1.
      by: The part of a gradient that shares one factor: each "channel", or the whole "tensor".
      scale: A factor that multiplies the steps of projected leaves. N has r entries per column, while
        Adam's step has d entries. "auto" corrects for this difference with :math:`\sqrt{d / r}`, so you
        can start with AdamW's learning rate. Then tune the rate: for the matrices of a small decoder,
        the best rate was four to eight times AdamW's rate. The `scale` of the authors' code is the
        square of this argument.
      limit: The maximum factor by which the norm grows per step, at least 1, or None for no limit. The
        limit ignores steps that are not finite or below a tenth of the step before, as in
        `optperm.low_rank`.
      axes: What each leaf is, as in `optperm.low_rank`.
      key: The random key of the projections: an int or a `jax.random.key`.

    Returns:
      A transformation whose state is an `ApolloState`. Its `update` needs no params.

    Example:
      >>> import jax.numpy as jnp, optax, optperm
      >>> tx = optax.chain(optperm.apollo(optax.trace(0.9), 2), optax.scale_by_learning_rate(0.1))
      >>> params = {"kernel": jnp.ones((8, 16))}
      >>> opt_state = tx.init(params)
      >>> updates, opt_state = tx.update(params, opt_state)
      >>> updates["kernel"].shape, opt_state[0].inner_state.trace["kernel"].shape
      ((8, 16), (2, 16))

    Notes:
      With Adam, a projected leaf takes 2 r k words instead of 2 d k. The method adds 1e-8 to
      :math:`\lVert R_j \rVert`, so columns whose norm is below about 1e-8 hardly move.

    Raises:
      TypeError: If `inner` is not a transformation, a number or an entry of `axes` has the wrong type,
        or a parameter does not have a real floating dtype.
      ValueError: If an argument is out of range; if `rank` exceeds the smaller side of every kernel; if
        `axes` does not fit the params or names no kernels; if `update` gets a state that was made with
        other `rank` or `axes`; or, from `inner`, if it needs params.

    References:
      Zhu et al., `APOLLO: SGD-like Memory, AdamW-level Performance
      <https://arxiv.org/abs/2412.05270>`_, 2024
    """
    inner = optax.scale_by_adam() if inner is None else inner
    checks.check_transformation("inner", inner)
    check_rank(rank)
    checks.check_count("every", every)
    checks.check_choice("by", by, get_args(By))
    if not isinstance(scale, str) or scale != "auto":
        checks.check_positive("scale", scale)
    check_limit(limit)
    checks.check_key("key", key)
    optimizer = optax.with_extra_args_support(inner)

    def init(params: Params) -> ApolloState:
        plans = plan_matrices(params, rank, "smaller", axes)
        warn_of_others("apollo", params, axes)
        return ApolloState(
            count=jnp.zeros([], jnp.int32),
            norm=jax.tree.map(make_batch_zeros, without_boxes(params), plans),
            sign=varying_zeros(params, jnp.int8),
            inner_state=inner.init(make_low(params, plans)),
        )

    def update(
        updates: Updates, state: ApolloState, _: Any = None, **extra_args: Any
    ) -> tuple[Updates, ApolloState]:
        plans = plan_matrices(updates, rank, "smaller", axes)
        _check_same_shapes(optimizer, updates, plans, state)
        grads = without_boxes(updates)
        structure: Any = jax.tree.structure(grads)
        numbers = structure.unflatten(range(structure.num_leaves))

        # R = B' G, with entries of B from N(0, 1 / r), and N, inner <- inner(R)
        drawn = fold(key_data(key), state.count // jnp.asarray(every, jnp.int32))

        def draw_and_project(leaf: Any, m: Matrix | None, number: int) -> Any:
            basis = None if m is None else draw_gaussian_basis(drawn, number, m, leaf)
            return project_leaf(leaf, m, basis)

        exact = jax.tree.map(draw_and_project, grads, plans, numbers)
        low, low_structure = optax.tree.cast_like(exact, grads), find_low_structure(updates, plans)
        direction, inner_state = compute_direction(
            optimizer, low, low_structure, state.inner_state, extra_args
        )
        sign = find_sign(direction, low, state.sign)

        # U = scale S / L, and N for leaves at full rank
        def step(leaf: Any, m: Matrix | None, r: Any, n: Any, q: Any) -> Any:
            if m is None:
                return n, q
            g, n = m.turn(m.matrices(leaf)).astype(r.dtype), n.astype(r.dtype)
            # S = G f, with f = |N| / |R| of each column or of the matrix
            f = compute_gains(n, r, (m.rank_axis,) if by == "channel" else (-2, -1))
            norm = jnp.sqrt(jnp.sum(jnp.square(f * g), axis=(-2, -1)))
            # |S / L| <= limit q
            quotient, q = limit_growth(norm, q, limit, r, m.rank_axis)
            # scale = sqrt(d / r) for "auto"; U has the sign relative to G that N has relative to R
            size = math.sqrt(m.d / m.rank) if isinstance(scale, str) else scale
            factor = jnp.asarray(size, f.dtype) * sign.astype(f.dtype) / quotient
            return m.leaf(m.turn(factor[..., None, None] * f * g)), q

        u, norm = unzip(jax.tree.map(step, grads, plans, exact, direction, state.norm), grads)
        return restructure(u, jax.tree.structure(updates)), ApolloState(
            count=optax.safe_increment(state.count),
            norm=norm,
            sign=sign,
            inner_state=inner_state,
            fingerprint=state.fingerprint,
        )

    def shape_arguments(params: Params) -> dict[str, Any]:
        plans = plan_matrices(params, rank, "smaller", axes)
        return {"rank": rank, "axes": describe_axes(plans)}

    # An update needs only the gradients; params determine only the dtypes.
    return transformation(
        init, update, method="apollo", needs_params=False, shape_arguments=shape_arguments
    )


def _check_same_shapes(
    inner: optax.GradientTransformation, updates: Updates, plans: Any, state: ApolloState
) -> None:
    """Raise if the state of `inner` is for low-rank leaves of other shapes, which may broadcast.

    The arguments of a state that is not traced are compared by its fingerprint.
    """
    if not isinstance(state.count, jax.core.Tracer):
        return
    wanted: Any = jax.eval_shape(lambda tree: inner.init(make_low(tree, plans)), updates)
    structures: list[Any] = [jax.tree.structure(tree) for tree in (wanted, state.inner_state)]
    shapes = [list(map(jnp.shape, jax.tree.leaves(tree))) for tree in (wanted, state.inner_state)]
    if structures[0] == structures[1] and shapes[0] != shapes[1]:
        raise ValueError(describe_difference("apollo", "rank"))


def draw_gaussian_basis(data: jax.Array, index: int, matrix: Matrix, leaf: jax.Array) -> jax.Array:
    """Draw B, (..., d, r), for the leaf with this index, from the key data of the current projection."""
    shape, dtype = matrix.basis_shape, accumulation_dtype(leaf)
    return normal(data, index, shape, dtype) / math.sqrt(matrix.rank)
