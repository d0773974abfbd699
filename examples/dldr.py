"""DLDR: SGD records a trajectory, and BFGS trains in the subspace of its principal components."""

import flax.linen as nn
import jax
import numpy as np
import optax
from sklearn.datasets import load_digits

import optperm

x, y = load_digits(return_X_y=True)
x, y = np.float32(x / 16), np.int32(y)
STEPS, BATCH, TRAIN, EVERY = 54, 128, 1257, 4

model = nn.Sequential([nn.Dense(64), nn.relu, nn.Dense(10)])
initial = model.init(jax.random.key(0), x[:1])
plain = optax.with_extra_args_support(optax.sgd(0.1))
# After 14 snapshots, one every four steps, the second phase trains in 12 dimensions.
bfgs = optperm.dim_reduce(n_components=12)
dldr = optperm.dldr(plain, bfgs, every=EVERY, num_snapshots=STEPS // EVERY + 1)


def loss_fn(params, batch):
    """Return the mean cross-entropy."""
    logits = model.apply(params, batch[0])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch[1]).mean()


def train(tx):
    """Return the params after both phases."""

    @jax.jit
    def step(params, opt_state, batch):
        # The line search needs the loss as a function; `evaluate` passes it with the gradient.
        e = optperm.evaluate(loss_fn, params, batch)
        updates, opt_state = tx.update(e.grad, opt_state, params, **e.extra_args)
        return optperm.apply_updates(params, updates, opt_state), opt_state

    params, opt_state, rng = initial, tx.init(initial), np.random.default_rng(0)
    for _ in range(2 * STEPS):
        rows = rng.integers(TRAIN, size=BATCH)
        params, opt_state = step(params, opt_state, (x[rows], y[rows]))
    return params


for name, tx in (("SGD", plain), ("SGD, then P-BFGS", dldr)):
    print(f"{name}: training loss {loss_fn(train(tx), (x[:TRAIN], y[:TRAIN])):.4f}")
