"""Bayesian linear regression on the diabetes data with constant SGD, compared with the exact posterior.

Chains start at the mode. The samplers are the method of Mandt, Hoffman and Blei with the full and the
diagonal preconditioner, and `optperm.constant_sgd`, which injects noise. The features are collinear,
which a diagonal cannot represent. The script also prints the divergence to expect if the noise of the
gradients were everywhere as at the mode, and, with ArviZ (`pip install ".[arviz]"`), R-hat and the ESS.

    python examples/constant_sgd_posterior.py [--draws 1000] [--out FILE.png]
"""

import functools
from collections.abc import Sequence
from typing import Any

import flags
import jax
import jax.numpy as jnp
import matplotlib.style
import numpy as np
from matplotlib.figure import Figure
from sklearn.datasets import load_diabetes

import optperm

try:
    import arviz
except ImportError:
    arviz = None

# The last: the steps in which the gradient noise is estimated.
BATCH, CHAINS, ESTIMATION = 10, 8, 2000


def loss_fn(params: Any, batch: Any) -> jax.Array:
    """Mean of -log p(y | x, w) - log p(w) / N over rows, all of them over the noise's deviation."""
    residuals = batch["x"] @ params["w"] - batch["y"]
    return 0.5 * jnp.mean(residuals**2) + 0.5 * batch["ridge"] * jnp.sum(params["w"] ** 2)


def sample(tx: Any, mode: np.ndarray, data: Any, num_draws: int) -> optperm.bayes.Samples:
    """Draws from all chains, one after every pass over the data."""
    n = len(data["y"])

    def step(params: Any, opt_state: Any, key: jax.Array) -> tuple[Any, Any]:
        rows = jax.random.randint(key, (BATCH,), 0, n)
        batch = {**data, "x": data["x"][rows], "y": data["y"][rows]}
        e = optperm.evaluate(loss_fn, params, batch)
        updates, opt_state = tx.update(e.grad, opt_state, params, **e.extra_args)
        return optperm.apply_updates(params, updates, opt_state), opt_state

    params = {"w": jnp.asarray(mode, jnp.float32)}
    key, counts = jax.random.key(0), {"num_chains": CHAINS, "num_draws": num_draws}
    return optperm.bayes.draw_samples(
        step, params, tx.init(params), key, thinning=n // BATCH, burn_in=2 * ESTIMATION, **counts
    )


@matplotlib.style.context("optperm.pictures")
def main(argv: Sequence[str] | None = None) -> dict[str, tuple[float, float]]:
    """Samples, prints and draws; returns the divergences from the posterior, found and computed."""
    parser = flags.Parser(__doc__, "constant-sgd-posterior.png")
    parser.count("draws", 1000, "how many draws to take of each chain", least=2)
    arguments = parser.parse_args(argv)
    x, y = load_diabetes(return_X_y=True)
    n, d = x.shape
    x, y = (x - x.mean(axis=0)) / x.std(axis=0), (y - y.mean()) / y.std()
    deviation = np.std(y - x @ np.linalg.lstsq(x, y, rcond=None)[0])
    x, y = x / deviation, y / deviation
    hessian = (x.T @ x + np.eye(d)) / n
    covariance = np.linalg.inv(n * hessian)
    mode = covariance @ x.T @ y
    noise = np.cov((x * (x @ mode - y)[:, None]).T) / BATCH
    steps = {"full": 2 / n * np.linalg.inv(noise), "diagonal": 2 / n / np.diag(noise)}
    known = {"burn_in": ESTIMATION, "freeze_after": ESTIMATION}
    samplers = {name: optperm.mandt_sgd(n, BATCH, preconditioner=name, **known) for name in steps}
    samplers["injected"] = optperm.constant_sgd(n, BATCH, burn_in=ESTIMATION)
    divergence = functools.partial(
        optperm.bayes.gaussian_kl, other_mean=mode, other_covariance=covariance
    )

    data = {"x": jnp.float32(x), "y": jnp.float32(y), "ridge": 1 / n}
    found, draws = {}, {}
    for name, tx in samplers.items():
        samples = sample(tx, mode, data, arguments.draws)
        flat = draws[name] = np.asarray(samples.params["w"]).reshape(-1, d)
        computed = covariance
        if name in steps:
            computed = optperm.bayes.stationary_covariance(steps[name], hessian, noise)
        found[name] = (
            float(divergence(flat.mean(axis=0), np.cov(flat.T))),
            float(divergence(mode, computed)),
        )
        print(f"{name:8s} divergence {found[name][0]:.4f}, computed {found[name][1]:.4f}", end="")
        if arviz is not None:
            table = arviz.convert_to_dataset(samples.as_dict())
            r_hat, size = arviz.rhat(table)["w"].max(), arviz.ess(table)["w"].min()
            print(f", maximum R-hat {float(r_hat):.4f}, minimum bulk ESS {float(size):.0f}", end="")
        print(f", of {len(flat)} draws")

    figure = Figure(figsize=(6, 6))
    above, below = figure.subplots(2, 1, height_ratios=(2, 3))
    exact = {"exact": np.random.default_rng(0).multivariate_normal(mode, covariance, len(flat))}
    for index, (name, points) in enumerate((exact | draws).items()):
        center, error = np.arange(d) + 0.2 * (index - 1.5), 2 * points.std(axis=0)
        above.errorbar(center, points.mean(axis=0), error, fmt="o^sD"[index], label=name)
        below.plot(*points[:600, 4:6].T, "o^sD"[index], markersize=2.5, alpha=0.6)
    above.set(xticks=range(d), xticklabels=load_diabetes().feature_names, ylabel="coefficient")
    above.set_title("posterior mean, and 2 standard deviations")
    below.set(xlabel="coefficient of s1", ylabel="of s2", title="600 draws of two coefficients")
    figure.legend(loc="outside lower center", ncols=4)
    figure.savefig(arguments.out)
    return found


if __name__ == "__main__":
    main()
