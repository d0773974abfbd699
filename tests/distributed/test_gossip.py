"""Gossip between pairs of replicas: who meets whom, and what becomes of the centers."""

import functools

import jax
import jax.numpy as jnp
import loops
import numpy as np
import optax
import replicas

import optperm

PAIRS = functools.partial(optperm.diloco, axis_name=replicas.AXIS, combine="pairs")
NESTEROV = optax.sgd(0.8, momentum=0.5, nesterov=True)


def test_all_are_paired_and_in_time_with_many():
    """Each is its partner's partner, of an even number none its own; nobody is always with the same."""
    for size in (1, 2, 4, 5):
        drawn = np.array([replicas.partners(size, count) for count in range(20)])
        for other in drawn:
            assert (other[other] == np.arange(size)).all()
            assert (other == np.arange(size)).sum() == size % 2
        assert {len(set(seen)) for seen in drawn.T} == {size if size % 2 else size // 2}


def test_replicas_without_a_say_follow_their_partner():
    """Weight zero, or params that are not finite; of two without a say each keeps its center."""
    tx, start = PAIRS(optax.sgd(1.0), NESTEROV, every=3), np.zeros(1, np.float32)
    # By outer steps of rate 0.8 and momentum 0.5 as Nesterov has it
    center = -3 * 0.8 * (1 + 0.5)
    step = loops.make_step(tx, lambda p, batch: (batch[:1], {"weight": batch[1]}))
    step = replicas.MAPPINGS["vmap"](step, 2)
    for weights in ([1.0, 0.0], [1.0, np.nan], [0.0, 0.0]):
        params, opt_state = (replicas.stack([tree] * 2) for tree in (start, tx.init(start)))
        for _ in range(3):
            batch = np.float32([[1.0, weights[0]], [5.0, weights[1]]])
            params, opt_state = step(params, opt_state, batch)
        wanted = center if any(weights) else 0.0
        np.testing.assert_allclose(params, [[wanted]] * 2, atol=1e-6)
        assert opt_state.skipped.tolist() == [0, int(np.isnan(weights[1]))]


def test_centers_of_replicas_that_stand_still_meet_to_the_rounding_of_their_dtype():
    start = 1 + 0.1 * np.random.default_rng(0).normal(size=(4, 16))
    for dtype, scale in ((jnp.bfloat16, 16.0), (jnp.float32, 1.0)):
        tx = PAIRS(optax.sgd(0.1), every=1, center_dtype=dtype)
        step = jax.vmap(loops.make_step(tx), axis_name=replicas.AXIS)
        params = jnp.asarray(scale * start, jnp.float32)
        opt_state, grads = jax.vmap(tx.init)(params), np.zeros((200, 4, 16), np.float32)
        _, opt_state = jax.jit(functools.partial(loops.carry, step))(params, opt_state, grads)
        center = np.asarray(optperm.distributed.center_params(opt_state), np.float32)
        apart = np.ptp(center, axis=0).max() / scale
        assert np.ptp(start, axis=0).max() > 0.2 > 4 * jnp.finfo(dtype).eps >= apart
