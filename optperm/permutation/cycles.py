"""Which kernel searches the cycles, and how JAX calls it.

There are three ways to the same bits:

- `"ffi"`: the compiled kernel as a custom host call of XLA, on the CPU;
- `"callback"`: the compiled kernel called by its C entry point from a host callback, on other platforms
  and where XLA refuses the compiled handler;
- `"numpy"`: `cycles_numpy` from a host callback, where nothing is compiled.

The best that is available is taken. The environment variable OPTPERM_KERNEL names another.
"""

import ctypes
import functools
import importlib.metadata
import math
import os
import pathlib
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.buffer_callback import buffer_callback
from jax.experimental.custom_partitioning import (
    ArrayMapping,
    SdyShardingRule,
    custom_partitioning,
)
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from optperm.contract.mapped_axes import mark_varying, varying_axes
from optperm.permutation import cycles_numpy

Results = tuple[jax.Array, ...]

KERNELS = ("ffi", "callback", "numpy")
# The version of the entry points' signatures, checked against the library's.
_INTERFACE_VERSION = 2
_LEAST = 2.0**-149  # the least positive float32
_TARGET_NAMES = {"float32": "optperm_permute_rows_f32", "float64": "optperm_permute_rows_f64"}


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
    """Permutes each weight vector once, along the cycles that its recommendation asks for.

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
        _widened(recommendation, dtype)[None],
        _widened(weights, dtype)[None],
        ranks[None],
        seeds[None],
        jnp.broadcast_to(aggressiveness, (1, *weights.shape[1:])),
        jnp.broadcast_to(partition_size, (1, *weights.shape[1:])),
    )
    operands = mark_varying(operands, varying_axes(operands))
    results = _batched(chosen_kernel(), drop_remainder)(*operands)
    new_weights, new_ranks, moved = (result[0] for result in results)
    if dtype != weights.dtype:
        # The bits of an entry that stays need not survive the kernel's wider dtype: NaNs may not.
        new_weights = jnp.where(new_ranks == ranks, weights, _narrowed(new_weights, weights.dtype))
    return new_weights, new_ranks, moved


def _widened(x: jax.Array, dtype: Any) -> jax.Array:
    """The same numbers in float32 or float64; a plain conversion may take subnormal ones for zero."""
    if x.dtype == jnp.bfloat16:  # the upper half of a float32
        upper = jax.lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.uint32)
        x = jax.lax.bitcast_convert_type(upper << 16, jnp.float32)
    if (x.dtype, dtype) != (np.float32, np.float64):
        return x.astype(dtype)
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    magnitude = bits & 0x7FFFFFFF
    subnormal = jnp.copysign(magnitude.astype(dtype) * _LEAST, bits.astype(dtype))
    return jnp.where(magnitude < 0x00800000, subnormal, x.astype(dtype))


def _narrowed(x: jax.Array, dtype: Any) -> jax.Array:
    """Undoes `_widened`, for numbers that are finite."""
    if x.dtype == np.float64 and dtype != np.float16:
        magnitude = (jnp.abs(x) / _LEAST).astype(jnp.int32)
        subnormal = jnp.where(jnp.signbit(x), magnitude | jnp.int32(-(2**31)), magnitude)
        subnormal = jax.lax.bitcast_convert_type(subnormal, jnp.float32)
        x = jnp.where(jnp.abs(x) < 2.0**-126, subnormal, x.astype(jnp.float32))
    if dtype == jnp.bfloat16:
        upper = jax.lax.bitcast_convert_type(x, jnp.uint32) >> 16
        return jax.lax.bitcast_convert_type(upper.astype(jnp.uint16), jnp.bfloat16)
    return x.astype(dtype)


@functools.cache
def _batched(kernel: str, drop_remainder: bool) -> Callable[..., Results]:
    """The kernel on operands with a leading batch axis, which `jax.vmap` makes larger."""
    permute = functools.partial(_on_platform, kernel, drop_remainder)
    permute_shards = jax.jit(functools.partial(_on_shards, permute))

    @jax.custom_batching.custom_vmap
    def call(*operands: jax.Array) -> Results:
        axis_types = set(jax.typeof(operands[1]).sharding.mesh.axis_types)
        if AxisType.Explicit in axis_types or axis_types == {AxisType.Manual, AxisType.Auto}:
            return permute_shards(*operands)
        return permute(*operands)

    @call.def_vmap
    def batch(size: int, is_batched: list[bool], *operands: jax.Array) -> tuple[Results, Any]:
        merged = [
            (x if b else jnp.broadcast_to(x, (size, *x.shape))).reshape(-1, *x.shape[1 + b :])
            for x, b in zip(operands, is_batched, strict=True)
        ]
        results = tuple(x.reshape(size, -1, *x.shape[1:]) for x in call(*merged))
        return results, (True, True, True)

    return call


def _on_shards(function: Callable[..., Results], *operands: jax.Array) -> Results:
    """The function on each device of a mesh, for the rows that this device holds.

    Where the mesh's axes are explicit it is known which rows these are; over the others each device
    gets all of them.
    """
    shardings = [jax.typeof(operand).sharding for operand in operands]
    mesh, (_, _, *rows) = shardings[1].mesh, shardings[1].spec
    # Of a batch only some operands may have been spread.
    batch = next((sharding.spec[0] for sharding in shardings if sharding.spec[0]), None)
    specs = tuple(P(*axes) for axes in _operands_axes(batch, None, rows, None))
    spread = (
        operand
        if sharding.spec == spec
        else jax.sharding.reshard(operand, NamedSharding(mesh, spec))
        for operand, sharding, spec in zip(operands, shardings, specs, strict=True)
    )
    on_device = jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=_of_results(specs))
    return on_device(*spread)


def _on_platform(kernel: str, drop_remainder: bool, *operands: jax.Array) -> Results:
    on_cpu = _by_ffi if kernel == "ffi" else _by_buffers
    return jax.lax.platform_dependent(
        *operands,
        cpu=functools.partial(on_cpu, kernel, drop_remainder),
        default=functools.partial(_by_callback, kernel, drop_remainder),
    )


def _operands_axes(
    batch: Any, n: Any, rows: Sequence[Any], seed: Any
) -> tuple[tuple[Any, ...], ...]:
    """What is said of the axes of a batch of operands, in the order of `permute_rows`."""
    matrix, vector = (batch, n, *rows), (batch, *rows)
    return (matrix, matrix, matrix, (*vector, seed), vector, vector)


def _of_results(of_operands: Sequence[Any]) -> tuple[Any, Any, Any]:
    """New weights, new ranks and counts are like the weights, the ranks and the partition sizes."""
    return of_operands[1], of_operands[2], of_operands[5]


def _result_types(operands: Sequence[jax.Array]) -> Results:
    return _of_results([jax.typeof(operand) for operand in operands])


def _on_flat_rows(function: Callable[..., Any], *operands: Any) -> tuple[Any, ...]:
    """The function of operands with a single axis of rows, as the kernels have them."""
    batch, n, *rows = operands[1].shape
    shapes = _operands_axes(batch, n, [math.prod(rows)], 2)
    results = function(*(x.reshape(shape) for x, shape in zip(operands, shapes, strict=True)))
    likes = _of_results(operands)
    return tuple(x.reshape(like.shape) for x, like in zip(results, likes, strict=True))


def _by_ffi(kernel: str, drop_remainder: bool, *operands: jax.Array) -> Results:
    del kernel
    return _partitioned_ffi(*operands, drop_remainder)


@functools.partial(custom_partitioning, static_argnums=(6,))
def _partitioned_ffi(*operands: Any) -> Results:
    *arrays, drop_remainder = operands

    def call(*flat: jax.Array) -> Sequence[jax.Array]:
        target = jax.ffi.ffi_call(_TARGET_NAMES[flat[1].dtype.name], _result_types(flat))
        return target(*flat, drop_remainder=np.bool_(drop_remainder))

    return _on_flat_rows(call, *arrays)


def _partition(drop_remainder: bool, mesh: Any, operands: Any, results: Any) -> Any:
    """Leaves each device the rows that it holds; a row itself is never cut."""
    del results
    batch, _, *rows = operands[1].sharding.spec
    shardings = tuple(
        NamedSharding(mesh, P(*axes)) for axes in _operands_axes(batch, None, rows, None)
    )

    def on_one_device(*local: jax.Array) -> Results:
        return _partitioned_ffi.fun(*local, drop_remainder)

    return mesh, on_one_device, _of_results(shardings), shardings


def _sharding_rule(
    drop_remainder: bool, mesh: Any, operands: Sequence[Any], results: Any
) -> SdyShardingRule:
    del drop_remainder, mesh, results
    rows = [f"row{axis}" for axis in range(operands[5].rank - 1)]
    axes = tuple(ArrayMapping(*names) for names in _operands_axes("batch", "n", rows, "seed"))
    return SdyShardingRule(axes, _of_results(axes), need_replication_factors=("n", "seed"))


_partitioned_ffi.def_partition(_partition, sharding_rule=_sharding_rule)


def _by_buffers(kernel: str, drop_remainder: bool, *operands: jax.Array) -> Results:
    def fill(_: Any, outputs: Any, *inputs: Any) -> None:
        results = _on_host(kernel, drop_remainder, *inputs)
        for output, result in zip(outputs, results, strict=True):
            np.asarray(output)[...] = result

    # On the CPU jax.pure_callback can hang under pmap and shard_map; this does not.
    results = buffer_callback(fill, _result_types(operands))(*operands)
    return mark_varying(tuple(results), varying_axes(operands))


def _by_callback(kernel: str, drop_remainder: bool, *operands: jax.Array) -> Results:
    host = functools.partial(_on_host, kernel, drop_remainder)
    results = jax.pure_callback(host, _result_types(operands), *operands)
    return mark_varying(tuple(results), varying_axes(operands))


def _on_host(kernel: str, drop_remainder: bool, *operands: Any) -> tuple[np.ndarray, ...]:
    """Calls a kernel on host arrays."""
    arrays = [np.ascontiguousarray(operand) for operand in operands]
    permute = cycles_numpy.permute_rows if kernel == "numpy" else _permute_by_library
    return _on_flat_rows(functools.partial(permute, drop_remainder=drop_remainder), *arrays)


def _permute_by_library(*arrays: np.ndarray, drop_remainder: bool) -> tuple[np.ndarray, ...]:
    """Calls the compiled kernel by its C entry point: (batch, n, rows) and (batch, rows)."""
    _, weights, ranks, _, _, partition_size = arrays
    outputs = np.empty_like(weights), np.empty_like(ranks), np.empty_like(partition_size)
    batch, n, rows = weights.shape
    pointers = (array.ctypes.data for array in (*arrays, *outputs))
    problem = _Problem(batch, rows, n, drop_remainder, *pointers)
    entry = getattr(_library(), f"{_TARGET_NAMES[weights.dtype.name]}_host")
    entry.restype = ctypes.c_bool
    if not entry(ctypes.byref(problem)):
        raise ValueError(cycles_numpy.DAMAGED)
    return outputs


def chosen_kernel() -> str:
    """The kernel that runs: the one OPTPERM_KERNEL names, or the best available.

    Raises:
      ValueError: If OPTPERM_KERNEL names no kernel.
      RuntimeError: If it names one that is not available.
    """
    available = available_kernels()
    wanted = os.environ.get("OPTPERM_KERNEL", available[0])
    if wanted not in KERNELS:
        raise ValueError(f"OPTPERM_KERNEL must be one of {', '.join(KERNELS)}, got {wanted!r}.")
    if wanted not in available:
        raise RuntimeError(
            f"OPTPERM_KERNEL asks for the kernel {wanted!r}; available here: {', '.join(available)}."
        )
    return wanted


@functools.cache
def available_kernels() -> tuple[str, ...]:
    """The kernels that can run here, best first. Warns, once, if the best of all is not among them."""
    if _library() is None:
        warnings.warn(
            "optperm runs without its compiled kernel: permuting weights is thousands of times slower, "
            "with the same results. To get it back, make sure that a C++17 compiler is on the PATH and "
            "install again with: pip install --force-reinstall --no-deps --no-cache-dir optperm",
            RuntimeWarning,
            stacklevel=2,
        )
        return ("numpy",)
    refused = _register()
    if refused:
        warnings.warn(
            "optperm calls its compiled kernel by a host callback, which is slower, with the same "
            f"results: XLA's direct call is not available ({refused}). To get it back, install "
            "optperm again beside a supported jaxlib and a C++17 compiler.",
            RuntimeWarning,
            stacklevel=2,
        )
        return ("callback", "numpy")
    return KERNELS


@functools.cache
def _library() -> ctypes.CDLL | None:
    for path in _library_paths():
        if not path.is_file():
            continue
        library = ctypes.CDLL(str(path))
        if library.optperm_interface_version() == _INTERFACE_VERSION:
            library.optperm_set_max_threads(ctypes.c_int64(_max_threads()))
            return library
    return None


def _max_threads() -> int:
    """How many threads a call of the compiled kernel may use, those of other calls not counted."""
    if "OPTPERM_NUM_THREADS" not in os.environ:
        affinity = getattr(os, "sched_getaffinity", None)  # not on every system
        return len(affinity(0)) if affinity else os.cpu_count() or 1
    given = os.environ["OPTPERM_NUM_THREADS"]
    if not given.isdecimal() or int(given) < 1:
        raise ValueError(f"OPTPERM_NUM_THREADS must be a positive integer, got {given!r}.")
    return int(given)


def _library_paths() -> list[pathlib.Path]:
    """Where the library may be: beside this file, or where the installed package has it.

    The second is for code that runs from a checkout of the sources with optperm installed.
    """
    name = "cycles.dll" if os.name == "nt" else "cycles.so"
    paths = [pathlib.Path(__file__).parent / "kernel" / name]
    try:
        installed = importlib.metadata.distribution("optperm")
    except importlib.metadata.PackageNotFoundError:
        return paths
    return [*paths, pathlib.Path(str(installed.locate_file(f"optperm/permutation/kernel/{name}")))]


def _register() -> str:
    """Registers the compiled handlers with XLA; says why not where that fails."""
    library = _library()
    for target in _TARGET_NAMES.values():
        handler = getattr(library, target, None)
        if handler is None:
            return "it was built without XLA's headers"
        try:
            jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(handler), platform="cpu")
        except Exception as error:  # jaxlib raises its own error types
            return str(error).splitlines()[0]
    return ""
