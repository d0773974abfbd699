"""A progress bar, by rich or by tqdm."""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from optperm.training.extras import import_optional

# Shows the steps done, and a line beside them.
Show = Callable[[int, str], None]


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
def progress_bar(name: str | None, total: float) -> Iterator[Show]:
    """A bar while the context lasts, by what `check_progress` gave; the total may be infinite."""
    known = int(total) if total < math.inf else None
    if name == "rich":
        rich = import_optional("rich.progress", needed_by="progress", install="optperm[progress]")
        says = rich.TextColumn("{task.description}", markup=False)
        columns = (rich.BarColumn(bar_width=20), rich.MofNCompleteColumn(), says)
        with rich.Progress(*columns, rich.TimeElapsedColumn()) as progress:
            task = progress.add_task("compiling", total=known)
            yield lambda step, says: progress.update(task, completed=step, description=says)
    elif name == "tqdm":
        tqdm = import_optional("tqdm", needed_by="progress", install="tqdm")
        with tqdm.tqdm(total=known, desc="compiling") as bar:

            def show(step: int, says: str) -> None:
                bar.set_description_str(says, refresh=False)
                bar.update(step - bar.n)

            yield show
    else:
        yield lambda step, says: None


def line(epoch: int, metrics: Mapping[str, float]) -> str:
    """What stands beside the bar."""
    return " ".join([f"epoch {epoch}", *(f"{name} {v:.4g}" for name, v in metrics.items())])
