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
import os
import pathlib
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.buffer_callback import buffer_callback
from jax.experimental.xla_metadata import set_xla_metadata

from optperm.mapped_axes import mark_varying, varying_axes
from optperm.permutation import cycles_numpy

KERNELS = ("ffi", "callback", "numpy")
# The version of the entry points' signatures, checked against the library's.
_INTERFACE_VERSION = 1
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
      recommendation: (n, rows), floating.
      weights: (n, rows), floating.
      ranks: (n, rows) int32, the rank of each weight in its column.
      seeds: (rows, 2) uint32, the randomness of each row's partition.
      aggressiveness: () float32.
      partition_size: () int32, at least 1.
      drop_remainder: Whether a last subset that is too small sits out.

    Returns:
      The new weights and ranks, and the number of entries moved in each row, (rows,) int32.
    """
    rows = weights.shape[1]
    dtype = np.float64 if np.float64 in (weights.dtype, recommendation.dtype) else np.float32
    operands = (
        recommendation.astype(dtype).T,
        weights.astype(dtype).T,
        ranks.T,
        seeds,
        jnp.broadcast_to(aggressiveness, (rows,)),
        jnp.broadcast_to(partition_size, (rows,)),
    )
    axes = varying_axes(operands)
    operands = mark_varying(operands, axes)
    new_weights, new_ranks, moved = _dispatch(operands, axes, drop_remainder)
    # An entry that stays keeps its bits even where the kernel works in a wider dtype.
    stays = new_ranks.T == ranks
    return jnp.where(stays, weights, new_weights.T.astype(weights.dtype)), new_ranks.T, moved


def _dispatch(
    operands: tuple[jax.Array, ...], axes: frozenset[str], drop_remainder: bool
) -> tuple[jax.Array, ...]:
    kernel = chosen_kernel()
    like = [jax.typeof(x) for x in (operands[1], operands[2], operands[5])]
    host = functools.partial(_permute_on_host, kernel, drop_remainder)

    def by_ffi(*operands: jax.Array) -> tuple[jax.Array, ...]:
        # Rows lead in the shapes, so that XLA may shard them, and trail in memory, as they do in the
        # params: the transpositions around the call only rename axes.
        matrix, vector, columns = (1, 0), (0,), (0, 1)
        call = jax.ffi.ffi_call(
            _TARGET_NAMES[operands[1].dtype.name],
            tuple(like),
            vmap_method="broadcast_all",
            input_layouts=[matrix, matrix, matrix, columns, vector, vector],
            output_layouts=[matrix, matrix, vector],
        )
        # Without it XLA takes no axis as one to shard, and gathers the rows on every device.
        with set_xla_metadata(num_batch_dims="1"):
            return tuple(call(*operands, drop_remainder=np.bool_(drop_remainder)))

    def by_buffers(*operands: jax.Array) -> tuple[jax.Array, ...]:
        def fill(_: Any, outputs: Any, *inputs: Any) -> None:
            for output, result in zip(outputs, host(*inputs), strict=True):
                np.asarray(output)[...] = result

        return tuple(buffer_callback(fill, tuple(like), vmap_method="broadcast_all")(*operands))

    def by_callback(*operands: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(jax.pure_callback(host, tuple(like), *operands, vmap_method="broadcast_all"))

    def varying(call: Any) -> Any:
        # A callback's results are not marked as varying, whatever its operands are.
        return lambda *operands: mark_varying(call(*operands), axes)

    # On the CPU jax.pure_callback can hang under pmap and shard_map; a buffer callback does not.
    on_cpu = by_ffi if kernel == "ffi" else by_buffers
    return jax.lax.platform_dependent(*operands, cpu=varying(on_cpu), default=varying(by_callback))


def _permute_on_host(kernel: str, drop_remainder: bool, *operands: Any) -> tuple[np.ndarray, ...]:
    """Calls a kernel on host arrays with any number of leading batch axes."""
    arrays = [np.asarray(operand) for operand in operands]
    batch, n = arrays[1].shape[:-1], arrays[1].shape[-1]
    flat = [
        np.ascontiguousarray(array).reshape(-1, array.shape[-1])
        if index < 4
        else np.ascontiguousarray(array).reshape(-1)
        for index, array in enumerate(arrays)
    ]
    if kernel == "numpy":
        weights, ranks, moved = cycles_numpy.permute_rows(*flat, drop_remainder)
    else:
        weights, ranks = np.empty_like(flat[1]), np.empty_like(flat[2])
        moved = np.empty(len(weights), np.int32)
        outputs = (weights, ranks, moved)
        # Here a row is contiguous in memory: to the kernel, a batch of matrices with one row each.
        problem = _Problem(
            len(weights), 1, n, drop_remainder, *(array.ctypes.data for array in (*flat, *outputs))
        )
        entry = getattr(_library(), f"{_TARGET_NAMES[weights.dtype.name]}_host")
        entry.restype = ctypes.c_bool
        if not entry(ctypes.byref(problem)):
            raise ValueError(
                "the ranks in the state of optperm.sgperm are not permutations: the state is damaged"
            )
    return weights.reshape(*batch, n), ranks.reshape(*batch, n), moved.reshape(batch)


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
            return library
    return None


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
            jax.ffi.register_ffi_target_as_batch_partitionable(target)
        except Exception as error:  # noqa: BLE001  # jaxlib raises its own error types
            return str(error).splitlines()[0]
    return ""
