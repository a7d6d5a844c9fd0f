"""The least time of a collective at one size, by flows of dependence through intervals of time.

`synth.certification.tolls` says what such flows prove. Here a linear program finds the best tolls for a
number of intervals: it maximises the bytes that links could deliver in time, one flow for each rank that
symmetries do not take to another one, over classes of links that look alike from that rank. Its prices are
the tolls, and the checker says what they prove, so that nothing rests on floating point. The least number of
intervals that are enough for a size is searched for; one less is not enough.

Where a time is many times all latencies the window lines of `synth.bounds.time_limits` are as good, and no
`MOST_INTERVALS` intervals fill it that a latency is as long as: nothing is searched for there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from arborcast.synth.bounds.shortest_paths import FAR, ShortestPaths
from arborcast.synth.bounds.time_limits import time_limit
from arborcast.synth.certificate import Bound, Dual, TollFlow, Tolls
from arborcast.synth.certification.tolls import INWARD, OUTWARD, WHOLE, FlowRule, certified_bytes
from arborcast.synth.certification.windows import link_lengths, nearest, sources_and_targets
from arborcast.synth.collective import Collective, Kind
from arborcast.synth.deadline import NO_DEADLINE, Deadline
from arborcast.synth.errors import CollectiveError, InputError
from arborcast.synth.kernels.compiled import Ints
from arborcast.synth.lp.highs import new_model, run
from arborcast.synth.ports import ported
from arborcast.synth.symmetry.automorphisms import EFFORT, automorphisms_of
from arborcast.synth.symmetry.permutations import orbit_numbers
from arborcast.synth.symmetry.refinement import OrderedPartition, Refiner, around
from arborcast.synth.topology import Permutation, Topology, Vertex

MOST_INTERVALS = 48
"""Into which the time is cut; programs grow with the number of intervals."""

MOST_COLUMNS = 60_000
"""Of a program whose flows are told apart by classes of the ranks they come from; above, all go together."""

FINEST = 10**6
"""The largest toll; the others are rounded to whole ones."""

_FINER = range(1, 33)
"""Parts of a latency that are tried as an interval."""


def why_no_tolls(topology: Topology, collective: Collective) -> str | None:
    """Why flows through intervals say nothing of a collective; None where they do."""
    if collective.kind is Kind.CUSTOM or collective.sizes:
        return "blocks that differ have no limit by flows through intervals"
    if not any(link.latency_us for link in topology.links):
        return "without latencies there are no intervals"
    return None


def least_time(
    topology: Topology,
    collective: Collective,
    bound: Bound,
    size_bytes: int,
    deadline: Deadline = NO_DEADLINE,
) -> Tolls | None:
    """Tolls that prove the least time of a size, as far as intervals tell; it has the scope of the bound.

    Args:
        topology: the fabric.
        collective: on it, of equal blocks (`why_no_tolls`).
        bound: of the rate, above zero.
        size_bytes: of the whole buffer, positive.
        deadline: when to stop with the best so far.

    Returns:
        None where they say no more than `time_limit`, or the deadline passed before.
    """
    topology = ported(topology)
    known_us = time_limit(topology, collective, bound).at(size_bytes)
    step_us = _step(topology, known_us)
    if step_us is None:
        return None
    flows = _Flows.of(topology, collective, bound, step_us)
    first = max(flows.fewest, int(known_us / step_us))
    found: dict[int, Tolls | None] = {}

    def suffices(intervals: int) -> bool:
        """Whether so many intervals may be enough, by tolls that are kept."""
        found[intervals] = flows.tolls(intervals)
        tolls = found[intervals]
        return tolls is None or tolls.bytes >= size_bytes

    stride, low = 1, first - 1
    while not deadline.has_passed and low + stride <= 2 * MOST_INTERVALS and not suffices(low + stride):
        low, stride = low + stride, 2 * stride
    high = low + stride
    while not deadline.has_passed and high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if suffices(middle) else (middle, high)
    kept = [tolls for tolls in found.values() if tolls is not None and tolls.at(size_bytes) > known_us]
    return max(kept, key=lambda tolls: tolls.at(size_bytes), default=None)


def with_least_time(
    topology: Topology,
    collective: Collective,
    bound: Bound,
    size_bytes: int,
    deadline: Deadline = NO_DEADLINE,
) -> Bound:
    """A bound with tolls for a size beside what it has; the same one where they say no more than its lines.

    Raises:
        CollectiveError: of what is asked flows through intervals say nothing.
    """
    why = why_no_tolls(topology, collective)
    if why is not None:
        raise CollectiveError(f"{collective.kind} on {topology.name}: {why}")
    tolls = least_time(topology, collective, bound, size_bytes, deadline)
    return bound if tolls is None else replace(bound, times=(*bound.times, tolls))


def best_tolls(
    topology: Topology, collective: Collective, bound: Bound, step_us: Fraction, intervals: int
) -> Tolls | None:
    """The best tolls for a time, as HiGHS finds them.

    Args:
        topology: the fabric.
        collective: on it, of equal blocks.
        bound: of the rate, above zero.
        step_us: of an interval.
        intervals: of the time.

    Returns:
        None where ranks cannot reach each other in that time, or no tolls prove anything.
    """
    flows = _Flows.of(ported(topology), collective, bound, step_us)
    return flows.tolls(intervals) if intervals >= flows.fewest else None


def _step(topology: Topology, known_us: Fraction) -> Fraction | None:
    """The interval that rounds latencies down least, the shortest of those that are not too many.

    They fill twice the known time. None where they had to be longer than all latencies.
    """
    latencies = [link.latency_us for link in topology.links if link.latency_us]
    shortest = 2 * known_us / MOST_INTERVALS
    steps = {latency / part for latency in set(latencies) for part in _FINER}
    fitting = [step for step in steps if step >= shortest]

    def lost(step: Fraction) -> tuple[Fraction, Fraction]:
        return sum((latency % step / latency for latency in latencies), Fraction(0)), step

    return min(fitting, key=lost, default=None)


_INFINITE = float("inf")


@dataclass(frozen=True, slots=True)
class _Flow:
    """A flow without its tolls (`TollFlow`)."""

    terminal: Vertex
    outward: bool
    others: tuple[Vertex, ...]


@dataclass(frozen=True)
class _Classes:
    """Links that look alike from a terminal.

    Attributes:
        colour: of each vertex.
        links: of each class its links.
        orbit: of links under all symmetries, of each class.
    """

    colour: Ints
    links: tuple[tuple[int, ...], ...]
    orbit: tuple[int, ...]


@dataclass(frozen=True)
class _Flows:
    """All that the programs of one step have in common, whatever the number of intervals."""

    topology: Topology
    collective: Collective
    bound: Bound
    step_us: Fraction
    symmetries: tuple[Permutation, ...]
    vertex_orbits: Sequence[int]
    link_orbits: Sequence[int]

    @classmethod
    def of(cls, topology: Topology, collective: Collective, bound: Bound, step_us: Fraction) -> _Flows:
        members = collective.members
        colours = [(vertex in members) + 2 * (collective.root == vertex) for vertex in range(topology.size)]
        group = automorphisms_of(topology, colours=colours)
        place = {(link.src, link.dst): index for index, link in enumerate(topology.links)}
        images = [np.array(image, dtype=np.int64) for image in group.generators]
        moved = [np.array([place[image[a], image[b]] for a, b in place]) for image in group.generators]
        return cls(
            topology,
            collective,
            bound,
            step_us,
            group.generators,
            orbit_numbers(topology.size, images).tolist(),
            orbit_numbers(len(topology.links), moved).tolist(),
        )

    @cached_property
    def wait(self) -> Ints:
        """Of each link, in intervals."""
        return np.array([link.latency_us // self.step_us for link in self.topology.links], dtype=np.int64)

    @cached_property
    def terminals(self) -> tuple[Vertex, ...]:
        """A rank of each orbit of those that have a flow."""
        root = self.collective.root
        ends = self.collective.ranks if root is None else (root,)
        first = {self.vertex_orbits[rank]: rank for rank in sorted(ends, reverse=True)}
        return tuple(sorted(first.values()))

    @cached_property
    def classes(self) -> dict[Vertex, _Classes]:
        """Of each terminal."""
        topology = self.topology
        kinds = {(link.src, link.dst): self.link_orbits[at] for at, link in enumerate(topology.links)}
        refiner = Refiner(around(topology.size, kinds), EFFORT * len(self.terminals))
        found = {}
        for terminal in self.terminals:
            start = [
                (topology.is_switch(v), topology.abilities(v), v in self.collective.members, v == terminal)
                for v in range(topology.size)
            ]
            colour = refiner.refined(OrderedPartition.of(start)).colours
            names = {each: number for number, each in enumerate(sorted(set(colour)))}
            together: dict[tuple[int, int, int], list[int]] = defaultdict(list)
            for at, link in enumerate(topology.links):
                together[colour[link.src], colour[link.dst], self.link_orbits[at]].append(at)
            found[terminal] = _Classes(
                np.array([names[each] for each in colour]),
                tuple(map(tuple, together.values())),
                tuple(orbit for *_, orbit in together),
            )
        return found

    @cached_property
    def distances(self) -> dict[bool, Ints]:
        """Waits from each rank (row) to each vertex; to each rank where flows go outward."""
        ranks = np.arange(self.topology.ranks)
        ways = {outward: ShortestPaths(self.topology, turned=outward) for outward in (False, True)}
        return {outward: paths.distances(self.wait, ranks) for outward, paths in ways.items()}

    @cached_property
    def makers(self) -> dict[bool, dict[Vertex, list[tuple[Vertex, int]]]]:
        """Who can have made what leaves a vertex that merges nothing, and how long ago, by direction."""
        topology = self.topology
        found: dict[bool, dict[Vertex, list[tuple[Vertex, int]]]] = {}
        for outward in (False, True):
            merges = np.ones(topology.size, dtype=np.bool_)
            for vertex, switch in enumerate(topology.switches, topology.ranks):
                merges[vertex] = switch.multicasts if outward else switch.reduces
            heads = np.array([link.src if outward else link.dst for link in topology.links])
            lengths = np.where(merges[heads], -1, self.wait)
            backwards = ShortestPaths(topology, turned=not outward)
            found[outward] = {}
            for vertex in np.flatnonzero(~merges).tolist():
                far = backwards.tree(lengths, vertex).distance
                reached = np.flatnonzero(merges & (far < FAR))
                found[outward][vertex] = [(maker, int(far[maker])) for maker in reached.tolist()]
        return found

    def units(self, vertices: Sequence[Vertex], others: Sequence[int], outward: bool, intervals: int) -> Ints:
        """How many of the others a message may depend on that leaves a vertex (row) in an interval."""
        near = self.distances[outward][list(others)]
        by_then = (near[:, :, None] <= np.arange(intervals)).sum(axis=0)
        makers = self.makers[outward]
        found = np.zeros((len(vertices), intervals), dtype=np.int64)
        for row, vertex in enumerate(vertices):
            for maker, ago in makers.get(vertex, [(vertex, 0)]):
                if ago < intervals:
                    found[row, ago:] = np.maximum(found[row, ago:], by_then[maker, : intervals - ago])
        return found

    @cached_property
    def fewest(self) -> int:
        """Intervals within which every rank can reach, and be reached, as the collective asks."""
        ranks = list(self.collective.ranks)
        most = 0
        for outward, _ in _rules(self.collective.kind):
            most = max(most, int(self.distances[outward][np.ix_(ranks, list(self.terminals))].max()))
        return most + 1

    def tolls(self, intervals: int) -> Tolls | None:
        """The best tolls for so many intervals, at least `fewest`; None where rounding leaves none."""
        flows, weight = _Program(self, intervals).solve()
        own = any(rule.own for _, rule in _rules(self.collective.kind))
        symmetries = self.symmetries if own else ()
        tolls = Tolls(self.step_us, intervals, flows, weight, symmetries, Fraction(0))
        try:
            most = certified_bytes(self.topology, self.collective, self.bound.certificate, tolls)
        except InputError:
            return None
        return replace(tolls, bytes=most)


class _Program:
    """The most bytes that links deliver in a number of intervals, and the prices that say why.

    Columns are volumes, in what the fastest link carries in an interval: of the buffer; on a link of each
    orbit in each interval; of the blocks of each terminal, where blocks pay for themselves, on a link of each
    class; of each flow on all links of a class together, and what stays at its vertices.
    """

    def __init__(self, flows: _Flows, intervals: int) -> None:
        self.flows = flows
        self.intervals = intervals
        self.upper: list[float] = [_INFINITE]  # of each column; the buffer comes first
        self.rows: list[tuple[float, float]] = []
        self.entries: list[tuple[Ints, Ints, NDArray[np.float64]]] = []
        self.priced: list[tuple[_Flow, Ints, Ints, Ints]] = []  # a flow; its rows, with class and interval
        self._add_links()
        self._add_flows()
        self._add_lengths()

    def _columns(self, upper: NDArray[np.float64]) -> Ints:
        begin = len(self.upper)
        self.upper += upper.tolist()
        return np.arange(begin, len(self.upper))

    def _add_rows(self, count: int, lower: float, upper: float) -> Ints:
        begin = len(self.rows)
        self.rows += [(lower, upper)] * count
        return np.arange(begin, len(self.rows))

    def _enter(self, rows: Ints, columns: Ints, values: NDArray[Any] | float) -> None:
        self.entries.append(
            (rows, columns, np.broadcast_to(np.asarray(values, dtype=np.float64), rows.shape))
        )

    def _add_links(self) -> None:
        """What a link of each orbit carries in each interval."""
        links, orbits = self.flows.topology.links, self.flows.link_orbits
        fastest = max(link.bandwidth for link in links)
        rate = np.zeros(max(orbits) + 1)
        for link, orbit in zip(links, orbits, strict=True):
            rate[orbit] = float(link.bandwidth / fastest)
        self.fastest = fastest
        self.links = self._columns(np.repeat(rate, self.intervals)).reshape(-1, self.intervals)
        self.sizes = np.bincount(orbits)

    def _add_flows(self) -> None:
        flows, kind = self.flows, self.flows.collective.kind
        part = 1.0 if kind in WHOLE else 1 / len(flows.collective.ranks)
        shares = self._add_rows(self.links.size, -_INFINITE, 0).reshape(self.links.shape)
        owned = any(rule.own for _, rule in _rules(kind))
        if owned:
            self._enter(shares.ravel(), self.links.ravel(), -np.repeat(self.sizes, self.intervals))
        apart = self._columns_told_apart() <= MOST_COLUMNS
        for terminal in flows.terminals:
            classes = flows.classes[terminal]
            for outward, rule in _rules(kind):
                orbit = np.array(classes.orbit)
                carried = self.links[orbit]
                if rule.own:
                    carried = self._columns(np.full(carried.size, _INFINITE)).reshape(carried.shape)
                    alike = flows.vertex_orbits.count(flows.vertex_orbits[terminal])
                    many = np.array([len(links) for links in classes.links]) * alike
                    self._enter(shares[orbit].ravel(), carried.ravel(), np.repeat(many, self.intervals))
                for others in self._others(terminal, apart):
                    self._add_flow(_Flow(terminal, outward, others), rule, carried, part)

    def _columns_told_apart(self) -> int:
        """Columns, nearly, of all flows whose classes of ranks go apart."""
        count = 0
        for terminal in self.flows.terminals:
            classes = self.flows.classes[terminal]
            parts = len(list(self._others(terminal, True))) * len(list(_rules(self.flows.collective.kind)))
            count += (len(classes.links) + int(classes.colour.max()) + 1) * self.intervals * parts
        return count

    def _others(self, terminal: Vertex, apart: bool) -> Iterator[tuple[Vertex, ...]]:
        """The ranks at the other end of flows, told apart by class or all together."""
        others = [rank for rank in self.flows.collective.ranks if rank != terminal]
        colour = self.flows.classes[terminal].colour
        if not apart:
            yield tuple(others)
            return
        for each in sorted({int(colour[rank]) for rank in others}):
            yield tuple(rank for rank in others if colour[rank] == each)

    def _add_flow(self, flow: _Flow, rule: FlowRule, carried: Ints, part: float) -> None:
        """A flow from others to its terminal, in time that runs backwards where it goes outward."""
        flows, last = self.flows, self.intervals - 1
        classes = flows.classes[flow.terminal]
        firsts = [links[0] for links in classes.links]
        ends = np.array([(flows.topology.links[at].src, flows.topology.links[at].dst) for at in firsts])
        tails, heads = (ends[:, 1], ends[:, 0]) if flow.outward else (ends[:, 0], ends[:, 1])
        wait = flows.wait[firsts]
        units = flows.units(tails.tolist(), flow.others, flow.outward, self.intervals)
        units = units if rule.adds_up else np.minimum(units, 1)
        # To be of use it must still reach the terminal.
        onward = flows.distances[not flow.outward][flow.terminal]
        time = np.arange(self.intervals)
        passes = (units > 0) & (time + wait[:, None] + onward[heads][:, None] <= last)
        which, when = np.nonzero(passes)
        colour, count = classes.colour, int(classes.colour.max()) + 1
        balance = self._add_rows(count * self.intervals, 0, 0).reshape(count, self.intervals)
        column = self._columns(np.full(len(which), _INFINITE))
        self._enter(balance[colour[tails[which]], when], column, 1)
        self._enter(balance[colour[heads[which]], when + wait[which]], column, -1)
        stays = self._columns(np.full(count * last, _INFINITE)).reshape(count, last)
        self._enter(balance[:, :-1].ravel(), stays.ravel(), 1)
        self._enter(balance[:, 1:].ravel(), stays.ravel(), -1)
        sources, sizes = np.unique(colour[list(flow.others)], return_counts=True)
        self._enter(balance[sources, 0], np.zeros(len(sources), dtype=np.int64), -sizes * part)
        end = balance[colour[flow.terminal], last].reshape(1)
        self._enter(end, np.zeros(1, dtype=np.int64), len(flow.others) * part)
        limits = self._add_rows(len(which), -_INFINITE, 0)
        self._enter(limits, column, 1)
        real = last - wait[which] - when if flow.outward else when
        many = np.array([len(links) for links in classes.links])
        self._enter(limits, carried[which, real], -units[which, when] * many[which])
        self.priced.append((flow, limits, which, real))

    def _add_lengths(self) -> None:
        """What the lengths of the rate's certificate ask of all links together."""
        flows = self.flows
        certificate = flows.bound.certificate
        lengths, distance = link_lengths(flows.topology, flows.collective, certificate)
        sources, targets = sources_and_targets(flows.collective, certificate)
        before = nearest(flows.topology, flows.wait.tolist(), sources, turned=False)
        after = nearest(flows.topology, flows.wait.tolist(), targets, turned=True)
        asked = np.zeros(self.links.shape)
        for at, (link, length) in enumerate(zip(flows.topology.links, lengths, strict=True)):
            if length and link.src in before and link.dst in after:
                end = max(before[link.src], self.intervals - int(flows.wait[at]) - after[link.dst])
                asked[flows.link_orbits[at], before[link.src] : end] += float(length / distance)
        added = Fraction(0)
        if isinstance(certificate, Dual):
            for switch, price in zip(flows.topology.limited_adders, certificate.adders, strict=False):
                added += price * (flows.topology.switches[switch - flows.topology.ranks].adder or 0)
        offered = float(added / self.fastest / distance) * self.intervals
        self.total = self._add_rows(1, -offered, _INFINITE)
        used = np.nonzero(asked)
        self._enter(np.repeat(self.total, len(used[0])), self.links[used], asked[used])
        self._enter(self.total, np.zeros(1, dtype=np.int64), -1)
        self.distance = distance

    def solve(self) -> tuple[tuple[TollFlow, ...], Fraction]:
        """The flows with their tolls, and the weight of the rate's certificate."""
        prices = np.abs(self._prices())
        unit = max(prices[rows].max(initial=0.0) for _, rows, _, _ in self.priced)
        unit = max(unit, float(prices[self.total[0]])) / FINEST or 1.0
        found = []
        for flow, rows, which, when in self.priced:
            links = self.flows.classes[flow.terminal].links
            whole = np.rint(prices[rows] / unit).astype(np.int64)
            tolls = [
                (link, interval, toll)
                for place, interval, toll in zip(which.tolist(), when.tolist(), whole.tolist(), strict=True)
                if toll
                for link in links[place]
            ]
            if tolls:
                found.append(TollFlow(flow.terminal, flow.outward, flow.others, tuple(tolls)))
        return tuple(found), round(float(prices[self.total[0]]) / unit) / self.distance

    def _prices(self) -> NDArray[np.float64]:
        """What HiGHS says each row is worth, by an interior point: any prices prove something."""
        import highspy
        from scipy.sparse import coo_matrix

        untyped: Any = highspy
        rows, columns, values = (np.concatenate(each) for each in zip(*self.entries, strict=True))
        matrix = coo_matrix((values, (rows, columns)), shape=(len(self.rows), len(self.upper))).tocsc()
        program = untyped.HighsLp()
        program.num_row_, program.num_col_ = matrix.shape
        cost = np.zeros(matrix.shape[1])
        cost[0] = -1
        program.col_cost_, program.col_lower_ = cost, np.zeros(matrix.shape[1])
        program.col_upper_ = np.array(self.upper)
        program.row_lower_, program.row_upper_ = np.array(self.rows).T.copy()
        program.a_matrix_.format_ = untyped.MatrixFormat.kColwise
        program.a_matrix_.start_, program.a_matrix_.index_ = matrix.indptr, matrix.indices
        program.a_matrix_.value_ = matrix.data
        model = new_model(solver="ipm", run_crossover="off")
        model.passModel(program)
        if run(model) != "Optimal":  # where little can be moved, interior points may not settle
            model.setOptionValue("solver", "simplex")
            run(model)
        return np.array(model.getSolution().row_dual)


def _rules(kind: Kind) -> Iterator[tuple[bool, FlowRule]]:
    """The directions (outward or not) of a kind's flows."""
    for outward, rules in ((False, INWARD), (True, OUTWARD)):
        if kind in rules:
            yield outward, rules[kind]
