"""Which counts of the center's optimizer are of local steps: those that schedules read, no others."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import loops
import numpy as np
import optax
import pytest
import support
from optax import contrib

import optperm

pytestmark = pytest.mark.usefixtures("lenient")

PERIOD, STEPS = 3, 9
START = {"w": np.float32([[0.5, -0.5], [0.25, 1.0], [-0.75, 0.5]]), "b": np.float32([1.0, -1.0])}


def rate(count):
    """A schedule whose values at commits differ from the values at their numbers."""
    return 0.2 / (1.0 + jnp.asarray(count, jnp.float32))


def labelled(learning_rate):
    parts = {"a": optax.adam(learning_rate), "b": optax.sgd(learning_rate, momentum=0.9)}
    return optax.partition(parts, {"w": "a", "b": "b"})


NAMES = [
    "adabelief",
    "adadelta",
    "adagrad",
    "adafactor",
    "adam",
    "adamax",
    "adamaxw",
    "adamw",
    "adan",
    "amsgrad",
    "fromage",
    "lamb",
    "lars",
    "lion",
    "nadam",
    "nadamw",
    "novograd",
    "optimistic_adam_v2",
    "optimistic_gradient_descent",
    "radam",
    "rmsprop",
    "sgd",
    "sign_sgd",
    "yogi",
]

# From a schedule to an optimizer: all of Optax that take one, and compositions.
RIGHT = {name: getattr(optax, name) for name in NAMES} | {
    "acprop": contrib.acprop,
    "ademamix": contrib.ademamix,
    "adopt": contrib.adopt,
    "dog": contrib.dog,
    "galore": contrib.galore,
    "muon": contrib.muon,
    "adamw whose decay is scheduled": lambda r: optax.adamw(0.1, weight_decay=r),
    "ademamix whose alpha is scheduled": lambda r: contrib.ademamix(0.1, alpha=r),
    "bias-corrected rmsprop": lambda r: optax.rmsprop(r, bias_correction=True),
    "injected": optax.inject_hyperparams(optax.adam),
    "partition": labelled,
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


def gradients():
    return [jax.tree.map(lambda p, i=i: np.cos(p * (i + 1.0)), START) for i in range(STEPS)]


@pytest.mark.parametrize("name", support.every_night([*RIGHT], USUAL))
def test_a_schedule_of_the_center_is_read_at_the_local_step(name):
    """The center makes the steps of an optimizer whose rate is, at each commit, that of the step."""
    make = RIGHT[name]
    tx = optperm.agn(make(rate), every=PERIOD)
    trail = loops.train(tx, START, gradients())
    center, state = START, make(rate).init(START)
    for t in range(PERIOD - 1, STEPS, PERIOD):
        parts = gradients()[t - PERIOD + 1 : t + 1]
        n = jax.tree.map(lambda *gs: np.float32(sum(gs) / PERIOD), *parts)
        now = make(lambda _, t=t: rate(t))
        moves, state = optax.with_extra_args_support(now).update(n, state, center)
        center = jax.tree.map(lambda p, u: p + u, center, moves)
        support.assert_close(
            optperm.distributed.center_params(trail[t][1]), center, atol=2e-5, rtol=1e-5
        )


class Mixed(NamedTuple):
    """A count of which nobody can say what reads it."""

    count: jax.Array
    mu: jax.Array


def unknown(learning_rate):
    def update(updates, state, params=None):
        del params
        moves = jax.tree.map(lambda g: -learning_rate(state.count) * g, updates)
        return moves, Mixed(state.count + 1, state.mu)

    return optax.GradientTransformation(lambda p: Mixed(jnp.int32(0), jnp.float32(0.0)), update)


REFUSED = {
    "prodigy": contrib.prodigy,
    "dadapt_adamw": contrib.dadapt_adamw,
    "momo": contrib.momo,
    "momo_adam": contrib.momo_adam,
    "simplified_ademamix": contrib.simplified_ademamix,
    "apply_every": lambda r: optax.chain(optax.apply_every(2), optax.sgd(r)),
    "unknown": unknown,
    "in a mapping": lambda r: optax.chain(optax.named_chain(("own", unknown(r)))),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_count_that_may_be_for_both_is_refused(name):
    """With the way out, which counts commits in the center."""
    optimizer = REFUSED[name](rate)
    with pytest.raises(ValueError, match="Pass outer, whose schedules"):
        optperm.agn(optimizer).init(START)
    optperm.agn(optimizer, outer=optimizer).init(START)
    optperm.diloco(optimizer, every=10).init(START)


def test_schedules_within_a_switch_are_refused():
    """The second phase counts from the switch; without schedules, the center switches in time."""
    with pytest.raises(ValueError, match=r"write optperm\.switch_after around agn"):
        optperm.agn(optperm.switch_after(4, optax.sgd(rate), optax.adam(0.1))).init(START)
    tx = optperm.agn(optperm.switch_after(4, optax.sgd(0.1), optax.sgd(1.0)), every=PERIOD)
    ones = jax.tree.map(np.ones_like, START)
    trail = loops.train(tx, START, [ones] * 6)
    centers = [START["b"], *(trail[step][1].center["b"] for step in (2, 5))]
    # The commits of the third and the sixth step are before and after the switch.
    np.testing.assert_allclose(np.diff(np.stack(centers), axis=0)[:, 0], [-0.1, -1.0], atol=1e-6)


def test_counts_of_a_pure_schedule_are_those_of_the_local_state():
    """By structure, of a state that no one knows; noise is annealed by local steps too."""

    def own(schedule):
        def update(updates, state, params=None):
            del params
            return jax.tree.map(lambda g: -schedule(state[0]) * g, updates), (state[0] + 1,)

        return optax.GradientTransformation(lambda p: (jnp.int32(0),), update)

    for inner in (
        own(rate),
        optax.noisy_sgd(rate, key=0),
        optax.inject_hyperparams(optax.sgd)(rate),
    ):
        state = loops.train(optperm.agn(inner, every=PERIOD), START, gradients())[-1][1]
        counts = functools.partial(
            lambda tree: [int(c) for c in jax.tree.leaves(tree) if c.dtype == jnp.int32]
        )
        assert counts(state.center_state) == counts(state.local_state)
        assert set(counts(state.center_state)) == {STEPS}


def test_a_warm_up_from_zero_keeps_the_first_period():
    """The first commit, after step 9 of a warm-up over twenty, has the rate of that step."""
    tx = optperm.agn(optax.sgd(optax.linear_schedule(0.0, 0.1, 20)), every=10)
    trail = loops.train(tx, jnp.float32(1.0), [jnp.float32(1.0)] * 10)
    np.testing.assert_allclose(trail[-1][0], 1.0 - 0.045, rtol=1e-6)
