"""Split float32 numbers into params of 16 bits and remainders of 0, 8 or 16 bits.

In each binade, the bits of positive floats count evenly spaced numbers. With B the bits of |w| in
float32, and k the number of bits that the param's dtype lacks (16 for bfloat16, 13 for float16), the
param and its remainder are

    P = round(B / 2^k),    r = (B - P 2^k) / 2^c,    c = max(k - bits, 0)

so that |w| has the bits P 2^k + r 2^c. If c > 0, B is first rounded at random to a multiple of 2^c. The
remainder fits into its bits: it is at least -2^(k-1) / 2^c, and smaller than 2^(k-1) / 2^c.

The subnormal numbers of float16 are evenly spaced too, as the numbers of the binade from 2^-14 to 2^-13,
so |w| + 2^-14 takes the place of |w| there.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optperm.core.dtypes import computed_once
from optperm.core.mapped_axes import varying_zeros
from optperm.core.shapes import Params, Updates
from optperm.core.shardings import shard_like
from optperm.core.trees import fill_masked, mask_like

# The number of bits of a float32 that a dtype lacks.
_MISSING = {jnp.dtype(jnp.bfloat16): 16, jnp.dtype(jnp.float16): 13}
# With no bits more, a param has a single uint8 instead of a remainder.
_DTYPES = {0: jnp.uint8, 8: jnp.int8, 16: jnp.int16}
_SIGN, _INFINITY = 0x80000000, 0x7F800000
# The smallest normal number of float16.
_NORMAL = 2.0**-14


def is_narrow(leaf: Any) -> bool:
    """Return whether a leaf has the dtype bfloat16 or float16."""
    return jnp.result_type(leaf) in _MISSING


def remainder_type(param: Any, bits: int) -> jax.ShapeDtypeStruct:
    """Return the shape and dtype of a param's remainder.

    A param of 32 or 64 bits has a single number of its own dtype instead, and a param of 16 bits with
    no bits more a single uint8.
    """
    if not is_narrow(param):
        return jax.ShapeDtypeStruct((), jnp.result_type(param))
    shape = jnp.shape(param) if bits else ()
    return jax.ShapeDtypeStruct(shape, _DTYPES[bits])


def make_remainder(param: Any, bits: int) -> jax.Array:
    """Return a remainder of zero."""
    kind = remainder_type(param, bits)
    if kind.shape != jnp.shape(param):
        return varying_zeros(param, kind.dtype)
    return shard_like(jnp.zeros_like(param, dtype=kind.dtype), param)


def join(param: jax.Array, remainder: jax.Array) -> jax.Array:
    """Return the float32 number of a param and its remainder; a wider param is returned as it is.

    A param that is 0 or not finite has no remainder, for any contents of the array.
    """
    if not is_narrow(param):
        return param
    if remainder.dtype == jnp.uint8:
        return param.astype(jnp.float32)
    cut = _cut(param.dtype, 8 * remainder.dtype.itemsize)
    sign, size = _read(param.astype(jnp.float32))
    low = jnp.where(_is_regular(size), remainder.astype(jnp.int32) << cut, 0)
    is_shifted = _is_shifted(param.dtype, size, low < 0)
    size = jnp.where(is_shifted, _shift(size, _NORMAL), size) + low
    return _make(sign, jnp.where(is_shifted, _shift(size, -_NORMAL), size))


def split(
    wide: jax.Array, dtype: Any, bits: int, words: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Return the param of a float32 number, still in float32, and its remainder.

    Args:
      wide: The numbers, in float32.
      dtype: The dtype of the param, bfloat16 or float16.
      bits: The bits of a remainder: 0, 8 or 16.
      words: Random uint32, for rounding at random; None rounds to the nearest.

    Returns:
      The param, rounded to `dtype`, and its remainder. Without bits, the remainder is zero.
    """
    param, r = _split(wide, dtype, bits, words)
    return param, r.astype(_DTYPES[bits])


def _split(
    wide: jax.Array, dtype: Any, bits: int, words: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Return the results of `split`, with the remainder in int32."""
    missing, cut = _MISSING[jnp.dtype(dtype)], _cut(dtype, bits)
    sign, size = _read(wide)
    is_finite = size < _INFINITY
    is_shifted = _is_shifted(dtype, size, jnp.zeros_like(is_finite))
    b = jnp.where(is_shifted, _shift(size, _NORMAL), size)
    # B <- B rounded to a multiple of 2^c
    if cut:
        half = jnp.full_like(b, 1 << cut - 1)
        draw = half if words is None else (words >> (32 - cut)).astype(jnp.int32)
        b = ((b + draw) >> cut) << cut
    # P = round(B / 2^k), r = (B - P 2^k) / 2^c
    whole = ((b + (1 << missing - 1)) >> missing) << missing
    r = (b - whole) >> cut
    size_of_param = jnp.where(is_shifted, _shift(whole, -_NORMAL), whole)
    too_large = size_of_param > np.float32(jnp.finfo(dtype).max).view(np.int32)
    size_of_param = jnp.where(too_large, _INFINITY, size_of_param)
    size_of_param = jnp.where(is_finite, size_of_param, size)
    return _make(sign, size_of_param), jnp.where(_is_regular(size_of_param), r, 0)


def step_to(
    wide: jax.Array, param: jax.Array, bits: int, words: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    r"""Return the update that moves a param to a float32 number, and the new remainder.

    With :math:`[\cdot]` rounding to the param's dtype, and :math:`p'` the param of `wide`,

    .. math:: u = [p' - p], \qquad [p + u] = p'

    except where the step is longer than the result. There, the sum may differ from :math:`p'`, by at
    most half a unit in the last place of u, and the remainder of the sum is 0.

    Args:
      wide: The number after the step, in float32.
      param: The param before the step.
      bits: The bits of a remainder.
      words: Random uint32, for rounding at random; None rounds to the nearest.

    Returns:
      The update, in the dtype of the param, and the remainder of the param after the step.
    """
    update, r = _step(wide, param, bits, words)
    return update.astype(param.dtype), r.astype(_DTYPES[bits])


def _step(
    wide: jax.Array, param: jax.Array, bits: int, words: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Return the results of `step_to`, with the update in float32 and the remainder in int32."""
    target, r = _split(wide, param.dtype, bits, words)
    start = param.astype(jnp.float32)
    # The difference of equal infinite numbers would be NaN.
    update = round_like(jnp.where(target == start, 0.0, target - start), param)
    reached = round_like(start + update, param)
    return update, jnp.where(reached == target, r, 0)


def _step_on_cpu(
    wide: jax.Array, param: jax.Array, bits: int, words: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Return the results of `step_to` for a bfloat16 param, from one array of 32 bits.

    XLA's loops for CPUs have one result each. So it would compute all that leads to an update twice:
    once for the update, and once for the remainder. The last 16 bits of the update are 0.
    """
    update, r = _step(computed_once(wide), param, bits, words)
    high = jax.lax.bitcast_convert_type(update, jnp.uint32)
    both = computed_once(high | r.astype(jnp.uint32) & 0xFFFF)
    update = jax.lax.bitcast_convert_type((both >> 16).astype(jnp.uint16), param.dtype)
    return update, both.astype(_DTYPES[bits])


# With jit, this function is traced once for all leaves of the same shape.
@functools.partial(jax.jit, static_argnums=2)
def _step_to(
    wide: jax.Array, param: jax.Array, bits: int, words: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Return the results of `step_to`."""
    if not bits or param.dtype != jnp.bfloat16:
        return step_to(wide, param, bits, words)
    return jax.lax.platform_dependent(
        wide,
        param,
        words,
        cpu=lambda w, p, x: _step_on_cpu(w, p, bits, x),
        default=lambda w, p, x: step_to(w, p, bits, x),
    )


def join_params(params: Params, remainder: Any) -> Params:
    """Return params with their remainders, in float32; parts that a remainder masks do not change."""
    own = mask_like(params, remainder)
    return fill_masked(jax.tree.map(join, own, remainder), params)


def step_params(
    wide: Params,
    updates: Updates,
    params: Params,
    remainder: Any,
    bits: int,
    draw: Callable[[int, jax.Array], jax.Array] | None = None,
) -> tuple[Updates, Any]:
    """Return the updates and the remainders of a step, leaf by leaf as in `step_to`.

    Args:
      wide: The params with their remainders.
      updates: The step from them.
      params: The params before the step.
      remainder: Their remainders.
      bits: The bits of a remainder.
      draw: `draw(index, param)` returns the random words of a leaf; None rounds to the nearest.
    """

    def step(index: int, p: Any, w: Any, u: Any, r: jax.Array) -> tuple[Any, jax.Array]:
        if not is_narrow(p):
            return u, r
        param = jnp.asarray(p)
        words = None if draw is None else draw(index, param)
        move, new = _step_to(w + u.astype(w.dtype), param, bits, words)
        return move, new if bits else r

    structure: Any = jax.tree.structure(params)
    trees = map(structure.flatten_up_to, (params, wide, updates, remainder))
    pairs = [step(index, *row) for index, row in enumerate(zip(*trees, strict=True))]
    moves, remainders = (structure.unflatten([pair[i] for pair in pairs]) for i in range(2))
    return moves, remainders


def round_like(x: jax.Array, like: jax.Array) -> jax.Array:
    """Return an array rounded to the precision of another array, with its dtype unchanged."""
    # Inside jax.jit, XLA removes a cast to 16 bits and back
    info = jnp.finfo(like.dtype)
    if info.bits > 16:
        return x
    rounded = jax.lax.reduce_precision(x, info.nexp, info.nmant)
    if info.tiny > jnp.finfo(x.dtype).tiny:
        # reduce_precision returns zero for subnormal float16 numbers, which are evenly spaced
        spacing = float(info.smallest_subnormal)
        rounded = jnp.where(
            jnp.abs(x) < float(info.tiny), jnp.round(x / spacing) * spacing, rounded
        )
    return rounded


def _cut(dtype: Any, bits: int) -> int:
    return max(_MISSING[jnp.dtype(dtype)] - bits, 0)


def _is_regular(size: jax.Array) -> jax.Array:
    """Return whether the bits of a magnitude are those of a finite number that is not 0."""
    return (size > 0) & (size < _INFINITY)


def _read(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the bit of the sign, uint32, and the bits of the magnitude, int32."""
    b = jax.lax.bitcast_convert_type(x, jnp.uint32)
    return b & jnp.uint32(_SIGN), (b & jnp.uint32(_SIGN - 1)).astype(jnp.int32)


def _make(sign: jax.Array, size: jax.Array) -> jax.Array:
    """Return the float32 with these bits."""
    return jax.lax.bitcast_convert_type(sign | size.astype(jnp.uint32), jnp.float32)


def _is_shifted(dtype: Any, size: jax.Array, is_below: jax.Array) -> jax.Array:
    """Return whether the magnitude of a number is in the range of float16's subnormal numbers.

    Args:
      dtype: The dtype of the param.
      size: The bits of the magnitude.
      is_below: Whether the number is below this magnitude.
    """
    if jnp.dtype(dtype) != jnp.float16:
        return jnp.zeros_like(is_below)
    normal = 113 << 23  # the bits of 2^-14
    return (size < normal) | ((size == normal) & is_below)


def _shift(size: jax.Array, by: float) -> jax.Array:
    """Return the bits of a magnitude plus a number."""
    x = jax.lax.bitcast_convert_type(size, jnp.float32) + jnp.float32(by)
    return jax.lax.bitcast_convert_type(x, jnp.int32)
