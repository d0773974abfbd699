"""Make random keys from users' arguments, and store them in states as raw data of threefry keys.

All checkpoint formats can store raw data.
"""

from typing import Any

import jax
import jax.numpy as jnp


def make_key(key: int | jax.Array) -> jax.Array:
    """Return a typed key for an int (the seed of a threefry key), raw data, or a typed key."""
    if is_key(key):
        return jnp.asarray(key)
    if jnp.ndim(key) == 1:
        impl = "rbg" if jnp.shape(key) == (4,) else "threefry2x32"
        return jax.random.wrap_key_data(jnp.asarray(key), impl=impl)
    return jax.random.key(key, impl="threefry2x32")


def key_data(key: int | jax.Array) -> jax.Array:
    """Return the raw data, (2,), of a threefry key; a key of another kind seeds a threefry key."""
    typed = make_key(key)
    if jax.random.key_impl(typed) == "threefry2x32":
        return jax.random.key_data(typed)
    return jax.random.bits(typed, (2,), jnp.uint32)


def as_key(data: jax.Array) -> jax.Array:
    """Return the threefry key with the given raw data."""
    return jax.random.wrap_key_data(data, impl="threefry2x32")


def is_key(leaf: Any) -> bool:
    """Return whether a leaf is an array of typed keys, from `jax.random.key`."""
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
