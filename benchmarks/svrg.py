"""Cost and gain of variance reduction: SVRG, recursive gradients and MARS compared with SGD and AdamW.

The script prints:

- steps: the time of a jitted step of each method over the time of a step of SGD or AdamW, measured in
  turns;
- saga: the gradient evaluations (of single examples, including full gradients) and seconds until the
  loss is near the optimum, compared with scikit-learn's SAGA on the same problem: logistic regression on
  the standardized breast cancer data, L2 of 1/n;
- variance: the variance of the gradient estimate along a run of SVRG, over the variance of the plain
  batch gradient;
- convex and networks: training loss and test error of each method and of plain SGD, momentum and Adam
  after the same number of gradients of single examples, including full gradients, at constant rates and
  with a cosine, each at the best rate of the printed grid. The problems are logistic and softmax
  regression, an MLP on the digits, and an MLP on the digits with 30 % wrong labels;
- lbfgs: the passes over all examples of `optax.lbfgs` and of Newton's method with conjugate gradients on
  the two convex problems, where each evaluation of a line search and each Hessian product counts as one;
- mars: MARS-AdamW and AdamW on the byte transformer of the examples, in the same way.

    python benchmarks/svrg.py [--only PART ...] [--json FILE]
"""

import argparse
import functools
import statistics
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import library_bytes
import numpy as np
import optax
import results
from images import train
from sklearn.datasets import load_breast_cancer, load_digits
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from timing import seconds, stepping, take_turns

import optperm

RESULTS = results.Results()


# What a step costs.


class Network(nn.Module):
    """A multilayer perceptron."""

    width: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """The logits."""
        for _ in range(2):
            x = nn.relu(nn.Dense(self.width)(x))
        return nn.Dense(10)(x)


def cross_entropy(model: nn.Module, params: optax.Params, batch: Any) -> jax.Array:
    """The mean loss of a classifier."""
    logits = model.apply({"params": params}, batch[0])
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, batch[1]))


MARS = {"mars": optperm.mars(), "mars, exact": optperm.mars(exact=True)}
ADAMW = optax.adamw(1e-3, b1=0.95, b2=0.99)


def compare_steps(repetitions: int, width: int, batch_sizes: list[int]) -> None:
    """Prints the ratio of steps for several batch sizes."""
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
    loss_fn = functools.partial(cross_entropy, model)
    params = model.init(jax.random.key(0), jnp.zeros((1, 784)))["params"]
    size = sum(leaf.size for leaf in jax.tree.leaves(params))
    print(f"One step between snapshots, an MLP of {size:,} params, over SGD's and over AdamW's")
    print("(bars: 2.1, and 1.1 for mars; of the medians, and of the fastest tenths)")
    for batch_size in batch_sizes:
        x = jax.random.normal(jax.random.key(1), (batch_size, 784))
        y = jax.random.randint(jax.random.key(2), (batch_size,), 0, 10)
        compare = functools.partial(_compare, loss_fn, params, (x, y), repetitions)
        compare(f"batch {batch_size}", of_sgd, "SGD", sgd)
        compare(f"batch {batch_size}", MARS, "AdamW", ADAMW)


def _compare(
    loss_fn: Any,
    params: optax.Params,
    batch: Any,
    repetitions: int,
    name: str,
    methods: dict[str, Any],
    baseline: str,
    optimizer: optax.GradientTransformation,
) -> None:
    """Prints a line: the time of the baseline, and the ratio of each method to it."""
    txs = {baseline: optax.with_extra_args_support(optimizer)}
    txs |= {name: optax.chain(method, optimizer) for name, method in methods.items()}
    runs = {name: _stepper(tx, loss_fn, params, batch) for name, tx in txs.items()}
    times = take_turns(runs, repetitions, warm_up=0)
    median = {each: statistics.median(taken) for each, taken in times.items()}
    # Where other programs run, the fastest tenth was disturbed least.
    fastest = {each: sorted(taken)[len(taken) // 10] for each, taken in times.items()}
    times_of_it = {each: f"{median[each] / median[baseline]:.2f}" for each in methods}
    RESULTS.row(f"A step over {baseline}'s", at=name, **times_of_it)
    ratios = ", ".join(
        f"{each} {median[each] / median[baseline]:.2f} {fastest[each] / fastest[baseline]:.2f}"
        for each in methods
    )
    print(f"  {name}: {baseline} {1e3 * median[baseline]:.2f} ms; {ratios}", flush=True)


def _stepper(
    tx: optax.GradientTransformationExtraArgs, loss_fn: Any, params: optax.Params, batch: Any
) -> Callable[[], object]:
    """A function that takes one more step, with params and state donated; compiled already."""

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params: optax.Params, opt_state: Any) -> tuple[optax.Params, Any]:
        e = optperm.evaluate(loss_fn, params, batch)
        updates, opt_state = tx.update(
            e.grad, opt_state, params, full_grad_fn=e.extra_args["grad_fn"], **e.extra_args
        )
        return optax.apply_updates(params, updates), opt_state

    carry = jax.tree.map(jnp.array, params), tx.init(params)
    if any(isinstance(part, optperm.variance.SvrgState) for part in carry[1]):
        grad = jax.grad(loss_fn)(params, batch)
        carry = carry[0], optperm.variance.take_snapshot(carry[1], params, grad)

    run = stepping(step, carry)
    for _ in range(3):
        jax.block_until_ready(run())
    return run


# Against SAGA.


def logistic_loss(w: jax.Array, batch: Any) -> jax.Array:
    """Mean logistic loss with an L2 penalty of 1/n; the batch holds signed rows and 1/n."""
    return jnp.mean(jax.nn.softplus(-(batch["x"] @ w))) + 0.5 * batch["l2"] * jnp.dot(w, w)


def compare_with_saga(tolerance: float) -> None:
    """Prints gradient evaluations and seconds to the tolerance, for SAGA and settings of SVRG."""
    x, y = load_breast_cancer(return_X_y=True)
    x = (x - x.mean(axis=0)) / x.std(axis=0)
    signed = (2.0 * y - 1.0)[:, None] * x
    n = len(x)
    lipschitz = float(np.max(np.sum(x**2, axis=1)) / 4 + 1 / n)  # Of the gradient of one example.
    lowest = _optimum(signed)
    print(f"Breast cancer, {n} examples: to {tolerance:g} of the optimum {lowest:.6f}")
    saga_count, saga_seconds = _saga(x, y, signed, lowest, tolerance)
    cells = {"evaluations": f"{saga_count:,}", "seconds": f"{saga_seconds:.3f}"}
    RESULTS.row(f"To {tolerance:g} of the optimum", method="SAGA (scikit-learn)", **cells)
    print(f"  SAGA (scikit-learn)             {saga_count:9,} evaluations  {saga_seconds:6.3f} s")
    for batch_size, steps_over_l in ((1, 0.5), (1, 1.0), (1, 4.0), (8, 32.0)):
        count, taken = _svrg(signed, lowest, tolerance, batch_size, steps_over_l / lipschitz)
        name = f"svrg, batches of {batch_size}, step size {steps_over_l:g}/L"
        cells = {"evaluations": f"{count:,}", "seconds": f"{taken:.3f}"}
        RESULTS.row(f"To {tolerance:g} of the optimum", method=name, **cells)
        print(
            f"  SVRG batch {batch_size}, step size {steps_over_l:4}/L {count:9,} evaluations  "
            f"{taken:6.3f} s  {count / saga_count:.2f} of SAGA's evaluations (bar: 1.5)"
        )


def _loss(signed: np.ndarray, w: np.ndarray) -> float:
    return float(np.mean(np.logaddexp(0.0, -(signed @ w))) + w @ w / (2 * len(signed)))


def _optimum(signed: np.ndarray) -> float:
    """The lowest loss, by Newton's method."""
    n, d = signed.shape
    w = np.zeros(d)
    for _ in range(30):
        p = 1 / (1 + np.exp(signed @ w))
        hessian = (signed.T * (p * (1 - p))) @ signed / n + np.eye(d) / n
        w -= np.linalg.solve(hessian, -signed.T @ p / n + w / n)
    return _loss(signed, w)


def _saga(
    x: np.ndarray, y: np.ndarray, signed: np.ndarray, lowest: float, tolerance: float
) -> tuple[int, float]:
    """The first epoch after which SAGA is within the tolerance, in evaluations, and its time."""

    def fit(epochs: int) -> LogisticRegression:
        model = LogisticRegression(
            solver="saga", C=1.0, fit_intercept=False, tol=1e-30, max_iter=epochs, random_state=0
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            return model.fit(x, y)

    def reached(epochs: int) -> bool:
        return _loss(signed, fit(epochs).coef_[0]) - lowest <= tolerance

    high = 1
    while not reached(high):
        high *= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if reached(middle) else (middle, high)
    taken = statistics.median(seconds(lambda: fit(high)) for _ in range(3))
    return int(fit(high).n_iter_[0]) * len(x), taken


def _svrg(
    signed: np.ndarray, lowest: float, tolerance: float, batch_size: int, learning_rate: float
) -> tuple[int, float]:
    """The same for SVRG with a snapshot every five passes, taken inside the compiled loop."""
    n = len(signed)
    steps = n // batch_size
    tx = optax.chain(optperm.svrg(every=5 * steps), optax.sgd(learning_rate))
    rows = {"x": jnp.asarray(signed)}

    def loss_fn(w: jax.Array, batch: Any) -> jax.Array:
        return logistic_loss(w, batch | {"l2": 1.0 / n})

    @jax.jit
    def run_pass(w: jax.Array, opt_state: Any, order: jax.Array) -> tuple[jax.Array, Any]:
        full_grad_fn = functools.partial(jax.grad(loss_fn), batch=rows)
        return train(tx, w, opt_state, order, rows, loss_fn, full_grad_fn=full_grad_fn)

    def run(passes: int, *, until: float = -1.0) -> tuple[jax.Array, int]:
        rng = np.random.default_rng(0)
        w = jnp.zeros(signed.shape[1])
        opt_state = tx.init(w)
        for index in range(passes):
            order = rng.permutation(n)[: steps * batch_size].reshape(steps, batch_size)
            w, opt_state = run_pass(w, opt_state, order)
            if until >= 0 and _loss(signed, np.asarray(w)) - lowest <= until:
                return w, index + 1
        if until >= 0:
            raise RuntimeError("SVRG did not reach the tolerance.")
        return w, passes

    _, passes = run(10_000, until=tolerance)
    taken = statistics.median(seconds(lambda: run(passes)[0]) for _ in range(3))
    snapshots = -(-passes // 5)
    return passes * steps * 2 * batch_size + snapshots * n, taken


# The variance along a run.


def print_variance(epochs: int) -> None:
    """Prints it for a convex problem, and for a network, where the correction can do harm."""
    x, y = load_breast_cancer(return_X_y=True)
    x = (x - x.mean(axis=0)) / x.std(axis=0)
    data = {"x": jnp.asarray((2.0 * y - 1.0)[:, None] * x, jnp.float32)}
    print("Variance of the gradient estimate over the plain one's, batch 32, snapshot every epoch")
    penalty = {"l2": 1 / len(x)}

    def convex_loss(w: jax.Array, batch: Any) -> jax.Array:
        return logistic_loss(w, batch | penalty)

    _variance_along("logistic regression", convex_loss, jnp.zeros(30), data, epochs)
    x, y = load_digits(return_X_y=True)
    model = Network(64)
    digits = {"x": jnp.asarray(x / 16.0, jnp.float32), "y": jnp.asarray(y)}
    params = model.init(jax.random.key(0), digits["x"][:1])["params"]

    def loss_fn(params: optax.Params, batch: Any) -> jax.Array:
        return cross_entropy(model, params, (batch["x"], batch["y"]))

    _variance_along("MLP on the digits", loss_fn, params, digits, epochs)


def _variance_along(
    name: str,
    loss_fn: Any,
    params: Any,
    data: dict[str, jax.Array],
    epochs: int,
) -> None:
    """Measures at the middle and at the end of epochs, over the batches of a fresh shuffle."""
    n = len(data["x"])
    steps = n // 32
    tx = optperm.svrg()
    optimizer = optax.chain(tx, optax.sgd(0.1))

    @jax.jit
    def run(params: Any, opt_state: Any, order: jax.Array) -> tuple[Any, Any]:
        return train(optimizer, params, opt_state, order, data, loss_fn)

    @jax.jit
    def variances(params: Any, state: Any, order: jax.Array) -> tuple[jax.Array, jax.Array]:
        def estimates(indices: jax.Array) -> tuple[Any, Any]:
            batch = jax.tree.map(lambda leaf: leaf[indices], data)
            e = optperm.evaluate(loss_fn, params, batch)
            return e.grad, tx.update(e.grad, state, params, **e.extra_args)[0]

        plain, corrected = jax.lax.map(estimates, order)
        return tuple(
            sum(jnp.sum(jnp.var(g, axis=0)) for g in jax.tree.leaves(grads))
            for grads in (plain, corrected)
        )

    rng = np.random.default_rng(0)

    def shuffled() -> np.ndarray:
        return rng.permutation(n)[: steps * 32].reshape(steps, 32)

    opt_state = optimizer.init(params)
    print(f"  {name}: loss, then the ratio in the middle and at the end of the epoch")
    for epoch in range(1, epochs + 1):
        grad = jax.grad(loss_fn)(params, data)
        opt_state = optperm.variance.take_snapshot(opt_state, params, grad)
        order, ratios = shuffled(), []
        for half in np.split(order, [steps // 2]):
            params, opt_state = run(params, opt_state, half)
            plain, corrected = variances(params, opt_state[0], shuffled())
            ratios.append(float(corrected / plain))
        if epoch in (1, 3, 10, 30):
            loss = float(loss_fn(params, data))
            halves = {"middle": f"{ratios[0]:.2e}", "end": f"{ratios[1]:.2e}"}
            RESULTS.row("Variance over the plain gradient's", problem=name, epoch=epoch, **halves)
            print(f"    epoch {epoch:2}: {loss:.4f}  {ratios[0]:8.2e}  {ratios[1]:8.2e}")


# Equal gradients, each at its best rate.


class Problem(NamedTuple):
    """What is trained.

    Attributes:
      loss_fn: Of params and a batch of `x` and `y`.
      init: The initial params, from a seed.
      data: What is trained on.
      test: What is tested on.
      lowest: The lowest loss there is, if that is known, else zero.
    """

    loss_fn: Any
    init: Callable[[int], optax.Params]
    data: dict[str, jax.Array]
    test: dict[str, jax.Array]
    lowest: float = 0.0


class Method(NamedTuple):
    """What trains.

    Attributes:
      make: From a learning rate, the number of steps, and that between two full gradients.
      gradients: Of its batch, a step.
      refreshes: Whether it takes full gradients.
      rates: What its rates are, over those of SGD.
    """

    make: Callable[..., optax.GradientTransformation]
    gradients: int = 1
    refreshes: bool = False
    rates: float = 1.0


def _before_sgd(make: Callable[[int, int], Any]) -> Callable[..., Any]:
    return lambda rate, steps, every: optax.chain(make(steps, every), optax.sgd(rate))


METHODS = {
    "SGD": Method(lambda rate, *_: optax.sgd(rate)),
    "SGD, momentum 0.9": Method(lambda rate, *_: optax.sgd(rate, 0.9), rates=1 / 8),
    "Adam": Method(lambda rate, *_: optax.adam(rate), rates=1 / 64),
    "SVRG": Method(_before_sgd(lambda _, m: optperm.svrg(every=m)), 2, True),
    "SVRG, loopless": Method(_before_sgd(lambda _, m: optperm.svrg(probability=1 / m)), 2, True),
    "alpha-SVRG": Method(
        _before_sgd(lambda n, m: optperm.svrg(optax.linear_schedule(0.75, 0.0, n), every=m)),
        2,
        True,
    ),
    "STORM, a = 0.1": Method(_before_sgd(lambda *_: optperm.recursive_gradient(0.1)), 2),
    "SARAH": Method(_before_sgd(lambda _, m: optperm.recursive_gradient(0.0, every=m)), 2, True),
    "PAGE": Method(_before_sgd(lambda _, m: optperm.recursive_gradient(0.0, 1 / m)), 2, True),
}
BATCH = 32
SHAPES: dict[str, Callable[[float, int], Any]] = {
    "constant": lambda rate, steps: rate,
    "cosine": optax.cosine_decay_schedule,
}


def compare_methods(
    name: str,
    problem: Problem,
    passes: int,
    seeds: int,
    rates: list[float],
    methods: list[str],
) -> None:
    """Prints the table of a problem: rates, training losses and test errors of all methods."""
    n = len(problem.data["x"])
    every = max(2 * n // BATCH, 1)
    above = f", above the lowest, {problem.lowest:.6f}" if problem.lowest else ""
    print(
        f"\n{name}: {n} examples, {passes} passes, batches of {BATCH}, {seeds} seeds; rates {rates}"
    )
    print(f"Training loss{above} (least, most), and test error, at the best rate of each")
    for method_name in methods:
        method = METHODS[method_name]
        a_step = method.gradients * BATCH + (n / every if method.refreshes else 0.0)
        steps = int(passes * n / a_step)
        for shape_name, shape in SHAPES.items():
            run = _runner(problem, method, steps, every, shape)
            found = {
                rate: np.array(
                    [run(jnp.asarray(method.rates * rate), seed) for seed in range(seeds)]
                )
                for rate in rates
            }
            best = min(rates, key=lambda rate: np.nan_to_num(found[rate][:, 0], nan=np.inf).mean())
            losses, errors = found[best].T
            losses = losses - problem.lowest
            edge = " (an end of the grid)" if best in (rates[0], rates[-1]) else ""
            spread = f"{losses.mean():.2e} ({losses.min():.2e}, {losses.max():.2e})"
            cells = {"training_loss": spread, "test_error": f"{errors.mean():.4f}"}
            title = f"{name}, {passes} passes{above}"
            RESULTS.row(title, method=method_name, rate=shape_name, **cells)
            print(
                f"  {method_name:17} {shape_name:9} {losses.mean():9.2e} ({losses.min():.2e}, "
                f"{losses.max():.2e})  {errors.mean():.4f}  rate {method.rates * best:.3g}{edge}",
                flush=True,
            )


def _runner(
    problem: Problem, method: Method, steps: int, every: int, shape: Callable[[float, int], Any]
) -> Callable[[jax.Array, int], tuple[jax.Array, jax.Array]]:
    """A function from a rate and a seed to the training loss at the end and the test error."""
    n = len(problem.data["x"])

    @jax.jit
    def ended(rate: jax.Array, params: optax.Params, order: jax.Array) -> tuple[jax.Array, Any]:
        full_grad_fn = functools.partial(jax.grad(problem.loss_fn), batch=problem.data)
        tx, of = method.make(shape(rate, steps), steps, every), (problem.data, problem.loss_fn)
        params, _ = train(tx, params, tx.init(params), order, *of, full_grad_fn=full_grad_fn)
        return problem.loss_fn(params, problem.data), _test_error(problem, params)

    def run(rate: jax.Array, seed: int) -> tuple[jax.Array, jax.Array]:
        rng = np.random.default_rng(seed)
        shuffles = [rng.permutation(n) for _ in range(steps * BATCH // n + 1)]
        order = np.concatenate(shuffles)[: steps * BATCH].reshape(steps, BATCH)
        return ended(rate, problem.init(seed), order)

    return run


def _test_error(problem: Problem, params: optax.Params) -> jax.Array:
    """The fraction of the test examples whose most likely class is another one."""
    classes = jnp.arange(10 if problem.test["y"].max() > 1 else 2)

    def loss_of(x: jax.Array, y: jax.Array) -> jax.Array:
        return problem.loss_fn(params, {"x": x[None], "y": y[None]})

    losses = jax.vmap(lambda x: jax.vmap(lambda y: loss_of(x, y))(classes))(problem.test["x"])
    return jnp.mean(jnp.argmin(losses, axis=1) != problem.test["y"])


def _split(
    x: np.ndarray, y: np.ndarray, wrong: float = 0.0
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Three quarters to train on, of whose labels a fraction is drawn anew, and a quarter to test on."""
    rng = np.random.default_rng(0)
    order, count = rng.permutation(len(x)), 3 * len(x) // 4
    x, y = np.asarray(x[order], float), y[order]
    data = {"x": jnp.asarray(x[:count]), "y": y[:count].copy()}
    spoiled = rng.permutation(count)[: int(wrong * count)]
    shift = rng.integers(1, 10, len(spoiled))
    data["y"][spoiled] = (data["y"][spoiled] + shift) % 10
    return data | {"y": jnp.asarray(data["y"])}, {"x": jnp.asarray(x[count:]), "y": y[count:]}


def convex_problems() -> Iterator[tuple[str, Problem]]:
    """Logistic and softmax regression with an L2 penalty of 1/n, in float64."""
    for name, loaded, classes in (
        ("Logistic regression, breast cancer", load_breast_cancer, 2),
        ("Softmax regression, digits", load_digits, 10),
    ):
        x, y = loaded(return_X_y=True)
        x = (x - x.mean(axis=0)) / x.std(axis=0) if classes == 2 else x / 16.0
        data, test = _split(x, y)
        l2 = 1.0 / len(data["x"])

        def loss_fn(w: jax.Array, batch: Any, l2: float = l2) -> jax.Array:
            logits = batch["x"] @ w
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
            return jnp.mean(losses) + 0.5 * l2 * jnp.sum(w**2)

        start = jnp.zeros((x.shape[1], classes))
        lowest = _lowest(loss_fn, start, data)
        yield name, Problem(loss_fn, lambda _, start=start: start, data, test, lowest)


def _lowest(loss_fn: Any, params: jax.Array, data: Any) -> float:
    """The lowest loss, by L-BFGS."""
    tx = optax.lbfgs()

    def step(carry: Any, _: None) -> tuple[Any, None]:
        params, opt_state = carry
        e = optperm.evaluate(loss_fn, params, data)
        updates, opt_state = tx.update(e.grad, opt_state, params, **e.extra_args)
        return (optax.apply_updates(params, updates), opt_state), None

    run = jax.jit(lambda p: jax.lax.scan(step, (p, tx.init(p)), length=500)[0][0])
    return float(loss_fn(run(params), data))


SUBOPTIMALITIES = (1e-3, 1e-6, 1e-9, 1e-12)


def compare_full_batch(name: str, problem: Problem, passes: list[int]) -> None:
    """Prints how near L-BFGS and Newton-CG come by passes over all examples, with no rate to search."""
    title = f"{name}: full batches"
    print(f"\n{title}: passes to each suboptimality, and what is left after {passes} passes")
    for method_name, trail in (("L-BFGS", _lbfgs_trail), ("Newton-CG", _newton_trail)):
        taken, above = map(np.array, zip(*trail(problem, max(passes)), strict=True))
        above = np.maximum.accumulate(above[::-1])[::-1] - problem.lowest
        cells = {}
        for wanted in SUBOPTIMALITIES:
            reached = taken[above <= wanted]
            cells[f"passes to {wanted:g}"] = str(reached[0]) if len(reached) else "-"
        for count in passes:
            cells[f"after {count}"] = f"{max(above[taken <= count][-1], 0.0):.0e}"
        RESULTS.row(title, method=method_name, **cells)
        print(f"  {method_name:10} " + "  ".join(f"{k}: {v}" for k, v in cells.items()), flush=True)


def _lbfgs_trail(problem: Problem, passes: int) -> Iterator[tuple[int, float]]:
    """The passes so far and the loss after each step of `optax.lbfgs`."""
    tx = optax.lbfgs()

    def value_fn(params: jax.Array) -> jax.Array:
        return problem.loss_fn(params, problem.data)

    value_and_grad = optax.value_and_grad_from_state(value_fn)

    @jax.jit
    def step(params: jax.Array, opt_state: Any) -> tuple[Any, Any, jax.Array, jax.Array]:
        value, grad = value_and_grad(params, state=opt_state)
        updates, opt_state = tx.update(
            grad, opt_state, params, value=value, grad=grad, value_fn=value_fn
        )
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


def _newton_trail(problem: Problem, passes: int) -> Iterator[tuple[int, float]]:
    """The same of Newton's method: H d = -g by conjugate gradients to |g|^(1/2), then halved steps."""
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


def network_problems() -> Iterator[tuple[str, Problem]]:
    """An MLP on the digits, with the labels as they are, and with 30 % wrong ones."""
    x, y = load_digits(return_X_y=True)
    model = Network(64)

    def loss_fn(params: optax.Params, batch: Any) -> jax.Array:
        return cross_entropy(model, params, (batch["x"], batch["y"]))

    for name, wrong in (("MLP, digits", 0.0), ("MLP, digits with 30 % wrong labels", 0.3)):
        data, test = _split(np.float32(x / 16.0), y, wrong)
        data, test = (each | {"x": jnp.asarray(each["x"], jnp.float32)} for each in (data, test))

        def init(seed: int, x: jax.Array = data["x"]) -> optax.Params:
            return model.init(jax.random.key(seed), x[:1])["params"]

        yield name, Problem(loss_fn, init, data, test)


# MARS on bytes.


def compare_mars(steps: int, seeds: int, rates: list[float], repetitions: int) -> None:
    """Prints what a step costs, and the loss on held-out bytes after as many gradients of examples."""
    data, held = library_bytes.load()
    test = library_bytes.windows(held, np.random.default_rng(1), 256)
    ids = library_bytes.windows(data, np.random.default_rng(0), BATCH)
    params = library_bytes.Decoder().init(jax.random.key(0), ids[:1, :-1])
    print(
        "\nOne step of the byte transformer over AdamW's (of the medians, and of the fastest tenths)"
    )
    times = max(repetitions // 10, 1)
    name = f"batch {BATCH}"
    _compare(library_bytes.loss_fn, params, ids, times, name, MARS, "AdamW", ADAMW)
    evaluate = jax.jit(library_bytes.loss_fn)
    clip = optax.clip_by_global_norm(1.0)

    def adamw(rate: Any, **options: float) -> optax.GradientTransformation:
        return optax.adamw(rate, weight_decay=0.01, **options)

    # Gradients at the last params are not clipped: those that they are compared with may not be either.
    methods: dict[str, tuple[Any, int]] = {
        "AdamW 0.9 0.999": (lambda rate: optax.chain(clip, adamw(rate)), 1),
        "AdamW 0.95 0.99": (lambda rate: optax.chain(clip, adamw(rate, b1=0.95, b2=0.99)), 1),
        "MARS-AdamW": (
            lambda rate: optax.chain(clip, optperm.mars(), adamw(rate, b1=0.95, b2=0.99)),
            1,
        ),
        "MARS-AdamW, exact": (
            lambda rate: optax.chain(optperm.mars(exact=True), adamw(rate, b1=0.95, b2=0.99)),
            2,
        ),
    }
    print(
        f"\nByte transformer: {steps} steps of {BATCH} windows, a cosine, {seeds} seeds; rates {rates}"
    )
    print("Nats a byte, held out (least, most), at the best rate; exact takes half as many steps")
    for name, (make, gradients) in methods.items():

        @functools.partial(jax.jit, donate_argnums=(0, 1), static_argnums=3)
        def step(params: Any, opt_state: Any, ids: jax.Array, tx: Any) -> tuple[Any, Any]:
            e = optperm.evaluate(library_bytes.loss_fn, params, ids)
            updates, opt_state = tx.update(e.grad, opt_state, params, **e.extra_args)
            return optax.apply_updates(params, updates), opt_state

        found: dict[float, list[float]] = {}
        for rate in rates:
            count = steps // gradients
            schedule = optax.cosine_decay_schedule(rate, count, 0.05)
            tx = optax.with_extra_args_support(make(schedule))
            for seed in range(seeds):
                rng = np.random.default_rng(seed)
                params = library_bytes.Decoder().init(
                    jax.random.key(seed), jnp.zeros((1, library_bytes.CONTEXT), jnp.int32)
                )
                opt_state = tx.init(params)
                for _ in range(count):
                    ids = library_bytes.windows(data, rng, BATCH)
                    params, opt_state = step(params, opt_state, ids, tx)
                found.setdefault(rate, []).append(float(evaluate(params, test)))
        best = min(found, key=lambda rate: np.nan_to_num(found[rate], nan=np.inf).mean())
        losses = np.array(found[best])
        each = ", ".join(f"{rate:g}: {np.mean(values):.3f}" for rate, values in found.items())
        spread = f"{losses.mean():.4f} ({losses.min():.4f}, {losses.max():.4f})"
        RESULTS.row("Byte transformer", method=name, nats_a_byte=spread, rate=f"{best:g}")
        print(
            f"  {name:18} {losses.mean():.4f} ({losses.min():.4f}, {losses.max():.4f})  rate {best:g}"
            f"  ({each})",
            flush=True,
        )


PARTS = ("steps", "saga", "variance", "convex", "lbfgs", "networks", "mars")


def main(argv: list[str] | None = None) -> None:
    """Runs the parts that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=PARTS, nargs="+", default=PARTS)
    parser.add_argument("--repetitions", type=int, default=301, help="of each step")
    parser.add_argument("--tolerance", type=float, default=1e-8, help="beside SAGA")
    parser.add_argument("--epochs", type=int, default=30, help="along which variances are taken")
    parser.add_argument("--passes", type=int, default=30, help="over the data, of each method")
    parser.add_argument("--full-passes", type=int, default=200, help="of L-BFGS and Newton-CG")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rates", type=float, nargs="+", default=[2.0**k for k in range(-5, 4)])
    parser.add_argument("--steps", type=int, default=400, help="of AdamW")
    parser.add_argument("--adamw-rates", type=float, nargs="+", default=[1e-3, 2e-3, 4e-3, 8e-3])
    parser.add_argument("--methods", choices=METHODS, nargs="+", default=list(METHODS))
    parser.add_argument("--width", type=int, default=512, help="of the network of steps")
    parser.add_argument("--batches", type=int, nargs="+", default=[32, 128, 512], help="of steps")
    results.add_argument(parser)
    chosen = parser.parse_args(argv)
    each = chosen.passes, chosen.seeds, chosen.rates, chosen.methods
    if "steps" in chosen.only:
        compare_steps(chosen.repetitions, chosen.width, chosen.batches)
    if "saga" in chosen.only:
        with jax.enable_x64(True):
            compare_with_saga(chosen.tolerance)
    if "variance" in chosen.only:
        print_variance(chosen.epochs)
    if "convex" in chosen.only:
        with jax.enable_x64(True):
            for name, problem in convex_problems():
                compare_methods(name, problem, *each)
    if "lbfgs" in chosen.only:
        with jax.enable_x64(True):
            for name, problem in convex_problems():
                compare_full_batch(name, problem, [chosen.passes, chosen.full_passes])
    if "networks" in chosen.only:
        for name, problem in network_problems():
            compare_methods(name, problem, *each)
    if "mars" in chosen.only:
        compare_mars(chosen.steps, chosen.seeds, chosen.adamw_rates, chosen.repetitions)
    RESULTS.write(chosen.json)


if __name__ == "__main__":
    main()
