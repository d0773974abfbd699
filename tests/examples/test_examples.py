"""Each example runs as a user runs it: pasted into an empty folder, a program of its own."""

import os
import pathlib
import re
import shutil
import subprocess
import sys

import processes
import pytest

import optperm

pytestmark = pytest.mark.programs

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
    "less_memory": ("both", lambda *n: n[0] > 3 * n[2] > 4 * n[6] and min(n[3::2]) > n[1] - 0.02),
    "fit_nnx": ("epoch 30", lambda first, second, accuracy: 2 * second < first and accuracy > 0.9),
}


def test_example_is_one_screen_and_imports_no_other():
    scripts = {path.stem: path.read_text() for path in EXAMPLES.glob("*")}
    assert scripts.keys() == SHOWN.keys()
    for name, text in scripts.items():
        assert len(text.splitlines()) <= 50, name
        assert not re.search(rf"^(import|from) ({'|'.join(scripts)})\b", text, re.MULTILINE), name


@pytest.mark.parametrize("name", SHOWN)
def test_example_shows_what_its_method_is_for(name, tmp_path):
    shutil.copy(EXAMPLES / f"{name}.py", tmp_path)
    settings = {
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(pathlib.Path(optperm.__file__).parents[1]),
        "XLA_FLAGS": processes.xla_flags(),
    }
    command = [sys.executable, "-W", "error", f"{name}.py"]
    options = {"cwd": tmp_path, "env": os.environ | settings, "text": True, "timeout": 300}
    printed = subprocess.check_output(command, **options)
    words, holds = SHOWN[name]
    assert words in printed
    assert holds(*map(float, re.findall(r"\d+\.\d+(?:e-?\d+)?", printed))), printed
