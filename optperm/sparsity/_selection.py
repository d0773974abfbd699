"""Select the k highest of many scores, exactly, by counting instead of sorting.

The threshold is found bit by bit from the top: a bit stays if at least k codes reach the threshold with
it. On a mesh each round sums one number, where a sort would gather all scores.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from optperm.core.dtypes import computed_once
from optperm.core.mapped_axes import mark_varying, varying_axes
from optperm.core.shardings import shard_like
from optperm.core.trees import unstack

_LARGEST_INT32 = 2**31 - 1


def order_codes(scores: jax.Array) -> jax.Array:
    """Return unsigned integers in the order of the scores, all of them above 0.

    -0 equals 0, and NaN is above infinity. Scores of 16 bits are cast to float32. Only bits are
    compared, so that a processor that flushes subnormal numbers gives the same order.

    Args:
      scores: An array of a real floating dtype.

    Returns:
      An array of the same shape, uint64 for float64 and else uint32.
    """
    is_double = scores.dtype == jnp.float64
    word, wide = (jnp.uint64, jnp.float64) if is_double else (jnp.uint32, jnp.float32)
    top = jnp.array(1 << (63 if is_double else 31), word)
    bits = jax.lax.bitcast_convert_type(jnp.asarray(scores, wide), word)
    infinity = jax.lax.bitcast_convert_type(jnp.array(jnp.inf, wide), word)
    bits = jnp.where(bits == top, jnp.zeros_like(bits), bits)
    # Negative numbers are ordered by their flipped bits, below all others.
    codes = jnp.where(bits < top, bits | top, ~bits)
    return jnp.where((bits & ~top) > infinity, ~jnp.zeros_like(bits), codes)


def keep_highest(
    codes: Sequence[jax.Array],
    groups: Sequence[Sequence[int]],
    counts: Sequence[int | jax.Array] | jax.Array,
) -> list[jax.Array]:
    """Return whether each entry is among the highest of its group, of equal ones the first.

    Args:
      codes: Arrays of unsigned integers of one dtype.
      groups: For each group the indices of the arrays that are ranked together, in order. No array is
        in two groups.
      counts: The number of entries of each group to keep, from 0 to the size of the group.

    Returns:
      Booleans shaped like the codes, True for an array of no group.

    Raises:
      ValueError: If a group has more entries than int32 can count.
    """
    sizes = [sum(codes[index].size for index in group) for group in groups]
    if max(sizes, default=0) > _LARGEST_INT32:
        raise ValueError(f"At most 2**31 - 1 entries can be ranked together, got {max(sizes)}.")
    if max(sizes, default=0) == 0:
        return [jnp.ones_like(code, bool) for code in codes]
    return [*_select(list(codes), stack_counts(counts), tuple(map(tuple, groups)))]


def stack_counts(counts: Sequence[int | jax.Array] | jax.Array) -> jax.Array:
    """Return counts as one vector of int32."""
    if isinstance(counts, jax.Array) or not any(isinstance(k, jax.Array) for k in counts):
        return jnp.asarray(counts, jnp.int32)
    return jnp.stack([jnp.asarray(k, jnp.int32) for k in counts])


def sum_counts(counts: list[jax.Array]) -> jax.Array:
    """Return the sum of counts, as one operation."""
    return counts[0] if len(counts) == 1 else jnp.sum(jnp.stack(counts), dtype=jnp.int32)


# Compiled once for all calls outside jax.jit. What is counted, and the thresholds, are vectors of all
# groups: a program of one number for each would hold all these numbers in the work on each leaf.
@functools.partial(jax.jit, static_argnames="groups")
def _select(
    codes: list[jax.Array], wanted: jax.Array, groups: tuple[tuple[int, ...], ...]
) -> list[jax.Array]:
    sizes = [sum(codes[index].size for index in group) for group in groups]
    word, bits = codes[0].dtype, 8 * codes[0].dtype.itemsize
    axes = varying_axes(codes, wanted)
    wanted = mark_varying(wanted, axes)
    # The leaves of all groups in turn, each with its group. A sum into places, even where each group is
    # one leaf: XLA on a CPU compiles a loop without such an operation as one function, if its arrays are
    # small, and takes minutes for that of many leaves.
    ranked = [index for group in groups for index in group]
    owners = [number for number, group in enumerate(groups) for _ in group]
    places = _places([codes[index] for index in ranked], owners)

    def count(sums: list[jax.Array]) -> jax.Array:
        """Return the sum of each group."""
        totals = mark_varying(jnp.zeros(len(groups), jnp.int32), axes)
        return totals.at[jnp.array(owners)].add(jnp.stack(mark_varying(sums, axes)))

    def spread(numbers: jax.Array) -> list[jax.Array]:
        """Return the number of the group of each leaf."""
        rows = unstack(numbers)
        return [rows[number] for number in owners]

    # t, the code of the k-th highest entry: the largest code that at least k codes reach.
    def find_threshold(step: jax.Array, t: jax.Array) -> jax.Array:
        candidate = t | (jnp.ones([], word) << (bits - 1 - step).astype(word))
        rows = zip(ranked, spread(candidate), strict=True)
        reached = count([_count_reaching(codes[index], row) for index, row in rows])
        return jnp.where(reached >= wanted, candidate, t)

    none = mark_varying(jnp.zeros(len(groups), word), axes)
    t = jax.lax.fori_loop(0, bits, find_threshold, none)

    # Of the entries that equal t the first are kept: those before the place e.
    def keep(t: jax.Array, e: jax.Array) -> list[jax.Array]:
        rows = zip(ranked, places, spread(t), spread(e), strict=True)
        return [_is_kept(codes[index], *row) for index, *row in rows]

    num_bits = max(sizes).bit_length()

    def find_end(step: jax.Array, e: jax.Array) -> jax.Array:
        candidate = e | (jnp.ones([], jnp.int32) << (num_bits - 1 - step))
        kept = count([jnp.sum(each, dtype=jnp.int32) for each in keep(t, candidate)])
        return jnp.where(kept <= wanted, candidate, e)

    e = jax.lax.fori_loop(0, num_bits, find_end, jnp.zeros_like(wanted))
    # If none is wanted, every code reaches t. That of NaN is the highest, and no place is before 0.
    t = jnp.where(wanted > 0, t, ~jnp.zeros_like(t))
    e = jnp.where(wanted > 0, e, 0)
    chosen = dict(zip(ranked, keep(t, e), strict=True))
    return [chosen.get(index, jnp.ones_like(code, bool)) for index, code in enumerate(codes)]


# Leaves of one shape are traced once.
@jax.jit
def _count_reaching(codes: jax.Array, t: jax.Array) -> jax.Array:
    return jnp.sum(codes >= t, dtype=jnp.int32)


@jax.jit
def _is_kept(codes: jax.Array, places: jax.Array, t: jax.Array, e: jax.Array) -> jax.Array:
    return (codes > t) | ((codes == t) & (places < e))


@jax.jit
def _places_from(start: jax.Array, codes: jax.Array) -> jax.Array:
    """Return the place of each entry in C order, from the place of the first."""
    place, stride = jnp.full(codes.shape, start, jnp.int32), 1
    for axis in reversed(range(codes.ndim)):
        place += stride * jax.lax.broadcasted_iota(jnp.int32, codes.shape, axis)
        stride *= codes.shape[axis]
    return shard_like(place, codes)


def _places(codes: list[jax.Array], owners: list[int]) -> list[jax.Array]:
    """Return the place of each entry within its group."""
    ends, starts = dict.fromkeys(owners, 0), []
    for code, owner in zip(codes, owners, strict=True):
        starts.append(ends[owner])
        ends[owner] += code.size
    # XLA compiles equal kernels once: a number that it knows would make a kernel for each leaf.
    numbers = {start: computed_once(np.int32(start)) for start in starts}
    return [_places_from(numbers[start], code) for start, code in zip(starts, codes, strict=True)]
