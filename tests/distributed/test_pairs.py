"""Gossip between pairs of replicas: who meets whom, and what becomes of the centers."""

import functools

import jax
import jax.numpy as jnp
import loops
import numpy as np
import optax
import replicas

import optperm

AXIS, PERIOD = replicas.AXIS, 3


def test_all_are_paired_and_in_time_with_many():
    """Each is its partner's partner, of an even number none its own; nobody is always with the same."""
    for size in (1, 2, 4, 5):
        seen = {int(i): set() for i in range(size)}
        for count in range(20):
            other = replicas.partners(size, count)
            assert (other[other] == np.arange(size)).all()
            assert (other == np.arange(size)).sum() == size % 2
            for i, j in enumerate(other):
                seen[i].add(int(j))
        assert all(len(each) == (size if size % 2 else size // 2) for each in seen.values())


def test_replicas_without_a_say_follow_their_partner():
    """Weight zero, or params that are not finite; of two without a say each keeps its center."""
    make = functools.partial(optperm.diloco, optax.sgd(1.0), every=PERIOD)
    tx, start = make(axis_name=AXIS, combine="pairs"), np.zeros(1, np.float32)
    alone = loops.train(make(), start, [np.ones(1, np.float32)] * PERIOD)[-1][0]
    step = loops.make_step(tx, lambda p, batch: (batch[:1], {"weight": batch[1]}))
    step = replicas.MAPPINGS["vmap"](step, 2)
    for weights in ([1.0, 0.0], [1.0, np.nan], [0.0, 0.0]):
        params, opt_state = (replicas.stack([tree] * 2) for tree in (start, tx.init(start)))
        for _ in range(PERIOD):
            batch = np.float32([[1.0, weights[0]], [5.0, weights[1]]])
            params, opt_state = step(params, opt_state, batch)
        wanted = 0.0 if weights == [0.0, 0.0] else float(alone[0])
        np.testing.assert_allclose(params, [[wanted]] * 2, atol=1e-6)
        assert opt_state.skipped.tolist() == [0, int(np.isnan(weights[1]))]


def test_centers_of_replicas_that_stand_still_meet_to_the_rounding_of_their_dtype():
    start = 1 + 0.1 * np.random.default_rng(0).normal(size=(4, 16))
    for dtype, scale in ((jnp.bfloat16, 16.0), (jnp.float32, 1.0)):
        tx = optperm.diloco(
            optax.sgd(0.1), every=1, axis_name=AXIS, combine="pairs", center_dtype=dtype
        )
        step = jax.vmap(loops.make_step(tx), axis_name=AXIS)
        params = jnp.asarray(scale * start, jnp.float32)
        opt_state, grads = jax.vmap(tx.init)(params), np.zeros((200, 4, 16), np.float32)
        _, opt_state = jax.jit(functools.partial(loops.carry, step))(params, opt_state, grads)
        center = np.asarray(optperm.distributed.center_params(opt_state), np.float32)
        apart = np.ptp(center, axis=0).max() / scale
        assert np.ptp(start, axis=0).max() > 0.2 > 4 * jnp.finfo(dtype).eps >= apart
