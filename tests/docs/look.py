"""`python -m tests.docs.look out/site`: each page in Chromium, as wide as a desktop and as a phone.

A page wider than its screen, a picture that does not load, and whatever the browser calls an error end it
with status 1; `make lint` runs it. Where there is no Chromium it fails, too: nobody has looked then. Every
other page is dark (a tab keeps its first colours, so each scheme has one); axe sees all pages in both.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

from tests.support.browser import BROWSER, FLAGS

WIDTHS = (1280, 390)
"""Pixels."""

FAULTS = """() => {
  const root = document.documentElement, wide = root.scrollWidth - root.clientWidth;
  const broken = [...document.images].filter(it => !it.complete || !it.naturalWidth).map(it => it.src);
  return [...(wide > 0 ? [`${wide} pixels too wide`] : []), ...broken.map(it => `broken picture ${it}`)];
}"""


def look(site: Path) -> list[str]:
    """What is wrong with the pages of a folder, save the one of a wrong address, which only servers show."""
    from playwright.sync_api import sync_playwright

    assert BROWSER is not None, "no Chromium on this machine to look at the site with (apt install chromium)"
    wrong: list[str] = []
    said: list[str] = []
    with sync_playwright() as driver:
        running = driver.chromium.launch(executable_path=BROWSER, args=FLAGS)
        tabs = [running.new_page(color_scheme="light"), running.new_page(color_scheme="dark")]
        for tab in tabs:
            tab.on("console", lambda it: said.append(it.text) if it.type == "error" else None)
            tab.on("pageerror", lambda it: said.append(str(it)))
        paths = sorted(path for path in site.rglob("*.html") if path.name != "404.html")
        for path, tab in zip(paths, itertools.cycle(tabs), strict=False):
            said.clear()
            for width in WIDTHS:
                tab.set_viewport_size({"width": width, "height": 900})
                if width == WIDTHS[0]:
                    tab.goto(path.resolve().as_uri())
                    tab.add_style_tag(content="* { transition: none !important }")
                said += [f"{width} pixels: {fault}" for fault in tab.evaluate(FAULTS)]
            wrong += [f"{path.relative_to(site)}: {fault}" for fault in said]
        running.close()
    return wrong


if __name__ == "__main__":
    sys.exit("\n".join(look(Path(sys.argv[1]))) or 0)
