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
class Loss:
    """A loss function, as one of the model state, a random key, the params and the batch.

    Without a `graphdef` it is `loss_fn(params, batch)`, which may take `model_state` and `rng` by these
    names, and returns the loss, the new model state if it takes one, and aux with `has_aux`. With that
    of a model of `flax.nnx` it is `loss_fn(model, batch)`, which may change the model.
    """

    loss_fn: Callable[..., Any]
    has_aux: bool
    graphdef: Any = None
    wrt: Any = None

    def __call__(
        self, model_state: Any, rng: jax.Array | None, params: optax.Params, batch: Any
    ) -> tuple[jax.Array, Outputs]:
        """The loss and what else came."""
        takes: tuple[str, ...] = ()
        if self.graphdef is not None:
            model = nnx.merge(self.graphdef, params, *model_state)
            out = self.loss_fn(model, batch)
            # The keys stay, as they do in the model: its counts say what is drawn next.
            new = model_state[0], split_model(model, self.wrt)[2][1]
        else:
            takes, known = arguments_of(self.loss_fn), {"model_state": model_state, "rng": rng}
            if "rng" in takes and rng is None:
                says = "pass rng=jax.random.key(0) to TrainState.create"
                raise ValueError(f"loss_fn takes rng, but the state holds no key: {says}.")
            out = self.loss_fn(params, batch, **{name: known[name] for name in takes})
        names = ["loss", *(name for name in takes if name != "rng"), *["aux"] * self.has_aux]
        if len(names) > 1 and not (isinstance(out, tuple) and len(out) == len(names)):
            came = f"a tuple of {len(out)}" if isinstance(out, tuple) else type(out).__name__
            raise TypeError(
                f"loss_fn must return ({', '.join(names)}), got {came}. One that takes model_state returns "
                "the new one, as apply gives it with mutable=list(model_state); aux goes with has_aux=True."
            )
        got = dict(zip(names, out if len(names) > 1 else (out,), strict=True))
        if self.graphdef is None:
            new = got.get("model_state", model_state)
        says = "The model_state that loss_fn returned"
        checks.check_same_tree(says, new, model_state, source="the one before")
        return got["loss"], Outputs(new, got.get("aux"))


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
    wanted = f"{source} must be a dict of scalar metrics"
    if not isinstance(aux, Mapping):
        raise TypeError(f"{wanted}, such as {{'accuracy': accuracy}}, got {type(aux).__name__}.")
    for name, value in aux.items():
        shape, dtype = jnp.shape(value), jnp.result_type(value)
        if shape or not (dtype == bool or jnp.issubdtype(dtype, jnp.number)):
            advice = "Take its mean over the batch, or leave it out"
            raise TypeError(f"{wanted}, but {name!r} is {dtype}{list(shape)}. {advice}.")
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
