"""Speed of SGPerm's update compared with sorting, and with the original search in plain Python.

For each shape and partition ratio the script prints the least time of the whole jitted update (with
donated state, as in a training loop), of its cycle search with XLA's call and with the C entry point
without copies, and of `np.argsort` of the same weight vectors, all measured in turns in one run. It also
prints the processor time of the update and its temporary memory, the time of LaPerm's synchronization,
and the time of the search where many weights are tied.

    python benchmarks/sgperm.py [--repetitions 9] [--original-rows 2] [--cores 4] [--json FILE]
"""

import argparse
import functools
import itertools
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import results
from timing import seconds, take_turns

import optperm
from optperm.permutation import _cycles as cycles
from optperm.permutation import _library as library
from optperm.permutation._weight_vectors import sort_ranks

# (weight vectors, entries in each)
SHAPES = ((1000, 1000), (512, 4608), (1, 1_000_000))
PARTITION_RATIOS = (1.0, 0.1)
AGGRESSIVENESS = 0.1
LONGEST_ORIGINAL = 10_000  # it takes the square of it
# What is made of normal weights, and of the gradients.
VALUES: dict[str, tuple[Callable[[np.ndarray], np.ndarray], Any]] = {
    "any": (lambda w: w, jnp.float32),
    "bfloat16": (lambda w: w, jnp.bfloat16),
    "16": (lambda w: np.digitize(w, np.linspace(-2.1, 2.1, 15)) / 8.0 - 1.0, jnp.float32),
    "4": (lambda w: np.digitize(w, (-1.0, 0.0, 1.0)) / 2.0 - 1.0, jnp.float32),
    "2": (np.sign, jnp.float32),
}
RESULTS = results.Results()


def original_row(
    weights: np.ndarray, wish: np.ndarray, size: int, rng: np.random.Generator
) -> None:
    """Permutes one weight vector as the original does.

    Each entry's neighbors are found by comparing it with all others of its subset, and sorted by
    distance; then cycles are searched depth first.
    """
    order = rng.permutation(len(weights))
    spread = float(weights.max() - weights.min())
    for begin in range(0, len(order), size):
        subset = order[begin : begin + size]
        subset = subset[wish[subset] != 0]
        if len(subset) > 1:
            subset = subset[np.lexsort((subset, weights[subset]))]
            weights[subset] = weights[subset][
                _original_subset(weights[subset], wish[subset], spread)
            ]


def _original_subset(weights: np.ndarray, wish: np.ndarray, spread: float) -> list[int]:
    epsilon = spread * (AGGRESSIVENESS + 1 / len(weights))
    values = weights.astype(np.float64)
    places = np.arange(len(values))
    neighbors = []
    for place, value in enumerate(values):
        if wish[place] < 0:
            near = (places > place) & (values >= value) & (values < value + epsilon)
        else:
            near = (places < place) & (values < value) & (values >= value - epsilon)
        found = places[near]
        neighbors.append(found[np.argsort(np.abs(values[found] - value), kind="stable")].tolist())
    takes = list(range(len(values)))
    memorized: set[int] = set()
    for source in sorted(range(len(values)), key=lambda i: (-abs(wish[i]), -i)):
        if source not in memorized:
            cycle = _original_search(source, neighbors, memorized)
            memorized.update(cycle)
            for here, following in zip(cycle, cycle[1:] + cycle[:1], strict=True):
                takes[here] = following
    return takes


def _original_search(source: int, neighbors: list[list[int]], memorized: set[int]) -> list[int]:
    path, visited, cursors = [source], {source}, [iter(neighbors[source])]
    while path:
        for following in cursors[-1]:
            if following == source:
                return path
            if following not in visited and following not in memorized:
                visited.add(following)
                path.append(following)
                cursors.append(iter(neighbors[following]))
                break
        else:
            path.pop()
            cursors.pop()
    return [source]


def measure(rows: int, n: int, ratio: float, repetitions: int, original_rows: int) -> None:
    """Prints one block of lines."""
    rng = np.random.default_rng(0)
    vectors = rng.normal(size=(rows, n)).astype(np.float32)
    params = jnp.asarray(vectors.T)
    grads = jnp.asarray(rng.normal(size=(n, rows)).astype(np.float32))
    tx = optperm.sgperm(AGGRESSIVENESS, ratio)
    update = jax.jit(tx.update, donate_argnums=(0, 1))
    state = tx.init(params)
    ranks = sort_ranks(params)
    seeds = jax.random.bits(jax.random.key(0), (rows, 2), jnp.uint32)
    size = max(10, int(ratio * n))

    @jax.jit
    def kernel(grads: jax.Array) -> tuple[jax.Array, ...]:
        return cycles.permute_rows(
            grads,
            params,
            ranks,
            seeds,
            jnp.float32(AGGRESSIVENESS),
            jnp.int32(size),
            drop_remainder=False,
        )

    operands = [np.asarray(x)[None] for x in (grads, params, ranks, seeds)]
    operands += [np.full((1, rows), AGGRESSIVENESS, np.float32), np.full((1, rows), size, np.int32)]
    results = [np.empty_like(operands[index]) for index in (1, 2, 5)]
    laperm = optperm.laperm(optax.identity(), 1)
    synchronize, laperm_state = jax.jit(laperm.update), laperm.init(params)

    def whole_update() -> None:
        nonlocal state
        updates, state = update(gradients, state, params)
        jax.block_until_ready((updates, state))

    measured: dict[str, Callable[[], object]] = {
        "update": whole_update,
        "by XLA": lambda: jax.block_until_ready(kernel(grads)),
        "by host": lambda: cycles.permute_on_host("callback", False, operands, results),
        "argsort": lambda: np.argsort(vectors, axis=1),
        "synchronize": lambda: jax.block_until_ready(synchronize(grads, laperm_state, params)),
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

    wishes = np.asarray(grads).T
    original = [
        1e3 * seconds(lambda row=row: original_row(vectors[row].copy(), wishes[row], size, rng))
        for row in range(original_rows if n <= LONGEST_ORIGINAL else 0)
    ]
    memory = update.lower(grads, state, params).compile().memory_analysis().temp_size_in_bytes

    def beside(name: str, peer: str = "argsort") -> str:
        return f"{least[name]:9.2f} ms, {least[name] / least[peer]:5.2f} of {peer}"

    cells = {f"{name}_ms": f"{taken:.2f}" for name, taken in least.items()}
    processor_ns = f"{min(processor[3:]) * 1e9 / (rows * n):.1f}"
    RESULTS.row(
        "Least times",
        weight_vectors=f"{rows} of {n}",
        partition_ratio=ratio,
        **cells,
        processor_ns_a_weight=processor_ns,
        bytes_a_weight=f"{memory / (rows * n):.1f}",
    )
    print(f"{rows} weight vectors of {n}, partition ratio {ratio}")
    print(f"  argsort           {least['argsort']:9.2f} ms")
    print(f"  update            {beside('update')}")
    print(f"    processor       {processor_ns:>9} ns x core a weight")
    print(
        f"    XLA's memory    {memory / (rows * n):9.1f} bytes a weight, the kernel's own not counted"
    )
    print(f"  search, by XLA    {beside('by XLA')}")
    print(f"  search, by host   {beside('by host', 'by XLA')}")
    print(f"  LaPerm's sync     {beside('synchronize')}")
    if original:
        whole = statistics.median(original) * rows
        print(
            f"  plain Python      {whole:9.0f} ms (from {original_rows} vectors): "
            f"{whole / least['update']:.0f} times the update"
        )


def measure_ties(rows: int, n: int, ratio: float, alpha: float, repetitions: int) -> None:
    """Prints the times of the search for weights of few values, beside that for any values."""
    rng = np.random.default_rng(0)
    normal, wishes = rng.normal(size=(2, n, rows)).astype(np.float32)
    seeds = jax.random.bits(jax.random.key(0), (rows, 2), jnp.uint32)

    def searched(name: str) -> Callable[[], object]:
        rounded, dtype = VALUES[name]
        m, w = jnp.asarray(wishes, dtype), jnp.asarray(rounded(normal), dtype)
        rest = seeds, jnp.float32(alpha), jnp.int32(max(10, int(ratio * n)))
        permute = functools.partial(cycles.permute_rows, drop_remainder=False)
        # The tied ones have been permuted before, and are not in order of location any more.
        _, ranks, _ = permute(m[::-1], w, sort_ranks(w), *rest)
        w = jnp.take_along_axis(jnp.sort(w, axis=0), ranks, axis=0)
        run = jax.jit(permute)
        return lambda: jax.block_until_ready(run(m, w, ranks, *rest))

    functions = {name: searched(name) for name in VALUES}
    least = {name: 1e3 * min(taken) for name, taken in take_turns(functions, repetitions).items()}
    cells = {f"{name}_values": f"{taken:.2f} ms" for name, taken in least.items()}
    RESULTS.row(
        "The search, by how many values the weights have",
        weight_vectors=f"{rows} of {n}",
        partition_ratio=ratio,
        aggressiveness=alpha,
        **cells,
    )
    print(f"{rows} weight vectors of {n}, partition ratio {ratio}, aggressiveness {alpha}")
    for name, taken in least.items():
        print(f"  {name:>8} values   {taken:9.2f} ms, {taken / least['any']:5.2f} of any values")


def numpy_features() -> str:
    """The instruction sets that NumPy found: its sort for AVX-512 halves the yardstick."""
    found = np.show_config(mode="dicts")["SIMD Extensions"].get("found", [])
    return ", ".join(found) or "none"


def main() -> None:
    """Measures all shapes and partition ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--original-rows", type=int, default=2)
    parser.add_argument("--cores", type=int, default=len(os.sched_getaffinity(0)))
    results.add_argument(parser)
    arguments = parser.parse_args()
    # Before JAX and the kernel start their threads.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: arguments.cores])
    print(f"kernel: {library.choose_kernel()}; cores: {arguments.cores}; NumPy: {numpy_features()}")
    for rows, n in SHAPES:
        for ratio in PARTITION_RATIOS:
            measure(rows, n, ratio, arguments.repetitions, arguments.original_rows)
    for rows, n in SHAPES[:2]:
        for ratio, alpha in itertools.product(PARTITION_RATIOS, (AGGRESSIVENESS, 1.0)):
            measure_ties(rows, n, ratio, alpha, arguments.repetitions)
    RESULTS.write(arguments.json)


if __name__ == "__main__":
    main()
