"""Dtypes to accumulate and to compute in, and whether all numbers are finite."""

import functools
from typing import Any

import jax
import jax.numpy as jnp


def accumulation_dtype(tree: Any) -> Any:
    """The dtype to accumulate and to communicate in: float64 if any leaf is, else float32."""
    is_double = any(jnp.result_type(leaf) == jnp.float64 for leaf in jax.tree.leaves(tree))
    return jnp.float64 if is_double else jnp.float32


def cast_like(tree: Any, like: Any) -> Any:
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
