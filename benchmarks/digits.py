"""Scikit-learn's handwritten digits and a small network, for the examples that share them."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

Examples = tuple[np.ndarray, np.ndarray]


class MLP(nn.Module):
    """One hidden layer."""

    hidden: int = 128
    bias_init: nn.initializers.Initializer = nn.initializers.zeros_init()

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps (batch, 64) to logits (batch, 10)."""
        output = nn.Dense(10, bias_init=self.bias_init)
        return output(nn.relu(nn.Dense(self.hidden, bias_init=self.bias_init)(x)))


def load() -> tuple[Examples, Examples]:
    """1257 images to train on and 540 to test on, standardized pixel by pixel, each with labels."""
    x, y = load_digits(return_X_y=True)
    x_train, x_test, y_train, y_test = train_test_split(x, y, test_size=0.3, random_state=42)
    mean, deviation = x_train.mean(axis=0), x_train.std(axis=0)
    deviation[deviation == 0] = 1
    x_train, x_test = (np.float32((x - mean) / deviation) for x in (x_train, x_test))
    return (x_train, np.int32(y_train)), (x_test, np.int32(y_test))


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """The mean over a batch."""
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels))


def accuracy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """The share of a batch that is classified right."""
    return jnp.mean((jnp.argmax(logits, axis=-1) == labels).astype(jnp.float32))
