"""The processes and devices of a run: how they are found."""

import contextlib
import dataclasses
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from optperm.cli import roll_call
from optperm.cli.errors import CliError
from optperm.cli.roll_call import Address
from optperm.training.replicas import Replicas, mesh_of

# How long JAX waits for the others at its start and end, when all of them are about to be there, and
# for a sign of life meanwhile: mostly a failed collective tells sooner that a process has died.
_MEETING_SECONDS, _SILENCE_SECONDS = 60, 30


def on_main(group: Replicas, work: Callable[..., Any], *arguments: Any) -> Any:
    """Lets process 0 do what only one may; if it fails, the others end with a `CliError` as well."""
    return group.on_main(work, *arguments, failed=CliError)


@contextlib.contextmanager
def start(
    planned: Replicas,
    facts: Mapping[str, Any],
    *,
    on_wait: Callable[[], None],
    coordinator: Address | None = None,
) -> Iterator[Replicas]:
    """Connects the processes, and finds the devices of the replicas.

    Where several devices are asked for and JAX has fewer, the processor stands in for as many. Where
    one is, nothing is done at all.

    Args:
      planned: The replicas, without their mesh.
      facts: What has to be the same in all processes: names and JSON values.
      on_wait: Called in process 0 when it begins to wait for the others.
      coordinator: Where process 0 listens; None for a single process.

    Yields:
      The replicas with their mesh. Meanwhile arrays are made on the first device of this process.

    Raises:
      CliError: If the processes do not find one another, or there are not enough devices.
    """
    known: int = jax.config.jax_num_cpu_devices  # type: ignore[attr-defined]
    if 1 < planned.devices > known:
        # Refused once the backend has started: then its devices must do.
        with contextlib.suppress(RuntimeError):
            jax.config.update("jax_num_cpu_devices", planned.devices)
    if coordinator is not None and planned.num_processes > 1:
        _connect(planned, coordinator, facts, on_wait)
    if planned.size == 1:
        yield planned
        return
    mesh = mesh_of(planned.devices, planned.num_processes)
    if isinstance(mesh, int):
        raise CliError(
            f"--devices {planned.devices}: JAX has started with {mesh} already, in this process. "
            "Run optperm as a program of its own, or start this one with the environment variable "
            f"JAX_NUM_CPU_DEVICES={planned.devices}."
        )
    group = dataclasses.replace(planned, mesh=mesh)
    with group.local():
        yield group


def _connect(
    planned: Replicas, address: Address, facts: Mapping[str, Any], on_wait: Callable[[], None]
) -> None:
    roll_call.hold(address, planned.num_processes, planned.process_id, facts, on_wait=on_wait)
    _silence_native_output()
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    try:
        jax.distributed.initialize(
            str(address),
            planned.num_processes,
            planned.process_id,
            initialization_timeout=_MEETING_SECONDS,
            shutdown_timeout_seconds=_MEETING_SECONDS,
            heartbeat_timeout_seconds=_SILENCE_SECONDS,
        )
    except RuntimeError as error:
        raise CliError(f"JAX cannot connect the processes: {error}") from error


def _silence_native_output() -> None:
    """Leaves stdout to Python: Gloo reports its connections there, from C++."""
    sys.stdout.flush()
    stdout = os.fdopen(os.dup(1), "w", encoding=sys.stdout.encoding, errors="backslashreplace")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.stdout = stdout
