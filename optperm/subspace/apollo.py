"""APOLLO: the gradient itself, scaled by what an optimizer makes of a random projection of it.

H. Zhu et al., "APOLLO: SGD-like Memory, AdamW-level Performance", MLSys 2025, arXiv 2412.05270.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import optax

from optperm.contract import checks
from optperm.contract.dtypes import accumulation_dtype
from optperm.contract.mapped_axes import mark_varying, varying_axes
from optperm.contract.shardings import unshard
from optperm.contract.transformation import transformation
from optperm.subspace.directions import (
    check_limit,
    direction_sign,
    gains,
    growth_limit,
    inner_direction,
)
from optperm.subspace.matrices import (
    DimensionNumbers,
    Matrix,
    check_projection,
    low_rank_leaves,
    low_rank_like,
    map_plans,
    matrices_of,
    note,
    project_leaf,
    zeros_of_batch,
)

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int8, Int32, PyTree

By = Literal["channel", "tensor"]


class ApolloState(NamedTuple):
    """State of `apollo`.

    Attributes:
      count: Steps taken.
      norm: q, the norm of the step of each matrix before `scale`, (...); 0 for none yet, and for
        leaves that stay at full rank.
      sign: 1 if `inner` points along the gradient, -1 if against it, 0 while that is not known.
      inner_state: State of `inner`, over low-rank leaves and those that stay at full rank.
    """

    count: Int32[Array, ""]  # type: ignore[assignment]
    norm: PyTree[Float[Array, "..."], "Params"]
    sign: Int8[Array, ""]
    inner_state: Any


def apollo(
    inner: optax.GradientTransformation | None = None,
    rank: int | float = 1 / 4,
    *,
    update_every: int | jax.Array = 200,
    by: By = "channel",
    scale: float | jax.Array | Literal["auto"] = "auto",
    limit: float | jax.Array | None = 1.01,
    dimension_numbers: DimensionNumbers | None = None,
    seed: int | jax.Array = 0,
) -> optax.GradientTransformationExtraArgs:
    r"""Scale each gradient by what an optimizer makes of a random projection of it.

    Of a matrix's gradient G, d x k with d its smaller side, the optimizer sees
    :math:`R = B^\top G`, where the entries of B, d x r, are drawn from :math:`\mathcal N(0, 1 /
    r)`, and so keeps moments of r x k numbers. With N what it makes of R, each column j, or
    channel, of the gradient is scaled as its projection was,

    .. math::
      U_j = \text{scale} \, G_j \frac{\lVert N_j \rVert}{\lVert R_j \rVert},

    or the whole matrix by one number, and the norm of the step grows by at most `limit` from step
    to step. B is another one every `update_every` steps; it is drawn anew in each step and never
    stored, and moments are kept over a change, since only norms are used.

    APOLLO-Mini is `optperm.apollo(rank=1, by="tensor", scale=128**0.5)`. Rate and weight decay
    stand outside, and which leaves are projected is as in `optperm.low_rank`::

      optax.chain(
          optperm.apollo(rank=1 / 4), optax.add_decayed_weights(0.1),
          optax.scale_by_learning_rate(3e-3)
      )

    Args:
      inner: The optimizer, a direction that gets no params; None for `optax.scale_by_adam()`. A
        complete one works too: the step takes its sign.
      rank: r, an integer of at least 1, or a share in (0, 1) of each leaf's smaller side.
      update_every: The steps for which a projection stays, at least 1.
      by: What is scaled by one number: each "channel", or the "tensor".
      scale: A factor on the steps of projected leaves. The norm of N is that of r entries where
        Adam's is of d, and "auto", :math:`\sqrt{d / r}`, makes a rate of AdamW's carry over. The
        option of the authors' code is the square of this number.
      limit: The most by which the norm of the step grows, at least 1, or None for no limit.
      dimension_numbers: The axes of leaves to project, as in `optperm.low_rank`.
      seed: Of the projections.

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
      With Adam a projected leaf takes 2 r k words in the place of 2 d k. By channel a matrix whose
      columns are spread over devices needs no communication but the norms of the limiter; rows cost
      an all-reduce of R.

    Raises:
      TypeError: If an argument is of the wrong type, or a parameter is not of a real floating
        dtype.
      ValueError: If an argument is out of range, `rank` is above the smaller side of every matrix,
        or of a leaf that `dimension_numbers` names, these name an axis twice or one that is not
        there, or `inner` needs params.

    References:
      Zhu et al., `APOLLO: SGD-like Memory, AdamW-level Performance
      <https://arxiv.org/abs/2412.05270>`_, 2024
    """
    inner = optax.scale_by_adam() if inner is None else inner
    checks.check_transformation("inner", inner)
    check_projection(rank, "smaller")
    checks.check_count("update_every", update_every)
    checks.check_choice("by", by, get_args(By))
    if not isinstance(scale, str) or scale != "auto":
        checks.check_positive("scale", scale)
    check_limit(limit)
    checks.check_seed("seed", seed)
    optimizer = optax.with_extra_args_support(inner)

    def plan(tree: optax.Updates) -> list[Matrix | None]:
        return matrices_of(tree, rank, "smaller", dimension_numbers)

    def init(params: optax.Params) -> ApolloState:
        plans = plan(params)
        low = map_plans(low_rank_like, params, plans)
        inner_state = inner.init(low)
        note(params, plans, low, inner_state, has_basis=False)
        norm = map_plans(zeros_of_batch, params, plans)
        sign = mark_varying(jnp.zeros([], jnp.int8), varying_axes(params))
        return ApolloState(jnp.zeros([], jnp.int32), norm, sign, inner_state)

    def update(
        updates: optax.Updates, state: ApolloState, _: Any = None, **extra_args: Any
    ) -> tuple[optax.Updates, ApolloState]:
        leaves = jax.tree.leaves(updates)
        structure: Any = jax.tree.structure(updates)
        plans, norms = plan(updates), structure.flatten_up_to(state.norm)
        number = state.count // jnp.asarray(update_every, jnp.int32)

        # R = B' G, with entries of B from N(0, 1 / r), and N, inner <- inner(R)
        exact = [
            leaf if m is None else project_leaf(m, gaussian_basis(seed, i, number, m, leaf), leaf)
            for i, (m, leaf) in enumerate(zip(plans, leaves, strict=True))
        ]
        low = low_rank_leaves(updates, plans, exact)
        direction, inner_state = inner_direction(
            optimizer, low, state.inner_state, extra_args, "apollo"
        )
        sign = direction_sign(direction, low, state.sign)

        out = structure.flatten_up_to(direction)
        for i, (m, leaf, r) in enumerate(zip(plans, leaves, exact, strict=True)):
            if m is None:
                continue
            g, n = m.turn(m.matrices(leaf)).astype(r.dtype), out[i].astype(r.dtype)
            # S = G f, with f = |N| / |R| of columns or of all, divided by L where it grows too fast
            s = gains(n, r, (m.rank_axis,) if by == "channel" else (-2, -1)) * g
            norm = unshard(jnp.sqrt(jnp.sum(jnp.square(s), axis=(-2, -1))))
            quotient, norms[i] = growth_limit(norm, norms[i], limit)
            # U = scale S
            size = math.sqrt(m.d / m.rank) if isinstance(scale, str) else scale
            factor = jnp.asarray(size, s.dtype) * sign.astype(s.dtype) / quotient
            out[i] = m.leaf(m.turn(factor[..., None, None] * s))
        count, norm = optax.safe_increment(state.count), structure.unflatten(norms)
        return structure.unflatten(out), ApolloState(count, norm, sign, inner_state)

    # Gradients tell all that an update needs; params only the dtypes.
    return transformation(init, update, method="apollo", needs_params=False)


def gaussian_basis(
    seed: int | jax.Array, index: int, number: jax.Array, matrix: Matrix, leaf: jax.Array
) -> jax.Array:
    """Return B of the leaf of an index, (..., d, r), the same until the number of refreshes grows."""
    key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), index)
    shape, dtype = matrix.basis_shape, accumulation_dtype(leaf)
    return jax.random.normal(jax.random.fold_in(key, number), shape, dtype) / math.sqrt(matrix.rank)
