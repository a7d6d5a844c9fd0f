"""SCCL's instance as an integer program for HiGHS: who sends which chunk over which route in which step.

Every chunk comes to a rank at most once, so that its arrivals say all there is to know: a rank has what came
to it in an earlier step. Instances without copies are flows, for which `synth.chunks.flow_ilp` is faster.

Source: Cai et al., SCCL (PPoPP 2021), constraints C1 to C6, with arrivals in the place of times.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from synth.chunks.flow_ilp import FlowSearch
from synth.chunks.integer_program import IntegerProgram, add_limits, add_rounds
from synth.chunks.orbits import Send
from synth.chunks.outcome import Found, Impossible, Instance, Outcome, Search, Unfinished
from synth.chunks.window import Window


class IlpSearch:
    """A search by HiGHS: flows where no demand has several targets, otherwise arrivals."""

    def __init__(self, instance: Instance, *, seed: int = 0) -> None:
        """Build the program; `seed` is of HiGHS's own ties."""
        encoding = FlowSearch if instance.orbits.problem.is_routing else ArrivalSearch
        self._search: Search = encoding(instance, seed=seed)

    def run(self, effort: int | None) -> Outcome:
        """See `synth.chunks.outcome.Search`; every attempt starts again, with twice the effort or more.

        Raises:
            ArithmeticError: HiGHS failed.
        """
        return self._search.run(effort)


class ArrivalSearch:
    """A binary column for every send of every chunk; with copies or without."""

    def __init__(self, instance: Instance, *, seed: int = 0) -> None:
        """Build the program; `seed` is of HiGHS's own ties."""
        self._program = IntegerProgram(seed=seed)
        self._rounds = add_rounds(self._program, instance.steps, instance.rounds)
        self._columns: dict[Send, int] = {}
        window = Window.of(instance.orbits, instance.steps)
        sends: dict[tuple[int, int, int], list[int]] = defaultdict(list)
        for number, chunk_class in enumerate(instance.orbits.classes):
            for member in range(chunk_class.count):
                columns = self._add_sends(number, member, window.sends[number])
                self._add_arrivals(instance, number, columns)
                for (route, step), column in columns.items():
                    sends[number, route, step].append(column)
        add_limits(self._program, instance.orbits, self._rounds, sends)

    def run(self, effort: int | None) -> Outcome:
        """See `IlpSearch.run`."""
        match self._program.run(effort):
            case Impossible() | Unfinished() as outcome:
                return outcome
            case values:
                return Found(
                    tuple(int(values[column]) for column in self._rounds),
                    tuple(send for send, column in self._columns.items() if values[column]),
                )

    def _add_sends(
        self, chunk_class: int, member: int, window: Sequence[tuple[int, int]]
    ) -> dict[tuple[int, int], int]:
        """The column of each (route, step) of one chunk.

        Few sends, and early ones: that cost leads HiGHS to a first solution ten times sooner than none.
        """
        columns = {}
        for route, step in window:
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
