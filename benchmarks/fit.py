"""Time of `optperm.training.fit` over that of the same steps in a loop written by hand.

Both train the same small network on the same batches, from the same params, for as many steps;
compiling is left out. In turns, and medians of each: run as `python benchmarks/fit.py`.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import optperm
from optperm import training

EXAMPLES, FEATURES, CLASSES, BATCH = 4096, 64, 10, 128


class Net(nn.Module):
    """A multilayer perceptron.

    Attributes:
      hidden: Units of each of two layers.
    """

    hidden: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps (batch, features) to logits."""
        for _ in range(2):
            x = nn.relu(nn.Dense(self.hidden)(x))
        return nn.Dense(CLASSES)(x)


def data() -> dict[str, np.ndarray]:
    """Random examples with labels that can be learned."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(EXAMPLES, FEATURES)).astype(np.float32)
    return {"x": x, "y": np.argmax(x[:, :CLASSES], axis=1).astype(np.int32)}


def setup(hidden: int, tx: optax.GradientTransformation) -> tuple[Any, Callable[..., Any]]:
    """The state before training, and the loss function."""
    model = Net(hidden)
    params = model.init(jax.random.key(0), jnp.zeros((1, FEATURES)))["params"]

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        logits = model.apply({"params": params}, batch["x"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()

    return training.TrainState.create(apply_fn=model.apply, params=params, tx=tx), loss_fn


def by_hand(state: Any, loss_fn: Callable[..., Any]) -> Callable[..., Any]:
    """The loop that one would write: a jitted step, its state donated, called for each batch.

    Losses stay on the device until the end.
    """

    def step(state: Any, batch: Any) -> Any:
        e = optperm.evaluate(loss_fn, state.params, batch)
        return state.apply_gradients(grads=e.grad, **e.extra_args), e.value

    jitted = jax.jit(step, donate_argnums=0)

    def run(epochs: int, source: Callable[[int], Any]) -> Any:
        current, losses = jax.tree.map(jnp.copy, state), []
        for epoch in range(1, epochs + 1):
            for batch in source(epoch):
                current, loss = jitted(current, batch)
                losses.append(loss)
        return current, jax.device_get(losses)

    return run


def from_memory(epoch: int) -> Any:
    """The batches of `fit`'s shuffles, gathered on the host."""
    order = np.asarray(training.shuffled(0, epoch, EXAMPLES))
    examples = data_once
    for low in range(0, EXAMPLES, BATCH):
        hand = order[low : low + BATCH]
        yield {name: leaf[hand] for name, leaf in examples.items()}


def seconds(work: Callable[[], Any]) -> float:
    """Wall time."""
    start = time.perf_counter()
    jax.block_until_ready(work())
    return time.perf_counter() - start


def main() -> None:
    """Prints a row for each method, size and source of batches."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--source", choices=["arrays", "iterable"])
    chosen = parser.parse_args()
    methods = {
        "sgd": optax.sgd(0.1),
        "adam": optax.adam(1e-3),
        "dldr": optperm.dldr(optax.sgd(0.1), sample_every=4, num_samples=17, n_components=16),
    }
    print(f"{EXAMPLES} examples, batches of {BATCH}, medians of {chosen.repetitions} in turns")
    print(f"{'':6} {'hidden':>6} {'batches':10} {'by hand':>9} {'fit':>9}   of one step; ratio")
    for name, tx in methods.items():
        for hidden in (64, 512):
            state, loss_fn = setup(hidden, tx)
            loop = by_hand(state, loss_fn)
            for source in ("arrays", "iterable"):
                if chosen.source in (None, source):
                    compare(name, hidden, source, state, loss_fn, loop, chosen)


def compare(
    name: str,
    hidden: int,
    source: str,
    state: Any,
    loss_fn: Callable[..., Any],
    loop: Callable[..., Any],
    chosen: argparse.Namespace,
) -> None:
    """Prints the row of one method, size and source."""
    options = {"batch_size": BATCH} if source == "arrays" else {}
    train_data = data_once if source == "arrays" else from_memory

    def fitted() -> Any:
        result = training.fit(state, loss_fn, train_data, epochs=chosen.epochs, **options)
        return result.state

    times: dict[str, list[float]] = {"hand": [], "fit": []}
    for _ in range(chosen.repetitions + 1):
        times["hand"].append(seconds(lambda: loop(chosen.epochs, from_memory)))
        times["fit"].append(seconds(fitted))
    steps = chosen.epochs * (EXAMPLES // BATCH)
    # The first of each compiles.
    hand, fit = (1e6 * statistics.median(times[peer][1:]) / steps for peer in ("hand", "fit"))
    print(f"{name:6} {hidden:6} {source:10} {hand:7.1f} us {fit:7.1f} us   {fit / hand:.2f}")


data_once = data()

if __name__ == "__main__":
    main()
