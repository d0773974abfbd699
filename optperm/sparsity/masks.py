"""A mask for each element of the params: pruning, freezing, and what keeps both under any optimizer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, get_args, runtime_checkable

import jax
import jax.numpy as jnp
import optax

from optperm.contract import checks
from optperm.contract.mapped_axes import mark_varying, varying_axes
from optperm.contract.shardings import shard_like
from optperm.contract.states import fill_masked, find_state, replace_state, without_variables
from optperm.contract.transformation import transformation
from optperm.sparsity.choice import (
    Include,
    Scope,
    choose_lowest,
    magnitudes,
    random_scores,
    without_masked,
)

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


def mask_elements() -> optax.GradientTransformationExtraArgs:
    r"""Holds the entries of the params that its mask says at the value they have.

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

    Returns:
      A transformation whose state is a `MaskElementsState`. Its `update` does not need `params`.

    Raises:
      TypeError: If a parameter is not of a real floating dtype.
      ValueError: If the trees passed to `update` do not match.

    Example:
      >>> import jax.numpy as jnp, optax, optperm
      >>> tx = optax.chain(optax.sgd(0.5, momentum=0.9), optperm.mask_elements())
      >>> w = jnp.array([3.0, -1.0, 2.0, 4.0])
      >>> w, opt_state = optperm.prune(w, tx.init(w), fraction=0.5)
      >>> updates, opt_state = tx.update(jnp.ones(4), opt_state, w)
      >>> optperm.apply_updates(w, updates, opt_state).tolist()
      [2.5, 0.0, 0.0, 3.5]
    """

    def init(params: optax.Params) -> MaskElementsState:
        return MaskElementsState(
            jax.tree.map(
                lambda leaf: mark_varying(jnp.ones_like(leaf, bool), varying_axes(leaf)), params
            )
        )

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


def prune(
    params: optax.Params,
    opt_state: Any,
    fraction: float | jax.Array,
    *,
    criterion: PruneCriterion = "magnitude",
    scope: Scope = "leaf",
    scores: Any = None,
    key: jax.Array | None = None,
    include: Include | None = None,
) -> tuple[optax.Params, Any]:
    r"""Sets a fraction of the weights to zero, and masks them, so that they stay there.

    In each leaf of n entries the :math:`\lfloor p n \rfloor` with the smallest :math:`|s_i|` are chosen,
    for the fraction p; with scope `"global"` the :math:`\lfloor p N \rfloor` smallest of all N entries
    together. Of equal scores the first in the leaf goes first, and one that is NaN goes last. So the
    count is exact, whatever the scores are.

    All entries stand for election, those that are masked already too, and none becomes free: masks
    accumulate. By magnitude what was pruned before is chosen first, so pruning .5 and then .6 leaves .4.
    A weight that is frozen at another value than zero is set to zero if it is chosen.

    It works inside `jax.jit`, `jax.vmap` and `jax.lax.scan`, with a traced fraction and key. A fraction
    of Python or NumPy is multiplied by n in Python's floats (.58 of 50 is 28.999..., so 28 entries). One
    that is an array of JAX, traced or not, is multiplied in its own precision, float32 at least (there
    .58 of 50 is 29). A traced one that is out of range counts as the nearest that is not, NaN as 0.

    Args:
      params: The params, all of them where the mask is inside `optax.masked` or `optax.partition`: those
        that it does not see stay as they are.
      opt_state: The state of an optimizer with `optperm.mask_elements` anywhere in it: chained, masked,
        partitioned, injected into, or kept as variables by `flax.nnx.Optimizer`. It is left alone.
      fraction: p, in [0, 1].
      criterion: `"magnitude"`; or `"random"`, a random order that depends on the key alone, so that with
        the same key a larger fraction takes in all that a smaller one does.
      scope: `"leaf"`, a fraction of each leaf, biases and scalars included; or `"global"`, of all leaves
        together.
      scores: s, a tree like params; None for the params themselves. Used by `"magnitude"` alone.
      key: A key of `jax.random`, used by `"random"` alone. All replicas need the same.
      include: Which leaves take part: a tree of booleans like params, or a prefix of one; or a function
        from the params to one. None for all.

    Returns:
      The params with zero (0.0, never -0.0) in the place of the chosen, and the optimizer state with
      their masks; both of the same structure, shapes and dtypes.

    Raises:
      TypeError: If an argument is of the wrong type.
      ValueError: If `fraction` is out of range, `criterion` or `scope` is unknown, `key` is missing, a
        tree does not match the masks, or there is not exactly one state of `mask_elements`.

    Example:
      >>> import jax, jax.numpy as jnp, optax, optperm
      >>> tx = optax.chain(optax.adam(0.1), optperm.mask_elements())
      >>> params = {"kernel": jnp.array([[0.3, -0.1], [0.2, -0.4]]), "bias": jnp.array([0.0, 1.0])}
      >>> pruned, opt_state = optperm.prune(
      ...     params, tx.init(params), 0.5, include={"kernel": True, "bias": False}
      ... )
      >>> [[round(x, 1) for x in row] for row in pruned["kernel"].tolist()]
      [[0.3, 0.0], [0.0, -0.4]]
      >>> pruned["bias"].tolist()
      [0.0, 1.0]

    References:
      Han et al., `Learning both Weights and Connections for Efficient Neural Networks
      <https://arxiv.org/abs/1506.02626>`_, NeurIPS 2015
    """
    checks.check_choice("criterion", criterion, get_args(PruneCriterion))
    state = find_state(opt_state, MaskElementsState, method="mask_elements")
    plain = without_variables(params)
    weights = without_masked("params", plain, state.mask)
    if criterion == "random":
        ranked = random_scores(state.mask, key)
    else:
        name, ranking = ("params", weights) if scores is None else ("scores", scores)
        ranked = magnitudes(name, ranking, state.mask)
    chosen = choose_lowest(ranked, fraction, scope, include, plain)
    pruned = jax.tree.map(
        lambda is_chosen, w: jnp.where(shard_like(is_chosen, w), jnp.zeros_like(w), w),
        chosen,
        weights,
    )
    leaves = jax.tree.leaves(fill_masked(pruned, plain))
    return jax.tree.unflatten(jax.tree.structure(params), leaves), _with_held(
        opt_state, state, chosen
    )


def freeze(
    opt_state: Any,
    fraction: float | jax.Array,
    *,
    scores: Any = None,
    criterion: FreezeCriterion = "gradient",
    scope: Scope = "leaf",
    key: jax.Array | None = None,
    include: Include | None = None,
) -> Any:
    r"""Masks a fraction of the weights, so that they stay at the value they have.

    Chosen are those with the smallest :math:`|g_i|`, :math:`|(H g)_i|` or at random, with g the gradient
    over all examples and H the preconditioner that `optperm.constant_sgd` has learned.
    How many they are, and which of equal ones, is as in `optperm.prune`; masks accumulate as there.

    Args:
      opt_state: The state of an optimizer with `optperm.mask_elements` anywhere in it: chained, masked,
        partitioned, injected into, or kept as variables by `flax.nnx.Optimizer`. It is left alone.
      fraction: p, in [0, 1], as in `optperm.prune`.
      scores: g, a tree like params, from `optperm.full_gradient` for instance.
      criterion: `"gradient"`; `"preconditioned_gradient"`, for an optimizer with
        `optperm.constant_sgd` or `optperm.mandt_sgd` in it; or `"random"`, which takes no
        scores, and with the same key and a larger fraction all that it takes with a smaller one.
      scope: `"leaf"`, a fraction of each leaf, biases and scalars included; or `"global"`, of all leaves
        together.
      key: A key of `jax.random`, used by `"random"` alone. All replicas need the same.
      include: Which leaves take part: a tree of booleans like params, or a prefix of one; or a function
        to one from a tree with the structure and shapes of the params (it is the masks: there are no
        params here). None for all.

    Returns:
      The optimizer state with the masks, of the same structure, shapes and dtypes.

    Raises:
      TypeError: If an argument is of the wrong type.
      ValueError: If `fraction` is out of range, `criterion` or `scope` is unknown, `scores` or `key` is
        missing, a tree does not match the masks, or there is not exactly one state of `mask_elements`,
        or of a preconditioner where one is asked for.

    Example:
      >>> import jax.numpy as jnp, optax, optperm
      >>> tx = optax.chain(optax.sgd(1.0), optperm.mask_elements())
      >>> w = jnp.array([1.0, 2.0, 3.0, 4.0])
      >>> full_grad = jnp.array([0.1, -3.0, -0.2, 1.0])
      >>> opt_state = optperm.freeze(tx.init(w), 0.5, scores=full_grad)
      >>> updates, opt_state = tx.update(jnp.ones(4), opt_state, w)
      >>> optperm.apply_updates(w, updates, opt_state).tolist()
      [1.0, 1.0, 3.0, 3.0]

    References:
      Mandt, Hoffman and Blei, `Stochastic Gradient Descent as Approximate Bayesian Inference
      <https://arxiv.org/abs/1704.04289>`_, 2017, for H
    """
    checks.check_choice("criterion", criterion, get_args(FreezeCriterion))
    state = find_state(opt_state, MaskElementsState, method="mask_elements")
    if criterion == "random":
        ranked = random_scores(state.mask, key)
    elif scores is None:
        raise ValueError(
            f"criterion {criterion!r} needs scores, the gradient over all examples: pass "
            "scores=optperm.full_gradient(loss_fn, params, batches)."
        )
    elif criterion == "gradient":
        ranked = magnitudes("scores", scores, state.mask)
    else:
        preconditioner = find_state(
            opt_state,
            PreconditioningState,
            method="constant_sgd or optperm.mandt_sgd",
        )
        scaled = preconditioner.preconditioned(without_variables(scores))
        ranked = magnitudes("the preconditioned scores", scaled, state.mask)
    return _with_held(opt_state, state, choose_lowest(ranked, fraction, scope, include, state.mask))


def reset_masks(opt_state: Any) -> Any:
    """The optimizer state with every mask True again: all entries may move.

    Args:
      opt_state: The state of an optimizer with `optperm.mask_elements` anywhere in it. It is left alone.

    Returns:
      The whole optimizer state, of the same structure, shapes and dtypes.

    Raises:
      ValueError: If there is not exactly one state of `mask_elements`.

    Example:
      >>> import jax.numpy as jnp, optperm
      >>> opt_state = optperm.mask_elements().init(jnp.array([1.0, 2.0]))
      >>> opt_state = optperm.freeze(opt_state, 0.5, scores=jnp.array([3.0, 0.0]))
      >>> opt_state.mask.tolist()
      [True, False]
      >>> optperm.reset_masks(opt_state).mask.tolist()
      [True, True]
    """
    state = find_state(opt_state, MaskElementsState, method="mask_elements")
    new = MaskElementsState(jax.tree.map(jnp.ones_like, state.mask))
    return replace_state(opt_state, MaskElementsState, new, method="mask_elements")


def _with_held(opt_state: Any, state: MaskElementsState, chosen: Any) -> Any:
    def hold(is_trainable: jax.Array, is_chosen: jax.Array) -> jax.Array:
        return is_trainable & ~shard_like(is_chosen, is_trainable)

    mask = jax.tree.map(hold, state.mask, chosen)
    return replace_state(
        opt_state, MaskElementsState, MaskElementsState(mask), method="mask_elements"
    )
