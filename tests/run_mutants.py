"""Run the mutants of mutants.toml: each is one mistake in the package, which a test has to catch.

A mutant is put into a copy of the working tree, and the tests that it names run there first, then the
other tests of its room. The exit status is 1 if a mutant survives or cannot be run.

Run from the repository root: python tests/run_mutants.py [ROOM or FILE ...] [--jobs N]
"""

import argparse
import concurrent.futures
import contextlib
import os
import pathlib
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib

ROOT = pathlib.Path(__file__).parents[1]
FOLDERS = ("optperm", "tests", "benchmarks", "docs", "examples")
# The finder of an editable installation would import the package that is not mutated.
PYTEST = (
    "import sys; "
    "sys.meta_path[:] = [f for f in sys.meta_path if 'Redirecting' not in type(f).__name__]; "
    "import optperm, pytest; "
    "assert optperm.__file__.startswith(sys.argv[1]), optperm.__file__; "
    "sys.exit(pytest.main(sys.argv[2:]))"
)
LIMIT = 900  # seconds, after which a run of pytest is ended
FAILED, HANGS = 1, -1


def tests_of(mutant):
    """Return the tests of a mutant's subpackage, or of its file in a lower layer."""
    room = mutant["file"].partition("/")[0].removesuffix(".py").lstrip("_")
    return f"tests/{room}" if (ROOT / "tests" / room).is_dir() else f"tests/test_{room}.py"


def find_faults(mutants):
    """Return what the list and the tree do not agree in: lines that are not there once, and tests."""
    for mutant in mutants:
        text = (ROOT / "optperm" / mutant["file"]).read_text(encoding="utf-8")
        if text.count(mutant["line"]) != 1:
            yield f"{mutant['file']} must have this line once: {mutant['line']}"
        for test in mutant.get("tests", []):
            path, _, name = test.partition("::")
            file = ROOT / "tests" / path
            if not file.exists() or (name and f"def {name}(" not in file.read_text("utf-8")):
                yield f"there is no test {test}, which has to catch {mutant['line']}"


def run_pytest(copy, tests):
    """Return the exit status of pytest (`HANGS` after the limit) and its output."""
    cache = os.environ.get("OPTPERM_TEST_CACHE") or str(ROOT / ".pytest_cache" / "mutants")
    settings = {"PYTHONPATH": str(copy), "OPTPERM_TEST_LIMIT": "600", "COLUMNS": "200"}
    options = ["-x", "-q", "--tb=short", "-p", "no:cacheprovider", "-p", "no:xdist", *tests]
    try:
        done = subprocess.run(
            [sys.executable, "-c", PYTEST, str(copy), *options],
            cwd=copy,
            env=os.environ | settings | {"OPTPERM_TEST_CACHE": cache},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return HANGS, ""
    return done.returncode, done.stdout


def try_mutant(copy, mutant):
    """Return what became of a mutant, and the tests that caught it."""
    file, start = copy / "optperm" / mutant["file"], time.perf_counter()
    original = ROOT / "optperm" / mutant["file"]
    stages = [[f"tests/{test}" for test in mutant.get("tests", [])], [tests_of(mutant)]]
    text = original.read_text(encoding="utf-8").replace(mutant["line"], mutant["becomes"])
    file.write_text(text, encoding="utf-8")
    try:
        for tests in filter(None, stages):
            status, output = run_pytest(copy, tests)
            seconds = f"{time.perf_counter() - start:.0f} s"
            if status == HANGS:
                return f"caught by the time limit, {seconds}", []
            if status == FAILED:
                found = re.search(r"^(?:FAILED|ERROR) (\S+?::\w+)(.*)", output, re.MULTILINE)
                test, why = found.groups() if found else ("no test", output[-2000:])
                return f"caught by {test}, {seconds}{why}", [test]
            if status:
                return f"ERROR, pytest ended with {status}:\n{output[-2000:]}", []
        return f"SURVIVED, {seconds}", []
    finally:
        shutil.copy2(original, file)


def make_copy(folder, number):
    """Copy what tests need of the working tree, for one worker."""
    copy = pathlib.Path(folder).resolve() / str(number)
    for name in FOLDERS:
        ignored = shutil.ignore_patterns("__pycache__", ".*")
        shutil.copytree(ROOT / name, copy / name, ignore=ignored)
    for name in ("pyproject.toml", "README.md"):
        shutil.copy2(ROOT / name, copy / name)
    return copy


def main():
    """Run the mutants that the arguments choose, and print what became of each."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("chosen", nargs="*", help="rooms, or parts of the paths of files (all)")
    parser.add_argument("--jobs", type=int, default=2, help="mutants at a time (2)")
    given = parser.parse_args()
    listed = pathlib.Path(__file__).with_name("mutants.toml").read_text(encoding="utf-8")
    mutants = tomllib.loads(listed)["mutant"]
    if given.chosen:
        mutants = [each for each in mutants if any(part in each["file"] for part in given.chosen)]
    if faults := "\n".join(find_faults(mutants)):
        parser.error(faults)
    caught, catching = 0, set()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        free = queue.SimpleQueue()
        for number in range(given.jobs):
            free.put(make_copy(folder, number))

        def take(mutant):
            copy = free.get()
            try:
                return try_mutant(copy, mutant)
            finally:
                free.put(copy)

        pool = stack.enter_context(concurrent.futures.ThreadPoolExecutor(given.jobs))
        for mutant, (says, tests) in zip(mutants, pool.map(take, mutants), strict=True):
            caught += says.startswith("caught")
            catching.update(tests)
            print(f"{mutant['file']}: {mutant['line'].strip()}\n  {says}", flush=True)
        # A test that fails without a mutant has caught nothing.
        status, output = run_pytest(free.get(), sorted(catching)) if catching else (0, "")
    if status:
        print(f"Without a mutant the tests that caught them ended with {status}:\n{output[-4000:]}")
    print(f"{caught} of {len(mutants)} mutants are caught.")
    return int(bool(status) or caught < len(mutants))


if __name__ == "__main__":
    sys.exit(main())
