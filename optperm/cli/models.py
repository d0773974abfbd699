"""The networks to train, drawn so that every parameter can be permuted, their loss and their test."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import optperm
from optperm.cli.errors import UsageError
from optperm.training import TrainState
from optperm.training.steps import evaluated

CHUNK = 1000  # examples on a device at once
# Far from the step counts that a method may fold into the key of the same seed.
_INIT_STREAM = 0x494E_4954


@dataclasses.dataclass(frozen=True)
class NetworkSpec:
    """All it takes to build a network and draw its initial params again."""

    model: str  # "mlp" or "cnn"
    hidden: int  # units of the hidden layer
    input_shape: tuple[int, ...]  # of one example
    num_classes: int
    seed: int


class Network(nn.Module):
    """One hidden layer with ReLU; of a CNN, after two convolutions with pooling. See `NetworkSpec`."""

    model: str
    hidden: int
    num_classes: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps (batch, *shape), for a CNN images with or without channels, to logits."""
        if self.model == "cnn":
            x = x[..., None] if x.ndim == 3 else x
            for features in (16, 32):
                x = nn.relu(nn.Conv(features, (3, 3), **_he_uniform(9 * x.shape[-1]))(x))
                x = nn.max_pool(x, (2, 2), strides=(2, 2), padding="SAME")
        x = x.reshape(len(x), -1)
        x = nn.relu(nn.Dense(self.hidden, **_he_uniform(x.shape[-1]))(x))
        return nn.Dense(self.num_classes, **_he_uniform(self.hidden))(x)


def _he_uniform(fan_in: int) -> dict[str, Any]:
    """The kernel's distribution for its bias too: equal biases could not be trained by permuting."""
    bound = math.sqrt(6 / fan_in)

    def of_bias(key: jax.Array, shape: Sequence[int], dtype: Any = jnp.float32) -> jax.Array:
        return jax.random.uniform(key, shape, dtype, -bound, bound)

    return {"kernel_init": nn.initializers.he_uniform(), "bias_init": of_bias}


def build(spec: NetworkSpec) -> Network:
    """The network that a spec describes; a UsageError if it cannot take such examples."""
    if spec.model == "cnn" and len(spec.input_shape) not in (2, 3):
        raise UsageError(
            "--model cnn needs images, height x width or height x width x channels, and these "
            f"examples are of shape {list(spec.input_shape)}. Use --model mlp."
        )
    return Network(spec.model, spec.hidden, spec.num_classes)


def initial_params(spec: NetworkSpec) -> optax.Params:
    """Draws the initial params: the same for the same spec."""
    key = jax.random.fold_in(jax.random.key(spec.seed, impl="threefry2x32"), _INIT_STREAM)
    example = jnp.zeros((1, *spec.input_shape), jnp.float32)
    params: optax.Params = build(spec).init(key, example)["params"]
    return params


def logits(model: Network, params: optax.Params, x: jax.Array) -> jax.Array:
    """The network's outputs (batch, num_classes) for (batch, *input_shape)."""
    outputs: jax.Array = model.apply({"params": params}, x)  # type: ignore[assignment]
    return outputs


@functools.cache
def loss_function(
    model: Network, prior_precision: float = 0.0, num_data: int = 1
) -> Callable[..., tuple[jax.Array, dict[str, jax.Array]]]:
    """The mean loss over a batch, perhaps with a normal prior, and the share classified right."""

    def loss_fn(params: optax.Params, batch: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
        outputs = logits(model, params, batch["x"])
        losses = optax.softmax_cross_entropy_with_integer_labels(outputs, batch["y"])
        loss = jnp.mean(losses)
        if prior_precision:
            loss += optperm.normal_prior(params, prior_precision, num_data)
        return loss, {"accuracy": jnp.mean(jnp.argmax(outputs, axis=-1) == batch["y"])}

    return loss_fn


@functools.cache
def _metrics(model: Network) -> Callable[..., dict[str, jax.Array]]:
    return lambda params, batch: loss_function(model)(params, batch)[1]


def accuracy(model: Network, params: optax.Params, x: np.ndarray, y: np.ndarray) -> float:
    """The share of examples (x, y) that a network classifies right, on one device."""
    state = TrainState.create(apply_fn=model.apply, params=params, tx=optax.identity())
    found = evaluated(_metrics(model), {"x": x, "y": y}, state, batch_size=CHUNK)
    return round(found["accuracy"] * len(x)) / len(x)  # a count, which the means have rounded
