"""What every test runs under: eight virtual devices, and JAX at its strictest."""

import collections
import ctypes
import functools
import itertools
import os
import pathlib

# The tests need several devices, and the sums of a CPU: a GPU multiplies float32 at a lower precision.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

# Every program is worth keeping; `pytest_configure` says where.
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

# Has to stand before JAX starts its CPU backend. Most of the time goes into compiling small programs,
# which takes a third less where machine code is not optimized and one thread makes it. Flags that are
# set stay, such as --xla_cpu_max_isa=AVX2.
os.environ["XLA_FLAGS"] = " ".join(
    {
        each.partition("=")[0]: each
        for each in [
            "--xla_backend_optimization_level=0",
            "--xla_cpu_parallel_codegen_split_count=1",
            *os.environ.get("XLA_FLAGS", "").split(),
            "--xla_force_host_platform_device_count=8",
        ]
    }.values()
)

import shutil
import signal
import tempfile
import time
import warnings

import chex
import hypothesis
import jax
import pytest
import support

from optperm.permutation import _library as library

jax.config.update("jax_enable_x64", False)  # in any environment

# What a shell starts in its background ignores Ctrl-C, which some tests raise.
signal.signal(signal.SIGINT, signal.default_int_handler)

# CI sets a limit in seconds of processor time for a test of the default tier; without it, a slow machine
# fails nothing. The markers leave a test out of that tier.
try:
    LIMIT = float(os.environ.get("OPTPERM_TEST_LIMIT") or "inf")
except ValueError as error:
    raise pytest.UsageError(f"OPTPERM_TEST_LIMIT is a number of seconds: {error}.") from None
TIERS = ("entries", "programs", "slow", "exhaustive")
STARTED = pytest.StashKey[float]()
hypothesis.settings.register_profile("optperm", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("optperm")

# That the compiled kernel is missing is said once, here; the tests that need it fail.
with warnings.catch_warnings():
    warnings.simplefilter("ignore", RuntimeWarning)
    library.available_kernels()


def pytest_addoption(parser):
    says = "run what all methods share for this entry of tests/transformations.py, or its factory"
    parser.addoption("--entry", action="append", default=[], metavar="NAME", help=says)
    parser.addoption("--all-entries", action="store_true", help="the same for all of them")
    says = "list the programs that tests compile, their seconds, and the N most expensive tests"
    parser.addoption("--programs", type=int, default=0, metavar="N", help=says)


class ForAll:
    """What holds for the examples of docstrings too, which lie outside of this folder."""

    def __init__(self):
        self._tests, self._limit = itertools.count(1), 1e9

    def pytest_runtest_setup(self, item):
        """Choose a device for an example: `fit` warns of devices that stay idle."""
        if isinstance(item, pytest.DoctestItem):
            jax.config.update("jax_default_device", jax.devices()[0])

    def pytest_runtest_teardown(self, item):
        """Forget compiled programs before they take too much memory, or too many maps of it.

        Linux allows 65,530 maps and a program takes several; where one more is refused, XLA crashes.
        """
        if isinstance(item, pytest.DoctestItem):
            jax.config.update("jax_default_device", None)
        process = pathlib.Path("/proc/self")
        if next(self._tests) % 5 or not (process / "statm").exists():
            return
        maps = (process / "maps").read_bytes().count(b"\n")
        if _resident(process) > self._limit or maps > 30_000:
            jax.clear_caches()
            ctypes.CDLL(None).malloc_trim(0)  # the C library keeps what is freed
            # What is left must not make each test forget what the next one needs.
            self._limit = max(1e9, _resident(process) + 0.2e9)


class Programs:
    """Lists the most expensive tests and what they compile, for the option `--programs`."""

    def __init__(self, number):
        self.number, self.counts, self.tests = number, collections.Counter(), {}
        jax.monitoring.register_event_duration_secs_listener(self.count)

    def count(self, event, seconds, **_):
        """Count a program that XLA compiles, and the seconds in which it is lowered and compiled."""
        if event.endswith(("/jaxpr_to_mlir_module_duration", "/backend_compile_duration")):
            self.counts["programs"] += "backend" in event
            self.counts["compiling"] += seconds

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self):
        self.counts = collections.Counter(processor=-time.process_time())

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, call):
        """Put the counts into the report, which a worker sends to the process that prints."""
        report = yield
        if call.when == "teardown":
            self.counts["processor"] += time.process_time()
            report.user_properties.append(("compiled", dict(self.counts)))
        return report

    def pytest_runtest_logreport(self, report):
        if report.when == "teardown":
            self.tests[report.nodeid] = collections.Counter(*dict(report.user_properties).values())

    def pytest_terminal_summary(self, terminalreporter):
        """Print the sums over all tests, then the tests with most seconds of the processor."""
        total = sum(self.tests.values(), collections.Counter())
        worst = sorted(self.tests.items(), key=lambda test: -test[1]["processor"])[: self.number]
        terminalreporter.section("programs, seconds of compiling, seconds of the processor")
        for name, found in [("all tests", total), *worst]:
            numbers = f"{found['programs']:6} {found['compiling']:8.2f} {found['processor']:8.2f}"
            terminalreporter.write_line(f"{numbers}  {name}")


def _resident(process):
    """Return the bytes of memory that a process occupies."""
    return int((process / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def pytest_configure(config):
    """Share the compiled programs: workers get the environment of the process that starts them.

    They are kept in the folder that is named, or in one in the checkout, which git ignores.
    """
    # The hooks of this file are for the tests in this folder; hooks of a plugin are for the package too.
    config.pluginmanager.register(ForAll())
    if config.option.programs:
        config.pluginmanager.register(Programs(config.option.programs))
    if hasattr(config, "workerinput"):
        return
    default = f"{config.rootpath}/.pytest_cache/programs-jax-{jax.__version__}"
    folder = pathlib.Path(os.environ.get("OPTPERM_TEST_CACHE") or default).expanduser().absolute()
    config.why_temporary = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        config.why_temporary = f"{folder} cannot be written ({error.strerror})"
        folder = tempfile.mkdtemp()
        config.add_cleanup(functools.partial(shutil.rmtree, folder, ignore_errors=True))
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(folder)
    jax.config.update("jax_compilation_cache_dir", str(folder))


def pytest_generate_tests(metafunc):
    """Run a test that takes `ours` for each entry of the registry.

    Those that are neither in `SPANNING`, or named by the marker `spans`, nor asked for by an option are
    marked `entries`.
    """
    if "ours" not in metafunc.fixturenames:
        return
    # What it builds is compiled, which has to wait until the folder of programs is chosen.
    from transformations import SPANNING, TRANSFORMATIONS  # noqa: PLC0415

    option = metafunc.config.option
    asked = {each: {each.name, each.factory.__name__} & {*option.entry} for each in TRANSFORMATIONS}
    if unknown := {*option.entry}.difference(*asked.values()):
        raise pytest.UsageError(f"no entry of tests/transformations.py is {', '.join(unknown)}")
    marker = metafunc.definition.get_closest_marker("spans")
    spanning = marker.args if marker else SPANNING
    usual = [each for each in asked if option.all_entries or asked[each] or each.name in spanning]
    cells = support.every_night(TRANSFORMATIONS, usual, mark=pytest.mark.entries)
    metafunc.parametrize("ours", cells, ids=str)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    item.stash[STARTED] = time.process_time()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Fail a test of the default tier that costs more than `LIMIT` seconds of processor time.

    Fixtures count, children do not. Unlike time on the wall it hardly depends on what else runs.
    """
    report = yield
    seconds = time.process_time() - item.stash[STARTED]
    is_default = not any(item.get_closest_marker(tier) for tier in TIERS)
    if call.when == "teardown" and report.passed and is_default and seconds > LIMIT:
        report.outcome = "failed"
        report.longrepr = (
            f"{item.nodeid} took {seconds:.1f} s of processor time, and a test of the default tier "
            f"may take {LIMIT:g} s (OPTPERM_TEST_LIMIT): make it smaller, or mark it for another tier."
        )
    return report


def pytest_terminal_summary(terminalreporter):
    if why := terminalreporter.config.why_temporary:
        terminalreporter.write_line(f"Compiled programs are not kept: {why}.")


@pytest.fixture(params=library.KERNELS)
def kernel(request, monkeypatch):
    """Each kernel in turn. One that is missing fails the test."""
    support.require_kernel(request.param)
    monkeypatch.setenv("OPTPERM_KERNEL", request.param)
    return request.param


@pytest.fixture
def lenient():
    """Allows promotion, for code that is not ours."""


@pytest.fixture(autouse=True)
def _strict(request):
    """Raise where a shape or dtype is promoted, unless optimizers of Optax are in a transformation.

    The examples of docstrings run as users' programs do."""
    chex.clear_trace_counter()  # of `chex.assert_max_traces`
    names = request.fixturenames
    if "lenient" in names or ("ours" in names and request.getfixturevalue("ours").lenient):
        dtypes, ranks = "standard", "allow"
    else:
        dtypes, ranks = "strict", "raise"
    with jax.numpy_dtype_promotion(dtypes), jax.numpy_rank_promotion(ranks):
        yield


@pytest.fixture
def one_device():
    """The first of the eight devices is chosen, as `fit` warns of devices that stay idle."""
    jax.config.update("jax_default_device", jax.devices()[0])
    yield
    jax.config.update("jax_default_device", None)


@pytest.fixture
def x64():
    """Makes float64 the default."""
    with jax.enable_x64(True):
        yield
