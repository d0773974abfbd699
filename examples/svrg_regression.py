"""Linear regression with SVRG at one constant learning rate, compared with SGD at four.

This is the experiment of the original SVRG module, which ran on YearPredictionMSD. Here it runs on the
diabetes data of scikit-learn, or on that file if it is given (a csv whose first column is the target).
With a constant rate SGD stops at the level of its noise; SVRG, with a snapshot every two epochs,
converges to the optimum.

    python examples/svrg_regression.py [--epochs 1000] [--out FILE.png]
    python examples/svrg_regression.py --csv YearPredictionMSD.txt --epochs 30 --batch-size 100
"""

import pathlib
from collections.abc import Sequence
from typing import Any

import flags
import jax
import jax.numpy as jnp
import matplotlib.style
import numpy as np
import optax
from matplotlib.figure import Figure
from sklearn.datasets import load_diabetes

import optperm

SVRG_RATE = 0.025
SGD_RATES = (0.001, 0.0025, 0.005, 0.025)
UPDATE_FREQ = 2


def load(csv: pathlib.Path | None) -> dict[str, np.ndarray]:
    """Features and targets of mean 0 and variance 1."""
    if csv is None:
        x, y = load_diabetes(return_X_y=True)
    else:
        table = np.loadtxt(csv, delimiter=",", ndmin=2)
        x, y = table[:, 1:], table[:, 0]
    return {"x": (x - x.mean(axis=0)) / x.std(axis=0), "y": (y - y.mean()) / y.std()}


def loss_fn(w: jax.Array, batch: Any) -> jax.Array:
    """Half the mean squared error."""
    return 0.5 * jnp.mean((batch["x"] @ w - batch["y"]) ** 2)


def train(
    tx: Any, data: dict[str, np.ndarray], epochs: int, batch_size: int, *, with_snapshots: bool
) -> list[float]:
    """The distance of the loss from the optimum, before training and after each epoch."""
    n = len(data["y"])
    best = np.linalg.lstsq(data["x"], data["y"], rcond=None)[0]
    on_device = jax.tree.map(jnp.asarray, data)

    @jax.jit
    def run_epoch(w: jax.Array, opt_state: Any, order: jax.Array) -> tuple[jax.Array, Any]:
        def step(carry: Any, indices: jax.Array) -> tuple[Any, None]:
            w, opt_state = carry
            e = optperm.evaluate(loss_fn, w, {k: v[indices] for k, v in on_device.items()})
            updates, opt_state = tx.update(e.grad, opt_state, w, **e.extra_args)
            return (optax.apply_updates(w, updates), opt_state), None

        return jax.lax.scan(step, (w, opt_state), order)[0]

    def batches() -> Any:
        """As from a data loader; the last one is smaller."""
        for start in range(0, n, batch_size):
            yield {k: v[start : start + batch_size] for k, v in data.items()}

    def distance(w: jax.Array) -> float:
        return 0.5 * float(np.mean((data["x"] @ (np.asarray(w) - best)) ** 2))

    rng = np.random.default_rng(0)
    w = jnp.zeros(data["x"].shape[1])
    opt_state = tx.init(w)
    distances = [distance(w)]
    for epoch in range(epochs):
        if with_snapshots and epoch % UPDATE_FREQ == 0:
            full_grad = optperm.variance.full_gradient(loss_fn, w, batches())
            opt_state = optperm.variance.take_snapshot(opt_state, w, full_grad)
        order = rng.permutation(n)[: n - n % batch_size].reshape(-1, batch_size)
        w, opt_state = run_epoch(w, opt_state, order)
        distances.append(distance(w))
    return distances


@matplotlib.style.context("optperm.pictures")
def main(arguments: Sequence[str] | None = None) -> dict[str, list[float]]:
    """Trains, prints where each run ends, draws the curves, and returns them."""
    parser = flags.Parser(__doc__, "svrg_regression.png")
    about = "a file such as YearPredictionMSD.txt, the target in its first column"
    parser.add_argument("--csv", type=pathlib.Path, metavar="FILE", help=about)
    parser.count("epochs", 1000, "passes over the data")
    parser.count("batch-size", 20, "rows a step")
    chosen = parser.parse_args(arguments)
    if chosen.csv is not None and not chosen.csv.is_file():
        parser.error(f"argument --csv: there is no file {chosen.csv}")
    data, curves = load(chosen.csv), dict[str, list[float]]()
    if chosen.batch_size > (n := len(data["y"])):
        parser.error(f"argument --batch-size: got {chosen.batch_size}; there are {n} rows")
    with jax.enable_x64(True):
        runs = {f"SVRG, {SVRG_RATE}": optax.chain(optperm.svrg(), optax.sgd(SVRG_RATE))}
        runs |= {f"SGD, {r}": optax.with_extra_args_support(optax.sgd(r)) for r in SGD_RATES}
        for name, tx in runs.items():
            curves[name] = train(
                tx, data, chosen.epochs, chosen.batch_size, with_snapshots=name.startswith("SVRG")
            )
            print(f"{name:12}: {curves[name][-1]:.2e} above the optimum")
    figure = Figure(figsize=(6, 4.2))
    axes = figure.add_subplot(xlabel="epoch", ylabel="loss above the optimum", yscale="log")
    for name, curve in reversed(curves.items()):  # the noisiest behind the others
        axes.plot(curve, linewidth=0.8 if name == f"SGD, {SGD_RATES[-1]}" else None, label=name)
    figure.legend(title="method, learning rate", loc="outside right center")
    figure.savefig(chosen.out)
    return curves


if __name__ == "__main__":
    main()
