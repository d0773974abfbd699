"""The exchange of fragments: one leaves, what all replicas sent moves the center, and it arrives."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optperm.contract.dtypes import accumulation_dtype
from optperm.contract.mapped_axes import cond, psum
from optperm.distributed.commits import CenterStep, Replicas, mean, scale, weigh
from optperm.distributed.compression import Compression, sum_compressed
from optperm.distributed.fragments import Fragments
from optperm.distributed.pairs import from_partner
from optperm.distributed.plans import Due

# In the place of the sum of weights: nothing was sent that has not arrived.
NOTHING = -1.0


class Part(NamedTuple):
    """What an exchange changes of the state, for all fragments or for the leaves of one."""

    center: Any
    center_state: Any
    in_flight: Any
    weights: Any
    residual: Any


class Outcome(NamedTuple):
    """What came of the exchange of a fragment.

    Attributes:
      has_arrived: Whether the local params are to be pulled.
      is_bad: Whether they were not finite then.
      has_missed: Whether this replica had no part in the exchange, or that was lost.
    """

    has_arrived: bool | jax.Array
    is_bad: jax.Array
    has_missed: jax.Array


@dataclasses.dataclass(frozen=True)
class Exchanger:
    """How fragments are exchanged.

    Attributes:
      fragments: The fragments.
      step: The step of the center.
      delay: Steps between sending and arrival.
      compress: What is sent; None for all.
      replicas: The mapped axes.
      weight: The weight of this replica; None for 1.
      theta: `theta()` is the local params after their step.
      drawn_by: The number of the step, where that draws pairs of replicas; None for all replicas.
    """

    fragments: Fragments
    step: CenterStep
    delay: int | jax.Array
    compress: Compression | None
    replicas: Replicas
    weight: Any
    theta: Callable[[], optax.Params]
    drawn_by: jax.Array | None

    def exchange(self, state: Any, due: list[Due]) -> tuple[Part, list[Outcome]]:
        """Return what all fragments that are due change of a `DilocoState`."""
        whole = Part(*(getattr(state, name) for name in Part._fields))
        has_flight, has_residual = bool(self.delay), self.compress is not None
        outcomes, center_states, weights = list[Outcome](), list[Any](), list[jax.Array]()
        for p, is_due in enumerate(due):
            part = Part(
                center=self.fragments.only(whole.center, p),
                center_state=whole.center_state[p],
                in_flight=self.fragments.only(whole.in_flight, p) if has_flight else (),
                weights=whole.weights[p],
                residual=self.fragments.only(whole.residual, p) if has_residual else (),
            )
            part, outcome = self._exchange_one(part, p, is_due)
            outcomes.append(outcome)
            center_states.append(part.center_state)
            weights.append(part.weights)
            replace = self.fragments.replace
            whole = whole._replace(
                center=replace(whole.center, part.center),
                in_flight=replace(whole.in_flight, part.in_flight) if has_flight else (),
                residual=replace(whole.residual, part.residual) if has_residual else (),
            )
        whole = whole._replace(center_state=tuple(center_states), weights=jnp.stack(weights))
        return whole, outcomes

    def _exchange_one(self, part: Part, p: int, due: Due) -> tuple[Part, Outcome]:
        """Return fragment p after a step, and what came of that."""
        is_sent, is_received = due
        no = jnp.array(False)

        def leave_and_arrive() -> tuple[Part, jax.Array, jax.Array]:
            n, sent, has_missed = self._leave(part, p)
            arrived, is_bad, is_lost = self._arrive(sent, n, p)
            return arrived, is_bad, has_missed | is_lost

        def leave() -> tuple[Part, jax.Array]:
            n, sent, has_missed = self._leave(part, p)
            return sent._replace(in_flight=self.fragments.put(sent.in_flight, n, p)), has_missed

        def arrive() -> tuple[Part, jax.Array, jax.Array]:
            n = self.fragments.rows(sent.in_flight, p)
            arrived, is_bad, is_lost = self._arrive(sent, n, p)
            # What has arrived is no longer on its way.
            taken = arrived._replace(weights=jnp.full_like(sent.weights, NOTHING))
            return taken, is_bad, is_lost

        if not self.delay:
            new, is_bad, has_missed = cond(is_sent, leave_and_arrive, lambda: (part, no, no))
            return new, Outcome(is_sent, is_bad, has_missed)
        sent, has_missed = cond(is_sent, leave, lambda: (part, no))
        new, is_bad, is_lost = cond(is_received, arrive, lambda: (sent, no, no))
        # Of what nobody has sent the center makes no step, and no params are pulled.
        has_arrived = is_received is not False and is_received & (sent.weights != NOTHING)
        return new, Outcome(has_arrived, is_bad, has_missed | is_lost)

    def _leave(self, part: Part, p: int) -> tuple[Any, Part, jax.Array]:
        """Delta = c - theta: its mean over the replicas, and whether this one has no part in it."""
        rows, put = self.fragments.rows, self.fragments.put
        center, theta = rows(part.center, p), rows(self.theta(), p)
        delta = drift(center, theta)
        is_finite = self.replicas.are_finite(delta)
        if self.compress is None:
            weights, takes_part = weigh(self.weight, is_finite, jnp.float32)
            total = scale(delta, weights)
            axis_name = self.replicas.axis_name
            if self.drawn_by is not None:
                # How far both have gone from this one's center, which draws their two centers together.
                theirs, w_theirs = from_partner((theta, weights), axis_name, self.drawn_by)
                total = optax.tree.add(total, scale(drift(center, theirs), w_theirs))
                weights = weights + w_theirs
            elif axis_name is not None:
                total, weights = psum((total, weights), axis_name)
        else:
            delta = optax.tree.where(is_finite, delta, optax.tree.zeros_like(delta))
            e = rows(part.residual, p)
            total, weights, e, takes_part = sum_compressed(
                self.compress, delta, e, is_finite, self.replicas, self.weight
            )
            part = part._replace(residual=put(part.residual, e, p))
        return mean(total, weights), part._replace(weights=weights), ~takes_part

    def _arrive(self, part: Part, n: Any, p: int) -> tuple[Part, jax.Array, jax.Array]:
        """The step of the center by n, whether theta is not finite, and whether n was lost."""
        center = self.fragments.rows(part.center, p)
        gradient, is_finite = self.replicas.as_gradient(n, center)
        has_any = part.weights > 0
        center, center_state = self.step((center, part.center_state), gradient, has_any & is_finite)
        center = self.fragments.put(part.center, center, p)
        is_bad = ~self.replicas.are_finite(self.fragments.rows(self.theta(), p))
        # A sum that overflows is no exchange; of nobody's contribution each knows already.
        return part._replace(center=center, center_state=center_state), is_bad, has_any & ~is_finite


def drift(center: Any, theta: Any) -> Any:
    """Delta = c - theta, in float32 or wider: how far the replica went, pointing back, as a gradient."""

    def apart(c: jax.Array, p: jax.Array) -> jax.Array:
        dtype = accumulation_dtype(p)
        # A center of more digits was rounded when the params were put on it.
        return c.astype(p.dtype).astype(dtype) - p.astype(dtype)

    return jax.tree.map(apart, center, theta)
