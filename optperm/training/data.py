"""Data as users bring them: arrays in memory, or an iterable of batches."""

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optperm.contract import checks

# Far from the step counts that a method may fold into the key of the same seed.
_SHUFFLE_STREAM = 0x5348_5546


def shuffled(seed: int, epoch: int, num_examples: int) -> jax.Array:
    """The order in which `fit` goes through examples in memory, int32 (num_examples,).

    A step takes the next `batch_size` of them; those at the end that do not fill a batch are left out.
    The order depends on nothing else than what is given here.

    Args:
      seed: That of `fit`.
      epoch: From 1.
      num_examples: How many there are.

    Returns:
      A permutation of 0 to `num_examples` - 1.

    Raises:
      TypeError: If an argument is not an integer.
      ValueError: If one is out of range.

    Example:
      >>> from optperm.training import shuffled
      >>> sorted(shuffled(seed=0, epoch=1, num_examples=4).tolist())
      [0, 1, 2, 3]
    """
    checks.check_seed("seed", seed)
    checks.check_count("epoch", epoch)
    checks.check_static_count("num_examples", num_examples)
    return order_of(shuffle_key(seed), epoch, num_examples)


def shuffle_key(seed: int) -> np.ndarray:
    """Data of the key from which the shuffles of a seed are drawn."""
    key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), _SHUFFLE_STREAM)
    return np.asarray(jax.random.key_data(key))


def order_of(key: Any, epoch: int | jax.Array, num_examples: int) -> jax.Array:
    """`shuffled`, from what `shuffle_key` gave."""
    typed = jax.random.wrap_key_data(key, impl="threefry2x32")
    return jax.random.permutation(jax.random.fold_in(typed, epoch), num_examples)


def is_arrays(data: Any) -> bool:
    """Whether data is a tree of arrays in memory, rather than an iterable of batches."""
    if isinstance(data, jax.Array | np.ndarray | Mapping | tuple):
        leaves = jax.tree.leaves(data)
        return all(isinstance(leaf, jax.Array | np.ndarray) for leaf in leaves)
    return False


def num_examples(name: str, data: Any) -> int:
    """The leading axis on which all leaves agree.

    Raises:
      ValueError: If they do not, or there are none.
    """
    shapes = [jnp.shape(leaf) for leaf in jax.tree.leaves(data)]
    sizes = {shape[0] if shape else None for shape in shapes}
    if len(sizes) != 1 or None in sizes:
        raise ValueError(
            f"{name} must be arrays that agree in their leading axis, which counts examples, got "
            f"shapes {shapes}."
        )
    size = sizes.pop()
    if not size:
        raise ValueError(f"{name} holds no examples: its arrays are of shapes {shapes}.")
    return int(size)


def as_arrays(batch: Any) -> Any:
    """The batch with leaves that `jax.jit` takes: loaders may yield tensors of other libraries."""
    known = (jax.Array, np.ndarray, np.generic, bool, int, float)
    if all(isinstance(leaf, known) for leaf in jax.tree.leaves(batch)):
        return batch
    return jax.tree.map(lambda leaf: leaf if isinstance(leaf, known) else np.asarray(leaf), batch)


def check_iterable(name: str, value: Any) -> None:
    """Raises a TypeError unless `value` is arrays, an iterable of batches, or a callable."""
    is_stream = isinstance(value, Iterable) or callable(value)
    if isinstance(value, str | Mapping) or not is_stream:
        raise TypeError(
            f"{name} must be a tree of arrays (a dict or a tuple of NumPy or JAX arrays), an iterable "
            f"of batches, or a function of the epoch's number that gives one, got "
            f"{type(value).__name__}."
        )


def pieces(size: int, step: int, parts: int) -> list[tuple[int, int]]:
    """Bounds of pieces of so many examples: each of `step`, which as many devices can share, but a rest.

    Where a rest cannot be shared equally, what can be is one piece, and what is left another.
    """
    step = min(step, size)
    step = max(step - step % parts, min(parts, step))
    bounds = [*range(0, size, step), size]
    if (rest := size - size % parts) not in bounds and rest > bounds[-2]:
        bounds.insert(-1, rest)
    return list(itertools.pairwise(bounds))
