"""Those that the testbed compares: gloo's own collectives, and schedules by the methods of `synth`.

A method that has no schedule for a collective on a topology is no error: its reason goes to the results.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from arborcast import synth
from arborcast.backends import Options
from arborcast.backends.schedules.schedule_table import ScheduleTable
from arborcast.synth.baselines import BASELINES
from arborcast.synth.candidates import Candidates
from arborcast.synth.chunks.allreduce.halves import latency_of_parts, parts_of
from arborcast.synth.chunks.frontier import pareto
from arborcast.synth.collective import Collective
from arborcast.synth.errors import InfeasibleError, InputError, TimedOutError
from arborcast.synth.schedule import Schedule
from arborcast.synth.simulation.pieces import SEVERAL_HOSTS
from arborcast.synth.simulation.simulator import simulate
from arborcast.synth.solve_options import SolveOptions
from arborcast.synth.topology import Topology
from arborcast.synth.verification.verifier import verify

GLOO, RING, TREES, MWU, CHUNKS, MESSAGES = "gloo", "ring", "trees", "mwu", "chunks", "torch messages"
SELECTION = "selection"
"""What the process group runs: the schedule of its table for the size."""

ANY_BITS = "selection, any bits"
"""The same where ranks may add in different orders."""

EXCHANGE = "exchange"
"""Exchanges by digits along the symmetry of a fabric, of the radices that simulate fastest for the size."""

RIVALS = (GLOO, *BASELINES, EXCHANGE)
"""All that ours is compared with: a ratio over the best of them needs every one."""

METHODS = (*RIVALS, SELECTION)
"""What is compared where nothing else is asked."""

KNOWN = (*METHODS, ANY_BITS, TREES, MWU, CHUNKS, "trees (2)", MESSAGES)
"""All that may be asked for."""

FEW = Fraction(1, 20)
"""Part of the optimum that multiplicative weights may give up for fewer trees, as BLINK does."""

FRONTIER_STEPS = 1
"""How many more steps than the fewest a chunk schedule may take, in each half of an allreduce."""

MOST_CHUNKS = 64
"""C of the finest chunk schedule: the frontier of a broadcast goes on with ever smaller gains."""


@dataclass(frozen=True)
class Contender:
    """One of those that are compared.

    Attributes:
        name: the method of its rows.
        schedule: what the engine runs; None for gloo's own collective.
        by_messages: whether torch's messages carry it instead of the engine's channels.
        table: where the schedule depends on the size.
        candidates: of which the one that simulates fastest for the size runs.
    """

    name: str
    schedule: Schedule | None = None
    by_messages: bool = False
    table: ScheduleTable | None = None
    candidates: tuple[Schedule, ...] = ()

    def at(self, size_bytes: int) -> Contender:
        """The same with the schedule for a size."""
        if self.candidates:

            def time_us(each: Schedule) -> float:
                return simulate(each, size_bytes, pieces=SEVERAL_HOSTS.pieces(each, size_bytes)).time_us

            return replace(self, schedule=min(self.candidates, key=time_us), candidates=())
        if self.table is None:
            return self
        schedule = self.table.at(size_bytes).schedule
        assert isinstance(schedule, Schedule), "a testbed has few ranks: its schedules are written out"
        return replace(self, schedule=schedule, table=None)


@dataclass(frozen=True)
class Line:
    """All contenders of a collective on a topology, and why there are not more.

    Attributes:
        contenders: in the order of the rows.
        unavailable: by method, why it has no schedule.
        unknown: those of them that may have one, which was not found in time.
    """

    contenders: tuple[Contender, ...]
    unavailable: dict[str, str]
    unknown: frozenset[str] = frozenset()


def line_up(
    topology: Topology, collective: Collective, names: Iterable[str] = METHODS, *, deadline_s: float = 20
) -> Line:
    """The schedules of all methods, each replayed by the verifier.

    Args:
        topology: the fabric.
        collective: what is to be done on it, among all its ranks.
        names: of `KNOWN`; `chunks` gives up to two contenders.
        deadline_s: of each method.

    Raises:
        InputError: an unknown name.
    """
    found: list[Contender] = []
    unavailable: dict[str, str] = {}
    unknown: set[str] = set()
    for name in names:
        if name not in KNOWN:
            raise InputError(f"method {name}: must be one of {', '.join(KNOWN)}")
        try:
            found += _contenders(name, topology, collective, deadline_s)
        except TimedOutError as error:
            unknown.add(name)
            unavailable[name] = f"not found within {deadline_s:g} s: {error}"
        except (InfeasibleError, InputError) as error:
            unavailable[name] = str(error)
    for each in found:
        entries = each.table.entries if each.table else ()
        schedules = [each.schedule, *each.candidates, *(entry.schedule for entry in entries)]
        for schedule in schedules:
            if schedule is not None and (errors := verify(schedule).errors):
                raise AssertionError(f"{each.name} on {topology.name}: {errors[0]}")
    return Line(tuple(found), unavailable, frozenset(unknown))


def _contenders(
    name: str, topology: Topology, collective: Collective, deadline_s: float
) -> Sequence[Contender]:
    if name == GLOO:
        return [Contender(GLOO)]
    if name in {SELECTION, ANY_BITS}:
        from arborcast.backends.schedules.synthesis import synthesize_table

        asked = Options(deadline_s=deadline_s, bits="any" if name == ANY_BITS else "alike")
        return [Contender(name, table=synthesize_table(topology, collective.kind, collective.root, asked))]
    if name == EXCHANGE:
        options = SolveOptions(deadline_s=deadline_s)
        found = tuple(Candidates.of(topology, collective, options).exchanges_written_out())
        if not found:
            raise InfeasibleError(f"{name}: none for {collective.kind} by the symmetry of {topology.name}")
        return [Contender(name, candidates=found)]
    if name == CHUNKS:
        return _chunks(topology, collective, deadline_s)
    schedule = synth.solve(
        topology,
        collective,
        form="explicit",
        method=TREES if name in ("trees (2)", MESSAGES) else name,
        max_trees=2 if name == "trees (2)" else None,
        tolerance=FEW if name == MWU else None,
        deadline_s=deadline_s,
    )
    return [Contender(name, schedule, name == MESSAGES)]


def _chunks(topology: Topology, collective: Collective, deadline_s: float) -> Sequence[Contender]:
    """The fewest steps, and the best rate."""
    latency = latency_of_parts(topology, collective)
    frontier = pareto(
        topology,
        collective,
        max_steps=None if latency is None else latency + FRONTIER_STEPS * len(parts_of(collective)),
        tolerance=FEW,
        deadline_s=deadline_s,
        proofs=False,
    )
    points = [point for point in frontier.points if point.chunks <= MOST_CHUNKS]
    if not points:
        raise InfeasibleError(f"{collective.kind}: {frontier.why_stopped}")
    chosen = {id(point): point for point in (points[0], points[-1])}.values()
    return [
        Contender(f"{CHUNKS} ({point.chunks},{point.steps},{point.rounds})", point.schedule)
        for point in chosen
    ]
