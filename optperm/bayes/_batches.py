"""Batches for chains: rows of arrays on the device, rows of arrays on disk, or results of a function."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optperm.core import checks
from optperm.core.dtypes import as_arrays
from optperm.core.keys import is_key
from optperm.core.shardings import take_rows

# The bytes of batches that are in memory at once, if batches are made on the host.
MOST_BYTES = 64 * 2**20


class Batches(NamedTuple):
    """Batches of `batch_size` examples for several chains, in parts that a compiled loop can read.

    Attributes:
      num_data: N.
      batch_size: S.
      num_apart: The number of further examples that are drawn with each batch, apart from it.
      rows: The rows of the batches, a tree of arrays on the device; None if batches are made on the
        host.
      read: A function from the keys (step, chain) to a tree with leaves (step, chain, ...); None with
        `rows`.
      num_bytes: The bytes of a batch.
      is_function: Whether a user's function returns the batches.
      all_rows: All examples, a tree of arrays on the device; None if they are read in parts, or unknown.
      read_all: A function that yields all examples in parts, from the maximum number of examples of a
        part; None with `all_rows`, or if the examples are unknown.
      resize: A function from a batch size to the same batches of this size; None for a function, whose
        batches have one size.
    """

    num_data: int
    batch_size: int
    num_apart: int
    rows: Any
    read: Callable[[jax.Array], Any] | None
    num_bytes: int
    is_function: bool = False
    all_rows: Any = None
    read_all: Callable[[int], Iterator[Any]] | None = None
    resize: Callable[[int], Batches] | None = None

    @property
    def knows_all(self) -> bool:
        """Whether a gradient over all examples can be computed."""
        return self.all_rows is not None or self.read_all is not None

    def parts(self, keys: jax.Array, length: int, most: int) -> Iterator[tuple[int, int, Any]]:
        """Yield the first step of each part, its number of steps, and the argument of `batch`.

        Args:
          keys: A key for each chain, (chain,).
          length: The number of steps.
          most: The maximum number of steps of a part. All parts have arrays of the same shapes.
        """
        if self.read is None:
            yield 0, length, self.rows
            return
        size = max(1, min(most, MOST_BYTES // (self.num_bytes * len(keys))))
        for first in range(0, length, size):
            here = min(size, length - first)
            read = self.read(_fold_steps(keys, np.arange(first, first + here, dtype=np.int32)))
            # Further steps are never read
            yield first, here, jax.tree.map(lambda x: _extend(x, size), read)

    def batch(self, part: Any, keys: jax.Array, first: jax.Array, step: jax.Array) -> Any:
        """Return the batches of all chains, a tree with leaves (chain, example, ...).

        Args:
          part: The arrays of a part.
          keys: A key for each chain.
          first: The first step of the part.
          step: The step.
        """
        if self.read is not None:
            return jax.tree.map(
                lambda x: jax.lax.dynamic_index_in_dim(x, step - first, keepdims=False), part
            )

        def draw(key: jax.Array) -> Any:
            return self._draw(key, part)

        return jax.vmap(draw)(jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys, step))

    def split(self, batch: Any) -> tuple[Any, Any]:
        """Return the examples of a batch, and the examples apart from it; None if there are none."""
        if not self.num_apart:
            return batch, None
        return _split_batch(batch, size=self.batch_size)

    def _draw(self, key: jax.Array, rows: Any) -> Any:
        """Return the rows of a batch, drawn with replacement."""
        size = self.batch_size + self.num_apart
        return _draw_batch(key, rows, size=size, num_data=self.num_data)

    def one(self, key: jax.Array) -> Any:
        """Return one batch, for checks before the first step."""
        if self.read is None:
            return self._draw(key, self.rows)
        return jax.tree.map(lambda x: jnp.asarray(x[0, 0]), self.read(key[None, None]))


@functools.partial(jax.jit, static_argnames="size", inline=True)
def _split_batch(batch: Any, *, size: int) -> tuple[Any, Any]:
    """Return the first examples of a batch, and the other examples."""

    def of(part: slice) -> Any:
        return jax.tree.map(lambda x: x[part] if jnp.ndim(x) else x, batch)

    return of(slice(size)), of(slice(size, None))


@functools.partial(jax.jit, static_argnames=("size", "num_data"), inline=True)
def _draw_batch(key: jax.Array, rows: Any, *, size: int, num_data: int) -> Any:
    """Return rows of arrays, drawn with replacement."""
    chosen = jax.random.randint(key, (size,), 0, num_data)
    return jax.tree.map(lambda leaf: take_rows(leaf, chosen), rows)


def batches_of_rows(
    data: Any, num_data: int | None, batch_size: int, *, num_apart: int = 0
) -> Batches:
    """Return batches of the rows of a user's arrays.

    Args:
      data: A tree of arrays; or a tree with NumPy memory maps, or other arrays that are read by
        `leaf[rows]`.
      num_data: N; None for the number of rows.
      batch_size: S.
      num_apart: The number of further examples that are drawn with each batch.

    Raises:
      TypeError: If a leaf is not an array of numbers.
      ValueError: If leaves differ in length, if there are fewer examples than `batch_size`, or if
        `num_data` is not the number of rows.
    """
    found = _count_rows("data", data, num_data)
    _check_enough(found, batch_size)
    if not _is_on_disk(data):
        rows = jax.tree.map(jnp.asarray, data)
        resize = functools.partial(batches_of_rows, rows, None, num_apart=num_apart)
        return Batches(
            found, batch_size, num_apart, rows, None, 0, all_rows=rows, resize=resize
        )  # fmt: skip
    size = batch_size + num_apart

    def read_rows(keys: jax.Array) -> Any:
        rows = np.asarray(_draw_all(keys, size=size, num_data=found))
        shape = rows.shape
        return jax.tree.map(
            lambda x: np.asarray(x[rows.ravel()], _dtype_of(x)).reshape(*shape, *x.shape[1:]), data
        )

    return Batches(
        found, batch_size, num_apart, None, read_rows, max(1, size * _bytes_of_row(data)),
        read_all=functools.partial(_read_slices, data, found),
        resize=functools.partial(batches_of_rows, data, None, num_apart=num_apart),
    )  # fmt: skip


def batches_of_function(
    function: Callable[[jax.Array], Any],
    num_data: int | None,
    batch_size: int | None,
    *,
    num_apart: int | None,
    full_data: Any,
) -> Batches:
    """Return the batches of a user's function `key -> batch`.

    Args:
      function: The function. One call shows what its batches are.
      num_data: N; None for the number of rows of `full_data`.
      batch_size: S; None for the size of the function's batches.
      num_apart: The number of further examples that are drawn with each batch. None for none, unless
        batches have one example.
      full_data: All examples, a tree of arrays or an iterable of batches; None if they are unknown.

    Raises:
      TypeError: If a leaf of `full_data` is not an array of numbers, or it can be read only once.
      ValueError: If batches do not have `batch_size` examples, if `num_data` is missing or is not the
        number of rows of `full_data`, or if `full_data` has other examples than the function.
    """
    like = as_arrays(function(jax.random.key(0)))
    size = _count_batch(like)
    if batch_size is None:
        batch_size = size
    _check_size(size, batch_size)
    if num_apart is None:
        # An estimate of the noise from batches of one example needs another example
        num_apart = int(batch_size == 1)
    all_rows: Any = None
    read_all: Callable[[int], Iterator[Any]] | None = None
    if _is_iterable_of_batches(full_data):
        read_all = functools.partial(_read_iterable, full_data, like)
    elif full_data is not None:
        num_data = _count_rows("full_data", full_data, num_data)
        _check_like(like, full_data)
        if _is_on_disk(full_data):
            read_all = functools.partial(_read_slices, full_data, num_data)
        else:
            all_rows = jax.tree.map(jnp.asarray, full_data)
    if num_data is None:
        raise ValueError(
            "num_data must be given if data is a function, because neither the function nor an iterable "
            "of batches shows the number of training examples."
        )
    _check_enough(num_data, batch_size)
    read = _read_function(function, batch_size, num_apart)
    num_bytes = (
        sum(x.nbytes for x in jax.tree.leaves(like)) * (batch_size + num_apart) // batch_size
    )
    return Batches(
        num_data, batch_size, num_apart, None, read, max(num_bytes, 1), True, all_rows, read_all
    )


def _check_like(batch: Any, rows: Any) -> None:
    """Raise a ValueError unless rows of all examples have the form of those in a function's batch."""
    wanted, found = (
        {jax.tree_util.keystr(path): np.shape(x)[1:] for path, x in jax.tree.leaves_with_path(tree)}
        for tree in (batch, rows)
    )
    if wanted != found:
        raise ValueError(
            f"full_data must have examples like those of the batches that data returns, "
            f"{checks.shown(batch)}, got {checks.shown(rows)}. A list is read as batches: put arrays of "
            "all examples into a tuple or a dict."
        )


def _is_iterable_of_batches(full_data: Any) -> bool:
    """Return whether all examples come in batches: in a list, or in what is no tree of arrays.

    Raises:
      TypeError: If an iterator can be read only once, or there is nothing to read.
    """
    if full_data is None:
        return False
    advice = "a tree of arrays, or an iterable of batches that starts again, such as a list"
    if isinstance(full_data, Iterator):
        raise TypeError(
            f"full_data must be {advice}, got an iterator, which can be read only once."
        )
    leaves = jax.tree.leaves(full_data)
    is_tree = bool(leaves) and all(hasattr(leaf, "shape") for leaf in leaves)
    if is_tree and not isinstance(full_data, list):
        return False
    if not isinstance(full_data, Iterable):
        raise TypeError(f"full_data must be {advice}, got {checks.shown(full_data)}.")
    return True


def _read_iterable(batches: Iterable[Any], like: Any, most: int) -> Iterator[Any]:
    """Yield the batches of a user's iterable, whose examples must be like those of another batch."""
    del most
    for batch in batches:
        rows = as_arrays(batch)
        _check_like(like, rows)
        yield rows


def _read_slices(data: Any, num_data: int, most: int) -> Iterator[Any]:
    """Yield slices of arrays on disk, of at most `most` rows and `MOST_BYTES` bytes."""
    size = max(1, min(num_data, most, MOST_BYTES // max(1, _bytes_of_row(data))))
    for first in range(0, num_data, size):
        rows = np.arange(first, min(first + size, num_data))
        yield jax.tree.map(lambda x, rows=rows: np.asarray(x[rows], _dtype_of(x)), data)


def _count_rows(name: str, data: Any, num_data: int | None) -> int:
    checks.check_arrays(name, data)
    found = checks.count_examples(name, data)
    if num_data not in (None, found):
        raise ValueError(f"num_data must be the number of rows of {name}, {found}, got {num_data}.")
    return found


def _count_batch(batch: Any) -> int:
    return checks.count_examples("the batch that data returns", batch, has_scalars=True)


def _check_size(found: int, batch_size: int) -> None:
    if found != batch_size:
        raise ValueError(
            f"data must return batches of batch_size={batch_size} examples, got {found}."
        )


def _bytes_of_row(data: Any) -> int:
    leaves = jax.tree.leaves(data)
    return sum(_dtype_of(x).itemsize * math.prod(x.shape[1:]) for x in leaves)


def _is_on_disk(data: Any) -> bool:
    """Return whether rows of a leaf are read on the host, because it may exceed the memory."""
    return any(
        not isinstance(leaf, jax.Array) and type(leaf) is not np.ndarray
        for leaf in jax.tree.leaves(data)
    )


def _dtype_of(leaf: Any) -> Any:
    """Return the dtype of a leaf's rows on the device."""
    return jax.dtypes.canonicalize_dtype(leaf.dtype)


def _check_enough(num_data: int, batch_size: int) -> None:
    if num_data < batch_size:
        raise ValueError(
            f"batch_size must be at most the number of examples, {num_data}, got {batch_size}."
        )


@jax.jit
def _fold_steps(keys: jax.Array, steps: jax.Array) -> jax.Array:
    """Return a key for each step and each chain."""
    fold = jax.vmap(jax.random.fold_in, in_axes=(0, None))
    return jax.vmap(fold, in_axes=(None, 0))(keys, steps)


@functools.partial(jax.jit, static_argnames=("size", "num_data"))
def _draw_all(keys: jax.Array, *, size: int, num_data: int) -> jax.Array:
    """Return the rows of the batches of all steps and chains."""

    def draw(key: jax.Array) -> jax.Array:
        return jax.random.randint(key, (size,), 0, num_data)

    return jax.vmap(jax.vmap(draw))(keys)


def _read_function(
    function: Callable[[jax.Array], Any], batch_size: int, num_apart: int
) -> Callable[[jax.Array], Any]:
    """Return a function from keys (step, chain) to stacked batches of a user's function."""

    def one(key: jax.Array) -> Any:
        batch = as_arrays(function(key))
        _check_size(_count_batch(batch), batch_size)
        if not num_apart:
            return batch
        other = as_arrays(function(jax.random.fold_in(key, 1)))
        return jax.tree.map(
            lambda x, y: np.concatenate([x, y[:num_apart]]) if np.ndim(x) else x, batch, other
        )

    def read(keys: jax.Array) -> Any:
        # A loop over an array of JAX compiles a program for each length, which takes a second
        rows = np.asarray(jax.random.key_data(keys)).reshape(keys.size, -1)
        impl = jax.random.key_impl(keys)
        batches = [one(jax.random.wrap_key_data(jnp.asarray(row), impl=impl)) for row in rows]
        for batch in batches[1:]:
            checks.check_same_tree(
                "the batch that data returns", batch, batches[0], source="its first batch"
            )
        return jax.tree.map(lambda *x: _stack(x).reshape(*keys.shape, *jnp.shape(x[0])), *batches)

    return read


def _stack(leaves: tuple[Any, ...]) -> Any:
    return jnp.stack(leaves) if is_key(leaves[0]) else np.stack([np.asarray(x) for x in leaves])


def _extend(leaf: Any, size: int) -> Any:
    """Return an array whose leading axis is extended to a length."""
    missing = size - len(leaf)
    if not missing:
        return leaf
    extend = jnp.concatenate if is_key(leaf) else np.concatenate
    return extend([leaf, leaf[[0] * missing]])
