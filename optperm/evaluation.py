"""Compute the loss, the gradient and other functions that a method may need, from one loss function."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

from optperm.core import checks
from optperm.core.dtypes import accumulation_dtype
from optperm.core.fresh_jit import fresh_jit_once
from optperm.core.keys import is_key
from optperm.core.mapped_axes import AxisName, mark_varying, shared, varying_axes, varying_like
from optperm.core.noise import normal_like
from optperm.core.shapes import Params, Updates
from optperm.core.shardings import explicit_sharding, take_rows
from optperm.core.transformation import known_extra_args
from optperm.core.trees import fill_masked, is_masked, mask_like, trained_part

LossFn = Callable[[Params, Any], Any]

# The number of random orders of a batch in which its loss is compared with the losses of its halves. The
# mean of 16 normal numbers with mean 0 exceeds 6.5 times its standard error in one of 100,000 cases.
_ORDERS, _ERRORS = 16, 6.5
# The smallest relative difference that counts.
_DIFFERS = 0.01
# The relative difference between a count and the sum of its parts that exceeds rounding in bfloat16.
_COUNTS_DIFFER = 0.02
# The place of the gradient's number in the results of `compare_halves`.
_SLOPE = 1
# The rounding error of a gradient, relative to the loss.
_ROUNDING = 1e-4
NOT_MEAN = (
    "The loss of a batch is not the mean of the losses of its halves, so it is no mean over examples. "
    "It sums, weights or mixes examples (as predictions (n,) minus labels (n, 1) do), or returns a pair "
    "that is not (sum, count), such as (loss, accuracy): use jnp.mean and equal shapes."
)
NOT_GRADIENT = (
    "A transformation before the sampler changes the gradient, so draws do not follow the posterior: "
    "remove clipping, weight decay (use normal_prior), momentum and Adam's moments."
)


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Result of `evaluate` on one batch.

    Attributes:
      value: The loss, a scalar.
      grad: The gradient, a tree like params. For complex params, this is the conjugate of `jax.grad`, so
        a step in the opposite direction descends, as Optax expects.
      aux: The second result of the loss function; None without `has_aux`.
      extra_args: The extra arguments of this batch for the transformations of this library, by name:
        `tx.update(e.grad, opt_state, params, **e.extra_args)`.
      count: The count of the batch, over all replicas of `axis_name`, if the loss function returns a sum
        and a count; otherwise None.
    """

    value: jax.Array
    grad: Updates
    aux: Any
    extra_args: dict[str, Any]
    count: jax.Array | None = None


def evaluate(
    loss_fn: LossFn,
    params: Params,
    batch: Any,
    *,
    has_aux: bool = False,
    axis_name: AxisName | None = None,
    example: Any = None,
) -> Evaluation:
    r"""Evaluate a loss on one batch, and make the functions of this batch that methods may need.

    .. math::
      L_B(\theta) = \frac{1}{|B|} \sum_{i \in B} \ell(\theta, x_i), \qquad g = \nabla L_B(\theta)

    Args:
      loss_fn: A function `loss_fn(params, batch)` that returns the scalar mean loss over the leading
        axis of the batch's leaves, or a pair `(sum, count)` of scalars, whose loss is sum / count. With
        `has_aux`, it returns `(loss, aux)` or `((sum, count), aux)`. See Notes.
      params: The params at which to evaluate. In a model made of dataclasses, as in Equinox, the params
        are the floating arrays; the gradient is None for all other leaves.
      batch: A tree of arrays. All examples share leaves of rank 0, such as a typed random key. For
        gradients of single examples, a key is folded with the index of the example, so each example has
        its own dropout mask. Keys that `jax.tree_util.Partial` binds to `loss_fn` are folded too.
      has_aux: Whether `loss_fn` returns its loss together with a second result.
      axis_name: The mapped axis or axes over which `value`, `grad`, `value_fn` and `grad_fn` are
        averaged, under `jax.pmap`, `jax.vmap` and `jax.shard_map`, including the checked mode of
        `jax.shard_map`. Sums and counts are added over the axes, so the loss is the total sum divided
        by the total count.
      example: A batch of one example, drawn independently of `batch`, for methods that compare their
        gradients.

    Returns:
      An `Evaluation`. Its `extra_args` contains

      - `value`: the loss; `grad`: the gradient;
      - `value_fn(params)` and `grad_fn(params)`: the loss and the gradient of the same batch at other
        params;
      - `per_example_grad_fn(params)`: the gradient of each example, a tree like params with a leading
        axis of the batch's size, not averaged over `axis_name`;
      - `example_grad_fn(params)`, with an `example`: the gradient of the example, also not averaged;
      - `weight`, if `loss_fn` returns a sum and a count and there is no `axis_name`: the count, by which
        `optperm.agn` and `optperm.diloco` weigh the replica.

      `grad_fn` and `per_example_grad_fn` can also use a part of the batch: `start=` (0) and `size=`.

    Example:
      >>> import jax.numpy as jnp, optax, optperm
      >>> def loss_fn(params, batch):
      ...     return jnp.mean((batch["x"] * params - batch["y"]) ** 2)
      >>> batch = {"x": jnp.array([1.0, 2.0]), "y": jnp.array([2.0, 2.0])}
      >>> e = optperm.evaluate(loss_fn, jnp.array(1.0), batch)
      >>> float(e.value), float(e.grad)
      (0.5, -1.0)
      >>> e.extra_args["per_example_grad_fn"](jnp.array(1.0)).tolist()
      [-2.0, 0.0]
      >>> tx = optax.sgd(0.1)
      >>> opt_state = tx.init(jnp.array(1.0))
      >>> tx = optax.with_extra_args_support(tx)
      >>> updates, opt_state = tx.update(e.grad, opt_state, jnp.array(1.0), **e.extra_args)

    Notes:
      With padded or masked examples, or sequences of different lengths, return the sum of the losses
      that count and their number: `(jnp.sum(mask * losses), jnp.sum(mask))`. Then padding changes
      neither the loss nor the gradient, on one device and over `axis_name`. Where nothing counts, the
      loss and its gradient are zero. A part of the batch, or a single example, has its own sum and
      count, so the mean of the examples' gradients is the gradient of the batch only if all counts are
      equal. A tuple of two scalars is a sum and a count, so for a loss and an aux, pass `has_aux=True`.

      The functions of `extra_args` cost nothing unless a method calls them. `optax.contrib.sam` accepts
      no extra argument except `grad_fn`:
      `tx.update(e.grad, opt_state, params, grad_fn=e.extra_args["grad_fn"])`.

      Inside `optax.masked` or `optax.partition`, a method sees only its part of the params. If a leaf of
      the params given to one of these functions is an `optax.MaskedNode`, the function uses the leaf
      from this evaluation and returns no gradient for it.

    Raises:
      TypeError: If the loss is neither a real scalar nor a pair of real scalars.
      ValueError: If `axis_name` is not bound where `evaluate` is called, or params are masked.
    """
    checks.check_axis_is_bound(axis_name)
    return evaluate_part(
        loss_fn,
        params,
        batch,
        has_aux=has_aux,
        axis_name=axis_name,
        count_axis=axis_name,
        example=example,
    )


def evaluate_part(
    loss_fn: LossFn,
    params: Params,
    batch: Any,
    *,
    has_aux: bool = False,
    axis_name: AxisName | None = None,
    count_axis: AxisName | None = None,
    example: Any = None,
) -> Evaluation:
    """Evaluate a loss as `evaluate` does, with counts that are averaged over their own axes.

    With `count_axis` but without `axis_name`, the results belong to one replica, and their means over
    `count_axis` belong to all replicas: each replica divides its sum by the mean of the counts.
    """
    here, params = params, trained_part(params)

    def loss_and_aux(
        params: Params,
        batch: Any,
        loss_fn: LossFn = loss_fn,
        count_axis: AxisName | None = count_axis,
    ) -> tuple[jax.Array, Any]:
        total, count, aux = checked_sum(loss_fn, fill_masked(params, here), batch, has_aux=has_aux)
        return divide_sum(total, count, count_axis), (count, aux)

    def mean(tree: Any) -> Any:
        return tree if axis_name is None else jax.lax.pmean(tree, axis_name)

    # Optax's line searches pass all their extra arguments to value_fn, which must accept them.
    def value_fn(
        params: Params,
        *,
        grad_fn: Any = None,
        per_example_grad_fn: Any = None,
        example_grad_fn: Any = None,
        full_grad_fn: Any = None,
        weight: Any = None,
        watch: Any = None,
    ) -> jax.Array:
        del grad_fn, per_example_grad_fn, example_grad_fn, full_grad_fn, weight, watch
        trained = trained_part(params)
        return mean(loss_and_aux(shared(trained, batch, axis_name), batch)[0])

    # g = grad L_B at params that vary like the batch, so the gradient stays local and is averaged once
    def value_and_grad(
        params: Params, examples: Any, count_axis: AxisName | None = count_axis
    ) -> tuple[tuple[jax.Array, Any], Updates]:
        local = varying_like(trained_part(params), examples, axis_name)
        loss = functools.partial(loss_and_aux, count_axis=count_axis)
        found, grad = jax.value_and_grad(loss, has_aux=True)(local, examples)
        return found, jax.tree.map(jnp.conj, grad)

    # The opaque mode of Optax's SAM also passes the number of its inner step.
    def grad_fn(
        params: Params,
        inner_step: Any = None,
        *,
        start: int | jax.Array = 0,
        size: int | None = None,
    ) -> Updates:
        del inner_step
        return mean(value_and_grad(params, part_of(batch, start, size))[1])

    def per_example_grad_fn(
        params: Params, *, start: int | jax.Array = 0, size: int | None = None
    ) -> Updates:
        local = varying_like(trained_part(params), batch, axis_name)

        # One example is a batch of one, so for any loss_fn, the mean loss is the example's loss.
        def grad_of_one(loss_fn: LossFn, example: Any) -> Updates:
            grad = jax.grad(lambda p: loss_and_aux(p, example, loss_fn, None)[0])(local)
            return jax.tree.map(jnp.conj, grad)

        return map_examples(grad_of_one, loss_fn, part_of(batch, start, size), first=start)

    def example_grad_fn(params: Params) -> Updates:
        return value_and_grad(params, example, None)[1]

    # Estimators of the gradient noise compare this number with their batch_size.
    vars(grad_fn)["num_examples"] = num_examples(batch)
    # With random keys, the mean of the examples' gradients is not the gradient of the batch.
    vars(per_example_grad_fn)["draws_anew"] = any(
        map(_is_shared_key, jax.tree.leaves((loss_fn, batch)))
    )
    (value, (count, aux)), grad = value_and_grad(params, batch)
    value, grad = mean(value), mean(grad)
    extra_args = {
        "value": value,
        "grad": grad,
        "value_fn": value_fn,
        "grad_fn": grad_fn,
        "per_example_grad_fn": per_example_grad_fn,
    }
    if example is not None:
        extra_args["example_grad_fn"] = example_grad_fn
    if count is not None and count_axis is None:
        extra_args["weight"] = count
    if count is not None and axis_name is not None:
        count = jax.lax.psum(count, axis_name)
    return Evaluation(value=value, grad=grad, aux=aux, extra_args=extra_args, count=count)


def checked_loss(
    loss_fn: LossFn, params: Params, batch: Any, *, has_aux: bool
) -> tuple[jax.Array, Any]:
    """Return the loss, a real scalar, and the second result of `loss_fn`."""
    total, count, aux = checked_sum(loss_fn, params, batch, has_aux=has_aux)
    return divide_sum(total, count), aux


def checked_sum(
    loss_fn: LossFn, params: Params, batch: Any, *, has_aux: bool
) -> tuple[jax.Array, jax.Array | None, Any]:
    """Return the loss and None, or a sum and its count, and the second result of `loss_fn`."""
    _check_is_whole(params)
    out = loss_fn(params, batch)
    loss, aux = out if has_aux else (out, None)
    return *split_loss(loss), aux


def split_loss(loss: Any) -> tuple[jax.Array, jax.Array | None]:
    """Return a loss and None, or the sum and the count of a pair, in the dtype of the sum."""
    is_pair = isinstance(loss, tuple) and len(loss) == 2
    total, count = loss if is_pair else (loss, 1)
    if not (_is_scalar(total, jnp.floating) and _is_scalar(count, jnp.floating, jnp.integer)):
        wanted = (
            "a real scalar, a pair of scalars (sum, count), or a pair (loss, aux) with has_aux=True"
        )
        is_array = jax.tree_util.all_leaves([loss])
        came = jax.typeof(loss) if is_array else f"a {type(loss).__name__}"
        came = f"a tuple of {len(loss)}" if isinstance(loss, tuple) else came
        raise TypeError(f"loss_fn must return {wanted}, got {came}.")
    return total, jnp.asarray(count).astype(jnp.result_type(total)) if is_pair else None


def _is_scalar(value: Any, *kinds: Any) -> bool:
    if not jax.tree_util.all_leaves([value]) or jnp.shape(value):
        return False
    return any(jnp.issubdtype(jnp.result_type(value), kind) for kind in kinds)


def divide_sum(
    total: jax.Array, count: jax.Array | None, axis_name: AxisName | None = None
) -> jax.Array:
    r"""Return sum / count, zero if nothing counts; the sum itself if there is no count.

    Over an axis, the result is this replica's part of the loss of all replicas, whose mean over the axis
    is :math:`L = S / C` with :math:`S = \sum_i S_i` and :math:`C = \sum_i C_i`.
    """
    if count is None:
        return total
    if axis_name is None:
        return _quotient(total, count)
    # The derivative of L is sum_i (S_i' - L C_i') / C
    fixed = jax.lax.stop_gradient(count)
    mean_sum, mean_count = jax.lax.pmean((jax.lax.stop_gradient(total), fixed), axis_name)
    loss = _quotient(mean_sum, mean_count)
    return _quotient(total - loss * (count - fixed), mean_count)


def _quotient(total: jax.Array, count: jax.Array) -> jax.Array:
    is_none = count == 0
    # A divisor of one keeps the gradient of the branch that is not chosen finite.
    return jnp.where(is_none, jnp.zeros_like(total), total / jnp.where(is_none, 1, count))


def _check_is_whole(params: Params) -> None:
    """Raise a ValueError if some params are masked, because a loss needs all params."""
    if any(map(is_masked, jax.tree.leaves(params, is_leaf=is_masked))):
        raise ValueError(
            "The loss got params with an optax.MaskedNode, because methods in optax.masked and "
            "optax.partition see only their part. Make closures from an evaluation at all params: "
            'full_grad_fn=optperm.evaluate(loss_fn, params, all_examples).extra_args["grad_fn"], and '
            "put optperm.with_loss outside of all other transformations."
        )


def is_mean(loss_fn: LossFn, params: Params, batch: Any, *, has_aux: bool = False) -> bool:
    r"""Return whether the loss of a batch is the mean of the losses of its halves, up to noise.

    .. math:: L_B(\theta) = \frac{|B_1|}{|B|} L_{B_1}(\theta) + \frac{|B_2|}{|B|} L_{B_2}(\theta)

    The same holds for the gradients, which are compared too: at params of zero, a loss that mixes
    examples may still have the right values. The loss is evaluated on several random orders of the
    batch, outside of any compiled step. Rounding and random numbers, such as dropout masks, change the
    loss of a batch from order to order, and these changes show which difference from the mean over the
    halves is too large. A sum and a count take the place of a loss and the number of examples, and the
    counts of the halves have to add up.

    Args:
      loss_fn: As in `evaluate`. Random keys that `jax.tree_util.Partial` binds to it are folded with the
        number of the evaluation.
      params: The params.
      batch: The batch, a tree of arrays. Examples share leaves of rank 0; keys among them are folded.
      has_aux: Whether `loss_fn` returns a pair.
    """
    if num_examples(batch) < 2:
        return True
    run = fresh_jit_once(lambda p, b: compare_halves(loss_fn, p, b, has_aux=has_aux))
    return judge_halves(*run(params, batch))


def compare_halves(
    loss_fn: LossFn, params: Params, batch: Any, *, has_aux: bool = False
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return numbers of a batch, their means over its halves, and the sizes of the halves' numbers.

    The numbers are the loss, the gradient in a random direction, and the count, in a row for each of
    several random orders. The arguments are as in `is_mean`; the batch has at least two examples.
    """
    size = num_examples(batch)
    half = size // 2
    # In shard_map's checked mode, gradients with respect to unvarying params are sums over devices.
    params = mark_varying(params, varying_axes(batch))

    # Orders from NumPy compile in half of the time.
    rng = np.random.default_rng(0)
    orders = np.array([rng.permutation(size) for _ in range(_ORDERS)])
    # The direction of the gradients
    z = normal_like(jax.random.key_data(jax.random.key(1)), params)

    def compare(each: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        key, order = each

        def numbers(rows: jax.Array, number: int) -> tuple[jax.Array, jax.Array]:
            def fold(leaf: Any) -> Any:
                return jax.random.fold_in(leaf, jax.random.bits(jax.random.fold_in(key, number)))

            def choose(leaf: Any) -> Any:
                if jnp.ndim(leaf):
                    return take_rows(leaf, rows)
                return fold(leaf) if _is_shared_key(leaf) else leaf

            of_part = jax.tree.map(lambda x: fold(x) if _is_shared_key(x) else x, loss_fn)
            e = evaluate(of_part, params, jax.tree.map(choose, batch), has_aux=has_aux)
            products = jax.tree.map(
                lambda g, z: jnp.sum(g.astype(float) * z.astype(float)), e.grad, z
            )
            slope = sum(jax.tree.leaves(products), start=jnp.zeros([], float))
            count = jnp.asarray(len(rows) if e.count is None else e.count, float)
            return jnp.stack([e.value.astype(float), slope]), count

        # L_B, and (|B_1| L_B1 + |B_2| L_B2) / |B|
        (whole, n), (first, n1), (second, n2) = (
            numbers(rows, index) for index, rows in enumerate((order, order[:half], order[half:]))
        )
        halves = first + _quotient(n2 * (second - first), n1 + n2)
        sizes = (jnp.abs(first) + jnp.abs(second)) / 2
        return jnp.append(whole, n), jnp.append(halves, n1 + n2), jnp.append(sizes, n1 + n2)

    keys = jax.random.split(jax.random.key(0), _ORDERS)
    return jax.lax.map(compare, (keys, jnp.asarray(orders, jnp.int32)))


def count_halves(
    loss_fn: LossFn, params: Params, batch: Any, *, has_aux: bool = False
) -> tuple[jax.Array, ...]:
    """Return the counts of a batch and of its halves; empty if the loss has no count.

    The arguments are as in `is_mean`; the batch has at least two examples.
    """

    def count(rows: jax.Array) -> Any:
        part = jax.tree.map(lambda x: take_rows(x, rows) if jnp.ndim(x) else x, batch)
        return checked_sum(loss_fn, params, part, has_aux=has_aux)[1]

    rows = jnp.arange(num_examples(batch))
    half = len(rows) // 2
    counts = count(rows), count(rows[:half]), count(rows[half:])
    return tuple(each for each in counts if each is not None)


def judge_counts(counts: tuple[Any, ...]) -> bool:
    """Return whether the counts of `count_halves` add up, so that they are counts."""
    if not counts:
        return True
    whole, *halves = map(float, counts)
    return not abs(whole - sum(halves)) > _COUNTS_DIFFER * max(abs(whole), *map(abs, halves))


def judge_halves(whole: Any, halves: Any, sizes: Any, differs: float | None = None) -> bool:
    """Return whether the results of `compare_halves` agree up to noise and a relative difference.

    With `differs`, a difference between the losses or the counts, the gradients are not compared.
    """
    found = [np.moveaxis(np.asarray(x, np.float64), -1, 0) for x in (whole, halves, sizes)]
    # At an optimum, a gradient is the rounding error of terms that cancel.
    rounding = _ROUNDING * np.abs(found[0][0]).mean()
    return all(
        _agree(one, mean, size, differs or _DIFFERS, rounding if index == _SLOPE else 0.0)
        for index, (one, mean, size) in enumerate(zip(*found, strict=True))
        if differs is None or index != _SLOPE
    )


def _agree(whole: Any, halves: Any, sizes: Any, differs: float, rounding: float) -> bool:
    difference = whole - halves
    if not np.all(np.isfinite(difference)):
        return True
    least = max(differs * max(abs(whole.mean()), sizes.mean()), rounding)
    error = _ERRORS * difference.std(ddof=1) / _ORDERS**0.5
    size_of_all, noise = np.sqrt(np.mean(difference**2)), _ERRORS * whole.std(ddof=1)
    return bool(abs(difference.mean()) <= max(least, error) and size_of_all <= max(least, noise))


def gets_gradient(
    tx: optax.GradientTransformationExtraArgs,
    opt_state: Any,
    params: Params,
    e: Evaluation,
    **extra_args: Any,
) -> tuple[bool | jax.Array | None, Any]:
    """Return whether all samplers of an optimizer get the optimizer's gradient, and the new state.

    The first result is None if no method in the optimizer looks, True if each looks at the same arrays,
    and otherwise an array that compares values. Samplers and `optperm.ivon` call the extra argument
    `watch` with the updates that they take for the gradient.

    Args:
      tx: The optimizer.
      opt_state: Its state.
      params: The params.
      e: The evaluation whose gradient the optimizer gets.
      **extra_args: Further extra arguments.
    """
    seen: list[Any] = []
    given = known_extra_args(tx, e.extra_args | extra_args | {"watch": seen.append})
    _, opt_state = tx.update(e.grad, opt_state, params, **given)
    found: bool | jax.Array = True
    for updates in seen:
        pairs = zip(*map(jax.tree.leaves, (updates, mask_like(e.grad, updates))), strict=True)
        for one, other in pairs:
            if one is not other:
                wide = accumulation_dtype((one, other))
                new, old = one.astype(wide), other.astype(wide)
                limit = _DIFFERS * jnp.linalg.norm(jnp.ravel(old))
                found &= ~(jnp.linalg.norm(jnp.ravel(new - old)) > limit)
    return found if seen else None, opt_state


def part_of(batch: Any, start: int | jax.Array, size: int | None) -> Any:
    """Return `size` examples of a batch from `start` on, or all; examples share leaves of rank 0.

    Raises:
      ValueError: If the batch does not contain these examples, as far as `start` is known.
    """
    if size is None:
        return batch
    length = checks.count_examples("batch", batch, has_scalars=True)
    first = 0 if isinstance(start, jax.core.Tracer) else int(start)
    if not 0 <= first <= length - size:
        # jax.lax.dynamic_slice would return other examples.
        raise ValueError(f"start={first} and size={size} do not fit a batch of {length} examples.")
    return jax.tree.map(
        lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, start, size) if jnp.ndim(leaf) else leaf,
        batch,
    )


def num_examples(batch: Any) -> int:
    """Return the length of a batch's leading axis; 1 if no leaf has a leading axis."""
    sizes = [jnp.shape(leaf)[0] for leaf in jax.tree.leaves(batch) if jnp.ndim(leaf) > 0]
    return max(sizes, default=1)


def map_examples(
    function: Callable[[LossFn, Any], Any],
    loss_fn: LossFn,
    batch: Any,
    *,
    first: int | jax.Array = 0,
) -> Any:
    """Map `function(loss_fn, example)` over the examples, each a batch of one.

    All examples share leaves of rank 0, except for typed random keys: keys in the batch, or bound to the
    loss function by `jax.tree_util.Partial`, are folded with the index of the example. Indices begin at
    `first`.
    """
    is_mapped = jax.tree.map(lambda leaf: jnp.ndim(leaf) > 0, batch)
    axes = jax.tree.map(lambda mapped: 0 if mapped else None, is_mapped)

    def call(place: jax.Array, example: Any) -> Any:
        def fold(leaf: Any) -> Any:
            return jax.random.fold_in(leaf, place) if _is_shared_key(leaf) else leaf

        example = jax.tree.map(
            lambda mapped, leaf: leaf[None] if mapped else fold(leaf), is_mapped, example
        )
        return function(jax.tree.map(fold, loss_fn), example)

    size = checks.count_examples("batch", batch, has_scalars=True) if jax.tree.leaves(axes) else 1
    places = first + jnp.arange(size)
    # On a mesh with explicit axes, all mapped arrays must be sharded alike.
    sharding = explicit_sharding(*filter(jnp.ndim, jax.tree.leaves(batch)))
    if sharding is not None:
        places = jax.sharding.reshard(places, sharding.update(spec=P(*sharding.spec[:1])))
    return jax.vmap(call, in_axes=(0, axes))(places, batch)


def _is_shared_key(leaf: Any) -> bool:
    return is_key(leaf) and not leaf.ndim
