"""A browser without a window, and what axe finds on a page of it."""

from __future__ import annotations

import shutil
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Page

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
AXE = Path(str(files("arborcast.synth.viewer") / "web" / "node_modules" / "axe-core" / "axe.min.js"))

needs_browser = pytest.mark.skipif(BROWSER is None, reason="no chromium on this machine")
needs_axe = pytest.mark.skipif(not AXE.is_file(), reason="axe-core is not here: make viewer")


def violations(page: Page) -> list[tuple[str, str]]:
    """Each rule of axe that an element of the page breaks, with the element."""
    page.evaluate(AXE.read_text(encoding="utf-8"))
    found = page.evaluate("async () => (await axe.run()).violations")
    return [(rule["id"], node["html"][:200]) for rule in found for node in rule["nodes"]]
