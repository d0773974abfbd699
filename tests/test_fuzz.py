"""Bad arguments and gradients that are not finite, for everything public.

`calls.py` lists the arguments that must be refused, with the messages.
"""

import collections
import functools
import inspect

import calls
import chex
import hypothesis
import jax
import jax.numpy as jnp
import loops
import numpy as np
import optax
import pytest
import support
from calls import BATCH, CASES, PARAMS, loss_fn
from hypothesis import strategies as st
from transformations import bowl, half

import optperm

pytestmark = pytest.mark.usefixtures("lenient")


def test_nothing_public_is_left_out():
    """A new function joins `FUNCTIONS`, with arguments it works with; a transformation its registry.

    A class whose arguments are checked may join them."""
    public = {name for name, value in support.PUBLIC.items() if inspect.isfunction(value)}
    assert public == {name for name in CASES if not inspect.isclass(support.PUBLIC[name])}


REFUSALS = collections.defaultdict(list)
for each in calls.refusals():
    REFUSALS[each[0].partition(".")[0]].append(each)


@pytest.mark.filterwarnings("ignore:(low_rank|apollo) leaves .* alone")
@pytest.mark.parametrize("name", REFUSALS)
def test_bad_arguments_of_each_function_are_refused_by_name(name):
    """Out of range, of another type, or not fitting the others."""
    for called, change, error, message in REFUSALS[name]:
        with pytest.raises(error, match=message):
            calls.call(called, change)


# Functions that train or estimate, so that a call compiles for a second or more.
TRAIN = {"learn_kernel", "full_gradient", "minimize", "sample", "svrg_learning_rate"}


@pytest.mark.parametrize("train", support.every_night((False, True), [False]))
def test_limits_themselves_are_allowed(train):
    """As numbers of Python, NumPy and JAX; what draws by a key would take long."""
    for name, arguments in calls.ARGUMENTS.items():
        if (name in TRAIN) is not train:
            continue
        for argument, kind in arguments.items():
            if name in calls.FUNCTIONS and argument == "key":
                continue
            for value in kind.allowed[: 1 if name == "learn_kernel" else None]:
                calls.call(name, {argument: value})
    if not train:
        for name, change in calls.ALLOWED.items():
            calls.call(name, change)


SCHEDULED = [
    (name, argument)
    # The rate of the last two is Optax's, which checks none.
    for name in sorted(CASES.keys() - {"low_rank_adamw", "apollo_adamw"})
    for argument, parameter in inspect.signature(support.PUBLIC[name]).parameters.items()
    if "Schedule" in str(parameter.annotation)
    or parameter.annotation == optax.ScalarOrSchedule
    or (argument == "every" and name == "laperm")
]
# Of a few methods one is run every time.
USUAL = ("sgperm", "laperm", "dim_reduce", "svrg")
FIRST = {name: (name, argument) for name, argument in reversed(SCHEDULED) if name in USUAL}


@pytest.mark.filterwarnings("ignore:svrg has no snapshot yet")
@pytest.mark.parametrize(
    ("name", "argument"),
    support.every_night(SCHEDULED, FIRST.values(), mark=pytest.mark.entries),
)
def test_a_schedule_out_of_range_is_named_or_moved_to_the_limit(name, argument):
    """It is named where Python sees it, and moved to the nearest limit where it is traced."""

    def build(number):
        return support.PUBLIC[name](**{**CASES[name], argument: lambda count: number + 0 * count})

    low = build(-1)
    message = f"The value of the schedule {argument} must be .*, got -1"
    # The schedules of rigl are read where a rare step is made, which Python does not see.
    if name != "rigl":
        with pytest.raises(ValueError, match=message):
            loops.make_step(low, everything)(PARAMS, low.init(PARAMS), BATCH)

    @jax.jit
    def step(number):
        tx = build(number)
        return loops.make_step(tx, everything)(PARAMS, tx.init(PARAMS), BATCH)

    got, wanted = (step(np.int32(number)) for number in (-1, argument == "every"))
    chex.assert_trees_all_close(got, wanted, rtol=1e-6)


def everything(params, batch):
    """Return the gradient, and all that a method may ask for."""
    loss = lambda params, batch: loss_fn(params, batch) * jnp.mean(batch)  # noqa: E731
    e = optperm.evaluate(loss, params, batch, example=batch[:1])
    return e.grad, {"full_grad_fn": bowl, "draw": jax.tree.map(half, params), **e.extra_args}


ENTRIES = st.sampled_from([1.0, -1.0, 0.0, float("nan"), float("inf"), -float("inf")])
MIXED = {
    "w": np.linspace(-1.0, 1.0, 6, dtype=np.float32).reshape(3, 2),
    "b": jnp.array([0.5, -0.25], jnp.bfloat16),
    "s": jnp.float32(1.0),
    "e": jnp.zeros((0, 2)),
}
# They hand on what is not finite, to what follows or to the optimizer in them.
HAND_ON = {
    *("record_trajectory", "mask_elements", "proximal", "prune_gradually", "rigl", "set", "swag"),
    *("low_rank", "low_rank-svd", "apollo", "quantize_state", "quantize_state-4", "widen_params"),
    *("svrg", "svrg_and_sgd", "mars", "mars-exact", "mars_adamw"),
    *("recursive_gradient", "recursive-page"),
}


@pytest.mark.spans("sgperm", "agn", "dim_reduce", "svrg", "mask_elements")
@pytest.mark.filterwarnings("ignore:(low_rank|apollo) leaves .* alone")
@hypothesis.settings(max_examples=10)
@hypothesis.given(entries=st.lists(ENTRIES, min_size=9, max_size=9))
def test_gradients_that_are_not_finite_leave_everything_finite(ours, entries):
    """Params and state stay finite through such a step, and a sound one after it. A method that hands on
    what is not finite shows it in its updates, and `optax.apply_if_finite` around it skips the step."""
    flat = np.array(entries, np.float32)
    bad = {"w": flat[:6].reshape(3, 2), "b": flat[6:8].astype(jnp.bfloat16), "s": flat[8]}
    bad["e"] = MIXED["e"]
    grads = [bad, jax.tree.map(np.ones_like, bad)]
    if ours.name in HAND_ON:
        updates, opt_state = one_step(ours)(bad, MIXED)
        assert not_finite(updates) or not not_finite(opt_state)
    tx = guarded(ours) if ours.name in HAND_ON else ours.make()
    for after in loops.train(tx, MIXED, grads, init="jit"):
        chex.assert_trees_all_equal_shapes_and_dtypes(after[0], MIXED)
        assert not not_finite(after)


def not_finite(tree):
    """Return the places of leaves that are not finite, and that should be."""
    places = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        place = jax.tree_util.keystr(path)
        values = np.asarray(leaf, np.float64)
        # By what AGN has accumulated a replica knows, until the commit, that it sits it out; MARS knows
        # by infinity that there is no last gradient yet.
        is_mark = ".accumulator" in place or (".last[" in place and np.all(values == np.inf))
        if not is_mark and not np.all(np.isfinite(values)):
            places.append(place)
    return places


@functools.cache
def one_step(ours):
    """Return the first step of a method."""
    tx = ours.make()
    return jax.jit(lambda grads, params: tx.update(grads, tx.init(params), params))


@functools.cache
def guarded(ours):
    return optax.apply_if_finite(ours.make(), 3)
