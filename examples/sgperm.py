"""SGPerm: a network learns handwritten digits while its initial weights only trade places."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from optax import softmax_cross_entropy_with_integer_labels
from sklearn.datasets import load_digits

import optperm
from optperm.training import TrainState, Validation, fit

x, y = load_digits(return_X_y=True)
x, y = np.float32((x - x.mean(0)) / np.maximum(x.std(0), 1e-3)), np.int32(y)
EPOCHS, BATCH, TRAIN = 13, 32, 1257
# Permuting a bias with equal entries would change nothing, so biases start at random.
bias = nn.initializers.normal(0.1)
model = nn.Sequential([nn.Dense(64, bias_init=bias), nn.relu, nn.Dense(10, bias_init=bias)])
initial = model.init(jax.random.key(0), x[:1])
tx = optperm.sgperm(num_steps=EPOCHS * (TRAIN // BATCH))


def loss_fn(params, batch):
    """Return the mean cross-entropy, and the accuracy."""
    logits = model.apply(params, batch[0])
    loss = softmax_cross_entropy_with_integer_labels(logits, batch[1]).mean()
    return loss, {"accuracy": jnp.mean(logits.argmax(axis=1) == batch[1])}


def eval_fn(params, batch):
    """Return the accuracy."""
    return loss_fn(params, batch)[1]


state = TrainState.create(apply_fn=model.apply, params=initial, tx=tx)
data, held_out = (x[:TRAIN], y[:TRAIN]), (x[TRAIN:], y[TRAIN:])
options = {"epochs": EPOCHS, "batch_size": BATCH, "has_aux": True}
result = fit(state, loss_fn, data, validation=Validation(eval_fn, held_out), **options)
accuracy, trained = result.history.last["eval_accuracy"], result.state
print(f"test accuracy {accuracy:.3f}, and no weight has a new value")
result.history.plot().savefig("sgperm.png")  # the loss, the accuracy and the weights that move

# The trained network is a seed and a permutation.
permutation = optperm.permutation.export_permutation(initial, trained.opt_state)
rebuilt = optperm.permutation.apply_permutation(initial, permutation)
print("rebuilt bit for bit:", jax.tree.all(jax.tree.map(np.array_equal, rebuilt, trained.params)))
