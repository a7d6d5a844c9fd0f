"""Which strategy each operator takes: an integer program, solved to the proof.

    minimise    sum of s[v, i] * cost(v, i) + sum of y[x, a, d] * cost(x, a, d)
    one strategy for each class of operators:     sum over i of s[v, i] = 1
    e, how a reader r of a value x gets it:       sum over d of e[r, a, d] = sum of s of the maker that make a
                                                  sum over a of e[r, a, d] = sum of s of the reader that ask d
    readers that ask alike share one way:         y[x, a, d] >= e[r, a, d]
    memory:                                       sum of s * memory + sum of y * memory <= limit

Rows of e are marginals of 0 and 1, so e is whole where s is (Alpa's linearised products, by how a tensor lies
instead of by strategy, which are far fewer). A parameter that one operator reads has no s: for each demand
only those ways to store it remain of which none is better in time and memory.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from arborcast.pipeline.errors import MemoryShortError, PlanError
from arborcast.pipeline.meshes import Spec
from arborcast.pipeline.sharding.evaluation import Cost, cost_of
from arborcast.pipeline.sharding.graph import Graph, MergedOperator, Tensor
from arborcast.pipeline.sharding.setting import Setting
from arborcast.pipeline.sharding.specs import spec_of
from arborcast.pipeline.sharding.strategies import ReadLayout, ReshardingCost, Strategy, crossing, strategies
from arborcast.synth.lp.highs import new_model, run

Allowed = Callable[[MergedOperator, Strategy], bool]
"""Whether an operator may be divided so."""

State = tuple[Spec, Spec | None]
"""How a value lies; of a parameter also how its update is divided."""


@dataclass(frozen=True)
class Sharding:
    """A strategy for every operator.

    Attributes:
        graph: the operators.
        chosen: one strategy for each; None for inputs of the model.
        cost: of one rank, as `cost_of` counts it.
        bound_ps: no choice in scope takes less for a step.
        total_ps: of a step.
        scope: over which choices the bound holds.
    """

    graph: Graph
    chosen: tuple[Strategy | None, ...]
    cost: Cost
    bound_ps: int
    total_ps: int
    scope: str

    @property
    def is_optimal(self) -> bool:
        """Whether nothing in scope is better by more than what floats leave open (a billionth)."""
        return self.total_ps - self.bound_ps <= self.total_ps * 10**-9 + 1


def shard(
    graph: Graph,
    setting: Setting,
    *,
    memory_bytes: int | None = None,
    allowed: Allowed | None = None,
    alike: bool = True,
) -> Sharding:
    """The choice of strategies that takes the least time for a step.

    Args:
        graph: the operators.
        setting: mesh, prices, device, microbatches.
        memory_bytes: of one rank that may be used; None for no limit.
        allowed: restricts the strategies, as `layouts` does.
        alike: whether repeated blocks are divided alike, which makes the program as small as one of them.

    Raises:
        PlanError: nothing fits the memory (says by how much).
    """
    words = f"mesh {setting.prices.mesh} of ranks {list(setting.prices.mesh.ranks)}"
    program = _HighsProgram(graph, setting, alike, allowed)
    found = program.solve(memory_bytes)
    if found is None and memory_bytes is None:
        raise PlanError(f"{words}: no choice of strategies that its links allow for {graph.name}")
    if found is None:
        least = program.least_memory()
        raise MemoryShortError(
            f"{words}: every rank must have at least {least} bytes for {graph.name}, got {memory_bytes}: "
            f"{least - (memory_bytes or 0)} short",
            least,
        )
    chosen, bound = found
    cost = cost_of(graph, chosen, setting)
    total = cost.total_ps(setting.microbatches)
    scope = "every choice of strategies" if allowed is None else "every choice in this layout"
    scope += " in which repeated blocks are divided alike" if alike else ""
    return Sharding(graph, tuple(chosen), cost, min(total, math.ceil(bound)), total, scope)


def least_memory(graph: Graph, setting: Setting, *, allowed: Allowed | None = None) -> int:
    """Bytes of one rank without which no choice fits, also of those that divide repeated blocks unlike.

    Raises:
        PlanError: links do not allow any choice.
    """
    return _HighsProgram(graph, setting, False, allowed).least_memory()


@dataclass(slots=True)
class _CrossingUse:
    """A value that crosses, of all members of a class: who makes and who reads it."""

    source: int
    which: int
    readers: tuple[tuple[int, int], ...]  # class and number among what it reads
    count: int


class _HighsProgram:
    """Columns and rows for HiGHS; a column is a binary or follows from binaries."""

    def __init__(self, graph: Graph, setting: Setting, alike: bool, allowed: Allowed | None) -> None:
        self.graph, self.setting = graph, setting
        self.grouping = grouping = graph.classes if alike else tuple(range(len(graph.operators)))
        self.costs: list[int] = []
        self.memory: list[int] = []
        self.whole: list[bool] = []
        self.rows: list[tuple[float, float, dict[int, float]]] = []
        members = Counter(grouping)
        self.ways = {first: self._allowed(graph.operators[first], allowed) for first in members}
        self.uses = self._uses()
        readers = Counter(use.source for use in self.uses for _ in use.readers)
        self.alone = {
            use.source
            for use in self.uses
            if graph.operators[use.source].given and readers[use.source] == 1 and self.ways[use.source]
        }
        self.strategy_columns: dict[int, list[int]] = {}
        for first, ways in self.ways.items():
            if ways and first not in self.alone:
                columns = [self._column(it, members[first]) for it in ways]
                self.strategy_columns[first] = columns
                self._row(1, 1, dict.fromkeys(columns, 1))
        self.stored: list[tuple[int, int, Strategy]] = []  # column, class, strategy of lone parameters
        for use in self.uses:
            if not self.ways[use.source]:
                continue
            if use.source in self.alone:
                self._lone(use)
            else:
                self._shared(use)

    def _allowed(self, operator: MergedOperator, allowed: Allowed | None) -> tuple[Strategy, ...]:
        ways = strategies(self.graph, operator, self.setting)
        if allowed is None or not ways:
            return ways
        kept = tuple(it for it in ways if allowed(operator, it))
        if not kept:
            raise PlanError(
                f"operator {operator.name}: none of its strategies is of this layout on these links"
            )
        return kept

    def _uses(self) -> list[_CrossingUse]:
        readers: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
        for number, operator in enumerate(self.graph.operators):
            for at, tensor in enumerate(operator.reads):
                readers[tensor.value].append((self.grouping[number], at))
        found: Counter[tuple[int, int, tuple[tuple[int, int], ...]]] = Counter()
        for value, theirs in readers.items():
            source, which = self.graph.maker[value]
            found[self.grouping[source], which, tuple(sorted(theirs))] += 1
        return [_CrossingUse(*key, count) for key, count in found.items()]

    def _column(self, cost: Strategy | ReshardingCost, count: int, *, whole: bool = True) -> int:
        self.costs.append(count * cost.total_ps(self.setting.microbatches))
        self.memory.append(count * cost.memory_bytes)
        self.whole.append(whole)
        return len(self.costs) - 1

    def _row(self, low: float, high: float, entries: Mapping[int, float]) -> None:
        self.rows.append((low, high, dict(entries)))

    def _asked(self, reader: tuple[int, int]) -> dict[ReadLayout, list[int]]:
        """The columns of a reader by what they demand."""
        first, at = reader
        found: defaultdict[ReadLayout, list[int]] = defaultdict(list)
        for column, way in zip(self.strategy_columns[first], self.ways[first], strict=True):
            found[way.demands[at]].append(column)
        return found

    def _tensor(self, reader: tuple[int, int]) -> Tensor:
        return self.graph.operators[reader[0]].reads[reader[1]]

    def _state(self, use: _CrossingUse, way: Strategy) -> State:
        output = self.graph.operators[use.source].outputs[use.which]
        update = None if way.update is None else spec_of(output, way.update)
        return way.outputs[use.which], update

    def _lone(self, use: _CrossingUse) -> None:
        """A parameter that one operator reads: for each demand the ways that may be best."""
        (reader,) = use.readers
        tensor = self._tensor(reader)
        for demand, columns in self._asked(reader).items():
            options = []
            for way in self.ways[use.source]:
                cost = crossing(self.graph, tensor, *self._state(use, way), demand, self.setting)
                if cost is not None:
                    both = ReshardingCost(
                        cost.ps, cost.step_ps + way.step_ps, cost.memory_bytes + way.memory_bytes
                    )
                    options.append((both, way))
            best = _undominated(options, self.setting.microbatches)
            row = dict.fromkeys(columns, -1)
            for both, way in best:
                column = self._column(both, use.count, whole=len(best) > 1)
                self.stored.append((column, use.source, way))
                row[column] = 1
            self._row(0, 0, row)

    def _shared(self, use: _CrossingUse) -> None:
        made: defaultdict[State, list[int]] = defaultdict(list)
        for column, way in zip(self.strategy_columns[use.source], self.ways[use.source], strict=True):
            made[self._state(use, way)].append(column)
        shared: defaultdict[tuple[State, ReadLayout], list[tuple[int, ReshardingCost]]] = defaultdict(list)
        for reader in use.readers:
            tensor = self._tensor(reader)
            asked = self._asked(reader)
            by_state: defaultdict[State, list[int]] = defaultdict(list)
            by_demand: defaultdict[ReadLayout, list[int]] = defaultdict(list)
            for state in made:
                for demand in asked:
                    cost = crossing(self.graph, tensor, *state, demand, self.setting)
                    if cost is None:
                        continue
                    is_alone = len(use.readers) == 1
                    column = self._column(
                        cost if is_alone else ReshardingCost(0, 0, 0), use.count, whole=False
                    )
                    by_state[state].append(column)
                    by_demand[demand].append(column)
                    if not is_alone and (cost.ps or cost.step_ps or cost.memory_bytes):
                        shared[state, demand].append((column, cost))
            for state, columns in made.items():
                self._row(0, 0, dict.fromkeys(columns, -1) | dict.fromkeys(by_state[state], 1))
            for demand, columns in asked.items():
                self._row(0, 0, dict.fromkeys(columns, -1) | dict.fromkeys(by_demand[demand], 1))
        for readings in shared.values():
            # Once for all, and once more what it costs that some keep it.
            least = min((cost for _, cost in readings), key=lambda it: (it.memory_bytes, it.ps))
            together = self._column(least, use.count, whole=False)
            for column, _ in readings:
                self._row(0, math.inf, {together: 1, column: -1})
            keeping = [(column, cost) for column, cost in readings if cost != least]
            if keeping:
                cost = keeping[0][1]
                more = ReshardingCost(cost.ps - least.ps, 0, cost.memory_bytes - least.memory_bytes)
                kept = self._column(more, use.count, whole=False)
                for column, _ in keeping:
                    self._row(0, math.inf, {kept: 1, column: -1})

    def solve(self, memory_bytes: int | None) -> tuple[list[Strategy | None], float] | None:
        """The best choice with a bound of its costs; None where no choice fits the memory."""
        rows = list(self.rows)
        unit = max(max(self.memory, default=1), 1)
        if memory_bytes is not None:
            used = {column: size / unit for column, size in enumerate(self.memory) if size}
            rows.append((-math.inf, memory_bytes / unit, used))
        scale = max(max(self.costs, default=1), 1) / 1000
        model = _model(rows, [it / scale for it in self.costs], self.whole)
        values, bound = _run(model)
        if values is None:
            return None
        return self._chosen(values), bound * scale

    def _chosen(self, values: Any) -> list[Strategy | None]:
        chosen: dict[int, Strategy] = {}
        for first, columns in self.strategy_columns.items():
            best = max(range(len(columns)), key=lambda it: values[columns[it]])
            chosen[first] = self.ways[first][best]
        weight: dict[int, float] = {}
        for column, first, way in self.stored:
            if values[column] > weight.get(first, 0.5):
                weight[first] = values[column]
                chosen[first] = way
        return [chosen.get(self.grouping[number]) for number in range(len(self.grouping))]

    def least_memory(self) -> int:
        """Bytes of one rank without which nothing fits."""
        unit = max(max(self.memory, default=1), 1)
        model = _model(self.rows, [it / unit for it in self.memory], self.whole)
        values, bound = _run(model)
        if values is None:
            raise PlanError("sharding: no choice has links for all of its collectives on this mesh")
        least = cost_of(self.graph, self._chosen(values), self.setting).memory_bytes
        return least if least <= bound * unit * (1 + 1e-6) + 1 else math.floor(bound * unit)


def _undominated(
    options: Sequence[tuple[ReshardingCost, Strategy]], microbatches: int
) -> list[tuple[ReshardingCost, Strategy]]:
    """Those of which none is at least as good in time and memory."""
    best: list[tuple[ReshardingCost, Strategy]] = []
    for cost, way in sorted(options, key=lambda it: (it[0].total_ps(microbatches), it[0].memory_bytes)):
        if all(other.memory_bytes > cost.memory_bytes for other, _ in best):
            best.append((cost, way))
    return best


def _model(
    rows: Sequence[tuple[float, float, Mapping[int, float]]], costs: Sequence[float], whole: Sequence[bool]
) -> Any:
    import highspy

    model = new_model(mip_rel_gap=0.0, mip_abs_gap=1e-7)
    count = len(costs)
    starts = np.cumsum([0, *(len(entries) for _, _, entries in rows)])[:-1].astype(np.int32)
    index = np.array([column for _, _, entries in rows for column in entries], dtype=np.int32)
    value = np.array([it for _, _, entries in rows for it in entries.values()], dtype=np.float64)
    model.addVars(count, np.zeros(count), np.ones(count))
    every = np.arange(count, dtype=np.int32)
    model.changeColsCost(count, every, np.array(costs, dtype=np.float64))
    kinds = [highspy.HighsVarType.kInteger if it else highspy.HighsVarType.kContinuous for it in whole]
    model.changeColsIntegrality(count, every, np.array(kinds))
    lows, highs = (np.array([row[side] for row in rows], dtype=np.float64) for side in (0, 1))
    model.addRows(len(rows), lows, highs, len(index), starts, index, value)
    return model


def _run(model: Any) -> tuple[Any, float]:
    """Values and a lower bound; None for values where there are none.

    Raises:
        PlanError: HiGHS failed.
    """
    status = run(model)
    if "nfeasible" in status:
        return None, math.inf
    if status != "Optimal":
        raise PlanError(f"sharding: its integer program must be solved, HiGHS says {status}")
    return model.getSolution().col_value, float(model.getInfo().mip_dual_bound)
