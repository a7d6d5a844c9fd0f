"""An allreduce in pure Boolean logic, for CaDiCaL: one form to find schedules, one to exclude them.

`sum_search` looks for partial sums, one per rank, chunk and moment, as a schedule can say them: which ranks'
contributions each holds, and that what is added has none in common. That it finds nothing does not exclude
allreduces in which a rank keeps several partial sums of a chunk apart.

`spread_search` asks less: that every contribution can reach every rank over the messages that there are. A
message of a chunk then brings all that its sender has met, so that two of the same chunk over one route in
one step would bring the same. Whatever copies and adds, with however many partial sums, does that: where
there is no such set of messages there is no schedule at all.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypeAlias

from arborcast.synth.chunks.allreduce.partial_sums import SumOrbits, SumSend
from arborcast.synth.chunks.encodings.cardinality import Clauses, RoundLiterals
from arborcast.synth.chunks.encodings.reachable_sends import longest_step
from arborcast.synth.chunks.encodings.sat import SatSearch
from arborcast.synth.chunks.problem.instance import ChunkProblem
from arborcast.synth.chunks.problem.outcome import (
    Feasible,
    Inconclusive,
    Instance,
)

SatLiteral: TypeAlias = int | bool
"""A literal of a variable, or what is known to be true or false."""


def sum_search(instance: Instance, *, seed: int = 0) -> SatSearch:
    """A search for partial sums; `Inconclusive` where there are none that the group of the orbits allows."""
    assert isinstance(instance.orbits, SumOrbits), "asked of an allreduce"
    formula = SumFormula(instance, instance.orbits)
    return SatSearch(formula.clauses, formula.read, seed=seed, without=Inconclusive())


def spread_search(instance: Instance, *, seed: int = 0) -> SatSearch:
    """A search for messages over which everything could reach everybody: `Infeasible`, or `Inconclusive`.

    That there are such messages is no schedule, so it is no answer either.
    """
    return SatSearch(SpreadFormula(instance).clauses, _no_schedule, seed=seed)


def fewest_search(instance: Instance, *, seed: int = 0) -> SatSearch:
    """Whether messages that pass no more links in all than the instance has rounds can be such, as above.

    One chunk, steps of any length: `Infeasible`, or `Inconclusive`.
    """
    problem = instance.orbits.problem
    clauses = Clauses()
    sent = [[clauses.new() for _ in problem.routes] for _ in range(instance.steps)]
    add_spread(clauses, problem, sent)
    _pass_at_most(clauses, problem, sent, instance.rounds)
    return SatSearch(clauses, _no_schedule, seed=seed)


def fewest_sum_search(instance: Instance, *, seed: int = 0) -> SatSearch:
    """The same of transfers of partial sums, as `sum_search` looks for them: what it may find at all."""
    assert isinstance(instance.orbits, SumOrbits), "asked of an allreduce"
    problem, steps = instance.orbits.problem, instance.steps
    anything = steps + instance.orbits.chunks * len(problem.routes) * steps
    formula = SumFormula(replace(instance, rounds=anything), instance.orbits)
    sent = [[formula.sent[0, route, step] for route in range(len(problem.routes))] for step in range(steps)]
    _pass_at_most(formula.clauses, problem, sent, instance.rounds)
    return SatSearch(formula.clauses, _no_schedule, seed=seed)


def _no_schedule(_: set[int]) -> Inconclusive:
    """What a model of less than a schedule says."""
    return Inconclusive()


class SpreadFormula:
    """What `spread_search` asks, as clauses.

    Attributes:
        instance: which, without symmetries.
        clauses: all of them.
        rounds: those of each step.
        sent: of each chunk, step and route the literal of a message.
        met: of each chunk those of `add_spread`.
    """

    def __init__(self, instance: Instance) -> None:
        problem = instance.orbits.problem
        self.instance = instance
        self.clauses = clauses = Clauses()
        spare = instance.rounds - instance.steps
        self.rounds = RoundLiterals(clauses, instance.steps, spare, longest_step(instance))
        self.sent: list[list[list[int]]] = []
        self.met: list[dict[tuple[int, int, int], int]] = []
        for _ in range(instance.orbits.chunks):
            sent = [[clauses.new() for _ in problem.routes] for _ in range(instance.steps)]
            self.sent.append(sent)
            self.met.append(add_spread(clauses, problem, sent))
        for step in range(instance.steps):
            for link, capacity in enumerate(problem.capacities):
                passing = problem.passing[link]
                literals = [sent[step][route] for sent in self.sent for route in passing]
                self.rounds.fit(step, literals, capacity)
        clauses.put_in_order([literal for step in sent for literal in step] for sent in self.sent)


def _pass_at_most(clauses: Clauses, problem: ChunkProblem, sent: list[list[int]], most: int) -> None:
    """Messages, a literal for each step and route, pass no more than so many links, each each time."""
    passed = [
        literal
        for step in sent
        for literal, route in zip(step, problem.routes, strict=True)
        for _ in route.links
    ]
    clauses.at_most(passed, most)


def add_spread(
    clauses: Clauses, problem: ChunkProblem, sent: list[list[int]]
) -> dict[tuple[int, int, int], int]:
    """Say that everybody's contribution reaches everybody over some messages.

    Args:
        clauses: to which it is said.
        problem: see `synth.chunks.allreduce.partial_sums.sum_problem`.
        sent: for each step and route the literal of a message.

    Returns:
        For contributor, rank and steps done a literal that is true only where the rank has met the
        contribution by then; none where that is known.
    """
    steps = len(sent)
    met: dict[tuple[int, int, int], int] = {}
    for demand in problem.demands:
        first = problem.steps_from(demand.sources)
        known: list[SatLiteral] = [rank == demand.owner for rank in range(problem.ranks)]
        for step in range(steps):
            after: list[SatLiteral] = []
            for rank in range(problem.ranks):
                here = first[rank]
                if here is None or here > step + 1:
                    after.append(False)
                elif rank == demand.owner or (step + 1 == steps and rank in demand.targets):
                    after.append(True)
                else:
                    met[demand.owner, rank, step + 1] = clauses.new()
                    after.append(met[demand.owner, rank, step + 1])
                brought = [
                    _both(clauses, sent[step][route], known[problem.routes[route].src])
                    for route in problem.arriving[rank]
                ]
                _say(clauses, _not(after[-1]), known[rank], *brought)
            known = after
        for target in demand.targets:
            _say(clauses, known[target])
    return met


class SumFormula:
    """An instance as clauses: variables for one of each orbit that the kept group makes of what happens.

    Attributes:
        clauses: all of them.
        sent: the variable of each representative member, least route and step.
        copied: for each member, rank (the least of its orbit) and step: whether what the rank holds is
            replaced by what comes, which then comes alone.
    """

    def __init__(self, instance: Instance, orbits: SumOrbits) -> None:
        self.clauses = Clauses()
        self.sent: dict[tuple[int, int, int], int] = {}
        self.copied: dict[tuple[int, int, int], int] = {}
        self._orbits = orbits
        self._problem = orbits.problem
        self._instance = instance
        self._first = {d.owner: orbits.problem.steps_from(d.sources) for d in orbits.problem.demands}
        self._rounds = RoundLiterals(
            self.clauses, instance.steps, instance.rounds - instance.steps, longest_step(instance)
        )
        (members,) = orbits.classes
        for member in range(members.count):
            self._add_chunk(member)
        for limit in orbits.limits:
            for step in range(instance.steps):
                sent = [
                    self.sent[member, route, step]
                    for _, route in limit.users
                    for member in range(members.count)
                ]
                self._rounds.fit(step, sent, limit.capacity)

    def read(self, true: set[int]) -> Feasible:
        """The partial sums that a model says, all transfers of the representatives."""
        sends = []
        for index, route in enumerate(self._problem.routes):
            least = self._orbits.same_route[index]
            for (member, known, step), literal in self.sent.items():
                if known == least and literal in true:
                    copied = self.copied[member, self._same_rank(route.dst), step] in true
                    sends.append(SumSend(0, member, index, step, copied))
        return Feasible(self._rounds.read(true), tuple(sends))

    def _same_rank(self, rank: int) -> int:
        return min(element[rank] for element in self._orbits.kept)

    def _add_chunk(self, member: int) -> None:
        problem, orbits, new = self._problem, self._orbits, self.clauses.new
        ranks = [rank for rank in range(problem.ranks) if self._same_rank(rank) == rank]
        routes = sorted(set(orbits.same_route))
        pairs = [
            (rank, contributor)
            for contributor in self._first
            for rank in range(problem.ranks)
            if orbits.same_pair(rank, contributor) == (rank, contributor)
        ]
        held: dict[tuple[int, int], SatLiteral] = {pair: pair[0] == pair[1] for pair in pairs}
        for step in range(self._instance.steps):
            for route in routes:
                self.sent[member, route, step] = new()
            for rank in ranks:
                self.copied[member, rank, step] = new()
                self._add_arrivals(member, rank, step, held)
            carried: dict[tuple[int, int], SatLiteral] = {}
            held = {pair: self._add_sum(member, step, pair, held, carried) for pair in pairs}

    def _add_arrivals(
        self, member: int, rank: int, step: int, held: dict[tuple[int, int], SatLiteral]
    ) -> None:
        """What takes the place of the receiver's sum comes alone; nobody sends what is nothing."""
        copied = self.copied[member, rank, step]
        sent = [
            self.sent[member, self._orbits.same_route[route], step] for route in self._problem.arriving[rank]
        ]
        _say(self.clauses, -copied, *sent)
        for position, one in enumerate(sent):
            for other in sent[:position]:
                _say(self.clauses, -copied, -one, -other)
        if rank not in self._first:  # a relay
            for route in self._problem.leaving[rank]:
                literal = self.sent[member, self._orbits.same_route[route], step]
                some = [held[self._orbits.same_pair(rank, contributor)] for contributor in self._first]
                _say(self.clauses, -literal, *some)

    def _add_sum(
        self,
        member: int,
        step: int,
        pair: tuple[int, int],
        held: dict[tuple[int, int], SatLiteral],
        carried: dict[tuple[int, int], SatLiteral],
    ) -> SatLiteral:
        """Whether a rank holds a contribution after a step: kept or brought, and that by one way alone."""
        rank, contributor = pair
        problem, orbits, clauses = self._problem, self._orbits, self.clauses
        first = self._first[contributor][rank]
        copied = self.copied[member, self._same_rank(rank), step]
        ways = [_and(clauses, -copied, held[pair])]
        for route in problem.arriving[rank]:
            key = orbits.same_carried(route, contributor)
            if key not in carried:
                sent = self.sent[member, orbits.same_route[route], step]
                there = held[orbits.same_pair(problem.routes[route].src, contributor)]
                carried[key] = _and(clauses, sent, there)
            ways.append(carried[key])
        possible = [way for way in ways if way is not False]
        after: SatLiteral
        if step + 1 == self._instance.steps and rank in self._first:
            after = True
        elif first is None or first > step + 1:
            after = False
        else:
            after = clauses.new()
        _say(clauses, _not(after), *possible)
        for way in possible:
            _say(clauses, _not(way), after)
        assert all(type(way) is int for way in possible), "nothing is held for certain after the start"
        clauses.at_most_one([int(way) for way in possible])
        return after


def _say(clauses: Clauses, *literals: SatLiteral) -> None:
    """At least one of these is true."""
    if not any(literal is True for literal in literals):
        clauses.add(*(int(literal) for literal in literals if literal is not False))


def _not(literal: SatLiteral) -> SatLiteral:
    return not literal if isinstance(literal, bool) else -literal


def _and(clauses: Clauses, one: int, other: SatLiteral) -> SatLiteral:
    """A literal that is true where both are, and only there."""
    if isinstance(other, bool):
        return one if other else False
    both = _both(clauses, one, other)
    assert type(both) is int, "of two variables"
    clauses.add(both, -one, -other)
    return both


def _both(clauses: Clauses, one: int, other: SatLiteral) -> SatLiteral:
    """A literal that is true only where both are."""
    if isinstance(other, bool):
        return one if other else False
    both = clauses.new()
    clauses.add(-both, one)
    clauses.add(-both, other)
    return both
