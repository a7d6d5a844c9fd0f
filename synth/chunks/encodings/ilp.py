"""SCCL's instance as an integer program for HiGHS: how many chunks go over which route in which step.

Where every demand has one target, nothing is copied, and a chunk's way is a path in the time-expanded graph
(vertices (rank, time); sends lead from one time to the next, and so does waiting). All demands of the same
sources flow together, or all of the same target, whichever needs fewer groups: chunks that are alike are
counted, not told apart, and the flow found is divided into paths, one for each chunk.

Where chunks are copied, each flows by itself and comes to a rank at most once, so that its arrivals say all
there is to know: a rank has what came to it in an earlier step.

Source: Cai et al., SCCL (PPoPP 2021), constraints C1 to C6, with arrivals in the place of times.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

from arborcast.synth.chunks.encodings.reachable_sends import ReachableSends
from arborcast.synth.chunks.encodings.restarted_program import RestartedProgram
from arborcast.synth.chunks.problem.orbits import ChunkOrbits, OrbitSend
from arborcast.synth.chunks.problem.outcome import Feasible, Infeasible, Instance, Outcome, Unknown
from arborcast.synth.lp.integer_program import IntegerProgram, Values

Place: TypeAlias = tuple[int, int]
"""A rank at a time, from 0 to S."""

Timed: TypeAlias = tuple[int, int]
"""A route in a step."""

Sources: TypeAlias = frozenset[int]
"""Ranks that hold the same chunks at the start."""

MOST_ORDERED = 10
"""Sends of the first step that put chunks in order, as the digits of a binary number that HiGHS can bear."""


@dataclass(frozen=True)
class FlowGroup:
    """Chunk classes whose chunks flow together: all of the same sources, or all of the same target.

    Attributes:
        classes: the indices of the classes.
        supply: how many chunks start at one or other of some sources.
        wanted: how many chunks each target waits for.
    """

    classes: tuple[int, ...]
    supply: Mapping[Sources, int]
    wanted: Mapping[int, int]

    @classmethod
    def of(cls, orbits: ChunkOrbits, classes: Iterable[int]) -> FlowGroup:
        """The group of these classes."""
        classes = tuple(classes)
        supply: Counter[Sources] = Counter()
        wanted: Counter[int] = Counter()
        for chunk_class in classes:
            sources, target = _ends(orbits, chunk_class)
            supply[sources] += orbits.classes[chunk_class].count
            wanted[target] += orbits.classes[chunk_class].count
        return cls(classes, supply, wanted)


def flow_groups(orbits: ChunkOrbits) -> list[FlowGroup]:
    """Every chunk class in one group, by sources or by target, whichever gives fewer."""
    by_sources: dict[Sources, list[int]] = defaultdict(list)
    by_target: dict[int, list[int]] = defaultdict(list)
    for chunk_class in range(len(orbits.classes)):
        sources, target = _ends(orbits, chunk_class)
        by_sources[sources].append(chunk_class)
        by_target[target].append(chunk_class)
    fewer = by_sources if len(by_sources) <= len(by_target) else by_target
    return [FlowGroup.of(orbits, classes) for classes in fewer.values()]


def _ends(orbits: ChunkOrbits, chunk_class: int) -> tuple[Sources, int]:
    demand = orbits.problem.demands[orbits.classes[chunk_class].demand]
    (target,) = demand.targets
    return demand.sources, target


class IlpSearch:
    """A search by HiGHS: flows where no demand has several targets, otherwise copies."""

    def __init__(self, instance: Instance, *, seed: int = 0, copies: bool = False) -> None:
        """Build the program.

        Args:
            instance: which.
            seed: of HiGHS's own ties.
            copies: whether chunks are told apart where they need not be.
        """
        orbits, steps = instance.orbits, instance.steps
        program = self._program = RestartedProgram(seed=seed)
        most = instance.rounds - steps + 1
        self._rounds = [program.add_column(most, least=1) for _ in range(steps)]
        program.add_row(self._rounds, [1] * steps, least=instance.rounds, most=instance.rounds)
        reachable = ReachableSends.of(orbits, steps)
        self._parts: Sequence[_Flow | _ChunkColumns]
        if orbits.problem.is_routing and not copies:
            self._parts = [_Flow(program, instance, group, reachable) for group in flow_groups(orbits)]
            self._add_limits(orbits)
        else:
            self._parts = chunks = [
                _ChunkColumns(program, instance, number, member, reachable)
                for number, each in enumerate(orbits.classes)
                for member in range(each.count)
            ]
            self._add_limits(orbits)
            if len(orbits.classes) == 1:
                _put_in_order(program, chunks)

    def run(self, effort: int | None) -> Outcome:
        """See `synth.chunks.problem.outcome.Search` and `RestartedProgram.search`.

        Raises:
            ArithmeticError: HiGHS failed.
        """
        match self._program.search(effort):
            case Infeasible() | Unknown() as outcome:
                return outcome
            case values:
                rounds = tuple(values[column] for column in self._rounds)
                return Feasible(rounds, tuple(send for part in self._parts for send in part.read(values)))

    def _add_limits(self, orbits: ChunkOrbits) -> None:
        """A row for each link and step: what is sent over it fits into the step's rounds."""
        columns: dict[tuple[int, int, int], list[int]] = defaultdict(list)
        for part in self._parts:
            for (route, step), column in part.sends.items():
                columns[part.chunk_class, route, step].append(column)
        for limit in orbits.limits:
            users = Counter(limit.users)
            for step, duration in enumerate(self._rounds):
                load: Counter[int] = Counter()
                for (chunk_class, route), times in users.items():
                    for column in columns.get((chunk_class, route, step), ()):
                        load[column] += times
                if load:
                    self._program.add_row([*load, duration], [*load.values(), -limit.capacity], most=0)


def _send_columns(program: IntegerProgram, sends: Iterable[Timed], most: int) -> dict[Timed, int]:
    """The column of each (route, step), by step: how many chunks, up to `most`.

    Few sends, and early ones: that cost leads HiGHS to a first solution ten times sooner than none.
    """
    by_step = sorted(sends, key=lambda send: (send[1], send[0]))
    return {(route, step): program.add_column(most, cost=1 + step) for route, step in by_step}


class _ChunkColumns:
    """One chunk that is copied: it comes once to each target, at most once to others, and goes on from then.

    Attributes:
        chunk_class: of which it is a member.
        sends: the column of each (route, step).
    """

    def __init__(
        self,
        program: IntegerProgram,
        instance: Instance,
        chunk_class: int,
        member: int,
        reachable: ReachableSends,
    ) -> None:
        self.chunk_class = chunk_class
        self._member = member
        self.sends = _send_columns(program, reachable.sends[chunk_class], 1)
        problem = instance.orbits.problem
        demand = problem.demands[instance.orbits.classes[chunk_class].demand]
        arrivals: dict[int, list[tuple[int, int]]] = {rank: [] for rank in sorted(demand.targets)}
        for (route, step), column in self.sends.items():
            arrivals.setdefault(problem.routes[route].dst, []).append((step, column))
        for rank, coming in arrivals.items():
            every = [column for _, column in coming]
            program.add_row(every, [1] * len(every), least=int(rank in demand.targets), most=1)
        for (route, step), column in self.sends.items():
            rank = problem.routes[route].src
            if rank not in demand.sources:
                before = [earlier for when, earlier in arrivals[rank] if when < step]
                program.add_row([column, *before], [1] + [-1] * len(before), most=0)

    def read(self, values: Values) -> Iterator[OrbitSend]:
        """Its sends in a solution."""
        for (route, step), column in self.sends.items():
            if values[column]:
                yield OrbitSend(self.chunk_class, self._member, route, step)


def _put_in_order(program: IntegerProgram, chunks: Iterable[_ChunkColumns]) -> None:
    """Of chunks that are alike, those come first whose sends of the first step read as a larger number.

    For a broadcast that is worth a lot (DGX-1 (8, 3, 3), which is impossible: 0.01 s for 1.2; (25, 6, 6):
    0.35 s for 333); where there are several classes, an order costs as much.
    """
    first_sends = (
        [column for (_, step), column in chunk.sends.items() if step == 0][:MOST_ORDERED] for chunk in chunks
    )
    for before, after in pairwise(first_sends):
        weights = [1 << place for place in range(len(before))]
        program.add_row([*before, *after], [*weights, *(-weight for weight in weights)], most=0)


class _Flow:
    """The columns and rows of one group, and the paths that a solution of them describes.

    Attributes:
        chunk_class: the first of the group, which stands for all: they load the same links.
        sends: the column of each (route, step): how many chunks.
    """

    def __init__(
        self, program: IntegerProgram, instance: Instance, group: FlowGroup, reachable: ReachableSends
    ) -> None:
        self.chunk_class = group.classes[0]
        self._group = group
        self._orbits = instance.orbits
        self._steps = instance.steps
        routes = instance.orbits.problem.routes
        total = sum(group.wanted.values())
        held = {place for chunk_class in group.classes for place in reachable.holds[chunk_class]}
        timed = {send for chunk_class in group.classes for send in reachable.sends[chunk_class]}
        self.sends = _send_columns(program, timed, total)
        waits = {
            (rank, time): program.add_column(total)
            for rank, time in sorted(held, key=lambda place: (place[1], place[0]))
            if (rank, time + 1) in held
        }
        self._starts = {
            (sources, rank): program.add_column(count)
            for sources, count in group.supply.items()
            for rank in sorted(sources)
        }
        # From each place the columns that lead on, with the (route, step) of those that are sends.
        self._leaving: dict[Place, list[tuple[int, Timed | None]]] = defaultdict(list)
        balance: dict[Place, dict[int, int]] = defaultdict(dict)
        for (_, rank), column in self._starts.items():
            balance[rank, 0][column] = 1
        for (rank, time), column in waits.items():
            self._leaving[rank, time].append((column, None))
            balance[rank, time][column] = -1
            balance[rank, time + 1][column] = 1
        for (route, step), column in self.sends.items():
            self._leaving[routes[route].src, step].append((column, (route, step)))
            balance[routes[route].src, step][column] = -1
            balance[routes[route].dst, step + 1][column] = 1
        for sources, count in group.supply.items():
            starts = [self._starts[sources, rank] for rank in sorted(sources)]
            program.add_row(starts, [1] * len(starts), least=count, most=count)
        for target in group.wanted:
            balance.setdefault((target, self._steps), {})  # what is out of reach has no variables, either
        for (rank, time), terms in balance.items():
            stays = group.wanted.get(rank, 0) if time == self._steps else 0
            program.add_row([*terms], [*terms.values()], least=stays, most=stays)

    def read(self, values: Values) -> Iterator[OrbitSend]:
        """The sends of every chunk of the group: a path to its target from one of its sources for each."""
        left = dict(enumerate(values))
        chunks: dict[tuple[Sources, int], list[tuple[int, int]]] = defaultdict(list)
        for chunk_class in self._group.classes:
            count = self._orbits.classes[chunk_class].count
            chunks[_ends(self._orbits, chunk_class)] += [(chunk_class, member) for member in range(count)]
        for (sources, rank), column in self._starts.items():
            for _ in range(values[column]):
                path, target = self._path(rank, left)
                chunk_class, member = chunks[sources, target].pop()
                yield from (OrbitSend(chunk_class, member, route, step) for route, step in path)

    def _path(self, rank: int, left: dict[int, int]) -> tuple[list[Timed], int]:
        """Use up one path that is left from a rank at the start: its sends, and where it ends."""
        path = []
        for time in range(self._steps):
            column, send = next(way for way in self._leaving[rank, time] if left[way[0]])
            left[column] -= 1
            if send is not None:
                path.append(send)
                rank = self._orbits.problem.routes[send[0]].dst
        return path, rank
