"""LaPerm: training freely, with the initial weights put in the order of the trained ones now and then.

Y. Qiu and R. Suda, "Train-by-Reconnect: Decoupling Locations of Weights from Their Values",
NeurIPS 2020.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.export import register_namedtuple_serialization

from optperm.contract import checks
from optperm.contract.dtypes import cast_like, zero_if_not_finite
from optperm.contract.mapped_axes import cond
from optperm.contract.schedules import resolve_schedule
from optperm.contract.transformation import transformation
from optperm.permutation import cycles
from optperm.permutation.weight_vectors import (
    OutputAxes,
    check_output_axes,
    init_ranks,
    order_keys,
    permute_vectors,
    warn_of_constant_vectors,
)
from optperm.placement import Placement, holding_masks, placing_states

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int32, PyTree

# An integer, or a schedule: from the number of a step to one.
SyncEvery = int | jax.Array | Callable[[jax.Array], Any]


@functools.partial(register_namedtuple_serialization, serialized_name="optperm.LapermState")
class LapermState(NamedTuple):
    """State of `laperm`.

    The sorted values of a weight vector are in it: that of rank k stands where `ranks` is k.

    Attributes:
      count: Steps taken.
      inner_state: State of the optimizer that moves the weights.
      weights: The weights as last synchronized, a permutation of the initial ones in each weight vector.
      ranks: The rank of each of these among those of its weight vector.
      synchronized: Whether the last step ended in a synchronization, which put the params on `weights`.
    """

    count: Int32[Array, ""]  # type: ignore[assignment]
    inner_state: Any
    weights: PyTree[Float[Array, "?*shape"], "Params"]
    ranks: PyTree[Int32[Array, "?*shape"], "Params"]
    synchronized: Bool[Array, ""]

    def placements(self) -> list[Placement]:
        """The synchronized weights; scalars, which never move, are not placed either."""
        targets = jax.tree.map(lambda w: w if w.ndim else optax.MaskedNode(), self.weights)
        return [(targets, self.synchronized)]

    def replace_targets(self, other: "LapermState") -> "LapermState":
        """This state with the weights of another permutation of the same ones.

        Args:
          other: One that holds them.
        """
        return self._replace(weights=other.weights, ranks=other.ranks)


def laperm(
    optimizer: optax.GradientTransformation,
    sync_every: SyncEvery,
    *,
    output_axes: OutputAxes = (-1,),
) -> optax.GradientTransformationExtraArgs:
    r"""LaPerm: trains a network by permuting its initial weights, in the order that an optimizer finds.

    The optimizer moves the weights freely. After step t, counted from 0, if :math:`t + 1` is a multiple
    of k, each weight vector :math:`w` is synchronized: with :math:`w_0` its initial values,

    .. math::
      w \leftarrow \operatorname{sort}(w_0)[\operatorname{rank}(w)],

    the smallest of them where the smallest weight is now, and so on; ties by location. So the network
    holds its initial weights, bit for bit, in another order. The optimizer's state is neither reset nor
    permuted: it stays with the location. Zeros among the initial weights move like any value.

    Between two synchronizations the params are no permutation. `optperm.permuted_params(opt_state)` is
    the network as last synchronized; `optperm.permuted_params(opt_state, params)` synchronizes the
    params first, which is how to test and to keep a network when training ends between two.

    If k is too small no weight gets past its neighbors before it is put back, and nothing is learned;
    a few per epoch to one in a few epochs is the range to try. Initialize biases at random, or train
    them with another optimizer (`optax.partition`). Scalars keep their value.

    A gradient that is not finite counts as zero in its entry. A weight vector that holds a NaN when it
    is synchronized goes back to its last synchronized order. The sort is computed only when it is due,
    but under `jax.vmap` in every step. It is the last of its chain: what follows it changes updates, not
    the weights that it places. Apply the updates with `optperm.apply_updates` to place them bit for
    bit; with `optax.apply_updates` they are within one rounding of it, without ever drifting.

    Args:
      optimizer: The optimizer that moves the weights. Not one that places params, such as
        `optperm.sgperm`, or holds some, such as `optperm.mask_elements`.
      sync_every: :math:`k \ge 1`, the steps from one synchronization to the next: an integer, or a
        schedule from t to one.
      output_axes: As in `optperm.permute_by_cycles`.

    Returns:
      A transformation whose state is a `LapermState`. Its `update` needs `params`, and whatever the
      optimizer needs.

    Raises:
      TypeError: If an argument is of the wrong type, or a parameter is not of a real floating dtype.
      ValueError: If `sync_every` is below 1, the optimizer places or holds params, or the trees
        passed to `update` do not match.

    Example:
      >>> import jax.numpy as jnp, optax, optperm
      >>> tx = optperm.laperm(optax.sgd(1.0), sync_every=2)
      >>> w = jnp.array([0.5, 1.0, 2.0])
      >>> opt_state = tx.init(w)
      >>> for _ in range(2):
      ...     updates, opt_state = tx.update(jnp.array([-0.5, 0.0, 0.75]), opt_state, w)
      ...     w = optperm.apply_updates(w, updates, opt_state)
      ...     print(w.tolist(), optperm.permuted_params(opt_state, w).tolist())
      [1.0, 1.0, 1.25] [0.5, 1.0, 2.0]
      [2.0, 1.0, 0.5] [2.0, 1.0, 0.5]

    References:
      Qiu and Suda, "Train-by-Reconnect: Decoupling Locations of Weights from Their Values",
      NeurIPS 2020
    """
    checks.check_transformation("optimizer", optimizer)
    if not callable(sync_every):
        checks.check_count("sync_every", sync_every)
    check_output_axes(output_axes)
    inner = optax.with_extra_args_support(optimizer)

    def init(params: optax.Params) -> LapermState:
        warn_of_constant_vectors(
            params, output_axes, example="optperm.laperm(optax.adam(1e-3), sync_every)"
        )
        inner_state = inner.init(params)
        if placing_states(inner_state) or holding_masks(inner_state):
            raise ValueError(
                "optimizer places params where its own state says, or holds some, and would not know "
                "where a synchronization puts them: use one that moves them all."
            )
        return LapermState(
            count=jnp.zeros([], jnp.int32),
            inner_state=inner_state,
            weights=jax.tree.map(lambda leaf: jnp.array(leaf, copy=True), params),
            ranks=init_ranks(params, output_axes),
            synchronized=jnp.zeros([], jnp.bool_),
        )

    def update(
        g: optax.Updates, state: LapermState, params: optax.Params, **extra_args: Any
    ) -> tuple[optax.Updates, LapermState]:
        # Every step moves all weights but scalars as the optimizer says. What is not finite counts as
        # zero: it would stay in the inner state for ever.
        g = zero_if_not_finite(g)
        moves, inner_state = inner.update(g, state.inner_state, params, **extra_args)
        moves = cast_like(moves, params)
        moves = jax.tree.map(lambda move: move if move.ndim else jnp.zeros_like(move), moves)

        # If t is a multiple of k, w <- values[argsort(argsort(w + move))] in each weight vector.
        def synchronize() -> tuple[optax.Updates, optax.Params, Any]:
            moved = optax.apply_updates(params, moves)
            weights, ranks = synchronized(state, moved, output_axes)
            return optax.tree.sub(weights, params), weights, ranks

        k = resolve_schedule("sync_every", sync_every, state.count, jnp.int32, low=1)
        t = optax.safe_increment(state.count)
        is_due = t % k == 0
        moves, weights, ranks = cond(
            is_due, synchronize, lambda: (moves, state.weights, state.ranks)
        )
        return moves, LapermState(t, inner_state, weights, ranks, synchronized=is_due)

    return transformation(init, update, method="laperm", like=lambda s: s.weights)


def synchronized(
    state: LapermState, params: optax.Params, output_axes: OutputAxes
) -> tuple[optax.Params, Any]:
    """The initial values of each weight vector in the order of the params, and the ranks of these.

    Args:
      state: The state, which holds the values.
      params: A tree like `state.weights`.
      output_axes: As given to `laperm`.
    """

    def reorder(
        _: int, weights: jax.Array, ranks: jax.Array, w: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        # values[argsort(argsort(w))], values = weights[argsort(ranks)]
        new_weights, new_ranks = cycles.reorder_rows(order_keys(w), weights, ranks)
        is_ordered = ~jnp.any(jnp.isnan(w), axis=0)
        return (
            jnp.where(is_ordered, new_weights, weights),
            jnp.where(is_ordered, new_ranks, ranks),
        )

    return permute_vectors(reorder, output_axes, state.weights, state.ranks, params)
