"""The roll call: who belongs to a run gets in, and everybody else is told why not."""

import concurrent.futures
import contextlib
import json
import socket
import threading

import pytest

from optperm.cli import roll_call
from optperm.cli.errors import CliError
from optperm.cli.roll_call import Address

FACTS = {"--seed": 0, "the method": "sgd"}


@pytest.fixture
def address():
    with socket.create_server(("127.0.0.1", 0)) as free:
        return Address("127.0.0.1", free.getsockname()[1])


@pytest.fixture
def hold(address, monkeypatch):
    """Starts a process's part in a thread; process 0's after it listens."""
    monkeypatch.setattr(roll_call, "WAIT_SECONDS", 10)
    with concurrent.futures.ThreadPoolExecutor() as pool:

        def start(process_id, num_processes, facts=FACTS):
            listens = threading.Event()
            future = pool.submit(
                roll_call.hold, address, num_processes, process_id, facts, on_wait=listens.set
            )
            assert process_id or listens.wait(5)
            return future

        yield start


def introduce(address, process_id, num_processes):
    connection = socket.create_connection(address, timeout=5)
    line = {"process_id": process_id, "num_processes": num_processes, "facts": FACTS}
    connection.sendall(json.dumps(line).encode() + b"\n")
    return connection


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_processes_find_one_another_in_any_order(hold, address, order):
    futures = [hold(process_id, 3) for process_id in order]
    assert [future.result(timeout=10) for future in futures] == [None] * 3
    # Nobody holds the port any more: JAX takes it next.
    socket.create_server(("", address.port)).close()


def test_nobody_goes_ahead_before_the_last_has_come(hold):
    early = [hold(0, 3), hold(1, 3)]
    with pytest.raises(concurrent.futures.TimeoutError):
        early[1].result(timeout=0.5)
    assert not early[0].done()
    for future in (hold(2, 3), *early):
        future.result(timeout=10)


def test_one_that_is_not_of_the_run_is_told_so_and_the_right_one_still_gets_in(hold):
    first = hold(0, 2)
    with pytest.raises(CliError, match=r"not of the same run: --seed is 5 there and 0 in process"):
        hold(1, 2, FACTS | {"--seed": 5}).result(timeout=10)
    with pytest.raises(CliError, match="with --num-processes 3, process 0 with 2"):
        hold(2, 3).result(timeout=10)
    assert not first.done()
    hold(1, 2).result(timeout=10)
    first.result(timeout=10)


def test_an_id_is_taken_until_its_process_leaves(hold, address):
    first = hold(0, 3)
    with introduce(address, 1, 3), pytest.raises(CliError, match="--process-id 1 is taken"):
        hold(1, 3).result(timeout=10)
    for future in (hold(1, 3), hold(2, 3), first):
        future.result(timeout=10)


def test_strangers_are_ignored(hold, address):
    first = hold(0, 2)
    for line in (b"GET / HTTP/1.1\r\n\r\n", b'{"process_id": 1}\n', b"[1]\n", b""):
        with socket.create_connection(address) as stranger:
            stranger.sendall(line)
    hold(1, 2).result(timeout=10)
    first.result(timeout=10)


def test_processes_that_do_not_come_are_named_to_all(hold, monkeypatch):
    monkeypatch.setattr(roll_call, "WAIT_SECONDS", 1)
    for future in (hold(0, 4), hold(2, 4)):
        with pytest.raises(CliError, match=r"of 4 processes, 1, 3 did not come .* 1 seconds"):
            future.result(timeout=10)


def test_a_missing_process_0_is_noticed(hold, address, monkeypatch):
    monkeypatch.setattr(roll_call, "WAIT_SECONDS", 0.5)
    with pytest.raises(CliError, match=f"cannot be reached at {address}.*Start it"):
        hold(1, 2).result(timeout=10)


def test_a_port_that_is_in_use_is_refused(address):
    with (
        socket.create_server(address),
        pytest.raises(CliError, match=rf"listen on port {address.port} \(in use\)\. Choose"),
    ):
        roll_call.hold(address, 2, 0, FACTS, on_wait=lambda: None)


@pytest.mark.parametrize("says", [b"SSH-2.0-OpenSSH_9.6\r\n", b"\x00\x00\x12\x04", b""])
def test_another_program_on_the_port_is_told_from_process_0(hold, address, says):
    with socket.create_server(address) as server:
        future = hold(1, 2)
        with contextlib.closing(server.accept()[0]) as connection:
            connection.sendall(says)
    with pytest.raises(CliError, match="is not process 0, or process 0 has ended"):
        future.result(timeout=10)


def test_a_host_that_cannot_be_found_is_named():
    with pytest.raises(CliError, match=r"--coordinator a\.\.b:80: the host a\.\.b cannot be found"):
        roll_call.hold(Address("a..b", 80), 2, 1, FACTS, on_wait=lambda: None)
