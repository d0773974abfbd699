"""`fit` trains a flax.nnx model with SVRG, BatchNorm and dropout, and resumes from checkpoints."""

import tempfile

import jax
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits

import optperm
from optperm.training import EarlyStopping, fit

x, y = load_digits(return_X_y=True)
x, y = np.float32(x / 16), np.int32(y)
TRAIN = 1257
train_data, test_data = (x[:TRAIN], y[:TRAIN]), (x[TRAIN:], y[TRAIN:])


def make_model():
    """Return a network and its optimizer."""
    rngs = nnx.Rngs(0, dropout=1)
    layers = nnx.Linear(64, 64, rngs=rngs), nnx.BatchNorm(64, rngs=rngs), nnx.relu
    model = nnx.Sequential(*layers, nnx.Dropout(0.1, rngs=rngs), nnx.Linear(64, 10, rngs=rngs))
    tx = optax.chain(optperm.mars(), optax.adam(2e-3))
    return model, nnx.Optimizer(model, tx, wrt=nnx.Param)


def loss_fn(model, batch):
    """Mean cross-entropy."""
    return optax.softmax_cross_entropy_with_integer_labels(model(batch[0]), batch[1]).mean()


def eval_fn(model, batch):
    """The metrics of a batch."""
    return {"accuracy": (model(batch[0]).argmax(axis=1) == batch[1]).mean()}


stop = EarlyStopping("eval_accuracy", mode="max", patience=5)
with tempfile.TemporaryDirectory() as folder:
    for epochs in (5, 40):  # as if the first run had been cut off
        model, optimizer = make_model()
        run = {"eval_fn": eval_fn, "eval_data": test_data, "keep_best": ("eval_accuracy", "max")}
        run |= {"on_epoch_end": stop, "checkpoints": folder, "resume": True}
        device = jax.devices()[0]
        result = fit(model, loss_fn, train_data, optimizer=optimizer, epochs=epochs, batch_size=64, **run)
        print(f"{result.ended} after epoch {result.epoch}, best at step {result.best_step}")
print(f"test accuracy {result.history.epochs['eval_accuracy'].max():.3f}")
