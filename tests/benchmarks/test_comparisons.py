"""The comparisons run, and show what they claim."""

import pathlib
import runpy
import types

import matplotlib.image
import numpy as np
import pytest

pytestmark = [pytest.mark.programs, pytest.mark.usefixtures("one_device")]

BENCHMARKS = pathlib.Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def _modules_of_benchmarks(monkeypatch):
    """A script finds the modules beside it."""
    monkeypatch.syspath_prepend(BENCHMARKS)


def load(name):
    """What the benchmark defines."""
    return runpy.run_path(str(BENCHMARKS / name))


@pytest.mark.usefixtures("lenient")
def test_posterior_benchmark(capsys):
    """Constant SGD by its defaults, but for fewer steps, on the smallest problem: near the posterior."""
    flags = ["--problems", "quadratic", "--batch-sizes", "32", "--seeds", "1", "--steps", "5000"]
    (row,) = load("posterior.py")["main"]([*flags, "--defaults"])
    (verdict,) = row["verdicts"]
    assert verdict.found.passes
    assert verdict.found.divergence < 0.1
    assert "quadratic    S  32" in capsys.readouterr().out


@pytest.mark.usefixtures("lenient")
def test_prune_freeze_sweep(tmp_path, capsys):
    """Nine tenths of the network can be frozen at no great cost, and not be pruned."""
    out = tmp_path / "curves.png"
    given = {"fractions": 11, "seeds": 2, "sweep_steps": (50, 200), "hidden": 32, "picture": out}
    found = load("sparsity.py")["compare_fractions"](types.SimpleNamespace(**given))
    assert np.std(matplotlib.image.imread(out)) > 0.01  # a picture that is not blank
    assert found.shape == (2, 5, 11, 2)
    magnitude, random, *frozen = np.moveaxis(found, 1, 0)[..., 1]
    for curve in (random, *frozen):
        np.testing.assert_array_equal(curve[:, 0], magnitude[:, 0])  # nothing is masked
    for curve in frozen:
        np.testing.assert_array_equal(curve[:, -1], frozen[0][:, -1])  # nothing has moved
        assert np.all(curve[:, 9] > magnitude[:, 9])
    np.testing.assert_array_equal(magnitude[:, -1], random[:, -1])  # nothing is left
    assert np.all(magnitude[:, -1] < 0.2)
    assert np.mean(magnitude[:, 8:10]) > np.mean(random[:, 8:10])
    assert np.mean(frozen[1][:, 9]) > np.mean(magnitude[:, 9]) + 0.1
    shown = capsys.readouterr().out.splitlines()
    assert shown[-3].startswith("  share p freeze preconditioned_gradient  0 ")
    assert f"  0 {np.mean(frozen[0][:, 0]):.3f}  " in shown[-3]
