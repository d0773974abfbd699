"""Every wrapper around every method with exact entries: what is promised holds, or is refused.

After `optperm.apply_updates` the entries of the method that runs have exactly the values that the method
promises, every other entry is what `optax.apply_updates` gives, and a method that does not run changes
nothing. What each method promises is written down here once more, from its documentation.
"""

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import support

import optperm
from optperm.core.states import find_running_states, find_states
from optperm.core.trees import fill_masked, mask_like

STEPS = 8
START = {
    "kernel": support.normal((6, 4), 1),
    "deep": {"kernel": support.normal((4, 6), 2)},
    "bias": support.normal((6,), 3),
}
GOAL = jax.tree.map(lambda p: jnp.sin(5.0 * p) + 0.3, START)
COMMITTING = (optperm.distributed.AgnState, optperm.distributed.DilocoState)
IS_MASKED = jax.tree.map(lambda p: jnp.abs(p) > 0.8, START)


def sgd(rate: float = 0.3) -> optax.GradientTransformation:
    """One with momentum, so that a state of zeros matters."""
    return optax.sgd(rate, momentum=0.5)


class Method(NamedTuple):
    """A method with exact entries.

    Attributes:
      make: Makes it.
      state_type: The type of its state.
      find: From its state and the params before the step: a tree of flags for entries that have exact
        values, and the values; None where there is none in this step.
      permutes: Whether the params are a permutation of the first ones after such a step.
    """

    make: Callable[[], optax.GradientTransformation]
    state_type: type[Any]
    find: Callable[[Any, Any], Any]
    permutes: bool = False


def held(state, before):
    """Entries with a mask of False, at their values before the step."""
    return jax.tree.map(lambda m: ~m, state.mask), before


def dead(state, before):
    """Entries that are not live, at zero."""
    return jax.tree.map(lambda m: ~m, state.mask), jax.tree.map(jnp.zeros_like, before)


def permuted(state, _):
    """All entries, at the weights in the state."""
    return jax.tree.map(lambda w: jnp.ones(w.shape, bool), state.weights), state.weights


def synchronized(state, before):
    """All entries, in a step that is due."""
    return permuted(state, before) if state.synchronized else None


def committed(state, _):
    """All entries, at the center, after a commit."""
    if not np.all(state.pulled):
        return None
    return jax.tree.map(lambda c: jnp.ones(c.shape, bool), state.center), state.center


def masked():
    """SGD with some entries held."""
    return optax.chain(sgd(), optperm.mask_elements(jax.tree.map(jnp.logical_not, IS_MASKED)))


METHODS = {
    "sgperm": Method(
        lambda: optperm.sgperm(0.4),
        optperm.permutation.PermuteByCyclesState,
        permuted,
        permutes=True,
    ),
    "laperm": Method(
        lambda: optperm.laperm(sgd(), 2),
        optperm.permutation.LapermState,
        synchronized,
        permutes=True,
    ),
    "mask_elements": Method(masked, optperm.sparsity.MaskElementsState, held),
    "prune_gradually": Method(
        lambda: optperm.prune_gradually(sgd(), 0.5, lambda t: jnp.minimum(t / 4.0, 1.0), every=1),
        optperm.sparsity.SparseState,
        dead,
    ),
    "rigl": Method(
        lambda: optperm.rigl(sgd(), 0.5, end=50, every=2), optperm.sparsity.SparseState, dead
    ),
    "agn": Method(lambda: optperm.agn(sgd(), every=2), optperm.distributed.AgnState, committed),
    "diloco": Method(
        lambda: optperm.diloco(sgd(), sgd(0.7), every=2), optperm.distributed.DilocoState, committed
    ),
}


def only_kernels(params):
    """Which leaves the method of a partition trains."""
    return jax.tree.map(lambda p: "method" if p.ndim > 1 else "other", params)


def scaled(scale, tx):
    """The method on smaller gradients."""
    return optax.chain(optax.scale(scale), tx)


WRAPPERS = {
    "alone": lambda tx: tx,
    "first": lambda tx: optperm.switch_after(4, tx, sgd()),
    "then": lambda tx: optperm.switch_after(4, sgd(), tx),
    "then-tracked": lambda tx: optperm.switch_after(4, sgd(), tx, track=True),
    "first-of-same": lambda tx: optperm.switch_after(4, tx, tx),
    "agn": lambda tx: optperm.agn(tx, every=2),
    "agn-other-center": lambda tx: optperm.agn(tx, every=2, outer=sgd()),
    "diloco": lambda tx: optperm.diloco(tx, sgd(0.7), every=2),
    "diloco-plan": lambda tx: optperm.diloco(
        tx, sgd(0.7), every=optperm.distributed.Every(4, fragments=2, delay=1)
    ),
    "laperm": lambda tx: optperm.laperm(tx, 2),
    "prune_gradually": lambda tx: optperm.prune_gradually(tx, 0.25, 1.0, every=1),
    "rigl": lambda tx: optperm.rigl(tx, 0.25, end=9, every=3, key=jax.random.key(1)),
    "dldr": lambda tx: optperm.dldr(
        tx, optperm.project(sgd(), n_components=2), every=1, num_snapshots=4, restart="mean"
    ),
    "MultiSteps": lambda tx: optax.MultiSteps(tx, 2).gradient_transformation(),
    "partition": lambda tx: optax.partition({"method": tx, "other": sgd()}, only_kernels),
    "masked": lambda tx: optax.masked(tx, lambda p: jax.tree.map(lambda x: x.ndim > 1, p)),
    # Three that change nothing about entries, in one program.
    "nested": lambda tx: optax.apply_if_finite(
        optax.named_chain(
            ("z", optax.clip(1.0)), ("a", optax.inject_hyperparams(scaled, ("tx",))(0.9, tx))
        ),
        3,
    ),
    "schedule_free": lambda tx: optax.contrib.schedule_free(tx, 0.3, b1=0.9),
    "followed": lambda tx: optax.chain(tx, optax.add_decayed_weights(0.1), optax.trace(0.9)),
}
# Placed, held or zero entries that a wrapper would move: an error when it is built, at init, or at the
# first step. The pull to a center places params too; a center of AGN would choose zeros of its own.
REFUSED = [
    *itertools.product(METHODS, ("laperm", "schedule_free")),
    *itertools.product(
        ("sgperm", "laperm", "agn", "diloco"),
        ("agn-other-center", "diloco", "diloco-plan", "prune_gradually", "rigl", "dldr"),
    ),
    ("rigl", "agn"),
    ("prune_gradually", "agn"),
]
EXACT = [pair for pair in itertools.product(METHODS, WRAPPERS) if pair not in REFUSED]
# Each wrapper and each method at least once: a covering array. CI runs the other products.
USUAL = {
    "sgperm": ("then", "masked"),
    "laperm": ("MultiSteps", "followed"),
    "mask_elements": ("first-of-same", "agn-other-center"),
    "prune_gradually": ("first", "then-tracked"),
    "agn": ("partition",),
}


@jax.jit
def gradient(params, t):
    """The gradient of a bowl, with noise of the step."""
    return jax.tree.map(lambda p, q: p - q + 0.3 * jnp.cos(7.0 * p + t), params, GOAL)


def expected(method, opt_state, before, updates):
    """The params after a step, as the documentation has it, and whether the method runs."""
    running = find_running_states(opt_state, method.state_type)
    if len(running) > 1:  # a center of the method's own kind is around it
        (around,) = find_states(opt_state, COMMITTING)
        running = find_states(around.local_state, method.state_type)
    moved = optax.apply_updates(before, updates)
    if not running:
        return moved, None
    (state,) = running
    found = method.find(state, before)
    if found is None:
        return moved, state

    def put(where, value, leaf):
        if isinstance(where, optax.MaskedNode):
            return leaf
        return jnp.where(where, jnp.asarray(value, leaf.dtype), leaf)

    where, values = found
    leaf = {"is_leaf": lambda node: isinstance(node, optax.MaskedNode)}
    values = fill_masked(values, before)
    return jax.tree.map(put, where, values, moved, **leaf), state


@pytest.mark.usefixtures("lenient")
def test_products_whose_entries_could_not_be_exact_are_refused():
    def take_a_step(name, wrapper):
        tx = WRAPPERS[wrapper](METHODS[name].make())
        opt_state = tx.init(START)
        updates, _ = tx.update(START, opt_state, START)
        optperm.apply_updates(START, updates, opt_state)

    for name, wrapper in REFUSED:
        with pytest.raises(ValueError, match=r"exact params|chooses which entries"):
            jax.eval_shape(lambda pair=(name, wrapper): take_a_step(*pair))


@pytest.mark.usefixtures("lenient")
@pytest.mark.parametrize(
    ("name", "wrapper"),
    support.every_night(
        EXACT,
        [(name, wrapper) for name, wrappers in USUAL.items() for wrapper in wrappers],
        mark=pytest.mark.entries,
    ),
)
@pytest.mark.filterwarnings("ignore:In an optax.chain, a transformation follows")
def test_every_entry_of_a_product_is_exact(name, wrapper):
    """By the promises of the method that runs, bit for bit, and nobody else's."""
    method = METHODS[name]
    tx = WRAPPERS[wrapper](method.make())
    params, opt_state = START, jax.jit(tx.init)(START)

    @jax.jit
    def step(params, opt_state, t):
        updates, opt_state = tx.update(gradient(params, t), opt_state, params)
        return optperm.apply_updates(params, updates, opt_state), updates, opt_state

    first, ran = START, 0
    for t in range(STEPS):
        before, was_running = params, bool(ran)
        params, updates, opt_state = step(params, opt_state, t)
        wanted, state = expected(method, opt_state, before, updates)
        if state is not None and not was_running:
            first = before
        ran += state is not None
        assert_promised(method, opt_state, state, params, wanted, first)
        assert_center(method, wrapper, opt_state, params)
    assert ran if wrapper != "then" else ran == STEPS - 4


def assert_promised(method, opt_state, state, params, wanted, first):
    """Assert that params are exact, where no wrapper puts other values over them by its own promise."""
    around = find_states(opt_state, (*COMMITTING, optperm.subspace.DldrState))
    if any(np.any(getattr(each, "pulled", getattr(each, "is_restarted", 0))) for each in around):
        return
    if isinstance(opt_state, optperm.sparsity.SparseState):
        wanted = jax.tree.map(
            lambda live, w: jnp.where(live, w, jnp.zeros_like(w)),
            fill_masked(opt_state.mask, jax.tree.map(lambda p: np.ones(p.shape, bool), START)),
            wanted,
        )
    support.assert_same_bits(params, wanted)
    if not method.permutes or state is None or method.find(state, params) is None:
        return
    support.assert_permutes(*(mask_like(each, state.weights) for each in (params, first)))


def assert_center(method, wrapper, opt_state, params):
    """Assert that after a commit params are the center, with the zeros of the method."""
    found = find_states(opt_state, COMMITTING)
    if wrapper not in ("agn", "agn-other-center", "diloco") or not np.all(found[0].pulled):
        return
    center = optperm.distributed.center_params(opt_state)
    support.assert_same_bits(params, center)
    local = find_states(found[0].local_state, method.state_type)
    if local and method.find in (dead, held):
        where, values = method.find(local[0], START)
        where = fill_masked(where, jax.tree.map(lambda p: np.zeros(p.shape, bool), START))
        support.assert_same_bits(
            jax.tree.map(lambda c, w: c[w], center, where),
            jax.tree.map(lambda v, w: v[w], values, where),
        )


@pytest.mark.usefixtures("lenient")
@pytest.mark.parametrize(
    ("name", "wrapper"),
    support.every_night(
        itertools.product(METHODS, ("alone", "first", "then")),
        [("prune_gradually", "then")],
        mark=pytest.mark.entries,
    ),
)
def test_states_of_several_trainings_are_applied_as_one(name, wrapper):
    """With the leading axis of `jax.vmap`, outside of it, entries are exact as they are inside."""
    tx = WRAPPERS[wrapper](METHODS[name].make())
    params = jax.tree.map(lambda p: jnp.stack([p, p[::-1]]), START)
    opt_state = jax.jit(jax.vmap(tx.init))(params)

    @jax.jit
    @jax.vmap
    def step(params, opt_state):
        updates, opt_state = tx.update(gradient(params, 1), opt_state, params)
        return optperm.apply_updates(params, updates, opt_state), updates, opt_state

    for _ in range(6):
        before = params
        params, updates, opt_state = step(params, opt_state)
        support.assert_same_bits(optperm.apply_updates(before, updates, opt_state), params)


@pytest.mark.entries
@pytest.mark.usefixtures("lenient")
def test_params_to_evaluate_of_schedule_free_are_sparse_or_it_is_refused():
    """RigL restarts the averages of dead entries; gradual pruning does not, and takes none."""
    inner = optax.contrib.schedule_free(optax.sgd(0.1), 0.1, b1=0.9)
    with pytest.raises(
        ValueError, match=r"schedule_free inside prune_gradually.*another optimizer"
    ):
        optperm.prune_gradually(inner, 0.5, 1.0).init(START)
    tx = optperm.rigl(inner, 0.5, end=50, every=2, key=jax.random.key(0))
    params, opt_state = START, tx.init(START)
    for t in range(STEPS):
        updates, opt_state = tx.update(gradient(params, t), opt_state, params)
        params = optperm.apply_updates(params, updates, opt_state)
    evaluated = optax.contrib.schedule_free_eval_params(opt_state.inner_state, params)
    for live, leaf in zip(
        jax.tree.leaves(opt_state.mask),
        (evaluated["deep"]["kernel"], evaluated["kernel"]),
        strict=True,
    ):
        np.testing.assert_array_equal(leaf == 0, ~live)
