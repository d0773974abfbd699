"""Runs the tutorials: the Python blocks of a page in order, in one namespace.

What a block prints must be what the page shows after it, in a block of plain text: the same words, and
numbers that are near, since training differs a little from one processor to another. The pictures that
the blocks save are written beside the pages. A block under the comment `long` compares many trainings;
nothing but what it prints depends on it.

    python docs/run_tutorials.py [PAGE ...]          # checks what is printed, and draws the pictures
    python docs/run_tutorials.py --write [PAGE ...]  # writes what is printed into the pages
"""

import argparse
import contextlib
import io
import math
import pathlib
import re
import time
from typing import Any

import matplotlib.style

TUTORIALS = pathlib.Path(__file__).parent / "tutorials"
PAGES = sorted(path.stem for path in TUTORIALS.glob("*.md") if path.stem != "index")
_BLOCK = re.compile(
    r"^(?P<long><!-- long -->\n)?```python\n(?P<code>.*?)^```\n(?:\n```text\n(?P<shown>.*?)^```\n)?",
    re.M | re.S,
)
_NUMBER = re.compile(r"[-+]?\d[\d,]*\.?\d*(?:e[-+]?\d+)?|[-+]?\.\d+")


def is_near(shown: str, found: str) -> bool:
    """Whether two numbers agree: to a factor of ten if with an exponent, else to 30 % and .02."""
    a, b = (float(text.replace(",", "")) for text in (shown, found))
    if "e" in shown + found:
        return a == b or (a * b > 0 and abs(math.log10(a / b)) <= 1)
    return abs(a - b) <= 0.3 * max(abs(a), abs(b)) + (0.02 if "." in shown else 0)


def differences(shown: str, found: str) -> list[str]:
    """The lines of what was printed that are not those that are shown."""
    pairs = zip(shown.splitlines(), found.splitlines(), strict=False)
    wrong = [f"shown: {a}\nfound: {b}" for a, b in pairs if not _is_same(a, b)]
    if len(shown.splitlines()) != len(found.splitlines()):
        wrong.append(f"shown: {len(shown.splitlines())} lines\nfound: {len(found.splitlines())}")
    return wrong


def _is_same(shown: str, found: str) -> bool:
    a, b = ([" ".join(part.split()) for part in _NUMBER.split(line)] for line in (shown, found))
    numbers = zip(_NUMBER.findall(shown), _NUMBER.findall(found), strict=False)
    return a == b and all(is_near(*pair) for pair in numbers)


def run(
    page: str, pictures: pathlib.Path = TUTORIALS, *, is_short: bool = False
) -> tuple[list[str], dict[str, Any]]:
    """Runs a page; returns what each block has printed, and the namespace at the end.

    Args:
      page: Its name.
      pictures: Where the pictures are written.
      is_short: Whether blocks that are marked as long are left out; what is shown stands for them.
    """
    outputs, namespace = [], {"__name__": f"tutorials.{page}"}
    with contextlib.chdir(pictures), matplotlib.style.context("optperm.pictures"):
        for index, block in enumerate(_BLOCK.finditer((TUTORIALS / f"{page}.md").read_text())):
            if is_short and block["long"]:
                outputs.append(block["shown"])
                continue
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                exec(compile(block["code"], f"{page}.md, block {index + 1}", "exec"), namespace)
            outputs.append(
                "".join(f"{line.rstrip()}\n" for line in printed.getvalue().splitlines())
            )
    return outputs, namespace


def wrong_outputs(page: str, outputs: list[str]) -> list[str]:
    """Where a page shows something else than what its blocks have printed."""
    shown = [
        block["shown"] or "" for block in _BLOCK.finditer((TUTORIALS / f"{page}.md").read_text())
    ]
    pairs = enumerate(zip(shown, outputs, strict=True), start=1)
    return [
        f"{page}.md, block {index}\n{line}" for index, pair in pairs for line in differences(*pair)
    ]


def write(page: str, outputs: list[str]) -> None:
    """Writes what was printed into a page."""
    path, remaining = TUTORIALS / f"{page}.md", iter(outputs)

    def with_output(block: re.Match[str]) -> str:
        printed = next(remaining)
        code = f"{block['long'] or ''}```python\n{block['code']}```\n"
        return code + (f"\n```text\n{printed}```\n" if printed else "")

    path.write_text(_BLOCK.sub(with_output, path.read_text()))


def main() -> None:
    """Runs all pages, or those that are named."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pages", nargs="*", metavar="PAGE", help=f"of {', '.join(PAGES)}")
    parser.add_argument("--write", action="store_true", help="write what is printed into the pages")
    options = parser.parse_args()
    if unknown := set(options.pages) - set(PAGES):
        parser.error(f"there is no page {sorted(unknown)[0]}; there are {', '.join(PAGES)}")
    wrong = []
    for page in options.pages or PAGES:
        began = time.process_time()
        outputs, _ = run(page)
        seconds = time.process_time() - began
        if options.write:
            write(page, outputs)
        wrong += wrong_outputs(page, outputs)
        print(f"{page}: {len(outputs)} blocks, {seconds:.1f} s of processor time", flush=True)
    if wrong:
        raise SystemExit("\n".join(wrong))


if __name__ == "__main__":
    main()
