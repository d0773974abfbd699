"""Optimizers with small states on a decoder of 1 to 100 million params: loss, bytes and time per step.

A decoder with scanned layers learns the bytes of Python source. `--make` writes the text: the Python
files of this environment's packages, in an order that depends only on their names, up to 40 MB. The last
tenth is held out: its first half chooses rates and decays, and its second half is reported.

AdamW is tuned over all rates and decays with seed 0, and Muon and methods with small moments of their
own over all rates with AdamW's decay. If the best rate is at an end of the grid, further rates are
tried. A method that only stores another method's numbers in fewer bits has the rate and decay of this
method. Then each method trains from all seeds; seeds share initial params and batches among methods.
With `--tuned`, the rates come from earlier files: for a file of one size, its best rate; for files of 1
and 10 million params, the ratio of their best rates, once more.

"bytes per param" is what the compiled step of a training holds: its arguments (params, state and a
batch) and its temporary memory (gradients and activations), over the number of params. Last, all methods
take turns with steps, whose time is that of the processor on a CPU, and of the wall on a GPU.

    python benchmarks/scale.py --make FILE
    python benchmarks/scale.py [--text FILE] [--size 1|10|30|100] [--methods NAME ...] [--seeds 3]
        [--steps 500] [--batch 8] [--context 64] [--rates ...] [--decays ...] [--tuned FILE ...]
        [--json FILE] [--resume]
    python benchmarks/scale.py --memory [--size 100] [--device cpu|gpu|tpu] [--methods NAME ...]

For 100 million params on one GPU, in less than twelve minutes (`pip install flashoptim-jax`, for its
row):

    python benchmarks/scale.py --text FILE --size 100 --steps 300 --batch 64 --context 512 --seeds 1
        --tuned benchmarks/results/scale_1.json benchmarks/results/scale_10.json
        --methods "AdamW, float32 copy" "AdamW, widened, 8 bits" "flashoptim-jax"
        "Muon" "Muon, widened, 8 bits" --json benchmarks/results/scale_100.json
"""

import argparse
import functools
import hashlib
import importlib.util
import json
import pathlib
import sysconfig
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import accelerator_programs
import jax
import jax.numpy as jnp
import library_bytes
import numpy as np
import optax
import optax.contrib
import results
import timing
import widen
from accelerator_programs import DEVICES
from flax import nnx

import optperm

Tx = optax.GradientTransformation
RESULTS = results.Results()
# Layers, width and heads, by millions of params; 0 is for a trial
SIZES = {0: (1, 16, 2), 1: (5, 128, 4), 10: (8, 320, 5), 30: (10, 512, 8), 100: (14, 768, 12)}
TESTS, EVERY = 256, 100


class Layer(nnx.Module):
    """Attention and an MLP."""

    def __init__(self, width: int, heads: int, dtype: Any, rngs: nnx.Rngs) -> None:
        linear = functools.partial(nnx.Linear, use_bias=False, dtype=dtype, rngs=rngs)
        self.heads = heads
        self.norms = nnx.List([nnx.RMSNorm(width, dtype=dtype, rngs=rngs) for _ in range(2)])
        self.qkv, self.out = linear(width, 3 * width), linear(width, width)
        self.up, self.down = linear(width, 4 * width), linear(4 * width, width)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Map activations (batch, time, width) to activations."""
        heads = self.qkv(self.norms[0](x)).reshape(*x.shape[:2], 3, self.heads, -1)
        seen = jax.nn.dot_product_attention(*jnp.moveaxis(heads, 2, 0), is_causal=True)
        x = x + self.out(seen.reshape(x.shape))
        return x + self.down(nnx.gelu(self.up(self.norms[1](x))))


class Decoder(nnx.Module):
    """A transformer that predicts the next byte, whose layers are stacked and scanned."""

    def __init__(self, size: int, dtype: Any, rngs: nnx.Rngs) -> None:
        layers, width, heads = SIZES[size]
        embed = functools.partial(nnx.Embed, features=width, dtype=dtype, rngs=rngs)
        normal = nnx.initializers.normal(0.02)
        self.embed = embed(256, embedding_init=normal)
        self.place = embed(library_bytes.CONTEXT, embedding_init=normal)
        make = lambda rngs: Layer(width, heads, dtype, rngs)  # noqa: E731
        self.layers = nnx.vmap(make)(rngs.split(layers))
        self.norm = nnx.RMSNorm(width, dtype=dtype, rngs=rngs)
        self.head = nnx.Linear(width, 256, use_bias=False, dtype=dtype, rngs=rngs)

    def __call__(self, ids: jax.Array, *, remat: bool) -> jax.Array:
        """Map bytes (batch, time) to logits (batch, time, 256)."""

        def forward(x: jax.Array, layer: Layer) -> jax.Array:
            return layer(x)

        forward = nnx.remat(forward) if remat else forward
        scan = nnx.scan(forward, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        x = self.embed(ids) + self.place(jnp.arange(ids.shape[1]))
        return self.head(self.norm(scan(x, self.layers)))


def adamw(params: Any, rate: Any, decay: float) -> Tx:
    """Return AdamW."""
    return optax.adamw(rate, weight_decay=decay)


def muon(params: Any, rate: Any, decay: float) -> Tx:
    """Return Muon for the layers' kernels, and AdamW for all else, with steps of one size."""
    return optax.contrib.muon(
        rate,
        weight_decay=decay,
        adam_weight_decay=decay,
        consistent_rms=0.2,
        muon_weight_dimension_numbers=optperm.memory.muon_axes(params, head=None),
    )


def low_rank(params: Any, rate: Any, decay: float) -> Tx:
    """Return AdamW in subspaces of a quarter of each kernel."""
    options = {"rank": 1 / 4, "every": EVERY, "weight_decay": decay}
    return optperm.memory.low_rank_adamw(rate, **options)


def apollo(params: Any, rate: Any, decay: float) -> Tx:
    """Return APOLLO with projections to a quarter of each kernel."""
    return optperm.memory.apollo_adamw(rate, rank=1 / 4, every=EVERY, weight_decay=decay)


def scale(params: Any, rate: Any, decay: float) -> Tx:
    """Return SCALE (arXiv 2506.16659): normalized columns, and momentum in the last layer alone."""

    def normalize(g: jax.Array) -> jax.Array:
        # Each output's gradient has a root mean square of 1.
        return g / jnp.maximum(jnp.sqrt(jnp.mean(g**2, axis=-2, keepdims=True)), 1e-8)

    columns = optax.stateless_with_tree_map(lambda g, _: normalize(g))
    last = optax.chain(optax.ema(0.9, debias=False), columns)
    parts = {"last": last, "matrix": columns, "vector": optax.scale_by_adam()}

    def label(path: Any, axes: optperm.LeafAxes) -> str:
        if axes.kind == "scale":
            return "vector"
        return "last" if "head" in jax.tree_util.keystr(path) else "matrix"

    axes = optperm.leaf_axes(params)
    labels = jax.tree_util.tree_map_with_path(label, axes)
    return optax.chain(
        optax.partition(parts, labels),
        optax.add_decayed_weights(decay),
        optax.scale_by_learning_rate(rate),
    )


def galore(params: Any, rate: Any, decay: float) -> Tx:
    """Return Optax's GaLore of the layers' kernels, as its paper has it, for each layer by itself."""
    axes, shapes = jax.tree.leaves(optperm.leaf_axes(params)), jax.tree.leaves(params)
    rank = max(min(leaf.shape[-1] for leaf in shapes) // 4, 1)
    is_stack = [axis.kind == "kernel" and bool(axis.batch_axis) for axis in axes]
    # GaLore projects a matrix, and leaves what has None at full rank.
    matrix = optax.contrib.GaLoreDimensionNumbers()
    numbers = [
        [matrix] * leaf.shape[0] if stacked else [None]
        for leaf, stacked in zip(shapes, is_stack, strict=True)
    ]

    def unstack(tree: Any) -> list[list[jax.Array]]:
        leaves = zip(jax.tree.leaves(tree), is_stack, strict=True)
        return [[*leaf] if stacked else [leaf] for leaf, stacked in leaves]

    inner = optax.contrib.galore(
        rate, rank, EVERY, weight_decay=decay, weight_dimension_numbers=numbers
    )

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        treedef = jax.tree.structure(updates)
        parts, state = inner.update(unstack(updates), state, unstack(params))
        pairs = zip(parts, is_stack, strict=True)
        whole = [jnp.stack(part) if stacked else part[0] for part, stacked in pairs]
        return jax.tree.unflatten(treedef, whole), state

    return optax.GradientTransformation(lambda params: inner.init(unstack(params)), update)


def in_8_bits(tx: Tx) -> Tx:
    """Store moments in 8 bits."""
    return optperm.quantize_state(tx, min_size=1024)


def widened(tx: Tx) -> Tx:
    """Store moments in 8 bits, and 8 bits more for each parameter."""
    return optperm.widen_params(in_8_bits(tx))


class Method(NamedTuple):
    """A way to train.

    Attributes:
      dtype: The dtype of the params.
      make: A function of the shapes of the params, a rate and a decay that returns an optimizer.
      wrap: What is wrapped around it.
      base: The method whose rate and decay it has, and to which it is compared.
    """

    dtype: Any
    make: Callable[[Any, Any, float], Tx]
    wrap: Callable[[Tx], Tx] = lambda tx: tx
    base: str = ""


FLASH = "flashoptim-jax"
METHODS = {
    "AdamW": Method(jnp.float32, adamw),
    "AdamW, widened, 8 bits": Method(jnp.bfloat16, adamw, widened, "AdamW"),
    "Muon": Method(jnp.float32, muon),
    "Muon, 8 bits": Method(jnp.float32, muon, in_8_bits, "Muon"),
    "AdamW, 8 bits": Method(jnp.float32, adamw, in_8_bits, "AdamW"),
    "AdamW, float32 copy": Method(jnp.bfloat16, adamw, widen.with_copy, "AdamW"),
    FLASH: Method(jnp.bfloat16, adamw, base="AdamW"),
    "SCALE": Method(jnp.float32, scale),
    "Muon, widened, 8 bits": Method(jnp.bfloat16, muon, widened, "Muon"),
    "low_rank": Method(jnp.float32, low_rank),
    "apollo": Method(jnp.float32, apollo),
    "optax.contrib.galore": Method(jnp.float32, galore),
}


Step = Callable[..., Any]


def schedule(rate: Any, steps: int) -> optax.Schedule:
    """Return a warm-up of a twentieth of the steps, and a cosine down to a fiftieth."""
    shape = optax.warmup_cosine_decay_schedule(0.0, 1.0, max(steps // 20, 1), steps, 1 / 50)
    return lambda count: rate * shape(count)


def optimizer(name: str, params: Any, rate: Any, decay: float, device: str) -> tuple[Any, Step]:
    """Return the functions that make a state, and params and state from gradients."""
    if name == FLASH:
        import flashoptim_jax  # noqa: PLC0415

        # Its kernels are of GPUs.
        flash = flashoptim_jax.flash_adamw(rate, weight_decay=decay, fused=device == "gpu")
        return flash.init, flash.step
    method = METHODS[name]
    tx = method.wrap(method.make(params, rate, decay))

    def step(params: Any, state: Any, grads: Any) -> Any:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return tx.init, step


class Task:
    """A decoder of one size, trained for a number of steps."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.size, self.steps, self.batch = options.size, options.steps, options.batch
        self.device = options.device or jax.default_backend()
        self.is_cpu = self.device == "cpu"
        self.compute = jnp.float32 if self.is_cpu else jnp.bfloat16
        model = nnx.eval_shape(lambda: Decoder(self.size, self.compute, nnx.Rngs(0)))
        self.graph, self.shapes = nnx.split(model)
        self.count = sum(leaf.size for leaf in jax.tree.leaves(self.shapes))
        self.initial = jax.jit(
            lambda seed: nnx.state(Decoder(self.size, self.compute, nnx.Rngs(jax.random.key(seed))))
        )
        self.program = functools.cache(self._program)
        text = f"{self.steps} steps of {self.batch} x {library_bytes.CONTEXT} bytes"
        self.title = f"{self.count / 1e6:.1f} million params, {text}"

    def loss(self, params: Any, ids: jax.Array) -> jax.Array:
        """Return the mean cross entropy of the next byte, in nats."""
        model = nnx.merge(self.graph, params)
        logits = jnp.float32(model(ids[:, :-1], remat=not self.is_cpu))
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, ids[:, 1:]))

    def _program(self, name: str, decay: float) -> tuple[Any, Any]:
        """Return the functions that make a state and take a step, compiled, for all rates."""
        shapes = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, METHODS[name].dtype), self.shapes
        )
        make = lambda rate: optimizer(  # noqa: E731
            name, shapes, schedule(rate, self.steps), decay, self.device
        )

        def step(params: Any, state: Any, ids: jax.Array, rate: jax.Array) -> Any:
            return make(rate)[1](params, state, jax.grad(self.loss)(params, ids))

        init = make(0.0)[0]
        ids = jax.ShapeDtypeStruct((self.batch, library_bytes.CONTEXT + 1), jnp.int32)
        rate = jax.ShapeDtypeStruct((), jnp.float32)
        given = shapes, jax.eval_shape(init, shapes), ids, rate
        mesh = DEVICES[self.device][1]() if self.device != jax.default_backend() else None
        given = accelerator_programs.shapes(given, mesh) if mesh else given
        return jax.jit(init), jax.jit(step, donate_argnums=(0, 1)).lower(*given).compile()

    def bytes_per_param(self, name: str, decay: float) -> tuple[float, float]:
        """Return the bytes of a compiled step, and those of its arguments, for each parameter."""
        held = self.program(name, decay)[1].memory_analysis()
        arguments = held.argument_size_in_bytes
        return (arguments + held.temp_size_in_bytes) / self.count, arguments / self.count

    def start(self, name: str, decay: float, seed: int) -> tuple[Any, Any]:
        """Return the params that training starts with, and the state."""
        params = optax.tree.cast(self.initial(seed), METHODS[name].dtype)
        return params, jax.jit(self.program(name, decay)[0])(params)

    def run(
        self, data: tuple[np.ndarray, np.ndarray], name: str, rate: float, decay: float, seed: int
    ) -> list[float]:
        """Return nats per byte on both halves of what is held out."""
        train, held = data
        params, state = self.start(name, decay, seed)
        for index in range(self.steps):
            ids = library_bytes.windows(train, np.random.default_rng((seed, index)), self.batch)
            params, state = self.program(name, decay)[1](params, state, ids, jnp.float32(rate))
        nats = []
        for part, half in enumerate(np.split(held[: len(held) // 2 * 2], 2)):
            rng = np.random.default_rng(part)
            losses = [
                float(self.evaluate(params, library_bytes.windows(half, rng, self.batch)))
                for _ in range(max(TESTS // self.batch, 1))
            ]
            nats.append(float(np.mean(losses)))
        return nats

    def time(self, decays: dict[str, float], repetitions: int) -> dict[str, float]:
        """Return the median seconds of a step of each method, which take turns."""
        others = jnp.zeros((self.batch, library_bytes.CONTEXT + 1), jnp.int32), jnp.float32(0.0)
        calls = {
            name: timing.stepping(self.program(name, decay)[1], self.start(name, decay, 0), *others)
            for name, decay in decays.items()
        }
        clock = time.process_time if self.is_cpu else time.perf_counter
        times = timing.take_turns(calls, repetitions, clock)
        return {name: float(np.median(each)) for name, each in times.items()}

    @functools.cached_property
    def evaluate(self) -> Any:
        """The loss, compiled."""
        return jax.jit(self.loss)


class Runs:
    """All trainings so far, as rows of a table, from which the others are made."""

    def __init__(self, task: Task, data: Any, path: pathlib.Path | None) -> None:
        self.task, self.data, self.path = task, data, path
        self.title = f"{task.title}: all runs, for the grid and for the seeds"

    def get(self, name: str, rate: float, decay: float, seed: int) -> dict[str, str]:
        """Return the row of a training, which is run if it is not there."""
        point = {"method": name, "rate": f"{rate:g}", "decay": f"{decay:g}", "seed": f"{seed}"}
        if not RESULTS.has(self.title, **point):
            chosen, reported = self.task.run(self.data, name, rate, decay, seed)
            RESULTS.show(
                self.title, **point, nats_to_choose=f"{chosen:.4f}", nats=f"{reported:.4f}"
            )
            RESULTS.write(self.path)
        return next(row for row in RESULTS.rows(self.title) if point.items() <= row.items())

    def best(
        self, name: str, rates: Sequence[float], decays: Sequence[float]
    ) -> tuple[float, float]:
        """Return the rate and the decay with the lowest loss, with seed 0.

        If the best rate is the first or the last one, its neighbor outside of the grid is tried too.
        """

        def loss(point: tuple[float, float]) -> float:
            nats = float(self.get(name, *point, 0)["nats to choose"])
            return nats if np.isfinite(nats) else np.inf

        rates = sorted(rates)
        best = min(((rate, decay) for decay in decays for rate in rates), key=loss)
        if len(rates) == 1:
            return best
        ends = {rates[0]: rates[0] ** 2 / rates[1], rates[-1]: rates[-1] ** 2 / rates[-2]}
        while best[0] in ends:
            further = float(f"{ends.pop(best[0]):.2g}")
            ends[further] = float(f"{further**2 / best[0]:.2g}")
            best = min((best, (further, best[1])), key=loss)
            if best[0] != further:
                break
        return best


def tuned_point(paths: Sequence[pathlib.Path], base: str) -> tuple[float, float]:
    """Return the rate and decay that earlier files, in the order of their sizes, lead to."""
    found = []
    for path in paths:
        tables = json.loads(path.read_text(encoding="utf-8"))["tables"]
        rows = [
            dict(zip(table["columns"], row, strict=True))
            for table in tables
            for row in table["rows"]
            if "bytes per param" in table["columns"]
        ]
        mine = [row for row in rows if row["method"] == base]
        if not mine:
            raise SystemExit(f"{path} has no row of {base!r}: run it there first, or without it.")
        found.append((float(mine[0]["rate"]), float(mine[0]["decay"])))
    rates = [rate for rate, _ in found]
    # The ratio of the best rates of the two largest sizes, once more.
    rate = rates[-1] ** 2 / rates[-2] if len(rates) > 1 else rates[-1]
    return float(f"{rate:.2g}"), found[-1][1]


def compare(task: Task, data: Any, options: argparse.Namespace) -> None:
    """Tune and train each method, and print its row and its differences from its base."""
    runs, losses = Runs(task, data, options.json), dict[str, np.ndarray]()
    apart = f"{task.title}: differences, seed by seed"
    points: dict[str, tuple[float, float]] = {}
    for name in options.methods:
        base = METHODS[name].base or name
        if base not in points:
            # The other methods have AdamW's decay.
            decays = [points["AdamW"][1]] if "AdamW" in points else options.decays
            points[base] = (
                tuned_point(options.tuned, base)
                if options.tuned
                else runs.best(base, options.rates, decays)
            )
        rate, decay = points[base]
        rows = [runs.get(name, rate, decay, seed) for seed in range(options.seeds)]
        losses[name] = each = np.array([float(row["nats"]) for row in rows])
        error = f" ± {_error(each):.4f}" if len(each) > 1 else ""
        if not RESULTS.has(task.title, method=name):
            both, arguments = task.bytes_per_param(name, decay)
            RESULTS.show(
                task.title,
                method=name,
                params=jnp.dtype(METHODS[name].dtype).name,
                rate=f"{rate:g}",
                decay=f"{decay:g}",
                **{"nats, and standard error": f"{np.mean(each):.4f}{error}"},
                bytes_per_param=f"{both:.1f}",
                of_arguments=f"{arguments:.2f}",
            )
        if (
            base != name
            and base in losses
            and len(each) > 1
            and not RESULTS.has(apart, method=name)
        ):
            differences = each - losses[base]
            RESULTS.show(
                apart,
                method=name,
                minus=base,
                seeds=len(each),
                nats=f"{np.mean(differences):+.4f}",
                standard_error=f"{_error(differences):.4f}",
                **{"standard error of the base": f"{_error(losses[base]):.4f}"},
            )
        RESULTS.write(options.json)

    title = f"{task.title}: a step, in turns"
    if all(RESULTS.has(title, method=name) for name in options.methods):
        return
    decays = {name: points[METHODS[name].base or name][1] for name in options.methods}
    seconds = task.time(decays, options.repetitions)
    for name, each in seconds.items():
        RESULTS.show(
            title,
            method=name,
            ms=f"{1e3 * each:.1f}",
            **{f"over {options.methods[0]}'s": f"{each / seconds[options.methods[0]]:.2f}"},
            bytes_of_text_per_second=f"{task.batch * library_bytes.CONTEXT / each:,.0f}",
        )


def _error(each: np.ndarray) -> float:
    """Return the standard error of a mean."""
    return float(np.std(each, ddof=1) / len(each) ** 0.5)


def memory(task: Task, options: argparse.Namespace) -> None:
    """Compile a step of each method, and print the bytes per parameter."""
    where = DEVICES[task.device][0]
    title = f"A compiled step of {task.count / 1e6:.1f} million params and {task.batch} x "
    title += f"{library_bytes.CONTEXT} bytes{where}"
    for name in options.methods:
        both, arguments = task.bytes_per_param(name, 0.1)
        RESULTS.show(
            title,
            method=name,
            params=jnp.dtype(METHODS[name].dtype).name,
            bytes_per_param=f"{both:.2f}",
            of_arguments=f"{arguments:.2f}",
        )
        RESULTS.write(options.json)


def write_text(path: pathlib.Path, megabytes: float) -> None:
    """Write Python source of the environment's packages, and print its size and digest."""
    root = pathlib.Path(sysconfig.get_paths()["purelib"])
    names = sorted(
        (each.relative_to(root).as_posix() for each in root.rglob("*.py")),
        # Packages are mixed, so that the end of the text is like the rest.
        key=lambda name: hashlib.sha256(name.encode()).digest(),
    )
    limit, parts, size = int(1e6 * megabytes), list[bytes](), 0
    for name in names:
        if size >= limit:
            break
        parts.append((root / name).read_bytes() + b"\n")
        size += len(parts[-1])
    text = b"".join(parts)[:limit]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text)
    print(f"{path}: {len(parts)} files, {len(text):,} bytes, {hashlib.sha256(text).hexdigest()}")


def main(argv: Sequence[str] | None = None) -> None:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--make", type=pathlib.Path, help="write the text into this file")
    parser.add_argument("--megabytes", type=float, default=40, help="of the text, at most")
    parser.add_argument("--memory", action="store_true", help="compile, and do not train")
    parser.add_argument("--device", choices=DEVICES, help="of `--memory`; None: this machine's")
    parser.add_argument("--text", type=pathlib.Path, help="None: Python's library")
    parser.add_argument(
        "--size", type=int, choices=SIZES, default=1, help="millions of params, or 0"
    )
    parser.add_argument("--methods", nargs="+", choices=METHODS)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--repetitions", type=int, default=10, help="of timed steps")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-3, 3e-3, 1e-2])
    parser.add_argument("--decays", type=float, nargs="+", default=[0.0, 0.1])
    parser.add_argument("--tuned", type=pathlib.Path, nargs="+", help="files of smaller sizes")
    parser.add_argument("--resume", action="store_true", help="go on with the file of --json")
    results.add_argument(parser)
    options = parser.parse_args(argv)
    if options.make:
        write_text(options.make, options.megabytes)
        return
    has_flash = importlib.util.find_spec("flashoptim_jax") is not None
    if options.methods is None:
        options.methods = [name for name in METHODS if has_flash or name != FLASH]
    elif FLASH in options.methods and not has_flash:
        raise SystemExit(f"{FLASH} is not installed: pip install {FLASH}, or leave it out.")
    if not has_flash:
        print(f"{FLASH} is not installed, so it has no row: pip install {FLASH}")
    library_bytes.CONTEXT = options.context
    task = Task(options)
    if options.memory:
        memory(task, options)
        return
    if options.text is not None and not options.text.exists():
        raise SystemExit(
            f"{options.text} is not there: python benchmarks/scale.py --make FILE writes a text."
        )
    if options.resume:
        RESULTS.resume(options.json)
    compare(task, library_bytes.load(options.text), options)
    RESULTS.write(options.json)


if __name__ == "__main__":
    main()
