"""Less memory for the optimizer: AdamW in 8 bits, at low rank, and both, on handwritten digits."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import optperm

x, y = load_digits(return_X_y=True)
x, y = np.float32(x / 16), np.int32(y)
STEPS, BATCH, TRAIN = 500, 64, 1257
model = nn.Sequential([nn.Dense(256), nn.relu, nn.Dense(256), nn.relu, nn.Dense(10)])
initial = model.init(jax.random.key(0), x[:1])
optimizers = {
    "AdamW": optax.adamw(2e-3),
    "AdamW in 8 bits": optperm.quantize_state(optax.adamw(2e-3)),
    "AdamW at low rank": optperm.memory.low_rank_adamw(2e-3, rank=1 / 8),
    "both": optperm.quantize_state(optperm.memory.low_rank_adamw(2e-3, rank=1 / 8)),
}


def loss_fn(params, batch):
    """Return the mean cross-entropy."""
    logits = model.apply(params, batch[0])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch[1]).mean()


def train(tx):
    """Return the trained params; the loop is the same as for `optax.adamw`."""

    @jax.jit
    def step(params, opt_state, batch):
        grads = jax.grad(loss_fn)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    params, opt_state, rng = initial, tx.init(initial), np.random.default_rng(0)
    for _ in range(STEPS):
        rows = rng.integers(TRAIN, size=BATCH)
        params, opt_state = step(params, opt_state, (x[rows], y[rows]))
    return params


for name, tx in optimizers.items():
    accuracy = jnp.mean(model.apply(train(tx), x[TRAIN:]).argmax(axis=1) == y[TRAIN:])
    words = optperm.memory.state_report(tx, initial).words_per_param
    print(f"{name}: {words:.2f} words of state per weight, test accuracy {accuracy:.3f}")
