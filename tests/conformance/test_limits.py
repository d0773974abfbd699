"""The table of limits in the documentation says what each transformation does."""

import pathlib
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import replicas
import support
from transformations import EXTRA_ARGS, GATHERED, TRANSFORMATIONS, bowl, two_examples

import optperm

pytestmark = [
    pytest.mark.usefixtures("lenient"),
    pytest.mark.filterwarnings("ignore:(low_rank|apollo) leaves .* alone"),
]
ROOT = pathlib.Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "guides" / "limits.md").read_text(encoding="utf-8")
COLUMNS = ["vmap", "sharded params", "MultiSteps", "clipping", "nonfinite gradient"]
COLUMNS += ["bfloat16 params", "derivative"]
ROWS = {
    name: dict(zip(COLUMNS, cells.split(" | "), strict=True))
    for name, cells in re.findall(r"^\| `(\w+)` \| (.+) \|$", PAGE, re.MULTILINE)
    if cells.count(" | ") == len(COLUMNS) - 1
}
# They hand the functions of the loss to the optimizers in them.
HANDING = ("agn", "diloco", "switch_after")
METHODS = {
    name: [each for each in TRANSFORMATIONS if each.factory.__name__ == name] for name in ROWS
}
USUAL = ["sgperm", "agn", "svrg", "mask_elements"]
each_method = pytest.mark.parametrize(
    "name", support.every_night(METHODS, USUAL, mark=pytest.mark.entries)
)


def start(ours):
    """Return the transformation, params, and a state of it."""
    tx, params = ours.make(), support.random_params()
    return tx, params, ours.prepared(tx.init(params), params)


def count(jaxpr, name):
    """Count the uses of a primitive in a program and in its parts."""
    parts = [value for eqn in jaxpr.eqns for value in jax.tree.leaves(list(eqn.params.values()))]
    inner = [getattr(part, "jaxpr", part) for part in parts]
    found = sum(count(part, name) for part in inner if hasattr(part, "eqns"))
    return found + sum(eqn.primitive.name == name for eqn in jaxpr.eqns)


def test_each_method_has_a_row_and_each_column_names_its_tests():
    methods = {each.factory.__name__ for each in TRANSFORMATIONS} & {*dir(optperm)}
    assert set(ROWS) == methods
    named = re.findall(r"`(test_\w+)`", PAGE.partition("## The test behind each column")[2])
    files = (ROOT / "tests").rglob("test_*.py")
    code = "".join(path.read_text(encoding="utf-8") for path in files)
    assert len(named) > len(COLUMNS)
    assert {name for name in named if f"def {name}(" not in code} == set()
    columns = re.findall(r"^\| `?([\w ]+?)`? \| `test_", PAGE, re.MULTILINE)
    assert columns == COLUMNS


@each_method
def test_vmap_cell_says_when_rare_work_is_done(name):
    """A conditional of a single run becomes a select, and a loop runs while one of the runs needs it."""
    row = ROWS[name]
    tx, params, state = start(METHODS[name][0])
    update = lambda p, s: tx.update(p, s, p)  # noqa: E731
    pairs = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), (params, state))
    alone = jax.make_jaxpr(update)(params, state).jaxpr
    mapped = jax.make_jaxpr(jax.vmap(update))(*pairs).jaxpr
    if count(mapped, "while"):
        wanted = "due"
    else:
        wanted = "always" if count(mapped, "cond") < count(alone, "cond") else "alone"
    assert re.match(r"\w+", row["vmap"])[0] == wanted


@each_method
def test_sharding_cell_says_what_is_gathered(name):
    row = ROWS[name]
    gathers = any(each.name in GATHERED for each in METHODS[name])
    assert ("gathers" in row["sharded params"]) == gathers


@each_method
def test_methods_that_evaluate_the_loss_stay_outside_of_multi_steps_and_clipping(name):
    """A mean or a clipped gradient is not the gradient of the loss that such a method evaluates."""
    row, evaluated = ROWS[name], set()
    for each in METHODS[name]:
        tx, params, state = start(each)

        def spy(argument, function):
            def call(*args, **kwargs):
                evaluated.add(argument)
                return function(*args, **kwargs)

            return call

        functions = {"value_fn": lambda p: jnp.zeros([]), "per_example_grad_fn": two_examples}
        functions |= {"grad_fn": bowl, "full_grad_fn": bowl}
        spies = {key: spy(key, function) for key, function in functions.items()}
        jax.eval_shape(lambda p, s, tx=tx, spies=spies: tx.update(p, s, p, **spies), params, state)
    if name in HANDING:
        evaluated.clear()
    assert bool(re.search(r"\bno\b", row["MultiSteps"])) == bool(evaluated)
    if evaluated:
        assert re.search(r"\b(no|after|inside)\b", row["clipping"])
    if not row["MultiSteps"].startswith("inside"):
        assert not row["clipping"].startswith("before")


@pytest.mark.parametrize(
    "name",
    support.every_night(
        [name for name, row in ROWS.items() if row["MultiSteps"].startswith("inside")],
        ["diloco", "ivon", "rigl"],
        mark=pytest.mark.entries,
    ),
)
def test_a_method_inside_multi_steps_takes_steps_with_the_mean_gradients(name):
    """After six microbatches it is where three means have brought it alone, state and params."""
    tx, params, state = start(METHODS[name][0])
    several = optax.MultiSteps(tx, 2)
    halves = replicas.stack([support.random_like(params, index) for index in range(6)])
    means = jax.tree.map(lambda g: g.reshape(3, 2, *g.shape[1:]).mean(1), halves)
    options = {"draw": jax.tree.map(lambda p: p + 0.1, params)}

    def run(tx, state, grads):
        def step(carry, g):
            params, state = carry
            updates, state = tx.update(g, state, params, **EXTRA_ARGS, **options)
            return (optax.apply_updates(params, updates), state), None

        return jax.lax.scan(step, (params, state), grads)[0]

    @jax.jit
    def both(state):
        inside = run(several, several.init(params)._replace(inner_opt_state=state), halves)
        return inside, run(tx, state, means)

    (found, outer), (wanted, inner) = both(state)
    assert not np.array_equal(found["kernel"], params["kernel"])
    close = {"rtol": 1e-5, "atol": 1e-6}
    chex.assert_trees_all_close((found, outer.inner_opt_state), (wanted, inner), **close)


@each_method
def test_nonfinite_cell_says_what_a_nan_does(name):
    row = ROWS[name]
    tx, params, state = start(METHODS[name][0])
    bad = jax.tree.map(lambda p: p.at[(0,) * p.ndim].set(jnp.nan), params)
    updates, state = jax.jit(tx.update)(bad, state, params)

    def has_nan(tree):
        leaves = [
            leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.floating)
        ]
        return any(np.isnan(np.float32(leaf)).any() for leaf in leaves)

    cell = row["nonfinite gradient"]
    # A sum of gradients in AGN holds the NaN until a commit, so that the replica is left out there.
    found = ("kept" if has_nan(state) else "passed on") if has_nan(updates) else "left out"
    assert [word for word in ("kept", "passed on", "left out") if word in cell] == [found]


@each_method
def test_bfloat16_cell_lists_the_dtypes_of_the_state(name):
    row = ROWS[name]
    params, found = support.random_params(dtype="bfloat16"), set()
    for each in METHODS[name]:
        leaves = jax.tree.leaves(jax.eval_shape(each.make().init, params))
        found |= {str(x.dtype) for x in leaves if x.ndim and jnp.issubdtype(x.dtype, jnp.floating)}
    if name == "switch_after":
        found &= {"float32"}
    said = {*re.findall(r"\bfloat32|bfloat16", row["bfloat16 params"])}
    assert said == {dtype for dtype in found if not dtype.startswith("float8")}
    assert ("no arrays" in row["bfloat16 params"]) == (not found)


@each_method
def test_derivative_cell_says_whether_two_updates_have_a_gradient(name):
    """In reverse mode, with regard to the gradient of the first."""
    row = ROWS[name]

    def differentiates(each):
        tx, params, state = start(each)

        def total(grads):
            first, after = tx.update(grads, state, params)
            second, _ = tx.update(grads, after, params)
            return sum(jnp.sum(leaf) for leaf in jax.tree.leaves((first, second)))

        try:
            jax.eval_shape(jax.grad(total), params)
        except (NotImplementedError, ValueError) as error:
            if not re.search("[Dd]ifferentiation", str(error)):
                raise
            return False
        return True

    found = {differentiates(each) for each in METHODS[name]}
    assert {word == "yes" for word in re.findall(r"\b(yes|no)\b", row["derivative"])} == found
