"""The limit by cuts: how long each step must last so that everything could flow to one place at a time.

All blocks that a target waits for must flow to it together, and so must all blocks that leave the same
sources for one target each; how these questions get in each other's way is left out. A linear program with
one column per step and cuts of the time-expanded graph as rows, found by maximum flows: exact throughout.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import TypeAlias

import numpy as np

from arborcast.synth.chunks.bounds.step_certificate import PathDual, StepLengths
from arborcast.synth.chunks.bounds.time_expanded import TimeExpanded
from arborcast.synth.chunks.problem.instance import ChunkProblem
from arborcast.synth.deadline import Deadline
from arborcast.synth.kernels.compiled import Flags, Ints
from arborcast.synth.kernels.max_flow import dinic, reachable, reaching, residual_graph
from arborcast.synth.lp.linear_program import LinearProgram

Pair: TypeAlias = tuple[int, int]
"""A demand and one of its targets."""

_LARGEST = 2**61
_COARSE = 2**40


@dataclass(frozen=True)
class FlowFeasibility:
    """Whether some blocks can all flow to their targets at once.

    Attributes:
        graph: of the topology and the number of steps.
        pairs: which demands flow to which of their targets, no demand twice.
        supply: blocks by their sources.
        wanted: blocks by their target.
    """

    graph: TimeExpanded
    pairs: tuple[Pair, ...]
    supply: Mapping[frozenset[int], int]
    wanted: Mapping[int, int]

    @classmethod
    def of(cls, graph: TimeExpanded, problem: ChunkProblem, pairs: Iterable[Pair]) -> FlowFeasibility:
        """The question whether these pairs can all be served at once."""
        pairs = tuple(pairs)
        return cls(
            graph,
            pairs,
            Counter(problem.demands[demand].sources for demand, _ in pairs),
            Counter(target for _, target in pairs),
        )

    def violated(self, rounds: Sequence[Fraction]) -> list[Flags]:
        """If steps this long are too short, the source sides of the smallest and the largest minimum cut."""
        scale = math.lcm(*(length.denominator for length in rounds))
        if scale * len(self.pairs) > _LARGEST:
            scale = _COARSE  # what holds for steps a little longer is all that is asked then
        wanted = len(self.pairs) * scale
        lengths = [min(math.ceil(length * scale), wanted) for length in rounds]
        fits = max(lengths) * int(self.capacity.max()) <= _LARGEST
        whole = np.array(lengths, dtype=np.int64 if fits else object)[self.graph.step]
        carried = np.minimum(self.capacity * whole, wanted).astype(np.int64)
        residual = np.zeros(2 * (len(carried) + len(self._units)), dtype=np.int64)
        residual[0 : 2 * len(carried) : 2] = np.where(self.graph.link < 0, wanted, carried)
        residual[2 * len(carried) :: 2] = self._units * scale
        source, sink = self.graph.size, self.graph.size + 1
        if dinic(*self._residual_graph, residual, source, sink, wanted) == wanted:
            return []
        return [
            reachable(*self._residual_graph, residual, source)[: self.graph.size],
            ~reaching(*self._residual_graph, residual, sink)[: self.graph.size],
        ]

    def crossing(self, side: Flags) -> Flags:
        """The useful links that leave a set of vertices."""
        crosses: Flags = side[self.graph.tail] & ~side[self.graph.head] & (self.capacity > 0)
        return crosses

    def separated(self, side: Flags) -> int:
        """How many blocks have all their sources inside a set of vertices and their target outside."""
        held = set(np.flatnonzero(side[: self.graph.topology.ranks]).tolist())
        inside = [sources for sources in self.supply if sources <= held]
        outside = [target for target in self.wanted if not side[self.graph.at_end(target)]]
        if len(self.supply) == 1:
            return sum(self.wanted[target] for target in outside) if inside else 0
        assert len(self.wanted) == 1, "blocks have their sources or their target in common"
        return sum(self.supply[sources] for sources in inside) if outside else 0

    @cached_property
    def capacity(self) -> Ints:
        """That of each arc of the graph which some way from a source to its target may use."""
        sources = frozenset[int]().union(*self.supply)
        after = self.graph.after(np.array(sorted(sources)))
        before = self.graph.before(np.array([self.graph.at_end(target) for target in sorted(self.wanted)]))
        return self.graph.capacity * (after[self.graph.tail] & before[self.graph.head])

    @cached_property
    def _ends(self) -> list[tuple[int, int, int]]:
        """Arcs (tail, head, blocks) from one source through a vertex per set of sources, and to one sink."""
        source, sink = self.graph.size, self.graph.size + 1
        ends = [(self.graph.at_end(target), sink, count) for target, count in self.wanted.items()]
        for position, (sources, count) in enumerate(self.supply.items(), start=sink + 1):
            ends.append((source, position, count))
            ends += [(position, rank, count) for rank in sorted(sources)]
        return ends

    @cached_property
    def _units(self) -> Ints:
        return np.array([count for _, _, count in self._ends], dtype=np.int64)

    @cached_property
    def _residual_graph(self) -> tuple[Ints, Ints, Ints]:
        tails, heads, _ = zip(*self._ends, strict=True)
        return residual_graph(
            self.graph.size + 2 + len(self.supply),
            np.concatenate([self.graph.tail, np.array(tails, dtype=np.int64)]),
            np.concatenate([self.graph.head, np.array(heads, dtype=np.int64)]),
        )


def questions_of(problem: ChunkProblem, graph: TimeExpanded) -> list[FlowFeasibility]:
    """One for each target, and one for each set of sources from which blocks go to one target each."""
    by_target: dict[int, list[Pair]] = defaultdict(list)
    by_sources: dict[frozenset[int], list[Pair]] = defaultdict(list)
    for index, demand in enumerate(problem.demands):
        for target in sorted(demand.targets):
            by_target[target].append((index, target))
        if len(demand.targets) == 1:
            by_sources[demand.sources].append((index, min(demand.targets)))
    several = [pairs for pairs in by_sources.values() if len({target for _, target in pairs}) > 1]
    return [FlowFeasibility.of(graph, problem, pairs) for pairs in (*by_target.values(), *several)]


class CutProgram:
    """The least sum of the lengths of the steps with which every question is answered with yes."""

    def __init__(self, problem: ChunkProblem, steps: int) -> None:
        self._problem = problem
        self._graph = TimeExpanded.of(problem.topology, steps)
        self._questions = questions_of(problem, self._graph)
        self._program = LinearProgram([-1] * steps, scale=1)
        self._cuts: list[tuple[int, Flags]] = []  # of each row: the question and the links that leave the cut
        self._known: set[tuple[int, bytes]] = set()

    def solve(self, deadline: Deadline) -> PathDual:
        """The prices of the cuts, as lengths of the links that leave them.

        Raises:
            TimedOutError: the deadline passed.
            ArithmeticError: HiGHS failed.
        """
        rounds = [Fraction(0)] * self._graph.steps
        prices: Sequence[Fraction] = ()
        while self._add_violated(rounds, deadline):
            self._program.solve(deadline)
            vertex = self._program.exact()
            rounds = [max(length, Fraction(0)) for length in vertex.values]
            prices = vertex.prices
        return self._lengths(self._feasible([max(-price, Fraction(0)) for price in prices]))

    def _add_violated(self, rounds: Sequence[Fraction], deadline: Deadline) -> bool:
        """Add the cuts that such steps are too short for; whether there is a new one."""
        before = len(self._cuts)
        for number, question in enumerate(self._questions):
            deadline.check("the limit by cuts")
            for side in question.violated(rounds):
                crosses = question.crossing(side)
                key = (number, crosses.tobytes())
                if key not in self._known:
                    self._known.add(key)
                    self._add(number, crosses, question.separated(side))
        return len(self._cuts) > before

    def _add(self, number: int, crosses: Flags, blocks: int) -> None:
        self._program.add_row(range(self._graph.steps), self._leaving(crosses), lower=blocks)
        self._cuts.append((number, crosses))

    def _feasible(self, prices: Sequence[Fraction]) -> list[Fraction]:
        """The prices, made smaller where they break the rule of `PathDual` by the tolerance of HiGHS."""
        used = [Fraction(0)] * self._graph.steps
        for price, (_, crosses) in zip(prices, self._cuts, strict=True):
            if price > 0:
                for step, capacity in enumerate(self._leaving(crosses)):
                    used[step] += price * capacity
        excess = max(Fraction(1), *used)
        return [price / excess for price in prices]

    def _leaving(self, crosses: Flags) -> list[int]:
        """The capacity of some arcs in each step."""
        capacity = np.zeros(self._graph.steps, dtype=np.int64)
        np.add.at(capacity, self._graph.step[crosses], self._graph.capacity[crosses])
        return capacity.tolist()

    def _lengths(self, prices: Sequence[Fraction]) -> PathDual:
        priced: dict[int, list[tuple[Fraction, Flags]]] = defaultdict(list)
        for (number, crosses), price in zip(self._cuts, prices, strict=True):
            if price > 0:
                priced[number].append((price, crosses))
        asked: dict[Pair, list[int]] = defaultdict(list)
        for number in priced:
            for pair in self._questions[number].pairs:
                asked[pair].append(number)
        shares: dict[tuple[int, ...], StepLengths] = {}
        assigned = []
        for index, demand in enumerate(self._problem.demands):
            numbers = [tuple(asked[index, target]) for target in sorted(demand.targets)]
            for key in numbers:
                if key not in shares:
                    shares[key] = self._table([cut for number in key for cut in priced[number]])
            assigned.append(numbers)
        position = {key: place for place, key in enumerate(shares)}
        return PathDual(
            tuple(shares.values()),
            tuple(tuple(position[key] for key in numbers) for numbers in assigned),
        )

    def _table(self, cuts: Iterable[tuple[Fraction, Flags]]) -> StepLengths:
        table = [[Fraction(0)] * len(self._problem.topology.links) for _ in range(self._graph.steps)]
        for price, crosses in cuts:
            for arc in np.flatnonzero(crosses):
                table[self._graph.step[arc]][self._graph.link[arc]] += price
        return tuple(map(tuple, table))
