"""How many rounds C chunks in S steps may need: a guess from flows, before anybody searches for a schedule.

Rounds are whole numbers here and everything else is fractional. What several targets share of a link is left
out where data is copied: what flows to each target must fit on its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from arborcast.synth.chunks.bounds.time_expanded import WAIT, TimeExpanded
from arborcast.synth.chunks.encodings.ilp import Sources, flow_groups
from arborcast.synth.chunks.problem.instance import ChunkProblem
from arborcast.synth.chunks.problem.orbits import ChunkOrbits
from arborcast.synth.deadline import Deadline
from arborcast.synth.errors import InfeasibleError, TimedOutError
from arborcast.synth.kernels.compiled import Flags
from arborcast.synth.lp.highs import limit_time, new_model


def least_rounds(problem: ChunkProblem, chunks: int, steps: int, *, deadline: Deadline) -> int:
    """The fewest rounds in which the flows fit: a guide for which (C, R) to try, and no proof.

    HiGHS computes in floating point, so that not even "no schedule has fewer" is certain, although the
    program is a relaxation. `synth.chunks.bounds.flow_bounds` proves limits.

    Args:
        problem: what is to be done.
        chunks: C, of each demand.
        steps: S.
        deadline: of the computation.

    Raises:
        InfeasibleError: some target cannot be reached in so many steps.
        TimedOutError: the deadline passed.
        ArithmeticError: HiGHS failed.
    """
    import highspy

    untyped: Any = highspy
    deadline.check("the guess of rounds")
    program = _FlowProgram(TimeExpanded.of(problem.topology, steps), shares=problem.is_routing)
    for commodity in _commodities(problem, chunks):
        program.add(commodity)
    model = new_model(mip_rel_gap=0.0)
    program.pass_to(model, untyped)
    limit_time(model, deadline.left_s)
    model.run()
    status = model.getModelStatus()
    if status == untyped.HighsModelStatus.kTimeLimit:
        raise TimedOutError(f"the guess of rounds did not end within {deadline.allowed_s} s")
    if status in {untyped.HighsModelStatus.kInfeasible, untyped.HighsModelStatus.kUnboundedOrInfeasible}:
        raise InfeasibleError(f"some target cannot be reached in {steps} steps")
    if status != untyped.HighsModelStatus.kOptimal:
        raise ArithmeticError(f"HiGHS ended with {model.modelStatusToString(status)}")
    total: float = model.getObjectiveValue()
    return round(total)


@dataclass(frozen=True)
class _Commodity:
    """What flows together.

    Attributes:
        supply: how many chunks start at one or other of some sources.
        wanted: how many chunks each target waits for.
    """

    supply: Mapping[Sources, int]
    wanted: Mapping[int, int]


def _commodities(problem: ChunkProblem, chunks: int) -> Iterable[_Commodity]:
    if problem.is_routing:
        for group in flow_groups(ChunkOrbits.trivial(problem, chunks)):
            yield _Commodity(group.supply, group.wanted)
        return
    for target in sorted(frozenset[int]().union(*(demand.targets for demand in problem.demands))):
        supply: Counter[Sources] = Counter()
        for demand in problem.demands:
            if target in demand.targets:
                supply[demand.sources] += chunks
        yield _Commodity(supply, {target: supply.total()})


class _FlowProgram:
    """Columns and rows; the first columns are the rounds of the steps."""

    def __init__(self, graph: TimeExpanded, *, shares: bool) -> None:
        """`shares`: whether all commodities together must fit on a link, and not each on its own."""
        self._graph = graph
        self._shares = shares
        self._columns = graph.steps
        self._rows = 0
        self._entries: list[tuple[int, int, int]] = []
        self._bounds: list[tuple[float, float]] = []
        self._limits: dict[int, int] = {}  # by arc

    def add(self, commodity: _Commodity) -> None:
        """Columns for the flow of a commodity, and the rows that conserve it and hold it in the rounds."""
        graph = self._graph
        if not self._shares:
            self._limits = {}
        useful = self._useful(commodity)
        balance: dict[int, list[tuple[int, int]]] = {}
        for arc in np.flatnonzero(useful[graph.tail] & useful[graph.head]).tolist():
            column = self._new_column()
            balance.setdefault(int(graph.tail[arc]), []).append((column, -1))
            balance.setdefault(int(graph.head[arc]), []).append((column, 1))
            if graph.link[arc] != WAIT:
                self._entries.append((self._limit(arc), column, 1))
        for sources, count in commodity.supply.items():
            row = self._new_row(count, count)
            for rank in sorted(sources):
                column = self._new_column()
                self._entries.append((row, column, 1))
                balance.setdefault(rank, []).append((column, 1))
        wanted = {graph.at_end(target): count for target, count in commodity.wanted.items()}
        for vertex in sorted(balance.keys() | wanted.keys()):
            stays = wanted.get(vertex, 0)
            row = self._new_row(stays, stays)
            self._entries += [(row, column, sign) for column, sign in balance.get(vertex, [])]

    def pass_to(self, model: Any, highspy: Any) -> None:
        """Hand everything to HiGHS."""
        steps, columns = self._graph.steps, self._columns
        least, cost, whole = np.zeros(columns), np.zeros(columns), np.zeros(columns, dtype=np.int32)
        least[:steps], cost[:steps] = 1, 1
        whole[:steps] = int(highspy.HighsVarType.kInteger)
        entries = np.array(sorted(self._entries), dtype=np.int64)
        model.passModel(
            columns,
            self._rows,
            len(entries),
            int(highspy.MatrixFormat.kRowwise),
            int(highspy.ObjSense.kMinimize),
            0.0,
            cost,
            least,
            np.full(columns, highspy.kHighsInf),
            np.array([bounds[0] for bounds in self._bounds]),
            np.array([bounds[1] for bounds in self._bounds]),
            np.searchsorted(entries[:, 0], np.arange(self._rows)).astype(np.int32),
            entries[:, 1].astype(np.int32),
            entries[:, 2].astype(np.float64),
            whole,
        )

    def _useful(self, commodity: _Commodity) -> Flags:
        """The vertices on some way from a source to a target."""
        starts = np.array(sorted(frozenset[int]().union(*commodity.supply)), dtype=np.int64)
        ends = np.array([self._graph.at_end(target) for target in sorted(commodity.wanted)], dtype=np.int64)
        useful: Flags = self._graph.after(starts) & self._graph.before(ends)
        return useful

    def _limit(self, arc: int) -> int:
        """The row that holds what flows over an arc in the rounds of its step."""
        if arc not in self._limits:
            row = self._limits[arc] = self._new_row(-float("inf"), 0)
            self._entries.append((row, int(self._graph.step[arc]), -int(self._graph.capacity[arc])))
        return self._limits[arc]

    def _new_column(self) -> int:
        self._columns += 1
        return self._columns - 1

    def _new_row(self, least: float, most: float) -> int:
        self._bounds.append((least, most))
        self._rows += 1
        return self._rows - 1
