"""What is kept when: going back, signals, errors, folders, managers, iterators, and other data."""

import asyncio
import gc
import os
import pathlib
import runpy
import signal
import subprocess
import sys
import weakref

import fitting
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
import support
from fitting import BATCH, data, linear_fit, linear_loss
from processes import xla_flags

import optperm
from optperm import training
from optperm.training import steps as compiled_steps

ROOT = pathlib.Path(__file__).parents[2]


def kept(folder):
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdecimal())


def test_going_back_overwrites_what_came_after(tmp_path):
    """With a smaller rate; the new branch is the one that is gone on with."""
    where = {"checkpoints": tmp_path, "checkpoint_every": 8}
    linear_fit(steps=32, **where)
    assert kept(tmp_path) == [8, 16, 24, 32]
    slower = optax.adam(1e-3)
    back = linear_fit(tx=slower, steps=16, resume=8, **where)
    assert kept(tmp_path) == [8, 16]
    on = linear_fit(tx=slower, steps=24, resume=True, **where)
    np.testing.assert_array_equal(on.history.steps["loss"][:16], back.history.steps["loss"])
    # Nothing is lost before the new branch has something to show.
    with pytest.raises(ZeroDivisionError):
        linear_fit(lambda params, batch: 1 / 0, steps=24, resume=8, **where)
    assert kept(tmp_path) == [8, 16, 24]


def test_new_checkpoints_stay_after_going_back(tmp_path):
    where = {"checkpoints": tmp_path, "checkpoint_every": 8}
    linear_fit(steps=32, **where)
    linear_fit(steps=17, checkpoint_keep=1, resume=8, **where)
    assert [path.name for path in tmp_path.iterdir()] == ["17"]


def test_a_checkpoint_is_of_its_moment(tmp_path, monkeypatch):
    """Orbax writes it while training goes on: what comes later is not in it."""
    write = ocp.JsonCheckpointHandler._save_fn

    async def late(self, *args):
        await asyncio.sleep(0.5)
        return await write(self, *args)

    monkeypatch.setattr(ocp.JsonCheckpointHandler, "_save_fn", late)
    linear_fit(steps=6, checkpoints=tmp_path, checkpoint_every=4)
    resumed = linear_fit(steps=10, checkpoints=tmp_path, resume=4)
    assert resumed.history.epochs["step"].tolist() == [5, 10]


@pytest.mark.parametrize("where", ["file/below", "gs://no-such-bucket-of-ours/x"])
def test_a_folder_that_cannot_be_written_is_found_before_the_first_step(where, tmp_path):
    (tmp_path / "file").write_text("")
    where = where if "://" in where else tmp_path / where
    seen = []
    with pytest.raises(training.CheckpointError, match="cannot write checkpoints to"):
        linear_fit(steps=9, checkpoints=where, every={1: seen.append})
    assert not seen


def test_the_result_is_not_lost_with_the_folder(tmp_path, monkeypatch):
    """It fills up, say, while the last checkpoint is written."""

    def save(*args, **kwargs):
        raise OSError("no space left on device")

    whole = linear_fit(steps=9)
    monkeypatch.setattr(ocp.CheckpointManager, "save", save)
    with pytest.raises(training.CheckpointError, match="no space left") as caught:
        linear_fit(steps=9, checkpoints=tmp_path)
    support.assert_same_bits(caught.value.result.state.params, whole.state.params)
    with pytest.raises(training.CheckpointError, match="no space left") as caught:
        linear_fit(steps=9, checkpoints=tmp_path, checkpoint_every=4)
    assert caught.value.result.step == 4


def failing_callback():
    def fail(event):
        if event.step == 7:
            raise ZeroDivisionError("a callback")

    return {"every": {1: fail}}


def failing_loader():
    def batches(epoch):
        yield from fitting.batches(epoch)
        if epoch == 2:
            raise ZeroDivisionError("a loader")

    return {
        "train_data": lambda epoch: list(fitting.batches(1))[:2] if epoch > 2 else batches(epoch)
    }


def failing_loss():
    """It is traced anew for a batch of another size."""

    def batches(epoch):
        yield from fitting.batches(epoch)
        if epoch == 2:
            yield {name: leaf[:3] for name, leaf in data().items()}

    return {"train_data": batches}


@pytest.mark.parametrize(
    ("kind", "options", "step"),
    [("nnx", failing_callback, 7), ("linen", failing_loader, 10), ("nnx", failing_loss, 10)],
)
def test_an_error_leaves_what_has_been_trained(kind, options, step, tmp_path):
    """In the folder, and in a model of nnx."""
    options = options()
    positional, keywords = fitting.subject(kind, fitting.method("adam"))
    train_data = options.pop("train_data", data())
    batch = {"batch_size": BATCH} if train_data is data() else {}

    def nnx_loss(model, batch):
        if batch["x"].shape[0] == 3:
            raise ZeroDivisionError("a loss")
        return fitting.nnx_loss(model, batch)

    loss_fn = nnx_loss if kind == "nnx" else fitting.linen_loss

    with pytest.raises(ZeroDivisionError):
        training.fit(
            *positional,
            loss_fn,
            train_data,
            epochs=3,
            checkpoints=tmp_path,
            **keywords,
            **batch,
            **options,
        )
    assert kept(tmp_path) == [step]
    if kind == "nnx":
        whole = fitting.fit(kind, "adam", steps=step)
        np.testing.assert_allclose(
            positional[0].out.kernel.get_value(), whole.model.out.kernel.get_value(), rtol=1e-6
        )
        assert int(keywords["optimizer"].step.get_value()) == step


def endless(epoch):
    yield from (batch for _ in range(10**9) for batch in fitting.all_batches(1))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("train_data", [None, endless])
def test_a_signal_saves_and_ends(number, train_data, tmp_path):
    def interrupt(event):
        if event.step == 3:
            signal.raise_signal(number)

    before = signal.getsignal(number)
    where = {"checkpoints": tmp_path, "every": {1: interrupt}}
    result = linear_fit(train_data=train_data, epochs=10**6, **where)
    assert (result.ended, result.step, kept(tmp_path)) == ("interrupted", 3, [3])
    assert signal.getsignal(number) is before


def test_a_second_ctrl_c_stops_at_once():
    def interrupt(event):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        linear_fit(epochs=1, every={1: interrupt})


@pytest.mark.exhaustive
def test_a_program_ends_within_a_call_of_steps(tmp_path):
    """Whose signal comes while the compiled steps run: it saves, and ends as it should."""
    code = """
import sys, time
import fitting
def wait(event):
    print(event.step, flush=True)
result = fitting.fit("linen", "adam", epochs=10**6, checkpoints=sys.argv[1], every={5: wait})
print(result.ended, result.step)
"""
    command = [sys.executable, "-c", code, str(tmp_path)]
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": paths}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as program:
        program.stdout.readline()
        program.send_signal(signal.SIGTERM)
        said = program.stdout.read().split()
    assert program.returncode == 0
    assert said[-2] == "interrupted"
    assert kept(tmp_path) == [int(said[-1])]


def test_other_data_of_the_same_shape_are_refused(tmp_path):
    linear_fit(steps=3, checkpoints=tmp_path)
    other = {name: leaf[::-1].copy() for name, leaf in data().items()}
    with pytest.raises(ValueError, match="of another run: the digest of train_data is"):
        linear_fit(train_data=other, batch_size=BATCH, steps=6, checkpoints=tmp_path, resume=True)


def test_numbers_may_be_numpys(tmp_path):
    count = np.int64(4)
    result = linear_fit(
        steps=count,
        batch_size=np.int64(BATCH),
        seed=np.int64(1),
        checkpoints=tmp_path,
        checkpoint_every=count,
        checkpoint_keep=count,
        steps_per_call=count,
        every={count: print},
    )
    again = linear_fit(steps=8, seed=1, checkpoints=tmp_path, resume=count)
    assert (result.step, again.step) == (4, 8)


def test_a_manager_of_the_user_decides(tmp_path):
    """When to save, what to keep, and which are best."""
    options = ocp.CheckpointManagerOptions(save_interval_steps=4, max_to_keep=2)
    with ocp.CheckpointManager(tmp_path, options=options) as manager:
        whole = linear_fit(epochs=3, checkpoints=manager)
        assert manager.all_steps() == [12, 15]
        resumed = linear_fit(epochs=3, checkpoints=manager, resume=12)
        assert manager.all_steps() == [12, 15]
        for options in ({"checkpoint_every": 3}, {"checkpoint_keep": 3}):
            with pytest.raises(ValueError, match="are for a folder"):
                linear_fit(epochs=3, checkpoints=manager, **options)
        history = manager.restore(15, args=ocp.args.Composite(history=ocp.args.StandardRestore()))
    support.assert_same_bits(resumed.state.params, whole.state.params)
    # All rows so far are one binary item.
    rows = np.asarray(history["history"]["steps"])
    assert rows.dtype == np.float32
    np.testing.assert_array_equal(rows[0], whole.history.steps["loss"])


def test_the_history_is_small_on_disk(tmp_path):
    result = linear_fit(epochs=1)
    rows = {"loss": np.random.default_rng(0).random(100_000).astype(np.float32)}
    result.history.add_steps(rows)
    linear = training.fit(
        result, linear_loss, data(), epochs=2, batch_size=BATCH, checkpoints=tmp_path
    )
    assert linear.history.num_steps == 100_010
    size = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    assert size < 550_000  # 4 bytes a number, where JSON took 20


def test_a_state_is_gone_on_with_on_other_devices(tmp_path):
    """From one to four, and from four to two: to rounding."""
    whole = linear_fit(epochs=4)
    linear_fit(epochs=2, checkpoints=tmp_path)
    linear_fit(epochs=3, checkpoints=tmp_path, resume=True, devices=4)
    resumed = linear_fit(epochs=4, checkpoints=tmp_path, resume=True, devices=2)
    np.testing.assert_allclose(
        np.asarray(resumed.state.params["w"]),
        np.asarray(whole.state.params["w"]),
        rtol=1e-6,
        atol=1e-7,
    )
    np.testing.assert_allclose(
        resumed.history.steps["loss"], whole.history.steps["loss"], rtol=1e-6
    )


class Counting:
    """An endless iterator of batches that knows where it is, as Grain's do."""

    def __init__(self, *, kind=dict):
        self.at, self.kind = 0, kind

    def __iter__(self):
        return self

    def __next__(self):
        self.at += 1
        rng = np.random.default_rng(self.at)
        hand = rng.integers(0, fitting.EXAMPLES, BATCH)
        return {name: leaf[hand] for name, leaf in data().items()}

    def get_state(self):
        return str(self.at).encode() if self.kind is bytes else {"at": np.int64(self.at)}

    def set_state(self, state):
        self.at = int(state) if self.kind is bytes else state["at"]


@pytest.mark.parametrize("kind", [bytes, dict])
def test_an_iterator_with_a_state_is_put_where_it_was(kind, tmp_path):
    whole = linear_fit(train_data=Counting(), steps=20)
    linear_fit(train_data=Counting(kind=kind), steps=9, checkpoints=tmp_path)
    iterator = Counting(kind=kind)
    resumed = linear_fit(train_data=iterator, steps=20, checkpoints=tmp_path, resume=True)
    support.assert_same_bits(resumed.state.params, whole.state.params)
    assert iterator.at == 20


def test_no_batch_is_lost_between_two_fits():
    """Of an iterator that never ends and cannot go back."""

    def endless():
        source = Counting()
        for batch in iter(source.__next__, None):
            taken.append(source.at)
            yield batch

    taken = []
    whole = linear_fit(train_data=endless(), steps=20, devices=4)
    assert taken == list(range(1, 21))
    taken, batches = [], endless()
    part = linear_fit(train_data=batches, steps=9, devices=4)
    assert taken == list(range(1, 10))
    on = training.fit(part, linear_loss, batches, steps=20)
    assert taken == list(range(1, 21))
    support.assert_same_bits(
        *(jax.tree.map(np.asarray, result.state.params) for result in (on, whole))
    )


def test_an_epoch_that_ends_unseen_has_one_row(tmp_path):
    """Only one batch more would tell that it was over."""
    options = {"train_data": fitting.batches, "checkpoints": tmp_path}
    part = linear_fit(steps=5, **options)
    assert (part.step, part.epoch) == (5, 0)
    on = linear_fit(steps=10, resume=True, **options)
    assert on.history.epochs["step"].tolist() == [5, 10]
    assert on.history.epochs["epoch"].tolist() == [1, 2]


@pytest.mark.parametrize("name", ["loss", "epoch", "step", "seconds", "share_moved", "eval_loss"])
def test_metrics_do_not_take_the_columns_of_the_loop(name):
    def loss_fn(params, batch):
        return linear_loss(params, batch), {name: jnp.float32(99.0)}

    with pytest.raises(ValueError, match=f"a metric named '{name}', which is a column"):
        linear_fit(loss_fn, steps=3, has_aux=True)


def test_events_come_at_their_steps():
    """Whatever the calls; with the means since the event before, the state and an evaluation of then."""
    seen, later = [], []

    def note(event):
        seen.append((event.step, event.metrics["loss"], event.evaluate()["loss"]))
        assert int(event.state.step) == event.step

    def stop(event):
        return event.step == 12

    options = {"eval_fn": lambda params, batch: {"loss": linear_loss(params, batch)}}
    result = linear_fit(
        epochs=9,
        steps_per_call=5,
        every={1: later.append, 3: note, 4: [print, stop]},
        eval_data=data(),
        **options,
    )
    assert (result.ended, result.step) == ("stopped", 12)
    losses = result.history.steps["loss"]
    assert [step for step, _, _ in seen] == [3, 6, 9, 12]
    np.testing.assert_array_equal([event.metrics["loss"] for event in later], losses)
    for step, mean, _ in seen:
        np.testing.assert_allclose(mean, losses[step - 3 : step].mean(), rtol=1e-6)
    exact = linear_loss(result.state.params, data())
    np.testing.assert_allclose(seen[-1][2], exact, rtol=1e-5)
    with pytest.raises(ValueError, match="nothing to evaluate"):
        linear_fit(steps=1, every={1: lambda event: event.evaluate() and None})


def test_records_go_to_any_writer():
    class Clu:
        def write_scalars(self, step, scalars):
            rows.append((step, scalars))

    class Board:
        def add_scalar(self, name, value, step):
            rows.append((step, {name: value}))

    for writer in (Clu(), Board()):
        rows = []
        write = training.metrics_writer(writer)
        result = linear_fit(epochs=1, every={5: write}, on_epoch_end=write)
        assert rows[0] == (5, {"loss": result.history.means(5)["loss"]})
        assert rows[1][0] == 5
    with pytest.raises(TypeError, match="got int"):
        training.metrics_writer(3)


def test_epoch_start_takes_the_change_itself():
    tx = fitting.method("svrg")
    change = linear_fit(tx=tx, epochs=3, epoch_start=optperm.take_snapshot)
    by_epoch = linear_fit(tx=tx, epochs=3, epoch_start=lambda epoch: optperm.take_snapshot)
    support.assert_same_bits(change.state.params, by_epoch.state.params)
    never = linear_fit(tx=tx, epochs=3, epoch_start=lambda epoch: None)
    assert np.any(never.state.params["w"] != change.state.params["w"])


def test_loss_functions_are_compiled_once_and_then_let_go():
    traced = []

    def loss_of(scale):
        weights = jnp.full((1000,), scale, jnp.float32)

        def loss_fn(params, batch):
            traced.append(scale)
            return linear_loss(params, batch) * weights[0]

        return loss_fn, weakref.ref(weights)

    tx, alive = fitting.method("adam"), []
    for scale in (1.0, 2.0, 3.0):
        loss_fn, ref = loss_of(scale)
        results = [linear_fit(loss_fn, tx=tx, steps=3) for _ in range(3)]
        assert traced.count(scale) == traced.count(1.0)
        alive.append(ref)
        del loss_fn
    gc.collect()
    assert len(traced) == 3 * traced.count(1.0)
    assert [ref() for ref in alive] == [None] * 3
    assert results[0].step == 3
    assert all(loss is not None for loss in compiled_steps._MADE)


def test_settings_of_jax_are_seen():
    """A program that was compiled under others is not taken for theirs."""

    def loss_fn(params, batch):
        return linear_loss(params, batch) + jax.random.normal(jax.random.key(3))

    def first():
        return linear_fit(loss_fn, steps=1).history.steps["loss"][0]

    def drawn():
        return jax.random.normal(jax.random.key(3))

    one, before = first(), drawn()
    with jax.threefry_partitionable(False):
        np.testing.assert_allclose(first() - one, drawn() - before, rtol=1e-5)


@pytest.mark.programs
def test_a_run_that_is_killed_goes_on_bit_for_bit(monkeypatch, capsys):
    """The short form of `benchmarks/kills.py`, whose programs are processes of their own."""
    flags = "--epochs 2 --seconds 3 --devices 2 --kills 1"
    monkeypatch.setattr(sys, "argv", ["kills.py", *flags.split()])
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
    monkeypatch.setenv("XLA_FLAGS", xla_flags())
    monkeypatch.setattr(jax.config, "update", lambda name, value: None)  # it has devices here
    runpy.run_path(str(ROOT / "benchmarks" / "kills.py"))["main"]()
    assert "the same bits: True" in capsys.readouterr().out
