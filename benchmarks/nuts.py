"""Effective draws per second of `optperm.bayes.sample` and of BlackJAX's NUTS, as N grows.

The problems are logistic regressions with 20 params of unequal scales and two correlated features, with
2e4, 1e5 and 1e6 examples, and with one positive example in about 20; a softmax regression on the first
ten principal components of MNIST (110 params); a Poisson and a Student t regression.

NUTS runs twice: in coordinates in which the Hessian at the optimum is the identity, which it is given,
and with its own window adaptation from the optimum. It makes as many draws as fit into `--seconds`,
between 50 and 4,000. The effective draws are the minimum over the params of the bulk effective sample
size, and "tail" is the minimum for the 5% and 95% quantiles. "draws" are the effective draws per second
of the loop alone; "call" counts everything: the search for the optimum, the kernels, and tracing and
compiling. For NUTS, "call" counts its warm-up and compiling. Standard deviations are divided by those of
the Gaussian at the optimum, and by those of the whitened NUTS; the error of a mean is in standard
deviations of NUTS.

    python benchmarks/nuts.py [--problems PROBLEM ...] [--seconds 120] [--data mnist.npz] [--json FILE]
"""

import argparse
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import results

import optperm

RESULTS = results.Results()
TITLE = "Effective draws per second"
BATCH_SIZE, CHAINS, DRAWS, THINNING = 256, 4, 5000, 2
FEWEST, MOST, TRIAL, WARM_UP = 50, 4000, 8, 300


class Problem(NamedTuple):
    """A posterior.

    Attributes:
      loss_fn: The mean of the negative log-likelihood over the examples of a batch.
      data: The examples.
      size: D. The prior is N(0, 1).
    """

    loss_fn: Callable[[Any, Any], jax.Array]
    data: tuple[jax.Array, jax.Array]
    size: int


def features(num_data: int, size: int) -> np.ndarray:
    """Features of unequal scales, two of them correlated, and a constant."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(num_data, size)) * 10 ** rng.uniform(-1, 1, size)
    x[:, 1] = x[:, 0] + 0.2 * x[:, 1]
    x[:, -1] = 1
    return x


def logistic(num_data: int, bias: float = 0.0) -> Problem:
    """Logistic regression with 20 params."""
    x, rng = features(num_data, 20), np.random.default_rng(1)
    w = rng.normal(size=20) * 0.3 / np.abs(x).mean(axis=0)
    w[-1] = bias
    y = rng.random(num_data) < 1 / (1 + np.exp(-x @ w))

    def loss_fn(w: jax.Array, batch: Any) -> jax.Array:
        z = batch[0] @ w
        return jnp.mean(jax.nn.softplus(z) - batch[1] * z)

    return Problem(loss_fn, (jnp.float32(x), jnp.float32(y)), 20)


def poisson(num_data: int) -> Problem:
    """Poisson regression with 10 params."""
    x, rng = features(num_data, 10), np.random.default_rng(1)
    w = rng.normal(size=10) * 0.1 / np.abs(x).mean(axis=0)
    y = rng.poisson(np.exp(np.clip(x @ w, -10, 3)))

    def loss_fn(w: jax.Array, batch: Any) -> jax.Array:
        z = batch[0] @ w
        return jnp.mean(jnp.exp(z) - batch[1] * z)

    return Problem(loss_fn, (jnp.float32(x), jnp.float32(y)), 10)


def student(num_data: int) -> Problem:
    """Linear regression with Student t residuals of 4 degrees of freedom, 10 params."""
    x, rng = features(num_data, 10), np.random.default_rng(1)
    y = x @ (rng.normal(size=10) / np.abs(x).mean(axis=0)) + rng.standard_t(4, size=num_data)

    def loss_fn(w: jax.Array, batch: Any) -> jax.Array:
        return 2.5 * jnp.mean(jnp.log1p((batch[0] @ w - batch[1]) ** 2 / 4))

    return Problem(loss_fn, (jnp.float32(x), jnp.float32(y)), 10)


def softmax(path: str) -> Problem:
    """Softmax regression on the first ten principal components of MNIST, with biases."""
    with np.load(path) as file:
        images, y = file["x_train"].reshape(-1, 784) / 255.0, file["y_train"]
    centered = np.float32(images - images.mean(axis=0))
    _, vectors = np.linalg.eigh(centered.T @ centered)
    x = centered @ vectors[:, -10:]
    x = np.concatenate([x / x.std(axis=0), np.ones((len(x), 1))], axis=1)

    def loss_fn(w: jax.Array, batch: Any) -> jax.Array:
        logits = batch[0] @ w.reshape(11, 10)
        chosen = jnp.take_along_axis(logits, batch[1][:, None], axis=1)[:, 0]
        return jnp.mean(jax.nn.logsumexp(logits, axis=1) - chosen)

    return Problem(loss_fn, (jnp.float32(x), jnp.int32(y)), 110)


PROBLEMS: dict[str, Callable[[argparse.Namespace], Problem]] = {
    "logistic-2e4": lambda _: logistic(20_000),
    "logistic-1e5": lambda _: logistic(100_000),
    "logistic-1e6": lambda _: logistic(1_000_000),
    "rare-events": lambda _: logistic(100_000, bias=-3.5),
    "Poisson": lambda _: poisson(100_000),
    "Student-t": lambda _: student(100_000),
    "softmax": lambda arguments: softmax(arguments.data),
    "logistic-500": lambda _: logistic(500),
}


def log_prior(w: jax.Array) -> jax.Array:
    """Return the log density of N(0, 1), up to a constant."""
    return -0.5 * jnp.sum(w**2)


class Optimum(NamedTuple):
    """The optimum, the standard deviations of the Gaussian there, and L with L L^T its covariance."""

    mode: jax.Array
    deviations: np.ndarray
    root: jax.Array


def find_optimum(problem: Problem) -> Optimum:
    """Return the optimum, by Newton's method."""
    n = len(problem.data[0])

    def energy(w: jax.Array, data: Any) -> jax.Array:
        return n * problem.loss_fn(w, data) - log_prior(w)

    @jax.jit
    def step(w: jax.Array, data: Any) -> tuple[jax.Array, jax.Array]:
        hessian = jax.hessian(energy)(w, data)
        moved = jnp.linalg.solve(hessian, jax.grad(energy)(w, data))
        return w - moved / jnp.maximum(1.0, jnp.max(jnp.abs(moved))), hessian

    w = jnp.zeros(problem.size)
    for _ in range(30):
        w, hessian = step(w, problem.data)
    covariance = np.linalg.inv(np.asarray(hessian, np.float64))
    root = jnp.float32(np.linalg.cholesky(covariance))
    return Optimum(w, np.sqrt(np.diag(covariance)), root)


class Found(NamedTuple):
    """Draws (chain, draw, D), the seconds of the loop alone, of the whole call, and of a second call."""

    draws: np.ndarray
    seconds: float
    call: float
    second_call: float

    def effective(self) -> tuple[float, float]:
        """Return the minimum effective sample sizes of the bulk and of the tails."""
        draws = jnp.asarray(self.draws)
        samples = optperm.bayes.Samples(draws, draws[:, -1], (), jnp.int32(1), jnp.int32(1))
        report = optperm.bayes.posterior_report(samples)
        return report.ess_bulk, report.ess_tail


def by_sample(problem: Problem, draws: int) -> tuple[Found, list[str]]:
    """Return the draws of `optperm.bayes.sample`, and its warnings."""
    seconds, said = [], []
    for key in range(2):
        times = []
        begin = time.perf_counter()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            samples = optperm.bayes.sample(
                problem.loss_fn, problem.data, jnp.zeros(problem.size), key, log_prior=log_prior,
                batch_size=min(BATCH_SIZE, len(problem.data[0]) // 4), num_chains=CHAINS,
                num_draws=draws, thinning=THINNING,
                on_draws=lambda *_, times=times: times.append(time.perf_counter()),
            )  # fmt: skip
        seconds.append(time.perf_counter() - begin)
        said += [str(each.message) for each in caught]
    # The first tenth includes compiling and the discarded draws
    loop = (times[-1] - times[0]) / (len(times) - 1) * len(times)
    return Found(np.asarray(samples.params), loop, *seconds), said


def by_nuts(problem: Problem, optimum: Optimum, seconds: float, *, is_whitened: bool) -> Found:
    """Return the draws of NUTS, whitened by the Hessian or with its own window adaptation."""
    import blackjax  # noqa: PLC0415

    n, root = len(problem.data[0]), optimum.root

    def log_density(q: jax.Array, data: Any) -> jax.Array:
        w = optimum.mode + root @ q if is_whitened else q
        return log_prior(w) - n * problem.loss_fn(w, data)

    @jax.jit
    def warm_up(key: jax.Array, data: Any) -> Any:
        adaptation = blackjax.window_adaptation(blackjax.nuts, lambda q: log_density(q, data))
        (state, parameters), _ = adaptation.run(key, optimum.mode, WARM_UP)
        return state.position, parameters

    @jax.jit
    def run(position: Any, parameters: Any, keys: jax.Array, data: Any) -> Any:
        kernel = blackjax.nuts(lambda q: log_density(q, data), **parameters)

        def step(state: Any, key: jax.Array) -> Any:
            state, _ = kernel.step(key, state)
            return state, state.position

        last, positions = jax.lax.scan(step, kernel.init(position), keys)
        return last.position, positions

    begin = time.perf_counter()
    if is_whitened:
        step_size = 0.7 * min(1.0, (20 / problem.size) ** 0.25)
        position = jnp.zeros(problem.size)
        parameters = {"step_size": step_size, "inverse_mass_matrix": jnp.ones(problem.size)}
    else:
        position, parameters = warm_up(jax.random.key(2), problem.data)

    def timed(position: Any, number: int, key: int) -> tuple[Any, Any, float]:
        start = time.perf_counter()
        keys = jax.random.split(jax.random.key(key), number)
        found = jax.block_until_ready(run(position, parameters, keys, problem.data))
        return *found, time.perf_counter() - start

    position, _, _ = timed(position, TRIAL, 3)
    position, _, taken = timed(position, TRIAL, 4)
    number = int(np.clip(seconds * TRIAL / taken, FEWEST, MOST))
    before = time.perf_counter() - begin
    # Another number of draws is another program, which is compiled before its time is taken
    run.lower(
        position, parameters, jax.random.split(jax.random.key(5), number), problem.data
    ).compile()
    _, drawn, _ = timed(position, number, 5)
    _, drawn, taken = timed(position, number, 6)
    draws = np.asarray(drawn)
    if is_whitened:
        draws = np.asarray(optimum.mode) + draws @ np.asarray(root).T
    return Found(draws[None], taken, before + taken, before + taken)


def compare(name: str, problem: Problem, seconds: float, draws: int) -> None:
    """Print and keep the figures of a problem."""
    optimum = find_optimum(problem)
    judge = by_nuts(problem, optimum, seconds, is_whitened=True)
    adapted = by_nuts(problem, optimum, seconds, is_whitened=False)
    ours, said = by_sample(problem, draws)
    flat = judge.draws.reshape(-1, problem.size)
    mean, deviation = flat.mean(axis=0), flat.std(axis=0)
    per_second = judge.effective()[0] / judge.seconds
    found = {"sample": ours, "NUTS, whitened": judge, "NUTS, adapted": adapted}
    for method, each in found.items():
        own = each.draws.reshape(-1, problem.size)
        sd, (ess, tail) = own.std(axis=0), each.effective()
        of_mode, of_nuts = sd / optimum.deviations, sd / deviation
        RESULTS.show(
            TITLE, problem=name, method=method, N=f"{len(problem.data[0]):,}", D=problem.size,
            ESS=f"{ess:,.0f}", tail=f"{tail:,.0f}", draws=f"{ess / each.seconds:,.1f}",
            call=f"{ess / each.call:,.1f}",
            ratio=f"{ess / each.seconds / per_second:,.2f}",
            seconds=f"{each.call:.1f}", second_call=f"{each.second_call:.1f}",
            sd_over_Gaussian=f"{of_mode.min():.3f} to {of_mode.max():.3f}",
            sd_over_NUTS=f"{of_nuts.min():.3f} to {of_nuts.max():.3f}",
            mean=f"{np.max(np.abs(own.mean(axis=0) - mean) / deviation):.3f}",
            warnings=len(said) if method == "sample" else 0,
        )  # fmt: skip
    for text in dict.fromkeys(said):
        print(f"    {text}", flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    """Compare the samplers on the problems."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--problems", nargs="+", choices=PROBLEMS, default=list(PROBLEMS))
    parser.add_argument("--seconds", type=float, default=120.0, help="of each run of NUTS")
    parser.add_argument("--draws", type=int, default=DRAWS, help="of each chain of sample")
    parser.add_argument("--data", default="mnist.npz", help="MNIST, as Keras keeps it")
    results.add_argument(parser)
    arguments = parser.parse_args(argv)
    for name in arguments.problems:
        compare(name, PROBLEMS[name](arguments), arguments.seconds, arguments.draws)
        RESULTS.write(arguments.json)


if __name__ == "__main__":
    main()
