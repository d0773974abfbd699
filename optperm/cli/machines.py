"""The devices and processes of a run: how they are found, and how process 0 decides for all."""

import contextlib
import dataclasses
import json
import os
import sys
from collections.abc import Callable
from typing import Annotated, Any

import jax

from optperm.cli.errors import CliError, UsageError
from optperm.cli.flags import Whole, whole_from
from optperm.training import processes

# How long JAX waits for the other processes at the start and the end, and for a sign of life meanwhile:
# mostly a failed collective tells sooner that one has died.
_MEETING_SECONDS, _SILENCE_SECONDS = 60, 30
# What launchers of several processes set in each, beside how many they are.
_LAUNCHERS = {"SLURM_STEP_NODELIST": "SLURM_NTASKS", "OMPI_COMM_WORLD_RANK": "OMPI_COMM_WORLD_SIZE"}
_KUBERNETES = {"KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machines:
    """Where a network is trained.

    Attributes:
      devices: Devices of each process, each with a replica of the network. Where JAX has fewer, the
        processor stands in for them.
      coordinator: Where all others reach process 0, HOST:PORT, a free port of its machine. For several
        processes start each with all flags the same but --process-id, where they share folders; process
        0 alone prints. Under SLURM, Open MPI and Kubernetes JAX finds them without these flags.
      num_processes: How many processes.
      process_id: Which of them this is, from 0.
    """

    devices: Whole = 1
    coordinator: str | None = None
    num_processes: Whole | None = None
    process_id: Annotated[int, whole_from(0)] | None = None

    def connect(self, on_wait: Callable[[], None]) -> None:
        """Connects the processes, if there are several, and asks JAX for as many devices.

        `on_wait` is called in process 0 before it waits for the others. A CliError if they do not meet.
        """
        known: int = jax.config.jax_num_cpu_devices  # type: ignore[attr-defined]
        if 1 < self.devices > known:
            # Refused once the backend has started: then its devices must do.
            with contextlib.suppress(RuntimeError):
                jax.config.update("jax_num_cpu_devices", self.devices)
        given = {self.coordinator, self.num_processes, self.process_id} - {None}
        if self.num_processes == 1 or not (given or is_launched()):
            return
        host, _, port = (self.coordinator or "").rpartition(":")
        is_local = host in ("localhost", "[::1]") or host.startswith("127.")
        if given and not (host and port.isdecimal() and 0 < int(port) < 2**16):
            raise UsageError(
                "--coordinator must be HOST:PORT, with a port from 1 to 65535, and goes with "
                f"--num-processes and --process-id, got {self.coordinator!r}."
            )
        if self.process_id == 0:
            on_wait()
        _silence_native_output()
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        try:
            jax.distributed.initialize(
                self.coordinator,
                self.num_processes,
                self.process_id,
                # By default JAX listens on all addresses of the machine.
                coordinator_bind_address=self.coordinator if is_local else None,
                initialization_timeout=_MEETING_SECONDS,
                shutdown_timeout_seconds=_MEETING_SECONDS,
                heartbeat_timeout_seconds=_SILENCE_SECONDS,
            )
        except (RuntimeError, ValueError) as error:
            raise CliError(f"JAX cannot connect the processes: {error}") from error


def is_launched() -> bool:
    """Whether SLURM, Open MPI or Kubernetes has started this process as one of several."""
    sizes = [os.environ.get(size, "1") for mark, size in _LAUNCHERS.items() if mark in os.environ]
    return any(size.isdecimal() and int(size) > 1 for size in sizes) or {*os.environ} >= _KUBERNETES


def decided(work: Callable[[], Any]) -> Any:
    """What `work` gives in process 0, JSON values, in all processes; if it fails, a CliError."""
    text, failure = "null", None
    if jax.process_index() == 0:
        try:
            text = json.dumps(work())
        except (CliError, OSError) as error:
            failure = error
    answer = json.loads(processes.gather_texts(text)[0])
    if failure is not None:
        raise failure
    if answer is None:
        raise CliError("process 0 has failed: its own message says why.")
    return answer


def _silence_native_output() -> None:
    """Leaves stdout to Python: Gloo reports its connections there, from C++."""
    sys.stdout.flush()
    stdout = os.fdopen(os.dup(1), "w", encoding=sys.stdout.encoding, errors="backslashreplace")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.stdout = stdout
