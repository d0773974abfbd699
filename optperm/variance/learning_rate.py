"""A learning rate for SVRG, by the curvature of the loss and by short trials.

O. Sebbouh, N. Gazagnadou, S. Jelassi, F. Bach and R. M. Gower, "Towards closing the gap between the
theory and practice of SVRG", NeurIPS 2019.
"""

import math
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optperm.contract import checks
from optperm.evaluation import LossFn, checked_loss, evaluate
from optperm.variance.svrg import svrg

# Steps of the power iteration, and the most trials.
_STEPS, _MOST = 8, 20


def svrg_learning_rate(
    loss_fn: LossFn,
    params: optax.Params,
    data: Any,
    batch_size: int,
    *,
    num_passes: int = 6,
    chunk_size: int = 256,
    seed: int | jax.Array = 0,
) -> float:
    r"""Find the learning rate of `optax.sgd` behind `optperm.svrg`.

    With :math:`L` the largest curvature of the mean loss of n examples and :math:`L_{\max}` the largest
    one of a single example, batches of b without replacement have the expected smoothness

    .. math::
      \mathcal{L}_b = \frac{n (b - 1)}{b (n - 1)} L + \frac{n - b}{b (n - 1)} L_{\max}

    Theory asks for rates below :math:`1 / \mathcal{L}_b`, and the best ones are often far above: the
    curvature at hand is less than at `params`, or lies in other directions. So SVRG runs for some passes
    at :math:`\eta = 1 / \mathcal{L}_b`, then at twice as much for as long as that ends lower, or else at
    half as much. On five problems with batches of 1 and 16 the best rate of a grid was 1 or 2 times
    what it found, and 4 times in one of the ten, with raw features (`benchmarks/convex.py`).

    Args:
      loss_fn: As in `optperm.evaluate`: `loss_fn(params, batch)`, the scalar mean loss over the leading
        axis of the batch's leaves. A penalty belongs to the loss of each example.
      params: Where the training begins.
      data: All examples, or a sample of them: a tree of arrays of shape (n, ...).
      batch_size: b, the examples of a step.
      num_passes: Passes of a trial over the examples, with a full gradient for each two of them. With 0
        the rate is :math:`1 / \mathcal{L}_b`.
      chunk_size: How many single examples are evaluated at a time; the mean loss takes all at once.
      seed: Seed of the batches, and of the directions in which power iterations begin.

    Returns:
      The rate, a Python float.

    Example:
      >>> import jax, jax.numpy as jnp, optperm
      >>> x = 100 * jax.random.normal(jax.random.key(0), (64, 2))  # raw features
      >>> loss_fn = lambda w, batch: 0.5 * jnp.mean((batch[0] @ w - batch[1]) ** 2)
      >>> data = x, x.sum(axis=1)
      >>> rate = optperm.svrg_learning_rate(loss_fn, jnp.zeros(2), data, 1, num_passes=0)
      >>> bool(jnp.isclose(rate, 1 / jnp.max(jnp.sum(x**2, axis=1)), rtol=1e-2))  # 1 / L_max
      True
      >>> optperm.svrg_learning_rate(loss_fn, jnp.zeros(2), data, 1) / rate  # after trials
      0.25

    Raises:
      TypeError: If the loss is not a real scalar, or an argument is of the wrong type.
      ValueError: If the examples' arrays disagree in length, are fewer than a batch, or have no
        curvature.

    Warns:
      RuntimeWarning: If the largest curvature is negative: the loss is not convex at these params.

    References:
      Sebbouh et al., `Towards closing the gap between the theory and practice of SVRG
      <https://arxiv.org/abs/1908.02725>`_, NeurIPS 2019
    """
    checks.check_static_count("batch_size", batch_size)
    checks.check_static_count("chunk_size", chunk_size)
    checks.check_count("num_passes", num_passes, minimum=0)
    checks.check_seed("seed", seed)
    checks.check_real_floating("params", params)
    n = checks.count_examples("data", data)
    if n < batch_size:
        raise ValueError(f"data must hold at least batch_size={batch_size} examples, got {n}.")
    key = jax.random.key(seed)
    curvature, largest = jax.jit(_curvatures, static_argnums=(0, 4))(
        loss_fn, params, data, key, min(chunk_size, n)
    )
    if curvature < 0:
        warnings.warn(
            "svrg_learning_rate: the loss is not convex at these params: its largest curvature, "
            f"{float(curvature):.2g}, is negative. The rate is right near these params at most.",
            RuntimeWarning,
            stacklevel=2,
        )
    b, rest = batch_size, max(n - 1, 1)
    smoothness = n * (b - 1) / (b * rest) * abs(float(curvature))
    smoothness += (n - b) / (b * rest) * float(largest) if n > 1 else float(largest)
    if not 0 < smoothness < float("inf"):
        raise ValueError(f"The loss has no curvature at these params: it is {smoothness:g}.")
    start = 1 / smoothness
    if not num_passes:
        return start
    trial = _trial(loss_fn, params, data, batch_size, num_passes, key)
    rate, lowest, factor = start, trial(start), 2.0
    for index in range(_MOST):
        loss = trial(rate * factor)
        if loss < lowest:
            rate, lowest = rate * factor, loss
        elif index == 0:
            factor = 0.5
        else:
            break
    return rate


def _trial(
    loss_fn: LossFn, params: Any, data: Any, batch_size: int, num_passes: int, key: jax.Array
) -> Callable[[float], float]:
    """Return the function from a rate to the loss after some passes of SVRG, infinite for NaN."""
    n = jax.tree.leaves(data)[0].shape[0]
    steps = n // batch_size

    def full_grad_fn(w: optax.Params) -> optax.Updates:
        return jax.grad(loss_fn)(w, data)

    @jax.jit
    def run(rate: jax.Array) -> jax.Array:
        tx = optax.chain(svrg(refresh_every=2 * steps), optax.sgd(rate))

        def step(carry: Any, indices: jax.Array) -> tuple[Any, None]:
            w, state = carry
            e = evaluate(loss_fn, w, jax.tree.map(lambda leaf: leaf[indices], data))
            updates, state = tx.update(e.grad, state, w, full_grad_fn=full_grad_fn, **e.extra_args)
            return (optax.apply_updates(w, updates), state), None

        def one_pass(carry: Any, key: jax.Array) -> tuple[Any, None]:
            order = jax.random.permutation(key, n)[: steps * batch_size]
            return jax.lax.scan(step, carry, order.reshape(steps, batch_size))

        keys = jax.random.split(key, num_passes)
        (w, _), _ = jax.lax.scan(one_pass, (params, tx.init(params)), keys)
        return loss_fn(w, data)

    def trial(rate: float) -> float:
        loss = float(run(rate))
        return float("inf") if math.isnan(loss) else loss

    return trial


def _curvatures(
    loss_fn: Callable[[Any, Any], jax.Array], params: Any, data: Any, key: jax.Array, chunk: int
) -> tuple[jax.Array, jax.Array]:
    """Return the largest curvature of the mean loss, with its sign, and the largest of one example."""

    def largest(batch: Any) -> jax.Array:
        """Return the Hessian's eigenvalue of the largest size, by power iteration."""
        gradient = jax.grad(lambda p: checked_loss(loss_fn, p, batch, has_aux=False)[0])

        def step(v: Any, _: None) -> tuple[Any, jax.Array]:
            size = optax.tree.norm(v)
            v = optax.tree.scale(1 / jnp.where(size > 0, size, jnp.ones_like(size)), v)
            product = jax.jvp(gradient, (params,), (v,))[1]
            return product, optax.tree.vdot(v, product)

        return jax.lax.scan(step, optax.tree.random_like(key, params), None, length=_STEPS)[1][-1]

    def of_one(example: Any) -> jax.Array:
        return jnp.abs(largest(jax.tree.map(lambda leaf: leaf[None], example)))

    of_each = jax.lax.map(of_one, data, batch_size=chunk)
    return largest(data), jnp.max(of_each)
