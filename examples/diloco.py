"""DiLoCo: four replicas exchange their progress every three steps, in one bit per weight.

On one machine, `python diloco.py` uses four virtual devices. On each of several machines, run
`python diloco.py HOST:PORT NUMBER INDEX`, with the address of machine 0 and the number of machines.
"""

import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import optperm
from optperm.training import TrainState, fit

if sys.argv[1:]:
    address, number, index = sys.argv[1:]
    jax.distributed.initialize(address, int(number), int(index))
else:
    jax.config.update("jax_num_cpu_devices", 4)

x, y = load_digits(return_X_y=True)
x, y = np.float32(x / 16), np.int32(y)
TRAIN = 1257

model = nn.Sequential([nn.Dense(64), nn.relu, nn.Dense(10)])
params = model.init(jax.random.key(0), x[:1])
one_bit = optperm.distributed.Compression(bits=1)
tx = optperm.diloco(optax.adam(3e-3), every=3, axis_name="replica", compress=one_bit)


def loss_fn(params, batch):
    """Return the mean cross-entropy."""
    logits = model.apply(params, batch[0])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch[1]).mean()


# Each replica takes a quarter of every batch; `fit` maps the step over all devices.
state = TrainState.create(apply_fn=model.apply, params=params, tx=tx)
data = (x[:TRAIN], y[:TRAIN])
result = fit(state, loss_fn, data, epochs=30, batch_size=128, axis_name="replica")

accuracy = jnp.mean(model.apply(result.state.params, x[TRAIN:]).argmax(axis=1) == y[TRAIN:])
if jax.process_index() == 0:
    print(f"test accuracy {accuracy:.3f} after {result.step} steps on {jax.device_count()} devices")
    link = {"axis_name": "replica", "every": 3, "bandwidth": 1e9, "replicas": 4}
    print(optperm.distributed.traffic_report(tx, params, **link))
