"""Params of 16 bits and their remainders, against a transcription in NumPy, bit for bit."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import support

from optperm.core import remainders
from optperm.core.remainders import step_params, step_to

join, split = jax.jit(remainders.join), jax.jit(remainders.split, static_argnums=(1, 2))
ALL = np.arange(2**16, dtype=np.uint16)
DTYPES = [jnp.bfloat16, support.FLOAT16]


def each_in_turn(*bits):
    """Parametrize over dtypes and bits, so that each is run every time, and all pairs every night."""
    usual = {("bfloat16", each) for each in bits[1:]} | {("float16", bits[0])}
    cells = []
    for dtype, each in itertools.product(("bfloat16", "float16"), bits):
        marks = [support.needs_float16] if dtype == "float16" else []
        if (dtype, each) not in usual:
            marks.append(pytest.mark.exhaustive)
        cells.append(pytest.param(dtype, each, marks=marks))
    return pytest.mark.parametrize(("dtype", "bits"), cells)


MISSING = {"bfloat16": 16, "float16": 13}


def as_params(dtype):
    return ALL.view(jnp.dtype(dtype))


def numbers(dtype):
    """All params in float32, and whether each is finite and not 0."""
    with np.errstate(invalid="ignore"):
        exact = as_params(dtype).astype(np.float32)
    return exact, np.isfinite(exact) & (exact != 0)


def spacings(p, dtype):
    """The distance from |p| to the next larger param, and to the next smaller."""
    info = jnp.finfo(dtype)
    least = int(info.minexp)
    exponent = np.maximum(np.floor(np.log2(p)), least)
    above = 2.0 ** (exponent - info.nmant)
    is_power = (p == 2.0**exponent) & (exponent > least)
    return above, np.where(is_power, above / 2, above)


def joined(p, r, dtype, bits):
    """w: r counts parts of the distance to the neighbor on its side, float64."""
    size = np.abs(p)
    above, below = spacings(size, dtype)
    parts = 2.0 ** min(bits, MISSING[jnp.dtype(dtype).name])
    return np.sign(p) * (size + r * np.where(r < 0, below, above) / parts)


def random_remainders(dtype, bits, seed=0):
    half = 2 ** (min(bits, MISSING[jnp.dtype(dtype).name]) - 1)
    return np.random.default_rng(seed).integers(-half, half, ALL.size).astype(f"int{bits}")


@each_in_turn(8, 16)
def test_join_of_all_params_is_exact(dtype, bits):
    p, is_regular = numbers(dtype)
    r = random_remainders(dtype, bits)
    w = np.asarray(join(as_params(dtype), r))
    wanted = joined(p[is_regular].astype(float), r[is_regular].astype(float), dtype, bits)
    np.testing.assert_array_equal(w[is_regular].astype(np.float64), wanted)
    # What is 0 or not finite has no remainder.
    np.testing.assert_array_equal(w[~is_regular], p[~is_regular])
    assert np.array_equal(np.signbit(w[~is_regular]), np.signbit(p[~is_regular]))


@each_in_turn(8, 16)
def test_split_returns_what_was_joined(dtype, bits):
    params, (_, is_regular) = as_params(dtype), numbers(dtype)
    r = random_remainders(dtype, bits)
    w = join(params, r)
    words = np.random.default_rng(1).integers(0, 2**32, ALL.size, dtype=np.uint32)
    for draws in (words, None):
        param, remainder = map(np.asarray, split(w, jnp.dtype(dtype), bits, draws))
        support.assert_same_bits(param[is_regular].astype(jnp.dtype(dtype)), params[is_regular])
        np.testing.assert_array_equal(remainder[is_regular], r[is_regular])
        assert not np.any(remainder[~is_regular])


@each_in_turn(0, 8, 16)
def test_rounding_at_random_is_unbiased_and_reaches_neighbors_only(dtype, bits):
    """In the range of normal and of subnormal numbers of float16, and across powers of two."""
    rng = np.random.default_rng(2)
    w = np.concatenate(
        [rng.normal(size=20), 2.0**-14 * rng.normal(size=20), 1 - 2.0 ** -rng.uniform(8, 20, 20)]
    )
    w = w.astype(np.float32)
    draws = rng.integers(0, 2**32, (4000, w.size), dtype=np.uint32)
    wide = np.broadcast_to(w, draws.shape)
    param, remainder = split(wide, jnp.dtype(dtype), bits, draws)
    narrow = np.asarray(param).astype(jnp.dtype(dtype))
    reached = np.asarray(param if bits == 0 else join(narrow, remainder), np.float64)
    above, below = spacings(np.abs(np.asarray(w.astype(jnp.dtype(dtype)), np.float64)), dtype)
    part = np.maximum(above, below) / 2.0 ** min(bits, MISSING[jnp.dtype(dtype).name])
    assert np.all(np.abs(reached - w) <= part)
    error, spread = reached.mean(0) - w, reached.std(0) / np.sqrt(len(draws))
    # Float32 spaces subnormal numbers of float16 more finely than remainders do.
    is_subnormal = (dtype == "float16") & (np.abs(w) < 2.0**-14)
    assert np.all(np.abs(error) <= 4.5 * spread + np.where(is_subnormal, 2.0**-38, 1e-3 * part))
    # Numbers between two neighbors reach both.
    is_between = (w.astype(jnp.dtype(dtype)) != w) & (bits == 0)
    assert np.all(spread[is_between] > 0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_beyond_the_dtype_become_infinite(dtype):
    w = np.float32([np.inf, -np.inf, np.nan, 3.4e38, -3.4e38])
    with np.errstate(over="ignore", invalid="ignore"):
        wanted = w.astype(jnp.dtype(dtype)).astype(np.float32)
    for bits in (0, 8, 16):
        param, remainder = split(w, jnp.dtype(dtype), bits, None)
        np.testing.assert_array_equal(param, wanted)
        assert not np.any(remainder)


@pytest.mark.parametrize(
    "step",
    [
        pytest.param(step_to, marks=pytest.mark.exhaustive, id="eager"),
        pytest.param(jax.jit(step_to, static_argnums=2), id="jit"),
    ],
)
@each_in_turn(0, 8, 16)
def test_the_sum_with_the_update_is_the_param_of_the_remainder(dtype, bits, step):
    """Also for steps across zero, and for steps whose sum misses the split."""
    rng = np.random.default_rng(3)
    start = (0.01 * rng.normal(size=2**14)).astype(np.float32)
    p = start.astype(jnp.dtype(dtype))
    w = start + (0.003 * rng.normal(size=start.size)).astype(np.float32)
    words = rng.integers(0, 2**32, start.size, dtype=np.uint32)
    wanted = np.asarray(split(w, p.dtype, bits, words)[0])
    update, remainder = map(np.asarray, step(*map(jnp.asarray, (w, p)), bits, words))
    reached = p + update
    assert update.dtype == p.dtype
    misses = reached.astype(np.float32) != wanted
    assert 0 < misses.mean() < 0.12
    assert not np.any(np.asarray(remainder)[misses])
    if bits:
        error = np.abs(np.asarray(join(reached, remainder), np.float64) - w)
        unit = spacings(np.abs(np.asarray(reached, np.float64)) + 1e-30, dtype)[0]
        assert np.all(error[~misses] <= unit[~misses] / 2.0 ** min(bits, MISSING[p.dtype.name]))


@support.needs_float16
def test_steps_below_the_normal_numbers_of_float16_arrive():
    """Updates of 2^-16 and 3 x 2^-24, which are subnormal numbers, between params that are normal."""
    p, step = np.float16([2.0**-13, 2.0**-14]), np.float32([2.0**-16, 3 * 2.0**-24])
    update, remainder = jax.jit(step_to, static_argnums=2)(p.astype(np.float32) + step, p, 16, None)
    np.testing.assert_array_equal(np.asarray(update).astype(np.float32), step)
    np.testing.assert_array_equal(remainder, 0)


@each_in_turn(8, 16)
def test_step_from_all_params_has_the_bits_of_step_to(dtype, bits):
    """On a CPU, the update and the remainder come from one array; no bit of either may be lost."""
    rng = np.random.default_rng(4)
    p, r = as_params(dtype), random_remainders(dtype, bits)
    w = join(p, r)
    u = w * jnp.asarray(0.02 * rng.normal(size=w.shape), jnp.float32)
    words = rng.integers(0, 2**32, w.shape, dtype=np.uint32)
    expected = jax.jit(step_to, static_argnums=2)(w + u, p, bits, words)
    got = jax.jit(lambda *args: step_params(*args, bits, lambda *_: words))(w, u, p, r)
    updates, pair = zip(expected, got, strict=True)
    is_nan = [np.isnan(np.asarray(update, np.float32)) for update in updates]
    support.assert_same_bits(*is_nan)
    support.assert_same_bits(*(np.asarray(update)[~is_nan[0]] for update in updates))
    support.assert_same_bits(*pair)
    assert len(np.unique(np.asarray(got[1]))) > 200
