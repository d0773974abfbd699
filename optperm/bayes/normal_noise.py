"""Noise over params, the same on every replica and in every part of a resumed run.

`normal_like` draws normal numbers. `three_point_like` draws numbers that have a normal's first five
moments, at less cost, and `signs_like` random signs.
"""

import zlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optperm.contract.dtypes import accumulation_dtype
from optperm.contract.shardings import shard_like

# Of Threefry-2x32 (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011).
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA
_GROUPS = 5  # of four rounds
# A sixth of all words of 32 bits, to 4e-10 of it.
_SIXTH = 2**32 // 6


def fold(data: jax.Array, *numbers: int | jax.Array) -> jax.Array:
    """Return the raw data of a key with numbers folded in, as `jax.random.fold_in` does by a loop."""
    for number in numbers:
        word = jnp.asarray(number).astype(jnp.uint32)
        data = jnp.stack(threefry(data, jnp.zeros_like(word), word))
    return data


def normal_like(data: jax.Array, tree: optax.Params) -> Any:
    r"""Independent standard normal numbers of 2^24 sizes, a tree like `tree`, in float32 or wider.

    .. math:: \sqrt 2 \operatorname{erf}^{-1}\left((2 k + 1)\, 2^{-24} - 1\right), \quad 0 \le k < 2^{24}

    A leaf's numbers follow from its path, so that the parts of `optax.partition` draw other ones. One
    vector for all leaves would be faster, and lie on the wrong devices where leaves are sharded.
    """

    def draw(number: int, leaf: Any) -> jax.Array:
        dtype = accumulation_dtype(leaf)
        k = (_words(data, number, leaf) >> np.uint32(8)).astype(dtype)
        size, least = np.asarray(2.0**-23, dtype), np.asarray(2.0**-24 - 1, dtype)
        return jax.lax.erf_inv(k * size + least) * np.asarray(np.sqrt(2), dtype)

    return _of_each_leaf(draw, tree)


def three_point_like(data: jax.Array, tree: optax.Params) -> Any:
    r"""Independent numbers with a normal's moments to the fifth, a tree like `tree`, as `normal_like`.

    .. math::
      P(\xi = \sqrt 3) = P(\xi = -\sqrt 3) = \tfrac16, \quad P(\xi = 0) = \tfrac23: \qquad
      E\, \xi^2 = 1, \quad E\, \xi^4 = 3, \quad E\, \xi = E\, \xi^3 = E\, \xi^5 = 0

    Where each of many short steps adds such a number, and the drift is linear, the iterates have the
    cumulants that they would have by normal numbers, to the fifth: cumulants of independent sums add
    up. So weak schemes simulate stochastic differential equations (Kloeden and Platen, "Numerical
    Solution of Stochastic Differential Equations", 1992, section 14.2).
    """

    def draw(number: int, leaf: Any) -> jax.Array:
        word, dtype = _words(data, number, leaf), accumulation_dtype(leaf)
        size = np.asarray(np.sqrt(3), dtype)
        above = jnp.where(word >= np.uint32(2**32 - _SIXTH), size, np.zeros((), dtype))
        return jnp.where(word < np.uint32(_SIXTH), -size, above)

    return _of_each_leaf(draw, tree)


def signs_like(data: jax.Array, tree: optax.Params) -> Any:
    """Independent random signs, 1 and -1, a tree like `tree`, as `normal_like`."""

    def draw(number: int, leaf: Any) -> jax.Array:
        one = np.ones((), accumulation_dtype(leaf))
        return jnp.where(_words(data, number, leaf) < np.uint32(2**31), one, -one)

    return _of_each_leaf(draw, tree)


def _words(data: jax.Array, number: int, leaf: Any) -> jax.Array:
    """32 random bits for each entry of a leaf, by its place: any cut of the leaf draws the same."""
    shape, stride = jnp.shape(leaf), 1
    place = jnp.zeros(shape, jnp.uint32)
    for axis in reversed(range(len(shape))):
        along = jax.lax.broadcasted_iota(jnp.uint32, shape, axis)
        place += along * np.uint32(stride % 2**32)
        stride *= shape[axis]
    return threefry(data, jnp.full(shape, np.uint32(number)), place)[0]


def threefry(data: jax.Array, high: jax.Array, low: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The two words of Threefry-2x32 for blocks of two words each.

    The same as JAX's own, which is a loop on the CPU; this is one elementwise program, which is fused
    with what uses it.

    Args:
      data: The raw data of a key, (2,).
      high: The first words of the blocks, uint32.
      low: The second ones, of the same shape.
    """
    keys = data[0], data[1], data[0] ^ data[1] ^ np.uint32(_PARITY)
    x, y = high + keys[0], low + keys[1]
    for group in range(_GROUPS):
        for rotation in _ROTATIONS[group % 2]:
            x = x + y
            y = x ^ ((y << np.uint32(rotation)) | (y >> np.uint32(32 - rotation)))
        x = x + keys[(group + 1) % 3]
        y = y + keys[(group + 2) % 3] + np.uint32(group + 1)
    return x, y


def _of_each_leaf(draw: Callable[[int, Any], jax.Array], tree: optax.Params) -> Any:
    """What is drawn by a number that follows from a leaf's path, where the leaf lies."""

    def of_leaf(path: Any, leaf: Any) -> jax.Array:
        # A variable of `flax.nnx` has its array one step further down.
        name = jax.tree_util.keystr(path, simple=True, separator="/").removesuffix("/value")
        return shard_like(draw(zlib.crc32(name.encode()), leaf), leaf)

    return jax.tree_util.tree_map_with_path(of_leaf, tree)
