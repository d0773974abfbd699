"""What is trained, as one pytree, and the compiled steps of it."""

import dataclasses
import functools
import weakref
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from flax.training import train_state

from optperm.contract import checks
from optperm.contract.dtypes import cast_like
from optperm.contract.mapped_axes import mark_varying
from optperm.contract.states import find_states
from optperm.distributed.local_steps import LocalStepsState, center_params
from optperm.evaluation import evaluate
from optperm.permutation.sgperm import PermuteByCyclesState
from optperm.training.layout import Layout, agreed
from optperm.training.losses import LinenLoss, NnxLoss, arguments_of, scalar_metrics, split_model
from optperm.training.train_state import Optimizer, TrainState

# By the loss function the jitted functions that were made of it, as long as somebody else holds it.
_MADE: weakref.WeakKeyDictionary[Any, dict[Hashable, Any]] = weakref.WeakKeyDictionary()


class Parts(NamedTuple):
    """What a carry consists of, whatever the model.

    Attributes:
      params: The params.
      opt_state: The optimizer's state.
      model_state: What else the model holds.
    """

    params: optax.Params
    opt_state: Any
    model_state: Any


@dataclasses.dataclass(frozen=True)
class Subject:
    """How to read a carry: a `TrainState`, or the `nnx.state` of a model and its optimizer.

    Attributes:
      graphdef: What the model and its optimizer are put together by; None for a `TrainState`.
    """

    graphdef: Any = None

    @classmethod
    def of(cls, source: Any, optimizer: Any) -> tuple["Subject", Any]:
        """From the arguments of `fit`, with the carry.

        Raises:
          TypeError: If it is neither a `TrainState` nor a model with its optimizer.
          ValueError: If a `TrainState` comes with an optimizer.
        """
        if isinstance(source, TrainState):
            if optimizer is not None:
                raise ValueError(
                    "optimizer is for a model of flax.nnx: a TrainState has its own, tx."
                )
            return cls(), source
        if isinstance(source, train_state.TrainState):
            raise TypeError(
                "A flax TrainState hands no extra arguments to the method: make the state by "
                "optperm.training.TrainState.create, which takes the same."
            )
        if not isinstance(source, nnx.Module):
            raise TypeError(
                "The first argument of fit must be an optperm.training.TrainState, a model of flax.nnx, "
                f"or what an earlier fit returned, got {type(source).__name__}."
            )
        if not isinstance(optimizer, nnx.Optimizer):
            raise TypeError(
                "A model of flax.nnx is trained by its optimizer: pass optimizer=optperm.training."
                f"Optimizer(model, tx, wrt=nnx.Param), got {type(optimizer).__name__}."
            )
        graphdef, carry = nnx.split((source, optimizer))
        return cls(graphdef), carry

    @property
    def kind(self) -> str:
        """`linen` or `nnx`."""
        return "linen" if self.graphdef is None else "nnx"

    def merge(self, carry: Any) -> tuple[Any, Any]:
        """A new model and a new optimizer of the carry's arrays."""
        model, optimizer = nnx.merge(self.graphdef, carry, copy=True)
        return model, optimizer

    def tx(self, carry: Any) -> optax.GradientTransformation:
        """The method."""
        return carry.tx if self.graphdef is None else self.merge(carry)[1].tx

    def parts(self, carry: Any) -> Parts:
        """The parts of a carry."""
        if self.graphdef is None:
            return Parts(carry.params, carry.opt_state, carry.model_state)
        model, optimizer = self.merge(carry)
        _, params, (_, rest) = split_model(model, optimizer.wrt)
        return Parts(params, nnx.as_pure(optimizer.opt_state), rest)

    def with_parts(self, carry: Any, parts: Parts) -> Any:
        """The carry with other parts."""
        if self.graphdef is None:
            return carry.replace(**parts._asdict())
        model, optimizer = self.merge(carry)
        nnx.update(model, parts.params, parts.model_state)
        nnx.update(optimizer.opt_state, nnx.state(parts.opt_state))
        return nnx.state((model, optimizer))

    def trained(self, carry: Any) -> Any:
        """What has been trained, from the carries of all replicas: the center's, or the first one's."""
        first = jax.tree.map(lambda leaf: leaf[0], carry)
        parts, means = self.parts(first), self.parts(carry).model_state
        if find_states(parts.opt_state, LocalStepsState):
            parts = parts._replace(params=center_params(parts.opt_state))

        def mean(one: jax.Array, leaf: jax.Array) -> jax.Array:
            return jnp.mean(leaf, axis=0) if jnp.issubdtype(leaf.dtype, jnp.inexact) else one

        means = jax.tree.map(mean, parts.model_state, means)
        return self.with_parts(first, parts._replace(model_state=means))

    def bound_loss(self, carry: Any, loss_fn: Callable[..., Any], *, has_aux: bool) -> Any:
        """The loss as a function of params and batch, as a tree of what else it takes."""
        if self.graphdef is None:
            loss = LinenLoss(loss_fn, has_aux)
            return jax.tree_util.Partial(loss, carry.model_state, carry.step_rng())
        model, optimizer = self.merge(carry)
        graphdef, _, model_state = split_model(model, optimizer.wrt)
        loss_of_model = NnxLoss(loss_fn, graphdef, optimizer.wrt, has_aux)
        return jax.tree_util.Partial(loss_of_model, model_state, None)

    def step(
        self, carry: Any, batch: Any, loss_fn: Callable[..., Any], layout: Layout, *, has_aux: bool
    ) -> tuple[Any, dict[str, jax.Array]]:
        """The carry after one step, of the same types, and float32 scalars by name."""
        mapped = layout.mapped or None
        averaged = None if layout.own else mapped
        if self.graphdef is None:
            bound = functools.partial(
                LinenLoss(loss_fn, has_aux), carry.model_state, carry.step_rng(mapped)
            )
            e = evaluate(bound, carry.params, batch, has_aux=True, axis_name=averaged)
            model_state, aux = e.aux
            new = carry.apply_gradients(grads=e.grad, model_state=model_state, **e.extra_args)
            opt_state = new.opt_state
        else:
            model, optimizer = self.merge(carry)
            e = Optimizer.evaluate(
                optimizer, model, loss_fn, batch, has_aux=has_aux, axis_name=averaged
            )
            Optimizer.update(optimizer, model, e.grad, **e.extra_args)
            new, aux = nnx.state((model, optimizer)), e.aux
            opt_state = nnx.as_pure(optimizer.opt_state)
        metrics = {"loss": e.value.astype(jnp.float32)}
        for state in find_states(opt_state, PermuteByCyclesState):
            metrics["share_moved"] = state.share_moved
        if aux is not None:
            source = "What loss_fn returns beside the loss (has_aux=True)"
            metrics |= scalar_metrics(aux, source=source)
        before, after = plain(carry), plain(new)
        checks.check_same_tree(
            "The state after a step", after, before, source="the state before it", dtypes=False
        )
        if averaged is not None:
            after = agreed(after)
        stable = typed(cast_like(after, before), carry)
        is_tracked = layout.own and layout.mesh is not None
        return mark_varying((stable, metrics), layout.mapped if is_tracked else ())

    def evaluated(
        self, carry: Any, batch: Any, eval_fn: Callable[..., Any]
    ) -> dict[str, jax.Array]:
        """The metrics that a function gives on a batch, by name."""
        if self.graphdef is not None:
            out = eval_fn(self.merge(carry)[0], batch)
        else:
            takes = arguments_of(eval_fn)
            if "rng" in takes:
                raise TypeError("eval_fn takes rng, but an evaluation draws nothing: leave it out.")
            known = {"model_state": carry.model_state} if takes else {}
            out = eval_fn(carry.params, batch, **known)
        return scalar_metrics(out, source="What eval_fn returns")


def plain(tree: Any) -> Any:
    """The tree with the data of random keys in their place."""
    return jax.tree.map(lambda leaf: jax.random.key_data(leaf) if _is_key(leaf) else leaf, tree)


def typed(tree: Any, like: Any) -> Any:
    """Undoes `plain`, by a tree with such keys."""

    def wrap(leaf: Any, other: Any) -> Any:
        if not _is_key(other):
            return leaf
        return jax.random.wrap_key_data(leaf, impl=jax.random.key_impl(other))

    return jax.tree.map(wrap, tree, like)


def _is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


@functools.partial(jax.jit, static_argnums=(1, 2))
def trained_of(carry: Any, subject: Subject, layout: Layout) -> Any:
    """What has been trained, of the carries of all replicas, on every device."""
    trained, whole = subject.trained(carry), layout.sharding()
    return trained if whole is None else jax.lax.with_sharding_constraint(trained, whole)


def copied(tree: Any) -> Any:
    """The tree in memory of its own, where it lies: a loop may give that up."""
    return jax.tree.map(lambda leaf: jnp.copy(leaf), tree)


def made(function: Callable[..., Any], key: Hashable, make: Callable[..., Any]) -> Any:
    """What `make` makes of a function, once as long as somebody else holds the function.

    The programs that `jax.jit` keeps, and the arrays that they have taken from the function's closure,
    go with it. `make` gets a function that gives the function, which must outlive what is made.
    """
    try:
        known = _MADE.setdefault(function, {})
        weakly = weakref.ref(function)
    except TypeError:  # nothing can refer to it weakly
        return make(lambda: function)
    if key not in known:
        known[key] = make(weakly)
    return known[key]


@dataclasses.dataclass(frozen=True)
class Steps:
    """The compiled steps of a subject.

    Attributes:
      many: `many(carry, (data, order, first, last))`: the steps `first` to `last` of an epoch, of the
        examples that `order` names.
      one: `one(carry, batch)`.
      rows: How many rows of metrics `many` gives.
    """

    many: Any
    one: Any
    rows: int


def steps_of(
    subject: Subject,
    loss_fn: Callable[..., Any],
    layout: Layout,
    carry: Any,
    *,
    has_aux: bool,
    rows: int,
) -> Steps:
    """The compiled steps, found again in later calls. The carry tells where its arrays lie."""
    shardings = None
    if layout.mesh is not None:
        leaves, structure = jax.tree.flatten(carry)
        shardings = (structure, tuple(leaf.sharding for leaf in leaves))

    def make(loss: Callable[[], Any]) -> Steps:
        def step(carry: Any, batch: Any) -> tuple[Any, dict[str, jax.Array]]:
            return subject.step(carry, batch, loss(), layout, has_aux=has_aux)

        def many(carry: Any, shared: Any, order: jax.Array) -> tuple[Any, dict[str, jax.Array]]:
            data, first, last = shared
            # Traced once, and used twice.
            stepped = jax.jit(step, inline=True)
            forms = jax.eval_shape(stepped, carry, layout.take(data, order[first]))[1]
            columns = {name: jnp.zeros((rows,), jnp.float32) for name in forms}
            axes = layout.mapped if layout.own and layout.mesh is not None else ()

            def body(t: jax.Array, state: tuple[Any, Any]) -> tuple[Any, Any]:
                carry, columns = state
                carry, row = stepped(carry, layout.take(data, order[t]))
                return carry, {
                    name: jax.lax.dynamic_update_index_in_dim(column, row[name], t - first, 0)
                    for name, column in columns.items()
                }

            # Bounds that are arguments: however steps are grouped into calls, one program takes them
            # all, so that a run that was interrupted ends bit for bit like one that was not.
            return jax.lax.fori_loop(first, last, body, (carry, mark_varying(columns, axes)))

        def one(carry: Any, _: Any, batch: Any) -> tuple[Any, dict[str, jax.Array]]:
            return step(carry, layout.constrain(batch))

        options: dict[str, Any] = {"donate_argnums": 0}
        if shardings is not None:
            options["out_shardings"] = (jax.tree.unflatten(*shardings), layout.sharding())
        return Steps(
            jax.jit(layout.spread(many, 1), **options),
            jax.jit(layout.spread(one, 0), **options),
            rows,
        )

    return made(loss_fn, ("steps", subject, layout, shardings, has_aux, rows), make)
