"""Sparse training: nine tenths of the weights become zero, and the network still recognizes digits."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import optperm

x, y = load_digits(return_X_y=True)
x, y = np.float32(x / 16), np.int32(y)
STEPS, BATCH, TRAIN = 1000, 32, 1257
model = nn.Sequential([nn.Dense(128), nn.relu, nn.Dense(10)])
initial = model.init(jax.random.key(0), x[:1])
adam = optax.adam(1e-3)
# From a tenth to seven tenths of the steps, more and more of the smallest weights become zero.
schedule = optax.polynomial_schedule(0.0, 1.0, 3, 6 * STEPS // 10, STEPS // 10)
tx = optperm.prune_gradually(adam, 0.9, schedule, every=20)


def loss_fn(params, batch):
    """Return the mean cross-entropy."""
    logits = model.apply(params, batch[0])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch[1]).mean()


def train(tx):
    """Return the trained params."""

    @jax.jit
    def step(params, opt_state, batch):
        grads = jax.grad(loss_fn)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        # `optperm.apply_updates` keeps the zeros exact.
        return optperm.apply_updates(params, updates, opt_state), opt_state

    params, opt_state, rng = initial, tx.init(initial), np.random.default_rng(0)
    for _ in range(STEPS):
        rows = rng.integers(TRAIN, size=BATCH)
        params, opt_state = step(params, opt_state, (x[rows], y[rows]))
    return params


for name, params in (("Adam", train(adam)), ("pruned", train(tx))):
    accuracy = jnp.mean(model.apply(params, x[TRAIN:]).argmax(axis=1) == y[TRAIN:])
    kernels = [leaf for leaf in jax.tree.leaves(params) if leaf.ndim > 1]
    zeros = sum(int((leaf == 0).sum()) for leaf in kernels) / sum(leaf.size for leaf in kernels)
    print(f"{name}: test accuracy {accuracy:.3f}, {zeros:.0%} of the weights are zero")
