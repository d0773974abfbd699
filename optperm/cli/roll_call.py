"""The roll call: the processes of a run find one another before JAX connects them.

Where the coordinator's port is taken, or a process does not come or comes twice, JAX ends the whole
process with a C++ stack trace. So all of them first meet on that port by themselves: each tells
process 0 who it is and what it was told to do, and JAX connects them once they are there and agree.
"""

import contextlib
import errno
import json
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from optperm.cli.errors import CliError
from optperm.training.checkpoints import differences

WAIT_SECONDS = 120
_ANSWER_SECONDS = 5.0
_POLL_SECONDS = 0.2
_MAX_LINE = 1 << 16


class Address(NamedTuple):
    """Where process 0 listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def hold(
    address: Address,
    num_processes: int,
    process_id: int,
    facts: Mapping[str, Any],
    *,
    on_wait: Callable[[], None],
) -> None:
    """Returns, in every process, once all of them are there and agree.

    Args:
      address: Where process 0 listens, and the others look for it.
      num_processes: How many processes there are.
      process_id: Which of them this is, from 0.
      facts: What has to be the same in all of them: names and JSON values.
      on_wait: Called in process 0 when it listens.

    Raises:
      CliError: If the port is taken, process 0 cannot be reached, a process does not come, or this one
        is not of the same run.
    """
    try:
        socket.getaddrinfo(*address)
    except (socket.gaierror, UnicodeError) as error:
        raise CliError(
            f"--coordinator {address}: the host {address.host} cannot be found ({error})."
        ) from error
    if process_id == 0:
        _preside(address, num_processes, facts, on_wait)
    else:
        _attend(address, {"process_id": process_id, "num_processes": num_processes, "facts": facts})


def _preside(
    address: Address,
    num_processes: int,
    facts: Mapping[str, Any],
    on_wait: Callable[[], None],
) -> None:
    present: dict[int, socket.socket] = {}
    refused = ""
    deadline = time.monotonic() + WAIT_SECONDS
    with contextlib.ExitStack() as sockets:
        server = sockets.enter_context(_listen(address))
        server.settimeout(_POLL_SECONDS)
        on_wait()
        while True:
            present = {other: link for other, link in present.items() if not _has_left(link)}
            missing = sorted(set(range(1, num_processes)) - present.keys())
            if not missing:
                break
            if time.monotonic() > deadline:
                who = ", ".join(map(str, missing))
                message = (
                    f"of {num_processes} processes, {who} did not come to {address} within "
                    f"{WAIT_SECONDS} seconds.{refused} Start each with its own --process-id."
                )
                for connection in present.values():
                    _send(connection, {"error": message})
                raise CliError(message)
            try:
                connection = sockets.enter_context(server.accept()[0])
            except TimeoutError:
                continue
            caller = _receive(connection, _ANSWER_SECONDS)
            if not caller.keys() >= {"process_id", "num_processes", "facts"}:
                continue  # a stranger, such as a port scanner
            error = _objection(caller, num_processes, facts, present)
            if error:
                refused = f" Turned away: {error}"
                _send(connection, {"error": error})
            else:
                present[caller["process_id"]] = connection
        for connection in present.values():
            _send(connection, {"error": None})
        for connection in present.values():
            # Whoever closes first keeps the port busy for a while: not this side, JAX needs it now.
            _receive(connection, _ANSWER_SECONDS)


def _objection(
    caller: Mapping[str, Any],
    num_processes: int,
    facts: Mapping[str, Any],
    present: Mapping[int, socket.socket],
) -> str | None:
    process_id = caller["process_id"]
    if caller["num_processes"] != num_processes:
        return (
            f"process {process_id} was started with --num-processes {caller['num_processes']}, "
            f"process 0 with {num_processes}."
        )
    if process_id in present and not _has_left(present[process_id]):
        return f"--process-id {process_id} is taken: another process with it has come already."
    if which := differences(caller["facts"], facts, "in process 0"):
        return f"process {process_id} is not of the same run: {which}."
    return None


def _attend(address: Address, introduction: Mapping[str, Any]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while True:
        try:
            connection = socket.create_connection(address, timeout=_ANSWER_SECONDS)
            break
        except OSError as error:
            if time.monotonic() > deadline:
                raise CliError(
                    f"process 0 cannot be reached at {address} ({error.strerror or error}), tried "
                    f"for {WAIT_SECONDS} seconds. Start it, and pass the same --coordinator to all."
                ) from error
            time.sleep(_POLL_SECONDS)
    with connection:
        _send(connection, introduction)
        # Process 0 may have begun to wait only now.
        answer = _receive(connection, WAIT_SECONDS + 2 * _ANSWER_SECONDS)
    if "error" not in answer:
        raise CliError(f"what answers at {address} is not process 0, or process 0 has ended.")
    if answer["error"]:
        raise CliError(answer["error"])


def _listen(address: Address) -> socket.socket:
    # On all interfaces, like JAX after it.
    two_stacks = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if two_stacks else socket.AF_INET
    try:
        return socket.create_server(
            ("", address.port), family=family, dualstack_ipv6=two_stacks, backlog=1024
        )
    except OSError as error:
        why = "in use" if error.errno == errno.EADDRINUSE else error.strerror
        raise CliError(
            f"--coordinator {address}: cannot listen on port {address.port} ({why}). "
            "Choose another one, the same for all processes."
        ) from error


def _send(connection: socket.socket, message: Mapping[str, Any]) -> None:
    with contextlib.suppress(OSError):  # one that has left is missed soon enough
        connection.sendall(json.dumps(message).encode() + b"\n")


def _receive(connection: socket.socket, seconds: float) -> dict[str, Any]:
    """The JSON object that comes on one line; an empty one if nothing of the kind comes."""
    connection.settimeout(seconds)
    try:
        with connection.makefile("rb") as file:
            message = json.loads(file.readline(_MAX_LINE))
    except (OSError, ValueError):
        return {}
    return message if isinstance(message, dict) else {}


def _has_left(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return not connection.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True
    finally:
        connection.setblocking(True)
