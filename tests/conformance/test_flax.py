"""Flax around every transformation: `nnx.Optimizer` and linen's `TrainState` train as arrays do."""

import functools

import chex
import jax
import jax.numpy as jnp
import loops
import numpy as np
import optax
import pytest
import support
from flax import nnx
from flax.training.train_state import TrainState
from transformations import Transformation

import optperm
from optperm.core.states import find_states

pytestmark = pytest.mark.usefixtures("lenient")
BATCHES = loops.linear_batches(4)


class Model(nnx.Module):
    """The params as variables."""

    def __init__(self, params):
        self.kernel, self.bias = nnx.Param(params["kernel"]), nnx.Param(params["bias"])


def prune_and_freeze(params, opt_state):
    of_each = {"scope": "leaf", "include": True}
    params, opt_state = optperm.sparsity.prune(params, opt_state, 0.3, **of_each)
    scores = jax.tree.map(jnp.sin, params)
    return params, optperm.sparsity.freeze(opt_state, 0.3, scores=scores, **of_each)


def snapshot(params, opt_state):
    full_grad = optperm.variance.full_gradient(loops.linear_loss, params, BATCHES)
    return params, optperm.variance.take_snapshot(opt_state, params, full_grad)


# What is called between steps, for new params and state, and what is read at the end.
BETWEEN = {"mask_elements": prune_and_freeze, "svrg": snapshot, "svrg_and_sgd": snapshot}
PERMUTING = ("sgperm", "permute_by_cycles", "switch to sgperm")
READ = {
    **dict.fromkeys(("agn", "diloco"), lambda state, _: optperm.distributed.center_params(state)),
    **dict.fromkeys(PERMUTING, lambda state, _: optperm.permutation.permuted_params(state)),
    "laperm": optperm.permutation.permuted_params,
    "constant_sgd": lambda state, _: optax.tree.get(state, "velocity"),
    "record_trajectory": lambda state, _: optperm.subspace.trajectory(state),
    "mandt_sgd": lambda state, _: optax.tree.get(state, "covariance"),
}


def assert_close_leaves(actual, expected):
    """Assert that two trees have the same leaves to rounding, in any containers."""
    leaves = jax.tree.leaves(actual), jax.tree.leaves(expected)
    chex.assert_trees_all_close(*leaves, rtol=1e-5, atol=1e-6)


@pytest.mark.spans("sgperm")
def test_nnx_optimizer(ours):
    """Params and states are variables; they stay so through steps and through what is called between
    them, inside `nnx.jit` and outside, and hold what arrays do. In `optax.apply_if_finite`, a gradient
    with a NaN in it moves neither."""
    tx, model = ours.make(), Model(support.random_params())
    optimizer = nnx.Optimizer(model, optax.apply_if_finite(tx, 3), wrt=nnx.Param)
    structure = jax.tree.structure(optimizer.opt_state)
    between = BETWEEN.get(ours.name, lambda params, opt_state: (params, opt_state))

    def prepare(model, optimizer):
        state = nnx.state(model, nnx.Param)
        params, optimizer.opt_state = between(state, ours.prepared(optimizer.opt_state, state))
        nnx.update(model, params)

    @nnx.jit
    def step(model, optimizer, batch):
        grads, extra_args = loops.linear(nnx.state(model, nnx.Param), batch)
        optimizer.update(model, grads, **extra_args)

    params, opt_state = support.random_params(), tx.init(support.random_params())
    for index, batch in enumerate(BATCHES):
        if index in (1, 3):
            (prepare if index == 1 else nnx.jit(prepare))(model, optimizer)
            params, opt_state = between(params, ours.prepared(opt_state, params))
            held = nnx.to_pure_dict(nnx.state(model, nnx.Param))
        step(model, optimizer, batch)
        params, opt_state = loops.compiled(tx, loops.linear)(params, opt_state, batch)
    assert jax.tree.structure(optimizer.opt_state) == structure
    guarded, state = optimizer.opt_state.inner_state, nnx.state(model, nnx.Param)
    assert_close_leaves((state, guarded), (params, opt_state))
    before = jax.tree.map(np.array, jax.tree.leaves((state, guarded)))
    step(model, optimizer, jnp.full((2,), jnp.nan))
    assert int(optimizer.opt_state.total_notfinite[...]) == 1
    after = jax.tree.leaves((nnx.state(model, nnx.Param), optimizer.opt_state.inner_state))
    support.assert_same_bits(after, before)
    for masked in find_states(opt_state, optperm.sparsity.MaskElementsState):
        for name, moves in masked.mask.items():
            assert 0 < np.sum(~moves) < moves.size
            for other in (held, params):
                support.assert_same_bits(state[name][~moves], other[name][~moves])
    if read := READ.get(ours.name):
        found = read(optimizer.opt_state, state)
        assert_close_leaves(found, read(opt_state, params))
    if ours.permutes:
        nnx.update(model, found)
        support.assert_permutes(nnx.to_pure_dict(found), support.random_params())
        support.assert_same_bits(model.kernel.get_value(), nnx.to_pure_dict(found)["kernel"])


@pytest.mark.spans("sgperm", "agn")
def test_linen_train_state(ours):
    """Flax's own, which adds the updates, goes within a rounding where placing does, pulls to a center
    included; and the exact weights are never lost."""
    tx, params = ours.make(), support.random_params()

    @jax.jit
    def step(state, batch):
        grads, extra_args = loops.linear(state.params, batch)
        told = tx._replace(update=functools.partial(tx.update, **extra_args))
        return state.replace(tx=told).apply_gradients(grads=grads).replace(tx=tx)

    batches = loops.linear_batches(20)
    state = TrainState.create(apply_fn=None, params=params, tx=tx)
    for batch in batches:
        state = step(state, batch)
    exact, _ = loops.train(tx, params, batches, evaluate=loops.linear)[-1]
    chex.assert_trees_all_close(state.params, exact, rtol=1e-6, atol=5e-7)
    if ours.permutes:
        found, _ = loops.compiled(tx, loops.linear)(state.params, state.opt_state, batches[0])
        support.assert_permutes(found, params)


@pytest.mark.entries
def test_an_optimizer_that_switches_to_placing_trains_in_flax():
    arguments = {"num_steps": 1, "first": optax.sgd(0.05), "then": optperm.sgperm(0.4)}
    ours = Transformation(optperm.switch_after, arguments, other_name="switch to sgperm")
    test_nnx_optimizer(ours)
    test_linen_train_state(ours)
