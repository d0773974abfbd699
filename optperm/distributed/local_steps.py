"""What AGN and DiLoCo share: replicas that take local steps, a center, and a rare commit.

Every replica trains its own params. Once a period all of them contribute to one step of the center, in
one collective, and are pulled to where it then stands.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import optax
from jax.flatten_util import ravel_pytree

from optperm.contract.dtypes import (
    accumulation_dtype,
    all_finite,
    cast_like,
    zero_if_not_finite,
)
from optperm.contract.mapped_axes import (
    AxisName,
    all_gather,
    cond,
    mean_of_function,
    shared,
    varying_like,
)
from optperm.contract.states import find_state
from optperm.contract.transformation import transformation
from optperm.placement import Placement, apply_updates, placing_states, replace_targets
from optperm.switching import SwitchAfterState

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int32, PyTree

Commit = Literal["mean", "sum", "sequential"]
# (center, state of its optimizer)
Center = tuple[optax.Params, Any]
# (center, gradient, whether there is one) -> center
CenterStep = Callable[[Center, optax.Updates, jax.Array], Center]


class LocalStepsState(NamedTuple):
    """State of `agn` and of `diloco`, one on each replica.

    Attributes:
      count: Steps taken.
      local_state: State of the optimizer of the local params.
      center_state: State of the optimizer of the center.
      center: The params as of the last commit, the same on every replica.
      accumulator: Of the period; the step after a commit starts it anew. AGN: the sum of the raw local
        gradients, in float32 or wider. DiLoCo: whether all of them were finite.
      pulled: Whether the last step ended in a commit, which put the params on the center.
      skipped: Commits that this replica sat out because its contribution was not finite.
    """

    count: Int32[Array, ""]  # type: ignore[assignment]
    local_state: Any
    center_state: Any
    center: PyTree[Float[Array, "?*shape"], "Params"]
    accumulator: PyTree[Float[Array, "?*shape"], "Params"] | Bool[Array, ""]
    pulled: Bool[Array, ""]
    skipped: Int32[Array, ""]

    def placements(self) -> list[Placement]:
        """Where the local optimizer places params, and over it the center after a pull."""
        local = placing_states(self.local_state)
        within = [placement for state in local for placement in state.placements()]
        return [*within, (self.center, self.pulled)]

    def replace_targets(self, other: Any) -> "LocalStepsState":
        """This state with the center of another, and what its optimizers place.

        Args:
          other: One of the same form.
        """
        return self._replace(
            center=other.center,
            local_state=replace_targets(self.local_state, other.local_state),
            center_state=replace_targets(self.center_state, other.center_state),
        )


class Contribution(Protocol):
    """What a replica contributes to a commit."""

    @property
    def reads_local_params(self) -> bool:
        """Whether `total` calls `moved`."""
        ...

    def init(self, params: optax.Params) -> Any:
        """The accumulator at the beginning."""
        ...

    def accumulate(self, accumulator: Any, grads: optax.Updates, restart: jax.Array) -> Any:
        """The accumulator with one more local gradient; with that one alone where a period begins."""
        ...

    def total(
        self, accumulator: Any, center: optax.Params, moved: Callable[[], optax.Params]
    ) -> optax.Updates:
        """The contribution of a whole period, in float32 or wider; `moved()` is the local params."""
        ...


def local_steps(
    local_optimizer: optax.GradientTransformation,
    center_optimizer: optax.GradientTransformation,
    period: int | jax.Array,
    contribution: Contribution,
    *,
    axis_name: AxisName | None,
    commit: Commit,
    method: str,
) -> optax.GradientTransformationExtraArgs:
    """Local steps by one optimizer, and once a period a step of the center by another.

    Args:
      local_optimizer: Moves the params of each replica.
      center_optimizer: Moves the center, with the contributions for a gradient.
      period: Steps from one commit to the next.
      contribution: What each replica contributes.
      axis_name: The mapped axis, or several, over which the replicas are spread; None for one replica.
      commit: How contributions are combined.
      method: The public name of the method, for messages.

    Returns:
      A transformation whose state is a `LocalStepsState`.
    """
    inner = optax.with_extra_args_support(local_optimizer)
    outer = optax.with_extra_args_support(center_optimizer)
    combine = _RULES[commit] if axis_name is not None else _alone

    def init(params: optax.Params) -> LocalStepsState:
        local_state, center_state = inner.init(params), outer.init(params)
        _check_can_be_pulled(local_state, center_state, method)
        return LocalStepsState(
            count=jnp.zeros([], jnp.int32),
            local_state=local_state,
            center_state=center_state,
            center=jax.tree.map(lambda leaf: jnp.array(leaf, copy=True), params),
            accumulator=contribution.init(params),
            pulled=jnp.zeros([], jnp.bool_),
            skipped=jnp.zeros([], jnp.int32),
        )

    def update(
        grads: optax.Updates, state: LocalStepsState, params: optax.Params, **extra_args: Any
    ) -> tuple[optax.Updates, LocalStepsState]:
        count = optax.safe_increment(state.count)
        is_commit = count % period == 0

        # The local step: theta <- theta + u(g; s), a <- a + g. Raw, a gradient that is not finite would
        # leave NaN in s for ever.
        moves, local_state = inner.update(
            zero_if_not_finite(grads), _after_pull(state), params, **extra_args
        )
        moves, local_state = cast_like(moves, params), cast_like(local_state, state.local_state)
        a = contribution.accumulate(state.accumulator, grads, state.pulled)

        def step_center(at: Center, n: optax.Updates, is_valid: jax.Array) -> Center:
            # c <- c + u(n; s_c)
            def move() -> Center:
                gradient = optax.tree.cast_like(n, grads)
                extras = _common_extras(extra_args, gradient, at[0], params, axis_name)
                steps, new_state = outer.update(gradient, at[1], at[0], **extras)
                new_state = cast_like(new_state, at[1])
                return apply_updates(at[0], cast_like(steps, at[0]), new_state), new_state

            return cond(is_valid, move, lambda: at)

        def commit_and_pull() -> tuple[Center, jax.Array, optax.Updates]:
            theta = functools.partial(apply_updates, params, moves, local_state)
            n = contribution.total(a, state.center, theta)
            at, took_part = combine((state.center, state.center_state), n, step_center, axis_name)
            return at, took_part, pull_to(at[0]) if moves_leave_by_cond else ()

        def keep() -> tuple[Center, jax.Array, optax.Updates]:
            at = state.center, state.center_state
            return at, jnp.ones([], jnp.bool_), moves if moves_leave_by_cond else ()

        # theta <- c
        def pull_to(center: optax.Params) -> optax.Updates:
            return optax.tree.sub(center, params)

        # A commit that looks at where the replica went needs its moves in memory: they leave by the same
        # conditional. Else they are chosen entry by entry, and the local step stays one fused pass.
        moves_leave_by_cond = contribution.reads_local_params
        (center, center_state), took_part, chosen = cond(is_commit, commit_and_pull, keep)
        if not moves_leave_by_cond:
            chosen = optax.tree.where(is_commit, pull_to(center), moves)
        skipped = jnp.where(took_part, state.skipped, optax.safe_increment(state.skipped))
        return chosen, LocalStepsState(
            count, local_state, center_state, center, a, is_commit, skipped
        )

    return transformation(
        init, update, method=method, like=lambda state: state.center, axis_name=axis_name
    )


def _alone(
    at: Center, n: optax.Updates, step: CenterStep, axis_name: AxisName | None
) -> tuple[Center, jax.Array]:
    """One replica: a step by its own contribution, if that is finite."""
    del axis_name
    is_finite = all_finite(n)
    return step(at, n, is_finite), is_finite


def _summed(
    at: Center, n: optax.Updates, step: CenterStep, axis_name: AxisName, *, divide: bool
) -> tuple[Center, jax.Array]:
    """One step by the sum or the mean of all finite contributions, in one all-reduce."""
    packed, is_finite, unpack = _pack(n)
    total = jax.lax.psum(packed, axis_name)
    taking_part = total[-1]
    combined = total[:-1] / jnp.maximum(taking_part, 1) if divide else total[:-1]
    return step(at, unpack(combined), taking_part > 0), is_finite


def _in_turn(
    at: Center, n: optax.Updates, step: CenterStep, axis_name: AxisName
) -> tuple[Center, jax.Array]:
    """A step by each finite contribution, in one all-gather.

    Every replica makes the same steps in the same order, so they need not agree on the result.
    """
    packed, is_finite, unpack = _pack(n)

    def turn(at: Center, row: jax.Array) -> tuple[Center, None]:
        return step(at, unpack(row[:-1]), row[-1] > 0), None

    return jax.lax.scan(turn, at, all_gather(packed, axis_name, tiled=False))[0], is_finite


_RULES: dict[Commit, Callable[..., tuple[Center, jax.Array]]] = {
    "mean": functools.partial(_summed, divide=True),
    "sum": functools.partial(_summed, divide=False),
    "sequential": _in_turn,
}


def _pack(n: optax.Updates) -> tuple[jax.Array, jax.Array, Callable[[jax.Array], optax.Updates]]:
    """A contribution as one vector, of zeros where it is not finite.

    Returns:
      The vector, whose last entry counts who takes part; whether this replica does; and what makes a
      tree of the vector without that entry.
    """
    is_finite = all_finite(n)
    flat, unpack = ravel_pytree(optax.tree.cast(n, accumulation_dtype(n)))
    flat = jnp.where(is_finite, flat, jnp.zeros_like(flat))
    return jnp.append(flat, is_finite.astype(flat.dtype)), is_finite, unpack


def center_params(opt_state: Any) -> optax.Params:
    """The center: the params that all replicas of `optperm.agn` or `optperm.diloco` agree on.

    Between two commits the local params have moved on from it. It is what to test and to keep when
    training ends; end on a multiple of the period, or the last local steps are not in it.

    Args:
      opt_state: The optimizer state, in any nesting. One with a leading axis of replicas gives a center
        with that axis, all of its entries the same.

    Returns:
      A tree of the structure, shapes and dtypes of the params.

    Raises:
      ValueError: If there is no such state in `opt_state`, or more than one.

    Example:
      >>> import jax.numpy as jnp, optax, optperm
      >>> tx = optax.chain(optax.clip(1.0), optperm.agn(optax.sgd(0.5), communication_period=2))
      >>> params = jnp.array([1.0, 2.0])
      >>> opt_state = tx.init(params)
      >>> updates, opt_state = tx.update(jnp.ones(2), opt_state, params)
      >>> optax.apply_updates(params, updates).tolist()  # one local step
      [0.5, 1.5]
      >>> optperm.center_params(opt_state).tolist()  # no commit yet
      [1.0, 2.0]
    """
    return find_state(opt_state, LocalStepsState, method="agn or optperm.diloco").center


def _common_extras(
    extras: dict[str, Any],
    gradient: optax.Updates,
    center: optax.Params,
    params: optax.Params,
    axis_name: AxisName | None,
) -> dict[str, Any]:
    """The extra arguments for a step of the center: of all replicas' batches, the same on every one.

    `value` and `grad` belong to the center, not to the local params. What the center's optimizer does
    not use costs nothing; each call of a closure is a collective of its own, within the commit.
    """

    def gathered(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def gather(at: optax.Params, **options: Any) -> Any:
            result = function(varying_like(at, params, axis_name), **options)
            return result if axis_name is None else all_gather(result, axis_name, tiled=True)

        return gather

    common = dict(extras)
    if common.get("value_fn") is not None:
        common["value_fn"] = mean_of_function(common["value_fn"], params, axis_name, shared)
    if common.get("grad_fn") is not None:
        # At params that are marked as varying, a gradient is not already the sum over all replicas.
        common["grad_fn"] = mean_of_function(common["grad_fn"], params, axis_name, varying_like)
    if common.get("per_example_grad_fn") is not None:
        common["per_example_grad_fn"] = gathered(common["per_example_grad_fn"])
    if common.get("grad") is not None:
        common["grad"] = gradient
    if common.get("value") is not None:
        if common.get("value_fn") is not None:
            common["value"] = common["value_fn"](center)
        elif axis_name is not None:
            common["value"] = jax.lax.pmean(common["value"], axis_name)
    return common


def _after_pull(state: LocalStepsState) -> Any:
    """The local optimizer's state: it lives on across pulls, but what it places follows the center."""
    if not placing_states(state.local_state):
        return state.local_state
    return cond(
        state.pulled,
        lambda: replace_targets(state.local_state, state.center_state),
        lambda: state.local_state,
    )


def _check_can_be_pulled(local_state: Any, center_state: Any, method: str) -> None:
    local, center = (
        [type(state) for state in placing_states(tree)] for tree in (local_state, center_state)
    )
    if SwitchAfterState in local:
        raise ValueError(
            "The local optimizer places params in a phase of optperm.switch_after, and the center's, "
            f"which counts commits, would be in another phase: put switch_after around {method}."
        )
    if local != center:
        raise ValueError(
            f"The local optimizer of {method} places params where its own state says, and the center's "
            "optimizer does not, so the replicas could not be pulled to the center: "
            f"{[kind.__name__ for kind in local]} against {[kind.__name__ for kind in center]}. "
            "Use the same method for both, as optperm.agn does."
        )
