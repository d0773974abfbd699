"""One step of training, of a train state or a model of `flax.nnx`, as a pure function of arrays."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, Self

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from optperm.contract.mapped_axes import varying_axes
from optperm.contract.states import find_states
from optperm.distributed.center import center_params
from optperm.distributed.local_steps import LocalStepsState
from optperm.evaluation import Evaluation, evaluate
from optperm.permutation.sgperm import PermuteByCyclesState
from optperm.placement import apply_updates
from optperm.training.losses import LinenLoss, NnxLoss, arguments_of, scalar_metrics, split_model
from optperm.training.train_state import TrainState

# Of each leaf of a tree the implementation of a random key, None for any other array.
KeyKinds = tuple[Any, ...]


class Program(Protocol):
    """What training repeats: steps of a carry, all of it plain arrays, for `jax.lax` loops and files.

    A program is hashable, and equal to one that compiles to the same.
    """

    def step(self, carry: Any, batch: Any) -> tuple[Any, dict[str, jax.Array]]:
        """The carry after one step, and float32 scalars by name, on each replica its own."""
        ...


class Parts(NamedTuple):
    """What a carry consists of, whatever the model.

    Attributes:
      params: The params.
      opt_state: The optimizer's state.
      model_state: What else the model holds; keys are plain arrays.
    """

    params: optax.Params
    opt_state: Any
    model_state: Any


@dataclasses.dataclass(frozen=True)
class Spread:
    """How a step is spread over replicas.

    Attributes:
      axis_name: Their mapped axis; None for a single one.
      own: Whether each keeps a carry of its own. Else all share one, and the means of their gradients
        and model states.
    """

    axis_name: str | None = None
    own: bool = False

    @property
    def averaged(self) -> str | None:
        """The axis over which all is averaged in a step."""
        return None if self.own else self.axis_name

    def agreed(self, tree: Any) -> Any:
        """What the replicas agree on within a step: the means of what they share."""
        return tree if self.averaged is None else agreed(tree)


def agreed(tree: Any) -> Any:
    """The mean of what differs between replicas; of whole numbers and flags, the largest."""

    def agree(leaf: jax.Array) -> jax.Array:
        axes = tuple(varying_axes(leaf))
        if not axes:
            return leaf
        if jnp.issubdtype(leaf.dtype, jnp.inexact):
            return jax.lax.pmean(leaf, axes)
        if leaf.dtype == jnp.bool_:
            return jax.lax.pmax(leaf.astype(jnp.int32), axes) > 0
        return jax.lax.pmax(leaf, axes)

    return jax.tree.map(agree, tree)


def step_metrics(e: Evaluation, aux: Any, opt_state: Any) -> dict[str, jax.Array]:
    """The loss, what the loss function returned beside it, and the share of weights moved."""
    metrics = {"loss": e.value.astype(jnp.float32)}
    if aux is not None:
        metrics |= scalar_metrics(aux, source="What loss_fn returns beside the loss (has_aux=True)")
    for state in find_states(opt_state, PermuteByCyclesState):
        metrics["share_moved"] = state.share_moved
    return metrics


@dataclasses.dataclass(frozen=True)
class LinenProgram:
    """Steps of a `TrainState`; the carry is one whose random key is plain data.

    Attributes:
      loss: The loss function.
      key: The implementation of its key, if it has one.
      spread: How it is spread over replicas.
    """

    loss: LinenLoss
    key: Any
    spread: Spread

    @classmethod
    def of(cls, state: TrainState, loss: LinenLoss, spread: Spread) -> tuple[Self, TrainState]:
        """The program that trains a state, and its carry."""
        if state.rng is None:
            return cls(loss, None, spread), state
        kind = jax.random.key_impl(state.rng)
        return cls(loss, kind, spread), state.replace(rng=jax.random.key_data(state.rng))

    def state(self, carry: TrainState) -> TrainState:
        """The carry as a train state."""
        return carry if self.key is None else carry.replace(rng=self._typed(carry.rng))

    def _typed(self, data: Any) -> jax.Array:
        return jax.random.wrap_key_data(data, impl=self.key)

    def step(self, carry: TrainState, batch: Any) -> tuple[TrainState, dict[str, jax.Array]]:
        """See `Program`."""
        state, spread = self.state(carry), self.spread
        rng = state.step_rng(spread.axis_name)
        bound = functools.partial(self.loss, state.model_state, rng)
        e = evaluate(bound, state.params, batch, has_aux=True, axis_name=spread.averaged)
        state = state.apply_gradients(
            grads=e.grad, model_state=spread.agreed(e.aux.model_state), **e.extra_args
        )
        metrics = step_metrics(e, e.aux.aux, state.opt_state)
        return state.replace(rng=carry.rng), metrics

    def parts(self, carry: TrainState) -> Parts:
        """See `Program`."""
        return Parts(carry.params, carry.opt_state, carry.model_state)

    def with_parts(self, carry: TrainState, parts: Parts) -> TrainState:
        """See `Program`."""
        return carry.replace(**parts._asdict())

    def bound_loss(self, carry: TrainState) -> Any:
        """The loss as a function of params and batch, as a tree of what else it takes."""
        rng = None if self.key is None else jax.random.fold_in(self._typed(carry.rng), carry.step)
        return jax.tree_util.Partial(self.loss, carry.model_state, rng)

    def init_opt_state(self, carry: TrainState) -> Any:
        """The optimizer's state at the carry's params."""
        return carry.tx.init(carry.params)


class NnxCarry(NamedTuple):
    """The parts of a model of `flax.nnx` and of its optimizer, as plain arrays.

    Attributes:
      step: Steps taken.
      params: What is trained.
      opt_state: The optimizer's state.
      keys: Data of the model's random keys.
      rest: Its other state.
    """

    step: jax.Array
    params: Any
    opt_state: Any
    keys: Any
    rest: Any


@dataclasses.dataclass(frozen=True)
class NnxProgram:
    """Steps of a model of `flax.nnx` and its optimizer.

    Attributes:
      loss: The loss function, and the model's graph.
      tx: The transformation.
      key_kinds: The implementations of its random keys.
      spread: How it is spread over replicas.
    """

    loss: NnxLoss
    tx: optax.GradientTransformation
    key_kinds: KeyKinds
    spread: Spread

    @classmethod
    def of(
        cls,
        model: Any,
        optimizer: nnx.Optimizer[Any],
        loss_fn: Callable[..., Any],
        spread: Spread,
        *,
        has_aux: bool,
    ) -> tuple[Self, NnxCarry]:
        """The program that trains a model, and its carry."""
        graphdef, params, (keys, rest) = split_model(model, optimizer.wrt)
        program = cls(
            NnxLoss(loss_fn, graphdef, optimizer.wrt, has_aux),
            optimizer.tx,
            tuple(jax.random.key_impl(key) for key in jax.tree.leaves(keys)),
            spread,
        )
        carry = NnxCarry(
            optimizer.step.get_value(),
            params,
            nnx.as_pure(optimizer.opt_state),
            jax.tree.map(jax.random.key_data, keys),
            rest,
        )
        return program, carry

    def update(self, model: Any, optimizer: nnx.Optimizer[Any], carry: NnxCarry) -> None:
        """Brings a model and its optimizer to where the carry is."""
        nnx.update(model, carry.params, carry.rest)
        nnx.update(optimizer.opt_state, nnx.state(carry.opt_state))
        optimizer.step.set_value(carry.step)

    def model(self, carry: NnxCarry) -> Any:
        """A new model of the carry's arrays."""
        return nnx.merge(self.loss.graphdef, carry.params, self._keys(carry), carry.rest)

    def _keys(self, carry: NnxCarry) -> Any:
        leaves, structure = jax.tree.flatten(carry.keys)
        kinds = zip(leaves, self.key_kinds, strict=True)
        typed = [jax.random.wrap_key_data(data, impl=kind) for data, kind in kinds]
        return jax.tree.unflatten(structure, typed)

    def step(self, carry: NnxCarry, batch: Any) -> tuple[NnxCarry, dict[str, jax.Array]]:
        """See `Program`."""
        spread, keys = self.spread, self._keys(carry)
        if spread.axis_name is not None:
            index = jax.lax.axis_index(spread.axis_name)
            keys = jax.tree.map(lambda key: jax.random.fold_in(key, index), keys)
        bound = functools.partial(self.loss, (keys, carry.rest), None)
        e = evaluate(bound, carry.params, batch, has_aux=True, axis_name=spread.averaged)
        tx = optax.with_extra_args_support(self.tx)
        updates, opt_state = tx.update(e.grad, carry.opt_state, carry.params, **e.extra_args)
        metrics = step_metrics(e, e.aux.aux, opt_state)
        new = NnxCarry(
            carry.step + jnp.ones_like(carry.step),
            apply_updates(carry.params, updates, opt_state),
            opt_state,
            carry.keys,
            spread.agreed(e.aux.model_state[1]),
        )
        return new, metrics

    def parts(self, carry: NnxCarry) -> Parts:
        """See `Program`."""
        return Parts(carry.params, carry.opt_state, carry.rest)

    def with_parts(self, carry: NnxCarry, parts: Parts) -> NnxCarry:
        """See `Program`."""
        params, opt_state, rest = parts
        return carry._replace(params=params, opt_state=opt_state, rest=rest)

    def bound_loss(self, carry: NnxCarry) -> Any:
        """The loss as a function of params and batch, as a tree of what else it takes."""
        return jax.tree_util.Partial(self.loss, (self._keys(carry), carry.rest), None)

    def init_opt_state(self, carry: NnxCarry) -> Any:
        """The optimizer's state at the carry's params."""
        return self.tx.init(carry.params)


def trained_parts(parts: Parts) -> Parts:
    """The parts with what has been trained in the place of the params: a center, where there is one."""
    if not find_states(parts.opt_state, LocalStepsState):
        return parts
    return parts._replace(params=center_params(parts.opt_state))


def evaluation_call(program: LinenProgram | NnxProgram, eval_fn: Callable[..., Any]) -> Any:
    """`eval_fn` of a carry and a batch, giving metrics by name."""

    def call(carry: Any, batch: Any) -> dict[str, jax.Array]:
        if isinstance(program, NnxProgram):
            out = eval_fn(program.model(carry), batch)
        else:
            takes = arguments_of(eval_fn)
            if "rng" in takes:
                raise TypeError("eval_fn takes rng, but an evaluation draws nothing: leave it out.")
            known = {"model_state": carry.model_state} if takes else {}
            out = eval_fn(carry.params, batch, **known)
        return scalar_metrics(out, source="What eval_fn returns")

    return call
