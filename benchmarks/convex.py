"""Seconds and passes of `optperm.variance.minimize` and of other solvers to a given gap.

The problems are elastic nets, logistic and softmax regressions with L2 and L1 penalties, and Poisson
regressions, on synthetic data with five categorical features, with given condition numbers, and on
MNIST. The gap is the objective in float64 minus the lowest objective found, divided by the maximum of 1
and the objective. `minimize` runs with this tolerance; its seconds are given with and without tracing
and compiling. The solvers of scikit-learn start again with 1, 2, 4, ... iterations until the gap is
small enough, and the seconds are those of the last run; the same is true for `optax.lbfgs`, without
compiling. All solvers of a problem run one after another, so that other programs disturb all of them.

    python benchmarks/convex.py [--only PART ...] [--data mnist.npz] [--json FILE]
"""

import argparse
import dataclasses
import functools
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import results
from sklearn.linear_model import ElasticNet, LogisticRegression, PoissonRegressor

import optperm

RESULTS = results.Results()
PARTS = ("elastic", "logistic", "l1", "poisson", "conditions", "rows", "mnist")
# The number of examples of each part, and of the part with many rows.
EXAMPLES, MANY = 100_000, 1_000_000
CONDITIONS = (1e2, 1e4, 1e6)


@dataclasses.dataclass
class Problem:
    """What is minimized.

    Attributes:
      name: Its name in the tables.
      loss_fn: The mean loss, without the penalty of the proximal step.
      data: The examples, x and y.
      start: The initial params.
      objective: The objective of params in float64, in NumPy.
      others: Solvers by name, functions of a number of iterations that return params.
      proximal: The proximal step as a function of the rate, or None.
      strong_convexity: The weight of the L2 penalty, or None.
    """

    name: str
    loss_fn: Any
    data: tuple[np.ndarray, np.ndarray]
    start: Any
    objective: Callable[[Any], float]
    others: dict[str, Callable[[int], Any]]
    proximal: Any = None
    strong_convexity: float | None = None


def squares(w: jax.Array, batch: Any) -> jax.Array:
    """Return half of the mean squared error."""
    return 0.5 * jnp.mean((batch[0] @ w - batch[1]) ** 2)


def elastic(name: str, n: int, d: int, rng: np.random.Generator) -> Problem:
    """Return an elastic net with correlated features."""
    x = rng.normal(size=(n, d))
    x[:, 1] = x[:, 0] + 0.3 * x[:, 1]
    y = x @ np.where(np.arange(d) % 4 == 0, rng.normal(size=d), 0.0) + rng.normal(size=n)
    x, y, l1, l2 = x.astype(float_type()), y.astype(float_type()), 0.02, 0.02

    def fit(iterations: int, precompute: bool) -> np.ndarray:
        model = ElasticNet(
            alpha=l1 + l2,
            l1_ratio=l1 / (l1 + l2),
            fit_intercept=False,
            precompute=precompute,
            tol=0,
            max_iter=iterations,
        )
        return model.fit(x, y).coef_

    def objective(w: np.ndarray) -> float:
        w = np.float64(w)
        error = np.mean((x @ w - y) ** 2, dtype=np.float64)
        return float(0.5 * error + l1 * np.abs(w).sum() + 0.5 * l2 * w @ w)

    return Problem(
        name,
        squares,
        (x, y),
        np.zeros(d),
        objective,
        {
            "coordinate descent": functools.partial(fit, precompute=False),
            "coordinate descent, Gram": functools.partial(fit, precompute=True),
        },
        lambda rate: optperm.proximal(rate, l1=l1, l2=l2),
        l2,
    )


def categorical(n: int, rng: np.random.Generator) -> np.ndarray:
    """Return 14 normal features and five categorical features with eight values, the rarest 3%."""
    frequencies = 1 / np.arange(1, 9) ** 1.5
    blocks = [np.eye(8)[rng.choice(8, n, p=frequencies / frequencies.sum())] for _ in range(5)]
    return np.concatenate([rng.normal(size=(n, 14)), *blocks], axis=1)


def conditioned(n: int, d: int, condition: float, rng: np.random.Generator) -> np.ndarray:
    """Return rotated normal features whose covariance has a condition number."""
    scales = np.logspace(0, -np.log10(condition) / 2, d)
    return rng.normal(size=(n, d)) * scales @ np.linalg.qr(rng.normal(size=(d, d)))[0]


def logistic(
    name: str, x: np.ndarray, rng: np.random.Generator, l2: float = 0.0, l1: float = 0.0
) -> Problem:
    """Return a logistic regression with an L2 or an L1 penalty."""
    n, d = x.shape
    w = rng.normal(size=d)
    w *= 2 / np.std(x @ w)
    y = (rng.random(n) < 1 / (1 + np.exp(-(x @ w)))).astype(float_type())
    x = x.astype(float_type())

    def loss_fn(w: jax.Array, batch: Any) -> jax.Array:
        z = batch[0] @ w
        return jnp.mean(jax.nn.softplus(z) - batch[1] * z) + 0.5 * l2 * jnp.dot(w, w)

    def fit(iterations: int, solver: str) -> np.ndarray:
        strength = {"C": 1 / (n * (l1 or l2)), "l1_ratio": 1.0 if l1 else 0.0}
        model = LogisticRegression(
            solver=solver, tol=1e-14, max_iter=iterations, fit_intercept=False, **strength
        )
        return model.fit(x, y).coef_[0]

    def objective(w: np.ndarray) -> float:
        w = np.float64(w)
        z = x @ w
        losses = np.logaddexp(0, z) - y * z
        return float(np.mean(losses) + 0.5 * l2 * w @ w + l1 * np.abs(w).sum())

    solvers = ("saga", "liblinear") if l1 else ("saga", "lbfgs", "newton-cholesky", "liblinear")
    return Problem(
        name,
        loss_fn,
        (x, y),
        np.zeros(d),
        objective,
        {solver: functools.partial(fit, solver=solver) for solver in solvers},
        (lambda rate: optperm.proximal(rate, l1=l1)) if l1 else None,
        l2 or None,
    )


def poisson(name: str, x: np.ndarray, rng: np.random.Generator, l2: float) -> Problem:
    """Return a Poisson regression with an L2 penalty."""
    w = rng.normal(size=x.shape[1])
    w /= np.std(x @ w)
    y = rng.poisson(np.exp(x @ w)).astype(float_type())
    x = x.astype(float_type())

    def loss_fn(w: jax.Array, batch: Any) -> jax.Array:
        z = batch[0] @ w
        return jnp.mean(jnp.exp(z) - batch[1] * z) + 0.5 * l2 * jnp.dot(w, w)

    def fit(iterations: int, solver: str) -> np.ndarray:
        model = PoissonRegressor(
            alpha=l2, solver=solver, tol=1e-14, max_iter=iterations, fit_intercept=False
        )
        return model.fit(x, y).coef_

    def objective(w: np.ndarray) -> float:
        w = np.float64(w)
        z = x @ w
        return float(np.mean(np.exp(z) - y * z) + 0.5 * l2 * w @ w)

    others = {s: functools.partial(fit, solver=s) for s in ("lbfgs", "newton-cholesky")}
    return Problem(name, loss_fn, (x, y), np.zeros(x.shape[1]), objective, others, None, l2)


def softmax(name: str, x: np.ndarray, y: np.ndarray, l2: float) -> Problem:
    """Return a softmax regression with an L2 penalty."""
    n, classes = len(x), int(y.max()) + 1
    x, y = x.astype(float_type()), y.astype(np.int32)

    def loss_fn(w: jax.Array, batch: Any) -> jax.Array:
        losses = optax.softmax_cross_entropy_with_integer_labels(batch[0] @ w, batch[1])
        return jnp.mean(losses) + 0.5 * l2 * jnp.sum(w**2)

    def fit(iterations: int, solver: str) -> np.ndarray:
        model = LogisticRegression(
            C=1 / (n * l2), solver=solver, tol=1e-14, max_iter=iterations, fit_intercept=False
        )
        return model.fit(x, y).coef_.T

    def objective(w: np.ndarray) -> float:
        w = np.float64(w)
        z = x @ w
        z -= z.max(axis=1, keepdims=True)
        losses = np.log(np.exp(z).sum(axis=1)) - z[np.arange(n), y]
        return float(np.mean(losses) + 0.5 * l2 * np.sum(w**2))

    others = {solver: functools.partial(fit, solver=solver) for solver in ("saga", "lbfgs")}
    start = np.zeros((x.shape[1], classes))
    return Problem(name, loss_fn, (x, y), start, objective, others, None, l2)


def float_type() -> type:
    """Return the dtype of the run."""
    return np.float64 if jax.config.jax_enable_x64 else np.float32


def make_problems(parts: list[str], mnist: str | None) -> Iterator[Problem]:
    """Yield the problems of some parts."""
    rng, n = np.random.default_rng(0), EXAMPLES
    if "elastic" in parts:
        yield elastic("elastic net, d = 50", n, 50, rng)
        yield elastic("elastic net, d = 40", n // 2, 40, rng)
    if "logistic" in parts:
        yield logistic("logistic, L2 1/n", categorical(n, rng), rng, l2=1 / n)
        yield logistic("logistic, L2 1e-4", categorical(n, rng), rng, l2=1e-4)
    if "l1" in parts:
        yield logistic("logistic, L1 1e-3", categorical(n, rng), rng, l1=1e-3)
    if "poisson" in parts:
        yield poisson("Poisson, L2 1e-4", categorical(n, rng), rng, 1e-4)
    if "conditions" in parts:
        for condition in CONDITIONS:
            x = conditioned(n, 54, condition, rng)
            yield logistic(f"logistic, condition {condition:.0e}", x, rng, l2=1 / n)
    if "rows" in parts:
        x = categorical(MANY, rng)
        yield logistic(f"logistic, n = {MANY}, L2 1/n", x, rng, l2=1 / MANY)
    if "mnist" in parts and mnist is not None:
        found = np.load(mnist)
        x, y = found["x_train"].reshape(-1, 784) / 255, found["y_train"]
        x, y = x[: EXAMPLES * 6 // 10], y[: EXAMPLES * 6 // 10]
        yield softmax("MNIST, L2 1/n", x, y, 1 / len(x))
        yield softmax("MNIST, L2 1e-4", x, y, 1e-4)


class CompileClock:
    """Return the seconds in which JAX traced, lowered or compiled, each moment once."""

    def __init__(self) -> None:
        self.intervals: list[tuple[float, float]] = []
        jax.monitoring.register_event_duration_secs_listener(self._add)

    def _add(self, event: str, duration: float, **_: Any) -> None:
        if "/jax/core/compile" in event or "compilation_cache" in event:
            now = time.perf_counter()
            self.intervals.append((now - duration, now))

    def seconds_since(self, start: float) -> float:
        """Return the seconds after a moment."""
        total, end = 0.0, start
        for low, high in sorted(self.intervals):
            total += max(high - max(low, end), 0.0)
            end = max(end, high)
        return total


def run_minimize(problem: Problem, tol: float, max_passes: float, clock: CompileClock) -> Any:
    """Return the minimum, its seconds, and the seconds of tracing and compiling."""
    start = time.perf_counter()
    found = optperm.variance.minimize(
        problem.loss_fn,
        problem.data,
        jnp.asarray(problem.start, float_type()),
        proximal=problem.proximal,
        strong_convexity=problem.strong_convexity,
        tol=tol,
        max_passes=max_passes,
    )
    params = jax.block_until_ready(found.params)
    seconds = time.perf_counter() - start
    return found, np.asarray(params), seconds, clock.seconds_since(start)


def run_lbfgs(problem: Problem) -> Callable[[int], Any]:
    """Return the function from a number of iterations to the params of `optax.lbfgs`."""
    data, tx = jax.tree.map(jnp.asarray, problem.data), optax.lbfgs()

    @jax.jit
    def run(w: jax.Array, data: Any, iterations: jax.Array) -> jax.Array:
        def value_fn(w: jax.Array) -> jax.Array:
            return problem.loss_fn(w, data)

        value_and_grad = optax.value_and_grad_from_state(value_fn)

        def step(_: int, carry: Any) -> Any:
            w, state = carry
            value, grad = value_and_grad(w, state=state)
            updates, state = tx.update(grad, state, w, value=value, grad=grad, value_fn=value_fn)
            return optax.apply_updates(w, updates), state

        return jax.lax.fori_loop(0, iterations, step, (w, tx.init(w)))[0]

    w = jnp.asarray(problem.start, float_type())
    run(w, data, 0)
    return lambda iterations: np.asarray(run(w, data, iterations))


def repeat(
    fit: Callable[[int], Any], objective: Callable[[Any], float], goal: float, limit: float
) -> tuple[float, int, float]:
    """Return the seconds, iterations and objective of the first run that reaches the goal.

    A run above the limit is the last one, and so is one that ends where the run before it ended.
    """
    iterations, last = 1, float("nan")
    while True:
        start = time.perf_counter()
        w = fit(iterations)
        seconds = time.perf_counter() - start
        value = objective(w)
        if value <= goal or seconds > limit or value == last:
            return seconds, iterations, value
        iterations, last = 2 * iterations, value


def compare(problem: Problem, tol: float, limit: float, max_passes: float, clock: Any) -> None:
    """Show all solvers on a problem."""
    with jax.enable_x64(True):
        double = dataclasses.replace(problem, data=tuple(map(_widen, problem.data)))
        w = run_minimize(double, 1e-13, 4 * max_passes, clock)[1]
    lowest = problem.objective(w)
    found, w, seconds, compiled = run_minimize(problem, tol, max_passes, clock)
    scale, value = max(1.0, abs(lowest)), problem.objective(w)
    others = dict(problem.others)
    if problem.proximal is None:
        others["optax.lbfgs"] = run_lbfgs(problem)
    rows = {}
    for name, fit in others.items():
        rows[name] = repeat(fit, problem.objective, lowest + tol * scale, limit)
    lowest = min([lowest, value, *(row[2] for row in rows.values())])
    again = run_minimize(problem, tol, max_passes, clock)
    without = min(seconds - compiled, again[2] - again[3])
    reached = [("minimize", value, without, f"{seconds:.2f}", f"{found.passes:.1f} passes")]
    reached += [
        (name, value, taken, "", f"{iterations} iterations")
        for name, (taken, iterations, value) in rows.items()
    ]
    for name, value, taken, compiling, work in reached:
        is_close = value <= lowest + tol * scale
        RESULTS.show(
            f"To a gap of {tol:g}, {float_type().__name__}",
            solver_and_problem=f"{name}: {problem.name}",
            seconds=f"{taken:.2f}" if is_close else f"above {taken:.1f}",
            over_minimize=f"{taken / without:.1f}",
            seconds_with_compiling=compiling,
            gap=f"{(value - lowest) / scale:.1e}",
            work=work,
            method=found.method.partition(" (")[0] if name == "minimize" else "",
            converged=str(found.converged) if name == "minimize" else "",
        )


def _widen(leaf: np.ndarray) -> np.ndarray:
    return np.float64(leaf) if leaf.dtype.kind == "f" else leaf


def main() -> None:
    """Run the parts that the command line names."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--data", help="mnist.npz, for the part mnist")
    parser.add_argument("--x64", action="store_true", help="compute in float64")
    parser.add_argument("--tol", type=float, default=1e-6, help="the gap")
    parser.add_argument("--limit", type=float, default=20.0, help="seconds of one run of a solver")
    parser.add_argument("--max-passes", type=float, default=400.0)
    results.add_argument(parser)
    args = parser.parse_args()
    # Solvers stop before they have converged, on purpose.
    warnings.simplefilter("ignore")
    clock = CompileClock()
    with jax.enable_x64(args.x64):
        for problem in make_problems(args.only, args.data):
            compare(problem, args.tol, args.limit, args.max_passes, clock)
            RESULTS.write(args.json)


if __name__ == "__main__":
    main()
