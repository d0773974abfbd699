"""Low rank: an optimizer whose state lives in a small subspace of each matrix.

J. Zhao et al., "GaLore: Memory-Efficient LLM Training by Gradient Low-Rank Projection", ICML 2024,
arXiv 2403.03507; X. Chen et al., "Fira: Can We Achieve Full-rank Training of LLMs Under Low-rank
Constraint?", 2024, arXiv 2410.01623; T. Robert et al., "LDAdam: Adaptive Optimization from
Low-Dimensional Gradient Statistics", ICLR 2025, arXiv 2410.16103.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import optax

from optperm.contract import checks
from optperm.contract.mapped_axes import cond, mark_varying, varying_axes
from optperm.contract.shardings import shard_like, unshard
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
    Side,
    basis_zeros,
    check_projection,
    lift,
    low_rank_leaves,
    low_rank_like,
    map_plans,
    matrices_of,
    note,
    project_leaf,
    zeros_of_batch,
)
from optperm.subspace.moments import Change, Decays, carry_moments, check_moments
from optperm.subspace.projections import align_signs, gram_basis, power_basis, random_basis

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int8, Int32, PyTree

Projection = Literal["svd", "random", "power"]
Residual = Literal["scaled"]


class LowRankState(NamedTuple):
    """State of `low_rank`.

    Of leaves that stay at full rank, `basis`, `next_refresh` and `norm` hold a single zero.

    Attributes:
      count: Steps taken.
      basis: P of each leaf, (..., d, r), in float32, or float64 for float64 params; zero until
        there is one.
      next_refresh: The step from which on each matrix, (...), is due for another basis; 0 until it
        has one.
      norm: q, the norm of the scaled residual of each matrix in its last step, (...); 0 for none
        yet.
      sign: 1 if `inner` points along the gradient, -1 if against it, 0 while that is not known.
      inner_state: State of `inner`, over low-rank leaves and those that stay at full rank.
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
    update_every: int | jax.Array | Callable[[jax.Array], jax.Array] = 200,
    projection: Projection = "random",
    residual: Residual | None = "scaled",
    carry: bool = True,
    scale: float | jax.Array = 1.0,
    side: Side = "smaller",
    limit: float | jax.Array | None = 1.01,
    dimension_numbers: DimensionNumbers | None = None,
    decays: Decays = (0.9, 0.999),
    seed: int | jax.Array = 0,
) -> optax.GradientTransformationExtraArgs:
    r"""Run an optimizer on the part of each gradient that lies in a small subspace.

    Of a matrix's gradient G, d x k with d its smaller side, the optimizer sees
    :math:`R = P^\top G`, where P, d x r, is an orthonormal basis that changes every `update_every`
    steps, and so keeps moments of r x k numbers in the place of d x k. With N what it makes of R,

    .. math::
      U = \text{scale} \, (P N + S), \qquad
      S_j = (G - P R)_j \frac{\lVert N_j \rVert}{\lVert R_j \rVert}

    for each column j: what lies outside of the subspace is scaled as what lies within it (Fira),
    and the norm of S grows by at most `limit` from step to step. At a new basis moments are carried
    over by :math:`C = P_{new}^\top P_{old}`: first ones by :math:`M \leftarrow C M`, Adam's second
    one, with :math:`c_i = 1 - \beta_i^t`, by LDAdam's estimate

    .. math::
      V \leftarrow c_2 \left| (C \circ C) \left(V / c_2 - (M / c_1)^2\right)
      + (C M / c_1)^2 \right|.

    Rate and weight decay stand outside::

      optax.chain(
          optperm.low_rank(optax.scale_by_adam(), 1 / 4),
          optax.add_decayed_weights(0.1),
          optax.scale_by_learning_rate(3e-3),
      )

    Published methods are choices of these arguments:

    - GaLore: `projection="svd", residual=None, carry=False`. The rate in its scripts is to be
      multiplied by their scale, .25; `scale` here is one product with the rate outside.
    - Fira: `projection="svd", carry=False`.
    - GoLore: `projection="random", residual=None, carry=False`.
    - LDAdam without its buffer of errors: `projection="power", residual=None, update_every=1`.
    - SubTrack++ and GrassJump are of the form of `projection="power"` and `projection="random"`.

    Without `dimension_numbers`, leaves of exactly two axes are projected whose state becomes
    smaller; all others go into the same optimizer at full rank. `optperm.low_rank_report` lists
    them. **Leave embeddings out**, as the papers do: a batch's gradient has as many nonzero rows as
    it has tokens, and a basis on their width is chosen by the frequent ones.

    Args:
      inner: The optimizer, a direction such as `optax.scale_by_adam()`, `optax.scale_by_lion()` or
        `optax.trace(0.9)`. It gets no params. A complete one,
        such as `optax.adam(1e-3)`, works too: the residual takes its sign, that of
        :math:`\sum \langle N, R \rangle` in the first step where this is not 0. A schedule belongs
        outside, since the limiter would take its warm-up for growth.
      rank: r, an integer of at least 1, or a share in (0, 1) of each leaf's smaller side.
      update_every: The steps from one basis to the next, at least 1, or a schedule of them. Every
        matrix gets its first basis in step 0; after it leaf i of L has its turn at i * update_every
        // L, modulo update_every.
      projection: How bases are made: "random", uniformly distributed; "svd", the first singular
        vectors of the gradient; "power", the first ones, then one step of subspace iteration from
        the last basis, for `update_every` from 1 to 20.
      residual: "scaled", for S, or None to lose what is outside of the subspace. With a random
        basis :math:`E P P^\top = (r / d) I`: a rate times d / r is then unbiased, and noisy.
      carry: Whether moments are carried over. Known are those of Adam (Adamax and Yogi share its
        state, and are carried as if they were Adam), Lion, EMA, trace, Muon and RMSProp. Without,
        moments stay as they are, and each new basis vector takes the sign for which its product
        with the last one is at least 0.
      scale: A factor on the steps of projected leaves.
      side: On which side of a matrix bases stand: the "smaller" one, of a square the columns, or
        the "larger" one, for a smaller state and a poorer subspace.
      limit: The most by which the norm of S grows in a step, at least 1, or None for no limit.
      dimension_numbers: The axes of leaves to project, as `optax.contrib.GaLoreDimensionNumbers`:
        for all leaves of two axes and more, or a tree like params of them and of None for full
        rank, or a function from params to that. Axes that are named in neither part are batch axes,
        along which each matrix has its own basis.
      decays: :math:`(\beta_1, \beta_2)` of an Adam in `inner`, whose state does not hold them; None
        leaves the corrections away in what is carried over, if there are others.
      seed: Of random bases.

    Returns:
      A transformation whose state is a `LowRankState`. Its `update` needs no params.

    Example:
      >>> import jax, jax.numpy as jnp, optax, optperm
      >>> numbers = optax.contrib.GaLoreDimensionNumbers()
      >>> def kernels(params):  # all matrices but embeddings
      ...     def of(path, leaf):
      ...         is_kernel = leaf.ndim == 2 and "embed" not in jax.tree_util.keystr(path)
      ...         return numbers if is_kernel else None
      ...
      ...     return jax.tree_util.tree_map_with_path(of, params)
      >>> tx = optax.chain(
      ...     optperm.low_rank(optax.scale_by_lion(), 1 / 4, dimension_numbers=kernels),
      ...     optax.scale_by_learning_rate(0.1),
      ... )
      >>> params = {"embed": jnp.ones((50, 8)), "kernel": jnp.ones((8, 16))}
      >>> opt_state = tx.init(params)
      >>> opt_state[0].inner_state.mu["kernel"].shape
      (2, 16)
      >>> updates, opt_state = tx.update(params, opt_state)
      >>> updates["kernel"].shape
      (8, 16)

    Notes:
      With Adam a projected leaf takes (d r + 2 r k) words in the place of 2 d k. The gradient
      itself stays whole. A step costs two products of 2 d k r operations, which on a CPU may take
      longer than Adam's update, though little beside a gradient of some hundred tokens; a basis
      that of a d x d Gram matrix and its eigenvectors, or a QR of d x r. Under `jax.vmap` over
      independent trainings bases are computed in every step.

      A gradient that is zero or not finite makes no basis: the matrix keeps the one that it has,
      and tries again in the next step; random bases need none. What is not finite goes on to
      `optax.apply_if_finite` or whatever stands around.

      Of a gradient that is spread over devices along k, a step reduces a few numbers, and a Gram
      matrix d x d; along d, a step reduces R, and a Gram matrix gathers the gradient. Random bases
      are made without communication. Bases lie as the rows of the gradient.

    Raises:
      TypeError: If an argument is of the wrong type, or a parameter is not of a real floating
        dtype.
      ValueError: If an argument is out of range, `rank` is above the smaller side of every matrix,
        or of a leaf that `dimension_numbers` names, these name an axis twice or one that is not
        there, `carry` meets a state that it does not know, or `inner` needs params.

    References:
      Zhao et al., `GaLore: Memory-Efficient LLM Training by Gradient Low-Rank Projection
      <https://arxiv.org/abs/2403.03507>`_, 2024

      Chen et al., `Fira: Can We Achieve Full-rank Training of LLMs Under Low-rank Constraint?
      <https://arxiv.org/abs/2410.01623>`_, 2024

      Robert et al., `LDAdam: Adaptive Optimization from Low-Dimensional Gradient Statistics
      <https://arxiv.org/abs/2410.16103>`_, 2024
    """
    checks.check_transformation("inner", inner)
    check_projection(rank, side)
    _check_choices(update_every, projection, residual, decays)
    checks.check_flag("carry", carry)
    checks.check_positive("scale", scale)
    checks.check_seed("seed", seed)
    check_limit(limit)
    optimizer = optax.with_extra_args_support(inner)

    def plan(tree: optax.Updates) -> list[Matrix | None]:
        return matrices_of(tree, rank, side, dimension_numbers)

    def new_basis(index: int, count: jax.Array, g: jax.Array, old: jax.Array, first: Any) -> Any:
        if projection == "random":
            key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), index)
            new = random_basis(jax.random.fold_in(key, count), old.shape, old.dtype)
        else:
            new = _basis_of_gradient(projection, g, old, first)
        new = shard_like(new, old)
        return new if carry else align_signs(new, old)

    def init(params: optax.Params) -> LowRankState:
        plans = plan(params)
        low = map_plans(low_rank_like, params, plans)
        inner_state = inner.init(low)
        if carry:
            check_moments(inner_state, plans, jax.tree.leaves(low))
        note(params, plans, low, inner_state, has_basis=True)
        return LowRankState(
            jnp.zeros([], jnp.int32),
            map_plans(basis_zeros, params, plans),
            map_plans(functools.partial(zeros_of_batch, dtype=jnp.int32), params, plans),
            map_plans(zeros_of_batch, params, plans),
            mark_varying(jnp.zeros([], jnp.int8), varying_axes(params)),
            inner_state,
        )

    def update(
        updates: optax.Updates, state: LowRankState, _: Any = None, **extra_args: Any
    ) -> tuple[optax.Updates, LowRankState]:
        leaves, plans = jax.tree.leaves(updates), plan(updates)
        structure: Any = jax.tree.structure(updates)
        parts = (state.basis, state.next_refresh, state.norm)
        bases, dues, norms = map(structure.flatten_up_to, parts)

        # P <- another basis of each leaf whose turn it is
        every = update_every(state.count) if callable(update_every) else update_every
        turns = _next_turns(plans, state.count, jnp.maximum(jnp.asarray(every, jnp.int32), 1))
        changes: list[Change | None] = []
        for i, (m, leaf, old, due) in enumerate(zip(plans, leaves, bases, dues, strict=True)):
            make = functools.partial(new_basis, i, state.count)
            needs_gradient = projection != "random"
            now = (leaf, old, due, state.count, make, needs_gradient)
            changes.append(None if m is None else _change(m, *now))
        # M <- (P_new' P) M
        inner_state = state.inner_state
        if carry:
            inner_state = carry_moments(inner_state, structure, changes, decays)

        # R = P' G, and N, inner <- inner(R)
        exact = [
            leaf if c is None else project_leaf(c.matrix, c.new, leaf)
            for c, leaf in zip(changes, leaves, strict=True)
        ]
        low = low_rank_leaves(updates, plans, exact)
        direction, inner_state = inner_direction(
            optimizer, low, inner_state, extra_args, "low_rank"
        )
        sign = state.sign if residual is None else direction_sign(direction, low, state.sign)

        # U = scale P N or scale (P N + S), and N where a leaf stays at full rank
        out = structure.flatten_up_to(direction)
        for i, (c, leaf, r) in enumerate(zip(changes, leaves, exact, strict=True)):
            if c is not None:
                bases[i], dues[i] = c.new, jnp.where(c.is_new, turns[i], dues[i])
                u, norms[i] = _step(c, leaf, r, out[i], norms[i], sign, residual, limit)
                out[i] = c.matrix.leaf(c.matrix.turn(jnp.asarray(scale, u.dtype) * u))
        basis, due, norm = map(structure.unflatten, (bases, dues, norms))
        count = optax.safe_increment(state.count)
        return structure.unflatten(out), LowRankState(count, basis, due, norm, sign, inner_state)

    # Gradients tell all that an update needs; params only the dtypes.
    return transformation(init, update, method="low_rank", needs_params=False)


def _check_choices(
    update_every: object, projection: object, residual: object, decays: object
) -> None:
    """Raise unless each of these is one of what it may be."""
    if not callable(update_every):
        checks.check_count("update_every", update_every)
    checks.check_choice("projection", projection, get_args(Projection))
    if residual is not None:
        checks.check_choice("residual", residual, get_args(Residual))
    if decays is not None and not (isinstance(decays, tuple | list) and len(decays) == 2):
        raise TypeError(
            f"decays must be Adam's two, such as (0.9, 0.999), or None, got {decays!r}."
        )
    for decay in decays or ():
        checks.check_in_range("each of decays", decay, 0.0, 1.0, may_be_schedule=False)


def _next_turns(plans: list[Matrix | None], count: jax.Array, every: jax.Array) -> list[jax.Array]:
    """Return the step of each leaf's next refresh, for those that have one now.

    Leaf i of the L that are projected has them at i * every // L, modulo every, so that few leaves
    have theirs in the same step.
    """
    number, before, turns = sum(m is not None for m in plans), 0, []
    for m in plans:
        offset = before * every // max(number, 1)
        turns.append(count + 1 + (offset - count - 1) % every)
        before += m is not None
    return turns


def _change(
    matrix: Matrix,
    leaf: jax.Array,
    old: jax.Array,
    due: jax.Array,
    count: jax.Array,
    make: Callable[..., jax.Array],
    needs_gradient: bool,
) -> Change:
    """Return what becomes of the bases of a leaf's matrices: another one where that is due.

    Where bases are made of the gradient, one that is zero or not finite makes none, and the next
    step tries again.
    """
    g, is_due = matrix.matrices(leaf), count >= due

    def attempt() -> tuple[jax.Array, jax.Array]:
        is_new = is_due
        if needs_gradient:
            is_finite = jnp.isfinite(jnp.sum(g * 0, axis=(-2, -1)))
            is_new &= unshard(is_finite & jnp.any(g != 0, axis=(-2, -1)))
        new = cond(jnp.any(is_new), lambda: make(g, old, due == 0), lambda: old)
        return jnp.where(is_new[..., None, None], new, old), is_new

    kept = old, jnp.zeros_like(is_due)
    return Change(matrix, old, *cond(jnp.any(is_due), attempt, lambda: kept))


def _basis_of_gradient(
    projection: Projection, g: jax.Array, old: jax.Array, is_first: jax.Array
) -> jax.Array:
    """Return a basis of what is largest in G, by its Gram matrix or by a step from the last basis."""
    # So that no square is too large or too small.
    largest = jnp.max(jnp.abs(g), axis=(-2, -1), keepdims=True).astype(old.dtype)
    g = g.astype(old.dtype) / jnp.where(largest > 0, largest, 1.0)
    if projection == "svd":
        return gram_basis(g, old.shape[-1])
    first = is_first[..., None, None]

    def with_first() -> jax.Array:
        return jnp.where(first, gram_basis(g, old.shape[-1]), power_basis(g, old))

    return cond(jnp.any(is_first), with_first, lambda: power_basis(g, old))


def _step(
    change: Change,
    leaf: jax.Array,
    r: jax.Array,
    direction: jax.Array,
    last: jax.Array,
    sign: jax.Array,
    residual: Residual | None,
    limit: float | jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """Return P N + S, turned as the leaf, and the norm of S, which grows from the last as limited."""
    m = change.matrix
    g, n = m.turn(m.matrices(leaf)).astype(r.dtype), direction.astype(r.dtype)
    if residual is None:
        return lift(m, change.new, n, g), last
    # f_j = |N_j| / |R_j|, and S = (G - P R) f, of which |S|^2 = sum_j f_j^2 (|G_j|^2 - |R_j|^2)
    f = gains(n, r, (m.rank_axis,))
    whole, inside = (jnp.sum(jnp.square(f * x), axis=(-2, -1)) for x in (g, r))
    # What rounding leaves of a gradient that lies within the subspace is no norm to grow from.
    is_seen = whole - inside > 100 * jnp.finfo(r.dtype).eps * whole
    norm = unshard(jnp.sqrt(jnp.where(is_seen, whole - inside, 0.0)))
    quotient, norm = growth_limit(norm, last, limit)
    # P N + S / L = P (N - a R) + a G, with a = f / L: one product
    a = sign.astype(r.dtype) * f / quotient[..., None, None]
    return lift(m, change.new, n - a * r, g) + a * g, norm
