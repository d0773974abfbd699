"""A convex problem of the size of MNIST: stochastic and full-batch methods, by passes and by seconds.

The problem is softmax regression with an L2 penalty, in float64. The methods are SVRG, before SGD and
before Nesterov's momentum, and loopless Katyusha, with the rate that
`optperm.variance.svrg_learning_rate` finds on `--rate-examples` of the examples, `optax.lbfgs`, and
scikit-learn's `saga` and `lbfgs`. The script prints the passes over all examples (gradients of
single examples over their number) and the processor seconds until the loss is within 1e-3, 1e-6 and
1e-9 of the lowest loss that was found. The seconds include the search for the rate, but neither
compilation of the steps nor the evaluations of the loss for this table. scikit-learn's runs start
again with 1, 2, 4, ... iterations, so their figures are powers of two.

The part `rates` prints, on five problems, the loss of SVRG and of Katyusha at multiples of the rate.

    python benchmarks/convex.py --data mnist.npz [--examples 20000] [--l2 1e-4] [--json FILE]
"""

import argparse
import functools
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


def make_optimizers(
    n: int, batch_size: int, l2: float
) -> dict[str, Callable[[float], optax.GradientTransformationExtraArgs]]:
    """The stochastic methods, each from a rate; they take a full gradient every two passes of steps."""
    svrg = optperm.svrg(every=2 * (n // batch_size))
    return {
        "svrg": lambda rate: optax.chain(svrg, optax.sgd(rate)),
        # Three times the steps of SGD, which were best on the digits
        "svrg, Nesterov momentum 0.9": lambda rate: optax.chain(
            svrg, optax.sgd(0.3 * rate, momentum=0.9, nesterov=True)
        ),
        "katyusha": lambda rate: optperm.katyusha(rate, l2, batch_size / (2 * n)),
    }


def make_runner(
    problem: Problem, make: Callable[[float], optax.GradientTransformationExtraArgs]
) -> Callable[[float, jax.Array, Any, jax.Array], tuple[jax.Array, Any]]:
    """A function from a rate, params, a state (None at first) and batches of indices to both after."""

    @jax.jit
    def run(rate: float, w: jax.Array, state: Any, batches: jax.Array) -> tuple[jax.Array, Any]:
        tx, full_grad_fn = (
            make(rate),
            functools.partial(jax.grad(problem.loss_fn), batch=problem.data),
        )
        state = tx.init(w) if state is None else state
        data = problem.data, problem.loss_fn
        return images.train(tx, w, state, batches, *data, full_grad_fn=full_grad_fn)

    return run


def epoch(n: int, batch_size: int, rng: np.random.Generator) -> jax.Array:
    """Batches of indices, a shuffle of all examples."""
    return jnp.asarray(rng.permutation(n)[: n // batch_size * batch_size].reshape(-1, batch_size))


def stochastic_trail(
    problem: Problem, passes: int, batch_size: int, rate: float, spent: float, make: Any, seed: int
) -> Trail:
    """Passes of steps, of two gradients each, with a full gradient at first and for every two passes."""
    n, rng, run = len(problem.data["y"]), np.random.default_rng(seed), make_runner(problem, make)
    w, state, taken = problem.init(0), None, 1.0
    first = epoch(n, batch_size, rng)
    _, began = run(rate, w, None, first)
    jax.block_until_ready(run(rate, w, began, first))  # compiled
    while taken < passes:
        start = time.process_time()
        w, state = jax.block_until_ready(run(rate, w, state, epoch(n, batch_size, rng)))
        spent += time.process_time() - start
        taken += 2.5
        yield taken, spent, float(problem.loss_fn(w, problem.data))


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
        sample = jax.tree.map(lambda leaf: leaf[: arguments.rate_examples], problem.data)
        rate = optperm.variance.svrg_learning_rate(
            problem.loss_fn, problem.init(0), sample, batch_size
        )
        spent = time.process_time() - start
        run = problem, arguments.svrg_passes, batch_size, rate, spent
        for name, make in make_optimizers(n, batch_size, l2).items():
            for seed in range(arguments.seeds):
                shown = f"{name}, batches of {batch_size}, rate {rate:.3g}, seed {seed}"
                trails[shown] = list(stochastic_trail(*run, make, seed))
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


def five_problems(pictures: tuple[np.ndarray, np.ndarray]) -> Iterator[tuple[str, Problem, float]]:
    """Problems that differ in scales and in how alike their examples are, and their L2 penalties."""
    x, y = load_breast_cancer(return_X_y=True)
    l2 = 1 / len(x)
    yield "breast cancer", softmax((x - x.mean(axis=0)) / x.std(axis=0), y, l2), l2
    yield "breast cancer, raw", softmax(x, y, l2), l2
    x, y = load_digits(return_X_y=True)
    yield "digits", softmax(x / 16, y, 1 / len(x)), 1 / len(x)
    x, y = load_diabetes(return_X_y=True)
    l2 = 1 / len(x)
    yield "diabetes, ridge", ridge(x / x.std(axis=0), (y - y.mean()) / y.std(), l2), l2
    yield "images", softmax(*pictures, 1e-4), 1e-4


def compare_rates(
    pictures: tuple[np.ndarray, np.ndarray], passes: int, batch_sizes: list[int]
) -> None:
    """Print, for each problem, the loss of SVRG and Katyusha by the multiple of the rate found."""
    title = f"Loss after {passes} passes of steps by the multiple of the rate found"
    for name, problem, l2 in five_problems(pictures):
        n = len(problem.data["y"])
        for batch_size in batch_sizes:
            rate = optperm.variance.svrg_learning_rate(
                problem.loss_fn, problem.init(0), problem.data, batch_size
            )
            optimizers = make_optimizers(n, batch_size, l2)
            for method in ("svrg", "katyusha"):
                run, losses = make_runner(problem, optimizers[method]), {}
                for factor in FACTORS:
                    rng = np.random.default_rng(0)
                    batches = jnp.concatenate([epoch(n, batch_size, rng) for _ in range(passes)])
                    w, _ = run(factor * rate, problem.init(0), None, batches)
                    losses[factor] = float(problem.loss_fn(w, problem.data))
                best = min(losses, key=lambda factor: (np.isnan(losses[factor]), losses[factor]))
                cells = {f"{factor:g}": f"{loss:.6g}" for factor, loss in losses.items()}
                row = {"problem": f"{name}, batches of {batch_size}", "method": method}
                RESULTS.row(title, **row, rate=f"{rate:.3g}", best=f"{best:g}", **cells)
                print(*row.values(), f"{rate:.3g}: best {best:g};", cells, flush=True)


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
    parser.add_argument("--rate-examples", type=int, help="to find the rate on; without, all")
    parser.add_argument("--seeds", type=int, default=1, help="of the batches in the table")
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
