"""The accuracy of a network on the test examples."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from optperm.cli import models
from optperm.cli.datasets import Dataset

_CHUNK = 1000  # examples on a device at once


class TestSet:
    """The test examples, classified in chunks so that the activations of a large set fit.

    Args:
      model: The network.
      params: Params of the kind that will be tested.
      data: Its test examples are kept on the device.
    """

    def __init__(self, model: nn.Module, params: optax.Params, data: Dataset) -> None:
        self._size = len(data.x_test)
        chunk = min(self._size, _CHUNK)
        fill = -self._size % chunk
        x = np.pad(data.x_test, [(0, fill)] + [(0, 0)] * (data.x_test.ndim - 1))
        y = np.pad(data.y_test, (0, fill), constant_values=-1)  # a label that is never predicted
        self._x = jnp.asarray(x.reshape(-1, chunk, *x.shape[1:]))
        self._y = jnp.asarray(y.reshape(-1, chunk))

        @jax.jit
        def count_correct(params: optax.Params, x: jax.Array, y: jax.Array) -> jax.Array:
            def in_chunk(chunk: tuple[jax.Array, jax.Array]) -> jax.Array:
                logits = models.logits(model, params, chunk[0])
                return jnp.sum(jnp.argmax(logits, axis=-1) == chunk[1])

            return jnp.sum(jax.lax.map(in_chunk, (x, y)))

        self._count_correct = count_correct.lower(params, self._x, self._y).compile()

    def accuracy(self, params: optax.Params) -> float:
        """The share of the test examples that are classified right."""
        return int(self._count_correct(params, self._x, self._y)) / self._size
