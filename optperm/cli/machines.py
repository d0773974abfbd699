"""The devices and processes of a run: how they are found, and how process 0 decides for all."""

import contextlib
import dataclasses
import json
import os
import sys
from collections.abc import Callable
from typing import Annotated, Any

import jax
import numpy as np
from cyclopts import Parameter
from jax.experimental import multihost_utils

from optperm.cli.errors import CliError, UsageError
from optperm.cli.flags import Whole, whole_from
from optperm.training.processes import LostProcessError

# How long JAX waits for the other processes at the start, at the end, and for a sign of life meanwhile:
# mostly a failed collective tells sooner that one has died.
_MEETING_SECONDS, _LEAVING_SECONDS, _SILENCE_SECONDS = 120, 60, 30
# What tells that a launcher has started several processes, which JAX then finds by itself.
_CLUSTERS = (
    ("SLURM_STEP_NODELIST", "SLURM_NTASKS"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
)
_KUBERNETES = ("KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX")
_TEXT_BYTES = 1 << 14


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machines:
    """Where a network is trained.

    Attributes:
      devices: Devices of each process, each with a replica of the network. Where JAX has fewer, the
        processor stands in for them.
      coordinator: Where all others reach process 0, HOST:PORT, a free port of its machine. For several
        processes start each with all flags the same but --process-id, in folders that they share;
        process 0 alone prints. Under SLURM, Open MPI and Kubernetes JAX finds them without these flags.
      num_processes: How many processes.
      process_id: Which of them this is, from 0.
    """

    devices: Whole = 1
    coordinator: str | None = None
    num_processes: Whole | None = None
    process_id: Annotated[int, whole_from(0), Parameter(show_default=False)] | None = None

    def connect(self, on_wait: Callable[[], None]) -> None:
        """Connects the processes, if there are several, and asks JAX for as many devices.

        Args:
          on_wait: Called in process 0 before it waits for the others.

        Raises:
          UsageError: If the flags do not fit together.
          CliError: If the processes do not find one another.
        """
        where = self._address()
        if jax.config.jax_num_cpu_devices < self.devices > 1:  # type: ignore[attr-defined]
            # Refused once the backend has started: then its devices must do.
            with contextlib.suppress(RuntimeError):
                jax.config.update("jax_num_cpu_devices", self.devices)
        if where is None and not is_launched() or self.num_processes == 1:
            return
        if self.process_id == 0:
            on_wait()
        _silence_native_output()
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        try:
            jax.distributed.initialize(
                **where or {},
                initialization_timeout=_MEETING_SECONDS,
                shutdown_timeout_seconds=_LEAVING_SECONDS,
                heartbeat_timeout_seconds=_SILENCE_SECONDS,
            )
        except (RuntimeError, ValueError) as error:
            raise CliError(f"JAX cannot connect the processes: {error}") from error

    def _address(self) -> dict[str, Any] | None:
        """The arguments that say where to meet; None where no flag does."""
        given = {
            "--coordinator": self.coordinator,
            "--num-processes": self.num_processes,
            "--process-id": self.process_id,
        }
        missing = [flag for flag, value in given.items() if value is None]
        if len(missing) == len(given):
            return None
        if missing:
            raise UsageError(
                f"{', '.join(given)} go together: without them there is one process, or as many as a "
                f"cluster has started. Pass {', '.join(missing)} as well."
            )
        assert self.coordinator is not None
        assert self.num_processes is not None
        assert self.process_id is not None
        host, _, port = self.coordinator.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
            raise UsageError(
                "--coordinator must be HOST:PORT, with a port from 1 to 65535, got "
                f"{self.coordinator!r}."
            )
        if self.process_id >= self.num_processes:
            raise UsageError(
                f"--process-id must be from 0 to {self.num_processes - 1} where --num-processes is "
                f"{self.num_processes}, got {self.process_id}."
            )
        is_local = host in ("localhost", "[::1]") or host.startswith("127.")
        return {
            "coordinator_address": self.coordinator,
            "num_processes": self.num_processes,
            "process_id": self.process_id,
            # By default JAX listens on all addresses of the machine.
            "coordinator_bind_address": self.coordinator if is_local else None,
        }


def is_launched() -> bool:
    """Whether SLURM, Open MPI or Kubernetes has started this process as one of several."""
    counts = [os.environ.get(size, "1") for mark, size in _CLUSTERS if mark in os.environ]
    several = any(count.isdecimal() and int(count) > 1 for count in counts)
    return several or all(name in os.environ for name in _KUBERNETES)


def decided(work: Callable[[], Any]) -> Any:
    """What `work` gives in process 0, JSON values, in all processes.

    Raises:
      CliError: In the others, if it fails in process 0.
    """
    if jax.process_count() == 1:
        return work()
    text, failure = b"", None
    if jax.process_index() == 0:
        try:
            text = json.dumps(work()).encode()
        except (CliError, OSError) as error:
            failure = error
    padded = np.frombuffer(text.ljust(_TEXT_BYTES, b"\0"), np.uint8)
    try:
        told = np.asarray(multihost_utils.broadcast_one_to_all(padded)).astype(np.uint8).tobytes()
    except (ValueError, RuntimeError) as error:  # a collective that fails raises either
        raise LostProcessError(
            f"another process has ended or cannot be reached ({error})."
        ) from error
    if failure is not None:
        raise failure
    if not told.strip(b"\0"):
        raise CliError("process 0 has failed: its own message says why.")
    return json.loads(told.strip(b"\0"))


def _silence_native_output() -> None:
    """Leaves stdout to Python: Gloo reports its connections there, from C++."""
    sys.stdout.flush()
    stdout = os.fdopen(os.dup(1), "w", encoding=sys.stdout.encoding, errors="backslashreplace")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.stdout = stdout
