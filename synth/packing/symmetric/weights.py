"""Exact weights of chosen trees: whole parts of a small number where they reach the rate, else the vertex.

A chunk per tree is the easier to lay out the simpler its share is, so the smallest common denominator is
looked for by small integer programs; the vertex of the linear program is exact too, whatever it looks like.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

from arborcast.synth.deadline import Deadline
from arborcast.synth.lp.tree_program import CLOSE, TreeProgram, TreeRows, Weighed
from arborcast.synth.lp.tree_program import whole_parts as program_in_parts
from arborcast.synth.packing.symmetric.columns import Column
from arborcast.synth.packing.symmetric.generation import price_of
from arborcast.synth.packing.symmetric.problem import Problem

_MULTIPLES = (1, 2, 3, 4, 6, 8, 12, 16, 24)
_LARGEST_PARTS = 4096
_SEARCH_LIMIT = 2000  # vertices of a branch and bound, times columns, that a small denominator is worth
_COUNTED_UP_TO = 24  # parts; of more, the number of trees is left to chance
_MANY, _TRIES_OF_MANY = 50, 3  # of more columns, so few denominators are tried
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
    program = TreeProgram(problem.rows, columns)
    weighed = program.solve()
    # What the floating rate nearly reaches is tried first: the target, or what is exact of the best.
    vertex = None if weighed.rate >= 1 - CLOSE else program.exact(weighed)
    rate = Fraction(1) if vertex is None else problem.rows.rate(columns, vertex)
    kept = worthwhile(problem, columns, weighed)
    numbers = list(parts or denominators(problem, weighed))
    for number in numbers if len(kept) <= _MANY else numbers[:_TRIES_OF_MANY]:
        if deadline.has_passed:
            break
        counts = whole_parts(problem, kept, rate, number, deadline)
        if counts is not None:
            return filled(problem, kept, [Fraction(count) for count in counts])
    return filled(problem, columns, vertex or program.exact(weighed))


def worthwhile(problem: Problem, columns: Sequence[Column], weighed: Weighed) -> list[Column]:
    """The trees that cost no more than their group pays; those in use first, then the lowest."""
    ranked = []
    for index, (column, weight) in enumerate(zip(columns, weighed.weights, strict=True)):
        excess = price_of(column, weighed) - weighed.values[column.group]
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
    problem: Problem, columns: Sequence[Column], rate: Fraction, parts: int, deadline: Deadline
) -> list[int] | None:
    """Whole weights that add up to `parts` and reach the rate, of few trees; None where none were found."""
    limits = [math.floor(budget * parts / rate) for budget in problem.budgets]
    highest = 1 + max(column.height for column in columns)
    # Few trees, low ones among equals.
    costs = [1.0 + column.height / (2 * highest) for column in columns] if parts <= _COUNTED_UP_TO else None
    rows = TreeRows(tuple(map(Fraction, limits)), problem.rows.share_of)
    search_limit = max(5, _SEARCH_LIMIT // len(columns))
    counts = program_in_parts(rows, columns, parts, costs, search_limit=search_limit, seconds=deadline.left_s)
    if counts is None or not problem.rows.rate(columns, [Fraction(count) for count in counts]):
        return None
    loads = [0] * len(limits)
    for column, count in zip(columns, counts, strict=True):
        for orbit, uses in column.used.items():
            loads[orbit] += uses * count
    return counts if all(load <= limit for load, limit in zip(loads, limits, strict=True)) else None


def filled(problem: Problem, columns: Sequence[Column], weights: Sequence[Fraction]) -> Chosen:
    """The trees that carry something, with weights so that the fullest orbit is full."""
    exact = problem.rows.filled(columns, weights)
    used = [(column, weight) for column, weight in zip(columns, exact, strict=True) if weight]
    totals: dict[int, Fraction] = {}
    for column, weight in used:
        totals[column.group] = totals.get(column.group, Fraction(0)) + weight
    parts = math.lcm(*((weight / totals[column.group]).denominator for column, weight in used))
    kept, its_weights = zip(*used, strict=True)
    return Chosen(kept, its_weights, parts, problem.rows.rate(kept, its_weights))


def exact_rate(problem: Problem, columns: Sequence[Column]) -> Fraction:
    """The best rate of some trees that exact weights were found for."""
    program = TreeProgram(problem.rows, columns)
    return problem.rows.rate(columns, program.exact(program.solve()))
