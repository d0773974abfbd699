"""Measure the noise of the batches at draws, for reports."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optperm.bayes._chains import Samples
from optperm.bayes._constant_sgd import ConstantSgdState
from optperm.bayes._correlation import times_rows
from optperm.bayes._covariance import BatchGradients, Outer, per_example
from optperm.bayes._forms import Diagonal, Form, inner
from optperm.bayes._kernel import NoiseKernel
from optperm.bayes._langevin import SghmcState, SgldState
from optperm.bayes._remainders import RemainderState
from optperm.bayes._report import is_given
from optperm.core.current import jit_current
from optperm.core.dtypes import accumulation_dtype
from optperm.core.noise import normal_like
from optperm.core.shardings import take_rows
from optperm.core.states import find_states
from optperm.evaluation import evaluate

# The number of draws at which the noise of the batches is measured.
_LOOKS = 32
# The minimum number of examples if the noise is compared with the noise of a kernel.
_EXAMPLES = 2000
# The number of batches per draw, if the noise is measured after other methods.
_BATCHES = 8
# The number of power iterations for the maximum eigenvalue of the noise.
_PRODUCTS = 16


def _is_langevin_alone(opt_state: Any) -> bool:
    """Return whether an optimizer is SGLD or SGHMC without other states, such as a state of svrg."""
    found = find_states(opt_state, (SgldState, SghmcState))
    wrappers = find_states(opt_state, RemainderState)
    remainders = [wrapper.remainder for wrapper in wrappers]
    return len(found) == 1 and len(jax.tree.leaves((found, remainders))) == len(
        jax.tree.leaves(opt_state)
    )


def measure_batch_noise(
    covariance_fn: Callable[..., Any],
    update_covariance_fn: Callable[..., Any],
    samples: Samples,
    batch_size: int,
    key: jax.Array,
) -> Samples:
    """Return the samples, with the noise of the batches if a report needs it.

    Args:
      covariance_fn: `batch_covariance` without its last three arguments.
      update_covariance_fn: `update_covariance` without its last four arguments.
      samples: The samples.
      batch_size: S.
      key: A random key.
    """
    opt_state = samples.last_opt_state
    if len(find_states(opt_state, (SgldState, SghmcState))) == 1:
        draws, keys, chains = _choose_draws(samples.params, _LOOKS, key)
        if not _is_langevin_alone(opt_state):
            like = jax.tree.map(lambda leaf: leaf[0], samples.last_params)
            last = samples.last_params, opt_state
            states = jax.tree.map(lambda leaf: leaf[chains], last)
            draws = jax.tree.map(lambda draw, p: draw.astype(p.dtype), draws, like)
            if not _covers(update_covariance_fn, draws, keys, states):
                return samples
            covariance_fn = functools.partial(update_covariance_fn, states=states)
        measure = functools.partial(_diagonal_and_maximum, covariance_fn)
        diagonal, norm = jit_current(measure)(draws, keys)
        return samples._replace(batch_noise=diagonal, batch_noise_norm=norm)
    kernel = _given_kernel(opt_state)
    if kernel is None:
        return samples

    def in_basis(basis: Form, draws: Any, keys: jax.Array) -> Any:
        return basis.variances(covariance_fn(draws, keys, basis.covariance))

    draws, keys, _ = _choose_draws(samples.params, max(_LOOKS, _EXAMPLES // batch_size), key)
    return samples._replace(batch_noise=jit_current(in_basis)(kernel.basis, draws, keys))


def _covers(update_covariance_fn: Callable[..., Any], draws: Any, keys: Any, states: Any) -> bool:
    """Return whether the sampler has all params, none of which are masked."""
    found = jax.eval_shape(
        functools.partial(update_covariance_fn, outer=Diagonal().outer), draws, keys, states=states
    )
    structure: Any = jax.tree.structure(draws)
    return structure == jax.tree.structure(found)


def update_covariance(
    tx: optax.GradientTransformationExtraArgs,
    loss: Callable[[Any, Any], jax.Array],
    data: Any,
    num_data: int,
    batch_size: int,
    draws: Any,
    keys: jax.Array,
    outer: Outer,
    states: Any,
) -> Any:
    """Return `outer`'s part of the covariance of the updates that a sampler gets after other methods.

    Several batches per draw are compared, because a method such as `optperm.svrg` changes the gradients
    of whole batches. `states` are the last params and optimizer states of the draws' chains. They take
    one more step first, so a snapshot that is due is not taken at the draw itself.
    """

    def update(params: Any, state: Any, key: jax.Array) -> tuple[Any, Any]:
        rows = jax.random.randint(key, (batch_size,), 0, num_data)
        e = evaluate(loss, params, jax.tree.map(lambda leaf: take_rows(leaf, rows), data))
        seen: list[Any] = []
        extras = e.extra_args | {
            "full_grad_fn": jax.grad(lambda p: loss(p, data)),
            "watch": seen.append,
        }
        _, state = tx.update(e.grad, state, params, **extras)
        # In optax.MultiSteps, the sampler cannot be watched.
        got = seen[0] if seen else None
        return optax.tree.cast(got, accumulation_dtype(got)), state

    def of_draw(each: tuple[Any, tuple[Any, Any], jax.Array]) -> Any:
        params, (last_params, state), key = each
        keys = jax.random.split(key, _BATCHES + 1)
        _, state = update(last_params, state, keys[-1])
        rows = jax.lax.map(lambda key: update(params, state, key)[0], keys[:-1])
        deviations = jax.tree.map(lambda g: g - jnp.mean(g, axis=0, keepdims=True), rows)
        return jax.tree.map(lambda c: c / (_BATCHES - 1), outer(deviations))

    found = jax.lax.map(of_draw, (draws, states, keys))
    return jax.tree.map(lambda r: jnp.mean(r, axis=0), found)


def batch_covariance(
    loss: Callable[[Any, Any], jax.Array],
    data: Any,
    num_data: int,
    batch_size: int,
    draws: Any,
    keys: jax.Array,
    outer: Outer,
) -> Any:
    """Return `outer`'s part of R, a batch gradient's covariance: the mean over one batch per draw."""

    def of_draw(params: Any, key: jax.Array) -> Any:
        rows = jax.random.randint(key, (batch_size,), 0, num_data)
        e = evaluate(loss, params, jax.tree.map(lambda leaf: take_rows(leaf, rows), data))
        batch = BatchGradients(params, e.grad, e.extra_args, batch_size, None, None)
        c_hat, _ = per_example(batch, outer)
        return jax.tree.map(lambda c: c / batch_size, c_hat)

    found = jax.lax.map(lambda each: of_draw(*each), (draws, keys))
    return jax.tree.map(lambda r: jnp.mean(r, axis=0), found)


def _choose_draws(draws: Any, most: int, key: jax.Array) -> tuple[Any, jax.Array, np.ndarray]:
    """Return at most `most` draws of all chains on one axis, a key for each draw, and its chain."""
    num_chains, num_draws = jax.tree.leaves(draws)[0].shape[:2]
    size = num_chains * num_draws
    chosen = np.linspace(0, size - 1, min(size, most)).astype(np.int32)
    some = jax.tree.map(lambda leaf: leaf.reshape(size, *leaf.shape[2:])[chosen], draws)
    return some, jax.random.split(key, len(chosen)), chosen // num_draws


def _diagonal_and_maximum(
    covariance_fn: Callable[..., Any], draws: Any, keys: jax.Array
) -> tuple[Any, jax.Array]:
    """Return the diagonal and the maximum eigenvalue of R.

    If there are more params than examples in these batches, the estimate of the maximum eigenvalue
    tends to be too large.
    """

    def step(v: Any, _: None) -> tuple[Any, jax.Array]:
        # v <- R v / |R v|, and |R v| tends to the maximum eigenvalue
        product = covariance_fn(draws, keys, functools.partial(times_rows, v=v))
        norm = jnp.sqrt(inner(product, product))
        scale = jnp.where(norm > 0, norm, 1.0)
        return jax.tree.map(lambda x: x / scale.astype(x.dtype), product), norm

    one = jax.tree.map(lambda leaf: leaf[0].astype(accumulation_dtype(leaf)), draws)
    start = normal_like(jax.random.key_data(keys[0]), one)
    _, norms = jax.lax.scan(step, start, length=_PRODUCTS)
    return covariance_fn(draws, keys, Diagonal().outer), norms[-1]


def _given_kernel(opt_state: Any) -> NoiseKernel | None:
    """Return the first chain's kernel if it was passed and covers all params, else None."""
    states = find_states(opt_state, ConstantSgdState)
    if len(states) != 1 or not is_given(states[0]) or find_states(opt_state, optax.MaskedState):
        return None
    return jax.tree.map(lambda leaf: leaf[0], states[0].kernel)
