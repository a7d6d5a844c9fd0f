"""SCCL's instance as its paper states it, for z3: who sends what to whom, and when a chunk reaches a rank.

Times and rounds are bounded integers and everything else is Boolean, so that z3's solver for finite domains
serves, which counts sums of Booleans natively.

Source: Cai et al., SCCL (PPoPP 2021), sections 3.3 and 3.4. Chunks are the representatives of a group's
orbits, and routes are in the place of links.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from itertools import count, pairwise
from typing import Any

import z3

from arborcast.synth.chunks.encodings.cardinality import not_before
from arborcast.synth.chunks.encodings.reachable_sends import ReachableSends, is_ordered, longest_step
from arborcast.synth.chunks.problem.orbits import OrbitSend
from arborcast.synth.chunks.problem.outcome import Feasible, Infeasible, Instance, Outcome, Unknown
from arborcast.synth.errors import Prover

CONFLICTS_PER_EFFORT = 12
"""Conflicts per unit of effort: measured 10 to 25 a millisecond."""

CONFLICTS_AT_ONCE = 2_000
"""Conflicts after which z3 is told to begin again with what it learned.

Measured: an allgather on DGX-1 with (6, 3, 7) is found in 2 to 3 s instead of 6, one on a 4x8 torus with
(4, 6, 31) and all translations in 2 s instead of 15; proofs that there is none take as long.
"""

_OUT_OF_CONFLICTS = "sat.max.conflicts"  # z3's reason
_SEEDS = 2**32


class SmtSearch:
    """A search by z3, in a context of its own, which no other search in the process can influence."""

    def __init__(self, instance: Instance, *, seed: int = 0) -> None:
        """State the problem; `seed` is the solver's own."""
        self._instance = instance
        self._reachable = ReachableSends.of(instance.orbits, instance.steps)
        self._context = z3.Context()
        self._solver: Any = z3.SolverFor("QF_FD", ctx=self._context)
        self._solver.set("random_seed", seed % _SEEDS)
        self._names = count()
        # A chunk is named by its class and member.
        self._sent: dict[tuple[int, int, int], Any] = {}  # snd of (class, member, route)
        self._time: dict[tuple[int, int, int], Any] = {}  # time of (class, member, rank) but for sources
        self._rounds = self._add_rounds()
        for number, chunk_class in enumerate(instance.orbits.classes):
            for member in range(chunk_class.count):
                self._add_chunk(number, member)
        self._add_limits()
        if is_ordered(instance.orbits):
            self._add_order()

    def run(self, effort: int | None) -> Outcome:
        """See `synth.chunks.problem.outcome.Search`.

        Conflicts are counted and not z3's own resources (`rlimit`): a solver that these interrupt while it
        prepares the formula is of no use afterwards.

        Raises:
            ArithmeticError: z3 gave up.
        """
        left = None if effort is None else effort * CONFLICTS_PER_EFFORT
        while left is None or left > 0:
            conflicts = CONFLICTS_AT_ONCE if left is None else min(left, CONFLICTS_AT_ONCE)
            self._solver.set("max_conflicts", conflicts)
            answer = self._solver.check()
            if answer == z3.sat:
                return self._read(self._solver.model())
            if answer == z3.unsat:
                return Infeasible(Prover.Z3)
            if self._solver.reason_unknown() != _OUT_OF_CONFLICTS:
                raise ArithmeticError(f"z3 gave up: {self._solver.reason_unknown()}")
            if left is not None:
                left -= conflicts
        return Unknown()

    def _read(self, model: Any) -> Feasible:
        def value(expression: Any) -> Any:
            return model.eval(expression, model_completion=True)

        sends = []
        for (number, member, route), sent in self._sent.items():
            if z3.is_true(value(sent)):
                rank = self._instance.orbits.problem.routes[route].dst
                time = value(self._time[number, member, rank]).as_long()
                sends.append(OrbitSend(number, member, route, time - 1))
        return Feasible(tuple(value(rounds).as_long() for rounds in self._rounds), tuple(sends))

    def _truth(self) -> Any:
        return z3.Bool(f"truth{next(self._names)}", self._context)

    def _integer(self, least: int, most: int) -> Any:
        integer = z3.Int(f"integer{next(self._names)}", self._context)
        self._solver.add(least <= integer, integer <= most)
        return integer

    def _add_rounds(self) -> list[Any]:
        """C6: the rounds of all steps are R."""
        steps, rounds = self._instance.steps, self._instance.rounds
        variables = [self._integer(1, rounds - steps + 1) for _ in range(steps)]
        self._solver.add(z3.Sum(variables) == rounds)
        return variables

    def _add_chunk(self, number: int, member: int) -> None:
        """C1 to C4 for one chunk."""
        problem = self._instance.orbits.problem
        demand = problem.demands[self._instance.orbits.classes[number].demand]
        times = self._add_times(number, member)
        steps: dict[int, list[int]] = defaultdict(list)
        for route, step in self._reachable.sends[number]:
            steps[route].append(step)
        arriving: dict[int, list[Any]] = defaultdict(list)
        for index, possible in steps.items():
            way = problem.routes[index]
            sent = self._sent[number, member, index] = self._truth()
            arriving[way.dst].append(sent)
            arrival = times[way.dst]
            self._solver.add(z3.Implies(sent, z3.And(min(possible) < arrival, arrival <= max(possible) + 1)))
            if way.src not in demand.sources:
                self._solver.add(z3.Implies(sent, times[way.src] < arrival))  # C4
        for rank, time in times.items():
            if rank in demand.targets:
                self._solver.add(z3.PbEq([(sent, 1) for sent in arriving[rank]], 1))  # C3
            elif arriving[rank]:
                self._solver.add(z3.AtMost(*arriving[rank], 1))
                self._solver.add(z3.Implies(time <= self._instance.steps, z3.Or(arriving[rank])))

    def _add_times(self, number: int, member: int) -> Mapping[int, Any]:
        """When the chunk reaches each rank; later than S: never.

        C1: the sources have it from the start and need no variable. C2: targets get it in time.
        """
        demand = self._instance.orbits.problem.demands[self._instance.orbits.classes[number].demand]
        steps = self._instance.steps
        first: dict[int, int] = {}
        for rank, time in self._reachable.holds[number]:
            if rank not in demand.sources:
                first.setdefault(rank, time)
        if not all(target in first for target in demand.targets):
            self._solver.add(z3.BoolVal(False, self._context))
        times = {
            rank: self._integer(time, steps if rank in demand.targets else steps + 1)
            for rank, time in first.items()
        }
        self._time |= {(number, member, rank): time for rank, time in times.items()}
        return times

    def _add_limits(self) -> None:
        """C5: the sends over a link in a step are at most its capacity times the step's rounds."""
        routes = self._instance.orbits.problem.routes
        open_at = [set(reachable) for reachable in self._reachable.sends]
        longest = longest_step(self._instance)
        for limit in self._instance.orbits.limits:
            times = Counter(limit.users)
            for step, rounds in enumerate(self._rounds):
                sends = [
                    (z3.And(sent, self._time[number, member, routes[route].dst] == step + 1), weight)
                    for (number, route), weight in times.items()
                    if (route, step) in open_at[number]
                    for member in range(self._instance.orbits.classes[number].count)
                    for sent in [self._sent[number, member, route]]
                ]
                if sum(weight for _, weight in sends) <= limit.capacity:
                    continue
                # Rounds that the step does not have take the place of so many sends.
                missing = [(rounds <= fewer, limit.capacity) for fewer in range(1, longest)]
                self._solver.add(z3.PbLe(sends + missing, limit.capacity * longest))

    def _add_order(self) -> None:
        """Of two chunks that are alike, the one whose arrivals come sooner is the first; see `is_ordered`."""
        sources = self._instance.orbits.problem.demands[self._instance.orbits.classes[0].demand].sources
        held = [
            [
                self._time[0, member, rank] <= time
                for rank, time in self._reachable.holds[0]
                if rank not in sources
            ]
            for member in range(self._instance.orbits.classes[0].count)
        ]
        for first, second in pairwise(held):
            for clause in not_before(first, second, negate=z3.Not, new=self._truth):
                self._solver.add(z3.Or(clause))
