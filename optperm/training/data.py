"""Data as users bring them: arrays in memory, or an iterable of batches."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optperm.contract import checks
from optperm.training import processes
from optperm.training.layout import Layout

# Far from the step counts that a method may fold into the key of the same seed.
_SHUFFLE_STREAM = 0x5348_5546
END = object()
AHEAD = 4  # batches that may wait on the devices for those before them


def shuffled(seed: int, epoch: int, num_examples: int) -> jax.Array:
    """The order in which `fit` goes through examples in memory, int32 (num_examples,).

    A step takes the next `batch_size` of them; those at the end that do not fill a batch are left out.
    The order depends on nothing else than what is given here.

    Args:
      seed: That of `fit`.
      epoch: From 1.
      num_examples: How many there are.

    Example:
      >>> from optperm.training import shuffled
      >>> sorted(shuffled(seed=0, epoch=1, num_examples=4).tolist())
      [0, 1, 2, 3]
    """
    checks.check_seed("seed", seed)
    checks.check_count("epoch", epoch)
    checks.check_static_count("num_examples", num_examples)
    key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), _SHUFFLE_STREAM)
    return jax.random.permutation(jax.random.fold_in(key, epoch), num_examples)


def is_arrays(name: str, data: Any) -> bool:
    """Whether data is a tree of arrays, which a ValueError says if they do not agree, or of batches."""
    kinds = jax.Array | np.ndarray
    if isinstance(data, kinds | Mapping | tuple) and all(
        isinstance(leaf, kinds) for leaf in jax.tree.leaves(data)
    ):
        return num_examples(name, data) > 0
    _check_stream(name, data, isinstance(data, Iterable) or callable(data))
    return False


def _check_stream(name: str, value: Any, is_one: bool) -> None:
    if not is_one or isinstance(value, str | Mapping):
        raise TypeError(
            f"{name} must be a tree of arrays (a dict or a tuple of NumPy or JAX arrays), an iterable "
            f"of batches, or a function of the epoch's number that gives one, got {type(value)}."
        )


def num_examples(name: str, data: Any) -> int:
    """The leading axis on which all leaves agree; raises a ValueError if they do not, or have none."""
    shapes = [jnp.shape(leaf) for leaf in jax.tree.leaves(data)]
    sizes = {shape[0] if shape else None for shape in shapes}
    if len(sizes) != 1 or None in sizes:
        wanted = "arrays that agree in their leading axis, which counts examples"
        raise ValueError(f"{name} must be {wanted}, got shapes {shapes}.")
    if sizes == {0}:
        raise ValueError(f"{name} holds no examples: its arrays are of shapes {shapes}.")
    return shapes[0][0]


def pieces(name: str, data: Any, epoch: int, size: int | None, layout: Layout) -> Iterator[Any]:
    """All of some data on the devices, arrays `size` examples at once: batches that devices share."""
    if is_arrays(name, data):
        total, parts = num_examples(name, data), layout.parts
        step = max((size or total) // parts * parts, parts)
        for low in range(0, total, step):
            part = jax.tree.map(lambda leaf, low=low: leaf[low : low + step], data)
            yield layout.put_batch(part, local=False)
        return
    iterator, count = open_stream(name, data, epoch), 0
    while (batch := pull(name, iterator)) is not END:
        count += 1
        yield layout.put_batch(batch, local=True)
    if not count:
        raise no_batch(name, epoch)


def open_stream(name: str, source: Any, epoch: int) -> Iterator[Any]:
    """The batches of an epoch, from an iterable or from a function that gives one."""
    opened = source if hasattr(source, "__iter__") else source(epoch)
    _check_stream(name, opened, isinstance(opened, Iterable))
    return iter(opened)


def no_batch(name: str, epoch: int) -> ValueError:
    """What is wrong where an epoch has no batch."""
    advice = f"pass a function that makes one, {name}=lambda epoch: batches()"
    says = f"{name} gives no batch in epoch {epoch}. A generator can be gone through only once"
    return ValueError(f"{says}: {advice}.")


def pull(name: str, iterator: Iterator[Any]) -> Any:
    """The next batch, or `END` where some process has none. All of them have to ask."""
    batch, size, failure = END, 0, None
    try:
        if (batch := next(iterator, END)) is not END:
            batch, is_alone = jax.tree.map(_as_array, batch), jax.process_count() == 1
            size = 1 if is_alone else num_examples(f"A batch of {name}", batch)
    except Exception as error:
        size, failure = -1, error
    sizes = processes.gather(np.int32(size))
    if failure is not None:
        raise failure
    if sizes.min() < 0:
        raise RuntimeError(f"another process could not load a batch of {name}: see what it says.")
    if sizes.min() and sizes.min() != sizes.max():
        raise ValueError(
            f"A batch of {name} has {sizes.tolist()} examples in the processes: each must bring equally "
            "many, or its examples would not count like those of the others."
        )
    return batch if sizes.min() else END


def _as_array(leaf: Any) -> Any:
    """The leaf as something that `jax.jit` takes: loaders may yield tensors of other libraries."""
    known = jax.Array | np.ndarray | np.generic | bool | int | float
    return leaf if isinstance(leaf, known) else np.asarray(leaf)
