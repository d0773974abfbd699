"""Runs that are resumed from a checkpoint, and the snapshots of svrg."""

import os
import shutil
import signal

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
import support

from optperm.cli import models, run_folder
from optperm.cli.main import main

pytestmark = [
    pytest.mark.programs,
    pytest.mark.filterwarnings("ignore:optperm (runs|calls):RuntimeWarning"),
]


def metrics(files):
    """All but the seconds."""
    return [line | {"seconds": None} for line in files.metrics]


def kept(folder):
    """The steps of the checkpoints."""
    names = os.listdir(folder / "checkpoints")
    return sorted(int(name) for name in names if name.isdecimal())


def state(folder, step):
    """The train state of a checkpoint, NamedTuples as dicts."""
    path = (folder / "checkpoints" / str(step)).absolute()
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
        args = ocp.args.Composite(state=ocp.args.StandardRestore())
        return checkpointer.restore(path, args=args)["state"]


def test_a_resumed_run_ends_as_the_one_that_went_on(train, files, tmp_path):
    """tests/training resumes all methods."""
    flags = ["sgd", "--checkpoint-every", "1"]
    whole, part = train(*flags), tmp_path / "part"
    shutil.copytree(whole, part)
    for step in (24, 36):
        shutil.rmtree(part / "checkpoints" / str(step))
    resumed = train(*flags, "--resume", str(part))
    steps = files(whole).summary["steps"]
    assert kept(resumed) == kept(whole) == [12, 24, 36]
    assert metrics(files(resumed)) == metrics(files(whole))
    np.testing.assert_array_equal(files(resumed).losses, files(whole).losses)
    support.assert_same_bits(files(resumed).trained, files(whole).trained)
    support.assert_same_bits(state(resumed, steps), state(whole, steps))
    # There is something to go on from: the first epoch left another state.
    pairs = map(jax.tree.leaves, (state(whole, steps // 3), state(whole, steps)))
    assert any(np.any(a != b) for a, b in zip(*pairs, strict=True))
    assert files(resumed).summary["resume"] == str(part)


def test_as_many_checkpoints_are_kept_as_asked_for(train):
    assert kept(train("sgd", "--checkpoint-every", "1", "--checkpoint-keep", "2")) == [24, 36]


@pytest.mark.chains
def test_snapshots_are_of_all_examples_at_the_epochs_of_the_schedule(train, data, files):
    """On three devices 60 of 64 examples are dealt out, 15 a step."""
    out = train("svrg", "--every", "2", "--checkpoint-every", "1", devices=3)
    spec, _ = run_folder.rebuild(out)
    with np.load(data) as arrays:
        x, y = arrays["x_train"], arrays["y_train"]

    def loss(params):
        logits = models.build(spec).apply({"params": params}, x)
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    initial = models.initial_params(spec)
    for epoch, at in ((1, initial), (2, initial), (3, state(out, 8)["params"])):
        snapshot = state(out, 4 * epoch)["opt_state"][0]["snapshot"]
        assert snapshot["is_taken"]
        support.assert_same_bits(snapshot["params"], jax.tree.map(np.asarray, at))
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6),
            snapshot["full_grad"],
            jax.grad(loss)(at),
        )
    assert files(out).summary["gradient_evaluations"] == 2 * 3 * 60 + 2 * 64


def test_gradient_evaluations_of_methods_without_full_gradients(train, files):
    without = train("svrg", "--coefficient", "0", "--momentum", "0.9")
    for folder, more in ((train("sgd"), 0), (without, 2 * 64)):
        assert files(folder).summary["gradient_evaluations"] == 3 * 60 + more
    # Without a correction the steps are those of SGD.
    np.testing.assert_array_equal(files(without).losses, files(train("sgd")).losses)


def resume(folder, *flags, method="sgd", out, data):
    common = ["--batch-size", "5", "--hidden", "7", "--epochs", "3", "--data", data]
    return main(["train", method, "--resume", str(folder), "--out", str(out), *common, *flags])


def test_a_checkpoint_of_another_run_is_refused(train, data, tmp_path, capsys, error_line):
    kept_two, without = train("sgd", "--checkpoint-every", "2"), train("sgd")
    with np.load(data) as arrays:
        np.savez(tmp_path / "other.npz", **dict(arrays) | {"x_test": arrays["x_test"][::-1]})
    other = {"data": str(tmp_path / "other.npz")}
    for folder, flags, changed, code, says in [
        (kept_two, ["--seed", "1"], {}, 2, "--seed is 0 there and 1 here"),
        (kept_two, ["--momentum", "0.5"], {}, 2, "--momentum is 0.9 there and 0.5 here"),
        (kept_two, ["--batch-size", "6"], {}, 2, "examples a step is 5 there and 6 here"),
        (kept_two, ["--devices", "2"], {}, 2, "examples a step is 5 there and 10 here"),
        (kept_two, [], other, 2, "the digest of the data is"),
        (kept_two, [], {"method": "adam"}, 2, "the method is sgd there and adam here"),
        (without, [], {}, 1, "holds no checkpoints of a run"),
        (tmp_path, [], {}, 1, "holds no checkpoints of a run"),
    ]:
        capsys.readouterr()
        options = {"out": tmp_path / "run", "data": data, **changed}
        assert resume(folder, *flags, **options) == code
        assert says in error_line()
        assert not (tmp_path / "run").exists()


def test_a_resumed_run_that_was_complete_says_so(train, files, data, tmp_path, capsys):
    whole = train("sgd", "--checkpoint-every", "1")
    capsys.readouterr()
    assert resume(whole, out=tmp_path / "run", data=data) == 0
    says = f"Resuming after epoch 3 of {whole}, up to epoch 3 (--epochs)."
    assert capsys.readouterr().out.splitlines()[1] == says
    assert metrics(files(tmp_path / "run")) == metrics(files(whole))
    assert resume(whole, "--epochs", "4", out=tmp_path / "on", data=data) == 0
    assert f"Resuming after epoch 3 of {whole}, up to epoch 4" in capsys.readouterr().out


def test_a_damaged_checkpoint_is_refused(train, data, files, tmp_path, capsys):
    folder = tmp_path / "copy"
    shutil.copytree(train("sgd", "--checkpoint-every", "2"), folder)
    capsys.readouterr()
    found = [path for path in (folder / "checkpoints/36/state").rglob("*") if path.is_file()]
    for file in found:
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    assert resume(folder, out=tmp_path / "damaged", data=data) == 1
    err = capsys.readouterr().err
    # What is named is there, and what is advised is possible: a folder of nothing is not left.
    assert f"{folder}/checkpoints/36 is damaged" in err
    assert "delete it to resume from the one before" in err
    assert err.count("\n") == 1
    assert not (tmp_path / "damaged").exists()
    shutil.rmtree(folder / "checkpoints/36")  # then the one before serves
    out = tmp_path / "run"
    assert resume(folder, out=out, data=data) == 0
    support.assert_same_bits(files(out).trained, files(folder).trained)
    for written in ("[1]", "{", None):  # by another program, or half of it, or nothing
        path = folder / "checkpoints/run.json"
        path.unlink() if written is None else path.write_text(written)
        capsys.readouterr()
        assert resume(folder, out=tmp_path / "other", data=data) == 1
        err = capsys.readouterr().err
        assert "run.json is damaged or was not written by optperm" in err
        assert err.count("\n") == 1


@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGKILL])
def test_a_run_that_is_stopped_goes_on_from_its_newest_checkpoint(
    data, files, tmp_path, start, wait_for_epochs, by
):
    """A signal leaves a checkpoint of the last step; a run that is killed leaves the ones before."""
    stopped, out = tmp_path / "stopped", tmp_path / "run"
    every = "1" if by == signal.SIGKILL else "1000000"
    flags = ["--data", data, "--batch-size", "5", "--hidden", "7", "--checkpoint-every", every]
    process = start("train", "svrg", *flags, "--epochs", "1000000", "--out", str(stopped))
    wait_for_epochs(stopped, process, 4)
    process.send_signal(by)
    said, err = process.communicate(timeout=60)
    assert process.returncode == (-by if by == signal.SIGKILL else 130)
    if by != signal.SIGKILL:
        assert "Stopping after this step; Ctrl-C again to quit." in err
        last = said.splitlines()[-1]
        assert last.startswith("Stopped. To resume, with the same flags: optperm train svrg")
        assert f"--resume {stopped}" in last
        summary = files(stopped).summary
        assert summary["interrupted"] is True
        assert kept(stopped) == [summary["steps"]]
        assert summary["epochs_done"] == len(files(stopped).metrics) - 1
        assert main(["evaluate", str(stopped)]) == 0
    epochs = kept(stopped)[-1] // 12 + 2
    flags += ["--epochs", str(epochs), "--out", str(out), "--resume", str(stopped)]
    assert main(["train", "svrg", *flags, "--quiet"]) == 0
    again, before = metrics(files(out)), metrics(files(stopped))
    common = min(len(before), epochs - 1)
    assert again[:common] == before[:common]
    if by == signal.SIGINT:  # it stopped within an epoch, perhaps
        whole = tmp_path / "whole"
        flags = ["--data", data, "--batch-size", "5", "--hidden", "7", "--epochs", str(epochs)]
        assert main(["train", "svrg", *flags, "--quiet", "--out", str(whole)]) == 0
        assert metrics(files(whole)) == again
        support.assert_same_bits(files(whole).trained, files(out).trained)
