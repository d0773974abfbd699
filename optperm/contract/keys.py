"""Random keys in a state: raw data of threefry keys, which every checkpoint and Orbax can hold."""

import jax


def key_data(seed: int | jax.Array) -> jax.Array:
    """The raw data of a seed's key, (2,)."""
    return jax.random.key_data(jax.random.key(seed, impl="threefry2x32"))


def as_key(data: jax.Array) -> jax.Array:
    """The key of raw data."""
    return jax.random.wrap_key_data(data, impl="threefry2x32")
