"""Scenes, style and script in one HTML file that asks no other host for anything."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from arborcast.synth.errors import InputError
from arborcast.synth.formats.atomic import write_atomically

if TYPE_CHECKING:
    from arborcast.synth.viewer.scene import Json

_HERE = files(__package__) / "web"
SCRIPT = "viewer.js"


def write_page(scenes: Sequence[Json], path: Path | str) -> None:
    """Write a page that plays one scene, or two side by side.

    Raises:
        InputError: as `page_of`, or the file cannot be written.
    """
    write_atomically(path, page_of(scenes))


def page_of(scenes: Sequence[Json]) -> str:
    """The text of that page.

    Raises:
        InputError: the script was not built with this installation.
    """
    script = _HERE / SCRIPT
    if not script.is_file():
        raise InputError(
            f"{script}: the viewer's script was not built with this installation; "
            "make viewer builds it, with Node.js 20 or newer"
        )
    # Within a script element only "</" could end it, and "<!--" change how it is read.
    data = json.dumps({"scenes": list(scenes)}, separators=(",", ":")).replace("<", "\\u003c")
    page = (_HERE / "page.html").read_text(encoding="utf-8")
    for place, text in (
        ("TITLE", escape(" | ".join(scene["title"] for scene in scenes))),
        ("/*STYLE*/", (_HERE / "style.css").read_text(encoding="utf-8")),
        ("/*DATA*/", data),
        ("/*SCRIPT*/", script.read_text(encoding="utf-8")),
    ):
        before, after = page.split(place, maxsplit=1)
        page = before + text + after
    return page
