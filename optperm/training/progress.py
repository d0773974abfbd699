"""A progress bar, by rich or by tqdm."""

import contextlib
import math
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from optperm.training.extras import import_optional


class Bar(Protocol):
    """Shows how far training has come."""

    def show(self, step: int, says: str) -> None:
        """Shows the steps done, and a line beside them."""
        ...


class NoBar:
    """Shows nothing."""

    def show(self, step: int, says: str) -> None:
        """See `Bar`."""


class _Rich:
    def __init__(self, progress: Any, task: Any) -> None:
        self._progress, self._task = progress, task

    def show(self, step: int, says: str) -> None:
        self._progress.update(self._task, completed=step, description=says)


class _Tqdm:
    def __init__(self, bar: Any) -> None:
        self._bar = bar

    def show(self, step: int, says: str) -> None:
        self._bar.set_description_str(says, refresh=False)
        self._bar.update(step - self._bar.n)


def check_progress(progress: Any) -> str | None:
    """The name of the package that shows progress, imported; None for nothing.

    Raises:
      ValueError: If `progress` is something else than allowed.
      ImportError: If the package is not installed.
    """
    names = {False: None, None: None, True: "rich", "rich": "rich", "tqdm": "tqdm"}
    if not isinstance(progress, bool | str | None) or progress not in names:
        raise ValueError(f"progress must be True, False, 'rich' or 'tqdm', got {progress!r}.")
    name = names[progress]
    if name == "rich":
        import_optional("rich.progress", needed_by="progress=True", install="optperm[progress]")
    elif name == "tqdm":
        import_optional("tqdm", needed_by="progress='tqdm'", install="tqdm")
    return name


@contextlib.contextmanager
def progress_bar(name: str | None, total: float) -> Iterator[Bar]:
    """A bar while the context lasts.

    Args:
      name: What `check_progress` gave.
      total: Steps in all; infinite where nobody knows.
    """
    known = int(total) if total < math.inf else None
    if name == "rich":
        rich = import_optional("rich.progress", needed_by="progress", install="optperm[progress]")
        columns = (
            rich.BarColumn(bar_width=20),
            rich.MofNCompleteColumn(),
            rich.TextColumn("{task.description}", markup=False),
            rich.TimeElapsedColumn(),
        )
        with rich.Progress(*columns) as progress:
            yield _Rich(progress, progress.add_task("compiling", total=known))
    elif name == "tqdm":
        tqdm = import_optional("tqdm", needed_by="progress", install="tqdm")
        with tqdm.tqdm(total=known, desc="compiling") as bar:
            yield _Tqdm(bar)
    else:
        yield NoBar()


def line(epoch: int, metrics: Mapping[str, float]) -> str:
    """What stands beside the bar."""
    shown = [f"{name} {value:.4g}" for name, value in metrics.items()]
    return " ".join([f"epoch {epoch}", *shown])
