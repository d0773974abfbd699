"""Keep the bits of 16-bit params that rounding removes, so that small steps have an effect."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import optax

from optperm.core.remainders import is_narrow, join, join_params, make_remainder, step_params
from optperm.core.shapes import Array, Int, Params, PyTree, Updates
from optperm.core.states import draw_params, find_states
from optperm.core.transformation import wrapper


class RemainderState(NamedTuple):
    """State of a sampler if some params have 16 bits.

    Attributes:
      remainder: The bits of each param that rounding removed, int16, as in `optperm.widen_params`; a
        single zero for params of 32 or 64 bits. If something else changes an entry, it keeps its
        remainder, which is at most half a unit in the last place.
      inner: The sampler's own state.
    """

    remainder: PyTree[Int[Array, "..."], "Params"]
    inner: Any

    def draw(self, params: Params, key: jax.Array) -> Params | None:
        """Return a draw of the params around the params with their remainders, in float32.

        Args:
          params: All params.
          key: A random key.

        Returns:
          The draw; None if the sampler does not draw.
        """
        return draw_params(self.inner, join_params(params, self.remainder), key)


def with_remainders(
    inner: optax.GradientTransformationExtraArgs, *, method: str, at_wide: bool = False
) -> optax.GradientTransformationExtraArgs:
    r"""Return a sampler that updates params of 16 bits as if they had 32 bits.

    With P and r a param and its remainder, and :math:`\Delta` the sampler's step,

    .. math::
      w = \operatorname{join}(P, r), \qquad P', r' = \operatorname{split}(w + \Delta)

    Args:
      inner: The sampler.
      method: The sampler's public name, for messages.
      at_wide: Whether the sampler is called with w instead of the params.

    Returns:
      A sampler whose state is a `RemainderState` if a parameter has 16 bits, else the state of `inner`.
    """

    def init(params: Params) -> Any:
        state = inner.init(params)
        if not any(map(is_narrow, jax.tree.leaves(params))):
            return state
        return RemainderState(jax.tree.map(lambda p: make_remainder(p, 16), params), state)

    def update(g: Updates, state: Any, params: Params, **extra_args: Any) -> tuple[Updates, Any]:
        if not isinstance(state, RemainderState):
            return inner.update(g, state, params, **extra_args)

        # w = join(P, r)
        w = jax.tree.map(join, params, state.remainder)
        center = w if at_wide else params
        moves, inner_state = inner.update(g, state.inner, center, **extra_args)

        # P', r' = split(w + Delta)
        updates, remainder = step_params(w, moves, params, state.remainder, 16)
        return updates, RemainderState(remainder, inner_state)

    return wrapper(init, update, method=method)


def wide_params(params: Params, opt_state: Any) -> Params:
    """Return params with the remainders of a sampler, if there is one, in float32.

    Args:
      params: The params after a step.
      opt_state: The optimizer state after the step.
    """
    for state in find_states(opt_state, RemainderState):
        params = join_params(params, state.remainder)
    return params
