"""What do switches that add gain, over sizes, workers and levels? The question of NTT's aggregation node.

Tanaka et al., "A study of in-network computing at wire speed for distributed deep learning": workers around a
node that adds their gradients as they pass (cut-through) reach 9.62 of 10 Gbit/s from 64 KB on, and storing
whole messages before adding, as SHArP is described, costs as much again. Left open there: more workers, more
levels. Here a star of 4 to 64 workers at 10 Gbit/s, and two-level stars, all simulated: with the switch
adding as frames pass; storing whole messages first; only forwarding, with the trees that are optimal then and
with the best ring. Results go to `bench/results/aggregation.json`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from arborcast import synth
from arborcast.bench.harness.document import Measure, document, write_document
from arborcast.synth.baselines import solve_baseline
from arborcast.synth.collective import Collective
from arborcast.synth.formats.sizes import format_size, size_range
from arborcast.synth.schedule import Chunk, Method, Schedule, Transfer
from arborcast.synth.simulation.simulator import FRAME_BYTES, sweep
from arborcast.synth.topology import Link, Switch, Topology

RESULTS = Path(__file__).resolve().parent / "results" / "aggregation.json"
LINK = Fraction(5, 4)  # 10 Gbit/s, as in the paper
LATENCY_US = Fraction(1)
SIZES = size_range("4KiB:64MiB")[::2]
WORKERS = (4, 8, 16, 32, 64)
LEVELS = ((4, 4), (8, 8))
"""Stars below a second switch, and workers of each."""

STORED = "stored, then added"
ADDED = "added as they pass"


def star(workers: int, groups: int = 1) -> Topology:
    """Workers around a switch that adds, or around one each group of them and one above.

    The links between switches have the rate of the workers' links, which is enough for sums.
    """
    switches = range(groups * workers, groups * workers + groups)
    parents = {worker: switches[worker // workers] for worker in range(groups * workers)}
    if groups > 1:
        parents |= dict.fromkeys(switches, switches[-1] + 1)
    abilities = Switch("", reduces=True, multicasts=True, turns=True)
    count = groups + (groups > 1)
    return Topology.build(
        f"star:{workers}" if groups == 1 else f"{groups} stars of {workers}",
        groups * workers,
        [
            Link(*ends, LINK, LATENCY_US)
            for below, above in parents.items()
            for ends in ((below, above), (above, below))
        ],
        [replace(abilities, name=f"switch {number}") for number in range(count)],
    )


def in_network(topology: Topology, *, stores: bool = False) -> Schedule:
    """All of the buffer up to the last switch and down again, added on the way."""
    switches = tuple(replace(switch, stores=stores) for switch in topology.switches)
    topology = replace(topology, switches=switches)
    top = topology.size - 1
    parents = {link.src: link.dst for link in topology.links if link.src < link.dst}
    depth = {top: 0}
    for vertex in range(top - 1, -1, -1):
        depth[vertex] = depth[parents[vertex]] + 1
    height = max(depth.values())
    transfers = [
        move
        for below, above in parents.items()
        for move in (
            Transfer(0, below, above, height - depth[below], True),
            Transfer(0, above, below, height + depth[below] - 1),
        )
    ]
    collective = Collective.on(topology, "allreduce")
    # The limit without abilities stands in for one that nothing here asks for.
    limit = synth.bound(topology.forwarding, collective)
    chunks = [Chunk(Fraction(1), 0)]
    return Schedule.build(topology, collective, Method("in-network"), limit, chunks, transfers)


CONTENDERS: dict[str, Callable[[Topology], Schedule]] = {
    ADDED: in_network,
    STORED: lambda topology: in_network(topology, stores=True),
    "forwarded, trees": lambda topology: _forwarded(topology, "trees"),
    "forwarded, ring": lambda topology: _forwarded(topology, "ring"),
}


def _forwarded(topology: Topology, method: str) -> Schedule:
    plain = topology.forwarding
    collective = Collective.on(plain, "allreduce")
    if method == "ring":
        return solve_baseline(plain, collective, method, bound=synth.bound(plain, collective))
    found = synth.solve(plain, collective, method=method)
    assert isinstance(found, Schedule)
    return found


def measured(topologies: Sequence[Topology], sizes: Sequence[int]) -> Iterator[dict[str, Any]]:
    """A row for each fabric, contender and size."""
    for topology in topologies:
        for method, schedule_of in CONTENDERS.items():
            schedule = schedule_of(topology)
            # Switches cut through for all: frames of the same size, whether they are able or not.
            for timing in sweep(schedule, sizes, frame_bytes=FRAME_BYTES):
                yield {
                    "topology": topology.name,
                    "collective": "allreduce",
                    "method": method,
                    "bytes": timing.bytes,
                    "ranks": topology.ranks,
                    "pieces": timing.pieces,
                    "time_us": timing.time_us,
                    "algbw": timing.algbw,
                    "share_of_nominal": timing.algbw / float(LINK),
                    "rate": float(schedule.rate),
                }


def main() -> None:
    """Simulate all fabrics, write the results and print them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, default=RESULTS, help="where the results go")
    arguments = parser.parse_args()
    fabrics = [star(workers) for workers in WORKERS] + [star(workers, groups) for groups, workers in LEVELS]
    rows = list(measured(fabrics, SIZES))
    found = document(
        "What do switches that add gain, over sizes, workers and levels?",
        rows,
        keys=("topology", "collective", "method", "bytes"),
        measures={"time_us": Measure("less"), "algbw": Measure("more"), "share_of_nominal": Measure("more")},
        units={
            "time_us": "simulated; nothing is timed",
            "algbw": "GB/s of the whole buffer",
            "share_of_nominal": "algbw over the rate of a worker's link",
            "rate": "algbw that large messages approach, exact",
        },
    )
    write_document(arguments.json, found)
    for row in rows:
        size, share = format_size(row["bytes"]), row["share_of_nominal"]
        print(f"{row['topology']:16}{row['method']:20}{size:>8}{row['time_us']:12.1f} us{share:8.3f}")


if __name__ == "__main__":
    main()
