"""The learning rate of SVRG by how fast the gradients of examples change with the params.

O. Sebbouh, N. Gazagnadou, S. Jelassi, F. Bach and R. M. Gower, "Towards closing the gap between the
theory and practice of SVRG", NeurIPS 2019.
"""

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optperm.contract import checks
from optperm.evaluation import LossFn, checked_loss

# Steps of the power iteration: of the mean loss, and of the losses of single examples.
_STEPS, _STEPS_OF_ONE = 30, 8


def svrg_learning_rate(
    loss_fn: LossFn,
    params: optax.Params,
    data: Any,
    batch_size: int,
    *,
    chunk_size: int = 256,
    seed: int | jax.Array = 0,
) -> float:
    r"""Return the learning rate of `optax.sgd` behind `optperm.svrg`, by the curvature at given params.

    With :math:`L` the largest curvature of the mean loss of n examples and :math:`L_{\max}` the largest
    one of a single example, batches of b without replacement have the expected smoothness

    .. math::
      \mathcal{L}_b = \frac{n (b - 1)}{b (n - 1)} L + \frac{n - b}{b (n - 1)} L_{\max},
      \qquad \eta = \frac{1}{\mathcal{L}_b}

    Curvatures are found by power iteration on Hessian-vector products, about 80 gradients of each
    example in all. They are those at `params`: for least squares they are the same everywhere, for
    logistic and softmax regression they are largest at zero, where all classes are equally likely.
    Elsewhere, and for losses that are not convex, they may grow on the way, so that the rate may be too
    large.

    Args:
      loss_fn: As in `optperm.evaluate`: `loss_fn(params, batch)`, the scalar mean loss over the leading
        axis of the batch's leaves. A penalty belongs to the loss of each example.
      params: Where the curvature is taken, for instance the initial params.
      data: All examples, or a sample of them: a tree of arrays of shape (n, ...).
      batch_size: b, the examples of a step.
      chunk_size: How many single examples are evaluated at a time; the mean loss takes all at once.
      seed: Seed of the directions in which the power iterations begin.

    Returns:
      The rate, a Python float.

    Raises:
      TypeError: If the loss is not a real scalar, or an argument is of the wrong type.
      ValueError: If the examples' arrays disagree in length, are fewer than a batch, or have no
        curvature.

    Warns:
      RuntimeWarning: If the largest curvature is negative: the loss is not convex at these params.

    Example:
      >>> import jax, jax.numpy as jnp, optperm
      >>> x = 100 * jax.random.normal(jax.random.key(0), (64, 2))  # raw features
      >>> loss_fn = lambda w, batch: 0.5 * jnp.mean((batch[0] @ w - batch[1]) ** 2)
      >>> rate = optperm.svrg_learning_rate(loss_fn, jnp.zeros(2), (x, x.sum(axis=1)), batch_size=1)
      >>> bool(jnp.isclose(rate, 1 / jnp.max(jnp.sum(x**2, axis=1)), rtol=1e-3))  # 1 / L_max
      True

    References:
      Sebbouh et al., `Towards closing the gap between the theory and practice of SVRG
      <https://arxiv.org/abs/1908.02725>`_, NeurIPS 2019
    """
    checks.check_static_count("batch_size", batch_size)
    checks.check_static_count("chunk_size", chunk_size)
    checks.check_real_floating("params", params)
    sizes = {jnp.shape(leaf)[:1] for leaf in jax.tree.leaves(data)}
    if len(sizes) != 1 or sizes == {()}:
        raise ValueError(
            f"All arrays of data need one leading axis of the same length, got {sorted(sizes)}."
        )
    ((n,),) = sizes
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
    return 1 / smoothness


def _curvatures(
    loss_fn: Callable[[Any, Any], jax.Array], params: Any, data: Any, key: jax.Array, chunk: int
) -> tuple[jax.Array, jax.Array]:
    """Return the largest curvature of the mean loss, with its sign, and the largest of one example."""

    def largest(batch: Any, steps: int) -> jax.Array:
        """Return the Hessian's eigenvalue of the largest size, by power iteration."""
        gradient = jax.grad(lambda p: checked_loss(loss_fn, p, batch, has_aux=False)[0])

        def step(v: Any, _: None) -> tuple[Any, jax.Array]:
            size = optax.tree.norm(v)
            v = optax.tree.scale(1 / jnp.where(size > 0, size, jnp.ones_like(size)), v)
            product = jax.jvp(gradient, (params,), (v,))[1]
            return product, optax.tree.vdot(v, product)

        return jax.lax.scan(step, optax.tree.random_like(key, params), None, length=steps)[1][-1]

    def of_one(example: Any) -> jax.Array:
        return jnp.abs(largest(jax.tree.map(lambda leaf: leaf[None], example), _STEPS_OF_ONE))

    of_each = jax.lax.map(of_one, data, batch_size=chunk)
    return largest(data, _STEPS), jnp.max(of_each)
