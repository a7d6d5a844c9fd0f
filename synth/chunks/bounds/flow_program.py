"""The limit by coupled flows: how long each step must last so that all blocks can flow at once.

Each block has a capacity of its own, within which there is a flow of one unit to each of its targets; the
capacities of all blocks together are what the links carry. Blocks of one target each need no copies, so
their flows are added up by source or by target. One linear program in floating point, whose prices, brought
to fractions, are lengths that prove a limit.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from arborcast.synth.chunks.bounds.time_expanded import WAIT, TimeExpanded
from arborcast.synth.chunks.problem.instance import ChunkProblem
from arborcast.synth.deadline import Deadline
from arborcast.synth.errors import NumericalError
from arborcast.synth.kernels.compiled import Ints
from arborcast.synth.lp.highs import new_model, run

Prices: TypeAlias = NDArray[np.float64]
"""One row per step, one entry per link of the topology; see `FlowPrices` for the unit."""


@dataclass(frozen=True, slots=True)
class Flow:
    """What flows together, from anywhere among some ranks or to one rank.

    Attributes:
        free: the ranks at which it may begin in any amount, or the one at which all of it ends.
        outward: whether `free` is where it begins.
        amounts: what must arrive at each rank at the end, or leave each rank at the start.
    """

    free: frozenset[int]
    outward: bool
    amounts: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class Coupled:
    """Flows that share their capacity: the copies of one block, or one flow alone."""

    flows: tuple[Flow, ...]


@dataclass(frozen=True, slots=True)
class FlowPrices:
    """The prices of an optimum, `unit` times the lengths that they are.

    Attributes:
        unit: the largest capacity of a link.
        links: of the links; in each step their sum weighted with capacities is at most `unit`.
        own: for each of the groups of flows the prices of each flow's share of the group's capacity; empty
            for a group of one, which has no capacity of its own.
    """

    unit: int
    links: Prices
    own: tuple[tuple[Prices, ...], ...]


def groups_of(problem: ChunkProblem) -> list[Coupled]:
    """The flows of a problem: of each demand to each target, or added up where nothing is copied."""
    if not problem.is_routing:
        return [
            Coupled(tuple(Flow(demand.sources, True, {target: 1}) for target in sorted(demand.targets)))
            for demand in problem.demands
        ]
    to: dict[frozenset[int], Counter[int]] = defaultdict(Counter)
    towards: dict[frozenset[int], Counter[int]] = defaultdict(Counter)
    for demand in problem.demands:
        to[demand.sources].update(demand.targets)
        towards[demand.targets].update(demand.sources)
    if len(to) <= len(towards) or any(len(demand.sources) > 1 for demand in problem.demands):
        return [Coupled((Flow(sources, True, amounts),)) for sources, amounts in to.items()]
    return [Coupled((Flow(target, False, amounts),)) for target, amounts in towards.items()]


@dataclass
class ProgramRows:
    """Rows of a linear program, gathered to be handed over at once."""

    count: int = 0
    lower: list[Prices] = field(default_factory=list)
    upper: list[Prices] = field(default_factory=list)
    row: list[Ints] = field(default_factory=list)
    column: list[Ints] = field(default_factory=list)
    value: list[Prices] = field(default_factory=list)

    def add(self, lower: Iterable[float], upper: Iterable[float]) -> Ints:
        """New rows between these limits; returns their numbers."""
        self.lower.append(np.array(list(lower), dtype=np.float64))
        self.upper.append(np.array(list(upper), dtype=np.float64))
        first, self.count = self.count, self.count + len(self.lower[-1])
        return np.arange(first, self.count, dtype=np.int64)

    def add_at_most_zero(self, count: int) -> Ints:
        """So many rows that must not be positive."""
        return self.add(np.full(count, -np.inf), np.zeros(count))

    def put(self, row: Ints, column: Ints, value: float | Prices) -> None:
        """Entries of the matrix; where the row is -1 there is none."""
        there = row >= 0
        self.row.append(row[there])
        self.column.append(column[there])
        self.value.append(np.broadcast_to(value, row.shape)[there].astype(np.float64))

    def prices(self, columns: int, costly: int, deadline: Deadline) -> Prices:
        """The prices of the rows at the least sum of the first `costly` of so many columns, none negative.

        They are those of a vertex, the same on every machine.

        Raises:
            TimedOutError: the deadline passed.
            NumericalError: HiGHS failed.
        """
        import highspy

        # The interior point method, which ends at a vertex too: many flows are alike, which the simplex
        # method takes ten times as long to sort out.
        model = new_model(solver="ipm", primal_feasibility_tolerance=1e-9, dual_feasibility_tolerance=1e-9)
        none = np.zeros(0, dtype=np.int32)
        costs = np.zeros(columns)
        costs[:costly] = 1
        ranges = (np.zeros(columns), np.full(columns, highspy.kHighsInf))
        model.addCols(columns, costs, *ranges, 0, none, none, np.zeros(0))
        order = np.argsort(np.concatenate(self.row), kind="stable")
        row = np.concatenate(self.row)[order]
        model.addRows(
            self.count,
            np.concatenate(self.lower),
            np.concatenate(self.upper),
            len(row),
            np.searchsorted(row, np.arange(self.count)).astype(np.int32),
            np.concatenate(self.column)[order].astype(np.int32),
            np.concatenate(self.value)[order],
        )
        if (status := run(model, deadline, what="the limit by flows")) != "Optimal":
            raise NumericalError(f"HiGHS ended with {status}")
        return np.array(model.getSolution().row_dual, dtype=np.float64)


class StepFlowProgram:
    """The least sum of the lengths of the steps with which all flows fit."""

    def __init__(
        self, problem: ChunkProblem, groups: Sequence[Coupled], steps: int, *, deadline: Deadline
    ) -> None:
        """Write it down.

        Raises:
            TimedOutError: the deadline passed.
        """
        self._graph = TimeExpanded.of(problem.topology, steps)
        self._rows = ProgramRows()
        self._columns = steps  # the first ones are the lengths of the steps
        # Capacities count from the largest, so that the tolerances of HiGHS mean the same for every unit.
        self._unit = int(self._graph.capacity.max())
        (arcs,) = np.nonzero(self._graph.link != WAIT)
        self._of_arc = np.full(len(self._graph.link), -1, dtype=np.int64)
        self._of_arc[arcs] = self._rows.add_at_most_zero(len(arcs))
        self._rows.put(self._of_arc[arcs], self._graph.step[arcs], -self._graph.capacity[arcs] / self._unit)
        self._own: list[list[tuple[Ints, Ints]]] = []
        for group in groups:
            deadline.check("the limit by flows")
            self._own.append(self._add_group(group))

    def solve(self, deadline: Deadline) -> FlowPrices:
        """The prices of the optimum that HiGHS ends with: a vertex, the same on every machine.

        Raises:
            TimedOutError: the deadline passed.
            NumericalError: HiGHS failed.
        """
        prices = np.maximum(-self._rows.prices(self._columns, self._graph.steps, deadline), 0)
        (arcs,) = np.nonzero(self._of_arc >= 0)
        return FlowPrices(
            self._unit,
            self._table(prices, arcs, self._of_arc[arcs]),
            tuple(tuple(self._table(prices, arcs, own) for arcs, own in group) for group in self._own),
        )

    def _table(self, prices: Prices, arcs: Ints, rows: Ints) -> Prices:
        """The prices of rows that each belong to an arc, as lengths of links in steps."""
        graph = self._graph
        table = np.zeros((graph.steps, len(graph.topology.links)))
        table[graph.step[arcs], graph.link[arcs]] = prices[rows]
        return table

    def _add_columns(self, arcs: Ints) -> Ints:
        first, self._columns = self._columns, self._columns + len(arcs)
        return np.arange(first, self._columns, dtype=np.int64)

    def _add_group(self, group: Coupled) -> list[tuple[Ints, Ints]]:
        """The arcs of each flow that have a row of the flow's own, with these rows."""
        useful = [self._useful(flow) for flow in group.flows]
        if len(group.flows) == 1:
            self._add_flow(group.flows[0], useful[0], self._of_arc)
            return []
        any_flow = np.logical_or.reduce(useful) & (self._graph.link != WAIT)
        (shared,) = np.nonzero(any_flow)
        capacity = np.full(len(any_flow), -1, dtype=np.int64)
        capacity[shared] = self._add_columns(shared)
        self._rows.put(self._of_arc[shared], capacity[shared], 1)
        own = []
        for flow, arcs in zip(group.flows, useful, strict=True):
            (within,) = np.nonzero(arcs & (self._graph.link != WAIT))
            limits = np.full(len(arcs), -1, dtype=np.int64)
            limits[within] = self._rows.add_at_most_zero(len(within))
            self._rows.put(limits[within], capacity[within], -1)
            self._add_flow(flow, arcs, limits)
            own.append((within, limits[within]))
        return own

    def _add_flow(self, flow: Flow, useful: NDArray[np.bool_], limits: Ints) -> None:
        """Columns for what flows on each arc, and rows that conserve it where it neither begins nor ends."""
        graph, rows = self._graph, self._rows
        (arcs,) = np.nonzero(useful)
        columns = self._add_columns(arcs)
        rows.put(limits[arcs], columns, 1)
        vertices = np.unique(np.concatenate([graph.tail[arcs], graph.head[arcs]]))
        vertices = vertices[~self._is_free(flow, vertices)]
        surplus = np.zeros(graph.size)
        for rank, amount in flow.amounts.items():
            if flow.outward:
                surplus[graph.at_end(rank)] = amount
            else:
                surplus[rank] = -amount
        conserved = np.full(graph.size, -1, dtype=np.int64)
        conserved[vertices] = rows.add(surplus[vertices], surplus[vertices])
        rows.put(conserved[graph.head[arcs]], columns, 1)
        rows.put(conserved[graph.tail[arcs]], columns, -1)

    def _useful(self, flow: Flow) -> NDArray[np.bool_]:
        """The arcs on some way of the flow that does not come back to where it began or leave its end."""
        graph = self._graph
        amounts = np.array(sorted(flow.amounts), dtype=np.int64)
        free = np.array(sorted(flow.free), dtype=np.int64)
        sources, targets = (free, amounts) if flow.outward else (amounts, free)
        after, before = graph.after(sources), graph.before(targets + graph.at_end(0))
        astray = self._is_free(flow, graph.head if flow.outward else graph.tail) & (graph.link != WAIT)
        useful: NDArray[np.bool_] = after[graph.tail] & before[graph.head] & ~astray
        return useful

    def _is_free(self, flow: Flow, vertices: Ints) -> NDArray[np.bool_]:
        free: NDArray[np.bool_] = np.isin(vertices % self._graph.topology.size, sorted(flow.free))
        return free
