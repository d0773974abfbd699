"""Dtypes to accumulate and to compute in."""

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
