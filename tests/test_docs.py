"""The pages of the documentation."""

import inspect
import pathlib
import re
import types

import jax
import pytest

from optperm import training
from optperm.contract.transformation import transformation

DOCS = pathlib.Path(__file__).parents[1] / "docs"


def code_blocks(page):
    return re.findall(r"^```python\n(.*?)^```$", (DOCS / page).read_text(), re.M | re.S)


def test_every_public_name_of_training_stands_on_its_page():
    """The pages of the methods are written from the package itself."""
    exported = re.findall(r" as (\w+)$", inspect.getsource(training), re.MULTILINE)
    page = (DOCS / "api" / "training.rst").read_text()
    assert sorted(re.findall(r"^\.\. auto\w+:: (\w+)$", page, re.MULTILINE)) == sorted(exported)


def test_the_page_on_sharding_prints_what_it_says(capsys):
    """A snapshot of a sharded kernel has its sharding in its type."""
    (block,) = code_blocks("sharding.md")
    block = block.replace('jax.config.update("jax_num_cpu_devices", 4)', "# here there are eight")
    exec(compile(block, "sharding.md", "exec"), {})
    assert capsys.readouterr().out == "float32[8,16@model]\n"


@pytest.mark.usefixtures("lenient")
@pytest.mark.parametrize(
    ("index", "printed"),
    [*enumerate(["True\n", "True\n", "24 True\n", "LocalStepsState\n"])],
    ids=["equinox", "nnx", "grain", "orbax"],
)
def test_each_recipe_prints_what_it_says(index, printed, capsys):
    blocks = code_blocks("recipes.md")
    assert len(blocks) == 4
    exec(compile(blocks[index], "recipes.md", "exec"), {})
    assert capsys.readouterr().out == printed


@pytest.mark.usefixtures("lenient")
def test_the_page_on_rare_commits_ends_with_a_commit(capsys):
    (block,) = code_blocks("rare_commits.md")
    block = block.replace('jax.config.update("jax_num_cpu_devices", 4)', "# here there are eight")
    exec(compile(block, "rare_commits.md", "exec"), {})
    assert capsys.readouterr().out == "True (4, 3)\n"


def test_the_method_on_the_page_works():
    """The invented method of add_a_method.md takes Polyak's step, and the door checks for it."""
    namespace = {"__name__": "polyak"}
    exec(compile(code_blocks("add_a_method.md")[0], "add_a_method.md", "exec"), namespace)
    module = types.SimpleNamespace(**namespace)
    assert module.transformation is transformation
    tx, w = module.polyak(f_min=1.0), jax.numpy.array([3.0, 4.0])
    updates, opt_state = jax.jit(tx.update)(w, tx.init(w), w, value=6.0)
    assert updates.tolist() == pytest.approx([-0.6, -0.8])  # (6 - 1) / 25 of the gradient
    assert float(opt_state.step_size) == pytest.approx(0.2)
    with pytest.raises(ValueError, match="polyak needs the extra argument value, the loss on this"):
        tx.update(w, opt_state, w)
