"""The kernels against each other, and what the method says of each move.

The compiled kernel agrees bit for bit with a plain reading of the method in kernel_test.cc. XLA's
threads take subnormal numbers for zero in what they compute themselves, a thread of Python's does not:
no kernel may, on either.
"""

import functools
import itertools
import os
from unittest import mock

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import support

from optperm.permutation import _cycles as cycles
from optperm.permutation import _cycles_numpy as cycles_numpy
from optperm.permutation import _host_calls as host_calls
from optperm.permutation import _library as library
from optperm.permutation._weight_vectors import sort_ranks

KINDS = ("normal", "few", "zeros", "subnormal", "few subnormal", "half subnormal", "just normal")


def draw_values(rng, kind, dtype, shape):
    """Draw numbers of a kind, with a weight vector in each column."""
    least = np.float64(jnp.finfo(dtype).smallest_subnormal)
    normal, signs = rng.normal(size=shape), rng.choice([-1.0, 1.0], shape)
    few = rng.choice(rng.normal(size=3), shape)
    subnormal, is_second = np.round(100 * normal) * least, np.arange(shape[0])[:, None] % 2 == 1
    values = {
        "normal": normal,
        "few": few,
        "zeros": np.where(rng.random(shape) < 0.4, 0.0 * signs, normal),
        "subnormal": subnormal,
        "few subnormal": np.round(3 * normal) * least,
        "half subnormal": np.where(is_second, subnormal, normal),
        "just normal": normal * np.float64(jnp.finfo(dtype).smallest_normal),
        "not finite": np.where(is_second & (few > 0), signs * rng.choice([np.inf, np.nan]), few),
    }[kind]
    return values.astype(dtype)


def random_rows(seed, n, rows, dtype):
    """Draw recommendations and weights of random kinds, and seeds."""
    rng = np.random.default_rng(seed)
    kinds = rng.choice([*KINDS, *["not finite"] * 5], 2)
    arrays = (draw_values(rng, kind, dtype, (n, rows)) for kind in kinds)
    return *arrays, rng.integers(0, 2**32, size=(rows, 2), dtype=np.uint32)


def ranks_of(weights):
    """The rank of each weight in its row by NumPy's stable sort."""
    order = np.argsort(weights.astype(np.float64), axis=0, kind="stable")
    return np.argsort(order, axis=0).astype(np.int32)


def by_hand(kernel, rows, ranks, aggressiveness, size, drop_remainder=False):
    """Permute by a kernel that is called on this thread, without XLA."""
    of_each = np.ones((1, ranks.shape[1]))
    operands = [array[None] for array in (rows[0], rows[1], ranks, rows[2])]
    operands += [(aggressiveness * of_each).astype(np.float32), (size * of_each).astype(np.int32)]
    on_host = functools.partial(cycles.permute_on_host, kernel, drop_remainder)
    return [output[0] for output in host_calls.on_copies(cycles.PERMUTE, on_host, *operands)]


def assert_compiled_is_readable(rows, *numbers):
    """Assert that weights, ranks and moved counts of the compiled kernel are the readable one's."""
    support.require_kernel("callback")
    compiled, readable = (
        by_hand(kernel, rows, ranks_of(rows[1]), *numbers) for kernel in ("callback", "numpy")
    )
    support.assert_same_bits(compiled, readable)


def test_compiled_kernel_rows_of_any_length_gives_the_bits_of_the_readable_one():
    """Partitions run from single entries to whole rows."""
    lengths = [(1, 3), (2, 40), (7, 20), (33, 9), (200, 4)]
    partitions = [(0.0, False), (0.3, False), (0.3, True), (1.0, False), (2.0, True)]
    cases = itertools.product(lengths, ["float32", "float64"], partitions, [0.0, 0.4])
    for seed, ((n, rows), dtype, (share, drop), alpha) in enumerate(cases):
        size = max(1, int(share * n))
        assert_compiled_is_readable(random_rows(seed, n, rows, dtype), alpha, size, drop)


def test_compiled_kernel_searches_through_ties_come_back_to_the_way_that_is_left():
    """In these rows a search turns back before it finds its cycle, and has to take the next way."""
    for weights, recommendation, epsilon in (
        ([0, 1, 1, 2, 2], [-3, 1, -4, 2, 5], 1.75),
        ([0, 2, 4, 4, 5], [-4, -2, 3, 1, 5], 4.25),
        ([1, 2, 2, 3, 3, 4], [-4, 3, 2, -1, 5, 6], 1.75),
    ):
        w, m = (np.float32(each)[:, None] for each in (weights, recommendation))
        rows = m, w, np.zeros((1, 2), np.uint32)
        assert_compiled_is_readable(rows, epsilon / np.ptp(w) - 1 / len(w), len(w))


def test_compiled_kernel_infinite_weight_among_tiny_ones_gives_the_bits_of_the_readable_one():
    """The readable one multiplies the finite weights by 2^600, and must not overflow at the others."""
    weights = np.array([1e-200, -np.inf, 2e-200, 3e-200, np.nan, -1e-200, np.inf, 4e-200])
    recommendation = np.random.default_rng(0).normal(size=(8, 1))
    rows = recommendation, weights[:, None], np.zeros((1, 2), np.uint32)
    assert_compiled_is_readable(rows, 1.0, 8)


def test_compiled_kernel_ties_of_long_rows_give_the_bits_of_the_readable_one():
    """Whole words of 64 places rise or fall, but for one entry in thirty: cycles are far apart."""
    n, rows = 1000, 4
    # In two of these rows a search finds places that an earlier one has put back.
    rng = np.random.default_rng(7)
    levels, alpha = rng.integers(2, 100, rows), rng.random(rows)
    weights = np.sort(rng.integers(0, levels, (n, rows)), axis=0).astype(np.float32)
    rises = (np.arange(n)[:, None] // 64 % 2 == 0) ^ (rng.random((n, rows)) < 0.03)
    sizes = rng.permuted(np.tile(np.arange(1.0, n + 1)[:, None], rows), axis=0)
    recommendation = np.where(rises, -sizes, sizes).astype(np.float32)
    assert_compiled_is_readable((recommendation, weights, np.zeros((rows, 2), np.uint32)), alpha, n)


N, ROWS = 40, 6
# Of the weights and of the recommendation.
DTYPES = {
    **{name: (name, name) for name in support.DTYPES},
    "float32 by float64": ("float32", "float64"),
    "float64 by float32": ("float64", "float32"),
}


def permute_matrix(m, weights, ranks, seeds, *numbers):
    """Permute the columns of one matrix."""
    operands = (array[None] for array in (m, weights, ranks, seeds))
    results = cycles.permute_rows(*operands, *numbers, drop_remainder=False)
    return tuple(result[0] for result in results)


@functools.partial(jax.jit, static_argnums=0)
def permute(kernel, trees):
    """Permute rows of all dtypes at once, by a kernel that is chosen where the call is traced."""
    with mock.patch.dict(os.environ, OPTPERM_KERNEL=kernel):
        return {name: permute_matrix(*operands) for name, operands in trees.items()}


def test_kernels_numbers_of_any_dtype_and_size_give_the_same_bits():
    """Within XLA and on a Python thread, for any numbers; damaged ranks raise an error."""
    support.require_kernel("ffi")
    kinds = itertools.product(KINDS, ["normal", "few subnormal", "zeros"])
    with jax.enable_x64(True):
        for seed, (kind, by_kind) in enumerate(kinds):
            rng = np.random.default_rng(seed)
            alpha, size = rng.choice([0.0, 0.05, 0.5]), rng.choice([7, 20, N])
            trees, expected = {}, {}
            for name, dtypes in DTYPES.items():
                dtype, by_dtype = (support.DTYPES[each] for each in dtypes)
                weights = draw_values(rng, kind, dtype, (N, ROWS))
                m = draw_values(rng, by_kind, by_dtype, (N, ROWS))
                seeds, ranks = rng.integers(0, 2**32, (ROWS, 2), np.uint32), ranks_of(weights)
                trees[name] = m, weights, ranks, seeds, np.float32(alpha), np.int32(size)
                # NumPy's conversion on this thread keeps subnormal numbers.
                wide = np.result_type(dtype, by_dtype, np.float32)
                rows = m.astype(wide), weights.astype(wide), seeds
                new, *rest = by_hand("numpy", rows, ranks, alpha, size)
                expected[name] = new.astype(dtype), *rest
                for kernel in library.KERNELS[1:]:
                    new, *rest = by_hand(kernel, rows, ranks, alpha, size)
                    support.assert_same_bits((new.astype(dtype), *rest), expected[name])
            for kernel in library.KERNELS:
                support.assert_same_bits(permute(kernel, trees), expected)

        m, weights, ranks, *rest = trees["float32"]
        errors = (jax.errors.JaxRuntimeError, ValueError)
        for kernel, bad in itertools.product(library.KERNELS, (3, N, -1)):
            damaged = np.where(ranks == 5, np.int32(bad), ranks)
            with pytest.raises(errors, match="not permutations: the state is damaged"):
                jax.device_get(permute(kernel, {"float32": (m, weights, damaged, *rest)}))
            with pytest.raises(ValueError, match="the state is damaged"):
                by_hand(kernel, (m, weights, rest[0]), damaged, 0.1, N)


def test_ranks_of_any_dtype_and_size_are_those_of_numpy():
    """Sort ties by location, zeros as equal, any NaN last, and no subnormal number as zero."""
    rng = np.random.default_rng(0)
    kinds = ("zeros", "subnormal", "half subnormal", "just normal", "few")
    weights = {
        name: np.concatenate([draw_values(rng, kind, dtype, (N, ROWS)) for kind in kinds], axis=1)
        for name, dtype in support.DTYPES.items()
    }
    for leaf in weights.values():
        leaf[[3, 5], :ROWS] = [[np.nan], [-np.nan]]
    with jax.enable_x64(True):
        batches = {name: np.stack([leaf, leaf[::-1]]) for name, leaf in weights.items()}
        ranks = jax.device_get(jax.jit(functools.partial(jax.tree.map, sort_ranks))(batches))
    expected = {name: np.stack([*map(ranks_of, each)]) for name, each in batches.items()}
    support.assert_same_bits(ranks, expected)


@hypothesis.given(
    n=st.integers(1, 60),
    share=st.floats(0.0, 1.2),
    seed=st.integers(0, 2**32 - 1),
    alpha=st.floats(0.0, 1.0, width=32),
    drop=st.booleans(),
)
@hypothesis.settings(max_examples=100)
def test_moves_of_any_row_follow_the_recommendation_in_reach(n, share, seed, alpha, drop):
    """A moved weight stays in its subset, moves the way asked, and by no more than epsilon."""
    size, rows = max(1, int(share * n)), random_rows(seed, n, rows=1, dtype=np.float32)
    ranks = ranks_of(rows[1])
    *outputs, count = by_hand("numpy", rows, ranks, alpha, size, drop)
    m, w, after, new_ranks, ranks = (each[:, 0] for each in (*rows[:2], *outputs, ranks))
    w, after = w.astype(np.float64), after.astype(np.float64)
    # The partition is drawn over ranks.
    labels = cycles_numpy.partition(n, size, rows[2][0], drop)[ranks]
    has_moved = new_ranks != ranks
    assert count == np.sum(has_moved)
    fit = np.isfinite(m) & (m != 0) & np.isfinite(w)
    assert not np.any(has_moved & ~(fit & (labels >= 0)))
    spread = np.ptp(w[np.isfinite(w)]) if np.isfinite(w).any() else 0.0
    for label in range(labels.max(initial=-1) + 1):
        inside = labels == label
        np.testing.assert_array_equal(np.sort(new_ranks[inside]), np.sort(ranks[inside]))
        s = np.sum(inside & fit)
        if s < 2:
            assert not np.any(has_moved & inside)
            continue
        epsilon = spread * (np.float64(np.float32(alpha)) + 1.0 / s)
        risers, fallers = has_moved & inside & (m < 0), has_moved & inside & (m > 0)
        assert np.all((w <= after)[risers])
        assert np.all((after < w + epsilon)[risers])
        assert np.all((after < w)[fallers])
        assert np.all((w - epsilon <= after)[fallers])


@hypothesis.given(n=st.integers(1, 300), size=st.integers(1, 320), seed=st.integers(0, 2**64 - 1))
@hypothesis.settings(max_examples=100)
def test_partition_of_any_row_has_the_sizes_asked_for(n, size, seed):
    """Disjoint subsets of P entries, then the remainder, which sits out if it is to be dropped."""
    words = np.array([seed & 0xFFFFFFFF, seed >> 32], np.uint32)
    full, remainder = divmod(n, size) if size < n else (0, n)
    kept = cycles_numpy.partition(n, size, words, drop_remainder=False)
    counts = np.bincount(kept)
    np.testing.assert_array_equal(counts, [size] * full + [remainder] * (remainder > 0))
    dropped = cycles_numpy.partition(n, size, words, drop_remainder=True)
    if size < n and remainder:
        kept = np.where(kept == full, -1, kept)
    np.testing.assert_array_equal(dropped, kept)


def test_partition_over_many_seeds_is_uniform():
    """All 30 ways to split five entries as 2 + 2 + 1 come equally often (chi-square)."""
    draws = 6000
    words = np.random.default_rng(7).integers(0, 2**32, (draws, 2), dtype=np.uint32)
    splits = [cycles_numpy.partition(5, 2, seed, drop_remainder=False) for seed in words]
    found, counts = np.unique(splits, axis=0, return_counts=True)
    assert len(found) == 30
    statistic = np.sum((counts - draws / 30) ** 2 / (draws / 30))
    assert statistic < 52.3  # the 99.5 % quantile of chi-square with 29 degrees of freedom


def test_random_integers_are_exact():
    """splitmix64 gives its reference program's first numbers, products have Python's upper half."""
    found = cycles_numpy.splitmix64(np.uint64(1234567), 3)
    assert found.tolist() == [6457827717110365317, 3203168211198807973, 9817491932198370423]
    rng = np.random.default_rng(0)
    a = rng.integers(0, 2**64, 200, dtype=np.uint64)
    b = rng.integers(1, 2**32, 200, dtype=np.uint64)
    expected = [int(x) * int(y) >> 64 for x, y in zip(a, b, strict=True)]
    assert cycles_numpy.multiply_high(a, b).tolist() == expected


def test_long_vectors_on_several_threads_have_the_same_bits(monkeypatch):
    """Where there are fewer vectors than threads these share each one, XLA's threads or the kernel's."""
    support.require_kernel("ffi")
    monkeypatch.setenv("OPTPERM_KERNEL", "ffi")
    n = 40_000
    rng = np.random.default_rng(3)
    recommendation, weights = (draw_values(rng, "normal", np.float32, (n, 1)) for _ in range(2))
    seeds, ranks = rng.integers(0, 2**32, size=(1, 2), dtype=np.uint32), ranks_of(weights)
    run = jax.jit(permute_matrix)
    for size in (40, 12_000, n):
        operands = recommendation, weights, ranks, seeds, np.float32(0.1), np.int32(size)
        results = jax.device_get(run(*operands))
        by_threads = by_hand("callback", (recommendation, weights, seeds), ranks, 0.1, size)
        support.assert_same_bits(results, tuple(by_threads))
        assert results[2] > n / 3


def test_kernel_settings_that_cannot_be_met_are_refused(monkeypatch):
    """An unknown or missing kernel is an error, and a number of threads that is no positive integer."""
    monkeypatch.setenv("OPTPERM_NUM_THREADS", "3")
    assert library.count_threads() == 3
    for wrong in ("0", "-1", "two", ""):
        monkeypatch.setenv("OPTPERM_NUM_THREADS", wrong)
        with pytest.raises(ValueError, match=f"OPTPERM_NUM_THREADS must be .* got '{wrong}'"):
            library.count_threads()
    monkeypatch.delenv("OPTPERM_NUM_THREADS")
    assert library.count_threads() >= 1
    monkeypatch.setattr(library, "available_kernels", lambda: ("callback", "numpy"))
    for name in ("gpu", "ffi"):
        monkeypatch.setenv("OPTPERM_KERNEL", name)
        with pytest.raises(ValueError, match=f"OPTPERM_KERNEL must be .*'numpy'.*got '{name}'"):
            library.choose_kernel()
    monkeypatch.setenv("OPTPERM_KERNEL", "numpy")
    assert library.choose_kernel() == "numpy"


def test_missing_library_is_warned_of_once_with_the_remedy(monkeypatch):
    cached = functools.cache(library.available_kernels.__wrapped__)
    monkeypatch.setattr(library, "available_kernels", cached)
    monkeypatch.setattr(library, "load_library", lambda: None)
    with pytest.warns(RuntimeWarning, match="pip install --force-reinstall"):
        assert library.available_kernels() == ("numpy",)
    assert library.available_kernels() == ("numpy",)  # pytest makes an error of a warning
