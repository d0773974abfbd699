"""LaPerm: train with an optimizer, and from time to time reorder the initial weights.

Y. Qiu and R. Suda, "Train-by-Reconnect: Decoupling Locations of Weights from Their Values",
NeurIPS 2020.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.export import register_namedtuple_serialization

from optperm._leaf_axes import warn_of_others
from optperm.core import checks
from optperm.core.control import when
from optperm.core.dtypes import cast_like, compute_in_order, zero_if_not_finite
from optperm.core.fingerprints import UNSET
from optperm.core.mapped_axes import varying_zeros
from optperm.core.schedules import resolve_schedule
from optperm.core.shapes import Array, Bool, Float, Int32, Params, PyTree, UInt32, Updates
from optperm.core.states import find_states
from optperm.core.transformation import transformation
from optperm.core.trees import mask_like
from optperm.exact import (
    OWN_POINTS,
    Exact,
    count_mismatches,
    exact_entries,
    mismatch_warnings,
)
from optperm.permutation import _cycles as cycles
from optperm.permutation._weight_vectors import (
    Vectors,
    find_vectors,
    init_ranks,
    order_keys,
    permute_vectors,
    warn_of_constant_vectors,
    zero_where_fixed,
)

# An integer, or a schedule from the number of a step to an integer.
Interval = int | jax.Array | Callable[[jax.Array], Any]


@functools.partial(
    register_namedtuple_serialization, serialized_name="optperm.permutation.LapermState"
)
class LapermState(NamedTuple):
    """State of `laperm`.

    The state determines the sorted values of each weight vector: `weights` has the value with rank k
    where `ranks` is k.

    Attributes:
      count: Number of steps taken.
      inner_state: State of `inner`, which moves the weights.
      weights: The weights of the last synchronization, a permutation of the initial weights in each
        weight vector.
      ranks: The rank of each of these weights in its weight vector.
      synchronized: Whether the last step ended with a synchronization, after which the params are
        `weights`.
      mismatches: Number of steps after a synchronization whose params differed from `weights` by more
        than rounding, because something else had moved them.
      fingerprint: A number for each of the arguments `shaped_by()`.
    """

    count: Int32[Array, ""]  # type: ignore[assignment]
    inner_state: Any
    weights: PyTree[Float[Array, "?*shape"], "Params"]
    ranks: PyTree[Int32[Array, "?*shape"], "Params"]
    synchronized: Bool[Array, ""]
    mismatches: Int32[Array, ""]
    fingerprint: UInt32[Array, "arguments"] = UNSET

    def shaped_by(self) -> tuple[str, ...]:
        """Return the names of the arguments that determine what the state means."""
        return ("axes",)

    def exact(self) -> list[Exact]:
        """Return the synchronized weights as exact entries, except for scalars, which never move.

        Other leaves that stay keep their initial values.
        """
        where = jax.tree.map(
            lambda w: self.synchronized if w.ndim else optax.MaskedNode(), self.weights
        )
        return [Exact(mask_like(self.weights, where), where, is_target=True)]

    def warnings(self, params: Any) -> list[str]:
        """Return a sentence if something other than `laperm` has changed synchronized params.

        Args:
          params: Not used.
        """
        del params
        return mismatch_warnings("laperm", self.mismatches)

    def replace_targets(self, other: "LapermState") -> "LapermState":
        """Return this state with the weights, ranks and mismatches of another state.

        Args:
          other: A state whose weights are a permutation of the same values.
        """
        return self._replace(
            weights=other.weights,
            ranks=other.ranks,
            synchronized=other.synchronized,
            mismatches=other.mismatches,
        )


def laperm(
    inner: optax.GradientTransformation,
    every: Interval,
    *,
    axes: Any = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Train a network by reordering its initial weights as an optimizer suggests (LaPerm).

    The inner optimizer moves the weights freely. If :math:`t + 1` is a multiple of k, step t = 0, 1, ...
    ends with a synchronization of each weight vector :math:`w` (the weights into an output unit)
    with the initial values :math:`w_0`:

    .. math::
      w \leftarrow \operatorname{sort}(w_0)[\operatorname{rank}(w)].

    The smallest initial value moves to the position of the smallest weight, and so on; ties keep order.
    The network then has its initial weights, bit for bit, in another order.

    Args:
      inner: The optimizer that moves the weights. Optimizers that set exact params (`optperm.sgperm`,
        `optperm.mask_elements`, `optperm.rigl`) or keep their own params
        (`optax.contrib.schedule_free`, `mechanize`, `madgrad`, `cocob`) are not allowed.
      every: :math:`k \ge 1`, the number of steps from one synchronization to the next, or a schedule of
        t.
      axes: What each leaf is, as in `optperm.permute_by_cycles`.

    Returns:
      A transformation whose state is a `LapermState`. Its `update` needs `params` and the extra
      arguments of the inner optimizer.

    Example:
      >>> import jax.numpy as jnp, optax, optperm
      >>> tx = optperm.laperm(optax.sgd(1.0), every=2)
      >>> w = jnp.array([0.5, 1.0, 2.0])
      >>> opt_state = tx.init(w)
      >>> for _ in range(2):
      ...     updates, opt_state = tx.update(jnp.array([-0.5, 0.0, 0.75]), opt_state, w)
      ...     w = optperm.apply_updates(w, updates, opt_state)
      ...     print(w.tolist(), optperm.permutation.permuted_params(opt_state, w).tolist())
      [1.0, 1.0, 1.25] [0.5, 1.0, 2.0]
      [2.0, 1.0, 0.5] [2.0, 1.0, 0.5]

    Notes:
      Between synchronizations, the params are not a permutation of the initial weights.
      `optperm.permutation.permuted_params(opt_state)` returns the network of the last synchronization.
      `optperm.permutation.permuted_params(opt_state, params)` synchronizes the params first. Use it to
      test or save a network between synchronizations.

      If k is too small, hardly any weight passes a neighbor before the next synchronization, and the
      network hardly learns. Try values from a fraction of an epoch to a few epochs. Initialize biases at
      random, or train them with another optimizer (`optax.partition`).
      Scalars and leaves whose axes are not known keep their values; `init` warns if these leaves hold
      more than 1% of the entries. The inner state is neither reset nor permuted: it belongs to
      positions, not to weights.

      LaPerm must come last in its chain: after a transformation that changes its updates, the params of
      a synchronization are not the exact weights in the state. `mismatches` in the state counts this,
      and `optperm.training.fit` warns. At a synchronization, `optperm.apply_updates` sets these weights
      bit for bit, and `optax.apply_updates` sets them up to one rounding error, which never accumulates.

    Raises:
      TypeError: If an argument has the wrong type, or a parameter does not have a real floating dtype.
      ValueError: If `every` is below 1, the inner optimizer sets exact params or keeps its own params,
        `axes` does not fit the params or names no weights, the state was made with other `axes`, or the
        trees passed to `update` do not match.

    References:
      Qiu and Suda, "Train-by-Reconnect: Decoupling Locations of Weights from Their Values",
      NeurIPS 2020
    """
    checks.check_transformation("inner", inner)
    if not callable(every):
        checks.check_count("every", every)
    optimizer = optax.with_extra_args_support(inner)

    def init(params: Params) -> LapermState:
        vectors = find_vectors(params, axes)
        warn_of_others("laperm", params, axes)
        warn_of_constant_vectors(params, vectors)
        inner_state = optimizer.init(params)
        if exact_entries(inner_state):
            raise ValueError(
                "inner sets exact params (as sgperm or mask_elements does): use another optimizer."
            )
        for each in find_states(inner_state, OWN_POINTS):
            raise ValueError(
                f"{type(each).__name__} in inner stores its own params, which a synchronization does "
                "not move: use another optimizer."
            )
        return LapermState(
            count=jnp.zeros([], jnp.int32),
            inner_state=inner_state,
            weights=jax.tree.map(lambda leaf: jnp.array(leaf, copy=True), params),
            ranks=init_ranks(params, vectors),
            synchronized=jnp.zeros([], jnp.bool_),
            mismatches=varying_zeros(params, jnp.int32),
        )

    def update(
        g: Updates, state: LapermState, params: Params, **extra_args: Any
    ) -> tuple[Updates, LapermState]:
        vectors = find_vectors(params, axes)
        k = resolve_schedule("every", every, state.count, jnp.int32, low=1)
        t = optax.safe_increment(state.count)
        is_due = t % k == 0

        # The inner optimizer moves the weights in weight vectors. Nonfinite gradients count as zero,
        # because otherwise they would stay in the inner state forever.
        def step(p: Params, inner_state: Any) -> tuple[Updates, Any]:
            moves, new = optimizer.update(zero_if_not_finite(g), inner_state, p, **extra_args)
            return zero_where_fixed(cast_like(moves, p), vectors), new

        # If t is a multiple of k, w <- sort(w_0)[rank(w + move)] in each weight vector. The moves are
        # computed again, because as inputs of the loop, they would be stored in every step.
        def synchronize(at: tuple[Params, Any]) -> tuple[Params, Any]:
            moved = optax.apply_updates(params, step(params, state.inner_state)[0])
            before = state._replace(weights=at[0], ranks=at[1])
            return synchronize_params(before, moved, vectors)

        # The weights are compared before a synchronization overwrites them.
        mismatches, weights = compute_in_order(
            when(
                jnp.asarray(state.synchronized, jnp.bool_),
                lambda count: count_mismatches(count, params, state.weights),
                state.mismatches,
            ),
            state.weights,
        )
        weights, ranks = when(is_due, synchronize, (weights, state.ranks))
        # The loop must read these arrays before the step overwrites them.
        (weights, ranks), (p, inner_state) = compute_in_order(
            (weights, ranks), (params, state.inner_state)
        )
        moves, inner_state = step(p, inner_state)
        updates = jax.tree.map(lambda w, m, p: jnp.where(is_due, w - p, m), weights, moves, p)
        return updates, state._replace(
            count=t,
            inner_state=inner_state,
            weights=weights,
            ranks=ranks,
            synchronized=is_due,
            mismatches=mismatches,
        )

    return transformation(
        init,
        update,
        method="laperm",
        like=lambda s: s.weights,
        dtypes=True,
        shape_arguments=lambda params: {"axes": find_vectors(params, axes)},
    )


def synchronize_params(
    state: LapermState, params: Params, vectors: Sequence[Vectors | None]
) -> tuple[Params, Any]:
    """Put the initial values of each weight vector into the order of the params.

    Args:
      state: The state, which contains the initial values.
      params: A tree like `state.weights`.
      vectors: The weight vectors of each leaf.

    Returns:
      The weights and their ranks.
    """

    def reorder(
        _: int, weights: jax.Array, ranks: jax.Array, w: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        # sort(w_0)[rank(w)], where sort(w_0) = weights[argsort(ranks)].
        new_weights, new_ranks = cycles.reorder_rows(order_keys(w), weights, ranks)
        is_ordered = ~jnp.any(jnp.isnan(w), axis=1, keepdims=True)
        return (
            jnp.where(is_ordered, new_weights, weights),
            jnp.where(is_ordered, new_ranks, ranks),
        )

    return permute_vectors(reorder, vectors, state.weights, state.ranks, params)
