"""SGPerm's cycle search in NumPy, which is slow but easy to read.

The tests check that the compiled kernel (kernel/cycles.cc) gives the same result bit for bit.

Some threads, including XLA's, treat subnormal numbers as zero. Therefore weights and recommendations are
compared as integers made from their bits, and no float64 result is subnormal.
"""

import math
from fractions import Fraction

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.floating]
Ints = npt.NDArray[np.int32]
Bools = npt.NDArray[np.bool_]

DAMAGED = "the ranks in the state of optperm.sgperm are not permutations: the state is damaged"


def permute_rows(
    recommendation: Floats,
    weights: Floats,
    ranks: Ints,
    seeds: npt.NDArray[np.uint32],
    aggressiveness: npt.NDArray[np.float32],
    partition_size: Ints,
    *,
    drop_remainder: bool,
) -> tuple[Floats, Ints, Ints]:
    """Permute each row once, along cycles that follow its recommendation.

    Args:
      recommendation: (batch, n, rows) float32 or float64, negative where a weight should rise, positive
        where a weight should fall. Entries that are zero or not finite are excluded.
      weights: (batch, n, rows), the same dtype. Entries that are not finite never move.
      ranks: (batch, n, rows) int32, the rank of each weight in its row.
      seeds: (batch, rows, 2) uint32, the randomness of each row's partition.
      aggressiveness: (batch, rows) float32.
      partition_size: (batch, rows) int32, P, the number of entries in a subset of the partition.
      drop_remainder: Whether to exclude a last subset of fewer than P entries.

    Returns:
      The new weights and ranks, and the number of entries in each row that moved, (batch, rows) int32.

    Raises:
      ValueError: If the ranks of a row are not a permutation.
    """
    n = weights.shape[1]
    if not np.array_equal(np.sort(ranks, axis=1), np.broadcast_to(_column(n), ranks.shape)):
        raise ValueError(DAMAGED)
    new_weights, new_ranks = weights.copy(), ranks.copy()
    for b, row in np.ndindex(weights.shape[0], weights.shape[2]):
        column = (b, slice(None), row)
        row_weights, row_ranks = _permute_row(
            recommendation[column],
            weights[column],
            ranks[column],
            partition(n, int(partition_size[b, row]), seeds[b, row], drop_remainder),
            float(aggressiveness[b, row]),
        )
        new_weights[column], new_ranks[column] = row_weights, row_ranks
    return new_weights, new_ranks, np.sum(new_ranks != ranks, axis=1, dtype=np.int32)


def _column(n: int) -> Ints:
    return np.arange(n, dtype=np.int32)[:, None]


def _permute_row(
    m: Floats, weights: Floats, ranks: Ints, labels: Ints, aggressiveness: float
) -> tuple[Floats, Ints]:
    new_weights, new_ranks = weights.copy(), ranks.copy()
    by_rank = np.argsort(ranks)
    is_finite = np.isfinite(weights)
    takes_part = is_finite & np.isfinite(m) & (order_keys(m) != 0)
    w, unit = _in_float64(weights, is_finite)
    finite = w[is_finite]
    spread = float(np.max(finite) - np.min(finite)) if len(finite) else 0.0  # A
    keys = order_keys(w)
    for label in range(int(np.max(labels, initial=-1)) + 1):
        subset = by_rank[labels == label]
        subset = subset[takes_part[subset]]
        if len(subset) < 2:
            continue
        subset = subset[np.lexsort((subset, keys[subset]))]  # by weight, ties by location
        epsilon = _product(spread, aggressiveness + 1.0 / len(subset), unit)
        taken = subset[search_cycles(w[subset], m[subset], epsilon)]
        new_weights[subset] = weights[taken]
        new_ranks[subset] = ranks[taken]
    return new_weights, new_ranks


def order_keys(values: Floats) -> npt.NDArray[np.signedinteger]:
    """Return integers in the order of floating-point numbers, 0 for both zeros; NaNs have no order."""
    bits = values.view(f"int{8 * values.itemsize}")
    return np.where(bits < 0, np.iinfo(bits.dtype).min - bits, bits)


def _in_float64(weights: Floats, is_finite: Bools) -> tuple[npt.NDArray[np.float64], float]:
    """Return the weights in a unit in which no relevant finite weight is subnormal, and this unit.

    If the weights are float64 and all below 2^-400 in magnitude, the unit is 2^-600. Otherwise the unit
    is 1, and subnormal weights are too small to change a sum with the range, unless the range is 0.
    """
    is_double = weights.dtype == np.float64
    if is_double and np.any(np.abs(weights[is_finite]) >= 2.0**-400):
        return weights.astype(np.float64), 1.0
    # In these formats, a number is an integer significand times a power of two.
    info = np.finfo(weights.dtype)
    keys = np.where(is_finite, order_keys(weights), 0).astype(np.int64)
    exponent = np.abs(keys) >> info.nmant
    hidden = np.where(exponent > 0, 1 << info.nmant, 0)
    significand = np.sign(keys) * ((np.abs(keys) & ((1 << info.nmant) - 1)) | hidden)
    power = np.maximum(exponent, 1) - (info.maxexp - 1 + info.nmant) + (600 if is_double else 0)
    w = np.ldexp(significand.astype(np.float64), power.astype(np.intc))
    return w, 2.0**-600 if is_double else 1.0


def _product(spread: float, factor: float, unit: float) -> float:
    """Return spread * factor, rounded like a float64 in a unit of 1, even below 2^-1022."""
    product = spread * factor
    if unit == 1.0 or product >= 2.0**-422:
        return product
    return math.ldexp(round(Fraction(spread) * Fraction(factor) * 2**474), -474)


def partition(n: int, size: int, seed: npt.NDArray[np.uint32], drop_remainder: bool) -> Ints:
    """Return the subset of each of n entries; -1 for excluded entries.

    The labels 0, ..., 0, 1, ..., 1, 2, ... are shuffled with the inside-out form of the Fisher-Yates
    shuffle and random numbers from splitmix64.
    """
    if size >= n:
        return np.zeros(n, np.int32)
    start = np.uint64(seed[0]) | np.uint64(seed[1]) << np.uint64(32)
    picks = multiply_high(splitmix64(start, n), np.arange(1, n + 1, dtype=np.uint64))
    labels = np.arange(n, dtype=np.int32) // size
    if drop_remainder and n % size:
        labels[n - n % size :] = -1
    for i, pick in enumerate(picks):
        labels[i], labels[pick] = labels[pick], labels[i]
    return labels


def splitmix64(start: np.uint64, count: int) -> npt.NDArray[np.uint64]:
    """Return the first numbers of the generator splitmix64 (Steele, Lea & Flood 2014) from a seed."""
    with np.errstate(over="ignore"):
        z = start + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def multiply_high(a: npt.NDArray[np.uint64], b: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return floor(a * b / 2^64) for b < 2^32: a uniform number below b from uniform 64 bits."""
    low = (a & np.uint64(0xFFFFFFFF)) * b
    return ((a >> np.uint64(32)) * b + (low >> np.uint64(32))) >> np.uint64(32)


def search_cycles(w: npt.NDArray[np.float64], m: Floats, epsilon: float) -> npt.NDArray[np.int64]:
    """Find the cycles of one subset, sorted by weight.

    Args:
      w: (s,) float64, ascending.
      m: (s,) the recommendation, finite and not zero.
      epsilon: The maximum distance of a move.

    Returns:
      (s,) for each position, the position whose weight moves there, or the same position if none does.
    """
    s = len(w)
    keys, wishes = order_keys(w), order_keys(m)
    rises = wishes < 0
    # Up moves reach [w, w + epsilon), and down moves reach [w - epsilon, w). Neighbors are therefore an
    # interval, nearest first: up from `first` to below `last`, or down from `first` to above `last`.
    places = np.arange(s)
    first = np.where(rises, places + 1, np.searchsorted(keys, keys, "left") - 1)
    up, down = order_keys(w + epsilon), order_keys(w - epsilon)
    last = np.where(
        rises, np.searchsorted(keys, up, "left"), np.searchsorted(keys, down, "left") - 1
    )
    steps = np.where(rises, 1, -1)
    taken = places.copy()
    memorized = np.zeros(s, np.bool_)
    # The order is descending in |m|; of equal |m|, the later position comes first.
    for source in np.lexsort((-places, -np.abs(wishes))):
        if memorized[source]:
            continue
        cycle = _depth_first(source, first, last, steps, memorized)
        for here, following in zip(cycle, cycle[1:] + cycle[:1], strict=True):
            taken[here] = following
        memorized[cycle] = True
    return taken


def _depth_first(source: int, first: Ints, last: Ints, steps: Ints, memorized: Bools) -> list[int]:
    """Return the path of a depth-first search from `source` to itself; if none exists, `source`."""
    visited = memorized.copy()
    visited[source] = True
    path, cursors = [source], [first[source]]
    while path:
        here = path[-1]
        interval = range(cursors[-1], last[here], steps[here])
        following = next((c for c in interval if c == source or not visited[c]), None)
        if following is None:
            path.pop()
            cursors.pop()
        elif following == source:
            return path
        else:
            visited[following] = True
            cursors[-1] = following + steps[here]
            path.append(following)
            cursors.append(first[following])
    return [source]
