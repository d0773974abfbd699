"""The benchmark of DimReduce's costs runs, at its smallest size."""

import pathlib
import re
import runpy

import pytest

FILE = pathlib.Path(__file__).parents[2] / "benchmarks" / "dim_reduce.py"


@pytest.mark.programs
@pytest.mark.usefixtures("lenient")
def test_all_parts_print_what_they_measure(capsys):
    """Ratios against the products, NumPy and scikit-learn, and the collectives."""
    runpy.run_path(str(FILE))["main"](["--smallest"])
    shown = capsys.readouterr().out
    assert re.search(r"update +\d+\.\d+ ms", shown)
    assert re.search(r"NumPy by hand .*orthogonality error [\d.]+e-(0[6-9]|[12]\d)\n", shown)
    assert "all-reduce to f32[200]" in shown  # two lifts of 100 params
