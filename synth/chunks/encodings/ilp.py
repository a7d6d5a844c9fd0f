"""SCCL's instance as an integer program for HiGHS: who sends which chunk over which route in which step.

Every chunk comes to a rank at most once, so that its arrivals say all there is to know: a rank has what came
to it in an earlier step. Instances without copies are flows, for which `synth.chunks.encodings.flow_ilp` is
faster.

Source: Cai et al., SCCL (PPoPP 2021), constraints C1 to C6, with arrivals in the place of times.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from arborcast.synth.chunks.encodings.flow_ilp import FlowSearch
from arborcast.synth.chunks.encodings.integer_program import Attempts, IntegerProgram, add_limits, add_rounds
from arborcast.synth.chunks.encodings.reachable_sends import ReachableSends
from arborcast.synth.chunks.problem.orbits import ChunkOrbits, Send
from arborcast.synth.chunks.problem.outcome import Feasible, Infeasible, Instance, Outcome, Search, Unknown

MOST_ORDERED = 10
"""Sends of the first step that put chunks in order, as the digits of a binary number that HiGHS can bear."""


class IlpSearch:
    """A search by HiGHS: flows where no demand has several targets, otherwise arrivals."""

    def __init__(self, instance: Instance, *, seed: int = 0) -> None:
        """Build what is needed; `seed` is of HiGHS's own ties."""
        encoding = FlowSearch if instance.orbits.problem.is_routing else ArrivalSearch
        self._search: Search = encoding(instance, seed=seed)

    def run(self, effort: int | None) -> Outcome:
        """See `synth.chunks.problem.outcome.Search` and `synth.chunks.encodings.integer_program.Attempts`.

        Raises:
            ArithmeticError: HiGHS failed.
        """
        return self._search.run(effort)


class ArrivalSearch:
    """A binary column for every send of every chunk; with copies or without.

    Attributes:
        programs: ways to put the same question; the preferred one first.
    """

    def __init__(self, instance: Instance, *, seed: int = 0) -> None:
        """Build the programs; `seed` is of HiGHS's own ties."""
        self._program = IntegerProgram()
        self._rounds = add_rounds(self._program, instance.steps, instance.rounds)
        self._columns: dict[Send, int] = {}
        reachable = ReachableSends.of(instance.orbits, instance.steps)
        sends: dict[tuple[int, int, int], list[int]] = defaultdict(list)
        for number, chunk_class in enumerate(instance.orbits.classes):
            for member in range(chunk_class.count):
                columns = self._add_sends(number, member, reachable.sends[number])
                self._add_arrivals(instance, number, columns)
                for (route, step), column in columns.items():
                    sends[number, route, step].append(column)
        add_limits(self._program, instance.orbits, self._rounds, sends)
        self.programs = self._variants(instance.orbits)
        self._attempts = Attempts(self.programs, seed=seed)

    def run(self, effort: int | None) -> Outcome:
        """See `IlpSearch.run`."""
        match self._attempts.run(effort):
            case Infeasible() | Unknown() as outcome:
                return outcome
            case values:
                return Feasible(
                    tuple(int(values[column]) for column in self._rounds),
                    tuple(send for send, column in self._columns.items() if values[column]),
                )

    def _add_sends(
        self, chunk_class: int, member: int, reachable: Sequence[tuple[int, int]]
    ) -> dict[tuple[int, int], int]:
        """The column of each (route, step) of one chunk.

        Few sends, and early ones: that cost leads HiGHS to a first solution ten times sooner than none.
        """
        columns = {}
        for route, step in reachable:
            column = self._program.add_column(1, cost=1 + step)
            self._columns[Send(chunk_class, member, route, step)] = column
            columns[route, step] = column
        return columns

    def _add_arrivals(
        self, instance: Instance, chunk_class: int, columns: dict[tuple[int, int], int]
    ) -> None:
        """One chunk comes once to each target, at most once to others, and is sent on only from then on."""
        problem = instance.orbits.problem
        demand = problem.demands[instance.orbits.classes[chunk_class].demand]
        arrivals: dict[int, list[tuple[int, int]]] = {rank: [] for rank in sorted(demand.targets)}
        for (route, step), column in columns.items():  # by step
            arrivals.setdefault(problem.routes[route].dst, []).append((step, column))
        for rank, coming in arrivals.items():
            every = [column for _, column in coming]
            self._program.add_row(every, [1] * len(every), least=int(rank in demand.targets), most=1)
        for (route, step), column in columns.items():
            rank = problem.routes[route].src
            if rank not in demand.sources:
                before = [earlier for when, earlier in arrivals[rank] if when < step]
                self._program.add_row([column, *before], [1] + [-1] * len(before), most=0)

    def _variants(self, orbits: ChunkOrbits) -> list[IntegerProgram]:
        """The program as it is, and with the members of each class in an order; the better one first.

        An order takes away solutions and proofs alike. For a broadcast it is worth a lot (DGX-1 (8, 3, 3),
        which is impossible: 0.01 s for 1.2; (25, 6, 6): 0.35 s for 333), for an allgather it costs as much.
        """
        if all(chunk_class.count == 1 for chunk_class in orbits.classes):
            return [self._program]
        ordered = self._program.copy()
        first_sends: dict[tuple[int, int], list[int]] = defaultdict(list)
        for send, column in self._columns.items():
            if send.step == 0:
                first_sends[send.chunk_class, send.member].append(column)
        for (chunk_class, member), columns in first_sends.items():
            before, after = (
                columns[:MOST_ORDERED],
                first_sends.get((chunk_class, member + 1), [])[:MOST_ORDERED],
            )
            if after:
                weights = [1 << place for place in range(len(before))]
                ordered.add_row([*before, *after], [*weights, *(-weight for weight in weights)], most=0)
        return [ordered, self._program] if len(orbits.classes) == 1 else [self._program, ordered]
