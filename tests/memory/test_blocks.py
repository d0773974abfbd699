"""Codes of 8 and 4 bits against a transcription in NumPy, bit for bit."""

import itertools
import math

import jax
import jax.extend.core
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import support

from optperm.memory import _blocks as blocks
from optperm.memory._blocks import Even, Largest, Linear, Odd, Random, Root

FORMS = (Random, Linear, Root, Largest, Even, Odd)
E4M3 = np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
E2M1 = np.arange(8, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float64)
# A last axis of fewer than 8 numbers is merged with axes before it
SHAPES = ((5, 33), (3, 2, 1), (4, 200), (5, 6, 3, 3))
OTHERS = ((64,), (2, 8), (7, 96), (3, 45), (3, 64, 1, 1), (64, 5, 3, 3))
decode = jax.jit(blocks.decode, static_argnums=(2, 3))
compiled = jax.jit(blocks.encode, static_argnums=1)
START = 3141592653


def encode(x, form, seed):
    """The codes and exponents of an array whose places are counted from `START`."""
    return compiled(x, form, jnp.asarray(seed, jnp.uint32), np.uint32(START))


def hash_places(shape, seed):
    """The random numbers of all places, as uint32."""
    with np.errstate(over="ignore"):
        first = START * (math.prod(shape[1:]) + blocks.BLOCK) % 2**32
        places = np.arange(np.prod(shape), dtype=np.uint32).reshape(shape) + np.uint32(first)
        h = places * np.uint32(0x9E3779B1)
        h ^= np.uint32(seed)
        h = (h ^ h >> np.uint32(16)) * np.uint32(0x7FEB352D)
        h = (h ^ h >> np.uint32(15)) * np.uint32(0x846CA68B)
        return h ^ h >> np.uint32(16)


def in_blocks(x):
    """Rows of 32, with zeros at the end."""
    padded = np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % 32)])
    return padded.reshape(*x.shape[:-1], -1, 32)


def encode_numpy(x, form, seed):
    """The codes and exponents in float64, with a search in the table of all codes."""
    n, is_pair, is_root = x.shape[-1], form in (Even, Odd), form in (Root, Largest)
    draw, x = in_blocks(hash_places(x.shape, seed)), in_blocks(x.astype(np.float64))
    is_finite, is_negative = np.isfinite(x), np.signbit(x)
    size = np.abs(np.where(is_finite & (np.abs(x) >= 2.0**-126), x, 0))
    top = size.max(-1)
    low, high, largest, base = (
        (-117, 126, 6, 2) if is_pair else (-54, 56, 2**16, 4) if is_root else (-117, 119, 256, 2)
    )
    if form is Linear:
        return encode_linear_numpy(size, top, draw, is_finite, is_negative, n)
    e = np.full(top.shape, low)
    for k in range(low + 1, high + 1):
        e = np.where(top > largest * float(base) ** (k - 1), k, e)
    y = size / float(base) ** e[..., None]
    codes = E2M1 if is_pair else E4M3
    values = codes**2 if is_root else codes
    down = np.minimum(np.searchsorted(values, y, side="right"), len(codes) - 1) - 1
    part = (y - values[down]) / (values[down + 1] - values[down])
    if form is Largest:
        c = down + (y > (codes[down] / 2 + codes[down + 1] / 2) ** 2)
    elif form is Root:
        c = down + ((draw >> 8) / 2**24 * (values[down + 1] - values[down]) < y - values[down])
    else:  # The sum of the part and of as many random bits carries over.
        bits = 22 if is_pair else 20
        smallest_normal, part = codes[2 if is_pair else 8], part * 2.0**bits
        part = np.where(y < smallest_normal, np.rint(part), np.floor(part))
        c = down + (part + (draw >> (32 - bits)) >= 2**bits)
    if is_pair:
        has_other = ~is_finite.all(-1)
        c = np.where(has_other[..., None], 0, c) | np.where(is_negative, 8, 0)
        e = np.where(has_other, -128, e)
        c = c.reshape(*c.shape[:-2], -1)
        c = (c[..., ::2] | c[..., 1::2] << 4)[..., : (n + 1) // 2]
        return c.astype(np.uint8), e.astype(np.int8)
    if form is Random:
        c = c | np.where(is_negative, 128, 0)
    else:
        c = np.where(is_negative, 0, np.where(size > 0, np.maximum(c, 1), 0))
    c = np.where(is_finite, c, 127).reshape(*x.shape[:-2], -1)[..., :n]
    return c.astype(np.uint8), e.astype(np.int8)


def encode_linear_numpy(size, top, draw, is_finite, is_negative, n):
    """The codes in int8, the integers next to y in its block, and the exponents."""
    e = np.full(top.shape, -126)
    for k in range(-125, 122):
        e = np.where(top > 127 * 2.0 ** (k - 1), k, e)
    y = np.floor(size / 2.0 ** e[..., None] * 2**23) / 2**23
    c = np.minimum(np.floor(y + (draw >> 9) / 2**23), 127)
    c = np.where(is_finite, np.where(is_negative, -c, c), -128)
    c = c.reshape(*c.shape[:-2], -1)[..., :n].astype(np.int8)
    return c.view(np.uint8), e.astype(np.int8)


def decode_numpy(codes, e, form):
    """The numbers of codes, in float64 and then in float32."""
    if form in (Even, Odd):
        n = 2 * codes.shape[-1] - (form is Odd)
        pairs = np.stack([codes & 15, codes >> 4], -1).reshape(*codes.shape[:-1], -1)
        values = pairs[..., :n].view(ml_dtypes.float4_e2m1fn)
    elif form is Linear:
        n, values = codes.shape[-1], codes.view(np.int8).astype(np.float64)
        values[values == -128] = np.nan
    else:
        n, values = codes.shape[-1], codes.view(ml_dtypes.float8_e4m3fn)
    e = np.repeat(e.astype(np.float64), 32, -1)[..., :n]
    x = values.astype(np.float64) * 2.0**e
    x = x**2 if form in (Root, Largest) else x
    x = np.where(e == -128, np.nan, x) if form in (Even, Odd) else x
    top = float(np.finfo(np.float32).max)
    return np.clip(x, -top, top).astype(np.float32)


def merge_shape(shape):
    """The shape whose last axis, if it has fewer than 8 entries, is merged to 32 or more."""
    if shape[-1] >= 8:
        return shape
    while len(shape) > 1 and shape[-1] < 32:
        shape = (*shape[:-2], shape[-2] * shape[-1])
    return shape


def make_numbers(shape, rng):
    """Numbers of several kinds, of either sign."""
    normal, sign = rng.normal(size=shape), rng.choice([-1.0, 1.0], shape)
    others = rng.choice([0.0, -0.0, np.inf, -np.inf, np.nan, *[1.0] * 10], shape)
    return {
        "lognormal": normal * np.exp(4 * rng.normal(size=shape)),
        "all exponents": sign * np.exp2(rng.uniform(-149, 127.9, shape)),
        "zeros and not finite": normal * others,
        "ties": np.round(normal * 64) / 64 * 2.0 ** rng.integers(-20, 20),
        "all bits": rng.integers(2**32, size=shape, dtype=np.uint32).view(np.float32),
    }


@pytest.mark.parametrize(
    ("form", "shapes"),
    support.every_night(itertools.product(FORMS, (SHAPES, OTHERS)), [(f, SHAPES) for f in FORMS]),
)
def test_codes_equal_those_of_numpy(form, shapes):
    """What is not finite stays in its block; encoding what was decoded gives the same numbers, so that
    errors do not accumulate."""
    rng = np.random.default_rng(0)
    for shape in shapes:
        if form in (Even, Odd) and (shape[-1] % 2 == 1) != (form is Odd):
            continue
        for kind, numbers in make_numbers(shape, rng).items():
            x, seed = numbers.astype(np.float32), int(rng.integers(2**32 - 1))
            codes, e = encode(x, form, seed)
            merged = x.reshape(merge_shape(shape)) if form not in (Even, Odd) else x
            with np.errstate(invalid="ignore"):
                wanted, wanted_e = encode_numpy(merged, form, seed)
            wanted = wanted.reshape(codes.shape)
            np.testing.assert_array_equal(np.asarray(codes).view(np.uint8), wanted, kind)
            np.testing.assert_array_equal(e, wanted_e)
            found = decode(codes, e, form, jnp.float32)
            values = decode_numpy(wanted.reshape(*wanted_e.shape[:-1], -1), wanted_e, form)
            np.testing.assert_array_equal(found, values.reshape(shape))
            again = decode(*encode(found, form, seed + 1), form, jnp.float32)
            np.testing.assert_array_equal(again, found)


@pytest.mark.parametrize("form", [Random, Linear, Root, Even])
def test_random_rounding_is_unbiased(form):
    """In the number, also where the root is rounded: means over many seeds are within 5 errors, and so
    is their mean over all places."""
    normal = np.random.default_rng(0).normal(size=(1, 256)).astype(np.float32)
    x = np.abs(normal) + np.float32(0.1)

    @jax.jit
    @jax.vmap
    def round_once(seed):
        return decode(*encode(x, form, seed), form, jnp.float32)

    found = np.float64(round_once(np.arange(4000, dtype=np.uint32) * np.uint32(2654435761)))
    errors = (found.mean(0) - x) / (found.std(0) / 4000**0.5 + 1e-9)
    assert np.max(np.abs(errors)) < 5
    assert abs(np.sum(errors)) < 5 * 256**0.5
    assert np.max(found.std(0) / x) > 0.01


def test_integers_have_a_smaller_error_of_the_whole_block():
    """For normal entries, a third of the error of floats, or less."""
    x = np.asarray(support.normal((64, 256)))
    errors = [
        np.linalg.norm(np.asarray(decode(*encode(x, form, 5), form, jnp.float32)) - x)
        / np.linalg.norm(x)
        for form in (Linear, Random)
    ]
    assert errors[0] < errors[1] / 3


@pytest.mark.parametrize("form", FORMS)
def test_encodings_of_two_arrays_share_no_vector(form):
    """Only indices depend on neither the array, its seed nor its start.

    XLA would compute another vector once for all arrays of a shape, and on a GPU encode them at once.
    """
    x = np.ones((6, 5, 64 - (form is Odd)), np.float32)
    seeds = np.uint32(1), np.uint32(2)
    program = jax.make_jaxpr(blocks.encode, static_argnums=1)(x, form, *seeds).jaxpr
    own = set(program.invars)
    for each in program.eqns:
        if any(isinstance(read, jax.extend.core.Var) and read in own for read in each.invars):
            own.update(each.outvars)
        elif each.primitive.name not in ("iota", "broadcast_in_dim", "reshape"):
            assert all(made.aval.size == 1 for made in each.outvars), each


@pytest.mark.parametrize("dtype", ["bfloat16", support.FLOAT16])
def test_float16_and_bfloat16_are_kept_to_their_largest_number(dtype):
    top = jnp.finfo(dtype).max
    x = jnp.array([top, -top, top / 3], dtype)
    for form in (Random, Linear, Odd):
        found = decode(*encode(x, form, 0), form, dtype)
        assert jnp.all(jnp.isfinite(found.astype(jnp.float32)))
        assert found.dtype == dtype
