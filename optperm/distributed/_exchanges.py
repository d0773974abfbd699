"""Exchange fragments: send contributions, move the center by their mean, and pull the local params."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optperm.core.control import cond
from optperm.core.dtypes import accumulation_dtype
from optperm.core.mapped_axes import psum
from optperm.distributed._commits import CenterStep, Replicas, divide, scale, weigh
from optperm.distributed._compression import Compression, sum_compressed
from optperm.distributed._fragments import Fragments
from optperm.distributed._pairs import map_with_partner
from optperm.distributed._plans import Due

# In place of the sum of weights: nothing is in flight.
NOTHING = -1.0


class Part(NamedTuple):
    """The part of a state that an exchange changes, for all fragments or for the leaves of one."""

    center: Any
    center_state: Any
    in_flight: Any
    weights: Any
    residual: Any


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
class Exchanger:
    """The exchange of fragments in one step.

    Attributes:
      fragments: The fragments.
      step: The step of the center.
      delay: Steps between sending and receiving.
      compress: The encoder of what is sent; None for float32.
      replicas: The mapped axes.
      weight: The weight of this replica; None for 1.
      theta: `theta()` is the local params after their step.
      pair_count: The number of the step, which draws pairs of replicas; None for all replicas.
    """

    fragments: Fragments
    step: CenterStep
    delay: int | jax.Array
    compress: Compression | None
    replicas: Replicas
    weight: Any
    theta: Callable[[], optax.Params]
    pair_count: jax.Array | None

    def exchange(self, state: Any, due: list[Due]) -> tuple[Part, list[Outcome]]:
        """Return the part of a `DilocoState` that changes, after the exchange of all fragments due."""
        whole = Part(*(getattr(state, name) for name in Part._fields))
        take, replace = self.fragments.take_leaves, self.fragments.replace_leaves
        has_flight, has_residual = bool(self.delay), self.compress is not None
        # Each conditional computes theta, which is traced once for all of them.
        is_traced = any(isinstance(flag, jax.Array) for pair in due for flag in pair)
        theta = jax.jit(self.theta) if is_traced else self.theta
        outcomes, center_states, weights = list[Outcome](), list[Any](), list[jax.Array]()
        for p, is_due in enumerate(due):
            part = Part(
                center=take(whole.center, p),
                center_state=whole.center_state[p],
                in_flight=take(whole.in_flight, p) if has_flight else (),
                weights=whole.weights[p],
                residual=take(whole.residual, p) if has_residual else (),
            )
            part, outcome = self._exchange_fragment(part, p, is_due, theta)
            outcomes.append(outcome)
            center_states.append(part.center_state)
            weights.append(part.weights)
            whole = whole._replace(
                center=replace(whole.center, part.center),
                in_flight=replace(whole.in_flight, part.in_flight) if has_flight else (),
                residual=replace(whole.residual, part.residual) if has_residual else (),
            )
        whole = whole._replace(center_state=tuple(center_states), weights=jnp.stack(weights))
        return whole, outcomes

    def _exchange_fragment(
        self, part: Part, p: int, due: Due, find_theta: Callable[[], optax.Params]
    ) -> tuple[Part, Outcome]:
        """Return the part of fragment p after a step, and the outcome."""
        is_sent, is_received = due
        no = jnp.array(False)

        def send_and_receive() -> tuple[Part, jax.Array, jax.Array]:
            theta = self.fragments.take_rows(find_theta(), p)
            n, sent, has_missed = self._send(part, theta, p)
            received, is_bad, is_lost = self._receive(sent, n, theta, p)
            return received, is_bad, has_missed | is_lost

        def send() -> tuple[Part, jax.Array]:
            theta = self.fragments.take_rows(find_theta(), p)
            n, sent, has_missed = self._send(part, theta, p)
            in_flight = self.fragments.write_rows(sent.in_flight, n, p)
            return sent._replace(in_flight=in_flight), has_missed

        def receive() -> tuple[Part, jax.Array, jax.Array]:
            n, theta = (
                self.fragments.take_rows(tree, p) for tree in (sent.in_flight, find_theta())
            )
            received, is_bad, is_lost = self._receive(sent, n, theta, p)
            # It is no longer in flight, and is not received again.
            return received._replace(weights=jnp.full_like(sent.weights, NOTHING)), is_bad, is_lost

        # Without a delay one conditional holds all, and nothing has to be stored in flight.
        if not self.delay:
            new, is_bad, has_missed = cond(is_sent, send_and_receive, lambda: (part, no, no))
            return new, Outcome(is_sent, is_bad, has_missed)
        # Sending comes first: with `commit=True` a fragment is received in the step in which it is sent.
        sent, has_missed = cond(is_sent, send, lambda: (part, no))
        new, is_bad, is_lost = cond(is_received, receive, lambda: (sent, no, no))
        # If nothing was sent, the center makes no step and no params are pulled.
        has_arrived = is_received is not False and is_received & (sent.weights != NOTHING)
        return new, Outcome(has_arrived, is_bad, has_missed | is_lost)

    def _send(self, part: Part, theta: Any, p: int) -> tuple[Any, Part, jax.Array]:
        """Return the mean of Delta over the replicas, and whether this replica has no part in it."""
        take, write = self.fragments.take_rows, self.fragments.write_rows
        center = take(part.center, p)
        # Delta_p = c_p - theta_p
        delta = subtract_params(center, theta)
        is_finite = self.replicas.are_finite(delta)
        if self.compress is not None:
            delta = optax.tree.where(is_finite, delta, optax.tree.zeros_like(delta))
            e = take(part.residual, p)
            total, weights, e, takes_part = sum_compressed(
                self.compress, delta, e, is_finite, self.replicas, self.weight
            )
            weights = weights.astype(part.weights.dtype)
            part = part._replace(residual=write(part.residual, e, p))
        else:
            # sum_i w_i Delta_i and sum_i w_i, in one collective; w_i = 0 where Delta_i is not finite
            weights, takes_part = weigh(self.weight, is_finite, part.weights.dtype)
            total, axis_name = scale(delta, weights), self.replicas.axis_name
            if self.pair_count is not None:
                # w (c - theta) + w' (c - theta'), both from this replica's c: so the centers approach.
                total, weights = self._sum_pair(center, theta, weights, self.pair_count)
            elif axis_name is not None:
                total, weights = psum((total, weights), axis_name)
        # Delta = sum w Delta / sum w
        return divide(total, weights), part._replace(weights=weights), ~takes_part

    def _sum_pair(
        self, center: Any, theta: Any, w: jax.Array, count: jax.Array
    ) -> tuple[Any, jax.Array]:
        """Return the sum of w Delta over this replica and its partner, and the sum of w."""
        axis_name = self.replicas.axis_name
        pair = functools.partial(map_with_partner, axis_name=axis_name, count=count)
        w_theirs = pair(lambda _, theirs: theirs, w)

        def add(own: jax.Array, theirs: jax.Array, c: jax.Array) -> Any:
            return scale(subtract_params(c, own), w) + scale(subtract_params(c, theirs), w_theirs)

        return pair(add, theta, center), w + w_theirs

    def _receive(self, part: Part, n: Any, theta: Any, p: int) -> tuple[Part, jax.Array, jax.Array]:
        """Step the center by n; return also whether theta is not finite, and whether n overflowed."""
        center = self.fragments.take_rows(part.center, p)
        gradient, is_finite = self.replicas.cast_gradient(n, center)
        # c_p <- c_p + u(Delta_p; s_c), unless Delta is of nobody or overflows
        has_any = part.weights > 0
        center, center_state = self.step((center, part.center_state), gradient, has_any & is_finite)
        center = self.fragments.write_rows(part.center, center, p)
        is_bad = ~self.replicas.are_finite(theta)
        # Without any contribution each replica has counted its own miss already.
        return part._replace(center=center, center_state=center_state), is_bad, has_any & ~is_finite


def subtract_params(center: Any, theta: Any) -> Any:
    """Return Delta = c - theta in float32 or wider: the way back, as a gradient is."""

    def subtract(c: jax.Array, p: jax.Array) -> jax.Array:
        dtype = accumulation_dtype(p)
        # A center of more digits was rounded when the params were pulled: without rounding it here,
        # params that have not moved would show a displacement.
        return c.astype(p.dtype).astype(dtype) - p.astype(dtype)

    return jax.tree.map(subtract, center, theta)
