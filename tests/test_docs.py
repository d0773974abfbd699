"""README, the pages, the tutorials, the docstrings and the benchmarks say and print what is so."""

import ast
import contextlib
import importlib
import inspect
import itertools
import json
import operator
import os
import pathlib
import re
import runpy
import shlex
import sys
import textwrap
import tomllib
import types

import jax
import matplotlib.image
import numpy as np
import pytest
import scoring
import support
from matplotlib.axes import Axes
from sklearn.metrics import log_loss
from support import PUBLIC
from transformations import TRANSFORMATIONS

import optperm
from optperm import training
from optperm.core.transformation import transformation

ROOT = pathlib.Path(__file__).parents[1]
DOCS, RESULTS = ROOT / "docs", ROOT / "benchmarks" / "results"
README = (ROOT / "README.md").read_text(encoding="utf-8")
# The scripts that write figures into pages, draw pictures of results, and run tutorials.
FIGURES, PICTURES, TUTORIALS = (
    runpy.run_path(str(DOCS / f"{name}.py"))
    for name in ("figures", "draw_results", "run_tutorials")
)
PAGES = sorted(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md"))
TRAINING = {name: getattr(training, name) for name in dir(training) if not name.startswith("_")}


def text_of(page):
    return (DOCS / page).read_text(encoding="utf-8")


def load(result):
    """Return the content of a kept result, by the name of its file."""
    return json.loads((RESULTS / f"{result}.json").read_text(encoding="utf-8"))


def code_blocks(page):
    found = re.findall(r"^( *)```python\n(.*?)^\1```$", text_of(page), re.M | re.S)
    return [textwrap.dedent(block) for _, block in found]


def run_program(program, page):
    """Run a program of a page, and return its namespace."""
    namespace = {"__name__": "program"}
    exec(compile(program, page, "exec"), namespace)
    return namespace


# README and the files of a release.


def number(result, row, column, table=0):
    """Return the number that a cell of a kept result begins with."""
    found = FIGURES["cell"](result, row, column, table)
    return float(re.match(r"[\d,]*\.?\d+", found)[0].replace(",", ""))


# The figures in the order of README, the cells that they round, and the factor of their unit.
STATE, WIDE, LINKS, MNIST = "memory_text", "widen_text", "frontier_python", "uncertainty_mnist"
WORDS, BYTES = "words per param", "bytes per param"
OF_README = [
    ("| 2.1 bytes per weight", STATE, "AdamW, 8 bits", WORDS, 1, 4),
    ("instead of 8.0", STATE, "AdamW", WORDS, 1, 4),
    ("1.06 times", "low_rank_step", "AdamW, 8 bits", "ratio with a gradient of 512 tokens", 0, 1),
    ("7.1 bytes", WIDE, "AdamW, 8 bits more, 8-bit state", BYTES, 0, 1),
    ("instead of 16.0", WIDE, "AdamW, float32", BYTES, 0, 1),
    ("6.2 bytes", WIDE, "Muon, 8 bits more, 8-bit state", BYTES, 0, 1),
    ("instead of 12.3", WIDE, "Muon, float32", BYTES, 0, 1),
    ("Loss 2.29", LINKS, "every 3, 1 bit", "nats", 0, 1),
    ("2.20 with all bytes", LINKS, "in step", "nats", 0, 1),
    ("2.47 for one machine alone", LINKS, "alone", "nats", 0, 1),
    ("loss 0.051", MNIST, "Adam, temperature", "NLL", 0, 1),
    ("instead of 0.066", MNIST, "Adam", "NLL", 0, 1),
]


@pytest.mark.parametrize(("text", "result", "row", "column", "table", "factor"), OF_README)
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
    table = load("posterior_defaults")["tables"][1]
    at = [table["columns"].index(name) for name in ("sd", "warnings")]
    rows = [(re.findall(r"[\d.]+", row[at[0]]), row[at[1]]) for row in table["rows"]]
    near = [all(abs(float(ratio) - 1) < 0.0401 for ratio in ratios) for ratios, _ in rows]
    assert (sum(near), len(near)) == (11, 12)
    assert [warning == "nothing" for _, warning in rows] == near
    assert "Within 4% on 11 of 12 posteriors" in README


@pytest.mark.usefixtures("lenient")
def test_readme_program_prints_the_text_below_it(capsys):
    ((program, shown),) = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", README, re.S)
    run_program(program, "README.md")
    assert [line.rstrip() for line in capsys.readouterr().out.splitlines()] == shown.splitlines()


def test_readme_is_at_most_120_lines_and_links_to_files_that_exist():
    assert len(README.splitlines()) <= 120
    linked = re.findall(r"^\[\w+\]: (\S+)$|\]\(([^)]+)\)", README, re.MULTILINE)
    paths = {path for path in map("".join, linked) if not path.startswith("https://")}
    assert {path for path in paths if not (ROOT / path.partition("#")[0]).exists()} == set()


def test_release_files_name_one_version_date_and_address():
    """CITATION.cff, the changelog and README follow pyproject.toml, which alone sets the address."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    fields = dict(re.findall(r"^([\w-]+): (.+)$", citation, re.MULTILINE))
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    (version, date), *_ = re.findall(r"^## (\S+) \((\S+)\)$", changelog, re.MULTILINE)
    assert fields["version"] == version == project["version"]
    assert fields["date-released"] == date
    assert fields["repository-code"] == project["urls"]["Repository"]
    assert all(url.startswith(fields["repository-code"]) for url in project["urls"].values())
    assert f"git clone {project['urls']['Repository']} && cd optperm" in README


# The pages.

# The invented method of one page, and the lines for each method, have tests of their own.
ELSEWHERE = {"guides/add_a_method.md", "guides/in_other_libraries.md", "reference/index.md"}
ELSEWHERE |= {"guides/in_llm_trainers.md"}


def programs(page):
    """Return the programs of a page: a block without an import continues the block before it."""
    found = []
    for block in code_blocks(page):
        if found and "import jax" not in block:
            found[-1] += block
        else:
            found.append(block)
    return found


PROGRAMS = [
    pytest.param(
        page,
        program,
        id=f"{page}-{index}",
        marks=() if (page, index) == ("guides/loops.md", 2) else pytest.mark.programs,
    )
    for page in PAGES
    if page not in ELSEWHERE and not page.startswith(("_build", "tutorials"))
    for index, program in enumerate(programs(page))
]


@pytest.mark.usefixtures("lenient", "one_device")
@pytest.mark.parametrize(("page", "program"), PROGRAMS)
def test_page_program_prints_what_its_comments_say(page, program, capsys):
    program = program.replace(
        'jax.config.update("jax_num_cpu_devices", 4)', "# here there are eight"
    )
    # A line after `# prints ` is one that the call above it prints.
    says = re.findall(r"^(?: *print\(.*\)  # |# prints )([^:\n]*)", program, re.MULTILINE)
    calls = re.findall(r"^(?: *print\(|# prints )", program, re.MULTILINE)
    assert len(says) == len(calls)
    run_program(program, page)
    assert capsys.readouterr().out.splitlines() == says


@pytest.mark.parametrize(
    ("words", "page"),
    [
        (["8 bits", "GaLore", "APOLLO"], "guides/less_memory.md"),
        (["scanned layers", "bfloat16", "Muon"], "guides/large_models.md"),
        (["DiLoCo"], "guides/slow_links.md"),
        (["Calibrated", "temperature", "IVON", "SWAG"], "guides/uncertainty.md"),
        (["pruning", "RigL"], "guides/sparse_networks.md"),
    ],
)
def test_guide_title_has_the_words_that_readers_search_for(words, page):
    """The search of the site ranks titles before the text of pages."""
    title = text_of(page).partition("\n")[0]
    assert title.startswith("# ")
    assert [word for word in words if word not in title] == []


def test_reference_lists_every_public_name():
    """The index lists all names. Of the other pages, only that of `training` is written by hand."""
    index, page = text_of("reference/index.md"), text_of("reference/training.rst")
    assert {name for name in PUBLIC | TRAINING if not re.search(rf"\b{name}\b", index)} == set()
    assert sorted(re.findall(r"^\.\. auto(?!summary)\w+:: (\w+)$", page, re.M)) == [*TRAINING]


def test_reference_lines_for_each_method_bind_to_its_signature():
    called = set()
    for node in ast.walk(ast.parse("".join(code_blocks("reference/index.md")))):
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("optperm."):
            name = ast.unparse(node.func).removeprefix("optperm.")
            keywords = {each.arg: None for each in node.keywords}
            inspect.signature(operator.attrgetter(name)(optperm)).bind(*node.args, **keywords)
            called.add(name)
    registered = {each.factory.__name__ for each in TRANSFORMATIONS}
    assert called >= registered & {*dir(optperm)}


def test_results_are_tables_that_stand_on_pages():
    """Each result file names its command, machine and date, and pages use only these files."""
    pages = "".join(text_of(page) for page in PAGES if page.startswith("benchmarks/"))
    names = {path.stem for path in RESULTS.glob("*.json")}
    assert set(re.findall(r"^```{measured} (\w+)", pages, re.M)) == names
    for name in names:
        result = load(name)
        assert [*result] == ["benchmark", "command", "machine", "date", "tables"], name
        script = result["benchmark"]
        assert script.startswith("optperm ") or (ROOT / script).exists()
        for table in result["tables"]:
            assert {len(row) for row in table["rows"]} == {len(table["columns"])}, name


def test_scripts_that_sentences_name_exist():
    """In the pages, README and the docstrings."""
    sources = [*DOCS.rglob("*.md"), *(ROOT / "optperm").rglob("*.py")]
    text = README + "".join(path.read_text(encoding="utf-8") for path in sources)
    named = set(re.findall(r"benchmarks/\w+\.py", text))
    assert len(named) > 5
    assert {name for name in named if not (ROOT / name).exists()} == set()


def test_figures_in_pages_equal_their_kept_cells():
    """Each comment that names a result file follows its figure; a wrong figure is found."""
    count = 0
    for page in PAGES:
        text = text_of(page)
        assert FIGURES["with_figures"](text) == text, f"{page}: run python docs/figures.py"
        comments = [each for each in re.findall(r"<!-- (\w+)", text) if each != "long"]
        assert len(FIGURES["_FIGURE"].findall(text)) == len(comments), page
        count += len(comments)
    assert count > 20
    wrong = "1.234 ± 0.500<!-- permutation_mnist; SGPerm; test accuracy -->"
    assert FIGURES["with_figures"](wrong).startswith("0.9670 ± 0.0007<!-- permutation_mnist;")


def test_method_of_the_page_on_new_methods_takes_the_step_of_polyak():
    """The invented method of add_a_method.md takes Polyak's step, and the door checks for it."""
    namespace = run_program(code_blocks("guides/add_a_method.md")[0], "add_a_method.md")
    assert namespace["transformation"] is transformation
    tx, w = namespace["polyak"](f_min=1.0), jax.numpy.array([3.0, 4.0])
    updates, opt_state = jax.jit(tx.update)(w, tx.init(w), w, value=6.0)
    assert updates.tolist() == pytest.approx([-0.6, -0.8])  # (6 - 1) / 25 of the gradient
    assert float(opt_state.step_size) == pytest.approx(0.2)
    with pytest.raises(ValueError, match="polyak needs the extra argument value, the loss on this"):
        tx.update(w, opt_state, w)


# The docstrings.

METHODS = {
    f"{name}.{method}": function
    for name, kind in PUBLIC.items()
    if inspect.isclass(kind)
    for method, function in vars(kind).items()
    if inspect.isfunction(function) and not method.startswith("_")
}
# The order of use. Fields come in the place of arguments.
ORDER = ["Attributes", "Args", "Returns", "Example", "Notes", "Raises", "Warns", "References"]


def sections(documented):
    """Return the sections of a docstring by title, after its first lines."""
    parts = re.split(r"^([A-Z]\w+):\n", inspect.getdoc(documented), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def entries(section):
    """Return the names that a section lists."""
    return re.findall(r"^  \*{0,2}(\w+): \S", section, flags=re.MULTILINE)


def test_docstrings_explain_all_arguments_in_order_with_an_example_and_errors():
    for name, documented in (PUBLIC | METHODS | TRAINING).items():
        found = sections(documented)
        assert [*found] == [title for title in ORDER if title in found], name
        if name in TRAINING:
            # What users make or call, and not what they are given.
            is_given = name in ("Event", "FitResult", "CheckpointError")
            assert is_given or ">>> " in found["Example"], name
        elif inspect.isclass(documented):
            assert entries(found.get("Attributes", "")) == [*documented.__annotations__], name
        else:
            wanted = [each for each in inspect.signature(documented).parameters if each != "self"]
            assert entries(found.get("Args", "")) == wanted, name
        if name in PUBLIC and inspect.isfunction(documented):
            assert found["Returns"].strip(), name
            assert re.search(rf"\boptperm\.(\w+\.)?{name}\b", found["Example"]), name
            assert ">>> " in found["Example"], name
            raised = entries(found["Raises"])
            assert raised, name
            assert all(error.endswith("Error") for error in raised), name


# The tutorials, and the pictures of the results.


@pytest.mark.programs
@pytest.mark.usefixtures("lenient")
@pytest.mark.parametrize("is_short", [True, pytest.param(False, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("page", TUTORIALS["PAGES"])
def test_tutorial_prints_and_draws_what_it_shows(page, is_short, tmp_path):
    """The words are the same, the numbers near; comparisons of many trainings run by night."""
    outputs, _ = TUTORIALS["run"](page, tmp_path, is_short=is_short)
    assert TUTORIALS["wrong_outputs"](page, outputs) == []
    shown = set(re.findall(r"^!\[.*\]\((\w+\.png)\)$", text_of(f"tutorials/{page}.md"), re.M))
    assert f"{page}.png" in shown
    assert shown == {path.name for path in tmp_path.glob("*.png")}
    for name in shown:
        assert np.std(matplotlib.image.imread(tmp_path / name)) > 0.01
        assert (DOCS / "tutorials" / name).exists()


@pytest.mark.programs
@pytest.mark.parametrize("page", TUTORIALS["PAGES"])
def test_tutorial_begins_with_figures_of_the_benchmarks(page, tmp_path):
    """All rows with a figure are in the picture, and the page shows it before its first section."""
    assert f"]({page}-results.png)" in text_of(f"tutorials/{page}.md").split("\n## ")[0]
    panels = PICTURES["PICTURES"][page]
    for panel in panels:
        table = load(panel.result)["tables"][panel.table]
        at = table["columns"].index(panel.column)
        cells = {row[0].replace("`", ""): row[at] for row in table["rows"] if "." in row[at]}
        for name, (mean, deviation) in panel.figures().items():
            numbers = [float(each) for each in re.findall(r"\d*\.?\d+", cells.pop(name))]
            assert mean in numbers
            assert deviation in (*numbers, 0.0)
        assert all("diverges" in cell or cell == "-" for cell in cells.values())
    PICTURES["draw"](panels, tmp_path / "picture.png")
    assert np.std(matplotlib.image.imread(tmp_path / "picture.png")) > 0.01


@pytest.mark.programs
def test_picture_of_exchanges_has_a_line_for_each_number_of_bits(tmp_path, monkeypatch):
    """Through the losses of its periods by the bytes on a link, between the two baselines."""
    drawn, plot = [], Axes.plot

    def draw(self, *data, **how):
        drawn.append((*data, how))
        return plot(self, *data, **how)

    monkeypatch.setattr(Axes, "plot", draw)
    PICTURES["draw_frontier"](tmp_path / "picture.png")
    lines = {how["label"]: (x, y) for x, y, style, how in drawn if style == "-o"}
    table = load("frontier")["tables"][0]
    cells = {row[0]: dict(zip(table["columns"], row, strict=True)) for row in table["rows"]}
    assert {"32 bits", "1 bit"} <= lines.keys()
    for code, (x, y) in lines.items():
        rows = [cells[name] for name in cells if name.endswith(f", {code}")]
        assert [f"{each:.4f}" for each in x] == [row["on a link"] for row in rows]
        assert [f"{each:.3f}" for each in y] == [row["nats"].split(" ")[0] for row in rows]


# The benchmarks.

# Scripts and flags that make them small, and of tables, or of functions that make one, what is left.
# Other parts of a script run by night.
USUAL = {
    "distributed.py --only local periods stacked traffic commits --repetitions 1 --leaves 2 "
    "--leaf-size 100": {
        "OPTIMIZERS": ("Adam",),
        "COMMITTING": ("Adam",),
        "RULES": ("mean",),
    },
    "constant_sgd.py --only steps --repetitions 3": {
        "samplers": ("SGD", "mandt_sgd, single_example", "sgld")
    },
    "training.py --only methods --methods sgd svrg --seeds 1 --epochs 1 --units 4": {},
    "compile.py --leaves 4,8 --shapes 2 --only agn ivon mask_elements": {},
    "memory.py --only memory --smallest": {},
    "scale.py --size 0 --steps 2 --batch 2 --context 8 --seeds 2 --rates 0.01 --decays 0.1 "
    "--methods AdamW 'AdamW, widened, 8 bits' SCALE": {"TESTS": 2},
    "posterior.py --mlp --steps 20 --seeds 1 --grid 1 --methods SGD": {},
    "sparsity.py --only images --seeds 1 --epochs 0.6 --sparsity 0.9 --every 1": {
        "ROWS": ("dense", "RigL, ERK", "static random, the same sparsity")
    },
    "uncertainty.py --seeds 1 --epochs 0.2 --methods Adam temperature IVON": {},
    "permutation.py --only methods values bytes --seeds 1 --epochs 0.9": {
        "METHODS": ("SGPerm", "Adam"),
        "VALUES": (2,),
    },
    "subspace.py --only images --seeds 1 --steps 30 --labels wrong": {
        "METHODS": ("SWA", "dldr, dim_reduce")
    },
    "variance.py --only table --examples 100 --lbfgs-passes 4 --saga-passes 2 --svrg-passes 5 --seeds 1 "
    "--batch-sizes 50": {},
}
RUNS = USUAL | {
    "convex.py --only elastic logistic l1 poisson conditions rows --limit 1 --max-passes 3": {
        "EXAMPLES": 1000,
        "MANY": 1000,
        "CONDITIONS": (1e2,),
    },
    "distributed.py --only frontier --seeds 1 --steps 20 --width 8 --replicas 2 --inner Muon": {
        "CODES": ("1 bit",),
        "PERIODS": (10,),
    },
    "training.py --only cost --repetitions 1 --seconds 0.01 --hidden 4": {},
    "posterior.py --problems quadratic --batch-sizes 32 --seeds 1 --steps 50 --defaults": {},
    "nuts.py --problems logistic-500 --seconds 0.01 --draws 40": {"FEWEST": 4, "WARM_UP": 20},
    "sparsity.py --only sweep --seeds 1 --fractions 3 --sweep-steps 2 2 --hidden 4": {},
    "uncertainty.py --only defaults --seeds 1 --steps 2": {"TASKS": ("MLP", "transformer")},
    "permutation.py --only speed --repetitions 1": {"SHAPES": ((10, 100),)},
    "variance.py --only rates --rate-passes 1 --batch-sizes 50": {"FACTORS": (1.0,)},
    "subspace.py --only pca update communication --smallest": {},
    "variance.py --only lbfgs --passes 2 --full-passes 4": {},
    "variance.py --only networks --passes 1 --seeds 1 --rates 0.5 --methods SVRG": {
        "SHAPES": ("constant",)
    },
    "distributed.py --only outer --seeds 1 --width 8": {
        "SETTINGS": (("MLP", 4, 2), ("decoder", 4, 2)),
        "OUTER": ("averaging",),
        "RATES": (1e-2,),
    },
    "memory.py --only train --steps 3 --seeds 1 --width 16 --context 8 --methods AdamW apollo": {
        "RATES": (1e-2,),
        "LOW": (1.0,),
    },
    "memory.py --only images --steps 6 --seeds 1 --methods AdamW": {},
    "widen.py --only train --steps 3 --seeds 1 --few 1": {
        "METHODS": ("AdamW, float32", "AdamW, 8 bits more"),
        "TESTS": 2,
    },
    "widen.py --only update --repetitions 1 --smallest": {},
    "widen.py --only memory --smallest": {},
    "scale.py --size 0 --steps 2 --batch 2 --context 8 --seeds 1 --rates 0.01 0.03 --decays 0 0.1": {
        "TESTS": 2
    },
    "scale.py --memory --size 0 --batch 2 --context 8 --methods Muon low_rank apollo": {},
    "sparsity.py --only transformer --steps 36 --seeds 1": {
        "DECODER_RATES": (1e-2,),
        "METHODS": ("2:4 straight-through",),
    },
    "variance.py --only steps --repetitions 1 --width 4 --batches 2": {},
    "variance.py --only variance --epochs 1": {},
    "variance.py --only convex --passes 1 --seeds 1 --rates 0.5 --methods SVRG": {
        "SHAPES": ("constant",)
    },
    "variance.py --only mars --steps 2 --seeds 1 --adamw-rates 1e-3 --repetitions 1": {
        "MARS": ("mars",)
    },
}
TESTED_ELSEWHERE = {"accelerators.py"}
# What the scripts share.
SHARED = {"images.py", "results.py", "scoring.py", "small_tasks.py", "accelerator_programs.py"}
SHARED |= {"collectives.py", "library_bytes.py", "timing.py"}


def part_of(table, left):
    """Return what is left of a table, or of what a function makes."""
    if callable(table):
        return lambda *arguments: part_of(table(*arguments), left)
    return {key: table[key] for key in left} if isinstance(table, dict) else left


@pytest.mark.programs
@pytest.mark.usefixtures("lenient")
@pytest.mark.parametrize("command", support.every_night(RUNS, USUAL))
def test_benchmark_at_its_smallest_size_prints_and_keeps_its_figures(
    command, monkeypatch, capfd, tmp_path
):
    """In this process, on the suite's eight devices and beside other tests."""
    script, *flags = shlex.split(command)
    path, kept = ROOT / "benchmarks" / script, tmp_path / "new" / "found.json"
    monkeypatch.setattr(sys, "argv", [str(path), *flags, "--loaded", "--json", str(kept)])
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks"), *sys.path])
    monkeypatch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"])
    update = jax.config.update
    # The devices that a script asks JAX for before it starts are here.
    monkeypatch.setattr(
        jax.config, "update", lambda *option: "jax_num_cpu_devices" in option or update(*option)
    )
    small = importlib.import_module("library_bytes")
    monkeypatch.setattr(small, "LAYERS", 1)
    monkeypatch.setattr(small, "WIDTH", 8)
    monkeypatch.setattr(small, "CONTEXT", small.CONTEXT)  # a script may set it
    main = runpy.run_path(str(path))["main"]
    for name, left in RUNS[command].items():
        main.__globals__[name] = part_of(main.__globals__[name], left)
    main()
    printed = capfd.readouterr().out.strip().splitlines()
    assert re.search(r"\d", printed[-1])
    found = json.loads(kept.read_text())
    assert found["command"] == f"python benchmarks/{command} --loaded"
    assert found["machine"].endswith(", with other programs running")
    for table in found["tables"]:
        assert {len(row) for row in table["rows"]} == {len(table["columns"])}
    assert any(re.search(r"\d", cell) for cell in found["tables"][-1]["rows"][-1])


def test_no_benchmark_is_left_out():
    """One that is new joins `RUNS`."""
    there = {path.name for path in (ROOT / "benchmarks").glob("*.py")}
    assert there == {command.split()[0] for command in RUNS} | TESTED_ELSEWHERE | SHARED


@pytest.fixture
def timing(monkeypatch):
    """The helper on a machine without load, for a command without flags."""
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks"), *sys.path])
    monkeypatch.setattr(sys, "argv", ["any.py"])
    module = importlib.import_module("timing")
    monkeypatch.setattr(module, "LOAD", 0.5)
    return module


def test_times_on_a_loaded_machine_are_refused_before_they_are_taken(timing, monkeypatch):
    monkeypatch.setattr(timing, "LOAD", 0.51)
    called = []
    with pytest.raises(SystemExit, match=r"load was 0\.51 at the start, above 0\.5.*--loaded"):
        timing.take_turns({"call": lambda: called.append(1)}, 1)
    assert called == []
    monkeypatch.setattr(sys, "argv", ["any.py", "--loaded"])
    assert len(timing.take_turns({"call": lambda: called.append(1)}, 1)["call"]) == 1


@pytest.mark.parametrize(("wall", "is_refused"), [(5.9, False), (6.1, True)])
def test_times_that_waited_for_other_programs_are_refused(timing, monkeypatch, wall, is_refused):
    """Three seconds of the processor, in less and in more than six on the wall."""
    clocks = {"perf_counter": [1.0, 1.0 + wall], "process_time": [1.0, 4.0]}
    clocks = {name: iter(times).__next__ for name, times in clocks.items()}
    monkeypatch.setattr(timing, "time", types.SimpleNamespace(**clocks))
    with contextlib.ExitStack() as stack:
        if is_refused:
            stack.enter_context(pytest.raises(SystemExit, match=r"was 2\.0 times the processor"))
        with timing.undisturbed():
            pass


def test_results_of_a_loaded_machine_say_so(timing, monkeypatch, tmp_path):
    """With the flag, in the machine that stands below each table."""
    found, machines = timing.results.Results(), []
    found.row("Times", name="a", ms="1")
    for flags in ([], ["--loaded"]):
        monkeypatch.setattr(sys, "argv", ["any.py", *flags])
        found.write(tmp_path / "found.json")
        machines.append(json.loads((tmp_path / "found.json").read_text())["machine"])
    assert machines[1] == f"{machines[0]}, with other programs running"


def test_scores_by_hand():
    """Of confidences inside of bins and on their edges, which belong to the bin below, and of ties."""
    rng = np.random.default_rng(0)
    on_edges = np.array([[k / 15, (1 - k / 15) / 2, (1 - k / 15) / 2] for k in range(5, 15)])
    p = np.concatenate([rng.dirichlet([1.0, 1.0, 1.0], size=400), on_edges]).astype(np.float32)
    labels = rng.integers(0, 3, size=len(p))
    right, confidences, error = p.argmax(axis=1) == labels, p.max(axis=1), 0.0
    for low, high in itertools.pairwise(np.float32([b / 15 for b in range(16)])):
        inside = (low < confidences) & (confidences <= high)
        error += abs(np.sum(right[inside] - confidences[inside].astype(float))) / len(p)
    distances = [
        np.sum((row - np.eye(3)[label]) ** 2) for row, label in zip(p, labels, strict=True)
    ]
    wanted = np.mean(right), log_loss(labels, p), np.mean(distances), error
    np.testing.assert_allclose(scoring.classification(p, labels), wanted, rtol=1e-5)
    sure = np.tile(np.float32([0.9, 0.1]), (6, 1))
    assert scoring.classification(sure, np.ones(6, int)).calibration_error == pytest.approx(0.9)
    assert scoring.auroc([0.1, 0.2], [0.2, 0.3]) == 0.875
