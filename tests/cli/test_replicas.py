"""Training on several devices, from the command line."""

import jax
import numpy as np
import pytest

from optperm.cli import models, run_folder
from optperm.cli.main import main

pytestmark = pytest.mark.filterwarnings("ignore:optperm (runs|calls):RuntimeWarning")

DLDR = ["--every", "1", "--num-snapshots", "6", "--n-components", "5"]  # five steps of SGD


def assert_same_run(one, other, **tolerance):
    np.testing.assert_allclose(one.losses, other.losses, **tolerance)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5, **tolerance),
        one.trained,
        other.trained,
    )


@pytest.mark.chains
@pytest.mark.parametrize("flags", [["svrg"], ["dldr", *DLDR]], ids=lambda flags: flags[0])
def test_replicas_take_the_steps_of_one_with_a_larger_batch(train, files, flags, capsys):
    """Each of four replicas of dldr holds two of the five rows of the basis, or one, or none."""
    folder = train(*flags, devices=4)
    on_four, alone = files(folder), files(train(*flags, batch_size=20))
    assert len(on_four.losses) == 9  # of 64 examples 60 are dealt out, 20 a step
    assert_same_run(on_four, alone, rtol=1e-4)
    for key in ("steps", "phase", "gradient_evaluations"):
        assert on_four.summary[key] == alone.summary[key]
    shape = {"devices": 4, "batch_size": 5}
    assert on_four.summary.items() >= shape.items()
    capsys.readouterr()
    assert main(["evaluate", str(folder)]) == 0
    assert capsys.readouterr().out == f"test accuracy {on_four.summary['test_accuracy']:.4f}\n"


@pytest.mark.programs
@pytest.mark.filterwarnings("default:The run ends after:UserWarning")
def test_what_is_saved_and_tested_is_the_center_with_all_steps(train, files, capsys):
    """Three steps an epoch: each epoch is tested as a run that ended there."""
    out = train("agn", "--every", "7", devices=4)
    tested = [line["test_accuracy"] for line in files(out).metrics]
    assert files(out).summary["test_accuracy"] == tested[-1]
    one = train("agn", "--every", "7", "--epochs", "1", devices=4)
    said = capsys.readouterr().err
    assert said.count("The run ends after 3 steps, before the first commit of agn or diloco") == 1
    assert files(one).summary["test_accuracy"] == tested[1]
    # The replicas part between commits, each on its own batches.
    untrained = models.initial_params(run_folder.rebuild(one)[0])
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), files(one).trained, untrained)
    assert min(jax.tree.leaves(moved)) > 1e-4
    never, alone = (
        files(train("agn", "--every", "10", devices=n, batch_size=20 // n)).losses for n in (4, 1)
    )
    np.testing.assert_allclose(never[0], alone[0], rtol=1e-5)
    assert np.all(np.abs(never[2:] / alone[2:] - 1) > 1e-4)


def test_a_center_of_one_device_is_what_is_trained(train, files):
    """In periods of eight; the four steps at the end of an epoch are committed for its test."""
    once, further = (
        files(train("agn", "--every", "8", "--epochs", epochs)) for epochs in ("1", "3")
    )
    assert once.metrics[1]["test_accuracy"] == further.metrics[1]["test_accuracy"]
    assert once.summary["test_accuracy"] == once.metrics[1]["test_accuracy"]


def test_more_devices_than_there_are_is_refused(data, tmp_path, capsys):
    flags = ["--data", data, "--batch-size", "5", "--out", str(tmp_path / "run"), "--quiet"]
    assert main(["train", "sgd", *flags, "--devices", "9"]) == 1
    assert "devices must be at most 8" in capsys.readouterr().err
