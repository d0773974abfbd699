"""Format text tables for reports."""

from collections.abc import Iterable, Sequence


def align(rows: Iterable[Sequence[str]]) -> str:
    """Return rows of cells as lines, with each column as wide as its widest cell."""
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )
