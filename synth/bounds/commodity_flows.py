"""The linear program of flows over a fabric: the least time, warm from one matrix of amounts to the next.

The flows of one commodity, what comes from the same ranks, are added up; amounts stand on the right sides of
the rows alone, so that the last basis stays dual feasible and the dual simplex goes on from there. Floats
propose: lengths are rounded to fractions whose proof is exact, flows to whole units.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from arborcast.synth.deadline import NO_DEADLINE, Deadline
from arborcast.synth.errors import NumericalError
from arborcast.synth.kernels.compiled import Ints
from arborcast.synth.kernels.link_graph import LinkGraph
from arborcast.synth.lp.highs import new_model, run
from arborcast.synth.lp.linear_program import rationalize


@dataclass(frozen=True, eq=False)
class Flows:
    """What the program proposes.

    Attributes:
        lengths: one per link, whose proof by weak duality is exact, the largest 1.
        flow: of each commodity over each link, in the unit of the amounts.
    """

    lengths: tuple[Fraction, ...]
    flow: NDArray[np.float64]


class CommodityFlows:
    """The program of one fabric.

    Args:
        graph: its links.
        capacity: of each link, in the order of the topology.
        sources: of each commodity the ranks that hold it.
    """

    def __init__(self, graph: LinkGraph, capacity: Ints, sources: Sequence[Set[int]]) -> None:
        count, links = len(sources), len(capacity)
        self._shape = count, links
        self._scale = float(capacity.max())
        self._model = new_model(solver="simplex", simplex_strategy=1, presolve="off")
        columns = 1 + count * links
        cost = np.zeros(columns)
        cost[0] = 1.0
        self._model.addVars(columns, np.zeros(columns), np.full(columns, np.inf))
        self._model.changeColsCost(columns, np.arange(columns, dtype=np.int32), cost)
        # Column 0 is the time; then come the flows of each commodity in the order of the links.
        index: list[Ints] = []
        value: list[NDArray[np.float64]] = []
        for link in range(links):
            index.append(np.append(0, 1 + link + links * np.arange(count)))
            value.append(np.append(-capacity[link] / self._scale, np.ones(count)))
        ends: list[tuple[int, int]] = []
        for commodity, held_by in enumerate(sources):
            for vertex in range(graph.size):
                if vertex in held_by:
                    continue
                into = 1 + commodity * links + np.flatnonzero(graph.heads == vertex)
                out = 1 + commodity * links + np.flatnonzero(graph.tails == vertex)
                ends.append((commodity, vertex))
                index.append(np.concatenate([into, out]))
                value.append(np.concatenate([np.ones(len(into)), -np.ones(len(out))]))
        starts = np.cumsum([0, *map(len, index)])
        lower = np.concatenate([np.full(links, -np.inf), np.zeros(len(ends))])
        self._model.addRows(
            len(lower),
            lower,
            np.zeros(len(lower)),
            int(starts[-1]),
            starts[:-1].astype(np.int32),
            np.concatenate(index).astype(np.int32),
            np.concatenate(value),
        )
        self._ends = np.array(ends, dtype=np.int64).T
        self._rows = np.arange(links, len(lower), dtype=np.int32)

    def solve(self, amounts: Ints, deadline: Deadline = NO_DEADLINE) -> Flows:
        """The best flows for what each vertex (column) gets of each commodity (row).

        Raises:
            TimedOutError: the deadline passed.
            NumericalError: HiGHS ended without an optimum.
        """
        unit = amounts.max()
        wanted = amounts[tuple(self._ends)] / unit
        self._model.changeRowsBounds(len(self._rows), self._rows, wanted, wanted)
        if (status := run(self._model, deadline, what="the linear program of flows")) != "Optimal":
            raise NumericalError(f"HiGHS ended with {status}")
        solution = self._model.getSolution()
        prices = np.abs(np.array(solution.row_dual[: self._shape[1]]))
        flow = np.array(solution.col_value)[1:].reshape(self._shape) * unit
        return Flows(rationalize(prices / prices.max()), flow)
