"""Gradual pruning: increase the sparsity while the network trains.

M. Zhu and S. Gupta, "To prune, or not to prune", arXiv 1710.01878.
"""

import functools
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import optax

from optperm._leaf_axes import warn_of_others
from optperm.core import checks
from optperm.core.control import cond
from optperm.core.dtypes import accumulation_dtype, all_finite, any_nonzero, place_like
from optperm.core.mapped_axes import AxisName, varying_like, varying_zeros
from optperm.core.schedules import resolve_schedule
from optperm.core.shapes import Params, Updates
from optperm.core.transformation import transformation
from optperm.core.trees import mask_like
from optperm.exact import check_no_averages
from optperm.sparsity._choice import (
    Groups,
    Include,
    Scope,
    count_in_layers,
    find_axes,
    group_leaves,
    include_leaves,
    keep_highest,
    nearest_count,
    order_codes,
)
from optperm.sparsity._sparse_state import (
    SparseState,
    ZeroCounts,
    check_not_lowered,
    check_places_nothing,
    make_masks,
    mask_updates,
    sparse_arguments,
    zero_dead,
)
from optperm.sparsity._structures import ENTRIES, Entries, NOfM, Structure, as_structure, check_fits

Criterion = Literal["magnitude", "saliency", "movement"]


def prune_gradually(
    inner: optax.GradientTransformation,
    sparsity: Any,
    ramp: optax.ScalarOrSchedule,
    *,
    every: int | jax.Array = 100,
    criterion: Criterion = "magnitude",
    scope: Scope = "erk",
    include: Include | None = None,
    structure: Structure | None = None,
    axes: Any = None,
    axis_name: AxisName | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Train with an optimizer while the sparsity rises to its final value.

    Finally, Z of n entries of each layer, or of all leaves together, are zero. Step
    :math:`t = 0, 1, ...` uses a ramp :math:`r_t` from 0 to 1, the mask m, the scores s and the step u of
    `inner`:

    .. math::
      \text{if } t \bmod \text{every} = 0:\quad &
      m \leftarrow \text{the } n - \lfloor r_t Z + \tfrac12 \rfloor \text{ highest of } s
      \text{ where } m \\
      & u \leftarrow u(g \text{ where } m, \text{ else } 0) \\
      & \theta \leftarrow \theta + u \text{ where } m, \text{ else } 0

    The scores are :math:`|\theta|` before the step ("magnitude"), :math:`|\theta g|` with the batch's
    gradient ("saliency"), or S with :math:`S \leftarrow S - \theta g` in each step ("movement"). With
    "movement", weights that move away from zero have high scores. Ties keep the earlier entry. If the
    score of a live entry (for "movement", the gradient) is not finite, or if the scores of all live
    entries are 0, as for a batch of padding, no mask changes until the next multiple of `every`.

    Args:
      inner: The optimizer, which sees gradients with zeros for pruned entries, so clipping inside it
        uses the norm of the live entries. Clipping before this transformation, in an `optax.chain`, uses
        the norm of all entries.
      sparsity: The final fraction of zeros, in [0, 1], or a tree of fractions like params, or a prefix
        of such a tree.
      ramp: r, a schedule from 0 to 1, or a number. Zhu and Gupta's ramp is
        `optax.polynomial_schedule(0.0, 1.0, 3, num_steps, first_step)`.
      every: The number of steps between changes of the mask.
      criterion: `"magnitude"`, `"saliency"` or `"movement"`.
      scope: `"erk"`, `"leaf"` or `"global"`, as in `optperm.sparsity.prune`.
      include: The leaves to prune, as in `optperm.sparsity.prune`.
      structure: `optperm.sparsity.Blocks` or `optperm.sparsity.Units`, to prune and count groups of
        entries. None for individual entries.
      axes: What each leaf is, as in `optperm.sparsity.prune`.
      axis_name: The mapped axis over which scores are averaged when the mask changes, for replicas whose
        params or gradients differ. None if they agree.

    Returns:
      A transformation whose state is an `optperm.sparsity.SparseState`. Its `update` needs `params`.
      With `optax.apply_updates`, the transformation must come last in its chain. With
      `optperm.apply_updates`, zeros stay zero for any position in the chain.

    Example:
      >>> import jax, jax.numpy as jnp, optax, optperm
      >>> ramp = optax.polynomial_schedule(0.0, 1.0, 3, 4)
      >>> tx = optperm.prune_gradually(optax.sgd(0.1), 0.75, ramp, every=2)
      >>> w = jnp.array([[4.0, -3.0], [2.0, 1.0]])
      >>> opt_state, update = tx.init(w), jax.jit(tx.update)
      >>> for step in range(5):
      ...     updates, opt_state = update(jnp.zeros_like(w), opt_state, w)
      ...     w = optperm.apply_updates(w, updates, opt_state)
      ...     print(step, w.ravel().tolist())
      0 [4.0, -3.0, 2.0, 1.0]
      1 [4.0, -3.0, 2.0, 1.0]
      2 [4.0, 0.0, 0.0, 0.0]
      3 [4.0, 0.0, 0.0, 0.0]
      4 [4.0, 0.0, 0.0, 0.0]

    Notes:
      Masks only shrink, so a decreasing ramp has no effect. The sparsity reaches its final value at the
      first multiple of `every` at or after the end of the ramp. `warnings()` of the state says if it has
      not, and `reached_goal()` returns whether it has. A higher `sparsity` for a later part of the run
      is reached in the same way, while a lower `sparsity` is an error. `optperm.sparsity.prune` prunes
      more entries, and `optperm.sparsity.reset_masks` frees all entries.

      Products stay dense, so training is not faster. While the ramp rises, steps that may change the
      mask also select entries. "movement" reads and writes S, a float32 number for each entry, in every
      step. If masks change, an average of the params outside this transformation is not sparse. Unlike
      this method, `optperm.rigl` accepts `optax.contrib.schedule_free` as `inner`.

    Raises:
      TypeError: If `inner` is not a transformation, a sparsity or the ramp is not a number, or a
        parameter does not have a real floating dtype.
      ValueError: If an argument is out of range; if no leaf is included although `sparsity` is not 0; if
        the state was made with other `axes`, or another `criterion`, `include`, `scope` or `structure`;
        if `axes` does not fit the params; if a structure does not fit a leaf; if `inner` sets exact
        params or keeps averages of params (`optax.contrib.schedule_free`, `optax.contrib.mechanize`,
        `optax.lookahead`); if `axis_name` is not bound in `update`; or if trees do not match.

    References:
      Zhu and Gupta, `To prune, or not to prune: exploring the efficacy of pruning for model compression
      <https://arxiv.org/abs/1710.01878>`_, 2017; Sanh et al., `Movement Pruning
      <https://arxiv.org/abs/2005.07683>`_, NeurIPS 2020
    """
    checks.check_transformation("inner", inner)
    checks.check_in_range("ramp", ramp, 0.0, 1.0)
    checks.check_count("every", every)
    checks.check_choice("criterion", criterion, get_args(Criterion))
    checks.check_choice("scope", scope, get_args(Scope))
    if isinstance(structure, NOfM):
        raise ValueError(
            "structure must not be an NOfM, which has no ramp: use optperm.sparsity.keep_top."
        )
    units = as_structure(structure)
    optimizer = optax.with_extra_args_support(inner)

    def init(params: Params) -> SparseState:
        taken, known = include_leaves(include, axes, params, fractions=sparsity)
        if include is None:
            warn_of_others("prune_gradually", params, axes)
        mask = make_masks(taken)
        check_fits(units, mask, known)
        groups = group_leaves("sparsity", sparsity, scope, mask, known, units)
        none = varying_zeros(mask, jnp.int32, (sum(groups.layers),))
        scores = None
        if criterion == "movement":
            scores = jax.tree.map(_make_zeros, mask_like(params, mask))
        inner_state = optimizer.init(params)
        check_places_nothing(inner_state)
        check_no_averages(inner_state, "prune_gradually")
        return SparseState(
            count=jnp.zeros([], jnp.int32),
            mask=mask,
            inner_state=inner_state,
            scores=scores,
            zeros=ZeroCounts(asked=groups.of_layers(groups.zeros), found=none, aimed=none),
        )

    def update(
        grads: Updates, state: SparseState, params: Params, **extra_args: Any
    ) -> tuple[Updates, SparseState]:
        mask, scores = state.mask, state.scores
        w, g = mask_like(params, mask), mask_like(grads, mask)
        if scores is not None:
            # S <- S - w g where m
            scores = jax.tree.map(_accumulate, scores, mask, w, g)

        # m <- the n - round(r_t Z) highest of s where m
        known = mask_like(find_axes(axes, params), mask)
        groups = group_leaves("sparsity", sparsity, scope, mask, known, units)
        asked = groups.of_layers(groups.zeros)
        before: Any = state.zeros
        check_not_lowered(before, asked)
        r = resolve_schedule("ramp", ramp, state.count, high=1.0)
        zeros = jnp.asarray(nearest_count(r, asked))

        # Scores are computed only if the ramp needs more zeros than there are.
        def shrink() -> Any:
            rank = functools.partial(_rank, criterion, w, g, scores, axis_name)
            has_more = jnp.any(zeros > _count_zeros(mask, known, groups, units))
            new = cond(
                has_more,
                lambda: _keep_highest(mask, known, groups, zeros, units, rank()),
                lambda: mask,
            )
            found = jnp.minimum(_count_zeros(new, known, groups, units), asked)
            return new, ZeroCounts(asked, found, jnp.maximum(before.aimed, zeros))

        is_multiple = state.count % jnp.asarray(every, jnp.int32) == 0
        mask, counts = cond(is_multiple, shrink, lambda: (state.mask, before))

        # u(g where m, else 0), then w + u where m, else 0
        live = zero_dead(mask, grads)
        updates, inner_state = optimizer.update(live, state.inner_state, params, **extra_args)
        return mask_updates(mask, updates, params), state._replace(
            count=optax.safe_increment(state.count),
            mask=mask,
            inner_state=inner_state,
            scores=scores,
            zeros=counts,
        )

    return transformation(
        init,
        update,
        method="prune_gradually",
        like=lambda state: state.mask,
        axis_name=axis_name,
        shape_arguments=functools.partial(
            sparse_arguments, include, axes, criterion=criterion, scope=scope, structure=structure
        ),
    )


def _rank(criterion: str, w: Any, g: Any, scores: Any, axis_name: AxisName | None) -> Any:
    """Return s = |w|, |w g| or S, at the params before the step."""
    wide = accumulation_dtype(w)
    if criterion == "magnitude":
        ranked = jax.tree.map(lambda p: jnp.abs(jnp.asarray(p, wide)), w)
    elif criterion == "saliency":
        ranked = jax.tree.map(
            lambda p, d: jnp.abs(jnp.asarray(p, wide) * jnp.asarray(d, wide)), w, g
        )
    else:
        # The scores are S, or NaN where the gradient is not finite
        ranked = jax.tree.map(lambda s, d: jnp.where(jnp.isfinite(d), s, jnp.nan), scores, g)
    # Replicas must rank the same scores, so that their masks agree.
    if axis_name is None:
        return ranked
    return jax.lax.pmean(varying_like(ranked, (w, g), axis_name), axis_name)


def _make_zeros(p: jax.Array) -> jax.Array:
    return place_like(jnp.zeros_like(p, jnp.float32), p)


def _accumulate(s: jax.Array, m: jax.Array, w: jax.Array, g: jax.Array) -> jax.Array:
    """Return S - w g where m is True and w g is finite, otherwise S."""
    # The sum is in float32, since sums in 16 bits would lose small products.
    product = jnp.asarray(w, jnp.float32) * jnp.asarray(g, jnp.float32)
    return jnp.where(m & jnp.isfinite(product), s - product, s)


def _live_units(mask: Any, known: Any, structure: Entries) -> list[jax.Array]:
    """Return whether each unit has a live entry, for each leaf."""
    return [
        m if structure is ENTRIES else structure.pool(m.astype(jnp.float32), own) > 0
        for m, own in zip(jax.tree.leaves(mask), jax.tree.leaves(known), strict=True)
    ]


def _count_zeros(mask: Any, known: Any, groups: Groups, structure: Entries) -> jax.Array:
    """Return the number of units without a live entry in each layer of each group."""
    dead = [~live for live in _live_units(mask, known, structure)]
    zeros = count_in_layers(dead, groups.copies)
    # The layers of one group of all leaves are ranked together.
    return zeros if len(zeros) == sum(groups.layers) else jnp.sum(zeros, keepdims=True)


def _keep_highest(
    mask: Any, known: Any, groups: Groups, zeros: jax.Array, structure: Entries, scores: Any
) -> Any:
    """Return the mask of live entries after each layer gets the given number of zero units."""
    leaves, treedef = jax.tree.flatten(mask)
    axes = jax.tree.leaves(known)
    units = _live_units(mask, known, structure)
    # Nonfinite scores would be ranked by their positions, and so would scores that are all 0.
    of_live = zero_dead(mask, scores)
    zeros = jnp.where(all_finite(of_live) & any_nonzero(of_live), zeros, 0)
    # A dead unit has code 0 and stays dead, because all codes of live units are above 0.
    pairs = zip(jax.tree.leaves(scores), axes, strict=True)
    codes = [order_codes(structure.pool(s, own)) for s, own in pairs]
    codes = [jnp.where(live, c, jnp.zeros_like(c)) for live, c in zip(units, codes, strict=True)]
    live = groups.of_layers(groups.sizes) - zeros
    kept = keep_highest(codes, groups.leaves, live, groups.copies)
    kept = [m & structure.spread(k, m, own) for m, k, own in zip(leaves, kept, axes, strict=True)]
    return jax.tree.unflatten(treedef, kept)
