"""Gather, scatter, alltoall as integer flows for HiGHS: chunks that are alike are counted, not told apart.

Where every demand has one target, nothing is copied, and a chunk's way is a path in the time-expanded graph
(vertices (rank, time); sends lead from one time to the next, and so does waiting). All demands of the same
sources flow together, or all of the same target, whichever needs fewer groups. The flow found is then
divided into paths, one for each chunk.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from arborcast.synth.chunks.encodings.integer_program import (
    Attempts,
    IntegerProgram,
    Values,
    add_limits,
    add_rounds,
)
from arborcast.synth.chunks.encodings.reachable_sends import ReachableSends
from arborcast.synth.chunks.problem.orbits import ChunkOrbits, Send
from arborcast.synth.chunks.problem.outcome import Feasible, Infeasible, Instance, Outcome, Unknown

Place: TypeAlias = tuple[int, int]
"""A rank at a time, from 0 to S."""

Timed: TypeAlias = tuple[int, int]
"""A route in a step."""

Sources: TypeAlias = frozenset[int]
"""Ranks that hold the same chunks at the start."""


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


class FlowSearch:
    """A search by HiGHS for flows."""

    def __init__(self, instance: Instance, *, seed: int = 0) -> None:
        """Build the program; `seed` is of HiGHS's own ties.

        Raises:
            ValueError: a demand has several targets.
        """
        orbits = instance.orbits
        for index, demand in enumerate(orbits.problem.demands):
            if len(demand.targets) != 1:
                raise ValueError(f"demand {index}: a flow leads to one target, got {len(demand.targets)}")
        self._orbits = orbits
        program = IntegerProgram()
        self._rounds = add_rounds(program, instance.steps, instance.rounds)
        reachable = ReachableSends.of(orbits, instance.steps)
        self._flows = [_Flow(program, instance, group, reachable) for group in flow_groups(orbits)]
        # The classes of a group load the same links, so that the first one can stand for all of them.
        sends = {
            (flow.group.classes[0], route, step): (column,)
            for flow in self._flows
            for (route, step), column in flow.sends.items()
        }
        add_limits(program, orbits, self._rounds, sends)
        self._attempts = Attempts([program], seed=seed)

    def run(self, effort: int | None) -> Outcome:
        """See `synth.chunks.problem.outcome.Search` and `synth.chunks.encodings.integer_program.Attempts`.

        Raises:
            ArithmeticError: HiGHS failed.
        """
        match self._attempts.run(effort):
            case Infeasible() | Unknown() as outcome:
                return outcome
            case values:
                rounds = tuple(int(values[column]) for column in self._rounds)
                return Feasible(rounds, tuple(send for flow in self._flows for send in flow.sends_of(values)))


def flow_groups(orbits: ChunkOrbits) -> list[FlowGroup]:
    """Every chunk class in one group, by sources or by target: in each connected part what gives fewer."""
    groups = []
    for part in _connected(orbits):
        by_sources: dict[Sources, list[int]] = defaultdict(list)
        by_target: dict[int, list[int]] = defaultdict(list)
        for chunk_class in part:
            sources, target = _ends(orbits, chunk_class)
            by_sources[sources].append(chunk_class)
            by_target[target].append(chunk_class)
        fewer = by_sources if len(by_sources) <= len(by_target) else by_target
        groups += [FlowGroup.of(orbits, classes) for classes in fewer.values()]
    return groups


def _connected(orbits: ChunkOrbits) -> list[list[int]]:
    """The chunk classes, those together that sources and targets in common connect, directly or not."""
    parts: list[tuple[set[Sources], set[int], list[int]]] = []
    for chunk_class in range(len(orbits.classes)):
        sources, target = _ends(orbits, chunk_class)
        joined: tuple[set[Sources], set[int], list[int]] = ({sources}, {target}, [chunk_class])
        apart = []
        for part in parts:
            if sources in part[0] or target in part[1]:
                joined = (joined[0] | part[0], joined[1] | part[1], part[2] + joined[2])
            else:
                apart.append(part)
        parts = [*apart, joined]
    return [sorted(classes) for _, _, classes in parts]


def _ends(orbits: ChunkOrbits, chunk_class: int) -> tuple[Sources, int]:
    demand = orbits.problem.demands[orbits.classes[chunk_class].demand]
    (target,) = demand.targets
    return demand.sources, target


class _Flow:
    """The columns and rows of one group, and the paths that a solution of them describes.

    Attributes:
        group: whose.
        sends: the column of each (route, step): how many chunks.
    """

    def __init__(
        self, program: IntegerProgram, instance: Instance, group: FlowGroup, reachable: ReachableSends
    ) -> None:
        self.group = group
        self._instance = instance
        total = sum(group.wanted.values())
        timed = {send for chunk_class in group.classes for send in reachable.sends[chunk_class]}
        held = {place for chunk_class in group.classes for place in reachable.holds[chunk_class]}
        # Few sends, and early ones: see `synth.chunks.encodings.ilp`.
        self.sends = {
            (route, step): program.add_column(total, cost=1 + step)
            for route, step in sorted(timed, key=lambda send: (send[1], send[0]))
        }
        self._waits = {
            (rank, time): program.add_column(total)
            for rank, time in sorted(held, key=lambda place: (place[1], place[0]))
            if (rank, time + 1) in held
        }
        self._starts = {
            (sources, rank): program.add_column(count)
            for sources, count in group.supply.items()
            for rank in sorted(sources)
        }
        self._add_rows(program)

    def sends_of(self, values: Values) -> Iterator[Send]:
        """The sends of every chunk of the group: a path to its target from one of its sources for each."""
        left = {column: int(values[column]) for column in (*self.sends.values(), *self._waits.values())}
        leaving = self._leaving()
        chunks = self._chunks()
        for (sources, rank), column in self._starts.items():
            for _ in range(int(values[column])):
                path, target = self._path(rank, left, leaving)
                chunk_class, member = chunks[sources, target].pop()
                yield from (Send(chunk_class, member, route, step) for route, step in path)

    def _add_rows(self, program: IntegerProgram) -> None:
        """Every chunk starts somewhere, what comes to a place leaves it, and the targets get theirs."""
        for sources, count in self.group.supply.items():
            starts = [self._starts[sources, rank] for rank in sorted(sources)]
            program.add_row(starts, [1] * len(starts), least=count, most=count)
        routes, steps = self._instance.orbits.problem.routes, self._instance.steps
        balance: dict[Place, dict[int, int]] = defaultdict(dict)
        for (_, rank), column in self._starts.items():
            balance[rank, 0][column] = 1
        for (route, step), column in self.sends.items():
            balance[routes[route].src, step][column] = -1
            balance[routes[route].dst, step + 1][column] = 1
        for (rank, time), column in self._waits.items():
            balance[rank, time][column] = -1
            balance[rank, time + 1][column] = 1
        for target in self.group.wanted:
            balance.setdefault((target, steps), {})  # what is out of reach has no variables, either
        for (rank, time), terms in balance.items():
            stays = self.group.wanted.get(rank, 0) if time == steps else 0
            program.add_row([*terms], [*terms.values()], least=stays, most=stays)

    def _leaving(self) -> dict[Place, list[tuple[int, Timed | None]]]:
        """From each place the columns that lead on, with the (route, step) of those that are sends."""
        routes = self._instance.orbits.problem.routes
        leaving: dict[Place, list[tuple[int, Timed | None]]] = defaultdict(list)
        for place, column in self._waits.items():
            leaving[place].append((column, None))
        for (route, step), column in self.sends.items():
            leaving[routes[route].src, step].append((column, (route, step)))
        return leaving

    def _chunks(self) -> dict[tuple[Sources, int], list[tuple[int, int]]]:
        """The chunks (class, member) of the group by their sources and target."""
        orbits = self._instance.orbits
        chunks: dict[tuple[Sources, int], list[tuple[int, int]]] = defaultdict(list)
        for chunk_class in self.group.classes:
            count = orbits.classes[chunk_class].count
            chunks[_ends(orbits, chunk_class)] += [(chunk_class, member) for member in range(count)]
        return chunks

    def _path(
        self, rank: int, left: dict[int, int], leaving: Mapping[Place, list[tuple[int, Timed | None]]]
    ) -> tuple[list[Timed], int]:
        """Use up one path that is left from a rank at the start: its sends, and where it ends."""
        routes = self._instance.orbits.problem.routes
        path = []
        for time in range(self._instance.steps):
            column, send = next(way for way in leaving[rank, time] if left[way[0]])
            left[column] -= 1
            if send is not None:
                path.append(send)
                rank = routes[send[0]].dst
        return path, rank
