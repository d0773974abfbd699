"""When replicas exchange: once per period, or one fragment of the params after another."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from optperm.core import checks
from optperm.core.mapped_axes import AxisName, axis_names, largest, varying_axes

# The number of steps from one commit to the next, or a schedule of the number of commits so far.
Period: TypeAlias = int | jax.Array | Callable[[jax.Array], Any]
# A flag that is known while tracing, or a traced flag that is the same on all replicas.
Flag: TypeAlias = bool | jax.Array


@dataclasses.dataclass(frozen=True)
class Exchange:
    """The fragments that one step of a plan sends, and the fragments that it receives."""

    plan: "Every"
    send: tuple[int, ...] = ()
    receive: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Every:
    r"""A schedule that exchanges each fragment once per period, in turn.

    Fragment :math:`p` of :math:`P` is sent at the end of each step :math:`s` with
    :math:`(s - \lfloor p H / P \rfloor) \bmod H = 0`. It arrives `delay` steps later.

    Attributes:
      period: :math:`H`, the number of steps from one exchange of a fragment to its next exchange.
      fragments: :math:`P`, the number of fragments. Whole leaves are grouped, in order, into
        fragments of about equal size, unless the argument `fragment_of` of `optperm.diloco` or
        `optperm.agn` assigns the leaves.
      delay: The number of steps between sending and receiving, below `period`.

    Example:
      >>> import optperm
      >>> plan = optperm.distributed.Every(period=4, fragments=2, delay=1)
      >>> [(plan.at(step).send, plan.at(step).receive) for step in (1, 2, 3, 4, 5)]
      [((), ()), ((1,), ()), ((), (1,)), ((0,), ()), ((), (0,))]

    Raises:
      TypeError: If an argument is not an integer.
      ValueError: If an argument is out of range.
    """

    period: int
    fragments: int = 1
    delay: int = 0

    def __post_init__(self) -> None:
        """Check the arguments."""
        checks.check_static_count("period", self.period)
        checks.check_static_count("fragments", self.fragments)
        checks.check_count("delay", self.delay, minimum=0)
        if self.fragments > self.period or self.delay >= self.period:
            raise ValueError(
                f"fragments must be at most period, and delay must be below period, got {self}."
            )

    def at(self, step: int) -> Exchange:
        """Return the exchanges of a step, for the argument `commit=`.

        Args:
          step: The number of the step, known while tracing; the first step is step 1.

        Returns:
          A hashable value, for a static argument of `jax.jit`.
        """
        checks.check_count("step", step)
        send, receive = (find_sent(self, step - delay) for delay in (0, self.delay))
        numbers = (tuple(p for p, flag in enumerate(flags) if flag) for flags in (send, receive))
        return Exchange(self, *numbers)


def find_sent(plan: Every, step: int | jax.Array) -> list[Flag]:
    """Return for each fragment of a plan whether a step sends it; step 1 is the first step."""
    # (s - floor(p H / P)) mod H = 0; nothing was sent before step 1.
    offsets = [fragment * plan.period // plan.fragments for fragment in range(plan.fragments)]
    return [(step > 0) & ((step - offset) % plan.period == 0) for offset in offsets]


def find_exchange(
    commit: object, every: Period | Every, state: Any, axis_name: AxisName | None, method: str
) -> tuple[list[Flag], list[Flag]]:
    """Return for each fragment whether a step sends it, and whether the step receives it.

    The flags are the same for all replicas and never batched, so collectives stay in a conditional. If
    a fragment is sent and received at once, both flags are the same object.

    Args:
      commit: The argument of `update`.
      every: The period or the plan.
      state: The state with the counts of steps and commits.
      axis_name: The axis of the replicas.
      method: The public name of the method, for messages.
    """
    if isinstance(commit, Exchange) and commit.plan != every:
        raise ValueError(
            f"commit of {method} is a step of the plan {commit.plan}, but every is {every}: pass one "
            "plan to both."
        )
    if not isinstance(every, Every):
        flags = [ends_period(commit, every, state, axis_name, method)]
        return flags, flags
    if commit is None:
        step = largest(state.count, axis_name) + 1
        sent = find_sent(every, step)
        return sent, find_sent(every, step - every.delay) if every.delay else sent
    if not isinstance(commit, Exchange):
        allowed = 'plan.at(step), True, False, "only" or None'
        flags = [resolve_flag(commit, axis_name, method, allowed)] * every.fragments
        return flags, flags
    parts = range(every.fragments)
    return [p in commit.send for p in parts], [p in commit.receive for p in parts]


def ends_period(
    commit: object, period: Period, state: Any, axis_name: AxisName | None, method: str
) -> Flag:
    """Return whether a step ends a period, from an explicit flag or the count of steps."""
    if commit is not None:
        return resolve_flag(commit, axis_name, method)
    if callable(period):
        since_commit, commits = largest((state.since_commit, state.commits), axis_name)
        # If the period is NaN, every step ends it.
        return jnp.logical_not(since_commit + 1 < period(commits))
    since_commit, number = largest((state.since_commit, jnp.asarray(period)), axis_name)
    return since_commit + 1 >= number


def resolve_flag(
    commit: object,
    axis_name: AxisName | None,
    method: str,
    allowed: str = 'True, False, "only" or None',
) -> Flag:
    """Return an explicit flag: a bool known while tracing, or a traced bool for all replicas."""
    if isinstance(commit, bool | np.bool_) or is_commit_only(commit):
        return bool(commit)
    if not isinstance(commit, jax.Array) or commit.ndim or commit.dtype != jnp.bool_:
        raise TypeError(
            f"commit of {method} must be {allowed}, or a traced bool, got {checks.shown(commit)}."
        )
    if varying_axes(commit) & set(axis_names(axis_name)):
        # Otherwise, some replicas would wait for others in a collective.
        raise ValueError(
            f"commit of {method} may differ between replicas: pass the same flag to all replicas, in "
            "jax.shard_map with in_specs P()."
        )
    return largest(commit, axis_name)


def is_commit_only(commit: object) -> bool:
    """Return whether `update` commits without a local step."""
    return isinstance(commit, str) and commit == "only"


def check_every(value: object) -> None:
    """Raise unless `value` is a plan, a schedule or an integer, of at least 1 unless traced."""
    if not isinstance(value, Every) and (isinstance(value, type) or not callable(value)):
        checks.check_count("every", value)
