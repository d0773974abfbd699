"""Gaussian noise over params, the same on every replica and in every part of a resumed run."""

import zlib
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optperm.contract.dtypes import accumulation_dtype
from optperm.contract.shardings import shard_like

# Leaves of up to so many numbers are drawn together.
_SMALL = 2**16


def key_data(seed: int | jax.Array) -> jax.Array:
    """The raw data of a seed's key, (2,), as a state holds it."""
    return jax.random.key_data(jax.random.key(seed, impl="threefry2x32"))


def fold(data: jax.Array, *numbers: int | jax.Array) -> jax.Array:
    """The raw data of a key into which numbers are folded."""
    key = _as_key(data)
    for number in numbers:
        key = jax.random.fold_in(key, number)
    return jax.random.key_data(key)


def normal_like(data: jax.Array, tree: optax.Params) -> Any:
    """Independent standard normal numbers, a tree like `tree`, in float32 or wider.

    They follow from the paths of the leaves, so that the parts of `optax.partition` draw other ones.
    Small leaves are drawn as one vector, which is faster.
    """
    leaves, form = jax.tree_util.tree_flatten_with_path(tree)
    groups: dict[Any, list[int]] = {}
    for index, (_, leaf) in enumerate(leaves):
        is_small = jnp.size(leaf) <= _SMALL
        groups.setdefault((accumulation_dtype(leaf), None if is_small else index), []).append(index)
    drawn: list[Any] = [None] * len(leaves)
    for (dtype, _), members in groups.items():
        names = ",".join(_name(leaves[index][0]) for index in members)
        key = jax.random.fold_in(_as_key(data), zlib.crc32(names.encode()))
        if len(members) == 1:
            leaf = leaves[members[0]][1]
            drawn[members[0]] = shard_like(jax.random.normal(key, jnp.shape(leaf), dtype), leaf)
            continue
        sizes = [jnp.size(leaves[index][1]) for index in members]
        flat, start = jax.random.normal(key, (sum(sizes),), dtype), 0
        for index, size in zip(members, sizes, strict=True):
            leaf = leaves[index][1]
            part = flat[start : start + size].reshape(jnp.shape(leaf))
            drawn[index], start = shard_like(part, leaf), start + size
    return jax.tree.unflatten(form, drawn)


def _name(path: Any) -> str:
    # A variable of `flax.nnx` has its array one step further down.
    return jax.tree_util.keystr(path, simple=True, separator="/").removesuffix("/value")


def _as_key(data: jax.Array) -> jax.Array:
    return jax.random.wrap_key_data(data, impl="threefry2x32")
