"""The linear program that weighs trees: what each should carry so that all groups of trees carry the most.

Rows are links, or orbits of links; the trees of one group carry one share together, and groups of one share
carry the same. A packing of each root's trees is one share, an allreduce over pairs one group. HiGHS sees
every row divided by its capacity and proposes weights and prices; rates and limits are computed exactly.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from arborcast.synth.deadline import Deadline
from arborcast.synth.kernels.compiled import Ints
from arborcast.synth.lp.exact_system import solve_basis
from arborcast.synth.lp.highs import limit_time, new_model
from arborcast.synth.lp.integer_program import IntegerProgram

Floats = NDArray[np.float64]

CLOSE = 1e-9
"""Relative: nearer than that only exact arithmetic can tell."""

_FINE = 1 << 40  # parts of the largest floating price that prices are rounded to, for a limit
_DOUBTFUL = 1e-6  # relative: a limit by rounded prices is asked of exact ones where it is this near
_GAP = 1e-6  # relative: what the branch and bound of HiGHS may leave


class Weighable(Protocol):
    """A tree, or a pair of trees, as the program sees it."""

    @property
    def group(self) -> int:
        """Whose amount it helps to carry."""

    @property
    def used(self) -> Mapping[int, int]:
        """How often it uses each row, where it does."""


@dataclass(frozen=True, eq=False)
class TreeRows:
    """What all trees share.

    Attributes:
        capacities: of each link or orbit, as parts of a rate that is about the largest.
        share_of: for each group the share that it carries.
    """

    capacities: tuple[Fraction, ...]
    share_of: tuple[int, ...]

    @classmethod
    def of(cls, rates: Iterable[Fraction], target: Fraction, groups: int = 1) -> TreeRows:
        """Rates in GB/s as parts of a target, for groups that all carry the same."""
        return cls(tuple(rate / target for rate in rates), (0,) * groups)

    @property
    def shares(self) -> int:
        """How many amounts there are."""
        return max(self.share_of) + 1

    @cached_property
    def whole(self) -> tuple[list[int], int]:
        """Capacities as whole numbers, and how many of these are 1."""
        common = math.lcm(*(capacity.denominator for capacity in self.capacities))
        return [capacity.numerator * (common // capacity.denominator) for capacity in self.capacities], common

    def alone(self, tree: Weighable) -> Fraction:
        """What a tree can carry without the others."""
        return min(self.capacities[row] / count for row, count in tree.used.items())

    def fullest(self, trees: Sequence[Weighable], weights: Sequence[Fraction | int]) -> Fraction:
        """The load of the fullest row: 1 where it is just full."""
        loads: dict[int, Fraction | int] = {}
        for tree, weight in zip(trees, weights, strict=True):
            for row, count in tree.used.items() if weight else ():
                loads[row] = loads.get(row, 0) + weight * count
        return max((load / self.capacities[row] for row, load in loads.items()), default=Fraction(0))

    def filled(self, trees: Sequence[Weighable], weights: Sequence[Fraction | int]) -> list[Fraction]:
        """The weights in proportion, so that the fullest row is just full."""
        fullest = self.fullest(trees, weights) or Fraction(1)
        return [weight / fullest for weight in weights]

    def rate(self, trees: Sequence[Weighable], weights: Sequence[Fraction]) -> Fraction:
        """The sum of the shares; zero where the groups of a share do not carry the same."""
        totals = [Fraction(0)] * len(self.share_of)
        for tree, weight in zip(trees, weights, strict=True):
            totals[tree.group] += weight
        shares = dict(zip(self.share_of, totals, strict=True))
        is_balanced = all(shares[share] == total for share, total in zip(self.share_of, totals, strict=True))
        return sum(shares.values(), Fraction(0)) if is_balanced else Fraction(0)

    def limit(self, prices: Sequence[int], cheapest: Sequence[int | None]) -> Fraction | None:
        """What prices prove of all trees, by weak duality.

        Args:
            prices: of using each row once, not negative.
            cheapest: for each group, what its trees cost at least; None where it has none at all.

        Returns:
            The sum of the shares is at most this; None where these prices prove nothing.
        """
        costs: list[int | None] = [0] * self.shares
        for share, cost in zip(self.share_of, cheapest, strict=True):
            before = costs[share]
            costs[share] = None if before is None or cost is None else before + cost
        # A share one of whose groups has no trees is zero.
        carried = [cost for cost in costs if cost is not None]
        if not carried:
            return Fraction(0)
        capacities, common = self.whole
        worth = sum(price * capacity for price, capacity in zip(prices, capacities, strict=True))
        return Fraction(worth, common * min(carried)) if min(carried) > 0 else None


@dataclass(frozen=True, eq=False)
class Weighed:
    """What HiGHS answers.

    Attributes:
        rate: the sum of the shares.
        weights: of the trees.
        prices: of using a row once.
        values: what a tree of each group is worth: a cheaper one would raise the rate.
    """

    rate: float
    weights: Floats
    prices: Floats
    values: Floats


@dataclass(frozen=True, eq=False)
class BasicSolution:
    """The basic solution that HiGHS names, in exact arithmetic.

    Attributes:
        weights: of the trees, not negative.
        prices: of the rows in proportion, as whole numbers that are not negative.
    """

    weights: list[Fraction]
    prices: list[int]


class TreeProgram:
    """The program over the trees that there are; more can be added, and it goes on from where it stood."""

    def __init__(self, rows: TreeRows, trees: Iterable[Weighable] = (), **options: Any) -> None:
        """Set up the program.

        Args:
            rows: what trees share.
            trees: the first ones.
            options: of HiGHS; the default is the dual simplex, which goes on from where it stood.
        """
        self.rows = rows
        self.trees: list[Weighable] = []
        self._scales = [float(capacity) for capacity in rows.capacities]
        self._model: Any = new_model(**({"solver": "simplex", "presolve": "off"} | options))
        for _ in rows.capacities:
            self._add_row(-np.inf, 1.0)
        for _ in rows.share_of:
            self._add_row(0.0, 0.0)
        for share in range(rows.shares):
            of_share = [self._group_row(group) for group, its in enumerate(rows.share_of) if its == share]
            self._add_column(-1.0, np.inf, dict.fromkeys(of_share, -1.0))
        for tree in trees:
            self.add(tree)

    def add(self, tree: Weighable) -> None:
        """One more tree."""
        entries = {row: count / self._scales[row] for row, count in tree.used.items()}
        self._add_column(0.0, np.inf, {**entries, self._group_row(tree.group): 1.0})
        self.trees.append(tree)

    def solve(self) -> Weighed:
        """The best weights of the trees there are.

        Raises:
            ArithmeticError: HiGHS ended without an optimum.
        """
        if not self._run():
            self._model.clearSolver()  # from the start, where it lost its way among rounding errors
            if not self._run():
                status = self._model.modelStatusToString(self._model.getModelStatus())
                raise ArithmeticError(f"HiGHS ended with {status}")
        solution = self._model.getSolution()
        values, duals = np.array(solution.col_value), np.array(solution.row_dual)
        shares, count = self.rows.shares, len(self._scales)
        return Weighed(
            math.fsum(values[:shares].tolist()),
            np.maximum(values[shares : shares + len(self.trees)], 0.0),
            np.maximum(-duals[:count], 0.0) / np.array(self._scales),
            duals[count : count + len(self.rows.share_of)],
        )

    def vertex(self) -> BasicSolution | None:
        """The last solution exactly; None where the basis is singular or a weight is negative.

        Weights fit the rows up to the tolerance of HiGHS, so that who uses them must fill the rows anew.
        """
        shares, (capacities, common) = self.rows.shares, self.rows.whole
        try:
            values, duals = solve_basis(
                self._model,
                self._matrix,
                lambda row, _: capacities[row] if row < len(capacities) else 0,
                lambda column: int(column < shares),
            )
        except ArithmeticError:
            return None
        none = Fraction(0)
        weights = [values.get(shares + index, none) / common for index in range(len(self.trees))]
        if min(weights, default=none) < 0:
            return None
        prices = [max(duals.get(row, none), none) for row in range(len(capacities))]
        scale = math.lcm(*(price.denominator for price in prices))
        return BasicSolution(weights, [int(price * scale) for price in prices])

    def exact(self, weighed: Weighed) -> list[Fraction]:
        """Exact weights of the last answer, filling the rows: its vertex, or fine parts without one."""
        vertex, rows = self.vertex(), self.rows
        solved = None if vertex is None else rows.filled(self.trees, vertex.weights)
        if solved is not None and rows.rate(self.trees, solved) >= weighed.rate * (1 - CLOSE):
            return solved
        parts = [max(0, round(weight * _FINE)) for weight in weighed.weights.tolist()]
        totals = [0] * len(rows.share_of)
        for tree, part in zip(self.trees, parts, strict=True):
            totals[tree.group] += part
        of_share = dict(zip(rows.share_of, totals, strict=True))
        even = [
            Fraction(part * of_share[rows.share_of[tree.group]], totals[tree.group]) if part else Fraction(0)
            for tree, part in zip(self.trees, parts, strict=True)
        ]
        fine = rows.filled(self.trees, even)
        return max(fine, solved or fine, key=lambda weights: rows.rate(self.trees, weights))

    def limit(self, prices: Sequence[int]) -> Fraction | None:
        """What prices prove of the trees there are; see `TreeRows.limit`."""
        cheapest: list[int | None] = [None] * len(self.rows.share_of)
        for tree in self.trees:
            cost = sum(prices[row] * count for row, count in tree.used.items())
            before = cheapest[tree.group]
            cheapest[tree.group] = cost if before is None else min(before, cost)
        return self.rows.limit(prices, cheapest)

    def cheapest(self, costs: Floats, rate: float) -> Floats | None:
        """The weights that carry a rate, all shares together, at the least cost; None where they cannot."""
        shares = self.rows.shares
        self._fix_total(rate, rate)
        for index, cost in enumerate(costs):
            self._model.changeColCost(shares + index, float(cost))
        return np.array(self._model.getSolution().col_value)[shares:] if self._run() else None

    def _matrix(self, rows: Sequence[int], columns: Sequence[int]) -> Ints:
        place = {row: position for position, row in enumerate(rows)}
        matrix = np.zeros((len(rows), len(columns)), dtype=np.int64)
        for position, column in enumerate(columns):
            for row, entry in self._entries(column).items():
                if row in place:
                    matrix[place[row], position] = entry
        return matrix

    def _entries(self, column: int) -> Mapping[int, int]:
        """A column of the program with its capacities as they are."""
        shares = self.rows.shares
        if column < shares:
            of_share = (group for group, its in enumerate(self.rows.share_of) if its == column)
            return {self._group_row(group): -1 for group in of_share}
        tree = self.trees[column - shares]
        return {**tree.used, self._group_row(tree.group): 1}

    def _group_row(self, group: int) -> int:
        return len(self._scales) + group

    def _fix_total(self, least: float, most: float) -> None:
        """What all shares together must be; no longer as much as possible."""
        row = self._add_row(least, most)
        for share in range(self.rows.shares):
            self._model.changeColCost(share, 0.0)
            self._model.changeCoeff(row, share, 1.0)

    def _add_row(self, least: float, most: float) -> int:
        self._model.addRow(least, most, 0, np.array([], dtype=np.int32), np.array([]))
        return int(self._model.getNumRow()) - 1

    def _add_column(self, cost: float, most: float, entries: Mapping[int, float]) -> int:
        rows = np.array(list(entries), dtype=np.int32)
        self._model.addCol(
            cost, 0.0, most, len(rows), rows, np.array(list(entries.values()), dtype=np.float64)
        )
        return int(self._model.getNumCol()) - 1

    def _add_switch(self, index: int, largest: float, cost: float, limit: int | None = None) -> None:
        """A 0-1 column without which a tree carries nothing; `limit` is a row that counts it."""
        import highspy

        row = self._add_row(-np.inf, 0.0)
        self._model.changeCoeff(row, self.rows.shares + index, 1.0)
        counted = {} if limit is None else {limit: 1.0}
        switch = self._add_column(cost, 1.0, {**counted, row: -largest})
        self._model.changeColIntegrality(switch, highspy.HighsVarType.kInteger)

    def _run(self) -> bool:
        self._model.run()
        return bool(self._model.modelStatusToString(self._model.getModelStatus()) == "Optimal")


def whole_parts(
    rows: TreeRows,
    trees: Sequence[Weighable],
    parts: int,
    costs: Sequence[float] | None,
    *,
    search_limit: int,
    deadline: Deadline,
) -> list[int] | None:
    """Whole weights that add up to so many parts in all shares; None where none were found.

    Args:
        rows: with capacities in whole parts.
        trees: to be weighed.
        parts: of all shares together.
        costs: of each tree that carries anything, to be as little as possible; None for no such choice.
        search_limit: vertices of the branch and bound.
        deadline: when to end it.
    """
    program = IntegerProgram()
    of_share = [program.add_column(parts) for _ in range(rows.shares)]
    of_tree = [program.add_column(parts) for _ in trees]
    uses: dict[int, dict[int, int]] = defaultdict(dict)
    for column, tree in zip(of_tree, trees, strict=True):
        for row, count in tree.used.items():
            uses[row][column] = count
    for row, entries in sorted(uses.items()):
        program.add_row([*entries], [*entries.values()], most=int(rows.capacities[row]))
    for group, share in enumerate(rows.share_of):
        own = [column for column, tree in zip(of_tree, trees, strict=True) if tree.group == group]
        program.add_row([of_share[share], *own], [-1, *[1] * len(own)], least=0, most=0)
    program.add_row(of_share, [1] * len(of_share), least=parts, most=parts)
    for column, cost in zip(of_tree, costs or (), strict=False):
        program.add_row([column, program.add_column(1, cost=cost)], [1, -parts], most=0)
    values = program.best(search_limit, deadline)
    return None if values is None else [values[column] for column in of_tree]


def few(
    rows: TreeRows,
    trees: Sequence[Weighable],
    *,
    most: int | None,
    rate: float | None,
    search_limit: int,
    seed: int,
    seconds: float | None,
) -> tuple[list[int] | None, bool]:
    """Which trees to use, by a branch and bound of HiGHS.

    Args:
        rows: what trees share.
        trees: to choose from.
        most: so many of each group at most, at the best rate; None for as few as possible in all.
        rate: that they must reach, of all shares together; None with `most`.
        search_limit: vertices of the branch and bound.
        seed: of HiGHS.
        seconds: that it may take.

    Returns:
        The trees, None where none were found; and whether HiGHS calls that the optimum.
    """
    program = TreeProgram(
        rows,
        trees,
        solver="choose",
        presolve="choose",
        mip_max_nodes=search_limit,
        mip_rel_gap=_GAP,
        seed=seed,
    )
    model, shares = program._model, rows.shares
    limits: dict[int, int] = {}
    if most is not None:
        limits = {group: program._add_row(-np.inf, float(most)) for group in range(len(rows.share_of))}
    if rate is not None:
        program._fix_total(rate * (1 - CLOSE), rate)
    for index, tree in enumerate(trees):
        largest, cost = float(rows.alone(tree)), 1.0 if most is None else 0.0
        program._add_switch(index, largest, cost, limits.get(tree.group))
    limit_time(model, seconds)
    model.run()
    solution = model.getSolution()
    if not solution.value_valid:
        return None, False
    closed = model.modelStatusToString(model.getModelStatus()) == "Optimal"
    switches = list(solution.col_value)[shares + len(trees) :]
    return [index for index, on in enumerate(switches) if on > 0.5], closed


def whole_prices(prices: Floats, finest: int = _FINE) -> Ints:
    """Prices as whole numbers, the largest of which is `finest`; what is nearly equal becomes equal."""
    largest = float(prices.max())
    if largest <= 0:
        return np.zeros(len(prices), dtype=np.int64)
    return np.floor(prices / largest * finest + 0.5).astype(np.int64)


def crowded_prices(load: Ints | Floats, capacities: Floats, steepness: int, finest: int) -> Ints:
    """What one more tree on each row costs: its crowding then, to the power of `steepness`; `finest` at most.

    Powers are multiplications, which every machine rounds alike; exponentials are not.
    """
    crowding = (load + 1) / capacities
    crowding /= crowding.max()
    cost = 1 / capacities
    for _ in range(steepness):
        cost = cost * crowding
    return np.maximum(1, whole_prices(cost, finest))


def is_below(program: TreeProgram, weighed: Weighed, rate: Fraction, *, strictly: bool = True) -> bool:
    """Whether it is proved that the trees of a solved program reach less than a rate, or not more than it.

    Args:
        program: just solved.
        weighed: its answer.
        rate: the sum of the shares.
        strictly: whether the rate itself must be out of reach.
    """
    if not rate or weighed.rate > float(rate) * (1 + CLOSE):
        return False

    def proves(prices: Sequence[int]) -> bool:
        limit = program.limit(prices)
        return limit is not None and (limit < rate or (limit == rate and not strictly))

    if proves(whole_prices(weighed.prices).tolist()):
        return True
    if weighed.rate < float(rate) * (1 - _DOUBTFUL):
        return False
    vertex = program.vertex()
    return vertex is not None and proves(vertex.prices)
