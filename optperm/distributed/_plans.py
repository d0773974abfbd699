"""Plans of exchanges, which decide the fragments that each step sends and receives."""

import dataclasses

import jax
import numpy as np

from optperm.core import checks
from optperm.core.mapped_axes import AxisName, largest
from optperm.distributed._local_steps import resolve_flag

# Two flags for a fragment: whether it is sent, and whether it is received.
Due = tuple[bool | jax.Array, bool | jax.Array]


@dataclasses.dataclass(frozen=True)
class Exchange:
    """The fragments that one step sends, and the fragments that it receives."""

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
        fragments of about equal size, unless `fragment_of` of `optperm.diloco` assigns the leaves.
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

    def due(self, step: int | jax.Array) -> list[Due]:
        """Return two flags per fragment: whether a step sends and whether it receives the fragment.

        Args:
          step: The number of the step; the first step is step 1.

        Returns:
          Pairs of bools, traced if `step` is.
        """

        def is_sent(step: int | jax.Array, fragment: int) -> bool | jax.Array:
            # (s - floor(p H / P)) mod H = 0; nothing was sent before step 1.
            offset = fragment * self.period // self.fragments
            return (step > 0) & ((step - offset) % self.period == 0)

        return [(is_sent(step, p), is_sent(step - self.delay, p)) for p in range(self.fragments)]

    def at(self, step: int) -> Exchange:
        """Return the exchanges of a step, for the argument `commit=`.

        Args:
          step: The number of the step, known while tracing; the first step is step 1.

        Returns:
          A hashable value, for a static argument of `jax.jit`.
        """
        checks.check_count("step", step)
        send, receive = zip(*self.due(step), strict=True)
        return Exchange(
            tuple(np.flatnonzero(send).tolist()), tuple(np.flatnonzero(receive).tolist())
        )


def resolve_due(
    commit: object, plan: Every, count: jax.Array, axis_name: AxisName | None
) -> list[Due]:
    """Return two flags per fragment: whether this step sends and whether it receives the fragment."""
    if commit is None:
        return plan.due(largest(count, axis_name) + 1)
    if not isinstance(commit, Exchange):
        flag = resolve_flag(
            commit, axis_name, "diloco", 'plan.at(step), True, False, "only" or None'
        )
        return [(flag, flag)] * plan.fragments
    is_known = {*commit.send, *commit.receive} <= set(range(plan.fragments))
    # Without a delay, a fragment is sent and received in the same step.
    if not is_known or (not plan.delay and set(commit.send) != set(commit.receive)):
        raise ValueError(f"{commit} is not a step of the plan {plan}.")
    return [(p in commit.send, p in commit.receive) for p in range(plan.fragments)]
