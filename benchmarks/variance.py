"""Cost and gain of variance reduction: SVRG, Katyusha, recursive gradients and MARS.

- steps: the time of a step of each method over a step of SGD or AdamW, measured in turns;
- variance: the variance of SVRG's gradient along a run, over the variance of the plain gradient;
- convex and networks: training loss and test error of each method after as many gradients of single
  examples, including full gradients, at constant rates and with a cosine, each at the best rate of a
  grid, on logistic and softmax regression, and on MLPs on the digits and with 30 % wrong labels;
- lbfgs: the passes over all examples of `optax.lbfgs` and of Newton's method with conjugate gradients on
  the two convex problems, where each evaluation of a line search and each Hessian product counts as one;
- mars: MARS-AdamW and AdamW on the byte transformer of `library_bytes`;
- table: passes and processor seconds until the loss of a softmax regression in float64 is within 1e-3,
  1e-6 and 1e-9 of the lowest loss found: SVRG before SGD and before Nesterov's momentum, Katyusha with
  the rate of `optperm.variance.svrg_learning_rate`, `optax.lbfgs`, and scikit-learn. The seconds include
  the search for the rate, but neither compilation nor the evaluations for this table. Runs of
  scikit-learn start again with 1, 2, 4, ... iterations, so their figures are powers of two;
- rates: on five problems, the loss of SVRG and of Katyusha at multiples of the rate that was found.

    python benchmarks/variance.py [--only PART ...] [--data mnist.npz] [--json FILE]
"""

import argparse
import functools
import pathlib
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import flax.linen as nn
import images
import jax
import jax.numpy as jnp
import library_bytes
import numpy as np
import optax
import results
from sklearn.datasets import load_breast_cancer, load_diabetes, load_digits
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from timing import stepping, take_turns

import optperm

RESULTS = results.Results()
BATCH = 32
SUBOPTIMALITIES = (1e-3, 1e-6, 1e-9, 1e-12)
FACTORS = tuple(2.0**k for k in range(-3, 5))
Trail = Iterator[tuple[float, float, float]]  # passes, seconds, loss


class Problem(NamedTuple):
    """What is trained.

    Attributes:
      loss_fn: A function of params and a batch of `x` and `y`.
      init: A function of a seed that returns the initial params.
      data: The examples to train on.
      test: The examples to test on.
    """

    loss_fn: Any
    init: Callable[[int], Any]
    data: dict[str, jax.Array]
    test: dict[str, jax.Array]


def softmax(x: Any, y: Any, l2: float, test: Any = None) -> Problem:
    """Return a softmax regression with an L2 penalty."""

    def loss_fn(w: jax.Array, batch: Any) -> jax.Array:
        losses = optax.softmax_cross_entropy_with_integer_labels(batch["x"] @ w, batch["y"])
        return jnp.mean(losses) + 0.5 * l2 * jnp.sum(w**2)

    start = jnp.zeros((x.shape[1], int(y.max()) + 1))
    data = {"x": jnp.asarray(x, float), "y": jnp.asarray(y, jnp.int32)}
    return Problem(loss_fn, lambda _: start, data, test or {})


def ridge(x: np.ndarray, y: np.ndarray, l2: float) -> Problem:
    """Return a ridge regression."""

    def loss_fn(w: jax.Array, batch: Any) -> jax.Array:
        squares = 0.5 * (batch["x"] @ w - batch["y"]) ** 2
        return jnp.mean(squares) + 0.5 * l2 * jnp.sum(w**2)

    data = {"x": jnp.asarray(x, float), "y": jnp.asarray(y, float)}
    return Problem(loss_fn, lambda _: jnp.zeros(x.shape[1]), data, {})


class Network(nn.Module):
    """A multilayer perceptron."""

    width: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Return the logits."""
        for _ in range(2):
            x = nn.relu(nn.Dense(self.width)(x))
        return nn.Dense(10)(x)

    def loss(self, params: optax.Params, batch: Any) -> jax.Array:
        """Return the mean cross-entropy."""
        logits = self.apply({"params": params}, batch["x"])
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]))


def _split(x: np.ndarray, y: np.ndarray, wrong: float = 0.0) -> tuple[Any, Any]:
    """Return three quarters to train on, with a fraction of wrong labels, and a quarter to test on."""
    rng = np.random.default_rng(0)
    order, count = rng.permutation(len(x)), 3 * len(x) // 4
    x, y = x[order], y[order].copy()
    spoiled = rng.permutation(count)[: int(wrong * count)]
    y[spoiled] = (y[spoiled] + rng.integers(1, 10, len(spoiled))) % 10
    parts = np.s_[:count], np.s_[count:]
    train, test = ({"x": jnp.asarray(x[each]), "y": jnp.asarray(y[each])} for each in parts)
    return train, test


def convex_problems() -> Iterator[tuple[str, Problem]]:
    """Yield logistic and softmax regression with an L2 penalty of 1/n, in float64."""
    x, y = load_breast_cancer(return_X_y=True)
    data, test = _split((x - x.mean(axis=0)) / x.std(axis=0), y)
    problem = softmax(**data, l2=1 / len(data["x"]), test=test)
    yield "Logistic regression, breast cancer", problem
    x, y = load_digits(return_X_y=True)
    data, test = _split(x / 16.0, y)
    yield "Softmax regression, digits", softmax(**data, l2=1 / len(data["x"]), test=test)


def network_problems() -> Iterator[tuple[str, Problem]]:
    """Yield an MLP on the digits, with the labels as they are, and with 30 % wrong ones."""
    x, y = load_digits(return_X_y=True)
    model = Network(64)
    for name, wrong in (("MLP, digits", 0.0), ("MLP, digits with 30 % wrong labels", 0.3)):
        data, test = _split(np.float32(x / 16.0), y, wrong)

        def init(seed: int, x: jax.Array = data["x"]) -> optax.Params:
            return model.init(jax.random.key(seed), x[:1])["params"]

        yield name, Problem(model.loss, init, data, test)


# What a step costs.
MARS = {"mars": optperm.mars(), "mars, exact": optperm.mars(exact=True)}
ADAMW = optax.adamw(1e-3, b1=0.95, b2=0.99)


def compare_steps(repetitions: int, width: int, batch_sizes: list[int]) -> None:
    """Show the ratios of steps between snapshots, for several batch sizes."""
    never, sgd = 10**6, optax.sgd(1e-3)
    of_sgd = {
        "svrg": optperm.svrg(),
        "svrg(every=m)": optperm.svrg(every=never),
        "loopless": optperm.svrg(probability=0.0),
        "storm": optperm.recursive_gradient(0.1),
        "sarah": optperm.recursive_gradient(0.0, every=never),
        "page": optperm.recursive_gradient(0.0, 0.0),
    }
    model = Network(width)
    params = model.init(jax.random.key(0), jnp.zeros((1, 784)))["params"]
    for batch_size in batch_sizes:
        x = jax.random.normal(jax.random.key(1), (batch_size, 784))
        y = jax.random.randint(jax.random.key(2), (batch_size,), 0, 10)
        given = repetitions, f"batch {batch_size}", model.loss, params, {"x": x, "y": y}
        _compare(*given, of_sgd, "SGD", sgd)
        _compare(*given, MARS, "AdamW", ADAMW)


def _compare(
    repetitions: int,
    where: str,
    loss_fn: Any,
    params: optax.Params,
    batch: Any,
    methods: dict[str, Any],
    baseline: str,
    optimizer: optax.GradientTransformation,
) -> None:
    """Show each method's median and fastest tenth, divided by a baseline's."""
    runs = {baseline: _stepper(optax.with_extra_args_support(optimizer), loss_fn, params, batch)}
    for name, method in methods.items():
        runs[name] = _stepper(optax.chain(method, optimizer), loss_fn, params, batch)
    times = take_turns(runs, repetitions)
    median = {name: statistics.median(taken) for name, taken in times.items()}
    # Where other programs run, the fastest tenth was disturbed least.
    fastest = {name: sorted(taken)[len(taken) // 10] for name, taken in times.items()}
    cells = {name: f"{median[name] / median[baseline]:.2f}" for name in methods}
    RESULTS.show(f"A step over {baseline}'s", at=where, **cells)
    ratios = ", ".join(f"{name} {fastest[name] / fastest[baseline]:.2f}" for name in methods)
    print(f"    {1e3 * median[baseline]:.2f} ms; of the fastest tenths {ratios}")


def _stepper(tx: Any, loss_fn: Any, params: optax.Params, batch: Any) -> Callable[[], object]:
    """Return a function that takes one more step, with params and state donated."""

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params: optax.Params, opt_state: Any) -> tuple[optax.Params, Any]:
        e = optperm.evaluate(loss_fn, params, batch)
        full = {"full_grad_fn": e.extra_args["grad_fn"]}
        updates, opt_state = tx.update(e.grad, opt_state, params, **full, **e.extra_args)
        return optax.apply_updates(params, updates), opt_state

    opt_state = tx.init(params)
    if any(isinstance(part, optperm.variance.SvrgState) for part in opt_state):
        grad = jax.grad(loss_fn)(params, batch)
        opt_state = optperm.variance.take_snapshot(opt_state, params, grad)
    return stepping(step, (jax.tree.map(jnp.array, params), opt_state))


# The variance along a run.
def show_variances(epochs: int) -> None:
    """Show the ratio for a convex problem, and for a network, where the correction can do harm."""
    x, y = load_breast_cancer(return_X_y=True)
    x = np.float32((x - x.mean(axis=0)) / x.std(axis=0)) * np.float32(2 * y - 1)[:, None]

    def logistic_loss(w: jax.Array, batch: Any) -> jax.Array:
        return jnp.mean(jax.nn.softplus(-(batch["x"] @ w))) + 0.5 / len(x) * jnp.dot(w, w)

    convex = Problem(logistic_loss, lambda _: jnp.zeros(30), {"x": jnp.asarray(x)}, {})
    x, y = load_digits(return_X_y=True)
    data, model = {"x": jnp.asarray(x / 16.0, jnp.float32), "y": jnp.asarray(y)}, Network(64)
    start = model.init(jax.random.key(0), data["x"][:1])["params"]
    network = Problem(model.loss, lambda _: start, data, {})
    for name, problem in (("logistic regression", convex), ("MLP on the digits", network)):
        _show_variance(name, problem, epochs)


def _show_variance(name: str, problem: Problem, epochs: int) -> None:
    """Measure at the middle and at the end of epochs, over the batches of a fresh shuffle."""
    loss_fn, data, rng = problem.loss_fn, problem.data, np.random.default_rng(0)
    tx = optperm.svrg()
    optimizer = optax.chain(tx, optax.sgd(0.1))
    run = jax.jit(lambda *carry: images.train(optimizer, *carry, data, loss_fn))

    @jax.jit
    def compute_ratio(params: Any, state: Any, order: jax.Array) -> jax.Array:
        def estimate(indices: jax.Array) -> tuple[Any, Any]:
            batch = jax.tree.map(lambda leaf: leaf[indices], data)
            e = optperm.evaluate(loss_fn, params, batch)
            return e.grad, tx.update(e.grad, state, params, **e.extra_args)[0]

        plain, corrected = (
            sum(jnp.sum(jnp.var(g, axis=0)) for g in jax.tree.leaves(grads))
            for grads in jax.lax.map(estimate, order)
        )
        return corrected / plain

    params = problem.init(0)
    opt_state = optimizer.init(params)
    for epoch in range(1, epochs + 1):
        grad = jax.grad(loss_fn)(params, data)
        opt_state = optperm.variance.take_snapshot(opt_state, params, grad)
        order, ratios = shuffle(len(data["x"]), BATCH, rng), []
        for half in np.split(order, [len(order) // 2]):
            params, opt_state = run(params, opt_state, half)
            ratios.append(compute_ratio(params, opt_state[0], shuffle(len(data["x"]), BATCH, rng)))
        if epoch in (1, 3, 10, 30):
            halves = {"middle": f"{ratios[0]:.2e}", "end": f"{ratios[1]:.2e}"}
            RESULTS.show("Variance over the plain gradient's", problem=name, epoch=epoch, **halves)


def shuffle(n: int, batch_size: int, rng: np.random.Generator) -> jax.Array:
    """Return an epoch of batches of indices, a shuffle of all examples."""
    return jnp.asarray(rng.permutation(n)[: n // batch_size * batch_size].reshape(-1, batch_size))


# Equal gradients, each at its best rate.
class Method(NamedTuple):
    """What trains.

    Attributes:
      make: From a learning rate, the number of steps, and that between two full gradients.
      gradients: The gradients of its batch that a step takes.
      refreshes: Whether it takes full gradients.
      rates: Its rates, divided by SGD's.
    """

    make: Callable[..., optax.GradientTransformation]
    gradients: int = 1
    refreshes: bool = False
    rates: float = 1.0


def _before_sgd(make: Callable[[int, int], Any]) -> Callable[..., Any]:
    return lambda rate, steps, every: optax.chain(make(steps, every), optax.sgd(rate))


def _alpha_svrg(steps: int, every: int) -> optax.GradientTransformation:
    return optperm.svrg(optax.linear_schedule(0.75, 0.0, steps), every=every)


METHODS = {
    "SGD": Method(lambda rate, *_: optax.sgd(rate)),
    "SGD, momentum 0.9": Method(lambda rate, *_: optax.sgd(rate, 0.9), rates=1 / 8),
    "Adam": Method(lambda rate, *_: optax.adam(rate), rates=1 / 64),
    "SVRG": Method(_before_sgd(lambda _, m: optperm.svrg(every=m)), 2, True),
    "SVRG, loopless": Method(_before_sgd(lambda _, m: optperm.svrg(probability=1 / m)), 2, True),
    "alpha-SVRG": Method(_before_sgd(_alpha_svrg), 2, True),
    "STORM, a = 0.1": Method(_before_sgd(lambda *_: optperm.recursive_gradient(0.1)), 2),
    "SARAH": Method(_before_sgd(lambda _, m: optperm.recursive_gradient(0.0, every=m)), 2, True),
    "PAGE": Method(_before_sgd(lambda _, m: optperm.recursive_gradient(0.0, 1 / m)), 2, True),
}
SHAPES: dict[str, Callable[[Any, int], Any]] = {
    "constant": lambda rate, steps: rate,
    "cosine": optax.cosine_decay_schedule,
}


def compare_methods(
    name: str, problem: Problem, passes: int, seeds: int, rates: list[float], methods: list[str]
) -> None:
    """Show training losses and test errors of all methods, each at its best rate."""
    n = len(problem.data["x"])
    every, lowest = max(2 * n // BATCH, 1), 0.0
    if not isinstance(problem.init(0), dict):  # a convex problem
        lowest = min(loss for _, loss in lbfgs_losses(problem, 1000))
    above = f", above the lowest, {lowest:.6f}" if lowest else ""
    for method_name in methods:
        method = METHODS[method_name]
        a_step = method.gradients * BATCH + (n / every if method.refreshes else 0.0)
        steps = int(passes * n / a_step)
        for shape_name, shape in SHAPES.items():
            run = _runner(problem, method, steps, every, shape)
            found = {
                rate: np.array([run(method.rates * rate, seed) for seed in range(seeds)])
                for rate in rates
            }
            best = min(rates, key=lambda rate: np.nan_to_num(found[rate][:, 0], nan=np.inf).mean())
            losses, errors = found[best].T
            losses = losses - lowest
            spread = f"{losses.mean():.2e} ({losses.min():.2e}, {losses.max():.2e})"
            edge = ", an end of the grid" if best in (rates[0], rates[-1]) else ""
            RESULTS.show(
                f"{name}, {passes} passes{above}",
                method=method_name,
                rate=shape_name,
                training_loss=spread,
                test_error=f"{errors.mean():.4f}",
            )
            print(f"    rate {method.rates * best:.3g}{edge}")


def _runner(
    problem: Problem, method: Method, steps: int, every: int, shape: Callable[[Any, int], Any]
) -> Callable[[float, int], tuple[jax.Array, jax.Array]]:
    """Return a function from a rate and a seed to the training loss at the end and the test error."""
    n = len(problem.data["x"])

    @jax.jit
    def train(rate: jax.Array, params: optax.Params, order: jax.Array) -> tuple[jax.Array, Any]:
        full_grad_fn = functools.partial(jax.grad(problem.loss_fn), batch=problem.data)
        tx, of = method.make(shape(rate, steps), steps, every), (problem.data, problem.loss_fn)
        params, _ = images.train(tx, params, tx.init(params), order, *of, full_grad_fn=full_grad_fn)
        return problem.loss_fn(params, problem.data), _test_error(problem, params)

    def run(rate: float, seed: int) -> tuple[jax.Array, jax.Array]:
        rng = np.random.default_rng(seed)
        shuffles = [rng.permutation(n) for _ in range(steps * BATCH // n + 1)]
        order = np.concatenate(shuffles)[: steps * BATCH].reshape(steps, BATCH)
        return train(jnp.asarray(rate), problem.init(seed), order)

    return run


def _test_error(problem: Problem, params: optax.Params) -> jax.Array:
    """Return the fraction of the test examples whose most likely class is another one."""
    classes = jnp.arange(1 + int(np.asarray(problem.test["y"]).max()))

    def loss_of(x: jax.Array, y: jax.Array) -> jax.Array:
        return problem.loss_fn(params, {"x": x[None], "y": y[None]})

    losses = jax.vmap(lambda x: jax.vmap(lambda y: loss_of(x, y))(classes))(problem.test["x"])
    return jnp.mean(jnp.argmin(losses, axis=1) != problem.test["y"])


# Full batches.
def compare_full_batch(name: str, problem: Problem, passes: list[int]) -> None:
    """Show how near L-BFGS and Newton-CG come by passes over all examples, with no rate to search."""
    lowest = min(loss for _, loss in lbfgs_losses(problem, 1000))
    for method_name, losses in (("L-BFGS", lbfgs_losses), ("Newton-CG", newton_losses)):
        taken, above = map(np.array, zip(*losses(problem, max(passes)), strict=True))
        above = np.maximum.accumulate(above[::-1])[::-1] - lowest
        cells = {}
        for wanted in SUBOPTIMALITIES:
            reached = taken[above <= wanted]
            cells[f"passes to {wanted:g}"] = str(reached[0]) if len(reached) else "-"
        for count in passes:
            cells[f"after {count}"] = f"{max(above[taken <= count][-1], 0.0):.0e}"
        RESULTS.show(f"{name}: full batches", method=method_name, **cells)


def lbfgs_losses(problem: Problem, passes: int) -> Iterator[tuple[int, float]]:
    """Yield the passes so far and the loss, before and after each step of `optax.lbfgs`."""
    tx = optax.lbfgs()

    def value_fn(params: jax.Array) -> jax.Array:
        return problem.loss_fn(params, problem.data)

    value_and_grad = optax.value_and_grad_from_state(value_fn)

    @jax.jit
    def step(params: jax.Array, opt_state: Any) -> tuple[Any, Any, jax.Array, jax.Array]:
        value, grad = value_and_grad(params, state=opt_state)
        more = {"value": value, "grad": grad, "value_fn": value_fn}
        updates, opt_state = tx.update(grad, opt_state, params, **more)
        trials = optax.tree.get(opt_state, "info").num_linesearch_steps
        loss = optax.tree.get(opt_state, "value")
        return optax.apply_updates(params, updates), opt_state, trials, loss

    params, taken = problem.init(0), 1
    opt_state = tx.init(params)
    yield taken, float(value_fn(params))
    while taken < passes:
        params, opt_state, trials, loss = step(params, opt_state)
        taken += max(int(trials), 1)
        yield taken, float(loss)


def newton_losses(problem: Problem, passes: int) -> Iterator[tuple[int, float]]:
    """Yield the same of Newton's method: H d = -g by conjugate gradients to |g|^(1/2), halved steps."""
    value_and_grad = jax.jit(lambda w: jax.value_and_grad(problem.loss_fn)(w, problem.data))

    @jax.jit
    def product(w: jax.Array, v: jax.Array) -> jax.Array:
        return jax.jvp(lambda w: jax.grad(problem.loss_fn)(w, problem.data), (w,), (v,))[1]

    w, taken = problem.init(0), 1
    loss, grad = value_and_grad(w)
    yield taken, float(loss)
    while taken < passes and float(jnp.linalg.norm(grad)) > 1e-15:
        direction, residual = jnp.zeros_like(w), -grad
        search, squared = residual, jnp.vdot(residual, residual)
        bound = jnp.minimum(0.5, squared**0.25) ** 2 * squared
        while squared > bound and taken < passes:
            curved, taken = product(w, search), taken + 1
            length = squared / jnp.vdot(search, curved)
            direction, residual = direction + length * search, residual - length * curved
            before, squared = squared, jnp.vdot(residual, residual)
            search = residual + squared / before * search
        scale, slope = 1.0, jnp.vdot(grad, direction)
        while taken < passes:
            new_loss, new_grad = value_and_grad(w + scale * direction)
            taken += 1
            if new_loss <= loss + 1e-4 * scale * slope or scale < 1e-3:
                w, loss, grad = w + scale * direction, new_loss, new_grad
                break
            scale *= 0.5
        yield taken, float(loss)


# MARS on bytes.
def _adamw(*before: Any, **betas: float) -> Callable[[Any], Any]:
    return lambda rate: optax.chain(*before, optax.adamw(rate, weight_decay=0.01, **betas))


_CLIP, _BETAS = optax.clip_by_global_norm(1.0), {"b1": 0.95, "b2": 0.99}
# Gradients at the last params are not clipped: those that they are compared with may not be either. The
# exact form takes two gradients a step, and half as many steps.
ON_BYTES = {
    "AdamW, betas 0.9 and 0.999": (_adamw(_CLIP), 1),
    "AdamW, betas 0.95 and 0.99": (_adamw(_CLIP, **_BETAS), 1),
    "MARS-AdamW, betas 0.95 and 0.99": (_adamw(_CLIP, MARS["mars"], **_BETAS), 1),
    "exact MARS-AdamW, betas 0.95 and 0.99": (_adamw(MARS["mars, exact"], **_BETAS), 2),
}


def compare_mars(steps: int, seeds: int, rates: list[float], repetitions: int) -> None:
    """Show what a step costs, and the loss on held-out bytes after as many gradients of examples."""
    data, held = library_bytes.load()
    test = library_bytes.windows(held, np.random.default_rng(1), 256)
    ids = library_bytes.windows(data, np.random.default_rng(0), BATCH)
    init = jax.jit(lambda seed: library_bytes.Decoder().init(jax.random.key(seed), ids[:1, :-1]))
    given = max(repetitions // 10, 1), f"batch {BATCH}", library_bytes.loss_fn, init(0), ids
    _compare(*given, MARS, "AdamW", ADAMW)
    evaluate = jax.jit(library_bytes.loss_fn)

    @functools.partial(jax.jit, donate_argnums=(0, 1), static_argnums=3)
    def step(params: Any, opt_state: Any, ids: jax.Array, tx: Any) -> tuple[Any, Any]:
        e = optperm.evaluate(library_bytes.loss_fn, params, ids)
        updates, opt_state = tx.update(e.grad, opt_state, params, **e.extra_args)
        return optax.apply_updates(params, updates), opt_state

    for name, (make, gradients) in ON_BYTES.items():
        found: dict[float, list[float]] = {rate: [] for rate in rates}
        for rate in rates:
            count = steps // gradients
            tx = optax.with_extra_args_support(make(optax.cosine_decay_schedule(rate, count, 0.05)))
            for seed in range(seeds):
                rng, params = np.random.default_rng(seed), init(seed)
                opt_state = tx.init(params)
                for _ in range(count):
                    ids = library_bytes.windows(data, rng, BATCH)
                    params, opt_state = step(params, opt_state, ids, tx)
                found[rate].append(float(evaluate(params, test)))
        best = min(found, key=lambda rate: np.nan_to_num(found[rate], nan=np.inf).mean())
        losses = np.array(found[best])
        spread = f"{losses.mean():.4f} ({losses.min():.4f}, {losses.max():.4f})"
        RESULTS.show("Byte transformer", method=name, nats_per_byte=spread, rate=f"{best:g}")


# A softmax regression of the size of MNIST.
def make_optimizers(n: int, batch_size: int, l2: float) -> dict[str, Callable[[Any], Any]]:
    """Return methods, each from a rate; they take a full gradient every two passes of steps."""
    svrg = optperm.svrg(every=2 * (n // batch_size))
    return {
        "svrg": lambda rate: optax.chain(svrg, optax.sgd(rate)),
        # Three times the steps of SGD, which were best on the digits
        "svrg, Nesterov momentum 0.9": lambda rate: optax.chain(
            svrg, optax.sgd(0.3 * rate, momentum=0.9, nesterov=True)
        ),
        "katyusha": lambda rate: optperm.katyusha(rate, l2, batch_size / (2 * n)),
    }


def make_runner(problem: Problem, make: Callable[[Any], Any]) -> Callable[..., tuple[Any, Any]]:
    """Return a function from a rate, params, a state (None at first) and batches to both after."""

    @jax.jit
    def run(rate: float, w: jax.Array, state: Any, batches: jax.Array) -> tuple[jax.Array, Any]:
        tx = make(rate)
        full_grad_fn = functools.partial(jax.grad(problem.loss_fn), batch=problem.data)
        state = tx.init(w) if state is None else state
        of = problem.data, problem.loss_fn
        return images.train(tx, w, state, batches, *of, full_grad_fn=full_grad_fn)

    return run


def stochastic_trail(
    problem: Problem, passes: int, batch_size: int, rate: float, spent: float, make: Any, seed: int
) -> Trail:
    """Pass by steps of two gradients each, with a full gradient at first and for every two passes."""
    n, rng, run = len(problem.data["y"]), np.random.default_rng(seed), make_runner(problem, make)
    w, state, taken = problem.init(0), None, 1.0
    first = shuffle(n, batch_size, rng)
    _, began = run(rate, w, None, first)
    jax.block_until_ready(run(rate, w, began, first))  # compiled
    while taken < passes:
        start = time.process_time()
        w, state = jax.block_until_ready(run(rate, w, state, shuffle(n, batch_size, rng)))
        spent += time.process_time() - start
        taken += 2.5
        yield taken, spent, float(problem.loss_fn(w, problem.data))


def lbfgs_trail(problem: Problem, passes: int) -> Trail:
    """Step by `optax.lbfgs`; the seconds of its compilation are left out."""
    for _ in lbfgs_losses(problem, 3):
        pass
    start, compiled = time.process_time(), None
    for taken, loss in lbfgs_losses(problem, passes):
        compiled = time.process_time() - start if compiled is None or taken < 3 else compiled
        yield float(taken), time.process_time() - start - compiled, loss


def scikit_trail(problem: Problem, passes: int, solver: str, l2: float) -> Trail:
    """Fit with 1, 2, 4, ... iterations."""
    x, y = np.asarray(problem.data["x"]), np.asarray(problem.data["y"])
    of = {"solver": solver, "C": 1 / (len(y) * l2), "fit_intercept": False, "tol": 1e-14}
    count = 1
    while count <= passes:
        model, start = LogisticRegression(**of, max_iter=count), time.process_time()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            model.fit(x, y)
        spent, w = time.process_time() - start, model.coef_.T
        w = np.concatenate([-w, w], axis=1) / 2 if w.shape[1] == 1 else w
        yield float(count), spent, float(problem.loss_fn(jnp.asarray(w), problem.data))
        count *= 2


def compare_trails(problem: Problem, l2: float, chosen: argparse.Namespace) -> None:
    """Show the passes and seconds of all methods to the suboptimalities."""
    n = len(problem.data["y"])
    trails: dict[str, Any] = {
        "optax.lbfgs": list(lbfgs_trail(problem, chosen.lbfgs_passes)),
        "scikit-learn, lbfgs": list(scikit_trail(problem, chosen.lbfgs_passes, "lbfgs", l2)),
        "scikit-learn, saga": list(scikit_trail(problem, chosen.saga_passes, "saga", l2)),
    }
    for batch_size in chosen.batch_sizes:
        start = time.process_time()
        sample = jax.tree.map(lambda leaf: leaf[: chosen.rate_examples], problem.data)
        given = problem.loss_fn, problem.init(0), sample, batch_size
        rate = optperm.variance.svrg_learning_rate(*given)
        run = problem, chosen.svrg_passes, batch_size, rate, time.process_time() - start
        for name, make in make_optimizers(n, batch_size, l2).items():
            for seed in range(chosen.seeds):
                shown = f"{name}, batches of {batch_size}, rate {rate:.3g}, seed {seed}"
                trails[shown] = list(stochastic_trail(*run, make, seed))
    lowest = min(loss for trail in trails.values() for _, _, loss in trail if np.isfinite(loss))
    for name, trail in trails.items():
        cells = {}
        for wanted in SUBOPTIMALITIES[:3]:
            found = next((row for row in trail if row[2] - lowest <= wanted), None)
            cells[f"to {wanted:g}"] = "-" if found is None else f"{found[0]:g}: {found[1]:.2f} s"
        cells["at the end"] = f"{trail[-1][2] - lowest:.1e} after {trail[-1][0]:g}"
        title = f"Softmax regression, {n} examples, L2 {l2:.3g}"
        RESULTS.show(title, method=name, **cells)


def five_problems(pictures: tuple[np.ndarray, np.ndarray]) -> Iterator[tuple[str, Problem, float]]:
    """Yield problems that differ in scales and in the similarity of examples, and L2 penalties."""
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


def compare_rates(pictures: Any, passes: int, batch_sizes: list[int]) -> None:
    """Show, for each problem, the loss of SVRG and Katyusha by the multiple of the rate found."""
    title = f"Loss after {passes} passes of steps by the multiple of the rate found"
    for name, problem, l2 in five_problems(pictures):
        n = len(problem.data["y"])
        for batch_size in batch_sizes:
            given = problem.loss_fn, problem.init(0), problem.data, batch_size
            rate = optperm.variance.svrg_learning_rate(*given)
            optimizers = make_optimizers(n, batch_size, l2)
            for method in ("svrg", "katyusha"):
                run, losses = make_runner(problem, optimizers[method]), {}
                for factor in FACTORS:
                    rng = np.random.default_rng(0)
                    batches = jnp.concatenate([shuffle(n, batch_size, rng) for _ in range(passes)])
                    w, _ = run(factor * rate, problem.init(0), None, batches)
                    losses[factor] = float(problem.loss_fn(w, problem.data))
                best = min(losses, key=lambda factor: (np.isnan(losses[factor]), losses[factor]))
                cells = {f"{factor:g}": f"{loss:.6g}" for factor, loss in losses.items()}
                row = {"problem": f"{name}, batches of {batch_size}", "method": method}
                RESULTS.show(title, **row, rate=f"{rate:.3g}", best=f"{best:g}", **cells)


PARTS = ("steps", "variance", "convex", "lbfgs", "networks", "mars", "rates", "table")


def main() -> None:
    """Run the parts that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--only", choices=PARTS, nargs="+", default=PARTS)
    add("--data", type=pathlib.Path, help="an npz for table and rates; without, 8 x 8 digits")
    add("--repetitions", type=int, default=301, help="of each step")
    add("--epochs", type=int, default=30, help="along which variances are taken")
    add("--passes", type=int, default=30, help="over the data, of each method")
    add("--full-passes", type=int, default=200, help="of L-BFGS and Newton-CG")
    add("--seeds", type=int, default=3)
    add("--rates", type=float, nargs="+", default=[2.0**k for k in range(-5, 4)])
    add("--steps", type=int, default=400, help="of AdamW")
    add("--adamw-rates", type=float, nargs="+", default=[1e-3, 2e-3, 4e-3, 8e-3])
    add("--methods", choices=METHODS, nargs="+", default=list(METHODS))
    add("--width", type=int, default=512, help="of the network of steps")
    add("--batches", type=int, nargs="+", default=[32, 128, 512], help="of steps")
    add("--examples", type=int, default=20_000, help="of the table")
    add("--l2", type=float, default=1e-4, help="of the table; 0 for 1/n")
    add("--lbfgs-passes", type=int, default=1000)
    add("--saga-passes", type=int, default=128)
    add("--svrg-passes", type=int, default=200)
    add("--rate-passes", type=int, default=20)
    add("--batch-sizes", type=int, nargs="+", default=[1, 16], help="of the table and rates")
    add("--rate-examples", type=int, help="to find the rate on; without, all")
    results.add_argument(parser)
    chosen = parser.parse_args()
    given = chosen.passes, chosen.seeds, chosen.rates, chosen.methods
    if "steps" in chosen.only:
        compare_steps(chosen.repetitions, chosen.width, chosen.batches)
    if "variance" in chosen.only:
        show_variances(chosen.epochs)
    for name, problem in network_problems() if "networks" in chosen.only else ():
        compare_methods(name, problem, *given)
    if "mars" in chosen.only:
        compare_mars(chosen.steps, chosen.seeds, chosen.adamw_rates, chosen.repetitions)
    with jax.enable_x64(True):
        for name, problem in convex_problems() if "convex" in chosen.only else ():
            compare_methods(name, problem, *given)
        for name, problem in convex_problems() if "lbfgs" in chosen.only else ():
            compare_full_batch(name, problem, [chosen.passes, chosen.full_passes])
        _, (x, y), _ = images.load(chosen.data)
        x, y = np.asarray(x, float).reshape(len(x), -1), np.asarray(y)
        if "rates" in chosen.only:
            compare_rates((x[:2000], y[:2000]), chosen.rate_passes, chosen.batch_sizes)
        if "table" in chosen.only:
            x, y = x[: chosen.examples], y[: chosen.examples]
            l2 = chosen.l2 or 1 / len(x)
            compare_trails(softmax(x, y, l2), l2, chosen)
    RESULTS.write(chosen.json)


if __name__ == "__main__":
    main()
