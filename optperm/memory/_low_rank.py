"""Low rank: an optimizer with its state in a small subspace of each matrix.

J. Zhao et al., "GaLore: Memory-Efficient LLM Training by Gradient Low-Rank Projection", ICML 2024,
arXiv 2403.03507; X. Chen et al., "Fira: Can We Achieve Full-rank Training of LLMs Under Low-rank
Constraint?", 2024, arXiv 2410.01623; T. Robert et al., "LDAdam: Adaptive Optimization from
Low-Dimensional Gradient Statistics", ICLR 2025, arXiv 2410.16103.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optperm.core import checks
from optperm.core.control import cond, when
from optperm.core.dtypes import computed_once
from optperm.core.keys import key_data
from optperm.core.mapped_axes import mark_varying, varying_axes
from optperm.core.noise import fold
from optperm.core.shardings import shard_like, unshard
from optperm.core.transformation import transformation
from optperm.memory._directions import (
    check_limit,
    compute_direction,
    compute_gains,
    find_sign,
    limit_growth,
)
from optperm.memory._matrices import (
    DimensionNumbers,
    Matrix,
    Side,
    check_rank,
    check_state,
    lift,
    make_basis_zeros,
    make_batch_zeros,
    make_low_rank_leaf,
    make_low_rank_tree,
    map_plans,
    plan_matrices,
    project_leaf,
    warn_of_full_rank,
)
from optperm.memory._moments import (
    Change,
    Probe,
    carry_moments,
    check_moments,
    find_carried_states,
    join_moments,
    split_moments,
)
from optperm.memory._projections import align_signs, gram_basis, power_basis, random_basis

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int8, Int32, PyTree

Projection = Literal["svd", "random", "power"]
Residual = Literal["scaled"]
# How many times less of a column may be in the subspace than in a random one, before its step is bounded
_LARGEST_EXCESS = 10.0


class LowRankState(NamedTuple):
    """State of `low_rank`.

    For leaves at full rank, `basis`, `next_refresh` and `norm` hold a single zero.

    Attributes:
      count: Number of steps taken.
      basis: P of each leaf, of shape (..., d, r), in float32, or in float64 for float64 params. It is
        zero before the first basis.
      next_refresh: The first step in which each matrix may get its next basis, of shape (...). It is 0
        before the first basis.
      norm: q, the norm of the scaled residual of each matrix in its last step, of shape (...). It is 0
        before the first step.
      sign: 1 if `inner` points along the gradient, -1 if it points against it, 0 while this is unknown.
      inner_state: State of `inner`, over low-rank leaves and leaves at full rank.
    """

    count: Int32[Array, ""]  # type: ignore[assignment]
    basis: PyTree[Float[Array, "..."], "Params"]
    next_refresh: PyTree[Int32[Array, "..."], "Params"]
    norm: PyTree[Float[Array, "..."], "Params"]
    sign: Int8[Array, ""]
    inner_state: Any


def low_rank(
    inner: optax.GradientTransformation,
    rank: int | float,
    *,
    every: int | jax.Array | Callable[[jax.Array], jax.Array] = 200,
    projection: Projection = "random",
    residual: Residual | None = "scaled",
    carry: bool = True,
    scale: float | jax.Array = 1.0,
    side: Side = "smaller",
    limit: float | jax.Array | None = 1.01,
    dimension_numbers: DimensionNumbers | None = None,
    b1: float | jax.Array = 0.9,
    b2: float | jax.Array = 0.999,
    key: int | jax.Array = 0,
) -> optax.GradientTransformationExtraArgs:
    r"""Run an optimizer on the part of each gradient in a small subspace.

    Let G be the d x k gradient of a matrix, with d its smaller side. The optimizer sees
    :math:`R = P^\top G`, where the d x r matrix P is an orthonormal basis that changes every `every`
    steps. Its moments thus have r x k numbers instead of d x k. With its direction N for R, the step is

    .. math::
      U = \text{scale} \, (P N + S), \qquad
      S_j = (G - P R)_j \frac{\lVert N_j \rVert}{\lVert R_j \rVert}

    for each column j. The part outside the subspace is scaled like the part inside it (Fira), and the
    norm of S grows by at most the factor `limit` per step. At a new basis,
    :math:`C = P_{new}^\top P_{old}` carries the moments over. First moments become
    :math:`M \leftarrow C M`. With :math:`c_i = 1 - \beta_i^t`, LDAdam's estimate gives Adam's second
    moment,

    .. math::
      V \leftarrow c_2 \left| (C \circ C) \left(V / c_2 - (M / c_1)^2\right)
      + (C M / c_1)^2 \right|.

    The learning rate and weight decay come after it::

      optax.chain(
          optperm.low_rank(optax.scale_by_adam(), 1 / 4),
          optax.add_decayed_weights(0.1),
          optax.scale_by_learning_rate(3e-3),
      )

    Without `dimension_numbers`, `optperm.memory.matrix_axes` selects the leaves to project, if this
    shrinks their state: leaves with two axes, Flax's attention, and convolutions. The same optimizer
    trains all other leaves at full rank. **Embeddings are not projected**, as in the papers; name
    embeddings whose names differ from Flax's. The gradient of a batch has only as many nonzero rows as
    the batch has tokens, and frequent tokens would choose the basis. `init` warns if more than half of
    the entries in leaves with two or more axes stay at full rank.

    Args:
      inner: The optimizer, a direction such as `optax.scale_by_adam()`, `optax.scale_by_lion()` or
        `optax.trace(0.9)`; `optax.contrib.scale_by_muon` needs `weight_dimension_numbers`. It gets no
        params. A complete optimizer, such as `optax.adam(1e-3)`, works too. The residual takes its sign,
        the sign of :math:`\sum \langle N, R \rangle` in the first step where this is not 0. Put
        schedules outside, because the limiter would limit a warm-up.
      rank: r, an integer of at least 1, or a ratio in (0, 1) to each leaf's smaller side.
      every: The number of steps from one basis to the next, at least 1, or a schedule of this number.
        All matrices get their first basis in step 0. Later, leaf i of L changes its basis at step i *
        every // L, modulo every.
      projection: "random" for uniformly distributed bases, "svd" for the first singular vectors of the
        gradient, or "power". "power" also starts with singular vectors, and then takes one step of
        subspace iteration from the last basis; use it with `every` from 1 to 20.
      residual: "scaled" for S, or None to drop the part outside the subspace. With a random basis,
        :math:`E P P^\top = (r / d) I`, so a learning rate times d / r is then unbiased, but noisy.
      carry: Whether to carry over moments of Adam, Lion, EMA, trace, Muon and RMSProp. RAdam and Yogi
        share Adam's state and are treated as Adam. If False, moments do not change, and each new basis
        vector has a nonnegative product with the last one. Adamax and ADOPT use Adam's state for other
        moments; a step of `inner` on a few numbers detects them. Adamax's second moment is carried as a
        size. ADOPT needs False. If `inner` cannot take this step, or first makes all entries equally
        large (signs), such a state counts as Adam's.
      scale: A factor on the steps of projected leaves.
      side: The side of a matrix for its basis. "smaller" is the columns of a square matrix. "larger"
        gives a smaller state and a poorer subspace.
      limit: The maximum factor by which the norm of S grows, at least 1, or None for no limit.
      dimension_numbers: The axes of leaves to project. One `optax.contrib.GaLoreDimensionNumbers` for
        all leaves with two or more axes, a tree of these like params, with None for full rank, or a
        function from params to such a tree. Axes that are not named are batch axes, along which each
        matrix has its own basis. None for the axes of `optperm.memory.matrix_axes`.
      b1: :math:`\beta_1`, in [0, 1), of an Adam in `inner`, whose state does not contain it. 0.0 carries
        first moments over without a bias correction.
      b2: :math:`\beta_2`, in [0, 1), of the same Adam, for second moments.
      key: The random key of random bases: an int or a `jax.random.key`.

    Returns:
      A transformation whose state is a `LowRankState`. Its `update` needs no params.

    Example:
      >>> import jax.numpy as jnp, optax, optperm
      >>> tx = optax.chain(
      ...     optperm.low_rank(optax.scale_by_lion(), 1 / 4), optax.scale_by_learning_rate(0.1)
      ... )
      >>> params = {"embedding": jnp.ones((10, 8)), "kernel": jnp.ones((8, 16))}
      >>> opt_state = tx.init(params)
      >>> opt_state[0].inner_state.mu["kernel"].shape
      (2, 16)
      >>> updates, opt_state = tx.update(params, opt_state)
      >>> updates["kernel"].shape
      (8, 16)

    Notes:
      These arguments give published methods:

      - GaLore: `projection="svd", residual=None, carry=False`. Multiply the learning rate of its scripts
        by their scale, 0.25.
      - Fira: `projection="svd", carry=False`.
      - GoLore: `projection="random", residual=None, carry=False`.
      - LDAdam without its error buffer: `projection="power", residual=None, every=1`.
      - SubTrack++ and GrassJump are similar to `projection="power"` and `projection="random"`.

      With Adam, a projected leaf takes (d r + 2 r k) words instead of 2 d k. The gradient itself stays
      whole. A step costs two products of 2 d k r operations. On a CPU, these may take longer than Adam's
      update, but little time compared with a gradient on a few hundred tokens. A basis costs a d x d
      Gram matrix and its eigenvectors, or a QR decomposition of a d x r matrix. Under `jax.vmap` over
      independent runs, if one run needs a new basis, bases are computed for all. An update has no
      reverse-mode derivative, because moments change in a loop of at most one iteration.

      With "svd" and "power", a column nearly outside the subspace has a tiny :math:`\lVert R_j \rVert`,
      and by Fira's formula its first step would be thousands of times longer than Adam's. Therefore
      :math:`\lVert R_j \rVert` counts as at least a tenth of :math:`\sqrt{r / d} \, \lVert G_j \rVert`,
      its value with a random basis, and
      :math:`\lVert S_j \rVert \le 10 \sqrt{d / r} \, \lVert N_j \rVert`. A column exactly outside gets
      no step. Use "random", whose bases hardly ever miss a column, or `residual=None`.

      1e-8 is added to :math:`\lVert R_j \rVert`, so columns with norms below about 1e-8 lose S.

      If a gradient is zero or not finite, the matrix keeps its basis and tries again in the next step.
      Random bases need no gradient. Nonfinite numbers pass on, for example to `optax.apply_if_finite`.

      If the gradient is sharded along k, a step all-reduces a few numbers, and an SVD a d x d Gram
      matrix. If it is sharded along d, a step all-reduces R, and a Gram matrix gathers the gradient.
      Random bases need no communication. Bases are sharded like the rows of the gradient.

    Raises:
      TypeError: If `inner` is not a transformation, a number has another type, entries of
        `dimension_numbers` are of another type, or a parameter is not of a real floating dtype.
      ValueError: If an argument is out of range, if `rank` is above the smaller side of every matrix or
        of a leaf that `dimension_numbers` names, if `dimension_numbers` are not like params, or name an
        axis twice or an axis that does not exist, if `carry` does not know a state of `inner` or its
        tree is not like params (`optax.flatten`), or if `inner` needs params.

    References:
      Zhao et al., `GaLore: Memory-Efficient LLM Training by Gradient Low-Rank Projection
      <https://arxiv.org/abs/2403.03507>`_, 2024

      Chen et al., `Fira: Can We Achieve Full-rank Training of LLMs Under Low-rank Constraint?
      <https://arxiv.org/abs/2410.01623>`_, 2024

      Robert et al., `LDAdam: Adaptive Optimization from Low-Dimensional Gradient Statistics
      <https://arxiv.org/abs/2410.16103>`_, 2024
    """
    checks.check_transformation("inner", inner)
    _check_choices(projection, residual, side)
    check_rank(rank)
    if not callable(every):
        checks.check_count("every", every)
    checks.check_positive("scale", scale)
    check_limit(limit)
    _check_decay("b1", b1)
    _check_decay("b2", b2)
    checks.check_key("key", key)
    optimizer = optax.with_extra_args_support(inner)
    probe = Probe(inner)

    def plan(tree: optax.Updates) -> list[Matrix | None]:
        return plan_matrices(tree, rank, side, dimension_numbers)

    def make_basis(data: Any, place: jax.Array, g: jax.Array, old: jax.Array, first: Any) -> Any:
        if projection == "random":
            new = random_basis(data, place, old.shape, old.dtype)
        else:
            new = _find_basis(projection, g, old, first)
        new = shard_like(new, old)
        # Carried moments turn with the basis; kept ones need coordinates with the same signs.
        return new if carry else align_signs(new, old)

    refresh = functools.partial(
        _refresh,
        make_basis=make_basis,
        every=every,
        needs_gradient=projection != "random",
        key=key,
    )

    def init(params: optax.Params) -> LowRankState:
        plans = plan(params)
        warn_of_full_rank(params, plans, dimension_numbers, "low_rank")
        low = map_plans(make_low_rank_leaf, params, plans)
        inner_state = inner.init(low)
        if carry:
            seconds = probe(inner_state, lambda: low, find_carried_states)
            check_moments(inner_state, plans, low, seconds)
        return LowRankState(
            jnp.zeros([], jnp.int32),
            map_plans(make_basis_zeros, params, plans),
            map_plans(functools.partial(make_batch_zeros, dtype=jnp.int32), params, plans),
            map_plans(make_batch_zeros, params, plans),
            mark_varying(jnp.zeros([], jnp.int8), varying_axes(params)),
            inner_state,
        )

    def update(
        updates: optax.Updates, state: LowRankState, _: Any = None, **extra_args: Any
    ) -> tuple[optax.Updates, LowRankState]:
        check_state("low_rank", state, LowRankState)
        leaves, plans = jax.tree.leaves(updates), plan(updates)
        structure: Any = jax.tree.structure(updates)
        move = None
        if carry:
            ranks = functools.partial(map_plans, make_low_rank_leaf, updates, plans)
            seconds = probe(state.inner_state, ranks, find_carried_states)
            move = functools.partial(carry_moments, b1=b1, b2=b2, seconds=seconds)

        # P <- another basis, and M <- C M with C = P_new' P, for each matrix that is due
        bases, dues, inner_state = refresh(plans, leaves, structure, state, move)

        # R = P' G, and N, inner <- inner(R)
        exact = [
            leaf if m is None else project_leaf(m, basis, leaf)
            for m, basis, leaf in zip(plans, bases, leaves, strict=True)
        ]
        low = make_low_rank_tree(updates, plans, exact)
        direction, inner_state = compute_direction(
            optimizer, low, inner_state, extra_args, "low_rank"
        )
        sign = state.sign if residual is None else find_sign(direction, low, state.sign)

        # U = scale (P N + S), or scale P N without a residual, and N for leaves at full rank
        out, norms = map(structure.flatten_up_to, (direction, state.norm))
        for i, (m, leaf, r) in enumerate(zip(plans, leaves, exact, strict=True)):
            if m is not None:
                how = norms[i], sign, residual, limit
                u, norms[i] = _compute_step(m, bases[i], leaf, r, out[i], *how)
                out[i] = m.leaf(m.turn(jnp.asarray(scale, u.dtype) * u))
        basis, due, norm = map(structure.unflatten, (bases, dues, norms))
        count = optax.safe_increment(state.count)
        return structure.unflatten(out), LowRankState(count, basis, due, norm, sign, inner_state)

    # An update needs the gradients alone; params only give the dtypes.
    return transformation(init, update, method="low_rank", needs_params=False)


def _check_choices(projection: str, residual: str | None, side: str) -> None:
    checks.check_choice("projection", projection, get_args(Projection))
    checks.check_choice("residual", residual or "scaled", get_args(Residual))
    checks.check_choice("side", side, get_args(Side))


def _check_decay(name: str, decay: float | jax.Array) -> None:
    checks.check_in_range(name, decay, 0.0, 1.0, may_be_schedule=False)
    # A bias correction 1 - 1^t would be 0.
    if checks.is_concrete_number(decay) and np.float32(decay) == 1:
        raise ValueError(f"{name} must be in [0, 1), got {decay!r}.")


def _plan_turns(plans: list[Matrix | None], count: jax.Array, every: jax.Array) -> list[jax.Array]:
    """Return the step of each leaf's next refresh, if it has one in this step.

    Leaf i of L projected leaves has its refreshes at i * every // L, modulo every, so that few leaves
    have one in the same step.
    """
    places = np.cumsum([m is not None for m in plans], dtype=np.int32)
    number = max(int(places[-1]), 1) if plans else 1
    turns = []
    # XLA compiles equal kernels once: a place that it knows would make a kernel for each leaf
    for m, place in zip(plans, computed_once(list(places)), strict=True):
        # The first step after this one that is equal to the offset modulo `every`
        offset = (place - (m is not None)) * every // number
        turns.append(count + 1 + (offset - count - 1) % every)
    return turns


def _refresh(
    plans: list[Matrix | None],
    leaves: list[jax.Array],
    structure: Any,
    state: LowRankState,
    carry: Callable[..., Any] | None,
    *,
    make_basis: Callable[..., jax.Array],
    every: Any,
    needs_gradient: bool,
    key: int | jax.Array,
) -> tuple[list[jax.Array], list[jax.Array], Any]:
    """Return each leaf's bases and their next refresh, and the state of `inner` in their coordinates.

    A basis of the gradient is not made where the gradient is zero or not finite; the next step tries
    again.
    """
    count, inner_state = state.count, state.inner_state
    bases, dues = map(structure.flatten_up_to, (state.basis, state.next_refresh))
    moments = split_moments(inner_state if carry else None, structure)
    period = every(count) if callable(every) else every
    turns = _plan_turns(plans, count, jnp.maximum(jnp.asarray(period, jnp.int32), 1))

    def refresh_leaf(
        m: Matrix, leaf: jax.Array, held: Any, turn: jax.Array, place: jax.Array, data: Any
    ) -> Any:
        is_due = count >= held[1]
        if needs_gradient:
            is_due = cond(jnp.any(is_due), lambda: is_due & m.is_usable(leaf), lambda: is_due)

        def change(held: Any) -> Any:
            old, due, moved = held
            new = make_basis(data, place, m.matrices(leaf), old, due == 0)
            new = jnp.where(is_due[..., None, None], new, old)
            after = carry(inner_state, Change(m, old, new, is_due), moved) if carry else moved
            return new, jnp.where(is_due, turn, due), after

        return when(jnp.any(is_due), change, held)

    def refresh_leaves(held: Any) -> Any:
        data = None if needs_gradient else fold(key_data(key), count)
        # Leaves of one shape are traced once
        refresh = jax.jit(refresh_leaf, static_argnums=0)
        places = computed_once([np.uint32(i) for i in held])
        return {
            i: refresh(
                dataclasses.replace(plans[i], name=""), leaves[i], each, turns[i], place, data
            )
            for place, (i, each) in zip(places, held.items(), strict=True)
        }

    held: Any = {i: (bases[i], dues[i], moments[i]) for i, m in enumerate(plans) if m is not None}
    for i, (old, _, _) in held.items():
        if old.shape != (wanted := plans[i].basis_shape):
            message = f"{plans[i].name} has a basis of shape {old.shape} in the state, not {wanted}"
            raise ValueError(f"{message}: keep the rank, the side and the axes.")
    # One condition for all leaves, and within it one for each: a device waits once for a usual step
    are_due = [jnp.any(count >= due) for _, due, _ in held.values()]
    held = when(functools.reduce(operator.or_, are_due, False), refresh_leaves, held)
    for i, each in held.items():
        bases[i], dues[i], moments[i] = each
    return bases, dues, join_moments(inner_state, moments) if carry else inner_state


def _find_basis(
    projection: Projection, g: jax.Array, old: jax.Array, is_first: jax.Array
) -> jax.Array:
    """Return a basis of the largest directions of G."""
    # G / max |G|, so that no square overflows or underflows
    largest = jnp.max(jnp.abs(g), axis=(-2, -1), keepdims=True).astype(old.dtype)
    g = g.astype(old.dtype) / jnp.where(largest > 0, largest, 1.0)
    if projection == "svd":
        return gram_basis(g, old.shape[-1])
    # A power step needs a last basis.
    first = is_first[..., None, None]

    def with_first() -> jax.Array:
        return jnp.where(first, gram_basis(g, old.shape[-1]), power_basis(g, old))

    return cond(jnp.any(is_first), with_first, lambda: power_basis(g, old))


def _compute_step(
    m: Matrix,
    basis: jax.Array,
    leaf: jax.Array,
    r: jax.Array,
    direction: jax.Array,
    last: jax.Array,
    sign: jax.Array,
    residual: Residual | None,
    limit: float | jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """Return P N + S, in the orientation of the leaf, and the limited norm of S."""
    g, n = m.turn(m.matrices(leaf)).astype(r.dtype), direction.astype(r.dtype)
    if residual is None:
        return lift(m, basis, n, g), last
    # f_j = |N_j| / |R_j|, and S = (G - P R) f, of norm |S|^2 = sum_j f_j^2 (|G_j|^2 - |R_j|^2)
    d, rank = basis.shape[-2:]
    f = compute_gains(n, r, (m.rank_axis,))
    # |R_j| counts as at least a tenth of its value with a random basis, sqrt(r / d) |G_j|
    f = jnp.minimum(f, _LARGEST_EXCESS * (d / rank) ** 0.5 * compute_gains(n, g, (m.rank_axis,)))
    whole, inside = (jnp.sum(jnp.square(f * x), axis=(-2, -1)) for x in (g, r))
    # For a gradient within the subspace S is rounding, and its norm counts as 0.
    is_seen = whole - inside > 100 * jnp.finfo(r.dtype).eps * whole
    norm = unshard(jnp.sqrt(jnp.where(is_seen, whole - inside, 0.0)))
    quotient, norm = limit_growth(norm, last, limit)
    # P N + S / L = P (N - a R) + a G, with a = f / L, by one product instead of two
    a = sign.astype(r.dtype) * f / quotient[..., None, None]
    return lift(m, basis, n - a * r, g) + a * g, norm
