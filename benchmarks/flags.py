"""Common parts of the examples' command lines. Each value is checked before any training."""

import argparse
import pathlib
from collections.abc import Callable
from typing import Any, NoReturn

from matplotlib.backend_bases import FigureCanvasBase


class Parser(argparse.ArgumentParser):
    """A parser that has `--out`, shows defaults, and says in one line what is wrong."""

    def __init__(self, description: str, out: str) -> None:
        shown = argparse.ArgumentDefaultsHelpFormatter
        super().__init__(description=description.splitlines()[0], formatter_class=shown)
        about = "the file for the picture, whose folders are made"
        self.add_argument("--out", type=picture, default=out, metavar="FILE", help=about)

    def count(self, name: str, default: Any, about: str, *, least: int = 1, **more: Any) -> None:
        """Adds a flag that takes whole numbers from `least` on."""
        self.add_argument(f"--{name}", type=at_least(least), default=default, help=about, **more)

    def error(self, message: str) -> NoReturn:
        """Ends the program without the usage, which `--help` shows."""
        self.exit(2, f"{self.prog}: error: {message}\n")


def at_least(least: int) -> Callable[[str], int]:
    """The type of a flag that takes whole numbers from `least` on."""

    def whole(text: str) -> int:
        if not text.lstrip("-").isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"got {text}; give a whole number from {least} on")
        return int(text)

    return whole


def positive(text: str) -> float:
    """The type of a flag that takes a number above 0."""
    try:
        if 0 < float(text) < float("inf"):
            return float(text)
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"got {text}; give a number above 0")


def picture(text: str) -> pathlib.Path:
    """The type of `--out`."""
    path, kinds = pathlib.Path(text), sorted(FigureCanvasBase.get_supported_filetypes())
    if path.is_dir() or path.suffix[1:].lower() not in kinds:
        raise argparse.ArgumentTypeError(
            f"got {text}; give a file that ends in .{', .'.join(kinds)}"
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        message = f"cannot make the folder {path.parent}: {error.strerror}"
        raise argparse.ArgumentTypeError(message) from error
    return path
