"""Check on the first batch what samplers and control variates need: a mean loss, and its gradient."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import Partial

from optperm.core.current import jit_current
from optperm.core.states import DrawingState, LoopState, find_states
from optperm.evaluation import (
    NOT_GRADIENT,
    NOT_MEAN,
    Evaluation,
    compare_halves,
    gets_gradient,
    judge_halves,
    num_examples,
)
from optperm.training._layout import Layout
from optperm.training._steps import evaluate_step
from optperm.training._train_state import Model, TrainState

# The norms of gradients that are followed to the sampler, below and above common limits of clipping.
_NORMS = 1e-2, 1e2
# The relative difference that counts if the loss depends on the statistics of its batch, as with
# BatchNorm. The loss of a batch that is a sum differs by one half.
_DIFFERS_BY_STATISTICS = 0.4


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
    found = [] if _is_mean(carry, batch, model, layout) else [NOT_MEAN]
    if samples(carry.opt_state) and not _is_gradient(carry, batch, model, layout, key):
        found.append(NOT_GRADIENT)
    return found


def _is_mean(carry: TrainState, batch: Any, model: Model, layout: Layout) -> bool:
    if num_examples(batch) < 2 * layout.replicas:
        return True

    def compare(state: TrainState, _: Any, batch: Any) -> tuple[TrainState, Any]:
        bound = Partial(model, state.model_state, state.step_rng(layout.mapped or None))
        return state, compare_halves(bound, state.params, batch, has_aux=True)

    statistics = jax.tree.leaves(carry.model_state)
    has_statistics = any(jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in statistics)
    whole, halves = _run(compare, carry, batch, layout)
    return judge_halves(whole, halves, *[_DIFFERS_BY_STATISTICS] * has_statistics)


def _is_gradient(
    carry: TrainState, batch: Any, model: Model, layout: Layout, key: int | jax.Array
) -> bool:
    known = list[Any]()

    def compare(state: TrainState, _: Any, batch: Any) -> tuple[TrainState, Any]:
        # With a new state, and the batch as all examples, the correction of a control variate is zero.
        opt_state = state.tx.init(state.params)
        e, extras = evaluate_step(state, batch, model, layout, key)
        extras = {name: extras[name] for name in extras.keys() - e.extra_args.keys()}
        extras["full_grad_fn"] = e.extra_args["grad_fn"]
        norm = optax.tree.norm(e.grad)
        is_other = jnp.int32(0)
        for wanted in _NORMS:
            of_norm = _scale(e, jnp.where(norm > 0, wanted / norm, 1.0))
            known.append(gets_gradient(state.tx, opt_state, state.params, of_norm, **extras))
            if isinstance(known[-1], jax.Array):
                is_other |= 1 - known[-1].astype(jnp.int32)
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
    grad = optax.tree.cast_like(optax.tree.scale(factor, e.grad), e.grad)
    extras = {"value": e.value * factor.astype(e.value.dtype), "grad": grad}
    return dataclasses.replace(e, grad=grad, extra_args=e.extra_args | extras)


def _run(function: Any, carry: TrainState, batch: Any, layout: Layout) -> Any:
    mapped = layout.map_replicas(function, 0)
    run = jit_current(lambda *given: mapped(*given)[1], out_shardings=layout.sharding())
    with layout.context():
        return jax.device_get(run(carry, (), batch))
