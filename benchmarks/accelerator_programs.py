"""Compile programs ahead of time for TPUs and GPUs that are not present.

For TPUs, `libtpu` compiles for the name of a topology. For GPUs, the wheels `jax-cuda12-plugin` and
`jax-cuda12-pjrt` compile for a description of the device, without a driver.
"""

import math
import os
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from collectives import COMPUTATION, INSTRUCTION, Collective, count_bytes, find_collectives
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

# Read when the library is loaded: no metadata server is asked, and several processes may load it.
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
# To compile, no cuDNN is loaded.
os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")


# What XLA asks of a device that it compiles for: values of an H100.
_H100 = """
gpu_device_info {
  cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
  core_count: 132
  fpus_per_core: 128
  clock_rate_ghz: 1.98
  memory_bandwidth: 3352320000000
  l2_cache_size: 52428800
  device_memory_size: 84942979072
  device_address_bits: 64
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  shared_memory_per_block_optin: 232448
  driver_version: "13.0.0"
  runtime_version: "12.8.0"
  compile_time_toolkit_version: "12.8.0"
  dnn_version: "9.10.0"
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""


class Transfer(NamedTuple):
    """What a device sends to other slices.

    Attributes:
      kind: The collective that it is a part of.
      bytes: How much.
      is_conditional: Whether only a conditional leads to it.
      meanwhile: How many fused computations are scheduled between sending and receiving.
    """

    kind: str
    bytes: int
    is_conditional: bool
    meanwhile: int


class Work(NamedTuple):
    """What a step does that takes no branch of a conditional.

    Attributes:
      kernels: The operations that it launches.
      bytes: What their operands and results hold.
    """

    kernels: int
    bytes: int


# These operations move nothing.
_FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all"}


def find_work(hlo: str) -> Work:
    """Return the work of a compiled program.

    A loop counts as often as the program says. A loop that does not say it is a conditional of ours.
    """
    bodies = dict(COMPUTATION.findall(hlo))

    def add_up(name: str) -> Work:
        lines = INSTRUCTION.findall(bodies[name])
        types = {result: type_ for result, type_, _, _ in lines}
        kernels = size = 0
        for _, type_, operation, rest in lines:
            called = re.findall(r"(?:body|to_apply|calls)=%([\w.-]+)", rest)
            if operation in ("while", "call", "async-start"):
                trips = re.search(r'known_trip_count":\{"n":"(\d+)"', rest)
                times = int(trips[1]) if trips else int(operation != "while")
                inside = add_up(called[0])
                kernels, size = kernels + times * inside.kernels, size + times * inside.bytes
            elif operation != "conditional" and operation not in _FREE:
                operands = re.findall(r"%([\w.-]+)", rest.split(")")[0])
                kernels += 1
                size += count_bytes(type_) + sum(count_bytes(types[each]) for each in operands)
        return Work(kernels, size)

    return add_up(re.findall(r"^ENTRY %([\w.-]+)", hlo, re.MULTILINE)[0])


def tpu_mesh(shape: dict[str, int], topology: str = "v5e:2x2", slices: int = 1) -> Mesh:
    """A mesh of TPUs of a topology; of several slices the first axis goes over them."""
    more = {"num_slices": slices} if slices > 1 else {}
    found = topologies.get_topology_desc(platform="tpu", topology_name=topology, **more).devices
    devices = sorted(found, key=lambda device: (getattr(device, "slice_index", 0), device.id))
    return _mesh(shape, devices)


def gpu_mesh(shape: dict[str, int]) -> Mesh:
    """A mesh of H100 of one host."""
    name = f"1x1x{math.prod(shape.values())}"
    found = topologies.get_topology_desc(
        platform="cuda", topology_name=name, topology=name, target_config=_H100
    )
    return _mesh(shape, found.devices)


# The device of a compiled program: its name, and a mesh with one such device.
DEVICES: dict[str, tuple[str, Callable[[], Any]]] = {
    "cpu": ("", lambda: None),
    "tpu": (", TPU v5e", lambda: tpu_mesh({"one": 1})),
    "gpu": (", H100", lambda: gpu_mesh({"one": 1})),
}


def _mesh(shape: dict[str, int], devices: Any) -> Mesh:
    sizes = tuple(shape.values())
    chosen = np.array(devices[: math.prod(sizes)]).reshape(sizes)
    return Mesh(chosen, tuple(shape), axis_types=(AxisType.Auto,) * len(sizes))


def shapes(tree: Any, mesh: Mesh, spec: Callable[[Any], P] = lambda leaf: P()) -> Any:
    """Shapes that lie on the mesh, by a function of a leaf: nothing is allocated."""

    def place(leaf: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec(leaf))
        )

    return jax.tree.map(place, tree)


def stacked(tree: Any, mesh: Mesh, axis: str) -> Any:
    """The shapes of one tree for each device of an axis, along a leading axis."""
    size = mesh.shape[axis]
    wide = jax.tree.map(lambda x: jax.ShapeDtypeStruct((size, *x.shape), x.dtype), tree)
    return shapes(wide, mesh, lambda leaf: P(axis))


class Program:
    """A compiled program: what it needs, and what it sends."""

    def __init__(self, step: Callable[..., Any], *arguments: Any, **options: Any) -> None:
        """Compiles it, with params and state donated."""
        options = {"donate_argnums": (0, 1), **options}
        compiled = jax.jit(step, **options).lower(*arguments).compile()
        memory: Any = compiled.memory_analysis()
        self.text = compiled.as_text() or ""
        self.temp_bytes = memory.temp_size_in_bytes
        self.code_bytes = memory.generated_code_size_in_bytes
        self.not_donated = memory.output_size_in_bytes - memory.alias_size_in_bytes

    def fusions(self) -> int:
        """How many fused computations the program schedules, outside of conditionals."""
        return self.text.split("\nENTRY ")[1].count(" fusion(")

    def work(self) -> Work:
        """Return the kernels and the bytes of a step that takes no branch."""
        return find_work(self.text)

    def collectives(self) -> list[Collective]:
        """What crosses devices of one slice."""
        return find_collectives(self.text)

    def transfers(self) -> list[Transfer]:
        """Return the traffic between slices, for pairs of send and recv instead of collectives."""
        found = []
        for name, body in COMPUTATION.findall(self.text):
            lines = INSTRUCTION.findall(body)
            starts = {line[0]: line for line in lines}
            for place, (_, kind, operation, rest) in enumerate(lines):
                if operation != "send" or "megascale" not in rest:
                    continue
                key = _attribute(rest, "rendezvous")
                ends = [
                    i
                    for i, (_, _, done, operands) in enumerate(lines)
                    if done == "recv-done" and key == _of_start(starts, operands)
                ]
                between = lines[place : max(ends, default=place)]
                fused = sum(operation == "fusion" for _, _, operation, _ in between)
                is_conditional = f"\nENTRY %{name} (" not in self.text
                size = count_bytes(kind.split(", u32[]")[0])
                of = _attribute(rest, "megascale_transfer_type")
                found.append(Transfer(of, size, is_conditional, fused))
        return found


def _of_start(starts: dict[str, Any], operands: str) -> str | None:
    names = re.findall(r"%([\w.-]+)", operands.split(")", maxsplit=1)[0])
    return next((_attribute(starts[n][3], "rendezvous") for n in names if n in starts), None)


def _attribute(line: str, name: str) -> str:
    found = re.search(f'{name}="([^"]*)"', line)
    return found.group(1) if found else ""
