"""Small steps of params in 16 bits, by a copy of them in 32."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optperm.contract.dtypes import accumulation_dtype, cast_like
from optperm.contract.shardings import shard_like
from optperm.contract.states import find_states
from optperm.contract.transformation import transformation

if TYPE_CHECKING:
    from jaxtyping import Array, Float, PyTree


class MasterState(NamedTuple):
    """State of a sampler some of whose params have 16 bits.

    Attributes:
      masters: The params in float32, or wider if they are. Rounded, they are the params, bit for bit,
        whichever `apply_updates` was called, inside `jax.jit` and outside. Where the params were changed
        by something else, the masters start again from there.
      inner: The sampler's own state.
    """

    masters: PyTree[Float[Array, "?*shape"], "Params"]
    inner: Any


def with_masters(
    inner: optax.GradientTransformationExtraArgs,
) -> optax.GradientTransformationExtraArgs:
    r"""Wrap a sampler so that params of 16 bits are updated through a copy in float32.

    With :math:`m` the copy, :math:`\Delta` the sampler's step and :math:`[\cdot]` rounding to 16 bits,

    .. math::
      m' = m + \Delta, \qquad u = [[m'] - \theta], \qquad \theta' = [\theta + u]

    A sum in 16 bits does not always reach :math:`[m']`: near zero, after a step that is longer than what
    it leaves. There :math:`m'` is :math:`\theta'`, which is off by at most half a unit in the last place
    of :math:`u`. So :math:`\theta' = [m']` holds everywhere, and the copy is never lost.

    Args:
      inner: The sampler.

    Returns:
      One whose state is a `MasterState` where a parameter has 16 bits, else that of `inner`.
    """

    def init(params: optax.Params) -> Any:
        state = inner.init(params)
        if all(
            jnp.finfo(leaf.dtype).bits > 16 for leaf in map(jnp.asarray, jax.tree.leaves(params))
        ):
            return state
        return MasterState(jax.tree.map(_wide, params), state)

    def update(
        g: optax.Updates, state: Any, params: optax.Params, **extra_args: Any
    ) -> tuple[optax.Updates, Any]:
        if not isinstance(state, MasterState):
            return inner.update(g, state, params, **extra_args)
        moves, inner_state = inner.update(g, state.inner, params, **extra_args)

        # m' = m + Delta, u = [[m'] - theta]
        kept = jax.tree.map(_kept, state.masters, params)
        masters = jax.tree.map(lambda m, u: m + u.astype(m.dtype), kept, moves)
        updates = jax.tree.map(
            lambda m, p: _round(_round(m, p) - p.astype(m.dtype), p), masters, params
        )

        # theta' = [theta + u]
        def reach(m: jax.Array, p: jax.Array, u: jax.Array) -> jax.Array:
            reached = _round(p.astype(m.dtype) + u, p)
            return jnp.where(reached == _round(m, p), m, reached)

        masters = jax.tree.map(reach, masters, params, updates)
        return updates, MasterState(cast_like(masters, state.masters), inner_state)

    return transformation(init, update, method="constant_sgd", is_wrapper=True)


def wide_params(params: optax.Params, opt_state: Any) -> optax.Params:
    """Return the params as a sampler's copy has them; those of no such sampler as they are.

    Args:
      params: The params after a step.
      opt_state: The optimizer state after it.
    """
    states = find_states(opt_state, MasterState)
    if len(states) != 1:
        return params
    structure: Any = jax.tree.structure(params)
    if structure != jax.tree.structure(states[0].masters):
        return params
    return jax.tree.map(_kept, states[0].masters, params)


def _kept(master: jax.Array, param: jax.Array) -> jax.Array:
    """Return the copy, where it has not been left behind."""
    wide = param.astype(master.dtype)
    return jnp.where(_round(master, param) == wide, master, wide)


def _round(x: jax.Array, like: jax.Array) -> jax.Array:
    """Round to the precision of another array, in the dtype of the first.

    A conversion there and back would be left out inside `jax.jit`, where XLA keeps excess precision.
    """
    info = jnp.finfo(like.dtype)
    if info.bits > 16:
        return x
    rounded = jax.lax.reduce_precision(x, info.nexp, info.nmant)
    if info.tiny > jnp.finfo(x.dtype).tiny:
        # Below, float16 is evenly spaced, and reduce_precision gives zero.
        spacing = float(info.smallest_subnormal)
        rounded = jnp.where(
            jnp.abs(x) < float(info.tiny), jnp.round(x / spacing) * spacing, rounded
        )
    return rounded


def _wide(leaf: Any) -> jax.Array:
    return shard_like(jnp.array(leaf, accumulation_dtype(leaf)), leaf)
