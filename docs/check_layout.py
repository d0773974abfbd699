"""Count what does not fit on the built pages, in Chromium, and take screens of some of them.

A table or a block of code overflows if its box is narrower than its content. Links within the site
lead to a page that exists, and to an anchor on it.

    pip install playwright
    sphinx-build docs docs/_build
    python docs/check_layout.py docs/_build --browser /usr/bin/chromium --screens screens index
"""

import argparse
import collections
import pathlib
import sys
import urllib.parse

from playwright.sync_api import Browser, sync_playwright

WIDTHS = {"phone": 390, "desktop": 1400}
_FACTS = """() => {
  const width = each => Math.max(each.offsetWidth, each.scrollWidth);
  const wide = (selector, box) => [...document.querySelectorAll(selector)]
    .filter(each => width(each) > box(each).clientWidth + 1).map(each => each.innerText.slice(0, 60));
  for (const folded of document.querySelectorAll("details")) folded.open = true;
  return {
    tables: wide("article table", each => each.parentElement),
    code: wide("article pre", each => each),
    page: document.documentElement.scrollWidth > window.innerWidth ? [document.title] : [],
    links: [...document.querySelectorAll("a[href]")].map(each => each.href),
    ids: [...document.querySelectorAll("[id]")].map(each => each.id),
  };
}"""


def overflows(browser: Browser, pages: list[pathlib.Path], width: int) -> dict[str, dict]:
    """Return what each page has that is too wide, and its links and anchors, by its address."""
    tab = browser.new_page(viewport={"width": width, "height": 900})
    facts = {}
    for page in pages:
        tab.goto(page.as_uri())
        facts[page.as_uri()] = tab.evaluate(_FACTS)
    tab.close()
    return facts


def broken_links(facts: dict[str, dict]) -> list[str]:
    """Return the links within the site that lead nowhere."""
    broken = []
    for page, found in facts.items():
        for link in found["links"]:
            target, _, anchor = link.partition("#")
            if not target.startswith("file:"):
                continue
            path = pathlib.Path(urllib.parse.unquote(urllib.parse.urlsplit(target).path))
            anchor = urllib.parse.unquote(anchor)
            is_lost = anchor and target in facts and anchor not in facts[target]["ids"]
            if is_lost or not path.exists():
                broken.append(f"{page}: {link}")
    return broken


def take_screens(browser: Browser, site: pathlib.Path, names: list[str], out: pathlib.Path) -> None:
    """Write each page's first two screens, for each width, light and dark."""
    out.mkdir(parents=True, exist_ok=True)
    for device, width in WIDTHS.items():
        for scheme in ("light", "dark"):
            viewport = {"width": width, "height": 1800}
            tab = browser.new_page(viewport=viewport, color_scheme=scheme)
            for name in names:
                page, _, anchor = name.partition("#")
                tab.goto((site / f"{page}.html").as_uri() + (anchor and f"#{anchor}"))
                tab.screenshot(path=out / f"{page.replace('/', '-')}-{device}-{scheme}.png")
            tab.close()


def main() -> None:
    """Print the counts; exit with 1 if one of them is not 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("site", type=pathlib.Path, help="the folder that sphinx-build wrote")
    parser.add_argument("--browser", help="Chromium, if Playwright has none of its own")
    parser.add_argument("--screens", nargs="+", metavar=("FOLDER", "PAGE"), help="write screens")
    args = parser.parse_args()
    site = args.site.resolve()
    pages = sorted(path for path in site.rglob("*.html") if "_modules" not in path.parts)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=args.browser, args=["--no-sandbox"])
        totals = collections.Counter()
        for device, width in WIDTHS.items():
            facts = overflows(browser, pages, width)
            for kind in ("tables", "code", "page"):
                found = [(page, each) for page, its in facts.items() for each in its[kind]]
                totals[f"{device}, {kind}"] = len(found)
                for page, each in found:
                    print(device, kind, page.removeprefix(site.as_uri()), repr(each))
        broken = broken_links(facts)
        totals["links"] = len(broken)
        print(*broken, sep="\n")
        if args.screens:
            folder, *names = args.screens
            take_screens(browser, site, names, pathlib.Path(folder))
        browser.close()
    print(dict(totals), "on", len(pages), "pages")
    sys.exit(any(totals.values()))


if __name__ == "__main__":
    main()
