"""A convex problem of the size of MNIST: stochastic and full-batch methods, by passes and by seconds.

The problem is softmax regression with an L2 penalty, in float64. The methods are SVRG with the rate that
`optperm.svrg_learning_rate` finds, loopless Katyusha with the same rate, `optax.lbfgs`, and
scikit-learn's `saga` and `lbfgs`. The script prints the passes over all examples (gradients of single
examples over their number) and the processor seconds until the loss is within 1e-3, 1e-6 and 1e-9 of the
lowest loss that was found. The seconds include neither compilation nor the evaluations of the loss for
this table. scikit-learn's runs start again with 1, 2, 4, ... iterations, so their figures are powers of
two.

The part `rates` prints, on five problems, the loss of SVRG at multiples of the rate that was found.

    python benchmarks/convex.py --data mnist.npz [--examples 20000] [--l2 1e-4] [--json FILE]
"""

import argparse
import pathlib
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import images
import jax
import jax.numpy as jnp
import numpy as np
import optax
import results
from sklearn.datasets import load_breast_cancer, load_diabetes, load_digits
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from svrg import Problem, _lbfgs_trail

import optperm

RESULTS = results.Results()
SUBOPTIMALITIES = (1e-3, 1e-6, 1e-9)
FACTORS = tuple(2.0**k for k in range(-3, 5))
Trail = Iterator[tuple[float, float, float]]


def softmax(x: np.ndarray, y: np.ndarray, l2: float) -> Problem:
    """Softmax regression with an L2 penalty."""

    def loss_fn(w: jax.Array, batch: Any) -> jax.Array:
        losses = optax.softmax_cross_entropy_with_integer_labels(batch["x"] @ w, batch["y"])
        return jnp.mean(losses) + 0.5 * l2 * jnp.sum(w**2)

    start = jnp.zeros((x.shape[1], int(y.max()) + 1))
    data = {"x": jnp.asarray(x, float), "y": jnp.asarray(y, jnp.int32)}
    return Problem(loss_fn, lambda _: start, data, {})


def ridge(x: np.ndarray, y: np.ndarray, l2: float) -> Problem:
    """Ridge regression."""

    def loss_fn(w: jax.Array, batch: Any) -> jax.Array:
        squares = 0.5 * (batch["x"] @ w - batch["y"]) ** 2
        return jnp.mean(squares) + 0.5 * l2 * jnp.sum(w**2)

    start = jnp.zeros(x.shape[1])
    data = {"x": jnp.asarray(x, float), "y": jnp.asarray(y, float)}
    return Problem(loss_fn, lambda _: start, data, {})


def svrg_runner(
    problem: Problem, batch_size: int
) -> Callable[[float, jax.Array, Any, jax.Array], tuple[jax.Array, Any]]:
    """A function from a rate, params, a state (None at first) and batches of indices to both after."""
    every = 2 * (len(problem.data["y"]) // batch_size)

    def full_grad_fn(w: jax.Array) -> jax.Array:
        return jax.grad(problem.loss_fn)(w, problem.data)

    @jax.jit
    def run(rate: float, w: jax.Array, state: Any, batches: jax.Array) -> tuple[jax.Array, Any]:
        tx = optax.chain(optperm.svrg(refresh_every=every), optax.sgd(rate))

        def step(carry: Any, indices: jax.Array) -> tuple[Any, None]:
            w, state = carry
            batch = jax.tree.map(lambda leaf: leaf[indices], problem.data)
            e = optperm.evaluate(problem.loss_fn, w, batch)
            updates, state = tx.update(e.grad, state, w, full_grad_fn=full_grad_fn, **e.extra_args)
            return (optax.apply_updates(w, updates), state), None

        return jax.lax.scan(step, (w, tx.init(w) if state is None else state), batches)[0]

    return run


def epoch(n: int, batch_size: int, rng: np.random.Generator) -> jax.Array:
    """Batches of indices, a shuffle of all examples."""
    return jnp.asarray(rng.permutation(n)[: n // batch_size * batch_size].reshape(-1, batch_size))


def svrg_trail(problem: Problem, passes: int, batch_size: int, rate: float, spent: float) -> Trail:
    """Two passes of steps, of two gradients each, for each full gradient."""
    n, rng, run = len(problem.data["y"]), np.random.default_rng(0), svrg_runner(problem, batch_size)
    w, state, taken = problem.init(0), None, 0.0
    first = epoch(n, batch_size, rng)
    _, began = run(rate, w, None, first[:1])
    jax.block_until_ready(run(rate, w, began, first))  # compiled
    jax.block_until_ready(run(rate, w, None, first))
    while taken < passes:
        for index in range(2):
            start = time.process_time()
            w, state = jax.block_until_ready(run(rate, w, state, epoch(n, batch_size, rng)))
            spent += time.process_time() - start
            taken += 2.0 if index else 3.0
        yield taken, spent, float(problem.loss_fn(w, problem.data))


def katyusha_trail(
    problem: Problem, passes: int, batch_size: int, rate: float, spent: float, l2: float
) -> Trail:
    """Loopless Katyusha (Kovalev, Horvath and Richtarik, 2020), with L = 1 / rate and mu = l2."""
    n, rng, grad = len(problem.data["y"]), np.random.default_rng(0), jax.grad(problem.loss_fn)
    p, sigma, second = batch_size / (2 * n), l2 * rate, 0.5
    first = min(np.sqrt(2 * sigma / (3 * p)), 0.5)
    eta = second / ((1 + second) * first)

    def step(carry: Any, at: Any) -> tuple[Any, None]:
        (y, z, w, mu, refreshes), (indices, is_refresh) = carry, at
        batch = jax.tree.map(lambda leaf: leaf[indices], problem.data)
        x = first * z + second * w + (1 - first - second) * y
        g = grad(x, batch) - grad(w, batch) + mu
        new_z = (eta * sigma * x + z - eta * rate * g) / (1 + eta * sigma)
        w, mu = jax.lax.cond(is_refresh, lambda: (y, grad(y, problem.data)), lambda: (w, mu))
        return (x + first * (new_z - z), new_z, w, mu, refreshes + is_refresh), None

    run = jax.jit(lambda carry, at: jax.lax.scan(step, carry, at)[0])
    w, taken = problem.init(0), 0.0
    carry = (w, w, w, jax.jit(grad)(w, problem.data), jnp.int32(1))
    jax.block_until_ready(run(carry, (epoch(n, batch_size, rng), jnp.zeros(n // batch_size, bool))))
    while taken + float(carry[-1]) < passes:
        at = epoch(n, batch_size, rng), jnp.asarray(rng.random(n // batch_size) < p)
        start = time.process_time()
        carry = jax.block_until_ready(run(carry, at))
        spent += time.process_time() - start
        taken += 2.0
        yield taken + float(carry[-1]), spent, float(problem.loss_fn(carry[0], problem.data))


def lbfgs_trail(problem: Problem, passes: int) -> Trail:
    """The steps of `optax.lbfgs`; the seconds of its compilation are left out."""
    for _ in _lbfgs_trail(problem, 3):
        pass
    start, compiled = time.process_time(), None
    for taken, loss in _lbfgs_trail(problem, passes):
        compiled = time.process_time() - start if compiled is None or taken < 3 else compiled
        yield float(taken), time.process_time() - start - compiled, loss


def scikit_trail(problem: Problem, passes: int, solver: str, l2: float) -> Trail:
    """Fits with 1, 2, 4, ... iterations."""
    x, y = np.asarray(problem.data["x"]), np.asarray(problem.data["y"])
    count = 1
    while count <= passes:
        model = LogisticRegression(
            solver=solver, C=1 / (len(y) * l2), fit_intercept=False, tol=1e-14, max_iter=count
        )
        start = time.process_time()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            model.fit(x, y)
        spent = time.process_time() - start
        w = model.coef_.T
        w = np.concatenate([-w, w], axis=1) / 2 if w.shape[1] == 1 else w
        yield float(count), spent, float(problem.loss_fn(jnp.asarray(w), problem.data))
        count *= 2


def compare(problem: Problem, l2: float, arguments: argparse.Namespace) -> None:
    """Print the table of a problem."""
    n = len(problem.data["y"])
    trails: dict[str, Any] = {
        "optax.lbfgs": list(lbfgs_trail(problem, arguments.passes)),
        "scikit-learn, lbfgs": list(scikit_trail(problem, arguments.passes, "lbfgs", l2)),
        "scikit-learn, saga": list(scikit_trail(problem, arguments.saga_passes, "saga", l2)),
    }
    for batch_size in arguments.batch_sizes:
        start = time.process_time()
        rate = arguments.factor * optperm.svrg_learning_rate(
            problem.loss_fn, problem.init(0), problem.data, batch_size
        )
        spent = time.process_time() - start
        run = problem, arguments.svrg_passes, batch_size, rate, spent
        shown = f"batches of {batch_size}, rate {rate:.3g}"
        trails[f"svrg, {shown}"] = list(svrg_trail(*run))
        trails[f"loopless Katyusha, {shown}"] = list(katyusha_trail(*run, l2))
    lowest = min(loss for trail in trails.values() for _, _, loss in trail if np.isfinite(loss))
    title = f"Softmax regression, {n} examples, L2 {l2:.3g}"
    print(f"\n{title}: passes and seconds to within ... of {lowest:.9f}")
    for name, trail in trails.items():
        cells = {}
        for wanted in SUBOPTIMALITIES:
            found = next((row for row in trail if row[2] - lowest <= wanted), None)
            cells[f"to {wanted:g}"] = "-" if found is None else f"{found[0]:g}: {found[1]:.2f} s"
        cells["at the end"] = f"{trail[-1][2] - lowest:.1e} after {trail[-1][0]:g}"
        RESULTS.row(title, method=name, **cells)
        print(f"  {name:48}", "  ".join(f"{k} {v}" for k, v in cells.items()), flush=True)


def five_problems(pictures: tuple[np.ndarray, np.ndarray]) -> Iterator[tuple[str, Problem]]:
    """Problems that differ in their scales and in how alike their examples are."""
    x, y = load_breast_cancer(return_X_y=True)
    yield "breast cancer", softmax((x - x.mean(axis=0)) / x.std(axis=0), y, 1 / len(x))
    yield "breast cancer, raw", softmax(x, y, 1 / len(x))
    x, y = load_digits(return_X_y=True)
    yield "digits", softmax(x / 16, y, 1 / len(x))
    x, y = load_diabetes(return_X_y=True)
    yield "diabetes, ridge", ridge(x / x.std(axis=0), (y - y.mean()) / y.std(), 1 / len(x))
    yield "images", softmax(*pictures, 1e-4)


def compare_rates(
    pictures: tuple[np.ndarray, np.ndarray], passes: int, batch_sizes: list[int]
) -> None:
    """Print, for each problem, the loss of SVRG by the multiple of the rate that was found."""
    for name, problem in five_problems(pictures):
        n = len(problem.data["y"])
        for batch_size in batch_sizes:
            rate = optperm.svrg_learning_rate(
                problem.loss_fn, problem.init(0), problem.data, batch_size
            )
            run, losses = svrg_runner(problem, batch_size), {}
            for factor in FACTORS:
                rng = np.random.default_rng(0)
                batches = jnp.concatenate([epoch(n, batch_size, rng) for _ in range(passes)])
                w, _ = run(factor * rate, problem.init(0), None, batches)
                losses[factor] = float(problem.loss_fn(w, problem.data))
            best = min(losses, key=lambda factor: (np.isnan(losses[factor]), losses[factor]))
            cells = {f"{factor:g}": f"{loss:.6g}" for factor, loss in losses.items()}
            RESULTS.row(
                f"Loss of SVRG after {passes} passes of steps by the multiple of the rate found",
                problem=f"{name}, batches of {batch_size}",
                rate=f"{rate:.3g}",
                best=f"{best:g}",
                **cells,
            )
            print(f"{name}, batches of {batch_size}, {rate:.3g}: best {best:g};", cells, flush=True)


def main() -> None:
    """Runs the parts that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=pathlib.Path, help="an npz; without, 8 x 8 digits")
    parser.add_argument("--only", nargs="+", choices=["table", "rates"], default=["table", "rates"])
    parser.add_argument("--examples", type=int, nargs="+", default=[20_000])
    parser.add_argument("--l2", type=float, nargs="+", default=[1e-4], help="0 for 1/n")
    parser.add_argument("--passes", type=int, default=1000, help="of L-BFGS")
    parser.add_argument("--saga-passes", type=int, default=128)
    parser.add_argument("--svrg-passes", type=int, default=200)
    parser.add_argument("--rate-passes", type=int, default=20)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--factor", type=float, default=1.0, help="times the rate that is found")
    results.add_argument(parser)
    arguments = parser.parse_args()
    _, (x, y), _ = images.load(arguments.data)
    x, y = np.asarray(x, float).reshape(len(x), -1), np.asarray(y)
    with jax.enable_x64(True):
        if "rates" in arguments.only:
            compare_rates((x[:2000], y[:2000]), arguments.rate_passes, arguments.batch_sizes)
            RESULTS.write(arguments.json)
        for size in arguments.examples if "table" in arguments.only else ():
            for l2 in arguments.l2:
                penalty = l2 or 1 / size
                compare(softmax(x[:size], y[:size], penalty), penalty, arguments)
                RESULTS.write(arguments.json)


if __name__ == "__main__":
    main()
