"""`fit` beside loops written by hand, its data, callbacks and errors."""

import dataclasses
import functools
import itertools
import sys
import threading
import time
import types
from typing import NamedTuple

import fitting
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import support
from fitting import BATCH, data
from flax import nnx
from flax.training import train_state

import optperm
from optperm import training


def test_fit_is_a_loop_written_by_hand_for_a_train_state():
    """Evaluation, update and model state spelled out, one jitted call a step."""
    name = "svrg"
    tx = fitting.method(name)
    result = fitting.fit("linen", name, epochs=2)
    start = fitting.linen_state(tx)
    params, opt_state, model_state = start.params, start.opt_state, start.model_state

    def bound(model_state, key):
        return lambda params, batch: fitting.linen_loss(
            params, batch, model_state=model_state, rng=key
        )

    @jax.jit
    def step(params, opt_state, model_state, count, batch):
        loss_fn = bound(model_state, jax.random.fold_in(start.rng, count))
        e = optperm.evaluate(loss_fn, params, batch, has_aux=True)
        update = optax.with_extra_args_support(tx).update
        updates, opt_state = update(e.grad, opt_state, params, **e.extra_args)
        return optperm.apply_updates(params, updates, opt_state), opt_state, e.aux, e.value

    loss_fn = bound(model_state, jax.random.fold_in(start.rng, 0))
    full_grad = optperm.variance.full_gradient(loss_fn, params, [data()], has_aux=True)
    opt_state = optperm.variance.take_snapshot(opt_state, params, full_grad)
    losses = []
    for count, batch in enumerate(fitting.all_batches(2)):
        params, opt_state, model_state, loss = step(params, opt_state, model_state, count, batch)
        losses.append(loss)
    np.testing.assert_array_equal(result.history.steps["loss"], np.stack(losses))
    state = result.state
    support.assert_same_bits(
        (state.params, state.opt_state, state.model_state), (params, opt_state, model_state)
    )
    # The state that was passed is left alone.
    support.assert_same_bits(start.params, fitting.variables()["params"])


@pytest.mark.slow
def test_fit_is_a_loop_written_by_hand_for_nnx():
    name = "sgperm"
    result = fitting.fit("nnx", name, epochs=2)
    model = fitting.NnxNet()
    optimizer = training.Optimizer(model, fitting.method(name), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, batch):
        e = optimizer.evaluate(model, fitting.nnx_loss, batch)
        optimizer.update(model, e.grad, **e.extra_args)
        return e.value

    losses = [step(model, optimizer, batch) for batch in fitting.all_batches(2)]
    np.testing.assert_array_equal(result.history.steps["loss"], np.stack(losses))
    by_hand = dataclasses.replace(result, model=model, optimizer=optimizer)
    support.assert_same_bits(fitting.arrays(result), fitting.arrays(by_hand))
    assert int(model.dropout.rngs.count.get_value()) == 10  # of the main evaluations alone
    assert np.all(result.history.steps["fraction_moved"] > 0)
    # Plain nnx.Optimizer does as well: extra arguments reach the method, and weights are placed.
    model = fitting.NnxNet()
    plain = nnx.Optimizer(model, fitting.method(name), wrt=nnx.Param)
    trained = training.fit(
        model, fitting.nnx_loss, data(), optimizer=plain, epochs=2, batch_size=BATCH
    )
    support.assert_same_bits(fitting.arrays(trained), fitting.arrays(result))


@pytest.mark.slow
def test_orders_follow_from_no_flag_of_jax():
    expected = [np.asarray(training.shuffled(3, 2, 101, replace)) for replace in (False, True)]
    flags = [jax.enable_x64(True), jax.threefry_partitionable(False)]
    for flag in [*flags, jax.default_prng_impl("rbg")]:
        with flag:
            orders = [training.shuffled(3, 2, 101, replace) for replace in (False, True)]
        for order, wanted in zip(orders, expected, strict=True):
            assert order.dtype == jnp.int32
            np.testing.assert_array_equal(order, wanted)


def test_orders_follow_from_their_seed_and_epoch():
    """None of them is what the plain key of the seed gives; draws are with replacement."""
    keys = [jax.random.fold_in(jax.random.key(0), epoch) for epoch in (1, 2)]
    orders = [jax.random.permutation(key, 100) for key in keys]
    for replace in (False, True):
        mine = [training.shuffled(s, epoch, 100, replace) for s in (0, 1) for epoch in (1, 2)]
        orders += mine
        for order in mine:  # of draws about 1 - 1/e are distinct
            count = len(set(order.tolist()))
            assert 50 < count < 77 if replace else count == 100
    assert len({tuple(order.tolist()) for order in orders}) == 10


@pytest.mark.parametrize("name", ["adam", "sgld", "sghmc", "constant_sgd"])
def test_order_of_a_sampler_is_drawn_with_replacement_from_the_seed(name):
    tx = {
        "adam": optax.adam(0.1),
        "constant_sgd": optperm.mandt_sgd(40, BATCH, max_step=0.1),
        "sgld": optperm.sgld(1e-3, num_data=40),
        "sghmc": optperm.sghmc(1e-3, num_data=40, friction=0.1),
    }[name]
    state = training.TrainState.create(apply_fn=None, params={"w": jnp.ones(3)}, tx=tx)
    x = np.arange(40, dtype=np.float32)

    def loss_fn(params, batch):
        return jnp.mean(batch) + 0.0 * jnp.sum(params["w"] ** 2)

    result = training.fit(state, loss_fn, x, epochs=2, batch_size=BATCH, key=7)
    orders = [training.shuffled(7, epoch, 40, replace=name != "adam") for epoch in (1, 2)]
    expected = x[np.concatenate(orders)].reshape(-1, BATCH).mean(axis=1)
    np.testing.assert_allclose(result.history.steps["loss"], expected, rtol=1e-6)


def test_each_replica_draws_from_a_key_of_its_own_in_each_step():
    state = training.TrainState.create(
        apply_fn=None, params={}, tx=optax.sgd(0.1), rng=jax.random.key(2)
    )

    def draw(step, _):
        return jax.random.key_data(state.replace(step=step).step_rng("replica"))

    of_replicas = jax.vmap(draw, in_axes=(None, 0), axis_name="replica")
    drawn = jax.vmap(of_replicas, in_axes=(0, None))(jnp.arange(3), jnp.arange(4))
    assert len(np.unique(drawn.reshape(12, 2), axis=0)) == 12


def test_trials_of_a_step_see_its_model_state_and_key_and_leave_no_trace():
    """A method that evaluates at other params; the loss depends on the model state and on the key."""

    def loss_fn(params, batch, *, model_state, rng):
        """The model state says at which params and with which key it was computed."""
        noise = jax.random.normal(rng)
        loss = jnp.mean(batch @ params["w"]) + jnp.sum(model_state["w"]) + noise
        return loss, {"w": params["w"], "noise": noise}

    def update(updates, state, params=None, *, value, value_fn, grad_fn, **_):
        elsewhere = optax.tree.scale(2.0, params)
        grads = grad_fn(elsewhere)
        # At the same params the same value, to the last bit: the same key and model state.
        trace = {"same": value_fn(params) == value, "other": value_fn(elsewhere) != value}
        return jax.tree.map(lambda g: -0.1 * g, grads), trace

    tx = optax.GradientTransformationExtraArgs(
        lambda params: {"same": jnp.array(False), "other": jnp.array(False)}, update
    )
    state = training.TrainState.create(
        apply_fn=None,
        params={"w": jnp.arange(3.0)},
        tx=tx,
        model_state={"w": jnp.zeros(3), "noise": jnp.float32(0.0)},
        rng=jax.random.key(2),
    )
    seen, note = [state], {1: lambda event: seen.append(event.state)}
    x = np.ones((8, 3), np.float32)
    training.fit(state, loss_fn, x, epochs=1, batch_size=4, every=note)
    assert len(seen) == 3
    for before, after in itertools.pairwise(seen):
        assert after.opt_state["same"]
        assert after.opt_state["other"]
        support.assert_same_bits(after.model_state["w"], before.params["w"])
    assert seen[1].model_state["noise"] != seen[2].model_state["noise"]


def test_replicas_of_local_steps_part_and_meet():
    """What comes out is the center after a commit, and the mean of the batch statistics."""
    with fitting.runs() as made:
        result = fitting.fit("linen", "agn", steps=5, devices=4)
    carry = made[0].carry
    kernels = np.asarray(carry.params["Dense_0"]["kernel"])
    assert np.all(np.ptp(kernels, axis=0).max() > 0)
    assert carry.opt_state.since_commit.tolist() == [2] * 4  # the commit was made on a copy
    before = optperm.distributed.center_params(carry.opt_state)["Dense_0"]["kernel"][2]
    center = optperm.distributed.center_params(result.state.opt_state, final=True)
    support.assert_same_bits(result.state.params, center)
    assert np.any(before != center["Dense_0"]["kernel"])
    each = np.asarray(carry.model_state["batch_stats"]["BatchNorm_0"]["mean"])
    mean = result.state.model_state["batch_stats"]["BatchNorm_0"]["mean"]
    assert np.ptp(each, axis=0).max() > 0
    np.testing.assert_allclose(mean, each.mean(axis=0), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("axis_name", "options", "says"),
    [
        (None, {}, "pass axis_name='replica' to the method and to fit"),
        (None, {"axis_name": "replica"}, "pass axis_name='replica' to the method as"),
        ("replica", {}, "pass axis_name='replica' to the method and to fit"),
        ("replica", {"mesh": None}, "is not bound here.*in fit: pass axis_name='replica'"),
        ("other", {"axis_name": "replica"}, "in fit: pass axis_name='other'"),
        ("other", {"axis_name": "other"}, "mesh, whose axes are 'replica'"),
    ],
)
def test_axis_that_fit_or_the_method_lacks_is_named(axis_name, options, says):
    """Without it replicas of local steps would never commit."""
    state = fitting.linen_state(fitting.method("agn", axis_name))
    options = {**fitting.on(4), **options}
    with pytest.raises(ValueError, match=says):
        training.fit(state, fitting.linen_loss, data(), epochs=1, batch_size=BATCH, **options)


def test_processes_with_different_numbers_of_devices_are_refused(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    found = [types.SimpleNamespace(process_index=index) for index in (0, 1, 1)]
    monkeypatch.setattr(jax, "devices", lambda: found)
    with pytest.raises(ValueError, match=r"The processes have \[1, 2\] devices"):
        fitting.linear_fit(epochs=1)


def test_callbacks_of_epochs_see_the_model_and_can_stop():
    """Another model than the one that is trained, and as far."""
    epochs = []
    result = fitting.fit(
        "nnx", "adam", epochs=9, on_epoch_end=lambda event: epochs.append(event) or event.epoch == 2
    )
    assert (result.ended, result.step, result.epoch) == ("stopped", 10, 2)
    at_end = epochs[-1].state
    models = [nnx.state(model, nnx.Not(nnx.RngKey)) for model in (at_end, result.model)]
    support.assert_same_bits(*map(nnx.to_pure_dict, models))
    assert at_end is not result.model
    mean = result.history.steps["loss"][5:].mean()
    np.testing.assert_allclose(epochs[1].metrics["loss"], mean, rtol=1e-6)


@pytest.mark.slow
def test_fit_trains_beside_the_main_thread():
    """Where Python delivers no signals."""
    results = []

    def run():
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            results.append(fitting.fit("linen", "adam", epochs=1))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert results[0].step == 5


def test_evaluation_is_the_mean_over_all_examples():
    """In batches that do not divide them; from arrays, batches and a function of the epoch."""
    parts = [jax.tree.map(lambda leaf, i=i: leaf[i], data()) for i in (slice(17), slice(17, None))]
    for source, size in [(data(), 17), (parts, None), (lambda epoch: iter(parts), None)]:
        options = {"eval_fn": fitting.linen_accuracy, "eval_data": source, "eval_batch_size": size}
        result = fitting.fit("linen", "adam", epochs=1, **options)
        stats = {"model_state": result.state.model_state}
        exact = fitting.linen_accuracy(result.state.params, data(), **stats)["accuracy"]
        np.testing.assert_allclose(result.history.last["eval_accuracy"], exact, rtol=1e-6)


def test_model_is_evaluated_in_eval_mode_and_trained_in_its_own():
    """Dropout is off and BatchNorm takes its running statistics, in the evaluation alone."""
    seen = []

    def loss_fn(model, batch):
        seen.append((model.dropout.deterministic, model.norm.use_running_average))
        return fitting.nnx_loss(model, batch)

    def eval_fn(model, batch):
        return {"loss": fitting.nnx_loss(model, batch)}

    shifted = {"x": data()["x"] * 3 + 1, "y": data()["y"]}
    model = fitting.NnxNet()
    model.dropout.deterministic = True  # a model of mixed modes is trained in these
    optimizer = training.Optimizer(model, fitting.method("adam"), wrt=nnx.Param)
    options = {"eval_fn": eval_fn, "eval_data": shifted, "eval_batch_size": 40}
    result = training.fit(
        model, loss_fn, data(), optimizer=optimizer, epochs=2, batch_size=BATCH, **options
    )
    assert set(seen) == {(True, False)}
    assert (model.dropout.deterministic, model.norm.use_running_average) == (True, False)
    model.eval()
    exact = fitting.nnx_loss(model, shifted)
    np.testing.assert_allclose(result.history.last["eval_loss"], exact, rtol=1e-5)


def test_a_model_without_modes_is_evaluated():
    model = nnx.Linear(fitting.FEATURES, fitting.CLASSES, rngs=nnx.Rngs(0))
    optimizer = training.Optimizer(model, fitting.method("adam"), wrt=nnx.Param)

    def loss_fn(model, batch):
        return fitting.cross_entropy(model(batch["x"]), batch["y"])

    options = {"eval_fn": lambda *of: {"loss": loss_fn(*of)}, "eval_data": data()}
    result = training.fit(
        model, loss_fn, data(), optimizer=optimizer, epochs=1, batch_size=BATCH, **options
    )
    exact = loss_fn(model, data())
    np.testing.assert_allclose(result.history.last["eval_loss"], exact, rtol=1e-5)


def test_a_function_of_an_nnx_model_may_have_arguments_that_it_does_well_without():
    def loss_fn(model, batch, rng=None):
        assert rng is None
        return fitting.nnx_loss(model, batch)

    model = fitting.NnxNet()
    optimizer = training.Optimizer(model, fitting.method("adam"), wrt=nnx.Param)
    result = training.fit(model, loss_fn, data(), optimizer=optimizer, epochs=1, batch_size=BATCH)
    same = fitting.fit("nnx", "adam", epochs=1)
    np.testing.assert_array_equal(result.history.steps["loss"], same.history.steps["loss"])


def test_progress_bar_shows_steps(capsys):
    fitting.fit("linen", "adam", epochs=1, progress=True)
    assert "5/5" in capsys.readouterr().out


def test_missing_extra_is_named(monkeypatch, tmp_path):
    calls = {
        "orbax": lambda: fitting.fit("linen", "adam", epochs=1, checkpoints=tmp_path),
        "rich": lambda: fitting.fit("linen", "adam", epochs=1, progress=True),
    }
    for module in ("rich.progress", "orbax.checkpoint"):
        monkeypatch.setitem(sys.modules, module, None)
    for name, call in calls.items():
        what = r"pip install 'optperm\[(training|progress)\]'"
        with pytest.raises(ImportError, match=f"needs {name}.*{what}"):
            call()


EMPTY = {"x": np.zeros((0, 5), np.float32), "y": np.zeros(0, np.int32)}
RAGGED = {"x": np.zeros((4, 5), np.float32), "y": np.zeros(3, np.int32)}


def test_sampler_of_another_number_of_examples_is_refused():
    tx = optax.chain(optax.clip(1.0), optperm.constant_sgd(1000, BATCH, burn_in=4))
    with pytest.raises(ValueError, match=r"^The optimizer has num_data=1000, .* has 40 examples"):
        fitting.linear_fit(tx=tx, epochs=1)


# What is wrong with one argument, or with two together, and what the error says.
REFUSED = [
    ({"epochs": None}, ValueError, "Pass epochs or steps"),
    ({"epochs": 0}, ValueError, "epochs must be at least 1, got 0"),
    ({"steps": 2.0}, TypeError, "steps must be an integer"),
    ({"batch_size": 41}, ValueError, "batch_size must be at most 40, got 41"),
    ({"batch_size": None}, TypeError, "batch_size must be an integer, got None"),
    ({"batch_size": 6, **fitting.on(4)}, ValueError, "a multiple of 4, got 6"),
    ({"key": -1}, ValueError, "key must be at least 0"),
    ({"train_data": EMPTY}, ValueError, "contains no examples"),
    ({"train_data": RAGGED}, ValueError, "agree in their leading"),
    ({"train_data": "x"}, TypeError, "an iterable of batches, .* got str"),
    ({"train_data": {"x": [1]}}, TypeError, "got dict"),
    (
        {"train_data": {"x": np.array(["a"])}},
        TypeError,
        r"train_data\['x'\] must be an array of num",
    ),
    ({"train_data": [data()]}, ValueError, "batch_size is for arrays"),
    ({"has_aux": True}, TypeError, "must return .loss, model_state, aux., got a tuple"),
    ({"eval_fn": len}, ValueError, "eval_fn needs eval_data"),
    ({"eval_data": data()}, ValueError, "eval_data needs eval_fn"),
    ({"eval_fn": len, "eval_data": iter([])}, TypeError, "eval_data is an iterator.* only once"),
    ({"checkpoint_every": 3}, ValueError, "needs checkpoints"),
    ({"checkpoints": "a[1]"}, ValueError, r"folder without \*, \?, \[ or \], got a"),
    ({"checkpoints": "a", "resume": "yes"}, TypeError, "must be an integer, got 'yes'"),
    ({"optimizer": 3}, ValueError, "a TrainState has its own"),
    ({"mesh": 3}, TypeError, "mesh must be a Mesh"),
    ({"every": {0: print}}, ValueError, r"every\[0\] must be at least 1"),
    ({"every": {6: 3}}, TypeError, r"every\[6\] must be a function .*, or a list .*, got 3"),
    ({"on_epoch_end": lambda _: 3}, TypeError, "must return True to stop"),
    ({"epoch_start": 3}, TypeError, "callable"),
    ({"keep_best": ("loss", "most")}, ValueError, "must be one of 'min', 'max'"),
    ({"on_signal": "ignore"}, ValueError, "on_signal must be one of 'raise', 'return'"),
    ({"validation_data": 1}, TypeError, "Pass eval_data, and eval_fn"),
    ({"batchsize": 1}, TypeError, r"Did you mean batch_size\?"),
    ({"qqq": 1}, TypeError, "unexpected keyword argument 'qqq'.$"),
]
# The same of a stream, which has no batch_size.
REFUSED_STREAMS = [
    ({"train_data": []}, ValueError, "gives no batch in epoch 1"),
    ({"train_data": [data(), EMPTY]}, ValueError, "A batch of .* no examples"),
    ({"train_data": lambda: []}, TypeError, r"lambda epoch: \.\.\., got function"),
    ({"train_data": fitting.all_batches(1), "epochs": 2}, ValueError, "only once"),
    ({"train_data": iter([]), "epoch_start": print}, ValueError, "an iterator is read once"),
]


@pytest.mark.parametrize(
    ("changed", "error", "says"),
    [*REFUSED, *(({"batch_size": None, **each}, *rest) for each, *rest in REFUSED_STREAMS)],
)
def test_bad_argument_is_named(changed, error, says):
    options = {"train_data": data(), "epochs": 1, "batch_size": BATCH, **changed}
    state = fitting.linen_state(fitting.method("adam"))
    with pytest.raises(error, match=says):
        training.fit(state, fitting.linen_loss, **options)


def test_what_is_no_model_or_no_transformation_is_named():
    params, tx = {"w": jnp.ones(3)}, fitting.method("adam")
    plain = train_state.TrainState.create(apply_fn=None, params=params, tx=tx)
    for model, says in [
        (plain, r"optperm.training.TrainState.create\(.*flax.training.train_state"),
        (fitting.NnxNet(), "and its optimizer, got .*NnxNet.* and .*NoneType"),
    ]:
        with pytest.raises(TypeError, match=says):
            training.fit(model, lambda p, b: 0.0, data(), epochs=1, batch_size=8)
    with pytest.raises(TypeError, match=r"which MultiSteps\(\.\.\.\)\.gradient_transformation"):
        fitting.linear_fit(tx=optax.MultiSteps(tx, 2), epochs=1)


def constant(params, batch):
    return jnp.sum(params["w"])


@pytest.mark.parametrize(
    ("loss_fn", "error", "says"),
    [
        (lambda params, batch: params["w"], TypeError, "a real scalar"),
        (lambda params, batch, *, rng: 0.0, ValueError, "pass rng=jax.random.key"),
        (lambda *of, model_state: 0.0, TypeError, "must return .loss, model_state."),
        (lambda *of, model_state: (constant(*of), {"a": 1.0}), ValueError, "different tree struct"),
    ],
)
def test_loss_function_that_returns_something_else_is_refused(loss_fn, error, says):
    with pytest.raises(error, match=says):
        fitting.linear_fit(loss_fn, epochs=1)


@pytest.mark.parametrize(
    ("aux", "error", "says"),
    [
        (3.0, TypeError, "must be a dict of scalar metrics"),
        ({"logits": jnp.ones(3)}, TypeError, "must be a dict of scalar metrics"),
        ({"step": 9.0}, ValueError, "a metric named 'step'; .* are reserved"),
        ({"eval_loss": 9.0}, ValueError, "a metric named 'eval_loss'; .* are reserved"),
    ],
)
def test_aux_that_is_no_metric_is_refused(aux, error, says):
    with pytest.raises(error, match=says):
        fitting.linear_fit(lambda *of: (constant(*of), aux), epochs=1, has_aux=True)


def test_sam_gets_the_arguments_that_it_takes():
    """Of the extra arguments only `grad_fn`."""
    params, batch = {"w": jnp.ones((fitting.FEATURES, fitting.CLASSES))}, data()
    sam = optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.01), sync_period=2)
    result = fitting.linear_fit(tx=sam, train_data=[batch] * 6, epochs=1)
    opt_state = sam.init(params)
    for _ in range(6):
        grads = jax.grad(fitting.linear_loss)(params, batch)
        updates, opt_state = sam.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
    np.testing.assert_allclose(result.state.params["w"], params["w"], rtol=1e-5)


def test_seconds_are_those_of_the_steps_and_not_of_their_dispatch():
    """From the end of one short epoch to that of the next there is hardly anything else."""

    def loss_fn(params, batch):
        w = jax.lax.stop_gradient(params["w"])
        worked = jax.lax.fori_loop(0, 25, lambda _, x: jnp.sin(x @ x), jnp.full((300, 300), w))
        return params["w"] * batch.mean() + worked.mean()

    params = {"w": jnp.float32(1.0)}
    state = training.TrainState.create(apply_fn=None, params=params, tx=optax.sgd(0.1))
    ends, note = [], {"on_epoch_end": lambda _: ends.append(time.monotonic())}
    result = training.fit(state, loss_fn, jnp.ones(4), epochs=3, batch_size=2, **note)
    seconds = result.history.epochs["seconds"][1:]
    assert np.all(seconds > 0.5 * np.diff(ends))
    assert np.all(seconds < 1.1 * np.diff(ends))


def test_svrg_without_snapshots_is_warned_of_once():
    tx = optax.chain(optperm.svrg(), optax.sgd(0.05))
    with pytest.warns(UserWarning, match="epoch_start=optperm.variance.take_snapshot") as caught:
        fitting.linear_fit(tx=tx, epochs=3)
    assert len(caught) == 1
    # A schedule may begin later; warnings are errors here.
    later = lambda epoch: optperm.variance.take_snapshot if epoch > 1 else None  # noqa: E731
    fitting.linear_fit(tx=tx, epochs=1, epoch_start=later)


class Complaint(NamedTuple):
    """A state that complains before the first step, and of each second count."""

    count: jax.Array

    def warnings(self, params):
        assert params.keys() == {"w"}
        return ["before"] if not self.count else ["often", f"after {int(self.count)}"]


def test_each_warning_of_a_state_is_given_once_before_the_first_step_or_after_a_row(recwarn):
    tx = optax.GradientTransformation(
        lambda params: Complaint(jnp.int32(0)),
        lambda updates, state, params=None: (updates, Complaint(state.count + 1)),
    )
    took = []
    tx = optax.chain(tx, optax.sgd(0.1))
    fitting.linear_fit(tx=tx, epochs=3, every={1: lambda e: took.append(len(recwarn))})
    said = [(str(each.message), each.filename) for each in recwarn]
    here = fitting.__file__
    assert said == [(text, here) for text in ("before", "often", "after 5", "after 10", "after 15")]
    assert took[:5] == [1] * 4 + [3]  # the row comes before the functions of its step
    phases = optperm.switch_after(1000, optax.sgd(0.1), tx)
    fitting.linear_fit(tx=phases, epochs=1)
    assert len(recwarn) == len(said)


@pytest.mark.slow
def test_devices_that_stay_idle_are_warned_of_unless_a_device_is_chosen(monkeypatch):
    state = training.TrainState.create(
        apply_fn=None, params={"w": jnp.ones((fitting.FEATURES, 3))}, tx=optax.sgd(0.1)
    )
    run = functools.partial(
        training.fit, loss_fn=fitting.linear_loss, train_data=data(), steps=1, batch_size=BATCH
    )
    jax.config.update("jax_default_device", None)
    with pytest.warns(
        UserWarning, match=r"7 of 8 devices stay idle: pass mesh=jax.make_mesh"
    ) as caught:
        run(state)
    assert [each.filename for each in caught] == [__file__]
    # Warnings are errors here.
    run(jax.device_put(state, jax.devices()[1]))
    run(state, **fitting.on(1))
    with jax.default_device(jax.devices()[1]):
        run(state)


def test_loss_that_is_not_finite_at_the_end_is_warned_of_with_its_first_step():
    """Once, with the step at which it began, also where a run goes on; a NaN that passes is none."""
    x = np.ones((10, 2), np.float32)
    x[7:] = np.nan
    batches = list(x[:, None])
    state = training.TrainState.create(apply_fn=None, params=jnp.ones(2), tx=optax.sgd(0.1))

    def loss_fn(w, batch):
        return jnp.mean((batch @ w) ** 2)

    with pytest.warns(RuntimeWarning, match="finite at step 8 of 10") as caught:
        result = training.fit(state, loss_fn, batches, epochs=1)
    assert (len(caught), caught[0].filename, result.ended) == (1, __file__, "finished")
    state = state.replace(tx=optax.apply_if_finite(optax.sgd(0.1), 9))
    state = state.replace(opt_state=state.tx.init(state.params))
    training.fit(state, loss_fn, batches[::-1], epochs=1)  # warnings are errors here


def test_keep_best_of_a_metric_that_is_never_finite_is_warned_of():
    options = {"eval_fn": lambda params, batch: {"loss": jnp.nan * jnp.sum(params["w"])}}
    with pytest.warns(
        RuntimeWarning, match="eval_loss was never finite, so keep_best has stored no"
    ):
        fitting.linear_fit(epochs=1, eval_data=data(), keep_best="eval_loss", **options)


def test_no_batch_of_an_iterator_is_taken_that_is_not_trained_on():
    """What is left stays in it for the next run."""
    taken = []

    def endless():
        for count, batch in enumerate(fitting.all_batches(10), 1):
            taken.append(count)
            yield batch

    batches = endless()
    first = fitting.linear_fit(train_data=batches, steps=9)
    assert taken == [*range(1, 10)]
    second = training.fit(first.state, fitting.linear_loss, batches, steps=11)
    assert taken == [*range(1, 21)]
    whole = fitting.linear_fit(train_data=endless(), steps=20)
    support.assert_same_bits(second.state.params, whole.state.params)


@pytest.mark.slow
def test_epoch_start_that_is_the_change_itself_is_made_in_each_epoch():
    tx = fitting.method("svrg")
    change = fitting.linear_fit(tx=tx, epochs=3, epoch_start=optperm.variance.take_snapshot)
    by_epoch = fitting.linear_fit(
        tx=tx, epochs=3, epoch_start=lambda epoch: optperm.variance.take_snapshot
    )
    support.assert_same_bits(change.state.params, by_epoch.state.params)
    never = fitting.linear_fit(tx=tx, epochs=3, epoch_start=lambda epoch: None)
    assert np.any(never.state.params["w"] != change.state.params["w"])


def test_later_run_sees_the_present_values_that_its_functions_read():
    """Of the loss, of the evaluation and of the change before an epoch, which are the same objects."""
    scale = {"value": 1.0}

    def loss_fn(params, batch):
        return scale["value"] * fitting.linear_loss(params, batch)

    def eval_fn(params, batch):
        return {"loss": loss_fn(params, batch)}

    def change(opt_state, params, full_gradient):
        return jax.tree.map(lambda leaf: leaf + scale["value"].astype(leaf.dtype), opt_state)

    tx, found = optax.sgd(0.1, momentum=0.9), []
    for value in (1.0, 2.0, 1.0):
        scale["value"] = np.float32(value)
        options = {"epoch_start": change, "eval_fn": eval_fn, "eval_data": data(), "epochs": 1}
        found.append(fitting.linear_fit(loss_fn, tx=tx, **options))
    first, other, again = (each.history for each in found)
    np.testing.assert_allclose(other.steps["loss"][0], 2 * first.steps["loss"][0], rtol=1e-6)
    support.assert_same_bits(first.steps, again.steps)
    assert first.epochs["eval_loss"] == again.epochs["eval_loss"] != other.epochs["eval_loss"]
    params = found[1].state.params
    np.testing.assert_allclose(other.epochs["eval_loss"], eval_fn(params, data())["loss"] * 2)
    moments = [optax.tree.get(each.state.opt_state, "trace")["w"] for each in found]
    assert np.any(moments[0] != moments[1])
