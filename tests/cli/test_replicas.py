"""Training on several devices, from the command line."""

import numpy as np
import pytest
import support

from optperm.cli.main import main

pytestmark = pytest.mark.filterwarnings("ignore:optperm (runs|calls):RuntimeWarning")

DLDR = "dldr", "--every", "1", "--num-snapshots", "6", "--n-components", "5"


@pytest.mark.slow
def test_replicas_take_the_steps_of_one_with_a_larger_batch(train, files, capsys):
    """Each of four replicas of dldr holds two of the five rows of the basis, or one, or none."""
    folder = train(*DLDR, devices=4)
    on_four, alone = files(folder), files(train(*DLDR, batch_size=20))
    assert len(on_four.losses) == 9  # of 64 examples 60 are dealt out, 20 a step
    np.testing.assert_allclose(on_four.losses, alone.losses, rtol=1e-4)
    support.assert_close(on_four.trained, alone.trained, rtol=1e-4, atol=1e-5)
    for key in ("steps", "phase", "gradient_evaluations"):
        assert on_four.summary[key] == alone.summary[key]
    capsys.readouterr()
    assert main(["evaluate", str(folder)]) == 0
    assert capsys.readouterr().out == f"test accuracy {on_four.summary['test_accuracy']:.4f}\n"


@pytest.mark.programs
@pytest.mark.filterwarnings("default:The run ends after:UserWarning")
def test_what_is_saved_and_tested_is_the_center_with_all_steps(train, files, capsys):
    """Three steps an epoch: each epoch is tested as a run that ended there."""
    tested = [line["test_accuracy"] for line in files(train("agn", devices=4)).metrics]
    one = files(train("agn", "--epochs", "1", devices=4))
    said = capsys.readouterr().err
    assert said.count("The run ends after 3 steps, before the first commit of agn or diloco") == 1
    assert one.summary["test_accuracy"] == tested[1]
    # The replicas part between commits, each on its own batches.
    alone = files(train("agn", "--epochs", "1", batch_size=20)).losses
    np.testing.assert_allclose(one.losses[0], alone[0], rtol=1e-5)
    assert np.all(np.abs(one.losses[2:] / alone[2:] - 1) > 1e-4)
