"""Runs that are resumed from a checkpoint."""

import shutil
import signal

import numpy as np
import pytest
import support

pytestmark = pytest.mark.filterwarnings("ignore:optperm (runs|calls):RuntimeWarning")

EVERY = "sgd", "--checkpoint-every", "1"


def test_run_that_is_stopped_and_resumed_ends_as_the_one_that_went_on(
    train, run, out, signal_after, capfd
):
    """From the checkpoint before the last, as if the run had been killed while it wrote that one."""
    whole, stopped = train(*EVERY), out.beside("stopped")
    signal_after(signal.SIGINT, 2)
    assert run(stopped, *EVERY) == 130
    said, err = capfd.readouterr()
    assert "Stopping after the running steps; Ctrl-C again to quit." in err
    says = f"Stopped. To resume, with the same flags: optperm train sgd --resume {stopped}"
    assert said.splitlines()[-1] == says
    assert (stopped.summary["interrupted"], stopped.summary["epochs_done"]) == (True, 2)
    assert stopped.checkpoints == [12, 24]
    shutil.rmtree(stopped.folder / "checkpoints/24")
    assert run(out, *EVERY, "--resume", str(stopped)) == 0
    says = f"Resuming after epoch 1 of {stopped}, up to epoch 3 (--epochs)."
    assert capfd.readouterr().out.splitlines()[1] == says
    assert out.checkpoints == whole.checkpoints == [12, 24, 36]
    assert out.metrics == whole.metrics
    np.testing.assert_array_equal(out.losses, whole.losses)
    support.assert_same_bits(out.trained, whole.trained)


@pytest.mark.programs
def test_complete_run_that_is_resumed_says_so(train, run, out, capsys):
    whole = train(*EVERY, "--checkpoint-keep", "2")
    assert whole.checkpoints == [24, 36]
    capsys.readouterr()
    assert run(out, *EVERY, "--resume", str(whole)) == 0
    says = f"Resuming after epoch 3 of {whole}, up to epoch 3 (--epochs)."
    assert capsys.readouterr().out.splitlines()[1] == says
    assert out.metrics == whole.metrics


@pytest.mark.programs
def test_checkpoint_of_another_run_is_refused(train, run, data, out, tmp_path, fails):
    whole, without = train(*EVERY), train("sgd")
    with np.load(data) as arrays:
        np.savez(tmp_path / "other.npz", **dict(arrays) | {"x_test": arrays["x_test"][::-1]})
    for folder, flags, code, says in [
        (whole, ["sgd", "--momentum", "0.5"], 2, "--momentum is 0.9 there and 0.5 here"),
        (whole, ["sgd", "--devices", "2"], 2, "examples per step is 5 there and 10 here"),
        (whole, ["sgd", "--data", str(tmp_path / "other.npz")], 2, "the digest of the data is"),
        (whole, ["adam"], 2, "the method is sgd there and adam here"),
        (without, ["sgd"], 1, "contains no checkpoints of a run"),
    ]:
        fails(code, says, run, out, *flags, "--resume", str(folder))
        assert not out.folder.exists()


@pytest.mark.programs
def test_damaged_checkpoint_is_refused(train, run, out, tmp_path, fails):
    folder = shutil.copytree(train(*EVERY).folder, tmp_path / "copy")
    resume = "sgd", "--resume", str(folder)
    for path in (folder / "checkpoints/36/state").rglob("*"):
        if path.is_file():
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    # What is named is there, and what is advised is possible: a folder of nothing is not left.
    says = f"{folder}/checkpoints/36 is damaged"
    advice = "Delete it to resume from the checkpoint of step 24."
    assert advice in fails(1, says, run, out, *resume, "--quiet")
    assert not out.folder.exists()
    shutil.rmtree(folder / "checkpoints/36")
    assert run(out, *resume) == 0
    support.assert_same_bits(out.trained, train(*EVERY).trained)
    path = folder / "checkpoints/run.json"
    for damage in (lambda: path.write_text("{"), path.unlink):
        damage()
        says = "run.json is damaged or was not written by optperm"
        fails(1, says, run, tmp_path / "other", *resume)
