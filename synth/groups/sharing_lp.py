"""The linear program that shares bandwidth among groups, with cuts generated as needed.

Each layer has a share of each link; the trees of a group fit its shares exactly when every cut is crossed by
as much as its roots need and every switch sends on what it receives (see `synth.bounds.capacity_program`),
and what moves along paths is a flow. Shares add up to at most the bandwidth.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from arborcast.synth.bounds.capacity_program import Cuts, TreeDirection, add_cut, in_whole_parts, optimum
from arborcast.synth.deadline import Deadline
from arborcast.synth.errors import NumericalError
from arborcast.synth.groups.problem import GroupsProblem
from arborcast.synth.kernels.compiled import Ints
from arborcast.synth.kernels.link_graph import LinkGraph
from arborcast.synth.kernels.max_flow import link_arrays
from arborcast.synth.lp.linear_program import ExactVertex, LinearProgram


@dataclass(frozen=True, eq=False)
class LevelRates:
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


class JointProgram:
    """The program of a problem; cuts that one level has needed are there for the next."""

    def __init__(self, problem: GroupsProblem, deadline: Deadline) -> None:
        self._problem = problem
        self._deadline = deadline
        self._columns = 1  # column 0 is the rate per unit of weight
        self._supply: dict[int, dict[int, int]] = {}
        self._column = self._number_columns()
        self._directions = [
            self._direction(layer)
            for group in problem.representatives
            if not problem.view(group).is_routed
            for layer in problem.of_group(group)
        ]
        self._cuts: Cuts = {}
        for number, direction in enumerate(self._directions):
            for side in direction.alone():
                self._cuts.setdefault((number, side.tobytes()), direction.cut(side))
        self._fit_rows, self._classes = self._bandwidth_rows()
        self._balance_rows = list(self._balances())

    def _number_columns(self) -> Ints:
        """Columns of rates, then of shares: by layer (row) and link, -1 where the group may not use it."""
        problem = self._problem
        for group in problem.representatives:
            self._supply[group] = {}
            if problem.view(group).is_routed:
                self._supply[group] = dict.fromkeys(problem.view(group).collective.ranks, self._columns)
                self._columns += 1
                continue
            for ranks in problem.roots(group):
                self._supply[group] |= dict.fromkeys(ranks, self._columns)
                self._columns += 1
        usable = np.zeros(problem.pairs.shape, dtype=np.bool_)
        for group in problem.representatives:
            for number in problem.of_group(group):
                usable[number, list(problem.view(group).links)] = True
        usable = usable.ravel()[problem.pairs]  # the least pair of an orbit is a representative's
        column = np.full(problem.pairs.shape, -1, dtype=np.int64)
        _, numbers = np.unique(problem.pairs[usable], return_inverse=True)
        column[usable] = self._columns + numbers
        self._columns += int(numbers.max(initial=-1)) + 1
        return column

    def _direction(self, number: int) -> TreeDirection:
        layer = self._problem.layers[number]
        view = self._problem.view(layer.group)
        return TreeDirection(
            LinkGraph(view.topology, turned=layer.gathers),
            self._column[number, list(view.links)],
            self._supply[layer.group],
            view.collective.ranks,
        )

    def _bandwidth_rows(self) -> tuple[list[Counter[int]], list[Ints]]:
        """One row for each orbit of links, and the links of each."""
        back = LinkGraph(self._problem.topology).reverse
        mirrored = [number for number, layer in enumerate(self._problem.layers) if layer.is_mirrored]
        rows, classes = [], []
        for first in np.unique(self._problem.link_orbits):
            users = self._column[:, first].tolist()
            if mirrored:
                users += self._column[mirrored, back[first]].tolist()
            row = Counter(column for column in users if column >= 0)
            if row:
                rows.append(row)
                classes.append(np.flatnonzero(self._problem.link_orbits == first))
        return rows, classes

    def _balances(self) -> Iterator[Counter[int]]:
        """Rows that are 0: what leaves a vertex less what enters it, plus what it keeps."""
        for group in self._problem.representatives:
            view = self._problem.view(group)
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

    def solve(self, given: Mapping[int, Fraction], scale: Fraction) -> LevelRates:
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
        vertex = optimum(program, self._directions, self._cuts, self._deadline)
        if in_whole_parts(vertex.values) is None:
            raise NumericalError(
                "groups: the best shares of the links are not exact in int64 arithmetic; "
                "give the links' bandwidths with fewer digits"
            )
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
            add_cut(program, row)
        return program

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

    def _shares(self, vertex: ExactVertex, unit: Fraction) -> LevelRates:
        problem = self._problem
        lengths = [Fraction(0)] * len(problem.topology.links)
        for price, links in zip(vertex.prices, self._classes, strict=False):
            for link in links.tolist():  # the row stands for as many equal rows
                lengths[link] = max(Fraction(0), price) / len(links)
        if problem.is_mirrored:  # prices of both ways together serve as well, and gathering is priced too
            back = LinkGraph(problem.topology).reverse
            lengths = [(length + lengths[other]) / 2 for length, other in zip(lengths, back, strict=True)]
        largest = max(lengths, default=Fraction(0)) or Fraction(1)
        parts = math.lcm(*(weight.denominator for weight in problem.weights))
        return LevelRates(
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
