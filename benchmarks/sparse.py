"""Accuracy by sparsity: gradual and one-shot pruning, RigL, SET, static masks and SNIP.

The network is an MLP of 300 and 100 hidden units on MNIST, or a convolutional network on CIFAR-10;
biases stay dense. All methods train for the same number of steps with Adam and a rate that falls to 0 by
a cosine. One-shot pruning happens after half of the steps. The ramp of gradual pruning rises from 10 to
75 % of the steps, and RigL and SET end at 75 %. Masks change every 100 steps, or as `--every` says.

With `--tune` each row first takes the rate that is best on a validation split (5,000 training images),
with one seed and a third of the steps. With `--export` the script measures the use of gradually pruned
networks after `to_sparse` and `remove_units`.

    python benchmarks/sparse.py --data mnist.npz [--seeds 2] [--sparsity 0.9 0.98] [--tune] [--export]
"""

import argparse
import functools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import images
import jax
import jax.numpy as jnp
import numpy as np
import optax
import results
from timing import take_turns

import optperm

HIDDEN, BATCH = (300, 100), 100
RATES = (5e-4, 1e-3, 2e-3, 4e-3, 8e-3)
SNIP_EXAMPLES = 2000
GROUPS = {
    "first": [("w0", -1), ("b0", -1), ("w1", -2)],
    "second": [("w1", -1), ("b1", -1), ("w2", -2)],
}
RESULTS = results.Results()


class Run(NamedTuple):
    """A training of a network of some layers; `every` is the number of steps between two masks."""

    steps: int
    rate: Any
    seed: Any
    every: int
    layers: int


# A row: from a sparsity and a run to an optimizer.
def adam(run: Run) -> optax.GradientTransformation:
    """The optimizer of all rows."""
    return optax.adam(optax.cosine_decay_schedule(run.rate, run.steps))


def gradual(sparsity: Any, run: Run, **options: Any) -> Any:
    """Zhu and Gupta's ramp from 10 to 75 % of the steps."""
    ramp = optax.polynomial_schedule(0.0, 1.0, 3, round(0.65 * run.steps), round(0.1 * run.steps))
    return optperm.prune_gradually(adam(run), sparsity, ramp, every=run.every, **options)


def moving(sparsity: Any, run: Run, **options: Any) -> Any:
    """RigL to 75 % of the steps; by options SET, or a static mask."""
    key, end = jax.random.key(1000 + run.seed), round(0.75 * run.steps)
    return optperm.rigl(adam(run), sparsity, end=end, key=key, every=run.every, **options)


def held(sparsity: float, run: Run) -> Any:
    """Masks that are set by hand."""
    return optax.chain(adam(run), optperm.mask_elements())


def same_sparsity(sparsity: float, run: Run) -> dict[str, float]:
    """The sparsity of each leaf, in the place of ERK's."""
    return {name: sparsity for index in range(run.layers) for name in (f"w{index}", f"b{index}")}


ROWS: dict[str, Callable[..., Any]] = {
    "gradual magnitude, global": functools.partial(gradual, scope="global"),
    "gradual magnitude, ERK": gradual,
    "gradual magnitude, the same sparsity": functools.partial(gradual, scope="leaf"),
    "gradual movement, ERK": functools.partial(gradual, criterion="movement"),
    "one-shot magnitude, global": held,
    "RigL, ERK": moving,
    "SET, ERK": functools.partial(moving, grow="random"),
    "static random, ERK": functools.partial(moving, drop_fraction=0),
    "static random, the same sparsity": lambda sparsity, run: moving(
        same_sparsity(sparsity, run), run, drop_fraction=0
    ),
    "SNIP, global": held,
    "dense": held,
}
# Whole units of the hidden layers, for `--export`.
UNITS = {
    "units": lambda sparsity, run: gradual(
        same_sparsity(sparsity, run) | {"w2": 0.0}, run, structure=optperm.sparsity.Units()
    )
}


@functools.partial(jax.jit, static_argnames=("name", "sparsity", "steps", "every"))
def trained(
    name: str,
    sparsity: float,
    steps: int,
    every: int,
    rate: Any,
    seed: Any,
    batches: Any,
    data: Any,
) -> Any:
    """The params of a row after batches of indices (steps, BATCH): one program for all rates."""
    params = images.initial(seed, data[0].shape[1:], hidden=HIDDEN)
    tx = (ROWS | UNITS)[name](sparsity, Run(steps, rate, seed, every, len(params) // 2))
    state = tx.init(params)
    if name == "SNIP, global":
        grads = jax.grad(images.loss_fn)(params, (data[0][:SNIP_EXAMPLES], data[1][:SNIP_EXAMPLES]))
        scores = jax.tree.map(lambda w, g: jnp.abs(w * g), params, grads)
        params, state = optperm.sparsity.prune(
            params, state, sparsity, scope="global", scores=scores
        )
    elif isinstance(state, optperm.sparsity.SparseState):
        params, state = optperm.sparsity.prune(params, state, 0.0)
    if name == "one-shot magnitude, global":
        first, batches = batches[: steps // 2], batches[steps // 2 :]
        params, state = images.train(tx, params, state, first, data)
        params, state = optperm.sparsity.prune(params, state, sparsity, scope="global")
    return images.train(tx, params, state, batches, data)[0]


def fit(every: int, name: str, sparsity: Any, rate: float, seed: int, steps: int, data: Any) -> Any:
    """The trained params of a row."""
    batches = images.batches(len(data[0]), BATCH, steps, seed)
    return trained(name, sparsity, steps, every, rate, seed, batches, data)


def table(options: argparse.Namespace, data: str, steps: int, train: Any, test: Any) -> None:
    """Accuracy by row and sparsity, each at its rate."""
    title = f"{data}, test accuracy by sparsity" + (", tuned rates" * options.tune)
    for name in options.rows or ROWS:
        cells = {}
        for sparsity in (0.0,) if name == "dense" else options.sparsity:
            start, rate = time.process_time(), options.rate
            of_row = functools.partial(fit, options.every, name, sparsity)
            if options.tune:
                rate, _ = images.tune(RATES, of_row, steps, train)
            nets = [of_row(rate, seed, steps, train) for seed in range(options.seeds)]
            scores = [images.accuracy(params, test) for params in nets]
            chosen = f" ({rate:g})" if options.tune else ""
            cells[f"{sparsity:.0%}"] = f"{images.spread(scores)}{chosen}"
            each = " ".join(f"{score:.4f}" for score in scores)
            seconds = time.process_time() - start
            print(f"{name:36} {sparsity:5.0%} rate {rate:g}: {each}  {seconds:.0f} s", flush=True)
        RESULTS.row(title, method=name, **cells)
        RESULTS.write(options.json)


def bytes_of(tree: Any) -> int:
    """What the arrays of params take, sparse ones included."""
    total = 0
    for leaf in jax.tree.leaves(tree, is_leaf=lambda node: hasattr(node, "indptr")):
        parts = (leaf.data, leaf.indices, leaf.indptr) if hasattr(leaf, "indptr") else (leaf,)
        total += sum(np.asarray(part).nbytes for part in parts)
    return total


def apply_sparse(params: Any, x: Any, xp: Any) -> Any:
    """Logits by matrices that are transposed."""
    for index in range(len(params) // 2):
        x = xp.maximum(x, 0) if index else x
        x = (params[f"w{index}"] @ x.T).T + params[f"b{index}"]
    return x


def least_milliseconds(function: Callable[..., Any], *arguments: Any, repetitions: int) -> float:
    """Processor time of a call, the least of many."""
    calls = {"": lambda: function(*arguments)}
    return 1e3 * min(take_turns(calls, repetitions, time.process_time, warm_up=1)[""])


def export_table(options: argparse.Namespace, steps: int, data: Any, test: Any) -> None:
    """Bytes, time and accuracy of what was trained sparse, as it is used."""
    x, y = test[0].reshape(len(test[0]), -1), np.asarray(test[1])
    title = "Used after training: bytes, processor milliseconds a batch of 1, 32 and 256, accuracy"

    def show(name: str, function: Callable[..., Any], params: Any, xp: Any) -> None:
        least = functools.partial(least_milliseconds, function, params)
        parts = [xp.asarray(x[:n]) for n in (1, 32, 256)]
        times = [f"{least(part, repetitions=options.repetitions):.3f}" for part in parts]
        right = np.mean(np.asarray(function(params, xp.asarray(x))).argmax(axis=-1) == y)
        cells = dict(zip(("ms_of_1", "ms_of_32", "ms_of_256"), times, strict=True))
        RESULTS.row(title, network=name, bytes=bytes_of(params), **cells, accuracy=f"{right:.4f}")
        print(f"{name:34} {bytes_of(params):9} B  {' '.join(times)} ms  {right:.4f}", flush=True)

    jitted, sparse = jax.jit(images.logits), jax.jit(lambda p, x: apply_sparse(p, x, jnp))

    def train(name: str, sparsity: float) -> Any:
        return fit(options.every, name, sparsity, options.rate, 0, steps, data)

    show("dense", jitted, train("dense", 0.0), jnp)
    for sparsity in options.sparsity:
        params = train("gradual magnitude, ERK", sparsity)
        show(f"{sparsity:.0%} zeros, dense product", jitted, params, jnp)
        for kind in ("bcsr", "bcoo"):
            show(
                f"{sparsity:.0%} zeros, {kind}",
                sparse,
                optperm.sparsity.to_sparse(params, kind),
                jnp,
            )
        by_scipy = optperm.sparsity.to_sparse(params, "scipy")
        by_scipy = {k: np.asarray(v) if k.startswith("b") else v for k, v in by_scipy.items()}
        show(f"{sparsity:.0%} zeros, scipy", lambda p, x: apply_sparse(p, x, np), by_scipy, np)
        small = optperm.sparsity.remove_units(params, GROUPS, zero_at_zero=True)
        shapes = [small[f"w{i}"].shape for i in range(3)]
        show(
            f"{sparsity:.0%} zeros, unused units removed {shapes[0][1]}-{shapes[1][1]}",
            jitted,
            small,
            jnp,
        )
    for units in options.units:
        params = train("units", units)
        # A unit that nothing enters is a constant: it goes into the bias of what follows.
        for index in (0, 1):
            is_dead = (params[f"w{index}"] == 0).all(axis=0)
            constant = jnp.where(is_dead, jax.nn.relu(params[f"b{index}"]), 0.0)
            params[f"b{index + 1}"] += constant @ params[f"w{index + 1}"]
            params[f"b{index}"] = jnp.where(is_dead, 0.0, params[f"b{index}"])
        small = optperm.sparsity.remove_units(params, GROUPS, zero_at_zero=True)
        shapes = [small[f"w{i}"].shape for i in range(3)]
        show(f"{units:.0%} of units pruned {shapes[0][1]}-{shapes[1][1]}", jitted, small, jnp)


def main(argv: list[str] | None = None) -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    images.add_arguments(parser)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--epochs", type=float, default=3.0)
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--sparsity", type=float, nargs="+", default=[0.9, 0.95, 0.98])
    parser.add_argument("--units", type=float, nargs="*", default=[0.5, 0.75])
    parser.add_argument("--every", type=int, default=100, help="steps between two masks")
    parser.add_argument("--rows", nargs="*", choices=list(ROWS))
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--export", action="store_true")
    parser.add_argument("--repetitions", type=int, default=50)
    results.add_argument(parser)
    options = parser.parse_args(argv)
    name, train, test = images.load(options.data, options.examples)
    steps = round(options.epochs * len(train[0]) / BATCH)
    if options.export:
        export_table(options, steps, train, test)
    else:
        table(options, name, steps, train, test)
    RESULTS.write(options.json)


if __name__ == "__main__":
    main()
