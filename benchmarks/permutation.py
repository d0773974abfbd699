"""Training by permuting: accuracy, sizes and speed of SGPerm and LaPerm.

- methods: SGPerm and LaPerm (around Adam), Adam, SGD with momentum, and Adam on the last layer alone,
  after fixed random layers. All begin at the same He-uniform weights and biases, and take the same
  batches of 50 for the same number of epochs;
- values: networks of 2, 4 and 16 evenly spaced values in each layer, trained with SGPerm from the
  start, with Adam and rounding afterwards (k-means), and with Adam on weights that the forward pass
  rounds (straight-through, with a learned scale per layer);
- bytes: the size of a trained network on disk: as float32, as a seed and an arrangement (the logarithm
  of the number of arrangements: no format can be smaller for all of them), and as the exported
  arrangement, compressed;
- speed: the least time of the whole jitted update with donated state, of its cycle search with XLA's
  call, with the C entry point without copies and in NumPy, of LaPerm's synchronization, and of
  `np.argsort` of the same weight vectors, in turns in one run; and the update's processor time and
  temporary memory.

Each method of the first two takes the number of a grid that is best on a validation split (5,000
training images), with one seed and a third of the steps. The number is the aggressiveness, the momentum
for networks of a few values, the steps between two synchronizations, or the rate.

    python benchmarks/permutation.py [--only PART ...] [--data mnist.npz] [--json FILE]
"""

import argparse
import functools
import itertools
import lzma
import math
import os
import time
from collections.abc import Callable
from typing import Any

import images
import jax
import jax.numpy as jnp
import numpy as np
import optax
import results
from timing import seconds, undisturbed

import optperm
from optperm.permutation import _cycles as cycles
from optperm.permutation import _library as library
from optperm.permutation._weight_vectors import sort_ranks

BATCH = 50
VALUES = (2, 4, 16)
WIDTHS: dict[str, Any] = {}  # of --channels
RESULTS = results.Results()
Params = dict[str, jax.Array]


def last_layer(rate: Any) -> optax.GradientTransformation:
    """Adam for the last layer, nothing for the rest."""

    def kinds(params: Params) -> dict[str, str]:
        last = len(params) // 2 - 1
        return {
            f"{x}{i}": "trained" if i == last else "frozen" for i in range(last + 1) for x in "wb"
        }

    return optax.partition({"trained": optax.adam(rate), "frozen": optax.set_to_zero()}, kinds)


def sgperm(alpha: Any, steps: int) -> optax.GradientTransformation:
    """SGPerm as the command trains by it."""
    return optperm.sgperm(optperm.permutation.falling(alpha, steps), centralize=True)


def sgperm_of_few(momentum: Any, _: int) -> optax.GradientTransformation:
    """SGPerm where a value may always take the next one's place: a smaller aggressiveness moves none."""
    return optperm.sgperm(1.0, momentum=momentum)


ALPHAS, RATES = (0.1, 0.3, 1.0), (1e-3, 3e-3, 1e-2)
# By name: from a number and the steps of the run to an optimizer, and the grid of the number.
METHODS: dict[str, tuple[Callable[[Any, int], Any], tuple[float, ...]]] = {
    "SGPerm": (sgperm, ALPHAS),
    "LaPerm": (lambda every, _: optperm.laperm(optax.adam(1e-3), every), (10, 30, 100)),
    "Adam": (lambda rate, _: optax.adam(rate), RATES),
    "SGD": (lambda rate, _: optax.sgd(rate, momentum=0.9), (0.03, 0.1, 0.3)),
    "Adam, last layer": (lambda rate, _: last_layer(rate), (3e-3, 1e-2, 3e-2)),
}
FEW = {"SGPerm, few values": (sgperm_of_few, (0.9, 0.99, 0.999))}
# The ways to networks of a few values, and the method that trains.
PERMUTED, ROUNDED, PASSED = "permuted (SGPerm)", "Adam, rounded", "Adam, straight-through"
WAYS = {PERMUTED: "SGPerm, few values", ROUNDED: "Adam", PASSED: "Adam"}


def initial(seed: Any, image: tuple[int, ...], values: int | None = None) -> Params:
    """He's uniform weights, or as many values evenly spaced in their place, and biases of the same law.

    Equal ones could not be permuted.
    """
    params = {}
    for i, weights in enumerate(images.weight_shapes(image, **WIDTHS)):
        bound = math.sqrt(6 / math.prod(weights[:-1]))
        for j, (name, shape) in enumerate(((f"w{i}", weights), (f"b{i}", weights[-1:]))):
            key = jax.random.fold_in(jax.random.key(seed), 2 * i + j)
            if values is None:
                params[name] = jax.random.uniform(key, shape, minval=-bound, maxval=bound)
            else:
                steps = jax.random.randint(key, shape, 0, values)
                params[name] = bound * ((2 * steps + 1) / values - 1)
    return params


def straight_through(params: Params, values: int) -> Params:
    """The weights that the forward pass sees: scale times the nearest of evenly spaced values."""

    def of_leaf(w: jax.Array) -> jax.Array:
        bound = 2 * jnp.mean(jnp.abs(w))  # of a uniform law, so that the scale is learned too
        step = jnp.clip(jnp.floor((w / bound + 1) / 2 * values), 0, values - 1)
        nearest = bound * ((2 * step + 1) / values - 1)
        return w + jax.lax.stop_gradient(nearest - w)

    return jax.tree.map(of_leaf, params)


def rounded(params: Params, count: int, iterations: int = 20) -> Params:
    """Each leaf with the nearest of as many values, found by k-means."""

    def leaf(w: jax.Array) -> jax.Array:
        flat = np.ravel(w)
        values = np.quantile(flat, (np.arange(count) + 0.5) / count)
        for _ in range(iterations):
            nearest = np.searchsorted((values[1:] + values[:-1]) / 2, flat)
            sums, counts = np.bincount(nearest, flat, count), np.bincount(nearest, None, count)
            values = np.where(counts, sums / np.maximum(counts, 1), values)
        return jnp.asarray(values[nearest].reshape(w.shape), jnp.float32)

    return jax.tree.map(leaf, params)


@functools.partial(jax.jit, static_argnames=("name", "passed"))
def trained(
    name: str, number: Any, params: Params, batches: jax.Array, data: Any, passed: int | None
) -> Any:
    """The params after batches of indices (steps, BATCH): one program for all numbers and seeds."""
    tx = (METHODS | FEW)[name][0](number, len(batches))

    def loss(params: Params, batch: Any) -> jax.Array:
        return images.loss_fn(straight_through(params, passed) if passed else params, batch)

    params, state = images.train(tx, params, tx.init(params), batches, data, loss)
    return optperm.permutation.permuted_params(state, params) if name == "LaPerm" else params


def run(
    name: str, number: float, seed: int, steps: int, data: Any, values: int | None, way: str
) -> Params:
    """The trained params of a method, of a few values where a way to them is named."""
    batches = images.batches(len(data[0]), BATCH, steps, seed)
    start = initial(seed, data[0].shape[1:], values if way == PERMUTED else None)
    passed = values if way == PASSED else None
    params = trained(name, number, start, batches, data, passed)
    if way == ROUNDED:
        return rounded(params, values or 0)
    return straight_through(params, passed) if passed else params


def compare(
    title: str,
    options: argparse.Namespace,
    train: Any,
    test: Any,
    shown: str,
    name: str,
    values: int | None = None,
    way: str = "",
) -> None:
    """Print and keep the row of one method, at the number that is best on the validation split."""
    steps = round(options.epochs * len(train[0]) / BATCH)

    def fit(number: float, seed: int, steps: int, data: Any) -> Params:
        return run(name, number, seed, steps, data, values, way)

    best, tried = images.tune((METHODS | FEW)[name][1], fit, steps, train)
    seeds = range(options.seeds)
    scores = [images.accuracy(fit(best, seed, steps, train), test) for seed in seeds]
    RESULTS.show(
        title,
        method=shown,
        test_accuracy=images.spread(scores),
        number=f"{best:g}",
        validation_of_the_grid=images.shown(tried),
    )
    RESULTS.write(options.json)


def compare_bytes(options: argparse.Namespace, train: Any) -> None:
    """Print what a network takes on disk that SGPerm has trained for an epoch."""
    start = initial(0, train[0].shape[1:])
    batches = images.batches(len(train[0]), BATCH, len(train[0]) // BATCH, 0)
    tx = sgperm(0.3, len(batches))
    _, state = jax.jit(lambda p: images.train(tx, p, tx.init(p), batches, train))(start)
    exported = jax.tree.leaves(optperm.permutation.export_permutation(start, state))
    count = sum(leaf.size for leaf in start.values())
    vectors = [leaf.shape for leaf in start.values()]
    sizes = [(math.prod(s[:-1]), s[-1]) if len(s) > 1 else (s[0], 1) for s in vectors]
    nats = sum(number * math.lgamma(length + 1) for length, number in sizes)
    arranged = sum(np.asarray(leaf).nbytes for leaf in exported)
    packed = sum(len(lzma.compress(np.asarray(leaf).tobytes())) for leaf in exported)
    rows = {
        "float32": 4.0 * count,
        "float16": 2.0 * count,
        "seed and arrangement, at least": nats / math.log(2) / 8,
        "seed and arrangement, as exported": float(arranged),
        "the same, compressed (LZMA)": float(packed),
    }
    for name, size in rows.items():
        bits = f"{8 * size / count:.2f}"
        RESULTS.show("A checkpoint", what=name, bytes=f"{size:,.0f}", bits_per_weight=bits)


# (weight vectors, entries in each)
SHAPES = ((1000, 1000), (512, 4608), (1, 1_000_000))
PARTITION_RATIOS = (1.0, 0.1)
AGGRESSIVENESS = 0.1
IN_NUMPY = 2  # weight vectors, of not too many entries


@undisturbed()
def measure(rows: int, n: int, ratio: float, repetitions: int) -> None:
    """Show the least times for one shape and partition ratio."""
    rng = np.random.default_rng(0)
    vectors = rng.normal(size=(rows, n)).astype(np.float32)
    params = jnp.asarray(vectors.T)
    grads = jnp.asarray(rng.normal(size=(n, rows)).astype(np.float32))
    matrix = params[None]
    tx = optperm.sgperm(AGGRESSIVENESS, ratio)
    update, state, ranks = (
        jax.jit(tx.update, donate_argnums=(0, 1)),
        tx.init(params),
        sort_ranks(matrix),
    )
    seeds, size = jax.random.bits(jax.random.key(0), (rows, 2), jnp.uint32), max(10, int(ratio * n))
    rest = matrix, ranks, seeds[None], jnp.float32(AGGRESSIVENESS), jnp.int32(size)
    kernel = jax.jit(lambda grads: cycles.permute_rows(grads[None], *rest, drop_remainder=False))
    laperm = optperm.laperm(optax.identity(), 1)
    synchronize, laperm_state = jax.jit(laperm.update), laperm.init(params)

    def on_host(kind: str, count: int) -> Callable[[], object]:
        operands = [np.asarray(x)[None, ..., :count] for x in (grads, params, ranks[0])]
        operands.append(np.asarray(seeds)[None, :count])
        operands.append(np.full((1, count), AGGRESSIVENESS, np.float32))
        operands.append(np.full((1, count), size, np.int32))
        outputs = [np.empty_like(operands[index]) for index in (1, 2, 5)]
        return lambda: cycles.permute_on_host(kind, False, operands, outputs)

    def whole_update() -> object:
        nonlocal state
        updates, state = update(gradients, state, params)
        return updates, state

    measured: dict[str, Callable[[], object]] = {
        "update": whole_update,
        "by XLA": lambda: kernel(grads),
        "by host": on_host("callback", rows),
        "argsort": lambda: np.argsort(vectors, axis=1),
        "synchronize": lambda: synchronize(grads, laperm_state, params),
    }
    walls: dict[str, list[float]] = {name: [] for name in measured}
    processor = []
    for _ in range(repetitions + 3):
        gradients = jax.block_until_ready(jnp.array(grads, copy=True))
        for name, function in measured.items():
            start = time.process_time()
            walls[name].append(seconds(function))
            if name == "update":
                processor.append(time.process_time() - start)
    least = {name: 1e3 * min(taken[3:]) for name, taken in walls.items()}
    if n <= 10_000:
        few = min(IN_NUMPY, rows)
        least["in NumPy"] = 1e3 * seconds(on_host("numpy", few)) * rows / few
    memory = update.lower(grads, state, params).compile().memory_analysis().temp_size_in_bytes
    RESULTS.show(
        "Least times",
        weight_vectors=f"{rows} of {n}",
        partition_ratio=ratio,
        **{f"{name}_ms": f"{taken:.2f}" for name, taken in least.items()},
        processor_ns_per_weight=f"{min(processor[3:]) * 1e9 / (rows * n):.1f}",
        bytes_per_weight=f"{memory / (rows * n):.1f}",
    )


PARTS = ("methods", "values", "bytes", "speed")


def main() -> None:
    """Run the parts that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    images.add_arguments(parser)
    add = parser.add_argument
    add("--seeds", type=int, default=3)
    add("--epochs", type=float, default=3.0)
    add("--only", nargs="+", choices=PARTS, default=PARTS)
    add("--channels", type=int, nargs="+", help="of convolutions, on gray images too")
    add("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    add("--repetitions", type=int, default=9)
    add("--cores", type=int, default=len(os.sched_getaffinity(0)))
    results.add_argument(parser)
    options = parser.parse_args()
    # Before JAX and the kernel start their threads.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.cores])
    source, train, test = images.load(options.data, options.examples)
    title = f"{source}, {len(train[0])} images, {options.epochs:g} epochs, {options.seeds} seeds"
    if options.channels:
        WIDTHS.update(hidden=None, channels=options.channels)
        title += ", convolutions"
    if "methods" in options.only:
        for name in options.methods:
            compare(title, options, train, test, name, name)
    if "values" in options.only:
        for (way, name), values in itertools.product(WAYS.items(), VALUES):
            shown = f"{way}, {values} values"
            compare(f"{title}: few values", options, train, test, shown, name, values, way)
    if "bytes" in options.only:
        compare_bytes(options, train)
    print(f"kernel: {library.choose_kernel()}; cores: {options.cores}")
    if "speed" in options.only:
        for (rows, n), ratio in itertools.product(SHAPES, PARTITION_RATIOS):
            measure(rows, n, ratio, options.repetitions)
    RESULTS.write(options.json)


if __name__ == "__main__":
    main()
