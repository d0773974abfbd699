"""Samplers on params of 16 bits, which keep the bits that rounding removes."""

import jax
import jax.numpy as jnp
import loops
import numpy as np
import optax
import pytest
import support

import optperm
from optperm.bayes._remainders import with_remainders
from optperm.core.remainders import join

IDENTITY = optax.GradientTransformationExtraArgs(lambda p: (), lambda g, s, p, **extras: (g, s))


@pytest.mark.parametrize(
    "dtype",
    [
        "bfloat16",
        pytest.param("float16", marks=[support.needs_float16, pytest.mark.exhaustive]),
    ],
)
def test_params_with_remainders_are_the_sum_of_all_steps(dtype):
    """Also for entries that a step takes across zero, whose sum in 16 bits misses the rounded number."""
    tx, dtype = with_remainders(IDENTITY, method="identity"), jnp.dtype(dtype)
    start = (0.01 * support.normal((4096,))).astype(dtype)
    moves = 0.003 * np.asarray(support.normal((20, 4096), seed=1))
    for apply in (optperm.apply_updates, loops.by_addition):
        for how, steps in (("scan", 20), ("eager", 3)):
            trail = loops.train(tx, start, moves[:steps], apply=apply, how=how)
            for p, state in trail:
                wide = np.asarray(join(p, state.remainder))
                nearest = np.asarray(jnp.asarray(wide).astype(dtype))
                # Ties round to the param of the remainder, not to an even number.
                same = nearest == np.asarray(p)
                assert np.mean(same) > 0.999
            error = wide - (start.astype(jnp.float32) + moves[:steps].sum(0))
            # A step's rounding errs by 2^-9 of it at most; a lost remainder errs so of each param.
            assert np.sqrt(np.mean(np.square(error))) < 2e-3 * 0.003 * np.sqrt(steps)
            assert np.median(np.abs(error)) < 3e-6


def test_params_changed_by_something_else_start_anew():
    tx, p = with_remainders(IDENTITY, method="identity"), jnp.array([1.0, 2.0], jnp.bfloat16)
    changed = jnp.array([1.0, 0.0], jnp.bfloat16)

    @jax.jit
    def train(p, changed, move):
        _, state = tx.update(move, tx.init(p), p)
        updates, state = tx.update(move, state, changed)
        return join(changed + updates, state.remainder)

    wide = train(p, changed, np.float32([0.001, 0.001]))
    np.testing.assert_allclose(wide, [1.002, 0.001], rtol=1e-5)
