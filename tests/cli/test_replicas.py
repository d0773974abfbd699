"""Training on several devices and in several processes, from the command line."""

import json
import os
import signal
import socket
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
import support
from processes import xla_flags

from optperm.cli import models, replicas, run_folder
from optperm.cli.main import main

pytestmark = pytest.mark.filterwarnings("ignore:optperm (runs|calls):RuntimeWarning")


def losses(folder):
    with np.load(folder / "steps.npz") as steps:
        return steps["loss"]


def summary(folder):
    return json.loads((folder / "summary.json").read_text())


def trained(folder):
    return run_folder.rebuild(folder)[1]


def untrained(folder):
    return models.initial_params(run_folder.rebuild(folder)[0])


def assert_same_run(one, other, **tolerance):
    np.testing.assert_allclose(losses(one), losses(other), **tolerance)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5, **tolerance),
        trained(one),
        trained(other),
    )


@pytest.mark.parametrize("method", ["sgd", "svrg"])
def test_synchronous_replicas_take_the_steps_of_one_with_a_larger_batch(train, method):
    on_four, alone = train(method, devices=4), train(method, batch_size=20)
    assert len(losses(on_four)) == 9  # of 64 examples 60 are dealt out, 20 a step
    assert_same_run(on_four, alone, rtol=1e-5)
    for key in ("steps", "steps_since_commit", "test_accuracy", "gradient_evaluations"):
        assert summary(on_four)[key] == summary(alone)[key]
    shape = {"replicas": 4, "devices": 4, "processes": 1, "batch_size": 5}
    assert summary(on_four).items() >= shape.items()


DLDR = ["--sample-every", "1", "--num-samples", "6", "--n-components", "5"]  # five steps of SGD


def test_dldr_on_replicas_takes_the_steps_of_one_with_a_larger_batch(train):
    """Each of four replicas holds two of the five rows of the basis, or one, or none."""
    on_four, alone = train("dldr", *DLDR, devices=4), train("dldr", *DLDR, batch_size=20)
    assert_same_run(on_four, alone, rtol=1e-4)
    for key in ("steps", "phase", "test_accuracy"):
        assert summary(on_four)[key] == summary(alone)[key]
    assert summary(on_four)["phase"] == "subspace"
    assert summary(on_four)["gradient_evaluations"] == 9 * 20  # the trials are none
    # The second phase begins at step 5, and does not go on as SGD.
    sgd = losses(train("sgd", "--momentum", "0", batch_size=20))
    np.testing.assert_allclose(losses(alone)[:6], sgd[:6], rtol=1e-5)
    assert np.all(np.abs(losses(alone)[6:] / sgd[6:] - 1) > 1e-4)
    assert main(["evaluate", str(on_four)]) == 0


CONSTANT_SGD = ["--burn-in", "3", "--draw-every", "2"]


def test_constant_sgd_on_replicas_takes_the_steps_of_one_with_a_larger_batch(train):
    """The noise is that of the whole batch; draws are taken at steps 4, 6 and 8."""
    flags = ["constant-sgd", *CONSTANT_SGD, "--temperature", "0.02", "--max-step", "0.1"]
    on_four, alone = train(*flags, devices=4), train(*flags, batch_size=20)
    assert_same_run(on_four, alone, rtol=2e-4)
    for run in (on_four, alone):
        assert summary(run)["posterior"]["draws"] == 3
        assert 0 < summary(run)["posterior"]["share_at_max_step"] < 1
    assert summary(on_four)["gradient_evaluations"] == 2 * 9 * 20


@pytest.mark.parametrize("flags", [["sgperm"], ["laperm", "--sync-every", "7"]], ids=" ".join)
def test_permutations_on_replicas_are_kept_and_rebuilt(train, capsys, flags):
    """LaPerm is in the middle of a period at the end: what is tested and kept is synchronized."""
    out = train(*flags, devices=4)
    assert summary(out)["steps"] == 9
    support.assert_permutes(trained(out), untrained(out))
    assert (summary(out)["share_moved"] is None) == (flags[0] == "laperm")
    capsys.readouterr()
    assert main(["evaluate", str(out)]) == 0
    assert capsys.readouterr().out == f"test accuracy {summary(out)['test_accuracy']:.4f}\n"


def test_what_is_saved_and_tested_is_the_center(train, capsys):
    out = train("agn", "--communication-period", "7", devices=4)
    assert summary(out)["steps"] == 9
    assert summary(out)["steps_since_commit"] == 2
    assert "not committed  the last 2 steps" in capsys.readouterr().out
    # The second epoch ends one step before the commit: nothing but the initial params so far.
    lines = (out / "metrics.jsonl").read_text().splitlines()
    tested = [json.loads(line)["test_accuracy"] for line in lines]
    assert tested[0] == tested[1] == tested[2] != tested[3]
    assert losses(out)[6] < losses(out)[0]

    never = train("agn", "--communication-period", "10", devices=4)
    support.assert_same_bits(trained(never), untrained(never))
    assert main(["evaluate", str(out)]) == 0


def test_replicas_of_agn_that_commit_each_step_are_synchronous(train):
    """Without momentum each commit is a step of SGD, with the mean of the gradients or their sum."""
    flags = ["--momentum", "0", "--communication-period", "1"]
    synchronous = train("sgd", "--momentum", "0", batch_size=20)
    for commit, rate in (("mean", "0.1"), ("sum", "0.025")):
        committed = train("agn", *flags, "--commit", commit, "--learning-rate", rate, devices=4)
        assert_same_run(committed, synchronous, rtol=1e-5)
        assert summary(committed)["steps_since_commit"] == 0


def test_replicas_of_agn_part_between_commits(train):
    """On one device the local steps are SGD's; four replicas take others, each on its own batches."""
    flags = ["--momentum", "0", "--learning-rate", "0.1", "--communication-period", "99"]
    alone, on_four = train("agn", *flags, batch_size=20), train("agn", *flags, devices=4)
    synchronous = losses(train("sgd", "--momentum", "0", batch_size=20))
    np.testing.assert_allclose(losses(alone), synchronous, rtol=1e-5)
    np.testing.assert_allclose(losses(on_four)[0], synchronous[0], rtol=1e-5)
    assert np.all(np.abs(losses(on_four)[2:] / synchronous[2:] - 1) > 1e-4)


def test_diloco_with_a_plain_outer_step_is_its_inner_optimizer(train):
    plain = ["--outer-learning-rate", "1", "--outer-momentum", "0", "--weight-decay", "0"]
    rate = ["--learning-rate", "0.01"]
    one = train("diloco", *plain, *rate, "--sync-every", "3")
    assert_same_run(one, train("adam", *rate), rtol=1e-4)
    on_four = train("diloco", *plain, *rate, "--sync-every", "3", devices=4)
    # The center is where the replicas are on average, so that it learns as they do.
    assert losses(on_four)[-1] < losses(on_four)[0]
    assert main(["evaluate", str(on_four)]) == 0
    assert summary(on_four)["hyperparameters"]["sync_every"] == 3


def error_line(capsys):
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("optperm: error: ")
    assert err.count("\n") == 1
    return err


THREE = ("--coordinator", "127.0.0.1:9", "--num-processes", "2", "--process-id")


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["sgd", "--devices", "0"], "--devices: must be at least 1"),
        (["sgd", "--coordinator", "host"], "must be HOST:PORT, with a port from 1 to 65535"),
        (["sgd", "--coordinator", "host:65536"], "got 'host:65536'"),
        (["sgd", "--coordinator", ":80"], "got ':80'"),
        (["sgd", "--process-id", "-1"], "--process-id: must be at least 0"),
        (["agn", "--commit", "median"], "--commit: invalid choice: 'median'"),
    ],
)
def test_bad_flags_end_with_one_line(flags, says, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["train", *flags])
    assert caught.value.code == 2
    assert says in error_line(capsys)


@pytest.mark.parametrize(
    ("flags", "code", "says"),
    [
        (
            ["sgd", "--devices", "7", "--batch-size", "10"],
            2,
            "--batch-size 10 on each of 7 devices is more than the 64 training examples",
        ),
        (["sgd", "--devices", "9"], 1, "JAX has started with 8 already"),
        (["sgd", "--num-processes", "2"], 2, "Pass --coordinator, --process-id as well"),
        (["sgd", *THREE, "2"], 2, "--process-id must be from 0 to 1"),
        (["agn", "--communication-period", "0"], 2, "communication_period must be at least 1"),
        (
            ["dldr", "--num-samples", "4", "--n-components", "4"],
            2,
            "needs num_samples of at least 5",
        ),
        (["diloco", "--weight-decay", "-1"], 2, "diloco: weight_decay must be at least 0"),
    ],
)
def test_flags_that_do_not_fit_end_with_one_line(tmp_path, data, flags, code, says, capsys):
    out = tmp_path / "run"
    method, *rest = flags
    common = ["--data", data, "--batch-size", "5", "--out", str(out)]
    assert main(["train", method, *common, *rest]) == code
    assert says in error_line(capsys)
    assert not out.exists()


def test_the_processor_stands_in_where_jax_has_fewer_devices(monkeypatch):
    processors = jax.devices("cpu")
    monkeypatch.setattr(jax, "devices", lambda platform=None: processors[: 8 if platform else 1])
    with replicas.start(replicas.Replicas(4), {}, on_wait=lambda: None) as group:
        assert list(group.mesh.devices) == processors[:4]
        assert group.size == 4


def start(process_id, port, *flags):
    """One of two processes."""
    where = ["--coordinator", f"127.0.0.1:{port}", "--num-processes", "2"]
    who = ["--process-id", str(process_id)]
    return subprocess.Popen(
        [sys.executable, "-m", "optperm.cli.main", "train", *flags, *where, *who],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"XLA_FLAGS": xla_flags()},
    )


@pytest.fixture
def pair(tmp_path, data):
    """Starts two processes; the second has another folder to write to."""
    started = []

    def run(method, *flags, devices=2, out="of"):
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        flags = (method, *flags, "--data", data, "--batch-size", "5", "--hidden", "7")
        for process_id in range(2):
            where = ("--out", str(tmp_path / f"{out}-{process_id}"))
            started.append(start(process_id, port, *flags, "--devices", str(devices), *where))
        return started[-2:]

    yield run
    for process in started:
        process.kill()
        process.communicate()


def ends(process):
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


@pytest.mark.slow
@pytest.mark.parametrize("method", ["agn", "svrg", "dldr"])
def test_two_processes_train_as_one_does_and_one_of_them_writes(tmp_path, train, pair, method):
    flags = {"agn": ["--communication-period", "2"], "dldr": DLDR}.get(method, [])
    processes = pair(method, *flags, "--epochs", "3")
    (code, out, err), other = map(ends, processes)
    assert (code, err) == (0, "")
    assert other == (0, "", "")
    lines = out.splitlines()
    assert lines[0] == "Waiting for the other processes."
    assert [line.split()[1] for line in lines[1:5]] == ["0/3", "1/3", "2/3", "3/3"]
    assert "2 in each of 2 processes" in out

    folder = tmp_path / "of-0"
    assert not (tmp_path / "of-1").exists()
    assert_same_run(folder, train(method, *flags, devices=4), rtol=1e-5)
    shape = {"replicas": 4, "devices": 2, "processes": 2}
    assert summary(folder).items() >= shape.items()
    assert main(["evaluate", str(folder)]) == 0


@pytest.mark.slow
def test_two_processes_go_on_from_a_checkpoint_in_mid_period(tmp_path, pair):
    """Only process 0 has the checkpoint; what it holds of the other's replicas differs."""
    flags = ["agn", "--communication-period", "7", "--epochs", "3", "--checkpoint-every", "1"]
    whole, resumed = tmp_path / "whole-0", tmp_path / "resumed-0"
    assert [ends(process)[::2] for process in pair(*flags, out="whole")] == [(0, "")] * 2
    flags += ["--resume", str(whole), "--from-epoch", "1"]
    assert [ends(process)[::2] for process in pair(*flags, out="resumed")] == [(0, "")] * 2
    support.assert_same_bits(trained(resumed), trained(whole))
    np.testing.assert_array_equal(losses(resumed), losses(whole))
    states = [
        json.loads((run / "checkpoints/3/run/metadata").read_text()) for run in (whole, resumed)
    ]
    assert states[0]["digest"] == states[1]["digest"]


@pytest.mark.slow
def test_what_stops_process_0_stops_the_other(tmp_path, pair):
    (tmp_path / "of-0").mkdir()
    (tmp_path / "of-0" / "results").touch()
    first, other = map(ends, pair("sgd"))
    assert first[0] == 2
    assert "exists and is not an empty folder" in first[2]
    assert other == (1, "", "optperm: error: process 0 has failed: its own message says why.\n")


def wait_for_epochs(folder, process, count):
    metrics, deadline = folder / "metrics.jsonl", time.monotonic() + 60
    while not (metrics.exists() and metrics.read_text().count("\n") > count):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.slow
def test_ctrl_c_in_one_process_stops_both_and_saves(tmp_path, pair):
    processes = pair("sgd", "--epochs", "1000000")
    wait_for_epochs(tmp_path / "of-0", processes[0], 3)
    processes[1].send_signal(signal.SIGINT)
    first, other = map(ends, processes)
    assert other == (130, "", "")
    assert (first[0], first[2]) == (130, "")
    assert summary(tmp_path / "of-0")["interrupted"] is True
    assert 3 <= summary(tmp_path / "of-0")["epochs_done"] < 1_000_000
    assert main(["evaluate", str(tmp_path / "of-0")]) == 0


@pytest.mark.slow
def test_a_process_that_dies_leaves_no_other_waiting(tmp_path, pair):
    # With several devices in a process it takes longer: those that wait for one another there do not
    # hear of it, until JAX misses the other process's sign of life.
    processes = pair("sgd", "--epochs", "1000000", devices=1)
    wait_for_epochs(tmp_path / "of-0", processes[0], 3)
    processes[1].kill()
    code, _, err = ends(processes[0])
    assert code == 1
    assert err.startswith("optperm: error: another process has ended or cannot be reached")
    assert err.count("\n") == 1
