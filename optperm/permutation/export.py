"""A trained network as its initial weights and a permutation."""

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optperm.contract import checks
from optperm.contract.shardings import can_be_seen, shard_like, unshard
from optperm.contract.states import (
    fill_masked,
    find_state,
    is_masked,
    mask_like,
    without_variables,
)
from optperm.permutation.laperm import LapermState, synchronized
from optperm.permutation.permute_by_cycles import PermuteByCyclesState
from optperm.permutation.weight_vectors import (
    OutputAxes,
    check_output_axes,
    permute_vectors,
    sort_order,
)

# The states of methods that train by a permutation of the initial weights.
PERMUTED_STATES = (PermuteByCyclesState, LapermState)


def permuted_params(
    opt_state: Any, params: optax.Params | None = None, *, output_axes: OutputAxes = (-1,)
) -> optax.Params:
    """The exact weights that a permutation state holds.

    Of `optperm.sgperm` the current ones: under plain `optax.apply_updates` the params that training
    carries along are within one rounding of these. Of `optperm.laperm` the params that are given,
    synchronized, or without them the weights as last synchronized. In either case they are bit for bit
    a permutation of the initial ones.

    Args:
      opt_state: The state of an optimizer with `optperm.sgperm` or `optperm.laperm` somewhere in it.
      params: Current params, of which the leaves are taken that the method does not train (masked to
        another optimizer). Without them those leaves are `optax.MaskedNode`. Those of a `flax.nnx` model
        may be its variables.
      output_axes: As given to `optperm.laperm`; of no use for `optperm.sgperm`.

    Returns:
      A tree like params, of plain arrays.

    Raises:
      ValueError: If `opt_state` holds no permutation state, or more than one, or `params` do not match.

    Example:
      >>> import jax.numpy as jnp, optperm
      >>> params = {"bias": jnp.array([0.1, 0.3, 0.2])}
      >>> opt_state = optperm.sgperm().init(params)
      >>> bool(jnp.all(optperm.permuted_params(opt_state)["bias"] == params["bias"]))
      True
    """
    check_output_axes(output_axes)
    state = _state(opt_state)
    if params is None:
        return state.weights
    params = without_variables(params)
    trained, _ = _weights_and_ranks(state, params, output_axes)
    return fill_masked(trained, params)


def export_permutation(
    initial_params: optax.Params,
    opt_state: Any,
    params: optax.Params | None = None,
    *,
    output_axes: OutputAxes = (-1,),
) -> Any:
    """The permutation that takes the initial params to the trained ones.

    Args:
      initial_params: The params that `init` was called with.
      opt_state: The state of an optimizer with `optperm.sgperm` or `optperm.laperm` somewhere in it.
      params: Current params: what is exported is then `permuted_params(opt_state, params)`, which for
        `optperm.laperm` is another permutation than without.
      output_axes: As given to the method.

    Returns:
      A tree like params of int32 indices into the flattened initial parameter, such that
      `trained.ravel() == initial.ravel()[indices.ravel()]`. Leaves that the method does not train
      are `optax.MaskedNode`.

    Raises:
      ValueError: If `opt_state` holds no permutation state, or more than one; if `initial_params` or
        `params` have another structure, shape or dtype; if the trained weights are no permutation of
        the initial ones.

    Example:
      >>> import jax.numpy as jnp, optperm
      >>> initial = {"bias": jnp.array([0.1, 0.3, 0.2])}
      >>> tx = optperm.sgperm(aggressiveness=1.0)
      >>> grads = {"bias": jnp.array([-1.0, 1.0, 0.0])}
      >>> _, opt_state = tx.update(grads, tx.init(initial), initial)
      >>> optperm.export_permutation(initial, opt_state)["bias"].tolist()
      [1, 0, 2]
    """
    check_output_axes(output_axes)
    state = _state(opt_state)
    trained, ranks = state.weights, state.ranks
    if params is not None:
        trained, ranks = _weights_and_ranks(state, without_variables(params), output_axes)
    initial = mask_like(without_variables(initial_params), state.weights)
    checks.check_same_tree("initial_params", initial, state.weights, source="the optimizer state")
    locations = jax.tree.map(_flat_indices, initial)

    # The initial locations of a weight vector's entries, sorted by value, in the order of the ranks.
    def export(
        _: int, locations: jax.Array, ranks: jax.Array, weights: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        by_rank = jnp.take_along_axis(locations, sort_order(weights), axis=0)
        return jnp.take_along_axis(by_rank, ranks, axis=0), ranks

    permutation, _ = permute_vectors(export, output_axes, locations, ranks, initial)
    for (path, leaf), indices, exact in zip(
        jax.tree_util.tree_leaves_with_path(initial),
        jax.tree.leaves(permutation),
        jax.tree.leaves(trained),
        strict=True,
    ):
        if any(isinstance(array, jax.core.Tracer) for array in (leaf, indices, exact)):
            continue
        if not _is_permutation(indices) or not _same_bits(_permuted(leaf, indices), exact):
            raise ValueError(
                f"initial_params{jax.tree_util.keystr(path)} is not what the optimizer started from: "
                "its permutation does not give the trained weights. Pass the params that init was "
                "called with, and the same output_axes."
            )
    return permutation


def apply_permutation(initial_params: optax.Params, permutation: Any) -> optax.Params:
    """Rebuilds trained weights, bit for bit, from the initial ones and a permutation.

    Args:
      initial_params: A tree of parameters.
      permutation: What `export_permutation` returned. Where a leaf is `optax.MaskedNode` the initial
        parameter is returned as it is.

    Returns:
      A tree like `initial_params`.

    Raises:
      TypeError: If an index is not an integer.
      ValueError: If the trees do not match, or the indices of a leaf are not a permutation.

    Example:
      >>> import jax.numpy as jnp, optperm
      >>> optperm.apply_permutation(jnp.array([0.1, 0.3, 0.2]), jnp.array([1, 0, 2])).tolist()
      [0.30000001192092896, 0.10000000149011612, 0.20000000298023224]
    """
    checks.check_arrays("initial_params", initial_params)
    initial = mask_like(initial_params, permutation)
    checks.check_same_tree(
        "permutation", permutation, initial, source="initial_params", dtypes=False
    )

    def apply(path: tuple[Any, ...], indices: jax.Array, leaf: Any) -> Any:
        if is_masked(indices):
            return leaf
        if not jnp.issubdtype(jnp.result_type(indices), jnp.integer):
            raise TypeError(
                f"permutation{jax.tree_util.keystr(path)} must hold integers, "
                f"got {jnp.result_type(indices)}."
            )
        if not isinstance(indices, jax.core.Tracer) and not _is_permutation(indices):
            raise ValueError(
                f"permutation{jax.tree_util.keystr(path)} must hold each index from 0 to "
                f"{jnp.size(indices) - 1} once."
            )
        return _permuted(jnp.asarray(leaf), jnp.asarray(indices))

    return jax.tree_util.tree_map_with_path(apply, permutation, initial_params, is_leaf=is_masked)


def _state(opt_state: Any) -> PermuteByCyclesState | LapermState:
    state: Any = find_state(opt_state, PERMUTED_STATES, method="sgperm or optperm.laperm")
    count = getattr(state, "mismatches", None)
    if count is not None and can_be_seen(count) and (most := int(np.max(count))):
        warnings.warn(
            f"{most} step{'s were' if most > 1 else ' was'} given other params than the weights to "
            "which optperm.sgperm had led, and from which it goes on: the trained params may be no "
            "permutation of the initial ones. A wrapper around it moves the params (lookahead, "
            "schedule_free, a mask), or they were set back without the optimizer state.",
            UserWarning,
            stacklevel=3,
        )
    return state


def _weights_and_ranks(
    state: PermuteByCyclesState | LapermState, params: optax.Params, output_axes: OutputAxes
) -> tuple[optax.Params, Any]:
    """The exact weights at given params, masked where the state is, and their ranks."""
    trained = mask_like(params, state.weights)
    checks.check_same_tree("params", trained, state.weights, source="the optimizer state")
    if isinstance(state, LapermState):
        return synchronized(state, trained, output_axes)
    return state.weights, state.ranks


def _flat_indices(leaf: jax.Array) -> jax.Array:
    return shard_like(jnp.arange(leaf.size, dtype=jnp.int32).reshape(leaf.shape), leaf)


def _permuted(leaf: jax.Array, indices: jax.Array) -> jax.Array:
    """The entries of a leaf at indices into the flattened leaf, in the place of the leaf."""
    whole, places = unshard((leaf, indices))
    return shard_like(jnp.ravel(whole)[jnp.ravel(places)].reshape(leaf.shape), leaf)


def _is_permutation(indices: jax.Array) -> bool:
    flat = jnp.ravel(unshard(indices))
    return bool(jnp.all(jnp.sort(flat) == jnp.arange(flat.size, dtype=flat.dtype)))


def _same_bits(array: jax.Array, other: jax.Array) -> bool:
    integers = jnp.dtype(f"uint{8 * array.dtype.itemsize}")
    bits, other_bits = (jax.lax.bitcast_convert_type(each, integers) for each in (array, other))
    return bool(jnp.all(bits == other_bits))
