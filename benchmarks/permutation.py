"""Training by permuting beside training freely: MNIST, an MLP with 256 hidden units.

SGPerm and LaPerm (around Adam), Adam, SGD with momentum, and Adam on the last layer alone, behind
random weights that stay as they are. All begin at the same He-uniform weights and biases and take the
same batches of 50 for the same number of epochs. Each first takes the number of its grid, which is
printed, that is best on a validation split (the last 5,000 training images), with one seed and a third
of the steps: for SGPerm the aggressiveness, for LaPerm the steps between two synchronizations, for the
others the learning rate.

    python benchmarks/permutation.py --data mnist.npz [--seeds 3] [--epochs 3] [--methods SGPerm Adam]
"""

import argparse
import functools
import pathlib
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import results

import optperm

HIDDEN, BATCH, VALIDATION = 256, 50, 5000
RESULTS = results.Results()


def last_layer(rate: Any) -> optax.GradientTransformation:
    """Adam for the last layer, nothing for the rest."""
    kinds = {"w0": "frozen", "b0": "frozen", "w1": "trained", "b1": "trained"}
    return optax.partition({"trained": optax.adam(rate), "frozen": optax.set_to_zero()}, kinds)


def sgperm(alpha: Any, steps: int) -> optax.GradientTransformation:
    """SGPerm as the command trains by it."""
    return optperm.sgperm(alpha, num_steps=steps, centralize=True)


# By name: from a number and the steps of the run to an optimizer, and the grid of the number.
METHODS: dict[str, tuple[Callable[[Any, int], Any], tuple[float, ...]]] = {
    "SGPerm": (sgperm, (0.03, 0.1, 0.3)),
    "LaPerm": (lambda every, _: optperm.laperm(optax.adam(1e-3), every), (100, 300, 900)),
    "Adam": (lambda rate, _: optax.adam(rate), (3e-4, 1e-3, 3e-3)),
    "SGD": (lambda rate, _: optax.sgd(rate, momentum=0.9), (0.01, 0.03, 0.1)),
    "Adam, last layer": (lambda rate, _: last_layer(rate), (1e-3, 3e-3, 1e-2)),
}


def initial(seed: Any) -> dict[str, jax.Array]:
    """He's uniform weights, and biases of the same law: equal ones could not be permuted."""
    keys = jax.random.split(jax.random.key(seed), 4)
    shapes = {"w0": (784, HIDDEN), "b0": (HIDDEN,), "w1": (HIDDEN, 10), "b1": (10,)}
    bounds = [np.sqrt(6 / fan_in) for fan_in in (784, 784, HIDDEN, HIDDEN)]
    return {
        name: jax.random.uniform(key, shape, minval=-bound, maxval=bound)
        for key, (name, shape), bound in zip(keys, shapes.items(), bounds, strict=True)
    }


def logits(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """Of images (n, 784)."""
    return jax.nn.relu(x @ params["w0"] + params["b0"]) @ params["w1"] + params["b1"]


def loss_fn(params: dict[str, jax.Array], batch: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Mean cross-entropy."""
    of = optax.softmax_cross_entropy_with_integer_labels
    return of(logits(params, batch[0]), batch[1]).mean()


@jax.jit
def accuracy(params: dict[str, jax.Array], x: jax.Array, y: jax.Array) -> jax.Array:
    """The share of right answers."""
    return jnp.mean(logits(params, x).argmax(axis=-1) == y)


@functools.partial(jax.jit, static_argnames="name")
def trained(name: str, number: Any, params: Any, batches: jax.Array, data: Any) -> Any:
    """The params after batches of indices (steps, BATCH): one program for all numbers and seeds."""
    tx = METHODS[name][0](number, len(batches))

    def step(carried: Any, chosen: jax.Array) -> Any:
        params, state = carried
        grads = jax.grad(loss_fn)(params, (data[0][chosen], data[1][chosen]))
        updates, state = tx.update(grads, state, params)
        return (optperm.apply_updates(params, updates, state), state), None

    params, state = jax.lax.scan(step, (params, tx.init(params)), batches)[0]
    return optperm.permuted_params(state, params) if name == "LaPerm" else params


def run(name: str, number: float, seed: int, epochs: float, data: Any) -> Any:
    """The trained params of a method."""
    size = len(data[0])
    rng = np.random.default_rng(seed)
    orders = [rng.permutation(size)[: size // BATCH * BATCH] for _ in range(int(np.ceil(epochs)))]
    batches = np.concatenate(orders).reshape(-1, BATCH)[: round(epochs * size / BATCH)]
    return trained(name, number, initial(seed), jnp.asarray(batches), data)


def table(options: argparse.Namespace, train: Any, test: Any) -> None:
    """Accuracy of each method, at the number that is best on the validation split."""
    fitted, held = (
        tuple(leaf[part] for leaf in train) for part in (np.s_[:-VALIDATION], np.s_[-VALIDATION:])
    )
    for name in options.methods:
        start, tried = time.process_time(), dict[float, float]()
        for number in METHODS[name][1]:
            params = run(name, number, 0, options.epochs / 3, fitted)
            tried[number] = float(accuracy(params, *held))
        best = max(tried, key=lambda number: tried[number])
        nets = [run(name, best, seed, options.epochs, train) for seed in range(options.seeds)]
        scores = [float(accuracy(params, *test)) for params in nets]
        seconds = time.process_time() - start
        spread = f" ± {np.std(scores, ddof=1):.4f}" if len(scores) > 1 else ""
        grid = ", ".join(f"{number:g}: {score:.4f}" for number, score in tried.items())
        RESULTS.row(
            f"MNIST, {options.epochs:g} epochs, {options.seeds} seeds",
            method=name,
            test_accuracy=f"{np.mean(scores):.4f}{spread}",
            number=f"{best:g}",
            validation_of_the_grid=grid,
        )
        RESULTS.write(options.json)
        each = " ".join(f"{score:.4f}" for score in scores)
        print(f"{name:16} {best:g}: test {each}; grid {grid}; {seconds:.0f} s", flush=True)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=pathlib.Path, help="an npz of MNIST; random images without")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=float, default=3.0)
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    results.add_argument(parser)
    options = parser.parse_args()
    if options.data is None:
        rng = np.random.default_rng(0)
        arrays = {"x_train": rng.integers(0, 256, (6000, 28, 28)), "y_train": np.arange(6000) % 10}
        arrays |= {"x_test": arrays["x_train"][:300], "y_test": arrays["y_train"][:300]}
    else:
        arrays = dict(np.load(options.data))
    train, test = (
        (
            jnp.asarray(np.reshape(arrays[f"x_{part}"], (-1, 784)) / np.float32(255), jnp.float32),
            jnp.asarray(arrays[f"y_{part}"], jnp.int32),
        )
        for part in ("train", "test")
    )
    table(options, train, test)


if __name__ == "__main__":
    main()
