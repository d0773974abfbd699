"""Draw random numbers with the shapes of params; equal keys give equal numbers on all replicas."""

import functools
import math
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optperm.core.dtypes import accumulation_dtype, computed_once
from optperm.core.shapes import Params
from optperm.core.shardings import shard_like
from optperm.core.trees import SMALL, unstack

# Constants of Threefry-2x32 (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011).
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA
_GOLDEN = 0x9E3779B1  # 2^32 divided by the golden ratio
_GROUPS = 5  # of four rounds
# A sixth of all 32-bit words, with a relative error of 4e-10.
_SIXTH = 2**32 // 6
# Polynomials of the inverse error function in float32, in w - 2.5 for w < 5 and in sqrt(w) - 3 otherwise
# (M. Giles, "Approximating the erfinv Function", GPU Computing Gems, 2011).
_CENTER = (
    2.81022636e-08, 3.43273939e-07, -3.5233877e-06, -4.39150654e-06, 0.00021858087, -0.00125372503,
    -0.00417768164, 0.246640727, 1.50140941,
)  # fmt: skip
_TAIL = (
    -0.000200214257, 0.000100950558, 0.00134934322, -0.00367342844, 0.00573950773, -0.0076224613,
    0.00943887047, 1.00167406, 2.83297682,
)  # fmt: skip


def fold(data: jax.Array, *numbers: int | jax.Array) -> jax.Array:
    """Return the raw data of a key with numbers folded in, like `jax.random.fold_in` without a loop."""
    for number in numbers:
        word = jnp.asarray(number).astype(jnp.uint32)
        data = jnp.stack(threefry(data, jnp.zeros_like(word), word))
    return computed_once(data)


def bits(
    data: jax.Array, shapes: Sequence[tuple[int, ...]], numbers: Sequence[int] | None = None
) -> list[jax.Array]:
    """Return `jax.random.bits(jax.random.fold_in(key, number), shape)` for each shape, without loops.

    Args:
      data: The raw data of a threefry key, (2,).
      shapes: The shapes of the arrays.
      numbers: The number of each array; None for 0, 1, ...
    """
    numbers = range(len(shapes)) if numbers is None else numbers
    return _all_bits(data, shapes=tuple(shapes), numbers=tuple(numbers))


@functools.partial(jax.jit, static_argnames=("shapes", "numbers"))
def _all_bits(
    data: jax.Array, *, shapes: tuple[tuple[int, ...], ...], numbers: tuple[int, ...]
) -> list[jax.Array]:
    low = np.array(numbers, np.uint32)
    keys = jnp.stack(threefry(data, jnp.zeros_like(low), jnp.asarray(low)), axis=1)
    sizes = [math.prod(shape) for shape in shapes]
    small = [index for index, size in enumerate(sizes) if size <= SMALL]
    parts = _small_bits(keys[np.array(small, int)], [sizes[index] for index in small])
    drawn = dict(zip(small, parts, strict=True))
    for index, (key, shape) in enumerate(zip(unstack(keys), shapes, strict=True)):
        if index not in drawn:
            drawn[index] = _bits(key, shape=shape)
    return [drawn[index].reshape(shape) for index, shape in enumerate(shapes)]


def _small_bits(keys: jax.Array, sizes: list[int]) -> list[jax.Array]:
    """Return the bits of `_bits` for a key per array, flattened.

    Each generator takes long to compile, so all arrays are parts of one vector.
    """
    if not sizes:
        return []
    owners = np.repeat(np.arange(len(sizes)), sizes)
    places = np.concatenate([np.arange(size, dtype=np.uint32) for size in sizes])
    first, second = threefry(keys.T[:, owners], jnp.zeros_like(places), jnp.asarray(places))
    whole = computed_once(first ^ second)
    # XLA compiles equal kernels once, but with constant starts, each part would need its own kernel.
    ends = np.cumsum(sizes)
    starts = computed_once([np.int32(end - size) for end, size in zip(ends, sizes, strict=True)])
    return [
        jax.lax.dynamic_slice(whole, (start,), (size,))
        for start, size in zip(starts, sizes, strict=True)
    ]


def normal_like(data: jax.Array, tree: Params) -> Any:
    r"""Return independent standard normal numbers like `tree`, from 2^24 values, in float32 or wider.

    .. math:: \sqrt 2 \operatorname{erf}^{-1}\left((2 k + 1)\, 2^{-24} - 1\right), \quad 0 \le k < 2^{24}

    The numbers of a leaf depend on its path, so the parts of `optax.partition` draw different numbers.
    One vector for all leaves would be on the wrong devices for sharded leaves.
    """
    return _map_paths(_normal, data, tree)


def normal(
    data: jax.Array, number: int | jax.Array, shape: tuple[int, ...], dtype: Any
) -> jax.Array:
    """Return the normal numbers of `normal_like` for an array that has a number instead of a path."""
    return _draw(
        data, computed_once(jnp.asarray(number, jnp.uint32)), law=_normal, shape=shape, dtype=dtype
    )


def three_point_like(data: jax.Array, tree: Params) -> Any:
    r"""Return independent numbers like `tree` with the first five moments of a standard normal.

    .. math::
      P(\xi = \sqrt 3) = P(\xi = -\sqrt 3) = \tfrac16, \quad P(\xi = 0) = \tfrac23: \qquad
      E\, \xi^2 = 1, \quad E\, \xi^4 = 3, \quad E\, \xi = E\, \xi^3 = E\, \xi^5 = 0

    These numbers cost less than normal numbers. With a linear drift, iterates have the same first five
    cumulants, since cumulants of independent sums add up, as in the weak schemes of Kloeden and Platen,
    "Numerical Solution of Stochastic Differential Equations", 1992, section 14.2.
    """
    return _map_paths(_three_point, data, tree, words=_hashes)


def signs_like(data: jax.Array, tree: Params) -> Any:
    """Return independent random signs, 1 or -1, like `tree`."""
    return _map_paths(_sign, data, tree)


def _normal(word: jax.Array, dtype: Any) -> jax.Array:
    # x = (2 k + 1) 2^-24 - 1 has 2^24 values, for which 1 - x and 1 + x are exact in float32
    k = (word >> np.uint32(8)).astype(np.float32)
    x = k * np.float32(2.0**-23) + np.float32(2.0**-24 - 1)
    # erf^-1(x) = x p(w) with w = -log(1 - x^2). jax.lax.erf_inv uses the same polynomials p, but takes
    # nearly three times as long on a CPU, because of log1p(-x^2) and a selection per coefficient
    w = -jnp.log((1 - x) * (1 + x))
    center, tail = (
        _horner(_CENTER, w - np.float32(2.5)),
        _horner(_TAIL, jnp.sqrt(w) - np.float32(3)),
    )
    return (jnp.where(w < 5, center, tail) * x * np.float32(np.sqrt(2))).astype(dtype)


def _horner(coefficients: Sequence[float], v: jax.Array) -> jax.Array:
    """Return the value of a polynomial, whose highest coefficient is first."""
    value = jnp.full_like(v, coefficients[0])
    for coefficient in coefficients[1:]:
        value = value * v + np.float32(coefficient)
    return value


def _three_point(word: jax.Array, dtype: Any) -> jax.Array:
    size = np.asarray(np.sqrt(3), dtype)
    above = jnp.where(word >= np.uint32(2**32 - _SIXTH), size, np.zeros((), dtype))
    return jnp.where(word < np.uint32(_SIXTH), -size, above)


def _sign(word: jax.Array, dtype: Any) -> jax.Array:
    one = np.ones((), dtype)
    return jnp.where(word < np.uint32(2**31), one, -one)


def _words(data: jax.Array, number: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Return 32 random bits per entry of a leaf, from the entry's position; shards draw their parts."""
    return threefry(data, jnp.full(shape, number), _places(shape))[0]


def _hashes(data: jax.Array, number: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Return words like `_words`, which are hashes of the positions and cost a third of threefry's."""
    first, second = mix(mix(data[0]) ^ number), mix(mix(data[1]) ^ number)
    return mix(_places(shape) * np.uint32(_GOLDEN) ^ first) ^ second


@functools.partial(jax.jit, static_argnames="shape")
def _bits(data: jax.Array, *, shape: tuple[int, ...]) -> jax.Array:
    """Return the same bits as `jax.random.bits`."""
    first, second = threefry(data, jnp.zeros(shape, jnp.uint32), _places(shape))
    return first ^ second


def _places(shape: tuple[int, ...], start: jax.Array | None = None) -> jax.Array:
    """Return the position of each entry in C order, modulo 2^32, or a number from another start."""
    stride, place = 1, jnp.zeros(shape, jnp.uint32)
    for axis in reversed(range(len(shape))):
        along = jax.lax.broadcasted_iota(jnp.uint32, shape, axis)
        along = along if start is None else along + start
        place += along * np.uint32(stride % 2**32)
        stride *= shape[axis]
    return place


def threefry(data: jax.Array, high: jax.Array, low: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the two words of Threefry-2x32 for blocks of two words each.

    The bits are the same as JAX's. JAX's CPU program is a loop, but XLA fuses this elementwise program.

    Args:
      data: The raw data of a key, (2,).
      high: The first words of the blocks, uint32.
      low: The second words of the blocks, of the same shape.
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


@functools.partial(jax.jit, static_argnames=("law", "shape", "dtype", "words"))
def _draw(
    data: jax.Array,
    number: jax.Array,
    *,
    law: Callable[[jax.Array, Any], jax.Array],
    shape: tuple[int, ...],
    dtype: Any,
    words: Callable[..., jax.Array] = _words,
) -> jax.Array:
    """Return a law's random numbers from a leaf's bits; leaves of the same shape are traced once."""
    return law(words(data, number, shape), dtype)


def _map_paths(
    law: Callable[[jax.Array, Any], jax.Array],
    data: jax.Array,
    tree: Params,
    words: Callable[..., jax.Array] = _words,
) -> Any:
    """Return a law's random numbers for each leaf, from bits that depend on the leaf's path."""

    def number(path: Any) -> np.uint32:
        # The array of a flax.nnx variable is one level deeper
        name = jax.tree_util.keystr(path, simple=True, separator="/").removesuffix("/value")
        return np.uint32(zlib.crc32(name.encode()))

    leaves = jax.tree_util.tree_leaves_with_path(tree)
    # XLA compiles equal kernels once, but constant numbers would need a kernel for each leaf
    numbers = computed_once([number(path) for path, _ in leaves])
    draw = functools.partial(_draw, data, law=law, words=words)
    drawn = [
        shard_like(draw(n, shape=jnp.shape(leaf), dtype=accumulation_dtype(leaf)), leaf)
        for n, (_, leaf) in zip(numbers, leaves, strict=True)
    ]
    return jax.tree.unflatten(jax.tree.structure(tree), drawn)


def mix(h: jax.Array) -> jax.Array:
    """Return a hash of a uint32 (C. Wellons' lowbias32)."""
    h = (h ^ h >> 16) * jnp.uint32(0x7FEB352D)
    h = (h ^ h >> 15) * jnp.uint32(0x846CA68B)
    return h ^ h >> 16


def mix_key(data: jax.Array, count: jax.Array) -> jax.Array:
    """Return a seed, a hash of the raw data of a key and the number of a step."""
    return computed_once(mix(mix(mix(data[0]) ^ data[1]) ^ count.astype(jnp.uint32)))


def seeds(number: int) -> list[jax.Array]:
    """Return numbers that `mix` turns into the seeds of different arrays when added to one seed."""
    # XLA compiles equal kernels once, but with constant numbers, each array would need its own kernel.
    return computed_once([np.uint32(i * _GOLDEN % 2**32) for i in range(1, number + 1)])


def mixed_words(seed: jax.Array, start: jax.Array, like: jax.Array) -> jax.Array:
    """Return a uint32 for each entry of an array: a hash of the seed and the entry's position.

    These numbers cost a third of those of `threefry`, and are good enough for rounding at random.
    Positions along each axis count from `start`, because XLA for GPUs would use all arrays that read the
    same vector in one kernel, which holds all of them in memory.
    """
    return shard_like(mix(_places(jnp.shape(like), start) * jnp.uint32(_GOLDEN) ^ seed), like)
