"""SVRG reaches the optimum of a regression at a constant learning rate; SGD stops at its noise."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_diabetes

import optperm

x, y = load_diabetes(return_X_y=True)
x, y = np.float32((x - x.mean(0)) / x.std(0)), np.float32((y - y.mean()) / y.std())
EPOCHS, BATCH, RATE = 60, 17, 0.05
initial = {"w": jnp.zeros(x.shape[1])}


def loss_fn(params, batch):
    """Return half of the mean squared error, with a small ridge penalty."""
    rows, targets = batch
    ridge = 0.1 * jnp.sum(params["w"] ** 2)
    return 0.5 * jnp.mean((rows @ params["w"] - targets) ** 2) + ridge


optimum = {"w": jnp.linalg.solve(x.T @ x / len(x) + 0.2 * jnp.eye(x.shape[1]), x.T @ y / len(x))}


def distance(tx):
    """Return the distance from the optimum after training."""

    @jax.jit
    def step(params, opt_state, batch):
        # SVRG also needs the gradient at its snapshot; `evaluate` returns the gradient as a function.
        e = optperm.evaluate(loss_fn, params, batch)
        full_grad_fn = jax.grad(lambda params: loss_fn(params, (x, y)))
        extra_args = {**e.extra_args, "full_grad_fn": full_grad_fn}
        updates, opt_state = tx.update(e.grad, opt_state, params, **extra_args)
        return optax.apply_updates(params, updates), opt_state

    params, opt_state, rng = initial, tx.init(initial), np.random.default_rng(0)
    for _ in range(EPOCHS):
        for rows in rng.permutation(len(x)).reshape(-1, BATCH):
            params, opt_state = step(params, opt_state, (x[rows], y[rows]))
    return jnp.linalg.norm(params["w"] - optimum["w"])


# `svrg` takes a snapshot with its full gradient every two epochs.
svrg = optperm.svrg(every=2 * len(x) // BATCH)
for name, tx in (("SGD", optax.identity()), ("SVRG", svrg)):
    print(f"{name}: {distance(optax.chain(tx, optax.sgd(RATE))):.1e} from the optimum")
