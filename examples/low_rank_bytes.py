"""Adam in a fraction of its memory: a byte-level decoder with AdamW, low rank and APOLLO.

A small decoder learns the sources of Python's own standard library; one module in ten is held out. The
state of low rank and APOLLO covers a quarter of each kernel's smaller side; the embedding stays at full
rank. `benchmarks/memory.py` compares more methods, each at its best rate.

    python examples/low_rank_bytes.py [--steps 300] [--batch 16] [--rank-divisor 4] [--out FILE.png]
"""

import functools
from collections.abc import Sequence
from typing import Any

import flags
import jax
import jax.numpy as jnp
import library_bytes
import matplotlib.style
import numpy as np
import optax
from library_bytes import loss_fn, windows
from matplotlib.figure import Figure

import optperm

NUMBERS = optax.contrib.GaLoreDimensionNumbers()


def kernels(params: Any) -> Any:
    """The axes of each kernel; None for what stays at full rank."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: NUMBERS if path[-1].key == "kernel" else None, params
    )


def optimizers(rank: float, steps: int) -> dict[str, tuple[Any, optax.GradientTransformation]]:
    """By name: the direction, and the whole optimizer, each with the same decay and schedule."""
    low = optperm.low_rank(optax.scale_by_adam(), rank, dimension_numbers=kernels)
    apollo = optperm.apollo(rank=rank, dimension_numbers=kernels)
    directions = {
        "AdamW": (optax.scale_by_adam(), 3e-3),
        "low_rank": (low, 3e-3),
        "apollo": (apollo, 6e-3),
    }
    built: dict[str, tuple[Any, optax.GradientTransformation]] = {}
    for name, (direction, rate) in directions.items():
        schedule = optax.warmup_cosine_decay_schedule(0.0, rate, steps // 10, steps)
        tail = optax.add_decayed_weights(0.1), optax.scale_by_learning_rate(schedule)
        built[name] = direction, optax.chain(direction, *tail)
    return built


def take_step(tx: Any, params: Any, opt_state: Any, ids: jax.Array) -> tuple[Any, Any, jax.Array]:
    """New params, new state and the loss."""
    loss, grads = jax.value_and_grad(loss_fn)(params, ids)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


@matplotlib.style.context("optperm.pictures")
def main(argv: Sequence[str] | None = None) -> dict[str, tuple[float, float]]:
    """Trains, prints and draws; returns words of state a param, and nats a byte on held-out modules."""
    parser = flags.Parser(__doc__, "low-rank-bytes.png")
    parser.count("steps", 300, "steps of each optimizer", least=10)
    parser.count("batch", 16, "contexts in a step")
    parser.count("rank-divisor", 4, "ranks are a kernel's smaller side over this", least=2)
    chosen = parser.parse_args(argv)
    (data, held), evaluate = library_bytes.load(), jax.jit(loss_fn)
    test = windows(held, np.random.default_rng(1), 128)
    nothing = jnp.zeros((1, library_bytes.CONTEXT), jnp.int32)
    start = jax.jit(library_bytes.Decoder().init)(jax.random.key(0), nothing)

    found: dict[str, tuple[float, float]] = {}
    figure = Figure(figsize=(6, 4))
    axes = figure.add_subplot(xlabel="step", ylabel="nats a byte, training")
    for name, (direction, tx) in optimizers(1 / chosen.rank_divisor, chosen.steps).items():
        step = jax.jit(functools.partial(take_step, tx))
        params, opt_state, losses = start, tx.init(start), []
        rng = np.random.default_rng(0)
        for _ in range(chosen.steps):
            params, opt_state, loss = step(params, opt_state, windows(data, rng, chosen.batch))
            losses.append(float(loss))
        size = sum(leaf.size for leaf in jax.tree.leaves(params))
        words = sum(leaf.size for leaf in jax.tree.leaves(direction.init(params))) / size
        found[name] = words, float(evaluate(params, test))
        print(f"{name:8}  {words:.2f} numbers of state a param, {found[name][1]:.3f} nats a byte")
        axes.plot(losses, label=f"{name}, {words:.2f} numbers a param")
    figure.legend(loc="outside lower center", ncols=3)
    figure.savefig(chosen.out)
    return found


if __name__ == "__main__":
    main()
