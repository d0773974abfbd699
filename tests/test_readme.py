"""README says what the kept results say, the reference lists every name, and a release agrees."""

import pathlib
import re
import runpy
import tomllib

import jax.numpy as jnp
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


# The figures in the order of README, and the cells that they round.
TEXT, PER_PARAM = "memory_text", "words per param"
FIGURES = [
    ("AdamW 2.00 words", TEXT, "AdamW", PER_PARAM, 1),
    ("words, 2.31 nats", TEXT, "AdamW", "nats", 1),
    ("`quantize_state` 0.53", TEXT, "AdamW, 8 bits", PER_PARAM, 1),
    ("2.31; `apollo`", TEXT, "AdamW, 8 bits", "nats", 1),
    ("`apollo` 0.64", TEXT, "apollo", PER_PARAM, 1),
    ("2.27; `low_rank`", TEXT, "apollo", "nats", 1),
    ("`low_rank` 0.71", TEXT, "random, carried, residual", PER_PARAM, 1),
    ("2.22; `quantize_state(", TEXT, "random, carried, residual", "nats", 1),
    ("`quantize_state(low_rank(...))` 0.25", TEXT, "low rank, 8 bits", PER_PARAM, 1),
    ("2.23. The rank", TEXT, "low rank, 8 bits", "nats", 1),
    ("1.06 times", "low_rank_step", "AdamW, 8 bits", "ratio with a gradient of 512 tokens", 0),
    ("1.14 times", "low_rank_step", "low_rank, random", "ratio with a gradient of 512 tokens", 0),
    ("1.83 (`diloco`)", "byte_transformer", "diloco", "nats per byte", 0),
    ("1.94 (`agn`)", "byte_transformer", "agn", "nats per byte", 0),
    ("`diloco` reaches 1.83", "byte_transformer", "diloco, 4 bits", "nats per byte", 0),
    ("training reaches 1.73", "byte_transformer", "in step", "nats per byte", 0),
    ("alone 2.07", "byte_transformer", "alone", "nats per byte", 0),
    ("`fit_temperature` 0.051", "uncertainty_mnist", "Adam, temperature", "NLL", 0),
    ("`swag` 0.054", "uncertainty_mnist", "SWAG, 8 draws", "NLL", 0),
    ("tuned `ivon` 0.059", "uncertainty_mnist", "IVON, 8 draws", "NLL", 0),
    ("Adam alone 0.066", "uncertainty_mnist", "Adam", "NLL", 0),
    ("SGD 0.059", "uncertainty_mnist", "SGD, momentum", "NLL", 0),
    ("networks 0.046", "uncertainty_mnist", "Ensemble of 5", "NLL", 0),
    ("0.966 and", "sparse_mnist_tuned", "gradual magnitude, ERK", "98%", 0),
    ("0.956 with", "sparse_mnist_tuned", "RigL, ERK", "98%", 0),
    ("has 0.983", "sparse_mnist_tuned", "dense", "0%", 0),
    ("0.967 and", "permutation_mnist", "SGPerm", "test accuracy", 0),
    ("0.963 with", "permutation_mnist", "LaPerm", "test accuracy", 0),
    ("(Adam 0.972)", "permutation_mnist", "Adam", "test accuracy", 0),
]


@pytest.mark.parametrize(("text", "result", "row", "column", "table"), FIGURES)
def test_readme_figure_equals_its_kept_cell(text, result, row, column, table):
    """Each rounds its cell to the last digit that README shows."""
    assert text in README
    shown = re.search(r"\d+\.(\d+)", text)
    error = abs(float(shown[0]) - number(result, row, column, table))
    assert error <= 0.5001 * 10.0 ** -len(shown[1])


def test_readme_ratios_follow_from_kept_cells():
    """Traffic and steps are ratios of two cells; seconds stand behind the passes."""
    sent = [
        number("byte_transformer", row, "bytes per step")
        for row in ("in step", "diloco", "agn", "diloco, 4 bits")
    ]
    assert round(sent[0] / sent[1]) == round(sent[0] / sent[2]) == 10
    assert "at every tenth step send a tenth of the bytes" in README
    assert f"at every tenth step (1/{sent[0] / sent[3]:.0f} of the bytes), `diloco`" in README
    steps = [number("compare", row, "ms per step") for row in ("sgperm", "sgd")]
    assert f"{steps[0] / steps[1]:.1f} times as long as SGD's" in README
    methods = ("katyusha, batches of 16, rate 0.193, seed 0", "optax.lbfgs")
    cells = [RESULTS["cell"]("svrg_convex_60000_n", row, "to 1e-06") for row in methods]
    seconds = [float(re.search(r"([\d.]+) s", each)[1]) for each in cells]
    assert f"in {seconds[0]:.0f} s (`optax.lbfgs` {seconds[1]:.0f} s)" in README


def test_readme_posteriors_are_those_of_the_table():
    """Ten of twelve have deviations within 8%, and the report warns about the other two."""
    table = RESULTS["result"]("posterior_defaults")["tables"][1]
    at = [table["columns"].index(name) for name in ("sd", "warnings")]
    rows = [(re.findall(r"[\d.]+", row[at[0]]), row[at[1]]) for row in table["rows"]]
    near = [all(abs(float(ratio) - 1) < 0.0801 for ratio in ratios) for ratios, _ in rows]
    assert (sum(near), len(near)) == (10, 12)
    assert [warning == "nothing" for _, warning in rows] == near
    assert "within 8% of the exact ones on ten of twelve posteriors" in README


@pytest.mark.usefixtures("lenient")
def test_readme_program_prints_what_stands_below_it(capsys):
    ((program, shown),) = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", README, re.S)
    exec(compile(program, "README.md", "exec"), {"__name__": "program"})
    assert [line.rstrip() for line in capsys.readouterr().out.splitlines()] == shown.splitlines()
    low_rank = optperm.memory.low_rank_adamw(3e-3, rank=1 / 8)
    report = optperm.memory.state_report(low_rank, {"up": jnp.ones((64, 256))})
    assert f"stores {report.words_per_param:.2f} words per weight" in README


def test_readme_is_at_most_120_lines_and_links_to_files_that_exist():
    assert len(README.splitlines()) <= 120
    linked = re.findall(r"^\[\w+\]: (\S+)$|\]\(([^)]+)\)", README, re.MULTILINE)
    paths = {path for path in map("".join, linked) if not path.startswith("https://")}
    assert {path for path in paths if not (ROOT / path.partition("#")[0]).exists()} == set()


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
