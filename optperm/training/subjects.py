"""What `fit` trains: a train state or a model of `flax.nnx`, and where its arrays lie."""

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from flax.training import train_state

from optperm.contract import checks
from optperm.contract.states import find_states
from optperm.distributed.local_steps import LocalStepsState
from optperm.training.losses import LinenLoss
from optperm.training.programs import (
    LinenProgram,
    NnxProgram,
    Parts,
    Spread,
    agreed,
    trained_parts,
)
from optperm.training.replicas import AXIS, Replicas, mesh_of
from optperm.training.train_state import TrainState
from optperm.variance.full_gradient import full_gradient


@dataclasses.dataclass(frozen=True)
class Subject:
    """What is trained, as a program and a carry on the devices.

    Attributes:
      source: The train state or the model.
      optimizer: The optimizer of a model of `flax.nnx`, else None.
      program: What a step does.
      replicas: What it is trained on.
      own: Whether each replica has a carry of its own.
    """

    source: Any
    optimizer: Any
    program: LinenProgram | NnxProgram
    replicas: Replicas
    own: bool
    _carry: Any = dataclasses.field(repr=False)

    @property
    def kind(self) -> str:
        """`linen` or `nnx`."""
        return "linen" if isinstance(self.program, LinenProgram) else "nnx"

    @property
    def model(self) -> Any:
        """The model of `flax.nnx`, else None."""
        return None if isinstance(self.program, LinenProgram) else self.source

    def initial(self) -> Any:
        """The carry before the first step, placed."""
        parts = self.program.parts(self._carry)
        if parts.opt_state is not None:
            put = self.replicas.stacked if self.own else self.replicas.scatter
            return self.replicas.fresh(put(self._carry))
        program = self.program

        def init(_: Any, carry: Any, __: Any) -> tuple[Any, Any]:
            opt_state = program.init_opt_state(carry)
            return program.with_parts(carry, parts_of(carry, opt_state)), ()

        def parts_of(carry: Any, opt_state: Any) -> Parts:
            return program.parts(carry)._replace(opt_state=opt_state)

        placed = self.replicas.scatter(self._carry)
        call = self.replicas.each(init, own=self.own)
        return self.replicas.fresh(
            self.replicas.together(self.explain, lambda: call((), placed, ()))[0]
        )

    def taken_over(self, earlier: Any) -> Any:
        """The carry of an earlier result, placed for this run.

        Raises:
          ValueError: If each replica had its own, and there are now more or fewer.
        """
        before: Subject = earlier._subject
        if (before.own or self.own) and (before.own, before.replicas.size) != (
            self.own,
            self.replicas.size,
        ):
            raise ValueError(
                f"The earlier fit trained {before.replicas.size} replicas, each with a state of its "
                "own, and this one cannot go on with another number of devices: pass the same, or "
                "begin anew from its state."
            )
        return self.place(before.gather(earlier._carry))

    def place(self, host: Any) -> Any:
        """A carry of NumPy arrays, placed."""
        return self.replicas.fresh(self.replicas.scatter(host, own=self.own))

    def gather(self, carry: Any) -> Any:
        """A placed carry as NumPy arrays, in every process."""
        return self.replicas.gather(carry, own=self.own)

    def trained(self, carry: Any) -> Any:
        """What has been trained, as a carry on the first device of this process."""
        first = self.replicas.first(carry, own=self.own)
        parts = trained_parts(self.program.parts(first))
        if self.own and self.replicas.mesh is not None and jax.tree.leaves(parts.model_state):
            mean = _mean_model_state(self.program, self.replicas)(carry, (), ())[1]
            parts = parts._replace(model_state=self.replicas.first(mean))
        return self.program.with_parts(first, parts)

    def shown(self, trained: Any) -> Any:
        """A new train state, or a new model, of arrays of its own."""
        copy = _copied(trained)
        if isinstance(self.program, LinenProgram):
            return self.program.state(copy)
        return self.program.model(copy)

    def state(self, trained: Any) -> TrainState | None:
        """The train state of a trained carry; None for a model of `flax.nnx`."""
        is_linen = isinstance(self.program, LinenProgram)
        return self.program.state(trained) if is_linen else None  # type: ignore[union-attr]

    def bring(self, trained: Any) -> None:
        """Brings a model of `flax.nnx` and its optimizer to where training came."""
        if isinstance(self.program, NnxProgram):
            self.program.update(self.source, self.optimizer, _copied(trained))

    def changed(
        self, carry: Any, change: Callable[[Any, Any, Any], Any], batches: Iterable[Any]
    ) -> Any:
        """The carry with the optimizer's state that `change` makes by the full gradient."""
        parts = self.program.parts(carry)
        full_grad = full_gradient(
            self.program.bound_loss(carry), parts.params, batches, has_aux=True
        )
        opt_state = _jitted_change(self.replicas, change)(parts.opt_state, parts.params, full_grad)
        checks.check_same_tree(
            "The optimizer state that epoch_start's function returned",
            opt_state,
            parts.opt_state,
            source="the one before",
        )
        return self.replicas.fresh(
            self.program.with_parts(carry, parts._replace(opt_state=opt_state))
        )

    def explain(self, work: Callable[[], Any]) -> Any:
        """Calls what may ask for a mapped axis, and says which one there is if that fails."""
        try:
            return work()
        except ValueError as error:
            if "is not bound" not in str(error):
                raise
            there = (
                f"fit maps over the axis {AXIS!r}: name that one"
                if self.replicas.mesh is not None
                else f"pass devices=1 or more to fit, which then maps over the axis {AXIS!r}"
            )
            raise ValueError(f"{error} Here, {there}.") from error


def subject_of(
    source: Any,
    loss_fn: Callable[..., Any],
    *,
    optimizer: Any,
    has_aux: bool,
    devices: int | None,
    own_state: bool | None,
) -> Subject:
    """What is to be trained, from the arguments of `fit`.

    Raises:
      TypeError: If it is neither a `TrainState` nor a model with its optimizer.
      ValueError: If there are not enough devices, or the replicas would never meet.
    """
    if own_state is not None:
        checks.check_flag("own_state", own_state)
    replicas = _replicas(devices)
    opt_state, tx = _optimizer_of(source, optimizer)
    keeps_own = bool(find_states(opt_state, LocalStepsState)) if own_state is None else own_state
    spread = Spread(replicas.axis_name, keeps_own)
    program: LinenProgram | NnxProgram
    carry: Any
    if isinstance(source, TrainState):
        program, carry = LinenProgram.of(source, LinenLoss(loss_fn, has_aux), spread)
    else:
        program, carry = NnxProgram.of(source, optimizer, loss_fn, spread, has_aux=has_aux)
    if keeps_own and replicas.size > 1 and opt_state is not None:
        _check_replicas_meet(tx, program.parts(carry), replicas)
    return Subject(source, optimizer, program, replicas, keeps_own, carry)


def _optimizer_of(source: Any, optimizer: Any) -> tuple[Any, Any]:
    if isinstance(source, TrainState):
        if optimizer is not None:
            raise ValueError("optimizer is for a model of flax.nnx: a TrainState has its own, tx.")
        return source.opt_state, source.tx
    if isinstance(source, train_state.TrainState):
        raise TypeError(
            "A flax TrainState hands no extra arguments to the method: make the state by "
            "optperm.training.TrainState.create, which takes the same."
        )
    if not isinstance(source, nnx.Module):
        raise TypeError(
            "The first argument of fit must be an optperm.training.TrainState, a model of flax.nnx, or "
            f"what an earlier fit returned, got {type(source).__name__}."
        )
    if not isinstance(optimizer, nnx.Optimizer):
        raise TypeError(
            "A model of flax.nnx is trained by its optimizer: pass optimizer=optperm.training."
            f"Optimizer(model, tx, wrt=nnx.Param), got {type(optimizer).__name__}."
        )
    return nnx.as_pure(optimizer.opt_state), optimizer.tx


def _replicas(devices: int | None) -> Replicas:
    processes = jax.process_count()
    if devices is None and processes == 1:
        return Replicas()
    devices = devices or 1
    mesh = mesh_of(devices, processes)
    if isinstance(mesh, int):
        raise ValueError(
            f"devices must be at most {mesh}, the number that JAX has, got {devices}. For more "
            "virtual ones on the processor start with the environment variable "
            f"JAX_NUM_CPU_DEVICES={devices}."
        )
    return Replicas(devices, processes, jax.process_index(), mesh)


def _check_replicas_meet(tx: Any, parts: Parts, replicas: Replicas) -> None:
    """Raises unless the method asks for a mapped axis: without, each replica would train for itself."""

    def one_step(params: Any, opt_state: Any) -> Any:
        extras = {"value": jnp.zeros([]), "grad": params, "grad_fn": lambda p: p}
        extras |= {"value_fn": lambda p: jnp.zeros([])}
        update = optax.with_extra_args_support(tx).update
        return update(params, opt_state, params, **extras)

    try:
        jax.eval_shape(one_step, parts.params, parts.opt_state)
    except ValueError as error:
        if "is not bound" in str(error):
            return
        raise
    raise ValueError(
        f"The {replicas.size} devices keep a state of their own, but the method was built without "
        f"axis_name, so they would never meet: pass axis_name={AXIS!r} to optperm.agn or "
        "optperm.diloco."
    )


@jax.jit
def _copied(tree: Any) -> Any:
    """What a user sees of a carry has arrays of its own: the loop gives up those of the carry."""
    return jax.tree.map(jnp.copy, tree)


@functools.lru_cache(maxsize=32)
def _jitted_change(replicas: Replicas, change: Callable[..., Any]) -> Any:
    return replicas.jit(change)


@functools.lru_cache(maxsize=32)
def _mean_model_state(program: LinenProgram | NnxProgram, replicas: Replicas) -> Any:
    def mean(carry: Any, _: Any, __: Any) -> tuple[Any, Any]:
        return (), agreed(program.parts(carry).model_state)

    return replicas.each(mean, own=True)
