"""Find a learning rate for SVRG from the curvature of the loss and from short trials.

O. Sebbouh, N. Gazagnadou, S. Jelassi, F. Bach and R. M. Gower, "Towards closing the gap between the
theory and practice of SVRG", NeurIPS 2019.
"""

import functools
import math
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optperm.core import checks
from optperm.core.fresh_jit import fresh_jit
from optperm.core.keys import make_key
from optperm.core.shapes import Params, Updates
from optperm.core.shardings import explicit_mesh, unshard
from optperm.evaluation import NOT_MEAN, LossFn, checked_loss, evaluate, is_mean, part_of
from optperm.variance._curvature import hessian_product, largest_eigenvalue
from optperm.variance._svrg import svrg

# The steps of the power iteration, and the maximum numbers of trials and halvings.
_STEPS, _MOST, _MOST_HALVINGS = 8, 20, 40
# The maximum relative increase of a loss that counts as a rounding error.
_ROUNDING = 1e-5
# The relative decrease of a loss that is no rounding error.
_TIE = 1e-6
# The maximum number of examples in trials.
_SAMPLE = 2**14


def svrg_learning_rate(
    loss_fn: LossFn,
    params: Params,
    data: Any,
    batch_size: int,
    *,
    num_passes: int = 6,
    chunk_size: int = 256,
    key: int | jax.Array = 0,
) -> float:
    r"""Find a learning rate for `optax.sgd` after `optperm.svrg`, or for `optperm.katyusha`.

    Let :math:`L` be the maximum curvature of the mean loss over n examples, and :math:`L_{\max}` the
    maximum curvature of a single example. Batches of b examples, drawn without replacement, have the
    expected smoothness

    .. math::
      \mathcal{L}_b = \frac{n (b - 1)}{b (n - 1)} L + \frac{n - b}{b (n - 1)} L_{\max}

    Theory requires rates below :math:`1 / \mathcal{L}_b`, but the best rates are often much higher,
    because the curvature during training is lower than at `params` or is in other directions. Therefore
    this function runs SVRG for some passes over the examples, or over a sample of 16,384 or of eight
    batches if there are more, first at :math:`\eta = 1 / \mathcal{L}_b`. It halves the rate until the
    final loss is not higher than the loss at `params`. If it has not halved the rate, it then doubles
    the rate while the final loss decreases. If it has, or if the first doubling does not help, it halves
    the rate while the final loss decreases.

    Args:
      loss_fn: As in `optperm.evaluate`. `loss_fn(params, batch)` returns the scalar mean loss over the
        leading axis of the batch's leaves. A penalty is part of the loss of each example.
      params: The initial params.
      data: All examples, or a sample of the examples, as a tree of arrays of shape (n, ...). Bind
        arguments that all examples share, such as a random key, to `loss_fn`.
      batch_size: b, the number of examples per step.
      num_passes: The number of passes over the examples per trial, with a full gradient every two
        passes. With 0, the rate is :math:`1 / \mathcal{L}_b`. This rate may be 10% too large, because
        the curvatures are estimated with eight steps of power iteration.
      chunk_size: The number of examples whose curvatures are measured at once. The mean loss is
        evaluated on all examples at once.
      key: The random key of the batches and of the initial vectors of power iterations: an int or a
        `jax.random.key`.

    Returns:
      The learning rate, a Python float.

    Example:
      >>> import jax, jax.numpy as jnp, optperm
      >>> x = 100 * jax.random.normal(jax.random.key(0), (64, 2))  # raw features
      >>> loss_fn = lambda w, batch: 0.5 * jnp.mean((batch[0] @ w - batch[1]) ** 2)
      >>> data = x, x.sum(axis=1)
      >>> rate = optperm.variance.svrg_learning_rate(loss_fn, jnp.zeros(2), data, 1, num_passes=0)
      >>> bool(jnp.isclose(rate, 1 / jnp.max(jnp.sum(x**2, axis=1)), rtol=1e-2))  # 1 / L_max
      True
      >>> optperm.variance.svrg_learning_rate(loss_fn, jnp.zeros(2), data, 1) / rate  # after trials
      0.25

    Notes:
      On five problems with batches of 1 and 16, the best rate of a grid was 1 or 2 times the rate from
      this function in nine of ten cases. In one case, with unscaled features, the best rate was 4 times
      as large (`benchmarks/variance.py`).

      Each call traces the loss, so `loss_fn` sees the current values of outside variables. Functions
      that `loss_fn` passes to `jax.lax.scan`, `jax.lax.cond` or `jax.checkpoint` are an exception,
      because JAX caches their traces.

    Raises:
      TypeError: If the loss is not a real scalar, a parameter does not have a real floating dtype, a
        number is not an integer, or this function is called under `jax.jit`.
      ValueError: If the examples' arrays have different lengths, there are fewer examples than in a
        batch, the loss or its curvature at `params` is not finite, the curvature is zero, the loss is a
        sum over examples, or the loss rises with every rate.

    Warns:
      RuntimeWarning: If the curvature of the largest magnitude is negative, so the loss is not convex.

    References:
      Sebbouh et al., `Towards closing the gap between the theory and practice of SVRG
      <https://arxiv.org/abs/1908.02725>`_, NeurIPS 2019
    """
    checks.check_static_count("batch_size", batch_size)
    checks.check_static_count("chunk_size", chunk_size)
    checks.check_count("num_passes", num_passes, minimum=0)
    checks.check_key("key", key)
    checks.check_real_floating("params", params)
    n = checks.count_examples("data", data)
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves((params, data))):
        raise TypeError(
            "svrg_learning_rate runs trials one after another: call it outside jax.jit."
        )
    data = jax.tree.map(jnp.asarray, data)
    if n < batch_size:
        raise ValueError(f"data must contain at least batch_size={batch_size} examples, got {n}.")
    with explicit_mesh(data, params):
        # On explicit axes, single examples cannot be indexed.
        rate, curvature = _find_rate(
            loss_fn,
            params,
            unshard(data),
            batch_size,
            num_passes,
            min(chunk_size, n),
            make_key(key),
        )
    if curvature < 0:
        message = (
            f"The loss is not convex at these params (curvature {curvature:.2g}): the rate may be too "
            "high or too low."
        )
        warnings.warn(message, RuntimeWarning, stacklevel=2)
    return rate


def _find_rate(
    loss_fn: LossFn,
    params: Any,
    data: Any,
    batch_size: int,
    num_passes: int,
    chunk: int,
    key: jax.Array,
) -> tuple[float, float]:
    """Return the learning rate, and the curvature at the params."""
    n = jax.tree.leaves(data)[0].shape[0]
    _check_is_mean(loss_fn, params, jax.tree.map(lambda leaf: leaf[: max(batch_size, 2)], data))

    def mean_loss(params: Params, batch: Any) -> jax.Array:
        return checked_loss(loss_fn, params, batch, has_aux=False)[0]

    # L and L_max
    measure = functools.partial(_measure_curvatures, mean_loss, chunk)
    curvature, largest = map(float, fresh_jit(measure)(params, data, key))
    smoothness = _expect_smoothness(abs(curvature), largest, n, batch_size)
    # eta = 1 / L_b
    rate, factor = 1 / smoothness, 2.0
    if not num_passes:
        return rate, curvature
    rng = np.random.default_rng(np.asarray(jax.random.bits(key, (4,), jnp.uint32)))
    size = max(_SAMPLE, 8 * batch_size)
    if n > size:
        rows = jnp.asarray(rng.permutation(n)[:size])
        data = jax.tree.map(lambda leaf: leaf[rows], data)
    here = float(fresh_jit(mean_loss)(params, data))
    if not math.isfinite(here):
        raise ValueError(f"The loss at these params must be finite, got {here}.")
    trial = _make_trial(mean_loss, params, data, batch_size, num_passes, rng)
    # The curvature may be larger during training than here: halve eta until the loss does not rise
    lowest = trial(rate)
    for _ in range(_MOST_HALVINGS):
        if lowest <= here + _ROUNDING * abs(here):
            break
        rate, factor = rate / 2, 0.5
        lowest = trial(rate)
    else:
        raise ValueError(f"No rate down to {rate:.2g} keeps the loss from rising above {here:.6g}.")
    # Then double eta while the loss decreases. Halve it if it was halved, or if doubling does not help
    for index in range(_MOST):
        loss = trial(rate * factor)
        if loss < lowest - _TIE * abs(lowest):
            rate, lowest = rate * factor, loss
        elif index == 0 and factor > 1:
            factor = 0.5
        else:
            break
    return rate, curvature


def _check_is_mean(loss_fn: LossFn, params: Params, few: Any) -> None:
    if not is_mean(loss_fn, params, few):
        raise ValueError(f"loss_fn must be a mean over examples. {NOT_MEAN}")


def _expect_smoothness(curvature: float, largest: float, n: int, b: int) -> float:
    """Return L_b, the expected smoothness of batches, from L and L_max."""
    # L_b = n (b - 1) / (b (n - 1)) L + (n - b) / (b (n - 1)) L_max
    rest = max(n - 1, 1)
    smoothness = n * (b - 1) / (b * rest) * curvature
    smoothness += (n - b) / (b * rest) * largest if n > 1 else largest
    if not 0 < smoothness < float("inf"):
        says = "The expected smoothness of the loss at these params must be positive and finite"
        raise ValueError(f"{says}, got {smoothness:g}.")
    return smoothness


def _make_trial(
    loss_fn: LossFn,
    params: Any,
    data: Any,
    batch_size: int,
    num_passes: int,
    rng: np.random.Generator,
) -> Callable[[float], float]:
    """Make the function from a rate to the loss after some passes of SVRG, with infinity for NaN."""
    n = jax.tree.leaves(data)[0].shape[0]
    steps = n // batch_size

    # NumPy shuffles faster than JAX.
    orders = jnp.asarray([rng.permutation(n) for _ in range(num_passes)], jnp.int32)

    @fresh_jit
    def run(rate: jax.Array, params: Any, data: Any, orders: jax.Array) -> jax.Array:
        tx = optax.chain(svrg(every=2 * steps), optax.sgd(rate))

        def full_grad_fn(w: Params) -> Updates:
            return jax.grad(loss_fn)(w, data)

        def one_pass(carry: Any, order: jax.Array) -> tuple[Any, None]:
            # A gather per pass takes the place of a gather per step, which is slower than the gradient.
            shuffled = jax.tree.map(lambda leaf: leaf[order], data)

            def step(carry: Any, start: jax.Array) -> tuple[Any, None]:
                w, state = carry
                e = evaluate(loss_fn, w, part_of(shuffled, start, batch_size))
                extra_args = {"full_grad_fn": full_grad_fn, **e.extra_args}
                updates, state = tx.update(e.grad, state, w, **extra_args)
                return (optax.apply_updates(w, updates), state), None

            return jax.lax.scan(step, carry, jnp.arange(steps) * batch_size)

        (w, _), _ = jax.lax.scan(one_pass, (params, tx.init(params)), orders)
        return loss_fn(w, data)

    def trial(rate: float) -> float:
        loss = float(run(rate, params, data, orders))
        return float("inf") if math.isnan(loss) else loss

    return trial


def _measure_curvatures(
    loss_fn: Callable[[Any, Any], jax.Array], chunk: int, params: Any, data: Any, key: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return the maximum curvature of the mean loss, with its sign, and of a single example."""

    def measure(batch: Any) -> jax.Array:
        """Return the Hessian's eigenvalue with the largest magnitude."""
        multiply = hessian_product(lambda p: loss_fn(p, batch), params)
        return largest_eigenvalue(multiply, optax.tree.random_like(key, params), _STEPS)

    def measure_one(example: Any) -> jax.Array:
        return jnp.abs(measure(jax.tree.map(lambda leaf: leaf[None], example)))

    of_each = jax.lax.map(measure_one, data, batch_size=chunk)
    return measure(data), jnp.max(of_each)
