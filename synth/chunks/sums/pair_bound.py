"""A limit of R/C of an allreduce in S steps, over every schedule and C: every contribution flows everywhere.

In the time-expanded graph a unit flows from each rank at the start to each other rank at the end, within the
messages that there are, which any number of flows may share: what a chunk's messages carry, averaged over
the chunks, is such a flow. Messages are the same for all routes of an orbit of symmetries, so that few pairs
and links need columns. The prices of the linear program, brought to fractions, are a `PairDual`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from arborcast.synth.chunks.bounds.certificate import PairDual, StepBound
from arborcast.synth.chunks.bounds.check import certified_ratio
from arborcast.synth.chunks.bounds.flow_bounds import common_denominator
from arborcast.synth.chunks.bounds.flow_program import Prices, ProgramRows
from arborcast.synth.chunks.problem.instance import ChunkProblem
from arborcast.synth.chunks.problem.orbits import Group
from arborcast.synth.deadline import Deadline
from arborcast.synth.kernels.compiled import Ints

MOST_COLUMNS = 200_000
"""Columns up to which the program is written down: a minute."""

_FINE = 2**40


def pair_bound(problem: ChunkProblem, steps: int, *, group: Group, deadline: Deadline) -> StepBound | None:
    """The limit by flows of every contribution to every rank.

    Args:
        problem: see `synth.chunks.sums.instance.sum_problem`.
        steps: S, at least the latency of the problem.
        group: automorphisms that keep it, the identity first.
        deadline: when to give up.

    Returns:
        The optimum of the linear program, or a little less where its prices are no simple fractions; None
        where it has more than `MOST_COLUMNS`.

    Raises:
        TimedOutError: the deadline passed.
        ArithmeticError: HiGHS failed on the linear program.
    """
    orbits = _Orbits(problem, group)
    program = _Program(problem, steps, orbits)
    if program.columns > MOST_COLUMNS:
        return None
    certificate = orbits.certificate(steps, *program.prices(deadline))
    return StepBound(steps, certified_ratio(problem, steps, certificate), certificate)


class _Orbits:
    """What a group maps to each other.

    Attributes:
        route: of each route the position of its orbit.
        routes: number of orbits of routes.
        links: the least link of each orbit.
        pairs: the least pair (contributor, receiver) of each orbit.
    """

    def __init__(self, problem: ChunkProblem, group: Group) -> None:
        self._problem = problem
        self._group = group
        index = {(r.src, *r.via, r.dst): number for number, r in enumerate(problem.routes)}
        self._images = [
            tuple(index[tuple([g[v] for v in (r.src, *r.via, r.dst)])] for r in problem.routes) for g in group
        ]
        number = {(link.src, link.dst): at for at, link in enumerate(problem.topology.links)}
        self._link_images = [
            tuple(number[g[link.src], g[link.dst]] for link in problem.topology.links) for g in group
        ]
        least = [min(images) for images in zip(*self._images, strict=True)]
        position = {route: at for at, route in enumerate(sorted(set(least)))}
        self.route: Ints = np.array([position[route] for route in least], dtype=np.int64)
        self.routes = len(position)
        self.links = sorted({min(images) for images in zip(*self._link_images, strict=True)})
        ranks = [demand.owner for demand in problem.demands]
        self.pairs = sorted({min((g[i], g[r]) for g in group) for i in ranks for r in ranks if i != r})

    def certificate(
        self, steps: int, links: Prices, pairs: Sequence[dict[tuple[int, int], float]]
    ) -> PairDual:
        """Prices of one of each orbit as lengths of all, each the mean over the group.

        Args:
            steps: S.
            links: of the rows of the links, a row per step; `links` tells their order.
            pairs: of each pair of `pairs` those of (step, route).
        """
        everything = [*links.ravel().tolist(), *(price for prices in pairs for price in prices.values())]
        fine = common_denominator(everything) or _FINE
        whole_links = np.rint(links * fine).astype(np.int64).astype(object)
        table = np.zeros((steps, len(self._problem.topology.links)), dtype=object)
        for at, link in enumerate(self.links):
            for images in self._link_images:
                table[:, images[link]] += whole_links[:, at]
        lengths: dict[tuple[int, int], dict[tuple[int, int], int]] = defaultdict(lambda: defaultdict(int))
        for pair, prices in zip(self.pairs, pairs, strict=True):
            whole = {key: round(price * fine) for key, price in prices.items() if round(price * fine)}
            for element, images in zip(self._group, self._images, strict=True):
                own = lengths[element[pair[0]], element[pair[1]]]
                for (step, route), length in whole.items():
                    own[step, images[route]] += length
        return self._fitting(table, lengths)

    def _fitting(self, table: Ints, lengths: dict[tuple[int, int], dict[tuple[int, int], int]]) -> PairDual:
        """The lengths as fractions that keep the rules of `PairDual` exactly, rounded as they may be."""
        capacities = self._problem.capacities
        loads = (zip(row.tolist(), capacities, strict=True) for row in table)
        used = max(1, *(sum(length * capacity for length, capacity in row) for row in loads))
        total: dict[tuple[int, int], int] = defaultdict(int)
        for own in lengths.values():
            for key, length in own.items():
                total[key] += length
        excess = Fraction(1)
        for (step, route), length in total.items():
            allowed = int(sum(table[step, link] for link in self._problem.routes[route].links))
            if allowed:
                excess = max(excess, Fraction(length, allowed))
            else:  # a price below the precision of the links'
                for own in lengths.values():
                    own.pop((step, route), None)
        scale = 1 / (excess * int(used))
        return PairDual(
            tuple(tuple(Fraction(int(length), int(used)) for length in row) for row in table),
            tuple(
                (*pair, tuple((*key, length * scale) for key, length in sorted(own.items())))
                for pair, own in sorted(lengths.items())
            ),
        )


class _Program:
    """Columns: the rounds of the steps, the messages of each orbit of routes and step, and the flows.

    Attributes:
        columns: how many.
    """

    def __init__(self, problem: ChunkProblem, steps: int, orbits: _Orbits) -> None:
        self._problem = problem
        self._steps = steps
        self._rows = rows = ProgramRows()
        self._unit = max(problem.capacities)
        self.columns = steps * (1 + orbits.routes)
        link_rows = rows.add_at_most_zero(steps * len(orbits.links)).reshape(steps, -1)
        self._link_rows = link_rows
        for step in range(steps):
            for at, link in enumerate(orbits.links):
                passing, times = np.unique(orbits.route[list(problem.passing[link])], return_counts=True)
                messages = steps + step * orbits.routes + passing
                row = np.full(len(messages) + 1, link_rows[step, at])
                values = np.array([*times, -problem.capacities[link] / self._unit])
                rows.put(row, np.array([*messages, step]), values)
        self._pairs = [self._add_pair(pair, orbits) for pair in orbits.pairs if self.columns <= MOST_COLUMNS]

    def prices(self, deadline: Deadline) -> tuple[Prices, list[dict[tuple[int, int], float]]]:
        """Those of the links' rows, and of each pair those of the messages that its flow is within."""
        prices = np.maximum(-self._rows.prices(self.columns, self._steps, deadline), 0)
        return prices[self._link_rows], [
            {key: float(prices[row]) for key, row in pair.items() if prices[row] > 0} for pair in self._pairs
        ]

    def _add_pair(self, pair: tuple[int, int], orbits: _Orbits) -> dict[tuple[int, int], int]:
        """A unit from a contributor to a receiver; the rows that keep it within the messages."""
        problem, steps, rows = self._problem, self._steps, self._rows
        origin, receiver = pair
        since, until = problem.steps_from(frozenset({origin})), problem.steps_to(receiver)
        conserved: dict[tuple[int, int], int] = {}

        def vertex(rank: int, time: int) -> int | None:
            first, last = since[rank], until[rank]
            if first is None or last is None or first > time or time > steps - last:
                return None
            if (rank, time) not in conserved:
                surplus = [float((rank, time) == (receiver, steps)) - float((rank, time) == (origin, 0))]
                conserved[rank, time] = int(rows.add(surplus, surplus)[0])
            return conserved[rank, time]

        within: dict[tuple[int, int], int] = {}
        for step in range(steps):
            arcs: list[tuple[int, int, int]] = [(rank, rank, -1) for rank in range(problem.ranks)]
            arcs += [(route.src, route.dst, index) for index, route in enumerate(problem.routes)]
            for src, dst, route in arcs:
                tail, head = vertex(src, step), vertex(dst, step + 1)
                if tail is None or head is None:
                    continue
                column, self.columns = self.columns, self.columns + 1
                rows.put(np.array([tail, head]), np.array([column] * 2), np.array([-1.0, 1.0]))
                if route >= 0:
                    row = int(rows.add_at_most_zero(1)[0])
                    within[step, route] = row
                    message = steps + step * orbits.routes + int(orbits.route[route])
                    rows.put(np.array([row, row]), np.array([column, message]), np.array([1.0, -1.0]))
        return within
