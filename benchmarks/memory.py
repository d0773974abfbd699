"""Small optimizer states compared with AdamW and Optax's GaLore: loss, memory and time.

The script prints:

- train: a small decoder learns the bytes of Python's standard library, or of a text of yours. The table
  has nats per byte on held-out bytes, words of optimizer state for each parameter, and processor
  milliseconds per step. Embeddings, norms and biases train with Adam at one rate in all rows, and the
  kernels at this rate times a scale. The scale, and the rate of AdamW too, are tuned on half of the
  held-out bytes, with one seed and a third of the steps; the seeds are measured on the other half;
- step: the processor time of a step over the time of a step of AdamW, for the update alone and with a
  gradient. Steps have no new basis, one, or one for each matrix;
- memory: the memory of a compiled training step of a decoder of 100 million params, ahead of time.

    python benchmarks/memory.py [--only train|step|memory] [--data FILE] [--seeds 5] [--steps 600]
        [--methods NAME ...] [--rates ...] [--scales ...] [--width 96] [--context 64] [--repetitions 20]
        [--json FILE]
"""

import argparse
import functools
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import library_bytes
import numpy as np
import optax
import optax.contrib
import results

import optperm

Tx = optax.GradientTransformation
RESULTS = results.Results()
BATCH, DECAY, EVERY = 8, 0.01, 100
RATES = (6e-3, 1.2e-2, 2.4e-2)
LOW, SCALES = (0.125, 0.25, 0.5, 1.0, 2.0), (0.015625, 0.03125, 0.0625, 0.125, 0.25, 0.5)


def low_rank(**options: Any) -> Tx:
    """Return Adam in subspaces of a quarter of each matrix."""
    return optperm.low_rank(optax.scale_by_adam(), 1 / 4, every=EVERY, **options)


# What each makes of a kernel's gradient, and the scales of its grid. The rank is that of a width of 96.
METHODS: dict[str, tuple[Callable[[int], Tx], tuple[float, ...]]] = {
    "AdamW": (lambda width: optax.scale_by_adam(), SCALES),
    "optax.contrib.galore": (
        lambda width: optax.contrib.scale_by_galore(width // 4, EVERY),
        LOW,
    ),
    "svd, kept (GaLore)": (
        lambda width: low_rank(projection="svd", residual=None, carry=False),
        LOW,
    ),
    "svd, carried": (lambda width: low_rank(projection="svd", residual=None), LOW),
    "svd, kept, residual (Fira)": (lambda width: low_rank(projection="svd", carry=False), LOW),
    "svd, carried, residual": (lambda width: low_rank(projection="svd"), LOW),
    "random, carried": (lambda width: low_rank(projection="random", residual=None), LOW),
    "random, carried, residual": (lambda width: low_rank(projection="random"), LOW),
    "power, carried, residual": (
        lambda width: optperm.low_rank(optax.scale_by_adam(), 1 / 4, every=20, projection="power"),
        LOW,
    ),
    "apollo": (lambda width: optperm.apollo(rank=1 / 4, every=EVERY), LOW),
    "apollo, rank 1": (
        lambda width: optperm.apollo(rank=1, by="tensor", scale=128**0.5, every=EVERY),
        LOW,
    ),
}


def quantize(tx: Tx, bits: int = 8) -> Tx:
    """Return an optimizer with the moments of all matrices, embeddings too, in 8 bits or fewer."""
    return optperm.quantize_state(tx, bits=bits, min_size=1024)


# The same in small states: what is wrapped around the whole optimizer.
WRAPPERS: dict[str, Callable[[Tx], Tx]] = {}
for name, base, wrapper in (
    ("AdamW, 8 bits", "AdamW", quantize),
    ("AdamW, 4 bits", "AdamW", functools.partial(quantize, bits=4)),
    ("low rank, 8 bits", "random, carried, residual", quantize),
    ("apollo, 8 bits", "apollo", quantize),
):
    METHODS[name], WRAPPERS[name] = METHODS[base], wrapper
METHODS["AdamW, bfloat16"] = (lambda width: bfloat16_adam(), SCALES)


def bfloat16_adam() -> Tx:
    """Return Adam whose moments are rounded to bfloat16 after each step."""
    adam = optax.scale_by_adam()

    def round_moments(state: Any) -> Any:
        mu, nu = optax.tree.cast((state.mu, state.nu), jnp.bfloat16)
        return state._replace(mu=mu, nu=nu)

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        mu, nu = optax.tree.cast((state.mu, state.nu), jnp.float32)
        updates, state = adam.update(updates, state._replace(mu=mu, nu=nu), params)
        return updates, round_moments(state)

    return optax.GradientTransformation(lambda params: round_moments(adam.init(params)), update)


def is_kernel(path: Any, leaf: Any) -> str:
    """Return which optimizer trains a leaf."""
    return "kernel" if "kernel" in jax.tree_util.keystr(path) and leaf.ndim == 2 else "other"


def optimizer(name: str, rate: Any, scale: Any, steps: Any) -> Tx:
    """Return an optimizer whose kernels move by the direction of a method, and all else by Adam."""
    direction = METHODS[name][0](library_bytes.WIDTH)

    def shape(t: jax.Array) -> jax.Array:  # 20 steps of warm-up, and a cosine
        return jnp.minimum(t / 20, 1.0) * (0.525 + 0.475 * jnp.cos(jnp.pi * t / steps))

    kernels = optax.chain(
        direction,
        optax.add_decayed_weights(DECAY),
        optax.scale_by_schedule(lambda t: -rate * scale * shape(t)),
    )
    others = optax.chain(optax.scale_by_adam(), optax.scale_by_schedule(lambda t: -rate * shape(t)))
    labels = functools.partial(jax.tree_util.tree_map_with_path, is_kernel)
    tx = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.partition({"kernel": kernels, "other": others}, labels),
    )
    return WRAPPERS.get(name, lambda tx: tx)(tx)


class Task:
    """A text, and a decoder that learns its bytes."""

    def __init__(self, train: np.ndarray, held: np.ndarray) -> None:
        half = len(held) // 2
        self.train = train
        self.evaluate = jax.jit(library_bytes.loss_fn)
        self.initial = jax.jit(library_bytes.Decoder().init)
        self.tests = [
            library_bytes.windows(part, np.random.default_rng(index), 128)
            for index, part in enumerate((held[:half], held[half:]))
        ]

    def start(self, seed: int) -> Any:
        """Return the params that training starts with."""
        ids = jnp.zeros((1, library_bytes.CONTEXT), jnp.int32)
        return self.initial(jax.random.key(seed), ids)

    def batches(self, seed: int, steps: int) -> np.ndarray:
        """Return all batches of a training."""
        return library_bytes.windows(self.train, np.random.default_rng((seed, 7)), steps, BATCH)

    def program(self, name: str) -> Callable[..., Any]:
        """Return what goes on with a training by a method, compiled once for all rates."""

        @jax.jit
        def go_on(carry: Any, batches: Any, rate: Any, scale: Any, steps: Any) -> Any:
            tx = optimizer(name, rate, scale, steps)

            def step(carry: Any, ids: jax.Array) -> Any:
                params, opt_state = carry
                grads = jax.grad(library_bytes.loss_fn)(params, ids)
                updates, opt_state = tx.update(grads, opt_state, params)
                return (optax.apply_updates(params, updates), opt_state), None

            return jax.lax.scan(step, carry, batches)[0]

        return go_on

    def run(
        self, name: str, program: Any, point: tuple[float, float], seed: int, steps: int, parts: int
    ) -> Any:
        """Return nats a byte on both halves of what is held out, and seconds of the processor.

        The steps are run in parts of one length, by the same compiled program.
        """
        params, batches = self.start(seed), self.batches(seed, steps)
        tx = optimizer(name, 1, 1, steps)
        carry = params, jax.jit(tx.init)(params)
        numbers = [jnp.float32(number) for number in (*point, steps)]
        start = time.process_time()
        for part in np.split(batches, parts):
            carry = jax.block_until_ready(program(carry, part, *numbers))
        seconds = time.process_time() - start
        return [float(self.evaluate(carry[0], ids)) for ids in self.tests], seconds

    def words(self, name: str) -> float:
        """Return the words of the optimizer's state for each parameter."""
        tx = optimizer(name, 1, 1, 10)
        return optperm.memory.state_report(tx, jax.eval_shape(self.start, 0)).words_per_param


def train(
    title: str,
    task: Task,
    methods: Sequence[str],
    seeds: int,
    steps: int,
    thirds: int,
    file: pathlib.Path | None,
    rates_of_adamw: Sequence[float] = RATES,
    scales_of_all: Sequence[float] | None = None,
) -> None:
    """Tune each method, train it from each seed, and print its rows and write them to a file."""
    rate = rates_of_adamw[0]
    for name in methods:
        scales = scales_of_all or METHODS[name][1]
        # The rate of what is no kernel is AdamW's best one, for all.
        rates = rates_of_adamw if name == "AdamW" else (rate,)
        tuned, program = {}, task.program(name)
        for point in [(rate, scale) for rate in rates for scale in scales]:
            (tuned[point], _), _ = task.run(name, program, point, 0, thirds * steps // 3, thirds)
            RESULTS.row(
                f"{title}: the grid, {thirds * steps // 3} steps, one seed",
                method=name,
                rate=f"{point[0]:g}",
                kernels=f"times {point[1]:g}",
                nats=f"{tuned[point]:.3f}",
            )
            print(
                f"{name:30} rate {point[0]:g} kernels {point[1]:<6g} {tuned[point]:.3f}", flush=True
            )
        # What is not finite is no number to choose.
        best = min(tuned, key=lambda point: tuned[point] if np.isfinite(tuned[point]) else np.inf)
        rate = best[0]
        runs = [task.run(name, program, best, seed, steps, 3) for seed in range(seeds)]
        losses = [test for (_, test), _ in runs]
        seconds = min(seconds for _, seconds in runs)
        RESULTS.row(
            f"{title}: {steps} steps, {seeds} seeds",
            method=name,
            rate=f"{best[0]:g}",
            kernels=f"times {best[1]:g}",
            nats=f"{np.mean(losses):.3f} ± {np.std(losses):.3f}",
            words_a_param=f"{task.words(name):.2f}",
            ms_a_step=f"{1e3 * seconds / steps:.0f}",
        )
        print(f"{name:30} {best} {np.mean(losses):.3f} {losses} {task.words(name):.2f}", flush=True)
        RESULTS.write(file)


def step(repetitions: int, count: int, m: int, n: int, rank: int, tokens: int) -> None:
    """Time updates of wide and tall matrices in turns, donated, by the processor's least time.

    Beside them are the two products that no update of low rank can do without, and the gradient of a
    network of these matrices for some tokens.
    """
    keys = jax.random.split(jax.random.key(0), 2)
    shapes = [(m, n), (n, m)] * (count // 2)
    weights = {f"w{i:02}": jnp.zeros(shape) for i, shape in enumerate(shapes)}
    grads = jax.tree.map(lambda w: jax.random.normal(keys[0], w.shape), weights)
    basis, x = jnp.ones((m, rank)), jax.random.normal(keys[1], (tokens, m))
    adam = optax.scale_by_adam()

    def loss(weights: Any) -> jax.Array:
        y, ws = x, list(weights.values())
        for up, down in zip(ws[::2], ws[1::2], strict=True):
            y = y + jax.nn.relu(y @ up) @ down
        return jnp.mean(y**2)

    def products(g: jax.Array) -> jax.Array:
        return basis @ (basis.T @ g) if g.shape[0] == m else (g @ basis) @ basis.T

    def refresh_next(state: Any, number: int) -> Any:
        turns = state[0].next_refresh
        due = {name: jnp.zeros_like(turns[name]) for name in list(turns)[:number]}
        return (state[0]._replace(next_refresh={**turns, **due}), *state[1:])

    # A function, its state, and the number of matrices that get a new basis in each step
    takes: dict[str, list[Any]] = {
        "two products": [jax.jit(lambda g, s, _: (jax.tree.map(products, g), s)), None, 0],
        "gradient": [jax.jit(lambda _, s, w: (jax.grad(loss)(w), s)), None, 0],
    }
    refreshed = {"": 0, ", a new basis": 1, f", {count} new bases": count}
    for name, direction in {
        "AdamW": adam,
        "low_rank, random": optperm.low_rank(adam, rank, projection="random"),
        "low_rank, svd": optperm.low_rank(adam, rank, projection="svd"),
        "low_rank, no residual": optperm.low_rank(adam, rank, residual=None),
        "optax.contrib.galore": optax.contrib.scale_by_galore(rank, 200),
        "apollo": optperm.apollo(adam, rank),
        "AdamW, 8 bits": optperm.quantize_state(adam, min_size=1),
        "AdamW, 4 bits": optperm.quantize_state(adam, bits=4, min_size=1),
    }.items():
        tx = optax.chain(
            direction, optax.add_decayed_weights(DECAY), optax.scale_by_learning_rate(1e-3)
        )
        take = jax.jit(tx.update, donate_argnums=1)
        is_refreshed = name in ("low_rank, random", "low_rank, svd")
        for suffix, number in refreshed.items() if is_refreshed else [("", 0)]:
            takes[name + suffix] = [take, tx.init(weights), number]
    least: dict[str, float] = {}
    for repetition in range(repetitions + 1):
        for name, each in takes.items():
            take, state, number = each
            start = time.process_time()
            updates, state = jax.block_until_ready(take(grads, state, weights))
            seconds = time.process_time() - start
            if repetition:  # the first one compiles, and makes all first bases
                least[name] = min(seconds, least.get(name, seconds))
            each[1] = refresh_next(state, number) if number else state
            del updates, state
    gradient = least.pop("gradient")
    for name, seconds in least.items():
        ratios = [(seconds + rest) / (least["AdamW"] + rest) for rest in (0, gradient)]
        RESULTS.row(
            f"A step of {count} matrices {m} x {n} and {n} x {m}, r = {rank}, over AdamW's",
            update=name,
            ms=f"{1e3 * seconds:.0f}",
            ratio=f"{ratios[0]:.2f}",
            **{f"ratio_with_a_gradient_of_{tokens}_tokens": f"{ratios[1]:.2f}"},
        )
        print(f"step: {name:24} {1e3 * seconds:7.1f} ms, ratios {ratios[0]:.2f} {ratios[1]:.2f}")


def decoder_shapes(layers: int, width: int, vocabulary: int) -> Any:
    """Return the params of a decoder whose layers are stacked."""
    sizes = {"qkv": 3, "out": 1, "up": 4}
    stacks = {name: (layers, width, factor * width) for name, factor in sizes.items()}
    shapes = {"embed": (vocabulary, width), **stacks, "down": (layers, 4 * width, width)}
    return {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}


def decoder_loss(params: Any, ids: jax.Array, heads: int = 12) -> jax.Array:
    """Return the loss of that decoder, each layer of which is computed again for its gradient."""
    norm = functools.partial(jax.nn.standardize, axis=-1)

    @jax.checkpoint
    def layer(x: jax.Array, w: Any) -> Any:
        split = (*x.shape[:2], 3, heads, x.shape[-1] // heads)
        qkv = jnp.moveaxis((norm(x) @ w["qkv"]).reshape(split), 2, 0)
        x = x + jax.nn.dot_product_attention(*qkv, is_causal=True).reshape(x.shape) @ w["out"]
        return x + jax.nn.gelu(norm(x) @ w["up"]) @ w["down"], None

    layers = {name: leaf for name, leaf in params.items() if name != "embed"}
    x, _ = jax.lax.scan(layer, params["embed"][ids[:, :-1]], layers)
    logits = norm(x) @ params["embed"].T
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, ids[:, 1:]))


def memory(layers: int = 12, width: int = 768, vocabulary: int = 20_000) -> None:
    """Compile a training step of a decoder ahead of time, and print what it holds."""
    shapes, numbers = decoder_shapes(layers, width, vocabulary), {"embed": None}
    matrix = optax.contrib.GaLoreDimensionNumbers(-2, -1)
    numbers |= {name: matrix for name in shapes if name != "embed"}
    adam, ids = optax.scale_by_adam(), jax.ShapeDtypeStruct((1, 129), jnp.int32)
    size = sum(leaf.size for leaf in shapes.values())
    for name, direction in {
        "AdamW": adam,
        "low_rank, random": optperm.low_rank(adam, 1 / 4, dimension_numbers=numbers),
        "low_rank, svd": optperm.low_rank(adam, 1 / 4, projection="svd", dimension_numbers=numbers),
        "apollo": optperm.apollo(adam, 1 / 4, dimension_numbers=numbers),
        "AdamW, 8 bits": optperm.quantize_state(adam),
        "AdamW, 4 bits": optperm.quantize_state(adam, bits=4),
        "low rank, 8 bits": optperm.quantize_state(
            optperm.low_rank(adam, 1 / 4, dimension_numbers=numbers)
        ),
    }.items():
        tx = optax.chain(
            direction, optax.add_decayed_weights(DECAY), optax.scale_by_learning_rate(1e-3)
        )

        def take(params: Any, opt_state: Any, ids: jax.Array, tx: Any = tx) -> Any:
            grads = jax.grad(decoder_loss)(params, ids, max(width // 64, 1))
            updates, opt_state = tx.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state

        state = jax.eval_shape(tx.init, shapes)
        program = jax.jit(take, donate_argnums=(0, 1)).lower(shapes, state, ids).compile()
        held = program.memory_analysis()
        of_state = optperm.memory.state_report(tx, shapes).words_per_param
        arguments, temporary = held.argument_size_in_bytes, held.temp_size_in_bytes
        RESULTS.row(
            f"A compiled training step of a decoder of {size / 1e6:.0f} million params, float32",
            method=name,
            words_a_param=f"{of_state:.2f}",
            arguments_MB=f"{arguments / 1e6:.0f}",
            temporary_MB=f"{temporary / 1e6:.0f}",
            both_MB=f"{(arguments + temporary) / 1e6:.0f}",
        )
        print(
            f"memory: {name:20} {of_state:.2f} words, {arguments / 1e6:.0f} + {temporary / 1e6:.0f} MB"
        )


def main(argv: Sequence[str] | None = None) -> None:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=("train", "step", "memory"))
    parser.add_argument("--data", type=pathlib.Path, help="a text, in the place of the library")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--scales", type=float, nargs="+", help="of kernels, in place of a grid's")
    parser.add_argument(
        "--rates", type=float, nargs="+", default=list(RATES), help="of AdamW's grid"
    )
    parser.add_argument("--thirds", type=int, default=1, help="of the steps, for the grid")
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument("--smallest", action="store_true", help="step and memory, in seconds")
    results.add_argument(parser)
    arguments = parser.parse_args(argv)
    library_bytes.WIDTH, library_bytes.CONTEXT = arguments.width, arguments.context
    data = library_bytes.load(arguments.data)
    title = f"Bytes of {arguments.data.stem}" if arguments.data else "Bytes of Python's library"
    is_small = arguments.smallest
    parts = {
        "train": lambda: train(
            title,
            Task(*data),
            arguments.methods,
            arguments.seeds,
            arguments.steps,
            arguments.thirds,
            arguments.json,
            arguments.rates,
            arguments.scales,
        ),
        "step": lambda: (
            step(2, 2, 16, 32, 4, 8)
            if is_small
            else step(arguments.repetitions, 24, 512, 2048, 128, 512)
        ),
        "memory": lambda: memory(2, 64, 100) if is_small else memory(),
    }
    for name, measure in parts.items():
        if arguments.only in (None, name):
            measure()
    RESULTS.write(arguments.json)


if __name__ == "__main__":
    main()
