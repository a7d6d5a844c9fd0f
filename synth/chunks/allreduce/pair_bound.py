"""A limit of R/C of an allreduce in S steps, over every schedule and C: every contribution flows everywhere.

In the time-expanded graph a unit flows from each rank at the start to each other rank at the end, within the
messages that there are, which any number of flows may share: what a chunk's messages carry, averaged over
the chunks, is such a flow. Messages may be averaged over all symmetries, and the flow of a pair over those
that keep the pair: so columns stand for orbits of routes, and large regular fabrics take few of them. The
prices of the linear program, brought to fractions, are a `PairDual`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from fractions import Fraction
from functools import cached_property

import numpy as np

from arborcast.synth.chunks.bounds.flow_bounds import common_denominator
from arborcast.synth.chunks.bounds.flow_program import ProgramRows
from arborcast.synth.chunks.bounds.step_certificate import PairDual, StepBound, StepLengths
from arborcast.synth.chunks.bounds.step_check import certified_ratio
from arborcast.synth.chunks.problem.instance import ChunkProblem
from arborcast.synth.deadline import Deadline
from arborcast.synth.kernels.compiled import Ints
from arborcast.synth.symmetry.automorphisms import automorphisms_of
from arborcast.synth.symmetry.permutations import orbit_numbers
from arborcast.synth.topology import Permutation

MOST_COLUMNS = 200_000
"""Columns up to which the program is written down: a minute."""

_FINE = 2**40


def pair_bound(
    problem: ChunkProblem,
    steps: int,
    *,
    deadline: Deadline,
    symmetries: tuple[Permutation, ...] | None = None,
) -> StepBound | None:
    """The limit by flows of every contribution to every rank.

    Args:
        problem: see `synth.chunks.allreduce.partial_sums.sum_problem`.
        steps: S, at least the latency of the problem.
        deadline: when to give up.
        symmetries: generators of automorphisms that keep the ranks that take part; None for all that are
            found. The ratio is the same with any.

    Returns:
        The optimum of the linear program, or a little less where its prices are no simple fractions; None
        where it has more than `MOST_COLUMNS`.

    Raises:
        TimedOutError: the deadline passed.
        ArithmeticError: HiGHS failed on the linear program.
    """
    program = _Program(problem, steps, _Orbits(problem, symmetries), deadline)
    if program.columns > MOST_COLUMNS:
        return None
    certificate = program.certificate(deadline)
    return StepBound(steps, certified_ratio(problem, steps, certificate), certificate)


class _Orbits:
    """What the symmetries map to each other.

    Attributes:
        generators: of the symmetries.
        route: of each route the number of its orbit.
        link: of each link the number of its orbit.
        pairs: the least pair (contributor, receiver) of each orbit, with the size of that.
    """

    def __init__(self, problem: ChunkProblem, symmetries: tuple[Permutation, ...] | None) -> None:
        self._problem = problem
        self._ways = {(r.src, *r.via, r.dst): number for number, r in enumerate(problem.routes)}
        self._members = sorted(demand.owner for demand in problem.demands)
        self._every = symmetries is None
        self.generators = self._keeping(()) if symmetries is None else symmetries
        self.route = self._routes(self.generators)
        links = {(link.src, link.dst): at for at, link in enumerate(problem.topology.links)}
        moved = ([links[g[a], g[b]] for a, b in links] for g in self.generators)
        self.link = orbit_numbers(len(links), moved)
        self.pairs = self._counted()

    def of_pair(self, ends: tuple[int, int]) -> tuple[Ints, Ints]:
        """Of each vertex and of each route the number of its orbit under what keeps a pair."""
        kept = self._keeping(ends) if self._every and self.generators else ()
        return orbit_numbers(self._problem.topology.size, kept), self._routes(kept)

    def _counted(self) -> dict[tuple[int, int], int]:
        size = self._problem.topology.size
        moved = ([a * size + b for a in g for b in g] for g in self.generators)
        number = orbit_numbers(size * size, moved)
        least: dict[int, tuple[int, int]] = {}
        counts: dict[tuple[int, int], int] = defaultdict(int)
        for contributor in self._members:
            for receiver in self._members:
                if contributor != receiver:
                    ends = contributor, receiver
                    counts[least.setdefault(int(number[contributor * size + receiver]), ends)] += 1
        return dict(counts)

    def _keeping(self, ends: tuple[int, ...]) -> tuple[Permutation, ...]:
        """Generators of the automorphisms that keep who takes part, and some ranks one by one."""
        colours = [0] * self._problem.topology.size
        for rank in self._members:
            colours[rank] = 1
        for colour, rank in enumerate(ends, start=2):
            colours[rank] = colour
        return automorphisms_of(self._problem.topology, latencies=False, colours=colours).generators

    def _routes(self, generators: Sequence[Permutation]) -> Ints:
        ways = self._ways
        moved = ([ways[tuple([g[v] for v in way])] for way in ways] for g in generators)
        return orbit_numbers(len(ways), moved)


class _PairFlow:
    """A unit from a contributor to a receiver, for all pairs of an orbit; a flow is that of each route.

    Attributes:
        ends: contributor and receiver.
        count: of pairs of the orbit.
        within: of (step, orbit of routes) the row that keeps the flow within the messages.
        members: of each orbit of routes its routes.
    """

    def __init__(self, ends: tuple[int, int], count: int, routes: Ints) -> None:
        self.ends = ends
        self.count = count
        self.within: dict[tuple[int, int], int] = {}
        self.members: list[list[int]] = [[] for _ in range(int(routes.max()) + 1)]
        for route, number in enumerate(routes.tolist()):
            self.members[number].append(route)


class _Program:
    """Columns: the rounds of the steps, the messages of each orbit of routes and step, and the flows.

    Attributes:
        columns: how many.
    """

    def __init__(self, problem: ChunkProblem, steps: int, orbits: _Orbits, deadline: Deadline) -> None:
        self._problem = problem
        self._steps = steps
        self._orbits = orbits
        self._rows = rows = ProgramRows()
        self._unit = max(problem.capacities)
        self._kinds = int(orbits.route.max()) + 1
        self.columns = steps * (1 + self._kinds)
        links, times = self._passing
        self._link_rows = rows.add_at_most_zero(steps * len(links)).reshape(steps, -1)
        for step in range(steps):
            for at, link in enumerate(links):
                (used,) = np.nonzero(times[at])
                row = np.full(len(used) + 1, self._link_rows[step, at])
                values = np.array([*times[at][used], -problem.capacities[link] / self._unit])
                rows.put(row, np.array([*(steps + step * self._kinds + used), step]), values)
        self._flows: list[_PairFlow] = []
        for ends, count in orbits.pairs.items():
            deadline.check("the limit by flows")
            if self.columns <= MOST_COLUMNS:
                self._add_flow(ends, count)

    @cached_property
    def _passing(self) -> tuple[list[int], Ints]:
        """The least link of each orbit; how many routes of each orbit pass it."""
        links = np.unique(self._orbits.link, return_index=True)[1].tolist()
        times = np.zeros((len(links), self._kinds), dtype=np.int64)
        for at, link in enumerate(links):
            np.add.at(times[at], self._orbits.route[list(self._problem.passing[link])], 1)
        return links, times

    def _add_flow(self, ends: tuple[int, int], count: int) -> None:
        problem, steps, rows = self._problem, self._steps, self._rows
        alike, routes = self._orbits.of_pair(ends)
        flow = _PairFlow(ends, count, routes)
        self._flows.append(flow)
        since, until = problem.steps_from(frozenset({ends[0]})), problem.steps_to(ends[1])
        conserved: dict[tuple[int, int], int] = {}

        def vertex(rank: int, time: int) -> int | None:
            first, last = since[rank], until[rank]
            if first is None or last is None or first > time or time > steps - last:
                return None
            key = int(alike[rank]), time
            if key not in conserved:
                surplus = [float((rank, time) == (ends[1], steps)) - float((rank, time) == (ends[0], 0))]
                conserved[key] = int(rows.add(surplus, surplus)[0])
            return conserved[key]

        ranks = np.unique(alike[: problem.ranks], return_index=True)[1].tolist()
        ways = [(rank, rank, 1, -1) for rank in ranks]
        for number, members in enumerate(flow.members):
            route = problem.routes[members[0]]
            ways.append((route.src, route.dst, len(members), number))
        for step in range(steps):
            for src, dst, times, number in ways:
                tail, head = vertex(src, step), vertex(dst, step + 1)
                if tail is None or head is None:
                    continue
                column, self.columns = self.columns, self.columns + 1
                rows.put(np.array([tail, head]), np.array([column] * 2), np.array([-times, times]))
                if number >= 0:
                    row = int(rows.add_at_most_zero(1)[0])
                    flow.within[step, number] = row
                    message = steps + step * self._kinds + int(self._orbits.route[flow.members[number][0]])
                    rows.put(np.array([row, row]), np.array([column, message]), np.array([1.0, -1.0]))

    def certificate(self, deadline: Deadline) -> PairDual:
        """The prices of the rows as lengths that keep the rules of `PairDual` exactly.

        The price of an orbit of links is shared out among these, and that of an orbit of routes for a pair
        among the routes and among the pairs that are alike.
        """
        prices = np.maximum(-self._rows.prices(self.columns, self._steps, deadline), 0)
        fine = common_denominator(np.unique(prices).tolist()) or _FINE
        whole = np.rint(prices * fine).astype(np.int64)
        links, _ = self._passing
        capacities = [self._problem.capacities[link] for link in links]
        used = max(
            1,
            *(
                sum(price * capacity for price, capacity in zip(row, capacities, strict=True))
                for row in whole[self._link_rows].tolist()
            ),
        )
        paid = self._paid(whole)
        pairs = []
        for flow in self._flows:
            own = [
                (step, route, Fraction(paid[row], used * flow.count * len(flow.members[number])))
                for (step, number), row in flow.within.items()
                if paid[row]
                for route in flow.members[number]
            ]
            pairs.append((*flow.ends, tuple(sorted(own))))
        return PairDual(self._lengths(whole, used), tuple(pairs), self._orbits.generators)

    def _lengths(self, whole: Ints, used: int) -> StepLengths:
        counts = np.bincount(self._orbits.link).tolist()
        numbers = self._orbits.link.tolist()
        return tuple(
            tuple(Fraction(row[number], used * counts[number]) for number in numbers)
            for row in whole[self._link_rows].tolist()
        )

    def _paid(self, whole: Ints) -> dict[int, int]:
        """Of each row of a flow its price, smaller where those of a route together exceed its links'."""
        sharing: dict[tuple[int, int], list[int]] = defaultdict(list)
        for flow in self._flows:
            for (step, number), row in flow.within.items():
                sharing[step, int(self._orbits.route[flow.members[number][0]])].append(row)
        _, times = self._passing
        left = whole[self._link_rows] @ times
        paid: dict[int, int] = {}
        for (step, kind), rows in sharing.items():
            allowed = int(left[step, kind])
            total = sum(int(whole[row]) for row in rows)
            for row in rows:
                price = int(whole[row])
                paid[row] = price if total <= allowed else price * allowed // total
        return paid
