"""Replicas of a network, one a device, in one process or in several."""

import contextlib
import dataclasses
import functools
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from optperm.cli import roll_call
from optperm.cli.errors import CliError, LostProcessError
from optperm.cli.roll_call import Address

AXIS = "replica"
# How long JAX waits for the others at its start and end, when all of them are about to be there, and
# for a sign of life meanwhile: mostly a failed collective tells sooner that a process has died.
_MEETING_SECONDS, _SILENCE_SECONDS = 60, 30


@dataclasses.dataclass(frozen=True)
class Replicas:
    """The replicas of a run, as one of its processes sees them.

    What all replicas share lies on every device. What each has for itself is stacked along a leading
    axis, of which every device holds its part.

    Attributes:
      devices: Devices of each process.
      coordinator: Where process 0 listens; None for a single process.
      num_processes: How many processes.
      process_id: Which of them this is.
      mesh: All devices, along `AXIS`, from `start` on; None for a single replica, which runs wherever
        JAX puts it.
    """

    devices: int = 1
    coordinator: Address | None = None
    num_processes: int = 1
    process_id: int = 0
    mesh: Mesh | None = None

    @property
    def size(self) -> int:
        """How many replicas."""
        return self.devices * self.num_processes

    @property
    def axis_name(self) -> str | None:
        """The mapped axis of the replicas; None where there is but one."""
        return AXIS if self.size > 1 else None

    @property
    def device_kind(self) -> str:
        """What the replicas run on."""
        devices = self.mesh.devices.flat if self.mesh else jax.devices()
        return str(devices[0].device_kind)

    def local(self) -> contextlib.AbstractContextManager[None]:
        """Makes arrays on the first device of this process meanwhile, in this thread alone."""
        return jax.default_device(self.mesh.local_devices[0] if self.mesh else None)

    def each(self, function: Callable[[Any, Any], tuple[Any, Any]], *, own: bool) -> Any:
        """Compiles a function to run on every replica at once.

        Args:
          function: From a carry and what all replicas share, it makes the next carry, and a result
            that is the same on every replica.
          own: Whether each replica has a carry of its own, instead of all sharing one.

        Returns:
          The jitted function, for trees that `scatter` has placed.
        """
        if self.mesh is None:
            return jax.jit(function)
        spec = P(AXIS) if own else P()

        def on_replica(carry: Any, shared: Any) -> tuple[Any, Any]:
            if not own:
                return function(carry, shared)
            carry, result = function(jax.tree.map(lambda part: part[0], carry), shared)
            return jax.tree.map(lambda leaf: leaf[None], carry), result

        return jax.jit(
            jax.shard_map(on_replica, mesh=self.mesh, in_specs=(spec, P()), out_specs=(spec, P()))
        )

    def jit(self, function: Callable[..., Any]) -> Any:
        """Jits a function of what all replicas share, that gives what they share."""
        if self.mesh is None:
            return jax.jit(function)
        return jax.jit(function, out_shardings=NamedSharding(self.mesh, P()))

    def scatter(self, tree: Any, *, own: bool = False) -> Any:
        """Puts a tree onto all devices: whole, or of each leaf the part of each replica."""
        if self.mesh is None:
            return jax.tree.map(jnp.asarray, tree)
        sharding = NamedSharding(self.mesh, P(AXIS) if own else P())

        def put(leaf: Any) -> jax.Array:
            host = np.asarray(leaf)
            return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])

        return jax.tree.map(put, tree)

    def gather(self, tree: Any, *, own: bool) -> Any:
        """Undoes `scatter`, in every process: the tree as NumPy arrays."""
        if own and self.num_processes > 1:
            tree = self.together(
                functools.partial(multihost_utils.process_allgather, tiled=True), tree
            )
        elif not own:
            tree = self.first(tree)
        return jax.tree.map(np.asarray, tree)

    def from_main(self, content: bytes) -> bytes:
        """What process 0 brings, in every process; what the others bring is ignored."""
        if self.num_processes == 1:
            return content
        share = functools.partial(self.together, multihost_utils.broadcast_one_to_all)
        header = np.frombuffer(len(content).to_bytes(8, "big"), np.uint8)
        size = int.from_bytes(np.asarray(share(header)).tobytes(), "big")
        is_main = self.process_id == 0
        data = np.frombuffer(content, np.uint8) if is_main else np.zeros(size, np.uint8)
        return np.asarray(share(data)).tobytes()

    def first(self, tree: Any, *, own: bool = False) -> Any:
        """The tree of the first replica in this process, as arrays on its device alone."""
        if self.mesh is None:
            return tree
        parts = jax.tree.map(lambda leaf: leaf.addressable_data(0), tree)
        return jax.tree.map(lambda part: part[0], parts) if own else parts

    def together(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Calls what all processes call, and waits for what they compute together.

        Raises:
          LostProcessError: If another process ended meanwhile.
        """
        if self.num_processes == 1:
            return jax.block_until_ready(function(*arguments))
        try:
            return jax.block_until_ready(function(*arguments))
        except (ValueError, RuntimeError) as error:  # a collective that fails raises either
            raise LostProcessError(
                f"another process has ended or cannot be reached ({error})."
            ) from error

    def any(self, flag: bool) -> bool:
        """Whether the flag is set in any process. All of them have to ask, and get one answer."""
        if self.num_processes == 1:
            return flag
        return bool(np.any(self.together(multihost_utils.process_allgather, np.asarray(flag))))

    def on_main(self, work: Callable[..., Any], *arguments: Any) -> Any:
        """Lets process 0 do what only one may, while the others wait.

        Args:
          work: What to do.
          *arguments: Its arguments.

        Returns:
          Its result in process 0, None in the others.

        Raises:
          CliError: If it failed: with its own error in process 0, and in the others as well.
        """
        result, failure = None, None
        if self.process_id == 0:
            try:
                result = work(*arguments)
            except (CliError, OSError) as error:
                failure = error
        failed = self.any(failure is not None)
        if failure is not None:
            raise failure
        if failed:
            raise CliError("process 0 has failed: its own message says why.")
        return result


@contextlib.contextmanager
def start(
    planned: Replicas, facts: Mapping[str, Any], *, on_wait: Callable[[], None]
) -> Iterator[Replicas]:
    """Connects the processes, and finds the devices of the replicas.

    Where several devices are asked for and JAX has fewer, the processor stands in for as many. Where
    one is, nothing is done at all.

    Args:
      planned: The replicas, without their mesh.
      facts: What has to be the same in all processes: names and JSON values.
      on_wait: Called in process 0 when it begins to wait for the others.

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
    if planned.coordinator is not None and planned.num_processes > 1:
        _connect(planned, planned.coordinator, facts, on_wait)
    if planned.size == 1:
        yield planned
        return
    group = dataclasses.replace(planned, mesh=Mesh(np.array(_devices(planned)), AXIS))
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


def _devices(planned: Replicas) -> list[jax.Device]:
    """As many devices of each process, of JAX's own choice if that has enough, else processors."""
    counts = []
    for platform in (None, "cpu"):
        of_process: list[list[jax.Device]] = [[] for _ in range(planned.num_processes)]
        for device in jax.devices(platform):
            of_process[device.process_index].append(device)
        counts.append(min(map(len, of_process)))
        if counts[-1] >= planned.devices:
            return [device for some in of_process for device in some[: planned.devices]]
    raise CliError(
        f"--devices {planned.devices}: JAX has started with {max(counts)} already, in this process. "
        "Run optperm as a program of its own, or start this one with the environment variable "
        f"JAX_NUM_CPU_DEVICES={planned.devices}."
    )
