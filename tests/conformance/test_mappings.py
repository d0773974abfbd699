"""Every transformation under every mapping over replicas: with a mean gradient, and by themselves."""

import functools

import chex
import jax
import jax.numpy as jnp
import loops
import numpy as np
import pytest
import replicas
import support
from transformations import ordinal

import optperm
from optperm.core.mapped_axes import mark_varying

STEPS = 3
MAPPINGS = sorted(replicas.MAPPINGS)
# Their states begin with parts that the checked mode of shard_map sees to be alike on all replicas, and
# that are not after a step: a scan over them needs `jax.lax.pcast(state, axis, to="varying")` first.
ALIKE_AT_INIT = {
    *("dim_reduce", "dim_reduce-mindspore", "twa", "dldr", "dldr-twa"),
    *("constant_sgd", "mandt_sgd", "sgld", "sghmc"),
}
# Constant SGD divides its probes of the correlation by standard deviations of two examples, which may be
# small: rounding then shows in the fourth digit of a probe, a vector of length 1, and of its quotient.
TOLERANCES = {"constant_sgd": {"rtol": 1e-4, "atol": 1e-4}}
USUAL = {"rtol": 1e-5, "atol": 1e-6}


def mean_gradient(params, batch, axis_name=replicas.AXIS):
    """The gradient over the examples of all replicas, with what is asked for of all of them."""
    e = optperm.evaluate(loops.linear_loss, params, batch, axis_name=axis_name)
    full_grad_fn = lambda params: jax.grad(loops.linear_loss)(params, jnp.arange(5.0))  # noqa: E731
    same = {name: e.extra_args[name] for name in ("value", "grad", "value_fn", "grad_fn")}
    return e.grad, {"full_grad_fn": full_grad_fn, **same}


def check_replicas_with_a_mean_gradient(ours, mapping):
    """Assert that four with parts of a batch train as one with all of it, and hold the same bits."""
    tx, params = ours.make(), support.random_params()
    batches = np.arange(4.0 * STEPS, dtype=np.float32).reshape(STEPS, 4)

    def train(shared, batches, axis_name=replicas.AXIS):
        evaluate = functools.partial(mean_gradient, axis_name=axis_name)
        return loops.carry(loops.make_step(tx, evaluate), *shared, batches), ()

    shared = params, ours.prepared(tx.init(params), params)
    got, _ = replicas.share(train, mapping, 4)(shared, batches.T[:, :, None])
    got = jax.device_get(got)
    expected, _ = jax.jit(functools.partial(train, axis_name=None))(shared, batches)
    for index in range(4):
        support.assert_same_bits(replicas.take(got, index), replicas.take(got, 0))
    chex.assert_trees_all_close(replicas.take(got, 0), expected, **TOLERANCES.get(ours.name, USUAL))


def check_models_of_their_own(ours, mapping):
    """Assert that three, from `init` to the end of a scan in the mapped function, train as alone."""
    starts = [support.random_params(seed) for seed in range(3)]
    tx, batches = ours.make(), jnp.stack(loops.linear_batches(STEPS))

    def run(params, axes=()):
        state = mark_varying(tx.init(params), axes)
        return loops.carry(loops.make_step(tx, loops.linear), params, state, batches)

    is_marked = ours.name in ALIKE_AT_INIT and mapping == "shard_map"
    own = functools.partial(run, axes=(replicas.AXIS,)) if is_marked else run
    together = jax.device_get(replicas.MAPPINGS[mapping](own, 3)(replicas.stack(starts)))
    alone = jax.jit(run)
    for index, params in enumerate(starts):
        one = replicas.take(together, index)
        tolerance = TOLERANCES.get(ours.name, USUAL)
        chex.assert_trees_all_close(one, jax.device_get(alone(params)), **tolerance)


@pytest.mark.spans("sgperm", "agn", "svrg", "mask_elements")
def test_replicas_with_a_mean_gradient_under_the_mapping_whose_turn_it_is_train_as_one(ours):
    check_replicas_with_a_mean_gradient(ours, MAPPINGS[ordinal(ours) % len(MAPPINGS)])


@pytest.mark.spans("sgperm", "agn", "svrg", "mandt_sgd", "mask_elements")
def test_models_of_their_own_in_checked_shard_map_train_as_each_alone(ours):
    check_models_of_their_own(ours, "shard_map")


@pytest.mark.exhaustive
@pytest.mark.parametrize("mapping", MAPPINGS)
@pytest.mark.parametrize("check", [check_replicas_with_a_mean_gradient, check_models_of_their_own])
def test_replicas_under_every_mapping_train_as_alone(ours, check, mapping):
    check(ours, mapping)
