"""Ours as one of the contenders: a process of its own that answers as a user's would, from spec to files.

The child is `python bench/adapters/ours.py METHOD SPEC RANKS COLLECTIVE ROOT FOLDER`: it writes its schedules
to the folder and prints one line of JSON. A second child, whose FOLDER is empty, answers for `AGAIN_S` and
says what the last answer took: by then kernels that a process at first runs as plain Python are machine code.
Nothing is taken from a cache of answers; compiled kernels are, as after an installation.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from arborcast.bench.adapters.answer import Answer, Question, Reading
    from arborcast.synth.schedule import Schedule
    from arborcast.synth.topology import Topology

HOME = Path(__file__).resolve().parent.parent.parent
FRONTIER = "frontier"
SIZED = "size"
SIZE = 64 << 20
AGAIN_S = 1.5


@dataclass(frozen=True)
class Ours:
    """One of our methods, "frontier" for all points of `synth pareto`, "size" for `--size 64MiB`."""

    method: str

    @property
    def name(self) -> str:
        """As in other results."""
        return {FRONTIER: "chunks", SIZED: "selection, 64 MiB"}.get(self.method, self.method)

    def check(self) -> None:
        """It is always there."""

    def ask(self, question: Question, limit_s: float) -> Answer:
        """See `bench.adapters.answer.Contender`."""
        from arborcast.bench.adapters.answer import LONGEST_REPEATED_S, answer_of
        from arborcast.bench.harness.processes import run

        root = question.collective.root or 0
        ranks = "all" if question.ranks is None else ",".join(map(str, question.ranks))
        asked = [sys.executable, __file__, self.method, question.spec, ranks, str(question.collective.kind)]
        environment = {"PYTHONPATH": str(HOME), "NUMBA_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        with TemporaryDirectory() as scratch:
            finished = run([*asked, str(root), scratch], limit_s, environment=environment)
            answer = answer_of(finished, lambda: _read(finished.output, Path(scratch)))
        if answer.call_seconds is None or answer.call_seconds >= LONGEST_REPEATED_S:
            return answer
        again = run([*asked, str(root), ""], limit_s + AGAIN_S, environment=environment)
        in_stride = answer_of(again, lambda: (json.loads(again.output)["call_seconds"], answer.algorithms))
        return replace(in_stride, finished=finished)


def _read(output: str, folder: Path) -> Reading:
    from arborcast.bench.adapters.answer import Algorithm
    from arborcast.synth.formats.schedules import read_explicit

    told = json.loads(output)
    algorithms: list[Algorithm] = []
    for label, trees in told["algorithms"]:
        schedule = read_explicit(folder / f"{len(algorithms)}.json")
        algorithms.append(Algorithm(label, schedule, schedule.rate, trees))
    return float(told["call_seconds"]), algorithms


def main() -> None:
    """In the child: find the schedules once, or again and again; say how long the last time took."""
    method, spec, listed, kind, root, folder = sys.argv[1:]
    ranks = None if listed == "all" else tuple(map(int, listed.split(",")))
    from arborcast import topologies
    from arborcast.synth.formats.schedules import write_explicit

    begin = end = start = time.perf_counter()
    found: list[tuple[str, Schedule]] = []
    while not found or (not folder and end - begin < AGAIN_S):
        topology = topologies.load(spec, ranks=ranks)  # afresh, because it caches what it has derived
        start = time.perf_counter()
        found = _found(method, topology, kind, int(root))
        end = time.perf_counter()
    told: dict[str, Any] = {"call_seconds": end - start, "algorithms": []}
    for number, (label, schedule) in enumerate(found if folder else ()):
        write_explicit(schedule, Path(folder) / f"{number}.json")
        told["algorithms"].append((label, _trees(schedule)))
    print(json.dumps(told))


def _found(method: str, topology: Topology, kind: str, root: int) -> list[tuple[str, Schedule]]:
    """Schedules with what tells them apart."""
    from arborcast.synth.api import solve
    from arborcast.synth.chunks.frontier import pareto

    if method == FRONTIER:
        points = pareto(topology, kind, root=root, cache=False).points
        return [(f"({point.chunks},{point.steps},{point.rounds})", point.schedule) for point in points]
    if method == SIZED:
        return [("", solve(topology, kind, form="explicit", root=root, size_bytes=SIZE, cache=False))]
    return [("", solve(topology, kind, form="explicit", root=root, method=method, cache=False))]


def _trees(schedule: Schedule) -> int | None:
    """As many as chunks, where a schedule is made of trees."""
    return len(schedule.chunks) if schedule.rounds is None else None


if __name__ == "__main__":
    main()
