"""The programs of the pages "In other libraries" and "In LLM trainers", each in a process of its own.

They need libraries that the other tests do not. One that is missing is skipped, unless the environment
variable OPTPERM_LIBRARIES names it.
"""

import importlib.util
import os
import pathlib
import re
import subprocess
import sys

import processes
import pytest

GUIDES = pathlib.Path(__file__).parents[2] / "docs" / "guides"
TRAINERS, OTHERS = (
    re.findall(r"^```python\n(.*?)^```$", (GUIDES / page).read_text("utf-8"), re.M | re.S)
    for page in ("in_llm_trainers.md", "in_other_libraries.md")
)
LIBRARIES = ("flax", "blackjax", "numpyro", "flowjax", "gpjax", "optimistix", "netket")
LIBRARIES = ("keras", *LIBRARIES)
# The last one is plain Optax.
PROGRAMS = dict(zip((*LIBRARIES, "optax"), TRAINERS + OTHERS, strict=True))


def says(program):
    return re.findall(r"^print\(.*\)  # (.*)$", program, re.M)


def test_each_library_has_a_program_that_says_what_it_prints():
    for library, program in PROGRAMS.items():
        compile(program, library, "exec")
        assert re.search(rf"^(import|from) .*\b{library}\b", program, re.M)
        assert len(says(program)) == program.count("print(") > 0
        assert "optperm." in program


@pytest.mark.parametrize(
    "library",
    [
        *(pytest.param(library, marks=pytest.mark.libraries) for library in LIBRARIES),
        pytest.param("optax", marks=pytest.mark.programs),
    ],
)
def test_a_program_prints_what_its_comments_say(library):
    is_required = library in os.environ.get("OPTPERM_LIBRARIES", "").split()
    if importlib.util.find_spec(library) is None and not is_required:
        pytest.skip(f"{library} is not installed")
    program = [sys.executable, "-c", PROGRAMS[library]]
    env = os.environ | {"XLA_FLAGS": processes.xla_flags()}
    printed = subprocess.check_output(program, text=True, env=env)
    assert printed.splitlines() == says(PROGRAMS[library])
