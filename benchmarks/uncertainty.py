"""What to take for the uncertainty of a network: averages, draws and ensembles beside Adam.

An MLP on MNIST or a convolutional network on CIFAR-10, by equally many gradients (five times as many for
the ensemble): accuracy, negative log-likelihood (NLL), Brier score and calibration error (ECE) on the
test images and on the same images rotated by 30 degrees, and how well the entropy of the prediction
tells images from elsewhere, noise and other data (AUROC). Each method takes the number of its printed
grid that has the lowest NLL on a validation split, with one seed and a third of the steps.

    python benchmarks/uncertainty.py --data mnist.npz --other cifar10.npz [--seeds 3] [--epochs 5]
"""

import argparse
import functools
import itertools
import pathlib
import time
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import results
from scipy import ndimage

import optperm

BATCH, VALIDATION, DRAWS, MODELS, COLLECTED = 128, 5000, 30, 5, 20
RESULTS = results.Results()


class Mlp(nn.Module):
    """784-256-256-10."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """The logits of images (n, height, width, channels)."""
        x = x.reshape(len(x), -1)
        for _ in range(2):
            x = nn.relu(nn.Dense(256)(x))
        return nn.Dense(10, name="last")(x)


class Cnn(nn.Module):
    """Three convolutions with pooling."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """The logits of images (n, height, width, channels)."""
        for width in (16, 32, 64):
            x = nn.max_pool(nn.relu(nn.Conv(width, (3, 3))(x)), (2, 2), (2, 2))
        return nn.Dense(10, name="last")(x.reshape(len(x), -1))


class Task:
    """A network and its data: everything that a method needs."""

    def __init__(self, network: nn.Module, train: Any) -> None:
        self.network, self.train, self.size = network, train, len(train[0])

    def init(self, seed: int) -> Any:
        """Initial params."""
        return self.network.init(jax.random.key(seed), self.train[0][:1])["params"]

    def loss(self, params: Any, batch: Any) -> jax.Array:
        """The mean cross-entropy."""
        logits = self.network.apply({"params": params}, batch[0])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[1]).mean()

    def probabilities(self, params: Any, x: jax.Array) -> jax.Array:
        """Class probabilities."""
        return jax.nn.softmax(self.network.apply({"params": params}, x))

    def run(self, tx: Any, steps: int, seed: int, params: Any = None) -> tuple[Any, Any]:
        """Train: the params and the optimizer state after so many batches."""
        rng = np.random.default_rng(seed)
        epochs = itertools.count()
        orders = itertools.takewhile(lambda e: e * (self.size // BATCH) < steps, epochs)
        chosen = [rng.permutation(self.size)[: self.size // BATCH * BATCH] for _ in orders]
        batches = jnp.asarray(np.concatenate(chosen).reshape(-1, BATCH)[:steps])
        params = self.init(seed) if params is None else params

        def step(carry: Any, at: Any) -> Any:
            (params, state), (indices, key) = carry, at
            is_ivon = any(isinstance(part, optperm.IvonState) for part in (state,))
            draw = optperm.sample_params(state, params, key) if is_ivon else params
            grads = jax.grad(self.loss)(draw, (self.train[0][indices], self.train[1][indices]))
            extra = {"draw": draw} if is_ivon else {}
            updates, state = tx.update(grads, state, params, **extra)
            return (optax.apply_updates(params, updates), state), None

        keys = jax.random.split(jax.random.key(seed + 1000), steps)
        scan = jax.jit(lambda carry, at: jax.lax.scan(step, carry, at)[0])
        return scan((params, tx.init(params)), (batches, keys))


def stack(*models: Any) -> Any:
    """Params of models along a leading axis."""
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *models)


def single(make: Callable[[Any], Any]) -> Callable[..., Any]:
    """Train one model at a rate that falls by a cosine."""

    def train(task: Task, number: float, steps: int, seed: int) -> dict[str, Any]:
        params, _ = task.run(make(optax.cosine_decay_schedule(number, steps)), steps, seed)
        return {"": stack(params)}

    return train


adam = single(optax.adam)
sgd = single(functools.partial(optax.sgd, momentum=0.9))


def ensemble(task: Task, number: float, steps: int, seed: int) -> dict[str, Any]:
    """Train five models with Adam, from initial params and batches of their own."""
    models = [adam(task, number, steps, MODELS * seed + 50 + index)[""] for index in range(MODELS)]
    return {"": jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *models)}


def swag(task: Task, number: float, steps: int, seed: int) -> dict[str, Any]:
    """Train with SGD at a constant rate, and collect in the last quarter."""
    start = 3 * steps // 4
    every = max((steps - start) // COLLECTED, 1)
    tx = optax.chain(
        optax.sgd(number, momentum=0.9), optperm.swag(every, rank=COLLECTED, start=start)
    )
    params, state = task.run(tx, steps, seed)
    draws = optperm.sample_params(state, params, jax.random.key(seed), DRAWS)
    return {"SWA": stack(optperm.swag_mean(state)), f"SWAG, {DRAWS} draws": draws}


def ivon(task: Task, number: float, steps: int, seed: int) -> dict[str, Any]:
    """Train with IVON, and predict at the mean and by draws."""
    rate = optax.cosine_decay_schedule(number, steps)
    tx = optperm.ivon(rate, ess=task.size, hess_init=0.1, beta2=1 - 1 / steps)
    params, state = task.run(tx, steps, seed)
    draws = optperm.sample_params(state, params, jax.random.key(seed), 8)
    one = jax.tree.map(lambda leaf: leaf[:1], draws)
    return {"IVON, at the mean": stack(params), "IVON, 1 draw": one, "IVON, 8 draws": draws}


# By name: what trains, and the grid of its number.
METHODS: dict[str, tuple[Callable[..., Any], tuple[float, ...]]] = {
    "Adam": (adam, (3e-4, 1e-3, 3e-3)),
    "SGD, momentum": (sgd, (0.02, 0.05, 0.15)),
    "Ensemble of 5": (ensemble, (3e-4, 1e-3, 3e-3)),
    "SWA and SWAG": (swag, (0.01, 0.03, 0.1)),
    "IVON": (ivon, (0.3, 1.0, 3.0)),
}


def predict(task: Task, models: Any, x: np.ndarray) -> jax.Array:
    """Mean class probabilities over models."""
    parts = [
        optperm.posterior_predictive(
            task.probabilities, optperm.Ensemble(models), jnp.asarray(part)
        )
        for part in np.array_split(x, max(len(x) // 2500, 1))
    ]
    return jnp.concatenate([part.mean for part in parts])


def entropy(probabilities: jax.Array) -> np.ndarray:
    """In nats."""
    return -np.sum(jax.scipy.special.xlogy(probabilities, probabilities), axis=1)


def judge(task: Task, models: Any, test: Any, shifted: np.ndarray, others: Any) -> dict[str, float]:
    """All figures of a row."""
    inside = predict(task, models, test[0])
    scores = optperm.classification_scores(inside, test[1])
    far = optperm.classification_scores(predict(task, models, shifted), test[1])
    row = {"accuracy": scores.accuracy, "NLL": scores.nll, "ECE": scores.calibration_error}
    row |= {"Brier": scores.brier, "NLL, rotated": far.nll, "ECE, rotated": far.calibration_error}
    for name, other in others.items():
        away = entropy(predict(task, models, other))
        row[f"AUROC, {name}"] = optperm.auroc(entropy(inside), away)
    return {name: float(value) for name, value in row.items()}


def table(arguments: argparse.Namespace, task: Task, test: Any, others: Any) -> None:
    """Print a row for each way of predicting."""
    x, y = task.train
    tuned_on = Task(task.network, (x[:-VALIDATION], y[:-VALIDATION]))
    held = np.asarray(x[-VALIDATION:]), np.asarray(y[-VALIDATION:])
    shifted = ndimage.rotate(test[0], 30, axes=(1, 2), reshape=False, order=1)
    steps = round(arguments.epochs * task.size / BATCH)
    for name in arguments.methods:
        train, grid = METHODS[name]
        start, tried = time.process_time(), dict[float, float]()
        for number in grid:
            ways = train(tuned_on, number, max(steps // 3, 8), 0)
            models = list(ways.values())[-1]
            probabilities = predict(tuned_on, models, held[0])
            tried[number] = float(optperm.classification_scores(probabilities, held[1]).nll)
        best = min(grid, key=lambda number: (np.isnan(tried[number]), tried[number]))
        rows: dict[str, list[dict[str, float]]] = {}
        for seed in range(arguments.seeds):
            for way, models in train(task, best, steps, seed).items():
                rows.setdefault(way or name, []).append(judge(task, models, test, shifted, others))
        spent = time.process_time() - start
        shown = ", ".join(f"{number:g}: {nll:.4f}" for number, nll in tried.items())
        for way, found in rows.items():
            cells = {
                key: f"{np.mean([row[key] for row in found]):.4f}"
                + (
                    f" ± {np.std([row[key] for row in found], ddof=1):.4f}"
                    if len(found) > 1
                    else ""
                )
                for key in found[0]
            }
            RESULTS.row(
                f"{arguments.name}, {steps} steps of {BATCH}, {arguments.seeds} seeds",
                method=way,
                **cells,
                number=f"{best:g}",
                validation_NLL_of_the_grid=shown,
            )
            print(f"{way:20} {best:g}:", ", ".join(f"{k} {v}" for k, v in cells.items()))
        print(f"  grid {shown}; {spent:.0f} s", flush=True)
        RESULTS.write(arguments.json)


def images(arrays: Any, part: str) -> np.ndarray:
    """Images (n, height, width, channels) in [0, 1]."""
    x = np.asarray(arrays[f"x_{part}"], np.float32) / 255
    return x[..., None] if x.ndim == 3 else x


def in_gray(x: np.ndarray) -> np.ndarray:
    """Color images of 32 x 32 as gray ones of 28 x 28."""
    return x.mean(axis=-1, keepdims=True)[:, 2:-2, 2:-2] if x.shape[-1] == 3 else x


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=pathlib.Path, help="an npz; random images without")
    parser.add_argument("--other", type=pathlib.Path, help="an npz of images from elsewhere")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=float, default=5.0)
    parser.add_argument("--examples", type=int, help="a random part of the training images")
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    results.add_argument(parser)
    arguments = parser.parse_args()
    rng = np.random.default_rng(0)
    if arguments.data is None:
        arrays = {"x_train": rng.integers(0, 256, (6000, 28, 28)), "y_train": np.arange(6000) % 10}
        arrays |= {"x_test": arrays["x_train"][:200], "y_test": arrays["y_train"][:200]}
    else:
        arrays = dict(np.load(arguments.data))
    arguments.name = arguments.data.stem if arguments.data else "random images"
    chosen = rng.permutation(len(arrays["x_train"]))[: arguments.examples]
    x, y = images(arrays, "train")[chosen], np.ravel(arrays["y_train"])[chosen].astype(np.int32)
    test = images(arrays, "test"), np.ravel(arrays["y_test"]).astype(np.int32)
    others = {"noise": rng.random((2000, *x.shape[1:])).astype(np.float32)}
    if arguments.other is not None:
        others[arguments.other.stem] = in_gray(images(dict(np.load(arguments.other)), "test"))[
            :2000
        ]
    network = Mlp() if x.shape[-1] == 1 else Cnn()
    table(arguments, Task(network, (jnp.asarray(x), jnp.asarray(y))), test, others)


if __name__ == "__main__":
    main()
