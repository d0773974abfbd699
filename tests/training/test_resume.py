"""A run that is interrupted and resumed is the uninterrupted one, to the bit; what is refused."""

import functools
import itertools
import json
import os
import signal
import sys
import threading
import time
from typing import NamedTuple

import chex
import fitting
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import support
from fitting import ACCURACY, BATCH, DATA, EVALUATION, linear_fit, linear_loss

import optperm
from optperm import training
from optperm.core.fingerprints import UNSET
from optperm.core.transformation import transformation


def kept(folder):
    """The steps of the checkpoints in a folder."""
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdecimal())


def rows_of(result):
    """The rows of the epochs, without how long they took."""
    return {name: list(rows) for name, rows in result.history.epochs.items() if name != "seconds"}


class Positioned:
    """The batches of an epoch, by an iterator that can say and be told where it is, as Grain's."""

    def __init__(self, epoch, kind, taken):
        self.batches, self.at, self.kind, self.taken = list(fitting.batches(epoch)), 0, kind, taken

    def __iter__(self):
        return self

    def __next__(self):
        if self.at == len(self.batches):
            raise StopIteration
        self.at += 1
        self.taken.append(self.at)
        return self.batches[self.at - 1]

    def get_state(self):
        return json.dumps(self.at).encode() if self.kind == "bytes" else {"at": np.int64(self.at)}

    def set_state(self, state):
        self.at = json.loads(state) if self.kind == "bytes" else state["at"]


def feed_of(name, taken):
    feeds = {"arrays": DATA, "batches": fitting.batches}
    return feeds.get(name, lambda epoch: Positioned(epoch, name, taken))


def at_seven(act):
    """A callback that acts at step 7, within the second epoch."""
    return {"every": {1: lambda event: act() if event.step == 7 else None}}


def fail(*_):
    raise ZeroDivisionError("it failed")


def interrupt(*_):
    signal.raise_signal(signal.SIGINT)


def terminate(*_):
    signal.raise_signal(signal.SIGTERM)


def failing_loader(epoch):
    """Fails in the second epoch, once two batches were taken."""
    for count, batch in enumerate(fitting.batches(epoch)):
        yield fail() if (epoch, count) == (2, 2) else batch


def failing_evaluation(epoch):
    return {"eval_data": lambda now: fail() if now == epoch else [DATA]}


# What interrupts a run, how the run ends, and after which step.
INTERRUPTIONS = {
    "steps": ({"steps": 7}, "finished", 7),
    "callback": (at_seven(lambda: True), "stopped", 7),
    "SIGTERM": ({"on_signal": "return", **at_seven(terminate)}, "interrupted", 7),
    "SIGINT": (at_seven(interrupt), KeyboardInterrupt, 7),
    "exit": (at_seven(sys.exit), SystemExit, 7),
    "error of a callback": (at_seven(fail), ZeroDivisionError, 7),
    "error of the loader": ({"train_data": failing_loader}, ZeroDivisionError, 7),
}
# Kind of model, method, feed, devices, and what interrupts. Each value of each occurs.
RUNS = [
    pytest.param("linen", "adam", "arrays", None, "steps", marks=pytest.mark.exhaustive),
    *support.every_night(
        [
            ("linear", "adam", "arrays", None, each)
            for each in INTERRUPTIONS
            if each not in ("steps", "error of the loader")
        ],
        [("linear", "adam", "arrays", None, each) for each in ("callback", "SIGTERM", "SIGINT")],
    ),
    ("linear", "adam", "batches", None, "error of the loader"),
    ("linear", "adam", "json", None, "steps"),
    ("nnx", "adam", "bytes", None, "steps"),
    pytest.param("nnx", "svrg", "batches", 4, "steps", marks=pytest.mark.slow),
    pytest.param("linen", "agn", "arrays", 4, "SIGTERM", marks=pytest.mark.slow),
    pytest.param("linen", "dldr", "arrays", None, "callback", marks=pytest.mark.slow),
    pytest.param("linen", "mandt_sgd", "arrays", 4, "steps", marks=pytest.mark.slow),
]


def linear_accuracy(params, batch):
    return fitting.accuracy(batch["x"] @ params["w"], batch["y"])


def run(kind, name, devices, **options):
    """Train for 15 steps in three epochs, with an evaluation."""
    eval_fn = ACCURACY.get(kind, linear_accuracy)
    options = {"eval_fn": eval_fn, "eval_data": lambda epoch: [DATA], "epochs": 3, **options}
    options |= {"keep_best": ("eval_accuracy", "max")}
    if kind == "linear":
        return linear_fit(tx=fitting.method(name), rng=jax.random.key(1), **options)
    return fitting.fit(kind, name, devices=devices, **options)


@functools.cache
def uninterrupted(kind, name, feed, devices):
    """A run whose calls of steps begin and end elsewhere."""
    return run(kind, name, devices, train_data=feed_of(feed, []), every={4: lambda event: None})


@pytest.mark.parametrize(("kind", "name", "feed", "devices", "interruption"), RUNS)
def test_run_that_is_interrupted_and_resumed_is_the_uninterrupted_one(
    kind, name, feed, devices, interruption, tmp_path
):
    """No step, row, evaluation or batch is lost or made twice, and signals get their handlers back."""
    whole, taken = uninterrupted(kind, name, feed, devices), []
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    options = {"train_data": feed_of(feed, taken), "checkpoints": tmp_path}
    changed, expected, step = INTERRUPTIONS[interruption]
    try:
        ended = run(kind, name, devices, **{**options, **changed}).ended
    except (KeyboardInterrupt, SystemExit, ZeroDivisionError) as error:
        ended = type(error)
    assert (ended, kept(tmp_path)) == (expected, [step])
    taken.clear()
    resumed = run(kind, name, devices, resume=True, **options)
    # An iterator that knows where it is gives no batch twice.
    assert taken == ([3, 4, 5, 1, 2, 3, 4, 5] if feed in ("json", "bytes") else [])
    support.assert_same_bits(fitting.arrays(resumed), fitting.arrays(whole))
    support.assert_same_bits(resumed.history.steps, whole.history.steps)
    assert rows_of(resumed) == rows_of(whole)
    assert resumed.best_step == whole.best_step
    best = [fitting.params_of(result.best_state) for result in (resumed, whole)]
    support.assert_same_bits(*best)
    assert handlers == [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]


def test_tasks_that_an_error_prevented_are_left_out_when_training_resumes(tmp_path):
    """The checkpoint is of the last whole step, and training continues with the next step."""

    calls = []

    def noting(kind, fails_at=None):
        def note(event):
            calls.append((kind, event.step, event.history.last.get("step")))
            return fail() if event.step == fails_at else None

        return note

    whole = linear_fit(epochs=3, **EVALUATION)
    for name, failing, rows in (
        ("evaluation", failing_evaluation(2), [5, 15]),
        ("callback", {"every": {5: noting("every", 10)}}, [5, 10, 15]),
    ):
        usual = {"epochs": 3, "checkpoints": tmp_path / name, "checkpoint_every": 5, **EVALUATION}
        usual |= {"on_epoch_end": noting("end"), "every": {5: noting("every")}}
        with pytest.raises(ZeroDivisionError):
            linear_fit(**{**usual, **failing})
        assert calls[:2] == [("every", 5, 5), ("end", 5, 5)]
        calls.clear()
        resumed = linear_fit(resume=True, **usual)
        assert calls == [("every", 15, 15), ("end", 15, 15)]
        assert rows_of(resumed)["step"] == rows
        support.assert_same_bits(resumed.history.steps, whole.history.steps)
        support.assert_same_bits(resumed.state.params, whole.state.params)
        calls.clear()


def test_checkpoint_within_an_epoch_has_no_row_of_this_part(tmp_path):
    """The result has the row; a resumed run has only the row of the epoch."""
    for steps in (7, 7, 9):
        part = linear_fit(steps=steps, checkpoints=tmp_path, resume=True)
        assert rows_of(part)["step"] == [5, steps]
    assert rows_of(linear_fit(epochs=2, checkpoints=tmp_path, resume=True))["step"] == [5, 10]


@pytest.mark.slow
def test_epoch_of_a_stream_that_ends_unseen_has_one_row(tmp_path):
    """Only one batch more would tell that it was over."""
    options = {"train_data": fitting.batches, "checkpoints": tmp_path}
    part = linear_fit(steps=5, **options)
    assert (part.step, part.epoch) == (5, 0)
    on = linear_fit(steps=10, resume=True, **options)
    assert (rows_of(on)["step"], rows_of(on)["epoch"]) == ([5, 10], [1, 2])


@pytest.mark.slow
def test_error_leaves_what_was_trained_in_a_model_of_nnx(tmp_path):
    """The loss function fails where it is traced again, for a batch of another size."""

    def load(epoch):
        yield from fitting.batches(epoch)
        yield {name: leaf[:3] for name, leaf in DATA.items()}

    def loss_fn(model, batch):
        return fail() if batch["x"].shape[0] == 3 else fitting.nnx_loss(model, batch)

    (model,), keywords = fitting.subject("nnx", fitting.method("adam"))
    with pytest.raises(ZeroDivisionError):
        training.fit(
            model, loss_fn, load, epochs=3, checkpoints=training.Checkpoints(tmp_path), **keywords
        )
    assert kept(tmp_path) == [5]
    whole = fitting.fit("nnx", "adam", steps=5).model
    kernels = [each.out.kernel.get_value() for each in (model, whole)]
    np.testing.assert_allclose(*kernels, rtol=1e-6)
    assert int(keywords["optimizer"].step.get_value()) == 5


def test_endless_stream_stops_at_a_signal(tmp_path):
    options = {"checkpoints": tmp_path, "on_signal": "return", "every": {3: terminate}}
    result = linear_fit(train_data=itertools.cycle(fitting.batches(1)), steps=10**9, **options)
    assert (result.ended, result.step, kept(tmp_path)) == ("interrupted", 3, [3])


def test_second_ctrl_c_before_the_end_of_a_step_is_an_interrupt():
    with pytest.raises(KeyboardInterrupt):
        linear_fit(epochs=1, every={1: [interrupt, interrupt]})


@pytest.mark.programs
def test_second_ctrl_c_within_a_call_of_steps_takes_effect_at_once():
    """Python handles signals during the second step, which takes seconds."""
    sent = []

    def loss_fn(params, batch):
        x = jnp.full((300, 300), jax.lax.stop_gradient(params["w"][0, 0]))
        worked = jax.lax.fori_loop(0, 1500, lambda _, x: jnp.sin(x @ x), x)
        return linear_loss(params, batch) + 0 * worked.mean()

    def interrupt_twice():
        for _ in range(2):
            time.sleep(0.2)
            sent.append(time.monotonic())
            os.kill(os.getpid(), signal.SIGINT)

    begin = {1: lambda _: threading.Thread(target=interrupt_twice).start()}
    with pytest.raises(KeyboardInterrupt):
        linear_fit(loss_fn, steps=2, every=begin)
    assert time.monotonic() - sent[1] < 0.5


def test_signal_comes_again_after_the_checkpoint(tmp_path, capfd):
    """By default: to the handler that was there before, once everything is kept, and with a line."""
    came = []
    previous = signal.signal(signal.SIGTERM, lambda number, frame: came.append(kept(tmp_path)))
    try:
        result = linear_fit(steps=20, checkpoints=tmp_path, every={4: terminate})
        assert (result.ended, came) == ("interrupted", [[4]])
        assert capfd.readouterr().err.splitlines() == [
            "SIGTERM: stopping after the running steps.",
            f"fit was interrupted by SIGTERM after step 4, saved in {tmp_path}.",
        ]
        # One that comes in the last step changes nothing in the result, and comes again as well.
        last = {"steps": 8, "every": {8: terminate}}
        assert linear_fit(checkpoints=tmp_path, resume=True, **last).ended == "finished"
        assert came == [[4], [4, 8]]
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        assert linear_fit(**last).ended == "finished"
        assert len(came) == 2
    finally:
        signal.signal(signal.SIGTERM, previous)


def test_run_that_goes_back_overwrites_what_came_after(tmp_path):
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


@pytest.mark.slow
def test_run_on_other_devices_is_resumed_to_rounding(tmp_path):
    """From one to four and from four to two."""
    whole = linear_fit(epochs=3)
    linear_fit(epochs=1, checkpoints=tmp_path)
    linear_fit(epochs=2, checkpoints=tmp_path, resume=True, **fitting.on(4))
    resumed = linear_fit(epochs=3, checkpoints=tmp_path, resume=True, **fitting.on(2))
    chex.assert_trees_all_close(resumed.history.steps, whole.history.steps, rtol=1e-6, atol=1e-7)
    chex.assert_trees_all_close(resumed.state.params, whole.state.params, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("there", "here"), [pytest.param(4, 2, marks=pytest.mark.slow), (2, 4)])
def test_another_number_of_replicas_takes_the_saved_states_in_turn(there, here, tmp_path):
    """From the middle of a period, where each replica has params of its own."""
    tx = optperm.agn(optax.sgd(0.1), every=3, axis_name="replica")
    with fitting.runs() as made:
        linear_fit(tx=tx, steps=5, checkpoints=tmp_path, **fitting.on(there, mapped=True))
        on = {"checkpoints": tmp_path, "resume": True, **fitting.on(here, mapped=True)}
        linear_fit(tx=tx, steps=5, **on)
    saved, dealt = (jax.device_get((run.carry.params, run.carry.opt_state)) for run in made)
    in_turn = jax.tree.map(lambda leaf: leaf[np.arange(here) % there], saved)
    support.assert_same_bits(dealt, in_turn)
    assert len(np.unique(saved[0]["w"], axis=0)) == there
    assert linear_fit(tx=tx, steps=7, **on).history.num_steps == 7


def loss_with_aux(params, batch):
    loss = linear_loss(params, batch)
    return loss, {"half": loss / 2}


@pytest.mark.parametrize("is_dropped", support.every_night([True, False], [True]))
def test_metric_that_comes_or_goes_in_a_resumed_run_is_nan_where_it_lacks(is_dropped, tmp_path):
    """So is the mean over an epoch with both kinds of steps."""
    phases = [(loss_with_aux, True), (linear_loss, False)]
    (first, aux), (then, later_aux) = phases if is_dropped else phases[::-1]
    seen = []
    linear_fit(first, steps=7, has_aux=aux, checkpoints=tmp_path)
    options = {"has_aux": later_aux, "every": {1: seen.append}, "checkpoints": tmp_path}
    on = linear_fit(then, epochs=3, resume=True, **options)
    half = on.history.steps["loss"] / 2
    half[slice(7, None) if is_dropped else slice(7)] = np.nan
    np.testing.assert_array_equal(on.history.steps["half"], half)
    assert all(("half" in event.metrics) != is_dropped for event in seen)
    expected = half.reshape(3, 5).mean(axis=1)
    np.testing.assert_allclose(on.history.epochs["half"], expected, rtol=1e-6)


@pytest.mark.parametrize("cut", support.every_night([6, 7], [7]))
def test_best_state_of_a_part_of_an_epoch_is_dropped_with_its_row(cut, tmp_path):
    """Within the second epoch the evaluation is better than at any end of an epoch."""

    def loss_fn(params, batch):
        return -jnp.sum(params["w"]) * jnp.mean(batch["x"])

    def eval_fn(params, batch):
        return {"loss": jnp.abs(jnp.sum(params["w"]) - 9.0)}

    batches = [{"x": np.full((1, 1), value, np.float32)} for value in (1, 3, 5, 2, 4)]
    options = {"eval_fn": eval_fn, "eval_data": batches[:1], "keep_best": "eval_loss"}
    options |= {"tx": optax.sgd(0.5), "params": {"w": jnp.zeros(1)}, "checkpoints": tmp_path}
    run = functools.partial(linear_fit, loss_fn, batches, **options)
    assert run(steps=cut).best_step == cut
    resumed = run(epochs=3, resume=True)
    assert (resumed.best_step, float(resumed.best_state.params["w"][0])) == (5, 7.5)


def test_checkpoint_of_another_run_is_refused(tmp_path):
    where = {"checkpoints": tmp_path, "checkpoint_every": 5}
    linear_fit(epochs=2, checkpoint_keep=1, **where)
    assert kept(tmp_path) == [10]
    others = {name: leaf[::-1].copy() for name, leaf in DATA.items()}
    for options, says in [
        ({"resume": False}, "contains checkpoints of an earlier run"),
        ({"resume": 4}, r"resume=4, but .* has checkpoints of steps \[10\]"),
        ({"resume": 4, "checkpoints": tmp_path / "empty"}, "resume=4, but .* has no checkpoints"),
        ({"key": 1}, r"belongs to another run: key is \[0, 0\] there and \[0, 1\] here\."),
        ({"batch_size": 4}, "batch_size is 8 there and 4 here"),
        ({"train_data": others, "batch_size": BATCH}, "the digest of data is"),
        ({"train_data": fitting.batches}, "an iterable of batches"),
        (
            {"tx": optax.sgd(0.1)},
            r"another optimizer or model: \.opt_state\[0\]\.count is int32\(\) there and missing here;",
        ),
        ({"tx": optax.adamw(0.1)}, r"model: \.opt_state\[2\] is missing there and empty here\.$"),
        (
            {"params": {"w": jnp.ones((5, 2)), "v": jnp.ones(3)}},
            r"\.params\['w'\] is float32\(5, 3\) there and float32\(5, 2\) here; .*; and \d+ more\.$",
        ),
        (
            {"keep_best": "eval_loss", **EVALUATION},
            r"keep_best is None there and \['eval_loss', 'min'\]",
        ),
    ]:
        with pytest.raises(ValueError, match=says):
            linear_fit(epochs=3, **{"resume": True, **where, **options})
    with pytest.raises(ValueError, match="the kind of model is linen there and nnx here"):
        fitting.fit("nnx", "adam", epochs=3, resume=True, **where)
    done = linear_fit(epochs=2, resume=True, **where)
    assert (done.ended, done.step) == ("finished", 10)


class Shaped(NamedTuple):
    scores: dict[str, jax.Array] | None
    fingerprint: jax.Array = UNSET

    def shaped_by(self):
        return "axes", "criterion"


def shaped(axes=0, criterion="magnitude", rate=0.1):
    """Steps of SGD with a state whose arrays depend on the criterion, but not on the axes."""

    def init(params) -> Shaped:
        has_scores = criterion == "movement"
        return Shaped(jax.tree.map(jnp.zeros_like, params) if has_scores else None)

    def update(updates, state, params, **extra_args):
        return jax.tree.map(lambda g: -rate * g, updates), state

    arguments = lambda params: {"axes": axes, "criterion": criterion}  # noqa: E731
    return transformation(init, update, method="shaped", shape_arguments=arguments)


@pytest.mark.parametrize("mapped", support.every_night([False, True], [False]))
def test_run_with_other_arguments_that_shape_the_state_is_refused_by_their_names(mapped, tmp_path):
    """Also where the arrays differ as well; a learning rate may change."""

    def run(steps, resume=False, **arguments):
        tx = shaped(**arguments)
        tx = optperm.diloco(tx, optax.sgd(1.0), every=1, axis_name="replica") if mapped else tx
        where = fitting.on(2, mapped=True) if mapped else {}
        return linear_fit(tx=tx, steps=steps, checkpoints=tmp_path, resume=resume, **where)

    run(2)
    for arguments, name in [({"axes": 1}, "axes"), ({"criterion": "movement"}, "criterion")]:
        with pytest.raises(ValueError, match=f"was made with another {name}= of the optimizer"):
            run(4, resume=True, **arguments)
    assert run(4, resume=True, rate=0.2).step == 4


@pytest.mark.parametrize("every", support.every_night([4, None], [4]))
def test_damaged_checkpoint_is_refused_with_the_steps_of_others(every, tmp_path):
    linear_fit(epochs=2, checkpoints=tmp_path, checkpoint_every=every)
    for file in (tmp_path / "10" / "state").rglob("*"):
        if file.is_file():
            file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(training.CheckpointError, match="10 is damaged") as caught:
        linear_fit(epochs=3, checkpoints=tmp_path, resume=True)
    advice = "Pass resume=STEP for another checkpoint, of the steps [4, 8]."
    assert str(caught.value).endswith(advice) == (every == 4)
    assert ("resume=" in str(caught.value)) == (every == 4)


class Preempting:
    """Yield batches, one of them with a SIGTERM, and count the batches that are taken."""

    def __init__(self, batches, at):
        self.batches, self.at, self.taken = batches, at, 0

    def __iter__(self):
        for batch in self.batches:
            self.taken += 1
            if self.taken == self.at:
                signal.raise_signal(signal.SIGTERM)
            yield batch


TASKS = {
    # The batch with the signal, and the number of steps until then.
    "row": (3, 5),
    "callback": (3, 2),
    "end within an epoch": (8, 8),
    "full gradient": (13, 5),
    "first full gradient": (3, 0),
}


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    "task", support.every_night(TASKS, ["row", "callback", "first full gradient"])
)
def test_signal_is_heard_within_one_batch_of_an_evaluation_or_a_full_gradient(task, tmp_path):
    """The task is cut off and still due; the resumed run is the uninterrupted one."""
    batches, calls = list(fitting.batches(1)), []
    has_gradient = task.endswith("full gradient")
    tx = fitting.method("svrg" if has_gradient else "adam")
    options = {"eval_fn": EVALUATION["eval_fn"], "checkpoints": tmp_path, "on_signal": "return"}
    options |= {"steps": 8} if task == "end within an epoch" else {"epochs": 2}
    options |= {"on_epoch_end": lambda event: calls.append(event.step)}
    if task == "callback":
        options["every"] = {2: lambda event: event.evaluate() and calls.append(f"at {event.step}")}
    if has_gradient:
        options["epoch_start"] = optperm.variance.take_snapshot

    def train(preempted, folder, **more):
        own = Preempting(batches, TASKS[task][0] if preempted else 0)
        train_data = own if has_gradient else batches
        given = options | {"eval_data": batches if has_gradient else own}
        given |= {"checkpoints": folder} | more
        return own, linear_fit(train_data=train_data, tx=tx, **given)

    own, cut = train(True, tmp_path / "cut")
    assert (cut.ended, own.taken, cut.step) == ("interrupted", *TASKS[task])
    _, resumed = train(False, tmp_path / "cut", resume=True)
    ran, calls[:] = list(calls), []
    _, whole = train(False, tmp_path / "whole")
    assert resumed.ended == "finished"
    assert ran == calls
    assert rows_of(resumed) == rows_of(whole)
    support.assert_same_bits(resumed.state, whole.state)
