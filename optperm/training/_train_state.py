"""Flax train states for methods that need more than gradients or set exact params."""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
from flax import nnx, struct
from flax.training import train_state
from jax.tree_util import Partial

from optperm.core import checks
from optperm.core.mapped_axes import AxisName
from optperm.core.shapes import Params, Updates
from optperm.core.transformation import known_extra_args
from optperm.evaluation import Evaluation, evaluate, split_loss
from optperm.exact import apply_updates


class Outputs(NamedTuple):
    """The outputs of an evaluation except the loss.

    Attributes:
      model_state: The new model state.
      aux: The aux of `loss_fn` with `has_aux`.
      count: The count of the batch, if `loss_fn` returns a sum and a count; otherwise None.
    """

    model_state: Any
    aux: Any
    count: Any = None


@dataclasses.dataclass(frozen=True)
class Model:
    """A model and its loss as one function of model state, random key, params and batch.

    With a `graphdef`, this is a `flax.nnx` model: `wrt` selects its params, and its random keys and all
    other state are the model state. Without a `graphdef`, this is a linen model.
    """

    loss_fn: Any = None
    has_aux: bool = False
    graphdef: Any = None
    wrt: Any = None

    @property
    def kind(self) -> str:
        """The name of the model's library, `"linen"` or `"nnx"`."""
        return "linen" if self.graphdef is None else "nnx"

    def __call__(
        self, model_state: Any, rng: jax.Array | None, params: Params, batch: Any
    ) -> tuple[jax.Array, Outputs]:
        """Return the loss and the other outputs of `loss_fn`."""
        takes: tuple[str, ...] = ()
        if self.graphdef is not None:
            model = nnx.merge(self.graphdef, params, *model_state)
            out = self.loss_fn(model, batch)
            # The keys do not change, as in the model, because their counts determine the next draws.
            new = model_state[0], split_model(model, self.wrt)[2][1]
        else:
            takes, known = arguments_of(self.loss_fn), {"model_state": model_state, "rng": rng}
            if "rng" in takes and rng is None:
                raise ValueError(
                    "loss_fn takes rng: pass rng=jax.random.key(0) to TrainState.create."
                )
            out = self.loss_fn(params, batch, **{name: known[name] for name in takes})
        names = ["loss", *(name for name in takes if name != "rng"), *["aux"] * self.has_aux]
        if len(names) > 1 and not (isinstance(out, tuple) and len(out) == len(names)):
            kind = "one array" if isinstance(out, jax.Array) else type(out).__name__
            came = f"a tuple of {len(out)}" if isinstance(out, tuple) else kind
            raise TypeError(f"loss_fn must return ({', '.join(names)}), got {came}.")
        got = dict(zip(names, out if len(names) > 1 else (out,), strict=True))
        if self.graphdef is None:
            new = got.get("model_state", model_state)
        says = "The model_state that loss_fn returned"
        checks.check_same_tree(says, new, model_state, source="the one before")
        return got["loss"], Outputs(new, got.get("aux"), split_loss(got["loss"])[1])

    def unwrap(self, state: Any) -> Any:
        """Return the state, or a new `flax.nnx` model with this state."""
        if self.graphdef is None:
            return state
        return nnx.merge(self.graphdef, state.params, *state.model_state)

    def compute_metrics(self, state: Any, batch: Any, fn: Callable[..., Any]) -> dict[str, Any]:
        """Return the metrics of a batch, (2,) each: a sum over examples and its divisor."""
        if self.graphdef is not None:
            model = self.unwrap(state)  # a new model: the trained model keeps its mode
            model.eval()  # dropout off, running statistics
            out = fn(model, batch)
        else:
            takes = "model_state" in arguments_of(fn)
            known = {"model_state": state.model_state} if takes else {}
            out = fn(state.params, batch, **known)
        metrics = convert_metrics("The result of Validation.fn", out, pairs=True)
        # A scalar is a mean, whose weight is the number of examples in its batch.
        size = checks.count_examples("A batch of Validation.data", batch, has_scalars=True)
        return {
            name: jnp.stack(
                value if isinstance(value, tuple) else [size * value, jnp.float32(size)]
            )
            for name, value in metrics.items()
        }


def split_model(model: Any, wrt: Any) -> tuple[Any, Any, tuple[Any, Any]]:
    """Split a model into its graph, its params, and its keys and other state, as plain arrays."""
    graphdef, *states = nnx.split(model, wrt, nnx.RngKey, ...)
    params, keys, rest = map(nnx.as_pure, states)
    return graphdef, params, (keys, rest)


def arguments_of(function: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names, out of `model_state` and `rng`, that are arguments of a function."""
    parameters = inspect.signature(function).parameters
    return tuple(name for name in ("model_state", "rng") if name in parameters)


def convert_metrics(source: str, metrics: Any, *, pairs: bool = False) -> dict[str, Any]:
    """Return metrics, scalars or pairs of scalars, as float32; raise a TypeError for others."""
    is_dict = isinstance(metrics, Mapping)
    for name, value in (metrics if is_dict else {"": metrics}).items():
        is_pair = pairs and isinstance(value, tuple) and len(value) == 2
        parts = value if is_pair else (value,)
        is_array = jax.tree_util.all_leaves(parts)
        if not (is_dict and is_array) or any(map(jnp.shape, parts)):
            of = (
                f"of shape {jnp.shape(parts[-1])}"
                if is_array
                else f"of type {type(value).__name__}"
            )
            came = f"{name!r} {of}" if is_dict else type(metrics).__name__
            wanted = f"a dict of scalar metrics{' or pairs of scalars' * pairs}"
            raise TypeError(f"{source} must be {wanted}, got {came}.")
    return jax.tree.map(lambda value: jnp.asarray(value).astype(jnp.float32), dict(metrics))


class TrainState(train_state.TrainState):
    """`flax.training.train_state.TrainState` for a linen model and any method.

    `apply_gradients` passes extra arguments to the transformation and applies updates exactly
    (`optperm.apply_updates`).

    Attributes:
      model_state: The non-trained collections by name, such as `{"batch_stats": ...}`.
      rng: The random key from which `step_rng` derives the key of each step, or None.
      weights: In `fit`, the sum of the weights of a replica's steps since the last commit, and the
        number of these steps; otherwise None.

    Example:
      >>> import flax.linen as nn, jax, jax.numpy as jnp, optperm
      >>> from optperm.training import TrainState
      >>> class Model(nn.Module):
      ...     @nn.compact
      ...     def __call__(self, x, train):
      ...         x = nn.BatchNorm(use_running_average=not train)(nn.Dense(8)(x))
      ...         return nn.Dense(1)(nn.Dropout(0.1, deterministic=not train)(x))
      >>> model, x = Model(), jnp.linspace(-1.0, 1.0, 12).reshape(4, 3)
      >>> params = model.init(jax.random.key(0), x, train=False)
      >>> stats = {"batch_stats": params.pop("batch_stats")}
      >>> tx = optperm.dim_reduce(n_components=2)
      >>> state = TrainState.create(
      ...     apply_fn=model.apply, tx=tx, model_state=stats, rng=jax.random.key(1), **params
      ... )
      >>> def loss_fn(params, batch, *, model_state, rng):
      ...     variables, rngs = {"params": params, **model_state}, {"dropout": rng}
      ...     y, model_state = model.apply(variables, batch, True, mutable=["batch_stats"], rngs=rngs)
      ...     return jnp.mean(y**2), model_state
      >>> @jax.jit
      ... def step(state, batch):
      ...     e = state.evaluate(loss_fn, batch)
      ...     new = {"model_state": e.aux.model_state, **e.extra_args}
      ...     return state.apply_gradients(grads=e.grad, **new)
      >>> state = step(state, x)
      >>> int(state.step)
      1
    """

    model_state: Any = struct.field(default_factory=dict)
    rng: jax.Array | None = None
    weights: jax.Array | None = None

    @classmethod
    def create(
        cls,
        *,
        apply_fn: Any,
        params: Any,
        tx: Any,
        model_state: Any = None,
        rng: Any = None,
        **fields: Any,
    ) -> Self:
        """Make a state before the first step.

        Args:
          apply_fn: Usually `model.apply`.
          params: The initial params.
          tx: The transformation, with or without extra arguments. If its `init` needs a mapped axis,
            such as `optperm.dim_reduce` with `axis_name`, also pass `opt_state=None`.
          model_state: The non-trained collections by name.
          rng: A random key, such as for dropout.
          **fields: The fields of a subclass, and `opt_state` to replace `tx.init(params)`. If
            `opt_state` is None, `optperm.training.fit` initializes the state on its devices.

        Raises:
          TypeError: If `tx` is not a transformation.
        """
        checks.check_transformation("tx", tx)
        if "opt_state" not in fields:
            fields["opt_state"] = tx.init(params)
        fields |= {"model_state": dict(model_state or {}), "rng": rng}
        return cls(jnp.zeros([], jnp.int32), apply_fn=apply_fn, params=params, tx=tx, **fields)

    def step_rng(self, axis_name: AxisName | None = None) -> jax.Array | None:
        """Return the key of the next step, or None. Each replica of a mapped axis has another key."""
        key = None if self.rng is None else jax.random.fold_in(self.rng, self.step)
        if key is None or axis_name is None:
            return key
        return jax.random.fold_in(key, jax.lax.axis_index(axis_name))

    def evaluate(
        self,
        loss_fn: Callable[..., Any],
        batch: Any,
        *,
        has_aux: bool = False,
        axis_name: AxisName | None = None,
    ) -> Evaluation:
        """Evaluate a loss at this state's params and model state, with the key of the step.

        All functions of the result use the same model state and key, so later evaluations within the
        step do not change the model state.

        Args:
          loss_fn: A function `loss_fn(params, batch)` that returns the scalar mean loss, or a pair
            `(sum, count)` as its loss. It may have an argument `rng`. If it has an argument
            `model_state`, it returns `(loss, new_model_state)`.
          batch: As in `optperm.evaluate`.
          has_aux: If True, the last entry of the tuple that `loss_fn` returns is aux.
          axis_name: As in `optperm.evaluate`.

        Returns:
          An `optperm.Evaluation`. Pass its `aux.model_state`, the new model state, to `apply_gradients`.
          Its `aux.aux` is the aux of `loss_fn`.
        """
        loss = Partial(Model(loss_fn, has_aux), self.model_state, self.step_rng(axis_name))
        return evaluate(loss, self.params, batch, has_aux=True, axis_name=axis_name)

    def apply_gradients(
        self, *, grads: Updates, model_state: Any = None, **extra_args: Any
    ) -> Self:
        """Return the state after one step, given the results of `evaluate`.

        Without `model_state`, the model state does not change.
        """
        extras = known_extra_args(self.tx, extra_args)
        updates, opt_state = self.tx.update(grads, self.opt_state, self.params, **extras)
        return self.replace(
            step=self.step + 1,
            params=apply_updates(self.params, updates, opt_state),
            opt_state=opt_state,
            model_state=self.model_state if model_state is None else model_state,
        )


class Optimizer(nnx.Optimizer[Any]):
    """A `flax.nnx.Optimizer` that sets exact weights and makes the extra arguments of a method.

    Example:
      >>> import jax.numpy as jnp, optperm
      >>> from flax import nnx
      >>> from optperm.training import Optimizer
      >>> model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
      >>> optimizer = Optimizer(model, optperm.dim_reduce(n_components=2), wrt=nnx.Param)
      >>> def loss_fn(model, batch):
      ...     return jnp.mean((model(batch) - 1.0) ** 2)
      >>> @nnx.jit
      ... def step(model, optimizer, batch):
      ...     e = optimizer.evaluate(model, loss_fn, batch)
      ...     optimizer.update(model, e.grad, **e.extra_args)
      ...     return e.value
      >>> first, second = (step(model, optimizer, jnp.eye(3)) for _ in range(2))
      >>> bool(second < first)
      True
    """

    def evaluate(
        self,
        model: Any,
        loss_fn: Callable[..., Any],
        batch: Any,
        *,
        has_aux: bool = False,
        axis_name: Any = None,
    ) -> Evaluation:
        """Evaluate the loss of a model as `optperm.evaluate` does, and update the model's other state.

        Later evaluations within the step start from the state before this evaluation (batch statistics,
        counts of random numbers), and do not change the model. `loss_fn(model, batch)` returns the
        scalar mean loss or a pair `(sum, count)`, or `(loss, aux)` with `has_aux`.
        """
        graphdef, params, model_state = split_model(model, self.wrt)
        loss = Partial(Model(loss_fn, has_aux, graphdef, self.wrt), model_state, None)
        e = evaluate(loss, params, batch, has_aux=True, axis_name=axis_name)
        nnx.update(model, e.aux.model_state[1])
        return dataclasses.replace(e, aux=e.aux.aux)

    def update(self, model: Any, grads: Updates, /, **extra_args: Any) -> Updates:
        """Update the model as `nnx.Optimizer` does, and set exact entries to their exact values."""
        params = nnx.as_pure(nnx.state(model, self.wrt))
        opt_state = nnx.as_pure(self.opt_state)
        # Gradients from `nnx.grad` contain variables, from which `wrt` selects, but `evaluate`'s do not.
        leaves = jax.tree.leaves(grads, is_leaf=lambda node: isinstance(node, nnx.Variable))
        if any(isinstance(leaf, nnx.Variable) for leaf in leaves):
            grads = nnx.as_pure(nnx.state(grads, self.wrt))
        extras = nnx.as_pure(known_extra_args(self.tx, extra_args))
        updates, opt_state = self.tx.update(grads, opt_state, params, **extras)
        nnx.update(model, apply_updates(params, updates, opt_state))
        nnx.update(self.opt_state, nnx.state(opt_state))
        self.step[...] += 1
        return updates
