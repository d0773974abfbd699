"""The kernels against each other, and what the method says of each move.

A plain reading of the method, which the compiled kernel agrees with bit for bit, is in kernel_test.cc.
"""

import functools
import itertools
import os
import warnings

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import support

from optperm.permutation import cycles, cycles_numpy
from optperm.permutation.weight_vectors import sort_ranks


def random_rows(seed, n, rows, dtype):
    """Weights and recommendations with ties, zeros and numbers that are not finite."""
    rng = np.random.default_rng(seed)
    levels = rng.choice([0, 3, 30])
    weights = rng.normal(size=(n, rows)).astype(dtype)
    recommendation = rng.normal(size=(n, rows)).astype(dtype)
    if levels:
        weights = (np.round(weights * levels) / levels).astype(dtype)
        recommendation = (np.round(recommendation * levels) / levels).astype(dtype)
    weights[rng.random((n, rows)) < 0.05] = rng.choice([0.0, -0.0])
    recommendation[rng.random((n, rows)) < 0.1] = 0.0
    if rng.random() < 0.5:
        recommendation[rng.random((n, rows)) < 0.1] = rng.choice([np.inf, -np.inf, np.nan])
        weights[rng.random((n, rows)) < 0.05] = rng.choice([np.inf, -np.inf, np.nan])
    seeds = rng.integers(0, 2**32, size=(rows, 2), dtype=np.uint32)
    return recommendation, weights, seeds


@functools.cache
def _compiled(kernel, drop_remainder):
    """Another function for each kernel, which is chosen while it is traced."""
    del kernel
    return jax.jit(functools.partial(cycles.permute_rows, drop_remainder=drop_remainder))


def permute(rows, aggressiveness, size, drop_remainder):
    """`cycles.permute_rows` with the kernel that the environment names."""
    recommendation, weights, seeds = rows
    run = _compiled(os.environ.get("OPTPERM_KERNEL"), drop_remainder)
    ranks = jax.jit(sort_ranks)(weights)
    outputs = run(
        recommendation, weights, ranks, seeds, jnp.float32(aggressiveness), jnp.int32(size)
    )
    return jax.device_get(outputs)


def by_hand(rows, ranks, aggressiveness, size, drop_remainder):
    """The NumPy kernel without JAX: arrays of (n, rows), the same for each row."""
    of_each = np.ones((1, ranks.shape[1]))
    operands = [array[None] for array in (rows[0], rows[1], ranks, rows[2])]
    operands += [(aggressiveness * of_each).astype(np.float32), (size * of_each).astype(np.int32)]
    outputs = cycles_numpy.permute_rows(*operands, drop_remainder=drop_remainder)
    return [output[0] for output in outputs]


# A permutation of rows of many lengths; the partitions run from single entries to whole rows.
CASES = [
    (seed, n, rows, dtype, max(1, int(share * n)), drop, alpha)
    for seed, ((n, rows), dtype, (share, drop), alpha) in enumerate(
        itertools.product(
            [(1, 3), (2, 40), (7, 20), (33, 9), (200, 4)],
            ["float32", "float64"],
            [(0.0, False), (0.3, False), (0.3, True), (1.0, False), (2.0, True)],
            [0.0, 0.4],
        )
    )
]


@pytest.mark.parametrize("compiled", ["ffi", "callback"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_compiled_kernels_give_the_bits_of_the_readable_one(compiled, dtype, monkeypatch):
    """Weights, ranks and moved counts agree bit for bit over all kinds of rows and partitions."""
    support.require_kernel(compiled)
    with jax.enable_x64(dtype == "float64"):
        for seed, n, rows, case_dtype, size, drop, alpha in CASES:
            if case_dtype != dtype:
                continue
            arrays = random_rows(seed, n, rows, dtype)
            results = {}
            for kernel in (compiled, "numpy"):
                monkeypatch.setenv("OPTPERM_KERNEL", kernel)
                results[kernel] = permute(arrays, alpha, size, drop)
            for got, expected in zip(results[compiled], results["numpy"], strict=True):
                support.assert_same_bits(got, expected)


@hypothesis.given(
    n=st.integers(1, 60),
    share=st.floats(0.0, 1.2),
    seed=st.integers(0, 2**32 - 1),
    alpha=st.floats(0.0, 1.0, width=32),
    drop=st.booleans(),
)
@hypothesis.settings(max_examples=150)
def test_moves_follow_the_recommendation_within_each_subset_and_its_reach(
    n, share, seed, alpha, drop
):
    """A moved weight stays in its subset, moves the way asked, and by no more than epsilon."""
    size = max(1, int(share * n))
    rows = random_rows(seed, n, rows=1, dtype=np.float32)
    old = np.argsort(np.argsort(rows[1], axis=0, kind="stable"), axis=0).astype(np.int32)
    outputs = by_hand(rows, old, alpha, size, drop)
    recommendation, weights, new, new_ranks, ranks = (
        array.T for array in (*rows[:2], *outputs[:2], old)
    )
    seeds, moved = rows[2], outputs[2]
    w, m, after = weights[0].astype(np.float64), recommendation[0], new[0].astype(np.float64)
    # The partition is drawn over ranks.
    labels = cycles_numpy.partition(n, size, seeds[0], drop)[ranks[0]]
    has_moved = new_ranks[0] != ranks[0]
    assert moved[0] == np.sum(has_moved)
    fit = np.isfinite(m) & (m != 0) & np.isfinite(w)
    assert not np.any(has_moved & ~(fit & (labels >= 0)))
    spread = np.ptp(w[np.isfinite(w)]) if np.isfinite(w).any() else 0.0
    for label in range(labels.max(initial=-1) + 1):
        inside = labels == label
        np.testing.assert_array_equal(np.sort(new_ranks[0][inside]), np.sort(ranks[0][inside]))
        s = np.sum(inside & fit)
        if s < 2:
            assert not np.any(has_moved & inside)
            continue
        epsilon = spread * (np.float64(np.float32(alpha)) + 1.0 / s)
        risers, fallers = has_moved & inside & (m < 0), has_moved & inside & (m > 0)
        assert np.all(after[risers] >= w[risers])
        assert np.all(after[risers] < w[risers] + epsilon)
        assert np.all(after[fallers] < w[fallers])
        assert np.all(after[fallers] >= w[fallers] - epsilon)


@hypothesis.given(n=st.integers(1, 300), size=st.integers(1, 320), seed=st.integers(0, 2**64 - 1))
@hypothesis.settings(max_examples=150)
def test_subsets_have_the_sizes_asked_for(n, size, seed):
    """Disjoint subsets of P entries, then the remainder, which sits out if it is to be dropped."""
    words = np.array([seed & 0xFFFFFFFF, seed >> 32], np.uint32)
    full, remainder = divmod(n, size) if size < n else (0, n)
    kept = cycles_numpy.partition(n, size, words, drop_remainder=False)
    counts = np.bincount(kept)
    np.testing.assert_array_equal(counts, [size] * full + [remainder] * (remainder > 0))
    dropped = cycles_numpy.partition(n, size, words, drop_remainder=True)
    if size >= n or not remainder:
        np.testing.assert_array_equal(dropped, kept)
    else:
        np.testing.assert_array_equal(dropped, np.where(kept == full, -1, kept))


def test_partitions_are_uniform():
    """All 30 ways to split five entries as 2 + 2 + 1 come equally often (chi-square)."""
    draws = 6000
    words = np.random.default_rng(7).integers(0, 2**32, (draws, 2), dtype=np.uint32)
    found = {}
    for seed in words:
        labels = tuple(cycles_numpy.partition(5, 2, seed, drop_remainder=False))
        found[labels] = found.get(labels, 0) + 1
    assert len(found) == 30
    expected = draws / 30
    statistic = sum((count - expected) ** 2 / expected for count in found.values())
    assert statistic < 52.3  # the 99.5 % quantile of chi-square with 29 degrees of freedom


def test_splitmix64_gives_its_published_numbers():
    """The first outputs for the seed 1234567, from the generator's reference program."""
    np.testing.assert_array_equal(
        cycles_numpy.splitmix64(np.uint64(1234567), 3),
        np.array([6457827717110365317, 3203168211198807973, 9817491932198370423], np.uint64),
    )


def test_multiply_high_is_exact():
    """The upper half of a product, against Python's own integers."""
    rng = np.random.default_rng(0)
    a = rng.integers(0, 2**64, 200, dtype=np.uint64)
    b = rng.integers(1, 2**32, 200, dtype=np.uint64)
    expected = [int(x) * int(y) >> 64 for x, y in zip(a, b, strict=True)]
    np.testing.assert_array_equal(cycles_numpy.multiply_high(a, b), np.array(expected, np.uint64))


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("gpu", ValueError, r"OPTPERM_KERNEL must be one of ffi, .* got 'gpu'"),
        ("ffi", RuntimeError, r"asks for the kernel 'ffi'; available here: numpy"),
    ],
)
def test_a_kernel_that_is_not_there_is_refused(name, error, message, monkeypatch):
    """Asking for one that is unknown or missing is an error, not a silent fallback."""
    monkeypatch.setattr(cycles, "available_kernels", lambda: ("numpy",))
    monkeypatch.setenv("OPTPERM_KERNEL", name)
    with pytest.raises(error, match=message):
        cycles.chosen_kernel()


@pytest.mark.parametrize("share", [0.001, 0.3, 1.0])
def test_long_vectors_have_the_same_bits_on_several_threads(share, monkeypatch):
    """Where there are fewer vectors than threads these share each one, XLA's threads or the kernel's."""
    n = 40_000
    rows = random_rows(3, n, 1, np.float32)
    results = []
    for kernel in ("ffi", "callback"):
        support.require_kernel(kernel)
        monkeypatch.setenv("OPTPERM_KERNEL", kernel)
        results.append(permute(rows, 0.1, int(share * n), False))
    support.assert_same_bits(*results)
    assert results[0][2] > n / 3


def test_the_number_of_threads_can_be_set(monkeypatch):
    """OPTPERM_NUM_THREADS says it; what is no positive integer is refused."""
    monkeypatch.setenv("OPTPERM_NUM_THREADS", "3")
    assert cycles._max_threads() == 3
    for wrong in ("0", "-1", "two", ""):
        monkeypatch.setenv("OPTPERM_NUM_THREADS", wrong)
        with pytest.raises(ValueError, match=f"OPTPERM_NUM_THREADS must be .* got '{wrong}'"):
            cycles._max_threads()
    monkeypatch.delenv("OPTPERM_NUM_THREADS")
    assert cycles._max_threads() >= 1


def test_missing_library_is_told_once_with_the_remedy(monkeypatch):
    """Without the compiled library there is one warning, which says what to do."""
    cycles.available_kernels.cache_clear()
    monkeypatch.setattr(cycles, "_library", lambda: None)
    try:
        with pytest.warns(RuntimeWarning, match="pip install --force-reinstall"):
            assert cycles.available_kernels() == ("numpy",)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert cycles.available_kernels() == ("numpy",)
    finally:
        cycles.available_kernels.cache_clear()
        monkeypatch.undo()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            cycles.available_kernels()
