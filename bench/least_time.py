"""How near is the fastest schedule known to the proven least time, at every size? By simulation.

Of each machine, collective and size the least simulated time of all candidates, with three rules for pieces,
over what every schedule takes at least: by the certificate of the rate, by latencies and by tolls
(`synth.bounds.layered_flows`). Both are of links at their own rates, without what a call costs.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from typing import Any

from arborcast import topologies
from arborcast.bench.harness.processes import answer
from arborcast.bench.harness.script import KEPT, command_line, keep, one_line
from arborcast.synth.api import approach
from arborcast.synth.bounds.layered_flows import with_least_time
from arborcast.synth.bounds.time_limits import time_limit
from arborcast.synth.collective import as_collective
from arborcast.synth.deadline import Deadline
from arborcast.synth.formats.results import Measure, document
from arborcast.synth.simulation.pieces import ONE_HOST, SEVERAL_HOSTS, PieceRule

SIZES = tuple(1 << power for power in range(10, 31, 2))
CHILD_LIMIT_S = 1200
TOLLS_S = 30
"""Seconds after which no closer tolls are looked for."""

CUTS = (128, 1024, 4096, 16384)
"""Least bytes of pieces that are tried; more pieces are not always faster."""

ALIKE = 4 << 20
"""Bytes above which pieces are as many as a simulation allows, whatever the least is."""

_BOX, _MESH, _TORUS = (1.10, 1.05), (1.22, 1.15), (1.25, 1.10)
GOALS = {
    **dict.fromkeys(("dgx-a100", "dgx-h100", "mi300x", "dgx-b200"), _BOX),
    **dict.fromkeys(("dgx1", "mi250"), _MESH),
    **dict.fromkeys(("torus:4x4,bandwidth=25,latency=0.7", "tpu-v4:4x4x4"), _TORUS),
    **dict.fromkeys(("dgx-a100:boxes=4", "dgx-h100:boxes=8"), (1.25, 1.10)),
    "mi250:boxes=2": (1.6, 1.5),
    "mi250:boxes=8": (2.1, 1.7),
}
"""Most times the least time, of an allreduce and an allgather; at 1 MiB some by `AT_A_MEGABYTE`."""

AT_A_MEGABYTE = {1.25: 1.35, 1.6: 2.0}
KINDS = ("allreduce", "allgather")
KEYS = ("topology", "collective", "cut", "bytes")
MEASURES = {"time_us": Measure("less"), "gap": Measure("less")}
UNITS = {
    "cut": f"free: pieces of {CUTS[0]} B or more; 4 KiB: of so much; engine: as the process group cuts",
    "time_us": "simulated, of links alone",
    "least_us": "proven for every schedule",
    "gap": "time_us over least_us",
    "goal": "the most that gap is wanted to be",
    "seconds": "of a processor, to build all candidates of a machine and collective",
}


def rows(machine: str, kind: str) -> dict[str, list[dict[str, Any]]]:
    """Those of a machine and collective: of each rule for pieces and size."""
    topology = topologies.load(machine)
    collective = as_collective(topology, kind)
    begin = time.process_time()
    selection = replace(approach(topology, collective).selection(), priced=False)
    seconds = time.process_time() - begin
    bound = selection.schedules[0].bound
    least = {}
    for size in SIZES:
        timed = with_least_time(topology, collective, bound, size, Deadline.after(TOLLS_S))
        least[size] = float(time_limit(topology, collective, timed).at(size)), bool(timed.times)
    goal = GOALS[machine][KINDS.index(kind)]
    found = []
    engine = ONE_HOST if "boxes" not in machine else SEVERAL_HOSTS
    prices = {rule: replace(selection, least_piece=rule).prices for rule in (*CUTS, engine)}
    ways: dict[str, tuple[int | PieceRule, ...]] = {"free": CUTS, "4 KiB": CUTS[2:], "engine": (engine,)}
    for cut, rules in ways.items():
        for size in SIZES:
            tried = rules if size <= ALIKE else rules[-1:]
            best = {rule: prices[rule].best(size) for rule in tried}
            rule = min(tried, key=lambda rule: prices[rule].time_us(best[rule], size))
            at = best[rule]
            time_us, (least_us, by_tolls) = prices[rule].time_us(at, size), least[size]
            wanted = AT_A_MEGABYTE.get(goal, goal) if size == 1 << 20 and kind == "allreduce" else goal
            found.append(
                {
                    "topology": machine,
                    "collective": kind,
                    "cut": cut,
                    "bytes": size,
                    "method": selection.schedules[at].method.name,
                    "pieces": prices[rule].pieces(at, size),
                    "time_us": time_us,
                    "least_us": least_us,
                    "by_tolls": by_tolls,
                    "gap": time_us / least_us,
                    "goal": wanted,
                    "seconds": seconds,
                }
            )
    return {"rows": found}


@one_line("least_time")
def main() -> None:
    """Work out what the command line asks for, in a process each, and write the results."""
    parser = command_line(__doc__, KEPT / "least_time.json")
    parser.add_argument("--only", nargs="+", metavar="SPEC", default=list(GOALS), choices=list(GOALS))
    asked = parser.parse_args()
    listed: list[dict[str, Any]] = []
    for machine in asked.only:
        for kind in KINDS:
            found = answer(rows, machine, kind, limit_s=CHILD_LIMIT_S)
            if "timed_out" in found:
                print(f"{machine} {kind}: over {CHILD_LIMIT_S} s", file=sys.stderr, flush=True)
                continue
            listed += found["rows"]
            worst = max((row for row in found["rows"] if row["cut"] == "free"), key=lambda row: row["gap"])
            said = f"{worst['gap']:.3f} at {worst['bytes']} B by {worst['method']}"
            print(f"{machine} {kind}: {said}", file=sys.stderr, flush=True)
    question = "How near to the proven least time, at every size?"
    results = document(question, listed, keys=KEYS, measures=MEASURES, units=UNITS)
    keep(asked.json, results, is_part=len(asked.only) < len(GOALS))


if __name__ == "__main__":
    main()
