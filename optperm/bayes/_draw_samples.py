"""Run chains of a stochastic optimizer whose iterates sample a distribution."""

from __future__ import annotations

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optperm.bayes._chains import SAMPLERS, Samples, StepFn, check_has_params, make_runner
from optperm.bayes._report import warn_of_draws
from optperm.core import checks
from optperm.core.keys import make_key
from optperm.core.shapes import Params
from optperm.core.shardings import can_be_seen
from optperm.core.states import check_runs, find_states
from optperm.core.trees import without_variables


def draw_samples(
    step: StepFn,
    params: Params,
    opt_state: Any,
    key: int | jax.Array,
    *,
    num_chains: int,
    num_draws: int,
    thinning: int = 1,
    burn_in: int = 0,
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
      burn_in: The number of steps of each chain before the steps of the first draw.
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
