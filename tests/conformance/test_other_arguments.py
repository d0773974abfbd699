"""A state that is used with other arguments than at its making.

The result is an error that names the argument, or the updates that these arguments from the start give.
"""

import functools
import inspect
import re

import chex
import jax
import jax.numpy as jnp
import kernels
import loops
import optax
import pytest
import support
from calls import FUNCTIONS
from optax.contrib import GaLoreDimensionNumbers
from transformations import EXTRA_ARGS

import optperm
from optperm.distributed import Compression, Every
from optperm.sparsity import Blocks

SGD, ADAM = optax.sgd(1e-2, 0.9), optax.adam(1e-2)
ONE_LEAF = {"square": True, "wide": False, "bias": False}
FIRST_LEAF = {"square": GaLoreDimensionNumbers(1, 0), "wide": None, "bias": None}
PARAMS = {
    "square": support.normal((4, 4)),
    "wide": support.normal((2, 8), 1),
    "bias": support.bias(4),
}

AXES = (FIRST_LEAF, lambda params: optperm.leaf_axes(params, wide=optperm.LeafAxes("kernel", 1, 0)))
N_COMPONENTS = (1, 3)
# Of each transformation: arguments to build it with, and other values of each argument that says what
# arrays of its state mean.
SHAPING = {
    "sgperm": ({"aggressiveness": 0.5}, {"axes": AXES}),
    "permute_by_cycles": (
        {"aggressiveness": 0.5, "partition_ratio": 1.0},
        {"axes": AXES},
    ),
    "laperm": ({"inner": SGD, "every": 2}, {"axes": AXES}),
    "agn": (
        {"inner": SGD, "every": Every(4, fragments=2)},
        {
            "combine": ("sum", "sequential"),
            "outer": (SGD,),
            "every": (2, Every(4, fragments=2, delay=1), Every(4, fragments=3)),
            "compress": (Compression(0.5), Compression(bits=4)),
            "center_dtype": (jnp.bfloat16,),
            "fragment_of": (lambda path, leaf: int("square" in str(path)),),
        },
    ),
    "diloco": (
        {"inner": SGD, "every": Every(4, fragments=2)},
        {
            "combine": ("pairs", "sum", "sequential"),
            "every": (4, Every(4, fragments=2, delay=1), Every(4, fragments=3)),
            "mixing": (0.5,),
            "compress": (Compression(0.5), Compression(bits=4), Compression(bits=1)),
            "center_dtype": (jnp.bfloat16,),
            "fragment_of": (lambda path, leaf: int("square" in str(path)),),
        },
    ),
    "record_trajectory": (
        {"every": 1, "num_snapshots": 3},
        {"num_snapshots": (2, 4), "dtype": (jnp.bfloat16,)},
    ),
    "dim_reduce": (
        {"inner": SGD, "n_components": 2},
        {"n_components": N_COMPONENTS, "line_search": ("mindspore",)},
    ),
    "project": ({"inner": SGD, "n_components": 2}, {"n_components": N_COMPONENTS}),
    "twa": ({"inner": SGD, "n_components": 2}, {"n_components": N_COMPONENTS}),
    "dldr": (
        {"inner": SGD, "subspace_optimizer": optperm.twa(SGD, n_components=1)}
        | {"every": 1, "num_snapshots": 3},
        {"num_snapshots": (2, 4), "restart": ("first", "mean")},
    ),
    "low_rank": (
        {"inner": ADAM, "rank": 1, "every": 2},
        {
            "rank": (2,),
            "residual": (None,),
            "carry": (False,),
            "side": ("larger",),
            "axes": (FIRST_LEAF,),
        },
    ),
    "apollo": (
        {"inner": ADAM, "rank": 1, "every": 2},
        {"rank": (2,), "axes": (FIRST_LEAF,)},
    ),
    "quantize_state": (
        {"inner": ADAM, "min_size": 1},
        {"bits": (4,), "min_size": (20,), "include": (ONE_LEAF,)},
    ),
    # Of params in 32 bits, its state has no bits more; memory/test_widen_params.py has those in 16.
    "widen_params": ({"inner": ADAM}, {"bits": ()}),
    "mask_elements": ({}, {}),
    "prune_gradually": (
        {"inner": SGD, "sparsity": 0.5, "ramp": 1.0, "every": 1},
        {
            "criterion": ("saliency", "movement"),
            "scope": ("leaf", "global"),
            "include": (ONE_LEAF, True),
            "structure": (Blocks(2, 2),),
            "axes": (FIRST_LEAF,),
            "sparsity": (0.25, {"square": 0.5, "wide": 0.25, "bias": 0.0}),
        },
    ),
    "rigl": (
        {"inner": SGD, "sparsity": 0.5, "end": 100, "every": 1},
        {"include": (ONE_LEAF, True), "sparsity": (0.25,), "axes": (FIRST_LEAF,)},
    ),
    "proximal": ({"learning_rate": 0.1, "group": 0.1}, {}),
    "svrg": ({}, {}),
    "katyusha": (
        {"learning_rate": 1e-3, "strong_convexity": 0.5, "probability": 0.3},
        {},
    ),
    "mars": ({}, {"exact": (True,)}),
    "recursive_gradient": ({"a": 0.5, "every": 2}, {}),
    "switch_after": ({"num_steps": 3, "first": SGD, "then": ADAM}, {"track": (True,)}),
    "constant_sgd": ({"kernel": kernels.kernel_for(PARAMS)}, {}),
    "mandt_sgd": (
        {"num_data": 100, "batch_size": 2, "preconditioner": "diagonal"},
        {
            "preconditioner": ("scalar", "full"),
            "momentum": (0.5,),
        },
    ),
    "ivon": ({"learning_rate": 1e-3, "num_data": 100.0}, {}),
    "swag": ({"every": 1, "rank": 4}, {"rank": (3,)}),
    "sgld": ({"step_size": 1e-6, "num_data": 100}, {}),
    "sghmc": ({"step_size": 1e-6, "num_data": 100, "friction": 0.5}, {}),
}
# Arguments that no state depends on: they take effect from the next step on, or in init alone.
FREE = {
    *(
        "learning_rate",
        "step_size",
        "temperature",
        "momentum",
        "b1",
        "b2",
        "a",
        "l1",
        "l2",
        "group",
    ),
    *(
        "lower",
        "upper",
        "friction",
        "noise_estimate",
        "damping",
        "max_step",
    ),
    *("aggressiveness", "partition_ratio", "num_steps", "min_partition_size", "include_remainder"),
    *(
        "centralize",
        "rho",
        "gamma",
        "alpha",
        "sigma",
        "max_search_steps",
        "scale",
        "limit",
        "max_norm",
    ),
    *("coefficient", "strong_convexity", "num_data", "batch_size", "weight_decay", "clip_radius"),
    *("ramp", "drop_fraction", "skip_step", "mixing", "chunk_size", "rescale_lr", "mc_samples"),
    # what the next change of a basis or of a mask, the next estimate, and a scale are made with
    *("projection", "grow", "estimator", "by", "group", "group_axes", "line_search"),
    # times
    *("every", "probability", "start", "end", "freeze_after"),
    # initial values
    *("key", "mask", "hess_init", "kernel"),
    # optimizers, whose states are checked by themselves, and mapped axes
    *("inner", "outer", "first", "then", "subspace_optimizer"),
    *("axis_name", "shard_axes", "sparsity", "preconditioner"),
}
# Those that are tried every time.
USUAL = {"sgperm", "diloco", "project", "prune_gradually", "mandt_sgd", "quantize_state"}
CASES = [
    pytest.param(
        *(name, argument, index, steps),
        id=f"{name}-{argument}-{index}-{steps}",
        marks=() if name in USUAL and index == 0 and steps else pytest.mark.entries,
    )
    for name, (_, others) in SHAPING.items()
    for argument, values in others.items()
    for index in range(len(values))
    for steps in (0, 3)
]


def test_each_argument_of_each_transformation_shapes_its_state_or_is_free():
    factories = {
        name for name in dir(optperm) if inspect.isfunction(getattr(optperm, name))
    } - FUNCTIONS.keys()
    assert factories == SHAPING.keys()
    for name in factories:
        parameters = {*inspect.signature(getattr(optperm, name)).parameters}
        assert SHAPING[name][1].keys() <= parameters
        assert parameters - SHAPING[name][1].keys() <= FREE, name


@functools.cache
def build(name, argument=None, index=0):
    arguments, others = SHAPING[name]
    change = {} if argument is None else {argument: others[argument][index]}
    return getattr(optperm, name)(**arguments | change)


def step(tx, state, batch):
    """Return the updates of a step, at the same params each time, and the state after it."""
    e = optperm.evaluate(loops.linear_loss, PARAMS, batch)
    extra_args = EXTRA_ARGS | e.extra_args | {"full_grad_fn": loops.full_gradient}
    extra_args["draw"] = jax.tree.map(lambda p: 0.5 * p, PARAMS)
    return tx.update(e.grad, state, PARAMS, **extra_args)


compiled_step = jax.jit(step, static_argnums=0)


def train(tx, state, first, last):
    """Return the updates of each step and the state after the last."""
    found = []
    for batch in loops.linear_batches(last - first, first):
        updates, state = compiled_step(tx, state, batch)
        found.append(updates)
    return found, state


@functools.cache
def trained(name, steps):
    """Return a method's state after some steps."""
    tx = build(name)
    return train(tx, jax.jit(tx.init)(PARAMS), 0, steps)[1]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "argument", "index", "steps"), CASES)
def test_another_argument_is_refused_by_name_or_acts_as_from_the_start(
    name, argument, index, steps, lenient
):
    """Of a new state, and of a state after some steps."""
    other, state = build(name, argument, index), trained(name, steps)
    (batch,) = loops.linear_batches(1, steps)
    try:
        # Outside of jax.jit, where the numbers of a state are seen.
        step(other, state, batch)
    except ValueError as error:
        assert re.search(rf"\b{argument}\b", str(error))  # noqa: PT017
    else:
        got, _ = train(other, state, steps, steps + 2)
        expected, _ = train(other, jax.jit(other.init)(PARAMS), 0, steps + 2)
        chex.assert_trees_all_close(got, expected[steps:], rtol=1e-6, atol=1e-9)
