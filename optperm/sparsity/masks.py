"""A mask for each element of the params: pruning, freezing, and what keeps both under any optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, get_args, runtime_checkable

import jax
import jax.numpy as jnp
import optax

from optperm.contract import checks
from optperm.contract.mapped_axes import mark_varying, varying_axes
from optperm.contract.shardings import shard_like
from optperm.contract.states import fill_masked, find_state, replace_state, without_variables
from optperm.contract.transformation import transformation
from optperm.sparsity.choice import UnitScope, codes_of_scores, keep, random_codes, wide_scores
from optperm.sparsity.shares import Include, included, without_masked
from optperm.sparsity.sparse_state import SparseState
from optperm.sparsity.structures import Structure, check_structure

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, PyTree

PruneCriterion = Literal["magnitude", "random"]
FreezeCriterion = Literal["gradient", "preconditioned_gradient", "random"]


@runtime_checkable
class PreconditioningState(Protocol):
    """What `freeze` asks of a preconditioner: a state that multiplies gradients by its matrix H."""

    def preconditioned(self, grads: optax.Updates) -> optax.Updates:
        """H g.

        Args:
          grads: g, a tree like the params, whole or without the leaves that this state does not see
            (`optax.MaskedNode` in their place): it leaves those out itself.

        Returns:
          A tree like the params that this state sees.
        """
        ...


class MaskElementsState(NamedTuple):
    """State of `mask_elements`.

    Attributes:
      mask: Which entries may move.
    """

    mask: PyTree[Bool[Array, "?*shape"], "Params"]

    def trainable_masks(self) -> list[Any]:
        """The mask, for `optperm.apply_updates`."""
        return [self.mask]


def mask_elements(
    mask: Any | Callable[[optax.Params], Any] = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Hold the entries of the params that its mask says at the value they have.

    .. math::
      u_i \leftarrow \begin{cases} u_i & \text{if } m_i \\ -0 & \text{else} \end{cases}

    Each entry has a boolean :math:`m_i` of its own, where `optax.masked` has one a leaf. All are True at
    first; `optperm.prune`, `optperm.freeze` and `optperm.reset_masks` change them between steps, inside
    `jax.jit` too, and nothing has to be compiled again. An update that is masked may be anything, NaN
    included. Negative zero is the number that leaves -0.0 as it is.

    It is the last of its chain: with `optax.apply_updates` weight decay, for instance, would move what
    it holds if it came later. With `optperm.apply_updates` masked entries keep their bits wherever it
    stands, even under a method that places weights (`optperm.sgperm`, `optperm.agn`), under
    `optax.MultiSteps` and `optax.apply_if_finite`, whose own zeros turn -0.0 into 0.0, and where the
    processor flushes subnormal numbers. A placing method does not know the masks: what it reports from
    its own state, such as `optperm.center_params`, is not masked.

    Args:
      mask: Which entries may move at first: booleans in a tree like params, each for one leaf as a whole
        or of its shape, or in a prefix of that tree; or a function from params to such a tree. None for
        all of them.

    Returns:
      A transformation whose state is a `MaskElementsState`. Its `update` does not need `params`.

    Example:
      >>> import jax.numpy as jnp, optax, optperm
      >>> tx = optax.chain(optax.sgd(0.5, momentum=0.9), optperm.mask_elements())
      >>> w = jnp.array([[3.0, -1.0], [2.0, 4.0]])
      >>> w, opt_state = optperm.prune(w, tx.init(w), fraction=0.5)
      >>> updates, opt_state = tx.update(jnp.ones((2, 2)), opt_state, w)
      >>> optperm.apply_updates(w, updates, opt_state).tolist()
      [[2.5, 0.0], [0.0, 3.5]]

    Raises:
      TypeError: If a parameter is not of a real floating dtype, or the mask is not of booleans.
      ValueError: If the mask does not fit params, or the trees passed to `update` do not match.
    """

    def init(params: optax.Params) -> MaskElementsState:
        given = mask(params) if callable(mask) else mask
        return MaskElementsState(_spread(True if given is None else given, params))

    def update(
        updates: optax.Updates, state: MaskElementsState, params: optax.Params | None, **_: Any
    ) -> tuple[optax.Updates, MaskElementsState]:
        del params

        # u_i where m_i, else -0
        def hold(is_trainable: jax.Array, u: Any) -> jax.Array:
            return jnp.where(is_trainable, u, jnp.array(-0.0, jnp.result_type(u)))

        return jax.tree.map(hold, state.mask, updates), state

    return transformation(
        init,
        update,
        method="mask_elements",
        like=lambda state: state.mask,
        dtypes=False,
        needs_params=False,
        updates_like="updates",
    )


def _spread(mask: Any, params: optax.Params) -> Any:
    """A mask, or a prefix of one, as an array of booleans for each leaf."""

    def of_leaf(allowed: Any, leaf: jax.Array) -> jax.Array:
        if checks.dtype_of("mask", allowed) != jnp.bool_:
            raise TypeError(f"mask must be of booleans, got {jnp.result_type(allowed)}.")
        if jnp.shape(allowed) not in ((), jnp.shape(leaf)):
            raise ValueError(
                f"mask has a leaf of shape {jnp.shape(allowed)} for a parameter of shape "
                f"{jnp.shape(leaf)}: give one boolean for all of it, or one for each entry."
            )
        allowed = jnp.broadcast_to(jnp.asarray(allowed), jnp.shape(leaf))
        return mark_varying(shard_like(allowed, leaf), varying_axes(leaf))

    try:
        mask = jax.tree.broadcast(mask, params)
    except ValueError as error:
        raise ValueError(f"mask must be a tree like params, or a prefix of one: {error}") from error
    return jax.tree.map(of_leaf, mask, params)


def prune(
    params: optax.Params,
    opt_state: Any,
    fraction: Any,
    *,
    criterion: PruneCriterion = "magnitude",
    scope: UnitScope = "erk",
    scores: Any = None,
    key: jax.Array | None = None,
    include: Include | None = None,
    structure: Structure | None = None,
) -> tuple[optax.Params, Any]:
    r"""Set a fraction of the weights to zero, and mask them, so that they stay there.

    Of n entries the :math:`n - \lfloor p n + \tfrac12 \rfloor` with the highest scores stay, for the
    fraction p: :math:`|w|`, or the `scores` as they are, signs included. Of equal scores the first
    stays, and one that is NaN stays before all others. So the count is exact, whatever the scores
    are. The n entries are those of a leaf, which has its own p by `optperm.erk_sparsity` (`"erk"`),
    or the same as the others (`"leaf"`); those of all leaves together (`"global"`); or those that
    enter one output unit (`"unit"`: a slice along the last axis). With a structure all counts are
    of its units.

    All entries stand for election, those that are masked already too, and none becomes free: masks
    accumulate. By magnitude what was pruned before is chosen first, so pruning .5 and then .6 leaves .4.
    A weight that is frozen at another value than zero is set to zero if it is chosen. With
    `optperm.prune_gradually` or `optperm.rigl` all that their masks leave out is set to zero:
    `prune(params, opt_state, 0.0)` before the first step lets its gradient be that of the sparse
    network.

    It works inside `jax.jit`, `jax.vmap` and `jax.lax.scan`, with a traced fraction and key. A
    fraction of Python or NumPy is the decimal number that it is printed as; one that is an array of
    JAX, traced or not, is rounded to a multiple of :math:`2^{-24}`. A traced one that is out of
    range counts as the nearest that is not, NaN as 0.

    Args:
      params: The params, all of them where the mask is inside `optax.masked` or `optax.partition`: those
        that it does not see stay as they are.
      opt_state: The state of an optimizer with `optperm.mask_elements`, `optperm.prune_gradually` or
        `optperm.rigl` anywhere in it: chained, masked, partitioned, injected into, or kept as variables
        by `flax.nnx.Optimizer`. It is left alone.
      fraction: p, in [0, 1]; or a tree of fractions like params, or a prefix of one, each of its
        own leaf. None with `optperm.NOfM`.
      criterion: `"magnitude"`; or `"random"`, a random order that depends on the key alone, so that with
        the same key a larger fraction takes in all that a smaller one does.
      scope: `"erk"`, `"leaf"`, `"global"` or `"unit"`.
      scores: A tree like params whose lowest entries go; None for the magnitude of the params. Used by
        `"magnitude"` alone.
      key: A key of `jax.random`, used by `"random"` alone. All replicas need the same.
      include: Which leaves take part: a tree of booleans like params, or a prefix of one; or a function
        from the params to one. None for those of rank 2 and more.
      structure: `optperm.NOfM`, `optperm.Blocks` or `optperm.Units`. None for single entries.

    Returns:
      The params with zero (0.0, never -0.0) in the place of the chosen, and the optimizer state with
      their masks; both of the same structure, shapes and dtypes.

    Example:
      >>> import jax, jax.numpy as jnp, optax, optperm
      >>> tx = optax.chain(optax.adam(0.1), optperm.mask_elements())
      >>> params = {"kernel": jnp.array([[0.3, -0.1], [0.2, -0.4]]), "bias": jnp.array([0.0, 1.0])}
      >>> pruned, opt_state = optperm.prune(params, tx.init(params), 0.5)
      >>> [[round(x, 1) for x in row] for row in pruned["kernel"].tolist()]
      [[0.3, 0.0], [0.0, -0.4]]
      >>> pruned["bias"].tolist()
      [0.0, 1.0]

    Notes:
      Scores of 16 bits tie often, and then the place decides. On a mesh nothing is gathered, but for
      `"unit"`, `NOfM` and `Blocks`.

    Raises:
      TypeError: If an argument is of the wrong type.
      ValueError: If `fraction` is out of range, `criterion` or `scope` is unknown, `key` is missing, a
        tree does not match the masks, a structure does not fit a leaf, or there is not exactly one state
        that has masks.

    References:
      Han et al., `Learning both Weights and Connections for Efficient Neural Networks
      <https://arxiv.org/abs/1506.02626>`_, NeurIPS 2015
    """
    checks.check_choice("criterion", criterion, get_args(PruneCriterion))
    check_structure(structure)
    state = _masked_state(opt_state)
    plain = without_variables(params)
    weights = without_masked("params", plain, state.mask)
    flags = included(include, state.mask, plain)
    if criterion == "random":
        codes = random_codes(state.mask, flags, structure, key)
    else:
        if scores is None:
            ranked = jax.tree.map(jnp.abs, wide_scores("params", weights, state.mask))
        else:
            ranked = wide_scores("scores", scores, state.mask)
        codes = codes_of_scores(ranked, flags, structure)
    kept = keep("fraction", codes, fraction, scope, state.mask, flags, structure)
    mask = jax.tree.map(_hold, state.mask, kept)
    # What such a state leaves out is zero, where a mask of `mask_elements` may hold any value.
    stays = mask if isinstance(state, SparseState) else kept
    pruned = jax.tree.map(
        lambda is_kept, w: jnp.where(shard_like(is_kept, w), w, jnp.zeros_like(w)), stays, weights
    )
    leaves = jax.tree.leaves(fill_masked(pruned, plain))
    new_state = replace_state(
        opt_state, type(state), state._replace(mask=mask), method="mask_elements"
    )
    return jax.tree.unflatten(jax.tree.structure(params), leaves), new_state


def freeze(
    opt_state: Any,
    fraction: Any,
    *,
    scores: Any = None,
    criterion: FreezeCriterion = "gradient",
    scope: UnitScope = "erk",
    key: jax.Array | None = None,
    include: Include | None = None,
) -> Any:
    r"""Mask a fraction of the weights, so that they stay at the value they have.

    Chosen are those with the smallest :math:`|g_i|`, :math:`|(H g)_i|` or at random, with g the gradient
    over all examples and H the preconditioner that `optperm.constant_sgd` has learned.
    How many they are, and which of equal ones, is as in `optperm.prune`; masks accumulate as there.

    Args:
      opt_state: The state of an optimizer with `optperm.mask_elements` anywhere in it: chained, masked,
        partitioned, injected into, or kept as variables by `flax.nnx.Optimizer`. It is left alone.
      fraction: p, in [0, 1], or a tree of fractions, as in `optperm.prune`.
      scores: g, a tree like params, from `optperm.full_gradient` for instance.
      criterion: `"gradient"`; `"preconditioned_gradient"`, for an optimizer with
        `optperm.constant_sgd` or `optperm.mandt_sgd` in it; or `"random"`, which takes no
        scores, and with the same key and a larger fraction all that it takes with a smaller one.
      scope: `"erk"`, `"leaf"`, `"global"` or `"unit"`, as in `optperm.prune`.
      key: A key of `jax.random`, used by `"random"` alone. All replicas need the same.
      include: Which leaves take part: a tree of booleans like params, or a prefix of one; or a function
        to one from a tree with the structure and shapes of the params (it is the masks: there are no
        params here). None for those of rank 2 and more.

    Returns:
      The optimizer state with the masks, of the same structure, shapes and dtypes.

    Example:
      >>> import jax.numpy as jnp, optax, optperm
      >>> tx = optax.chain(optax.sgd(1.0), optperm.mask_elements())
      >>> w = jnp.array([[1.0, 2.0], [3.0, 4.0]])
      >>> full_grad = jnp.array([[0.1, -3.0], [-0.2, 1.0]])
      >>> opt_state = optperm.freeze(tx.init(w), 0.5, scores=full_grad)
      >>> updates, opt_state = tx.update(jnp.ones((2, 2)), opt_state, w)
      >>> optperm.apply_updates(w, updates, opt_state).tolist()
      [[1.0, 1.0], [3.0, 3.0]]

    Raises:
      TypeError: If an argument is of the wrong type.
      ValueError: If `fraction` is out of range, `criterion` or `scope` is unknown, `scores` or `key` is
        missing, a tree does not match the masks, or there is not exactly one state of `mask_elements`,
        or of a preconditioner where one is asked for.

    References:
      Mandt, Hoffman and Blei, `Stochastic Gradient Descent as Approximate Bayesian Inference
      <https://arxiv.org/abs/1704.04289>`_, 2017, for H
    """
    checks.check_choice("criterion", criterion, get_args(FreezeCriterion))
    state = find_state(opt_state, MaskElementsState, method="mask_elements")
    flags = included(include, state.mask)
    if criterion == "random":
        codes = random_codes(state.mask, flags, None, key)
    else:
        if scores is None:
            raise ValueError(
                f"criterion {criterion!r} needs scores, the gradient over all examples: pass "
                "scores=optperm.full_gradient(loss_fn, params, batches)."
            )
        name, grads = "scores", scores
        if criterion == "preconditioned_gradient":
            preconditioner = find_state(
                opt_state,
                PreconditioningState,
                method="constant_sgd or optperm.mandt_sgd",
            )
            grads = preconditioner.preconditioned(without_variables(scores))
            name = "the preconditioned scores"
        ranked = jax.tree.map(jnp.abs, wide_scores(name, grads, state.mask))
        codes = codes_of_scores(ranked, flags, None)
    kept = keep("fraction", codes, fraction, scope, state.mask, flags, None)
    new = MaskElementsState(jax.tree.map(_hold, state.mask, kept))
    return replace_state(opt_state, MaskElementsState, new, method="mask_elements")


def reset_masks(opt_state: Any) -> Any:
    """Return the optimizer state with every mask True again: all entries may move.

    Args:
      opt_state: The state of an optimizer with `optperm.mask_elements`, `optperm.prune_gradually` or
        `optperm.rigl` anywhere in it. It is left alone.

    Returns:
      The whole optimizer state, of the same structure, shapes and dtypes.

    Example:
      >>> import jax.numpy as jnp, optperm
      >>> opt_state = optperm.mask_elements().init(jnp.array([[1.0, 2.0]]))
      >>> opt_state = optperm.freeze(opt_state, 0.5, scores=jnp.array([[3.0, 0.0]]))
      >>> opt_state.mask.tolist()
      [[True, False]]
      >>> optperm.reset_masks(opt_state).mask.tolist()
      [[True, True]]

    Raises:
      ValueError: If there is not exactly one state that has masks.
    """
    state = _masked_state(opt_state)
    new = state._replace(mask=jax.tree.map(jnp.ones_like, state.mask))
    return replace_state(opt_state, type(state), new, method="mask_elements")


def _masked_state(opt_state: Any) -> MaskElementsState | SparseState:
    types: tuple[type[Any], ...] = (MaskElementsState, SparseState)
    state: MaskElementsState | SparseState = find_state(opt_state, types, method="mask_elements")
    return state


def _hold(is_trainable: jax.Array, is_kept: jax.Array) -> jax.Array:
    return is_trainable & shard_like(is_kept, is_trainable)
