"""Params of 16 bits and their copy in float32."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import support

import optperm
from optperm.bayes._masters import with_masters

IDENTITY = optax.GradientTransformationExtraArgs(lambda p: (), lambda g, s, p, **extras: (g, s))


@pytest.mark.parametrize("dtype", ["bfloat16", support.FLOAT16])
def test_params_are_the_rounded_masters(dtype):
    """Bit for bit after each step, also of entries that a step takes across zero, whose sum in 16 bits
    does not reach the rounded copy; and what the copy holds is the sum of all steps."""
    tx, dtype = with_masters(IDENTITY, method="identity"), jnp.dtype(dtype)
    start = (0.01 * jax.random.normal(jax.random.key(0), (4096,))).astype(dtype)
    moves = 0.003 * jax.random.normal(jax.random.key(1), (20, 4096))

    def step(apply, carry, move):
        p, state = carry
        updates, state = tx.update(move, state, p)
        p = apply(p, updates, state)
        return (p, state), (p, state.masters)

    for apply in (optperm.apply_updates, lambda p, u, _: optax.apply_updates(p, u)):
        eager, carry = functools.partial(step, apply), (start, tx.init(start))
        _, found = jax.jit(functools.partial(jax.lax.scan, eager))(carry, moves)
        support.assert_same_bits(found[1].astype(dtype), found[0])
        for move in moves[:3]:
            carry, (p, masters) = eager(carry, move)
            support.assert_same_bits(masters.astype(dtype), p)
        error = found[1][-1] - (start.astype(jnp.float32) + moves.sum(0))
        # A step's rounding errs by 2^-9 of it at most; a copy that is lost errs so of each param.
        assert np.sqrt(np.mean(np.square(error))) < 2e-3 * 0.003 * np.sqrt(20)
        assert np.median(np.abs(error)) < 3e-6


def test_params_changed_by_something_else_begin_anew():
    tx, p = with_masters(IDENTITY, method="identity"), jnp.array([1.0, 2.0], jnp.bfloat16)
    _, state = tx.update(jnp.array([0.001, 0.001]), tx.init(p), p)
    _, state = tx.update(jnp.array([0.001, 0.001]), state, p.at[1].set(0.0))
    np.testing.assert_allclose(state.masters, [1.002, 0.001], rtol=1e-5)
