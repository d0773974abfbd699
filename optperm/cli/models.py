"""The networks of the command line, whose params can all be permuted, with their loss and accuracy."""

import dataclasses
import functools
import importlib
import inspect
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import optperm
from optperm.cli.errors import UsageError
from optperm.core.shapes import Params

CHUNK = 1000  # the number of examples on a device at once
# This number is far from the step counts that a method may fold into the same key.
_INIT_STREAM = 0x494E_4954


@dataclasses.dataclass(frozen=True)
class NetworkSpec:
    """The values that determine a network and its initial params."""

    model: str  # "mlp", "cnn", or the user's "module:Class"
    hidden: int  # the number of units of the hidden layer
    input_shape: tuple[int, ...]  # the shape of one example
    num_classes: int
    seed: int


class Network(nn.Module):
    """A hidden layer with ReLU, after two convolutions with pooling in a CNN. See `NetworkSpec`."""

    model: str
    hidden: int
    num_classes: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Map (batch, *shape) to logits; a CNN accepts images with or without channels."""
        if self.model == "cnn":
            x = x[..., None] if x.ndim == 3 else x
            for features in (16, 32):
                x = nn.relu(nn.Conv(features, (3, 3), **_make_initializers(9 * x.shape[-1]))(x))
                x = nn.max_pool(x, (2, 2), strides=(2, 2), padding="SAME")
        x = x.reshape(len(x), -1)
        x = nn.relu(nn.Dense(self.hidden, **_make_initializers(x.shape[-1]))(x))
        return nn.Dense(self.num_classes, **_make_initializers(self.hidden))(x)


def _make_initializers(fan_in: int) -> dict[str, Any]:
    """Draw kernel and bias from the same distribution, since permuting cannot train equal biases."""
    bound = math.sqrt(6 / fan_in)

    def draw_bias(key: jax.Array, shape: Sequence[int], dtype: Any = jnp.float32) -> jax.Array:
        return jax.random.uniform(key, shape, dtype, -bound, bound)

    return {"kernel_init": nn.initializers.he_uniform(), "bias_init": draw_bias}


def build(spec: NetworkSpec) -> nn.Module:
    """Return the network for a spec; raise a UsageError if it cannot process such examples."""
    if spec.model not in ("mlp", "cnn"):
        return _build_module(spec)
    if spec.model == "cnn" and len(spec.input_shape) not in (2, 3):
        says = f"--model cnn needs images, but examples are of shape {list(spec.input_shape)}"
        raise UsageError(f"{says}. Use --model mlp.")
    return Network(spec.model, spec.hidden, spec.num_classes)


def _build_module(spec: NetworkSpec) -> nn.Module:
    """Build the user's linen module, with `num_classes` and `hidden` if it has these fields."""
    module, _, name = spec.model.partition(":")
    if "" not in sys.path:
        sys.path.insert(0, "")  # a script that pip installed does not search the current folder
    try:
        kind = getattr(importlib.import_module(module), name)
        known = {"num_classes": spec.num_classes, "hidden": spec.hidden}
        fields = inspect.signature(kind).parameters  # with the fields of its base classes
        model: nn.Module = kind(**{k: v for k, v in known.items() if k in fields})
        example = jax.ShapeDtypeStruct((1, *spec.input_shape), jnp.float32)
        params = jax.eval_shape(model.init, jax.random.key(0), example)["params"]
        # `init` would use the key of the params for dropout, and would compute batch statistics.
        outputs = jax.eval_shape(model.apply, {"params": params}, example)
    except Exception as error:  # the user's module may raise anything
        wanted = "mlp, cnn, or a module:Class whose only variables are params"
        says = f"--model {spec.model} must be {wanted}"
        advice = "optperm.training.fit trains other models"
        raise UsageError(f"{says} ({type(error).__name__}: {error}); {advice}.") from error
    if outputs.shape != (1, spec.num_classes):
        says = f"must map a batch to (batch, {spec.num_classes}) logits"
        raise UsageError(f"--model {spec.model} {says}, got {list(outputs.shape)} for one example.")
    return model


@functools.lru_cache(maxsize=1)
def initial_params(spec: NetworkSpec) -> Params:
    """Draw the initial params, which are the same for the same spec."""
    key = jax.random.fold_in(jax.random.key(spec.seed, impl="threefry2x32"), _INIT_STREAM)
    example = jnp.zeros((1, *spec.input_shape), jnp.float32)
    # Level 1 compiles in half the time and draws the same bits; level 0 would draw other bits.
    draw = jax.jit(build(spec).init, compiler_options={"xla_backend_optimization_level": 1})
    params: Params = draw(key, example)["params"]
    return params


@functools.cache
def loss_function(
    model: nn.Module, prior_precision: float = 0.0, num_data: int = 1
) -> Callable[..., tuple[jax.Array, dict[str, jax.Array]]]:
    """Make a function for the mean loss over a batch, optionally with a prior, and the accuracy."""

    def loss_fn(params: Params, batch: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
        outputs: Any = model.apply({"params": params}, batch["x"])
        losses = optax.softmax_cross_entropy_with_integer_labels(outputs, batch["y"])
        loss = jnp.mean(losses)
        if prior_precision:
            loss += optperm.bayes.normal_prior(params, prior_precision, num_data)
        return loss, {"accuracy": jnp.mean(jnp.argmax(outputs, axis=-1) == batch["y"])}

    return loss_fn


@functools.cache
def _make_counter(model: nn.Module) -> Callable[..., jax.Array]:
    def count(params: Params, x: jax.Array, y: jax.Array) -> jax.Array:
        outputs: Any = model.apply({"params": params}, x)
        return jnp.sum(jnp.argmax(outputs, axis=-1) == y)

    return jax.jit(count)


def measure_accuracy(model: nn.Module, params: Params, x: np.ndarray, y: np.ndarray) -> float:
    """Return the fraction of examples (x, y) that a network classifies correctly; use one device."""
    count, parts = _make_counter(model), range(CHUNK, len(x), CHUNK)
    pairs = zip(np.split(x, parts), np.split(y, parts), strict=True)
    return sum(int(count(params, *pair)) for pair in pairs) / len(x)
