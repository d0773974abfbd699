"""Exchange fragments: send contributions, and move the center by their mean.

One step of a replica, for each fragment p that is due. The brackets are conditionals of the compiled
program, on a predicate that is the same on all replicas:

    theta, c                            after the local step
      |
      |-[ Delta = c - theta             send: a part of Delta is left in e with compression,
      |   n = sum w Delta / sum w ]     and one collective has the sum over the replicas
      |
      |   n, sum w                      with a delay kept in the state, for some steps
      |
      '-[ c <- c + u(n; s_c) ]          receive: no collective, the same on all replicas
            |
    theta <- alpha theta + (1 - alpha) c    the pull, in `diloco`

Without a delay both brackets are one.
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
from optperm.distributed._compression import Compression, sum_compressed
from optperm.distributed._fragments import Fragments
from optperm.distributed._pairs import map_with_partner
from optperm.distributed._plans import Due
from optperm.distributed._replicas import CenterStep, Replicas, divide, scale, weigh

# In place of the sum of weights: nothing is in flight.
NOTHING = -1.0


@dataclasses.dataclass(frozen=True)
class Step:
    """What the exchanges of one step need of it.

    Attributes:
      fragments: The fragments.
      find_theta: `find_theta()` is the local params after their step.
      move_center: The step of the center.
      weight: The weight of this replica; None for 1.
      count: The number of the step, which draws pairs of replicas.
    """

    fragments: Fragments
    find_theta: Callable[[], optax.Params]
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


class Sent(NamedTuple):
    """The result of sending a fragment.

    Attributes:
      mean: n, the mean of Delta over the replicas: its rows, or the leaves in flight.
      weights: The sum of the weights.
      residual: e, what compression has not sent.
      has_missed: Whether this replica has no part in the mean.
    """

    mean: Any
    weights: jax.Array
    residual: Any
    has_missed: jax.Array


class Received(NamedTuple):
    """The result of receiving a fragment.

    Attributes:
      center: The center.
      center_state: The state of its optimizer.
      weights: The sum of the weights, or NOTHING if it has been in flight.
      is_bad: Whether the local params are not finite.
      is_lost: Whether the mean overflowed.
    """

    center: Any
    center_state: Any
    weights: jax.Array
    is_bad: jax.Array
    is_lost: jax.Array


class Outcome(NamedTuple):
    """The outcome of the exchange of a fragment.

    Attributes:
      has_arrived: Whether to pull the local params.
      is_bad: Whether the local params are not finite.
      has_missed: Whether this replica had no part in the exchange, or the exchange overflowed.
    """

    has_arrived: bool | jax.Array
    is_bad: jax.Array
    has_missed: jax.Array


@dataclasses.dataclass(frozen=True)
class Exchanger(abc.ABC):
    """The exchange of fragments by a plan, for all steps.

    Attributes:
      replicas: The mapped axes.
      compress: The encoder of what is sent; None for float32.
      is_paired: Whether a replica exchanges with one other, not with all.
    """

    replicas: Replicas
    compress: Compression | None
    is_paired: bool

    @abc.abstractmethod
    def exchange_one(self, step: Step, part: Part, p: int, due: Due) -> tuple[Part, Outcome]:
        """Return the part of fragment p after a step, and the outcome."""

    def exchange(self, step: Step, state: Any, due: list[Due]) -> tuple[Part, list[Outcome]]:
        """Return the part of a `DilocoState` that changes, after the exchange of all fragments due."""
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
            # Another fragment may have other slices of the same leaves.
            center = step.fragments.replace_leaves(center, part.center)
            in_flight = step.fragments.replace_leaves(in_flight, part.in_flight)
            residual = step.fragments.replace_leaves(residual, part.residual)
            center_states[p] = part.center_state
            weights.append(part.weights)
            outcomes.append(outcome)
        return Part(center, tuple(center_states), in_flight, jnp.stack(weights), residual), outcomes

    def send(self, step: Step, part: Part, theta: optax.Params, p: int) -> Sent:
        """Return the mean of Delta over the replicas, by one collective."""
        take, write = step.fragments.take_rows, step.fragments.write_rows
        center, residual = take(part.center, p), part.residual
        # Delta_p = c_p - theta_p
        delta = subtract_params(center, theta)
        is_finite = self.replicas.are_finite(delta)
        if self.compress is not None:
            delta = optax.tree.where(is_finite, delta, optax.tree.zeros_like(delta))
            e = take(residual, p)
            total, weights, e, takes_part = sum_compressed(
                self.compress, delta, e, is_finite, self.replicas, step.weight
            )
            weights, residual = weights.astype(part.weights.dtype), write(residual, e, p)
        else:
            # sum_i w_i Delta_i and sum_i w_i; w_i = 0 where Delta_i is not finite
            w, takes_part = weigh(step.weight, is_finite, part.weights.dtype)
            if self.is_paired:
                total, weights = self._sum_pair(center, theta, w, step.count)
            else:
                total, weights = self.replicas.sum((scale(delta, w), w))
        # n = sum w Delta / sum w
        return Sent(divide(total, weights), weights, residual, ~takes_part)

    def _sum_pair(
        self, center: Any, theta: Any, w: jax.Array, count: jax.Array
    ) -> tuple[Any, jax.Array]:
        """Return w (c - theta) + w' (c - theta') with the partner's w' and theta', and w + w'.

        Both differences are from this replica's center: so the centers approach each other.
        """
        axis_name = self.replicas.axis_name
        pair = functools.partial(map_with_partner, axis_name=axis_name, count=count)
        w_theirs = pair(lambda _, theirs: theirs, w)

        def add(own: jax.Array, theirs: jax.Array, c: jax.Array) -> Any:
            return scale(subtract_params(c, own), w) + scale(subtract_params(c, theirs), w_theirs)

        return pair(add, theta, center), w + w_theirs

    def receive(
        self, step: Step, part: Part, n: Any, weights: jax.Array, theta: optax.Params, p: int
    ) -> Received:
        """Step the center by n."""
        center = step.fragments.take_rows(part.center, p)
        gradient, is_finite = self.replicas.cast_gradient(n, center)
        # c_p <- c_p + u(n; s_c), unless n is of nobody or overflows
        has_any = weights > 0
        center, center_state = step.move_center(
            (center, part.center_state), gradient, has_any & is_finite
        )
        return Received(
            center=step.fragments.write_rows(part.center, center, p),
            center_state=center_state,
            weights=weights,
            is_bad=~self.replicas.are_finite(theta),
            # Without any contribution each replica has counted its own miss already.
            is_lost=has_any & ~is_finite,
        )


class AtOnce(Exchanger):
    """Exchanges without a delay: a fragment is received in the step that sends it."""

    def exchange_one(self, step: Step, part: Part, p: int, due: Due) -> tuple[Part, Outcome]:
        """Return the part of fragment p after a step, and the outcome."""
        is_due, _ = due

        def exchange() -> tuple[Received, Any, jax.Array]:
            theta = step.fragments.take_rows(step.find_theta(), p)
            sent = self.send(step, part, theta, p)
            received = self.receive(step, part, sent.mean, sent.weights, theta, p)
            return received, sent.residual, sent.has_missed | received.is_lost

        def keep() -> tuple[Received, Any, jax.Array]:
            no = jnp.array(False)
            return Received(part.center, part.center_state, part.weights, no, no), part.residual, no

        received, residual, has_missed = cond(is_due, exchange, keep)
        new = Part(
            center=received.center,
            center_state=received.center_state,
            in_flight=(),
            weights=received.weights,
            residual=residual,
        )
        return new, Outcome(is_due, received.is_bad, has_missed)


class Delayed(Exchanger):
    """Exchanges with a delay: what is sent is in flight, in the state, until it is received.

    With `commit=True` a fragment is received in the step that sends it: so sending comes first.
    """

    def exchange_one(self, step: Step, part: Part, p: int, due: Due) -> tuple[Part, Outcome]:
        """Return the part of fragment p after a step, and the outcome."""
        is_sent, is_received = due
        no = jnp.array(False)

        def send() -> Sent:
            theta = step.fragments.take_rows(step.find_theta(), p)
            sent = self.send(step, part, theta, p)
            return sent._replace(mean=step.fragments.write_rows(part.in_flight, sent.mean, p))

        sent = cond(is_sent, send, lambda: Sent(part.in_flight, part.weights, part.residual, no))

        def receive() -> Received:
            n = step.fragments.take_rows(sent.mean, p)
            theta = step.fragments.take_rows(step.find_theta(), p)
            received = self.receive(step, part, n, sent.weights, theta, p)
            # It is no longer in flight, and is not received again.
            return received._replace(weights=jnp.full_like(sent.weights, NOTHING))

        received = cond(
            is_received,
            receive,
            lambda: Received(part.center, part.center_state, sent.weights, no, no),
        )
        # If nothing was sent, the center makes no step and no params are pulled.
        has_arrived = is_received is not False and is_received & (sent.weights != NOTHING)
        new = Part(
            center=received.center,
            center_state=received.center_state,
            in_flight=sent.mean,
            weights=received.weights,
            residual=sent.residual,
        )
        return new, Outcome(has_arrived, received.is_bad, sent.has_missed | received.is_lost)


def subtract_params(center: Any, theta: Any) -> Any:
    """Return Delta = c - theta in float32 or wider: the way back, as a gradient is."""

    def subtract(c: jax.Array, p: jax.Array) -> jax.Array:
        dtype = accumulation_dtype(p)
        # A center of more digits was rounded when the params were pulled: without rounding it here,
        # params that have not moved would show a displacement.
        return c.astype(p.dtype).astype(dtype) - p.astype(dtype)

    return jax.tree.map(subtract, center, theta)
