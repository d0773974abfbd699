"""Speed of SGPerm's update beside sorting, and beside the original's search in plain Python.

Prints for each shape and partition ratio the median time of the whole jitted update (state donated, as
in a training loop), of its parts, of `np.argsort(weights, axis=1)` on the same weight vectors, and of
the search as the original does it, in the same run and in turns.

    python benchmarks/sgperm.py [--repetitions 31] [--original-rows 2]
"""

import argparse
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

import optperm
from optperm.permutation import cycles
from optperm.permutation.weight_vectors import sort_ranks

# (weight vectors, entries in each)
SHAPES = ((1000, 1000), (512, 4608))
PARTITION_RATIOS = (1.0, 0.1)
AGGRESSIVENESS = 0.1


def milliseconds(function: Callable[[], object]) -> float:
    """Wall time of one call."""
    start = time.perf_counter()
    function()
    return 1e3 * (time.perf_counter() - start)


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
    tx = optperm.sgperm(AGGRESSIVENESS, aggressiveness_decay=1.0, partition_ratio=ratio)
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

    times: dict[str, list[float]] = {"update": [], "kernel": [], "argsort": []}
    for _ in range(repetitions + 3):
        gradients = jax.block_until_ready(jnp.array(grads, copy=True))

        def whole_update(gradients: jax.Array = gradients) -> None:
            nonlocal state
            updates, state = update(gradients, state, params)
            jax.block_until_ready((updates, state))

        times["update"].append(milliseconds(whole_update))
        times["kernel"].append(milliseconds(lambda: jax.block_until_ready(kernel(grads))))
        times["argsort"].append(milliseconds(lambda: np.argsort(vectors, axis=1)))
    median = {name: statistics.median(taken[3:]) for name, taken in times.items()}

    wishes = np.asarray(grads).T
    original = [
        milliseconds(lambda row=row: original_row(vectors[row].copy(), wishes[row], size, rng))
        for row in range(original_rows)
    ]
    whole_original = statistics.median(original) * rows
    print(f"{rows} weight vectors of {n}, partition ratio {ratio}")
    print(f"  update            {median['update']:9.2f} ms")
    print(f"    cycle search    {median['kernel']:9.2f} ms")
    print(f"    the rest        {median['update'] - median['kernel']:9.2f} ms")
    print(f"  np.argsort        {median['argsort']:9.2f} ms, {_ratio(median, 'argsort')} of it")
    print(
        f"  plain Python      {whole_original:9.0f} ms (from {original_rows} vectors): "
        f"{whole_original / median['update']:.0f} times the update"
    )


def _ratio(median: dict[str, float], peer: str) -> str:
    return f"update at {median['update'] / median[peer]:.2f}"


def main() -> None:
    """Measures all shapes and partition ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=31)
    parser.add_argument("--original-rows", type=int, default=2)
    arguments = parser.parse_args()
    print(f"kernel: {cycles.chosen_kernel()}")
    for rows, n in SHAPES:
        for ratio in PARTITION_RATIOS:
            measure(rows, n, ratio, arguments.repetitions, arguments.original_rows)


if __name__ == "__main__":
    main()
