"""Where checkpoints are written, and what happens where they cannot be."""

import asyncio
import os
import pathlib
import runpy
import sys

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import support
from fitting import BATCH, linear_fit, linear_loss
from processes import xla_flags

from optperm import training

ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.slow
def test_checkpoint_that_is_written_late_is_of_its_moment(tmp_path, monkeypatch):
    """Orbax writes it while training continues."""
    write = ocp.JsonCheckpointHandler._save_fn

    async def late(self, *args):
        await asyncio.sleep(0.2)
        return await write(self, *args)

    monkeypatch.setattr(ocp.JsonCheckpointHandler, "_save_fn", late)
    linear_fit(steps=6, checkpoints=tmp_path, checkpoint_every=4)
    resumed = linear_fit(steps=10, checkpoints=tmp_path, resume=4)
    assert resumed.history.epochs["step"].tolist() == [5, 10]


def test_folder_that_cannot_be_written_is_found_before_the_first_step(tmp_path):
    """A file, a bucket that does not exist, and a folder that is not writable."""
    (tmp_path / "file").write_text("")
    seen = []
    for where in (tmp_path / "file" / "below", "gs://no-such-bucket-of-ours/x", "/proc/self", 3):
        with pytest.raises(training.CheckpointError, match="cannot write checkpoints to"):
            linear_fit(steps=9, checkpoints=where, every={1: seen.append})
    assert not seen


def test_result_is_not_lost_with_the_folder(tmp_path, monkeypatch):
    """It fills up, say, while a checkpoint is written."""

    def save(*args, **kwargs):
        raise OSError("no space left on device")

    monkeypatch.setattr(ocp.CheckpointManager, "save", save)
    for options, step in (({}, 9), ({"checkpoint_every": 4}, 4)):
        with pytest.raises(training.CheckpointError, match="no space left") as caught:
            linear_fit(steps=9, checkpoints=tmp_path, **options)
        whole, result = linear_fit(steps=step), caught.value.result
        assert result.step == step
        support.assert_same_bits(result.state.params, whole.state.params)


def test_failed_write_is_of_the_checkpoint_that_failed(tmp_path, monkeypatch):
    """Orbax writes step 4 in the background, and its error comes when step 8 is due."""
    write = ocp.JsonCheckpointHandler._save_fn

    async def fail(self, item, directory, *args):
        if directory.parent.name.startswith("4."):
            raise OSError(f"cannot write {'a/long/path' * 60}: no space left on device")
        return await write(self, item, directory, *args)

    monkeypatch.setattr(ocp.JsonCheckpointHandler, "_save_fn", fail)
    says = f"cannot write {tmp_path / '4'} .*no space left"
    with pytest.raises(training.CheckpointError, match=says) as caught:
        linear_fit(steps=9, checkpoints=tmp_path, checkpoint_every=4)
    assert caught.value.result.step == 8


def test_run_that_diverges_is_saved_before_it_is_warned_of(tmp_path):
    """Where warnings are errors, as they are here."""
    with pytest.raises(RuntimeWarning, match="stopped being finite at step 1 of 3"):
        linear_fit(lambda *args: jnp.nan * linear_loss(*args), steps=3, checkpoints=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["3"]


def test_orbax_alone_reads_the_state_and_the_rows(tmp_path):
    """The rows are one array with four bytes a number."""
    run, restore = linear_fit(steps=3, checkpoints=tmp_path), ocp.args.StandardRestore()
    with ocp.CheckpointManager(tmp_path) as manager:
        found = manager.restore(3, args=ocp.args.Composite(state=restore, history=restore))
    support.assert_same_bits(found["state"]["params"], run.state.params)
    rows = np.asarray(found["history"]["steps"])
    assert rows.dtype == np.float32
    np.testing.assert_array_equal(rows[0], run.history.steps["loss"])


def test_numbers_of_numpy_are_taken(tmp_path):
    count = np.int64(4)
    keep = {"checkpoints": tmp_path, "checkpoint_every": count, "checkpoint_keep": count}
    options = {"batch_size": np.int64(BATCH), "every": {count: print}}
    assert linear_fit(steps=count, key=np.int64(1), **keep, **options).step == 4


@pytest.mark.programs
def test_run_that_is_killed_goes_on_bit_for_bit(monkeypatch, capsys):
    """The short form of `benchmarks/training.py --only kills`, whose programs are processes."""
    flags = "--only kills --epochs 2 --life 3 --devices 2 --kills 1"
    monkeypatch.setattr(sys, "argv", ["training.py", *flags.split()])
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
    monkeypatch.setenv("XLA_FLAGS", xla_flags())
    monkeypatch.setattr(jax.config, "update", lambda name, value: None)  # it has devices here
    runpy.run_path(str(ROOT / "benchmarks" / "training.py"))["main"]()
    assert "same bits True" in capsys.readouterr().out
