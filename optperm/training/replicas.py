"""Replicas of a model, one a device, in one process or in several."""

import contextlib
import dataclasses
import functools
import json
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

AXIS = "replica"


class LostProcessError(RuntimeError):
    """Another process of the run has ended, and what this one still runs may never come to an end."""


@dataclasses.dataclass(frozen=True)
class Replicas:
    """The replicas of a run, as one of its processes sees them.

    What all replicas share lies on every device. What each has for itself is stacked along a leading
    axis, of which every device holds its part.

    Attributes:
      devices: Devices of each process.
      num_processes: How many processes.
      process_id: Which of them this is.
      mesh: All devices, along `AXIS`; None for a single replica, which runs wherever JAX puts it.
    """

    devices: int = 1
    num_processes: int = 1
    process_id: int = 0
    mesh: Mesh | None = None

    @property
    def size(self) -> int:
        """How many replicas."""
        return self.devices * self.num_processes

    @property
    def axis_name(self) -> str | None:
        """The mapped axis of the replicas; None where none is mapped over."""
        return AXIS if self.mesh is not None or self.size > 1 else None

    @property
    def device_kind(self) -> str:
        """What the replicas run on."""
        devices = self.mesh.devices.flat if self.mesh else jax.devices()
        return str(devices[0].device_kind)

    def local(self) -> contextlib.AbstractContextManager[None]:
        """Makes arrays on the first device of this process meanwhile, in this thread alone."""
        return jax.default_device(self.mesh.local_devices[0] if self.mesh else None)

    def each(
        self,
        function: Callable[[Any, Any, Any], tuple[Any, Any]],
        *,
        own: bool,
        donate: bool = False,
    ) -> Any:
        """Compiles a function to run on every replica at once.

        Args:
          function: From a carry, what all replicas share, and what each has a part of, it makes the
            next carry, and a result that is the same on every replica.
          own: Whether each replica has a carry of its own, instead of all sharing one.
          donate: Whether the memory of the carry is given up to the next one.

        Returns:
          The jitted function, for trees that `scatter` has placed, of examples along their leading
          axis where each replica has a part.
        """
        donated = (0,) if donate else ()
        if self.mesh is None:
            return jax.jit(function, donate_argnums=donated)
        spec = P(AXIS) if own else P()

        def on_replica(carry: Any, shared: Any, parts: Any) -> tuple[Any, Any]:
            if not own:
                return function(carry, shared, parts)
            carry, result = function(jax.tree.map(lambda part: part[0], carry), shared, parts)
            return jax.tree.map(lambda leaf: leaf[None], carry), result

        mapped = jax.shard_map(
            on_replica, mesh=self.mesh, in_specs=(spec, P(), P(AXIS)), out_specs=(spec, P())
        )
        return jax.jit(mapped, donate_argnums=donated)

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

    def scatter_local(self, tree: Any) -> Any:
        """Deals out what this process has of a batch to its devices, along the leading axis."""
        if self.mesh is None:
            return tree
        sharding = NamedSharding(self.mesh, P(AXIS))
        return jax.tree.map(
            lambda leaf: jax.make_array_from_process_local_data(sharding, np.asarray(leaf)), tree
        )

    def fresh(self, placed: Any) -> Any:
        """A copy of a tree that lies on the devices, of memory that a loop may give up."""
        if self.mesh is None:
            return jax.jit(_copied)(placed)
        shardings = jax.tree.map(lambda leaf: leaf.sharding, placed)
        return jax.jit(_copied, out_shardings=shardings)(placed)

    def stacked(self, tree: Any) -> Any:
        """One copy of a tree for each replica, placed; of a single one without a mesh, the tree."""
        if self.mesh is None:
            return self.scatter(tree)
        copies = jax.tree.map(
            lambda leaf: np.broadcast_to(np.asarray(leaf), (self.size, *np.shape(leaf))), tree
        )
        return self.scatter(copies, own=True)

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

    def agree(self, facts: Any) -> bool:
        """Whether JSON values are the same in all processes. All of them have to ask."""
        here = json.dumps(facts, sort_keys=True).encode()
        return not self.any(self.from_main(here) != here)

    def on_main(
        self, work: Callable[..., Any], *arguments: Any, failed: Callable[[str], Exception]
    ) -> Any:
        """Lets process 0 do what only one may, while the others wait.

        Args:
          work: What to do.
          *arguments: Its arguments.
          failed: Makes the error that the others raise where process 0 failed, from its message.

        Returns:
          Its result in process 0, None in the others.

        Raises:
          Exception: If it failed: its own error in process 0, that of `failed` in the others.
        """
        result, failure = None, None
        if self.process_id == 0:
            try:
                result = work(*arguments)
            except Exception as error:  # the others wait for an answer, whatever it is
                failure = error
        any_failed = self.any(failure is not None)
        if failure is not None:
            raise failure
        if any_failed:
            raise failed("process 0 has failed: its own message says why.")
        return result


def _copied(tree: Any) -> Any:
    return jax.tree.map(jnp.copy, tree)


def mesh_of(devices: int, num_processes: int) -> Mesh | int:
    """The mesh of as many devices of each process, or the number of devices that there are instead.

    They are of JAX's own choice if that has enough, else processors.
    """
    counts = []
    for platform in (None, "cpu"):
        of_process: list[list[jax.Device]] = [[] for _ in range(num_processes)]
        for device in jax.devices(platform):
            of_process[device.process_index].append(device)
        counts.append(min(map(len, of_process)))
        if counts[-1] >= devices:
            chosen = [device for some in of_process for device in some[:devices]]
            return Mesh(np.array(chosen), (AXIS,))
    return max(counts)
