"""Programs compiled ahead of time for TPUs that are not there, as `libtpu` does for a named topology."""

import os
import re
from typing import NamedTuple

import jax
import numpy as np
import replicas
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

# Read when the library is loaded: no metadata server is asked, and several processes may load it.
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")

_COMPUTATION = re.compile(r"^(?:ENTRY )?%([\w.-]+) \(.*?\{$(.*?)^\}", re.MULTILINE | re.DOTALL)
_INSTRUCTION = re.compile(r"^ *(?:ROOT )?%([\w.-]+) = (.*?) ([a-z][a-z-]*)\((.*)$", re.MULTILINE)


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


def mesh(shape, topology="v5e:2x2", slices=1):
    """A mesh of devices of a topology; of several slices the first axis goes over them."""
    more = {"num_slices": slices} if slices > 1 else {}
    found = topologies.get_topology_desc(platform="tpu", topology_name=topology, **more).devices
    devices = sorted(found, key=lambda device: (getattr(device, "slice_index", 0), device.id))
    sizes = tuple(shape.values())
    chosen = np.array(devices[: int(np.prod(sizes))]).reshape(sizes)
    return Mesh(chosen, tuple(shape), axis_types=(AxisType.Auto,) * len(sizes))


def shapes(tree, mesh, spec=lambda leaf: P()):
    """Shapes that lie on the mesh, by a function of a leaf: nothing is allocated."""

    def place(leaf):
        return jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec(leaf))
        )

    return jax.tree.map(place, tree)


def stacked(tree, mesh, axis):
    """The shapes of one tree for each device of an axis, along a leading axis."""
    size = mesh.shape[axis]
    wide = jax.tree.map(lambda x: jax.ShapeDtypeStruct((size, *x.shape), x.dtype), tree)
    return shapes(wide, mesh, lambda leaf: P(axis))


class Program:
    """A compiled program: what it needs, and what it sends."""

    def __init__(self, step, *arguments, **options):
        """Compiles it, with params and state donated."""
        options = {"donate_argnums": (0, 1), **options}
        compiled = jax.jit(step, **options).lower(*arguments).compile()
        memory = compiled.memory_analysis()
        self.text = compiled.as_text()
        self.temp_bytes = memory.temp_size_in_bytes
        self.code_bytes = memory.generated_code_size_in_bytes
        self.not_donated = memory.output_size_in_bytes - memory.alias_size_in_bytes

    def fusions(self):
        """How many fused computations the program schedules, outside of conditionals."""
        return self.text.split("\nENTRY ")[1].count(" fusion(")

    def collectives(self):
        """What crosses devices of one slice."""
        return replicas.collectives(self.text)

    def transfers(self):
        """What crosses slices, where no collective stands in the program but pairs of send and recv."""
        found = []
        for name, body in _COMPUTATION.findall(self.text):
            lines = _INSTRUCTION.findall(body)
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
                size = _bytes(kind.split(", u32[]")[0])
                of = _attribute(rest, "megascale_transfer_type")
                found.append(Transfer(of, size, is_conditional, fused))
        return found


def _of_start(starts, operands):
    names = re.findall(r"%([\w.-]+)", operands.split(")")[0])
    return next((_attribute(starts[n][3], "rendezvous") for n in names if n in starts), None)


def _attribute(line, name):
    found = re.search(f'{name}="([^"]*)"', line)
    return found.group(1) if found else ""


def _bytes(types):
    total = 0
    for bits, shape in re.findall(r"\b(?:[a-z]+)(\d+)\w*\[([\d,]*)\]", types):
        total += int(np.prod([int(n) for n in shape.split(",") if n], dtype=int)) * int(bits) // 8
    return total
