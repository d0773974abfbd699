"""RigL: weights are dropped by magnitude and grown by gradient, at a constant number of them.

U. Evci et al., "Rigging the Lottery: Making All Tickets Winners", arXiv 1911.11134. With random
growth it is SET, D. Mocanu et al., arXiv 1707.04780.
"""

from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import optax

from optperm.contract import checks
from optperm.contract.dtypes import accumulation_dtype, cast_like
from optperm.contract.keys import as_key
from optperm.contract.mapped_axes import AxisName, cond
from optperm.contract.schedules import resolve_schedule
from optperm.contract.shardings import shard_like
from optperm.contract.states import mask_like
from optperm.contract.transformation import transformation
from optperm.sparsity.selection import keep_highest, order_codes
from optperm.sparsity.shares import Include, check_shares, group_leaves, included, nearest_count
from optperm.sparsity.sparse_state import SparseState, hide, land, live_like

Grow = Literal["gradient", "random"]


def rigl(
    optimizer: optax.GradientTransformation,
    sparsity: Any,
    *,
    end: int | jax.Array,
    key: jax.Array,
    every: int | jax.Array = 100,
    drop_fraction: optax.ScalarOrSchedule = 0.3,
    grow: Grow = "gradient",
    include: Include | None = None,
    skip_step: bool = False,
    axis_name: AxisName | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Train a network that is always sparse, and move its weights where the gradient wants them.

    The first mask is random. In step t with :math:`t \bmod \text{every} = 0` and :math:`0 < t < T`,
    of the n live weights of each leaf :math:`k = \lfloor \alpha_t n + \tfrac12 \rfloor` move:

    .. math::
      \text{kept} &= \text{the } n - k \text{ live entries with the highest } |\theta| \\
      \text{grown} &= \text{the } k \text{ other entries with the highest } |g| \\
      m &\leftarrow \text{kept} \cup \text{grown}, \qquad
      \alpha_t = \tfrac{1}{2} \alpha \, (1 + \cos(\pi t / T))

    Those that were just dropped may be grown again; they go on as they were. The others start at 0, with
    what the optimizer's `init` gives in its state. It sees gradients and params with 0 in the place
    of what does not live, and what is dropped is set to 0. So each leaf keeps its number of live
    weights for ever. With `grow="random"` the places are random (SET); with `drop_fraction=0` the
    mask stays.

    The gradient is that of all entries: since dead weights are zeros in the params, `jax.grad` gives it.
    Do not multiply by a mask in the model: the gradient is zero there, and the first places would grow.
    To average it over batches put `optax.MultiSteps` outside. Until the first update the params are
    dense, unless they are made sparse before: `params, opt_state = optperm.prune(params, opt_state,
    0.0)`.

    Args:
      optimizer: Any optimizer. Clipping inside it clips by the norm of the live entries; in front
        of this, in an `optax.chain`, by that of all.
      sparsity: The share of zeros, in [0, 1], spread by `optperm.erk_sparsity`; or a tree of shares like
        params, or a prefix of one.
      end: T, the step from which on the mask stays: about three quarters of the training.
      key: A key of `jax.random`, of the first mask and of random growth. All replicas need the same.
      every: How often the mask changes, in steps.
      drop_fraction: :math:`\alpha`, in [0, 1]; or a schedule, which is :math:`\alpha_t` as it is.
      grow: `"gradient"`, or `"random"`.
      include: Which leaves are sparse: a tree of booleans like params, or a prefix of one; or a function
        from the params to one. None for those of rank 2 and more.
      skip_step: Whether live weights and the state of the optimizer stay as they are in a step that
        changes the mask, as in the paper's code.
      axis_name: The mapped axis over which magnitudes and gradients are averaged when the mask changes,
        for replicas whose params or gradients differ. None where they agree.

    Returns:
      A transformation whose state is an `optperm.SparseState`. Its `update` needs `params`. It is
      the last of its chain; with `optperm.apply_updates` zeros hold wherever it stands.

    Example:
      >>> import jax, jax.numpy as jnp, optax, optperm
      >>> tx = optperm.rigl(optax.sgd(0.5), 0.5, end=10, key=jax.random.key(0), every=1)
      >>> w = jnp.ones((2, 4))
      >>> opt_state = tx.init(w)
      >>> target = jnp.arange(8.0).reshape(2, 4)
      >>> for _ in range(20):
      ...     updates, opt_state = tx.update(w - target, opt_state, w)
      ...     w = optperm.apply_updates(w, updates, opt_state)
      >>> w.round(1).tolist()  # the four largest
      [[0.0, 0.0, 0.0, 0.0], [4.0, 5.0, 6.0, 7.0]]

    Notes:
      Products and gradients are dense: training is not faster, and gradual pruning, at the same
      cost here, ends at a better accuracy. After Adam a fresh weight moves further than an old one,
      since its moments are fresh and their count is not: 3.2 times at once, 6.6 times at most, for
      decays of .9 and .999; take b2=.99 where that hurts. Under `jax.vmap` every step costs a
      selection. A step in which the mask stays costs within `jax.lax.scan` what one of the
      optimizer with `optperm.mask_elements` does; a program of a single step also allocates, in
      every call, what a selection needs, four times the bytes of the params.

    Raises:
      TypeError: If an argument is of the wrong type, or a parameter is not of a real floating dtype.
      ValueError: If an argument is out of range, if `axis_name` is not bound where `update` is
        called, or if trees do not match.

    References:
      Evci et al., `Rigging the Lottery: Making All Tickets Winners <https://arxiv.org/abs/1911.11134>`_,
      ICML 2020; Mocanu et al., `Scalable training of artificial neural networks with adaptive sparse
      connectivity <https://arxiv.org/abs/1707.04780>`_, 2018
    """
    checks.check_transformation("optimizer", optimizer)
    check_shares("sparsity", sparsity)
    checks.check_count("end", end)
    checks.check_key("key", key)
    checks.check_count("every", every)
    checks.check_in_range("drop_fraction", drop_fraction, 0.0, 1.0)
    checks.check_choice("grow", grow, get_args(Grow))
    checks.check_flag("skip_step", skip_step)
    checks.check_axis_name("axis_name", axis_name)
    _check_first_update(end, every, drop_fraction)
    inside = optax.with_extra_args_support(optimizer)

    def init(params: optax.Params) -> SparseState:
        raw = jax.random.bits(key, (2,), jnp.uint32)
        mask = live_like(included(include, params), params)
        leaves, treedef = jax.tree.flatten(mask)
        flags = jax.tree.map(lambda _: True, mask)
        groups = group_leaves("sparsity", sparsity, "erk", mask, flags, [m.size for m in leaves])
        counts = [m.size - zeros for m, zeros in zip(leaves, groups.zeros, strict=True)]
        # Nothing grows in step 0, whose bits are free for the first mask.
        codes = _random_codes(leaves, raw, jnp.zeros([], jnp.int32))
        kept = keep_highest(codes, groups.leaves, counts)
        return SparseState(
            count=jnp.zeros([], jnp.int32),
            mask=jax.tree.unflatten(treedef, [m & k for m, k in zip(leaves, kept, strict=True)]),
            inner=inside.init(params),
            key=raw if grow == "random" else None,
        )

    def update(
        grads: optax.Updates, state: SparseState, params: optax.Params, **extra_args: Any
    ) -> tuple[optax.Updates, SparseState]:
        t, before = state.count, state.mask
        last = jnp.asarray(end, jnp.int32)
        # w where m, else 0; and in the optimizer's state what its init gives where not m
        live = hide(before, params)
        inner = _restart(inside, before, state.inner, live)

        # kept and grown, for alpha_t = alpha / 2 (1 + cos(pi t / T))
        def move() -> Any:
            alpha = resolve_schedule("drop_fraction", drop_fraction, t, high=1.0)
            if not callable(drop_fraction):
                done = t.astype(jnp.float32) / last.astype(jnp.float32)
                alpha = alpha / 2 * (1 + jnp.cos(jnp.pi * done))
            w, g = _magnitudes(before, params, grads, axis_name)
            drawn = None if state.key is None else _random_codes(before, state.key, t)
            return _move(before, w, [_grow_codes(x) for x in g] if drawn is None else drawn, alpha)

        due = (t % jnp.asarray(every, jnp.int32) == 0) & (t > 0) & (t < last)
        mask = cond(due, move, lambda: before)

        # w + u where m, else 0
        def step() -> tuple[optax.Updates, Any]:
            u, new_inner = inside.update(hide(mask, grads), inner, live, **extra_args)
            return cast_like(u, params), cast_like(new_inner, inner)

        def stay() -> tuple[optax.Updates, Any]:
            return jax.tree.map(jnp.zeros_like, params), inner

        u, inner = cond(due, stay, step) if skip_step else step()
        updates = land(mask, u, params, before)
        return updates, state._replace(count=optax.safe_increment(t), mask=mask, inner=inner)

    return transformation(
        init,
        update,
        method="rigl",
        like=lambda state: state.mask,
        dtypes=False,
        axis_name=axis_name,
    )


def _check_first_update(end: Any, every: Any, drop_fraction: Any) -> None:
    is_known = all(map(checks.is_concrete_number, (end, every, drop_fraction)))
    if is_known and drop_fraction > 0 and end <= every:
        raise ValueError(
            f"end must be after the first change of the mask, in step every={every}, got {end}. For a "
            "mask that stays pass drop_fraction=0."
        )


def _magnitudes(
    mask: Any, params: Any, grads: Any, axis_name: AxisName | None
) -> tuple[list[jax.Array], list[jax.Array]]:
    """Return |w| and |g| of the included leaves, averaged over the named axes."""
    w, g = (jax.tree.leaves(mask_like(tree, mask)) for tree in (params, grads))
    wide = accumulation_dtype(w)
    w, g = ([jnp.abs(jnp.asarray(leaf, wide)) for leaf in leaves] for leaves in (w, g))
    return (w, g) if axis_name is None else jax.lax.pmean((w, g), axis_name)


def _grow_codes(g: jax.Array) -> jax.Array:
    """Return codes in the order of |g|, what is not finite below all others."""
    codes = order_codes(g)
    return jnp.where(jnp.isfinite(g), codes, jnp.ones_like(codes))


def _random_codes(leaves: Any, raw: jax.Array, t: jax.Array) -> list[jax.Array]:
    """Return random bits, which depend on the key, the step and the place of a leaf."""
    key = jax.random.fold_in(as_key(raw), t)
    return [
        shard_like(
            jnp.maximum(jax.random.bits(jax.random.fold_in(key, index), leaf.shape), 1), leaf
        )
        for index, leaf in enumerate(jax.tree.leaves(leaves))
    ]


def _move(
    mask: Any, magnitudes: list[jax.Array], grow_codes: list[jax.Array], alpha: jax.Array
) -> Any:
    """Return the mask of what is kept and of what grows, as many in each leaf as lived before."""
    leaves, treedef = jax.tree.flatten(mask)
    alone = [[index] for index in range(len(leaves))]
    live = [jnp.sum(m, dtype=jnp.int32) for m in leaves]
    moving = [nearest_count(alpha, n) for n in live]
    # The n - k highest |w| among live ones, and the k highest of all others. No code is 0.
    codes = [order_codes(w) for w in magnitudes]
    codes = [jnp.where(m, c, jnp.zeros_like(c)) for m, c in zip(leaves, codes, strict=True)]
    kept = keep_highest(codes, alone, [n - k for n, k in zip(live, moving, strict=True)])
    codes = [jnp.where(m, jnp.zeros_like(c), c) for m, c in zip(kept, grow_codes, strict=True)]
    grown = keep_highest(codes, alone, moving)
    return jax.tree.unflatten(treedef, [a | b for a, b in zip(kept, grown, strict=True)])


def _restart(
    optimizer: optax.GradientTransformation, mask: Any, inner: Any, params: optax.Params
) -> Any:
    """Return the optimizer's state with what `init` gives where the mask is False.

    An array belongs to the parameter at whose path its own ends, if their shapes are equal. What does
    not live is the same in every step, so that an entry that comes to live later is fresh then.
    """
    masks = dict(jax.tree_util.tree_leaves_with_path(mask))
    fresh = jax.tree.leaves(optimizer.init(params))

    def restart(path: Any, leaf: jax.Array, first: jax.Array) -> jax.Array:
        own = [end for end in masks if path[len(path) - len(end) :] == end]
        if not own or jnp.shape(leaf) != masks[max(own, key=len)].shape:
            return leaf
        return jnp.where(masks[max(own, key=len)], leaf, jnp.asarray(first, leaf.dtype))

    leaves, treedef = jax.tree_util.tree_flatten_with_path(inner)
    new = [restart(path, leaf, first) for (path, leaf), first in zip(leaves, fresh, strict=True)]
    return jax.tree.unflatten(treedef, new)
