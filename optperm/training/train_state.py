"""Flax's train states, for methods that ask for more than gradients and place weights exactly."""

from collections.abc import Callable, Mapping
from typing import Any, Self

import jax
import jax.numpy as jnp
import optax
from flax import nnx, struct
from flax.training import train_state

from optperm.contract import checks
from optperm.contract.mapped_axes import AxisName
from optperm.evaluation import Evaluation, evaluate
from optperm.placement import apply_updates
from optperm.training.losses import LinenLoss, NnxLoss, Outputs, split_model


class TrainState(train_state.TrainState):
    """`flax.training.train_state.TrainState` for a linen model and any method.

    Its `apply_gradients` hands extra arguments on to the transformation and applies updates exactly
    (`optperm.apply_updates`). Beside the params it holds what a model has that is not trained.

    Attributes:
      step: Steps taken, int32 ().
      apply_fn: Usually `model.apply`.
      params: The params.
      tx: The transformation.
      opt_state: Its state.
      model_state: The non-trained collections by name, such as `{"batch_stats": ...}`; empty for a
        model without.
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
      >>> variables = model.init(jax.random.key(0), x, train=False)
      >>> state = TrainState.create(
      ...     apply_fn=model.apply, params=variables["params"], rng=jax.random.key(1),
      ...     tx=optperm.dim_reduce(n_components=2),
      ...     model_state={"batch_stats": variables["batch_stats"]},
      ... )
      >>> def loss_fn(params, batch, *, model_state, rng):
      ...     outputs, model_state = model.apply(
      ...         {"params": params, **model_state}, batch, train=True,
      ...         mutable=list(model_state), rngs={"dropout": rng},
      ...     )
      ...     return jnp.mean(outputs**2), model_state
      >>> e = state.evaluate(loss_fn, x)
      >>> state = state.apply_gradients(
      ...     grads=e.grad, model_state=e.aux.model_state, **e.extra_args
      ... )
      >>> int(state.step)
      1
    """

    model_state: Any = struct.field(default_factory=dict)
    rng: jax.Array | None = None

    @classmethod
    def create(
        cls,
        *,
        apply_fn: Callable[..., Any],
        params: optax.Params,
        tx: optax.GradientTransformation,
        model_state: Mapping[str, Any] | None = None,
        rng: jax.Array | None = None,
        **fields: Any,
    ) -> Self:
        """A state before the first step.

        Args:
          apply_fn: Usually `model.apply`.
          params: The initial params.
          tx: The transformation; one without extra arguments is fine.
          model_state: The non-trained collections by name.
          rng: A random key, from `jax.random.key`, for dropout and the like.
          **fields: Those that a subclass adds, and `opt_state` where it is to be another than
            `tx.init(params)`. With None `optperm.training.fit` initializes it on its devices.

        Raises:
          TypeError: If `tx` is no transformation, `model_state` no mapping, or `rng` no key.
        """
        checks.check_transformation("tx", tx)
        if not isinstance(model_state, Mapping | None):
            raise TypeError(
                "model_state must be a dict of the model's non-trained collections, such as "
                f"{{'batch_stats': variables['batch_stats']}}, got {type(model_state).__name__}."
            )
        is_key = isinstance(rng, jax.Array) and jnp.issubdtype(rng.dtype, jax.dtypes.prng_key)
        if rng is not None and (not is_key or rng.ndim):
            raise TypeError(
                "rng must be a single random key from jax.random.key (a typed one, not from PRNGKey), "
                f"got {rng!r}."
            )
        opt_state = fields.pop("opt_state") if "opt_state" in fields else tx.init(params)
        return cls(
            step=jnp.zeros([], jnp.int32),
            apply_fn=apply_fn,
            params=params,
            tx=tx,
            opt_state=opt_state,
            model_state=dict(model_state or {}),
            rng=rng,
            **fields,
        )

    def step_rng(self, axis_name: AxisName | None = None) -> jax.Array | None:
        """The key of the next step, of each replica along a mapped axis another one; None without."""
        if self.rng is None:
            return None
        key = jax.random.fold_in(self.rng, self.step)
        return key if axis_name is None else jax.random.fold_in(key, jax.lax.axis_index(axis_name))

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
        loss, key = LinenLoss(loss_fn, has_aux), self.step_rng(axis_name)

        def bound(params: optax.Params, batch: Any) -> tuple[jax.Array, Outputs]:
            return loss(self.model_state, key, params, batch)

        return evaluate(bound, self.params, batch, has_aux=True, axis_name=axis_name)

    def apply_gradients(
        self, *, grads: optax.Updates, model_state: Any = None, **extra_args: Any
    ) -> Self:
        """The state after one step.

        Args:
          grads: The gradient, a tree like params.
          model_state: The model state to go on with; None for the same.
          **extra_args: For the transformation's `update`: what `evaluate` gave as `extra_args`.
        """
        tx = optax.with_extra_args_support(self.tx)
        updates, opt_state = tx.update(grads, self.opt_state, self.params, **extra_args)
        return self.replace(
            step=self.step + 1,
            params=apply_updates(self.params, updates, opt_state),
            opt_state=opt_state,
            model_state=self.model_state if model_state is None else model_state,
        )


class Optimizer(nnx.Optimizer[Any]):
    """`flax.nnx.Optimizer` that applies updates exactly where a method places weights.

    It adds this (`optperm.apply_updates`), and `evaluate`, which gives the extra arguments.

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
        axis_name: AxisName | None = None,
    ) -> Evaluation:
        """`optperm.evaluate` of a model, which takes on the state that this evaluation leaves.

        What a method evaluates later within the step starts from the model's state of now (batch
        statistics, counts of random numbers) and leaves no trace in it.

        Args:
          model: The model.
          loss_fn: `loss_fn(model, batch)`, the scalar mean loss, or `(loss, aux)` with `has_aux`.
          batch: As in `optperm.evaluate`.
          has_aux: Whether `loss_fn` returns something beside the loss.
          axis_name: As in `optperm.evaluate`.

        Returns:
          An `optperm.Evaluation`, with `aux` that of `loss_fn`.
        """
        graphdef, params, model_state = split_model(model, self.wrt)
        loss = NnxLoss(loss_fn, graphdef, self.wrt, has_aux)

        def bound(params: optax.Params, batch: Any) -> tuple[jax.Array, Outputs]:
            return loss(model_state, None, params, batch)

        e = evaluate(bound, params, batch, has_aux=True, axis_name=axis_name)
        nnx.update(model, e.aux.model_state[1])
        return Evaluation(value=e.value, grad=e.grad, aux=e.aux.aux, extra_args=e.extra_args)

    def update(self, model: Any, grads: optax.Updates, /, **extra_args: Any) -> optax.Updates:
        """As in `nnx.Optimizer`, but bit for bit where the method places weights."""
        params = nnx.as_pure(nnx.state(model, self.wrt))
        opt_state = nnx.as_pure(self.opt_state)
        # Those of `nnx.grad` hold variables, of which `wrt` selects; those of `evaluate` do not.
        leaves = jax.tree.leaves(grads, is_leaf=lambda node: isinstance(node, nnx.Variable))
        if any(isinstance(leaf, nnx.Variable) for leaf in leaves):
            grads = nnx.as_pure(nnx.state(grads, self.wrt))
        tx = optax.with_extra_args_support(self.tx)
        updates, opt_state = tx.update(grads, opt_state, params, **nnx.as_pure(extra_args))
        nnx.update(model, apply_updates(params, updates, opt_state))
        nnx.update(self.opt_state, nnx.state(opt_state))
        self.step[...] += 1
        return updates
