"""Estimate the covariance of one example's gradient from the gradients of one step."""

import functools
import inspect
import warnings
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.extend.core
import jax.numpy as jnp
import optax

from optperm.bayes._forms import FORMS
from optperm.core import checks
from optperm.core.dtypes import accumulation_dtype, cast_like, zero_if_not_finite
from optperm.core.mapped_axes import AxisName
from optperm.core.shapes import Params, Updates
from optperm.core.shardings import unshard
from optperm.core.trees import mask_like

Estimator = Literal["per_example", "single_example", "two_batches"]

# A function from deviations d, a tree with a leading axis, to the part of sum d d^T that is stored.
Outer = Callable[[Updates], Any]
# The entries of per-example gradients held in memory at once, and the minimum number of gradients.
_CHUNK, _LEAST_CHUNK = 2**20, 8


class BatchGradients(NamedTuple):
    """The gradient of a step's batch, and the functions for the gradients of its parts and examples.

    Attributes:
      params: The current params.
      grad: The gradient of the batch.
      extras: The extra arguments of `update`.
      batch_size: S, over all replicas.
      chunk_size: Number of per-example gradients in memory at once; None for a million entries.
      axis_name: The mapped axes over which the batch is spread, if any.
    """

    params: Params
    grad: Updates
    extras: dict[str, Any]
    batch_size: int | jax.Array
    chunk_size: int | None
    axis_name: AxisName | None

    @property
    def replicas(self) -> int:
        """The number of replicas over which the batch is spread."""
        return 1 if self.axis_name is None else jax.lax.axis_size(self.axis_name)

    def curvature_product(self, direction: Updates) -> Updates:
        """Return A v, the product of the batch's Hessian with a tree like params, in the dtypes of v."""

        def gradient(params: Params) -> Updates:
            grads = self.extras["grad_fn"](params)
            return _mask_gradients(grads, self, "grad_fn(params)", axes=0)

        # A vjp is enough, since A is symmetric; a jax.custom_vjp has no forward derivative
        grads, transposed = jax.vjp(gradient, self.params)
        (product,) = transposed(cast_like(direction, grads))
        if self.axis_name is not None:
            # If the products are averages already, their mean over replicas changes nothing
            product = jax.lax.pmean(product, self.axis_name)
        return jax.tree.map(lambda a, v: a.astype(v.dtype), product, direction)


# Return an unbiased estimate of C, the covariance of one example's gradient, in the form of `Outer`, and
# whether the batch's gradient differs from the mean of its examples' gradients.
Estimate = Callable[[BatchGradients, Outer], tuple[Any, jax.Array]]


class _Sums(NamedTuple):
    """Sums over examples of the deviations d of their gradients from one center.

    Attributes:
      count: The number of examples, (); a float.
      deviations: The sum of d, a tree like params.
      products: The sum of d d^T, in the form of `Outer`.
    """

    count: Any
    deviations: Updates
    products: Any


def traced_once(grad_fn: Callable[..., Any], params: Params) -> tuple[Callable[..., Any], int]:
    """Return a `grad_fn` that reuses its trace at these params, and the number of examples."""
    program, shapes = jax.make_jaxpr(lambda: grad_fn(params), return_shape=True)()

    @functools.wraps(grad_fn)
    def call(at: Params, **part: Any) -> Any:
        if part or at is not params:
            return grad_fn(at, **part)
        rows = jax.extend.core.jaxpr_as_fun(program)()
        return jax.tree.unflatten(jax.tree.structure(shapes), rows)

    return call, int(jax.tree.leaves(shapes)[0].shape[0])


def per_example(batch: BatchGradients, outer: Outer) -> tuple[Any, jax.Array]:
    r"""Return the unbiased covariance of the gradients of the batch's examples.

    .. math::
      \frac{1}{S - 1} \sum_{n} (g_n - \bar g) (g_n - \bar g)^T
      = \frac{1}{S - 1} \left( \sum_n d_n d_n^T - S \bar d \bar d^T \right), \qquad d_n = g_n - g_S

    The center is the batch's gradient :math:`g_S`, which is known and close to the mean, so one pass
    over the examples is enough. A gradient that is NaN in every entry of its smallest leaf belongs to no
    example: a loss that divides by the batch's weights returns NaN for padding of weight 0.
    """
    grad_fn, here = traced_once(batch.extras["per_example_grad_fn"], batch.params)
    center = zero_if_not_finite(optax.tree.cast(batch.grad, accumulation_dtype(batch.grad)))

    def gradients(**part: Any) -> Updates:
        grads = grad_fn(batch.params, **part)
        return _mask_gradients(grads, batch, "per_example_grad_fn(params)", axes=1)

    def sums(rows: Updates) -> _Sums:
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

    if here * batch.replicas < 2:
        raise ValueError(
            f"'per_example' needs batches of at least 2 examples, got {here * batch.replicas}: "
            "use estimator='single_example'."
        )
    _check_size(here, batch, f"the batch of per_example_grad_fn has the size {here}")
    chunk_size = here
    if batch.chunk_size is not None or _takes_part(grad_fn):
        size = max(optax.tree.size(batch.params), 1)
        chunk_size = min(here, batch.chunk_size or max(_LEAST_CHUNK, _CHUNK // size))
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
    # (sum d d^T - S mean(d) mean(d)^T) / (S - 1)
    mean = _rescale(found.deviations, 1 / found.count)
    of_mean = _outer_of(mean, found.count, outer)
    spread = optax.tree.sub(found.products, of_mean)
    return _rescale(spread, 1 / (found.count - 1)), _is_no_mean(batch, mean, found.count)


def _is_no_mean(batch: BatchGradients, deviation: Updates, count: jax.Array) -> jax.Array:
    """Return whether the examples' mean gradient is over a tenth away from the batch's gradient.

    Args:
      batch: The batch.
      deviation: The mean of the examples' gradients minus the batch's gradient.
      count: The number of examples.
    """
    if getattr(batch.extras["per_example_grad_fn"], "draws_anew", False):
        return jnp.zeros([], jnp.bool_)
    grad = batch.grad
    if batch.axis_name is not None:
        grad = jax.lax.pmean(grad, batch.axis_name)
        deviation = jax.lax.pmean(deviation, batch.axis_name)
    epsilon = max(float(jnp.finfo(leaf.dtype).eps) for leaf in jax.tree.leaves(grad))
    # If the mean is small, the rounding errors of the examples may exceed a tenth of the mean
    least = jnp.maximum(0.01, (4 * epsilon) ** 2 * count)
    return _size(deviation) > least.astype(accumulation_dtype(grad)) * _size(grad)


def _is_nan(rows: Updates) -> jax.Array:
    """Return whether each row is NaN in all entries of its smallest leaf, (rows,)."""
    # For speed, only the smallest leaf is checked
    leaves = jax.tree.leaves(rows)
    smallest = min((leaf for leaf in leaves if leaf.size), key=jnp.size, default=leaves[0])
    flags = jnp.all(jnp.isnan(smallest), axis=tuple(range(1, smallest.ndim)))
    return unshard(flags)


def _along(numbers: jax.Array, rows: jax.Array) -> jax.Array:
    """Return one number per row, shaped to broadcast over the row."""
    return numbers.reshape(-1, *(1,) * (rows.ndim - 1))


def single_example(batch: BatchGradients, outer: Outer) -> tuple[Any, jax.Array]:
    r"""Return the covariance estimate from the batch and one example drawn independently of it.

    .. math:: \frac{(g_1 - g_S) (g_1 - g_S)^T}{1 + 1/S}
    """
    _check_num_examples(batch)
    one = batch.extras["example_grad_fn"](batch.params)
    one = _mask_gradients(one, batch, "example_grad_fn(params)", axes=0)
    estimate = _outer_of(_difference(one, batch.grad), 1 / (1 + 1 / batch.batch_size), outer)
    if batch.axis_name is not None:
        estimate = jax.lax.pmean(estimate, batch.axis_name)
    return estimate, jnp.zeros([], jnp.bool_)


def two_batches(batch: BatchGradients, outer: Outer) -> tuple[Any, jax.Array]:
    r"""Return the covariance estimate from the gradients of the batch and of its first half.

    .. math:: \frac{a S}{b} (g_a - g_S) (g_a - g_S)^T, \qquad a = \lfloor S / 2 \rfloor, \quad b = S - a
    """
    grad_fn = batch.extras["grad_fn"]
    batch_size, replicas = int(batch.batch_size), batch.replicas
    here = batch_size // replicas
    if here < 2 or here * replicas != batch_size:
        raise ValueError(
            f"'two_batches' halves the batch of each replica: batch_size must be a multiple of the "
            f"number of replicas, {replicas}, and at least twice this number, got {batch_size}."
        )
    _check_num_examples(batch)
    half = here // 2
    part = grad_fn(batch.params, start=0, size=half)
    part = _mask_gradients(part, batch, "grad_fn(params)", axes=0)
    factor = half / (here - half) * batch_size
    return _outer_of(_difference(part, batch.grad), factor, outer), jnp.zeros([], jnp.bool_)


ESTIMATES: dict[Estimator, Estimate] = {
    "per_example": per_example,
    "single_example": single_example,
    "two_batches": two_batches,
}

# The extra argument of each estimator, and the meaning of this argument.
NEEDS: dict[Estimator, dict[str, str]] = {
    "per_example": {"per_example_grad_fn": "the gradient of each example at given params"},
    "single_example": {
        "example_grad_fn": "the gradient at given params of one example apart from the batch, "
        "which evaluate makes if you also pass example=one_example"
    },
    "two_batches": {"grad_fn": "the gradient of a part of the batch at given params"},
}


def batch_gradients(
    updates: Updates,
    params: Params,
    extras: dict[str, Any],
    batch_size: int | jax.Array,
    chunk_size: int | None,
    axis_name: AxisName | None,
) -> BatchGradients:
    """Return the gradients of a step's batch; warn if the updates are not the batch's gradient."""
    grad = extras.get("grad")
    grad = updates if grad is None else mask_like(grad, params)
    pairs = zip(*map(jax.tree.leaves, (updates, grad)), strict=False)
    # With replicas, the updates are another array, because the gradient is averaged
    if axis_name is None and any(one is not other for one, other in pairs):
        warnings.warn(
            "The updates are not the gradient in the extra arguments. If another transformation has "
            "changed them, the draws do not follow the posterior: remove clipping, svrg, weight decay "
            "(use normal_prior) and MultiSteps.",
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
    """Raise unless the common arguments of `constant_sgd` and `mandt_sgd` are valid."""
    checks.check_count("num_data", num_data)
    checks.check_count("batch_size", batch_size)
    if preconditioner is not None:
        checks.check_choice("preconditioner", preconditioner, tuple(FORMS))
    checks.check_choice("estimator", estimator, tuple(ESTIMATES))
    if chunk_size is not None:
        checks.check_static_count("chunk_size", chunk_size)
    checks.check_axis_name("axis_name", axis_name)
    if not (checks.is_concrete_number(num_data) and checks.is_concrete_number(batch_size)):
        return
    if int(num_data) < int(batch_size):
        raise ValueError(f"num_data must be at least batch_size, got {num_data} and {batch_size}.")
    if int(num_data) == int(batch_size) > 1:
        warnings.warn(
            f"batch_size is num_data, {num_data}: if a batch contains all examples, its gradient has no "
            "noise, and draws are too narrow. Draw small batches with replacement, or use sgld or "
            "sghmc.",
            stacklevel=3,
        )


def _outer_of(deviation: Updates, factor: Any, outer: Outer) -> Any:
    return _rescale(outer(jax.tree.map(lambda d: d[None], deviation)), factor)


def _size(tree: Any) -> jax.Array:
    """Return the squared norm of a tree, whose leaves may have several dtypes."""
    return optax.tree.norm(optax.tree.cast(tree, accumulation_dtype(tree)), squared=True)


def _rescale(tree: Any, factor: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf * jnp.asarray(factor, leaf.dtype), tree)


def _difference(one: Updates, other: Updates) -> Updates:
    return jax.tree.map(
        lambda a, b: a.astype(accumulation_dtype(a)) - b.astype(accumulation_dtype(a)), one, other
    )


def _mask_gradients(grads: Any, batch: BatchGradients, name: str, *, axes: int) -> Updates:
    """Return gradients of unmasked params; raise unless they match params after `axes` leading axes."""
    grads = mask_like(grads, batch.params)
    shapes = jax.tree.map(lambda g: jax.ShapeDtypeStruct(jnp.shape(g)[axes:], g.dtype), grads)
    checks.check_same_tree(name, shapes, batch.params, source="params", dtypes=False)
    return grads


def _check_num_examples(batch: BatchGradients) -> None:
    """Raise if `optperm.evaluate` has evaluated a batch of another size."""
    here = getattr(batch.extras.get("grad_fn"), "num_examples", None)
    if here is not None:
        _check_size(here, batch, f"the batch of grad_fn has the size {here}")


def _check_size(here: int, batch: BatchGradients, what: str) -> None:
    batch_size, replicas = batch.batch_size, batch.replicas
    if checks.is_concrete_number(batch_size) and here * replicas != int(batch_size):
        over = "" if batch.axis_name is None else f" on each of {replicas} replicas"
        raise ValueError(
            f"batch_size is {batch_size}, but {what}{over}: pass batches of "
            "batch_size examples, or axis_name= for a batch on several devices. If you use "
            "optax.MultiSteps, use chunk_size= instead."
        )


def _takes_part(function: Callable[..., Any]) -> bool:
    """Return whether a function takes the start and the size of a part of the batch."""
    parameters = inspect.signature(function).parameters.values()
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
    return takes_any or {"start", "size"} <= {p.name for p in parameters}
