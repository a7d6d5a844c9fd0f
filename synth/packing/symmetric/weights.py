"""Exact weights of chosen trees: whole parts of a small number where they reach the rate, else the vertex.

A chunk per tree is the easier to lay out the simpler its share is, so the smallest common denominator is
looked for by small integer programs; the vertex of the linear program is exact too, whatever it looks like.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from synth.bounds.linear_program import LinearProgram
from synth.deadline import Deadline
from synth.highs import limit_time, new_model
from synth.packing.symmetric.generation import CLOSE
from synth.packing.symmetric.master import Column, Master, Weighed, load_of
from synth.packing.symmetric.problem import Problem

_MULTIPLES = (1, 2, 3, 4, 6, 8, 12, 16, 24)
_LARGEST_PARTS = 4096
_SEARCH_LIMIT = 2000  # vertices of a branch and bound, times columns, that a small denominator is worth
_COUNTED_UP_TO = 24  # parts; of more, the number of trees is left to chance
_MANY, _TRIES_OF_MANY = 50, 3  # of more columns, so few denominators are tried
_FINE = 1 << 20  # parts where even the vertex is of no use
_MOST_COLUMNS = 100  # the integer programs of more take too long


@dataclass(frozen=True, slots=True)
class Chosen:
    """Trees with exact weights.

    Attributes:
        columns: the trees.
        weights: of each, as a part of the target; such that the fullest orbit is just full.
        parts: the common denominator of the weights of a group, as parts of the group's amount.
        rate: the sum of the shares, as a part of the target.
    """

    columns: tuple[Column, ...]
    weights: tuple[Fraction, ...]
    parts: int
    rate: Fraction

    @property
    def height(self) -> int:
        """Of the highest tree."""
        return max(column.height for column in self.columns)


def weigh_exactly(
    problem: Problem, columns: Sequence[Column], deadline: Deadline, parts: Sequence[int] | None = None
) -> Chosen:
    """The best weights of some trees, exactly.

    Args:
        problem: what is packed.
        columns: the trees there are; each group has some.
        deadline: after it the first way to exact weights is taken.
        parts: denominators to try; None for those that the full orbits suggest.
    """
    weighed = Master(problem, columns).solve()
    kept = worthwhile(problem, columns, weighed)
    numbers = list(parts or denominators(problem, weighed))
    for number in numbers if len(kept) <= _MANY else numbers[:_TRIES_OF_MANY]:
        if deadline.has_passed:
            break
        counts = whole_parts(problem, kept, weighed.rate, number, deadline)
        if counts is not None:
            return filled(problem, kept, [Fraction(count) for count in counts])
    return _vertex(problem, columns, weighed)


def worthwhile(problem: Problem, columns: Sequence[Column], weighed: Weighed) -> list[Column]:
    """The trees that cost no more than their group pays; those in use first, then the lowest."""
    ranked = []
    for index, (column, weight) in enumerate(zip(columns, weighed.weights, strict=True)):
        excess = float(weighed.prices @ np.array(column.uses)) - weighed.values[column.group]
        if weight > CLOSE or excess <= 1e-7:
            ranked.append((weight <= CLOSE, column.height, index))
    kept = sorted(index for _, _, index in sorted(ranked)[:_MOST_COLUMNS])
    return [columns[index] for index in kept]


def denominators(problem: Problem, weighed: Weighed) -> Iterator[int]:
    """Orbits that are full in every optimum allow only multiples of the denominators of their budgets."""
    if weighed.rate < 1 - CLOSE:
        yield from (1, 2, 3, 4, 5, 6, 8, 10, 12, 16)
        return
    full = [budget for budget, price in zip(problem.budgets, weighed.prices, strict=True) if price > 1e-7]
    natural = math.lcm(*(budget.denominator for budget in full))
    multiples = _MULTIPLES if natural <= _COUNTED_UP_TO else _MULTIPLES[:4]
    yield from (natural * multiple for multiple in multiples if natural * multiple <= _LARGEST_PARTS)


def whole_parts(
    problem: Problem, columns: Sequence[Column], rate: float, parts: int, deadline: Deadline
) -> list[int] | None:
    """Whole weights that add up to `parts` and reach the rate, of few trees; None where none were found."""
    shares, groups = problem.shares, len(problem.groups)
    exact = rate >= 1 - CLOSE
    limits = [
        math.floor(budget * parts) if exact else math.floor(float(budget) * parts / rate * (1 + CLOSE))
        for budget in problem.budgets
    ]
    model = new_model(mip_max_nodes=max(5, _SEARCH_LIMIT // len(columns)))
    limit_time(model, deadline.left_s)
    nothing = (0, np.array([], dtype=np.int32), np.array([], dtype=np.float64))
    for limit in limits:
        model.addRow(-np.inf, float(limit), *nothing)
    for _ in range(groups):
        model.addRow(0.0, 0.0, *nothing)
    model.addRow(float(parts), float(parts), *nothing)  # the shares together
    for share in range(shares):
        rows = [len(limits) + i for i, group in enumerate(problem.groups) if group.share == share]
        entries = np.array([*[-1.0] * len(rows), 1.0])
        _add(model, 0.0, parts, [*rows, len(limits) + groups], entries)
    for column in columns:
        used = np.flatnonzero(column.uses)
        entries = np.append(np.array(column.uses, dtype=np.float64)[used], 1.0)
        _add(model, 0.0, parts, [*used.tolist(), len(limits) + column.group], entries)
    if parts <= _COUNTED_UP_TO:
        _count_trees(model, shares, columns, parts)
    model.run()
    solution = model.getSolution()
    if not solution.value_valid:
        return None
    counts = [round(value) for value in list(solution.col_value)[shares : shares + len(columns)]]
    loads = [0] * len(limits)
    for column, count in zip(columns, counts, strict=True):
        for orbit, uses in enumerate(column.uses):
            loads[orbit] += uses * count
    fits = all(load <= limit for load, limit in zip(loads, limits, strict=True))
    return counts if fits and sum(counts) and _is_balanced(problem, columns, counts) else None


def _add(model: Any, cost: float, most: int, rows: Sequence[int], entries: Any) -> None:
    import highspy

    model.addCol(cost, 0.0, float(most), len(rows), np.array(rows, dtype=np.int32), entries)
    model.changeColIntegrality(model.getNumCol() - 1, highspy.HighsVarType.kInteger)


def _count_trees(model: Any, first: int, columns: Sequence[Column], parts: int) -> None:
    """A switch per tree that is on where the tree carries anything: few trees, low ones among equals."""
    highest = 1 + max(column.height for column in columns)
    for index, column in enumerate(columns):
        model.addRow(-np.inf, 0.0, 1, np.array([first + index], dtype=np.int32), np.array([1.0]))
        row = model.getNumRow() - 1
        _add(model, 1.0 + column.height / (2 * highest), 1, [row], np.array([-float(parts)]))


def _is_balanced(problem: Problem, columns: Sequence[Column], weights: Sequence[Fraction | int]) -> bool:
    """Whether the groups of each share carry the same."""
    totals = [Fraction(0)] * len(problem.groups)
    for column, weight in zip(columns, weights, strict=True):
        totals[column.group] += weight
    by_share: dict[int, set[Fraction]] = {}
    for group, total in zip(problem.groups, totals, strict=True):
        by_share.setdefault(group.share, set()).add(total)
    return all(len(found) == 1 for found in by_share.values())


def filled(problem: Problem, columns: Sequence[Column], weights: Sequence[Fraction]) -> Chosen:
    """The trees that carry something, with weights so that the fullest orbit is full."""
    fullest = load_of(problem, columns, weights)
    used = [(column, weight / fullest) for column, weight in zip(columns, weights, strict=True) if weight]
    totals: dict[int, Fraction] = {}
    for column, weight in used:
        totals[column.group] = totals.get(column.group, Fraction(0)) + weight
    parts = math.lcm(*((weight / totals[column.group]).denominator for column, weight in used))
    shares = {problem.groups[group].share: total for group, total in totals.items()}
    rate = sum(shares.values(), Fraction(0))
    return Chosen(tuple(column for column, _ in used), tuple(weight for _, weight in used), parts, rate)


def _vertex(problem: Problem, columns: Sequence[Column], weighed: Weighed) -> Chosen:
    """The vertex of the linear program, exactly; fine parts where its basis cannot be solved."""
    shares, used = problem.shares, [i for i, weight in enumerate(weighed.weights) if weight > CLOSE]
    kept = [columns[index] for index in used]
    program = LinearProgram([1] * shares + [0] * len(kept), 1)
    for orbit, budget in enumerate(problem.budgets):
        users = [(i, column.uses[orbit]) for i, column in enumerate(kept) if column.uses[orbit]]
        program.add_row(
            [shares + i for i, _ in users],
            [budget.denominator * uses for _, uses in users],
            upper=budget.numerator,
        )
    for index, group in enumerate(problem.groups):
        members = [shares + i for i, column in enumerate(kept) if column.group == index]
        program.add_row([group.share, *members], [-1, *[1] * len(members)], lower=0, upper=0)
    try:
        program.solve()
        weights = list(program.exact().values[shares:])
    except ArithmeticError:
        weights = []
    if weights and min(weights) >= 0 and any(weights) and _is_balanced(problem, kept, weights):
        return filled(problem, kept, weights)
    return filled(problem, kept, _fine_parts(problem, kept, weighed.weights[used]))


def _fine_parts(problem: Problem, columns: Sequence[Column], weights: Any) -> list[Fraction]:
    """Floating weights as parts of each share, rounded so that the groups of a share carry the same."""
    shares: dict[int, int] = {}
    totals: dict[int, float] = {}
    for column, weight in zip(columns, weights, strict=True):
        totals[column.group] = totals.get(column.group, 0.0) + float(weight)
    for group, total in totals.items():
        shares.setdefault(problem.groups[group].share, round(total * _FINE))
    rounded = [
        Fraction(round(float(weight) / totals[column.group] * _FINE))
        for column, weight in zip(columns, weights, strict=True)
    ]
    sums: dict[int, Fraction] = {}
    for column, part in zip(columns, rounded, strict=True):
        sums[column.group] = sums.get(column.group, Fraction(0)) + part
    return [
        part / sums[column.group] * shares[problem.groups[column.group].share]
        for column, part in zip(columns, rounded, strict=True)
    ]
