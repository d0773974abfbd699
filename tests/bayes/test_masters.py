"""Params of 16 bits and their copy in float32."""

import jax.numpy as jnp
import loops
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
    start = (0.01 * support.normal((4096,))).astype(dtype)
    moves = 0.003 * np.asarray(support.normal((20, 4096), seed=1))
    for apply in (optperm.apply_updates, loops.by_addition):
        for how, steps in (("scan", 20), ("eager", 3)):
            trail = loops.train(tx, start, moves[:steps], apply=apply, how=how)
            for p, state in trail:
                support.assert_same_bits(state.masters.astype(dtype), p)
            error = trail[-1][1].masters - (start.astype(jnp.float32) + moves[:steps].sum(0))
            # A step's rounding errs by 2^-9 of it at most; a copy that is lost errs so of each param.
            assert np.sqrt(np.mean(np.square(error))) < 2e-3 * 0.003 * np.sqrt(steps)
            assert np.median(np.abs(error)) < 3e-6


def test_params_changed_by_something_else_begin_anew():
    tx, p = with_masters(IDENTITY, method="identity"), jnp.array([1.0, 2.0], jnp.bfloat16)
    _, state = tx.update(jnp.array([0.001, 0.001]), tx.init(p), p)
    _, state = tx.update(jnp.array([0.001, 0.001]), state, p.at[1].set(0.0))
    np.testing.assert_allclose(state.masters, [1.002, 0.001], rtol=1e-5)
