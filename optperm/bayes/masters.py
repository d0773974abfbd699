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
      masters: The params in float32, or wider if they are; where they were changed by something else
        they start again from there.
      inner: The sampler's own state.
    """

    masters: PyTree[Float[Array, "?*shape"], "Params"]
    inner: Any


def with_masters(
    inner: optax.GradientTransformationExtraArgs,
) -> optax.GradientTransformationExtraArgs:
    """A sampler that keeps what params of 16 bits cannot hold of its steps; others it leaves alone.

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

        # m_{t+1} = m_t + u_t, and theta_{t+1} = m_{t+1} rounded
        kept = jax.tree.map(_kept, state.masters, params)
        masters = jax.tree.map(lambda m, u: m + u.astype(m.dtype), kept, moves)
        updates = jax.tree.map(lambda m, p: m.astype(p.dtype) - p, masters, params)
        return updates, MasterState(cast_like(masters, state.masters), inner_state)

    return transformation(init, update, method="constant_sgd", is_wrapper=True)


def wide_params(params: optax.Params, opt_state: Any) -> optax.Params:
    """The params as a sampler's copy of them has them; those of no such sampler as they are.

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
    """The copy, where it has not been left behind."""
    return jnp.where(master.astype(param.dtype) == param, master, param.astype(master.dtype))


def _wide(leaf: Any) -> jax.Array:
    return shard_like(jnp.array(leaf, accumulation_dtype(leaf)), leaf)
