"""What every test runs under: eight virtual devices, and JAX at its strictest."""

import itertools
import os
import pathlib

# Every program is worth keeping; compile_cache.py says where.
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

# Has to stand before JAX starts its CPU backend. Most of the time goes into compiling small programs,
# which takes a third less where machine code is not optimized and one thread makes it. XLA_FLAGS that
# are set stay.
os.environ["XLA_FLAGS"] = (
    os.environ.get(
        "XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
    )
    + " --xla_force_host_platform_device_count=8"
)

import shutil
import warnings

import compile_cache
import hypothesis
import jax
import pytest
import support

from optperm.permutation import cycles

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")

_TESTS = itertools.count(1)
hypothesis.settings.register_profile("optperm", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("optperm")

# That the compiled kernel is missing is said once, here; the tests that need it fail.
with warnings.catch_warnings():
    warnings.simplefilter("ignore", RuntimeWarning)
    cycles.available_kernels()


def pytest_configure(config):
    """Share the compiled programs: workers get the environment of the process that starts them."""
    if hasattr(config, "workerinput"):
        return
    named = os.environ.get("OPTPERM_TEST_CACHE")
    folder, config.why_temporary = compile_cache.choose(named)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(folder)
    jax.config.update("jax_compilation_cache_dir", str(folder))


def pytest_runtest_teardown(item):
    """Forgets compiled programs before a process has more memory maps than Linux allows (65,530).

    Each program takes several; where one more is refused, XLA crashes.
    """
    del item
    maps = pathlib.Path("/proc/self/maps")
    if next(_TESTS) % 50 == 0 and maps.exists() and maps.read_bytes().count(b"\n") > 30_000:
        jax.clear_caches()


def pytest_sessionfinish(session):
    if getattr(session.config, "why_temporary", None):
        shutil.rmtree(os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)


def pytest_terminal_summary(terminalreporter):
    if why := terminalreporter.config.why_temporary:
        terminalreporter.write_line(f"Compiled programs are not kept: {why}.")
    write_mesh_table(terminalreporter)


def write_mesh_table(terminalreporter):
    """Prints the table of tests/conformance/test_meshes.py, if those tests ran."""
    cells = {}
    for report in terminalreporter.getreports("passed") + terminalreporter.getreports("failed"):
        for name, value in report.user_properties:
            if name == "mesh table":
                method, *place, outcome = value
                cells.setdefault(method, {})[" ".join(place)] = outcome
    if not cells:
        return
    columns = sorted({place for row in cells.values() for place in row})
    exceptions = sorted({value for row in cells.values() for value in row.values()} - {"ok"})
    marks = {"ok": "ok", **{value: str(i) for i, value in enumerate(exceptions, 1)}}
    terminalreporter.section("sharded params, by method, mesh, cut and eager or jit")
    for number, place in enumerate(columns):
        terminalreporter.write_line(f"{chr(ord('a') + number)} = {place}")
    for number, value in enumerate(exceptions, 1):
        terminalreporter.write_line(f"{number} = {value}")
    width = max(map(len, cells))
    heads = (chr(ord("a") + number) for number in range(len(columns)))
    terminalreporter.write_line(" " * width + "".join(f"{head:>4}" for head in heads))
    for method, row in cells.items():
        marked = (marks.get(row.get(place), "-") for place in columns)
        terminalreporter.write_line(f"{method:{width}}" + "".join(f"{mark:>4}" for mark in marked))


@pytest.fixture(params=cycles.KERNELS)
def kernel(request, monkeypatch):
    """Each kernel in turn. One that is missing fails the test."""
    support.require_kernel(request.param)
    monkeypatch.setenv("OPTPERM_KERNEL", request.param)
    return request.param


@pytest.fixture
def lenient():
    """Lifts the strict promotion, for code that is not ours."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture
def x64():
    """Makes float64 the default."""
    with jax.enable_x64(True):
        yield
