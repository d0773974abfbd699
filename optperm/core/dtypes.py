"""Cast the dtypes and types of arrays, check finiteness, and order computations."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optperm.core.mapped_axes import mark_varying, varying_axes
from optperm.core.shapes import list_boolean_fields
from optperm.core.shardings import shard_like


def accumulation_dtype(tree: Any) -> Any:
    """Return the dtype for sums and collectives: float64 if any leaf is float64, otherwise float32."""
    is_double = any(jnp.result_type(leaf) == jnp.float64 for leaf in jax.tree.leaves(tree))
    return jnp.float64 if is_double else jnp.float32


def wide_zeros(tree: Any) -> Any:
    """Return zeros like each leaf, with the same sharding, in the dtype for sums."""
    return jax.tree.map(lambda p: shard_like(jnp.zeros_like(p, accumulation_dtype(p)), p), tree)


def cast_like(tree: Any, like: Any) -> Any:
    """Return a tree with the types of another tree: strong dtypes, varying axes and shardings.

    Varying axes are only added, because values that vary over an axis cannot be made equal.
    """

    def cast(leaf: Any, wanted: Any) -> Any:
        dtype, aval = jnp.result_type(wanted), jax.typeof(leaf)
        if aval.dtype != dtype or aval.weak_type:
            leaf = jax.lax.convert_element_type(leaf, dtype)
        return place_like(leaf, wanted)

    return jax.tree.map(cast, tree, like)


def restore_booleans(state: Any) -> Any:
    """Return a state whose arrays of booleans, by their annotations, are booleans again.

    `optax.contrib.sam` selects states by products, which turns booleans into integers.
    """
    if _is_state(state):
        old = state._asdict()
        new = {name: restore_booleans(value) for name, value in old.items()}
        kind: Any = type(state)
        for name in list_boolean_fields(kind):
            new[name] = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.bool_), new[name])
        return state._replace(**new) if new else state
    return jax.tree.map(
        lambda node: restore_booleans(node) if _is_state(node) else node, state, is_leaf=_is_state
    )


def _is_state(node: Any) -> bool:
    return isinstance(node, tuple) and hasattr(node, "_fields")


def place_like(leaf: Any, *others: Any) -> Any:
    """Return an array with the varying axes and the sharding of other arrays of the same shape."""
    return shard_like(mark_varying(leaf, varying_axes(*others)), *others)


def all_finite(tree: Any) -> jax.Array:
    """Return whether every entry of every leaf is finite."""
    # Zero times a finite number is zero. A sum takes one pass over the leaf, without storing a mask.
    flags = [jnp.isfinite(jnp.sum(leaf * 0)) for leaf in jax.tree.leaves(tree)]
    # Each flag is stored, so that leaves of the same shape share a kernel. The conjunction is stored,
    # because each kernel that reads the flag would otherwise compute it again
    conjunction = functools.reduce(jnp.logical_and, computed_once(flags), jnp.ones([], jnp.bool_))
    return computed_once(conjunction)


def any_nonzero(tree: Any) -> jax.Array:
    """Return whether an entry of a leaf is not 0."""
    flags = computed_once([jnp.any(leaf != 0) for leaf in jax.tree.leaves(tree)])
    return functools.reduce(jnp.logical_or, flags, jnp.zeros([], jnp.bool_))


def computed_once(tree: Any) -> Any:
    """Return a tree whose leaves XLA stores instead of computing them again for each use."""
    return jax.tree.map(jax.lax.optimization_barrier, tree)


def compute_in_order(first: Any, second: Any) -> tuple[Any, Any]:
    """Return both trees; the first tree is computed once, before the second tree is used.

    Otherwise, XLA may compute the first tree again for each use, from copies of overwritten arrays.
    """
    return jax.lax.optimization_barrier((first, second))


def zero_if_not_finite(tree: Any) -> Any:
    """Return a tree with zero for each entry that is not finite."""
    return jax.tree.map(lambda leaf: jnp.where(jnp.isfinite(leaf), leaf, 0.0), tree)


def as_arrays(tree: Any) -> Any:
    """Return a tree that `jax.jit` accepts, even if a loader yields tensors of other libraries."""
    # NumPy's types come first, because isinstance is slow for jax.Array, and a loop calls it per leaf.
    known = (np.ndarray, jax.Array, np.generic, bool, int, float)
    if all(isinstance(leaf, known) for leaf in jax.tree.leaves(tree)):
        return tree
    return jax.tree.map(lambda leaf: leaf if isinstance(leaf, known) else np.asarray(leaf), tree)
