"""The comparisons run, and show what they claim."""

import importlib
import inspect
import pathlib
import runpy

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


def run(name, folder, *flags, benchmark=None, **smaller):
    """What the benchmark's `main` returns, run in this process; its picture is not blank.

    Numbers of the benchmark, in capitals, may be others; what `load` gave may be run.
    """
    out = folder / "curves.png"
    main = (benchmark or load(name))["main"]
    inspect.unwrap(main).__globals__.update(smaller)
    found = main(["--out", str(out), *map(str, flags)])
    assert_is_picture(out)
    return found


def assert_is_picture(path):
    """Asserts that a PNG was written that is not blank."""
    assert np.std(matplotlib.image.imread(path)) > 0.01


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
    flags = ["--fractions", 11, "--repeats", 2, "--steps", 50, 200]
    found = run("prune_freeze_sweep.py", tmp_path, *flags)
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
    assert [line.rsplit(maxsplit=6)[0] for line in shown[1:]] == [
        *("prune magnitude", "prune random", "freeze preconditioned_gradient", "freeze gradient"),
        "freeze random",
    ]
    assert shown[3].split()[-6] == f"{np.mean(frozen[0][:, 0]):.3f}"


@pytest.mark.exhaustive
@pytest.mark.usefixtures("lenient")
def test_prune_freeze_sweep_as_it_was_first_made(tmp_path):
    """Each network goes on to estimate a preconditioner of its own, so that H and gradient part."""
    flags = ["--fractions", 3, "--repeats", 1, "--legacy", "--steps", 20, 60]
    _, _, by_h, by_gradient, _ = run("prune_freeze_sweep.py", tmp_path, *flags)[0, ..., 0]
    assert by_h[0] == by_gradient[0] != by_h[-1] == by_gradient[-1]
    assert by_h[1] != by_gradient[1]


@pytest.mark.usefixtures("lenient")
@pytest.mark.parametrize(
    "some",
    [
        ("in step", "top 1/16, 2 bits"),
        pytest.param(("in step", "alone", "agn", "4 bits"), marks=pytest.mark.exhaustive),
    ],
)
def test_byte_transformer(some, tmp_path, capsys, monkeypatch):
    """The methods learn on from one start, a smaller network; who commits less sends less."""
    small = importlib.import_module("library_bytes")
    monkeypatch.setattr(small, "LAYERS", 1)
    monkeypatch.setattr(small, "WIDTH", 16)
    monkeypatch.setattr(small, "CONTEXT", 16)
    listed = importlib.import_module("commit_methods")
    every = listed.methods
    monkeypatch.setattr(
        listed, "methods", lambda steps: {name: every(steps)[name] for name in some}
    )
    found = run("byte_transformer.py", tmp_path, "--steps", 10, "--common", 1)
    assert tuple(found) == some
    assert all(3.5 < loss < 5.5 for loss, *_ in found.values()), found
    table = [line.split() for line in capsys.readouterr().out.splitlines()[2:]]
    in_step, *sent = (float(row[-2]) for row in table)
    if "agn" not in some:
        # An exchange, one step in ten, is padded to a multiple of 1,024 bytes.
        assert in_step > 150 * (sent[0] - 102.4) > 0
        return
    alone, agn, four_bits = sent
    assert (in_step / agn, alone) == (pytest.approx(10, rel=1e-3), 0)
    assert agn > 7 * four_bits


def test_byte_transformer_is_drawn_from_what_is_kept(tmp_path):
    """Three seeds of it take the better part of an hour."""
    kept = BENCHMARKS / "results" / "byte_transformer.json"
    found = run("byte_transformer.py", tmp_path, "--kept", kept)
    assert found["diloco"] == (1.831, 0.044, 146112, 1461124)


@pytest.mark.usefixtures("lenient")
def test_sgperm_values(tmp_path):
    """Two values in the right places classify better than Adam's network rounded to two, in fewer bits
    than one a weight; a permutation of any values takes less than log2 of the longest vector."""
    curves = run("sgperm_values.py", tmp_path, "--steps", 300, "--seeds", 1, "--hidden", 24)
    assert list(curves) == ["Adam", "Adam, rounded", "permuted"]
    (bits, two_values), *_, (most, _) = curves["permuted"]
    assert 0.8 < bits < 1
    assert 3 < most < 6
    (rounded_bits, rounded), *_ = curves["Adam, rounded"]
    assert rounded_bits == 1
    assert two_values > max(0.75, rounded + 0.05)
