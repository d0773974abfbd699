"""Distance of samplers' draws from known posteriors, and the cost of the draws.

The problems are logistic regression on scikit-learn's breast cancer data with all features and with 8, a
linear regression on its diabetes data, a quadratic whose gradient noise is not its curvature, and, on
request, softmax regression on its digits. Diabetes and the quadratic have exact posteriors. The other
problems are compared with long runs of BlackJAX's NUTS, kept in benchmarks/posterior_reference.npz,
which this command makes:

    python benchmarks/posterior.py --make-reference

All samplers use the same batch size, chains and steps. For each sampler the script prints, over all
params, the minimum, median and maximum ratio of its standard deviations to the reference's, the maximum
error of a mean in standard deviations, the divergence of the draws' Gaussian from the reference's, and
the seconds.

Constant SGD runs with its defaults. The script also prints its minimum effective sample size, in all and
per processor second, and the warnings of the report. SGLD and SGHMC show the best of a printed grid of
step sizes, chosen in hindsight by the reference itself, which a user does not have. "Mandt" is constant
SGD without injected noise (`optperm.mandt_sgd`), which says so where it is unstable. It and BlackJAX's
own SGLD start at the mode. "Laplace" is the Gaussian at the mode.

    python benchmarks/posterior.py [--problems digits ...] [--batch-sizes 8 32] [--json FILE]

With `--defaults` constant SGD runs alone, on twelve problems with the full preconditioner, and with
`--forms diagonal scalar` on four problems with correlated noise. With `--keys 20` the last layer is
sampled by as many calls of `optperm.bayes.sample`, and the script prints how many of them warn.

With `--mlp` the model is a network, 64-32-10 on the digits, whose posterior is unknown. The script
prints the negative log-likelihood, calibration error and error rate on a test split, for the last
iterates of SGD and Adam, stochastic weight averaging, an ensemble of five, and every sampler, over five
seeds. Each method uses the hyperparameter of a printed grid that is best on a validation split, in the
mean over seeds. The full preconditioner, a matrix of 2,410 x 2,410 for each chain, is left out.

    python benchmarks/posterior.py --mlp [--methods sgld ...] [--json FILE]
"""

import argparse
import functools
import itertools
import pathlib
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import results
import scipy.optimize
from sklearn.datasets import load_breast_cancer, load_diabetes, load_digits, make_moons

import optperm

REFERENCE = pathlib.Path(__file__).with_name("posterior_reference.npz")
CHAINS, STEPS, START, THINNING = 4, 40_000, 8_000, 10
# What sds and means of the draws have to keep to.
SD_RATIOS, MEAN_ERROR = (0.8, 1.25), 0.3
# And of constant SGD by its defaults.
GOAL_RATIOS, GOAL_ERROR = (0.9, 1.1), 0.1
# Maximum eigenvalues of a step's h A.
GRID = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
RESULTS = results.Results()


class Problem(NamedTuple):
    """A posterior.

    Attributes:
      name: What it is called.
      data: A tree of arrays with a leading axis of examples; noise for the quadratic.
      loss_fn: `loss_fn(params, batch)`, the mean loss with the prior.
      size: D.
      num_data: N.
    """

    name: str
    data: Any
    loss_fn: Callable[[Any, Any], jax.Array]
    size: int
    num_data: int


def cancer(features: int) -> Problem:
    """Logistic regression, prior N(0, 1), with a bias."""
    x, y = load_breast_cancer(return_X_y=True)
    x = (x - x.mean(axis=0)) / x.std(axis=0)
    x = np.concatenate([x[:, :features], np.ones((len(x), 1))], axis=1)
    data, n = {"x": jnp.float32(x), "y": jnp.float32(2 * y - 1)}, len(x)

    def loss_fn(w: jax.Array, batch: Any) -> jax.Array:
        losses = jax.nn.softplus(-batch["y"] * (batch["x"] @ w))
        return jnp.mean(losses) + optperm.bayes.normal_prior(w, 1.0, n)

    return Problem(f"cancer{features + 1}", data, loss_fn, features + 1, n)


def diabetes() -> Problem:
    """Linear regression with the residuals' variance for noise, prior N(0, 1)."""
    x, y = load_diabetes(return_X_y=True)
    x, y = (x - x.mean(axis=0)) / x.std(axis=0), (y - y.mean()) / y.std()
    deviation = np.std(y - x @ np.linalg.lstsq(x, y, rcond=None)[0])
    data, n = {"x": jnp.float32(x / deviation), "y": jnp.float32(y / deviation)}, len(x)

    def loss_fn(w: jax.Array, batch: Any) -> jax.Array:
        residuals = batch["x"] @ w - batch["y"]
        return 0.5 * jnp.mean(residuals**2) + optperm.bayes.normal_prior(w, 1.0, n)

    return Problem("diabetes", data, loss_fn, 10, n)


HESSIAN = np.array([[2.0, 0.5, 0.0], [0.5, 1.0, 0.3], [0.0, 0.3, 0.5]])


def quadratic() -> Problem:
    """Mandt's, of 1,000 examples, each with another slope of the covariance C."""
    noise = np.array([[1.0, 0.6, 0.0], [0.6, 2.0, 0.0], [0.0, 0.0, 0.1]])
    raw = np.random.default_rng(0).normal(size=(1000, 3))
    raw = (raw - raw.mean(axis=0)) @ np.linalg.inv(np.linalg.cholesky(np.cov(raw.T, ddof=0))).T
    slopes = jnp.float32(raw @ np.linalg.cholesky(noise).T)
    hessian = jnp.float32(HESSIAN)

    def loss_fn(w: jax.Array, batch: Any) -> jax.Array:
        return 0.5 * w @ hessian @ w + jnp.mean(batch @ w)

    return Problem("quadratic", slopes, loss_fn, 3, 1000)


def digits() -> Problem:
    """Softmax regression on 8 x 8 images, prior N(0, 1)."""
    x, y = load_digits(return_X_y=True)
    x = np.concatenate([x / 16, np.ones((len(x), 1))], axis=1)
    data, n = {"x": jnp.float32(x), "y": jnp.int32(y)}, len(x)

    def loss_fn(w: jax.Array, batch: Any) -> jax.Array:
        logits = batch["x"] @ w.reshape(65, 10)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
        return jnp.mean(losses) + optperm.bayes.normal_prior(w, 1.0, n)

    return Problem("digits", data, loss_fn, 650, n)


def linear(name: str, x: np.ndarray, y: np.ndarray, precision: np.ndarray) -> Problem:
    """Linear regression with unit noise, and a normal prior of a precision for each coefficient."""
    data, n, p = (jnp.float32(x), jnp.float32(y)), len(x), jnp.float32(precision)

    def loss_fn(w: jax.Array, batch: Any) -> jax.Array:
        residuals = batch[0] @ w - batch[1]
        return 0.5 * jnp.mean(residuals**2) + 0.5 * jnp.sum(p * w**2) / n

    return Problem(name, data, loss_fn, x.shape[1], n)


def raw_diabetes() -> Problem:
    """The diabetes data as scikit-learn gives it, with an intercept; prior sd 5: condition 1.6e4."""
    x, y = load_diabetes(return_X_y=True)
    x, y = np.c_[np.ones(len(x)), x] / 0.7, (y - y.mean()) / y.std() / 0.7
    return linear("raw diabetes", x, y, np.r_[1.0, np.full(10, 1 / 25)])


def collinear() -> Problem:
    """Six features; four of them follow from the others, up to a noise of 0.05: condition 3.8e3."""
    rng = np.random.default_rng(0)
    z = rng.normal(size=(600, 2))
    x = np.c_[np.ones(600), z, z @ rng.normal(size=(2, 4)) + 0.05 * rng.normal(size=(600, 4))]
    return linear("collinear", x, x @ rng.normal(size=7) * 0.3 + rng.normal(size=600), np.ones(7))


def year() -> Problem:
    """An uncentered year in hundreds, and an intercept: condition 4e6."""
    rng = np.random.default_rng(0)
    x = np.c_[np.ones(500), rng.uniform(19.6, 20.2, 500), rng.normal(size=(500, 2))]
    y = x @ np.array([-3, 0.15, 1, -0.5]) + rng.normal(size=500)
    return linear("year", x, y, np.r_[0.01, 1, 1, 1])


def scales() -> Problem:
    """Features with scales from e^-4 to e^4, and an intercept of 1000."""
    rng = np.random.default_rng(0)
    units = np.exp(np.array([0.0, -4, -2, 0, 2, 4]))
    x = np.c_[np.ones(500), rng.normal(size=(500, 5))] * units
    y = x @ (np.r_[1000.0, rng.normal(size=5)] / units) + rng.normal(size=500)
    return linear("scales", x, y, np.full(6, 1e-8))


def general(
    name: str, data: Any, size: int, log_likelihood: Callable[..., jax.Array], log_prior: Any
) -> Problem:
    """A model by the log likelihood of each example, (S,), and the log prior of params (D,)."""
    n = len(jax.tree.leaves(data)[0])

    def loss_fn(w: jax.Array, batch: Any) -> jax.Array:
        return -jnp.mean(log_likelihood(w, *batch)) - log_prior(w) / n

    return Problem(name, jax.tree.map(jnp.float32, data), loss_fn, size, n)


def standard_normal(w: jax.Array) -> jax.Array:
    """The log density, up to a constant."""
    return -0.5 * jnp.sum(w**2)


def poisson() -> Problem:
    """Counts of mean exp(x w), of 1,000 examples; intercept 2, prior N(0, 1)."""
    rng = np.random.default_rng(0)
    x = np.c_[np.ones(1000), rng.normal(size=(1000, 5))]
    y = rng.poisson(np.exp(x @ np.array([2.0, 0.4, -0.3, 0.2, 0.0, 0.1])))

    def log_likelihood(w: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
        return y * (x @ w) - jnp.exp(x @ w)

    return general("Poisson", (x, y), 6, log_likelihood, standard_normal)


def student() -> Problem:
    """Errors of Student's t with 3 degrees of freedom, whose scale is a param as its logarithm."""
    rng = np.random.default_rng(0)
    x = np.c_[np.ones(1000), rng.normal(size=(1000, 5))]
    y = x @ np.array([1.0, 0.5, -0.5, 0.3, 0.0, 2.0]) + 0.7 * rng.standard_t(3, 1000)

    def log_likelihood(w: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
        z = (y - x @ w[:-1]) * jnp.exp(-w[-1])
        return -2 * jnp.log1p(z**2 / 3) - w[-1]

    return general("Student t", (x, y), 7, log_likelihood, standard_normal)


def hierarchical() -> Problem:
    """Normal means of 8 groups of 25 with a mean, a spread and an error of their own."""
    rng = np.random.default_rng(0)
    group = np.repeat(np.arange(8), 25)
    y = (1 + 0.8 * rng.normal(size=8))[group] + 0.7 * rng.normal(size=200)

    def log_likelihood(w: jax.Array, group: jax.Array, y: jax.Array) -> jax.Array:
        means, log_sigma = w[:8], w[10]
        return -0.5 * ((y - means[group.astype(int)]) * jnp.exp(-log_sigma)) ** 2 - log_sigma

    def log_prior(w: jax.Array) -> jax.Array:
        # means ~ N(mu, tau), mu ~ N(0, 2), tau and sigma half normal, as their logarithms
        means, mu, log_tau, log_sigma = w[:8], w[8], w[9], w[10]
        of_means = -0.5 * jnp.sum(((means - mu) * jnp.exp(-log_tau)) ** 2) - 8 * log_tau
        logs = jnp.stack([log_tau, log_sigma])
        return of_means - mu**2 / 8 + jnp.sum(logs - 0.5 * jnp.exp(2 * logs))

    return general("hierarchical", (group, y), 11, log_likelihood, log_prior)


def logistic() -> Problem:
    """Logistic regression on 20,000 examples of 50 features, prior N(0, 1)."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(20_000, 50)) * np.exp(0.5 * rng.normal(size=50))
    y = rng.random(20_000) < 1 / (1 + np.exp(-x @ (rng.normal(size=50) / 5)))

    def log_likelihood(w: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
        return -jax.nn.softplus(-y * (x @ w))

    return general("logistic", (x, 2 * y - 1), 50, log_likelihood, standard_normal)


def raw_cancer() -> Problem:
    """Breast cancer, unscaled (deviations from 0.003 to 570); prior N(0, 1)."""
    x, y = load_breast_cancer(return_X_y=True)
    x = np.concatenate([x, np.ones((len(x), 1))], axis=1)

    def log_likelihood(w: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
        return -jax.nn.softplus(-y * (x @ w))

    return general("raw cancer", (x, 2 * y - 1), 31, log_likelihood, standard_normal)


def last_layer() -> Problem:
    """Two moons in the 16 hidden units of a trained network, prior N(0, 1): the guide's last layer."""
    x, y = make_moons(500, noise=0.25, random_state=0)
    x, y = jnp.float32(x), jnp.int32(y)
    model = nn.Sequential([nn.Dense(16), nn.tanh, nn.Dense(1)])

    def cross_entropy(logits: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.mean(optax.sigmoid_binary_cross_entropy(logits[:, 0], y))

    params, tx = model.init(jax.random.key(0), x), optax.adam(0.01)

    def step(carry: Any, _: None) -> tuple[Any, None]:
        params, opt_state = carry
        grads = jax.grad(lambda params: cross_entropy(model.apply(params, x), y))(params)
        updates, opt_state = tx.update(grads, opt_state)
        return (optax.apply_updates(params, updates), opt_state), None

    (params, _), _ = jax.lax.scan(step, (params, tx.init(params)), length=300)
    inputs = nn.Sequential(model.layers[:-1]).apply(params, x)
    inputs = jnp.concatenate([inputs, jnp.ones((len(x), 1))], axis=1)

    def loss_fn(w: jax.Array, batch: Any) -> jax.Array:
        loss = cross_entropy(batch["x"] @ w[:, None], batch["y"])
        return loss + optperm.bayes.normal_prior(w, 1.0, len(x))

    return Problem("last layer", {"x": inputs, "y": y}, loss_fn, inputs.shape[1], len(x))


PROBLEMS = {
    "cancer31": lambda: cancer(30),
    "cancer9": lambda: cancer(8),
    "diabetes": diabetes,
    "quadratic": quadratic,
    "raw diabetes": raw_diabetes,
    "collinear": collinear,
    "year": year,
    "Poisson": poisson,
    "Student t": student,
    "hierarchical": hierarchical,
    "logistic": logistic,
    "raw cancer": raw_cancer,
    "scales": scales,
    "digits": digits,
    "last layer": last_layer,
}
CORRELATED = ("cancer9", "collinear", "last layer", "hierarchical")
EXACT = ("diabetes", "quadratic", "raw diabetes", "collinear", "year", "scales")


class Reference(NamedTuple):
    """The mean (D,), the standard deviations (D,) and, where it is kept, the covariance (D, D)."""

    mean: np.ndarray
    deviation: np.ndarray
    covariance: np.ndarray | None


def mode_and_hessian(problem: Problem) -> tuple[np.ndarray, np.ndarray]:
    """From zero in float64, by steps in a region of trust; then by Newton's."""
    with jax.enable_x64(True):
        data = jax.tree.map(
            lambda x: jnp.asarray(np.asarray(x), jnp.float64) if x.dtype == jnp.float32 else x,
            problem.data,
        )
        of = [
            jax.jit(f(lambda w: problem.loss_fn(w, data)))
            for f in (jax.value_and_grad, jax.hessian)
        ]
        w = scipy.optimize.minimize(
            lambda w: tuple(map(np.asarray, of[0](w))), np.zeros(problem.size), jac=True,
            hess=lambda w: np.asarray(of[1](w)), method="trust-exact",
        ).x  # fmt: skip
        for _ in range(5):
            w = w - np.linalg.solve(of[1](w), of[0](w)[1])
        return np.asarray(w), np.asarray(of[1](w))


@functools.cache
def reference(name: str) -> Reference:
    """Exact where it is, else from the file."""
    if name in EXACT:
        problem = PROBLEMS[name]()
        mode, hessian = mode_and_hessian(problem)
        covariance = np.linalg.inv(problem.num_data * hessian)
        return Reference(mode, np.sqrt(np.diag(covariance)), covariance)
    with np.load(REFERENCE) as kept:
        covariance = kept.get(f"{name}.covariance")
        covariance = None if covariance is None else covariance.astype(np.float64)
        mean, deviation = (
            kept[f"{name}.{part}"].astype(np.float64) for part in ("mean", "deviation")
        )
        return Reference(mean, deviation, covariance)


def make_reference(names: Sequence[str] = (), num_draws: int = 20_000, chains: int = 4) -> None:
    """Runs NUTS on the problems without an exact posterior, and writes what is kept of it."""
    import blackjax  # noqa: PLC0415

    kept = dict(np.load(REFERENCE)) if REFERENCE.exists() else {}
    for name in names or [name for name in PROBLEMS if name not in EXACT]:
        problem, draws = (
            PROBLEMS[name](),
            num_draws if PROBLEMS[name]().size < 50 else num_draws // 8,
        )
        mode, hessian = mode_and_hessian(problem)
        root = np.linalg.cholesky(np.linalg.inv(problem.num_data * hessian))
        start, scale = jnp.float32(mode), jnp.float32(root)

        def log_density(
            z: jax.Array, problem: Problem = problem, start: Any = start, scale: Any = scale
        ) -> jax.Array:
            return -problem.num_data * problem.loss_fn(start + scale @ z, problem.data)

        kernel = blackjax.nuts(log_density, 0.5, jnp.ones(problem.size))

        @jax.jit
        @jax.vmap
        def run(key: jax.Array, kernel: Any = kernel, size: int = problem.size) -> jax.Array:
            first = kernel.init(jax.random.normal(jax.random.fold_in(key, 0), (size,)))

            def step(state: Any, key: jax.Array) -> tuple[Any, jax.Array]:
                state, _ = kernel.step(key, state)
                return state, state.position

            return jax.lax.scan(step, first, jax.random.split(key, draws + 500))[1][500:]  # noqa: B023

        z = np.asarray(run(jax.random.split(jax.random.key(0), chains)), np.float64)
        w = mode + z @ root.T
        flat = w.reshape(-1, problem.size)
        deviation = flat.std(axis=0)
        halves = [half.reshape(-1, problem.size) for half in (w[: chains // 2], w[chains // 2 :])]
        apart = np.abs(halves[0].mean(axis=0) - halves[1].mean(axis=0)) / deviation
        ratio = halves[0].std(axis=0) / halves[1].std(axis=0)
        print(
            f"{name}: the halves' means agree to {apart.max():.3f} sd, sds to {abs(ratio - 1).max():.3f}"
        )
        kept[f"{name}.mean"], kept[f"{name}.deviation"] = (
            np.float32(flat.mean(0)),
            np.float32(deviation),
        )
        if problem.size < 100:
            kept[f"{name}.covariance"] = np.float32(np.cov(flat.T))
        np.savez_compressed(REFERENCE, **kept)


class Found(NamedTuple):
    """How far draws are from the reference: what is printed, and what else there is to say."""

    ratios: tuple[float, float, float]
    in_range: float
    mean_error: float
    divergence: float
    seconds: float
    says: str = ""

    def __str__(self) -> str:
        least, median, most = self.ratios
        return (
            f"sd {least:5.2f} {median:5.2f} {most:5.2f} ({self.in_range:4.0%}), "
            f"mean {self.mean_error:5.2f}, KL {self.divergence:8.3g}, {self.seconds:5.1f} s{self.says}"
        )

    @property
    def passes(self) -> bool:
        """Return whether all sds and means are near enough."""
        low, high = SD_RATIOS
        return low <= self.ratios[0] and self.ratios[2] <= high and self.mean_error <= MEAN_ERROR


def compared(draws: np.ndarray, name: str, seconds: float, says: str = "") -> Found:
    """Draws (chain, draw, D), and the reference."""
    flat, known = np.asarray(draws, np.float64).reshape(-1, draws.shape[-1]), reference(name)
    if not np.all(np.isfinite(flat)) or np.abs(flat).max() > 1e6:
        nowhere = float("inf")
        return Found((nowhere,) * 3, 0.0, nowhere, nowhere, seconds, says)
    ratio = flat.std(axis=0) / known.deviation
    error = np.abs(flat.mean(axis=0) - known.mean) / known.deviation
    divergence = float("nan")
    if known.covariance is not None:
        with jax.enable_x64(True):
            try:
                moments = flat.mean(axis=0), np.cov(flat.T), known.mean, known.covariance
                divergence = float(optperm.bayes.gaussian_kl(*moments))
            except ValueError:
                divergence = float("inf")
    three = float(ratio.min()), float(np.median(ratio)), float(ratio.max())
    inside = float(np.mean((ratio >= SD_RATIOS[0]) & (ratio <= SD_RATIOS[1])))
    return Found(three, inside, float(error.max()), divergence, seconds, says)


def draw(*arguments: Any, start: Any = None) -> np.ndarray:
    """The draws of `samples_of`, (chain, draw, D)."""
    return np.asarray(samples_of(*arguments, start=start).params)


def samples_of(
    problem: Problem,
    tx: Any,
    batch_size: int,
    seed: int,
    steps: int,
    *,
    start: Any = None,
    chains: int = CHAINS,
) -> optperm.bayes.Samples:
    """Every tenth iterate from a fifth of the steps on; from zero, or from a start."""
    n = problem.num_data

    def step(params: Any, opt_state: Any, key: jax.Array) -> tuple[Any, Any]:
        rows = jax.random.randint(key, (batch_size + 1,), 0, n)
        batch, example = (
            jax.tree.map(lambda x, part=part: x[rows[part]], problem.data)
            for part in (slice(None, -1), slice(-1, None))
        )
        e = optperm.evaluate(problem.loss_fn, params, batch, example=example)
        updates, opt_state = tx.update(e.grad, opt_state, params, **e.extra_args)
        return optax.apply_updates(params, updates), opt_state

    first = jnp.zeros(problem.size) if start is None else jnp.float32(start)
    burn_in = steps * START // STEPS
    return optperm.bayes.draw_samples(
        step,
        first,
        tx.init(first),
        jax.random.key(seed),
        num_chains=chains,
        num_draws=(steps - burn_in) // THINNING,
        thinning=THINNING,
        burn_in=burn_in,
    )


def _sentence(message: Any) -> str:
    """The first sentence of a warning or an error."""
    return str(message).partition(". ")[0].removesuffix(".")


def timed(run: Callable[[], np.ndarray], name: str) -> Found:
    """What draws come to, with the seconds they took, compilation included."""
    start, says = time.perf_counter(), ""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            draws = run()
        except ValueError as error:
            nowhere = float("nan")
            seconds = time.perf_counter() - start
            return Found(
                (nowhere,) * 3, 0, nowhere, nowhere, seconds, f"  refused: {_sentence(error)}"
            )
    if caught:
        says = "  warned: " + "; ".join(sorted({_sentence(w.message) for w in caught}))
    return compared(draws, name, time.perf_counter() - start, says)


def sample_by_defaults(
    problem: Problem, batch_size: int, preconditioner: str, seed: int, steps: int
) -> optperm.bayes.Samples:
    """The samples of `optperm.bayes.sample` with constant SGD, as many draws as of other samplers."""
    return optperm.bayes.sample(
        problem.loss_fn,
        problem.data,
        jnp.zeros(problem.size),
        jax.random.key(seed),
        batch_size=batch_size,
        preconditioner=preconditioner,
        num_chains=CHAINS,
        num_draws=(steps - steps * START // STEPS) // THINNING,
        thinning=THINNING,
    )


def best_of(
    build: Callable[[float], Any],
    sizes: Any,
    problem: Problem,
    batch_size: int,
    seed: int,
    steps: int,
) -> tuple[Found, float]:
    """The run of a grid whose draws are nearest, by sds and means."""
    runs = []
    for size in sizes:
        found = timed(lambda: draw(problem, build(size), batch_size, seed, steps), problem.name)  # noqa: B023
        low, _, high = np.log(np.maximum(found.ratios, 1e-9))
        runs.append((max(-low, high, found.mean_error), found, size))
    _, found, size = min(runs, key=lambda run: run[0] if np.isfinite(run[0]) else np.inf)
    return found, size


def blackjax_sgld(
    problem: Problem, batch_size: int, epsilon: float, seed: int, steps: int, start: Any
) -> np.ndarray:
    """The draws of BlackJAX's own SGLD."""
    import blackjax  # noqa: PLC0415

    n, burn_in = problem.num_data, steps * START // STEPS

    def log_density_gradient(w: jax.Array, batch: Any) -> jax.Array:
        return -n * jax.grad(problem.loss_fn)(w, batch)

    kernel = blackjax.sgld(log_density_gradient)

    @jax.jit
    @jax.vmap
    def run(key: jax.Array) -> jax.Array:
        def step(w: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
            batch_key, noise_key = jax.random.split(key)
            rows = jax.random.randint(batch_key, (batch_size,), 0, n)
            batch = jax.tree.map(lambda x: x[rows], problem.data)
            w = kernel.step(noise_key, w, batch, epsilon / 2)  # its step is half of Welling's
            return w, w

        return jax.lax.scan(step, jnp.float32(start), jax.random.split(key, steps))[1]

    return np.asarray(run(jax.random.split(jax.random.key(seed), CHAINS))[:, burn_in::THINNING])


def rows_of(
    problem: Problem, batch_size: int, seed: int, steps: int
) -> Iterator[tuple[str, Found]]:
    """Each sampler's name and what it came to."""
    for kind in ("full", "diagonal"):
        run = functools.partial(sample_by_defaults, problem, batch_size, kind, seed, steps)
        found = timed(lambda run=run: np.asarray(run().params), problem.name)
        yield f"constant_sgd {kind}", found
    if seed > 0:
        return
    n, (mode, hessian) = problem.num_data, mode_and_hessian(problem)
    largest = float(np.linalg.eigvalsh(hessian)[-1])
    sizes = [2 * c / (n * largest) for c in GRID]
    found, size = best_of(
        lambda eps: optperm.sgld(eps, n, key=seed), sizes, problem, batch_size, seed, steps
    )
    yield f"sgld, best, h A {size * n * largest / 2:.3g}", found
    friction = 0.1
    sizes = [friction * c / (n * largest) for c in GRID]
    found, size = best_of(
        lambda eta: optperm.sghmc(eta, n, friction, key=seed),
        sizes,
        problem,
        batch_size,
        seed,
        steps,
    )
    yield f"sghmc, best, h A {size * n * largest / friction:.3g}", found
    runs = [2 * c / (n * largest) for c in GRID]
    of_blackjax = [
        timed(
            lambda eps=eps: blackjax_sgld(problem, batch_size, eps, seed, steps, mode), problem.name
        )
        for eps in runs
    ]
    yield (
        "BlackJAX sgld, best",
        min(
            of_blackjax,
            key=lambda f: (
                max(-np.log(f.ratios[0]), np.log(f.ratios[2]), f.mean_error)
                if np.isfinite(f.mean_error)
                else np.inf
            ),
        ),
    )
    for kind in ("diagonal", "full"):
        more = {"estimator": "single_example"} if batch_size == 1 else {}
        tx = optperm.mandt_sgd(n, batch_size, preconditioner=kind, freeze_after=4000, **more)
        yield (
            f"Mandt {kind}",
            timed(
                lambda tx=tx: draw(problem, tx, batch_size, seed, steps, start=mode), problem.name
            ),
        )
    laplace = np.random.default_rng(seed).multivariate_normal(
        mode, np.linalg.inv(n * hessian), (CHAINS, 3200)
    )
    yield "Laplace", compared(laplace, problem.name, 0.0)


class Verdict(NamedTuple):
    """What is right, and what the report says of it.

    Attributes:
      found: Draws, and the reference.
      ess: The minimum bulk effective sample size.
      warnings: The report's.
    """

    found: Found
    ess: float
    warnings: tuple[str, ...]

    @property
    def is_right(self) -> bool:
        """Return whether sds are within a tenth of the reference, and means within a tenth of an sd."""
        ratios, (low, high) = self.found.ratios, GOAL_RATIOS
        return low <= ratios[0] and ratios[2] <= high and self.found.mean_error <= GOAL_ERROR


def by_defaults(
    problem: Problem, batch_size: int, form: str, seeds: int, steps: int
) -> tuple[list[Verdict], float]:
    """A verdict for the chains of each seed, and the processor's seconds of all calls."""
    seconds, verdicts = 0.0, []
    for seed in range(seeds):
        begin = time.process_time()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            samples = sample_by_defaults(problem, batch_size, form, seed, steps)
        taken = time.process_time() - begin
        seconds += taken
        report = optperm.bayes.posterior_report(samples)
        found = compared(np.asarray(samples.params), problem.name, taken)
        said = tuple(dict.fromkeys(str(each.message) for each in caught))
        verdicts.append(Verdict(found, report.ess_bulk, said))
    return verdicts, seconds


def nuts(problem: Problem, seed: int, draws: int = 1000) -> tuple[np.ndarray, float]:
    """The draws of BlackJAX's NUTS, (chain, draw, D), after its own warm-up, and the seconds."""
    import blackjax  # noqa: PLC0415

    def log_density(w: jax.Array) -> jax.Array:
        return -problem.num_data * problem.loss_fn(w, problem.data)

    @jax.jit
    @jax.vmap
    def run(key: jax.Array) -> jax.Array:
        warming, sampling = jax.random.split(key)
        adaptation = blackjax.window_adaptation(blackjax.nuts, log_density)
        (state, parameters), _ = adaptation.run(warming, jnp.zeros(problem.size), draws)
        kernel = blackjax.nuts(log_density, **parameters)

        def step(state: Any, key: jax.Array) -> tuple[Any, jax.Array]:
            state, _ = kernel.step(key, state)
            return state, state.position

        return jax.lax.scan(step, state, jax.random.split(sampling, draws))[1]

    begin = time.process_time()
    found = np.asarray(run(jax.random.split(jax.random.key(seed), CHAINS)))
    return found, time.process_time() - begin


def _cells(verdicts: list[Verdict], seconds: float) -> dict[str, str]:
    """The extremes over seeds, and draws a second of all."""
    ratios = [verdict.found.ratios for verdict in verdicts]
    return {
        "sd": f"{min(r[0] for r in ratios):.2f} to {max(r[2] for r in ratios):.2f}",
        "mean": f"{max(v.found.mean_error for v in verdicts):.2f}",
        "ESS": f"{min(v.ess for v in verdicts):,.0f}",
        "ESS_per_second": f"{sum(v.ess for v in verdicts) / seconds:.0f}",
    }


def defaults_table(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Print and return the results of constant SGD with its defaults, and of NUTS."""
    rows = []
    for name in arguments.problems:
        for form, batch_size in itertools.product(arguments.forms, arguments.batch_sizes):
            if RESULTS.has(_defaults_title(form, batch_size), problem=name):
                continue
            verdicts = defaults_row(name, batch_size, form, arguments.seeds, arguments.steps)
            row = {"problem": name, "batch_size": batch_size, "form": form}
            rows.append(row | {"verdicts": verdicts})
            RESULTS.write(arguments.json)
        if arguments.nuts and not RESULTS.has("NUTS", problem=name):
            nuts_row(name)
            RESULTS.write(arguments.json)
    return rows


def _defaults_title(form: str, batch_size: int) -> str:
    of_form = "" if form == "full" else f"{form}, "
    return f"Constant SGD, {of_form}batches of {batch_size}"


def defaults_row(name: str, batch_size: int, form: str, seeds: int, steps: int) -> list[Verdict]:
    """Prints and keeps what constant SGD comes to on a problem, and returns each seed's verdict."""
    problem = PROBLEMS[name]()
    verdicts, seconds = by_defaults(problem, batch_size, form, seeds, steps)
    right = [verdict.is_right for verdict in verdicts]
    warned = [text for verdict in verdicts for text in verdict.warnings]
    few = all("R-hat" in text or "draw more" in text for text in warned)
    cells = _cells(verdicts, seconds) | {
        "seconds": f"{seconds / seeds:.0f}",
        "right": f"{sum(right)} of {seeds}",
        "warnings": "nothing" if not warned else "ask for more draws" if few else "others",
    }
    says = sorted({_sentence(text) for verdict in verdicts for text in verdict.warnings})
    print(f"{name:12} S {batch_size:3} {form} {cells} {says}", flush=True)
    for verdict in verdicts:
        print(f"    {verdict.found}", flush=True)
    RESULTS.row(_defaults_title(form, batch_size), **_of_problem(problem), **cells)
    return verdicts


def keys_table(num_keys: int) -> list[dict[str, Any]]:
    """Print and return the reports of `optperm.bayes.sample` on the last layer, for several keys."""
    problem, rows = PROBLEMS["last layer"](), []
    for key in range(num_keys):
        start = jnp.zeros(problem.size)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            samples = optperm.bayes.sample(problem.loss_fn, problem.data, start, key, num_draws=100)
        least, _, most = compared(np.asarray(samples.params), problem.name, 0.0).ratios
        says = "; ".join(_sentence(w.message) for w in caught) or "nothing"
        cells = {"key": key, "sd": f"{least:.2f} to {most:.2f}", "warnings": says}
        print(cells, flush=True)
        RESULTS.row("Calls of sample for the last layer, 4 chains of 100 draws", **cells)
        rows.append(cells)
    return rows


def nuts_row(name: str) -> None:
    """Prints and keeps what NUTS comes to on a problem."""
    problem = PROBLEMS[name]()
    draws, seconds = nuts(problem, 0)
    chains = optperm.bayes.Samples(draws, draws[:, -1], (), jnp.int32(1), jnp.int32(1))
    report = optperm.bayes.posterior_report(chains)
    verdict = Verdict(compared(draws, name, seconds), report.ess_bulk, ())
    cells = _cells([verdict], seconds) | {"seconds": f"{seconds:.0f}"}
    print(f"{name:12} NUTS  {cells}", flush=True)
    RESULTS.row("NUTS", **_of_problem(problem), **cells)


def _of_problem(problem: Problem) -> dict[str, str]:
    return {"problem": problem.name, "N": f"{problem.num_data:,}", "D": str(problem.size)}


def table(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Prints and returns all figures."""
    rows = []
    print(
        f"{CHAINS} chains of {arguments.steps} steps; the grid's maximum eigenvalues of h A: {GRID}"
    )
    for name in arguments.problems:
        problem = PROBLEMS[name]()
        for batch_size in arguments.batch_sizes:
            for seed in range(arguments.seeds):
                for method, found in rows_of(problem, batch_size, seed, arguments.steps):
                    print(f"{name:10} S {batch_size:3} seed {seed} {method:26} {found}", flush=True)
                    least, _, most = (f"{ratio:.2f}" for ratio in found.ratios)
                    divergence = found.divergence
                    RESULTS.row(
                        f"{name}, batches of {batch_size}",
                        sampler=method,
                        seed=seed,
                        minimum_sd=least,
                        maximum_sd=most,
                        in_range=f"{found.in_range:.0%}",
                        mean_error=f"{found.mean_error:.2f}",
                        KL="" if np.isnan(divergence) else f"{divergence:.3g}",
                        seconds=f"{found.seconds:.0f}",
                        says=found.says.strip(),
                    )
                    figures = found._asdict() | {"passes": found.passes, "seed": seed}
                    rows.append(
                        {"problem": name, "batch_size": batch_size, "method": method, **figures}
                    )
    return rows


# A network on the digits.

TRAINED, VALIDATED = 1000, 257  # and tested on 540
WIDTH, MLP_BATCH, MLP_STEPS, MLP_DRAWS, SEEDS, MEMBERS = 32, 32, 20_000, 100, 5, 5


class Method(NamedTuple):
    """A way to predict.

    Attributes:
      parameter: What the grid is of.
      grid: Its values.
      build: The function from a number of steps to the optimizer of one of them.
      keeps: What is predicted with: the "last" iterate, the "mean" of the second half, or "draws" of it.
      members: How many networks are predicted with together.
      form: The preconditioner of constant SGD, whose kernels are learned first; None for others.
    """

    parameter: str
    grid: tuple[float, ...]
    build: Callable[[float, int], Any]
    keeps: str = "draws"
    members: int = 1
    form: str | None = None


def _decayed(build: Callable[[Any], Any]) -> Callable[[float, int], Any]:
    """An optimizer whose learning rate falls to zero along a cosine."""
    return lambda rate, steps: build(optax.cosine_decay_schedule(rate, steps))


def _constant(temperature: float, _: int) -> Any:
    """Return constant SGD at a temperature, for the kernel of a network."""
    return functools.partial(optperm.constant_sgd, temperature=temperature)


@functools.cache
def mlp_kernels(preconditioner: str, number: int) -> tuple[Any, Any]:
    """The kernels of networks, and the params at which their chains start, by defaults."""
    starts = initial_networks(number, 0)
    found = [
        optperm.bayes.learn_kernel(
            mlp_loss,
            splits()[0],
            jax.tree.map(lambda leaf, i=i: leaf[i], starts),
            jax.random.key(i),
            batch_size=MLP_BATCH,
            preconditioner=preconditioner,
        )
        for i in range(number)
    ]
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *found)


def _mandt(limit: float, steps: int) -> Any:
    return optperm.mandt_sgd(TRAINED, MLP_BATCH, max_step=limit, freeze_after=2 * (steps // 5))


def _sgld(temperature: float) -> Callable[[float, int], Any]:
    return lambda h, _: optperm.sgld(2 * h / TRAINED, TRAINED, temperature)


def _sghmc(temperature: float) -> Callable[[float, int], Any]:
    return lambda h, _: optperm.sghmc(0.1 * h / TRAINED, TRAINED, 0.1, temperature)


RATES, TEMPERATURES, LENGTHS = (1e-3, 3e-3, 1e-2), (1.0, 0.1, 0.01), (0.03, 0.1, 0.3, 1.0)
METHODS = {
    "SGD": Method("learning rate", (0.03, 0.1, 0.3), _decayed(optax.sgd), "last"),
    "Adam": Method("learning rate", RATES, _decayed(optax.adam), "last"),
    "SWA of SGD": Method("learning rate", (0.03, 0.1, 0.3), lambda r, _: optax.sgd(r), "mean"),
    "ensemble of 5, Adam": Method("learning rate", RATES, _decayed(optax.adam), "last", MEMBERS),
    "constant_sgd scalar": Method("T", TEMPERATURES, _constant, form="scalar"),
    "constant_sgd diagonal": Method("T", TEMPERATURES, _constant, form="diagonal"),
    "Mandt diagonal, T = 1": Method("max_step", LENGTHS, _mandt),
    "sgld, T = 1": Method("epsilon N / 2", LENGTHS, _sgld(1.0)),
    "sgld, T = 0.1": Method("epsilon N / 2", LENGTHS, _sgld(0.1)),
    "sghmc, T = 1": Method("eta N / 0.1", LENGTHS, _sghmc(1.0)),
    "sghmc, T = 0.1": Method("eta N / 0.1", LENGTHS, _sghmc(0.1)),
}


def logits(params: Any, x: jax.Array) -> jax.Array:
    """Of a network with one hidden layer."""
    return jnp.tanh(x @ params["w1"] + params["b1"]) @ params["w2"] + params["b2"]


def mlp_loss(params: Any, batch: Any) -> jax.Array:
    """With the prior N(0, 1)."""
    losses = optax.softmax_cross_entropy_with_integer_labels(logits(params, batch["x"]), batch["y"])
    return jnp.mean(losses) + optperm.bayes.normal_prior(params, 1.0, TRAINED)


@functools.cache
def splits() -> tuple[Any, Any, Any]:
    """The examples to train on, to choose by, and to test on: disjoint, the same for all seeds."""
    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(42).permutation(len(x))
    parts = np.split(order, [TRAINED, TRAINED + VALIDATED])
    return tuple({"x": jnp.float32(x[part] / 16), "y": jnp.int32(y[part])} for part in parts)


def initial_networks(number: int, seed: int) -> Any:
    """So many, with a leading axis; weights of variance 1 / inputs."""
    one, two = jax.random.split(jax.random.key(seed))
    return {
        "w1": jax.random.normal(one, (number, 64, WIDTH)) / 8,
        "b1": jnp.zeros((number, WIDTH)),
        "w2": jax.random.normal(two, (number, WIDTH, 10)) / WIDTH**0.5,
        "b2": jnp.zeros((number, 10)),
    }


def mlp_draws(method: Method, value: float, steps: int, seeds: int) -> Any:
    """What is predicted with: for each seed members and draws, (seed, draw, ...)."""
    train, number = splits()[0], seeds * method.members
    start, built = initial_networks(number, 0), method.build(value, steps)
    if method.form is None:
        tx = optax.with_extra_args_support(built)
        opt_state = jax.vmap(tx.init)(start)
    else:
        kernels, start = mlp_kernels(method.form, number)
        tx = built(jax.tree.map(lambda leaf: leaf[0], kernels))
        opt_state = jax.vmap(lambda kernel, params: built(kernel).init(params))(kernels, start)

    def step(params: Any, opt_state: Any, key: jax.Array) -> tuple[Any, Any]:
        rows = jax.random.randint(key, (MLP_BATCH,), 0, TRAINED)
        e = optperm.evaluate(mlp_loss, params, jax.tree.map(lambda leaf: leaf[rows], train))
        updates, opt_state = tx.update(e.grad, opt_state, params, **e.extra_args)
        return optax.apply_updates(params, updates), opt_state

    half = steps // 2
    draws = MLP_DRAWS if method.keeps in ("draws", "mean") else 1
    samples = optperm.bayes.draw_samples(
        step,
        start,
        opt_state,
        jax.random.key(1),
        num_chains=number,
        num_draws=min(draws, half),
        thinning=max(half // draws, 1),
        burn_in=half,
        stacked=True,
    )
    if method.keeps == "mean":
        # Of iterates of the second half.
        params = jax.tree.map(lambda x: x.mean(axis=1, keepdims=True), samples.params)
        samples = samples._replace(params=params)
        draws = 1
    shape = (seeds, method.members * min(draws, half))
    return jax.tree.map(lambda leaf: leaf.reshape(*shape, *leaf.shape[2:]), samples.params)


class Scores(NamedTuple):
    """Of each seed."""

    nll: np.ndarray
    calibration_error: np.ndarray
    error: np.ndarray


def scores(draws: Any, examples: Any) -> Scores:
    """Of the mean of the draws' probabilities."""

    def of_seed(draws: Any) -> tuple[Any, Any, Any]:
        probabilities = optperm.bayes.posterior_predictive(
            lambda params, x: jax.nn.softmax(logits(params, x)),
            optperm.bayes.Samples(
                jax.tree.map(lambda leaf: leaf[None], draws), (), (), jnp.int32(0), jnp.int32(1)
            ),
            examples["x"],
        ).mean
        if not np.all(np.isfinite(probabilities)):  # the chains diverged
            return np.inf, np.nan, np.nan
        report = optperm.bayes.calibration_report(probabilities, examples["y"])
        return report.log_loss, report.calibration_error, 1 - report.accuracy

    seeds = len(draws["w1"])
    rows = [of_seed(jax.tree.map(lambda leaf: leaf[seed], draws)) for seed in range(seeds)]  # noqa: B023
    return Scores(*np.asarray(rows, np.float64).T)


def _spread(values: np.ndarray) -> str:
    return (
        f"{values.mean():.4f} ± {values.std(ddof=1):.4f}" if len(values) > 1 else f"{values[0]:.4f}"
    )


def mlp_table(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Prints and returns what each method comes to."""
    _, validation, test = splits()
    size = f"Digits MLP 64-{WIDTH}-10"
    title = f"{size}, {len(test['y'])} test examples, mean ± sd of {arguments.seeds} seeds"
    grids = f"{size}, grids, {len(validation['y'])} validation examples"
    steps, rows = arguments.steps, []
    print(f"{title}, {TRAINED} examples to train on, {steps} steps of {MLP_BATCH} a network")
    for name in arguments.methods or METHODS:
        method, runs, start = METHODS[name], [], time.perf_counter()
        grid = method.grid[: arguments.grid]
        for value in grid:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                try:
                    draws = mlp_draws(method, value, steps, arguments.seeds)
                except ValueError as error:
                    says = f"refused: {_sentence(error)}"
                    RESULTS.row(grids, method=name, value=f"{value:g}", says=says)
                    print(f"  {name:22} {value:6g} {says}")
                    continue
            # Chains are seeds here, each with modes of its own, so that R-hat says nothing.
            messages = {_sentence(w.message) for w in caught}
            says = "; ".join(sorted(m for m in messages if "R-hat" not in m))
            nll = float(scores(draws, validation).nll.mean())
            print(f"  {name:22} {value:6g} validation NLL {nll:.4f}  {says}", flush=True)
            cells = {"value": f"{value:g}", "mean_NLL": f"{nll:.4f}", "says": says}
            RESULTS.row(grids, method=name, **cells)
            runs.append((nll if np.isfinite(nll) else np.inf, value, draws, says))
        if not runs:
            continue
        seconds = (time.perf_counter() - start) / len(grid) / arguments.seeds
        _, value, draws, says = min(runs, key=lambda run: run[0])
        found = scores(draws, test)
        figures = dict(zip(("NLL", "ECE", "error"), map(_spread, found), strict=True))
        print(f"{name:24} {value:6g} {figures}", flush=True)
        cells = {"networks": method.members, "chosen": f"{method.parameter} {value:g}", **figures}
        RESULTS.row(title, method=name, **cells, seconds_a_seed=f"{seconds:.1f}", says=says)
        rows.append({"method": name, "value": value, **found._asdict()})
    return rows


def main(argv: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Runs what is asked for, and returns the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--make-reference", action="store_true")
    parser.add_argument("--problems", nargs="+", choices=PROBLEMS, default=[])
    parser.add_argument("--batch-sizes", nargs="+", type=int, help="1, 8, 32 and 128")
    parser.add_argument("--seeds", type=int, help="3, or 5 with --mlp")
    parser.add_argument("--steps", type=int, help=f"{STEPS}, or {MLP_STEPS} with --mlp")
    parser.add_argument("--defaults", action="store_true", help="constant SGD alone, on twelve")
    parser.add_argument(
        "--forms", nargs="+", choices=("full", "diagonal", "scalar"), default=["full"],
        help="with --defaults, the preconditioners",
    )  # fmt: skip
    parser.add_argument("--keys", type=int, help="of so many calls for the last layer, which warn")
    parser.add_argument("--nuts", action="store_true", help="NUTS as well, with --defaults")
    parser.add_argument(
        "--resume", action="store_true", help="with --defaults, without what --json has already"
    )
    results.add_argument(parser)
    parser.add_argument("--mlp", action="store_true", help="the network on the digits")
    parser.add_argument(
        "--methods", nargs="+", choices=METHODS, help="of --mlp; all of them if left out"
    )
    parser.add_argument("--grid", type=int, help="with --mlp, so many values of each grid")
    arguments = parser.parse_args(argv)
    arguments.seeds = arguments.seeds or (SEEDS if arguments.mlp else 3)
    arguments.steps = arguments.steps or (MLP_STEPS if arguments.mlp else STEPS)
    if arguments.mlp:
        rows = mlp_table(arguments)
        RESULTS.write(arguments.json)
        return rows
    if arguments.keys:
        rows = keys_table(arguments.keys)
        RESULTS.write(arguments.json)
        return rows
    if arguments.make_reference:
        make_reference(arguments.problems)
        return []
    arguments.batch_sizes = arguments.batch_sizes or (
        [8, 32] if arguments.defaults else [1, 8, 32, 128]
    )
    twelve = list(PROBLEMS)[:12] if "full" in arguments.forms else CORRELATED
    arguments.problems = arguments.problems or (
        twelve if arguments.defaults else list(PROBLEMS)[:4]
    )
    if arguments.resume:
        RESULTS.resume(arguments.json)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if arguments.defaults else "default")  # they are in its rows
        rows = defaults_table(arguments) if arguments.defaults else table(arguments)
    RESULTS.write(arguments.json)
    return rows


if __name__ == "__main__":
    main()
