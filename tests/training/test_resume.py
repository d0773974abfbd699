"""A run that is interrupted and resumed is the uninterrupted one, to the bit; what is refused."""

import functools
import itertools
import json
import shutil
import signal
import types

import fitting
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import support
from fitting import BATCH, EXAMPLES, data, linear_fit, linear_loss

import optperm
from optperm import training
from optperm.core.states import find_state


def kept(folder):
    """The steps of the checkpoints in a folder."""
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdecimal())


def rows_of(result):
    """The rows of the epochs, without how long they took."""
    return {name: list(rows) for name, rows in result.history.epochs.items() if name != "seconds"}


def assert_same_run(resumed, whole):
    support.assert_same_bits(fitting.arrays(resumed), fitting.arrays(whole))
    support.assert_same_bits(resumed.history.steps, whole.history.steps)
    assert rows_of(resumed) == rows_of(whole)
    assert np.all(resumed.history.epochs["seconds"] > 0)
    assert resumed.history.num_steps == 15


class Positioned:
    """The batches of an epoch, by an iterator that can say and be told where it is, as Grain's."""

    def __init__(self, epoch, kind, drawn):
        self.batches, self.at, self.kind, self.drawn = list(fitting.batches(epoch)), 0, kind, drawn

    def __iter__(self):
        return self

    def __next__(self):
        if self.at == len(self.batches):
            raise StopIteration
        self.at += 1
        self.drawn.append(self.at)
        return self.batches[self.at - 1]

    def get_state(self):
        return json.dumps(self.at).encode() if self.kind is bytes else {"at": np.int64(self.at)}

    def set_state(self, state):
        self.at = json.loads(state) if self.kind is bytes else state["at"]


def feed_of(name, drawn):
    feeds = {"arrays": data(), "batches": fitting.batches}
    kind = {"json": dict, "bytes": bytes}.get(name)
    return feeds.get(name, lambda epoch: Positioned(epoch, kind, drawn))


# Kind of model, method, feed and place. Each method, kind, feed and kind of place occurs.
CASES = [("linen", "adam", "json", {}), ("nnx", "adam", "bytes", {})]
CASES += [
    pytest.param(*case, marks=pytest.mark.chains)
    for case in [
        ("nnx", "svrg", "batches", {"devices": 4}),
        ("linen", "agn", "arrays", {"devices": 4}),
        ("linen", "laperm", "arrays", {}),
        ("linen", "dldr", "arrays", {}),
        ("nnx", "sgperm", "arrays", {}),
        ("nnx", "diloco", "arrays", {"devices": 4}),
        ("linen", "constant_sgd", "arrays", {"devices": 4}),
    ]
]


@pytest.mark.parametrize(("kind", "name", "feed", "place"), CASES)
def test_a_resumed_run_is_the_uninterrupted_one(kind, name, feed, place, tmp_path):
    """15 steps in three epochs; resumed after 8, when dldr has switched and svrg has a snapshot."""
    options = {"eval_fn": fitting.ACCURACY[kind], "eval_data": data(), **place}
    run = functools.partial(fitting.fit, kind, name, **options)
    drawn = []
    whole = run(epochs=3, steps_per_call=4, train_data=feed_of(feed, drawn))
    assert (whole.ended, whole.epoch, whole.step) == ("finished", 3, 15)
    where = {"checkpoints": tmp_path, "train_data": feed_of(feed, drawn)}
    stopped = run(steps=9, checkpoint_every=2, **where)
    assert (stopped.epoch, stopped.step, kept(tmp_path)) == (1, 9, [2, 4, 6, 8, 9])
    shutil.rmtree(tmp_path / "9")
    drawn.clear()
    resumed = run(epochs=3, resume=True, **where)
    assert_same_run(resumed, whole)
    # An iterator that knows where it is gives no batch twice.
    assert drawn == ([] if feed in ("arrays", "batches") else [4, 5, 1, 2, 3, 4, 5])
    # The state has moved on since, and it was not SGD that moved it.
    assert np.any(whole.history.steps["loss"][7:] != whole.history.steps["loss"][:8])
    opt_state = whole.optimizer.opt_state if kind == "nnx" else whole.state.opt_state
    if name == "dldr":
        state = find_state(opt_state, optperm.subspace.DldrState, method="dldr")
        assert (state.second.subspace.is_set, int(state.count)) == (True, 15)
    if name == "svrg":
        assert find_state(opt_state, optperm.variance.SvrgState, method="svrg").snapshot.is_taken


def at_seven(act):
    """A callback that acts at step 7, within the second epoch."""
    return {"every": {1: lambda event: act() if event.step == 7 else None}}


def fail(*_):
    raise ZeroDivisionError("it failed")


def leave():
    raise SystemExit(3)


def on_signal(number, **options):
    return {**at_seven(lambda: signal.raise_signal(number)), **options}


def failing_after(batches):
    """A loader that fails in the second epoch, once so many batches were taken."""

    def load(epoch):
        for count, batch in enumerate(fitting.batches(epoch)):
            yield fail() if (epoch, count) == (2, batches) else batch

    return {"train_data": load}


def failing_evaluation(epoch):
    return {"eval_data": lambda now: fail() if now == epoch else [data()]}


# What interrupts a run, how it ends, after which step, and whether it takes batches.
INTERRUPTIONS = {
    "steps": ({"steps": 7}, "finished", 7),
    "callback": (at_seven(lambda: True), "stopped", 7),
    "SIGTERM": (on_signal(signal.SIGTERM, on_signal="return"), "interrupted", 7),
    "SIGINT": (on_signal(signal.SIGINT, on_signal="return"), "interrupted", 7),
    "SIGINT again": (on_signal(signal.SIGINT), KeyboardInterrupt, 7),
    "exit": (at_seven(leave), SystemExit, 7),
    "callback's error": (at_seven(fail), ZeroDivisionError, 7),
    "loader's error": (failing_after(2), ZeroDivisionError, 7),
    "evaluation's error": (failing_evaluation(2), ZeroDivisionError, 10),
    "last evaluation's error": (failing_evaluation(3), ZeroDivisionError, 15),
}


def test_whatever_interrupts_a_run_it_is_resumed_to_the_bit(tmp_path):
    """No step, no row and no evaluation is lost or made twice, and signals get their handlers back."""
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    usual = {"eval_fn": fitting.ACCURACY["linen"], "eval_data": lambda epoch: [data()]}
    run = functools.partial(fitting.fit, "linen", "adam", epochs=3)
    whole = {feed: run(train_data=feed_of(feed, []), **usual) for feed in ("arrays", "batches")}
    for name, (case, end, step) in INTERRUPTIONS.items():
        feed, folder = "batches" if "train_data" in case else "arrays", tmp_path / name
        options = {"train_data": feed_of(feed, []), "checkpoints": folder, **usual, **case}
        if isinstance(end, str):
            result = run(**options)
            assert (result.ended, result.step) == (end, step), name
        else:
            with pytest.raises(end):
                run(**options)
        assert kept(folder) == [step], name
        resumed = run(train_data=feed_of(feed, []), checkpoints=folder, resume=True, **usual)
        assert_same_run(resumed, whole[feed])
    assert handlers == [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]


def test_what_an_error_kept_from_being_done_is_done_when_training_resumes(tmp_path):
    """In its order and once: the row, callbacks by steps, those of epochs. What failed itself is not
    called again, unless it is an evaluation."""

    def noting(calls, kind, fails_at=None):
        def note(event):
            calls.append((kind, event.step, event.history.last.get("step")))
            return fail() if event.step == fails_at else None

        return note

    usual = {"eval_fn": lambda *args: {"loss": linear_loss(*args)}, "epochs": 3}
    later = [("every", 10, 10), ("end", 10, 10), ("every", 15, 15), ("end", 15, 15)]
    for name, eval_data, fails_at, left in (
        ("evaluation", failing_evaluation(2)["eval_data"], None, later),
        ("callback", lambda epoch: [data()], 10, later[1:]),
    ):
        calls = []
        usual |= {"checkpoints": tmp_path / name, "checkpoint_every": 5}
        failing = {"every": {5: noting(calls, "every", fails_at)}, "eval_data": eval_data}
        with pytest.raises(ZeroDivisionError):
            linear_fit(on_epoch_end=noting(calls, "end"), **failing, **usual)
        assert calls[:2] == [("every", 5, 5), ("end", 5, 5)]
        calls.clear()
        working = {"every": {5: noting(calls, "every")}, "eval_data": lambda epoch: [data()]}
        linear_fit(on_epoch_end=noting(calls, "end"), resume=True, **working, **usual)
        assert calls == left


def test_a_checkpoint_has_no_row_of_a_part_of_an_epoch(tmp_path):
    """Which `steps` ended: the result has it, a run that goes on has the epoch's row alone."""
    for steps in (7, 7, 9):
        part = linear_fit(steps=steps, checkpoints=tmp_path, resume=True)
        assert rows_of(part)["step"] == [5, steps]
    assert rows_of(linear_fit(epochs=2, checkpoints=tmp_path, resume=True))["step"] == [5, 10]


def test_an_error_leaves_what_was_trained_in_a_model_of_nnx(tmp_path):
    """The loss function fails where it is traced again, for a batch of another size."""

    def load(epoch):
        yield from fitting.batches(epoch)
        if epoch == 2:
            yield {name: leaf[:3] for name, leaf in data().items()}

    def loss_fn(model, batch):
        return fail() if batch["x"].shape[0] == 3 else fitting.nnx_loss(model, batch)

    positional, keywords = fitting.subject("nnx", fitting.method("adam"))
    with pytest.raises(ZeroDivisionError):
        training.fit(*positional, loss_fn, load, epochs=3, checkpoints=tmp_path, **keywords)
    assert kept(tmp_path) == [10]
    whole = fitting.fit("nnx", "adam", steps=10)
    kernels = [model.out.kernel.get_value() for model in (positional[0], whole.model)]
    np.testing.assert_allclose(*kernels, rtol=1e-6)
    assert int(keywords["optimizer"].step.get_value()) == 10


def test_an_endless_stream_stops_at_a_signal(tmp_path):
    """And a second Ctrl-C at once."""
    batches = itertools.cycle(fitting.batches(1))
    interrupt = {"every": {3: lambda event: signal.raise_signal(signal.SIGTERM)}}
    options = {"checkpoints": tmp_path, "on_signal": "return", **interrupt}
    result = linear_fit(train_data=batches, steps=10**9, **options)
    assert (result.ended, result.step, kept(tmp_path)) == ("interrupted", 3, [3])
    with pytest.raises(KeyboardInterrupt):
        linear_fit(epochs=1, every={1: lambda _: [signal.raise_signal(2), signal.raise_signal(2)]})


def test_a_signal_comes_again_after_the_checkpoint(tmp_path, capfd):
    """By default: to the handler that was there before, once everything is kept, and with a line."""
    came = []
    previous = signal.signal(signal.SIGTERM, lambda number, frame: came.append(kept(tmp_path)))
    try:
        send = {"every": {4: lambda event: signal.raise_signal(signal.SIGTERM)}}
        result = linear_fit(steps=20, checkpoints=tmp_path, **send)
        assert (result.ended, came) == ("interrupted", [[4]])
        said = capfd.readouterr().err.splitlines()
        assert said == [
            "SIGTERM: stopping after this step.",
            f"fit was interrupted by SIGTERM after step 4, kept in {tmp_path}.",
        ]
        # One that comes in the last step changes nothing in the result, and comes again as well.
        send["every"] = {8: send["every"][4]}
        assert linear_fit(steps=8, checkpoints=tmp_path, resume=True, **send).ended == "finished"
        assert came == [[4], [4, 8]]
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        assert linear_fit(steps=8, every=send["every"]).ended == "finished"
        assert len(came) == 2
    finally:
        signal.signal(signal.SIGTERM, previous)
    with pytest.raises(ValueError, match="on_signal must be one of 'raise', 'return'"):
        linear_fit(steps=1, on_signal="ignore")


def test_going_back_overwrites_what_came_after(tmp_path):
    """With another learning rate; what was kept stays until the new branch has something to show."""
    where = {"checkpoints": tmp_path, "checkpoint_every": 8}
    linear_fit(steps=32, **where)
    slower = optax.adam(1e-3)
    back = linear_fit(tx=slower, steps=16, resume=np.int64(8), **where)
    assert kept(tmp_path) == [8, 16]
    on = linear_fit(tx=slower, steps=24, resume=True, **where)
    np.testing.assert_array_equal(on.history.steps["loss"][:16], back.history.steps["loss"])
    with pytest.raises(ZeroDivisionError):
        linear_fit(fail, steps=24, resume=8, **where)
    assert kept(tmp_path) == [8, 16, 24]
    linear_fit(steps=17, checkpoint_keep=1, resume=8, **where)
    assert kept(tmp_path) == [17]


def test_a_run_is_resumed_on_other_devices(tmp_path):
    """From one to four and from four to two, to rounding."""
    whole = linear_fit(epochs=4)
    linear_fit(epochs=2, checkpoints=tmp_path)
    linear_fit(epochs=3, checkpoints=tmp_path, resume=True, **fitting.on(4))
    resumed = linear_fit(epochs=4, checkpoints=tmp_path, resume=True, **fitting.on(2))
    pairs = [(r.state.params["w"], r.history.steps["loss"]) for r in (resumed, whole)]
    for one, other in zip(*pairs, strict=True):
        np.testing.assert_allclose(np.asarray(one), np.asarray(other), rtol=1e-6, atol=1e-7)


@pytest.mark.chains
@pytest.mark.parametrize(("there", "here"), [(4, 2), (2, 4)])
def test_a_run_is_resumed_with_another_number_of_replicas(there, here, tmp_path):
    """From the middle of a period; each goes on as one that was there, by hand as by `fit`."""
    tx = fitting.method("diloco", "replica")
    params = {"w": jnp.ones((fitting.FEATURES, fitting.CLASSES))}
    state = training.TrainState.create(apply_fn=None, params=params, tx=tx)
    run = functools.partial(
        training.fit, state, linear_loss, data(), batch_size=BATCH, checkpoints=tmp_path
    )
    replicas = []
    run(steps=7, **fitting.on(there, mapped=True))
    resumed = run(steps=9, resume=True, **fitting.on(here, mapped=True))
    # By hand: the first seven steps of those that were there, then two of those that are here.
    opt_state, replicas = tx.init(params), [there] * 7 + [here] * 2

    def step(params, opt_state, batch):
        e = optperm.evaluate(linear_loss, params, batch)
        updates, opt_state = tx.update(e.grad, opt_state, params, **e.extra_args)
        return optperm.apply_updates(params, updates, opt_state), opt_state

    stepped = jax.jit(jax.vmap(step, axis_name="replica"))
    carry = jax.tree.map(lambda x: np.stack([x]), (params, opt_state))
    orders = [np.asarray(training.shuffled(0, epoch, EXAMPLES)) for epoch in (1, 2)]
    hands = np.concatenate(orders).reshape(-1, BATCH)
    for size, hand in zip(replicas, hands, strict=False):
        carry = jax.tree.map(lambda x, n=size: np.asarray(x)[np.arange(n) % len(x)], carry)
        parts = hand.reshape(size, -1)
        carry = stepped(*carry, {key: leaf[parts] for key, leaf in data().items()})
        if size == there:
            apart = np.ptp(np.asarray(carry[0]["w"]), axis=0).max()
    assert apart > 1e-3  # at the checkpoint the replicas had params of their own
    assert (resumed.step, resumed.history.num_steps) == (9, 9)
    w = np.asarray(resumed.state.params["w"])
    np.testing.assert_allclose(w, carry[0]["w"][0], rtol=0, atol=1e-6)


def loss_with_aux(params, batch):
    loss = linear_loss(params, batch)
    return loss, {"half": loss / 2}


@pytest.mark.parametrize("is_dropped", [True, False])
def test_metrics_come_and_go(is_dropped, tmp_path):
    """They are NaN in the steps that had none, and so is the mean over an epoch with both."""
    phases = [(loss_with_aux, True), (linear_loss, False)]
    (first, aux), (then, later_aux) = phases if is_dropped else phases[::-1]
    for steps in (5, 7):
        where, seen = {"checkpoints": tmp_path / str(steps)}, []
        linear_fit(first, steps=steps, has_aux=aux, **where)
        options = where | {"has_aux": later_aux, "every": {1: seen.append}}
        on = linear_fit(then, epochs=3, resume=True, checkpoint_every=3, **options)
        half = on.history.steps["loss"] / 2
        half[slice(steps, None) if is_dropped else slice(steps)] = np.nan
        np.testing.assert_array_equal(on.history.steps["half"], half)
        assert all(("half" in event.metrics) != is_dropped for event in seen)
        expected = half.reshape(3, 5).mean(axis=1)
        np.testing.assert_allclose(on.history.epochs["half"], expected, rtol=1e-6)


def test_an_epoch_that_ends_unseen_has_one_row(tmp_path):
    """Only one batch more would tell that it was over."""
    options = {"train_data": fitting.batches, "checkpoints": tmp_path}
    part = linear_fit(steps=5, **options)
    assert (part.step, part.epoch) == (5, 0)
    on = linear_fit(steps=10, resume=True, **options)
    assert rows_of(on)["step"] == [5, 10]
    assert rows_of(on)["epoch"] == [1, 2]


def test_a_stopped_run_stops_at_once_when_it_is_resumed(tmp_path):
    """Early stopping looks at nothing but the history."""
    stop, history = training.EarlyStopping("eval_value", 3, min_delta=0.05), training.History()
    event = types.SimpleNamespace(history=history)
    for epoch, value in enumerate([3.0, 2.0, 2.5, 1.99, 2.4], 1):
        history.add_epoch(epoch=epoch, step=epoch, seconds=1.0, evaluated={"value": value})
        assert stop(event) == (epoch == 5)
    assert not training.EarlyStopping("eval_value", 3)(event)  # 1.99 is better than 2
    assert training.EarlyStopping("eval_value", 4, mode="max")(event)
    options = {"eval_fn": lambda params, batch: {"value": jnp.zeros([])}, "eval_data": data()}
    options |= {"epochs": 9, "on_epoch_end": stop, "checkpoints": tmp_path}
    for resume in (False, True):
        result = fitting.fit("linen", "adam", resume=resume, **options)
        assert (result.ended, result.epoch) == ("stopped", 4)


@pytest.mark.parametrize("arguments", [{"patience": 0}, {"patience": -1}, {"min_delta": -1.0}])
def test_early_stopping_with_numbers_out_of_range_is_refused(arguments):
    with pytest.raises(ValueError, match="must be at least"):
        training.EarlyStopping("loss", **{"patience": 3, **arguments})
    for value in ("3", float("nan"), True):
        with pytest.raises(TypeError, match="patience must be an integer"):
            training.EarlyStopping("loss", patience=value)
    with pytest.raises(ValueError, match="min_delta must be"):
        training.EarlyStopping("loss", patience=3, min_delta=float("nan"))


def test_the_best_state_of_a_resumed_run_is_that_of_the_uninterrupted_one(tmp_path):
    """Cut by `steps`: the row of the part is dropped, and so is the state it chose (after 6 and 7)."""
    tx = optax.sgd(0.5)

    def eval_fn(params, batch):  # best within an epoch
        return {"loss": jnp.abs(jnp.sum(params["w"]) - 9.0)}

    batches = [{"x": np.full((1, 1), value, np.float32)} for value in (1, 3, 5, 2, 4)]
    state = training.TrainState.create(apply_fn=None, params={"w": jnp.zeros(1)}, tx=tx)

    def loss_fn(params, batch):
        return -jnp.sum(params["w"]) * jnp.mean(batch["x"])

    run = functools.partial(training.fit, state, loss_fn, batches, eval_fn=eval_fn)
    run = functools.partial(run, eval_data=batches[:1], keep_best="eval_loss")
    whole = run(epochs=3)
    assert (whole.best_step, float(whole.best_state.params["w"][0])) == (5, 7.5)
    for cut in (3, 6, 7, 9):
        folder = tmp_path / str(cut)
        part = run(steps=cut, checkpoints=folder)
        assert part.best_step == {3: 3, 6: 6, 7: 7, 9: 5}[cut]
        again = run(steps=cut, checkpoints=folder, resume=True)
        assert (again.best_step, again.best_state.params) == (
            part.best_step,
            part.best_state.params,
        )
        resumed = run(epochs=3, checkpoints=folder, resume=True)
        assert resumed.best_step == 5
        support.assert_same_bits(resumed.best_state.params, whole.best_state.params)


def test_a_folder_that_cannot_be_written_is_refused_before_training():
    """One that exists: nobody makes files in /proc."""
    seen = []
    with pytest.raises(training.CheckpointError, match="cannot write checkpoints to /proc/self"):
        linear_fit(epochs=1, checkpoints="/proc/self", every={1: seen.append})
    assert seen == []


def test_what_cannot_be_resumed_is_refused(tmp_path):
    where = {"checkpoints": tmp_path, "checkpoint_every": 5}
    fitting.fit("linen", "adam", epochs=2, checkpoint_keep=1, **where)
    assert kept(tmp_path) == [10]
    keys = jax.random.split(jax.random.key(1), EXAMPLES)
    others = {name: leaf[::-1].copy() for name, leaf in data().items()}
    another_run = [
        (
            ("linen", "adam"),
            {"key": 1},
            r"of another run: key is \[0, 0\] there and \[0, 1\] here\.",
        ),
        (("linen", "adam"), {"batch_size": 4}, "batch_size is 8 there and 4 here"),
        (("linen", "adam"), {"train_data": others}, "the digest of train_data is"),
        (("linen", "adam"), {"train_data": data() | {"key": keys}}, "train_data is"),
        (("linen", "adam"), {"train_data": fitting.batches}, "an iterable of batches"),
        (("linen", "agn"), {}, r"the form of optimizer and model is \d+ arrays, \w+ there and"),
        (("nnx", "adam"), {}, "the kind of model is linen there and nnx here"),
    ]
    for subject, options, says in [
        (("linen", "adam"), {"resume": False}, "holds checkpoints of an earlier run"),
        (("linen", "adam"), {"resume": 4}, r"resume=4, but .* has checkpoints of steps \[10\]"),
        *another_run,
    ]:
        if "train_data" in options and isinstance(options["train_data"], dict):
            options["batch_size"] = BATCH
        with pytest.raises(ValueError, match=says):
            fitting.fit(*subject, epochs=3, **{"resume": True, **where, **options})
    done = fitting.fit("linen", "adam", epochs=2, resume=True, **where)
    assert (done.ended, done.step) == ("finished", 10)
    for file in (tmp_path / "10" / "state").rglob("*"):
        if file.is_file():
            file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(training.CheckpointError, match="10 is damaged"):
        fitting.fit("linen", "adam", epochs=3, resume=True, **where)


def test_batches_that_come_once_are_refused_where_they_are_needed_again():
    once = itertools.cycle(fitting.batches(1))
    with pytest.raises(ValueError, match="an iterator is read once"):
        fitting.fit("linen", "svrg", steps=5, train_data=once)
    with pytest.raises(ValueError, match="only once"):
        linear_fit(train_data=fitting.all_batches(1), epochs=2)
