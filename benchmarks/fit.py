"""Time of `optperm.training.fit` over the time of the same steps in a loop by hand.

Both train the same small network on the same batches, from the same params, for the same number of
steps. Arrays are compared with one jitted `jax.lax.scan` over 100 steps at a time, called from a plain
loop. Iterables are compared with a jitted step, called for each batch. Times do not include compilation;
the runs take turns, and the shortest one counts.

    python benchmarks/fit.py [--repetitions 11] [--seconds 3] [--json FILE]
"""

import argparse
from collections.abc import Callable, Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import results
from timing import seconds, take_turns

import optperm
from optperm import training

EXAMPLES, FEATURES, CLASSES, BATCH = 12800, 64, 10, 128
STEPS = EXAMPLES // BATCH  # an epoch, and a call by hand


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


def examples() -> dict[str, np.ndarray]:
    """Random examples with labels that can be learned."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(EXAMPLES, FEATURES)).astype(np.float32)
    return {"x": x, "y": np.argmax(x[:, :CLASSES], axis=1).astype(np.int32)}


DATA = examples()


def batches(epoch: int) -> Iterator[dict[str, np.ndarray]]:
    """The batches of `fit`'s shuffles, gathered on the host."""
    for hand in np.asarray(training.shuffled(0, epoch, EXAMPLES)).reshape(STEPS, BATCH):
        yield {name: leaf[hand] for name, leaf in DATA.items()}


def setup(hidden: int) -> tuple[Any, Callable[..., Any]]:
    """The state before training, and the loss function."""
    model = Net(hidden)
    params = model.init(jax.random.key(0), jnp.zeros((1, FEATURES)))["params"]

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        logits = model.apply({"params": params}, batch["x"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()

    create = training.TrainState.create
    return create(apply_fn=model.apply, params=params, tx=optax.adam(1e-3)), loss_fn


def by_hand(state: Any, loss_fn: Callable[..., Any]) -> tuple[Any, Any]:
    """The loops that one would write, their states donated: over arrays, and over batches."""

    def step(state: Any, batch: Any) -> Any:
        e = optperm.evaluate(loss_fn, state.params, batch)
        return state.apply_gradients(grads=e.grad, **e.extra_args), e.value

    def call(state: Any, order: jax.Array, data: Any) -> Any:
        return jax.lax.scan(
            lambda state, hand: step(state, jax.tree.map(lambda leaf: leaf[hand], data)),
            state,
            order,
        )

    scanned, jitted = jax.jit(call, donate_argnums=0), jax.jit(step, donate_argnums=0)
    on_device = jax.tree.map(jnp.asarray, DATA)

    def arrays(epochs: int) -> Any:
        current, losses = jax.tree.map(jnp.copy, state), []
        for epoch in range(1, epochs + 1):
            order = training.shuffled(0, epoch, EXAMPLES).reshape(STEPS, BATCH)
            current, loss = scanned(current, order, on_device)
            losses.append(np.asarray(loss))
        return current

    def iterable(epochs: int) -> Any:
        current, losses = jax.tree.map(jnp.copy, state), []
        for epoch in range(1, epochs + 1):
            for batch in batches(epoch):
                current, loss = jitted(current, batch)
                losses.append(loss)
        jax.device_get(losses)
        return current

    return arrays, iterable


def compare(hand: Any, fit: Any, repetitions: int, least: float) -> list[float]:
    """Microseconds of a step by each, the least of runs in turns of so many seconds."""
    hand(1), fit(1)  # these compile
    epochs = max(1, round(least / min(seconds(lambda: hand(1)) for _ in range(3))))
    calls = {"hand": lambda: hand(epochs), "fit": lambda: fit(epochs)}
    times = take_turns(calls, repetitions, warm_up=0)
    return [1e6 * min(taken) / (epochs * STEPS) for taken in times.values()]


def main() -> None:
    """Prints a row for each size and source of batches."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=11)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each run, at least")
    parser.add_argument("--hidden", type=int, nargs="+", default=[64, 256])
    results.add_argument(parser)
    chosen = parser.parse_args()
    found = results.Results()
    for hidden in chosen.hidden:
        state, loss_fn = setup(hidden)
        state = jax.device_put(state, jax.devices()[0])  # one device by choice
        loop, stream = by_hand(state, loss_fn)

        def fitted(epochs: int, state: Any = state, loss_fn: Any = loss_fn, **options: Any) -> Any:
            data = options.pop("data", DATA)
            batch = {"batch_size": BATCH} if data is DATA else {}
            return training.fit(state, loss_fn, data, epochs=epochs, **batch, **options).state

        peers = {
            "arrays": (loop, fitted),
            "arrays, every={100: f}": (loop, lambda n, f=fitted: f(n, every={100: lambda e: None})),
            "arrays, every={1: f}": (loop, lambda n, f=fitted: f(n, every={1: lambda e: None})),
            "iterable": (stream, lambda n, f=fitted: f(n, data=batches)),
        }
        for name, (hand, fit) in peers.items():
            of_step = compare(hand, fit, chosen.repetitions, chosen.seconds)
            ratio = of_step[1] / of_step[0]
            times = {"hand_us": f"{of_step[0]:.1f}", "fit_us": f"{of_step[1]:.1f}"}
            cells = {"hidden": hidden, "batches": name, **times, "ratio": f"{ratio:.3f}"}
            found.row("A step of fit over one by hand", **cells)
            says = "by hand {:7.1f} us, fit {:7.1f} us a step, ratio {:.3f}".format(*of_step, ratio)
            print(f"{hidden:5} {name:24} {says}", flush=True)
    found.write(chosen.json)


if __name__ == "__main__":
    main()
