"""The result of a minimization, and the table of its passes."""

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

from optperm.core.shapes import Params


class Pass(NamedTuple):
    """Where a minimization is after some passes over the data.

    Attributes:
      passes: How often the examples have been read: 1 for a full gradient, and the fraction of the
        examples in batches.
      seconds: Seconds since the call, with compiling.
      gap: The bound on the objective minus its minimum; NaN without strong convexity.
      gradient: The norm of the proximal gradient mapping, relative to its norm at the start.
    """

    passes: float
    seconds: float
    gap: float
    gradient: float


class MinimumHistory:
    """The passes of `optperm.variance.minimize`, a sequence of rows that prints as a table.

    Each row has the fields `passes`, `seconds`, `gap` and `gradient`.
    """

    def __init__(self) -> None:
        self._rows: list[Pass] = []

    def add(self, row: Pass) -> None:
        """Add a row.

        Args:
          row: The row of the pass that ended last.
        """
        self._rows.append(row)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Pass:
        return self._rows[index]

    def __iter__(self) -> Iterator[Pass]:
        return iter(self._rows)

    def __repr__(self) -> str:
        lines = ["passes  seconds      gap  gradient"]
        for row in self._rows:
            lines.append(
                f"{row.passes:6.1f}  {row.seconds:7.2f}  {row.gap:7.1e}  {row.gradient:8.1e}"
            )
        return "\n".join(lines)


@dataclasses.dataclass(frozen=True)
class Minimum:
    """Result of `optperm.variance.minimize`.

    Attributes:
      params: The params, like the initial params.
      converged: Whether the stopping rule holds. A warning gives the reason if not.
      gap: The bound on the objective minus its minimum; NaN without strong convexity.
      passes: How often the examples were read.
      seconds: Seconds of the call, with compiling.
      history: The table of passes, seconds, gaps and gradients.
      method: The method that was chosen, and why.
    """

    params: Params
    converged: bool
    gap: float
    passes: float
    seconds: float
    history: MinimumHistory
    method: str

    def __repr__(self) -> str:
        found: dict[str, Any] = {"converged": self.converged, "gap": f"{self.gap:.1e}"}
        found |= {"passes": f"{self.passes:.1f}", "seconds": f"{self.seconds:.2f}"}
        shown = ", ".join(f"{name}={value}" for name, value in found.items())
        return f"Minimum({shown}, method={self.method!r})"
