"""Training on several devices and in several processes, from the command line."""

import os
import pathlib
import signal
import socket

import jax
import numpy as np
import pytest
import support
from processes import xla_flags

from optperm.cli import machines, models, run_folder
from optperm.cli.main import main

pytestmark = pytest.mark.filterwarnings("ignore:optperm (runs|calls):RuntimeWarning")

DLDR = ["--sample-every", "1", "--num-samples", "6", "--n-components", "5"]  # five steps of SGD


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
    for key in ("steps", "phase", "gradient_evaluations", "steps_since_commit"):
        assert on_four.summary[key] == alone.summary[key]
    shape = {"replicas": 4, "devices": 4, "processes": 1, "batch_size": 5}
    assert on_four.summary.items() >= shape.items()
    capsys.readouterr()
    assert main(["evaluate", str(folder)]) == 0
    assert capsys.readouterr().out == f"test accuracy {on_four.summary['test_accuracy']:.4f}\n"


def test_what_is_saved_and_tested_is_the_center(train, files, capsys):
    out = train("agn", "--communication-period", "7", devices=4)
    assert files(out).summary["steps_since_commit"] == 2
    shown = capsys.readouterr().out.splitlines()
    assert "steps since commit 2" in [" ".join(line.split()) for line in shown]
    # The second epoch ends one step before the commit: nothing but the initial params so far.
    tested = [line["test_accuracy"] for line in files(out).metrics]
    assert tested[0] == tested[1] == tested[2] != tested[3]
    never = train("agn", "--communication-period", "10", devices=4)
    untrained = models.initial_params(run_folder.rebuild(never)[0])
    support.assert_same_bits(files(never).trained, untrained)
    # The replicas part between commits, each on its own batches.
    alone = files(train("agn", "--communication-period", "10", batch_size=20)).losses
    np.testing.assert_allclose(files(never).losses[0], alone[0], rtol=1e-5)
    assert np.all(np.abs(files(never).losses[2:] / alone[2:] - 1) > 1e-4)


def test_a_center_of_one_device_is_what_is_trained(train, files):
    """Eight of twelve steps an epoch are committed after the first, in periods of eight."""
    once, further = (
        files(train("agn", "--communication-period", "8", "--epochs", epochs))
        for epochs in ("1", "3")
    )
    assert once.summary["steps_since_commit"] == 4
    assert once.metrics[1]["test_accuracy"] == further.metrics[1]["test_accuracy"]
    assert further.summary["steps_since_commit"] == 36 % 8


def test_more_devices_than_there_are_is_refused(data, tmp_path, capsys):
    flags = ["--data", data, "--batch-size", "5", "--out", str(tmp_path / "run"), "--quiet"]
    assert main(["train", "sgd", *flags, "--devices", "9"]) == 1
    assert "devices must be at most 8" in capsys.readouterr().err


def test_a_cluster_is_asked_where_it_has_started_several(monkeypatch):
    given = []
    monkeypatch.setattr(machines, "_silence_native_output", lambda: None)
    monkeypatch.setattr(jax.distributed, "initialize", lambda *args, **options: given.append(args))
    for environment, launched in [
        ({}, False),
        ({"SLURM_STEP_NODELIST": "node[1-2]", "SLURM_NTASKS": "2"}, True),
        ({"SLURM_STEP_NODELIST": "node1", "SLURM_NTASKS": "1"}, False),
        ({"SLURM_NTASKS": "8"}, False),  # in a shell of an allocation, which is no task
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "4"}, True),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, False),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "0"}, True),
    ]:
        monkeypatch.setattr(os, "environ", environment)
        given.clear()
        machines.Machines().connect(lambda: None)
        assert given == [(None, None, None)] * launched


def test_a_local_coordinator_listens_to_this_machine_alone(monkeypatch):
    given = {}
    monkeypatch.setattr(machines, "_silence_native_output", lambda: None)
    monkeypatch.setattr(jax.distributed, "initialize", lambda *_, **options: given.update(options))
    for coordinator in ("127.0.0.1:80", "localhost:80", "node1:80"):
        where = machines.Machines(coordinator=coordinator, num_processes=2, process_id=1)
        where.connect(lambda: None)
        bound = None if coordinator == "node1:80" else coordinator
        assert given["coordinator_bind_address"] == bound


@pytest.fixture
def pair(tmp_path, data, start):
    """Starts two processes."""

    def run(method, *flags, devices=2, out="run"):
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        flags = (*flags, "--data", data, "--batch-size", "5", "--hidden", "7")
        where = ("--out", str(tmp_path / out), "--coordinator", f"127.0.0.1:{port}")
        where += ("--num-processes", "2", "--devices", str(devices), "--process-id")
        environment = {"XLA_FLAGS": xla_flags()}
        return port, [
            start("train", method, *flags, *where, str(index), **environment) for index in range(2)
        ]

    return run


def ends(process):
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


@pytest.mark.programs
def test_two_processes_train_as_one_does_and_go_on(tmp_path, train, files, pair):
    """Of agn each replica has its own params; a checkpoint of both goes on in mid-period, which `fit`
    is asked for every time in tests/multiprocess."""
    flags = ["agn", "--communication-period", "7", "--epochs", "3", "--checkpoint-every", "1"]
    (code, out, err), other = map(ends, pair(*flags)[1])
    assert (code, err) == (0, "")
    assert other == (0, "", "")
    lines = out.splitlines()
    assert lines[0] == "Waiting for the other processes."
    assert [line.split()[1] for line in lines[1:5]] == ["0/3", "1/3", "2/3", "3/3"]
    assert {"devices 2", "processes 2"} <= {" ".join(line.split()) for line in lines}
    whole = files(tmp_path / "run")
    assert_same_run(whole, files(train(*flags[:3], devices=4)), rtol=1e-5)
    assert whole.summary.items() >= {"replicas": 4, "devices": 2, "processes": 2}.items()
    assert main(["evaluate", str(tmp_path / "run")]) == 0
    flags += ["--resume", str(tmp_path / "run"), "--from-epoch", "1"]
    ended = [ends(process)[::2] for process in pair(*flags, out="resumed")[1]]
    assert ended == [(0, "")] * 2
    support.assert_same_bits(files(tmp_path / "resumed").trained, whole.trained)
    np.testing.assert_array_equal(files(tmp_path / "resumed").losses, whole.losses)


@pytest.mark.programs
def test_what_stops_process_0_stops_the_other(tmp_path, pair):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "results").touch()
    first, other = map(ends, pair("sgd", devices=1)[1])
    assert first[0] == 2
    assert "exists and is not an empty folder" in first[2]
    assert other == (1, "", "optperm: error: process 0 has failed: its own message says why.\n")


def listens_on(port):
    """The local addresses, as in /proc/net/tcp, on which somebody listens."""
    lines = [
        line.split()
        for name in ("tcp", "tcp6")
        for line in pathlib.Path("/proc/net", name).read_text().splitlines()[1:]
    ]
    ends = (line[1].rsplit(":", 1) for line in lines if line[3] == "0A")
    return {address for address, of in ends if int(of, 16) == port}


@pytest.mark.programs
def test_ctrl_c_in_one_process_stops_both_and_saves(tmp_path, files, pair, wait_for_epochs):
    port, processes = pair("sgd", "--epochs", "1000000", devices=1)
    wait_for_epochs(tmp_path / "run", processes[0], 3)
    # 127.0.0.1, as that of IPv4 or of IPv6.
    assert {address[-8:] for address in listens_on(port)} == {"0100007F"}
    processes[1].send_signal(signal.SIGINT)
    first, other = map(ends, processes)
    assert (other[:2], first[::2]) == ((130, ""), (130, ""))
    assert files(tmp_path / "run").summary["interrupted"] is True
    assert 3 <= files(tmp_path / "run").summary["epochs_done"] < 1_000_000
    assert main(["evaluate", str(tmp_path / "run")]) == 0


@pytest.mark.exhaustive
def test_a_process_that_dies_leaves_no_other_waiting(tmp_path, pair, wait_for_epochs):
    # With several devices in a process it takes longer: those that wait for one another there do not
    # hear of it, until JAX misses the other process's sign of life.
    _, processes = pair("sgd", "--epochs", "1000000", devices=1)
    wait_for_epochs(tmp_path / "run", processes[0], 3)
    processes[1].kill()
    code, _, err = ends(processes[0])
    assert code == 1
    assert err.startswith("optperm: error: another process has ended or cannot be reached")
    assert err.count("\n") == 1
