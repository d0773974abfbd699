"""SGPerm: a network learns handwritten digits while its initial weights only trade places."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import optperm

x, y = load_digits(return_X_y=True)
x, y = np.float32((x - x.mean(0)) / np.maximum(x.std(0), 1e-3)), np.int32(y)
STEPS, BATCH, TRAIN = 500, 32, 1257
# Permuting a bias with equal entries would change nothing, so biases start at random.
bias = nn.initializers.normal(0.1)
model = nn.Sequential([nn.Dense(64, bias_init=bias), nn.relu, nn.Dense(10, bias_init=bias)])
initial = model.init(jax.random.key(0), x[:1])
tx = optperm.sgperm(num_steps=STEPS)


def loss_fn(params, batch):
    """Return the mean cross-entropy."""
    logits = model.apply(params, batch[0])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch[1]).mean()


@jax.jit
def step(params, opt_state, batch):
    """Take one step; `optperm.apply_updates` keeps the values of the weights exact."""
    grads = jax.grad(loss_fn)(params, batch)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optperm.apply_updates(params, updates, opt_state), opt_state


params, opt_state, rng = initial, tx.init(initial), np.random.default_rng(0)
for _ in range(STEPS):
    rows = rng.integers(TRAIN, size=BATCH)
    params, opt_state = step(params, opt_state, (x[rows], y[rows]))

accuracy = jnp.mean(model.apply(params, x[TRAIN:]).argmax(axis=1) == y[TRAIN:])
print(f"test accuracy {accuracy:.3f}, and no weight has a new value")

# The trained network is a seed and a permutation.
permutation = optperm.permutation.export_permutation(initial, opt_state)
rebuilt = optperm.permutation.apply_permutation(initial, permutation)
print("rebuilt bit for bit:", jax.tree.all(jax.tree.map(np.array_equal, rebuilt, params)))
