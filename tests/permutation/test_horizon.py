"""How SGPerm's aggressiveness falls with the length of a run, and what is said at its end."""

import functools
import itertools
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


def test_the_aggressiveness_falls_by_the_length_or_without_one_as_one_over_the_step():
    """Every step is that of the schedule written out, past the end that of the last value, also where
    the length is a hyperparameter that is traced; the state counts the steps past it."""
    params, grads = support.normal((50, 3), 0), list(support.normal((5, 50, 3), 1))
    train = functools.partial(loops.train, how="scan")

    def by(aggressiveness):
        tx = optperm.sgperm(aggressiveness, momentum=0.0)
        return [w for w, _ in train(tx, params, grads)]

    def rule(start, fall):
        return lambda count: start * fall((count + 1).astype(jnp.float32))

    known, unknown = lambda t: 100.0 ** -jnp.minimum(t / 3, 1.0), lambda t: 1 / (1 + t / 100)
    for build in (optperm.sgperm, optax.inject_hyperparams(optperm.sgperm)):
        trail = train(build(num_steps=3, momentum=0.0), params, grads)
        support.assert_same_bits([w for w, _ in trail], by(rule(0.1, known)))
        states = [getattr(state, "inner_state", state) for _, state in trail]
        assert [int(state[0].steps_past_end) for state in states] == [0, 0, 0, 1, 2]
    trail = train(optperm.sgperm(momentum=0.0), params, grads)
    support.assert_same_bits([w for w, _ in trail], by(rule(0.1, unknown)))
    assert int(trail[-1][1][0].steps_past_end) == 0
    for num_steps, fall in ((3, known), (None, unknown)):
        support.assert_same_bits(by(falling(0.4, num_steps)), by(rule(0.4, fall)))
    moved = [by(falling(*each)) for each in ((0.4, 3), (0.4, None), (0.1, 3), (0.1, None))]
    for one, other in itertools.combinations(moved, 2):
        assert not np.array_equal(one, other)


def test_the_start_and_the_length_may_be_traced_and_the_count_of_any_kind():
    """As where `optax.inject_hyperparams` makes the schedule; the values are of the equation."""
    for num_steps in (4, None):
        counts = np.array([0, 1, 3, 4, 2**31 - 1])
        t = counts + 1.0
        fall = 100.0 ** -np.minimum(t / 4, 1.0) if num_steps else 1 / (1 + t / 100)
        values = [falling(0.4, num_steps)(count) for count in counts.tolist()]
        np.testing.assert_allclose(values, 0.4 * fall, rtol=1e-6)
        traced = jax.jit(lambda start, count, n=num_steps: falling(start, n)(count))
        in_jit = [traced(0.4, jnp.int32(count)) for count in counts]
        np.testing.assert_allclose(in_jit, values, rtol=1e-6)

    def build(start, num_steps):
        return optperm.sgperm(falling(start, num_steps), momentum=0.0)

    params, grads = support.normal((50, 3), 0), list(support.normal((5, 50, 3), 1))
    trails = (
        loops.train(make(0.4, 3), params, grads, how="scan")
        for make in (build, optax.inject_hyperparams(build))
    )
    support.assert_same_bits(*([w for w, _ in trail] for trail in trails))


def test_aggressiveness_of_long_weight_vectors_is_that_of_each_step():
    """With a short reach in long weight vectors some cycles change with each percent of it."""
    params, grads = support.normal((4000, 2), 0), list(support.normal((4, 4000, 2), 1))
    rules = {
        # After the end the value stays at a hundredth of the first.
        (20.0, 2): lambda t: 100.0 ** -jnp.minimum(t / 2, 1.0),
        (0.001, None): lambda t: 1 / (1 + t / 100),
    }
    for (first, num_steps), rule in rules.items():

        def schedule(count, first=first, rule=rule):
            return first * rule((count + 1).astype(jnp.float32))

        build = functools.partial(optperm.sgperm, momentum=0.0)
        wanted, got = (
            loops.train(tx, params, grads, how="scan")
            for tx in (build(schedule), build(falling(first, num_steps)))
        )
        support.assert_same_bits([w for w, _ in got], [w for w, _ in wanted])


def warned_of(tx, epochs, start=None, **options):
    """The warnings of `fit`, which trains a linear model in epochs of 25 steps, with their epochs."""
    x = support.normal((100, 300), 0)
    data = {"x": x, "y": x @ support.normal((300,), 1)}

    def loss_fn(w, batch):
        return jnp.mean((batch["x"] @ w - batch["y"]) ** 2)

    start = support.normal((300,), 2) if start is None else start
    start = jax.device_put(start, jax.devices()[0])  # one device by choice
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


def test_fit_says_once_that_weights_stand_still_or_that_the_length_is_over():
    """Weights that stopped with epochs to go, and steps past the end; nothing where neither is so."""
    (says,), ends = warned_of(
        optperm.sgperm(optax.exponential_decay(0.4, 1, 0.8), momentum=0.99), 5
    )
    assert says.startswith("After step 100 the weights hardly trade places: ")
    assert "Pass sgperm num_steps" in says
    assert ends == [0, 0, 0, 0, 1]
    (says,), ends = warned_of(optperm.sgperm(num_steps=60), 4)
    assert says == "sgperm is past its num_steps: it continues with the last aggressiveness."
    assert ends == [0, 0, 1, 1]
    assert warned_of(optperm.sgperm(num_steps=125), 5) == ([], [0] * 5)
    signs = np.sign(support.normal((300,), 2))
    (says,), ends = warned_of(optperm.sgperm(falling(0.5, 125)), 3, start=signs)
    assert says.startswith("No weight has moved in 25 steps: take a larger aggressiveness.")
    assert ends == [0, 1, 1]


def test_every_fit_says_that_the_length_is_over(tmp_path):
    """Also one that goes on where another, which said it, had ended."""
    for epochs in (3, 4, 5):
        (says,), ends = warned_of(
            optperm.sgperm(num_steps=60),
            epochs,
            checkpoints=tmp_path,
            checkpoint_every=25,
            resume=True,
        )
        assert says.startswith("sgperm is past its num_steps")
        assert ends[-1] == 1


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
