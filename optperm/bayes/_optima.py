"""The starts of chains: given points, or optima found from a different point for each chain."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.flatten_util import ravel_pytree

from optperm.core import checks
from optperm.core.dtypes import accumulation_dtype, all_finite, cast_like, place_like
from optperm.core.fresh_jit import fresh_jit_once
from optperm.core.noise import normal_like
from optperm.core.shapes import Params
from optperm.core.shardings import explicit_sharding, unshard
from optperm.core.trees import is_function, without_variables

# Up to this many params, L-BFGS on all examples moves each start to an optimum.
_MOST_TO_SEARCH, _SEARCHES, _SPREAD = 4096, 200, 2.0


def first_starts(params: Params, key: jax.Array, num_chains: int, starts: Any) -> Any:
    """Return the points at which chains begin, or, without given starts, at which their search begins.

    With many params, for which there is no search, all chains begin at the params themselves.
    """
    if starts is not None:
        return _cast_starts(starts, params, key, num_chains)
    found = [explicit_sharding(leaf) for leaf in jax.tree.leaves(params)]
    if any(any(sharding.spec) for sharding in found if sharding is not None):
        raise ValueError(
            "params are sharded over explicit axes of a mesh, without a search: pass starts=."
        )
    if optax.tree.size(params) > _MOST_TO_SEARCH:
        return jax.tree.map(lambda p: jnp.stack([p] * num_chains), params)
    return _spread(params, key, num_chains)


def search_starts(loss: Callable[..., jax.Array], starts: Any, *data: Any) -> Any:
    """Return an optimum of loss(params, *data) for each start; the starts if there are many params."""
    num_chains = len(jax.tree.leaves(starts)[0])
    if optax.tree.size(starts) > _MOST_TO_SEARCH * num_chains:
        return starts
    is_explicit = any(map(explicit_sharding, jax.tree.leaves(starts)))

    # As an argument, other data of the same shapes need no other program
    def every(starts: Any, *data: Any) -> Any:
        search = functools.partial(_search, lambda p: loss(p, *data))
        # A choice between sharded arrays needs a scalar condition, so the chains take turns
        return jax.lax.map(search, starts) if is_explicit else jax.vmap(search)(starts)

    return fresh_jit_once(every)(starts, *data)


def _spread(params: Params, key: jax.Array, num_chains: int) -> Any:
    """Return points in pairs on either side of params, to find both modes if there are two."""
    keys = jax.random.split(key, -(-num_chains // 2))
    z = jax.vmap(lambda key: normal_like(jax.random.key_data(key), params))(keys)

    def pairs(p: Any, z: jax.Array) -> jax.Array:
        both = jnp.asarray(p)[None, None] + _SPREAD * jnp.stack([z, -z], axis=1)
        return both.reshape(2 * len(keys), *jnp.shape(p))[:num_chains].astype(jnp.result_type(p))

    return jax.tree.map(pairs, params, z)


def _cast_starts(starts: Any, params: Params, key: jax.Array, num_chains: int) -> Any:
    """Return a user's starts in the dtypes of the params."""
    if is_function(starts):
        starts = jax.vmap(starts)(jax.random.split(key, num_chains))
    starts = without_variables(starts)
    wanted = jax.eval_shape(
        jax.vmap(lambda _: jax.tree.map(jnp.asarray, params)), jnp.zeros(num_chains)
    )
    checks.check_same_tree("starts", starts, wanted, source="params", dtypes=False)
    return cast_like(starts, wanted)


def _search(loss_fn: Callable[[Any], jax.Array], params: Params) -> Any:
    """Return the optimum found by L-BFGS, or the start if its loss is not higher."""
    # Optax's line search needs losses and params of the same dtype with more than 16 bits. L-BFGS on a
    # vector compiles in seconds for any number of leaves
    dtype, tx = accumulation_dtype(params), optax.lbfgs()
    start, unravel = ravel_pytree(unshard(optax.tree.cast(params, dtype)))

    def as_params(x: jax.Array) -> Params:
        return cast_like(unravel(x), params)

    def loss(x: jax.Array) -> jax.Array:
        wide = jax.tree.map(place_like, unravel(x), params)
        return loss_fn(wide).astype(dtype)

    def step(carry: tuple[Any, Any], _: None) -> tuple[tuple[Any, Any], None]:
        at, state = carry
        value, grad = optax.value_and_grad_from_state(loss)(at, state=state)
        updates, state = tx.update(grad, state, at, value=value, grad=grad, value_fn=loss)
        new = optax.apply_updates(at, updates)
        return optax.tree.where(all_finite(new), (new, state), carry), None

    (found, _), _ = jax.lax.scan(step, (start, tx.init(start)), length=_SEARCHES)
    return as_params(jnp.where(loss(found) < loss(start), found, start))
