"""What the states of sparse methods say: goals that are missed, and arguments that made the states."""

import functools
import itertools

import jax
import jax.numpy as jnp
import loops
import numpy as np
import optax
import pytest
import replicas
import support
from flax import nnx

import optperm
from optperm.core.fingerprints import compare_fingerprints, list_fingerprints
from optperm.core.states import find_warnings
from optperm.sparsity import Blocks, Units, erk_sparsity, prune, reset_masks

PARAMS = {"w": support.normal((6, 4)), "v": support.normal((4, 4), 1), "b": support.bias(4)}
SGD = optax.sgd(0.1)
gradual = functools.partial(optperm.prune_gradually, SGD)
rigl = functools.partial(optperm.rigl, SGD)


def train(tx, steps, opt_state=None, params=PARAMS):
    """Return params and the state after compiled steps with the first params as gradients."""
    opt_state = tx.init(params) if opt_state is None else opt_state
    for _ in range(steps):
        params, opt_state = loops.compiled(tx)(params, opt_state, PARAMS)
    return params, opt_state


RAMP = optax.linear_schedule(0.0, 1.0, 4)
RAMPED, MOVED = gradual(0.5, RAMP, every=3), rigl(0.5, end=99, every=5)
further = functools.partial(pytest.param, marks=pytest.mark.exhaustive)


@pytest.mark.parametrize(
    ("tx", "steps", "says"),
    [
        (RAMPED, 0, ""),
        (RAMPED, 4, "fewer zeros than sparsity asks for"),
        (RAMPED, 7, ""),
        further(gradual(0.5, RAMP, every=100), 7, "fewer zeros than sparsity asks for"),
        (gradual(0.5, lambda t: 0.8 * RAMP(t), every=1, scope="global"), 7, "fewer zeros"),
        further(gradual(0.5, lambda t: 0.8 * RAMP(t), every=1), 7, "fewer zeros"),
        further(gradual(0.5, RAMP, every=2, structure=Units()), 5, ""),
        further(gradual(0.5, RAMP, every=2, structure=Blocks(4, 3)), 4, "fewer zeros"),
        further(gradual(0.0, RAMP, every=100), 2, ""),
        (MOVED, 0, ""),
        (MOVED, 5, "mask of rigl has not moved"),
        (MOVED, 6, ""),
        further(rigl(0.5, end=99, every=5, drop_fraction=0), 6, ""),
        (rigl(0.5, end=99, every=5, drop_fraction=lambda t: 0.0), 6, "mask of rigl has not moved"),
        further(rigl(0.0, end=99, every=5), 6, ""),
    ],
)
def test_a_goal_that_is_missed_is_said(tx, steps, says):
    """Give the same warnings in a chain and stacked over replicas, none before the first step."""
    params, opt_state = train(tx, steps)
    stacked = jax.device_put(replicas.stack([opt_state, opt_state]))
    for state in (opt_state, (optax.EmptyState(), opt_state), stacked):
        said = find_warnings(state, params)
        assert len(said) == bool(says)
        assert all(says in text for text in said)
    is_missed = steps == 0 or "fewer" in says
    assert stacked.reached_goal().tolist() == [not is_missed] * 2
    assert bool(opt_state.reached_goal()) is not is_missed


def test_a_gradient_that_is_not_finite_leaves_the_goal_missed():
    tx = gradual(0.5, 1.0, every=1, criterion="saliency")
    bad = jax.tree.map(lambda p: np.full_like(p, np.nan), PARAMS)
    step = jax.jit(tx.update)
    _, state = step(bad, tx.init(PARAMS), PARAMS)
    assert not state.reached_goal()
    _, state = step(PARAMS, state, PARAMS)
    assert state.reached_goal()


@pytest.mark.parametrize("criterion", ["saliency", "movement"])
def test_scores_that_are_all_zero_leave_the_goal_missed(criterion):
    """Wait for the next scores, since the gradients of a batch of padding rank nothing."""
    tx = gradual(0.5, 1.0, every=1, criterion=criterion)
    zeros, step = jax.tree.map(np.zeros_like, PARAMS), jax.jit(tx.update)
    _, state = step(zeros, tx.init(PARAMS), PARAMS)
    assert all(mask.all() for mask in jax.tree.leaves(state.mask))
    assert "not all 0" in state.warnings(PARAMS)[0]
    _, state = step(PARAMS, state, PARAMS)
    assert state.reached_goal()


@pytest.mark.parametrize("tx", [RAMPED, further(MOVED)], ids=["gradual", "rigl"])
def test_a_state_in_variables_of_nnx_says_what_a_plain_state_says(tx):

    @nnx.jit
    def take_step():
        model = nnx.Linear(6, 4, rngs=nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
        optimizer.update(model, nnx.grad(lambda m: jnp.sum(m(jnp.ones(6))))(model))
        return model, optimizer

    (model, optimizer), (_, plain) = take_step(), train(tx, 1)
    assert optimizer.opt_state.warnings(model) == plain.warnings(PARAMS) != []
    assert optimizer.opt_state.reached_goal() == plain.reached_goal()


def test_a_sparsity_that_changes_is_reached_or_refused():
    """Raise the sparsity as if from the start; a lower one is refused, and said if it was compiled."""
    first, raised, lower = (gradual(sparsity, 1.0, every=1) for sparsity in (0.5, 0.75, 0.25))
    _, state = train(first, 1)
    params, higher = train(raised, 1, state)
    assert sum(np.sum(np.asarray(params[name]) == 0) for name in ("w", "v")) == 30
    support.assert_same_bits(higher.mask, train(raised, 1)[1].mask)
    with pytest.raises(
        ValueError, match=r"masks only shrink. Pass the earlier sparsity=, or .*reset"
    ):
        lower.update(PARAMS, state, PARAMS)
    params, state = train(lower, 1, state)
    (text,) = find_warnings(state, params)
    assert "more zeros than sparsity asks for" in text
    assert not state.reached_goal()
    _, state = train(lower, 1, reset_masks(state))
    assert state.reached_goal()
    assert sum(np.sum(~np.asarray(m)) for m in jax.tree.leaves(state.mask)) == 10
    # Zeros that are pruned by hand are asked for.
    _, state = prune(PARAMS, train(first, 1)[1], 0.9)
    params, state = train(first, 1, state)
    assert state.reached_goal()
    assert find_warnings(state, params) == []


KERNEL = functools.partial(optperm.LeafAxes, "kernel")
FLAGS = {"w": True, "v": True, "b": False}
# Each row of v is a layer of its own.
ROWS = {"w": KERNEL(0, 1), "v": optperm.LeafAxes("bias", (), 1, 0), "b": None}
MASK = {"w": np.asarray(PARAMS["w"]) > 0, "v": True, "b": False}
GRADUAL, RIGL, BY_UNITS = (
    gradual(0.5, 1.0),
    rigl(0.5, end=200),
    gradual(0.5, 1.0, structure=Units()),
)
INCLUDED = gradual(0.5, 1.0, include=FLAGS)
OTHER_ARGUMENTS = {
    "criterion": (GRADUAL, gradual(0.5, 1.0, criterion="movement")),
    "criterion_": (GRADUAL, gradual(0.5, 1.0, criterion="saliency")),
    "scope": (GRADUAL, gradual(0.5, 1.0, scope="leaf")),
    "structure": (BY_UNITS, gradual(0.5, 1.0, structure=Blocks(2, 2))),
    "include": (GRADUAL, gradual(0.5, 1.0, include=True)),
    "include_": (RIGL, rigl(0.5, end=200, include={"w": True, "v": False, "b": False})),
    "sparsity": (RIGL, rigl(0.6, end=200)),
    "axes": (INCLUDED, gradual(0.5, 1.0, include=FLAGS, axes=ROWS)),
    "axes_": (RIGL, rigl(0.5, end=200, include=FLAGS, axes=ROWS)),
    "axes__": (
        BY_UNITS,
        gradual(
            0.5, 1.0, structure=Units(), axes={"w": KERNEL(1, 0), "v": KERNEL(0, 1), "b": None}
        ),
    ),
    "mask": (optperm.mask_elements(MASK), optperm.mask_elements()),
    "mask_": (
        optperm.mask_elements(MASK),
        optperm.mask_elements(MASK | {"w": np.asarray(PARAMS["w"]) > 0.5}),
    ),
    "mask__": (
        optperm.mask_elements(lambda p: {"w": True, "v": True, "b": False}),
        optperm.mask_elements(lambda p: {"w": True, "v": False, "b": True}),
    ),
}


@pytest.mark.parametrize(
    ("argument", "is_reversed"),
    support.every_night(
        itertools.product(OTHER_ARGUMENTS, (False, True)),
        [(name, False) for name in OTHER_ARGUMENTS]
        + [(name, True) for name in ("criterion", "sparsity", "mask")],
    ),
)
def test_a_state_made_with_another_argument_is_refused_by_name(argument, is_reversed):
    """In both directions, and named for a checkpoint too; one state of each method has taken a step."""
    name, (one, other) = argument.rstrip("_"), OTHER_ARGUMENTS[argument]
    one, other = (other, one) if is_reversed else (one, other)
    _, opt_state = train(one, int(argument in ("criterion", "include_", "mask")))
    jax.eval_shape(lambda: one.update(PARAMS, opt_state, PARAMS))
    with pytest.raises(ValueError, match=f"made with another {name}=. Pass the value"):
        other.update(PARAMS, opt_state, PARAMS)
    lists = map(list_fingerprints, (opt_state, other.init(PARAMS)))
    assert compare_fingerprints(*lists)[0] == name


@pytest.mark.parametrize(
    ("one", "other"),
    [
        further(rigl(0.5, end=20, every=1), rigl(0.5, end=20, every=1, grow="random")),
        (rigl(0.5, end=20, every=1), rigl(0.5, end=9, every=2, drop_fraction=0.7, skip_step=True)),
        further(rigl(0.5, end=20, every=1), rigl(erk_sparsity(PARAMS, 0.5), end=20, every=1)),
        (gradual(0.5, 1.0, every=2), gradual(0.6, RAMP, every=1)),
        further(gradual(0.5, 1.0), gradual(0.5, 1.0, include=FLAGS)),
        further(gradual(0.5, 1.0), gradual(0.5, 1.0, axes=optperm.leaf_axes(PARAMS))),
        # Scales and biases both stay dense.
        (
            rigl(0.5, end=200),
            rigl(0.5, end=200, axes=optperm.leaf_axes(PARAMS, b=optperm.LeafAxes("scale", (), 0))),
        ),
        (
            optperm.mask_elements(MASK),
            optperm.mask_elements(MASK | {"v": np.ones((4, 4), bool), "b": jnp.array(False)}),
        ),
        (optperm.mask_elements(), optperm.mask_elements(True)),
    ],
)
def test_other_arguments_act_as_if_they_were_so_from_the_start(one, other):
    """Use the state of one set of arguments with the other: the steps are those of the other's state."""
    states = [train(tx, 0)[1] for tx in (one, other)]
    jax.eval_shape(lambda: other.update(PARAMS, states[0], PARAMS))
    got, wanted = (train(other, 4, state) for state in states)
    support.assert_same_bits(got, wanted)
