"""Calls of the cycle search and of LaPerm's sort: by XLA directly, or through Python.

Each is one custom call of XLA's, under one batching and one partitioning rule: every device of a mesh
calls for the rows that it holds. `library` says which kernel runs.
"""

import ctypes
import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import mlir

from optperm.core.mapped_axes import mark_varying, varying_axes
from optperm.core.shardings import shard_like
from optperm.permutation import _cycles_numpy as cycles_numpy
from optperm.permutation import _tpu_calls as tpu_calls
from optperm.permutation._exact_floats import move_bits, narrow, widen
from optperm.permutation._library import (
    PERMUTE_TARGET,
    REORDER_TARGET,
    choose_kernel,
    find_kernels,
    load_library,
)
from optperm.permutation._row_calls import Results, Signature, batch_calls, call_target

# Recommendation, weights, ranks, seeds, aggressiveness, partition size; new are three of them.
_PERMUTE = Signature(("matrix", "matrix", "matrix", "pair", "vector", "vector"), (1, 2, 5), True)
_REORDER = Signature(("matrix", "matrix"), (1, 1))


class _Problem(ctypes.Structure):
    """The struct Problem of kernel/cycles.h."""

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
    """Permute each weight vector once, along the cycles that its recommendation asks for.

    Args:
      recommendation: (n, *rows), floating. There may be any number of axes of rows.
      weights: (n, *rows), floating.
      ranks: (n, *rows) int32, the rank of each weight in its row.
      seeds: (*rows, 2) uint32, the randomness of each row's partition.
      aggressiveness: () float32.
      partition_size: () int32, at least 1.
      drop_remainder: Whether a last subset that is too small sits out.

    Returns:
      The new weights and ranks, and the number of entries moved in each row, (*rows,) int32.
    """
    # The kernel works in float32 or float64: one of them holds both operands exactly.
    is_double = np.float64 in (weights.dtype, recommendation.dtype)
    dtype = jnp.dtype(np.float64 if is_double else np.float32)
    operands = (
        widen(recommendation, dtype)[None],
        widen(weights, dtype)[None],
        ranks[None],
        seeds[None],
        jnp.broadcast_to(aggressiveness, (1, *weights.shape[1:])),
        jnp.broadcast_to(partition_size, (1, *weights.shape[1:])),
    )
    operands = mark_varying(operands, varying_axes(operands))
    results = _batch_calls(choose_kernel(), drop_remainder)(*operands)
    new_weights, new_ranks, moved = (result[0] for result in results)
    if dtype != weights.dtype:
        # The bits of an entry that stays need not survive the kernel's wider dtype: NaNs may not.
        new_weights = jnp.where(new_ranks == ranks, weights, narrow(new_weights, weights.dtype))
    return new_weights, new_ranks, moved


@functools.cache
def _batch_calls(kernel: str, drop_remainder: bool) -> Callable[..., Results]:
    return batch_calls(_PERMUTE, functools.partial(_call_on_platform, kernel, drop_remainder))


def _call_on_platform(kernel: str, drop_remainder: bool, *operands: jax.Array) -> Results:
    target = PERMUTE_TARGET.format(operands[1].dtype)
    attributes = (("drop_remainder", np.bool_(drop_remainder)),)

    def by_target(*operands: jax.Array) -> Results:
        return call_target(_PERMUTE, target, attributes, *operands)

    def by_host(*operands: jax.Array) -> Results:
        # A lowering learns on which devices the program runs where JAX sees that a target is called.
        call = jax.make_jaxpr(by_target)(*operands)
        results = _host_call_p.bind(
            *operands, kernel=kernel, drop_remainder=drop_remainder, call=call
        )
        return tuple(results)

    by_call = by_target if kernel == "ffi" else by_host
    return jax.lax.platform_dependent(*operands, cpu=by_call, default=by_host)


_host_call_p = Primitive("optperm_host_call")
_host_call_p.multiple_results = True
_host_call_p.def_abstract_eval(lambda *operands, **_: _PERMUTE.of_results(operands))


def _lower_host_call(
    context: mlir.LoweringRuleContext, *operands: Any, kernel: str, drop_remainder: bool, call: Any
) -> Sequence[Any]:
    """Lower a call of Python, on the CPU and a GPU as the target that JAX's own callbacks call.

    Those callbacks have no partitioning rule, and on the CPU `jax.pure_callback` can hang: it hands
    arrays to JAX that the device it waits for has to copy.
    """
    del call
    module = context.module_context
    if len(module.platforms) > 1:
        raise NotImplementedError(
            "calls of Python need one platform: export the update for the CPU"
        )
    on_host: Callable[..., Any] = functools.partial(_on_host, kernel, drop_remainder)
    if module.platforms[0] == "tpu":
        return tpu_calls.lower_call(_PERMUTE, on_host, context, *operands)
    on_cpu = module.platforms[0] == "cpu"
    target = "xla_buffer_python_cpu_callback" if on_cpu else "xla_ffi_python_gpu_callback"
    on_buffers = functools.partial(_on_buffers, kernel, drop_remainder)
    module.add_host_callback(on_buffers if on_cpu else on_host)
    index = (("index", np.uint64(len(module.host_callbacks) - 1)),)

    def call_python(*operands: jax.Array) -> Results:
        return call_target(_PERMUTE, target, index, *operands)

    return mlir.lower_fun(call_python, multiple_results=True)(context, *operands)


mlir.register_lowering(_host_call_p, _lower_host_call)


def _on_buffers(kernel: str, drop_remainder: bool, _: Any, *buffers: Any) -> tuple[()]:
    """Call a kernel on buffers of the CPU: operands, and results to write."""
    arrays = [np.asarray(buffer) for buffer in buffers]
    permute_on_host(kernel, drop_remainder, arrays[:6], arrays[6:])
    return ()


def _on_host(kernel: str, drop_remainder: bool, *operands: Any) -> tuple[np.ndarray, ...]:
    """Call a kernel on copies of the operands, and return results to copy."""
    arrays = [np.ascontiguousarray(operand) for operand in operands]
    results = tuple(np.empty_like(array) for array in _PERMUTE.of_results(arrays))
    permute_on_host(kernel, drop_remainder, arrays, results)
    return results


def permute_on_host(
    kernel: str, drop_remainder: bool, operands: Sequence[np.ndarray], results: Sequence[np.ndarray]
) -> None:
    """Write the results, with a single axis of rows: (batch, n, rows) and (batch, rows)."""
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
    """Put the weights of each row in the order of keys.

    The compiled library sorts on the CPU, where XLA's sort is slow. Elsewhere XLA sorts.

    Args:
      keys: (n, *rows), signed integers; ties are ordered by location.
      weights: (n, *rows).
      ranks: (n, *rows) int32, the rank of each weight in its row.

    Returns:
      The weights, with the weight of rank k where the key of rank k is, and their ranks; (n, *rows).
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
    # By sorts alone: a TPU takes twice the memory for gathering or scattering single entries.
    axes = varying_axes((keys, weights, ranks))
    places = shard_like(jax.lax.broadcasted_iota(jnp.int32, keys.shape, 0), keys)
    keys, weights, ranks, places = mark_varying((keys, weights, ranks, places), axes)

    def sort(*operands: jax.Array) -> Any:
        return mark_varying(jax.lax.sort(operands, dimension=0, is_stable=True, num_keys=1), axes)

    _, order = sort(keys, places)
    _, values = sort(ranks, weights)
    _, new_weights, new_ranks = sort(order, values, places)
    return new_weights, new_ranks


def _reorder_by_target(
    keys: jax.Array, weights: jax.Array, ranks: jax.Array
) -> tuple[jax.Array, jax.Array]:
    operands = keys[None], ranks[None]
    operands = mark_varying(operands, varying_axes(operands))
    call = functools.partial(call_target, _REORDER, REORDER_TARGET.format(keys.dtype), ())
    new_ranks, sources = batch_calls(_REORDER, call)(*operands)
    new_weights = move_bits(lambda bits: jnp.take_along_axis(bits, sources[0], axis=0), weights)
    return new_weights, new_ranks[0]
