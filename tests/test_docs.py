"""The pages of the documentation."""

import ast
import inspect
import json
import operator
import pathlib
import re
import runpy
import textwrap

import jax
import pytest
from transformations import TRANSFORMATIONS

import optperm
from optperm import training
from optperm.core.transformation import transformation

DOCS = pathlib.Path(__file__).parents[1] / "docs"
# The method that a page invents has a test below, and so have the lines for each method.
ELSEWHERE = {"guides/add_a_method.md", "guides/in_other_libraries.md", "reference/index.md"}
ELSEWHERE |= {"guides/in_llm_trainers.md"}


def text_of(page):
    return (DOCS / page).read_text(encoding="utf-8")


def code_blocks(page):
    found = re.findall(r"^( *)```python\n(.*?)^\1```$", text_of(page), re.M | re.S)
    return [textwrap.dedent(block) for _, block in found]


def programs(page):
    """Return the programs of a page: a block without an import continues the block before it."""
    found = []
    for block in code_blocks(page):
        if found and "import jax" not in block:
            found[-1] += block
        else:
            found.append(block)
    return found


PAGES = sorted(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md"))
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
def test_program_of_a_page_prints_what_its_comments_say(page, program, capsys):
    program = program.replace(
        'jax.config.update("jax_num_cpu_devices", 4)', "# here there are eight"
    )
    # A line after `# prints ` is one that the call above it prints.
    says = re.findall(r"^(?: *print\(.*\)  # |# prints )([^:\n]*)", program, re.MULTILINE)
    calls = re.findall(r"^(?: *print\(|# prints )", program, re.MULTILINE)
    assert len(says) == len(calls)
    exec(compile(program, page, "exec"), {"__name__": "program"})
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
def test_title_of_a_guide_has_the_words_that_readers_search_for(words, page):
    """The search of the site ranks titles before the text of pages."""
    title = text_of(page).partition("\n")[0]
    assert title.startswith("# ")
    assert [word for word in words if word not in title] == []


def test_public_names_of_training_stand_on_their_page():
    """The pages of the methods are written from the package itself."""
    exported = [name for name in dir(training) if not name.startswith("_")]
    page = text_of("reference/training.rst")
    assert sorted(re.findall(r"^\.\. auto(?!summary)\w+:: (\w+)$", page, re.M)) == sorted(exported)


def test_lines_for_each_method_call_what_there_is():
    """Each call of optperm in them binds to the signature of what it calls."""
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
    results = sorted((DOCS.parent / "benchmarks" / "results").glob("*.json"))
    assert set(re.findall(r"^```{measured} (\w+)", pages, re.M)) == {each.stem for each in results}
    for path in results:
        result = json.loads(path.read_text(encoding="utf-8"))
        assert [*result] == ["benchmark", "command", "machine", "date", "tables"], path.name
        script = result["benchmark"]
        assert script.startswith("optperm ") or (DOCS.parent / script).exists()
        for table in result["tables"]:
            assert {len(row) for row in table["rows"]} == {len(table["columns"])}, path.name


def test_scripts_that_sentences_name_exist():
    """In the pages, README and the docstrings."""
    root = DOCS.parent
    sources = [*DOCS.rglob("*.md"), *(root / "optperm").rglob("*.py"), root / "README.md"]
    text = "".join(path.read_text(encoding="utf-8") for path in sources)
    named = set(re.findall(r"benchmarks/\w+\.py", text))
    assert len(named) > 5
    assert {name for name in named if not (root / name).exists()} == set()


def test_figures_in_pages_are_those_of_the_results():
    """Each comment that names a result file follows its figure; a wrong figure is found."""
    figures = runpy.run_path(str(DOCS / "figures.py"))
    count = 0
    for page in PAGES:
        text = text_of(page)
        assert figures["with_figures"](text) == text, f"{page}: run python docs/figures.py"
        comments = [each for each in re.findall(r"<!-- (\w+)", text) if each != "long"]
        assert len(figures["_FIGURE"].findall(text)) == len(comments), page
        count += len(comments)
    assert count > 20
    wrong = "1.234 ± 0.500<!-- permutation_mnist; SGPerm; test accuracy -->"
    assert figures["with_figures"](wrong).startswith("0.9670 ± 0.0007<!-- permutation_mnist;")


def test_method_on_the_page_takes_the_step_of_polyak():
    """The invented method of add_a_method.md takes Polyak's step, and the door checks for it."""
    namespace = {"__name__": "polyak"}
    exec(compile(code_blocks("guides/add_a_method.md")[0], "add_a_method.md", "exec"), namespace)
    assert namespace["transformation"] is transformation
    tx, w = namespace["polyak"](f_min=1.0), jax.numpy.array([3.0, 4.0])
    updates, opt_state = jax.jit(tx.update)(w, tx.init(w), w, value=6.0)
    assert updates.tolist() == pytest.approx([-0.6, -0.8])  # (6 - 1) / 25 of the gradient
    assert float(opt_state.step_size) == pytest.approx(0.2)
    with pytest.raises(ValueError, match="polyak needs the extra argument value, the loss on this"):
        tx.update(w, opt_state, w)
