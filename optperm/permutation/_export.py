"""Represent a trained network as its initial weights and a permutation."""

import warnings
from typing import Any

import jax
import jax.numpy as jnp

from optperm.core import checks
from optperm.core.fingerprints import check_fingerprint, check_not_stacked
from optperm.core.shapes import Params
from optperm.core.shardings import shard_like, unshard
from optperm.core.states import find_state
from optperm.core.trees import fill_masked, in_variables, is_masked, mask_like, without_variables
from optperm.permutation._cycles import move_bits
from optperm.permutation._laperm import LapermState, synchronize_params
from optperm.permutation._permute_by_cycles import PermuteByCyclesState
from optperm.permutation._weight_vectors import (
    Vectors,
    find_vectors,
    permute_vectors,
    sort_order,
)

# The states of methods that train by a permutation of the initial weights.
PERMUTED_STATES = (PermuteByCyclesState, LapermState)


def permuted_params(opt_state: Any, params: Params | None = None, *, axes: Any = None) -> Params:
    """Return the exact weights of a permutation method: its initial weights in another order.

    For `optperm.sgperm`, these are the current weights. For `optperm.laperm`, these are the weights
    after a synchronization of the given params or, without params, after the last synchronization.

    Args:
      opt_state: The state of an optimizer with `optperm.sgperm`, `optperm.permute_by_cycles` or
        `optperm.laperm` somewhere in it.
      params: The current params, from which leaves that another optimizer trains are taken. Without
        params, these leaves are `optax.MaskedNode`. For a `flax.nnx` model, pass its variables.
      axes: As passed to `optperm.laperm`; not needed for `optperm.sgperm`.

    Returns:
      A tree like params with plain arrays.

    Example:
      >>> import jax.numpy as jnp, optperm
      >>> params = {"bias": jnp.array([0.1, 0.3, 0.2])}
      >>> opt_state = optperm.sgperm().init(params)
      >>> bool(jnp.all(optperm.permutation.permuted_params(opt_state)["bias"] == params["bias"]))
      True

    Notes:
      With plain `optax.apply_updates`, the params of SGPerm in each step, and of LaPerm after a
      synchronization, are within one rounding error of these weights.

    Raises:
      ValueError: If `opt_state` does not contain exactly one permutation state, if `params` do not match
        this state, or if the state was made with other `axes`, or, for `optperm.laperm`, is a stack of
        states outside `jax.vmap`.
    """
    state = _find_permutation_state(opt_state)
    if params is None:
        return state.weights
    trained, _ = _weights_and_ranks("permuted_params", state, params, axes)
    return fill_masked(trained, without_variables(params))


def export_permutation(
    initial_params: Params,
    opt_state: Any,
    params: Params | None = None,
    *,
    axes: Any = None,
) -> Any:
    """Return the permutation from the initial params to the trained params.

    Args:
      initial_params: The params passed to `init`.
      opt_state: The state of an optimizer with `optperm.sgperm` or `optperm.laperm` somewhere in it.
      params: The current params, to export `permuted_params(opt_state, params)` instead of
        `permuted_params(opt_state)`. The two differ only for `optperm.laperm`.
      axes: As passed to the method.

    Returns:
      A tree like params, whose leaves are int32 indices into the flattened initial leaf, such that
      `trained.ravel() == initial.ravel()[indices.ravel()]`. Each index points into the weight vector in
      which it stands, so no weight changes its output unit, its layer or its expert. The indices of a
      leaf that stays, such as a scalar, are 0, 1, and so on. Leaves that the method does not see are
      `optax.MaskedNode`.

    Example:
      >>> import jax.numpy as jnp, optperm
      >>> initial = {"bias": jnp.array([0.1, 0.3, 0.2])}
      >>> tx = optperm.sgperm(aggressiveness=1.0)
      >>> grads = {"bias": jnp.array([-1.0, 1.0, 0.0])}
      >>> _, opt_state = tx.update(grads, tx.init(initial), initial)
      >>> optperm.permutation.export_permutation(initial, opt_state)["bias"].tolist()
      [1, 0, 2]

    Raises:
      ValueError: If `opt_state` does not contain exactly one permutation state, if the structure, shapes
        or dtypes of `initial_params` or `params` do not match this state, if this state was made with
        other `axes` or is a stack of states outside `jax.vmap`, or if the trained weights are not a
        permutation of the initial weights.
    """
    state = _find_permutation_state(opt_state)
    trained, ranks = state.weights, state.ranks
    if params is not None:
        trained, ranks = _weights_and_ranks("export_permutation", state, params, axes)
    initial = mask_like(without_variables(initial_params), state.weights)
    checks.check_same_tree("initial_params", initial, state.weights, source="the optimizer state")
    vectors = _find_vectors("export_permutation", state, initial_params, axes)
    locations = jax.tree.map(_flat_indices, initial)

    # indices = argsort(initial)[ranks] in each weight vector: the weight of rank k comes from the
    # position of the initial weight of rank k.
    def export(
        _: int, locations: jax.Array, ranks: jax.Array, weights: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        by_rank = jnp.take_along_axis(locations, sort_order(weights), axis=1)
        return jnp.take_along_axis(by_rank, ranks, axis=1), ranks

    permutation, _ = permute_vectors(export, vectors, locations, ranks, initial)
    for (path, leaf), indices, exact in zip(
        jax.tree_util.tree_leaves_with_path(initial),
        jax.tree.leaves(permutation),
        jax.tree.leaves(trained),
        strict=True,
    ):
        if any(isinstance(array, jax.core.Tracer) for array in (leaf, indices, exact)):
            continue
        # Check that the export reproduces the trained weights bit for bit.
        if not _is_permutation(indices) or not _same_bits(_permute(leaf, indices), exact):
            says = "does not give the trained weights: pass the params of init, and the optimizer's axes"
            raise ValueError(f"initial_params{jax.tree_util.keystr(path)} {says}.")
    return permutation


def apply_permutation(initial_params: Params, permutation: Any) -> Params:
    """Rebuild trained weights bit for bit from the initial weights and a permutation.

    Args:
      initial_params: A tree of parameters, also with the variables of a `flax.nnx` model.
      permutation: The result of `export_permutation`. For a leaf that is `optax.MaskedNode`, the initial
        parameter is returned unchanged.

    Returns:
      A tree like `initial_params`.

    Example:
      >>> import jax.numpy as jnp, optperm
      >>> weights, permutation = jnp.array([0.1, 0.3, 0.2]), jnp.array([1, 0, 2])
      >>> optperm.permutation.apply_permutation(weights, permutation).tolist()
      [0.30000001192092896, 0.10000000149011612, 0.20000000298023224]

    Raises:
      TypeError: If an index is not an integer, or a leaf is not an array of numbers.
      ValueError: If the trees do not match, or the indices of a leaf are not a permutation.
    """
    plain, permutation = without_variables((initial_params, permutation))
    checks.check_arrays("initial_params", plain)
    initial = mask_like(plain, permutation)
    checks.check_same_tree(
        "permutation", permutation, initial, source="initial_params", dtypes=False
    )

    def apply(path: tuple[Any, ...], indices: jax.Array, leaf: Any) -> Any:
        if is_masked(indices):
            return leaf
        name, dtype = f"permutation{jax.tree_util.keystr(path)}", jnp.result_type(indices)
        if not jnp.issubdtype(dtype, jnp.integer):
            raise TypeError(f"{name} must contain integers, got {dtype}.")
        if not isinstance(indices, jax.core.Tracer) and not _is_permutation(indices):
            raise ValueError(
                f"{name} must contain each index from 0 to {jnp.size(indices) - 1} once."
            )
        return _permute(jnp.asarray(leaf), jnp.asarray(indices))

    trained = jax.tree_util.tree_map_with_path(apply, permutation, plain, is_leaf=is_masked)
    return in_variables(trained, initial_params)


def _find_permutation_state(opt_state: Any) -> PermuteByCyclesState | LapermState:
    state: Any = find_state(opt_state, PERMUTED_STATES, method="sgperm or optperm.laperm")
    for text in state.warnings(state.weights):
        warnings.warn(text, UserWarning, stacklevel=3)
    return state


def _find_vectors(
    method: str, state: PermuteByCyclesState | LapermState, params: Params, axes: Any
) -> list[Vectors | None]:
    """Return the weight vectors of the params that a state has.

    Raises:
      ValueError: If the state was made with other axes, or is a stack of states.
    """
    check_not_stacked(method, state)
    # The names of axes in variables of params are not in the state.
    vectors = find_vectors(mask_like(params, state.weights), axes)
    check_fingerprint(method, state, {"axes": vectors})
    return vectors


def _weights_and_ranks(
    method: str, state: PermuteByCyclesState | LapermState, params: Params, axes: Any
) -> tuple[Params, Any]:
    """Return the exact weights at given params, masked like the state, and their ranks."""
    trained = mask_like(without_variables(params), state.weights)
    checks.check_same_tree("params", trained, state.weights, source="the optimizer state")
    if isinstance(state, LapermState):
        return synchronize_params(state, trained, _find_vectors(method, state, params, axes))
    if axes is not None:  # not needed, but checked
        _find_vectors(method, state, params, axes)
    return state.weights, state.ranks


def _flat_indices(leaf: jax.Array) -> jax.Array:
    return shard_like(jnp.arange(leaf.size, dtype=jnp.int32).reshape(leaf.shape), leaf)


def _permute(leaf: jax.Array, indices: jax.Array) -> jax.Array:
    """Return the entries of a leaf at indices into the flattened leaf, sharded like the leaf."""

    def permute(bits: jax.Array) -> jax.Array:
        whole, places = unshard((bits, indices))
        return shard_like(jnp.ravel(whole)[jnp.ravel(places)].reshape(leaf.shape), bits)

    return move_bits(permute, leaf)


def _is_permutation(indices: jax.Array) -> bool:
    flat = jnp.ravel(unshard(indices))
    return bool(jnp.all(jnp.sort(flat) == jnp.arange(flat.size, dtype=flat.dtype)))


def _same_bits(array: jax.Array, other: jax.Array) -> bool:
    integers = jnp.dtype(f"uint{8 * array.dtype.itemsize}")
    bits, other_bits = (jax.lax.bitcast_convert_type(each, integers) for each in (array, other))
    return bool(jnp.all(bits == other_bits))
