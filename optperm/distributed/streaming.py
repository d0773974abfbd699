"""Streaming DiLoCo: fragments of the params are exchanged in turn, and arrive some steps later.

A. Douillard et al., "Streaming DiLoCo with overlapping communication: Towards a Distributed Free Lunch",
arXiv 2501.18512, 2025. What crosses the axis may be compressed (`compression.py`).
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optperm.contract.dtypes import accumulation_dtype, cast_like
from optperm.contract.mapped_axes import cond
from optperm.contract.transformation import transformation
from optperm.distributed.commits import Replicas, drift, pull
from optperm.distributed.compression import Compression, sum_compressed
from optperm.distributed.local_steps import check_no_multi_steps, finite_local
from optperm.distributed.plans import Due, Every, Exchange, Fragments, due_at
from optperm.placement import Placement, placing_states

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Float32, Int32, PyTree


# In the place of how many replicas took part: nothing was sent that has not arrived.
NOTHING = -1.0


class StreamingState(NamedTuple):
    """State of `diloco` whose fragments travel by themselves, one on each replica.

    Attributes:
      count: Steps taken.
      local_state: State of the optimizer of the local params.
      center_state: For each fragment the state of the optimizer of the center.
      center: The params that all replicas agree on.
      in_flight: What the replicas contributed last, combined; nothing without a delay.
      taking_part: For each fragment how many replicas contributed last; -1 where nothing is on its way
        or has been.
      residual: What compression has held back so far; nothing without compression.
      pulled: For each fragment whether the last step put the params on the center.
      skipped: Exchanges without this replica's contribution, because its params were not finite, or
        because all contributions together were not.
    """

    count: Int32[Array, ""]  # type: ignore[assignment]
    local_state: Any
    center_state: Any
    center: PyTree[Float[Array, "..."]]
    in_flight: PyTree[Float[Array, "..."]]
    taking_part: Float32[Array, " fragments"]
    residual: PyTree[Float[Array, "..."]]
    pulled: Bool[Array, " fragments"]
    skipped: Int32[Array, ""]

    def placements(self) -> list[Placement]:
        """Each fragment of the center, after a pull."""
        cut = Fragments(self.center, len(self.center_state))
        return [(cut.only(self.center, p), self.pulled[p]) for p in range(cut.number)]

    def replace_targets(self, other: Any) -> StreamingState:
        """This state with the center of another.

        Args:
          other: One of the same form.
        """
        return self._replace(center=other.center, center_state=other.center_state)


class Part(NamedTuple):
    """What belongs to one fragment in a `StreamingState`."""

    center: Any
    center_state: Any
    in_flight: Any
    taking_part: Any
    residual: Any


@dataclasses.dataclass(frozen=True)
class Exchanger:
    """How the fragments of all replicas become steps of the center, and the center their params."""

    optimizer: optax.GradientTransformationExtraArgs
    plan: Every
    mixing: float | jax.Array
    compress: Compression | None
    replicas: Replicas

    def part(self, state: StreamingState, cut: Fragments, p: int) -> Part:
        """What belongs to fragment p."""
        return Part(
            center=cut.only(state.center, p),
            center_state=state.center_state[p],
            in_flight=cut.only(state.in_flight, p) if self.plan.delay else (),
            taking_part=state.taking_part[p],
            residual=cut.only(state.residual, p) if self.compress is not None else (),
        )

    def send(self, part: Part, theta: Any) -> tuple[Any, jax.Array, Any, jax.Array]:
        """Delta = c - theta: its mean, of how many replicas, what is held back, whether this is one."""
        delta, e = drift(part.center, theta), part.residual
        is_finite = self.replicas.are_finite(delta)
        delta = optax.tree.where(is_finite, delta, optax.tree.zeros_like(delta))
        number = is_finite.astype(jnp.float32)
        if self.compress is not None:
            total, number, e, is_finite = sum_compressed(
                self.compress, delta, e, is_finite, self.replicas
            )
        elif self.replicas.axis_name is not None:
            total, number = jax.lax.psum((delta, number), self.replicas.axis_name)
        else:
            total = delta
        mean = jax.tree.map(lambda x: x / jnp.maximum(number, 1).astype(x.dtype), total)
        return mean, number, e, is_finite

    def receive(
        self, part: Part, n: Any, number: jax.Array, theta: Any, params: Any
    ) -> tuple[Any, Any, Any, jax.Array]:
        """The step c <- c + u(n; s_c), and updates to theta <- mixing theta + (1 - mixing) c."""
        gradient = optax.tree.cast_like(n, part.center)

        def move() -> tuple[Any, Any]:
            moves, new_state = self.optimizer.update(gradient, part.center_state, part.center)
            new_state = cast_like(new_state, part.center_state)
            return optax.apply_updates(part.center, cast_like(moves, part.center)), new_state

        is_valid = (number > 0) & self.replicas.are_finite(gradient)
        center, center_state = cond(is_valid, move, lambda: (part.center, part.center_state))
        # A combination that overflows is no exchange; of nobody's contribution each knows already.
        is_lost = (number > 0) & ~is_valid
        return (
            center,
            center_state,
            pull(self.mixing, center, theta, params, self.replicas),
            is_lost,
        )

    def exchange(
        self, part: Part, due: Due, theta: Any, params: Any, moves: Any
    ) -> tuple[Part, jax.Array, tuple[Any, jax.Array]]:
        """A fragment after a step: what is kept of it, exchanges missed, and (updates, is placed)."""
        # A fragment without leaves has nothing to send.
        is_sent, is_received = due if jax.tree.leaves(params) else (False, False)

        def send_and_receive() -> tuple[Part, jax.Array, Any]:
            n, number, e, took_part = self.send(part, theta)
            center, center_state, pulled, is_lost = self.receive(part, n, number, theta, params)
            return Part(center, center_state, (), number, e), ~took_part | is_lost, pulled

        if not self.plan.delay:
            return cond(
                is_sent,
                send_and_receive,
                lambda: (part, jnp.array(False), (moves, jnp.array(False))),
            )

        def leave() -> tuple[Part, jax.Array]:
            n, number, e, took_part = self.send(part, theta)
            return part._replace(in_flight=n, taking_part=number, residual=e), ~took_part

        sent, has_missed = cond(is_sent, leave, lambda: (part, jnp.array(False)))

        def arrive() -> tuple[Part, jax.Array, Any]:
            n, number = sent.in_flight, sent.taking_part
            center, center_state, pulled, is_lost = self.receive(sent, n, number, theta, params)
            # What has arrived is no longer on its way.
            taken = sent._replace(
                center=center, center_state=center_state, taking_part=jnp.full_like(number, NOTHING)
            )
            return taken, is_lost, pulled

        is_received = is_received is not False and is_received & (sent.taking_part != NOTHING)
        received, is_lost, pulled = cond(
            is_received, arrive, lambda: (sent, jnp.array(False), (moves, jnp.array(False)))
        )
        return received, has_missed | is_lost, pulled


def streaming_steps(
    local_optimizer: optax.GradientTransformation,
    center_optimizer: optax.GradientTransformation,
    plan: Every,
    *,
    mixing: float | jax.Array,
    compress: Compression | None,
    center_dtype: Any,
    replicas: Replicas,
) -> optax.GradientTransformationExtraArgs:
    """DiLoCo with exchanges that are staggered, delayed, mixed in or compressed.

    Args:
      local_optimizer: Moves the params of each replica.
      center_optimizer: Moves each fragment of the center. It gets no extra arguments: a loss is one of
        all params.
      plan: When which fragment leaves and arrives.
      mixing: How much of the local params a pull keeps.
      compress: What of a contribution is sent; None for all of it.
      center_dtype: The dtype of the center; None for that of the params.
      replicas: The axes over which the replicas are spread.

    Returns:
      A transformation whose state is a `StreamingState`.
    """
    inner = optax.with_extra_args_support(local_optimizer)
    outer = optax.with_extra_args_support(center_optimizer)
    exchanger = Exchanger(outer, plan, mixing, compress, replicas)

    def init(params: optax.Params) -> StreamingState:
        local_state = inner.init(params)
        if placing_states(local_state):
            raise ValueError(
                "The inner optimizer of diloco places params where its own state says. That needs a "
                "number or a schedule for sync_every, and no mixing, compress or center_dtype."
            )
        center = optax.tree.cast(jax.tree.map(jnp.copy, params), center_dtype)
        cut = Fragments(params, plan.fragments)
        center_state = tuple(outer.init(cut.only(center, p)) for p in range(cut.number))
        check_no_multi_steps(center_state, "diloco")
        wide = jax.tree.map(lambda p: jnp.zeros_like(p, accumulation_dtype(p)), params)
        return StreamingState(
            count=jnp.zeros([], jnp.int32),
            local_state=local_state,
            center_state=center_state,
            center=center,
            in_flight=wide if plan.delay else (),
            taking_part=jnp.full([plan.fragments], NOTHING, jnp.float32),
            residual=jax.tree.map(jnp.copy, wide) if compress is not None else (),
            pulled=jnp.zeros([plan.fragments], jnp.bool_),
            skipped=jnp.zeros([], jnp.int32),
        )

    def update(
        grads: optax.Updates,
        state: StreamingState,
        params: optax.Params,
        *,
        commit: bool | Exchange | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, StreamingState]:
        replicas.check_are_local(grads, params, "diloco")
        cut = Fragments(params, plan.fragments)
        due = due_at(commit, plan, state.count)

        # The local step: theta <- theta + u(g; s).
        g, extras = finite_local(grads, extra_args, state.local_state)
        moves, local_state = inner.update(g, state.local_state, params, **extras)
        moves, local_state = cast_like(moves, params), cast_like(local_state, state.local_state)
        theta = optax.apply_updates(params, moves)

        # The exchange of each fragment.
        results = [
            exchanger.exchange(
                exchanger.part(state, cut, p),
                due[p],
                *(cut.only(x, p) for x in (theta, params, moves)),
            )
            for p in range(cut.number)
        ]
        parts, missed, pulled = zip(*results, strict=True)
        skipped = sum(each.astype(jnp.int32) for each in missed)
        updates, is_placed = zip(*pulled, strict=True)
        return cut.merge(updates), StreamingState(
            count=optax.safe_increment(state.count),
            local_state=local_state,
            center_state=tuple(part.center_state for part in parts),
            center=cut.merge([part.center for part in parts]),
            in_flight=cut.merge([part.in_flight for part in parts]) if plan.delay else (),
            taking_part=jnp.stack([part.taking_part for part in parts]),
            residual=cut.merge([part.residual for part in parts]) if compress is not None else (),
            pulled=jnp.stack(is_placed),
            skipped=state.skipped + skipped,
        )

    return transformation(
        init,
        update,
        method="diloco",
        like=lambda state: state.center,
        dtypes=center_dtype is None,
        axis_name=replicas.axis_name,
    )
