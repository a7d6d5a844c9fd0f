"""Weights in few parts: whole trees, each grown where those before it have left room.

Where a tree has a choice among alike links it takes the one that is used least, counting the trees before
it; so a few trees together often use every orbit to the last part, which weights found by a linear program
do with enormous denominators. Where they do not, most of the linear program's weights are kept, rounded
down, and only the rest is grown.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction

import numpy as np

from arborcast.synth.kernels.compiled import Ints
from arborcast.synth.lp.tree_program import Weighed
from arborcast.synth.packing.symmetric.columns import Column
from arborcast.synth.packing.symmetric.generation import Generation
from arborcast.synth.packing.symmetric.weights import Chosen, filled

_MOST_EDGES = 1 << 17  # tree edges that whole parts are worth
_HOPELESS = 1.25  # uses over room: here prices among equals do not decide, and more trees do not help
_LEFT_OPEN = (Fraction(1), Fraction(1, 4), Fraction(1, 16), Fraction(0))
"""The part of the weights that is grown anew, besides what rounding leaves."""


def in_few_parts(
    generation: Generation,
    lengths: Sequence[Ints],
    columns: Sequence[Column],
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
                    generation.pool.add(column)
                used = np.sum([column.uses for column in grown] or [(0,) * len(room)], axis=0).tolist()
                worst = min(worst, max(load / max(1, left) for load, left in zip(used, room, strict=True)))
                fits = all(load <= left for load, left in zip(used, room, strict=True))
                if fits and all(column.height <= max_height for column in grown):
                    return _merged(generation, [*columns, *grown], [*kept, *[1] * len(grown)], parts)
            if not any(kept) and worst > _HOPELESS:
                return None
    return None


def _starts(
    generation: Generation, columns: Sequence[Column], weighed: Weighed, parts: int
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


def _room(generation: Generation, columns: Sequence[Column], kept: Sequence[int], parts: int) -> list[int]:
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


def _merged(generation: Generation, columns: Sequence[Column], counts: Sequence[int], parts: int) -> Chosen:
    """Trees that came up several times, once with their weights together."""
    first: dict[tuple[int, tuple[int, ...]], Column] = {}
    weight: Counter[tuple[int, tuple[int, ...]]] = Counter()
    for column, count in zip(columns, counts, strict=True):
        if count:
            key = (column.group, column.uses)
            first.setdefault(key, column)
            weight[key] += count
    weights = [Fraction(weight[key], parts) for key in first]
    return filled(generation.problem, list(first.values()), weights)
