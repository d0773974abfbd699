"""Where checkpoints are written, what happens where they cannot be, and callbacks between steps."""

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

ROOT = pathlib.Path(__file__).parents[2]


def test_a_checkpoint_is_of_its_moment(tmp_path, monkeypatch):
    """Orbax writes it while training goes on: what comes later is not in it."""
    write = ocp.JsonCheckpointHandler._save_fn

    async def late(self, *args):
        await asyncio.sleep(0.2)
        return await write(self, *args)

    monkeypatch.setattr(ocp.JsonCheckpointHandler, "_save_fn", late)
    linear_fit(steps=6, checkpoints=tmp_path, checkpoint_every=4)
    resumed = linear_fit(steps=10, checkpoints=tmp_path, resume=4)
    assert resumed.history.epochs["step"].tolist() == [5, 10]


def test_a_folder_that_cannot_be_written_is_found_before_the_first_step(tmp_path):
    (tmp_path / "file").write_text("")
    seen = []
    for where in (tmp_path / "file" / "below", "gs://no-such-bucket-of-ours/x"):
        with pytest.raises(training.CheckpointError, match="cannot write checkpoints to"):
            linear_fit(steps=9, checkpoints=where, every={1: seen.append})
    assert not seen


def test_the_result_is_not_lost_with_the_folder(tmp_path, monkeypatch):
    """It fills up, say, while a checkpoint is written."""

    def save(*args, **kwargs):
        raise OSError("no space left on device")

    whole = linear_fit(steps=9)
    monkeypatch.setattr(ocp.CheckpointManager, "save", save)
    for options, step in (({}, 9), ({"checkpoint_every": 4}, 4)):
        with pytest.raises(training.CheckpointError, match="no space left") as caught:
            linear_fit(steps=9, checkpoints=tmp_path, **options)
        result = caught.value.result
        assert result.step == step
        if step == 9:
            support.assert_same_bits(result.state.params, whole.state.params)


def test_a_run_that_diverges_is_saved_before_it_is_said(tmp_path):
    """Where warnings are errors, as they are here."""
    with pytest.raises(RuntimeWarning, match="stopped being finite at step 1 of 3"):
        linear_fit(lambda *args: jnp.nan * linear_loss(*args), steps=3, checkpoints=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["3"]


@pytest.mark.programs
def test_a_program_ends_within_a_call_of_steps(tmp_path):
    """Whose signal comes while the compiled steps run: it saves and ends, and nothing after it runs."""
    code = """
import sys
import fitting
def wait(event):
    print(event.step, flush=True)
for seed in range(3):
    options = {"checkpoints": f"{sys.argv[1]}/{seed}", "every": {5: wait}, "key": seed}
    fitting.fit("linen", "adam", epochs=10**6, **options)
    print("trained")
"""
    command = [sys.executable, "-c", code, str(tmp_path)]
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": paths}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as program:
        program.stdout.readline()
        program.send_signal(signal.SIGTERM)
        assert "trained" not in program.stdout.read()
    assert program.returncode == -signal.SIGTERM
    assert [path.name for path in tmp_path.iterdir()] == ["0"]
    assert [path.name.isdecimal() for path in (tmp_path / "0").iterdir()] == [True]


def test_rows_are_small_on_disk(tmp_path):
    """One binary item of four bytes a number, which Orbax alone reads."""
    whole = linear_fit(epochs=3, checkpoints=tmp_path)
    with ocp.CheckpointManager(tmp_path) as manager:
        history = manager.restore(15, args=ocp.args.Composite(history=ocp.args.StandardRestore()))
    rows = np.asarray(history["history"]["steps"])
    assert rows.dtype == np.float32
    np.testing.assert_array_equal(rows[0], whole.history.steps["loss"])


def test_numbers_may_be_numpys(tmp_path):
    count = np.int64(4)
    keep = {"checkpoints": tmp_path, "checkpoint_every": count, "checkpoint_keep": count}
    options = {"steps_per_call": count, "batch_size": np.int64(BATCH), "every": {count: print}}
    assert linear_fit(steps=count, key=np.int64(1), **keep, **options).step == 4


def test_no_batch_of_an_iterator_is_taken_that_is_not_trained_on():
    """What is left stays in it for the next run."""
    taken = []

    def endless():
        for count, batch in enumerate(fitting.all_batches(10), 1):
            taken.append(count)
            yield batch

    batches = endless()
    first = linear_fit(train_data=batches, steps=9, **fitting.on(4))
    assert taken == [*range(1, 10)]
    second = training.fit(first.state, linear_loss, batches, steps=11, **fitting.on(4))
    assert taken == [*range(1, 21)]
    whole = linear_fit(train_data=endless(), steps=20, **fitting.on(4))
    for one, other in zip(
        jax.tree.leaves(second.state.params), jax.tree.leaves(whole.state.params), strict=True
    ):
        support.assert_same_bits(np.asarray(one), np.asarray(other))


def test_events_come_at_their_steps():
    """Whatever the calls; with the means since the event before, the state and an evaluation of then."""
    seen, later = [], []

    def note(event):
        seen.append((event.step, event.metrics["loss"], event.evaluate()["loss"]))
        assert int(event.state.step) == event.step

    result = linear_fit(
        epochs=9,
        steps_per_call=5,
        every={1: later.append, 3: note, 4: [print, lambda event: event.step == 12]},
        eval_data=data(),
        eval_fn=lambda params, batch: {"loss": linear_loss(params, batch)},
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


def test_epoch_start_takes_the_change_itself():
    tx = fitting.method("svrg")
    change = linear_fit(tx=tx, epochs=3, epoch_start=optperm.variance.take_snapshot)
    by_epoch = linear_fit(tx=tx, epochs=3, epoch_start=lambda epoch: optperm.variance.take_snapshot)
    support.assert_same_bits(change.state.params, by_epoch.state.params)
    never = linear_fit(tx=tx, epochs=3, epoch_start=lambda epoch: None)
    assert np.any(never.state.params["w"] != change.state.params["w"])


def test_a_later_run_sees_the_present_values_that_its_functions_read():
    """Of the loss, of the evaluation and of the change before an epoch, which are the same objects."""
    scale = {"value": 1.0}

    def loss_fn(params, batch):
        return scale["value"] * linear_loss(params, batch)

    def eval_fn(params, batch):
        return {"loss": loss_fn(params, batch)}

    def change(opt_state, params, full_gradient):
        return jax.tree.map(lambda leaf: leaf + scale["value"].astype(leaf.dtype), opt_state)

    tx, found = optax.sgd(0.1, momentum=0.9), []
    for value in (1.0, 2.0, 1.0):
        scale["value"] = np.float32(value)
        options = {"epoch_start": change, "eval_fn": eval_fn, "eval_data": data(), "epochs": 1}
        found.append(linear_fit(loss_fn, tx=tx, **options))
    first, other, again = (each.history for each in found)
    np.testing.assert_allclose(other.steps["loss"][0], 2 * first.steps["loss"][0], rtol=1e-6)
    support.assert_same_bits(first.steps, again.steps)
    assert first.epochs["eval_loss"] == again.epochs["eval_loss"] != other.epochs["eval_loss"]
    params = found[1].state.params
    np.testing.assert_allclose(other.epochs["eval_loss"], eval_fn(params, data())["loss"] * 2)
    moments = [optax.tree.get(each.state.opt_state, "trace")["w"] for each in found]
    assert np.any(moments[0] != moments[1])


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
    """The short form of `benchmarks/training.py --only kills`, whose programs are processes."""
    flags = "--only kills --epochs 2 --life 3 --devices 2 --kills 1"
    monkeypatch.setattr(sys, "argv", ["training.py", *flags.split()])
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
    monkeypatch.setenv("XLA_FLAGS", xla_flags())
    monkeypatch.setattr(jax.config, "update", lambda name, value: None)  # it has devices here
    runpy.run_path(str(ROOT / "benchmarks" / "training.py"))["main"]()
    assert "same bits True" in capsys.readouterr().out
