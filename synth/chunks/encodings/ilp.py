"""SCCL's instance as an integer program for HiGHS: whether a chunk goes over a route in a step.

A chunk comes to a rank at most once, so that its arrivals say all there is to know: a rank has what came to
it in an earlier step. Any solution will do. HiGHS takes a thousand times as long with one seed as with
another, and it cannot go on where it stopped: so each slice of effort has a seed of its own. That it finds
nothing is checked by nobody: such an `Infeasible` is no proof.

Source: Cai et al., SCCL (PPoPP 2021), constraints C1 to C6, with arrivals in the place of times.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any, TypeAlias

from arborcast.synth.chunks.encodings.reachable_sends import ReachableSends
from arborcast.synth.chunks.problem.orbits import ChunkOrbits, OrbitSend
from arborcast.synth.chunks.problem.outcome import Feasible, Infeasible, Instance, Outcome, Unknown
from arborcast.synth.errors import NumericalError, Prover
from arborcast.synth.lp.highs import new_model, run
from arborcast.synth.lp.integer_program import IntegerProgram, Values

Timed: TypeAlias = tuple[int, int]
"""A route in a step."""

MOST_ORDERED = 10
"""Sends of the first step that put chunks in order, as the digits of a binary number that HiGHS can bear."""

TERMS_PER_EFFORT = 100
"""So many nonzeros make HiGHS search for about a millisecond between two looks at its limits (measured)."""

FIRST_LOOKS = 4
"""Looks at its limits that HiGHS needs to come to anything at all."""

# HiGHS may search programs inside the program, each for seconds without a look at the limits.
_NO_PROGRAMS_INSIDE = dict.fromkeys(
    ("mip_heuristic_run_rens", "mip_heuristic_run_rins", "mip_heuristic_run_root_reduced_cost"), False
)


class IlpSearch:
    """A search by HiGHS."""

    def __init__(self, instance: Instance, *, seed: int = 0) -> None:
        """Build the program; `seed` is of HiGHS's own ties."""
        orbits, steps = instance.orbits, instance.steps
        self._seed = seed
        program = self._program = IntegerProgram()
        most = instance.rounds - steps + 1
        self._rounds = [program.add_column(most, least=1) for _ in range(steps)]
        program.add_row(self._rounds, [1] * steps, least=instance.rounds, most=instance.rounds)
        reachable = ReachableSends.of(orbits, steps)
        self._chunks = [
            _ChunkColumns(program, instance, number, member, reachable)
            for number, each in enumerate(orbits.classes)
            for member in range(each.count)
        ]
        self._add_limits(orbits)
        if len(orbits.classes) == 1:
            _put_in_order(program, self._chunks)

    def run(self, effort: int | None) -> Outcome:
        """See `synth.chunks.problem.outcome.Search`.

        Raises:
            NumericalError: HiGHS failed, or its solution is none when it is rounded.
        """
        # The first solution is as good as any other: the cost is no goal.
        model = new_model(seed=self._seed + (effort or 0), mip_max_improving_sols=1, **_NO_PROGRAMS_INSIDE)
        self._program.pass_to(model)
        if effort is not None:
            _stop_after(model, max(FIRST_LOOKS, effort * TERMS_PER_EFFORT // max(1, self._program.terms)))
        match status := run(model):
            case "Optimal" | "Solution limit reached":
                return self._read(self._program.solution_of(model))
            case "Infeasible" | "Primal infeasible or unbounded":  # all columns have bounds
                return Infeasible(Prover.HIGHS)
            case "Interrupted by user":
                return Unknown()
        raise NumericalError(f"HiGHS ended with {status}")

    def _read(self, values: Values) -> Feasible:
        rounds = tuple(values[column] for column in self._rounds)
        return Feasible(rounds, tuple(send for chunk in self._chunks for send in chunk.read(values)))

    def _add_limits(self, orbits: ChunkOrbits) -> None:
        """A row for each link and step: what is sent over it fits into the step's rounds."""
        columns: dict[tuple[int, int, int], list[int]] = defaultdict(list)
        for chunk in self._chunks:
            for (route, step), column in chunk.sends.items():
                columns[chunk.chunk_class, route, step].append(column)
        for limit in orbits.limits:
            users = Counter(limit.users)
            for step, duration in enumerate(self._rounds):
                load: Counter[int] = Counter()
                for (chunk_class, route), times in users.items():
                    for column in columns.get((chunk_class, route, step), ()):
                        load[column] += times
                if load:
                    self._program.add_row([*load, duration], [*load.values(), -limit.capacity], most=0)


class _ChunkColumns:
    """One chunk: it comes once to each target, at most once to others, and goes on from then.

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
        # Few sends, and early ones: that cost leads HiGHS to a first solution ten times sooner than none.
        self.sends = {
            (route, step): program.add_column(1, cost=1 + step)
            for route, step in reachable.sends[chunk_class]
        }
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


def _stop_after(model: Any, looks: int) -> None:
    """Interrupt the next run when HiGHS has looked up so many times, which does not depend on the clock."""
    import highspy

    untyped: Any = highspy
    left = looks

    def look(kind: object, message: str, data: object, answer: Any, user: object) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            answer.user_interrupt = True

    model.setCallback(look, None)
    model.startCallback(untyped.cb.kCallbackMipInterrupt)
