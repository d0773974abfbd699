"""The carry of a run as one `TrainState`, and the compiled programs of steps and evaluations."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.tree_util import Partial

from optperm.core import checks
from optperm.core.dtypes import cast_like
from optperm.core.fresh_jit import fresh_jit
from optperm.core.keys import as_key, is_key, key_data
from optperm.core.mapped_axes import mark_varying, varying_axes
from optperm.core.states import (
    DRAW_STREAM,
    LoopState,
    draw_params,
    find_states,
)
from optperm.evaluation import Evaluation, evaluate_part, num_examples
from optperm.exact import CommittingState
from optperm.training import _processes as processes
from optperm.training._history import COUNT, GOAL
from optperm.training._layout import Layout, average_statistics, average_varying
from optperm.training._train_state import Model, TrainState, convert_metrics, split_model

Metrics = dict[str, jax.Array]
# Columns of the history that a loss function must not return.
_RESERVED = ("loss", COUNT, GOAL, "epoch", "step", "seconds", "fraction_moved")
_INJECTED = optax.InjectHyperparamsState, optax.InjectStatefulHyperparamsState


def wrap_model(
    source: Any, optimizer: Any, loss_fn: Callable[..., Any], has_aux: bool
) -> tuple[Model, TrainState]:
    """Return the model with its loss function, and the carry, from the arguments of `fit`."""
    if isinstance(source, TrainState):
        if optimizer is not None:
            raise ValueError(
                "optimizer is for a flax.nnx model: a TrainState has its own optimizer."
            )
        return Model(loss_fn, has_aux), source
    if not (isinstance(source, nnx.Module) and isinstance(optimizer, nnx.Optimizer)):
        wanted = "optperm.training.TrainState.create(...), or a flax.nnx model and its optimizer"
        says = f"fit takes {wanted}, got {type(source)} and {type(optimizer)}"
        advice = "For other params, pass TrainState.create(apply_fn=None, params=params, tx=tx)"
        raise TypeError(f"{says}. {advice}.")
    graphdef, params, model_state = split_model(source, optimizer.wrt)
    state = TrainState(
        step=optimizer.step.get_value(),
        apply_fn=None,  # type: ignore[arg-type]
        params=params,
        tx=optimizer.tx,
        opt_state=nnx.as_pure(optimizer.opt_state),
        model_state=model_state,
    )
    return Model(loss_fn, has_aux, graphdef, optimizer.wrt), state


def unwrap_keys(tree: Any) -> Any:
    """Replace random keys in a tree by their data."""
    return jax.tree.map(lambda x: jax.random.key_data(x) if is_key(x) else x, tree)


def wrap_keys(tree: Any, like: Any) -> Any:
    """Undo `unwrap_keys`; `like` is a tree with the keys."""

    def wrap(key: Any, leaf: Any) -> Any:
        if not is_key(key):
            return leaf
        return jax.random.wrap_key_data(leaf, impl=jax.random.key_impl(key))

    return jax.tree.map(wrap, like, tree)


def copy_arrays(tree: Any) -> Any:
    """Copy a tree with its placement, so that a loop may donate the copy."""
    return jax.tree.map(jnp.copy, tree)


_copy_at_once = jax.jit(copy_arrays)  # one program, for arrays without a sharding


def place_state(state: TrainState, layout: Layout) -> TrainState:
    """Place a train state for a run, and initialize the optimizer state if there is none."""
    state = state.replace(weights=jnp.zeros(2, jnp.float32)) if layout.own else state
    here = wrap_keys(layout.place(unwrap_keys(state)), state)
    with layout.context():
        if here.opt_state is None and not layout.mapped:
            here = here.replace(opt_state=here.tx.init(here.params))
        if layout.own:
            here = layout.deal(here, own=False)
        if here.opt_state is not None:
            return copy_arrays(here) if layout.mesh is not None else _copy_at_once(here)

        def init(state: TrainState, _: Any, __: Any) -> tuple[TrainState, Any]:
            return state.replace(opt_state=state.tx.init(state.params)), ()

        return jax.jit(layout.map_replicas(init, 0))(here, (), ())[0]


class Steps(NamedTuple):
    """Compiled steps, which return the next carry and metrics.

    Attributes:
      many: `many(carry, (examples, first, last), order)` takes the steps from `first` to `last` on the
        examples at the indices `order`.
      one: `one(carry, (), batch)` takes one step, whose metrics `layout.average_rows` averages.
    """

    many: Callable[..., Any]
    one: Callable[..., Any]


def compile_steps(
    model: Model, layout: Layout, carry: TrainState, rows: int, key: int | jax.Array = 0
) -> Steps:
    """Return the compiled steps for carries with the same placement as `carry`."""

    @functools.partial(jax.jit, inline=True)  # traced once, used twice
    def step(carry: TrainState, _: Any, batch: Any) -> tuple[TrainState, Metrics]:
        return _step(carry, batch, model, layout, key)

    def many(carry: TrainState, shared: Any, order: jax.Array) -> tuple[TrainState, Metrics]:
        (examples, first, last), put = shared, jax.lax.dynamic_update_index_in_dim

        def batch(t: jax.Array) -> Any:
            return layout.constrain(jax.tree.map(lambda leaf: leaf[order[t]], examples))

        forms = jax.eval_shape(step, carry, (), batch(first))[1]
        columns = {name: jnp.zeros((rows,), jnp.float32) for name in forms}

        def body(t: jax.Array, now: tuple[TrainState, Metrics]) -> tuple[TrainState, Metrics]:
            carry, row = step(now[0], (), batch(t))
            return carry, {k: put(column, row[k], t - first, 0) for k, column in now[1].items()}

        # The bounds are arguments, so one program takes the steps for any division into calls, and an
        # interrupted run ends with the same bits as an uninterrupted run.
        start = carry, mark_varying(columns, varying_axes(forms))
        return jax.lax.fori_loop(first, last, body, start)

    # A single step does not average its metrics, or replicas would wait for each other in each step.
    single = layout.map_replicas(step, 0, stacked=True)
    return Steps(
        many=_compile(layout.map_replicas(many, 1), layout, carry),
        one=_compile(single, layout, carry),
    )


def compile_on_replicas(
    function: Callable[..., Any], layout: Layout, carry: TrainState
) -> Callable[..., Any]:
    """Compile `function(carry, shared, batch)` on the replicas, without donating the carry."""
    return _compile(layout.map_replicas(function, 0), layout, carry, donate=False)


def _compile(
    function: Callable[..., Any], layout: Layout, carry: TrainState, donate: bool = True
) -> Callable[..., Any]:
    """Compile a mapped function whose new carry has the same placement as `carry`."""
    placed = None if layout.mesh is None else jax.tree.map(lambda leaf: leaf.sharding, carry)
    program = fresh_jit(
        function,
        donate_argnums=(0,) if donate else (),
        out_shardings=None if placed is None else (placed, None),
    )
    return processes.compare_programs(program)


def evaluate_step(
    state: TrainState, batch: Any, model: Model, layout: Layout, key: int | jax.Array
) -> tuple[Evaluation, dict[str, Any]]:
    """Evaluate a batch at the params, or at a draw of them, and return all extra arguments."""
    mapped = layout.mapped or None
    of_draw = jax.random.fold_in(as_key(key_data(key)), DRAW_STREAM)
    of_draw = jax.random.fold_in(of_draw, state.step)
    if mapped is not None:
        of_draw = jax.random.fold_in(of_draw, jax.lax.axis_index(mapped))
    draw = draw_params(state.opt_state, state.params, of_draw)
    # If replicas step together, loss and gradient are means over the mapped axes. Otherwise, they belong
    # to one replica. A method that draws averages the products of each replica's draw and gradient.
    averaged = mapped if draw is None and not layout.own else None
    # Replicas that step together divide their sums by the same count. A replica with local steps divides
    # by its own count, and the commit weighs it.
    is_local = bool(find_states(state.opt_state, CommittingState))
    shared = None if is_local else mapped
    bound = Partial(model, state.model_state, state.step_rng(mapped))
    at, more = (state.params, {}) if draw is None else (draw, {"draw": draw})
    if layout.own and is_local:
        more = more | {"replica_axes": mapped}
    e = evaluate_part(
        bound, at, batch, has_aux=True, axis_name=averaged, count_axis=averaged or shared
    )
    extras = e.extra_args | more
    if extras.pop("weight", None) is not None and is_local and mapped:
        extras["weight"] = _weigh(state, e, batch)[0]
    return e, extras


def _weigh(state: TrainState, e: Evaluation, batch: Any) -> tuple[jax.Array, jax.Array]:
    """Return the weight of a replica in a commit after this step, and the sums that it comes from.

    The weight of a step is its count per example of its batch, and 1 if there is no count. The weight
    in a commit is the mean over the steps since the last commit.
    """
    count = e.aux.count
    own = jnp.float32(1) if count is None else count.astype(jnp.float32) / num_examples(batch)
    before = jnp.zeros(2, jnp.float32) if state.weights is None else state.weights
    sums = before + jnp.stack([own, jnp.ones_like(own)])
    return sums[0] / sums[1], sums


def _step(
    state: TrainState, batch: Any, model: Model, layout: Layout, key: int | jax.Array
) -> tuple[TrainState, Metrics]:
    """Return the state after one step, with the same types, and float32 scalars by name."""
    e, extras = evaluate_step(state, batch, model, layout, key)
    new = state.apply_gradients(grads=e.grad, model_state=e.aux.model_state, **extras)
    if not layout.own and varying_axes(new.opt_state):
        says = "The optimizer states of the replicas may differ after a step"
        advice = "to the method as well, or leave axis_name of fit out"
        raise ValueError(f"{says}: pass axis_name={_axis_name(layout)!r} {advice}.")
    metrics = _measure_loss(e)
    if state.weights is not None:
        found = find_states(new.opt_state, CommittingState)
        is_whole = sum((each.steps_since_commit() for each in found), jnp.int32(0)) == 0
        new = new.replace(weights=jnp.where(is_whole, 0, _weigh(state, e, batch)[1]))
    for each in find_states(new.opt_state, _INJECTED):
        if "learning_rate" in each.hyperparams:
            metrics["learning_rate"] = jnp.asarray(each.hyperparams["learning_rate"], jnp.float32)
    for method in find_states(new.opt_state, LoopState):
        metrics |= {name: x.astype(jnp.float32) for name, x in method.for_loop().metrics.items()}
    if e.aux.aux is not None:
        aux = convert_metrics("aux of loss_fn", e.aux.aux)
        if taken := [name for name in aux if name in _RESERVED or name.startswith("eval_")]:
            others = f"{', '.join(_RESERVED)} and eval_..."
            raise ValueError(f"loss_fn returns a metric named {taken[0]!r}; {others} are reserved.")
        metrics |= aux
    before, after = unwrap_keys(state), unwrap_keys(new)
    says = "The state after a step"
    checks.check_same_tree(says, after, before, source="the state before it", dtypes=False)
    # Values that replicas draw or count separately, such as batch statistics, become equal on all.
    if not layout.own:
        statistics = average_statistics(after.model_state, average_varying)
        after = average_varying(after).replace(model_state=statistics)
    return mark_varying((wrap_keys(cast_like(after, before), state), metrics), layout.apart)


def _measure_loss(e: Evaluation) -> Metrics:
    """Return the loss of a step, or a replica's part of it, and the count if there is one."""
    loss, count = e.value, e.aux.count
    if count is None:
        return {"loss": loss.astype(jnp.float32)}
    if "weight" not in e.extra_args and (axes := tuple(varying_axes(loss))):
        loss = jax.lax.pmean(loss, axes)  # the sums have been divided by the mean count
    return {"loss": loss.astype(jnp.float32), COUNT: count.astype(jnp.float32)}


def _axis_name(layout: Layout) -> str | tuple[str, ...]:
    return layout.mapped[0] if len(layout.mapped) == 1 else layout.mapped
