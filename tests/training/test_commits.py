"""The params that `fit` returns, evaluates and keeps where replicas train apart between commits."""

import functools
import signal
import warnings

import fitting
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import support
from fitting import BATCH, EXAMPLES, data, linear_loss

import optperm
from optperm import training
from optperm.core.states import find_state

SGD = optax.sgd(0.1)


@functools.cache
def methods(name):
    """Methods whose replicas commit rarely, never, or in parts, within the steps of these tests."""
    diloco = functools.partial(optperm.diloco, SGD, axis_name="replica")
    agn = functools.partial(optperm.agn, SGD, axis_name="replica")
    return {
        "diloco, no commit": lambda: diloco(every=500),
        "diloco, between commits": lambda: diloco(optax.sgd(1.0), every=5),
        "fragments and a delay": lambda: diloco(
            optax.sgd(1.0), every=optperm.distributed.Every(6, 2, 3)
        ),
        "agn, between commits": lambda: optax.chain(optax.clip(1.0), agn(every=5)),
        "wider center": lambda: diloco(every=5, center_dtype="float32"),
        "a second phase": lambda: optperm.switch_after(3, diloco(every=2), agn(every=5)),
    }[name]()


NAMES = ("diloco, no commit", "diloco, between commits", "fragments and a delay")
NAMES += ("agn, between commits", "wider center", "a second phase")


def begin(tx, dtype=jnp.float32):
    params = {"w": jnp.ones((fitting.FEATURES, fitting.CLASSES), dtype)}
    return training.TrainState.create(apply_fn=None, params=params, tx=tx)


def run(tx, devices=2, train_data=None, **options):
    if train_data is None:
        train_data = data()
        options.setdefault("batch_size", BATCH)
    options |= fitting.on(devices, mapped=True)
    return training.fit(begin(tx), linear_loss, train_data, **options)


def by_hand(tx, steps, size=2):
    """The center after some steps of replicas mapped by `jax.vmap`, and a commit without a step."""
    params = begin(tx).params
    carry = jax.tree.map(lambda x: jnp.stack([x] * size), (params, tx.init(params)))

    def step(params, opt_state, batch, **flag):
        e = optperm.evaluate(linear_loss, params, batch)
        updates, opt_state = tx.update(e.grad, opt_state, params, **e.extra_args, **flag)
        return optperm.apply_updates(params, updates, opt_state), opt_state

    mapped = jax.jit(jax.vmap(step, axis_name="replica"))
    orders = [np.asarray(training.shuffled(0, epoch, EXAMPLES)) for epoch in (1, 2)]
    for hand in np.concatenate(orders).reshape(-1, BATCH)[:steps]:
        batch = {key: leaf[hand.reshape(size, -1)] for key, leaf in data().items()}
        carry = mapped(*carry, batch)
    finish = functools.partial(step, commit="only")
    return jax.jit(jax.vmap(finish, axis_name="replica"))(*carry, batch)[0]["w"][0]


@pytest.mark.filterwarnings("ignore:The run ends after:UserWarning")
@pytest.mark.parametrize(
    "name", [*NAMES[:1], *(pytest.param(name, marks=pytest.mark.chains) for name in NAMES[1:])]
)
def test_fit_between_commits_returns_the_params_of_a_commit(name, tmp_path):
    """No step is lost, on whichever step the run ends; a run that goes on has the same bits."""
    tx = methods(name)
    result = run(tx, steps=7, checkpoints=tmp_path)
    w = np.asarray(result.state.params["w"])
    np.testing.assert_allclose(w, by_hand(tx, 7), rtol=0, atol=1e-6)
    center = optperm.distributed.center_params(result.state.opt_state, final=True)["w"]
    np.testing.assert_array_equal(w, center)
    assert result.history.steps["loss"][-1] < result.history.steps["loss"][0]
    # The checkpoint is of before that commit.
    longer = run(tx, steps=9, checkpoints=tmp_path, resume=True)
    whole = run(tx, steps=9)
    support.assert_same_bits(*(fit.state.params for fit in (longer, whole)))
    support.assert_same_bits(longer.history.steps, whole.history.steps)


def test_a_signal_within_a_period_keeps_the_state_of_before_the_commit(tmp_path):
    """What was returned then has all steps; the resumed run is the uninterrupted one, to the bit."""
    tx = methods("diloco, between commits")
    evaluation = {"eval_fn": lambda params, batch: {"loss": linear_loss(params, batch)}}
    options = {"epochs": 3, "eval_data": data(), "keep_best": "eval_loss", **evaluation}
    whole = run(tx, **options)
    send = {"every": {7: lambda event: signal.raise_signal(signal.SIGTERM)}}
    stopped = run(tx, checkpoints=tmp_path, on_signal="return", **options, **send)
    assert (stopped.ended, stopped.step) == ("interrupted", 7)
    np.testing.assert_allclose(stopped.state.params["w"], by_hand(tx, 7), rtol=0, atol=1e-6)
    resumed = run(tx, checkpoints=tmp_path, resume=True, **options)
    for name in ("state", "best_state"):
        pair = (getattr(fit, name) for fit in (resumed, whole))
        support.assert_same_bits(*(jax.tree.map(np.asarray, state) for state in pair))
    support.assert_same_bits(resumed.history.steps, whole.history.steps)
    assert resumed.best_step == whole.best_step


def test_evaluations_are_of_the_params_that_fit_would_return():
    """At each row, in events and in the best state; training does not change by them."""
    tx, seen = methods("diloco, between commits"), {}
    options = {"eval_fn": lambda params, batch: {"loss": linear_loss(params, batch)}}
    options |= {"eval_data": data(), "eval_every": 3, "keep_best": ("eval_loss", "max")}

    def note(event):
        seen[event.step] = np.asarray(event.state.params["w"])

    result = run(tx, steps=8, every={1: note}, **options)
    rows = dict(zip(*(result.history.epochs[name] for name in ("step", "eval_loss")), strict=True))
    assert [*rows] == [3, 5, 6, 8]
    for step, value in rows.items():
        np.testing.assert_allclose(seen[step], by_hand(tx, step), rtol=0, atol=1e-6)
        np.testing.assert_allclose(linear_loss({"w": seen[step]}, data()), value, rtol=1e-6)
    np.testing.assert_array_equal(seen[8], result.state.params["w"])
    np.testing.assert_array_equal(seen[result.best_step], result.best_state.params["w"])
    assert result.best_step == 3
    support.assert_same_bits(result.history.steps, run(tx, steps=8).history.steps)


SHORT = {
    "diloco": (lambda axis: optperm.diloco(SGD, every=500, axis_name=axis), True),
    "agn": (lambda axis: optax.chain(SGD, optperm.agn(SGD, every=9, axis_name=axis)), True),
    "schedule": (
        lambda axis: optperm.agn(SGD, every=lambda commits: 9 + commits, axis_name=axis),
        True,
    ),
    "period of the run": (lambda axis: optperm.agn(SGD, every=8, axis_name=axis), False),
    "plan": (
        lambda axis: optperm.diloco(SGD, every=optperm.distributed.Every(9), axis_name=axis),
        False,
    ),
    "plan of the run": (
        lambda axis: optperm.diloco(SGD, every=optperm.distributed.Every(5), axis_name=axis),
        False,
    ),
}


@pytest.mark.parametrize("name", [*SHORT])
def test_a_period_longer_than_the_run_is_warned_of_before_the_first_step(name):
    """Warnings are errors here. A plan of exchanges is as the user wrote it."""
    make, is_short = SHORT[name]
    took = []
    for devices in (None, 2):
        tx = make(devices and "replica")
        options = {"devices": devices, "steps": 8, "every": {1: lambda e: took.append(e.step)}}
        if is_short:
            with pytest.raises(UserWarning, match=r"ends after 8 steps, before the first commit"):
                run(tx, **options)
            assert took == []
        else:
            run(tx, **options)


def test_a_run_of_unknown_length_without_a_commit_is_warned_of_at_its_end():
    # 4 steps an epoch
    for every, is_short in {500: True, 12: True, 8: False}.items():
        tx = optperm.agn(SGD, every=every, axis_name="replica")
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            result = run(tx, train_data=fitting.batches, epochs=2)
        says = [
            str(each.message) for each in found if "before the first commit" in str(each.message)
        ]
        assert says == is_short * [
            f"The run ends after {result.step} steps, before the first commit of agn or diloco: "
            "replicas train apart until its end. Lower every."
        ]


def test_a_run_of_batches_and_a_known_number_of_steps_is_warned_of_once():
    tx = optperm.agn(SGD, every=500, axis_name="replica")
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        run(tx, train_data=fitting.batches, steps=6)
    says = [str(each.message) for each in found if "before the first commit" in str(each.message)]
    assert len(says) == 1
    assert "ends after 6 steps" in says[0]


def test_a_run_that_was_over_before_it_resumed_is_not_warned_of_again(tmp_path):
    tx = optperm.agn(SGD, every=500, axis_name="replica")
    options = {"train_data": fitting.batches, "steps": 6, "checkpoints": tmp_path}
    with pytest.warns(UserWarning, match="before the first commit"):
        run(tx, **options)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        run(tx, **options, resume=True)
    assert not [each for each in found if "before the first commit" in str(each.message)]


@pytest.mark.parametrize("order", ["commits later", "commits earlier"])
def test_the_phase_that_is_running_decides_about_the_center(order):
    """The params are the mean of replicas that train apart, with a warning, never a center of no use."""
    diloco = optperm.diloco(SGD, every=2, axis_name="replica")
    tx = optperm.switch_after(1000, SGD, diloco)
    if order == "commits earlier":
        tx = optperm.switch_after(3, diloco, SGD)
    with pytest.warns(UserWarning, match="phase .* has no commits: fit returns the mean"):
        result = run(tx, steps=8)
    orders = [np.asarray(training.shuffled(0, epoch, EXAMPLES)) for epoch in (1, 2)]
    params = [begin(tx).params["w"]] * 2
    for step, hand in enumerate(np.concatenate(orders).reshape(-1, BATCH)[:8], 1):
        for i, part in enumerate(hand.reshape(2, -1)):
            batch = {key: leaf[part] for key, leaf in data().items()}
            params[i] = params[i] - 0.1 * jax.grad(linear_loss)({"w": params[i]}, batch)["w"]
        if order == "commits earlier" and step == 2:
            outer = optax.sgd(0.8, momentum=0.5, nesterov=True)
            center = begin(tx).params["w"]
            moves, _ = outer.update(center - sum(params) / 2, outer.init(center), center)
            params = [center + moves] * 2
    np.testing.assert_allclose(result.state.params["w"], sum(params) / 2, rtol=0, atol=1e-6)


def test_params_of_another_optimizer_are_not_stepped_by_the_last_commit():
    """Of a partition only one part commits; the other one has the steps of the run alone."""
    params = {"a": jnp.ones(3), "b": jnp.ones(3)}
    parts = {"a": optperm.diloco(SGD, every=5), "b": optax.adam(0.1)}
    tx = optax.partition(parts, {"a": "a", "b": "b"})
    state = training.TrainState.create(apply_fn=None, params=params, tx=tx)
    x = np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32)

    def loss_fn(params, batch):
        return jnp.mean((batch @ (params["a"] + params["b"]) - 1.0) ** 2)

    result = training.fit(state, loss_fn, x, steps=7, batch_size=8)
    opt_state, by_hand = tx.init(params), params
    order = np.asarray(training.shuffled(0, 1, 40)), np.asarray(training.shuffled(0, 2, 40))
    for hand in np.concatenate(order).reshape(-1, 8)[:7]:
        e = optperm.evaluate(loss_fn, by_hand, x[hand])
        updates, opt_state = tx.update(e.grad, opt_state, by_hand, **e.extra_args)
        by_hand = optperm.apply_updates(by_hand, updates, opt_state)
    trained = result.state.params
    np.testing.assert_allclose(trained["b"], by_hand["b"], rtol=1e-5)
    assert np.abs(trained["a"] - by_hand["a"]).max() > 1e-3  # an outer step with momentum
    assert int(find_state(result.state.opt_state, optax.ScaleByAdamState, method="adam").count) == 7


def test_multi_steps_around_diloco_loses_no_whole_steps():
    """A commit comes through once `MultiSteps` passes it on."""
    tx = optax.MultiSteps(
        optperm.diloco(SGD, optax.sgd(1.0), every=100), 2
    ).gradient_transformation()
    result = run(tx, devices=None, steps=8)
    alone = optax.MultiSteps(SGD, 2).gradient_transformation()
    same = run(alone, devices=None, steps=8)
    support.assert_close(result.state.params, same.state.params, atol=1e-6)
    assert int(result.state.opt_state.inner_opt_state.since_commit) == 0
