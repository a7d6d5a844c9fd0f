"""How long does synthesis take? Bounds and exact trees for an allgather, in seconds and megabytes.

Where NVSwitches add and multicast it is an allreduce: its limit, and a schedule along trees that join and
fork at switches.

Every computation runs in a child process of its own, after a warm-up, so that the kernels are compiled and
the peak memory is its own. `bench/peers.py` asks other synthesizers the same questions. Results go to
`bench/results/synthesis.json`.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import sys
import time
from dataclasses import asdict, dataclass, field
from typing import Any

from arborcast.bench.harness.processes import HOME, WHOLE, answer, run
from arborcast.bench.harness.script import KEPT, command_line, keep
from arborcast.bench.harness.turns import median_of
from arborcast.bench.page.console import print_results
from arborcast.synth.formats.results import Measure, document

RESULTS = KEPT / "synthesis.json"
CHILD_LIMIT_S = 1800
START_UP = ("bound", "dgx1", "allreduce")


@dataclass(frozen=True)
class Case:
    """A topology and what is asked of it; `quick` ones are done well within 10 s."""

    title: str
    spec: str
    method: str  # "bound" or "trees"
    runs: int = 5
    quick: bool = True
    collective: str = "allgather"


SPECS = [
    ("DGX-1", "dgx1"),
    ("torus 4x4", "torus:4x4"),
    ("torus 8x8", "torus:8x8"),
    ("2x8 A100", "dgx-a100:boxes=2"),
    ("2x16 MI250", "mi250:boxes=2"),
    ("8x16 MI250", "mi250:boxes=8"),
]
IN_NETWORK = [("DGX-H100, NVLink SHARP", "dgx-h100")] + [
    (f"{boxes}x8 H100, NVLink SHARP", f"dgx-h100:boxes={boxes}") for boxes in (2, 4, 8)
]
CASES = [
    *(Case(title, spec, method) for title, spec in SPECS for method in ("bound", "trees")),
    *(  # once: the bound keeps what trees start from
        Case(title, spec, method, runs=1, collective="allreduce")
        for title, spec in IN_NETWORK
        for method in ("bound", "trees")
    ),
    Case("128x8 A100", "dgx-a100:boxes=128", "bound"),
    Case("128x8 A100", "dgx-a100:boxes=128", "trees", runs=3, quick=False),
    Case("torus 32x32", "torus:32x32", "trees", runs=3, quick=False),
]
KEYS = ("topology", "title", "collective", "method")
MEASURES = {"time_us": Measure("less", "spread"), "algbw": Measure("more"), "trees": Measure("less")}
UNITS = {
    "seconds": "median",
    "cpu_seconds": "median, this process alone",
    "spread": "largest minus smallest, us",
    "peak_MB": "of the process",
    "rate": "algbw in GB/s, exact",
}


@dataclass
class Stopwatch:
    """Seconds of the laps so far, by the clock and of this process alone."""

    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)

    def start(self) -> None:
        """Begin a lap."""
        self._begun = time.perf_counter(), time.process_time()

    def lap(self) -> None:
        """End the lap."""
        self.seconds.append(time.perf_counter() - self._begun[0])
        self.cpu_seconds.append(time.process_time() - self._begun[1])


def main() -> None:
    """Measure what the command line asks for, print the table, write the results."""
    arguments = _arguments()
    rows = [_row(case) for case in CASES if case.quick or not arguments.quick]
    rows.append(_start_up_row())
    found = _document(rows)
    print_results(found, "ranks", "height", "cpu_seconds", "peak_MB", section="synthesis")
    keep(arguments.json, found)


def _arguments() -> argparse.Namespace:
    parser = command_line(__doc__, RESULTS)
    parser.add_argument("--quick", action="store_true", help="leave out what takes over 10 s")
    return parser.parse_args()


def _row(case: Case) -> dict[str, Any]:
    print(f"{case.title}, {case.method} ...", file=sys.stderr)
    found = answer(ours, case.spec, case.method, case.runs, case.collective, limit_s=CHILD_LIMIT_S)
    if found.pop("timed_out", False):
        raise SystemExit(f"{case.title}, {case.method}: over {CHILD_LIMIT_S} s")
    return _summary(case, {name: found[name] for name in found if name not in WHOLE})


def _summary(case: Case, found: dict[str, Any]) -> dict[str, Any]:
    seconds, cpu_seconds = found.pop("seconds"), found.pop("cpu_seconds")
    return {
        "topology": case.spec,
        "title": case.title,
        "collective": case.collective,
        "method": case.method,
        "bytes": None,
        "seconds": statistics.median(seconds),
        "cpu_seconds": statistics.median(cpu_seconds),
        **median_of("time_us", [1e6 * each for each in seconds]),
        "runs": len(seconds),
        **found,
    }


def ours(spec: str, method: str, runs: int, collective: str) -> dict[str, Any]:
    """In a process of its own: a bound or trees, again and again, after a warm-up on the same code paths."""
    from arborcast import topologies
    from arborcast.synth.api import solve
    from arborcast.synth.bounds import bound
    from arborcast.synth.collective import Collective
    from arborcast.synth.packing.exact import pack_exactly
    from arborcast.synth.packing.weighted_tree import Packing
    from arborcast.synth.topology import Topology

    def trees(topology: Topology) -> Packing:
        rate = bound(topology, Collective.on(topology, "allgather")).rate / topology.ranks
        return pack_exactly(topology, dict.fromkeys(range(topology.ranks), rate))

    trees(topologies.load("dgx-a100:boxes=2"))
    solve(topologies.load("dgx-h100").subset(range(4)), "allreduce")
    topology = topologies.load(spec)
    found: dict[str, Any] = {"ranks": topology.ranks, "trees": None, "height": None}
    watch = Stopwatch()
    for _ in range(runs):
        topology = topologies.load(spec)  # afresh, because it caches what it has derived
        watch.start()
        if method == "bound":
            rate = bound(topology, Collective.on(topology, collective)).rate
            watch.lap()
        elif collective == "allreduce":
            schedule = solve(topology, collective, form="explicit")
            watch.lap()
            rate, found["trees"], found["height"] = schedule.rate, schedule.chunk_count, schedule.height
        else:
            packing = trees(topology)
            watch.lap()
            rate = sum((tree.weight for tree in packing.carriers), 0 * packing.carriers[0].weight)
            found["trees"] = len(packing.carriers)
            found["height"] = max(tree.height for tree in packing.carriers)
            del packing
    return found | {**asdict(watch), "rate": str(rate), "algbw": float(rate), "peak_MB": _peak_megabytes()}


def _start_up_row() -> dict[str, Any]:
    """The whole process `synth bound dgx1 allreduce`, start-up included, once everything is cached."""
    command = [sys.executable, "-c", "from arborcast.synth.cli.app import main; main()", *START_UP]
    runs = [run(command, CHILD_LIMIT_S, environment={"PYTHONPATH": str(HOME)}) for _ in range(6)]
    if any(done.status for done in runs):
        raise SystemExit(f"synth {' '.join(START_UP)}: exit status {[done.status for done in runs]}")
    counted = runs[1:]  # the first one compiles
    found: dict[str, Any] = {
        "seconds": [done.seconds for done in counted],
        "cpu_seconds": [done.cpu_seconds for done in counted],
        "peak_MB": max(done.peak_MB for done in counted),
    }
    asked = Case("synth bound dgx1 allreduce", "dgx1", "whole process", collective="allreduce")
    return _summary(asked, found | {"ranks": 8, "trees": None, "height": None})


def _peak_megabytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3  # Linux counts in kB


def _document(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return document(
        "How long does synthesis take?",
        rows,
        keys=KEYS,
        measures=MEASURES,
        units=UNITS,
        packages=("arborcast", "numpy", "numba", "highspy"),
        cases=[asdict(case) for case in CASES],
    )


if __name__ == "__main__":
    main()
