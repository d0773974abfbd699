"""Exchange fragments: combine what the replicas contribute, and move the center by the result.

The diagram shows a step for a fragment that is due. The brackets are conditionals of the compiled
program, with the same predicate on all replicas:

    x, c                                the contribution of a replica, and the center
      |
      |-[ e <- beta e + x, x <- Q(e)    send: with compression only
      |   n = sum w x / sum w ]         one collective combines the contributions of all replicas
      |
      |   n, sum w                      with a delay, in the state for some steps
      |
      '-[ c <- c + u(n; s_c) ]          receive: no collective, the same on all replicas

Without a delay, the two brackets are one conditional.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax

from optperm.core.control import both, cond
from optperm.core.dtypes import accumulation_dtype, cast_like
from optperm.core.mapped_axes import (
    AxisName,
    all_gather,
    axis_names,
    mean_of_function,
    shared,
    varying_like,
)
from optperm.core.shapes import Params, Updates
from optperm.core.shardings import sharding_of, type_of
from optperm.core.trees import SMALL, unstack
from optperm.distributed._compression import Compression, Sent, encode_contribution
from optperm.distributed._every import Flag
from optperm.distributed._fragments import Fragments
from optperm.distributed._gossip import map_with_partner
from optperm.distributed._replicas import Replicas, divide, scale, weigh
from optperm.exact import apply_updates

# A function that returns the leaves of a tree in one fragment, as the stacks of `Alike`.
Take: TypeAlias = Callable[[Any], list[jax.Array]]
# (number of the fragment, `Take` of the fragment) -> contribution of this replica, in float32 or wider
Contribute: TypeAlias = Callable[[int, Take], list[jax.Array]]
Combine: TypeAlias = Literal["mean", "sum", "sequential"]
CombineOrPairs: TypeAlias = Literal[Combine, "pairs"]
# In place of a sum of weights, this value means that nothing is in flight.
NOTHING = -1.0


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
      is_bad: Whether the local params are not finite; false if they are replaced in any case.
      has_missed: Whether this replica did not take part in the exchange, or the exchange overflowed.
    """

    has_arrived: Flag
    is_bad: jax.Array
    has_missed: jax.Array


@dataclasses.dataclass(frozen=True)
class Step:
    """The inputs of one step's exchanges.

    Attributes:
      replicas: The mapped axes.
      fragments: The fragments.
      combine: The rule by which contributions are combined.
      compress: The encoder of contributions; None for float32.
      contribute: The function that returns this replica's contribution to a fragment.
      has_sums: Whether contributions contain only the steps since the last contribution. Otherwise,
        they also contain what is in flight.
      params: The local params before their step.
      find_theta: A function that returns the local params after their step.
      is_mixed: Whether a pull keeps a part of the local params.
      move_center: A function from a center, the state of its optimizer, a gradient, and whether there
        is one, to the new center and state.
      weight: The weight of this replica; None for 1.
      count: The number of the step, from which pairs of replicas are drawn.
    """

    replicas: Replicas
    fragments: Fragments
    combine: CombineOrPairs
    compress: Compression | None
    contribute: Contribute
    params: Params
    has_sums: bool
    find_theta: Callable[[], Params]
    is_mixed: bool
    move_center: Callable[[Params, Any, Updates, jax.Array], tuple[Params, Any]]
    weight: Any
    count: jax.Array


def exchange(
    step: Step, state: Any, sent: list[Flag], received: list[Flag]
) -> tuple[Part, list[Outcome]]:
    """Return the part of a state that changes, after the exchange of all fragments that are due."""
    fragments = step.fragments
    center, in_flight, residual = state.center, state.in_flight, state.residual
    has_delay = not isinstance(state.weights, tuple)
    center_states, weights, outcomes = list(state.center_state), [], []
    for p, (is_sent, is_received) in enumerate(zip(sent, received, strict=True)):
        part = Part(
            center=fragments.take_leaves(center, p),
            center_state=center_states[p],
            in_flight=fragments.take_leaves(in_flight, p),
            weights=state.weights[p] if has_delay else (),
            residual=fragments.take_leaves(residual, p),
        )
        part, outcome = _exchange_fragment(step, part, p, is_sent, is_received)
        # Another fragment may contain other slices of the same leaves.
        center = fragments.replace_leaves(center, part.center)
        in_flight = fragments.replace_leaves(in_flight, part.in_flight)
        residual = fragments.replace_leaves(residual, part.residual)
        center_states[p] = part.center_state
        weights.append(part.weights)
        outcomes.append(outcome)
    new_weights = jnp.stack(weights) if has_delay else ()
    return Part(center, tuple(center_states), in_flight, new_weights, residual), outcomes


def _exchange_fragment(
    step: Step, part: Part, p: int, is_sent: Flag, is_received: Flag
) -> tuple[Part, Outcome]:
    """Return the part of fragment p after a step, and the outcome."""
    take, write = step.fragments.take_rows, step.fragments.write_rows
    no, has_delay = jnp.array(False), not isinstance(part.weights, tuple)

    def send_and_receive() -> tuple[Part, jax.Array, jax.Array]:
        now = part
        if has_delay and step.has_sums:
            # What is in flight has steps that this contribution does not contain.
            now, _ = _receive(step, now, take(now.in_flight, p), now.weights, p)
        n, weights, now, has_missed = _send(step, now, p)
        now, is_bad = _receive(step, now, n, weights, p)
        return _land(now), is_bad, has_missed

    if is_sent is is_received:
        new, is_bad, has_missed = cond(is_sent, send_and_receive, lambda: (part, no, no))
        return new, Outcome(is_sent, is_bad, has_missed)

    def send() -> tuple[Part, jax.Array]:
        n, weights, now, has_missed = _send(step, part, p)
        return now._replace(in_flight=write(now.in_flight, n, p), weights=weights), has_missed

    def receive() -> tuple[Part, jax.Array]:
        now, is_bad = _receive(step, on_its_way, take(on_its_way.in_flight, p), weights, p)
        return _land(now), is_bad

    on_its_way, has_missed = cond(is_sent, send, lambda: (part, no))
    weights = on_its_way.weights
    new, is_bad = cond(is_received, receive, lambda: (on_its_way, no))
    # If nothing was sent, the center takes no step and no params are pulled.
    has_arrived = is_received is not False and is_received & (weights != NOTHING)
    return new, Outcome(has_arrived, is_bad, has_missed)


def _land(part: Part) -> Part:
    """Return the part with nothing in flight, so that nothing is received again."""
    return part._replace(weights=jax.tree.map(lambda w: jnp.full_like(w, NOTHING), part.weights))


def _send(step: Step, part: Part, p: int) -> tuple[Any, Any, Part, jax.Array]:
    """Combine the contributions x of all replicas to a gradient n of the center.

    Return n and its weight; for `"sequential"`, these are rows of all replicas. Return also the part,
    and whether this replica did not take part, or n overflowed.
    """
    replicas, take = step.replicas, step.fragments.take_rows
    center, params = take(part.center, p), take(step.params, p)
    alike = Alike(params, center, replicas.axis_name)
    x = step.contribute(p, lambda tree: alike.stack(take(tree, p)))
    # A replica is left out if x is not finite, or overflows in the dtype of the center.
    is_finite = replicas.are_finite(alike.cast(x))
    dtype, sent = accumulation_dtype(params), None
    if step.compress is not None:
        # e <- beta e + x, x <- Q(e), e <- e - x
        e = alike.stack(take(part.residual, p))
        sent, e, is_finite = encode_contribution(
            step.compress, x, e, is_finite, replicas, step.weight
        )
        x, residual = sent.decoded, alike.unstack(e)
        part = part._replace(residual=step.fragments.write_rows(part.residual, residual, p))
    w, takes_part = weigh(step.weight, is_finite, dtype)
    if step.combine == "sequential":
        rows, w, is_lost = _in_turn(alike, x, w, sent, replicas)
        return jax.vmap(alike.unstack)(rows), w, part, ~takes_part | is_lost
    if step.combine == "pairs":
        total, weights = _with_partner(step, alike, center, w, p)
    elif sent is not None:
        total, weights = sent.sum(w, replicas)
    else:
        # sum_i w_i x_i and sum_i w_i in one collective
        total, weights = replicas.sum((scale(x, w), w))
    # n = sum w x, or n = sum w x / sum w
    n = total if step.combine == "sum" else divide(total, weights)
    # The sum of finite numbers may overflow. If there is no contribution, each replica has missed it.
    is_lost = (weights > 0) & ~replicas.are_finite(alike.cast(n))
    return alike.unstack(n), jnp.where(is_lost, 0, weights), part, ~takes_part | is_lost


def _in_turn(
    alike: Alike, x: list[jax.Array], w: jax.Array, sent: Sent | None, replicas: Replicas
) -> tuple[list[jax.Array], jax.Array, jax.Array]:
    """Return w x of each replica in rows, with the weights, and whether this replica's overflows."""
    own = alike.cast(scale(x, w))
    is_lost = ~replicas.are_finite(own)
    w = jnp.where(is_lost, 0, w)
    if sent is None:
        rows, weights = replicas.gather((own, w))
        return rows, weights, is_lost
    rows, weights = sent.gather(w, replicas)
    return alike.cast(jax.vmap(scale)(rows, weights)), weights, is_lost


def _with_partner(
    step: Step, alike: Alike, center: Params, w: jax.Array, p: int
) -> tuple[list[jax.Array], jax.Array]:
    """Return w (c - theta) + w' (c - theta') with the partner's w' and theta', and w + w'.

    Both differences use this replica's center, so the centers approach each other.
    """
    theta = step.fragments.take_rows(step.find_theta(), p)
    pair = functools.partial(map_with_partner, axis_name=step.replicas.axis_name, count=step.count)
    w_theirs = pair(lambda _, theirs: theirs, w)

    def add(own: jax.Array, theirs: jax.Array, c: jax.Array) -> Any:
        return scale(subtract_params(c, own), w) + scale(subtract_params(c, theirs), w_theirs)

    return alike.stack(pair(add, theta, center)), w + w_theirs


def _receive(step: Step, part: Part, n: Any, weights: Any, p: int) -> tuple[Part, jax.Array]:
    """Return the part after a step of the center by n, and whether the local params are not finite."""
    at = step.fragments.take_rows(part.center, p), part.center_state

    # c <- c + u(n; s_c), unless n has no contributions
    def take_step(at: tuple[Params, Any], n: Updates, has_any: jax.Array) -> tuple[Params, Any]:
        return step.move_center(*at, optax.tree.cast_like(n, at[0]), has_any)

    def take_turn(at: tuple[Params, Any], row: Any) -> tuple[tuple[Params, Any], None]:
        n, w = row
        # Weights are finite, but without the sort in `both`, XLA takes minutes to compile the loop.
        return take_step(at, n, both(w > 0, jnp.isfinite(w))), None

    if step.combine == "sequential":
        # All replicas take the same steps in the same order, so the centers stay equal.
        center, center_state = jax.lax.scan(take_turn, at, (n, weights))[0]
    else:
        center, center_state = take_step(at, n, weights > 0)
    part = part._replace(
        center=step.fragments.write_rows(part.center, center, p), center_state=center_state
    )
    if not step.is_mixed:
        return part, jnp.array(False)
    return part, ~step.replicas.are_finite(step.fragments.take_rows(step.find_theta(), p))


def divide_by_steps(a: Any, steps: jax.Array) -> Any:
    """Return a / T for each leaf of sums of gradients over T steps; zeros without steps."""
    t = jnp.maximum(steps, 1)
    return jax.tree.map(lambda leaf: leaf / t.astype(leaf.dtype), a)


def subtract_params(center: Any, theta: Any) -> Any:
    """Return Delta = c - theta in float32 or wider, with the sign of a gradient."""

    def subtract(c: jax.Array, p: jax.Array) -> jax.Array:
        dtype = accumulation_dtype(p)
        # Pulls round a center in a wider dtype. Without the same rounding here, params that have not
        # moved would have a displacement.
        return c.astype(p.dtype).astype(dtype) - p.astype(dtype)

    return jax.tree.map(subtract, center, theta)


class Alike:
    """Stacks of the small leaves of a tree that have the same type; each other leaf is alone.

    Work on a few stacks compiles faster than work on all leaves. If a replica may be sharded, its leaves
    stay apart, because a stack would move them.
    """

    def __init__(self, params: Params, center: Params, axis_name: AxisName | None) -> None:
        """Group the leaves of params that also have the same dtype in the center."""
        leaves, self._structure = jax.tree.flatten(params)
        names = jax.sharding.get_abstract_mesh().axis_names
        may_stack = set(names).issubset(axis_names(axis_name))
        groups: dict[Any, list[int]] = {}
        self._dtypes = []
        for index, (leaf, c) in enumerate(zip(leaves, jax.tree.leaves(center), strict=True)):
            kind: Any = index
            if may_stack and leaf.size <= SMALL:
                kind = type_of(leaf), sharding_of(leaf), c.dtype
            if kind not in groups:
                self._dtypes.append(c.dtype)
            groups.setdefault(kind, []).append(index)
        self._groups = list(groups.values())

    def stack(self, tree: Any) -> list[jax.Array]:
        """Return an array for each group, with a leading axis of leaves."""
        leaves = jax.tree.leaves(tree)
        return [
            jnp.stack([leaves[i] for i in group]) if len(group) > 1 else leaves[group[0]][None]
            for group in self._groups
        ]

    def unstack(self, stacks: list[jax.Array]) -> Any:
        """Return the tree from its stacks."""
        leaves: list[Any] = [None] * sum(map(len, self._groups))
        for group, rows in zip(self._groups, stacks, strict=True):
            parts = unstack(rows) if len(group) > 1 else [jnp.squeeze(rows, 0)]
            for i, leaf in zip(group, parts, strict=True):
                leaves[i] = leaf
        return jax.tree.unflatten(self._structure, leaves)

    def cast(self, stacks: list[jax.Array]) -> list[jax.Array]:
        """Return stacks in the dtypes of the center."""
        return [rows.astype(dtype) for rows, dtype in zip(stacks, self._dtypes, strict=True)]


def make_center_step(
    optimizer: optax.GradientTransformationExtraArgs,
    extra_args: dict[str, Any],
    params: Params,
    axis_name: AxisName | None,
) -> Callable[[Params, Any, Updates, Flag], tuple[Params, Any]]:
    """Make the function c <- c + u(n; s_c), with extra arguments for the batches of all replicas."""

    def step(center: Params, center_state: Any, n: Updates, is_valid: Flag) -> tuple[Params, Any]:
        def move() -> tuple[Params, Any]:
            extras = _common_extras(extra_args, n, center, params, axis_name)
            moves, new_state = optimizer.update(n, center_state, center, **extras)
            new_state = cast_like(new_state, center_state)
            return apply_updates(center, cast_like(moves, center), new_state), new_state

        return cond(is_valid, move, lambda: (center, center_state))

    return step


def _common_extras(
    extras: dict[str, Any],
    gradient: Updates,
    center: Params,
    params: Params,
    axis_name: AxisName | None,
) -> dict[str, Any]:
    """Return the extra arguments for a step of the center, for the batches of all replicas.

    `value` and `grad` belong to the center, not to the local params. An extra argument costs nothing
    unless the optimizer uses it. Each call of a function is a collective within the commit.
    """

    def gather_results(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call_everywhere(at: Params, **options: Any) -> Any:
            at = varying_like(at, params, axis_name)
            result = function(optax.tree.cast_like(at, params), **options)
            return result if axis_name is None else all_gather(result, axis_name, tiled=True)

        return call_everywhere

    def average(function: Callable[..., Any], place: Callable[..., Any]) -> Callable[..., Any]:
        mean = mean_of_function(function, params, axis_name, place)

        @functools.wraps(function)
        def call_at_center(at: Params, **options: Any) -> Any:
            # The center may have a wider dtype than the params.
            return mean(optax.tree.cast_like(at, params), **options)

        return call_at_center

    common = dict(extras)
    if common.get("value_fn") is not None:
        common["value_fn"] = average(common["value_fn"], shared)
    if common.get("grad_fn") is not None:
        # If params are marked as varying, the gradient is local, not a sum over all replicas.
        common["grad_fn"] = average(common["grad_fn"], varying_like)
    if common.get("per_example_grad_fn") is not None:
        common["per_example_grad_fn"] = gather_results(common["per_example_grad_fn"])
    if common.get("grad") is not None:
        common["grad"] = gradient
    if common.get("value") is not None:
        if common.get("value_fn") is not None:
            common["value"] = common["value_fn"](center)
        elif axis_name is not None:
            common["value"] = jax.lax.pmean(common["value"], axis_name)
    return common
