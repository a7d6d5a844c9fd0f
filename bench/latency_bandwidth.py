"""How near is the best schedule of each size to what any takes, on fabrics of up to 4,096 ranks.

Nothing is timed but the search itself: times are simulated, by latencies and bandwidths of links, and stand
beside the proved least time of each size. What is compared is what `synth pareto` shows above 64 ranks; each
schedule of a frontier is replayed by the verifier (representatives, where it is in implicit form). A fabric
and a collective have a process of their own. Results go to `bench/results/latency_bandwidth.json`.

    python bench/latency_bandwidth.py              # half an hour
    python bench/latency_bandwidth.py --only dgx-a100:boxes=16 --json FILE
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from arborcast import synth, topologies
from arborcast.bench.clusters.machines import TORUS
from arborcast.bench.harness.document import Measure, Row, document, write_document
from arborcast.bench.harness.parts import kept
from arborcast.bench.harness.processes import HOME, ChildError, answer
from arborcast.bench.harness.provenance import SYNTHESIS
from arborcast.synth.api import approach
from arborcast.synth.collective import Kind
from arborcast.synth.formats.sizes import format_size
from arborcast.synth.latency_bandwidth import LatencyBandwidth, latency_bandwidth
from arborcast.synth.request import Request

RESULTS = HOME / "bench" / "results" / "latency_bandwidth.json"
SPECS = (
    *(f"dgx-a100:boxes={boxes}" for boxes in (16, 128, 512)),
    *(f"mi250:boxes={boxes}" for boxes in (8, 256)),
    *(f"torus:{side}x{side},{TORUS}" for side in (16, 32, 64)),
)
"""128 to 4,096 ranks."""

KINDS = (Kind.ALLREDUCE, Kind.ALLGATHER)
DEADLINE_S, KILL_AT_S = 240.0, 600.0


def rows_of(found: LatencyBandwidth) -> list[Row]:
    """A row for each size."""
    ranks = len(found.collective.ranks)
    rows: list[Row] = []
    for each in found.sizes:
        schedule = found.points[each.point].schedule
        rows.append(
            {
                "topology": found.topology.name,
                "ranks": ranks,
                "collective": str(found.collective.kind),
                "bytes": each.size_bytes,
                "time_us": each.time_us,
                "least_us": float(each.least_us),
                "share_of_least": float(each.least_us) / each.time_us,
                "served_by": schedule.method.name,
                "steps": schedule.steps,
                "share_of_bound": float(schedule.rate / found.bound.rate),
            }
        )
    return rows


def frontier_of(found: LatencyBandwidth) -> dict[str, Any]:
    """Its points, with the limits of latency and rate; what the verifier did not pass raises."""
    points = []
    for point in found.points:
        verdict = synth.verify(point.schedule)
        if not verdict.correct:
            raise AssertionError(f"{found.topology.name}: not correct: {verdict.errors[0]}")
        points.append(
            {
                "method": point.schedule.method.name,
                "settings": dict(point.schedule.method.settings),
                "steps": point.schedule.steps,
                "latency_us": float(point.latency_us),
                "rate": float(point.schedule.rate),
                "share_of_bound": float(point.schedule.rate / found.bound.rate),
            }
        )
    return {
        "topology": found.topology.name,
        "ranks": len(found.collective.ranks),
        "collective": str(found.collective.kind),
        "least_latency_us": float(found.limit.at(0)),
        "bound": float(found.bound.rate),
        "scope": found.bound.scope.value,
        "seconds": found.seconds,
        "why_incomplete": found.why_incomplete,
        "points": points,
    }


def _child(spec: str, kind: str) -> dict[str, Any]:
    asked = approach(topologies.load(spec), kind, request=Request(deadline_s=DEADLINE_S))
    found = latency_bandwidth(asked)
    return {"rows": rows_of(found), "frontier": frontier_of(found)}


def _part(folder: Path | None, spec: str, kind: Kind) -> Mapping[str, Any]:
    """`rows` and `frontier` of a process, or why there are none in `missing`."""

    def made() -> Mapping[str, Any]:
        try:
            found = answer([str(Path(__file__).resolve()), "--child", spec, str(kind)], KILL_AT_S)
        except ChildError as error:
            return {"missing": str(error).splitlines()[0]}
        return found if "rows" in found else {"missing": f"killed after {KILL_AT_S:g} s"}

    return kept(folder, f"{spec} {kind}", SYNTHESIS, made, is_whole=lambda part: "rows" in part)


def _told(found: Mapping[str, Any]) -> str:
    if "missing" in found:
        return str(found["missing"])
    frontier = found["frontier"]
    worst = min(found["rows"], key=lambda row: row["share_of_least"])
    least = f"least share {worst['share_of_least']:.3f} at {format_size(worst['bytes'])}"
    return f"{len(frontier['points'])} points in {frontier['seconds']:.0f} s; {least}"


def main() -> None:
    """Compare what the command line asks for and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", nargs="+", metavar="SPEC", help="these fabrics instead of the full set")
    parser.add_argument("--json", type=Path, default=RESULTS, help="where the results go")
    parser.add_argument(
        "--parts", type=Path, metavar="FOLDER", help="keep each fabric and collective there, or take it"
    )
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(_child(*arguments.child)))
        return
    rows: list[Row] = []
    frontiers, missing = [], []
    for spec in arguments.only or SPECS:
        for kind in KINDS:
            found = _part(arguments.parts, spec, kind)
            print(f"{spec} {kind}: {_told(found)}", file=sys.stderr, flush=True)
            if "missing" in found:
                missing.append({"topology": spec, "collective": str(kind), "why": found["missing"]})
                continue
            rows += found["rows"]
            frontiers.append(found["frontier"])
    write_document(
        arguments.json,
        document(
            "How near is the best schedule of each size to what any takes, on up to 4,096 ranks?",
            rows,
            keys=("topology", "collective", "bytes"),
            measures={
                "time_us": Measure("less"),
                "share_of_least": Measure("more", follows="time_us"),
                "share_of_bound": Measure("more"),
            },
            units={
                "time_us": "simulated, by latencies and bandwidths of links alone",
                "least_us": "what every schedule takes at least, proved in the scope of the bound",
                "share_of_least": "least_us over time_us",
                "share_of_bound": "of the proved limit of the rate, by the schedule of this size",
                "frontiers": "points by latency for no bytes, us, and rate, GB/s, beside the limit of each",
            },
            frontiers=frontiers,
            missing=missing,
        ),
    )
    print(f"written: {arguments.json}")


if __name__ == "__main__":
    main()
