"""Which kernel searches the cycles, and how XLA calls it: three kernels, with the same bits.

- `"ffi"`, on the CPU: XLA calls the compiled kernel, which runs on XLA's threads, without Python.
- `"callback"`, on other platforms, and on the CPU where XLA refuses the compiled handler: XLA calls
  Python, which calls the compiled kernel's C entry point, which runs on threads of its own.
- `"numpy"`, where nothing is compiled: XLA calls Python, which runs `cycles_numpy`.

The best that is available is taken; the environment variable OPTPERM_KERNEL names another. Each is
one custom call of XLA's, under one batching and one partitioning rule: every device of a mesh calls for
the rows that it holds. A call uses as many threads as the process may, or OPTPERM_NUM_THREADS.
"""

import ctypes
import functools
import importlib.metadata
import os
import pathlib
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import mlir

from optperm.contract.mapped_axes import mark_varying, varying_axes
from optperm.contract.shardings import shard_like
from optperm.permutation import cycles_numpy, tpu_calls
from optperm.permutation.row_calls import Results, Signature, batched, call_target

# Recommendation, weights, ranks, seeds, aggressiveness, partition size; new are three of them.
_PERMUTE = Signature(("matrix", "matrix", "matrix", "pair", "vector", "vector"), (1, 2, 5), True)
_REORDER = Signature(("matrix", "matrix"), (1, 1))

KERNELS = ("ffi", "callback", "numpy")
# The version of the entry points' signatures, checked against the library's.
_INTERFACE_VERSION = 2
_TARGET = "optperm_permute_rows_{}"  # of a dtype
_REORDER_TARGET = "optperm_reorder_rows_{}"
_TARGETS = (
    *map(_TARGET.format, ("float32", "float64")),
    *map(_REORDER_TARGET.format, ("int32", "int64")),
)
_LEAST = 2.0**-149  # the least positive float32


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
    if x.dtype != np.float32 or dtype != np.float64:
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
    return batched(_PERMUTE, functools.partial(_on_platform, kernel, drop_remainder))


def _on_platform(kernel: str, drop_remainder: bool, *operands: jax.Array) -> Results:
    target = _TARGET.format(operands[1].dtype)
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
    """A call of Python's, on the CPU and a GPU as the target that JAX's own callbacks call.

    These have no partitioning rule, and on the CPU `jax.pure_callback` can hang, since it hands arrays
    to JAX that the device it waits for has to copy.
    """
    del call
    module = context.module_context
    if len(module.platforms) > 1:
        raise NotImplementedError(
            f"an update that calls Python is compiled for one platform, got {module.platforms}: where "
            "optperm has its compiled kernel, export the update for the CPU alone"
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
    """Calls a kernel on buffers of the CPU: operands, and results to write."""
    arrays = [np.asarray(buffer) for buffer in buffers]
    permute_on_host(kernel, drop_remainder, arrays[:6], arrays[6:])
    return ()


def _on_host(kernel: str, drop_remainder: bool, *operands: Any) -> tuple[np.ndarray, ...]:
    """Calls a kernel on copies of operands, and returns results to copy."""
    arrays = [np.ascontiguousarray(operand) for operand in operands]
    results = tuple(np.empty_like(array) for array in _PERMUTE.of_results(arrays))
    permute_on_host(kernel, drop_remainder, arrays, results)
    return results


def permute_on_host(
    kernel: str, drop_remainder: bool, operands: Sequence[np.ndarray], results: Sequence[np.ndarray]
) -> None:
    """Fills the results, with a single axis of rows: (batch, n, rows) and (batch, rows)."""
    batch, n, rows = operands[1].shape
    if kernel == "numpy":
        permuted = cycles_numpy.permute_rows(*operands, drop_remainder=drop_remainder)
        for result, values in zip(results, permuted, strict=True):
            result[...] = values
        return
    pointers = (array.ctypes.data for array in (*operands, *results))
    problem = _Problem(batch, rows, n, drop_remainder, *pointers)
    entry = getattr(_library(), f"{_TARGET.format(operands[1].dtype)}_host")
    entry.restype = ctypes.c_bool
    if not entry(ctypes.byref(problem)):
        raise ValueError(cycles_numpy.DAMAGED)


def reorder_rows(
    keys: jax.Array, weights: jax.Array, ranks: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The weights of each row in the order of keys.

    The compiled library sorts on the CPU, where XLA's sort is slow; elsewhere, and without it, XLA does.

    Args:
      keys: (n, *rows), signed integers; ties are ordered by location.
      weights: (n, *rows).
      ranks: (n, *rows) int32, the rank of each weight in its row.

    Returns:
      The weights, that of rank k where the key of rank k is, and their ranks, both (n, *rows).
    """
    if "ffi" not in _probe()[0] or os.environ.get("OPTPERM_KERNEL", "ffi") != "ffi":
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
    call = functools.partial(call_target, _REORDER, _REORDER_TARGET.format(keys.dtype), ())
    new_ranks, sources = batched(_REORDER, call)(*operands)
    return jnp.take_along_axis(weights, sources[0], axis=0), new_ranks[0]


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
    kernels, lost = _probe()
    if lost:
        warnings.warn(lost, RuntimeWarning, stacklevel=2)
    return kernels


def _probe() -> tuple[tuple[str, ...], str]:
    """The kernels that can run here, best first, and what is lost where that is not all of them."""
    if _library() is None:
        return ("numpy",), (
            "optperm runs without its compiled kernel: permuting weights is thousands of times slower, "
            "with the same results. To get it back, make sure that a C++17 compiler is on the PATH and "
            "install again with: pip install --force-reinstall --no-deps --no-cache-dir optperm"
        )
    refused = _register()
    if refused:
        return ("callback", "numpy"), (
            "optperm calls its compiled kernel by a host callback, which is slower, with the same "
            f"results: XLA's direct call is not available ({refused}). To get it back, install "
            "optperm again beside a supported jaxlib and a C++17 compiler."
        )
    return KERNELS, ""


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


@functools.cache
def _register() -> str:
    """Registers the compiled handlers with XLA; says why not where that fails."""
    library = _library()
    for target in _TARGETS:
        handler = getattr(library, target, None)
        if handler is None:
            return "it was built without XLA's headers"
        try:
            jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(handler), platform="cpu")
        except Exception as error:  # jaxlib raises its own error types
            return str(error).splitlines()[0]
    return ""
