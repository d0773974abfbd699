"""The steps of DiLoCo: fragments of the params are exchanged in turn, and may arrive some steps later.

A. Douillard et al., "Streaming DiLoCo with overlapping communication: Towards a Distributed Free Lunch",
arXiv 2501.18512, 2025. One fragment that arrives at once is plain DiLoCo, arXiv 2311.08105.
"""

from __future__ import annotations

import functools
import operator
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optperm.contract.dtypes import accumulation_dtype, cast_like
from optperm.contract.shardings import shard_like
from optperm.contract.transformation import transformation
from optperm.distributed.commits import Replicas, check_weight
from optperm.distributed.compression import Compression
from optperm.distributed.exchanges import NOTHING, Exchanger, Part
from optperm.distributed.fragments import FragmentOf, Fragments
from optperm.distributed.local_steps import (
    Period,
    after_pull,
    center_step,
    check_can_be_pulled,
    ends_period,
    finite_local,
    replace_center,
)
from optperm.distributed.plans import Due, Every, Exchange, due_at
from optperm.placement import Placement, apply_updates, placing_states

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Float32, Int32, PyTree


class DilocoState(NamedTuple):
    """State of `diloco`, one on each replica.

    Attributes:
      count: Steps taken.
      since_commit: Steps since all params were exchanged in one step.
      commits: Steps that exchanged all params.
      local_state: State of the optimizer of the local params.
      center_state: For each fragment the state of the optimizer of the center.
      center: The params that all replicas agree on.
      in_flight: What the replicas contributed last, combined; nothing without a delay.
      weights: For each fragment the sum of the weights that contributed last; -1 where nothing is on its
        way or has been.
      residual: What compression has held back so far; nothing without compression.
      pulled: For each leaf whether the last step put it on the center; where slices of leaves are
        exchanged by themselves, for each slice.
      skipped: Exchanges without this replica's contribution, because its params were not finite, or
        because all contributions together were not.
    """

    count: Int32[Array, ""]  # type: ignore[assignment]
    since_commit: Int32[Array, ""]
    commits: Int32[Array, ""]
    local_state: Any
    center_state: Any
    center: PyTree[Float[Array, "..."]]
    in_flight: PyTree[Float[Array, "..."]]
    weights: Float32[Array, " fragments"]
    residual: PyTree[Float[Array, "..."]]
    pulled: Bool[Array, "leaves slices"]
    skipped: Int32[Array, ""]

    def placements(self) -> list[Placement]:
        """Where the local optimizer places params, and over it the center after a pull."""
        local = placing_states(self.local_state)
        within = [placement for state in local for placement in state.placements()]
        stack, longest = self.count.ndim, self.pulled.shape[-1]
        leaves, structure = jax.tree.flatten(self.center)

        def flag(index: int, leaf: jax.Array) -> jax.Array:
            row = self.pulled[..., index, :]
            # The row of a whole leaf holds one flag in all places.
            length = leaf.shape[stack] if leaf.ndim > stack and leaf.shape[stack] <= longest else 1
            length = 1 if longest == 1 else length
            shape = leaf.shape[:stack] + (length,) * (leaf.ndim > stack)
            row = row[..., :length].reshape(*shape, *(1,) * (leaf.ndim - len(shape)))
            return row if length == 1 else shard_like(jnp.broadcast_to(row, leaf.shape), leaf)

        flags = [flag(index, leaf) for index, leaf in enumerate(leaves)]
        return [*within, (self.center, jax.tree.unflatten(structure, flags))]

    def replace_targets(self, other: Any) -> DilocoState:
        """This state with the center of another, and what its optimizers place.

        Args:
          other: One of the same form.
        """
        return replace_center(self, other)


def streaming_steps(
    local_optimizer: optax.GradientTransformation,
    center_optimizer: optax.GradientTransformation,
    sync_every: Period | Every,
    *,
    mixing: float | jax.Array,
    compress: Compression | None,
    center_dtype: Any,
    fragment_of: FragmentOf | None,
    replicas: Replicas,
    in_pairs: bool,
) -> optax.GradientTransformationExtraArgs:
    """DiLoCo with exchanges that are staggered, delayed, mixed in or compressed, or none of these.

    Args:
      local_optimizer: Moves the params of each replica.
      center_optimizer: Moves each fragment of the center. It gets extra arguments where there is one
        fragment: a loss is one of all params.
      sync_every: When which fragment leaves and arrives.
      mixing: How much of the local params a pull keeps.
      compress: What of a contribution is sent; None for all of it.
      center_dtype: The dtype of the center; None for that of the params.
      fragment_of: To which fragment leaves, or slices of them, belong.
      replicas: The axes over which the replicas are spread.
      in_pairs: Whether a replica exchanges with one other instead of all.

    Returns:
      A transformation whose state is a `DilocoState`.
    """
    plan = sync_every if isinstance(sync_every, Every) else Every(1)
    inner = optax.with_extra_args_support(local_optimizer)
    outer = optax.with_extra_args_support(center_optimizer)
    axis_name = replicas.axis_name
    # The replicas of whose batches the extra arguments of a step of the center speak.
    speaks_for = None if in_pairs else axis_name
    is_mixed = not (isinstance(mixing, int | float) and mixing == 0)
    is_one = plan.fragments == 1
    is_plain = is_one and not (plan.delay or is_mixed or compress or center_dtype)

    def init(params: optax.Params) -> DilocoState:
        fragments = Fragments(params, plan.fragments, fragment_of)
        local_state = inner.init(params)
        if placing_states(local_state) and not is_plain:
            raise ValueError(
                "The inner optimizer of diloco places params where its own state says. That needs one "
                "fragment without delay, and no mixing, compress or center_dtype."
            )
        center = optax.tree.cast(jax.tree.map(jnp.copy, params), center_dtype)
        center_state = tuple(outer.init(fragments.rows(center, p)) for p in range(plan.fragments))
        check_can_be_pulled(local_state, center_state, "diloco")
        wide = jax.tree.map(lambda p: jnp.zeros_like(p, accumulation_dtype(p)), params)
        return DilocoState(
            count=jnp.zeros([], jnp.int32),
            since_commit=jnp.zeros([], jnp.int32),
            commits=jnp.zeros([], jnp.int32),
            local_state=local_state,
            center_state=center_state,
            center=center,
            in_flight=wide if plan.delay else (),
            weights=jnp.full([plan.fragments], NOTHING, jnp.float32),
            residual=jax.tree.map(jnp.copy, wide) if compress is not None else (),
            pulled=fragments.table([False] * plan.fragments),
            skipped=jnp.zeros([], jnp.int32),
        )

    def due_now(commit: Any, state: DilocoState) -> list[Due]:
        if isinstance(sync_every, Every):
            return due_at(commit, plan, state.count, axis_name)
        is_commit = ends_period(commit, state, sync_every, axis_name, "diloco")
        return [(is_commit, is_commit)]

    def pull(arrived: Any, is_bad: Any, c: jax.Array, move: jax.Array, p: jax.Array) -> Any:
        if arrived is False:
            return move
        if is_mixed:
            # Of local params that are not finite nothing is kept.
            c = jnp.where(is_bad, c, mixing * (p + move) + (1 - mixing) * c)
        return jnp.where(arrived, c.astype(p.dtype) - p, move)

    def update(
        grads: optax.Updates,
        state: DilocoState,
        params: optax.Params,
        *,
        commit: bool | jax.Array | Exchange | None = None,
        weight: float | jax.Array | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, DilocoState]:
        replicas.check_are_local(grads, params, "diloco")
        check_weight(weight)
        _check_same_plan(state, plan)
        due = due_now(commit, state)

        # theta <- theta + u(g; s)
        def step(at: Any) -> tuple[Any, Any]:
            g, extras = finite_local(grads, extra_args, at)
            at = after_pull(at, state.center_state, state.pulled.all(), axis_name)
            moves, after = inner.update(g, at, params, **extras)
            return cast_like(moves, params), cast_like(after, state.local_state)

        # An exchange that a conditional may leave out makes the step by itself: moves that it were given
        # would be stored and copied in every step.
        is_known = all(isinstance(flag, bool) for pair in due for flag in pair)
        known = step(state.local_state) if is_known else None

        # Delta = c - theta, c <- c + u(Delta; s_c), for each fragment that is due
        fragments = Fragments(params, plan.fragments, fragment_of)
        move = center_step(outer, extra_args if is_one else {}, params, speaks_for)

        def theta() -> optax.Params:
            return apply_updates(params, *(known or step(state.local_state)))

        drawn_by = state.count if in_pairs else None
        exchanger = Exchanger(
            fragments, move, plan.delay, compress, replicas, weight, theta, drawn_by
        )
        part, told = exchanger.exchange(Part(*(getattr(state, name) for name in Part._fields)), due)
        # Tied to what comes of the exchange, the old state is overwritten after that has read it.
        tied = jax.lax.optimization_barrier((state.local_state, part.weights))[0]
        moves, local_state = known or step(tied)

        # theta <- mixing theta + (1 - mixing) c, where a fragment has arrived
        flags = fragments.flags(told.has_arrived, params), fragments.flags(told.is_bad, params)
        updates = jax.tree.map(pull, *flags, part.center, moves, params)
        steps = optax.safe_increment(state.since_commit)
        is_whole = functools.reduce(operator.and_, [flag for pair in due for flag in pair])
        placed = [a & (b if is_mixed else True) for a, b in zip(*told[:2], strict=True)]
        return updates, DilocoState(
            count=optax.safe_increment(state.count),
            since_commit=jnp.where(is_whole, 0, steps),
            commits=jnp.where(is_whole, optax.safe_increment(state.commits), state.commits),
            local_state=local_state,
            **part._asdict(),
            pulled=fragments.table(placed),
            skipped=state.skipped + sum(told.has_missed),
        )

    return transformation(
        init,
        update,
        method="diloco",
        like=lambda state: state.center,
        dtypes=center_dtype is None,
        axis_name=axis_name,
    )


def _check_same_plan(state: DilocoState, plan: Every) -> None:
    has_delay = bool(jax.tree.leaves(state.in_flight)) or not jax.tree.leaves(state.center)
    if len(state.center_state) != plan.fragments or has_delay < bool(plan.delay):
        raise ValueError(
            f"The optimizer state is of another plan than {plan}: it has {len(state.center_state)} "
            "fragments. All replicas and all steps need the same plan."
        )
