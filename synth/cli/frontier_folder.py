"""A frontier as a document, and in a folder: its points with certificates, a schedule of each, pictures."""

from __future__ import annotations

import json
from pathlib import Path

from arborcast.synth.chunks.allreduce.points import Point
from arborcast.synth.chunks.frontier import Frontier
from arborcast.synth.chunks.limit_documents import limit_to_document
from arborcast.synth.chunks.problem.time_reversal import IMAGES
from arborcast.synth.chunks.step_result import explain
from arborcast.synth.cli.description import grid_document
from arborcast.synth.formats import write_explicit
from arborcast.synth.formats.atomic import make_folder, write_atomically
from arborcast.synth.formats.documents import Document, picked
from arborcast.synth.ports import ported


def frontier_to_document(frontier: Frontier) -> Document:
    """What `pareto --json` prints and `frontier.json` holds; a writer fills in the `file` of each point."""
    return {
        "topology": frontier.topology.name,
        "collective": frontier.collective.kind.value,
        "root": frontier.collective.root,
        "ranks": len(frontier.collective.ranks),
        "frontier": [point_to_document(point) for point in frontier.points],
        "grid": None if frontier.grid is None else grid_document(frontier.grid, *frontier.limits_of_rate),
        **picked(frontier, "static_ratio", "complete", "why_stopped", "open_steps", "timed_out", "seconds"),
        "limits": [
            {"steps": steps, "least": str(limit.ratio), "proof": explain(limit)}
            for steps, limit in sorted(frontier.limits.items())
        ],
    }


def point_to_document(point: Point) -> Document:
    """One entry of `frontier`."""
    return {
        **picked(point, "chunks", "steps", "rounds", "ratio", "least", "gap"),
        **picked(point, "scope", "restriction", "proof", "proved_by"),
        "proved": point.is_proved and not point.schedule.topology.is_planned,
        "limit": None if point.is_proved else str(point.least),
        "rate": str(point.schedule.rate),
        "file": None,
    }


PICTURE = "frontier.svg"

FRONTIER_FORMAT = "arborcast.frontier/1"

MOST_DRAWN = 5000
"""Sends up to which a schedule is drawn: more would be a cloud, and megabytes of it."""


def write_frontier(frontier: Frontier, folder: Path) -> Document:
    """Write `frontier.json`, `frontier.svg`, and of each point a schedule and a picture of its steps.

    Those are called by (C, S, R), such as `c6-s3-r7.json` and `c6-s3-r7.svg`.

    Returns:
        The document of the frontier, with the `file` of each point.

    Raises:
        InputError: a file cannot be written.
    """
    from arborcast.synth.pictures import draw_frontier, draw_steps

    make_folder(folder)
    document = frontier_to_document(frontier)
    certified = []
    fabric = ported(frontier.topology)  # that limits are about
    mirrored = frontier.collective.kind in IMAGES
    for point, entry in zip(frontier.points, document["frontier"], strict=True):
        path = folder / f"c{point.chunks}-s{point.steps}-r{point.rounds}.json"
        write_explicit(point.schedule, path)
        if len(point.schedule.transfers) <= MOST_DRAWN:
            draw_steps(point.schedule, path.with_suffix(".svg"))
        entry["file"] = str(path)
        limits = [limit_to_document(limit, fabric, mirrored=mirrored) for limit in point.bounds]
        certified.append({**entry, "file": path.name, "certificates": limits})
    title = f"{frontier.topology.name} {frontier.collective.kind}"
    draw_frontier(frontier, folder / PICTURE, title=title)
    limits = [
        {**entry, "certificate": limit_to_document(limit, fabric, mirrored=mirrored)}
        for entry, (_, limit) in zip(document["limits"], sorted(frontier.limits.items()), strict=True)
    ]
    full = {"format": FRONTIER_FORMAT, **document, "frontier": certified, "limits": limits}
    write_atomically(folder / "frontier.json", json.dumps(full, indent=1) + "\n")
    return document
