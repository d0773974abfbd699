"""Read examples in chunks, and batches as slices of chunks, without a gather of rows."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optperm.core import checks
from optperm.core.keys import make_key
from optperm.core.shardings import take_rows

# The bytes of one chunk of a memory map.
_CHUNK_BYTES = 2**26
# The number of equal parts of a chunk in stored order, from each of which a batch takes rows.
_PARTS = 16
# The number of examples to look at.
_FEW = 32


class Chunks(NamedTuple):
    """All examples, in one or several chunks.

    Attributes:
      read: A function that returns an iterator over all chunks, each a tree of arrays.
      first: The first chunk.
      parts: The number of equal parts of a chunk from which a batch takes rows; 1 if rows are shuffled.
      is_whole: Whether the first chunk contains all examples.
      few: The first examples, as they were given, to look at the loss.
      order: The original positions of shuffled rows; None if rows keep their order.
    """

    read: Callable[[], Iterator[Any]]
    first: Any
    parts: int
    is_whole: bool
    few: Any
    order: np.ndarray | None = None


def make_chunks(data: Any, key: int | jax.Array) -> Chunks:
    """Return the chunks of arrays, shuffled once, or of data that are not copied, in stored order.

    Raises:
      TypeError: If data are neither arrays nor an iterable that starts again.
      ValueError: If arrays differ in their leading axis, or there are no examples.
    """
    leaves = jax.tree.leaves(data)
    _check_arrays(data)
    is_tree = bool(leaves) and all(hasattr(leaf, "shape") for leaf in leaves)
    if isinstance(data, list) or not is_tree:
        return _from_iterable(data)
    n = checks.count_examples("data", data)
    if any(isinstance(leaf, np.memmap) for leaf in leaves):
        width = sum(leaf.nbytes for leaf in leaves) / n
        size = max(min(int(_CHUNK_BYTES / max(width, 1)), n), 1)

        def cut(start: int) -> Any:
            return jax.tree.map(lambda leaf: jnp.asarray(leaf[start : start + size]), data)

        starts = range(0, n, size)
        return Chunks(lambda: map(cut, starts), cut(0), min(_PARTS, size), size == n, _head(data))
    spread = [
        len(leaf.sharding.device_set) if isinstance(leaf, jax.Array) else 1 for leaf in leaves
    ]
    if max(spread) > 1:
        parts = max(spread)
        if n % parts:
            raise ValueError(f"Sharded data must have a multiple of {parts} examples, got {n}.")
        return Chunks(lambda: iter((data,)), data, parts, True, _head(data))
    # One shuffle takes the place of a gather in each step.
    order = generator(key).permutation(n)

    def shuffle(leaf: Any) -> jax.Array:
        if isinstance(leaf, jax.Array):
            return jnp.take(leaf, order, axis=0)
        return jnp.asarray(np.asarray(leaf)[order])

    shuffled = jax.tree.map(shuffle, data)
    return Chunks(lambda: iter((shuffled,)), shuffled, 1, True, _head(data), order)


def _check_arrays(data: Any) -> None:
    """Raise an error for strings, and for a list of arrays that are no batches of one array."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(data):
        dtype = getattr(leaf, "dtype", None)
        if isinstance(dtype, np.dtype) and dtype.kind in "OSU":
            name = f"data{jax.tree_util.keystr(path)}"
            raise TypeError(
                f"{name} must contain numbers, got the dtype {dtype}: encode labels as integers."
            )
    if isinstance(data, list) and all(hasattr(entry, "shape") for entry in data):
        shapes = [tuple(entry.shape) for entry in data]
        if len({shape[1:] for shape in shapes}) > 1:
            raise ValueError(
                f"A list contains batches of the same form, got shapes {shapes[:3]}: pass arrays of the "
                "same examples as a tuple."
            )


def _from_iterable(data: Any) -> Chunks:
    advice = "a tree of arrays, or an iterable of batches that starts again, such as a list"
    try:
        first = next(iter(data), None)
    except TypeError:
        raise TypeError(f"data must be {advice}, got {checks.shown(data)}.") from None
    if first is None:
        raise ValueError("data contains no batches.")
    n, few = checks.count_examples("The first batch of data", first), _head(first)
    first = jax.tree.map(jnp.asarray, first)

    def read() -> Iterator[Any]:
        for number, chunk in enumerate(data):
            checks.count_examples(f"Batch {number} of data", chunk)
            yield jax.tree.map(jnp.asarray, chunk)

    is_whole = len(list(itertools.islice(iter(data), 2))) == 1
    return Chunks(read, first, min(_PARTS, n), is_whole, few)


def _head(data: Any) -> Any:
    def cut(leaf: Any) -> Any:
        if isinstance(leaf, jax.Array):
            return take_rows(leaf, jnp.arange(min(len(leaf), _FEW)))
        return np.asarray(leaf[:_FEW])

    return jax.tree.map(cut, data)


def generator(key: int | jax.Array) -> np.random.Generator:
    """Return a generator of NumPy, which shuffles a million numbers 20 times faster than JAX."""
    return np.random.default_rng(np.asarray(jax.random.key_data(make_key(key))))


def length_of(chunk: Any) -> int:
    """Return the number of examples of a chunk."""
    return int(jax.tree.leaves(chunk)[0].shape[0])


def take_batch(chunk: Any, start: Any, size: int, parts: int) -> Any:
    """Return `size // parts` rows from `start` on of each of the equal parts of a chunk."""

    def cut(leaf: jax.Array) -> jax.Array:
        rows = leaf.shape[0] // parts
        if rows * parts < leaf.shape[0]:
            leaf = leaf[: rows * parts]
        each = leaf.reshape(parts, rows, *leaf.shape[1:])
        batch = jax.lax.dynamic_slice_in_dim(each, start, size // parts, axis=1)
        return batch.reshape(size // parts * parts, *leaf.shape[1:])

    return jax.tree.map(cut, chunk)
