"""The networks to train, drawn so that every parameter can be permuted, their loss and their test."""

import dataclasses
import functools
import importlib
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
from optperm.training import TrainState
from optperm.training.steps import Evaluator

_NOTHING = optax.identity()  # one object, so that what was compiled for it is found again
CHUNK = 1000  # examples on a device at once
# Far from the step counts that a method may fold into the key of the same seed.
_INIT_STREAM = 0x494E_4954


@dataclasses.dataclass(frozen=True)
class NetworkSpec:
    """All it takes to build a network and draw its initial params again."""

    model: str  # "mlp", "cnn", or "module:Class" of one's own
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


def build(spec: NetworkSpec) -> nn.Module:
    """Return the network that a spec describes; raise a UsageError if it cannot take such examples."""
    if spec.model not in ("mlp", "cnn"):
        return _own(spec)
    if spec.model == "cnn" and len(spec.input_shape) not in (2, 3):
        raise UsageError(
            "--model cnn needs images, height x width or height x width x channels, and these "
            f"examples are of shape {list(spec.input_shape)}. Use --model mlp."
        )
    return Network(spec.model, spec.hidden, spec.num_classes)


def _own(spec: NetworkSpec) -> nn.Module:
    """Make a linen module of the user's, with those of `num_classes` and `hidden` that it has."""
    module, _, name = spec.model.partition(":")
    if not (module and name.isidentifier()):
        raise UsageError(
            f"--model {spec.model}: choose from mlp, cnn, or module:Class of your own."
        )
    if "" not in sys.path:
        sys.path.insert(0, "")  # a program that pip has installed does not look where it is called
    try:
        kind = getattr(importlib.import_module(module), name)
        if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
            raise TypeError(f"{name} is no class of flax.linen.Module")
        known = {"num_classes": spec.num_classes, "hidden": spec.hidden}
        model: nn.Module = kind(**{k: v for k, v in known.items() if k in kind.__annotations__})
        example = jax.ShapeDtypeStruct((1, *spec.input_shape), jnp.float32)
        outputs, variables = jax.eval_shape(model.init_with_output, jax.random.key(0), example)
    except Exception as error:  # whatever a program of the user's may raise
        raise UsageError(f"--model {spec.model}: {type(error).__name__}: {error}") from error
    if variables.keys() != {"params"}:
        others = ", ".join(variables.keys() - {"params"}) or "no params"
        says = "the command trains networks of params alone. optperm.training.fit trains all others"
        raise UsageError(f"--model {spec.model} has {others}: {says}.")
    if outputs.shape != (1, spec.num_classes):
        says = f"must map a batch to (batch, {spec.num_classes}) logits, one for each class"
        raise UsageError(f"--model {spec.model} {says}, got {list(outputs.shape)} of one example.")
    return model


@functools.lru_cache(maxsize=1)
def initial_params(spec: NetworkSpec) -> optax.Params:
    """Draw the initial params: the same for the same spec."""
    key = jax.random.fold_in(jax.random.key(spec.seed, impl="threefry2x32"), _INIT_STREAM)
    example = jnp.zeros((1, *spec.input_shape), jnp.float32)
    # At level 1 it is compiled in half the time, to the same bits; at level 0 they would be others.
    draw = jax.jit(build(spec).init, compiler_options={"xla_backend_optimization_level": 1})
    params: optax.Params = draw(key, example)["params"]
    return params


@functools.cache
def loss_function(
    model: nn.Module, prior_precision: float = 0.0, num_data: int = 1
) -> Callable[..., tuple[jax.Array, dict[str, jax.Array]]]:
    """The mean loss over a batch, perhaps with a normal prior, and the share classified right."""

    def loss_fn(params: optax.Params, batch: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
        outputs: Any = model.apply({"params": params}, batch["x"])
        losses = optax.softmax_cross_entropy_with_integer_labels(outputs, batch["y"])
        loss = jnp.mean(losses)
        if prior_precision:
            loss += optperm.normal_prior(params, prior_precision, num_data)
        return loss, {"accuracy": jnp.mean(jnp.argmax(outputs, axis=-1) == batch["y"])}

    return loss_fn


@functools.cache
def _metrics(model: nn.Module) -> Callable[..., dict[str, jax.Array]]:
    return lambda params, batch: loss_function(model)(params, batch)[1]


def accuracy(model: nn.Module, params: optax.Params, x: np.ndarray, y: np.ndarray) -> float:
    """The share of examples (x, y) that a network classifies right, on one device."""
    state = TrainState.create(apply_fn=None, params=params, tx=_NOTHING)
    found = Evaluator(_metrics(model), {"x": x, "y": y}, CHUNK)(state)
    return round(found["accuracy"] * len(x)) / len(x)  # a count, which the means have rounded
