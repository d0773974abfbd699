"""Runs that are resumed from a checkpoint, and the snapshots of svrg."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
import support

from optperm.cli import methods, models, run_folder, training
from optperm.cli.main import main

pytestmark = pytest.mark.filterwarnings("ignore:optperm (runs|calls):RuntimeWarning")

DLDR = ["--sample-every", "1", "--num-samples", "7", "--n-components", "5"]  # six steps of SGD
CONSTANT_SGD = ["--burn-in", "6", "--draw-every", "1"]


def losses(folder):
    with np.load(folder / "steps.npz") as steps:
        return steps["loss"]


def metrics(folder):
    """All but the seconds."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line | {"seconds": None} for line in lines]


def state(folder, epoch):
    """Params and optimizer state of a checkpoint, NamedTuples as dicts."""
    path = (folder / "checkpoints" / str(epoch)).absolute()
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
        args = ocp.args.Composite(state=ocp.args.StandardRestore())
        return checkpointer.restore(path, args=args)["state"]


@pytest.mark.parametrize(
    ("method", "devices"),
    # Those that keep something beside moments; tests/training resumes all of them by the same loop.
    [(method, 1) for method in ("sgd", "sgperm", "svrg", "agn", "dldr", "constant-sgd")]
    + [("agn", 4), ("svrg", 4), ("dldr", 2), ("dldr", 3), ("constant-sgd", 4)],
)
def test_a_resumed_run_ends_as_the_one_that_went_on(train, method, devices):
    """After epoch 1 svrg is in mid-cycle, agn and diloco are in mid-period.

    There dldr is past its switch on one device, exactly at it on two, and short of it on three, where
    the switch is in the middle of epoch 2.
    """
    flags = [method, "--checkpoint-every", "1"]
    flags += {"dldr": DLDR, "constant-sgd": CONSTANT_SGD}.get(method, [])
    if period := methods.METHODS[method].period:
        flags += [f"--{period.replace('_', '-')}", "7"]
    whole = train(*flags, devices=devices)
    resumed = train(*flags, "--resume", str(whole), "--from-epoch", "1", devices=devices)
    assert sorted(os.listdir(resumed / "checkpoints")) == ["2", "3"]
    assert metrics(resumed) == metrics(whole)
    np.testing.assert_array_equal(losses(resumed), losses(whole))
    support.assert_same_bits(run_folder.rebuild(resumed)[1], run_folder.rebuild(whole)[1])
    support.assert_same_bits(state(resumed, 3), state(whole, 3))
    if method == "constant-sgd":
        with np.load(whole / "draws.npz") as draws, np.load(resumed / "draws.npz") as again:
            assert draws["Dense_0.kernel"].shape[:2] == (1, 29 if devices == 1 else 2)
            support.assert_same_bits(dict(again), dict(draws))
    if method == "dldr":
        is_set = [
            np.all(state(whole, epoch)[1]["second"]["subspace"]["is_set"]) for epoch in (1, 2)
        ]
        assert is_set == [devices == 1, True]
        assert (metrics(whole)[1]["phase"] == "subspace") == (devices == 1)
        if devices > 1:  # each with rows of its own, all with the same params
            params, opt_state = state(whole, 3)
            assert all(np.all(leaf == leaf[:1]) for leaf in jax.tree.leaves(params))
            rows = opt_state["second"]["subspace"]["rows"]["Dense_0"]["kernel"]
            assert rows.shape[:2] == (devices, -(-5 // devices))
            assert np.any(rows[0] != rows[1])
    # There is something to go on from: the first epoch left another state.
    before, after = jax.tree.leaves(state(whole, 1)), jax.tree.leaves(state(whole, 3))
    assert any(np.any(a != b) for a, b in zip(before, after, strict=True))
    summary = json.loads((resumed / "summary.json").read_text())
    assert (summary["resumed_from"], summary["resumed_after_epoch"]) == (str(whole), 1)


def test_each_replica_has_its_own_state_in_a_checkpoint(train):
    kept = state(
        train("agn", "--communication-period", "7", "--checkpoint-every", "1", devices=4), 1
    )
    kernel = kept[0]["Dense_0"]["kernel"]
    assert kernel.shape[0] == 4
    assert np.all(np.ptp(kernel, axis=0) > 0)


def test_snapshots_are_of_all_examples_at_the_epochs_of_the_schedule(train, data, monkeypatch):
    """On three devices 60 of 64 examples are dealt out, and the last full gradient batch has one."""
    monkeypatch.setattr(training, "_GRADIENT_CHUNK", 8)
    out = train("svrg", "--update-freq", "2", "--checkpoint-every", "1", devices=3)
    spec, _ = run_folder.rebuild(out)
    with np.load(data) as arrays:
        x, y = arrays["x_train"], arrays["y_train"]

    def loss(params):
        logits = models.logits(models.build(spec), params, x)
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    initial = models.initial_params(spec)
    for epoch, at in ((1, initial), (2, initial), (3, state(out, 2)[0])):
        snapshot = state(out, epoch)[1][0]["snapshot"]
        assert snapshot["is_taken"]
        support.assert_same_bits(snapshot["params"], jax.tree.map(np.asarray, at))
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6),
            snapshot["full_grad"],
            jax.grad(loss)(at),
        )
    summary = json.loads((out / "summary.json").read_text())
    assert summary["gradient_evaluations"] == 2 * 3 * 60 + 2 * 64


def test_gradient_evaluations_of_methods_without_full_gradients(train):
    for method, *flags in (["sgd"], ["svrg", "--coefficient", "0", "--momentum", "0.9"]):
        summary = json.loads((train(method, *flags) / "summary.json").read_text())
        assert summary["gradient_evaluations"] == 3 * 60 + (2 * 64 if flags else 0)
    # Without a correction the steps are those of SGD.
    np.testing.assert_array_equal(losses(train(method, *flags)), losses(train("sgd")))


@pytest.mark.parametrize(
    ("value", "error"),
    [(True, TypeError), (None, TypeError), (2.0, TypeError), (0, ValueError), (-1, ValueError)],
)
def test_update_freq_is_a_whole_number_of_epochs(value, error):
    with pytest.raises(error, match="update_freq must be"):
        methods.METHODS["svrg"].build(update_freq=value)


def resume(folder, *flags, method="sgd", out, data):
    common = ["--batch-size", "5", "--hidden", "7", "--epochs", "3", "--data", data]
    return main(["train", method, *common, "--resume", str(folder), "--out", str(out), *flags])


def error_line(capsys):
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("optperm: error: ")
    assert err.count("\n") == 1
    return err


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--momentum", "0.5"], "--momentum is 0.9 there and 0.5 here"),
        (
            ["--seed", "1", "--hidden", "8"],
            "--hidden is 7 there and 8 here; --seed is 0 there and 1",
        ),
        (["--batch-size", "6"], "--batch-size is 5 there and 6 here"),
        (["--model", "mlp", "--devices", "2"], "the number of replicas is 1 there and 2 here"),
        (["--data", "digits"], "the digest of the data is"),
        (["--from-epoch", "1"], "holds no checkpoint of that epoch, but of 2, 3."),
        (["--epochs", "2"], "the checkpoint is after epoch 3 already"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(train, data, tmp_path, capsys, flags, says):
    folder = train("sgd", "--checkpoint-every", "2")
    capsys.readouterr()
    assert resume(folder, *flags, out=tmp_path / "run", data=data) == 2
    assert says in error_line(capsys)
    assert not (tmp_path / "run").exists()


def test_what_cannot_be_resumed_is_refused(train, data, tmp_path, capsys):
    folder, without = train("sgd", "--checkpoint-every", "2"), train("sgd")
    out = tmp_path / "run"
    capsys.readouterr()
    assert resume(folder, method="adam", out=out, data=data) == 2
    assert "the method is sgd there and adam here" in error_line(capsys)
    assert resume(tmp_path, out=out, data=data) == 1
    assert "this is not the folder of a run" in error_line(capsys)
    assert resume(without, out=out, data=data) == 1
    assert "this run left no checkpoints" in error_line(capsys)
    assert main(["train", "sgd", "--from-epoch", "2"]) == 2
    assert "--from-epoch goes with --resume" in error_line(capsys)


@pytest.mark.parametrize("item", ["state", "run"])
def test_a_damaged_checkpoint_is_refused_and_another_one_serves(
    train, data, tmp_path, capsys, item
):
    folder, out = tmp_path / "copy", tmp_path / "run"
    shutil.copytree(train("sgd", "--checkpoint-every", "2"), folder)
    capsys.readouterr()
    files = [path for path in (folder / "checkpoints/3" / item).rglob("*") if path.is_file()]
    for file in files:
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    assert resume(folder, out=out, data=data) == 1
    assert "checkpoints/3 is damaged" in error_line(capsys)
    assert not out.exists()
    assert resume(folder, "--from-epoch", "2", out=out, data=data) == 0
    support.assert_same_bits(run_folder.rebuild(out)[1], run_folder.rebuild(folder)[1])


def test_a_state_that_is_not_what_was_written_is_refused(train, data, tmp_path, capsys):
    folder = tmp_path / "copy"
    shutil.copytree(train("sgd", "--checkpoint-every", "2"), folder)
    capsys.readouterr()
    shutil.rmtree(folder / "checkpoints/3/state")
    shutil.copytree(folder / "checkpoints/2/state", folder / "checkpoints/3/state")
    assert resume(folder, out=tmp_path / "run", data=data) == 1
    assert "its state is not what was written" in error_line(capsys)


@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGKILL])
def test_a_run_that_is_stopped_goes_on_from_its_newest_checkpoint(data, tmp_path, by):
    """Ctrl-C leaves a checkpoint of the last epoch; a run that is killed leaves the ones before."""
    stopped, out = tmp_path / "stopped", tmp_path / "run"
    every = "1000000" if by == signal.SIGINT else "1"
    flags = ["--data", data, "--batch-size", "5", "--hidden", "7", "--checkpoint-every", every]
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "optperm.cli.main", "train", "svrg", *flags),
            *("--quiet", "--epochs", "1000000", "--out", str(stopped)),
        ]
    )
    try:
        file, deadline = stopped / "metrics.jsonl", time.monotonic() + 60
        while not (file.exists() and file.read_text().count("\n") > 4):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.send_signal(by)
        assert process.wait(timeout=60) == (130 if by == signal.SIGINT else -by)
    finally:
        process.kill()
        process.wait()
    # As a process that dies while it writes leaves it.
    (stopped / "checkpoints" / "99.orbax-checkpoint-tmp" / "state").mkdir(parents=True)
    kept = [int(name) for name in os.listdir(stopped / "checkpoints") if name.isdecimal()]
    done = metrics(stopped)[-1]["epoch"]
    assert kept == [done] if by == signal.SIGINT else done - 1 <= max(kept) <= done
    flags += ["--epochs", str(max(kept) + 1), "--out", str(out), "--resume", str(stopped)]
    assert main(["train", "svrg", *flags]) == 0
    assert metrics(out)[: max(kept) + 1] == metrics(stopped)[: max(kept) + 1]
    assert metrics(out)[-1]["epoch"] == max(kept) + 1
