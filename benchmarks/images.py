"""Images, a network for them, its training, and the choice of a number from a grid.

Gray images are for an MLP, and color images are for a small convolutional network.
"""

import argparse
import math
import pathlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import optperm

CHANNELS, VALIDATION = (16, 32, 64), 5000
Params = dict[str, jax.Array]
Data = tuple[jax.Array, jax.Array]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add `--data FILE` and `--examples N`."""
    parser.add_argument("--data", type=pathlib.Path, help="an npz of images; without, 8 x 8 digits")
    parser.add_argument("--examples", type=int, help="a random part of the training images")


def load(path: pathlib.Path | None, examples: int | None = None) -> tuple[str, Data, Data]:
    """Return a name, training images in random order and test images, each with its labels.

    Images are float32 (n, height, width, channels) in [0, 1], labels int32 (n,). Without a file they are
    scikit-learn's digits.
    """
    rng = np.random.default_rng(0)
    if path is None:
        x, y = load_digits(return_X_y=True)
        x = x.reshape(-1, 8, 8) * (255 / 16)
        arrays = {"x_train": x[:1257], "y_train": y[:1257], "x_test": x[1257:], "y_test": y[1257:]}
    else:
        arrays = dict(np.load(path))

    def part(name: str, chosen: Any) -> Data:
        x = np.asarray(arrays[f"x_{name}"][chosen], np.float32) / 255
        x = x[..., None] if x.ndim == 3 else x
        return jnp.asarray(x), jnp.asarray(np.ravel(arrays[f"y_{name}"])[chosen], jnp.int32)

    train = part("train", rng.permutation(len(arrays["x_train"]))[:examples])
    return path.stem if path else "digits", train, part("test", np.s_[:])


def standardized_digits() -> tuple[Data, Data]:
    """Return scikit-learn's digits as training and test images, float32 (n, 8, 8), with labels.

    Each pixel is standardized by the mean and deviation of the training images.
    """
    x, y = load_digits(return_X_y=True)
    x = x.reshape(-1, 8, 8)
    test, train = np.split(np.random.RandomState(42).permutation(len(x)), [540])
    mean, deviation = x[train].mean(axis=0), x[train].std(axis=0)
    deviation[deviation == 0] = 1  # pixels that are blank in every image
    x, y = ((x - mean) / deviation).astype(np.float32), y.astype(np.int32)
    return (x[train], y[train]), (x[test], y[test])


def weight_shapes(
    image: Sequence[int],
    hidden: Sequence[int] | None = (256,),
    channels: Sequence[int] = CHANNELS,
) -> list[tuple[int, ...]]:
    """Return the shapes of the weights; the biases have their last axis.

    Gray images are convolved too with `hidden=None`.
    """
    height, width, depth = image
    if depth == 1 and hidden is not None:
        wide = (height * width, *hidden, 10)
        return [wide[i : i + 2] for i in range(len(hidden) + 1)]
    wide, factor = (depth, *channels), 2 ** len(channels)
    of_images = [(3, 3, *wide[i : i + 2]) for i in range(len(channels))]
    return [*of_images, (height // factor * (width // factor) * wide[-1], 10)]


def initial(seed: Any, image: Sequence[int], **widths: Sequence[int] | None) -> Params:
    """Return He's normal weights w0, w1, ... and zero biases b0, b1, ... of `weight_shapes`."""
    params, shapes = {}, weight_shapes(image, **widths)
    for i, key in enumerate(jax.random.split(jax.random.key(seed), len(shapes))):
        scale = math.sqrt(2 / math.prod(shapes[i][:-1]))
        params[f"w{i}"] = jax.random.normal(key, shapes[i]) * scale
        params[f"b{i}"] = jnp.zeros(shapes[i][-1:])
    return params


def convolve(x: jax.Array, w: jax.Array) -> jax.Array:
    """Return the convolution of images with kernels (3, 3, channels, channels), as large as they."""
    # A product of matrices: in a loop XLA's convolutions take 15 times as long on a processor.
    height, width = x.shape[1:3]
    wide = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    near = [wide[:, i : i + height, j : j + width] for i in range(3) for j in range(3)]
    return jnp.concatenate(near, axis=-1) @ w.reshape(-1, w.shape[-1])


def pool(x: jax.Array) -> jax.Array:
    """Return the maxima of squares of 2 x 2."""
    return x.reshape(len(x), x.shape[1] // 2, 2, x.shape[2] // 2, 2, -1).max(axis=(2, 4))


def logits(params: Params, x: jax.Array) -> jax.Array:
    """Return the logits of images (n, height, width, channels)."""
    layers = len(params) // 2
    for layer in range(layers):
        w, b = params[f"w{layer}"], params[f"b{layer}"]
        if w.ndim == 4:
            x = pool(jax.nn.relu(convolve(x, w) + b))
        else:
            x = x.reshape(len(x), -1) @ w + b
            x = jax.nn.relu(x) if layer < layers - 1 else x
    return x


def loss_fn(params: Params, batch: Data) -> jax.Array:
    """Return the mean cross-entropy."""
    of = optax.softmax_cross_entropy_with_integer_labels
    return of(logits(params, batch[0]), batch[1]).mean()


@jax.jit
def predict(params: Params, x: jax.Array) -> jax.Array:
    """Return the logits of many images, 100 at a time."""
    return jax.lax.map(lambda image: logits(params, image[None])[0], x, batch_size=100)


def accuracy(params: Params, data: Data) -> float:
    """Return the share of right answers."""
    return float(jnp.mean(predict(params, data[0]).argmax(axis=1) == data[1]))


def batches(size: int, batch: int, steps: int, seed: int) -> jax.Array:
    """Return indices (steps, batch), shuffled again in each epoch."""
    rng, whole = np.random.default_rng(seed), size // batch
    orders = [rng.permutation(size)[: whole * batch] for _ in range(math.ceil(steps / whole))]
    return jnp.asarray(np.concatenate(orders).reshape(-1, batch)[:steps])


def train(
    tx: optax.GradientTransformation,
    params: Any,
    state: Any,
    indices: jax.Array,
    data: Any,
    loss_fn: Callable[[Any, Any], jax.Array] = loss_fn,
    **extra_args: Any,
) -> tuple[Any, Any]:
    """Take a step for each row of indices: the params and the state after them, to be compiled.

    The data may be any arrays of examples; a method may need further extra arguments.
    """
    tx = optax.with_extra_args_support(tx)

    def step(carried: Any, chosen: jax.Array) -> Any:
        params, state = carried
        e = optperm.evaluate(loss_fn, params, jax.tree.map(lambda leaf: leaf[chosen], data))
        updates, state = tx.update(e.grad, state, params, **e.extra_args, **extra_args)
        return (optperm.apply_updates(params, updates, state), state), None

    return jax.lax.scan(step, (params, state), indices)[0]


def split(data: Data) -> tuple[Data, Data]:
    """Return all but the last 5,000 images (a fifth of few), and these."""
    start = len(data[0]) - min(VALIDATION, len(data[0]) // 5)
    return (data[0][:start], data[1][:start]), (data[0][start:], data[1][start:])


def tune(
    grid: Iterable[Any],
    fit: Callable[[Any, int, int, Data], Any],
    steps: int,
    data: Data,
    score: Callable[[Any, Data], float] = accuracy,
) -> tuple[Any, dict[Any, float]]:
    """Return the number of a grid that scores highest, and all scores.

    `fit(number, seed, steps, data)` trains with seed 0 and a third of the steps, on the first part of
    `split`, and `score` judges what it returns on the second.
    """
    fitted, held = split(data)
    tried = {number: score(fit(number, 0, max(steps // 3, 1), fitted), held) for number in grid}
    return max(tried, key=lambda n: (not math.isnan(tried[n]), tried[n])), tried


def spread(scores: Sequence[float]) -> str:
    """Return the mean and the standard deviation."""
    deviation = f" ± {np.std(scores, ddof=1):.4f}" if len(scores) > 1 else ""
    return f"{np.mean(scores):.4f}{deviation}"


def text(number: Any) -> str:
    """Return a number of a grid, or several, as text."""
    return " ".join(f"{each:g}" for each in np.ravel(number))


def shown(tried: dict[Any, float]) -> str:
    """Return a grid with its scores as text."""
    return ", ".join(f"{text(number)}: {score:.4f}" for number, score in tried.items())
