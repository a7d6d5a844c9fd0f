"""SCCL's instance in pure Boolean logic, for CaDiCaL: what is sent, what is held, step by step.

Where the paper has a time for each chunk at each rank, there is a variable for each moment here: whether
the rank holds it then. Every chunk comes to a rank at most once.

Source: Cai et al., SCCL (PPoPP 2021), constraints C1 to C6, indexed by time.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

from pysat.solvers import Cadical195

from arborcast.synth.chunks.encodings.cardinality import Clauses, RoundLiterals
from arborcast.synth.chunks.encodings.reachable_sends import ReachableSends, is_ordered, longest_step
from arborcast.synth.chunks.problem.orbits import OrbitSend
from arborcast.synth.chunks.problem.outcome import Feasible, Infeasible, Instance, Outcome, Unknown
from arborcast.synth.errors import Prover

CONFLICTS_PER_EFFORT = 15
"""Conflicts per unit of effort: measured 5 to 35 a millisecond."""

SEEDS = 2_000_000_000
"""Seeds that CaDiCaL takes."""

REFUTED = Infeasible(Prover.CADICAL)


class SatSearch:
    """A search by CaDiCaL for a model of a formula."""

    def __init__(
        self,
        clauses: Clauses,
        read: Callable[[set[int]], Outcome],
        *,
        seed: int,
        without: Outcome = REFUTED,
    ) -> None:
        """Hand the formula over.

        Args:
            clauses: the formula.
            read: what a model says, from the variables that are true in it.
            seed: the solver's own.
            without: what it says that there is no model.
        """
        self._read = read
        self._without = without
        self._solver: Any = Cadical195()
        self._solver.configure({"seed": seed % SEEDS})
        for clause in clauses.clauses:
            self._solver.add_clause(clause)

    def run(self, effort: int | None) -> Outcome:
        """See `synth.chunks.problem.outcome.Search`."""
        if effort is None:
            answer = self._solver.solve()
        else:
            self._solver.conf_budget(effort * CONFLICTS_PER_EFFORT)
            answer = self._solver.solve_limited()
        if answer is None:
            return Unknown()
        if not answer:
            return self._without
        return self._read({literal for literal in self._solver.get_model() if literal > 0})


def sat_search(instance: Instance, *, seed: int = 0) -> SatSearch:
    """A search for copies."""
    formula = Formula(instance)
    return SatSearch(formula.clauses, formula.read, seed=seed)


class Formula:
    """An instance as clauses.

    Attributes:
        instance: which.
        clauses: all of them.
        sends: the variable of every send that can matter.
        holds: the variable of every (chunk class, member, rank, time) that can matter but those of sources.
        rounds: those of each step.
    """

    def __init__(self, instance: Instance) -> None:
        self.clauses = Clauses()
        self.sends: dict[OrbitSend, int] = {}
        self.holds: dict[tuple[int, int, int, int], int] = {}
        self.instance = instance
        self._reachable = ReachableSends.of(instance.orbits, instance.steps)
        spare = instance.rounds - instance.steps
        self.rounds = RoundLiterals(self.clauses, instance.steps, spare, longest_step(instance))  # C6
        for number, chunk_class in enumerate(instance.orbits.classes):
            held = [self._add_chunk(number, member) for member in range(chunk_class.count)]
            if is_ordered(instance.orbits):
                self.clauses.put_in_order(held)
        self._add_limits()

    def read(self, true: set[int]) -> Feasible:
        """The schedule that a model says."""
        sends = (send for send, literal in self.sends.items() if literal in true)
        return Feasible(self.rounds.read(true), tuple(sends))

    def _add_chunk(self, chunk_class: int, member: int) -> list[int]:
        """C1 to C4 for one chunk; the variables that say when which rank holds it."""
        add = self.clauses.add
        problem = self.instance.orbits.problem
        demand = problem.demands[self.instance.orbits.classes[chunk_class].demand]
        # C1: the sources hold it always and need no variable.
        held = {
            (rank, time): self.clauses.new()
            for rank, time in self._reachable.holds[chunk_class]
            if rank not in demand.sources
        }
        self.holds.update(((chunk_class, member, *place), literal) for place, literal in held.items())
        arriving: dict[tuple[int, int], list[int]] = defaultdict(list)
        for index, step in self._reachable.sends[chunk_class]:
            send = self.clauses.new()
            self.sends[OrbitSend(chunk_class, member, index, step)] = send
            route = problem.routes[index]
            arriving[route.dst, step + 1].append(send)
            if route.src not in demand.sources:
                add(-send, held[route.src, step])  # C4: what is sent was there before
        for target in sorted(demand.targets):
            add(*(held[hold] for hold in [(target, self.instance.steps)] if hold in held))  # C2
        for (rank, time), here in held.items():
            sends = arriving[rank, time]
            before = [held[rank, time - 1]] if (rank, time - 1) in held else []
            add(-here, *before, *sends)  # C3: what is held came some day, and once
            for earlier in before:
                add(-earlier, here)
            for send in sends:
                add(-send, here)
                for earlier in before:
                    add(-send, -earlier)
            self.clauses.at_most_one(sends)
        return list(held.values())

    def _add_limits(self) -> None:
        """C5: the sends over a link in a step are at most its capacity times the step's rounds."""
        orbits = self.instance.orbits
        for limit in orbits.limits:
            times = Counter(limit.users)
            for step in range(self.instance.steps):
                literals = [
                    literal
                    for (chunk_class, route), count in times.items()
                    for member in range(orbits.classes[chunk_class].count)
                    if (literal := self.sends.get(OrbitSend(chunk_class, member, route, step))) is not None
                    for _ in range(count)
                ]
                self.rounds.fit(step, literals, limit.capacity)
