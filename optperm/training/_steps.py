"""The carry of a run as one `TrainState`, and the compiled programs of steps and evaluations."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.interpreters.partial_eval import dce_jaxpr
from jax.tree_util import Partial

from optperm.core import checks
from optperm.core.dtypes import cast_like
from optperm.core.fresh_jit import fresh_jit
from optperm.core.keys import as_key, is_key, key_data
from optperm.core.mapped_axes import axis_names, mark_varying, varying_axes
from optperm.core.states import (
    DRAW_STREAM,
    LoopState,
    draw_params,
    find_states,
    match_params,
)
from optperm.core.trees import leaf_paths
from optperm.evaluation import Evaluation, evaluate_part, num_examples
from optperm.exact import CommittingState
from optperm.training import _data as datas
from optperm.training import _processes as processes
from optperm.training._history import COUNT, GOAL
from optperm.training._layout import Layout, average_statistics, average_varying
from optperm.training._terminal import Interrupt
from optperm.training._train_state import Model, TrainState, convert_metrics, split_model

Metrics = dict[str, jax.Array]
# Columns of the history that a loss function must not return.
_RESERVED = ("loss", COUNT, GOAL, "epoch", "step", "seconds", "fraction_moved")
# The maximum number of params that a message names.
_MOST_NAMED = 5
# The first parts of the names of operations with which replicas exchange arrays.
_EXCHANGES = "psum", "ppermute", "all_gather", "all_to_all", "reduce_scatter"
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
        raise TypeError(f"fit takes {wanted}, got {type(source)} and {type(optimizer)}.")
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
    model: Model,
    layout: Layout,
    carry: TrainState,
    rows: int,
    key: int | jax.Array = 0,
    suspect: Callable[[], Any] = lambda: None,
) -> Steps:
    """Return the compiled steps for carries with the same placement as `carry`.

    While tracing, steps call `suspect` if the count of the loss depends on the params.
    """

    @functools.partial(jax.jit, inline=True)  # traced once, used twice
    def step(carry: TrainState, _: Any, batch: Any) -> tuple[TrainState, Metrics]:
        return _step(carry, batch, model, layout, key)

    def one(carry: TrainState, _: Any, batch: Any) -> tuple[TrainState, Metrics]:
        _trace_step(step, carry, batch, layout, suspect)
        return step(carry, (), batch)

    def many(carry: TrainState, shared: Any, order: jax.Array) -> tuple[TrainState, Metrics]:
        (examples, first, last), put = shared, jax.lax.dynamic_update_index_in_dim

        def batch(t: jax.Array) -> Any:
            return layout.constrain(jax.tree.map(lambda leaf: leaf[order[t]], examples))

        forms = _trace_step(step, carry, batch(first), layout, suspect)
        columns = {name: jnp.zeros((rows,), jnp.float32) for name in forms}

        def body(t: jax.Array, now: tuple[TrainState, Metrics]) -> tuple[TrainState, Metrics]:
            carry, row = step(now[0], (), batch(t))
            return carry, {k: put(column, row[k], t - first, 0) for k, column in now[1].items()}

        # The bounds are arguments, so one program takes the steps for any division into calls, and an
        # interrupted run ends with the same bits as an uninterrupted run.
        start = carry, mark_varying(columns, varying_axes(forms))
        return jax.lax.fori_loop(first, last, body, start)

    # A single step does not average its metrics, or replicas would wait for each other in each step.
    single = layout.map_replicas(one, 0, stacked=True)
    return Steps(
        many=_compile(layout.map_replicas(many, 1), layout, carry),
        one=_compile(single, layout, carry),
    )


def _trace_step(
    step: Callable[..., Any],
    carry: TrainState,
    batch: Any,
    layout: Layout,
    suspect: Callable[[], Any],
) -> dict[str, Any]:
    """Return the shapes of a step's metrics; raise if replicas train some of their params apart."""
    metrics: dict[str, Any] = jax.eval_shape(step, carry, (), batch)[1]
    commits = layout.own and bool(find_states(carry.opt_state, CommittingState))
    if not (commits or COUNT in metrics):
        return metrics
    program, forms = jax.make_jaxpr(step, return_shape=True)(carry, (), batch)
    if COUNT in metrics and _count_depends(program.jaxpr, forms, carry):
        suspect()
    if not commits:
        return metrics
    if not _find_axes(program.jaxpr) >= set(layout.mapped):
        says = "The method takes local steps, but its replicas would never commit"
        name = _axis_name(layout)
        raise ValueError(f"{says}: pass axis_name={name!r} to the method as well as to fit.")
    num_batch = len(jax.tree.leaves(batch))
    if apart := _find_apart(program.jaxpr, forms, carry, num_batch, set(layout.mapped)):
        others = ", ..." * (len(apart) > _MOST_NAMED)
        named = ", ".join(map(repr, apart[:_MOST_NAMED])) + others
        raise ValueError(
            f"The replicas would train {len(apart)} of their params apart, because no commit and no "
            f"exchange reaches {named}: put agn or diloco around optax.partition and optax.masked, "
            "with all optimizers inside."
        )
    return metrics


def _count_depends(jaxpr: Any, forms: Any, carry: TrainState) -> bool:
    """Return whether the count of the loss depends on the params, as no number of examples does."""
    size, inputs = len(jaxpr.outvars), len(jax.tree.leaves(carry))
    at = jax.tree.unflatten(jax.tree.structure(forms), range(size))[1][COUNT]
    used = dce_jaxpr(jaxpr, [place == at for place in range(size)])[1]
    places = jax.tree.unflatten(jax.tree.structure(carry), range(inputs))
    return any(used[place] for place in jax.tree.leaves(places.params))


def _find_apart(
    jaxpr: Any, forms: Any, carry: TrainState, num_batch: int, mapped: set[str]
) -> list[str]:
    """Return the paths of the params that a step changes by its batch, and by no exchange.

    Args:
      jaxpr: The program of a step, whose last inputs are the `num_batch` leaves of the batch.
      forms: The shapes of its results, the new carry and metrics.
      carry: The carry.
      num_batch: The number of leaves of the batch.
      mapped: The axes over which replicas exchange.
    """
    params = leaf_paths(carry.params)
    # A center contains the params that its method commits.
    committed = set[int | None]()
    for state in list[Any](find_states(carry.opt_state, CommittingState)):
        committed.update(match.place for match in match_params(state.center, carry.params))
    size = len(jaxpr.outvars)
    places = jax.tree.unflatten(jax.tree.structure(forms), range(size))
    left = {
        at: path
        for number, (at, (path, _)) in enumerate(
            zip(jax.tree.leaves(places[0].params), params, strict=True)
        )
        if number not in committed
    }

    def depends(outputs: Iterable[int]) -> tuple[bool, bool]:
        """Return whether outputs depend on the batch, and whether on an exchange over all axes."""
        used = [at in set(outputs) for at in range(size)]
        part, inputs = dce_jaxpr(jaxpr, used)
        return any(inputs[len(inputs) - num_batch :]), _find_axes(part) >= mapped

    # Usually all these params are frozen, which one look at all of them shows.
    if not left or not depends(left)[0]:
        return []
    return [path for at, path in left.items() if depends([at]) == (True, False)]


def _find_axes(jaxpr: Any) -> set[Any]:
    """Return the axes over which a program communicates."""
    axes = set[Any]()
    for operation in jaxpr.eqns:
        if operation.primitive.name.startswith(_EXCHANGES):
            axes.update(*map(axis_names, map(operation.params.get, ("axes", "axis_name"))))
        for each in jax.tree.leaves(operation.params, is_leaf=lambda x: hasattr(x, "eqns")):
            if hasattr(each, "eqns"):
                axes |= _find_axes(each)
    return axes


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


@dataclasses.dataclass(frozen=True)
class Evaluator:
    """A function that computes means of metrics over all examples, `batch_size` at once for arrays."""

    eval_fn: Callable[..., Any]
    data: Any
    batch_size: int | None
    model: Model = dataclasses.field(default_factory=Model)
    layout: Layout = dataclasses.field(default_factory=Layout)

    @functools.cached_property
    def _compute(self) -> Callable[..., Any]:
        def compute(state: TrainState, batch: Any) -> dict[str, Any]:
            return self.model.compute_metrics(state, batch, self.eval_fn)

        return fresh_jit(compute)

    def columns(self, state: TrainState) -> list[str] | None:
        """Return the columns that this adds to the history; None for a stream, which is not read."""
        if not datas.is_arrays("eval_data", self.data):
            return None
        batch = next(datas.read_all("eval_data", self.data, 1, self.batch_size, self.layout))
        with self.layout.context():
            forms = jax.eval_shape(self.model.compute_metrics, state, batch, Partial(self.eval_fn))
        return [f"eval_{name}" for name in forms]

    def __call__(
        self, state: TrainState, epoch: int = 1, interrupt: Interrupt | None = None
    ) -> dict[str, float]:
        """Return the means; a signal raises `Interrupted` between two batches."""
        rows = list[Any]()
        with self.layout.context():
            source = "eval_data", self.data, epoch, self.batch_size, self.layout, interrupt
            for batch in datas.read_all(*source):
                rows.append(self._compute(state, batch))
                # Load the next batches during the computation of the last few.
                jax.block_until_ready(rows[: -datas.AHEAD][-1:])
        host = jax.device_get(rows)
        if different := [list(row) for row in host if row.keys() != host[0].keys()]:
            says = f"got {list(host[0])} and {different[0]}"
            raise ValueError(f"eval_fn must return the same metrics for every batch, {says}.")
        table: dict[str, Any] = {k: np.array([row[k] for row in host]) for k in host[0]}
        sums = {k: pairs.sum(axis=0, dtype=np.float64) for k, pairs in table.items()}
        return {k: float(total / n) if n else math.nan for k, (total, n) in sums.items()}
