"""Convert and gather floating-point numbers; all finite numbers keep every bit.

A plain conversion may treat subnormal numbers as zero, as XLA's threads on the CPU and some
accelerators do. In a gather across devices, XLA adds zeros from all devices but one, so -0.0 becomes
0.0.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_LEAST = 2.0**-149  # the smallest positive float32


def move_bits(move: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """Return `move(x)` for a function that only moves entries, by moving the bits of real numbers."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return move(x)
    integers = jnp.dtype(f"uint{8 * x.dtype.itemsize}")
    return jax.lax.bitcast_convert_type(move(jax.lax.bitcast_convert_type(x, integers)), x.dtype)


def widen(x: jax.Array, dtype: Any) -> jax.Array:
    """Return the same numbers in float32 or float64."""
    if x.dtype == jnp.bfloat16:  # the upper half of a float32
        upper = jax.lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.uint32)
        x = jax.lax.bitcast_convert_type(upper << 16, jnp.float32)
    if x.dtype != np.float32 or dtype != np.float64:
        return x.astype(dtype)
    # As an integer, the bits of a subnormal float32 are its multiple of the smallest positive float32.
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    magnitude = bits & 0x7FFFFFFF
    subnormal = jnp.copysign(magnitude.astype(dtype) * _LEAST, bits.astype(dtype))
    return jnp.where(magnitude < 0x00800000, subnormal, x.astype(dtype))


def narrow(x: jax.Array, dtype: Any) -> jax.Array:
    """Undo `widen` for finite numbers."""
    if x.dtype == np.float64 and dtype != np.float16:
        magnitude = (jnp.abs(x) / _LEAST).astype(jnp.int32)
        subnormal = jnp.where(jnp.signbit(x), magnitude | jnp.int32(-(2**31)), magnitude)
        subnormal = jax.lax.bitcast_convert_type(subnormal, jnp.float32)
        x = jnp.where(jnp.abs(x) < 2.0**-126, subnormal, x.astype(jnp.float32))
    if dtype == jnp.bfloat16:
        upper = jax.lax.bitcast_convert_type(x, jnp.uint32) >> 16
        return jax.lax.bitcast_convert_type(upper.astype(jnp.uint16), jnp.bfloat16)
    return x.astype(dtype)
