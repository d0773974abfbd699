"""Gain and cost of training in the subspace of a trajectory.

- images: DLDR with SGD, Adam and averages. The network is an MLP on gray images (scikit-learn's digits
  by default), or a convolutional network (8, 16 and 32 channels) on color images. All methods take the
  same number of gradients; a trial of a line search counts as a third of a gradient. SGD with momentum,
  with gradients clipped to norm 1, and Adam have a rate that falls to 0 by a cosine. SWA is the mean of
  ten snapshots from the last quarter of SGD at a constant rate, and EMA is the exponential mean of its
  params over a tenth of the steps. `dldr` runs SGD for two thirds of the steps, with 41 snapshots; then
  the second phase begins, in 20 dimensions (41 for `twa`). The labels are all right, few, or partly
  random: a fraction of 0.2 is drawn at random, as in the scripts of DLDR's authors. Each method takes
  the hyperparameters of its grid that are best on a validation split, whose labels are as wrong as the
  others, with one seed and a third of the steps. Seconds are the processor seconds of a training run,
  without compilation;
- update: one update of `dim_reduce` without its loss evaluations, over the two matrix products that it
  needs;
- pca: `pca_basis` beside the same algorithm by hand in NumPy and scikit-learn's PCA: time, principal
  angles and orthogonality against a float64 decomposition, and memory in addition to the snapshots;
- communication: the collectives of one step on four devices, from the compiled program.

    python benchmarks/subspace.py [--only PART ...] [--data mnist.npz] [--json FILE]
"""

import argparse
import functools
import itertools
import re
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import images
import jax
import jax.numpy as jnp
import numpy as np
import optax
import results
from sklearn.decomposition import PCA
from timing import seconds, take_turns

import optperm

RESULTS = results.Results()


# Images.
SNAPSHOTS = 40


def momentum(rate: Any) -> optax.GradientTransformation:
    """SGD with momentum and clipped gradients."""
    return optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(rate, momentum=0.9))


def swa(steps: int, rate: Any) -> optax.GradientTransformation:
    """Keep ten snapshots of the last quarter."""
    return optax.chain(momentum(rate), optperm.record_trajectory(max(steps // 40, 1), 10))


def mean_of_snapshots(_: Any, state: Any) -> Any:
    """Return their mean."""
    snapshots, count = optperm.subspace.trajectory(state)
    return jax.tree.map(lambda rows: jnp.sum(rows, axis=0) / count, snapshots)


def ema(steps: int, rate: Any) -> optax.GradientTransformation:
    """Keep an exponential mean of the params."""

    def follow(updates: Any, mean: Any, params: Any) -> Any:
        return updates, optax.incremental_update(params, mean, min(10 / steps, 1.0))

    follower = optax.GradientTransformation(lambda p: jax.tree.map(jnp.copy, p), follow)
    return optax.chain(momentum(rate), follower)


def after_sgd(second: Callable[..., Any], restart: Any = "last") -> Callable[..., Any]:
    """Make `dldr` from a second phase by its snapshots, its steps and its numbers."""

    def make(steps: int, rate: Any, *numbers: Any) -> optax.GradientTransformation:
        every = max(2 * steps // 3 // SNAPSHOTS, 1)
        m = min(SNAPSHOTS, 2 * steps // 3 // every) + 1
        then = second(m, steps - (m - 1) * every, *numbers)
        return optperm.dldr(momentum(rate), then, every=every, num_snapshots=m, restart=restart)

    return make


def falling(optimizer: Callable[..., Any]) -> Callable[..., Any]:
    """Give an optimizer a rate that falls to 0."""
    return lambda steps, rate: optimizer(optax.cosine_decay_schedule(rate, steps))


cosine = falling(momentum)
PAPER = {"rho": 0.4, "alpha": 0.0, "max_search_steps": 20, "line_search": "mindspore"}
RATES, ALPHAS = (0.03, 0.1, 0.3), (0.0, 0.003, 0.03)
ONE = ((0.01, *RATES),)
# By name: from the steps and numbers to an optimizer, the grids of the numbers, and from params and the
# optimizer's state to what it has found.
METHODS: dict[str, tuple[Any, ...]] = {
    "SGD, cosine": (cosine, ONE),
    "Adam, cosine": (falling(optax.adam), ((1e-3, 3e-3, 1e-2, 3e-2),)),
    "SWA": (swa, ONE, mean_of_snapshots),
    "EMA": (ema, ONE, lambda _, state: state[-1]),
    "dldr, dim_reduce": (
        after_sgd(lambda m, _, alpha: optperm.dim_reduce(n_components=m // 2, alpha=alpha)),
        (RATES, ALPHAS),
    ),
    "dldr, the paper's P-BFGS": (
        after_sgd(lambda m, _: optperm.dim_reduce(n_components=m // 2, **PAPER), "first"),
        ONE,
    ),
    "dldr, project": (
        after_sgd(lambda m, rest, rate: optperm.project(cosine(rest, rate), n_components=m // 2)),
        (RATES, RATES),
    ),
    "dldr, twa": (
        after_sgd(lambda m, rest, rate: optperm.twa(cosine(rest, rate), n_components=m), "mean"),
        (RATES, RATES),
    ),
}


def trials_of(state: Any) -> jax.Array:
    """How often the last step evaluated the loss."""

    def is_search(node: Any) -> bool:
        return isinstance(node, optperm.subspace.DimReduceState)

    found = jax.tree.leaves(state, is_leaf=is_search)
    return sum((node.num_trials for node in found if is_search(node)), start=jnp.int32(0))


@functools.partial(jax.jit, static_argnames=("name", "steps"))
def trained(name: str, steps: int, numbers: Any, params: Any, batches: Any) -> Any:
    """Train while the budget of gradients lasts: one program for all numbers and seeds."""
    make, _, *ends = METHODS[name]
    tx = optax.with_extra_args_support(make(steps, *numbers))

    def has_budget(carry: Any) -> jax.Array:
        return carry[2] + 1 <= steps

    def step(carry: Any) -> Any:
        params, state, spent, t = carry
        batch = jax.tree.map(lambda leaf: leaf[t], batches)
        e = optperm.evaluate(images.loss_fn, params, batch)
        updates, state = tx.update(e.grad, state, params, **e.extra_args)
        params = optperm.apply_updates(params, updates, state)
        return params, state, spent + 1 + trials_of(state) / 3, t + 1

    start = params, tx.init(params), jnp.float32(0.0), jnp.int32(0)
    params, state, *_ = jax.lax.while_loop(has_budget, step, start)
    return ends[0](params, state) if ends else params


def compare_images(title: str, options: argparse.Namespace, train: Any, test: Any) -> None:
    """Show a row for each method."""
    for name in options.methods:
        spent = []

        def fit(
            numbers: Any, seed: int, steps: int, data: Any, name: str = name, spent: Any = spent
        ) -> Any:
            chosen = images.batches(len(data[0]), options.batch, steps, seed)
            batches = tuple(leaf[chosen] for leaf in data)
            params = images.initial(seed, data[0].shape[1:], channels=(8, 16, 32))
            start = time.process_time()
            params = jax.block_until_ready(trained(name, steps, numbers, params, batches))
            spent.append(time.process_time() - start)
            return params

        best, tried = images.tune(itertools.product(*METHODS[name][1]), fit, options.steps, train)
        spent.clear()
        nets = [fit(best, seed, options.steps, train) for seed in range(options.seeds)]
        right = images.spread([images.accuracy(params, test) for params in nets])
        of = optax.softmax_cross_entropy_with_integer_labels
        x, y = (leaf[:5_000] for leaf in train)
        loss = images.spread([float(of(images.predict(net, x), y).mean()) for net in nets])
        RESULTS.show(
            title,
            method=name,
            test_accuracy=right,
            training_loss=loss,
            seconds=f"{min(spent):.3f}",
            numbers=images.text(best),
            validation_of_the_grid=images.shown(tried),
        )
        RESULTS.write(options.json)


# Costs.
def measure_update(repetitions: int, n: int = 2_000_000, k: int = 32) -> None:
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
    ratios = [each(times["update"]) / each(times["products"]) for each in (statistics.median, min)]
    cells = {"params": f"{n:,}", "k": k, "ratio": f"{ratios[0]:.2f}"}
    RESULTS.show("The update over its two matrix products", **cells)
    print(f"    of the least times {ratios[1]:.2f}")


def trajectory(m: int, n: int) -> jax.Array:
    """Return snapshots of a walk whose steps shrink, as in training."""

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


def measure_pca(m: int = 60, n: int = 2_000_000, k: int = 40) -> None:
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
    for name, taken, rows in (
        ("pca_basis", 1e3 * statistics.median(times["ours"]), np.asarray(basis)),
        ("NumPy by hand", 1e3 * statistics.median(times["by hand"]), by_hand(plain, k)),
        ("scikit-learn", peer_time, peer.components_),
    ):
        RESULTS.show("The basis", by=name, ms=f"{taken:.0f}", quality=quality(rows, exact))
    extra = f"{(highest - before) / size:.2f}"
    RESULTS.show("Memory of pca_basis beside the snapshots", times_theirs=extra)


def show_collectives(n: int = 100_000, k: int = 32, replicas: int = 4) -> None:
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
    for shape, kind in re.findall(r"= \(?(\w+\[[\d,]*\])\S* (all-reduce|all-gather)", text):
        RESULTS.show("Collectives of a step", operation=kind, to=shape)


PARTS = ("pca", "update", "communication", "images")  # pca first: the highest memory is its own


def main() -> None:
    """Run the parts that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    images.add_arguments(parser)
    kinds, add = ["right", "few", "wrong"], parser.add_argument
    add("--only", nargs="+", choices=PARTS, default=PARTS)
    add("--repetitions", type=int, default=101, help="for update")
    add("--smallest", action="store_true", help="pca, update and communication in seconds")
    add("--labels", nargs="+", choices=kinds, default=kinds)
    add("--few", type=int, default=100, help="how many are few")
    add("--wrong", type=float, default=0.2, help="the fraction drawn at random")
    add("--steps", type=int, default=300)
    add("--batch", type=int, default=64)
    add("--seeds", type=int, default=3)
    add("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    results.add_argument(parser)
    options = parser.parse_args()
    small = options.smallest
    jax.config.update("jax_num_cpu_devices", 4)
    if "pca" in options.only:
        measure_pca(*((6, 2_000, 3) if small else ()))
    if "update" in options.only:
        measure_update(*((2, 2_000, 4) if small else (options.repetitions,)))
    if "communication" in options.only:
        show_collectives(*((100, 4, 2) if small else ()))
    if "images" in options.only:
        source, (x, y), test = images.load(options.data, options.examples)
        rng = np.random.default_rng(0)
        is_drawn = rng.random(len(y)) < options.wrong
        wrong, few = jnp.where(is_drawn, rng.integers(0, 10, len(y)), y), options.few
        random = f"{len(x)} images, {options.wrong:.0%} of the labels drawn at random"
        sets = {
            "right": ((x, y), f"{len(x)} images"),
            "few": ((x[:few], y[:few]), f"{few} images"),
            "wrong": ((x, wrong), random),
        }
        for kind in options.labels:
            train, shown = sets[kind]
            steps = f"{options.steps} steps of {options.batch}, {options.seeds} seeds"
            compare_images(f"{source}, {shown}, {steps}", options, train, test)
    RESULTS.write(options.json)


if __name__ == "__main__":
    main()
