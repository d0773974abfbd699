"""When which part of the params is exchanged: fragments in turn, arriving some steps after they left."""

import dataclasses

import jax
import numpy as np

from optperm.contract import checks
from optperm.contract.mapped_axes import AxisName, largest
from optperm.distributed.local_steps import flag_of

# Whether a fragment leaves, and whether it arrives.
Due = tuple[bool | jax.Array, bool | jax.Array]


@dataclasses.dataclass(frozen=True)
class Exchange:
    """What one step exchanges: fragments whose contributions leave, and those whose steps arrive."""

    send: tuple[int, ...] = ()
    receive: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Every:
    r"""A plan of exchanges: every fragment once a period, one after another.

    Fragment :math:`p` of :math:`P` leaves at the end of the steps :math:`s` with
    :math:`(s - \lfloor p H / P \rfloor) \bmod H = 0`, and what the replicas sent of it arrives `delay`
    steps later.

    Attributes:
      period: :math:`H`, steps from one exchange of a fragment to its next.
      fragments: :math:`P`, parts of about equal size into which whole leaves are divided, in order,
        unless `fragment_of` of `optperm.diloco` says otherwise.
      delay: Steps between sending and arrival, below `period`.

    Raises:
      TypeError: If an argument is not an integer.
      ValueError: If an argument is out of range.

    Example:
      >>> import optperm
      >>> plan = optperm.Every(period=4, fragments=2, delay=1)
      >>> [(plan.at(step).send, plan.at(step).receive) for step in (1, 2, 3, 4, 5)]
      [((), ()), ((1,), ()), ((), (1,)), ((0,), ()), ((), (0,))]
    """

    period: int
    fragments: int = 1
    delay: int = 0

    def __post_init__(self) -> None:
        """Checks the arguments."""
        checks.check_static_count("period", self.period)
        checks.check_static_count("fragments", self.fragments)
        if isinstance(self.delay, jax.Array):
            checks.check_static_count("delay", self.delay)
        checks.check_count("delay", self.delay, minimum=0)
        if self.fragments > self.period or self.delay >= self.period:
            raise ValueError(
                "fragments must be at most period and delay below it, got period "
                f"{self.period}, fragments {self.fragments} and delay {self.delay}."
            )

    def due(self, step: int | jax.Array) -> list[Due]:
        """For each fragment whether it leaves, and whether it arrives, at the end of a step.

        Args:
          step: Its number; the first step is step 1.

        Returns:
          Pairs of bools, traced where `step` is.
        """

        def is_sent(step: int | jax.Array, fragment: int) -> bool | jax.Array:
            offset = fragment * self.period // self.fragments
            return (step > 0) & ((step - offset) % self.period == 0)

        return [(is_sent(step, p), is_sent(step - self.delay, p)) for p in range(self.fragments)]

    def at(self, step: int) -> Exchange:
        """What the step exchanges, for `commit=` of the step that is about to be taken.

        Args:
          step: Its number; the first step is step 1.

        Returns:
          A hashable value, for a static argument of `jax.jit`.
        """
        if isinstance(step, jax.Array):
            raise TypeError(
                f"step must be a plain integer, known while it is traced, got {step!r}: call plan.at "
                "outside of jax.jit, and pass what it gives as a static argument."
            )
        checks.check_count("step", step)
        send, receive = zip(*self.due(step), strict=True)
        return Exchange(
            tuple(np.flatnonzero(send).tolist()), tuple(np.flatnonzero(receive).tolist())
        )


def due_at(commit: object, plan: Every, count: jax.Array, axis_name: AxisName | None) -> list[Due]:
    """For each fragment whether it leaves and whether it arrives at the end of this step."""
    if commit is None:
        return plan.due(largest(count, axis_name) + 1)
    if not isinstance(commit, Exchange):
        flag = flag_of(commit, axis_name, "diloco", "what plan.at(step) gives, True, False or None")
        return [(flag, flag)] * plan.fragments
    named = {*commit.send, *commit.receive}
    if not named <= set(range(plan.fragments)):
        raise ValueError(
            f"commit names fragment {max(named)}, and the plan has {plan.fragments}, from 0: {commit}."
        )
    if not plan.delay and set(commit.send) != set(commit.receive):
        raise ValueError(
            "Without a delay what is sent arrives at the same step. Is this of another plan? Got "
            f"{commit}."
        )
    return [(p in commit.send, p in commit.receive) for p in range(plan.fragments)]
