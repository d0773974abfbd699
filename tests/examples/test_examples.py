"""Each example runs as a user runs it: pasted into an empty folder, a program of its own."""

import importlib.util
import os
import pathlib
import re
import shutil
import subprocess
import sys

import processes
import pytest

import optperm

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"
# What each prints: words, and what holds of its decimal numbers in their order.
SHOWN = {
    "sgperm": ("rebuilt bit for bit: True", lambda accuracy: accuracy > 0.88),
    "dldr": ("P-BFGS", lambda sgd, bfgs: bfgs < 0.6 * sgd),
    "svrg": ("SVRG", lambda sgd, svrg: 1000 * svrg < sgd),
    # The deviation of Laplace, of the coefficient of texture, which is alone in its direction.
    "posterior": ("±", lambda *n: abs(n[2] - 1.42) < 0.05 and abs(n[3] - 0.23) < 0.023),
    "diloco": ("270 steps on 4 devices", lambda accuracy, *_: accuracy > 0.88),
    "sparse": (", 90% of", lambda dense, pruned: pruned > dense - 0.05),
    # Bytes per weight, and the accuracy, of AdamW and of AdamW in 8 bits.
    "less_memory": (
        "less_memory.png",
        lambda *n: n[0] > 3 * n[2] and n[1] > 0.9 and n[3] > n[1] - 0.02,
    ),
    "fit_nnx": ("epoch 30", lambda first, second, accuracy: 2 * second < first and accuracy > 0.9),
    # The loss begins at 2.3.
    "elastic": ("staleness", lambda loss, staleness: loss < 0.5 and staleness > 1),
}
# With a center, jobs and their accidents. `sites` takes arguments: test_sites.py runs it.
LONG = {"elastic": 130, "sites": 120}
RAY = [pytest.param("elastic", marks=pytest.mark.libraries)]
NO_RAY = "import sys, runpy; sys.modules['ray'] = None; runpy.run_path('elastic.py')"


@pytest.mark.programs
def test_example_is_one_screen_and_imports_no_other():
    scripts = {path.stem: path.read_text() for path in EXAMPLES.glob("*")}
    assert scripts.keys() == SHOWN.keys() | LONG.keys()
    for name, text in scripts.items():
        assert len(text.splitlines()) <= LONG.get(name, 50), name
        assert not re.search(rf"^(import|from) ({'|'.join(scripts)})\b", text, re.MULTILINE), name


def run(name, folder, *command):
    shutil.copy(EXAMPLES / f"{name}.py", folder)
    settings = {
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(pathlib.Path(optperm.__file__).parents[1]),
        "XLA_FLAGS": processes.xla_flags(),
    }
    options = {"cwd": folder, "env": os.environ | settings, "text": True, "timeout": 300}
    command = [sys.executable, "-W", "error", *(command or [f"{name}.py"])]
    return subprocess.run(command, capture_output=True, check=False, **options)


@pytest.mark.parametrize(
    "name",
    [*(pytest.param(each, marks=pytest.mark.programs) for each in SHOWN if each not in LONG), *RAY],
)
def test_example_shows_what_its_method_is_for(name, tmp_path):
    is_required = "ray" in os.environ.get("OPTPERM_LIBRARIES", "").split()
    if name in LONG and importlib.util.find_spec("ray") is None and not is_required:
        pytest.skip("ray is not installed")
    done = run(name, tmp_path)
    assert done.returncode == 0, done.stderr
    words, holds = SHOWN[name]
    (line,) = [done.stdout] if name not in LONG else re.findall("^loss .*", done.stdout, re.M)
    assert words in line
    assert holds(*map(float, re.findall(r"\d+\.\d+(?:e-?\d+)?", line))), line


@pytest.mark.programs
def test_without_ray_the_example_says_how_to_get_it(tmp_path):
    done = run("elastic", tmp_path, "-c", NO_RAY)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "elastic.py needs Ray: pip install 'optperm[elastic]'\n"
