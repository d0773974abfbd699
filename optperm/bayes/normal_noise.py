"""Gaussian noise over params, the same on every replica and in every part of a resumed run."""

import zlib
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optperm.contract.dtypes import accumulation_dtype
from optperm.contract.keys import as_key
from optperm.contract.shardings import shard_like


def fold(data: jax.Array, *numbers: int | jax.Array) -> jax.Array:
    """The raw data of a key into which numbers are folded."""
    key = as_key(data)
    for number in numbers:
        key = jax.random.fold_in(key, number)
    return jax.random.key_data(key)


def normal_like(data: jax.Array, tree: optax.Params) -> Any:
    """Independent standard normal numbers, a tree like `tree`, in float32 or wider.

    A leaf's numbers follow from its path, so that the parts of `optax.partition` draw other ones. One
    vector for all leaves would be faster, and lie on the wrong devices where leaves are sharded.
    """
    key = as_key(data)

    def draw(path: Any, leaf: Any) -> jax.Array:
        # A variable of `flax.nnx` has its array one step further down.
        name = jax.tree_util.keystr(path, simple=True, separator="/").removesuffix("/value")
        leaf_key = jax.random.fold_in(key, zlib.crc32(name.encode()))
        drawn = jax.random.normal(leaf_key, jnp.shape(leaf), accumulation_dtype(leaf))
        return shard_like(drawn, leaf)

    return jax.tree_util.tree_map_with_path(draw, tree)
