"""Check conditions of a sampler on its loss and on its gradients, before the first step."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optperm.core.fresh_jit import fresh_jit
from optperm.core.noise import normal_like
from optperm.core.shapes import Params
from optperm.evaluation import evaluate, gets_gradient

Loss = Callable[[Any, Any], jax.Array]
# The norms of the gradients whose way to the sampler is followed, below and above common limits.
_NORMS = 1e-2, 1e2


def sees_gradient(
    tx: optax.GradientTransformationExtraArgs,
    loss: Loss,
    params: Params,
    batch: Any,
    key: Any,
) -> bool | None:
    """Return whether the samplers of an optimizer get the gradient of the loss; None if none looks.

    If a transformation replaces the gradient by another array, gradients of short and long norms are
    compared in two steps, at the params and at a random point near them, because momentum does not
    change a first gradient. A control variate passes, because the batch counts as all examples, so its
    correction is zero.

    Args:
      tx: The optimizer.
      loss: The mean loss over a batch.
      params: The params.
      batch: A batch of the size that the optimizer expects.
      key: A random key.
    """

    def look(loss: Loss, opt_state: Any, params: Any, batch: Any) -> tuple[Any, Any]:
        one = jax.tree.map(lambda leaf: leaf[:1], batch)
        e = evaluate(loss, params, batch, example=one)
        # The step of the sampler repeats the warnings of its transformations
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            full_grad_fn = e.extra_args["grad_fn"]
            return gets_gradient(tx, opt_state, params, e, full_grad_fn=full_grad_fn)

    known: list[Any] = []
    jax.eval_shape(lambda p, b: known.append(look(loss, tx.init(p), p, b)[0]), params, batch)
    if not isinstance(known[0], jax.core.Tracer):
        return known[0]

    def compare(params: Any, batch: Any, z: Any) -> jax.Array:
        found = jnp.ones([], jnp.bool_)
        points = params, jax.tree.map(lambda p, z: p + z.astype(p.dtype), params, z)
        norm = jnp.stack([optax.tree.norm(evaluate(loss, at, batch).grad) for at in points]).max()
        for wanted in _NORMS:
            scaled = functools.partial(_scale, loss, jnp.where(norm > 0, wanted / norm, 1.0))
            opt_state = tx.init(params)
            for at in points:
                is_same, opt_state = look(scaled, opt_state, at, batch)
                found &= jnp.asarray(is_same)
        return found

    z = normal_like(jax.random.key_data(key), params)
    return bool(fresh_jit(compare)(params, batch, z))


def _scale(loss: Loss, factor: jax.Array, params: Any, batch: Any) -> jax.Array:
    value = loss(params, batch)
    return value * factor.astype(value.dtype)
