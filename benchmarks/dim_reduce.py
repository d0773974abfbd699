"""Cost of DimReduce's update, of its basis and of its communication.

The script prints these figures, each measured in turns with a peer in the same run:

- one update without its loss evaluations, compared with the two matrix products that it needs, and the
  number of its loss evaluations;
- `pca_basis` compared with the same algorithm by hand in NumPy and with scikit-learn's PCA: time,
  principal angles and orthogonality against a float64 decomposition, and memory in addition to the
  snapshots;
- the collectives of one step on 4 devices, from the compiled program.

    python benchmarks/dim_reduce.py [--only update|pca|communication] [--repetitions 101] [--smallest]
        [--json FILE]
"""

import argparse
import os
import re
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

# Has to stand before JAX starts its CPU backend.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
)

import jax
import jax.numpy as jnp
import numpy as np
import results
from sklearn.decomposition import PCA
from timing import seconds, take_turns

import optperm

RESULTS = results.Results()


def update(repetitions: int, n: int = 2_000_000, k: int = 32) -> None:
    """Times one jitted update, its state donated, and the two products in one jitted function."""
    basis = jnp.linalg.qr(jax.random.normal(jax.random.key(0), (n, k)))[0].T
    grads, params = jax.random.normal(jax.random.key(1), (n,)), jnp.ones(n)
    tx = optperm.dim_reduce(n_components=k)
    state = optperm.subspace.set_basis(tx.init(params), basis)

    def accepting(params: jax.Array) -> jax.Array:
        del params
        return jnp.float32(-1e9)  # the first trial, at no cost

    @jax.jit
    def products(basis: jax.Array, g: jax.Array) -> jax.Array:
        gk = basis @ g
        return jnp.stack([-gk, gk]) @ basis

    def one(g: jax.Array, state: Any, params: jax.Array) -> Any:
        return tx.update(g, state, params, value=jnp.float32(0.0), value_fn=accepting)

    step = jax.jit(one, donate_argnums=1)

    def whole() -> jax.Array:
        nonlocal state
        updates, state = step(grads, state, params)
        return updates

    calls = {"products": lambda: products(basis, grads), "update": whole}
    times = take_turns(calls, repetitions)
    median = {name: 1e3 * statistics.median(taken) for name, taken in times.items()}
    least = {name: 1e3 * min(taken) for name, taken in times.items()}
    ratio = f"{median['update'] / median['products']:.2f}"
    RESULTS.row("The update over its two matrix products", params=f"{n:,}", k=k, ratio=ratio)
    print(f"update, n = {n}, k = {k}, float32")
    print(f"  two products  {median['products']:8.2f} ms (least {least['products']:.2f})")
    print(f"  update        {median['update']:8.2f} ms (least {least['update']:.2f})")
    print(f"  ratio         {ratio:>8} (of the least {least['update'] / least['products']:.2f})")


def trajectory(m: int, n: int) -> jax.Array:
    """Snapshots of a walk whose steps shrink, as those of a training do."""

    @jax.jit
    def walk(key: jax.Array) -> jax.Array:
        def move(at: jax.Array, index: jax.Array) -> tuple[jax.Array, jax.Array]:
            noise = jax.random.normal(jax.random.fold_in(key, index), (n,))
            at = 0.97 * at + 0.02 * 0.9**index * noise
            return at, at

        return jax.lax.scan(move, jax.random.normal(key, (n,)), jnp.arange(m))[1]

    return jax.block_until_ready(walk(jax.random.key(0)))


def memory() -> tuple[float, float]:
    """Resident memory of this process now and at its highest, in MB."""
    with open("/proc/self/status", encoding="ascii") as status:
        lines = dict(line.split(":", 1) for line in status)
    return tuple(int(lines[name].split()[0]) / 1e3 for name in ("VmRSS", "VmHWM"))  # type: ignore[return-value]


def quality(rows: np.ndarray, exact: np.ndarray) -> str:
    """The smallest cosine of the principal angles, and the error of orthonormality."""
    rows = rows.astype(np.float64)
    cosine = np.linalg.svd(rows @ exact.T)[1].min()
    error = np.abs(rows @ rows.T - np.eye(len(rows))).max()
    return f"1 - least cosine {max(1 - cosine, 0):.1e}, orthogonality error {error:.1e}"


def by_hand(snapshots: np.ndarray, k: int, width: int = 2**15) -> np.ndarray:
    """The same in NumPy: a float64 Gram matrix of displacements, slice by slice, and eigenvectors."""
    m, n = snapshots.shape

    def slices() -> Iterator[tuple[slice, np.ndarray]]:
        for start in range(0, n, width):
            wide = snapshots[:, start : start + width].astype(np.float64)
            yield slice(start, start + width), wide - wide[:1]

    center = np.eye(m) - 1 / m
    gram = center @ sum(wide @ wide.T for _, wide in slices()) @ center
    values, vectors = np.linalg.eigh(gram)
    coefficients = (vectors[:, ::-1] / np.sqrt(np.maximum(values[::-1], 1e-300))).T[:k] @ center
    rows = np.empty((k, n), np.float32)
    for part, wide in slices():
        rows[:, part] = coefficients @ wide
    return rows


def pca(m: int = 60, n: int = 2_000_000, k: int = 40) -> None:
    """Compares it with the same by hand, in turns, and with scikit-learn's."""
    snapshots = trajectory(m, n)
    before, _ = memory()
    basis = jax.block_until_ready(optperm.subspace.pca_basis(snapshots, k))
    _, highest = memory()
    size, plain = snapshots.nbytes / 1e6, np.asarray(snapshots)
    calls = {
        "ours": lambda: optperm.subspace.pca_basis(snapshots, k),
        "by hand": lambda: by_hand(plain, k),
    }
    times = take_turns(calls, 5, warm_up=0)
    peer = PCA(k, random_state=0)
    peer_time = 1e3 * seconds(lambda: peer.fit(plain))
    wide = plain.astype(np.float64)
    wide -= wide.mean(axis=0)
    _, values, exact = np.linalg.svd(wide, full_matrices=False)
    exact, spread = exact[:k], values[0] / values[k - 1]
    print(f"PCA, {m} x {n} float32, k = {k}, singular values over a factor of {spread:.0f}")
    ours, theirs = (1e3 * statistics.median(taken) for taken in times.values())
    extra = (highest - before) / size
    for name, taken, rows in (
        ("pca_basis", ours, np.asarray(basis)),
        ("NumPy by hand", theirs, by_hand(plain, k)),
        ("scikit-learn", peer_time, peer.components_),
    ):
        says = quality(rows, exact)
        RESULTS.row("The basis", by=name, ms=f"{taken:.0f}", quality=says)
        print(f"  {name:13} {taken:8.0f} ms, {says}")
    RESULTS.row("Memory of pca_basis beside the snapshots", times_theirs=f"{extra:.2f}")
    print(f"  memory beside the snapshots, the basis included: {extra:.2f} times theirs")
    least = min(times["ours"]) / min(times["by hand"])
    print(f"  pca_basis takes {ours / theirs:.2f} of by hand (of the least {least:.2f})")
    print(f"  pca_basis takes {ours / peer_time:.2f} of scikit-learn")


def communication(n: int = 100_000, k: int = 32, replicas: int = 4) -> None:
    """Lists the collectives of one step."""
    tx = optperm.dim_reduce(n_components=k, axis_name="replica")
    devices = jax.devices()[:replicas]
    params = jnp.ones((replicas, n))
    opt_state = jax.pmap(tx.init, axis_name="replica", devices=devices)(params)

    def step(params: jax.Array, opt_state: Any, batch: jax.Array) -> Any:
        e = optperm.evaluate(lambda p, b: jnp.sum((p - b) ** 2), params, batch)
        updates, opt_state = tx.update(e.grad, opt_state, params, **e.extra_args)
        return optperm.apply_updates(params, updates, opt_state), opt_state

    step = jax.pmap(step, axis_name="replica", devices=devices)
    text = step.lower(params, opt_state, params).compile().as_text()
    print(f"collectives of a step on {replicas} devices, n = {n}, k = {k}")
    for shape, kind in re.findall(r"= \(?(\w+\[[\d,]*\])\S* (all-reduce|all-gather)", text):
        RESULTS.row("Collectives of a step", operation=kind, to=shape)
        print(f"  {kind} to {shape}")


def main(argv: Sequence[str] | None = None) -> None:
    """Runs what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=("update", "pca", "communication"))
    parser.add_argument("--repetitions", type=int, default=101)
    parser.add_argument("--smallest", action="store_true", help="all of it, in seconds")
    results.add_argument(parser)
    arguments = parser.parse_args(argv)
    is_small = arguments.smallest
    parts = {
        # First, so that the highest memory is its own.
        "pca": lambda: pca(6, 2_000, 3) if is_small else pca(),
        "update": lambda: update(2, 2_000, 4) if is_small else update(arguments.repetitions),
        "communication": lambda: communication(100, 4, 2) if is_small else communication(),
    }
    for name, measure in parts.items():
        if arguments.only in (None, name):
            measure()
    RESULTS.write(arguments.json)


if __name__ == "__main__":
    main()
