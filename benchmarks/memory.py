"""Small optimizer states compared with AdamW and Optax's GaLore: loss, memory and time.

The script prints:

- train: a small decoder learns the bytes of Python's standard library, or of a text of yours. The table
  has nats per byte on held-out bytes and words of optimizer state for each parameter. Embeddings, norms
  and biases train with Adam at one rate in all rows, and the kernels at this rate times a scale. The
  scale, and the rate of AdamW too, are tuned on half of the held-out bytes, with one seed and a third of
  the steps; the seeds are measured on the other half. Another table has the differences of small states
  from the same method in float32, seed by seed, with their standard error;
- images: a convolutional network learns the digits of scikit-learn, or MNIST, with AdamW in 32, 8 and 4
  bits;
- step: the processor time of a step over the time of a step of AdamW, for the update alone and with a
  gradient. Steps have no new basis, one, or one for each matrix;
- memory: the memory of a compiled training step of a decoder of 100 million params, ahead of time, on
  this machine, on a TPU v5e or on an H100 (which need what `accelerators.py` names).

The runs of `train` are kept in a folder, if there is one, and a later command takes them from there. All
seeds of a method train at once, in one program. The run of 3,000 steps that shows whether second moments
stand still has `--steps 3000 --thirds 0`, with the rates that are best after 600 steps.

    python benchmarks/memory.py [--only train|images|step|memory] [--text FILE] [--data FILE]
        [--methods NAME ...] [--seeds 5] [--steps 600] [--thirds 1] [--rates ...] [--scales ...]
        [--width 96] [--context 64] [--into FOLDER] [--device cpu|tpu|gpu] [--repetitions 20]
        [--json FILE]
"""

import argparse
import contextlib
import functools
import json
import pathlib
import re
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import accelerator_programs
import images
import jax
import jax.numpy as jnp
import library_bytes
import numpy as np
import optax
import optax.contrib
import results
from accelerator_programs import DEVICES

import optperm
from optperm.memory import _blocks, _quantize_state

Tx = optax.GradientTransformation
RESULTS = results.Results()
BATCH, DECAY, EVERY = 8, 0.01, 100
RATES = (6e-3, 1.2e-2, 2.4e-2)
LOW, SCALES = (0.125, 0.25, 0.5, 1.0, 2.0), (0.015625, 0.03125, 0.0625, 0.125, 0.25, 0.5)


def low_rank(**options: Any) -> Tx:
    """Return Adam in subspaces of a quarter of each matrix."""
    return optperm.low_rank(optax.scale_by_adam(), 1 / 4, every=EVERY, **options)


# The direction that each makes from a kernel's gradient, and the scales of its grid, for a width of 96.
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


@contextlib.contextmanager
def nearest_squares() -> Iterator[None]:
    """Let squares be rounded to the nearest code in what is traced."""
    encode = _quantize_state._encode

    def round_to_nearest(x: Any, form: Any, *seeds: Any) -> Any:
        return encode(x, _blocks.Largest if form is _blocks.Root else form, *seeds)

    with mock.patch.object(_quantize_state, "_encode", round_to_nearest):
        yield


def quantize_to_nearest(tx: Tx) -> Tx:
    """Return an optimizer with moments in 8 bits, whose second moments are rounded to the nearest."""
    quantized = quantize(tx)

    def update(*arguments: Any, **extra_args: Any) -> Any:
        with nearest_squares():
            return quantized.update(*arguments, **extra_args)

    return optax.GradientTransformationExtraArgs(quantized.init, update)


# The same in small states: what is wrapped around the whole optimizer.
WRAPPERS: dict[str, Callable[[Tx], Tx]] = {}
BASES: dict[str, str] = {}
for name, base, wrapper in (
    ("AdamW, 8 bits", "AdamW", quantize),
    ("AdamW, 8 bits, nearest", "AdamW", quantize_to_nearest),
    ("AdamW, 4 bits", "AdamW", functools.partial(quantize, bits=4)),
    ("low rank, 8 bits", "random, carried, residual", quantize),
    ("low rank, 4 bits", "random, carried, residual", functools.partial(quantize, bits=4)),
    ("apollo, 8 bits", "apollo", quantize),
):
    METHODS[name], WRAPPERS[name], BASES[name] = METHODS[base], wrapper, base
METHODS["AdamW, bfloat16"], BASES["AdamW, bfloat16"] = (lambda _: bfloat16_adam(), SCALES), "AdamW"


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


Lane = tuple[float, float, int]  # a rate, the scale of kernels, and a seed


class Runs:
    """The losses of trainings, kept in a folder with a file for each method."""

    def __init__(self, folder: pathlib.Path | None, title: str, name: str) -> None:
        slug = re.sub("[^a-z0-9]+", "_", f"{title} {name}".lower()).strip("_")
        self.path = folder and folder / f"{slug}.json"
        is_there = self.path is not None and self.path.exists()
        self.found: dict[str, Any] = json.loads(self.path.read_text()) if is_there else {}

    def get(
        self, lanes: Sequence[Lane], steps: int, at_once: int, run: Callable[[Any], Any]
    ) -> list[Any]:
        """Return the losses of runs; run the missing ones, several at once."""
        keys = {lane: f"{steps} {lane[0]:g} {lane[1]:g} {lane[2]}" for lane in lanes}
        rest = [lane for lane in lanes if keys[lane] not in self.found]
        for start in range(0, len(rest), at_once):
            some = rest[start : start + at_once]
            # As many as ever, so that one program serves all
            full = [*some, *[some[-1]] * (at_once - len(some))]
            self.found |= {keys[lane]: loss for lane, loss in zip(some, run(full), strict=False)}
            if self.path:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self.path.write_text(json.dumps(self.found, indent=1))
        return [self.found[keys[lane]] for lane in lanes]


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
        """Return the function that continues runs of a method, compiled once for all rates."""

        def go_on(carry: Any, batches: Any, rate: Any, scale: Any, steps: Any) -> Any:
            tx = optimizer(name, rate, scale, steps)

            def step(carry: Any, ids: jax.Array) -> Any:
                params, opt_state = carry
                grads = jax.grad(library_bytes.loss_fn)(params, ids)
                updates, opt_state = tx.update(grads, opt_state, params)
                return (optax.apply_updates(params, updates), opt_state), None

            return jax.lax.scan(step, carry, batches)[0]

        return jax.jit(jax.vmap(go_on, in_axes=(0, 0, 0, 0, None)))

    def run(self, name: str, program: Any, lanes: Sequence[Lane], steps: int, parts: int) -> Any:
        """Return nats per byte on both halves of what is held out, of trainings that run at once.

        The steps are run in parts of one length, by the same compiled program.
        """
        params = [self.start(seed) for _, _, seed in lanes]
        batches = np.stack([self.batches(seed, steps) for _, _, seed in lanes])
        tx = optimizer(name, 1, 1, steps)
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *params)
        carry = stacked, jax.jit(jax.vmap(tx.init))(stacked)
        rates, scales = (jnp.float32([lane[i] for lane in lanes]) for i in (0, 1))
        for part in np.split(batches, parts, axis=1):
            carry = program(carry, part, rates, scales, jnp.float32(steps))
        ends = [jax.tree.map(lambda leaf: leaf[i], carry[0]) for i in range(len(lanes))]  # noqa: B023
        return [[float(self.evaluate(end, ids)) for ids in self.tests] for end in ends]

    def words(self, name: str) -> float:
        """Return the words of the optimizer's state for each parameter."""
        tx = optimizer(name, 1, 1, 10)
        return optperm.memory.state_report(tx, jax.eval_shape(self.start, 0)).words_per_param


def train(title: str, task: Task, methods: Sequence[str], options: argparse.Namespace) -> None:
    """Tune each method, train it from each seed, and print its rows and write them to a file."""
    rate, steps, seeds, of = options.rates[0], options.steps, options.seeds, {}
    for name in methods:
        runs, program = Runs(options.into, title, name), task.program(name)
        # The rate of what is no kernel is AdamW's best one, for all.
        rates = options.rates if name == "AdamW" else (rate,)
        points = [(r, scale) for r in rates for scale in options.scales or METHODS[name][1]]
        best = points[0]
        if options.thirds:
            fewer = options.thirds * steps // 3
            tried = functools.partial(task.run, name, program, steps=fewer, parts=options.thirds)
            found = runs.get([(*point, 0) for point in points], fewer, seeds, tried)
            tuned = [first for first, _ in found]
            for point, nats in zip(points, tuned, strict=True):
                RESULTS.row(
                    f"{title}: the grid, {fewer} steps, one seed",
                    method=name,
                    rate=f"{point[0]:g}",
                    kernels=f"times {point[1]:g}",
                    nats=f"{nats:.3f}",
                )
                print(f"{name:30} rate {point[0]:g} kernels {point[1]:<6g} {nats:.3f}", flush=True)
            # What is not finite is no number to choose.
            best = points[int(np.argmin(np.where(np.isfinite(tuned), tuned, np.inf)))]
        rate = best[0]
        measured = functools.partial(task.run, name, program, steps=steps, parts=3)
        losses = runs.get([(*best, seed) for seed in range(seeds)], steps, seeds, measured)
        of[name] = np.array([second for _, second in losses])
        RESULTS.row(
            f"{title}: {steps} steps, {seeds} seeds",
            method=name,
            rate=f"{best[0]:g}",
            kernels=f"times {best[1]:g}",
            nats=f"{np.mean(of[name]):.3f} ± {np.std(of[name]):.3f}",
            words_per_param=f"{task.words(name):.2f}",
        )
        print(
            f"{name:30} {best} {np.mean(of[name]):.3f} {of[name]} {task.words(name):.2f}",
            flush=True,
        )
        if (base := BASES.get(name)) in of and seeds > 1:
            apart = of[name] - of[base]
            error = np.std(apart, ddof=1) / seeds**0.5
            RESULTS.row(
                f"{title}: {steps} steps, differences of {seeds} seeds",
                method=name,
                minus=base,
                nats=f"{np.mean(apart):+.4f}",
                standard_error=f"{error:.4f}",
            )
            print(f"{name:30} minus {base}: {np.mean(apart):+.4f}, error {error:.4f}", flush=True)
        RESULTS.write(options.json)


IN_IMAGES = ("AdamW", "AdamW, 8 bits", "AdamW, 8 bits, nearest", "AdamW, 4 bits")


def learn_images(options: argparse.Namespace) -> None:
    """Train a convolutional network with AdamW in 32, 8 and 4 bits, each at its best rate."""
    title, data, test = images.load(options.data)
    side = data[0].shape[1]
    wanted = {
        name: WRAPPERS.get(name, lambda tx: tx) for name in options.methods if name in IN_IMAGES
    }
    for name, wrap in wanted.items():

        @functools.partial(jax.jit, static_argnums=1)
        def fit(
            rate: Any, steps: int, params: Any, part: Any, indices: Any, wrap: Any = wrap
        ) -> Any:
            warm = optax.warmup_cosine_decay_schedule(0.0, 1.0, min(20, steps // 2), steps, 0.05)
            tx = wrap(optax.chain(optax.scale_by_adam(), optax.scale_by_schedule(warm)))
            tx = optax.chain(tx, optax.scale(-rate))
            return images.train(tx, params, tx.init(params), indices, part)[0]

        def trained(rate: Any, seed: int, steps: int, part: Any, fit: Any = fit) -> Any:
            params = images.initial(seed, (side, side, 1), hidden=None, channels=(32, 64))
            indices = images.batches(len(part[0]), 100, steps, seed)
            return fit(rate, steps, params, part, indices)

        best, tried = images.tune((3e-4, 1e-3, 3e-3, 1e-2), trained, options.steps, data)
        ends = [trained(best, seed, options.steps, data) for seed in range(options.seeds)]
        RESULTS.row(
            f"A convolutional network on {title}: {options.steps} steps, {options.seeds} seeds",
            method=name,
            grid=images.shown(tried),
            rate=f"{best:g}",
            accuracy=(scores := images.spread([images.accuracy(end, test) for end in ends])),
        )
        print(f"{name:30} {scores}, rate {best:g} of {images.shown(tried)}", flush=True)
        RESULTS.write(options.json)


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
    """Return the loss of this decoder; its gradient computes each layer again."""
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


def memory(
    device: str = "cpu", layers: int = 12, width: int = 768, vocabulary: int = 20_000
) -> None:
    """Compile a training step of a decoder ahead of time, and print what it holds."""
    where, mesh = DEVICES[device][0], DEVICES[device][1]()
    shapes, numbers = decoder_shapes(layers, width, vocabulary), {"embed": None}
    matrix = optax.contrib.GaLoreDimensionNumbers(-2, -1)
    numbers |= {name: matrix for name in shapes if name != "embed"}
    adam, ids = optax.scale_by_adam(), jax.ShapeDtypeStruct((1, 129), jnp.int32)
    size = sum(leaf.size for leaf in shapes.values())
    for name, direction in {
        "AdamW": adam,
        "low_rank, random": optperm.low_rank(adam, 1 / 4, axes=numbers),
        "low_rank, svd": optperm.low_rank(adam, 1 / 4, projection="svd", axes=numbers),
        "apollo": optperm.apollo(adam, 1 / 4, axes=numbers),
        "AdamW, 8 bits": optperm.quantize_state(adam),
        "AdamW, 4 bits": optperm.quantize_state(adam, bits=4),
        "low rank, 8 bits": optperm.quantize_state(optperm.low_rank(adam, 1 / 4, axes=numbers)),
    }.items():
        tx = optax.chain(
            direction, optax.add_decayed_weights(DECAY), optax.scale_by_learning_rate(1e-3)
        )

        def take(params: Any, opt_state: Any, ids: jax.Array, tx: Any = tx) -> Any:
            grads = jax.grad(decoder_loss)(params, ids, max(width // 64, 1))
            updates, opt_state = tx.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state

        state = jax.eval_shape(tx.init, shapes)
        given = shapes, state, ids
        given = accelerator_programs.shapes(given, mesh) if mesh else given
        program = jax.jit(take, donate_argnums=(0, 1)).lower(*given).compile()
        held = program.memory_analysis()
        of_state = optperm.memory.state_report(tx, shapes).words_per_param
        arguments, temporary = held.argument_size_in_bytes, held.temp_size_in_bytes
        RESULTS.row(
            f"A compiled training step of a decoder of {size / 1e6:.0f} million params, float32{where}",
            method=name,
            words_per_param=f"{of_state:.2f}",
            arguments_MB=f"{arguments / 1e6:.0f}",
            temporary_MB=f"{temporary / 1e6:.0f}",
            both_MB=f"{(arguments + temporary) / 1e6:.0f}",
            temporary_words_per_param=f"{temporary / 4 / size:.2f}",
        )
        print(
            f"memory: {name:20} {of_state:.2f} words, {arguments / 1e6:.0f} + {temporary / 1e6:.0f} MB, "
            f"{temporary / 4 / size:.2f} temporary words per param",
            flush=True,
        )


def main(argv: Sequence[str] | None = None) -> None:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=("train", "images", "step", "memory"))
    parser.add_argument("--text", type=pathlib.Path, help="a text, in the place of the library")
    parser.add_argument("--data", type=pathlib.Path, help="an npz of images, for `images`")
    parser.add_argument("--into", type=pathlib.Path, help="a folder that keeps the runs of `train`")
    parser.add_argument("--device", choices=DEVICES, default="cpu", help="of `memory`")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--scales", type=float, nargs="+", help="of kernels, in place of a grid's")
    parser.add_argument(
        "--rates", type=float, nargs="+", default=list(RATES), help="of AdamW's grid"
    )
    parser.add_argument(
        "--thirds", type=int, default=1, help="of the steps, for the grid; 0: no grid"
    )
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument("--smallest", action="store_true", help="step and memory, in seconds")
    results.add_argument(parser)
    arguments = parser.parse_args(argv)
    library_bytes.WIDTH, library_bytes.CONTEXT = arguments.width, arguments.context
    title = f"Bytes of {arguments.text.stem}" if arguments.text else "Bytes of Python's library"
    is_small = arguments.smallest
    parts = {
        "train": lambda: train(
            title, Task(*library_bytes.load(arguments.text)), arguments.methods, arguments
        ),
        "images": lambda: learn_images(arguments),
        "step": lambda: (
            step(2, 2, 16, 32, 4, 8)
            if is_small
            else step(arguments.repetitions, 24, 512, 2048, 128, 512)
        ),
        "memory": lambda: memory(arguments.device, *((2, 64, 100) if is_small else ())),
    }
    for name, measure in parts.items():
        if arguments.only in (None, name):
            measure()
    RESULTS.write(arguments.json)


if __name__ == "__main__":
    main()
