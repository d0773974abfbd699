"""The C++ kernel alone, compared with a slow implementation in C++, also under the sanitizers."""

import os
import pathlib
import shutil
import subprocess

import pytest
import support

SOURCE = pathlib.Path(__file__).parent / "kernel"


def run(*command):
    """Runs a command; its output is the message where it fails."""
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.mark.programs
@pytest.mark.parametrize(
    "sanitize", support.every_night(["address,undefined", "thread", ""], ["address,undefined"])
)
def test_the_kernel_alone(tmp_path, sanitize):
    """Its bits equal a search through neighbor lists, and no access is out of bounds or races."""
    if os.environ.get("OPTPERM_TEST_WITHOUT_KERNEL"):
        pytest.skip("OPTPERM_TEST_WITHOUT_KERNEL is set")
    cmake = shutil.which("cmake")
    assert cmake, "cmake is not on the PATH: pip install cmake"
    run(cmake, "-S", str(SOURCE), "-B", str(tmp_path), f"-DSANITIZE={sanitize}")
    run(cmake, "--build", str(tmp_path))
    assert run(str(tmp_path / "kernel_test")).endswith("checks passed\n")
