"""The cycle search of SGPerm and the sort of LaPerm, as operations in a compiled program.

A call follows this path:

    permute_rows, reorder_rows      operands in the kernel's dtypes, with a leading batch axis
      |
    batch_calls                     `jax.vmap` enlarges the batch; if types show the sharding of the
      |                             rows, each device calls for its own rows          (_row_calls.py)
      |
      |- on the CPU, kernel "ffi":  call_target, XLA's call of the compiled kernel    (_row_calls.py)
      |
      '- else:                      call_python, for `permute_on_host`; to sort,
                                    XLA's own sort                                    (_host_calls.py)

`_library.py` finds the compiled kernel, and chooses the kernel to run.
"""

import ctypes
import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optperm.core.mapped_axes import mark_varying, varying_axes
from optperm.core.shardings import shard_like
from optperm.permutation import _cycles_numpy as cycles_numpy
from optperm.permutation._host_calls import call_python
from optperm.permutation._library import (
    PERMUTE_TARGET,
    REORDER_TARGET,
    choose_kernel,
    find_kernels,
    load_library,
)
from optperm.permutation._row_calls import Results, Signature, batch_calls, call_target

# Recommendation, weights, ranks, seeds, aggressiveness, partition size; the results replace three.
PERMUTE = Signature(("matrix", "matrix", "matrix", "pair", "vector", "vector"), (1, 2, 5), True)
REORDER = Signature(("matrix", "matrix"), (1, 1))
_LEAST = 2.0**-149  # the smallest positive float32


def permute_rows(
    recommendation: jax.Array,
    weights: jax.Array,
    ranks: jax.Array,
    seeds: jax.Array,
    aggressiveness: jax.Array,
    partition_size: jax.Array,
    *,
    drop_remainder: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Permute each weight vector once, along cycles that follow its recommendation.

    Args:
      recommendation: (batch, n, *rows), floating. The rows may have any number of axes.
      weights: (batch, n, *rows), floating.
      ranks: (batch, n, *rows) int32, the rank of each weight in its row.
      seeds: (batch, *rows, 2) uint32, the randomness of each row's partition.
      aggressiveness: () float32.
      partition_size: () int32, at least 1.
      drop_remainder: Whether to exclude a last subset of fewer than `partition_size` entries.

    Returns:
      The new weights and ranks, and the number of entries moved in each row, (batch, *rows) int32.
    """
    # The kernel works in float32 or float64, whichever represents both operands exactly.
    is_double = np.float64 in (weights.dtype, recommendation.dtype)
    dtype = jnp.dtype(np.float64 if is_double else np.float32)
    batch, _, *rows = weights.shape
    operands = (
        _widen(recommendation, dtype),
        _widen(weights, dtype),
        ranks,
        seeds,
        jnp.broadcast_to(aggressiveness, (batch, *rows)),
        jnp.broadcast_to(partition_size, (batch, *rows)),
    )
    operands = mark_varying(operands, varying_axes(operands))
    new_weights, new_ranks, moved = _batch_calls(choose_kernel(), drop_remainder)(*operands)
    if dtype != weights.dtype:
        # The wider dtype of the kernel may change the bits of NaNs, so entries that stay are restored.
        new_weights = jnp.where(new_ranks == ranks, weights, _narrow(new_weights, weights.dtype))
    return new_weights, new_ranks, moved


@functools.cache
def _batch_calls(kernel: str, drop_remainder: bool) -> Callable[..., Results]:
    # The function is made once per kernel, so that all calls in a program use the same function.
    on_host = functools.partial(permute_on_host, kernel, drop_remainder)

    def call_kernel(*operands: jax.Array) -> Results:
        target = PERMUTE_TARGET.format(operands[1].dtype)
        attributes = (("drop_remainder", np.bool_(drop_remainder)),)
        by_target = functools.partial(call_target, PERMUTE, target, attributes)
        by_host = functools.partial(call_python, PERMUTE, on_host, by_target)
        by_call = by_target if kernel == "ffi" else by_host
        return jax.lax.platform_dependent(*operands, cpu=by_call, default=by_host)

    return batch_calls(PERMUTE, call_kernel)


class _Problem(ctypes.Structure):
    """Mirror the struct Problem of kernel/cycles.h."""

    _fields_ = (
        ("batch", ctypes.c_int64),
        ("rows", ctypes.c_int64),
        ("n", ctypes.c_int64),
        ("drop_remainder", ctypes.c_bool),
        ("recommendation", ctypes.c_void_p),
        ("weights", ctypes.c_void_p),
        ("ranks", ctypes.c_void_p),
        ("seeds", ctypes.c_void_p),
        ("aggressiveness", ctypes.c_void_p),
        ("partition_size", ctypes.c_void_p),
        ("new_weights", ctypes.c_void_p),
        ("new_ranks", ctypes.c_void_p),
        ("moved", ctypes.c_void_p),
    )


def permute_on_host(
    kernel: str, drop_remainder: bool, operands: Sequence[np.ndarray], results: Sequence[np.ndarray]
) -> None:
    """Permute each row, and write the results; all arrays have a single axis of rows."""
    batch, n, rows = operands[1].shape
    if kernel == "numpy":
        permuted = cycles_numpy.permute_rows(*operands, drop_remainder=drop_remainder)
        for result, values in zip(results, permuted, strict=True):
            result[...] = values
        return
    pointers = (array.ctypes.data for array in (*operands, *results))
    problem = _Problem(batch, rows, n, drop_remainder, *pointers)
    entry = getattr(load_library(), f"{PERMUTE_TARGET.format(operands[1].dtype)}_host")
    entry.restype = ctypes.c_bool
    if not entry(ctypes.byref(problem)):
        raise ValueError(cycles_numpy.DAMAGED)


def reorder_rows(
    keys: jax.Array, weights: jax.Array, ranks: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Put the weights of each row into the order of their keys.

    On the CPU, where XLA's sort is slow, the compiled library sorts if the kernel is "ffi". Otherwise,
    XLA sorts.

    Args:
      keys: (batch, n, *rows), signed integers; ties are ordered by location.
      weights: (batch, n, *rows).
      ranks: (batch, n, *rows) int32, the rank of each weight in its row.

    Returns:
      The weights and their ranks, (batch, n, *rows), with the weight of rank k where the key of rank k
      is.
    """
    if "ffi" not in find_kernels()[0] or os.environ.get("OPTPERM_KERNEL", "ffi") != "ffi":
        return _reorder_by_xla(keys, weights, ranks)
    wide = keys if keys.dtype == np.int64 else keys.astype(jnp.int32)
    return jax.lax.platform_dependent(
        wide, weights, ranks, cpu=_reorder_by_target, default=_reorder_by_xla
    )


def _reorder_by_xla(
    keys: jax.Array, weights: jax.Array, ranks: jax.Array
) -> tuple[jax.Array, jax.Array]:
    # Only sorts are used, since a TPU needs twice the memory to gather or scatter single entries.
    axes = varying_axes((keys, weights, ranks))
    places = shard_like(jax.lax.broadcasted_iota(jnp.int32, keys.shape, 1), keys)
    keys, weights, ranks, places = mark_varying((keys, weights, ranks, places), axes)

    def sort(*operands: jax.Array) -> Any:
        return mark_varying(jax.lax.sort(operands, dimension=1, is_stable=True, num_keys=1), axes)

    _, order = sort(keys, places)
    _, values = sort(ranks, weights)
    _, new_weights, new_ranks = sort(order, values, places)
    return new_weights, new_ranks


def _reorder_by_target(
    keys: jax.Array, weights: jax.Array, ranks: jax.Array
) -> tuple[jax.Array, jax.Array]:
    operands = mark_varying((keys, ranks), varying_axes((keys, ranks)))
    call = functools.partial(call_target, REORDER, REORDER_TARGET.format(keys.dtype), ())
    new_ranks, sources = batch_calls(REORDER, call)(*operands)
    new_weights = move_bits(lambda bits: jnp.take_along_axis(bits, sources, axis=1), weights)
    return new_weights, new_ranks


def move_bits(move: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """Return `move(x)` for a function that only moves entries, by moving the bits of real numbers.

    In a gather across devices, XLA adds zeros from all devices but one, so -0.0 becomes 0.0.
    """
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return move(x)
    integers = jnp.dtype(f"uint{8 * x.dtype.itemsize}")
    return jax.lax.bitcast_convert_type(move(jax.lax.bitcast_convert_type(x, integers)), x.dtype)


def _widen(x: jax.Array, dtype: Any) -> jax.Array:
    """Return the same numbers in float32 or float64; all finite numbers keep every bit.

    A plain conversion may treat subnormal numbers as zero, as XLA's threads on the CPU and some
    accelerators do.
    """
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


def _narrow(x: jax.Array, dtype: Any) -> jax.Array:
    """Undo `_widen` for finite numbers."""
    if x.dtype == np.float64 and dtype != np.float16:
        magnitude = (jnp.abs(x) / _LEAST).astype(jnp.int32)
        subnormal = jnp.where(jnp.signbit(x), magnitude | jnp.int32(-(2**31)), magnitude)
        subnormal = jax.lax.bitcast_convert_type(subnormal, jnp.float32)
        x = jnp.where(jnp.abs(x) < 2.0**-126, subnormal, x.astype(jnp.float32))
    if dtype == jnp.bfloat16:
        upper = jax.lax.bitcast_convert_type(x, jnp.uint32) >> 16
        return jax.lax.bitcast_convert_type(upper.astype(jnp.uint16), jnp.bfloat16)
    return x.astype(dtype)
