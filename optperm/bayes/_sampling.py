"""Run chains of a stochastic optimizer whose iterates sample a distribution."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optperm.bayes._constant_sgd import ConstantSgdState
from optperm.bayes._remainders import wide_params
from optperm.bayes._report import NOISY, SAMPLERS, warn_of_draws
from optperm.bayes._samples import Samples, check_has_params
from optperm.core import checks
from optperm.core.dtypes import cast_like
from optperm.core.fresh_jit import fresh_jit_once
from optperm.core.keys import is_key, make_key
from optperm.core.noise import fold
from optperm.core.shapes import Params
from optperm.core.shardings import can_be_seen
from optperm.core.states import check_runs, find_states
from optperm.core.trees import without_variables

# (params, opt_state, key) -> (params, opt_state), on a batch drawn with the key.
StepFn = Callable[[Params, Any, jax.Array], tuple[Params, Any]]


def draw_samples(
    step: StepFn,
    params: Params,
    opt_state: Any,
    key: int | jax.Array,
    *,
    num_chains: int,
    num_draws: int,
    thinning: int = 1,
    burn_in: int | None = None,
    stacked: bool = False,
    first_step: int | jax.Array | None = None,
) -> Samples:
    r"""Run several chains of a stochastic optimizer, and store every k-th iterate of each chain.

    Draw i of a chain, counted from 0, is :math:`\theta_{w + (i + 1) k}`, where k is `thinning` and w is
    `burn_in`. Chain c takes its step t with the key `fold_in(fold_in(key, c), t)`, for any number of
    chains and draws. A run in two parts therefore equals a single run::

        first = draw_samples(step, params, opt_state, key, num_chains=4, num_draws=50)
        second = draw_samples(step, first.last_params, first.last_opt_state, key,
                              num_chains=4, num_draws=50, stacked=True, first_step=first.next_step)

    Args:
      step: A function `step(params, opt_state, key) -> (params, opt_state)` that takes one step on a
        batch drawn with the key. It must be traceable, and keep the structure, shapes and dtypes of its
        arguments.
      params: The start of all chains; with `stacked`, one start per chain on a leading axis.
      opt_state: The first optimizer state; with `stacked`, one state per chain on a leading axis.
      key: A random key, or an int.
      num_chains: The number of chains.
      num_draws: The number of draws of each chain.
      thinning: The number of steps from one draw to the next.
      burn_in: The number of steps of each chain before the steps of the first draw. None for the number
        of steps in which `optperm.constant_sgd` still learns, or for 0 with other samplers.
      stacked: Whether the leaves of `params` and `opt_state` have a leading axis of chains.
      first_step: The number t of the first step: `next_step` of earlier `Samples` to continue them, or 0
        for steps with another key. None for 0, with a warning if the sampler has taken steps.

    Returns:
      `Samples`. All draws are held in memory.

    Example:
      >>> import jax, jax.numpy as jnp, optperm
      >>> def step(params, opt_state, key):  # constant SGD on a noisy parabola
      ...     return params - 0.1 * (params + jax.random.normal(key)), opt_state
      >>> samples = optperm.bayes.draw_samples(
      ...     step, jnp.zeros(()), (), jax.random.key(0), num_chains=4, num_draws=2000, thinning=20
      ... )
      >>> samples.params.shape
      (4, 2000)
      >>> bool(abs(jnp.var(samples.params) - 0.1 / (2 - 0.1)) < 0.005)  # the stationary variance
      True

    Notes:
      `jax.vmap` maps over the chains, and `step` runs in a single `jax.lax.scan`, so it is compiled
      once. Each call traces `step` again, so `step` sees the current values of outside variables.
      However, JAX keeps the traces of functions that `step` passes to `jax.lax.scan` and similar
      functions. A program is compiled only if it differs from earlier programs. Draws of 16-bit params
      are in float32, with their remainders (`optperm.bayes.RemainderState`), without the variance of
      rounding.
      `optperm.bayes.sample` runs such a loop for you.

    Raises:
      TypeError: If an argument has the wrong type.
      ValueError: If a count is below 1, or `burn_in` or `first_step` is below 0; if a sampler is in a
        phase of `optperm.switch_after` that is not running; if leaves have an axis of chains without
        `stacked`, or no axis of length `num_chains` with `stacked`; or if `step` changes the structure,
        shapes or dtypes of its arguments.
    """
    checks.check_key("key", key)
    checks.check_static_count("num_chains", num_chains)
    checks.check_static_count("num_draws", num_draws)
    checks.check_count("thinning", thinning)
    if burn_in is not None:
        checks.check_count("burn_in", burn_in, minimum=0)
    if first_step is not None:
        checks.check_count("first_step", first_step, minimum=0)
    params, opt_state = without_variables(params), without_variables(opt_state)
    check_has_params(params)
    samplers: list[Any] = find_states(opt_state, SAMPLERS)
    if not stacked and any(jnp.ndim(state.count) for state in samplers):
        raise ValueError("opt_state has an axis of chains: pass stacked=True and first_step=.")
    check_runs(opt_state, SAMPLERS, method="The sampler")
    if first_step is None:
        _warn_of_repeated_keys(samplers)
        first_step = 0
    if burn_in is None:
        burn_in = steps_to_learn(opt_state)
    run = make_runner(step, num_chains=num_chains, num_draws=num_draws, stacked=stacked)
    counts = {"thinning": thinning, "burn_in": burn_in, "first_step": first_step}
    samples = run(params, opt_state, make_key(key), **counts)
    warn_of_draws(samples)
    return samples


def _warn_of_repeated_keys(samplers: list[Any]) -> None:
    """Warn if samplers have taken steps, whose keys the next steps may repeat."""
    counts = [np.max(state.count) for state in samplers if can_be_seen(state.count)]
    if max(counts, default=0) > 0:
        warnings.warn(
            f"The sampler has taken {max(counts)} steps, but first_step is not given, so the next steps "
            "repeat the keys, and therefore the batches, of earlier steps with this key: pass "
            "first_step=samples.next_step, or first_step=0 with another key.",
            stacklevel=3,
        )


def steps_to_learn(opt_state: Any) -> int:
    """Return the number of steps in which a sampler still learns; 0 if the state is traced."""
    left = [
        int(np.max(np.asarray(state.freeze_after) - np.asarray(state.count)))
        for state in find_states(opt_state, ConstantSgdState)
        if can_be_seen(state.freeze_after) and can_be_seen(state.count)
    ]
    return max(0, *left) if left else 0


def make_runner(
    step: StepFn, *, num_chains: int, num_draws: int, stacked: bool
) -> Callable[..., Samples]:
    """Return `run(params, opt_state, key, **counts)`, which neither checks arguments nor warns.

    A runner traces the step once, and uses one program for all calls.
    """
    programs: dict[tuple[bool, ...], Callable[..., Samples]] = {}

    def run(params: Params, opt_state: Any, key: jax.Array, **counts: int | jax.Array) -> Samples:
        leaves, form = jax.tree.flatten(opt_state)
        # A count that all chains share stays one number. With one count per chain, vmap would turn a
        # conditional into a select, which runs both branches in every step
        is_shared = tuple(not stacked or _is_shared(leaf, num_chains) for leaf in leaves)
        if stacked:
            pairs = zip(leaves, is_shared, strict=True)
            opt_state = jax.tree.unflatten(form, [leaf[0] if one else leaf for leaf, one in pairs])
        if is_shared not in programs:
            static = num_chains, num_draws, stacked, is_shared
            programs[is_shared] = fresh_jit_once(functools.partial(_run_chains, step, *static))
        numbers = {name: jnp.asarray(count, jnp.int32) for name, count in counts.items()}
        return programs[is_shared](params, opt_state, key, numbers)

    return run


def _run_chains(
    step: StepFn,
    num_chains: int,
    num_draws: int,
    stacked: bool,
    is_shared: tuple[bool, ...],
    params: Params,
    opt_state: Any,
    key: jax.Array,
    counts: dict[str, jax.Array],
) -> Samples:
    thinning, burn_in, first_step = (counts[k] for k in ("thinning", "burn_in", "first_step"))
    chains = jnp.arange(num_chains, dtype=jnp.int32)
    chain_keys = jax.vmap(lambda chain: jax.random.fold_in(key, chain))(chains)
    shared = jax.tree.unflatten(jax.tree.structure(opt_state), is_shared)
    opt_state, axes = _separate_noise(opt_state, shared, chain_keys)

    def run_chain(chain_key: jax.Array, params: Params, opt_state: Any) -> tuple[Any, Any, Any]:

        def draw(carry: tuple[Any, Any], index: jax.Array) -> tuple[tuple[Any, Any], Any]:
            # The loop of the first draw includes the burn-in, so only one loop compiles the step
            end = burn_in + (index + 1) * thinning
            start = jnp.where(index == 0, 0, end - thinning)

            def take_step(t: jax.Array, now: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
                params, opt_state, means = now
                returned = step(params, opt_state, jax.random.fold_in(chain_key, first_step + t))
                params, opt_state = _cast_step(returned, params, opt_state)
                # The mean over the steps of this draw; the first of them forgets the burn-in
                place = jnp.maximum(t - (end - thinning) + 1, 1).astype(jnp.float32)
                numbers = numbers_of(opt_state)
                means = jax.tree.map(lambda mean, x: mean + (x - mean) / place, means, numbers)
                return params, opt_state, means

            zeros = optax.tree.zeros_like(numbers_of(carry[1]))
            *last, means = jax.lax.fori_loop(start, end, take_step, (*carry, zeros))
            return (last[0], last[1]), (wide_params(*last), means)

        # Remove weak types, since a step need not return them
        carry = cast_like(params, params), cast_like(opt_state, opt_state)
        carry, (draws, means) = jax.lax.scan(draw, carry, jnp.arange(num_draws, dtype=jnp.int32))
        return (draws, means), *carry

    (draws, means), last_params, last_opt_state = jax.vmap(
        run_chain, in_axes=(0, 0 if stacked else None, axes)
    )(chain_keys, params, opt_state)
    next_step = first_step + burn_in + num_draws * thinning
    starts = params
    if not stacked:
        starts = jax.tree.map(lambda p: jnp.broadcast_to(p, (num_chains, *jnp.shape(p))), params)
    step_sizes, temperatures = means or (None, None)
    return Samples(
        params=draws,
        last_params=last_params,
        last_opt_state=last_opt_state,
        next_step=next_step,
        thinning=thinning,
        starts=starts,
        step_sizes=step_sizes,
        temperatures=temperatures,
    )


def numbers_of(opt_state: Any) -> tuple[jax.Array, ...]:
    """Return the step size and the temperature of the last step of the only sampler, or ()."""
    states: list[Any] = find_states(opt_state, NOISY)
    return states[0].numbers() if len(states) == 1 else ()


def _is_shared(leaf: Any, num_chains: int) -> bool:
    """Return whether a leaf has one integer or bool per chain, the same in all chains."""
    if isinstance(leaf, jax.core.Tracer) or jnp.shape(leaf) != (num_chains,):
        return False
    if is_key(leaf) or jnp.issubdtype(leaf.dtype, jnp.inexact):
        return False
    values = np.asarray(leaf)
    return bool(np.all(values == values[0]))


def _separate_noise(opt_state: Any, shared: Any, chain_keys: jax.Array) -> tuple[Any, Any]:
    """Return the states of all chains, each with its own key, and the axes of the states.

    Args:
      opt_state: The states, in which some leaves may be shared by all chains.
      shared: Whether each leaf is shared.
      chain_keys: The keys of the chains.
    """

    def separate(node: Any, shared: Any) -> tuple[Any, Any]:
        if not isinstance(node, NOISY):
            return node, shared
        numbers = jax.vmap(lambda key: jax.random.bits(key, dtype=jnp.uint32))(chain_keys)
        keys = jnp.broadcast_to(node.key, (len(chain_keys), node.key.shape[-1]))
        own = jax.vmap(fold)(keys, numbers)
        if not shared.key:
            # Chains that continue keep their keys, which differ. If some keys are equal, all but the
            # first of these are replaced; if all keys are equal, all are replaced
            equal = jnp.all(keys[:, None] == keys[None], axis=-1)
            is_copy = jnp.any(jnp.tril(equal, k=-1), axis=1) | jnp.all(equal[0]) & (len(keys) > 1)
            own = jnp.where(is_copy[:, None], own, keys)
        return node._replace(key=own), shared._replace(key=False)

    def is_noisy(node: Any) -> bool:
        return isinstance(node, NOISY)

    nodes, form = jax.tree.flatten(opt_state, is_leaf=is_noisy)
    flags = jax.tree.leaves(shared, is_leaf=is_noisy)
    pairs = [separate(*pair) for pair in zip(nodes, flags, strict=True)]
    states, flags = ([pair[i] for pair in pairs] for i in range(2))
    axes = jax.tree.map(lambda one: None if one else 0, jax.tree.unflatten(form, flags))
    return jax.tree.unflatten(form, states), axes


def _cast_step(returned: Any, params: Params, opt_state: Any) -> tuple[Any, Any]:
    """Return a step's result without weak types; raise if its structure, shapes or dtypes changed."""
    new_params, new_state = without_variables(returned)
    source = "its arguments"
    checks.check_same_tree("the params that step returns", new_params, params, source=source)
    checks.check_same_tree("the opt_state that step returns", new_state, opt_state, source=source)
    return cast_like(new_params, params), cast_like(new_state, opt_state)
