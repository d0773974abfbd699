"""`fit` compared with loops written by hand, its data, callbacks and errors."""

import concurrent.futures
import dataclasses
import functools
import itertools
import signal
import sys
import time
import types
import warnings
from typing import NamedTuple

import fitting
import jax
import jax.numpy as jnp
import kernels
import loops
import numpy as np
import optax
import pytest
import support
from fitting import BATCH, DATA, EVALUATION, FEATURES, linear_fit, linear_loss
from flax import nnx
from flax.training import train_state

import optperm
from optperm import training


# The loss has a mean over the batch, so it is no mean over examples.
@pytest.mark.filterwarnings("ignore:The loss of some examples is not the mean")
@pytest.mark.usefixtures("unchecked")
def test_fit_is_a_loop_written_by_hand_for_a_train_state():
    """Evaluation, update and model state spelled out, one jitted call a step."""
    tx = fitting.method("svrg")
    parts = {"model_state": {"mean": jnp.zeros(fitting.CLASSES)}, "rng": jax.random.key(1)}
    start = training.TrainState.create(
        apply_fn=None, params=fitting.linear_params(), tx=tx, **parts
    )
    params, opt_state, model_state = start.params, start.opt_state, start.model_state

    def loss_fn(params, batch, *, model_state, rng):
        """Logits are centered with a running mean, and the weights have noise."""
        w = params["w"] + 0.1 * jax.random.normal(rng, params["w"].shape)
        logits = batch["x"] @ w
        mean = 0.9 * model_state["mean"] + 0.1 * jnp.mean(logits, axis=0)
        return fitting.cross_entropy(logits - mean, batch["y"]), {"mean": mean}

    result = linear_fit(loss_fn, tx=tx, epochs=2, epoch_start=fitting.every_second, **parts)

    def bound(model_state, count):
        key = jax.random.fold_in(start.rng, count)
        return functools.partial(loss_fn, model_state=model_state, rng=key)

    @jax.jit
    def step(params, opt_state, model_state, count, batch):
        e = optperm.evaluate(bound(model_state, count), params, batch, has_aux=True)
        updates, opt_state = tx.update(e.grad, opt_state, params, **e.extra_args)
        return optperm.apply_updates(params, updates, opt_state), opt_state, e.aux, e.value

    full_grad = optperm.variance.full_gradient(bound(model_state, 0), params, [DATA], has_aux=True)
    opt_state = optperm.variance.take_snapshot(opt_state, params, full_grad)
    losses = []
    for count, batch in enumerate(fitting.all_batches(2)):
        params, opt_state, model_state, loss = step(params, opt_state, model_state, count, batch)
        losses.append(loss)
    np.testing.assert_array_equal(result.history.steps["loss"], np.stack(losses))
    trained = result.state.params, result.state.opt_state, result.state.model_state
    support.assert_same_bits(trained, (params, opt_state, model_state))
    # The state that was passed is left alone.
    support.assert_same_bits(start.params, fitting.linear_params())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The loss of some examples is not the mean")
def test_fit_is_a_loop_written_by_hand_for_nnx():
    tx, model = fitting.method("sgperm"), fitting.NnxNet()
    result = fitting.fit("nnx", "sgperm", epochs=2)
    optimizer = training.Optimizer(model, tx, wrt=nnx.Param)

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
    options = {"optimizer": nnx.Optimizer(model, tx, wrt=nnx.Param), "batch_size": BATCH}
    trained = training.fit(model, fitting.nnx_loss, DATA, epochs=2, **options)
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


SAMPLERS = {
    "mandt_sgd": optperm.mandt_sgd(40, BATCH, max_step=0.1),
    "sgld": optperm.sgld(1e-3, 40),
    "sghmc": optperm.sghmc(1e-3, 40, friction=0.1),
}


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("name", support.every_night(["adam", *SAMPLERS], ["adam", "sgld"]))
def test_order_of_a_sampler_is_drawn_with_replacement_from_the_seed(name):
    x, tx = np.arange(40, dtype=np.float32), SAMPLERS.get(name, fitting.method("adam"))

    def loss_fn(params, batch):
        return jnp.mean(batch) + 0.0 * jnp.sum(params["w"] ** 2)

    result = linear_fit(loss_fn, x, tx, epochs=2, batch_size=BATCH, key=7)
    orders = [training.shuffled(7, epoch, 40, replace=name in SAMPLERS) for epoch in (1, 2)]
    expected = x[np.concatenate(orders)].reshape(-1, BATCH).mean(axis=1)
    np.testing.assert_allclose(result.history.steps["loss"], expected, rtol=1e-6)


def test_each_replica_draws_from_a_key_of_its_own_in_each_step():
    state = fitting.linen_state(fitting.method("adam"))

    def draw(step, _):
        return jax.random.key_data(state.replace(step=step).step_rng("replica"))

    of_replicas = jax.vmap(draw, in_axes=(None, 0), axis_name="replica")
    drawn = jax.vmap(of_replicas, in_axes=(0, None))(jnp.arange(3), jnp.arange(4))
    assert len(np.unique(drawn.reshape(12, 2), axis=0)) == 12


def test_trials_of_a_step_see_its_model_state_and_key_and_leave_no_trace():
    """A method that evaluates at other params; the loss depends on the model state and on the key."""

    def loss_fn(params, batch, *, model_state, rng):
        """The model state records the params and the key of its computation."""
        noise = jax.random.normal(rng)
        loss = jnp.mean(batch @ params["w"]) + jnp.sum(model_state["w"]) + noise
        return loss, {"w": params["w"], "noise": noise}

    def update(updates, state, params=None, *, value, value_fn, grad_fn, **_):
        elsewhere = optax.tree.scale(2.0, params)
        grads = grad_fn(elsewhere)
        # At the same params the same value, to the last bit: the same key and model state.
        is_same = (value_fn(params) == value) & (value_fn(elsewhere) != value)
        return jax.tree.map(lambda g: -0.1 * g, grads), is_same

    seen, options = [], {"epochs": 1, "batch_size": 4, "rng": jax.random.key(2)}
    options["model_state"] = {"w": jnp.zeros(3), "noise": jnp.float32(0.0)}
    options["every"] = {1: lambda event: seen.append(event.state)}
    tx = optax.GradientTransformationExtraArgs(lambda params: jnp.array(False), update)
    linear_fit(loss_fn, np.ones((12, 3), np.float32), tx, {"w": jnp.arange(3.0)}, **options)
    assert len(seen) == 3
    for before, after in itertools.pairwise(seen):
        assert after.opt_state
        support.assert_same_bits(after.model_state["w"], before.params["w"])
        assert after.model_state["noise"] != before.model_state["noise"]


def test_replicas_of_local_steps_part_and_meet():
    """What comes out is the center after a commit, and the mean of the batch statistics."""

    def loss_fn(params, batch, *, model_state):
        return linear_loss(params, batch), {"mean": jnp.mean(batch["x"], axis=0)}

    with fitting.runs() as made:
        result = linear_fit(
            loss_fn, tx=fitting.method("agn", "replica"), steps=5,
            model_state={"mean": jnp.zeros(FEATURES)}, **fitting.on(2, mapped=True),
        )  # fmt: skip
    carry = made[0].carry
    kernels = np.asarray(carry.params["w"])
    assert np.all(np.ptp(kernels, axis=0).max() > 0)
    assert carry.opt_state.since_commit.tolist() == [2] * 2  # the commit was made on a copy
    before = optperm.distributed.center_params(carry.opt_state)["w"][1]
    center = optperm.distributed.center_params(result.state.opt_state, final=True)
    support.assert_same_bits(result.state.params, center)
    assert np.any(before != center["w"])
    each = np.asarray(carry.model_state["mean"])
    mean = result.state.model_state["mean"]
    assert np.ptp(each, axis=0).max() > 0
    np.testing.assert_allclose(mean, each.mean(axis=0), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("axis_name", "options", "says"),
    [
        (None, {}, "pass axis_name='replica' to the method and to fit"),
        (None, {"axis_name": "replica"}, "agn would never commit: pass axis_name='replica' to the"),
        ("replica", {}, "pass axis_name='replica' to the method and to fit"),
        ("replica", {"mesh": None}, "is not bound here.*in fit: pass axis_name='replica'"),
        ("other", {"axis_name": "replica"}, "in fit: pass axis_name='other'"),
        ("other", {"axis_name": "other"}, "mesh, whose axes are 'replica'"),
    ],
)
def test_axis_that_fit_or_the_method_lacks_is_named(axis_name, options, says):
    """Without it replicas of local steps would never commit."""
    with pytest.raises(ValueError, match=says):
        linear_fit(tx=fitting.method("agn", axis_name), epochs=1, **{**fitting.on(4), **options})


def test_processes_with_different_numbers_of_devices_are_refused(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    found = [types.SimpleNamespace(process_index=index) for index in (0, 1, 1)]
    monkeypatch.setattr(jax, "devices", lambda: found)
    with pytest.raises(ValueError, match=r"The processes have \[1, 2\] devices"):
        linear_fit(epochs=1)


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
    with concurrent.futures.ThreadPoolExecutor() as pool:
        assert pool.submit(linear_fit, epochs=1).result().step == 5


jitted_loss = jax.jit(linear_loss)


def test_evaluation_is_the_mean_over_all_examples():
    """In batches that do not divide them; from arrays, batches and a function of the epoch."""
    parts = [jax.tree.map(lambda leaf, i=i: leaf[i], DATA) for i in (slice(17), slice(17, None))]
    for source, size in [(DATA, 17), (parts, None), (lambda epoch: iter(parts), None)]:
        options = {"eval_fn": EVALUATION["eval_fn"], "eval_data": source, "eval_batch_size": size}
        result = linear_fit(epochs=1, **options)
        exact = jitted_loss(result.state.params, DATA)
        np.testing.assert_allclose(result.history.last["eval_loss"], exact, rtol=1e-6)


def test_model_is_evaluated_in_eval_mode_and_trained_in_its_own():
    """Dropout is off and BatchNorm takes its running statistics, in the evaluation alone."""
    seen = []

    def loss_fn(model, batch):
        seen.append((model.dropout.deterministic, model.norm.use_running_average))
        return fitting.nnx_loss(model, batch)

    shifted = {"x": DATA["x"] * 3 + 1, "y": DATA["y"]}
    (model,), optimizer = fitting.subject("nnx", fitting.method("adam"))
    model.dropout.deterministic = True  # a model of mixed modes is trained in these
    options = {"eval_fn": lambda *of: {"loss": fitting.nnx_loss(*of)}, "eval_data": shifted}
    options |= {"eval_batch_size": 40, **optimizer}
    options |= {"epochs": 2, "batch_size": BATCH}
    result = training.fit(model, loss_fn, DATA, **fitting.arguments(options))
    assert set(seen) == {(True, False)}
    assert (model.dropout.deterministic, model.norm.use_running_average) == (True, False)
    model.eval()
    exact = fitting.nnx_loss(model, shifted)
    np.testing.assert_allclose(result.history.last["eval_loss"], exact, rtol=1e-5)


@pytest.mark.exhaustive
def test_single_layer_of_nnx_is_trained_and_evaluated():
    """It has no modes, and an argument that its function does well without keeps its default."""
    model = nnx.Linear(fitting.FEATURES, fitting.CLASSES, rngs=nnx.Rngs(0))
    optimizer = training.Optimizer(model, fitting.method("adam"), wrt=nnx.Param)

    def loss_fn(model, batch, rng=None):
        assert rng is None
        return fitting.nnx_loss(model, batch)

    options = {"eval_fn": lambda *of: {"loss": loss_fn(*of)}, "eval_data": DATA}
    options |= {"optimizer": optimizer, "batch_size": BATCH}
    result = training.fit(model, loss_fn, DATA, epochs=1, **fitting.arguments(options))
    exact = loss_fn(model, DATA)
    np.testing.assert_allclose(result.history.last["eval_loss"], exact, rtol=1e-5)


def test_steps_of_an_nnx_optimizer_are_counted_over_runs():
    model = nnx.Linear(fitting.FEATURES, fitting.CLASSES, rngs=nnx.Rngs(0))
    optimizer = training.Optimizer(model, fitting.method("adam"), wrt=nnx.Param)
    for epoch in (1, 2):
        training.fit(model, fitting.nnx_loss, DATA, optimizer=optimizer, epochs=1, batch_size=BATCH)
        assert int(optimizer.step.get_value()) == 5 * epoch


def test_progress_bar_shows_steps(capsys):
    linear_fit(epochs=1, progress=True)
    assert "5/5" in capsys.readouterr().out


def test_missing_extra_is_named(monkeypatch, tmp_path):
    for module in ("rich.progress", "orbax.checkpoint"):
        monkeypatch.setitem(sys.modules, module, None)
    what = r"pip install 'optperm\[(training|progress)\]'"
    for name, option in (("orbax", {"checkpoints": tmp_path}), ("rich", {"progress": True})):
        with pytest.raises(ImportError, match=f"needs {name}.*{what}"):
            linear_fit(epochs=1, **option)


EMPTY = {"x": np.zeros((0, 5), np.float32), "y": np.zeros(0, np.int32)}
RAGGED = {"x": np.zeros((4, 5), np.float32), "y": np.zeros(3, np.int32)}
TOO_MANY = optax.chain(optax.clip(1.0), kernels.constant_sgd(num_data=1000, batch_size=BATCH))
OTHER_BATCH = kernels.constant_sgd(num_data=40, batch_size=2)
EVERY_SECOND = optax.MultiSteps(optax.adam(1e-2), 2)


def constant(params, batch):
    return jnp.sum(params["w"])


def with_aux(aux):
    """A loss function, and that it has aux."""
    return {"loss_fn": lambda *of: (constant(*of), aux), "has_aux": True}


# What is wrong with one argument, or with two together, and what the error says.
REFUSED = [
    ({"epochs": None}, ValueError, "Pass epochs or steps"),
    ({"epochs": 0}, ValueError, "epochs must be at least 1, got 0"),
    ({"steps": 2.0}, TypeError, "steps must be an integer"),
    (
        {"batch_size": 41},
        ValueError,
        "batch_size must be at most 40, the number of examples, got 41",
    ),
    ({"batch_size": None}, TypeError, "Pass batch_size, the number of examples per step"),
    ({"batch_size": 6, **fitting.on(4)}, ValueError, "a multiple of 4, got 6"),
    ({"key": -1}, ValueError, "key must be at least 0"),
    ({"train_data": EMPTY, "batch_size": 8}, ValueError, "contains no examples"),
    ({"train_data": RAGGED, "batch_size": 8}, ValueError, "agree in their leading"),
    ({"train_data": "x"}, TypeError, "an iterable of batches, .* got str"),
    ({"train_data": {"x": [1]}}, TypeError, "got dict"),
    (
        {"train_data": {"x": np.array(["a"])}},
        TypeError,
        r"data\['x'\] must be an array of num",
    ),
    ({"train_data": [DATA], "batch_size": 8}, ValueError, "batch_size is for arrays"),
    ({"eval_fn": 3, "eval_data": DATA}, TypeError, "Validation.fn must be a function .*, got 3"),
    ({"eval_fn": len, "eval_data": iter([])}, TypeError, "Validation.data is an iterator.* once"),
    ({"eval_batch_size": 0, **fitting.EVALUATION}, ValueError, "Validation.batch_size must be at"),
    ({"eval_every": 2.0, **fitting.EVALUATION}, TypeError, "Validation.every must be an integer"),
    (
        {"validation": len},
        TypeError,
        r"must be a Validation\(...\) .*, got <built-in function len>",
    ),
    ({"validation": (len, DATA)}, TypeError, r"must be a Validation\(...\) .*, got .{,150}$"),
    ({"eval_fn": DATA, "eval_data": len}, TypeError, "must be a function of .*, got .{,150}$"),
    (
        {"checkpoint_every": 0, "checkpoints": "a"},
        ValueError,
        "Checkpoints.every must be at least 1",
    ),
    ({"checkpoint_keep": 0, "checkpoints": "a"}, ValueError, "Checkpoints.keep must be at least 1"),
    ({"checkpoints": "a[1]"}, ValueError, r"folder without \*, \?, \[ or \], got a"),
    ({"checkpoints": "a", "resume": "yes"}, TypeError, "must be an integer, got 'yes'"),
    ({"optimizer": 3}, ValueError, "a TrainState has its own"),
    ({"mesh": 3}, TypeError, "mesh must be a Mesh"),
    ({"every": {0: print}}, ValueError, r"callbacks\[0\] must be at least 1"),
    ({"every": {6: 3}}, TypeError, r"callbacks\[6\] must be a function .*, or a list .*, got 3"),
    ({"callbacks": {"epochs": print}}, ValueError, "A key of callbacks must be .*, got 'epochs'"),
    ({"callbacks": [print]}, TypeError, "callbacks must be a dict such as .*, got .<built-in"),
    ({"on_epoch_end": lambda _: 3}, TypeError, "must return True to stop"),
    ({"epoch_start": 3}, TypeError, "callable"),
    (
        {"keep_best": ("loss", "most"), **fitting.EVALUATION},
        ValueError,
        "must be one of 'min', 'max'",
    ),
    ({"keep_best": ["loss", "max"], **fitting.EVALUATION}, TypeError, "or a pair such as .*, got"),
    ({"keep_best": ("loss",), **fitting.EVALUATION}, TypeError, r"a pair .*, got \('loss',\)"),
    ({"keep_best": "accuracy", **fitting.EVALUATION}, ValueError, "has the name eval_<name>"),
    (
        {"checkpoints": "a", "on_signal": "ignore"},
        ValueError,
        "on_signal must be one of 'raise', 'return'",
    ),
    ({"qqq": 1}, TypeError, "unexpected keyword argument 'qqq'"),
    ({"train_data": []}, ValueError, "gives no batch in epoch 1"),
    ({"train_data": [DATA, EMPTY]}, ValueError, "A batch of .* no examples"),
    ({"train_data": lambda: []}, TypeError, r"lambda epoch: \.\.\., got function"),
    ({"train_data": fitting.all_batches(1), "epochs": 2}, ValueError, "only once"),
    ({"train_data": iter([]), "epoch_start": print}, ValueError, "an iterator is read once"),
    ({"train_data": lambda epoch: None}, TypeError, r"data\(1\) must return an iterable .* None"),
    ({"tx": TOO_MANY}, ValueError, r"^The optimizer has num_data=1000, .* has 40 examples"),
    ({"tx": OTHER_BATCH}, ValueError, "made for batch_size=2, but .* gradients has 8 examples"),
    ({"tx": EVERY_SECOND}, TypeError, r"which MultiSteps\(\.\.\.\)\.gradient_transformation"),
    ({"loss_fn": lambda params, batch: params["w"]}, TypeError, "a real scalar"),
    ({"loss_fn": lambda params, batch, *, rng: 0.0}, ValueError, "pass rng=jax.random.key"),
    ({"loss_fn": lambda *of, model_state: 0.0}, TypeError, "must return .loss, model_state."),
    (
        {"loss_fn": lambda *of, model_state: (constant(*of), {"a": 1.0})},
        ValueError,
        "different tree struct",
    ),
    (
        {"loss_fn": lambda *of, model_state: (constant(*of), {}), "has_aux": True},
        TypeError,
        "must return .loss, model_state, aux., got a tuple",
    ),
    (with_aux(3.0), TypeError, "must be a dict of scalar metrics"),
    (with_aux({"logits": jnp.ones(3)}), TypeError, "scalar metrics, got 'logits' of shape"),
    (with_aux({"error": (1.0, 2)}), TypeError, "scalar metrics, got 'error' of type tuple"),
    (with_aux({"step": 9.0}), ValueError, "a metric named 'step'; .* are reserved"),
    (with_aux({"eval_loss": 9.0}), ValueError, "a metric named 'eval_loss'; .* are reserved"),
]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("options", "error", "says"), REFUSED)
def test_bad_argument_is_named(options, error, says):
    with pytest.raises(error, match=says):
        linear_fit(**{"epochs": 1, **options})


def test_folder_alone_is_refused_with_the_value_that_holds_it():
    state = fitting.linen_state(fitting.method("adam"))
    with pytest.raises(TypeError, match=r"checkpoints must be a Checkpoints\(...\) .*, got 'runs'"):
        training.fit(state, linear_loss, DATA, epochs=1, batch_size=8, checkpoints="runs")


def test_what_is_no_model_is_named():
    state = {"apply_fn": None, "params": fitting.linear_params(), "tx": fitting.method("adam")}
    for model, says in [
        (
            train_state.TrainState.create(**state),
            r"optperm.training.TrainState.create\(.*flax.training.train_state.* pass TrainState.create",
        ),
        (fitting.NnxNet(), "and its optimizer, got .*NnxNet.* and .*NoneType"),
    ]:
        with pytest.raises(TypeError, match=says):
            training.fit(model, lambda p, b: 0.0, DATA, epochs=1, batch_size=8)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("every", support.every_night([1, 2], [2]))
def test_sampler_trains_on_batches_of_its_kernel(every):
    """Around a sampler, `optax.MultiSteps` makes its batch of several batches."""
    tx = kernels.constant_sgd(num_data=40, batch_size=every * BATCH)
    if every > 1:
        tx = optax.MultiSteps(tx, every).gradient_transformation()
    assert linear_fit(tx=tx, epochs=1, opt_state=None).step == 5


def test_sam_gets_the_arguments_that_it_takes():
    """Of the extra arguments only `grad_fn`."""
    sam, batches = optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.01), sync_period=2), [DATA] * 6
    result = linear_fit(tx=sam, train_data=batches, epochs=1)
    evaluate = loops.gradient(linear_loss)
    params, _ = loops.train(sam, fitting.linear_params(), batches, evaluate=evaluate)[-1]
    np.testing.assert_allclose(result.state.params["w"], params["w"], rtol=1e-5)


def test_seconds_are_those_of_the_steps_and_not_of_their_dispatch():
    """Almost all of the time between the ends of two short epochs is training."""

    def loss_fn(params, batch):
        w = jax.lax.stop_gradient(params["w"])
        worked = jax.lax.fori_loop(0, 25, lambda _, x: jnp.sin(x @ x), jnp.full((300, 300), w))
        return params["w"] * batch.mean() + worked.mean()

    ends, note = [], {"on_epoch_end": lambda _: ends.append(time.monotonic())}
    options = {"params": {"w": jnp.float32(1.0)}, "tx": optax.sgd(0.1), "batch_size": 2, **note}
    result = linear_fit(loss_fn, jnp.ones(4), epochs=3, **options)
    seconds = result.history.epochs["seconds"][1:]
    assert np.all(seconds > 0.5 * np.diff(ends))
    assert np.all(seconds < 1.1 * np.diff(ends))


@pytest.mark.usefixtures("unchecked")
def test_svrg_without_snapshots_is_warned_of_once():
    tx = optax.chain(optperm.svrg(), optax.sgd(0.05))
    with pytest.warns(
        UserWarning, match='callbacks={"epoch_start": optperm.variance.take_snapshot}'
    ) as caught:
        linear_fit(tx=tx, epochs=3)
    assert len(caught) == 1
    # A schedule may begin later; warnings are errors here.
    later = lambda epoch: optperm.variance.take_snapshot if epoch > 1 else None  # noqa: E731
    linear_fit(tx=tx, epochs=1, epoch_start=later)
    linear_fit(train_data=[DATA] * 101, tx=tx, epochs=1, epoch_start=later)


class Complaint(NamedTuple):
    """A state that complains before the first step, and of each second count."""

    count: jax.Array

    def warnings(self, params):
        assert params.keys() == {"w"}
        return ["before"] if not self.count else ["often", f"after {int(self.count)}"]


def test_optimizer_after_sgperm_is_said_within_the_first_hundred_steps(recwarn):
    """The first row comes after 250 steps."""
    tx = optax.chain(optperm.sgperm(0.5), optax.scale(0.5))
    data, seen = itertools.repeat(DATA, 250), list[int]()
    params = {"w": jax.random.normal(jax.random.key(0), (fitting.FEATURES, fitting.CLASSES))}
    linear_fit(
        train_data=data,
        tx=tx,
        params=params,
        epochs=1,
        every={
            100: lambda event: seen.append(sum("had not set" in str(w.message) for w in recwarn))
        },
    )
    assert seen == [1, 1]


def test_each_warning_of_a_state_is_given_once_before_the_first_step_after_the_second_or_a_row(
    recwarn,
):
    tx = optax.GradientTransformation(
        lambda params: Complaint(jnp.int32(0)),
        lambda updates, state, params=None: (updates, Complaint(state.count + 1)),
    )
    took = []
    tx = optax.chain(tx, optax.sgd(0.1))
    linear_fit(tx=tx, epochs=3, every={1: lambda e: took.append(len(recwarn))})
    said = [(str(each.message), each.filename) for each in recwarn]
    here = fitting.__file__
    times = "after 2", "after 5", "after 10", "after 15"
    assert said == [(text, here) for text in ("before", "often", *times)]
    assert took[:5] == [1, 3, 3, 3, 4]  # the row comes before the functions of its step
    phases = optperm.switch_after(1000, optax.sgd(0.1), tx)
    linear_fit(tx=phases, epochs=1)
    assert len(recwarn) == len(said)


class Aim(NamedTuple):
    """A state at its goal from its 12th step on, whose warnings are about the goal."""

    count: jax.Array
    inner: Complaint

    def reached_goal(self):
        return self.count >= 12

    def warnings(self, params):
        return ["missed"] if self.count < 12 else []


def aim():
    return optax.GradientTransformation(
        lambda params: Aim(jnp.int32(0), Complaint(jnp.int32(0))),
        lambda updates, state, params=None: (
            updates,
            Aim(state.count + 1, Complaint(state.inner.count + 1)),
        ),
    )


def test_best_state_and_early_stopping_begin_where_the_optimizer_reaches_its_goal():
    """The first rows have the best losses, but they are not of what was asked for."""
    options = {"eval_data": [DATA], "keep_best": "eval_loss", "epochs": 6}
    for name, method in {
        "a state": aim(),
        "a phase": optperm.switch_after(11, optax.identity(), optax.identity()),
    }.items():
        tx, losses = optax.chain(method, optax.sgd(0.1)), iter([1.0, 2.0, 3.0, 7.0, 8.0, 9.0])
        read = lambda _, losses=losses: np.float32(next(losses))  # noqa: E731

        def eval_fn(params, batch, read=read):
            return {
                "loss": jax.pure_callback(
                    read, jax.ShapeDtypeStruct((), jnp.float32), batch["y"][0]
                )
            }

        stop = training.EarlyStopping("eval_loss", patience=2)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = linear_fit(tx=tx, eval_fn=eval_fn, on_epoch_end=stop, **options)
        assert (result.best_step, result.step, result.ended) == (15, 25, "stopped"), name
        assert result.history.epochs["reached_goal"].tolist() == [0, 0, 1, 1, 1], name


def test_goals_that_are_missed_are_said_once_at_the_end(tmp_path):
    """Warnings of a state inside are said as before; nothing is said if a signal ended the run."""
    tx = optax.chain(aim(), optax.sgd(0.1))

    def said(**options):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            folder = tmp_path / str(len(list(tmp_path.iterdir())))
            result = linear_fit(tx=tx, on_signal="return", checkpoints=folder, **options)
        assert {each.filename for each in caught} == {fitting.__file__}
        return [str(each.message) for each in caught], result

    end = {7: lambda event: signal.raise_signal(signal.SIGTERM)}
    own = ["before", "often", "after 5"]
    assert said(epochs=2)[0] == [*own, "after 10", "missed"]
    assert said(epochs=3)[0] == [*own, "after 10", "after 15"]
    assert said(epochs=2, every=end)[0] == own
    options = {"epochs": 2, "keep_best": "eval_loss", **fitting.EVALUATION}
    texts, result = said(**options)
    assert "in no row, so keep_best has stored no best_state" in texts[-1]
    assert result.best_state is None


def test_loss_that_is_not_finite_at_the_end_is_warned_of_with_its_first_step():
    """Once, with the step at which it began, also where a run goes on; a NaN that passes is none."""
    x = np.ones((10, 2), np.float32)
    x[7:] = np.nan
    batches, params = list(x[:, None]), jnp.ones(2)

    def loss_fn(w, batch):
        return jnp.mean((batch @ w) ** 2)

    with pytest.warns(RuntimeWarning, match="finite at step 8 of 10") as caught:
        result = linear_fit(loss_fn, batches, optax.sgd(0.1), params, epochs=1)
    assert (len(caught), caught[0].filename) == (1, fitting.__file__)
    assert result.ended == "finished"
    passing = optax.apply_if_finite(optax.sgd(0.1), 9)
    linear_fit(loss_fn, batches[::-1], passing, params, epochs=1)  # warnings are errors here


def test_keep_best_of_a_metric_that_is_never_finite_is_warned_of():
    nan = {"eval_fn": lambda *of: {"loss": jnp.nan * linear_loss(*of)}, "eval_data": DATA}
    says = "eval_loss was never finite, so keep_best has stored no"
    with pytest.warns(RuntimeWarning, match=says):
        linear_fit(epochs=1, keep_best="eval_loss", **nan)


def test_no_batch_of_an_iterator_is_taken_that_is_not_trained_on():
    """What is left stays in it for the next run."""
    taken = []

    def endless():
        for count, batch in enumerate(fitting.all_batches(10), 1):
            taken.append(count)
            yield batch

    batches = endless()
    first = linear_fit(train_data=batches, steps=9)
    assert taken == [*range(1, 10)]
    second = training.fit(first.state, linear_loss, batches, steps=11)
    assert taken == [*range(1, 21)]
    whole = linear_fit(train_data=endless(), steps=20)
    support.assert_same_bits(second.state.params, whole.state.params)


@pytest.mark.slow
def test_epoch_start_that_is_the_change_itself_is_made_in_each_epoch():
    tx, take = fitting.method("svrg"), optperm.variance.take_snapshot
    change, by_epoch, never = (
        linear_fit(tx=tx, epochs=3, epoch_start=each).state.params
        for each in (take, lambda epoch: take, lambda epoch: None)
    )
    support.assert_same_bits(change, by_epoch)
    assert np.any(never["w"] != change["w"])


def test_complex_params_take_the_steps_of_their_conjugate_gradient():
    """Of mean |w - x|^2 / 2 a step of SGD is (x - w) / 10 for the mean x of the batch."""

    def loss_fn(params, batch):
        return jnp.mean(jnp.sum(jnp.abs(params["w"][None] - batch["x"]) ** 2, axis=1)) / 2

    w = np.full(FEATURES, 1 + 2j, np.complex64)
    result = linear_fit(loss_fn, tx=optax.sgd(0.1), params={"w": jnp.asarray(w)}, epochs=1)
    for batch in fitting.batches(1):
        w = w + np.float32(0.1) * (batch["x"].mean(axis=0) - w)
    np.testing.assert_allclose(result.state.params["w"], w, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.usefixtures("unchecked")
def test_later_run_sees_the_present_values_that_its_functions_read():
    """Of the loss, of the evaluation and of the change before an epoch, which are the same objects."""
    scale = {"value": 1.0}

    def loss_fn(params, batch):
        return scale["value"] * linear_loss(params, batch)

    def change(opt_state, params, full_gradient):
        return jax.tree.map(lambda leaf: leaf + scale["value"].astype(leaf.dtype), opt_state)

    options = {"tx": optax.sgd(0.1, momentum=0.9), "epoch_start": change, "epochs": 1}
    options |= {"eval_fn": lambda *of: {"loss": loss_fn(*of)}, "eval_data": DATA}
    found = []
    for value in (1.0, 2.0, 1.0):
        scale["value"] = np.float32(value)
        found.append(linear_fit(loss_fn, **options))
    first, other, again = (each.history for each in found)
    np.testing.assert_allclose(other.steps["loss"][0], 2 * first.steps["loss"][0], rtol=1e-6)
    support.assert_same_bits(first.steps, again.steps)
    assert first.epochs["eval_loss"] == again.epochs["eval_loss"] != other.epochs["eval_loss"]
    exact = 2 * jitted_loss(found[1].state.params, DATA)
    np.testing.assert_allclose(other.epochs["eval_loss"], exact, rtol=1e-7)
    moments = [optax.tree.get(each.state.opt_state, "trace")["w"] for each in found]
    assert np.any(moments[0] != moments[1])
