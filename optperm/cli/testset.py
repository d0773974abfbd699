"""What a network makes of the test examples."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import optperm
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
        self._model, self._labels = model, data.y_test
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

    def predictive(self, draws: optax.Params) -> "Predictive":
        """The prediction of all draws together.

        Args:
          draws: A tree like params whose leaves have two leading axes, chains and their draws.
        """

        def probabilities(params: optax.Params, chunks: jax.Array) -> jax.Array:
            return jax.lax.map(
                lambda x: jax.nn.softmax(models.logits(self._model, params, x)), chunks
            )

        mean = optperm.posterior_predictive(probabilities, draws, self._x)
        mean = mean.reshape(-1, mean.shape[-1])[: self._size]
        loss = optax.softmax_cross_entropy_with_integer_labels(jnp.log(mean), self._labels)
        return Predictive(
            accuracy=float(np.mean(np.argmax(np.asarray(mean), axis=-1) == self._labels)),
            negative_log_likelihood=float(jnp.mean(loss)),
            calibration=optperm.calibration(mean, self._labels),
        )


@dataclasses.dataclass(frozen=True)
class Predictive:
    """How good predicted probabilities are.

    Attributes:
      accuracy: The share of the examples whose most probable class is right.
      negative_log_likelihood: Mean of -log of the probability of the right class, in nats.
      calibration: How often a prediction of some confidence is right.
    """

    accuracy: float
    negative_log_likelihood: float
    calibration: optperm.Calibration
