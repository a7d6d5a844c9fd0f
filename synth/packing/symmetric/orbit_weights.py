"""What each tree carries, exactly: of all trees that were met, of few of them, or in few equal parts.

A chunk per tree is the easier to lay out the simpler its share is, so the smallest common denominator is
looked for: by small integer programs over the trees that are known, and by growing whole trees, each where
those before it have left room. A tree with a choice among alike links takes the one that is used least, so
that a few together often use every orbit to the last part. Where nothing of this reaches the rate, the vertex
of the linear program is exact, whatever it looks like.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from arborcast.synth.deadline import Deadline
from arborcast.synth.kernels.compiled import Ints
from arborcast.synth.lp.choice import TreeCandidates
from arborcast.synth.lp.master import cost_of
from arborcast.synth.lp.sparsify import few_as_asked
from arborcast.synth.lp.tree_program import CLOSE, TreeProgram, TreeRows, Weighed
from arborcast.synth.lp.tree_program import whole_parts as program_in_parts
from arborcast.synth.packing.symmetric.generation import Generation
from arborcast.synth.packing.symmetric.orbit_problem import OrbitTree, Problem
from arborcast.synth.schedule import Settings
from arborcast.synth.solve_options import SolveOptions

MOST_PARTS = 10**6
"""Where a loss is allowed, shares of a larger denominator are rounded within it."""

_MULTIPLES = (1, 2, 3, 4, 6, 8, 12, 16, 24)
_LARGEST_PARTS = 4096
_SEARCH_LIMIT = 2000  # vertices of a branch and bound, times columns, that a small denominator is worth
_COUNTED_UP_TO = 24  # parts; of more, the number of trees is left to chance
_MANY, _TRIES_OF_MANY = 50, 3  # of more columns, so few denominators are tried
_MOST_COLUMNS = 100  # the integer programs of more take too long
_MOST_CANDIDATES = 120  # likewise


@dataclass(frozen=True, slots=True)
class Chosen:
    """Trees with exact weights.

    Attributes:
        columns: the trees.
        weights: of each, as a part of the target; such that the fullest orbit is just full.
        parts: the common denominator of the weights of a group, as parts of the group's amount.
        rate: the sum of the shares, as a part of the target.
    """

    columns: tuple[OrbitTree, ...]
    weights: tuple[Fraction, ...]
    parts: int
    rate: Fraction

    @property
    def height(self) -> int:
        """Of the highest tree."""
        return max(column.height for column in self.columns)


def weigh_exactly(
    problem: Problem, columns: Sequence[OrbitTree], deadline: Deadline, parts: Sequence[int] | None = None
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


def worthwhile(problem: Problem, columns: Sequence[OrbitTree], weighed: Weighed) -> list[OrbitTree]:
    """The trees that cost no more than their group pays; those in use first, then the lowest."""
    ranked = []
    for index, (column, weight) in enumerate(zip(columns, weighed.weights, strict=True)):
        excess = cost_of(column, weighed) - weighed.values[column.group]
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
    problem: Problem, columns: Sequence[OrbitTree], rate: Fraction, parts: int, deadline: Deadline
) -> list[int] | None:
    """Whole weights that add up to `parts` and reach the rate, of few trees; None where none were found."""
    limits = [math.floor(budget * parts / rate) for budget in problem.budgets]
    highest = 1 + max(column.height for column in columns)
    # Few trees, low ones among equals.
    costs = [1.0 + column.height / (2 * highest) for column in columns] if parts <= _COUNTED_UP_TO else None
    rows = TreeRows(tuple(map(Fraction, limits)), problem.rows.share_of)
    search_limit = max(5, _SEARCH_LIMIT // len(columns))
    return program_in_parts(rows, columns, parts, costs, search_limit=search_limit, deadline=deadline)


def filled(problem: Problem, columns: Sequence[OrbitTree], weights: Sequence[Fraction]) -> Chosen:
    """The trees that carry something, with weights so that the fullest orbit is full."""
    exact = problem.rows.filled(columns, weights)
    used = [(column, weight) for column, weight in zip(columns, exact, strict=True) if weight]
    totals: dict[int, Fraction] = {}
    for column, weight in used:
        totals[column.group] = totals.get(column.group, Fraction(0)) + weight
    parts = math.lcm(*((weight / totals[column.group]).denominator for column, weight in used))
    kept, its_weights = zip(*used, strict=True)
    return Chosen(kept, its_weights, parts, problem.rows.rate(kept, its_weights))


def in_fewer_parts(problem: Problem, chosen: Chosen, least: Fraction) -> Chosen:
    """The same trees in the fewest parts that are a power of two and keep a rate; all up to `MOST_PARTS`.

    Args:
        problem: what is packed.
        chosen: trees with exact weights.
        least: the rate to be kept, as a part of the target.

    Returns:
        What was chosen where its parts are no more than `MOST_PARTS`, or where none as few keep the rate.
    """
    if chosen.parts <= MOST_PARTS:
        return chosen
    groups = [column.group for column in chosen.columns]
    totals = [
        sum((w for w, its in zip(chosen.weights, groups, strict=True) if its == group), Fraction(0))
        for group in range(len(problem.groups))
    ]
    parts = 1
    while 2 * parts <= MOST_PARTS:
        parts *= 2
        exact = [w / totals[its] * parts for w, its in zip(chosen.weights, groups, strict=True)]
        counts = [math.floor(amount) for amount in exact]
        lacking = [parts] * len(totals)
        for count, its in zip(counts, groups, strict=True):
            lacking[its] -= count
        for index in sorted(range(len(counts)), key=lambda index: (counts[index] - exact[index], index)):
            if lacking[groups[index]]:
                lacking[groups[index]] -= 1
                counts[index] += 1
        fewer = filled(problem, chosen.columns, [Fraction(count) for count in counts])
        if fewer.rate >= least:
            return fewer
    return chosen


def exact_rate(problem: Problem, columns: Sequence[OrbitTree]) -> Fraction:
    """The best rate of some trees that exact weights were found for."""
    program = TreeProgram(problem.rows, columns)
    return problem.rows.rate(columns, program.exact(program.solve()))


def few_trees(
    problem: Problem, columns: Sequence[OrbitTree], options: SolveOptions, deadline: Deadline
) -> tuple[list[OrbitTree], Settings]:
    """As few trees per group as is asked for, and what is known about them."""
    weights = TreeProgram(problem.rows, columns).solve().weights
    if len(columns) > _MOST_CANDIDATES:  # those that carry something, then those that carry most alone
        alone = [-problem.rows.alone(column) for column in columns]
        order = sorted(range(len(columns)), key=lambda one: (weights[one] <= CLOSE, alone[one], one))
        kept = sorted(order[:_MOST_CANDIDATES])
        columns, weights = [columns[index] for index in kept], weights[kept]
    choice = TreeCandidates(problem.rows, tuple(columns))
    chosen, facts = few_as_asked(choice, np.flatnonzero(weights > CLOSE).tolist(), options, deadline)
    return [columns[index] for index in chosen], facts


_MOST_EDGES = 1 << 17  # tree edges that whole parts are worth
_HOPELESS = 1.25  # uses over room: here prices among equals do not decide, and more trees do not help
_LEFT_OPEN = (Fraction(1), Fraction(1, 4), Fraction(1, 16), Fraction(0))
"""The part of the weights that is grown anew, besides what rounding leaves."""


def small_denominators(
    generation: Generation,
    lengths: Sequence[Ints],
    columns: Sequence[OrbitTree],
    weighed: Weighed,
    denominators: Iterable[int],
    max_height: int,
) -> Chosen | None:
    """Trees each of which carries a whole number of equal parts, at the target; None where none were found.

    All trees that are met are left in the pool of the generation.

    Args:
        generation: whose problem it is; its groups all carry the same.
        lengths: of the orbits: each makes a contraction in which to look.
        columns: trees that reach the target together.
        weighed: at these weights.
        denominators: how many parts for each group, to be tried in turn.
        max_height: higher trees are no answer.
    """
    problem = generation.problem
    allowed = generation.grown + max(len(problem.groups), _MOST_EDGES // problem.topology.ranks)
    for parts in denominators if problem.shares == 1 else ():
        for kept, missing in _starts(generation, columns, weighed, parts):
            room = _room(generation, columns, kept, parts)
            worst = math.inf
            for one in lengths if min(room) >= 0 else ():
                generation.deadline.check("the search for few parts")
                if generation.grown + sum(missing) > allowed:
                    continue
                grown = list(generation.series(one, missing, _steepness(room)))
                for column in grown:
                    generation.master.add(column)
                used = np.sum([column.uses for column in grown] or [(0,) * len(room)], axis=0).tolist()
                worst = min(worst, max(load / max(1, left) for load, left in zip(used, room, strict=True)))
                fits = all(load <= left for load, left in zip(used, room, strict=True))
                if fits and all(column.height <= max_height for column in grown):
                    return _merged(generation, [*columns, *grown], [*kept, *[1] * len(grown)], parts)
            if not any(kept) and worst > _HOPELESS:
                return None
    return None


def _starts(
    generation: Generation, columns: Sequence[OrbitTree], weighed: Weighed, parts: int
) -> Iterator[tuple[list[int], list[int]]]:
    """How many parts of each known tree are kept, and how many trees each group lacks then."""
    seen: set[tuple[int, ...]] = set()
    for left_open in _LEFT_OPEN:
        scale = parts * float(1 - left_open) / weighed.rate
        kept = [math.floor(float(weight) * scale + 1e-6) for weight in weighed.weights]
        carried: Counter[int] = Counter()
        for column, count in zip(columns, kept, strict=True):
            carried[column.group] += count
        missing = [parts - carried[group] for group in range(len(generation.problem.groups))]
        if tuple(kept) not in seen and min(missing) >= 0:
            seen.add(tuple(kept))
            yield kept, missing


def _room(generation: Generation, columns: Sequence[OrbitTree], kept: Sequence[int], parts: int) -> list[int]:
    """What is left of each orbit."""
    room = [math.floor(budget * parts) for budget in generation.problem.budgets]
    for column, count in zip(columns, kept, strict=True):
        if count:
            room = [left - count * uses for left, uses in zip(room, column.uses, strict=True)]
    return room


def _steepness(room: Sequence[int]) -> Ints:
    """An orbit with little left becomes dear soon."""
    least = max(1, min(room))
    return np.array([max(1, (least << 16) // max(1, left)) for left in room], dtype=np.int64)


def _merged(
    generation: Generation, columns: Sequence[OrbitTree], counts: Sequence[int], parts: int
) -> Chosen:
    """Trees that came up several times, once with their weights together."""
    first: dict[tuple[int, tuple[int, ...]], OrbitTree] = {}
    weight: Counter[tuple[int, tuple[int, ...]]] = Counter()
    for column, count in zip(columns, counts, strict=True):
        if count:
            key = (column.group, column.uses)
            first.setdefault(key, column)
            weight[key] += count
    weights = [Fraction(weight[key], parts) for key in first]
    return filled(generation.problem, list(first.values()), weights)
