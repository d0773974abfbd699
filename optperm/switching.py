"""Train with one optimizer, then with another."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optperm.core import checks
from optperm.core.control import cond
from optperm.core.dtypes import cast_like
from optperm.core.fingerprints import UNSET
from optperm.core.shapes import Array, Bool, Int32, Params, UInt32, Updates
from optperm.core.states import find_states
from optperm.core.transformation import wrapper
from optperm.exact import (
    CommittingState,
    Exact,
    exact_entries,
    only_commits,
    placing_states,
    replace_targets,
)


class SwitchAfterState(NamedTuple):
    """State of `switch_after`.

    Attributes:
      count: Number of steps taken.
      switched: Whether the second optimizer took the last step, or will take the first step.
      first: State of the first optimizer; constant after the switch.
      then: State of the second optimizer.
      fingerprint: A number for each of the arguments of `shaped_by`.
    """

    count: Int32[Array, ""]  # type: ignore[assignment]
    switched: Bool[Array, ""]
    first: Any
    then: Any
    fingerprint: UInt32[Array, "1"] = UNSET

    def shaped_by(self) -> tuple[str, ...]:
        """Return the names of the arguments in the fingerprint."""
        return ("track",)

    def exact(self) -> list[Exact]:
        """Return the exact entries of the optimizer that took the last step."""
        return [
            each.only_if(is_running)
            for phase, is_running in self.phases()
            for each in exact_entries(phase)
        ]

    def phases(self) -> list[tuple[Any, jax.Array]]:
        """Return each optimizer's state with a flag: it took the last step, or will take the first."""
        return [(self.first, jnp.logical_not(self.switched)), (self.then, self.switched)]

    def reached_goal(self) -> jax.Array:
        """Return whether the last optimizer took the last step."""
        return self.switched

    def replace_targets(self, other: "SwitchAfterState") -> "SwitchAfterState":
        """Return this state with the targets of another state.

        Args:
          other: A state in the same phase.
        """
        return self._replace(
            first=replace_targets(self.first, other.first),
            then=replace_targets(self.then, other.then),
        )


def switch_after(
    num_steps: int | jax.Array,
    first: optax.GradientTransformation,
    then: optax.GradientTransformation,
    *,
    track: bool = False,
) -> optax.GradientTransformationExtraArgs:
    r"""Train with one optimizer for some steps, then with another.

    .. math::
      u_t = \begin{cases} \text{first}(g_t) & t < T \\ \text{then}(g_t) & t \ge T \end{cases}

    Args:
      num_steps: :math:`T \ge 0`, the number of steps of the first optimizer. After the second optimizer
        has taken a step, a larger number does not bring back the first optimizer.
      first: The optimizer of steps 0 to T - 1. Both optimizers get the extra arguments.
      then: The optimizer of all further steps.
      track: Whether to also update `then` in the first phase, which takes the time of both optimizers.

    Returns:
      A transformation whose state is a `SwitchAfterState`. Its `update` needs `params`.

    Example:
      >>> import jax.numpy as jnp, optax, optperm
      >>> tx = optperm.switch_after(2, optax.sgd(0.5), optperm.sgperm(1.0))
      >>> w = jnp.array([3.0, 0.0])
      >>> opt_state = tx.init(w)
      >>> for _ in range(3):
      ...     updates, opt_state = tx.update(jnp.array([1.0, -1.0]), opt_state, w)
      ...     w = optperm.apply_updates(w, updates, opt_state)
      ...     print(w.tolist())
      [2.5, 0.5]
      [2.0, 1.0]
      [1.0, 2.0]

    Notes:
      Without `track`, each step computes only the active optimizer. The state records the switch, and
      its structure never changes, so training can resume before or after the switch, and one
      `jax.lax.scan` can run through the switch.

      Without `track`, the second optimizer is initialized at the switch. Its state may contain the
      params at the switch (the weights of `optperm.sgperm`, the center of `optperm.agn`, a snapshot).
      Anything put into this state before the switch, such as a mask, is lost. With `track`, the second
      optimizer gets all gradients of the first phase, and its updates are dropped, so its moments are up
      to date at the switch. In both cases, its exact weights start from the params at the switch.

    Raises:
      TypeError: If `num_steps` is not an integer.
      ValueError: If `num_steps` is negative, or the trees passed to `update` do not match.
    """
    checks.check_count("num_steps", num_steps, minimum=0)
    before, after = checks.as_optimizer("first", first), checks.as_optimizer("then", then)

    def init(params: Params) -> SwitchAfterState:
        return SwitchAfterState(
            count=jnp.zeros([], jnp.int32),
            switched=jnp.asarray(num_steps) <= 0,
            first=before.init(params),
            then=after.init(params),
        )

    def update(
        grads: Updates, state: SwitchAfterState, params: Params, **extra_args: Any
    ) -> tuple[Updates, SwitchAfterState]:
        # A commit without a step belongs to the phase that took the last step.
        commit = extra_args.get("commit")
        has_step = not (isinstance(commit, str) and commit == "only")
        is_due = state.count >= jnp.asarray(num_steps, jnp.int32)
        is_switched = state.switched | (is_due & has_step)

        def step(tx: optax.GradientTransformationExtraArgs, tx_state: Any) -> tuple[Updates, Any]:
            if not has_step and not find_states(tx_state, CommittingState):
                return optax.tree.zeros_like(params), tx_state
            moves, new_state = tx.update(grads, tx_state, params, **extra_args)
            new_state = new_state if has_step else only_commits(new_state, tx_state)
            return cast_like(moves, params), cast_like(new_state, tx_state)

        def start(then_state: Any, params: Params) -> Any:
            fresh = after.init(params)
            checks.check_same_tree(
                "then.init(params)", fresh, then_state, source="the optimizer state"
            )
            return cast_like(replace_targets(then_state, fresh) if track else fresh, then_state)

        # u_t = first(g_t) for t < T; a tracked second optimizer only learns from the gradients
        def in_first() -> tuple[Updates, Any, Any]:
            then_state = step(after, state.then)[1] if track and has_step else state.then
            moves, first_state = step(before, state.first)
            return moves, first_state, then_state

        # u_t = then(g_t) for t >= T, starting from the params at the switch
        def in_then() -> tuple[Updates, Any, Any]:
            then_state = state.then
            if not track or placing_states(then_state):
                # As an operand, params are traced, so that then.init does not warn again in each step.
                then_state = cond(state.switched, lambda kept, _: kept, start, then_state, params)
            moves, then_state = step(after, then_state)
            return moves, state.first, then_state

        # The first branch is traced first, so that its error names trees that do not match.
        moves, first_state, then_state = cond(jnp.logical_not(is_switched), in_first, in_then)
        return moves, state._replace(
            count=optax.safe_increment(state.count) if has_step else state.count,
            switched=is_switched,
            first=first_state,
            then=then_state,
        )

    return wrapper(init, update, method="switch_after", shape_arguments=lambda _: {"track": track})
