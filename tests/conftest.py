"""What every test runs under: eight virtual devices, and JAX at its strictest."""

import importlib.metadata
import itertools
import os
import pathlib
import tempfile

# Every program is worth keeping. `choose_cache` says where.
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


JAX_VERSION = importlib.metadata.version("jax")
KEPT = pathlib.Path(__file__).parents[1] / ".pytest_cache" / f"programs-jax-{JAX_VERSION}"


def choose_cache():
    """Choose the folder of compiled programs that all workers, and the programs they start, share.

    It is `OPTPERM_TEST_CACHE`, or a folder in the checkout, and is kept for the next run. Where it
    cannot be used this run has a temporary one.

    Returns:
      The folder, and why it is temporary if it is.
    """
    folder = pathlib.Path(os.environ.get("OPTPERM_TEST_CACHE") or KEPT)
    stamp = folder / "jax-version.txt"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not any(folder.iterdir()):
            stamp.write_text(JAX_VERSION)
        if stamp.read_text() == JAX_VERSION:
            tempfile.TemporaryFile(dir=folder).close()  # can it be written?
            return folder, ""
        reason = f"holds programs of jax {stamp.read_text()}, and this is jax {JAX_VERSION}"
    except FileNotFoundError:
        reason = "is not a folder of compiled programs"
    except OSError as error:
        reason = f"cannot be used ({error.strerror})"
    return pathlib.Path(tempfile.mkdtemp()), f"{folder} {reason}"


def pytest_configure(config):
    """Share the compiled programs: workers get the environment of the process that starts them."""
    config.temporary_cache = None
    if hasattr(config, "workerinput"):
        return
    folder, config.why_temporary = choose_cache()
    config.temporary_cache = folder if config.why_temporary else None
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
    if session.config.temporary_cache:
        shutil.rmtree(session.config.temporary_cache, ignore_errors=True)


def pytest_terminal_summary(terminalreporter):
    if terminalreporter.config.temporary_cache:
        reason = terminalreporter.config.why_temporary
        terminalreporter.write_line(f"Compiled programs were not kept: {reason}.")
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
