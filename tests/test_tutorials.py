"""The tutorials print what they show, and draw the pictures that they show."""

import json
import pathlib
import re
import runpy

import matplotlib.image
import numpy as np
import pytest
from matplotlib.axes import Axes

pytestmark = pytest.mark.programs

DOCS = pathlib.Path(__file__).parents[1] / "docs"
RUNNER = runpy.run_path(str(DOCS / "run_tutorials.py"))
RESULTS = runpy.run_path(str(DOCS / "draw_results.py"))


@pytest.mark.usefixtures("lenient")
@pytest.mark.parametrize("is_short", [True, pytest.param(False, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("page", RUNNER["PAGES"])
def test_tutorial_prints_and_draws_what_it_shows(page, is_short, tmp_path):
    """The words are the same, the numbers near; comparisons of many trainings run by night."""
    outputs, _ = RUNNER["run"](page, tmp_path, is_short=is_short)
    assert RUNNER["wrong_outputs"](page, outputs) == []
    text = (DOCS / "tutorials" / f"{page}.md").read_text(encoding="utf-8")
    shown = set(re.findall(r"^!\[.*\]\((\w+\.png)\)$", text, re.MULTILINE))
    assert f"{page}.png" in shown
    assert shown == {path.name for path in tmp_path.glob("*.png")}
    for name in shown:
        assert np.std(matplotlib.image.imread(tmp_path / name)) > 0.01
        assert (DOCS / "tutorials" / name).exists()


@pytest.mark.parametrize("page", RUNNER["PAGES"])
def test_tutorial_begins_with_figures_of_the_benchmarks(page, tmp_path):
    """All rows with a figure are in the picture, and the page shows it before its first section."""
    text = (DOCS / "tutorials" / f"{page}.md").read_text(encoding="utf-8")
    assert f"]({page}-results.png)" in text.split("\n## ")[0]
    panels = RESULTS["PICTURES"][page]
    for panel in panels:
        result = json.loads((RESULTS["RESULTS"] / f"{panel.result}.json").read_text("utf-8"))
        table = result["tables"][panel.table]
        at = table["columns"].index(panel.column)
        cells = {row[0].replace("`", ""): row[at] for row in table["rows"] if "." in row[at]}
        for name, (mean, deviation) in panel.figures().items():
            numbers = [float(number) for number in re.findall(r"\d*\.?\d+", cells.pop(name))]
            assert mean in numbers
            assert deviation in (*numbers, 0.0)
        assert all("diverges" in cell or cell == "-" for cell in cells.values())
    RESULTS["draw"](panels, tmp_path / "picture.png")
    assert np.std(matplotlib.image.imread(tmp_path / "picture.png")) > 0.01


def test_picture_of_exchanges_has_a_line_for_each_number_of_bits(tmp_path, monkeypatch):
    """Through the losses of its periods by the bytes on a link, between the two baselines."""
    drawn = []
    monkeypatch.setattr(Axes, "plot", lambda self, *data, **how: drawn.append((*data, how)))
    RESULTS["draw_frontier"](tmp_path / "picture.png")
    lines = {how["label"]: (x, y) for x, y, style, how in drawn if style == "-o"}
    table = json.loads((RESULTS["RESULTS"] / "frontier.json").read_text("utf-8"))["tables"][0]
    cells = {row[0]: dict(zip(table["columns"], row, strict=True)) for row in table["rows"]}
    assert {"32 bits", "1 bit"} <= lines.keys()
    for code, (x, y) in lines.items():
        rows = [cells[name] for name in cells if name.endswith(f", {code}")]
        assert [f"{each:.4f}" for each in x] == [row["on a link"] for row in rows]
        assert [f"{each:.3f}" for each in y] == [row["nats"].split(" ")[0] for row in rows]
