"""Check on a batch what methods need: a mean loss, its gradient, and a count that counts."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.tree_util import Partial

from optperm.core.fresh_jit import fresh_jit
from optperm.core.keys import key_data
from optperm.core.noise import normal_like
from optperm.core.remainders import is_narrow
from optperm.core.states import DrawingState, LoopState, find_states
from optperm.core.transformation import known_extra_args
from optperm.evaluation import (
    NOT_GRADIENT,
    NOT_MEAN,
    Evaluation,
    compare_halves,
    count_halves,
    gets_gradient,
    judge_counts,
    judge_halves,
    num_examples,
)
from optperm.memory import WidenedState, lost_updates
from optperm.training._layout import Layout
from optperm.training._steps import evaluate_step
from optperm.training._train_state import Model, TrainState

# The norms of gradients that are followed to the sampler, below and above common limits of clipping.
_NORMS = 1e-2, 1e2
# The relative difference that counts if the loss depends on the statistics of its batch, as with
# BatchNorm. The loss of a batch that is a sum differs by one half.
_DIFFERS_BY_STATISTICS = 0.4
NOT_COUNT = (
    "loss_fn returns a pair, which is a sum and a count, but its second value for a batch is not the "
    "sum of the values for the halves of the batch. For a loss and a metric, pass has_aux=True and "
    'return (loss, {"name": metric}).'
)
LOST_UPDATES = (
    "More than half of the updates of params in 16 bits have rounded to nothing for 100 steps. Train "
    "them with optperm.widen_params around the optimizer, with a larger learning rate, or in float32."
)


def samples(opt_state: Any) -> bool:
    """Return whether a method takes the mean gradient of random examples for a part of a posterior."""
    draws = any(state.for_loop().draws_examples for state in find_states(opt_state, LoopState))
    return draws or bool(find_states(opt_state, DrawingState))


def find_broken_conditions(
    carry: TrainState, batch: Any, model: Model, layout: Layout, key: int | jax.Array
) -> list[str]:
    """Return a sentence for each condition that does not hold on a batch, without taking a step.

    The check is outside of the compiled steps. With replicas, each looks at its part of the batch.
    """
    found = list[str]()
    if not is_count(carry, batch, model, layout):
        found.append(NOT_COUNT)
    elif not _is_mean(carry, batch, model, layout):
        found.append(NOT_MEAN)
    if samples(carry.opt_state) and not _is_gradient(carry, batch, model, layout, key):
        found.append(NOT_GRADIENT)
    return found


def has_narrow_params(carry: TrainState) -> bool:
    """Return whether a method without remainders trains params of 16 bits."""
    if find_states(carry.opt_state, WidenedState) or samples(carry.opt_state):
        return False
    return any(map(is_narrow, jax.tree.leaves(carry.params)))


def loses_updates(
    carry: TrainState, batch: Any, model: Model, layout: Layout, key: int | jax.Array
) -> bool:
    """Return whether the next step would lose more than half of the updates of params in 16 bits."""

    def count(state: TrainState, _: Any, batch: Any) -> tuple[TrainState, Any]:
        e, extras = evaluate_step(state, batch, model, layout, key)
        extras = known_extra_args(state.tx, extras)
        updates, _ = state.tx.update(e.grad, state.opt_state, state.params, **extras)
        pairs = zip(jax.tree.leaves(state.params), jax.tree.leaves(updates), strict=True)
        narrow = [pair for pair in pairs if is_narrow(pair[0])]
        return state, lost_updates(*map(list, zip(*narrow, strict=True)))

    return bool(np.mean(_run(count, carry, batch, layout)) > 0.5)


def _is_mean(carry: TrainState, batch: Any, model: Model, layout: Layout) -> bool:
    if num_examples(batch) < 2 * layout.replicas:
        return True

    def compare(state: TrainState, _: Any, batch: Any) -> tuple[TrainState, Any]:
        bound = Partial(model, state.model_state, state.step_rng(layout.mapped or None))
        return state, compare_halves(bound, state.params, batch, has_aux=True)

    statistics = jax.tree.leaves(carry.model_state)
    has_statistics = any(jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in statistics)
    # `is_count` looks at the counts, which are the last numbers.
    compared = [x[..., :-1] for x in _run(compare, carry, batch, layout)]
    return judge_halves(*compared, *[_DIFFERS_BY_STATISTICS] * has_statistics)


def is_count(carry: TrainState, batch: Any, model: Model, layout: Layout) -> bool:
    """Return whether the count of a batch is the sum of the counts of its halves, or there is none."""
    if num_examples(batch) < 2 * layout.replicas:
        return True

    def compare(state: TrainState, _: Any, batch: Any) -> tuple[TrainState, Any]:
        bound = Partial(model, state.model_state, state.step_rng(layout.mapped or None))
        return state, count_halves(bound, state.params, batch, has_aux=True)

    return judge_counts(_run(compare, carry, batch, layout))


def _is_gradient(
    carry: TrainState, batch: Any, model: Model, layout: Layout, key: int | jax.Array
) -> bool:
    known = list[Any]()

    def compare(state: TrainState, _: Any, batch: Any) -> tuple[TrainState, Any]:
        # Momentum does not change a first gradient, and weight decay does not change it at zero.
        z = normal_like(key_data(key), state.params)
        near = jax.tree.map(lambda p, z: p + z.astype(p.dtype), state.params, z)
        points = [state, state.replace(params=near)]
        found = [evaluate_step(at, batch, model, layout, key) for at in points]
        norm = jnp.stack([optax.tree.norm(e.grad) for e, _ in found]).max()
        is_other = jnp.int32(0)
        for wanted in _NORMS:
            factor = jnp.where(norm > 0, wanted / norm, 1.0)
            # With a new state, and the batch as all examples, a control variate corrects nothing.
            opt_state = state.tx.init(state.params)
            for at, (e, extras) in zip(points, found, strict=True):
                others = {name: extras[name] for name in extras.keys() - e.extra_args.keys()}
                scaled = _scale(e, factor)
                others["full_grad_fn"] = scaled.extra_args["grad_fn"]
                is_same, opt_state = gets_gradient(state.tx, opt_state, at.params, scaled, **others)
                known.append(is_same)
                if isinstance(is_same, jax.Array):
                    is_other |= 1 - is_same.astype(jnp.int32)
        return state, is_other

    try:
        with layout.context():
            jax.eval_shape(layout.map_replicas(compare, 0), carry, (), batch)
        if not any(isinstance(each, jax.core.Tracer) for each in known):
            return True  # the samplers get the same arrays, or none looks
        return not int(_run(compare, carry, batch, layout))
    except jax.errors.UnexpectedTracerError:
        # The sampler is in a conditional of a wrapper, where its updates cannot be seen.
        return True


def _scale(e: Evaluation, factor: jax.Array) -> Evaluation:
    """Return the evaluation of a loss that is multiplied by a factor."""

    def scale(tree: Any) -> Any:
        return optax.tree.cast_like(optax.tree.scale(factor, tree), tree)

    def of(each: Any) -> Any:
        if not callable(each):
            return scale(each)
        return functools.wraps(each)(lambda *args, **kwargs: scale(each(*args, **kwargs)))

    extra_args = {
        name: each if name == "weight" else of(each) for name, each in e.extra_args.items()
    }
    return dataclasses.replace(e, grad=extra_args["grad"], extra_args=extra_args)


def _run(function: Any, carry: TrainState, batch: Any, layout: Layout) -> Any:
    mapped = layout.map_replicas(function, 0)
    run = fresh_jit(lambda *given: mapped(*given)[1], out_shardings=layout.sharding())
    with layout.context():
        return jax.device_get(run(carry, (), batch))
