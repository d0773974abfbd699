"""Draws of params from the normal distributions that `ivon` and `swag` have learned."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from optperm.bayes._ivon import IvonState
from optperm.bayes._remainders import RemainderState
from optperm.bayes._swag import SwagState
from optperm.core import checks
from optperm.core.keys import as_key, make_key
from optperm.core.noise import normal_like
from optperm.core.remainders import join_params
from optperm.core.shapes import Params
from optperm.core.shardings import can_be_seen
from optperm.core.states import find_state, find_states
from optperm.core.trees import fill_masked, in_variables, mask_like, without_variables


def sample_params(
    opt_state: Any, params: Params, key: int | jax.Array, num_draws: int | None = None
) -> Params:
    r"""Draw params from the normal distribution of `optperm.ivon` or of `optperm.swag`.

    .. math::
      \theta = m + \frac{z}{\sqrt{\lambda (h + \delta)}}, \qquad
      \theta = \bar\theta + \sqrt{\tfrac12 \Sigma_{\mathrm{diag}}}\, z_1
      + \frac{1}{\sqrt{2 (K - 1)}} D z_2

    for `ivon` and `swag` respectively, where the :math:`z` are standard normal numbers. They depend on
    the key and on the path of each leaf, so sharded params get the same numbers as unsharded params.

    Args:
      opt_state: The state of an optimizer with `optperm.ivon` or `optperm.swag` anywhere in it.
      params: The current params: the mean :math:`m` of `ivon`.
      key: A random key, or an int. Pass each replica its own key, for example
        `jax.random.fold_in(key, jax.lax.axis_index(axis_name))`.
      num_draws: The number of draws to stack along a leading axis; None for one draw without this axis.

    Returns:
      A tree like params with their dtypes, except that 16-bit params become float32, because 16 bits
      would round the noise. Params that a mask leaves out are taken from `params`. Traced draws of
      `swag` are NaN before the first collection.

    Example:
      >>> import jax, jax.numpy as jnp, optperm
      >>> w = jnp.zeros(1000)
      >>> opt_state = optperm.ivon(0.1, num_data=25.0, hess_init=4.0, weight_decay=1e-6).init(w)
      >>> draws = optperm.bayes.sample_params(opt_state, w, jax.random.key(0), num_draws=100)
      >>> draws.shape, round(float(draws.std()), 2)  # 1 / sqrt(25 * 4)
      ((100, 1000), 0.1)

    Notes:
      Each replica in `jax.shard_map` needs its own key; otherwise all of them draw the same noise.

      For a model of `flax.nnx`, pass `nnx.state(model, nnx.Param)`; the draws have the same form.

      If `optax.partition` contains two of these methods, draw from them one after the other: pass the
      state of one part, then the state of the other part with the first draw as the params.

      After n collections, `swag` has min(n, K) deviations, and this number replaces K above. After a
      single collection, all draws are equal. With rank 0, only :math:`\Sigma_{\mathrm{diag}}` counts,
      without the factor 1/2.

      Before the first step of `ivon`, the draws have the variance
      :math:`1 / (\lambda (h_0 + \delta))`.

    Raises:
      TypeError: If `key` is neither an int nor a key, or `num_draws` is not an int.
      ValueError: If `opt_state` does not contain exactly one state of these methods; if params do not
        match the state; if `swag` has collected no params yet; or if `ivon` is inside
        `optax.MultiSteps`, which would mix the gradients of several draws: use the mean loss over
        microbatches at one draw, or `mc_samples`.
    """
    checks.check_key("key", key)
    if num_draws is not None:
        checks.check_static_count("num_draws", num_draws)
    state: Any = find_state(opt_state, (IvonState, SwagState), method="ivon or optperm.swag")
    _check_one_model(state)
    for accumulating in find_states(opt_state, optax.MultiStepsState):
        if find_states(accumulating, IvonState):
            raise ValueError(
                "ivon inside optax.MultiSteps would mix the gradients of several draws: take the mean "
                "loss over microbatches at one draw, or use mc_samples."
            )
    if isinstance(state, SwagState):
        _check_collected(state)
    # find_state returns plain arrays too
    given, params = params, without_variables(params)
    mean = state.momentum if isinstance(state, IvonState) else state.mean
    seen = mask_like(params, mean)
    source = "the optimizer state"
    checks.check_same_tree("params", seen, mean, source=source, dtypes=False)
    for outer in find_states(opt_state, RemainderState):
        if isinstance(outer.inner, IvonState):
            # update compares the draw with m in more than 16 bits
            seen = join_params(seen, outer.remainder)

    def draw(key: jax.Array) -> Params:
        if isinstance(state, IvonState):
            return in_variables(state.draw(fill_masked(seen, params), key), given)
        threefry = jax.random.key_data(jax.random.key(jax.random.bits(key), impl="threefry2x32"))
        return in_variables(fill_masked(_draw_swag(state, seen, threefry), params), given)

    typed = make_key(key)
    return draw(typed) if num_draws is None else jax.vmap(draw)(jax.random.split(typed, num_draws))


def posterior_mean(opt_state: Any) -> Params:
    """Return the posterior mean of `optperm.swag`, the result of stochastic weight averaging.

    For `optperm.ivon`, the params themselves are the posterior mean.

    Args:
      opt_state: The state of an optimizer with `optperm.swag` anywhere in it.

    Returns:
      A tree like the params that `optperm.swag` sees, in float32 or wider. Other params, such as another
      part of `optax.partition`, are an `optax.MaskedNode`. A traced mean is NaN before the first
      collection.

    Example:
      >>> import jax.numpy as jnp, optperm
      >>> tx = optperm.swag(every=1)
      >>> opt_state = tx.init(jnp.zeros(2))
      >>> _, opt_state = tx.update(jnp.zeros(2), opt_state, jnp.array([1.0, 2.0]))
      >>> optperm.bayes.posterior_mean(opt_state).tolist()
      [1.0, 2.0]

    Raises:
      ValueError: If `opt_state` does not contain exactly one `SwagState`, the state has an axis of
        models, or `swag` has collected no params yet.
    """
    state = find_state(opt_state, SwagState, method="swag")
    _check_one_model(state)
    _check_collected(state)
    return _mean_if_collected(state)


def _check_one_model(state: IvonState | SwagState) -> None:
    if jnp.ndim(state.count):
        raise ValueError(
            "opt_state has an axis of models: call this function under jax.vmap, as in training."
        )


def _check_collected(state: SwagState) -> None:
    if can_be_seen(state.num_models) and not state.num_models:
        raise ValueError(
            "swag has collected no params yet: update collects finite params at steps start, start + "
            "every, ..."
        )


def _mean_if_collected(state: SwagState) -> Params:
    """Return the mean; if a traced state has collected no params, NaN."""
    return jax.tree.map(lambda mean: jnp.where(state.num_models > 0, mean, jnp.nan), state.mean)


def _draw_swag(state: SwagState, params: Params, key: jax.Array) -> Params:
    """Draw from the diagonal, and from the span of the last deviations if the rank is above 0."""
    rank = next((leaf.shape[0] for leaf in jax.tree.leaves(state.deviations)), 0)
    n = state.num_models
    columns = jnp.minimum(n, rank)
    of_deviations, of_entries = jax.random.split(as_key(key))
    z = normal_like(jax.random.key_data(of_entries), params)

    def draw(mean: jax.Array, squares: jax.Array, rows: jax.Array, z: jax.Array) -> jax.Array:
        # Sigma_diag is the mean square, and has the weight 1/2 if there are deviations
        weight = 0.5 if rank else 1.0
        variance = weight * squares / jnp.maximum(n, 1).astype(squares.dtype)
        theta = mean + jnp.sqrt(variance) * z.astype(mean.dtype)
        if not rank:
            return theta
        # D z_2 / sqrt(2 (K - 1)) has the same z_2 for all leaves; rows without a deviation are zero
        z_2 = jax.random.normal(of_deviations, (rank,), rows.dtype)
        scale = jnp.sqrt(2 * jnp.maximum(columns - 1, 1).astype(rows.dtype))
        return theta + jnp.tensordot(z_2 / scale, rows, axes=1)

    return jax.tree.map(draw, _mean_if_collected(state), state.squares, state.deviations, z)
