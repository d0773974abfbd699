"""The results of a benchmark, as tables in a JSON file that the site reads."""

import argparse
import contextlib
import datetime
import json
import os
import pathlib
import platform
import re
import shlex
import sys
from collections.abc import Iterator
from typing import Any

import jax
import matplotlib.figure
import matplotlib.style


def add_argument(parser: argparse.ArgumentParser) -> None:
    """Adds the flag `--json FILE`."""
    parser.add_argument("--json", type=pathlib.Path, help="a file for the figures, for the site")


class Results:
    """Tables by title, filled row by row while figures are printed."""

    def __init__(self) -> None:
        self._rows: dict[str, list[dict[str, str]]] = {}

    def row(self, title: str, **cells: object) -> None:
        """Add a row: each cell under its name, with spaces for underscores."""
        row = {name.replace("_", " "): str(cell) for name, cell in cells.items()}
        self._rows.setdefault(title, []).append(row)

    def show(self, title: str, **cells: object) -> None:
        """Adds a row and prints it, the first one under its title."""
        if title not in self._rows:
            print(f"\n{title}")
        self.row(title, **cells)
        print("  " + "  ".join(f"{k} {v}" for k, v in self._rows[title][-1].items()), flush=True)

    def resume(self, path: pathlib.Path | None) -> None:
        """Takes the rows that the same command has written to a file so far, if there is one."""
        if path is None or not path.exists():
            return
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["command"] != _command():
            raise SystemExit(f"{path} is of another command, {found['command']}.")
        for table in found["tables"]:
            rows = [dict(zip(table["columns"], row, strict=True)) for row in table["rows"]]
            self._rows[table["title"]] = rows

    def has(self, title: str, **cells: str) -> bool:
        """Return whether a table has a row with these cells."""
        return any(cells.items() <= row.items() for row in self._rows.get(title, []))

    def rows(self, title: str) -> list[dict[str, str]]:
        """Return the rows of a table so far."""
        return self._rows.get(title, [])

    def merge(self, path: pathlib.Path) -> None:
        """Puts the rows into the tables of a file that have their titles, by their first cells."""
        found = json.loads(path.read_text(encoding="utf-8"))
        for table in found["tables"]:
            rows = {row[0]: row for row in table["rows"]}
            for row in self._rows.pop(table["title"], []):
                cells = [row.get(name, "") for name in table["columns"]]
                rows[cells[0]] = cells
            table["rows"] = [*rows.values()]
        if self._rows:
            raise SystemExit(f"{path} has no table {' or '.join(self._rows)}.")
        path.write_text(_as_text(found), encoding="utf-8")

    def write(self, path: pathlib.Path | None, machine: str | None = None) -> None:
        """Writes all tables with command, machine (None: this one) and date, if there is a file."""
        if path is None:
            return
        tables = []
        for title, rows in self._rows.items():
            columns = list(dict.fromkeys(name for row in rows for name in row))
            cells = [[row.get(name, "") for name in columns] for row in rows]
            tables.append({"title": title, "columns": columns, "rows": cells})
        found = {
            "benchmark": f"benchmarks/{pathlib.Path(sys.argv[0]).name}",
            "command": _command(),
            "machine": machine or _machine(),
            "date": datetime.date.today().isoformat(),
            "tables": tables,
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(_as_text(found), encoding="utf-8")


def join(parts: list[pathlib.Path], path: pathlib.Path, order: dict[str, list[str]]) -> None:
    """Writes the tables of several files as one file, the rows of a table in an order of first cells.

    Of rows with the same first cell, the first counts.
    """
    files = [json.loads(part.read_text(encoding="utf-8")) for part in parts]
    machines = {found["machine"] for found in files}
    if len(machines) > 1:
        raise SystemExit(f"The parts are of several machines: {'; '.join(sorted(machines))}.")
    tables = []
    for title, names in order.items():
        own = [table for found in files for table in found["tables"] if table["title"] == title]
        columns = list(dict.fromkeys(name for table in own for name in table["columns"]))
        rows: dict[str, list[str]] = {}
        for table in own:
            for row in table["rows"]:
                cells = dict(zip(table["columns"], row, strict=True))
                rows.setdefault(row[0], [cells.get(name, "") for name in columns])
        if own:
            ordered = sorted(rows.values(), key=lambda row: names.index(row[0]))
            tables.append({"title": title, "columns": columns, "rows": ordered})
    name = files[0]["benchmark"]
    found = {
        **files[0],
        "command": f"python {name}",
        "date": max(each["date"] for each in files),
        "tables": tables,
    }
    path.write_text(_as_text(found), encoding="utf-8")


@contextlib.contextmanager
def picture(path: pathlib.Path, **options: Any) -> Iterator[Any]:
    """Yield a figure in the style of the package, and save it."""
    with matplotlib.style.context("optperm.pictures"):
        yield (figure := matplotlib.figure.Figure(**options))
        figure.savefig(path)


def _as_text(found: dict[str, object]) -> str:
    """Return JSON with each row of a table in one line."""
    text = json.dumps(found, indent=2, ensure_ascii=False)
    return re.sub(r"\[\s+(\"[^\[\]]*\")\s+\]", lambda m: f"[{' '.join(m[1].split())}]", text) + "\n"


def _command() -> str:
    """Return the command line, without the flags for the file and without folders from the root."""
    words = iter(sys.argv[1:])
    kept = []
    for word in words:
        if word == "--json":
            next(words)
        elif word != "--resume" and not word.startswith("--json="):
            kept.append(word.rpartition("/")[2] if word.startswith("/") else word)
    return shlex.join(["python", f"benchmarks/{pathlib.Path(sys.argv[0]).name}", *kept])


def _machine() -> str:
    """The processor, how many cores of it, and what ran there."""
    cpu, info = platform.processor() or platform.machine(), pathlib.Path("/proc/cpuinfo")
    if info.exists():
        names = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        cpu = names[0].partition(": ")[2] if names else cpu
    # Linux says which cores the process may use.
    can_ask = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if can_ask else os.cpu_count()
    device = jax.devices()[0]
    place = "" if device.platform == "cpu" else f", {device.device_kind}"
    used = "one core" if cores == 1 else f"{cores} cores"
    return f"{used}, {cpu}{place}, jax {jax.__version__}, Python {platform.python_version()}"
