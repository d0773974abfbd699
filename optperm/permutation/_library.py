"""The compiled library: find it, load it, register its handlers with XLA, and choose a kernel.

Three kernels search cycles, with bit-identical results:

- `"ffi"`, on the CPU: XLA calls the compiled kernel without Python, and the kernel uses XLA's threads.
- `"callback"`, on other platforms, and on the CPU if the library has no handler that XLA accepts: XLA
  calls Python, and Python calls the C entry point of the compiled kernel, which runs on its own threads.
- `"numpy"`, without a compiled library: XLA calls Python, which runs `cycles_numpy`.

The fastest available kernel runs, unless the environment variable OPTPERM_KERNEL names another kernel. A
call uses at most OPTPERM_NUM_THREADS threads, by default one per processor that the process may use.
"""

import ctypes
import functools
import importlib.metadata
import os
import pathlib
import warnings

import jax

KERNELS = ("ffi", "callback", "numpy")
PERMUTE_TARGET = "optperm_permute_rows_{}"  # of a dtype
REORDER_TARGET = "optperm_reorder_rows_{}"
# The version of the entry points' signatures, checked against the library's.
_INTERFACE_VERSION = 2
_TARGETS = (
    *map(PERMUTE_TARGET.format, ("float32", "float64")),
    *map(REORDER_TARGET.format, ("int32", "int64")),
)


def choose_kernel() -> str:
    """Return the kernel to run: the kernel in OPTPERM_KERNEL, or else the fastest available kernel.

    Raises:
      ValueError: If the kernel in OPTPERM_KERNEL is not available.
    """
    available = available_kernels()
    wanted = os.environ.get("OPTPERM_KERNEL", available[0])
    if wanted not in available:
        raise ValueError(f"OPTPERM_KERNEL must be one of {available} here, got {wanted!r}.")
    return wanted


@functools.cache
def available_kernels() -> tuple[str, ...]:
    """Return the available kernels, fastest first; warn once if the fastest kernel is missing."""
    kernels, lost = find_kernels()
    if lost:
        warnings.warn(lost, RuntimeWarning, stacklevel=2)
    return kernels


def find_kernels() -> tuple[tuple[str, ...], str]:
    """Return the available kernels, fastest first, and a message if the fastest kernel is missing."""
    if load_library() is None:
        return ("numpy",), (
            "optperm permutes weights without its compiled kernel, which is thousands of times faster. "
            "To fix this, install optperm again with a C++17 compiler: pip install --force-reinstall "
            "--no-deps --no-cache-dir optperm"
        )
    refused = _register_handlers()
    if refused:
        return ("callback", "numpy"), (
            f"optperm calls its compiled kernel through Python, which is slower: {refused}. To fix "
            "this, install optperm again with a supported jaxlib and a C++17 compiler."
        )
    return KERNELS, ""


@functools.cache
def load_library() -> ctypes.CDLL | None:
    """Return the compiled library, or None without a library that has this version's entry points."""
    for path in _find_paths():
        if not path.is_file():
            continue
        library = ctypes.CDLL(str(path))
        if library.optperm_interface_version() == _INTERFACE_VERSION:
            library.optperm_set_max_threads(ctypes.c_int64(count_threads()))
            return library
    return None


def count_threads() -> int:
    """Return the maximum number of threads for one call of the compiled kernel."""
    if "OPTPERM_NUM_THREADS" not in os.environ:
        affinity = getattr(os, "sched_getaffinity", None)  # not on every system
        return len(affinity(0)) if affinity else os.cpu_count() or 1
    given = os.environ["OPTPERM_NUM_THREADS"]
    if not given.isdecimal() or int(given) < 1:
        raise ValueError(f"OPTPERM_NUM_THREADS must be a positive integer, got {given!r}.")
    return int(given)


def _find_paths() -> list[pathlib.Path]:
    """Return the possible paths of the library: next to this file, or in the installed package.

    The second path is for code that runs from a checkout of the sources with optperm installed.
    """
    name = "cycles.dll" if os.name == "nt" else "cycles.so"
    paths = [pathlib.Path(__file__).parent / "kernel" / name]
    try:
        installed = importlib.metadata.distribution("optperm")
    except importlib.metadata.PackageNotFoundError:
        return paths
    return [*paths, pathlib.Path(str(installed.locate_file(f"optperm/permutation/kernel/{name}")))]


@functools.cache
def _register_handlers() -> str:
    """Register the compiled handlers with XLA; return the reason if this fails, otherwise ""."""
    library = load_library()
    for target in _TARGETS:
        handler = getattr(library, target, None)
        if handler is None:
            return "the kernel was built without XLA's headers"
        try:
            jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(handler), platform="cpu")
        except Exception as error:  # jaxlib raises its own error types
            return str(error).splitlines()[0]
    return ""
