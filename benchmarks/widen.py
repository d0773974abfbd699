"""16-bit params with remainders compared with float32 params: loss, bytes and time per update.

The script prints:

- train: a small decoder learns the bytes of a text. All methods start from the same params, see the same
  batches and use one rate per optimizer. The tables have nats per byte on held-out bytes, at the params
  as they are stored, and bytes per parameter for params, gradients and state. Another table has the
  differences from float32, seed by seed, with their standard error;
- small: the same with a small rate, where params in bfloat16 lose most of their updates;
- rounding: three optimizers whose second moments are stored in 8 bits, rounded at random and to the
  nearest code;
- update: the processor time of an update alone, over AdamW's in float32;
- memory: the bytes per parameter of a compiled update of 98 million params, whose largest leaf is a
  twentieth of them, on this machine, or ahead of time on an H100 or a TPU v5e (which need what
  `accelerators.py` names).

All seeds of a method train at once, in one program. With `--resume`, a command that was stopped goes on
after the last row in the file.

    python benchmarks/widen.py [--only train|small|rounding|update|memory] [--text FILE]
        [--seeds 10] [--few 3] [--steps 600] [--long 3000] [--rate 3e-3] [--small_rate 3e-4]
        [--rounding_rate 1e-3] [--methods NAME ...] [--repetitions 30]
        [--device cpu|gpu|tpu] [--json FILE] [--resume]
"""

import argparse
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import accelerator_programs
import jax
import jax.numpy as jnp
import library_bytes
import numpy as np
import optax
import optax.contrib
import results
import timing
from accelerator_programs import DEVICES

import optperm
from optperm.memory import _blocks, _quantize_state

Tx = optax.GradientTransformation
RESULTS = results.Results()
BATCH, DECAY, TESTS = 8, 0.01, 256


def schedule(rate: float, steps: int) -> optax.Schedule:
    """Return a warm-up of a twentieth of the steps, and a cosine."""
    return optax.warmup_cosine_decay_schedule(0.0, rate, max(steps // 20, 1), steps, rate / 50)


def adamw(rate: Any) -> Tx:
    """Return AdamW."""
    return optax.adamw(rate, weight_decay=DECAY)


def muon(rate: Any) -> Tx:
    """Return Muon for kernels and AdamW for all else."""
    shapes = jax.eval_shape(library_bytes.initial, 0)
    return optax.contrib.muon(
        rate,
        weight_decay=DECAY,
        muon_weight_dimension_numbers=optperm.memory.muon_axes(shapes, show=False),
    )


def low_rank(rate: Any) -> Tx:
    """Return AdamW in subspaces of a quarter of each kernel."""
    return optperm.memory.low_rank_adamw(rate, rank=1 / 4, every=100, weight_decay=DECAY)


def plain(tx: Tx, key: jax.Array) -> Tx:
    """Return an optimizer as it is."""
    del key
    return tx


def widen(bits: int, *, small: bool = False) -> Callable[[Tx, jax.Array], Tx]:
    """Return a function that widens params, and perhaps stores moments in 8 bits."""

    def wrap(tx: Tx, key: jax.Array) -> Tx:
        tx = optperm.quantize_state(tx, min_size=1024, key=key) if small else tx
        return optperm.widen_params(tx, bits=bits, key=key)

    return wrap


def code_moments(tx: Tx, key: jax.Array) -> Tx:
    """Store moments in 8 bits, rounded at random."""
    return optperm.quantize_state(tx, min_size=1024, key=key)


def code_to_nearest(tx: Tx, key: jax.Array) -> Tx:
    """Store moments in 8 bits, where second moments are rounded to the nearest code."""
    tx, find = code_moments(tx, key), _quantize_state._find_form

    def find_nearest(moment: Any, bits: int) -> Any:
        form = find(moment, bits)
        return _blocks.Largest if form is _blocks.Root else form

    def init(params: Any) -> Any:
        with mock.patch.object(_quantize_state, "_find_form", find_nearest):
            return tx.init(params)

    return optax.GradientTransformation(init, tx.update)


# The dtype of params, an optimizer, what is wrapped around it, and the method to compare with
Method = tuple[Any, Callable[[Any], Tx], Callable[[Tx, jax.Array], Tx], str]
METHODS: dict[str, Method] = {
    "AdamW, float32": (jnp.float32, adamw, plain, ""),
    "AdamW, 8 bits more": (jnp.bfloat16, adamw, widen(8), "AdamW, float32"),
    "AdamW, 8 bits more, 8-bit state": (
        jnp.bfloat16,
        adamw,
        widen(8, small=True),
        "AdamW, float32",
    ),
    "AdamW, 0 bits more": (jnp.bfloat16, adamw, widen(0), "AdamW, float32"),
    "AdamW, bfloat16": (jnp.bfloat16, adamw, plain, "AdamW, float32"),
    "AdamW, 16 bits more": (jnp.bfloat16, adamw, widen(16), "AdamW, float32"),
    "Muon, float32": (jnp.float32, muon, plain, ""),
    "Muon, 8 bits more, 8-bit state": (jnp.bfloat16, muon, widen(8, small=True), "Muon, float32"),
    "low rank, float32": (jnp.float32, low_rank, plain, ""),
    "low rank, 8 bits more": (jnp.bfloat16, low_rank, widen(8), "low rank, float32"),
}
# Optimizers with second moments
SQUARES: dict[str, Callable[[Any], Tx]] = {
    "AdamW": adamw,
    "NAdamW": lambda rate: optax.nadamw(rate, weight_decay=DECAY),
    "RMSProp": lambda rate: optax.rmsprop(rate, decay=0.99, bias_correction=True),
}
ROUNDED: dict[str, Method] = {}
for _name, _optimizer in SQUARES.items():
    ROUNDED[f"{_name}, float32"] = (jnp.float32, _optimizer, plain, "")
    _base = f"{_name}, at random"
    ROUNDED[_base] = (jnp.float32, _optimizer, code_moments, f"{_name}, float32")
    ROUNDED[f"{_name}, to the nearest"] = (jnp.float32, _optimizer, code_to_nearest, _base)
MANY = tuple(METHODS)[:4]
LONG = tuple(METHODS)[:5]


class Task:
    """A text, and a decoder that learns its bytes."""

    def __init__(self, text: pathlib.Path | None) -> None:
        self.train, held = library_bytes.load(text)
        self.test = library_bytes.windows(held, np.random.default_rng(1), TESTS)
        self.title = f"Bytes of {text.stem}" if text else "Bytes of Python's library"

    def run(self, name: str, rate: float, steps: int, seeds: int) -> tuple[list[float], float]:
        """Return the nats per byte of trainings from several seeds, and bytes per parameter."""
        dtype, optimizer, wrap, _ = (METHODS | ROUNDED)[name]

        def loss_fn(params: Any, ids: jax.Array) -> jax.Array:
            return library_bytes.loss_fn(optax.tree.cast(params, jnp.float32), ids)

        def make(key: jax.Array) -> Tx:
            return wrap(optimizer(schedule(rate, steps)), key)

        @jax.jit
        @jax.vmap
        def train(seed: jax.Array, batches: jax.Array) -> Any:
            tx = make(jax.random.fold_in(jax.random.key(1), seed))
            params = optax.tree.cast(library_bytes.initial(seed), dtype)

            def step(carry: Any, ids: jax.Array) -> Any:
                params, opt_state = carry
                grads = jax.grad(loss_fn)(params, ids)
                updates, opt_state = tx.update(grads, opt_state, params)
                return (optax.apply_updates(params, updates), opt_state), None

            (params, _), _ = jax.lax.scan(step, (params, tx.init(params)), batches)
            return loss_fn(params, self.test)

        batches = [
            library_bytes.windows(self.train, np.random.default_rng((seed, 7)), steps, BATCH)
            for seed in range(seeds)
        ]
        nats = train(jnp.arange(seeds), np.stack(batches))
        shapes = jax.eval_shape(lambda: optax.tree.cast(library_bytes.initial(0), dtype))
        state = optperm.memory.state_report(make(jax.random.key(0)), shapes)
        size = sum(leaf.size for leaf in jax.tree.leaves(shapes))
        return nats.tolist(), 2 * jnp.dtype(dtype).itemsize + state.bytes / size


def compare(
    title: str, task: Task, methods: Sequence[str], rate: float, steps: int, seeds: Any, json: Any
) -> None:
    """Train with each method, and print the losses and their differences, seed by seed."""
    found: dict[str, np.ndarray] = {}
    apart = f"{title}, differences"
    for name in methods:
        if RESULTS.has(title, method=name):
            row = next(row for row in RESULTS.rows(title) if row["method"] == name)
            found[name] = np.array([float(x) for x in row["each seed"].split()])
            continue
        start = time.perf_counter()
        nats, size = task.run(name, rate, steps, seeds(name))
        found[name] = np.array(nats)
        RESULTS.show(
            title,
            method=name,
            bytes_per_param=f"{size:.2f}",
            nats=f"{np.mean(nats):.4f}",
            each_seed=" ".join(f"{x:.4f}" for x in nats),
        )
        base = (METHODS | ROUNDED)[name][3]
        if base in found and (number := min(len(nats), len(found[base]))) > 1:
            each = found[name][:number] - found[base][:number]
            error = np.std(each, ddof=1) / number**0.5
            RESULTS.show(
                apart,
                method=name,
                minus=base,
                seeds=number,
                nats=f"{np.mean(each):+.4f}",
                standard_error=f"{error:.4f}",
            )
        print(f"  {time.perf_counter() - start:.0f} s", flush=True)
        RESULTS.write(json)


def update(repetitions: int, count: int, shape: tuple[int, int]) -> None:
    """Time updates of matrices in turns, donated, by the processor's median time."""
    ones = {f"w{i:02}": jnp.ones(shape) for i in range(count)}
    adam, key = optax.adamw(1e-3), jax.random.key(0)
    calls: dict[str, Callable[[], Any]] = {}
    for name, dtype, tx in (
        ("AdamW, float32", jnp.float32, adam),
        ("AdamW, 16 bits more", jnp.bfloat16, widen(16)(adam, key)),
        ("AdamW, 8 bits more", jnp.bfloat16, widen(8)(adam, key)),
        ("AdamW, 0 bits more", jnp.bfloat16, widen(0)(adam, key)),
        ("AdamW, float32, 8-bit state", jnp.float32, optperm.quantize_state(adam)),
        ("AdamW, 8 bits more, 8-bit state", jnp.bfloat16, widen(8, small=True)(adam, key)),
    ):

        def step(params: Any, opt_state: Any, grads: Any, tx: Tx = tx) -> Any:
            updates, opt_state = tx.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state

        params = jax.tree.map(lambda w, dtype=dtype: jnp.array(w, dtype), ones)  # donated
        grads = jax.tree.map(lambda w: 0.01 * jnp.ones_like(w), params)
        calls[name] = timing.stepping(
            jax.jit(step, donate_argnums=(0, 1)), (params, tx.init(params)), grads
        )
    times = timing.take_turns(calls, repetitions, time.process_time)
    medians = {name: float(np.median(each)) for name, each in times.items()}
    for name, seconds in medians.items():
        RESULTS.show(
            f"An update of {count} matrices {shape[0]} x {shape[1]}, over AdamW's in float32",
            update=name,
            ms=f"{1e3 * seconds:.1f}",
            ratio=f"{seconds / medians['AdamW, float32']:.2f}",
        )


def with_copy(inner: Tx) -> Tx:
    """Return an optimizer that keeps a float32 copy of its params."""

    def init(params: Any) -> Any:
        wide = optax.tree.cast(params, jnp.float32)
        return wide, inner.init(wide)

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        wide, inner_state = state
        updates, inner_state = inner.update(
            optax.tree.cast(updates, jnp.float32), inner_state, wide
        )
        wide = optax.apply_updates(wide, updates)
        return jax.tree.map(lambda w, p: w.astype(p.dtype) - p, wide, params), (wide, inner_state)

    return optax.GradientTransformation(init, update)


def memory(device: str, count: int, shape: tuple[int, ...]) -> None:
    """Compile an update of stacks of matrices, and print the bytes per parameter."""
    names, mesh = [f"w{i:02}" for i in range(count)], DEVICES[device][1]()
    axes = dict.fromkeys(names, optperm.LeafAxes("kernel", 1, 2, 0))
    numbers = dict.fromkeys(names, optax.contrib.MuonDimensionNumbers((1,), (2,)))
    key, small = jax.random.key(0), optperm.quantize_state
    adam, by_muon = (
        optax.adamw(1e-3),
        optax.contrib.muon(1e-3, muon_weight_dimension_numbers=numbers),
    )
    low = optperm.memory.low_rank_adamw(1e-3, rank=1 / 4, axes=axes)
    for name, dtype, tx in (
        ("AdamW", jnp.float32, adam),
        ("AdamW, 8-bit state", jnp.float32, small(adam)),
        ("AdamW, float32 copy", jnp.bfloat16, with_copy(adam)),
        ("AdamW, all in bfloat16", jnp.bfloat16, adam),
        ("AdamW, 8 bits more", jnp.bfloat16, widen(8)(adam, key)),
        ("AdamW, 8 bits more, 8-bit state", jnp.bfloat16, widen(8, small=True)(adam, key)),
        ("AdamW, 0 bits more, 8-bit state", jnp.bfloat16, widen(0, small=True)(adam, key)),
        ("Muon", jnp.float32, by_muon),
        ("Muon, 8 bits more, 8-bit state", jnp.bfloat16, widen(8, small=True)(by_muon, key)),
        ("low rank, 8 bits more, 8-bit state", jnp.bfloat16, widen(8, small=True)(low, key)),
    ):

        def step(params: Any, opt_state: Any, grads: Any, tx: Tx = tx) -> Any:
            updates, opt_state = tx.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state

        params = {each: jax.ShapeDtypeStruct(shape, dtype) for each in names}
        state, size = jax.eval_shape(tx.init, params), sum(x.size for x in params.values())
        given = params, state, params
        given = accelerator_programs.shapes(given, mesh) if mesh else given
        program = jax.jit(step, donate_argnums=(0, 1)).lower(*given).compile()
        itemsize = jnp.dtype(dtype).itemsize
        of_state = optperm.memory.state_report(tx, params).bytes / size
        RESULTS.show(
            f"Bytes per parameter of an update of {size / 1e6:.0f} million params{DEVICES[device][0]}",
            method=name,
            params=itemsize,
            gradients=itemsize,
            state=f"{of_state:.2f}",
            all=f"{2 * itemsize + of_state:.2f}",
            temporary=f"{program.memory_analysis().temp_size_in_bytes / size:.2f}",
        )


def main(argv: Sequence[str] | None = None) -> None:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=("train", "small", "rounding", "update", "memory"))
    parser.add_argument("--text", type=pathlib.Path, help="a text, in the place of the library")
    parser.add_argument("--methods", nargs="+", choices=METHODS | ROUNDED, help="of the trainings")
    parser.add_argument("--seeds", type=int, default=10, help="of the first four methods")
    parser.add_argument(
        "--few", type=int, default=3, help="seeds of the other methods, and of `small`"
    )
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--long", type=int, default=3000, help="steps of `small` and `rounding`")
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--small_rate", type=float, default=3e-4)
    parser.add_argument("--rounding_rate", type=float, default=1e-3)
    parser.add_argument("--repetitions", type=int, default=30)
    parser.add_argument("--device", choices=DEVICES, default="cpu", help="of `memory`")
    parser.add_argument("--smallest", action="store_true", help="update and memory, in seconds")
    parser.add_argument("--resume", action="store_true", help="go on with the file of --json")
    results.add_argument(parser)
    options = parser.parse_args(argv)
    if options.resume:
        RESULTS.resume(options.json)
    task, few = Task(options.text), options.few

    def train() -> None:
        title = f"{task.title}: {options.steps} steps, rate {options.rate:g}"
        methods = options.methods or list(METHODS)
        seeds = lambda name: max(options.seeds, few) if name in MANY else few  # noqa: E731
        compare(title, task, methods, options.rate, options.steps, seeds, options.json)

    def small() -> None:
        title = f"{task.title}: {options.long} steps, rate {options.small_rate:g}"
        methods = options.methods or list(LONG)
        rate, steps = options.small_rate, options.long
        compare(title, task, methods, rate, steps, lambda _: few, options.json)

    def rounding() -> None:
        rate, steps = options.rounding_rate, options.long
        title = f"{task.title}: second moments in 8 bits, {steps} steps, rate {rate:g}"
        methods = options.methods or list(ROUNDED)
        compare(title, task, methods, rate, steps, lambda _: few, options.json)

    parts = {
        "train": train,
        "small": small,
        "rounding": rounding,
        "memory": lambda: memory(
            options.device, *((2, (2, 8, 512)) if options.smallest else (20, (10, 512, 960)))
        ),
        "update": lambda: update(
            options.repetitions, *((2, (64, 64)) if options.smallest else (12, (512, 2048)))
        ),
    }
    for name, measure in parts.items():
        if options.only in (None, name):
            measure()
    RESULTS.write(options.json)


if __name__ == "__main__":
    main()
