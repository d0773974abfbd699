"""Training in tiny subspaces: the paper's figure for an MLP on scikit-learn's digits.

SGD trains for a few epochs and leaves a trajectory. Then SGD continues, or P-SGD and P-BFGS train in the
subspace of the trajectory's first k principal components, or TWA trains in the span of its snapshots,
from their mean. The script draws loss and accuracy over epochs, and the final loss over k.

    python examples/dldr_digits.py [--epochs 6] [--out dldr-digits.png]
"""

from collections.abc import Sequence
from typing import Any

import flags
import jax
import jax.numpy as jnp
import matplotlib.style
import numpy as np
import optax
from matplotlib.figure import Figure
from sklearn.datasets import load_digits

import optperm

BATCH, SAMPLE_EVERY = 128, 4  # images; steps
SIZES = (2, 4, 8, 12)  # dimensions


def predict(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """Logits."""
    return jax.nn.relu(x @ params["w1"] + params["b1"]) @ params["w2"] + params["b2"]


def loss_fn(params: dict[str, jax.Array], batch: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Mean cross-entropy."""
    x, y = batch
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(predict(params, x), y))


def initial(seed: int = 0, hidden: int = 64) -> dict[str, jax.Array]:
    """Params of the MLP."""
    first, second = jax.random.split(jax.random.key(seed))
    return {
        "w1": jax.random.normal(first, (64, hidden)) * 0.125,
        "b1": jnp.zeros(hidden),
        "w2": jax.random.normal(second, (hidden, 10)) * hidden**-0.5,
        "b2": jnp.zeros(10),
    }


def train(tx: Any, data: Any, test: Any, epochs: int) -> np.ndarray:
    """Training loss and test accuracy after each epoch, (epochs + 1, 2)."""

    def step(carry: Any, batch: Any) -> tuple[Any, None]:
        params, opt_state = carry
        e = optperm.evaluate(loss_fn, params, batch)
        updates, opt_state = tx.update(e.grad, opt_state, params, **e.extra_args)
        return (optperm.apply_updates(params, updates, opt_state), opt_state), None

    @jax.jit
    def epoch(carry: Any, key: jax.Array) -> Any:
        order = jax.random.permutation(key, len(data[0]))[: len(data[0]) // BATCH * BATCH]
        batches = jax.tree.map(lambda a: a[order].reshape(-1, BATCH, *a.shape[1:]), data)
        return jax.lax.scan(step, carry, batches)[0]

    carry, curve = (initial(), tx.init(initial())), []
    for index in range(epochs + 1):
        accuracy = jnp.mean(predict(carry[0], test[0]).argmax(1) == test[1])
        curve.append((loss_fn(carry[0], data), accuracy))
        carry = epoch(carry, jax.random.key(index))
    return np.array(curve)


@matplotlib.style.context("optperm.pictures")
def main(argv: Sequence[str] | None = None) -> dict[str, np.ndarray]:
    """Trains, prints and draws; returns the curves of loss and accuracy."""
    parser = flags.Parser(__doc__, "dldr-digits.png")
    parser.count("epochs", 6, "how long each of the two phases is")
    arguments = parser.parse_args(argv)
    x, y = load_digits(return_X_y=True)
    x, y = jnp.float32(x / 16), jnp.int32(y)
    data, test = (x[:1257], y[:1257]), (x[1257:], y[1257:])
    samples = arguments.epochs * (len(data[0]) // BATCH) // SAMPLE_EVERY + 1

    def two_phases(then: Any, restart: Any = "last") -> np.ndarray:
        tx = optperm.dldr(
            optax.sgd(0.1), then, every=SAMPLE_EVERY, num_snapshots=samples, restart=restart
        )
        return train(tx, data, test, 2 * arguments.epochs)

    sizes = [k for k in SIZES if k < samples]
    bfgs = {k: two_phases(optperm.dim_reduce(n_components=k)) for k in sizes}
    plain, most = optax.with_extra_args_support(optax.sgd(0.1)), sizes[-1]
    curves = {
        "SGD": train(plain, data, test, 2 * arguments.epochs),
        f"P-SGD, k = {most}": two_phases(optperm.project(plain, n_components=most)),
        f"P-BFGS, k = {most}": bfgs[most],
        f"TWA, k = {most}": two_phases(optperm.twa(plain, n_components=most), restart="mean"),
    }
    figure = Figure(figsize=(6, 5.5))
    axes = figure.subplot_mosaic([["loss", "loss"], ["accuracy", "k"]])
    for name, curve in curves.items():
        print(f"{name:14s} loss {curve[-1, 0]:.4f}, test accuracy {curve[-1, 1]:.3f}")
        axes["loss"].semilogy(curve[:, 0], label=name)
        axes["accuracy"].plot(curve[:, 1])
    axes["loss"].axvline(arguments.epochs, color="0.6", linestyle=":")
    axes["loss"].set(
        xlabel="epoch", ylabel="training loss", title="dotted: the second phase begins"
    )
    axes["accuracy"].set(xlabel="epoch", ylabel="test accuracy", ylim=(0.6, None))
    axes["k"].semilogy(sizes, [bfgs[k][-1, 0] for k in sizes], "o-", color="C2")
    axes["k"].axhline(curves["SGD"][-1, 0], color="C0")
    axes["k"].set(xlabel="dimensions k", ylabel="training loss at the end")
    figure.legend(loc="outside lower center", ncols=4)
    figure.savefig(arguments.out)
    return curves


if __name__ == "__main__":
    main()
