"""Estimates of the covariance of one example's gradient, from the gradients of one step."""

import inspect
import warnings
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optperm.contract import checks
from optperm.contract.dtypes import accumulation_dtype, cast_like, zero_if_not_finite
from optperm.contract.mapped_axes import AxisName
from optperm.contract.shardings import unshard
from optperm.contract.states import mask_like

Estimator = Literal["per_example", "single_example", "two_batches"]
Preconditioner = Literal["scalar", "diagonal", "full"]

# Of deviations from a mean, a tree with a leading axis, what is kept of the sum of d d^T.
Outer = Callable[[optax.Updates], Any]
# Gradients of examples are held a million numbers at a time, but of at least so many examples.
_CHUNK, _LEAST_CHUNK = 2**20, 8


class BatchGradients(NamedTuple):
    """The gradient of a step's batch, and what gives those of its parts and examples.

    Attributes:
      params: The current params.
      grad: The gradient of the batch.
      extras: The extra arguments of `update`.
      batch_size: S, of all replicas together.
      chunk_size: How many gradients of examples to hold at once; None for a million numbers.
      axis_name: The mapped axes over which the batch is spread, if any.
    """

    params: optax.Params
    grad: optax.Updates
    extras: dict[str, Any]
    batch_size: int | jax.Array
    chunk_size: int | None
    axis_name: AxisName | None

    @property
    def replicas(self) -> int:
        """Over how many the batch is spread."""
        return 1 if self.axis_name is None else jax.lax.axis_size(self.axis_name)

    def curvature_product(self, direction: optax.Updates) -> optax.Updates:
        """Return A v, the product of the batch's Hessian with a tree like params, in that tree's dtypes.

        As A is symmetric, by a reverse derivative: a loss with a `jax.custom_vjp` in it has no other.
        """

        def gradient(params: optax.Params) -> optax.Updates:
            grads = self.extras["grad_fn"](params)
            return _checked_gradients(grads, self, "grad_fn(params)", axes=0)

        grads, transposed = jax.vjp(gradient, self.params)
        (product,) = transposed(cast_like(direction, grads))
        if self.axis_name is not None:
            # Averaged already or not: the mean of what is the same everywhere is itself.
            product = jax.lax.pmean(product, self.axis_name)
        return jax.tree.map(lambda a, v: a.astype(v.dtype), product, direction)


# An unbiased estimate of C, the covariance of one example's gradient, as much of it as `Outer` keeps;
# and whether the batch's gradient turned out not to be the mean of theirs.
Estimate = Callable[[BatchGradients, Outer], tuple[Any, jax.Array]]


def mean_of_diagonal(deviations: optax.Updates) -> jax.Array:
    """The trace of the sum of outer products, over the number of params, ()."""
    dtype, leaves = accumulation_dtype(deviations), jax.tree.leaves(deviations)
    size = max(1, sum(leaf[0].size for leaf in leaves))
    parts = [jnp.sum(leaf**2).astype(dtype) for leaf in leaves]
    return sum(parts, start=jnp.zeros([], dtype)) / size


def diagonal(deviations: optax.Updates) -> optax.Updates:
    """The diagonal of the sum of outer products, a tree like params."""
    return jax.tree.map(lambda d: jnp.sum(d**2, axis=0), deviations)


def matrix(deviations: optax.Updates) -> jax.Array:
    """The sum of outer products of the flattened deviations, (D, D)."""
    rows = rows_of(deviations)
    return jnp.matmul(rows.T, rows, precision=jax.lax.Precision.HIGHEST)


def rows_of(tree: Any) -> jax.Array:
    """Return a tree with a leading axis as a matrix, each row like `jax.flatten_util.ravel_pytree`."""
    dtype, leaves = accumulation_dtype(tree), jax.tree.leaves(unshard(tree))
    flat = [leaf.reshape(leaf.shape[0], -1).astype(dtype) for leaf in leaves]
    return jnp.concatenate(flat, axis=1) if flat else jnp.zeros((1, 0), dtype)


OUTER: dict[Preconditioner, Outer] = {
    "scalar": mean_of_diagonal,
    "diagonal": diagonal,
    "full": matrix,
}


class _Sums(NamedTuple):
    """What is summed over some examples, each by its gradient's deviation d from one center.

    Attributes:
      count: How many, (); a float.
      deviations: The sum of d, a tree like params.
      products: Of the sum of d d^T, what is kept.
    """

    count: Any
    deviations: optax.Updates
    products: Any


def per_example(batch: BatchGradients, outer: Outer) -> tuple[Any, jax.Array]:
    r"""The unbiased covariance of the gradients of the batch's examples.

    .. math::
      \frac{1}{S - 1} \sum_{n} (g_n - \bar g) (g_n - \bar g)^T
      = \frac{1}{S - 1} \left( \sum_n d_n d_n^T - S \bar d \bar d^T \right), \qquad d_n = g_n - g_S

    With the batch's gradient :math:`g_S`, which is known and close to the mean, for a center one pass
    over the examples is enough. A gradient that is NaN in every entry is no example's: so a loss that
    divides by the batch's weights makes it of a row of weight 0, which fills a batch up.
    """
    grad_fn = batch.extras["per_example_grad_fn"]
    center = zero_if_not_finite(optax.tree.cast(batch.grad, accumulation_dtype(batch.grad)))

    def gradients(**part: Any) -> optax.Updates:
        grads = grad_fn(batch.params, **part)
        return _checked_gradients(grads, batch, "per_example_grad_fn(params)", axes=1)

    def sums(rows: optax.Updates) -> _Sums:
        is_example = jnp.logical_not(_is_nan(rows))

        def deviation(g: jax.Array, mean: jax.Array) -> jax.Array:
            dtype = accumulation_dtype(g)
            d = g.astype(dtype) - mean[None].astype(dtype)
            return jnp.where(_along(is_example, d), d, jnp.zeros_like(d))

        deviations = jax.tree.map(deviation, rows, center)
        total = jax.tree.map(lambda d: jnp.sum(d, axis=0), deviations)
        return _Sums(jnp.sum(is_example, dtype=jnp.float32), total, outer(deviations))

    def chunk(start: Any, size: int) -> _Sums:
        return sums(gradients(start=start, size=size))

    if batch.chunk_size is not None:
        _check_takes_part(grad_fn, "per_example_grad_fn", "chunk_size")
    here = _length(jax.eval_shape(gradients))
    _check_batch(here, batch)
    chunk_size = here
    if _takes_part(grad_fn):
        size = sum(leaf.size for leaf in jax.tree.leaves(batch.params))
        chunk_size = min(here, batch.chunk_size or max(_LEAST_CHUNK, _CHUNK // max(size, 1)))
    if chunk_size == here:
        found = sums(gradients())
    else:
        whole, rest = divmod(here, chunk_size)
        found = jax.lax.fori_loop(
            1,
            whole,
            lambda i, so_far: optax.tree.add(so_far, chunk(i * chunk_size, chunk_size)),
            chunk(0, chunk_size),
        )
        if rest:
            found = optax.tree.add(found, chunk(whole * chunk_size, rest))
    if batch.axis_name is not None:
        found = jax.lax.psum(found, batch.axis_name)
    mean = _rescale(found.deviations, 1 / found.count)
    of_mean = _outer_of(mean, found.count, outer)
    spread = jax.tree.map(jnp.subtract, found.products, of_mean)
    return _rescale(spread, 1 / (found.count - 1)), _is_no_mean(batch, mean, found.count)


def _is_no_mean(batch: BatchGradients, deviation: optax.Updates, count: jax.Array) -> jax.Array:
    """Whether a batch's gradient is not the mean of those of its examples, by a tenth of its size.

    Args:
      batch: The batch.
      deviation: By how much the mean of those of its examples exceeds it.
      count: How many they are.
    """
    if getattr(batch.extras["per_example_grad_fn"], "draws_anew", False):
        return jnp.zeros([], jnp.bool_)
    grad = batch.grad
    if batch.axis_name is not None:
        grad = jax.lax.pmean(grad, batch.axis_name)
        deviation = jax.lax.pmean(deviation, batch.axis_name)
    epsilon = max(float(jnp.finfo(leaf.dtype).eps) for leaf in jax.tree.leaves(grad))
    # What each of the examples is rounded by, where their mean is short.
    least = jnp.maximum(0.01, (4 * epsilon) ** 2 * count)
    return _size(deviation) > least.astype(accumulation_dtype(grad)) * _size(grad)


def _is_nan(rows: optax.Updates) -> jax.Array:
    """Of which rows every entry is NaN, (rows,), by the smallest leaf: it is quickly looked through."""
    leaves = jax.tree.leaves(rows)
    smallest = min((leaf for leaf in leaves if leaf.size), key=jnp.size, default=leaves[0])
    flags = jnp.all(jnp.isnan(smallest), axis=tuple(range(1, smallest.ndim)))
    return unshard(flags)


def _along(numbers: jax.Array, rows: jax.Array) -> jax.Array:
    """One number a row, shaped so that it meets the whole row."""
    return numbers.reshape(-1, *(1,) * (rows.ndim - 1))


def single_example(batch: BatchGradients, outer: Outer) -> tuple[Any, jax.Array]:
    r"""How far the gradient of an example drawn apart lies from that of the batch.

    .. math:: \frac{(g_1 - g_S) (g_1 - g_S)^T}{1 + 1/S}
    """
    _check_num_examples(batch)
    one = batch.extras["example_grad_fn"](batch.params)
    one = _checked_gradients(one, batch, "example_grad_fn(params)", axes=0)
    estimate = _outer_of(_difference(one, batch.grad), 1 / (1 + 1 / batch.batch_size), outer)
    if batch.axis_name is not None:
        estimate = jax.lax.pmean(estimate, batch.axis_name)
    return estimate, jnp.zeros([], jnp.bool_)


def two_batches(batch: BatchGradients, outer: Outer) -> tuple[Any, jax.Array]:
    r"""How far the gradient of the batch's first half lies from that of the whole.

    .. math:: \frac{a S}{b} (g_a - g_S) (g_a - g_S)^T, \qquad a = \lfloor S / 2 \rfloor, \quad b = S - a
    """
    grad_fn = batch.extras["grad_fn"]
    _check_takes_part(grad_fn, "grad_fn", 'estimator="two_batches"')
    checks.check_static_count("batch_size", batch.batch_size)
    batch_size, replicas = int(batch.batch_size), batch.replicas
    here = batch_size // replicas
    if here < 2 or here * replicas != batch_size:
        raise ValueError(
            f"batch_size is {batch_size}, and there are {replicas} replicas: the estimator "
            "'two_batches' halves the batch of each, which takes a multiple of them, and at least "
            "2 examples each."
        )
    _check_num_examples(batch)
    half = here // 2
    part = grad_fn(batch.params, start=0, size=half)
    part = _checked_gradients(part, batch, "grad_fn(params)", axes=0)
    factor = half / (here - half) * batch_size
    return _outer_of(_difference(part, batch.grad), factor, outer), jnp.zeros([], jnp.bool_)


ESTIMATES: dict[Estimator, Estimate] = {
    "per_example": per_example,
    "single_example": single_example,
    "two_batches": two_batches,
}

# The extra argument that each of them takes, and what that is.
NEEDS: dict[Estimator, dict[str, str]] = {
    "per_example": {"per_example_grad_fn": "the gradient of each example at given params"},
    "single_example": {
        "example_grad_fn": "the gradient at given params of one example drawn apart from the batch, "
        "which evaluate makes if it is given example=one_example too"
    },
    "two_batches": {"grad_fn": "the gradient of a part of the batch at given params"},
}


def batch_gradients(
    updates: optax.Updates,
    params: optax.Params,
    extras: dict[str, Any],
    batch_size: int | jax.Array,
    chunk_size: int | None,
    axis_name: AxisName | None,
) -> BatchGradients:
    """Return the gradients of a step's batch; warn where they are not what a sampler is given."""
    grad = extras.get("grad")
    grad = updates if grad is None else mask_like(grad, params)
    pairs = zip(*map(jax.tree.leaves, (updates, grad)), strict=False)
    # What replicas average is another array, and need not be another gradient.
    if axis_name is None and any(one is not other for one, other in pairs):
        warnings.warn(
            "The gradient is not the one of the extra arguments: the noise of those is what steps are "
            "made for, and the draws do not follow the posterior. Nothing that changes gradients "
            "belongs in front of constant_sgd or around it: no clipping (even of none), no svrg (sgld "
            "and sghmc take it), no weight decay (normal_prior goes into the loss), no MultiSteps "
            "(chunk_size= saves memory).",
            stacklevel=2,
        )
    return BatchGradients(params, grad, extras, batch_size, chunk_size, axis_name)


def check_noise_arguments(
    num_data: Any,
    batch_size: Any,
    preconditioner: Any,
    estimator: Any,
    chunk_size: Any,
    axis_name: Any,
) -> None:
    """Raise what `constant_sgd` and `mandt_sgd` say about their common arguments."""
    checks.check_count("num_data", num_data)
    checks.check_count("batch_size", batch_size)
    if preconditioner is not None:
        checks.check_choice("preconditioner", preconditioner, tuple(OUTER))
    checks.check_choice("estimator", estimator, tuple(ESTIMATES))
    if chunk_size is not None:
        checks.check_static_count("chunk_size", chunk_size)
    checks.check_axis_name("axis_name", axis_name)
    if not (checks.is_concrete_number(num_data) and checks.is_concrete_number(batch_size)):
        return
    if int(num_data) < int(batch_size):
        raise ValueError(
            f"num_data must be at least batch_size, got {num_data} examples in all and "
            f"{batch_size} in a batch. num_data comes first."
        )
    if int(num_data) == int(batch_size) > 1:
        warnings.warn(
            f"batch_size is num_data, {num_data}: the gradient of all examples has no noise, whatever "
            "their own gradients tell, and then the draws are too narrow. Draw small batches with "
            "replacement, or sample with sgld or sghmc, whose noise is their own.",
            stacklevel=3,
        )


def _length(rows: optax.Updates) -> int:
    return int(jax.tree.leaves(rows)[0].shape[0])


def _outer_of(deviation: optax.Updates, factor: Any, outer: Outer) -> Any:
    return _rescale(outer(jax.tree.map(lambda d: d[None], deviation)), factor)


def _size(tree: Any) -> jax.Array:
    """The squared norm of a tree, whose leaves may have several dtypes."""
    return optax.tree.norm(optax.tree.cast(tree, accumulation_dtype(tree)), squared=True)


def _rescale(tree: Any, factor: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf * jnp.asarray(factor, leaf.dtype), tree)


def _difference(one: optax.Updates, other: optax.Updates) -> optax.Updates:
    return jax.tree.map(
        lambda a, b: a.astype(accumulation_dtype(a)) - b.astype(accumulation_dtype(a)), one, other
    )


def _checked_gradients(grads: Any, batch: BatchGradients, name: str, *, axes: int) -> optax.Updates:
    """The gradients, without what is masked, if they are shaped like params after `axes` axes."""
    grads = mask_like(grads, batch.params)
    shapes = jax.tree.map(lambda g: jax.ShapeDtypeStruct(jnp.shape(g)[axes:], g.dtype), grads)
    checks.check_same_tree(name, shapes, batch.params, source="params", dtypes=False)
    return grads


def _check_batch(here: int, batch: BatchGradients) -> None:
    if here * batch.replicas < 2:
        raise ValueError(
            "The estimator 'per_example' needs batches of at least 2 examples, got 1: use "
            "estimator='single_example' for batches of one."
        )
    _check_size(here, batch, f"per_example_grad_fn gave the gradients of {here}")


def _check_num_examples(batch: BatchGradients) -> None:
    """Raises where `optperm.evaluate` says that its batch has another size."""
    here = getattr(batch.extras.get("grad_fn"), "num_examples", None)
    if here is not None:
        _check_size(here, batch, f"grad_fn is that of a batch of {here}")


def _check_size(here: int, batch: BatchGradients, what: str) -> None:
    batch_size, replicas = batch.batch_size, batch.replicas
    if checks.is_concrete_number(batch_size) and here * replicas != int(batch_size):
        over = "" if batch.axis_name is None else f" on each of {replicas} replicas"
        raise ValueError(
            f"batch_size is {batch_size}, but {what} examples{over}: pass batches of one size (leave "
            "out a smaller last one), and axis_name where a batch is spread over several devices. "
            "Inside of optax.MultiSteps the batch is only a part of what a step is made of: pass the "
            "whole batch instead, with chunk_size= to hold the gradients of few examples at once."
        )


def _takes_part(function: Callable[..., Any]) -> bool:
    parameters = inspect.signature(function).parameters.values()
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
    return takes_any or {"start", "size"} <= {p.name for p in parameters}


def _check_takes_part(function: Callable[..., Any], name: str, reason: str) -> None:
    if not _takes_part(function):
        raise ValueError(
            f"With {reason}, {name} must take the first example of a part of the batch and its size, "
            f"{name}(params, start=, size=), as optperm.evaluate makes it."
        )
