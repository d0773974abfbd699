"""Count the tables, blocks of code and pages that are wider than their place, in Chromium.

pip install playwright
sphinx-build docs docs/_build
python docs/check_layout.py docs/_build --browser /usr/bin/chromium
"""

import argparse
import pathlib
import sys

from playwright.sync_api import sync_playwright

WIDTHS = {"phone": 390, "desktop": 1400}
_TOO_WIDE = """() => {
  for (const folded of document.querySelectorAll("details")) folded.open = true;
  const width = each => Math.max(each.offsetWidth, each.scrollWidth);
  const wide = (selector, box) => [...document.querySelectorAll(selector)]
    .filter(each => width(each) > box(each).clientWidth + 1).map(each => each.innerText.slice(0, 60));
  const page = document.documentElement.scrollWidth > window.innerWidth ? [document.title] : [];
  return [...wide("article table", each => each.parentElement), ...wide("article pre", each => each),
    ...page];
}"""


def main() -> None:
    """Print what is too wide; exit with 1 if something is."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("site", type=pathlib.Path, help="the folder that sphinx-build wrote")
    parser.add_argument("--browser", help="Chromium, if Playwright has none of its own")
    args = parser.parse_args()
    pages = [path for path in sorted(args.site.rglob("*.html")) if "_modules" not in path.parts]
    found = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=args.browser, args=["--no-sandbox"])
        for device, width in WIDTHS.items():
            tab = browser.new_page(viewport={"width": width, "height": 900})
            for page in pages:
                tab.goto(page.resolve().as_uri())
                found += [f"{device} {page}: {each!r}" for each in tab.evaluate(_TOO_WIDE)]
    print(*found, f"{len(found)} of {len(pages)} pages at two widths", sep="\n")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
