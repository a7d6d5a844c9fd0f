"""The frontier of tree heights: `python -m arborcast.bench.scaling.heights SPEC COLLECTIVE`, in one process.

The answer is one line of JSON with a row for each schedule that is higher only where it is faster.
"""

from __future__ import annotations

import json
import sys
from typing import Any

SMALL_SIZE, LARGE_SIZE = 64 << 10, 64 << 20


def main() -> None:
    """Answer, print."""
    print(json.dumps({"rows": rows(*sys.argv[1:])}))


def rows(spec: str, kind: str) -> list[dict[str, Any]]:
    """Height, trees of each root, rate and simulated times of every point."""
    from arborcast import synth, topologies
    from arborcast.synth.collective import Collective
    from arborcast.synth.packing.symmetric.height_frontier import symmetric_frontier

    topology = topologies.load(spec)
    points = symmetric_frontier(topology, Collective.on(topology, kind))
    found = []
    for schedule in points:
        verdict = synth.verify(schedule)
        found.append(
            {
                "ranks": topology.ranks,
                "height": schedule.height,
                "trees": schedule.chunk_count / topology.ranks,
                "rate": str(schedule.rate),
                "share_of_bound": float(schedule.rate / schedule.bound.rate),
                "correct": verdict.correct,
                "time_us_64KiB": synth.simulate(schedule, SMALL_SIZE).time_us,
                "time_us_64MiB": synth.simulate(schedule, LARGE_SIZE).time_us,
            }
        )
    return found


if __name__ == "__main__":
    main()
