"""Cost of DimReduce's update, of its basis and of its communication, and what two epochs of it gain.

Prints, each measured beside a peer in the same run and in turns:

- one update without its loss evaluations, against the two matrix products that it needs, and the loss
  evaluations that it makes;
- `pca_basis` against scikit-learn's PCA: time, principal angles and orthogonality against a float64
  decomposition, and memory beside the snapshots;
- the collectives of one step on 4 devices, from the compiled program;
- the training loss of an MLP on the digits after SGD and two more epochs of SGD, of SGD with a decayed
  rate, of DimReduce, and after averaging the snapshots.

    python benchmarks/dim_reduce.py [--only update|pca|communication|digits] [--repetitions 101]
"""

import argparse
import os
import re
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

# Has to stand before JAX starts its CPU backend.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
)

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits
from sklearn.decomposition import PCA

import optperm

Params = dict[str, jax.Array]


def milliseconds(function: Callable[[], object]) -> float:
    """Wall time of one call."""
    start = time.perf_counter()
    jax.block_until_ready(function())
    return 1e3 * (time.perf_counter() - start)


def update(repetitions: int, n: int = 2_000_000, k: int = 32) -> None:
    """Times one jitted update, its state donated, and the two products in one jitted function."""
    basis = jnp.linalg.qr(jax.random.normal(jax.random.key(0), (n, k)))[0].T
    grads, params = jax.random.normal(jax.random.key(1), (n,)), jnp.ones(n)
    tx = optperm.dim_reduce(n_components=k)
    state = optperm.set_basis(tx.init(params), basis)

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

    times: dict[str, list[float]] = {"update": [], "products": []}
    for _ in range(repetitions + 3):
        times["products"].append(milliseconds(lambda: products(basis, grads)))
        times["update"].append(milliseconds(whole))
    median = {name: statistics.median(taken[3:]) for name, taken in times.items()}
    least = {name: min(taken) for name, taken in times.items()}
    print(f"update, n = {n}, k = {k}, float32")
    print(f"  two products  {median['products']:8.2f} ms (least {least['products']:.2f})")
    print(f"  update        {median['update']:8.2f} ms (least {least['update']:.2f})")
    print(
        f"  ratio         {median['update'] / median['products']:8.2f}"
        f" (of the least {least['update'] / least['products']:.2f})"
    )


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


def pca(m: int = 60, n: int = 2_000_000, k: int = 40) -> None:
    """Compares the two, and a plain float32 Gram matrix."""
    snapshots = trajectory(m, n)
    before, _ = memory()
    basis = jax.block_until_ready(optperm.pca_basis(snapshots, k))
    _, highest = memory()
    size = snapshots.nbytes / 1e6
    times = [milliseconds(lambda: optperm.pca_basis(snapshots, k)) for _ in range(5)]
    plain = np.asarray(snapshots)
    peer_times = []
    for _ in range(2):
        peer = PCA(k, random_state=0)
        peer_times.append(milliseconds(lambda peer=peer: peer.fit(plain)))
    wide = plain.astype(np.float64)
    wide -= wide.mean(axis=0)
    _, values, exact = np.linalg.svd(wide, full_matrices=False)
    exact, spread = exact[:k], values[0] / values[k - 1]
    print(f"PCA, {m} x {n} float32, k = {k}, singular values over a factor of {spread:.0f}")
    ours, theirs = statistics.median(times), min(peer_times)
    print(f"  pca_basis     {ours:8.0f} ms, {quality(np.asarray(basis), exact)}")
    extra = (highest - before) / size
    print(f"    memory beside the snapshots, the basis included: {extra:.2f} times theirs")
    print(f"  scikit-learn  {theirs:8.0f} ms, {quality(peer.components_, exact)}")
    print(f"  ratio         {theirs / ours:8.1f}")


def communication(n: int = 100_000, k: int = 32, replicas: int = 4) -> None:
    """Lists the collectives of one step."""
    tx = optperm.dim_reduce(n_components=k, axis_name="replica")
    devices = jax.devices()[:replicas]
    params = jnp.ones((replicas, n))
    opt_state = jax.pmap(tx.init, axis_name="replica", devices=devices)(params)

    def step(params: jax.Array, opt_state: Any, batch: jax.Array) -> Any:
        e = optperm.evaluate(lambda p, b: jnp.sum((p - b) ** 2), params, batch)
        updates, opt_state = tx.update(e.grad, opt_state, params, **e.extra_args)
        return optax.apply_updates(params, updates), opt_state

    step = jax.pmap(step, axis_name="replica", devices=devices)
    text = step.lower(params, opt_state, params).compile().as_text()
    print(f"collectives of a step on {replicas} devices, n = {n}, k = {k}")
    for shape, kind in re.findall(r"= \(?(\w+\[[\d,]*\])\S* (all-reduce|all-gather)", text):
        print(f"  {kind} to {shape}")


def digits_batches(
    data: tuple[np.ndarray, np.ndarray], size: int, epochs: int, seed: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Shuffled batches."""
    x, y = data
    rng = np.random.default_rng(seed)
    for _ in range(epochs):
        order = rng.permutation(len(x))
        for begin in range(0, len(x) - size + 1, size):
            chosen = order[begin : begin + size]
            yield x[chosen], y[chosen]


def initial(seed: int, hidden: int = 64) -> Params:
    """An MLP's params."""
    first, second = jax.random.split(jax.random.key(seed))
    return {
        "w1": jax.random.normal(first, (64, hidden)) * 0.125,
        "b1": jnp.zeros(hidden),
        "w2": jax.random.normal(second, (hidden, 10)) * hidden**-0.5,
        "b2": jnp.zeros(10),
    }


def loss_fn(params: Params, batch: tuple[Any, Any]) -> jax.Array:
    """Mean cross-entropy."""
    x, y = batch
    hidden = jax.nn.relu(x @ params["w1"] + params["b1"])
    logits = hidden @ params["w2"] + params["b2"]
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, y))


def train(tx: Any, params: Params, opt_state: Any, batches: Iterator[Any]) -> tuple[Params, Any]:
    """All batches in turn."""

    @jax.jit
    def step(params: Params, opt_state: Any, batch: Any) -> tuple[Params, Any]:
        e = optperm.evaluate(loss_fn, params, batch)
        updates, opt_state = tx.update(e.grad, opt_state, params, **e.extra_args)
        return optax.apply_updates(params, updates), opt_state

    for batch in batches:
        params, opt_state = step(params, opt_state, batch)
    return params, opt_state


def digits(seeds: int = 5, epochs: int = 8, k: int = 10) -> None:
    """SGD to a mediocre point with a few snapshots an epoch, then two epochs of each."""
    x, y = load_digits(return_X_y=True)
    data = ((x / 16).astype(np.float32), y.astype(np.int32))
    found: dict[str, list[float]] = {}
    for seed in range(seeds):
        sampling = optax.chain(
            optax.sgd(0.1), optperm.record_trajectory(every=7, capacity=2 * epochs)
        )
        start = initial(seed)
        middle, state = train(
            optax.with_extra_args_support(sampling),
            start,
            sampling.init(start),
            digits_batches(data, 128, epochs, seed),
        )
        snapshots, count = optperm.trajectory(state)
        basis = optperm.pca_basis(snapshots, k, num_snapshots=count)
        ends = {"where SGD stands": middle}
        ends["mean of the snapshots"] = jax.tree.map(
            lambda s, count=count: jnp.mean(s[count // 2 : count], axis=0), snapshots
        )
        reduced = {
            "dim_reduce, defaults": optperm.dim_reduce(n_components=k),
            "dim_reduce, alpha = 0": optperm.dim_reduce(n_components=k, alpha=0.0),
            "dim_reduce, 20 trials": optperm.dim_reduce(n_components=k, max_search_steps=20),
            "dim_reduce, 20 trials, alpha = 0.01": optperm.dim_reduce(
                n_components=k, max_search_steps=20, alpha=0.01
            ),
        }
        others = {
            "SGD, rate 0.1": optax.sgd(0.1),
            "SGD, rate 0.01": optax.sgd(0.01),
            "SGD, rate 0.1 to 0": optax.sgd(optax.linear_schedule(0.1, 0.0, 28)),
        }
        for name, tx in (others | reduced).items():
            opt_state = tx.init(middle)
            if name in reduced:
                opt_state = optperm.set_basis(opt_state, basis)
            batches = digits_batches(data, 128, 2, 100 + seed)
            ends[name], _ = train(optax.with_extra_args_support(tx), middle, opt_state, batches)
        for name, params in ends.items():
            found.setdefault(name, []).append(float(loss_fn(params, data)))
    print(
        f"digits: {epochs} epochs of SGD, {2 * epochs} snapshots, k = {k}; then two more epochs of"
    )
    print(f"training loss, mean of {seeds} seeds (least, most):")
    for name, losses in found.items():
        print(f"  {name:36s} {statistics.mean(losses):.4f} ({min(losses):.4f}, {max(losses):.4f})")


def main() -> None:
    """Runs what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=("update", "pca", "communication", "digits"))
    parser.add_argument("--repetitions", type=int, default=101)
    arguments = parser.parse_args()
    parts = {
        "pca": pca,  # first, so that the highest memory is its own
        "update": lambda: update(arguments.repetitions),
        "communication": communication,
        "digits": digits,
    }
    for name, measure in parts.items():
        if arguments.only in (None, name):
            measure()


if __name__ == "__main__":
    main()
