"""The exact mean gradient over all examples, streamed batch by batch."""

import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.tree_util import Partial

from optperm.contract import checks
from optperm.contract.dtypes import accumulation_dtype, as_arrays, cast_like
from optperm.contract.extras import import_optional
from optperm.contract.keys import is_key
from optperm.contract.mapped_axes import AxisName, mark_varying, varying_axes
from optperm.contract.shardings import shard_like, take
from optperm.evaluation import LossFn, checked_loss, map_examples

_T = TypeVar("_T")
_END = object()
# Compiled programs by the form of their arguments and their text, the oldest first.
_PROGRAMS: dict[Any, Callable[..., Any]] = {}
_MOST_PROGRAMS = 64


class _Sums(NamedTuple):
    """Sums over examples.

    Attributes:
      grad: Of the gradients, each times its example's weight; at least float32, shaped like params.
      weight: Of the weights; NaN if one of them is negative or not finite.
    """

    grad: optax.Updates
    weight: jax.Array


def full_gradient(
    loss_fn: LossFn,
    params: optax.Params,
    batches: Iterable[Any],
    *,
    weights: Iterable[Any] | None = None,
    axis_name: AxisName | None = None,
    has_aux: bool = False,
    progress: bool = False,
) -> optax.Updates:
    r"""The mean gradient over all examples of all batches.

    .. math::
      \mu = \frac{\sum_i w_i \nabla \ell(\theta, x_i)}{\sum_i w_i}

    where :math:`i` runs over examples, not over batches: batches of unequal size count by their size.
    The sums keep track of their own rounding errors (Knuth's TwoSum), so that a million batches lose
    no more than one. What one batch gives is rounded once to a narrower dtype of the params, as
    `jax.grad` does.

    Each call traces the loss once for each batch shape, so what `loss_fn` reads beside its arguments
    (a global, an attribute, batch statistics) is what it is now. A program is compiled only where it
    differs from the earlier ones. Arrays that change from call to call are best bound by
    `jax.tree_util.Partial`: as arguments of the program they compile nothing anew.

    What a loss draws at random, such as dropout masks, is drawn once: the result is the gradient of that
    draw, and so unbiased over draws, not the mean over masks. Pass each batch several times, each with
    another key, for a mean over as many.

    Over many devices there are two ways. Under `jax.jit` batches may be arrays sharded over a mesh, of
    one process or of many (`jax.make_array_from_process_local_data`), with params replicated over it;
    nothing else is needed. Inside `jax.pmap` or `jax.shard_map` each device brings its own batches, and
    `axis_name` sums over devices. In both all processes bring the same number of batches of the same
    shapes: fill up what is missing, and give the filling weight 0.

    Args:
      loss_fn: As in `optperm.evaluate`: `loss_fn(params, batch)`, the scalar mean loss over the leading
        axis of the batch's leaves, or `(loss, aux)` with `has_aux`.
      params: The parameters at which to evaluate.
      batches: Any iterable of batches: a list, a generator, the iterator of a data loader. A batch is a
        tree of arrays (or of what NumPy can convert to arrays). Leaves of rank 0, such as a typed
        random key, are shared by all examples of a batch. One without examples is passed over.
      weights: One array of shape (batch,) for each batch, beside it: 1 for an example that counts, 0 for
        padding, or any fraction. The loss of each example is then taken by itself, as a batch of one,
        with a random key of its own (see `optperm.evaluate`), and what stands in an example of weight 0,
        NaN for instance, makes no difference. So `loss_fn` is the plain mean: a loss that divides by
        weights of its own, per example or per token, has another gradient in each batch than its share
        of the whole; pass those weights here instead. BatchNorm needs its running averages.
      axis_name: A mapped axis, or several, over which sums and weights are summed.
      has_aux: Whether `loss_fn` returns something beside the loss.
      progress: Whether to show a progress bar. Needs `rich`: `pip install 'optperm[progress]'`.

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
      >>> float(optperm.full_gradient(loss_fn, jnp.array(1.0), batches))  # (-2 + 0 + 12) / 3
      3.3333332538604736
      >>> weights = [jnp.array([1.0, 0.0]), jnp.array([1.0])]
      >>> float(optperm.full_gradient(loss_fn, jnp.array(1.0), batches, weights=weights))
      5.0

    Raises:
      TypeError: If the loss is not a real scalar, or an argument is of the wrong type.
      ValueError: If `axis_name` is not bound, there are no examples, the leaves of a batch disagree in
        their leading axis, weights are not as many and as long as the batches, negative, not finite,
        or all zero, or with weights the loss is not the mean of what its examples lose. Values that
        are being traced are not checked: where such weights are wrong the gradient is NaN.
      ImportError: If `progress` is on and `rich` is not installed.

    References:
      Knuth, The Art of Computer Programming, volume 2, section 4.2.2, theorem B
    """
    checks.check_function("loss_fn", loss_fn, "(params, batch)")
    checks.check_real_floating("params", params, advice="Differentiate the others by themselves.")
    checks.check_flag("has_aux", has_aux)
    checks.check_flag("progress", progress)
    _check_iterable("batches", batches)
    if weights is not None:
        _check_iterable("weights", weights)
    checks.check_axis_name("axis_name", axis_name)
    checks.check_axis_is_bound(axis_name)

    bound = loss_fn if isinstance(loss_fn, Partial) else Partial(loss_fn)
    sums_of = _traced_anew(functools.partial(_batch_sums, has_aux=has_aux))
    total: tuple[_Sums, _Sums] | None = None
    for batch, of_batch in _with_weights(_bar(batches) if progress else batches, weights):
        if total is None and of_batch is not None:
            _check_is_mean(bound, params, batch, of_batch, has_aux=has_aux)
        sums = sums_of(params, batch, of_batch, bound)
        sums = sums._replace(grad=jax.tree.map(shard_like, sums.grad, params))
        if total is None:
            total = sums, optax.tree.zeros_like(sums)
        else:
            # One batch is computed while the next is loaded, and no more of them pile up.
            jax.block_until_ready(total)
            total = _add(total, sums)
    if total is None:
        raise ValueError(
            "There are no examples in batches: it yields no batch, or only empty ones. A generator "
            "can be gone through only once: pass a new one for each full gradient."
        )
    grad, weight = _mean(*total, axis_name=axis_name)
    if weights is not None and checks.is_concrete_number(weight) and not float(weight) > 0.0:
        raise ValueError(
            "weights must be finite and not negative, and not all zero: 1 for an example that "
            f"counts, 0 for padding. Their sum is {float(weight)}."
        )
    return grad


def _traced_anew(function: Callable[..., _T]) -> Callable[..., _T]:
    """Compile a function for the calls that follow, without programs of what a loss closed over before.

    `jax.jit` finds a program by the function alone, and would not see that a global or an attribute
    that the loss reads has changed. Here each function returned traces the loss once for each form of
    its arguments, and a program is used again only where its text is the same.
    """
    fresh = jax.jit(function)
    found: dict[Any, Callable[..., _T]] = {}

    def call(*args: Any) -> _T:
        leaves, structure = jax.tree.flatten(args)
        if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
            return fresh(*args)
        form = structure, tuple(map(_form, leaves))
        if form not in found:
            consts = jax.make_jaxpr(fresh)(*args).consts
            if any(isinstance(const, jax.core.Tracer) for const in consts):
                return fresh(*args)
            lowered = fresh.lower(*args)
            program = form, lowered.as_text()
            if program not in _PROGRAMS:
                while len(_PROGRAMS) >= _MOST_PROGRAMS:
                    del _PROGRAMS[next(iter(_PROGRAMS))]
                _PROGRAMS[program] = lowered.compile()
            found[form] = _PROGRAMS[program]
        return found[form](*args)

    return call


def _form(leaf: Any) -> Any:
    """Return what a program depends on of an argument beside its values."""
    return jax.typeof(leaf), getattr(leaf, "sharding", None), getattr(leaf, "committed", None)


def _batch_sums(
    params: optax.Params, batch: Any, weights: Any, loss_fn: Partial, *, has_aux: bool
) -> _Sums:
    # In shard_map's checked mode the gradient with respect to params that do not vary would arrive
    # summed over devices.
    local = mark_varying(params, varying_axes(batch, weights))
    if weights is None:
        size = float(_batch_size(batch))
        grads = jax.grad(lambda p: checked_loss(loss_fn, p, batch, has_aux=has_aux)[0])(local)
        return _Sums(
            jax.tree.map(lambda g: size * g.astype(accumulation_dtype(g)), grads),
            jnp.asarray(size, float),
        )

    weights = jnp.asarray(weights, float)
    counts = weights > 0.0
    examples = _without_padding(batch, counts)

    def losses_of(params: optax.Params) -> jax.Array:
        return _losses_of_examples(loss_fn, params, examples, has_aux=has_aux)

    # As shares of a power of two, exact in every dtype, weights make no sum larger than its terms. What
    # they lose in a narrow dtype of the losses goes by itself.
    kept = jnp.where(counts, weights, 0.0)
    unit = jnp.ldexp(jnp.ones_like(weights[0]), jnp.frexp(jnp.sum(kept))[1])
    shares = kept / unit
    losses, pull = jax.vjp(losses_of, local)
    parts = [shares.astype(losses.dtype)]
    if losses.dtype.itemsize < 4:
        parts.append((shares - parts[0].astype(shares.dtype)).astype(losses.dtype))

    def summed(*grads: jax.Array) -> jax.Array:
        wide = functools.reduce(jnp.add, [g.astype(accumulation_dtype(g)) for g in grads])
        return jnp.where(jnp.any(counts), unit.astype(wide.dtype) * wide, 0.0)

    grads = jax.tree.map(summed, *(pull(cast_like(part, losses))[0] for part in parts))
    valid = jnp.all(jnp.isfinite(weights) & (weights >= 0.0))
    return _Sums(grads, jnp.where(valid, jnp.sum(weights), jnp.nan))


def _losses_of_examples(
    loss_fn: Partial, params: optax.Params, examples: Any, *, has_aux: bool
) -> jax.Array:
    def loss_of_one(loss_fn: LossFn, example: Any) -> jax.Array:
        return checked_loss(loss_fn, params, example, has_aux=has_aux)[0]

    return map_examples(loss_of_one, loss_fn, examples)


def _without_padding(batch: Any, counts: jax.Array) -> Any:
    """Put an example that counts in the place of each that does not."""
    first = jnp.argmax(counts)

    def fill(leaf: jax.Array) -> jax.Array:
        if jnp.ndim(leaf) == 0:
            return leaf
        return jnp.where(counts.reshape(-1, *[1] * (leaf.ndim - 1)), leaf, take(leaf, first)[None])

    return jax.tree.map(fill, batch)


def _check_is_mean(
    loss_fn: Partial, params: optax.Params, batch: Any, weights: Any, *, has_aux: bool
) -> None:
    """Refuse a loss that is no mean of what its examples lose by themselves, such as one with BatchNorm.

    Nothing is checked where a random key would give the two losses other draws.
    """
    leaves = jax.tree.leaves((loss_fn, params, batch, weights))
    if any(isinstance(leaf, jax.core.Tracer) or is_key(leaf) for leaf in leaves):
        return

    def compare(
        params: optax.Params, batch: Any, weights: jax.Array, loss_fn: Partial
    ) -> tuple[jax.Array, jax.Array]:
        examples = _without_padding(batch, jnp.asarray(weights, float) > 0.0)
        together = checked_loss(loss_fn, params, examples, has_aux=has_aux)[0]
        losses = _losses_of_examples(loss_fn, params, examples, has_aux=has_aux)
        wide = accumulation_dtype(losses)
        error = jnp.abs(together.astype(wide) - jnp.mean(losses.astype(wide)))
        rounding = float(jnp.finfo(losses.dtype).eps) ** 0.5
        return error, rounding * jnp.max(jnp.abs(losses)).astype(wide)

    error, rounding = _traced_anew(compare)(params, batch, weights, loss_fn)
    if float(error) > float(rounding):
        raise ValueError(
            "With weights, loss_fn must be the mean of what each example loses by itself, but on the "
            f"first of batches it differs from that by {float(error):.3g}. BatchNorm in training mode, "
            "a sum, or a division by the weights of the batch does that: use the running averages of "
            "BatchNorm, return the plain mean, or leave weights out and drop the padding."
        )


@functools.partial(jax.jit, donate_argnames=("total",))
def _add(total: tuple[_Sums, _Sums], new: _Sums) -> tuple[_Sums, _Sums]:
    """Adds to the sums, and what that rounds off to their errors."""
    old, errors = total
    sums = jax.tree.map(operator.add, old, new)

    def rounded_off(a: jax.Array, b: jax.Array, s: jax.Array) -> jax.Array:
        b_in_s = s - a
        return (a - (s - b_in_s)) + (b - b_in_s)

    lost = jax.tree.map(rounded_off, old, new, sums)
    return sums, jax.tree.map(operator.add, errors, lost)


@functools.partial(jax.jit, static_argnames=("axis_name",))
def _mean(
    sums: _Sums, errors: _Sums, *, axis_name: AxisName | None
) -> tuple[optax.Updates, jax.Array]:
    if axis_name is not None:
        sums, errors = jax.lax.psum((sums, errors), axis_name)
    grad, weight = jax.tree.map(operator.add, sums, errors)
    return jax.tree.map(lambda g: g / weight.astype(g.dtype), grad), weight


def _with_weights(
    batches: Iterable[Any], weights: Iterable[Any] | None
) -> Iterator[tuple[Any, Any]]:
    """The batches that have examples, as arrays, each with its weights or None."""
    others = None if weights is None else iter(weights)
    for index, batch in enumerate(batches):
        arrays = as_arrays(batch)
        checks.check_arrays(f"batches[{index}]", arrays)
        size = _batch_size(arrays)
        of_batch = None
        if others is not None:
            if (own := next(others, _END)) is _END:
                raise ValueError(
                    f"weights ended after {index} arrays, but batches go on: one array a batch."
                )
            of_batch = as_arrays(own)
            kind = checks.dtype_of(f"weights[{index}]", of_batch)
            real = (jnp.floating, jnp.integer, jnp.bool_)
            if not any(jnp.issubdtype(kind, each) for each in real):
                raise TypeError(f"weights must be of real numbers, weights[{index}] is {kind}.")
            if jnp.shape(of_batch) != (size,):
                raise ValueError(
                    f"weights must be one number an example: batch {index} has {size} examples, but "
                    f"its weights are of shape {jnp.shape(of_batch)}."
                )
        if size:
            yield arrays, of_batch
    if others is not None and next(others, _END) is not _END:
        raise ValueError("batches ended, but weights go on: one array a batch.")


def _batch_size(batch: Any) -> int:
    shapes = [jnp.shape(leaf) for leaf in jax.tree.leaves(batch)]
    sizes = {shape[0] for shape in shapes if shape}
    if len(sizes) != 1:
        raise ValueError(
            "In each of batches the leaves must agree in their leading axis, of examples, got "
            f"leaves of shapes {shapes}. Leaves of rank 0 are shared; a random key has rank 0 if it is "
            "a typed one, from jax.random.key."
        )
    return int(sizes.pop())


def _check_iterable(name: str, value: object) -> None:
    is_iterable = hasattr(value, "__iter__") or hasattr(value, "__getitem__")
    if not is_iterable or isinstance(value, Mapping | str | bytes) or _is_scalar(value):
        raise TypeError(
            f"{name} must be an iterable, one item a batch, got {type(value).__name__}. "
            "For a single batch pass a list of it."
        )


def _is_scalar(value: Any) -> bool:
    return isinstance(value, jax.Array | np.ndarray | np.generic) and value.ndim == 0


def _bar(batches: Iterable[Any]) -> Iterable[Any]:
    extra = "optperm[progress]"
    rich = import_optional("rich.progress", needed_by="progress=True", install=extra)
    total = len(batches) if isinstance(batches, Sized) else None
    bar: Iterable[Any] = rich.track(batches, description="full gradient", total=total)
    return bar
