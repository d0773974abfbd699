"""How SGPerm's aggressiveness falls with the length of a run, and what is said at its end."""

import functools
import re
import warnings

import jax
import jax.numpy as jnp
import loops
import numpy as np
import optax
import pytest
import support

import optperm
from optperm import training
from optperm.permutation import falling
from optperm.permutation._permute_by_cycles import judge_movement

# Lengths of a run, None where nobody knows it, with what is left of the aggressiveness in step t from 1.
FALLS = ((3, lambda t: 100.0 ** -np.minimum(t / 3, 1.0)), (None, lambda t: 1 / (1 + t / 100)))


def test_falling_is_its_equation_for_any_count_and_traced_numbers():
    for num_steps, fall in FALLS:
        counts = np.array([0, 1, 2, 3, 2**31 - 1])
        values = [falling(0.4, num_steps)(count) for count in counts.tolist()]
        np.testing.assert_allclose(values, 0.4 * fall(counts + 1.0), rtol=1e-6)
        traced = jax.jit(lambda start, count, n=num_steps: falling(start, n)(count))
        in_jit = [traced(0.4, np.int32(count)) for count in counts]
        np.testing.assert_allclose(in_jit, values, rtol=1e-6)


def test_sgperm_falls_from_a_tenth_and_counts_the_steps_past_its_length():
    """Past the end the last value holds; the length may be unknown, or a traced hyperparameter."""
    params, grads = support.normal((50, 3), 0), [*np.asarray(support.normal((5, 50, 3), 1))]
    build, ends = functools.partial(optperm.sgperm, momentum=0.0), []
    options = {"how": "scan", "init": "jit"}

    @jax.jit
    def given(values):
        tx, batches = build(lambda t: values[t]), np.stack(grads)
        step = loops.make_step(tx)

        def body(carried, g):
            carried = step(*carried, g)
            return carried, carried[0]

        return jax.lax.scan(body, (params, tx.init(params)), batches)[1]

    for (num_steps, fall), past in zip(FALLS, ([0, 0, 0, 1, 2], [0] * 5), strict=True):
        wanted = np.asarray(given(np.float32(0.1 * fall(np.arange(1.0, 6.0)))))
        ends.append(wanted[-1])
        plain = build(num_steps=num_steps)
        traced = optax.inject_hyperparams(build)(num_steps=num_steps)
        for tx in (plain, traced) if num_steps else (plain,):
            trail = loops.train(tx, params, grads, **options)
            support.assert_same_bits(np.stack([w for w, _ in trail]), wanted)
            states = [getattr(state, "inner_state", state) for _, state in trail]
            assert [int(state[0].steps_past_end) for state in states] == past
    assert not np.array_equal(*ends)


def warned_of(tx, **options):
    """Return the warnings of `fit` in epochs of 25 steps, and how many there are after each."""
    x = support.normal((100, 300), 0)
    data = {"x": x, "y": x @ support.normal((300,), 1)}

    def loss_fn(w, batch):
        return jnp.mean((batch["x"] @ w - batch["y"]) ** 2)

    state = training.TrainState.create(apply_fn=None, params=support.normal((300,), 2), tx=tx)
    ends = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        every = {25: lambda _: ends.append(len(caught))}
        training.fit(state, loss_fn, data, batch_size=4, callbacks=every, **options)
    assert {warning.filename for warning in caught} <= {__file__}
    return [str(warning.message) for warning in caught], ends


@pytest.mark.usefixtures("one_device")
def test_fit_says_once_that_weights_stand_still():
    falls = optax.exponential_decay(0.4, 1, 0.8)
    (says,), ends = warned_of(optperm.sgperm(falls, momentum=0.99), epochs=5)
    assert says.startswith("After step 100, weights hardly change positions: ")
    assert "Pass sgperm num_steps" in says
    assert ends == [0, 0, 0, 0, 1]


def test_weights_that_never_move_or_that_stop_are_warned_of():
    still, usual = np.zeros(25), np.full(100, 0.5)
    stopped = np.where(np.arange(100) < 50, usual, 0.01)
    early = np.where(np.arange(100) < 5, usual, 0.04)
    for moved, says in (
        (still, "No weight has moved in 25 steps"),
        (
            stopped,
            "After step 100, .* 1.0% of them .* in the last 50 steps, but 50.0% in the first 5",
        ),
        (
            early,
            "After step 100, .* 4.0% of them .* in the last 50 steps, but 50.0% in the first 5",
        ),
    ):
        (sentence,) = judge_movement({"fraction_moved": moved})
        assert re.match(says, sentence)
    for moved in (usual, stopped[:99], still[:4], np.where(np.arange(100) < 5, usual, 0.06)):
        assert not judge_movement({"fraction_moved": moved})


@pytest.mark.usefixtures("one_device")
def test_every_fit_says_that_the_length_is_over(tmp_path):
    """Each call of `fit` warns once, also a call that resumes after the length is over."""
    resumed = {"checkpoints": training.Checkpoints(tmp_path, every=25, resume=True)}
    for epochs, wanted in ((3, [0, 0, 1]), (4, [1])):
        says, ends = warned_of(optperm.sgperm(num_steps=60), epochs=epochs, **resumed)
        assert says == [
            "sgperm is past its num_steps: it continues with the last aggressiveness. Pass the number "
            "of updates of the whole run as num_steps."
        ]
        assert ends == wanted
