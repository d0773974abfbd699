"""Read the traffic between devices of a compiled program from its HLO."""

import re
from typing import NamedTuple

COLLECTIVES = {
    "all-reduce",
    "all-gather",
    "all-to-all",
    "ragged-all-to-all",
    "reduce-scatter",
    "collective-broadcast",
    "collective-permute",
}
COMPUTATION = re.compile(r"^(?:ENTRY )?%([\w.-]+) \(.*?\{$(.*?)^\}", re.MULTILINE | re.DOTALL)
_ENTRY = re.compile(r"^ENTRY %([\w.-]+)", re.MULTILINE)
INSTRUCTION = re.compile(r"^ *(?:ROOT )?%([\w.-]+) = (.*?) ([a-z][a-z-]*)\((.*)$", re.MULTILINE)
_NAME = re.compile(r"%([\w.-]+)")
_ARRAY = re.compile(r"\b(?:pred|[a-z]+(\d+)\w*)\[([\d,]*)\]")


class Collective(NamedTuple):
    """One cross-device operation.

    Attributes:
      operation: Its name in HLO.
      bytes: Size of its operands on each device.
      is_conditional: Whether only a conditional leads to it.
    """

    operation: str
    bytes: int
    is_conditional: bool


class Traffic(NamedTuple):
    """What each device takes part in, on average over a period."""

    collectives_per_step: float
    bytes_per_step: float


def find_collectives(hlo: str) -> list[Collective]:
    """All cross-device operations in the text of a compiled program (`compiled.as_text()`)."""
    bodies = dict(COMPUTATION.findall(hlo))
    found = []
    always = _without_conditionals(hlo, bodies)
    for computation, body in bodies.items():
        instructions = INSTRUCTION.findall(body)
        types = {name: type_ for name, type_, _, _ in instructions}
        for _, _, operation, rest in instructions:
            if operation.removesuffix("-start") in COLLECTIVES:
                operands = _NAME.findall(rest.split(")")[0])
                size = sum(count_bytes(types[operand]) for operand in operands)
                found.append(Collective(operation, size, computation not in always))
    return found


def traffic(hlo: str, period: int) -> Traffic:
    """The traffic of a compiled step whose conditionals are entered once a period."""
    found = find_collectives(hlo)
    shares = [1 / period if each.is_conditional else 1.0 for each in found]
    sizes = [each.bytes * share for each, share in zip(found, shares, strict=True)]
    return Traffic(sum(shares), sum(sizes))


def _without_conditionals(hlo: str, bodies: dict[str, str]) -> set[str]:
    """The computations that the entry leads to by other ways than the branches of conditionals."""
    waiting, reached = _ENTRY.findall(hlo), set[str]()
    while waiting:
        name = waiting.pop()
        if name in bodies and name not in reached:
            reached.add(name)
            lines = (line for line in bodies[name].splitlines() if " conditional(" not in line)
            waiting += _NAME.findall("\n".join(lines))
    return reached


def count_bytes(type_: str) -> int:
    """The bytes of the arrays of a type as HLO writes it."""
    total = 0
    for bits, shape in _ARRAY.findall(type_):
        count = 1
        for size in filter(None, shape.split(",")):
            count *= int(size)
        total += count * max(1, int(bits or 8) // 8)
    return total
