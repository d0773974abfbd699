"""RigL: drop weights by magnitude and grow as many other weights by gradient.

U. Evci et al., "Rigging the Lottery: Making All Tickets Winners", arXiv 1911.11134. With random growth,
the method is SET: D. Mocanu et al., arXiv 1707.04780.
"""

import functools
from collections.abc import Callable
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import optax

from optperm._leaf_axes import warn_of_others
from optperm.core import checks, noise
from optperm.core.control import cond
from optperm.core.dtypes import accumulation_dtype, all_finite, cast_like
from optperm.core.keys import make_key
from optperm.core.mapped_axes import AxisName, varying_zeros
from optperm.core.schedules import resolve_schedule
from optperm.core.shapes import Params, Updates
from optperm.core.shardings import shard_like
from optperm.core.states import match_within_states
from optperm.core.transformation import transformation
from optperm.core.trees import is_masked, mask_like
from optperm.sparsity._choice import (
    Include,
    count_in_layers,
    find_axes,
    group_leaves,
    include_leaves,
    keep_highest,
    keep_highest_of,
    nearest_count,
    order_codes,
    stack_counts,
)
from optperm.sparsity._sparse_state import (
    SparseState,
    check_places_nothing,
    make_masks,
    mask_updates,
    sparse_arguments,
    zero_dead,
)

Grow = Literal["gradient", "random"]


def rigl(
    inner: optax.GradientTransformation,
    sparsity: Any,
    *,
    end: int | jax.Array,
    key: int | jax.Array = 0,
    every: int | jax.Array = 100,
    drop_fraction: optax.ScalarOrSchedule = 0.3,
    grow: Grow = "gradient",
    include: Include | None = None,
    axes: Any = None,
    skip_step: bool = False,
    axis_name: AxisName | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Train a sparse network, and periodically move weights to entries with large gradients.

    The first mask is random. In each step t with :math:`t \bmod \text{every} = 0` and :math:`0 < t < T`,
    :math:`k = \lfloor \alpha_t n + \tfrac12 \rfloor` of the n live weights of each layer move:

    .. math::
      \text{kept} &= \text{the } n - k \text{ live entries with the highest } |\theta| \\
      \text{grown} &= \text{the } k \text{ other entries with the highest } |g| \\
      m &\leftarrow \text{kept} \cup \text{grown}, \qquad
      \alpha_t = \tfrac{1}{2} \alpha \, (1 + \cos(\pi t / T))

    A weight that is dropped and grown in the same step keeps its value and its state. Other grown
    weights start at 0, with the initial optimizer state. Dropped weights are set to 0. `inner` sees
    gradients and params with zeros for dead entries. Each layer keeps its number of live weights. With
    `grow="random"`, grown entries are random (SET). With `drop_fraction=0`, the mask never changes. The
    mask of a layer does not change in a step in which all its gradients are 0, as for a batch of
    padding.

    Args:
      inner: Any optimizer whose state consists of trees like params, scalars, counts, keys and, as in
        Muon, vectors of constants. This excludes `optax.flatten`, factored moments and low-rank states.
        Clipping inside `inner` uses the norm of the live entries. Clipping before this transformation,
        in an `optax.chain`, uses the norm of all entries.
      sparsity: The fraction of zeros, in [0, 1], which `optperm.sparsity.erk_sparsity` distributes over
        the leaves; or a tree of fractions like params, or a prefix of such a tree. Masks keep their
        numbers of zeros, so `update` needs the sparsity of `init`. To raise the sparsity of a resumed
        run, call `optperm.sparsity.prune` and keep this argument.
      end: T, the step from which on the mask no longer changes, about three quarters of the run.
      key: The random key of the first mask and of random growth: an int or a `jax.random.key`. All
        replicas need the same key. The state stores the key, so `update` does not use this argument.
      every: The number of steps between changes of the mask.
      drop_fraction: :math:`\alpha`, in [0, 1], or a schedule of :math:`\alpha_t` itself.
      grow: `"gradient"` or `"random"`.
      include: The leaves that are sparse, as in `optperm.sparsity.prune`.
      axes: What each leaf is, as in `optperm.sparsity.prune`.
      skip_step: Whether a step that changes the mask leaves live weights and the state of `inner`
        unchanged, as in the paper's code.
      axis_name: The mapped axis over which :math:`|\theta|` and :math:`|g|` are averaged when the mask
        changes, for replicas whose params or gradients differ. None if they agree.

    Returns:
      A transformation whose state is an `optperm.sparsity.SparseState`. Its `update` needs `params`.
      With `optax.apply_updates`, the transformation must come last in its chain. With
      `optperm.apply_updates`, zeros stay zero for any position in the chain.

    Example:
      >>> import jax, jax.numpy as jnp, optax, optperm
      >>> tx = optperm.rigl(optax.sgd(0.5), 0.5, end=10, every=1)
      >>> w = jnp.ones((2, 4))
      >>> opt_state, update = tx.init(w), jax.jit(tx.update)
      >>> target = jnp.arange(8.0).reshape(2, 4)
      >>> for _ in range(20):
      ...     updates, opt_state = update(w - target, opt_state, w)
      ...     w = optperm.apply_updates(w, updates, opt_state)
      >>> w.round(1).tolist()  # the four largest
      [[0.0, 0.0, 0.0, 0.0], [4.0, 5.0, 6.0, 7.0]]

    Notes:
      RigL needs the gradient of all entries. `jax.grad` computes this gradient, because dead weights
      are ordinary zeros in the params. Do not multiply by a mask in the model: the gradients of dead
      weights would then be zero, and RigL would regrow the first entries of a layer.

      The params are dense until the first update. To make the params sparse earlier, call
      `params, opt_state = optperm.sparsity.prune(params, opt_state, 0.0)`.

      Products and gradients are dense, so training is not faster. At the same cost, gradual pruning was
      more accurate on MNIST, and less accurate on CIFAR-10 at 90% zeros. With Adam, a new weight moves
      farther than an old weight, because its moments are new but the step count is not. With the decay
      rates 0.9 and 0.999, it moves 3.2 to 6.6 times as far. If this hurts, use b2=0.99.

      `warnings()` of the state says if the mask has not moved although `drop_fraction` is not 0. Within
      `jax.lax.scan`, a step that does not change the mask costs as much as a step of the optimizer with
      `optperm.mask_elements`. A compiled program of a single step always allocates memory for a
      selection, four times the bytes of the params.

    Raises:
      TypeError: If an argument has the wrong type, or a parameter does not have a real floating dtype.
      ValueError: If an argument is out of range; if no leaf is included although `sparsity` is not 0; if
        the state was made with other `axes`, or another `include` or `sparsity`; if `axes` does not fit
        the params; if a state of `inner` is not like params; if `axis_name` is not bound in `update`; or
        if trees do not match.

    References:
      Evci et al., `Rigging the Lottery: Making All Tickets Winners <https://arxiv.org/abs/1911.11134>`_,
      ICML 2020; Mocanu et al., `Scalable training of artificial neural networks with adaptive sparse
      connectivity <https://arxiv.org/abs/1707.04780>`_, 2018
    """
    checks.check_transformation("inner", inner)
    checks.check_key("key", key)
    checks.check_count("end", end)
    checks.check_count("every", every)
    checks.check_in_range("drop_fraction", drop_fraction, 0.0, 1.0)
    checks.check_choice("grow", grow, get_args(Grow))
    is_known = all(map(checks.is_concrete_number, (end, every, drop_fraction)))
    if is_known and drop_fraction > 0 and end <= every:
        wanted = f"end must be above every={every}, or drop_fraction must be 0"
        raise ValueError(f"{wanted}, got end={end} and drop_fraction={drop_fraction}.")
    is_static = checks.is_concrete_number(drop_fraction) and drop_fraction == 0
    optimizer = optax.with_extra_args_support(inner)

    def init(params: Params) -> SparseState:
        raw = jax.random.bits(make_key(key), (2,), jnp.uint32)
        mask = _draw_masks(include, axes, sparsity, raw, params)
        if include is None:
            warn_of_others("rigl", params, axes)
        inner_state = optimizer.init(params)
        check_places_nothing(inner_state)
        if (unlike := _find_unlike_params(inner_state, mask, params)) is not None:
            raise ValueError(
                f"rigl restarts the state of each weight that grows, but inner contains {unlike}, "
                "which does not have one number per weight: leave out optax.flatten, factored moments "
                "and low rank."
            )
        return SparseState(
            count=jnp.zeros([], jnp.int32),
            mask=mask,
            inner_state=inner_state,
            key=raw,
            unmoved=varying_zeros(mask, jnp.int32) + int(not is_static),
        )

    def update(
        grads: Updates, state: SparseState, params: Params, **extra_args: Any
    ) -> tuple[Updates, SparseState]:
        t, before = state.count, state.mask
        last = jnp.asarray(end, jnp.int32)
        still: Any = state.unmoved
        known = jax.tree.leaves(mask_like(find_axes(axes, params), before))
        copies = [own.batch_axis for own in known]
        # w where m, else 0; where m is False, the state of `inner` is the initial state
        live = zero_dead(before, params)
        inner_state = _restart_dead(optimizer, before, state.inner_state, live)

        def move() -> Any:
            # alpha_t = alpha / 2 (1 + cos(pi t / T))
            alpha = resolve_schedule("drop_fraction", drop_fraction, t, high=1.0)
            if not callable(drop_fraction):
                done = t.astype(jnp.float32) / last.astype(jnp.float32)
                alpha = alpha / 2 * (1 + jnp.cos(jnp.pi * done))
            # m <- kept (by |w|) and grown (by |g|, or at random)
            w, g = _find_scores(before, params, grads, axis_name)
            if grow == "random":
                codes = _draw_codes(before, state.key, t)
                new = _move(before, copies, w, _code_dead, codes, alpha)
            else:
                # Nonfinite gradients would be ranked by their positions, and so would a layer's zeros.
                alpha = jnp.where(all_finite(g) & _have_nonzero(g, copies), alpha, 0)
                new = _move(before, copies, w, _code_dead_gradient, g, alpha)
            return new, jnp.where(_are_equal(new, before), still, 0)

        # The condition depends only on the count, the same on all replicas, so selections stay rare.
        due = (t % jnp.asarray(every, jnp.int32) == 0) & (t > 0) & (t < last)
        mask, unmoved = cond(due, move, lambda: (before, still))

        # u(g where m, else 0) with the new mask; then w + u where m (from 0 for new entries), else 0
        def step() -> tuple[Updates, Any]:
            g = zero_dead(mask, grads)
            u, new = optimizer.update(g, inner_state, live, **extra_args)
            return cast_like(u, params), cast_like(new, inner_state)

        def stay() -> tuple[Updates, Any]:
            return jax.tree.map(jnp.zeros_like, params), inner_state

        u, new_state = cond(due, stay, step) if skip_step else step()
        updates = mask_updates(mask, u, params, before)
        return updates, state._replace(
            count=optax.safe_increment(t),
            mask=mask,
            inner_state=new_state,
            unmoved=unmoved * int(not is_static),
        )

    return transformation(
        init,
        update,
        method="rigl",
        like=lambda state: state.mask,
        axis_name=axis_name,
        shape_arguments=functools.partial(_shape_arguments, include, axes, sparsity),
    )


def _have_nonzero(leaves: list[jax.Array], copies: list[tuple[int, ...]]) -> jax.Array:
    """Return for each layer whether it has an entry that is not zero."""
    return count_in_layers([leaf != 0 for leaf in leaves], copies) > 0


def _shape_arguments(
    include: Include | None, axes: Any, sparsity: Any, params: Params
) -> dict[str, Any]:
    taken, known = include_leaves(include, axes, params, fractions=sparsity)
    zeros = group_leaves("sparsity", sparsity, "erk", taken, known).zeros
    return sparse_arguments(include, axes, params, sparsity=zeros)


def _draw_masks(
    include: Include | None, axes: Any, sparsity: Any, raw: jax.Array, params: Params
) -> Any:
    """Return a random mask for each included leaf, with the number of zeros of each layer."""
    taken, known = include_leaves(include, axes, params, fractions=sparsity)
    leaves, treedef = jax.tree.flatten(make_masks(taken))
    groups = group_leaves("sparsity", sparsity, "erk", taken, known)
    # The first mask uses the random bits of step 0, in which no weight grows.
    codes = _draw_codes(leaves, raw, jnp.zeros([], jnp.int32))
    kept = keep_highest(codes, groups.leaves, groups.of_layers(groups.live), groups.copies)
    return jax.tree.unflatten(treedef, [m & k for m, k in zip(leaves, kept, strict=True)])


def _are_equal(new: Any, old: Any) -> jax.Array:
    """Return whether two masks are equal."""
    pairs = zip(jax.tree.leaves(new), jax.tree.leaves(old), strict=True)
    return jnp.all(stack_counts([jnp.sum(a != b, dtype=jnp.int32) for a, b in pairs]) == 0)


def _find_scores(
    mask: Any, params: Any, grads: Any, axis_name: AxisName | None
) -> tuple[list[jax.Array], list[jax.Array]]:
    """Return w and g of the included leaves, or |w| and |g| averaged over the named axes."""
    w, g = (jax.tree.leaves(mask_like(tree, mask)) for tree in (params, grads))
    wide = accumulation_dtype(w)
    w, g = ([jnp.asarray(leaf, wide) for leaf in leaves] for leaves in (w, g))
    return (w, g) if axis_name is None else jax.lax.pmean(jax.tree.map(jnp.abs, (w, g)), axis_name)


def _draw_codes(leaves: Any, raw: Any, t: jax.Array) -> list[jax.Array]:
    """Draw random codes above 0, which depend on the key, the step and the position of a leaf."""
    leaves = jax.tree.leaves(leaves)
    drawn = _draw(raw, t, shapes=tuple(leaf.shape for leaf in leaves))
    return [shard_like(code, leaf) for code, leaf in zip(drawn, leaves, strict=True)]


@functools.partial(jax.jit, static_argnames="shapes")
def _draw(raw: Any, t: jax.Array, *, shapes: tuple[tuple[int, ...], ...]) -> list[jax.Array]:
    return [jnp.maximum(code, 1) for code in noise.bits(noise.fold(raw, t), shapes)]


def _move(
    mask: Any,
    copies: list[tuple[int, ...]],
    weights: list[jax.Array],
    encode: Callable[..., jax.Array],
    scores: list[jax.Array],
    alpha: jax.Array,
) -> Any:
    """Return the mask of kept and grown entries, with as many live entries in each layer as before.

    The function `encode` makes the codes for growing of scores and the mask of kept entries.
    """
    leaves, treedef = jax.tree.flatten(mask)
    alone = [[index] for index in range(len(leaves))]
    live = count_in_layers(leaves, copies)
    moving = jnp.asarray(nearest_count(alpha, live))
    # kept: the n - k live entries with the highest |w|
    parts = [*zip(weights, leaves, strict=True)]
    kept = keep_highest_of(_code_live, parts, alone, live - moving, copies)
    # grown: the k entries with the highest |g| that are not kept, including dropped entries
    parts = [*zip(scores, kept, strict=True)]
    grown = keep_highest_of(encode, parts, alone, moving, copies)
    return jax.tree.unflatten(treedef, [a | b for a, b in zip(kept, grown, strict=True)])


def _code_live(weight: jax.Array, mask: jax.Array) -> jax.Array:
    """Return the code of |w| for live entries, and 0, which is below all codes, for dead entries."""
    codes = order_codes(jnp.abs(weight))
    return jnp.where(mask, codes, jnp.zeros_like(codes))


def _code_dead(code: jax.Array, kept: jax.Array) -> jax.Array:
    """Return the code of entries that are not kept, and 0 for kept entries."""
    return jnp.where(kept, jnp.zeros_like(code), code)


def _code_dead_gradient(grad: jax.Array, kept: jax.Array) -> jax.Array:
    """Return the code of |g| for entries that are not kept, and 0 for kept entries."""
    return _code_dead(order_codes(jnp.abs(grad)), kept)


def _restart_dead(
    optimizer: optax.GradientTransformation, mask: Any, inner_state: Any, params: Params
) -> Any:
    """Return the optimizer's state, with the entries of an initial state where the mask is False.

    Each step resets dead entries, so an entry starts with the initial state when it grows.
    """
    masks = _match_masks(inner_state, mask, params)
    fresh = jax.tree.leaves(optimizer.init(params))
    new = [
        leaf if is_live is None else jnp.where(is_live, leaf, jnp.asarray(first, leaf.dtype))
        for (leaf, is_live, _), first in zip(masks, fresh, strict=True)
    ]
    return jax.tree.unflatten(jax.tree.structure(inner_state), new)


def _match_masks(
    inner_state: Any, mask: Any, params: Params
) -> list[tuple[Any, jax.Array | None, str | None]]:
    """Return each array of the optimizer's state, with its mask if it has one number per entry.

    The last item is the name of the state if the array may depend on masked entries in another form.
    Otherwise the item is None, as for scalars, counts and keys, and for a vector in a field of a state
    with a number for each entry in other fields, such as Muon's coefficients.
    """
    structure: Any = jax.tree.structure(params)
    masks = structure.flatten_up_to(mask)
    matches = match_within_states(inner_state, params)
    owns = [None if match.place is None else masks[match.place] for match, _ in matches]
    per_entry = [
        own is not None and not is_masked(own) and jnp.shape(match.leaf) == own.shape
        for (match, _), own in zip(matches, owns, strict=True)
    ]
    with_entries = {at.state for (_, at), is_own in zip(matches, per_entry, strict=True) if is_own}
    # If params are a single array, `match_params` cannot tell a vector from a part of this array.
    is_single = jax.tree_util.treedef_is_leaf(structure)
    found: list[tuple[Any, jax.Array | None, str | None]] = []
    for ((leaf, place, owner), at), own, is_own in zip(matches, owns, per_entry, strict=True):
        is_vector = jnp.ndim(leaf) == 1 and at.is_field and (place is None or is_single)
        holds_none = jnp.size(leaf) <= 1 or not jnp.issubdtype(leaf.dtype, jnp.inexact)
        is_constant = holds_none or (is_vector and at.state in with_entries)
        is_free = is_own or is_masked(own) or is_constant
        found.append((leaf, own if is_own else None, None if is_free else owner))
    return found


def _find_unlike_params(inner_state: Any, mask: Any, params: Params) -> str | None:
    """Return the shape and the state of the first array that may depend on masked entries."""
    for leaf, _, owner in _match_masks(inner_state, mask, params):
        if owner is not None:
            return f"an array of shape {jnp.shape(leaf)} in a {owner}"
    return None
