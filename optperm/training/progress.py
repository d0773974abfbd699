"""A progress bar, by rich or by tqdm."""

import contextlib
import math
from collections.abc import Callable, Iterator

import jax

from optperm.training.extras import import_optional


@contextlib.contextmanager
def progress_bar(progress: bool | str, total: float) -> Iterator[Callable[[int, str], None]]:
    """Gives a function that shows the steps done, of a total or infinitely many, and a text."""
    known = int(total) if total < math.inf else None
    if progress not in (False, True, "rich", "tqdm"):
        raise ValueError(f"progress must be True, False, 'rich' or 'tqdm', got {progress!r}.")
    if not progress or jax.process_index():
        yield lambda step, text: None
    elif progress == "tqdm":
        tqdm = import_optional("tqdm", needed_by="progress='tqdm'", install="tqdm")
        with tqdm.tqdm(total=known, desc="compiling") as bar:

            def show(step: int, text: str) -> None:
                bar.set_description_str(text, refresh=False)
                bar.update(step - bar.n)

            yield show
    else:
        extra = "optperm[progress]"
        rich = import_optional("rich.progress", needed_by="progress=True", install=extra)
        says = rich.TextColumn("{task.description}", markup=False)
        columns = (rich.BarColumn(bar_width=20), rich.MofNCompleteColumn(), says)
        with rich.Progress(*columns, rich.TimeElapsedColumn()) as bars:
            task = bars.add_task("compiling", total=known)
            yield lambda step, text: bars.update(task, completed=step, description=text)
