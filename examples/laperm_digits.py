"""LaPerm: Adam trains an MLP on scikit-learn's digits; its initial weights take Adam's order.

A synchronization discards the values of Adam's weights and keeps their order. After every step it undoes
nearly all of Adam's work; longer periods learn more each, but there are fewer of them. For each period
the script draws the test accuracy while Adam moves the weights, and marks the accuracy of the network at
the end, which holds its initial weights in another order, bit for bit.

    python examples/laperm_digits.py [--epochs 10] [--out laperm-digits.png]
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import flags
import jax
import matplotlib.style
import numpy as np
import optax
from digits import accuracy, cross_entropy, load
from flax import nnx
from matplotlib.figure import Figure

import optperm
from optperm.training import Optimizer, fit

PERIODS = (1, 10, 50)  # steps; an epoch has 39


class MLP(nnx.Module):
    """One hidden layer, with biases drawn at random: equal ones could not be permuted."""

    def __init__(self, hidden: int = 64) -> None:
        rngs, bias = nnx.Rngs(0), nnx.initializers.normal(0.1)
        self.hidden = nnx.Linear(64, hidden, bias_init=bias, rngs=rngs)
        self.output = nnx.Linear(hidden, 10, bias_init=bias, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps (batch, 64) to logits (batch, 10)."""
        return self.output(nnx.relu(self.hidden(x)))


class Trained(NamedTuple):
    """What a period led to."""

    accuracies: np.ndarray  # after each epoch, of the weights as Adam left them
    accuracy: float  # of the synchronized network
    initial: Any
    params: Any  # the synchronized ones
    permutation: Any


def loss_fn(model: MLP, batch: Any) -> jax.Array:
    """Mean cross-entropy."""
    x, y = batch
    return cross_entropy(model(x), y)


def test(model: MLP, batch: Any) -> dict[str, jax.Array]:
    """What `fit` averages over the test images after each epoch."""
    x, y = batch
    return {"accuracy": accuracy(model(x), y)}


def train(every: int, epochs: int) -> Trained:
    """Trains with one period, and synchronizes at the end."""
    train_data, test_data = load()
    model = MLP()
    initial = nnx.as_pure(nnx.state(model, nnx.Param))
    optimizer = Optimizer(model, optperm.laperm(optax.adam(3e-3), every), wrt=nnx.Param)
    evaluation = {"eval_fn": test, "eval_data": test_data}
    result = fit(
        model, loss_fn, train_data, optimizer=optimizer, epochs=epochs, batch_size=32, **evaluation
    )
    # Training may have ended between two synchronizations.
    current, opt_state = nnx.state(model, nnx.Param), nnx.as_pure(optimizer.opt_state)
    params = optperm.permutation.permuted_params(opt_state, current)
    nnx.update(model, params)
    return Trained(
        accuracies=result.history.epochs["eval_accuracy"],
        accuracy=float(test(model, test_data)["accuracy"]),
        initial=initial,
        params=params,
        permutation=optperm.permutation.export_permutation(initial, opt_state, current),
    )


@matplotlib.style.context("optperm.pictures")
def main(argv: Sequence[str] | None = None) -> dict[int, Trained]:
    """Trains with each period, prints and draws; returns what each led to."""
    parser = flags.Parser(__doc__, "laperm-digits.png")
    parser.count("epochs", 10, "passes over the images")
    options = parser.parse_args(argv)
    found = {period: train(period, options.epochs) for period in PERIODS}
    figure = Figure()
    axes = figure.subplots()
    epochs = np.arange(1, options.epochs + 1)
    for period, trained in found.items():
        print(
            f"every {period:3} steps: test accuracy {trained.accuracies[-1]:.3f} as Adam left it, "
            f"{trained.accuracy:.3f} with the initial weights in another order"
        )
        (line,) = axes.plot(epochs, trained.accuracies, label=f"{period}: {trained.accuracy:.3f}")
        axes.plot(epochs[-1], trained.accuracy, "o", color=line.get_color())
    axes.set(xlabel="epoch", ylabel="test accuracy", ylim=(0.8, 1.0))
    axes.set_title("lines: as Adam left it; dots: initial weights in that order")
    figure.legend(title="steps between syncs: end", loc="outside right center")
    figure.savefig(options.out)
    return found


if __name__ == "__main__":
    main()
