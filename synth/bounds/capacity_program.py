"""The linear program that splits the bandwidth of links between trees, with cuts generated as needed.

Trees of total weight x grow from their roots exactly when every set of vertices that holds roots and not
all ranks is left by as much capacity as the roots in it need, and every switch sends on what it receives
(Edmonds 1973; Bang-Jensen, Frank, Jackson 1995). `optimum` adds cuts found by maximum flows until none is
violated, and makes the last vertex exact. `synth.bounds.capacity_lp` has the forms for collectives,
`synth.groups.sharing_lp` the one that several groups share.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np

from arborcast.synth.deadline import NO_DEADLINE, Deadline
from arborcast.synth.kernels.compiled import Flags, Ints
from arborcast.synth.kernels.link_graph import LinkGraph
from arborcast.synth.kernels.max_flow import LARGEST_TOTAL, dinic, reachable, reaching, residual_graph
from arborcast.synth.lp.linear_program import ExactVertex, LinearProgram
from arborcast.synth.topology import Topology

_PARTS = 2**30  # floating values are separated in whole parts of the program's scale
_ENOUGH = 2**50  # more of these parts than trees can ever use on one link
_SLACK = 1e-7  # relative violation below which a floating solution counts as feasible


@dataclass(frozen=True, eq=False)
class TreeDirection:
    """Trees that grow in one direction along the links of a graph.

    Attributes:
        graph: the links as trees pass them.
        columns: of the bandwidth that trees may use of each link.
        supply: for each root, the column that says what its trees weigh.
        sinks: the ranks that every tree reaches.
    """

    graph: LinkGraph
    columns: Ints
    supply: Mapping[int, int]
    sinks: tuple[int, ...]

    def cut(self, side: Flags) -> Counter[int]:
        """What a set of vertices needs to be at least 0: the links that leave it, less the supply inside."""
        row = Counter(self.columns[side[self.graph.tails] & ~side[self.graph.heads]].tolist())
        for root, column in self.supply.items():
            if side[root]:
                row[column] -= 1
        return row

    def alone(self) -> Iterator[Flags]:
        """All vertices but one sink, then one root only: the cuts that a program starts with."""
        alone = np.eye(self.graph.size, dtype=np.bool_)
        for side in [~alone[sink] for sink in self.sinks] + [alone[root] for root in self.supply]:
            if any(side[root] for root in self.supply):
                yield side

    def violated(self, values: Ints, slack: float) -> Iterator[Flags]:
        """The largest and the smallest minimum cut between roots and sink, where they carry too little.

        The smallest alone says the same about many sinks and little about each.
        """
        sources, size = sorted(self.supply), self.graph.size
        graph = residual_graph(
            size + 1,
            np.concatenate([self.graph.tails, np.full(len(sources), size)]),
            np.concatenate([self.graph.heads, np.array(sources, dtype=np.int64)]),
        )
        supplied = values[[self.supply[root] for root in sources]]
        full = np.zeros(len(graph[2]), dtype=np.int64)
        full[0::2] = np.concatenate([values[self.columns], supplied])
        total = int(supplied.sum())
        for sink in self.sinks:
            residual = full.copy()
            if dinic(*graph, residual, size, sink, total) < total - int(total * slack):
                yield ~reaching(*graph, residual, sink)[:-1]
                yield reachable(*graph, residual, size)[:-1]


Cuts = dict[tuple[int, bytes], Counter[int]]
"""Rows of cuts by the number of their direction and their vertices."""


def optimum(
    program: LinearProgram,
    directions: Sequence[TreeDirection],
    cuts: Cuts,
    deadline: Deadline = NO_DEADLINE,
) -> ExactVertex:
    """The optimum that satisfies every cut, exactly; where its values fit no int64, as HiGHS sees them.

    Args:
        program: without the cuts that are still to be found.
        directions: of the trees.
        cuts: those that are known to the program; those that are found join them.
        deadline: when to give up.

    Raises:
        TimedOutError: the deadline passed.
        ArithmeticError: HiGHS fails, or its basis is singular.
    """

    def violated(values: Ints, slack: float) -> int:
        """Add the new cuts that whole values violate by more than a relative slack; returns how many."""
        before = len(cuts)
        for number, direction in enumerate(directions):
            for side in direction.violated(values, slack):
                key = (number, side.tobytes())
                if key not in cuts:
                    cuts[key] = direction.cut(side)
                    add_cut(program, cuts[key])
        return len(cuts) - before

    while True:
        deadline.check("sharing the bandwidth of links among trees")
        parts = np.round(program.solve(deadline) * (_PARTS / program.scale))
        if violated(np.clip(parts, 0, _ENOUGH).astype(np.int64), _SLACK):
            continue
        vertex = program.exact()
        whole = in_whole_parts(vertex.values)
        if whole is None or not violated(whole, 0.0):
            return vertex


def add_cut(program: LinearProgram, row: Counter[int]) -> None:
    """Require a sum of columns to be at least 0."""
    program.add_row(list(row), list(row.values()), lower=0)


@dataclass(frozen=True, eq=False)
class CapacityProgram:
    """The program of a collective on a topology, before any cut.

    Attributes:
        topology: the fabric.
        directions: those in which trees grow.
        objective: one entry per column; what the rate is the sum of.
        shared: for each row of bandwidth, the columns that share it and the link whose bandwidth it is.
        scale: about the rate, in bandwidth units; what tolerances are relative to.
    """

    topology: Topology
    directions: tuple[TreeDirection, ...]
    objective: tuple[int, ...]
    shared: tuple[tuple[tuple[int, ...], int], ...]
    scale: int

    def solve(self) -> CapacitySolution:
        """The optimum, as an exact vertex.

        Raises:
            ArithmeticError: HiGHS fails, or its basis is singular.
        """
        topology = self.topology
        program = LinearProgram(self.objective, scale=self.scale)
        for columns, link in self.shared:
            program.add_row(columns, [1] * len(columns), upper=topology.capacities[link])
        for direction in self.directions:
            tails, heads = direction.graph.tails, direction.graph.heads
            for switch in range(topology.ranks, topology.size):
                out = direction.columns[tails == switch].tolist()
                into = direction.columns[heads == switch].tolist()
                program.add_row(out + into, [1] * len(out) + [-1] * len(into), lower=0, upper=0)
            for side in direction.alone():
                add_cut(program, direction.cut(side))
        return CapacitySolution(self, optimum(program, self.directions, {}))


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
        back = LinkGraph(self.program.topology).reverse
        for row, (columns, link) in enumerate(self.program.shared):
            lengths[link] = max(Fraction(0), self.vertex.prices[row])
            if len(columns) == 2 and len(self.program.directions) == 1:  # the row is the link's both ways
                lengths[back[link]] = lengths[link]
        largest = max(lengths)
        return tuple(length / largest for length in lengths) if largest else tuple(lengths)

    @property
    def roots(self) -> dict[int, Fraction]:
        """The GB/s of the trees of each root that has any."""
        supply = self.program.directions[0].supply
        weights = {root: self._unit * self.vertex.values[column] for root, column in supply.items()}
        return {root: weight for root, weight in weights.items() if weight}

    def topology(self, direction: TreeDirection) -> Topology:
        """The fabric with the bandwidth that trees of one direction may use; unused links are gone."""
        links = (
            replace(link, bandwidth=self._unit * self.vertex.values[column])
            for link, column in zip(self.program.topology.links, direction.columns, strict=True)
            if self.vertex.values[column]
        )
        return replace(self.program.topology, links=tuple(links), symmetries=())

    def is_feasible(self) -> bool:
        """Whether bandwidths, conservation and all cuts hold exactly, in int64 arithmetic."""
        values, program, topology = self.vertex.values, self.program, self.program.topology
        if min(values) < 0:
            return False
        fits = all(
            sum(values[column] for column in columns) <= topology.capacities[link]
            for columns, link in program.shared
        )
        switches = range(topology.ranks, topology.size)
        conserved = not any(self.topology(each).unbalanced(switches) for each in program.directions)
        whole = in_whole_parts(values)
        if not fits or not conserved or whole is None:
            return False
        return not any(True for direction in program.directions for _ in direction.violated(whole, 0.0))

    @property
    def _unit(self) -> Fraction:
        return self.program.topology.bandwidth_unit


def in_whole_parts(values: Sequence[Fraction]) -> Ints | None:
    """The values in parts of their common denominator; None where those do not fit int64."""
    common = math.lcm(*(value.denominator for value in values))
    whole = [int(value * common) for value in values]
    if 2 * sum(map(abs, whole)) > LARGEST_TOTAL:
        return None
    return np.maximum(0, np.array(whole, dtype=np.int64))
