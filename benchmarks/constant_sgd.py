"""Cost of a step of constant SGD, and the distance of its draws from exact posteriors.

The script prints, all in one run:

- the median time of a jitted step on the digits MLP (61-32-10, batch 32) for each estimator and
  preconditioner, over the time of the same step of plain SGD, measured in turns; and the time of many
  steps in one `jax.lax.scan` on batches that each step draws;
- the Kullback-Leibler divergence of the draws' Gaussian from the exact posterior, on two problems with a
  known posterior, for the three preconditioners and for stochastic gradient Langevin dynamics (Welling
  and Teh, 2011) with the best step size of a grid; all use the same batches and steps.

    python benchmarks/constant_sgd.py [--only steps|scans|posterior] [--repetitions 2001] [--json FILE]
"""

import argparse
import functools
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import results

import optperm

PRECONDITIONERS = ("scalar", "diagonal", "full")
N, S = 1000, 10
RESULTS = results.Results()

# What a step costs.


class Network(nn.Module):
    """The network of the pruning experiment."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """The logits."""
        return nn.Dense(10)(nn.tanh(nn.Dense(32)(x)))


def cross_entropy(model: nn.Module, params: optax.Params, batch: Any) -> jax.Array:
    """The mean loss of a classifier."""
    logits = model.apply({"params": params}, batch["x"])
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]))


def samplers(
    size: int, params: optax.Params, loss_fn: Any, data: Any
) -> dict[str, optax.GradientTransformation]:
    """Return the steps by name: SGD first, then samplers, some with estimates of the noise."""
    mandt = functools.partial(optperm.mandt_sgd, 1257, size, max_step=0.1)
    found = {"SGD": optax.sgd(1e-3)}
    for preconditioner in ("scalar", "diagonal"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a few steps give a kernel of the right shapes
            kernel, _ = optperm.bayes.learn_kernel(
                loss_fn,
                data,
                params,
                0,
                log_prior=lambda p: -optax.tree.norm(p, squared=True) / 2,
                batch_size=size,
                preconditioner=preconditioner,
                steps=160,
            )
        found[f"constant_sgd, {preconditioner}"] = optperm.constant_sgd(kernel)
    return found | {
        "mandt_sgd, per_example": mandt(),
        "mandt_sgd, per_example in chunks of 8": mandt(chunk_size=8),
        "mandt_sgd, single_example": mandt(estimator="single_example"),
        "mandt_sgd, two_batches": mandt(estimator="two_batches"),
        "mandt_sgd, frozen": mandt(freeze_after=1),
        "sgld": optperm.sgld(1e-6, 1257),
        "sghmc": optperm.sghmc(1e-8, 1257, 0.1),
    }


def make_data() -> dict[str, jax.Array]:
    """Return inputs and labels of the shapes of the digits, at random."""
    return {
        "x": jax.random.normal(jax.random.key(1), (1257, 61)),
        "y": jax.random.randint(jax.random.key(2), (1257,), 0, 10),
    }


def compare_steps(repetitions: int) -> None:
    """Print the time of each step divided by SGD's."""
    model, size = Network(), 32
    loss_fn = functools.partial(cross_entropy, model)
    params = model.init(jax.random.key(0), jnp.zeros((1, 61)))["params"]
    batch = {
        "x": jax.random.normal(jax.random.key(1), (size + 1, 61)),
        "y": jax.random.randint(jax.random.key(2), (size + 1,), 0, 10),
    }
    methods = samplers(size, params, loss_fn, make_data())
    runs = {name: _stepper(tx, loss_fn, params, batch) for name, tx in methods.items()}
    print("Bar: 3 for per_example")
    _compare(f"One step of the digits MLP, batch {size}, over one of SGD", runs, repetitions)


def compare_scans(repetitions: int, steps: int = 300) -> None:
    """Print the time of many steps in one program, each on a new batch, divided by SGD's."""
    model, size = Network(), 32
    loss_fn = functools.partial(cross_entropy, model)
    params = model.init(jax.random.key(0), jnp.zeros((1, 61)))["params"]
    data = make_data()

    def runner(tx: optax.GradientTransformation) -> Callable[[], object]:
        tx = optax.with_extra_args_support(tx)

        @functools.partial(jax.jit, donate_argnums=0)
        def many(carry: Any) -> Any:
            def step(carry: Any, key: jax.Array) -> tuple[Any, None]:
                params, opt_state = carry
                rows = jax.random.randint(key, (size + 1,), 0, 1257)
                examples, apart = (
                    jax.tree.map(lambda leaf, part=part: leaf[part], data)
                    for part in (rows[:-1], rows[-1:])
                )
                e = optperm.evaluate(loss_fn, params, examples, example=apart)
                updates, opt_state = tx.update(e.grad, opt_state, params, **e.extra_args)
                return (optax.apply_updates(params, updates), opt_state), None

            return jax.lax.scan(step, carry, jax.random.split(jax.random.key(0), steps))[0]

        carry = jax.tree.map(jnp.array, params), tx.init(params)

        def run() -> object:
            nonlocal carry
            carry = many(carry)
            return carry

        for _ in range(4):  # past the burn-in
            jax.block_until_ready(run())
        return run

    methods = samplers(size, params, loss_fn, data)
    runs = {name: runner(tx) for name, tx in methods.items()}
    print("Bars: 1.25 constant_sgd, 2.8 per_example, 1.5 sgld")
    _compare(f"{steps} steps in one scan, batch {size}, over those of SGD", runs, repetitions)


def _compare(title: str, runs: dict[str, Callable[[], object]], repetitions: int) -> None:
    """Prints what each takes, measured in turns, and its ratio to the first one."""
    print(title)
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repetitions):
        for name, run in runs.items():
            start = time.perf_counter()
            jax.block_until_ready(run())
            times[name].append(time.perf_counter() - start)
    # Where other programs run, the fastest tenth was disturbed least.
    fastest = {name: sorted(taken)[len(taken) // 10] for name, taken in times.items()}
    median = {name: statistics.median(taken) for name, taken in times.items()}
    for name in runs:
        RESULTS.row(
            title,
            step=name,
            ratio_of_medians=f"{median[name] / median['SGD']:.2f}",
            of_the_fastest_tenth=f"{fastest[name] / fastest['SGD']:.2f}",
        )
        print(
            f"  {name:38} {1e6 * median[name]:8.1f} us, ratio {median[name] / median['SGD']:5.2f}, "
            f"of the fastest tenth {fastest[name] / fastest['SGD']:5.2f}"
        )


def _stepper(
    tx: optax.GradientTransformation, loss_fn: Any, params: optax.Params, batch: Any
) -> Callable[[], object]:
    """A function that takes one more step, with params and state donated; compiled already."""
    tx = optax.with_extra_args_support(tx)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params: optax.Params, opt_state: Any, batch: Any) -> tuple[optax.Params, Any]:
        examples, apart = (
            jax.tree.map(lambda leaf, part=part: leaf[part], batch)
            for part in (slice(None, -1), slice(-1, None))
        )
        e = optperm.evaluate(loss_fn, params, examples, example=apart)
        updates, opt_state = tx.update(e.grad, opt_state, params, **e.extra_args)
        return optax.apply_updates(params, updates), opt_state

    carry = jax.tree.map(jnp.array, params), tx.init(params)

    def run() -> object:
        nonlocal carry
        carry = step(*carry, batch)
        return carry

    for _ in range(3):
        jax.block_until_ready(run())
    return run


# How far from the posterior it samples.

Gradients = Callable[[jax.Array, jax.Array], jax.Array]


def quadratic() -> tuple[str, Gradients, np.ndarray, np.ndarray]:
    """A quadratic whose gradient noise is not its curvature: name, gradients, optimum, covariance."""
    hessian = np.array([[2.0, 0.5, 0.0], [0.5, 1.0, 0.3], [0.0, 0.3, 0.5]])
    noise = np.array([[1.0, 0.6, 0.0], [0.6, 2.0, 0.0], [0.0, 0.0, 0.1]])
    root = jnp.asarray(np.linalg.cholesky(noise).T, jnp.float32)

    def gradients(params: jax.Array, key: jax.Array) -> jax.Array:
        return (jnp.asarray(hessian, jnp.float32) @ params)[None] + jax.random.normal(
            key, (S, 3)
        ) @ root

    return "quadratic, 3 params", gradients, np.zeros(3), np.linalg.inv(N * hessian)


def regression() -> tuple[str, Gradients, np.ndarray, np.ndarray]:
    """Least squares of data whose noise grows with a feature, which the model does not know."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(N, 5)) @ (np.eye(5) + 0.3 * rng.normal(size=(5, 5)))
    y = x @ rng.normal(size=5) + np.exp(0.7 * x[:, 0] - 0.25) * rng.normal(size=N)
    optimum = np.linalg.solve(x.T @ x, x.T @ y)
    rows, targets = jnp.asarray(x, jnp.float32), jnp.asarray(y, jnp.float32)

    def gradients(params: jax.Array, key: jax.Array) -> jax.Array:
        chosen = jax.random.randint(key, (S,), 0, N)
        return (rows[chosen] @ params - targets[chosen])[:, None] * rows[chosen]

    return "regression, 5 params", gradients, optimum, np.linalg.inv(x.T @ x)


def divergence(
    step: Any, opt_state: Any, optimum: np.ndarray, covariance: np.ndarray, *, seed: int
) -> float:
    """Of the Gaussian with the moments of 128 chains from the posterior."""
    samples = optperm.bayes.draw_samples(
        step,
        jnp.asarray(optimum, jnp.float32),
        opt_state,
        jax.random.key(seed),
        num_chains=128,
        num_draws=60,
        thinning=N // S,
        burn_in=2000,
    )
    flat = np.asarray(samples.params, np.float64).reshape(-1, len(optimum))
    if not np.all(np.isfinite(flat)):
        return float("inf")
    return float(optperm.bayes.gaussian_kl(flat.mean(axis=0), np.cov(flat.T), optimum, covariance))


def compare_posteriors() -> None:
    """Prints the divergences."""
    print(f"Divergence from the posterior, N = {N}, S = {S}; 128 chains of 60 draws, 3 seeds")
    for name, gradients, optimum, covariance in (quadratic(), regression()):
        print(f"  {name}")
        for preconditioner in PRECONDITIONERS:
            tx = optperm.mandt_sgd(N, S, preconditioner=preconditioner, freeze_after=1000)

            def step(params: Any, opt_state: Any, key: jax.Array, tx: Any = tx) -> Any:
                rows = gradients(params, key)  # noqa: B023
                updates, opt_state = tx.update(
                    jnp.mean(rows, axis=0), opt_state, params, per_example_grad_fn=lambda _: rows
                )
                return optax.apply_updates(params, updates), opt_state

            start = tx.init(jnp.asarray(optimum, jnp.float32))
            found = [divergence(step, start, optimum, covariance, seed=seed) for seed in range(3)]
            _print_figures(name, f"constant SGD, {preconditioner}", found)
        best, best_size = [float("inf")], 0.0
        for size in np.geomspace(1e-6, 1e-3, 13):

            def langevin(params: Any, opt_state: Any, key: jax.Array, size: float = size) -> Any:
                batch_key, noise_key = jax.random.split(key)
                drift = N * jnp.mean(gradients(params, batch_key), axis=0)  # noqa: B023
                noise = jax.random.normal(noise_key, params.shape)
                return params - 0.5 * size * drift + jnp.sqrt(size) * noise, opt_state

            found = [divergence(langevin, (), optimum, covariance, seed=seed) for seed in range(3)]
            if statistics.median(found) < statistics.median(best):
                best, best_size = found, size
        _print_figures(name, f"SGLD, best step {best_size:.1e}", best)


def _print_figures(problem: str, sampler: str, found: list[float]) -> None:
    figures = f"{statistics.median(found):.4f} ({min(found):.4f} to {max(found):.4f})"
    RESULTS.row("Divergence from the posterior", problem=problem, sampler=sampler, KL=figures)
    print(f"    {sampler:24} {figures}")


def main() -> None:
    """Runs the parts that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=("steps", "scans", "posterior"))
    parser.add_argument("--repetitions", type=int, default=2001)
    results.add_argument(parser)
    arguments = parser.parse_args()
    if arguments.only in (None, "steps"):
        compare_steps(arguments.repetitions)
    if arguments.only in (None, "scans"):
        compare_scans(max(arguments.repetitions // 50, 1))
    if arguments.only in (None, "posterior"):
        compare_posteriors()
    RESULTS.write(arguments.json)


if __name__ == "__main__":
    main()
