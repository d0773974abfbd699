"""What the states of sparse methods say: goals that are missed, and arguments that made the states."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
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
    step = jax.jit(tx.update)
    for _ in range(steps):
        updates, opt_state = step(PARAMS, opt_state, params)
        params = optperm.apply_updates(params, updates, opt_state)
    return params, opt_state


RAMP = optax.linear_schedule(0.0, 1.0, 4)


@pytest.mark.parametrize(
    ("tx", "steps", "says"),
    [
        (gradual(0.5, RAMP, every=3), 0, ""),
        (gradual(0.5, RAMP, every=3), 4, "fewer zeros than sparsity asks for"),
        (gradual(0.5, RAMP, every=3), 7, ""),
        (gradual(0.5, RAMP, every=100), 7, "fewer zeros than sparsity asks for"),
        (gradual(0.5, lambda t: 0.8 * RAMP(t), every=1), 7, "fewer zeros"),
        (gradual(0.5, lambda t: 0.8 * RAMP(t), every=1, scope="global"), 7, "fewer zeros"),
        (gradual(0.5, RAMP, every=2, structure=Units()), 5, ""),
        (gradual(0.5, RAMP, every=2, structure=Blocks(4, 3)), 4, "fewer zeros"),
        (gradual(0.0, RAMP, every=100), 2, ""),
        (rigl(0.5, end=99, every=5), 0, ""),
        (rigl(0.5, end=99, every=5), 5, "mask of rigl has not moved"),
        (rigl(0.5, end=99, every=5), 6, ""),
        (rigl(0.5, end=99, every=5, drop_fraction=0), 6, ""),
        (rigl(0.5, end=99, every=5, drop_fraction=lambda t: 0.0), 6, "mask of rigl has not moved"),
        (rigl(0.0, end=99, every=5), 6, ""),
    ],
)
def test_a_goal_that_is_missed_is_said(tx, steps, says):
    """Give the same warnings in a chain and stacked over replicas, none before the first step."""
    params, opt_state = train(tx, steps)
    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), opt_state)
    for state in (opt_state, (optax.EmptyState(), opt_state), stacked):
        said = find_warnings(state, params)
        assert len(said) == bool(says)
        assert all(says in text for text in said)
    is_missed = steps == 0 or "fewer" in says
    assert stacked.reached_goal().tolist() == [not is_missed] * 2
    assert bool(opt_state.reached_goal()) is not is_missed


def test_a_gradient_that_is_not_finite_leaves_the_goal_missed():
    tx = gradual(0.5, 1.0, every=1, criterion="saliency")
    bad = jax.tree.map(lambda p: jnp.full_like(p, jnp.nan), PARAMS)
    _, state = tx.update(bad, tx.init(PARAMS), PARAMS)
    assert not state.reached_goal()
    _, state = tx.update(PARAMS, state, PARAMS)
    assert state.reached_goal()


@pytest.mark.parametrize("criterion", ["saliency", "movement"])
def test_scores_that_are_all_zero_leave_the_goal_missed(criterion):
    """Wait for the next scores, since the gradients of a batch of padding rank nothing."""
    tx = gradual(0.5, 1.0, every=1, criterion=criterion)
    zeros = jax.tree.map(jnp.zeros_like, PARAMS)
    _, state = tx.update(zeros, tx.init(PARAMS), PARAMS)
    assert all(mask.all() for mask in jax.tree.leaves(state.mask))
    assert "not all 0" in state.warnings(PARAMS)[0]
    _, state = tx.update(PARAMS, state, PARAMS)
    assert state.reached_goal()


def test_a_state_in_variables_of_nnx_says_what_a_plain_state_says():
    model = nnx.Linear(6, 4, rngs=nnx.Rngs(0))
    for tx in (gradual(0.5, RAMP, every=100), rigl(0.5, end=99, every=5)):
        optimizer, (_, plain) = nnx.Optimizer(model, tx, wrt=nnx.Param), train(tx, 1)
        optimizer.update(model, nnx.grad(lambda m: jnp.sum(m(jnp.ones(6))))(model))
        assert optimizer.opt_state.warnings(model) == plain.warnings(PARAMS) != []
        assert optimizer.opt_state.reached_goal() == plain.reached_goal()


def test_a_sparsity_that_changes_is_reached_or_refused():
    """Raise the sparsity as if from the start; a lower one is refused, and said if it was compiled."""
    _, state = train(gradual(0.5, 1.0, every=1), 1)
    params, higher = train(gradual(0.75, 1.0, every=1), 1, state)
    assert int((params["w"] == 0).sum() + (params["v"] == 0).sum()) == 30
    fresh = gradual(0.75, 1.0, every=1)
    support.assert_same_bits(higher.mask, fresh.update(PARAMS, fresh.init(PARAMS), PARAMS)[1].mask)
    lower = gradual(0.25, 1.0, every=1)
    with pytest.raises(
        ValueError, match=r"masks only shrink. Pass the earlier sparsity=, or .*reset"
    ):
        lower.update(PARAMS, state, PARAMS)
    params, state = train(lower, 1, state)
    (text,) = find_warnings(state, params)
    assert "more zeros than sparsity asks for" in text
    assert not state.reached_goal()
    _, state = lower.update(PARAMS, reset_masks(state), PARAMS)
    assert state.reached_goal()
    assert sum(int((~m).sum()) for m in jax.tree.leaves(state.mask)) == 10
    # Zeros that are pruned by hand are asked for.
    _, state = prune(PARAMS, train(gradual(0.5, 1.0, every=1), 1)[1], 0.9)
    params, state = train(gradual(0.5, 1.0, every=1), 1, state)
    assert state.reached_goal()
    assert find_warnings(state, params) == []


KERNEL = functools.partial(optperm.LeafAxes, "kernel")
FLAGS = {"w": True, "v": True, "b": False}
# Each row of v is a layer of its own.
ROWS = {"w": KERNEL(0, 1), "v": optperm.LeafAxes("bias", (), 1, 0), "b": None}
MASK = {"w": PARAMS["w"] > 0, "v": True, "b": False}
OTHER_ARGUMENTS = {
    "criterion": (gradual(0.5, 1.0), gradual(0.5, 1.0, criterion="movement")),
    "criterion_": (gradual(0.5, 1.0), gradual(0.5, 1.0, criterion="saliency")),
    "scope": (gradual(0.5, 1.0), gradual(0.5, 1.0, scope="leaf")),
    "structure": (gradual(0.5, 1.0, structure=Blocks(2, 2)), gradual(0.5, 1.0, structure=Units())),
    "include": (gradual(0.5, 1.0), gradual(0.5, 1.0, include=True)),
    "include_": (
        rigl(0.5, end=200),
        rigl(0.5, end=200, include={"w": True, "v": False, "b": False}),
    ),
    "sparsity": (rigl(0.5, end=200), rigl(0.6, end=200)),
    "axes": (gradual(0.5, 1.0, include=FLAGS), gradual(0.5, 1.0, include=FLAGS, axes=ROWS)),
    "axes_": (rigl(0.5, end=200), rigl(0.5, end=200, include=FLAGS, axes=ROWS)),
    "axes__": (
        gradual(0.5, 1.0, structure=Units()),
        gradual(
            0.5, 1.0, structure=Units(), axes={"w": KERNEL(1, 0), "v": KERNEL(0, 1), "b": None}
        ),
    ),
    "mask": (optperm.mask_elements(MASK), optperm.mask_elements()),
    "mask_": (
        optperm.mask_elements(MASK),
        optperm.mask_elements(MASK | {"w": PARAMS["w"] > 0.5}),
    ),
    "mask__": (
        optperm.mask_elements(lambda p: {"w": True, "v": True, "b": False}),
        optperm.mask_elements(lambda p: {"w": True, "v": False, "b": True}),
    ),
}


@pytest.mark.parametrize("argument", OTHER_ARGUMENTS)
def test_a_state_made_with_another_argument_is_refused_by_name(argument):
    """In both directions and after a step, and named for a checkpoint too."""
    name = argument.rstrip("_")
    for one, other in (OTHER_ARGUMENTS[argument], OTHER_ARGUMENTS[argument][::-1]):
        _, opt_state = train(one, 1)
        one.update(PARAMS, opt_state, PARAMS)
        with pytest.raises(ValueError, match=f"made with another {name}=. Pass the value"):
            other.update(PARAMS, opt_state, PARAMS)
        lists = map(list_fingerprints, (opt_state, other.init(PARAMS)))
        assert compare_fingerprints(*lists)[0] == name


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (rigl(0.5, end=20, every=1), rigl(0.5, end=20, every=1, grow="random")),
        (rigl(0.5, end=20, every=1), rigl(0.5, end=9, every=2, drop_fraction=0.7, skip_step=True)),
        (rigl(0.5, end=20, every=1), rigl(erk_sparsity(PARAMS, 0.5), end=20, every=1)),
        (gradual(0.5, 1.0, every=2), gradual(0.6, RAMP, every=1)),
        (gradual(0.5, 1.0), gradual(0.5, 1.0, include=FLAGS)),
        (gradual(0.5, 1.0), gradual(0.5, 1.0, axes=optperm.leaf_axes(PARAMS))),
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
    states = [train(one, 0)[1], train(other, 0)[1]]
    other.update(PARAMS, states[0], PARAMS)
    got, wanted = (train(other, 4, state) for state in states)
    support.assert_same_bits(got, wanted)
