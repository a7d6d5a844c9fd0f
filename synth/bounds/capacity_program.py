"""The linear program that splits the bandwidth of links between trees, with cuts generated as needed.

Trees of total weight x grow from their roots exactly when every set of vertices that holds roots and not
all ranks is left by as much capacity as the roots in it need, and every switch sends on what it receives
(Edmonds 1973; Bang-Jensen, Frank, Jackson 1995). `CapacityProgram` adds cuts found by maximum flows until
none is violated, and the last vertex is made exact. `synth.bounds.capacity_lp` has the forms for collectives.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np

from arborcast.synth.kernels.compiled import Flags, Ints
from arborcast.synth.kernels.max_flow import LARGEST_TOTAL, dinic, reachable, reaching, residual_graph
from arborcast.synth.lp.linear_program import ExactVertex, LinearProgram
from arborcast.synth.topology import Topology

_PARTS = 2**30  # floating values are separated in whole parts of the program's scale
_ENOUGH = 2**50  # more of these parts than trees can ever use on one link
_SLACK = 1e-7  # relative violation below which a floating solution counts as feasible


@dataclass(frozen=True, eq=False)
class Growth:
    """Trees of one direction: link i leads from `tails[i]` to `heads[i]` and has column `first + i`."""

    size: int
    tails: Ints
    heads: Ints
    first: int

    def graph(self, sources: Sequence[int]) -> tuple[Ints, Ints, Ints]:
        """Residual arcs of the links, then of links from a further vertex to the sources."""
        return residual_graph(
            self.size + 1,
            np.concatenate([self.tails, np.full(len(sources), self.size)]),
            np.concatenate([self.heads, np.array(sources, dtype=np.int64)]),
        )

    def leaving(self, side: Flags) -> list[int]:
        """Columns of the links that leave a set."""
        links = np.flatnonzero(side[self.tails] & ~side[self.heads])
        columns: list[int] = (self.first + links).tolist()
        return columns


@dataclass(frozen=True, eq=False)
class CapacityProgram:
    """The program of a collective on a topology, before any cut.

    Attributes:
        topology: the fabric.
        sinks: the ranks that every tree reaches.
        growths: one for each direction in which trees grow.
        supply: for each root, the column that says what its trees weigh.
        objective: one entry per column; what the rate is the sum of.
        shared: for each row of bandwidth, the columns that share it and the link whose bandwidth it is.
        scale: about the rate, in bandwidth units; what tolerances are relative to.
    """

    topology: Topology
    sinks: tuple[int, ...]
    growths: tuple[Growth, ...]
    supply: Mapping[int, int]
    objective: tuple[int, ...]
    shared: tuple[tuple[tuple[int, ...], int], ...]
    scale: int

    def solve(self) -> CapacitySolution:
        """The optimum, as an exact vertex.

        Raises:
            ArithmeticError: HiGHS fails, or its basis is singular.
        """
        program = self._start()
        known: set[tuple[int, bytes]] = set()
        while True:
            parts = np.round(program.solve() * (_PARTS / self.scale))
            rounded = np.clip(parts, 0, _ENOUGH).astype(np.int64)
            if self._add_violated(program, known, rounded, _SLACK):
                continue
            vertex = program.exact()
            whole = _in_whole_parts(vertex.values)
            if whole is None or not self._add_violated(program, known, whole, 0.0):
                return CapacitySolution(self, vertex)

    def _start(self) -> LinearProgram:
        """Bandwidths, conservation at switches, and the cuts round single ranks."""
        topology = self.topology
        program = LinearProgram(self.objective, scale=self.scale)
        for columns, link in self.shared:
            program.add_row(columns, [1] * len(columns), upper=topology.capacities[link])
        for growth in self.growths:
            for switch in range(topology.ranks, topology.size):
                out = (growth.first + np.flatnonzero(growth.tails == switch)).tolist()
                into = (growth.first + np.flatnonzero(growth.heads == switch)).tolist()
                program.add_row(out + into, [1] * len(out) + [-1] * len(into), lower=0, upper=0)
            alone = np.eye(topology.size, dtype=np.bool_)
            for sink in self.sinks:
                self._add_cut(program, growth, ~alone[sink])
            for root in self.supply:
                self._add_cut(program, growth, alone[root])
        return program

    def _add_cut(self, program: LinearProgram, growth: Growth, side: Flags) -> None:
        needed: dict[int, int] = {}
        for root, column in self.supply.items():
            if side[root]:
                needed[column] = needed.get(column, 0) + 1
        if needed:
            leaving = growth.leaving(side)
            coefficients = [1] * len(leaving) + [-count for count in needed.values()]
            program.add_row(leaving + list(needed), coefficients, lower=0)

    def _add_violated(
        self, program: LinearProgram, known: set[tuple[int, bytes]], values: Ints, slack: float
    ) -> int:
        """Add the new cuts that whole values violate by more than a relative slack; returns how many."""
        before = len(known)
        for growth in self.growths:
            for side in self.violated(growth, values, slack):
                if (growth.first, side.tobytes()) not in known:
                    known.add((growth.first, side.tobytes()))
                    self._add_cut(program, growth, side)
        return len(known) - before

    def violated(self, growth: Growth, values: Ints, slack: float) -> Iterator[Flags]:
        """The largest and the smallest minimum cut between roots and sink, where they carry too little.

        The smallest alone says the same about many sinks and little about each.
        """
        sources = sorted(self.supply)
        graph = growth.graph(sources)
        supplied = np.array([values[self.supply[root]] for root in sources], dtype=np.int64)
        full = np.zeros(len(graph[2]), dtype=np.int64)
        full[0::2] = np.concatenate([values[growth.first : growth.first + len(growth.tails)], supplied])
        total = int(supplied.sum())
        for sink in self.sinks:
            residual = full.copy()
            if dinic(*graph, residual, growth.size, sink, total) < total - int(total * slack):
                yield ~reaching(*graph, residual, sink)[:-1]
                yield reachable(*graph, residual, growth.size)[:-1]


@dataclass(frozen=True, eq=False)
class CapacitySolution:
    """An optimal vertex, exactly, in bandwidth units of the topology."""

    program: CapacityProgram
    vertex: ExactVertex

    @property
    def rate(self) -> Fraction:
        """The objective in GB/s."""
        pairs = zip(self.program.objective, self.vertex.values, strict=True)
        return self._unit * sum((weight * value for weight, value in pairs), Fraction(0))

    @property
    def lengths(self) -> tuple[Fraction, ...]:
        """The prices of the links' bandwidths, the largest scaled to 1, as lengths for a dual."""
        lengths = [Fraction(0)] * len(self.program.topology.links)
        index = {(link.src, link.dst): i for i, link in enumerate(self.program.topology.links)}
        for row, (columns, link) in enumerate(self.program.shared):
            price = max(Fraction(0), self.vertex.prices[row])
            lengths[link] = price
            if len(columns) == 2 and len(self.program.growths) == 1:  # the row is the link's both ways
                ends = self.program.topology.links[link]
                lengths[index[ends.dst, ends.src]] = price
        largest = max(lengths)
        return tuple(length / largest for length in lengths) if largest else tuple(lengths)

    @property
    def roots(self) -> dict[int, Fraction]:
        """The GB/s of the trees of each root that has any."""
        weights = {root: self._unit * self.vertex.values[c] for root, c in self.program.supply.items()}
        return {root: weight for root, weight in weights.items() if weight}

    def topology(self, growth: Growth) -> Topology:
        """The fabric with the bandwidth that trees of one direction may use; unused links are gone."""
        capacity = self.vertex.values[growth.first : growth.first + len(growth.tails)]
        links = (
            replace(link, bandwidth=self._unit * value)
            for link, value in zip(self.program.topology.links, capacity, strict=True)
            if value
        )
        return replace(self.program.topology, links=tuple(links), symmetries=())

    def is_feasible(self) -> bool:
        """Whether bandwidths, conservation and all cuts hold exactly, in int64 arithmetic."""
        values, program, topology = self.vertex.values, self.program, self.program.topology
        fits = all(
            sum(values[column] for column in columns) <= topology.capacities[link]
            for columns, link in program.shared
        )
        switches = range(topology.ranks, topology.size)
        conserved = not any(self.topology(growth).unbalanced(switches) for growth in program.growths)
        whole = _in_whole_parts(values)
        if min(values) < 0 or not fits or not conserved or whole is None:
            return False
        return not any(True for growth in program.growths for _ in program.violated(growth, whole, 0.0))

    @property
    def _unit(self) -> Fraction:
        return self.program.topology.bandwidth_unit


def _in_whole_parts(values: Sequence[Fraction]) -> Ints | None:
    """The values in parts of their common denominator; None where those do not fit int64."""
    common = math.lcm(*(value.denominator for value in values))
    whole = [int(value * common) for value in values]
    if 2 * sum(map(abs, whole)) > LARGEST_TOTAL:
        return None
    return np.maximum(0, np.array(whole, dtype=np.int64))
