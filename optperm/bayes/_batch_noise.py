"""Measure the noise of the batches at draws, for reports."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optperm.bayes._batches import MOST_BYTES, Batches
from optperm.bayes._chains import Samples
from optperm.bayes._constant_sgd import ConstantSgdState
from optperm.bayes._control_variates import correct_batch
from optperm.bayes._correlation import times_rows
from optperm.bayes._covariance import BatchGradients, Outer, per_example
from optperm.bayes._forms import Diagonal, Form, inner
from optperm.bayes._kernel import NoiseKernel
from optperm.bayes._langevin import SghmcState, SgldState
from optperm.bayes._remainders import RemainderState
from optperm.bayes._report import is_given
from optperm.core.dtypes import accumulation_dtype
from optperm.core.fresh_jit import fresh_jit
from optperm.core.noise import normal_like
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
    tx: optax.GradientTransformationExtraArgs,
    loss: Callable[[Any, Any], jax.Array],
    batches: Batches,
    samples: Samples,
    key: jax.Array,
) -> Samples:
    """Return the samples, with the noise of the batches if a report needs it.

    Args:
      tx: The sampler.
      loss: The mean loss over a batch.
      batches: The batches.
      samples: The samples.
      key: A random key.
    """
    opt_state = samples.last_opt_state
    if batches.batch_size < 2:
        return samples
    if len(find_states(opt_state, (SgldState, SghmcState))) == 1:
        draws, chains = choose_draws(samples.params, _most_looks(batches, _LOOKS))
        keys = jax.random.split(key, len(chains))
        if _is_langevin_alone(opt_state):
            covariance_fn = functools.partial(batch_covariance, loss, batches)
            looked = _read_batches(batches, keys)
        elif batches.rows is None:
            return samples
        else:
            like = jax.tree.map(lambda leaf: leaf[0], samples.last_params)
            last = samples.last_params, opt_state
            looked = jax.tree.map(lambda leaf: leaf[chains], last)
            draws = jax.tree.map(lambda draw, p: draw.astype(p.dtype), draws, like)
            covariance_fn = functools.partial(update_covariance, tx, loss, batches)
            if not _covers(covariance_fn, draws, keys, looked):
                return samples
        measure = functools.partial(_diagonal_and_maximum, covariance_fn)
        diagonal, norm = fresh_jit(measure)(draws, keys, looked)
        return samples._replace(batch_noise=diagonal, batch_noise_norm=norm)
    kernel = _given_kernel(opt_state)
    if kernel is None:
        return samples

    def in_basis(basis: Form, anchor: Any, draws: Any, keys: jax.Array, looked: Any) -> Any:
        return basis.variances(
            batch_covariance(loss, batches, draws, keys, looked, basis.covariance, anchor)
        )

    most = _most_looks(batches, max(_LOOKS, _EXAMPLES // batches.batch_size))
    draws, chains = choose_draws(samples.params, most)
    keys = jax.random.split(key, len(chains))
    looked = _read_batches(batches, keys)
    found = fresh_jit(in_basis)(kernel.basis, kernel.anchor, draws, keys, looked)
    return samples._replace(batch_noise=found)


def _most_looks(batches: Batches, most: int) -> int:
    """Return the maximum number of batches that may be in memory at once, at most `most`."""
    return most if batches.read is None else max(1, min(most, MOST_BYTES // batches.num_bytes))


def _read_batches(batches: Batches, keys: jax.Array) -> Any:
    """Return a batch for each key, with a leading axis; None if batches are drawn on the device."""
    if batches.read is None:
        return None
    return jax.tree.map(lambda x: x[:, 0], batches.read(keys[:, None]))


def _covers(covariance_fn: Callable[..., Any], draws: Any, keys: Any, states: Any) -> bool:
    """Return whether the sampler has all params, none of which are masked."""
    found = jax.eval_shape(
        functools.partial(covariance_fn, outer=Diagonal().outer), draws, keys, states
    )
    structure: Any = jax.tree.structure(draws)
    return structure == jax.tree.structure(found)


def update_covariance(
    tx: optax.GradientTransformationExtraArgs,
    loss: Callable[[Any, Any], jax.Array],
    batches: Batches,
    draws: Any,
    keys: jax.Array,
    states: Any,
    outer: Outer,
) -> Any:
    """Return `outer`'s part of the covariance of the updates that a sampler gets after other methods.

    Several batches per draw are compared, because a method such as `optperm.svrg` changes the gradients
    of whole batches. `states` are the last params and optimizer states of the draws' chains. They take
    one more step first, so a snapshot that is due is not taken at the draw itself.
    """

    def update(params: Any, state: Any, key: jax.Array) -> tuple[Any, Any]:
        batch, _ = batches.split(batches.one(key))
        e = evaluate(loss, params, batch)
        seen: list[Any] = []
        extras = e.extra_args | {
            "full_grad_fn": jax.grad(lambda p: loss(p, batches.rows)),
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
    batches: Batches,
    draws: Any,
    keys: jax.Array,
    looked: Any,
    outer: Outer,
    anchor: Any = (),
) -> Any:
    """Return `outer`'s part of R, a batch gradient's covariance: the mean over one batch per draw.

    With an anchor, this is the covariance that its control variates leave.
    """

    def of_draw(each: tuple[Any, jax.Array, Any]) -> Any:
        params, key, read = each
        rows = batches.one(key) if read is None else read
        e = evaluate(loss, params, batches.split(rows)[0])
        size = batches.batch_size
        batch = BatchGradients(params, e.grad, e.extra_args, size, None, None)
        c_hat, _ = per_example(correct_batch(batch, anchor) if anchor else batch, outer)
        return jax.tree.map(lambda c: c / size, c_hat)

    found = jax.lax.map(of_draw, (draws, keys, looked))
    return jax.tree.map(lambda r: jnp.mean(r, axis=0), found)


@jax.jit
def _take_draws(draws: Any, chosen: Any) -> Any:
    """Return the draws with these numbers, where the draws of all chains are on one axis."""
    # A leaf may have no entries, so -1 would not tell the length
    return jax.tree.map(
        lambda leaf: leaf.reshape(math.prod(leaf.shape[:2]), *leaf.shape[2:])[chosen], draws
    )


def choose_draws(draws: Any, most: int) -> tuple[Any, np.ndarray]:
    """Return at most `most` draws, with those of all chains on one axis, and the chain of each."""
    num_chains, num_draws = jax.tree.leaves(draws)[0].shape[:2]
    size = num_chains * num_draws
    chosen = np.linspace(0, size - 1, min(size, most)).astype(np.int32)
    return _take_draws(draws, chosen), chosen // num_draws


def _diagonal_and_maximum(
    covariance_fn: Callable[..., Any], draws: Any, keys: jax.Array, looked: Any
) -> tuple[Any, jax.Array]:
    """Return the diagonal and the maximum eigenvalue of R.

    If there are more params than examples in these batches, the estimate of the maximum eigenvalue
    tends to be too large.
    """

    def step(v: Any, _: None) -> tuple[Any, jax.Array]:
        # v <- R v / |R v|, and |R v| tends to the maximum eigenvalue
        product = covariance_fn(draws, keys, looked, functools.partial(times_rows, v=v))
        norm = jnp.sqrt(inner(product, product))
        scale = jnp.where(norm > 0, norm, 1.0)
        return jax.tree.map(lambda x: x / scale.astype(x.dtype), product), norm

    one = jax.tree.map(lambda leaf: leaf[0].astype(accumulation_dtype(leaf)), draws)
    start = normal_like(jax.random.key_data(keys[0]), one)
    _, norms = jax.lax.scan(step, start, length=_PRODUCTS)
    return covariance_fn(draws, keys, looked, Diagonal().outer), norms[-1]


def _given_kernel(opt_state: Any) -> NoiseKernel | None:
    """Return the first chain's kernel if it was passed and covers all params, else None."""
    states: list[Any] = find_states(opt_state, ConstantSgdState)
    if len(states) != 1 or not is_given(states[0]) or find_states(opt_state, optax.MaskedState):
        return None
    return jax.tree.map(lambda leaf: leaf[0], states[0].kernel)
