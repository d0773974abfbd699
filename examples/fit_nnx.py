"""`fit` trains a flax.nnx model with BatchNorm and dropout, and resumes from a checkpoint."""

import tempfile

import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits

import optperm
from optperm.training import Checkpoints, fit

x, y = load_digits(return_X_y=True)
x, y = np.float32(x / 16), np.int32(y)
TRAIN = 1257


def make_model():
    """Return a network and its optimizer."""
    rngs = nnx.Rngs(0, dropout=1)
    layers = nnx.Linear(64, 64, rngs=rngs), nnx.BatchNorm(64, rngs=rngs), nnx.relu
    model = nnx.Sequential(*layers, nnx.Dropout(0.1, rngs=rngs), nnx.Linear(64, 10, rngs=rngs))
    tx = optax.chain(optperm.mars(), optax.adam(2e-3))
    return model, nnx.Optimizer(model, tx, wrt=nnx.Param)


def loss_fn(model, batch):
    """Return the mean cross-entropy."""
    return optax.softmax_cross_entropy_with_integer_labels(model(batch[0]), batch[1]).mean()


with tempfile.TemporaryDirectory() as folder:
    for epochs in (5, 30):  # as if the first run had been cut off
        model, optimizer = make_model()
        result = fit(
            model,
            loss_fn,
            (x[:TRAIN], y[:TRAIN]),
            optimizer=optimizer,
            epochs=epochs,
            batch_size=64,
            checkpoints=Checkpoints(folder, resume=True),
        )
        loss = result.history.epochs["loss"][-1]
        print(f"epoch {result.epoch}: training loss {loss:.4f}")
model.eval()
print(f"test accuracy {(model(x[TRAIN:]).argmax(axis=1) == y[TRAIN:]).mean():.3f}")
