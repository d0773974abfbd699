"""Dtypes to accumulate and to compute in, and whether all numbers are finite."""

import functools
from typing import Any

import jax
import jax.numpy as jnp


def wide_dtype(leaf: Any) -> Any:
    """The dtype to accumulate and to communicate in: float32, or float64 for float64."""
    return jnp.float64 if jnp.result_type(leaf) == jnp.float64 else jnp.float32


def widest_dtype(tree: Any) -> Any:
    """The widest of the leaves' own wide dtypes."""
    dtypes = [wide_dtype(leaf) for leaf in jax.tree.leaves(tree)]
    return jnp.float64 if jnp.float64 in dtypes else jnp.float32


def in_form_of(tree: Any, like: Any) -> Any:
    """The tree with the dtypes of another, none of them weak: what every state promises to keep."""

    def cast(leaf: Any, wanted: Any) -> Any:
        dtype, aval = jnp.result_type(wanted), jax.typeof(leaf)
        if aval.dtype == dtype and not aval.weak_type:
            return leaf
        return jax.lax.convert_element_type(leaf, dtype)

    return jax.tree.map(cast, tree, like)


def all_finite(tree: Any) -> jax.Array:
    """Whether every entry of every leaf is finite."""
    # Zero times anything finite is zero; as a sum it is one pass, where a mask would be stored first.
    flags = [jnp.isfinite(jnp.sum(leaf * 0)) for leaf in jax.tree.leaves(tree)]
    return functools.reduce(jnp.logical_and, flags, jnp.ones([], jnp.bool_))
