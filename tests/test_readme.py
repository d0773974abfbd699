"""README says what the kept results say, the reference lists every name, and a release agrees."""

import pathlib
import re
import runpy
import tomllib

import pytest
from support import PUBLIC

import optperm.training

ROOT = pathlib.Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
RESULTS = runpy.run_path(str(ROOT / "docs" / "figures.py"))


def number(result, row, column, table=0):
    """The number that a cell of a kept result begins with."""
    found = RESULTS["cell"](result, row, column, table)
    return float(re.match(r"[\d,]*\.?\d+", found)[0].replace(",", ""))


# The figures in the order of README, the cells that they round, and the factor of their unit.
STATE, WIDE, LINKS, MNIST = "memory_text", "widen_text", "frontier_python", "uncertainty_mnist"
WORDS, BYTES, NATS = "words per param", "bytes per param", "nats per byte"
FIGURES = [
    ("| 2.1 bytes per weight", STATE, "AdamW, 8 bits", WORDS, 1, 4),
    ("instead of 8.0", STATE, "AdamW", WORDS, 1, 4),
    ("1.06 times", "low_rank_step", "AdamW, 8 bits", "ratio with a gradient of 512 tokens", 0, 1),
    ("7.1 bytes", WIDE, "AdamW, 8 bits more, 8-bit state", BYTES, 0, 1),
    ("instead of 16.0", WIDE, "AdamW, float32", BYTES, 0, 1),
    ("6.2 bytes", WIDE, "Muon, 8 bits more, 8-bit state", BYTES, 0, 1),
    ("instead of 12.3", WIDE, "Muon, float32", BYTES, 0, 1),
    ("Loss 2.29", LINKS, "every 3, 1 bit", "nats", 0, 1),
    ("every step 2.20", LINKS, "in step", "nats", 0, 1),
    ("alone 2.47", LINKS, "alone", "nats", 0, 1),
    ("loss 0.051", MNIST, "Adam, temperature", "NLL", 0, 1),
    ("instead of 0.066", MNIST, "Adam", "NLL", 0, 1),
]


@pytest.mark.parametrize(("text", "result", "row", "column", "table", "factor"), FIGURES)
def test_readme_figure_equals_its_kept_cell(text, result, row, column, table, factor):
    """Each rounds its cell to the last digit that README shows."""
    assert text in README
    shown = re.search(r"\d+\.(\d+)", text)
    error = abs(float(shown[0]) - factor * number(result, row, column, table))
    assert error <= 0.5001 * 10.0 ** -len(shown[1])


def test_readme_ratios_follow_from_kept_cells():
    """Traffic, losses and seconds are ratios of two cells."""
    assert f"| 1/{1 / number(LINKS, 'every 3, 1 bit', 'on a link'):.0f} of the bytes |" in README
    muon = [
        number(WIDE, row, "nats") for row in ("Muon, 8 bits more, 8-bit state", "Muon, float32")
    ]
    assert f"The loss was {100 * (muon[0] / muon[1] - 1):.1f}% higher" in README
    saga = number("convex", "saga: logistic, L2 1/n", "over minimize")
    assert f"{saga:.0f} times as fast as SAGA" in README


def test_readme_posteriors_are_those_of_the_table():
    """Eleven of twelve have deviations within 4%, and the report warns about the other one."""
    table = RESULTS["result"]("posterior_defaults")["tables"][1]
    at = [table["columns"].index(name) for name in ("sd", "warnings")]
    rows = [(re.findall(r"[\d.]+", row[at[0]]), row[at[1]]) for row in table["rows"]]
    near = [all(abs(float(ratio) - 1) < 0.0401 for ratio in ratios) for ratios, _ in rows]
    assert (sum(near), len(near)) == (11, 12)
    assert [warning == "nothing" for _, warning in rows] == near
    assert "Within 4% on 11 of 12 posteriors" in README


@pytest.mark.usefixtures("lenient")
def test_readme_program_prints_what_stands_below_it(capsys):
    ((program, shown),) = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", README, re.S)
    exec(compile(program, "README.md", "exec"), {"__name__": "program"})
    assert [line.rstrip() for line in capsys.readouterr().out.splitlines()] == shown.splitlines()


def test_readme_is_at_most_120_lines_and_links_to_files_that_exist():
    assert len(README.splitlines()) <= 120
    linked = re.findall(r"^\[\w+\]: (\S+)$|\]\(([^)]+)\)", README, re.MULTILINE)
    paths = {path for path in map("".join, linked) if not path.startswith("https://")}
    assert {path for path in paths if not (ROOT / path.partition("#")[0]).exists()} == set()


def test_readme_clones_from_the_address_in_pyproject():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert f"git clone {project['urls']['Repository']} && cd optperm" in README


def test_release_files_name_one_version_date_and_address():
    """CITATION.cff and the changelog follow pyproject.toml, whose setting is the only address."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    fields = dict(re.findall(r"^([\w-]+): (.+)$", citation, re.MULTILINE))
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    (version, date), *_ = re.findall(r"^## (\S+) \((\S+)\)$", changelog, re.MULTILINE)
    assert fields["version"] == version == project["version"]
    assert fields["date-released"] == date
    assert fields["repository-code"] == project["urls"]["Repository"]
    assert all(url.startswith(fields["repository-code"]) for url in project["urls"].values())


def test_reference_index_lists_every_public_name():
    text = (ROOT / "docs" / "reference" / "index.md").read_text(encoding="utf-8")
    names = {*PUBLIC, *(name for name in dir(optperm.training) if name[0] != "_")}
    assert {name for name in names if not re.search(rf"\b{name}\b", text)} == set()
