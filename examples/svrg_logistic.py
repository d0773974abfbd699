"""Logistic regression with SVRG compared with scikit-learn's SAGA, by gradient evaluations.

Both minimize the mean logistic loss on the standardized breast cancer data with an L2 penalty of 1/n.
SVRG takes its snapshots inside the compiled loop: every five passes over the data, or at random (its
loopless form). L is the largest curvature of the loss of one example; SAGA's step size is about 1/2L.

    python examples/svrg_logistic.py [--passes 250] [--out FILE.png]
"""

import warnings
from collections.abc import Sequence
from typing import Any

import flags
import jax
import jax.numpy as jnp
import matplotlib.style
import numpy as np
import optax
from matplotlib.figure import Figure
from sklearn.datasets import load_breast_cancer
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression

import optperm

Curve = list[tuple[float, float]]  # Gradient evaluations over n, and the loss there.


def loss_fn(w: jax.Array, batch: Any) -> jax.Array:
    """Of rows with the sign of their class."""
    return jnp.mean(jax.nn.softplus(-(batch["x"] @ w))) + 0.5 * batch["l2"] * jnp.dot(w, w)


def train(tx: optax.GradientTransformationExtraArgs, signed: jax.Array, passes: int) -> Curve:
    """One example a step. `tx` starts with svrg."""
    n = len(signed)
    everything = {"x": signed, "l2": 1.0 / n}

    def full_grad_fn(w: jax.Array) -> jax.Array:
        return optperm.evaluate(loss_fn, w, everything).grad

    @jax.jit
    def run_pass(w: jax.Array, opt_state: Any, key: jax.Array) -> tuple[Any, Any, Any]:
        def step(carry: Any, index: jax.Array) -> tuple[Any, jax.Array]:
            w, opt_state = carry
            before = opt_state[0].snapshot.params
            e = optperm.evaluate(loss_fn, w, everything | {"x": signed[index][None]})
            updates, opt_state = tx.update(
                e.grad, opt_state, w, full_grad_fn=full_grad_fn, **e.extra_args
            )
            is_new = jnp.any(before != opt_state[0].snapshot.params)
            return (optax.apply_updates(w, updates), opt_state), is_new

        (w, opt_state), is_new = jax.lax.scan(step, (w, opt_state), jax.random.permutation(key, n))
        return w, opt_state, jnp.sum(is_new)

    w = jnp.zeros(signed.shape[1])
    opt_state = tx.init(w)
    evaluations, curve = 1.0, [(0.0, float(loss_fn(w, everything)))]  # The first snapshot counts.
    for index in range(passes):
        w, opt_state, snapshots = run_pass(w, opt_state, jax.random.key(index))
        evaluations += 2.0 + float(snapshots)
        curve.append((evaluations, float(loss_fn(w, everything))))
    return curve


def fit(x: np.ndarray, y: np.ndarray, **options: Any) -> jax.Array:
    """The weights that scikit-learn finds."""
    model = LogisticRegression(C=1.0, fit_intercept=False, random_state=0, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        return jnp.asarray(model.fit(x, y).coef_[0])


@matplotlib.style.context("optperm.pictures")
def main(arguments: Sequence[str] | None = None) -> dict[str, Curve]:
    """Trains, prints where each run ends, draws the curves, and returns them above the optimum."""
    parser = flags.Parser(__doc__, "svrg_logistic.png")
    parser.count("passes", 250, "how often SVRG goes through the data")
    chosen = parser.parse_args(arguments)
    x, y = load_breast_cancer(return_X_y=True)
    x = (x - x.mean(axis=0)) / x.std(axis=0)
    n = len(x)
    rate = 1 / (np.max(np.sum(x**2, axis=1)) / 4 + 1 / n)
    with jax.enable_x64(True):
        signed = jnp.asarray((2.0 * y - 1.0)[:, None] * x)
        every = optperm.svrg(every=5 * n)
        loopless = optperm.svrg(probability=1 / (5 * n))
        curves = {
            f"{name}/L": train(optax.chain(svrg, optax.sgd(times * rate)), signed, chosen.passes)
            for name, svrg, times in (
                ("SVRG, step size 1", every, 1),
                ("SVRG, step size 4", every, 4),
                ("loopless SVRG, step size 4", loopless, 4),
            )
        }
        everything = {"x": signed, "l2": 1.0 / n}
        curves["SAGA (scikit-learn)"] = [
            (float(e), float(loss_fn(fit(x, y, solver="saga", tol=1e-30, max_iter=e), everything)))
            for e in np.unique(np.linspace(1, 2.2 * chosen.passes, 30).astype(int))
        ]
        lowest = float(loss_fn(fit(x, y, solver="newton-cholesky", tol=1e-12), everything))
    figure = Figure(figsize=(6, 4.2))
    axes = figure.add_subplot(xlabel="gradients of single examples / n", yscale="log")
    for name, curve in curves.items():
        curves[name] = [(count, max(loss - lowest, 1e-16)) for count, loss in curve]
        axes.plot(*zip(*curves[name], strict=True), "--" if "loopless" in name else "-", label=name)
        count, above = curves[name][-1]
        print(f"{name:30}: {above:.1e} above the optimum after {count * n:,.0f} evaluations")
    axes.set_ylabel("loss above the optimum")
    figure.legend(loc="outside lower center", ncols=2)
    figure.savefig(chosen.out)
    return curves


if __name__ == "__main__":
    main()
