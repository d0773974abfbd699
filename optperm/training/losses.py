"""Loss functions as users write them, as functions of everything that a step evaluates them on."""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from optperm.contract import checks

# Columns of the history that are not the loss function's to name.
_RESERVED = ("loss", "epoch", "step", "seconds", "share_moved")


class Outputs(NamedTuple):
    """What an evaluation gives beside the loss: the model state after it, and aux with `has_aux`."""

    model_state: Any
    aux: Any


@dataclasses.dataclass(frozen=True)
class LinenLoss:
    """`loss_fn(params, batch)`, or one that takes `model_state` and `rng` as well, by these names.

    It returns the loss, then the new model state if it takes one, then aux with `has_aux`.
    """

    loss_fn: Callable[..., Any]
    has_aux: bool = False

    def __call__(
        self, model_state: Any, rng: jax.Array | None, params: optax.Params, batch: Any
    ) -> tuple[jax.Array, Outputs]:
        """The loss and what else came, at a model state and with a random key."""
        takes = arguments_of(self.loss_fn)
        if "rng" in takes and rng is None:
            raise ValueError(
                "loss_fn takes rng, but the state holds no key: pass rng=jax.random.key(0) to "
                "TrainState.create."
            )
        known = {"model_state": model_state, "rng": rng}
        out = self.loss_fn(params, batch, **{name: known[name] for name in takes})
        is_given = {"loss": True, "model_state": "model_state" in takes, "aux": self.has_aux}
        names = [name for name, given in is_given.items() if given]
        if len(names) == 1:
            return out, Outputs(model_state, None)
        if not isinstance(out, tuple) or len(out) != len(names):
            came = f"a tuple of {len(out)}" if isinstance(out, tuple) else type(out).__name__
            raise TypeError(
                f"loss_fn must return ({', '.join(names)}), got {came}. One that takes model_state "
                "returns the new one, as apply gives it with mutable=list(model_state); aux is "
                "returned with has_aux=True."
            )
        got = dict(zip(names, out, strict=True))
        new = got.get("model_state", model_state)
        checks.check_same_tree(
            "The model_state that loss_fn returned", new, model_state, source="the train state"
        )
        return got["loss"], Outputs(new, got.get("aux"))


@dataclasses.dataclass(frozen=True)
class NnxLoss:
    """`loss_fn(model, batch)` of a model of `flax.nnx`, as a function of the model's parts.

    It returns the loss, and aux with `has_aux`, and may change the model.
    """

    loss_fn: Callable[..., Any]
    graphdef: Any
    wrt: Any = nnx.Param
    has_aux: bool = False

    def __call__(
        self, model_state: Any, rng: Any, params: optax.Params, batch: Any
    ) -> tuple[jax.Array, Outputs]:
        """The loss and what else came; the model itself is left alone."""
        keys, rest = model_state
        model = nnx.merge(self.graphdef, params, keys, rest)
        out = self.loss_fn(model, batch)
        if self.has_aux and not (isinstance(out, tuple) and len(out) == 2):
            raise TypeError(
                f"With has_aux=True loss_fn must return a pair (loss, aux), got {type(out).__name__}."
            )
        loss, aux = out if self.has_aux else (out, None)
        _, _, (_, new) = split_model(model, self.wrt)
        checks.check_same_tree(
            "The model's state after loss_fn", new, rest, source="the model before it"
        )
        # The keys stay, as they do in the model: its counts say what is drawn next.
        return loss, Outputs((keys, new), aux)


def split_model(model: Any, wrt: Any) -> tuple[Any, Any, tuple[Any, Any]]:
    """A model's graph, what is trained, and its keys and all other state, as plain arrays."""
    graphdef, *states = nnx.split(model, wrt, nnx.RngKey, ...)
    params, keys, rest = map(nnx.as_pure, states)
    return graphdef, params, (keys, rest)


def arguments_of(function: Callable[..., Any]) -> tuple[str, ...]:
    """Which of `model_state` and `rng` a function takes by name."""
    parameters = inspect.signature(function).parameters
    return tuple(name for name in ("model_state", "rng") if name in parameters)


def scalar_metrics(aux: Any, *, source: str) -> dict[str, jax.Array]:
    """The metrics that a function returned, as float32 scalars; a TypeError if they are none."""
    if not isinstance(aux, Mapping):
        raise TypeError(
            f"{source} must be a dict of scalar metrics, such as {{'accuracy': accuracy}}, got "
            f"{type(aux).__name__}."
        )
    for name, value in aux.items():
        shape, dtype = jnp.shape(value), jnp.result_type(value)
        if shape or not any(jnp.issubdtype(dtype, kind) for kind in (jnp.bool_, jnp.number)):
            raise TypeError(
                f"{source} must be a dict of scalar metrics, but {name!r} is {dtype}{list(shape)}. "
                "Take its mean over the batch, or leave it out."
            )
    return {str(name): jnp.asarray(value).astype(jnp.float32) for name, value in aux.items()}


def training_metrics(aux: Any) -> dict[str, jax.Array]:
    """`scalar_metrics` of what a loss function returned; a ValueError if it takes a reserved name."""
    metrics = scalar_metrics(aux, source="What loss_fn returns beside the loss (has_aux=True)")
    for name in metrics:
        if name in _RESERVED or name.startswith("eval_"):
            raise ValueError(
                f"loss_fn returns a metric named {name!r}, which is a column of the history of its own: "
                f"choose another name than {', '.join(_RESERVED)} and eval_..."
            )
    return metrics
