"""One order of the weights on every path: no kernel and no thread takes subnormal numbers for zero.

XLA's threads do in what they compute themselves, a thread of Python's does not.
"""

import functools
import os
from fractions import Fraction
from unittest import mock

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import support

import optperm
from optperm.permutation import cycles, cycles_numpy
from optperm.permutation.weight_vectors import sort_ranks

N, ROWS = 40, 6
MIXED = {"float32 by float64": ("float32", "float64"), "float64 by float32": ("float64", "float32")}
DTYPES = {**{name: (name, name) for name in support.DTYPES}, **MIXED}


def draw_values(rng, kind, dtype):
    """Numbers of a kind, (N, ROWS)."""
    least = np.float64(jnp.finfo(dtype).smallest_subnormal)
    normal, signs = rng.normal(size=(N, ROWS)), rng.choice([-1.0, 1.0], (N, ROWS))
    few = rng.choice(rng.normal(size=3), (N, ROWS))
    values = {
        "normal": normal,
        "few": few,
        "zeros": np.where(rng.random((N, ROWS)) < 0.4, 0.0 * signs, normal),
        "subnormal": np.round(100 * normal) * least,
        "few subnormal": np.round(3 * normal) * least,
        "half subnormal": np.where(
            np.arange(N)[:, None] % 2, np.round(100 * normal) * least, normal
        ),
        "just normal": normal * np.float64(jnp.finfo(dtype).smallest_normal),
    }[kind]
    return values.astype(dtype)


KINDS = st.sampled_from(
    ["normal", "few", "zeros", "subnormal", "few subnormal", "half subnormal", "just normal"]
)


@functools.cache
def compiled(kernel):
    """`cycles.permute_rows` under jit with a kernel, beside the ranks it is given."""

    def run(weights, *operands):
        ranks = sort_ranks(weights)
        recommendation, seeds, alpha, size = operands
        outputs = cycles.permute_rows(
            recommendation, weights, ranks, seeds, alpha, size, drop_remainder=False
        )
        return ranks, *outputs

    return jax.jit(run)


def permute(kernel, *operands):
    with mock.patch.dict(os.environ, OPTPERM_KERNEL=kernel):
        return jax.device_get(compiled(kernel)(*operands))


@pytest.mark.parametrize("dtypes", DTYPES)
@hypothesis.given(
    seed=st.integers(0, 2**32 - 1),
    kinds=st.tuples(KINDS, KINDS),
    alpha=st.sampled_from([0.0, 0.05, 0.5]),
    size=st.sampled_from([7, 20, N]),
)
@hypothesis.settings(max_examples=40)
def test_all_kernels_give_the_same_bits(dtypes, seed, kinds, alpha, size):
    """Within XLA and from a thread of Python's, whatever the numbers are; ranks are those of NumPy."""
    support.require_kernel("ffi")
    dtype, by_dtype = (support.DTYPES[name] for name in DTYPES[dtypes])
    rng = np.random.default_rng(seed)
    weights = draw_values(rng, kinds[0], dtype)
    recommendation = draw_values(rng, kinds[1], by_dtype)
    seeds = rng.integers(0, 2**32, (ROWS, 2), np.uint32)
    operands = recommendation, seeds, np.float32(alpha), np.int32(size)
    with jax.enable_x64("float64" in DTYPES[dtypes]):
        ranks, *expected = permute("numpy", weights, *operands)
        order = np.argsort(weights.astype(np.float64), axis=0, kind="stable")
        np.testing.assert_array_equal(ranks, np.argsort(order, axis=0))
        for kernel in ("ffi", "callback"):
            support.assert_same_bits(permute(kernel, weights, *operands)[1:], tuple(expected))
    # Python's own thread computes with subnormal numbers; so does NumPy's conversion on it.
    wide = np.result_type(dtype, by_dtype, np.float32)
    arrays = [x.astype(wide)[None] for x in (recommendation, weights)] + [ranks[None], seeds[None]]
    arrays += [np.full((1, ROWS), alpha, np.float32), np.full((1, ROWS), size, np.int32)]
    for kernel in ("callback", "numpy"):
        new, *rest = cycles._on_host(kernel, False, *arrays)
        support.assert_same_bits((new[0].astype(dtype), *(x[0] for x in rest)), tuple(expected))


@pytest.mark.parametrize("dtype", support.DTYPES)
@pytest.mark.parametrize("tiny", ["every second weight", "all weights"])
def test_subnormal_weights_move_as_recommended(tiny, dtype, kernel):
    """No move is against its recommendation, and no reach is longer because a weight counts as zero."""
    rng = np.random.default_rng(0)
    dtype = support.DTYPES[dtype]
    weights = draw_values(rng, "subnormal" if tiny == "all weights" else "half subnormal", dtype)
    grads = draw_values(rng, "normal", dtype)
    with jax.enable_x64(dtype == np.float64):
        tx = optperm.permute_by_cycles(0.25, 1.0)
        params = jnp.asarray(weights)
        _, state = jax.jit(tx.update)(jnp.asarray(grads), jax.jit(tx.init)(params), params)
        after = np.asarray(state.weights)
    support.assert_permutes(after, weights)
    # In units of the least number, in which Python's integers are exact.
    least = Fraction(float(jnp.finfo(dtype).smallest_subnormal))
    before, after = (
        np.vectorize(lambda x: int(Fraction(x) / least), otypes=[object])(x.astype(np.float64))
        for x in (weights, after)
    )
    moves = after - before
    assert np.mean(moves != 0) > 0.3
    assert np.all(np.where(grads > 0, moves <= 0, moves >= 0))
    reach = before.max(axis=0) - before.min(axis=0)
    assert np.all(4 * N * np.abs(moves) <= (N + 4) * reach + 4 * N)


def test_subnormal_recommendations_count(kernel):
    """An entry whose recommendation is subnormal takes part like any other."""
    rng = np.random.default_rng(1)
    params, wishes = rng.normal(size=(N, ROWS)).astype(np.float32), rng.choice([-3, 5], (N, ROWS))
    grads = (wishes * np.float64(1e-45)).astype(np.float32)
    tx = optperm.permute_by_cycles(0.25, 1.0)
    state = jax.jit(tx.init)(jnp.asarray(params))
    _, of_subnormal = jax.jit(tx.update)(jnp.asarray(grads), state, params)
    _, of_normal = jax.jit(tx.update)(wishes.astype(np.float32), state, params)
    support.assert_same_bits(of_subnormal.weights, of_normal.weights)
    assert of_subnormal.share_moved > 0.3


def test_a_leaf_of_subnormal_weights_is_not_called_constant():
    """It has an order, so permuting can train it; the tests turn any warning into an error."""
    optperm.sgperm().init(jnp.asarray(np.arange(1, 7, dtype=np.float32) * np.float32(1e-44)))


@pytest.mark.parametrize("damage", ["twice", "too large", "negative"])
def test_damaged_ranks_are_refused(damage, kernel):
    """Ranks that are no permutation raise an error that says so, with every kernel."""
    params = support.bias(9)
    tx = optperm.permute_by_cycles(0.25, 1.0)
    state = jax.jit(tx.init)(params)
    bad = {"twice": state.ranks[3], "too large": 9, "negative": -1}[damage]
    state = state._replace(ranks=state.ranks.at[5].set(bad))
    with pytest.raises(jax.errors.JaxRuntimeError, match="not permutations: the state is damaged"):
        jax.block_until_ready(jax.jit(tx.update)(support.bias(9, 1), state, params))
    ranks = np.asarray(state.ranks)[None, :, None]
    rows = np.asarray(params)[None, :, None]
    of_row = np.ones((1, 1), np.float32), np.full((1, 1), 9, np.int32)
    with pytest.raises(ValueError, match="the state is damaged"):
        cycles_numpy.permute_rows(
            rows, rows, ranks, np.zeros((1, 1, 2), np.uint32), *of_row, drop_remainder=False
        )
