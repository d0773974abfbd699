"""Which counts of the center's optimizer are of local steps: those that schedules read, no others."""

import functools

import jax
import jax.numpy as jnp
import loops
import numpy as np
import optax
import pytest
import replicas
import support
from optax import contrib

import optperm

pytestmark = pytest.mark.usefixtures("lenient")

PERIOD, STEPS = 3, 9
START = {"w": np.float32([[0.5, -0.5], [0.25, 1.0], [-0.75, 0.5]]), "b": np.float32([1.0, -1.0])}


def rate(count):
    """Return a rate whose values at commits differ from the values at their numbers."""
    return 0.2 / (1.0 + jnp.asarray(count, jnp.float32))


NAMES = [
    *("adabelief", "adadelta", "adagrad", "adafactor", "adam", "adamax", "adamaxw"),
    *("adamw", "adan", "amsgrad", "fromage", "lamb", "lars", "lion", "nadam"),
    *("nadamw", "novograd", "optimistic_adam_v2", "optimistic_gradient_descent"),
    *("radam", "rmsprop", "sgd", "sign_sgd", "yogi"),
]
CONTRIBUTED = ["acprop", "ademamix", "adopt", "dog", "galore", "muon"]
# From a schedule to an optimizer: all of Optax that take one, and compositions.
RIGHT = {name: getattr(optax, name) for name in NAMES} | {
    **{each: getattr(contrib, each) for each in CONTRIBUTED},
    "adamw whose decay is scheduled": lambda r: optax.adamw(0.1, weight_decay=r),
    "ademamix whose alpha is scheduled": lambda r: contrib.ademamix(0.1, alpha=r),
    "bias-corrected rmsprop": lambda r: optax.rmsprop(r, bias_correction=True),
    "injected": optax.inject_hyperparams(optax.adam),
    "partition": lambda r: optax.partition(
        {"w": optax.adam(r), "b": optax.sgd(r, momentum=0.9)}, {"w": "w", "b": "b"}
    ),
    "masked": lambda r: optax.chain(
        optax.masked(optax.scale_by_adam(), {"w": True, "b": False}),
        optax.scale_by_learning_rate(r),
    ),
    "apply_if_finite": lambda r: optax.apply_if_finite(optax.adam(r), 3),
    "ema": lambda r: optax.chain(optax.ema(0.9), optax.sgd(r)),
    "mars": lambda r: optax.chain(optperm.mars(r), optax.sgd(0.1)),
    "proximal": lambda r: optax.chain(optax.sgd(0.1), optperm.proximal(r, l2=0.5)),
    "sgperm": lambda r: optperm.sgperm(lambda count: 3 * r(count)),
    "sgld": lambda r: optperm.sgld(r, num_data=10**9),
    "low_rank": lambda r: optperm.low_rank(optax.adam(r), 1, every=2),
}
USUAL = {"adamw whose decay is scheduled", "mars", "injected"}
GRADS = [{k: np.cos(p * (i + 1.0)) for k, p in START.items()} for i in range(STEPS)]


@pytest.mark.parametrize("name", support.every_night([*RIGHT], USUAL))
def test_a_schedule_of_the_center_is_read_at_the_local_step(name):
    """The center makes the steps of an optimizer whose rate is, at each commit, that of the step."""
    make = RIGHT[name]
    tx = optperm.agn(make(rate), every=PERIOD)
    trail = loops.train(tx, START, GRADS)
    center, state = START, make(rate).init(START)

    @jax.jit
    def commit(t, n, center, state):
        now = optax.with_extra_args_support(make(lambda _: rate(t)))
        moves, state = now.update(n, state, center)
        return optax.apply_updates(center, moves), state

    for t in range(PERIOD - 1, STEPS, PERIOD):
        parts = GRADS[t - PERIOD + 1 : t + 1]
        n = jax.tree.map(lambda *gs: np.float32(sum(gs) / PERIOD), *parts)
        center, state = commit(t, n, center, state)
        found = optperm.distributed.center_params(trail[t][1])
        support.assert_close(found, center, atol=2e-5, rtol=1e-5)


def custom(schedule, *numbers):
    """Make an optimizer whose state no one knows: a count, perhaps with numbers beside it."""

    def update(updates, state, params=None):
        del params
        moves = jax.tree.map(lambda g: -schedule(state[0]) * g, updates)
        return moves, (state[0] + 1, *state[1:])

    return optax.GradientTransformation(lambda p: (jnp.int32(0), *numbers), update)


def unclear(schedule):
    return custom(schedule, jnp.float32(0.0))


TWOFOLD = ["prodigy", "dadapt_adamw", "momo", "momo_adam", "simplified_ademamix"]
REFUSED = {
    **{each: getattr(contrib, each) for each in TWOFOLD},
    "apply_every": lambda r: optax.chain(optax.apply_every(2), optax.sgd(r)),
    "unknown": unclear,
    "in a mapping": lambda r: optax.chain(optax.named_chain(("own", unclear(r)))),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_count_that_may_be_for_both_is_refused(name):
    """With the way out, which counts commits in the center."""
    optimizer = REFUSED[name](rate)
    with pytest.raises(ValueError, match="Pass outer, whose schedules"):
        jax.eval_shape(optperm.agn(optimizer).init, START)
    for tx in (optperm.agn(optimizer, outer=optimizer), optperm.diloco(optimizer, every=10)):
        jax.eval_shape(tx.init, START)


def test_schedules_within_a_switch_are_refused():
    """The second phase counts from the switch; without schedules, the center switches in time."""
    with pytest.raises(ValueError, match=r"put optperm\.switch_after around agn"):
        optperm.agn(optperm.switch_after(4, optax.sgd(rate), optax.adam(0.1))).init(START)
    tx = optperm.agn(optperm.switch_after(4, optax.sgd(0.1), optax.sgd(1.0)), every=PERIOD)
    ones = jax.tree.map(np.ones_like, START)
    trail = loops.train(tx, START, [ones] * 6)
    centers = [START["b"], *(trail[step][1].center["b"] for step in (2, 5))]
    # The commits of the third and the sixth step are before and after the switch.
    np.testing.assert_allclose(np.diff(np.stack(centers), axis=0)[:, 0], [-0.1, -1.0], atol=1e-6)


@pytest.mark.parametrize(
    "make",
    [
        custom,  # by the structure of its state
        functools.partial(optax.noisy_sgd, key=0),  # whose noise is annealed by local steps too
        optax.inject_hyperparams(optax.sgd),
    ],
)
def test_counts_of_a_pure_schedule_are_those_of_the_local_state(make):
    """Replicas that commit in turn advance it by one period, also where nobody took part."""
    tx = optperm.agn(make(rate), every=PERIOD, axis_name=replicas.AXIS, combine="sequential")
    params, grads = np.zeros((4, 1), np.float32), np.ones((STEPS, 4, 1), np.float32)
    grads[0] = np.nan
    options = {"how": "vmap", "size": 4, "opt_state": jax.vmap(tx.init)(params)}
    _, state = loops.train(tx, params, list(grads), **options)[-1]
    assert state.skipped.tolist() == [1] * 4
    for each in (state.center_state, state.local_state):
        counts = [leaf for leaf in jax.tree.leaves(each) if leaf.dtype == jnp.int32]
        assert np.unique(counts).tolist() == [STEPS]


def test_schedules_of_an_outer_optimizer_count_its_own_steps():
    fall = optax.linear_schedule(1.0, 0.0, 6)
    tx = optperm.agn(optax.sgd(0.1), every=2, outer=optax.sgd(fall))
    trail = loops.train(tx, jnp.zeros(2), [jnp.ones(2)] * 8)
    centers = [state.center[0] for _, state in trail[1::2]]
    np.testing.assert_allclose(centers, np.cumsum([-1.0, -5 / 6, -4 / 6, -3 / 6]), atol=1e-6)
