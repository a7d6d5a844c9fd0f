"""The interactive viewer: a schedule, or the trace of a real run, played on its topology in a browser.

`scene` turns a schedule into a document of what passes which link when, `trace_scene` does the same with
traces that a process group wrote, and `page` puts scenes, style and script into one HTML file that asks for
nothing else; `notebook` shows values and pages in Jupyter. The script is written in TypeScript (`web/src`);
`make viewer` bundles it with D3.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from arborcast.lazy import loader

if TYPE_CHECKING:
    from arborcast.synth.viewer.notebook import View as View
    from arborcast.synth.viewer.notebook import view as view
    from arborcast.synth.viewer.page import write_page as write_page
    from arborcast.synth.viewer.scene import scene_of as scene_of
    from arborcast.synth.viewer.trace_scene import scene_of_traces as scene_of_traces

_HOMES = {
    "View": "arborcast.synth.viewer.notebook",
    "scene_of": "arborcast.synth.viewer.scene",
    "scene_of_traces": "arborcast.synth.viewer.trace_scene",
    "view": "arborcast.synth.viewer.notebook",
    "write_page": "arborcast.synth.viewer.page",
}

__all__ = list(_HOMES)

__getattr__ = loader(__name__, _HOMES)
