"""How SGPerm's aggressiveness falls with the length of a run, and what is said at its end."""

import functools
import warnings

import jax
import jax.numpy as jnp
import loops
import numpy as np
import optax
import support

import optperm
from optperm import training
from optperm.cli import datasets
from optperm.cli.flags import Run
from optperm.cli.methods import METHODS
from optperm.cli.training import Training
from optperm.permutation import falling
from optperm.permutation._standstill import judge_movement


def known(t):
    """What is left of the aggressiveness in step t, from 1, of a run of three steps."""
    return 100.0 ** -np.minimum(t / 3, 1.0)


def unknown(t):
    """What is left of it where nobody knows the length."""
    return 1 / (1 + t / 100)


def test_falling_is_its_equation_for_any_count_and_traced_numbers():
    for num_steps, fall in ((3, known), (None, unknown)):
        counts = np.array([0, 1, 2, 3, 2**31 - 1])
        values = [falling(0.4, num_steps)(count) for count in counts.tolist()]
        np.testing.assert_allclose(values, 0.4 * fall(counts + 1.0), rtol=1e-6)
        traced = jax.jit(lambda start, count, n=num_steps: falling(start, n)(count))
        in_jit = [traced(0.4, jnp.int32(count)) for count in counts]
        np.testing.assert_allclose(in_jit, values, rtol=1e-6)


def test_sgperm_falls_by_its_length_or_without_one_as_one_over_the_step():
    """Past the end the last value holds, and the state counts the steps past it, also where the length
    is a hyperparameter that is traced."""
    params, grads = support.normal((50, 3), 0), list(support.normal((5, 50, 3), 1))
    build = functools.partial(optperm.sgperm, momentum=0.0)

    def train(tx):
        trail = loops.train(tx, params, grads, how="scan")
        states = [getattr(state, "inner_state", state) for _, state in trail]
        return [w for w, _ in trail], [int(state[0].steps_past_end) for state in states]

    ends = []
    for fall, num_steps, past in ((known, 3, [0, 0, 0, 1, 2]), (unknown, None, [0] * 5)):
        values = (0.1 * fall(np.arange(1.0, 6.0))).astype(np.float32)
        wanted, _ = train(build(lambda count, values=values: jnp.asarray(values)[count]))
        ends.append(wanted[-1])
        for tx in (
            build(num_steps=num_steps),
            optax.inject_hyperparams(build)(num_steps=num_steps),
        ):
            found, counted = train(tx)
            support.assert_same_bits(found, wanted)
            assert counted == past
    assert not np.array_equal(*ends)


def warned_of(tx, epochs, **options):
    """The warnings of `fit`, which trains a linear model in epochs of 25 steps, with their epochs."""
    x = support.normal((100, 300), 0)
    data = {"x": x, "y": x @ support.normal((300,), 1)}

    def loss_fn(w, batch):
        return jnp.mean((batch["x"] @ w - batch["y"]) ** 2)

    start = jax.device_put(support.normal((300,), 2), jax.devices()[0])  # one device by choice
    state = training.TrainState.create(apply_fn=None, params=start, tx=tx)
    ends = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        training.fit(
            state,
            loss_fn,
            data,
            epochs=epochs,
            batch_size=4,
            every={25: lambda _: ends.append(len(caught))},
            **options,
        )
    assert {warning.filename for warning in caught} <= {__file__}
    return [str(warning.message) for warning in caught], ends


def test_fit_says_once_that_weights_stand_still():
    falls = optax.exponential_decay(0.4, 1, 0.8)
    (says,), ends = warned_of(optperm.sgperm(falls, momentum=0.99), 5)
    assert says.startswith("After step 100, weights hardly change positions: ")
    assert "Pass sgperm num_steps" in says
    assert ends == [0, 0, 0, 0, 1]


def test_weights_that_never_move_or_stop_are_told_from_those_that_move():
    still, usual = np.zeros(25), np.full(100, 0.5)
    stopped = np.where(np.arange(100) < 50, usual, 0.01)
    for moved, says in ((still, "No weight has moved in 25 steps"), (stopped, "After step 100, ")):
        (sentence,) = judge_movement({"fraction_moved": moved})
        assert sentence.startswith(says)
    for moved in (usual, stopped[:99], still[:4]):
        assert not judge_movement({"fraction_moved": moved})


def test_every_fit_says_that_the_length_is_over(tmp_path):
    """Also one that goes on where another, which said it, had ended."""
    resumed = {"checkpoints": tmp_path, "checkpoint_every": 25, "resume": True}
    for epochs, wanted in ((3, [0, 0, 1]), (4, [1])):
        (says,), ends = warned_of(optperm.sgperm(num_steps=60), epochs, **resumed)
        expected = (
            "sgperm is past its num_steps: it continues with the last aggressiveness. Pass the number "
            "of updates of the whole run as num_steps."
        )
        assert says == expected
        assert ends == wanted


def test_the_command_knows_the_length_of_its_run(tmp_path):
    """Epochs times steps, unless that or the decay is given: what a run that goes on is compared by."""
    rng = np.random.default_rng(0)
    arrays = {
        f"x_{part}": rng.normal(size=(64, 6)).astype(np.float32) for part in ("train", "test")
    }
    labels = {f"y_{part}": np.arange(64) % 3 for part in ("train", "test")}
    np.savez(tmp_path / "three.npz", **arrays, **labels)
    data = datasets.load(str(tmp_path / "three.npz"), 0.0)
    method, flags = METHODS["sgperm"], Run(batch_size=5, epochs=3, hidden=7)
    for given, num_steps in (
        ({}, 36),
        ({"num_steps": 50}, 50),
        ({"aggressiveness_decay": 0.99}, None),
    ):
        run = Training(method, method.defaults() | given, flags, data)
        assert run.hyperparameters["num_steps"] == num_steps
