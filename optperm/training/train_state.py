"""Flax's train states, for methods that ask for more than gradients and place weights exactly."""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import optax
from flax import nnx, struct
from flax.training import train_state
from jax.tree_util import Partial

from optperm.contract import checks
from optperm.contract.mapped_axes import AxisName
from optperm.contract.transformation import known_extra_args
from optperm.evaluation import Evaluation, evaluate
from optperm.placement import apply_updates


class Outputs(NamedTuple):
    """What an evaluation gives beside the loss: the model state after it, and aux with `has_aux`."""

    model_state: Any
    aux: Any


@dataclasses.dataclass(frozen=True)
class Model:
    """A model and its loss function, as one function of model state, random key, params and batch.

    Without a `graphdef` it is one of linen: `loss_fn(params, batch)` may take `model_state` and `rng` by
    these names, and returns the loss, the new model state if it takes one, and aux with `has_aux`. With
    one it is of `flax.nnx`, put together of the params, which `wrt` selects, and as model state of its
    random keys and all else: `loss_fn(model, batch)` may change the model.
    """

    loss_fn: Any = None
    has_aux: bool = False
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
                f"loss_fn must return ({', '.join(names)}), got {came}. One that takes model_state "
                "returns the new one, as apply gives it with mutable=list(model_state); aux goes with "
                "has_aux=True."
            )
        got = dict(zip(names, out if len(names) > 1 else (out,), strict=True))
        if self.graphdef is None:
            new = got.get("model_state", model_state)
        says = "The model_state that loss_fn returned"
        checks.check_same_tree(says, new, model_state, source="the one before")
        return got["loss"], Outputs(new, got.get("aux"))

    def shown(self, state: Any) -> Any:
        """The state, or a new model of it."""
        if self.graphdef is None:
            return state
        return nnx.merge(self.graphdef, state.params, *state.model_state)

    def evaluated(self, state: Any, batch: Any, eval_fn: Callable[..., Any]) -> dict[str, Any]:
        """Return the metrics of a batch, (2,) each: a sum over examples, and what to divide it by.

        A model of `flax.nnx` is in eval mode.
        """
        if self.graphdef is not None:
            model = self.shown(state)  # one of its own: the mode of the trained one stays
            model.eval()
            out = eval_fn(model, batch)
        else:
            takes = "model_state" in arguments_of(eval_fn)
            known = {"model_state": state.model_state} if takes else {}
            out = eval_fn(state.params, batch, **known)
        metrics = scalar_metrics("What eval_fn returns", out, pairs=True)
        size = checks.count_examples("A batch of eval_data", batch, has_scalars=True)
        return {
            name: jnp.stack(
                value if isinstance(value, tuple) else [size * value, jnp.float32(size)]
            )
            for name, value in metrics.items()
        }


def split_model(model: Any, wrt: Any) -> tuple[Any, Any, tuple[Any, Any]]:
    """A model's graph, what is trained, and its keys and all other state, as plain arrays."""
    graphdef, *states = nnx.split(model, wrt, nnx.RngKey, ...)
    params, keys, rest = map(nnx.as_pure, states)
    return graphdef, params, (keys, rest)


def arguments_of(function: Callable[..., Any]) -> tuple[str, ...]:
    """Which of `model_state` and `rng` a function takes by name."""
    parameters = inspect.signature(function).parameters
    return tuple(name for name in ("model_state", "rng") if name in parameters)


def scalar_metrics(source: str, metrics: Any, *, pairs: bool = False) -> dict[str, Any]:
    """Return metrics, or pairs of them, as float32 scalars; raise a TypeError if they are none."""
    wanted = f"{source} must be a dict of scalar metrics by name"
    if not isinstance(metrics, Mapping):
        raise TypeError(
            f"{wanted}, such as {{'accuracy': accuracy}}, got {type(metrics).__name__}."
        )
    for name, value in metrics.items():
        is_pair = pairs and isinstance(value, tuple) and len(value) == 2
        for part in value if is_pair else (value,):
            shape, dtype = jnp.shape(part), jnp.result_type(part)
            is_number = jnp.issubdtype(dtype, jnp.number) or dtype == jnp.bool_
            if shape or not is_number or not isinstance(name, str):
                advice = "Take its mean over the batch, or leave it out"
                raise TypeError(f"{wanted}, but {name!r} is {dtype}{list(shape)}. {advice}.")
    return jax.tree.map(lambda value: jnp.asarray(value).astype(jnp.float32), dict(metrics))


class TrainState(train_state.TrainState):
    """`flax.training.train_state.TrainState` for a linen model and any method.

    Its `apply_gradients` hands extra arguments on to the transformation and applies updates exactly
    (`optperm.apply_updates`).

    Attributes:
      model_state: The non-trained collections by name, such as `{"batch_stats": ...}`.
      rng: The random key from which `step_rng` draws that of each step; None for a model without.

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
      >>> e = state.evaluate(loss_fn, x)
      >>> new = e.aux.model_state
      >>> state = state.apply_gradients(grads=e.grad, model_state=new, **e.extra_args)
      >>> int(state.step)
      1
    """

    model_state: Any = struct.field(default_factory=dict)
    rng: jax.Array | None = None

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
        """A state before the first step.

        Args:
          apply_fn: Usually `model.apply`.
          params: The initial params.
          tx: The transformation; one without extra arguments is fine. One whose `init` asks for a mapped
            axis, such as `optperm.dim_reduce` with `axis_name`, goes with `opt_state=None`.
          model_state: The non-trained collections by name.
          rng: A random key for dropout and the like.
          **fields: Those that a subclass adds, and `opt_state` where it is to be another than
            `tx.init(params)`. With None `optperm.training.fit` initializes it on its devices.

        Raises:
          TypeError: If `tx` is no transformation, or `rng` no key.
        """
        checks.check_transformation("tx", tx)
        if rng is not None:
            checks.check_key("rng", rng)
        if "opt_state" not in fields:
            fields["opt_state"] = tx.init(params)
        fields |= {"model_state": dict(model_state or {}), "rng": rng}
        return cls(jnp.zeros([], jnp.int32), apply_fn=apply_fn, params=params, tx=tx, **fields)

    def step_rng(self, axis_name: AxisName | None = None) -> jax.Array | None:
        """The key of the next step, of each replica along a mapped axis another one; None without."""
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
        """`optperm.evaluate` of this state's params, at its model state and with the key of the step.

        All closures of the result see the same: whatever a method evaluates within the step leaves no
        trace in the model state.

        Args:
          loss_fn: `loss_fn(params, batch)`, the scalar mean loss. It may also take `model_state`, and
            then returns `(loss, new_model_state)`, and `rng`, each by its name.
          batch: As in `optperm.evaluate`.
          has_aux: Whether `loss_fn` returns something more, as the last of a tuple.
          axis_name: As in `optperm.evaluate`.

        Returns:
          An `optperm.Evaluation` whose `aux` is a pair of `aux.model_state`, the new one of this
          evaluation, to pass to `apply_gradients`, and of `aux.aux`.
        """
        loss = Partial(Model(loss_fn, has_aux), self.model_state, self.step_rng(axis_name))
        return evaluate(loss, self.params, batch, has_aux=True, axis_name=axis_name)

    def apply_gradients(
        self, *, grads: optax.Updates, model_state: Any = None, **extra_args: Any
    ) -> Self:
        """The state after one step, by what `evaluate` gave; without a model state it keeps its own."""
        extras = known_extra_args(self.tx, extra_args)
        updates, opt_state = self.tx.update(grads, self.opt_state, self.params, **extras)
        return self.replace(
            step=self.step + 1,
            params=apply_updates(self.params, updates, opt_state),
            opt_state=opt_state,
            model_state=self.model_state if model_state is None else model_state,
        )


class Optimizer(nnx.Optimizer[Any]):
    """`flax.nnx.Optimizer` that places weights exactly, and whose `evaluate` gives extra arguments.

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
        """`optperm.evaluate` of a model, which takes on the state that this evaluation leaves.

        What a method evaluates later within the step starts from the model's state of now (batch
        statistics, counts of random numbers) and leaves no trace in it. `loss_fn(model, batch)` is the
        scalar mean loss, or `(loss, aux)` with `has_aux`; all else is as in `optperm.evaluate`.
        """
        graphdef, params, model_state = split_model(model, self.wrt)
        loss = Partial(Model(loss_fn, has_aux, graphdef, self.wrt), model_state, None)
        e = evaluate(loss, params, batch, has_aux=True, axis_name=axis_name)
        nnx.update(model, e.aux.model_state[1])
        return dataclasses.replace(e, aux=e.aux.aux)

    def update(self, model: Any, grads: optax.Updates, /, **extra_args: Any) -> optax.Updates:
        """As in `nnx.Optimizer`, but bit for bit where the method places weights."""
        params = nnx.as_pure(nnx.state(model, self.wrt))
        opt_state = nnx.as_pure(self.opt_state)
        # Those of `nnx.grad` hold variables, of which `wrt` selects; those of `evaluate` do not.
        leaves = jax.tree.leaves(grads, is_leaf=lambda node: isinstance(node, nnx.Variable))
        if any(isinstance(leaf, nnx.Variable) for leaf in leaves):
            grads = nnx.as_pure(nnx.state(grads, self.wrt))
        extras = nnx.as_pure(known_extra_args(self.tx, extra_args))
        updates, opt_state = self.tx.update(grads, opt_state, params, **extras)
        nnx.update(model, apply_updates(params, updates, opt_state))
        nnx.update(self.opt_state, nnx.state(opt_state))
        self.step[...] += 1
        return updates
