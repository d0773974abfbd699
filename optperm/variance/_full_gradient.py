"""Compute the mean gradient over all examples, as a sum over batches."""

import functools
import math
import operator
import warnings
from collections.abc import Callable, Iterable, Iterator, Sized
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.tree_util import Partial

from optperm.core import checks
from optperm.core.dtypes import accumulation_dtype, as_arrays, cast_like
from optperm.core.fresh_jit import fresh_jit_once
from optperm.core.keys import is_key
from optperm.core.mapped_axes import AxisName, mark_varying, varying_axes
from optperm.core.optional import import_optional
from optperm.core.shapes import Params, Updates
from optperm.core.shardings import can_be_seen, explicit_mesh, shard_like, take, take_rows
from optperm.evaluation import LossFn, checked_sum, compare_halves, judge_halves, map_examples

# The number of examples at each end of a batch whose losses are compared with their mean, and the
# smallest difference that counts, relative to the largest of these losses. Gradients cost more.
_FEW, _ROUNDING, _FEWER = 16, 1e-3, 4


class _Sums(NamedTuple):
    """Sums over examples.

    Attributes:
      grad: Sum of the weighted gradients, shaped like params, in float32 or wider.
      weight: Sum of the weights; NaN if a weight is negative or not finite.
    """

    grad: Updates
    weight: jax.Array


def full_gradient(
    loss_fn: LossFn,
    params: Params,
    batches: Iterable[Any],
    *,
    weights: Iterable[Any] | None = None,
    axis_name: AxisName | None = None,
    has_aux: bool = False,
    progress: bool = False,
) -> Updates:
    r"""Compute the mean gradient over all examples of all batches.

    .. math::
      \mu = \frac{\sum_i w_i \nabla \ell(\theta, x_i)}{\sum_i w_i}

    where :math:`i` runs over examples, not over batches, so larger batches have a larger weight. With a
    sum and a count, :math:`\mu` is the gradient of all sums, divided by all counts.

    Args:
      loss_fn: As in `optperm.evaluate`. `loss_fn(params, batch)` returns the scalar mean loss over the
        leading axis of the batch's leaves, or a pair `(sum, count)` of scalars. With `has_aux`, it
        returns `(loss, aux)` or `((sum, count), aux)`.
      params: The params at which the gradient is evaluated.
      batches: Any iterable of batches, such as a list, a generator, or the iterator of a data loader.
        Pass `[batch]` for one batch; a list `[x, y]` of arrays is two batches. A batch is a tree of
        arrays, or of objects that NumPy can convert to arrays. All examples of a batch share leaves of
        rank 0, such as a typed random key. Empty batches are skipped.
      weights: One array of shape (batch,) for each batch, with 1 for real examples, 0 for padding, or
        any fractions. The loss of each example is then evaluated separately, as a batch of
        one, with its own random key (see `optperm.evaluate`). An example with weight 0 may have any
        values, such as NaN. `loss_fn` must be the plain mean: if your loss divides by its own weights,
        per example or per token, return the sum and the count instead. BatchNorm has to use its running
        averages.
      axis_name: The mapped axis or axes over which gradients and weights are summed.
      has_aux: Whether `loss_fn` returns a pair of the loss and an auxiliary value.
      progress: Whether to show a progress bar. This needs `rich`: `pip install rich`.

    Returns:
      The gradient, a tree like params, in float32 or in the dtype of a parameter if that is wider.

    Example:
      >>> import jax.numpy as jnp, optperm
      >>> def loss_fn(params, batch):
      ...     return jnp.mean((batch["x"] * params - batch["y"]) ** 2)
      >>> batches = [
      ...     {"x": jnp.array([1.0, 2.0]), "y": jnp.array([2.0, 2.0])},
      ...     {"x": jnp.array([3.0]), "y": jnp.array([1.0])},
      ... ]
      >>> float(optperm.variance.full_gradient(loss_fn, jnp.array(1.0), batches))  # (-2 + 0 + 12) / 3
      3.3333332538604736
      >>> weights = [jnp.array([1.0, 0.0]), jnp.array([1.0])]
      >>> float(optperm.variance.full_gradient(loss_fn, jnp.array(1.0), batches, weights=weights))
      5.0

    Notes:
      The sums track their own rounding errors (Knuth's TwoSum), so a million batches lose no more
      accuracy than one batch. The gradient of one batch is rounded once to the dtype of the params, as
      in `jax.grad`.

      Each call traces the loss once for each batch shape, so `loss_fn` sees the current values of
      globals, attributes and batch statistics. Functions that the loss passes to `jax.lax.scan`,
      `jax.lax.cond` or `jax.checkpoint` are an exception, because JAX caches their traces. A call
      compiles only new programs, unless the loss calls host functions or captures an array of more than
      2**18 entries. Bind large or changing arrays with `jax.tree_util.Partial`, which makes them
      arguments of the program that need no new compilation.

      Random numbers of a loss, such as dropout masks, are drawn once. The result is the gradient for
      this draw, not the mean over masks, but is unbiased over draws. For a mean over several masks, pass
      each batch several times, each time with another key.

      There are two ways to use many devices. Under `jax.jit`, batches can be arrays that are sharded
      over a mesh of one or many processes (`jax.make_array_from_process_local_data`), while params are
      replicated over the mesh. Inside `jax.pmap` or `jax.shard_map`, each device has its own batches,
      and `axis_name` sums over devices. In both cases, all processes need the same number of batches
      with the same shapes. Pad missing batches with weight 0.

    Raises:
      TypeError: If the loss is not a real scalar, a parameter does not have a real floating dtype, or
        `batches` or `weights` is not an iterable of arrays.
      ValueError: If `axis_name` is not bound, there are no examples, the leaves of a batch have
        different leading axes, weights do not match the batches in number or length, weights or counts
        are negative, nonfinite or all zero, or the loss with weights is not the mean over its examples.
        Traced weights are not checked: if they are invalid, the gradient is NaN.
      ImportError: If `progress` is True and `rich` is not installed.

    Warns:
      UserWarning: If the loss of some examples is not the mean over these examples, as for padded
        batches. Only examples of the first and of the last batch are compared, outside `jax.jit`.

    References:
      Knuth, The Art of Computer Programming, volume 2, section 4.2.2, theorem B
    """
    checks.check_real_floating("params", params, advice="Differentiate the others separately.")
    checks.check_axis_is_bound(axis_name)
    if isinstance(batches, tuple) and batches and all(hasattr(b, "shape") for b in batches):
        got = "a tuple of arrays, which may be one batch: pass [batch], or a list of arrays"
        raise TypeError(f"batches must be an iterable of batches, got {got}.")

    bound = loss_fn if isinstance(loss_fn, Partial) else Partial(loss_fn)
    # Arrays that are bound to the loss are arguments of the program, unlike the function itself.
    arrays, structure = jax.tree.flatten(bound)

    @fresh_jit_once
    def sum_batch(params: Params, batch: Any, weights: Any, arrays: list[Any]) -> _Sums:
        bound = jax.tree.unflatten(structure, arrays)
        return _sum_batch(params, batch, weights, bound, has_aux=has_aux)

    measure_gap = _make_gap(bound, params, has_aux=has_aux)
    total: tuple[_Sums, _Sums] | None = None
    gap, batch, of_batch = 0.0, None, None
    pairs = _pair_with_weights(_show_progress(batches) if progress else batches, weights)
    for batch, of_batch in pairs:
        if total is None:
            gap = measure_gap(batch, of_batch)
            if gap and of_batch is not None:
                wanted = "the mean of the losses of single examples (without BatchNorm)"
                raise ValueError(
                    f"With weights, loss_fn must be {wanted}: for the first batch, the loss differs "
                    f"from this mean by {gap:.3g}."
                )
        # sum_i w_i grad l(theta, x_i) and sum_i w_i over the batch
        with explicit_mesh(params, batch):
            sums = sum_batch(params, batch, of_batch, arrays)
        sums = sums._replace(grad=jax.tree.map(shard_like, sums.grad, params))
        if total is None:
            total = sums, optax.tree.zeros_like(sums)
        else:
            # Load the next batch during the computation, but let no more batches wait.
            jax.block_until_ready(total)
            total = _add(total, sums)
    if total is None:
        raise ValueError("There are no examples in batches: a generator can be used only once.")
    # Padding is usually at the end of the last batch.
    gap = gap or measure_gap(batch, of_batch)
    if gap:
        found = f"it differs by {gap:.3g}"
        if not gap < math.inf:
            only = "only gradients, sums or counts differ"
            found = only if math.isnan(gap) else "an example alone has no finite loss"
        warnings.warn(
            f"The loss of some examples is not the mean of their losses ({found}), so the full gradient "
            "gives examples wrong weights. For padded or masked examples, return a pair (sum, count) "
            "from loss_fn, or pass weights=. BatchNorm has to use its running averages, and random "
            "numbers have to come from a key in the batch.",
            UserWarning,
            stacklevel=2,
        )
    grad, weight = _divide(*total, axis_name=axis_name)
    if checks.is_concrete_number(weight) and not float(weight) > 0.0:
        wanted = "finite and not negative, and not all zero"
        got = f"{float(weight)} (nan if a weight is negative or not finite)"
        raise ValueError(f"weights and counts must be {wanted}, got the sum {got}.")
    return grad


def _sum_batch(
    params: Params, batch: Any, weights: Any, loss_fn: Partial, *, has_aux: bool
) -> _Sums:
    # In shard_map's checked mode, gradients with respect to unvarying params are summed over devices,
    # but the gradient on this device's batch is needed here.
    local = mark_varying(params, varying_axes(batch, weights))
    if weights is None:
        size = float(_count_batch(batch))

        def sum_or_mean(params: Params) -> tuple[jax.Array, jax.Array | None]:
            total, count, _ = checked_sum(loss_fn, params, batch, has_aux=has_aux)
            return total, None if count is None else jax.lax.stop_gradient(count)

        grads, count = jax.grad(sum_or_mean, has_aux=True)(local)
        # A sum is added as it is, and a mean as often as there are examples.
        factor, weight = (size, size) if count is None else (1.0, count)
        weight = jnp.asarray(weight, float)
        return _Sums(
            jax.tree.map(lambda g: factor * g.astype(accumulation_dtype(g)), grads),
            jnp.where(jnp.isfinite(weight) & (weight >= 0.0), weight, jnp.nan),
        )

    weights = jnp.asarray(weights, float)
    counts = weights > 0.0
    examples = _replace_padding(batch, counts)

    def evaluate(params: Params) -> jax.Array:
        return _evaluate_examples(loss_fn, params, examples, has_aux=has_aux)

    # Exact division of the weights by a power of two keeps sums as small as their terms. If the losses
    # have a narrow dtype, a second pullback adds the rounding errors of the weights in the first.
    kept = jnp.where(counts, weights, 0.0)
    unit = jnp.ldexp(jnp.ones_like(weights[0]), jnp.frexp(jnp.sum(kept))[1])
    fractions = kept / unit
    losses, pull = jax.vjp(evaluate, local)
    parts = [fractions.astype(losses.dtype)]
    if losses.dtype.itemsize < 4:
        parts.append((fractions - parts[0].astype(fractions.dtype)).astype(losses.dtype))

    def add(*grads: jax.Array) -> jax.Array:
        wide = functools.reduce(jnp.add, [g.astype(accumulation_dtype(g)) for g in grads])
        return jnp.where(jnp.any(counts), unit.astype(wide.dtype) * wide, 0.0)

    grads = jax.tree.map(add, *(pull(cast_like(part, losses))[0] for part in parts))
    valid = jnp.all(jnp.isfinite(weights) & (weights >= 0.0))
    return _Sums(grads, jnp.where(valid, jnp.sum(weights), jnp.nan))


def _evaluate_examples(
    loss_fn: Partial, params: Params, examples: Any, *, has_aux: bool
) -> jax.Array:
    def evaluate_one(loss_fn: LossFn, example: Any) -> jax.Array:
        loss, count, _ = checked_sum(loss_fn, params, example, has_aux=has_aux)
        if count is not None:
            raise ValueError(
                "A loss that returns a pair (sum, count) needs no weights: leave out weights=."
            )
        return loss

    return map_examples(evaluate_one, loss_fn, examples)


def _replace_padding(batch: Any, counts: jax.Array) -> Any:
    """Replace each example whose weight is 0 by an example with a positive weight."""
    first = jnp.argmax(counts)

    def fill(leaf: jax.Array) -> jax.Array:
        if jnp.ndim(leaf) == 0:
            return leaf
        return jnp.where(counts.reshape(-1, *[1] * (leaf.ndim - 1)), leaf, take(leaf, first)[None])

    return jax.tree.map(fill, batch)


def _make_gap(loss_fn: Partial, params: Params, *, has_aux: bool) -> Callable[[Any, Any], float]:
    """Return the function of a batch and its weights that measures a gap.

    The gap is between the loss of a few examples from both ends of the batch and the mean of their
    losses. The gap is 0 if it is a rounding error, for values that Python cannot see, and if random keys
    would give the two losses different draws. The gap is NaN if the losses agree, but not the gradients,
    or if the sums and counts of halves do not add up.
    """
    arrays, structure = jax.tree.flatten(loss_fn)

    @fresh_jit_once
    def compare(
        params: Params, few: Any, weights: Any, arrays: list[Any]
    ) -> tuple[jax.Array, jax.Array]:
        loss_fn = jax.tree.unflatten(structure, arrays)
        kept = jnp.ones(_count_batch(few), bool) if weights is None else weights > 0.0
        examples = _replace_padding(few, kept)
        together, count, _ = checked_sum(loss_fn, params, examples, has_aux=has_aux)
        if count is not None and weights is None:
            return jnp.zeros([]), jnp.zeros([])
        losses = _evaluate_examples(loss_fn, params, examples, has_aux=has_aux)
        wide = accumulation_dtype(losses)
        error = jnp.abs(together.astype(wide) - jnp.mean(losses.astype(wide)))
        rounding = max(float(jnp.finfo(losses.dtype).eps) ** 0.5, _ROUNDING)
        # An example alone may have no loss, if the loss divides by the weights in the batch.
        error = jnp.where(jnp.isfinite(together) & ~jnp.isfinite(error), jnp.inf, error)
        return error, rounding * jnp.max(jnp.abs(losses)).astype(wide)

    halves = fresh_jit_once(lambda p, b: compare_halves(loss_fn, p, b, has_aux=has_aux))

    def measure(batch: Any, weights: Any) -> float:
        leaves = jax.tree.leaves((arrays, params, batch, weights))
        if not all(can_be_seen(leaf) for leaf in leaves) or any(map(is_key, leaves)):
            return 0.0
        size = _count_batch(batch)
        ends = np.unique(np.r_[: min(_FEW, size), max(size - _FEW, 0) : size])
        few, of_few = _take_examples((batch, weights), ends)
        with explicit_mesh(params, batch):
            error, rounding = (float(x) for x in compare(params, few, of_few, arrays))
            if error > rounding or error == math.inf:
                return error
            if weights is not None or len(ends) < 2:
                return 0.0
            most = len(ends)
            rows = np.unique(np.r_[: min(_FEWER, most), max(most - _FEWER, 0) : most])
            agrees = judge_halves(*halves(params, _take_examples(few, rows)))
            return 0.0 if agrees else math.nan

    return measure


@jax.jit
def _take_examples(batch: Any, rows: Any) -> Any:
    return jax.tree.map(lambda leaf: take_rows(leaf, rows) if jnp.ndim(leaf) else leaf, batch)


@functools.partial(jax.jit, donate_argnames=("total",))
def _add(total: tuple[_Sums, _Sums], new: _Sums) -> tuple[_Sums, _Sums]:
    """Add new sums to the total, and the rounding errors of these additions to the errors."""
    old, errors = total
    sums = jax.tree.map(operator.add, old, new)

    # Knuth's TwoSum: s + error = a + b exactly, even if |a| < |b|
    def compute_error(a: jax.Array, b: jax.Array, s: jax.Array) -> jax.Array:
        b_in_s = s - a
        return (a - (s - b_in_s)) + (b - b_in_s)

    lost = jax.tree.map(compute_error, old, new, sums)
    return sums, jax.tree.map(operator.add, errors, lost)


@functools.partial(jax.jit, static_argnames=("axis_name",))
def _divide(sums: _Sums, errors: _Sums, *, axis_name: AxisName | None) -> tuple[Updates, jax.Array]:
    if axis_name is not None:
        sums, errors = jax.lax.psum((sums, errors), axis_name)
    # mu = sum_i w_i grad l_i / sum_i w_i
    grad, weight = jax.tree.map(operator.add, sums, errors)
    return jax.tree.map(lambda g: g / weight.astype(g.dtype), grad), weight


def _pair_with_weights(
    batches: Iterable[Any], weights: Iterable[Any] | None
) -> Iterator[tuple[Any, Any]]:
    """Yield each nonempty batch as arrays, with its weights or None."""
    pairs = ((b, None) for b in batches) if weights is None else zip(batches, weights, strict=True)
    for index, (batch, own) in enumerate(pairs):
        arrays: Any = as_arrays(batch)
        of_batch: Any = None if weights is None else as_arrays(own)
        checks.check_arrays(f"batches[{index}]", arrays)
        size = _count_batch(arrays)
        if weights is not None and jnp.shape(of_batch) != (size,):
            shape = jnp.shape(of_batch)
            raise ValueError(f"weights[{index}] must be of shape ({size},), got shape {shape}.")
        if size:
            yield arrays, of_batch


def _count_batch(batch: Any) -> int:
    """Return the number of examples of a batch, which may be 0."""
    shapes = [jnp.shape(leaf) for leaf in jax.tree.leaves(batch)]
    sizes = {shape[0] for shape in shapes if shape}
    if len(sizes) != 1:
        raise ValueError(
            "The leaves of a batch in batches, except scalars, must agree in their leading axis, and at "
            f"least one leaf must have an axis, got shapes {shapes}."
        )
    return int(sizes.pop())


def _show_progress(batches: Iterable[Any]) -> Iterable[Any]:
    rich = import_optional("rich.progress", needed_by="progress=True", install="rich")
    total = len(batches) if isinstance(batches, Sized) else None
    bar: Iterable[Any] = rich.track(batches, description="full gradient", total=total)
    return bar
