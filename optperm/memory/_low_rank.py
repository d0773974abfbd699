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
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optperm._leaf_axes import warn_of_others
from optperm.core import checks
from optperm.core.control import cond, when
from optperm.core.dtypes import computed_once
from optperm.core.fingerprints import UNSET
from optperm.core.keys import key_data
from optperm.core.mapped_axes import varying_zeros
from optperm.core.noise import fold
from optperm.core.shapes import Array, Float, Int8, Int32, Params, PyTree, UInt32, Updates
from optperm.core.shardings import shard_like
from optperm.core.transformation import transformation
from optperm.core.trees import leaf_paths, without_boxes
from optperm.memory._directions import (
    check_limit,
    compute_direction,
    compute_gains,
    compute_norms,
    find_sign,
    limit_growth,
)
from optperm.memory._matrices import (
    Matrix,
    Side,
    check_rank,
    describe_axes,
    find_low_structure,
    lift,
    make_basis_zeros,
    make_batch_zeros,
    make_low,
    plan_matrices,
    project_leaf,
    restructure,
    unzip,
)
from optperm.memory._moments import (
    Change,
    Formula,
    carry_moments,
    check_moments,
    find_formulas,
    join_moments,
    split_moments,
)
from optperm.memory._projections import (
    align_signs,
    gram_basis,
    lay_out_rows,
    power_basis,
    random_basis,
)

Projection = Literal["svd", "random", "power"]
Residual = Literal["scaled"]
# The minimum fraction of a column in the subspace is that in a random subspace divided by this factor.
_LARGEST_EXCESS = 10.0


class LowRankState(NamedTuple):
    """State of `low_rank`.

    For leaves at full rank, `basis`, `next_refresh` and `norm` hold a single zero.

    Attributes:
      count: Number of steps taken.
      basis: P of each leaf, of shape (..., d, r), in float32, or in float64 for float64 params. P is
        zero before the first basis.
      next_refresh: For each matrix, the first step in which it may get its next basis; an array of shape
        (...). It is 0 before the first basis.
      norm: q, of shape (...), the norm of each matrix's last scaled residual that was not an exception
        (see `limit`). It is 0 before the first step, and without a `residual` or a `limit`.
      sign: 1 if `inner` points along the gradient, -1 if against the gradient, 0 if still unknown or
        without a `residual`.
      inner_state: State of `inner`, over low-rank leaves and leaves at full rank.
      fingerprint: The arguments `rank`, `side`, `carry` and `axes` with which the state was
        made.
    """

    count: Int32[Array, ""]  # type: ignore[assignment]
    basis: PyTree[Float[Array, "..."], "Params"]
    next_refresh: PyTree[Int32[Array, "..."], "Params"]
    norm: PyTree[Float[Array, "..."], "Params"]
    sign: Int8[Array, ""]
    inner_state: Any
    fingerprint: UInt32[Array, "4"] = UNSET

    def shaped_by(self) -> tuple[str, ...]:
        """Return the names of the arguments in the fingerprint."""
        return "rank", "side", "carry", "axes"


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
    axes: Any = None,
    b1: float | jax.Array = 0.9,
    b2: float | jax.Array = 0.999,
    key: int | jax.Array = 0,
) -> optax.GradientTransformationExtraArgs:
    r"""Run an optimizer on the part of each gradient in a small subspace.

    Let G be the d x k gradient of a matrix, where d is its smaller side. The optimizer sees
    :math:`R = P^\top G`, where the d x r matrix P is an orthonormal basis that changes every `every`
    steps. The optimizer's moments therefore have r x k entries instead of d x k. If N is its direction
    for R, the step is

    .. math::
      U = \text{scale} \, (P N + S), \qquad
      S_j = (G - P R)_j \frac{\lVert N_j \rVert}{\lVert R_j \rVert}

    for each column j. The part outside the subspace is scaled like the part inside it (Fira), and gets
    the sign of the optimizer's steps. S is divided by a number L so that its norm grows by at most the
    factor `limit` per step. When the basis changes, :math:`C = P_{new}^\top P_{old}` carries the moments
    over. First moments become :math:`M \leftarrow C M`. With :math:`c_i = 1 - \beta_i^t`, Adam's second
    moment becomes LDAdam's estimate,

    .. math::
      V \leftarrow c_2 \left| (C \circ C) \left(V / c_2 - (M / c_1)^2\right)
      + (C M / c_1)^2 \right|.

    Weight decay and the learning rate come after this transformation in a chain. Only kernels are
    projected, as `optperm.leaf_axes` finds them, if this shrinks their state. Each layer of a stack,
    expert or other copy has its own basis. The same optimizer trains all other leaves at full rank.
    **Embeddings are not projected**, because frequent tokens would determine their basis. `init` warns
    if leaves whose axes are not known hold more than 1% of the entries.

    Args:
      inner: The optimizer: a transformation without a learning rate, such as `optax.scale_by_adam()`,
        `optax.scale_by_lion()` or `optax.trace(0.9)`. `optax.contrib.scale_by_muon` needs
        `weight_dimension_numbers`. `inner` gets no params: instead of `optax.adamw`, pass
        `optax.scale_by_adam()`, and put `optax.add_decayed_weights` last. Put schedules outside, because
        `limit` would limit a warm-up.
      rank: r, an integer of at least 1, or a fraction in (0, 1) of each leaf's smaller side.
      every: The number of steps from one basis to the next, at least 1, or a schedule of this number.
        After step 0, matrices change their bases in turn. A resumed run may change `every`.
      projection: "random" for uniformly distributed bases, "svd" for the first singular vectors of the
        gradient, or "power". "power" also starts with singular vectors, but then takes one step of
        subspace iteration from the last basis; use it with `every` from 1 to 20.
      residual: "scaled" for S, or None to drop the part outside the subspace. With None and a random
        basis, multiply the learning rate by d / r: since :math:`E P P^\top = (r / d) I`, the step is
        then unbiased, but noisy.
      carry: Whether to carry over the moments of Adam, Lion, EMA, trace, Muon, RMSProp and states whose
        registered fields are all means (`optperm.memory.register_moments`). If False, moments do not
        change. Pass `carry=False` with Adamax and ADOPT, which store other moments in Adam's state.
      scale: A factor that multiplies the steps of projected leaves.
      side: The side of each matrix to project, "smaller" or "larger". For a square matrix, "smaller" is
        the columns. "larger" gives a smaller state and a poorer subspace.
      limit: The maximum factor by which the norm of S grows per step, at least 1, or None for no limit.
      axes: What each leaf is: a tree like params of `optperm.LeafAxes`,
        `optax.contrib.GaLoreDimensionNumbers` for kernels, and None for full rank, or a function from
        params to such a tree. None for `optperm.leaf_axes`.
      b1: :math:`\beta_1`, in [0, 1), of Adam in `inner`, because Adam's state does not contain it. 0.0
        carries first moments over without a bias correction.
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
      GaLore is `projection="svd", residual=None, carry=False`, with the learning rate of its scripts
      times their scale, 0.25. Fira is `projection="svd", carry=False`, and LDAdam without its error
      buffer `projection="power", residual=None, every=1`.

      With Adam, a projected leaf takes (d r + 2 r k) words instead of 2 d k. A step costs two matrix
      products of 2 d k r operations each, and a basis costs a d x d Gram matrix and its eigenvectors, or
      a QR decomposition of a d x r matrix.

      With "svd" and "power", a column nearly outside the subspace has a tiny :math:`\lVert R_j \rVert`,
      which counts as at least :math:`\sqrt{r / d} \, \lVert G_j \rVert / 10`: by Fira's formula, its
      first step would be far too long. A column always exactly outside gets no step.

    Raises:
      TypeError: If `inner` is not a transformation, a number or an entry of `axes` has the wrong
        type, or a parameter does not have a real floating dtype.
      ValueError: If an argument is out of range; if `rank` exceeds the smaller side of every kernel; if
        `axes` does not fit the params or names no kernels; if `carry=True` and a state of `inner` is
        unknown, not like params (`optax.flatten`), or in 8 bits (`optperm.quantize_state` belongs around
        this transformation); if `update` gets a state that was made with other `rank`, `side`, `carry`
        or `axes`; or, from `inner`, if it needs params.

    References:
      Zhao et al., `GaLore: Memory-Efficient LLM Training by Gradient Low-Rank Projection
      <https://arxiv.org/abs/2403.03507>`_, 2024

      Chen et al., `Fira: Can We Achieve Full-rank Training of LLMs Under Low-rank Constraint?
      <https://arxiv.org/abs/2410.01623>`_, 2024

      Robert et al., `LDAdam: Adaptive Optimization from Low-Dimensional Gradient Statistics
      <https://arxiv.org/abs/2410.16103>`_, 2024
    """
    checks.check_transformation("inner", inner)
    checks.check_choice("projection", projection, get_args(Projection))
    checks.check_choice("residual", residual or "scaled", get_args(Residual))
    checks.check_choice("side", side, get_args(Side))
    check_rank(rank)
    if not callable(every):
        checks.check_count("every", every)
    checks.check_positive("scale", scale)
    check_limit(limit)
    checks.check_decay("b1", b1)
    checks.check_decay("b2", b2)
    checks.check_key("key", key)
    optimizer = optax.with_extra_args_support(inner)

    def init(params: Params) -> LowRankState:
        plain, plans = without_boxes(params), plan_matrices(params, rank, side, axes)
        warn_of_others("low_rank", params, axes)
        low = make_low(params, plans)
        inner_state = inner.init(low)
        if carry:
            check_moments(inner_state, plans, low)
        return LowRankState(
            count=jnp.zeros([], jnp.int32),
            basis=jax.tree.map(make_basis_zeros, plain, plans),
            next_refresh=jax.tree.map(
                lambda leaf, m: make_batch_zeros(leaf, m, jnp.int32), plain, plans
            ),
            norm=jax.tree.map(make_batch_zeros, plain, plans),
            sign=varying_zeros(params, jnp.int8),
            inner_state=inner_state,
        )

    def update(
        updates: Updates, state: LowRankState, _: Any = None, **extra_args: Any
    ) -> tuple[Updates, LowRankState]:
        plans = plan_matrices(updates, rank, side, axes)
        grads = without_boxes(updates)

        # P <- another basis, and M <- C M with C = P_new' P_old, for each matrix that is due
        formulas = None
        if carry:
            formulas = find_formulas(state.inner_state, b1=b1, b2=b2)
        state = _refresh(state, updates, plans, formulas, projection, every, key)

        # R = P' G, and N, inner <- inner(R)
        exact = jax.tree.map(project_leaf, grads, plans, state.basis)
        low, structure = optax.tree.cast_like(exact, grads), find_low_structure(updates, plans)
        direction, inner_state = compute_direction(
            optimizer, low, structure, state.inner_state, extra_args
        )
        sign = state.sign if residual is None else find_sign(direction, low, state.sign)

        # U = scale (P N + S / L), and N for leaves at full rank
        def step(leaf: Any, m: Matrix | None, basis: Any, r: Any, n: Any, q: Any) -> Any:
            if m is None:
                return n, q
            g, n = m.turn(m.matrices(leaf)).astype(r.dtype), n.astype(r.dtype)
            if residual is None:
                u = lift(m, basis, n, g)
            else:
                # f_j = |N_j| / |R_j|, where |R_j| counts as at least a tenth of its value with a random
                # basis, sqrt(r / d) |G_j|
                columns = (m.rank_axis,)
                f = compute_gains(n, r, columns)
                excess = _LARGEST_EXCESS * (m.d / m.rank) ** 0.5
                f = jnp.minimum(f, excess * compute_gains(n, g, columns))
                # S = (G - P R) f, with |S|^2 = sum_j f_j^2 (|G_j|^2 - |R_j|^2). If the gradient is in
                # the subspace, S is a rounding error, and its norm counts as 0
                whole, inside = (
                    jnp.sum(jnp.square(f * compute_norms(x, columns)), axis=(-2, -1))
                    for x in (g, r)
                )
                is_seen = whole - inside > 100 * jnp.finfo(r.dtype).eps * whole
                norm = jnp.sqrt(jnp.where(is_seen, whole - inside, 0.0))
                # |S / L| <= limit q
                quotient, q = limit_growth(norm, q, limit, r, m.rank_axis)
                # P N + S / L = P (N - a R) + a G, with a = sign f / L, needs one product instead of two
                a = sign.astype(r.dtype) * f / quotient[..., None, None]
                u = lift(m, basis, n - a * r, g) + a * g
            return m.leaf(m.turn(jnp.asarray(scale, u.dtype) * u)), q

        trees = grads, plans, state.basis, exact, direction, state.norm
        u, norm = unzip(jax.tree.map(step, *trees), grads)
        return restructure(u, jax.tree.structure(updates)), LowRankState(
            count=optax.safe_increment(state.count),
            basis=state.basis,
            next_refresh=state.next_refresh,
            norm=norm,
            sign=sign,
            inner_state=inner_state,
            fingerprint=state.fingerprint,
        )

    # `update` does not need params, but uses them to check the dtypes of the gradients.
    return transformation(
        init,
        update,
        method="low_rank",
        needs_params=False,
        shape_arguments=lambda params: {
            "rank": rank,
            "side": side,
            "carry": carry,
            "axes": describe_axes(plan_matrices(params, rank, side, axes)),
        },
    )


class _Leaf(NamedTuple):
    """The parts of a projected leaf that a new basis changes.

    Attributes:
      basis: P, (..., d, r).
      next_refresh: The first step in which each matrix may get its next basis, (...).
      moments: The leaf's moments in each state of `inner`, as returned by `split_moments`.
    """

    basis: jax.Array
    next_refresh: jax.Array
    moments: list[tuple[Any, ...]]


def _refresh(
    state: LowRankState,
    updates: Updates,
    plans: Any,
    formulas: Sequence[Formula] | None,
    projection: Projection,
    every: Any,
    key: int | jax.Array,
) -> LowRankState:
    """Return the state with a new basis for each matrix that is due, and moments in its coordinates.

    If a gradient is zero or not finite, no basis is made from it, and the next step tries again. Without
    formulas, moments do not change.
    """
    t, inner_state = state.count, state.inner_state
    period = jnp.maximum(jnp.asarray(every(t) if callable(every) else every, jnp.int32), 1)
    grads = without_boxes(updates)
    structure: Any = jax.tree.structure(grads)
    gs, ms, bases, dues = map(
        structure.flatten_up_to, (grads, plans, state.basis, state.next_refresh)
    )
    moments = split_moments(
        None if formulas is None else inner_state, find_low_structure(updates, plans)
    )
    # The keys are the numbers of the projected leaves among all leaves
    leaves = {i: _Leaf(bases[i], dues[i], moments[i]) for i, m in enumerate(ms) if m is not None}
    for path, basis, m in zip(leaf_paths(grads), bases, ms, strict=True):
        if basis.shape != (wanted := m.basis_shape if m is not None else ()):
            found = f"params[{path[0]!r}] has a basis of shape {basis.shape} in the state"
            raise ValueError(
                f"{found}, but these arguments give {wanted}: do not change rank, side or axes."
            )

    # The j-th of J projected leaves has its turn at j * every // J, modulo every, so few leaves have a
    # turn in the same step. XLA compiles equal kernels once, but with j as a constant, it would compile
    # a kernel for each leaf.
    turns = []
    for j in computed_once(list(np.arange(len(leaves), dtype=np.int32))):
        offset = j * period // len(leaves)
        # This is the leaf's first turn after t
        turns.append(t + 1 + (offset - t - 1) % period)

    def find_due(leaf: _Leaf, turn: Any) -> jax.Array:
        # If `every` shrinks, in a resumed run or by a schedule, the next turn may be periods away.
        is_late = (turn - t == period) & (leaf.next_refresh >= turn)
        return (t >= leaf.next_refresh) | is_late

    def refresh_leaf(m: Matrix, g: Any, leaf: _Leaf, number: Any, turn: Any, words: Any) -> _Leaf:
        is_due = find_due(leaf, turn)
        if projection != "random":
            is_due = cond(jnp.any(is_due), lambda: is_due & m.is_usable(g), lambda: is_due)

        def change(leaf: _Leaf) -> _Leaf:
            old, moved = leaf.basis, leaf.moments
            is_first = leaf.next_refresh == 0
            new = _make_basis(projection, m.matrices(g), old, is_first, words, number)
            new = lay_out_rows(shard_like(new, old))
            if formulas is None:
                # Moments do not change, so coordinates have to keep their signs.
                new = align_signs(new, old)
            new = jnp.where(is_due[..., None, None], new, old)
            if formulas is not None:
                moved = carry_moments(formulas, Change(m, old, new, is_due), moved)
            return _Leaf(new, jnp.where(is_due, turn, leaf.next_refresh), moved)

        return when(jnp.any(is_due), change, leaf)

    def refresh_leaves(leaves: dict[int, _Leaf]) -> dict[int, _Leaf]:
        words = fold(key_data(key), t) if projection == "random" else None
        # Without their names, leaves of the same shape are traced once.
        refresh = jax.jit(refresh_leaf, static_argnums=0)
        numbers = computed_once([np.uint32(i) for i in leaves])
        return {
            i: refresh(dataclasses.replace(ms[i], name=""), gs[i], leaf, number, turn, words)
            for (i, leaf), number, turn in zip(leaves.items(), numbers, turns, strict=True)
        }

    # One condition for all leaves contains one per leaf, so a step without new bases waits only once
    are_due = [
        jnp.any(find_due(leaf, turn)) for leaf, turn in zip(leaves.values(), turns, strict=True)
    ]
    leaves = when(functools.reduce(operator.or_, are_due, False), refresh_leaves, leaves)
    for i, leaf in leaves.items():
        bases[i], dues[i], moments[i] = leaf
    return state._replace(
        basis=structure.unflatten(bases),
        next_refresh=structure.unflatten(dues),
        inner_state=inner_state if formulas is None else join_moments(inner_state, moments),
    )


def _make_basis(
    projection: Projection,
    g: jax.Array,
    old: jax.Array,
    is_first: jax.Array,
    words: Any,
    number: jax.Array,
) -> jax.Array:
    """Return a basis for G, (..., d, k), of the kind that `projection` names."""
    if projection == "random":
        return random_basis(words, number, old.shape, old.dtype)
    # Divide G by max |G|, so that no square overflows or underflows
    largest = jnp.max(jnp.abs(g), axis=(-2, -1), keepdims=True).astype(old.dtype)
    g = g.astype(old.dtype) / jnp.where(largest > 0, largest, 1.0)
    if projection == "svd":
        return gram_basis(g, old.shape[-1])
    # A power step needs a previous basis.
    first = is_first[..., None, None]

    def with_first() -> jax.Array:
        return jnp.where(first, gram_basis(g, old.shape[-1]), power_basis(g, old))

    basis: jax.Array = cond(jnp.any(is_first), with_first, lambda: power_basis(g, old))
    return basis
