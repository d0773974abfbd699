"""The benchmark of the subspaces runs, at its smallest size."""

import pathlib
import re
import runpy

import pytest

FILE = pathlib.Path(__file__).parents[2] / "benchmarks" / "dim_reduce.py"


@pytest.mark.programs
@pytest.mark.usefixtures("lenient")
def test_all_parts_print_what_they_measure(capsys):
    """Ratios against the products, NumPy and scikit-learn; the collectives; a line for each method, of
    which four are left."""
    main = runpy.run_path(str(FILE))["main"]
    left = ("SGD", "SWA, mean of SGD's last snapshots", "SGD, then dim_reduce", "SGD, then twa")
    methods = main.__globals__["methods"]
    main.__globals__["methods"] = lambda *sizes: {name: methods(*sizes)[name] for name in left}
    main(["--smallest"])
    shown = capsys.readouterr().out
    assert re.search(r"update +\d+\.\d+ ms", shown)
    assert re.search(r"NumPy by hand .*orthogonality error [\d.]+e-(0[6-9]|[12]\d)\n", shown)
    assert "all-reduce to f32[200]" in shown  # two lifts of 100 params
    rows = re.findall(r"^  (.*?)  +(\d\.\d{4}) \(.*?\)  0\.\d{3}  at ", shown, re.MULTILINE)
    losses = {name: float(loss) for name, loss in rows}
    assert tuple(losses) == left
    assert max(losses.values()) < 2.3  # that of ten classes without training
    assert losses["SGD, then dim_reduce"] < losses["SGD"]
