"""Evaluate a loss within a transformation, for loops that pass no extra arguments."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optperm.core import checks
from optperm.core.dtypes import cast_like
from optperm.core.keys import as_key, is_key, key_data
from optperm.core.shapes import Array, Int32, Params, UInt32, Updates
from optperm.core.shardings import take_rows
from optperm.core.states import DRAW_STREAM, draw_params
from optperm.core.transformation import known_extra_args, wrapper
from optperm.core.trees import fill_masked, mask_like
from optperm.evaluation import LossFn, evaluate


class WithLossState(NamedTuple):
    """State of `with_loss`.

    Attributes:
      count: Number of steps taken.
      key: Data of the threefry key from which batches, examples and draws of params are drawn.
      inner_state: State of `inner`.
    """

    count: Int32[Array, ""]  # type: ignore[assignment]
    key: UInt32[Array, "2"]
    inner_state: Any


def with_loss(
    inner: optax.GradientTransformation,
    loss_fn: LossFn,
    data: Any,
    batch_size: int | None = None,
    key: int | jax.Array = 0,
) -> optax.GradientTransformationExtraArgs:
    r"""Evaluate a loss within `update`, for loops that pass no extra arguments.

    Each step takes a batch B, either all data or :math:`|B|` examples drawn with replacement, and calls

    .. math::
      \text{inner.update}(\nabla L_B(\theta), s, \theta, \text{value} = L_B(\theta), \ldots), \qquad
      L_B(\theta) = \frac{1}{|B|} \sum_{i \in B} \ell(\theta, x_i)

    with all results of `optperm.evaluate` for this batch.

    Args:
      inner: The whole optimizer, because a transformation before `with_loss` in a chain has no effect.
      loss_fn: A function `loss_fn(params, batch)` that returns the scalar mean loss over the leaves'
        leading axis.
      data: A tree of arrays with a leading axis of examples. All examples share leaves of rank 0; a
        typed random key of rank 0 is folded with the number of the step.
      batch_size: :math:`|B|`; None for all data in each step.
      key: The random key of the batches: an int or a `jax.random.key`.

    Returns:
      A transformation whose state is a `WithLossState`. Its `update` needs `params`, and ignores the
      given gradient.

    Example:
      >>> import jax, jax.numpy as jnp, optax, optperm
      >>> x = jax.random.normal(jax.random.key(0), (64, 3))
      >>> loss_fn = lambda w, batch: jnp.mean((batch @ (w - jnp.arange(3.0))) ** 2)
      >>> tx = optax.chain(optperm.recursive_gradient(0.1), optax.sgd(0.1))
      >>> tx = optperm.with_loss(tx, loss_fn, x, batch_size=16)
      >>> w = jnp.zeros(3)
      >>> opt_state = tx.init(w)
      >>> @jax.jit
      ... def step(w, opt_state):  # a loop that knows nothing of the loss
      ...     updates, opt_state = tx.update(jax.grad(loss_fn)(w, x), opt_state, w)
      ...     return optax.apply_updates(w, updates), opt_state
      >>> for _ in range(60):
      ...     w, opt_state = step(w, opt_state)
      >>> bool(jnp.max(jnp.abs(w - jnp.arange(3.0))) < 0.01)
      True

    Notes:
      This transformation replaces extra arguments that `optperm.evaluate` also makes, because a method
      needs all of them for the same loss and batch. It adds two arguments: `full_grad_fn`, the gradient
      over all data, for methods that take snapshots within a step, and `example_grad_fn`, the gradient
      of one more example.

      Each step computes one gradient in addition to the loop's own gradient. The data stay in memory as
      long as the transformation, and are constants in each program that calls `update`. Replicas and
      chains whose states have the same key draw the same batches.

    Raises:
      TypeError: If the loss is not a real scalar, `batch_size` is not an integer, or `key` is neither an
        int nor a random key.
      ValueError: If `batch_size` is below 1, or the leaves of `data` differ in length or are empty.
    """
    inner = checks.as_optimizer("inner", inner)
    data = jax.tree.map(jnp.asarray, data)
    size = checks.count_examples("data", data, has_scalars=True)
    if batch_size is not None:
        checks.check_static_count("batch_size", batch_size)
    checks.check_key("key", key)

    def draw(key: jax.Array, number: int) -> Any:
        indices = jax.random.randint(key, (number,), 0, size)
        return jax.tree.map(lambda leaf: take_rows(leaf, indices) if leaf.ndim else leaf, data)

    def init(params: Params) -> WithLossState:
        return WithLossState(jnp.zeros([], jnp.int32), key_data(key), inner.init(params))

    def update(
        updates: Updates, state: WithLossState, params: Params, **extra_args: Any
    ) -> tuple[Updates, WithLossState]:
        del updates
        fold_in = jax.random.fold_in
        keys = jax.random.split(fold_in(as_key(state.key), state.count))

        # A key in the data is different in each step.
        def fold_keys(batch: Any) -> Any:
            return jax.tree.map(
                lambda leaf: fold_in(leaf, state.count) if is_key(leaf) and not leaf.ndim else leaf,
                batch,
            )

        batch = fold_keys(data if batch_size is None else draw(keys[0], batch_size))
        # Evaluate L_B and its gradient, and the gradient of an example drawn independently of B.
        # A method such as ivon needs L_B and its gradient at a draw of the params.
        drawn = draw_params(state.inner_state, params, fold_in(keys[0], DRAW_STREAM))
        at = params if drawn is None else drawn
        e = evaluate(loss_fn, at, batch, example=fold_keys(draw(keys[1], 1)))

        def full_grad_fn(at: Params) -> Updates:
            whole = fill_masked(at, params)  # inside optax.partition a method knows only its part
            return mask_like(evaluate(loss_fn, whole, fold_keys(data)).grad, at)

        extras = extra_args | e.extra_args | {"full_grad_fn": full_grad_fn}
        extras |= {} if drawn is None else {"draw": drawn}
        extras = known_extra_args(inner, extras)
        moves, inner_state = inner.update(e.grad, state.inner_state, params, **extras)
        count = optax.safe_increment(state.count)
        return cast_like(moves, params), WithLossState(count, state.key, inner_state)

    return wrapper(init, update, method="with_loss")
