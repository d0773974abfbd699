"""Run the burn-in of a sampler with another optimizer."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optperm.bayes._remainders import with_remainders
from optperm.core import checks
from optperm.core.control import when
from optperm.core.dtypes import cast_like
from optperm.core.shapes import Array, Bool, Int32, Params, Updates
from optperm.core.transformation import wrapper
from optperm.exact import Exact, exact_entries


class BurnInState(NamedTuple):
    """State of a sampler that uses another optimizer for its burn-in.

    Attributes:
      count: Number of steps taken.
      switched: Whether the sampler took the last step.
      first: State of the optimizer of the burn-in; constant after the burn-in.
      then: State of the sampler, which learns from all gradients.
    """

    count: Int32[Array, ""]  # type: ignore[assignment]
    switched: Bool[Array, ""]
    first: Any
    then: Any

    def phases(self) -> list[tuple[Any, Any]]:
        """Return both states with flags. The sampler always learns, so its flag is always True."""
        return [(self.first, jnp.logical_not(self.switched)), (self.then, True)]

    def exact(self) -> list[Exact]:
        """Return the exact entries of the burn-in's optimizer during the burn-in."""
        is_first = jnp.logical_not(self.switched)
        return [each.only_if(is_first) for each in exact_entries(self.first)]


def after_burn_in(
    burn_in: int | jax.Array,
    burn_in_optimizer: optax.GradientTransformation,
    *steps: optax.GradientTransformation,
    method: str,
) -> optax.GradientTransformationExtraArgs:
    """Return a sampler that uses another optimizer for its burn-in.

    Args:
      burn_in: The number of steps of the other optimizer.
      burn_in_optimizer: The other optimizer.
      *steps: The chain of the sampler.
      method: The sampler's public name, for messages.
    """
    checks.check_transformation("burn_in_optimizer", burn_in_optimizer)
    before = optax.with_extra_args_support(burn_in_optimizer)
    after = optax.with_extra_args_support(optax.chain(*steps))

    def init(params: Params) -> BurnInState:
        zero = jnp.zeros([], jnp.int32)
        return BurnInState(zero, zero > 0, before.init(params), after.init(params))

    def update(
        g: Updates, state: BurnInState, params: Params, **extra_args: Any
    ) -> tuple[Updates, BurnInState]:
        is_over = state.switched | (state.count >= jnp.asarray(burn_in, jnp.int32))
        # One update for both phases halves the program and updates the sampler's state in place
        moves, then = after.update(g, state.then, params, **extra_args)

        def first(known: tuple[Updates, Any]) -> tuple[Updates, Any]:
            return cast_like(before.update(g, known[1], params, **extra_args), known)

        moves, first_state = when(jnp.logical_not(is_over), first, (moves, state.first))
        return moves, BurnInState(optax.safe_increment(state.count), is_over, first_state, then)

    outer = wrapper(init, update, method=method)
    return with_remainders(outer, method=method)
