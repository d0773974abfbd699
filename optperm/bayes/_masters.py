"""Keep a float32 copy of 16-bit params, so that small steps have an effect."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optperm.core.dtypes import accumulation_dtype, cast_like
from optperm.core.shapes import Array, Float, Params, PyTree, Updates
from optperm.core.shardings import shard_like
from optperm.core.states import draw_params, find_states
from optperm.core.transformation import wrapper
from optperm.core.trees import fill_masked, mask_like


class MasterState(NamedTuple):
    """State of a sampler if some params have 16 bits.

    Attributes:
      masters: The params in float32 or wider. After `apply_updates` of Optax or of this library, inside
        or outside `jax.jit`, the rounded masters equal the params bit for bit. If something else changes
        an entry, its master restarts from the new value.
      inner: The sampler's own state.
    """

    masters: PyTree[Float[Array, "?*shape"], "Params"]
    inner: Any

    def draw(self, params: Params, key: jax.Array) -> Params | None:
        """Return a draw of the params around the copies; None if the sampler does not draw.

        Args:
          params: All params.
          key: A random key.
        """
        about = jax.tree.map(follow, self.masters, mask_like(params, self.masters))
        return draw_params(self.inner, fill_masked(about, params), key)


def with_masters(
    inner: optax.GradientTransformationExtraArgs, *, method: str, at_masters: bool = False
) -> optax.GradientTransformationExtraArgs:
    r"""Return a sampler that updates params of 16 bits through a copy in float32.

    With :math:`m` the copy, :math:`\Delta` the sampler's step and :math:`[\cdot]` rounding to 16 bits,

    .. math::
      m' = m + \Delta, \qquad u = [[m'] - \theta], \qquad \theta' = [\theta + u]

    Near zero, where the step is longer than the result, a sum in 16 bits may not be :math:`[m']`. In
    this case, :math:`m'` is set to :math:`\theta'`, a change of at most half a unit in the last place of
    :math:`u`. Therefore :math:`\theta' = [m']` for all entries.

    Args:
      inner: The sampler.
      method: The sampler's public name, for messages.
      at_masters: Whether the sampler is called with the copy instead of the params.

    Returns:
      A sampler whose state is a `MasterState` if a parameter has 16 bits, else the state of `inner`.
    """

    def init(params: Params) -> Any:
        state = inner.init(params)
        if all(
            jnp.finfo(leaf.dtype).bits > 16 for leaf in map(jnp.asarray, jax.tree.leaves(params))
        ):
            return state
        return MasterState(jax.tree.map(_widen, params), state)

    def update(g: Updates, state: Any, params: Params, **extra_args: Any) -> tuple[Updates, Any]:
        if not isinstance(state, MasterState):
            return inner.update(g, state, params, **extra_args)
        current = jax.tree.map(follow, state.masters, params)
        center = current if at_masters else params
        moves, inner_state = inner.update(g, state.inner, center, **extra_args)

        # m' = m + Delta, u = [[m'] - theta]
        masters = jax.tree.map(lambda m, u: m + u.astype(m.dtype), current, moves)
        updates = jax.tree.map(
            lambda m, p: _round(_round(m, p) - p.astype(m.dtype), p), masters, params
        )

        # theta' = [theta + u]
        def reach(m: jax.Array, p: jax.Array, u: jax.Array) -> jax.Array:
            reached = _round(p.astype(m.dtype) + u, p)
            return jnp.where(reached == _round(m, p), m, reached)

        masters = jax.tree.map(reach, masters, params, updates)
        return updates, MasterState(cast_like(masters, state.masters), inner_state)

    return wrapper(init, update, method=method)


def wide_params(params: Params, opt_state: Any) -> Params:
    """Return the sampler's copy, or the params themselves unless one copy contains all params.

    Args:
      params: The params after a step.
      opt_state: The optimizer state after the step.
    """
    states = find_states(opt_state, MasterState)
    if len(states) != 1:
        return params
    structure: Any = jax.tree.structure(params)
    if structure != jax.tree.structure(states[0].masters):
        return params
    return jax.tree.map(follow, states[0].masters, params)


def follow(master: jax.Array, param: jax.Array) -> jax.Array:
    """Return the copy, or the parameter where something else has changed the parameter."""
    wide = param.astype(master.dtype)
    return jnp.where(_round(master, param) == wide, master, wide)


def _round(x: jax.Array, like: jax.Array) -> jax.Array:
    """Return an array rounded to the precision of another array, with its dtype unchanged."""
    # Inside jax.jit, XLA removes a cast to 16 bits and back
    info = jnp.finfo(like.dtype)
    if info.bits > 16:
        return x
    rounded = jax.lax.reduce_precision(x, info.nexp, info.nmant)
    if info.tiny > jnp.finfo(x.dtype).tiny:
        # reduce_precision returns zero for subnormal float16 numbers, which are evenly spaced
        spacing = float(info.smallest_subnormal)
        rounded = jnp.where(
            jnp.abs(x) < float(info.tiny), jnp.round(x / spacing) * spacing, rounded
        )
    return rounded


def _widen(leaf: Any) -> jax.Array:
    return shard_like(jnp.array(leaf, accumulation_dtype(leaf)), leaf)
