"""The linear program that shares bandwidth among groups, with cuts generated as needed.

Each layer has a share of each link; the trees of a group fit its shares exactly when every cut is crossed by
as much as its roots need and every switch sends on what it receives (see `synth.bounds.capacity_program`),
and what moves along paths is a flow. Shares add up to at most the bandwidth.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from arborcast.synth.deadline import Deadline
from arborcast.synth.errors import NumericalError
from arborcast.synth.groups.problem import Problem
from arborcast.synth.kernels.compiled import Flags, Ints
from arborcast.synth.kernels.max_flow import (
    LARGEST_TOTAL,
    dinic,
    link_arrays,
    reachable,
    reaching,
    residual_graph,
)
from arborcast.synth.lp.linear_program import ExactVertex, LinearProgram

_PARTS = 2**30  # floating values are separated in whole parts of the program's scale
_ENOUGH = 2**50  # more of these parts than any group can ever use on one link
_SLACK = 1e-7  # relative violation below which a floating solution counts as feasible


@dataclass(frozen=True, eq=False)
class Shares:
    """An optimal vertex of one level, exactly.

    Attributes:
        rate: the least rate / weight of the groups without a given rate, GB/s.
        capacity: what each layer may use of each link, GB/s; by the layer, for those of representatives.
        supply: what each rank of the view sends to all others or to each other, by the representative.
        lengths: prices of the links, the largest 1.
    """

    rate: Fraction
    capacity: Mapping[int, tuple[Fraction, ...]]
    supply: Mapping[int, Mapping[int, Fraction]]
    lengths: tuple[Fraction, ...]


@dataclass(frozen=True, eq=False)
class _Growth:
    """A layer of trees as a graph with a further vertex, from which links lead to the roots.

    Attributes:
        layer: its number.
        tails: of the links of the view, in the direction in which trees grow.
        heads: the other ends.
        columns: of the links.
        supply: the column of each root.
        sinks: who must be reached.
        size: number of vertices of the view.
    """

    layer: int
    tails: Ints
    heads: Ints
    columns: Ints
    supply: Mapping[int, int]
    sinks: tuple[int, ...]
    size: int

    def cut(self, side: Flags) -> Counter[int]:
        """What the cut needs to be at least 0: its links, less the supply inside."""
        row = Counter(self.columns[side[self.tails] & ~side[self.heads]].tolist())
        for root, column in self.supply.items():
            if side[root]:
                row[column] -= 1
        return row

    def violated(self, values: Ints, slack: float) -> Iterator[Flags]:
        """The largest and the smallest minimum cut between roots and sink, where they carry too little."""
        sources = sorted(self.supply)
        graph = residual_graph(
            self.size + 1,
            np.concatenate([self.tails, np.full(len(sources), self.size)]),
            np.concatenate([self.heads, np.array(sources, dtype=np.int64)]),
        )
        supplied = values[[self.supply[root] for root in sources]]
        full = np.zeros(len(graph[2]), dtype=np.int64)
        full[0::2] = np.concatenate([values[self.columns], supplied])
        total = int(supplied.sum())
        for sink in self.sinks:
            residual = full.copy()
            if dinic(*graph, residual, self.size, sink, total) < total - int(total * slack):
                yield ~reaching(*graph, residual, sink)[:-1]
                yield reachable(*graph, residual, self.size)[:-1]


class JointProgram:
    """The program of a problem; cuts that one level has needed are there for the next."""

    def __init__(self, problem: Problem, deadline: Deadline) -> None:
        self._problem = problem
        self._deadline = deadline
        self._columns = 1  # column 0 is the rate per unit of weight
        self._supply: dict[int, dict[int, int]] = {}
        self._column = self._number_columns()
        self._growths = [
            self._growth(layer)
            for group in problem.representatives
            if not problem.views[group].is_routed
            for layer in problem.of_group(group)
        ]
        self._cuts: dict[tuple[int, bytes], Counter[int]] = {}
        for growth in self._growths:
            alone = np.eye(growth.size, dtype=np.bool_)
            for side in [~alone[sink] for sink in growth.sinks] + [alone[root] for root in growth.supply]:
                if any(side[root] for root in growth.supply):
                    self._cuts.setdefault((growth.layer, side.tobytes()), growth.cut(side))
        self._fit_rows, self._classes = self._bandwidth_rows()
        self._balance_rows = list(self._balances())

    def _number_columns(self) -> Ints:
        """Columns of rates, then of shares: by layer (row) and link, -1 where the group may not use it."""
        problem = self._problem
        for group in problem.representatives:
            self._supply[group] = {}
            if problem.views[group].is_routed:
                self._supply[group] = dict.fromkeys(problem.views[group].collective.ranks, self._columns)
                self._columns += 1
                continue
            for ranks in problem.roots(group):
                self._supply[group] |= dict.fromkeys(ranks, self._columns)
                self._columns += 1
        usable = np.zeros(problem.pairs.shape, dtype=np.bool_)
        for number, layer in enumerate(problem.layers):
            usable[number, list(problem.views[layer.group].links)] = True
        column = np.full(problem.pairs.shape, -1, dtype=np.int64)
        _, numbers = np.unique(problem.pairs[usable], return_inverse=True)
        column[usable] = self._columns + numbers
        self._columns += int(numbers.max(initial=-1)) + 1
        return column

    def _growth(self, number: int) -> _Growth:
        layer = self._problem.layers[number]
        view = self._problem.views[layer.group]
        src, dst = link_arrays(view.topology)
        tails, heads = (dst, src) if layer.gathers else (src, dst)
        return _Growth(
            number,
            tails,
            heads,
            self._column[number, list(view.links)],
            self._supply[layer.group],
            view.collective.ranks,
            view.topology.size,
        )

    def _bandwidth_rows(self) -> tuple[list[Counter[int]], list[Ints]]:
        """One row for each orbit of links, and the links of each."""
        links = self._problem.topology.links
        index = {(link.src, link.dst): number for number, link in enumerate(links)}
        mirrored = [number for number, layer in enumerate(self._problem.layers) if layer.is_mirrored]
        rows, classes = [], []
        for first in np.unique(self._problem.link_orbits):
            users = self._column[:, first].tolist()
            if mirrored:
                back = index[links[first].dst, links[first].src]
                users += self._column[mirrored, back].tolist()
            row = Counter(column for column in users if column >= 0)
            if row:
                rows.append(row)
                classes.append(np.flatnonzero(self._problem.link_orbits == first))
        return rows, classes

    def _balances(self) -> Iterator[Counter[int]]:
        """Rows that are 0: what leaves a vertex less what enters it, plus what it keeps."""
        for group in self._problem.representatives:
            view = self._problem.views[group]
            src, dst = link_arrays(view.topology)
            for number in self._problem.of_group(group):
                columns = self._column[number, list(view.links)]
                source = self._problem.layers[number].source
                for vertex in range(view.topology.size):
                    if vertex == source or (source is None and vertex < view.topology.ranks):
                        continue
                    row = Counter(columns[src == vertex].tolist())
                    row.subtract(columns[dst == vertex].tolist())
                    if source is not None and vertex < view.topology.ranks:
                        row[self._supply[group][vertex]] += 1
                    yield row

    def _rate(self, group: int) -> Counter[int]:
        """The rate of a group as a sum of columns: of what all roots send, or of a block to or from each."""
        return Counter(self._supply[group].values())

    def solve(self, given: Mapping[int, Fraction], scale: Fraction) -> Shares:
        """The largest least rate / weight of the groups without a given rate.

        Args:
            given: GB/s of representatives, as earlier levels proved them.
            scale: about the least rate, GB/s; what tolerances are relative to.

        Raises:
            TimedOutError: the deadline passed.
            ArithmeticError: HiGHS fails, or the vertex has too many digits for exact flows.
        """
        unit = self._problem.topology.bandwidth_unit
        unit /= math.lcm(*((rate / unit).denominator for rate in given.values()))
        whole_scale = max(1, round(scale / unit))
        program = self._start(given, unit, whole_scale)
        while True:
            self._deadline.check("sharing the links among groups")
            values = program.solve(self._deadline.left_s) * (_PARTS / whole_scale)
            rounded = np.clip(np.round(values), 0, _ENOUGH).astype(np.int64)
            if self._add_violated(program, rounded, _SLACK):
                continue
            vertex = program.exact()
            if not self._add_violated(program, self._whole(vertex.values), 0.0):
                self._check(vertex, unit)
                return self._shares(vertex, unit)

    def _start(self, given: Mapping[int, Fraction], unit: Fraction, scale: int) -> LinearProgram:
        problem = self._problem
        program = LinearProgram((1, *[0] * (self._columns - 1)), scale=scale)
        for row, links in zip(self._fit_rows, self._classes, strict=True):
            capacity = problem.topology.links[links[0]].bandwidth / unit
            program.add_row(list(row), list(row.values()), upper=int(capacity))
        parts = math.lcm(*(weight.denominator for weight in problem.weights))
        for group in problem.representatives:
            row = self._rate(group)
            if group not in given:
                row[0] -= int(problem.weights[group] * parts)
            fixed = int(given[group] / unit) if group in given else None
            program.add_row(list(row), list(row.values()), lower=fixed or 0, upper=fixed)
        seen = set()
        for row in self._balance_rows:
            entries = tuple(sorted((column, count) for column, count in row.items() if count))
            if entries and entries not in seen:
                seen.add(entries)
                program.add_row([c for c, _ in entries], [n for _, n in entries], lower=0, upper=0)
        for row in self._cuts.values():
            program.add_row(list(row), list(row.values()), lower=0)
        return program

    def _add_violated(self, program: LinearProgram, values: Ints, slack: float) -> int:
        """Add the new cuts that whole values violate by more than a relative slack; returns how many."""
        before = len(self._cuts)
        for growth in self._growths:
            for side in growth.violated(values, slack):
                key = (growth.layer, side.tobytes())
                if key not in self._cuts:
                    self._cuts[key] = row = growth.cut(side)
                    program.add_row(list(row), list(row.values()), lower=0)
        return len(self._cuts) - before

    def _whole(self, values: Sequence[Fraction]) -> Ints:
        """The values in parts of their common denominator.

        Raises:
            NumericalError: those do not fit int64.
        """
        common = math.lcm(*(value.denominator for value in values))
        whole = [int(value * common) for value in values]
        if 2 * sum(map(abs, whole)) > LARGEST_TOTAL:
            raise NumericalError(
                "groups: the best shares of the links are not exact in int64 arithmetic; "
                "give the links' bandwidths with fewer digits"
            )
        return np.maximum(0, np.array(whole, dtype=np.int64))

    def _check(self, vertex: ExactVertex, unit: Fraction) -> None:
        """What HiGHS saw to within its tolerance must hold exactly."""
        fits = all(
            sum(count * vertex.values[column] for column, count in row.items()) * unit
            <= self._problem.topology.links[links[0]].bandwidth
            for row, links in zip(self._fit_rows, self._classes, strict=True)
        )
        balanced = all(
            sum(count * vertex.values[column] for column, count in row.items()) == 0
            for row in self._balance_rows
        )
        if min(vertex.values) < 0 or not fits or not balanced:
            raise NumericalError("groups: the best shares of the links do not hold exactly")

    def _shares(self, vertex: ExactVertex, unit: Fraction) -> Shares:
        problem = self._problem
        lengths = [Fraction(0)] * len(problem.topology.links)
        for price, links in zip(vertex.prices, self._classes, strict=False):
            for link in links.tolist():  # the row stands for as many equal rows
                lengths[link] = max(Fraction(0), price) / len(links)
        if problem.is_mirrored:  # prices of both ways together serve as well, and gathering is priced too
            index = {(link.src, link.dst): number for number, link in enumerate(problem.topology.links)}
            back = [index[link.dst, link.src] for link in problem.topology.links]
            lengths = [(length + lengths[other]) / 2 for length, other in zip(lengths, back, strict=True)]
        largest = max(lengths, default=Fraction(0)) or Fraction(1)
        parts = math.lcm(*(weight.denominator for weight in problem.weights))
        return Shares(
            vertex.values[0] * unit * parts,
            {
                layer: tuple(
                    Fraction(0) if column < 0 else vertex.values[column] * unit
                    for column in self._column[layer].tolist()
                )
                for group in problem.representatives
                for layer in problem.of_group(group)
            },
            {
                group: {root: vertex.values[column] * unit for root, column in supply.items()}
                for group, supply in self._supply.items()
            },
            tuple(length / largest for length in lengths),
        )
