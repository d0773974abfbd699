"""Store arrays as blocks of 8-bit or 4-bit numbers that share a power of two.

T. Dettmers et al., "8-bit Optimizers via Block-wise Quantization", ICLR 2022, arXiv 2110.02861; OCP,
"Microscaling Formats (MX) Specification", version 1.0; B. Li et al., "Memory Efficient Optimizers with
4-bit States", NeurIPS 2023, arXiv 2309.01507.

Codes depend only on integers and exact floating-point numbers, so all processors find the same codes.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from optperm.core.dtypes import computed_once
from optperm.core.noise import mix
from optperm.core.shardings import explicit_sharding, shard_like

BLOCK = 32
# A last axis of fewer entries, as of a window of a convolution, is merged with axes before it.
_SHORT = 8


class Random(NamedTuple):
    """The blocks of numbers in 8 bits, rounded at random.

    Attributes:
      exponents: The exponents of the blocks, int8, (..., ceil(n / 32)).
      like: A zero of the dtype of the array.
    """

    exponents: Any
    like: Any


class Linear(NamedTuple):
    """The blocks of integers of 8 bits, rounded at random (see `Random`).

    All codes have the same distance, so small entries of a block are less exact than in `Random`, but
    the sum of the squared errors of a block is smaller.
    """

    exponents: Any
    like: Any


class Root(NamedTuple):
    """The blocks of roots of squares, rounded at random so that squares are unbiased (see `Random`)."""

    exponents: Any
    like: Any


class Largest(NamedTuple):
    """The blocks of roots of squares, rounded to the nearest code (see `Random`)."""

    exponents: Any
    like: Any


class Even(NamedTuple):
    """The blocks of numbers in 4 bits, with an even last axis, rounded at random (see `Random`)."""

    exponents: Any
    like: Any


class Odd(NamedTuple):
    """The blocks of numbers in 4 bits, with an odd last axis, rounded at random (see `Random`)."""

    exponents: Any
    like: Any


Blocks = Random | Linear | Root | Largest | Even | Odd
Form = type[Random] | type[Linear] | type[Root] | type[Largest] | type[Even] | type[Odd]
_ROOTS, _PAIRS = (Root, Largest), (Even, Odd)

_INFINITY, _SMALLEST_NORMAL = 0x7F800000, 0x00800000  # the bits of float32
_NAN = 0x7F  # the code of NaN in float8_e4m3fn
_NAN_BLOCK = -128  # the exponent of a block with NaN in 4 bits
# The ranges of exponents in which each code times 2^e, or its square for roots, is a normal float32.
_ROOT_LIMITS, _LIMITS, _PAIR_LIMITS = (-54, 56), (-117, 119), (-117, 126)
_LINEAR_LIMITS = (-126, 121)
_NAN_INTEGER = -128  # the code of NaN among integers


def encode(
    x: jax.Array, form: Form, seed: jax.Array, start: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return the codes of an array, in blocks along its last axis, and the exponents of the blocks.

    With 8 bits, a last axis of fewer than 8 entries is merged with axes before it, so that the result
    has at least 32 entries.

    Args:
      x: The array, (..., n), of a real floating dtype. Subnormal numbers count as 0.
      form: The type of the blocks.
      seed: A uint32, the seed of the random numbers for this array.
      start: A uint32, the position from which numbers are counted in the hash.

    Returns:
      Codes in float8_e4m3fn, or for `Linear` in int8, of the shape of the array, or for 4 bits in uint8,
      (..., ceil(n / 2)); and exponents e in int8, (..., ceil(n / 32)), for a merged last axis of n. The
      largest finite magnitude of a block (for roots, its root), divided by 2^e, is in (128, 256] for 8
      bits, in (63.5, 127] for `Linear`, and in (3, 6] for 4 bits.
    """
    whole = x
    x = x if form in _PAIRS else _merge(x, _count_axes(x.shape))
    n = x.shape[-1]
    x = _split(x.astype(jnp.float32), _find_group(x, n, form))
    raw = jax.lax.bitcast_convert_type(x, jnp.int32)
    size = raw & 0x7FFFFFFF
    is_finite = size < _INFINITY
    # Nonnegative numbers have the same order as their bits and as their exponents.
    top = jnp.max(size if form in _PAIRS else jnp.where(is_finite, size, 0), axis=-1)
    e = _largest_of_blocks(_find_exponents(top, form), x).astype(jnp.int32)
    size = jnp.where(is_finite & (size >= _SMALLEST_NORMAL), size, 0)
    # y = x / 2^e, or x / 4^e for roots, exactly
    scale = _power(_spread(-2 * e if form in _ROOTS else -e, x))
    y = jax.lax.bitcast_convert_type(size, jnp.float32) * scale
    draw = _draw(x, n, seed, start)
    if form in _PAIRS:
        codes = _fix(y, 22, 126) + (draw >> 10).astype(jnp.int32) >> 22
        # Store the codes, since a kernel that computes every second number would be slow.
        codes = computed_once((codes | (raw >> 28 & 8)).astype(jnp.uint8))
        pairs = codes.reshape(*codes.shape[:-1], -1, 2)
        pairs = pairs[..., 0] | pairs[..., 1] << 4
        e = jnp.where(e > _PAIR_LIMITS[1], _NAN_BLOCK, e)
        return _join(pairs, (n + 1) // 2), e.astype(jnp.int8)
    if form is Linear:
        # floor(y + draw), with y in multiples of 2^-23; only numbers near 2^128 have y > 127
        codes = (y * 2.0**23).astype(jnp.int32) + (draw >> 9).astype(jnp.int32) >> 23
        codes = jnp.minimum(codes, 127)
        codes = jnp.where(is_finite, jnp.where(raw < 0, -codes, codes), _NAN_INTEGER)
        return _unmerge(_join(codes, n).astype(jnp.int8), whole), e.astype(jnp.int8)
    if form in _ROOTS:
        codes = _round_root(y, draw if form is Root else None)
    else:
        codes = jnp.minimum(_fix(y, 20, 120) + (draw >> 12).astype(jnp.int32) >> 20, _NAN - 1)
    if form is Random:
        codes = codes | (raw >> 24 & 0x80)
    else:
        # A positive number must not become 0, since steps are divided by it.
        codes = jnp.where((size > 0) & (raw > 0), jnp.maximum(codes, 1), 0)
    codes = _join(jnp.where(is_finite, codes, _NAN), n).astype(jnp.uint8)
    codes = _unmerge(jax.lax.bitcast_convert_type(codes, jnp.float8_e4m3fn), whole)
    return codes, e.astype(jnp.int8)


def decode(codes: jax.Array, exponents: jax.Array, form: Form, dtype: Any) -> jax.Array:
    """Return the array for codes and exponents, exact up to the maximum of the dtype."""
    e = exponents.astype(jnp.int32)
    if form in _PAIRS:
        n = 2 * codes.shape[-1] - (form is Odd)
        pairs = _split(codes, _find_group(codes, n, form) // 2)
        c = jnp.stack([pairs & 15, pairs >> 4], axis=-1).reshape(*pairs.shape[:-1], -1)
        # Twice the magnitude is 0, 1, 2, 3, 4, 6, 8 or 12
        size = jnp.uint32(0xC8643210) >> (c & 7).astype(jnp.uint32) * 4 & 15
        twice = jnp.where(c > 7, -size.astype(jnp.int8), size.astype(jnp.int8))
        # Store the numbers, since halving the index would slow down a longer kernel
        twice = computed_once(twice).astype(jnp.float32)
        x = twice * _power(_spread(jnp.maximum(e, _PAIR_LIMITS[0]) - 1, twice))
        x = jnp.where(_spread(e, x) == _NAN_BLOCK, jnp.nan, x)
    else:
        whole, codes = codes, _merge(codes, exponents.ndim)
        n, bits = codes.shape[-1], jax.lax.bitcast_convert_type(codes, jnp.int8)
        c = _split(bits, _find_group(codes, n, form)).astype(jnp.int32)
        y = _read_integers(c) if form is Linear else _read_floats(c)
        x = y * _power(_spread(e, y))
    top = float(jnp.finfo(dtype).max)
    if form in _ROOTS:
        x = jnp.minimum(x * x, top)
    elif form in _PAIRS or dtype != jnp.float32:
        x = jnp.clip(x, -top, top)
    x = _join(x, n).astype(dtype)
    return x if form in _PAIRS else _unmerge(x, whole)


def _read_integers(c: jax.Array) -> jax.Array:
    """Return the numbers of codes in int8."""
    return jnp.where(c == _NAN_INTEGER, jnp.nan, c.astype(jnp.float32))


def _read_floats(c: jax.Array) -> jax.Array:
    """Return the numbers of codes in float8_e4m3fn, from their bits."""
    size = c & _NAN
    # Codes are the leading bits of a float32, except for multiples of 2^-9 below 2^-6 (see `_fix`).
    # There is no float16 on the way, because XLA cannot compile float16 for all processors.
    normal = jax.lax.bitcast_convert_type((size << 20) + (120 << 23), jnp.float32)
    y = jnp.where(size < 8, size.astype(jnp.float32) * 2.0**-9, normal)
    return jnp.where(size == _NAN, jnp.nan, jnp.where(c < 0, -y, y))


def _count_axes(shape: tuple[int, ...]) -> int:
    """Return the number of axes after short trailing axes are merged."""
    axes = len(shape)
    # A longer last axis may be split between devices: merging would move the array.
    if not shape or shape[-1] >= _SHORT:
        return axes
    while axes > 1 and math.prod(shape[axes - 1 :]) < BLOCK:
        axes -= 1
    return axes


def _merge(x: jax.Array, axes: int) -> jax.Array:
    """Return an array whose trailing axes are merged, so that `axes` axes are left."""
    if axes == x.ndim:
        return x
    shape = (*x.shape[: axes - 1], math.prod(x.shape[axes - 1 :]))
    sharding = explicit_sharding(x)
    if sharding is not None:
        # Only the first of several merged axes can stay sharded.
        spec = [*sharding.spec, *[None] * x.ndim][:axes]
        x = jax.sharding.reshard(x, sharding.update(spec=P(*spec, *[None] * (x.ndim - axes))))
        sharding = sharding.update(spec=P(*spec))
    # In one kernel with the reshape, each operation would compute indices of the short axes.
    return computed_once(jax.lax.reshape(x, shape, out_sharding=sharding))


def _unmerge(x: jax.Array, like: jax.Array) -> jax.Array:
    """Return an array in the shape and sharding of another array, whose trailing axes it has merged."""
    if x.shape == like.shape:
        return x
    sharding = explicit_sharding(x)
    if sharding is not None:
        spec = [*sharding.spec, *[None] * like.ndim][: like.ndim]
        sharding = sharding.update(spec=P(*spec))
    x = jax.lax.reshape(computed_once(x), like.shape, out_sharding=sharding)
    return shard_like(x, like)


def _find_exponents(top: jax.Array, form: Form) -> jax.Array:
    """Return the exponents of blocks whose maximum has these bits."""
    if form in _PAIRS:
        e = jnp.clip((top + 0x3FFFFF >> 23) - 129, *_PAIR_LIMITS)
        return jnp.where(top < _INFINITY, e, _PAIR_LIMITS[1] + 1)
    if form is Linear:
        # Numbers above 127/64 times a power of two get the next exponent, since there is no code 128
        return jnp.clip((top + 0x1FFFF >> 23) - 133, *_LINEAR_LIMITS)
    # 2^k is the smallest power of two that is not below the number
    k = (top + 0x7FFFFF >> 23) - 127
    # The root of a square in (2^14, 2^16] is in (128, 256].
    return jnp.clip(k - 15 >> 1, *_ROOT_LIMITS) if form in _ROOTS else jnp.clip(k - 8, *_LIMITS)


def _round_root(u: jax.Array, draw: jax.Array | None) -> jax.Array:
    """Return e4m3 codes of the root of u >= 0, rounded at random (u is unbiased) or to the nearest."""
    # The root is in [2^E, 2^(E + 1)), or below 2^-6 with E = -6. Codes have the distance q = 2^(E - 3).
    # The first byte of the bits of u plus 2^23 is E + 64.
    bits = jnp.maximum(jax.lax.bitcast_convert_type(u, jnp.int32), 115 << 23)
    octave = bits + 0x00800000 & 0x7F000000
    # t = u / q^2 exactly, and r0 = k q is the largest code that is not above the root
    t = u * jax.lax.bitcast_convert_type(
        jnp.uint32(261 << 23) - octave.astype(jnp.uint32), jnp.float32
    )
    down = jnp.floor(jnp.sqrt(t))
    k = jax.lax.bitcast_convert_type(down + 2.0**23, jnp.int32)
    if draw is None:
        is_up = t > (down + 0.5) * (down + 0.5)
    else:
        # Round up with probability p = (u - r0^2) / (r1^2 - r0^2) = (t - k^2) / (2 k + 1). Squares and
        # differences are exact, even in a fused multiply-add.
        chance = (draw >> 8).astype(jnp.int32).astype(jnp.float32) * 2.0**-24
        is_up = chance * (2 * down + 1) < t - down * down
    return (octave >> 21) + (k - (8 * 58 + 0x4B000000)) + is_up.astype(jnp.int32)


def _fix(y: jax.Array, shift: int, bias: int) -> jax.Array:
    """Return the code of y >= 0, with `shift` binary digits after the point.

    A code consists of the leading bits of a float, with a bias subtracted from the exponent. Below the
    smallest normal number, codes are multiples of the smallest code.
    """
    smallest_normal = 2.0 ** (bias - 126)
    is_subnormal = y < smallest_normal
    y = jnp.where(is_subnormal, y + smallest_normal, y)
    base = jnp.where(is_subnormal, bias + 1 << 23, bias << 23)
    return jax.lax.bitcast_convert_type(y, jnp.int32) - base


def _power(exponents: jax.Array) -> jax.Array:
    """Return 2^e exactly, as a normal float32."""
    return jax.lax.bitcast_convert_type(exponents + 127 << 23, jnp.float32)


def _draw(x: jax.Array, n: int, seed: jax.Array, start: jax.Array) -> jax.Array:
    """Return a uint32 for each number: an integer hash of the seed and the number's position.

    XLA for GPUs encodes all arrays that read the same vector in one kernel, which holds all of them in
    memory. Positions count from `start`, because otherwise all arrays of a shape would read one vector.
    """
    *rows, groups, g = x.shape
    ones = [1] * len(rows)
    place = jnp.broadcast_to(start, rows)
    for axis, size in enumerate([*rows[1:], n][: len(rows)]):
        place = (place + jax.lax.broadcasted_iota(jnp.uint32, rows, axis)) * jnp.uint32(size)
    # Since g divides the size of a block, the offset by the start is the same for each g.
    group = jax.lax.broadcasted_iota(jnp.uint32, (*ones, groups), len(rows))
    group = (group + start * jnp.uint32(BLOCK // g)) * jnp.uint32(g)
    place = shard_like((place[..., None] + group)[..., None], x[..., :1])
    inner = jax.lax.broadcasted_iota(jnp.uint32, (*ones, 1, g), len(rows) + 1)
    return mix((place + inner) * jnp.uint32(0x9E3779B1) ^ seed)


def _parts(x: jax.Array) -> int | None:
    """Return the number of devices that share the last axis on an explicit mesh, or None."""
    sharding = explicit_sharding(x)
    if sharding is None or len(sharding.spec) < x.ndim or sharding.spec[-1] is None:
        return None
    names = sharding.spec[-1]
    names = names if isinstance(names, tuple) else (names,)
    return math.prod(sharding.mesh.shape[name] for name in names)


def _find_group(x: jax.Array, n: int, form: Form) -> int:
    """Return the size g of groups of neighbors along a last axis of n numbers; g divides a block.

    A device with a multiple of g numbers needs no numbers from other devices. On an explicit mesh, g is
    a common divisor of a block and the numbers per device; otherwise, g is at most 8.
    """
    parts, least = _parts(x), 2 if form in _PAIRS else 1
    g = math.gcd(n, 64) // 8 if parts is None else math.gcd(n // parts, BLOCK)
    if parts is not None and g < least:
        raise ValueError(
            "4 bits need an even number of entries of a sharded last axis on each device, got "
            f"{n // parts}: shard another axis, or use 8 bits."
        )
    return max(g, least)


def _split(x: jax.Array, g: int) -> jax.Array:
    """Return (..., n / g, g), with zeros at the end if g does not divide n."""
    if rest := -x.shape[-1] % g:
        x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, rest)])
    return x.reshape(*x.shape[:-1], x.shape[-1] // g, g)


def _join(groups: jax.Array, n: int) -> jax.Array:
    """Return (..., n) from (..., n / g, g)."""
    flat = groups.reshape(*groups.shape[:-2], -1)
    return flat if flat.shape[-1] == n else flat[..., :n]


def _largest_of_blocks(each: jax.Array, groups: jax.Array) -> jax.Array:
    """Return the maximum in each block, int8 (..., ceil(n / 32)), of one small integer per group."""
    top, many = each.astype(jnp.int8), BLOCK // groups.shape[-1]
    if many == 1:
        return top
    if _parts(top) is not None:  # A block is on several devices.
        sharding: Any = explicit_sharding(top)
        top = jax.sharding.reshard(top, sharding.update(spec=P(*sharding.spec[:-1], None)))
    if rest := -top.shape[-1] % many:
        top = jnp.pad(top, [(0, 0)] * (top.ndim - 1) + [(0, rest)], constant_values=-128)
    return jnp.max(top.reshape(*top.shape[:-1], -1, many), axis=-1)


def _spread(exponents: jax.Array, groups: jax.Array) -> jax.Array:
    """Return the exponent of each group, (..., n / g, 1)."""
    many = BLOCK // groups.shape[-1]
    each = jnp.broadcast_to(exponents[..., None], (*exponents.shape, many))
    each = each.reshape(*exponents.shape[:-1], -1)[..., : groups.shape[-2]]
    return shard_like(each[..., None], groups[..., :1])
