"""Prune and freeze single entries of the params with masks, under any optimizer."""

from __future__ import annotations

import functools
import warnings
import zlib
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Protocol, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optperm._leaf_axes import warn_of_others
from optperm.core import checks
from optperm.core.dtypes import place_like
from optperm.core.fingerprints import UNSET, check_not_stacked
from optperm.core.shapes import Array, Bool, Params, PyTree, UInt32, Updates
from optperm.core.shardings import can_be_seen, shard_like
from optperm.core.states import find_state, replace_state
from optperm.core.transformation import transformation
from optperm.core.trees import (
    fill_masked,
    is_flag,
    is_function,
    leaf_paths,
    mask_like,
    resolve_tree,
    without_variables,
)
from optperm.exact import Exact
from optperm.sparsity._choice import (
    Include,
    UnitScope,
    draw_codes,
    encode_scores,
    include_leaves,
    is_zero,
    keep,
    select_masked,
    widen_scores,
)
from optperm.sparsity._sparse_state import (
    SparseState,
    describe_removed,
    find_removed_layers,
    zero_dead,
)
from optperm.sparsity._structures import ENTRIES, Structure, as_structure

PruneCriterion = Literal["magnitude", "random"]
FreezeCriterion = Literal["gradient", "preconditioned_gradient", "random"]


class PreconditioningState(Protocol):
    """A state that multiplies gradients by its preconditioner H, for `freeze`."""

    def preconditioned(self, grads: Updates) -> Updates:
        """Return H g.

        Args:
          grads: g, a tree like params with all leaves, or with `optax.MaskedNode` for leaves that this
            state does not see.

        Returns:
          A tree like the params that this state sees.
        """
        ...


class MaskElementsState(NamedTuple):
    """State of `mask_elements`.

    Attributes:
      mask: Whether each entry may move.
      zeros: Whether each entry is kept at 0: `optperm.sparsity.prune` has set the entry to 0, or `init`
        got a mask of entries that masks a 0. `prune` sets these entries to 0 again.
      fingerprint: A number for each of the arguments `shaped_by()`.
    """

    mask: PyTree[Bool[Array, "?*shape"], "Params"]
    zeros: PyTree[Bool[Array, "?*shape"], "Params"]
    fingerprint: UInt32[Array, "arguments"] = UNSET

    def shaped_by(self) -> tuple[str, ...]:
        """Return the names of the arguments that determine what the state means."""
        return ("mask",)

    def exact(self) -> list[Exact]:
        """Return the masked entries, which keep their values."""
        return [Exact(None, jax.tree.map(jnp.logical_not, self.mask))]


def mask_elements(
    mask: Any | Callable[[Params], Any] = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Keep the masked entries of the params at their values.

    .. math::
      u_i \leftarrow \begin{cases} u_i & \text{if } m_i \\ -0 & \text{else} \end{cases}

    Each entry has its own boolean :math:`m_i`, while `optax.masked` has one boolean per leaf.
    `optperm.sparsity.prune`, `optperm.sparsity.freeze` and `optperm.sparsity.reset_masks` change the
    booleans between steps, even inside `jax.jit`, without a new compilation. The incoming update of a
    masked entry is replaced.

    Args:
      mask: The entries that may move initially: a tree like params with a boolean, or a boolean array of
        the leaf's shape, for each leaf; a prefix of such a tree; or a function from params to such a
        tree. The function gets params without boxes of Flax. None for all entries.

    Returns:
      A transformation whose state is a `MaskElementsState`. Its `update` does not need `params`.

    Example:
      >>> import jax.numpy as jnp, optax, optperm
      >>> tx = optax.chain(optax.sgd(0.5, momentum=0.9), optperm.mask_elements())
      >>> w = jnp.array([[3.0, -1.0], [2.0, 4.0]])
      >>> w, opt_state = optperm.sparsity.prune(w, tx.init(w), sparsity=0.5)
      >>> updates, opt_state = tx.update(jnp.ones((2, 2)), opt_state, w)
      >>> optperm.apply_updates(w, updates, opt_state).tolist()
      [[2.5, 0.0], [0.0, 3.5]]

    Notes:
      With `optax.apply_updates`, this transformation must come last in its chain; for example, weight
      decay after it would move masked entries. With `optperm.apply_updates`, it can have any position in
      the chain, and masked entries keep their bits. This also holds with methods that set exact
      weights (`optperm.sgperm`, `optperm.agn`), `optax.MultiSteps` and `optax.apply_if_finite`, whose
      own zeros turn -0.0 into 0.0, and processors that flush subnormal numbers. A method that sets
      exact weights does not know the masks, so results from its own state, such as
      `optperm.distributed.center_params`, are not masked.

    Raises:
      TypeError: If a parameter does not have a real floating dtype, or the mask does not have booleans.
      ValueError: If the mask does not fit params, if a function returns the same boolean for all leaves,
        if the state was made with another mask, or if the trees passed to `update` do not match.
    """

    # The entries of a given array are read once.
    @functools.cache
    def describe() -> Any:
        return jax.tree.map(_describe_flags, without_variables(mask))

    def init(params: Params) -> MaskElementsState:
        given = resolve_tree(mask, params)
        if is_function(mask):
            _check_selects(given, params)
        masks = _spread_mask(True if given is None else given, params)
        return MaskElementsState(masks, _find_zeros(given, masks, params))

    def update(
        updates: Updates, state: MaskElementsState, params: Params | None, **_: Any
    ) -> tuple[Updates, MaskElementsState]:
        del params

        # u_i where m_i, otherwise -0: adding -0 changes neither 0.0 nor -0.0
        def hold(is_trainable: jax.Array, u: Any) -> jax.Array:
            return jnp.where(is_trainable, u, jnp.array(-0.0, jnp.result_type(u)))

        return jax.tree.map(hold, state.mask, updates), state

    def shape_arguments(params: Params) -> dict[str, Any]:
        # A function may compute entries from the values of params, which change, so only flags count.
        given = _keep_flags(resolve_tree(mask, params)) if is_function(mask) else describe()
        given = True if given is None else given
        return {"mask": jax.tree.leaves(jax.tree.broadcast(given, params))}

    return transformation(
        init,
        update,
        method="mask_elements",
        like=lambda state: state.mask,
        needs_params=False,
        updates_like="updates",
        shape_arguments=shape_arguments,
    )


def _keep_flags(mask: Any) -> Any:
    """Return the flags of whole leaves in a mask, and the same text for all arrays of entries."""
    return jax.tree.map(lambda each: each if is_flag(each) else "entries", mask)


def _describe_flags(allowed: Any) -> Any:
    """Return a flag, or a text for an array of different booleans, unless the array is traced."""
    if isinstance(allowed, jax.core.Tracer):
        return allowed
    array = np.asarray(allowed)
    if array.all() or not array.any():
        return bool(array.all())
    return f"{array.shape} {zlib.crc32(np.packbits(array != 0).tobytes())}"


def _check_selects(mask: Any, params: Params) -> None:
    """Raise if a mask has the same flag for all leaves."""
    flags = jax.tree.leaves(mask)
    if not flags or not all(map(is_flag, flags)) or len(set(map(bool, flags))) > 1:
        return
    holds = "True for all leaves, so it masks nothing" if flags[0] else "False for all leaves"
    paths = [path for path, _ in leaf_paths(params)]
    raise ValueError(f"The function mask= returns {holds}. The paths of the leaves are {paths}.")


def _find_zeros(given: Any, masks: Any, params: Params) -> Any:
    """Return the entries that a mask of entries, not of whole leaves, masks at 0."""

    def find(allowed: Any, mask: jax.Array, w: jax.Array) -> jax.Array:
        return ~mask & shard_like(w == 0, mask) if np.ndim(allowed) else jnp.zeros_like(mask)

    given = jax.tree.broadcast(True if given is None else given, params)
    return jax.tree.map(find, given, masks, params)


def _spread_mask(mask: Any, params: Params) -> Any:
    """Return a mask, or a prefix of a mask, as an array of booleans for each leaf."""

    def spread(allowed: Any, leaf: jax.Array) -> jax.Array:
        if checks.dtype_of("mask", allowed) != jnp.bool_:
            raise TypeError(f"mask must be boolean, got dtype {jnp.result_type(allowed)}.")
        shape, wanted = jnp.shape(allowed), jnp.shape(leaf)
        if shape not in ((), wanted):
            raise ValueError(
                f"mask must be one boolean, or booleans of the parameter's shape {wanted}, got the "
                f"shape {shape}."
            )
        allowed = jnp.broadcast_to(jnp.asarray(allowed), jnp.shape(leaf))
        return place_like(allowed, leaf)

    try:
        mask = jax.tree.broadcast(mask, params)
    except ValueError as error:
        says = "mask must be a tree like params, or a prefix of such a tree"
        raise ValueError(f"{says}: {error}") from error
    return jax.tree.map(spread, mask, params)


def prune(
    params: Params,
    opt_state: Any,
    sparsity: Any,
    *,
    criterion: PruneCriterion = "magnitude",
    scope: UnitScope = "erk",
    scores: Any = None,
    key: int | jax.Array | None = None,
    include: Include | None = None,
    structure: Structure | None = None,
    axes: Any = None,
) -> tuple[Params, Any]:
    r"""Set a fraction of the weights to zero, and mask them to keep them zero.

    For the sparsity p, the :math:`n - \lfloor p n + \tfrac12 \rfloor` entries with the highest scores
    out of n stay. The scores are :math:`|w|`, or `scores` with their signs. Ties keep the earlier entry,
    and NaN ranks above all numbers, so the count is exact for any scores. `scope` determines the n
    entries. `"erk"` and `"leaf"` rank the entries of each layer; `"erk"` uses a p for each leaf from
    `optperm.sparsity.erk_sparsity`, and `"leaf"` the same p for all leaves. `"global"` ranks the entries
    of all leaves together. `"unit"` ranks the inputs of each output of each layer. With a structure, n
    counts units instead of entries.

    Only kernels are pruned by default, as `optperm.leaf_axes` finds them: embeddings, scales, biases and
    leaves whose axes are not known stay dense. Each layer of a stacked leaf, expert or other copy is a
    layer of its own, so a scanned model is pruned like the unrolled model.

    The ranking includes masked entries, which stay masked: masks accumulate. Pruned entries have the
    lowest magnitude, so pruning 0.5 and then 0.6 leaves a fraction of 0.4. A frozen weight is set to
    zero if it ranks low. Otherwise, it keeps its value.

    All entries that were pruned before are set to zero again and rank as zeros, also in other params. So
    `prune(params, opt_state, 0.0)` puts the zeros of `opt_state` into params that were dense: initial
    params to which a lottery ticket is rewound, a merged adapter, or an average. Before the first step
    of `optperm.rigl`, the same call makes the first gradient that of the sparse network.

    Args:
      params: All params. If the mask is inside `optax.masked` or `optax.partition`, the other params do
        not change.
      opt_state: The state of an optimizer with `optperm.mask_elements`, `optperm.prune_gradually` or
        `optperm.rigl` anywhere in it: in a chain, inside `optax.masked`, `optax.partition` or
        `optax.inject_hyperparams`, or stored as variables by `flax.nnx.Optimizer`. This function does
        not change `opt_state`.
      sparsity: p, in [0, 1], or a tree of fractions like params, or a prefix of such a tree. Leaves that
        are not included need the fraction 0. None with `optperm.sparsity.NOfM`.
      criterion: `"magnitude"` or `"random"`. The random order depends only on the key, so with the same
        key, the zeros of a higher sparsity include the zeros of a lower sparsity.
      scope: `"erk"`, `"leaf"`, `"global"` or `"unit"`.
      scores: A tree like params, or None for the magnitude of the params. `criterion="random"` ignores
        scores.
      key: The random key for `"random"`: an int or a `jax.random.key`. All replicas need the same key.
        `"magnitude"` ignores the key.
      include: The leaves to prune: a tree of booleans like params, a prefix of such a tree, or a
        function from params to such a tree. None for all kernels. The function gets params without boxes
        of Flax, so its paths are as in "layer/kernel".
      structure: `optperm.sparsity.NOfM`, `optperm.sparsity.Blocks` or `optperm.sparsity.Units`.
        None for single entries.
      axes: What each leaf is: a tree like params of `optperm.LeafAxes`,
        `optax.contrib.GaLoreDimensionNumbers` for kernels, and None for leaves that stay dense, or a
        function from params to such a tree. None for `optperm.leaf_axes`.

    Returns:
      The params with 0.0 (never -0.0) for pruned entries, and the optimizer state with the masks. Both
      keep their structure, shapes and dtypes.

    Example:
      >>> import jax, jax.numpy as jnp, optax, optperm
      >>> tx = optax.chain(optax.adam(0.1), optperm.mask_elements())
      >>> params = {"kernel": jnp.array([[0.3, -0.1], [0.2, -0.4]]), "bias": jnp.array([0.0, 1.0])}
      >>> pruned, opt_state = optperm.sparsity.prune(params, tx.init(params), 0.5)
      >>> [[round(x, 1) for x in row] for row in pruned["kernel"].tolist()]
      [[0.3, 0.0], [0.0, -0.4]]
      >>> pruned["bias"].tolist()
      [0.0, 1.0]

    Notes:
      `prune` works inside `jax.jit`, `jax.vmap` and `jax.lax.scan`, with a traced sparsity and key. The
      exception is a state of `optperm.switch_after`, whose phase is unknown there. A Python or NumPy
      sparsity has the value of its printed decimal. A JAX array, traced or not, is rounded to a
      multiple of :math:`2^{-24}`. A traced sparsity is clipped to [0, 1], and NaN counts as 0.

      16-bit scores often tie; then the position decides. On a mesh, only `NOfM` and `Blocks` gather
      data. With `"global"`, a leaf with small weights may lose all of them. Outside `jax.jit`, a
      `UserWarning` names this leaf.

    Raises:
      TypeError: If a fraction is not a number, or scores do not have a real floating dtype.
      ValueError: If `sparsity` is out of range, or is not 0 for a leaf that is not included; if
        `criterion` or `scope` is unknown; if `key` is missing; if a tree does not match the masks; if
        `axes` does not fit the params; if a structure or scope "unit" does not fit a leaf; if no leaf is
        included although `sparsity` is not 0; if there is not exactly one state with masks; or if
        `opt_state` is a stack of states outside `jax.vmap` and `sparsity` is not 0.

    References:
      Han et al., `Learning both Weights and Connections for Efficient Neural Networks
      <https://arxiv.org/abs/1506.02626>`_, NeurIPS 2015
    """
    checks.check_choice("criterion", criterion, get_args(PruneCriterion))
    if key is not None:
        checks.check_key("key", key)
    state = _find_masked_state(opt_state)
    plain = without_variables(params)
    weights = select_masked("params", plain, state.mask)
    # The zeros of the state have the lowest magnitude, also in params that were dense. A dead entry of a
    # `SparseState` is zero, but `mask_elements` may fix an entry at any value.
    if isinstance(state, MaskElementsState):
        weights = zero_dead(jax.tree.map(jnp.logical_not, state.zeros), weights)
    else:
        weights = zero_dead(state.mask, weights)
    units = as_structure(structure)
    if not is_zero(sparsity):
        check_not_stacked("prune", state)
    taken, known = include_leaves(include, axes, state.mask, params, fractions=sparsity)
    if include is None and not is_zero(sparsity):
        warn_of_others("prune", params, axes)
    if criterion == "random":
        codes = draw_codes(state.mask, taken, known, units, key)
    else:
        if scores is None:
            ranked = jax.tree.map(jnp.abs, widen_scores("params", weights, state.mask))
        else:
            ranked = widen_scores("scores", scores, state.mask)
        codes = encode_scores(mask_like(ranked, taken), known, units)
    kept = keep("sparsity", codes, sparsity, scope, taken, known, units)
    kept = _keep_all_else(kept, state.mask)
    if scope == "global":
        _warn_of_removed(mask_like(kept, taken), known)
    # m <- m and kept: masks accumulate
    mask = jax.tree.map(_intersect, state.mask, kept)
    new = state._replace(mask=mask)
    stays = mask
    if isinstance(state, MaskElementsState):
        zeros = jax.tree.map(lambda z, k: z | ~shard_like(k, z), state.zeros, kept)
        new, stays = new._replace(zeros=zeros), jax.tree.map(jnp.logical_not, zeros)
    pruned = jax.tree.map(
        lambda is_kept, w: jnp.where(shard_like(is_kept, w), w, jnp.zeros_like(w)), stays, weights
    )
    leaves = jax.tree.leaves(fill_masked(pruned, plain))
    new_state = replace_state(opt_state, type(state), new, method="mask_elements")
    return jax.tree.unflatten(jax.tree.structure(params), leaves), new_state


def freeze(
    opt_state: Any,
    fraction: Any,
    *,
    scores: Any = None,
    criterion: FreezeCriterion = "gradient",
    scope: UnitScope = "erk",
    key: int | jax.Array | None = None,
    include: Include | None = None,
    axes: Any = None,
) -> Any:
    r"""Mask a fraction of the weights to keep them at their values.

    This function masks the weights with the smallest :math:`|g_i|` or :math:`|(H g)_i|`, or random
    weights. g is the gradient over all examples, and H is the preconditioner that `optperm.constant_sgd`
    or `optperm.mandt_sgd` has learned. Counts and ties are as in `optperm.sparsity.prune`, and masks
    accumulate.

    Args:
      opt_state: The state of an optimizer with `optperm.mask_elements` anywhere in it: in a chain,
        inside `optax.masked`, `optax.partition` or `optax.inject_hyperparams`, or stored as variables by
        `flax.nnx.Optimizer`. This function does not change `opt_state`.
      fraction: p, in [0, 1], or a tree of fractions, as in `optperm.sparsity.prune`.
      scores: g, a tree like params, for example from `optperm.variance.full_gradient`.
        `criterion="random"` ignores scores.
      criterion: `"gradient"`, `"preconditioned_gradient"` (for an optimizer that contains
        `optperm.constant_sgd` or `optperm.mandt_sgd`), or `"random"`. `"random"` needs no scores; with
        the same key, a larger fraction includes the weights of a smaller fraction.
      scope: As in `optperm.sparsity.prune`.
      key: The random key for `"random"`: an int or a `jax.random.key`. All replicas need the same key.
        Other criteria ignore the key.
      include: The leaves to freeze, as in `optperm.sparsity.prune`. A function receives the masks, which
        have the structure and shapes of the params.
      axes: What each leaf is, as in `optperm.sparsity.prune`. None for `optperm.leaf_axes` of the masks.

    Returns:
      The optimizer state with the new masks, with the same structure, shapes and dtypes.

    Example:
      >>> import jax.numpy as jnp, optax, optperm
      >>> tx = optax.chain(optax.sgd(1.0), optperm.mask_elements())
      >>> w = jnp.array([[1.0, 2.0], [3.0, 4.0]])
      >>> full_grad = jnp.array([[0.1, -3.0], [-0.2, 1.0]])
      >>> opt_state = optperm.sparsity.freeze(tx.init(w), 0.5, scores=full_grad)
      >>> updates, opt_state = tx.update(jnp.ones((2, 2)), opt_state, w)
      >>> optperm.apply_updates(w, updates, opt_state).tolist()
      [[1.0, 1.0], [3.0, 3.0]]

    Raises:
      TypeError: If a fraction is not a number, or scores do not have a real floating dtype.
      ValueError: If `fraction` is out of range, or is not 0 for a leaf that is not included; if no leaf
        is included although `fraction` is not 0; if `criterion` or `scope` is unknown; if `scores` or
        `key` is missing; if a tree does not match the masks, or `axes` does not fit them; if there is
        not exactly one state of `mask_elements`, or of a preconditioner if the criterion needs one; or
        if `opt_state` is a stack of states outside `jax.vmap`.

    References:
      Mandt, Hoffman and Blei, `Stochastic Gradient Descent as Approximate Bayesian Inference
      <https://arxiv.org/abs/1704.04289>`_, 2017, for H
    """
    checks.check_choice("criterion", criterion, get_args(FreezeCriterion))
    if key is not None:
        checks.check_key("key", key)
    state = find_state(opt_state, MaskElementsState, method="mask_elements")
    if not is_zero(fraction):
        check_not_stacked("freeze", state)
    taken, known = include_leaves(include, axes, state.mask, name="fraction", fractions=fraction)
    if include is None and not is_zero(fraction):
        warn_of_others("freeze", state.mask, axes)
    if criterion == "random":
        codes = draw_codes(state.mask, taken, known, ENTRIES, key)
    else:
        if scores is None:
            raise ValueError(
                f"criterion {criterion!r} needs scores, for example from optperm.variance.full_gradient."
            )
        # |g|, or |H g|
        name, grads = "scores", scores
        if criterion == "preconditioned_gradient":
            preconditioner = find_state(
                opt_state,
                PreconditioningState,
                method="constant_sgd or optperm.mandt_sgd",
            )
            grads = preconditioner.preconditioned(without_variables(scores))
            name = "the preconditioned scores"
        ranked = jax.tree.map(jnp.abs, widen_scores(name, grads, state.mask))
        codes = encode_scores(mask_like(ranked, taken), known, ENTRIES)
    kept = keep("fraction", codes, fraction, scope, taken, known, ENTRIES)
    kept = _keep_all_else(kept, state.mask)
    new = state._replace(mask=jax.tree.map(_intersect, state.mask, kept))
    return replace_state(opt_state, MaskElementsState, new, method="mask_elements")


def reset_masks(opt_state: Any) -> Any:
    """Return the optimizer state with all entries free to move again.

    Args:
      opt_state: The state of an optimizer with `optperm.mask_elements`, `optperm.prune_gradually` or
        `optperm.rigl` anywhere in it. This function does not change `opt_state`.

    Returns:
      The optimizer state, with the same structure, shapes and dtypes.

    Example:
      >>> import jax.numpy as jnp, optperm
      >>> opt_state = optperm.mask_elements().init(jnp.array([[1.0, 2.0]]))
      >>> opt_state = optperm.sparsity.freeze(opt_state, 0.5, scores=jnp.array([[3.0, 0.0]]))
      >>> opt_state.mask.tolist()
      [[True, False]]
      >>> optperm.sparsity.reset_masks(opt_state).mask.tolist()
      [[True, True]]

    Raises:
      ValueError: If there is not exactly one state with masks.
    """
    state = _find_masked_state(opt_state)
    new = state._replace(mask=jax.tree.map(jnp.ones_like, state.mask))
    if state.zeros is not None:
        # No entry is kept at 0; `prune_gradually` starts to count and to aim again.
        counts = jax.tree.map(jnp.zeros_like, state.zeros)
        is_sparse = isinstance(state, SparseState)
        new = new._replace(zeros=counts._replace(asked=state.zeros.asked) if is_sparse else counts)
    return replace_state(opt_state, type(state), new, method="mask_elements")


def _find_masked_state(opt_state: Any) -> MaskElementsState | SparseState:
    types: tuple[type[Any], ...] = (MaskElementsState, SparseState)
    methods = "mask_elements, optperm.prune_gradually or optperm.rigl"
    state: MaskElementsState | SparseState = find_state(opt_state, types, method=methods)
    return state


def _warn_of_removed(kept: Any, known: Any) -> None:
    """Warn, outside `jax.jit`, about layers of which nothing is kept, unless nothing is to be kept."""
    leaves = jax.tree.leaves(kept)
    if not all(map(can_be_seen, leaves)):
        return
    removed = find_removed_layers(kept, known)
    if removed and any(map(jnp.any, leaves)):
        warnings.warn(describe_removed(removed), UserWarning, stacklevel=3)


def _keep_all_else(kept: Any, mask: Any) -> Any:
    """Return booleans for all leaves of a mask, with True for leaves that are not included."""
    return fill_masked(kept, jax.tree.map(jnp.ones_like, mask))


def _intersect(is_trainable: jax.Array, is_kept: jax.Array) -> jax.Array:
    return is_trainable & shard_like(is_kept, is_trainable)
