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


def run(name, folder):
    """What the example prints."""
    shutil.copy(EXAMPLES / name, folder)
    settings = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(pathlib.Path(optperm.__file__).parents[1]),
        "XLA_FLAGS": processes.xla_flags(),
    }
    ended = subprocess.run(
        [sys.executable, "-W", "error", name],
        cwd=folder,
        env=settings,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def numbers(text):
    """The decimal numbers of a text."""
    return [float(number) for number in re.findall(r"\d+\.\d+(?:e-?\d+)?", text)]


def test_each_is_one_screen_and_imports_no_other():
    scripts = {path.stem: path.read_text() for path in EXAMPLES.glob("*")}
    assert len(scripts) == 8
    for name, text in scripts.items():
        assert len(text.splitlines()) <= 50, name
        assert not re.search(rf"^(import|from) ({'|'.join(scripts)})\b", text, re.MULTILINE), name


def test_sgperm_learns_and_is_rebuilt_from_its_permutation(tmp_path):
    first, last = run("sgperm.py", tmp_path).splitlines()
    assert numbers(first)[0] > 0.88
    assert last.endswith("True")


def test_dldr_halves_the_loss_of_sgd(tmp_path):
    sgd, bfgs = numbers(run("dldr.py", tmp_path))
    assert bfgs < 0.6 * sgd


def test_svrg_goes_to_the_optimum_where_sgd_does_not(tmp_path):
    sgd, svrg = numbers(run("svrg.py", tmp_path))
    assert 1000 * svrg < sgd


def test_posterior_has_the_deviations_of_laplace(tmp_path):
    """Of the coefficient of texture, which is alone in its direction, 0.23."""
    found = run("posterior.py", tmp_path)
    assert len(found.splitlines()) == 8
    mean, deviation = numbers(found.splitlines()[1])
    assert mean == pytest.approx(1.42, abs=0.05)
    assert deviation == pytest.approx(0.23, rel=0.1)


def test_diloco_sends_a_fiftieth_of_the_bytes(tmp_path):
    head, _, all_fragments, _ = run("diloco.py", tmp_path).splitlines()
    assert head.endswith("270 steps on 4 devices")
    assert numbers(head)[0] > 0.88
    assert "0.02 " in all_fragments


def test_sparse_keeps_its_zeros_and_most_of_the_accuracy(tmp_path):
    dense, pruned = run("sparse.py", tmp_path).splitlines()
    assert numbers(pruned)[0] > numbers(dense)[0] - 0.05
    assert ", 0% " in dense
    assert ", 90% " in pruned


def test_less_memory_loses_no_accuracy(tmp_path):
    found = [numbers(line)[-2:] for line in run("less_memory.py", tmp_path).splitlines()]
    words, accuracies = zip(*found, strict=True)
    assert words[0] == 2 > 3 * words[1] > 3 * words[2] > 4 * words[3]
    assert min(accuracies[1:]) > accuracies[0] - 0.02


def test_fit_resumes_and_ends_at_a_lower_loss(tmp_path):
    first, second, accuracy = numbers(run("fit_nnx.py", tmp_path))
    assert second < 0.5 * first
    assert accuracy > 0.9
