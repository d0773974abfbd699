"""Cost of DimReduce's update, of its basis and of its communication, and what subspaces gain.

Prints, each measured beside a peer in the same run and in turns:

- one update without its loss evaluations, against the two matrix products that it needs, and the loss
  evaluations that it makes;
- `pca_basis` against the same written by hand in NumPy and against scikit-learn's PCA: time, principal
  angles and orthogonality against a float64 decomposition, and memory beside the snapshots;
- the collectives of one step on 4 devices, from the compiled program;
- the training loss and test accuracy of an MLP on the digits after as many gradients of single examples,
  by SGD, Adam, averaged snapshots (SWA), and SGD with each of the subspace optimizers after it, all at
  their best rates of a grid.

    python benchmarks/dim_reduce.py [--only update|pca|communication|digits] [--repetitions 101]
        [--seeds 5] [--smallest] [--json FILE]
"""

import argparse
import functools
import itertools
import os
import re
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

# Has to stand before JAX starts its CPU backend.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
)

import jax
import jax.numpy as jnp
import numpy as np
import optax
import results
from sklearn.datasets import load_digits
from sklearn.decomposition import PCA

import optperm

Params = dict[str, jax.Array]
RESULTS = results.Results()


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
    for _ in range(repetitions + 3):  # of which three warm up
        times["products"].append(milliseconds(lambda: products(basis, grads)))
        times["update"].append(milliseconds(whole))
    median = {name: statistics.median(taken[3:]) for name, taken in times.items()}
    least = {name: min(taken) for name, taken in times.items()}
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
    basis = jax.block_until_ready(optperm.pca_basis(snapshots, k))
    _, highest = memory()
    size, plain = snapshots.nbytes / 1e6, np.asarray(snapshots)
    times: dict[str, list[float]] = {"ours": [], "by hand": []}
    for _ in range(5):
        times["ours"].append(milliseconds(lambda: optperm.pca_basis(snapshots, k)))
        times["by hand"].append(milliseconds(lambda: by_hand(plain, k)))
    peer = PCA(k, random_state=0)
    peer_time = milliseconds(lambda: peer.fit(plain))
    wide = plain.astype(np.float64)
    wide -= wide.mean(axis=0)
    _, values, exact = np.linalg.svd(wide, full_matrices=False)
    exact, spread = exact[:k], values[0] / values[k - 1]
    print(f"PCA, {m} x {n} float32, k = {k}, singular values over a factor of {spread:.0f}")
    ours, theirs = statistics.median(times["ours"]), statistics.median(times["by hand"])
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
        return optax.apply_updates(params, updates), opt_state

    step = jax.pmap(step, axis_name="replica", devices=devices)
    text = step.lower(params, opt_state, params).compile().as_text()
    print(f"collectives of a step on {replicas} devices, n = {n}, k = {k}")
    for shape, kind in re.findall(r"= \(?(\w+\[[\d,]*\])\S* (all-reduce|all-gather)", text):
        RESULTS.row("Collectives of a step", operation=kind, to=shape)
        print(f"  {kind} to {shape}")


def batches_of(data: tuple[np.ndarray, np.ndarray], size: int, epochs: int, seed: int) -> Any:
    """Shuffled batches of all epochs, stacked."""
    rng, steps = np.random.default_rng(seed), len(data[0]) // size
    order = np.concatenate([rng.permutation(len(data[0]))[: steps * size] for _ in range(epochs)])
    return tuple(each[order].reshape(-1, size, *each.shape[1:]) for each in data)


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


def accuracy(params: Params, data: tuple[Any, Any]) -> jax.Array:
    """The share of the examples that are classified right."""
    x, y = data
    hidden = jax.nn.relu(x @ params["w1"] + params["b1"])
    return jnp.mean((hidden @ params["w2"] + params["b2"]).argmax(axis=1) == y)


def trials_of(opt_state: Any) -> jax.Array:
    """How often the last step evaluated the loss."""

    def is_search(node: Any) -> bool:
        return isinstance(node, optperm.DimReduceState)

    found = jax.tree.leaves(opt_state, is_leaf=is_search)
    return sum((node.num_trials for node in found if is_search(node)), start=jnp.int32(0))


@functools.partial(jax.jit, static_argnums=(0, 1))
def train(make: Any, budget: int, rates: jax.Array, params: Params, batches: Any) -> Any:
    """Trains on batches in turn while the budget lasts, in gradients of a batch.

    A gradient counts as one, and a trial of a line search as a third of it. Returns the params and the
    optimizer state at the end.
    """
    tx = optax.with_extra_args_support(make(*rates))

    def has_budget(carry: Any) -> jax.Array:
        return carry[2] + 1 <= budget

    def step(carry: Any) -> Any:
        params, opt_state, spent, t = carry
        e = optperm.evaluate(loss_fn, params, jax.tree.map(lambda leaf: leaf[t], batches))
        updates, opt_state = tx.update(e.grad, opt_state, params, **e.extra_args)
        params = optperm.apply_updates(params, updates, opt_state)
        return params, opt_state, spent + 1 + trials_of(opt_state) / 3, t + 1

    start = params, tx.init(params), jnp.float32(0.0), jnp.int32(0)
    return jax.lax.while_loop(has_budget, step, start)[:2]


# The rates of SGD, of SGD with momentum and of Adam, and dim_reduce's alpha.
RATES = (0.1, 0.3, 1.0, 3.0)
SMALLER = (0.1, 0.3, 1.0, 3.0)
ADAM = (0.01, 0.03, 0.1, 0.3)
RESIDUAL = (0.0, 0.01, 0.1, 1.0)


def methods(steps: int, sampling: int, every: int, k: int) -> dict[str, tuple[Any, Any]]:
    """Each method of the table: from its rates to an optimizer, and the grid of each rate.

    Args:
      steps: The budget, in gradients of batches.
      sampling: After how many steps the second phases begin.
      every: The steps from one snapshot to the next.
      k: The dimensions of the subspaces.
    """
    m = sampling // every + 1

    def momentum(rate: Any, over: int) -> Any:
        return optax.sgd(optax.cosine_decay_schedule(rate, over), momentum=0.9)

    def then(second: Any, restart: Any = "last") -> Any:
        def make(rate: Any, *others: Any) -> Any:
            return optperm.dldr(
                optax.sgd(rate),
                second(*others),
                sample_every=every,
                num_samples=m,
                restart=restart,
            )

        return make

    def reduced(**options: Any) -> Any:
        return lambda alpha: optperm.dim_reduce(n_components=k, alpha=alpha, **options)

    paper = {"rho": 0.4, "max_search_steps": 20, "line_search": "mindspore"}
    rest = steps - sampling
    averaged = optperm.record_trajectory(every, m)
    return {
        "SGD": (optax.sgd, (RATES,)),
        "SGD, rate to 0 by a cosine": (
            lambda rate: optax.sgd(optax.cosine_decay_schedule(rate, steps)),
            (RATES,),
        ),
        "the same with momentum 0.9": (lambda rate: momentum(rate, steps), (SMALLER,)),
        "Adam, rate to 0 by a cosine": (
            lambda rate: optax.adam(optax.cosine_decay_schedule(rate, steps)),
            (ADAM,),
        ),
        "SWA, mean of SGD's last snapshots": (
            lambda rate: optax.chain(optax.sgd(rate), averaged),
            (RATES,),
        ),
        "SGD, then dim_reduce": (then(reduced()), (RATES, RESIDUAL)),
        "SGD, then dim_reduce, mindspore": (
            then(reduced(line_search="mindspore")),
            (RATES, RESIDUAL),
        ),
        "SGD, then the paper's P-BFGS": (then(reduced(**paper), "first"), (RATES, (0.0,))),
        "SGD, then project": (
            then(lambda rate: optperm.project(k, momentum(rate, rest))),
            (RATES, SMALLER),
        ),
        "SGD, then twa": (
            then(lambda rate: optperm.twa(m, momentum(rate, rest)), "mean"),
            (RATES, SMALLER),
        ),
    }


def digits(seeds: int, epochs: int = 12, size: int = 1257, batch: int = 64, k: int = 10) -> None:
    """Every method with as many gradients, at its best rates of a grid, on several seeds."""
    x, y = load_digits(return_X_y=True)
    x, y = (x / 16).astype(np.float32), y.astype(np.int32)
    data, test = (x[:size], y[:size]), (x[1257:], y[1257:])
    steps = epochs * (size // batch)
    every = max(2 * steps // 3 // (2 * k), 1)
    sampling = 2 * k * every
    print(
        f"digits, MLP of 64 hidden units: {epochs} epochs' gradients of {size} examples, batches of "
        f"{batch}, a trial of a line search\nfor a third of a gradient; of two phases the first takes "
        f"{sampling} of {steps} steps and {2 * k + 1} snapshots, k = {k}.\nTraining loss at the end and "
        f"test accuracy, mean of {seeds} seeds (least, most), at the best of the rates (first phase, "
        "then\nsecond phase; of dim_reduce alpha, that of the residual)\n"
    )
    starts = [(initial(seed), batches_of(data, batch, epochs, seed)) for seed in range(seeds)]
    for name, (make, grids) in methods(steps, sampling, every, k).items():
        found = {}
        for rates in itertools.product(*grids):
            ends = []
            for params, batches in starts:
                end, opt_state = train(make, steps, jnp.array(rates), params, batches)
                if name.startswith("SWA"):
                    snapshots, _ = optperm.trajectory(opt_state)
                    end = jax.tree.map(lambda s: jnp.mean(s, axis=0), snapshots)
                ends.append((float(loss_fn(end, data)), float(accuracy(end, test))))
            found[rates] = np.array(ends)
        best = min(found, key=lambda rates: np.nan_to_num(found[rates][:, 0], nan=np.inf).mean())
        (loss, right), (least, most) = found[best].mean(axis=0), np.sort(found[best][:, 0])[[0, -1]]
        grid = " x ".join("{" + ", ".join(f"{rate:g}" for rate in each) + "}" for each in grids)
        chosen = ", ".join(f"{rate:g}" for rate in best)
        spread = f"{loss:.4f} ({least:.4f}, {most:.4f})"
        cells = {"training_loss": spread, "test_accuracy": f"{right:.3f}", "rates": chosen}
        RESULTS.row("Digits", method=name, **cells)
        print(f"  {name:34s} {spread}  {right:.3f}  at {chosen} of {grid}")


def main(argv: Sequence[str] | None = None) -> None:
    """Runs what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=("update", "pca", "communication", "digits"))
    parser.add_argument("--repetitions", type=int, default=101)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--smallest", action="store_true", help="all of it, in seconds")
    results.add_argument(parser)
    arguments = parser.parse_args(argv)
    is_small = arguments.smallest
    parts = {
        # First, so that the highest memory is its own.
        "pca": lambda: pca(6, 2_000, 3) if is_small else pca(),
        "update": lambda: update(2, 2_000, 4) if is_small else update(arguments.repetitions),
        "communication": lambda: communication(100, 4, 2) if is_small else communication(),
        "digits": lambda: digits(1, 2, 128, 32, 2) if is_small else digits(arguments.seeds),
    }
    for name, measure in parts.items():
        if arguments.only in (None, name):
            measure()
    RESULTS.write(arguments.json)


if __name__ == "__main__":
    main()
