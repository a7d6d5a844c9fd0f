"""A question of scale, in a process of its own.

A small question of the same sort goes first, so that compiled kernels are loaded and the figures are those of
the work.
"""

from __future__ import annotations

import random
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from arborcast.bench.scaling.cases import GROUPS, PARTLY, REPAIR, SEARCHED, SYMMETRIC, WRITTEN_OUT, Case

if TYPE_CHECKING:
    from arborcast.synth.faults.faulty import Faulty
    from arborcast.synth.implicit_schedule import AnySchedule, ImplicitSchedule
    from arborcast.synth.topology import Topology

SMALL = "dgx-a100:boxes=2"
SEED = 0


class Laps:
    """Seconds of the parts of an answer."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def lap(self, name: str) -> Iterator[None]:
        """Count the CPU time of this process inside as part `name`: nothing here waits."""
        start = time.process_time()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.process_time() - start


def answered(asked: dict[str, Any]) -> dict[str, Any]:
    """What `bench.scale` keeps of a case, given by its fields."""
    case = Case(**asked)
    answer = _shared if case.method == GROUPS else _answer
    small = "torus:4x4" if "torus" in case.spec else SMALL
    answer(replace(case, spec=small, faults=_small(case), mesh=case.mesh and "2x8:0"))
    return answer(case)


def _small(case: Case) -> str:
    """Faults of the same sort on a small fabric."""
    if not case.faults:
        return ""
    sort, *_ = case.faults.split(":")
    return {"ranks": "ranks:1:0", "both": "both:1:1:0"}.get(sort, case.faults)


def _answer(case: Case) -> dict[str, Any]:
    found: dict[str, Callable[[Case, Laps], AnySchedule]] = {
        SYMMETRIC: _symmetric,
        SEARCHED: _symmetric,
        WRITTEN_OUT: _written_out,
        REPAIR: _repaired,
        PARTLY: _partly_symmetric,
    }
    laps = Laps()
    schedule = found[case.method](case, laps)
    from arborcast import synth

    with laps.lap("verify"):
        verdict = synth.verify(schedule, every_translate=case.every_translate)
    return {
        **_told(schedule.topology, laps, schedule.rate, schedule.bound.rate),
        "optimal": schedule.is_optimal,
        "correct": verdict.correct,
        "height": schedule.height,
        "steps": schedule.steps,
        "chunks": schedule.chunk_count,
        "transfers": schedule.transfer_count,
        "settings": {name: str(value) for name, value in schedule.method.settings},
    }


def _shared(case: Case) -> dict[str, Any]:
    """Of groups: the slowest rate beside its limit, and the numbers of the schedules that are written."""
    from arborcast import topologies
    from arborcast.synth.groups import along, solve_groups, verify_groups

    laps = Laps()
    sides, axis = case.mesh.split(":")
    with laps.lap("load"):
        topology = topologies.load(case.spec)
        lines = along(topology, [int(side) for side in sides.split("x")], int(axis), case.kind)
    with laps.lap("solve"):
        found = solve_groups(topology, lines)
    with laps.lap("verify"):
        verdict = verify_groups(found)
    written = list({id(group.written): group.written for group in found.groups}.values())
    return {
        **_told(topology, laps, found.worst, found.certificate.worst),
        "groups": len(lines),
        "written": len(written),
        "optimal": found.certificate.is_exact,
        "correct": verdict.correct,
        "height": max(schedule.height for schedule in written),
        "steps": max(schedule.steps for schedule in written),
        "chunks": sum(group.written.chunk_count for group in found.groups),
        "transfers": sum(group.written.transfer_count for group in found.groups),
    }


def _told(topology: Topology, laps: Laps, rate: Fraction, bound: Fraction) -> dict[str, Any]:
    return {
        "ranks": topology.ranks,
        "seconds": sum(laps.seconds.values()),
        **{f"{name}_seconds": seconds for name, seconds in laps.seconds.items()},
        "peak_MB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3,
        "rate": str(rate),
        "bound": str(bound),
        "share_of_bound": float(rate / bound),
    }


def _symmetric(case: Case, laps: Laps) -> ImplicitSchedule:
    from arborcast import synth, topologies

    with laps.lap("load"):
        topology = topologies.load(case.spec)
        if case.method == SEARCHED:
            topology = replace(topology, symmetries=())
    with laps.lap("solve"):
        return synth.solve(topology, case.kind, form="implicit")


def _written_out(case: Case, laps: Laps) -> AnySchedule:
    from arborcast import synth, topologies

    with laps.lap("load"):
        topology = topologies.load(case.spec)
        if case.faults:
            topology = faulty(topology, case.faults).topology
        topology = replace(topology, symmetries=())
    with laps.lap("solve"):
        return synth.solve(topology, case.kind, form="explicit")


def _repaired(case: Case, laps: Laps) -> AnySchedule:
    from arborcast import synth, topologies
    from arborcast.synth.faults.faulty import parse_link
    from arborcast.synth.faults.repair import repair

    topology = topologies.load(case.spec)
    before = synth.solve(topology, case.kind, form="implicit")
    link = parse_link(topology, case.faults.removeprefix("link:"))
    with laps.lap("solve"):
        return repair(before, without_links=[link])


def _partly_symmetric(case: Case, laps: Laps) -> AnySchedule:
    from arborcast import topologies
    from arborcast.synth.faults.repair import solve_partly_symmetric

    with laps.lap("load"):
        left = faulty(topologies.load(case.spec), case.faults)
    with laps.lap("solve"):
        return solve_partly_symmetric(left, case.kind)


def faulty(topology: Topology, text: str) -> Faulty:
    """A topology with faults drawn by a seed: `ranks:COUNT:SEED`, `both:RANKS:LINKS:SEED`, or `link:A-B`.

    Links are drawn among those between vertices that stay.
    """
    from arborcast.synth.faults.faulty import without

    sort, *arguments = text.split(":")
    if sort == "link":
        return without(topology, links=[text.removeprefix("link:")])
    *counts, seed = map(int, arguments)
    chance = random.Random(seed)
    ranks = chance.sample(range(topology.ranks), counts[0])
    gone = set(ranks)
    cables = [
        (link.src, link.dst)
        for link in topology.links
        if link.src < link.dst and link.src not in gone and link.dst not in gone
    ]
    links = chance.sample(cables, counts[1]) if sort == "both" else []
    return without(topology, links=links, ranks=ranks)
