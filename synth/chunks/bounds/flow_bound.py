"""A limit of R/C in S steps, over every C: what each target waits for must be able to flow there at once.

In the time-expanded graph (vertices (rank, t); waiting costs nothing) the messages of a schedule, averaged
over its chunks, have room for each of some flows by itself: of all blocks for one target, of all blocks that
leave the same ranks for one target each, and of an allreduce, whose messages carry any number of
contributions, of each contribution to each rank. How these flows get in each other's way is left out.

Messages may be averaged over all symmetries, and a flow over those that keep it: so columns stand for orbits
of routes, and large regular fabrics take few of them. The prices of the linear program, brought to fractions,
are a `FlowDual`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from fractions import Fraction
from functools import cached_property

import numpy as np

from arborcast.synth.chunks.bounds.program_rows import ProgramRows
from arborcast.synth.chunks.bounds.step_certificate import (
    FlowDual,
    PairDual,
    Pairs,
    RouteLengths,
    StepBound,
    StepLengths,
)
from arborcast.synth.chunks.bounds.step_check import certified_ratio
from arborcast.synth.chunks.problem.demand_action import DemandAction
from arborcast.synth.chunks.problem.instance import ChunkProblem
from arborcast.synth.deadline import Deadline
from arborcast.synth.kernels.compiled import Ints
from arborcast.synth.symmetry.automorphisms import automorphisms_of
from arborcast.synth.symmetry.permutations import orbit_numbers
from arborcast.synth.topology import Permutation

MOST_COLUMNS = 200_000
"""Columns up to which the program of an allreduce is written down: a minute."""

ENOUGH_COLUMNS = 10_000
"""Columns from which on no flow is added of what is copied, the narrowest first: a second."""

LARGEST_DENOMINATOR = 10**6
"""Prices that are multiples of one over at most this much, nearly, are taken to be just that."""

_FINE = 2**40  # what all other prices are rounded to
_TOLERANCE = 1e-9


def flow_bound(
    problem: ChunkProblem,
    steps: int,
    *,
    deadline: Deadline,
    sums: bool = False,
    symmetries: tuple[Permutation, ...] | None = None,
) -> StepBound | None:
    """The limit by flows; exact for gather and scatter.

    Args:
        problem: what there is to send; of an allreduce see `synth.chunks.allreduce.partial_sums.sum_problem`.
        steps: S.
        deadline: when to give up.
        sums: whether it is that of an allreduce.
        symmetries: generators of automorphisms that keep the problem; None for all that are found. The
            ratio is the same with any.

    Returns:
        The optimum of the linear program, or a little less where its prices are no simple fractions; None
        where that of an allreduce has more than `MOST_COLUMNS`.

    Raises:
        ValueError: there is no schedule of so few steps.
        TimedOutError: the deadline passed.
        ArithmeticError: HiGHS failed on the linear program.
    """
    if problem.latency is None:
        raise ValueError(f"{steps} steps: some rank is out of reach in any number of them")
    if steps < problem.latency:
        raise ValueError(f"{steps} steps: fewer than the latency, {problem.latency}, of the problem")
    orbits = _Orbits(problem, flows_of(problem, sums=sums), symmetries)
    program = _Program(problem, steps, orbits, MOST_COLUMNS if sums else ENOUGH_COLUMNS, deadline)
    if sums and program.columns > MOST_COLUMNS:
        return None
    certificate = (PairDual if sums else FlowDual)(*program.dual(deadline))
    return StepBound(steps, certified_ratio(problem, steps, certificate), certificate)


def flows_of(problem: ChunkProblem, *, sums: bool) -> list[Pairs]:
    """What flows together: to one target, or from the same sources, or each contribution alone."""
    every = [(at, target) for at, demand in enumerate(problem.demands) for target in sorted(demand.targets)]
    if sums:
        return [(pair,) for pair in every]
    into: dict[int, list[tuple[int, int]]] = defaultdict(list)
    out: dict[frozenset[int], list[tuple[int, int]]] = defaultdict(list)
    for at, target in every:
        into[target].append((at, target))
        if len(problem.demands[at].targets) == 1:
            out[problem.demands[at].sources].append((at, target))
    several = [pairs for pairs in out.values() if len({target for _, target in pairs}) > 1]
    return [tuple(pairs) for pairs in (*into.values(), *several)]


class _Orbits:
    """What the symmetries of a problem map to each other.

    Attributes:
        generators: of the symmetries.
        route: of each route the number of its orbit.
        link: of each link the number of its orbit.
        flows: one of each orbit, with how many that has.
    """

    def __init__(
        self, problem: ChunkProblem, flows: Sequence[Pairs], symmetries: tuple[Permutation, ...] | None
    ) -> None:
        self._problem = problem
        self._ways = {(r.src, *r.via, r.dst): number for number, r in enumerate(problem.routes)}
        self._action = DemandAction(problem.topology, problem.demands)
        self._every = symmetries is None
        self.generators = self._keeping(()) if symmetries is None else symmetries
        self.route = self._routes(self.generators)
        links = {(link.src, link.dst): at for at, link in enumerate(problem.topology.links)}
        moved = ([links[g[a], g[b]] for a, b in links] for g in self.generators)
        self.link = orbit_numbers(len(links), moved)
        index = {flow: at for at, flow in enumerate(flows)}
        images = ([index[it] for it in self._moved(flows, element)] for element in self.generators)
        number = orbit_numbers(len(flows), images)
        first, counts = np.unique(number, return_index=True, return_counts=True)[1:]
        self.flows = [(flows[at], count) for at, count in zip(first.tolist(), counts.tolist(), strict=True)]

    def within(self, flow: Pairs) -> tuple[Ints, Ints]:
        """Of each vertex and of each route the number of its orbit under what keeps a flow."""
        alone = all(len(self._problem.demands[at].sources) == 1 for at, _ in flow)
        kept = self._keeping(flow) if self._every and self.generators and alone else ()
        return orbit_numbers(self._problem.topology.size, kept), self._routes(kept)

    def _moved(self, flows: Sequence[Pairs], element: Permutation) -> list[Pairs]:
        images = self._action.images(element)
        return [tuple(sorted((images[at], element[target]) for at, target in flow)) for flow in flows]

    def _keeping(self, flow: Pairs) -> tuple[Permutation, ...]:
        """Generators of the automorphisms that keep the problem, and a flow."""
        roles = [[colour] for colour in self._action.colours()]
        for at, target in flow:
            roles[target].append(-1)
            for rank in self._problem.demands[at].sources:
                roles[rank].append(len(flow))
        numbers = {role: number for number, role in enumerate(sorted(set(map(tuple, roles))))}
        colours = [numbers[tuple(role)] for role in roles]

        def keeps(element: Permutation) -> bool:
            return self._action.keeps(element) and self._moved([flow], element) == [flow]

        return automorphisms_of(
            self._problem.topology, latencies=False, colours=colours, keeps=keeps
        ).generators

    def _routes(self, generators: Sequence[Permutation]) -> Ints:
        ways = self._ways
        moved = ([ways[tuple([g[v] for v in way])] for way in ways] for g in generators)
        return orbit_numbers(len(ways), moved)


class _Flow:
    """A flow that stands for all of an orbit, and what flows over each orbit of routes that keep it.

    Attributes:
        pairs: what it takes.
        count: of flows of the orbit.
        within: of (step, orbit of routes) the row that keeps the flow within the messages.
        members: of each orbit of routes its routes.
    """

    def __init__(self, pairs: Pairs, count: int, routes: Ints) -> None:
        self.pairs = pairs
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

    def __init__(
        self, problem: ChunkProblem, steps: int, orbits: _Orbits, most: int, deadline: Deadline
    ) -> None:
        """Write it down, with flows until there are so many columns."""
        self._problem = problem
        self._steps = steps
        self._orbits = orbits
        self._rows = rows = ProgramRows()
        # Capacities count from the largest, so that the tolerances of HiGHS mean the same for every unit.
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
        self._flows: list[_Flow] = []
        for pairs, count in sorted(orbits.flows, key=lambda flow: self._room(flow[0])):
            deadline.check("the limit by flows")
            if self.columns <= most:
                self._add_flow(pairs, count)

    def _room(self, pairs: Pairs) -> float:
        """Chunks a round, of each block, for which there is room out of the sources, or into the targets."""
        problem = self._problem
        sources = frozenset[int]().union(*(problem.demands[at].sources for at, _ in pairs))
        targets = {target for _, target in pairs}
        out = sum(
            problem.capacities[at] for at, link in enumerate(problem.topology.links) if link.src in sources
        )
        into = sum(
            problem.capacities[at] for at, link in enumerate(problem.topology.links) if link.dst in targets
        )
        return min(out, into) / len(pairs)

    @cached_property
    def _passing(self) -> tuple[list[int], Ints]:
        """The least link of each orbit; how many routes of each orbit pass it."""
        links = np.unique(self._orbits.link, return_index=True)[1].tolist()
        times = np.zeros((len(links), self._kinds), dtype=np.int64)
        for at, link in enumerate(links):
            np.add.at(times[at], self._orbits.route[list(self._problem.passing[link])], 1)
        return links, times

    def _add_flow(self, pairs: Pairs, count: int) -> None:
        problem, steps, rows = self._problem, self._steps, self._rows
        alike, routes = self._orbits.within(pairs)
        flow = _Flow(pairs, count, routes)
        self._flows.append(flow)
        supply = Counter(problem.demands[at].sources for at, _ in pairs)
        since = problem.steps_from(frozenset[int]().union(*supply))
        until = [problem.steps_to(target) for target in {target for _, target in pairs}]
        conserved: dict[tuple[int, int], int] = {}
        surplus: Counter[tuple[int, int]] = Counter((int(alike[target]), steps) for _, target in pairs)
        for sources, blocks in supply.items():
            if len(sources) == 1:
                surplus[int(alike[min(sources)]), 0] -= blocks

        def vertex(rank: int, time: int) -> int | None:
            first = since[rank]
            lasts = [away[rank] for away in until]
            if first is None or first > time or all(last is None or time > steps - last for last in lasts):
                return None
            key = int(alike[rank]), time
            if key not in conserved:
                conserved[key] = int(rows.add([surplus[key]], [surplus[key]])[0])
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
                column = self._column()
                rows.put(np.array([tail, head]), np.array([column] * 2), np.array([-times, times]))
                if number >= 0:
                    row = int(rows.add_at_most_zero(1)[0])
                    flow.within[step, number] = row
                    message = steps + step * self._kinds + int(self._orbits.route[flow.members[number][0]])
                    rows.put(np.array([row, row]), np.array([column, message]), np.array([1.0, -1.0]))
        for sources, blocks in supply.items():
            if len(sources) > 1:  # of which all blocks begin at one or other
                begun = int(rows.add([blocks], [blocks])[0])
                for rank in sorted(sources):
                    if (start := vertex(rank, 0)) is not None:
                        column = self._column()
                        rows.put(np.array([start, begun]), np.array([column] * 2), 1.0)

    def _column(self) -> int:
        self.columns += 1
        return self.columns - 1

    def dual(
        self, deadline: Deadline
    ) -> tuple[StepLengths, tuple[tuple[Pairs, RouteLengths], ...], tuple[Permutation, ...]]:
        """The prices of the rows as lengths that keep the rules of `FlowDual` exactly: what that consists of.

        The price of an orbit of links is shared out among these, and that of an orbit of routes for a flow
        among the routes and among the flows that are alike.
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
        flows = []
        for flow in self._flows:
            own = [
                (step, route, Fraction(paid[row], used * flow.count * len(flow.members[number])))
                for (step, number), row in flow.within.items()
                if paid[row]
                for route in flow.members[number]
            ]
            flows.append((flow.pairs, tuple(sorted(own))))
        return self._lengths(whole, used), tuple(flows), self._orbits.generators

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


def common_denominator(values: Iterable[float]) -> int | None:
    """The least number that makes all values whole, nearly; None if there is none small enough."""
    common = 1
    for value in values:
        excess = Fraction(value * common).limit_denominator(LARGEST_DENOMINATOR // common)
        if abs(value * common - excess) > _TOLERANCE * common:
            return None
        if abs(value * common - round(value * common)) > _TOLERANCE * common:
            common *= excess.denominator
    return common
