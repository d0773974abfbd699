"""Rare, streaming and compressed commits on a byte-level transformer: loss over bytes sent.

A small decoder learns the sources of Python's own standard library; one module in ten is held out. Four
replicas start together after some steps of synchronous training, and take the same number of tokens
each: in step, alone (the baseline to beat), with AGN, and with DiLoCo (whole, streamed and compressed),
each with the best numbers of a grid. The bytes that a device sends are read from the compiled programs.
All methods use AdamW.

With `--data FILE` the decoder learns a text, whose last tenth is held out. On nanoGPT's Shakespeare,
`--layers 4 --width 128 --batch 3 --steps 2000 --common 0` is nanoGPT's small model for a CPU: contexts
of 64, twelve contexts per step, about 1.88 nats per character.

    python benchmarks/byte_transformer.py [--seeds N] [--grid] [--data FILE] [--out FILE.png]
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import library_bytes
import numpy as np
from commit_methods import AXIS, RATE, adamw, methods
from commit_runs import run
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from launch import join, launch
from library_bytes import Rows, kept, loss_fn, report, rows, windows

REPLICAS, TIMEOUT = 4, 3600


def train(chosen: argparse.Namespace, seed: int) -> dict[str, tuple[float, float, int]]:
    """By method: nats a byte on what was held out, bytes a step in the mean, and the most in one."""
    steps, common, grid = chosen.steps, chosen.common, chosen.grid
    mesh = jax.make_mesh((REPLICAS,), (AXIS,), axis_types=(AxisType.Auto,))
    (data, held), evaluate = library_bytes.load(chosen.data), jax.jit(loss_fn)
    test = windows(held, np.random.default_rng(2 if grid else 1), 256)

    def batches(count: int, stream: int) -> Any:
        rng = np.random.default_rng((seed, stream))
        for _ in range(count):
            ids = windows(data, rng, REPLICAS, chosen.batch)
            yield jax.device_put(ids, NamedSharding(mesh, P(AXIS)))

    nothing = jnp.zeros((1, library_bytes.CONTEXT), jnp.int32)
    params = jax.jit(library_bytes.Decoder().init)(jax.random.key(seed), nothing)
    params, _ = run("in step", adamw(RATE), None, params, batches(common, 0), mesh)
    print(f"seed {seed}: {evaluate(params, test):.3f} nats a byte after {common} common steps")
    results = dict[str, tuple[float, float, int]]()
    for name, method in methods(steps).items():
        if chosen.only and name not in chosen.only:
            continue
        best = method.best if chosen.rate is None else (chosen.rate, *method.best[1:])
        for point in method.grid if grid else [best]:
            trained, sent = run(name, *method.make(*point), params, batches(steps, 1), mesh)
            label = f"{name} {point}" if grid else name
            results[label] = float(evaluate(trained, test)), sum(sent) / len(sent), max(sent)
    return results


def main(argv: list[str] | None = None) -> Rows:
    """Trains by every method, prints the table and draws loss over bytes; returns what was found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default="byte_transformer.png", help="the file for the picture")
    parser.add_argument("--seeds", type=int, default=1, help="trainings to average")
    parser.add_argument("--steps", type=int, default=400, help="steps of each method")
    parser.add_argument("--common", type=int, default=200, help="synchronous steps before them")
    parser.add_argument("--batch", type=int, default=8, help="contexts in a step of each replica")
    parser.add_argument(
        "--layers", type=int, default=library_bytes.LAYERS, help="layers of the decoder"
    )
    parser.add_argument(
        "--width",
        type=int,
        default=library_bytes.WIDTH,
        help=f"its width, a multiple of {library_bytes.HEADS}",
    )
    parser.add_argument("--data", type=Path, help="a text to learn")
    parser.add_argument("--rate", type=float, help="of the replicas, instead of the best")
    parser.add_argument("--only", action="append", help="a method; may be given more than once")
    parser.add_argument(
        "--processes", type=int, default=1, help=f"processes, a divisor of {REPLICAS}"
    )
    parser.add_argument("--grid", action="store_true", help="all of the grid")
    parser.add_argument("--kept", type=Path, help="a file of benchmarks/results, to draw it again")
    parser.add_argument("--coordinator", help=argparse.SUPPRESS)
    parser.add_argument("--process-id", type=int, help=argparse.SUPPRESS)
    chosen = parser.parse_args(argv)
    if chosen.kept is not None:
        report(found := kept(chosen.kept), chosen.out)
        return found
    library_bytes.LAYERS, library_bytes.WIDTH = chosen.layers, chosen.width
    if REPLICAS % chosen.processes:
        parser.error(f"--processes must divide {REPLICAS}, got {chosen.processes}")
    if chosen.processes > 1:
        if chosen.process_id is None:
            launch(__file__, argv or sys.argv[1:], chosen.processes, TIMEOUT)
            return {}
        join(chosen.coordinator, chosen.processes, chosen.process_id, REPLICAS // chosen.processes)
    every = [train(chosen, seed) for seed in range(chosen.seeds)]
    found = rows(every)
    if jax.process_index() == 0:
        report(found, chosen.out)
    return found


if __name__ == "__main__":
    # Where there are too few devices, the processor stands in for four. JAX asks when it starts.
    jax.config.update("jax_num_cpu_devices", REPLICAS)
    main()
