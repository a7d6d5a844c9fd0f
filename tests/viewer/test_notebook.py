"""The notebook of the examples runs, and values show themselves in it."""

from __future__ import annotations

from collections.abc import Iterator
from html import unescape
from pathlib import Path
from typing import Any

import pytest

import arborcast
from arborcast.synth.errors import InputError
from arborcast.synth.topology import Topology
from arborcast.synth.viewer import notebook, page

NOTEBOOK = Path(__file__).parents[2] / "examples" / "explore.ipynb"


def shown(cells: list[Any]) -> Iterator[dict[str, str]]:
    """What each cell with a last value shows, by form."""
    for cell in cells:
        for output in cell.get("outputs", []):
            if output["output_type"] == "execute_result":
                yield output["data"]


@pytest.mark.skipif(
    not (Path(page.__file__).parent / "web" / page.SCRIPT).is_file(),
    reason="the viewer's script was not built: make viewer",
)
@pytest.mark.timeout(300)
def test_the_notebook_runs_and_its_values_show_themselves() -> None:
    import nbformat
    from nbclient import NotebookClient

    document = nbformat.read(NOTEBOOK, as_version=4)
    assert all(not cell.get("outputs") for cell in document.cells), "outputs are not kept in the repository"
    NotebookClient(document, timeout=240, kernel_name="python3").execute()
    fabric, limit, trees, timing, view = shown(document.cells)
    assert fabric["image/svg+xml"].rstrip().endswith("</svg>")
    assert "125/2 GB/s (62.5)" in limit["text/html"]
    assert "partition: 125 GB/s between the 3 sets" in limit["text/html"]
    assert "125/2 GB/s (62.5), equal to the bound over every schedule" in trees["text/html"]
    assert "67,108,864" in timing["text/html"]
    assert view["text/html"].startswith("<iframe srcdoc=")
    assert unescape(view["text/html"]).count('"title":"allreduce on dgx1[0,1,2,3,4,5], ') == 2


def test_what_is_too_large_to_draw_is_told_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    assert notebook.topology_svg(arborcast.load("torus:16x16")) is None
    drawn = notebook.topology_svg(arborcast.load("ring:4"))
    assert drawn is not None
    assert "<svg" in drawn


def test_text_of_values_is_escaped() -> None:
    fabric = arborcast.load("ring:3")
    named = Topology.build("<b>ring</b>", fabric.ranks, fabric.links)
    said = notebook.schedule_html(arborcast.solve(named, "broadcast"))
    assert "&lt;b&gt;ring&lt;/b&gt;" in said
    assert "<b>" not in said


def test_a_schedule_says_which_rates_its_proof_assumes() -> None:
    """As `synth show` does: of a box whose processors are not known, and of none on links as stated."""
    boxed = arborcast.solve(arborcast.load("pro6000"), "allgather")
    assert "are assumed: " in notebook.schedule_html(boxed)
    assert "assumed" not in notebook.schedule_html(arborcast.solve(arborcast.load("ring:3"), "allgather"))


def test_a_view_of_none_or_three_is_refused() -> None:
    schedule = arborcast.solve(arborcast.load("ring:3"), "broadcast")
    for many in (0, 3):
        with pytest.raises(ValueError, match=f"one or two schedules are shown, got {many}"):
            arborcast.view(*[schedule] * many)
    with pytest.raises(ValueError, match="one or two schedules are shown, got 3"):
        schedule.view(schedule, schedule)


def test_a_view_says_at_once_that_its_script_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = arborcast.solve(arborcast.load("ring:3"), "broadcast")
    monkeypatch.setattr(page, "SCRIPT", "absent.js")
    with pytest.raises(InputError, match="make viewer"):
        arborcast.view(schedule)
