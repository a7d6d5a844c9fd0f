"""What `synth pareto` says above 64 ranks: schedules between latency and rate, beside proved limits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from arborcast.synth.cli.console import Columns, Json, answer, progress, table, table_of
from arborcast.synth.cli.description import describe_bound, model_of
from arborcast.synth.cli.inputs import check_found, failing_as_json, text_of
from arborcast.synth.errors import TimedOutError
from arborcast.synth.formats.schedules import said_of
from arborcast.synth.formats.sizes import format_size
from arborcast.synth.formats.words import gigabytes, share

if TYPE_CHECKING:
    from arborcast.synth.api import Approach
    from arborcast.synth.cli.inputs import FabricRequest
    from arborcast.synth.latency_bandwidth import LatencyBandwidth

FORMAT = "arborcast.latency-bandwidth/1"


def show_latency_bandwidth(asked: Approach, on: FabricRequest, output: Path | None, as_json: bool) -> None:
    """Find the frontier, verify every schedule of it, write and say it.

    Raises:
        InfeasibleError: there is no schedule.
        TimedOutError: some may be missing; what there is was said and written.
    """
    from arborcast.synth.latency_bandwidth import latency_bandwidth

    kind = str(asked.collective.kind)
    what = f"frontier of {kind} on {asked.topology.name}"
    with failing_as_json(on, kind, as_json), progress(what, quiet=as_json):
        found = latency_bandwidth(asked)
        for point in found.points:
            check_found(point.schedule)
    document = frontier_document(found)
    if output is not None:
        _write(found, document, output)
    answer(as_json, {**document, "folder": text_of(output)}, lambda: _lines(found, output))
    if found.why_incomplete is not None:
        raise TimedOutError(f"{kind}: {found.why_incomplete}")


def frontier_document(found: LatencyBandwidth) -> Json:
    """What `--json` prints and `frontier.json` holds; a writer fills in the `file` of each point."""
    from arborcast.synth.formats import bound_to_document

    return {
        "format": FORMAT,
        "topology": found.topology.name,
        "collective": str(found.collective.kind),
        "ranks": len(found.collective.ranks),
        "model": model_of(found.topology),
        "bound": bound_to_document(found.bound, found.topology),
        "least_latency_us": float(found.limit.at(0)),
        "points": [
            {
                **said_of(point.schedule),
                "chunks": point.schedule.chunk_count,
                "latency_us": float(point.latency_us),
                "share_of_bound": float(point.schedule.rate / found.bound.rate),
                "file": None,
            }
            for point in found.points
        ],
        "sizes": [
            {
                "bytes": each.size_bytes,
                "point": each.point,
                "time_us": each.time_us,
                "least_us": float(each.least_us),
            }
            for each in found.sizes
        ],
        "timed_out": found.why_incomplete is not None,
        "seconds": found.seconds,
    }


def _write(found: LatencyBandwidth, document: Json, folder: Path) -> None:
    """A schedule of each point, and `frontier.json`."""
    from arborcast import synth
    from arborcast.synth.formats.atomic import make_folder, write_atomically

    make_folder(folder)
    for index, (point, entry) in enumerate(zip(found.points, document["points"], strict=True)):
        path = folder / f"p{index}-{point.schedule.method.name}.json"
        synth.write_schedule(point.schedule, path)
        entry["file"] = path.name
    write_atomically(folder / "frontier.json", json.dumps(document, indent=1) + "\n")


def _lines(found: LatencyBandwidth, folder: Path | None) -> list[str]:
    bound = found.bound
    points = [
        (
            f"  {index}",
            point.schedule.method.name,
            f"{point.schedule.steps} steps",
            f"{float(point.latency_us):.1f} us",
            gigabytes(point.schedule.rate),
            share(point.schedule.rate, bound.rate),
        )
        for index, point in enumerate(found.points)
    ]
    columns: Columns = {
        "  size": lambda it: f"  {format_size(it.size_bytes)}",
        "point": lambda it: it.point,
        "simulated": lambda it: f"{it.time_us:.1f} us",
        "at least": lambda it: f"{float(it.least_us):.1f} us",
        "share": lambda it: f"{float(it.least_us) / it.time_us:.1%}",
    }
    lines = [
        f"{found.topology.name} {found.collective.kind}: schedules of known patterns and low trees",
        "",
        *table(("  point", "method", "shape", "latency", "rate", "of the bound"), points, left=2),
        "",
        *table_of(found.sizes, columns),
        "",
        f"  limit    latency {float(found.limit.at(0)):.1f} us, rate {gigabytes(bound.rate)}",
        *describe_bound(bound, found.topology),
        f"  time     {found.seconds} s, every schedule verified",
    ]
    return lines if folder is None else [*lines, f"  written  {folder}"]
