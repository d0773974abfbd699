"""Four small tasks on which an optimizer should train by its defaults.

An MLP, a convolutional network, and the same network with batch normalization learn a few thousand
digits; a transformer learns the bytes of a text.
"""

import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import images
import jax
import jax.numpy as jnp
import library_bytes
import numpy as np
import optax

TRAINING, VALIDATION, TEST = 3000, 1000, 2000
CHANNELS, STATISTICS, EPSILON = (8, 16), 500, 1e-5


class Task(NamedTuple):
    """A network and its data.

    Attributes:
      initial: From a seed, the initial params.
      loss_fn: `loss_fn(params, batch)`, the mean loss of training.
      logits: `logits(params, inputs)`, for predictions.
      num_data: The number of labels in the training data.
      batches: `batches(seed, steps)`, the batches of a training along a leading axis.
      validation: Inputs and labels to choose a rate with.
      test: Inputs and labels to judge with.
    """

    initial: Callable[[int], Any]
    loss_fn: Callable[[Any, Any], jax.Array]
    logits: Callable[[Any, jax.Array], jax.Array]
    num_data: int
    batches: Callable[[int, int], Any]
    validation: images.Data
    test: images.Data


def normed_logits(params: images.Params, x: jax.Array, count: int | None = None) -> jax.Array:
    """Return the logits of a CNN with batch normalization, by the statistics of the first rows."""
    for layer in range(len(CHANNELS)):
        x = images.convolve(x, params[f"w{layer}"])
        mean, variance = x[:count].mean(axis=(0, 1, 2)), x[:count].var(axis=(0, 1, 2))
        x = params[f"s{layer}"] * (x - mean) * jax.lax.rsqrt(variance + EPSILON)
        x = images.pool(jax.nn.relu(x + params[f"b{layer}"]))
    last = len(CHANNELS)
    return x.reshape(len(x), -1) @ params[f"w{last}"] + params[f"b{last}"]


def of_images(name: str, data: images.Data, test: images.Data, batch: int) -> Task:
    """Return the task of a network on gray images."""
    x, size = data[0], min(TRAINING, 3 * len(data[0]) // 4)
    train = data[0][:size], data[1][:size]
    held = data[0][size:], data[1][size:]
    widths = {"hidden": (128, 128)} if name == "MLP" else {"hidden": None, "channels": CHANNELS}
    is_normed, reference = name == "CNN, BatchNorm", x[:STATISTICS]

    def initial(seed: int) -> images.Params:
        params = images.initial(seed, x.shape[1:], **widths)
        scales = {f"s{i}": jnp.ones(width) for i, width in enumerate(CHANNELS)}
        return params | scales if is_normed else params

    def loss_fn(params: images.Params, batch: images.Data) -> jax.Array:
        of = normed_logits if is_normed else images.logits
        losses = optax.softmax_cross_entropy_with_integer_labels(of(params, batch[0]), batch[1])
        return losses.mean()

    def logits(params: images.Params, x: jax.Array) -> jax.Array:
        if not is_normed:
            return images.logits(params, x)
        return normed_logits(params, jnp.concatenate([reference, x]), STATISTICS)[STATISTICS:]

    def batches(seed: int, steps: int) -> images.Data:
        chosen = images.batches(size, batch, steps, seed)
        return train[0][chosen], train[1][chosen]

    return Task(initial, loss_fn, logits, size, batches, held, test)


def of_bytes(text: pathlib.Path | None, batch: int) -> Task:
    """Return the task of a transformer on bytes."""
    library_bytes.CONTEXT, library_bytes.WIDTH, library_bytes.LAYERS = 32, 64, 2
    train, held = library_bytes.load(text)
    half = len(held) // 2

    def initial(seed: int) -> Any:
        ids = jnp.zeros((1, library_bytes.CONTEXT), jnp.int32)
        return library_bytes.Decoder().init(jax.random.key(seed), ids)

    def batches(seed: int, steps: int) -> Any:
        return jnp.asarray(library_bytes.windows(train, np.random.default_rng(seed), steps, batch))

    def examples(part: np.ndarray, seed: int) -> images.Data:
        ids = jnp.asarray(library_bytes.windows(part, np.random.default_rng(seed), 256))
        return ids[:, :-1], ids[:, 1:]

    return Task(
        initial,
        library_bytes.loss_fn,
        library_bytes.Decoder().apply,
        len(train),
        batches,
        examples(held[:half], 0),
        examples(held[half:], 1),
    )


def load(data: pathlib.Path | None, text: pathlib.Path | None) -> dict[str, Task]:
    """Return all tasks by name."""
    _, train, test = images.load(data, TRAINING + VALIDATION)
    test = test[0][:TEST], test[1][:TEST]
    found = {name: of_images(name, train, test, 32) for name in ("MLP", "CNN", "CNN, BatchNorm")}
    return found | {"transformer": of_bytes(text, 16)}
