"""Exchange fragments: send contributions, and move the center by their mean.

The diagram shows a step of a replica for a fragment that is due. The brackets are conditionals of the
compiled program, with the same predicate on all replicas:

    theta, c                            after the local step
      |
      |-[ Delta = c - theta             send: with compression, a part of Delta stays in e;
      |   n = sum w Delta / sum w ]     one collective computes the sums over the replicas
      |
      |   n, sum w                      with a delay, in the state for some steps
      |
      '-[ c <- c + u(n; s_c) ]          receive: no collective, the same on all replicas
            |
    theta <- alpha theta + (1 - alpha) c    the pull, in `diloco`

Without a delay, the two brackets are one conditional.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optperm.core.control import cond
from optperm.core.dtypes import accumulation_dtype
from optperm.core.shapes import Params, Updates
from optperm.distributed._compression import Compression, sum_compressed
from optperm.distributed._fragments import Fragments
from optperm.distributed._pairs import map_with_partner
from optperm.distributed._plans import Due
from optperm.distributed._replicas import CenterStep, Replicas, divide, scale, weigh

# This value instead of a sum of weights means that nothing is in flight.
NOTHING = -1.0


@dataclasses.dataclass(frozen=True)
class Step:
    """The inputs of one step's exchanges.

    Attributes:
      fragments: The fragments.
      find_theta: A function that returns the local params after their step.
      move_center: The step of the center.
      weight: The weight of this replica; None for 1.
      count: The number of the step, from which pairs of replicas are drawn.
    """

    fragments: Fragments
    find_theta: Callable[[], Params]
    move_center: CenterStep
    weight: Any
    count: jax.Array


class Part(NamedTuple):
    """The part of a state that an exchange changes, for all fragments or for the leaves of one."""

    center: Any
    center_state: Any
    in_flight: Any
    weights: Any
    residual: Any


class Outcome(NamedTuple):
    """The outcome of a fragment's exchange.

    Attributes:
      has_arrived: Whether to pull the local params.
      is_bad: Whether the local params are not finite.
      has_missed: Whether this replica did not take part in the exchange, or the exchange overflowed.
    """

    has_arrived: bool | jax.Array
    is_bad: jax.Array
    has_missed: jax.Array


@dataclasses.dataclass(frozen=True)
class Exchanger(abc.ABC):
    """The exchange of fragments according to a plan.

    Attributes:
      replicas: The mapped axes.
      compress: The encoder of contributions; None for float32.
      is_paired: Whether a replica exchanges with one other replica instead of all replicas.
    """

    replicas: Replicas
    compress: Compression | None
    is_paired: bool

    @abc.abstractmethod
    def exchange_one(self, step: Step, part: Part, p: int, due: Due) -> tuple[Part, Outcome]:
        """Return the part of fragment p after a step, and the outcome."""

    def exchange(self, step: Step, state: Any, due: list[Due]) -> tuple[Part, list[Outcome]]:
        """Return the part of a `DilocoState` that changes, after the exchange of all due fragments."""
        center, in_flight, residual = state.center, state.in_flight, state.residual
        center_states, weights = list(state.center_state), list[jax.Array]()
        outcomes = list[Outcome]()
        for p, is_due in enumerate(due):
            part = Part(
                center=step.fragments.take_leaves(center, p),
                center_state=center_states[p],
                in_flight=step.fragments.take_leaves(in_flight, p),
                weights=state.weights[p],
                residual=step.fragments.take_leaves(residual, p),
            )
            part, outcome = self.exchange_one(step, part, p, is_due)
            # Another fragment may contain other slices of the same leaves.
            center = step.fragments.replace_leaves(center, part.center)
            in_flight = step.fragments.replace_leaves(in_flight, part.in_flight)
            residual = step.fragments.replace_leaves(residual, part.residual)
            center_states[p] = part.center_state
            weights.append(part.weights)
            outcomes.append(outcome)
        return Part(center, tuple(center_states), in_flight, jnp.stack(weights), residual), outcomes

    def send(
        self, step: Step, part: Part, theta: Params, p: int
    ) -> tuple[Updates, Part, jax.Array]:
        """Return the mean of Delta over the replicas, and whether it excludes this replica."""
        take, write = step.fragments.take_rows, step.fragments.write_rows
        center = take(part.center, p)
        # Delta_p = c_p - theta_p
        delta = subtract_params(center, theta)
        is_finite = self.replicas.are_finite(delta)
        if self.compress is not None:
            delta = optax.tree.where(is_finite, delta, optax.tree.zeros_like(delta))
            e = take(part.residual, p)
            total, weights, e, takes_part = sum_compressed(
                self.compress, delta, e, is_finite, self.replicas, step.weight
            )
            weights = weights.astype(part.weights.dtype)
            part = part._replace(residual=write(part.residual, e, p))
        else:
            # sum_i w_i Delta_i and sum_i w_i in one collective; w_i = 0 if Delta_i is not finite
            w, takes_part = weigh(step.weight, is_finite, part.weights.dtype)
            if self.is_paired:
                total, weights = self._sum_pair(center, theta, w, step.count)
            else:
                total, weights = self.replicas.sum((scale(delta, w), w))
        # n = sum w Delta / sum w
        return divide(total, weights), part._replace(weights=weights), ~takes_part

    def _sum_pair(
        self, center: Any, theta: Any, w: jax.Array, count: jax.Array
    ) -> tuple[Any, jax.Array]:
        """Return w (c - theta) + w' (c - theta') with the partner's w' and theta', and w + w'.

        Both differences use this replica's center, so the centers approach each other.
        """
        axis_name = self.replicas.axis_name
        pair = functools.partial(map_with_partner, axis_name=axis_name, count=count)
        w_theirs = pair(lambda _, theirs: theirs, w)

        def add(own: jax.Array, theirs: jax.Array, c: jax.Array) -> Any:
            return scale(subtract_params(c, own), w) + scale(subtract_params(c, theirs), w_theirs)

        return pair(add, theta, center), w + w_theirs

    def receive(
        self, step: Step, part: Part, n: Updates, theta: Params, p: int
    ) -> tuple[Part, jax.Array, jax.Array]:
        """Return the center after a step by n, and whether theta is not finite or n overflowed."""
        center = step.fragments.take_rows(part.center, p)
        gradient, is_finite = self.replicas.cast_gradient(n, center)
        # c_p <- c_p + u(n; s_c), unless n has no contributions or overflows
        has_any = part.weights > 0
        at = center, part.center_state
        center, center_state = step.move_center(at, gradient, has_any & is_finite)
        center = step.fragments.write_rows(part.center, center, p)
        is_bad = ~self.replicas.are_finite(theta)
        # If there was no contribution, each replica has already counted its own miss.
        return part._replace(center=center, center_state=center_state), is_bad, has_any & ~is_finite


class AtOnce(Exchanger):
    """Exchanges without a delay: a fragment is sent and received in the same step."""

    def exchange_one(self, step: Step, part: Part, p: int, due: Due) -> tuple[Part, Outcome]:
        """Return the part of fragment p after a step, and the outcome."""
        is_due, _ = due

        def exchange() -> tuple[Part, jax.Array, jax.Array]:
            theta = step.fragments.take_rows(step.find_theta(), p)
            n, sent, has_missed = self.send(step, part, theta, p)
            received, is_bad, is_lost = self.receive(step, sent, n, theta, p)
            return received, is_bad, has_missed | is_lost

        no = jnp.array(False)
        new, is_bad, has_missed = cond(is_due, exchange, lambda: (part, no, no))
        return new, Outcome(is_due, is_bad, has_missed)


class Delayed(Exchanger):
    """Exchanges with a delay: the state stores the sent contributions until they are received.

    With `commit=True`, a fragment is sent and received in the same step, so sending comes first.
    """

    def exchange_one(self, step: Step, part: Part, p: int, due: Due) -> tuple[Part, Outcome]:
        """Return the part of fragment p after a step, and the outcome."""
        is_sent, is_received = due
        take, write = step.fragments.take_rows, step.fragments.write_rows
        no = jnp.array(False)

        def send() -> tuple[Part, jax.Array]:
            n, sent, has_missed = self.send(step, part, take(step.find_theta(), p), p)
            return sent._replace(in_flight=write(sent.in_flight, n, p)), has_missed

        sent, has_missed = cond(is_sent, send, lambda: (part, no))

        def receive() -> tuple[Part, jax.Array, jax.Array]:
            n, theta = take(sent.in_flight, p), take(step.find_theta(), p)
            received, is_bad, is_lost = self.receive(step, sent, n, theta, p)
            # The fragment is no longer in flight, and is not received again.
            return received._replace(weights=jnp.full_like(sent.weights, NOTHING)), is_bad, is_lost

        new, is_bad, is_lost = cond(is_received, receive, lambda: (sent, no, no))
        # If nothing was sent, the center takes no step and no params are pulled.
        has_arrived = is_received is not False and is_received & (sent.weights != NOTHING)
        return new, Outcome(has_arrived, is_bad, has_missed | is_lost)


def subtract_params(center: Any, theta: Any) -> Any:
    """Return Delta = c - theta in float32 or wider, with the sign of a gradient."""

    def subtract(c: jax.Array, p: jax.Array) -> jax.Array:
        dtype = accumulation_dtype(p)
        # Pulls round a center in a wider dtype. Without the same rounding here, params that have not
        # moved would have a displacement.
        return c.astype(p.dtype).astype(dtype) - p.astype(dtype)

    return jax.tree.map(subtract, center, theta)
