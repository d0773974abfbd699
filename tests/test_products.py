"""Every wrapper around every method with exact entries: what is promised holds, or is refused.

After `optperm.apply_updates` the entries of the method that runs have exactly the values that the method
promises, every other entry is what `optax.apply_updates` gives, and a method that does not run changes
nothing. What each method promises is written down here once more, from its documentation.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import support

import optperm
from optperm import distributed, permutation, sparsity
from optperm.core.states import find_running_states, find_states
from optperm.core.trees import fill_masked, mask_like

STEPS = 8
START = {
    "kernel": support.normal((6, 4), 1),
    "deep": {"kernel": support.normal((4, 6), 2)},
    "bias": support.normal((6,), 3),
}
GOAL = jax.tree.map(lambda p: jnp.sin(5.0 * p) + 0.3, START)


def sgd(rate: float = 0.3) -> optax.GradientTransformation:
    """One with momentum, so that a state of zeros matters."""
    return optax.sgd(rate, momentum=0.5)


def everywhere(tree, flag):
    """The flag for each entry."""
    return jax.tree.map(lambda leaf: np.full(leaf.shape, flag), tree)


def held(state, before):
    """Entries with a mask of False, at their values before the step."""
    return jax.tree.map(jnp.logical_not, state.mask), before


def dead(state, before):
    """Entries that are not live, at zero."""
    return jax.tree.map(jnp.logical_not, state.mask), jax.tree.map(jnp.zeros_like, before)


def permuted(state, _):
    """All entries, at the weights in the state."""
    return everywhere(state.weights, True), state.weights


def synchronized(state, _):
    """All entries, in a step that is due."""
    return everywhere(state.weights, state.synchronized), state.weights


def committed(state, _):
    """All entries, at the center, after a commit."""
    return everywhere(state.center, np.all(state.pulled)), state.center


MASKING = optperm.mask_elements(jax.tree.map(lambda p: jnp.abs(p) <= 0.8, START))
# Each method with exact entries, the type of its state, and what gives the flags of these entries and
# their values, by the state and the params before the step.
METHODS = {
    "sgperm": (optperm.sgperm(0.4), permutation.PermuteByCyclesState, permuted),
    "laperm": (optperm.laperm(sgd(), 2), permutation.LapermState, synchronized),
    "mask_elements": (optax.chain(sgd(), MASKING), sparsity.MaskElementsState, held),
    "prune_gradually": (
        optperm.prune_gradually(sgd(), 0.5, lambda t: jnp.minimum(t / 4.0, 1.0), every=1),
        sparsity.SparseState,
        dead,
    ),
    "rigl": (optperm.rigl(sgd(), 0.5, end=50, every=2), sparsity.SparseState, dead),
    "agn": (optperm.agn(sgd(), every=2), distributed.AgnState, committed),
    "diloco": (optperm.diloco(sgd(), sgd(0.7), every=2), distributed.DilocoState, committed),
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
        tx, sgd(0.7), every=distributed.Every(4, fragments=2, delay=1)
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
USUAL = [
    *(("sgperm", "then"), ("laperm", "MultiSteps")),
    *(("mask_elements", "first-of-same"), ("mask_elements", "agn-other-center")),
    *(("prune_gradually", "first"), ("agn", "partition")),
]


def make_step(tx):
    """A step on a bowl with noise, of its own in each, that also returns the updates."""

    def step(params, opt_state, t):
        grads = jax.tree.map(lambda p, q: p - q + 0.3 * jnp.cos(7.0 * p + t), params, GOAL)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optperm.apply_updates(params, updates, opt_state), updates, opt_state

    return step


@pytest.mark.usefixtures("lenient")
def test_products_whose_entries_could_not_be_exact_are_refused():
    for name, wrapper in REFUSED:

        def take_a_step(name=name, wrapper=wrapper):
            tx = WRAPPERS[wrapper](METHODS[name][0])
            make_step(tx)(START, tx.init(START), 0)

        with pytest.raises(ValueError, match=r"exact params|chooses which entries"):
            jax.eval_shape(take_a_step)


@pytest.mark.usefixtures("lenient")
@pytest.mark.parametrize(
    ("name", "wrapper"), support.every_night(EXACT, USUAL, mark=pytest.mark.entries)
)
def test_every_entry_of_a_product_is_exact(name, wrapper):
    """By the promises of the method that runs, bit for bit, and nobody else's."""
    method, state_type, find = METHODS[name]
    tx = WRAPPERS[wrapper](method)
    params, opt_state = START, jax.jit(tx.init)(START)
    step, first, ran = jax.jit(make_step(tx)), START, 0
    for t in range(STEPS):
        before = params
        params, updates, opt_state = step(params, opt_state, t)
        wanted = optax.apply_updates(before, updates)
        running = find_running_states(opt_state, state_type)
        if len(running) > 1:  # a center of the method's own kind is around it
            running = find_states(opt_state.local_state, state_type)
        if running:
            (state,) = running
            first, ran = first if ran else before, ran + 1
            where, values = find(state, before)
            is_exact = fill_masked(where, everywhere(START, False))
            wanted = jax.tree.map(jnp.where, is_exact, fill_masked(values, before), wanted)
        if not is_placed_by(wrapper, opt_state):
            if isinstance(opt_state, sparsity.SparseState):
                live = fill_masked(opt_state.mask, everywhere(START, True))
                wanted = jax.tree.map(lambda m, w: jnp.where(m, w, 0.0), live, wanted)
            support.assert_same_bits(params, wanted)
            if running and find in (permuted, synchronized) and optax.tree.sum(where):
                support.assert_permutes(*(mask_like(p, state.weights) for p in (params, first)))
        elif wrapper not in ("diloco-plan", "dldr"):
            center = distributed.center_params(opt_state)
            support.assert_same_bits(params, center)
            if find in (dead, held):
                support.assert_same_bits(center, jax.tree.map(jnp.where, is_exact, values, center))
    assert ran if wrapper != "then" else ran == STEPS - 4


def is_placed_by(wrapper, opt_state):
    """Return whether a wrapper promises to replace all entries in this step."""
    places = (getattr(opt_state, name, False) for name in ("pulled", "is_restarted"))
    return wrapper != "alone" and any(map(np.any, places))


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
    tx = WRAPPERS[wrapper](METHODS[name][0])
    params = jax.tree.map(lambda p: jnp.stack([p, p[::-1]]), START)
    opt_state = jax.jit(jax.vmap(tx.init))(params)
    step = jax.jit(jax.vmap(make_step(tx), in_axes=(0, 0, None)))
    apply = jax.jit(optperm.apply_updates)
    for _ in range(6):
        before = params
        params, updates, opt_state = step(params, opt_state, 1)
        support.assert_same_bits(apply(before, updates, opt_state), params)


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
        params, _, opt_state = make_step(tx)(params, opt_state, t)
    evaluated = optax.contrib.schedule_free_eval_params(opt_state.inner_state, params)
    live = fill_masked(opt_state.mask, everywhere(START, True))
    jax.tree.map(lambda leaf, m: np.testing.assert_array_equal(leaf != 0, m), evaluated, live)
