"""`fit` beside loops written by hand, its data, callbacks and errors."""

import dataclasses
import functools
import sys
import threading
import time
from typing import NamedTuple

import fitting
import flax.linen as nn
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


class Recorder(nn.Module):
    """A model whose batch statistics say at which params and with which key they were computed."""

    @nn.compact
    def __call__(self, x):
        w = self.param("w", nn.initializers.normal(), x.shape[-1:])
        seen = self.variable("seen", "w", jnp.zeros, w.shape)
        key = self.variable("seen", "key", jnp.zeros, (), jnp.uint32)
        before = seen.value
        seen.value, key.value = w, jax.random.bits(self.make_rng("dropout"))
        return x @ w + jnp.sum(before) + jax.random.normal(self.make_rng("dropout"))


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
def test_the_order_follows_from_the_seed_and_is_drawn_anew_for_samplers(name):
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


@pytest.mark.chains
def test_a_sampler_samples_the_posterior_from_arrays():
    """The means of normal examples, whose posterior is known, and of 64 of them the mean variance.

    The features are orthogonal, so a diagonal preconditioner is right. With shuffled batches the
    variance is 0.42 of what it has to be.
    """
    examples, batch_size, burnt, steps = 96, 4, 2200, 5000
    x = np.random.default_rng(0).normal(size=(examples, 64))
    x = (np.sqrt(examples) * np.linalg.qr(x - x.mean(axis=0))[0]).astype(np.float32)
    burn_in = {"burn_in": 200, "freeze_after": burnt, "burn_in_optimizer": optax.sgd(0.1)}
    sampler = optperm.constant_sgd(examples, batch_size, preconditioner="diagonal", **burn_in)
    state = training.TrainState.create(
        apply_fn=None,
        params={"w": jnp.asarray(x.mean(axis=0))},
        tx=optax.chain(optperm.record_trajectory(1, steps), sampler),
    )

    def loss_fn(params, batch):
        return 0.5 * jnp.mean(jnp.sum((params["w"] - batch) ** 2, axis=-1))

    result = training.fit(state, loss_fn, x, steps=steps, batch_size=batch_size)
    draws = optperm.subspace.trajectory(result.state.opt_state)[0]["w"][burnt:]
    assert examples * np.mean((draws - x.mean(axis=0)) ** 2) == pytest.approx(1.0, abs=0.05)


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
    model, x = Recorder(), jnp.ones((4, 3))
    variables = model.init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, x)

    def loss_fn(params, batch, *, model_state, rng):
        out, model_state = model.apply(
            {"params": params, **model_state}, batch, mutable=["seen"], rngs={"dropout": rng}
        )
        return jnp.mean(out), model_state

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
        apply_fn=model.apply,
        params=variables["params"],
        tx=tx,
        model_state={"seen": variables["seen"]},
        rng=jax.random.key(2),
    )
    seen = []
    training.fit(
        state,
        loss_fn,
        np.ones((8, 3), np.float32),
        epochs=1,
        batch_size=4,
        every={1: lambda event: seen.append(event.state)},
    )
    assert len(seen) == 2
    for before, after in zip([state, seen[0]], seen, strict=True):
        assert after.opt_state["same"]
        assert after.opt_state["other"]
        support.assert_same_bits(after.model_state["seen"]["w"], before.params["w"])
    assert seen[0].model_state["seen"]["key"] != seen[1].model_state["seen"]["key"]


def test_a_basis_is_spread_over_devices():
    """Four devices take the steps of one, whose batch they share; each holds its rows of the basis."""

    def run(**options):
        axis_name = options.get("axis_name")
        tx = optperm.dldr(
            optax.sgd(0.5),
            optperm.project(optax.sgd(0.5), n_components=2, axis_name=axis_name),
            every=1,
            num_snapshots=4,
        )
        params = {"w": jnp.ones((fitting.FEATURES, 3))}
        start = {"opt_state": None} if axis_name else {}
        state = training.TrainState.create(apply_fn=None, params=params, tx=tx, **start)
        options = {"epochs": 2, "batch_size": BATCH, "has_aux": True, **options}
        return training.fit(state, loss_fn, data(), **options)

    def loss_fn(params, batch):
        logits = batch["x"] @ params["w"]
        return fitting.cross_entropy(logits, batch["y"]), fitting.accuracy(logits, batch["y"])

    with fitting.runs() as made:
        alone, other = run(), run(**fitting.on(4, mapped=True))
    for name in ("loss", "accuracy"):
        columns = other.history.steps[name], alone.history.steps[name]
        np.testing.assert_allclose(*columns, rtol=1e-3, atol=1e-5)
    assert made[1].carry.opt_state.second.subspace.rows["w"].shape[:2] == (4, 1)


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
    for axis_name, options, says in [
        (None, fitting.on(4), "never commit: pass axis_name='replica' to the method and to fit"),
        (
            None,
            fitting.on(4, mapped=True),
            "never commit: pass axis_name='replica' to the method as",
        ),
        (
            "replica",
            fitting.on(4),
            "never commit: pass axis_name='replica' to the method and to fit",
        ),
        ("replica", {}, "is not bound here.*in fit: pass axis_name='replica'"),
        ("other", fitting.on(4, mapped=True), "in fit: pass axis_name='other'"),
        ("other", {**fitting.on(4), "axis_name": "other"}, "mesh, whose axes are 'replica'"),
    ]:
        state = fitting.linen_state(fitting.method("agn", axis_name))
        with pytest.raises(ValueError, match=says):
            training.fit(state, fitting.linen_loss, data(), epochs=1, batch_size=BATCH, **options)


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


def test_a_model_is_evaluated_in_eval_mode_and_trained_in_its_own():
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


@pytest.mark.exhaustive
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


def test_a_progress_bar_shows_steps(capsys):
    fitting.fit("linen", "adam", epochs=1, progress=True)
    assert "5/5" in capsys.readouterr().out


def test_a_missing_extra_is_named(monkeypatch, tmp_path):
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


@pytest.mark.parametrize("wrap", [lambda tx: tx, lambda tx: optax.chain(optax.clip(1.0), tx)])
def test_a_sampler_of_another_number_of_examples_is_refused(wrap):
    x, params = np.zeros((64, 3), np.float32), {"w": jnp.zeros(3)}

    def loss_fn(params, batch):
        return jnp.mean((params["w"] - batch) ** 2)

    tx = wrap(optperm.constant_sgd(1000, 16, burn_in=4))
    state = training.TrainState.create(apply_fn=None, params=params, tx=tx)
    with pytest.raises(ValueError, match=r"^The optimizer has num_data=1000, .* has 64 examples"):
        training.fit(state, loss_fn, x, batch_size=16, epochs=1)


def test_bad_arguments_are_named():
    cases = [
        ({}, ValueError, "Pass epochs or steps"),
        ({"epochs": 0}, ValueError, "epochs must be at least 1, got 0"),
        ({"epochs": True}, TypeError, "epochs must be an integer, got True"),
        ({"steps": 2.0}, TypeError, "steps must be an integer"),
        ({"epochs": 1, "train_data": EMPTY, "batch_size": 1}, ValueError, "holds no examples"),
        (
            {"epochs": 1, "train_data": RAGGED, "batch_size": 1},
            ValueError,
            "agree in their leading",
        ),
        ({"epochs": 1, "batch_size": 41}, ValueError, "batch_size must be at most 40, got 41"),
        ({"epochs": 1, "batch_size": None}, TypeError, "batch_size must be an integer, got None"),
        ({"epochs": 1, "batch_size": 6, **fitting.on(4)}, ValueError, "a multiple of 4, got 6"),
        ({"epochs": 1, "train_data": 3}, TypeError, "an iterable of batches, .* got int"),
        ({"epochs": 1, "train_data": "x"}, TypeError, "got str"),
        (
            {"epochs": 1, "train_data": {"x": np.array(["a"])}},
            TypeError,
            r"train_data\['x'\] must be an array of numbers",
        ),
        (
            {"epochs": 1, "train_data": [{"x": np.array(["a"])}]},
            TypeError,
            r"A batch of train_data\['x'\] must be an array of numbers",
        ),
        ({"epochs": 1, "train_data": {"x": [1]}}, TypeError, "got dict"),
        ({"epochs": 1, "train_data": []}, ValueError, "gives no batch in epoch 1"),
        ({"epochs": 2, "train_data": fitting.all_batches(1)}, ValueError, "only once"),
        ({"epochs": 1, "train_data": lambda: []}, TypeError, r"lambda epoch: \.\.\., got function"),
        ({"epochs": 1, "train_data": [], "batch_size": 2}, ValueError, "batch_size is for arrays"),
        ({"epochs": 1, "key": -1}, ValueError, "key must be at least 0"),
        (
            {"epochs": 1, "has_aux": True},
            TypeError,
            "must return .loss, model_state, aux., got a tuple",
        ),
        ({"epochs": 1, "eval_fn": len}, ValueError, "pass eval_data"),
        ({"epochs": 1, "eval_data": data()}, ValueError, "pass eval_fn"),
        ({"epochs": 1, "on_epoch_end": lambda _: 3}, TypeError, "must return True to stop"),
        ({"epochs": 1, "checkpoint_every": 3}, ValueError, "goes with checkpoints"),
        ({"epochs": 1, "resume": True}, ValueError, "goes with checkpoints"),
        (
            {"epochs": 1, "resume": "yes", "checkpoints": "a"},
            TypeError,
            "resume, unless True or False, must be an integer, got 'yes'",
        ),
        ({"epochs": 1, "checkpoints": "a[1]"}, ValueError, r"without \*, \?, \[ and \], got a"),
        ({"epochs": 1, "checkpoints": 3}, training.CheckpointError, "cannot write .* to 3"),
        ({"epochs": 1, "optimizer": 3}, ValueError, "a TrainState has its own"),
        ({"epochs": 1, "devices": 2}, TypeError, "'devices'. Pass mesh=jax.make_mesh"),
        ({"epochs": 1, "mesh": 3}, TypeError, "mesh must be a Mesh"),
        ({"epochs": 1, "every": {0: print}}, ValueError, r"every\[0\] must be at least 1"),
        ({"epochs": 1, "every": {6: 3}}, TypeError, r"every\[6\] must be functions .*, got 3"),
        ({"epochs": 1, "on_epoch_end": [print, 3]}, TypeError, "on_epoch_end must be functions"),
        ({"epochs": 1, "train_data": [data(), EMPTY]}, ValueError, "A batch of .* no examples"),
        ({"epochs": 1, "epoch_start": 3}, TypeError, "callable"),
        ({"epochs": 1, "keep_best": ("loss", "most")}, ValueError, "must be one of 'min', 'max'"),
    ]
    state = fitting.linen_state(fitting.method("adam"))
    for case, error, says in cases:
        options = {"train_data": data(), **case}
        train_data = options.pop("train_data")
        if train_data is data():
            options.setdefault("batch_size", BATCH)
        with pytest.raises(error, match=says):
            training.fit(state, fitting.linen_loss, train_data, **options)


def test_what_is_no_model_is_named():
    params, tx = {"w": jnp.ones(3)}, fitting.method("adam")
    plain = train_state.TrainState.create(apply_fn=None, params=params, tx=tx)
    cases = [
        (plain, {}, r"optperm.training.TrainState.create\(.*flax.training.train_state"),
        (params, {}, "a flax.nnx model and its optimizer, got <class .dict"),
        (fitting.NnxNet(), {}, "and its optimizer, got .*NnxNet.* and .*NoneType"),
    ]
    for model, options, says in cases:
        with pytest.raises(TypeError, match=says):
            training.fit(model, lambda p, b: 0.0, data(), epochs=1, batch_size=8, **options)


def test_what_a_loss_function_returns_is_checked():
    def with_aux(aux):
        return lambda params, batch: (jnp.sum(params["w"]), aux)

    plain = {"has_aux": False}
    cases = [
        (lambda params, batch: params["w"], plain, TypeError, "a real scalar"),
        (lambda params, batch, *, rng: 0.0, plain, ValueError, "pass rng=jax.random.key"),
        (
            lambda params, batch, *, model_state: 0.0,
            plain,
            TypeError,
            "must return .loss, model_state.",
        ),
        (
            lambda params, batch, *, model_state: (jnp.sum(params["w"]), {"a": 1.0}),
            plain,
            ValueError,
            "model_state that loss_fn returned has a different tree structure",
        ),
    ]
    for aux in (3.0, {"logits": jnp.ones(3)}):
        cases.append((with_aux(aux), {}, TypeError, "must be a dict of scalar metrics"))
    for name in ("loss", "epoch", "step", "seconds", "fraction_moved", "eval_loss"):
        says = f"a metric named '{name}'; .* are reserved"
        cases.append((with_aux({name: jnp.float32(9.0)}), {}, ValueError, says))
    state = training.TrainState.create(
        apply_fn=None, params={"w": jnp.ones(3)}, tx=fitting.method("adam")
    )
    for loss_fn, case, error, says in cases:
        options = {"epochs": 1, "batch_size": 8, "has_aux": True, **case}
        with pytest.raises(error, match=says):
            training.fit(state, loss_fn, np.ones((8, 3)), **options)


def test_complex_params_descend_and_sam_gets_the_arguments_it_takes():
    """Optax's rules take the conjugate of JAX's gradient; SAM takes no extra argument but `grad_fn`."""
    weights = np.float32([1.0, -2.0, 0.5])
    x = np.random.default_rng(0).normal(size=(32, 3)).astype(np.float32)
    params = {"w": jnp.asarray(weights * (1 + 0.5j), jnp.complex64)}

    def loss_fn(params, batch):
        return jnp.mean(jnp.abs(batch["x"] @ (params["w"] - weights)) ** 2)

    split = optax.contrib.split_real_and_imaginary
    losses = []
    for tx in (optax.sgd(0.05), split(optax.sgd(0.05))):
        state = training.TrainState.create(apply_fn=None, params=params, tx=tx)
        losses.append(training.fit(state, loss_fn, {"x": x}, epochs=20, batch_size=8).history)
    for history in losses:
        assert history.epochs["loss"][-1] < 1e-2 * history.epochs["loss"][0]
    np.testing.assert_allclose(losses[0].steps["loss"], losses[1].steps["loss"], rtol=1e-4)

    real, sam = (
        {"w": jnp.ones(3)},
        optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.01), sync_period=2),
    )
    state = training.TrainState.create(apply_fn=None, params=real, tx=sam)
    result = training.fit(state, loss_fn, {"x": x}, steps=6, batch_size=32)
    opt_state = sam.init(real)
    for _ in range(6):
        updates, opt_state = sam.update(jax.grad(loss_fn)(real, {"x": x}), opt_state, real)
        real = optax.apply_updates(real, updates)
    np.testing.assert_allclose(result.state.params["w"], real["w"], rtol=1e-5)


def test_metrics_that_not_every_batch_has():
    def metrics(params, batch):
        small = {"small": jnp.float32(1.0)} if batch["x"].shape[0] < BATCH else {}
        return {"loss": fitting.linear_loss(params, batch), **small}

    def loss_fn(params, batch):
        out = metrics(params, batch)
        return out.pop("loss"), out

    batches = [*fitting.batches(1), {name: leaf[:3] for name, leaf in data().items()}]
    result = fitting.linear_fit(loss_fn, batches, epochs=1, has_aux=True)
    np.testing.assert_array_equal(result.history.steps["small"], [*[np.nan] * 5, 1.0])
    with pytest.raises(ValueError, match=r"the same metrics for every batch, got .*'small'"):
        fitting.linear_fit(epochs=1, eval_fn=metrics, eval_data=batches)


def test_multi_steps_that_is_no_transformation_is_refused():
    every_second = optax.MultiSteps(optax.adam(0.1), 2)
    says = r"optax\.GradientTransformation, which MultiSteps\(\.\.\.\)\.gradient_transformation"
    with pytest.raises(TypeError, match=says):
        fitting.linear_fit(tx=every_second, epochs=1)
    assert fitting.linear_fit(tx=every_second.gradient_transformation(), epochs=1).epoch == 1


def test_a_function_of_an_nnx_model_may_have_arguments_that_it_does_well_without():
    def loss_fn(model, batch, rng=None):
        assert rng is None
        return fitting.nnx_loss(model, batch)

    model = fitting.NnxNet()
    optimizer = training.Optimizer(model, fitting.method("adam"), wrt=nnx.Param)
    result = training.fit(model, loss_fn, data(), optimizer=optimizer, epochs=1, batch_size=BATCH)
    same = fitting.fit("nnx", "adam", epochs=1)
    np.testing.assert_array_equal(result.history.steps["loss"], same.history.steps["loss"])


def test_seconds_are_those_of_the_steps_and_not_of_their_dispatch():
    """From the end of one short epoch to that of the next there is hardly anything else."""

    def loss_fn(params, batch):
        w = jax.lax.stop_gradient(params["w"])
        worked = jax.lax.fori_loop(0, 25, lambda _, x: jnp.sin(x @ x), jnp.full((300, 300), w))
        return params["w"] * batch.mean() + worked.mean()

    state = training.TrainState.create(
        apply_fn=None, params={"w": jnp.float32(1.0)}, tx=optax.sgd(0.1)
    )
    ends = []
    options = {
        "epochs": 3,
        "batch_size": 2,
        "on_epoch_end": lambda _: ends.append(time.monotonic()),
    }
    result = training.fit(state, loss_fn, jnp.ones(4), **options)
    seconds = result.history.epochs["seconds"][1:]
    assert np.all(seconds > 0.5 * np.diff(ends))
    assert np.all(seconds < 1.1 * np.diff(ends))


def test_refreshes_within_steps_are_refused_with_what_to_do():
    tx = optax.chain(optperm.svrg(every=4), optax.sgd(0.05))
    with pytest.raises(ValueError, match=r"(?s)full_grad_fn.*optperm\.variance\.take_snapshot"):
        training.fit(
            fitting.linen_state(tx), fitting.linen_loss, fitting.data(), epochs=1, batch_size=8
        )


@pytest.mark.chains
def test_a_gradient_that_constant_sgd_should_not_meet_is_warned_of():
    sampler = optperm.mandt_sgd(40, BATCH, burn_in=1, max_step=0.01)
    tx = optax.chain(optax.clip_by_global_norm(1e-3), sampler)
    what = fitting.linen_loss, data()
    with pytest.warns(UserWarning, match="clipping"):
        training.fit(fitting.linen_state(tx), *what, epochs=1, batch_size=BATCH)


def test_svrg_without_snapshots_is_warned_of_once():
    tx = optax.chain(optperm.svrg(), optax.sgd(0.05))
    what = fitting.linen_loss, data()
    with pytest.warns(UserWarning, match="epoch_start=optperm.variance.take_snapshot") as caught:
        result = training.fit(fitting.linen_state(tx), *what, epochs=3, batch_size=BATCH)
    assert [w.filename for w in caught if "svrg" in str(w.message)] == [__file__]
    assert not result.state.opt_state[0].snapshot.is_taken


def test_svrg_whose_snapshots_begin_later_is_not_warned_of(recwarn):
    def from_the_second(epoch):
        return optperm.variance.take_snapshot if epoch > 1 else None

    tx = optax.chain(optperm.svrg(), optax.sgd(0.05))
    what = fitting.linen_state(tx), fitting.linen_loss, data()
    training.fit(*what, epochs=1, batch_size=BATCH, epoch_start=from_the_second)
    assert not [w for w in recwarn if "svrg" in str(w.message)]


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


def test_a_loss_that_is_not_finite_at_the_end_is_warned_of_with_its_first_step():
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
    with pytest.warns(RuntimeWarning, match="eval_loss was never finite, so keep_best has kept no"):
        fitting.linear_fit(epochs=1, eval_data=data(), keep_best="eval_loss", **options)
