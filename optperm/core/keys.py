"""Keep random keys in a state as raw data of threefry keys, which every checkpoint can hold."""

from typing import Any

import jax
import jax.numpy as jnp


def key_data(seed: int | jax.Array) -> jax.Array:
    """Return the raw data of a seed's key, (2,)."""
    return jax.random.key_data(jax.random.key(seed, impl="threefry2x32"))


def as_key(data: jax.Array) -> jax.Array:
    """Return the key of raw data."""
    return jax.random.wrap_key_data(data, impl="threefry2x32")


def is_key(leaf: Any) -> bool:
    """Return whether a leaf is an array of typed keys, from `jax.random.key`."""
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
