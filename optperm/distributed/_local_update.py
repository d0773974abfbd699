"""One update of AGN and DiLoCo: a local step, the exchange of what is due, and the pull to the center.

Each replica trains its own params. Once per period, all replicas contribute to one step of the center
in one collective, and are pulled to the new center. The collective is in a conditional of the compiled
program, so it runs once per period for any mapping of the replicas:

    count of steps            on each replica, the same on all
      |
      | largest               the maximum over the axes of `jax.vmap`, so that it is not batched;
      |                       axes of devices are not reduced
    is this a commit?
      |
      | cond                  jax.vmap: one conditional for all rows (a batched conditional would be a
      |                       selection that runs both branches in every step)
      |                       jax.pmap, jax.shard_map: one on each device, with the same predicate
    psum or all_gather        of the rows of a `jax.vmap`, or of the devices
      |
    a step of the center      the same on all replicas, without another collective

AGN and DiLoCo differ only in what a replica contributes.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optperm.core import checks
from optperm.core.control import cond
from optperm.core.dtypes import accumulation_dtype, cast_like, compute_in_order, zero_if_not_finite
from optperm.core.fingerprints import check_fingerprint, describe_difference
from optperm.core.mapped_axes import (
    AxisName,
    axis_names,
    largest,
    mark_varying,
    psum,
    varying_axes,
    varying_like,
)
from optperm.core.shapes import Params, Updates
from optperm.core.states import find_states
from optperm.distributed._compression import Compression
from optperm.distributed._every import (
    Every,
    Flag,
    Period,
    check_every,
    find_exchange,
    is_commit_only,
)
from optperm.distributed._exchange import (
    NOTHING,
    CombineOrPairs,
    Contribute,
    Outcome,
    Part,
    Step,
    exchange,
    make_center_step,
)
from optperm.distributed._fragments import FragmentOf, Fragments
from optperm.distributed._replicas import Replicas, check_weight
from optperm.exact import (
    OWN_POINTS,
    apply_updates,
    exact_entries,
    placing_states,
    replace_targets,
)
from optperm.switching import SwitchAfterState


@dataclasses.dataclass(frozen=True)
class LocalUpdate:
    """The options of a method in which replicas take local steps and rarely exchange.

    Attributes:
      method: The public name of the method.
      inner: The optimizer of the local steps.
      outer: The optimizer of the center.
      every: The period, or the plan of fragments.
      replicas: The mapped axes.
      combine: The rule by which contributions are combined.
      mixing: The weight of a replica's own params in a pull.
      compress: The encoder of contributions; None for float32.
      center_dtype: The dtype of the center; None for the dtypes of the params.
      fragment_of: The fragment of each leaf; None for parts of about equal size.
      has_sums: Whether contributions are sums over the steps since the last contribution, and not
        displacements of the local params.
    """

    method: str
    inner: optax.GradientTransformationExtraArgs
    outer: optax.GradientTransformationExtraArgs
    every: Period | Every
    replicas: Replicas
    combine: CombineOrPairs
    compress: Compression | None
    center_dtype: Any
    fragment_of: FragmentOf | None
    has_sums: bool
    mixing: float | jax.Array = 0.0

    def __post_init__(self) -> None:
        """Check the options."""
        check_every(self.every)
        checks.check_in_range("mixing", self.mixing, 0.0, 1.0, may_be_schedule=False)
        if not isinstance(self.compress, Compression | None):
            wanted = "an optperm.distributed.Compression or None"
            raise TypeError(f"compress must be {wanted}, got {self.compress!r}.")
        if self.combine == "pairs" and len(axis_names(self.replicas.axis_name)) > 1:
            got = self.replicas.axis_name
            raise ValueError(f'combine="pairs" needs replicas along one axis, got {got!r}.')
        if self.combine == "pairs" and self.compress is not None:
            raise ValueError('compress needs a combine other than "pairs".')
        if self.combine == "sequential" and self.plan.delay:
            raise ValueError(
                'combine="sequential" needs a plan without a delay, because the state would have to '
                "hold the contributions of all replicas."
            )
        if self.center_dtype is not None and not jnp.issubdtype(self.center_dtype, jnp.floating):
            raise TypeError(
                f"center_dtype must be a real floating dtype, got {self.center_dtype!r}."
            )

    @property
    def plan(self) -> Every:
        """The plan, which has one fragment if `every` is a period."""
        return self.every if isinstance(self.every, Every) else Every(1)

    @property
    def is_mixed(self) -> bool:
        """Whether a pull keeps a part of the local params."""
        return not (isinstance(self.mixing, int | float) and self.mixing == 0)

    @property
    def axis_of_center(self) -> AxisName | None:
        """The axis of the replicas that have the same center."""
        return None if self.combine == "pairs" else self.replicas.axis_name

    def list_arguments(self, params: Params) -> dict[str, Any]:
        """Return the arguments that shape a state; the decay of a residual may change."""
        compress = self.compress
        return {
            "fragment_of": Fragments(params, self.plan.fragments, self.fragment_of).of,
            "compress": None if compress is None else (compress.fraction, compress.bits),
            "combine": self.combine == "pairs",
        }

    def init(self, params: Params) -> dict[str, Any]:
        """Return the fields that the states of both methods have."""
        plan = self.plan
        fragments = Fragments(params, plan.fragments, self.fragment_of)
        local_state = self.inner.init(params)
        is_plain = plan.fragments == 1 and not (
            plan.delay or self.is_mixed or self.compress or self.center_dtype
        )
        if placing_states(local_state) and not is_plain:
            # A pull of some params, or to other values, would contradict the optimizer's targets.
            raise ValueError(
                f"The inner optimizer sets exact params (as sgperm does). {self.method} allows this "
                "only with one fragment, and without delay, mixing, compress or center_dtype."
            )
        center = optax.tree.cast(self.replicas.make_center(params), self.center_dtype)
        parts = [fragments.take_rows(center, p) for p in range(plan.fragments)]
        center_state = tuple(map(self.outer.init, parts))
        check_can_be_pulled(local_state, center_state, self.method)
        zeros = functools.partial(
            jax.tree.map, lambda p: jnp.zeros_like(p, accumulation_dtype(p)), params
        )
        weights = jnp.full([plan.fragments], NOTHING, accumulation_dtype(params))
        return {
            "count": jnp.zeros([], jnp.int32),
            "since_commit": jnp.zeros([], jnp.int32),
            "commits": jnp.zeros([], jnp.int32),
            "local_state": local_state,
            "center_state": center_state,
            "center": center,
            "in_flight": zeros() if plan.delay else (),
            "weights": weights if plan.delay else (),
            "residual": zeros() if self.compress is not None else (),
            "pulled": fragments.tabulate_flags([False] * plan.fragments),
            "skipped": jnp.zeros([], jnp.int32),
        }

    def begin(
        self,
        grads: Updates,
        state: Any,
        params: Params,
        commit: object,
        weight: Any,
        extra_args: dict[str, Any],
    ) -> Now:
        """Check the inputs of an update, and find what is due."""
        has_step = not is_commit_only(commit)
        given = grads if has_step else None
        self.replicas.check_axes(extra_args.get("replica_axes"), self.method)
        self.replicas.check_are_local(given, params, self.method)
        if weight is not None:
            check_weight(weight)
        self._check_same_plan(state)
        arguments = self.list_arguments(params)
        check_fingerprint(self.method, state, {name: arguments[name] for name in state.shaped_by()})
        axis_name = self.replicas.axis_name
        sent, received = find_exchange(commit, self.every, state, axis_name, self.method)
        step = make_local_step(self.inner, given, state, params, extra_args, axis_name)
        now = Now(
            options=self,
            fragments=Fragments(params, self.plan.fragments, self.fragment_of),
            state=state,
            params=params,
            grads=given,
            weight=weight,
            extra_args=extra_args,
            sent=sent,
            received=received,
            local_step=step,
        )
        # Within a conditional, an exchange computes the local step again, because as inputs of the
        # conditional, the moves would be stored and copied in every step.
        is_again = now.is_traced and not self.has_sums
        return now if is_again else dataclasses.replace(now, known=step(state.local_state))

    def _check_same_plan(self, state: Any) -> None:
        """Raise if the arrays of a state, traced or not, show that it was made with other arguments."""
        plan, center, residual = (
            self.plan,
            *map(jax.tree.leaves, (state.center, state.residual)),
        )
        has_delay = bool(jax.tree.leaves(state.in_flight)) or not center
        if len(state.center_state) != plan.fragments or has_delay < bool(plan.delay):
            fragments = len(state.center_state)
            delay = "a delay" if jax.tree.leaves(state.in_flight) else "no delay"
            wanted = f"a plan with fragments={plan.fragments} and delay={plan.delay}"
            raise ValueError(
                f"The state belongs to a plan with fragments={fragments} and {delay}, not to {wanted}: "
                "pass the plan of the state as every, or make a new state with init."
            )
        if center and bool(residual) != (self.compress is not None):
            raise ValueError(describe_difference(self.method, "compress"))
        dtype = self.center_dtype
        if dtype is not None and any(leaf.dtype != dtype for leaf in center):
            raise ValueError(describe_difference(self.method, "center_dtype"))


@dataclasses.dataclass(frozen=True)
class Now:
    """The inputs of one update.

    Attributes:
      options: The options of the method.
      fragments: The fragments of the params.
      state: The state before the update.
      params: The local params before the update.
      grads: The gradient; None for a commit without a local step.
      weight: The weight of this replica; None for 1.
      extra_args: The extra arguments.
      sent: For each fragment, whether this step sends it.
      received: For each fragment, whether this step receives it.
      local_step: The function s -> (u(g; s), new s) of the local step.
      known: The result of this function; None if an exchange computes it again.
    """

    options: LocalUpdate
    fragments: Fragments
    state: Any
    params: Params
    grads: Updates | None
    weight: Any
    extra_args: dict[str, Any]
    sent: list[Flag]
    received: list[Flag]
    local_step: Callable[[Any], tuple[Updates, Any]]
    known: tuple[Updates, Any] | None = None

    @property
    def is_traced(self) -> bool:
        """Whether the program decides what is due."""
        return any(isinstance(flag, jax.Array) for flag in (*self.sent, *self.received))

    @functools.cached_property
    def find_theta(self) -> Callable[[], Params]:
        """Return the function that returns the local params after their step."""

        def find_theta() -> Params:
            return apply_updates(
                self.params, *(self.known or self.local_step(self.state.local_state))
            )

        # Each conditional computes theta, but all of them share one trace.
        return find_theta if self.known else jax.jit(find_theta)

    def exchange(self, contribute: Contribute) -> tuple[Part, list[Outcome]]:
        """Take the center's steps with the contributions of all replicas to fragments that are due."""
        options = self.options
        extra_args = self.extra_args if options.plan.fragments == 1 else {}
        step = Step(
            replicas=options.replicas,
            fragments=self.fragments,
            combine=options.combine,
            compress=options.compress,
            contribute=contribute,
            params=self.params,
            has_sums=options.has_sums,
            find_theta=self.find_theta,
            is_mixed=options.is_mixed,
            move_center=make_center_step(
                options.outer, extra_args, self.params, options.axis_of_center
            ),
            weight=self.weight,
            count=self.state.count,
        )
        return exchange(step, self.state, self.sent, self.received)

    def pull(self, exchanged: Part, outcomes: list[Outcome]) -> tuple[Updates, Any]:
        """Return the updates and the state after the local step and the pull to the center."""
        options, state = self.options, self.state
        # An exchange that computes theta reads the local state.
        u, local_state = self.known or self.local_step(self.after(outcomes, state.local_state))
        arrived = [outcome.has_arrived for outcome in outcomes]
        is_bad = [outcome.is_bad for outcome in outcomes]
        center = keep_exact(
            exchanged.center,
            state.center,
            local_state,
            is_due=functools.reduce(operator.or_, arrived),
            axis_name=options.axis_of_center,
        )

        # theta_p <- alpha theta_p + (1 - alpha) c_p, for each fragment p that has arrived
        updates = jax.tree.map(
            functools.partial(_pull_leaf, options.mixing if options.is_mixed else None),
            self.fragments.spread_flags(arrived),
            self.fragments.spread_flags(is_bad),
            center,
            u,
            self.params,
        )
        # With mixing, only nonfinite params, which were replaced, are equal to the center.
        pulled = arrived
        if options.is_mixed:
            pulled = [a & b for a, b in zip(arrived, is_bad, strict=True)]
        # This is true if the step sends and receives all fragments.
        is_whole = functools.reduce(operator.and_, (*self.sent, *self.received))
        count, since_commit = (
            optax.safe_increment(state.count),
            optax.safe_increment(state.since_commit),
        )
        return updates, state._replace(
            count=state.count if self.grads is None else count,
            since_commit=jnp.where(is_whole, 0, since_commit),
            commits=jnp.where(is_whole, optax.safe_increment(state.commits), state.commits),
            local_state=local_state,
            center_state=exchanged.center_state,
            center=center,
            in_flight=exchanged.in_flight,
            weights=exchanged.weights,
            residual=exchanged.residual,
            pulled=self.fragments.tabulate_flags(pulled),
            skipped=state.skipped + sum(each.has_missed.astype(jnp.int32) for each in outcomes),
        )

    def after(self, outcomes: list[Outcome], tree: Any) -> Any:
        """Return a tree that the step may overwrite only after the exchange has read it."""
        if not self.is_traced:
            return tree
        return compute_in_order([outcome.has_missed for outcome in outcomes], tree)[1]

    def finish(self, updates: Updates, new_state: Any) -> tuple[Updates, Any]:
        """Return updates and state; no change if a commit without a step commits no earlier step."""
        axis_name = self.options.replicas.axis_name
        if self.grads is not None:
            return updates, new_state
        has_steps = varying_like(
            (self.state.since_commit > 0).astype(jnp.int32), updates, axis_name
        )
        if axis_name is not None:
            # The decision must be the same for all replicas.
            has_steps = psum(has_steps, axis_name)
        still = optax.tree.zeros_like(updates), self.state
        updates, new_state = optax.tree.where(has_steps > 0, (updates, new_state), still)
        return updates, new_state


def _pull_leaf(
    mixing: Any, has_arrived: Flag, is_bad: Flag, c: jax.Array, move: jax.Array, p: jax.Array
) -> jax.Array:
    """Return a leaf's update, to alpha theta + (1 - alpha) c for slices that have arrived."""
    if has_arrived is False:
        return move
    if mixing is not None:
        # The center replaces local params that are not finite.
        c = choose(is_bad, c, mixing * (p + move) + (1 - mixing) * c)
    return choose(has_arrived, c.astype(p.dtype) - p, move)


def choose(flag: Flag, new: jax.Array, old: jax.Array) -> jax.Array:
    """Return a new leaf if its flag is true, otherwise the old leaf; the flag may be one per slice."""
    if jnp.ndim(flag):
        return jnp.where(jnp.expand_dims(flag, range(1, old.ndim)), new, old)
    return jax.lax.select(jnp.asarray(flag), new, old)


def make_local_step(
    optimizer: optax.GradientTransformationExtraArgs,
    grads: Updates | None,
    state: Any,
    params: Params,
    extra_args: dict[str, Any],
    axis_name: AxisName | None,
) -> Callable[[Any], tuple[Updates, Any]]:
    """Return the function s -> (u(g; s), new s) of a local step.

    After a pull, s first gets its exact targets from the center. Without a gradient, u is zero and s
    does not change.
    """

    def step(local_state: Any) -> tuple[Updates, Any]:
        if grads is None:
            return optax.tree.zeros_like(params), local_state
        g, extras = zero_bad_entries(grads, extra_args, local_state)
        at = follow_center(local_state, state, axis_name)
        u, after = optimizer.update(g, at, params, **extras)
        return cast_like(u, params), cast_like(after, local_state)

    return step


def keep_exact(
    center: Params,
    before: Params,
    local_state: Any,
    is_due: bool | jax.Array,
    axis_name: AxisName | None,
) -> Params:
    """Return the center after a commit, with the entries that local optimizers fix or keep at zero.

    Replicas may disagree on an entry but have one center, so an entry is exact only if all agree.
    """
    entries = [each for each in exact_entries(local_state) if not each.is_target]
    if not entries:
        return center

    def is_everywhere(where: jax.Array) -> jax.Array:
        if axis_name is None:
            return where
        varying = varying_axes(jax.lax.axis_index(axis_name))
        size = psum(mark_varying(jnp.ones([], jnp.int32), varying), axis_name)
        return psum(mark_varying(where.astype(jnp.int32), varying), axis_name) == size

    def put() -> Params:
        moved = center
        for each in entries:
            agreed = each._replace(where=jax.tree.map(is_everywhere, each.where))
            moved = agreed.put(moved, before, before)
        return moved

    return cond(is_due, put, lambda: center)


def zero_bad_entries(
    grads: Updates, extra_args: dict[str, Any], local_state: Any
) -> tuple[Updates, dict[str, Any]]:
    """Return the gradient and extra arguments of a local step with zeros for nonfinite entries.

    NaN would stay in the local state forever. Only `optax.apply_if_finite` gets the raw gradient,
    because it skips the step.
    """
    if isinstance(local_state, optax.ApplyIfFiniteState):
        return grads, extra_args
    if extra_args.get("grad") is not None:
        extra_args = extra_args | {"grad": zero_if_not_finite(extra_args["grad"])}
    return zero_if_not_finite(grads), extra_args


def count_bad_steps(grads: Updates | None, local_state: Any, replicas: Replicas) -> jax.Array:
    """Return 1 if this replica's local step counts nonfinite entries of its gradient as zero."""
    if grads is None or isinstance(local_state, optax.ApplyIfFiniteState):
        return jnp.zeros([], jnp.int32)
    return jnp.logical_not(replicas.are_finite(grads)).astype(jnp.int32)


def replace_center(state: Any, other: Any) -> Any:
    """Return a state after a commit, with the center and the optimizers' targets of another state."""
    # Contributions in flight and residuals belong to the previous center.
    return state._replace(
        since_commit=jnp.zeros_like(state.since_commit),
        center=other.center,
        local_state=replace_targets(state.local_state, other.local_state),
        center_state=replace_targets(state.center_state, other.center_state),
        weights=jax.tree.map(lambda w: jnp.full_like(w, NOTHING), state.weights),
        residual=optax.tree.zeros_like(state.residual),
    )


def follow_center(local_state: Any, state: Any, axis_name: AxisName | None) -> Any:
    """Return the local optimizer's state after a pull, in which only its exact targets change."""
    if not placing_states(local_state):
        return local_state
    # An optimizer that sets exact params is pulled as a whole.
    return cond(
        largest(state.pulled.all(), axis_name),
        lambda: replace_targets(local_state, state.center_state),
        lambda: local_state,
    )


def check_can_be_pulled(local_state: Any, center_state: Any, method: str) -> None:
    """Raise if the optimizers of the replicas and of the center do not fit together.

    The center's optimizer must not lose commits, the local optimizer must not store params, which a pull
    would not move, and both must set the same exact params.
    """
    if find_states(center_state, optax.MultiStepsState):
        wanted = "optax.MultiSteps(agn(inner, ...), k)"
        if method == "diloco":
            wanted = "diloco(optax.MultiSteps(inner, k), ...), with k times the steps"
        raise ValueError(
            f"MultiSteps in the center's optimizer would lose commits: write {wanted}."
        )
    for each in find_states(local_state, OWN_POINTS):
        raise ValueError(
            f"{type(each).__name__} stores its own params, which a pull to the center does not move. "
            f"Use another optimizer for the local steps of {method}, or use this optimizer for the "
            "center."
        )
    local, center = (list(map(type, placing_states(tree))) for tree in (local_state, center_state))
    # The center's optimizer counts commits, so within switch_after, it would be in another phase.
    if local != center or SwitchAfterState in local:
        names = [kind.__name__ for kind in local]
        wanted = f"use one method for both, with switch_after around {method}"
        raise ValueError(
            "The optimizers of the replicas and of the center must set the same exact params, but the "
            f"states of the replicas that do so are {names}: {wanted}."
        )
