"""Less memory for the optimizer: AdamW, and AdamW in 8 bits, train a network on handwritten digits."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import optperm
from optperm.training import TrainState, Validation, fit

x, y = load_digits(return_X_y=True)
x, y = np.float32(x / 16), np.int32(y)
data, held_out = {"x": x[:1257], "y": y[:1257]}, {"x": x[1257:], "y": y[1257:]}
model = nn.Sequential([nn.Dense(256), nn.relu, nn.Dense(256), nn.relu, nn.Dense(10)])
initial = jax.jit(model.init)(jax.random.key(0), x[:1])
optimizers = {
    "AdamW": optax.adamw(2e-3),
    "AdamW in 8 bits": optperm.quantize_state(optax.adamw(2e-3)),
}


def loss_fn(params, batch):
    """Return the mean cross-entropy."""
    logits = model.apply(params, batch["x"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()


def eval_fn(params, batch):
    """Return the loss and the accuracy."""
    is_right = model.apply(params, batch["x"]).argmax(axis=1) == batch["y"]
    return {"loss": loss_fn(params, batch), "accuracy": jnp.mean(is_right)}


figure, table = None, [f"{'':16}{'bytes of state':>16}{'per weight':>12}{'accuracy':>10}"]
for name, tx in optimizers.items():
    print(f"{name}, 20 epochs")
    state = TrainState.create(apply_fn=model.apply, params=initial, tx=tx)
    options = {"epochs": 20, "batch_size": 64, "progress": True}
    result = fit(state, loss_fn, data, validation=Validation(eval_fn, held_out), **options)
    figure = result.history.plot(figure, label=name)
    report, accuracy = (
        optperm.memory.state_report(tx, initial),
        result.history.last["eval_accuracy"],
    )
    weights = 4 * report.words_per_param
    table.append(f"{name:16}{report.bytes:16,.0f}{weights:12.2f}{accuracy:10.3f}")
figure.savefig("less_memory.png")
print(*table, "The losses and accuracies are in less_memory.png.", sep="\n")
