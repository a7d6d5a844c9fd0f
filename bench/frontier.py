"""How long do whole frontiers take? Of DGX-1, tori and cubes, in seconds.

Everything runs on one core and without the cache, each run in a process of its own. SCCL's tool is asked for
frontiers by `bench/peers.py`. Results go to `bench/results/frontier.json`.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from arborcast.bench.harness.processes import WHOLE, answer
from arborcast.bench.harness.script import KEPT, command_line, keep
from arborcast.bench.harness.turns import median_of
from arborcast.bench.page.console import print_results
from arborcast.synth.formats.results import Measure, document

LIMIT_S = 900.0  # of a process
AGAIN_CALLS = 5
AGAIN_ENOUGH_S = 10.0


@dataclass(frozen=True)
class Case:
    """A whole frontier.

    Attributes:
        title: for the table.
        spec: the topology.
        collective: with root 0 where it has one.
        expected: chunks, steps and rounds of points that must be found (see SCCL, PPoPP 2021).
        max_steps: the largest S; None for the default.
        deadline_s: seconds after which what is known by then counts; None to go on to the end.
    """

    title: str
    spec: str
    collective: str
    expected: tuple[tuple[int, int, int], ...]
    max_steps: int | None = None
    deadline_s: float | None = None


DEADLINE_S = 60.0
"""Of frontiers beyond one box, which mostly have no end: with how large a gap to its limit is each S left?"""

BEYOND_ONE_BOX = {
    "two NDv2": "ndv2:boxes=2",
    "two DGX-1": "dgx1:boxes=2",
    "two DGX-A100": "dgx-a100:boxes=2",
    "four DGX-A100": "dgx-a100:boxes=4",
    "MI250": "mi250",
    "torus 8x8": "torus:8x8",
}

CASES = [
    Case("DGX-1 allgather", "dgx1", "allgather", ((2, 2, 3), (6, 3, 7))),
    Case("DGX-1 gather", "dgx1", "gather", ((6, 2, 7),)),
    Case("DGX-1 alltoall", "dgx1", "alltoall", ((3, 2, 8),)),
    Case(
        "DGX-1 broadcast, S up to 8",
        "dgx1",
        "broadcast",
        ((2, 2, 2), (22, 3, 9), (13, 4, 4), (19, 5, 5), (25, 6, 6), (31, 7, 7), (37, 8, 8)),
        max_steps=8,
    ),
    Case("DGX-1 allreduce", "dgx1", "allreduce", ((2, 2, 2), (6, 3, 3), (12, 4, 4), (48, 5, 14))),
    Case("torus 4x4 allgather", "torus:4x4", "allgather", ((4, 4, 15),)),
    Case("torus 4x8 allgather", "torus:4x8", "allgather", ((4, 6, 31),)),
    Case("5-cube allgather", "hypercube:5", "allgather", ((5, 5, 31),)),
    *(
        Case(f"{name} {kind}", spec, kind, (), deadline_s=DEADLINE_S)
        for name, spec in BEYOND_ONE_BOX.items()
        for kind in ("allgather", "alltoall", "allreduce")
    ),
]


KEYS = ("topology", "collective", "method", "max_steps")
MEASURES = {
    "time_us": Measure("less", "spread"),
    "complete": Measure("more"),
    "verified": Measure("more"),
    "as_expected": Measure("more"),
}
UNITS = {
    "seconds": "median, the whole process from its start to its end",
    "call_seconds": "median, the call of pareto() alone, imports within it included",
    "again_seconds": "median, further calls in a process that has made one",
    "cpu_seconds": "median, of the process and its children",
    "spread": "largest minus smallest, us",
    "peak_MB": "of the largest process",
    "points": "chunks, steps, rounds",
    "largest_gap": "of gaps; none where there is no point, or one without a limit",
    "gaps": "of each point, by what part of the proved limit of its number of steps its R/C is more",
    "restrictions": "of each point, the schedules among which alone it was looked for; none for all",
}


def main() -> None:
    """Measure what the command line asks for, print the tables, write the results."""
    arguments = _arguments()
    if arguments.core >= 0:
        os.sched_setaffinity(0, {arguments.core})  # every process started from here inherits it
    rows = [_row(case, arguments) for case in _chosen(arguments.case)]
    found = _document(rows, arguments)
    print_results(found, "call_seconds", "again_seconds", "cpu_seconds", "peak_MB", section="frontier")
    keep(arguments.output / "frontier.json", found, is_part=bool(arguments.case))
    if not all(row["as_expected"] for row in rows):
        raise SystemExit("not all answers are as expected: see as_expected in the results")


def _arguments() -> argparse.Namespace:
    parser = command_line(__doc__)
    parser.add_argument("--case", action="append", metavar="TITLE", help="frontiers whose title holds this")
    parser.add_argument("--runs", type=int, default=3, help="of each measurement that takes under 10 s")
    parser.add_argument("--limit-s", type=float, default=120.0, help="no further runs of what takes longer")
    parser.add_argument("--core", type=int, default=0, help="the core that everything runs on; -1 for all")
    parser.add_argument("--output", type=Path, default=KEPT, help="folder of the results")
    return parser.parse_args()


def _chosen(titles: Sequence[str] | None) -> list[Case]:
    """Those whose title is one of these, or else holds one of them; all where none is given."""
    named = [case for case in CASES if case.title in (titles or ())]
    return named or [case for case in CASES if not titles or any(title in case.title for title in titles)]


def _row(case: Case, arguments: argparse.Namespace) -> dict[str, Any]:
    runs: list[dict[str, Any]] = []
    checks = _ours(case, is_checked=True)  # it also warms the disk and the compiled kernels
    if case.deadline_s:
        return _our_row(case, [checks], checks)
    for turn in range(arguments.runs):
        print(f"{case.title}, turn {turn + 1} ...", file=sys.stderr)
        if not runs or runs[0]["seconds"] < arguments.limit_s:
            runs.append(_ours(case))
    return _our_row(case, runs, checks)


def _ours(case: Case, *, is_checked: bool = False) -> dict[str, Any]:
    asked = case.spec, case.collective, case.max_steps, case.deadline_s
    found = answer(traced, is_checked, *asked, limit_s=LIMIT_S)
    if "timed_out" in found:
        raise SystemExit(f"{case.title}: over {LIMIT_S:.0f} s")
    whole = dict(zip(("seconds", "cpu_seconds", "peak_MB"), (found[name] for name in WHOLE), strict=True))
    return whole | found


def traced(
    is_checked: bool, spec: str, kind: str, max_steps: int | None, deadline_s: float | None
) -> dict[str, Any]:
    """In a process of its own: a frontier without the cache; where it is to be checked, its schedules, too.

    Then further calls in the same process are timed, unless there is a deadline.
    """
    from arborcast import topologies
    from arborcast.synth.chunks.frontier import Frontier, pareto
    from arborcast.synth.collective import Collective
    from arborcast.synth.verification.verifier import verify

    def call() -> tuple[float, Frontier]:
        topology = topologies.load(spec)  # afresh, because it caches what it has derived
        collective = Collective.on(topology, kind)
        start = time.perf_counter()
        found = pareto(topology, collective, max_steps=max_steps, deadline_s=deadline_s, cache=False)
        return time.perf_counter() - start, found

    seconds, found = call()
    told = {
        "call_seconds": seconds,
        "points": [[point.chunks, point.steps, point.rounds] for point in found.points],
        "proved": [point.is_proved for point in found.points],
        "gaps": [None if point.gap is None else float(point.gap) for point in found.points],
        "restrictions": [point.restriction for point in found.points],
        "complete": found.complete,
        "why_stopped": found.why_stopped,
    }
    if not is_checked:
        return told
    again = [seconds] if deadline_s else []
    while not deadline_s and len(again) < AGAIN_CALLS and sum(again) < AGAIN_ENOUGH_S:
        again.append(call()[0])
    verified = all(verify(point.schedule).correct for point in found.points)
    return {**told, "verified": verified, "again_seconds": statistics.median(again)}


def _our_row(case: Case, runs: Sequence[dict[str, Any]], checks: dict[str, Any]) -> dict[str, Any]:
    """Times are medians; all else is what every run of a deterministic search says."""
    last, seconds = runs[-1], [one["seconds"] for one in runs]
    found = {tuple(point) for point in last["points"]}
    agree = all(one["points"] == last["points"] for one in runs)
    return {
        "topology": case.spec,
        "title": case.title,
        "collective": case.collective,
        "method": "pareto",
        "max_steps": case.max_steps,
        "bytes": None,
        "seconds": statistics.median(seconds),
        "cpu_seconds": statistics.median(one["cpu_seconds"] for one in runs),
        **median_of("time_us", [1e6 * each for each in seconds]),
        "runs": len(runs),
        **{key: last[key] for key in ("points", "proved", "gaps", "restrictions", "complete", "why_stopped")},
        "deadline_s": case.deadline_s,
        "largest_gap": max(last["gaps"], default=None) if None not in last["gaps"] else None,
        "verified": checks["verified"],
        "call_seconds": statistics.median(one["call_seconds"] for one in runs),
        "again_seconds": checks["again_seconds"],
        "peak_MB": max(one["peak_MB"] for one in runs),
        "verdict": "found",
        "as_expected": agree and checks["verified"] and set(case.expected) <= found,
    }


def _document(rows: list[dict[str, Any]], arguments: argparse.Namespace) -> dict[str, Any]:
    return document(
        # As files asked when solvers were measured, too, so that they can be compared.
        "How long do whole frontiers take, and which solver wins where?",
        rows,
        keys=KEYS,
        measures=MEASURES,
        units=UNITS,
        packages=("arborcast", "numpy", "numba", "highspy", "z3-solver", "python-sat"),
        core=None if arguments.core < 0 else arguments.core,
        limit_s=arguments.limit_s,
        cases=[asdict(case) for case in CASES],
    )


if __name__ == "__main__":
    main()
